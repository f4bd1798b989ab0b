"""What the daemon tells while it collects, and when collecting goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope import events
from kvscope.collectors.daemon import Daemon
from kvscope.collectors.pipeline import Pipeline
from kvscope.demo.simulate import Fleet
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


def test_stop_before_start_and_twice(tmp_path: Path) -> None:
    daemon = Daemon(Settings(dir=tmp_path / "rings", store=tmp_path / "s.duckdb"))
    assert daemon.stop()
    assert daemon.stop()
