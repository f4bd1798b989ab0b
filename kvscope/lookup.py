"""Lists requests and finds one of them: stored ones by SQL, those in flight from what the daemon holds.

What comes out is ready for JSON: ids of 64 bits as strings, steps and ways of observation by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope import schema, steps
from kvscope.errors import KvscopeError, UsageError
from kvscope.filters import column_type, parse_filters
from kvscope.query import plain, reading
from kvscope.selection import Selection, moment_ns
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
    """What to list: `where` are filters such as `connector=push` or `ttft_ns>300ms`; all must hold."""

    where: list[str] = []
    sort: str = "arrived_at_ns"
    """A column, the largest first; `column:asc` for the smallest first."""
    limit: int = 20
    since: str = ""
    """Only requests that arrived since: a duration before now, ISO 8601 or Unix nanoseconds."""


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
    column_type(sort)
    if direction not in ("", "asc", "desc"):
        raise UsageError(f"{printable(listing.sort)[:60]!r} is no order; write column or column:asc")
    since = moment_ns(listing.since) or 0
    order = "ASC" if direction == "asc" else "DESC"
    with reading(cursor, seconds, Selection(since, filters=filters)):
        cursor.execute(
            f'SELECT * EXCLUDE (waterfall) FROM waits ORDER BY "{sort}" {order} NULLS LAST, id LIMIT ?',
            [listing.limit],
        )
        rows = _dicts(cursor, in_flight=False)
    recent = _live(live, rows, lambda row: (row["arrived_at_ns"] or 0) >= since)
    rows += [row for row in recent if all(one.matches(row) for one in filters)]
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
    names = ("client_id", "p_request", "d_request")
    number = int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else -1
    live = list(live)
    with reading(cursor, seconds):
        exact = " OR ".join(f"{name} = $text" for name in (*names, "trace_id"))
        cursor.execute(
            f"SELECT * FROM waits WHERE id::HUGEINT = $number OR {exact} LIMIT {MAX_MATCHES + 1}",
            {"text": text, "number": number},
        )
        found = _dicts(cursor, in_flight=False)
        found += _live(
            live, found, lambda row: row["id"] == number or text in (row[n] for n in (*names, "trace_id"))
        )
        if not found and text:
            begins = " OR ".join(f"starts_with({name}, $text)" for name in names)
            cursor.execute(f"SELECT * FROM waits WHERE {begins} LIMIT {MAX_MATCHES + 1}", {"text": text})
            found = _dicts(cursor, in_flight=False)
            found += _live(live, found, lambda row: any((row[n] or "").startswith(text) for n in names))
        if not found:
            raise NotFound(f"no request {printable(text)[:80]!r}; `kvscope requests` lists what there is")
        if len(found) > 1:
            count = f"more than {MAX_MATCHES}" if len(found) > MAX_MATCHES else str(len(found))
            message = f"{count} requests match {printable(text)[:80]!r}; write more of the id"
            raise Ambiguous(message, [request_json(row) for row in found[:MAX_MATCHES]])
        request = found[0]
        parts: dict[str, Any] = {}
        for table in (schema.TRANSFERS, schema.LEASES, schema.FAILURES):
            cursor.execute(
                f"SELECT * FROM {table.name} WHERE request_id = ? ORDER BY ALL LIMIT {MAX_PARTS}",
                [request["id"]],
            )
            parts[table.name] = [_json(row, table) for row in _dicts(cursor)]
        cursor.execute(
            "SELECT * FROM engines WHERE engine IN (?, ?) ORDER BY engine, source, rank, id LIMIT 100",
            [request["p_engine"], request["d_engine"]],
        )
        parts["engines"] = [_json(row, schema.ENGINES) for row in _dicts(cursor)]
    return {"request": request_json(request), **parts, "as_of_ns": time.time_ns()}


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
    live: Iterable[Mapping[str, Any]], found: Iterable[Row], matches: Callable[[Mapping[str, Any]], bool]
) -> list[Row]:
    """Rows of requests that are not among the stored ones found, whole as those of `waits`."""
    stored = {row["id"] for row in found}
    return [
        {**row, **waits(row), "in_flight": row["outcome"] == "in flight"}
        for row in live
        if row["id"] not in stored and matches(row)
    ]
