"""Exports stored requests as traces over OTLP/HTTP, where the setting `otlp_endpoint` names a receiver.

Requests come from the thread that stores them and wait in a bounded queue; a thread of its own sends them in
batches with the OpenTelemetry SDK's exporter. What the receiver does not take is sent again a few times, then
given up and counted, as is what finds no room. Collecting waits for none of it. What is not sent when the
daemon ends is lost to the receiver and still in the store.

Credentials, certificates, compression and time-out come from the SDK's own variables
(OTEL_EXPORTER_OTLP_HEADERS and its like).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol
from urllib.parse import urlsplit, urlunsplit

from kvscope import schema, spans
from kvscope.errors import UsageError
from kvscope.spans import Link, Span
from kvscope.text import printable

logger = logging.getLogger(__name__)

Row = tuple[Any, ...]

TRACES_PATH = "/v1/traces"
"""Of a receiver's address without a path."""
QUEUE_REQUESTS = 4096
BATCH_REQUESTS = 64
"""About 1,500 spans and 1 MB."""
LINGER_S = 1.0
ATTEMPTS = 5
BACKOFF_S, MAX_BACKOFF_S = 1.0, 30.0
FLUSH_S = 3.0
"""What sending the rest may take at the end, the receiver answering."""
CLOSE_S = 0.2
"""What the thread gets to end once it can send no more."""
CPU_SHARE = 0.25
"""Part of a core that telling traces may take: beyond it collecting would wait for the interpreter."""
REMEMBERED_SESSIONS = 20_000
_COLUMNS = tuple(column.name for column in schema.REQUESTS.columns)


class NotTaken(Exception):
    """Why a batch was not taken."""

    def __init__(self, reason: str, again: bool) -> None:
        super().__init__(reason)
        self.again = again
        """Whether trying again may help."""


class Sender(Protocol):
    """Brings spans to a receiver."""

    def send(self, batch: Sequence[Span]) -> None:
        """Raises:
        NotTaken: the receiver did not take them.
        """

    def close(self) -> None:
        """End waiting; from any thread."""


class Exporter:
    """A bounded queue of requests and the thread that sends them.

    Args:
        sender: used by the thread alone, but for its `close`.
        backoff_s: the first pause after a failure; the next are twice as long each.
        linger_s: how long a batch waits to become full.
    """

    def __init__(
        self, endpoint: str, sender: Sender, backoff_s: float = BACKOFF_S, linger_s: float = LINGER_S
    ) -> None:
        self.endpoint = endpoint
        self._sender = sender
        self._backoff_s = backoff_s
        self._linger_s = linger_s
        self._sessions: OrderedDict[int, tuple[int, Link]] = OrderedDict()
        """By session: its last turn that was told of."""
        self._changed = threading.Condition()
        # Guarded by _changed.
        self._queue: deque[Row] = deque()
        self._sending = 0
        self._sent = self._lost = 0
        self._error = ""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvscope-otlp", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, rows: Iterable[Row]) -> None:
        """Queue rows of `requests`; never waits. What finds no room is counted."""
        with self._changed:
            for row in rows:
                if len(self._queue) < QUEUE_REQUESTS and not self._stopping:
                    self._queue.append(row)
                else:
                    self._lost += 1
            self._changed.notify_all()

    def stop(self, deadline_s: float = FLUSH_S) -> bool:
        """Send what is queued if the receiver takes it, give up after the deadline.

        Returns:
            Whether nothing was lost at the end.
        """
        with self._changed:
            hopeless = self._stopping or bool(self._error)
            self._stopping = True
            self._changed.notify_all()
        if self._thread.ident is not None and not hopeless:
            self._thread.join(min(deadline_s, FLUSH_S))
        self._sender.close()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        with self._changed:
            left = len(self._queue) + self._sending
            self._queue.clear()
            self._lost += left
            self._sending = 0
        if left:
            logger.warning("%d requests were not exported to %s; the store has them", left, self.endpoint)
        return not left

    def status(self) -> dict[str, Any]:
        """Counts of requests, and why nothing can be sent now."""
        with self._changed:
            return {
                "endpoint": self.endpoint,
                "queued": len(self._queue) + self._sending,
                "queue_limit": QUEUE_REQUESTS,
                "exported": self._sent,
                "lost": self._lost,
                "error": self._error,
            }

    def problems(self) -> list[str]:
        """What an operator should know, one line each."""
        status = self.status()
        found = []
        if status["error"]:
            found.append(f"no traces get to {self.endpoint}: {status['error']}")
        if status["lost"]:
            found.append(f"NOT EXPORTED: {status['lost']} requests to {self.endpoint}; the store has them")
        return found

    # --- the thread ---

    def _run(self) -> None:
        while (rows := self._next()) is not None:
            began = time.thread_time()
            batch, untold = self._tell(rows)
            taken = self._deliver(batch)
            with self._changed:
                if self._sending:  # else it was counted at the end
                    self._sent += len(rows) - untold if taken else 0
                    self._lost += untold if taken else len(rows)
                    self._sending = 0
                busy_s = time.thread_time() - began
                self._changed.wait_for(lambda: self._stopping, busy_s * (1 / CPU_SHARE - 1))

    def _next(self) -> list[Row] | None:
        """The next batch; None to end."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._stopping)
            if self._stopping and (not self._queue or self._error):
                return None
            self._changed.wait_for(
                lambda: len(self._queue) >= BATCH_REQUESTS or self._stopping, self._linger_s
            )
            rows = [self._queue.popleft() for _ in range(min(BATCH_REQUESTS, len(self._queue)))]
            self._sending = len(rows)
            return rows

    def _tell(self, rows: Iterable[Row]) -> tuple[list[Span], int]:
        """The spans of these requests, and how many requests can't be told."""
        batch: list[Span] = []
        untold = 0
        for values in rows:
            row = dict(zip(_COLUMNS, values, strict=True))
            try:
                made = spans.of_request(row, self._previous(row))
            except Exception as error:
                # Rings are untrusted: one request must not take the others with it.
                logger.debug("a request can't be told as a trace: %s: %s", type(error).__name__, error)
                made = []
            untold += not made
            batch += made
        return batch, untold

    def _previous(self, row: dict[str, Any]) -> Link | None:
        """The turn before this one, where it was told of; remembers this one."""
        session, turn = row["session"] or row["id"], row["turn"] or 1
        before = self._sessions.pop(session, None)
        self._sessions[session] = (turn, spans.root_link(row))
        if len(self._sessions) > REMEMBERED_SESSIONS:
            self._sessions.popitem(last=False)
        return before[1] if before is not None and before[0] == turn - 1 else None

    def _deliver(self, batch: Sequence[Span]) -> bool:
        """Send, however many tries it takes within reason; whether the receiver took it."""
        for attempt in range(ATTEMPTS):
            try:
                if batch:
                    self._sender.send(batch)
            except NotTaken as problem:
                self._failed(str(problem))
                last = not problem.again or attempt + 1 == ATTEMPTS
                with self._changed:
                    pause_s = min(self._backoff_s * 2**attempt, MAX_BACKOFF_S)
                    if last or self._stopping or self._changed.wait_for(lambda: self._stopping, pause_s):
                        return False
                continue
            self._failed("")
            return True
        return False

    def _failed(self, reason: str) -> None:
        with self._changed:
            if reason != self._error:
                if reason:
                    logger.warning("no traces get to %s: %s", self.endpoint, reason)
                else:
                    logger.warning("traces get to %s again", self.endpoint)
            self._error = reason


def make_exporter(endpoint: str) -> Exporter | None:
    """The exporter to a receiver at this address; None where none is named.

    Raises:
        UsageError: OpenTelemetry is not installed.
    """
    if not endpoint:
        return None
    parts = urlsplit(endpoint)
    url = urlunsplit(parts._replace(path=TRACES_PATH)) if parts.path in ("", "/") else endpoint
    try:
        from kvscope.collectors.otlp_sdk import SdkSender
    except ImportError as error:
        raise UsageError(
            f"otlp_endpoint needs OpenTelemetry ({printable(error)}); pip install 'kvscope[otlp]'"
        ) from None
    return Exporter(url, SdkSender(url))
