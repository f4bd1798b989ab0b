"""The flight recorder on its own: what is recorded is what is read, and what is missing is counted."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope import events, ring
from kvscope.errors import KvscopeError
from kvscope.events import MAX_TEXT_BYTES, text_key
from kvscope.ring import About, RingError, RingReader, RingWriter, remove_dead_rings, ring_paths

ABOUT = About("engine-0", "worker", rank=3, label="bench", fingerprint={"vllm": "0.32.0", "sizes": [1, 2]})


def write_slot(path: Path, seq: int, slots: int, data: bytes, at: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(ring.HEADER_BYTES + seq % slots * ring.SLOT_BYTES + at)
        file.write(data)


def read_slot(path: Path, seq: int, slots: int) -> bytes:
    with path.open("rb") as file:
        file.seek(ring.HEADER_BYTES + seq % slots * ring.SLOT_BYTES)
        return file.read(ring.SLOT_BYTES)


class FakeClock:
    def __init__(self) -> None:
        self.now_ns = 5_000_000_000

    def __call__(self) -> int:
        return self.now_ns


@pytest.fixture
def writer(tmp_path: Path) -> Iterator[RingWriter]:
    made = RingWriter(tmp_path, ABOUT, slots=64)
    yield made
    made.close()


# --- what comes back -----------------------------------------------------------------------------


def test_events_come_back_as_recorded(writer: RingWriter) -> None:
    writer.record(events.LOAD_DONE, 7)
    writer.record(events.TRANSFER_DONE, (1 << 63) - 1, *range(-4, 4))
    writer.record(65535, 0, -(1 << 63), (1 << 63) - 1, *range(9))
    reader = RingReader(writer.path)
    got = list(reader.events())
    assert [(e.seq, e.kind, e.key) for e in got] == [(1, 39, 7), (2, 38, (1 << 63) - 1), (3, 65535, 0)]
    assert got[0].args == (0,) * 11
    assert got[1].args == (*range(-4, 4), 0, 0, 0)
    assert got[2].args == (-(1 << 63), (1 << 63) - 1, *range(9))
    assert got[0].t_ns <= got[1].t_ns <= got[2].t_ns
    assert (reader.read, reader.lost, reader.torn) == (3, 0, 0)
    assert list(reader.events()) == []


def test_the_header_tells_who_writes(writer: RingWriter) -> None:
    reader = RingReader(writer.path)
    assert reader.about == ABOUT
    assert (reader.pid, reader.slots, reader.ring_id) == (os.getpid(), 64, writer.ring_id)
    assert reader.writer_alive()
    assert reader.stopped_reason() is None


@pytest.mark.parametrize("size", [1, 2, 87, 88, 89, 176, 1023, 1024, 1025, 5000])
def test_texts_come_back_whole_and_at_most_1_kib_of_them(writer: RingWriter, size: int) -> None:
    text = ("0123456789abcdef" * 400)[:size]
    key = writer.text(text)
    writer.record(events.READ_EXPIRED, key)
    reader = RingReader(writer.path)
    assert [e.key for e in reader.events()] == [key] == [text_key(text)]
    assert reader.texts == {key: text[:MAX_TEXT_BYTES]}


def test_a_text_of_any_size_is_remembered_cut(writer: RingWriter) -> None:
    key = writer.text("é" * 1_000_000)
    assert key == writer.text("é" * 1_000_000) == text_key("é" * 1_000_000)
    assert [len(text) for text in writer._texts] == [MAX_TEXT_BYTES]


def test_no_text_has_key_0(writer: RingWriter) -> None:
    assert writer.text(None) == writer.text("") == 0
    assert list(RingReader(writer.path).events()) == []


@pytest.mark.parametrize("text", ["\ud800half a pair", "naïve-𝄞-request", "é" * 600, "a\0b\nc\x1b[31m"])
def test_texts_outside_ascii_never_raise(writer: RingWriter, text: str) -> None:
    key = writer.text(text)
    reader = RingReader(writer.path)
    list(reader.events())
    cut = text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
    assert reader.texts == {key: cut.decode("utf-8", "replace")}


def test_a_known_text_is_not_written_again_while_it_is_fresh(writer: RingWriter) -> None:
    assert writer.text("engine-1") == writer.text("engine-1")
    reader = RingReader(writer.path)
    list(reader.events())
    assert reader.read == 1


def test_a_text_is_there_for_whoever_joins_after_it_was_lapped(writer: RingWriter) -> None:
    for _ in range(1000):
        writer.record(events.LOAD_STARTED, 1, writer.text("engine-1"))
    reader = RingReader(writer.path)
    first = next(reader.events())
    for _ in reader.events():
        pass
    assert first.args[0] == text_key("engine-1")
    assert reader.texts == {text_key("engine-1"): "engine-1"}


def test_two_long_texts_in_turns_do_not_mix(writer: RingWriter) -> None:
    # As two threads would: the pieces of one between those of the other.
    one, two = "1" * 200, "2" * 200
    for text in (one, two):
        writer.text(text)
    slots = {seq: read_slot(writer.path, seq, 64) for seq in range(1, 7)}
    for seq, came_from in zip(range(1, 7), (1, 4, 2, 5, 3, 6), strict=True):
        body = slots[came_from][:112]
        write_slot(writer.path, seq, 64, body + struct.pack("<IIQ", ring.zlib.crc32(body, seq), 0, seq))
    reader = RingReader(writer.path)
    list(reader.events())
    assert reader.texts == {text_key(one): one, text_key(two): two}


def test_many_unfinished_texts_push_out_the_oldest_only(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, ABOUT, slots=8192)
    for i in range(1500):
        writer.text(f"{i:0200d}")
    # The last pieces of the first 1100 texts are gone.
    for i in range(1100):
        write_slot(writer.path, 3 * i + 3, 8192, bytes(128))
    writer.close()
    reader = RingReader(writer.path)
    list(reader.events())
    assert len(reader.texts) == 400
    assert reader.lost == 1100
    assert len(reader._pieces) <= ring._OPEN_TEXTS


def test_arguments_that_do_not_fit_raise_and_leave_no_hole(writer: RingWriter) -> None:
    for bad in ((1 << 63,), ("text",), tuple(range(12)), (1.5,)):
        with pytest.raises((struct.error, IndexError)):
            writer.record(events.LOAD_DONE, 1, *bad)  # type: ignore[arg-type]
    with pytest.raises(struct.error):
        writer.record(events.LOAD_DONE, -1)
    writer.record(events.LOAD_DONE, 5)
    reader = RingReader(writer.path, next_seq=1)
    assert [e.key for e in reader.events()] == [5]
    assert reader.lost == 0


# --- lapping -------------------------------------------------------------------------------------


def test_a_reader_that_was_away_loses_exactly_what_was_overwritten(writer: RingWriter) -> None:
    reader = RingReader(writer.path)
    for i in range(1, 501):
        writer.record(events.LOAD_DONE, i)
    assert [e.key for e in reader.events()] == list(range(437, 501))
    assert (reader.read, reader.lost, reader.torn) == (64, 436, 0)


def test_a_new_reader_starts_at_the_oldest_and_has_lost_nothing(writer: RingWriter) -> None:
    for i in range(1, 501):
        writer.record(events.LOAD_DONE, i)
    reader = RingReader(writer.path)
    assert [e.key for e in reader.events()] == list(range(437, 501))
    assert reader.lost == 0


def test_a_reader_goes_on_where_another_stopped(writer: RingWriter) -> None:
    for i in range(1, 31):
        writer.record(events.LOAD_DONE, i)
    first = RingReader(writer.path)
    assert len(list(first.events(limit=10))) == 10
    second = RingReader(writer.path, next_seq=first.next_seq)
    assert [e.key for e in second.events()] == list(range(11, 31))


def test_a_reader_at_the_heels_of_a_faster_writer_gets_away(writer: RingWriter) -> None:
    reader, written = RingReader(writer.path), 0
    for _ in range(50):
        for _ in range(80):
            written += 1
            writer.record(events.LOAD_DONE, written)
        list(reader.events(limit=4))
    list(reader.events())
    assert reader.read + reader.lost == written
    assert reader.read > 100


def test_numbers_beyond_32_bits(writer: RingWriter) -> None:
    # 2**32 events are three weeks at full load.
    numbers = iter(range((1 << 32) - 20, 1 << 33))
    writer._next_seq = numbers.__next__
    for i in range(40):
        writer.record(events.LOAD_DONE, i)
    reader = RingReader(writer.path, next_seq=(1 << 32) - 20)
    assert [e.key for e in reader.events()] == list(range(40))
    assert reader.lost == 0


# --- torn and abandoned slots ----------------------------------------------------------------------


@pytest.mark.parametrize("torn_bytes", [1, 8, 64, 112, 116, 120])
def test_a_slot_torn_by_a_killed_writer_is_counted_once(tmp_path: Path, torn_bytes: int) -> None:
    writer = RingWriter(tmp_path, ABOUT, slots=64)
    for i in range(1, 100):
        writer.record(events.LOAD_DONE, i)
    before = read_slot(writer.path, 100, 64)
    writer.record(events.LOAD_DONE, 100)
    after = read_slot(writer.path, 100, 64)
    writer.close()
    # `pack_into` clears its target first.
    write_slot(writer.path, 100, 64, after[:torn_bytes] + bytes(128 - torn_bytes))
    assert before != after
    reader = RingReader(writer.path, next_seq=36)
    assert [e.key for e in reader.events()] == list(range(37, 100))
    assert (reader.read, reader.lost) == (63, 2)  # 36 was overwritten, 100 is torn
    assert reader.torn >= 1
    assert list(reader.events()) == []


def test_the_slot_at_which_the_writer_was_stopped_is_waited_for(writer: RingWriter) -> None:
    writer.record(events.LOAD_DONE, 1)
    writer.record(events.LOAD_DONE, 2)
    whole = read_slot(writer.path, 2, 64)
    write_slot(writer.path, 2, 64, bytes(128))
    clock = FakeClock()
    reader = RingReader(writer.path, clock=clock)
    assert [e.key for e in reader.events()] == [1]
    write_slot(writer.path, 2, 64, whole[:100])
    clock.now_ns += 10 * ring.ABANDONED_SLOT_NS
    assert list(reader.events()) == []
    clock.now_ns += 10 * ring.ABANDONED_SLOT_NS
    assert list(reader.events()) == []
    write_slot(writer.path, 2, 64, whole)
    assert [e.key for e in reader.events()] == [2]
    assert (reader.lost, reader.torn) == (0, 0)


def test_a_damaged_slot_is_lost_once_later_ones_are_there(writer: RingWriter) -> None:
    clock = FakeClock()
    reader = RingReader(writer.path, clock=clock)
    writer.record(events.LOAD_DONE, 1)
    write_slot(writer.path, 1, 64, b"\x7f", at=30)
    writer.record(events.LOAD_DONE, 2)
    assert list(reader.events()) == []
    clock.now_ns += ring.ABANDONED_SLOT_NS
    assert [e.key for e in reader.events()] == [2]
    assert (reader.read, reader.lost, reader.torn) == (1, 1, 1)


def test_an_abandoned_number_is_lost_after_the_grace_and_not_before(writer: RingWriter) -> None:
    clock = FakeClock()
    reader = RingReader(writer.path, clock=clock)
    writer.record(events.LOAD_DONE, 1)
    writer._next_seq()  # a thread took number 2 and died
    writer.record(events.LOAD_DONE, 3)
    assert [e.seq for e in reader.events()] == [1]
    clock.now_ns += ring.ABANDONED_SLOT_NS - 1
    assert list(reader.events()) == []
    clock.now_ns += 1
    assert [e.seq for e in reader.events()] == [3]
    assert (reader.read, reader.lost, reader.torn) == (2, 1, 0)


def test_an_abandoned_number_of_a_dead_process_is_lost_at_once(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, ABOUT, slots=64)
    writer.record(events.LOAD_DONE, 1)
    for _ in range(70 - 1):
        writer._next_seq()
    writer.record(events.LOAD_DONE, 71)
    writer.close()
    reader = RingReader(writer.path, next_seq=1)
    assert [e.seq for e in reader.events()] == [1, 71]
    assert (reader.read, reader.lost) == (2, 69)


def test_a_dead_ring_full_of_holes_is_read_in_no_time(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, ABOUT, slots=1 << 16)
    for _ in range(1 << 16):
        writer._next_seq()
    writer.record(events.LOAD_DONE, 1)
    writer.close()
    reader = RingReader(writer.path)
    looks = []
    look = reader._newest_seq
    reader._newest_seq = lambda: looks.append(1) or look()  # type: ignore[method-assign, func-returns-value]
    assert [e.key for e in reader.events(1 << 20)] == [1]
    assert len(looks) == 1
    assert reader.read + reader.lost == reader.next_seq - 2


def test_the_last_events_before_a_death_are_not_missed(writer: RingWriter) -> None:
    # They are written after the reader looked and before it asks whether the writer lives.
    reader = RingReader(writer.path, next_seq=1)
    writer.record(events.LOAD_DONE, 1)
    alive = reader.writer_alive

    def die_when_asked() -> bool:
        if alive():
            writer.record(events.LOAD_DONE, 2)
            writer.close()
        return alive()

    reader.writer_alive = die_when_asked  # type: ignore[method-assign]
    assert [e.key for e in reader.events()] == [1, 2]
    assert reader.lost == 0


def test_a_slow_thread_that_overwrites_a_newer_event_is_counted(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, ABOUT, slots=64)
    writer.record(events.LOAD_DONE, 1)
    late = read_slot(writer.path, 1, 64)
    for i in range(2, 101):
        writer.record(events.LOAD_DONE, i)
    writer.close()
    write_slot(writer.path, 1, 64, late)  # number 65 gone, 1 back
    reader = RingReader(writer.path, next_seq=1)
    got = [e.seq for e in reader.events()]
    assert got == [1, *range(37, 65), *range(66, 101)]
    assert reader.read + reader.lost == 100


# --- stop and close ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "seen"), [("disk on fire", "disk on fire"), ("", "unknown"), ("x" * 900, "x" * 504)]
)
def test_the_reason_of_a_stop_is_read_back(writer: RingWriter, reason: str, seen: str) -> None:
    reader = RingReader(writer.path)
    writer.stop(reason)
    assert reader.stopped_reason() == seen


def test_closing_twice_is_harmless(writer: RingWriter) -> None:
    reader = RingReader(writer.path)
    for closable in (writer, reader):
        closable.close()
        closable.close()


def test_a_closed_writer_is_not_alive_and_its_events_stay(writer: RingWriter) -> None:
    writer.record(events.LOAD_DONE, 1)
    reader = RingReader(writer.path)
    writer.close()
    assert not reader.writer_alive()
    assert [e.key for e in reader.events()] == [1]


# --- making a ring -------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [0, 63, ring.MAX_SLOTS + 1, -1])
def test_sizes_out_of_range_are_refused(tmp_path: Path, slots: int) -> None:
    with pytest.raises(KvscopeError, match="64 to 4194304 slots"):
        RingWriter(tmp_path, ABOUT, slots=slots)
    assert list(tmp_path.iterdir()) == []


def test_a_fingerprint_too_large_for_the_header_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvscopeError, match="too many for a ring"):
        RingWriter(tmp_path, About("e", "worker", fingerprint={"x": "y" * 16384}))
    assert list(tmp_path.iterdir()) == []


def test_two_writers_share_a_directory(tmp_path: Path) -> None:
    writers = [RingWriter(tmp_path / "rings", ABOUT, slots=64) for _ in range(2)]
    for i, writer in enumerate(writers):
        writer.record(events.LOAD_DONE, i)
    paths = ring_paths(tmp_path / "rings")
    assert sorted(paths) == sorted(w.path for w in writers)
    assert [[e.key for e in RingReader(w.path).events()] for w in writers] == [[0], [1]]
    assert (tmp_path / "rings").stat().st_mode & 0o777 == 0o700
    assert {p.stat().st_mode & 0o777 for p in paths} == {0o600}
    for writer in writers:
        writer.close()


def test_a_file_in_place_of_the_directory(tmp_path: Path) -> None:
    (tmp_path / "rings").write_text("")
    with pytest.raises(KvscopeError, match="is not a directory"):
        RingWriter(tmp_path / "rings", ABOUT)
    with pytest.raises(KvscopeError, match="is not a directory"):
        ring_paths(tmp_path / "rings")


def test_a_full_tmpfs_is_an_error_when_the_ring_is_made(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(small)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("can't mount a tmpfs here")
    try:
        with pytest.raises(KvscopeError, match="no room for a ring of 144 KiB"):
            RingWriter(small, ABOUT, slots=1024)
        assert list(small.iterdir()) == []
        RingWriter(small, ABOUT, slots=64).close()
    finally:
        subprocess.run(["umount", str(small)], check=True)


def as_nobody(code: str) -> str:
    """What `code` prints when it runs without root's rights."""
    setup = "import os\nfrom pathlib import Path\nfrom kvscope.ring import *\nfrom kvscope.errors import *\n"
    drop = "os.setuid(65534)\n" if os.getuid() == 0 else ""
    command = [sys.executable, "-c", setup + drop + textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_no_permission_is_one_clear_line(writer: RingWriter, tmp_path: Path) -> None:
    for path in (writer.path, tmp_path):
        path.chmod(0)
    got = as_nobody(f"""
        for what in (
            lambda: RingWriter(Path({str(tmp_path)!r}) / "rings", About("e", "worker")),
            lambda: ring_paths(Path({str(tmp_path)!r})),
            lambda: RingReader(Path({str(writer.path)!r})),
        ):
            try:
                what()
            except KvscopeError as error:
                print(error)
    """)
    tmp_path.chmod(0o700)
    lines = got.splitlines()
    assert len(lines) == 3
    assert all(line.startswith(("no permission", str(writer.path))) for line in lines), lines


@pytest.mark.skipif(os.getuid() != 0, reason="needs two users")
def test_a_directory_that_another_user_made_first_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)
    trap = tmp_path / "kvscope-0"
    trap.mkdir(mode=0o777)
    os.chown(trap, 65534, 65534)
    with pytest.raises(KvscopeError, match="belongs to another user"):
        RingWriter(trap, ABOUT)


# --- rings of dead processes ---------------------------------------------------------------------------


def dead_ring(directory: Path, age_s: int) -> Path:
    writer = RingWriter(directory, ABOUT, slots=64)
    writer.close()
    os.utime(writer.path, (1e9 - age_s, 1e9 - age_s))
    return writer.path


def test_only_the_oldest_dead_rings_are_removed(tmp_path: Path) -> None:
    live = RingWriter(tmp_path, ABOUT, slots=64)
    os.utime(live.path, (1, 1))
    old_version = dead_ring(tmp_path, 900)
    with old_version.open("r+b") as file:
        file.seek(8)
        file.write(b"\xff\x7f")
    os.utime(old_version, (1e9 - 900, 1e9 - 900))
    dead = [dead_ring(tmp_path, age_s) for age_s in range(5)]
    foreign = tmp_path / "notes.ring"
    foreign.write_text("not a ring")
    (tmp_path / "loose.ring").symlink_to("nowhere")
    remove_dead_rings(tmp_path, keep=3)
    assert [p.exists() for p in dead] == [True, True, True, False, False]
    assert not old_version.exists()
    assert live.path.exists()
    assert foreign.exists()
    live.close()


def test_a_new_writer_leaves_64_dead_rings(tmp_path: Path) -> None:
    dead = [dead_ring(tmp_path, age_s) for age_s in range(70)]
    writer = RingWriter(tmp_path, ABOUT, slots=64)
    assert [p.exists() for p in dead] == [True] * 64 + [False] * 6
    assert writer.path.exists()
    writer.close()


def test_drafts_of_killed_writers_are_removed_once_they_are_old(tmp_path: Path) -> None:
    old, new = tmp_path / "worker-1-aaaaaaaa.draft", tmp_path / "worker-2-bbbbbbbb.draft"
    old.write_bytes(bytes(100))
    new.write_bytes(bytes(100))
    os.utime(old, (1, 1))
    remove_dead_rings(tmp_path, keep=3)
    assert not old.exists()
    assert new.exists()


def test_a_ring_that_goes_while_the_directory_is_listed_hides_no_other(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path, ABOUT, slots=64)
    (tmp_path / "gone.ring").symlink_to("nowhere")
    assert writer.path in ring_paths(tmp_path)
    assert ring_paths(tmp_path / "missing") == []
    writer.close()


# --- files that are no rings -----------------------------------------------------------------------------


def no_ring(path: Path, kind: str) -> None:
    if kind == "symlink":
        path.symlink_to("/etc/hostname")
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "empty":
        path.touch()
    elif kind == "text":
        path.write_text("hello\n" * 10000)
    elif kind == "sparse":
        with path.open("wb") as file:
            file.truncate(1 << 40)
    elif kind == "device":
        try:
            os.mknod(path, 0o020666, os.makedev(1, 5))
        except PermissionError:
            pytest.skip("can't make a device here")


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "empty", "text", "sparse", "device"])
def test_other_things_in_the_directory_are_refused_with_their_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.ring"
    no_ring(path, kind)
    with pytest.raises(RingError, match=rf"^{path}: not a (regular file|kvscope ring); move it out"):
        RingReader(path)


def test_a_ring_of_another_version_names_both(writer: RingWriter) -> None:
    with writer.path.open("r+b") as file:
        file.seek(8)
        file.write(struct.pack("<H", 77))
    with pytest.raises(RingError, match="ring version 77, this kvscope reads"):
        RingReader(writer.path)


def forged_header(path: Path, about: bytes = b'{"engine_id":"e","source":"worker"}', **changed: int) -> None:
    """A header with a checksum that holds, whatever it claims."""
    claims = {"slot_bytes": 128, "slots": 64, "about_bytes": len(about)} | changed
    sizes = (claims["slot_bytes"], claims["slots"])
    fixed = ring._HEADER.pack(ring.MAGIC, events.VERSION, *sizes, bytes(16), 1, claims["about_bytes"], 0, 0)
    crc = struct.pack("<I", ring.zlib.crc32(about, ring.zlib.crc32(fixed)))
    data = (fixed + crc + about).ljust(ring.HEADER_BYTES, b"\0") + bytes(64 * 128)
    path.write_bytes(data)


@pytest.mark.parametrize(
    "changed",
    [
        {"slots": 65}, {"slots": 0}, {"slots": 63}, {"slots": ring.MAX_SLOTS}, {"slots": 0xFFFFFFFF},
        {"slot_bytes": 0}, {"slot_bytes": 256}, {"about_bytes": 0xFFFFFFFF}, {"about_bytes": 16000},
    ],
)  # fmt: skip
def test_headers_that_claim_what_is_not_there(tmp_path: Path, changed: dict[str, int]) -> None:
    path = tmp_path / "x.ring"
    forged_header(path, **changed)
    with pytest.raises(RingError, match="can't be read"):
        RingReader(path)


@pytest.mark.parametrize(
    "about",
    [
        b"",
        b"[]",
        b"{}",
        b"null",
        b'{"engine_id":1,"source":"worker"}',
        b'{"engine_id":"\xff","source":"worker"}',
        b'{"engine_id":"e","source":"worker","rank":-1}',
        b'{"engine_id":"' + b"e" * 2000 + b'","source":"worker"}',
        b'{"engine_id":"e","source":"w","fingerprint":{"x":' + b"[" * 7000 + b"]" * 7000 + b"}}",
    ],
)
def test_headers_with_a_hostile_description(tmp_path: Path, about: bytes) -> None:
    path = tmp_path / "x.ring"
    forged_header(path, about)
    with pytest.raises(RingError, match="header is not valid"):
        RingReader(path)


@pytest.mark.parametrize(
    "size", [0, 7, 8, 100, ring.HEADER_BYTES - 1, ring.HEADER_BYTES, ring.HEADER_BYTES + 64 * 128 - 1]
)
def test_truncated_rings_are_refused(writer: RingWriter, size: int) -> None:
    writer.record(events.LOAD_DONE, 1)
    copy = writer.path.with_name("copy.ring")
    copy.write_bytes(writer.path.read_bytes()[:size])
    with pytest.raises(RingError, match=r"not a kvscope ring|shorter than its header says"):
        RingReader(copy)


def test_a_ring_cut_short_under_its_reader_is_an_error_and_not_a_crash(writer: RingWriter) -> None:
    for i in range(64):
        writer.record(events.LOAD_DONE, i)
    copy = writer.path.with_name("copy.ring")
    copy.write_bytes(writer.path.read_bytes())
    reader = RingReader(copy)
    os.truncate(copy, ring.HEADER_BYTES - 100)
    with pytest.raises(RingError, match="cut short"):
        list(reader.events())
    assert reader.stopped_reason() is None


def test_opening_and_refusing_leaks_no_descriptors(
    writer: RingWriter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = tmp_path / "bad.ring"
    forged_header(bad, slots=65)
    monkeypatch.setattr(ring.os, "rename", lambda old, new: os.lstat("/nowhere"))
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        RingReader(writer.path).close()
        with pytest.raises(RingError):
            RingReader(bad)
        with pytest.raises(FileNotFoundError):
            RingWriter(tmp_path, ABOUT, slots=64)
    assert len(os.listdir("/proc/self/fd")) == before
