"""`kvscope top` on the command line: what it refuses, what it prints where there is no terminal."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any

import pytest

from kvscope import cli
from kvscope.client import NoDaemon, StoreFile
from kvscope.tui import command
from kvscope.tui.app import Start

from .fakes import FakeSource


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("KVSCOPE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> FakeSource:
    source = FakeSource()
    monkeypatch.setattr(command, "Daemon", lambda url: source)
    return source


def complaint(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--where", "nonsense"], "is no filter"),
        (["--where", "ttf>300ms"], "no column 'ttf'; did you mean ttft_ns"),
        (["--where", "ttft>300"], "300 what? write 300ms"),
        (["--once", "--page", "stuck"], "--once prints the fleet page of one moment; leave --page away"),
        (["--json", "--speed", "2"], "--json prints the fleet page of one moment; leave --speed away"),
        (["--speed", "0"], "--speed is a number above 0"),
        (["--speed", "nan"], "--speed is a number above 0"),
        (["--window", "5 minutes"], "no duration"),
        (["--refresh", "1ms"], "from 100ms"),
        (["--url", "ftp://x"], "no URL of a daemon"),
        (["--url", "http://x", "--db", "y"], "not both"),
    ],
)
def test_what_is_asked_wrongly_is_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["top", *arguments]) == 2
    assert words in complaint(capsys)


@pytest.mark.parametrize(
    ("extent", "arguments", "at"),
    [
        ((10**18, 2 * 10**18), ["--speed", "10"], str(10**18 + 900 * 10**9)),
        ((10**18, 10**18 + 5), ["--speed", "10"], str(10**18 + 6)),
        ((10**18, 2 * 10**18), [], ""),
        ((10**18, 2 * 10**18), ["--speed", "10", "--at", "5m"], "5m"),
        (None, ["--speed", "10"], ""),
    ],
)
def test_a_file_is_played_from_its_beginning(
    extent: tuple[int, int] | None, arguments: list[str], at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class File(StoreFile):
        def __init__(self, path: Path) -> None: ...

        def span(self) -> tuple[int, int] | None:
            return extent

    started: list[Start] = []
    monkeypatch.setattr(command, "StoreFile", File)
    monkeypatch.setattr(command, "_show", lambda start: started.append(start) or 0)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    assert cli.main(["top", "--db", "x.duckdb", "--window", "15m", *arguments]) == 0
    assert [start.scope.at for start in started] == [at]


def test_a_page_that_there_is_not_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["top", "--page", "flet"])
    assert stopped.value.code == 2


def test_a_file_that_there_is_not_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--db", "/nowhere/x.duckdb"]) == 1
    assert "no such file" in complaint(capsys)


@pytest.mark.parametrize("flag", ["--once", "--json"])
def test_without_a_daemon_once_and_json_exit_with_3(
    flag: str, daemon: FakeSource, capsys: pytest.CaptureFixture[str]
) -> None:
    daemon.fails = NoDaemon("no kvscope daemon at http://127.0.0.1:9177; start one with `kvscope serve`")
    assert cli.main(["top", flag]) == 3
    assert "kvscope serve" in complaint(capsys)


@pytest.mark.parametrize("arguments", [["--once"], []], ids=["once", "no terminal"])
def test_the_fleet_page_is_printed_as_text(
    arguments: list[str], daemon: FakeSource, capsys: pytest.CaptureFixture[str]
) -> None:
    scope = ["--window", "15m", "--where", "connector=push", "--label", "bench", "--at", "10m"]
    assert cli.main(["top", *arguments, *scope]) == 0
    out = capsys.readouterr().out
    assert "readiness.detect" in out
    assert "http://127.0.0.1:9177" in out
    assert "\x1b" not in out
    asked = daemon.scopes[0]
    assert (asked.window, asked.where, asked.label, asked.at) == ("15m", ("connector=push",), "bench", "10m")
    assert daemon.closed


def test_json_is_the_frame(daemon: FakeSource, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["top", "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["answers"]["fleet"]["rows"][0][4] == 120
    assert len(found["in_flight"]) == 3


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["top", "--help"])
    out = capsys.readouterr().out
    assert "kvscope top --url" in out
    assert "--speed" in out


def in_a_terminal(*arguments: str, stderr: IO[bytes] | None = None) -> tuple[subprocess.Popen[bytes], int]:
    """The real program in a terminal, where no daemon is; it waits for one."""
    outer, inner = pty.openpty()
    env = {**os.environ, "TERM": "xterm-256color"}
    program = [sys.executable, "-m", "kvscope.cli", "top", "--url", "http://127.0.0.1:1", *arguments]
    process = subprocess.Popen(program, stdin=inner, stdout=inner, stderr=stderr or inner, env=env)
    os.close(inner)
    return process, outer


def read_until(terminal: int, words: bytes, seen: bytes = b"") -> bytes:
    deadline = time.monotonic() + 60
    while words not in seen:
        assert time.monotonic() < deadline, seen[-2000:]
        try:
            seen += os.read(terminal, 65536)
        except OSError:
            break
    return seen


def test_with_stderr_in_a_file_it_is_drawn_all_the_same(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        process, terminal = in_a_terminal(stderr=log)
    try:
        assert b"NO DAEMON" in read_until(terminal, b"NO DAEMON")
        os.write(terminal, b"q")
        assert b"\x1b[?1049l" in read_until(terminal, b"\x1b[?1049l")
        assert process.wait(30) == 0
        assert (tmp_path / "log").read_bytes() == b""
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.parametrize("ends", ["q", signal.SIGTERM, signal.SIGHUP])
def test_it_waits_for_a_daemon_and_leaves_the_terminal_as_it_was(ends: str | signal.Signals) -> None:
    process, terminal = in_a_terminal()
    try:
        seen = read_until(terminal, b"NO DAEMON")
        assert b"\x1b[?1049h" in seen
        if isinstance(ends, str):
            os.write(terminal, ends.encode())
        else:
            process.send_signal(ends)
        after = read_until(terminal, b"\x1b[?1049l")
        assert b"\x1b[?1049l" in after, "the other screen is left"
        assert b"Traceback" not in after
        assert process.wait(30) == (0 if ends == "q" else 128 + int(ends))
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
