"""The view: what it keeps of a stream of changes, what it lets go of, and what it says of its own state."""

from __future__ import annotations

import pytest

from kvscope.frame import MAX_RECENT, Answer
from kvscope.tui import view as view_module
from kvscope.tui.view import Detail, State, Trouble, View, merged

from . import frames
from .frames import NOW, WINDOW, S


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def ids(rows: object) -> set[str]:
    return {row.id for row in rows}  # type: ignore[attr-defined]


def live(clock: Clock | None = None, **changes: object) -> View:
    view = View(1.0, clock or Clock())
    view.apply(frames.frame(**changes))
    return view


def test_before_the_first_frame_it_is_connecting_and_has_nothing() -> None:
    view = View(1.0, Clock())
    assert view.state is State.CONNECTING
    assert (view.in_flight, view.recent, view.rows("fleet"), view.total, view.problems) == (
        [],
        [],
        [],
        {},
        [],
    )
    assert view.now_ns == 0


def test_a_change_adds_updates_and_removes() -> None:
    view = live(in_flight=[frames.in_flight(1), frames.in_flight(2)], recent=[frames.request(3)])
    moved = frames.in_flight(2, "transfer.wire")
    view.apply(
        frames.frame(
            whole=False, in_flight=[moved, frames.in_flight(4)], gone=["1"], recent=[frames.request(1)]
        )
    )
    assert ids(view.in_flight) == {"2", "4"}
    assert ids(view.recent) == {"1", "3"}
    assert view.request("2") == moved
    assert view.request("1") == frames.request(1)
    assert view.request("9") is None


def test_a_whole_frame_leaves_nothing_of_the_one_before() -> None:
    view = live(in_flight=[frames.in_flight(1)], recent=[frames.request(2)])
    view.apply(frames.frame(in_flight=[frames.in_flight(3)], recent=[]))
    assert (ids(view.in_flight), ids(view.recent)) == ({"3"}, set())


def test_two_halves_that_become_one_request_do_not_stay_as_two() -> None:
    view = live(in_flight=[], recent=[frames.request(1), frames.request(2)])
    view.apply(
        frames.frame(whole=False, in_flight=[], gone=["2"], recent=[frames.request(1, output_tokens=7)])
    )
    assert ids(view.recent) == {"1"}
    assert view.recent[0].output_tokens == 7


def test_a_request_that_is_over_and_in_flight_again_is_shown_once() -> None:
    view = live(in_flight=[], recent=[frames.request(1)])
    view.apply(frames.frame(whole=False, in_flight=[frames.in_flight(1)], recent=[]))
    assert (ids(view.in_flight), ids(view.recent)) == ({"1"}, set())


def test_what_left_the_window_is_let_go() -> None:
    early, late = frames.request(1, arrived_at_ns=NOW - WINDOW), frames.request(2, arrived_at_ns=NOW - S)
    view = live(in_flight=[], recent=[early, late])
    assert ids(view.recent) == {"1", "2"}
    view.apply(frames.frame(whole=False, at_ns=NOW + S, in_flight=[], recent=[]))
    assert ids(view.recent) == {"2"}


def test_more_requests_than_there_may_be_keep_the_latest() -> None:
    view = live(in_flight=[], recent=frames.many(MAX_RECENT + 500))
    assert len(view.recent) == MAX_RECENT
    assert min(int(row.id) for row in view.recent) == 501


def test_more_in_flight_than_there_may_be_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "MAX_IN_FLIGHT", 10)
    rows = [frames.in_flight(number) for number in range(15)]
    view = live(in_flight=rows, recent=[], problems=["LOST 3 events"])
    assert len(view.in_flight) == 10
    assert view.problems == ["LOST 3 events", "NOT SHOWN: 5 requests in flight beyond the first 10"]


def test_frames_that_stop_coming_are_stale_and_the_next_one_mends_it() -> None:
    clock = Clock()
    view = live(clock)
    clock.now += 3.0
    assert view.state is State.LIVE
    clock.now += 0.1
    assert view.state is State.STALE
    assert view.stale
    assert round(view.age_s, 3) == 3.1
    assert len(view.recent) == 20
    view.apply(frames.frame(whole=False, in_flight=[], recent=[]))
    assert view.state is State.LIVE


def test_a_lost_daemon_keeps_the_last_figures() -> None:
    view = live()
    view.trouble = Trouble(State.LOST, "no kvscope daemon at http://x")
    assert view.state is State.LOST
    assert view.stale
    assert view.total["requests"] == 120
    view.apply(frames.frame())
    assert (view.state, view.trouble) == (State.LIVE, None)


def test_trouble_outweighs_pause_and_history() -> None:
    view = live()
    view.paused = True
    assert view.state is State.PAUSED
    view.trouble = Trouble(State.OLD, "other version")
    assert view.state is State.OLD


def test_history_does_not_become_stale() -> None:
    clock = Clock()
    view = live(clock, live=False)
    view.history = True
    clock.now += 1000
    assert view.state is State.HISTORY
    assert view.now_ns == NOW


def test_a_daemon_without_engines_or_requests_is_told_apart() -> None:
    view = View(1.0, Clock())
    view.apply(frames.empty())
    assert (view.state, view.advice) == (State.EMPTY, "engines")
    view.apply(frames.empty(engines=frames.ENGINES))
    assert (view.state, view.advice) == (State.LIVE, "requests")
    view.filters = ("connector=pull",)
    assert (view.state, view.advice) == (State.LIVE, "filter")
    view.apply(frames.frame())
    assert view.advice == ""


def test_a_filter_does_not_hide_that_no_engine_is_instrumented() -> None:
    view = View(1.0, Clock())
    view.filters = ("connector=pull",)
    view.apply(frames.empty())
    assert (view.state, view.advice) == (State.EMPTY, "engines")
    view.apply(frames.empty(labels={"": 3}))
    assert view.advice == "filter"


def test_ages_go_on_between_frames_and_stop_in_a_pause() -> None:
    clock = Clock()
    view = live(clock)
    clock.now += 0.4
    assert view.now_ns == NOW + 400_000_000
    clock.now += 5
    assert view.now_ns == NOW + S
    view.paused = True
    assert view.now_ns == NOW


def test_answers_are_those_of_the_frame_and_those_asked_for() -> None:
    view = live()
    before = view.version
    view.told("pairs", Answer(["p_engine"], [["prefill-0"]]))
    assert view.version > before
    assert view.rows("pairs") == [{"p_engine": "prefill-0"}]
    view.told("fleet", Answer(["level"], [["asked"]]))
    assert view.total["requests"] == 120
    view.not_told("pairs", "it took too long")
    assert view.unanswered("pairs") == "it took too long"
    assert view.rows("pairs") == [{"p_engine": "prefill-0"}]
    view.told("pairs", Answer(["p_engine"], []))
    assert view.unanswered("pairs") == ""


def test_rows_that_are_too_short_or_too_long_are_shown_as_far_as_they_go() -> None:
    view = live()
    view.told("pairs", Answer(["p_engine", "d_engine"], [["a"], ["b", "c", "d"]]))
    assert view.rows("pairs") == [{"p_engine": "a"}, {"p_engine": "b", "d_engine": "c"}]


def test_answers_of_another_window_are_told_to_be() -> None:
    view = live()
    pairs = Answer(["p_engine"], [])
    view.told("pairs", pairs, NOW - 4 * S)
    assert view.old_since_ns(["pairs"]) is None, "a live view is a little behind"
    assert view.old_since_ns([]) is None
    view.history = True
    assert view.old_since_ns(["pairs"]) == NOW - 4 * S
    view.playing = True
    assert view.old_since_ns(["pairs"]) is None
    view.told("pairs", pairs, NOW - 40 * S)
    assert view.old_since_ns(["pairs", "outcomes"]) == NOW - 40 * S
    view.told("pairs", pairs, NOW)
    assert view.old_since_ns(["pairs"]) is None


def test_a_look_up_that_fails_keeps_what_was_found_before() -> None:
    view = live()
    view.chosen = "7"
    found = Detail("7", {"request": {"id": "7"}})
    view.looked_up(found)
    view.looked_up(Detail("8", None, "another"))
    assert view.detail == found
    view.looked_up(Detail("7", None, "it took too long"))
    assert view.detail == Detail("7", found.answer, "it took too long")


def test_another_scope_forgets_answers_but_not_the_figures() -> None:
    view = live()
    view.told("pairs", Answer(["p_engine"], [["prefill-0"]]))
    view.forget()
    assert view.rows("pairs") == []
    assert view.total["requests"] == 120


def test_two_changes_merged_do_what_they_do_one_after_the_other() -> None:
    first = frames.frame(
        whole=False,
        in_flight=[frames.in_flight(1), frames.in_flight(2), frames.in_flight(6)],
        gone=["9"],
        recent=[frames.request(3), frames.request(7)],
    )
    second = frames.frame(
        whole=False,
        at_ns=NOW + S,
        in_flight=[frames.in_flight(4), frames.in_flight(7)],
        gone=["1", "3"],
        recent=[frames.request(2)],
    )
    start = {"in_flight": [frames.in_flight(8), frames.in_flight(9)], "recent": [frames.request(5)]}
    one, two = live(**start), live(**start)
    one.apply(first)
    one.apply(second)
    two.apply(merged(first, second))
    assert ids(one.in_flight) == ids(two.in_flight) == {"4", "6", "7", "8"}
    assert ids(one.recent) == ids(two.recent) == {"2", "5"}
    assert two.frame is not None
    assert two.frame.at_ns == NOW + S


def test_a_whole_frame_and_a_change_merge_to_a_whole_one() -> None:
    whole = frames.frame(in_flight=[frames.in_flight(1)], recent=[])
    change = frames.frame(whole=False, in_flight=[], gone=["1"], recent=[frames.request(1)])
    both = merged(whole, change)
    assert both.whole
    assert (ids(both.in_flight), ids(both.recent), both.gone) == (set(), {"1"}, [])
    assert merged(change, whole) is whole


@pytest.mark.parametrize(("behind_s", "told_s"), [(0, 0), (5, 0), (20, 20)])
def test_figures_older_than_the_requests_beside_them_are_told_to_be(behind_s: int, told_s: int) -> None:
    view = live(figures_at_ns=NOW - behind_s * S)
    assert view.behind_s == told_s
    view.paused = True
    assert view.behind_s == 0, "what stands still is not behind"
