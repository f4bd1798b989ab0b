"""A channel: the requests of one scope as all of its viewers know them, followed look by look.

Requests in flight come from what the daemon holds, those that are over from the store once and from then on
from a feed of what it is handed. Every step is a tick, and every row remembers the tick at which it came or
changed, so that a viewer is told what is new since the tick it has seen.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from kvscope import frame as frames
from kvscope.collectors.pipeline import LiveRequest, Row
from kvscope.errors import KvscopeError
from kvscope.filters import parse_filters
from kvscope.frame import MAX_RECENT, Engine, Frame, RequestRow, Scope
from kvscope.samples import Sample
from kvscope.schema import REQUESTS
from kvscope.text import duration_ns
from kvscope.views import waits
from kvscope.windows import Step, label_of

if TYPE_CHECKING:
    import pyarrow

MAX_IN_FLIGHT = 50_000
"""Requests in flight in one frame; the oldest are shown."""
MAX_GONE = 50_000
"""Ids that are no longer in flight, remembered for viewers that are slow."""
SHARED_S = 0.1
"""What is not older than this is not made anew."""
MIN_FIGURES_S = 1.0
"""Figures are not made anew more often, whoever asks."""
FIGURES_TIMEOUT_S = 60.0
"""How long a new viewer waits for figures: longer than all their questions may take."""
FIGURES_RETRY_S = 5.0
"""Until figures are asked for again that could not be made."""

_COLUMNS = [column.name for column in REQUESTS.columns]
_WATERFALL, _LABEL, _ARRIVED = (_COLUMNS.index(name) for name in ("waterfall", "label", "arrived_at_ns"))


class Look(NamedTuple):
    """What the daemon holds of requests that the store does not have (yet)."""

    requests: list[LiveRequest]
    pending: list[Row]
    """On their way into the store."""


class Fed:
    """A request that was handed to the store."""

    __slots__ = ("_columns", "_shown", "row")

    def __init__(self, row: Row) -> None:
        self.row = without_waterfall(row)
        self._columns: dict[str, Any] | None = None
        self._shown: RequestRow | None = None

    def columns(self) -> dict[str, Any]:
        """As a row of `waits`."""
        if self._columns is None:
            self._columns = _columns(self.row)
        return self._columns

    def shown(self) -> RequestRow:
        if self._shown is None:
            self._shown = frames.row_of(self.columns())
        return self._shown


class Feed:
    """Requests that were handed to the store since somebody looks: the latest, numbered."""

    def __init__(self, limit: int = MAX_RECENT) -> None:
        self._rows: deque[Fed] = deque(maxlen=limit)
        self._lock = threading.Lock()
        self.number = 0
        """Of the last one."""

    def add(self, rows: Sequence[Row]) -> None:
        with self._lock:
            self._rows.extend(map(Fed, rows))
            self.number += len(rows)

    def since(self, number: int) -> tuple[list[Fed], int] | None:
        """Those after `number`, and the number of the last; None where some are not here any more."""
        with self._lock:
            count = self.number - number
            if count > len(self._rows):
                return None
            first = len(self._rows) - count
            return [self._rows[i] for i in range(first, len(self._rows))], self.number

    def clear(self) -> None:
        """Nobody looks: whoever comes back has missed something."""
        with self._lock:
            self._rows.clear()
            self.number += 1


class Figures(NamedTuple):
    """A frame's figures and the look that they are of."""

    frame: Frame
    look: Look
    number: int
    """The feed's at that look."""
    cost_s: float
    """CPU time, at the most."""


class Around(Protocol):
    """What a channel asks of the view that it belongs to."""

    feed: Feed

    def now_ns(self) -> int: ...
    def clock(self) -> float: ...

    def look(self) -> tuple[Look, int]:
        """What the daemon holds, and the feed's number before it was looked at."""

    def about(self) -> tuple[list[Engine], list[str]]: ...
    def samples(self) -> list[Sample]: ...

    def benchmarks(self) -> tuple[Step, ...]:
        """Windows whose requests count as of their label."""

    def table(self, look: Look, waterfalls: bool) -> pyarrow.Table: ...
    def build(self, scope: Scope, live: pyarrow.Table, recent: bool) -> Frame: ...

    def submit(self, work: Callable[[], Figures]) -> Future[Figures]:
        """Make figures in their thread."""

    def figures_interval_s(self, cost_s: float) -> float:
        """How long figures stay that cost so much CPU time."""


class Channel:
    """Follows one scope. From any thread; viewers that come at the same time share what is made."""

    def __init__(self, view: Around, scope: Scope) -> None:
        self.used = view.clock()
        """When somebody looked last."""
        self._view = view
        self._scope = scope
        self._window_ns = duration_ns(scope.window)
        self._filters = parse_filters(scope.where)
        self._waited = any(one.waited for one in self._filters)
        """Requests may come to pass a filter just by waiting."""
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._epoch = 0
        """Grows when all is taken anew: then every viewer needs a whole frame. 0 before the first time."""
        self._tick = 0
        self._advanced = float("-inf")
        self._at_ns = 0
        self._number = 0
        """Of the feed: what was taken so far."""
        self._figures: Frame | None = None
        self._figures_at_ns = 0
        self._figures_due = self._figures_made = float("-inf")
        self._figures_error = ""
        self._asked: Future[Figures] | None = None
        self._benchmarks: tuple[Step, ...] = ()
        self._anew = True
        """All is to be taken anew at the next tick."""
        self._doubtful = False
        """The same, when the next figures are due."""
        self._live: dict[LiveRequest, RequestRow | None] = {}
        """Those of the last look as they are shown; None where they are not of the scope."""
        self._in_flight: dict[str, tuple[RequestRow, int]] = {}
        self._recent: dict[str, tuple[RequestRow, int]] = {}
        """In the order of their ticks."""
        self._over: set[str] = set()
        """Of the recent ones, those that were not handed to the store yet."""
        self._arrivals: list[tuple[int, str]] = []
        """A heap of the recent ones, and of some that no longer are."""
        self._gone: deque[tuple[int, str]] = deque(maxlen=MAX_GONE)
        self._lines: dict[tuple[int, int], bytes] = {}
        """Of this tick, by what the viewer had seen."""

    # --- what viewers get ------------------------------------------------------------------------

    def whole(self) -> Frame:
        """All of it, with figures of the same moment, or of one a second ago."""
        with self._lock:
            self._advance(fresh=True)
            return self._frame(-1)

    def line(self, seen: tuple[int, int]) -> tuple[bytes, tuple[int, int]]:
        """For a viewer that has seen (epoch, tick): the next frame as a line of JSON, and what it has seen
        with that."""
        with self._lock:
            self._advance(fresh=False)
            line = self._lines.get(seen)
            if line is None:
                forgotten = self._gone[0][0] if len(self._gone) == MAX_GONE else -1
                follows = seen[0] == self._epoch and seen[1] >= forgotten
                made = self._frame(seen[1] if follows else -1)
                line = self._lines[seen] = msgspec.json.encode(made) + b"\n"
            return line, (self._epoch, self._tick)

    def _frame(self, since: int) -> Frame:
        """What changed after that tick; all for -1."""
        figures = self._figures
        assert figures is not None, "it has advanced"
        engines, problems = self._view.about()
        if self._figures_error:
            problems = [f"FIGURES ARE OLD: {self._figures_error}", *problems]
        recent = []
        for row, tick in reversed(self._recent.values()):
            if tick <= since:
                break
            recent.append(row)
        count = len(self._recent)
        return msgspec.structs.replace(
            figures,
            at_ns=self._at_ns,
            figures_at_ns=figures.at_ns,
            whole=since < 0,
            in_flight=[row for row, tick in self._in_flight.values() if tick > since][:MAX_IN_FLIGHT],
            gone=[] if since < 0 else list(dict.fromkeys(id_ for tick, id_ in self._gone if tick > since)),
            recent=recent,
            recent_total=count if count < MAX_RECENT else max(count, figures.recent_total),
            engines=engines,
            samples=self._view.samples(),
            problems=problems,
        )

    # --- figures ---------------------------------------------------------------------------------

    def _submit(self, recent: bool) -> Future[Figures]:
        """Have figures made; with `recent` the requests that are over as well."""
        view = self._view

        def make() -> Figures:
            # CPU time: on a busy host the time that passes says little about what it cost. The process's,
            # for DuckDB works in threads of its own; what others used meanwhile errs on the side of seldom.
            began = time.process_time()
            look, number = view.look()
            made = view.build(self._scope, view.table(look, waterfalls=False), recent)
            return Figures(made, look, number, time.process_time() - began)

        return view.submit(make)

    def _made(self, asked: Future[Figures]) -> Figures:
        """Those figures, once they are there."""
        try:
            made = asked.result(FIGURES_TIMEOUT_S)
        except (CancelledError, TimeoutError):
            raise KvscopeError("the daemon is shutting down, or too busy to answer") from None
        self._figures_made = self._view.clock()
        self._figures_due = self._figures_made + self._view.figures_interval_s(made.cost_s)
        self._figures_error = ""
        return made

    def _newer_figures(self) -> Figures | None:
        """Those that were made meanwhile; asks for the next when it is time."""
        now = self._view.clock()
        if self._asked is not None and self._asked.done():
            asked, self._asked = self._asked, None
            try:
                return self._made(asked)
            except KvscopeError as error:
                self._are_old(error)
        elif self._asked is None and now >= self._figures_due:
            self._asked = self._submit(recent=False)
        return None

    def _are_old(self, error: KvscopeError) -> None:
        """Newer figures could not be made."""
        self._figures_error = str(error)
        self._figures_due = self._view.clock() + FIGURES_RETRY_S

    # --- following -------------------------------------------------------------------------------

    def _advance(self, fresh: bool) -> None:
        """One tick on; with `fresh`, to figures of the same moment."""
        view, known = self._view, self._figures
        now = view.clock()
        fresh = fresh and (now - self._figures_made >= MIN_FIGURES_S or bool(self._figures_error))
        if now - self._advanced < SHARED_S and (not fresh or self._figures_at_ns == self._at_ns):
            return
        # In this order: what is stored in between is seen twice, not missed.
        look, at_ns = view.look()[0], view.now_ns()
        benchmarks = view.benchmarks()
        self._anew = self._anew or benchmarks != self._benchmarks
        self._benchmarks = benchmarks
        anew = self._anew or (self._doubtful and now >= self._figures_due)
        fed = None if anew else view.feed.since(self._number)
        made = self._newer_figures() if fed is not None and not fresh else None
        if fresh and fed is not None:
            made = self._made(self._submit(recent=False))
        if made is not None and known is not None and made.frame.label != known.label:
            fed = None  # another kind of traffic is the most frequent now
        if fed is None:
            try:
                if known is not None and not fresh and self._figures_error and now < self._figures_due:
                    return  # it was tried a moment ago
                made = self._made(self._submit(recent=True))
            except KvscopeError as error:
                if known is None or fresh:
                    raise
                self._are_old(error)
                self._lines.clear()  # what viewers know stays, and they are told so
                self._advanced = view.clock()
                return
            self._begin(made)
        if made is not None:
            self._figures, self._figures_at_ns = made.frame, made.frame.at_ns
            if fresh or fed is None:
                look, at_ns = made.look, made.frame.at_ns
                fed = view.feed.since(self._number)
        self._anew = fed is None  # so many came meanwhile
        fed_rows, self._number = fed or ([], view.feed.number)
        self._tick += 1
        self._at_ns = at_ns
        self._follow(look, fed_rows)
        self._let_go()
        self._lines.clear()
        self._advanced = view.clock()

    def _begin(self, made: Figures) -> None:
        """Take everything anew."""
        self._epoch += 1
        self._asked = None
        self._doubtful = False
        self._figures = made.frame
        self._number = made.number
        self._live, self._in_flight, self._over, self._arrivals = {}, {}, set(), []
        self._gone.clear()
        live = {str(one.row[0]) for one in made.look.requests}
        rows = [row for row in reversed(made.frame.recent) if row.id not in live]
        self._recent = {row.id: (row, self._tick + 1) for row in rows}
        self._arrivals = [(row.arrived_at_ns, row.id) for row in rows]
        heapq.heapify(self._arrivals)
        made.frame.recent = []

    def _follow(self, look: Look, fed: list[Fed]) -> None:
        figures, tick = self._figures, self._tick
        assert figures is not None, "there are figures before anything is followed"
        since_ns = self._at_ns - self._window_ns
        stored = set()
        for one in fed:
            id_ = str(one.row[0])
            stored.add(id_)
            self._over.discard(id_)
            label = self._label_of(one.row)
            if self._fits(label, one.columns) and one.shown().arrived_at_ns >= since_ns:
                self._put_recent(_labelled(one.shown(), label))
            elif self._recent.pop(id_, None) is not None:
                self._gone.append((tick, id_))

        live: dict[LiveRequest, RequestRow | None] = {}
        in_flight, over = set(), set()
        for request in look.requests:
            row = self._live.get(request)
            if row is None and (self._waited or request not in self._live):
                row = self._show(request)
            live[request] = row
            if row is None or row.id in stored or (row.id in self._recent and row.id not in self._over):
                continue  # of another scope; or it is stored, and this is what it was before
            if row.in_flight:
                in_flight.add(row.id)
                known = self._in_flight.get(row.id)
                if known is None or known[0] is not row:
                    self._in_flight[row.id] = (row, tick)
            elif row.arrived_at_ns >= since_ns or row.id in self._over:
                over.add(row.id)
                known = self._recent.get(row.id)
                if known is None or known[0] is not row:
                    self._put_recent(row)
        self._live = live

        for id_ in self._in_flight.keys() - in_flight:
            del self._in_flight[id_]
            self._gone.append((tick, id_))
        for id_ in self._over - over - stored:
            if self._recent.pop(id_, None) is not None:
                self._gone.append((tick, id_))
            # Unless it goes on, its legs were joined, or an earlier daemon had stored it: the store knows.
            self._doubtful = self._doubtful or id_ not in in_flight
        self._over = over

    def _show(self, request: LiveRequest) -> RequestRow | None:
        shown = request.shown
        if shown is None:
            more = {"step_since_ns": request.step_since_ns, "waits_for": request.waits_for}
            columns = _columns(without_waterfall(request.row))
            row = msgspec.structs.replace(
                frames.row_of({**columns, **more}), in_flight=request.in_flight, step=request.step
            )
            shown = request.shown = (row, columns)
        row, columns = shown
        label = self._label_of(request.row)
        if not self._fits(label, lambda: columns):
            return None
        return _labelled(row, label)

    def _label_of(self, row: Row) -> str:
        """What a row of `requests` counts as."""
        return label_of(self._benchmarks, row[_LABEL], row[_ARRIVED]) or ""

    def _fits(self, label: str, columns: Callable[[], dict[str, Any]]) -> bool:
        """Whether a request that counts as of `label` is of the scope, its window aside."""
        assert self._figures is not None, "there are figures before anything is followed"
        if label != self._figures.label:
            return False
        row = {**columns(), "label": label} if self._filters else {}
        return all(one.matches(row, self._at_ns) for one in self._filters)

    def _put_recent(self, row: RequestRow) -> None:
        self._recent.pop(row.id, None)
        self._recent[row.id] = (row, self._tick)
        heapq.heappush(self._arrivals, (row.arrived_at_ns, row.id))

    def _let_go(self) -> None:
        """Forget what left the window, and what is too much; viewers do so by themselves."""
        since_ns = self._at_ns - self._window_ns
        while self._arrivals and (self._arrivals[0][0] < since_ns or len(self._recent) > MAX_RECENT):
            arrived_at_ns, id_ = heapq.heappop(self._arrivals)
            known = self._recent.get(id_)
            if known is not None and known[0].arrived_at_ns == arrived_at_ns:
                del self._recent[id_]
                self._over.discard(id_)


def _labelled(row: RequestRow, label: str) -> RequestRow:
    return row if row.label == label else msgspec.structs.replace(row, label=label)


def without_waterfall(row: Row) -> Row:
    """A row of `requests` without what takes the most room."""
    return (*row[:_WATERFALL], None, *row[_WATERFALL + 1 :])


def _columns(row: Row) -> dict[str, Any]:
    """A row of `requests` as one of `waits`."""
    columns = dict(zip(_COLUMNS, row, strict=True))
    columns.update(waits(columns))
    return columns
