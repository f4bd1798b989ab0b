"""Writes hours of a store as Parquet: `v1/<table>/d=YYYY-MM-DD/h=HH/<collector>.parquet`.

One file per hour (UTC, by the table's time), table and collector, sorted by time. A file is written beside
its place, synced, and renamed, so that whoever reads the directory sees it whole, as it was or as it is. It
only gains rows: one that comes late is merged into the file of its hour, and no row is in it twice.

Tables that are kept (`schema.Table.kept`) are few rows that may change: their files are written anew when
they have. So are those of the rows without a time, in the folders that Hive has for them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import IO, Any, NamedTuple

import duckdb
import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet

from kvscope import __version__, schema
from kvscope.errors import KvscopeError, UsageError
from kvscope.join import LONG_QUIET_NS
from kvscope.storefile import HOT_FROM, LAYOUT, TIMES, bad_directory, columns_sql, one_line, stored
from kvscope.text import printable

HOUR_NS = 3600 * 10**9
CLOSED_NS = LONG_QUIET_NS + 15 * 60 * 10**9
"""After its end an hour is closed: a request is stored when it is over or has long been quiet."""
SLICE_ROWS = 50_000
"""Rows of a row group, and rows held in memory at once."""
LABEL = "kvscope archive"
"""In each file's metadata, so that it says what it is."""

UNTIMED = -1
"""In the place of an hour: the rows without a time, whose beginning was not observed."""
_UNTIMED_FOLDER = "__HIVE_DEFAULT_PARTITION__"
_EXISTING = "archived_hour"
"""Name under which a cursor has the file of the hour that is written anew."""
_LOCK_S = 30.0
_MAX_FOOTER = {"thrift_string_size_limit": 64 << 20, "thrift_container_size_limit": 1 << 20}
_KEPT = {table.name for table in schema.TABLES if table.kept}

Relation = Callable[[duckdb.DuckDBPyConnection, str, int, "int | None"], str]
"""A table's rows from some time until some time, for a FROM: `storefile.relation` or `storefile.stored`."""


class ArchiveError(KvscopeError):
    """The archive can't be read or written; the text names the file and says what to do."""


class DamagedFile(ArchiveError):
    """A file of the archive is not what kvscope wrote; others may be."""


class Mark(NamedTuple):
    """What tells a set of rows from others: of the ids and times, of kept tables of all columns."""

    rows: int
    hash: int


class Written(NamedTuple):
    """One file that was written."""

    table: str
    hour_ns: int | None
    """Unix time at which its hour begins; None for rows without a time."""
    rows: int
    bytes: int


class _Covered(NamedTuple):
    mark: Mark
    """Of rows of the store that are in the file."""
    file: tuple[int, int, int]
    """The file it was, as `identity` tells."""


class Archive:
    """One collector's files in a directory, which others may share. For one thread at a time.

    Args:
        directory: made when missing, by the first write.
        collector: names the files.

    Raises:
        UsageError: DuckDB could not read a directory of that name.
    """

    def __init__(self, directory: Path, collector: str) -> None:
        if reason := bad_directory(directory):
            raise UsageError(f"{printable(directory)}: {reason}")
        self.directory = directory
        self.collector = collector
        self._covered: dict[tuple[str, int], _Covered] = {}

    def path(self, table: str, hour_ns: int) -> Path:
        """Where the hour's file is, or will be."""
        day = of_day = _UNTIMED_FOLDER
        if hour_ns != UNTIMED:
            moment = datetime.fromtimestamp(hour_ns // 10**9, timezone.utc)
            day, of_day = f"{moment:%Y-%m-%d}", f"{moment:%H}"
        return self.directory / LAYOUT / table / f"d={day}" / f"h={of_day}" / self._name

    @property
    def _name(self) -> str:
        return f"{self.collector}.parquet"

    def files(self) -> dict[tuple[str, int], Path]:
        """This collector's files of hours, by table and hour.

        Raises:
            ArchiveError: the directory can't be read.
        """
        found = {}
        for table in schema.BY_NAME:
            for day in _folders(self.directory / LAYOUT / table, _DAY):
                for hour in _folders(Path(day), _HOUR):
                    path = Path(day, hour, self._name)
                    hour_ns = _hour_of(Path(day).name, Path(hour).name)
                    if hour_ns is not None and path.is_file():
                        found[table, hour_ns] = path
        return found

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """While it is written: no other process, and no other thread, writes files of this collector.

        Raises:
            ArchiveError: another does, or the directory can't be written.
        """
        top = self.directory / LAYOUT
        lock = top / f".{self.collector}.lock"
        try:
            _make_directory(top)
            # The directory may be anyone's, who could have it be a link to a file of ours.
            handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
            file = os.fdopen(handle, "w")
        except OSError as error:
            raise explained(self.directory, error) from None
        with file:
            end = time.monotonic() + _LOCK_S
            while not _try_lock(lock, file):
                if time.monotonic() > end:
                    raise ArchiveError(
                        f"{printable(self.directory)}: another process writes to it; try again later"
                    )
                time.sleep(0.05)
            yield

    def covered(self) -> dict[tuple[str, int], Mark]:
        """By table and hour: the rows of the store that are known to be in files that are there now."""
        return {
            key: covered.mark
            for key, covered in self._covered.items()
            if identity(self.path(*key)) == covered.file
        }

    def update(
        self, cursor: duckdb.DuckDBPyConnection, relation: Relation, table: str, hour_ns: int
    ) -> Written | None:
        """See to it that all rows of the hour are in its file; None when they are.

        Raises:
            ArchiveError: it can't be written, or (`DamagedFile`) what is there can't be read.
        """
        path = self.path(table, hour_ns)
        cursor.begin()  # what is written is what the mark tells, whatever is stored meanwhile
        try:
            return self._update(cursor, relation, table, hour_ns, path)
        except (OSError, duckdb.Error, pa.ArrowException) as error:
            raise explained(path, error) from None
        finally:
            with contextlib.suppress(duckdb.Error):
                cursor.rollback()
            with contextlib.suppress(duckdb.Error):
                cursor.unregister(_EXISTING)

    def _update(
        self, cursor: duckdb.DuckDBPyConnection, relation: Relation, table: str, hour_ns: int, path: Path
    ) -> Written | None:
        rows = _hour_sql(cursor, relation, table, hour_ns)
        mark = _mark(cursor, rows, table)
        before = identity(path)
        content, whole = rows, mark
        if before is not None:
            known = self._covered.get((table, hour_ns))
            if known == (mark, before):
                return None
            file_mark, names = _read_footer(path)
            missing = file_mark != mark
            if missing and table not in _KEPT and hour_ns != UNTIMED:
                try:
                    cursor.register(_EXISTING, pyarrow.dataset.dataset(path, format="parquet"))
                    own = f"SELECT id, {TIMES[table]} FROM {rows}"
                    existing = f"SELECT {columns_sql(table, names)} FROM {_EXISTING}"
                    key = f"USING (id, {TIMES[table]})"
                    missing = _count(cursor, f"({own}) ANTI JOIN ({existing}) AS existing {key}") > 0
                    content = f"({existing} ANTI JOIN ({own}) AS own {key} UNION ALL SELECT * FROM {rows})"
                    whole = _mark(cursor, content, table) if missing else whole
                except _UNREADABLE as error:
                    if _is_passing(error):
                        raise
                    raise damaged(path, error) from None
            if not missing:
                self._covered[table, hour_ns] = _Covered(mark, before)
                return None
        elif not mark.rows:
            return None
        size = self._write(cursor, content, table, path, whole)
        after = identity(path)
        if after is not None:
            self._covered[table, hour_ns] = _Covered(mark, after)
        return Written(table, None if hour_ns == UNTIMED else hour_ns, whole.rows, size)

    def _write(
        self, cursor: duckdb.DuckDBPyConnection, content: str, table: str, path: Path, mark: Mark
    ) -> int:
        """Returns the file's bytes."""
        _make_directory(path.parent)
        # A name that begins with a dot is no data to Spark. A draft that a crash left is replaced: its hour
        # is written again.
        draft = path.with_name(f".{path.name}.part")
        draft.unlink(missing_ok=True)
        try:
            with draft.open("xb") as file:
                self._write_slices(cursor, content, table, file, mark)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            draft.rename(path)
        except BaseException:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise
        _sync_directory(path.parent)
        return size

    def _write_slices(
        self, cursor: duckdb.DuckDBPyConnection, content: str, table: str, file: IO[bytes], mark: Mark
    ) -> None:
        at = TIMES[table]
        names = columns_sql(table)
        writer: Any = None
        try:
            for within in _slices(cursor, content, at, mark.rows):
                sql = f"SELECT {names} FROM {content} WHERE {within} ORDER BY {at}, id"
                rows = cursor.sql(sql).to_arrow_table()
                if writer is None:
                    about = {**self._about(table, mark), **(rows.schema.metadata or {})}
                    order = pa.parquet.SortingColumn(rows.schema.get_field_index(at))
                    writer = pa.parquet.ParquetWriter(
                        file, rows.schema.with_metadata(about), compression="zstd", sorting_columns=[order]
                    )
                writer.write_table(rows, row_group_size=max(1, rows.num_rows))
        finally:
            if writer is not None:
                writer.close()

    def _about(self, table: str, mark: Mark) -> dict[bytes, bytes]:
        about = {
            "kvscope": LABEL,
            "kvscope_version": __version__,
            "kvscope_schema_version": str(schema.VERSION),
            "kvscope_table": table,
            "kvscope_collector": self.collector,
            "kvscope_rows": f"{mark.rows} {mark.hash}",
        }
        return {key.encode(): value.encode() for key, value in about.items()}


def checked_directory(path: Path) -> Path:
    """The directory, if it can take an archive: it is new, empty or an archive.

    Raises:
        UsageError: it is something else.
    """
    try:
        if path.is_dir():
            names = {entry.name for entry in path.iterdir()}
            if names and LAYOUT not in names:
                raise UsageError(
                    f"{printable(path)}: it has other files; name a new directory, or an archive"
                )
        elif path.exists():
            raise UsageError(f"{printable(path)}: not a directory; name another")
        elif not path.parent.is_dir():
            raise UsageError(
                f"{printable(path)}: there is no {printable(path.parent)}; make it, or name another"
            )
    except OSError as error:
        raise explained(path, error) from None
    return path


def hours(
    cursor: duckdb.DuckDBPyConnection,
    relation: Relation,
    table: str,
    since_ns: int = 0,
    until_ns: int | None = None,
) -> dict[int, Mark]:
    """The hours (Unix time of their beginning) in which the table has rows, oldest first."""
    at = TIMES[table]
    rows = f"SELECT * FROM {relation(cursor, table, since_ns, until_ns)} WHERE {at} >= {max(0, since_ns)}"
    if until_ns is not None:
        rows += f" AND {at} < {until_ns}"
    found = cursor.execute(
        f"SELECT {at} - {at} % {HOUR_NS} AS hour, {_mark_sql(table)} FROM ({rows}) AS t "
        "GROUP BY hour ORDER BY hour"
    ).fetchall()
    return {hour: Mark(*mark) for hour, *mark in found}


def write(
    archive: Archive,
    cursor: duckdb.DuckDBPyConnection,
    relation: Relation,
    since_ns: int = 0,
    until_ns: int | None = None,
) -> Iterator[tuple[int, list[Written]]]:
    """Write the hours of all tables that have some time in [since, until), oldest first, and at last what is
    always written whole. Yields each hour, and what was written of it; that of the last as `UNTIMED`.

    Raises:
        ArchiveError: it can't be written.
    """
    since_ns -= since_ns % HOUR_NS
    if until_ns is not None:
        until_ns += -until_ns % HOUR_NS
    plan: dict[int, list[str]] = {}
    for table in schema.BY_NAME:
        if table not in _KEPT:
            for hour_ns in hours(cursor, relation, table, since_ns, until_ns):
                plan.setdefault(hour_ns, []).append(table)
    for hour_ns, tables in sorted(plan.items()):
        done = [archive.update(cursor, relation, table, hour_ns) for table in tables]
        yield hour_ns, [one for one in done if one]
    done = [archive.update(cursor, relation, table, hour_ns) for table, hour_ns in always(cursor, relation)]
    yield UNTIMED, [one for one in done if one]


def always(cursor: duckdb.DuckDBPyConnection, relation: Relation) -> dict[tuple[str, int], Mark]:
    """What is archived whole at any time: hours of the kept tables, and of others the rows without a time."""
    found = {}
    for table in schema.BY_NAME:
        if table in _KEPT:
            found.update({(table, hour_ns): mark for hour_ns, mark in hours(cursor, relation, table).items()})
        else:
            mark = _mark(cursor, _hour_sql(cursor, relation, table, UNTIMED), table)
            if mark.rows:
                found[table, UNTIMED] = mark
    return found


def closed_until_ns(now_ns: int) -> int:
    """Unix time up to which all hours are closed."""
    closed = now_ns - CLOSED_NS
    return closed - closed % HOUR_NS


def hot_from_ns(cursor: duckdb.DuckDBPyConnection) -> int:
    """Unix time from which on the store has all rows; before, they are in the archive. 0: it has all."""
    found = cursor.execute("SELECT value FROM meta WHERE key = ?", [HOT_FROM]).fetchall()
    return int(found[0][0]) if found else 0


def drop_archived(
    cursor: duckdb.DuckDBPyConnection, before_ns: int, covered: Mapping[tuple[str, int], Mark]
) -> int:
    """In a transaction of the store's writer: delete rows of hours before `before_ns` that are archived, and
    move the time from which on the store has all rows as far as no row was left.

    Args:
        covered: of the archive; an hour of which the store has other rows keeps them.

    Returns:
        Rows deleted.
    """
    hot_from = hot_from_ns(cursor)
    before_ns = max(hot_from, before_ns - before_ns % HOUR_NS)
    marks = {
        table: hours(cursor, stored, table, 0, before_ns) for table in schema.BY_NAME if table not in _KEPT
    }
    for table, found in marks.items():
        for hour_ns, mark in found.items():
            if hour_ns >= hot_from and covered.get((table, hour_ns)) != mark:
                before_ns = min(before_ns, hour_ns)
    deleted = 0
    for table, found in marks.items():
        gone = [h for h, mark in found.items() if h < before_ns and covered.get((table, h)) == mark]
        if gone:
            at = TIMES[table]
            deleted += sum(found[hour_ns].rows for hour_ns in gone)
            cursor.execute(
                f"DELETE FROM {table} WHERE {at} >= {gone[0]} AND {at} < {gone[-1] + HOUR_NS} "
                f"AND {at} - {at} % {HOUR_NS} IN ({', '.join(map(str, gone))})"
            )
    if before_ns > hot_from:
        cursor.execute("DELETE FROM meta WHERE key = ?", [HOT_FROM])
        cursor.execute("INSERT INTO meta VALUES (?, ?)", [HOT_FROM, str(before_ns)])
    return deleted


def explained(path: Path, error: Exception) -> ArchiveError:
    """One line for what went wrong with `path`, with what to do."""
    if isinstance(error, ArchiveError):
        return error
    if isinstance(error, OSError) and error.errno is not None:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        hint = "free some space" if full else "name another directory, or mend this one"
        return ArchiveError(f"{printable(path)}: {printable(error.strerror)}; {hint}")
    return ArchiveError(f"{printable(path)}: {one_line(error)}")


_UNREADABLE = (duckdb.Error, pa.ArrowException, OSError, ValueError)
"""What reading a file may raise; pyarrow says that a footer makes no sense by an OSError without a number."""


def _is_passing(error: Exception) -> bool:
    """Whether a file could not be read for another reason than what is in it."""
    if isinstance(error, OSError):
        return error.errno is not None
    return isinstance(error, (duckdb.OutOfMemoryException, duckdb.InterruptException, MemoryError))


def damaged(path: Path, error: Exception) -> DamagedFile:
    """One line for a file that is not what kvscope writes."""
    return DamagedFile(
        f"{printable(path)}: not a file that kvscope can add to ({one_line(error)}); move it away, and the "
        "hour is written anew from what the store has"
    )


def damage(path: Path, whole: bool) -> str:
    """One line for a file that questions can't read; empty where they can, as far as its end tells, or, which
    takes long, the `whole` of it."""
    try:
        with path.open("rb") as file:
            found = pa.parquet.ParquetFile(file, **_MAX_FOOTER)
            for _ in found.iter_batches(use_threads=False) if whole else ():
                pass
    except _UNREADABLE as error:
        if _is_passing(error) and not (isinstance(error, OSError) and error.errno == errno.EIO):
            return ""
        return damaged_line(path, one_line(error))
    return ""


def damaged_line(path: Path, reason: str) -> str:
    return (
        f"{printable(path)}: damaged ({reason}), and questions about its hour fail; put a copy of it in its "
        "place, or move it away to go without the rows that only it has; until then ask with --since"
    )


# --- one hour --------------------------------------------------------------------------------------


def _hour_sql(cursor: duckdb.DuckDBPyConnection, relation: Relation, table: str, hour_ns: int) -> str:
    at, end_ns, columns = TIMES[table], hour_ns + HOUR_NS, columns_sql(table)
    if hour_ns == UNTIMED:
        return f"(SELECT {columns} FROM {relation(cursor, table, 0, None)} WHERE {at} IS NULL)"
    source = relation(cursor, table, hour_ns, end_ns)
    return f"(SELECT {columns} FROM {source} WHERE {at} >= {hour_ns} AND {at} < {end_ns})"


def _mark_sql(table: str) -> str:
    of = "t" if table in _KEPT else f"id, {TIMES[table]}"
    return f"count(*), coalesce(bit_xor(hash({of})), 0)"


def _mark(cursor: duckdb.DuckDBPyConnection, rows: str, table: str) -> Mark:
    return Mark(*cursor.execute(f"SELECT {_mark_sql(table)} FROM {rows} AS t").fetchall()[0])


def _count(cursor: duckdb.DuckDBPyConnection, rows: str) -> int:
    return int(cursor.execute(f"SELECT count(*) FROM {rows}").fetchall()[0][0])


def _slices(cursor: duckdb.DuckDBPyConnection, rows: str, at: str, count: int) -> list[str]:
    """Conditions of slices, in order of time: about `SLICE_ROWS` rows, those of one moment together."""
    parts = -(-count // SLICE_ROWS)
    shares = ", ".join(str(part / parts) for part in range(1, parts))
    cuts: list[int] = []
    if shares:
        ((found,),) = cursor.execute(f"SELECT quantile_disc({at}, [{shares}]) FROM {rows}").fetchall()
        cuts = sorted(set(found or ()))
    if not cuts:
        return ["true"]
    between = [f"{at} > {first} AND {at} <= {last}" for first, last in pairwise(cuts)]
    return [f"{at} <= {cuts[0]}", *between, f"{at} > {cuts[-1]}"]


def _read_footer(path: Path) -> tuple[Mark | None, tuple[str, ...]]:
    """What the file's metadata says of its rows, and the names of its columns."""
    try:
        with path.open("rb") as file:
            found = pa.parquet.ParquetFile(file, **_MAX_FOOTER)
            names, about = found.schema_arrow.names, found.metadata.metadata or {}
            rows = found.metadata.num_rows
    except _UNREADABLE as error:
        if _is_passing(error):
            raise
        raise damaged(path, error) from None
    told = re.fullmatch(rb"(\d{1,19}) (\d{1,20})", about.get(b"kvscope_rows", b""))
    mark = Mark(int(told[1]), int(told[2])) if told and int(told[1]) == rows else None
    return mark, tuple(name for name in names if isinstance(name, str))


# --- the directory ---------------------------------------------------------------------------------

_DAY, _HOUR = re.compile(r"d=\d{4}-\d\d-\d\d"), re.compile(r"h=\d\d")


def _folders(directory: Path, pattern: re.Pattern[str]) -> Iterable[str]:
    try:
        with os.scandir(directory) as entries:
            return [entry.path for entry in entries if pattern.fullmatch(entry.name)]
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise explained(directory, error) from None


def _hour_of(day: str, hour: str) -> int | None:
    """Unix nanoseconds of `d=…` and `h=…`; None where there is no such hour."""
    try:
        moment = datetime.strptime(f"{day} {hour} +0000", "d=%Y-%m-%d h=%H %z")
        return int(moment.timestamp()) * 10**9
    except (ValueError, OverflowError):
        return None


def identity(path: Path) -> tuple[int, int, int] | None:
    """What changes when another file takes its place, or it is written to; None when there is none.

    Raises:
        ArchiveError: that can't be told.
    """
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise explained(path, error) from None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _make_directory(path: Path) -> None:
    """With those above it, each synced into the one above, so that a power cut takes no folder."""
    if not path.is_dir():
        _make_directory(path.parent)
        path.mkdir(exist_ok=True)
        _sync_directory(path.parent)


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _try_lock(path: Path, file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks, a server that is gone
        raise explained(path, error) from None
    return True
