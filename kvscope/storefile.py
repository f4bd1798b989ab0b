"""Opens what was stored, to read it: a store, a snapshot, or a directory of Parquet files.

A directory holds `v1/<table>/d=YYYY-MM-DD/h=HH/*.parquet`. What is opened can reach no other files, and its
settings are locked.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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
        "INSERT INTO meta VALUES ('schema_version', ?), ('made_by', ?)",
        [str(schema.VERSION), f"kvscope {__version__}"],
    )
    database.commit()


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
        raise KvscopeError(f"{path}: not a DuckDB file that can be read ({one_line(error)})") from None
    try:
        lock(connection)
        tables = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
        if not {"meta", *schema.BY_NAME} <= tables:
            raise KvscopeError(f"{path}: a DuckDB file, but no kvscope store; name a store or a snapshot")
        found = dict(connection.execute("SELECT key, value FROM meta").fetchall())
        if found.get("schema_version") != str(schema.VERSION):
            raise KvscopeError(
                f"{path}: store version {found.get('schema_version')} (of {found.get('made_by')}), "
                f"this kvscope reads version {schema.VERSION}; use the kvscope that wrote it"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _open_directory(path: Path) -> duckdb.DuckDBPyConnection:
    """A database in memory whose tables are views of the Parquet files; a table without files is empty."""
    import duckdb

    path = path.absolute()
    if any(character in str(path) for character in "*?[]{}"):
        raise KvscopeError(
            f"{printable(path)}: DuckDB takes *, ?, brackets and braces in a path for patterns; "
            "give the directory another name"
        )
    patterns = {name: f"{LAYOUT}/{name}/d=*/h=*/*.parquet" for name in schema.BY_NAME}
    filled = [name for name, pattern in patterns.items() if next(path.glob(pattern), None) is not None]
    if not filled:
        raise KvscopeError(
            f"{printable(path)}: no kvscope Parquet directory; it would hold "
            f"{LAYOUT}/requests/d=YYYY-MM-DD/h=HH/*.parquet"
        )
    connection = duckdb.connect(config=_CONFIG)
    try:
        connection.execute(f"SET allowed_directories = [{literal(str(path))}]")
        lock(connection)
        connection.execute(_FILES_TABLE)
        for name in filled:
            connection.execute(_FILES_OF, [name, f"{path}/{patterns[name]}", TIMES[name]])
        for name in schema.BY_NAME:
            # Rows of engines are wanted at any time, and are few.
            kind = "TABLE" if name == schema.ENGINES.name else "VIEW"
            connection.execute(f"CREATE {kind} {name} AS FROM {relation(connection, name)}")
    except duckdb.Error as error:
        connection.close()
        raise KvscopeError(f"{printable(path)}: can't be read ({one_line(error)})") from None
    except BaseException:
        connection.close()
        raise
    return connection


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
    ((catalog,),) = cursor.execute("SELECT current_database()").fetchall()
    own_name = f'"{catalog.replace(chr(34), chr(34) * 2)}".main."{table}"'
    if catalog != _IN_MEMORY:
        return own_name
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
        f"SELECT {_columns(table, names)} FROM read_parquet([{', '.join(map(literal, paths))}], "
        "hive_partitioning = false)"
        for names, paths in alike.items()
    ]
    return f"({' UNION ALL '.join(parts) or f'SELECT {_columns(table, ())} WHERE false'})"


def _columns(table: str, there: tuple[str, ...]) -> str:
    return ", ".join(
        f"CAST({name if column.name in there else 'NULL'} AS {column.type}) AS {name}"
        for column in schema.BY_NAME[table].columns
        for name in [f'"{column.name}"']
    )


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """No files, no extensions, no network, and no way to change that, for all cursors of the connection."""
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


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
