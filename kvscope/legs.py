"""What is known of a request: its legs, what each rank saw, and what came along with them.

Plain records that `join` fills in and `attribution` reads. Times are on the clock of the engine that saw
them; None is "not observed".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from kvscope import events as ev
from kvscope.events import text_key
from kvscope.ring import About

_SERVED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED", "FINISHED_REPETITION")
STATUSES = {
    text_key(name): name for name in (*_SERVED, "FINISHED_ABORTED", "FINISHED_IGNORED", "FINISHED_ERROR")
}
"""vLLM's RequestStatus of a request that is over, by the key that request.finished carries."""
SERVED = frozenset(map(text_key, _SERVED))
"""Those of one that did what it was there for."""


@dataclass(slots=True, eq=False)
class Source:
    """One ring: who writes it and on which clock."""

    ring_id: bytes
    about: About
    engine: str
    rank: int
    boot: str
    gone: bool = False


@dataclass(slots=True, eq=False)
class Transfer:
    """One NIXL transfer as its worker saw it. Times on the worker's clock; None where not observed."""

    id: int
    rank: int
    write: bool | None = None
    peer: str = ""
    begin_ns: int | None = None
    posted_ns: int | None = None
    done_on_post: bool = False
    last_poll_ns: int | None = None
    poll_ns: int | None = None
    done_ns: int | None = None
    start_ns: int = 0
    post_us: int = 0
    xfer_us: int = 0
    bytes: int = ev.UNKNOWN
    descriptors: int = ev.UNKNOWN
    failed: bool = False


@dataclass(slots=True, eq=False)
class RankSide:
    """What one worker rank saw of a leg."""

    load_started_ns: int | None = None
    load_restarted_ns: int | None = None
    handshake_waited_ns: int | None = None
    handshake_done_ns: int | None = None
    registration_sent_ns: int | None = None
    registration_received_ns: int | None = None
    """On P's clock, kept with D's leg: when P's writer (of that rank) held the registration."""
    matched_ns: int | None = None
    rematched_ns: int | None = None
    notified_ns: int | None = None
    load_done_ns: int | None = None
    load_failed: bool = False
    send_done_ns: int | None = None
    lease_armed_ns: int | None = None
    read_expired: bool = False
    transfers: dict[int, Transfer] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Leg:
    """One engine's part in a request. Times on that engine's clock; None where not observed."""

    engine: str
    key: int
    boot: str
    id: int
    """`uid` of its arrival event; of its first event until that is seen."""
    request: Request
    request_id: str = ""
    source: Source | None = None
    """The ring of its own engine that told of it last."""
    last_event_ns: int = 0
    arrival_ns: int | None = None
    arrived_ns: int | None = None
    flags: int | None = None
    prompt_tokens: int = ev.UNKNOWN
    remote_engine: int = 0
    remote_request: int = 0
    remote_tokens: int = ev.UNKNOWN
    transfer_id: int = 0
    session: int = 0
    trace: str = ""
    considered_ns: int | None = None
    local_tokens: int = ev.UNKNOWN
    load_tokens: int = ev.UNKNOWN
    allocated_ns: int | None = None
    scheduled_ns: list[int] = field(default_factory=list)
    preempted_ns: list[int] = field(default_factory=list)
    deferred_ns: int | None = None
    first_token_ns: int | None = None
    finished_ns: int | None = None
    status: int = 0
    output_tokens: int = ev.UNKNOWN
    cached_tokens: int = ev.UNKNOWN
    external_tokens: int = ev.UNKNOWN
    preemptions: int = 0
    lease: bool = False
    load_reported_ns: int | None = None
    load_failed: bool = False
    send_reported_ns: int | None = None
    released_late: bool = False
    lease_expired: bool = False
    failure: str = ""
    blocks: int = ev.UNKNOWN
    """KV blocks it held when that was last told."""
    ranks: dict[int, RankSide] = field(default_factory=dict)

    def rank(self, rank: int) -> RankSide:
        side = self.ranks.get(rank)
        if side is None:
            side = self.ranks[rank] = RankSide()
        return side

    @property
    def is_prefill(self) -> bool:
        return bool((self.flags or 0) & ev.FLAG_REMOTE_DECODE)

    @property
    def is_decode(self) -> bool:
        return bool((self.flags or 0) & ev.FLAG_REMOTE_PREFILL)

    @property
    def finished(self) -> bool:
        return self.finished_ns is not None

    @property
    def is_cleanup(self) -> bool:
        return bool((self.flags or 0) & ev.FLAG_CLEANUP)

    @property
    def served_ns(self) -> int | None:
        """Its end, if it did what it was there for; also where only the status was not told."""
        return self.finished_ns if not self.status or self.status in SERVED else None

    @property
    def released(self) -> bool:
        """Finished and holding no blocks for a peer."""
        return self.finished and (not self.lease or self.send_reported_ns is not None)

    def transfers(self) -> Iterable[Transfer]:
        for side in self.ranks.values():
            yield from side.transfers.values()


@dataclass(slots=True, eq=False)
class Request:
    """All legs of one client request."""

    p: Leg | None = None
    d: list[Leg] = field(default_factory=list)
    joined_by: str = ""
    due_ns: int = 0
    """Collector's clock when it is to be looked at again; 0 while nothing tells that it may be over."""
    fed_ns: int = 0
    """Collector's clock at its last event."""
    batch: int = 0
    """Number of the last batch of events that told of it: what is made of it before is out of date."""
    session: int = 0
    turn: int = 0

    def legs(self) -> list[Leg]:
        return [self.p, *self.d] if self.p else self.d

    @property
    def id(self) -> int:
        """Names the request: its P leg's arrival, else that of its first decode leg."""
        return self.p.id if self.p else self.d[0].id

    @property
    def decode_leg(self) -> Leg | None:
        """The D leg that had the first token, or got furthest; the only one but for n>1 sampling."""
        if len(self.d) <= 1:
            return self.d[0] if self.d else None
        with_token = [leg for leg in self.d if leg.first_token_ns is not None]
        if with_token:
            return min(with_token, key=lambda leg: (leg.first_token_ns or 0, leg.id))
        return max(self.d, key=lambda leg: (leg.load_reported_ns or 0, leg.allocated_ns or 0, leg.id))


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks that one rank keeps for the peer."""

    id: int
    source: Source
    key: int
    armed_ns: int
    deadline_ns: int
    renewals: int = 0
    ended_ns: int | None = None
    end: str = ""


@dataclass(slots=True, eq=False)
class Handshake:
    id: int
    source: Source
    peer: str
    started_ns: int
    finished_ns: int
    ok: bool
    clock_offset_ns: int | None


@dataclass(slots=True, eq=False)
class Failure:
    id: int
    at_ns: int
    source: Source
    kind: str
    name: str
    detail: str
    leg: Leg | None = None
    request_id: int | None = None
    """Of a request that is stored already."""


def fingerprint(source: Source, name: str, default: Any = "") -> Any:
    """A value of the engine's fingerprint."""
    return source.about.fingerprint.get(name, default)
