"""What the daemon tells while it collects, and when collecting goes wrong."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope import events
from kvscope.collectors.daemon import Collector, Daemon
from kvscope.collectors.pipeline import LiveRequest, Pipeline
from kvscope.collectors.rings import Rings
from kvscope.collectors.sampler import Sampler
from kvscope.collectors.store import Store
from kvscope.demo.simulate import Fleet
from kvscope.health import problems
from kvscope.join import SETTLE_NS
from kvscope.ring import About, RingWriter
from kvscope.schema import REQUESTS
from kvscope.settings import Settings

from .collecting import query, until


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    # No samples: the machine's other engines are none of these tests' business.
    daemon = Daemon(Settings(dir=tmp_path / "rings", store=tmp_path / "s.duckdb", sample_seconds=0))
    daemon.start()
    yield daemon
    daemon.stop()


def test_request_in_flight_is_live_and_not_stored(tmp_path: Path, daemon: Daemon) -> None:
    ring = RingWriter(tmp_path / "rings", About("engine-p", events.SCHEDULER, label="l"), 64)
    ring.record(events.REQUEST_ARRIVED, ring.text("chatcmpl-abc-12345678"), 1, events.FLAG_REMOTE_DECODE, 100)
    (live,) = until(daemon.live)
    assert list(live) == [column.name for column in REQUESTS.columns]
    assert (live["client_id"], live["p_engine"], live["ttft_ns"]) == ("abc", "engine-p", None)
    with daemon.cursor() as cursor:
        assert cursor.execute("SELECT count(*) FROM requests").fetchall() == [(0,)]


def test_an_engine_that_died_is_a_problem_until_it_is_back(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvscope.join.LOST_QUIET_NS", 0)
    other = RingWriter(tmp_path / "rings", About("engine-d", events.SCHEDULER), 64)
    ring = RingWriter(tmp_path / "rings", About("engine-p", events.SCHEDULER), 64)
    ring.record(events.REQUEST_ARRIVED, ring.text("chatcmpl-abc-12345678"), 1, events.FLAG_REMOTE_DECODE, 100)
    until(daemon.live)
    assert list(problems(daemon.status())) == []
    ring.close()
    until(lambda: not ring.path.exists())
    died = f"ENGINE GONE: engine-p scheduler 0 (pid {os.getpid()}) died: 1 request in flight"
    assert list(problems(daemon.status())) == [died]
    again = RingWriter(tmp_path / "rings", About("engine-p", events.SCHEDULER), 64)
    until(lambda: list(problems(daemon.status())) == [])
    for writer in (again, other):
        writer.close()
    until(lambda: not list((tmp_path / "rings").iterdir()))
    (line,) = problems(daemon.status())
    assert line == f"no engine records into {tmp_path / 'rings'} any more"


def test_status_tells_of_rings_files_and_store(tmp_path: Path, daemon: Daemon) -> None:
    (tmp_path / "rings").mkdir()
    (tmp_path / "rings" / "foreign.ring").write_text("x")
    fleet = Fleet(tmp_path / "rings", "push", 4096)
    fleet.request()
    until(lambda: daemon.status()["pipeline"]["requests"] == 1)
    until(lambda: daemon.status()["store"]["rows_stored"] >= 7)
    status = daemon.status()
    assert sorted(ring["source"] for ring in status["rings"]) == ["scheduler"] * 2 + ["worker"] * 2
    assert sum(ring["read"] for ring in status["rings"]) > fleet.events
    for ring in status["rings"]:
        assert (ring["state"], ring["lost"], ring["torn"], ring["rejected"]) == ("recording", 0, 0, 0)
    assert [Path(one["path"]).name for one in status["unreadable"]] == ["foreign.ring"]
    assert status["problems"] == []
    assert status["store"]["bytes"] > 0
    daemon.snapshot(tmp_path / "copy.duckdb")
    assert query(tmp_path / "copy.duckdb", "SELECT outcome FROM requests") == [("finished",)]


def test_collecting_that_fails_is_reported_once_and_goes_on(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failed = threading.Event()

    def fail(*_: object) -> None:
        failed.set()
        raise RuntimeError("a fault\nof two lines")

    with monkeypatch.context() as patched:
        patched.setattr(Pipeline, "take_rows", fail)
        until(failed.is_set)
        until(lambda: daemon.status()["problems"])
        failed.clear()
        until(failed.is_set)
    fleet = Fleet(tmp_path / "rings", "pull", 4096)
    fleet.request()
    until(lambda: daemon.status()["pipeline"]["requests"] == 1)
    until(lambda: not [text for text in daemon.status()["problems"] if "fault" in text])
    lines = [r.getMessage() for r in caplog.records if "a fault" in r.getMessage()]
    assert lines == ["collecting failed: RuntimeError: a fault of two lines"]


def test_samples_that_fail_cost_no_request(
    tmp_path: Path, daemon: Daemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("no interval")

    monkeypatch.setattr(Sampler, "take_rows", fail)
    fleet = Fleet(tmp_path / "rings", "pull", 4096)
    fleet.request()
    until(lambda: daemon.status()["pipeline"]["requests"] == 1)
    until(lambda: [live["outcome"] for live in daemon.live()] == [])
    with daemon.cursor() as cursor:
        assert cursor.execute("SELECT outcome FROM requests").fetchall() == [("finished",)]
    lines = [r.getMessage() for r in caplog.records if "no interval" in r.getMessage()]
    assert lines == ["samples were lost (ZeroDivisionError: no interval); such are left out"]


def test_a_request_that_is_handed_over_while_it_is_looked_at_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path / "s.duckdb")
    collector = Collector(Rings(tmp_path / "rings", store), store)
    fleet = Fleet(tmp_path / "rings", "pull", 4096)
    fleet.request()
    collector.step()
    look = collector.pipeline.look

    def settled_after(*arguments: Any) -> list[LiveRequest]:
        found = look(*arguments)
        rows = collector.pipeline.take_rows(time.monotonic_ns() + SETTLE_NS)
        assert len(rows["requests"]) == 1
        monkeypatch.setattr(store, "pending", lambda table: rows[table])
        return found

    monkeypatch.setattr(collector.pipeline, "look", settled_after)
    looked = collector.look()
    assert (looked.requests, len(looked.pending)) == ([], 1)
    collector.rings.close()
    store.close()


def test_requests_that_were_joined_leave_nothing_behind_where_somebody_looks(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    collector = Collector(Rings(tmp_path / "rings", store), store)
    directory = tmp_path / "rings"
    p = RingWriter(directory, About("engine-p", events.SCHEDULER), 4096)
    d = RingWriter(directory, About("engine-d", events.SCHEDULER), 4096)
    for number in range(3):
        name = f"chatcmpl-{number}-12345678"
        d.record(events.REQUEST_ARRIVED, d.text(name), 1, events.FLAG_REMOTE_PREFILL, 100)
        p.record(events.REQUEST_ARRIVED, p.text(name), 1, events.FLAG_REMOTE_DECODE, 100)
    while collector.step():
        pass
    pipeline = collector.pipeline
    assert len(collector.look().requests) == 6
    pipeline.take_rows(time.monotonic_ns(), final=True)
    assert pipeline.joiner.live() == []
    assert pipeline._live == {}
    for ring in (p, d):
        ring.close()
    collector.rings.close()
    store.close()


def test_stop_before_start_and_twice(tmp_path: Path) -> None:
    daemon = Daemon(Settings(dir=tmp_path / "rings", store=tmp_path / "s.duckdb"))
    assert daemon.stop()
    assert daemon.stop()
