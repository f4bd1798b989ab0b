"""Debian's Prometheus beside a test: its tools, and a server that scrapes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvscope.demo import supervise
from kvscope.demo.engines import free_port

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "build" / "prometheus"


def tool(name: str) -> str:
    """The path of `promtool` or `prometheus`; skips the test where they can't be had."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs must not unpack at once
        found = subprocess.run(
            [ROOT / "tests" / "promtool.sh", FOLDER], capture_output=True, text=True, check=False
        )
    if found.returncode:
        pytest.skip(found.stderr.strip())
    path = Path(found.stdout.strip()).with_name(name)
    if not path.exists():
        pytest.skip(f"promtool is there without {name}: {path}")
    return str(path)


class Prometheus:
    """A server that runs."""

    def __init__(self, url: str, log: Path) -> None:
        self.url = url
        self.log = log

    def ask(self, path: str, **parameters: Any) -> Any:
        """The `data` of an answer; fails with what Prometheus says."""
        query = urllib.parse.urlencode({k: v for k, v in parameters.items() if v is not None}, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{parameters}: {error.read().decode(errors='replace')}") from None

    def query(self, expr: str, at: float | None = None) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series at a Unix time, now where none is given."""
        data = self.ask("query", query=expr, time=at)
        if data["resultType"] == "scalar":
            return [({}, float(data["result"][1]))]
        return [(one["metric"], float(one["value"][1])) for one in data["result"]]

    def value(self, expr: str, at: float | None = None) -> float:
        """The value of the only series."""
        ((_, value),) = self.query(expr, at)
        return value

    def query_range(
        self, expr: str, start: float, end: float, step: float
    ) -> list[tuple[dict[str, str], list[float]]]:
        data = self.ask("query_range", query=expr, start=start, end=end, step=step)
        return [(one["metric"], [float(v) for _, v in one["values"]]) for one in data["result"]]

    def exemplars(self, expr: str, start: float, end: float) -> list[dict[str, Any]]:
        """Each exemplar: labels, value, timestamp."""
        found = self.ask("query_exemplars", query=expr, start=start, end=end)
        return [exemplar for one in found for exemplar in one["exemplars"]]


@contextlib.contextmanager
def prometheus(
    targets: Sequence[str], folder: Path, rule_files: Mapping[str, str] | None = None, interval: str = "1s"
) -> Iterator[Prometheus]:
    """A Prometheus on a port of its own that scrapes `targets` (host:port) and evaluates rules.

    Args:
        folder: for its data, its settings and its log.
        rule_files: name to text.
    """
    binary = tool("prometheus")
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (rule_files or {}).items():
        (folder / name).write_text(text)
    config = {
        "global": {"scrape_interval": interval, "scrape_timeout": interval, "evaluation_interval": interval},
        "rule_files": [str(folder / name) for name in rule_files or {}],
        "scrape_configs": [{"job_name": "kvscope", "static_configs": [{"targets": list(targets)}]}],
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
    port = free_port()
    command = [binary, f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"]
    log = folder / "prometheus.log"
    process = supervise.start(command, 5, log)
    server = Prometheus(f"http://127.0.0.1:{port}", log)
    try:
        _wait_until_ready(server)
        yield server
    finally:
        supervise.stop(process)


def _wait_until_ready(server: Prometheus, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{server.url}/-/ready", timeout=5):
            return
        if time.monotonic() > deadline:
            raise AssertionError(f"Prometheus is not ready:\n{server.log.read_text()[-2000:]}")
        time.sleep(0.1)
