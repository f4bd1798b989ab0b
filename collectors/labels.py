"""The windows that people name: /api/v1/labels lists them and takes changes."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from kvscope import labels, schema

if TYPE_CHECKING:
    import duckdb


class Kept(Protocol):
    """What is asked of the daemon, from worker threads."""

    def cursor(self) -> duckdb.DuckDBPyConnection: ...

    def keep(self, table: str, row: tuple[Any, ...]) -> None:
        """Have a row of a kept table stored; returns when it is on disk."""


def endpoint(
    daemon: Kept,
    answer: Callable[[Callable[[], object]], Awaitable[Response]],
    written: Callable[[Callable[[], object]], Awaitable[Response]],
    body: Callable[[Request, type[labels.Change]], Awaitable[labels.Change]],
    changed: Callable[[], None],
) -> Callable[[Request], Awaitable[Response]]:
    """GET lists the windows with their notes; POST makes a change and answers with the list.

    Args:
        answer: JSON of what a function returns in a worker thread.
        written: the same of one that may have to wait for the disk.
        body: reads and validates the body of a request.
        changed: is called after each change.
    """
    lock = threading.Lock()

    def listed() -> object:
        return {"labels": labels.listed(daemon.cursor())}

    def change(wanted: labels.Change) -> object:
        with lock:  # the next change has to see this one
            daemon.keep(schema.LABELS.name, labels.row_of(daemon.cursor(), wanted))
        changed()
        return listed()

    async def serve(request: Request) -> Response:
        if request.method != "POST":
            return await answer(listed)
        wanted = await body(request, labels.Change)
        return await written(lambda: change(wanted))

    return serve
