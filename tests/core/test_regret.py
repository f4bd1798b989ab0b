"""Early-binding regret: what requests waited for on their decoder, against the least loaded other one."""

from __future__ import annotations

from typing import Any

from kvscope.regret import Judged, Regrets, hand_over
from kvscope.steps import BY_NAME

MS = 1_000_000
SECOND = 1_000_000_000
GROUP = ("pull", "tiny", "production")


def interval(step: str, start_ms: float, end_ms: float, critical: bool = True) -> dict[str, Any]:
    return {
        "step": BY_NAME[step].code,
        "from_ns": round(start_ms * MS),
        "ns": round((end_ms - start_ms) * MS),
        "critical": critical,
    }


def request(d_engine: str, wait_ms: float, second: int = 100, **columns: Any) -> dict[str, Any]:
    """Prefill takes 50 ms, D has no place for `wait_ms`."""
    return {
        "arrived_at_ns": second * SECOND,
        "p_engine": "p",
        "d_engine": d_engine,
        "ttft_ns": round((60 + wait_ms) * MS),
        "unknown_ns": None,
        "outcome": "finished",
        "waterfall": [
            interval("prefill.compute", 0, 50),
            interval("registration.admit", 50, 50 + wait_ms),
            interval("decode.first_step", 50 + wait_ms, 60 + wait_ms),
        ],
    } | columns


def judged(*rows: dict[str, Any], group: tuple[str, ...] = GROUP) -> list[tuple[str, float]]:
    regrets = Regrets()
    for row in rows:
        regrets.add(row, group, 101)
    return [(one.d_engine, one.regret_ns / MS) for one in regrets.judged(1000)]


def test_regret_is_what_the_least_loaded_other_decoder_would_have_saved() -> None:
    rows = [request("a", 80), request("b", 10), request("b", 30), request("c", 50)]
    # b's load is 20 ms, and the least; b itself is compared with c.
    assert judged(*rows) == [("a", 60), ("b", 0), ("b", 0), ("c", 30)]


def test_one_decoder_has_nothing_to_regret_and_nothing_known() -> None:
    assert judged(request("a", 80), request("a", 10)) == []


def test_requests_of_another_second_say_nothing_of_this_one() -> None:
    assert judged(request("a", 80, second=100), request("b", 0, second=99)) == []


def test_the_second_is_that_of_the_hand_over_not_of_the_arrival() -> None:
    late = request("a", 80, arrived_at_ns=100 * SECOND - 20 * MS)
    assert judged(late, request("b", 10)) == [("a", 70), ("b", 0)]


def test_groups_never_mix() -> None:
    regrets = Regrets()
    regrets.add(request("a", 80), ("pull", "tiny", "production"), 101)
    regrets.add(request("b", 0), ("pull", "tiny", "benchmark"), 101)
    assert list(regrets.judged(1000)) == []


def test_only_what_was_felt_after_the_hand_over_counts_but_loads_are_whole() -> None:
    """Push: D's queue lies beside prefill."""
    pushed = request(
        "a",
        0,
        waterfall=[
            interval("prefill.compute", 0, 50, critical=False),
            interval("registration.admit", 10, 70),
            interval("registration.blocks", 70, 75),
            interval("readiness.admit", 80, 90),
        ],
    )
    found = hand_over(pushed)
    assert found is not None
    assert (found.felt_ns / MS, found.whole_ns / MS) == (20 + 5 + 10, 60 + 5 + 10)
    hidden = request(
        "b",
        0,
        waterfall=[
            interval("prefill.compute", 0, 50),
            interval("registration.admit", 5, 45, critical=False),
        ],
    )
    assert judged(pushed, hidden) == [("a", 0), ("b", 0)]


def test_requests_that_were_not_seen_whole_are_left_out() -> None:
    for odd in (
        {"unknown_ns": 1},
        {"ttft_ns": None},
        {"p_engine": None},
        {"d_engine": ""},
        {"waterfall": None},
        {"waterfall": [interval("registration.admit", 0, 5)]},
        {"outcome": "in flight"},
    ):
        assert hand_over(request("a", 5) | odd) is None, odd


def test_a_second_is_judged_once_and_only_when_its_requests_are_over() -> None:
    regrets = Regrets(held_s=10)
    regrets.add(request("a", 80), GROUP, 101)
    regrets.add(request("b", 10), GROUP, 102)
    assert list(regrets.judged(110)) == []
    assert list(regrets.judged(111)) == [Judged(GROUP, "a", 70 * MS), Judged(GROUP, "b", 0)]
    regrets.add(request("a", 500), GROUP, 112)
    assert list(regrets.judged(1000)) == [], "what comes after a second was judged is left out"


def test_memory_is_bounded_and_nothing_is_judged_twice() -> None:
    regrets = Regrets(most=100)
    count = 0
    for second in range(100, 200):
        for i in range(10):
            regrets.add(request("ab"[i % 2], i, second=second), GROUP, second)
        count += len(list(regrets.judged(second)))
        assert sum(s.requests for s in regrets._open.values()) <= 100
    assert count + len(list(regrets.judged(10_000))) == 1000


def test_a_clock_far_ahead_does_not_close_the_present() -> None:
    regrets = Regrets(most=4)
    regrets.add(request("a", 1, second=10**9), GROUP, 101)
    regrets.add(request("a", 80), GROUP, 101)
    regrets.add(request("b", 10), GROUP, 101)
    assert len(list(regrets.judged(1000))) == 2
