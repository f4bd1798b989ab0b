"""Early-binding regret: what a later choice of the decoder would have saved.

A router that names the decoder when it sends the prefill can't know how full that decoder will be when
prefill has finished. For each request this compares, at that moment (the hand-over), what it then waited for
capacity on its decoder with what requests that were handed over in the same second waited on the others.

* Considered are requests with both engines, a first token, an observed end of prefill and no unknown time.
* Felt: time on the critical path, after the hand-over, in the decoder's capacity steps (`STEPS`).
* Whole: all time in those steps, also where it was hidden behind prefill: a decoder chosen at the hand-over
  would have made the request wait for all of it. So the comparison errs towards no regret.
* A decoder's load in a second: the mean of the whole waits of the requests that were handed over to it in
  that second, of the same label, model and connector.
* Regret: felt minus the least load of the other decoders, not less than 0; not known where no other decoder
  was handed a request in that second.

It is what a router would save that knows the loads, so at most what one can save. The named question
`regret` says the same of stored requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvscope.steps import BY_NAME

SECOND_NS = 1_000_000_000
STEPS = ("registration.admit", "registration.blocks", "readiness.admit")
"""Where a request waits for room on its decoder."""

_CAPACITY = frozenset(BY_NAME[name].code for name in STEPS)
_PREFILL = BY_NAME["prefill.compute"].code

HELD_S = 120
"""How long after a second its requests are waited for: one is told of when its last token is out."""
MAX_HELD = 50_000
"""Requests kept, at most; beyond it the oldest second is judged early."""

Group = tuple[str, ...]


class HandOver(NamedTuple):
    """A request at the end of its prefill."""

    second: int
    """Unix time."""
    felt_ns: int
    whole_ns: int


class Judged(NamedTuple):
    """A request of which the regret is known."""

    group: Group
    d_engine: str
    regret_ns: int


def hand_over(row: Mapping[str, Any]) -> HandOver | None:
    """The hand-over of a row of `requests`; None where it is not considered."""
    if not row["p_engine"] or not row["d_engine"] or row["ttft_ns"] is None or row["unknown_ns"]:
        return None
    waterfall = row["waterfall"] or ()
    ends = [i["from_ns"] + i["ns"] for i in waterfall if i["step"] == _PREFILL]
    if not ends or row["outcome"] == "in flight":
        return None
    at_ns = max(ends)
    waits = [i for i in waterfall if i["step"] in _CAPACITY]
    felt_ns = sum(max(0, i["from_ns"] + i["ns"] - max(i["from_ns"], at_ns)) for i in waits if i["critical"])
    return HandOver((row["arrived_at_ns"] + at_ns) // SECOND_NS, felt_ns, sum(i["ns"] for i in waits))


@dataclass(slots=True)
class _Second:
    """What was handed over in one second, by group and decoder: (felt, whole)."""

    waits: dict[Group, dict[str, list[tuple[int, int]]]] = field(default_factory=dict)
    requests: int = 0


class Regrets:
    """Judges requests as they are told of, each second once. Not thread-safe.

    Args:
        held_s: seconds that a second is kept open for requests that are told of late.
        most: requests kept.
    """

    def __init__(self, held_s: int = HELD_S, most: int = MAX_HELD) -> None:
        self._held_s = held_s
        self._most = most
        self._open: dict[int, _Second] = {}
        self._held = 0
        self._judged_before = -1
        """Seconds before this one are closed: what comes in late is left out."""
        self._ready: deque[Judged] = deque()

    def add(self, row: Mapping[str, Any], group: Group, now_s: float) -> None:
        """Take a row of `requests` that is over; `now_s` is Unix time."""
        found = hand_over(row)
        if found is None or found.second < self._judged_before or found.second > now_s + self._held_s:
            return
        second = self._open.setdefault(found.second, _Second())
        waits = second.waits.setdefault(group, {})
        waits.setdefault(row["d_engine"], []).append((found.felt_ns, found.whole_ns))
        second.requests += 1
        self._held += 1
        while self._held > self._most:
            self._close(min(self._open))

    def judged(self, now_s: float) -> Iterator[Judged]:
        """The requests that were judged since the last call, each once."""
        for second in sorted(s for s in self._open if s + 1 + self._held_s <= now_s):
            self._close(second)
        while self._ready:
            yield self._ready.popleft()

    def _close(self, number: int) -> None:
        second = self._open.pop(number)
        self._held -= second.requests
        self._judged_before = max(self._judged_before, number + 1)
        for group, waits in second.waits.items():
            self._ready.extend(_judge(group, waits))


def _judge(group: Group, waits: dict[str, list[tuple[int, int]]]) -> Iterator[Judged]:
    loads = sorted(
        (sum(whole for _, whole in found) // len(found), engine) for engine, found in waits.items()
    )
    if len(loads) < 2:
        return
    for engine, found in waits.items():
        least = loads[0][0] if loads[0][1] != engine else loads[1][0]
        for felt, _ in found:
            yield Judged(group, engine, max(0, felt - least))
