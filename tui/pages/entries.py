"""Lines of which some can be chosen and opened."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

from textual import events
from textual.binding import Binding
from textual.message import Message
from textual.strip import Strip

from kvscope.tui.lines import Line, segments
from kvscope.tui.page import LinesView


class Entry(NamedTuple):
    """A line, and what opening it asks for: filters; None where there is nothing to open."""

    line: Line
    opens: tuple[str, ...] | None = None


class EntriesView(LinesView):
    """Lines with a cursor that stops only at those that can be opened; none is chosen at first."""

    BINDINGS: ClassVar[list[Any]] = [
        Binding("down,j", "move(1)", "down", show=False),
        Binding("up,k", "move(-1)", "up", show=False),
        Binding("home,g", "top", "top", show=False),
        Binding("enter", "open", "open", show=False),
    ]

    class Opened(Message):
        """Enter, or a double click: open this entry."""

        def __init__(self, entry: Entry) -> None:
            super().__init__()
            self.entry = entry

    def __init__(self) -> None:
        super().__init__()
        self._entries: Sequence[Entry] = ()
        self._chosen: tuple[str, ...] | None = None

    @property
    def chosen(self) -> Entry | None:
        at = self._at()
        return None if at is None else self._entries[at]

    def draw_entries(self, draw: Callable[[int], Sequence[Entry]]) -> None:
        """Show what `draw(width)` makes; what is chosen stays so while it is there."""

        def lines(cells: int) -> list[Line]:
            self._entries = draw(cells)
            if self._at() is None:
                self._chosen = None
            return [entry.line for entry in self._entries]

        self.draw(lines)

    def action_move(self, by: int) -> None:
        at = self._at()
        if at is None:
            at = -1 if by > 0 else len(self._entries) if self._bottom() else -1
        ahead = range(at + by, len(self._entries) if by > 0 else -1, by)
        found = next((i for i in ahead if self._entries[i].opens is not None), None)
        if found is not None:
            self._choose(found)
        elif by < 0:
            self.action_top()
        else:
            self.scroll_relative(y=by, animate=False)

    def action_top(self) -> None:
        self._chosen = None
        self.scroll_to(y=0, animate=False)
        self.refresh()

    def action_open(self) -> None:
        if entry := self.chosen:
            self.post_message(self.Opened(entry))

    def on_click(self, event: events.Click) -> None:
        at = int(self.scroll_offset.y) + event.y
        if 0 <= at < len(self._entries) and self._entries[at].opens is not None:
            event.stop()
            self._choose(at)
            if event.chain >= 2:
                self.action_open()

    def render_line(self, y: int) -> Strip:
        at = self._at()
        if at is None or at != int(self.scroll_offset.y) + y or self._palette is None:
            return super().render_line(y)
        strip = Strip(segments(self._entries[at].line, self._palette, "cursor"))
        width = self.size.width
        return strip.extend_cell_length(width, self._palette["cursor"]).adjust_cell_length(width)

    def _at(self) -> int | None:
        if self._chosen is None:
            return None
        return next((i for i, entry in enumerate(self._entries) if entry.opens == self._chosen), None)

    def _bottom(self) -> bool:
        return int(self.scroll_offset.y) >= self.max_scroll_y > 0

    def _choose(self, at: int) -> None:
        self._chosen = self._entries[at].opens
        top, height = int(self.scroll_offset.y), max(1, int(self.size.height))
        if at < top:
            self.scroll_to(y=at, animate=False)
        elif at >= top + height:
            self.scroll_to(y=at - height + 1, animate=False)
        self.refresh()
