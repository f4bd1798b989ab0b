"""The daemon: rings → pipeline → store, in one collecting thread, and what it tells about itself."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from kvscope import __version__
from kvscope.collectors.aggregates import Aggregates
from kvscope.collectors.archiving import Archiving, moved_until_ns, write_by_hand
from kvscope.collectors.channel import Look
from kvscope.collectors.exposition import Exposition, Now, read_now
from kvscope.collectors.otlp import make_exporter
from kvscope.collectors.pipeline import LiveRequest, Pipeline
from kvscope.collectors.rings import RingProcess, Rings, Tail
from kvscope.collectors.sampler import Sampler, make_sampler
from kvscope.collectors.store import Row, Rows, Store
from kvscope.errors import KvscopeError
from kvscope.join import SETTLE_NS
from kvscope.ring import Event
from kvscope.samples import Sample
from kvscope.schema import ENGINES, FAILURES, REQUESTS, SAMPLES
from kvscope.settings import Settings
from kvscope.text import utc

logger = logging.getLogger(__name__)

SCAN_INTERVAL_S = 1.0
"""How often the directory is looked at, and positions in the rings are stored."""
TAKE_INTERVAL_S = 0.1
"""The store commits no more often."""
IDLE_MIN_S, IDLE_MAX_S = 0.005, 0.1
LOOK_REQUESTS = 256
"""Looked at in one go."""
BUSY_SLOTS = 1024
"""A pass that moved this much is followed by the next at once."""


class Collector:
    """One step of collecting at a time; for a thread that repeats it, or a command that runs it to its end.

    Not thread-safe but for `lock`: hold it to look at `rings` and `pipeline` from another thread.
    """

    def __init__(self, rings: Rings, store: Store) -> None:
        self.rings = rings
        self.store = store
        self.pipeline = Pipeline(store.has_request, store.has_row)
        self.lock = threading.Lock()
        self.faults = 0
        """Events that the pipeline could not take."""
        self.sampler = Sampler({}, list)
        """Without sources: the engines' own samples go through it."""
        self._sample_faults = 0
        self._next_scan = self._next_take = 0.0
        self._stored_rows: dict[int, Row] = {}
        self._gone: dict[int, int | None] = {}
        """Drained rings by id: the ticket of their last rows, None while requests of theirs are open."""

    def step(self) -> int:
        """Read what is new and hand over what is done; returns about how many events were read."""
        now = time.monotonic()
        rows: Rows = {}
        scan = now >= self._next_scan
        with self.lock:
            if scan:
                self._next_scan = now + SCAN_INTERVAL_S
                self.scan()
            moved = self._read()
            if scan:
                self._note_gone()
            if scan or now >= self._next_take:
                self._next_take = now + TAKE_INTERVAL_S
                rows = self.pipeline.take_rows(time.monotonic_ns())
                rows[SAMPLES.name] = self._sampled()
            if scan:
                self._add_ring_rows(rows)
            # Under the lock, so that a request is always among the live, the pending or the stored.
            ticket = self.store.put(rows)
        if scan:
            with self.lock:
                self._let_go(ticket)
        return moved

    def scan(self) -> None:
        """Take up new rings."""
        for tail in self.rings.scan():
            self.pipeline.add_ring(tail.reader)

    def finish(self, everything: bool = False) -> int:
        """Read to the end and hand over what is complete, without waiting for stragglers: a next daemon
        knows them for such. With `everything`, what is not complete too.

        Returns:
            The store's ticket of the last rows.
        """
        with self.lock:
            self.scan()
            while self._read() >= (1 if everything else BUSY_SLOTS):
                pass
            if everything:
                self._note_gone()
            rows = self.pipeline.take_rows(time.monotonic_ns() + SETTLE_NS, everything)
            rows[SAMPLES.name] = self._sampled(everything)
            self._add_ring_rows(rows)
            return self.store.put(rows)

    def look(self) -> Look:
        """The requests that the store does not have (yet); from any thread. Holds the lock for moments."""
        with self.lock:
            requests = self.pipeline.joiner.live()
        found: list[LiveRequest] = []
        for first in range(0, len(requests), LOOK_REQUESTS):
            with self.lock:
                some = requests[first : first + LOOK_REQUESTS]
                found += self.pipeline.look(some, time.monotonic_ns(), time.time_ns())
        with self.lock:  # what is taken from the pipeline is on its way
            pending = self.store.pending(REQUESTS.name)
        handed_over = {row[0] for row in pending}
        return Look([one for one in found if one.row[0] not in handed_over], pending)

    def _read(self) -> int:
        moved = 0
        for tail, events in self.rings.poll():
            moved += max(1, len(events))
            try:
                self.pipeline.feed(tail.reader, events, time.monotonic_ns())
            except Exception:
                # Rings are untrusted: one event that can't be understood must cost no other.
                for event in events:
                    self._feed_one(tail, event)
        return moved

    def _feed_one(self, tail: Tail, event: Event) -> None:
        try:
            self.pipeline.feed(tail.reader, [event], time.monotonic_ns())
        except Exception as error:
            if not self.faults:
                logger.error(
                    "%s: event %d can't be understood (%s: %s); such are counted and left out",
                    tail.reader.path,
                    event.seq,
                    type(error).__name__,
                    error,
                )
            self.faults += 1

    def processes(self) -> list[RingProcess]:
        """Those that record now; from any thread."""
        with self.lock:
            return self.rings.processes()

    def kv_blocks(self, at_ns: int, processes: list[RingProcess]) -> list[Sample]:
        """A source of the sampler: KV blocks by use."""
        with self.lock:
            return self.pipeline.kv_blocks(at_ns)

    def _sampled(self, everything: bool = False) -> list[Row]:
        try:
            self.sampler.add(self.pipeline.take_samples())
            return self.sampler.take_rows(everything)
        except Exception as error:
            # The requests that were taken with them must reach the store.
            if not self._sample_faults:
                logger.error("samples were lost (%s: %s); such are left out", type(error).__name__, error)
            self._sample_faults += 1
            return []

    def _add_ring_rows(self, rows: Rows) -> None:
        """Add what changed about the rings themselves: positions, states, recorders that gave up."""
        for tail in self.rings.tails.values():
            row = tail.row(*self.rings.state(tail))
            if self._stored_rows.get(tail.id) != row:
                self._stored_rows[tail.id] = row
                rows.setdefault(ENGINES.name, []).append(row)
            failure = tail.failure_row(time.time_ns())
            if failure is not None:
                rows.setdefault(FAILURES.name, []).append(failure)

    def _note_gone(self) -> None:
        """Take in that processes are gone, all of whose events were read."""
        for tail in self.rings.tails.values():
            if tail.drained and tail.id not in self._gone:
                self._gone[tail.id] = None
                self.rings.note_gone(tail, self.pipeline.ring_gone(tail.reader, time.monotonic_ns()))

    def _let_go(self, ticket: int) -> None:
        """Delete drained rings once all that came of them is on disk."""
        for tail in [t for t in self.rings.tails.values() if t.id in self._gone]:
            if self._gone[tail.id] is None:
                if not self._is_open(tail) and not self.rings.has_company(tail):
                    self._gone[tail.id] = ticket
            elif self.store.committed() >= (self._gone[tail.id] or 0):
                self.pipeline.ring_forgotten(tail.reader)
                self.rings.remove(tail)
                del self._gone[tail.id], self._stored_rows[tail.id]

    def _is_open(self, tail: Tail) -> bool:
        """Whether a request in memory needs this ring, should the daemon be killed."""
        last_ns = tail.last_event_ns - tail.reader.wall_ns + tail.reader.mono_ns
        return any(
            leg.engine == tail.engine and (leg.arrived_ns is None or leg.arrived_ns <= last_ns)
            for request in self.pipeline.joiner.live()
            for leg in request.legs()
        )


def _archive_of(settings: Settings) -> Path | None:
    return Path(settings.archive).expanduser().resolve() if settings.archive else None


class Daemon:
    """Collects in a thread of its own until it is stopped.

    Raises:
        StoreError: the store can't be opened.
        UsageError: traces are to be exported and OpenTelemetry is not installed.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._otlp = make_exporter(settings.otlp_endpoint)
        self._aggregates = Aggregates()
        self._store = Store(
            settings.store,
            settings.store_memory_mb,
            settings.retention_hours,
            on_commit=self._stored,
            archive=(directory := _archive_of(settings)),
        )
        self._archiving = (
            None if directory is None else Archiving(self._store, directory, settings.retention_hours)
        )
        if directory is None and (moved_ns := moved_until_ns(self._store)):
            logger.warning(
                "%s: hours before %s were moved to an archive; without --archive questions lack them%s",
                settings.store,
                utc(moved_ns)[:16],
                f", and rows older than {settings.retention_hours:g} h are deleted, archived or not"
                if settings.retention_hours
                else "",
            )
        self._exposition = Exposition(self._aggregates, self._now)
        self._collector = Collector(Rings(settings.dir, self._store), self._store)
        self._sampler = make_sampler(settings, self._collector.processes, self._collector.kv_blocks)
        self._collector.sampler = self._sampler
        self._started = time.monotonic()
        self._stopping = threading.Event()
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="kvscope-collect", daemon=True)

    def start(self) -> None:
        self._thread.start()
        self._sampler.start()
        if self._archiving is not None:
            self._archiving.start()
        if self._otlp is not None:
            self._otlp.start()

    def stop(self, deadline_s: float = 10.0) -> bool:
        """Read on to the end, write what is complete, close.

        Returns:
            Whether all was written in time; what was not is still in the rings.
        """
        end = time.monotonic() + deadline_s
        self._stopping.set()
        if self._archiving is not None:
            self._archiving.stop()
        self._sampler.stop()
        if self._thread.ident is not None:
            self._thread.join(deadline_s / 2)
        ended = not self._thread.is_alive()
        written = self._store.close(max(0.5, end - time.monotonic())) and ended
        if self._otlp is not None:
            self._otlp.stop(max(0.5, end - time.monotonic()))
        return written

    def _stored(self, rows: Rows, took_s: float) -> None:
        """In the thread that stores."""
        self._aggregates.add(rows, took_s)
        if self._otlp is not None:
            self._otlp.add(rows.get(REQUESTS.name, ()))

    def _run(self) -> None:
        pause_s = IDLE_MIN_S
        while not self._stopping.is_set():
            if not self._store.wait_for_room(0.2):
                continue  # the rings buffer
            moved = self._attempt(self._collector.step)
            pause_s = IDLE_MIN_S if moved else min(2 * pause_s, IDLE_MAX_S)
            if moved < BUSY_SLOTS:
                self._stopping.wait(pause_s)
        self._attempt(self._collector.finish)
        self._collector.rings.close()

    def _attempt(self, step: Callable[[], int]) -> int:
        """One step, however it ends: the daemon goes on."""
        try:
            moved = step()
        except (KvscopeError, duckdb.Error, OSError) as error:
            self._report(str(error).splitlines()[0])
            self._stopping.wait(IDLE_MAX_S)
            return 0
        except Exception as error:
            self._report(f"collecting failed: {type(error).__name__}: {' '.join(str(error).split())}")
            logger.debug("where it failed", exc_info=True)
            self._stopping.wait(IDLE_MAX_S)
            return 0
        self._error = ""
        return moved

    def _report(self, error: str) -> None:
        if error != self._error:
            logger.error("%s", error)
        self._error = error

    # --- what it tells, from any thread ---

    def status(self) -> dict[str, Any]:
        """How it does: store, rings, losses, files it could not read, the pipeline's counters."""
        collector, rings = self._collector, self._collector.rings
        with collector.lock:
            ring_list = rings.told()
            unreadable = [{"path": str(path), "reason": why} for path, why in sorted(rings.refused.items())]
            counters = collector.pipeline.counters()
        own = (rings.problem, self._store.error, self._error)
        return {
            "version": __version__,
            "uptime_s": round(time.monotonic() - self._started, 3),
            "dir": str(rings.directory),
            "problems": [
                *(text for text in own if text),
                *self._sampler.problems(),
                *(self._archiving.problems() if self._archiving is not None else ()),
                *(self._otlp.problems() if self._otlp is not None else ()),
            ],
            "rings": ring_list,
            "unreadable": unreadable,
            "store": self._store.status(),
            "archive": None if self._archiving is None else self._archiving.status(),
            "pipeline": {**counters, "faults": collector.faults},
            "samples": self._sampler.status(),
            "otlp": None if self._otlp is None else self._otlp.status(),
        }

    def live(self) -> list[dict[str, Any]]:
        """Requests that are not in the store (yet), as rows of the table `requests`, oldest first."""
        look, names = self.look(), [column.name for column in REQUESTS.columns]
        rows = (*(one.row for one in look.requests), *look.pending)
        return [dict(zip(names, row, strict=True)) for row in rows]

    def look(self) -> Look:
        """Requests that are not in the store (yet), with what they wait for."""
        return self._collector.look()

    def watch(self, take: Callable[[Sequence[Row]], None] | None) -> None:
        """Have requests told as they are handed to the store, in the collecting thread."""
        self._store.on_requests = take

    def samples(self) -> list[Sample]:
        """The latest of each kind."""
        return self._sampler.latest()

    def requests_table(self, rows: list[Row]) -> pa.Table:
        """Rows of `requests` as Arrow."""
        return self._store.table(REQUESTS.name, rows)

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """The answer to a scrape that accepts these formats, and its content type."""
        return self._exposition.answer(accept)

    def _now(self) -> Now:
        return read_now(self._collector, self.status(), self._sampler.latest(), time.time_ns())

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A cursor on the store for one thread; close it. It reaches no files and no settings."""
        return self._store.cursor()

    def keep(self, table: str, row: Row) -> None:
        """Store a row of a kept table; returns when it is on disk."""
        self._store.keep(table, row)

    def explained(self, error: Exception) -> str:
        """Why a question failed, with what to do where the archive is the reason."""
        return str(error) if self._archiving is None else self._archiving.explained(error)

    def snapshot(self, path: Path, everything: bool = False) -> None:
        """Write a consistent copy of the store, and with `everything` of its archive, to a new file."""
        self._store.snapshot(path, everything)

    def archive(self, path: Path, since: str, until: str) -> dict[str, Any]:
        """Write closed hours to a directory; see `archiving.write_by_hand`."""
        own = None if self._archiving is None else self._archiving.archive
        return write_by_hand(self._store, own, path, since, until)
