"""What one request adds to the metrics."""

from __future__ import annotations

import functools
from typing import Any

from kvscope import metrics as m
from kvscope import schema
from kvscope.collectors.counts import Counts, Labels, clean
from kvscope.steps import BY_NAME, CLASSES, STEPS

_STEPS_OF = {"push": 20, "pull": 18, "bidirectional": 26, "local": 7}
"""Steps that requests of a connector pass through."""
_VALUES = {"outcome": 8, "joined_by": 7, "class": len(CLASSES), "source": 6}
"""Values that these labels have within a group, at most."""
CONNECTORS = frozenset(_STEPS_OF)


def begin_group(counts: Counts, group: Labels) -> None:
    """Make what happens seldom: an increase is seen only where the series was there before."""
    for metric in (m.RECOMPUTED, m.READ_LATE, m.CLAMPED, m.PREEMPTIONS, m.REGRET, m.REGRET_REQUESTS):
        counts.count(metric, group, 0)
    for outcome in ("finished", "error", "aborted", "lost", "incomplete"):
        counts.count(m.REQUESTS, (*group, outcome), 0)
    for how in ("unjoined", "peer not instrumented"):
        counts.count(m.JOINS, (*group, how), 0)


def count_request(counts: Counts, row: dict[str, Any], group: Labels, at: float) -> dict[str, float]:
    """Count a row of `requests` under its connector, model and traffic.

    Args:
        at: Unix time, for exemplars.

    Returns:
        Its TTFT by class in seconds; all 0 where it had no first token.
    """
    count = counts.count
    count(m.REQUESTS, (*group, clean(row["outcome"])))
    count(m.JOINS, (*group, clean(row["joined_by"])))
    count(m.RECOMPUTED, group, (row["recomputed_tokens"] or 0) > 0)
    count(m.READ_LATE, group, bool(row["read_after_expiry"]))
    count(m.CLAMPED, group, (row["clamped_ns"] or 0) > 0)
    count(m.PREEMPTIONS, group, row["preemptions"])
    count(m.OUTPUT_TOKENS, group, row["output_tokens"])
    for source, tokens in _token_sources(row):
        count(m.TOKENS, (*group, source), tokens)
    if row["connector"] == "bidirectional" or row["reuse_outcome"]:
        count(m.REUSE, (*group, clean(row["reuse_outcome"]) or "not offered"))
        count(m.REUSE_OFFERED, group, row["reuse_offered_tokens"] or 0)
    return _time_request(counts, row, group, at)


def _time_request(counts: Counts, row: dict[str, Any], group: Labels, at: float) -> dict[str, float]:
    observe, trace_id = counts.observe, schema.trace_id_of(row)
    waits_ns = dict.fromkeys(CLASSES, 0)
    for column, class_, in_ttft, labels in _step_labels(group):
        ns = row[column]
        if ns is not None and ns >= 0:
            observe(m.STEP, labels, ns / 1e9, trace_id, at)
            if in_ttft:
                waits_ns[class_] += ns
    if (lead_ns := row["lead_ns"]) is not None:
        observe(m.LEAD, group, lead_ns / 1e9, trace_id, at)
        counts.count(m.LAG, group, max(0, -lead_ns) / 1e9)
    if row["decode_generate_ns"] is not None and (row["output_tokens"] or 0) > 1:
        observe(m.TPOT, group, row["decode_generate_ns"] / 1e9 / (row["output_tokens"] - 1), trace_id, at)
    ttft_ns = row["ttft_ns"]
    if ttft_ns is None:
        return dict.fromkeys(CLASSES, 0.0)
    observe(m.TTFT, group, ttft_ns / 1e9, trace_id, at)
    for class_, ns in waits_ns.items():
        counts.count(m.TTFT_CLASS, (*group, class_), ns / 1e9)
        observe(m.TTFT_SPLIT, (*group, class_), ns / 1e9, trace_id, at)
    for to in ("push", "pull"):
        predicted_ns = row[f"predicted_{to}_ttft_ns"]
        if predicted_ns is not None:
            counts.count(m.PREDICTED, (*group, to), predicted_ns / 1e9)
            counts.count(m.PREDICTED_BASE, (*group, to), ttft_ns / 1e9)
            counts.count(m.PREDICTED_REQUESTS, (*group, to))
    return {class_: ns / 1e9 for class_, ns in waits_ns.items()}


@functools.lru_cache(1024)
def _step_labels(group: Labels) -> list[tuple[str, str, bool, Labels]]:
    """(column, class, whether it is in TTFT, labels) of each step."""
    return [
        (s.column, s.class_, s.in_ttft, (*group, s.name, s.class_, role_of(s.name, group[0]))) for s in STEPS
    ]


def role_of(step: str, connector: str) -> str:
    """On which side a step is spent."""
    if step == "unknown" or connector == m.OTHER:
        return m.UNKNOWN
    if connector == "local":
        return m.BOTH_ROLES
    stage = BY_NAME[step].stage
    initiator = stage == "transfer" or step == "readiness.detect"
    if stage == "prefill" or step == "registration.notify" or (initiator and connector == "push"):
        return m.P_ROLE
    return m.D_ROLE


def _token_sources(row: dict[str, Any]) -> list[tuple[str, int | None]]:
    """(where from, prompt tokens); None where not known."""
    cached = row["p_cached_tokens"] if row["p_engine"] else row["d_cached_tokens"]
    read_back = row["reuse_pulled_tokens"]
    known = row["prompt_tokens"] is not None and cached is not None
    return [
        ("computed", max(0, row["prompt_tokens"] - cached - (read_back or 0)) if known else None),
        ("cached_p", row["p_cached_tokens"]),
        ("cached_d", row["d_cached_tokens"]),
        ("transferred", row["transferred_tokens"]),
        ("read_back", read_back),
        ("recomputed", row["recomputed_tokens"]),
    ]


def group_series(connector: str) -> int:
    """Series that requests of one connector, model and traffic may make."""
    values = {**_VALUES, "step": _STEPS_OF.get(connector, len(STEPS))}
    metrics = [metric for metric in m.METRICS if metric.labels[:3] == m.GROUP]
    if connector in ("push", "pull", "local"):
        metrics = [metric for metric in metrics if metric not in (m.REUSE, m.REUSE_OFFERED)]
    # The first label after the three says how many there are; those that follow hang on it.
    return sum(metric.series * values.get((*metric.labels, "")[3], 1) for metric in metrics)
