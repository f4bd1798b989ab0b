"""Named questions and the users' own SQL: read-only, limited in time, rows and bytes.

A question is a file in `sql/`: a comment block (title, description, parameters, one line per output
column), then one SELECT. It may use every table of the store, and two views that are made from
`steps.STEPS` on the reading connection:

* `waits`: `requests` and, per request, the nanoseconds of TTFT by class, and its longest step;
* `request_steps`: one row per request and step on the critical path.

What makes SQL from a user safe here: exactly one statement of type SELECT or EXPLAIN, in a transaction
opened READ ONLY (the type alone does not stop a write inside a CTE or an EXPLAIN ANALYZE), on a cursor
of its own with a timer that interrupts it; and, on connections that kvscope opens, no access to files
and a locked configuration (`lock`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping
from decimal import Decimal
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvscope import schema, steps
from kvscope.errors import KvscopeError, UsageError
from kvscope.text import duration_ns, printable, span

if TYPE_CHECKING:
    import duckdb
    import pyarrow

MAX_SQL_BYTES = 65536


class QueryError(KvscopeError):
    """A query that could not be answered: wrong SQL, too slow, too large."""


class QueryRefused(UsageError):
    """A query that will not be run: not one read-only statement, too long, an unknown parameter."""


class Limits(NamedTuple):
    """What one query may cost."""

    rows: int = 10_000
    bytes: int = 16 << 20
    """Of the values returned, roughly."""
    seconds: float = 10.0


class Result(NamedTuple):
    columns: list[str]
    types: list[str]
    """DuckDB types, in the order of `columns`."""
    rows: list[tuple[Any, ...]]
    truncated: bool
    """A limit on rows or bytes cut it."""
    elapsed_ns: int

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Question(NamedTuple):
    """One file of `sql/`."""

    name: str
    title: str
    description: str
    parameters: tuple[str, ...]
    columns: dict[str, str]
    """Output column to its meaning, in order."""
    sql: str


PARAMETERS = {
    "since": "only what began since: a duration before now such as 10m, or Unix nanoseconds; default all",
    "limit": "rows at most; default 20",
    "label": "only this kind of traffic (KVSCOPE_LABEL; '' is production); default all, each label apart",
}
"""Parameters that a question may declare, and users' SQL may use: `$since` (Unix ns), `$limit`, `$label`."""


def _sum_of(class_: str) -> str:
    return " + ".join(f"coalesce({s.column}, 0)" for s in steps.STEPS if s.class_ == class_ and s.in_ttft)


_IN_TTFT = [step for step in steps.STEPS if step.in_ttft]
_CLASSES = [
    class_ for class_ in steps.CLASSES if class_ != steps.UNKNOWN
]  # its one step has that column already
_LONGEST = f"greatest({', '.join(s.column for s in _IN_TTFT)})"
VIEWS = {
    "waits": (
        "SELECT *, "
        + ", ".join(f"{_sum_of(class_)} AS {class_}_ns" for class_ in _CLASSES)
        + ", compute_ns + capacity_ns AS compute_wait_ns"
        + f", {_LONGEST} AS main_step_ns"
        + ", CASE WHEN main_step_ns > 0 THEN CASE main_step_ns "
        + " ".join(f"WHEN {s.column} THEN '{s.name}'" for s in _IN_TTFT)
        + " END END AS main_step FROM requests"
    ),
    "request_steps": (
        "SELECT id, arrived_at_ns, label, connector, p_engine, d_engine, ttft_ns, unnest(["
        + ", ".join(f"{{step: '{s.name}', class: '{s.class_}', ns: {s.column}}}" for s in _IN_TTFT)
        + "], recursive := true) FROM requests"
    ),
}
"""Made on each reading connection, so that a store needs none of them and they can't be out of date."""

WAITS_COLUMNS: dict[str, str] = {
    **{column.name: column.type for column in schema.REQUESTS.columns},
    **{f"{class_}_ns": "BIGINT" for class_ in _CLASSES},
    "compute_wait_ns": "BIGINT",
    "main_step_ns": "BIGINT",
    "main_step": "VARCHAR",
}
"""Columns of the view `waits` and their types."""


def waits(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the view `waits` adds to a row of `requests`, for requests that are not in the store yet."""
    sums = dict.fromkeys(steps.CLASSES, 0)
    for step in _IN_TTFT:
        sums[step.class_] += row.get(step.column) or 0
    longest = max(_IN_TTFT, key=lambda step: row.get(step.column) or 0)
    longest_ns = row.get(longest.column) or 0
    return {
        **{f"{class_}_ns": sums[class_] for class_ in _CLASSES},
        "compute_wait_ns": sums[steps.COMPUTE] + sums[steps.CAPACITY],
        "main_step_ns": longest_ns,
        "main_step": longest.name if longest_ns else None,
    }


@functools.cache
def questions() -> dict[str, Question]:
    """All named questions by name."""
    files = sorted(resources.files("kvscope").joinpath("sql").iterdir(), key=lambda f: f.name)
    parsed = [parse_question(f.name[:-4], f.read_text("utf-8")) for f in files if f.name.endswith(".sql")]
    return {question.name: question for question in parsed}


_HEADER_LINE = re.compile(r"-- (title|description|parameters|column (\w+)): (\S.*)")


def parse_question(name: str, text: str) -> Question:
    """Read one file of `sql/`.

    Raises:
        ValueError: its comment block is not complete.
    """
    lines = text.splitlines()
    found: dict[str, str] = {}
    columns: dict[str, str] = {}
    key = ""
    while lines and lines[0].startswith("--"):
        line = lines.pop(0)
        if match := _HEADER_LINE.fullmatch(line):
            key = match[2] or match[1]
            (columns if match[2] else found)[key] = match[3]
        elif line.startswith("--   ") and key:
            target = columns if key in columns else found
            target[key] += " " + line[5:].strip()
        else:
            raise ValueError(f"{name}.sql: not a line of a question's comment block: {line}")
    parameters = tuple(p.strip() for p in found.get("parameters", "").split(",") if p.strip())
    if (
        not found.get("title")
        or not found.get("description")
        or not columns
        or not set(parameters) <= set(PARAMETERS)
    ):
        raise ValueError(f"{name}.sql: title, description, columns or parameters are missing or wrong")
    return Question(name, found["title"], found["description"], parameters, columns, "\n".join(lines).strip())


def since_ns(value: str | int | None, now_ns: int | None = None) -> int:
    """Unix nanoseconds of a `since`: a duration before now, or a moment given as Unix nanoseconds.

    Raises:
        UsageError: it is neither.
    """
    if value is None or value == "":
        return 0
    if isinstance(value, int) or (value.isascii() and value.isdigit()):
        moment = int(value) if len(str(value)) < 20 else -1
        if not 0 <= moment < 2**63:
            raise UsageError("since: write a duration such as 10m, or Unix nanoseconds")
        return moment
    return max(0, (time.time_ns() if now_ns is None else now_ns) - duration_ns(value))


def ask(
    cursor: duckdb.DuckDBPyConnection,
    name: str,
    parameters: Mapping[str, str | int | None] | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
) -> Result:
    """Answer the named question; `cursor` is closed afterwards.

    Raises:
        UsageError: there is no such question, or it takes no such parameter.
        QueryError: it could not be answered within its limits.
    """
    return run_sql(cursor, checked(name, parameters or {}).sql, parameters, limits)


def checked(name: str, parameters: Mapping[str, object] = MappingProxyType({})) -> Question:
    """The question of that name, if it takes these parameters.

    Raises:
        QueryRefused: there is none, or it does not take one of them.
    """
    question = questions().get(name)
    if question is None:
        raise QueryRefused(f"no question {printable(name)[:60]!r}; there are: {', '.join(questions())}")
    if unknown := [p for p in parameters if p not in question.parameters]:
        takes = ", ".join(question.parameters) or "none"
        raise QueryRefused(
            f"the question {name} takes no parameter {printable(unknown[0])[:40]!r} (it takes: {takes})"
        )
    return question


def run_sql(
    cursor: duckdb.DuckDBPyConnection,
    sql: str,
    parameters: Mapping[str, str | int | None] | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
) -> Result:
    """Run one SELECT or EXPLAIN that a user wrote; `cursor` is closed afterwards.

    Raises:
        QueryRefused: it is something else, or too long, or a parameter is wrong.
        QueryError: DuckDB's own complaint, or it took too long.
    """
    started_ns = time.perf_counter_ns()
    with reading(cursor, limits.seconds):
        statement, values = _prepare(cursor, sql, parameters or {})
        cursor.execute(statement, values)
        columns = [column[0] for column in cursor.description or []]
        types = [str(column[1]) for column in cursor.description or []]
        rows: list[tuple[Any, ...]] = []
        bytes_left = limits.bytes
        deadline = time.monotonic() + limits.seconds
        truncated = False
        while not truncated and (batch := cursor.fetchmany(256)):
            for row in batch:
                bytes_left -= _weight(row)
                if len(rows) == limits.rows or bytes_left < 0:
                    truncated = True
                    break
                rows.append(row)
            if time.monotonic() > deadline:
                raise _too_slow(limits.seconds)
    return Result(columns, types, rows, truncated, time.perf_counter_ns() - started_ns)


def run_arrow(
    cursor: duckdb.DuckDBPyConnection,
    sql: str,
    parameters: Mapping[str, str | int | None] | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
) -> tuple[pyarrow.Table, bool]:
    """As `run_sql`, as an Arrow table, and whether a limit cut it."""
    import pyarrow

    with reading(cursor, limits.seconds):
        _, values = _prepare(cursor, sql, parameters or {})
        reader = cursor.sql(sql, params=values).to_arrow_reader(1024)
        batches = []
        rows_left, bytes_left = limits.rows, limits.bytes
        truncated = False
        for batch in reader:
            bytes_left -= batch.nbytes
            truncated = batch.num_rows > rows_left or bytes_left < 0
            batches.append(batch.slice(0, rows_left) if bytes_left >= 0 else batch.slice(0, 0))
            rows_left -= batch.num_rows
            if truncated:
                break
        table = pyarrow.Table.from_batches(batches, reader.schema)
        del reader
    return table, truncated


@contextlib.contextmanager
def reading(cursor: duckdb.DuckDBPyConnection, seconds: float = 10.0) -> Iterator[None]:
    """Make the views, begin a READ ONLY transaction, interrupt it after `seconds`; close `cursor` at the end.

    Raises:
        QueryError: anything that DuckDB raises inside, in one line.
    """
    import duckdb

    def interrupt() -> None:
        with contextlib.suppress(duckdb.Error):
            cursor.interrupt()

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    deadline = time.monotonic() + seconds
    try:
        for name, sql in VIEWS.items():
            cursor.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {sql}")
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        timer.start()
        yield
    except duckdb.InterruptException:
        if time.monotonic() < deadline - 0.1:
            raise QueryError("the query was stopped because the store is being closed") from None
        raise _too_slow(seconds) from None
    except duckdb.Error as error:
        raise QueryError(_one_line(error)) from None
    finally:
        timer.cancel()
        # Not a rollback: an unfinished result would refuse it.
        cursor.close()


def open_file(path: Path) -> duckdb.DuckDBPyConnection:
    """Open a store or a snapshot to read it, locked against everything else.

    Raises:
        KvscopeError: there is none, another process holds it, or it is no kvscope store of this version.
    """
    import duckdb

    if not path.is_file():
        raise KvscopeError(f"{path}: there is no such file; name a store or a snapshot")
    try:
        connection = duckdb.connect(
            str(path), read_only=True, config={"memory_limit": "2GB", "python_enable_replacements": "false"}
        )
    except duckdb.Error as error:
        if "lock on file" in str(error):
            raise KvscopeError(
                f"{path}: a daemon is using it; ask the daemon instead (--url), or read a snapshot"
            ) from None
        raise KvscopeError(f"{path}: not a DuckDB file that can be read ({_one_line(error)})") from None
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


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """No files, no extensions, no network, and no way to change that, for all cursors of the connection."""
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


def _prepare(
    cursor: duckdb.DuckDBPyConnection, sql: str, parameters: Mapping[str, str | int | None]
) -> tuple[duckdb.Statement, dict[str, str | int | None]]:
    if len(sql.encode("utf-8", "replace")) > MAX_SQL_BYTES:
        raise QueryRefused(f"the SQL text is longer than {MAX_SQL_BYTES // 1024} KiB")
    if not set(parameters) <= set(PARAMETERS):
        raise QueryRefused(f"unknown parameter; there are: {', '.join(PARAMETERS)}")
    statements = cursor.extract_statements(sql)
    if len(statements) != 1:
        raise QueryRefused(f"write exactly one statement, not {len(statements)}")
    statement = statements[0]
    if statement.type.name not in ("SELECT", "EXPLAIN"):
        raise QueryRefused(
            f"only SELECT (and SHOW, DESCRIBE, EXPLAIN) is answered here, not {statement.type.name}"
        )
    values = {
        "since": since_ns(parameters.get("since")),
        "limit": _limit(parameters.get("limit")),
        "label": parameters.get("label"),
    }
    named = statement.named_parameters
    if unknown := sorted(named - set(values)):
        raise QueryRefused(f"unknown parameter ${unknown[0]}; there are: ${', $'.join(values)}")
    if unused := sorted(set(parameters) - named):
        raise QueryRefused(
            f"the query does not use the parameter {unused[0]}; write ${unused[0]} where it belongs"
        )
    return statement, {name: value for name, value in values.items() if name in named}


def _limit(value: str | int | None) -> int:
    if value is None:
        return 20
    try:
        limit = int(value)
    except ValueError:
        limit = 0
    if not 1 <= limit <= 1_000_000:
        raise QueryRefused("limit is a whole number from 1 to 1000000")
    return limit


def _weight(value: object) -> int:
    """Roughly the bytes that a value takes."""
    if isinstance(value, (str, bytes)):
        return 16 + len(value)
    if isinstance(value, (list, tuple)):
        return 16 + sum(map(_weight, value))
    if isinstance(value, dict):
        return 16 + sum(_weight(item) for pair in value.items() for item in pair)
    return 16


def _too_slow(seconds: float) -> QueryError:
    return QueryError(
        f"the query was stopped after {span(round(seconds * 1e9))}; ask for less, with a later `since`"
    )


def _one_line(error: Exception) -> str:
    """DuckDB's message without the drawing below it."""
    lines = [line.strip() for line in str(error).splitlines()]
    head: list[str] = []
    for line in lines:
        if line.startswith("LINE ") or len(head) == 3:
            break
        if line:
            head.append(line)
    return printable(" ".join(head))[:500]


def result_json(result: Result) -> dict[str, Any]:
    """A result as the API and `--json` give it."""
    return {
        "columns": [{"name": n, "type": t} for n, t in zip(result.columns, result.types, strict=True)],
        "rows": [[plain(v, t) for v, t in zip(row, result.types, strict=True)] for row in result.rows],
        "truncated": result.truncated,
        "elapsed_ms": round(result.elapsed_ns / 1e6, 3),
    }


def plain(value: object, type_: str = "") -> object:
    """`value` as JSON can carry it without loss: 64-bit ids become strings (JSON readers keep 53 bits)."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return str(value) if type_ == "UBIGINT" or not -(2**63) <= value < 2**63 else value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Decimal):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    return str(value)
