"""Events -> legs -> requests -> sessions.

Legs are joined by identity, never by time; strongest first: D's `remote_request_id` names P's leg; P's
writer names both when it starts a WRITE; `transfer_id`; and, marked as inferred, the client's id parsed
from vLLM's. Rings are read one after the other, so events of one request come in any order: every
handler only fills in what its event says.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

from kvscope import events as ev
from kvscope.clock import Clocks
from kvscope.events import text_key
from kvscope.legs import STATUSES, Failure, Handshake, Lease, Leg, RankSide, Request, Source, Transfer
from kvscope.ring import About, Event

SETTLE_NS = 300_000_000
"""A complete request waits this long for stragglers from other rings."""
UNJOINED_NS = 5_000_000_000
"""A complete leg waits this long for a partner that is expected."""
QUIET_NS = 90_000_000_000
"""A request of which only a report is missing is stored as it is after this long. Leases renew every 5 s."""
LONG_QUIET_NS = 1800_000_000_000
"""The same for one that its engine still works on: neither a queue nor generating makes events."""
LOST_QUIET_NS = 10_000_000_000
"""The same where one of its engines is gone."""
QUIET_SCAN_NS = 1_000_000_000
"""How often quiet requests are looked for."""
MAX_FRONTEND_NS = 3600_000_000_000
"""A request that seems to have been longer than this between API server and scheduler was not."""
MAX_LIVE = 100_000
"""Requests held in memory; beyond it the oldest is stored as it is."""
MAX_TEXTS = 300_000
"""Texts held in memory; beyond it all but engines and statuses go. Rings repeat what they still use."""
MAX_REMEMBERED = 200_000
"""Stored requests remembered, so that stragglers don't start them anew."""
MAX_LEASES = 200_000
"""Leases held in memory; beyond it the end of the oldest counts as lost."""
MAX_TURNS = 10_000
"""Turns of one session that may be in memory at once; beyond it they name each other in a circle."""
MAX_PARTS = 1024
"""Runs and preemptions of a leg, and its transfers per rank: no request has more, so more are left out."""
MAX_NOTES = 10_000
"""What is kept of legs that may be stored before, or told of after, it is known."""
MAX_LINKS = 4096
"""(engine, rank, peer) triples whose handshakes are remembered."""
LIMIT_NS = 1 << 60
"""No clock shows this: 36 years since boot. Nothing that is computed of smaller times leaves 64 bits."""

_HOW = ("remote id", "push match", "transfer id", "client id")
"""How legs were joined, the strongest first."""


def uid(ring_id: bytes, seq: int) -> int:
    """A number for what began with this event: the same whenever the ring is read."""
    number = (seq & 0xFFFFFFFFFFFFFFFF).to_bytes(8, "little")
    return int.from_bytes(blake2b(ring_id + number, digest_size=8).digest(), "little")


_SUFFIX = re.compile(r"-[0-9a-f]{8}$")
_CHILD = re.compile(r"^\d+_(?=(?:chat)?cmpl-)")


def client_id(internal_id: str, randomized: bool = True) -> str:
    """The client's request id inside vLLM's: `[k_]cmpl-<id>-<i>-<8hex>` or `[k_]chatcmpl-<id>-<8hex>`."""
    text = _SUFFIX.sub("", internal_id) if randomized else internal_id
    text = _CHILD.sub("", text)
    if text.startswith("chatcmpl-"):
        return text[9:]
    if text.startswith("cmpl-"):
        return re.sub(r"-\d+$", "", text[5:])
    return text


class Joiner:
    """Holds every request that is not over, and hands it out once when it is.

    `now_ns` arguments are the collector's clock, used only for how long to wait; what is measured comes
    from the events alone.
    """

    def __init__(self, clocks: Clocks | None = None) -> None:
        self.clocks = clocks or Clocks()
        self.texts: dict[int, str] = dict(STATUSES)
        self._spent_texts: list[int] = []
        self.sources: dict[bytes, Source] = {}
        self._engines: set[str] = set()
        self.cleanups = 0
        self.stragglers = 0
        self.ended_leases: list[Lease] = []
        self.handshakes: list[Handshake] = []
        self.failures: list[Failure] = []
        self.engine_samples: list[tuple[Source, Event]] = []
        self.merged: list[Request] = []
        """Requests that went into another one, or are not told of: nobody needs to remember them."""
        self._batch = 0
        self._legs: dict[tuple[str, int], Leg] = {}
        self._live: OrderedDict[Request, None] = OrderedDict()
        self._due: list[tuple[int, int, Request]] = []
        self._due_count = 0
        self._now_ns = self._next_scan_ns = 0
        # Request ids named by a peer whose leg has not been seen: (engine key, request key) -> legs.
        self._awaited: dict[tuple[int, int], dict[Leg, None]] = {}
        # Legs whose worker names a peer while their own role is not known (yet).
        self._named: dict[tuple[int, int], Leg] = {}
        self._transfer_ids: dict[int, dict[Leg, None]] = {}
        # Legs with a role by the client's id, for what nothing else joins.
        self._clients: dict[str, dict[Leg, None]] = {}
        # P legs, by (engine key, request key), that may be stored before or after these are told:
        self._cleaned: dict[tuple[int, int], None] = {}  # a clean-up request of D's named them
        self._read_late: dict[tuple[int, int], None] = {}  # read after their blocks were given back
        # What handshakes told of the clocks of engines: a ring of theirs may be announced later.
        self._offsets: dict[tuple[str, str], tuple[int, int]] = {}
        self._leases: dict[tuple[str, int, int], Lease] = {}
        # The latest ones per (engine, rank, peer): events come in any order.
        self._handshake_waits: dict[tuple[str, int, int], deque[RankSide]] = {}
        self._handshakes_finished: dict[tuple[str, int, int], deque[int]] = {}
        # (engine, rank) -> (key of the peer, since) of the handshake that is going on.
        self._handshaking: dict[tuple[str, int], tuple[int, int]] = {}
        # (engine, request key) -> (KV blocks, collector's clock at its end) of legs that keep them.
        self._kept: dict[tuple[str, int], tuple[int, int]] = {}
        self._remembered: OrderedDict[tuple[str, int], tuple[int, int, int, int]] = OrderedDict()
        self._handlers = {
            ev.REQUEST_ARRIVED: self._arrived,
            ev.REQUEST_CONSIDERED: self._considered,
            ev.BLOCKS_ALLOCATED: self._allocated,
            ev.REQUEST_SCHEDULED: self._scheduled,
            ev.PREFILL_CHUNK: self._seen,
            ev.REQUEST_PREEMPTED: self._preempted,
            ev.PROMOTION_DEFERRED: self._deferred,
            ev.FIRST_TOKEN: self._first_token,
            ev.REQUEST_FINISHED: self._finished,
            ev.LOAD_REPORTED: self._load_reported,
            ev.SEND_REPORTED: self._send_reported,
            ev.LOAD_STARTED: self._load_started,
            ev.HANDSHAKE_WAITED: self._handshake_waited,
            ev.HANDSHAKE_STARTED: self._handshake_started,
            ev.HANDSHAKE_FINISHED: self._handshake_finished,
            ev.REGISTRATION_SENT: self._registration_sent,
            ev.REGISTRATION_RECEIVED: self._registration_received,
            ev.PUSH_MATCHED: self._push_matched,
            ev.TRANSFER_POSTED: self._transfer_posted,
            ev.TRANSFER_DONE: self._transfer_done,
            ev.LOAD_DONE: self._load_done,
            ev.SEND_DONE: self._send_done,
            ev.NOTIFICATION_RECEIVED: self._notification_received,
            ev.READ_EXPIRED: self._read_expired,
            ev.LEASE_ARMED: self._lease_armed,
            ev.LEASE_RENEWED: self._lease_renewed,
            ev.LEASE_RELEASED: self._lease_released,
            ev.LEASE_EXPIRED: self._lease_expired,
            ev.NOTIFICATION_LATE: self._notification_late,
            ev.FAILURE: self._failure,
            ev.HOOK_FAILED: self._hook_failed,
            ev.ENGINE_SAMPLE: self._engine_sample,
        }

    # --- input -----------------------------------------------------------------------------------

    def add_ring(self, ring_id: bytes, about: About, wall_ns: int, mono_ns: int) -> Source:
        """Announce a ring before its events are fed; its anchor is the (wall, monotonic) pair given."""
        boot = about.boot_id or ring_id.hex()
        self.clocks.anchor(boot, wall_ns, mono_ns)
        source = self.sources[ring_id] = Source(ring_id, about, about.engine_id, about.rank, boot)
        self.texts[text_key(about.engine_id)] = about.engine_id
        self._engines.add(about.engine_id)
        for (local, engine), (offset_ns, error_ns) in self._offsets.items():
            if engine == about.engine_id:
                self.clocks.estimate(local, boot, offset_ns, error_ns)
        return source

    def feed(self, source: Source, batch: Iterable[Event], texts: dict[int, str], now_ns: int) -> None:
        """Take in events of one ring, in the order of their numbers."""
        if texts:
            self.texts.update(texts)
        handlers = self._handlers
        self._now_ns = now_ns
        self._batch += 1
        for event in batch:
            handler = handlers.get(event[1])
            if handler is not None and 0 <= event[2] < LIMIT_NS:
                handler(source, event)

    def ring_gone(self, source: Source, now_ns: int) -> None:
        """The ring's writer is gone and all it wrote was fed: what it held is lost."""
        source.gone = True
        for key, lease in [item for item in self._leases.items() if item[1].source is source]:
            lease.end = "lost"
            self.ended_leases.append(lease)
            del self._leases[key]
        if source.about.source == ev.SCHEDULER:
            for kept in [key for key in self._kept if key[0] == source.engine]:
                del self._kept[kept]
        self._handshaking.pop((source.engine, source.rank), None)
        self._next_scan_ns = now_ns

    def is_instrumented(self, leg: Leg) -> bool:
        """Whether the leg's engine writes rings; a leg can be known from its peer's alone."""
        return leg.engine in self._engines

    def is_gone(self, leg: Leg) -> bool:
        """Whether the process that served the leg is gone. Its engine may be back, under the same id."""
        if leg.source is not None:
            return leg.source.gone
        rings = [s for s in self.sources.values() if s.engine == leg.engine]
        return bool(rings) and all(s.gone for s in rings)

    def was_cleaned(self, p: Leg) -> bool:
        """Whether a clean-up request gave the leg's blocks back: D turned the request down."""
        return (text_key(p.engine), p.key) in self._cleaned

    def was_read_late(self, leg: Leg) -> bool:
        """Whether P's blocks were read after they had been given back."""
        return (
            leg.released_late
            or (text_key(leg.engine), leg.key) in self._read_late
            or (leg.is_decode and (leg.remote_engine, leg.remote_request) in self._read_late)
        )

    def forget_ring(self, source: Source) -> None:
        """Drop a gone ring from memory once nothing of it is live."""
        self.sources.pop(source.ring_id, None)

    # --- output ----------------------------------------------------------------------------------

    def is_live(self, request: Request) -> bool:
        return request in self._live

    def live(self) -> list[Request]:
        """Requests that are not over, oldest first."""
        return list(self._live)

    def settled(self, now_ns: int, final: bool = False) -> list[Request]:
        """Requests that are over since the last call; with `final`, all that is left."""
        for key in self._spent_texts:
            self.texts.pop(key, None)
        self._spent_texts.clear()
        if len(self.texts) > MAX_TEXTS:
            self.texts = STATUSES | {text_key(engine): engine for engine in self._engines}
        out: list[Request] = []
        if final or now_ns >= self._next_scan_ns:
            self._next_scan_ns = now_ns + QUIET_SCAN_NS
            for request in self._live:
                if not request.due_ns and (final or self._due_ns(request) <= now_ns):
                    self._schedule(request, now_ns)
        while self._due and (final or self._due[0][0] <= now_ns):
            planned_ns, _, request = heapq.heappop(self._due)
            if request not in self._live or request.due_ns != planned_ns:
                continue  # released, or planned anew
            request.due_ns = 0
            due = self._due_ns(request)
            if final or due <= now_ns:
                joined = self._infer(request)
                if joined is None:
                    out.extend(self._release(request))
                elif final:
                    self._schedule(joined, now_ns)
            elif self.is_complete(request):
                self._schedule(request, due)
        while len(self._live) > MAX_LIVE:
            out.extend(self._release(next(iter(self._live))))
        return out

    def final_leases(self) -> list[Lease]:
        """Leases still open, for a reader that won't come back."""
        leases, self._leases = list(self._leases.values()), {}
        self._kept.clear()
        return leases

    def request_id_of(self, engine: str, key: int) -> int | None:
        """Id of the request that a leg belongs to, live or remembered."""
        leg = self._legs.get((engine, key))
        if leg is not None:
            return leg.request.id
        known = self._remembered.get((engine, key))
        return known[0] if known else None

    def leases(self, leg: Leg) -> list[Lease]:
        """Leases of the leg that are not over, one per rank."""
        found = (self._leases.get((leg.engine, rank, leg.key)) for rank in leg.ranks)
        return [lease for lease in found if lease is not None]

    def leases_held(self) -> Counter[str]:
        """How many leases of each engine are not over."""
        return Counter(engine for engine, _, _ in self._leases)

    def handshaking(self, engine: str, rank: int) -> str:
        """Whom a worker shakes hands with now; it does so with one at a time. Empty for nobody."""
        return self.text(self._handshaking.get((engine, rank), (0, 0))[0])

    def kept_blocks(self) -> Iterable[tuple[str, int]]:
        """(engine, KV blocks) of every leg that is finished and keeps its blocks for the peer."""
        leased = {(engine, key) for engine, _, key in self._leases}
        for leg, (blocks, finished_ns) in list(self._kept.items()):
            if leg in leased or self._now_ns - finished_ns < QUIET_NS:
                yield leg[0], blocks
            else:
                del self._kept[leg]  # the lease is over, and that its blocks are free was not seen

    def text(self, key: int) -> str:
        """The text behind a key; the key in hex where its characters were lost."""
        return self.texts.get(key) or (f"?{key:016x}" if key else "")

    # --- when is it over -------------------------------------------------------------------------

    def is_complete(self, request: Request) -> bool:
        """Nothing more is to come but stragglers."""
        if request.d:
            # A D leg's own lease (bidirectional) outlives the request by minutes: it has its own row.
            ended = all(leg.finished or not self.is_instrumented(leg) for leg in request.d)
            return ended and (request.p is None or request.p.released)
        return request.p is not None and request.p.released

    def _due_ns(self, request: Request) -> int:
        if self.is_complete(request):
            return request.fed_ns + (SETTLE_NS if self._has_all_legs(request) else UNJOINED_NS)
        legs = request.legs()
        if any(self.is_gone(leg) for leg in legs):
            return request.fed_ns + LOST_QUIET_NS
        works = any(leg.arrived_ns is not None and not leg.finished for leg in legs)
        return request.fed_ns + (LONG_QUIET_NS if works else QUIET_NS)

    def _has_all_legs(self, request: Request) -> bool:
        if request.p is not None and request.d:
            return True
        leg = request.p or request.d[0]
        if not leg.is_prefill and not leg.is_decode:
            return leg.flags is not None
        if leg.is_decode:
            # A peer that writes no ring will never turn up.
            return self.texts.get(leg.remote_engine, "") not in self._engines
        return not leg.lease

    def _schedule(self, request: Request, due_ns: int) -> None:
        request.due_ns = due_ns
        self._due_count += 1
        heapq.heappush(self._due, (due_ns, self._due_count, request))

    def _touch(self, leg: Leg, source: Source, t_ns: int) -> None:
        leg.request.fed_ns = self._now_ns
        leg.request.batch = self._batch
        if source.engine == leg.engine:
            leg.boot, leg.source = source.boot, source
            if t_ns > leg.last_event_ns:
                leg.last_event_ns = t_ns

    def _check(self, request: Request) -> None:
        """Put a request that may just have become complete on the list of those to be released."""
        if self.is_complete(request):
            due_ns = self._due_ns(request)
            if not request.due_ns or due_ns < request.due_ns:
                self._schedule(request, due_ns)

    def _release(self, request: Request) -> list[Request]:
        """Take a request out of memory."""
        legs = request.legs()
        if all(leg.is_cleanup for leg in legs):
            self.cleanups += 1
            self.merged.append(request)
            released = []
        else:
            self._chain(request)
            released = [request]
        self._live.pop(request, None)
        for leg in legs:
            leg.request_id = leg.request_id or self.text(leg.key)
            self._spent_texts += (leg.key, leg.remote_request, leg.transfer_id)
            if self._legs.get((leg.engine, leg.key)) is leg:
                del self._legs[leg.engine, leg.key]
            self._remembered[leg.engine, leg.key] = (
                request.id,
                request.session,
                request.turn,
                leg.last_event_ns,
            )
            if leg.transfer_id:
                _forget(self._transfer_ids, leg.transfer_id, leg)
            if leg.is_prefill or leg.is_decode:
                _forget(self._clients, client_id(leg.request_id), leg)
            if leg.remote_request:
                peer = (leg.remote_engine, leg.remote_request)
                _forget(self._awaited, peer, leg)
                if self._named.get(peer) is leg:
                    del self._named[peer]
        while len(self._remembered) > MAX_REMEMBERED:
            self._remembered.popitem(last=False)
        return released

    # --- joining ---------------------------------------------------------------------------------

    def _leg(self, engine: str, key: int, source: Source, event: Event) -> Leg | None:
        """The leg an event speaks of, new if need be; None for a straggler of a stored request."""
        leg = self._legs.get((engine, key))
        if leg is not None:
            self._touch(leg, source, event[2])
            return leg
        if not key:
            return None  # the worker could not tell whose it was
        if (engine, key) in self._remembered:
            self.stragglers += 1
            return None
        request = Request()
        leg = Leg(engine, key, source.boot, uid(source.ring_id, event[0]), request)
        request.d.append(leg)
        self._legs[engine, key] = leg
        self._live[request] = None
        self._touch(leg, source, event[2])
        for waiting in self._awaited.pop((text_key(engine), key), ()):
            self._join(leg, waiting, "remote id")
        return leg

    def _set_prefill(self, leg: Leg) -> None:
        request = leg.request
        if request.p is None and leg in request.d:
            request.d.remove(leg)
            request.p = leg

    def _join(self, p: Leg, d: Leg, how: str) -> None:
        into, other = p.request, d.request
        if into is other:
            if into.joined_by:
                into.joined_by = min(into.joined_by, how, key=_HOW.index)
            return
        if into.p is None:
            self._set_prefill(p)
        if other.p is not None:
            return  # both hold a P leg: ids were reused; keep them apart
        into.d.extend(other.d)
        into.joined_by = how
        into.fed_ns = max(into.fed_ns, other.fed_ns)
        into.batch = self._batch
        for leg in other.d:
            leg.request = into
        self._live.pop(other, None)
        self.merged.append(other)
        self._check(into)

    def _await_peer(self, leg: Leg) -> None:
        """Join a D leg to the P leg it names, now or when that turns up."""
        peer = self._legs.get((self.texts.get(leg.remote_engine, ""), leg.remote_request))
        if peer is not None and peer is not leg:
            self._join(peer, leg, "remote id")
        else:
            self._awaited.setdefault((leg.remote_engine, leg.remote_request), {})[leg] = None

    def _infer(self, request: Request) -> Request | None:
        """Last resort: join a request to the one whose missing leg carries the same client id, if there is
        exactly one P leg and one D leg of that id."""
        leg = request.p or request.d[0]
        if len(request.legs()) != 1 or not (leg.is_prefill or leg.is_decode) or leg.is_cleanup:
            return None
        alone = [x for x in self._clients.get(client_id(leg.request_id), ()) if len(x.request.legs()) == 1]
        if len(alone) != 2 or leg not in alone or alone[0].is_prefill == alone[1].is_prefill:
            return None
        p, d = alone if alone[0].is_prefill else reversed(alone)
        self._join(p, d, "client id")
        return p.request if p.request is d.request else None

    def _chain(self, request: Request) -> None:
        """Place the request in its session: chained by the KV that P was offered from an earlier D leg."""
        turns = [request]
        while (earlier := self._earlier(turns[-1])) is not None and earlier not in turns[-2:]:
            turns.append(earlier)
            if earlier.session or len(turns) > MAX_TURNS:
                break
        for one in reversed(turns):
            if not one.session:
                self._place(one, offered=one is not request)

    def _earlier(self, request: Request) -> Request | None:
        """The request in memory whose D leg kept KV for this one."""
        leg = self._legs.get(self._kept_by(request)) if request.p is not None else None
        return None if leg is None or leg.request is request else leg.request

    def _kept_by(self, request: Request) -> tuple[str, int]:
        p = request.p
        if p is None or not (p.flags or 0) & (ev.FLAG_REUSE_OFFERED | ev.FLAG_REUSE_INCOMPLETE):
            return "", 0
        return self.texts.get(p.remote_engine, ""), p.remote_request

    def _place(self, request: Request, offered: bool) -> None:
        earlier = self._earlier(request)
        known = self._remembered.get(self._kept_by(request))
        if earlier is not None and earlier.session:
            request.session, request.turn = earlier.session, earlier.turn + 1
        elif known is not None:
            request.session, request.turn = known[1] or known[0], (known[2] or 1) + 1
        elif offered or any(leg.lease for leg in request.d):
            request.session, request.turn = request.id, 1

    # --- handlers: scheduler ---------------------------------------------------------------------

    def _arrived(self, source: Source, event: Event) -> None:
        seq, _, t_ns, key, args = event
        known = self._legs.get((source.engine, key))
        if known is not None and t_ns > (known.finished_ns or known.arrived_ns or t_ns):
            self._schedule(known.request, 1)  # an id used again: the earlier request is over
            del self._legs[source.engine, key]
        remembered = self._remembered.get((source.engine, key))
        if remembered is not None and t_ns > remembered[3]:
            del self._remembered[source.engine, key]
        leg = self._leg(source.engine, key, source, event)
        if leg is None:
            return
        leg.id = uid(source.ring_id, seq)
        leg.request_id = leg.request_id or self.text(key)
        leg.arrived_ns = t_ns
        (
            leg.arrival_ns,
            leg.flags,
            leg.prompt_tokens,
            leg.remote_engine,
            leg.remote_request,
            leg.remote_tokens,
            leg.transfer_id,
            leg.session,
        ) = args[:8]
        leg.trace = self.texts.get(args[8], "")
        if not 0 <= t_ns - leg.arrival_ns <= MAX_FRONTEND_NS:
            leg.arrival_ns = None  # the wall clock was stepped in between: then it tells nothing
        if leg.is_cleanup:
            _note(self._cleaned, (leg.remote_engine, leg.remote_request))
            cleaned = self._legs.get((self.texts.get(leg.remote_engine, ""), leg.remote_request))
            if cleaned is not None:
                cleaned.request.batch = self._batch
            return
        if leg.is_prefill or leg.is_decode:
            self._clients.setdefault(client_id(leg.request_id), {})[leg] = None
        if leg.is_prefill:
            self._set_prefill(leg)
            named = self._named.pop((text_key(source.engine), key), None)
            if named is not None and not named.is_prefill:
                self._join(leg, named, "remote id")
        elif leg.is_decode and leg.remote_request:
            self._await_peer(leg)
        if leg.transfer_id:
            sharing = self._transfer_ids.setdefault(leg.transfer_id, {})
            sharing[leg] = None
            for peer in sharing:
                if peer.is_prefill != leg.is_prefill:
                    self._join(*((leg, peer) if leg.is_prefill else (peer, leg)), "transfer id")

    def _considered(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None and leg.considered_ns is None:
            leg.considered_ns = event[2]
            leg.local_tokens, leg.load_tokens = event[4][:2]

    def _allocated(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None:
            leg.allocated_ns = event[2]
            leg.load_tokens = event[4][1]
            leg.blocks = event[4][0]

    def _scheduled(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None and event[2] not in leg.scheduled_ns and len(leg.scheduled_ns) < MAX_PARTS:
            leg.scheduled_ns.append(event[2])
            leg.blocks = event[4][0]
            leg.preemptions = max(leg.preemptions, event[4][3])
            leg.deferred_ns = _past(event[4][4], event[2]) or leg.deferred_ns

    def _seen(self, source: Source, event: Event) -> None:
        self._leg(source.engine, event[3], source, event)

    def _preempted(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None and event[2] not in leg.preempted_ns and len(leg.preempted_ns) < MAX_PARTS:
            leg.preempted_ns.append(event[2])

    def _deferred(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None:
            leg.deferred_ns = event[2]

    def _first_token(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None:
            leg.first_token_ns = event[2]

    def _finished(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is None:
            return
        leg.finished_ns = event[2]
        if not leg.request_id:
            leg.request_id = self.text(event[3])
        (
            leg.status,
            leg.prompt_tokens,
            leg.output_tokens,
            _,
            leg.cached_tokens,
            leg.external_tokens,
            leg.preemptions,
            lease,
            leg.blocks,
        ) = event[4][:9]
        leg.lease = lease == 1
        if leg.lease and leg.send_reported_ns is None and leg.blocks > 0:
            self._kept[source.engine, event[3]] = (leg.blocks, self._now_ns)
            if len(self._kept) > MAX_LEASES:
                del self._kept[next(iter(self._kept))]
        self._check(leg.request)

    def _load_reported(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None:
            leg.load_reported_ns = event[2]
            leg.load_failed = event[4][0] == 1

    def _send_reported(self, source: Source, event: Event) -> None:
        self._kept.pop((source.engine, event[3]), None)
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None:
            leg.send_reported_ns = event[2]
            self._check(leg.request)

    # --- handlers: worker ------------------------------------------------------------------------

    def _load_started(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is None or event[4][2] == 0:  # no blocks: the worker only tells the peer that it needs none
            return
        side = leg.rank(source.rank)
        if side.load_started_ns is None or event[2] < side.load_started_ns:
            side.load_started_ns, earlier = event[2], side.load_started_ns
            side.load_restarted_ns = side.load_restarted_ns or earlier
        elif event[2] > side.load_started_ns:
            side.load_restarted_ns = max(side.load_restarted_ns or 0, event[2])
        if leg.flags is None and not leg.remote_request:
            # The arrival event was lost or is yet to be read; the worker names the peer too. It is P's leg,
            # unless this one is P's own, reading back what D kept.
            leg.remote_engine, leg.remote_request = event[4][:2]
            peer = self._legs.get((self.texts.get(leg.remote_engine, ""), leg.remote_request))
            if peer is not None and peer.is_prefill:
                self._join(peer, leg, "remote id")
            else:
                self._named[leg.remote_engine, leg.remote_request] = leg

    def _handshake_waited(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is None:
            return
        side = leg.rank(source.rank)
        side.handshake_waited_ns = min(event[2], side.handshake_waited_ns or event[2])
        link = (source.engine, source.rank, event[4][0])
        _latest(self._handshake_waits, link, 1024).append(side)
        for finished_ns in self._handshakes_finished.get(link, ()):
            _handshake_ended(side, finished_ns)

    def _handshake_started(self, source: Source, event: Event) -> None:
        self._handshaking[source.engine, source.rank] = (event[4][0], event[2])
        if len(self._handshaking) > MAX_LINKS:
            del self._handshaking[next(iter(self._handshaking))]

    def _handshake_finished(self, source: Source, event: Event) -> None:
        seq, _, t_ns, _, args = event
        peer, started_ns, ok, has_offset, offset_ns = args[:5]
        link = (source.engine, source.rank, peer)
        _latest(self._handshakes_finished, link, 64).append(t_ns)
        if self._handshaking.get(link[:2], (0, 0))[0] == peer:
            self._handshaking.pop(link[:2], None)
        for side in self._handshake_waits.get(link, ()):
            _handshake_ended(side, t_ns)
        name = self.text(peer)
        started_ns = t_ns if _past(started_ns, t_ns) is None else started_ns
        self.handshakes.append(
            Handshake(
                uid(source.ring_id, seq),
                source,
                name,
                started_ns,
                t_ns,
                ok == 1,
                offset_ns if has_offset else None,
            )
        )
        if has_offset and abs(offset_ns) < LIMIT_NS:
            _note(self._offsets, (source.boot, name), (offset_ns, t_ns - started_ns))
            for boot in {s.boot for s in self.sources.values() if s.engine == name}:
                self.clocks.estimate(source.boot, boot, offset_ns, t_ns - started_ns)

    def _registration_sent(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None:
            leg.rank(source.rank).registration_sent_ns = event[2]

    def _registration_received(self, source: Source, event: Event) -> None:
        engine = self.texts.get(event[4][0])
        leg = self._leg(engine, event[3], source, event) if engine else None
        if leg is not None:
            side = leg.rank(source.rank)
            side.registration_received_ns = max(event[2], side.registration_received_ns or 0)

    def _push_matched(self, source: Source, event: Event) -> None:
        p = self._leg(source.engine, event[3], source, event)
        if p is None:
            return
        side = p.rank(source.rank)
        if side.matched_ns is None:
            side.matched_ns = event[2]
        elif event[2] > side.matched_ns:
            side.rematched_ns = event[2]
        self._set_prefill(p)
        engine = self.texts.get(event[4][0])
        d = self._leg(engine, event[4][1], source, event) if engine else None
        if d is not None:
            self._join(p, d, "push match")

    def _transfer(self, source: Source, event: Event) -> Transfer | None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is None:
            return None
        transfers = leg.rank(source.rank).transfers
        number = event[4][0]
        found = transfers.get(number)
        if found is None and len(transfers) < MAX_PARTS:
            # Named by its number in its process: either of its two events may be the first to come.
            found = transfers[number] = Transfer(uid(source.ring_id, (1 << 62) + number), source.rank)
        return found

    def _transfer_posted(self, source: Source, event: Event) -> None:
        transfer = self._transfer(source, event)
        if transfer is not None:
            transfer.posted_ns = event[2]
            _, write, begin_ns, done, peer = event[4][:5]
            transfer.begin_ns = _past(begin_ns, event[2])
            transfer.write = write == 1
            transfer.done_on_post = done == 1
            transfer.peer = self.text(peer)

    def _transfer_done(self, source: Source, event: Event) -> None:
        transfer = self._transfer(source, event)
        if transfer is not None:
            t_ns, args = event[2], event[4]
            transfer.done_ns = t_ns
            transfer.last_poll_ns, transfer.poll_ns = _past(args[1], t_ns), _past(args[2], t_ns)
            transfer.start_ns = _past(args[3], t_ns) or 0
            transfer.post_us, transfer.xfer_us, transfer.bytes, transfer.descriptors = args[4:8]

    def _load_done(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None:
            side = leg.rank(source.rank)
            side.load_done_ns = event[2]
            side.load_failed = event[4][0] == 1

    def _send_done(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None:
            leg.rank(source.rank).send_done_ns = event[2]

    def _notification_received(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None:
            side = leg.rank(source.rank)
            side.notified_ns = max(event[2], side.notified_ns or 0)

    def _read_expired(self, source: Source, event: Event) -> None:
        leg = self._leg(source.engine, event[3], source, event)
        if leg is not None:
            leg.rank(source.rank).read_expired = True

    # --- handlers: leases and faults -------------------------------------------------------

    def _lease_leg(self, source: Source, event: Event) -> Leg | None:
        """The leg of a lease; leases outlive their requests, so one that is stored is no straggler's."""
        if (source.engine, event[3]) in self._remembered and (source.engine, event[3]) not in self._legs:
            return None
        return self._leg(source.engine, event[3], source, event)

    def _lease_armed(self, source: Source, event: Event) -> None:
        key = (source.engine, source.rank, event[3])
        if key not in self._leases:
            self._leases[key] = Lease(
                uid(source.ring_id, event[0]), source, event[3], event[2], _deadline(event[4][0])
            )
            if len(self._leases) > MAX_LEASES:
                self.ended_leases.append(self._leases.pop(next(iter(self._leases))))
        leg = self._lease_leg(source, event)
        if leg is not None:
            leg.rank(source.rank).lease_armed_ns = event[2]

    def _lease_renewed(self, source: Source, event: Event) -> None:
        lease = self._leases.get((source.engine, source.rank, event[3]))
        if lease is not None:
            lease.renewals += 1
            lease.deadline_ns = _deadline(event[4][0])
            leg = self._legs.get((source.engine, event[3]))
            if leg is not None:
                self._touch(leg, source, event[2])

    def _end_lease(self, source: Source, event: Event, end: str) -> None:
        lease = self._leases.pop((source.engine, source.rank, event[3]), None)
        if lease is not None:
            lease.ended_ns, lease.end = event[2], end
            self.ended_leases.append(lease)

    def _lease_released(self, source: Source, event: Event) -> None:
        self._end_lease(source, event, "released")

    def _lease_expired(self, source: Source, event: Event) -> None:
        self._end_lease(source, event, "expired")
        leg = self._legs.get((source.engine, event[3]))
        if leg is not None:
            leg.lease_expired = True
            leg.request.batch = self._batch

    def _notification_late(self, source: Source, event: Event) -> None:
        leg = self._legs.get((source.engine, event[3]))
        if leg is not None:
            leg.released_late = True
            leg.request.batch = self._batch
        _note(self._read_late, (text_key(source.engine), event[3]))
        self._fail(source, event, "nixl", "read_after_expiry", self.text(event[3]), leg)

    def _failure(self, source: Source, event: Event) -> None:
        leg = self._legs.get((source.engine, event[3])) if event[3] else None
        name = self.text(event[4][0])
        if leg is not None:
            leg.failure = name
            leg.request.batch = self._batch
            for transfer in leg.transfers() if name.startswith("transfer_") else ():
                transfer.failed = transfer.done_ns is None
        self._fail(source, event, "nixl", name, self.text(event[4][1]), leg)

    def _hook_failed(self, source: Source, event: Event) -> None:
        self._fail(source, event, "hook", self.text(event[4][0]), self.text(event[4][1]), None)

    def _engine_sample(self, source: Source, event: Event) -> None:
        self.engine_samples.append((source, event))

    def _fail(self, source: Source, event: Event, kind: str, name: str, detail: str, leg: Leg | None) -> None:
        number = uid(source.ring_id, event[0])
        request_id = self.request_id_of(source.engine, event[3]) if leg is None and event[3] else None
        self.failures.append(Failure(number, event[2], source, kind, name, detail, leg, request_id))


def _past(value_ns: int, t_ns: int) -> int | None:
    """A moment that an event of time `t_ns` names, which lies before it; all else is no moment."""
    return value_ns if 0 < value_ns <= t_ns else None


def _deadline(value_ns: int) -> int:
    return min(max(value_ns, 0), LIMIT_NS)


def _latest(
    table: dict[tuple[str, int, int], deque[Any]], link: tuple[str, int, int], size: int
) -> deque[Any]:
    """The latest things of a link; only so many links are kept."""
    found = table.get(link)
    if found is None:
        found = table[link] = deque(maxlen=size)
        if len(table) > MAX_LINKS:
            del table[next(iter(table))]
    return found


def _note(notes: dict[Any, Any], key: Any, value: Any = None) -> None:
    """Keep a note for long enough, not for ever."""
    notes[key] = value
    if len(notes) > MAX_NOTES:
        del notes[next(iter(notes))]


def _forget(table: dict[Any, dict[Leg, None]], key: Any, leg: Leg) -> None:
    legs = table.get(key)
    if legs is not None:
        legs.pop(leg, None)
        if not legs:
            del table[key]


def _handshake_ended(side: RankSide, finished_ns: int) -> None:
    """The wait ended with the first handshake that finished after it began."""
    waited, done = side.handshake_waited_ns, side.handshake_done_ns
    if waited is not None and finished_ns >= waited and (done is None or finished_ns < done):
        side.handshake_done_ns = finished_ns
