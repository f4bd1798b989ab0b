"""The widgets around the page: bars of one or two lines that can be clicked, the filter, and texts."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.message import Message
from textual.reactive import Reactive
from textual.screen import ModalScreen
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Input

from kvscope.errors import KvscopeError, UsageError
from kvscope.filters import MAX_FILTERS, parse_filter
from kvscope.text import printable
from kvscope.tui.header import Target
from kvscope.tui.lines import Line, Palette, segments
from kvscope.tui.page import LinesView
from kvscope.tui.scrolled import colours


class Bar(Widget):
    """A few lines that don't scroll; parts of them do something when clicked."""

    def __init__(self, *, id: str, action: str = "") -> None:
        super().__init__(id=id)
        self._lines: Sequence[Line] = ()
        self._targets: Sequence[Target] = ()
        self._action = action
        self._palette: Palette | None = None

    @property
    def lines(self) -> Sequence[Line]:
        return self._lines

    def show_lines(self, lines: Sequence[Line], targets: Sequence[Target] = ()) -> None:
        """Draw these; what did not change is not drawn again."""
        self._targets = targets
        if lines != self._lines:
            self._lines = lines
            self.refresh()

    def render_line(self, y: int) -> Strip:
        if self._palette is None:
            self._palette = colours(self)
        line = self._lines[y] if y < len(self._lines) else []
        return Strip(segments(line, self._palette)).adjust_cell_length(self.size.width)

    async def on_click(self, event: events.Click) -> None:
        action = next((t.action for t in self._targets if t.start <= event.x < t.end), self._action)
        if action:
            await self.app.run_action(action)


class FilterInput(Vertical):
    """A line to type filters in, and beneath it what is wrong with them."""

    class Chosen(Message):
        """These filters are to be in force."""

        def __init__(self, filters: tuple[str, ...]) -> None:
            super().__init__()
            self.filters = filters

    class Closed(Message):
        """The filters stay as they were."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "close", "close", show=False)]

    def compose(self) -> ComposeResult:
        with Horizontal(id="filter-line"):
            prompt = Bar(id="filter-prompt")
            prompt.show_lines([[("/", "strong")]])
            yield prompt
            yield Input(id="filter-text", compact=True, select_on_focus=False)
        yield Bar(id="filter-error")

    @property
    def error(self) -> str:
        """What is wrong with what is typed; empty where nothing is."""
        try:
            split_filters(self.query_one(Input).value)
        except KvscopeError as error:
            return str(error)
        return ""

    def open(self, filters: Sequence[str]) -> None:
        self.display = True
        field = self.query_one(Input)
        field.value = joined_filters(filters)
        field.cursor_position = len(field.value)
        self._check()
        field.focus()

    def action_close(self) -> None:
        self.display = False
        self.post_message(self.Closed())

    @on(Input.Changed)
    def _check(self) -> None:
        error = self.error
        line: Line = (
            [(f"  {printable(error)}", "bad")] if error else [("  enter: filter · esc: leave", "dim")]
        )
        self.query_one("#filter-error", Bar).show_lines([line])

    @on(Input.Submitted)
    def _submit(self, event: Input.Submitted) -> None:
        event.stop()
        try:
            filters = split_filters(event.value)
        except KvscopeError:
            return  # the line below says why
        self.display = False
        self.post_message(self.Chosen(filters))


class TextScreen(ModalScreen[None]):
    """A text over the page: help, what is wrong."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,question_mark,exclamation_mark,enter", "dismiss", "close", show=False),
        Binding("ctrl+c", "app.quit", "quit", show=False),
    ]
    focused: Reactive[Widget | None] = Reactive(None, repaint=False)

    def __init__(self, draw: Callable[[int], Sequence[Line]]) -> None:
        super().__init__()
        self._draw = draw

    def compose(self) -> ComposeResult:
        yield LinesView()

    def on_mount(self) -> None:
        view = self.query_one(LinesView)
        view.draw(self._draw)
        view.focus()

    async def action_dismiss(self, result: Any = None) -> None:
        self.dismiss()


_OPERATOR = re.compile(r"""('[^']*'|"[^"]*")|\s*(!=|>=|<=|=|>|<|~)\s*""")
"""An operator with the spaces around it, outside quotes."""
_PLAIN = re.compile(r"[^\s'\"\\]+")


def split_filters(text: str) -> tuple[str, ...]:
    """The filters in a line; spaces separate them, quotes keep a value with spaces together.

    Raises:
        UsageError: one of them is wrong.
    """
    try:
        words = shlex.split(_OPERATOR.sub(lambda match: match[1] or match[2], text))
    except ValueError:
        raise UsageError("a quote is not closed") from None
    if len(words) > MAX_FILTERS:
        raise UsageError(f"at most {MAX_FILTERS} filters")
    for word in words:
        parse_filter(word)
    return tuple(words)


def joined_filters(filters: Sequence[str]) -> str:
    """One line that `split_filters` reads as these."""
    return " ".join(one if _PLAIN.fullmatch(one) else shlex.quote(one) for one in map(printable, filters))
