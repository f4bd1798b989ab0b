"""A request's steps on one time axis, as lines of styled text: for a terminal and for the screens alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvscope import steps
from kvscope.advice import untold
from kvscope.text import ms

Row = Mapping[str, Any]
Span = tuple[str, str]
"""Text and the name of its style: a class, `dim`, `warn`, or empty."""
Line = list[Span]

SHORT = {steps.COORDINATION: "coord."}
SEEN = {
    steps.ESTIMATED: "est.",
    steps.TELEMETRY: "nixl",
    steps.NOT_OBSERVED: "none",
}
MIN_BAR = 6


class Interval(NamedTuple):
    """One stretch of the waterfall; times count from the request's arrival."""

    step: steps.Step
    from_ns: int
    ns: int
    critical: bool
    observed: str
    error_ns: int = 0
    open: bool = False
    """A request in flight is in it: it ends now."""
    leg: str = ""
    """Where it takes place: P, D, or between the two; empty where that is not known."""

    @property
    def end_ns(self) -> int:
        return self.from_ns + self.ns

    @property
    def shorter_than_error(self) -> bool:
        """Its length is within the clocks' error, so it is not known."""
        return self.ns < self.error_ns


class Look(NamedTuple):
    """How the waterfall is drawn."""

    columns: tuple[str, ...] = ("mark", "from", "to", "ms", "step", "class", "seen", "error")
    """In order; the bars come last."""
    pattern: Mapping[str, str] = {}
    """A class's character in bars; a full block where there is none."""
    overlapped: str = "░"
    """The character of what is not on the critical path."""
    beyond: str = ""
    """The character at the end of the axis of what comes after the first token."""


PLAIN = Look()
"""As `kvscope explain` prints it."""


def intervals(request: Row, as_of_ns: int | None = None) -> list[Interval]:
    """All stretches in order of time: critical ones, overlapped ones, generating, and the open one last.

    Args:
        request: a row of `requests`, steps and ways of observation by name or by code.
        as_of_ns: Unix time of the answer; without it a request in flight has no open step.
    """
    found = sorted(
        (_interval(entry) for entry in request.get("waterfall") or ()),
        key=lambda i: (i.from_ns, i.end_ns, not i.critical),
    )
    ttft, generate_ns = request.get("ttft_ns"), request.get("decode_generate_ns")
    if ttft is not None and generate_ns is not None:
        # Stored as its column alone: it begins with the first token.
        found.append(Interval(steps.BY_NAME["decode.generate"], ttft, generate_ns, False, steps.HOOK))
    open_ = _open_interval(request, found, as_of_ns)
    if open_ is not None:
        found.append(open_)
    return _with_legs(request, found)


def waterfall(request: Row, as_of_ns: int | None, width: int, look: Look = PLAIN) -> list[Line]:
    """The steps as lines of at most `width` columns, the sum of the critical path below; empty if none."""
    found = intervals(request, as_of_ns)
    if not found:
        return []
    ttft = request.get("ttft_ns")
    axis_ns = ttft or max(i.end_ns for i in found) or 1
    errors = any(i.error_ns for i in found)
    columns = [_COLUMNS[name] for name in look.columns if errors or name != "error"]
    head = " ".join(column.titled() for column in columns)
    bar_width = max(MIN_BAR, width - len(head) - 1)
    end = f"{(axis_ns + 500_000) // 10**6} ms" if axis_ns >= 10**7 else f"{ms(axis_ns)} ms"
    scale = f"0{end:>{bar_width - 1}}" if len(end) < bar_width - 1 else end
    lines: list[Line] = [[(f"{head} {scale}".rstrip(), "dim")]]
    for i in found:
        line: Line = []
        for column in columns:
            line += [(column.cell(i, ttft), i.step.class_ if column.name == "class" else ""), (" ", "")]
        bar = _bar(i, axis_ns, bar_width, look)
        lines.append([*line, (bar, i.step.class_)] if bar else line)
    return lines + _summary(request, found, columns, look)


class _Column(NamedTuple):
    name: str
    title: str
    width: int
    right: bool = False

    def titled(self) -> str:
        return self._fit(self.title)

    def cell(self, i: Interval, ttft: int | None) -> str:
        return self._fit(_share(i, ttft) if self.name == "share" else _CELLS[self.name](i))

    def _fit(self, text: str) -> str:
        return f"{text:>{self.width}}" if self.right else f"{text:<{self.width}}"


def _share(i: Interval, ttft: int | None) -> str:
    """Of TTFT; only of what adds up to it."""
    return f"{100 * i.ns / ttft:.0f} %" if ttft and i.critical and i.step.in_ttft else ""


def _error(i: Interval) -> str:
    return f"{ms(i.error_ns) if i.error_ns else ''}{'!' if i.shorter_than_error else ' '}"


_COLUMNS = {
    column.name: column
    for column in (
        _Column("mark", "", 1),
        _Column("leg", "leg", 3),
        _Column("step", "step", 23),
        _Column("class", "class", 8),
        _Column("ms", "ms", 7, True),
        _Column("share", "share", 5, True),
        _Column("from", "from", 7, True),
        _Column("to", "to", 7, True),
        _Column("seen", "seen", 6),
        _Column("error", "± ms ", 7, True),
    )
}
_CELLS = {
    "mark": lambda i: ">" if i.open else "*" if i.critical else " ",
    "leg": lambda i: i.leg,
    "step": lambda i: i.step.name,
    "class": lambda i: SHORT.get(i.step.class_, i.step.class_),
    "ms": lambda i: ms(i.ns),
    "from": lambda i: ms(i.from_ns),
    "to": lambda i: "" if i.open else ms(i.end_ns),
    "seen": lambda i: SEEN.get(i.observed, i.observed),
    "error": _error,
}


def _bar(i: Interval, axis_ns: int, width: int, look: Look) -> str:
    if not i.step.in_ttft:
        return f"{look.beyond:>{width}}" if look.beyond else ""
    first = min(width - 1, max(0, i.from_ns * width // axis_ns))
    last = min(width, max(first + 1, -(-i.end_ns * width // axis_ns)))
    full = look.pattern.get(i.step.class_, "█") if i.critical else look.overlapped
    return " " * first + (full * (last - first) if i.ns > 0 else "│")


_SUM = "sum of the critical path (*)"


def _summary(request: Row, found: Sequence[Interval], columns: Sequence[_Column], look: Look) -> list[Line]:
    """What the marks mean and whether the critical path adds up to TTFT, the sum in the column `ms`."""
    names = [column.name for column in columns]
    before = sum(column.width + 1 for column in columns[: names.index("ms")])
    first = before > len(_SUM)  # there is room for words before the sum
    indent = " " * (before - len(_SUM) - 1 if first else before + _COLUMNS["ms"].width + 1)
    lines: list[Line] = []
    if any(i.shorter_than_error for i in found):
        lines.append([(indent + "! shorter than the clocks' error: its length is not known", "warn")])
    covered = sum(i.ns for i in found if i.critical and i.step.in_ttft and not i.open)
    verdict, style = _sum_verdict(covered, request)
    total = f"{ms(covered):>{_COLUMNS['ms'].width}}"
    text = f"{indent}{_SUM} {total}" if first else f"{'':{before}}{total} {_SUM}"
    lines.append([(text + verdict, style)])
    if any(not i.critical and i.step.in_ttft for i in found):
        lead = request.get("lead_ns")
        known = "" if lead is None else f"; lead {ms(lead)} ms"
        lines.append([(f"{indent}{look.overlapped} overlapped: not in the sum{known}", "dim")])
    return lines


def _sum_verdict(covered: int, request: Mapping[str, Any]) -> Span:
    ttft = request.get("ttft_ns")
    if ttft is None:
        return "; TTFT is not known" if untold(request) else "; no first token", "dim"
    if covered == ttft:
        return " = TTFT", "dim"
    return f", but TTFT is {ms(ttft)}: a fault of kvscope, please report it", "bad"


def _interval(entry: Row) -> Interval:
    """An entry of the waterfall, whether steps came by code (store) or by name (API)."""
    return Interval(
        steps.find(entry["step"]),
        entry["from_ns"],
        entry["ns"],
        entry["critical"],
        steps.find_observed(entry["observed"]),
        entry["error_ns"],
    )


def _open_interval(request: Row, found: Sequence[Interval], as_of_ns: int | None) -> Interval | None:
    """The step that a request in flight is in, up to now."""
    if not request.get("in_flight") or as_of_ns is None or request.get("arrived_at_ns") is None:
        return None
    step = steps.find(request.get("current_step"))
    known_ns = max((i.end_ns for i in found if i.critical), default=0)
    age_ns = as_of_ns - request["arrived_at_ns"] - known_ns
    return Interval(step, known_ns, max(0, age_ns), True, steps.HOOK, open=True)


# --- legs --------------------------------------------------------------------------------------------

_ON_D = ("registration.admit", "registration.blocks", "readiness.report", "readiness.promote",
         "readiness.admit", "decode.first_step", "decode.generate")  # fmt: skip


def _with_legs(request: Row, found: Sequence[Interval]) -> list[Interval]:
    """Where each step takes place, as far as the connector tells."""
    p, d = request.get("p_engine"), request.get("d_engine")
    pushed = request.get("connector") == "push"
    out: list[Interval] = []
    before: dict[bool, str] = {}
    for i in found:
        if not p:
            leg = "D" if d and i.step.name != "unknown" else ""
        else:
            leg = _leg(i.step, pushed, before.get(i.critical, ""))
        before[i.critical] = i.step.name
        out.append(i._replace(leg=leg))
    return out


def _leg(step: steps.Step, pushed: bool, before: str) -> str:
    """P, D, or between the two; `before` is the step before it in its branch."""
    if step.stage == "prefill":
        return "P"
    if step.name in _ON_D:
        return "D"
    if step.name == "registration.route":
        return "D" if pushed else "P→D"
    if step.name == "registration.notify":
        return "D→P"
    if step.name == "readiness.signal":
        return "P→D"
    if step.name == "registration.handshake":
        # In push both sides shake hands: D to register, P to write, once it was to begin.
        return "P" if pushed and before == "transfer.dispatch" else "D"
    return "" if step.name == "unknown" else "P" if pushed else "D"
