"""Jaeger's query API, as far as Grafana's built-in Jaeger source asks it: waterfalls and the graph of P → D
pairs without another store.

    GET /api/services                       engines
    GET /api/services/{service}/operations  names of spans
    GET /api/traces                         service, operation, tags (JSON), minDuration, maxDuration,
                                            start, end (Unix µs), lookback, limit
    GET /api/traces/{id}                    32 hex digits, or fewer without the zeros before them
    GET /api/dependencies                   endTs, lookback (both ms): requests by P → D pair
    GET /api/v3/services, /api/v3/operations, /api/v3/traces, /api/v3/traces/{id}
                                            the same in OTLP's JSON form

Without an operation a search is for requests: durations are those of whole requests, and the engine had a
part in them. With one it is for spans of that name on that engine. A tag that is an attribute of the root
span is looked for there, all others at one span. Other parameters are not looked at: other versions send
others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from kvscope import __version__, query, spans
from kvscope.errors import UsageError
from kvscope.filters import checked_text, literal
from kvscope.lookup import NotFound
from kvscope.schema import trace_id_of
from kvscope.selection import Selection, moment_ns
from kvscope.spans import Link, Span
from kvscope.steps import BY_NAME
from kvscope.storefile import relation
from kvscope.text import duration_ns, printable

if TYPE_CHECKING:
    import duckdb
    import pyarrow

DEFAULT_LIMIT, MAX_LIMIT = 20, 500
MAX_SERVICES = 1000
MAX_PAIRS = 10_000
MAX_TAGS = 20
MAX_CHARACTERS = 1024
"""Of a service, an operation, a tag."""
MAX_SHARING = 100
"""Requests shown of one trace id that several carry."""
MAX_LOOKED_AT = 2_000
"""Requests whose spans are looked at to find those that are asked for: the latest."""
DEFAULT_LOOKBACK_NS = 2 * 86400 * 10**9
"""As Jaeger's own; of dependencies half of that."""

Row = dict[str, Any]
Parameters = Mapping[str, str]


class Source(Protocol):
    """What is asked of the daemon, from worker threads."""

    def live(self) -> list[Row]:
        """Rows of `requests` of those in flight."""

    def cursor(self) -> duckdb.DuckDBPyConnection: ...


class Search(NamedTuple):
    """What traces are asked for."""

    service: str
    operation: str
    columns: dict[str, str]
    """Column of `waits` -> value as text."""
    tags: dict[str, str]
    """Attributes that one span must have."""
    failed: bool | None
    min_ns: int
    max_ns: int | None
    since_ns: int
    until_ns: int
    limit: int


Ask = Callable[[Callable[[], object]], Awaitable[Response]]


def routes(jaeger: Jaeger, ask: Ask) -> list[Route]:
    """Where the API is served; `ask` answers with JSON of what its argument returns, in a worker thread."""

    async def services(request: Request) -> Response:
        return await ask(lambda: _v2(jaeger.services()))

    async def operations(request: Request) -> Response:
        return await ask(lambda: _v2(jaeger.operations()))

    async def traces(request: Request) -> Response:
        search = search_v2(request.query_params)
        return await ask(lambda: _v2(jaeger.search(search, _trace_v2)))

    async def trace(request: Request) -> Response:
        number = _trace_id(request.path_params["id"])
        return await ask(lambda: _v2(jaeger.trace(number, _trace_v2)))

    async def dependencies(request: Request) -> Response:
        selection = dependencies_of(request.query_params)
        return await ask(lambda: _v2(jaeger.dependencies(selection)))

    async def services_v3(request: Request) -> Response:
        return await ask(lambda: {"services": jaeger.services()})

    async def operations_v3(request: Request) -> Response:
        return await ask(
            lambda: {
                "operations": [
                    {"name": n, "spanKind": _KIND_OF.get(n, "internal")} for n in jaeger.operations()
                ]
            }
        )

    async def traces_v3(request: Request) -> Response:
        search = search_v3(request.query_params)
        return await ask(lambda: _v3(jaeger.search(search, _resources_v3)))

    async def trace_v3(request: Request) -> Response:
        number = _trace_id(request.path_params["id"])
        return await ask(lambda: _v3(jaeger.trace(number, _resources_v3)))

    return [
        Route("/api/services", services),
        Route("/api/services/{service:path}/operations", operations),
        Route("/api/traces", traces),
        Route("/api/traces/{id}", trace),
        Route("/api/dependencies", dependencies),
        Route("/api/v3/services", services_v3),
        Route("/api/v3/operations", operations_v3),
        Route("/api/v3/traces", traces_v3),
        Route("/api/v3/traces/{id}", trace_v3),
    ]


class Jaeger:
    """Answers from the store, and from what is in flight.

    Args:
        live: requests that the store does not have (yet), as Arrow.
        limits: of each answer; `rows` is not looked at.
    """

    def __init__(self, source: Source, live: Callable[[], pyarrow.Table], limits: query.Limits) -> None:
        self._source = source
        self._live = live
        self._limits = limits

    def services(self) -> list[str]:
        """The engines that started last."""
        cursor = self._source.cursor()
        with query.reading(cursor, self._limits.seconds):
            cursor.execute(
                "SELECT engine FROM engines WHERE engine <> '' GROUP BY engine "
                f"ORDER BY max(started_at_ns) DESC, engine LIMIT {MAX_SERVICES}"
            )
            return sorted(engine for (engine,) in cursor.fetchall())

    def operations(self) -> list[str]:
        """The names that spans have, whatever the service."""
        return list(spans.NAMES)

    def dependencies(self, selection: Selection) -> list[Row]:
        """Requests by P → D pair."""
        live, cursor = self._live(), self._source.cursor()
        with query.reading(cursor, self._limits.seconds, selection, live):
            cursor.execute(
                "SELECT p_engine, d_engine, count(*) FROM requests "
                "WHERE p_engine IS NOT NULL AND d_engine IS NOT NULL "
                f"GROUP BY ALL ORDER BY count(*) DESC, p_engine, d_engine LIMIT {MAX_PAIRS}"
            )
            return [{"parent": p, "child": d, "callCount": calls} for p, d, calls in cursor.fetchall()]

    def search(self, search: Search, make: Make) -> list[msgspec.Raw]:
        """The latest traces that are asked for, as many as fit into an answer."""
        # Those in flight first: one that is stored in between is seen twice and shown once.
        live, cursor = self._live(), self._source.cursor()
        selection = Selection(search.since_ns, search.until_ns)
        with query.reading(cursor, self._limits.seconds, selection, live):
            rows = self._found(cursor, search)
            previous = _previous(cursor, rows)
        return self._encode(rows, previous, make)

    def trace(self, trace_id: str, make: Make) -> list[msgspec.Raw]:
        """The trace of that id: of one request, or of all that carried it.

        Raises:
            NotFound: there is none.
        """
        live = [row for row in self._source.live() if trace_id_of(row) == trace_id]
        number = int(trace_id, 16)
        conditions = [f"id = {number}"] if number < 2**64 else []
        conditions.append(f"lower(trace_id) = {literal(trace_id)}")
        cursor = self._source.cursor()
        with query.reading(cursor, self._limits.seconds):
            rows: list[Row] = []
            while conditions and not rows:  # one by one: with OR all columns would be read
                cursor.execute(
                    f"SELECT * FROM requests WHERE {conditions.pop(0)} "
                    f"ORDER BY arrived_at_ns, id LIMIT {MAX_SHARING}"
                )
                rows = [row for row in _dicts(cursor) if trace_id_of(row) == trace_id]
            stored = {row["id"] for row in rows}
            rows += [row for row in live if row["id"] not in stored][: MAX_SHARING - len(rows)]
            previous = _previous(cursor, rows)
        encoded = self._encode(rows, previous, make)
        if not encoded:
            raise NotFound(f"no trace {trace_id}; it may be older than what is stored")
        return encoded

    def _found(self, cursor: duckdb.DuckDBPyConnection, search: Search) -> list[Row]:
        if search.operation not in ("", *spans.NAMES) or not search.tags.keys() <= spans.SPAN_ATTRIBUTES:
            return []
        by_span = bool(search.tags) or search.operation not in ("", spans.ROOT)
        where = " AND ".join(_conditions(search)) or "true"
        cursor.execute(
            f"SELECT * FROM waits WHERE {where} ORDER BY arrived_at_ns DESC, id "
            f"LIMIT {MAX_LOOKED_AT if by_span else search.limit}"
        )
        names = [column[0] for column in cursor.description or []]
        found: list[Row] = []
        while len(found) < search.limit and (batch := cursor.fetchmany(64)):
            for values in batch:
                row = dict(zip(names, values, strict=True))
                if not by_span or any(_matches(search, span) for span in spans.of_request(row)):
                    found.append(row)
        return found[: search.limit]

    def _encode(self, rows: Sequence[Row], previous: Mapping[int, Link], make: Make) -> list[msgspec.Raw]:
        traces: dict[str, list[Span]] = {}
        for row in rows:
            if made := spans.of_request(row, previous.get(row["id"])):
                traces.setdefault(made[0].trace_id, []).extend(made)
        encoded: list[msgspec.Raw] = []
        size = 0
        for trace in traces.values():
            parts = [msgspec.json.encode(part) for part in make(trace)]
            size += sum(map(len, parts))
            if encoded and size > self._limits.bytes:
                break
            encoded += map(msgspec.Raw, parts)
        return encoded


Make = Callable[[list[Span]], Iterable[object]]
"""Makes the parts of an answer that one trace is told by."""


# --- what is asked for ----------------------------------------------------------------------------------


def search_v2(parameters: Parameters, now_ns: int | None = None) -> Search:
    """What the parameters of `/api/traces` ask for.

    Raises:
        UsageError: one is not understood.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    until_ns = _whole("end", parameters, 1000)
    until_ns = now_ns if until_ns is None else until_ns
    since_ns = _whole("start", parameters, 1000)
    if since_ns is None:
        lookback = parameters.get("lookback") or ""
        named = not lookback or lookback == "custom"  # which goes with a start
        since_ns = max(0, until_ns - (DEFAULT_LOOKBACK_NS if named else _duration("lookback", lookback)))
    return _search(
        parameters,
        ("service", "operation", "tags", "minDuration", "maxDuration"),
        since_ns,
        until_ns,
        parameters.get("limit"),
    )


def search_v3(parameters: Parameters, now_ns: int | None = None) -> Search:
    """What the parameters of `/api/v3/traces` ask for.

    Raises:
        UsageError: one is not understood.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    # Grafana leaves the + of an offset as it is, which in a query stands for a space.
    since, until = (
        re.sub(r"(?<=T)(.*) (?=\d\d:\d\d$)", r"\1+", parameters.get(f"query.start_time_{end}") or "")
        for end in ("min", "max")
    )
    until_ns = moment_ns(until, now_ns, "query.start_time_max")
    until_ns = now_ns if until_ns is None else until_ns
    since_ns = moment_ns(since, now_ns, "query.start_time_min")
    return _search(
        parameters,
        (
            "query.service_name",
            "query.operation_name",
            "query.attributes",
            "query.duration_min",
            "query.duration_max",
        ),
        max(0, until_ns - DEFAULT_LOOKBACK_NS) if since_ns is None else since_ns,
        until_ns,
        parameters.get("query.num_traces") or parameters.get("query.search_depth"),
    )


def dependencies_of(parameters: Parameters, now_ns: int | None = None) -> Selection:
    """The requests that the parameters of `/api/dependencies` are about.

    Raises:
        UsageError: one is not understood.
    """
    until_ns = _whole("endTs", parameters, 10**6)
    lookback_ns = _whole("lookback", parameters, 10**6)
    until_ns = (time.time_ns() if now_ns is None else now_ns) if until_ns is None else until_ns
    return Selection(
        max(0, until_ns - (DEFAULT_LOOKBACK_NS // 2 if lookback_ns is None else lookback_ns)), until_ns
    )


def _search(
    parameters: Parameters, names: Sequence[str], since_ns: int, until_ns: int, limit: str | None
) -> Search:
    service, operation = (_text(name, parameters.get(name) or "") for name in names[:2])
    columns, tags, failed = _tags(names[2], parameters.get(names[2]) or "")
    shortest, longest = (parameters.get(name) or "" for name in names[3:])
    min_ns = _duration(names[3], shortest) if shortest else 0
    max_ns = _duration(names[4], longest) if longest else None
    if max_ns is not None and min_ns > max_ns:
        raise UsageError(f"{names[3]} is longer than {names[4]}; turn them round")
    if since_ns >= until_ns:
        raise UsageError("the start is not before the end; turn them round")
    number = int(limit) if limit and limit.isascii() and limit.isdigit() and len(limit) < 10 else 0
    if limit and not 1 <= number <= MAX_LIMIT:
        raise UsageError(f"limit is a whole number from 1 to {MAX_LIMIT}")
    return Search(
        service,
        "" if operation == "All" else operation,  # Grafana's word for none
        columns,
        tags,
        failed,
        min_ns,
        max_ns,
        since_ns,
        until_ns,
        number or DEFAULT_LIMIT,
    )


def _tags(name: str, text: str) -> tuple[dict[str, str], dict[str, str], bool | None]:
    """(column -> value, attribute of one span -> value, whether it failed) of tags as JSON."""
    try:
        found = msgspec.json.decode(text or "{}", type=dict[str, str | int | float | bool])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        raise UsageError(
            f'{name} is a JSON object of texts, such as {{"kvscope.connector":"push"}}'
        ) from None
    if len(found) > MAX_TAGS:
        raise UsageError(f"at most {MAX_TAGS} tags")
    columns: dict[str, str] = {}
    tags: dict[str, str] = {}
    failed: bool | None = None
    for key, value in found.items():
        wanted = str(value).lower() if isinstance(value, bool) else str(value)
        _text(name, key)
        _text(name, wanted)
        if key == "error":
            failed = wanted == "true"
        elif key in spans.ROOT_ATTRIBUTES:
            columns[spans.ROOT_ATTRIBUTES[key]] = wanted
        else:
            tags[key] = wanted
    return columns, tags, failed


def _text(name: str, value: str) -> str:
    if len(checked_text(name, value)) > MAX_CHARACTERS:
        raise UsageError(f"{name} has at most {MAX_CHARACTERS} characters")
    return value


def _whole(name: str, parameters: Parameters, unit_ns: int) -> int | None:
    """Nanoseconds of a whole number of units; None where it is not given."""
    text = parameters.get(name)
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 20) or int(text) * unit_ns >= 2**63:
        unit = {1000: "microseconds", 10**6: "milliseconds"}[unit_ns]
        raise UsageError(f"{name}: {printable(text)[:40]!r} is no whole number of {unit}")
    return int(text) * unit_ns


_GO_DURATION = re.compile(r"(?:\d{1,12}(?:\.\d{1,9})?(?:ns|us|ms|s|m|h|d))+", re.ASCII)


def _duration(name: str, text: str) -> int:
    """Nanoseconds of a duration as Go writes it: 300ms, 1.5s, 1h30m."""
    plain = text.strip().replace("µs", "us").replace("μs", "us")
    if len(plain) <= 100 and _GO_DURATION.fullmatch(plain):
        total = sum(duration_ns(part) for part in re.findall(r"[\d.]+[a-z]+", plain))
        if total < 2**63:
            return total
    raise UsageError(f"{name}: {printable(text)[:40]!r} is no duration; write it like 300ms, 90s or 2h")


def _trace_id(text: str) -> str:
    if not re.fullmatch(r"[0-9a-fA-F]{1,32}", text):
        raise UsageError(f"{printable(text)[:40]!r} is no trace id; it has 32 hex digits")
    return text.lower().zfill(32)


# --- finding them ---------------------------------------------------------------------------------------

_DURATION = (
    "coalesce(ttft_ns + coalesce(decode_generate_ns, 0), list_max([i.from_ns + i.ns for i in waterfall]), 0)"
)
"""`spans.duration_ns` as SQL."""


def _conditions(search: Search) -> list[str]:
    """Conditions on rows of `waits`: all that can be said of whole requests, and where it is seldom met."""
    found = [f'CAST("{column}" AS VARCHAR) = {literal(value)}' for column, value in search.columns.items()]
    if search.service:
        service = literal(search.service)
        found.append(f"(p_engine = {service} OR d_engine = {service})")
    if search.failed is not None:
        failed = f"coalesce(outcome, '') IN ({', '.join(map(literal, spans.FAILED))})"
        found.append(failed if search.failed else f"NOT {failed}")
    step = BY_NAME.get(search.operation)
    if search.operation in ("", spans.ROOT):
        found += _between(_DURATION, search) if search.min_ns or search.max_ns is not None else []
    elif step is not None and step.in_ttft:
        within = " AND ".join([f"i.step = {step.code}", *_between("i.ns", search)])
        found.append(f"len([i for i in waterfall if {within}]) > 0")
    elif step is not None:
        found += [f"{step.column} IS NOT NULL", *_between(step.column, search)]
    return found


def _between(what: str, search: Search) -> list[str]:
    found = [f"{what} >= {search.min_ns}"] if search.min_ns else []
    return found + ([f"{what} <= {search.max_ns}"] if search.max_ns is not None else [])


def _matches(search: Search, span: Span) -> bool:
    """Whether it is the span that is asked for, as far as a row can't tell."""
    if any(str(span.attributes.get(key)) != value for key, value in search.tags.items()):
        return False
    if search.operation in ("", spans.ROOT):
        return True
    return (
        span.name == search.operation
        and (not search.service or span.service == search.service)
        and search.min_ns <= span.ns
        and (search.max_ns is None or span.ns <= search.max_ns)
    )


def _previous(cursor: duckdb.DuckDBPyConnection, rows: Sequence[Row]) -> dict[int, Link]:
    """Request -> link to the turn before it in its session, of those that are stored."""
    later = {
        (row["session"], row["turn"]): row["id"] for row in rows if row["session"] and (row["turn"] or 0) > 1
    }
    if not later:
        return {}
    sessions = ", ".join(sorted({str(int(session)) for session, _ in later}))
    cursor.execute(
        "SELECT id, session, turn, trace_id "
        f"FROM {relation(cursor, 'requests')} WHERE session IN ({sessions}) OR id IN ({sessions})"
    )
    found: dict[int, Link] = {}
    for row in _dicts(cursor):
        # The first turn is stored before it is known to be one.
        after = later.get((row["session"] or row["id"], (row["turn"] or 1) + 1))
        if after is not None:
            found[after] = spans.root_link(row)
    return found


def _dicts(cursor: duckdb.DuckDBPyConnection) -> list[Row]:
    names = [column[0] for column in cursor.description or []]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


# --- Jaeger's JSON --------------------------------------------------------------------------------------


def _v2(data: Sequence[object]) -> dict[str, Any]:
    return {"data": data, "total": len(data), "limit": 0, "offset": 0, "errors": None}


def _trace_v2(trace: list[Span]) -> Iterable[object]:
    services = list(dict.fromkeys(span.service for span in trace))
    processes = {service: f"p{number}" for number, service in enumerate(services, 1)}
    yield {
        "traceID": trace[0].trace_id,
        "spans": [_span_v2(span, processes[span.service]) for span in trace],
        "processes": {
            name: {"serviceName": service, "tags": _tags_v2({"kvscope.version": __version__})}
            for service, name in processes.items()
        },
        "warnings": None,
    }


def _span_v2(span: Span, process: str) -> dict[str, Any]:
    references = [("FOLLOWS_FROM", link.trace_id, link.span_id) for link in span.links]
    if span.parent_id:
        references.insert(0, ("CHILD_OF", span.trace_id, span.parent_id))
    tags = _tags_v2({**span.attributes, "span.kind": span.kind})
    if span.error:
        tags += [
            {"key": "error", "type": "bool", "value": True},
            *_tags_v2({"otel.status_code": "ERROR", "otel.status_description": span.error}),
        ]
    # Whole microseconds: of ends, not of lengths, so that spans that touch still do.
    start_us = span.start_ns // 1000
    return {
        "traceID": span.trace_id,
        "spanID": span.span_id,
        "flags": 1,
        "operationName": span.name,
        "references": [{"refType": kind, "traceID": trace, "spanID": one} for kind, trace, one in references],
        "startTime": start_us,
        "duration": span.end_ns // 1000 - start_us,
        "tags": tags,
        "logs": [],
        "processID": process,
        "warnings": None,
    }


def _tags_v2(attributes: spans.Attributes) -> list[dict[str, Any]]:
    return [
        {"key": key, "type": "int64" if isinstance(value, int) else "string", "value": value}
        for key, value in attributes.items()
    ]


# --- OTLP's JSON ----------------------------------------------------------------------------------------

_KINDS = {spans.INTERNAL: 1, spans.SERVER: 2, spans.CLIENT: 3}
_KIND_OF = {spans.ROOT: spans.CLIENT, spans.D_LEG: spans.SERVER}
_ERROR_STATUS = 2


def _v3(resources: Sequence[object]) -> dict[str, Any]:
    return {"result": {"resourceSpans": resources}}


def _resources_v3(trace: list[Span]) -> Iterable[object]:
    by_service: dict[str, list[Span]] = {}
    for span in trace:
        by_service.setdefault(span.service, []).append(span)
    for service, some in by_service.items():
        yield {
            "resource": {"attributes": _attributes_v3({"service.name": service})},
            "scopeSpans": [
                {
                    "scope": {"name": "kvscope", "version": __version__},
                    "spans": [_span_v3(span) for span in some],
                }
            ],
        }


def _span_v3(span: Span) -> dict[str, Any]:
    return {
        "traceId": span.trace_id,
        "spanId": span.span_id,
        "parentSpanId": span.parent_id,
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes_v3(span.attributes),
        "links": [
            {
                "traceId": link.trace_id,
                "spanId": link.span_id,
                "attributes": _attributes_v3({"kvscope.link": link.what}),
            }
            for link in span.links
        ],
        "status": {"code": _ERROR_STATUS, "message": span.error} if span.error else {},
    }


def _attributes_v3(attributes: spans.Attributes) -> list[dict[str, Any]]:
    return [
        {
            "key": key,
            "value": {"intValue": str(value)} if isinstance(value, int) else {"stringValue": value},
        }
        for key, value in attributes.items()
    ]
