"""The sampler when a source fails, floods or hangs, and engines' own samples when rings are read again."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope import events
from kvscope.collectors import recover
from kvscope.collectors import sampler as sampler_module
from kvscope.collectors.daemon import Collector, Daemon
from kvscope.collectors.rings import RingProcess, Rings
from kvscope.collectors.sampler import Sampler, Thinned
from kvscope.collectors.store import Store
from kvscope.ring import About, RingWriter, boot_id
from kvscope.samples import KINDS, OWN_NAMES, Sample
from kvscope.schema import SAMPLES
from kvscope.settings import Settings

from .collecting import ask, query, until

SECOND = 10**9
NAMES = [column.name for column in SAMPLES.columns]


def sample(name: str = "host.cpu", at_ns: int = 0, value: float = 1.0, **more: Any) -> Sample:
    keys = {"host": "h", "engine": "", "source": "", "rank": 0, "label": "", **more}
    return Sample(at_ns=at_ns or time.time_ns(), name=name, value=value, **keys)


def make(*sources: Callable[..., Any], interval_s: float = 5.0) -> Sampler:
    return Sampler({f"source {i}": one for i, one in enumerate(sources)}, list, interval_s)


def test_a_source_that_fails_costs_no_other_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def broken(at_ns: int, processes: list[RingProcess]) -> Iterator[Sample]:
        yield sample("host.cores")
        raise OSError("no such luck")

    found = make(broken, lambda at_ns, processes: [sample("host.cpu")])
    for _ in range(3):
        found.round()
    assert [s.name for s in found.latest()] == ["host.cpu"]
    assert len(found.take_rows()) == 3
    assert found.status()["faults"] == {"source 0": 3, "source 1": 0}
    assert [record.getMessage() for record in caplog.records] == [
        "source 0 could not be sampled (OSError: no such luck); such rounds are counted"
    ]


def test_rows_are_handed_over_once_with_ids_of_their_own() -> None:
    found = make(lambda at_ns, processes: [sample(label=str(i)) for i in range(50)])
    found.round()
    found.round()
    rows = found.take_rows()
    assert len(rows) == 100
    assert len({row[0] for row in rows}) == 100
    assert found.take_rows() == []
    assert len(rows[0]) == len(NAMES)


def test_a_flood_is_cut_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "MAX_OF_ROUND", 30)
    monkeypatch.setattr(sampler_module, "MAX_WAITING", 40)
    monkeypatch.setattr(sampler_module, "MAX_LATEST", 10)
    found = make(lambda at_ns, processes: [sample(label=str(i)) for i in range(100)])
    found.round()
    assert found.status()["dropped"] == 70
    assert len(found.latest()) == 10
    found.round()
    assert found.status()["waiting"] == 40
    assert found.status()["dropped"] == 140 + 20
    assert len(found.take_rows()) == 40


def test_a_sample_that_is_old_says_nothing_about_now() -> None:
    now = time.time_ns()
    samples = [sample("host.cpu", now - 61 * SECOND), sample("host.cores", now - 50 * SECOND)]
    found = make(lambda at_ns, processes: samples)
    found.round()
    assert [s.name for s in found.latest()] == ["host.cores"]
    # An older one that comes later does not take its place.
    found.add([sample("host.cores", now - 55 * SECOND, 7.0)])
    assert [s.value for s in found.latest()] == [1.0]
    rarely = make(lambda at_ns, processes: samples, interval_s=3600)
    rarely.round()
    assert len(rarely.latest()) == 2


def test_a_source_that_hangs_holds_up_neither_the_collecting_thread_nor_the_end() -> None:
    hangs, go_on = threading.Event(), threading.Event()

    def hanging(at_ns: int, processes: list[RingProcess]) -> list[Sample]:
        hangs.set()
        go_on.wait(60)
        return []

    found = make(lambda at_ns, processes: [sample()], hanging, interval_s=0.001)
    found.start()
    assert hangs.wait(30)
    began = time.monotonic()
    assert len(found.take_rows()) == 1
    assert len(found.latest()) == 1
    assert found.status()["rounds"] == 0
    found.stop(deadline_s=0.1)
    assert time.monotonic() - began < 10
    go_on.set()


def test_a_source_that_hangs_is_a_problem_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[list[str]] = []

    def slow(at_ns: int, processes: list[RingProcess]) -> list[Sample]:
        told.append(found.problems())
        now = time.monotonic() + 31
        with monkeypatch.context() as later:
            later.setattr(sampler_module.time, "monotonic", lambda: now)
            told.append(found.problems())
        return []

    found = make(lambda at_ns, processes: [], slow)
    found.round()
    (early, (line,)) = told
    assert early == []
    assert line.startswith("SAMPLES ARE OLD: reading source 1 hangs since 31 s; ")
    assert found.problems() == []


def test_a_ring_that_lies_about_its_time_costs_no_other_sample() -> None:
    found = make()
    found.add([sample("engine.step_ns", 2**63, engine="liar"), sample("engine.step_ns", engine="e")])
    assert [row[NAMES.index("engine")] for row in found.take_rows(everything=True)] == ["e"]
    assert found.status()["dropped"] == 1


class TestThinned:
    def test_seconds_become_means_of_longer_times(self) -> None:
        thinned = Thinned(5)
        rows = []
        for second in range(100, 111):
            own = sample("engine.step_ns", second * SECOND, float(second), engine="e", source="worker")
            rows += thinned.add(own, now_s=second)
        assert [(row[1] // SECOND, row[-1]) for row in rows] == [(104, 102.0), (109, 107.0)]

    def test_one_ring_read_again_gives_the_same_rows(self) -> None:
        own = [sample("engine.step_ns", s * SECOND, float(s), engine="e") for s in range(100, 120)]
        first, again = Thinned(5), Thinned(5)
        rows = [row for one in own for row in first.add(one, 0.0)]
        assert rows == [row for one in own for row in again.add(one, 99.0)]
        assert len({row[0] for row in rows}) == len(rows) == 3

    def test_an_engine_that_falls_silent_is_told_to_its_last_sample(self) -> None:
        thinned = Thinned(5)
        thinned.add(sample("engine.step_ns", 101 * SECOND, 3.0, engine="a"), now_s=50.0)
        thinned.add(sample("engine.step_ns", 101 * SECOND, 5.0, engine="b"), now_s=58.0)
        assert thinned.quiet(59.0) == []
        assert [row[-1] for row in thinned.quiet(60.5)] == [3.0]
        assert thinned.quiet(60.5) == []


class Engine:
    """A ring of one process that steps once a second."""

    def __init__(self, directory: Path) -> None:
        self.now_ns = time.monotonic_ns() - 600 * SECOND
        about = About(engine_id="e", source="scheduler", host="h", boot_id=boot_id())
        self.writer = RingWriter(directory, about, 4096, clock=lambda: self.now_ns)

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now_ns += SECOND
            self.writer.record(events.ENGINE_SAMPLE, 0, 100, 1000, SECOND // 100, SECOND)


def own_rows(path: Path) -> list[tuple[Any, ...]]:
    names = ", ".join(f"'{name}'" for name in sorted(OWN_NAMES))
    return query(path, f"SELECT name, at_ns, value FROM samples WHERE name IN ({names}) ORDER BY ALL")


def collect(directory: Path, path: Path) -> None:
    store = Store(path)
    collector = Collector(Rings(directory, store), store)
    assert store.wait_committed(collector.finish(), 30)
    collector.rings.close()
    store.close()


def test_an_engines_own_samples_are_stored_once_when_its_ring_is_read_again(tmp_path: Path) -> None:
    path, directory = tmp_path / "s.duckdb", tmp_path / "rings"
    engine = Engine(directory)
    engine.run(30)
    collect(directory, path)
    first = own_rows(path)
    assert {name for name, _, _ in first} == OWN_NAMES
    assert [value for name, _, value in first if name == "engine.step_ns"] == [10_000_000.0] * (
        len(first) // len(OWN_NAMES)
    )
    engine.run(30)
    collect(directory, path)
    both = own_rows(path)
    assert both[: len(first) // 4] == first[: len(first) // 4]
    assert len(both) == len(set(both))
    times = sorted({at_ns for _, at_ns, _ in both})
    # Nothing is missing where the second took over: one row for each five seconds.
    assert {(b - a) // SECOND for a, b in itertools.pairwise(times)} <= {4, 5, 6}
    assert len(times) >= 10
    engine.writer.close()


def test_a_daemon_stores_what_it_samples_and_tells_the_latest(tmp_path: Path) -> None:
    settings = Settings(dir=tmp_path / "rings", store=tmp_path / "s.duckdb", sample_seconds=0.05)
    daemon = Daemon(settings)
    daemon.start()
    try:
        until(lambda: daemon.status()["samples"]["rounds"] >= 3)
        status = daemon.status()
        assert set(status["samples"]["faults"].values()) == {0}
        found = until(
            lambda: dict(ask(daemon._store, "SELECT name, any_value(value) FROM samples GROUP BY 1"))
        )
    finally:
        assert daemon.stop()
    assert {"host.cores", "host.run_queue"} <= set(found) <= set(KINDS)
    rows = query(tmp_path / "s.duckdb", "SELECT count(*), count(DISTINCT id) FROM samples")
    assert rows[0][0] == rows[0][1] > 0


def test_zero_seconds_leaves_out_host_and_vllm(tmp_path: Path) -> None:
    off = sampler_module.make_sampler(
        Settings(sample_seconds=0),
        list,
        lambda at_ns, processes: [sample("kv_blocks.total", engine="e")],
    )
    off.round()
    assert [s.name for s in off.latest()] == ["kv_blocks.total"]
    assert list(off.status()["faults"]) == ["KV blocks"]


def test_recovered_rings_are_sampled_to_their_end(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "rings")
    engine.run(2)
    engine.writer.close()
    assert recover.main([str(tmp_path / "rings"), "--db", str(tmp_path / "s.duckdb")]) == 0
    assert {name for name, _, _ in own_rows(tmp_path / "s.duckdb")} == OWN_NAMES
