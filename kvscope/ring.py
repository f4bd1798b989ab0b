"""The flight recorder: one file of fixed-size slots per instrumented connector, its writer and its reader.

Layout (little-endian), `HEADER_BYTES` of header, then `slots` slots of `SLOT_BYTES`:

    header  magic 8s | version u16 | slot bytes u16 | slots u32 | ring id 16s | pid u32 | about bytes u32
            | wall ns i64 | monotonic ns i64 | crc32 u32 of all these and of `about` | about: JSON
            ... at `STATE_OFFSET`: state u32 | crc32 u32 of the reason | reason 504s, written when recording
            stops for good; zeros until then
    slot    kind u16 | chunk u16 | length u32 | t ns u64 | key u64 | 88 bytes
            | crc32 u32 of these, begun with the low half of seq | high half of seq u32 | seq u64

The 88 bytes are up to 11 i64 fields of an event, or a piece of a text (`chunk` counts the pieces,
`length` is the whole text's). Sequence number n lives in slot n % slots; numbers start at 1. A slot is
written by one `pack_into` with the sequence number last, and the checksum covers the slot and its
number, so a reader in another process can tell a whole slot from a torn one without any lock. A full
ring overwrites the oldest; what a reader missed is the gap in the numbers, so loss is counted exactly.
Readers use `pread`, not a mapping: a file that is cut short under them is an error and not a SIGBUS.

The writer holds a `flock` on its file: the kernel drops it with the process, which is how a reader
knows a writer is gone (pids mean nothing across containers).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import platform
import stat
import struct
import time
import uuid
import weakref
import zlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from kvscope import events
from kvscope.errors import KvscopeError
from kvscope.events import MAX_FIELDS, MAX_TEXT_BYTES, TEXT, text_key

MAGIC = b"KVSCOPE\0"
SUFFIX = ".ring"
DRAFT_SUFFIX = ".draft"
HEADER_BYTES = 16384
STATE_OFFSET = HEADER_BYTES - 512
SLOT_BYTES = 128
CHUNK_BYTES = 8 * MAX_FIELDS
DEFAULT_SLOTS = 65536
"""8 MiB: 26 s at 2,500 events a second, far above what an engine records."""
MIN_SLOTS, MAX_SLOTS = 64, 1 << 22

DEAD_RINGS_KEPT = 64
"""Rings of dead processes that a new writer leaves in the directory when no daemon collects them."""

_HEADER = struct.Struct("<8sHHI16sIIqq")
_CRC = struct.Struct("<I")
_ABOUT_OFFSET = _HEADER.size + _CRC.size
_STATE = struct.Struct("<II504s")
_SLOT = struct.Struct(f"<{SLOT_BYTES - 16}sIIQ")
_BODY = tuple(struct.Struct(f"<HHIQQ{n}q{CHUNK_BYTES - 8 * n}x") for n in range(MAX_FIELDS + 1))
_CHUNK = struct.Struct(f"<HHIQQ{CHUNK_BYTES}s")
_FIELDS = struct.Struct(f"<HHIQQ{MAX_FIELDS}q")

RECORDING, STOPPED = 0, 1

MAX_SEQ = 1 << 48
"""No writer gets there (nine years at a million events a second); a larger number is damage."""

ABANDONED_SLOT_NS = 2_000_000_000
"""A number that stays unwritten this long while later ones are there was lost with its thread."""

_LOOK_AHEAD_SLOTS = 64
"""Where "later ones are there" is looked for while the writer lives."""
_READ_SLOTS = 1024
"""The most slots in one system call of a reader."""
_TEXT_AGAIN = 16
"""A text is written again when a 1/16 of the ring went by, so that few events outlive their texts."""
_OPEN_TEXTS = 1024
"""Texts of which a reader holds some pieces and waits for others."""
_STALE_DRAFT_S = 60
"""A draft this old was left by a writer that died while it made its ring."""


class About(msgspec.Struct, frozen=True):
    """Who writes a ring: identity and fingerprint of an engine process, fixed when the ring is made."""

    engine_id: Annotated[str, msgspec.Meta(max_length=MAX_TEXT_BYTES)]
    source: Annotated[str, msgspec.Meta(max_length=32)]
    """Connector role, `scheduler` or `worker`."""
    rank: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0
    """Worker rank within the engine (TP x PP)."""
    label: Annotated[str, msgspec.Meta(max_length=128)] = ""
    """KVSCOPE_LABEL: what kind of traffic this is; empty is production."""
    host: Annotated[str, msgspec.Meta(max_length=256)] = ""
    boot_id: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """Rings with one boot id share one CLOCK_MONOTONIC."""
    kvscope: Annotated[str, msgspec.Meta(max_length=64)] = ""
    hooks: list[Annotated[str, msgspec.Meta(max_length=128)]] = []
    hooks_missing: list[Annotated[str, msgspec.Meta(max_length=128)]] = []
    fingerprint: dict[str, Any] = {}
    """vLLM, NIXL and model versions, connector, parallel sizes, block size, cache policy and the like."""


class Event(NamedTuple):
    """One event as read back."""

    seq: int
    kind: int
    t_ns: int
    """CLOCK_MONOTONIC of the writer's host, nanoseconds."""
    key: int
    args: tuple[int, ...]
    """`MAX_FIELDS` integers, the unused ones 0."""


class RingError(KvscopeError):
    """A file that is not a ring this version can read."""


def default_directory() -> Path:
    """KVSCOPE_DIR, else a directory of this user in shared memory."""
    return Path(os.environ.get("KVSCOPE_DIR") or f"/dev/shm/kvscope-{os.getuid()}").expanduser()


def boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


class RingWriter:
    """Records events of one connector. `record` may be called from any thread and takes no lock.

    A forked child gets a writer that records nowhere: the ring stays the parent's.

    Args:
        directory: made (0700) when missing.
        about: identity and fingerprint; its JSON must fit the header (about 15 KiB).
        slots: capacity; the oldest event is overwritten when it is used up.
        clock: CLOCK_MONOTONIC in nanoseconds; another one only for simulated events.

    Raises:
        OSError, KvscopeError: the ring can't be made; the caller records nothing then.
    """

    def __init__(
        self,
        directory: Path,
        about: About,
        slots: int = DEFAULT_SLOTS,
        clock: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        if not MIN_SLOTS <= slots <= MAX_SLOTS:
            raise KvscopeError(f"a ring has {MIN_SLOTS} to {MAX_SLOTS} slots, not {slots}")
        about_json = msgspec.json.encode(about)
        if len(about_json) > STATE_OFFSET - _ABOUT_OFFSET:
            raise KvscopeError(f"the engine's fingerprint takes {len(about_json)} bytes: too many for a ring")
        _make_directory(directory)
        with contextlib.suppress(OSError, KvscopeError):
            remove_dead_rings(directory, keep=DEAD_RINGS_KEPT)
        self.ring_id = uuid.uuid4()
        self.path = directory / f"{about.source}-{os.getpid()}-{self.ring_id.hex[:8]}{SUFFIX}"
        size = HEADER_BYTES + slots * SLOT_BYTES
        draft = self.path.with_suffix(DRAFT_SUFFIX)
        mapped: mmap.mmap | None = None
        try:
            self._fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except PermissionError:
            what = f"no permission to write in {directory}"
            raise KvscopeError(f"{what}; point KVSCOPE_DIR elsewhere") from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _reserve(self._fd, size, directory)
            # With its pages: else every 32nd event would wait for a page fault.
            self._map = mapped = mmap.mmap(self._fd, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
            fixed = _HEADER.pack(
                MAGIC,
                events.VERSION,
                SLOT_BYTES,
                slots,
                self.ring_id.bytes,
                os.getpid(),
                len(about_json),
                time.time_ns(),
                time.monotonic_ns(),
            )
            self._map[: len(fixed)] = fixed
            _CRC.pack_into(self._map, len(fixed), zlib.crc32(about_json, zlib.crc32(fixed)))
            self._map[_ABOUT_OFFSET : _ABOUT_OFFSET + len(about_json)] = about_json
            os.rename(draft, self.path)
        except BaseException:
            if mapped is not None:
                mapped.close()
            os.close(self._fd)
            draft.unlink(missing_ok=True)
            raise
        self._clock = clock
        self._slots = slots
        self._next_seq = count(1).__next__
        self._last_seq = 0
        # Text -> (key, number it was last written under): written again before the ring has lapped it.
        self._texts: dict[str, tuple[int, int]] = {}
        _WRITERS.add(self)

    def record(self, kind: int, key: int, *args: int) -> None:
        """Append one event: at most `MAX_FIELDS` integers in the order of its definition in events.py."""
        # The body first: an argument that doesn't fit must not leave a number without its event.
        body = _BODY[len(args)].pack(kind, 0, 0, self._clock(), key, *args)
        seq = self._last_seq = self._next_seq()
        offset = HEADER_BYTES + seq % self._slots * SLOT_BYTES
        _SLOT.pack_into(self._map, offset, body, zlib.crc32(body, seq), seq >> 32, seq)

    def text(self, text: str | None) -> int:
        """Key of `text`, whose characters are in the ring from now on; 0 for None or ''."""
        if not text:
            return 0
        known = self._texts.get(text)
        if known is not None and self._last_seq - known[1] < self._slots // _TEXT_AGAIN:
            return known[0]
        if len(text) > MAX_TEXT_BYTES:
            return self.text(text[:MAX_TEXT_BYTES])  # clients choose ids: none is remembered whole
        key = text_key(text)
        data = text.encode("utf-8", "replace")[:MAX_TEXT_BYTES]
        for chunk in range(0, len(data), CHUNK_BYTES):
            piece = data[chunk : chunk + CHUNK_BYTES]
            body = _CHUNK.pack(TEXT, chunk // CHUNK_BYTES, len(data), self._clock(), key, piece)
            seq = self._last_seq = self._next_seq()
            offset = HEADER_BYTES + seq % self._slots * SLOT_BYTES
            _SLOT.pack_into(self._map, offset, body, zlib.crc32(body, seq), seq >> 32, seq)
        if len(self._texts) >= 16384:
            self._texts.clear()
        self._texts[text] = (key, self._last_seq)
        return key

    def stop(self, reason: str) -> None:
        """Say in the header that nothing more will be recorded, and why."""
        data = reason.encode("utf-8", "replace")[:504].ljust(504, b"\0")
        _STATE.pack_into(self._map, STATE_OFFSET, STOPPED, zlib.crc32(data), data)

    def close(self) -> None:
        """Let go of the file; it stays for the daemon to read. Threads must not record any more."""
        _WRITERS.discard(self)
        self._map.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _record_nowhere(self) -> None:
        size = len(self._map)
        self._map.close()
        os.close(self._fd)
        self._fd = -1
        self._map = mmap.mmap(-1, size)  # private, and taken up by pages only as they are written


_WRITERS: weakref.WeakSet[RingWriter] = weakref.WeakSet()


def _let_go_after_fork() -> None:
    # Two processes with one counter would write different events under one number, and the child's
    # copy of the descriptor would keep the lock after the parent's death.
    for writer in list(_WRITERS):
        writer._record_nowhere()
    _WRITERS.clear()


os.register_at_fork(after_in_child=_let_go_after_fork)


def _make_directory(directory: Path) -> None:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except FileExistsError:
        raise KvscopeError(f"{directory} is not a directory; point KVSCOPE_DIR to one") from None
    except PermissionError:
        raise KvscopeError(f"no permission to make {directory}; point KVSCOPE_DIR elsewhere") from None
    # In a place like /dev/shm anybody may have made it first, to read along or to cut the files short.
    made, parent = os.lstat(directory), os.stat(directory.parent)
    if parent.st_mode & stat.S_IWOTH and made.st_uid not in (os.getuid(), 0):
        raise KvscopeError(
            f"{directory} belongs to another user (uid {made.st_uid}); point KVSCOPE_DIR elsewhere"
        )


def _reserve(fd: int, size: int, directory: Path) -> None:
    """Take the file's space at once: a full tmpfs must fail here and not as SIGBUS in the engine."""
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM):
            raise
        raise KvscopeError(
            f"{directory}: no room for a ring of {size >> 10} KiB ({error.strerror}); "
            "free some, or point KVSCOPE_DIR elsewhere"
        ) from None


class RingReader:
    """Reads one ring from its oldest event on, while it is written or after.

    Counters, all exact: `read` events and text pieces, `lost` (overwritten before they were read, let go
    to get away from a writer that kept overtaking, or abandoned by their thread), `torn` (among the lost:
    the slot was damaged). Every number from the first on is counted once, as read or as lost.

    Raises:
        RingError: the file is no ring, or one of another version, or damaged; the text says which.
            `events` raises it when the file was cut short since.
        OSError: it can't be opened.
    """

    def __init__(self, path: Path, next_seq: int = 0, clock: Callable[[], int] = time.monotonic_ns) -> None:
        """Start at `next_seq`, or at the oldest event when 0. Events before it are not counted as lost."""
        self.path = path
        self._clock = clock
        self._fd = _open_regular(path)
        try:
            size = os.fstat(self._fd).st_size
            self._parse_header(os.pread(self._fd, HEADER_BYTES, 0), size)
            self.read = self.lost = self.torn = 0
            self.texts: dict[int, str] = {}
            """Texts read so far and not yet taken by the owner of this reader."""
            self._pieces: dict[tuple[int, int], dict[int, bytes]] = {}
            self._stuck_since_ns: int | None = None
            self._final_seq: int | None = None  # known once the writer is gone
            self._ended = False
            self._skip = 0
            self._read_at_lap: int | None = None
            self.next_seq = next_seq or max(1, self._newest_seq() - self.slots + 1)
        except BaseException:
            os.close(self._fd)
            raise

    def _parse_header(self, header: bytes, size: int) -> None:
        if len(header) < HEADER_BYTES or header[:8] != MAGIC:
            raise RingError(f"{self.path}: not a kvscope ring; move it out of the directory")
        fixed = header[: _HEADER.size]
        _, version, slot_bytes, slots, ring_id, self.pid, about_bytes, self.wall_ns, self.mono_ns = (
            _HEADER.unpack(fixed)
        )
        if version != events.VERSION:
            raise RingError(
                f"{self.path}: ring version {version}, this kvscope reads {events.VERSION}; "
                "use one kvscope version in engines and daemon"
            )
        about = header[_ABOUT_OFFSET : _ABOUT_OFFSET + about_bytes]
        (crc,) = _CRC.unpack_from(header, _HEADER.size)
        if about_bytes > STATE_OFFSET - _ABOUT_OFFSET or crc != zlib.crc32(about, zlib.crc32(fixed)):
            raise RingError(f"{self.path}: the header is damaged (checksum); it can't be read")
        if slot_bytes != SLOT_BYTES or not MIN_SLOTS <= slots <= MAX_SLOTS:
            raise RingError(f"{self.path}: {slots} slots of {slot_bytes} bytes are no ring; it can't be read")
        if size < HEADER_BYTES + slots * SLOT_BYTES:
            raise RingError(f"{self.path}: the file is shorter than its header says; it can't be read")
        try:
            self.about = msgspec.json.decode(about, type=About)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise RingError(f"{self.path}: the header is not valid ({error}); it can't be read") from None
        self.slots = slots
        self.ring_id = uuid.UUID(bytes=ring_id)

    def stopped_reason(self) -> str | None:
        """Why the writer gave up recording; None while it records."""
        data = os.pread(self._fd, _STATE.size, STATE_OFFSET)
        if len(data) < _STATE.size:
            return None
        state, crc, reason = _STATE.unpack(data)
        if state != STOPPED or crc != zlib.crc32(reason):
            return None
        text: str = reason.rstrip(b"\0").decode("utf-8", "replace")
        return text or "unknown"

    def writer_alive(self) -> bool:
        """Whether the writer's process still holds its lock."""
        return _locked(self._fd)

    def events(self, limit: int = 65536) -> Iterator[Event]:
        """The events written since the last call, in order of their numbers, at most `limit` slots.

        Stops at a number that is not written yet. Texts land in `texts`.
        """
        unpack, fields, crc32 = _SLOT.unpack_from, _FIELDS.unpack, zlib.crc32
        batch = _LOOK_AHEAD_SLOTS
        while limit > 0 and not self._ended:
            seq = self.next_seq
            slots = min(limit, batch, self.slots - seq % self.slots)
            batch = min(2 * batch, _READ_SLOTS)
            data = self._slots_from(seq, slots)
            for offset in range(0, slots * SLOT_BYTES, SLOT_BYTES):
                body, crc, high, found = unpack(data, offset)
                if found != seq or crc != crc32(body, seq) or high != seq >> 32:
                    limit -= 1
                    if not self._step_over(seq):
                        return
                    batch = _LOOK_AHEAD_SLOTS
                    break
                self._stuck_since_ns = None
                seq = self.next_seq = seq + 1
                self.read += 1
                limit -= 1
                kind, chunk, length, t_ns, key, *args = fields(body)
                if kind == TEXT:
                    self._take_piece(key, chunk, length, body[-CHUNK_BYTES:])
                else:
                    yield Event(found, kind, t_ns, key, tuple(args))

    def _slots_from(self, seq: int, slots: int = 1) -> bytes:
        size = slots * SLOT_BYTES
        data = os.pread(self._fd, size, HEADER_BYTES + seq % self.slots * SLOT_BYTES)
        if len(data) < size:
            raise RingError(f"{self.path}: the file was cut short while it was read; what was left is lost")
        return data

    def _whole_seq(self, data: bytes, index: int, offset: int = 0) -> int:
        """Number of the slot at `offset` of `data`; 0 when it is empty, torn or not one for `index`."""
        body, crc, high, seq = _SLOT.unpack_from(data, offset)
        whole = crc == zlib.crc32(body, seq & 0xFFFFFFFF) and high == seq >> 32
        return seq if whole and seq < MAX_SEQ and seq % self.slots == index % self.slots else 0

    def _newest_seq(self) -> int:
        """The highest number in the ring, 0 when it is empty. Reads all of it."""
        newest = 0
        for start in range(0, self.slots, _READ_SLOTS):
            slots = min(_READ_SLOTS, self.slots - start)
            data = self._slots_from(start, slots)
            newest = max(newest, *(self._whole_seq(data, start + i, i * SLOT_BYTES) for i in range(slots)))
        return newest

    def _step_over(self, seq: int) -> bool:
        """Deal with a slot that did not hold `seq` whole; False when there is nothing to read for now."""
        alive = self.writer_alive()  # asked before looking again: nothing changes once it is gone
        data = self._slots_from(seq)
        found = self._whole_seq(data, seq)
        if found == seq:
            return True
        if found > seq:
            self._skip_lapped(seq, found, alive)
            return True
        damaged = not found and any(data)
        if not self._later_written(seq, alive) and (alive or not damaged):
            self._ended = not alive
            return False
        # A thread took the number and has not written it, or the slot is torn: give it time while that can
        # still change, then count it lost.
        if alive:
            now = self._clock()
            if self._stuck_since_ns is None:
                self._stuck_since_ns = now
            if now - self._stuck_since_ns < ABANDONED_SLOT_NS:
                return False
        self.lost += 1
        self.torn += damaged
        self.next_seq = seq + 1
        self._stuck_since_ns = None
        return True

    def _later_written(self, seq: int, alive: bool) -> bool:
        if not alive:
            if self._final_seq is None:
                self._final_seq = self._newest_seq()
            return self._final_seq > seq
        first = seq + 1
        while first < seq + _LOOK_AHEAD_SLOTS:
            slots = min(seq + _LOOK_AHEAD_SLOTS - first, self.slots - first % self.slots)
            data = self._slots_from(first, slots)
            if any(self._whole_seq(data, first + i, i * SLOT_BYTES) > seq for i in range(slots)):
                return True
            first += slots
        return False

    def _skip_lapped(self, seq: int, found: int, alive: bool) -> None:
        """Go on with the oldest number that can still be there, `found` being one lap or more ahead."""
        newest, behind, ahead = found, 0, self.slots
        while ahead - behind > 1:
            middle = (behind + ahead) // 2
            there = self._whole_seq(self._slots_from(found + middle), found + middle)
            if there >= found + middle:
                newest, behind = max(newest, there), middle
            else:
                ahead = middle
        # Overtaken again right away, the reader runs at the writer's heels and reads next to nothing: get
        # away from it, further each time.
        again = self._read_at_lap is not None and self.read - self._read_at_lap < self.slots // 4
        self._skip = min(max(2 * self._skip, self.slots // 64), self.slots // 2) if again and alive else 0
        self._read_at_lap = self.read
        self.next_seq = max(seq + 1, newest - self.slots + 1 + self._skip)
        self.lost += self.next_seq - seq
        self._stuck_since_ns = None

    def _take_piece(self, key: int, chunk: int, length: int, data: bytes) -> None:
        if not chunk * CHUNK_BYTES < length <= MAX_TEXT_BYTES:
            return
        pieces = self._pieces.setdefault((key, length), {})
        pieces[chunk] = data
        if len(pieces) * CHUNK_BYTES >= length:
            del self._pieces[key, length]
            text = b"".join(pieces[i] for i in sorted(pieces))[:length]
            self.texts[key] = text.decode("utf-8", "replace")
        elif len(self._pieces) > _OPEN_TEXTS:
            del self._pieces[next(iter(self._pieces))]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _open_regular(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        raise RingError(f"{path}: no permission to read it; run kvscope as the engines' user") from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        raise RingError(f"{path}: not a regular file; move it out of the directory") from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise RingError(f"{path}: not a regular file; move it out of the directory")
    return fd


def _locked(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return True
        raise
    fcntl.flock(fd, fcntl.LOCK_UN)
    return False


def ring_paths(directory: Path) -> list[Path]:
    """Ring files in `directory`, oldest first; none when it does not exist."""
    return _files(directory, SUFFIX)


def _files(directory: Path, suffix: str) -> list[Path]:
    try:
        names = [path for path in directory.iterdir() if path.suffix == suffix]
    except FileNotFoundError:
        return []
    except NotADirectoryError:
        raise KvscopeError(f"{directory} is not a directory") from None
    except PermissionError:
        raise KvscopeError(f"no permission to list {directory}; run kvscope as the engines' user") from None
    dated = []
    for path in names:
        with contextlib.suppress(FileNotFoundError):  # gone since
            dated.append((path.lstat().st_mtime_ns, path))
    return [path for _, path in sorted(dated)]


def remove_dead_rings(directory: Path, keep: int) -> None:
    """Delete the oldest rings whose writer is gone, all but `keep`. For engines that no daemon collects.

    Rings of other versions count too; files that are no rings are left alone.
    """
    dead = [path for path in ring_paths(directory) if _is_dead_ring(path)]
    stale = [path for path in _files(directory, DRAFT_SUFFIX) if _is_stale_draft(path)]
    for path in stale + dead[: max(0, len(dead) - keep)]:
        with contextlib.suppress(OSError):
            path.unlink()


def _is_dead_ring(path: Path) -> bool:
    try:
        fd = _open_regular(path)
    except (OSError, RingError):
        return False
    try:
        return os.pread(fd, len(MAGIC), 0) == MAGIC and not _locked(fd)
    except OSError:
        return False
    finally:
        os.close(fd)


def _is_stale_draft(path: Path) -> bool:
    try:
        return time.time() - path.lstat().st_mtime > _STALE_DRAFT_S
    except OSError:
        return False
