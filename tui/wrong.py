"""What is wrong with requests, in words: one definition for the header and for the pages Fleet and Stuck."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from kvscope.frame import Engine, Frame, RequestRow
from kvscope.text import printable, span

S = 10**9
LONG_NS = 10 * S
"""In one step for so long: worth a look."""
STUCK_NS = 30 * S
"""In one step for so long: stuck. A lease of vLLM's default length ends about then."""
TIMES_P99 = 3
"""In one step for so many times the p99 of whole TTFTs, and a second at least: worth a look too."""
HELD = "over, blocks held"
"""In place of the step of a request that is over while P still keeps its blocks."""
GENERATES = "decode.generate"
_WRONG = (
    ("not_finished", "not finished"),
    ("not_joined", "not joined"),
    ("peer_not_instrumented", "peer not instrumented"),
    ("recomputed", "recomputed"),
    ("read_after_expiry", "read after expiry"),
    ("clamped", "with steps out of order"),
)
"""Columns of `fleet` that count what did not go right, and how they are called."""


def wrong_requests(
    frame: Frame | None, in_flight: Iterable[RequestRow], now_ns: int
) -> list[tuple[str, str]]:
    """What is wrong with the requests of a view, the gravest first, with its style: `bad`, `warn`, or `dim`
    for the clocks' error, which is no fault on its own.

    Args:
        in_flight: those of the view; a frame's own may be changes only.
        now_ns: the view's.
    """
    if frame is None:
        return []
    rows = list(in_flight)
    found: list[tuple[str, str]] = []
    stuck = [row for row in rows if how_alarming(row, now_ns) == "bad"]
    if stuck:
        oldest = max(stuck, key=lambda row: age_ns(row, now_ns) or 0)
        longest = f"up to {span(age_ns(oldest, now_ns) or 0)} in {step_name(oldest)}"
        found.append((f"{len(stuck):,} STUCK, {longest}", "bad"))
    found += [(text, "warn") for text in silent(frame.engines, rows, now_ns)]
    total = _total(frame)
    for column, name in _WRONG:
        if count := _number(total, column):
            found.append((f"{count:.0f} {name}", "bad"))
    if error_ms := _number(total, "clock_error_ms"):
        found.append((f"clocks agree to ± {error_ms:.3g} ms", "dim"))
    return found


def waits(row: RequestRow) -> bool:
    """In flight before its first token, or over with blocks held; one that generates may take its time."""
    return row.step != GENERATES


def step_name(row: RequestRow) -> str:
    """The step in words; `HELD` where it is over."""
    return printable(row.step) or ("not known" if row.outcome == "in flight" else HELD)


def age_ns(row: RequestRow, now_ns: int) -> int | None:
    """How long it has been in its step, or has held blocks since its end; None where that is not known."""
    since = row.step_since_ns
    if since is None and row.outcome != "in flight" and row.ttft_ns is not None:
        since = row.arrived_at_ns + row.ttft_ns + (row.generate_ns or 0)
    return None if since is None else max(0, now_ns - since)


def how_alarming(row: RequestRow, now_ns: int, p99_ms: float | None = None) -> str:
    """Its time in its step: `bad`, `warn` or empty."""
    age = age_ns(row, now_ns) or 0
    if not waits(row):
        return ""
    if age > STUCK_NS:
        return "bad"
    unusual = p99_ms is not None and age > max(S, TIMES_P99 * p99_ms * 1e6)
    return "warn" if age > LONG_NS or unusual else ""


def silent(engines: Iterable[Engine], in_flight: Iterable[RequestRow], now_ns: int) -> list[str]:
    """Engines that should generate and have recorded nothing for long: those may hang."""
    last: dict[str, int] = {}
    for one in engines:
        if one.source == "scheduler" and one.last_event_at_ns is not None:
            last[one.engine] = max(one.last_event_at_ns, last.get(one.engine, 0))
    generating: dict[str, int] = {}
    for row in in_flight:
        if row.step == GENERATES and row.d_engine in last and now_ns - last[row.d_engine] > LONG_NS:
            generating[row.d_engine] = generating.get(row.d_engine, 0) + 1
    return [
        f"{count:,} generate on {printable(engine)}, silent for {span(now_ns - last[engine])}"
        for engine, count in sorted(generating.items(), key=lambda item: last[item[0]])
    ]


def _total(frame: Frame) -> Mapping[str, Any]:
    answer = frame.answers.get("fleet")
    rows = [dict(zip(answer.columns, row, strict=False)) for row in answer.rows] if answer else []
    return next((row for row in rows if row.get("level") == "all"), {})


def _number(row: Mapping[str, Any], name: str) -> float:
    value = row.get(name)
    return value if isinstance(value, int | float) and 0 < value < 1e19 else 0
