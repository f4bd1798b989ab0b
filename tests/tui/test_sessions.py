"""The sessions page: whether later turns reuse KV that D has kept, and why not."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from textual.app import App, ComposeResult

from kvscope.frame import Answer
from kvscope.tui.lines import plain, width
from kvscope.tui.page import FilterBy, LinesView
from kvscope.tui.pages import sessions
from kvscope.tui.table import LiveTable
from kvscope.tui.view import View

from . import frames

NOTHING = Answer([], [])
ID = "9223372036854775811"


def session(**changes: Any) -> dict[str, Any]:
    """A row of `sessions`: four turns, three of them with a handle."""
    return {
        "session": ID,
        "label": "",
        "model": "tiny",
        "p_engine": frames.P,
        "d_engine": frames.D,
        "turns": 4,
        "first_at": "2027-01-15 07:50:00",
        "last_at": "2027-01-15 07:59:30",
        "last_id": "9223372036854775899",
        "prompt_tokens": 2048,
        "reuse_offered_tokens": 3000,
        "reuse_pulled_tokens": 2000,
        "recomputed_tokens": 16,
        "outcomes": "pulled 2, expired 1",
        "p50_pause_ms": 3400.0,
        "max_pause_ms": 90_000.0,
        "ttl_ms": 480_000.0,
        "p50_ttft_ms": 120.5,
        **changes,
    }


def reuse(outcome: str, requests: int, offered: int = 1000, pulled: int = 0) -> dict[str, Any]:
    """A row of `reuse`."""
    return {
        "reuse_outcome": outcome,
        "p_engine": frames.P,
        "requests": requests,
        "offered_tokens": offered,
        "pulled_tokens": pulled,
    }


def outcome(requests: int, connector: str = "bidirectional") -> dict[str, Any]:
    """A row of `outcomes`."""
    return {"connector": connector, "outcome": "finished", "requests": requests}


REUSE = frames.answer(
    reuse("pulled", 60, 60_000, 60_000), reuse("expired", 15, 15_000), reuse("metadata missing", 5, 5_000)
)


def found(*rows: dict[str, Any]) -> list[sessions.Session]:
    return sessions.sessions(frames.answer(*rows or (session(),)))


def summary(
    rows: list[sessions.Session], reused: Answer = REUSE, outcomes: Answer | None = None, cells: int = 160
) -> str:
    outcomes = outcomes or frames.answer(outcome(100), outcome(50, "push"))
    return "\n".join(plain(line) for line in sessions.summary(rows, reused, outcomes, cells))


def cells(row: dict[str, Any]) -> dict[str, str]:
    shown = {}
    for column in sessions.columns():
        made = column.cell(found(row)[0], column.width or 40)
        shown[column.name] = made if isinstance(made, str) else plain(made)
    return shown


def test_a_row_has_the_answers_figures() -> None:
    assert cells(session()) == {
        "session": "…54775811",
        "last": "07:59:30",
        "turns": "4",
        "prompt": "2048",
        "offered": "3000",
        "pulled": "2000",
        "recomputed": "16",
        "outcomes": "pulled 2, expired 1",
        "pause": "3.4 s",
        "longest": "90.0 s",
        "ttl": "8 min",
        "ttft": "120.5",
        "pair": f"{frames.P} → {frames.D}",
    }


def test_what_was_not_observed_is_no_zero() -> None:
    shown = cells(session(p50_pause_ms=None, max_pause_ms=None, ttl_ms=None, p50_ttft_ms=None))
    assert [shown[name] for name in ("pause", "longest", "ttl", "ttft")] == ["–"] * 4


def test_a_pause_longer_than_the_lease_is_marked_and_counted() -> None:
    late = session(max_pause_ms=481_000.0)
    assert cells(late)["longest"] == "8 min!"
    assert "1 session was silent for longer than D keeps its KV" in summary(found(late, session()))
    assert "silent" not in summary(found())
    assert "silent" not in summary(found(session(max_pause_ms=10**9, ttl_ms=None))), "the lease is not known"


def test_the_summary_says_how_many_handles_hit_missed_or_were_absent() -> None:
    """vllm#40186."""
    text = summary(found())
    assert "60 hit (75 %)  20 missed (25 %)  20 requests brought none" in text
    assert "15 expired (D keeps them too short), 5 metadata missing (the router drops" in text
    assert "80000 offered, 60000 read back (75 %)" in text


def test_no_handle_at_all_points_at_a_streaming_router() -> None:
    text = summary([], NOTHING)
    assert "100 bidirectional requests came without a handle" in text
    assert "streams" in text
    assert "kv_transfer_params" in text


def test_without_bidirectional_requests_it_says_how_to_switch_it_on() -> None:
    text = summary([], NOTHING, frames.answer(outcome(50, "push")))
    assert "No request was bidirectional" in text
    assert "bidirectional_kv_xfer" in text


@pytest.mark.parametrize("width_", [80, 100, 160, 240])
def test_no_line_is_wider_than_the_screen(width_: int) -> None:
    late = found(session(max_pause_ms=10**9))
    many = frames.answer(reuse("failed", 10**7, 10**12), reuse("evil\x1b[31m\nx", 10**7), reuse("pulled", 1))
    for reused in (many, NOTHING):
        for rows in (late, []):
            lines = sessions.summary(rows, reused, frames.answer(outcome(10**9)), width_)
            assert all(width(line) <= width_ and plain(line).isprintable() for line in lines)


class OnePage(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.page = sessions.SessionsPage()
        self.view = View(clock=lambda: 0.0)
        self.view.apply(frames.frame())
        self.asked: list[tuple[tuple[str, ...], str]] = []

    def compose(self) -> ComposeResult:
        yield self.page

    def on_mount(self) -> None:
        self.page.show(self.view)
        self.page.came_into_sight()

    def on_filter_by(self, message: FilterBy) -> None:
        self.asked.append((message.filters, message.page))

    def told(self, *rows: dict[str, Any]) -> None:
        self.view.told("sessions", frames.answer(*rows))
        self.view.told("reuse", REUSE)
        self.view.told("outcomes", frames.answer(outcome(100)))
        self.page.show(self.view)


def test_enter_shows_the_requests_of_the_session_opened_from_elsewhere() -> None:
    async def run() -> None:
        app = OnePage()
        async with app.run_test(size=(80, 24)) as pilot:
            app.view.session = "3"
            app.told(*(session(session=str(number)) for number in range(40)))
            await pilot.pause()
            assert app.page.chosen_session() == "3"
            assert "60 hit" in plain(app.query_one(LinesView).lines[0])
            shown = app.query_one(LiveTable).shown_columns
            assert {"session", "turns", "pulled", "outcomes", "longest", "ttl"} <= set(shown)
            await pilot.press("down", "enter")
            await pilot.pause()
            app.told(*(session(session=str(number)) for number in range(40)))
            assert app.page.chosen_session() == "4", "it stays where the user went"
        assert app.asked == [(("session=4",), "2")]

    asyncio.run(run())


def test_a_question_that_was_not_answered_says_why() -> None:
    async def run() -> None:
        app = OnePage()
        async with app.run_test(size=(80, 24)):
            assert "asking" in plain(app.query_one(LinesView).lines[0])
            app.view.not_told("sessions", "took longer than 10 s")
            app.page.show(app.view)
            assert "took longer" in plain(app.query_one(LinesView).lines[0])

    asyncio.run(run())


def test_handles_that_missed_are_named_with_the_reason_of_most() -> None:
    (note,) = sessions.notes(REUSE)
    assert (note.kind, note.text) == ("KV handles missed", "20 of 80, mostly expired")
    assert sessions.notes(frames.answer(reuse("pulled", 60))) == []
    assert sessions.notes(None) == []


def test_figures_that_could_not_be_renewed_say_so() -> None:
    async def run() -> None:
        app = OnePage()
        async with app.run_test(size=(80, 24)):
            app.told(session())
            app.view.not_told("reuse", "it took too long")
            app.page.show(app.view)
            shown = "\n".join(map(plain, app.query_one(LinesView).lines))
            assert "These figures are older: it took too long" in shown
            assert "60 hit" in shown

    asyncio.run(run())
