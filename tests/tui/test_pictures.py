"""A few whole screens, compared with pictures of them: what no other test pins is how they look.

Where a change is meant: `pytest tests/tui/test_pictures.py --snapshot-update`, and look at the new pictures.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from textual.pilot import Pilot

from kvscope.tui.app import Start, Top
from kvscope.tui.view import State

from . import frames
from .conftest import Clock
from .fakes import FakeSource
from .test_app import NO_DAEMON

Compare = Callable[..., bool]


@pytest.fixture
def source() -> Iterator[FakeSource]:
    made = FakeSource(frames.frame(problems=["LOST 12 events (0.2 %, 0 of them torn) of prefill-0"]))
    yield made
    made.close()


def top(source: FakeSource) -> Top:
    start = Start(source=source, name="http://127.0.0.1:9177")
    return Top(start, clock=Clock(), wall_ns=lambda: frames.NOW)


async def until(pilot: Pilot[Any], condition: Callable[[Top], object]) -> None:
    deadline = time.monotonic() + 10
    while not condition(pilot.app):  # type: ignore[arg-type]
        assert time.monotonic() < deadline
        await pilot.pause(0.01)
    await pilot.pause()


async def with_figures(pilot: Pilot[Any]) -> None:
    await until(pilot, lambda app: app.view.frame)


def test_fleet(snap_compare: Compare, source: FakeSource) -> None:
    assert snap_compare(top(source), terminal_size=(120, 36), run_before=with_figures)


def test_requests(snap_compare: Compare, source: FakeSource) -> None:
    async def show(pilot: Pilot[Any]) -> None:
        await with_figures(pilot)
        await pilot.press("2", "down")

    assert snap_compare(top(source), terminal_size=(120, 36), run_before=show)


def test_daemon_lost_on_a_small_screen_without_colour(
    snap_compare: Compare, source: FakeSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")

    async def show(pilot: Pilot[Any]) -> None:
        await with_figures(pilot)
        source.send(*[NO_DAEMON] * 50)
        await until(pilot, lambda app: app.view.state is State.LOST)

    assert snap_compare(top(source), terminal_size=(80, 24), run_before=show)
