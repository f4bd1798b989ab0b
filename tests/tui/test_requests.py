"""The page Requests: what its cells say, their order, and that thousands of rows cost nothing."""

from __future__ import annotations

from typing import Any

import pytest
from textual.app import App, ComposeResult

from kvscope import steps
from kvscope.frame import RequestRow
from kvscope.tui.lines import Line, plain, width
from kvscope.tui.page import OpenRequest
from kvscope.tui.pages.requests import MARKS, RequestsPage, columns, header
from kvscope.tui.pages.rows import (
    Context,
    age_ns,
    classes,
    common_prefix,
    in_step_ns,
    marks,
    newest,
    scale_ns,
)
from kvscope.tui.table import LiveTable, lay_out
from kvscope.tui.view import View

from . import frames
from .frames import MS, NOW, S


def view(**changes: Any) -> View:
    made = View(clock=lambda: 0.0)
    made.apply(frames.frame(**changes))
    return made


def shown(one: View) -> Context:
    context = Context()
    context.update(one)
    return context


def cells(row: RequestRow, context: Context, room: int = 200) -> dict[str, str]:
    """Each column's text of one row, at a room's width."""
    texts = {}
    for column, _, size in lay_out(columns(context), room):
        made = column.cell(row, size)
        line: Line = [(made, "")] if isinstance(made, str) else made
        assert isinstance(made, str) or width(line) <= size, column.name
        texts[column.name] = plain(line)
    return texts


def test_the_figures_are_those_of_the_row() -> None:
    row = frames.request(7, session="99887766554433", turn=3, prompt_tokens=12_345)
    found = cells(row, shown(view(recent=[row], in_flight=[])), 320)
    assert found["ttft"] == "200.0"
    assert (found["compute"], found["capacity"], found["transfer"]) == ("40.0", "10.0", "30.0")
    assert (found["coordination"], found["unknown"]) == ("115.0", "5.0")
    assert (found["step"], found["in_step"]) == ("readiness.detect", "80.0")
    assert (found["prompt_tokens"], found["output_tokens"]) == ("12,345", "16")
    assert (found["connector"], found["pair"]) == ("push", "prefill-0 → decode-0")
    assert (found["outcome"], found["session"]) == ("finished", "3 of …554433")
    assert (found["total"], found["lead"]) == ("350.0", "12.0")


def test_a_request_in_flight_grows_with_the_clock() -> None:
    row = frames.in_flight(1, "transfer.dispatch", 3 * S)
    assert in_step_ns(row, NOW) == 3 * S
    assert age_ns(row, NOW + S) == 4 * S + 50 * MS
    assert classes(row, NOW)[steps.COORDINATION] == 3 * S + 115 * MS
    found = cells(row, shown(view(in_flight=[row], recent=[])))
    assert found["ttft"] == ">3050.0", "more than that, as it has no first token yet"
    assert (found["step"], found["in_step"]) == ("transfer.dispatch", "3000.0")


def test_a_decode_side_that_came_late_is_marked() -> None:
    """router#187: it registered after prefill was over."""
    lead = next(column for column in columns(Context()) if column.name == "lead")
    assert lead.cell(frames.request(1, lead_ns=-40 * MS), 8) == [("-40.0", "warn")]
    assert lead.cell(frames.request(1, lead_ns=None), 8) == [("–", "")]


def test_one_that_generates_keeps_its_ttft() -> None:
    row = frames.in_flight(1, "decode.generate", 5 * S, ttft_ns=200 * MS)
    assert cells(row, shown(view(recent=[], in_flight=[row])), 320)["total"] == "5050.0", "it grows"
    assert age_ns(row, NOW) == 200 * MS
    assert sum(classes(row, NOW).values()) == 200 * MS, "generating is no part of TTFT"


def test_what_was_not_observed_is_not_zero() -> None:
    row = frames.request(
        1, ttft_ns=None, outcome="lost", step="transfer.wire", main_step=None, prompt_tokens=None,
        output_tokens=None, d_engine=None,
    )  # fmt: skip
    found = cells(row, shown(view(recent=[row])))
    assert (found["ttft"], found["in_step"], found["output_tokens"]) == ("–", "–", "–")
    assert found["step"] == "transfer.wire"
    assert found["pair"] == "prefill-0 → ?"


@pytest.mark.parametrize(
    ("changes", "mark"),
    [
        ({}, ""),
        ({"read_after_expiry": True}, "!"),
        ({"recomputed_tokens": 12}, "R"),
        ({"outcome": "lost"}, "x"),
        ({"joined_by": "peer not instrumented"}, "J"),
        ({"joined_by": "unjoined"}, "J"),
        ({"clock_error_ns": 1}, "±"),
        ({"in_flight": True, "outcome": "in flight"}, ">"),
        ({"in_flight": True, "outcome": "in flight", "joined_by": "unjoined"}, ">"),
    ],
)
def test_each_mark_has_its_cause_and_its_meaning(changes: dict[str, Any], mark: str) -> None:
    assert marks(frames.request(1, **changes)) == mark
    assert set(mark) <= set(MARKS)


def test_bars_are_to_one_scale_and_say_when_they_go_on() -> None:
    context = shown(view())
    assert context.scale_ns == 500 * MS, "the next round number above the p90 of 410 ms"
    bar = next(column for column in columns(context) if column.name == "bar")
    half = bar.cell(frames.request(1, compute_ns=300 * MS, coordination_ns=200 * MS, capacity_ns=0,
                                   transfer_ns=0, unknown_ns=0), 20)  # fmt: skip
    assert half == [("█" * 12, steps.COMPUTE), ("░" * 8, steps.COORDINATION)]
    long = bar.cell(frames.request(1, coordination_ns=3 * S), 20)
    assert isinstance(long, list)
    assert width(long) == 20
    assert plain(long).endswith("▶")


@pytest.mark.parametrize(
    ("p90_ms", "scale"), [(0.4, 1), (1, 1), (1.2, 2), (99, 100), (101, 200), (480, 500), (760, 1000)]
)
def test_the_scale_is_a_round_number_above_p90(p90_ms: float, scale: int) -> None:
    assert scale_ns(p90_ms, [], NOW) == scale * MS


def test_before_any_first_token_the_scale_is_that_of_the_oldest() -> None:
    assert scale_ns(None, [frames.in_flight(1, age_ns=3 * S)], NOW) == 5 * S


def test_what_all_ids_begin_with_is_left_out() -> None:
    assert common_prefix(["chatcmpl-aa-1", "chatcmpl-aa-2", "chatcmpl-ab-2"]) == len("chatcmpl-")
    assert common_prefix(["chatcmpl-1"]) == 0
    assert common_prefix(["abc1", "abc2"]) == 0


def test_ids_from_clients_cannot_drive_the_terminal() -> None:
    row = frames.request(1, client_id="evil\x1b[31m\n日本語" * 9, p_engine="p\x1b]0;x\x07", outcome="od\x9bd")
    found = cells(row, shown(view(recent=[row], in_flight=[])))
    assert all(text.isprintable() for text in found.values())


@pytest.mark.parametrize("room", [79, 120, 160, 240])
def test_there_is_room_for_what_matters(room: int) -> None:
    names = [column.name for column, _, _ in lay_out(columns(Context()), room)]
    assert {"marks", "request", "ttft", "bar", "step", "coordination"} <= set(names)
    assert ("pair" in names) == (room >= 120)
    for line in header(view(), shown(view()), ("request", True), room):
        assert width(line) <= room


def test_every_column_can_be_sorted_by() -> None:
    rows = [
        frames.in_flight(1),
        frames.request(2, session="7", turn=1),
        frames.request(3, prompt_tokens=None),
    ]
    for column in columns(shown(view())):
        assert column.sort is not None, column.name
        sorted([key for key in map(column.sort, rows) if key is not None])


def test_the_counts_say_how_many_are_not_shown() -> None:
    one = view(recent_total=31_200)
    text = plain(header(one, shown(one), ("request", True), 120)[0])
    assert text.startswith("3 in flight, 20 of 31,200 recent shown")
    assert "newest first" in text
    assert "newest first" not in plain(header(one, shown(one), ("ttft", True), 120)[0])


def test_one_whose_blocks_are_held_after_its_end_is_not_in_flight() -> None:
    row = frames.request(1, outcome="finished", in_flight=True, step=None)
    one = view(in_flight=[row, frames.in_flight(2)], recent=[])
    text = plain(header(one, shown(one), ("request", True), 120)[0])
    assert text.startswith("1 in flight, 1 over with blocks held, 0 of 20 recent shown")
    assert marks(row) == ""
    assert age_ns(row, NOW) == 200 * MS


def test_no_request_fits_the_filter() -> None:
    one = view(in_flight=[], recent=[], recent_total=0)
    one.filters = ("connector=pull",)
    assert "no request fits the filter" in plain(header(one, shown(one), ("request", True), 120)[0])


class Alone(App[None]):
    """The page and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def compose(self) -> ComposeResult:
        yield RequestsPage()

    def on_open_request(self, message: OpenRequest) -> None:
        self.opened.append(message.request_id)


@pytest.mark.anyio
async def test_in_flight_on_top_then_newest_and_enter_opens() -> None:
    app = Alone()
    async with app.run_test(size=(120, 30)) as pilot:
        old = frames.in_flight(1004, age_ns=200 * S)
        app.query_one(RequestsPage).show(view(in_flight=[old, *frames.frame().in_flight]))
        table = app.query_one(LiveTable)
        table.focus()
        await pilot.pause()
        assert [row.id for row in table.rows[:5]] == ["1002", "1001", "1003", "1004", "20"]
        assert [newest(row) for row in table.rows] == sorted(map(newest, table.rows), reverse=True)
        await pilot.press("down", "enter")
        await pilot.pause()
        assert app.opened == ["1001"]
        assert app.query_one(RequestsPage).chosen_request() == "1001"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("column", "first"),
    [
        ("ttft", "late"),
        ("coordination", "waits"),
        ("bar", "waits"),
        ("prompt_tokens", "long"),
        ("step", "lost"),
    ],
)
async def test_sorting_puts_the_greatest_first(column: str, first: str) -> None:
    rows = [
        frames.request(1),
        frames.request(2, id="late", ttft_ns=9 * S),
        frames.request(3, id="waits", coordination_ns=8 * S),
        frames.request(4, id="long", prompt_tokens=100_000),
        # Sorted by the step that it shows: the longest, not the one in which it was lost.
        frames.request(5, id="lost", outcome="lost", step="transfer.wire", main_step="prefill.queue"),
    ]
    app = Alone()
    async with app.run_test(size=(160, 30)):
        app.query_one(RequestsPage).show(view(recent=rows, in_flight=[]))
        table = app.query_one(LiveTable)
        table.sort_by(column)
        assert table.rows[0].id == first


@pytest.mark.anyio
async def test_cells_of_rows_out_of_sight_are_not_made() -> None:
    made = 0
    app = Alone()
    async with app.run_test(size=(120, 30)) as pilot:
        page = app.query_one(RequestsPage)
        flying = [frames.in_flight(number) for number in range(20_001, 21_001)]
        page.show(view(recent=frames.many(10_000), in_flight=flying, recent_total=31_200))
        table = app.query_one(LiveTable)
        await pilot.pause()
        assert len(table.rows) == 11_000
        inner = table._row

        def counted(row: RequestRow) -> Line:
            nonlocal made
            made += 1
            return inner(row)

        table._row = counted  # type: ignore[method-assign]
        table.refresh()
        await pilot.pause()
        assert 0 < made <= 60
