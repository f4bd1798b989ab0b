"""Requests: all in flight and the recent ones, one line each, with where their first token's time went."""

from __future__ import annotations

from textual import on
from textual.app import ComposeResult

from kvscope import steps
from kvscope.frame import RequestRow
from kvscope.text import printable, span, utc
from kvscope.tui.lines import PATTERN, Line, class_bar, fit
from kvscope.tui.lines import width as length
from kvscope.tui.page import OpenRequest, Page
from kvscope.tui.pages import grid
from kvscope.tui.pages.rows import (
    Context,
    Head,
    age_ns,
    classes,
    coordination_share,
    in_step_ns,
    is_in_flight,
    marks,
    milliseconds,
    name_cell,
    newest,
    pair,
    total_ns,
)
from kvscope.tui.table import Column, LiveTable
from kvscope.tui.view import View
from kvscope.waterfall import SHORT

MARKS = {
    "!": "read after expiry",
    "R": "recomputed",
    "x": "unfinished",
    "J": "not joined",
    "±": "clock error",
    ">": "in flight",
}
"""What the marks before a request say."""
_STYLES = {">": "strong", "x": "bad", "!": "bad", "R": "bad", "J": "warn", "±": "warn"}
_CONNECTORS = {"bidirectional": "bidir"}
_CLASS_PRIORITY = {
    steps.COORDINATION: 1,
    steps.COMPUTE: 7,
    steps.CAPACITY: 8,
    steps.TRANSFER: 9,
    steps.UNKNOWN: 10,
}
LONGER = "▶"
"""Ends a bar that goes on beyond its scale."""


# --- cells -------------------------------------------------------------------------------------------


def columns(shown: Context) -> list[Column[RequestRow]]:
    """The table's columns; cells are made only for rows in sight."""

    def marked(row: RequestRow, cells: int) -> Line:
        return [(mark, _STYLES[mark]) for mark in marks(row)[:cells]]

    def ttft(row: RequestRow, cells: int) -> Line:
        age = age_ns(row, shown.now_ns)
        if age is None:
            return [(grid.NONE, "dim")]
        return [(milliseconds(age), "strong")] if row.ttft_ns is not None else [(f">{milliseconds(age)}", "")]

    def bar(row: RequestRow, cells: int) -> Line:
        spent = classes(row, shown.now_ns)
        if sum(spent.values()) <= shown.scale_ns or cells < 2:
            return class_bar(spent, shown.scale_ns, cells)
        return [*class_bar(spent, shown.scale_ns * cells / (cells - 1), cells - 1), (LONGER, "strong")]

    def step_of(row: RequestRow) -> str | None:
        return row.step if is_in_flight(row) else row.main_step or row.step

    def step(row: RequestRow, cells: int) -> Line:
        name = step_of(row) or ""
        known = steps.BY_NAME.get(name)
        return [(printable(name), known.class_ if known else "")]

    def of_class(class_: str) -> Column[RequestRow]:
        def cell(row: RequestRow, cells: int) -> str:
            return milliseconds(classes(row, shown.now_ns)[class_])

        title = SHORT.get(class_, class_)
        return Column(
            class_, title, cell, 8, right=True, sort=lambda row: classes(row, shown.now_ns)[class_],
            priority=_CLASS_PRIORITY[class_],
        )  # fmt: skip

    def total(row: RequestRow, cells: int) -> str:
        return milliseconds(total_ns(row, shown.now_ns))

    def lead(row: RequestRow, cells: int) -> Line:
        late = row.lead_ns is not None and row.lead_ns < 0
        return [(grid.ms(None if row.lead_ns is None else row.lead_ns / 1e6), "warn" if late else "")]

    def outcome(row: RequestRow, cells: int) -> Line:
        bad = row.outcome not in ("finished", "in flight")
        return [(fit(printable(row.outcome), min(cells, len(row.outcome))), "bad" if bad else "")]

    def session(row: RequestRow, cells: int) -> str:
        return f"{row.turn or '?'} of …{printable(row.session)[-6:]}" if row.session else ""

    def number(value: int | None) -> str:
        return grid.NONE if value is None else f"{value:,}"

    def count(name: str, title: str, priority: int) -> Column[RequestRow]:
        return Column(
            name, title, lambda row, cells: number(getattr(row, name)), 7, right=True,
            sort=lambda row: getattr(row, name), priority=priority,
        )  # fmt: skip

    return [
        Column("marks", "", marked, 3, sort=lambda row: len(marks(row)) or None),
        Column("request", "request", lambda row, cells: name_cell(row, shown), 10, sort=newest),
        Column(
            "arrived", "arrived", lambda row, cells: utc(row.arrived_at_ns, date=False)[:8], 8,
            sort=lambda row: row.arrived_at_ns, priority=6,
        ),
        Column(
            "ttft", "TTFT ms", ttft, 8, right=True, sort=lambda row: age_ns(row, shown.now_ns),
        ),
        Column(
            "bar", "where it went", bar, least=12, part=0.1,
            sort=lambda row: coordination_share(row, shown.now_ns),
        ),
        Column(
            "step", "in it, or longest step", step, 23, sort=step_of, descending=False,
        ),
        Column(
            "in_step", "ms", lambda row, cells: milliseconds(in_step_ns(row, shown.now_ns)), 8, right=True,
            sort=lambda row: in_step_ns(row, shown.now_ns),
        ),
        *map(of_class, _CLASS_PRIORITY),
        Column(
            "connector", "conn.", lambda row, cells: _CONNECTORS.get(row.connector, row.connector), 5,
            sort=lambda row: row.connector, descending=False, priority=2,
        ),
        Column(
            "pair", "pair", lambda row, cells: pair(row, shown.engines), 27,
            sort=lambda row: (row.p_engine or "", row.d_engine or ""), descending=False, priority=4,
        ),
        count("prompt_tokens", "prompt", 3),
        count("output_tokens", "output", 6),
        Column("outcome", "outcome", outcome, 10, sort=lambda row: row.outcome, descending=False, priority=5),
        Column(
            "session", "turn of session", session, 15,
            sort=lambda row: (row.session, row.turn or 0) if row.session else None, priority=11,
        ),
        Column(
            "total", "total ms", total, 9, right=True, sort=lambda row: total_ns(row, shown.now_ns),
            priority=12,
        ),
        Column(
            "lead", "lead ms", lead, 8, right=True, sort=lambda row: row.lead_ns, descending=False,
            priority=13,
        ),
    ]  # fmt: skip


# --- header ------------------------------------------------------------------------------------------


def header(view: View, shown: Context, order: tuple[str, bool], width: int) -> list[Line]:
    """How many there are, what the marks and the bars mean."""
    frame = view.frame
    if frame is None:
        return [[("waiting for the first figures …", "dim")]]
    in_flight, recent = sum(map(is_in_flight, view.in_flight)), len(view.recent)
    counts = f"{in_flight:,} in flight, "
    if held := len(view.in_flight) - in_flight:
        counts += f"{held:,} over with blocks held, "
    counts += f"{recent:,} of {max(recent, frame.recent_total):,} recent shown"
    first: Line = [(counts, "strong")]
    if order[0] == "request" and order[1]:
        first.append(("  newest first, in flight on top", "dim"))
    if why := {
        "requests": "no request in this window",
        "filter": "no request fits the filter (escape clears it)",
    }.get(view.advice):
        first.append((f"  {why}", "warn"))
    bars: Line = [(f"bars to {span(shown.scale_ns)} ({LONGER} more):", "dim")]
    for class_ in steps.CLASSES:
        bars += [(f" {PATTERN[class_]}", class_), (f" {SHORT.get(class_, class_)} ", "dim")]
    said: Line = []
    for mark, meaning in MARKS.items():
        if length(said) + len(meaning) + 2 <= width:
            said += [(mark, _STYLES[mark]), (f" {meaning}  ", "dim")]
    return [grid.padded(line, width) for line in (first, bars, said)]


class RequestsPage(Page):
    key = "2"
    title = "Requests"
    about = (
        "All requests in flight and the latest of the window: where each one's first token's time went, "
        "and the step it is in. Sort by any column (that of the bars by the part that is coordination wait). "
        "A negative lead: D was ready only after prefill. Enter opens the waterfall."
    )
    hints = (("enter", "open"), ("s", "sort"))

    def __init__(self) -> None:
        super().__init__()
        self._shown = Context()
        self._view: View | None = None

    def compose(self) -> ComposeResult:
        yield Head(id="requests-head")
        yield LiveTable(
            columns(self._shown),
            lambda row: row.id,
            sort="request",
            sorted_anew=self._show_head,
            id="requests",
        )

    def show(self, view: View) -> None:
        self._view = view
        self._shown.update(view)
        self._table().set_rows([*view.in_flight, *view.recent])
        self._show_head()

    def chosen_request(self) -> str | None:
        row = self._table().cursor_row
        return row.id if row else None

    @on(LiveTable.Opened, "#requests")
    def open_row(self, event: LiveTable.Opened) -> None:
        self.post_message(OpenRequest(event.row.id))

    def _table(self) -> LiveTable[RequestRow]:
        return self.query_one("#requests", LiveTable)

    def _show_head(self) -> None:
        view = self._view
        if view is not None:
            order = self._table().sort
            self.query_one("#requests-head", Head).draw(lambda width: header(view, self._shown, order, width))
