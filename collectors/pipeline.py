"""Events in, rows out: joins legs, attributes each request once it is over, and shapes rows for the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from kvscope import events as ev
from kvscope.attribution import Breakdown, Interval, Rates, attribute, wire_bounds
from kvscope.collectors.waiting import waits_for
from kvscope.join import Joiner, client_id
from kvscope.legs import SERVED, Failure, Handshake, Lease, Leg, Request, Source, fingerprint
from kvscope.ring import Event, RingReader
from kvscope.samples import Sample
from kvscope.schema import BY_NAME, Table
from kvscope.steps import OBSERVED, STEPS

logger = logging.getLogger(__name__)

Row = tuple[Any, ...]

LIVE_ROW_NS = 15_000_000_000
"""A row of a request in flight is made anew after this long at the latest: what is known of clocks and of
rates changes beside the request's own events."""
STEPPING_NS = 5_000_000_000
"""An engine tells of itself once a second while it steps; a longer time has a pause in it."""
MAX_STEPS = 100_000_000
"""No engine makes more steps, or schedules more tokens, in that time."""


@dataclass(slots=True, eq=False)
class LiveRequest:
    """A request that the store does not have (yet), as far as it has come. Another one where that changed."""

    row: Row
    """Of the table `requests`."""
    in_flight: bool
    """More is to come, or P holds blocks for it still."""
    step: str | None
    step_since_ns: int | None
    """Unix time."""
    waits_for: str
    batch: int
    made_ns: int
    hidden: bool = False
    """The store has it, from an earlier daemon: its rings were read again."""
    shown: Any = None
    """What a viewer made of it."""


class Pipeline:
    """Joins, attributes, and hands out rows in the column order of `kvscope.schema`.

    Args:
        has_request: whether the store holds a request with this (engine, internal request id). Asked for
            legs whose beginning is no longer in the ring, which a daemon before this one may have stored.
        has_row: whether it holds this row of `requests`, or a whole of which it is the rest.
    """

    def __init__(
        self,
        has_request: Callable[[str, str], bool] = lambda engine, request: False,
        has_row: Callable[[Row], bool] = lambda row: False,
    ) -> None:
        self.joiner = Joiner()
        self._has_request = has_request
        self._has_row = has_row
        self._rates = Rates()
        self._sources: dict[bytes, Source] = {}
        self._anchors: dict[bytes, int] = {}
        """Unix time minus monotonic time, by ring."""
        self._live: dict[Request, LiveRequest] = {}
        """As they were when last looked at."""
        self._by_engine: dict[str, Source] = {}
        """One source per engine, for what all of its rings say alike."""
        self._counts = dict.fromkeys(
            ("events", "requests", "joined", "unjoined", "already_stored", "untold"), 0
        )

    # --- input -----------------------------------------------------------------------------------

    def add_ring(self, reader: RingReader) -> None:
        """Announce a ring before its events are fed."""
        ring_id = reader.ring_id.bytes
        source = self.joiner.add_ring(ring_id, reader.about, reader.wall_ns, reader.mono_ns)
        self._sources[ring_id] = self._by_engine[source.engine] = source
        self._anchors[ring_id] = reader.wall_ns - reader.mono_ns
        self._live.clear()

    def feed(self, reader: RingReader, events: list[Event], now_ns: int) -> None:
        """Take in events of one ring in the order of their numbers, and the texts its reader gathered.

        `now_ns` is the collector's own monotonic clock, here and below.
        """
        texts, reader.texts = reader.texts, {}
        self._counts["events"] += len(events)
        self.joiner.feed(self._sources[reader.ring_id.bytes], events, texts, now_ns)

    def ring_gone(self, reader: RingReader, now_ns: int) -> int:
        """The ring's writer is gone and all it wrote was fed.

        Returns:
            Of a scheduler's ring, how many requests its engine left unfinished.
        """
        source = self._sources[reader.ring_id.bytes]
        self.joiner.ring_gone(source, now_ns)
        self._live.clear()
        if source.about.source != ev.SCHEDULER:
            return 0
        return sum(_cut_off(request, source.engine) for request in self.joiner.live())

    def ring_forgotten(self, reader: RingReader) -> None:
        """Everything of a gone ring is stored and its file is removed."""
        source = self._sources.pop(reader.ring_id.bytes, None)
        if source is not None:
            self.joiner.forget_ring(source)
            self._live.clear()
            del self._anchors[source.ring_id]
            if self._by_engine.get(source.engine) is source:
                del self._by_engine[source.engine]
                self._by_engine.update(
                    (s.engine, s) for s in self._sources.values() if s.engine == source.engine
                )

    # --- output ----------------------------------------------------------------------------------

    def take_rows(self, now_ns: int, final: bool = False) -> dict[str, list[Row]]:
        """Rows for the store since the last call, by table; with `final`, of all that is left."""
        joiner = self.joiner
        requests = joiner.settled(now_ns, final)
        leases, joiner.ended_leases = joiner.ended_leases, []
        if final:
            leases += joiner.final_leases()
        handshakes, joiner.handshakes = joiner.handshakes, []
        failures, joiner.failures = joiner.failures, []
        merged, joiner.merged = joiner.merged, []
        for request in merged:
            self._live.pop(request, None)
        rows: dict[str, list[Row]] = {"requests": [], "transfers": []}
        for request in requests:
            self._live.pop(request, None)
            if self._stored_before(request):
                self._counts["already_stored"] += 1
                continue
            try:
                row, transfers = self._request_row(request)[0], list(self._transfer_rows(request))
            except Exception as error:
                # Rings are untrusted: one request that can't be told must not take the others with it.
                if not self._counts["untold"]:
                    logger.error(
                        "a request can't be told (%s: %s); such are counted", type(error).__name__, error
                    )
                self._counts["untold"] += 1
                continue
            rows["requests"].append(row)
            rows["transfers"] += transfers
            for leg in request.legs():
                for transfer in leg.transfers():
                    self._rates.learn(leg.engine, transfer)
            self._counts["requests"] += 1
            self._counts["joined" if request.joined_by else "unjoined"] += 1
        rows["leases"] = [self._lease_row(lease) for lease in leases]
        rows["handshakes"] = [self._handshake_row(handshake) for handshake in handshakes]
        rows["failures"] = [self._failure_row(failure) for failure in failures]
        return {name: [_fit(BY_NAME[name], row) for row in found] for name, found in rows.items()}

    def look(self, requests: Iterable[Request], now_ns: int, wall_ns: int) -> list[LiveRequest]:
        """Those of the joiner's live `requests` that are to be told of, as far as they have come.

        A row is made anew where something was told of the request since the last look, and now and then.
        `wall_ns` is the same moment as Unix time.
        """
        found = []
        for request in requests:
            if not self.joiner.is_live(request):
                continue  # it was over, or joined to another, since the joiner was asked
            known = self._live.get(request)
            if known is None or self._is_stale(request, known, now_ns):
                try:
                    known = self._make_live(request, now_ns)
                except Exception:
                    known = None  # it is told of when it is to be stored
                if known is None:
                    self._live.pop(request, None)
                    continue
                self._live[request] = known
            if known.hidden:
                continue
            if known.in_flight:
                text = waits_for(request, known.step, self.joiner, wall_ns)
                if text != known.waits_for:
                    known = self._live[request] = replace(known, waits_for=text, shown=None)
            found.append(known)
        return found

    def _is_stale(self, request: Request, known: LiveRequest, now_ns: int) -> bool:
        if request.batch != known.batch or now_ns - known.made_ns > LIVE_ROW_NS:
            return True
        # The end of a handshake is no request's own event.
        return known.step in _HANDSHAKES and not any(
            side.handshake_waited_ns is not None and side.handshake_done_ns is None
            for leg in request.legs()
            for side in leg.ranks.values()
        )

    def _make_live(self, request: Request, now_ns: int) -> LiveRequest | None:
        if _is_cleanup(request) or self._stored_before(request):
            return None
        made, breakdown = self._request_row(request)
        row = _fit(BY_NAME["requests"], made)
        outcome, step = row[_OUTCOME], row[_CURRENT_STEP]
        in_flight = outcome == "in flight" or (outcome != "lost" and not self.joiner.is_complete(request))
        if outcome != "in flight":
            step = None
        since_ns = breakdown.critical[-1].end_ns if breakdown.critical else breakdown.t0_ns
        leg = request.p or request.d[0]
        if step is None and request.p is not None and request.p.finished_ns is not None:
            since_ns = request.p.finished_ns  # since then P holds blocks
        wall_ns = self.joiner.clocks.wall_ns(leg.boot, since_ns) if in_flight else None
        hidden = self._has_row(row)
        return LiveRequest(row, in_flight, step, wall_ns, "", request.batch, now_ns, hidden)

    def take_samples(self) -> list[Sample]:
        """The engines' own samples since the last call."""
        told, self.joiner.engine_samples = self.joiner.engine_samples, []
        found: list[Sample] = []
        for source, event in told:
            anchor_ns = self._anchors.get(source.ring_id)
            if anchor_ns is not None:
                about, at_ns = source.about, anchor_ns + event.t_ns
                found += (
                    Sample(at_ns, about.host, source.engine, about.source, source.rank, name, "", value)
                    for name, value in _of_steps(*event.args[:4])
                )
        return found

    def kv_blocks(self, at_ns: int) -> list[Sample]:
        """KV blocks by use, now, of every engine that records; dated with `at_ns` (Unix)."""
        joiner = self.joiner
        totals = {
            source.engine: (source.about.host, dict.fromkeys(("running", "staging", "kept"), 0))
            for source in self._sources.values()
            if source.about.source == ev.SCHEDULER and not source.gone
        }
        for request in joiner.live():
            for leg in request.legs():
                use = _use(leg)
                if use and leg.engine in totals and not joiner.is_gone(leg):
                    totals[leg.engine][1][use] += max(0, leg.blocks)
        for engine, blocks in joiner.kept_blocks():
            if engine in totals:
                totals[engine][1]["kept"] += blocks
        found = []
        for engine, (host, uses) in totals.items():
            total = fingerprint(self._by_engine[engine], "num_blocks", None)
            counts = {**uses, **({"total": total} if type(total) is int and total > 0 else {})}
            found += [
                Sample(at_ns, host, engine, "", 0, f"kv_blocks.{use}", "", float(blocks))
                for use, blocks in counts.items()
            ]
        return found

    def counters(self) -> dict[str, int]:
        """Totals since the start: events, requests, joins, what was left out and why."""
        joiner = self.joiner
        return {
            **self._counts,
            "live": len(joiner.live()),
            "cleanup_requests": joiner.cleanups,
            "stragglers": joiner.stragglers,
        }

    # --- rows ------------------------------------------------------------------------------------

    def _stored_before(self, request: Request) -> bool:
        """A rest of a request that was stored from a part of the ring that is overwritten by now."""
        legs = request.legs()
        return all(leg.arrived_ns is None for leg in legs) and any(
            self._has_request(leg.engine, leg.request_id or self.joiner.text(leg.key)) for leg in legs
        )

    def _request_row(self, request: Request) -> tuple[Row, Breakdown]:
        joiner = self.joiner
        p, d = request.p, request.decode_leg
        leg = p or d
        assert leg is not None, "a request has a leg"
        breakdown = attribute(request, joiner.clocks, self._rates)
        transfers = [t for one in request.legs() for t in one.transfers() if one is not p or t.write]
        connector = self._connector(request)
        outcome, detail, current = self._outcome(request, breakdown)
        reuse, offered, pulled = _reuse(p)
        totals = breakdown.totals
        generate = breakdown.generate.ns if breakdown.generate else None
        trace = next((one.trace for one in request.legs() if one.trace), "")
        name = leg.request_id or joiner.text(leg.key)
        row = (
            request.id,
            client_id(name),
            joiner.clocks.wall_ns(leg.boot, breakdown.t0_ns),
            self._about(leg, "label"),
            self._fingerprint(leg, "model"),
            connector,
            outcome,
            detail,
            current,
            any(joiner.was_read_late(one) for one in request.legs()),
            self._joined_by(request),
            p.engine if p else None,
            d.engine if d else None,
            (p.request_id or joiner.text(p.key)) if p else None,
            (d.request_id or joiner.text(d.key)) if d else None,
            len(request.d),
            request.session or None,
            request.turn or None,
            trace.split("-")[1] if trace.count("-") >= 2 else None,
            _known(leg.prompt_tokens),
            _known(d.output_tokens) if d else None,
            _known(p.cached_tokens) if p else None,
            _known(d.cached_tokens) if d else None,
            _transferred(d),
            _recomputed(d),
            reuse,
            offered,
            pulled,
            sum(max(0, one.preemptions) for one in request.legs()),
            _sum(t.bytes for t in transfers),
            _sum(t.descriptors for t in transfers),
            breakdown.ttft_ns,
            *(generate if not step.in_ttft else totals.get(step.name) for step in STEPS),
            breakdown.lead_ns,
            breakdown.rate * 1e9 if breakdown.rate else None,
            breakdown.wire_lower_ns,
            breakdown.wire_upper_ns,
            breakdown.predicted_push_ttft_ns,
            breakdown.predicted_pull_ttft_ns,
            breakdown.clock_error_ns,
            breakdown.clamped_ns,
            _waterfall(breakdown),
        )
        return row, breakdown

    def _transfer_rows(self, request: Request) -> Iterable[Row]:
        for leg in request.legs():
            for t in leg.transfers():
                lower, upper = wire_bounds(t)
                done = t.done_ns is not None
                yield (
                    t.id,
                    request.id,
                    self.joiner.clocks.wall_ns(
                        leg.boot, t.posted_ns if t.posted_ns is not None else t.start_ns
                    ),
                    "WRITE" if t.write else "READ",
                    leg.engine,
                    t.rank,
                    t.peer,
                    _known(t.bytes),
                    _known(t.descriptors),
                    t.posted_ns - t.begin_ns if t.posted_ns is not None and t.begin_ns is not None else None,
                    lower,
                    upper,
                    _known(t.post_us) if done else None,
                    _known(t.xfer_us) if done else None,
                    "failed" if t.failed else "done" if done else "open",
                )

    def _lease_row(self, lease: Lease) -> Row:
        wall, boot = self.joiner.clocks.wall_ns, lease.source.boot
        request_id = self.joiner.request_id_of(lease.source.engine, lease.key)
        return (
            lease.id,
            request_id,
            lease.source.engine,
            lease.source.rank,
            self.joiner.text(lease.key) if request_id is None else None,
            wall(boot, lease.armed_ns),
            wall(boot, lease.deadline_ns),
            lease.renewals,
            None if lease.ended_ns is None else wall(boot, lease.ended_ns),
            lease.end or "lost",
        )

    def _handshake_row(self, handshake: Handshake) -> Row:
        source = handshake.source
        return (
            handshake.id,
            source.engine,
            source.rank,
            handshake.peer,
            self.joiner.clocks.wall_ns(source.boot, handshake.started_ns),
            handshake.finished_ns - handshake.started_ns,
            handshake.ok,
            handshake.clock_offset_ns,
        )

    def _failure_row(self, failure: Failure) -> Row:
        source = failure.source
        return (
            failure.id,
            self.joiner.clocks.wall_ns(source.boot, failure.at_ns),
            source.engine,
            source.about.source,
            source.rank,
            failure.kind,
            failure.name,
            failure.detail,
            failure.leg.request.id if failure.leg else failure.request_id,
        )

    # --- what a request was ----------------------------------------------------------------------

    def _source(self, leg: Leg) -> Source | None:
        return self._by_engine.get(leg.engine)

    def _about(self, leg: Leg, name: str) -> Any:
        source = self._source(leg)
        return getattr(source.about, name) if source else ""

    def _fingerprint(self, leg: Leg, name: str) -> Any:
        source = self._source(leg)
        return fingerprint(source, name) if source else ""

    def _connector(self, request: Request) -> str:
        legs = request.legs()
        if not any(leg.is_prefill or leg.is_decode or leg.ranks for leg in legs):
            return "local"
        for leg in legs:
            source = self._source(leg)
            if source is None:
                continue
            if fingerprint(source, "transfer_mode") == "push":
                return "push"
            if (fingerprint(source, "extra_config", {}) or {}).get("bidirectional_kv_xfer"):
                return "bidirectional"
        return "pull"

    def _outcome(self, request: Request, breakdown: Breakdown) -> tuple[str, str | None, str | None]:
        """Outcome, its detail, and the step it is in, or was in when last seen, if it did not finish."""
        joiner = self.joiner
        legs, p = request.legs(), request.p
        ends = [leg for leg in request.d if joiner.is_instrumented(leg)] or legs[:1]
        failure = next((leg.failure for leg in legs if leg.failure), None)
        if failure is None and p is not None and p.lease_expired:
            failure = "lease expired"
        current = breakdown.current.name if breakdown.current else "decode.generate"
        if all(leg.finished for leg in ends):
            bad = next((leg for leg in ends if leg.status not in SERVED), None)
            if bad is None:
                if p is not None and not request.d and joiner.was_cleaned(p):
                    return "aborted", "turned down by D", current
                if p is not None and not request.d and p.lease_expired:
                    return "incomplete", "lease expired, never read", current
                if p is not None and not request.d and joiner.is_live(request) and not p.released:
                    return "in flight", failure, current  # D is to come
                return "finished", failure, None
            status = joiner.text(bad.status)
            outcome = {"FINISHED_ABORTED": "aborted", "FINISHED_IGNORED": "ignored"}.get(status, "error")
            return outcome, failure or status or None, current
        if any(joiner.is_gone(leg) for leg in legs if not leg.finished or leg is p):
            return "lost", failure, current
        return ("in flight" if joiner.is_live(request) else "incomplete"), failure, current

    def _joined_by(self, request: Request) -> str:
        joiner = self.joiner
        if not all(joiner.is_instrumented(leg) for leg in request.legs()):
            return "peer not instrumented"
        if request.joined_by:
            return request.joined_by
        leg = request.p or request.d[0]
        if not leg.is_prefill and not leg.is_decode:
            return "single leg"
        if leg.is_prefill and all(s.engine == leg.engine for s in joiner.sources.values()):
            return "peer not instrumented"
        peer = joiner.texts.get(leg.remote_engine, "")
        if leg.is_decode and all(s.engine != peer for s in joiner.sources.values()):
            return "peer not instrumented"
        return "unjoined"


_COLUMNS = [column.name for column in BY_NAME["requests"].columns]
_OUTCOME, _CURRENT_STEP = _COLUMNS.index("outcome"), _COLUMNS.index("current_step")
_HANDSHAKES = frozenset(("registration.handshake", "prefill.reuse_handshake"))


def _of_steps(steps: int, tokens: int, hook_ns: int, interval_ns: int) -> Iterable[tuple[str, float]]:
    """(name, value) of what an engine told of the time since it told before."""
    if interval_ns <= 0 or not 0 <= hook_ns <= interval_ns:
        return
    yield "engine.hook_share", hook_ns / interval_ns
    if interval_ns <= STEPPING_NS and 0 < steps <= MAX_STEPS:
        yield "engine.steps_per_s", steps * 1e9 / interval_ns
        yield "engine.step_ns", interval_ns / steps
        if 0 <= tokens <= MAX_STEPS:
            yield "engine.step_tokens", tokens / steps


def _use(leg: Leg) -> str:
    """What a leg that is not over uses its blocks for; empty where it holds none."""
    if leg.finished:
        return ""
    if leg.scheduled_ns:
        return "" if leg.preempted_ns and max(leg.preempted_ns) > max(leg.scheduled_ns) else "running"
    return "staging" if leg.allocated_ns is not None else ""


def _cut_off(request: Request, engine: str) -> bool:
    """Whether an engine that is gone had still to work for the request, or held blocks that D was to read."""
    here = [leg for leg in request.legs() if leg.engine == engine and leg.arrived_ns is not None]
    if any(not leg.finished for leg in here):
        return not _is_cleanup(request)
    p = request.p
    return (
        p is not None
        and p.engine == engine
        and not p.released
        and not p.lease_expired
        and not any(leg.finished or leg.load_reported_ns is not None for leg in request.d)
    )


def _is_cleanup(request: Request) -> bool:
    return all(leg.is_cleanup for leg in request.legs())


def _known(value: int) -> int | None:
    return None if value < 0 else value


def _sum(values: Iterable[int]) -> int | None:
    """Of what is known; None where nothing is."""
    known = [value for value in values if value >= 0]
    return sum(known) if known else None


_INTEGERS = {
    "BIGINT": (-1 << 63, (1 << 63) - 1),
    "UBIGINT": (0, (1 << 64) - 1),
    "UINTEGER": (0, (1 << 32) - 1),
    "USMALLINT": (0, (1 << 16) - 1),
}
_LIMITS = {
    name: [(i, *_INTEGERS[c.type]) for i, c in enumerate(table.columns) if c.type in _INTEGERS]
    for name, table in BY_NAME.items()
}


def _fit(table: Table, row: Row) -> Row:
    """The row without numbers that its columns can't hold: rings are untrusted, and one such number would
    take the whole batch with it."""
    unfit = [i for i, low, high in _LIMITS[table.name] if type(row[i]) is int and not low <= row[i] <= high]
    return tuple(None if i in unfit else value for i, value in enumerate(row)) if unfit else row


def _transferred(d: Leg | None) -> int | None:
    if d is None or d.load_tokens < 0:
        return None
    return 0 if d.load_failed else d.load_tokens


def _recomputed(d: Leg | None) -> int | None:
    """Prompt tokens D computed although P had: the load failed, or the blocks went before the first token."""
    if d is None or d.load_tokens < 0:
        return None
    preempted = any(d.first_token_ns is None or t < d.first_token_ns for t in d.preempted_ns)
    return d.load_tokens if (d.load_failed and d.first_token_ns is not None) or preempted else 0


def _reuse(p: Leg | None) -> tuple[str | None, int | None, int | None]:
    """What became of the KV that D had kept for this turn: (outcome, tokens offered, tokens pulled)."""
    if p is None or not (p.flags or 0) & (ev.FLAG_REUSE_OFFERED | ev.FLAG_REUSE_INCOMPLETE):
        return None, None, None
    offered = _known(p.remote_tokens)
    if (p.flags or 0) & ev.FLAG_REUSE_INCOMPLETE:
        return "metadata missing", offered, 0
    if any(side.read_expired for side in p.ranks.values()):
        return "expired", offered, 0
    if p.load_failed or any(side.load_failed for side in p.ranks.values()):
        return "failed", offered, 0
    if p.load_tokens > 0:
        return "pulled", offered, p.load_tokens
    if p.considered_ns is None:
        return None, offered, None
    wanted = min(offered or 0, p.prompt_tokens)
    return ("local hit" if p.local_tokens >= wanted else "below threshold"), offered, 0


_OBSERVED = {name: code for code, name in enumerate(OBSERVED)}


def _waterfall(breakdown: Breakdown) -> list[dict[str, Any]]:
    intervals: list[Interval] = [*breakdown.critical, *breakdown.overlapped]
    t0 = breakdown.t0_ns
    return [
        {
            "step": i.step.code,
            "from_ns": i.start_ns - t0,
            "ns": i.ns,
            "critical": i.critical,
            "observed": _OBSERVED[i.observed],
            "error_ns": i.error_ns,
        }
        for i in intervals
    ]
