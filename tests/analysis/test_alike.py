"""A daemon, a snapshot and an archive answer `kvscope diff` and `kvscope whatif` alike."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import duckdb
import pytest
import uvicorn

from kvscope import cli, query, schema
from kvscope.collectors.api import create_app

from ..cli import rows
from ..cli.conftest import FakeDaemon

COMMANDS: Sequence[Sequence[str]] = (
    ("diff", "connector=push", "connector=bidirectional", "--anyway"),
    ("diff", "label=benchmark", "label=", "--anyway"),
    ("whatif",),
    ("whatif", "--label", "benchmark"),
    ("whatif", "--threshold", "100", "--ttl", "60"),
)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    """Arguments by what is asked; all hold the same requests."""
    folder = tmp_path_factory.mktemp("alike")
    with duckdb.connect(str(folder / "s.duckdb")) as connection:
        rows.fill(connection)
        for table in schema.BY_NAME:
            target = folder / "archive" / "v1" / table / "d=2026-11-29" / "h=15"
            target.mkdir(parents=True)
            connection.execute(f"COPY {table} TO '{target}/a.parquet' (FORMAT parquet)")
    daemon = FakeDaemon()
    daemon.live_rows = []
    listener = socket.create_server(("127.0.0.1", 0))
    api = uvicorn.Server(uvicorn.Config(create_app(daemon, query.Limits()), log_level="error"))
    thread = threading.Thread(target=api.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not api.started:
        time.sleep(0.01)
    yield {
        "daemon": ["--url", f"http://127.0.0.1:{listener.getsockname()[1]}"],
        "snapshot": ["--db", str(folder / "s.duckdb")],
        "archive": ["--db", str(folder / "archive")],
    }
    api.should_exit = True
    thread.join(10)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_all_sources_say_the_same(
    command: Sequence[str], sources: dict[str, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    told: dict[str, Any] = {}
    for name, arguments in sources.items():
        assert cli.main([*command, *arguments, "--json"]) == 0, capsys.readouterr().err
        told[name] = json.loads(capsys.readouterr().out)
    assert told["daemon"] == told["snapshot"] == told["archive"]
    assert told["daemon"].get("shifts") or any(s["requests"] for s in told["daemon"]["scenarios"])
