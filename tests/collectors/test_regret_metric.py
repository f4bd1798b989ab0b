"""Early-binding regret in `/metrics`: counted once a second's requests are over, and never across kinds."""

from __future__ import annotations

from typing import Any

from kvscope import metrics as m
from kvscope.collectors.aggregates import Aggregates
from kvscope.collectors.counts import Labels
from kvscope.regret import HELD_S
from kvscope.schema import BY_NAME

from ..cli import rows

T0_S = rows.T0_NS // 10**9
GROUP = ("pull", "tiny", m.PRODUCTION)


class Clock:
    def __init__(self) -> None:
        self.now = float(T0_S)

    def __call__(self) -> float:
        return self.now


def request(number: int, d_engine: str, wait_ms: float, **columns: Any) -> tuple[Any, ...]:
    row = rows.request(
        number,
        ("prefill.compute", 0, 50),
        ("registration.admit", 50, 50 + wait_ms),
        ("decode.first_step", 50 + wait_ms, 60 + wait_ms),
        **{"connector": "pull", "arrived_at_ns": rows.T0_NS, "d_engine": d_engine} | columns,
    )
    return tuple(row[column.name] for column in BY_NAME["requests"].columns)


def counted(aggregates: Aggregates, metric: m.Metric) -> dict[Labels, float]:
    return aggregates.snapshot([]).counters[metric.name]


def test_regret_is_counted_when_the_requests_of_its_second_are_over() -> None:
    clock = Clock()
    aggregates = Aggregates(wall=clock)
    aggregates.add({"requests": [request(1, "d0", 80), request(2, "d1", 20)]}, 0)
    # The series are there before, so that an increase is seen.
    assert counted(aggregates, m.REGRET) == {GROUP: 0}
    assert counted(aggregates, m.REGRET_REQUESTS) == {GROUP: 0}
    clock.now += HELD_S + 2
    assert counted(aggregates, m.REGRET) == {GROUP: 0.06}
    assert counted(aggregates, m.REGRET_REQUESTS) == {GROUP: 2}
    clock.now += 1000
    assert counted(aggregates, m.REGRET_REQUESTS) == {GROUP: 2}


def test_kinds_of_requests_are_not_compared_with_each_other() -> None:
    clock = Clock()
    aggregates = Aggregates(wall=clock)
    others: list[dict[str, Any]] = [{"label": "benchmark"}, {"model": "large"}, {"connector": "push"}]
    made = [request(1, "d0", 80)]
    made += [request(2 + i, "d1", 0, **other) for i, other in enumerate(others)]
    aggregates.add({"requests": made}, 0)
    clock.now += HELD_S + 2
    assert sum(counted(aggregates, m.REGRET_REQUESTS).values()) == 0


def test_one_decoder_has_requests_and_no_regret() -> None:
    clock = Clock()
    aggregates = Aggregates(wall=clock)
    aggregates.add({"requests": [request(i, "d0", 10 * i) for i in range(5)]}, 0)
    clock.now += HELD_S + 2
    assert counted(aggregates, m.REGRET_REQUESTS) == {GROUP: 0}
    assert sum(counted(aggregates, m.REQUESTS).values()) == 5
