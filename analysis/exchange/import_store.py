"""The store that an import fills: a new file, or one that is added to. Nothing is stored twice."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvscope import schema, storefile
from kvscope.errors import KvscopeError, UsageError
from kvscope.outfile import new_file
from kvscope.text import printable

if TYPE_CHECKING:
    import duckdb
    import pyarrow

BATCH_ROWS = 5000
MEMORY = "1GB"
_NAMED_BY: dict[str, tuple[str, ...]] = {
    # Ids of samples are counted up by the daemon that took them.
    schema.SAMPLES.name: ("id", "at_ns", "name", "engine", "host"),
}
"""By table: the columns that name a row, where that is not its key alone."""

Row = tuple[Any, ...]


class Store:
    """Takes rows of all tables."""

    def __init__(self, connection: duckdb.DuckDBPyConnection) -> None:
        self._connection = connection
        self._waiting: dict[str, list[Row]] = {}
        self._schemas: dict[str, pyarrow.Schema] = {}
        self.stored: dict[str, int] = {}
        """Rows by table."""
        self.known: dict[str, int] = {}
        """Rows that were there already."""

    def add(self, table: str, row: Row) -> None:
        """A row in the order of the table's columns."""
        rows = self._waiting.setdefault(table, [])
        rows.append(row)
        if len(rows) >= BATCH_ROWS:
            self._write(table)

    def flush(self) -> None:
        for table in list(self._waiting):
            self._write(table)

    def add_batch(self, table: str, batch: pyarrow.Table) -> None:
        """Rows as Arrow has them, with the table's columns."""
        if not batch.num_rows:
            return
        names = _NAMED_BY.get(table, (schema.BY_NAME[table].key,))
        same = " AND ".join(f't."{name}" IS NOT DISTINCT FROM b."{name}"' for name in names)
        listed = ", ".join(f'"{column.name}"' for column in schema.BY_NAME[table].columns)
        key = ", ".join(f'"{name}"' for name in names)
        self._connection.register("batch", batch)
        stored = self._connection.execute(
            f"INSERT INTO {table} ({listed}) SELECT {listed} FROM batch AS b "
            f"WHERE NOT EXISTS (FROM {table} AS t WHERE {same}) "
            f"QUALIFY row_number() OVER (PARTITION BY {key}) = 1"
        ).fetchall()[0][0]
        self._connection.unregister("batch")
        self.stored[table] = self.stored.get(table, 0) + stored
        self.known[table] = self.known.get(table, 0) + batch.num_rows - stored

    def _write(self, table: str) -> None:
        import pyarrow

        rows = self._waiting.pop(table, None)
        if not rows:
            return
        if table not in self._schemas:
            empty = self._connection.sql(f"FROM {table} LIMIT 0").to_arrow_table()
            self._schemas[table] = empty.schema
        types = self._schemas[table]
        arrays = [
            pyarrow.array(column, field.type)
            for column, field in zip(zip(*rows, strict=True), types, strict=True)
        ]
        self.add_batch(table, pyarrow.Table.from_arrays(arrays, schema=types))


@contextlib.contextmanager
def opened(path: Path, force: bool) -> Iterator[Store]:
    """A new store at `path`, or the one that is there; nothing of what was added stays if anything is raised.

    Args:
        force: put a new one in the place of what is there.

    Raises:
        KvscopeError: what is there is no store, or a daemon uses it.
    """
    if path.exists() and not force:
        with contextlib.closing(_connect(_checked(path), path)) as connection:
            yield from _filled(connection)
        return
    with new_file(path, force) as part:
        try:
            with contextlib.closing(_connect(part, path)) as connection:
                storefile.create_tables(connection)
                yield from _filled(connection)
        finally:
            part.with_name(f"{part.name}.wal").unlink(missing_ok=True)


def _filled(connection: duckdb.DuckDBPyConnection) -> Iterator[Store]:
    with storefile.interruptible():
        connection.begin()
        store = Store(connection)
        yield store
        store.flush()
        connection.commit()


def _checked(path: Path) -> Path:
    """`path`, if a store of this version is there that nobody else uses."""
    if path.is_dir():
        raise UsageError(f"{printable(path)} is a folder; name a file, ending in .duckdb")
    try:
        storefile.open_file(path).close()
    except KvscopeError as error:
        raise KvscopeError(f"{error}; --force replaces it") from None
    return path


def _connect(path: Path, target: Path) -> duckdb.DuckDBPyConnection:
    """Open `path` to write it; what goes wrong is told of `target`, which is what the user named."""
    import duckdb

    try:
        return duckdb.connect(
            str(path),
            config={
                "memory_limit": MEMORY,
                "python_enable_replacements": "false",
                "preserve_insertion_order": True,
            },
        )
    except duckdb.Error as error:
        said = storefile.one_line(error).replace(path.name, target.name)
        raise KvscopeError(f"{printable(target)}: can't be written ({said}); name another file") from None


def table_batches(connection: duckdb.DuckDBPyConnection, table: str, rows: int) -> Iterator[pyarrow.Table]:
    """All rows of a table of an open store, in batches, with the columns of this version."""
    import pyarrow

    names = [column.name for column in schema.BY_NAME[table].columns]
    listed: Sequence[str] = [f'"{name}"' for name in names]
    reader = connection.cursor().sql(f"SELECT {', '.join(listed)} FROM {table}").to_arrow_reader(rows)
    for batch in reader:
        yield pyarrow.Table.from_batches([batch])
