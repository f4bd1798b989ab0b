"""Reads this host, its CPU, memory and network, and the processes that record.

Processes are read from /proc, two files each and one per thread; psutil tells of the host. What is a rate is
the difference between two readings, so the first one tells none.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from kvscope.collectors.rings import RingProcess
from kvscope.ring import SUFFIX, boot_id
from kvscope.samples import Sample
from kvscope.text import printable

MAX_THREAD_NAMES = 16
"""Per process; the least busy go together as `other`."""
ALWAYS_TOLD = ("nixl-push-write", "nixl-handshake")
"""Threads of vLLM's connector (named by ours): told when idle too."""
MAX_DEVICES = 8
"""Network devices, those that have moved most; InfiniBand ports likewise."""
MAX_THREADS = 4096
"""Of one process; more are not looked at."""
PROC = Path("/proc")
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")

_NUMBERED = re.compile(r"[-_/:#.]\d+$")
"""What tells the threads of a pool apart."""


class Stat(NamedTuple):
    """A process or a thread at one moment."""

    name: str
    parent: int
    ticks: int
    """CPU time used."""
    threads: int
    started: int
    """Ticks since boot: with the pid, this names a process."""
    rss_pages: int


class Thread(NamedTuple):
    """A thread at one moment."""

    name: str
    ticks: int
    """CPU time used."""
    started: int
    """Ticks since boot."""


class _Reading(NamedTuple):
    at_s: float
    stat: Stat
    switches: tuple[int, int] | None
    """Voluntary and involuntary."""
    boot_ticks: float
    """The same moment, in ticks since boot."""
    threads: dict[int, Thread]
    """By thread id."""


class Host:
    """What the sampler asks for the host and the processes that record on it."""

    def __init__(self, infiniband: Path = Path("/sys/class/infiniband")) -> None:
        self._infiniband = infiniband
        self._name = platform.node()
        self._boot_id = boot_id()
        self._checked: dict[tuple[Path, int], int] = {}
        """Ring and pid -> start of the process that was found to hold the ring open."""
        self._readings: dict[int, _Reading] = {}
        """Of this round, by pid."""
        self._before: dict[int, _Reading] = {}
        """Of the one before."""
        self._host_before: tuple[float, float, dict[str, tuple[int, int]]] | None = None
        """When (s), CPU seconds, bytes received and sent by device."""

    def read(self, at_ns: int, processes: list[RingProcess]) -> Iterator[Sample]:
        """Samples of the host, then of each process that is of this host and is surely the ring's."""
        yield from self._host(at_ns)
        self._before, self._readings = self._readings, {}
        here = [process for process in processes if process.boot_id == self._boot_id]
        self._checked = {key: s for key, s in self._checked.items() if key in {(p.path, p.pid) for p in here}}
        for process in here:
            stat = self.process_of(process)
            if stat is not None:
                yield from self._process(at_ns, process, stat)

    # --- the host ---

    def _host(self, at_ns: int) -> Iterator[Sample]:
        def sample(name: str, value: float, label: str = "") -> Sample:
            return Sample(at_ns, self._name, "", "", 0, name, label, value)

        now_s = time.monotonic()
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0) + getattr(times, "steal", 0.0)
        # Linux counts what guests use in user and nice too.
        guests = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        used_s = sum(times) - idle - guests
        devices = self._devices()
        yield sample("host.cores", float(psutil.cpu_count() or 0))
        yield sample("host.memory_available_bytes", float(psutil.virtual_memory().available))
        running = self._running()
        if running is not None:
            yield sample("host.run_queue", float(running))
        if self._host_before is not None and now_s > self._host_before[0]:
            before_s, used_before_s, devices_before = self._host_before
            seconds = now_s - before_s
            yield sample("host.cpu", max(0.0, (used_s - used_before_s) / seconds))
            for device, (received, sent) in devices.items():
                if device in devices_before:
                    received_before, sent_before = devices_before[device]
                    if received >= received_before and sent >= sent_before:  # else it was made anew
                        yield sample(
                            "host.nic_rx_bytes_per_s", (received - received_before) / seconds, device
                        )
                        yield sample("host.nic_tx_bytes_per_s", (sent - sent_before) / seconds, device)
        self._host_before = (now_s, used_s, devices)

    def _running(self) -> int | None:
        found = re.search(rb"^procs_running (\d+)$", read_bytes(PROC / "stat", 1 << 20), re.MULTILINE)
        return max(0, int(found[1]) - 1) if found else None  # one of them is this thread

    def _devices(self) -> dict[str, tuple[int, int]]:
        """Bytes received and sent by device."""
        up = {name for name, state in psutil.net_if_stats().items() if state.isup}
        ethernet = {
            printable(name)[:64]: (count.bytes_recv, count.bytes_sent)
            for name, count in psutil.net_io_counters(pernic=True).items()
            if name in up and name != "lo"
        }
        return _busiest(ethernet) | _busiest(self._infiniband_ports())

    def _infiniband_ports(self) -> dict[str, tuple[int, int]]:
        found = {}
        for counters in sorted(self._infiniband.glob("*/ports/*/counters"))[:64]:
            with contextlib.suppress(ValueError):
                # They count words of four bytes.
                received = 4 * int(read_bytes(counters / "port_rcv_data", 64))
                sent = 4 * int(read_bytes(counters / "port_xmit_data", 64))
                port = counters.parent
                found[printable(f"{port.parent.parent.name}/{port.name}")[:64]] = (received, sent)
        return found

    # --- processes that record ---

    def process_of(self, process: RingProcess) -> Stat | None:
        """The process that writes this ring; None where its pid means another one (a container's pid, or one
        used again), or that can't be told."""
        stat = read_stat(PROC / str(process.pid))
        if stat is None:
            return None
        key = (process.path, process.pid)
        if self._checked.get(key) != stat.started:
            if not self._holds(process.pid, process.path):
                return None
            self._checked[key] = stat.started
        return stat

    def _holds(self, pid: int, path: Path) -> bool:
        try:
            ring = path.stat()
            with os.scandir(PROC / str(pid) / "fd") as files:
                for file in files:
                    with contextlib.suppress(OSError):  # closed meanwhile
                        # By its name first: what else it has open may lie on a file system that hangs.
                        if not os.readlink(file.path).removesuffix(" (deleted)").endswith(SUFFIX):
                            continue
                        if os.path.samestat(os.stat(file.path), ring):
                            return True
        except OSError:
            pass  # gone, or another user's
        return False

    def _process(self, at_ns: int, process: RingProcess, stat: Stat) -> Iterator[Sample]:
        def sample(name: str, value: float, label: str = "") -> Sample:
            return Sample(
                at_ns, process.host, process.engine, process.source, process.rank, name, label, value
            )

        reading = self._readings.get(process.pid)  # scheduler and worker may be one process
        if reading is None:
            folder = PROC / str(process.pid)
            boot_ticks = time.clock_gettime(time.CLOCK_BOOTTIME) * TICKS
            reading = _Reading(time.monotonic(), stat, _switches(folder), boot_ticks, _threads(folder))
            self._readings[process.pid] = reading
        before = self._before.get(process.pid)
        yield sample("process.rss_bytes", float(reading.stat.rss_pages * PAGE))
        if before is None or before.stat.started != stat.started or reading.at_s <= before.at_s:
            return
        seconds = reading.at_s - before.at_s
        yield sample("process.cpu", (reading.stat.ticks - before.stat.ticks) / TICKS / seconds)
        if reading.switches and before.switches:
            pairs = zip(("voluntary", "involuntary"), reading.switches, before.switches, strict=True)
            for label, now, then in pairs:
                yield sample("process.switches_per_s", (now - then) / seconds, label)
        cores = psutil.cpu_count() or 1
        for name, ticks in _by_name(reading.threads, before.threads, before.boot_ticks).items():
            yield sample("thread.cpu", min(ticks / TICKS / seconds, cores), name)


def read_stat(folder: Path) -> Stat | None:
    """/proc/PID/stat or /proc/PID/task/TID/stat; None when it is gone."""
    line = read_bytes(folder / "stat", 4096)
    name, _, rest = line.partition(b"(")[2].rpartition(b")")  # the name itself may hold brackets
    fields = rest.split()
    if len(fields) < 22:
        return None
    return Stat(
        name.decode("utf-8", "replace"),
        parent=int(fields[1]),
        ticks=int(fields[11]) + int(fields[12]),
        threads=int(fields[17]),
        started=int(fields[19]),
        rss_pages=int(fields[21]),
    )


def _threads(folder: Path) -> dict[int, Thread]:
    found = {}
    try:
        ids = os.listdir(folder / "task")
    except OSError:
        return {}
    for thread in ids[:MAX_THREADS]:
        # Not `read_stat`: engines have hundreds of threads, and few numbers are wanted.
        line = read_bytes(f"{folder}/task/{thread}/stat", 512)
        end = line.rfind(b")")
        fields = line[end + 2 :].split(b" ", 20)
        if len(fields) > 19:
            name = line[line.find(b"(") + 1 : end].decode("utf-8", "replace")
            found[int(thread)] = Thread(name, int(fields[11]) + int(fields[12]), int(fields[19]))
    return found


def _by_name(threads: dict[int, Thread], before: dict[int, Thread], since_ticks: float) -> Counter[str]:
    """CPU ticks used between two readings by name of thread, idle ones left out.

    One that the first, at `since_ticks` since boot, does not have counts only if it began later.
    """
    used: Counter[str] = Counter()
    if not before:
        return used  # they could not be read
    for thread, (name, ticks, started) in threads.items():
        name = printable(_NUMBERED.sub("", name) or name)
        known = before.get(thread)
        if known is None and started < int(since_ticks):
            continue
        then = 0 if known is None or known.started != started else known.ticks
        if ticks > then or name in ALWAYS_TOLD:
            used[name] += max(0, ticks - then)
    if len(used) > MAX_THREAD_NAMES:
        kept = [name for name in ALWAYS_TOLD if name in used]
        kept += [name for name, _ in used.most_common() if name not in kept][
            : MAX_THREAD_NAMES - 1 - len(kept)
        ]
        rest = sum(ticks for name, ticks in used.items() if name not in kept)
        used = Counter({name: used[name] for name in kept} | {"other": rest})
    return used


def _switches(folder: Path) -> tuple[int, int] | None:
    """Of the process's main thread, which steps the engine."""
    status = read_bytes(folder / "status", 16384)
    found = re.findall(rb"^(?:non)?voluntary_ctxt_switches:\s*(\d+)$", status, re.MULTILINE)
    return (int(found[0]), int(found[1])) if len(found) == 2 else None


def _busiest(devices: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    order = sorted(devices, key=lambda name: (-sum(devices[name]), name))
    return {name: devices[name] for name in order[:MAX_DEVICES]}


def read_bytes(path: Path | str, limit: int) -> bytes:
    """Up to `limit` bytes of a small file; empty when it can't be read."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, limit)
    except OSError:
        return b""
    finally:
        os.close(file)
