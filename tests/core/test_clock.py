"""What is known of the offset between two hosts' clocks, and how surely."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope.clock import WALL_ERROR_NS, Clocks, Offset

S = 10**9
OFFSET_NS = 7 * S + 123
"""b's clock minus a's."""


def hosts(wall_error_ns: int = 0) -> Clocks:
    """Two hosts whose wall clocks differ by this much."""
    clocks = Clocks()
    clocks.anchor("a", 1_700_000_000 * S, 100 * S)
    clocks.anchor("b", 1_700_000_000 * S + wall_error_ns, 100 * S + OFFSET_NS)
    return clocks


def covers(offset: Offset, true_ns: int = OFFSET_NS) -> bool:
    return offset.low_ns <= true_ns <= offset.high_ns and abs(offset.ns - true_ns) <= offset.error_ns


def test_one_host_has_one_clock() -> None:
    assert hosts().offset("a", "a") == Offset(0, 0)


def test_wall_clocks_alone_leave_a_whole_second_open() -> None:
    offset = hosts(WALL_ERROR_NS // 2).offset("a", "b")
    assert covers(offset)
    assert offset.error_ns == WALL_ERROR_NS


def test_a_handshake_narrows_the_error_to_its_round_trip() -> None:
    clocks = hosts()
    clocks.estimate("a", "b", OFFSET_NS + 400, 1000)
    assert covers(clocks.offset("a", "b"))
    assert clocks.offset("a", "b").error_ns == 1000
    assert clocks.offset("b", "a").ns == -clocks.offset("a", "b").ns


def test_messages_both_ways_bound_the_offset_from_both_sides() -> None:
    clocks = hosts(wall_error_ns=S // 3)
    clocks.message("a", 1000, "b", 1000 + OFFSET_NS + 50)
    clocks.message("b", 2000 + OFFSET_NS, "a", 2000 + 70)
    offset = clocks.offset("a", "b")
    assert offset == Offset(OFFSET_NS - 70, OFFSET_NS + 50)
    assert covers(offset)


def test_messages_one_way_lean_on_the_wall_clocks_for_the_other_side() -> None:
    clocks = hosts()
    clocks.message("a", 1000, "b", 1000 + OFFSET_NS + 50)
    offset = clocks.offset("a", "b")
    assert offset.high_ns == OFFSET_NS + 50
    assert covers(offset)
    assert offset.error_ns <= WALL_ERROR_NS


def test_wall_clocks_that_contradict_a_message_are_not_believed_and_no_certainty_is_made_up() -> None:
    for sign in (1, -1):
        clocks = hosts(wall_error_ns=sign * 3600 * S)
        clocks.message("a", 1000, "b", 1000 + OFFSET_NS + 50)
        clocks.message("b", 9 * S + OFFSET_NS, "a", 9 * S + 70)
        assert covers(clocks.offset("a", "b"))
        for one_way in (("a", 1000, "b", 1000 + OFFSET_NS), ("b", 1000 + OFFSET_NS, "a", 1000)):
            clocks = hosts(wall_error_ns=sign * 3600 * S)
            clocks.message(*one_way)
            assert clocks.offset("a", "b").error_ns >= WALL_ERROR_NS


def test_clocks_that_drifted_apart_show_a_larger_error_that_covers_both_times() -> None:
    clocks = hosts()
    clocks.estimate("a", "b", OFFSET_NS, 100)
    drifted = OFFSET_NS + 5000
    clocks.estimate("a", "b", drifted, 100)
    assert covers(clocks.offset("a", "b"))
    assert covers(clocks.offset("a", "b"), drifted)
    assert clocks.offset("a", "b").error_ns == 2600
    clocks.message("b", 1000 + drifted, "a", 1000 + 10)
    assert covers(clocks.offset("a", "b"), drifted), "what comes later narrows it again"
    assert clocks.offset("a", "b").error_ns < 100


def test_a_message_from_the_future_widens_the_error_no_further_than_it_says() -> None:
    clocks = hosts()
    clocks.estimate("a", "b", OFFSET_NS, 100)
    clocks.message("b", 1000 + OFFSET_NS + 9000, "a", 1000)
    assert clocks.offset("a", "b") == Offset(OFFSET_NS - 100, OFFSET_NS + 9000)


def test_a_stepped_wall_clock_moves_nothing_that_was_shown() -> None:
    clocks = hosts()
    before = clocks.wall_ns("a", 150 * S)
    clocks.anchor("a", 1_700_009_999 * S, 100 * S)
    assert clocks.wall_ns("a", 150 * S) == before == 1_700_000_050 * S


def test_an_estimate_with_a_negative_error_tells_nothing() -> None:
    clocks = hosts()
    clocks.estimate("a", "b", 5, -1)
    assert clocks.offset("a", "b") == hosts().offset("a", "b")


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_whatever_is_truly_observed_the_true_offset_stays_within_the_bounds(seed: int) -> None:
    rng = random.Random(seed)
    clocks = hosts(rng.randrange(-WALL_ERROR_NS, WALL_ERROR_NS))
    error_ns = clocks.offset("a", "b").error_ns
    for _ in range(rng.randrange(1, 20)):
        t_ns, delay_ns = rng.randrange(100 * S), rng.randrange(S // 10)
        what = rng.randrange(3)
        if what == 0:
            clocks.message("a", t_ns, "b", t_ns + delay_ns + OFFSET_NS)
        elif what == 1:
            clocks.message("b", t_ns + OFFSET_NS, "a", t_ns + delay_ns)
        else:
            clocks.estimate("a", "b", OFFSET_NS + rng.randint(-delay_ns, delay_ns), delay_ns)
        offset, back = clocks.offset("a", "b"), clocks.offset("b", "a")
        assert covers(offset)
        assert offset.error_ns <= error_ns, "an observation never loosens a bound"
        assert (back.low_ns, back.high_ns) == (-offset.high_ns, -offset.low_ns)
        error_ns = offset.error_ns


@given(seed=st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_no_numbers_make_bounds_that_cross_or_leave_64_bits(seed: int) -> None:
    rng = random.Random(seed)
    clocks = Clocks()
    wild = (0, 1, -1, 2**60, -(2**60), 2**63, 2**64 - 1, -(2**63))
    for _ in range(10):
        one, two, three, four = (rng.choice(wild) for _ in range(4))
        clocks.anchor("a", one, two)
        clocks.anchor("b", three, four)
        clocks.message("a", one, "b", two)
        clocks.estimate("b", "a", three, four)
        offset = clocks.offset("a", "b")
        assert -(2**62) <= offset.low_ns <= offset.high_ns <= 2**62
        assert offset.error_ns >= 0
