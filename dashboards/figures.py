"""Figures that several dashboards show: each has one definition."""

from __future__ import annotations

from kvscope import metrics as m
from kvscope import steps
from kvscope.dashboards.panels import limits
from kvscope.dashboards.parameters import Parameters
from kvscope.dashboards.promql import (
    RANGE,
    STEP,
    grown,
    highest,
    increase,
    quantile,
    rate,
    ratio,
    series,
    top,
    total,
)

SHOWN = 10
"""Lines of a graph by pair or by engine; of more none can be told from the others."""
IN_TTFT = 'step!="decode.generate"'
_EXPIRED = 'end="expired"'

_AGREED = Parameters()
# Red is where the alerts fire.
COORDINATION_LIMITS = limits(_AGREED.coordination_share / 2, _AGREED.coordination_share)
TRANSFER_LIMITS = limits(0.3, 0.5)
UNKNOWN_LIMITS = limits(0.02, 0.1)
JOIN_LIMITS = limits(_AGREED.not_joined_share / 5, _AGREED.not_joined_share)
CLOCK_LIMITS = limits(_AGREED.clock_error_s / 10, _AGREED.clock_error_s)


def class_share(class_: str, window: str = RANGE) -> str:
    """Of all TTFT."""
    part = rate(series(m.TTFT_CLASS, f'class=~"{class_}"'), window=window)
    return ratio(part, rate(series(m.TTFT_CLASS), window=window))


def class_shares(window: str = STEP) -> str:
    """Of all TTFT, by class; they add up to 1."""
    return ratio(
        rate(series(m.TTFT_CLASS), "class", window=window), rate(series(m.TTFT_CLASS), window=window)
    )


def class_means(window: str = STEP) -> str:
    """Seconds a request, by class; they add up to the mean TTFT."""
    requests = rate(series(m.TTFT, part="count"), window=window)
    return ratio(rate(series(m.TTFT_CLASS), "class", window=window), requests)


def step_shares(*matchers: str, window: str = RANGE) -> str:
    """Of all time of all steps within TTFT, by step."""
    part = rate(series(m.STEP, IN_TTFT, *matchers, part="sum"), "step", window=window)
    # Whatever role is chosen: shares of P's steps and of D's are of the same whole.
    return ratio(part, rate(series(m.STEP, IN_TTFT, part="sum", every="role"), window=window))


def step_means(matcher: str, window: str = STEP) -> str:
    """Seconds by step, spread over all requests with a first token: what it adds to the mean TTFT."""
    part = rate(series(m.STEP, matcher, part="sum"), "step", window=window)
    return ratio(part, rate(series(m.TTFT, part="count"), window=window))


def step_quantile(q: float, matcher: str) -> str:
    """Of the requests that passed through a step."""
    return quantile(q, m.STEP, "step", matchers=(matcher,))


def late_share() -> str:
    """Of a connector's requests whose lead is known: D was not ready when prefill had finished."""
    late = increase(series(m.LEAD, r'le=~"-?0(\\.0)?"', part="bucket"), "connector")
    every = increase(series(m.LEAD, 'le="+Inf"', part="bucket"), "connector")
    return ratio(late, every, "connector")


def mean_lag() -> str:
    """Seconds that D was late, a request of a connector whose lead is known."""
    every = increase(series(m.LEAD, 'le="+Inf"', part="bucket"), "connector")
    return ratio(increase(series(m.LAG), "connector"), every, "connector")


def mean_regret() -> str:
    """Seconds that a later choice of the decoder would have saved, a request that could be compared."""
    requests = increase(series(m.REGRET_REQUESTS), "connector")
    return ratio(increase(series(m.REGRET), "connector"), requests, "connector")


def predicted_change() -> str:
    """TTFT with the other connector against what it was: -0.2 is a fifth less."""
    by = ("connector", "to")
    would = increase(series(m.PREDICTED), *by)
    return f"{ratio(would, increase(series(m.PREDICTED_BASE), *by), *by)} - 1"


def reuse_share(matcher: str, *of: str) -> str:
    """Of bidirectional requests (or of those that match `of`), those of such an outcome."""
    every = increase(series(m.REUSE, *of))
    return ratio(f"({increase(series(m.REUSE, matcher))} or 0 * {every})", every)


def joined_badly_share() -> str:
    """Of all requests, those of which one leg is not known."""
    bad = series(m.JOINS, 'joined_by=~"unjoined|peer not instrumented"')
    return ratio(increase(bad), increase(series(m.JOINS)))


def kv_part(matcher: str) -> str:
    """Part of an engine's KV blocks that is held so."""
    held = total(series(m.KV_BLOCKS, matcher), "engine")
    return ratio(held, total(series(m.KV_BLOCKS, 'use="total"'), "engine"), "engine")


def kv_use(use: str) -> str:
    """Part of an engine's KV blocks that is used so, of the engines on which most are."""
    matcher = f'use="{use}"'
    return highest(SHOWN, kv_part(matcher), series(m.KV_BLOCKS, matcher), "engine")


def gauges(metric: m.Metric, how: str = "max") -> str:
    """A gauge by engine, of the engines on which it is highest."""
    gauge = series(metric)
    return highest(SHOWN, total(gauge, "engine", how=how), gauge, "engine")


def busiest(metric: m.Metric, of: str) -> str:
    """`of`, by engine, of the engines on which this counter rose most in the window."""
    ranked = f"sum by (engine) (increase({series(metric)}{RANGE} @ end()))"
    return top(SHOWN, of, ranked, "engine")


def expired(window: str, kept_by_d: bool = False) -> str:
    """Leases that expired: those in which P kept a prompt for D, or those in which D kept a turn for the
    next. Of the first each one is a fault; the others end so whenever a user doesn't go on."""
    leases = grown(series(m.LEASES, _EXPIRED), window)
    decoders = f'max by (engine) ({m.ENGINE_INFO.name}{{role="decode"}})'
    return total(f"{leases} {'and' if kept_by_d else 'unless'} on (engine) {decoders}")


def of_steps(class_: str) -> str:
    """A regular expression of the names of a class's steps."""
    names = [step.name for step in steps.STEPS if step.class_ == class_]
    return "(" + "|".join(name.replace(".", r"\.") for name in names) + ")"
