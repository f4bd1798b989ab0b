"""The ring directory with files in it that are foreign, damaged, lapped, gone or not there yet."""

from __future__ import annotations

import os
import shutil
import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope import events, ring
from kvscope.collectors.daemon import Collector
from kvscope.collectors.rings import Rings
from kvscope.collectors.store import Store
from kvscope.demo.simulate import Fleet
from kvscope.ring import About, RingWriter

from .collecting import ask, query, until

ABOUT = About("engine", events.SCHEDULER)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "rings"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "s.duckdb")
    yield store
    store.close()


def record(writer: RingWriter, count: int) -> None:
    for _ in range(count):
        writer.record(events.ENGINE_SAMPLE, 0, 1, 2, 3, 4)


def read_all(rings: Rings) -> int:
    rings.scan()
    total = 0
    while moved := sum(len(found) for _, found in rings.poll()):
        total += moved
    return total


def other_version(path: Path) -> None:
    data = bytearray(path.read_bytes())
    struct.pack_into("<H", data, len(ring.MAGIC), events.VERSION + 1)
    path.write_bytes(data)


def damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.write_bytes(data)


def foreign(path: Path) -> None:
    path.write_bytes(os.urandom(100_000))


def empty(path: Path) -> None:
    path.write_bytes(b"")


def shorter(path: Path) -> None:
    os.truncate(path, 20_000)


def a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_link_to_nothing(path: Path) -> None:
    path.unlink()
    path.symlink_to("/nonexistent")


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (other_version, rf"ring version {events.VERSION + 1}, this kvscope reads {events.VERSION}"),
        (damaged, "damaged"),
        (foreign, "not a kvscope ring"),
        (empty, "not a kvscope ring"),
        (shorter, "shorter"),
        (a_directory, ""),
        (a_pipe, ""),
        (a_link_to_nothing, ""),
    ],
)
def test_file_that_is_no_ring_is_reported_once_and_left_alone(
    directory: Path, store: Store, caplog: pytest.LogCaptureFixture, spoil: object, reason: str
) -> None:
    writers = [RingWriter(directory, ABOUT, 64) for _ in "ab"]
    for writer in writers:
        record(writer, 10)
    path = writers[0].path
    writers[0].close()
    assert callable(spoil)
    spoil(path)
    rings = Rings(directory, store)
    assert read_all(rings) == 10, "the others are read"
    rings.scan()
    assert list(rings.refused) == [path]
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert lines == [rings.refused[path]]
    assert str(path) in lines[0]
    assert reason in lines[0]
    assert "\n" not in lines[0]
    assert os.path.lexists(path)
    if not path.is_dir():
        path.unlink()
        rings.scan()
        assert not rings.refused


def test_copy_of_a_ring_is_not_read_twice(directory: Path, store: Store) -> None:
    writer = RingWriter(directory, ABOUT, 64)
    record(writer, 10)
    rings = Rings(directory, store)
    rings.scan()
    shutil.copy(writer.path, directory / "copy.ring")
    assert read_all(rings) == 10
    assert "a copy of" in rings.refused[directory / "copy.ring"]


def test_lapped_ring_is_counted_exactly_and_once_over_restarts(directory: Path, tmp_path: Path) -> None:
    writer = RingWriter(directory, ABOUT, 64)
    record(writer, 100)  # 36 overwritten before anybody read

    def run(then: int, expect_read: int, expect_lost: int) -> None:
        store = Store(tmp_path / "lapped.duckdb")
        collector = Collector(Rings(directory, store), store)
        collector.step()
        record(writer, then)
        collector.finish()
        assert store.close()
        (tail,) = collector.rings.tails.values()
        assert (tail.read, tail.lost) == (expect_read, expect_lost)

    run(20, 84, 36)
    run(0, 84, 36)  # 64 read again: counted before
    record(writer, 30)
    run(10, 124, 36)
    record(writer, 200)  # 136 of these are overwritten
    run(0, 188, 172)


def test_torn_slot_of_a_dead_ring_is_lost_and_the_rest_is_read(directory: Path, store: Store) -> None:
    writer = RingWriter(directory, ABOUT, 64)
    record(writer, 30)
    writer.close()
    with writer.path.open("r+b") as file:
        file.seek(ring.HEADER_BYTES + 10 * ring.SLOT_BYTES + 30)
        file.write(b"\xff\xff")
    rings = Rings(directory, store)
    assert read_all(rings) == 29
    (tail,) = rings.tails.values()
    assert (tail.read, tail.lost, tail.torn) == (29, 1, 1)


def test_unknown_events_are_counted_as_rejected(directory: Path, store: Store) -> None:
    writer = RingWriter(directory, ABOUT, 64)
    for kind in (65000, 999, events.FIRST_TOKEN):
        writer.record(kind, 2**63 - 1, *[-(2**63)] * 11)
    rings = Rings(directory, store)
    assert read_all(rings) == 3
    assert [tail.rejected for tail in rings.tails.values()] == [2]


def test_hostile_events_do_not_end_the_collector(directory: Path, store: Store) -> None:
    writers = [RingWriter(directory, About("e", role), 4096) for role in (events.SCHEDULER, events.WORKER)]
    extremes = (0, -1, 1, 2**63 - 1, -(2**63))
    for writer in writers:
        for kind in events.VOCABULARY:
            for value in extremes:
                writer.record(kind, value & (2**63 - 1), *[value] * 11)
    fleet = Fleet(directory, "push", 4096)
    fleet.request()
    collector = Collector(Rings(directory, store), store)
    ticket = collector.finish(everything=True)
    assert store.wait_committed(ticket, 30)
    assert ask(store, "SELECT outcome FROM requests WHERE label = 'simulated'") == [("finished",)]


def test_ring_cut_short_while_it_is_read_is_reported_and_left_alone(
    directory: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    writer = RingWriter(directory, ABOUT, 1024)
    record(writer, 10)
    collector = Collector(Rings(directory, store), store)
    collector.step()
    os.truncate(writer.path, ring.HEADER_BYTES)
    again(collector, lambda: not collector.rings.tails)
    assert writer.path.exists()
    assert "cut short" in collector.rings.refused[writer.path]
    assert len([r for r in caplog.records if "cut short" in r.getMessage()]) == 1
    assert until(lambda: ask(store, "SELECT state, read FROM engines")) == [("stopped", 10)]


def test_directory_that_appears_later(
    directory: Path, store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    rings = Rings(directory, store)
    for _ in range(3):
        assert rings.scan() == []
    assert "waiting for engines" in rings.problem
    assert [r.getMessage() for r in caplog.records] == [rings.problem]
    writer = RingWriter(directory, ABOUT, 64)
    record(writer, 5)
    assert read_all(rings) == 5
    assert not rings.problem


def test_dead_ring_is_deleted_only_when_what_it_told_is_on_disk(
    directory: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet(directory, "push", 4096)
    client = fleet.request()
    fleet.close()
    committed = store.committed
    monkeypatch.setattr(store, "committed", lambda: 0)
    collector = Collector(Rings(directory, store), store)
    again(collector, lambda: committed() > 1 and ask(store, "SELECT client_id FROM requests") == [(client,)])
    for _ in range(5):
        collector._next_scan = 0.0
        collector.step()
    assert len(list(directory.iterdir())) == 4
    monkeypatch.undo()
    again(collector, lambda: not list(directory.iterdir()))
    assert ask(store, "SELECT outcome FROM requests") == [("finished",)]
    assert {state for (state,) in ask(store, "SELECT state FROM engines")} == {"ended"}


def test_dead_ring_stays_while_a_request_of_it_is_open_elsewhere(directory: Path, store: Store) -> None:
    fleet = Fleet(directory, "push", 4096)
    fleet.request()
    fleet.p.close()
    p_paths = {fleet.p.scheduler.path, fleet.p.worker.path}
    # D has not told of the end of the request.
    seq = fleet.d.scheduler._last_seq
    with fleet.d.scheduler.path.open("r+b") as file:
        file.seek(ring.HEADER_BYTES + seq * ring.SLOT_BYTES)
        file.write(bytes(ring.SLOT_BYTES))
    collector = Collector(Rings(directory, store), store)
    for _ in range(5):
        collector._next_scan = 0.0
        collector.step()
        assert store.wait_committed(store.put({}), 10)
    assert all(tail.drained for tail in collector.rings.tails.values() if tail.reader.path in p_paths)
    assert all(path.exists() for path in p_paths)


def test_recorder_that_stopped_says_why(directory: Path, store: Store) -> None:
    writer = RingWriter(directory, ABOUT, 64)
    writer.stop("disk on fire")
    collector = Collector(Rings(directory, store), store)
    ticket = collector.finish()
    assert store.wait_committed(ticket, 10)
    assert ask(store, "SELECT state, state_detail FROM engines") == [("stopped", "disk on fire")]
    assert ask(store, "SELECT kind, detail, engine FROM failures") == [("recorder", "disk on fire", "engine")]
    collector.finish()
    assert store.close()
    again = Store(store.path)
    Collector(Rings(directory, again), again).finish()
    assert again.close()
    assert query(store.path, "SELECT count(*) FROM failures") == [(1,)]


class Clock:
    """Unix time, for `collectors.rings`; it can be set forward."""

    def __init__(self) -> None:
        self.forward_ns = 0

    def time_ns(self) -> int:
        return time.time_ns() + self.forward_ns


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("kvscope.collectors.rings.time", clock)
    return clock


def engine(directory: Path, name: str = "e") -> list[RingWriter]:
    """Rings of an engine's scheduler and of its worker."""
    return [RingWriter(directory, About(name, source), 64) for source in (events.SCHEDULER, events.WORKER)]


def arrive(writer: RingWriter, request: str) -> None:
    writer.record(events.REQUEST_ARRIVED, writer.text(request), 1, events.FLAG_REMOTE_DECODE, 100)


def step(collector: Collector) -> None:
    """One step with a scan, and all of it on disk."""
    collector._next_scan = 0.0
    collector.step()
    assert collector.store.wait_committed(collector.store.put({}), 10)


def states(collector: Collector) -> list[tuple[str, str, str | None]]:
    return sorted((one["source"], one["state"], one["state_detail"]) for one in collector.rings.told())


@pytest.mark.parametrize("said", [False, True])
def test_an_engine_that_goes_with_nothing_in_flight_has_ended(
    directory: Path, store: Store, said: bool
) -> None:
    writers, collector = engine(directory), Collector(Rings(directory, store), store)
    for writer in writers:
        if said:
            writer.record(events.ENGINE_STOPPED, 0)
        writer.close()
    again(collector, lambda: not list(directory.iterdir()))
    assert states(collector) == [("scheduler", "ended", None), ("worker", "ended", None)]


@pytest.mark.parametrize("said", [False, True])
def test_an_engine_that_takes_requests_with_it_is_gone_whatever_it_says(
    directory: Path, store: Store, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscope.join.LOST_QUIET_NS", 0)
    writers, collector = engine(directory), Collector(Rings(directory, store), store)
    for name in ("cmpl-a-0-12345678", "cmpl-b-0-12345678"):
        arrive(writers[0], name)
    step(collector)
    assert states(collector) == [("scheduler", "recording", None), ("worker", "recording", None)]
    for writer in writers:
        if said:
            writer.record(events.ENGINE_STOPPED, 0)
        writer.close()
    again(collector, lambda: not list(directory.iterdir()))
    told = [("scheduler", "gone", "2 requests in flight"), ("worker", "ended", None)]
    assert states(collector) == told
    assert sorted(ask(store, "SELECT source, state, state_detail FROM engines")) == told
    assert ask(store, "SELECT DISTINCT outcome FROM requests") == [("lost",)]


@pytest.mark.parametrize("seconds", [0, 3])
def test_a_worker_that_goes_on_and_shuts_down_tells_that_its_engine_died(
    directory: Path, store: Store, clock: Clock, seconds: int
) -> None:
    (scheduler, worker), collector = engine(directory), Collector(Rings(directory, store), store)
    step(collector)
    scheduler.close()
    for _ in range(3):
        step(collector)
    assert ("scheduler", "ended", None) in states(collector)
    worker.record(events.ENGINE_STOPPED, 0)
    clock.forward_ns += seconds * 1_000_000_000
    worker.close()
    again(collector, lambda: not list(directory.iterdir()))
    # vLLM takes as long as a second to end all processes of an engine that is stopped.
    died = ("scheduler", "gone", "its workers outlived it") if seconds == 3 else ("scheduler", "ended", None)
    assert states(collector) == [died, ("worker", "ended", None)]


def test_rings_that_are_let_go_are_told_of_for_ten_minutes(
    directory: Path, store: Store, clock: Clock
) -> None:
    collector = Collector(Rings(directory, store), store)
    for writer in engine(directory):
        record(writer, 3)
        writer.close()
    again(collector, lambda: not list(directory.iterdir()))
    (scheduler, worker) = collector.rings.told()
    assert (scheduler["engine"], scheduler["read"]) == ("e", 3)
    assert scheduler["started_at_ns"] < scheduler["gone_at_ns"] < time.time_ns()
    clock.forward_ns += 500_000_000_000
    assert collector.rings.told() == [scheduler, worker]
    clock.forward_ns += 100_000_000_000
    assert collector.rings.told() == []


def test_an_engine_that_is_back_under_its_id_is_told_of_once(directory: Path, store: Store) -> None:
    collector = Collector(Rings(directory, store), store)
    for writer in engine(directory) + engine(directory, "other"):
        writer.close()
    again(collector, lambda: not list(directory.iterdir()))
    engine(directory)
    step(collector)
    assert sorted((ring["engine"], ring["state"]) for ring in collector.rings.told()) == [
        ("e", "recording"), ("e", "recording"), ("other", "ended"), ("other", "ended"),
    ]  # fmt: skip


def test_only_so_many_rings_that_are_gone_are_told_of(
    directory: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscope.collectors.rings.MAX_DEPARTED", 3)
    collector = Collector(Rings(directory, store), store)
    for number in range(3):
        for writer in engine(directory, f"e{number}"):
            writer.close()
        again(collector, lambda: not list(directory.iterdir()))
    assert sorted(ring["engine"] for ring in collector.rings.told()) == ["e1", "e2", "e2"]


def test_flooded_ring_does_not_keep_the_others_waiting(directory: Path, store: Store) -> None:
    old = RingWriter(directory, About("flood", events.WORKER), 1 << 16, clock=lambda: 1)
    record(old, 1 << 16)
    quiet = RingWriter(directory, ABOUT, 64)
    record(quiet, 1)
    rings = Rings(directory, store)
    rings.scan()
    assert sum(1 for _ in rings.poll()) > 2
    record(quiet, 1)
    assert ABOUT.engine_id in {tail.engine for tail, _ in rings.poll()}


def again(collector: Collector, condition: object) -> None:
    """Step, each time with a scan, until the condition holds."""
    assert callable(condition)
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it did not come about in time"
        collector._next_scan = 0.0
        collector.step()
