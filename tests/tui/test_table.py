"""The live table: order, cursor, columns, mouse, and thousands of rows."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from textual.app import App, ComposeResult
from textual.pilot import Pilot

from kvscope.tui.scrolled import Stumbled
from kvscope.tui.table import Column, LiveTable, lay_out

pytestmark = pytest.mark.anyio


class Item(NamedTuple):
    id: int
    name: str
    ms: float | None


COLUMNS = (
    Column[Item]("id", "id", lambda row, cells: str(row.id), 6, right=True, sort=lambda row: row.id,
                 descending=False),
    Column[Item]("name", "name", lambda row, cells: row.name, least=10, sort=lambda row: row.name),
    Column[Item]("bar", "bar", lambda row, cells: [("█" * cells, "compute")], 12, priority=2),
    Column[Item]("ms", "TTFT", lambda row, cells: "" if row.ms is None else f"{row.ms:.1f}", 9, right=True,
                 sort=lambda row: row.ms),
    Column[Item]("note", "note", lambda row, cells: [("a note that is far too long", "dim")], 8, priority=1),
)  # fmt: skip


def items(count: int) -> list[Item]:
    return [Item(number, f"request-{number}", float(number)) for number in range(1, count + 1)]


class Holder(App[None]):
    def __init__(self, rows: Sequence[Item], sort: str = "ms") -> None:
        super().__init__(ansi_color=True)
        self.table = LiveTable(COLUMNS, lambda row: row.id, sort=sort)
        self.first = rows
        self.opened: list[int] = []
        self.highlighted: list[int | None] = []
        self.stumbled: list[str] = []

    def on_stumbled(self, message: Stumbled) -> None:
        self.stumbled.append(type(message.error).__name__)

    def compose(self) -> ComposeResult:
        yield self.table

    def on_mount(self) -> None:
        self.table.set_rows(self.first)
        self.table.focus()

    def on_live_table_opened(self, message: LiveTable.Opened) -> None:
        self.opened.append(message.row.id)

    def on_live_table_highlighted(self, message: LiveTable.Highlighted) -> None:
        self.highlighted.append(message.row.id if message.row else None)

    def ids(self) -> list[int]:
        return [row.id for row in self.table.rows]

    def line(self, y: int) -> str:
        return self.table.render_line(y).text

    @property
    def chosen(self) -> int | None:
        row = self.table.cursor_row
        return row.id if row else None


async def resize(pilot: Pilot[None], app: Holder, cells: int, lines: int) -> None:
    """Textual lays out anew some time after the terminal has changed."""
    await pilot.resize_terminal(cells, lines)
    deadline = time.monotonic() + 10
    while app.table.outer_size != (cells, lines):
        assert time.monotonic() < deadline
        await pilot.pause(0.01)
    await pilot.pause()


async def press(pilot: Pilot[None], *keys: str) -> None:
    await pilot.press(*keys)
    await pilot.pause()


async def test_rows_are_sorted_and_the_head_says_by_what() -> None:
    app = Holder(items(3))
    async with app.run_test(size=(80, 10)):
        assert app.ids() == [3, 2, 1]
        assert "TTFT↓" in app.line(0)
        assert app.line(1).split() == ["3", "request-3", "█" * 12, "3.0", "a", "note", "…"]


async def test_rows_without_a_value_come_last_either_way() -> None:
    app = Holder([Item(1, "a", None), Item(2, "b", 2.0), Item(3, "c", 3.0)])
    async with app.run_test(size=(80, 10)):
        assert app.ids() == [3, 2, 1]
        app.table.sort_reverse()
        assert app.ids() == [2, 3, 1]


async def test_the_next_column_can_be_chosen_and_each_has_its_own_direction() -> None:
    app = Holder(items(3))
    async with app.run_test(size=(80, 10)):
        app.table.sort_next()
        assert (app.table.sort, app.ids()) == (("id", False), [1, 2, 3])
        app.table.sort_next()
        assert app.table.sort == ("name", True)
        app.table.sort_by("bar")
        assert app.table.sort == ("name", True), "a bar is no order"


async def test_a_click_on_a_head_sorts_and_another_turns_it() -> None:
    app = Holder(items(3))
    async with app.run_test(size=(80, 10)) as pilot:
        await pilot.click(offset=(8, 0))
        assert app.table.sort == ("name", True)
        await pilot.click(offset=(8, 0))
        assert app.table.sort == ("name", False)


async def test_untouched_the_cursor_stays_on_top_whatever_is_there() -> None:
    app = Holder(items(3))
    async with app.run_test(size=(80, 10)):
        assert app.chosen == 3
        app.table.set_rows(items(9))
        assert (app.chosen, app.table.cursor) == (9, 0)


async def test_a_moved_cursor_stays_on_its_row_when_others_come_and_sorting_brings_it_back_to_the_top() -> (
    None
):
    app = Holder(items(5))
    async with app.run_test(size=(80, 10)) as pilot:
        await press(pilot, "down", "down")
        assert app.chosen == 3
        app.table.set_rows(items(50))
        assert (app.chosen, app.table.cursor) == (3, 47)
        app.table.sort_by("id")
        assert (app.chosen, app.table.cursor) == (1, 0)
        await press(pilot, "down", "home")
        app.table.set_rows(items(50)[9:])
        assert app.chosen == 10, "home ties it to the top again"
        await press(pilot, "down")
        app.table.sort_reverse()
        assert app.chosen == 50


async def test_a_row_that_moves_stays_on_its_line_of_the_screen() -> None:
    app = Holder(items(1000))
    async with app.run_test(size=(80, 21)) as pilot:
        await press(pilot, "pagedown", "pagedown", "up")
        chosen, line = app.chosen, app.table.cursor - app.table.scroll_offset.y
        app.table.set_rows(items(1100))
        await pilot.pause()
        assert (app.chosen, app.table.cursor - app.table.scroll_offset.y) == (chosen, line)
        assert str(chosen) in app.line(line + 1)


async def test_a_row_that_vanishes_hands_the_cursor_to_the_one_in_its_place() -> None:
    app = Holder(items(5))
    async with app.run_test(size=(80, 10)) as pilot:
        await press(pilot, "down")
        assert app.chosen == 4
        app.table.set_rows([row for row in items(5) if row.id != 4])
        await pilot.pause()
        assert app.chosen == 3
        assert app.highlighted[-1] == 3
        app.table.set_rows([])
        await pilot.pause()
        assert (app.chosen, app.highlighted[-1]) == (None, None)
        await press(pilot, "down", "enter", "end", "pageup")
        assert app.opened == []
        app.table.set_rows(items(2))
        assert app.chosen == 2


async def test_the_last_of_the_rows_that_vanish_leaves_the_cursor_on_the_new_last() -> None:
    app = Holder(items(5))
    async with app.run_test(size=(80, 10)) as pilot:
        await press(pilot, "end")
        assert app.chosen == 1
        app.table.set_rows(items(5)[2:])
        assert app.chosen == 3


async def test_keys_move_within_the_rows_and_enter_opens() -> None:
    app = Holder(items(100))
    async with app.run_test(size=(80, 11)) as pilot:
        await press(pilot, "up")
        assert app.chosen == 100
        await press(pilot, "pagedown")
        assert app.table.cursor == 10
        await press(pilot, "end")
        assert (app.chosen, app.table.scroll_offset.y) == (1, 90)
        await press(pilot, "down", "enter")
        assert app.opened == [1]


async def test_a_click_chooses_and_a_double_click_opens() -> None:
    app = Holder(items(100))
    async with app.run_test(size=(80, 11)) as pilot:
        await pilot.click(offset=(10, 3))
        assert (app.chosen, app.opened) == (98, [])
        await pilot.click(offset=(10, 5), times=2)
        assert (app.chosen, app.opened) == (96, [96])
        app.table.set_rows(items(2))
        await pilot.click(offset=(10, 8))
        assert app.chosen == 1, "below the rows there is nothing"


async def test_the_wheel_scrolls_without_moving_the_cursor() -> None:
    app = Holder(items(100))
    async with app.run_test(size=(80, 11)) as pilot:
        await press(pilot, "down")
        app.table.scroll_to(y=50, animate=False)
        await pilot.pause()
        app.table.set_rows(items(100))
        await pilot.pause()
        assert (app.chosen, app.table.scroll_offset.y) == (99, 50)


async def test_on_a_narrow_screen_the_least_important_columns_drop_out() -> None:
    app = Holder(items(3))
    async with app.run_test(size=(80, 10)) as pilot:
        assert app.table.shown_columns == ["id", "name", "bar", "ms", "note"]
        await resize(pilot, app, 42, 10)
        assert app.table.shown_columns == ["id", "name", "ms", "note"]
        await resize(pilot, app, 30, 10)
        assert app.table.shown_columns == ["id", "name", "ms"]
        assert "request-3" in app.line(1)


def test_flexible_columns_share_what_is_left() -> None:
    placed = lay_out(COLUMNS, 60)
    assert [(column.name, start, cells) for column, start, cells in placed] == [
        ("id", 0, 6), ("name", 7, 21), ("bar", 29, 12), ("ms", 42, 9), ("note", 52, 8),
    ]  # fmt: skip
    assert lay_out(COLUMNS, 3)[0][2] == 3


async def test_control_characters_in_a_cell_are_not_sent_to_the_terminal() -> None:
    app = Holder([Item(1, "\x1b[2Jgone\n", 1.0)])
    async with app.run_test(size=(80, 10)):
        assert "\x1b" not in app.line(1)
        assert "\ufffd[2Jgone\ufffd" in app.line(1)


async def test_a_row_that_cant_be_drawn_or_sorted_is_said_and_the_others_are_there() -> None:
    app = Holder([Item(1, "a", 1.0), Item(2, "b", "odd")])  # type: ignore[arg-type]
    async with app.run_test(size=(80, 10)) as pilot:
        assert app.ids() == [1, 2], "as they came"
        assert app.line(1).split()[:2] == ["1", "a"]
        assert app.line(2).startswith("can't show this (ValueError)")
        assert app.table.render_line(2).cell_length == app.table.size.width
        for _ in range(3):
            app.table.set_rows([*app.table.rows])
        await pilot.pause()
        assert app.stumbled == ["TypeError", "ValueError"], "each kind once"


async def test_every_line_is_as_wide_as_the_table_also_with_wide_characters() -> None:
    app = Holder([Item(1, "会話" * 40, 1.0), Item(2, "é", None)])
    async with app.run_test(size=(80, 10)):
        assert {app.table.render_line(y).cell_length for y in range(6)} == {app.table.size.width}


async def test_resized_the_cursor_stays_in_sight() -> None:
    app = Holder(items(100))
    async with app.run_test(size=(80, 31)) as pilot:
        await press(pilot, *["down"] * 25)
        await resize(pilot, app, 80, 11)
        line = app.table.cursor - app.table.scroll_offset.y
        assert 0 <= line < 10


async def test_eleven_thousand_rows_are_sorted_and_drawn_without_lag() -> None:
    rows = items(11_000)
    app = Holder(rows)
    async with app.run_test(size=(120, 50)) as pilot:
        await press(pilot, "pagedown", "down")
        chosen = app.chosen
        best = 1.0
        for _ in range(3):
            began = time.perf_counter()
            app.table.set_rows([*rows])
            for y in range(50):
                app.table.render_line(y)
            best = min(best, time.perf_counter() - began)
        assert app.chosen == chosen
        assert best < 0.1


async def test_a_row_is_chosen_by_its_identity() -> None:
    app = Holder(items(100))
    async with app.run_test(size=(80, 11)):
        assert app.table.choose(37)
        assert app.chosen == 37
        assert not app.table.choose(1000)
        assert app.chosen == 37
