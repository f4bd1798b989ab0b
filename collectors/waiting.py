"""What a request that is not over waits for, in words of the field: the peer by name, which notification of
how many, a handshake, KV blocks, a lease. Empty where it computes, or where that is not known."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from kvscope.join import Joiner
from kvscope.legs import Leg, RankSide, Request, Transfer, fingerprint
from kvscope.text import printable, shortened, size, span

NAME_CHARACTERS = 64
"""Engine ids are cut to this."""


def waits_for(request: Request, step: str | None, joiner: Joiner, now_ns: int) -> str:
    """What `request` waits for in `step`; None is the step of one that is over but still holds blocks.

    Args:
        joiner: knows leases, handshakes and names.
        now_ns: Unix time, on the clock of the rings' anchors.
    """
    case = _Case(request.p, request.decode_leg, joiner, now_ns)
    tell = _BY_STEP.get(step or "")
    return tell(case) if tell is not None else ""


class _Case(NamedTuple):
    p: Leg | None
    d: Leg | None
    joiner: Joiner
    now_ns: int

    @property
    def p_name(self) -> str:
        return self._name("P", self.p, self.d)

    @property
    def d_name(self) -> str:
        return self._name("D", self.d, None)

    @property
    def kept_name(self) -> str:
        """The D that kept an earlier turn's KV, which P reads back."""
        return self._name("D", None, self.p)

    def _name(self, role: str, leg: Leg | None, peer: Leg | None) -> str:
        engine = leg.engine if leg is not None else ""
        if not engine and peer is not None:
            engine = self.joiner.text(peer.remote_engine)
        return f"{role} {shortened(printable(engine), NAME_CHARACTERS)}" if engine else role

    @property
    def pushed(self) -> bool:
        for leg in (self.p, self.d):
            if leg is not None and leg.source is not None:
                return bool(fingerprint(leg.source, "transfer_mode") == "push")
        return False

    def clock_ns(self, leg: Leg) -> int:
        """Now, on the leg's clock."""
        return self.now_ns - self.joiner.clocks.wall_ns(leg.boot, 0)

    def age(self, leg: Leg, since_ns: int | None) -> str:
        """`, 12 s`; nothing below a second."""
        return "" if since_ns is None else _after(self.clock_ns(leg) - since_ns)

    def lease(self, leg: Leg) -> str:
        """`; lease ends in 12 s`, `; lease over`, or nothing where none is known."""
        deadlines = [lease.deadline_ns for lease in self.joiner.leases(leg)]
        if not deadlines:
            return "; lease over" if leg.lease_expired else ""
        left_ns = min(deadlines) - self.clock_ns(leg)
        return f"; lease ends in {_whole(left_ns)}" if left_ns > 0 else "; lease over"


def _prefill_queue(case: _Case) -> str:
    if case.p is not None and case.p.preempted_ns:
        return f"KV blocks on {case.p_name} again (preempted)"
    return f"its turn in the queue of {case.p_name if case.p is not None else case.d_name}"


def _prefill_blocks(case: _Case) -> str:
    return f"KV blocks on {case.p_name if case.p is not None else case.d_name} (head of its queue)"


def _prefill(case: _Case) -> str:
    waiting = case.p is not None and case.d is not None and case.d.allocated_ns is not None
    return f"{case.p_name} to finish prefill" if waiting else ""


def _route(case: _Case) -> str:
    if case.p is None or not case.p.finished:
        return ""
    awaited = "D's registration" if case.pushed else "D to fetch"
    return awaited + case.lease(case.p)


def _admit(case: _Case) -> str:
    return f"its turn in the queue of {case.d_name}"


def _blocks(case: _Case) -> str:
    return f"KV blocks on {case.d_name} (head of its queue)"


def _handshake(case: _Case) -> str:
    """D's with P; in push also P's with D."""
    for leg, peer in ((case.d, case.p_name), (case.p, case.d_name)):
        found = _waiting_side(leg)
        if leg is not None and found is not None:
            return _handshake_with(case, leg, peer, *found)
    return f"handshake with {case.p_name}"


def _reuse_handshake(case: _Case) -> str:
    found = _waiting_side(case.p)
    if case.p is None or found is None:
        return f"handshake with {case.kept_name}"
    return _handshake_with(case, case.p, case.kept_name, *found)


def _waiting_side(leg: Leg | None) -> tuple[int, int] | None:
    """(rank, since when) of the rank that has waited longest for a handshake."""
    sides = leg.ranks.items() if leg is not None else ()
    since = [
        (side.handshake_waited_ns, rank)
        for rank, side in sides
        if side.handshake_waited_ns is not None and side.handshake_done_ns is None
    ]
    return None if not since else min(since)[::-1]


def _handshake_with(case: _Case, leg: Leg, peer: str, rank: int, since_ns: int) -> str:
    other = case.joiner.handshaking(leg.engine, rank)
    ahead = f", behind that with {shortened(printable(other), NAME_CHARACTERS)}"
    is_other = bool(other) and not peer.endswith(f" {other}")
    return f"handshake with {peer}{case.age(leg, since_ns)}{ahead if is_other else ''}"


def _notify(case: _Case) -> str:
    if case.p is None:
        return f"WRITE from {case.p_name}"
    sides = case.d.ranks.values() if case.d is not None else ()
    if not any(side.registration_sent_ns is not None for side in sides):
        return f"{case.d_name} to send its registration{case.lease(case.p)}"
    return f"registration of {case.d_name} to reach {case.p_name}{case.lease(case.p)}"


def _dispatch(case: _Case) -> str:
    writes = case.pushed and case.p is not None
    return f"{case.p_name} to start the WRITE" if writes else f"{case.d_name} to start the READ"


def _moving(case: _Case) -> str:
    if case.pushed and case.p is not None:
        return _transfer(case, case.p, "WRITE", f"to {case.d_name}", case.p_name, case.d)
    if case.d is None:
        return ""
    return _transfer(case, case.d, "READ", f"from {case.p_name}", case.d_name, case.d)


def _reading_back(case: _Case) -> str:
    if case.p is None:
        return ""
    return _transfer(case, case.p, "READ", f"from {case.kept_name}", case.p_name, case.p)


def _transfer(case: _Case, leg: Leg, operation: str, way: str, poster: str, loads: Leg | None) -> str:
    """A transfer that `leg` posts, or is to post, for the leg that `loads`."""
    moves: list[Transfer] = [t for t in leg.transfers() if bool(t.write) == (operation == "WRITE")]
    open_ = [t for t in moves if t.done_ns is None]
    if not moves:
        return f"{poster} to post the {operation}"
    if not open_:
        return f"{poster}'s poll"
    if any(t.failed for t in open_):
        return f"{operation} {way}, which failed"
    # How many bytes is told at the end only, by the ranks that are through.
    told = [t.bytes for t in moves if t.bytes >= 0]
    amount = f" of {size(max(told))}" if told else ""
    if not amount and loads is not None and loads.load_tokens > 0:
        amount = f" of {loads.load_tokens} tokens"
    ranks = f" on {len({t.rank for t in open_})} of {len(leg.ranks)} ranks" if len(leg.ranks) > 1 else ""
    since = min((t.posted_ns for t in open_ if t.posted_ns is not None), default=None)
    return f"{operation}{amount} {way} running{ranks}{case.age(leg, since)}"


def _signal(case: _Case) -> str:
    sides: list[RankSide] = list(case.d.ranks.values()) if case.d is not None else []
    came = sum(side.notified_ns is not None for side in sides)
    which = f" {came + 1} of {len(sides)}" if len(sides) > 1 and came < len(sides) else ""
    return f"notification{which} from {case.p_name}"


def _report(case: _Case) -> str:
    return _reports(case.d, case.d_name)


def _reuse_report(case: _Case) -> str:
    return _reports(case.p, case.p_name)


def _reports(leg: Leg | None, name: str) -> str:
    sides = list(leg.ranks.values()) if leg is not None else []
    done = sum(side.load_done_ns is not None for side in sides)
    ranks = f" ({done} of {len(sides)} ranks are done)" if len(sides) > 1 else ""
    return f"{name}'s scheduler to hear of it{ranks}"


def _held(case: _Case) -> str:
    """The request is over, and P still keeps its blocks."""
    p = case.p
    if p is None or not p.finished or p.released:
        return ""
    if any(t.write and t.done_ns is None for t in p.transfers()):
        return f"WRITE to {case.d_name}, which did not finish{case.lease(p)}"
    return f"{case.p_name} to free its blocks{case.lease(p)}"


_BY_STEP: dict[str, Callable[[_Case], str]] = {
    "": _held,
    "prefill.frontend": lambda case: f"the frontend of {case.p_name if case.p is not None else case.d_name}",
    "prefill.queue": _prefill_queue,
    "prefill.blocks": _prefill_blocks,
    "prefill.reuse_dispatch": lambda case: f"{case.p_name} to start the READ",
    "prefill.reuse_handshake": _reuse_handshake,
    "prefill.reuse_post": _reading_back,
    "prefill.reuse_wire": _reading_back,
    "prefill.reuse_detect": _reading_back,
    "prefill.reuse_report": _reuse_report,
    "prefill.reuse_promote": lambda case: f"the next step of {case.p_name}",
    "prefill.reuse_admit": lambda case: f"a place in the batch of {case.p_name}",
    "prefill.compute": _prefill,
    "registration.route": _route,
    "registration.admit": _admit,
    "registration.blocks": _blocks,
    "registration.handshake": _handshake,
    "registration.notify": _notify,
    "transfer.dispatch": _dispatch,
    "transfer.post": _moving,
    "transfer.wire": _moving,
    "readiness.detect": _moving,
    "readiness.signal": _signal,
    "readiness.report": _report,
    "readiness.promote": lambda case: f"the next step of {case.d_name}",
    "readiness.admit": lambda case: f"a place in the batch of {case.d_name}",
}


def _after(ns: int) -> str:
    return f", {_whole(ns)}" if ns >= 10**9 else ""


def _whole(ns: int) -> str:
    """A duration in whole seconds, so that a text does not change with every look."""
    return f"{ns // 10**9} s" if ns < 120 * 10**9 else span(ns)
