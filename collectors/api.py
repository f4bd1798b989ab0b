"""The daemon's HTTP API: read-only questions about what it holds.

    GET  /healthz                     it answers
    GET  /metrics                     for Prometheus: text, or OpenMetrics where that is accepted
    GET  /api/v1/status               rings, engines, losses, store
    GET  /api/v1/requests             list: where= (repeatable), sort=, limit=, since=
    GET  /api/v1/requests/{id}        one request, by any of its ids or the beginning of one
    GET  /api/v1/queries              the named questions, documented
    POST /api/v1/query                {"name": …} or {"sql": …}, {"parameters": {…}}; JSON, or an Arrow stream
    GET  /api/v1/live                 one frame: window=, at=, where= (repeatable), label=
    GET  /api/v1/stream               frames from now on, one line each: the same but for at=, and refresh=
    POST /api/v1/snapshot             {"path": …, "all": …}: a copy of the store that other programs may open;
                                      while one is written, another gets a 503
    POST /api/v1/archive              {"path": …, "since": …, "until": …}: closed hours to a Parquet directory
    GET  /api/v1/labels               the windows that people named, with their notes
    POST /api/v1/labels               {"name": …, "kind": …, "since": …, "until": …, "note": …} or "remove"
    GET  /api/services, /api/traces … Jaeger's query API, for Grafana: see collectors/jaeger.py

Errors are JSON, `{"error": one line, "hint": what to do}`: 400 for what is refused before it runs, 422 for a
query that fails (DuckDB's complaint, time, memory). All input is untrusted: bodies are bounded
and validated, queries run with limits on time, rows and bytes: named ones in worker threads, a user's own SQL
in a process of its own, which is killed when it takes too much (docs/sql.md). When a client closes its
connection, what it asked is ended. A web page must not
reach a daemon on loopback through its visitor's browser: the Host header has to be one of ours, an Origin
too where there is one, and a POST has to be JSON, which a foreign page can't send without asking first.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
from collections.abc import Callable, Collection
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol, TypeVar
from urllib.parse import urlsplit

import anyio
import duckdb
import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from kvscope import __version__, lookup, query
from kvscope.collectors import jaeger, labels
from kvscope.collectors.live import LiveView, TooManyViewers, Watched
from kvscope.collectors.sandbox import Sandbox
from kvscope.collectors.stream import Frames, Viewers, in_thread
from kvscope.errors import KvscopeError, UsageError
from kvscope.frame import Scope as FrameScope
from kvscope.text import duration_ns, printable

if TYPE_CHECKING:
    import pyarrow

MAX_BODY_BYTES = 2 * query.MAX_SQL_BYTES
MAX_ID_CHARACTERS = 1024
THREADS = 4
"""Questions answered at once."""
OWN_SQL = 2
"""Users' own queries that run at once, beside the questions: each has a process."""
WRITES = 2
"""Changes of labels, and archives, that are written at once, beside the questions: the disk may be slow."""
MIN_REFRESH_NS, MAX_REFRESH_NS = 200_000_000, 60_000_000_000
"""Between two frames of a stream."""
INTERRUPT_S = 0.1
"""How often a question is interrupted that nobody waits for any more, until it has ended."""
MAX_WAITING = 32
"""Questions that may wait for a thread; beyond it a caller is told to come again."""

ARROW = query.ARROW
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})

T = TypeVar("T")


class Daemon(Watched, Protocol):
    """What the API needs of the daemon. All are called from worker threads."""

    def status(self) -> dict[str, Any]: ...

    def live(self) -> list[dict[str, Any]]:
        """Rows of `requests` of those in flight."""

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A cursor of the store; the caller closes it."""

    def explained(self, error: Exception) -> str:
        """Why a question failed, with what to do where the archive is the reason."""

    def snapshot(self, path: Path, everything: bool = False) -> None: ...

    def archive(self, path: Path, since: str, until: str) -> dict[str, Any]:
        """Write closed hours to a directory; returns `files` and `next_ns`."""

    def keep(self, table: str, row: tuple[Any, ...]) -> None:
        """Have a row of a kept table stored; returns when it is on disk."""

    def metrics(self, accept: str) -> tuple[bytes, str]:
        """Text for Prometheus, and its content type."""


class QueryBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /api/v1/query: a name or SQL."""

    name: Annotated[str, msgspec.Meta(max_length=64)] = ""
    sql: str = ""
    parameters: dict[str, str | int | list[str] | None] = {}


class SnapshotBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /api/v1/snapshot."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    """On the daemon's host: absolute, new, ending in .duckdb."""
    all: bool = False
    """What was moved to the archive too."""


class ArchiveBody(msgspec.Struct, forbid_unknown_fields=True):
    """Body of POST /api/v1/archive."""

    path: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
    """On the daemon's host: absolute; its archive, or a directory that is new, empty or an archive."""
    since: Annotated[str, msgspec.Meta(max_length=1024)] = ""
    until: Annotated[str, msgspec.Meta(max_length=1024)] = ""


def allowed_hosts(address: str) -> frozenset[str] | None:
    """Host names that requests to a daemon listening on `address` may carry; None for any."""
    address = address.lower()
    if address in LOOPBACK:
        return LOOPBACK
    return None if address in ("0.0.0.0", "::") else LOOPBACK | {address}


def create_app(
    daemon: Daemon,
    limits: query.Limits = query.Limits(),  # noqa: B008 - immutable
    hosts: Collection[str] | None = LOOPBACK,
    sql_memory_mb: int = 512,
) -> Starlette:
    """The API of `daemon`.

    Args:
        limits: of each query.
        sql_memory_mb: that a query in a user's own SQL may use.
        hosts: host names that a request may be addressed to, without port; None for any.
    """
    api = _Api(daemon, limits, sql_memory_mb)
    app = Starlette(
        routes=[
            Route("/healthz", api.health),
            Route("/metrics", api.metrics),
            Route("/api/v1/status", api.status),
            Route("/api/v1/requests", api.requests),
            Route("/api/v1/requests/{id:path}", api.request),
            Route("/api/v1/queries", api.queries),
            Route("/api/v1/query", api.query, methods=["POST"]),
            Route("/api/v1/live", api.frame),
            Route("/api/v1/stream", api.stream),
            Route("/api/v1/snapshot", api.snapshot, methods=["POST"]),
            Route("/api/v1/archive", api.archive, methods=["POST"]),
            Route(
                "/api/v1/labels",
                labels.endpoint(daemon, api.answer, api.written, _body, api.relabelled),
                methods=["GET", "POST"],
            ),
            *jaeger.routes(jaeger.Jaeger(api, api.not_stored, limits), api.answer),
        ],
        middleware=[Middleware(_Guard, hosts=None if hosts is None else frozenset(hosts))],
        exception_handlers={
            KvscopeError: _known_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
        },
    )
    app.state.end = api.end
    return app


class _Client:
    """Who waits for an answer."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.gone = False
        self.ends: list[Callable[[], object]] = []
        """What ends what is done for it."""

    async def watch(self, waiting: anyio.CancelScope) -> None:
        """End all that once the client has gone."""
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        waiting.cancel()
        while True:  # between two queries an interrupt is lost
            for end in tuple(self.ends):
                end()
            await anyio.sleep(INTERRUPT_S)


_client: ContextVar[_Client] = ContextVar("client")
"""Of the request that is being answered, in its worker thread too."""


class _Api:
    def __init__(self, daemon: Daemon, limits: query.Limits, sql_memory_mb: int) -> None:
        self._daemon = daemon
        self._limits = limits
        self._sandbox = Sandbox(limits, sql_memory_mb)
        self._own_sql = anyio.CapacityLimiter(OWN_SQL)
        self._threads = anyio.CapacityLimiter(THREADS)
        self._writes = anyio.CapacityLimiter(WRITES)
        self._snapshot = anyio.Lock()
        self._scrapes = anyio.CapacityLimiter(1)
        self._frames = anyio.CapacityLimiter(THREADS)
        self._view = LiveView(daemon, limits)
        self._viewers = Viewers()

    def end(self) -> None:
        """End all streams and the users' own queries at once, because the daemon is about to stop; from any
        thread."""
        self._viewers.end()
        self._view.close()
        self._sandbox.close()

    def not_stored(self) -> pyarrow.Table:
        """Requests that the store does not have (yet); from a worker thread."""
        return self._view.requests()

    def live(self) -> list[dict[str, Any]]:
        """Rows of `requests` of those in flight."""
        return self._daemon.live()

    def cursor(self) -> duckdb.DuckDBPyConnection:
        """A cursor of the store, for the thread of a question: it is interrupted if the client goes."""
        cursor = self._daemon.cursor()

        def interrupt() -> None:
            with contextlib.suppress(duckdb.Error):  # it is closed
                cursor.interrupt()

        _client.get().ends.append(interrupt)
        return cursor

    def relabelled(self) -> None:
        """Requests may count as of other labels from now on."""
        self._view.relabelled()

    async def answer(self, work: Callable[[], object]) -> Response:
        """JSON of what `work` returns in a worker thread."""
        return await self._asked(lambda: _json(work()))

    async def written(self, work: Callable[[], object]) -> Response:
        """As `answer`, of what may take longer; questions don't wait behind it."""
        return await self._in_thread(lambda: _json(work()), self._writes)

    async def health(self, request: Request) -> Response:
        return _json({"ok": True, "kvscope": __version__})

    async def status(self, request: Request) -> Response:
        return await self._in_thread(lambda: _json(self._daemon.status()))

    async def metrics(self, request: Request) -> Response:
        accept = ",".join(request.headers.getlist("accept"))
        # Beside the questions: a scrape must not wait for a slow one.
        return await self._in_thread(lambda: _response(*self._daemon.metrics(accept)), self._scrapes)

    async def requests(self, request: Request) -> Response:
        parameters: dict[str, Any] = {k: v for k, v in request.query_params.items() if k != "where"}
        parameters["where"] = request.query_params.getlist("where")
        listing = _valid(lambda: msgspec.convert(parameters, lookup.Listing, strict=False))

        def answer() -> Response:
            # Those in flight first: one that is stored in between is seen twice and shown once, not missed.
            live = self.live()
            with contextlib.closing(self.cursor()) as cursor:
                found = lookup.list_requests(cursor, live, listing, self._limits.seconds)
            return _json({"requests": found})

        return await self._asked(answer)

    async def request(self, request: Request) -> Response:
        text = request.path_params["id"]
        if not 1 <= len(text) <= MAX_ID_CHARACTERS:
            raise UsageError(f"an id has 1 to {MAX_ID_CHARACTERS} characters")

        def answer() -> Response:
            live = self.live()
            with contextlib.closing(self.cursor()) as cursor:
                return _json(lookup.look_up(cursor, live, text, self._limits.seconds))

        return await self._asked(answer)

    async def queries(self, request: Request) -> Response:
        return _json(
            {
                "queries": [
                    {
                        "name": one.name,
                        "title": one.title,
                        "description": one.description,
                        "parameters": {name: query.PARAMETERS[name] for name in one.parameters},
                        "columns": one.columns,
                        "sql": one.sql,
                    }
                    for one in query.questions().values()
                ]
            }
        )

    async def query(self, request: Request) -> Response:
        body = await _body(request, QueryBody)
        if bool(body.name) == bool(body.sql):
            raise UsageError("give either a name or sql")
        arrow = ARROW in request.headers.get("accept", "")

        def named() -> Response:
            sql = query.checked(body.name, body.parameters).sql
            # Those in flight first: one that is stored in between is seen twice and counted once.
            live = self._view.requests()
            with contextlib.closing(self.cursor()) as cursor:
                if arrow:
                    return _arrow(*query.run_arrow(cursor, sql, body.parameters, self._limits, live))
                found = query.run_sql(cursor, sql, body.parameters, self._limits, live)
                return _json(query.result_json(found))

        def own() -> Response:
            live = self._view.requests()
            cursor = self.cursor()
            _client.get().ends.append(lambda: self._sandbox.stop(cursor))
            found = self._sandbox.run(cursor, body.sql, body.parameters, live, arrow)
            response = _response(found.content, ARROW if arrow else "application/json")
            response.headers[query.TRUNCATED] = "true" if found.truncated else "false"
            return response

        # A user's own SQL waits for its like, not before the named questions.
        return await (self._asked(named) if body.name else self._asked(own, self._own_sql))

    async def frame(self, request: Request) -> Response:
        scope, _ = _scope(request)
        # Beside the questions: a new scope may have to wait for its figures.
        return await self._in_thread(lambda: _json(self._view.frame(scope)), self._frames)

    async def stream(self, request: Request) -> Response:
        scope, refresh_s = _scope(request, stream=True)
        try:
            stream = self._view.stream(scope)
        except TooManyViewers as error:
            raise HTTPException(503, str(error)) from None
        return await Frames.start(stream, refresh_s, self._viewers)

    async def snapshot(self, request: Request) -> Response:
        body = await _body(request, SnapshotBody)
        path = Path(body.path)
        if not path.is_absolute() or path.suffix != ".duckdb" or "\0" in body.path:
            raise UsageError("a snapshot needs an absolute path that ends in .duckdb")

        def answer() -> Response:
            try:
                self._daemon.snapshot(path, body.all)
            except KvscopeError as error:
                raise KvscopeError(self._daemon.explained(error)) from None
            return _json({"path": str(path)})

        if self._snapshot.locked():
            raise HTTPException(503, "a snapshot is being written; take another when that is done")
        async with self._snapshot:
            return await in_thread(answer)  # beside the questions: it may take minutes

    async def archive(self, request: Request) -> Response:
        body = await _body(request, ArchiveBody)
        path = Path(body.path)
        if not path.is_absolute() or not body.path.isprintable():
            raise UsageError("an archive needs the absolute path of a directory")
        return await self.written(lambda: self._daemon.archive(path, body.since, body.until))

    async def _asked(
        self, work: Callable[[], Response], limiter: anyio.CapacityLimiter | None = None
    ) -> Response:
        """As `_in_thread`, until the client goes."""
        client = _client.get()
        gone = KvscopeError("the client has gone")

        def answer() -> Response:
            try:
                return work()
            except Exception as error:
                if client.gone:  # no fault, however what was interrupted calls it
                    raise gone from None
                said = self._daemon.explained(error) if isinstance(error, query.QueryError) else ""
                if said not in ("", str(error)):
                    raise KvscopeError(said) from None
                raise

        with anyio.CancelScope() as waiting:  # for a thread; what runs in one is waited for
            watching = asyncio.create_task(client.watch(waiting))
            try:
                return await self._in_thread(answer, limiter)
            finally:
                watching.cancel()
        raise gone

    async def _in_thread(
        self, work: Callable[[], Response], limiter: anyio.CapacityLimiter | None = None
    ) -> Response:
        limiter = limiter or self._threads
        if limiter.statistics().tasks_waiting >= MAX_WAITING:
            raise HTTPException(503, "the daemon is busy with other questions; ask again in a moment")
        return await in_thread(work, limiter)


class _Guard:
    """Turns away what did not mean to come here (DNS rebinding, requests from foreign web pages)."""

    def __init__(self, app: ASGIApp, hosts: frozenset[str] | None) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        _client.set(_Client(receive))
        if scope["type"] == "http" and self._hosts is not None:
            request = Request(scope)
            host = _host_name("//" + request.headers.get("host", ""))
            origin = request.headers.get("origin")
            if host not in self._hosts or (origin is not None and _host_name(origin) not in self._hosts):
                refused = _error(
                    403, "this daemon does not answer under that host name; use 127.0.0.1 or localhost"
                )
                await refused(scope, receive, send)
                return
        await self._app(scope, receive, send)


def _host_name(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _scope(request: Request, stream: bool = False) -> tuple[FrameScope, float]:
    """What the parameters of a frame, or of a stream of frames, ask for, and every how many seconds."""
    names = (*FrameScope.__struct_fields__, *(("refresh",) if stream else ()))
    values: dict[str, str] = {}
    for name, value in request.query_params.multi_items():
        if name not in names:
            raise UsageError(f"no parameter {printable(name)[:40]!r} here; there are: {', '.join(names)}")
        if name in values and name != "where":
            raise UsageError(f"{name} is given twice")
        values[name] = value
    refresh_ns = duration_ns(values.pop("refresh", "1s"))
    if not MIN_REFRESH_NS <= refresh_ns <= MAX_REFRESH_NS:
        raise UsageError("refresh is a duration from 200ms to 60s")
    given = {**values, **({"where": request.query_params.getlist("where")} if "where" in values else {})}
    return _valid(lambda: msgspec.convert(given, FrameScope)), refresh_ns / 1e9


async def _body(request: Request, type_: type[T]) -> T:
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415, "send the body as JSON; set Content-Type: application/json")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise HTTPException(413, f"the body is larger than {MAX_BODY_BYTES // 1024} KiB; send less")
    return _valid(lambda: msgspec.json.decode(bytes(body), type=type_))


def _valid(make: Callable[[], T]) -> T:
    try:
        return make()
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"not a valid request: {printable(error)[:300]}") from None


def _json(value: object, status: int = 200) -> Response:
    return _response(msgspec.json.encode(value, enc_hook=str), "application/json", status)


def _arrow(table: Any, truncated: bool) -> Response:
    import pyarrow

    sink = io.BytesIO()
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    response = _response(sink.getvalue(), ARROW)
    response.headers[query.TRUNCATED] = "true" if truncated else "false"
    return response


def _response(content: bytes, media_type: str, status: int = 200) -> Response:
    headers = {"cache-control": "no-store", "x-content-type-options": "nosniff"}
    return Response(content, status, headers, media_type)


def _error(status: int, line: str, **more: object) -> Response:
    error, _, hint = line.partition("; ")
    return _json({"error": error, "hint": hint, **more}, status)


async def _known_error(request: Request, error: Exception) -> Response:
    if isinstance(error, lookup.Ambiguous):
        return _error(300, str(error), matches=error.matches)
    if isinstance(error, lookup.NotFound):
        return _error(404, str(error))
    if isinstance(error, query.QueryError):
        return _error(422, str(error))
    return _error(400 if isinstance(error, UsageError) else 503, str(error))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    line = "no such page; the API is under /api/v1/" if error.status_code == 404 else error.detail
    return _error(error.status_code, line)


async def _gone(request: Request, error: Exception) -> Response:
    return _error(400, "the body ended early")
