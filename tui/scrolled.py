"""What lines and tables have in common: they scroll up and down, and are painted once when they change."""

from __future__ import annotations

import os

from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.widget import Widget

from kvscope.tui.lines import Palette


class Stumbled(Message):
    """Something can't be drawn: odd data of another program, or a fault of this one."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class Scrolled(ScrollView, can_focus=True, inherit_bindings=False):
    """Lines under each other, made for the width that is in sight.

    Textual tells of a new size by a message, after it has painted. Here lines are made anew before that: none
    is ever painted that was made for another width, and nothing is painted twice.
    """

    DEFAULT_CSS = """
    Scrolled {
        height: 1fr; width: 1fr; overflow-x: hidden; overflow-y: auto;
        scrollbar-size: 0 1; scrollbar-gutter: stable;
    }
    """

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.cells = 0
        """Columns beside the scrollbar; 0 before they are known. They stay while it is out of sight."""
        self._palette: Palette | None = None
        self._hidden = True
        self._stumbled: set[type[Exception]] = set()

    @property
    def palette(self) -> Palette:
        if self._palette is None:
            self._palette = colours(self)
        return self._palette

    def make(self) -> int | None:
        """Make the lines for `cells` columns; returns how many there are, None where they are as before."""
        raise NotImplementedError

    def remake(self) -> None:
        """Make the lines anew, and paint them where they are others."""
        height = self.virtual_size.height
        if not self._remake():
            return
        if grown := self.virtual_size.height != height:
            self._scroll_update(self.virtual_size)
        self.refresh(layout=grown and self.styles.auto_dimensions)

    def make_excuse(self, text: str) -> int:
        """In place of what can't be made: this line; returns how many lines there are."""
        return 0

    def stumble(self, error: Exception) -> str:
        """Report it, each kind once; returns the line to draw instead. Textual would end the program."""
        if type(error) not in self._stumbled:
            self._stumbled.add(type(error))
            self.app.post_message(Stumbled(error))  # from within a layout it would not bubble up
        return f"can't show this ({type(error).__name__}); is the daemon of another version?"

    def _remake(self) -> bool:
        made: int | None
        try:
            made = self.make()
        except Exception as error:
            made = self.make_excuse(self.stumble(error))
        if made is not None:
            # As a change that Textual sees, it would lay out the screen twice, and paint as often.
            self.set_reactive(Widget.virtual_size, Size(self.cells, made))
        return made is not None

    def _fit(self, cells: int) -> None:
        if cells > 0 and cells != self.cells:
            self.cells = cells
            self._remake()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        self._fit(width - self.scrollbar_size_vertical)
        return self.virtual_size.height

    def _size_updated(
        self, size: Size, virtual_size: Size, container_size: Size, layout: bool = True
    ) -> bool:
        self._fit(size.width - self.styles.gutter.width - self.scrollbar_size_vertical)
        if self._hidden:
            self._hidden = False
            self._exchange_repaint_regions()  # all of it is about to be painted
        return super()._size_updated(size, self.virtual_size, container_size, layout)

    def on_hide(self, event: events.Hide) -> None:
        self._hidden = True
        event.prevent_default()  # which would pass on the focus, and it may be back soon

    def on_focus(self, event: events.Focus) -> None:
        self._focus(event, True)

    def on_blur(self, event: events.Blur) -> None:
        self._focus(event, False)

    def _focus(self, event: events.Event, has: bool) -> None:
        # It looks the same with and without: no need to style and paint it anew, as Textual would.
        event.prevent_default()
        self.set_reactive(Widget.has_focus, has)


def colours(widget: Widget) -> Palette:
    """The palette for the widget's terminal: none of colour with NO_COLOR or on a dumb one."""
    return Palette(colour=not widget.app.no_color and os.environ.get("TERM") != "dumb")
