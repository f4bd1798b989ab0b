"""The host and its processes: threads by name, pids that mean another one, servers that record nothing."""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope.collectors import host as host_module
from kvscope.collectors import unrecorded
from kvscope.collectors.host import Host, Thread
from kvscope.collectors.rings import RingProcess, Rings
from kvscope.collectors.store import Store
from kvscope.ring import boot_id
from kvscope.samples import KINDS, Sample

from .collecting import Writer, until

NOTHING = Path("/nonexistent")

BURNER = """
import sys, threading
def named(name):
    with open("/proc/thread-self/comm", "w") as comm:
        comm.write(name)
def burn():
    named(sys.argv[2])
    print("ready", flush=True)
    while True:
        pass
def sleep():
    named("sleeper")
    threading.Event().wait()
ring = open(sys.argv[1])
threading.Thread(target=sleep, daemon=True).start()
threading.Thread(target=burn, daemon=True).start()
threading.Event().wait()
"""

SERVER = """
import os, socket, sys
listening, ring, port = sys.argv[1:4]
server = socket.socket()
server.bind(("127.0.0.1", int(port)))
if listening == "listens":
    server.listen()
held = open(ring) if ring else None
if "renamed" in sys.argv and os.fork() == 0:
    os.execv(sys.executable, ["VLLM::EngineCore", "-c", "print('ready', flush=True); input()"])
if "forked" in sys.argv and os.fork() == 0:
    sys.stdin.read()  # both end with the test
    os._exit(0)
if "renamed" not in sys.argv:
    print("ready", flush=True)
sys.stdin.read()
"""


class Child:
    """A Python program with these arguments, once it said `ready`."""

    def __init__(self, program: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"


def process(ring: Path, pid: int, boot: str = "", source: str = "worker") -> RingProcess:
    ring.touch()
    return RingProcess(ring, "engine-1", source, 0, "host-1", boot or boot_id(), pid, {})


def read(host: Host, *processes: RingProcess) -> list[Sample]:
    return list(host.read(time.time_ns(), list(processes)))


def of(samples: list[Sample], name: str) -> dict[str, float]:
    """Label to value."""
    return {sample.label: sample.value for sample in samples if sample.name == name}


class TestProcesses:
    def test_thread_that_burns_is_told_by_its_name_and_an_idle_one_is_not(
        self, tmp_path: Path, start: Callable[..., Any]
    ) -> None:
        ring = process(tmp_path / "a.ring", 0)
        ring = ring._replace(pid=start(Child, BURNER, str(ring.path), "nixl-push-write").process.pid)
        host = Host(NOTHING)
        first = read(host, ring)
        assert of(first, "process.rss_bytes")[""] > 1 << 20
        assert not of(first, "process.cpu")  # a rate takes two readings
        assert not of(first, "host.cpu")
        samples = _after_burning(host, ring)
        cpu = of(samples, "thread.cpu")
        assert "sleeper" not in cpu
        # Read at two moments, under whatever load: about the same.
        assert cpu["nixl-push-write"] > of(samples, "process.cpu")[""] / 2 > 0
        assert set(of(samples, "process.switches_per_s")) == {"voluntary", "involuntary"}
        mine = [sample for sample in samples if sample.name.startswith(("process.", "thread."))]
        assert {(s.host, s.engine, s.source, s.rank) for s in mine} == {("host-1", "engine-1", "worker", 0)}
        assert all(sample.name in KINDS for sample in samples)

    def test_name_made_to_break_the_parser_is_read_and_printable(
        self, tmp_path: Path, start: Callable[..., Any]
    ) -> None:
        ring = process(tmp_path / "a.ring", 0)
        ring = ring._replace(pid=start(Child, BURNER, str(ring.path), ") R 1 (\x1b[31m").process.pid)
        host = Host(NOTHING)
        read(host, ring)
        samples = _after_burning(host, ring)
        assert of(samples, "thread.cpu")[") R 1 (\N{REPLACEMENT CHARACTER}[31m"] > 0

    def test_pid_that_means_a_process_without_the_ring_tells_nothing(
        self, tmp_path: Path, start: Callable[..., Any]
    ) -> None:
        """A pid used again, or of a container's own namespace."""
        other = start(Child, BURNER, "/dev/null", "other").process.pid
        assert not of(read(Host(NOTHING), process(tmp_path / "a.ring", other)), "process.rss_bytes")
        assert not of(read(Host(NOTHING), process(tmp_path / "a.ring", 2**31 - 1)), "process.rss_bytes")

    def test_process_that_took_over_the_pid_is_noticed_after_the_check(
        self, tmp_path: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        ring = process(tmp_path / "a.ring", 0)
        ring = ring._replace(pid=start(Child, BURNER, str(ring.path), "x").process.pid)
        other = process(tmp_path / "a.ring", start(Child, BURNER, "/dev/null", "other").process.pid)
        host = Host(NOTHING)
        assert of(read(host, ring), "process.rss_bytes")
        # The kernel gives the first one's pid to the other.
        monkeypatch.setattr(host_module, "PROC", _renamed(tmp_path, ring.pid, other.pid))
        assert not of(read(host, ring), "process.rss_bytes")

    def test_ring_of_another_host_tells_nothing(self, tmp_path: Path, start: Callable[..., Any]) -> None:
        ring = process(tmp_path / "a.ring", 0, boot="another")
        ring = ring._replace(pid=start(Child, BURNER, str(ring.path), "x").process.pid)
        assert not of(read(Host(NOTHING), ring), "process.rss_bytes")

    def test_scheduler_and_worker_in_one_process_both_tell_it(
        self, tmp_path: Path, start: Callable[..., Any]
    ) -> None:
        worker = process(tmp_path / "a.ring", 0)
        worker = worker._replace(pid=start(Child, BURNER, str(worker.path), "x").process.pid)
        host = Host(NOTHING)
        both = [worker, worker._replace(source="scheduler")]
        read(host, *both)
        samples = _after_burning(host, *both)
        cpu = {sample.source: sample.value for sample in samples if sample.name == "process.cpu"}
        assert cpu["worker"] == cpu["scheduler"] > 0

    def test_processes_of_real_rings_are_found(self, tmp_path: Path, start: Callable[..., Any]) -> None:
        writer = start(Writer, tmp_path / "rings")
        writer.write(1)
        store = Store(tmp_path / "s.duckdb")
        rings = Rings(tmp_path / "rings", store)
        rings.scan()
        # Simulated hosts have boot ids of their own.
        here = [one._replace(boot_id=boot_id()) for one in rings.processes()]
        assert {one.pid for one in here} == {writer.process.pid}
        assert len(of(read(Host(NOTHING), *here), "process.rss_bytes")) == 1
        writer.kill()
        rings.scan()
        assert rings.processes() == []
        rings.close()
        store.close()

    def test_more_names_than_are_told_go_together_and_the_writer_thread_is_kept(self) -> None:
        threads = {i: Thread(f"thread{chr(97 + i)}", 100 + i, 7) for i in range(24)}
        threads[99] = Thread("nixl-push-write", 5, 1)
        told = host_module._by_name(threads, {99: threads[99]}, 7.0)
        assert len(told) == host_module.MAX_THREAD_NAMES
        assert told["nixl-push-write"] == 0
        assert told["threadx"] == 123
        assert told["threada"] == 0
        assert sum(told.values()) == sum(100 + i for i in range(24))

    def test_threads_of_a_pool_are_told_as_one(self) -> None:
        names = {"pt_autograd_0": 3, "pt_autograd_11": 4, "ZMQbg/IO/0": 5, "python3": 6}
        threads = {i: Thread(name, ticks, 0) for i, (name, ticks) in enumerate(names.items())}
        before = {i: thread._replace(ticks=0) for i, thread in threads.items()}
        told = host_module._by_name(threads, before, 0.0)
        assert told == {"pt_autograd": 7, "ZMQbg/IO": 5, "python3": 6}

    def test_a_thread_that_was_not_read_before_is_not_charged_its_whole_life(self) -> None:
        known = Thread("main", 50, 10)
        threads = {1: known._replace(ticks=53), 2: Thread("old", 9000, 20), 3: Thread("new", 4, 130)}
        assert host_module._by_name(threads, {1: known}, 100.0) == {"main": 3, "new": 4}
        assert host_module._by_name(threads, {}, 100.0) == {}, "they could not be read before"
        again = {1: Thread("main", 2, 150)}
        assert host_module._by_name(again, {1: known}, 100.0) == {"main": 2}, "its id was used again"

    def test_threads_of_a_real_process_are_read_with_their_beginning(self) -> None:
        before = host_module._threads(Path("/proc/self"))
        go_on = threading.Event()
        thread = threading.Thread(target=go_on.wait, args=(60,))
        thread.start()
        after = host_module._threads(Path("/proc/self"))
        (new,) = after.keys() - before.keys()
        go_on.set()
        thread.join()
        assert after[new].started >= max(one.started for one in before.values())
        now = time.clock_gettime(time.CLOCK_BOOTTIME) * host_module.TICKS
        assert now - 6000 < after[new].started <= now + 1

    def test_files_of_an_engine_that_are_no_rings_are_not_asked_for(
        self, tmp_path: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They may lie on a file system that hangs."""
        ring = process(tmp_path / "a.ring", 0)
        ring = ring._replace(pid=start(Child, BURNER, str(ring.path), "x").process.pid)
        asked: list[str] = []
        stat = os.stat

        def noted(path: Any, **more: Any) -> os.stat_result:
            if isinstance(path, str) and "/fd/" in path:
                asked.append(os.readlink(path))
            return stat(path, **more)

        monkeypatch.setattr(os, "stat", noted)
        assert of(read(Host(NOTHING), ring), "process.rss_bytes")
        assert asked == [str(ring.path)]


def _after_burning(host: Host, *processes: RingProcess) -> list[Sample]:
    """The next reading, once the process has used some CPU since the last."""

    def ticks() -> int:
        stat = host_module.read_stat(Path(f"/proc/{processes[0].pid}"))
        assert stat is not None
        return stat.ticks

    before = ticks()
    until(lambda: ticks() >= before + 30)
    return read(host, *processes)


def _renamed(tmp_path: Path, pid: int, other: int) -> Path:
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / str(pid)).symlink_to(f"/proc/{other}")
    for name in ("stat", "self"):
        (proc / name).symlink_to(f"/proc/{name}")
    return proc


class TestHost:
    def test_cores_memory_and_run_queue_are_told_at_once(self) -> None:
        samples = read(Host(NOTHING))
        assert of(samples, "host.cores") == {"": os.cpu_count()}
        assert of(samples, "host.memory_available_bytes")[""] > 1 << 20
        assert of(samples, "host.run_queue")[""] >= 0
        assert not of(samples, "host.nic_rx_bytes_per_s")

    def test_cpu_in_use_is_no_more_than_there_is(self) -> None:
        host = Host(NOTHING)
        read(host)
        begin = time.process_time()
        while time.process_time() < begin + 0.2:
            pass
        cpu = of(read(host), "host.cpu")[""]
        assert 0.2 < cpu < (os.cpu_count() or 1) + 0.5

    def test_infiniband_ports_count_words_of_four_bytes(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
        counters.mkdir(parents=True)
        (tmp_path / "mlx5_1" / "ports" / "1" / "counters").mkdir(parents=True)  # without any
        (counters / "port_rcv_data").write_text("100\n")
        (counters / "port_xmit_data").write_text("50\n")
        clock = itertools.count(0.0, 2.0)
        monkeypatch.setattr(host_module, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        host = Host(tmp_path)
        read(host)
        (counters / "port_rcv_data").write_text("1000100\n")
        samples = read(host)
        assert of(samples, "host.nic_rx_bytes_per_s")["mlx5_0/1"] == 4_000_000 / 2
        assert of(samples, "host.nic_tx_bytes_per_s")["mlx5_0/1"] == 0
        assert "mlx5_1/1" not in of(samples, "host.nic_rx_bytes_per_s")

    def test_counter_that_went_back_is_no_rate(self, tmp_path: Path) -> None:
        counters = tmp_path / "mlx5_0" / "ports" / "1" / "counters"
        counters.mkdir(parents=True)
        host = Host(tmp_path)
        for value in ("100\n", "7\n"):
            (counters / "port_rcv_data").write_text(value)
            (counters / "port_xmit_data").write_text(value)
            samples = read(host)
        assert "mlx5_0/1" not in of(samples, "host.nic_rx_bytes_per_s")

    def test_no_more_devices_than_are_told_and_the_busiest_first(self) -> None:
        devices = {f"eth{i}": (i, i) for i in range(20)}
        assert sorted(host_module._busiest(devices)) == sorted(f"eth{i}" for i in range(12, 20))


NIXL = json.dumps({"kv_connector": "NixlPushConnector", "kv_role": "kv_both"})
OURS = json.dumps({"kv_connector": "NixlPushConnector", "kv_connector_module_path": "kvscope.connectors"})


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def server(start: Callable[..., Any], listening: str, ring: str, *more: str, config: str = NIXL) -> Any:
    port = str(free_port())
    arguments = ["vllm.entrypoints.openai.api_server", "--port", port, "--kv-transfer-config", config, *more]
    return start(Child, SERVER, listening, ring, port, *arguments).process


def told(process: Any) -> list[unrecorded.Unrecorded]:
    family = {process.pid, *_children(process.pid)}
    return [one for one in unrecorded.find() if one.pid in family]


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class TestServersThatRecordNothing:
    def test_server_with_nixl_and_no_ring_is_told_with_what_to_do(self, start: Callable[..., Any]) -> None:
        process = server(start, "listens", "")
        (one,) = told(process)
        assert (one.pid, one.name) == (process.pid, "vllm.entrypoints.openai.api_server")
        assert str(one).startswith(f"NOT INSTRUMENTED: process {process.pid} (")
        assert "kv_connector_module_path" in str(one)
        assert "KVSCOPE_ENABLE=1" in str(one)

    def test_engine_core_is_named_where_there_is_one(self, start: Callable[..., Any]) -> None:
        process = server(start, "listens", "", "renamed")
        (one,) = told(process)
        assert [one.pid] == _children(process.pid)
        assert one.name == "VLLM::EngineCore"

    @pytest.mark.parametrize("config", [NIXL.replace("Nixl", "LMCache"), "{}"])
    def test_server_without_nixl_is_not_told(self, start: Callable[..., Any], config: str) -> None:
        assert told(server(start, "listens", "", config=config)) == []

    def test_server_that_does_not_listen_yet_is_not_told(self, start: Callable[..., Any]) -> None:
        assert told(server(start, "starts", "")) == []

    def test_server_that_records_is_not_told_wherever_its_ring_is(
        self, start: Callable[..., Any], tmp_path: Path
    ) -> None:
        (tmp_path / "worker-7.ring").touch()
        process = server(start, "listens", str(tmp_path / "worker-7.ring"))
        assert told(process) == []
        (tmp_path / "worker-7.ring").unlink()
        assert told(process) == []

    def test_fork_with_the_same_command_line_is_told_once(self, start: Callable[..., Any]) -> None:
        process = server(start, "listens", "", "forked")
        assert len(_children(process.pid)) == 1
        assert len(told(process)) == 1

    def test_server_that_is_set_up_and_records_nothing_is_sent_to_its_log(
        self, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        by_config = server(start, "listens", "", config=OURS)
        monkeypatch.setenv("KVSCOPE_ENABLE", "1")
        for process in (by_config, server(start, "listens", "")):
            (one,) = told(process)
            assert "its log says why" in str(one)
            assert "module_path" not in str(one)

    def test_another_users_process_is_passed_over(
        self, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        process = server(start, "listens", "")

        def unreadable(path: Any) -> Any:
            raise PermissionError(path)

        monkeypatch.setattr(unrecorded.os, "scandir", unreadable)
        assert told(process) == []

    def test_hostile_command_line_is_short_and_printable(self, start: Callable[..., Any]) -> None:
        config = "--kv-transfer-config", NIXL
        arguments = ("listens", "", port := str(free_port()), "--port", port, *config)
        process = start(Child, SERVER, *arguments, "\x1b[31mvllm" + "x" * 100_000).process
        (one,) = told(process)
        assert str(one).isprintable()
        assert len(one.name) <= 40

    def test_the_look_is_not_taken_in_every_round(self, monkeypatch: pytest.MonkeyPatch) -> None:
        looks: list[int] = []
        monkeypatch.setattr(unrecorded, "find", lambda: looks.append(1) or [])
        finder = unrecorded.Finder()
        for _ in range(5):
            assert finder.read(0, []) == []
        assert len(looks) == 1
