"""Where the commands get their answers: a daemon over HTTP, or a store file (or snapshot) read directly.

Both offer the same questions and raise the same errors, so that a command need not know which it asks.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from kvscope import __version__, frame, lookup, query, schema, storefile
from kvscope.errors import KvscopeError, UsageError
from kvscope.filters import checked_text
from kvscope.frame import Frame, Scope
from kvscope.labels import Change, Label, listed, row_of
from kvscope.text import printable

if TYPE_CHECKING:
    import pyarrow

TIMEOUT_S = 60.0
"""Longer than any query the daemon runs by default."""

CONNECT_S = 5.0
SILENCE_S = 20.0
"""How much longer than a few refreshes a stream may say nothing: its first frame takes some queries."""
MAX_LINE_BYTES = 64 << 20
"""Of one frame."""

Parameters = query.Parameters


class NoDaemon(KvscopeError):
    """Nothing answers at the daemon's address."""

    exit_code = 3


class DaemonError(KvscopeError):
    """The daemon's own complaint."""


class OtherVersion(KvscopeError):
    """The daemon's live view is missing, or is not one that this kvscope understands."""


class Daemon:
    """A daemon's HTTP API.

    Raises (all methods):
        NoDaemon: nothing answers.
        DaemonError, UsageError, lookup.NotFound, lookup.Ambiguous: as the daemon says.
    """

    def __init__(self, url: str) -> None:
        import httpx

        try:
            parsed = httpx.URL(url)
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise UsageError(f"{printable(url)!r} is no URL of a daemon; write it like http://127.0.0.1:9177")
        self._url = url.rstrip("/")
        # No proxy from the environment: the daemon is on loopback or in the cluster.
        self._client = httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=CONNECT_S), trust_env=False)
        self._streams_lock = threading.Lock()
        self._streams: set[Connection] = set()
        self._closed = False

    def requests(self, listing: lookup.Listing) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._ask("GET", "requests", params=msgspec.to_builtins(listing))[
            "requests"
        ]
        return rows

    def request(self, text: str) -> dict[str, Any]:
        return self._ask("GET", f"requests/{quote(text, safe='')}")

    def query(self, name: str, sql: str, parameters: Parameters) -> dict[str, Any]:
        return self._ask("POST", "query", json=_question(name, sql, parameters))

    def arrow(self, name: str, sql: str, parameters: Parameters) -> tuple[pyarrow.Table, bool]:
        """As `query`, as an Arrow table, and whether a limit cut it."""
        import pyarrow

        body = _question(name, sql, parameters)
        with self._reaching():
            response = self._client.post(
                f"{self._url}/api/v1/query", json=body, headers={"accept": query.ARROW}
            )
        if not response.is_success:
            raise _complaint(response.status_code, self._object(response.content))
        try:
            table = pyarrow.ipc.open_stream(response.content).read_all()
            table.validate(full=True)
        except (pyarrow.ArrowException, OSError):
            raise NoDaemon(f"what answers at {self._url} is no kvscope daemon; point --url to one") from None
        return table, response.headers.get(query.TRUNCATED) == "true"

    def status(self) -> dict[str, Any]:
        return self._ask("GET", "status")

    def labels(self) -> list[Label]:
        """The windows that people named, the latest first."""
        return self._labels(self._ask("GET", "labels"))

    def change_label(self, change: Change) -> list[Label]:
        """Make, change or remove a window; what there is then."""
        return self._labels(self._ask("POST", "labels", json=msgspec.to_builtins(change)))

    def _labels(self, answer: dict[str, Any]) -> list[Label]:
        try:
            return msgspec.convert(answer.get("labels"), list[Label])
        except msgspec.ValidationError:
            raise DaemonError(
                f"the daemon at {self._url} lists labels as kvscope {__version__} does not; "
                "use the same version here and there"
            ) from None

    def snapshot(self, path: Path, everything: bool = False) -> None:
        """Have the daemon write a copy of its store to `path` on its host; with `everything` of its archive
        too."""
        self._ask("POST", "snapshot", json={"path": str(path), "all": everything})

    def archive(self, path: Path, since: str, until: str) -> Iterator[dict[str, Any]]:
        """Have the daemon write closed hours to a directory on its host, some at a time: yields what it wrote
        (`files`), and from when on it goes on (`next_ns`)."""
        done: dict[str, Any] = {"next_ns": since}
        while done["next_ns"] is not None:
            body = {"path": str(path), "since": str(done["next_ns"]), "until": until}
            done = self._ask("POST", "archive", json=body)
            yield done

    def frame(self, scope: Scope) -> Frame:
        """The whole frame of a window, now or in the past.

        Raises:
            OtherVersion: the daemon has no live view, or another one.
        """
        with self._reaching():
            response = self._client.get(f"{self._url}/api/v1/live", params=_scope_parameters(scope))
        return self._frame(response.status_code, response.content)

    def stream(self, scope: Scope, refresh_s: float = 1.0) -> Iterator[Frame]:
        """Frames from now on: a whole one, then changes. Ends when `close` is called, from any thread.

        Raises:
            NoDaemon: it is not there, or not any more.
            OtherVersion: the daemon has no live view, or another one.
        """
        import httpx

        parameters = {**_scope_parameters(scope), "refresh": f"{round(refresh_s * 1e3)}ms"}
        timeout = httpx.Timeout(SILENCE_S + 5 * refresh_s, connect=CONNECT_S)
        connection = Connection()
        with self._streams_lock:
            if self._closed:
                return
            self._streams.add(connection)
        try:
            with (
                self._reaching(),
                httpx.Client(timeout=timeout, trust_env=False) as client,
                client.stream(
                    "GET",
                    f"{self._url}/api/v1/stream",
                    params=parameters,
                    extensions={"trace": connection.trace},
                ) as response,
            ):
                if not response.is_success:
                    self._frame(response.status_code, response.read())
                for line in _lines(response.iter_raw()):
                    yield self._frame(response.status_code, line)
        except KvscopeError:
            if not self._closed:
                raise
        finally:
            with self._streams_lock:
                self._streams.discard(connection)
        if not self._closed:
            raise NoDaemon(f"the daemon at {self._url} ended the stream, as it does when it stops")

    def close(self) -> None:
        """End streams, whichever thread reads them, and all else."""
        with self._streams_lock:
            self._closed = True
        self.end_streams()
        self._client.close()

    def end_streams(self) -> None:
        """End the streams that there are, whichever thread reads them; others may be begun."""
        with self._streams_lock:
            for connection in self._streams:
                connection.end()

    def _frame(self, status: int, content: bytes) -> Frame:
        """A frame of the daemon, or its complaint."""
        if status == 200 and not content.startswith(b'{"error"'):
            try:
                return _FRAME.decode(content)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                raise OtherVersion(
                    f"the live view of the daemon at {self._url} (kvscope {self._version()}) is not one that "
                    f"kvscope {__version__} understands; use the same version here and there"
                ) from None
        answer = self._object(content)
        if status == 404:
            raise OtherVersion(
                f"the daemon at {self._url} is kvscope {self._version()} and has no live view; upgrade it"
            )
        raise _complaint(500 if status == 200 else status, answer)

    def _version(self) -> str:
        """The daemon's version, for a complaint about it."""
        import httpx

        try:
            found = msgspec.json.decode(self._client.get(f"{self._url}/healthz", timeout=CONNECT_S).content)
            return printable(found["kvscope"])[:40]
        except (httpx.HTTPError, msgspec.MsgspecError, UnicodeDecodeError, KeyError, TypeError):
            return "of an unknown version"

    def _ask(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        with self._reaching():
            response = self._client.request(method, f"{self._url}/api/v1/{path}", **arguments)
        answer = self._object(response.content)
        if not response.is_success:
            raise _complaint(response.status_code, answer)
        return answer

    @contextlib.contextmanager
    def _reaching(self) -> Iterator[None]:
        import httpx

        try:
            yield
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise NoDaemon(
                f"no kvscope daemon at {self._url}; start one with `kvscope serve` or point --url to it"
            ) from None
        except httpx.TimeoutException:
            raise DaemonError(f"the daemon at {self._url} does not answer; see its log") from None
        except httpx.HTTPError as error:
            raise NoDaemon(
                f"no kvscope daemon at {self._url} ({printable(error)}); point --url to one"
            ) from None

    def _object(self, content: bytes) -> dict[str, Any]:
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            answer = msgspec.json.decode(content)
            if isinstance(answer, dict):
                return answer
        raise NoDaemon(f"what answers at {self._url} is no kvscope daemon; point --url to one")


def _question(name: str, sql: str, parameters: Parameters) -> dict[str, Any]:
    for what, value in (("name", name), ("SQL", sql), *parameters.items()):
        for text in [value] if isinstance(value, (str, int, type(None))) else value:
            checked_text(what, str(text or ""))
    return {**({"name": name} if name else {"sql": sql}), "parameters": dict(parameters)}


def _complaint(status: int, answer: dict[str, Any]) -> KvscopeError:
    """What the daemon complains of, as an error to raise."""
    line = "; ".join(printable(answer[key]) for key in ("error", "hint") if answer.get(key))
    if status == 300:
        return lookup.Ambiguous(line, answer.get("matches") or [])
    kinds = {404: lookup.NotFound, 400: UsageError}
    return kinds.get(status, DaemonError)(line or f"the daemon answered {status}")


class Connection:
    """The connection of a question: another thread may end it. Give `trace` to httpx."""

    def __init__(self) -> None:
        self._socket: socket.socket | None = None
        self.ended = False

    def trace(self, event: str, info: dict[str, Any]) -> None:
        """httpx tells what it does."""
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.ended:
                self.end()

    def end(self) -> None:
        self.ended = True
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # unlike close, it wakes whoever reads


_FRAME = msgspec.json.Decoder(Frame)


def _scope_parameters(scope: Scope) -> dict[str, Any]:
    found: dict[str, Any] = {"window": scope.window, "where": list(scope.where)}
    if scope.at:
        found["at"] = scope.at
    if scope.label is not None:
        found["label"] = scope.label
    return found


def _lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their ends; what comes after the last end is no line."""
    parts: list[bytes] = []
    count = 0
    for chunk in chunks:
        *ended, rest = chunk.split(b"\n")
        for line in ended:
            yield b"".join((*parts, line))
            parts, count = [], 0
        parts.append(rest)
        count += len(rest)
        if count > MAX_LINE_BYTES:
            raise DaemonError(f"a frame of more than {MAX_LINE_BYTES >> 20} MiB; ask for a shorter window")


class StoreFile:
    """A store that no daemon holds, a snapshot or a Parquet directory, opened to read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.limits = query.Limits()
        """Of a query."""
        self._connection = storefile.open_file(path)

    def requests(self, listing: lookup.Listing) -> list[dict[str, Any]]:
        return lookup.list_requests(self._connection.cursor(), [], listing)

    def request(self, text: str) -> dict[str, Any]:
        return lookup.look_up(self._connection.cursor(), [], text)

    def query(self, name: str, sql: str, parameters: Parameters) -> dict[str, Any]:
        if name:
            sql = query.checked(name, parameters).sql
        return query.result_json(query.run_sql(self._connection.cursor(), sql, parameters, self.limits))

    def arrow(self, name: str, sql: str, parameters: Parameters) -> tuple[pyarrow.Table, bool]:
        """As `query`, as an Arrow table, and whether a limit cut it."""
        if name:
            sql = query.checked(name, parameters).sql
        return query.run_arrow(self._connection.cursor(), sql, parameters, self.limits)

    def labels(self) -> list[Label]:
        return listed(self._connection.cursor())

    def frame(self, scope: frame.Scope) -> frame.Frame:
        """The frame of a past window; its end, where `scope` says none, is that of the last request, or now
        where there is none."""
        last = "max(arrived_at_ns + coalesce(ttft_ns, 0) + coalesce(decode_generate_ns, 0))"
        if not scope.at:
            scope = msgspec.structs.replace(scope, at=str((self._moments(last)[0] or time.time_ns()) + 1))
        return frame.build(self._connection.cursor(), scope, now_ns=time.time_ns())

    def span(self) -> tuple[int, int] | None:
        """Arrival of the first and of the last request, Unix nanoseconds; None where there is none."""
        first, last = self._moments("min(arrived_at_ns), max(arrived_at_ns)")
        return None if first is None or last is None else (first, last)

    def _moments(self, columns: str) -> tuple[int | None, ...]:
        with contextlib.closing(self._connection.cursor()) as cursor, query.reading(cursor):
            return tuple(cursor.execute(f"SELECT {columns} FROM requests").fetchall()[0])

    def close(self) -> None:
        self._connection.close()


def change_label(path: Path, change: Change) -> list[Label]:
    """As `Daemon.change_label`, in a store or a snapshot that no process has open."""
    storefile.append(path, schema.LABELS, lambda cursor: row_of(cursor, change))
    with contextlib.closing(StoreFile(path)) as source:
        return source.labels()


@contextlib.contextmanager
def opened(url: str, db: str | None) -> Iterator[Daemon | StoreFile]:
    """The file `db` where one is named, else the daemon at `url`."""
    source = StoreFile(Path(db)) if db else Daemon(url)
    try:
        yield source
    finally:
        source.close()
