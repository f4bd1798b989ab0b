"""vLLM's logs as requests: what its lines at level DEBUG tell of requests, handshakes, leases and failures.

A line tells when something was logged, to the second, or to what a prefix of the container runtime says.
From these moments requests are attributed by the same rules as from kvscope's own events
(`kvscope.attribution`); each interval carries how far its ends may be off. vLLM logs no first token, so that
TTFT is known only where the outputs of streamed answers were logged.

Legs are joined as `kvscope.join` does: by the peer's request id in `kv_transfer_params`, else, marked as
inferred, by the client's request id; never by time.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import IO, Any, NamedTuple

import msgspec

from kvscope import events as ev
from kvscope import schema
from kvscope.analysis.exchange.import_lines import Notes, lines
from kvscope.analysis.exchange.import_store import Store
from kvscope.analysis.exchange.partial import name_id, request_row, row, split_of
from kvscope.attribution import Rates, attribute
from kvscope.clock import Clocks
from kvscope.events import text_key
from kvscope.join import client_id
from kvscope.legs import SERVED, STATUSES, Leg, Request, Transfer
from kvscope.text import printable

MAX_LINE_BYTES = 1 << 20
"""Of a log; prompts make long lines, and what is wanted stands at their beginning."""
HELD = 100_000
"""Legs held until all files were read; beyond it the oldest is stored alone."""
MAX_TURNS = 10_000
SECOND_NS = 10**9
MAX_SECONDS = 10**9


class Moment(NamedTuple):
    """When a line was logged: Unix time, and how far the truth may lie behind it."""

    at_ns: int
    error_ns: int


class LogLine(NamedTuple):
    when: Moment
    pid: int
    """0 where it is not told."""
    process: str
    message: str


@dataclass(slots=True, eq=False)
class _Lease:
    armed_ns: int
    deadline_ns: int
    renewals: int = 0
    ended_ns: int | None = None
    end: str = ""


@dataclass(slots=True, eq=False)
class _Told:
    """What lines tell of a leg besides its moments."""

    leg: Leg
    file: int
    error_ns: int = 0
    lease: _Lease | None = None
    skipped: str = ""
    """Why KV kept on D was not read back."""
    aborted: bool = False
    failed: str = ""
    last_ns: int = 0
    writes: bool = False
    """Push."""
    first: _Told | None = None
    """P's leg, of one of D that was joined."""
    followed: bool = False
    """A later turn names it."""
    identity: int | None = None
    """Of the request, once that is stored."""


@dataclass(slots=True, eq=False)
class _Log:
    """One file: an engine, or several told apart by process id."""

    number: int
    name: str
    engines: dict[int, str] = field(default_factory=dict)
    """By process id."""
    about: dict[str, Any] = field(default_factory=dict)
    first_ns: int = 0

    def engine(self, pid: int) -> str:
        """The engine of a process; the file's own name where none was told."""
        if pid in self.engines:
            return self.engines[pid]
        names = set(self.engines.values())
        return next(iter(names)) if len(names) == 1 else ""


class Logs:
    """Takes in the lines of files and stores what they tell, joined, at the end."""

    def __init__(self, store: Store, notes: Notes, label: str) -> None:
        self._store, self._notes, self._label = store, notes, label
        self._told: OrderedDict[tuple[int, str], _Told] = OrderedDict()
        self._by_remote: dict[tuple[int, bool, str], _Told] = {}
        """Legs, of P or not, by their peer's request id; of this file. Lines may tell that alone."""
        self._by_external: dict[tuple[int, str], _Told] = {}
        """Legs by the id that the API server has for them."""
        self._pending: OrderedDict[tuple[int, str], tuple[Moment, str]] = OrderedDict()
        """By the API server's id: when it had a request, and its parameters."""
        self._texts: dict[int, str] = {}
        """By key: request ids, engine ids and statuses."""
        self._logs: list[_Log] = []
        self._failures: list[tuple[dict[str, Any], _Told | None]] = []
        self._handshakes: dict[tuple[int, int], float] = {}
        self._log = _Log(-1, "")

    def read(self, file: IO[bytes], name: str, offset: timedelta, year: int) -> None:
        """All lines of a file, which is one engine's log, or several engines' with vLLM's process ids.

        Args:
            offset: of local time, in which vLLM logs, from UTC.
            year: of lines that tell none.
        """
        stamps = Stamps(offset, year)
        self._log = _Log(len(self._logs), name)
        self._logs.append(self._log)
        for line in lines(file, self._notes, MAX_LINE_BYTES):
            told = stamps.read(line)
            if told is None:
                self._notes.count("lines that vLLM did not stamp")
                continue
            self._log.first_ns = self._log.first_ns or told.when.at_ns
            self._line(told)
        for found in self._by_remote.values():
            if not found.leg.request_id:
                self._notes.count("decode legs of which only the peer's request id was logged")
        self._by_remote.clear()

    def _line(self, told: LogLine) -> None:
        for mark, pattern, handler in _PATTERNS:
            if mark in told.message and (match := pattern.search(told.message)):
                handler(self, told, match)
                return

    # --- legs ------------------------------------------------------------------------------------

    def _leg(self, told: LogLine, request: str) -> _Told:
        key = (self._log.number, request[:512])
        found = self._told.get(key)
        if found is None:
            engine = self._log.engine(told.pid)
            leg = Leg(engine, text_key(request), "", 0, Request(), request_id=request[:512])
            found = self._told[key] = _Told(leg, self._log.number)
            self._by_external[self._log.number, _external(request)] = found
            if len(self._told) > HELD:
                self._notes.count("legs stored before all files were read: they may be stored apart")
                (number, oldest), alone = self._told.popitem(last=False)
                self._by_external.pop((number, _external(oldest)), None)
                self._store_request([alone], "unjoined")
        elif not found.leg.engine:
            found.leg.engine = self._log.engine(told.pid)
        found.error_ns = max(found.error_ns, told.when.error_ns)
        found.last_ns = max(found.last_ns, told.when.at_ns)
        return found

    def _by_peer(self, told: LogLine, parameters: str) -> _Told | None:
        """The leg of which a line tells the peer's request id only: D's, or P's that reads back."""
        remote = _parameter(parameters, "remote_request_id")
        if not remote:
            return None
        key = (self._log.number, _is(parameters, "do_remote_decode"), remote)
        found = self._by_remote.get(key)
        if found is None:
            if len(self._by_remote) >= HELD:
                return None
            leg = Leg(self._log.engine(told.pid), 0, "", 0, Request())
            found = self._by_remote[key] = _Told(leg, self._log.number)
        found.error_ns = max(found.error_ns, told.when.error_ns)
        found.last_ns = max(found.last_ns, told.when.at_ns)
        self._parameters(found, parameters)
        return found

    def _parameters(self, found: _Told, parameters: str) -> None:
        """Roles and peers, from kv_transfer_params as they are printed."""
        leg = found.leg
        remote = _parameter(parameters, "remote_request_id")
        engine = _parameter(parameters, "remote_engine_id")
        if _is(parameters, "do_remote_decode"):
            leg.flags = (leg.flags or 0) | ev.FLAG_REMOTE_DECODE
            if remote:
                leg.flags |= ev.FLAG_REUSE_OFFERED
        elif remote or _is(parameters, "do_remote_prefill"):
            leg.flags = (leg.flags or 0) | ev.FLAG_REMOTE_PREFILL
        if remote:
            leg.remote_request = self._key(remote)
        if engine:
            leg.remote_engine = self._key(engine)
        if (tokens := _PARAMETER_TOKENS.search(parameters)) is not None:
            leg.remote_tokens = min(int(tokens[1]), MAX_SECONDS)

    def _key(self, text: str) -> int:
        """The key of a text, kept for as long as a leg that is held uses it."""
        if len(self._texts) > 5 * HELD:
            legs = [told.leg for told in (*self._told.values(), *self._by_remote.values())]
            used = {key for leg in legs for key in (leg.remote_request, leg.remote_engine, leg.status)}
            self._texts = {key: known for key, known in self._texts.items() if key in used}
        key = text_key(text)
        self._texts[key] = text
        return key

    # --- what lines say --------------------------------------------------------------------------

    def _received(self, told: LogLine, match: re.Match[str]) -> None:
        self._pending[self._log.number, match[1]] = (told.when, match[2][:20_000])
        if len(self._pending) > HELD:
            self._pending.popitem(last=False)

    def _added(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        when, parameters = self._pending.pop((self._log.number, _external(match[1])), (told.when, ""))
        found.leg.arrival_ns = when.at_ns
        if parameters:
            self._parameters(found, parameters)
        self._adopt(found)

    def _adopt(self, found: _Told) -> None:
        """Take over what was told under the peer's request id alone."""
        leg = found.leg
        key = (found.file, leg.is_prefill, self._texts.get(leg.remote_request, ""))
        other = self._by_remote.get(key)
        if not key[2] or other is found or (other is not None and other.leg.request_id):
            return
        self._by_remote[key] = found
        if other is None:
            return
        for name in ("considered_ns", "allocated_ns"):
            if getattr(leg, name) is None:
                setattr(leg, name, getattr(other.leg, name))
        for name in ("local_tokens", "load_tokens"):
            if getattr(leg, name) == ev.UNKNOWN:
                setattr(leg, name, getattr(other.leg, name))
        leg.scheduled_ns = leg.scheduled_ns or other.leg.scheduled_ns
        found.error_ns = max(found.error_ns, other.error_ns)

    def _considered(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._by_peer(told, match[2])
        if found is not None and found.leg.considered_ns is None:
            found.leg.considered_ns = told.when.at_ns
            found.leg.local_tokens = min(int(match[1]), MAX_SECONDS)

    def _allocated(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._by_peer(told, match[2])
        if found is None:
            return
        if tokens := min(int(match[1]), MAX_SECONDS):
            found.leg.allocated_ns = found.leg.allocated_ns or told.when.at_ns
            found.leg.load_tokens = tokens
        elif "'_remote_blocks_processed'" in match[2] and not found.leg.scheduled_ns:
            found.leg.scheduled_ns.append(told.when.at_ns)

    def _load_started(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        side = found.leg.rank(_rank(told.process))
        side.load_started_ns = side.load_started_ns or told.when.at_ns
        found.leg.remote_engine = self._key(match[2])

    def _posting(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[3])
        side = found.leg.rank(_rank(told.process))
        write = match[2] == "_xfer_blocks"
        found.writes = found.writes or write
        if write:
            side.matched_ns = side.matched_ns or told.when.at_ns
        if len(side.transfers) < 64:
            number = len(side.transfers)
            identity = name_id("log", self._label, match[3], told.process, number)
            side.transfers[number] = Transfer(
                identity, _rank(told.process), write, match[1], begin_ns=told.when.at_ns, posted_ns=None
            )

    def _load_reported(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        found.leg.load_reported_ns = found.leg.load_reported_ns or told.when.at_ns

    def _send_reported(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        found.leg.send_reported_ns = told.when.at_ns
        if found.lease is not None and found.lease.ended_ns is None:
            found.lease.ended_ns, found.lease.end = told.when.at_ns, "released"

    def _finished(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        leg = found.leg
        leg.finished_ns = told.when.at_ns
        leg.status = self._key(match[2])
        self._parameters(found, match[3])
        self._adopt(found)

    def _lease_armed(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        at_ns, seconds = told.when.at_ns, min(int(match[2]), MAX_SECONDS)
        found.lease = found.lease or _Lease(at_ns, at_ns + seconds * SECOND_NS)
        found.leg.lease = True

    def _lease_renewed(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        if found.lease is not None:
            later_ns = told.when.at_ns + min(int(match[2]), MAX_SECONDS) * SECOND_NS
            moved = float(match[4]) > float(match[3])
            found.lease.renewals += moved
            if moved:
                found.lease.deadline_ns = max(found.lease.deadline_ns, later_ns)

    def _lease_expired(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        found.leg.lease_expired = True
        if found.lease is not None and found.lease.ended_ns is None:
            found.lease.ended_ns, found.lease.end = told.when.at_ns, "expired"

    def _read_late(self, told: LogLine, match: re.Match[str]) -> None:
        self._leg(told, match[1]).leg.released_late = True
        self._fail(told, "read_after_expiry", match[1], match[1])

    def _skipped(self, told: LogLine, match: re.Match[str]) -> None:
        self._leg(told, match[1]).skipped = "below threshold"

    def _declined(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        found.skipped = "expired"
        found.leg.rank(_rank(told.process)).read_expired = True

    def _push_stored(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        found.writes = True
        found.leg.flags = (found.leg.flags or 0) | ev.FLAG_REMOTE_PREFILL
        found.leg.allocated_ns = found.leg.allocated_ns or told.when.at_ns

    def _registered(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._leg(told, match[1])
        found.writes = True
        found.leg.rank(_rank(told.process)).registration_sent_ns = told.when.at_ns

    def _registration_lost(self, told: LogLine, match: re.Match[str]) -> None:
        self._leg(told, match[1]).failed = "registration_timed_out"
        self._fail(told, "registration_timed_out", "", match[1])

    def _failure(self, told: LogLine, match: re.Match[str]) -> None:
        request, peer = _parameter(match[2], "request_id"), _parameter(match[2], "remote_engine_id")
        name = match[1].partition(".")[0][:80]
        if request:
            found = self._leg(told, request)
            found.leg.failure = name
            for transfer in found.leg.transfers():
                transfer.failed = True
        self._fail(told, name, peer, request)

    def _fail(self, told: LogLine, name: str, detail: str, request: str) -> None:
        known = {
            "id": name_id("log", self._label, told.when.at_ns, told.process, name, detail, request),
            "at_ns": told.when.at_ns,
            "engine": self._log.engine(told.pid) or self._log.name,
            "source": "worker",
            "rank": _rank(told.process),
            "kind": "nixl",
            "name": name,
            "detail": detail,
        }
        found = self._told.get((self._log.number, request))
        if len(self._failures) < HELD:
            self._failures.append((known, found))
        else:
            self._notes.count(f"failures beyond the first {HELD}")

    def _ended_badly(self, told: LogLine, match: re.Match[str]) -> None:
        """The API server knows the client's id only; a leg of that id that is not finished is meant."""
        found = self._by_external.get((self._log.number, match[1]))
        if found is not None and found.leg.finished_ns is None:
            found.leg.finished_ns = told.when.at_ns
            found.aborted, found.failed = match[2].startswith("aborted"), match[2][:200]

    def _output(self, told: LogLine, match: re.Match[str]) -> None:
        found = self._by_external.get((self._log.number, match[1]))
        if found is not None:
            found.leg.first_token_ns = found.leg.first_token_ns or told.when.at_ns
            found.error_ns = max(found.error_ns, told.when.error_ns)

    def _named(self, told: LogLine, match: re.Match[str]) -> None:
        if len(self._log.engines) < 10_000:
            self._log.engines[told.pid] = printable(match[1])[:200]

    def _connector(self, told: LogLine, match: re.Match[str]) -> None:
        self._log.about["connector"] = match[1]
        self._log.about["transfer_mode"] = "push" if "Push" in match[1] else "pull"
        self._named(told, re.match(r"(\S+)", match[2]) or match)

    def _configured(self, told: LogLine, match: re.Match[str]) -> None:
        about = self._log.about
        about["vllm"] = match[1]
        for name, pattern in _CONFIGURED.items():
            if found := pattern.search(told.message):
                about[name] = found[1][:200]

    def _bidirectional(self, told: LogLine, match: re.Match[str]) -> None:
        self._log.about["extra_config"] = {"bidirectional_kv_xfer": True}

    def _handshake_asked(self, told: LogLine, match: re.Match[str]) -> None:
        if len(self._handshakes) < 10_000:
            self._handshakes[self._log.number, told.pid] = float(match[1])

    def _handshake_done(self, told: LogLine, match: re.Match[str]) -> None:
        asked = self._handshakes.pop((self._log.number, told.pid), None)
        if asked is None:
            return
        ns = round(min(asked + float(match[1]), 1e9) * 1e9)
        self._store.add(
            schema.HANDSHAKES.name,
            row(
                schema.HANDSHAKES,
                id=name_id("log", self._label, told.when.at_ns, told.process, match[1]),
                engine=self._log.engine(told.pid) or self._log.name,
                rank=_rank(told.process),
                started_at_ns=told.when.at_ns - ns,
                ns=ns,
                ok=True,
            ),
        )

    # --- the end ---------------------------------------------------------------------------------

    def finish(self) -> None:
        """Join what was read, and store it."""
        legs = list(self._told.values())
        by_id: dict[str, list[_Told]] = {}
        clients: dict[str, list[_Told]] = {}
        for told in legs:
            told.leg.engine = told.leg.engine or self._logs[told.file].engine(0) or self._logs[told.file].name
            by_id.setdefault(told.leg.request_id, []).append(told)
            clients.setdefault(client_id(told.leg.request_id), []).append(told)
        joined: dict[int, list[_Told]] = {}
        how: dict[int, str] = {}
        taken: set[int] = set()
        for d in legs:
            if not d.leg.is_decode:
                continue
            peers = [p for p in by_id.get(self._texts.get(d.leg.remote_request, ""), ()) if p is not d]
            engine = self._texts.get(d.leg.remote_engine, "")
            peers = [p for p in peers if p.leg.engine in ("", engine, self._logs[p.file].name) or not engine]
            if len(peers) == 1 and not peers[0].leg.is_decode:
                self._pair(peers[0], d, "remote id", joined, how, taken)
        for some in clients.values():
            alone = [told for told in some if id(told) not in taken]
            prefills = [told for told in alone if told.leg.is_prefill]
            decodes = [told for told in alone if told.leg.is_decode]
            if len(prefills) == 1 and len(decodes) == 1 and prefills[0].leg.engine != decodes[0].leg.engine:
                self._pair(prefills[0], decodes[0], "client id", joined, how, taken)
        for told in legs:
            for d in joined.get(id(told), ()):
                d.first = told
        for told in legs:
            if (earlier := self._earlier(told, by_id)) is not None:
                earlier.followed = True
        for told in legs:
            if id(told) in joined:
                self._store_request([told, *joined[id(told)]], how[id(told)], self._turn(told, by_id))
            elif id(told) not in taken:
                by = "unjoined" if told.leg.flags else "single leg"
                self._store_request([told], by, self._turn(told, by_id))
        for known, owner in self._failures:
            self._store.add(
                schema.FAILURES.name,
                row(schema.FAILURES, **known, request_id=owner.identity if owner else None),
            )
        self._store_engines()
        self._told.clear()

    def _earlier(self, told: _Told, by_id: dict[str, list[_Told]]) -> _Told | None:
        """The first leg of the request whose D leg kept KV for this one's P leg."""
        if not told.leg.is_prefill or not told.leg.remote_request:
            return None
        kept = [
            leg for leg in by_id.get(self._texts.get(told.leg.remote_request, ""), ()) if leg.leg.is_decode
        ]
        return (kept[0].first or kept[0]) if len(kept) == 1 else None

    def _turn(self, told: _Told, by_id: dict[str, list[_Told]]) -> tuple[int | None, int | None]:
        """The session of the request that begins with this leg, and its place in it."""
        turns = [told]
        while len(turns) < MAX_TURNS and (earlier := self._earlier(turns[-1], by_id)) is not None:
            if earlier in turns:
                break
            turns.append(earlier)
        if len(turns) == 1 and not told.followed:
            return None, None
        return self._id(turns[-1]), len(turns)

    def _pair(
        self,
        p: _Told,
        d: _Told,
        by: str,
        joined: dict[int, list[_Told]],
        how: dict[int, str],
        taken: set[int],
    ) -> None:
        joined.setdefault(id(p), []).append(d)
        how[id(p)] = by
        taken |= {id(p), id(d)}

    def _id(self, told: _Told) -> int:
        """A request's id: the hash of its first leg's internal id, which vLLM makes unique."""
        return name_id("log", self._label, told.leg.request_id)

    def _store_request(
        self, legs: Sequence[_Told], joined_by: str, turn: tuple[int | None, int | None] = (None, None)
    ) -> None:
        first = legs[0]
        is_p = len(legs) > 1 or first.leg.is_prefill
        request = Request(
            first.leg if is_p else None, [told.leg for told in (legs[1:] if is_p else legs)], joined_by
        )
        p, d = request.p, request.decode_leg
        if len(legs) == 1 and _CLEANUP.fullmatch(first.leg.request_id):
            self._notes.count("vLLM's own clean-up requests")
            return
        breakdown = attribute(request, Clocks(), Rates())
        error_ns = max(told.error_ns for told in legs)
        outcome, detail = self._outcome(request, legs)
        arrived_ns = breakdown.t0_ns or min(told.last_ns for told in legs)
        lead = next((told for told in legs if told.leg is d), first)
        identity = self._id(first)
        push = any(told.writes for told in legs)
        self._store.add(
            schema.REQUESTS.name,
            request_row(
                split_of(breakdown, error_ns),
                breakdown.generate.ns if breakdown.generate else None,
                id=identity,
                client_id=client_id(first.leg.request_id),
                arrived_at_ns=arrived_ns,
                label=self._label,
                model=self._logs[lead.file].about.get("model"),
                connector=self._connector_of(legs, push),
                outcome=outcome,
                outcome_detail=detail,
                current_step=None
                if outcome == "finished" or breakdown.current is None
                else breakdown.current.name,
                read_after_expiry=any(told.leg.released_late for told in legs),
                joined_by=joined_by,
                p_engine=p.engine if p else None,
                d_engine=d.engine if d else None,
                p_request=p.request_id if p else None,
                d_request=d.request_id if d else None,
                d_legs=len(request.d),
                session=turn[0],
                turn=turn[1],
                **_reuse(p, next((told.skipped for told in legs if told.skipped), "")),
                transferred_tokens=_transferred(d),
                ttft_ns=breakdown.ttft_ns,
                lead_ns=breakdown.lead_ns,
                clock_error_ns=None if len({told.file for told in legs}) > 1 else 0,
            ),
        )
        self._notes.requests += 1
        self._notes.joined += len(legs) > 1
        for told in legs:
            told.identity = identity
            self._store_parts(told, identity)

    def _store_parts(self, told: _Told, identity: int) -> None:
        leg, lease = told.leg, told.lease
        for transfer in leg.transfers():
            over = leg.send_reported_ns if transfer.write else leg.load_reported_ns
            self._store.add(
                schema.TRANSFERS.name,
                row(
                    schema.TRANSFERS,
                    id=transfer.id,
                    request_id=identity,
                    posted_at_ns=transfer.begin_ns,
                    operation="WRITE" if transfer.write else "READ",
                    engine=leg.engine,
                    rank=transfer.rank,
                    peer=transfer.peer,
                    state="failed" if transfer.failed else "open" if over is None else "done",
                ),
            )
        if lease is not None:
            self._store.add(
                schema.LEASES.name,
                row(
                    schema.LEASES,
                    id=name_id("log", self._label, leg.request_id, "lease"),
                    request_id=identity,
                    engine=leg.engine,
                    rank=0,
                    armed_at_ns=lease.armed_ns,
                    deadline_at_ns=lease.deadline_ns,
                    renewals=lease.renewals,
                    ended_at_ns=lease.ended_ns,
                    end=lease.end or "lost",
                ),
            )

    def _connector_of(self, legs: Sequence[_Told], push: bool) -> str | None:
        abouts = [self._logs[told.file].about for told in legs]
        if push:
            return "push"
        if any("extra_config" in about for about in abouts):
            return "bidirectional"
        if any(told.leg.flags for told in legs):
            return next((about["transfer_mode"] for about in abouts if "transfer_mode" in about), "pull")
        return None

    def _outcome(self, request: Request, legs: Sequence[_Told]) -> tuple[str, str | None]:
        failure = next(
            (told.leg.failure or told.failed for told in legs if told.leg.failure or told.failed), None
        )
        if any(told.aborted for told in legs):
            return "aborted", failure
        p = request.p
        if p is not None and p.lease_expired:
            failure = failure or "lease expired"
            if not request.d:
                return "incomplete", "lease expired, never read"
        ends = request.d or [told.leg for told in legs]
        if not all(leg.finished for leg in ends):
            return "incomplete", failure
        bad = next((leg for leg in ends if leg.status and leg.status not in SERVED), None)
        if bad is None:
            return ("error" if any(told.failed for told in legs) else "finished"), failure
        status = STATUSES.get(bad.status) or self._texts.get(bad.status, "")
        outcome = {"FINISHED_ABORTED": "aborted", "FINISHED_IGNORED": "ignored"}.get(status, "error")
        return outcome, failure or status or None

    def _store_engines(self) -> None:
        for log in self._logs:
            for name in sorted(set(log.engines.values())) or [log.name]:
                told = {"imported_from": "vLLM log", **log.about}
                self._store.add(
                    schema.ENGINES.name,
                    row(
                        schema.ENGINES,
                        id=name_id("log", self._label, name),
                        ring=f"imported {name}",
                        engine=name,
                        source="scheduler",
                        rank=0,
                        started_at_ns=log.first_ns or None,
                        label=self._label,
                        hooks_missing=[],
                        fingerprint=msgspec.json.encode(told).decode(),
                        state="ended",
                        state_detail="imported from vLLM's log: not recorded by kvscope",
                    ),
                )


# --- lines --------------------------------------------------------------------------------------------


_Handler = Callable[[Logs, LogLine, "re.Match[str]"], None]
_ID = r"([^\s,()]{1,512})"
_STATUS = r"(?:RequestStatus\.)?(\w{1,64})"
_PARAMS = r"kv_transfer_params=(.*)"
_EXPIRIES = r"\(old_expiry=(-?\d{1,15}(?:\.\d{1,9})?), new_expiry=(-?\d{1,15}(?:\.\d{1,9})?)\)"
_PATTERNS: list[tuple[str, re.Pattern[str], _Handler]] = [
    (mark, re.compile(pattern), handler)
    for mark, pattern, handler in (
        ("get_num_new_matched_tokens:", rf"num_computed_tokens=(\d{{1,12}}), {_PARAMS}", Logs._considered),
        ("update_state_after_alloc:", rf"num_external_tokens=(\d{{1,12}}), {_PARAMS}", Logs._allocated),
        ("before releasing blocks", rf"\({_ID}\) waiting for (\d{{1,12}}) seconds", Logs._lease_armed),
        ("request_finished(", rf"\({_ID}\), request_status={_STATUS}, {_PARAMS}", Logs._finished),
        ("start_load_kv", rf"for request {_ID} from remote engine {_ID}\. Num", Logs._load_started),
        ("available, calling", rf"{_ID} available, calling (\w{{1,40}}) .* for req {_ID}$", Logs._posting),
        ("Finished recving KV transfer", rf"for request {_ID}$", Logs._load_reported),
        ("Finished sending KV transfer", rf"for request {_ID}$", Logs._send_reported),
        ("Heartbeat extended lease", rf"for request {_ID} by (\d{{1,9}})s {_EXPIRIES}", Logs._lease_renewed),
        ("Releasing expired KV blocks", rf"for request {_ID} which were", Logs._lease_expired),
        ("Potentially invalid KV blocks", rf"unrecognized request {_ID} were retrieved", Logs._read_late),
        ("notif (may have expired)", rf"Unrecognized request {_ID} notif", Logs._read_late),
        ("Skipping remote pull", rf"for {_ID}: \d+ remote tokens < threshold", Logs._skipped),
        ("Declining expired remote read", rf"for {_ID} from engine", Logs._declined),
        ("D node storing registration", rf"for request {_ID}$", Logs._push_stored),
        ("Sent PUSH_REG", rf"for {_ID} to engine", Logs._registered),
        ("without a push completion", rf"registration for request {_ID} timed out", Logs._registration_lost),
        ("NIXL transfer failure", r"failure: (.{1,200}?) \| Context: (\{.*)", Logs._failure),
        ("Received request", rf"^Received request {_ID}: params: (.*)", Logs._received),
        ("Added request", rf"^Added request {_ID}\.$", Logs._added),
        ("Request ", rf"^Request {_ID} (aborted|failed[^.]{{0,200}})", Logs._ended_badly),
        ("Generated response", rf"^Generated response {_ID} \(streaming (?:delta|complete)\):", Logs._output),
        ("Initializing NIXL", rf"^Initializing NIXL (?:[Ss]cheduler|[Ww]orker) {_ID}$", Logs._named),
        ("Creating v1 connector", rf"with name: (\w{{1,80}}) and engine_id: {_ID}", Logs._connector),
        ("Initializing a V1 LLM engine", r"\(v([^)]{1,60})\)", Logs._configured),
        ("non-default args", r"'bidirectional_kv_xfer': True", Logs._bidirectional),
        ("get metadata took", r"took: (\d+(?:\.\d+)?)", Logs._handshake_asked),
        ("add agent took", r"took: (\d+(?:\.\d+)?)", Logs._handshake_done),
    )
]  # fmt: skip
"""What marks a line, how it is written (vLLM 0.32), and what it says. The first that fits counts."""

_CONFIGURED = {
    "model": re.compile(r"served_model_name=([^,\s]{1,200})"),
}
_CLEANUP = re.compile(r"[0-9a-f]{16}")
"""Ids of requests that vLLM makes itself, to have a peer give blocks back; others end in "-" and 8 digits."""
_PARAMETER_TOKENS = re.compile(r"'remote_num_tokens': (\d{1,12})")


def _external(request: str) -> str:
    """The API server's id of an internal one, which vLLM makes unique by 8 digits."""
    return re.sub(r"-[0-9a-f]{8}$", "", request)


def _parameter(parameters: str, name: str) -> str:
    """A text among parameters, printed as Python does."""
    found = re.search(rf"'{name}': ['\"]([^'\"]{{1,512}})['\"]", parameters)
    return found[1] if found else ""


def _is(parameters: str, name: str) -> bool:
    return f"'{name}': True" in parameters


def _rank(process: str) -> int:
    """`Worker_TP1` and `VllmWorker-1` are rank 1; a worker alone is rank 0."""
    found = re.search(r"(?:TP|Worker-)(\d{1,5})", process)
    return int(found[1]) if found else 0


def _count(value: int) -> int | None:
    return None if value < 0 else value


def _reuse(p: Leg | None, skipped: str) -> dict[str, Any]:
    """What became of the KV that D had kept for this turn, as far as that was logged."""
    if p is None or not (p.flags or 0) & ev.FLAG_REUSE_OFFERED:
        return {}
    pulled = not skipped and p.load_reported_ns is not None
    outcome = "failed" if pulled and p.failure else "pulled" if pulled else skipped or None
    return {
        "reuse_outcome": outcome,
        "reuse_offered_tokens": _count(p.remote_tokens),
        "reuse_pulled_tokens": _count(p.load_tokens) if outcome == "pulled" else 0 if outcome else None,
    }


def _transferred(d: Leg | None) -> int | None:
    if d is None or d.load_tokens < 0 or d.load_reported_ns is None:
        return None
    return 0 if d.failure else d.load_tokens


class Stamps:
    """Reads how a line begins: when it was logged, and by which process.

    Args:
        offset: of local time, in which vLLM logs, from UTC.
        year: of lines that tell none.
    """

    def __init__(self, offset: timedelta, year: int) -> None:
        self._zone = timezone(offset)
        self._year = year

    def read(self, line: bytes) -> LogLine | None:
        """None where vLLM did not stamp it."""
        text = _COLOURS.sub("", line.decode("utf-8", "replace"))
        prefix = None
        if text.startswith("{"):
            found = _json_line(text)
            if found is None:
                return None
            if "log" in found and "asctime" not in found:
                prefix, text = str(found.get("time", "")), str(found["log"]).strip()
            else:
                return self._json(found)
        if (runtime := _RUNTIME.match(text)) is not None:
            prefix, text = runtime[1], text[runtime.end() :]
        match = _VLLM.search(text[:400])
        if match is None:
            if prefix and text.startswith("{") and (found := _json_line(text)) is not None:
                return self._json(found, prefix)
            return None
        when = _iso(prefix, timezone.utc) if prefix else None
        when = when or self._second(match)
        if when is None:
            return None
        return LogLine(when, int(match["pid"] or 0), match["process"] or "", text[match.end() :])

    def _second(self, match: re.Match[str]) -> Moment | None:
        names = ("month", "day", "hour", "minute", "second")
        month, day, hour, minute, second = (int(match[name]) for name in names)
        try:
            moment = datetime(self._year, month, day, hour, minute, second, tzinfo=self._zone)
        except ValueError:
            return None
        return Moment(int(moment.timestamp()) * SECOND_NS, SECOND_NS)

    def _json(self, found: dict[str, Any], prefix: str = "") -> LogLine | None:
        message = found.get("message")
        when = _iso(prefix, timezone.utc) if prefix else None
        when = when or _iso(str(found.get("asctime") or found.get("timestamp") or ""), self._zone)
        if not isinstance(message, str) or when is None:
            return None
        pid = found.get("process")
        return LogLine(
            when,
            pid if isinstance(pid, int) and 0 <= pid < 2**31 else 0,
            str(found.get("processName") or "")[:200],
            message.strip(),
        )


_COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}m")
_RUNTIME = re.compile(
    r"(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?) (?:std(?:out|err) [FP] )?"
)
_VLLM = re.compile(
    r"(?:\((?P<process>[^\s()]{1,100}) pid=(?P<pid>\d{1,9})\) )?(?:DEBUG|INFO|WARNING|ERROR|CRITICAL) "
    r"(?P<month>\d\d)-(?P<day>\d\d) (?P<hour>\d\d):(?P<minute>\d\d):(?P<second>\d\d) \[[^\]]{1,200}\] ?"
)
_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?(Z|[+-]\d\d:?\d\d)?", re.ASCII
)


def _json_line(text: str) -> dict[str, Any] | None:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.MsgspecError, RecursionError, UnicodeEncodeError):
        return None
    return found if isinstance(found, dict) else None


def _iso(text: str, zone: timezone) -> Moment | None:
    match = _ISO.match(text)
    if match is None:
        return None
    try:
        year, month, day, hour, minute, second = (int(part) for part in match.groups()[:6])
        seconds = int(datetime(year, month, day, hour, minute, second, tzinfo=zone).timestamp())
    except (ValueError, OverflowError):
        return None
    if match[8] and match[8] != "Z":
        sign = -1 if match[8][0] == "-" else 1
        own = sign * (int(match[8][1:3]) * 3600 + int(match[8][-2:]) * 60)
        seconds += round((zone.utcoffset(None) or timedelta()).total_seconds()) - own
    digits = match[7] or ""
    at_ns = seconds * SECOND_NS + int(digits.ljust(9, "0"))
    return Moment(at_ns, 10 ** (9 - len(digits))) if 0 < at_ns < 2**62 else None


def looks_like_log(head: bytes) -> bool:
    """Whether one of the first lines is vLLM's."""
    stamps = Stamps(timedelta(), 2000)
    return any(stamps.read(line) is not None for line in head.splitlines()[:500])


def tells_no_year(head: bytes) -> bool:
    """Whether the year of the first stamped line is to be told from elsewhere."""
    one, other = (Stamps(timedelta(), year) for year in (2000, 2004))
    for line in head.splitlines()[:500]:
        told = one.read(line)
        if told is not None:
            return told != other.read(line)
    return False


def log_year(modified: float, head: bytes) -> int:
    """The year of a log that tells none: that in which its beginning is not later than its last change.

    Args:
        modified: when that was, Unix seconds.
    """
    changed = datetime.fromtimestamp(modified, timezone.utc) + timedelta(days=1)
    match = _VLLM.search(head.decode("utf-8", "replace"))
    if match is None:
        return changed.year
    return changed.year - ((int(match["month"]), int(match["day"])) > (changed.month, changed.day))
