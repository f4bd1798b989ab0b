"""Properties of the ring: no damage and no order of calls makes it tell something that was not recorded."""

from __future__ import annotations

import itertools
import struct
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvscope import events, ring
from kvscope.events import text_key
from kvscope.ring import About, Event, RingError, RingReader, RingWriter

ABOUT = About("engine-0", "worker", rank=3, fingerprint={"vllm": "0.32.0"})
SLOTS = 64
ABOUT_END = ring._ABOUT_OFFSET + len(ring.msgspec.json.encode(ABOUT))

fast = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@contextmanager
def directory() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def read_all(reader: RingReader) -> list[Event]:
    """All events of a ring whose writer is gone."""
    got, first = [], reader.next_seq
    while chunk := list(reader.events(limit=50)):
        got += chunk
    got += reader.events()
    numbers = [event.seq for event in got]
    assert numbers == sorted(set(numbers))
    assert reader.read + reader.lost == reader.next_seq - first
    assert reader.torn <= reader.lost
    return got


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, list[Event], dict[int, str]]:
    """A lapped ring of a dead process with events of all lengths and a text of three pieces."""
    writer = RingWriter(tmp_path_factory.mktemp("rings"), ABOUT, slots=SLOTS)
    for i in range(200):
        writer.record(events.TRANSFER_DONE, i, *range(-i, -i + i % 12))
    writer.text("a request id that routers make so long that it takes more than one slot " * 3)
    for i in range(20):
        writer.record(events.LOAD_DONE, i, i)
    writer.close()
    reader = RingReader(writer.path)
    return writer.path.read_bytes(), read_all(reader), reader.texts


def damaged(path: Path, data: bytes, at: int, flip: int) -> None:
    path.write_bytes(data[:at] + bytes([data[at] ^ flip]) + data[at + 1 :])


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_every_flipped_byte_of_the_header_is_an_error(
    recorded: tuple[bytes, list[Event], dict[int, str]], tmp_path: Path, flip: int
) -> None:
    path = tmp_path / "x.ring"
    for at in range(ABOUT_END):
        damaged(path, recorded[0], at, flip)
        with pytest.raises(RingError, match=f"^{path}: "):
            RingReader(path)


def test_flipped_bytes_behind_the_header_change_nothing(
    recorded: tuple[bytes, list[Event], dict[int, str]], tmp_path: Path
) -> None:
    data, expected, texts = recorded
    path = tmp_path / "x.ring"
    for at in [ABOUT_END, ring.STATE_OFFSET - 1, *range(ring.STATE_OFFSET, ring.HEADER_BYTES, 7)]:
        damaged(path, data, at, 0xFF)
        reader = RingReader(path)
        assert reader.stopped_reason() is None
        assert read_all(reader) == expected
        assert reader.texts == texts
        reader.close()


@pytest.mark.parametrize("flip", [0x01, 0x80, 0xFF])
def test_a_flipped_byte_of_the_stop_state_never_makes_up_a_reason(tmp_path: Path, flip: int) -> None:
    writer = RingWriter(tmp_path, ABOUT, slots=SLOTS)
    writer.stop("the disk is full")
    data = writer.path.read_bytes()
    writer.close()
    for at in range(ring.STATE_OFFSET, ring.HEADER_BYTES):
        damaged(writer.path, data, at, flip)
        reader = RingReader(writer.path)
        assert reader.stopped_reason() is None
        reader.close()


def slot_numbers(recorded_events: list[Event]) -> dict[str, int]:
    return {
        "oldest": recorded_events[0].seq,
        "middle": recorded_events[20].seq,
        "text": 202,
        "newest": recorded_events[-1].seq,
    }


@pytest.mark.parametrize("flip", [0x01, 0x10, 0x80, 0xFF])
@pytest.mark.parametrize("which", ["oldest", "middle", "text", "newest"])
def test_every_flipped_byte_of_a_slot_is_one_counted_loss(
    recorded: tuple[bytes, list[Event], dict[int, str]], tmp_path: Path, which: str, flip: int
) -> None:
    data, expected, texts = recorded
    seq = slot_numbers(expected)[which]
    path = tmp_path / "x.ring"
    for at in range(ring.SLOT_BYTES):
        damaged(path, data, ring.HEADER_BYTES + seq % SLOTS * ring.SLOT_BYTES + at, flip)
        reader = RingReader(path)
        assert read_all(reader) == [event for event in expected if event.seq != seq]
        # The newest overwrote one that counts when its own number can't be read. And where the oldest was,
        # the one after the newest may have been begun: nobody can tell.
        assert reader.lost == (2 if which in ("newest", "oldest") else 1)
        assert reader.torn >= 1
        assert reader.texts == ({} if which == "text" else texts)
        reader.close()


@given(st.binary(max_size=40000), st.booleans())
@fast
def test_random_bytes_are_no_ring(data: bytes, magic: bool) -> None:
    with directory() as where:
        path = where / "x.ring"
        path.write_bytes((ring.MAGIC if magic else b"") + data)
        with pytest.raises(RingError):
            RingReader(path)


@given(st.binary(min_size=1, max_size=SLOTS * ring.SLOT_BYTES), st.integers(0, SLOTS * ring.SLOT_BYTES - 1))
@fast
def test_random_bytes_in_the_slots_are_counted_and_never_read(
    recorded: tuple[bytes, list[Event], dict[int, str]], junk: bytes, at: int
) -> None:
    data, expected, texts = recorded
    slots = bytearray(data[ring.HEADER_BYTES :])
    junk = junk[: len(slots) - at]
    slots[at : at + len(junk)] = junk
    with directory() as where:
        path = where / "x.ring"
        path.write_bytes(data[: ring.HEADER_BYTES] + slots)
        reader = RingReader(path)
        got = read_all(reader)
        assert set(got) <= set(expected)
        assert reader.texts in ({}, texts)
        reader.close()


NUMBERS = st.one_of(
    st.integers(0, 300), st.integers((1 << 32) - 100, (1 << 32) + 100), st.integers(0, (1 << 64) - 1),
    st.integers(ring.MAX_SEQ - 100, ring.MAX_SEQ + 100),
)  # fmt: skip


SLOT = st.tuples(
    NUMBERS,
    st.sampled_from([1, 1, 10, 65535]),  # kind
    st.integers(0, 65535),  # chunk
    st.integers(0, (1 << 32) - 1),  # length
    st.integers(0, 3) | st.integers(0, (1 << 64) - 1),  # key
    st.binary(min_size=88, max_size=88),
)


@given(st.lists(SLOT, max_size=80), st.booleans())
@fast
def test_forged_slots_with_good_checksums_never_break_the_reader(
    slots: list[tuple[int, int, int, int, int, bytes]], alive: bool
) -> None:
    with directory() as where:
        writer = RingWriter(where, ABOUT, slots=SLOTS)
        with writer.path.open("r+b") as file:
            for seq, kind, chunk, length, key, rest in slots:
                body = struct.pack("<HHIQQ88s", kind, chunk, length, seq, key, rest)
                crc = zlib.crc32(body, seq & 0xFFFFFFFF)
                file.seek(ring.HEADER_BYTES + seq % SLOTS * ring.SLOT_BYTES)
                file.write(body + struct.pack("<IIQ", crc, seq >> 32, seq))
        if not alive:
            writer.close()
        reader = RingReader(writer.path)
        for _ in range(4):
            list(reader.events(limit=1000))
        assert 0 <= reader.lost <= ring.MAX_SEQ + 1
        assert reader.next_seq <= ring.MAX_SEQ + 1
        assert all(len(text.encode()) <= 3 * events.MAX_TEXT_BYTES for text in reader.texts.values())
        reader.close()
        writer.close()


CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(1, 200)),
        st.tuples(st.just("text"), st.integers(1, 1200)),
        st.tuples(st.just("read"), st.integers(1, 300)),
        st.tuples(st.just("abandon"), st.just(1)),
        st.tuples(st.just("reopen"), st.just(0)),
    ),
    max_size=40,
)  # fmt: skip


@given(CALLS, st.sampled_from([64, 65, 100, 1000]))
@fast
def test_read_and_lost_add_up_to_written_whatever_the_order_of_calls(
    calls: list[tuple[str, int]], slots: int
) -> None:
    now = itertools.count(0, ring.ABANDONED_SLOT_NS).__next__  # each look is a grace period later
    with directory() as where:
        writer = RingWriter(where, ABOUT, slots=slots)
        reader = RingReader(writer.path, next_seq=1, clock=now)
        recorded: dict[int, int] = {}
        texts: set[str] = set()
        got: dict[int, int] = {}
        read = lost = written = 0

        def take(limit: int) -> None:
            before, at = reader.lost, reader.next_seq
            for event in reader.events(limit):
                assert event.seq not in got
                got[event.seq] = event.args[0]
            assert reader.read + read + reader.lost + lost == reader.next_seq - 1 <= written
            if reader.lost > before:  # never more than the writer had taken back, and half a ring at most
                assert at <= written - slots + slots // 2 or abandoned

        abandoned = 0
        for call, amount in calls:
            if call == "write":
                for _ in range(amount):
                    written += 1
                    recorded[written] = written * 31
                    writer.record(events.LOAD_DONE, 0, written * 31)
            elif call == "text":
                text = f"{len(texts)}" * amount
                texts.add(text[: events.MAX_TEXT_BYTES])
                writer.text(text)
                written = writer._last_seq
            elif call == "abandon":
                writer._next_seq()
                written += 1
                abandoned += 1
            elif call == "read":
                take(amount)
            else:
                read, lost = read + reader.read, lost + reader.lost
                reader.close()
                reader = RingReader(writer.path, next_seq=reader.next_seq, clock=now)
        writer.record(events.LOAD_DONE, 0, 1)
        written += 1
        recorded[written] = 1
        writer.close()
        take(1 << 20)
        assert reader.next_seq == written + 1
        assert got.items() <= recorded.items()
        assert set(reader.texts.values()) <= texts
        assert all(text_key(text) == key for key, text in reader.texts.items())
        reader.close()


@given(st.text(min_size=1, max_size=1500))
@fast
def test_any_text_is_read_back(text: str) -> None:
    with directory() as where:
        writer = RingWriter(where, ABOUT, slots=SLOTS)
        key = writer.text(text)
        writer.close()
        reader = RingReader(writer.path)
        list(reader.events())
        reader.close()
        data = text.encode("utf-8", "replace")[: events.MAX_TEXT_BYTES]
        assert reader.texts == {key: data.decode("utf-8", "replace")}
