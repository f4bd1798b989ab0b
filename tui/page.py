"""What every page is built of: the base class `Page`, and `LinesView`, which draws lines and scrolls them.

A page gets a `View` whenever something changed and draws it; it asks nobody and keeps no data of its own
beyond where its cursor is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, cast

from textual.binding import Binding, BindingType
from textual.geometry import Size
from textual.message import Message
from textual.reactive import Reactive
from textual.strip import Strip
from textual.widget import Widget

from kvscope.tui.lines import Line, fit, segments
from kvscope.tui.scrolled import Scrolled
from kvscope.tui.table import LiveTable
from kvscope.tui.view import View


class OpenRequest(Message):
    """Show this request's waterfall."""

    def __init__(self, request_id: str) -> None:
        super().__init__()
        self.request_id = request_id


class OpenSession(Message):
    """Show this session."""

    def __init__(self, session: str) -> None:
        super().__init__()
        self.session = session


class GoTo(Message):
    """Show the page of that key."""

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key


class FilterBy(Message):
    """Add these filters (such as `p_engine=prefill-0`) to those in force, and show the page of that key."""

    def __init__(self, *filters: str, page: str = "") -> None:
        super().__init__()
        self.filters = filters
        self.page = page


class Page(Widget):
    """One screen of `kvscope top`.

    A page composes a `LinesView`, a `LiveTable` or both. The arguments of its constructor are none; the
    application shows one page at a time.
    """

    key: ClassVar[str] = ""
    """The digit that shows it."""
    title: ClassVar[str] = ""
    about: ClassVar[str] = ""
    """What it shows, in a sentence, for the help."""
    questions: ClassVar[tuple[str, ...]] = ()
    """Named questions asked while it is in sight, beside those that every frame answers."""
    hints: ClassVar[tuple[tuple[str, str], ...]] = ()
    """Keys of its own and what they do, for the footer and the help: `(("enter", "open"),)`."""

    DEFAULT_CSS = "Page { width: 1fr; height: 1fr; layout: vertical; }"
    # It does not scroll: what its size means for that is no reason to paint it a second time.
    virtual_size: Reactive[Size] = Reactive(Size(0, 0), repaint=False)

    @property
    def room(self) -> Size:
        """What there is of the screen for it, also before it is laid out."""
        return self.parent.size if isinstance(self.parent, Widget) else self.size

    def show(self, view: View) -> None:
        """Draw `view`; called when it changed while this page is in sight, and when it comes into sight."""
        raise NotImplementedError

    def chosen_request(self) -> str | None:
        """Id of the request under the cursor: what `c` copies and `o` opens the session of."""
        return None

    def chosen_session(self) -> str | None:
        """The session under the cursor, where it is not that of `chosen_request`."""
        return None

    def table(self) -> LiveTable[Any] | None:
        """The table that `s` and `S` sort; by default the first there is."""
        return next(iter(self.query(LiveTable)), None)

    def came_into_sight(self) -> None:
        """Take the focus: the table, else the first view."""
        first = self.table() or next((one for one in self.query(Scrolled) if one.focusable), None)
        if first is not None:
            self.screen.set_focus(first, scroll_visible=False)


class LinesView(Scrolled, can_focus=True, inherit_bindings=False):
    """Lines of styled text, scrolled up and down; drawn anew for each width."""

    # Not those of ScrollView: left and right belong to time.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "scroll_up", "up", show=False),
        Binding("down,j", "scroll_down", "down", show=False),
        Binding("pageup", "page_up", "page up", show=False),
        Binding("pagedown", "page_down", "page down", show=False),
        Binding("home,g", "scroll_home", "top", show=False),
        Binding("end,G", "scroll_end", "bottom", show=False),
    ]

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._draw: Callable[[int], Sequence[Line]] = lambda width: ()
        self._lines: Sequence[Line] = ()

    def draw(self, draw: Callable[[int], Sequence[Line]]) -> None:
        """Show what `draw(width)` makes; it is called again when the width changes."""
        self._draw = draw
        self.remake()

    @property
    def lines(self) -> Sequence[Line]:
        """What is drawn, also out of sight."""
        return self._lines

    def make(self) -> int | None:
        before = self._lines
        self._lines = self._draw(self.cells) if self.cells else ()
        return None if self._lines == before else len(self._lines)

    def make_excuse(self, text: str) -> int:
        self._lines = [[(fit(text, self.cells).rstrip(), "bad")]]
        return 1

    def render_line(self, y: int) -> Strip:
        at = int(self.scroll_offset.y) + y
        line = self._lines[at] if at < len(self._lines) else cast(Line, [])
        base = "dim" if self.has_class("-stale") else ""
        return Strip(segments(line, self.palette, base)).adjust_cell_length(self.size.width)
