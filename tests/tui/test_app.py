"""The application: every key, and every state that it can be in, as a user would see them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from textual.widgets import Input

from kvscope.client import NoDaemon
from kvscope.errors import KvscopeError
from kvscope.frame import Answer, Frame, Scope
from kvscope.lookup import NotFound
from kvscope.tui.app import PAGES, Top
from kvscope.tui.bars import Bar, FilterInput, TextScreen, joined_filters, split_filters
from kvscope.tui.help import KEYS, help_lines
from kvscope.tui.lines import plain, width
from kvscope.tui.page import FilterBy, GoTo, LinesView, OpenSession
from kvscope.tui.scrolled import Scrolled
from kvscope.tui.table import LiveTable
from kvscope.tui.view import Detail, State
from kvscope.windows import Window

from . import frames
from .conftest import Driven, driving
from .fakes import FakeSource
from .frames import MS, NOW, WINDOW, S

pytestmark = pytest.mark.anyio

NO_DAEMON = NoDaemon("no kvscope daemon at http://127.0.0.1:9177; start one with `kvscope serve`")


WELL: dict[str, Any] = {"in_flight": [frames.in_flight(1001)], "answers": frames.answers(not_finished=0)}
"""Of a frame of a fleet that nothing is wrong with."""


def table(top: Driven) -> LiveTable[Any]:
    found = top.app.page.table()
    assert found is not None
    return found


def notice(top: Driven) -> str:
    """The last line that was said."""
    return ([""] + [note.message for note in top.app._notifications])[-1]


def page_styles(top: Driven) -> list[Any]:
    """Of the rows of the page's table."""
    table_lines = table(top).render_lines(table(top).size.region)
    return [segment.style for strip in table_lines for segment in strip if segment.text.strip()]


def overlay(top: Driven) -> str:
    return "\n".join(plain(line) for line in top.app.screen.query_one(LinesView).lines)


# --- pages -------------------------------------------------------------------------------------------


async def test_the_first_screen_is_the_fleet_and_says_whether_it_is_coordination() -> None:
    async with driving(frames.frame(**WELL)) as top:
        assert top.app.page.title == "Fleet"
        assert top.app.view.state is State.LIVE
        assert top.bar("header").splitlines()[0].split()[:5] == ["LIVE", "5m", "to", "08:00:00", "UTC"]
        assert "nothing is lost, missing or broken" in top.bar("header")
        assert "coordination" in top.screen


async def test_digits_and_tab_show_the_pages() -> None:
    async with driving() as top:
        for page in PAGES:
            await top.press(page.key)
            assert type(top.app.page) is page
            assert [shown for shown in top.app._pages.values() if shown.display] == [top.app.page]
        await top.press("tab")
        assert top.app.page.key == "1"
        await top.press("shift+tab")
        assert top.app.page.key == "7"


async def test_a_click_on_a_tab_shows_its_page() -> None:
    async with driving() as top:
        at = top.bar("tabs").index("Engines")
        await top.pilot.click("#tabs", offset=(at, 0))
        assert top.app.page.title == "Engines"


async def test_enter_opens_a_request_and_escape_goes_back() -> None:
    async with driving() as top:
        await top.press("2", "down", "down")
        chosen = table(top).cursor_row.id
        await top.press("enter")
        assert (top.app.page.title, top.app.view.chosen) == ("Request", chosen)
        await top.until(lambda: top.app.view.detail)
        assert top.app.view.detail.id == chosen
        await top.press("escape")
        assert top.app.page.title == "Requests"
        assert table(top).cursor_row.id == chosen
        await top.press("escape")
        assert top.app.page.title == "Fleet"


async def test_questions_of_a_page_are_asked_while_it_is_in_sight() -> None:
    async with driving() as top:
        await top.press("2")
        assert top.app.page.questions == ()
        top.source.answers["pairs"] = Answer(["p_engine", "d_engine"], [["prefill-0", "decode-0"]])
        await top.press("6")
        wanted = set(top.app.page.questions)
        await top.until(lambda: all(top.app.view.answer(name) for name in wanted))
        assert top.app.view.rows("pairs")


async def test_a_table_that_was_gone_for_a_while_takes_keys_again() -> None:
    pairs = Answer(["p_engine", "d_engine"], [["prefill-0", "decode-0"], ["prefill-0", "decode-1"]])
    async with driving() as top:
        top.source.answers["pairs"] = pairs
        await top.press("6")
        await top.until(lambda: table(top).display)
        for number, found in enumerate((Answer(pairs.columns, []), pairs), 1):
            top.source.answers["pairs"] = found
            top.source.send(frames.frame(whole=False, at_ns=NOW + number * S))
            await top.until(lambda found=found: table(top).display is bool(found.rows))
        await top.press("down")
        assert table(top).cursor == 1


async def test_a_page_can_lead_to_another_with_a_filter_and_escape_takes_both_back() -> None:
    async with driving() as top:
        top.app.post_message(FilterBy("p_engine=prefill-0", "d_engine=decode-0", page="2"))
        await top.until(lambda: top.app.page.key == "2")
        assert top.app.view.filters == ("p_engine=prefill-0", "d_engine=decode-0")
        top.app.post_message(FilterBy("d_engine=decode-1"))
        await top.until(lambda: top.app.view.filters == ("p_engine=prefill-0", "d_engine=decode-1"))
        await top.press("escape", "escape")
        assert (top.app.page.key, top.app.view.filters) == ("1", ())
        top.app.post_message(GoTo("5"))
        await top.until(lambda: top.app.page.key == "5")


# --- what is wrong is in sight -------------------------------------------------------------------------


async def test_what_is_wrong_is_counted_gravest_first_on_every_page() -> None:
    wrong = {"problems": ["LOST 12 events of prefill-0", "HOOK MISSING: x"], "findings": [frames.FINDING]}
    async with driving(frames.frame(**WELL, **wrong), size=(80, 24)) as top:
        for page in PAGES:
            await top.press(page.key)
            header = top.bar("header").splitlines()
            assert len(header) == 2
            assert header[1] == " ! LOST 12 events of prefill-0 (+2 more: !)"
        await top.press("exclamation_mark")
        assert isinstance(top.app.screen, TextScreen)
        text = overlay(top)
        assert text.index("LOST 12") < text.index("HOOK MISSING") < text.index("2 requests wait for decode-1")
        assert "restart decode-1" in text
        await top.press("escape")
        assert not isinstance(top.app.screen, TextScreen)
        await top.pilot.click("#header", offset=(10, 1))
        assert isinstance(top.app.screen, TextScreen)


async def test_engines_without_instrumentation_and_requests_not_joined_are_told_and_what_to_do() -> None:
    found = frames.answers(peer_not_instrumented=7, not_joined=2, not_finished=0)
    async with driving(frames.frame(**{**WELL, "answers": found})) as top:
        assert "! 2 not joined (+1 more: !)" in top.bar("header")
        await top.press("exclamation_mark")
        text = " ".join(overlay(top).split())
        assert "2 not joined Their other half was not found. Is the other engine instrumented" in text
        assert "restarted" in text
        assert "7 peer not instrumented Start that engine with kvscope too" in text


async def test_requests_that_are_stuck_or_went_wrong_are_in_the_header_of_every_page() -> None:
    stuck = [frames.in_flight(number, "readiness.signal", 300 * S) for number in range(1, 21)]
    wrong = frames.answers(not_finished=9, read_after_expiry=3, recomputed=2)
    async with driving(frames.frame(in_flight=stuck, recent=[], answers=wrong), size=(80, 24)) as top:
        for page in PAGES:
            await top.press(page.key)
            assert "! 20 STUCK, " in top.bar("header")
            assert "in readiness.signal (+3 more: !)" in top.bar("header")
        await top.press("exclamation_mark")
        for words in ("9 not finished", "3 read after expiry", "2 recomputed"):
            assert words in overlay(top)


async def test_control_characters_of_a_daemon_do_not_reach_the_terminal() -> None:
    odd = {"problems": ["LOST \x1b[2J"], "labels": {"a\x1b": 1, "b": 2}, "label": "a\x1b"}
    async with driving(frames.frame(**odd)) as top:
        assert "\x1b" not in top.screen
        assert "LOST \ufffd[2J" in top.bar("header")
        await top.press("exclamation_mark")
        assert "\x1b" not in top.screen


# --- states ----------------------------------------------------------------------------------------------


async def test_without_a_daemon_it_says_what_to_do_and_begins_when_one_answers() -> None:
    async with driving(NO_DAEMON) as top:
        await top.until(lambda: top.app.view.state is State.LOST)
        assert "NO DAEMON" in top.bar("header")
        assert "kvscope serve" in top.screen
        assert "kvscope top --url" in top.screen
        top.source.send(frames.frame())
        await top.until(lambda: top.app.view.state is State.LIVE)
        assert "kvscope top --url" not in top.screen
        assert "coordination" in top.screen


async def test_a_daemon_that_goes_keeps_the_figures_says_since_when_and_recovers() -> None:
    async with driving(frames.frame()) as top:
        await top.press("2")
        top.source.send(*[NO_DAEMON] * 50)
        await top.until(lambda: top.app.view.state is State.LOST)
        await top.later(75)
        first, second = top.bar("header").splitlines()
        assert "NO DAEMON" in first
        assert "last figures 08:00:00 UTC, 75.0 s ago" in first
        assert "http://127.0.0.1:9177" in second
        assert len(table(top).rows) == 23
        assert all(style.dim for style in page_styles(top)), "stale figures are dim"
        top.source.queue.clear()
        top.source.send(frames.frame(at_ns=NOW + 80 * S))
        await top.until(lambda: top.app.view.state is State.LIVE)
        assert "08:01:20" in top.bar("header")
        assert not all(style.dim for style in page_styles(top))


async def test_figures_that_lag_behind_are_said_to_be_old() -> None:
    async with driving(frames.frame(figures_at_ns=NOW - 20 * S)) as top:
        assert "LIVE   5m to 07:59:40 UTC  figures 20 s old" in top.bar("header")
        top.source.send(frames.frame(whole=False, at_ns=NOW + S, figures_at_ns=NOW))
        await top.until(lambda: "figures" not in top.bar("header"))


async def test_frames_that_stop_coming_are_marked_stale_and_the_next_one_mends_it() -> None:
    async with driving(frames.frame()) as top:
        await top.later(2)
        assert "LIVE" in top.bar("header")
        await top.later(12)
        assert top.app.view.state is State.STALE
        assert "STALE" in top.bar("header")
        assert "last figures 08:00:00 UTC, 14.0 s ago" in top.bar("header")
        assert "coordination" in top.screen
        top.source.send(frames.frame(whole=False, at_ns=NOW + 14 * S))
        await top.until(lambda: top.app.view.state is State.LIVE)


async def test_an_old_daemon_is_told_apart_from_none() -> None:
    async with driving(*[NotFound("no such page")] * 50) as top:
        await top.until(lambda: top.app.view.state is State.OLD)
        assert "OTHER VERSION" in top.bar("header")
        assert "kvscope status" in top.screen


async def test_a_daemon_that_complains_is_quoted() -> None:
    async with driving(*[KvscopeError("the query was stopped after 10.0 s")] * 50) as top:
        await top.until(lambda: top.app.view.state is State.FAILED)
        assert "the query was stopped after 10.0 s" in top.screen


async def test_without_an_instrumented_engine_the_two_steps_are_shown() -> None:
    async with driving(frames.empty(), size=(80, 24)) as top:
        assert top.app.view.state is State.EMPTY
        for words in ("pip install --no-deps kvscope", "kv_connector_module_path", "KVSCOPE_ENABLE=1"):
            assert words in top.screen
        top.source.send(frames.frame())
        await top.until(lambda: top.app.view.state is State.LIVE)
        assert "kv_connector_module_path" not in top.screen
        assert top.app.focused is not None


async def test_windows_that_people_named_are_in_the_header() -> None:
    named = [Window("outage\x1b[2J", "incident", frames.NOW - frames.S, None)]
    async with driving(frames.frame(windows=named)) as top:
        assert "incident outage\ufffd[2J" in top.bar("header")


async def test_engines_without_requests_and_a_filter_that_nothing_fits_are_said() -> None:
    async with driving(frames.empty(engines=frames.ENGINES)) as top:
        assert "no request in this time" in top.bar("header")
        await top.press("5")
        assert "prefill-0" in top.screen
        top.app.view.filters = ("connector=pull",)
        await top.later(0)
        assert "no request fits the filter" in top.bar("header")


async def test_paused_nothing_changes_until_it_goes_on() -> None:
    async with driving(frames.frame()) as top:
        await top.press("2", "p")
        assert top.app.view.state is State.PAUSED
        rung = top.app._box._rung
        new = frames.frame(whole=False, at_ns=NOW + 9 * S, in_flight=[], recent=[frames.request(99)])
        top.source.send(new)
        await top.until(lambda: top.app._box._mail.frame is not None, f"no mail, {rung}")
        await top.later(9)
        assert "PAUSED" in top.bar("header")
        assert len(table(top).rows) == 23
        await top.press("p")
        assert top.app.view.state is State.LIVE
        assert len(table(top).rows) == 24
        assert "08:00:09" in top.bar("header")


async def test_paused_the_questions_of_a_page_are_answered_once_for_the_moment_that_is_shown() -> None:
    def asked(top: Driven) -> set[str]:
        return {asked["until"] for name, _, asked in top.source.asked if name == "pairs"}

    async with driving(frames.frame()) as top:
        await top.press("5", "p")
        before = top.app.view.version
        top.source.send(frames.frame(whole=False, at_ns=NOW + 9 * S))
        await top.until(lambda: top.app._box._mail.frame is not None)
        top.source.asked.clear()
        await top.press("6")
        await top.until(lambda: all(top.app.view.answer(name) for name in top.app.page.questions))
        assert asked(top) == {str(NOW)}
        before = top.app.view.version
        top.source.send(frames.frame(whole=False, at_ns=NOW + 10 * S))
        await top.until(lambda: top.app._box._mail.frame.at_ns == NOW + 10 * S)
        await top.later(1)
        assert top.app.view.version == before
        await top.press("p")
        await top.until(lambda: str(NOW + 10 * S) in asked(top))


async def test_paused_a_request_that_is_shown_does_not_go_on() -> None:
    first, second = (
        Detail("1", {"request": {"id": "1", "in_flight": True, "prompt_tokens": number}}) for number in (1, 2)
    )
    async with driving(frames.frame()) as top:
        box = top.app._box
        top.app.view.chosen = "1"
        await top.press("p")
        for detail in (first, second):
            box.put(box._generation, detail=detail)
            await top.until(lambda: not box._rung)
            assert top.app.view.detail == first
        await top.press("p")
        assert top.app.view.detail == second


async def test_paused_a_daemon_that_comes_back_is_not_said_to_be_gone() -> None:
    async with driving(frames.frame()) as top:
        await top.press("p")
        top.source.send(NO_DAEMON)
        await top.until(lambda: top.app.view.state is State.LOST)
        top.source.send(frames.frame(at_ns=NOW + 5 * S))
        await top.until(lambda: top.app.view.state is State.PAUSED)
        assert top.app.view.frame.at_ns == NOW
        top.source.send(*[NO_DAEMON] * 50)
        await top.until(lambda: top.app.view.state is State.LOST)
        await top.press("p")
        assert top.app.view.state is State.LOST, "the frame that was held back is older"
        assert top.app.view.frame.at_ns == NOW + 5 * S


async def test_a_filter_in_a_pause_shows_its_figures_once() -> None:
    async with driving(frames.frame()) as top:
        await top.press("p", "slash", *"label=a", "enter")
        await top.until(lambda: len(top.source.scopes) == 2)
        top.source.send(frames.frame(where=["label=a"], recent=[], in_flight=[]))
        await top.until(lambda: top.app.view.frame.where == ["label=a"])
        assert top.app.view.paused
        top.source.send(frames.frame(whole=False, at_ns=NOW + 5 * S))
        await top.until(lambda: top.app._box._mail.frame is not None)
        assert top.app.view.frame.at_ns == NOW


# --- filter, window, label -----------------------------------------------------------------------------


async def test_a_filter_applies_to_all_and_escape_takes_it_off() -> None:
    async with driving(frames.frame()) as top:
        await top.press("slash", *"connector=push ttft_ns>300ms", "enter")
        await top.until(lambda: len(top.source.scopes) == 2)
        assert top.source.scopes[-1].where == ("connector=push", "ttft_ns>300ms")
        assert "where connector=push ttft_ns>300ms" in top.bar("header")
        assert not top.app.query_one(FilterInput).display
        await top.press("escape")
        await top.until(lambda: len(top.source.scopes) == 3)
        assert top.source.scopes[-1].where == ()


async def test_a_wrong_filter_says_so_at_once_and_the_old_one_stays() -> None:
    async with driving(frames.frame(), scope=Scope(where=("connector=push",))) as top:
        await top.press("slash")
        field = top.app.query_one(Input)
        assert field.value == "connector=push"
        await top.press(*" ttf=")
        assert "no column 'ttf'; did you mean" in top.bar("filter-error")
        await top.press("enter")
        assert top.app.query_one(FilterInput).display
        await top.press("escape")
        assert not top.app.query_one(FilterInput).display
        assert top.app.view.filters == ("connector=push",)
        assert len(top.source.scopes) == 1
        await top.press("2")
        assert top.app.page.key == "2", "keys are the pages' again"


@pytest.mark.parametrize("cells", [40, 80, 120])
@pytest.mark.parametrize("past", [False, True])
async def test_a_filter_is_always_in_the_header(cells: int, past: bool) -> None:
    scope = Scope(where=("connector=push",))
    async with driving(frames.frame(where=["connector=push"]), size=(cells, 24), scope=scope) as top:
        if past:
            await top.press("left")
            await top.until(lambda: top.app.view.frame.at_ns == NOW - WINDOW // 10)
        state = "HISTORY" if past else "LIVE"
        first = top.bar("header").splitlines()[0]
        assert len(first) <= cells
        assert (f" {state} F " in first) is (cells == 40)
        assert ("where connector=push" in first) is (cells > 40)


@pytest.mark.parametrize("key", ["tab", "shift+tab"])
async def test_tab_leaves_the_page_alone_while_something_else_takes_keys(key: str) -> None:
    async with driving(frames.frame()) as top:
        await top.press("slash", *"label=", key, "a", "enter")
        assert (top.app.page.key, top.app.view.filters) == ("1", ("label=a",))
        await top.press("question_mark", key)
        assert isinstance(top.app.screen, TextScreen)
        await top.press("escape")
        assert top.app.page.key == "1"


async def test_a_click_on_a_tab_closes_the_filter() -> None:
    async with driving(frames.frame()) as top:
        await top.press("slash", *"label=a")
        await top.pilot.click("#tabs", offset=(top.bar("tabs").index("Requests"), 0))
        assert not top.app.query_one(FilterInput).display
        await top.press("4")
        assert (top.app.page.key, top.app.view.filters) == ("4", ())


async def test_after_any_number_of_pages_two_escapes_clear_the_filter() -> None:
    async with driving(frames.frame()) as top:
        await top.press("slash", *"label=a", "enter", *"245761", "escape")
        assert (top.app.page.key, top.app.view.filters) == ("1", ("label=a",))
        await top.press("escape")
        assert top.app.view.filters == ()


def test_filters_in_one_line_are_separated_by_spaces_and_quotes_keep_them_together() -> None:
    assert split_filters("connector = push  ttft_ns > 300ms") == ("connector=push", "ttft_ns>300ms")
    assert split_filters("model='a b' label!=x") == ("model=a b", "label!=x")
    assert split_filters("model='a = b'") == ("model=a = b",)
    assert split_filters("") == ()
    for filters in (("model=a b", "label="), ("client_id~it's", "outcome!=finished")):
        assert split_filters(joined_filters(filters)) == filters
    with pytest.raises(KvscopeError, match="quote"):
        split_filters("model='a")


async def test_brackets_change_the_window() -> None:
    async with driving(frames.frame()) as top:
        await top.press("right_square_bracket")
        await top.until(lambda: len(top.source.scopes) == 2)
        assert top.source.scopes[-1].window == "10m"
        await top.press("left_square_bracket", "left_square_bracket")
        await top.until(lambda: top.source.scopes[-1].window == "2m")


async def test_b_shows_the_next_kind_of_traffic() -> None:
    async with driving(frames.frame(labels={"": 100, "bench": 20})) as top:
        assert "label production" in top.bar("header")
        await top.press("b")
        await top.until(lambda: len(top.source.scopes) == 2)
        assert top.source.scopes[-1].label == "bench"


async def test_with_one_kind_of_traffic_b_says_so() -> None:
    async with driving(frames.frame()) as top:
        await top.press("b")
        assert "one kind" in notice(top)


# --- time ------------------------------------------------------------------------------------------------


async def test_a_live_view_can_be_scrubbed_back_and_l_returns() -> None:
    async with driving(frames.frame()) as top:
        await top.press("left")
        await top.until(lambda: top.app.view.frame.at_ns == NOW - WINDOW // 10)
        assert top.app.view.state is State.HISTORY
        assert "HISTORY" in top.bar("header")
        assert "07:59:30" in top.bar("header")
        await top.press("shift+left")
        await top.until(lambda: top.app.view.frame.at_ns == NOW - WINDOW // 10 - WINDOW)
        await top.press("right")
        await top.until(lambda: top.app.view.frame.at_ns == NOW - WINDOW)
        top.source.send(frames.frame())
        await top.press("l")
        await top.until(lambda: top.app.view.state is State.LIVE and top.app.view.frame.at_ns == NOW)


async def test_forward_to_the_present_is_live_again() -> None:
    async with driving(frames.frame()) as top:
        await top.press("left")
        await top.until(lambda: top.app.view.frame.at_ns == NOW - WINDOW // 10)
        top.source.send(frames.frame())
        await top.press("right")
        await top.until(lambda: top.app.view.state is State.LIVE)


async def test_what_is_present_the_clock_of_the_daemon_says() -> None:
    ahead = NOW + 7200 * S
    async with driving(frames.frame(at_ns=ahead)) as top:
        await top.press("left")
        await top.until(lambda: top.app.view.frame.at_ns == ahead - WINDOW // 10)
        await top.press("shift+left")
        await top.until(lambda: top.app.view.frame.at_ns == ahead - WINDOW // 10 - WINDOW)
        await top.press("right")
        await top.until(lambda: top.app.view.frame.at_ns == ahead - WINDOW)
        assert top.app.view.state is State.HISTORY
        await top.press("shift+right", "right")
        assert not top.app.view.history


async def test_in_the_past_figures_of_another_moment_are_said_to_be() -> None:
    release = threading.Event()

    class Slow(FakeSource):
        def query(self, name: str, sql: str, parameters: dict[str, Any]) -> dict[str, Any]:
            if name == "pairs" and parameters["until"] != str(NOW):
                assert release.wait(10)
            return super().query(name, sql, parameters)

    async with driving(source=Slow(), live=False, name="a.duckdb") as top:
        await top.press("6")
        await top.until(lambda: all(top.app.view.answer(name) for name in top.app.page.questions))
        assert "as of" not in top.bar("header")
        await top.press("left")
        await top.until(lambda: "07:59:30" in top.bar("header"))
        await top.until(lambda: "some figures as of 08:00:00 UTC, asking" in top.bar("header"))
        release.set()
        await top.until(lambda: "as of" not in top.bar("header"))


async def test_a_question_that_fails_from_now_on_is_said_beside_what_it_answered_before() -> None:
    async with driving(frames.frame(), size=(120, 30)) as top:
        await top.press("6")
        await top.until(lambda: all(top.app.view.answer(name) for name in top.app.page.questions))
        top.source.answers["pairs"] = KvscopeError("the query was stopped after 10.0 s")
        top.source.send(frames.frame(whole=False, at_ns=NOW + S))
        await top.until(lambda: "pairs as before: the query was stopped after 10.0 s" in top.bar("header"))


async def test_a_request_looked_up_in_the_past_is_said_to_be_as_it_is_now() -> None:
    row = frames.in_flight(1001)
    async with driving(frames.frame(in_flight=[row])) as top:
        top.source.details["1001"] = {"request": {"id": "1001", "in_flight": True}}
        await top.press("2", "enter")
        await top.until(lambda: f"waits for {row.waits_for}" in top.screen)
        assert "as it is now" not in top.screen
        await top.press("left")
        await top.until(lambda: "as it is now, not at 07:59:30 UTC" in top.screen.replace("2027-01-15 ", ""))
        assert "waits for" not in top.screen


async def test_right_in_the_present_does_nothing_and_space_says_what_it_is_for() -> None:
    async with driving(frames.frame()) as top:
        await top.press("right")
        assert top.app.view.state is State.LIVE
        await top.press("space")
        assert "←" in notice(top)


async def test_a_filter_in_the_past_stays_at_that_time() -> None:
    async with driving(frames.frame()) as top:
        await top.press("left")
        await top.until(lambda: top.app.view.frame.at_ns == NOW - 30 * S)
        await top.press("slash", *"connector=push", "enter")
        await top.until(lambda: top.app.view.frame.where == ["connector=push"])
        assert top.source.scopes[-1].at == str(NOW - 30 * S)


async def test_a_store_file_begins_at_its_end_and_has_no_present() -> None:
    async with driving(source=FakeSource(), live=False, name="snapshot.duckdb") as top:
        assert top.app.view.state is State.HISTORY
        assert top.app.view.frame.at_ns == NOW
        await top.press("l")
        assert "no present" in notice(top)
        await top.press("left")
        await top.until(lambda: top.app.view.frame.at_ns == NOW - 30 * S)


async def test_an_empty_store_says_so() -> None:
    class Empty(FakeSource):
        def frame(self, scope: Scope) -> Frame:
            return frames.empty(live=False, at_ns=1)

        def query(self, name: str, sql: str, parameters: dict[str, Any]) -> dict[str, Any]:
            return {"columns": [{"name": "first"}, {"name": "last"}], "rows": [[None, None]]}

    async with driving(source=Empty(), live=False, name="empty.duckdb") as top:
        assert "no requests at all" in top.bar("header")
        assert "Nothing is recorded" in top.screen
        assert "empty.duckdb" in top.screen
        await top.press("w")
        await top.until(lambda: "no requests in the data" in notice(top))


async def test_space_plays_from_here_and_plus_and_minus_change_the_speed() -> None:
    async with driving(source=FakeSource(), live=False, refresh_s=0.02) as top:
        await top.press("shift+left")
        await top.press("plus", "plus", "minus")
        assert top.app.view.speed == 2.0
        await top.press("plus", "plus", "plus", "plus", "plus", "plus", "space")
        assert top.app.view.playing
        assert "▶ ×100" in top.bar("header")
        start = top.app.view.frame.at_ns
        await top.until(lambda: top.app.view.frame.at_ns > start + 2 * S)
        await top.press("space")
        assert not top.app.view.playing
        assert "❚❚" in top.bar("header")


async def test_playing_ends_with_the_data() -> None:
    source = FakeSource()
    async with driving(
        source=source, live=False, refresh_s=0.01, speed=1000.0, scope=Scope(at=str(NOW - S))
    ) as top:
        await top.until(lambda: not top.app.view.playing and top.app.view.frame.at_ns == NOW)


async def test_w_jumps_to_the_worst_moment() -> None:
    async with driving(frames.frame()) as top:
        buckets = [(NOW - 2000 * S, 100.0), (NOW - 1500 * S, 900.0), (NOW - 1490 * S, 200.0)]
        top.source.answers["fleet_trend"] = Answer(["at_ns", "p99_ttft_ms"], [list(one) for one in buckets])
        await top.press("w")
        await top.until(lambda: top.app.view.frame.at_ns == NOW - 1495 * S + WINDOW // 2)
        assert top.app.view.state is State.HISTORY


async def test_a_daemon_lost_in_the_past_is_said_and_the_past_comes_back() -> None:
    async with driving(frames.frame()) as top:
        top.source.fails = NO_DAEMON
        await top.press("left")
        await top.until(lambda: top.app.view.state is State.LOST)
        top.source.fails = None
        await top.until(lambda: top.app.view.state is State.HISTORY)


# --- sort, copy, session, help, palette, quit ------------------------------------------------------------


async def test_s_sorts_by_the_next_column_and_capital_s_turns_it() -> None:
    async with driving(frames.frame()) as top:
        await top.press("2")
        first = table(top).sort
        await top.press("s")
        second = table(top).sort
        assert second[0] != first[0]
        await top.press("S")
        assert table(top).sort == (second[0], not second[1])


async def test_c_copies_the_id_under_the_cursor() -> None:
    rows = [frames.request(1), frames.request(2, client_id="[/red]odd[")]
    async with driving(frames.frame(in_flight=[], recent=rows), notices=True) as top:
        await top.press("2")
        for row in rows:
            assert table(top).choose(row.id)
            await top.press("c")
            assert top.app.clipboard == row.client_id
            assert notice(top) == f"sent to the terminal's clipboard: {row.client_id}"
        assert "clipboard: [/red]odd[" in top.screen


async def test_c_without_a_request_says_so() -> None:
    async with driving(frames.frame()) as top:
        await top.press("5", "c")
        assert notice(top) == "there is no request under the cursor"


async def test_o_opens_the_session_of_the_request() -> None:
    rows = [frames.request(1, session="77", turn=2), frames.request(2)]
    async with driving(frames.frame(in_flight=[], recent=rows)) as top:
        await top.press("2")
        table(top).choose("1")
        await top.press("o")
        await top.until(lambda: top.app.page.key == "7")
        assert top.app.view.session == "77"
        await top.press("escape")
        table(top).choose("2")
        await top.press("o")
        assert "no session" in notice(top)
        top.app.post_message(OpenSession("88"))
        await top.until(lambda: top.app.view.session == "88")


async def test_help_lists_every_key_and_page_and_any_way_out_closes_it() -> None:
    async with driving(frames.frame(), size=(80, 24)) as top:
        for way_out in ("escape", "q", "question_mark", "enter"):
            await top.press("question_mark")
            assert isinstance(top.app.screen, TextScreen)
            await top.press(way_out)
            assert not isinstance(top.app.screen, TextScreen)


def test_no_key_is_missing_in_the_help() -> None:
    text = "\n".join(plain(line) for line in help_lines([(p.key, p.title, p.about) for p in PAGES], 80))
    assert all(len(line) <= 80 for line in text.splitlines())
    for page in PAGES:
        assert f"  {page.key} {page.title}" in text
        assert page.about
    documented = {one for key in KEYS for one in key.keys.split(",")} | {"tab", "shift+tab", *"1234567"}
    bound = {one for binding in Top.BINDINGS for one in binding.key.split(",")}  # type: ignore[union-attr]
    assert bound <= documented
    for key in KEYS:
        assert f"  {key.shown}" in text


async def test_every_command_is_in_the_palette_and_works_from_there() -> None:
    async with driving(frames.frame()) as top:
        commands = {command.title: command for command in top.app.get_system_commands(top.app.screen)}
        assert {f"Page {page.title}" for page in PAGES} <= set(commands)
        assert {key.title for key in KEYS if key.title} <= set(commands)
        await top.press("ctrl+p")
        await top.press(*"page stuck", "enter")
        await top.until(lambda: top.app.page.title == "Stuck")


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_q_quits(key: str) -> None:
    async with driving(frames.frame()) as top:
        await top.press(key)
        assert top.app._exit
        assert not top.app.return_code


# --- screens of all kinds ----------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(80, 24), (40, 10), (200, 55)])
async def test_every_page_fits_the_screen(size: tuple[int, int]) -> None:
    wrong = {"problems": ["LOST 12 events of prefill-0 " * 5], "findings": [frames.FINDING]}
    async with driving(frames.frame(**wrong), size=size) as top:
        for page in PAGES:
            await top.press(page.key)
            lines = top.screen.splitlines()
            assert len(lines) <= size[1]
            assert top.app.query_one("#footer", Bar).region.bottom == size[1]
            assert top.app.page.region.height == size[1] - 4
            assert "q quit" in top.bar("footer"), "how to leave is always there"


class Paintings:
    """What of the screen was painted: the lines, painting by painting."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look: Callable[[], object] = lambda: None) -> None:
        self.lines: list[set[int]] = []
        display = Top._display

        def displayed(app: Top, screen: Any, update: Any) -> None:
            if update is not None:
                look()
                whole = range(app.size.height)
                self.lines.append({y for y, _, _ in getattr(update, "spans", ())} or set(whole))
            display(app, screen, update)

        monkeypatch.setattr(Top, "_display", displayed)


async def test_a_key_paints_once_and_no_more_than_what_it_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with driving(frames.frame(recent=frames.many(100)), size=(120, 40)) as top:
        for key in "12451":  # pages lay themselves out when they are first shown
            await top.press(key)
        paintings = Paintings(monkeypatch)

        async def painted(*keys: str) -> list[set[int]]:
            paintings.lines.clear()
            await top.press(*keys)
            await top.pilot.pause(0.05)  # what would come after it
            return paintings.lines

        for key in "24512":
            assert len(await painted(key)) == 1, key
        cursor = table(top).region.y + 1
        assert await painted("down") == [{cursor, cursor + 1}]
        assert len(await painted("s")) == 1
        assert len(await painted("S")) == 1
        assert set().union(*await painted("slash")) == {38, 39}
        assert set().union(*await painted("escape")) == {38, 39}


@pytest.mark.parametrize("height", [12, 40])
async def test_lines_are_never_painted_for_another_width_than_is_in_sight(
    monkeypatch: pytest.MonkeyPatch, height: int
) -> None:
    seen = []

    def look() -> None:
        for one in top.app.screen.query(Scrolled):
            if one.region and one.display:
                beside = one.region.width - one.scrollbar_size_vertical
                seen.append((type(one), one.cells, beside))
                if isinstance(one, LinesView):
                    widest = max(map(width, one.lines), default=0)
                    assert widest <= beside, plain(max(one.lines, key=width))
                    assert len(one.lines) == one.virtual_size.height

    async with driving(frames.frame(recent=frames.many(100)), size=(100, height)) as top:
        Paintings(monkeypatch, look)
        for cells in (100, 81, 120):
            await top.pilot.resize_terminal(cells, height)
            for page in PAGES:
                await top.press(page.key)
            await top.press("question_mark", "escape")
        assert {beside for _, _, beside in seen} >= {81, 80, 120, 119}
        assert [one for one in seen if one[1] != one[2]] == []


async def test_the_scrollbar_hides_no_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async with driving(frames.frame(), size=(100, 30)) as top:
        view = top.app.page.query_one(LinesView)
        for count, shown in ((5, False), (100, True), (5, False)):
            view.draw(lambda cells, count=count: [[("x" * cells, "")]] * count)
            await top.pilot.pause()
            assert view.show_vertical_scrollbar is shown
            lines = top.screen.splitlines()[3:8]
            assert lines == ["x" * 99] * 5


async def test_resized_it_is_drawn_anew_and_too_small_it_says_so() -> None:
    async with driving(frames.frame(), size=(120, 40)) as top:
        await top.press("2", "down", "down")
        chosen = table(top).cursor_row.id
        await top.pilot.resize_terminal(30, 8)
        await top.until(lambda: "make the terminal larger" in top.screen)
        await top.pilot.resize_terminal(80, 24)
        await top.until(lambda: "make the terminal larger" not in top.screen)
        assert table(top).cursor_row.id == chosen
        assert max(map(len, top.screen.splitlines())) <= 80


def styles_of(top: Driven) -> list[Any]:
    return [segment.style for strip in top.app.screen._compositor.render_strips() for segment in strip]


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
async def test_without_colour_bars_differ_by_pattern(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    async with driving(frames.frame()) as top:
        colours = {style.color.name for style in styles_of(top) if style and style.color} - {"default"}
        if variable == "NO_COLOR":
            assert colours == set()
        else:
            assert colours & {"red", "green", "cyan", "magenta"} == set()
        for pattern in "█▓▒░":
            assert pattern in top.screen
        await top.press("2")
        assert any(style and style.reverse for style in styles_of(top)), "the cursor is seen"


async def test_sixteen_colours_are_enough() -> None:
    async with driving(frames.frame()) as top:
        colours = {style.color for style in styles_of(top) if style and style.color}
        assert {"red", "green"} <= {colour.name for colour in colours}
        assert all(colour.is_default or (colour.number or 0) < 16 for colour in colours)
        assert all(colour.triplet is None for colour in colours)


async def test_ten_thousand_requests_keep_the_cursor_and_answer_keys_at_once() -> None:
    recent = frames.many(10_000)
    running = [frames.in_flight(20_000 + number) for number in range(1000)]
    async with driving(frames.frame(in_flight=running, recent=recent), size=(120, 40)) as top:
        await top.press("2", "pagedown", "pagedown", "down")
        assert len(table(top).rows) == 11_000
        chosen = table(top).cursor_row.id
        for number in range(3):
            new = frames.frame(
                whole=False,
                at_ns=NOW + number * MS,
                in_flight=[frames.in_flight(30_000 + number)],
                recent=[frames.request(40_000 + number, arrived_at_ns=NOW)],
            )
            before = top.app.view.version
            top.source.send(new)
            await top.until(lambda before=before: top.app.view.version > before)
            assert table(top).cursor_row.id == chosen
        best = 1.0
        for _ in range(5):
            began = time.perf_counter()
            table(top).action_move(1)
            table(top).render_lines(table(top).size.region)
            best = min(best, time.perf_counter() - began)
        assert best < 0.1


async def test_a_page_that_stumbles_says_so_and_the_program_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with driving(frames.frame()) as top:
        await top.press("5")
        monkeypatch.setattr(top.app.page, "show", lambda view: 1 // 0)
        top.source.send(frames.frame(whole=False, at_ns=NOW + S))
        await top.until(lambda: top.app.faults)
        assert "Engines can't show this" in notice(top)
        await top.press("1")
        assert "coordination" in top.screen
        top.app.faults.clear()


async def test_a_page_whose_lines_cant_be_made_says_so_at_any_width(monkeypatch: pytest.MonkeyPatch) -> None:
    async with driving(frames.frame()) as top:
        draws = 0

        def draw(*_: object) -> Any:
            nonlocal draws
            draws += 1
            raise KeyError(f"odd {draws}")

        monkeypatch.setattr("kvscope.tui.pages.request.detail_lines", draw)
        await top.press("3")  # its first showing: lines are made while it is laid out
        await top.until(lambda: "can't show this (KeyError)" in top.screen)
        await top.pilot.resize_terminal(70, 24)
        await top.until(lambda: draws > 2)
        assert list(top.app.faults) == [("Request", "KeyError")], "one line, not one for each time"
        await top.press("1")
        assert "coordination" in top.screen
        top.app.faults.clear()


async def test_ragged_figures_of_a_daemon_do_not_end_the_program() -> None:
    odd = frames.answers()
    odd["fleet"].rows[0].pop()
    odd["fleet_steps"].rows[0].append("more")
    async with driving(frames.frame(answers=odd)) as top:
        for page in PAGES:
            await top.press(page.key)
        assert "STUCK" in top.bar("header")
        assert top.app.is_running
