"""Frames over HTTP as they come: one JSON document a line, until the viewer goes or the daemon stops."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

import anyio
import anyio.to_thread
import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from kvscope.errors import KvscopeError

logger = logging.getLogger(__name__)

T = TypeVar("T")

NDJSON = "application/x-ndjson"
SEND_S = 60.0
"""A viewer that takes in nothing for so long is let go."""
GOODBYE_S = 0.5
"""What the end of the answer may take."""


class Lines(Protocol):
    """What a viewer is sent."""

    def next_line(self) -> bytes: ...

    def close(self) -> None: ...


class Viewers:
    """Those connected, so that all can be told to go."""

    def __init__(self) -> None:
        self._ends: set[Callable[[], None]] = set()
        self._ended = False

    @contextmanager
    def joined(self) -> Iterator[anyio.Event]:
        """An event that is set when all are to go."""
        loop, event = asyncio.get_running_loop(), anyio.Event()

        def end() -> None:
            loop.call_soon_threadsafe(event.set)

        self._ends.add(end)
        if self._ended:
            event.set()
        try:
            yield event
        finally:
            self._ends.discard(end)

    def end(self) -> None:
        """From any thread."""
        self._ended = True
        for end in list(self._ends):
            end()


class Frames(Response):
    """The answer that goes on. Lines are made in worker threads."""

    media_type = NDJSON

    def __init__(self, lines: Lines, first: bytes, refresh_s: float, viewers: Viewers) -> None:
        super().__init__(
            headers={"cache-control": "no-store", "x-content-type-options": "nosniff"}, media_type=NDJSON
        )
        del self.headers["content-length"]
        self._lines = lines
        self._first = first
        self._refresh_s = refresh_s
        self._viewers = viewers

    @classmethod
    async def start(cls, lines: Lines, refresh_s: float, viewers: Viewers) -> Frames:
        """Make the first line, so that what is wrong with it can be told as an ordinary error.

        Raises:
            KvscopeError: as `next_line`.
        """
        try:
            return cls(lines, await in_thread(lines.next_line, abandon=True), refresh_s, viewers)
        except BaseException:
            lines.close()
            raise

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = False

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = True
            tasks.cancel_scope.cancel()

        async def wait(ended: anyio.Event) -> None:
            await ended.wait()
            tasks.cancel_scope.cancel()

        try:
            with self._viewers.joined() as ended:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(watch)
                    tasks.start_soon(wait, ended)
                    await self._send_lines(send)
                    tasks.cancel_scope.cancel()
            if not gone:
                with anyio.move_on_after(GOODBYE_S):
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._lines.close()

    async def _send_lines(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        line, due = self._first, anyio.current_time()
        while True:
            with anyio.move_on_after(SEND_S) as sending:
                await send({"type": "http.response.body", "body": line, "more_body": True})
            if sending.cancelled_caught:
                return
            due = max(due + self._refresh_s, anyio.current_time())
            await anyio.sleep_until(due)
            try:
                line = await in_thread(self._lines.next_line, abandon=True)
            except (KvscopeError, HTTPException) as error:
                text, _, hint = (error.detail if isinstance(error, HTTPException) else str(error)).partition(
                    "; "
                )
                body = msgspec.json.encode({"error": text, "hint": hint}) + b"\n"
                await send({"type": "http.response.body", "body": body, "more_body": True})
                return


async def in_thread(
    work: Callable[[], T], limiter: anyio.CapacityLimiter | None = None, abandon: bool = False
) -> T:
    """What `work` returns in a worker thread. With `abandon` a cancelled answer does not wait for it.

    Raises:
        KvscopeError: as `work`.
        HTTPException: it failed in another way, which is in the log.
    """
    try:
        return await anyio.to_thread.run_sync(work, limiter=limiter, abandon_on_cancel=abandon)
    except KvscopeError:
        raise
    except Exception as error:
        logger.exception("an answer could not be made")
        raise HTTPException(500, f"a fault in the daemon ({type(error).__name__}); see its log") from None
