"""Runs `kvscope serve` beside the engines, so that it ends with whoever started it."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from kvscope.demo import supervise
from kvscope.errors import KvscopeError

GRACE_S = 15


class Collector:
    """A running daemon."""

    def __init__(self, rings: Path, store: Path, log: Path, port: int = 0) -> None:
        """Start it; returns when it listens. Raises KvscopeError with its log's end when it does not."""
        self.rings, self.store, self.log = rings, store, log
        command = [sys.executable, "-m", "kvscope.cli", "serve"]
        command += ["--dir", str(rings), "--store", str(store), "--port", str(port)]
        self.supervisor = supervise.start(command, GRACE_S, log, answers=True)
        assert self.supervisor.stdout is not None
        line = self.supervisor.stdout.readline().decode(errors="replace")
        if "http://" not in line:
            self.stop()
            raise KvscopeError(f"the daemon did not start: {log.read_text(errors='replace')[-2000:]}")
        self.url = line.split()[2].rstrip(",")

    @property
    def pid(self) -> int:
        """Of the daemon itself, which is the supervisor's only child."""
        return supervise.descendants(self.supervisor.pid)[0]

    def stop(self) -> None:
        """End it cleanly; returns when it is gone. May be called twice."""
        supervise.stop(self.supervisor)


@contextlib.contextmanager
def collector(rings: Path, folder: Path) -> Iterator[Collector]:
    """A daemon over `rings` whose store and log lie in `folder`."""
    daemon = Collector(rings, folder / "kvscope.duckdb", folder / "daemon.log")
    try:
        yield daemon
    finally:
        daemon.stop()
