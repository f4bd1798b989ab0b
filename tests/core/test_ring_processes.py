"""The ring between threads and processes: full speed, kill -9, fork."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import defaultdict
from pathlib import Path

import pytest

from kvscope import events
from kvscope.ring import About, RingReader, RingWriter, ring_paths

ABOUT = About("engine-0", "worker")
THREADS, EACH = 4, 15_000
MIX = 0x9E3779B97F4A7C15 >> 1


def start(code: str, *args: object) -> subprocess.Popen[str]:
    setup = "import os, sys, threading\nfrom pathlib import Path\nfrom kvscope.ring import *\n"
    command = [sys.executable, "-c", setup + textwrap.dedent(code), *map(str, args)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


WRITING_THREADS = f"""
    sys.setswitchinterval(1e-5)
    writer = RingWriter(Path(sys.argv[1]), About("e", "worker"), slots=int(sys.argv[2]))
    print("ready", flush=True)
    sys.stdin.readline()
    def write(thread):
        for i in range({EACH}):
            writer.record(39, thread + 1, thread, i, (thread * {EACH} + i) * {MIX} % (1 << 62))
    threads = [threading.Thread(target=write, args=(n,)) for n in range({THREADS})]
    for t in threads: t.start()
    for t in threads: t.join()
    print("done", flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(("slots", "lossless"), [(65536, True), (256, False), (4096, False)])
def test_threads_at_full_speed_beside_a_reader(tmp_path: Path, slots: int, lossless: bool) -> None:
    process = start(WRITING_THREADS, tmp_path, slots)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    reader = RingReader(ring_paths(tmp_path)[0])
    process.stdin.write("go\n")
    process.stdin.flush()
    seen: dict[int, list[int]] = defaultdict(list)
    deadline = time.monotonic() + 60
    last_seq = 0
    while reader.next_seq <= THREADS * EACH and time.monotonic() < deadline:
        for event in reader.events():
            thread, i, mixed, *rest = event.args
            assert (event.kind, event.key, rest) == (39, thread + 1, [0] * 8)
            assert mixed == (thread * EACH + i) * MIX % (1 << 62)
            assert event.seq > last_seq
            last_seq = event.seq
            seen[thread].append(i)
        assert reader.writer_alive()
    process.communicate("end\n", timeout=30)
    assert reader.read + reader.lost == THREADS * EACH
    for numbers in seen.values():
        assert numbers == sorted(set(numbers))
    if lossless:
        assert reader.lost == 0
        assert {n: len(numbers) for n, numbers in seen.items()} == dict.fromkeys(range(THREADS), EACH)
    assert not reader.writer_alive()


WRITING_FOREVER = """
    import mmap, struct
    writer = RingWriter(Path(sys.argv[1]), About("e", "worker"), slots=1 << 16)
    done = mmap.mmap(os.open(sys.argv[2], os.O_RDWR), 8)
    print("ready", flush=True)
    i = 0
    while True:
        i += 1
        writer.record(39, i, i * 3)
        struct.pack_into("<Q", done, 0, i)
"""


@pytest.mark.parametrize("after_s", [0.003, 0.05, 0.3])
def test_every_event_recorded_before_a_kill_9_is_there(tmp_path: Path, after_s: float) -> None:
    progress = tmp_path / "progress"
    progress.write_bytes(bytes(8))
    process = start(WRITING_FOREVER, tmp_path, progress)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(after_s)
    assert RingReader(ring_paths(tmp_path)[0]).writer_alive()
    process.kill()
    process.wait()
    recorded = int.from_bytes(progress.read_bytes(), "little")
    reader = RingReader(ring_paths(tmp_path)[0])
    assert not reader.writer_alive()
    got = list(reader.events(1 << 20))
    assert recorded > 0
    assert recorded <= got[-1].seq <= recorded + 1
    assert [e.seq for e in got] == list(range(got[0].seq, got[0].seq + len(got)))
    # A slot that it was killed in is the oldest one's.
    assert got[0].seq == max(1, got[-1].seq - reader.slots + 1 + reader.torn)
    assert all(e.key == e.seq and e.args[0] == 3 * e.seq for e in got)
    assert reader.lost == reader.torn <= 1
    process.communicate()


def test_a_writer_killed_while_it_stands_still_is_seen_dead(tmp_path: Path) -> None:
    process = start(WRITING_THREADS, tmp_path, 64)
    assert process.stdout is not None
    process.stdout.readline()
    reader = RingReader(ring_paths(tmp_path)[0])
    process.send_signal(signal.SIGSTOP)
    assert reader.writer_alive()
    process.kill()
    process.communicate()
    assert not reader.writer_alive()
    assert list(reader.events()) == []


def test_a_forked_child_writes_nowhere_and_keeps_nothing_alive(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, ABOUT, slots=64)
    writer.record(events.LOAD_DONE, 1)
    ready, go_on = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            for i in range(200):
                writer.record(events.LOAD_DONE, 666, i)
                writer.text(f"child {i}")
            writer.stop("child")
            os.write(ready[1], b"x")
            os.read(go_on[0], 1)
        finally:
            os._exit(0)
    try:
        os.read(ready[0], 1)
        writer.record(events.LOAD_DONE, 2)
        reader = RingReader(writer.path)
        assert [e.key for e in reader.events()] == [1, 2]
        assert reader.stopped_reason() is None
        assert reader.writer_alive()
        writer.close()
        assert not reader.writer_alive()  # although the child still runs
    finally:
        os.write(go_on[1], b"x")
        assert os.waitpid(child, 0)[1] == 0
        for fd in (*ready, *go_on):
            os.close(fd)


def test_a_program_started_by_the_engine_keeps_nothing_alive(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, ABOUT, slots=64)
    reader = RingReader(writer.path)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as other:
        writer.close()
        assert not reader.writer_alive()
        other.kill()


def test_many_readers_do_not_take_each_other_for_a_writer(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, ABOUT, slots=64)
    writer.close()
    answers: list[bool] = []

    def ask() -> None:
        reader = RingReader(writer.path)
        answers.extend(reader.writer_alive() for _ in range(300))
        reader.close()

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(answers)
