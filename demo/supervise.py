"""Runs one program so that nothing of it survives: neither a clean stop nor a kill -9 of whoever started it.

`start` runs it as `python -I supervise.py GRACE_SECONDS COMMAND...`. Its standard input is the life line:
while the pipe is open the program lives, a closed pipe (the starter stopped it, or died of anything)
ends it. As a sub-reaper it also owns the processes whose parents died. Standard library only: it must
start in a moment and need nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# What vLLM, torch and UCX leave in /dev/shm when killed. Never a recorder's ring: those outlive crashes.
SHARED_MEMORY_PREFIXES = ("psm_", "ucx_shm_posix_", "sem.mp-", "torch_", "gloo_", "nixl_")


def start(
    command: Sequence[str],
    grace_s: float,
    log: Path,
    *,
    answers: bool = False,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Run a program under this one, in a session of its own, so that a terminal's Ctrl-C passes it by.

    Args:
        command: The program and its arguments.
        grace_s: What it gets after SIGTERM before all of it is killed.
        log: What it writes goes to the end of this file.
        answers: Its standard output can be read from the process returned; only its errors go to the log.
        folder: Where it runs; by default where `python -m kvscope...` finds this kvscope.
        environment: Instead of this process's own.
    """
    started: list[subprocess.Popen[bytes]] = []
    try:
        with log.open("ab") as output, signals_held():
            started.append(
                subprocess.Popen(
                    [sys.executable, "-I", __file__, str(grace_s), *command],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE if answers else output,
                    stderr=output,
                    cwd=folder or Path(__file__).resolve().parents[1],
                    env=environment,
                    start_new_session=True,
                )
            )
    except BaseException:
        for supervisor in started:
            stop(supervisor)
        raise
    return started[0]


@contextlib.contextmanager
def signals_held() -> Iterator[None]:
    """Ctrl-C and its like come when this ends: not while a program is begun that could not be ended yet."""
    held: list[int] = []
    before = {}
    if threading.current_thread() is threading.main_thread():  # signals are no other thread's business
        for number in ENDING:
            if callable(handler := signal.getsignal(number)):
                before[number] = handler
                signal.signal(number, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        signal.raise_signal(held[0])


def cut(supervisor: subprocess.Popen[bytes]) -> None:
    """Let a started program end, without waiting for it. May be called twice."""
    if supervisor.stdin:
        supervisor.stdin.close()


def stop(supervisor: subprocess.Popen[bytes]) -> None:
    """End a started program; returns when nothing of it is left. May be called twice."""
    cut(supervisor)
    supervisor.wait()
    if supervisor.stdout:
        supervisor.stdout.close()


def descendants(root: int) -> list[int]:
    """Every live process below `root`, parents before children; zombies left out."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            stat = Path("/proc", entry, "stat").read_text()
        except OSError:
            continue
        state, parent = stat.rpartition(")")[2].split()[:2]
        if state != "Z":
            children.setdefault(int(parent), []).append(int(entry))
    found: list[int] = []
    queue = [root]
    while queue:
        below = children.get(queue.pop(0), [])
        found += below
        queue += below
    return found


def shared_memory(pids: list[int]) -> set[str]:
    """Files of /dev/shm that these processes map and that nobody would miss."""
    found: set[str] = set()
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
        except OSError:
            continue
        for line in lines:
            path = line.partition("/dev/shm/")[2]
            if path.startswith(SHARED_MEMORY_PREFIXES) and not path.endswith(" (deleted)"):
                found.add("/dev/shm/" + path)
    return found


def _reap() -> bool:
    """Collect the dead. False when no process is left, dead or alive."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _wait_for_none(seconds: float, leftovers: set[str]) -> bool:
    """Wait until no process is left; collects the shared memory of those that end meanwhile."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not _reap():
            return True
        leftovers |= shared_memory(descendants(os.getpid()))
        time.sleep(0.05)
    return False


def _kill_all(leftovers: set[str]) -> None:
    while True:
        alive = descendants(os.getpid())
        _signal(alive, signal.SIGSTOP)  # frozen, they can't start or map anything more while we look
        leftovers |= shared_memory(alive)
        _signal(alive, signal.SIGKILL)
        if _wait_for_none(0.5, leftovers):
            return


def main(arguments: list[str]) -> None:
    grace_s, command = float(arguments[0]), arguments[1:]
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)

    def in_child() -> None:
        for number in ENDING:
            signal.signal(number, signal.SIG_DFL)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    engine = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=in_child)
    leftovers: set[str] = set()
    while True:
        readable, _, _ = select.select([0], [], [], 0.5)
        if not _reap() or (readable and not os.read(0, 64)):
            break
        if readable:  # "the engine is up": what a process maps can't be asked after it was killed
            leftovers |= shared_memory(descendants(os.getpid()))
    alive = descendants(os.getpid())
    leftovers |= shared_memory(alive)
    _signal([pid for pid in alive if pid == engine.pid], signal.SIGTERM)
    if not _wait_for_none(grace_s, leftovers):
        _kill_all(leftovers)
    for path in leftovers:
        Path(path).unlink(missing_ok=True)


if __name__ == "__main__":
    main(sys.argv[1:])
