"""`kvscope demo` in a terminal: it ends in `kvscope top`, and nothing is left behind, however it ends."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope.demo import supervise
from kvscope.demo.terminal import Terminal

FLEET = r"TTFT[\s\S]*p0-50"
"""What is on the Fleet page once there are figures."""


@pytest.fixture(autouse=True)
def heeded() -> Iterator[None]:
    """Under nohup, or in the background of a script, what is started ignores signals from the beginning."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGHUP, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Left:
    """What a demo started and made, to see that it is gone afterwards."""

    def __init__(self) -> None:
        self.processes: list[int] = []
        self.folders: set[str] = set()

    def started(self, terminal: Terminal) -> list[int]:
        """The processes below the demo, and the folders that these work in."""
        self.processes = supervise.descendants(terminal.process.pid)
        for pid in self.processes:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            self.folders |= set(re.findall(r"/[\w/]+/kvs-\w+", command))
        return self.processes

    def nothing(self) -> None:
        assert self.processes
        assert not [pid for pid in self.processes if Path(f"/proc/{pid}").exists()]
        assert not [folder for folder in self.folders if Path(folder).exists()]


@pytest.fixture
def left() -> Left:
    return Left()


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    command = [sys.executable, "-m", "kvscope.cli", "demo", "--simulate"]
    started = Terminal(command)
    yield started
    started.close()


def restored(terminal: Terminal) -> bool:
    """The terminal has its settings, its first screen and its cursor back."""
    output = b"".join(data for _, data in terminal.chunks)
    screen = output.rfind(b"\x1b[?1049l") > output.rfind(b"\x1b[?1049h")
    cursor = output.rfind(b"\x1b[?25h") > output.rfind(b"\x1b[?25l")
    mouse = output.rfind(b"\x1b[?1000l") >= output.rfind(b"\x1b[?1000h")
    return screen and cursor and mouse and terminal.settings_now() == terminal.settings


def test_it_ends_in_top_which_lives_and_q_ends_all_of_it(terminal: Terminal, left: Left) -> None:
    text = terminal.wait_for(FLEET, 60)
    assert "SIMULATED" in text
    assert "label simulated" in text
    assert "waiting for engines" not in text
    assert len(left.started(terminal)) >= 5, "traffic, daemon, their supervisors, top"
    assert len(left.folders) == 1
    shown = len(terminal.chunks)
    terminal.wait_for(r"\d UTC", 20, since=shown)  # it goes on by itself
    terminal.press("q")
    assert terminal.process.wait(30) == 0
    assert "everything is gone" in terminal.written()
    assert "Traceback" not in terminal.written()
    assert restored(terminal)
    left.nothing()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_all_of_it_and_restores_the_terminal(
    terminal: Terminal, left: Left, number: signal.Signals
) -> None:
    terminal.wait_for(FLEET, 60)
    left.started(terminal)
    terminal.process.send_signal(number)
    assert terminal.process.wait(30) == 130
    assert "Traceback" not in terminal.written()
    assert restored(terminal)
    left.nothing()


def test_top_that_is_killed_leaves_a_usable_terminal(terminal: Terminal, left: Left) -> None:
    terminal.wait_for(FLEET, 60)
    (top,) = [
        pid for pid in left.started(terminal) if b"\0top\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    os.kill(top, signal.SIGKILL)
    assert terminal.process.wait(30) != 0
    assert restored(terminal)
    left.nothing()


def test_ctrl_c_while_it_starts_ends_it(left: Left) -> None:
    terminal = Terminal([sys.executable, "-m", "kvscope.cli", "demo", "--simulate"])
    try:
        terminal.wait_for("SIMULATED", 60)
        while not left.started(terminal):  # the first of them starts at once
            assert terminal.process.poll() is None
        terminal.press("\x03")
        assert terminal.process.wait(30) == 130
        left.nothing()
    finally:
        terminal.close()


def test_the_summary_can_be_had_in_a_terminal_too() -> None:
    command = [sys.executable, "-m", "kvscope.cli", "demo", "--simulate", "--requests", "6", "--no-top"]
    terminal = Terminal(command)
    try:
        assert terminal.process.wait(60) == 0
        terminal.wait_for("coordination", 5)
        assert b"\x1b[?1049h" not in b"".join(data for _, data in terminal.chunks)
    finally:
        terminal.close()


def test_a_dumb_terminal_gets_the_summary() -> None:
    command = [sys.executable, "-m", "kvscope.cli", "demo", "--simulate", "--requests", "6"]
    terminal = Terminal(command, environment={"TERM": "dumb"})
    try:
        assert terminal.process.wait(60) == 0
        assert "coordination wait" in terminal.written()
    finally:
        terminal.close()
