"""Lists requests and finds one of them: stored ones by SQL, those in flight from what the daemon holds.

What comes out is ready for JSON: ids of 64 bits as strings, steps and ways of observation by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope import schema, steps, windows
from kvscope.errors import KvscopeError, UsageError
from kvscope.filters import column_named, column_type, parse_filters
from kvscope.join import client_id
from kvscope.query import plain, reading, timed
from kvscope.selection import Selection, moment_ns
from kvscope.storefile import TIMES, has_archived, relation, stored
from kvscope.text import printable
from kvscope.views import WAITS_COLUMNS, waits

if TYPE_CHECKING:
    import duckdb

MAX_LIMIT = 1000
MAX_MATCHES = 20
MAX_PARTS = 1000
"""Transfers, leases or failures shown of one request."""

Row = dict[str, Any]


class NotFound(KvscopeError):
    """No request has this id."""


class Ambiguous(KvscopeError):
    """Several requests have an id that begins like this; `matches` tells them apart."""

    def __init__(self, message: str, matches: Sequence[Row]) -> None:
        super().__init__(message)
        self.matches = matches


class Listing(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What to list: `where` are filters such as `connector=push` or `ttft>300ms`; all must hold."""

    where: list[str] = []
    sort: str = "arrived_at_ns"
    """A column, the largest first; `column:asc` for the smallest first."""
    limit: int = 20
    since: str = ""
    """Only requests that arrived since: a duration before now, ISO 8601, Unix nanoseconds, or @NAME of a
    window (`kvscope label`)."""
    until: str = ""
    """Only requests that arrived before; @NAME.end is the end of a window."""


def list_requests(
    cursor: duckdb.DuckDBPyConnection,
    live: Iterable[Mapping[str, Any]],
    listing: Listing,
    seconds: float = 10.0,
) -> list[Row]:
    """The requests asked for, without their waterfalls, each with its sums by class; closes `cursor`.

    Raises:
        UsageError: a filter, the order or the limit is wrong.
        QueryError: it took too long.
    """
    if not 1 <= listing.limit <= MAX_LIMIT:
        raise UsageError(f"limit is a number from 1 to {MAX_LIMIT}")
    filters = parse_filters(listing.where)
    sort, _, direction = listing.sort.partition(":")
    sort = column_named(sort)
    column_type(sort)
    if direction not in ("", "asc", "desc"):
        raise UsageError(f"{printable(listing.sort)[:60]!r} is no order; write column or column:asc")
    order = "ASC" if direction == "asc" else "DESC"
    since = moment_ns(windows.moment(cursor, listing.since)) or 0
    until = moment_ns(windows.moment(cursor, listing.until, "until"), name="until")
    if until is not None and since >= until:
        raise UsageError("since is not before until; turn them round")
    benchmarks = windows.benchmarks(cursor, since, until)
    now_ns = time.time_ns()
    with reading(cursor, seconds, Selection(since, until, filters=filters)):
        cursor.execute(
            f'SELECT * EXCLUDE (waterfall) FROM waits ORDER BY "{sort}" {order} NULLS LAST, id LIMIT ?',
            [listing.limit],
        )
        rows = _dicts(cursor, in_flight=False)
    recent = _live(
        live,
        rows,
        lambda row: (
            (row["arrived_at_ns"] or 0) >= since and (until is None or (row["arrived_at_ns"] or 0) < until)
        ),
        benchmarks,
    )
    rows += [row for row in recent if all(one.matches(row, now_ns) for one in filters)]
    known = [row for row in rows if row[sort] is not None]
    known.sort(key=lambda row: row[sort], reverse=order == "DESC")
    rows = known + [row for row in rows if row[sort] is None]
    return [request_json(row) for row in rows[: listing.limit]]


def look_up(
    cursor: duckdb.DuckDBPyConnection, live: Iterable[Mapping[str, Any]], text: str, seconds: float = 10.0
) -> dict[str, Any]:
    """One request and its transfers, leases, failures and engines; closes `cursor`.

    Args:
        text: its numeric id, the client's id, vLLM's internal id on P or D, its trace id, or the beginning
            of one of the texts that no other request's begins with.

    Raises:
        NotFound, Ambiguous: no request, or several.
        QueryError: it took too long.
    """
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else -1
    live = list(live)
    benchmarks = windows.benchmarks(cursor)
    with timed(cursor, seconds):
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        found: list[Row] = []
        conditions = ("id = $number",) * (0 <= number < 2**64) + _EXACT * bool(text)
        # What is wanted is mostly recent: an archive may have thousands of files to search.
        hot = stored(cursor, "requests")
        everywhere = relation(cursor, "requests") if has_archived(cursor) else hot
        for rows in dict.fromkeys((hot, everywhere)):
            for condition in conditions:
                found = found or _stored(
                    cursor, benchmarks, rows, condition, text=text, number=number, client=client_id(text)
                )
        found += _live(
            live,
            found,
            lambda row: row["id"] == number or text in (row[n] for n in (*_NAMES, "trace_id")),
            benchmarks,
        )
        if not found and text:
            begins = " OR ".join(f"starts_with({n}, $text)" for n in _NAMES)
            found = _stored(cursor, benchmarks, everywhere, begins, text=text)
            found += _live(
                live, found, lambda row: any((row[n] or "").startswith(text) for n in _NAMES), benchmarks
            )
        if not found:
            raise NotFound(f"no request {printable(text)[:80]!r}; `kvscope requests` lists what there is")
        if len(found) > 1:
            count = f"more than {MAX_MATCHES}" if len(found) > MAX_MATCHES else str(len(found))
            message = f"{count} requests match {printable(text)[:80]!r}; write more of the id"
            raise Ambiguous(message, [request_json(row) for row in found[:MAX_MATCHES]])
        request = found[0]
        parts: dict[str, Any] = {}
        for table in (schema.TRANSFERS, schema.LEASES, schema.FAILURES):
            parts[table.name] = _parts(cursor, table, request)
        cursor.execute(
            "SELECT * FROM engines WHERE engine IN (?, ?) ORDER BY engine, source, rank, id LIMIT 100",
            [request["p_engine"], request["d_engine"]],
        )
        parts["engines"] = [_json(row, schema.ENGINES) for row in _dicts(cursor)]
    return {"request": request_json(request), **parts, "as_of_ns": time.time_ns()}


_NAMES = ("client_id", "p_request", "d_request")
_EXACT = (
    "client_id = $text",
    # vLLM's ids have the client's in them: one column of text to search instead of two longer ones.
    "client_id = $client AND (p_request = $text OR d_request = $text)",
    "trace_id = $text",
    "p_request = $text OR d_request = $text",
)
"""Conditions by which a text names a request, the quickest first."""
_SLACK_NS = 600 * 10**9
"""How long before its arrival and after its end something of a request may be dated, clocks included."""


def _stored(
    cursor: duckdb.DuckDBPyConnection,
    benchmarks: Sequence[windows.Step],
    rows: str,
    condition: str,
    **values: Any,
) -> list[Row]:
    """The requests among `rows`, of a FROM, that meet a condition, a few at most, as those of `waits`."""
    # All columns of all rows are much to read: first which rows, then these, found by their time.
    used = {name: value for name, value in values.items() if f"${name}" in condition}
    cursor.execute(f"SELECT id, arrived_at_ns FROM {rows} WHERE {condition} LIMIT {MAX_MATCHES + 1}", used)
    if not (found := cursor.fetchall()):
        return []
    times = [at_ns for _, at_ns in found if at_ns is not None]
    during, source = "true", rows
    if len(times) == len(found):
        during = f"arrived_at_ns BETWEEN {min(times)} AND {max(times)}"
        source = relation(cursor, "requests", min(times), max(times) + 1)
    ids = ", ".join(str(id_) for id_, _ in found)
    cursor.execute(f"SELECT * FROM {source} WHERE {during} AND id IN ({ids}) LIMIT {MAX_MATCHES + 1}")
    return [_whole(row, benchmarks) for row in _dicts(cursor)]


def _whole(row: Mapping[str, Any], benchmarks: Sequence[windows.Step]) -> Row:
    """A row of `requests` with what `waits` adds, of the label that it counts as of."""
    label = windows.label_of(benchmarks, row["label"], row["arrived_at_ns"])
    return {**row, **waits(row), "label": label, "in_flight": row["outcome"] == "in flight"}


def _parts(cursor: duckdb.DuckDBPyConnection, table: schema.Table, request: Row) -> list[Row]:
    """The rows of `table` that are about the request, ready for JSON."""
    since_ns, until_ns = _around(request)
    at = TIMES[table.name]
    during = f"{at} >= {since_ns}" + (f" AND {at} < {until_ns}" if until_ns is not None else "")
    found: list[Row] = []
    # Not in one condition: to find rows without a time, all have to be read.
    for condition in (during, f"{at} IS NULL"):
        if not found:
            cursor.execute(
                f"SELECT * FROM {relation(cursor, table.name, since_ns, until_ns)} "
                f"WHERE request_id = ? AND {condition} ORDER BY ALL LIMIT {MAX_PARTS}",
                [request["id"]],
            )
            found = _dicts(cursor)
    return [_json(row, table) for row in found]


def _around(request: Row) -> tuple[int, int | None]:
    """From when until when something of a request may be dated."""
    arrived_ns = request["arrived_at_ns"]
    if arrived_ns is None:
        return 0, None
    since_ns = max(0, arrived_ns - _SLACK_NS)
    if request["ttft_ns"] is None or request["decode_generate_ns"] is None:
        return since_ns, None
    return since_ns, arrived_ns + request["ttft_ns"] + request["decode_generate_ns"] + _SLACK_NS


def request_json(row: Mapping[str, Any]) -> Row:
    """A row of `waits` (or of `requests`) for JSON."""
    ready = {
        name: plain(value, WAITS_COLUMNS.get(name, "")) for name, value in row.items() if name != "waterfall"
    }
    if "waterfall" in row:
        ready["waterfall"] = [_interval(entry) for entry in row["waterfall"] or ()]
    return ready


_IDS = ("id", "request_id", "session")
_INTERVAL = ("step", "from_ns", "ns", "critical", "observed", "error_ns")


def _interval(entry: Mapping[str, Any] | Sequence[Any]) -> Row:
    """An interval by names: a struct from the store, or a tuple on its way there."""
    fields = entry if isinstance(entry, Mapping) else dict(zip(_INTERVAL, entry, strict=True))
    step = steps.find(fields["step"])
    observed = steps.find_observed(fields["observed"])
    return {**fields, "step": step.name, "class": step.class_, "observed": observed}


def _json(row: Mapping[str, Any], table: schema.Table) -> Row:
    ready = {column.name: _plain(column.name, row[column.name]) for column in table.columns}
    for column in table.columns:
        if column.type == "JSON" and isinstance(text := ready[column.name], str):
            ready[column.name] = msgspec.json.decode(text)
    return ready


def _plain(name: str, value: object) -> object:
    return plain(value, "UBIGINT" if name in _IDS else "")


def _dicts(cursor: duckdb.DuckDBPyConnection, **extra: object) -> list[Row]:
    names = [column[0] for column in cursor.description or []]
    return [{**dict(zip(names, row, strict=True)), **extra} for row in cursor.fetchall()]


def _live(
    live: Iterable[Mapping[str, Any]],
    found: Iterable[Row],
    matches: Callable[[Mapping[str, Any]], bool],
    benchmarks: Sequence[windows.Step],
) -> list[Row]:
    """Rows of requests that are not among the stored ones found, whole as those of `waits`."""
    stored = {row["id"] for row in found}
    return [_whole(row, benchmarks) for row in live if row["id"] not in stored and matches(row)]
