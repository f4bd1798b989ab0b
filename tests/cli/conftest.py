"""A real API over a real DuckDB with hand-made rows, and the real command line in subprocesses."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pyarrow as pa
import pytest
import uvicorn

from kvscope import query, schema, storefile
from kvscope.collectors.api import create_app
from kvscope.collectors.channel import Look
from kvscope.collectors.pipeline import LiveRequest
from kvscope.samples import Sample

from . import rows

LIMIT_S = 4.0
"""Of a question."""


class FakeDaemon:
    """What the API asks of the daemon, over a database in memory."""

    def __init__(self) -> None:
        self.connection = duckdb.connect(config={"memory_limit": "1GB"})
        rows.fill(self.connection)
        storefile.lock(self.connection)
        self.live_rows = [rows.LIVE]
        self.status_answer: dict[str, Any] = status()
        self.snapshots: list[Path] = []
        self.latest_samples: list[Sample] = []

    def status(self) -> dict[str, Any]:
        return self.status_answer

    def live(self) -> list[dict[str, Any]]:
        return self.live_rows

    def look(self) -> Look:
        return Look([live_request(row) for row in self.live_rows], [])

    def watch(self, take: Callable[[Sequence[Any]], None] | None) -> None:
        pass

    def samples(self) -> list[Sample]:
        return self.latest_samples

    def requests_table(self, rows: list[Any]) -> pa.Table:
        empty = self.connection.cursor().sql("FROM requests LIMIT 0").to_arrow_table().schema
        columns = zip(*rows, strict=True) if rows else [()] * len(empty)
        arrays = [pa.array(c, f.type) for f, c in zip(empty, columns, strict=True)]
        return pa.Table.from_arrays(arrays, schema=empty)

    def cursor(self) -> duckdb.DuckDBPyConnection:
        return self.connection.cursor()

    def explained(self, error: Exception) -> str:
        return str(error)

    def snapshot(self, path: Path, everything: bool = False) -> None:
        self.snapshots.append(path)

    def archive(self, path: Path, since: str, until: str) -> dict[str, Any]:
        raise NotImplementedError

    def keep(self, table: str, row: tuple[Any, ...]) -> None:
        with self.connection.cursor() as cursor:
            cursor.execute(f"INSERT INTO {table} VALUES ({', '.join('?' * len(row))})", row)


def live_request(row: dict[str, Any]) -> LiveRequest:
    """A request in flight as the pipeline tells it."""
    columns = tuple(row[column.name] for column in schema.REQUESTS.columns)
    since_ns = rows.T0_NS
    return LiveRequest(
        columns, True, row["current_step"], since_ns, "a place in the batch of D engine-d", 0, 0
    )


def ring(name: str, **columns: Any) -> dict[str, Any]:
    return {
        "ring": "0" * 32,
        "file": f"{name}.ring",
        "engine": name,
        "source": "scheduler",
        "rank": 0,
        "host": "host-a",
        "pid": 41,
        "label": "",
        "kvscope": "0.1.0",
        "started_at_ns": rows.T0_NS,
        "state": "recording",
        "state_detail": "",
        "read": 1000,
        "lost": 0,
        "torn": 0,
        "rejected": 0,
        "slots": 65536,
        "last_event_at_ns": rows.T0_NS,
        "hooks_missing": [],
        "fingerprint": {"vllm": "0.32.0", "nixl": "1.5.1"},
    } | columns


def status(**changes: Any) -> dict[str, Any]:
    """A healthy status in the daemon's shape."""
    return {
        "version": "0.1.0",
        "uptime_s": 12.5,
        "dir": "/rings",
        "problems": [],
        "rings": [ring("engine-p"), ring("engine-d")],
        "unreadable": [],
        "store": {
            "path": "/state/kvscope.duckdb",
            "bytes": 1_234_567,
            "rows_stored": 42,
            "rows_refused": 0,
            "rows_queued": 0,
            "queue_limit": 32768,
            "commit_ms_p50": 4.0,
            "commit_ms_max": 9.0,
            "error": "",
        },
        "pipeline": {
            "events": 2000,
            "requests": 9,
            "joined": 8,
            "unjoined": 1,
            "untold": 0,
            "live": 1,
            "faults": 0,
        },
    } | changes


@pytest.fixture(scope="session")
def server() -> Iterator[tuple[FakeDaemon, str]]:
    daemon = FakeDaemon()
    listener = socket.create_server(("127.0.0.1", 0))
    app = create_app(daemon, query.Limits(rows=100, bytes=200_000, seconds=LIMIT_S))
    api = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    thread = threading.Thread(target=api.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not api.started:
        time.sleep(0.01)
    yield daemon, f"http://127.0.0.1:{listener.getsockname()[1]}"
    api.should_exit = True
    thread.join(10)


@pytest.fixture
def daemon(server: tuple[FakeDaemon, str]) -> Iterator[FakeDaemon]:
    yield server[0]
    server[0].status_answer = status()
    server[0].snapshots.clear()


@pytest.fixture
def url(server: tuple[FakeDaemon, str]) -> str:
    return server[1]


@pytest.fixture
def http(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=url, trust_env=False, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def store_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "snapshot.duckdb"
    with duckdb.connect(str(path)) as connection:
        rows.fill(connection)
    return path


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(url: str, tmp_path: Path) -> Run:
    """Run `kvscope ARGUMENTS` in a process of its own, asking the test's API unless told otherwise."""

    def run_cli(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("KVSCOPE_") and k != "COLUMNS"}
        env = {**kept, "KVSCOPE_URL": url, "XDG_CONFIG_HOME": str(tmp_path), **environment}
        command = [sys.executable, "-m", "kvscope.cli", *arguments]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=env,
            timeout=60,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    return run_cli
