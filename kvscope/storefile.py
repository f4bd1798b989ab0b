"""Opens what was stored, to read it: a store, a snapshot, or a directory of Parquet files.

A directory holds `v1/<table>/d=YYYY-MM-DD/h=HH/*.parquet`. What is opened can reach no other files, and its
settings are locked. The store of a daemon with an archive (see `archive`) and its files are read as one.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvscope import __version__, schema
from kvscope.errors import KvscopeError
from kvscope.filters import literal
from kvscope.text import printable

if TYPE_CHECKING:
    import duckdb

TIMES = {t.name: next(c.name for c in t.columns if c.name.endswith("at_ns")) for t in schema.TABLES}
"""By table: the column that says when a row began."""
LAYOUT = "v1"
"""Version of the directory's layout, and the name of its first level."""
META = "CREATE TABLE meta (key VARCHAR, value VARCHAR)"
HOT_FROM = "hot_from_ns"
"""In the table `meta`: Unix time before which rows were moved to the archive, a whole hour."""
COLLECTOR = "collector"
"""In the table `meta`: names this store's files in an archive."""
_ARCHIVED = "archived:files"
"""Name of the database in memory that lists the archived files of a daemon's store, for all its cursors."""
_IN_MEMORY = "memory"
"""Name that DuckDB gives to a database without a file."""
_CONFIG: dict[str, str | bool | int | float | list[str]] = {
    "memory_limit": "2GB",
    "python_enable_replacements": "false",
}


def create_tables(database: duckdb.DuckDBPyConnection) -> None:
    """Make an empty database a store."""
    database.begin()
    for table in schema.TABLES:
        database.execute(schema.create_sql(table))
    database.execute(META)
    database.execute(
        "INSERT INTO meta VALUES ('schema_version', ?), ('made_by', ?), (?, ?)",
        [str(schema.VERSION), f"kvscope {__version__}", COLLECTOR, new_collector()],
    )
    database.commit()


def new_collector() -> str:
    """A name for the files of a store in an archive."""
    return secrets.token_hex(6)


def collector_of(connection: duckdb.DuckDBPyConnection) -> str:
    """The name of the store's files in an archive; empty where it has none."""
    found = connection.execute("SELECT value FROM meta WHERE key = ?", [COLLECTOR]).fetchall()
    # From a file that may be anyone's, and to be the name of files.
    return next((name for (name,) in found if name and re.fullmatch("[0-9a-f]{12}", name)), "")


def open_file(path: Path) -> duckdb.DuckDBPyConnection:
    """Open a store, a snapshot or a directory of Parquet files to read it, locked against everything else.

    Raises:
        KvscopeError: there is none, another process holds it, or it is no kvscope store of this version.
    """
    import duckdb

    if path.is_dir():
        return _open_directory(path)
    if not path.is_file():
        raise KvscopeError(f"{path}: there is no such file; name a store, a snapshot or a Parquet directory")
    try:
        connection = duckdb.connect(str(path), read_only=True, config=_CONFIG)
    except duckdb.Error as error:
        if "lock on file" in str(error):
            raise KvscopeError(
                f"{path}: a daemon is using it; ask the daemon instead (--url), or read a snapshot"
            ) from None
        raise KvscopeError(f"{path}: {_refusal(path, error)}") from None
    try:
        lock(connection)
        _check(connection, path)
    except BaseException:
        connection.close()
        raise
    return connection


def _refusal(path: Path, error: duckdb.Error) -> str:
    """Why DuckDB would not open a file to read it."""
    import duckdb

    if not os.access(path, os.R_OK):
        return "it may not be read; have its owner allow it, or name a copy"
    if isinstance(error, duckdb.CatalogException):  # DuckDB tells CSV and JSON by the name's end
        return "its name is not that of a DuckDB file; name a store, a snapshot or a Parquet directory"
    return f"not a DuckDB file that can be read ({one_line(error)})"


def _check(connection: duckdb.DuckDBPyConnection, path: Path) -> None:
    """Raises:
    KvscopeError: it is no kvscope store of this version.
    """
    tables = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    if not {"meta", *schema.BY_NAME} <= tables:
        raise KvscopeError(f"{path}: a DuckDB file, but no kvscope store; name a store or a snapshot")
    found = dict(connection.execute("SELECT key, value FROM meta").fetchall())
    if found.get("schema_version") != str(schema.VERSION):
        raise KvscopeError(
            f"{path}: store version {found.get('schema_version')} (of {found.get('made_by')}), "
            f"this kvscope reads version {schema.VERSION}; use the kvscope that wrote it"
        )


def append(
    path: Path, table: schema.Table, make: Callable[[duckdb.DuckDBPyConnection], tuple[Any, ...]]
) -> None:
    """Add the row that `make` returns, given a cursor, to a store or a snapshot that no process has open.

    Raises:
        KvscopeError: there is none, another process holds it, it can't be written, or it is no kvscope store.
    """
    import duckdb

    if path.is_dir():
        raise KvscopeError(
            f"{path}: a Parquet directory is only read; write to the daemon (--url), a store or a snapshot"
        )
    if not path.is_file():
        raise KvscopeError(f"{path}: there is no such file; name a store or a snapshot")
    config = {**_CONFIG, "enable_external_access": "false", "lock_configuration": "true"}
    try:
        with duckdb.connect(str(path), config=config) as connection:
            _check(connection, path)
            row = make(connection.cursor())
            connection.execute(f"INSERT INTO {table.name} VALUES ({', '.join('?' * len(row))})", row)
    except duckdb.Error as error:
        if "lock on file" in str(error):
            raise KvscopeError(
                f"{path}: a daemon or another program is using it; write to the daemon instead (--url)"
            ) from None
        raise KvscopeError(f"{path}: can't be written ({one_line(error)}); name another file") from None


def _open_directory(path: Path) -> duckdb.DuckDBPyConnection:
    """A database in memory whose tables are views of the Parquet files; a table without files is empty."""
    import duckdb

    path = path.absolute()
    if reason := bad_directory(path):
        raise KvscopeError(f"{printable(path)}: {reason}")
    files = {name: found for name in schema.BY_NAME if (found := _files(path, name))}
    if not files:
        raise KvscopeError(
            f"{printable(path)}: no kvscope Parquet directory; it would hold "
            f"{LAYOUT}/requests/d=YYYY-MM-DD/h=HH/*.parquet"
        )
    connection = duckdb.connect(config=_CONFIG)
    try:
        connection.execute(f"SET allowed_directories = [{literal(str(path))}]")
        lock(connection)
        connection.execute(_FILES_TABLE)
        for name, found in files.items():
            connection.execute(_FILES_OF, [name, found, TIMES[name]])
        for name in schema.BY_NAME:
            kind = "TABLE" if schema.BY_NAME[name].kept else "VIEW"
            connection.execute(f"CREATE {kind} {name} AS FROM {relation(connection, name)}")
    except duckdb.Error as error:
        connection.close()
        for file in (file for found in files.values() for file in found):
            _check_opens(file)
        raise KvscopeError(
            f"{printable(path)}: can't be read ({one_line(error)}); move a damaged file away to go without it"
        ) from None
    except BaseException:
        connection.close()
        raise
    return connection


def _files(directory: Path, table: str) -> list[str]:
    """The table's files. Listed here, as `glob`, Python's and DuckDB's, passes over what it may not read.

    Raises:
        KvscopeError: a folder can't be listed.
    """
    folders = [f"{directory}/{LAYOUT}/{table}"]
    for prefix in ("d=", "h="):
        folders = [entry.path for entry in _entries(folders) if entry.name.startswith(prefix)]
    return [
        entry.path
        for entry in _entries(folders)
        # A link to nothing is for DuckDB to refuse.
        if entry.name.endswith(".parquet") and (entry.is_symlink() or entry.is_file())
    ]


def _entries(folders: list[str]) -> Iterator[os.DirEntry[str]]:
    for folder in folders:
        try:
            with os.scandir(folder) as entries:
                yield from entries
        except OSError as error:
            if isinstance(error, FileNotFoundError) and not os.path.islink(folder):
                continue  # a table without files
            raise _unreadable(folder, error) from None


def _check_opens(file: str) -> None:
    try:
        open(file, "rb").close()
    except OSError as error:
        raise _unreadable(file, error) from None


def _unreadable(path: str, error: OSError) -> KvscopeError:
    return KvscopeError(
        f"{printable(path)}: can't be read ({error.strerror}); allow it, or move it away to go without it"
    )


_FILES_TABLE = """CREATE TABLE parquet_files (
    table_name VARCHAR, path VARCHAR, first_ns BIGINT, last_ns BIGINT, column_names VARCHAR[])"""
_FILES_OF = """INSERT INTO parquet_files
    SELECT
        $1,
        file_name,
        min(TRY_CAST(stats_min_value AS BIGINT)) FILTER (path_in_schema = $3),
        max(TRY_CAST(stats_max_value AS BIGINT)) FILTER (path_in_schema = $3),
        list_sort(list(DISTINCT split_part(path_in_schema, ', ', 1)))
    FROM parquet_metadata($2)
    GROUP BY file_name"""
"""What the files' own statistics say, read once: each query then opens only those of its time."""


def relation(
    cursor: duckdb.DuckDBPyConnection, table: str, since_ns: int = 0, until_ns: int | None = None
) -> str:
    """The table as it is stored, for a FROM: by its own name, which no temporary view takes the place of.

    Args:
        since_ns, until_ns: rows of other times may be left out.
    """
    catalog, archived = cursor.execute(
        "SELECT current_database(), bool_or(database_name = ?) FROM duckdb_databases()", [_ARCHIVED]
    ).fetchall()[0]
    own_name = _own_name(catalog, table)
    if catalog != _IN_MEMORY:
        return _with_archived(cursor, catalog, table, since_ns, until_ns) if archived else own_name
    tables = {name for (name,) in cursor.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    if "parquet_files" not in tables or table in tables:
        return own_name
    found = cursor.execute(
        f"SELECT path, column_names FROM {_IN_MEMORY}.main.parquet_files WHERE table_name = ? "
        "AND coalesce(last_ns >= ?, true) AND coalesce(first_ns < ?, true) ORDER BY path",
        [table, since_ns, 2**63 - 1 if until_ns is None else until_ns],
    ).fetchall()
    # Files with the same columns are read together; those that an older kvscope wrote may have fewer.
    alike: dict[tuple[str, ...], list[str]] = {}
    for path, names in found:
        alike.setdefault(tuple(names), []).append(path)
    parts = [
        f"SELECT {columns_sql(table, names)} FROM {_read_parquet(paths)}" for names, paths in alike.items()
    ]
    return f"({' UNION ALL '.join(parts) or f'SELECT {columns_sql(table, ())} WHERE false'})"


def stored(
    cursor: duckdb.DuckDBPyConnection, table: str, since_ns: int = 0, until_ns: int | None = None
) -> str:
    """As `relation`, without what was archived: the table in the file that is open."""
    ((catalog,),) = cursor.execute("SELECT current_database()").fetchall()
    return _own_name(catalog, table)


def has_archived(cursor: duckdb.DuckDBPyConnection) -> bool:
    """Whether `relation` may be more than the table: a daemon's store with an archive."""
    found = cursor.execute("SELECT 1 FROM duckdb_databases() WHERE database_name = ?", [_ARCHIVED]).fetchall()
    return bool(found)


def _own_name(catalog: str, table: str) -> str:
    return f'"{catalog.replace(chr(34), chr(34) * 2)}".main."{table}"'


def _with_archived(
    cursor: duckdb.DuckDBPyConnection, catalog: str, table: str, since_ns: int, until_ns: int | None
) -> str:
    own_name, at = _own_name(catalog, table), TIMES[table]
    found = cursor.execute(
        f'SELECT path, last_ns FROM "{_ARCHIVED}".main.parquet_files '
        "WHERE table_name = ? AND last_ns >= ? AND first_ns < ? ORDER BY path",
        [table, since_ns, 2**63 - 1 if until_ns is None else until_ns],
    ).fetchall()
    if not found:
        return own_name
    # Asked when the query runs, so that rows are seen once while they are moved. A row that came late is in
    # the store for some time, and already in its file.
    hot_from = f"SELECT CAST(max(value) AS BIGINT) FROM {_own_name(catalog, 'meta')} WHERE key = '{HOT_FROM}'"
    late = f"SELECT id, {at} FROM {own_name} WHERE {at} <= {max(last_ns for _, last_ns in found)}"
    columns = columns_sql(table)
    return (
        f"(SELECT {columns} FROM {own_name} UNION ALL SELECT {columns} "
        f"FROM {_read_parquet([path for path, _ in found])} AS moved "
        f"ANTI JOIN ({late} AND {at} < ({hot_from})) AS late USING (id, {at}) WHERE {at} < ({hot_from}))"
    )


def _read_parquet(paths: list[str]) -> str:
    return f"read_parquet([{', '.join(map(literal, paths))}], hive_partitioning = false)"


def columns_sql(table: str, there: Collection[str] | None = None) -> str:
    """The table's columns for a SELECT, each with its type; NULL for one that is not among those `there`."""
    return ", ".join(
        f"CAST({name if there is None or column.name in there else 'NULL'} AS {column.type}) AS {name}"
        for column in schema.BY_NAME[table].columns
        for name in [f'"{column.name}"']
    )


def bad_directory(path: Path) -> str:
    """Why a directory of this name can't hold Parquet files that DuckDB reads; empty when it can."""
    if any(character in str(path) for character in "*?[]{}"):
        return (
            "DuckDB takes *, ?, brackets and braces in a path for patterns; give the directory another name"
        )
    return "" if str(path).isprintable() else "give the directory a name without control characters"


def attach_archive(connection: duckdb.DuckDBPyConnection, directory: Path) -> None:
    """Let cursors of a store read files in `directory`, those that `publish` tells; before `lock`."""
    connection.execute(f"ATTACH ':memory:' AS \"{_ARCHIVED}\"")
    connection.execute(
        f'CREATE TABLE "{_ARCHIVED}".main.parquet_files '
        "(table_name VARCHAR, path VARCHAR, first_ns BIGINT, last_ns BIGINT)"
    )
    connection.execute(f"SET allowed_directories = [{literal(str(directory))}]")


def publish(cursor: duckdb.DuckDBPyConnection, files: Any) -> None:
    """Have questions read these files of a store's archive.

    Args:
        files: a pyarrow table: table_name, path, first_ns and last_ns of what may be in it.
    """
    cursor.register("published", files)
    try:
        cursor.begin()
        cursor.execute(f'DELETE FROM "{_ARCHIVED}".main.parquet_files')
        cursor.execute(f'INSERT INTO "{_ARCHIVED}".main.parquet_files FROM published')
        cursor.commit()
    finally:
        cursor.unregister("published")


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """No files, no extensions, no network, and no way to change that, for all cursors of the connection."""
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C while DuckDB works, which it tells of as a RuntimeError, is Ctrl-C."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != "Query interrupted":
            raise
        raise KeyboardInterrupt from None


def one_line(error: Exception) -> str:
    """DuckDB's message without the drawing below it."""
    lines = [line.strip() for line in str(error).splitlines()]
    head: list[str] = []
    for line in lines:
        if line.startswith("LINE ") or len(head) == 3:
            break
        if line:
            head.append(line)
    return printable(" ".join(head))[:500]
