"""Rows of requests: figures and cells that pages of requests share. Ages are told against the view's now."""

from __future__ import annotations

from collections.abc import Iterable

from kvscope import steps
from kvscope.frame import RequestRow
from kvscope.text import printable
from kvscope.tui.page import LinesView
from kvscope.tui.pages import grid
from kvscope.tui.view import View

_NOT_JOINED = ("unjoined", "peer not instrumented")


class Head(LinesView, can_focus=False):
    """A few lines above a table."""

    DEFAULT_CSS = "Head { height: auto; overflow-y: hidden; }"


class Context:
    """What cells depend on beside their row; set anew with each view."""

    def __init__(self) -> None:
        self.now_ns = 0
        self.scale_ns = 0
        """Time that fills a bar."""
        self.p99_ms: float | None = None
        self.prefix = 0
        """Characters that all ids begin with, left out."""
        self.engines: dict[str, str] = {}
        self._version = -1

    def update(self, view: View) -> None:
        in_flight, recent = view.in_flight, view.recent
        self.now_ns = view.now_ns
        if self._version == view.version:
            return
        self._version = view.version
        self.p99_ms = ttft_ms(view, "p99")
        self.scale_ns = scale_ns(ttft_ms(view, "p90"), in_flight, self.now_ns)
        self.prefix = common_prefix(row.client_id or row.id for rows in (in_flight, recent) for row in rows)
        pairs = {(row.p_engine, row.d_engine) for rows in (in_flight, recent) for row in rows}
        self.engines = grid.labels(sorted({e for pair in pairs for e in pair if e}))


def ttft_ms(view: View, quantile: str) -> float | None:
    """The window's `p50`, `p90` or `p99` of TTFT; None where there is none."""
    value = view.total.get(f"{quantile}_ttft_ms")
    return float(value) if isinstance(value, (int, float)) else None


# --- figures of a row --------------------------------------------------------------------------------


def is_in_flight(row: RequestRow) -> bool:
    """Not over for its client; a row may be kept among those in flight because P still holds its blocks."""
    return row.in_flight and row.outcome == "in flight"


def newest(row: RequestRow) -> tuple[bool, int]:
    """The order of the page: in flight on top, the newest first."""
    return is_in_flight(row), row.arrived_at_ns


def age_ns(row: RequestRow, now_ns: int) -> int | None:
    """TTFT, or how long the request has waited for its first token; None where it has none and is over."""
    if row.ttft_ns is not None:
        return row.ttft_ns
    return max(0, now_ns - row.arrived_at_ns) if is_in_flight(row) else None


def total_ns(row: RequestRow, now_ns: int) -> int | None:
    """From its arrival to its end, or to now; None where its end was not observed."""
    if is_in_flight(row):
        return max(0, now_ns - row.arrived_at_ns)
    return None if row.ttft_ns is None or row.generate_ns is None else row.ttft_ns + row.generate_ns


def in_step_ns(row: RequestRow, now_ns: int) -> int | None:
    """How long a request in flight is in its step; of any other, the time in its longest step."""
    if not is_in_flight(row):
        return row.main_step_ns if row.main_step else None
    return None if row.step_since_ns is None else max(0, now_ns - row.step_since_ns)


def classes(row: RequestRow, now_ns: int) -> dict[str, int]:
    """Nanoseconds up to the first token by class, with those of the step that it is in."""
    spent = {
        steps.COMPUTE: row.compute_ns,
        steps.CAPACITY: row.capacity_ns,
        steps.TRANSFER: row.transfer_ns,
        steps.COORDINATION: row.coordination_ns,
        steps.UNKNOWN: row.unknown_ns,
    }
    if is_in_flight(row) and row.ttft_ns is None:
        step = steps.BY_NAME.get(row.step or "")
        spent[step.class_ if step else steps.UNKNOWN] += in_step_ns(row, now_ns) or 0
    return spent


def coordination_share(row: RequestRow, now_ns: int) -> float | None:
    """The part of its time up to the first token that is coordination wait; None where none is known."""
    spent = classes(row, now_ns)
    total = sum(spent.values())
    return spent[steps.COORDINATION] / total if total else None


def marks(row: RequestRow) -> str:
    """Its marks, the gravest first; see `requests.MARKS`."""
    found = ">" if is_in_flight(row) else "" if row.outcome == "finished" else "x"
    found += "!" if row.read_after_expiry else ""
    found += "R" if row.recomputed_tokens else ""
    found += "J" if row.joined_by in _NOT_JOINED and not is_in_flight(row) else ""
    return found + ("±" if row.clock_error_ns else "")


def pair(row: RequestRow, names: dict[str, str]) -> str:
    """`prefill → decode`; ? where one is not known."""
    return " → ".join(names.get(e, printable(e)) if e else "?" for e in (row.p_engine, row.d_engine))


def scale_ns(p90_ms: float | None, in_flight: Iterable[RequestRow], now_ns: int) -> int:
    """Time that fills a bar: the next of 1, 2, 5 × 10ⁿ above the window's p90, so that bars stand still while
    requests come and go, and a few very slow ones do not make all others vanish. Before any has a first
    token: above the oldest that waits."""
    if p90_ms:
        least = round(p90_ms * 1e6)
    else:
        least = max((age_ns(row, now_ns) or 0 for row in in_flight), default=0)
    unit = 10**6
    while least > 5 * unit:
        unit *= 10
    return next((n * unit for n in (1, 2, 5) if least <= n * unit), 10 * unit)


def common_prefix(ids: Iterable[str]) -> int:
    """Characters that all ids begin with, up to the last separator: what need not be shown."""
    known = list(ids)
    if len(known) < 2:
        return 0
    separator = 0
    for at, (one, other) in enumerate(zip(min(known), max(known), strict=False)):
        if one != other:
            break
        if one in "-_:./":
            separator = at + 1
    return separator


def name_cell(row: RequestRow, shown: Context) -> str:
    """The client's id without what all ids begin with."""
    text = printable(row.client_id or row.id)
    return "…" + text[shown.prefix :] if shown.prefix else text


def milliseconds(ns: int | None) -> str:
    """To a tenth below 100 s, in 8 cells up to two days."""
    if ns is None:
        return grid.NONE
    return f"{ns / 1e6:.1f}" if ns < 10**11 else f"{ns / 1e6:.0f}"
