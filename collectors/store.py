"""The store: one DuckDB file, one writer thread, a bounded queue before it.

Rows are put by the collecting thread and committed by the writer thread, all tables of a batch in one
transaction, at most twice a second. A batch that can't be written (disk full, say) is kept and tried
again until it can; meanwhile the queue fills, the collecting thread stops reading, and the rings buffer.

A row is stored once: its id is compared with those that may come again (`expect_again`), kept in memory.
Samples, which are many, are compared by their time instead.
DuckDB locks the file for this process, so readers ask it for a `cursor()` or a `snapshot()`.

With an archive, rows are not deleted for being old, but once they are archived (see `archiving`), and cursors
read the archive's files too (`storefile.relation`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import duckdb
import pyarrow as pa

from kvscope import __version__, schema
from kvscope.errors import KvscopeError
from kvscope.samples import OWN_NAMES
from kvscope.schema import ENGINES, REQUESTS, SAMPLES, TABLES
from kvscope.storefile import (
    COLLECTOR,
    HOT_FROM,
    META,
    TIMES,
    attach_archive,
    collector_of,
    create_tables,
    lock,
    new_collector,
    publish,
    relation,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")
Row = tuple[Any, ...]
Rows = dict[str, list[Row]]
"""Rows by table name, columns in the order of the schema."""

QUEUE_ROWS = 32768
"""Rows that may wait. At 10,000 rows a second this is 3 s: longer than any commit was seen to take."""
BATCH_ROWS = 16384
"""Rows of one transaction, about."""
COMMIT_INTERVAL_S = 0.5
"""A commit takes a core for some 30 ms, however few its rows: engines beside it would feel ten a second."""
RETRY_S = 1.0
KEEP_S = 10.0
"""How long a row that somebody waits for may take to be on disk."""
READER_CLOSE_S = 1.0
"""How long closing waits for a reader whose query does not heed the interrupt."""
KNOWN_IDS = 262144
"""Ids per table that are remembered after they were stored; those of `expect_again` come on top."""
AGAIN_SLACK_NS = 600 * 10**9
"""How much older than its last event in a ring a row may be dated: clocks, leases, late notifications."""
RETENTION_INTERVAL_S = 600.0
CHECKPOINT_AT = "64MB"
"""Of write-ahead log: a crash costs at most about a second at the next start."""

UNENDED_NS = 3600 * 10**9
"""How long a request whose end was not observed may have gone on."""

THREADS = 2
"""Of DuckDB, for all questions together: the rest of the host belongs to the engines."""
_ENGINE_UPDATES = ("next_seq", "read", "lost", "torn", "rejected", "state", "state_detail")
_COLUMN = {column.name: i for i, column in enumerate(REQUESTS.columns)}
_LEGS = (
    (_COLUMN["p_engine"], _COLUMN["p_request"]),
    (_COLUMN["d_engine"], _COLUMN["d_request"]),
)

_AT_NS, _ENGINE, _SOURCE, _RANK, _NAME = (
    [column.name for column in SAMPLES.columns].index(name)
    for name in ("at_ns", "engine", "source", "rank", "name")
)


_UNFIT = (pa.ArrowException, OverflowError, ValueError, TypeError)


class StoreError(KvscopeError):
    """The store can't be opened, read or written; the text names the file and says what to do."""


class Position(NamedTuple):
    """How much of a ring an earlier daemon had read when it last committed."""

    next_seq: int
    read: int
    lost: int
    torn: int
    rejected: int


class Store:
    """Writes rows of `schema.TABLES` to one DuckDB file.

    `put`, `wait_for_room`, `expect_again`, `has_request` and `has_row` belong to one thread at a time; the
    rest may be called from any.

    Args:
        path: made when missing, with its directory.
        memory_mb: for DuckDB, queries of readers included.
        retention_hours: older rows are deleted; 0 keeps all.
        on_commit: told by the writer thread which rows are in the store now, each once, and how many seconds
            the commit took; must not raise.
        archive: directory of Parquet files that cursors may read; see `publish`.

    Raises:
        StoreError: another process has it, it is of another version or no store, or can't be made.
    """

    def __init__(
        self,
        path: Path,
        memory_mb: int = 512,
        retention_hours: float = 0.0,
        on_commit: Callable[[Rows, float], None] | None = None,
        archive: Path | None = None,
    ) -> None:
        self.path = path
        self._archive = archive
        self._archived: pa.Table | None = None
        self._on_commit = on_commit
        self._memory_mb = memory_mb
        self._retention_ns = int(retention_hours * 3600e9)
        self._readers: weakref.WeakSet[duckdb.DuckDBPyConnection] = weakref.WeakSet()
        self._readers_lock = threading.Lock()
        self._database: duckdb.DuckDBPyConnection | None = self._open()
        self._writer = self._database.cursor()
        self.collector = collector_of(self._writer)
        """Names this store's files in an archive."""
        self._arrow = {
            t.name: self._writer.sql(f"FROM {t.name} LIMIT 0").to_arrow_table().schema for t in TABLES
        }
        self._positions = self._read_positions()
        self._known: dict[str, dict[int, None]] = {t.name: {} for t in TABLES}
        self._known_legs: dict[int, int] = {}
        """Hash of (engine, internal request id) -> when the request ended (Unix ns) if an earlier daemon
        stored it, else 0."""
        self._sampled_until: dict[tuple[str, str, int], int] = {}
        """(engine, source, rank) -> until when (Unix ns) earlier daemons stored its own samples."""
        self._known_limit = KNOWN_IDS
        self.on_requests: Callable[[Sequence[Row]], None] | None = None
        """Is told of the new requests of every `put`."""
        self._expected_since: dict[str, int] = {}

        self._changed = threading.Condition()
        # Guarded by _changed.
        self._queue: deque[tuple[int, Rows, int]] = deque()
        self._queued_rows = 0
        self._tickets = 0
        self._committed = 0
        self._closing = False
        self._work: deque[tuple[Callable[[duckdb.DuckDBPyConnection], Any], Future[Any]]] = deque()

        # Written by the writer thread alone.
        self.error = ""
        """Why nothing can be written now; empty when it can."""
        self.rows_stored = 0
        self.rows_refused = 0
        """Rows whose values don't fit their columns."""
        self._commit_s: deque[float] = deque(maxlen=100)
        self._next_commit = self._next_retention = 0.0

        self._thread = threading.Thread(target=self._run, name="kvscope-store", daemon=True)
        self._thread.start()

    # --- the collecting thread ---

    def put(self, rows: Mapping[str, Sequence[Row]]) -> int:
        """Queue rows, those already stored dropped. Never waits: ask `wait_for_room` before.

        Returns:
            A ticket: the rows are on disk once `committed()` has reached it.
        """
        new: Rows = {}
        count = 0
        for name, table_rows in rows.items():
            fresh = list(table_rows) if name == ENGINES.name else self._unknown(name, table_rows)
            if fresh:
                new[name] = fresh
                count += len(fresh)
        if (tell := self.on_requests) is not None and REQUESTS.name in new:
            tell(new[REQUESTS.name])
        with self._changed:
            if new:
                self._tickets += 1
                self._queue.append((self._tickets, new, count))
                self._queued_rows += count
                self._changed.notify_all()
            return self._tickets

    def pending(self, table: str) -> list[Row]:
        """Rows of a table that were put and are not committed yet."""
        with self._changed:
            return [row for _, queued, _ in self._queue for row in queued.get(table, ())]

    def table(self, name: str, rows: list[Row]) -> pa.Table:
        """Rows of a table as Arrow, without those whose values fit no column."""
        try:
            return _arrow_table(self._arrow[name], rows)
        except _UNFIT:
            return _arrow_table(self._arrow[name], [row for row in rows if _fits(self._arrow[name], row)])

    def wait_for_room(self, timeout_s: float) -> bool:
        """Wait until the queue is below its limit; False when it is not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._queued_rows < QUEUE_ROWS, timeout_s)

    def expect_again(self, engine: str, since_ns: int) -> None:
        """Rings of `engine` with events from `since_ns` (Unix) on are read again: what was stored of them
        must not be stored twice.

        Raises:
            StoreError: the store can't be read.
        """
        since_ns -= AGAIN_SLACK_NS
        if self._expected_since.get(engine, since_ns + 1) <= since_ns:
            return
        try:
            with self.cursor() as cursor:
                self._load_known(cursor, engine, since_ns)
        except duckdb.Error as error:
            raise StoreError(_explain(self.path, error)) from None
        self._expected_since[engine] = since_ns

    def has_request(self, engine: str, request: str) -> bool:
        """Whether a row with this leg (internal request id) is stored or queued, as far back as matters."""
        return hash((engine, request)) in self._known_legs

    def has_row(self, row: Row) -> bool:
        """Whether this row of `requests`, or a whole of which it is the rest, is stored or queued."""
        return row[0] in self._known[REQUESTS.name] or self._is_rest(row)

    def position(self, ring: str) -> Position | None:
        """How far an earlier daemon read this ring; None when none did."""
        return self._positions.get(ring)

    # --- any thread ---

    def committed(self) -> int:
        """The ticket up to which all rows are on disk."""
        with self._changed:
            return self._committed

    def wait_committed(self, ticket: int, timeout_s: float) -> bool:
        """Wait until the rows of `ticket` are on disk."""
        with self._changed:
            return self._changed.wait_for(lambda: self._committed >= ticket, timeout_s)

    def keep(self, table: str, row: Row, timeout_s: float = KEEP_S) -> None:
        """Store one row of a kept table, and wait until it is on disk.

        Raises:
            StoreError: it is not; if it is queued it may be later.
        """
        with self._changed:
            if self._closing:
                raise StoreError(f"{self.path}: the store is closed")
            self._tickets += 1
            ticket = self._tickets
            self._queue.append((ticket, {table: [row]}, 1))
            self._queued_rows += 1
            self._changed.notify_all()
        if not self.wait_committed(ticket, timeout_s):
            raise StoreError(self.error or f"{self.path}: not written in {timeout_s:g} s; it may be still")

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A cursor for one reading thread; close it after use. It can't reach files or change settings.

        Raises:
            StoreError: the store is closed.
        """
        with self._readers_lock:
            if self._database is None:
                raise StoreError(f"{self.path}: the store is closed")
            cursor = self._database.cursor()
            self._readers.add(cursor)
            return cursor

    def publish(self, files: pa.Table) -> None:
        """Have cursors read these files of the archive; see `storefile.publish`.

        Raises:
            StoreError: the store is closed.
        """
        with self.cursor() as cursor:
            publish(cursor, files)
        self._archived = files

    def in_writer(self, work: Callable[[duckdb.DuckDBPyConnection], T], timeout_s: float) -> T:
        """Have the writer thread do `work` in a transaction of its own, between two commits.

        Raises:
            StoreError: it could not, or had not begun in time; then it is not done later either.
        """
        future: Future[T] = Future()
        with self._changed:
            if self._closing:
                raise StoreError(f"{self.path}: the store is closed")
            self._work.append((work, future))
            self._changed.notify_all()
        try:
            return future.result(timeout_s)
        except FutureTimeoutError:
            future.cancel()
            raise StoreError(self.error or f"{self.path}: busy for {timeout_s:g} s") from None
        except CancelledError:
            raise StoreError(f"{self.path}: the store is closed") from None
        except duckdb.Error as error:
            raise StoreError(_explain(self.path, error)) from None

    def snapshot(self, path: Path, everything: bool = False) -> None:
        """Write a consistent copy that any process may open.

        Args:
            everything: what was archived too.

        Raises:
            StoreError: `path` exists or can't be written.
        """
        if os.path.exists(path):  # False too where it can't be seen: the copy then says why
            raise StoreError(f"{path}: exists; name a new file for the snapshot")
        draft = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
        try:
            with self.cursor() as source, duckdb.connect(str(draft)) as target:
                source.begin()
                for table in TABLES:
                    target.execute(schema.create_sql(table))
                target.execute(META)
                for name in ("meta", *(t.name for t in TABLES)):
                    rows = relation(source, name) if everything and name != "meta" else name
                    target.register("rows", source.sql(f"FROM {rows}").to_arrow_reader())
                    target.execute(f"INSERT INTO {name} SELECT * FROM rows")
                    target.unregister("rows")
                if everything:
                    target.execute("DELETE FROM meta WHERE key = ?", [HOT_FROM])
            draft.rename(path)
        except (duckdb.Error, OSError) as error:
            raise StoreError(_explain(path, error).replace(draft.name, path.name)) from None
        finally:
            for left in (draft, draft.with_name(draft.name + ".wal")):
                with contextlib.suppress(OSError):
                    left.unlink()

    def status(self) -> dict[str, Any]:
        with self._changed:
            queued = self._queued_rows
        times = sorted(self._commit_s)
        size = 0
        for path in (self.path, Path(f"{self.path}.wal")):
            with contextlib.suppress(OSError):
                size += path.stat().st_size
        return {
            "path": str(self.path),
            "bytes": size,
            "rows_stored": self.rows_stored,
            "rows_refused": self.rows_refused,
            "rows_queued": queued,
            "queue_limit": QUEUE_ROWS,
            "commit_ms_p50": round(times[len(times) // 2] * 1e3, 3) if times else None,
            "commit_ms_max": round(times[-1] * 1e3, 3) if times else None,
            "error": self.error,
        }

    def close(self, deadline_s: float = 10.0) -> bool:
        """Write what is queued, give up after the deadline, and close the file.

        Returns:
            Whether everything put is on disk.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            self._writer.interrupt()
            self._thread.join(1.0)
        self._close_database()
        with self._changed:
            for _, future in self._work:
                future.cancel()
            return not self._queue

    # --- opening ---

    def _open(self) -> duckdb.DuckDBPyConnection:
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            database = duckdb.connect(
                str(self.path),
                config={
                    "threads": THREADS,
                    "memory_limit": f"{self._memory_mb}MB",
                    "wal_autocheckpoint": CHECKPOINT_AT,
                },
            )
        except (duckdb.Error, OSError) as error:
            raise StoreError(_explain(self.path, error)) from None
        try:
            self._check_version(database)
            if not collector_of(database):
                database.execute("INSERT INTO meta VALUES (?, ?)", [COLLECTOR, new_collector()])
            if self._archive is not None:
                attach_archive(database, self._archive)
            lock(database)  # the SQL of readers runs in this process: it must not reach other files
            if self._archived is not None:
                publish(database, self._archived)
        except BaseException as error:
            database.close()
            if isinstance(error, duckdb.Error):
                raise StoreError(_explain(self.path, error)) from None
            raise
        return database

    def _check_version(self, database: duckdb.DuckDBPyConnection) -> None:
        tables = {name for (name,) in database.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
        if not tables:
            create_tables(database)
            return
        known = {"meta", "requests"} <= tables  # which all versions have
        found = dict(database.execute("SELECT key, value FROM meta").fetchall()) if known else {}
        version = found.get("schema_version")
        if version is None or (version == str(schema.VERSION) and not set(schema.BY_NAME) <= tables):
            raise StoreError(f"{self.path}: a DuckDB file, but no kvscope store; name another file")
        if version != str(schema.VERSION):
            raise StoreError(
                f"{self.path}: store version {version} (made by {found.get('made_by')}), "
                f"kvscope {__version__} writes version {schema.VERSION}; "
                "move the file away, or name another file with --store"
            )

    def _read_positions(self) -> dict[str, Position]:
        query = "FROM engines SELECT ring, next_seq, read, lost, torn, rejected"
        rows = self._writer.execute(query).fetchall()
        return {ring: Position(*numbers) for ring, *numbers in rows}

    def _close_database(self) -> None:
        with self._readers_lock:
            database, self._database = self._database, None
            # An instance lives as long as one cursor of it.
            for reader in list(self._readers):
                _close_reader(reader)
            self._readers.clear()
        with contextlib.suppress(duckdb.Error):
            self._writer.close()
        if database is not None:
            with contextlib.suppress(duckdb.Error):
                database.close()

    # --- what is known ---

    def _load_known(self, cursor: duckdb.DuckDBPyConnection, engine: str, since_ns: int) -> None:
        for table in TABLES:
            if table.kept:
                continue
            if table is SAMPLES:  # far too many to remember each
                names = ", ".join(f"'{name}'" for name in sorted(OWN_NAMES))
                stored = cursor.execute(
                    f"SELECT source, rank, max(at_ns) FROM {relation(cursor, SAMPLES.name, since_ns)}"
                    f" WHERE engine = ? AND at_ns >= ? AND name IN ({names}) GROUP BY ALL",
                    [engine, since_ns],
                ).fetchall()
                self._sampled_until.update(((engine, s, rank), at_ns) for s, rank, at_ns in stored)
                continue
            if table is REQUESTS:
                source = relation(cursor, REQUESTS.name, since_ns - UNENDED_NS)
                stored = cursor.execute(
                    f"WITH ended AS (FROM {source} SELECT id, p_engine, p_request, d_engine, d_request,"
                    f" arrived_at_ns + coalesce(ttft_ns + decode_generate_ns, {UNENDED_NS}) AS at_ns)"
                    " FROM ended WHERE ? IN (p_engine, d_engine) AND at_ns >= ?",
                    [engine, since_ns],
                ).fetchall()
                for _, p_engine, p_request, d_engine, d_request, ended_at_ns in stored:
                    self._known_legs[hash((p_engine, p_request))] = ended_at_ns
                    self._known_legs[hash((d_engine, d_request))] = ended_at_ns
            else:
                column = TIMES[table.name]
                source = relation(cursor, table.name, since_ns)
                stored = cursor.execute(
                    f"SELECT id FROM {source} WHERE engine = ? AND coalesce({column} >= ?, true)",
                    [engine, since_ns],
                ).fetchall()
            self._known[table.name].update((row[0], None) for row in stored)
            self._known_limit = max(self._known_limit, KNOWN_IDS + len(self._known[table.name]))

    def _unknown(self, name: str, rows: Sequence[Row]) -> list[Row]:
        if name == SAMPLES.name:
            return [row for row in rows if not self._is_old_sample(row)]
        known = self._known[name]
        fresh = []
        for row in rows:
            if row[0] not in known:
                known[row[0]] = None
                fresh.append(row)
        if name == REQUESTS.name:
            fresh = [row for row in fresh if not self._is_rest(row)]
            for row in fresh:
                self._known_legs.update(dict.fromkeys(_legs(row), 0))
            _forget_oldest(self._known_legs, 2 * self._known_limit)
        _forget_oldest(known, self._known_limit)
        return fresh

    def _is_old_sample(self, row: Row) -> bool:
        until_ns = self._sampled_until.get((row[_ENGINE], row[_SOURCE], row[_RANK]))
        return until_ns is not None and row[_AT_NS] <= until_ns and row[_NAME] in OWN_NAMES

    def _is_rest(self, row: Row) -> bool:
        """Whether the row tells what is left in the rings of a request that an earlier daemon stored whole:
        its id is another when the leg that came first is overwritten by now."""
        return any(row[_COLUMN["arrived_at_ns"]] < self._known_legs.get(leg, 0) for leg in _legs(row))

    # --- the writer thread ---

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            ticket, rows, count = batch
            if rows and not self._write(rows):
                return  # closing, and it can't be written: the rings have it still
            with self._changed:
                while self._queue and self._queue[0][0] <= ticket:
                    self._queue.popleft()
                self._queued_rows -= count
                self._committed = max(self._committed, ticket)
                self._changed.notify_all()
            self._do_work()
            self._apply_retention()

    def _next_batch(self) -> tuple[int, Rows, int] | None:
        """What to commit next, in one transaction; empty when only housekeeping is due; None to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._work or self._closing, RETENTION_INTERVAL_S)
            pause = self._next_commit - time.monotonic()
            if pause > 0:
                self._changed.wait_for(lambda: self._closing, pause)
            if not self._queue:
                return None if self._closing else (0, {}, 0)
            rows: Rows = {}
            count = last = 0
            for ticket, queued, queued_count in self._queue:
                if count and count + queued_count > BATCH_ROWS:
                    break
                for name, table_rows in queued.items():
                    rows.setdefault(name, []).extend(table_rows)
                count += queued_count
                last = ticket
            return last, rows, count

    def _do_work(self) -> None:
        """What `in_writer` was given."""
        while True:
            with self._changed:
                if not self._work:
                    return
                work, future = self._work.popleft()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                self._writer.begin()
                done = work(self._writer)
                self._writer.commit()
            except BaseException as error:
                with contextlib.suppress(duckdb.Error):
                    self._writer.rollback()
                future.set_exception(error)
            else:
                future.set_result(done)

    def _write(self, rows: Rows) -> bool:
        """Commit, however many tries it takes; False when closing came first."""
        tables: dict[str, pa.Table] = {}
        stored: Rows = {}
        for name, some in rows.items():
            table, good = self._to_arrow(name, some)
            if good:
                tables[name], stored[name] = table, good
        again = False
        while True:
            began = time.monotonic()
            self._next_commit = began + COMMIT_INTERVAL_S
            try:
                self._commit(tables, again)
            except (duckdb.Error, OSError, StoreError) as error:
                self._failed(_explain(self.path, error))
                with self._changed:
                    if self._changed.wait_for(lambda: self._closing, RETRY_S):
                        return False
                self._mend()
                again = True
                continue
            took_s = time.monotonic() - began
            self._commit_s.append(took_s)
            self.rows_stored += sum(t.num_rows for t in tables.values())
            if self.error:
                logger.warning("%s: writing again", self.path)
                self.error = ""
            if self._on_commit is not None:
                self._on_commit(stored, took_s)
            return True

    def _commit(self, tables: dict[str, pa.Table], again: bool) -> None:
        # A commit whose checkpoint fails raises too, although its rows may be in the log.
        new = " ANTI JOIN {name} USING (id)" if again else ""
        writer = self._writer
        writer.begin()
        try:
            for name, batch in tables.items():
                writer.register("batch", batch)
                if name == ENGINES.name:
                    changes = ", ".join(f"{column} = batch.{column}" for column in _ENGINE_UPDATES)
                    writer.execute(f"UPDATE engines SET {changes} FROM batch WHERE engines.id = batch.id")
                    writer.execute("INSERT INTO engines FROM batch ANTI JOIN engines USING (id)")
                else:
                    writer.execute(f"INSERT INTO {name} FROM batch" + new.format(name=name))
                writer.unregister("batch")
            writer.commit()
        except BaseException:
            with contextlib.suppress(duckdb.Error):
                writer.rollback()
            raise

    def _failed(self, reason: str) -> None:
        if reason != self.error:
            logger.error("%s", reason)
        self.error = reason

    def _mend(self) -> None:
        """Open the file anew when DuckDB has given up on it."""
        try:
            self._writer.execute("SELECT 1").fetchall()
        except duckdb.Error:
            self._close_database()
            try:
                database = self._open()
            except StoreError as error:
                self._failed(str(error))
                return
            self._writer = database.cursor()
            with self._readers_lock:
                self._database = database

    def _apply_retention(self) -> None:
        now = time.monotonic()
        if not self._retention_ns or self._archive is not None or now < self._next_retention:
            return
        self._next_retention = now + RETENTION_INTERVAL_S
        before_ns = time.time_ns() - self._retention_ns
        try:
            for table in TABLES:
                if not table.kept:
                    old = f"{TIMES[table.name]} < {before_ns}"
                    self._writer.execute(f"DELETE FROM {table.name} WHERE {old}")
        except duckdb.Error as error:
            logger.warning("old rows not deleted: %s", _explain(self.path, error))

    def _to_arrow(self, name: str, rows: list[Row]) -> tuple[pa.Table, list[Row]]:
        """The rows that fit the table, as Arrow and as they were."""
        if name == ENGINES.name:
            rows = list({row[0]: row for row in rows}.values())
        try:
            return _arrow_table(self._arrow[name], rows), rows
        except _UNFIT:
            # Rings are untrusted: one value that fits no column must not hold up the rest.
            good = [row for row in rows if _fits(self._arrow[name], row)]
            if self.rows_refused == 0:
                logger.error("table %s: a value fits no column; such rows are counted and dropped", name)
            self.rows_refused += len(rows) - len(good)
            return _arrow_table(self._arrow[name], good), good


def _arrow_table(arrow_schema: pa.Schema, rows: list[Row]) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(arrow_schema)
    arrays = [pa.array(c, f.type) for f, c in zip(arrow_schema, columns, strict=True)]
    return pa.Table.from_arrays(arrays, schema=arrow_schema)


def _fits(arrow_schema: pa.Schema, row: Row) -> bool:
    try:
        _arrow_table(arrow_schema, [row])
    except _UNFIT:
        return False
    return True


def _close_reader(reader: duckdb.DuckDBPyConnection) -> None:
    """Close a cursor that another thread may be using: it refuses until that is interrupted."""
    end = time.monotonic() + READER_CLOSE_S
    while time.monotonic() < end:
        with contextlib.suppress(duckdb.Error):  # closed by its reader
            reader.interrupt()
        with contextlib.suppress(duckdb.Error):
            reader.close()
            return
        time.sleep(0.002)


def _legs(row: Row) -> list[int]:
    """Of a row of `requests`, as they are known."""
    return [hash((row[engine], row[request])) for engine, request in _LEGS if row[engine] is not None]


def _forget_oldest(known: dict[int, Any], limit: int) -> None:
    for _ in range(len(known) - limit):
        del known[next(iter(known))]


def _explain(path: Path, error: Exception) -> str:
    """One line for what went wrong with `path`, with what to do where that is known."""
    if isinstance(error, StoreError):
        return str(error)
    text = " ".join(str(error).split("\n\n")[0].split())
    holder = re.search(r"\(PID (\d+)\)", text)
    if "Could not set lock" in text:
        who = f"process {holder[1]}" if holder else "another process"
        return f"{path}: {who} has this store open; stop it, or name another file"
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror or error}"
    for sign in ("No space left", "File too large", "Disk quota exceeded"):
        if sign in text:
            return f"{path}: the disk is full ({sign.lower()}); free some space"
    for sign in ("Permission denied", "Read-only file system", "Operation not permitted"):
        if sign in text:
            return f"{path}: can't be written ({sign.lower()}); name another file"
    if "not a valid DuckDB" in text:
        return f"{path}: not a valid DuckDB file; name another file"
    return f"{path}: {text}"
