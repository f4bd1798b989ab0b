"""The archive: no row is lost and none is twice, whatever fails and whenever, and questions see no seam."""

from __future__ import annotations

import errno
import importlib.util
import math
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvscope import archive as archive_module
from kvscope import client, lookup, query, schema
from kvscope.archive import Archive, ArchiveError, Mark
from kvscope.collectors.archiving import Archiving, write_by_hand
from kvscope.collectors.daemon import Daemon
from kvscope.collectors.store import Store
from kvscope.errors import KvscopeError, UsageError
from kvscope.settings import Settings
from kvscope.storefile import TIMES, open_file, relation

from .collecting import Served, ask, row, until
from .collecting import query as file_query

HOUR = 3600 * 10**9
T0 = 1_795_964_400_000_000_000  # 2026-11-29 15:00 UTC
MOVED = [table.name for table in schema.TABLES if not table.kept]


class Clock:
    """Stands at 18:00, three hours after `T0`."""

    def __init__(self) -> None:
        self.ns = T0 + 3 * HOUR

    def __call__(self) -> int:
        return self.ns


def bench(name: str) -> ModuleType:
    """A script of the folder bench, as a module."""
    path = Path(__file__).parent.parent.parent / "bench" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "s.duckdb", archive=tmp_path / "archive")
    yield store
    store.close()


@pytest.fixture
def archiving(store: Store, tmp_path: Path, clock: Clock) -> Archiving:
    """Keeps an hour and a bit in the store: what began before 16:00, at first."""
    return Archiving(store, tmp_path / "archive", 2.0, clock)


def put(store: Store, table: str, *rows: tuple[Any, ...]) -> None:
    assert store.wait_committed(store.put({table: list(rows)}), 10)


def failures(store: Store, first: int, count: int, at_ns: int) -> None:
    """Put rows of `failures`, a microsecond apart."""
    rows = [row("failures", id=first + i, at_ns=at_ns + 1000 * i, engine="p") for i in range(count)]
    put(store, "failures", *rows)


def seen(store: Store, table: str = "failures") -> list[int]:
    """Ids of the rows that questions see."""
    with store.cursor() as cursor:
        found = cursor.execute(f"SELECT id FROM {relation(cursor, table)} ORDER BY id").fetchall()
    return [id_ for (id_,) in found]


def hot(store: Store, table: str = "failures") -> int:
    """Rows that the store's file has."""
    return int(ask(store, f"SELECT count(*) FROM {table}")[0][0])


def archived(directory: Path, table: str = "failures") -> list[Path]:
    return sorted((directory / "v1" / table).rglob("*.parquet"))


# --- as it should be -------------------------------------------------------------------------------


def test_closed_hours_are_written_once_sorted_and_say_what_they_are(
    store: Store, archiving: Archiving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    monkeypatch.setattr(archive_module, "SLICE_ROWS", 100)
    failures(store, 500, 250, T0 + HOUR)
    failures(store, 0, 250, T0 + HOUR - 250_000)
    clock.ns = T0 + HOUR + 44 * 60 * 10**9
    assert archiving.step() == []
    clock.ns = T0 + 2 * HOUR + 45 * 60 * 10**9
    written = archiving.step()
    assert [(one.table, one.hour_ns, one.rows) for one in written] == [
        ("failures", T0, 250),
        ("failures", T0 + HOUR, 250),
    ]
    first, second = archived(tmp_path / "archive")
    assert first.relative_to(tmp_path).as_posix() == (
        f"archive/v1/failures/d=2026-11-29/h=15/{store.collector}.parquet"
    )
    file = pq.ParquetFile(first)
    assert file.metadata.num_row_groups == 3
    assert file.metadata.row_group(0).column(0).compression == "ZSTD"
    assert file.metadata.metadata[b"kvscope"] == b"kvscope archive"
    assert file.metadata.metadata[b"kvscope_schema_version"] == str(schema.VERSION).encode()
    assert [r["id"] for r in file.read().to_pylist()] == list(range(250))
    assert [r["id"] for r in pq.read_table(second, partitioning=None).to_pylist()] == list(range(500, 750))
    before = first.stat()
    assert archiving.step() == []
    again = Archiving(store, tmp_path / "archive", 2.0, clock)
    assert again.step() == [], "a daemon that starts anew finds what is there"
    assert first.stat() == before


def test_rows_leave_the_store_once_they_are_old_and_archived(
    store: Store, archiving: Archiving, clock: Clock
) -> None:
    failures(store, 0, 10, T0)
    failures(store, 10, 10, T0 + HOUR)
    failures(store, 20, 10, T0 + 2 * HOUR)  # of the hour that has not closed
    put(store, "engines", row("engines", id=1, started_at_ns=T0, fingerprint="{}"))
    archiving.step()
    assert hot(store) == 30, "what a pass writes is not deleted by the same pass"
    archiving.step()
    assert hot(store) == 20
    assert seen(store) == list(range(30))
    clock.ns += 10 * HOUR
    for _ in range(2):
        archiving.step()
    assert hot(store) == 0
    assert hot(store, "engines") == 1, "it is kept"
    assert seen(store) == list(range(30))


def close_to(found: Any, wanted: Any) -> bool:
    """Equal, but for the last digits of floats: their sum depends on the order."""
    if isinstance(found, float) and isinstance(wanted, float):
        return math.isclose(found, wanted, rel_tol=1e-9)
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(close_to, found, wanted))
    return bool(found == wanted)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of simulated requests of the last 24 hours, all tables."""
    path = tmp_path_factory.mktemp("simulated") / "s.duckdb"
    bench("offline").write_store(path, 1500)
    return path


Ask = Callable[[str, query.Parameters], Any]
NO_LIMITS = query.Limits(rows=10**6, bytes=1 << 30, seconds=60)


def answers(ask: Ask, now_ns: int | None) -> dict[str, Any]:
    """All named questions: of all time and, with `now_ns`, of a window with its ends inside of hours."""
    found: dict[str, Any] = {}
    windows: list[dict[str, Any]] = [{}]
    if now_ns is not None:
        windows.append({"since": now_ns - 13 * HOUR - HOUR // 3, "until": now_ns - 2 * HOUR - HOUR // 3})
    for name, question in query.questions().items():
        for window in windows:
            given = {k: v for k, v in window.items() if k in question.parameters}
            if "limit" in question.parameters:
                given["limit"] = 1000
            found[f"{name} {given}"] = ask(name, given)
    return found


def asked_of_store(store: Store) -> Ask:
    return lambda name, given: query.ask(store.cursor(), name, given, NO_LIMITS).rows


def asked_of_file(path: Path) -> Ask:
    connection = open_file(path)
    return lambda name, given: query.ask(connection.cursor(), name, given, NO_LIMITS).rows


@pytest.mark.timeout(900)  # some 200 questions
def test_every_question_gets_the_same_answer_from_store_archive_and_both(
    simulated: Path, tmp_path: Path, clock: Clock
) -> None:
    path, directory, now = tmp_path / "s.duckdb", tmp_path / "archive", time.time_ns()
    shutil.copy(simulated, path)
    wanted = answers(asked_of_file(path), now)
    assert sum(bool(rows) for rows in wanted.values()) > 0.8 * len(wanted)
    store = Store(path, archive=directory)
    clock.ns = now
    archiving = Archiving(store, directory, 8.0, clock)

    def same(ask: Ask, windows: bool = False) -> None:
        found = answers(ask, now if windows else None)
        assert found
        assert [name for name in found if not close_to(found[name], wanted[name])] == []

    count = hot(store, "requests")
    archiving.step()
    archiving.step()
    assert count * 0.2 < hot(store, "requests") < count * 0.6, "both hold a part"
    same(asked_of_store(store), windows=True)
    everything = tmp_path / "everything.duckdb"
    store.snapshot(everything, everything=True)
    for table in schema.BY_NAME:
        sql = f"SELECT count(*), bit_xor(hash(t)) FROM {table} AS t"
        assert file_query(everything, sql) == file_query(simulated, sql), table
    clock.ns += 30 * HOUR
    for _ in range(3):
        archiving.step()
    assert hot(store, "requests") == 0
    assert ask(store, "SELECT count(*) FROM transfers WHERE posted_at_ns IS NOT NULL") == [(0,)]
    same(asked_of_store(store))
    same(asked_of_file(directory))
    found = seen(store, "requests")[count // 2]
    assert lookup.look_up(store.cursor(), [], str(found))["request"]["id"] == str(found)
    store.close()


# --- what comes late, or again ---------------------------------------------------------------------


def test_a_late_row_joins_the_file_of_its_hour(store: Store, archiving: Archiving, tmp_path: Path) -> None:
    failures(store, 0, 10, T0)
    archiving.step()
    failures(store, 100, 1, T0 + 5)
    assert [one.rows for one in archiving.step()] == [11]
    assert hot(store) == 11, "of this hour no earlier pass has archived all"
    assert archiving.step() == []
    assert hot(store) == 0
    (file,) = archived(tmp_path / "archive")
    assert [r["id"] for r in pq.read_table(file, partitioning=None).to_pylist()] == [0, 100, *range(1, 10)]


def test_a_row_that_comes_after_its_hour_was_moved_is_seen_once_at_all_times(
    store: Store, archiving: Archiving, clock: Clock
) -> None:
    failures(store, 0, 10, T0)
    archiving.step()
    archiving.step()
    assert hot(store) == 0
    failures(store, 100, 1, T0 + 5)
    wanted = [*range(10), 100]
    assert seen(store) == wanted
    assert [one.rows for one in archiving.step()] == [11]
    assert hot(store) == 1
    assert seen(store) == wanted, "in the store and in its file"
    assert archiving.step() == []
    assert hot(store) == 0
    assert seen(store) == wanted


def test_rows_stored_again_after_they_were_moved_are_seen_once(
    store: Store, archiving: Archiving, tmp_path: Path, clock: Clock
) -> None:
    failures(store, 0, 10, T0)
    archiving.step()
    archiving.step()
    store.close()
    again = Store(store.path, archive=tmp_path / "archive")
    archiving = Archiving(again, tmp_path / "archive", 2.0, clock)
    failures(again, 5, 3, T0 + 5000)  # the same rows: read from a ring once more
    assert hot(again) == 3
    assert seen(again) == list(range(10))
    assert archiving.step() == []
    archiving.step()
    assert hot(again) == 0
    assert seen(again) == list(range(10))
    again.close()


def test_a_daemon_knows_that_a_moved_row_was_stored(
    store: Store, archiving: Archiving, tmp_path: Path, clock: Clock
) -> None:
    moved = row("requests", id=1, p_engine="p", p_request="a", arrived_at_ns=T0, ttft_ns=10**9)
    put(store, "requests", moved)
    failures(store, 5, 1, T0)
    archiving.step()
    archiving.step()
    assert hot(store) == hot(store, "requests") == 0
    store.close()
    again = Store(store.path, archive=tmp_path / "archive")
    Archiving(again, tmp_path / "archive", 2.0, clock)
    again.expect_again("p", T0)
    assert again.has_request("p", "a")
    again.put({"requests": [moved], "failures": [row("failures", id=5, at_ns=T0, engine="p")]})
    assert again.close()
    with duckdb.connect(str(again.path)) as connection:
        assert connection.execute("SELECT count(*) FROM requests, failures").fetchall() == [(0,)]


def test_rows_without_a_time_are_archived_and_stay_in_the_store(
    store: Store, archiving: Archiving, tmp_path: Path
) -> None:
    put(store, "leases", row("leases", id=1, end="released"))
    archiving.step()
    put(store, "leases", row("leases", id=2, end="expired"))
    assert [(one.table, one.hour_ns, one.rows) for one in archiving.step()] == [("leases", None, 2)]
    assert archiving.step() == []
    assert seen(store, "leases") == [1, 2]
    source = client.StoreFile(tmp_path / "archive")
    sql = "SELECT id FROM leases ORDER BY id"
    assert source.query("", sql, {})["rows"] == [["1"], ["2"]]
    source.close()


def test_a_kept_tables_file_follows_its_rows(store: Store, archiving: Archiving, tmp_path: Path) -> None:
    for state in ("recording", "gone"):
        put(store, "engines", row("engines", id=1, started_at_ns=T0, state=state, fingerprint="{}"))
        assert [one.table for one in archiving.step()] == ["engines"]
        (file,) = archived(tmp_path / "archive", "engines")
        assert [r["state"] for r in pq.read_table(file, partitioning=None).to_pylist()] == [state]


# --- what fails ------------------------------------------------------------------------------------


class Killed(BaseException):
    """As if the process ended here."""


@pytest.mark.parametrize("point", ["write", "rename", "renamed", "delete", "deleted", "publish"])
def test_a_daemon_killed_at_any_moment_loses_and_doubles_nothing(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    def kill(*arguments: Any, **more: Any) -> Any:
        raise Killed

    directory = tmp_path / "archive"
    store = Store(tmp_path / "s.duckdb", archive=directory)
    archiving = Archiving(store, directory, 2.0, clock)
    failures(store, 0, 10, T0)
    archiving.step()
    failures(store, 100, 5, T0 + 5)  # late
    failures(store, 200, 10, T0 + HOUR)

    def drop_and_die(*arguments: Any) -> int:
        drop(*arguments)
        raise Killed

    drop = archive_module.drop_archived
    with monkeypatch.context() as patched:
        if point in ("write", "rename"):
            patched.setattr(Path, "unlink", lambda *a, **k: None)  # nobody tidies up
        owner, name, instead = {
            "write": (os, "fsync", kill),
            "rename": (Path, "rename", kill),
            "renamed": (archive_module, "_sync_directory", kill),
            "delete": (Store, "in_writer", kill),
            "deleted": (archive_module, "drop_archived", drop_and_die),
            "publish": (Archiving, "_publish", kill),
        }[point]
        patched.setattr(owner, name, instead)
        with pytest.raises(Killed):
            [archiving.step() for _ in range(3)]
    store.close()
    wanted = [*range(10), *range(100, 105), *range(200, 210)]
    again = Store(tmp_path / "s.duckdb", archive=directory)
    archiving = Archiving(again, directory, 2.0, clock)
    assert seen(again) == wanted
    clock.ns += 5 * HOUR
    for _ in range(3):
        archiving.step()
        assert seen(again) == wanted
    assert hot(again) == 0
    assert list(directory.rglob("*.part")) == []
    again.close()
    source = client.StoreFile(directory)
    assert source.query("", "SELECT count(*), count(DISTINCT id) FROM failures", {})["rows"] == [[25, 25]]
    source.close()


def test_a_full_disk_deletes_nothing_leaves_no_draft_and_goes_on_by_itself(
    mount: Callable[[str], Path], tmp_path: Path, clock: Clock
) -> None:
    disk = mount("size=256k")
    store = Store(tmp_path / "s.duckdb", archive=disk / "archive")
    archiving = Archiving(store, disk / "archive", 2.0, clock)
    rows = [row("failures", id=i, at_ns=T0 + i, detail=os.urandom(60).hex()) for i in range(9000)]
    put(store, "failures", *rows)
    for _ in range(2):
        with pytest.raises(ArchiveError, match=r"(?i)no space left.*; free some space") as caught:
            archiving.step()
        assert "\n" not in str(caught.value)
    assert hot(store) == 9000
    assert [path.name for path in (disk / "archive").rglob("*") if path.is_file()] == [
        f".{store.collector}.lock"
    ]
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    archiving.step()
    archiving.step()
    assert hot(store) == 0
    assert len(seen(store)) == 9000
    store.close()


def test_a_directory_that_can_not_be_used_is_told_and_nothing_is_deleted(
    store: Store,
    tmp_path: Path,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvscope.collectors.archiving.INTERVAL_S", 0.01)
    failures(store, 0, 10, T0)
    (tmp_path / "archive").write_text("a file")
    archiving = Archiving(store, tmp_path / "archive", 2.0, clock)
    archiving.start()
    (problem,) = until(archiving.problems)
    time.sleep(0.2)
    assert problem.startswith("ARCHIVE: ")
    assert "archive" in problem
    assert problem.endswith("the store keeps its rows until they are archived")
    assert len([one for one in caplog.records if one.levelname == "ERROR"]) <= 2, "said once, not each time"
    assert hot(store) == 10
    assert seen(store) == list(range(10))
    (tmp_path / "archive").unlink()
    until(lambda: not archiving.problems() and hot(store) == 0)
    assert seen(store) == list(range(10))
    archiving.stop()


def test_without_room_for_one_hour_no_later_one_is_deleted(
    store: Store, archiving: Archiving, tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Questions take all before some time from the archive, so that time may not pass what is not there."""
    for hour in range(4):
        failures(store, 10 * hour, 10, T0 + hour * HOUR)
    update = Archive.update

    def fails(archive: Archive, cursor: Any, source: Any, table: str, hour_ns: int) -> Any:
        if hour_ns == T0 + HOUR:
            raise archive_module.DamagedFile("this hour can't be written")
        return update(archive, cursor, source, table, hour_ns)

    clock.ns += 5 * HOUR
    with monkeypatch.context() as patched:
        patched.setattr(Archive, "update", fails)
        for _ in range(3):
            archiving.step()
    assert hot(store) == 30
    assert archiving.problems() == ["ARCHIVE: this hour can't be written"]
    assert seen(store) == list(range(40))
    archiving.step()
    archiving.step()
    assert hot(store) == 0
    assert archiving.problems() == []
    assert seen(store) == list(range(40))


def test_a_file_that_was_taken_away_is_no_reason_to_delete(
    store: Store, archiving: Archiving, tmp_path: Path
) -> None:
    failures(store, 0, 10, T0)
    archiving.step()
    archived(tmp_path / "archive")[0].unlink()
    archiving.step()
    assert hot(store) == 10
    archiving.step()
    assert hot(store) == 0
    assert seen(store) == list(range(10))


def test_an_archive_that_is_not_mounted_is_told_and_not_begun_anew(
    store: Store, archiving: Archiving, tmp_path: Path, clock: Clock
) -> None:
    failures(store, 0, 10, T0)
    archiving.step()
    archiving.step()
    assert hot(store) == 0
    (tmp_path / "archive").rename(tmp_path / "away")
    (tmp_path / "archive").mkdir()
    again = Archiving(store, tmp_path / "archive", 2.0, clock)
    (problem,) = again.problems()
    assert "no archive is there, and questions lack the hours before 2026-11-29 16:00" in problem
    with pytest.raises(ArchiveError, match="no archive is there"):
        again.step()
    with pytest.raises(ArchiveError, match="no archive is there"):
        write_by_hand(store, again.archive, tmp_path / "archive")
    assert list((tmp_path / "archive").iterdir()) == []
    (tmp_path / "archive").rmdir()
    (tmp_path / "away").rename(tmp_path / "archive")
    again.step()
    assert seen(store) == list(range(10))


def test_a_daemon_without_the_archive_says_what_it_lacks(
    store: Store, archiving: Archiving, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures(store, 0, 10, T0)
    archiving.step()
    archiving.step()
    failures(store, 20, 1, 10**9)  # old, and not archived
    store.close()
    daemon = Daemon(Settings(dir=tmp_path / "rings", store=tmp_path / "s.duckdb", sample_seconds=0))
    failures(daemon._store, 21, 1, time.time_ns())
    until(lambda: ask(daemon._store, "SELECT id FROM failures") == [(21,)])
    daemon.stop()
    (warning,) = [one.getMessage() for one in caplog.records if "moved to an archive" in one.getMessage()]
    assert "hours before 2026-11-29 16:00" in warning
    assert warning.endswith("rows older than 72 h are deleted, archived or not")


def test_rows_come_while_hours_are_moved(store: Store, archiving: Archiving, clock: Clock) -> None:
    ended, stored = threading.Event(), [0]

    def ingest() -> None:
        while not ended.is_set():
            first = stored[0]
            rows = [
                row("failures", id=first + i, at_ns=T0 + (first + i) % 3 * HOUR + first + i)
                for i in range(50)
            ]
            put(store, "failures", *rows)
            stored[0] += 50

    thread = threading.Thread(target=ingest)
    thread.start()
    try:
        clock.ns += 5 * HOUR
        for _ in range(8):
            archiving.step()
            least = stored[0]
            found = seen(store)
            assert len(found) >= least
            assert found == list(range(len(found)))
    finally:
        ended.set()
        thread.join()
    archiving.step()
    archiving.step()
    assert hot(store) == 0
    assert seen(store) == list(range(stored[0]))


# --- who else uses the directory -------------------------------------------------------------------


def test_collectors_share_a_directory(tmp_path: Path, clock: Clock) -> None:
    directory = tmp_path / "shared"
    stores = [Store(tmp_path / f"{name}.duckdb", archive=directory) for name in "ab"]
    for number, store in enumerate(stores):
        archiving = Archiving(store, directory, 2.0, clock)
        failures(store, 100 * number, 10, T0)
        archiving.step()
        archiving.step()
        assert hot(store) == 0
    assert seen(stores[0]) == list(range(10)), "each answers for what it collected"
    assert seen(stores[1]) == list(range(100, 110))
    for store in stores:
        store.close()
    source = client.StoreFile(directory)
    assert source.query("", "SELECT id FROM failures ORDER BY id", {})["rows"] == [
        [str(i)] for i in (*range(10), *range(100, 110))
    ]
    source.close()


HOSTILE: dict[str, Callable[[Path], Any]] = {
    "garbage": lambda path: path.write_bytes(b"PAR1 garbage" * 99),
    "empty": lambda path: path.touch(),
    "footer": lambda path: path.write_bytes(b"PAR1" + b"x" * 64 + b"\xff\xff\xff\x7fPAR1"),
    "thrift": lambda path: path.write_bytes(b"PAR1" + b"x" * 64 + b"\x40\x00\x00\x00PAR1"),
    "columns": lambda path: pq.write_table(pa.table({"mine": [1]}), path),
    "types": lambda path: pq.write_table(pa.table({"id": ["a"], "at_ns": [["b"]]}), path),
    "metadata": lambda path: pq.write_table(
        pa.table({"mine": [1]}).replace_schema_metadata({"kvscope_rows": "9" * 4_000_000}), path
    ),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_file_that_is_not_ours_costs_one_line_and_no_row(
    store: Store, archiving: Archiving, tmp_path: Path, kind: str
) -> None:
    failures(store, 0, 10, T0)
    failures(store, 20, 10, T0 + HOUR)
    hour = tmp_path / "archive" / "v1" / "failures" / "d=2026-11-29" / "h=15"
    hour.mkdir(parents=True)
    own, other = hour / f"{store.collector}.parquet", hour / "somebody.parquet"
    HOSTILE[kind](own)
    HOSTILE[kind](other)
    before = own.read_bytes()
    for _ in range(3):
        archiving.step()
    (problem,) = archiving.problems()
    assert problem.startswith(f"ARCHIVE: {own}: not a file that kvscope can add to")
    assert "\n" not in problem
    assert own.read_bytes() == before
    assert hot(store) == 20
    assert len(archived(tmp_path / "archive")) == 3, "the other hour is written"
    own.unlink()
    archiving.step()
    archiving.step()
    assert archiving.problems() == []
    assert seen(store) == [*range(10), *range(20, 30)]


def test_too_little_memory_is_not_said_of_the_file(
    store: Store, archiving: Archiving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told to move a sound file away."""
    failures(store, 0, 10, T0)
    archiving.step()
    failures(store, 20, 1, T0 + 1)

    def fails(cursor: Any, rows: str) -> int:
        raise duckdb.OutOfMemoryException("no room")

    with monkeypatch.context() as patched:
        patched.setattr(archive_module, "_count", fails)
        with pytest.raises(ArchiveError, match="no room") as caught:
            archiving.step()
    assert not isinstance(caught.value, archive_module.DamagedFile)
    assert [one.rows for one in archiving.step()] == [11]


def test_a_file_system_without_locks_is_said_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(file: Any, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ArchiveError, match="No locks available"), Archive(tmp_path / "a", "c").locked():
        pass


def test_a_file_that_lacks_a_column_keeps_its_rows(
    store: Store, archiving: Archiving, tmp_path: Path
) -> None:
    hour = tmp_path / "archive" / "v1" / "failures" / "d=2026-11-29" / "h=15"
    hour.mkdir(parents=True)
    older = pa.table({"id": pa.array([50], pa.uint64()), "at_ns": [T0], "engine": ["p"]})
    pq.write_table(older, hour / f"{store.collector}.parquet")
    failures(store, 0, 10, T0 + 1)
    assert [one.rows for one in archiving.step()] == [11]
    archiving.step()
    assert seen(store) == [*range(10), 50]


def test_only_files_of_the_time_asked_for_are_opened(
    store: Store, archiving: Archiving, tmp_path: Path, clock: Clock
) -> None:
    failures(store, 0, 10, T0)
    failures(store, 20, 10, T0 + HOUR)
    clock.ns += 5 * HOUR
    archiving.step()
    archiving.step()
    assert hot(store) == 0
    old, _ = archived(tmp_path / "archive")
    old.write_bytes(b"damaged since")
    sql = "SELECT count(*) FROM failures"
    recent = {"since": T0 + HOUR}
    assert query.run_sql(store.cursor(), sql, recent).rows == [(10,)]
    with pytest.raises(query.QueryError, match=r"\.parquet") as caught:
        query.run_sql(store.cursor(), sql)
    assert "\n" not in str(caught.value)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[: len(content) // 2],
    "a page": lambda content: content[:9999] + bytes(9999) + content[19998:],
    # Of which DuckDB names no file.
    "the beginning of a page": lambda content: content[:8] + b"\xff" * 64 + content[72:],
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_file_that_was_damaged_is_named_with_what_to_do(
    store: Store, tmp_path: Path, archiving: Archiving, start: Callable[..., Any], kind: str
) -> None:
    failures(store, 0, 5000, T0)
    failures(store, 5000, 10, T0 + HOUR)
    archiving.step()
    archiving.step()
    store.close()
    path = archived(tmp_path / "archive")[0]
    content = path.read_bytes()
    served = start(
        Served,
        *("--dir", str(tmp_path / "rings"), "--store", str(store.path)),
        *("--archive", str(tmp_path / "archive"), "--retention-hours", "0"),
    )
    daemon = client.Daemon(served.url)
    sql = "SELECT count(DISTINCT t) FROM failures AS t"

    def problems() -> list[str]:
        return [one for one in daemon.status()["problems"] if "ARCHIVE" in one]

    def ask(**parameters: Any) -> Any:
        try:
            return daemon.query("", sql, parameters)["rows"][0][0]
        except client.DaemonError as error:
            return str(error)

    assert (ask(), problems()) == (5010, [])
    path.write_bytes(DAMAGE[kind](content))
    said = until(lambda: str(path) in str(answer := ask()) and answer)
    assert "move it away" in said
    assert "--since" in said
    assert "\n" not in said
    assert problems() == [f"ARCHIVE: {said}"]
    assert ask(since=str(T0 + HOUR)) == 10, "other hours can be asked for"
    path.write_bytes(content)
    assert (ask(), problems()) == (5010, []), "a copy was put in its place"
    path.unlink()
    assert "gone from the archive; ask again" in ask()
    until(lambda: ask() == 10 and not problems(), 20)
    daemon.close()


def test_of_a_request_only_files_of_its_time_are_opened(
    store: Store, archiving: Archiving, tmp_path: Path
) -> None:
    failures(store, 0, 10, T0 - HOUR)
    failures(store, 20, 10, T0)
    archiving.step()
    archiving.step()
    _, damaged = archived(tmp_path / "archive")
    damaged.write_bytes(b"damaged since")
    put(store, "requests", row("requests", id=7, arrived_at_ns=T0 + 3 * HOUR))
    put(store, "failures", row("failures", id=40, at_ns=T0 + 3 * HOUR, request_id=7))
    found = lookup.look_up(store.cursor(), [], "7")
    assert [one["id"] for one in found["failures"]] == ["40"]


@pytest.mark.parametrize(
    "sql",
    ["COPY failures TO '{directory}/stolen.parquet'",
     "EXPLAIN ANALYZE COPY failures TO '{directory}/stolen.parquet'",
     "/* a */ EXPLAIN (ANALYZE) -- b\n COPY (SELECT 1) TO '{directory}/stolen.parquet'",
     "ATTACH '{directory}/x.duckdb'", "EXPORT DATABASE '{directory}'", "FROM read_text('/etc/passwd')",
     "SELECT * FROM read_text('{directory}/../s.duckdb')",
     "WITH a AS (DELETE FROM \"archived:files\".main.parquet_files RETURNING 1) FROM a"],
)  # fmt: skip
def test_users_sql_writes_nothing_there(store: Store, archiving: Archiving, tmp_path: Path, sql: str) -> None:
    failures(store, 0, 1, T0)
    archiving.step()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KvscopeError):
        query.run_sql(store.cursor(), sql.format(directory=tmp_path / "archive"))
    assert sorted(tmp_path.rglob("*")) == before


# --- by hand ---------------------------------------------------------------------------------------


def test_by_hand_a_directory_gets_all_that_the_daemon_has(
    store: Store, archiving: Archiving, tmp_path: Path
) -> None:
    for hour in range(3):
        failures(store, 10 * hour, 10, T0 + hour * HOUR)
    archiving.step()
    archiving.step()
    assert hot(store) == 20, "some was moved"
    files: list[dict[str, Any]] = []
    since: object = ""
    while since is not None:
        done = write_by_hand(store, archiving.archive, tmp_path / "copy", str(since), seconds=0)
        files += done["files"]
        since = done["next_ns"]
    assert [(one["hour_ns"], one["rows"]) for one in files] == [(T0 + hour * HOUR, 10) for hour in range(3)]
    again = write_by_hand(store, archiving.archive, tmp_path / "copy")
    assert (again["files"], again["next_ns"]) == ([], None)
    source = client.StoreFile(tmp_path / "copy")
    assert source.query("", "SELECT count(DISTINCT id) FROM failures", {})["rows"] == [[30]]
    source.close()


def test_by_hand_hours_are_written_whole(store: Store, tmp_path: Path) -> None:
    for hour in range(3):
        failures(store, 10 * hour, 10, T0 + hour * HOUR)
    moment = str(T0 + HOUR + 5000)
    done = write_by_hand(store, None, tmp_path / "copy", moment, str(T0 + HOUR + 6000))
    assert [(one["hour_ns"], one["rows"]) for one in done["files"]] == [(T0 + HOUR, 10)]
    with pytest.raises(UsageError, match="since is not before until"):
        write_by_hand(store, None, tmp_path / "copy", moment, moment)


@pytest.mark.parametrize("end", [T0 + HOUR + 6000, T0 + 2 * HOUR])
def test_by_hand_the_last_hour_may_take_all_the_time_of_an_answer(
    store: Store, tmp_path: Path, end: int
) -> None:
    for hour in range(3):
        failures(store, 10 * hour, 10, T0 + hour * HOUR)
    rows = []
    since: object = T0
    while since is not None:
        done = write_by_hand(store, None, tmp_path / "copy", str(since), str(end), seconds=-1)
        rows += [one["rows"] for one in done["files"]]
        since = done["next_ns"]
    assert rows == [10, 10]


def test_by_hand_no_other_directory_is_touched(store: Store, archiving: Archiving, tmp_path: Path) -> None:
    failures(store, 0, 1, T0)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").touch()
    for path, said in (
        ("mine", "it has other files"),
        ("mine/notes.txt", "not a directory"),
        ("missing/new", "there is no"),
        ("archive/inside", "the daemon's archive is"),
        (".", "the daemon's archive is"),
        ("with[brackets]", "another name"),
    ):
        with pytest.raises(UsageError, match=said):
            write_by_hand(store, archiving.archive, tmp_path / path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "s.duckdb", "s.duckdb.wal"]


def test_links_in_a_directory_of_somebody_else_are_not_written_through(store: Store, tmp_path: Path) -> None:
    """Whoever reaches the API can name a directory of theirs."""
    failures(store, 0, 10, T0)
    ours = tmp_path / "ours"
    ours.write_text("precious")
    hour = tmp_path / "theirs" / "v1" / "failures" / "d=2026-11-29" / "h=15"
    hour.mkdir(parents=True)
    draft, lock = hour / f".{store.collector}.parquet.part", tmp_path / f"theirs/v1/.{store.collector}.lock"
    draft.symlink_to(ours)
    lock.symlink_to(ours)
    with pytest.raises(ArchiveError, match="symbolic links"):
        write_by_hand(store, None, tmp_path / "theirs")
    lock.unlink()
    assert len(write_by_hand(store, None, tmp_path / "theirs")["files"]) == 1
    assert ours.read_text() == "precious"


def test_two_never_write_the_same_files_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_module, "_LOCK_S", 0.05)
    first, second = (Archive(tmp_path, "0123456789ab") for _ in range(2))
    with first.locked(), pytest.raises(ArchiveError, match="another process writes to it"), second.locked():
        pytest.fail("both have it")
    with second.locked(), Archive(tmp_path, "0123456789ac").locked():
        pass  # another collector's files are others


def test_a_mark_tells_which_rows_not_only_how_many(store: Store) -> None:
    failures(store, 0, 10, T0)
    with store.cursor() as cursor:
        (mark,) = archive_module.hours(cursor, relation, "failures").values()
        assert isinstance(mark, Mark)
        assert mark.rows == 10
    with duckdb.connect() as other:
        other.execute(schema.create_sql(schema.FAILURES))
        values = ", ".join(f"({id_}, {T0 + 1000 * id_})" for id_ in [*range(9), 11])
        other.execute(f"INSERT INTO failures (id, at_ns) VALUES {values}")
        (another,) = archive_module.hours(other, relation, "failures").values()
    assert another.rows == 10
    assert another != mark
    assert set(MOVED) <= set(TIMES)
