"""One request's legs -> the critical path -> steps that add up to TTFT, to the nanosecond.

A branch is a list of marks in the order in which things must happen: the step that ends, when it ended
(None: not observed) and how that is known. Between two observed marks lies exactly one step; where the
marks between were not observed, the whole interval is `unknown`. Marks behind the last observed one
have not happened yet: the first of them is the step that a request in flight is in.

The branches meet where both had to be ready (push: prefill finished and registration held by P); the
later one is critical, the other is kept as overlapped, with its lead.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from kvscope.clock import Clocks
from kvscope.legs import Leg, RankSide, Request, Transfer, fingerprint
from kvscope.steps import BY_NAME, ESTIMATED, HOOK, NOT_OBSERVED, POLL, TELEMETRY, Step


class Mark(NamedTuple):
    """A boundary: `step` ends at `t_ns` on the request's clock."""

    step: Step
    t_ns: int | None
    observed: str = HOOK
    crosses: bool = False
    """Between two clocks: the interval that ends here carries their error."""


class Interval(NamedTuple):
    """A stretch of the waterfall; times on the request's clock."""

    step: Step
    start_ns: int
    end_ns: int
    critical: bool
    observed: str
    error_ns: int = 0

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class Breakdown:
    """Where a request's time went. Times are on the clock of its first leg's host."""

    t0_ns: int
    ttft_ns: int | None
    """None while, or when, there is no first token."""
    critical: list[Interval]
    """Disjoint, in order, without gaps: from `t0_ns` to the first token (or the last thing known)."""
    overlapped: list[Interval]
    generate: Interval | None = None
    current: Step | None = None
    """The step that has not ended; None for a request with its first token."""
    lead_ns: int | None = None
    wire_lower_ns: int | None = None
    wire_upper_ns: int | None = None
    rate: float | None = None
    predicted_push_ttft_ns: int | None = None
    predicted_pull_ttft_ns: int | None = None
    clock_error_ns: int = 0
    clamped_ns: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    """Step name -> nanoseconds on the critical path, only for steps that were observed."""

    def class_ns(self, class_: str) -> int:
        return sum(i.ns for i in self.critical if i.step.class_ == class_)


CROSSINGS = 3
"""From process to process, between the end of prefill and D's frontend where a router asks D after P: to P's
API server, to the router, to D's API server. Pulled requests of real engines took 3.1 times P's frontend."""

_S = BY_NAME
_UNKNOWN = _S["unknown"]


class _Load(NamedTuple):
    """Names of the steps of a READ: D's own, or P's reading back from D."""

    dispatch: Step
    handshake: Step
    post: Step
    wire: Step
    detect: Step
    report: Step
    promote: Step
    admit: Step


_PULL = _Load(
    _S["transfer.dispatch"],
    _S["registration.handshake"],
    _S["transfer.post"],
    _S["transfer.wire"],
    _S["readiness.detect"],
    _S["readiness.report"],
    _S["readiness.promote"],
    _S["readiness.admit"],
)
_REUSE = _Load(*(_S[f"prefill.reuse_{name}"] for name in _Load._fields))


class Rates:
    """The fastest rate seen per (posting engine, peer, operation), in bytes per nanosecond.

    A transfer's time is at most post begin → poll that saw it done, so its rate is at least bytes over
    that: the fastest of these is what the pair has been seen to do.
    """

    def __init__(self) -> None:
        self._best: dict[tuple[str, str, bool], float] = {}

    def best(self, engine: str, transfer: Transfer) -> float | None:
        return self._best.get((engine, transfer.peer, bool(transfer.write)))

    def learn(self, engine: str, transfer: Transfer) -> None:
        if transfer.begin_ns is None or transfer.bytes <= 0 or transfer.failed:
            return
        end = transfer.posted_ns if transfer.done_on_post else transfer.done_ns
        if end is not None and end > transfer.begin_ns:
            key = (engine, transfer.peer, bool(transfer.write))
            rate = transfer.bytes / (end - transfer.begin_ns)
            if rate > self._best.get(key, 0.0):
                self._best[key] = rate


def attribute(request: Request, clocks: Clocks, rates: Rates) -> Breakdown:
    """Split a request's time; works for requests in flight and for those with events missing."""
    p, d = request.p, request.decode_leg
    base = p or d
    assert base is not None, "a request has a leg"
    shift = error = 0
    if p is not None and d is not None and p.boot != d.boot:
        _tell_causes(p, d, clocks, alone=len(request.d) == 1)
        offset = clocks.offset(d.boot, p.boot)
        shift, error = offset.ns, offset.error_ns

    pushed = p is not None and d is not None and _is_push(p, d)
    builder = _Builder(p, d, shift, error, rates, pushed)
    if pushed and p is not None and d is not None:
        breakdown = builder.push(p, d)
    elif p is not None:
        breakdown = builder.pull(p, d)
    else:
        assert d is not None
        breakdown = builder.single(d)
    breakdown.clock_error_ns = error
    return breakdown


def _is_push(p: Leg, d: Leg) -> bool:
    return (
        any(side.matched_ns is not None or side.send_done_ns is not None for side in p.ranks.values())
        or any(t.write for t in p.transfers())
        or any(
            side.registration_sent_ns is not None or side.registration_received_ns is not None
            for side in d.ranks.values()
        )
        or _will_push(p, d)
    )


def _will_push(p: Leg, d: Leg) -> bool:
    """Whether P is going to write, while nothing of that was seen: that is how its engine is set up."""
    if d.load_tokens == 0 or not _is_loading(d):
        return False
    return any(
        leg.source is not None and fingerprint(leg.source, "transfer_mode") == "push" for leg in (p, d)
    )


class _Builder:
    """Makes the branches of one request; D's times are shifted onto P's clock."""

    def __init__(
        self, p: Leg | None, d: Leg | None, shift: int, error: int, rates: Rates, pushed: bool
    ) -> None:
        self.shift = shift
        self.error = error
        self.rates = rates
        self.clamped = 0
        self.transfer: Transfer | None = None
        self.rate: float | None = None
        start = _first_known(p) if p else None
        other = self.on_d(_first_known(d)) if d else None
        # Unless pushed, D's leg follows from P's: where it seems to be older, the clocks are at fault.
        told = [t for t in (start, other) if t is not None] if pushed or start is None else [start]
        self.t0 = min(told, default=0)
        self.over_ns = self.on_d(d.finished_ns) if d else None
        if p is not None and d is None and p.served_ns is None:
            self.over_ns = p.finished_ns

    def on_d(self, t_ns: int | None) -> int | None:
        return None if t_ns is None else t_ns + self.shift

    # --- whole requests --------------------------------------------------------------------------

    def single(self, leg: Leg) -> Breakdown:
        """A request of which only a decode leg is known: not disaggregated, or its P is not instrumented."""
        if leg.is_decode or _has_load(leg):
            marks = [*self._admission(leg), *self._load_on_d(leg), *self._decode_start(leg)]
        else:
            marks = [*self._queue(leg), *self._local_compute(leg)]
        return self._finish(marks, [], leg, None)

    def pull(self, p: Leg, d: Leg | None) -> Breakdown:
        marks = self._prefill(p)
        lead = None
        if d is not None:
            marks += [*self._admission(d, crosses=True), *self._load_on_d(d), *self._decode_start(d)]
            ready = _latest(d.allocated_ns, *(s.handshake_done_ns for s in d.ranks.values()))
            if ready is not None and p.served_ns is not None:
                lead = p.served_ns - (ready + self.shift)
        elif p.is_prefill:
            marks.append(Mark(_S["registration.route"], None))
        breakdown = self._finish(marks, [], d, lead)
        if d is not None:
            self._predict_push(breakdown, p, d)
        return breakdown

    def _predict_push(self, breakdown: Breakdown, p: Leg, d: Leg) -> None:
        """D asked when P is: its frontend, queue, blocks and handshake lie beside prefill instead of behind
        it; what follows waits for the later of the two."""
        if breakdown.ttft_ns is None or d.allocated_ns is None:
            return
        handshake = breakdown.totals.get("registration.handshake", 0)
        behind = handshake + sum(
            breakdown.totals.get(f"registration.{n}", 0) for n in ("route", "admit", "blocks")
        )
        start = d.arrival_ns if d.arrival_ns is not None else d.arrived_ns
        late = 0
        if start is not None and p.served_ns is not None:
            late = max(0, d.allocated_ns - start + handshake - (p.served_ns - self.t0))
        breakdown.predicted_push_ttft_ns = breakdown.ttft_ns - behind + late

    def push(self, p: Leg, d: Leg) -> Breakdown:
        rank, p_side, transfer = _last_writer(p, d)
        self.transfer = transfer
        # The registration that this rank's writer held, if that is known.
        receivers = [d.ranks[rank]] if rank in d.ranks else []
        registered = _latest(*(s.registration_received_ns for s in receivers))
        if registered is None:
            registered = _latest(*(s.registration_received_ns for s in d.ranks.values()))
        prefill = self._prefill(p)
        registration = self._registration(d, registered)
        finished = p.served_ns
        lead = None
        if registered is not None and finished is not None:
            lead = finished - registered
        # Where one end was not observed, what must lie before or behind it may still tell which came last.
        armed = min(
            (s.lease_armed_ns for s in p.ranks.values() if s.lease_armed_ns is not None), default=None
        )
        finished_by = finished if finished is not None else armed
        registered_after = registered if registered is not None else self._registered_after(d)
        late = finished_by is not None and registered_after is not None and registered_after > finished_by
        if finished is not None and registered is None and not _after_match(p, d):
            late = True  # P waits for D's side still
        critical, overlapped = prefill, registration
        if late:
            # D's side came last. It began because P had finished (a sequential router), or on its own.
            begun = self.on_d(_first_known(d))
            if begun is None or (finished_by is not None and begun >= finished_by):
                critical, overlapped = prefill + registration, []
            else:
                critical, overlapped = registration, prefill
        known = late or lead is not None
        marks = critical + self._write(p_side, transfer, d, p, known) + self._decode_start(d)
        breakdown = self._finish(marks, overlapped, d, lead)
        self._predict_pull(breakdown, p, d, registered)
        return breakdown

    def _registered_after(self, d: Leg) -> int | None:
        """The latest thing seen of D's that comes before P holds the registration."""
        sent = (t for s in d.ranks.values() for t in (s.load_started_ns, s.registration_sent_ns))
        return self.on_d(_latest(d.arrived_ns, d.considered_ns, d.allocated_ns, *sent))

    def _predict_pull(self, breakdown: Breakdown, p: Leg, d: Leg, registered: int | None) -> None:
        """D asked after prefill: its frontend, queue and blocks come after P's end instead of beside it.
        Before them P's answer crosses from process to process, which no event of a push tells of: each
        crossing takes as long as the shorter of those that were seen, P's frontend and D's."""
        finished = p.served_ns
        if breakdown.ttft_ns is None or finished is None or d.allocated_ns is None or registered is None:
            return
        start = d.arrival_ns if d.arrival_ns is not None else d.arrived_ns
        if start is None:
            return
        matched = max(finished, registered)
        if start + self.shift >= finished:  # a sequential router: so it was
            allocated = d.allocated_ns + self.shift
        else:
            seen = [
                leg.arrived_ns - leg.arrival_ns
                for leg in (p, d)
                if leg.arrived_ns is not None and leg.arrival_ns is not None
            ]
            crossing = max(0, min(seen, default=0))
            allocated = finished + CROSSINGS * crossing + d.allocated_ns - start
        breakdown.predicted_pull_ttft_ns = (
            allocated
            - self.t0
            + breakdown.ttft_ns
            - (matched - self.t0)
            - breakdown.totals.get("readiness.signal", 0)
        )

    # --- branches --------------------------------------------------------------------------------

    def _queue(self, leg: Leg) -> list[Mark]:
        return [
            *_frontend(leg, Mark(_S["prefill.frontend"], leg.arrived_ns)),
            Mark(_S["prefill.queue"], leg.considered_ns),
            Mark(_S["prefill.blocks"], leg.allocated_ns if _has_load(leg) else _started(leg)),
        ]

    def _prefill(self, p: Leg) -> list[Mark]:
        marks = self._queue(p)
        if _has_load(p):
            marks += self._read(p, _REUSE, 0)
        marks += self._runs(p, _S["prefill.compute"], _S["prefill.queue"], shift=0, end=p.served_ns)
        return marks

    def _local_compute(self, leg: Leg) -> list[Mark]:
        return self._runs(leg, _S["prefill.compute"], _S["prefill.queue"], self.shift, end=leg.first_token_ns)

    def _runs(self, leg: Leg, run: Step, wait: Step, shift: int, end: int | None) -> list[Mark]:
        """Alternating runs and waits of a leg that may have been preempted, from its first scheduling on."""
        marks: list[Mark] = []
        running = True
        times = [(t, False) for t in leg.preempted_ns] + [(t, True) for t in leg.scheduled_ns]
        for t_ns, resumed in sorted(times)[1 if _started(leg) is not None else 0 :]:
            if end is not None and t_ns > end:
                break
            ended, begun = (wait, run) if resumed else (run, wait)
            if running == resumed:
                marks.append(Mark(begun, None))  # what lay between was not seen
            marks.append(Mark(ended, t_ns + shift))
            running = resumed
        if not running:
            marks.append(Mark(wait, None))
        marks.append(Mark(run, None if end is None else end + shift))
        return marks

    def _admission(self, d: Leg, crosses: bool = False) -> list[Mark]:
        """D's leg up to its destination blocks (or, with nothing to load, its first step)."""
        route = Mark(_S["registration.route"], self.on_d(d.arrived_ns), crosses=crosses)
        marks = [
            *([route] if crosses else _frontend(d, route)),
            Mark(_S["registration.admit"], self.on_d(d.considered_ns)),
        ]
        if self._loads(d):
            marks.append(Mark(_S["registration.blocks"], self.on_d(d.allocated_ns)))
        else:
            marks.append(Mark(_S["registration.blocks"], self.on_d(_started(d))))
        return marks

    @staticmethod
    def _loads(d: Leg) -> bool:
        """Whether D waits for KV from its peer; it does not when its own cache holds the whole prompt."""
        if _has_load(d):
            return True
        return d.load_tokens != 0 and not (d.scheduled_ns and not any(d.ranks.values()))

    def _load_on_d(self, d: Leg) -> list[Mark]:
        if not self._loads(d):
            return []
        pushed = any(s.registration_sent_ns or s.registration_received_ns for s in d.ranks.values())
        if pushed or (
            d.ranks and not any(True for _ in d.transfers()) and any(s.notified_ns for s in d.ranks.values())
        ):
            # Push without P's events: what lies between is P's business.
            notified = _latest(*(s.notified_ns for s in d.ranks.values()))
            return [
                Mark(_S["registration.notify"], None),
                Mark(_S["readiness.signal"], self.on_d(notified)),
                *self._reported(d, _PULL, self.shift),
            ]
        return self._read(d, _PULL, self.shift)

    def _read(self, leg: Leg, names: _Load, shift: int) -> list[Mark]:
        """A READ posted by this leg's workers: the rank that ended last is on the path."""
        side = max(leg.ranks.values(), key=_rank_end, default=RankSide())
        if _is_loading(leg):
            behind = [one for one in leg.ranks.values() if one.load_done_ns is None]
            side = min(behind, key=_rank_end, default=side)
        transfer = max(side.transfers.values(), key=_transfer_end, default=None)
        if names is _PULL:
            self.transfer = transfer
        marks: list[Mark] = []
        started, restarted = side.load_started_ns, side.load_restarted_ns
        waited = side.handshake_waited_ns
        if waited is not None or restarted is not None:
            if restarted is None and started is not None and waited is not None and started > waited:
                started, restarted = waited, started
            begin = waited if waited is not None else started
            marks += [
                Mark(names.dispatch, _plus(begin, shift)),
                Mark(names.handshake, _plus(_handshake_end(side, restarted), shift)),
                Mark(names.dispatch, _plus(restarted, shift)),
            ]
        else:
            marks.append(Mark(names.dispatch, _plus(started, shift)))
        seen = side.load_done_ns
        if transfer is not None:
            marks += self._moved(leg.engine, transfer, names, shift)
            if transfer.done_ns is None:
                marks[-1] = Mark(names.detect, _plus(seen, shift), POLL)
        elif seen is None or not side.read_expired:
            marks += [
                Mark(names.post, None),
                Mark(names.wire, None),
                Mark(names.detect, _plus(seen, shift), POLL),
            ]
        else:
            marks += [Mark(names.detect, _plus(seen, shift), POLL)]
        return marks + self._reported(leg, names, shift)

    def _moved(
        self,
        engine: str,
        transfer: Transfer,
        names: _Load,
        shift: int,
        pushed: bool = False,
        notified: int | None = None,
    ) -> list[Mark]:
        """post, wire and detect of one transfer. `notified`: when the peer of a push held its completion."""
        begin, posted, how = transfer.begin_ns, transfer.posted_ns, HOOK
        on_post = transfer.done_on_post
        if posted is None and transfer.start_ns:
            # The posting event is missing; NIXL's telemetry still tells.
            begin, how = transfer.start_ns, TELEMETRY
            posted = begin + max(0, transfer.post_us) * 1000
            if transfer.done_ns is not None:
                posted = min(posted, transfer.done_ns)
            on_post = transfer.post_us >= transfer.xfer_us
        done = transfer.done_ns
        if on_post and pushed and posted is not None:
            # The notification left inside the post call: no poll was waited for.
            end = posted if notified is None else max(begin or 0, min(posted, notified))
            return [Mark(step, end + shift, how) for step in (names.post, names.wire, names.detect)]
        post = Mark(names.post, _plus(posted, shift), how)
        if done is None:
            return [post, Mark(names.wire, None), Mark(names.detect, None, POLL)]
        if notified is not None and transfer.poll_ns is not None:
            # The notification leaves inside the poll, so it may overtake the hook behind it.
            done = min(done, max(transfer.poll_ns, notified))
        detect = Mark(names.detect, done + shift, POLL)
        if posted is None or begin is None:
            return [post, Mark(names.wire, None), detect]
        if on_post:
            return [post, Mark(names.wire, posted + shift), detect]
        earliest = max(posted, min(transfer.last_poll_ns or 0, done))
        rate = self.rates.best(engine, transfer)
        if names is _PULL:
            self.rate = rate
        if done <= earliest:
            return [post, Mark(names.wire, done + shift, POLL), detect]
        if rate is None or transfer.bytes <= 0:
            known = [Mark(names.wire, earliest + shift, POLL)] if earliest > posted else []
            return [post, *known, Mark(names.wire, None), detect]
        expected = min(max(begin + round(transfer.bytes / rate), earliest), done)
        return [post, Mark(names.wire, expected + shift, ESTIMATED), detect._replace(observed=ESTIMATED)]

    def _reported(self, leg: Leg, names: _Load, shift: int) -> list[Mark]:
        """Worker saw it → scheduler knows → the leg runs."""
        marks = [Mark(names.report, _plus(leg.load_reported_ns, shift))]
        if leg.deferred_ns is not None:
            marks.append(Mark(names.promote, leg.deferred_ns + shift))
            marks.append(Mark(names.admit, _plus(_started(leg), shift)))
        else:
            marks.append(Mark(names.promote, _plus(_started(leg), shift)))
        return marks

    def _registration(self, d: Leg, registered: int | None) -> list[Mark]:
        marks = self._admission(d, crosses=True)
        side = max(d.ranks.values(), key=lambda s: s.registration_received_ns or 0, default=RankSide())
        if side.handshake_waited_ns is not None:
            marks += [
                Mark(_S["registration.notify"], self.on_d(side.handshake_waited_ns)),
                Mark(
                    _S["registration.handshake"], self.on_d(_handshake_end(side, side.registration_sent_ns))
                ),
            ]
        marks.append(Mark(_S["registration.notify"], registered, crosses=True))
        return marks

    def _write(self, side: RankSide, transfer: Transfer | None, d: Leg, p: Leg, known: bool) -> list[Mark]:
        """A WRITE by P, from both sides being ready to D's scheduler knowing."""
        notified = self.on_d(_latest(*(s.notified_ns for s in d.ranks.values())))
        if _is_loading(d) and any(s.notified_ns is None for s in d.ranks.values()):
            notified = None  # a rank waits for it still
        # With one of the two sides not observed, it is not known since when both were ready.
        dispatch = _S["transfer.dispatch"] if known else _UNKNOWN
        marks: list[Mark] = []
        if side.rematched_ns is not None:
            marks += [
                Mark(dispatch, side.matched_ns),
                Mark(_S["registration.handshake"], _handshake_end(side, side.rematched_ns)),
                Mark(_S["transfer.dispatch"], side.rematched_ns),
            ]
        else:
            marks.append(Mark(dispatch, side.matched_ns))
        if transfer is not None:
            marks += self._moved(p.engine, transfer, _PULL, 0, True, notified)
        else:
            marks += [
                Mark(_S["transfer.post"], None),
                Mark(_S["transfer.wire"], None),
                Mark(_S["readiness.detect"], None),
            ]
        marks.append(Mark(_S["readiness.signal"], notified, crosses=True))
        return marks + self._reported(d, _PULL, self.shift)

    def _decode_start(self, d: Leg) -> list[Mark]:
        return self._runs(d, _S["decode.first_step"], _S["readiness.admit"], self.shift, end=d.first_token_ns)

    # --- marks -> intervals ----------------------------------------------------------------------

    def _finish(
        self, marks: list[Mark], overlapped: list[Mark], d: Leg | None, lead: int | None
    ) -> Breakdown:
        first_token = self.on_d(d.first_token_ns) if d is not None else None
        if first_token is not None:
            first_token = max(first_token, self.t0)
        elif (over := self.over_ns) is not None:
            # It ended before its first token: what came in later is not where it was then.
            marks = [m if m.t_ns is None or m.t_ns <= over else m._replace(t_ns=None) for m in marks]
        critical, current = self._intervals(self.t0, marks, True, first_token)
        beside, _ = self._intervals(self.t0, overlapped, False, first_token)
        breakdown = Breakdown(
            self.t0,
            None if first_token is None else first_token - self.t0,
            critical,
            beside,
            current=None if first_token is not None else current,
            lead_ns=lead,
            clamped_ns=self.clamped,
        )
        if first_token is not None and d is not None and d.finished_ns is not None:
            start = self.t0 + (breakdown.ttft_ns or 0)
            end = max(start, d.finished_ns + self.shift)
            breakdown.generate = Interval(_S["decode.generate"], start, end, False, HOOK)
        for interval in critical:
            breakdown.totals[interval.step.name] = breakdown.totals.get(interval.step.name, 0) + interval.ns
        self._wire_bounds(breakdown)
        return breakdown

    def _intervals(
        self, start: int, marks: list[Mark], critical: bool, end_ns: int | None
    ) -> tuple[list[Interval], Step | None]:
        """Turn marks into intervals that touch, none beyond `end_ns`; clamps what is out of order and says
        by how much."""
        out: list[Interval] = []
        last = max((i for i, mark in enumerate(marks) if mark.t_ns is not None), default=-1)
        current = marks[last + 1].step if last + 1 < len(marks) else None
        at, gap, crossed = start, False, False
        for mark in marks[: last + 1]:
            crossed = crossed or mark.crosses
            if mark.t_ns is None:
                gap = True
                continue
            end = max(at, mark.t_ns if end_ns is None else min(mark.t_ns, end_ns))
            if critical:
                self.clamped += abs(end - mark.t_ns)
            step = _UNKNOWN if gap else mark.step
            if end > at or not gap:
                how = NOT_OBSERVED if gap or step is _UNKNOWN else mark.observed
                out.append(Interval(step, at, end, critical, how, self.error if crossed else 0))
            at, gap, crossed = end, False, False
        return out, current

    def _wire_bounds(self, breakdown: Breakdown) -> None:
        transfer = self.transfer
        if transfer is None or transfer.posted_ns is None or transfer.done_ns is None:
            return
        breakdown.rate = self.rate
        breakdown.wire_lower_ns, breakdown.wire_upper_ns = wire_bounds(transfer)


def wire_bounds(transfer: Transfer) -> tuple[int | None, int | None]:
    """Least and most nanoseconds a transfer was on the wire after posting, as far as polls tell."""
    if transfer.posted_ns is None or transfer.done_ns is None:
        return None, None
    if transfer.done_on_post:
        return 0, 0
    lower = max(0, min(transfer.last_poll_ns or 0, transfer.done_ns) - transfer.posted_ns)
    return lower, max(lower, transfer.done_ns - transfer.posted_ns)


def _last_writer(p: Leg, d: Leg) -> tuple[int, RankSide, Transfer | None]:
    """The rank of P that D waited for last, and its last WRITE."""
    writers = {
        rank: max(writes, key=lambda t: (_transfer_end(t), t.id))
        for rank, side in p.ranks.items()
        if (writes := [t for t in side.transfers.values() if _is_write(t, side)])
    }
    if not writers:
        rank = max(p.ranks, key=lambda r: (p.ranks[r].matched_ns or 0, r), default=0)
        return rank, p.ranks.get(rank, RankSide()), None
    behind = [rank for rank, last in writers.items() if last.done_ns is None and not last.done_on_post]
    if behind and _is_loading(d):
        rank = max(behind, key=lambda r: (_transfer_end(writers[r]), r))
        return rank, p.ranks[rank], writers[rank]
    notified = {rank: side.notified_ns for rank, side in d.ranks.items() if side.notified_ns is not None}
    if notified.keys() == writers.keys():
        # Each rank of P writes to the one of the same number.
        rank = max(notified, key=lambda r: (notified[r], r))
    else:
        rank = max(writers, key=lambda r: (_transfer_end(writers[r]), r))
    return rank, p.ranks[rank], writers[rank]


def _is_write(transfer: Transfer, side: RankSide) -> bool:
    return bool(transfer.write) or (transfer.write is None and side.matched_ns is not None)


def _after_match(p: Leg, d: Leg) -> bool:
    """Whether anything was seen that comes after P's writer held its blocks and the registration."""
    return (
        d.load_reported_ns is not None
        or d.first_token_ns is not None
        or any(
            s.matched_ns is not None or s.send_done_ns is not None or s.transfers for s in p.ranks.values()
        )
        or any(s.notified_ns is not None or s.load_done_ns is not None for s in d.ranks.values())
    )


def _tell_causes(p: Leg, d: Leg, clocks: Clocks, alone: bool) -> None:
    """What was sent before it was received bounds the offset between two hosts' clocks. Of the ranks only
    the first two are sure to have spoken to each other; with a second D leg, what P was told may be its."""
    if not alone:
        return
    pushed = _is_push(p, d)
    if not pushed and p.served_ns is not None and d.arrived_ns is not None and d.remote_request == p.key:
        clocks.message(p.boot, p.served_ns, d.boot, d.arrived_ns)
    at_p, at_d = p.ranks.get(0, RankSide()), d.ranks.get(0, RankSide())
    sent = _sent(at_p if pushed else at_d)
    held = at_d.notified_ns if pushed else at_p.notified_ns
    if sent is not None and held is not None:
        clocks.message(*((p.boot, sent, d.boot, held) if pushed else (d.boot, sent, p.boot, held)))
    if at_d.registration_sent_ns is not None and at_d.registration_received_ns is not None:
        begun = (at_d.load_started_ns, at_d.load_restarted_ns)
        left = _latest(*(t for t in begun if t is not None and t <= at_d.registration_sent_ns))
        if left is not None:
            clocks.message(d.boot, left, p.boot, at_d.registration_received_ns)


def _sent(side: RankSide) -> int | None:
    """The least time at which the completion of a transfer can have left: NIXL sends it inside the poll
    that sees it done, or inside the post call."""
    times = [t.begin_ns if t.done_on_post else t.poll_ns for t in side.transfers.values()]
    return min((t for t in times if t is not None), default=None) if None not in times else None


def _has_load(leg: Leg) -> bool:
    """Whether the leg waits, or waited, for KV from its peer."""
    return (
        leg.allocated_ns is not None
        or leg.load_reported_ns is not None
        or any(s.load_started_ns is not None or s.load_done_ns is not None for s in leg.ranks.values())
    )


def _is_loading(leg: Leg) -> bool:
    """Whether the leg waits for KV as far as its scheduler told: then what was not seen is yet to come."""
    seen = leg.load_reported_ns is not None or leg.first_token_ns is not None or leg.scheduled_ns
    return not seen and not leg.finished


def _first_known(leg: Leg) -> int | None:
    """Arrival, or the first thing seen where the arrival was not."""
    if leg.arrival_ns is not None:
        return min(leg.arrival_ns, leg.arrived_ns or leg.arrival_ns)
    known = [
        t
        for t in (
            leg.arrived_ns,
            leg.considered_ns,
            leg.allocated_ns,
            *leg.scheduled_ns,
            leg.first_token_ns,
            leg.load_reported_ns,
            leg.finished_ns,
        )
        if t is not None
    ]
    return min(known, default=None)


def _frontend(leg: Leg, mark: Mark) -> list[Mark]:
    """The boundary at the end of a frontend's part; none where its beginning is not known."""
    return [] if leg.arrival_ns is None and leg.arrived_ns is not None else [mark]


def _started(leg: Leg) -> int | None:
    """When the leg was first put in a batch; None when a preemption tells that this was not seen."""
    first = _first(leg.scheduled_ns)
    return None if first is None or any(t < first for t in leg.preempted_ns) else first


def _handshake_end(side: RankSide, resumed_ns: int | None) -> int | None:
    """When the handshake a rank waited for ended; None when the one seen is a later one."""
    done = side.handshake_done_ns
    return None if done is None or (resumed_ns is not None and done > resumed_ns) else done


def _rank_end(side: RankSide) -> int:
    return max(side.load_done_ns or 0, *(_transfer_end(t) for t in side.transfers.values()), 0)


def _transfer_end(transfer: Transfer) -> int:
    return transfer.done_ns or transfer.posted_ns or 0


def _first(times: list[int]) -> int | None:
    return min(times, default=None)


def _latest(*times: int | None) -> int | None:
    return max((t for t in times if t is not None), default=None)


def _plus(t_ns: int | None, shift: int) -> int | None:
    return None if t_ns is None else t_ns + shift
