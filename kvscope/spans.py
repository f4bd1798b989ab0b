"""One request as a trace: a root span, a span per leg, a span per step.

What it says equals the request's row: the step spans with `kvscope.path` "critical" touch each other and add
up to TTFT exactly; those of the branch that was ready earlier are "overlapped", and the step in which the
branches meet links to it. Ids follow from the request's id, so that a trace is the same whoever makes it.

A span's service is the engine it takes place on; the root's is that of P where P had a part. The root is of
kind client and the D leg of kind server, so that whatever draws a graph of services draws P → D.

Attributes are texts and whole numbers only: readers of OTLP's JSON form disagree about the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvscope import steps
from kvscope.schema import trace_id_of
from kvscope.views import WAITS_COLUMNS, waits
from kvscope.waterfall import Interval, intervals

ROOT = "request"
P_LEG, D_LEG, LOCAL_LEG = "prefill leg", "decode leg", "local leg"
NAMES = (ROOT, P_LEG, D_LEG, LOCAL_LEG, *(step.name for step in steps.STEPS))
"""Of spans, which is what trace stores call operations."""

CLIENT, SERVER, INTERNAL = "client", "server", "internal"
CRITICAL, OVERLAPPED, GENERATING = "critical", "overlapped", "after first token"

FAILED = ("error", "lost", "ignored")
"""Outcomes that give the trace the status error."""

_CONVENTIONS = {
    "model": "gen_ai.request.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "output_tokens": "gen_ai.usage.output_tokens",
    "session": "gen_ai.conversation.id",
}
_LEFT_OUT = {
    "arrived_at_ns",  # the span's start
    "trace_id",  # the trace's
    "best_rate_bytes_per_s",
    "waterfall",
    *(step.column for step in steps.STEPS if step.class_ != steps.UNKNOWN),  # spans of their own
}
ROOT_ATTRIBUTES = {
    _CONVENTIONS.get(name, f"kvscope.{name}"): name for name in WAITS_COLUMNS if name not in _LEFT_OUT
}
"""Attribute of the root span -> column of `waits`."""
SPAN_ATTRIBUTES = frozenset(
    ("kvscope.leg", "kvscope.engine", "kvscope.request", "kvscope.step", "kvscope.class", "kvscope.path",
     "kvscope.observed", "kvscope.ns")
)  # fmt: skip
"""Attributes of the spans of legs and steps."""

Row = Mapping[str, Any]
Attributes = dict[str, "str | int"]


class Link(NamedTuple):
    """To a span that is no ancestor."""

    trace_id: str
    span_id: str
    what: str


class Span(NamedTuple):
    """One span; times are Unix nanoseconds, ids hex digits (32 and 16)."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    """Empty for the root."""
    start_ns: int
    end_ns: int
    kind: str
    attributes: Attributes
    links: tuple[Link, ...] = ()
    error: str = ""
    """Why it failed; empty where it did not."""

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


def root_link(row: Row, what: str = "previous turn") -> Link:
    """A link to a request's root span. Needs its `id` and `trace_id` only."""
    return Link(trace_id_of(row), _span_id(row["id"], 0), what)


def of_request(row: Row, previous: Link | None = None) -> list[Span]:
    """The spans of a row of `requests` or `waits`: the root, the legs, then the steps by time.

    Args:
        previous: the root of the session's turn before this one, where that is known.

    Returns:
        None where its times can't be told.
    """
    t0 = row["arrived_at_ns"]
    found = intervals(row)
    if t0 is None or any(not 0 < t0 + t < 2**63 for i in found for t in (i.from_ns, i.end_ns)) or t0 <= 0:
        return []
    return _Trace(row, t0, found).spans(previous)


def duration_ns(row: Row, found: Sequence[Interval]) -> int:
    """How long the root span lasts: to the end, or to the last thing known."""
    if row["ttft_ns"] is None:
        return max((i.end_ns for i in found), default=0)
    return int(row["ttft_ns"] + (row["decode_generate_ns"] or 0))


class _Trace:
    def __init__(self, row: Row, t0: int, found: Sequence[Interval]) -> None:
        self._row = row
        self._t0 = t0
        self._found = found
        self._trace_id = trace_id_of(row)
        self._engines = {"P": row["p_engine"], "D": row["d_engine"]}
        self._ids = {"": _span_id(row["id"], 0), "P": _span_id(row["id"], 1), "D": _span_id(row["id"], 2)}

    def spans(self, previous: Link | None) -> list[Span]:
        legs = [side for side, engine in self._engines.items() if engine]
        joined, branch = _join(self._found)
        step_ids = {id(i): _span_id(self._row["id"], 3 + number) for number, i in enumerate(self._found)}
        made = [self._root(previous), *(self._leg(side) for side in legs)]
        for i in self._found:
            side = i.leg[-1:] if i.leg[-1:] in legs else ""  # where it ends, as P→D has two sides
            links: tuple[Link, ...] = ()
            if i is joined and branch is not None:
                links = (Link(self._trace_id, step_ids[id(branch)], "overlapped branch"),)
            made.append(
                self._span(
                    i.step.name,
                    side,
                    step_ids[id(i)],
                    self._ids[side],
                    i.from_ns,
                    i.end_ns,
                    INTERNAL,
                    _step_attributes(i),
                    links,
                )
            )
        return made

    def _root(self, previous: Link | None) -> Span:
        row = self._row
        whole = row if "compute_ns" in row else {**row, **waits(row)}
        attributes: Attributes = {}
        for attribute, column in ROOT_ATTRIBUTES.items():
            value = whole[column]
            if value is None or value == "":
                continue
            if isinstance(value, bool):
                value = "true" if value else "false"
            attributes[attribute] = str(value) if WAITS_COLUMNS[column] == "UBIGINT" else value
        error = ""
        if row["outcome"] in FAILED:
            error = attributes["error.type"] = row["outcome_detail"] or row["outcome"]
        return self._span(
            ROOT,
            "",
            self._ids[""],
            "",
            0,
            duration_ns(row, self._found),
            CLIENT,
            attributes,
            (previous,) if previous else (),
            error,
        )

    def _leg(self, side: str) -> Span:
        """From its first step to its last; one of which nothing was observed spans the request."""
        row = self._row
        own = [i for i in self._found if i.leg[-1:] == side]
        begin = min((i.from_ns for i in own), default=0)
        end = max((i.end_ns for i in own), default=duration_ns(row, self._found))
        engine, request = row[f"{side.lower()}_engine"], row[f"{side.lower()}_request"]
        attributes: Attributes = {"kvscope.leg": side, "kvscope.engine": engine}
        if request:
            attributes["kvscope.request"] = request
        if not own:
            attributes["kvscope.observed"] = steps.NOT_OBSERVED
        both = bool(self._engines["P"] and self._engines["D"])
        name = P_LEG if side == "P" else LOCAL_LEG if row["connector"] == "local" else D_LEG
        kind = SERVER if both and side == "D" else INTERNAL
        return self._span(name, side, self._ids[side], self._ids[""], begin, end, kind, attributes)

    def _span(
        self,
        name: str,
        side: str,
        span_id: str,
        parent_id: str,
        begin: int,
        end: int,
        kind: str,
        attributes: Attributes,
        links: tuple[Link, ...] = (),
        error: str = "",
    ) -> Span:
        engines, t0 = self._engines, self._t0
        service = engines.get(side) or engines["P"] or engines["D"] or "unknown"
        start, stop = t0 + begin, t0 + max(begin, end)
        return Span(
            name, service, self._trace_id, span_id, parent_id, start, stop, kind, attributes, links, error
        )


def _step_attributes(i: Interval) -> Attributes:
    path = GENERATING if not i.step.in_ttft else CRITICAL if i.critical else OVERLAPPED
    attributes: Attributes = {
        "kvscope.step": i.step.name,
        "kvscope.class": i.step.class_,
        "kvscope.path": path,
        "kvscope.observed": i.observed,
        "kvscope.ns": i.ns,
    }
    if i.leg:
        attributes["kvscope.leg"] = i.leg
    if i.error_ns:
        attributes["kvscope.clock_error_ns"] = i.error_ns
    return attributes


def _join(found: Sequence[Interval]) -> tuple[Interval | None, Interval | None]:
    """The step in which the two branches meet, and the last step of the one that was ready earlier."""
    overlapped = [i for i in found if not i.critical and i.step.in_ttft]
    if not overlapped:
        return None, None
    last = max(overlapped, key=lambda i: i.end_ns)
    after = (
        i
        for i in found
        if i.critical and i.from_ns >= last.end_ns and i.step.stage in ("transfer", "readiness", "decode")
    )
    return next(after, None), last


def _span_id(request_id: int, index: int) -> str:
    return hashlib.blake2b(f"{request_id}/{index}".encode(), digest_size=8).hexdigest()
