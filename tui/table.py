"""A table of thousands of live rows: only lines in sight are drawn, and the cursor stays on its row.

Textual's DataTable draws every cell as a widget would and takes most of a core with 10,000 rows; this one
sorts a list and draws the lines that are in sight.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from rich.cells import cell_len
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from kvscope.text import printable
from kvscope.tui.lines import Line, fit, segments, width
from kvscope.tui.scrolled import Scrolled

RowT = TypeVar("RowT")

_GAP = 1
"""Cells between columns."""


@dataclass(frozen=True)
class Column(Generic[RowT]):
    """One column. Without `width` it shares what is left with others of that kind."""

    name: str
    title: str
    cell: Callable[[RowT, int], str | Line]
    """Of a row, in at most so many cells: text (made printable and cut here), or spans (trusted to be)."""
    width: int | None = None
    least: int = 8
    """Of a column without `width`: narrower than this it drops out."""
    part: float = 0.0
    """Of a column without `width`: the part of the room that it gets at least, before others."""
    right: bool = False
    sort: Callable[[RowT], Any] | None = None
    """What to sort by; None values come last. Without it the column can't be sorted by."""
    descending: bool = True
    """Which way first."""
    priority: int = 0
    """0 never drops out; where the screen is too narrow, the greatest drops first."""


class LiveTable(Scrolled, Generic[RowT], can_focus=True, inherit_bindings=False):
    """Rows under a header, sorted, with a cursor.

    Until the cursor is moved it stays on the top row, whichever that is (the slowest, say). From then on it
    stays on its row, and on its place on the screen when rows move; when the row vanishes, the cursor goes to
    the row that took its place. `home` ties it to the top again, and so does another order.

    Args:
        columns: from left to right.
        key: a row's identity.
        sort: name of the column to sort by first; none keeps the order of `set_rows`.
        sorted_anew: called when the user has chosen another order.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("down,j", "move(1)", "down", show=False),
        Binding("pageup", "page(-1)", "page up", show=False),
        Binding("pagedown", "page(1)", "page down", show=False),
        Binding("home,g", "top", "top", show=False),
        Binding("end,G", "bottom", "bottom", show=False),
        Binding("enter", "open", "open", show=False),
    ]

    class Opened(Message):
        """Enter, or a double click: open this row."""

        def __init__(self, table: LiveTable[Any], row: Any) -> None:
            super().__init__()
            self.table = table
            self.row = row

        @property
        def control(self) -> LiveTable[Any]:
            return self.table

    class Highlighted(Message):
        """The cursor is on another row (None: there are none)."""

        def __init__(self, table: LiveTable[Any], row: Any) -> None:
            super().__init__()
            self.table = table
            self.row = row

        @property
        def control(self) -> LiveTable[Any]:
            return self.table

    def __init__(
        self,
        columns: Sequence[Column[RowT]],
        key: Callable[[RowT], Hashable],
        *,
        sort: str = "",
        descending: bool | None = None,
        row_style: Callable[[RowT], str] | None = None,
        sorted_anew: Callable[[], None] | None = None,
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self._columns = tuple(columns)
        self._by_name = {column.name: column for column in columns}
        self._key = key
        self._row_style = row_style
        self._sorted_anew = sorted_anew
        self._rows: list[RowT] = []
        self._given: Sequence[RowT] = ()
        self._sort = sort if sort in self._by_name else ""
        first = self._by_name[self._sort].descending if self._sort else True
        self._descending = first if descending is None else descending
        self._cursor = 0
        self._cursor_key: Hashable | None = None
        self._at_top = True
        self._laid_out: list[tuple[Column[RowT], int, int]] = []
        """Columns that have room, each with where it starts and its cells."""

    # --- what it holds ---------------------------------------------------------------------------

    @property
    def rows(self) -> Sequence[RowT]:
        """All rows, in the order shown."""
        return self._rows

    @property
    def cursor(self) -> int:
        """Position of the chosen row."""
        return self._cursor

    @property
    def cursor_row(self) -> RowT | None:
        """The chosen row; None in an empty table."""
        return self._rows[self._cursor] if self._rows else None

    @property
    def sort(self) -> tuple[str, bool]:
        """Column sorted by ("" for the given order), and whether the greatest comes first."""
        return self._sort, self._descending

    @property
    def shown_columns(self) -> list[str]:
        """Names of the columns that have room."""
        return [column.name for column, _, _ in self._laid_out]

    def set_rows(self, rows: Sequence[RowT]) -> None:
        """Show these rows instead; the cursor and the place on the screen stay."""
        self._given = rows
        self._rearrange()

    def sort_by(self, name: str, descending: bool | None = None) -> None:
        """Sort by that column, its own way round where that is not said."""
        column = self._by_name.get(name)
        if column is None or column.sort is None:
            return
        self._sort = name
        self._descending = column.descending if descending is None else descending
        self._at_top = True
        self._rearrange()
        if self._sorted_anew is not None:
            self._sorted_anew()

    def sort_next(self, by: int = 1) -> None:
        """Sort by the next column in sight that can be sorted by."""
        names = [column.name for column, _, _ in self._laid_out if column.sort is not None]
        if not names:
            return
        at = names.index(self._sort) + by if self._sort in names else 0
        self.sort_by(names[at % len(names)])

    def sort_reverse(self) -> None:
        if self._sort:
            self.sort_by(self._sort, not self._descending)

    def choose(self, key: Hashable) -> bool:
        """Put the cursor on the row of that identity; False where there is none."""
        at = self._find(key)
        if at is None:
            return False
        self._put_cursor(at)
        return True

    def _find(self, key: Hashable) -> int | None:
        return next((at for at, row in enumerate(self._rows) if self._key(row) == key), None)

    def _rearrange(self) -> None:
        before = self._cursor
        was = self._cursor_key
        try:
            self._rows = self._in_order(self._given)
        except Exception as error:  # values that can't be compared: the order they came in
            self.stumble(error)
            self._rows = list(self._given)
        at: int | None = 0
        if not self._at_top:
            at = self._find(was) if was is not None else None
            if at is None:  # it vanished: the row that took its place
                at = before
        self._cursor = max(0, min(at or 0, len(self._rows) - 1))
        self._cursor_key = self._key(self._rows[self._cursor]) if self._rows else None
        self.remake()
        self._keep_place(before)
        if self._cursor_key != was:
            self.post_message(self.Highlighted(self, self.cursor_row))

    def _in_order(self, rows: Sequence[RowT]) -> list[RowT]:
        column = self._by_name.get(self._sort)
        if column is None or column.sort is None:
            return list(rows)
        sort = column.sort
        keys = [sort(row) for row in rows]
        known = [at for at, key in enumerate(keys) if key is not None]
        known.sort(key=keys.__getitem__, reverse=self._descending)
        ordered = [rows[at] for at in known]
        if len(known) < len(rows):
            ordered += [row for row, key in zip(rows, keys, strict=True) if key is None]
        return ordered

    def _keep_place(self, before: int) -> None:
        """Scroll so that the cursor stays where it was on the screen, if it was in sight."""
        top = int(self.scroll_offset.y)
        if self._at_top:
            top = 0
        elif top <= before < top + self._page_rows():
            top += self._cursor - before
        top = max(0, min(top, len(self._rows) - self._page_rows()))
        if top != int(self.scroll_offset.y):
            self.scroll_to(y=top, animate=False, force=True)

    # --- the cursor -----------------------------------------------------------------------------

    def _page_rows(self) -> int:
        return max(1, int(self.size.height) - 1)

    def _put_cursor(self, at: int, at_top: bool = False) -> None:
        self._at_top = at_top
        at = max(0, min(at, len(self._rows) - 1))
        was, was_at = self._cursor_key, self._cursor
        self._cursor = at
        self._cursor_key = self._key(self._rows[at]) if self._rows else None
        top = int(self.scroll_offset.y)
        if at < top or at_top:
            top = at
        elif at >= top + self._page_rows():
            top = at - self._page_rows() + 1
        if top != int(self.scroll_offset.y):
            self.scroll_to(y=top, animate=False, force=True)
        for line in (was_at - top + 1, at - top + 1):
            if 0 < line < self.size.height:
                self.refresh(Region(0, line, self.size.width, 1))
        if self._cursor_key != was:
            self.post_message(self.Highlighted(self, self.cursor_row))

    def action_move(self, by: int) -> None:
        self._put_cursor(self._cursor + by)

    def action_page(self, by: int) -> None:
        self._put_cursor(self._cursor + by * self._page_rows())

    def action_top(self) -> None:
        self._put_cursor(0, at_top=True)

    def action_bottom(self) -> None:
        self._put_cursor(len(self._rows) - 1)

    def action_open(self) -> None:
        if (row := self.cursor_row) is not None:
            self.post_message(self.Opened(self, row))

    def on_click(self, event: events.Click) -> None:
        event.stop()
        if event.y == 0:
            self._click_header(event.x)
            return
        at = int(self.scroll_offset.y) + event.y - 1
        if at < len(self._rows):
            self._put_cursor(at)
            if event.chain >= 2:
                self.action_open()

    def _click_header(self, x: int) -> None:
        for column, start, cells in self._laid_out:
            if start <= x < start + cells + _GAP and column.sort is not None:
                if column.name == self._sort:
                    self.sort_reverse()
                else:
                    self.sort_by(column.name)
                return

    # --- drawing --------------------------------------------------------------------------------

    def make(self) -> int:
        self._laid_out = lay_out(self._columns, self.cells)
        return len(self._rows) + 1

    def on_resize(self, event: events.Resize) -> None:
        if self._cursor >= int(self.scroll_offset.y) + self._page_rows():
            self.scroll_to(y=self._cursor - self._page_rows() + 1, animate=False, force=True)

    def render_line(self, y: int) -> Strip:
        if y == 0:
            line, base = self._header(), "head"
        else:
            at = int(self.scroll_offset.y) + y - 1
            if at >= len(self._rows):
                line, base = [], ""
            else:
                row = self._rows[at]
                try:
                    line, base = self._row(row), self._row_style(row) if self._row_style else ""
                except Exception as error:
                    line, base = [(fit(self.stumble(error), self.cells), "")], "bad"
                if at == self._cursor:
                    base = f"{base} cursor".strip()
        if self.has_class("-stale"):
            base = f"{base} dim"
        strip = Strip(segments(line, self.palette, base))
        return strip.extend_cell_length(self.size.width, self.palette[base]).adjust_cell_length(
            self.size.width
        )

    def _header(self) -> Line:
        line: Line = []
        for column, _, cells in self._laid_out:
            title = column.title
            if column.name == self._sort:
                arrow = "↓" if self._descending else "↑"
                title = fit(title, min(cell_len(title), cells - 1)) + arrow
            line += [(fit(title, cells, column.right), ""), (" " * _GAP, "")]
        return line

    def _row(self, row: RowT) -> Line:
        line: Line = []
        for column, _, cells in self._laid_out:
            made = column.cell(row, cells)
            if isinstance(made, str):
                line.append((fit(printable(made), cells, column.right), ""))
            else:
                used = width(made)
                if used > cells:
                    made, used = _cut(made, cells), cells
                blank = (" " * (cells - used), "")
                line += [blank, *made] if column.right else [*made, blank]
            line.append((" " * _GAP, ""))
        return line


def lay_out(columns: Sequence[Column[RowT]], room: int) -> list[tuple[Column[RowT], int, int]]:
    """The columns that fit into `room` cells, each with where it starts and how wide it is."""
    chosen = list(columns)

    def least(column: Column[RowT]) -> int:
        return max(column.least, int(column.part * room))

    def needed() -> int:
        return sum((c.width if c.width is not None else least(c)) + _GAP for c in chosen) - _GAP

    while needed() > room:
        droppable = [column for column in chosen if column.priority > 0]
        if not droppable:
            break
        # Of equals the right-most drops first.
        worst = max(droppable, key=lambda column: (column.priority, chosen.index(column)))
        chosen.remove(worst)
    flexible = [column for column in chosen if column.width is None]
    spare = max(0, room - needed())
    placed = []
    at = 0
    for column in chosen:
        if column.width is not None:
            cells = column.width
        else:
            share = spare // len(flexible)
            flexible.remove(column)
            spare -= share
            cells = least(column) + share
        cells = max(0, min(cells, room - at))
        placed.append((column, at, cells))
        at += cells + _GAP
    return placed


def _cut(line: Line, cells: int) -> Line:
    cut: Line = []
    for text, style in line:
        length = cell_len(text)
        if length >= cells:
            return [*cut, (fit(text, cells), style)] if cells else cut
        cut.append((text, style))
        cells -= length
    return cut
