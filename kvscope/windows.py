"""Named windows of time: what the rows of the table `labels` amount to now.

A window of kind benchmark tells production from what was measured on purpose: requests without a label of
their own that arrived in it count as of the label that is its name.
"""

from __future__ import annotations

import bisect
import difflib
import heapq
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvscope import storefile
from kvscope.errors import UsageError
from kvscope.filters import literal
from kvscope.schema import LABELS
from kvscope.text import printable

if TYPE_CHECKING:
    import duckdb

INCIDENT, RELEASE, BENCHMARK = "incident", "release", "benchmark"
KINDS = (INCIDENT, RELEASE, BENCHMARK)
T = TypeVar("T")

END = ".end"
"""`@NAME` is when a window begins, `@NAME.end` when it ends."""


class Window(NamedTuple):
    name: str
    kind: str
    since_ns: int
    """Unix time at which it begins."""
    until_ns: int | None
    """Unix time at which it ends; None where it has no end (yet)."""


def current(cursor: duckdb.DuckDBPyConnection) -> list[Window]:
    """The windows there are, the latest first."""
    cursor.execute(
        f"SELECT name, kind, from_at_ns, until_at_ns FROM {storefile.relation(cursor, LABELS.name)} "
        "QUALIFY row_number() OVER (PARTITION BY name ORDER BY made_at_ns DESC, id DESC) = 1 "
        "AND NOT coalesce(removed, false) AND name IS NOT NULL AND from_at_ns IS NOT NULL "
        "ORDER BY from_at_ns DESC, name"
    )
    return [Window(name, kind or "", since, until) for name, kind, since, until in cursor.fetchall()]


def overlapping(windows: Sequence[Window], since_ns: int, until_ns: int | None) -> list[Window]:
    """Those of which some time lies in [since, until); a release has only its beginning."""
    return [
        one
        for one in windows
        if (until_ns is None or one.since_ns < until_ns)
        and (
            one.since_ns >= since_ns
            or (one.until_ns > since_ns if one.until_ns is not None else one.kind != RELEASE)
        )
    ]


class Step(NamedTuple):
    """From when on requests without a label of their own count as of that one, until the next step."""

    from_ns: int
    label: str | None
    """None: as of none."""


def benchmarks(
    cursor: duckdb.DuckDBPyConnection, since_ns: int = 0, until_ns: int | None = None
) -> tuple[Step, ...]:
    """The labels of benchmarks in [since, until), in order; empty where there are none."""
    return steps([one for one in overlapping(current(cursor), since_ns, until_ns) if one.kind == BENCHMARK])


def steps(windows: Sequence[Window]) -> tuple[Step, ...]:
    """Of windows that overlap, the last begun counts; of those begun at once, the first by name."""
    coming = deque(sorted(windows, key=lambda one: one.since_ns))
    moments = {one.since_ns for one in windows} | {
        one.until_ns for one in windows if one.until_ns is not None
    }
    begun: list[tuple[int, str, int | None]] = []
    found: list[Step] = []
    for at_ns in sorted(moments):
        while coming and coming[0].since_ns <= at_ns:
            one = coming.popleft()
            heapq.heappush(begun, (-one.since_ns, one.name, one.until_ns))
        while begun and begun[0][2] is not None and begun[0][2] <= at_ns:
            heapq.heappop(begun)
        label = begun[0][1] if begun else None
        if not found or found[-1].label != label:
            found.append(Step(at_ns, label))
    return tuple(found)


def label_of(benchmarks: Sequence[Step], label: str | None, arrived_at_ns: int | None) -> str | None:
    """The label that a request counts as of."""
    if label or arrived_at_ns is None:
        return label
    at = bisect.bisect_right(benchmarks, arrived_at_ns, key=lambda step: step.from_ns)
    return (benchmarks[at - 1].label or label) if at else label


def labelled_sql(source: str, benchmarks: Sequence[Step]) -> str:
    """For a FROM: `source`, which has the columns of `requests`, with labels as of `label_of`."""
    if not benchmarks:
        return source
    found = _search_sql((Step(0, None), *benchmarks))
    return (
        "(SELECT * REPLACE (CASE WHEN label <> '' OR arrived_at_ns IS NULL THEN label "
        f"ELSE coalesce({found}, label) END AS label) FROM {source})"
    )


def _search_sql(benchmarks: Sequence[Step]) -> str:
    """By halves: it is computed for every request, and there may be a benchmark every night."""
    if len(benchmarks) == 1:
        label = benchmarks[0].label
        return "NULL" if label is None else literal(label)
    half = len(benchmarks) // 2
    before, after = _search_sql(benchmarks[:half]), _search_sql(benchmarks[half:])
    return f"CASE WHEN arrived_at_ns < {benchmarks[half].from_ns} THEN {before} ELSE {after} END"


def moment(cursor: duckdb.DuckDBPyConnection, value: T, name: str = "since") -> T | int:
    """`value`, or Unix nanoseconds where it is `@NAME` or `@NAME.end`; a window without an end ends now.

    Raises:
        UsageError: there is no such window.
    """
    if not isinstance(value, str) or not value.strip().startswith("@"):
        return value
    wanted = value.strip()[1:]
    found = {one.name: one for one in current(cursor)}
    if wanted in found:
        return found[wanted].since_ns
    window = found.get(wanted.removesuffix(END))
    if window is None:
        near = difflib.get_close_matches(wanted, found, 1)
        hint = f"did you mean @{near[0]}?" if near else "`kvscope label --list` tells those there are"
        raise UsageError(f"{name}: no window {printable(wanted)[:80]!r}; {hint}")
    return time.time_ns() if window.until_ns is None else window.until_ns
