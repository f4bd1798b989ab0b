"""The simulated fleet: as many in flight as planned, of every kind, the same for the same seed."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from pathlib import Path

import pytest

from kvscope import events as ev
from kvscope.attribution import Rates, attribute
from kvscope.demo.traffic import SECOND, Fleet, Plan
from kvscope.join import QUIET_NS, Joiner
from kvscope.ring import RingReader, ring_paths

PLAN = Plan(in_flight=200, recent=1500, per_s=20, seed=3)


class Reading:
    """What a collector would make of the rings in a directory."""

    def __init__(self, directory: Path) -> None:
        self.joiner = Joiner()
        self.readers = [RingReader(path) for path in ring_paths(directory)]
        self.kinds: Counter[int] = Counter()
        self._sources = [
            self.joiner.add_ring(r.ring_id.bytes, r.about, r.wall_ns, r.mono_ns) for r in self.readers
        ]

    def read(self, now_ns: int) -> None:
        for reader, source in zip(self.readers, self._sources, strict=True):
            events = list(reader.events(1 << 20))
            self.kinds.update(event.kind for event in events)
            self.joiner.feed(source, events, reader.texts, now_ns)
        self.over = self.joiner.settled(now_ns + QUIET_NS // 2)

    def steps(self) -> Counter[str]:
        """Where the requests in flight are."""
        found: Counter[str] = Counter()
        for request in self.joiner.live():
            current = attribute(request, self.joiner.clocks, Rates()).current
            leased = request.p is not None and request.p.finished and not request.d
            found["kept" if leased else current.name if current else "decode.generate"] += 1
        return found


def recorded(directory: Path, plan: Plan) -> tuple[Fleet, int]:
    now_ns = time.monotonic_ns()
    fleet = Fleet(plan, directory, now_ns)
    fleet.run_until(now_ns)
    return fleet, now_ns


@pytest.mark.parametrize("modes", [("push", "pull"), ("push", "pull", "bidirectional")])
def test_as_many_are_in_flight_as_planned_and_stay_so(tmp_path: Path, modes: tuple[str, ...]) -> None:
    plan = Plan(modes, 6, in_flight=200, recent=500, per_s=20, seed=3, lost=False)
    fleet, now_ns = recorded(tmp_path, plan)
    with contextlib.closing(fleet):
        reading = Reading(tmp_path)
        reading.read(now_ns)
        assert len(reading.over) >= plan.recent
        for second in range(0, 60, 20):
            now_ns += 20 * SECOND
            fleet.run_until(now_ns)
            reading.read(now_ns)
            assert len(reading.joiner.live()) == pytest.approx(plan.in_flight, rel=0.3), second
        assert sum(reader.lost for reader in reading.readers) == 0


def test_they_wait_in_every_kind_of_step(tmp_path: Path) -> None:
    fleet, now_ns = recorded(tmp_path, Plan(in_flight=400, recent=500, per_s=20, seed=3))
    with contextlib.closing(fleet):
        reading = Reading(tmp_path)
        reading.read(now_ns)
    steps = reading.steps()
    for name in ("prefill.queue", "registration.notify", "transfer.wire", "kept", "decode.generate"):
        assert steps[name], steps
    assert steps["decode.generate"] > len(reading.joiner.live()) / 2
    for kind in (ev.LEASE_EXPIRED, ev.LEASE_RENEWED, ev.FAILURE, ev.HANDSHAKE_FINISHED, ev.ENGINE_SAMPLE):
        assert reading.kinds[kind]


def test_one_engine_is_gone_and_the_others_record(tmp_path: Path) -> None:
    fleet, now_ns = recorded(tmp_path, PLAN)
    with contextlib.closing(fleet):
        alive = {path: RingReader(path).writer_alive() for path in ring_paths(tmp_path)}
        gone = {RingReader(path).about.engine_id for path, lives in alive.items() if not lives}
        assert gone == {"sim-d4-push"}
        fleet.run_until(now_ns + 5 * SECOND)
        last = {path: max(e.t_ns for e in RingReader(path).events(1 << 20)) for path in alive}
        assert all((last[path] > now_ns) == lives for path, lives in alive.items())


def test_a_seed_gives_the_same_requests(tmp_path: Path) -> None:
    def texts(name: str, seed: int) -> set[str]:
        fleet, _ = recorded(tmp_path / name, Plan(in_flight=20, recent=50, per_s=10, seed=seed))
        fleet.close()
        found: set[str] = set()
        for path in ring_paths(tmp_path / name):
            reader = RingReader(path)
            list(reader.events(1 << 20))
            found |= set(reader.texts.values())
        return found

    assert texts("one", 1) == texts("two", 1)
    assert len(texts("three", 2) & texts("four", 1)) < 20, "engines and states alone"


def test_every_pair_moves_at_its_own_rate(tmp_path: Path) -> None:
    """One pair is slow, for which `kvscope top` has a page."""
    fleet, now_ns = recorded(tmp_path, PLAN)
    with contextlib.closing(fleet):
        reading = Reading(tmp_path)
        reading.read(now_ns)
    rates: dict[tuple[str, str], float] = {}
    for request in reading.over:
        for leg in request.legs():
            for transfer in leg.transfers():
                if transfer.done_ns is not None and transfer.begin_ns is not None and transfer.bytes > 0:
                    pair = (leg.engine, transfer.peer)
                    rate = transfer.bytes / (transfer.done_ns - transfer.begin_ns)
                    rates[pair] = max(rates.get(pair, 0.0), rate)
    ordered = sorted(rates.values())
    assert len(ordered) > 6
    assert ordered[0] < ordered[1] / 4
