"""Samples beside the rings: the host, vLLM's metrics, KV blocks by use; read in a thread of its own.

The collecting thread never waits for it: rows go through a bounded queue that each of its steps empties.
A source that fails costs its own samples of that round, is counted, and is logged once.
"""

from __future__ import annotations

import itertools
import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from kvscope import samples
from kvscope.collectors.host import Host
from kvscope.collectors.rings import RingProcess
from kvscope.collectors.store import Row
from kvscope.collectors.unrecorded import Finder
from kvscope.collectors.vllm_metrics import VllmMetrics
from kvscope.samples import FRESH_NS, Sample
from kvscope.settings import Settings

logger = logging.getLogger(__name__)

Source = Callable[[int, list[RingProcess]], Iterable[Sample]]
"""Reads once: (Unix ns to date the samples with, processes that record) -> samples."""

DEFAULT_S = 5.0
FIRST_PAUSES_S = (0.5, 1.0)
OVERDUE_S = 30.0
"""A source that takes longer hangs: asking vLLM's metrics ends after seconds."""
MAX_LATEST = 65536
MAX_WAITING = 65536
"""Rows that wait for the collecting thread: 20 rounds of 64 engines."""
MAX_OF_ROUND = 16384
"""Samples of one source in one round; the rest is dropped and counted."""
MAX_AT_NS = 1 << 63

_Key = tuple[str, str, str, int, str, str]


def _key(sample: Sample) -> _Key:
    return sample.host, sample.engine, sample.source, sample.rank, sample.name, sample.label


class Thinned:
    """The engines' own samples, one a second, as means over longer times: those are stored.

    The times are counted from the epoch, so that a ring that is read again gives the same rows.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_ns = int(interval_s * 1e9)
        self._open: dict[_Key, tuple[int, int, float, float]] = {}
        """Of each time that is not over: at_ns of the last sample, how many, their sum, when it came (s)."""

    def add(self, sample: Sample, now_s: float) -> list[Row]:
        """Returns the row of the time before, where this sample begins a new one."""
        key = _key(sample)
        at_ns, count, total, _ = self._open.pop(key, (sample.at_ns, 0, 0.0, 0.0))
        rows = []
        if at_ns // self._interval_ns != sample.at_ns // self._interval_ns:
            rows.append(_own_row(key, at_ns, total / count))
            count, total = 0, 0.0
        if len(self._open) < MAX_LATEST:
            self._open[key] = (sample.at_ns, count + 1, total + sample.value, now_s)
        return rows

    def quiet(self, now_s: float) -> list[Row]:
        """Rows of times after which nothing came: the engine is idle or gone."""
        before_s = now_s - 2 * self._interval_ns / 1e9
        rows = []
        while self._open:  # the least lately touched comes first
            key, (at_ns, count, total, touched_s) = next(iter(self._open.items()))
            if touched_s > before_s:
                break
            del self._open[key]
            rows.append(_own_row(key, at_ns, total / count))
        return rows


def _own_row(key: _Key, at_ns: int, mean: float) -> Row:
    host, engine, source, rank, name, label = key
    id_ = int.from_bytes(blake2b(repr((key, at_ns)).encode(), digest_size=8).digest(), "little")
    return samples.row(id_, Sample(at_ns, host, engine, source, rank, name, label, mean))


class Sampler:
    """Asks its sources every `interval_s`, keeps the latest samples, hands rows over.

    Args:
        sources: by name, in the order in which they are asked.
        processes: those that record now, from any thread.
        problems: where sources tell what an operator should mend, one line each.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        processes: Callable[[], list[RingProcess]],
        interval_s: float = DEFAULT_S,
        problems: Sequence[Callable[[], list[str]]] = (),
    ) -> None:
        self._sources = dict(sources)
        self._processes = processes
        self._problems = problems
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._latest: dict[_Key, Sample] = {}
        self._rows: deque[Row] = deque()
        self._thinned = Thinned(interval_s)
        self._next_id = secrets.randbits(31) << 32
        """Ids are counted up from a number of this run's own: they take a tenth of the space of hashes."""
        self._counts = {"rounds": 0, "samples": 0, "dropped": 0}
        self._faults = dict.fromkeys(self._sources, 0)
        self._round_s = 0.0
        self._asking: tuple[str, float] | None = None
        """The source that is read now, and since when (s)."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-sample", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, deadline_s: float = 1.0) -> None:
        """End after the round that runs; it is not waited for beyond the deadline."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(deadline_s)

    def round(self) -> None:
        """Ask every source once."""
        began = time.monotonic()
        processes = self._processes()
        for name, source in self._sources.items():
            self._asking = name, time.monotonic()
            try:
                found = list(source(time.time_ns(), processes))
            except Exception as error:
                if not self._faults[name]:
                    logger.error(
                        "%s could not be sampled (%s: %s); such rounds are counted",
                        name,
                        type(error).__name__,
                        " ".join(str(error).split())[:500],
                    )
                    logger.debug("where it failed", exc_info=True)
                self._faults[name] += 1
                continue
            self._take(found)
        self._asking = None
        self._counts["rounds"] += 1
        self._round_s = time.monotonic() - began

    def add(self, own: Iterable[Sample]) -> None:
        """Take the engines' own samples, in the order in which a ring holds them."""
        with self._lock:
            for sample in own:
                if not 0 <= sample.at_ns < MAX_AT_NS:  # rings are untrusted
                    self._counts["dropped"] += 1
                    continue
                self._keep(sample)
                self._queue(self._thinned.add(sample, time.monotonic()))

    def take_rows(self, everything: bool = False) -> list[Row]:
        """Rows of the table `samples` since the last call; never waits for a source. With `everything`, also
        those of times that are not over."""
        with self._lock:
            self._queue(self._thinned.quiet(math.inf if everything else time.monotonic()))
            rows = list(self._rows)
            self._rows.clear()
        return rows

    def latest(self) -> list[Sample]:
        """The latest sample of each name and label, none older than a minute (or two intervals)."""
        oldest_ns = time.time_ns() - max(FRESH_NS, int(2e9 * self._interval_s))
        with self._lock:
            for key in [key for key, sample in self._latest.items() if sample.at_ns < oldest_ns]:
                del self._latest[key]
            return list(self._latest.values())

    def problems(self) -> list[str]:
        """What an operator should mend, as found by the sources, or that one of them hangs; one line each."""
        found = [line for problems in self._problems for line in problems()]
        asking = self._asking
        if asking is not None and (seconds := time.monotonic() - asking[1]) > OVERDUE_S:
            found.append(
                f"SAMPLES ARE OLD: reading {asking[0]} hangs since {seconds:.0f} s; look for a file system "
                "of this host that does not answer, and restart the daemon"
            )
        return found

    def status(self) -> dict[str, Any]:
        with self._lock:
            waiting = len(self._rows)
        return {
            "interval_s": self._interval_s,
            **self._counts,
            "waiting": waiting,
            "faults": dict(self._faults),
            "round_ms": round(self._round_s * 1e3, 3),
        }

    def _take(self, found: list[Sample]) -> None:
        with self._lock:
            for sample in found[:MAX_OF_ROUND]:
                self._keep(sample)
                self._queue([samples.row(self._next_id, sample)])
                self._next_id += 1
            self._counts["dropped"] += max(0, len(found) - MAX_OF_ROUND)

    def _queue(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if len(self._rows) >= MAX_WAITING:  # the store can't take them: the oldest go
                self._rows.popleft()
                self._counts["dropped"] += 1
            self._rows.append(row)
            self._counts["samples"] += 1

    def _keep(self, sample: Sample) -> None:
        key = _key(sample)
        known = self._latest.get(key)
        if known is None and len(self._latest) >= MAX_LATEST:
            del self._latest[next(iter(self._latest))]
        if known is None or known.at_ns <= sample.at_ns:
            self._latest[key] = sample

    def _run(self) -> None:
        # The first rounds come soon: a screen wants numbers, and rates take two readings.
        pauses = itertools.chain(FIRST_PAUSES_S, itertools.repeat(self._interval_s))
        while not self._stopping.wait(min(next(pauses), self._interval_s)):
            try:
                self.round()
            except Exception:
                logger.exception("a round of samples failed")


def make_sampler(
    settings: Settings, processes: Callable[[], list[RingProcess]], kv_blocks: Source
) -> Sampler:
    """The daemon's: KV blocks in any case, the host and vLLM's metrics unless the settings leave them out."""
    sources = {"KV blocks": kv_blocks}
    if not settings.sample_seconds:
        return Sampler(sources, processes)
    finder, metrics = Finder(), VllmMetrics(settings.vllm_metrics)
    sources |= {"the host": Host().read, "processes that do not record": finder.read}
    sources |= {"vLLM's metrics": metrics.read}
    problems = (finder.problems, metrics.problems)
    return Sampler(sources, processes, settings.sample_seconds, problems)
