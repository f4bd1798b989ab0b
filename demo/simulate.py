"""Simulated engines: event streams of push, pull, bidirectional and local requests with known durations.

For what real engines can't produce here (scale, many hosts, GPU timings) and for property tests: every
request comes with the true duration of each step, so that attribution can be checked to the nanosecond.
Whatever is made of these events is called simulated where it is shown.
"""

from __future__ import annotations

import random
import time
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path

from kvscope import events as ev
from kvscope.events import text_key
from kvscope.ring import About, Event, RingWriter

MS = 1_000_000
TEXTS_KEPT = 1000
LEASE_NS = 30_000 * MS
"""What P's leases last without a renewal."""
RENEWAL_NS = 5_000 * MS
BLOCKS = 16384
"""KV blocks of an engine, of 16 tokens."""
BYTES_PER_TOKEN = 1024
BYTES_PER_NS = 10.0
"""The simulated wire: 10 GB/s, the same for every transfer, so that a pair's best rate is its true one."""


@dataclass
class SimulatedRing:
    """The ring of one connector role of a simulated engine."""

    about: About
    ring_id: bytes
    events: list[Event] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    shift_ns: int = 0
    """This host's clock minus the true time."""
    _texts_kept: int = 0

    def add(self, t_ns: int, kind: int, request: str, *args: int | str) -> None:
        """Record one event at a true time; texts among the arguments become their keys."""
        numbers = tuple(self.key(a) if isinstance(a, str) else a for a in args)
        padded = numbers + (0,) * (ev.MAX_FIELDS - len(numbers))
        self.events.append(Event(len(self.events) + 1, kind, t_ns + self.shift_ns, self.key(request), padded))

    def at(self, t_ns: int) -> int:
        """A true time on this host's clock, for fields that name a moment."""
        return t_ns + self.shift_ns

    def key(self, text: str) -> int:
        if not text:
            return 0
        key = text_key(text)
        self.texts[key] = text
        return key

    def forget_texts(self) -> None:
        """Drop the texts that no event uses, once they are many."""
        if len(self.texts) > self._texts_kept:
            used = {number for event in self.events for number in (event.key, *event.args)}
            self.texts = {key: text for key, text in self.texts.items() if key in used}
            self._texts_kept = 2 * len(self.texts) + TEXTS_KEPT


class SimulatedEngine:
    """A scheduler and one worker."""

    def __init__(
        self, engine: str, mode: str, *, boot: str = "simulated", shift_ns: int = 0, label: str = "simulated"
    ) -> None:
        self.engine = engine
        self.mode = mode
        self._transfers = 0
        fingerprint = {
            "model": "simulated/tiny",
            "connector": "NixlPushConnector" if mode == "push" else "NixlPullConnector",
            "transfer_mode": "push" if mode == "push" else "pull",
            "extra_config": {"bidirectional_kv_xfer": mode == "bidirectional"},
            "vllm": "simulated",
            "block_size": 16,
            "num_blocks": BLOCKS,
        }
        self.scheduler, self.worker = (
            SimulatedRing(
                About(
                    engine,
                    source,
                    0,
                    label,
                    host=f"host-{boot}",
                    boot_id=boot,
                    kvscope="simulated",
                    fingerprint=fingerprint,
                ),
                text_key(f"{engine}/{source}").to_bytes(16, "little"),
                shift_ns=shift_ns,
            )
            for source in (ev.SCHEDULER, ev.WORKER)
        )

    def next_transfer(self) -> int:
        self._transfers += 1
        return self._transfers


@dataclass
class Truth:
    """What happened in one simulated request."""

    name: str
    connector: str
    ttft_ns: int
    steps: dict[str, int]
    lead_ns: int | None = None
    end_ns: int = 0
    d_request: str = ""
    p_request: str = ""


class Simulation:
    """A P and a D engine and requests between them, in true time (nanoseconds)."""

    def __init__(
        self,
        mode: str,
        seed: int = 0,
        *,
        d_shift_ns: int = 0,
        pair: int = 0,
        engines: tuple[SimulatedEngine, SimulatedEngine] | None = None,
    ) -> None:
        """`d_shift_ns` other than 0 puts D on another host whose clock is off by as much.

        With `engines` the requests go between these, which may be part of other simulations too.
        """
        self.mode = mode
        self.random = random.Random(seed)
        d_boot = "simulated-d" if d_shift_ns else "simulated"
        self.p, self.d = engines or (
            SimulatedEngine(f"sim-p{pair}-{mode}", mode),
            SimulatedEngine(f"sim-d{pair}-{mode}", mode, boot=d_boot, shift_ns=d_shift_ns),
        )
        self.stalls: dict[str, int] = {}
        """Nanoseconds that requests stay longer in a step, by its name; change it between requests."""
        self.wire_factor = 1.0
        """How much slower than the full rate this pair's transfers are."""
        self.bytes_per_token = BYTES_PER_TOKEN
        self.kept_ns = 480_000 * MS
        """Bidirectional: how long D keeps a turn's blocks."""
        self._armed_ns = 0

    def rings(self) -> list[SimulatedRing]:
        return [ring for engine in (self.p, self.d) for ring in (engine.scheduler, engine.worker)]

    def _ms(self, low: float, high: float) -> int:
        return self.random.randint(round(low * MS), round(high * MS))

    def _stay(self, step: str, low: float, high: float) -> int:
        """How long a request stays in a step: drawn from `low` to `high` ms, and its stall."""
        return self._ms(low, high) + self.stalls.get(step, 0)

    def ids(self, name: str) -> tuple[str, str]:
        p_suffix, d_suffix = (f"{self.random.getrandbits(32):08x}" for _ in range(2))
        return f"cmpl-{name}-0-{p_suffix}", f"cmpl-{name}-0-{d_suffix}"

    # --- parts -----------------------------------------------------------------------------------

    def _arrive(
        self,
        engine: SimulatedEngine,
        request: str,
        at: int,
        flags: int,
        tokens: int,
        peer: str = "",
        peer_request: str = "",
        offered: int = ev.UNKNOWN,
    ) -> tuple[int, int]:
        """Frontend and scheduler take the request; returns when, and the frontend's duration."""
        frontend = self._ms(0.5, 3)
        engine.scheduler.add(
            at + frontend,
            ev.REQUEST_ARRIVED,
            request,
            engine.scheduler.at(at),
            flags,
            tokens,
            peer,
            peer_request,
            offered,
            0,
            0,
            0,
            64,
        )
        return at + frontend, frontend

    def _prefill(
        self, request: str, at: int, tokens: int, steps: dict[str, int], flags: int, **peer: object
    ) -> int:
        ring = self.p.scheduler
        t, steps["prefill.frontend"] = self._arrive(self.p, request, at, flags, tokens, **peer)  # type: ignore[arg-type]
        steps["prefill.queue"] = self._stay("prefill.queue", 0, 20)
        t += steps["prefill.queue"]
        ring.add(t, ev.REQUEST_CONSIDERED, request, 0, 0, 0)
        return self._compute(request, t, tokens, steps)

    def _compute(self, request: str, t: int, tokens: int, steps: dict[str, int]) -> int:
        ring = self.p.scheduler
        steps["prefill.blocks"] = self._stay("prefill.blocks", 0, 2)
        t += steps["prefill.blocks"]
        ring.add(t, ev.REQUEST_SCHEDULED, request, tokens // 16, 0, 1, 0)
        ring.add(t + 1000, ev.PREFILL_CHUNK, request, tokens, tokens, 1)
        steps["prefill.compute"] = self._stay("prefill.compute", 20, 120)
        t += steps["prefill.compute"]
        ring.add(
            t,
            ev.REQUEST_FINISHED,
            request,
            "FINISHED_LENGTH_CAPPED",
            tokens,
            1,
            tokens,
            0,
            0,
            0,
            1,
            tokens // 16,
        )
        self._keep(request, t)
        return t

    def _admit(self, request: str, t: int, tokens: int, steps: dict[str, int]) -> int:
        ring = self.d.scheduler
        steps["registration.admit"] = self._stay("registration.admit", 0, 15)
        t += steps["registration.admit"]
        ring.add(t, ev.REQUEST_CONSIDERED, request, 0, tokens, 1)
        steps["registration.blocks"] = self._stay("registration.blocks", 0, 3)
        t += steps["registration.blocks"]
        ring.add(t, ev.BLOCKS_ALLOCATED, request, tokens // 16, tokens, 1)
        return t

    def _move(
        self,
        engine: SimulatedEngine,
        request: str,
        t: int,
        write: bool,
        peer: str,
        tokens: int,
        steps: dict[str, int],
        prefix: tuple[str, str, str],
    ) -> int:
        """Post, wire, detect; returns when the poll saw it done. The wire is always at the full rate."""
        post, wire, detect = prefix
        number, ring = engine.next_transfer(), engine.worker
        steps[post] = self._stay(post, 0.2, 2)
        posted = t + steps[post]
        ring.add(posted, ev.TRANSFER_POSTED, request, number, int(write), ring.at(t), 0, peer)
        size = tokens * self.bytes_per_token
        # Whole time from the post call's beginning is at the wire's rate, so bytes/rate is exact.
        wire_end = max(posted, t + round(size * self.wire_factor / BYTES_PER_NS) + self.stalls.get(wire, 0))
        steps[wire] = wire_end - posted
        steps[detect] = self._stay(detect, 0, 30)
        seen = wire_end + steps[detect]
        last_poll = max(posted, wire_end - self._ms(0, 5))
        ring.add(
            seen,
            ev.TRANSFER_DONE,
            request,
            number,
            ring.at(last_poll),
            ring.at(seen),
            ring.at(t),
            (posted - t) // 1000,
            (seen - t) // 1000,
            size,
            4,
        )
        return seen

    def _decode(
        self, request: str, t: int, tokens: int, steps: dict[str, int], failed: bool = False
    ) -> tuple[int, int]:
        """Reported, promoted, first token, end; returns first token and end. A failed load is recomputed."""
        ring = self.d.scheduler
        steps["readiness.report"] = self._stay("readiness.report", 0.2, 8)
        t += steps["readiness.report"]
        ring.add(t, ev.LOAD_REPORTED, request, int(failed))
        steps["readiness.promote"] = self._stay("readiness.promote", 0.1, 3)
        t += steps["readiness.promote"]
        deferred = 0
        if self.random.random() < 0.2:
            ring.add(t, ev.PROMOTION_DEFERRED, request)
            deferred = ring.at(t)
            steps["readiness.admit"] = self._stay("readiness.admit", 1, 30)
            t += steps["readiness.admit"]
        computed = 0 if failed else tokens - 1
        ring.add(t, ev.REQUEST_SCHEDULED, request, tokens // 16 + 1, computed, 1, 0, deferred)
        steps["decode.first_step"] = self._stay("decode.first_step", 5, 25)
        if failed:
            steps["decode.first_step"] += self._ms(40, 240)
        first = t + steps["decode.first_step"]
        ring.add(first, ev.FIRST_TOKEN, request, 1)
        outputs, token_ns = self.random.randint(2, 64), self._ms(5, 10)
        outputs += self.stalls.get("decode.generate", 0) // token_ns
        end = first + outputs * token_ns
        lease = int(self.mode == "bidirectional")
        ring.add(
            end,
            ev.REQUEST_FINISHED,
            request,
            "FINISHED_LENGTH_CAPPED",
            tokens,
            outputs,
            tokens + outputs,
            0,
            0 if failed else tokens,
            0,
            lease,
            tokens // 16 + 4,
        )
        if lease:
            self.d.worker.add(end + MS, ev.LEASE_ARMED, request, self.d.worker.at(end + self.kept_ns))
        return first, end

    def _keep(self, request: str, t: int) -> None:
        """P keeps the request's blocks for D."""
        self._armed_ns = t + 200_000
        self.p.worker.add(self._armed_ns, ev.LEASE_ARMED, request, self.p.worker.at(t + LEASE_NS))

    def _renew(self, request: str, until: int) -> None:
        """D's heartbeats, as long as it wants P's blocks."""
        for t in range(self._armed_ns + RENEWAL_NS, until, RENEWAL_NS):
            self.p.worker.add(t, ev.LEASE_RENEWED, request, self.p.worker.at(t + LEASE_NS))

    def _free(self, request: str, t: int) -> None:
        self._renew(request, t)
        self.p.worker.add(t, ev.LEASE_RELEASED, request)
        self.p.scheduler.add(t + MS, ev.SEND_REPORTED, request)

    # --- requests --------------------------------------------------------------------------------

    def request(self, name: str, at: int, **options: bool) -> Truth:
        """One request of the simulation's mode, arriving at true time `at`."""
        return self.push(name, at, **options) if self.mode == "push" else self.pull(name, at)

    def pull(self, name: str, at: int, earlier: Truth | None = None) -> Truth:
        """Pull; with `earlier`, P first reads back what D kept of that turn (bidirectional)."""
        p_request, d_request = self.ids(name)
        tokens = self.random.randint(100, 4000)
        steps: dict[str, int] = {}
        if earlier is None:
            t = self._prefill(p_request, at, tokens, steps, ev.FLAG_REMOTE_DECODE)
        else:
            t = self._reuse(p_request, at, tokens, steps, earlier)
        done = t
        t += self._ms(1, 10)
        t, _ = self._arrive(
            self.d, d_request, t, ev.FLAG_REMOTE_PREFILL, tokens, self.p.engine, p_request, tokens
        )
        steps["registration.route"] = t - done
        t = self._admit(d_request, t, tokens, steps)
        steps["transfer.dispatch"] = self._stay("transfer.dispatch", 0.1, 20)
        t += steps["transfer.dispatch"]
        self.d.worker.add(t, ev.LOAD_STARTED, d_request, self.p.engine, p_request, tokens // 16)
        if self.random.random() < 0.2:
            t = self._handshake(self.d, d_request, t, self.p.engine, steps, p_request, tokens)
        names = ("transfer.post", "transfer.wire", "readiness.detect")
        t = self._move(self.d, d_request, t, False, self.p.engine, tokens, steps, names)
        self.p.worker.add(t + 100_000, ev.NOTIFICATION_RECEIVED, p_request, 1)
        self._free(p_request, t + 200_000)
        self.d.worker.add(t + 10_000, ev.LOAD_DONE, d_request, 0)
        first, end = self._decode(d_request, t, tokens, steps)
        return Truth(name, self.mode, first - at, steps, end_ns=end, d_request=d_request, p_request=p_request)

    def abandon(self, name: str, at: int) -> Truth:
        """A request that D never turns to: P keeps its blocks until the lease expires."""
        p_request, _ = self.ids(name)
        steps: dict[str, int] = {}
        self._prefill(p_request, at, self.random.randint(100, 4000), steps, ev.FLAG_REMOTE_DECODE)
        return Truth(name, self.mode, 0, steps, end_ns=self.expire(p_request))

    def expire(self, p_request: str) -> int:
        """P's latest lease is that of this request and runs out; returns when its blocks are free."""
        end = self._armed_ns + LEASE_NS
        self.p.worker.add(end, ev.LEASE_EXPIRED, p_request, 0)
        self.p.scheduler.add(end + MS, ev.SEND_REPORTED, p_request)
        return end + MS

    def recompute(self, name: str, at: int) -> Truth:
        """Pull: the READ fails, and D computes the prompt that P had computed."""
        p_request, d_request = self.ids(name)
        tokens = self.random.randint(100, 4000)
        steps: dict[str, int] = {}
        t = self._prefill(p_request, at, tokens, steps, ev.FLAG_REMOTE_DECODE) + self._ms(1, 10)
        t, _ = self._arrive(
            self.d, d_request, t, ev.FLAG_REMOTE_PREFILL, tokens, self.p.engine, p_request, tokens
        )
        t = self._admit(d_request, t, tokens, steps) + self._ms(0.1, 20)
        worker = self.d.worker
        worker.add(t, ev.LOAD_STARTED, d_request, self.p.engine, p_request, tokens // 16)
        begin, t = t, t + self._ms(0.2, 2)
        transfer = self.d.next_transfer()
        worker.add(t, ev.TRANSFER_POSTED, d_request, transfer, 0, worker.at(begin), 0, self.p.engine)
        t += self._ms(20, 900)
        worker.add(t, ev.FAILURE, d_request, "transfer_failed", self.p.engine)
        worker.add(t + 10_000, ev.LOAD_DONE, d_request, 1)
        self._free(p_request, t + MS)
        first, end = self._decode(d_request, t, tokens, steps, failed=True)
        return Truth(name, self.mode, first - at, steps, end_ns=end, d_request=d_request)

    def _handshake(
        self,
        engine: SimulatedEngine,
        request: str,
        t: int,
        peer: str,
        steps: dict[str, int],
        peer_request: str,
        tokens: int,
    ) -> int:
        ring = engine.worker
        ring.add(t, ev.HANDSHAKE_WAITED, request, peer)
        steps["registration.handshake"] = self._stay("registration.handshake", 5, 200)
        ring.add(
            t + steps["registration.handshake"], ev.HANDSHAKE_FINISHED, "", peer, ring.at(t + 1000), 1, 0, 0
        )
        t += steps["registration.handshake"]
        again = self._ms(0.1, 5)
        steps["transfer.dispatch"] += again
        ring.add(t + again, ev.LOAD_STARTED, request, peer, peer_request, tokens // 16)
        return t + again

    def _reuse(self, p_request: str, at: int, tokens: int, steps: dict[str, int], earlier: Truth) -> int:
        """P's side of a later turn: blocks for what D kept, READ from D, then the rest of the prefill."""
        flags = ev.FLAG_REMOTE_DECODE | ev.FLAG_REUSE_OFFERED
        t, steps["prefill.frontend"] = self._arrive(
            self.p, p_request, at, flags, tokens, self.d.engine, earlier.d_request, tokens // 2
        )
        steps["prefill.queue"] = self._stay("prefill.queue", 0, 5)
        t += steps["prefill.queue"]
        self.p.scheduler.add(t, ev.REQUEST_CONSIDERED, p_request, 0, tokens // 2, 1)
        steps["prefill.blocks"] = self._stay("prefill.blocks", 0, 2)
        t += steps["prefill.blocks"]
        self.p.scheduler.add(t, ev.BLOCKS_ALLOCATED, p_request, tokens // 16, tokens // 2, 1)
        steps["prefill.reuse_dispatch"] = self._stay("prefill.reuse_dispatch", 0.1, 8)
        t += steps["prefill.reuse_dispatch"]
        self.p.worker.add(t, ev.LOAD_STARTED, p_request, self.d.engine, earlier.d_request, tokens // 32)
        names = ("prefill.reuse_post", "prefill.reuse_wire", "prefill.reuse_detect")
        t = self._move(self.p, p_request, t, False, self.d.engine, tokens // 2, steps, names)
        self.p.worker.add(t + 10_000, ev.LOAD_DONE, p_request, 0)
        self.d.worker.add(t + 50_000, ev.NOTIFICATION_RECEIVED, earlier.d_request, 1)
        self.d.worker.add(t + 60_000, ev.LEASE_RELEASED, earlier.d_request)
        self.d.scheduler.add(t + MS, ev.SEND_REPORTED, earlier.d_request)
        steps["prefill.reuse_report"] = self._stay("prefill.reuse_report", 0.2, 5)
        t += steps["prefill.reuse_report"]
        self.p.scheduler.add(t, ev.LOAD_REPORTED, p_request, 0)
        steps["prefill.reuse_promote"] = self._stay("prefill.reuse_promote", 0.1, 3)
        t += steps["prefill.reuse_promote"]
        self.p.scheduler.add(t, ev.REQUEST_SCHEDULED, p_request, tokens // 16, tokens // 2, 1, 0)
        steps["prefill.compute"] = self._stay("prefill.compute", 10, 60)
        t += steps["prefill.compute"]
        self.p.scheduler.add(
            t,
            ev.REQUEST_FINISHED,
            p_request,
            "FINISHED_LENGTH_CAPPED",
            tokens,
            1,
            tokens,
            0,
            tokens // 2,
            0,
            1,
            tokens // 16,
        )
        self._keep(p_request, t)
        return t

    def push(self, name: str, at: int, sequential: bool = False) -> Truth:
        """Push, both legs sent at once, or D's after P has answered."""
        p_request, d_request = self.ids(name)
        tokens = self.random.randint(100, 4000)
        prefill: dict[str, int] = {}
        finished = self._prefill(p_request, at, tokens, prefill, ev.FLAG_REMOTE_DECODE)
        registration: dict[str, int] = {}
        sent = finished + self._ms(1, 5) if sequential else at + self._ms(0.1, 1)
        t, _ = self._arrive(
            self.d, d_request, sent, ev.FLAG_REMOTE_PREFILL, tokens, self.p.engine, f"{name}-unknown"
        )
        registration["registration.route"] = t - (finished if sequential else at)
        t = self._admit(d_request, t, tokens, registration)
        self.d.worker.add(
            t + 50_000, ev.LOAD_STARTED, d_request, self.p.engine, f"{name}-unknown", tokens // 16
        )
        self.d.worker.add(t + 80_000, ev.REGISTRATION_SENT, d_request, self.p.engine)
        registration["registration.notify"] = self._stay("registration.notify", 0.2, 40)
        registered = t + registration["registration.notify"]
        self.p.worker.add(registered, ev.REGISTRATION_RECEIVED, d_request, self.d.engine)
        steps = prefill | registration if sequential else registration if registered > finished else prefill
        t = max(finished, registered)
        steps = dict(steps)
        steps["transfer.dispatch"] = self._stay("transfer.dispatch", 0.1, 50)
        t += steps["transfer.dispatch"]
        self.p.worker.add(t, ev.PUSH_MATCHED, p_request, self.d.engine, d_request)
        names = ("transfer.post", "transfer.wire", "readiness.detect")
        t = self._move(self.p, p_request, t, True, self.d.engine, tokens, steps, names)
        self.p.worker.add(t + 10_000, ev.SEND_DONE, p_request, 0)
        self._free(p_request, t + 20_000)
        steps["readiness.signal"] = self._stay("readiness.signal", 0.1, 10)
        t += steps["readiness.signal"]
        self.d.worker.add(t, ev.NOTIFICATION_RECEIVED, d_request, 1)
        self.d.worker.add(t + 50_000, ev.LOAD_DONE, d_request, 0)
        first, end = self._decode(d_request, t, tokens, steps)
        return Truth(name, "push", first - at, steps, finished - registered, end, d_request, p_request)

    def local(self, name: str, at: int) -> Truth:
        """A request that D serves alone."""
        request = self.ids(name)[1]
        tokens = self.random.randint(10, 500)
        steps: dict[str, int] = {}
        ring = self.d.scheduler
        t, steps["prefill.frontend"] = self._arrive(self.d, request, at, 0, tokens)
        steps["prefill.queue"] = self._stay("prefill.queue", 0, 9)
        t += steps["prefill.queue"]
        ring.add(t, ev.REQUEST_CONSIDERED, request, 0, 0, 0)
        steps["prefill.blocks"] = self._stay("prefill.blocks", 0, 9)
        t += steps["prefill.blocks"]
        ring.add(t, ev.REQUEST_SCHEDULED, request, tokens // 16, 0, 1, 0)
        steps["prefill.compute"] = self._stay("prefill.compute", 5, 50)
        first = t + steps["prefill.compute"]
        ring.add(first, ev.FIRST_TOKEN, request, 1)
        end = first + self._ms(10, 100)
        ring.add(end, ev.REQUEST_FINISHED, request, "FINISHED_STOPPED", tokens, 8, tokens + 8, 0, 0, 0, 0, 3)
        return Truth(name, "local", first - at, steps, end_ns=end, d_request=request)


class RecordedEngine:
    """The ring files of a simulated engine."""

    def __init__(self, engine: SimulatedEngine, directory: Path, slots: int) -> None:
        self._now_ns = 0
        self._rings = (engine.scheduler, engine.worker)
        self.scheduler, self.worker = (
            RingWriter(directory, ring.about, slots, clock=lambda: self._now_ns) for ring in self._rings
        )

    def write(self, until_ns: int | None = None) -> int:
        """Write what was simulated, in order of time; returns how many events that were.

        Those after `until_ns`, where it is given, are kept for a later call.
        """
        written = 0
        for ring, writer in zip(self._rings, (self.scheduler, self.worker), strict=True):
            ring.events.sort(key=lambda e: e.t_ns)
            count = len(ring.events)
            if until_ns is not None:
                count = bisect_right(ring.events, until_ns, key=lambda e: e.t_ns)
            for event in ring.events[:count]:
                self._now_ns = event.t_ns
                for number in (event.key, *event.args):
                    writer.text(ring.texts.get(number))
                writer.record(event.kind, event.key, *event.args)
            written += count
            del ring.events[:count]
            ring.forget_texts()
        return written

    def close(self) -> None:
        self.scheduler.close()
        self.worker.close()


class Fleet:
    """A simulated P and D that record into real ring files."""

    def __init__(self, directory: Path, mode: str, slots: int, seed: int = 0) -> None:
        self.simulation = Simulation(mode, seed, pair=seed)
        self.now_ns = time.monotonic_ns()
        """True time at which the next request arrives; starts now."""
        self.events = 0
        self.p, self.d = (
            RecordedEngine(engine, directory, slots) for engine in (self.simulation.p, self.simulation.d)
        )

    def request(self) -> str:
        """Record one request; returns the client's id. The next one arrives a few milliseconds later."""
        name = f"{self.simulation.random.getrandbits(128):032x}"
        self.simulation.request(name, self.now_ns)
        self.now_ns += self.simulation.random.randrange(MS, 10 * MS)
        self.write()
        return name

    def write(self) -> None:
        """Record what was simulated since."""
        self.events += self.p.write() + self.d.write()

    def close(self) -> None:
        self.p.close()
        self.d.close()
