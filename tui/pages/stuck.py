"""Stuck: every request in flight by how long it has been in its step, and what it waits for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from textual import on
from textual.app import ComposeResult

from kvscope import steps
from kvscope.frame import RequestRow
from kvscope.text import printable, span, utc
from kvscope.tui.lines import Line, fit
from kvscope.tui.page import OpenRequest, Page
from kvscope.tui.pages import grid
from kvscope.tui.pages.rows import Context, Head, name_cell, pair, ttft_ms
from kvscope.tui.table import Column, LiveTable
from kvscope.tui.view import View
from kvscope.tui.wrong import (
    HELD,
    LONG_NS,
    STUCK_NS,
    TIMES_P99,
    S,
    age_ns,
    how_alarming,
    silent,
    step_name,
    waits,
)

NO_GAUGE = "none"
_RUNNING = ("prefill.compute", "decode.first_step", "decode.generate")
_GROUPS = 3
_WELL = "Nothing waits too long for a first token"
_OWN = re.compile(
    r", [\d.]+ (?:s|min|h)\b|; lease ends in [\d.]+ (?:s|min|h)\b| of [\d.]+ (?:[kMGT]?B|tokens)\b"
)
"""What tells one request's wait from another's of the same cause: ages, sizes."""


class Group(NamedTuple):
    """Requests that have something in common."""

    name: str
    requests: int
    oldest_ns: int
    style: str = ""
    """The gravest of theirs."""


def cause(row: RequestRow) -> str:
    """What it waits for without ages and sizes."""
    return _OWN.sub("", row.waits_for)


def oldest_first(row: RequestRow, now_ns: int) -> tuple[bool, int]:
    """The order of the page, greatest first: by age in the step, those that generate below the others."""
    return waits(row), age_ns(row, now_ns) or 0


def gauge(row: RequestRow) -> str:
    """The vLLM gauge that counts it, such as `D waiting`; `none` while it is between engines or in a
    frontend; empty where the step is not known."""
    step = steps.BY_NAME.get(row.step or "")
    if step is None or step.name == "unknown":
        return NO_GAUGE if step_name(row) == HELD else ""
    if step.name in ("prefill.frontend", "registration.route"):
        return NO_GAUGE
    if step.stage != "prefill" and row.d_engine is None:
        return NO_GAUGE
    engine = "P" if step.stage == "prefill" and row.p_engine else "D"
    return f"{engine} {'running' if step.name in _RUNNING else 'waiting'}"


def hidden(row: RequestRow) -> str:
    """What vLLM's gauges do not tell of a request, in words; empty where one counts it."""
    if gauge(row) != NO_GAUGE:
        return ""
    if step_name(row) == HELD:
        return "over, and P still holds blocks"
    if row.step == "prefill.frontend":
        return "still in P's API server"
    return "P leg over, its blocks held for a D that has not come" if row.p_engine else "not on D yet"


def not_begun(row: RequestRow, now_ns: int) -> bool:
    """Registered by D under push for long, and nothing of it was seen on P."""
    step = steps.BY_NAME.get(row.step or "")
    return (
        row.connector == "push"
        and row.p_engine is None
        and row.d_engine is not None
        and step is not None
        and step.stage in ("registration", "transfer")
        and (age_ns(row, now_ns) or 0) > LONG_NS
    )


def grouped(
    rows: Iterable[RequestRow],
    name: Callable[[RequestRow], str],
    now_ns: int,
    p99_ms: float | None = None,
    at_most: int = _GROUPS,
) -> list[Group]:
    """Groups by `name`, the one with the oldest request first, the last of many together; requests whose name
    is empty are left out."""
    found: dict[str, list[RequestRow]] = {}
    for row in rows:
        if text := name(row):
            found.setdefault(text, []).append(row)
    groups = []
    for text, members in found.items():
        oldest = max(members, key=lambda row: age_ns(row, now_ns) or 0)
        groups.append(
            Group(text, len(members), age_ns(oldest, now_ns) or 0, how_alarming(oldest, now_ns, p99_ms))
        )
    groups.sort(key=lambda group: (-group.oldest_ns, group.name))
    if len(groups) > at_most:
        rest = groups[at_most - 1 :]
        more = Group(f"{len(rest)} others", sum(g.requests for g in rest), rest[0].oldest_ns, rest[0].style)
        groups = [*groups[: at_most - 1], more]
    return groups


# --- lines -------------------------------------------------------------------------------------------


def summary(view: View, width: int) -> list[Line]:
    """Whether anything is stuck, in which steps and on what; what vLLM's own gauges do not tell."""
    if view.frame is None:
        return [[("waiting for the first figures …", "dim")]]
    rows, now, p99 = view.in_flight, view.now_ns, ttft_ms(view, "p99")
    text, how = verdict(view)
    lines = grid.wrapped(text, width, how)
    waiting = [row for row in rows if waits(row)]
    if waiting:
        half = (width - 4) // 2
        by_step = grouped(waiting, step_name, now, p99)
        by_cause = grouped(waiting, cause, now, p99)
        lines += grid.beside(_block("step", by_step, half), _block("waits for", by_cause, half), half)
        if groups := grouped(waiting, hidden, now, p99):
            said = "; ".join(f"{g.requests} {g.name} (oldest {span(g.oldest_ns)})" for g in groups)
            lines += grid.wrapped(f"In no vLLM gauge: {said}.", width, "warn", "  ")
        if late := [row for row in waiting if not_begun(row, now)]:
            oldest = span(max(age_ns(row, now) or 0 for row in late))
            said = f"{len(late):,} registered by D, no progress on P (oldest {oldest})."
            lines += grid.wrapped(said, width, "warn", "  ")
    if view.frame is not None and (quiet := silent(view.frame.engines, rows, now)):
        said = f"{'; '.join(quiet)}: does its engine hang? What generates has no limit of its own here."
        lines += grid.wrapped(said, width, "warn", "  ")
    return lines


def verdict(view: View) -> tuple[str, str]:
    """A sentence that says whether anything is stuck, and its style."""
    rows, now, p99 = view.in_flight, view.now_ns, ttft_ms(view, "p99")
    at = f"{utc(now, date=False)[:8]} UTC"
    if view.filters:
        at += ", only those that fit the filter"
    if not rows:
        if view.history or (view.frame is not None and not view.frame.live):
            return f"Nothing was in flight at {at}; what never finished is in Requests, by outcome.", ""
        return f"Nothing is in flight, so nothing is stuck (as of {at}).", "good"
    waiting = [row for row in rows if waits(row)]
    held = sum(step_name(row) == HELD for row in rows)
    counts = f"{len(waiting) - held:,} wait for a first token, {len(rows) - len(waiting):,} generate"
    counts += f", {held:,} are over with blocks held" if held else ""
    if not waiting:
        return f"{_WELL}: {counts} (as of {at}).", "good"
    styles = [how_alarming(row, now, p99) for row in waiting]
    stuck, slow = styles.count("bad"), styles.count("warn")
    oldest = max(waiting, key=lambda row: age_ns(row, now) or 0)
    longest = f"the oldest {span(age_ns(oldest, now) or 0)} in {step_name(oldest)}"
    if stuck:
        return f"{stuck:,} STUCK for more than {STUCK_NS // S} s in one step, {longest}; {counts}.", "bad"
    if slow:
        return f"{slow:,} unusually long in one step, {longest}; {counts}.", "warn"
    return f"{_WELL}: {counts}, {longest} (as of {at}).", "good"


def _block(title: str, groups: Sequence[Group], width: int) -> list[Line]:
    """Groups as a small table."""
    names = max(1, width - 18)
    lines: list[Line] = [[(f"{fit(title, names)} {'count':>7}  {'oldest':>8}", "dim")]]
    for group in groups:
        name, oldest = fit(printable(group.name), names), span(group.oldest_ns)
        lines.append([(f"{name} {group.requests:>7,}  ", ""), (f"{oldest:>8}", group.style)])
    return lines


def columns(shown: Context) -> list[Column[RequestRow]]:
    """The table's columns; cells are made only for rows in sight."""

    def age(row: RequestRow, cells: int) -> Line:
        ns = age_ns(row, shown.now_ns)
        if ns is None:
            return [(grid.NONE, "dim")]
        return [(span(ns), how_alarming(row, shown.now_ns, shown.p99_ms))]

    def step(row: RequestRow, cells: int) -> Line:
        known = steps.BY_NAME.get(row.step or "")
        return [(step_name(row), known.class_ if known else "dim")]

    def counted(row: RequestRow, cells: int) -> Line:
        text = gauge(row)
        return [(text, "warn" if text == NO_GAUGE else "")]

    return [
        Column(
            "request", "request", lambda row, cells: name_cell(row, shown), 11, sort=lambda row: row.client_id
        ),
        Column(
            "age", "in it for", age, 10, right=True, sort=lambda row: oldest_first(row, shown.now_ns),
        ),
        Column("step", "step", step, 23, sort=lambda row: row.step, descending=False),
        Column(
            "waits_for", "waits for", lambda row, cells: row.waits_for, least=26,
            sort=lambda row: row.waits_for or None, descending=False,
        ),
        Column("gauge", "vLLM gauge", counted, 10, sort=gauge, descending=False, priority=1),
        Column(
            "pair", "pair", lambda row, cells: pair(row, shown.engines), 27,
            sort=lambda row: (row.p_engine or "", row.d_engine or ""), descending=False, priority=2,
        ),
        Column(
            "total", "since arrival", lambda row, cells: span(max(0, shown.now_ns - row.arrived_at_ns)), 13,
            right=True, sort=lambda row: -row.arrived_at_ns, priority=3,
        ),
        Column(
            "connector", "connector", lambda row, cells: row.connector, 13, sort=lambda row: row.connector,
            descending=False, priority=4,
        ),
        Column(
            "prompt_tokens", "prompt", lambda row, cells: grid.count(row.prompt_tokens), 7, right=True,
            sort=lambda row: row.prompt_tokens, priority=5,
        ),
    ]  # fmt: skip


class StuckPage(Page):
    key = "4"
    title = "Stuck"
    about = (
        "Every request in flight by how long it has been in its step, the oldest first, with what it waits "
        f"for and which of vLLM's gauges counts it. Yellow: more than {LONG_NS // S} s, or {TIMES_P99} times "
        f"the p99 of TTFT; red: more than {STUCK_NS // S} s."
    )
    hints = (("enter", "open"), ("s", "sort"))

    def __init__(self) -> None:
        super().__init__()
        self._shown = Context()

    def compose(self) -> ComposeResult:
        yield Head(id="stuck-head")
        yield LiveTable(columns(self._shown), lambda row: row.id, sort="age", id="stuck")

    def show(self, view: View) -> None:
        self._shown.update(view)
        self._table().set_rows(view.in_flight)
        self.query_one("#stuck-head", Head).draw(lambda width: summary(view, width))

    def chosen_request(self) -> str | None:
        row = self._table().cursor_row
        return row.id if row else None

    @on(LiveTable.Opened, "#stuck")
    def open_row(self, event: LiveTable.Opened) -> None:
        self.post_message(OpenRequest(event.row.id))

    def _table(self) -> LiveTable[RequestRow]:
        return self.query_one("#stuck", LiveTable)
