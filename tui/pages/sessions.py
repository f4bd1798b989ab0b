"""Conversations whose turns reuse KV that D has kept: what was read back, what was not and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from textual.app import ComposeResult

from kvscope.frame import Answer
from kvscope.text import printable, span
from kvscope.tui.lines import Line
from kvscope.tui.page import FilterBy, LinesView, Page
from kvscope.tui.pages import grid
from kvscope.tui.pages.grid import Row
from kvscope.tui.pages.pairs import OLD, Note
from kvscope.tui.table import Column, LiveTable
from kvscope.tui.view import View

_HITS = ("pulled", "local hit")
"""Outcomes that spared P the prefill."""
_WHY = {
    "below threshold": "fewer tokens than P's threshold",
    "expired": "D keeps them too short",
    "metadata missing": "the router drops kv_transfer_params",
    "failed": "the READ failed: page 6",
}


class Session(NamedTuple):
    """A row of `sessions`; None is "not observed"."""

    id: str
    last_id: str
    last_at: str
    p_engine: str
    d_engine: str
    turns: float | None
    prompt_tokens: float | None
    offered: float | None
    pulled: float | None
    recomputed: float | None
    outcomes: str
    p50_pause_ms: float | None
    max_pause_ms: float | None
    ttl_ms: float | None
    p50_ttft_ms: float | None

    @property
    def overslept(self) -> bool:
        """A pause was longer than D keeps the KV."""
        return self.max_pause_ms is not None and self.ttl_ms is not None and self.max_pause_ms > self.ttl_ms


def sessions(answer: Answer | None) -> list[Session]:
    return [
        Session(
            id=row.raw("session"),
            last_id=row.raw("last_id"),
            last_at=row.text("last_at"),
            p_engine=row.raw("p_engine"),
            d_engine=row.raw("d_engine"),
            turns=row.number("turns"),
            prompt_tokens=row.number("prompt_tokens"),
            offered=row.number("reuse_offered_tokens"),
            pulled=row.number("reuse_pulled_tokens"),
            recomputed=row.number("recomputed_tokens"),
            outcomes=row.text("outcomes"),
            p50_pause_ms=row.number("p50_pause_ms"),
            max_pause_ms=row.number("max_pause_ms"),
            ttl_ms=row.number("ttl_ms"),
            p50_ttft_ms=row.number("p50_ttft_ms"),
        )
        for row in grid.rows_of(answer)
    ]


def summary(
    found: Sequence[Session], reuse: Answer | None, outcomes: Answer | None, cells: int
) -> list[Line]:
    """Of the window: how many requests brought a handle of KV on D, what it was good for, and why not."""
    reused = grid.rows_of(reuse)
    handles, hits, by_outcome = handled(reused)
    bidirectional = _total(
        [row for row in grid.rows_of(outcomes) if row.text("connector") == "bidirectional"], "requests"
    )
    absent = max(0, bidirectional - handles)
    if not handles:
        return nothing(bidirectional, cells) if not found else []
    lines: list[Line] = [
        [
            ("KV handles: ", "title"),
            (f"{hits} hit", "strong"),
            (f" ({grid.percent(100 * hits / handles)})  ", ""),
            (f"{handles - hits} missed", "bad" if handles > hits else "strong"),
            (f" ({grid.percent(100 * (handles - hits) / handles)})  ", ""),
            (f"{absent} requests brought none", "strong" if absent else ""),
        ]
    ]
    missed = [
        f"{count} {name} ({_WHY[name]})" if name in _WHY else f"{count} {name}"
        for name, count in sorted(by_outcome.items(), key=lambda item: -item[1])
        if name not in _HITS
    ]
    if missed:
        lines += grid.wrapped("Missed: " + ", ".join(missed), cells, "warn", "  ")
    if absent:
        lines += grid.wrapped(
            "None: first turns, or a router that streams (its responses carry no kv_transfer_params).",
            cells,
            "dim",
            "  ",
        )
    offered, pulled = _total(reused, "offered_tokens"), _total(reused, "pulled_tokens")
    share = f" ({grid.percent(100 * pulled / offered)})" if offered else ""
    lines += grid.wrapped(f"Tokens kept on D: {offered} offered, {pulled} read back{share}.", cells)
    if late := sum(one.overslept for one in found):
        several = "sessions were" if late > 1 else "session was"
        lines += grid.wrapped(
            f"{late} {several} silent for longer than D keeps its KV (marked !): a longer "
            "decoder_kv_blocks_ttl would keep it.",
            cells,
            "warn",
            "  ",
        )
    return [grid.padded(lines[0], cells), *lines[1:], []]


def handled(reused: Sequence[Row]) -> tuple[int, int, dict[str, int]]:
    """Requests that brought a handle of KV on D, those that it was good for, and requests by outcome."""
    by_outcome: dict[str, int] = {}
    for row in reused:
        outcome = row.text("reuse_outcome")
        by_outcome[outcome] = by_outcome.get(outcome, 0) + int(row.some("requests"))
    return sum(by_outcome.values()), sum(by_outcome.get(name, 0) for name in _HITS), by_outcome


def notes(reuse: Answer | None) -> list[Note]:
    """Handles that missed, and why most of them did."""
    handles, hits, by_outcome = handled(grid.rows_of(reuse))
    if hits >= handles:
        return []
    most = max((name for name in by_outcome if name not in _HITS), key=lambda name: by_outcome[name])
    text = f"{handles - hits} of {handles}, mostly {most}"
    return [Note("KV handles missed", text, _WHY.get(most, ""), "warn")]


def nothing(bidirectional: int, cells: int) -> list[Line]:
    """Why there is no session, and what to do."""
    first = "No conversation in this window reuses KV that D has kept."
    if bidirectional:
        then = (
            f"{bidirectional} bidirectional requests came without a handle of it: first turns only, or a "
            "router that drops it, or streams: such responses carry no kv_transfer_params (vllm#40186)."
        )
    else:
        then = (
            "No request was bidirectional: P reads KV back from D only with bidirectional_kv_xfer in "
            "kv_connector_extra_config, and a router that returns the handle."
        )
    return [*grid.wrapped(first, cells, "strong"), *grid.wrapped(then, cells)]


def _total(rows: Sequence[Row], name: str) -> int:
    return int(sum(row.some(name) for row in rows))


def _pause(ms: float | None) -> str:
    return grid.NONE if ms is None else span(round(ms * 1e6))


def columns() -> list[Column[Session]]:
    def number(field: str) -> Callable[[Session, int], str]:
        return lambda row, cells: grid.count(getattr(row, field))

    def by(field: str) -> Callable[[Session], Any]:
        return lambda row: getattr(row, field)

    def session(row: Session, cells: int) -> str:
        text = printable(row.id)
        return text if len(text) <= cells else grid.ELLIPSIS + text[-(cells - 1) :]

    def pulled(row: Session, cells: int) -> Line:
        short = row.pulled is not None and row.offered is not None and row.pulled < row.offered
        return [(grid.count(row.pulled), "warn" if short else "")]

    def longest(row: Session, cells: int) -> Line:
        mark = ("!", "bad") if row.overslept else (" ", "")
        return [(_pause(row.max_pause_ms), mark[1]), mark]

    def pair(row: Session, cells: int) -> str:
        short = grid.labels([row.p_engine, row.d_engine], max(6, (cells - 3) // 2))
        return f"{short[row.p_engine]} → {short[row.d_engine]}"

    return [
        Column("session", "session", session, 9, sort=by("id"), descending=False),
        Column("last", "last", lambda row, cells: row.last_at[-8:], 8, sort=by("last_at"), priority=3),
        Column("turns", "turns", number("turns"), 5, right=True, sort=by("turns")),
        Column(
            "prompt", "prompt", number("prompt_tokens"), 7, right=True, sort=by("prompt_tokens"), priority=5
        ),
        Column("offered", "offered", number("offered"), 8, right=True, sort=by("offered")),
        Column("pulled", "pulled", pulled, 8, right=True, sort=by("pulled")),
        Column(
            "recomputed", "recomp.", number("recomputed"), 8, right=True, sort=by("recomputed"), priority=2
        ),
        Column("outcomes", "reuse", lambda row, cells: row.outcomes or grid.NONE, least=14),
        Column(
            "pause",
            "pause",
            lambda row, cells: _pause(row.p50_pause_ms),
            8,
            right=True,
            sort=by("p50_pause_ms"),
            priority=4,
        ),
        Column("longest", "longest", longest, 9, right=True, sort=by("max_pause_ms")),
        Column(
            "ttl", "TTL", lambda row, cells: _pause(row.ttl_ms), 7, right=True, sort=by("ttl_ms"), priority=1
        ),
        Column(
            "ttft",
            "TTFT ms",
            lambda row, cells: grid.ms(row.p50_ttft_ms),
            8,
            right=True,
            sort=by("p50_ttft_ms"),
        ),
        Column("pair", "P → D", pair, least=19, priority=6),
    ]


class SessionsPage(Page):
    key = "7"
    title = "Sessions"
    about = "Conversations: tokens read back from D or not and why, and pauses against the time D keeps them."
    questions = ("sessions", "reuse", "outcomes")
    hints = (("enter", "its requests"),)

    def __init__(self) -> None:
        super().__init__()
        self._view: View | None = None
        self._asked_for: str | None = None
        """The session that was last opened from another page."""

    def compose(self) -> ComposeResult:
        yield LinesView()
        yield LiveTable(columns(), key=lambda row: row.id)

    def show(self, view: View) -> None:
        self._view = view
        table: LiveTable[Session] = self.query_one(LiveTable)
        found = sessions(view.answer("sessions"))
        table.display = bool(found)
        table.set_rows(found)
        if view.session != self._asked_for and (view.session is None or table.choose(view.session)):
            self._asked_for = view.session
        above = self.query_one(LinesView)
        above.draw(lambda cells: self._lines(found, cells))
        above.styles.height = min(len(above.lines), max(3, self.room.height // 2)) if found else "1fr"

    def chosen_session(self) -> str | None:
        row = self.query_one(LiveTable).cursor_row
        return row.id if row else None

    def on_live_table_opened(self, message: LiveTable.Opened) -> None:
        self.post_message(FilterBy(f"session={message.row.id}", page="2"))

    def _lines(self, found: Sequence[Session], cells: int) -> list[Line]:
        view = self._view
        if view is None:
            return []
        error = view.unanswered("sessions")
        if error and not found:
            return grid.wrapped(printable(error), cells, "bad")
        if view.answer("sessions") is None:
            return [[("asking …", "dim")]]
        errors = [error for error in map(view.unanswered, self.questions) if error]
        old = [
            line for error in errors[:1] for line in grid.wrapped(f"{OLD}{printable(error)}", cells, "bad")
        ]
        return [*old, *summary(found, view.answer("reuse"), view.answer("outcomes"), cells)]
