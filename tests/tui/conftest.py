"""The application on a source that the test steers, driven by keys and mouse."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

import pytest
from textual import _wait
from textual.pilot import Pilot

from kvscope.tui.app import Start, Top
from kvscope.tui.bars import Bar
from kvscope.tui.lines import plain

from . import frames
from .fakes import FakeSource


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Textual's pilot looks every 20 ms whether all is done; 4 ms will do."""
    monkeypatch.setattr(_wait, "SLEEP_GRANULARITY", 1 / 250)
    monkeypatch.setattr(_wait, "SLEEP_IDLE", 1 / 2500)


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Driven(NamedTuple):
    """A running application."""

    app: Top
    pilot: Pilot[None]
    source: FakeSource
    clock: Clock

    async def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Wait until the condition holds, which must be soon."""
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, what or "it did not happen"
            await self.pilot.pause(0.01)
        await self.pilot.pause()

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def later(self, seconds: float) -> None:
        """As if so much time had passed."""
        self.clock.now += seconds
        self.app._tick()
        await self.pilot.pause()

    def bar(self, name: str) -> str:
        """What the header, the tabs or the footer say."""
        return "\n".join(plain(line) for line in self.app.query_one(f"#{name}", Bar).lines)

    @property
    def screen(self) -> str:
        """All text on the screen."""
        strips = self.app.screen._compositor.render_strips()
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in strips)


@contextlib.asynccontextmanager
async def driving(
    *sent: Any,
    size: tuple[int, int] = (100, 30),
    source: FakeSource | None = None,
    notices: bool = False,
    **start: Any,
) -> AsyncIterator[Driven]:
    """`kvscope top` on a source that sends these frames."""
    source = source or FakeSource(*(sent or (frames.frame(),)))
    clock = Clock()
    fields = {"source": source, "name": "http://127.0.0.1:9177", **start}
    app = Top(Start(**fields), clock=clock, wall_ns=lambda: frames.NOW)
    try:
        async with app.run_test(size=size, notifications=notices) as pilot:
            driven = Driven(app, pilot, source, clock)
            await pilot.pause()
            if source.fails is None and not isinstance(next(iter(sent), None), Exception):
                await driven.until(lambda: app.view.frame is not None, "no frame came")
            yield driven
            assert not app.faults
    finally:
        source.close()
        app.close_feeds()
