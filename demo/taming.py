"""Threads of started engines, from outside: which there are, the cores they may use, and their priority."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

FRONTEND_NICE = -10


def threads(pid: int) -> dict[int, str]:
    """Thread id to its name."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):
        for entry in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                found[int(entry)] = Path(f"/proc/{pid}/task/{entry}/comm").read_text().strip()
    return found


def threads_text(pid: int) -> str:
    """One line per thread that ran: name, state, CPU seconds, allowed cores, scheduling policy."""
    lines = []
    for tid, name in threads(pid).items():
        with contextlib.suppress(OSError):
            stat = Path(f"/proc/{pid}/task/{tid}/stat").read_text().rpartition(")")[2].split()
            used_s = (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")
            lines.append(
                f"  {tid} {name} {stat[0]} {used_s:.2f}s cpus {sorted(os.sched_getaffinity(tid))} "
                f"on {stat[36]} policy {os.sched_getscheduler(tid)}"
            )
    return "\n".join(lines)


def cores_of(number: int, engines: int) -> list[int]:
    """The cores of engine `number` of `engines`: an equal share each; with fewer cores, one in turn."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[number::engines] or [cores[number % len(cores)]]


def pin(pids: Mapping[str, int], cores: Sequence[int]) -> None:
    """Bind every thread of these processes to `cores`; threads they start later inherit it."""
    for pid in pids.values():
        for tid in threads(pid):
            with contextlib.suppress(OSError):  # a thread that ended meanwhile
                os.sched_setaffinity(tid, cores)


def favour(pid: int) -> None:
    """Let a process of an HTTP hop run before the engines' waiting loops; without the right to, leave it."""
    for tid in threads(pid):
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, tid, FRONTEND_NICE)
