"""An answer as a table, CSV, JSON, Parquet or Arrow, on the terminal or in a file."""

from __future__ import annotations

import argparse
import csv
import io
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope import outfile, settings
from kvscope.client import Daemon, StoreFile
from kvscope.errors import KvscopeError, UsageError
from kvscope.query import Limits, Parameters
from kvscope.text import printable, table

if TYPE_CHECKING:
    import pyarrow

TABLE, CSV, JSON, PARQUET, ARROW = FORMATS = ("table", "csv", "json", "parquet", "arrow")
_SUFFIXES = {".csv": CSV, ".json": JSON, ".parquet": PARQUET, ".arrow": ARROW, ".feather": ARROW}
LIMITS = ("sql_rows", "sql_bytes", "sql_seconds")
"""Settings that `set_limits` reads, for `add_source_arguments`."""


def set_limits(source: Daemon | StoreFile, arguments: argparse.Namespace) -> None:
    """Give queries of a file the limits of the settings; a daemon has its own.

    Raises:
        UsageError: there are flags for limits of a daemon.
    """
    if isinstance(source, StoreFile):
        found = settings.load(arguments)
        source.limits = Limits(found.sql_rows, found.sql_bytes, found.sql_seconds)
    elif given := [name for name in LIMITS if getattr(arguments, f"setting_{name}") is not None]:
        flag = "--" + given[0].replace("_", "-")
        raise UsageError(f"{flag} is for --db; a daemon has limits of its own (its setting {given[0]})")


def format_of(named: str | None, path: Path | None) -> str:
    """The format to write: the one named, else what the file's suffix says, else a table.

    Raises:
        UsageError: a suffix that says nothing.
    """
    if named or path is None:
        return named or TABLE
    if path.suffix not in _SUFFIXES:
        raise UsageError(f"{printable(path)}: say which --format, or end it in one of {', '.join(_SUFFIXES)}")
    return _SUFFIXES[path.suffix]


class Target:
    """Where answers go. Made before a query is asked, so that a file that can't be written costs no wait.

    Raises:
        UsageError: the file exists, or bytes would go to a terminal.
    """

    def __init__(self, format_: str, path: Path | None = None, force: bool = False) -> None:
        self.format = format_
        self.path = path
        if path is None:
            if format_ in (PARQUET, ARROW) and sys.stdout.isatty():
                raise UsageError(f"{format_} is not for a terminal; name a file with -o, or use a pipe")
        else:
            outfile.check(path, force)

    def ask(self, source: Daemon | StoreFile, name: str, sql: str, parameters: Parameters) -> None:
        """Ask the question `name`, or else `sql`, and write the answer.

        Raises:
            KvscopeError: as `source` says; or the file can't be written.
        """
        if self.format in (PARQUET, ARROW):
            found, truncated = source.arrow(name, sql, parameters)
            rows = found.num_rows
            approximate = (found.schema.metadata or {}).get(b"approximate", b"").decode()
            content = _binary(found, self.format)
        else:
            answer = source.query(name, sql, parameters)
            rows, truncated = len(answer["rows"]), answer["truncated"]
            approximate = answer.get("approximate", "")
            content = _text(answer, self.format, self.path is None and sys.stdout.isatty()).encode()
        if self.path is None:
            sys.stdout.flush()
            sys.stdout.buffer.write(content)
            sys.stdout.buffer.flush()
        else:
            # Whether to replace what is there was asked before.
            with outfile.new_file(self.path, force=True) as part:
                part.write_bytes(content)
        if self.format == TABLE and not rows:
            print(_no_rows(parameters.get("label")), file=sys.stderr)
        if approximate:
            print(f"approximate: {approximate}", file=sys.stderr)
        if truncated:
            whose = "this command's" if isinstance(source, StoreFile) else "the daemon's"
            print(
                f"cut after {rows} rows; ask for less, or raise {whose} settings sql_rows or sql_bytes",
                file=sys.stderr,
            )


def _no_rows(label: object) -> str:
    if not label:
        return "no rows"
    if label == "production":
        return "no rows of label 'production'; production itself is the empty label, ''"
    return f"no rows of label {printable(label)[:80]!r}; the question ttft tells each label there is"


def _binary(found: pyarrow.Table, format_: str) -> bytes:
    import pyarrow

    stream = io.BytesIO()
    if format_ == PARQUET:
        import pyarrow.parquet

        try:
            pyarrow.parquet.write_table(found, stream, compression="zstd")
        except pyarrow.ArrowNotImplementedError as error:
            raise KvscopeError(
                f"Parquet can't hold this answer ({printable(error)[:200]}); cast the column, or write arrow"
            ) from None
    else:
        with pyarrow.ipc.new_file(stream, found.schema) as writer:
            writer.write_table(found)
    return stream.getvalue()


def _text(answer: dict[str, Any], format_: str, terminal: bool) -> str:
    head = [column["name"] for column in answer["columns"]]
    if format_ == JSON:
        return msgspec.json.format(msgspec.json.encode(answer)).decode() + "\n"
    if format_ == CSV:
        lines = io.StringIO()
        writer = csv.writer(lines, lineterminator="\n")
        writer.writerow(map(printable, head) if terminal else head)
        writer.writerows(_csv_row(row, terminal) for row in answer["rows"])
        return lines.getvalue()
    if answer["rows"] and head == ["explain_key", "explain_value"]:
        return "".join(f"{str(row[1]).rstrip()}\n" for row in answer["rows"])
    return table(head, ([_cell(value) for value in row] for row in answer["rows"])) + "\n"


def _csv_row(row: Iterable[object], terminal: bool) -> list[object]:
    """NULL is an empty cell; ids in a client's words could drive a terminal."""
    cells = [_cell(value) for value in row]
    return [printable(cell) if terminal else cell for cell in cells]


def _cell(value: object) -> object:
    if isinstance(value, bool):
        return str(value).lower()
    return msgspec.json.encode(value).decode() if isinstance(value, (list, dict)) else value
