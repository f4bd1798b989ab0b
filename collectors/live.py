"""What viewers see now: one whole frame each, then changes.

Viewers of the same scope share a channel. Figures are asked of the store in a thread of their own, so seldom
that all channels together take a bounded part of a core. Where nobody looks nothing is kept and nothing done.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Protocol

from kvscope import frame as frames
from kvscope import health, query, windows
from kvscope.collectors.channel import (
    MIN_FIGURES_S,
    SHARED_S,
    Channel,
    Feed,
    Figures,
    Look,
    without_waterfall,
)
from kvscope.collectors.pipeline import Row
from kvscope.errors import KvscopeError, UsageError
from kvscope.filters import checked_text, parse_filters
from kvscope.frame import Engine, Frame, Scope
from kvscope.samples import Sample
from kvscope.text import duration_ns
from kvscope.windows import Step

if TYPE_CHECKING:
    import duckdb
    import pyarrow

MAX_STREAMS = 16
MAX_CHANNELS = 20
"""Scopes that are followed at once; beyond it the one is dropped that nobody has looked at for longest."""
MAX_WINDOW_NS = 30 * 86400 * 10**9
MAX_LABEL_CHARACTERS = 256
STATUS_S = 1.0
"""How old engines and problems may be."""
IDLE_S = 90.0
"""A scope that nobody has looked at for so long is not followed on: longer than a stream may pause."""
FIGURES_SHARE = 0.1
"""Part of one core that the figures of all channels may take, beside the first ones of each viewer."""
MAX_FIGURES_S = 60.0
"""How long figures stay at the most."""


class TooManyViewers(KvscopeError):
    """All streams are taken."""


class Watched(Protocol):
    """What is asked of the daemon, from any thread."""

    def look(self) -> Look: ...

    def watch(self, take: Callable[[Sequence[Row]], None] | None) -> None:
        """From now on tell of every request that is handed to the store, in the collecting thread; None: no
        longer."""

    def status(self) -> dict[str, Any]: ...

    def samples(self) -> list[Sample]: ...

    def cursor(self) -> duckdb.DuckDBPyConnection: ...

    def requests_table(self, rows: list[Row]) -> pyarrow.Table:
        """Rows of `requests` as Arrow."""


class LiveView:
    """Makes frames; from any thread.

    Args:
        now: Unix time in nanoseconds.
        clock: seconds that only go forward.
    """

    def __init__(
        self,
        daemon: Watched,
        limits: query.Limits = query.Limits(),  # noqa: B008 - immutable
        now: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.feed = Feed()
        self.limits = limits
        self._daemon = daemon
        self._now = now
        self._clock = clock
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._channels: dict[Scope, Channel] = {}
        self._streams = 0
        self._watching = False
        self._closed = False
        # Replaced as a whole: (when, what).
        self._looked: tuple[float, Look, int] | None = None
        self._about: tuple[float, list[Engine], list[str]] | None = None
        self._benchmarks: tuple[float, tuple[Step, ...]] | None = None
        self._figures = ThreadPoolExecutor(1, "kvscope-figures")

    # --- for viewers -----------------------------------------------------------------------------

    def frame(self, scope: Scope) -> Frame:
        """The whole frame of `scope`, of now or of a moment in the past.

        Raises:
            UsageError: the scope is not understood.
            QueryError: its questions took too long.
        """
        scope = self._checked(scope)
        if scope.at:
            return self.build(scope, self.table(self.look()[0], waterfalls=True), recent=True)
        return self.channel(scope).whole()

    def stream(self, scope: Scope) -> Stream:
        """Frames for a viewer that stays; close it.

        Raises:
            UsageError: the scope is not understood, or is of the past.
            TooManyViewers: there are `MAX_STREAMS` already.
        """
        scope = self._checked(scope)
        if scope.at:
            raise UsageError("a stream is of now; ask /api/v1/live for each moment of the past")
        with self._lock:
            if self._streams >= MAX_STREAMS:
                raise TooManyViewers(
                    f"{MAX_STREAMS} viewers are connected, which is the most; close one of them"
                )
            self._streams += 1
        return Stream(self, scope)

    def _checked(self, scope: Scope) -> Scope:
        if scope.at.startswith("@"):
            with contextlib.closing(self._daemon.cursor()) as cursor:
                scope = frames.resolved(cursor, scope)
        check(scope)
        return scope

    def requests(self) -> pyarrow.Table:
        """All requests that the store does not have (yet), as Arrow."""
        return self.table(self.look()[0], waterfalls=True)

    @property
    def streams(self) -> int:
        """How many are open."""
        return self._streams

    def close(self) -> None:
        """No more frames; who waits for one is told so."""
        with self._lock:
            self._closed = True
            self._channels.clear()
            self._daemon.watch(None)
        self._figures.shutdown(wait=False, cancel_futures=True)

    # --- for channels ----------------------------------------------------------------------------

    def now_ns(self) -> int:
        return self._now()

    def clock(self) -> float:
        return self._clock()

    def look(self) -> tuple[Look, int]:
        """What the daemon holds, no older than `SHARED_S`, and the feed's number before it was looked at."""
        known = self._looked
        if known is None or self._clock() - known[0] > SHARED_S:
            number = self.feed.number
            known = self._looked = (self._clock(), self._daemon.look(), number)
        return known[1], known[2]

    def about(self) -> tuple[list[Engine], list[str]]:
        """Engines and problems, no older than `STATUS_S`."""
        known = self._about
        if known is None or self._clock() - known[0] > STATUS_S:
            status = self._daemon.status()
            fields = Engine.__struct_fields__
            engines = [Engine(**{name: ring[name] for name in fields}) for ring in status["rings"]]
            known = self._about = (self._clock(), engines, list(health.problems(status)))
        return known[1], known[2]

    def benchmarks(self) -> tuple[Step, ...]:
        """Windows whose requests count as of their label, no older than `STATUS_S`."""
        known = self._benchmarks
        if known is None or self._clock() - known[0] > STATUS_S:
            with contextlib.closing(self._daemon.cursor()) as cursor:
                known = self._benchmarks = (self._clock(), windows.benchmarks(cursor))
        return known[1]

    def relabelled(self) -> None:
        """A window was changed."""
        self._benchmarks = None

    def samples(self) -> list[Sample]:
        return self._daemon.samples()

    def table(self, look: Look, waterfalls: bool) -> pyarrow.Table:
        """All requests of a look, as Arrow."""
        rows = [*(one.row for one in look.requests), *look.pending]
        return self._daemon.requests_table(rows if waterfalls else [without_waterfall(row) for row in rows])

    def build(self, scope: Scope, live: pyarrow.Table, recent: bool) -> Frame:
        cursor = self._daemon.cursor()
        return frames.build(cursor, scope, now_ns=self._now(), live=live, limits=self.limits, recent=recent)

    def submit(self, work: Callable[[], Figures]) -> Future[Figures]:
        try:
            return self._figures.submit(work)
        except RuntimeError:
            raise KvscopeError("the daemon is shutting down") from None

    def figures_interval_s(self, cost_s: float) -> float:
        return min(max(MIN_FIGURES_S, cost_s * len(self._channels) / FIGURES_SHARE), MAX_FIGURES_S)

    def channel(self, scope: Scope) -> Channel:
        """The one that follows `scope`, from now on if need be."""
        with self._lock:
            if self._closed:
                raise KvscopeError("the daemon is shutting down")
            now = self._clock()
            self._drop_idle(now, but=scope)
            channel = self._channels.get(scope)
            if channel is None:
                while len(self._channels) >= MAX_CHANNELS:
                    del self._channels[min(self._channels, key=lambda known: self._channels[known].used)]
                channel = self._channels[scope] = Channel(self, scope)
            channel.used = now
            if not self._watching:
                self._watching = True
                self._looked = None  # what was handed over since was not told
                self._daemon.watch(self._take)
            return channel

    def release(self) -> None:
        """A stream was closed."""
        with self._lock:
            self._streams -= 1

    def _take(self, rows: Sequence[Row]) -> None:
        """Requests that were handed to the store; in the collecting thread, which must not wait."""
        self.feed.add(rows)
        if self._lock.acquire(blocking=False):
            try:
                self._drop_idle(self._clock())
                if not self._channels and not self._closed:
                    self._watching = False
                    self._daemon.watch(None)
                    self.feed.clear()
                    self._looked = self._about = None
            finally:
                self._lock.release()

    def _drop_idle(self, now: float, but: Scope | None = None) -> None:
        idle = [s for s, channel in self._channels.items() if s != but and now - channel.used > IDLE_S]
        for scope in idle:
            del self._channels[scope]


class Stream:
    """One viewer's frames: a whole one first, then changes, and whole again where it fell behind."""

    def __init__(self, view: LiveView, scope: Scope) -> None:
        self._view = view
        self._scope = scope
        self._channel: Channel | None = None
        self._seen = (0, 0)
        self._closed = False

    def next_line(self) -> bytes:
        """The next frame, as a line of JSON.

        Raises:
            KvscopeError: it could not be made.
        """
        channel = self._view.channel(self._scope)
        if channel is not self._channel:  # the first; or it was dropped
            self._channel, self._seen = channel, (0, 0)
        line, self._seen = channel.line(self._seen)
        return line

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._view.release()


def check(scope: Scope) -> None:
    """Raises:
    UsageError: the scope is not understood.
    """
    frames.moments(scope, time.time_ns())
    if duration_ns(scope.window) > MAX_WINDOW_NS:
        raise UsageError("window is at most 30d")
    parse_filters(scope.where)
    if scope.label is not None and len(checked_text("label", scope.label)) > MAX_LABEL_CHARACTERS:
        raise UsageError(f"a label has at most {MAX_LABEL_CHARACTERS} characters")
