"""Named questions and the users' own SQL: read-only, limited in time, rows and bytes.

A question is a file in `sql/`: a comment block (title, description, parameters, one line per output
column), then one SELECT. It may use every table of the store, and views that are made from
`steps.STEPS` on the reading connection:

* `waits`: `requests` and, per request, the nanoseconds of TTFT by class, and its longest step;
* `request_steps`: one row per request and step on the critical path;
* `step_values`: the same with a column per step, which is much cheaper, of requests with a first token; with
  `step_classes`, the class of each step.

What a query is about is said by parameters, not in its SQL: the tables hold only the rows that began
between `since` and `until`, and `requests` (with its views) only those of `label` that pass the filters
`where`. The tables `engines` and `labels` are always whole. Asked of a daemon, `requests` also has those in
flight that have had their first token; their outcome is "in flight".

On a daemon, a user's own SQL runs in a process of its own, limited in memory and CPU time too (docs/sql.md).
What makes it safe here: exactly one statement of type SELECT or EXPLAIN, in a transaction
opened READ ONLY (the type alone does not stop a write inside a CTE or an EXPLAIN ANALYZE), on a cursor
of its own with a timer that interrupts it; and, on connections that kvscope opens, no access to files
and a locked configuration (`storefile.lock`).
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from kvscope import windows
from kvscope.errors import KvscopeError, UsageError
from kvscope.filters import checked_text, parse_filters
from kvscope.selection import TIMES, Selection, make_views, moment_ns
from kvscope.storefile import interruptible, one_line
from kvscope.text import printable, span
from kvscope.views import VIEWS

if TYPE_CHECKING:
    import duckdb
    import pyarrow

MAX_SQL_BYTES = 65536
EXACT_ROWS = 1_000_000
"""Of a table: up to so many, a named question's percentiles are exact."""
SAMPLED_REQUESTS = 500_000
"""What questions that sample by themselves look at, at least: one in `$one_in` requests."""
SAMPLE_ROWS = 2_048
"""Values that a percentile is of beyond it, at most. Four times as many take about twice as long."""
_QUANTILE = re.compile(r"\bquantile_cont\((.+?),\s*(0\.\d+|\[[\d., ]+\])\s*\)", re.DOTALL)

ARROW = "application/vnd.apache.arrow.stream"
"""Media type of an answer as an Arrow stream."""
TRUNCATED = "x-kvscope-truncated"
"""Header beside it: whether a limit cut it."""

Parameters = Mapping[str, "str | int | Sequence[str] | None"]
"""Of a query, by the names in `PARAMETERS`."""


class QueryError(KvscopeError):
    """A query that could not be answered: wrong SQL, too slow, too large."""


class TooSlow(QueryError):
    """A query that took too long."""


class OutOfMemory(QueryError):
    """A query that needed more memory than it may use."""


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
    approximate: str = ""
    """Why the figures of a named question are not exact; empty where they are."""

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Question(NamedTuple):
    """One file of `sql/`."""

    name: str
    title: str
    description: str
    parameters: tuple[str, ...]
    """Those that it takes; a question about other tables than requests takes neither label nor where."""
    columns: dict[str, str]
    """Output column to its meaning, in order."""
    sql: str


_MOMENT = (
    "a duration before now such as 10m, ISO 8601 (UTC unless it says otherwise), Unix nanoseconds, or "
    "@NAME or @NAME.end of a window (kvscope label)"
)
PARAMETERS = {
    "since": f"only what began then or later: {_MOMENT}; default all",
    "until": f"only what began before: {_MOMENT}; default all",
    "label": "only this kind of traffic (KVSCOPE_LABEL; '' is production); default all, each label apart",
    "where": "only requests that pass these filters, such as connector=push or ttft_ns>300ms; all must hold",
    "limit": "rows at most; default 20",
}
"""Parameters of queries. SQL may use them as `$since` and `$until` (Unix ns; 0 and now by default), `$label`
and `$limit`; all but `limit` apply without that."""

_REQUESTS = ("requests", *VIEWS)
_READS = r"(?:\bfrom|\bjoin|,)\s*\"?({})\"?\b"
_READS_REQUESTS = re.compile(_READS.format("|".join(_REQUESTS)), re.IGNORECASE)
_TABLES_READ = _READS_TIMES = re.compile(_READS.format("|".join({*_REQUESTS, *TIMES})), re.IGNORECASE)


def applicable(sql: str) -> set[str]:
    """The parameters, `limit` aside, that say which rows `sql` is about."""
    applicable = {"since", "until"} if _READS_TIMES.search(sql) else set()
    return applicable | ({"label", "where"} if _READS_REQUESTS.search(sql) else set())


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
    if not found.get("title") or not found.get("description") or not columns:
        raise ValueError(f"{name}.sql: title, description or columns are missing")
    if found.get("parameters", "limit") != "limit":
        raise ValueError(f"{name}.sql: the only parameter that a question declares is limit")
    sql = "\n".join(lines).strip()
    takes = applicable(sql) | ({"limit"} if "parameters" in found else set())
    parameters = tuple(p for p in PARAMETERS if p in takes)
    return Question(name, found["title"], found["description"], parameters, columns, sql)


def selected(parameters: Parameters, now_ns: int | None = None) -> Selection:
    """The rows that a query with these parameters is about.

    Raises:
        UsageError: one is not understood.
    """
    label, where = parameters.get("label"), parameters.get("where") or ()
    for name in ("since", "until", "label"):
        if not isinstance(parameters.get(name), (str, int, type(None))):
            raise UsageError(f"{name} is one value, not several")
    since_ns, until_ns = (
        moment_ns(parameters.get(name), now_ns, name)  # type: ignore[arg-type]
        for name in ("since", "until")
    )
    if since_ns is not None and until_ns is not None and since_ns >= until_ns:
        raise UsageError("since is not before until; turn them round")
    filters = parse_filters([where] if isinstance(where, (str, int)) else where)  # type: ignore[list-item]
    label = None if label is None else checked_text("label", str(label))
    return Selection(since_ns or 0, until_ns, label, filters)


def resolved(cursor: duckdb.DuckDBPyConnection, parameters: Parameters) -> Parameters:
    """The parameters with moments in the place of names of windows.

    Raises:
        UsageError: there is no such window.
    """
    moments = {
        name: windows.moment(cursor, parameters[name], name)
        for name in ("since", "until")
        if name in parameters
    }
    return {**parameters, **moments}


def ask(
    cursor: duckdb.DuckDBPyConnection,
    name: str,
    parameters: Parameters | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
    live: pyarrow.Table | None = None,
) -> Result:
    """Answer the named question; `cursor` is closed afterwards.

    Args:
        live: with the columns of `requests`, those that may not be stored yet.

    Raises:
        UsageError: there is no such question, or it takes no such parameter.
        QueryError: it could not be answered within its limits.
    """
    return run_sql(cursor, checked(name, parameters or {}).sql, parameters, limits, live)


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
    parameters: Parameters | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
    live: pyarrow.Table | None = None,
) -> Result:
    """Run one SELECT or EXPLAIN that a user wrote; `cursor` is closed afterwards.

    Raises:
        QueryRefused: it is something else, or too long, or a parameter is wrong.
        QueryError: DuckDB's own complaint, or it took too long.
    """
    with contextlib.closing(cursor):
        selection = selected(resolved(cursor, parameters or {}))
        with reading(cursor, limits.seconds, selection, live):
            return answer(cursor, sql, selection, parameters, limits)


def answer(
    cursor: duckdb.DuckDBPyConnection,
    sql: str,
    selection: Selection,
    parameters: Parameters | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
) -> Result:
    """Run one SELECT or EXPLAIN while `reading` that selection; one of several on the same cursor.

    Raises:
        QueryRefused: it is something else, or too long, or a parameter is wrong.
    """
    started_ns = time.perf_counter_ns()
    sql, approximate = _affordable(cursor, sql)
    statement, values = _prepare(cursor, sql, parameters or {}, selection)
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
    if _ONE_IN in columns:
        approximate = _sampled([row[columns.index(_ONE_IN)] for row in rows])
    return Result(columns, types, rows, truncated, time.perf_counter_ns() - started_ns, approximate)


_ONE_IN = "one_in"
"""Column of questions that look at a sample where there are many requests, and say so themselves."""


def _sampled(one_in: Sequence[object]) -> str:
    """Why the figures of such a question are approximate."""
    if all(number == 1 for number in one_in):
        return ""
    return f"the figures are of a sample of the requests: see the column {_ONE_IN}"


def _affordable(cursor: duckdb.DuckDBPyConnection, sql: str) -> tuple[str, str]:
    """A named question's SQL as it can be run, and why its percentiles are approximate (empty: they are not).

    Exact ones hold all their values in memory. Of more than `EXACT_ROWS` rows, each is of a random sample; of
    a group that has fewer values than the sample it is still of all.
    """
    if _ONE_IN in sql or all(sql != question.sql for question in questions().values()):
        return sql, ""
    read = {name.lower() for name in _TABLES_READ.findall(sql)}
    tables = {"requests" if name in VIEWS else name for name in read}
    counts = (cursor.execute(f"SELECT count(*) FROM {name}").fetchall()[0][0] for name in sorted(tables))
    if max(counts, default=0) <= EXACT_ROWS:
        return sql, ""
    sampled = _QUANTILE.sub(rf"reservoir_quantile(\1, \2, {SAMPLE_ROWS})", sql)
    reason = f"percentiles are of random samples of {SAMPLE_ROWS:,}: there are more than {EXACT_ROWS:,} rows"
    return sampled, reason if sampled != sql else ""


def run_arrow(
    cursor: duckdb.DuckDBPyConnection,
    sql: str,
    parameters: Parameters | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
    live: pyarrow.Table | None = None,
) -> tuple[pyarrow.Table, bool]:
    """As `run_sql`, as an Arrow table, and whether a limit cut it."""
    with contextlib.closing(cursor):
        selection = selected(resolved(cursor, parameters or {}))
        with reading(cursor, limits.seconds, selection, live):
            return answer_arrow(cursor, sql, selection, parameters, limits)


def answer_arrow(
    cursor: duckdb.DuckDBPyConnection,
    sql: str,
    selection: Selection,
    parameters: Parameters | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
) -> tuple[pyarrow.Table, bool]:
    """As `answer`, as an Arrow table and whether a limit cut it; its metadata say why it is `approximate`."""
    import pyarrow

    sql, approximate = _affordable(cursor, sql)
    _, values = _prepare(cursor, sql, parameters or {}, selection)
    reader = cursor.sql(sql, params=values).to_arrow_reader(1024)
    batches = []
    rows_left, bytes_left = limits.rows, limits.bytes
    truncated = False
    for batch in _batches(reader):
        whole = batch.num_rows
        batch = batch.slice(0, rows_left)
        while batch.num_rows and batch.nbytes > bytes_left:
            batch = batch.slice(0, batch.num_rows // 2)
        batches.append(batch)
        rows_left -= batch.num_rows
        bytes_left -= batch.nbytes
        truncated = batch.num_rows < whole
        if truncated:
            break
    table = pyarrow.Table.from_batches(batches, reader.schema)
    if _ONE_IN in table.column_names:
        approximate = _sampled(table.column(_ONE_IN).to_pylist())
    return table.replace_schema_metadata({"approximate": approximate}) if approximate else table, truncated


def _batches(reader: pyarrow.RecordBatchReader) -> Iterator[pyarrow.RecordBatch]:
    """What is read, with DuckDB's own errors, of which a stream makes others."""
    import duckdb

    try:
        yield from reader
    except OSError as error:
        kinds = {"INTERRUPT": duckdb.InterruptException, "Out of Memory": duckdb.OutOfMemoryException}
        kind = next((kind for sign, kind in kinds.items() if str(error).startswith(sign)), duckdb.Error)
        raise kind(str(error)) from None


@contextlib.contextmanager
def reading(
    cursor: duckdb.DuckDBPyConnection,
    seconds: float = 10.0,
    selection: Selection | None = None,
    live: pyarrow.Table | None = None,
) -> Iterator[None]:
    """Make the views and begin a READ ONLY transaction, `timed`.

    Raises:
        QueryError: anything that DuckDB raises inside, in one line.
    """
    with timed(cursor, seconds):
        make_views(cursor, selection, live)
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        yield


@contextlib.contextmanager
def timed(cursor: duckdb.DuckDBPyConnection, seconds: float) -> Iterator[None]:
    """Interrupt what `cursor` runs after `seconds`; close it at the end.

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
        timer.start()
        with interruptible():
            yield
    except duckdb.InterruptException:
        if time.monotonic() < deadline - 0.1:
            raise QueryError("the query was stopped because the store is being closed") from None
        raise _too_slow(seconds) from None
    except (duckdb.OutOfMemoryException, MemoryError):
        raise OutOfMemory("the query needed more memory than it may use; ask for less at a time") from None
    except duckdb.Error as error:
        raise QueryError(one_line(error)) from None
    finally:
        timer.cancel()
        # Not a rollback: an unfinished result would refuse it.
        cursor.close()


def _prepare(
    cursor: duckdb.DuckDBPyConnection, sql: str, parameters: Parameters, selection: Selection
) -> tuple[duckdb.Statement, dict[str, str | int | None]]:
    if len(sql.encode("utf-8", "replace")) > MAX_SQL_BYTES:
        raise QueryRefused(f"the SQL text is longer than {MAX_SQL_BYTES // 1024} KiB")
    if not set(parameters) <= set(PARAMETERS):
        raise QueryRefused(f"unknown parameter; there are: {', '.join(PARAMETERS)}")
    statements = cursor.extract_statements(checked_text("SQL", sql))
    if len(statements) != 1:
        raise QueryRefused(f"write exactly one statement, not {len(statements)}")
    statement = statements[0]
    if statement.type.name not in ("SELECT", "EXPLAIN"):
        raise QueryRefused(
            f"only SELECT (and SHOW, DESCRIBE, EXPLAIN) is answered here, not {statement.type.name}"
        )
    if statement.type.name == "EXPLAIN" and not _explains_select(cursor, sql):
        raise QueryRefused("EXPLAIN is answered of a SELECT only")
    values: dict[str, str | int | None] = {
        "since": selection.since_ns,
        "until": time.time_ns() if selection.until_ns is None else selection.until_ns,
        "label": selection.label,
        "limit": _limit(parameters.get("limit")),
    }
    named = statement.named_parameters
    if _ONE_IN in named:
        ((requests,),) = cursor.execute("SELECT count(*) FROM requests").fetchall()
        values[_ONE_IN] = max(1, requests // SAMPLED_REQUESTS)
    if unknown := sorted(named - set(values)):
        raise QueryRefused(f"unknown parameter ${unknown[0]}; there are: ${', $'.join(values)}")
    given = {name for name, value in parameters.items() if value is not None and value != []}
    if unused := sorted(given - named - applicable(sql)):
        raise QueryRefused(_unused(unused[0]))
    return statement, {name: value for name, value in values.items() if name in named}


_EXPLAIN = re.compile(
    r"(?:\s|--[^\n]*\n|/\*.*?\*/)*explain\b\s*(?:analyze\b|verbose\b|\([^()]*\)|\s)*",
    re.IGNORECASE | re.DOTALL,
)


def _explains_select(cursor: duckdb.DuckDBPyConnection, sql: str) -> bool:
    """Whether what an EXPLAIN explains is a SELECT: EXPLAIN ANALYZE runs it, and COPY writes files."""
    match = _EXPLAIN.match(sql)
    inner = cursor.extract_statements(sql[match.end() :]) if match else []
    return [statement.type.name for statement in inner] == ["SELECT"]


def _unused(name: str) -> str:
    if name == "limit":
        return "the query does not use the parameter limit; write $limit where it belongs"
    about = "requests" if name in ("label", "where") else "a table with times"
    return f"the query does not read {about}, which the parameter {name} is about; leave it away"


def _limit(value: object) -> int:
    if value is None:
        return 20
    try:
        limit = int(str(value))
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


def _too_slow(seconds: float) -> TooSlow:
    return TooSlow(
        f"the query was stopped after {span(round(seconds * 1e9))}; ask for less, with a later `since`"
    )


def result_json(result: Result) -> dict[str, Any]:
    """A result as the API and `--json` give it."""
    return {
        "columns": [{"name": n, "type": t} for n, t in zip(result.columns, result.types, strict=True)],
        "rows": [[plain(v, t) for v, t in zip(row, result.types, strict=True)] for row in result.rows],
        "truncated": result.truncated,
        "elapsed_ms": round(result.elapsed_ns / 1e6, 3),
        "approximate": result.approximate,
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
