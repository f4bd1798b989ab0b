"""Counts of what was stored, kept in memory for `/metrics`: by kind of request, by pair, by engine; never by
request. They learn of a row when it is committed, so that they agree with the store and nothing counts twice.

All is bounded. A kind of request, a pair, an engine or a traffic needs room for all series that it may make
before it gets any; without room it counts under `other`. An engine's series go some time after its rings.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from kvscope import metrics as m
from kvscope import schema
from kvscope.collectors.counts import Counts, Histogram, Labels, clean
from kvscope.collectors.request_counts import CONNECTORS, begin_group, count_request, group_series
from kvscope.metrics import OTHER, PRODUCTION, UNKNOWN
from kvscope.regret import Regrets
from kvscope.steps import CLASSES

logger = logging.getLogger(__name__)

Row = tuple[Any, ...]

FORGET_S = 600.0
"""How long an engine's series stay after its last ring, and how long idle ones of an engine without rings."""
MAX_SERIES = 9_940
"""The rest of 10,000 is for what is told of the daemon itself."""
GROUPS_SERIES = 770
"""What pairs leave for kinds of requests at least: one connector and `local`."""
PAIR_SERIES = 2 + len(CLASSES)
ENGINE_SERIES = 17
"""Four counters of events, nine gauges, four of leases."""
TRAFFIC_SERIES = 150
"""Of the transfers, handshakes and leases of one traffic that are not told by engine."""
HANDSHAKE_SERIES = 2
MAX_FAILURES = 256
"""Kinds of failure, over all engines."""
CLOCK_ERROR_S = 300


class EngineInfo(NamedTuple):
    """What is known of an engine by its rings and by its requests."""

    role: str
    connector: str
    model: str
    traffic: str
    host: str
    vllm: str
    kvscope: str
    hooks_missing: int


class Snapshot(NamedTuple):
    """All counts of one moment, by the metric's name and by the values of its labels."""

    counters: dict[str, dict[Labels, float]]
    histograms: dict[str, dict[Labels, Histogram]]
    engines: dict[str, EngineInfo]
    """Those with rings, or that had some until a moment ago."""
    processes: Counter[str]
    """By state."""
    clock_error_ns: int


@dataclass(slots=True)
class _Ring:
    row: dict[str, Any]
    engine: str
    seen: float


@dataclass(slots=True)
class _Engine:
    traffic: str = UNKNOWN
    seen: float = 0.0
    roles: set[str] = field(default_factory=set)
    rings: set[str] = field(default_factory=set)
    past: Counter[str] = field(default_factory=Counter)
    """Events of rings that are forgotten."""


class Aggregates:
    """Takes what was committed, in the writer's thread; gives a snapshot to any.

    Args:
        clock: seconds that only go forward.
        wall: Unix time in seconds, for exemplars.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, wall: Callable[[], float] = time.time
    ) -> None:
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._planned = Counts()
        """What was given room beforehand."""
        self._loose = Counts()
        self._groups: dict[Labels, int] = {}
        """Room by connector, model and traffic."""
        self._pairs: set[Labels] = set()
        self._engines: dict[str, _Engine] = {}
        self._rings: dict[str, _Ring] = {}
        self._traffics: set[str] = set()
        self._faults = 0
        self._regrets = Regrets()
        self._clock_errors: deque[tuple[int, int]] = deque()
        """(second, greatest error in it)"""

    def add(self, rows: Mapping[str, Sequence[Row]], commit_s: float) -> None:
        """Count rows that were committed together, and how long that took."""
        with self._lock:
            self._loose.observe(m.COMMIT, (), commit_s)
            for name, table_rows in rows.items():
                self._loose.count(m.STORED, (name,), len(table_rows))
        for name, (take, columns) in _TABLES.items():
            for row in rows.get(name, ()):
                try:
                    with self._lock:  # for each row, so that a scrape does not wait for a whole batch
                        take(self, dict(zip(columns, row, strict=True)))
                except Exception as error:
                    # Rings are untrusted, and this is the writer's thread.
                    if not self._faults:
                        logger.error(
                            "a row of %s can't be counted (%s: %s)", name, type(error).__name__, error
                        )
                    self._faults += 1

    def snapshot(self, present: Collection[str]) -> Snapshot:
        """A copy of all counts.

        Args:
            present: the rings (their ids) that there are now; engines without any are forgotten in time.
        """
        with self._lock:
            self._forget(set(present), self._clock())
            self._count_regrets()
            oldest = int(self._clock()) - CLOCK_ERROR_S
            planned, loose = self._planned.copy(), self._loose.copy()
            uncounted: dict[Labels, float] = {(): self._faults}
            return Snapshot(
                planned.counters | loose.counters | self._events() | {m.UNCOUNTED.name: uncounted},
                planned.histograms | loose.histograms,
                {name: self._about(one) for name, one in self._engines.items() if one.rings},
                Counter(ring.row["state"] for ring in self._rings.values()),
                max((error for second, error in self._clock_errors if second >= oldest), default=0),
            )

    # --- with the lock held: series ---------------------------------------------------------------

    def _room(self, spare: int = 0) -> int:
        """Series that may still be made, `spare` and what stands for all others left out."""
        return (
            MAX_SERIES
            - spare
            - self._loose.series
            - sum(self._groups.values())
            - (0 if _OTHER_GROUP in self._groups else group_series(OTHER))
            - PAIR_SERIES * (len(self._pairs) + len(self._groups))
            - ENGINE_SERIES * (len(self._engines) + 1)
            - TRAFFIC_SERIES * len(self._traffics)
        )

    def _group(self, row: dict[str, Any]) -> Labels:
        """Connector, model and traffic of a request."""
        connector = clean(row["connector"])
        group = (connector, clean(row["model"]) or UNKNOWN, self._traffic(row["label"]))
        if group in self._groups:
            return group
        if connector not in CONNECTORS or self._room() < group_series(connector) + PAIR_SERIES:
            group = _OTHER_GROUP
        if group not in self._groups:
            self._groups[group] = group_series(group[0])
            begin_group(self._planned, group)
        return group

    def _pair(self, p_engine: str, d_engine: str, group: Labels) -> Labels:
        pair = (self._engine(p_engine)[0], self._engine(d_engine)[0], *group)
        if pair not in self._pairs:
            has_local = any(group[0] == "local" for group in self._groups)
            local = 0 if has_local else group_series("local") + 2 * PAIR_SERIES
            if self._room(max(local, GROUPS_SERIES - sum(self._groups.values()))) < PAIR_SERIES:
                return (OTHER, OTHER, *group)
            self._pairs.add(pair)
        return pair

    def _engine(self, name: str) -> tuple[str, _Engine]:
        """An engine as it is labelled, and what is known of it."""
        label = clean(name) or UNKNOWN
        engine = self._engines.get(label)
        if engine is None:
            label = label if self._room() >= ENGINE_SERIES else OTHER
            engine = self._engines.setdefault(label, _Engine())
        engine.seen = self._clock()
        return label, engine

    def _traffic(self, label: str | None) -> str:
        traffic = clean(label) or PRODUCTION
        if traffic not in self._traffics:
            if self._room() < TRAFFIC_SERIES:
                return OTHER
            self._traffics.add(traffic)
        return traffic

    # --- with the lock held: rows -----------------------------------------------------------------

    def _take_engine(self, row: dict[str, Any]) -> None:
        label, engine = self._engine(row["engine"])
        engine.traffic = self._traffic(row["label"])
        known = self._rings.get(row["ring"])
        if known is None:
            engine.rings.add(row["ring"])
            self._rings[row["ring"]] = _Ring(row, label, engine.seen)
        else:
            known.row, known.seen = row, engine.seen

    def _take_request(self, row: dict[str, Any]) -> None:
        p_engine, d_engine = row["p_engine"], row["d_engine"]
        for name, role in ((p_engine, m.P_ROLE), (d_engine, m.D_ROLE)):
            if name:
                self._engine(name)[1].roles.add(role)
        group = self._group(row)
        waits_s = count_request(self._planned, row, group, self._wall())
        if group != _OTHER_GROUP:  # of several models, which are not to be compared
            self._regrets.add(row, group, self._wall())
            self._count_regrets()
        if p_engine and d_engine:
            pair = self._pair(p_engine, d_engine, group)
            self._planned.count(m.PAIR_REQUESTS, pair)
            self._planned.count(m.PAIR_BYTES, pair, row["transfer_bytes"] or 0)
            for class_, seconds in waits_s.items():
                self._planned.count(m.PAIR_TTFT_CLASS, (*pair, class_), seconds)
        second, error_ns = int(self._clock()), row["clock_error_ns"] or 0
        if self._clock_errors and self._clock_errors[-1][0] == second:
            error_ns = max(error_ns, self._clock_errors.pop()[1])
        self._clock_errors.append((second, error_ns))
        while self._clock_errors[0][0] < second - CLOCK_ERROR_S:
            self._clock_errors.popleft()

    def _count_regrets(self) -> None:
        for judged in self._regrets.judged(self._wall()):
            self._planned.count(m.REGRET, judged.group, judged.regret_ns / 1e9)
            self._planned.count(m.REGRET_REQUESTS, judged.group)

    def _take_transfer(self, row: dict[str, Any]) -> None:
        labels = (clean(row["operation"]), self._engine(row["engine"])[1].traffic)
        self._planned.count(m.TRANSFERS, (*labels, "failed"), 0)
        self._planned.count(m.TRANSFERS, (*labels, clean(row["state"])))
        self._planned.count(m.TRANSFER_BYTES, labels, row["bytes"])
        self._planned.count(m.TRANSFER_DESCRIPTORS, labels, row["descriptors"])
        for metric, column in _TRANSFER_TIMES:
            if row[column] is not None:
                self._planned.observe(metric, labels, row[column] / 1e9)

    def _take_lease(self, row: dict[str, Any]) -> None:
        label, engine = self._engine(row["engine"])
        labels = (label, engine.traffic)
        for end in ("released", "expired", "lost"):
            self._planned.count(m.LEASES, (*labels, end), row["end"] == end)
        self._planned.count(m.LEASE_RENEWALS, labels, row["renewals"])
        if row["ended_at_ns"] is not None and row["deadline_at_ns"] is not None:
            margin_s = max(0, row["deadline_at_ns"] - row["ended_at_ns"]) / 1e9
            self._planned.observe(
                m.LEASE_MARGIN, (engine.traffic,), 0.0 if row["end"] == "expired" else margin_s
            )

    def _take_handshake(self, row: dict[str, Any]) -> None:
        label, engine = self._engine(row["engine"])
        labels = (label, engine.traffic)
        if (*labels, "ok") not in self._loose.counters.get(m.HANDSHAKES.name, {}):
            labels = labels if self._room() >= HANDSHAKE_SERIES else (OTHER, OTHER)
        self._loose.count(m.HANDSHAKES, (*labels, "ok"), bool(row["ok"]))
        self._loose.count(m.HANDSHAKES, (*labels, "failed"), not row["ok"])
        if row["ns"] is not None:
            self._planned.observe(m.HANDSHAKE, (engine.traffic,), row["ns"] / 1e9)

    def _take_failure(self, row: dict[str, Any]) -> None:
        label, engine = self._engine(row["engine"])
        labels = (label, engine.traffic, clean(row["kind"]), clean(row["name"]) or UNKNOWN)
        known = self._loose.counters.get(m.FAILURES.name, {})
        if labels not in known and (len(known) >= MAX_FAILURES or self._room() < 1):
            labels = (OTHER, OTHER, OTHER, OTHER)
        self._loose.count(m.FAILURES, labels)

    # --- with the lock held: engines --------------------------------------------------------------

    def _events(self) -> dict[str, dict[Labels, float]]:
        found: dict[str, dict[Labels, float]] = {metric.name: {} for metric, _ in _EVENTS}
        for name, engine in self._engines.items():
            if engine.rings:
                for metric, column in _EVENTS:
                    total = sum(self._rings[id_].row[column] or 0 for id_ in engine.rings)
                    found[metric.name][name, engine.traffic] = engine.past[column] + total
        return found

    def _about(self, engine: _Engine) -> EngineInfo:
        rows = [self._rings[id_].row for id_ in engine.rings]
        row = max(rows, key=lambda r: (r["source"] == "scheduler", r["started_at_ns"] or 0))
        prints = _fingerprint(row)
        extra = prints.get("extra_config")
        bidirectional = isinstance(extra, dict) and bool(extra.get("bidirectional_kv_xfer"))
        pull = "bidirectional" if bidirectional else "pull"
        return EngineInfo(
            role=(m.BOTH_ROLES if len(engine.roles) > 1 else next(iter(engine.roles), UNKNOWN)),
            connector="push" if prints.get("transfer_mode") == "push" else pull,
            model=clean(prints.get("model")) or UNKNOWN,
            traffic=engine.traffic,
            host=clean(row["host"]),
            vllm=clean(prints.get("vllm")),
            kvscope=clean(row["kvscope"]),
            hooks_missing=len({hook for r in rows for hook in r["hooks_missing"] or ()}),
        )

    def _forget(self, present: set[str], now: float) -> None:
        for id_ in present & self._rings.keys():
            self._rings[id_].seen = self._engines[self._rings[id_].engine].seen = now
        gone = {name for name, one in self._engines.items() if now - one.seen > FORGET_S}
        for id_, ring in list(self._rings.items()):
            if now - ring.seen > FORGET_S or ring.engine in gone:
                del self._rings[id_]
                engine = self._engines[ring.engine]
                engine.rings.discard(id_)
                engine.past.update({column: ring.row[column] or 0 for _, column in _EVENTS})
        for name in gone:
            del self._engines[name]
        if gone:
            self._pairs = {pair for pair in self._pairs if not gone.intersection(pair[:2])}
            for metric in m.METRICS:
                engines = sum(label in _ENGINE_LABELS for label in metric.labels)  # they come first
                for counts in (self._planned, self._loose) if engines else ():
                    counts.drop(metric, lambda labels, n=engines: not gone.isdisjoint(labels[:n]))  # type: ignore[misc]


def _fingerprint(row: dict[str, Any]) -> dict[str, Any]:
    try:
        return msgspec.json.decode(row["fingerprint"] or "{}", type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}


_OTHER_GROUP = (OTHER, OTHER, OTHER)
_EVENTS = (
    (m.EVENTS_READ, "read"),
    (m.EVENTS_LOST, "lost"),
    (m.EVENTS_TORN, "torn"),
    (m.EVENTS_REJECTED, "rejected"),
)
_TRANSFER_TIMES = (
    (m.TRANSFER_POST, "post_ns"),
    (m.TRANSFER_LOWER, "wire_lower_ns"),
    (m.TRANSFER_UPPER, "wire_upper_ns"),
)
_ENGINE_LABELS = ("engine", "p_engine", "d_engine")


def _table(table: schema.Table, take: Callable[[Aggregates, dict[str, Any]], None]) -> Any:
    return take, [column.name for column in table.columns]


_TABLES = {
    # Engines first: they tell what traffic the other rows are of.
    "engines": _table(schema.ENGINES, Aggregates._take_engine),
    "handshakes": _table(schema.HANDSHAKES, Aggregates._take_handshake),
    "leases": _table(schema.LEASES, Aggregates._take_lease),
    "failures": _table(schema.FAILURES, Aggregates._take_failure),
    "transfers": _table(schema.TRANSFERS, Aggregates._take_transfer),
    "requests": _table(schema.REQUESTS, Aggregates._take_request),
}
