"""Percentiles and means with 95 % confidence intervals, and what differs between two sets of requests.

The interval of a percentile is of order statistics: it assumes nothing of the distribution, only that
requests are independent of each other; bursts make real intervals wider. Where there are too few requests for
its ends to be among them, there is no interval. The interval of a mean is 1.96 standard errors to each side.

The interval of a difference B - A adds both sides' half-widths in quadrature, each side of the interval by
itself: its lower end is away from the difference by the root of (B - B's lower end)² + (A's upper end - A)².
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvscope.steps import CLASSES, STEPS

Z = 1.96
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
STATISTICS = ("mean", *QUANTILES)
COLUMNS_AT_ONCE = 6
"""Of a query: exact percentiles keep every value in memory."""

TPOT_NS = "CASE WHEN output_tokens > 1 THEN decode_generate_ns / (output_tokens - 1) END"


class Measure(NamedTuple):
    """Something that each request has a duration of."""

    name: str
    kind: str
    """ttft, class, step or tpot."""
    class_: str
    sql: str
    """Nanoseconds; a step that a request did not pass through took it 0."""


MEASURES = (
    Measure("ttft", "ttft", "", "ttft_ns"),
    *(Measure(name, "class", name, f"coalesce({name}_ns, 0)") for name in CLASSES),
    *(
        Measure(s.name, "step", s.class_, f"coalesce({s.column}, 0)")
        for s in STEPS
        if s.in_ttft and s.name not in CLASSES
    ),
    Measure("tpot", "tpot", "", TPOT_NS),
)
BY_NAME = {measure.name: measure for measure in MEASURES}


class Estimate(NamedTuple):
    """A statistic in nanoseconds."""

    value: float
    low: float | None
    """Ends of its interval; None where there are too few requests."""
    high: float | None


class Shift(NamedTuple):
    """How much more something is on side B."""

    a: float
    b: float
    low: float | None
    high: float | None

    @property
    def value(self) -> float:
        return self.b - self.a

    @property
    def is_clear(self) -> bool:
        """Of noise: the interval excludes 0."""
        return self.low is not None and self.high is not None and (self.low > 0 or self.high < 0)


def shift(a: Estimate, b: Estimate) -> Shift:
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Shift(a.value, b.value, None, None)
    value = b.value - a.value
    low = value - math.hypot(b.value - b.low, a.high - a.value)
    high = value + math.hypot(b.high - b.value, a.value - a.low)
    return Shift(a.value, b.value, low, high)


def ranks(count: int, q: float) -> tuple[int, int] | None:
    """Which of `count` values in order, from 1, are the ends of the interval of quantile `q`; None where they
    are too few."""
    middle, half = count * q, Z * math.sqrt(count * q * (1 - q))
    low, high = math.floor(middle - half), math.ceil(middle + half) + 1
    return (low, high) if low >= 1 and high <= count else None


def select(measures: Sequence[Measure], count: int, condition: str) -> str:
    """A SELECT of one row: what `estimates` reads. `count` requests have these measures."""
    columns = []
    positions = [rank for q in QUANTILES.values() for rank in ranks(count, q) or ()]
    # A value in order is what the discrete quantile half a place before it is.
    ends = ", ".join(f"{(rank - 0.5) / count:.12f}" for rank in positions)
    for number in range(len(measures)):
        value = f"m{number}"
        columns += [
            f"avg({value}) AS mean{number}",
            f"stddev_samp({value}) AS deviation{number}",
            f"quantile_cont({value}, [{', '.join(map(str, QUANTILES.values()))}]) AS quantiles{number}",
            f"{f'quantile_disc({value}, [{ends}])' if ends else '[]'} AS ends{number}",
        ]
    values = ", ".join(f"({measure.sql})::DOUBLE AS m{number}" for number, measure in enumerate(measures))
    return f"SELECT {', '.join(columns)} FROM (SELECT {values} FROM waits WHERE {condition})"


def estimates(
    measures: Sequence[Measure], count: int, row: Mapping[str, Any]
) -> dict[str, dict[str, Estimate]]:
    """By measure and statistic."""
    found = {}
    for number, measure in enumerate(measures):
        mean = row[f"mean{number}"]
        half = Z * (row[f"deviation{number}"] or 0.0) / math.sqrt(count)
        known: dict[str, Estimate] = {
            "mean": Estimate(mean, *((mean - half, mean + half) if count > 1 else (None, None)))
        }
        ends = iter(row[f"ends{number}"])
        for (name, q), value in zip(QUANTILES.items(), row[f"quantiles{number}"], strict=True):
            known[name] = Estimate(value, *((next(ends), next(ends)) if ranks(count, q) else (None, None)))
        found[measure.name] = known
    return found
