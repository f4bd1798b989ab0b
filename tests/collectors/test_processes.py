"""Whole processes: daemons and engines that are killed, stopped, doubled or started in the wrong place."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvscope.collectors import recover
from kvscope.ring import ring_paths

from .collecting import SERVE, Served, Writer, query, until

Start = Callable[..., Any]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    return ["--dir", str(tmp_path / "rings"), "--store", str(tmp_path / "s.duckdb")]


def check_all_stored_once(path: Path, clients: list[str]) -> None:
    found = [client for (client,) in query(path, "SELECT client_id FROM requests")]
    assert sorted(found) == sorted(clients)
    assert query(path, "SELECT count(*), count(DISTINCT id) FROM transfers") == [(len(clients),) * 2]
    assert query(path, "SELECT count(*), count(DISTINCT id) FROM leases") == [(len(clients),) * 2]
    assert query(path, "SELECT DISTINCT outcome FROM requests") == [("finished",)]
    assert query(path, "SELECT sum(lost) FROM engines") == [(0,)]


def test_daemon_killed_in_a_stream_misses_nothing_and_stores_nothing_twice(
    tmp_path: Path, flags: list[str], start: Start
) -> None:
    writer = start(Writer, tmp_path / "rings", "pull")
    writer.write(200)
    for _ in range(3):
        daemon = start(Served, *flags)
        until(lambda daemon=daemon: daemon.stored() > 0)
        writer.write(300)
        until(lambda daemon=daemon: daemon.status()["pipeline"]["live"] > 0)
        daemon.kill()  # requests in memory, rows in the queue
    writer.write(100)
    daemon = start(Served, *flags)
    until(lambda: daemon.status()["pipeline"]["already_stored"] + daemon.stored() > 0)
    until(lambda: daemon.status()["pipeline"]["live"] == 0 and daemon.status()["store"]["rows_queued"] == 0)
    code, stderr = daemon.stop()
    assert code == 0
    assert "Traceback" not in stderr
    check_all_stored_once(tmp_path / "s.duckdb", writer.clients)
    read = query(tmp_path / "s.duckdb", "SELECT sum(read), sum(next_seq) - count(*) FROM engines")
    assert read[0][0] == read[0][1], "every number was counted once"


def test_daemon_killed_while_rings_are_lapped_stores_nothing_twice(
    tmp_path: Path, flags: list[str], start: Start
) -> None:
    # Of 40 requests a ring holds the last 20 or so, the P rings and the D rings not the same ones.
    writer = start(Writer, tmp_path / "rings", "push", 256)
    for _ in range(4):
        daemon = start(Served, *flags)
        until(lambda daemon=daemon: len(daemon.status()["rings"]) == 4)
        writer.write(10)
        until(lambda daemon=daemon: daemon.requests() == len(writer.clients))
        daemon.kill()
    # What is left of overwritten requests is handed over last.
    assert recover.main([flags[1], "--db", flags[3]]) == 0
    check_all_stored_once(tmp_path / "s.duckdb", writer.clients)


def test_engine_killed_is_drained_committed_and_its_rings_deleted(
    tmp_path: Path, flags: list[str], start: Start
) -> None:
    writer = start(Writer, tmp_path / "rings")
    daemon = start(Served, *flags)
    writer.write(50)
    writer.kill()
    until(lambda: not ring_paths(tmp_path / "rings"))
    # Nothing was in flight: it is told of, and is no problem.
    assert {(ring["state"], ring["state_detail"]) for ring in daemon.status()["rings"]} == {("ended", None)}
    code, _ = daemon.stop()
    assert code == 0
    check_all_stored_once(tmp_path / "s.duckdb", writer.clients)
    assert query(tmp_path / "s.duckdb", "SELECT DISTINCT state FROM engines") == [("ended",)]


def test_stop_writes_all_that_is_complete(tmp_path: Path, flags: list[str], start: Start) -> None:
    writer = start(Writer, tmp_path / "rings")
    daemon = start(Served, *flags)
    until(lambda: len(daemon.status()["rings"]) == 4)
    writer.write(400)
    code, _ = daemon.stop()
    assert code == 0
    check_all_stored_once(tmp_path / "s.duckdb", writer.clients)
    assert len(ring_paths(tmp_path / "rings")) == 4, "the engines live on"
    assert not (tmp_path / "s.duckdb.wal").exists()


def refused(*flags: str) -> str:
    """Start a daemon that must end by itself; returns the one line it wrote."""
    done = subprocess.run(
        [sys.executable, "-c", SERVE, *flags], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("kvscope serve: ")
    return done.stderr


def test_second_daemon_on_the_same_store(tmp_path: Path, flags: list[str], start: Start) -> None:
    first = start(Served, *flags)
    assert f"process {first.process.pid} has this store open" in refused("--port", "0", *flags)
    assert first.status()["store"]["error"] == ""


def test_port_in_use(flags: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert f"127.0.0.1:{port}: Address already in use" in refused("--port", port, *flags)


def test_store_in_an_impossible_place(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused("--port", "0", "--dir", str(tmp_path), "--store", str(tmp_path / "file" / "s.duckdb"))


def test_ring_directory_that_is_not_there_yet(tmp_path: Path, flags: list[str], start: Start) -> None:
    daemon = start(Served, *flags)
    until(lambda: "waiting for engines" in str(daemon.status()["problems"]))
    writer = start(Writer, tmp_path / "rings")
    writer.write(5)
    until(lambda: daemon.stored() > 5)
    assert daemon.status()["problems"] == []
    code, stderr = daemon.stop()
    assert code == 0
    assert stderr.count("waiting for engines") == 1
    check_all_stored_once(tmp_path / "s.duckdb", writer.clients)


def test_full_disk_loses_nothing(tmp_path: Path, start: Start, mount: Callable[[str], Path]) -> None:
    disk = mount("size=2m")
    daemon = start(Served, "--dir", str(tmp_path / "rings"), "--store", str(disk / "s.duckdb"))
    writer = start(Writer, tmp_path / "rings")
    writer.write(1500)
    until(lambda: "the disk is full" in str(daemon.status()["problems"]))
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    until(lambda: not daemon.status()["problems"] and daemon.status()["pipeline"]["live"] == 0)
    code, stderr = daemon.stop()
    assert code == 0
    assert "Traceback" not in stderr
    check_all_stored_once(disk / "s.duckdb", writer.clients)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_with_exit_code_0(flags: list[str], start: Start, signum: int) -> None:
    daemon = start(Served, *flags)
    os.kill(daemon.process.pid, signum)
    _, stderr = daemon.process.communicate(timeout=60)
    assert daemon.process.returncode == 0
    assert "Traceback" not in stderr


def test_recover_of_dead_rings_stores_all_and_deletes_none(
    tmp_path: Path, start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = start(Writer, tmp_path / "rings")
    writer.write(20)
    writer.kill()
    (tmp_path / "rings" / "foreign.ring").write_text("not a ring")
    arguments = [str(tmp_path / "rings"), "--db", str(tmp_path / "r.duckdb"), "--json"]
    for new in (20, 0):
        assert recover.main(arguments) == 0
        found = msgspec.json.decode(capsys.readouterr().out)
        assert (found["rings"], found["lost"], found["requests"]) == (4, 0, 20)
        assert found["new_requests"] == new
        assert "not a kvscope ring" in found["unreadable"][0]
    check_all_stored_once(tmp_path / "r.duckdb", writer.clients)
    assert len(ring_paths(tmp_path / "rings")) == 5


def test_recover_of_a_directory_that_may_not_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(_: Path) -> None:
        raise PermissionError

    monkeypatch.setattr(Path, "iterdir", denied)
    assert recover.main([str(tmp_path), "--db", str(tmp_path / "r.duckdb")]) == 1
    assert "no permission to list" in capsys.readouterr().err


def test_recover_without_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recover.main([str(tmp_path / "none"), "--db", str(tmp_path / "r.duckdb")]) == 1
    assert capsys.readouterr().err == f"kvscope recover: {tmp_path / 'none'}: no such directory\n"
    assert not (tmp_path / "r.duckdb").exists()
