"""A frame: all that the screens of `kvscope top` show of one window of time.

A daemon makes them of what it holds, and a store file is read the same way, so that the live view, the
replay of a past hour and a script see the same figures. Figures are answers of named questions
(`kvscope query` gives the same ones); requests are compact rows.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kvscope.samples import Sample

MAX_RECENT = 10_000
"""Requests that are over, in one frame: the latest of the window."""

QUESTIONS = ("fleet", "fleet_bands", "fleet_steps", "fleet_trend")
"""Named questions that every frame answers."""


class Scope(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What a frame is of; the parameters of `/api/v1/live`."""

    window: str = "5m"
    """How long: a duration such as 90s, 5m or 2h."""
    at: str = ""
    """Its end: a duration before now, a moment (ISO 8601, UTC unless it says otherwise) or Unix
    nanoseconds; empty is now."""
    where: tuple[str, ...] = ()
    """Filters as of `kvscope requests`; all must hold."""
    label: str | None = None
    """Kind of traffic; None is production, or the most frequent one where there is no production."""


class RequestRow(msgspec.Struct, array_like=True, frozen=True):
    """One request, compact; in JSON an array in this order. None is "not observed"."""

    id: str
    client_id: str
    arrived_at_ns: int
    in_flight: bool
    outcome: str
    step: str | None
    """Step it is in, or was in when last seen; None when finished."""
    step_since_ns: int | None
    """Unix time at which it entered that step; None when finished."""
    waits_for: str
    """In flight: what it waits for, in words; empty when it waits for nothing or that is not known."""
    connector: str
    model: str
    label: str
    p_engine: str | None
    d_engine: str | None
    session: str | None
    turn: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_ns: int | None
    compute_ns: int
    """This and the next four: nanoseconds of its TTFT by class, as far as it has come."""
    capacity_ns: int
    transfer_ns: int
    coordination_ns: int
    unknown_ns: int
    main_step: str | None
    """The longest step."""
    main_step_ns: int
    generate_ns: int | None
    """First token to the end."""
    lead_ns: int | None
    transfer_bytes: int | None
    recomputed_tokens: int | None
    reuse_outcome: str | None
    read_after_expiry: bool
    joined_by: str
    clock_error_ns: int

    @property
    def tpot_ns(self) -> float | None:
        """Time per output token after the first; None where it is not over or there was one only."""
        if self.generate_ns is None or not self.output_tokens or self.output_tokens < 2:
            return None
        return self.generate_ns / (self.output_tokens - 1)


class Engine(msgspec.Struct, kw_only=True):
    """One ring: an engine process, what it runs, and how much of it was read."""

    ring: str
    engine: str
    source: str
    rank: int
    host: str
    pid: int
    started_at_ns: int
    last_event_at_ns: int | None = None
    label: str = ""
    kvscope: str = ""
    state: str = ""
    state_detail: str | None = None
    read: int = 0
    lost: int = 0
    torn: int = 0
    rejected: int = 0
    hooks_missing: list[str] = []
    fingerprint: dict[str, Any] = {}


class Answer(msgspec.Struct):
    """What a named question answered."""

    columns: list[str]
    rows: list[list[Any]]

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Finding(msgspec.Struct, kw_only=True):
    """Something that the daemon found and an operator should know, with what to do."""

    kind: str
    text: str
    advice: str = ""
    since_ns: int | None = None


class Frame(msgspec.Struct, kw_only=True):
    """One window of time."""

    kvscope: str
    """Version of who made it."""
    live: bool
    """Its end is now; False for the past."""
    at_ns: int
    """End of the window, Unix time."""
    window_ns: int
    where: list[str]
    label: str
    labels: dict[str, int]
    """Requests of the window by label, before filters."""
    answers: dict[str, Answer]
    """By question: those of `QUESTIONS`."""
    whole: bool = True
    """False in a stream after the first: `in_flight` and `recent` hold what is new or changed since."""
    in_flight: list[RequestRow] = []
    gone: list[str] = []
    """Ids that are no longer in flight, where the frame is not whole."""
    recent: list[RequestRow] = []
    """Requests of the window that are over, at most `MAX_RECENT`."""
    recent_total: int = 0
    """All such requests of the window."""
    engines: list[Engine] = []
    samples: list[Sample] = []
    """The latest of each kind."""
    problems: list[str] = []
    """What is lost, missing or broken, one line each, the gravest first."""
    findings: list[Finding] = []
