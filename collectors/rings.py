"""The source that tails the rings of this host: finds them, reads them on, lets go of those that are over,
and goes on telling of these for a while.

At a start every ring is read from its oldest event again, because requests in flight lived in memory
only; the store drops what it has. Loss is counted once: what an earlier daemon had read is not lost.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import os
import time
import uuid
from collections import deque
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from kvscope.collectors.store import Position, Row, Store
from kvscope.errors import KvscopeError
from kvscope.events import ENGINE_STOPPED, SCHEDULER, VOCABULARY
from kvscope.join import LIMIT_NS
from kvscope.ring import SUFFIX, Event, RingError, RingReader

logger = logging.getLogger(__name__)

CHUNK_SLOTS = 2048
PASS_SLOTS = 32768
"""Read in one pass over all rings; rows are taken between passes."""
RING_SLOTS = PASS_SLOTS // 2
"""Of these, what one ring may take: a flooded ring must not keep the others waiting."""
DEPARTED_NS = 600_000_000_000
"""So long after its process is gone a ring is told of."""
MAX_DEPARTED = 256
"""Of so many at most: the last ones."""
OUTLIVED_NS = 2_000_000_000
"""An engine that is stopped loses all its processes at about the same time. A worker that goes on for longer,
and then shuts down by itself, has lost its EngineCore."""


class Tail:
    """One ring, how far it was read, and what was lost, over all daemons that read it."""

    def __init__(self, reader: RingReader, position: Position | None) -> None:
        self.reader = reader
        self.id = _number(reader.ring_id.bytes)
        self.engine = reader.about.engine_id
        # Without a position the ring is new to the store: what it overwrote so far is lost.
        before = position or Position(1, 0, 0, 0, 0)
        self._counted_from, self.read, self.lost, self.torn, self.rejected = before
        self.lost += max(0, reader.next_seq - self._counted_from)
        self.last_event_ns = 0
        """Unix time of the last event read, by the ring's anchor."""
        self.orderly = False
        """The process said that it shuts down."""
        self.dead = False
        """The writer's process is gone."""
        self.gone_at_ns: int | None = None
        """Unix time when that was noticed."""
        self.cut_off = 0
        """Of a scheduler's ring: requests that were in flight on the engine then."""
        self.outlived = False
        """Of a scheduler's ring: a worker of the engine went on, and shut down because of it."""
        self.drained = False
        """And all it wrote was read."""
        self.damage = ""
        """Why the file can't be read on."""
        self._stop_told = False

    def next_events(self, limit: int) -> tuple[list[Event], int]:
        """About `limit` slots on; returns their events and the number of slots passed."""
        reader = self.reader
        start = reader.next_seq
        found: list[Event] = []
        while reader.next_seq < self._counted_from:
            if reader.next_seq - start >= limit:
                return found, reader.next_seq - start
            # One by one: when the ring laps us here, only the numbers from `_counted_from` on count.
            before = reader.next_seq
            found.extend(reader.events(1))
            if reader.next_seq == before:
                return found, reader.next_seq - start
            self.lost += max(0, reader.next_seq - self._counted_from)
        read, lost, torn, replayed = reader.read, reader.lost, reader.torn, len(found)
        found.extend(reader.events(limit))
        self.read += reader.read - read
        self.lost += reader.lost - lost
        self.torn += reader.torn - torn
        self.rejected += sum(e.kind not in VOCABULARY or e.t_ns >= LIMIT_NS for e in found[replayed:])
        if found:
            self.last_event_ns = reader.wall_ns + found[-1].t_ns - reader.mono_ns
            self.orderly = self.orderly or any(e.kind == ENGINE_STOPPED for e in found[-8:])
        return found, reader.next_seq - start

    @property
    def next_seq(self) -> int:
        """Number of the first event that neither this nor an earlier daemon has read."""
        return max(self.reader.next_seq, self._counted_from)

    def about(self, state: str, detail: str | None) -> dict[str, Any]:
        """What the daemon's API tells of this ring."""
        reader, about = self.reader, self.reader.about
        return {
            "ring": str(reader.ring_id),
            "file": reader.path.name,
            "engine": about.engine_id,
            "source": about.source,
            "rank": about.rank,
            "host": about.host,
            "pid": reader.pid,
            "label": about.label,
            "kvscope": about.kvscope,
            "started_at_ns": reader.wall_ns,
            "gone_at_ns": self.gone_at_ns,
            "state": state,
            "state_detail": detail,
            "read": self.read,
            "lost": self.lost,
            "torn": self.torn,
            "rejected": self.rejected,
            "slots": reader.slots,
            "last_event_at_ns": self.last_event_ns or None,
            "hooks_missing": about.hooks_missing,
            "fingerprint": about.fingerprint,
        }

    def row(self, state: str, detail: str | None) -> Row:
        """This ring's row of the table `engines`."""
        reader, about = self.reader, self.reader.about
        return (
            self.id,
            str(reader.ring_id),
            about.engine_id,
            about.source,
            about.rank,
            about.host,
            reader.pid,
            reader.wall_ns,
            about.label,
            about.kvscope,
            about.hooks_missing,
            msgspec.json.encode(about.fingerprint).decode(),
            self.next_seq,
            self.read,
            self.lost,
            self.torn,
            self.rejected,
            state,
            detail,
        )

    def failure_row(self, now_ns: int) -> Row | None:
        """A row of the table `failures`, once, when the recorder gave up."""
        reason = None if self._stop_told else self.reader.stopped_reason()
        if reason is None:
            return None
        self._stop_told = True
        about = self.reader.about
        return (
            _number(self.reader.ring_id.bytes + b"stopped"),
            now_ns,
            about.engine_id,
            about.source,
            about.rank,
            "recorder",
            "stopped",
            reason,
            None,
        )


class RingProcess(NamedTuple):
    """A process that records, as its ring tells: for those who look at the process itself."""

    path: Path
    """Its ring, whose file it holds open."""
    engine: str
    source: str
    rank: int
    host: str
    boot_id: str
    pid: int
    """In its own namespace."""
    fingerprint: dict[str, Any]


class Rings:
    """The rings in one directory.

    Args:
        directory: need not exist yet.
        store: knows how far each ring was read before, and is told what will come again.
    """

    def __init__(self, directory: Path, store: Store) -> None:
        self.directory = directory
        self.problem = ""
        """Why the directory can't be read; empty when it can."""
        self.tails: dict[Path, Tail] = {}
        self.refused: dict[Path, str] = {}
        """Files that are not read, and why."""
        self._store = store
        self._collected: set[uuid.UUID] = set()
        self._left: set[Path] = set()
        """Files of collected rings that could not be deleted, or should not."""
        self._departed: deque[dict[str, Any]] = deque(maxlen=MAX_DEPARTED)
        """What was told of rings when they were let go."""

    def scan(self) -> list[Tail]:
        """Open the rings that are new in the directory and notice writers that are gone."""
        found = self._list()
        self._left.intersection_update(found)
        unread = [path for path in found if path not in self.tails and path not in self._left]
        new = [tail for path in unread if (tail := self._open(path)) is not None]
        for path in self.refused.keys() - set(found):
            del self.refused[path]
        for tail in self.tails.values():
            if not tail.dead and not tail.reader.writer_alive():
                _died(tail)
        return new

    def poll(self) -> Iterator[tuple[Tail, list[Event]]]:
        """What was written since, chunk by chunk, at most `PASS_SLOTS` slots.

        The ring that is furthest back in time goes first, so that the two legs of a request come about
        together however far behind the reader is.
        """
        queue = [(tail.last_event_ns, tail.id, tail) for tail in self.tails.values() if not tail.drained]
        heapq.heapify(queue)
        left, taken = PASS_SLOTS, dict.fromkeys((tail.id for tail in self.tails.values()), 0)
        while queue and left > 0:
            _, _, tail = heapq.heappop(queue)
            found, slots = self._next_events(tail)
            left -= slots
            taken[tail.id] += slots
            if slots >= CHUNK_SLOTS and taken[tail.id] < RING_SLOTS:
                heapq.heappush(queue, (tail.last_event_ns, tail.id, tail))
            elif not slots and tail.dead:
                tail.drained = True
            if slots:
                yield tail, found

    def _next_events(self, tail: Tail) -> tuple[list[Event], int]:
        try:
            return tail.next_events(CHUNK_SLOTS)
        except (RingError, OSError) as error:
            tail.damage = str(error) if isinstance(error, RingError) else f"{tail.reader.path}: {error}"
            self._refuse(tail.reader.path, tail.damage)
            _died(tail)
            tail.drained = True
            return [], 0

    def state(self, tail: Tail) -> tuple[str, str | None]:
        """State of a ring, in the words of the table `engines`, and why."""
        reason = tail.reader.stopped_reason()
        if reason is not None:
            return "stopped", reason
        if tail.damage:
            return "stopped", tail.damage
        if not tail.dead:
            return "recording", None
        # What an engine says at its end tells little: vLLM 0.32 kills the processes of one that is stopped
        # before they can say that they shut down, and an EngineCore that fails says it too.
        if tail.cut_off:
            return "gone", f"{tail.cut_off} request{'s' * (tail.cut_off > 1)} in flight"
        if tail.outlived:
            return "gone", "its workers outlived it"
        return "ended", None

    def note_gone(self, tail: Tail, cut_off: int) -> None:
        """Take in that all was read of a ring whose process is gone, with so many requests in flight."""
        tail.cut_off = cut_off
        for other in self.tails.values():
            if other.engine == tail.engine and other.reader.about.source == SCHEDULER and other.gone_at_ns:
                lived_on_ns = (tail.gone_at_ns or 0) - other.gone_at_ns
                other.outlived |= tail.orderly and not other.orderly and lived_on_ns >= OUTLIVED_NS

    def has_company(self, tail: Tail) -> bool:
        """Whether processes that began before this one was gone still record for its engine."""
        return any(
            other.engine == tail.engine and not other.dead and other.reader.wall_ns < (tail.gone_at_ns or 0)
            for other in self.tails.values()
        )

    def told(self) -> list[dict[str, Any]]:
        """All rings, as the daemon's API tells of them: those that are read, and those that were let go."""
        return [*(tail.about(*self.state(tail)) for tail in self.tails.values()), *self.departed()]

    def departed(self) -> list[dict[str, Any]]:
        """Rings that were let go, of processes that are not long gone, and whose engine did not come back."""
        started = [(tail.engine, tail.reader.wall_ns) for tail in self.tails.values()]
        started += [(ring["engine"], ring["started_at_ns"]) for ring in self._departed]
        since_ns = dict.fromkeys((engine for engine, _ in started), time.time_ns() - DEPARTED_NS)
        for engine, at_ns in started:
            since_ns[engine] = max(since_ns[engine], at_ns)
        return [ring for ring in self._departed if ring["gone_at_ns"] >= since_ns[ring["engine"]]]

    def processes(self) -> list[RingProcess]:
        """Those that record now."""
        found = []
        for path, tail in self.tails.items():
            if not tail.dead:
                about = tail.reader.about
                found.append(
                    RingProcess(
                        path,
                        tail.engine,
                        about.source,
                        about.rank,
                        about.host,
                        about.boot_id,
                        tail.reader.pid,
                        about.fingerprint,
                    )
                )
        return found

    def remove(self, tail: Tail) -> None:
        """Let go of a drained ring and, unless it is damaged, delete its file: all of it is on disk."""
        path = tail.reader.path
        if not tail.damage:  # its file stays, and is told of
            self._departed.append(tail.about(*self.state(tail)))
        tail.reader.close()
        del self.tails[path]
        self._collected.add(tail.reader.ring_id)
        self._left.add(path)
        if tail.damage:
            return
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            self._refuse(path, f"{path}: collected, but can't be deleted: {error.strerror}")

    def close(self) -> None:
        for tail in self.tails.values():
            tail.reader.close()
        self.tails.clear()

    def _list(self) -> list[Path]:
        try:
            with os.scandir(self.directory) as entries:
                rings = [entry for entry in entries if entry.name.endswith(SUFFIX)]
        except OSError as error:
            problem = f"{self.directory}: {error.strerror}; waiting for engines to record there"
            if problem != self.problem:
                logger.warning("%s", problem)
            self.problem = problem
            return []
        if self.problem:
            logger.info("%s: there now", self.directory)
            self.problem = ""
        return sorted(Path(entry.path) for entry in rings)

    def _open(self, path: Path) -> Tail | None:
        try:
            reader = RingReader(path)
        except (RingError, OSError) as error:
            why = str(error) if isinstance(error, RingError) else f"{path}: can't be read: {error.strerror}"
            self._refuse(path, why)
            return None
        try:
            if reader.ring_id in self._collected:
                raise RingError(f"{path}: a copy of a collected ring; delete it")
            for other in self.tails.values():
                if other.reader.ring_id == reader.ring_id:
                    raise RingError(f"{path}: a copy of {other.reader.path.name}; delete it")
            position = self._store.position(str(reader.ring_id))
            if position is not None:
                self._expect_again(path, reader)
        except KvscopeError as error:
            reader.close()
            self._refuse(path, str(error))
            return None
        except BaseException:
            reader.close()
            raise
        self.refused.pop(path, None)
        tail = self.tails[path] = Tail(reader, position)
        logger.info(
            "%s: ring of engine %s, %s %d, pid %d",
            path.name,
            tail.engine,
            reader.about.source,
            reader.about.rank,
            reader.pid,
        )
        return tail

    def _expect_again(self, path: Path, reader: RingReader) -> None:
        with contextlib.closing(RingReader(path)) as probe:
            first = next(probe.events(), None)
        since_ns = reader.wall_ns + (first.t_ns - reader.mono_ns if first is not None else 0)
        self._store.expect_again(reader.about.engine_id, since_ns)

    def _refuse(self, path: Path, reason: str) -> None:
        if self.refused.get(path) != reason:
            logger.warning("%s", reason)
        self.refused[path] = reason


def _died(tail: Tail) -> None:
    tail.dead = True
    tail.gone_at_ns = tail.gone_at_ns or time.time_ns()


def _number(name: bytes) -> int:
    return int.from_bytes(blake2b(name, digest_size=8).digest(), "little")
