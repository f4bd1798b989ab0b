"""Requests as a trace in the Trace Event Format, for ui.perfetto.dev and chrome://tracing.

A process is an engine; its threads are lanes, in each of which one request follows the other. A lane's slices
are a request's leg and, inside, its steps on the critical path, with the class as category; arrows follow the
critical path from engine to engine. Steps of the branch that was ready earlier have lanes of their own.
Transfers and leases are asynchronous slices. Times count from the first arrival: as Unix time they would lose
their nanoseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import msgspec

from kvscope import __version__, schema
from kvscope.analysis.paging import Row, Source, Window, parts, requests
from kvscope.analysis.traffic import engines, is_simulated, versions
from kvscope.text import printable, size, utc
from kvscope.waterfall import Interval, intervals

Event = dict[str, Any]

_KINDS = ("requests", "overlapped")
_KIND_THREADS = 1_000_000
"""Thread ids of a kind of lane begin at its multiples of this."""
_SIDES = ("P", "D")
_ROLES = {"P": "prefill", "D": "decode"}
_PARTS_AT_ONCE = 1000


def write(
    source: Source, about: Window, file: IO[bytes], tell: Callable[[int], None]
) -> tuple[int, int, int, bool]:
    """Returns how many requests and events were written, how many requests can't be told, and whether any is
    simulated."""
    found = engines(source, about.parameters())
    simulated = is_simulated(found, about.label)
    trace = _Trace(about.since_ns)
    events = 0
    file.write(b'{"traceEvents":[\n')
    for event in _events(source, about, trace, tell):
        file.write((b",\n" if events else b"") + msgspec.json.encode(event))
        events += 1
    told = {
        "made_by": f"kvscope {__version__}",
        "label": about.label or "production",
        "from": utc(about.since_ns),
        "until": utc(about.until_ns),
        "unix_ns_at_0": str(about.since_ns),
        "requests": str(trace.written),
        "simulated": "yes: figures of simulated engines" if simulated else "no",
        **versions(found),
    }
    if about.where:
        told["where"] = ", ".join(map(printable, about.where))
    file.write(b'\n],"displayTimeUnit":"ms","otherData":' + msgspec.json.encode(told) + b"}\n")
    return trace.written, events, trace.untold, simulated


def _events(source: Source, about: Window, trace: _Trace, tell: Callable[[int], None]) -> Iterator[Event]:
    for page in requests(source, about):
        for row in page:
            yield from trace.request(row)
        for start in range(0, len(page), _PARTS_AT_ONCE):
            some = page[start : start + _PARTS_AT_ONCE]
            for row in parts(source, schema.TRANSFERS.name, some):
                yield from trace.transfer(row)
            for row in parts(source, schema.LEASES.name, some):
                yield from trace.lease(row)
        tell(trace.written)
    yield from trace.names()


class _Trace:
    """Gives engines and lanes their numbers and turns rows into events."""

    def __init__(self, zero_ns: int) -> None:
        self._zero_ns = zero_ns
        self._processes: dict[str, int] = {}
        self._roles: dict[str, set[str]] = {}
        self._lanes: dict[tuple[str, str], list[int]] = {}
        """By engine and kind: when each lane is free again."""
        self._arrows = 0
        self.written = self.untold = 0

    def request(self, row: Row) -> Iterator[Event]:
        t0, found = row["arrived_at_ns"], intervals(row)
        if not found or any(not 0 < t0 + t < 2**63 for i in found for t in (i.from_ns, i.end_ns)):
            self.untold += 1
            return
        self.written += 1
        engine_of = _engines(row)
        for side in dict.fromkeys(engine_of.values()):
            self._roles.setdefault(side, set())
        for side, role in zip(_SIDES, ("p_engine", "d_engine"), strict=True):
            if row[role]:
                self._roles.setdefault(row[role], set()).add(_ROLES[side])
        placed = _placed(found, engine_of)
        before: tuple[Interval, str, int] | None = None
        threads: dict[str, int] = {}
        for engine in dict.fromkeys(engine for _, engine in placed):
            own = [i for i, at in placed if at == engine and _on_path(i)]
            if own:
                start, end = min(i.from_ns for i in own), max(i.end_ns for i in own)
                threads[engine] = self._lane(engine, "requests", t0 + start, t0 + end)
                yield self._slice(engine, threads[engine], *_leg(row, engine), t0 + start, end - start)
            beside = [i for i, at in placed if at == engine and not _on_path(i)]
            if beside:
                start, end = min(i.from_ns for i in beside), max(i.end_ns for i in beside)
                thread = self._lane(engine, "overlapped", t0 + start, t0 + end)
                for i in beside:
                    yield self._step(row, i, engine, thread)
        for i, engine in placed:
            if not _on_path(i):
                continue
            yield self._step(row, i, engine, threads[engine])
            if before is not None and before[1] != engine and i.step.in_ttft:
                yield from self._arrow(t0, before, (i, engine, threads[engine]))
            before = (i, engine, threads[engine])

    def transfer(self, row: Row) -> Iterator[Event]:
        """From the beginning of posting to the poll that saw it done; an open one ends with its posting."""
        if row["posted_at_ns"] is None:
            return
        wire = row["wire_upper_ns"]
        start, end = row["posted_at_ns"] - (row["post_ns"] or 0), row["posted_at_ns"] + (wire or 0)
        name = f"{row['operation'] or 'transfer'} {size(row['bytes'])}".strip()
        told = _known(row, "request_id", "rank", "peer", "bytes", "descriptors", "state", "post_ns",
                      "wire_lower_ns", "wire_upper_ns")  # fmt: skip
        if wire is None:
            told["end"] = "not observed"
        yield from self._async(row, name, "transfer", start, end, told)

    def lease(self, row: Row) -> Iterator[Event]:
        """From arming to its end; to its deadline where its end was not observed."""
        ended = row["ended_at_ns"]
        end = row["deadline_at_ns"] if ended is None else ended
        told = _known(row, "request_id", "rank", "renewals", "deadline_at_ns", "end")
        if ended is None:
            told["ended"] = "not observed; drawn to its deadline"
        yield from self._async(
            row, f"lease {row['end'] or ''}".strip(), "lease", row["armed_at_ns"], end, told
        )

    def names(self) -> Iterator[Event]:
        """Names of processes and threads, in the order P, D."""
        order = {name: (min(roles, default="x"), name) for name, roles in self._roles.items()}
        rank = {name: i for i, name in enumerate(sorted(order, key=lambda n: (order[n][0] != "prefill", n)))}
        for engine, pid in self._processes.items():
            roles = " and ".join(sorted(self._roles.get(engine, ()), reverse=True)) or "engine"
            yield _metadata("process_name", pid, 0, name=f"{roles} {printable(engine)}")
            yield _metadata("process_sort_index", pid, 0, sort_index=rank.get(engine, len(rank)))
        for (engine, kind), lanes in self._lanes.items():
            for number in range(len(lanes)):
                thread = self._thread(kind, number)
                yield _metadata("thread_name", self._pid(engine), thread, name=f"{kind} {number + 1}")
                yield _metadata("thread_sort_index", self._pid(engine), thread, sort_index=thread)

    # --- places -----------------------------------------------------------------------------------

    def _pid(self, engine: str) -> int:
        return self._processes.setdefault(engine, len(self._processes) + 1)

    def _lane(self, engine: str, kind: str, start_ns: int, end_ns: int) -> int:
        """The thread of the first lane that is free then; takes it until the end."""
        lanes = self._lanes.setdefault((engine, kind), [])
        number = next((n for n, free_ns in enumerate(lanes) if free_ns <= start_ns), len(lanes))
        if number == len(lanes):
            lanes.append(0)
        lanes[number] = max(end_ns, start_ns + 1)
        return self._thread(kind, number)

    def _thread(self, kind: str, number: int) -> int:
        return _KINDS.index(kind) * _KIND_THREADS + number + 1

    # --- events -----------------------------------------------------------------------------------

    def _us(self, ns: int) -> float:
        return (ns - self._zero_ns) / 1000

    def _slice(
        self, engine: str, thread: int, name: str, category: str, args: dict[str, Any], at_ns: int, ns: int
    ) -> Event:
        return {
            "name": name,
            "cat": category,
            "ph": "X",
            "ts": self._us(at_ns),
            "dur": ns / 1000,
            "pid": self._pid(engine),
            "tid": thread,
            "args": args,
        }

    def _step(self, row: Row, i: Interval, engine: str, thread: int) -> Event:
        args: dict[str, Any] = {"request": row["id"], "observed": i.observed, "leg": i.leg}
        if not _on_path(i):
            args["path"] = "overlapped"
        if i.error_ns:
            args["clock_error_ns"] = i.error_ns
        return self._slice(
            engine, thread, i.step.name, i.step.class_, args, row["arrived_at_ns"] + i.from_ns, i.ns
        )

    def _arrow(
        self, t0: int, start: tuple[Interval, str, int], end: tuple[Interval, str, int]
    ) -> Iterator[Event]:
        """From a step on one engine to the next one on another."""
        self._arrows += 1
        for phase, (i, engine, thread) in (("s", start), ("f", end)):
            yield {
                "name": "critical path",
                "cat": "critical path",
                "ph": phase,
                "id": self._arrows,
                "ts": self._us(t0 + i.from_ns),
                "pid": self._pid(engine),
                "tid": thread,
                **({"bp": "e"} if phase == "f" else {}),
            }

    def _async(
        self, row: Row, name: str, category: str, start_ns: int, end_ns: int, args: dict[str, Any]
    ) -> Iterator[Event]:
        common = {
            "name": name,
            "cat": category,
            "id": f"0x{int(row['id']):x}",
            "pid": self._pid(row["engine"] or "unknown"),
            "tid": 0,
        }
        yield {**common, "ph": "b", "ts": self._us(start_ns), "args": args}
        yield {**common, "ph": "e", "ts": self._us(max(start_ns, end_ns))}


def _engines(row: Row) -> dict[str, str]:
    """By side: the engine that its steps are shown on."""
    p, d = row["p_engine"], row["d_engine"]
    return {"P": p or d or "unknown", "D": d or p or "unknown"}


def _placed(found: Sequence[Interval], engine_of: dict[str, str]) -> list[tuple[Interval, str]]:
    """Each step and the engine where it ends; one of which no side is known stays where its branch was."""
    first = next((i.leg[-1:] for i in found if i.leg), "P")
    at = {True: first, False: first}
    out = []
    for i in found:
        branch = _on_path(i)
        at[branch] = i.leg[-1:] or at[branch]
        out.append((i, engine_of[at[branch]]))
    return out


def _on_path(i: Interval) -> bool:
    """Whether it is drawn in the request's lane: the critical path, and what follows the first token."""
    return i.critical or not i.step.in_ttft


def _leg(row: Row, engine: str) -> tuple[str, str, dict[str, Any]]:
    """Name, category and what is told of a leg."""
    told = _known(
        row, "id", "client_id", "outcome", "outcome_detail", "connector", "model", "label", "joined_by",
        "session", "turn", "prompt_tokens", "output_tokens", "transferred_tokens", "ttft_ns",
        "lead_ns", "clamped_ns",
    )  # fmt: skip
    return printable(row["client_id"] or row["id"])[:200], "request", told


def _known(row: Row, *names: str) -> dict[str, Any]:
    """What is known, and not empty, by names."""
    return {
        name: printable(row[name]) if isinstance(row[name], str) else row[name]
        for name in names
        if row[name] is not None and row[name] != ""
    }


def _metadata(what: str, pid: int, tid: int, **args: Any) -> Event:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "args": args}
