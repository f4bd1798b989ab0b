"""Simulated engines under a steady load, recorded into real rings as it goes on: for what needs a busy fleet.

    with traffic(Plan(in_flight=1000, per_s=33), rings, folder): ...

The past comes first: requests as if the load had been there for a while. Then it goes on in real time, so
that about as many requests as planned are in flight at any moment. Most generate; some wait in one step
for long, some are never asked for by D, some are read again or lost. A seed gives the same requests.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvscope import events as ev
from kvscope.demo import supervise
from kvscope.demo.simulate import LEASE_NS, RecordedEngine, SimulatedEngine, Simulation, Truth
from kvscope.errors import KvscopeError

SECOND = 1_000_000_000
TICK_S = 0.05
MIN_SLOTS = 4096

ABANDONED, RECOMPUTED, STALLED = 0.01, 0.01, 0.09
"""The parts of all requests that D never turns to, that it computes anew, and that wait long in one step."""
STALLS = {
    "push": ("prefill.queue", "prefill.blocks", "registration.admit", "registration.notify", "transfer.wire"),
    "pull": (
        "prefill.queue",
        "registration.admit",
        "registration.blocks",
        "transfer.dispatch",
        "transfer.wire",
    ),
    "bidirectional": ("prefill.queue", "registration.admit", "transfer.dispatch", "transfer.wire"),
}
MEAN_TTFT_S = 0.3
"""Without stalls."""
TURNS = 0.75
"""The part of a bidirectional conversation's turns that are followed by another."""
KEPT_NS = 60 * SECOND
BYTES_PER_TOKEN = 128 << 10
SLOW_WIRE = 8.0
LOST_BEFORE_NS = 20 * SECOND
"""How long before the present the one engine that is gone was killed."""


@dataclass(frozen=True)
class Plan:
    """What the fleet is to look like."""

    modes: tuple[str, ...] = ("push", "pull")
    """Of the pairs of engines, in turn; a P and a D of one mode make a pair."""
    engines: int = 4
    """Prefill engines, and as many decode engines."""
    in_flight: int = 1000
    recent: int = 10_000
    """Requests that are over when the present begins, at least."""
    per_s: float = 33.0
    """Requests that arrive in a second, on average."""
    seed: int = 0
    sequential: bool = False
    """Push: D is asked only when P has answered."""
    lost: bool = True
    """One more decode engine was killed a moment ago, with its requests."""

    @property
    def mean_s(self) -> float:
        """How long a request takes, for so many to be in flight (Little's law)."""
        return self.in_flight / self.per_s

    @property
    def past_ns(self) -> int:
        """The past that is recorded: until all but the longest requests of its beginning are over."""
        return round((self.recent / self.per_s + 2 * self.mean_s) * SECOND)


class Fleet:
    """The engines of a plan. Times are CLOCK_MONOTONIC; the present begins at `now_ns`."""

    def __init__(self, plan: Plan, directory: Path, now_ns: int) -> None:
        self.plan = plan
        self.requests = 0
        self._random = random.Random(plan.seed)
        self._lost_at_ns = now_ns - LOST_BEFORE_NS
        self._next_ns = self._next_sample_ns = now_ns - plan.past_ns
        modes = [plan.modes[i % len(plan.modes)] for i in range(plan.engines)]
        ps = [SimulatedEngine(f"sim-p{i}-{mode}", mode) for i, mode in enumerate(modes)]
        ds = [SimulatedEngine(f"sim-d{i}-{mode}", mode) for i, mode in enumerate(modes)]
        self._lost = SimulatedEngine(f"sim-d{plan.engines}-{modes[0]}", modes[0]) if plan.lost else None
        self._pairs = [
            Simulation(ps[i].mode, plan.seed * 1000 + i * 100 + j, engines=(ps[i], d))
            for i in range(plan.engines)
            for j, d in enumerate([*ds, self._lost] if self._lost else ds)
            if d.mode == ps[i].mode
        ]
        for simulation in self._pairs:
            simulation.bytes_per_token, simulation.kept_ns = BYTES_PER_TOKEN, KEPT_NS
        next(pair for pair in self._pairs[::-1] if pair.d is not self._lost).wire_factor = SLOW_WIRE
        self._directory = directory
        self._engines = [*ps, *ds, *([self._lost] if self._lost else [])]
        self._recorded: dict[str, RecordedEngine] = {}
        self._turns: list[tuple[int, int, Simulation, Truth]] = []
        """Bidirectional: when a conversation goes on, and what it goes on from."""

    def run_until(self, now_ns: int) -> None:
        """Let requests arrive, and record what has happened, up to a moment."""
        while self._next_ns <= now_ns:
            self._arrival(self._next_ns)
            self._next_ns += round(self._random.expovariate(self.plan.per_s) * SECOND)
        while self._next_sample_ns <= now_ns:
            self._sample(self._next_sample_ns)
            self._next_sample_ns += SECOND
        for engine in self._engines:
            recorded = self._recorded.get(engine.engine)
            if recorded is None:
                recorded = self._recorded[engine.engine] = self._record(engine)
            recorded.write(min(now_ns, self._lost_at_ns) if engine is self._lost else now_ns)
        if self._lost and now_ns >= self._lost_at_ns:
            self._recorded.pop(self._lost.engine).close()
            self._pairs = [pair for pair in self._pairs if pair.d is not self._lost]
            self._engines.remove(self._lost)
            self._lost = None

    def close(self) -> None:
        for recorded in self._recorded.values():
            recorded.close()

    def _record(self, engine: SimulatedEngine) -> RecordedEngine:
        """Make the engine's rings, in which all of its past has room, the texts too."""
        most = max(len(engine.scheduler.events), len(engine.worker.events), MIN_SLOTS)
        return RecordedEngine(engine, self._directory, 1 << (2 * most - 1).bit_length())

    # --- requests --------------------------------------------------------------------------------

    def _arrival(self, at: int) -> None:
        """One request, of a kind and between engines as they come."""
        self.requests += 1
        draw, name = self._random.random(), f"{self._random.getrandbits(128):032x}"
        if self._turns and self._turns[0][0] <= at:
            _, _, pair, earlier = heapq.heappop(self._turns)
            self._stall(pair, draw)
            self._follow(pair, pair.pull(name, at, earlier))
            return
        # Some pairs get more than others: the square leans to the first.
        pair = self._pairs[int(self._random.random() ** 1.3 * len(self._pairs))]
        self._stall(pair, draw)
        if pair.d is self._lost:
            self._lose(pair, name, at)
        elif draw < ABANDONED:
            pair.abandon(name, at)
        elif draw < ABANDONED + RECOMPUTED and pair.mode != "push":
            pair.recompute(name, at)
        else:
            self._follow(pair, pair.request(name, at, sequential=self.plan.sequential))

    def _stall(self, pair: Simulation, draw: float) -> None:
        """How long the pair's next request is to generate, and to wait in one step, if it is one of those."""
        mean_s = self.plan.mean_s
        waits_s = STALLED * 0.7 * mean_s + ABANDONED * LEASE_NS / SECOND
        generate_s = self._random.gammavariate(2, max(0.1, mean_s - MEAN_TTFT_S - waits_s) / 2)
        pair.stalls = {"decode.generate": round(generate_s * SECOND)}
        if draw > 1 - STALLED:
            step = self._random.choice(STALLS[pair.mode])
            pair.stalls[step] = round(self._random.uniform(0.2, 1.2) * mean_s * SECOND)

    def _follow(self, pair: Simulation, turn: Truth) -> None:
        """Bidirectional: the next turn of the conversation, or the end of what D kept for it."""
        if pair.mode != "bidirectional":
            return
        if self._random.random() < TURNS:
            at = turn.end_ns + round(self._random.uniform(1, 0.8 * KEPT_NS / SECOND) * SECOND)
            heapq.heappush(self._turns, (at, self.requests, pair, turn))
        else:
            pair.d.worker.add(turn.end_ns + KEPT_NS, ev.LEASE_EXPIRED, turn.d_request, 0)

    def _lose(self, pair: Simulation, name: str, at: int) -> None:
        """A request whose D is killed: nothing of it is recorded after that but the end of P's lease."""
        rings = pair.rings()
        before = [len(ring.events) for ring in rings]
        p_request = pair.request(name, at).p_request
        over = self._lost_at_ns
        for ring, count in zip(rings, before, strict=True):
            ring.events[count:] = [event for event in ring.events[count:] if event.t_ns <= over]
        kept = {event.kind for event in pair.p.worker.events[before[1] :]}
        if ev.LEASE_ARMED in kept and ev.LEASE_RELEASED not in kept:
            pair.expire(p_request)

    def _sample(self, at: int) -> None:
        """What every engine says of itself once a second."""
        for engine in self._engines:
            if engine is self._lost and at > self._lost_at_ns:
                continue
            steps = self._random.randint(55, 75)
            for ring, tokens in (
                (engine.scheduler, steps * self._random.randint(20, 60)),
                (engine.worker, -1),
            ):
                hooks_ns = steps * self._random.randint(30_000, 60_000)
                ring.add(at, ev.ENGINE_SAMPLE, "", steps, tokens, hooks_ns, SECOND)


# --- in a process of its own ---------------------------------------------------------------------


@contextlib.contextmanager
def traffic(plan: Plan, rings: Path, folder: Path) -> Iterator[None]:
    """Record the plan into `rings` in another process, from when its past is there until the end.

    Raises:
        KvscopeError: it can't be recorded, with the end of its log, which lies in `folder`.
    """
    log = folder / "traffic.log"
    command = [sys.executable, "-m", __name__, str(rings), json.dumps(dataclasses.asdict(plan))]
    process = supervise.start(command, 2, log, answers=True)
    try:
        assert process.stdout
        if not process.stdout.readline():
            raise KvscopeError(f"nothing could be simulated: {log.read_text(errors='replace')[-2000:]}")
        yield
    finally:
        supervise.stop(process)


def main(arguments: list[str]) -> None:
    rings, plan = Path(arguments[0]), json.loads(arguments[1])
    now_ns = time.monotonic_ns()
    fleet = Fleet(Plan(**{**plan, "modes": tuple(plan["modes"])}), rings, now_ns)
    fleet.run_until(now_ns)
    fleet.run_until(time.monotonic_ns())  # that took seconds
    print("recording", flush=True)
    while True:
        time.sleep(TICK_S)
        fleet.run_until(time.monotonic_ns())


if __name__ == "__main__":
    main(sys.argv[1:])
