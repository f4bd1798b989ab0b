"""Joining and rows beyond the happy paths: event streams through the whole pipeline, rows out."""

from __future__ import annotations

import itertools
import random
import uuid
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope import events as ev
from kvscope import join
from kvscope.collectors.pipeline import Pipeline
from kvscope.demo.simulate import MS, SimulatedRing, Simulation, Truth
from kvscope.events import text_key
from kvscope.join import LONG_QUIET_NS, LOST_QUIET_NS, QUIET_NS, SETTLE_NS, UNJOINED_NS
from kvscope.ring import About, Event
from kvscope.schema import BY_NAME
from kvscope.steps import STEPS

START_NS = 10**15
WALL_NS = 1_700_000_000 * 10**9
TOKENS = 160
S = 10**9

Rows = dict[str, list[dict[str, Any]]]

# --- checks every row must pass ------------------------------------------------------------------

_RANGES = {
    "BIGINT": (-(2**63), 2**63 - 1),
    "UBIGINT": (0, 2**64 - 1),
    "UINTEGER": (0, 2**32 - 1),
    "USMALLINT": (0, 2**16 - 1),
    "UTINYINT": (0, 255),
}


def check_fits(type_: str, value: Any) -> None:
    """The value can be stored in a column of this DuckDB type."""
    if value is None:
        return
    if type_ in _RANGES:
        low, high = _RANGES[type_]
        assert type(value) is int
        assert low <= value <= high
    elif type_ == "BOOLEAN":
        assert type(value) is bool
    elif type_ == "VARCHAR":
        assert type(value) is str
        value.encode()
    elif type_ == "DOUBLE":
        assert type(value) is float
    else:
        assert type_.startswith("STRUCT")
        for entry in value:
            for field in ("step", "observed"):
                check_fits("UTINYINT", entry[field])
            for field in ("from_ns", "ns", "error_ns"):
                check_fits("BIGINT", entry[field])
            assert entry["ns"] >= 0


def check_request(row: dict[str, Any]) -> None:
    """Its steps add up, from both the columns and the waterfall."""
    critical = [i for i in row["waterfall"] if i["critical"]]
    at = 0
    for interval in critical:
        assert interval["from_ns"] == at
        at += interval["ns"]
    if row["ttft_ns"] is not None:
        assert at == row["ttft_ns"]
        assert row["ttft_ns"] == sum(row[s.column] or 0 for s in STEPS if s.in_ttft)


def named(rows: dict[str, list[tuple[Any, ...]]]) -> Rows:
    """Rows as dictionaries, each checked against the schema."""
    out: Rows = {}
    for table, found in rows.items():
        columns = BY_NAME[table].columns
        out[table] = [dict(zip((c.name for c in columns), row, strict=True)) for row in found]
        for row in out[table]:
            for column in columns:
                check_fits(column.type, row[column.name])
            if table == "requests":
                check_request(row)
    return out


# --- scenes --------------------------------------------------------------------------------------


class Scene:
    """Rings of a P and a D engine, with any number of worker ranks; times in milliseconds."""

    def __init__(self, mode: str = "pull", p_ranks: int = 1, d_ranks: int = 1, d_shift_ns: int = 0) -> None:
        self.mode = mode
        self.rings: dict[str, SimulatedRing] = {}
        self._transfers = 0
        for engine, ranks, shift in (("p", p_ranks, 0), ("d", d_ranks, d_shift_ns)):
            self._ring(engine, engine, ev.SCHEDULER, 0, shift)
            for rank in range(ranks):
                self._ring(f"{engine}{rank}", engine, ev.WORKER, rank, shift)

    def _ring(self, name: str, engine: str, source: str, rank: int, shift_ns: int) -> None:
        boot = f"boot-{engine}" if shift_ns else "boot"
        fingerprint = {
            "transfer_mode": "push" if self.mode == "push" else "pull",
            "extra_config": {"bidirectional_kv_xfer": self.mode == "bidirectional"},
        }
        about = About(engine, source, rank, "test", boot_id=boot, fingerprint=fingerprint)
        ring_id = text_key(name).to_bytes(16, "little")
        self.rings[name] = SimulatedRing(about, ring_id, shift_ns=shift_ns)

    def ns(self, ms: float) -> int:
        return START_NS + round(ms * MS)

    def add(self, ring: str, ms: float, kind: int, request: str, *args: int | str) -> None:
        self.rings[ring].add(self.ns(ms), kind, request, *args)

    def moment(self, ring: str, ms: float) -> int:
        return self.rings[ring].at(self.ns(ms))

    def ranks(self, engine: str) -> list[str]:
        return [name for name in self.rings if name.startswith(engine) and name != engine]

    def arrive(
        self,
        ring: str,
        ms: float,
        request: str,
        flags: int,
        peer: str = "",
        peer_request: str = "",
        offered: int = ev.UNKNOWN,
        transfer_id: str = "",
        trace: str = "",
    ) -> None:
        arrival = self.moment(ring, ms - 1)
        self.add(
            ring, ms, ev.REQUEST_ARRIVED, request,
            arrival, flags, TOKENS, peer, peer_request, offered, transfer_id, "", trace, 64,
        )  # fmt: skip

    def finish(
        self,
        ring: str,
        ms: float,
        request: str,
        status: str = "FINISHED_LENGTH_CAPPED",
        lease: int = 0,
        preemptions: int = 0,
    ) -> None:
        self.add(
            ring, ms, ev.REQUEST_FINISHED, request, status, TOKENS, 8, TOKENS, 0, 0, preemptions, lease, 10
        )

    def prefill(self, request: str, t: float = 0, *, finish: bool = True, **options: Any) -> None:
        """P's leg: arrives at t, is scheduled at t+3, finishes at t+50."""
        self.arrive("p", t + 1, request, ev.FLAG_REMOTE_DECODE, **options)
        self.add("p", t + 2, ev.REQUEST_CONSIDERED, request, 0, 0, 0)
        self.add("p", t + 3, ev.REQUEST_SCHEDULED, request, 10, 0, 1, 0, 0)
        if finish:
            self.finish("p", t + 50, request, lease=1)
            for rank in self.ranks("p"):
                self.add(rank, t + 51, ev.LEASE_ARMED, request, self.moment(rank, t + 30_000))

    def admit(
        self, request: str, t: float, peer_request: str = "", *, allocate: bool = True, **options: Any
    ) -> None:
        """D's leg arrives at t and has its blocks at t+2."""
        self.arrive("d", t, request, ev.FLAG_REMOTE_PREFILL, "p", peer_request, TOKENS, **options)
        self.add("d", t + 1, ev.REQUEST_CONSIDERED, request, 0, TOKENS, 1)
        if allocate:
            self.add("d", t + 2, ev.BLOCKS_ALLOCATED, request, 10, TOKENS, 1)

    def move(
        self,
        ring: str,
        request: str,
        posted: float,
        done: float | None,
        peer: str,
        size: int = 1000,
        poll: float | None = None,
    ) -> None:
        """A transfer posted by `ring`; the post call took 1 ms; `poll` is the last that saw it running."""
        self._transfers += 1
        write = int(self.mode == "push")
        self.add(
            ring, posted, ev.TRANSFER_POSTED, request,
            self._transfers, write, self.moment(ring, posted - 1), 0, peer,
        )  # fmt: skip
        if done is not None:
            last = self.moment(ring, posted if poll is None else poll)
            self.add(
                ring, done, ev.TRANSFER_DONE, request,
                self._transfers, last, self.moment(ring, done), self.moment(ring, posted - 1),
                1000, round((done - posted + 1) * 1000), size, 4,
            )  # fmt: skip

    def read(self, request: str, p_request: str, t: float, done: float = 20, rank: str = "d0") -> None:
        """D reads, its load starting at t and done `done` later; P is told."""
        self.add(rank, t, ev.LOAD_STARTED, request, "p", p_request, 10)
        self.move(rank, request, t + 2, t + done, "p")
        self.add(rank, t + done + 1, ev.LOAD_DONE, request, 0)
        p_rank = "p" + rank[1:]
        if p_rank in self.rings:
            self.add(p_rank, t + done + 1, ev.NOTIFICATION_RECEIVED, p_request, 1)

    def free(self, p_request: str, t: float) -> None:
        for rank in self.ranks("p"):
            self.add(rank, t, ev.LEASE_RELEASED, p_request)
        self.add("p", t + 1, ev.SEND_REPORTED, p_request)

    def decode(
        self, request: str, t: float, *, first: float = 10, end: float = 100,
        status: str = "FINISHED_STOPPED", lease: int = 0,
    ) -> None:  # fmt: skip
        """D knows at t that the KV is there, and runs."""
        self.add("d", t, ev.LOAD_REPORTED, request, 0)
        self.add("d", t + 1, ev.REQUEST_SCHEDULED, request, 11, TOKENS - 1, 1, 0, 0)
        self.add("d", t + first, ev.FIRST_TOKEN, request, 1)
        self.finish("d", t + end, request, status, lease)

    def pull(self, name: str = "r", t: float = 0, **options: Any) -> tuple[str, str]:
        """A whole pulled request."""
        p, d = ids(name)
        self.prefill(p, t, **options)
        self.admit(d, t + 60, p)
        for rank in self.ranks("d"):
            self.read(d, p, t + 65, rank=rank)
        self.free(p, t + 87)
        self.decode(d, t + 90, lease=int(self.mode == "bidirectional"))
        return p, d

    def push(self, name: str = "r", t: float = 0, **options: Any) -> tuple[str, str]:
        """A whole pushed request, rank by rank; D registers at t+12, P writes from t+55 to t+70."""
        p, d = ids(name)
        self.prefill(p, t, **options)
        self.register(d, t)
        for rank in self.ranks("p"):
            self.add(rank, t + 55, ev.PUSH_MATCHED, p, "d", d)
            self.move(rank, p, t + 57, t + 70, "d")
            self.add(rank, t + 70.1, ev.SEND_DONE, p, 0)
        for rank in self.ranks("d"):
            self.add(rank, t + 71, ev.NOTIFICATION_RECEIVED, d, 1)
            self.add(rank, t + 72, ev.LOAD_DONE, d, 0)
        self.free(p, t + 72)
        self.decode(d, t + 75)
        return p, d

    def register(self, d: str, t: float) -> None:
        self.admit(d, t + 5, "placeholder")
        for rank in self.ranks("d"):
            self.add(rank, t + 10, ev.LOAD_STARTED, d, "p", "placeholder", 10)
            self.add(rank, t + 11, ev.REGISTRATION_SENT, d, "p")
        for rank in self.ranks("p"):
            self.add(rank, t + 12, ev.REGISTRATION_RECEIVED, d, "d")

    # --- into the pipeline ---

    def feed(
        self,
        pipeline: Pipeline,
        order: Sequence[str] | None = None,
        *,
        now_ns: int = 0,
        skip: Iterable[int] = (),
        until: float | None = None,
        since: float | None = None,
    ) -> dict[str, Any]:
        """Feed whole rings one after the other; returns their readers by name."""
        readers = {}
        for name in order or list(self.rings):
            ring = self.rings[name]
            reader: Any = reader_of(ring)
            readers[name] = reader
            if reader.ring_id.bytes not in pipeline._sources:
                pipeline.add_ring(reader)
            low = START_NS if since is None else self.ns(since)
            high = self.ns(10**9 if until is None else until)
            events = [
                e
                for e in sorted(ring.events, key=lambda e: (e.t_ns, e.seq))
                if e.kind not in skip and low <= e.t_ns - ring.shift_ns < high
            ]
            pipeline.feed(reader, events, now_ns)
        return readers

    def rows(self, order: Sequence[str] | None = None, *, learn: bool = True, **options: Any) -> Rows:
        pipeline = Pipeline()
        if not learn:
            forget_rates(pipeline)
        self.feed(pipeline, order, **options)
        check_live(pipeline)
        return named(pipeline.take_rows(0, final=True))

    def row(self, order: Sequence[str] | None = None, **options: Any) -> dict[str, Any]:
        """The one request there is."""
        (row,) = self.rows(order, **options)["requests"]
        return row


def reader_of(ring: SimulatedRing) -> Any:
    return SimpleNamespace(
        ring_id=uuid.UUID(bytes=ring.ring_id),
        about=ring.about,
        wall_ns=WALL_NS,
        mono_ns=START_NS + ring.shift_ns,
        texts=dict(ring.texts),
    )


def check_live(pipeline: Pipeline) -> list[dict[str, Any]]:
    return named({"requests": [one.row for one in pipeline.look(pipeline.joiner.live(), 0, 0)]})["requests"]


def forget_rates(pipeline: Pipeline) -> None:
    """Rows of one request then don't hang on which other was told before it."""
    pipeline._rates.learn = lambda engine, transfer: None  # type: ignore[method-assign]


def ids(name: str) -> tuple[str, str]:
    return f"cmpl-{name}-0-aaaaaaaa", f"cmpl-{name}-0-bbbbbbbb"


def ms(row: dict[str, Any]) -> dict[str, float]:
    """The steps of a request in milliseconds."""
    return {s.name: row[s.column] / MS for s in STEPS if s.in_ttft and row[s.column]}


def orders(scene: Scene, count: int = 12) -> list[tuple[str, ...]]:
    """Orders in which the rings may be read."""
    found = list(itertools.permutations(scene.rings))
    return random.Random(1).sample(found, min(count, len(found)))


def same_in_any_order(scene: Scene, **options: Any) -> Rows:
    """The rows, which must not hang on the order in which rings are read."""
    expected = scene.rows(**options)
    for order in orders(scene):
        found = scene.rows(order, **options)
        for table in expected:
            key = BY_NAME[table].key
            assert sorted(found[table], key=lambda r: r[key]) == sorted(expected[table], key=lambda r: r[key])
    return expected


# --- ranks ---------------------------------------------------------------------------------------


def test_with_several_ranks_the_slowest_read_is_on_the_path() -> None:
    scene = Scene(p_ranks=2, d_ranks=2)
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.read(d, p, 65, done=15, rank="d0")
    scene.read(d, p, 66, done=40, rank="d1")
    scene.free(p, 110)
    scene.decode(d, 110)
    rows = same_in_any_order(scene)
    (row,) = rows["requests"]
    # d1: load 66, posted 68, done 106; nothing tells the wire from the poll yet.
    assert ms(row)["transfer.dispatch"] == 4
    assert ms(row)["unknown"] == 38
    assert ms(row)["readiness.report"] == 4
    assert row["clamped_ns"] == 0
    assert row["transfer_bytes"] == 2000
    assert sorted((t["rank"], t["bytes"]) for t in rows["transfers"]) == [(0, 1000), (1, 1000)]
    assert [lease["rank"] for lease in rows["leases"]] == [0, 1]


def test_with_several_ranks_a_late_registration_of_another_rank_is_not_taken_for_the_slow_ones() -> None:
    """Rank 1's registration comes last, rank 0's WRITE is done last: the path is rank 0's."""
    scene = Scene("push", p_ranks=2, d_ranks=2)
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 5, "placeholder")
    for rank, received, done in ((0, 12, 120), (1, 80, 100)):
        scene.add(f"p{rank}", received, ev.REGISTRATION_RECEIVED, d, "d")
        matched = max(received, 50) + 2
        scene.add(f"p{rank}", matched, ev.PUSH_MATCHED, p, "d", d)
        scene.move(f"p{rank}", p, matched + 2, done, "d")
        scene.add(f"d{rank}", done + 1, ev.NOTIFICATION_RECEIVED, d, 1)
        scene.add(f"d{rank}", done + 2, ev.LOAD_DONE, d, 0)
    scene.free(p, 121)
    scene.decode(d, 125)
    row = same_in_any_order(scene)["requests"][0]
    assert row["clamped_ns"] == 0
    assert row["lead_ns"] == 38 * MS
    assert ms(row)["prefill.compute"] == 47
    assert ms(row)["transfer.dispatch"] == 2
    assert ms(row)["readiness.signal"] == 1


def test_the_rank_of_d_that_was_told_last_names_the_write_on_the_path() -> None:
    scene = Scene("push", p_ranks=2, d_ranks=2)
    p, d = ids("r")
    scene.prefill(p)
    scene.register(d, 0)
    for rank, done, told in ((0, 90, 91), (1, 80, 110)):  # D's rank 1 was busy
        scene.add(f"p{rank}", 55, ev.PUSH_MATCHED, p, "d", d)
        scene.move(f"p{rank}", p, 57, done, "d")
        scene.add(f"d{rank}", told, ev.NOTIFICATION_RECEIVED, d, 1)
    scene.free(p, 91)
    scene.decode(d, 112)
    assert ms(same_in_any_order(scene)["requests"][0])["readiness.signal"] == 30


def test_two_ranks_of_p_writing_to_one_of_d_are_both_waited_for() -> None:
    scene = Scene("push", p_ranks=2, d_ranks=1)
    p, d = ids("r")
    scene.prefill(p)
    scene.register(d, 0)
    for rank, done in ((0, 70), (1, 90)):
        scene.add(f"p{rank}", 55, ev.PUSH_MATCHED, p, "d", d)
        scene.move(f"p{rank}", p, 57, done, "d")
        scene.add("d0", done + 1, ev.NOTIFICATION_RECEIVED, d, 2)
    scene.free(p, 91)
    scene.decode(d, 95)
    rows = same_in_any_order(scene)
    row = rows["requests"][0]
    assert (row["clamped_ns"], row["transfer_bytes"], len(rows["transfers"])) == (0, 2000, 2)
    assert ms(row)["readiness.signal"] == 1
    assert ms(row)["unknown"] == 33


def test_one_rank_of_d_reading_from_two_of_p_waits_for_the_later_handle() -> None:
    scene = Scene(p_ranks=2, d_ranks=1)
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.add("d0", 64, ev.LOAD_STARTED, d, "p", p, 10)
    scene.move("d0", d, 66, 70, "p")
    scene.move("d0", d, 68, 90, "p")
    scene.add("d0", 91, ev.LOAD_DONE, d, 0)
    scene.free(p, 92)
    scene.decode(d, 93)
    rows = same_in_any_order(scene)
    row = rows["requests"][0]
    assert ms(row)["transfer.post"] == 4
    assert ms(row)["readiness.report"] == 3
    assert len({t["id"] for t in rows["transfers"]}) == 2


def test_a_rank_whose_ring_is_missing_shows_in_the_report() -> None:
    scene = Scene(p_ranks=2, d_ranks=2)
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.read(d, p, 65, done=15, rank="d0")
    scene.read(d, p, 66, done=40, rank="d1")
    scene.free(p, 110)
    scene.decode(d, 110)
    row = scene.row(["p", "p0", "d", "d0"])
    assert row["outcome"] == "finished"
    assert ms(row)["readiness.report"] == 30
    assert row["transfer_bytes"] == 1000


# --- n>1 sampling --------------------------------------------------------------------------------


def siblings(scene: Scene) -> list[str]:
    p, _ = ids("r")
    scene.prefill(p)
    found = []
    for index, first in enumerate((30, 10, 20)):
        d = f"{index}_cmpl-r-0-{index:08x}"
        scene.admit(d, 60 + index, p)
        scene.read(d, p, 66 + index)
        scene.decode(d, 95 + index, first=first, end=100 * (index + 1))
        found.append(d)
    scene.free(p, 95)
    return found


def test_with_n_samples_the_row_tells_of_the_one_with_the_first_token() -> None:
    scene = Scene()
    d = siblings(scene)
    rows = same_in_any_order(scene)
    (row,) = rows["requests"]
    assert (row["d_legs"], row["d_request"], row["client_id"]) == (3, d[1], "r")
    assert row["ttft_ns"] == 106 * MS
    assert len(rows["transfers"]) == 3
    assert row["transfer_bytes"] == 3000


def test_with_n_samples_the_row_is_not_written_before_the_last_ended() -> None:
    scene = Scene()
    siblings(scene)
    pipeline = Pipeline()
    scene.feed(pipeline, until=390)
    assert not pipeline.take_rows(60 * S)["requests"]
    scene.feed(pipeline, since=390)
    assert len(pipeline.take_rows(61 * S)["requests"]) == 1


def test_without_a_token_the_sample_that_got_furthest_is_told_in_any_order() -> None:
    scene = Scene()
    p, _ = ids("r")
    scene.prefill(p)
    for index in range(3):
        scene.admit(f"{index}_cmpl-r-0-{index:08x}", 60 + index, p, allocate=index == 1)
    (row,) = same_in_any_order(scene)["requests"]
    assert row["d_request"].startswith("1_")


def test_a_sample_that_failed_is_not_hidden_behind_one_that_was_served() -> None:
    scene = Scene()
    d = siblings(scene)
    ring = scene.rings["d"]
    at = next(
        i for i, e in enumerate(ring.events) if e.kind == ev.REQUEST_FINISHED and e.key == text_key(d[2])
    )
    event = ring.events[at]
    ring.events[at] = event._replace(args=(ring.key("FINISHED_ABORTED"), *event.args[1:]))
    row = same_in_any_order(scene)["requests"][0]
    assert (row["outcome"], row["d_request"]) == ("aborted", d[1])


# --- preemption ----------------------------------------------------------------------------------


def preempted_prefill(scene: Scene, skip: Iterable[int] = ()) -> None:
    p, d = ids("r")
    scene.arrive("p", 1, p, ev.FLAG_REMOTE_DECODE)
    scene.add("p", 2, ev.REQUEST_CONSIDERED, p, 0, 0, 0)
    for t, preempted in ((3, 0), (10, 1), (15, 0), (20, 1), (30, 0)):
        if t not in skip:
            kind = ev.REQUEST_PREEMPTED if preempted else ev.REQUEST_SCHEDULED
            scene.add("p", t, kind, p)
    scene.finish("p", 50, p, lease=1, preemptions=2)
    scene.admit(d, 60, p)
    scene.read(d, p, 65)
    scene.free(p, 87)
    scene.decode(d, 90)


def test_a_preempted_prefill_waits_in_the_queue_again() -> None:
    scene = Scene()
    preempted_prefill(scene)
    row = scene.row()
    assert ms(row)["prefill.compute"] == 7 + 5 + 20
    assert ms(row)["prefill.queue"] == 1 + 5 + 10
    assert row["preemptions"] == 2
    assert row["clamped_ns"] == 0


@pytest.mark.parametrize("missing", [3, 10, 15, 20, 30])
def test_a_missing_event_of_a_preempted_prefill_makes_only_its_neighbours_unknown(missing: int) -> None:
    times = [2, 3, 10, 15, 20, 30, 50]
    scene = Scene()
    preempted_prefill(scene, [missing])
    row = scene.row()
    at = times.index(missing)
    with_wire = 18  # without a baseline
    assert row["clamped_ns"] == 0
    assert ms(row)["unknown"] == times[at + 1] - times[at - 1] + with_wire


@pytest.mark.parametrize(("preempted", "recomputed"), [(95, TOKENS), (120, 0)])
def test_blocks_lost_on_d_count_as_recomputed_only_before_the_first_token(
    preempted: float, recomputed: int
) -> None:
    scene = Scene()
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.read(d, p, 65)
    scene.free(p, 87)
    scene.decode(d, 90, first=20)
    scene.add("d", preempted, ev.REQUEST_PREEMPTED, d)
    scene.add("d", preempted + 5, ev.REQUEST_SCHEDULED, d, 11, 0, 1, 1, 0)
    row = scene.row()
    assert (row["recomputed_tokens"], row["clamped_ns"]) == (recomputed, 0)
    assert ms(row).get("readiness.admit", 0) == (5 if recomputed else 0)
    assert row["ttft_ns"] == 110 * MS


# --- failures and aborts -------------------------------------------------------------------------


def failed_load(scene: Scene) -> str:
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.add("d0", 65, ev.LOAD_STARTED, d, "p", p, 10)
    scene.move("d0", d, 67, None, "p")
    scene.add("d0", 80, ev.FAILURE, d, "transfer_failed", "p")
    scene.add("d0", 81, ev.LOAD_DONE, d, 1)
    scene.free(p, 83)
    return d


def test_a_failed_load_ends_the_request_with_vllms_reason() -> None:
    """Policy fail: vLLM finishes the request before its connector hears the report of that step."""
    scene = Scene()
    d = failed_load(scene)
    scene.finish("d", 85, d, "FINISHED_ERROR")
    scene.add("d", 85.1, ev.LOAD_REPORTED, d, 1)
    rows = same_in_any_order(scene)
    (row,) = rows["requests"]
    assert (row["outcome"], row["outcome_detail"]) == ("error", "transfer_failed")
    assert row["current_step"] == "readiness.report"
    assert (row["ttft_ns"], row["transferred_tokens"], row["clamped_ns"]) == (None, 0, 0)
    assert [t["state"] for t in rows["transfers"]] == ["failed"]
    assert rows["failures"][0]["request_id"] == row["id"]


def test_a_failed_load_that_is_recomputed_says_so() -> None:
    scene = Scene()
    d = failed_load(scene)
    scene.add("d", 85, ev.LOAD_REPORTED, d, 1)
    scene.add("d", 87, ev.REQUEST_SCHEDULED, d, 11, 0, 1, 0, 0)
    scene.add("d", 140, ev.FIRST_TOKEN, d, 1)
    scene.finish("d", 200, d)
    row = same_in_any_order(scene)["requests"][0]
    assert (row["outcome"], row["outcome_detail"]) == ("finished", "transfer_failed")
    assert (row["recomputed_tokens"], row["transferred_tokens"]) == (TOKENS, 0)
    assert ms(row)["decode.first_step"] == 53


def abort_on_p_queued(scene: Scene, p: str, d: str) -> None:
    scene.arrive("p", 1, p, ev.FLAG_REMOTE_DECODE)
    scene.finish("p", 30, p, "FINISHED_ABORTED")


def abort_on_p_computing(scene: Scene, p: str, d: str) -> None:
    scene.prefill(p, finish=False)
    scene.finish("p", 30, p, "FINISHED_ABORTED")


def abort_on_d_queued(scene: Scene, p: str, d: str) -> None:
    scene.prefill(p)
    scene.arrive("d", 60, d, ev.FLAG_REMOTE_PREFILL, "p", p, TOKENS)
    scene.finish("d", 70, d, "FINISHED_ABORTED")
    scene.free(p, 72)


def abort_on_d_without_blocks(scene: Scene, p: str, d: str) -> None:
    scene.prefill(p)
    scene.admit(d, 60, p, allocate=False)
    scene.finish("d", 70, d, "FINISHED_ABORTED")
    scene.free(p, 72)


def abort_on_d_in_transfer(scene: Scene, p: str, d: str) -> None:
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.read(d, p, 65, done=40)
    scene.finish("d", 80, d, "FINISHED_ABORTED")
    scene.add("d", 110, ev.LOAD_REPORTED, d, 0)  # vLLM reports it all the same
    scene.free(p, 108)


def abort_on_d_generating(scene: Scene, p: str, d: str) -> None:
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.read(d, p, 65)
    scene.free(p, 87)
    scene.decode(d, 90, status="FINISHED_ABORTED")


@pytest.mark.parametrize(
    ("abort", "step"),
    [
        (abort_on_p_queued, "prefill.queue"),
        (abort_on_p_computing, "prefill.compute"),
        (abort_on_d_queued, "registration.admit"),
        (abort_on_d_without_blocks, "registration.blocks"),
        (abort_on_d_in_transfer, "transfer.wire"),
        (abort_on_d_generating, "decode.generate"),
    ],
)
def test_a_client_that_leaves_is_shown_in_the_step_it_left(abort: Any, step: str) -> None:
    scene = Scene()
    abort(scene, *ids("r"))
    (row,) = same_in_any_order(scene)["requests"]
    assert (row["outcome"], row["outcome_detail"], row["current_step"]) == (
        "aborted",
        "FINISHED_ABORTED",
        step,
    )
    assert row["clamped_ns"] == 0


def test_a_clean_up_request_is_counted_and_shown_neither_alone_nor_as_a_leg() -> None:
    """D's API server turns a request down; vLLM sends itself a request that frees P's blocks."""
    scene = Scene()
    p, _ = ids("r")
    scene.prefill(p)
    ghost = "f" * 32
    flags = ev.FLAG_CLEANUP | ev.FLAG_REMOTE_PREFILL
    scene.arrive("d", 60, ghost, flags, "p", p, TOKENS)
    scene.finish("d", 61, ghost, "FINISHED_ABORTED")
    scene.add("d0", 62, ev.LOAD_STARTED, ghost, "p", p, 0)
    scene.add("d0", 62, ev.NOTIFICATION_SENT, ghost)
    scene.free(p, 64)
    (row,) = same_in_any_order(scene)["requests"]
    assert (row["d_legs"], row["d_request"]) == (0, None)
    assert (row["outcome"], row["outcome_detail"]) == ("aborted", "turned down by D")
    pipeline = Pipeline()
    scene.feed(pipeline)
    assert not [r for r in check_live(pipeline) if r["client_id"] == ghost]
    pipeline.take_rows(0, final=True)
    assert pipeline.counters()["cleanup_requests"] == 1


# --- leases --------------------------------------------------------------------------------------


def test_blocks_that_nobody_fetched_in_time_are_told() -> None:
    scene = Scene()
    p, _ = ids("r")
    scene.prefill(p)
    scene.add("p0", 30_000, ev.LEASE_EXPIRED, p, 0)
    scene.add("p", 30_001, ev.SEND_REPORTED, p)
    rows = same_in_any_order(scene)
    row = rows["requests"][0]
    assert (row["outcome"], row["outcome_detail"]) == ("incomplete", "lease expired, never read")
    assert not row["read_after_expiry"]
    assert [(x["end"], x["request_id"]) for x in rows["leases"]] == [("expired", row["id"])]


def read_too_late(scene: Scene) -> tuple[str, str]:
    p, d = ids("r")
    scene.prefill(p)
    scene.add("p0", 30_000, ev.LEASE_EXPIRED, p, 0)
    scene.add("p", 30_001, ev.SEND_REPORTED, p)
    scene.admit(d, 40_000, p)
    scene.read(d, p, 40_005)
    scene.add("p0", 40_030, ev.NOTIFICATION_LATE, p)
    scene.decode(d, 40_040)
    return p, d


def test_a_read_after_expiry_is_told_on_the_request() -> None:
    scene = Scene()
    read_too_late(scene)
    rows = same_in_any_order(scene)
    (row,) = rows["requests"]
    assert (row["outcome"], row["read_after_expiry"]) == ("finished", True)
    assert row["outcome_detail"] == "lease expired"
    assert rows["failures"][0]["name"] == "read_after_expiry"


def test_a_read_after_p_was_stored_as_expired_is_told_on_what_d_did() -> None:
    scene = Scene()
    p, d = read_too_late(scene)
    for order in orders(scene):
        pipeline = Pipeline()
        scene.feed(pipeline, until=35_000, now_ns=35 * S)
        (first,) = named(pipeline.take_rows(35 * S + UNJOINED_NS))["requests"]
        assert first["outcome_detail"] == "lease expired, never read"
        scene.feed(pipeline, order, since=35_000, now_ns=41 * S)
        rows = named(pipeline.take_rows(0, final=True))
        (row,) = rows["requests"]
        assert (row["d_request"], row["read_after_expiry"]) == (d, True)
        assert rows["failures"][0]["request_id"] == first["id"]
        assert p


def test_a_heartbeat_that_nobody_holds_a_lease_for_makes_no_request() -> None:
    scene = Scene("push")
    scene.add("p0", 5, ev.LEASE_UNMATCHED, "placeholder")
    scene.push()
    assert len(scene.rows()["requests"]) == 1


def test_leases_whose_end_was_lost_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "MAX_LEASES", 10)
    scene = Scene()
    for index in range(50):
        scene.add("p0", index, ev.LEASE_ARMED, f"r{index}", scene.moment("p0", index))
    pipeline = Pipeline()
    scene.feed(pipeline)
    assert len(pipeline.joiner._leases) == 10
    assert {r["end"] for r in named(pipeline.take_rows(0))["leases"]} == {"lost"}


# --- engines that are gone, or not instrumented --------------------------------------------------


def test_a_registration_waits_for_a_p_that_does_not_finish() -> None:
    scene = Scene("push")
    p, d = ids("r")
    scene.prefill(p, finish=False)
    scene.register(d, 0)
    pipeline = Pipeline()
    scene.feed(pipeline)
    live = {r["p_request"] or r["d_request"]: r["current_step"] for r in check_live(pipeline)}
    assert live == {p: "prefill.compute", d: "registration.notify"}
    assert not pipeline.take_rows(QUIET_NS + S)["requests"], "both still wait, and are to be seen"


@pytest.mark.parametrize("killed", ["p", "d"])
def test_an_engine_killed_in_mid_transfer_leaves_the_request_lost_where_it_was(killed: str) -> None:
    scene = Scene("push")
    p, d = ids("r")
    scene.prefill(p)
    scene.register(d, 0)
    scene.add("p0", 55, ev.PUSH_MATCHED, p, "d", d)
    scene.move("p0", p, 57, None, "d")
    for order in orders(scene):
        pipeline = Pipeline()
        readers = scene.feed(pipeline, order, now_ns=1)
        for name in (killed, f"{killed}0"):
            pipeline.ring_gone(readers[name], 2)
        assert not pipeline.take_rows(3)["requests"]
        (row,) = named(pipeline.take_rows(LOST_QUIET_NS + 2 * S))["requests"]
        assert (row["outcome"], row["current_step"]) == ("lost", "transfer.wire")


def test_a_killed_engine_that_came_back_under_its_own_id_still_lost_its_requests() -> None:
    scene = Scene()
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 60, p)
    pipeline = Pipeline()
    readers = scene.feed(pipeline, now_ns=1)
    for name in ("d", "d0"):
        pipeline.ring_gone(readers[name], 2)
        again = reader_of(scene.rings[name])
        again.ring_id = uuid.UUID(int=again.ring_id.int + 1)
        pipeline.add_ring(again)
    (row,) = named(pipeline.take_rows(LOST_QUIET_NS + 2 * S))["requests"]
    assert row["outcome"] == "lost"


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("known", ["p", "d"])
def test_a_leg_beside_a_stock_engine_is_told_alone(mode: str, known: str) -> None:
    scene = Scene(mode)
    scene.push() if mode == "push" else scene.pull()
    row = scene.row([known, f"{known}0"])
    assert row["joined_by"] == "peer not instrumented"
    assert row["outcome"] == "finished"
    assert (row["ttft_ns"] is not None) == (known == "d")


def test_a_generation_longer_than_any_quiet_is_not_cut_off() -> None:
    scene = Scene()
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.read(d, p, 65)
    scene.free(p, 87)
    scene.decode(d, 90, end=600_000)
    pipeline = Pipeline()
    scene.feed(pipeline, until=300, now_ns=S)
    assert not pipeline.take_rows(500 * S)["requests"]
    scene.feed(pipeline, since=300, now_ns=600 * S)
    (row,) = named(pipeline.take_rows(601 * S))["requests"]
    assert (row["outcome"], row["output_tokens"]) == ("finished", 8)


def test_a_request_that_nothing_is_heard_of_is_stored_in_the_end() -> None:
    scene = Scene()
    scene.prefill(ids("r")[0], finish=False)
    pipeline = Pipeline()
    scene.feed(pipeline, now_ns=S)
    (row,) = named(pipeline.take_rows(LONG_QUIET_NS + 3 * S))["requests"]
    assert (row["outcome"], row["current_step"]) == ("incomplete", "prefill.compute")


def test_an_engine_keeps_its_label_when_one_of_its_rings_goes() -> None:
    scene = Scene()
    scene.prefill(ids("r")[0], finish=False)
    pipeline = Pipeline()
    readers = scene.feed(pipeline)
    pipeline.ring_forgotten(readers["p0"])
    assert [r["label"] for r in check_live(pipeline)] == ["test"]


# --- handshakes ----------------------------------------------------------------------------------


def test_a_handshake_behind_another_engines_counts_whole() -> None:
    scene = Scene()
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.add("d0", 65, ev.LOAD_STARTED, d, "p", p, 10)
    scene.add("d0", 65, ev.HANDSHAKE_WAITED, d, "p")
    scene.add("d0", 70, ev.HANDSHAKE_FINISHED, "", "elsewhere", scene.moment("d0", 60), 1, 0, 0)
    scene.add("d0", 90, ev.HANDSHAKE_FINISHED, "", "p", scene.moment("d0", 70), 1, 0, 0)
    scene.add("d0", 93, ev.LOAD_STARTED, d, "p", p, 10)
    scene.move("d0", d, 95, 96, "p")
    scene.free(p, 98)
    scene.decode(d, 99)
    rows = same_in_any_order(scene)
    assert ms(rows["requests"][0])["registration.handshake"] == 25
    assert ms(rows["requests"][0])["transfer.dispatch"] == 3 + 3
    assert sorted(h["ns"] // MS for h in rows["handshakes"]) == [10, 20]


def test_handshakes_on_either_side_of_a_push_are_told_apart() -> None:
    scene = Scene("push")
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 5, "placeholder")
    scene.add("d0", 10, ev.LOAD_STARTED, d, "p", "placeholder", 10)
    scene.add("d0", 10, ev.HANDSHAKE_WAITED, d, "p")
    scene.add("d0", 60, ev.HANDSHAKE_FINISHED, "", "p", scene.moment("d0", 11), 1, 0, 0)
    scene.add("d0", 61, ev.LOAD_STARTED, d, "p", "placeholder", 10)
    scene.add("d0", 62, ev.REGISTRATION_SENT, d, "p")
    scene.add("p0", 63, ev.REGISTRATION_RECEIVED, d, "d")
    scene.add("p0", 64, ev.PUSH_MATCHED, p, "d", d)
    scene.add("p0", 64, ev.HANDSHAKE_WAITED, p, "d")
    scene.add("p0", 84, ev.HANDSHAKE_FINISHED, "", "d", scene.moment("p0", 65), 1, 0, 0)
    scene.add("p0", 85, ev.PUSH_MATCHED, p, "d", d)
    scene.move("p0", p, 87, 90, "d")
    scene.add("d0", 91, ev.NOTIFICATION_RECEIVED, d, 1)
    scene.free(p, 92)
    scene.decode(d, 95)
    (row,) = same_in_any_order(scene)["requests"]
    assert ms(row)["registration.handshake"] == 50 + 20
    assert row["lead_ns"] == -13 * MS


def test_handshakes_with_ever_new_peers_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "MAX_LINKS", 10)
    monkeypatch.setattr(join, "MAX_NOTES", 10)
    scene = Scene()
    for index in range(50):
        scene.add("d0", index, ev.HANDSHAKE_WAITED, f"r{index}", f"peer-{index}")
        scene.add("d0", index + 1, ev.HANDSHAKE_FINISHED, "", f"peer-{index}", START_NS, 1, 1, 5)
    pipeline = Pipeline()
    scene.feed(pipeline)
    joiner = pipeline.joiner
    assert len(joiner._handshake_waits) == len(joiner._handshakes_finished) == len(joiner._offsets) == 10


# --- ways to join --------------------------------------------------------------------------------


def test_two_tries_under_one_client_id_go_with_whom_p_matched_them() -> None:
    """vLLM's push matches by the client's id, so that it may cross them: what it did is told."""
    scene = Scene("push")
    pairs = [(f"cmpl-r-0-{i:08x}", f"cmpl-r-0-{i + 8:08x}") for i in range(2)]
    for index, (p, d) in enumerate(pairs):
        scene.prefill(p, index)
        scene.register(d, index)
    for (p, _), (_, d) in zip(pairs, reversed(pairs), strict=True):
        scene.add("p0", 60, ev.PUSH_MATCHED, p, "d", d)
        scene.move("p0", p, 62, 70, "d")
        scene.add("d0", 71, ev.NOTIFICATION_RECEIVED, d, 1)
        scene.free(p, 72)
        scene.decode(d, 75)
    found = same_in_any_order(scene)["requests"]
    assert {(r["p_request"], r["d_request"]) for r in found} == {
        (pairs[0][0], pairs[1][1]),
        (pairs[1][0], pairs[0][1]),
    }
    assert {r["joined_by"] for r in found} == {"push match"}


def test_the_client_id_joins_what_nothing_else_does_and_is_marked() -> None:
    scene = Scene("push")
    scene.push()
    (row,) = same_in_any_order(scene, skip=[ev.PUSH_MATCHED])["requests"]
    assert row["joined_by"] == "client id"


def test_the_client_id_joins_no_legs_that_could_be_anothers() -> None:
    scene = Scene("push")
    for index in range(2):
        p, d = (f"cmpl-r-0-{index + offset:08x}" for offset in (0, 8))
        scene.prefill(p, index)
        scene.register(d, index)
        scene.free(p, 72)
        scene.decode(d, 75)
    found = same_in_any_order(scene)["requests"]
    assert [r["joined_by"] for r in found] == ["unjoined"] * 4


def test_the_client_id_joins_a_leg_that_still_generates() -> None:
    scene = Scene("push")
    p, d = ids("r")
    scene.prefill(p)
    scene.register(d, 0)
    scene.free(p, 72)
    scene.decode(d, 75, end=60_000)
    pipeline = Pipeline()
    scene.feed(pipeline, until=200, now_ns=S)
    assert not pipeline.take_rows(20 * S)["requests"]
    assert [r["joined_by"] for r in check_live(pipeline)] == ["client id"]
    scene.feed(pipeline, since=200, now_ns=60 * S)
    (row,) = named(pipeline.take_rows(61 * S))["requests"]
    assert (row["joined_by"], row["outcome"]) == ("client id", "finished")


def test_a_transfer_id_joins_all_samples_in_any_order() -> None:
    scene = Scene("push")
    scene.arrive("p", 1, "p-1", ev.FLAG_REMOTE_DECODE, transfer_id="t")
    for index in range(3):
        scene.arrive("d", 2 + index, f"d-{index}", ev.FLAG_REMOTE_PREFILL, "p", "", transfer_id="t")
    (row,) = same_in_any_order(scene)["requests"]
    assert (row["d_legs"], row["joined_by"]) == (3, "transfer id")


def test_the_strongest_way_to_join_is_named_whichever_was_read_first() -> None:
    scene = Scene("push")
    p, d = ids("r")
    scene.prefill(p, transfer_id="t")
    scene.admit(d, 60, p, transfer_id="t")
    scene.add("p0", 66, ev.PUSH_MATCHED, p, "d", d)
    (row,) = same_in_any_order(scene)["requests"]
    assert row["joined_by"] == "remote id"


def test_a_router_that_uses_params_again_makes_no_request_vanish() -> None:
    scene = Scene()
    p, d = scene.pull()
    pipeline = Pipeline()
    scene.feed(pipeline, now_ns=S)
    assert len(pipeline.take_rows(2 * S)["requests"]) == 1
    again = "cmpl-again-0-bbbbbbbb"
    scene.admit(again, 1000, p)
    scene.read(again, p, 1005)
    scene.decode(again, 1030)
    scene.feed(pipeline, since=900, now_ns=3 * S)
    (row,) = named(pipeline.take_rows(3 * S + UNJOINED_NS))["requests"]
    assert (row["d_request"], row["joined_by"], row["outcome"]) == (again, "unjoined", "finished")
    assert d


def test_an_id_used_again_names_another_request() -> None:
    """VLLM_DISABLE_REQUEST_ID_RANDOMIZATION: vLLM's ids are the client's, who may repeat them."""
    scene = Scene()
    for turn in range(3):
        scene.pull("r", 1000 * turn)
    pipeline = Pipeline()
    rows = []
    for turn in range(3):
        scene.feed(pipeline, since=1000 * turn, until=1000 * (turn + 1), now_ns=(turn + 1) * S)
        rows += named(pipeline.take_rows((turn + 1) * S + SETTLE_NS))["requests"]
    assert len({r["id"] for r in rows}) == 3
    assert [r["ttft_ns"] for r in rows] == [100 * MS] * 3


def test_an_id_used_again_while_the_first_is_in_memory_names_another_request() -> None:
    scene = Scene()
    scene.pull("r", 0)
    scene.pull("r", 1000)
    pipeline = Pipeline()
    scene.feed(pipeline, until=500, now_ns=S)
    scene.feed(pipeline, since=500, now_ns=S + 1)
    rows = named(pipeline.take_rows(0, final=True))["requests"]
    assert [r["ttft_ns"] for r in rows] == [100 * MS] * 2


def test_a_trace_shared_by_two_requests_is_kept_for_both() -> None:
    trace = f"00-{'ab' * 16}-{'cd' * 8}-01"
    scene = Scene()
    scene.pull("a", 0, trace=trace)
    scene.pull("b", 1000, trace=trace)
    pipeline = Pipeline()
    scene.feed(pipeline, until=1005, now_ns=S)
    rows = named(pipeline.take_rows(2 * S))["requests"]
    pipeline.take_rows(2 * S)
    scene.feed(pipeline, since=1005, now_ns=3 * S)
    rows += named(pipeline.take_rows(4 * S))["requests"]
    assert [r["trace_id"] for r in rows] == ["ab" * 16] * 2


# --- bidirectional -------------------------------------------------------------------------------


def second_turn(scene: Scene, earlier: str, name: str, t: float, outcome: str) -> tuple[str, str]:
    """A turn of which P is offered what D kept of an earlier one."""
    p, d = ids(name)
    flags = ev.FLAG_REMOTE_DECODE | ev.FLAG_REUSE_OFFERED
    if outcome == "metadata missing":
        flags |= ev.FLAG_REUSE_INCOMPLETE
    pulls = 0 if outcome in ("metadata missing", "below threshold", "local hit") else 100
    local = 128 if outcome == "local hit" else 16
    scene.arrive("p", t + 1, p, flags, "d", earlier, 128)
    scene.add("p", t + 2, ev.REQUEST_CONSIDERED, p, local, pulls, 1)
    if pulls:
        scene.add("p", t + 3, ev.BLOCKS_ALLOCATED, p, 8, pulls, 1)
        scene.add("p0", t + 4, ev.LOAD_STARTED, p, "d", earlier, 8)
        failed = outcome != "pulled"
        if outcome == "expired":
            scene.add("p0", t + 5, ev.READ_EXPIRED, p)
        else:
            scene.move("p0", p, t + 6, None if failed else t + 8, "d")
        scene.add("p0", t + 9, ev.LOAD_DONE, p, int(failed))
        scene.add("p", t + 10, ev.LOAD_REPORTED, p, int(failed))
    scene.add("p", t + 11, ev.REQUEST_SCHEDULED, p, 10, pulls, 1, 0, 0)
    scene.finish("p", t + 50, p, lease=1)
    scene.admit(d, t + 60, p)
    scene.read(d, p, t + 65)
    scene.free(p, t + 87)
    scene.decode(d, t + 90, lease=1)
    return p, d


@pytest.mark.parametrize(
    "outcome", ["pulled", "below threshold", "expired", "metadata missing", "local hit", "failed"]
)
def test_what_became_of_kept_blocks_is_told(outcome: str) -> None:
    scene = Scene("bidirectional")
    _, d = scene.pull("a")
    second_turn(scene, d, "b", 1000, outcome)
    first, second = sorted(same_in_any_order(scene)["requests"], key=lambda r: r["turn"])
    assert (second["reuse_outcome"], second["reuse_offered_tokens"]) == (outcome, 128)
    assert second["reuse_pulled_tokens"] == (100 if outcome == "pulled" else 0)
    assert (first["session"], first["turn"]) == (first["id"], 1)
    assert (second["session"], second["turn"]) == (first["id"], 2)
    assert (first["clamped_ns"], second["clamped_ns"]) == (0, 0)


def test_a_readback_that_fails_ends_the_turn_in_the_step_it_was_in() -> None:
    """Policy fail: as on D, vLLM finishes the request before its connector hears the report."""
    scene = Scene("bidirectional")
    p, _ = ids("b")
    scene.arrive("p", 1, p, ev.FLAG_REMOTE_DECODE | ev.FLAG_REUSE_OFFERED, "d", "earlier", 128)
    scene.add("p", 2, ev.REQUEST_CONSIDERED, p, 16, 100, 1)
    scene.add("p", 3, ev.BLOCKS_ALLOCATED, p, 8, 100, 1)
    scene.add("p0", 4, ev.LOAD_STARTED, p, "d", "earlier", 8)
    scene.add("p0", 5, ev.READ_EXPIRED, p)
    scene.add("p0", 9, ev.LOAD_DONE, p, 1)
    scene.finish("p", 10, p, "FINISHED_ERROR")
    scene.add("p", 10.1, ev.LOAD_REPORTED, p, 1)
    (row,) = same_in_any_order(scene)["requests"]
    assert (row["outcome"], row["reuse_outcome"]) == ("error", "expired")
    assert (row["current_step"], row["clamped_ns"]) == ("prefill.reuse_report", 0)


@pytest.mark.parametrize("at_once", [False, True])
def test_a_conversation_is_one_session_whether_its_turns_are_stored_already_or_not(at_once: bool) -> None:
    scene = Scene("bidirectional")
    _, d = scene.pull("t0")
    for turn in range(1, 5):
        _, d = second_turn(scene, d, f"t{turn}", 1000 * turn, "pulled")
    pipeline = Pipeline()
    rows = []
    for turn in range(5):
        scene.feed(pipeline, since=1000 * turn, until=1000 * (turn + 1), now_ns=(turn + 1) * S)
        if not at_once:
            rows += named(pipeline.take_rows((turn + 1) * S + SETTLE_NS))["requests"]
    rows += named(pipeline.take_rows(0, final=True))["requests"]
    rows.sort(key=lambda r: r["client_id"])
    assert [(r["turn"], r["session"]) for r in rows] == [(t + 1, rows[0]["id"]) for t in range(5)]


def test_turns_that_name_each_other_do_not_hang_the_collector() -> None:
    scene = Scene("bidirectional")
    flags = ev.FLAG_REMOTE_DECODE | ev.FLAG_REUSE_OFFERED
    names = [f"r{i}" for i in range(5)]
    for index, name in enumerate(names):
        p, d = ids(name)
        scene.arrive("p", index + 1, p, flags, "d", ids(names[index - 1])[1], 128)
        scene.admit(d, index + 10, p)
    assert len(scene.rows()["requests"]) == 5


def test_a_very_long_conversation_in_memory_is_chained() -> None:
    scene = Scene("bidirectional")
    _, d = scene.pull("t0000")
    for turn in range(1, 1100):
        _, d = second_turn(scene, d, f"t{turn:04}", 1000 * turn, "pulled")
    pipeline = Pipeline()
    for ring in scene.rings.values():
        reader = reader_of(ring)
        pipeline.add_ring(reader)
        pipeline.feed(reader, ring.events[::-1], 0)  # the last turn is the first to be told
    rows = named(pipeline.take_rows(0, final=True))["requests"]
    assert sorted(r["turn"] for r in rows) == list(range(1, 1101))


def test_a_restarted_collector_tells_the_same_and_nothing_twice() -> None:
    scene = Scene("bidirectional")
    _, d = scene.pull("a")
    second_turn(scene, d, "b", 1000, "pulled")
    once, again = scene.rows(), scene.rows()
    assert once == again
    stored = {(r["p_engine"], r["p_request"]) for r in once["requests"]}
    stored |= {(r["d_engine"], r["d_request"]) for r in once["requests"]}
    pipeline = Pipeline(lambda engine, request: (engine, request) in stored)
    # What the rings still hold when the beginning of both turns is overwritten.
    scene.feed(pipeline, skip=[ev.REQUEST_ARRIVED])
    assert not check_live(pipeline)
    assert not pipeline.take_rows(0, final=True)["requests"]
    assert pipeline.counters()["already_stored"]


# --- order, load, memory -------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["push", "pull", "bidirectional"])
@given(seed=st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_rows_do_not_hang_on_how_rings_are_interleaved(mode: str, seed: int) -> None:
    rng = random.Random(seed)
    simulation = Simulation(mode, seed)
    for index in range(3):
        truth = simulation.request(f"r{index}", START_NS + index * 10 * MS)
        if mode == "bidirectional":
            simulation.pull(f"s{index}", truth.end_ns, earlier=truth)

    def rows(interleaved: bool) -> list[tuple[Any, ...]]:
        pipeline = Pipeline()
        forget_rates(pipeline)
        left = []
        for ring in simulation.rings():
            reader = reader_of(ring)
            pipeline.add_ring(reader)
            left.append((reader, list(ring.events)))
        while left:
            index = rng.randrange(len(left)) if interleaved else 0
            reader, events = left[index]
            count = rng.randint(1, 9) if interleaved else len(events)
            pipeline.feed(reader, events[:count], 0)
            del events[:count]
            if interleaved:
                check_live(pipeline)
            if not events:
                left.pop(index)
        found = pipeline.take_rows(0, final=True)
        named(found)
        return sorted(found["requests"])

    # The waterfall's dictionaries don't sort; ids differ, so that they are never compared.
    assert rows(True) == rows(False)


def test_looking_at_live_requests_changes_no_row() -> None:
    scene = Scene()
    scene.pull()
    looked = Pipeline()
    for t in range(0, 300, 7):
        scene.feed(looked, since=t, until=t + 7)
        check_live(looked)
    unlooked = Pipeline()
    scene.feed(unlooked)
    assert looked.take_rows(0, final=True) == unlooked.take_rows(0, final=True)


def test_a_backlog_of_unjoined_requests_is_worked_off_in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of requests beside a P that named none of them, read at once."""
    scene = Scene("push")
    for index in range(2500):
        scene.arrive("d", index, f"cmpl-d{index}-0-bbbbbbbb", ev.FLAG_REMOTE_PREFILL, "p", "placeholder")
        scene.finish("d", index + 1, f"cmpl-d{index}-0-bbbbbbbb")
        scene.prefill(f"cmpl-p{index}-0-bbbbbbbb", index)
        scene.free(f"cmpl-p{index}-0-bbbbbbbb", index + 60)
    pipeline = Pipeline()
    scene.feed(pipeline, now_ns=S)
    calls = []
    real = join.client_id

    def counted(name: str) -> str:
        calls.append(name)
        return real(name)

    monkeypatch.setattr(join, "client_id", counted)
    assert len(pipeline.take_rows(100 * S)["requests"]) == 5000
    assert len(calls) <= 3 * 5000, "no request looks at all others"


def test_more_requests_than_fit_in_memory_are_stored_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "MAX_LIVE", 10)
    scene = Scene()
    for index in range(30):
        scene.prefill(ids(f"r{index:02}")[0], index, finish=False)
    pipeline = Pipeline()
    scene.feed(pipeline, now_ns=S)
    rows = named(pipeline.take_rows(S))["requests"]
    assert [r["client_id"] for r in rows] == [f"r{i:02}" for i in range(20)]
    assert {r["outcome"] for r in rows} == {"incomplete"}
    assert len(pipeline.joiner.live()) == 10
    scene.finish("p", 100, ids("r00")[0])
    scene.feed(pipeline, since=99, now_ns=2 * S)
    assert pipeline.counters()["stragglers"] == 1


@pytest.mark.parametrize("mode", ["push", "pull", "bidirectional"])
def test_memory_does_not_grow_with_the_requests_seen(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "MAX_REMEMBERED", 100)
    simulation = Simulation(mode, 1)
    pipeline = Pipeline()
    readers = [(ring, reader_of(ring)) for ring in simulation.rings()]
    for _, reader in readers:
        pipeline.add_ring(reader)
    sizes = []
    now_ns = 0
    truth: Truth | None = None
    for index in range(600):
        now_ns += S
        # Every tenth never ends, and is quiet for ever.
        name, at = f"r{index}", START_NS + index * S
        if truth is not None and mode == "bidirectional" and index % 2:
            truth = simulation.pull(name, at, truth)
        else:
            truth = simulation.request(name, at)
        for ring, reader in readers:
            reader.texts = dict(ring.texts)
            events = ring.events[: len(ring.events) // 2] if index % 10 == 0 else ring.events
            pipeline.feed(reader, list(events), now_ns)
            ring.events.clear()
            ring.texts.clear()
        pipeline.take_rows(now_ns)
        if index in (299, 599):
            now_ns += LONG_QUIET_NS
            pipeline.take_rows(now_ns)
            now_ns += 2 * S
            pipeline.take_rows(now_ns)
            sizes.append({n: len(v) for n, v in vars(pipeline.joiner).items() if hasattr(v, "__len__")})
    before, after = sizes
    assert after["_live"] == after["_legs"] == 0
    held = {n for n in after if after[n] > before[n] + 40}
    # Blocks that D keeps for a next turn, until their lease is over; texts of what came after the row.
    assert held <= ({"_leases", "_kept", "texts"} if mode == "bidirectional" else set())


def test_of_a_stored_request_nothing_is_left_but_that_it_was() -> None:
    scene = Scene("push")
    p, d = ids("r")
    scene.prefill(p, transfer_id="t")
    scene.admit(d, 60, "placeholder", transfer_id="t")
    scene.add("d0", 61, ev.LOAD_STARTED, d, "p", "placeholder", 10)
    scene.arrive("d", 62, "alone", ev.FLAG_REMOTE_PREFILL, "p", "unheard of", transfer_id="u")
    pipeline = Pipeline()
    scene.feed(pipeline, ["p", "d0", "d", "p0"])
    pipeline.take_rows(0, final=True)
    pipeline.take_rows(0, final=True)
    left = {name for name, value in vars(pipeline.joiner).items() if hasattr(value, "__len__") and value}
    assert left == {"_handlers", "_engines", "sources", "texts", "_remembered"}
    assert p not in pipeline.joiner.texts.values()


def test_a_lease_that_outlives_its_stored_request_is_no_straggler() -> None:
    scene = Scene("bidirectional")
    _, d = scene.pull()
    scene.add("d0", 200, ev.LEASE_ARMED, d, scene.moment("d0", 480_000))
    pipeline = Pipeline()
    scene.feed(pipeline, now_ns=S)
    (row,) = named(pipeline.take_rows(2 * S))["requests"]
    # Read anew, as by a daemon that was slow to take up this ring.
    scene.feed(pipeline, ["d0"], since=200, now_ns=3 * S)
    scene.add("d0", 480_000, ev.LEASE_EXPIRED, d, 0)
    scene.feed(pipeline, ["d0"], since=400_000, now_ns=4 * S)
    (lease,) = (x for x in named(pipeline.take_rows(5 * S))["leases"] if x["engine"] == "d")
    assert (lease["request_id"], lease["end"]) == (row["id"], "expired")
    assert pipeline.counters()["stragglers"] == 0


def test_events_that_come_again_after_their_request_was_stored_make_no_second_one() -> None:
    scene = Scene(d_shift_ns=-5 * S)
    scene.pull()
    pipeline = Pipeline()
    scene.feed(pipeline, now_ns=S)
    assert len(pipeline.take_rows(2 * S)["requests"]) == 1
    scene.feed(pipeline, now_ns=3 * S)
    assert not check_live(pipeline)
    assert pipeline.counters()["stragglers"]


def test_an_id_used_again_on_a_host_whose_clock_is_behind_names_another_request() -> None:
    """P's clock is an hour ahead of D's: what P told of D's leg says nothing of D's time."""
    scene = Scene("push", d_shift_ns=-3600 * S)
    scene.push("r", 0)
    scene.push("r", 1000)
    pipeline = Pipeline()
    rows = []
    for turn in range(2):
        scene.feed(
            pipeline, ["p", "d", "p0", "d0"], since=1000 * turn, until=1000 * (turn + 1), now_ns=turn * S
        )
        rows += named(pipeline.take_rows(turn * S + SETTLE_NS))["requests"]
    assert [r["joined_by"] for r in rows] == ["push match"] * 2


def test_statuses_are_understood_when_texts_had_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "MAX_TEXTS", 5)
    scene = Scene()
    scene.pull()
    pipeline = Pipeline()
    scene.feed(pipeline, until=55, now_ns=1)
    pipeline.take_rows(2)
    readers = scene.feed(pipeline, since=55, now_ns=3)
    assert readers
    pipeline.take_rows(4)
    (row,) = named(pipeline.take_rows(0, final=True))["requests"]
    assert (row["outcome"], row["client_id"]) == ("finished", "r")


# --- hostile rings -------------------------------------------------------------------------------

TEXTS = ("p", "d", "r0", "r1", "r2", "FINISHED_STOPPED", "FINISHED_ERROR", "nobody")
EXTREMES = (0, 1, -1, 2**63 - 1, -(2**63), 2**62, -(2**62), 2**60, 2**60 - 1, 10**15, 10**18, 2**32, 2**16)


def any_number(rng: random.Random) -> int:
    """A number as a damaged or hostile ring may hold it."""
    choices = (
        lambda: rng.choice(EXTREMES),
        lambda: rng.randrange(-(2**63), 2**63),
        lambda: START_NS + rng.randrange(100 * MS),
        lambda: text_key(rng.choice(TEXTS)),
        lambda: rng.randrange(32),
    )
    return rng.choice(choices)()


def hostile_events(rng: random.Random) -> list[Event]:
    found = []
    for seq in range(rng.randint(1, 60)):
        args = tuple(any_number(rng) for _ in range(ev.MAX_FIELDS))
        t_ns = START_NS + rng.randrange(100 * MS) if rng.random() < 0.8 else any_number(rng)
        key = rng.choice([*map(text_key, TEXTS[2:5]), text_key("unheard of"), 0, -5])
        found.append(Event(seq + 1, rng.choice([*ev.VOCABULARY, 999]), t_ns, key, args))
    return found


@given(seed=st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_nothing_in_a_ring_makes_the_pipeline_raise_or_a_row_that_does_not_fit(seed: int) -> None:
    rng = random.Random(seed)
    pipeline = Pipeline()
    readers = []
    for index in range(4):
        engine, source = "pd"[index // 2], (ev.SCHEDULER, ev.WORKER)[index % 2]
        about = About(engine, source, rng.choice((0, 1, 2**20)), boot_id=f"boot-{engine}")
        reader: Any = SimpleNamespace(
            ring_id=uuid.UUID(int=index),
            about=about,
            wall_ns=rng.choice((WALL_NS, 0, 2**64 - 1)),
            mono_ns=rng.choice((START_NS, 0, 2**64 - 1)),
            texts={text_key(t): t for t in TEXTS[2:7]},
        )
        readers.append(reader)
        pipeline.add_ring(reader)
        pipeline.feed(reader, hostile_events(rng), 1)
        check_live(pipeline)
        named(pipeline.take_rows(2))
    pipeline.ring_gone(readers[0], 3)
    named(pipeline.take_rows(3 + QUIET_NS))
    pipeline.ring_forgotten(readers[0])
    named(pipeline.take_rows(0, final=True))
    assert pipeline.counters()["untold"] == 0


@pytest.mark.parametrize("mode", ["push", "pull"])
@given(seed=st.integers(0, 2**32), shift_ns=st.sampled_from([0, 5 * S]))
@settings(max_examples=150, deadline=None)
def test_one_wrong_number_in_a_good_request_breaks_nothing(mode: str, seed: int, shift_ns: int) -> None:
    rng = random.Random(seed)
    scene = Scene(mode, d_shift_ns=shift_ns)
    scene.push() if mode == "push" else scene.pull()
    events = rng.choice(list(scene.rings.values())).events
    at = rng.randrange(len(events))
    event, number = events[at], any_number(rng)
    field = rng.randint(-1, len(ev.VOCABULARY[event.kind].fields) - 1)
    if field < 0:
        events[at] = event._replace(t_ns=number)
    else:
        events[at] = event._replace(args=(*event.args[:field], number, *event.args[field + 1 :]))
    pipeline = Pipeline()
    for name in scene.rings:
        reader = reader_of(scene.rings[name])
        pipeline.add_ring(reader)
        pipeline.feed(reader, scene.rings[name].events, 0)
    check_live(pipeline)
    named(pipeline.take_rows(0, final=True))
    assert pipeline.counters()["untold"] == 0


def test_a_transfer_without_telemetry_has_no_bytes_instead_of_minus_one() -> None:
    scene = Scene()
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.add("d0", 65, ev.LOAD_STARTED, d, "p", p, 10)
    scene.add("d0", 67, ev.TRANSFER_POSTED, d, 1, 0, scene.moment("d0", 66), 0, "p")
    polls = scene.moment("d0", 70), scene.moment("d0", 80)
    scene.add("d0", 80, ev.TRANSFER_DONE, d, 1, *polls, *[ev.UNKNOWN] * 5)
    scene.free(p, 82)
    scene.decode(d, 90)
    rows = scene.rows()
    assert rows["requests"][0]["transfer_bytes"] is None
    (transfer,) = rows["transfers"]
    assert (transfer["bytes"], transfer["telemetry_xfer_us"], transfer["state"]) == (None, None, "done")
    assert ms(rows["requests"][0])["transfer.wire"] == 3


def test_a_flood_of_parts_of_one_request_is_bounded() -> None:
    joiner = join.Joiner()
    source = joiner.add_ring(b"r" * 16, About("engine", ev.SCHEDULER), 0, 0)
    kinds = (ev.REQUEST_SCHEDULED, ev.REQUEST_PREEMPTED, ev.TRANSFER_POSTED)
    flood = [Event(n, kind, n, 7, (n, *[0] * 10)) for n in range(1, 2 * join.MAX_PARTS) for kind in kinds]
    joiner.feed(source, flood, {}, 0)
    (request,) = joiner.live()
    (leg,) = request.legs()
    parts = (len(leg.scheduled_ns), len(leg.preempted_ns), len(list(leg.transfers())))
    assert parts == (join.MAX_PARTS,) * 3


def test_a_transfer_that_no_request_is_known_of_makes_none() -> None:
    scene = Scene()
    scene.add("d0", 67, ev.TRANSFER_POSTED, "", 1, 0, scene.moment("d0", 66), 0, "p")
    assert not scene.rows()["requests"]


def test_an_arrival_that_the_wall_clock_contradicts_leaves_no_frontend_time() -> None:
    scene = Scene()
    p, _ = ids("r")
    scene.prefill(p, finish=False)
    ring = scene.rings["p"]
    ring.events[0] = ring.events[0]._replace(args=(2**61, *ring.events[0].args[1:]))
    row = scene.row()
    assert row["prefill_frontend_ns"] is None
    assert row["prefill_queue_ns"] == MS
    assert row["clamped_ns"] == 0


# --- two hosts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["push", "pull"])
@pytest.mark.parametrize("shift_ns", [5 * S, -5 * S + 1])
def test_what_was_sent_and_received_narrows_the_error_between_two_hosts(mode: str, shift_ns: int) -> None:
    """GIVEN two hosts of which only the wall clocks and one request are known."""
    scene = Scene(mode, d_shift_ns=shift_ns)
    scene.push() if mode == "push" else scene.pull()
    (row,) = same_in_any_order(scene)["requests"]
    # Push: from 10 to 12 and from 70 to 71; pull: from 50 to 60 and from 85 to 86.
    assert row["clock_error_ns"] == (3 * MS if mode == "push" else 11 * MS) // 2
    assert row["clamped_ns"] == 0
    assert abs(row["ttft_ns"] - (85 if mode == "push" else 100) * MS) <= row["clock_error_ns"]


def test_a_handshake_read_before_the_peer_is_known_still_tells_of_its_clock() -> None:
    for handshake_first in (True, False):
        scene = Scene(d_shift_ns=5 * S)
        scene.pull()
        args = scene.moment("d0", 10), 1, 1, -5 * S
        scene.add("d0", 10.2, ev.HANDSHAKE_FINISHED, "", "p", *args)
        order = ["d", "d0", "p", "p0"] if handshake_first else ["p", "p0", "d", "d0"]
        row = scene.row(order)
        assert row["clock_error_ns"] == MS // 5
        assert row["ttft_ns"] == 100 * MS


def test_only_steps_between_two_clocks_carry_their_error() -> None:
    scene = Scene("push", d_shift_ns=5 * S)
    scene.push()
    row = scene.row()
    crossing = {STEPS[i["step"]].name for i in row["waterfall"] if i["error_ns"]}
    assert crossing == {"registration.route", "registration.notify", "readiness.signal"}
    signal = next(i for i in row["waterfall"] if STEPS[i["step"]].name == "readiness.signal")
    assert signal["ns"] <= signal["error_ns"], "a step shorter than its error can be told"


@pytest.mark.parametrize("p_ranks", [1, 2, 4])
@pytest.mark.parametrize("mode", ["push", "pull"])
def test_engines_of_unlike_sizes_never_contradict_the_true_offset(mode: str, p_ranks: int) -> None:
    """Which rank wrote to which is not told: the wrong two would bound the offset wrongly."""
    scene = Scene(mode, p_ranks=p_ranks, d_ranks=2, d_shift_ns=5 * S)
    p, d = ids("r")
    scene.prefill(p)
    if mode == "push":
        scene.register(d, 0)
        for rank in range(p_ranks):
            done = 60 + 20 * rank
            scene.add(f"p{rank}", 55, ev.PUSH_MATCHED, p, "d", d)
            scene.move(f"p{rank}", p, 57, done, "d")
            scene.add(f"d{rank * 2 // p_ranks}", done + 1, ev.NOTIFICATION_RECEIVED, d, 1)
            if p_ranks == 1:
                scene.add("d1", done + 1, ev.NOTIFICATION_RECEIVED, d, 1)
    else:
        scene.admit(d, 60, p)
        scene.read(d, p, 65, done=80, rank="d0")
        scene.read(d, p, 66, done=10, rank="d1")
    pipeline = Pipeline()
    scene.feed(pipeline)
    (row,) = named(pipeline.take_rows(0, final=True))["requests"]
    offset = pipeline.joiner.clocks.offset("boot-d", "boot")
    assert abs(offset.ns + 5 * S) <= offset.error_ns == row["clock_error_ns"] < 100 * MS


def test_with_n_samples_what_p_was_told_of_one_says_nothing_of_anothers_clock() -> None:
    scene = Scene(d_shift_ns=5 * S)
    p, _ = ids("r")
    scene.prefill(p)
    for d, done, first in (("0_cmpl-r-0-00000000", 14, 40), ("1_cmpl-r-0-00000001", 24, 20)):
        scene.admit(d, 60, p)
        scene.read(d, p, 66, done=done)
        scene.decode(d, 92, first=first)
    pipeline = Pipeline()
    # P's worker is read as far as the first notification, D's rings whole.
    scene.feed(pipeline, ["p", "d", "d0"])
    scene.feed(pipeline, ["p0"], until=85)
    check_live(pipeline)
    offset = pipeline.joiner.clocks.offset("boot-d", "boot")
    assert abs(offset.ns + 5 * S) <= offset.error_ns


def test_a_pull_that_the_clocks_put_before_its_prefill_starts_with_its_prefill() -> None:
    scene = Scene(d_shift_ns=5 * S)
    scene.pull()
    pipeline = Pipeline()
    for name, ring in scene.rings.items():
        reader = reader_of(ring)
        # D's wall clock is a whole second ahead of what it says: D's leg seems to come first.
        reader.wall_ns -= 900 * MS * name.startswith("d")
        pipeline.add_ring(reader)
        events = [e for e in ring.events if e.kind not in (ev.NOTIFICATION_RECEIVED, ev.REQUEST_FINISHED)]
        pipeline.feed(reader, events, 0)
    (row,) = named(pipeline.take_rows(0, final=True))["requests"]
    assert row["prefill_frontend_ns"] in (None, 0, MS)
    assert row["clock_error_ns"] > 0
    assert row["clamped_ns"] > 0


# --- losses --------------------------------------------------------------------------------------


def scene_ranks() -> Scene:
    scene = Scene(p_ranks=2, d_ranks=2)
    scene.pull()
    return scene


def scene_push_ranks() -> Scene:
    scene = Scene("push", p_ranks=2, d_ranks=2)
    scene.push()
    return scene


def scene_preempted() -> Scene:
    scene = Scene()
    preempted_prefill(scene)
    d = ids("r")[1]
    scene.add("d", 95, ev.REQUEST_PREEMPTED, d)
    scene.add("d", 98, ev.REQUEST_SCHEDULED, d, 11, 0, 1, 1, 0)
    return scene


def scene_samples() -> Scene:
    scene = Scene()
    siblings(scene)
    return scene


def scene_turns() -> Scene:
    scene = Scene("bidirectional")
    _, d = scene.pull("a")
    second_turn(scene, d, "b", 1000, "pulled")
    return scene


def scene_handshake() -> Scene:
    scene = Scene()
    p, d = ids("r")
    scene.prefill(p)
    scene.admit(d, 60, p)
    scene.add("d0", 65, ev.LOAD_STARTED, d, "p", p, 10)
    scene.add("d0", 66, ev.HANDSHAKE_WAITED, d, "p")
    scene.add("d0", 90, ev.HANDSHAKE_FINISHED, "", "p", scene.moment("d0", 70), 1, 0, 0)
    scene.add("d0", 93, ev.LOAD_STARTED, d, "p", p, 10)
    scene.move("d0", d, 95, 100, "p", poll=97)
    scene.add("d0", 101, ev.LOAD_DONE, d, 0)
    scene.free(p, 102)
    scene.decode(d, 103)
    return scene


def scene_failed() -> Scene:
    scene = Scene()
    d = failed_load(scene)
    scene.add("d", 85, ev.LOAD_REPORTED, d, 1)
    scene.add("d", 87, ev.REQUEST_SCHEDULED, d, 11, 0, 1, 0, 0)
    scene.add("d", 140, ev.FIRST_TOKEN, d, 1)
    scene.finish("d", 200, d)
    return scene


SCENES = (
    scene_ranks,
    scene_push_ranks,
    scene_preempted,
    scene_samples,
    scene_turns,
    scene_handshake,
    scene_failed,
)


@pytest.mark.parametrize("make", SCENES, ids=lambda make: make.__name__[6:])
def test_without_any_one_event_no_boundary_is_moved_and_nothing_known_is_lost(make: Any) -> None:
    """GIVEN any one event is lost THEN steps are the true ones or unknown, never others."""
    whole = {r["client_id"]: r for r in make().rows(learn=False)["requests"]}
    for name, ring in make().rings.items():
        for at, event in enumerate(ring.events):
            what = f"without {name}'s {ev.VOCABULARY[event.kind].name} at {(event.t_ns - START_NS) / MS}"
            scene = make()
            del scene.rings[name].events[at]
            found = [r for r in scene.rows(learn=False)["requests"] if r["ttft_ns"] is not None]
            for row in found:
                assert row["clamped_ns"] == 0, what
                true = ms(whole[row["client_id"]])
                if row["ttft_ns"] != whole[row["client_id"]]["ttft_ns"]:
                    continue  # its beginning or end hung on this event
                kept = ms(row)
                grown = {n for n, t in kept.items() if n != "unknown" and t > true.get(n, 0) + 1e-9}
                assert not grown, f"{what}: {grown}"
            if event.kind not in (ev.FIRST_TOKEN, ev.REQUEST_ARRIVED):
                assert {r["client_id"] for r in found} == set(whole), what
