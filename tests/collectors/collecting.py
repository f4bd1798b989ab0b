"""Helpers of these tests: real rings, real processes, a real DuckDB; waiting is on conditions."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb

from kvscope.collectors.store import Row, Store
from kvscope.schema import BY_NAME

WRITER = """
import sys
from pathlib import Path
from kvscope.demo.simulate import Fleet
fleet = Fleet(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
for line in sys.stdin:
    for _ in range(int(line)):
        print(fleet.request())
    print("done", flush=True)
"""
SERVE = "import sys; from kvscope.collectors.serve import main; sys.exit(main(sys.argv[1:]))"


def until(condition: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    """Poll until the condition holds; returns what it returned."""
    end = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < end, "it did not come about in time"
        time.sleep(0.02)
    return found


def row(table: str, **values: Any) -> Row:
    """A row of `table` with these columns; the rest NULL."""
    return tuple(values.get(column.name) for column in BY_NAME[table].columns)


def query(path: Path, sql: str) -> list[tuple[Any, ...]]:
    """Ask a store that no process has open."""
    with duckdb.connect(str(path), read_only=True) as connection:
        return connection.execute(sql).fetchall()


def ask(store: Store, sql: str) -> list[tuple[Any, ...]]:
    with store.cursor() as cursor:
        return cursor.execute(sql).fetchall()


class Writer:
    """A process that records simulated requests into rings; `kill` is SIGKILL."""

    def __init__(self, directory: Path, mode: str = "push", slots: int = 1 << 15) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(directory), mode, str(slots)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.clients: list[str] = []

    def write(self, requests: int) -> None:
        """Record so many requests; returns when they are in the rings."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{requests}\n")
        self.process.stdin.flush()
        while (line := self.process.stdout.readline().strip()) != "done":
            assert line, "the writer died"
            self.clients.append(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


class Served:
    """A running `kvscope serve`; it leaves out the host and vLLM's metrics unless a flag says otherwise."""

    def __init__(self, *flags: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVE, "--port", "0", "--sample-seconds", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.line = self.process.stdout.readline()
        if not self.line:
            raise AssertionError(self.process.communicate()[1])
        self.url = self.line.split()[2].rstrip(",")

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/api/v1/status", timeout=30) as answer:
            found: dict[str, Any] = json.load(answer)
            return found

    def stored(self) -> int:
        """Rows on disk since its start."""
        return int(self.status()["store"]["rows_stored"])

    def requests(self) -> int:
        """Requests on disk, of which a snapshot tells; queries have those in flight too."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "copy.duckdb"
            headers = {"Content-Type": "application/json"}
            body = json.dumps({"path": str(path)}).encode()
            asked = urllib.request.Request(f"{self.url}/api/v1/snapshot", body, headers)
            urllib.request.urlopen(asked, timeout=30).close()
            return int(query(path, "SELECT count(*) FROM requests")[0][0])

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def stop(self) -> tuple[int, str]:
        """SIGTERM; returns the exit code and what it wrote to stderr."""
        self.process.terminate()
        _, stderr = self.process.communicate(timeout=60)
        return self.process.returncode, stderr
