"""Requests of which only a part is known, as rows of the store: what was not told stays NULL or `unknown`.

A request is told by marks: the boundaries at which its steps end. Between two that were told lies one step;
where one was not, the whole interval is `unknown`, so that the steps add up to TTFT exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from kvscope import schema
from kvscope.attribution import Breakdown
from kvscope.steps import BY_NAME, HOOK, NOT_OBSERVED, OBSERVED, STEPS

Row = tuple[Any, ...]

UNKNOWN = "unknown"
MAX_TEXT = 1024
"""Characters kept of a text: files are untrusted."""


class Mark(NamedTuple):
    """A boundary: `step` ends at `at_ns` (Unix time); None where that was not told."""

    step: str
    at_ns: int | None
    observed: str = HOOK


class Split(NamedTuple):
    """A request's time, split."""

    totals: dict[str, int]
    waterfall: list[dict[str, Any]]
    clamped_ns: int


def split(t0_ns: int, marks: Sequence[Mark], end_ns: int | None, error_ns: int = 0) -> Split:
    """Steps from `t0_ns` on that touch; what is left until `end_ns`, the first token, is unknown.

    Marks out of order are moved, and by how much is told; so are those behind the end.

    Args:
        error_ns: how far a boundary may be off.
    """
    totals: dict[str, int] = {}
    waterfall: list[dict[str, Any]] = []
    at, gap, clamped = t0_ns, False, 0
    told = [*marks, *([] if end_ns is None else [Mark(UNKNOWN, end_ns)])]
    for mark in told:
        if mark.at_ns is None:
            gap = True
            continue
        end = max(at, mark.at_ns if end_ns is None else min(mark.at_ns, end_ns))
        clamped += abs(end - mark.at_ns)
        step = BY_NAME[UNKNOWN if gap else mark.step]
        if end > at or (not gap and mark.step != UNKNOWN):
            observed = NOT_OBSERVED if step.name == UNKNOWN else mark.observed
            totals[step.name] = totals.get(step.name, 0) + end - at
            waterfall.append(
                {
                    "step": step.code,
                    "from_ns": at - t0_ns,
                    "ns": end - at,
                    "critical": True,
                    "observed": OBSERVED.index(observed),
                    "error_ns": error_ns,
                }
            )
        at, gap = end, False
    return Split(totals, waterfall, clamped)


def split_of(breakdown: Breakdown, error_ns: int) -> Split:
    """The steps of an attributed request, whose boundaries may be off by `error_ns`."""
    waterfall = [
        {
            "step": i.step.code,
            "from_ns": i.start_ns - breakdown.t0_ns,
            "ns": i.ns,
            "critical": i.critical,
            "observed": OBSERVED.index(i.observed),
            "error_ns": max(i.error_ns, error_ns),
        }
        for i in (*breakdown.critical, *breakdown.overlapped)
    ]
    return Split(dict(breakdown.totals), waterfall, breakdown.clamped_ns)


def request_row(parts: Split, generate_ns: int | None, **columns: Any) -> Row:
    """A row of `requests`; columns that are not given are NULL."""
    steps = {step.column: parts.totals.get(step.name) for step in STEPS}
    return row(
        schema.REQUESTS,
        **{
            **steps,
            "decode_generate_ns": generate_ns,
            "waterfall": parts.waterfall,
            "clamped_ns": parts.clamped_ns,
            **columns,
        },
    )


def row(table: schema.Table, **columns: Any) -> Row:
    """A row of a table; columns that are not given are NULL, and so are numbers that they can't hold."""
    unknown = set(columns) - {column.name for column in table.columns}
    assert not unknown, unknown
    return tuple(_fitting(column, columns.get(column.name)) for column in table.columns)


_INTEGERS = {
    "BIGINT": (-1 << 63, (1 << 63) - 1),
    "UBIGINT": (0, (1 << 64) - 1),
    "UINTEGER": (0, (1 << 32) - 1),
    "USMALLINT": (0, (1 << 16) - 1),
}


def _fitting(column: schema.Column, value: Any) -> Any:
    if isinstance(value, str) and column.type == "VARCHAR":
        return value[:MAX_TEXT].encode("utf-8", "replace").decode()
    if type(value) is int and column.type in _INTEGERS:
        low, high = _INTEGERS[column.type]
        return value if low <= value <= high else None
    return value


def name_id(*names: str | int) -> int:
    """A row's id: the hash of what names it, so that it is the same whenever it is read again."""
    text = "\0".join(str(name) for name in names)
    return int.from_bytes(blake2b(text.encode("utf-8", "replace"), digest_size=8).digest(), "little")
