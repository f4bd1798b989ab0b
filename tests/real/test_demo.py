"""`kvscope demo` on real engines, ended by Ctrl-C: no process and no file stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvscope.demo import supervise

pytestmark = [pytest.mark.real, pytest.mark.timeout(300)]


def test_ctrl_c_ends_all_of_it_and_leaves_nothing() -> None:
    shared, temporary = set(os.listdir("/dev/shm")), set(os.listdir(tempfile.gettempdir()))
    command = [sys.executable, "-m", "kvscope.cli", "demo", "--mode", "pull", "--requests", "6", "--stay"]
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
    started = supervise.descendants(process.pid)
    assert len(started) >= 8, "two engines, a router, a daemon and their supervisors"
    process.send_signal(signal.SIGINT)
    rest = process.stdout.read()
    assert process.wait() == 130
    assert "everything is gone" in rest
    assert "Traceback" not in rest
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
    assert not set(os.listdir("/dev/shm")) - shared
    left = set(os.listdir(tempfile.gettempdir())) - temporary
    assert not {name for name in left if name.startswith(("kvs-", "kvscope"))}
