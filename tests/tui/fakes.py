"""A source of frames that tests steer: what it answers, when it fails, and what it was asked."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

from kvscope.frame import Answer, Frame, Scope

from . import frames


class FakeSource:
    """Both a daemon and a store file: frames are what the test says they are."""

    def __init__(self, *sent: Frame) -> None:
        self.changed = threading.Condition()
        self.queue: list[Frame | Exception] = list(sent)
        """What streams give next; an exception breaks the stream."""
        self.scopes: list[Scope] = []
        """Of every stream and frame asked for."""
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        """Every question."""
        self.answers: dict[str, Answer | Exception] = {}
        self.looked_up: list[str] = []
        """Every request asked for."""
        self.details: dict[str, dict[str, Any] | Exception] = {}
        self.fails: Exception | None = None
        """What every frame asked for raises."""
        self.extent = (frames.NOW - 3600 * frames.S, frames.NOW)
        self.closed = False
        self.streams_ended = 0

    def send(self, *what: Frame | Exception) -> None:
        with self.changed:
            self.queue += what
            self.changed.notify_all()

    def stream(self, scope: Scope, refresh_s: float) -> Iterator[Frame]:
        mine = len(self.scopes)
        self.scopes.append(scope)
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.queue or self.closed or len(self.scopes) > mine + 1)
                if self.closed or len(self.scopes) > mine + 1:
                    return
                found = self.queue.pop(0)
            if isinstance(found, Exception):
                raise found
            yield found

    def end_streams(self) -> None:
        self.streams_ended += 1

    def frame(self, scope: Scope) -> Frame:
        self.scopes.append(scope)
        if self.fails is not None:
            raise self.fails
        at_ns = int(scope.at) if scope.at.isdigit() else self.extent[1]
        return frames.frame(live=False, at_ns=at_ns, where=list(scope.where))

    def query(self, name: str, sql: str, parameters: dict[str, Any]) -> dict[str, Any]:
        self.asked.append((name, sql, dict(parameters)))
        if not name:
            return {"columns": [{"name": "first"}, {"name": "last"}], "rows": [list(self.extent)]}
        found = self.answers.get(name) or frames.answers().get(name) or Answer([], [])
        if isinstance(found, Exception):
            raise found
        return {"columns": [{"name": column} for column in found.columns], "rows": found.rows}

    def request(self, text: str) -> dict[str, Any]:
        self.looked_up.append(text)
        found = self.details.get(text) or {"request": {"id": text, "in_flight": False}}
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        with self.changed:
            self.closed = True
            self.changed.notify_all()
