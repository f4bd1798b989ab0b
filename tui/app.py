"""The application: keys, pages, and what they do to the view and the feeds. It draws nothing itself."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import msgspec
from textual import events, on
from textual.app import App, ComposeResult, SystemCommand
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.drivers.linux_driver import LinuxDriver
from textual.message import Message
from textual.reactive import Reactive
from textual.screen import Screen
from textual.widget import Widget

from kvscope.frame import Scope
from kvscope.text import duration_ns, printable
from kvscope.tui import feed
from kvscope.tui.bars import Bar, FilterInput, TextScreen
from kvscope.tui.header import header_lines, instead_of_page, key_line, span_short, tab_line, wrong_with
from kvscope.tui.help import KEYS, help_lines
from kvscope.tui.lines import Line
from kvscope.tui.page import FilterBy, GoTo, LinesView, OpenRequest, OpenSession, Page
from kvscope.tui.pages.engines import EnginesPage
from kvscope.tui.pages.fleet import FleetPage
from kvscope.tui.pages.pairs import PairsPage
from kvscope.tui.pages.request import RequestPage
from kvscope.tui.pages.requests import RequestsPage
from kvscope.tui.pages.sessions import SessionsPage
from kvscope.tui.pages.stuck import StuckPage
from kvscope.tui.scrolled import Stumbled
from kvscope.tui.view import Trouble, View

PAGES: tuple[type[Page], ...] = (
    FleetPage,
    RequestsPage,
    RequestPage,
    StuckPage,
    EnginesPage,
    PairsPage,
    SessionsPage,
)
WINDOWS = (
    "10s",
    "30s",
    "1m",
    "2m",
    "5m",
    "10m",
    "15m",
    "30m",
    "1h",
    "2h",
    "6h",
    "12h",
    "1d",
    "3d",
    "7d",
    "30d",
)
SPEEDS = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
REQUEST, SESSIONS = "3", "7"
ADVICE = {
    " STUCK, ": "Stuck (4) shows them, by the step they are in and whom they wait for.",
    "not joined": (
        "Their other half was not found. Is the other engine instrumented, on this host or where this daemon "
        "reads, with the same KVSCOPE_DIR? Was it restarted, so that its requests ended with it? "
        "Engines (5) shows those that are read."
    ),
    "peer not instrumented": (
        "Start that engine with kvscope too: in its --kv-transfer-config "
        '"kv_connector_module_path": "kvscope.connectors", or KVSCOPE_ENABLE=1 in its environment.'
    ),
}
"""What to do, by words of a line about what is wrong."""


class Start(msgspec.Struct, kw_only=True):
    """How it is started, as the command line says."""

    source: Any
    """A daemon or a store file."""
    name: str
    """Of the source, for people: a URL or a path."""
    scope: Scope = Scope()
    refresh_s: float = 1.0
    live: bool = True
    """The source is a daemon, which has a present."""
    history: bool = False
    """Begin in the past: at `scope.at`, else at the end of the data."""
    speed: float | None = None
    """Begin by playing, at this speed."""
    page: str = "1"


class StdoutDriver(LinuxDriver):
    """Draws to stdout, which is known to be a terminal; Textual draws to stderr, which may go to a file."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._file = sys.__stdout__


class Main(Screen[None]):
    """The screen with the pages."""

    # Nothing looks otherwise with the focus, but Textual would paint the whole screen a second time.
    focused: Reactive[Widget | None] = Reactive(None, repaint=False)


class Top(App[None]):
    """`kvscope top`."""

    CSS_PATH = "top.tcss"
    TITLE = "kvscope top"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key.keys, key.action, key.doc, show=False) for key in KEYS if key.keys != "tab"),
        # Before the screen's own, which moves the focus.
        Binding("tab", "next_page(1)", "next page", show=False, priority=True),
        Binding("shift+tab", "next_page(-1)", "page before", show=False, priority=True),
        *(Binding(page.key, f"page('{page.key}')", page.title, show=False) for page in PAGES),
    ]

    class Rung(Message):
        """There is mail."""

    def __init__(
        self,
        start: Start,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        # The terminal's own 16 colours, so that it looks right over ssh, in tmux and on any background.
        super().__init__(StdoutDriver, ansi_color=True)
        self.theme = "ansi-dark"
        self._start = start
        self._scope = msgspec.structs.replace(start.scope, at="")
        self._clock = clock
        self._wall_ns = wall_ns
        self._present: tuple[int, float] | None = None
        """Of the last live frame: its time by the daemon's clock, and when it came."""
        self.view = View(start.refresh_s, clock)
        self.view.filters = start.scope.where
        self.faults: dict[tuple[str, str], str] = {}
        """What could not be drawn, in words, by page and kind of error."""
        self._box = feed.Mailbox(self._ring)
        self._asker = feed.Asker(start.source, self._box)
        self._live = feed.LiveFeed(start.source, self._box, start.refresh_s) if start.live else None
        self._past = feed.HistoryFeed(
            start.source, self._box, start.refresh_s, present=self._present_ns if start.live else None
        )
        # Kept, not looked up: a look-up finds what is on the screen on top, such as the help.
        self._header = Bar(id="header", action="problems")
        self._tabs = Bar(id="tabs")
        self._instead = LinesView(id="instead")
        self._space = Vertical(id="pages")
        self._pages = {kind.key: kind() for kind in PAGES}
        self._filter_input = FilterInput(id="filter")
        self._footer = Bar(id="footer")
        self._shown = start.page
        self._before: list[tuple[str, tuple[str, ...], bool]] = []
        """Pages, and the filters on them, to go back to, and whether a page was chosen by its key there."""
        self._one_more = False
        """Take one frame though paused: another filter was chosen."""

    # --- its parts --------------------------------------------------------------------------------

    def get_default_screen(self) -> Main:
        return Main(id="_default")

    def compose(self) -> ComposeResult:
        yield self._filter_input  # first, so that nothing below it is painted anew when it opens
        yield self._header
        yield self._tabs
        yield self._instead
        with self._space:
            yield from self._pages.values()
        yield self._footer

    def on_mount(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            # Leave the terminal as it was. (Not possible where this is no main thread.)
            with contextlib.suppress(RuntimeError, ValueError):
                loop.add_signal_handler(number, self.exit, None, 128 + number)
        for page in self._pages.values():
            page.display = False
        self._asker.start()
        if self._start.history or self._live is None:
            self._enter_past(
                self._start.scope, begin=self._start.speed is not None and not self._start.scope.at
            )
            if self._start.speed is not None:
                self.view.speed = self._start.speed
                self.action_play()
        else:
            self._live.start(self._scope)
        self._show_page(self._shown)
        self.set_interval(1.0, self._tick)

    def close_feeds(self) -> None:
        """End the threads; one that hangs is left behind."""
        feeds: list[feed.Asker | feed.HistoryFeed | feed.LiveFeed] = [self._asker, self._past]
        feeds += [self._live] if self._live else []
        closed = [one.close() for one in feeds]
        if all(closed):
            self._start.source.close()

    @property
    def page(self) -> Page:
        """The page in sight."""
        return self._pages[self._shown]

    # --- what the feeds bring ---------------------------------------------------------------------

    def _ring(self) -> None:
        # From another thread, which may be later than the end of the program.
        with contextlib.suppress(RuntimeError):
            self.post_message(self.Rung())

    @on(Rung)
    def _take_mail(self) -> None:
        view = self.view
        before = view.version, view.state
        hold = view.paused and not self._one_more
        mail = self._box.take(frames=not hold, detail=not hold or view.detail is None)
        if mail.frame is not None:
            self._one_more = False
            trouble = view.trouble
            view.apply(mail.frame)
            if not mail.came:  # it was held back, and the trouble is newer
                view.trouble = trouble
            if mail.frame.live and not view.history:
                self._present = mail.frame.at_ns, self._clock()
            self._scope_of_frame(mail.frame.at_ns)
            self._asker.frame(mail.generation, mail.frame, at_once=view.history and not view.playing)
        elif mail.came:
            view.trouble = None
        for name, (answer, until_ns) in mail.answers.items():
            if isinstance(answer, str):
                view.not_told(name, answer)
            else:
                view.told(name, answer, until_ns)
        if mail.detail is not None:
            view.looked_up(mail.detail)
        if mail.trouble is not None:
            view.trouble = mail.trouble
        if mail.ended:
            view.playing = False
        if mail.notice:
            self.say(mail.notice)
        if (view.version, view.state) != before:
            self._draw()
        else:
            self._draw_bars()

    def _scope_of_frame(self, at_ns: int) -> None:
        if self.view.history:
            wanted = self._past.at_ns
            self.view.wanted_ns = wanted if wanted is not None else at_ns

    def _tick(self) -> None:
        """Once a second: what is shown of time, and whether figures have become stale."""
        self._draw_bars()
        if self.view.stale != self.page.has_class("-stale"):
            self._draw()

    # --- drawing ----------------------------------------------------------------------------------

    def _draw(self) -> None:
        self._draw_bars()
        try:
            self._draw_page()
        except Exception as error:  # a page that stumbles over odd data must not end the program
            self._fault(error)

    def _draw_page(self) -> None:
        instead = instead_of_page(self.view, self.size.width, self.size.height, self._start.name)
        panel = self._instead
        if panel.display != (instead is not None):
            panel.display = instead is not None
            self._space.display = instead is None
            if instead is None:
                self.page.came_into_sight()
        if instead is not None:
            lines = instead
            panel.draw(lambda width: lines)
            return
        if self.view.stale != self.page.has_class("-stale"):
            for widget in (self.page, *self.page.query("*")):
                widget.set_class(self.view.stale, "-stale")
                widget.refresh()
        self.page.show(self.view)

    def _draw_bars(self) -> None:
        width = self.size.width
        view = self.view
        try:
            header = header_lines(view, width, self._wall_ns(), self.page.questions)
        except Exception as error:
            header = [[(" what is wrong can't be shown", "bad")]]
            self._fault(error)
        self._header.show_lines(header)
        line, targets = tab_line([(page.key, page.title) for page in PAGES], self._shown, width)
        self._tabs.show_lines([line], targets)
        keys = [(key, label, "") for key, label in self.page.hints]
        if view.history:
            keys += [("space", "play/stop", "play"), ("w", "worst", "worst")]
            keys += [("l", "live", "live")] if self._live else []
        own = {key for key, _, _ in keys}
        keys += [(k.shown, k.short, k.action) for k in KEYS if k.short and k.shown not in own]
        line, targets = key_line(keys, width)
        self._footer.show_lines([line], targets)

    def _fault(self, error: Exception) -> None:
        key = (self.page.title, type(error).__name__)
        if key not in self.faults:
            text = f"the page {self.page.title} can't show this: {feed.unexpected(error)}"
            self.faults[key] = text
            self.say(text, wrong=True)

    @on(Stumbled)
    def _stumbled(self, message: Stumbled) -> None:
        self._fault(message.error)

    def say(self, text: str, wrong: bool = False) -> None:
        """One line for a few seconds."""
        self.notify(printable(text), severity="error" if wrong else "information", markup=False)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._draw)

    # --- pages ------------------------------------------------------------------------------------

    def _show_page(self, key: str) -> None:
        self._pages[self._shown].display = False
        self._shown = key
        self._filter_input.display = False
        page = self._pages[key]
        page.display = True
        self._want()
        self._draw()
        page.came_into_sight()

    def _want(self) -> None:
        self._asker.want(self.page.questions, self.view.chosen if self._shown == REQUEST else None)

    def action_page(self, key: str, by_key: bool = True) -> None:
        if key != self._shown:
            if key == REQUEST and self.view.chosen is None and (found := self.page.chosen_request()):
                self._choose(found)
            self._remember(by_key)
            self._show_page(key)

    def action_next_page(self, by: int) -> None:
        if self._filter_input.display or len(self.screen_stack) > 1:
            return  # it belongs to what is typed there
        keys = [page.key for page in PAGES]
        self.action_page(keys[(keys.index(self._shown) + by) % len(keys)])

    def action_leave(self) -> None:
        if self._before:
            page, filters, _ = self._before.pop()
            self._filter(filters)
            if page != self._shown:
                self._show_page(page)
        else:
            self._filter(())

    def _remember(self, by_key: bool = False) -> None:
        """What `escape` goes back to: of pages chosen by their keys, one after the other, the first."""
        if not (by_key and self._before and self._before[-1][2]):
            self._before = [*self._before[-19:], (self._shown, self.view.filters, by_key)]

    @on(GoTo)
    def _go_to(self, message: GoTo) -> None:
        if message.key in self._pages:
            self.action_page(message.key)

    @on(OpenRequest)
    def _open_request(self, message: OpenRequest) -> None:
        self._choose(message.request_id)
        self.action_page(REQUEST, by_key=False)

    def _choose(self, request_id: str) -> None:
        if request_id != self.view.chosen:
            self.view.chosen = request_id
            self.view.detail = None
            self._want()

    @on(OpenSession)
    def _open_session(self, message: OpenSession) -> None:
        self.view.session = message.session
        self.action_page(SESSIONS, by_key=False)

    # --- the filter -------------------------------------------------------------------------------

    def action_filter(self) -> None:
        self._filter_input.open(self.view.filters)

    @on(FilterInput.Chosen)
    def _filter_chosen(self, message: FilterInput.Chosen) -> None:
        self._remember()
        self._filter(message.filters)
        self.page.came_into_sight()

    @on(FilterInput.Closed)
    def _filter_closed(self) -> None:
        self.page.came_into_sight()

    @on(FilterBy)
    def _filter_by(self, message: FilterBy) -> None:
        # A later filter on a column takes the place of an earlier `=` on it, as another pair does.
        columns = {one.partition("=")[0] for one in message.filters}
        kept = [one for one in self.view.filters if one.partition("=")[0] not in columns]
        self._remember()
        self._filter((*kept, *message.filters))
        if message.page in self._pages and message.page != self._shown:
            self._show_page(message.page)

    def _filter(self, filters: tuple[str, ...]) -> None:
        if filters != self.view.filters:
            self.view.filters = filters
            self._rescope(where=filters)

    # --- scope and time ---------------------------------------------------------------------------

    def _rescope(self, **changes: Any) -> None:
        """Show another window, filter or label, at the same time."""
        self._scope = msgspec.structs.replace(self._scope, **changes)
        self._one_more = self.view.paused
        self.view.forget()
        if self.view.history:
            self._past.show(self._scope, self._past.at_ns)
        elif self._live is not None:
            self._live.start(self._scope)
        self._draw()

    def action_window(self, by: int) -> None:
        now = duration_ns(self._scope.window)
        lengths = [duration_ns(window) for window in WINDOWS]
        others = [length for length in lengths if (length > now if by > 0 else length < now)]
        if others:
            chosen = min(others) if by > 0 else max(others)
            self._rescope(window=span_short(chosen))
            self.say(f"window {self._scope.window}")

    def action_label(self) -> None:
        frame = self.view.frame
        labels = sorted(frame.labels, key=lambda one: (-frame.labels[one], one)) if frame else []
        if frame is None or len(labels) < 2:
            self.say("there is one kind of traffic only in this time")
            return
        at = labels.index(frame.label) if frame.label in labels else -1
        label = labels[(at + 1) % len(labels)]
        self._rescope(label=label)
        self.say(f"label {label or 'production'}")

    def _enter_past(self, scope: Scope, at_ns: int | None = None, begin: bool = False) -> None:
        if self._live is not None:
            self._live.stop()
        self.view.history = True
        self.view.paused = False
        self.view.wanted_ns = at_ns
        self._past.show(scope, at_ns, begin)

    def _present_ns(self) -> int:
        """Now, by the daemon's clock where a live frame has told it."""
        if self._present is None:
            return self._wall_ns()
        at_ns, came = self._present
        return at_ns + round((self._clock() - came) * 1e9)

    def action_time(self, windows: float) -> None:
        frame = self.view.frame
        if frame is None:
            return
        by_ns = round(windows * duration_ns(self._scope.window))
        if not self.view.history:
            if by_ns < 0:
                self._enter_past(self._scope, frame.at_ns + by_ns)
                self._draw_bars()
            return
        if self._past.at_ns is None:
            return
        if self._live is not None and self._past.at_ns + by_ns >= self._present_ns():
            self.action_live()
            return
        self._past.step(by_ns)
        self.view.wanted_ns = self._past.at_ns
        self._draw_bars()

    def action_worst(self) -> None:
        frame = self.view.frame
        if not self.view.history:
            self._enter_past(self._scope, frame.at_ns if frame else None)
        self._stop_playing()
        self._past.worst()

    def action_play(self) -> None:
        if not self.view.history:
            self.say("space plays the past: go there with ← first")
            return
        self.view.playing = not self.view.playing
        self._past.play(self.view.playing, self.view.speed)
        self._draw_bars()

    def _stop_playing(self) -> None:
        self.view.playing = False
        self._past.play(False, self.view.speed)

    def action_speed(self, factor: float) -> None:
        now = self.view.speed
        others = [speed for speed in SPEEDS if (speed > now if factor > 1 else speed < now)]
        if not self.view.history or not others:
            return
        self.view.speed = min(others) if factor > 1 else max(others)
        self._past.play(self.view.playing, self.view.speed)
        self._draw_bars()

    def action_live(self) -> None:
        if self._live is None:
            self.say("a store file has no present; → goes forward")
            return
        if self.view.history or self.view.paused:
            self._stop_playing()
            self._past.leave()
            self.view.history = False
            self.view.paused = False
            self.view.wanted_ns = None
            self.view.forget()
            self._live.start(self._scope)
            self._draw_bars()

    def action_pause(self) -> None:
        if self.view.history:
            self.action_play()
            return
        self.view.paused = not self.view.paused
        if not self.view.paused:
            self._take_mail()
        self._draw()

    # --- the rest ---------------------------------------------------------------------------------

    def action_sort(self, by: int) -> None:
        if (table := self.page.table()) is not None:
            table.sort_next(by)

    def action_sort_reverse(self) -> None:
        if (table := self.page.table()) is not None:
            table.sort_reverse()

    def action_copy(self) -> None:
        chosen = self._chosen_request()
        if chosen is None:
            self.say("there is no request under the cursor")
            return
        row = self.view.request(chosen)
        text = row.client_id if row is not None and row.client_id else chosen
        self.copy_to_clipboard(text)
        self.say(f"sent to the terminal's clipboard: {text}")

    def action_open_session(self) -> None:
        session = self.page.chosen_session()
        chosen = self._chosen_request()
        if session is None and chosen is not None:
            row = self.view.request(chosen)
            session = row.session if row is not None else None
            if session is None and self.view.detail is not None and self.view.detail.answer:
                session = self.view.detail.answer["request"].get("session")
        if not session:
            self.say("this request belongs to no session")
            return
        self.post_message(OpenSession(str(session)))

    def _chosen_request(self) -> str | None:
        return self.page.chosen_request() or (self.view.chosen if self._shown == REQUEST else None)

    def action_help(self) -> None:
        pages = [(page.key, page.title, page.about) for page in PAGES]
        self.push_screen(TextScreen(lambda width: help_lines(pages, width)))

    def action_problems(self) -> None:
        self.push_screen(TextScreen(lambda width: problem_lines(self.view, width)))

    def get_system_commands(self, screen: Screen[Any]) -> Iterable[SystemCommand]:
        for page in PAGES:
            yield SystemCommand(f"Page {page.title}", page.about, self._command(f"page('{page.key}')"))
        for key in KEYS:
            if key.title:
                yield SystemCommand(key.title, f"{key.doc} ({key.shown})", self._command(key.action))

    def _command(self, action: str) -> Callable[[], Any]:
        return lambda: self.run_action(action)


def problem_lines(view: View, cells: int) -> list[Line]:
    """All that is wrong, and for each finding what to do."""
    import textwrap

    findings = view.frame.findings if view.frame else []
    advised = {printable(finding.text): printable(finding.advice) for finding in findings}
    lines: list[Line] = [[("What is wrong", "title")], []]
    trouble: Trouble | None = view.trouble
    for text in [*([printable(trouble.text)] if trouble else []), *wrong_with(view)]:
        first, *rest = textwrap.wrap(text, max(20, cells - 5)) or [""]
        lines += [[(" ! ", "bad"), (first, "strong")], *([("   " + line, "strong")] for line in rest)]
        advice = advised.get(text) or next((ADVICE[words] for words in ADVICE if words in text), "")
        lines += [[("   " + line, "")] for line in textwrap.wrap(advice, max(20, cells - 5))]
    if len(lines) == 2:
        lines.append([(" nothing is lost, missing or broken", "")])
    return [*lines, [], [(" esc closes", "dim")]]
