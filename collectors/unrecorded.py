"""Finds vLLM servers of this host that move KV over NIXL and record nothing.

It says so only of what it is sure of: a command line with a NIXL transfer config, a server that listens
(before that, its rings may be still to come), and no process of it that holds a ring open. What can't be
seen, such as another user's processes, is passed over.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import NamedTuple

import psutil

from kvscope.collectors.host import PROC, read_bytes, read_stat
from kvscope.collectors.rings import RingProcess
from kvscope.ring import SUFFIX
from kvscope.samples import Sample
from kvscope.text import printable, shortened

SCAN_S = 30.0
"""Looking through all processes takes milliseconds: not in every round."""
MAX_PROCESSES = 32768
MAX_TOLD = 8
MAX_COMMAND_BYTES = 65536
TRANSFER_CONFIG = "--kv-transfer-config"

Command = tuple[str, ...]


class Unrecorded(NamedTuple):
    """A vLLM server whose engine records nothing."""

    pid: int
    """Of its EngineCore where there is one, else of the server."""
    name: str
    """Short and printable."""
    advice: str

    def __str__(self) -> str:
        return (
            f"NOT INSTRUMENTED: process {self.pid} ({self.name}) runs with NIXL and records nothing; "
            f"{self.advice}"
        )


class Finder:
    """Looks for them every `SCAN_S`."""

    def __init__(self) -> None:
        self._next_s = 0.0
        self.found: list[Unrecorded] = []

    def read(self, at_ns: int, processes: list[RingProcess]) -> list[Sample]:
        """Look again, where it is time to; a source of no samples."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + SCAN_S
            self.found = find()
        return []

    def problems(self) -> list[str]:
        return [str(one) for one in self.found]


def find() -> list[Unrecorded]:
    """Those that run now, at most `MAX_TOLD`."""
    parents, commands = _processes()
    children: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        children.setdefault(parent, []).append(pid)
    found = []
    for pid, command in sorted(commands.items()):
        # A child that was forked and not renamed yet goes by its parent's command line.
        if not _moves_kv(command) or command == commands.get(parents[pid]):
            continue
        family = [pid]
        for member in family:
            family += children.get(member, ())
        servers = [pid, *(p for p in children.get(pid, ()) if "APIServer" in commands[p][0])]
        with contextlib.suppress(OSError, psutil.Error):
            if _listen(servers, _port(command)) and not any(_records(member) for member in family):
                found.append(_told(pid, family, commands))
    return found[:MAX_TOLD]


def _processes() -> tuple[dict[int, int], dict[int, Command]]:
    """Parent and command line by pid."""
    parents, commands = {}, {}
    for name in [name for name in os.listdir(PROC) if name.isdecimal()][:MAX_PROCESSES]:
        stat = read_stat(PROC / name)
        if stat is not None:
            line = read_bytes(PROC / name / "cmdline", MAX_COMMAND_BYTES)
            parents[int(name)] = stat.parent
            commands[int(name)] = tuple(line.decode("utf-8", "replace").rstrip("\0").split("\0"))
    return parents, commands


def _moves_kv(command: Command) -> bool:
    """Whether it is of a vLLM server with a NIXL connector."""
    if not any("vllm" in word for word in command):
        return False
    for position, word in enumerate(command):
        # Its parts may be given apart (--kv-transfer-config.kv_connector NAME), and with underscores.
        if word.replace("_", "-").startswith(TRANSFER_CONFIG) and any(
            "Nixl" in part for part in command[position : position + 2]
        ):
            return True
    return False


def _port(command: Command) -> int:
    for position, word in enumerate(command):
        name, _, value = word.partition("=")
        if name == "--port":
            value = value or "".join(command[position + 1 : position + 2])
            return int(value) if value.isdecimal() else 0
    return 8000


def _listen(pids: list[int], port: int) -> bool:
    return any(
        connection.status == psutil.CONN_LISTEN and connection.laddr.port == port
        for pid in pids
        for connection in psutil.Process(pid).net_connections("tcp")
    )


def _records(pid: int) -> bool:
    """Whether it holds a ring open, this daemon's or another's. Raises OSError where that can't be seen."""
    with contextlib.suppress(FileNotFoundError), os.scandir(PROC / str(pid) / "fd") as files:
        for file in files:
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                if os.readlink(file.path).removesuffix(" (deleted)").endswith(SUFFIX):
                    return True
    return False


def _told(pid: int, family: list[int], commands: dict[int, Command]) -> Unrecorded:
    core = next((member for member in family if "EngineCore" in commands[member][0]), pid)
    environment = read_bytes(PROC / str(pid) / "environ", 1 << 20).split(b"\0")
    if b"KVSCOPE_ENABLE=1" in environment or any("kvscope" in word for word in commands[pid]):
        advice = "it is set up for kvscope: its log says why (look for `kvscope:`)"
    else:
        advice = 'add "kv_connector_module_path": "kvscope.connectors" to its config, or KVSCOPE_ENABLE=1'
    program = next(word for word in commands[pid] if "vllm" in word)
    name = commands[core][0] if core != pid else Path(program).name
    return Unrecorded(core, shortened(printable(name.strip()), 40), advice)
