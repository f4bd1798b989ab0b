"""The view: what the screens show, built from frames and from what went wrong. No widgets, no network.

Frames of a stream hold changes only, so the view keeps the requests of the window, and lets go of those that
left it. When frames stop coming it keeps the last figures and says so.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import msgspec

from kvscope.frame import MAX_RECENT, Answer, Frame, RequestRow

MAX_IN_FLIGHT = 50_000
"""Requests in flight that a view keeps; those beyond are counted in `left_out`."""
MAX_GONE = MAX_IN_FLIGHT + MAX_RECENT
STALE_AFTER = 3.0
"""Refreshes without a frame after which figures are stale."""
OLD_AFTER_S = 5.0
"""Figures that are so much older than the requests beside them are said to be."""


class State(Enum):
    """What the figures on the screen are; the value is how it is shown."""

    CONNECTING = "CONNECTING"
    """Nothing has come yet."""
    LIVE = "LIVE"
    STALE = "STALE"
    """Frames stopped coming, and nobody said why."""
    LOST = "NO DAEMON"
    OLD = "OTHER VERSION"
    """The daemon has no live view, or one that this program does not understand."""
    FAILED = "FAILED"
    """The source answers, but with a complaint."""
    EMPTY = "NO ENGINES"
    PAUSED = "PAUSED"
    HISTORY = "HISTORY"


class Trouble(NamedTuple):
    """Why there is no new frame."""

    state: State
    """LOST, OLD or FAILED."""
    text: str
    """One line that says what is wrong and what to do."""


class Detail(NamedTuple):
    """One request as `kvscope explain` sees it."""

    id: str
    answer: Mapping[str, Any] | None
    """As of `GET /api/v1/requests/{id}`; None when there is none."""
    error: str = ""


class View:
    """What is shown. The application changes it, pages read it.

    Args:
        refresh_s: how often frames come when all is well.
        clock: seconds that only go forward.
    """

    def __init__(self, refresh_s: float = 1.0, clock: Callable[[], float] = time.monotonic) -> None:
        self.refresh_s = refresh_s
        self._clock = clock
        self._received: float | None = None
        self._frame: Frame | None = None
        self._in_flight: dict[str, RequestRow] = {}
        self._recent: dict[str, RequestRow] = {}
        self._listed: tuple[int, list[RequestRow], list[RequestRow]] = (-1, [], [])
        self._asked: dict[str, Answer] = {}
        self._asked_until: dict[str, int] = {}
        self._unanswered: dict[str, str] = {}
        self.version = 0
        """Grows with every change of data: what to compare before sorting or drawing anew."""
        self.left_out = 0
        """Requests in flight beyond `MAX_IN_FLIGHT`."""
        self.trouble: Trouble | None = None
        self.pending = False
        """Another window or filter was chosen, and its figures have not come yet."""
        self.paused = False
        self.history = False
        """The window is one of the past that was chosen."""
        self.wanted_ns: int | None = None
        """In history: the moment that was chosen last; its figures may not have come yet."""
        self.playing = False
        """History that moves on by itself."""
        self.speed = 1.0
        self.filters: tuple[str, ...] = ()
        """In force; as of `kvscope requests --where`."""
        self.chosen: str | None = None
        """Id of the request that the Request page shows."""
        self.detail: Detail | None = None
        self.session: str | None = None
        """What the Sessions page shows first."""

    # --- what pages read -----------------------------------------------------------------------

    @property
    def frame(self) -> Frame | None:
        """The last one. Its requests may be changes only: use `in_flight` and `recent`."""
        return self._frame

    @property
    def state(self) -> State:
        if self.trouble:
            return self.trouble.state
        if self._frame is None:
            return State.CONNECTING
        if self.paused:
            return State.PAUSED
        if self.history:
            return State.HISTORY
        if self.age_s > STALE_AFTER * self.refresh_s:
            return State.STALE
        if self.advice == "engines":
            return State.EMPTY
        return State.LIVE

    @property
    def stale(self) -> bool:
        """The figures are not those of now, though they should be."""
        return self.state in (State.STALE, State.LOST, State.OLD, State.FAILED)

    @property
    def age_s(self) -> float:
        """Since the last frame came; 0 before the first."""
        return 0.0 if self._received is None else max(0.0, self._clock() - self._received)

    @property
    def advice(self) -> str:
        """Why there is nothing to see: "engines" (none is instrumented), "requests" (none in the window),
        "filter" (none fits it), or "" where there is something."""
        frame = self._frame
        if frame is None or self._in_flight or self._recent or frame.recent_total:
            return ""
        if not frame.engines and not frame.labels:
            return "engines"
        if self.filters:
            return "filter"
        return "requests" if frame.engines else "engines"

    @property
    def now_ns(self) -> int:
        """Unix time that ages are told against: the end of the window, moving on while the view is live."""
        if self._frame is None:
            return 0
        moving = self._frame.live and not (self.history or self.paused)
        return self._frame.at_ns + (round(min(self.age_s, self.refresh_s) * 1e9) if moving else 0)

    @property
    def until_ns(self) -> int:
        """End of the window of the figures."""
        return figures_at_ns(self._frame) if self._frame else 0

    @property
    def since_ns(self) -> int:
        """Its start."""
        return self.until_ns - self._frame.window_ns if self._frame else 0

    @property
    def behind_s(self) -> float:
        """How much older the figures are than the requests, where that is worth telling; else 0."""
        if self._frame is None or self.state is not State.LIVE:
            return 0.0
        behind = (self.now_ns - self.until_ns) / 1e9
        return behind if behind > max(OLD_AFTER_S, STALE_AFTER * self.refresh_s) else 0.0

    @property
    def in_flight(self) -> list[RequestRow]:
        """Requests in flight, in no particular order."""
        return self._lists()[1]

    @property
    def recent(self) -> list[RequestRow]:
        """Requests of the window that are over, in no particular order."""
        return self._lists()[2]

    def request(self, request_id: str) -> RequestRow | None:
        """The row of that id, where it is in the window."""
        return self._in_flight.get(request_id) or self._recent.get(request_id)

    def answer(self, name: str) -> Answer | None:
        """What the question answered; None where it has not (yet)."""
        if self._frame is not None and name in self._frame.answers:
            return self._frame.answers[name]
        return self._asked.get(name)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Its rows by column name; none where it has not answered (yet)."""
        answer = self.answer(name)
        # A row that is too short or too long is no reason to show none.
        return [dict(zip(answer.columns, row, strict=False)) for row in answer.rows] if answer else []

    def unanswered(self, name: str) -> str:
        """Why that question could not be answered, in one line; empty where it was."""
        return self._unanswered.get(name, "")

    def old_since_ns(self, names: Iterable[str]) -> int | None:
        """End of the window of the oldest answer to these that is shown, where the figures are of another:
        in the past any other, else one that is older by more than `OLD_AFTER_S`."""
        ends = [self._asked_until[name] for name in names if name in self._asked_until]
        off = max((abs(self.until_ns - end) for end in ends), default=0)
        standing = self.history and not self.playing
        return min(ends) if off > (0 if standing else OLD_AFTER_S * 1e9) else None

    @property
    def total(self) -> dict[str, Any]:
        """The row of `fleet` over all requests; empty where there is none."""
        return next((row for row in self.rows("fleet") if row.get("level") == "all"), {})

    @property
    def problems(self) -> list[str]:
        """What is lost, missing or broken, the gravest first."""
        if self._frame is None:
            return []
        problems = list(self._frame.problems)
        if self.left_out:
            problems.append(f"NOT SHOWN: {self.left_out} requests in flight beyond the first {MAX_IN_FLIGHT}")
        return problems

    # --- what the application tells it ---------------------------------------------------------

    def apply(self, frame: Frame) -> None:
        """Show this frame: all of it, or its changes to what is there."""
        if frame.whole or self._frame is None:
            self._in_flight = {}
            self._recent = {}
        for request_id in frame.gone:
            self._in_flight.pop(request_id, None)
            self._recent.pop(request_id, None)
        for row in frame.in_flight:
            self._in_flight[row.id] = row
            self._recent.pop(row.id, None)
        for row in frame.recent:
            self._recent[row.id] = row
            self._in_flight.pop(row.id, None)
        keep_within(self._recent, frame.at_ns - frame.window_ns)
        self.left_out = max(0, len(self._in_flight) - MAX_IN_FLIGHT)
        if self.left_out:
            self._in_flight = dict(list(self._in_flight.items())[:MAX_IN_FLIGHT])
        self._frame = frame
        self._received = self._clock()
        self.trouble = None
        self.pending = False
        self.version += 1

    def forget(self) -> None:
        """Another window or filter was chosen: what is there is not of it, but stays till it comes."""
        self._asked = {}
        self._asked_until = {}
        self._unanswered = {}
        self.pending = self._frame is not None
        self.version += 1

    def told(self, name: str, answer: Answer, until_ns: int | None = None) -> None:
        """A question was answered, for the window that ends then (by default that of the figures)."""
        self._asked_until[name] = self.until_ns if until_ns is None else until_ns
        if self._asked.get(name) != answer or name in self._unanswered:
            self._asked[name] = answer
            self._unanswered.pop(name, None)
            self.version += 1

    def not_told(self, name: str, error: str) -> None:
        """A question could not be answered; what it answered before stays."""
        self._unanswered[name] = error
        self.version += 1

    def looked_up(self, detail: Detail) -> None:
        """A request was looked up. Where that failed, what was found before stays, with what is wrong."""
        if detail.id != self.chosen:
            return
        if detail.answer is None and self.detail is not None and self.detail.id == detail.id:
            detail = detail._replace(answer=self.detail.answer)
        self.detail = detail
        self.version += 1

    def _lists(self) -> tuple[int, list[RequestRow], list[RequestRow]]:
        if self._listed[0] != self.version:
            self._listed = (self.version, list(self._in_flight.values()), list(self._recent.values()))
        return self._listed


def figures_at_ns(frame: Frame) -> int:
    """End of the window that its figures are of."""
    return frame.figures_at_ns or frame.at_ns


def keep_within(rows: dict[str, RequestRow], since_ns: int) -> None:
    """Let go of those that arrived earlier, and of the earliest beyond `MAX_RECENT`."""
    for gone in [key for key, row in rows.items() if row.arrived_at_ns < since_ns]:
        del rows[gone]
    if (excess := len(rows) - MAX_RECENT) > 0:
        for row in heapq.nsmallest(excess, rows.values(), key=lambda row: row.arrived_at_ns):
            del rows[row.id]


def merged(older: Frame, newer: Frame) -> Frame:
    """One frame that does what both do, one after the other."""
    if newer.whole:
        return newer
    gone = set(newer.gone)
    in_flight = {row.id: row for row in older.in_flight if row.id not in gone}
    in_flight.update((row.id, row) for row in newer.in_flight)
    recent = {row.id: row for row in older.recent if row.id not in gone}
    for row in newer.in_flight:
        recent.pop(row.id, None)
    recent.update((row.id, row) for row in newer.recent)
    for request_id in recent:
        in_flight.pop(request_id, None)
    keep_within(recent, newer.at_ns - newer.window_ns)
    still = list(dict.fromkeys((*older.gone, *newer.gone)))
    return msgspec.structs.replace(
        newer,
        whole=older.whole,
        in_flight=list(in_flight.values()),
        gone=[] if older.whole else still[:MAX_GONE],
        recent=list(recent.values()),
    )
