"""`kvscope demo` on real engines, mode by mode: what it shows, and that nothing of it stays."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.client import Daemon
from kvscope.demo import supervise
from kvscope.demo.terminal import Terminal

from .conftest import wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]

SECOND = 1_000_000_000
KVSCOPE = (sys.executable, "-m", "kvscope.cli")
SETTLED_NS = 8 * SECOND
"""What arrived longer ago than this is over, and no figure of it changes any more."""


class Left:
    """What a demo may leave behind, by comparison with what was there before."""

    def __init__(self) -> None:
        self._shared, self._temporary = self._names()
        self.processes: list[int] = []

    @staticmethod
    def _names() -> tuple[set[str], set[str]]:
        return set(os.listdir("/dev/shm")), set(os.listdir(tempfile.gettempdir()))

    def started(self, pid: int) -> list[int]:
        self.processes = supervise.descendants(pid)
        return self.processes

    def check_nothing(self) -> None:
        assert not [pid for pid in self.processes if Path(f"/proc/{pid}").exists()]
        shared, temporary = self._names()
        ours = ("kvs-", "kvscope", *supervise.SHARED_MEMORY_PREFIXES)
        left = (shared - self._shared) | (temporary - self._temporary)
        assert not {name for name in left if name.startswith(ours)}


@pytest.fixture
def left() -> Left:
    return Left()


def ask(*arguments: str) -> Any:
    done = subprocess.run([*KVSCOPE, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) if "--json" in arguments else done.stdout


def rows(answer: dict[str, Any]) -> list[dict[str, Any]]:
    names = [column if isinstance(column, str) else column["name"] for column in answer["columns"]]
    return [dict(zip(names, row, strict=True)) for row in answer["rows"]]


def check_figures(url: str, mode: str, since_ns: int, at_ns: int) -> None:
    """What `kvscope top` shows of a window is what `kvscope query` tells of it."""
    window_ms = (at_ns - since_ns) // 1_000_000
    since_ns = at_ns - window_ms * 1_000_000
    window = ("--window", f"{window_ms}ms", "--at", str(at_ns), "--url", url)
    asked = ("--since", str(since_ns), "--until", str(at_ns), "--label", "demo", "--url", url, "--json")
    frame = ask("top", "--json", *window)
    assert frame["label"] == "demo"
    for name in ("fleet", "fleet_bands", "fleet_steps", "fleet_trend"):
        assert rows(frame["answers"][name]) == rows(ask("query", name, *asked)), name

    fleet = rows(frame["answers"]["fleet"])
    (total,) = [row for row in fleet if row["level"] == "all"]
    (connector,) = [row for row in fleet if row["level"] == "connector"]
    (ttft,) = rows(ask("query", "ttft", *asked))
    assert connector["connector"] == ttft["connector"] == mode
    assert total["requests"] == ttft["requests"] > 4
    for name in ("p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "mean_ttft_ms"):
        assert total[name] == connector[name] == ttft[name.replace("_ttft", "")], name
    steps = {row["step"]: row for row in rows(ask("query", "steps", *asked))}
    for row in rows(frame["answers"]["fleet_steps"]):
        assert row["mean_ms"] == steps[row["step"]]["mean_ms"]
    bands = rows(frame["answers"]["fleet_bands"])
    for band in bands:
        parts = ("compute_ms", "capacity_ms", "transfer_ms", "coordination_ms", "unknown_ms")
        assert sum(band[part] for part in parts) == pytest.approx(band["mean_ms"], abs=0.01)

    text = ask("top", "--once", *window)
    for number in (total["p50_ttft_ms"], total["p90_ttft_ms"], total["p99_ttft_ms"]):
        assert shows(text, number), (number, text)
    for row in rows(frame["answers"]["fleet_steps"])[:3]:
        assert row["step"] in text


def shows(text: str, ms: float) -> bool:
    """Whether a duration is among the text's numbers, as ms or s, rounded as far as they are."""
    for found in re.findall(r"\d[\d,]*(?:\.\d+)?", text):
        digits = len(found.partition(".")[2])
        if float(found.replace(",", "")) in (round(ms, digits), round(ms / 1e3, digits)):
            return True
    return False


def check_window(url: str, mode: str, since_ns: int) -> None:
    """Check a window in which a load has been going on, up to a moment at which nothing was in flight: only
    then are figures as of that moment those of the whole requests."""
    daemon = Daemon(url)
    end = "arrived_at_ns + coalesce(ttft_ns, 3600000000000) + coalesce(decode_generate_ns, 0)"
    sql = f"""
        SELECT max(at_ns), (SELECT count(*) FROM requests WHERE arrived_at_ns < max(at_ns))
        FROM (SELECT {end} + 1000000 AS at_ns FROM requests) AS moments
        WHERE NOT EXISTS (FROM requests WHERE arrived_at_ns <= at_ns AND {end} >= at_ns) AND at_ns < $until
    """

    def at() -> int | None:
        until_ns = time.time_ns() - SETTLED_NS
        if until_ns <= since_ns:
            return None
        window = {"since": str(since_ns), "until": str(until_ns)}
        ((at_ns, requests),) = daemon.query("", sql, window)["rows"]
        return int(at_ns) if at_ns and requests > 8 else None

    check_figures(url, mode, since_ns, wait_until(at, 90, "enough requests"))
    daemon.close()


def test_without_a_terminal_it_prints_the_fleet_and_ctrl_c_ends_all_of_it(left: Left) -> None:
    command = [*KVSCOPE, "demo", "--mode", "pull", "--requests", "12", "--stay"]
    since_ns = time.time_ns()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("Ctrl-C ends all of it"):
            break
    text = "".join(lines)
    assert "real engines" in text
    assert "coordination wait" in text
    assert "The fleet, as `kvscope top` shows it" in text
    assert "kvscope top" in text[text.index("The fleet, as") + 40 :], "its text, not an error"
    url = re.search(r"kvscope top --url (\S+)", text)
    assert url is not None
    check_window(url[1], "pull", since_ns)
    assert len(left.started(process.pid)) >= 8, "two engines, a router, a daemon and their supervisors"
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait() == 130
    assert "everything is gone" in rest
    assert "Traceback" not in rest
    left.check_nothing()


@pytest.fixture
def terminal(request: pytest.FixtureRequest) -> Iterator[Terminal]:
    started = Terminal([*KVSCOPE, "demo", "--mode", request.param], 120, 40)
    yield started
    started.close()


@pytest.mark.parametrize(
    ("terminal", "ending"), [("push", "q"), ("bidirectional", "SIGTERM")], indirect=["terminal"]
)
def test_in_a_terminal_it_ends_in_top_on_the_running_demo(
    terminal: Terminal, ending: str, left: Left, request: pytest.FixtureRequest
) -> None:
    mode = request.node.callspec.params["terminal"]
    since_ns = time.time_ns()
    terminal.wait_for(rf"Starting a prefill and a decode engine \({mode}\)", 30)
    # The Fleet page, with a figure of every kind of traffic that there is.
    terminal.wait_for(rf"TTFT[\s\S]*p50[\s\S]*\d[\s\S]*{mode}", 120)
    processes = left.started(terminal.process.pid)
    assert len(processes) >= 9, "two engines, a router, a daemon, their supervisors, and top"
    commands = [Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0") for pid in processes]
    (top,) = [command for command in commands if "top" in command]
    check_window(top[top.index("--url") + 1], mode, since_ns)
    text = terminal.written()
    for noise in ("INFO", "WARNING", "EngineCore", "Traceback"):
        assert noise not in text
    if ending == "q":
        terminal.press("q")
        assert terminal.process.wait(60) == 0
    else:
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.process.wait(60) != 0
    output = b"".join(data for _, data in terminal.chunks)
    assert output.rfind(b"\x1b[?1049l") > output.rfind(b"\x1b[?1049h"), "back on the first screen"
    assert output.rfind(b"\x1b[?25h") > output.rfind(b"\x1b[?25l"), "with a cursor"
    assert terminal.settings_now() == terminal.settings
    assert "Traceback" not in terminal.written()
    left.check_nothing()
