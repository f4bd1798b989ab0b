"""Where the commands get their answers: a daemon over HTTP, or a store file (or snapshot) read directly.

Both offer the same questions and raise the same errors, so that a command need not know which it asks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec

from kvscope import lookup, query
from kvscope.errors import KvscopeError, UsageError
from kvscope.text import printable

TIMEOUT_S = 60.0
"""Longer than any query the daemon runs by default."""

Parameters = Mapping[str, str | int | None]


class NoDaemon(KvscopeError):
    """Nothing answers at the daemon's address."""

    exit_code = 3


class DaemonError(KvscopeError):
    """The daemon's own complaint."""


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
        self._client = httpx.Client(timeout=httpx.Timeout(TIMEOUT_S, connect=5.0), trust_env=False)

    def requests(self, listing: lookup.Listing) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = self._ask("GET", "requests", params=msgspec.to_builtins(listing))[
            "requests"
        ]
        return rows

    def request(self, text: str) -> dict[str, Any]:
        return self._ask("GET", f"requests/{quote(text, safe='')}")

    def query(self, name: str, sql: str, parameters: Parameters) -> dict[str, Any]:
        body = {"name": name} if name else {"sql": sql}
        return self._ask("POST", "query", json={**body, "parameters": dict(parameters)})

    def status(self) -> dict[str, Any]:
        return self._ask("GET", "status")

    def snapshot(self, path: Path) -> None:
        """Have the daemon write a copy of its store to `path` on its host."""
        self._ask("POST", "snapshot", json={"path": str(path)})

    def close(self) -> None:
        self._client.close()

    def _ask(self, method: str, path: str, **arguments: Any) -> dict[str, Any]:
        import httpx

        try:
            response = self._client.request(method, f"{self._url}/api/v1/{path}", **arguments)
            answer = msgspec.json.decode(response.content)
            if not isinstance(answer, dict):
                raise msgspec.DecodeError
        except (httpx.ConnectError, httpx.ConnectTimeout):
            raise NoDaemon(
                f"no kvscope daemon at {self._url}; start one with `kvscope serve` or point --url to it"
            ) from None
        except httpx.TimeoutException:
            raise DaemonError(f"the daemon at {self._url} did not answer within {TIMEOUT_S:.0f} s") from None
        except httpx.HTTPError as error:
            raise NoDaemon(
                f"no kvscope daemon at {self._url} ({printable(error)}); point --url to one"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise NoDaemon(f"what answers at {self._url} is no kvscope daemon; point --url to one") from None
        if response.is_success:
            return answer
        line = "; ".join(printable(answer[key]) for key in ("error", "hint") if answer.get(key))
        if response.status_code == 300:
            raise lookup.Ambiguous(line, answer.get("matches") or [])
        kinds = {404: lookup.NotFound, 400: UsageError}
        raise kinds.get(response.status_code, DaemonError)(
            line or f"the daemon answered {response.status_code}"
        )


class StoreFile:
    """A store that no daemon holds, or a snapshot, opened to read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = query.open_file(path)

    def requests(self, listing: lookup.Listing) -> list[dict[str, Any]]:
        return lookup.list_requests(self._connection.cursor(), [], listing)

    def request(self, text: str) -> dict[str, Any]:
        return lookup.look_up(self._connection.cursor(), [], text)

    def query(self, name: str, sql: str, parameters: Parameters) -> dict[str, Any]:
        if name:
            sql = query.checked(name, parameters).sql
        return query.result_json(query.run_sql(self._connection.cursor(), sql, parameters))

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def opened(url: str, db: str | None) -> Iterator[Daemon | StoreFile]:
    """The file `db` where one is named, else the daemon at `url`."""
    source = StoreFile(Path(db)) if db else Daemon(url)
    try:
        yield source
    finally:
        source.close()
