"""Words and numbers for a terminal: tables, times, durations. Everything untrusted passes `printable`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from datetime import datetime, timezone

from kvscope.errors import UsageError

_UNITS_NS = {
    "ns": 1,
    "us": 10**3,
    "ms": 10**6,
    "s": 10**9,
    "m": 60 * 10**9,
    "h": 3600 * 10**9,
    "d": 86400 * 10**9,
}
_DURATION = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)(ns|us|ms|s|m|h|d)")


def printable(value: object) -> str:
    """`value` on one line without control characters: ids come from clients and could drive a terminal."""
    text = "" if value is None else str(value)
    return (
        text
        if text.isprintable()
        else "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)
    )


def shortened(text: str, width: int) -> str:
    """`text` in at most `width` characters; a cut is shown."""
    return text if len(text) <= width else text[: max(0, width - 1)] + "…"


def duration_ns(text: str) -> int:
    """Nanoseconds of a duration such as `10m`, `1.5s` or `300ms`.

    Raises:
        UsageError: it is none.
    """
    match = _DURATION.fullmatch(text.strip())
    if not match:
        raise UsageError(f"{printable(text)[:40]!r} is no duration; write it like 300ms, 90s, 10m, 2h or 1d")
    return round(float(match[1]) * _UNITS_NS[match[2]])


def ms(ns: int | None) -> str:
    """Milliseconds, to the microsecond below one second, in 7 characters up to 2 hours; empty for None."""
    if ns is None:
        return ""
    return f"{ns / 1e6:.{3 if abs(ns) < 10**9 else 1 if abs(ns) < 10**11 else 0}f}"


def span(ns: int) -> str:
    """A duration for a sentence: `812 ms`, `3.4 s`, `12 min`."""
    if abs(ns) < 10**6:
        return f"{ns / 1e3:.3g} us"
    if abs(ns) < 10**9:
        return f"{ns / 1e6:.3g} ms" if abs(ns) < 10**8 else f"{ns / 1e6:.0f} ms"
    seconds = ns / 1e9
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if abs(seconds) < 7200 else f"{seconds / 3600:.1f} h"


def size(count: float | None) -> str:
    """Bytes for a sentence: `1.5 MB` (powers of ten, as link rates are)."""
    if count is None:
        return ""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def utc(ns: int | None, date: bool = True) -> str:
    """A moment in UTC to the millisecond."""
    if ns is None:
        return ""
    try:
        moment = datetime.fromtimestamp(ns // 10**9, timezone.utc)
    except (OverflowError, ValueError, OSError):
        return f"{ns} ns"
    return f"{moment:{'%Y-%m-%d %H:%M:%S' if date else '%H:%M:%S'}}.{ns // 10**6 % 1000:03d}"


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], max_width: int = 60) -> str:
    """Columns in line, numbers to the right; a cell longer than `max_width` is cut."""
    cells = [[shortened(printable(value), max_width) for value in row] for row in rows]
    numeric = [
        bool(cells) and all(_is_number(row[i]) for row in cells) and any(row[i] for row in cells)
        for i in range(len(headers))
    ]
    widths = [
        max(len(h), *(len(row[i]) for row in cells)) if cells else len(h) for i, h in enumerate(headers)
    ]
    lines = [list(headers), ["─" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in lines
    )


def _is_number(cell: str) -> bool:
    return not cell or cell.lstrip("+-").replace(".", "", 1).isdigit()
