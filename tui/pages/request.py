"""Request: the waterfall of one request on both engines, why it was slow, and all that belongs to it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from textual.app import ComposeResult

from kvscope import explain
from kvscope.advice import verdict
from kvscope.text import ms, printable, span, table, utc
from kvscope.tui.lines import PATTERN, Line
from kvscope.tui.lines import width as length
from kvscope.tui.page import LinesView, Page
from kvscope.tui.pages import grid
from kvscope.tui.view import Detail, View
from kvscope.waterfall import Look, waterfall

Row = Mapping[str, Any]

WIDE = 104
"""Columns from which there is room for where each step begins and ends."""
MAX_TRANSFERS = 64
MAX_LEASES = 64
_NARROW_LOOK = Look(("mark", "leg", "step", "class", "ms", "from", "seen", "error"), PATTERN, "╌", "▶")
_WIDE_LOOK = _NARROW_LOOK._replace(
    columns=("mark", "leg", "step", "class", "ms", "share", "from", "to", "seen", "error")
)
_SEEN = (
    "* critical path   > in it now   seen by: hook, poll (seen late, by a poll), est. (split by the pair's "
    "best rate), nixl (its own telemetry), none (not observed)"
)


def request_lines(found: Row, width: int, waits_for: str = "") -> list[Line]:
    """The page of one request.

    Args:
        found: as from `lookup.look_up`.
        waits_for: what it waits for, in words, where that is known.
    """
    request, as_of_ns = found["request"], found.get("as_of_ns")
    waits = _said(f"waits for {printable(waits_for)}", width, "warn") if waits_for else []
    blocks: list[list[Line]] = [
        [*_title(request, as_of_ns, width), *waits],
        [*_said(verdict(request, as_of_ns), width, "strong"), *_said(explain.answer(request), width, "dim")],
        _waterfall(request, as_of_ns, width),
        [
            line
            for text, style in explain.notes(found, leases=False)
            for line in grid.wrapped("- " + text, width, style, "  ")
        ],
        _transfers(found.get("transfers") or (), width),
        _leases(found.get("leases") or (), request, width),
        _facts(request, found.get("engines") or (), width),
    ]
    return [line for at, block in enumerate(filter(None, blocks)) for line in ([[], *block] if at else block)]


def _said(text: str, width: int, style: str) -> list[Line]:
    return grid.wrapped(text, width, style) if text else []


def _title(request: Row, as_of_ns: int | None, width: int) -> list[Line]:
    name, state = explain.title(request)
    outcome = request.get("outcome")
    bad = not request.get("in_flight") and outcome not in ("finished", None)
    line: Line = [(name, "title"), (f"  {state}", "bad" if bad else "")]
    if request.get("in_flight") and as_of_ns is not None and request.get("arrived_at_ns") is not None:
        line.append((f", arrived {span(max(0, as_of_ns - request['arrived_at_ns']))} ago", "strong"))
    parts = [line] if length(line) <= width else [line[:1], line[1:]]
    return [grid.padded(part, width) for part in parts]


def _waterfall(request: Row, as_of_ns: int | None, width: int) -> list[Line]:
    lines = waterfall(request, as_of_ns, width, _WIDE_LOOK if width >= WIDE else _NARROW_LOOK)
    return [*lines, *grid.wrapped(_SEEN, width, "dim", "  ")] if lines else []


def _transfers(transfers: Sequence[Row], width: int) -> list[Line]:
    return _headed("transfers", explain.transfers_text(transfers, width, MAX_TRANSFERS))


def _leases(leases: Sequence[Row], request: Row, width: int) -> list[Line]:
    """Blocks kept for the peer: until when, how often renewed, how close to the deadline it ended."""
    if not leases:
        return []
    arrived = request.get("arrived_at_ns")
    rows = []
    for lease in leases[:MAX_LEASES]:
        armed, ended, deadline = (lease.get(f"{n}_at_ns") for n in ("armed", "ended", "deadline"))
        margin = "" if ended is None or deadline is None else span(deadline - ended)
        rows.append(
            (
                "P" if lease["engine"] == request.get("p_engine") else "D",
                lease["rank"],
                "" if armed is None or arrived is None else ms(armed - arrived),
                "" if armed is None or ended is None else span(ended - armed),
                lease.get("renewals"),
                lease.get("end") or "held",
                f"{margin} past its deadline" if margin.startswith("-") else margin,
            )
        )
    head = ("on", "rank", "armed at ms", "held for", "renewals", "end", "left to its deadline")
    lines = [line[:width] for line in table(head, rows, max_width=width).splitlines()]
    if len(leases) > MAX_LEASES:
        lines.append(f"and {len(leases) - MAX_LEASES} leases more")
    return _headed("leases", lines)


def _headed(title: str, lines: Sequence[str]) -> list[Line]:
    return [[(title, "title")], *([(line, "")] for line in lines)] if lines else []


def _facts(request: Row, engines: Sequence[Row], width: int) -> list[Line]:
    lines: list[Line] = [[("about it", "title")]]
    for key, text in explain.facts(request, engines):
        first, *rest = grid.wrapped(text, max(8, width - 11))
        lines.append([(f"{key:<11}", "dim"), *first])
        lines += [[(" " * 11, ""), *line] for line in rest]
    return lines


# --- the page ----------------------------------------------------------------------------------------


def detail_lines(view: View, width: int) -> list[Line]:
    """The chosen request, or why there is nothing to see of it."""
    chosen, detail = view.chosen, view.detail
    if chosen is None:
        return grid.wrapped(
            "No request is chosen. Choose one on Requests (2) or Stuck (4) and press enter.", width, "dim"
        )
    known = detail if detail is not None and detail.id == chosen else Detail(chosen, None)
    lines = list(_trouble(known, width))
    if known.answer is not None:
        try:
            row = view.request(chosen)
            if view.history:
                row = None  # what it waited for then is not what it waits for now
                then = utc(view.until_ns).partition(".")[0]
                lines += grid.wrapped(f"as it is now, not at {then} UTC", width, "warn")
            lines += request_lines(known.answer, width, row.waits_for if row else "")
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            # The answer is of another program; its shape can't be trusted.
            what = f"{type(error).__name__}: {error}"
            text = f"This answer can't be drawn ({printable(what)[:80]}): is the daemon of another version?"
            lines += grid.wrapped(text, width, "bad")
    return lines


def _trouble(detail: Detail, width: int) -> Iterator[Line]:
    if detail.error:
        yield from grid.wrapped(printable(detail.error), width, "bad")
    elif detail.answer is None:
        yield [(f"asking for request {printable(detail.id)} …"[:width], "dim")]


class RequestPage(Page):
    key = "3"
    title = "Request"
    about = (
        "One request: why it was slow in a sentence, the steps of both engines on one time axis with the "
        "critical path marked, its transfers, leases, tokens and session."
    )
    hints = (("o", "session"), ("c", "copy id"))

    def __init__(self) -> None:
        super().__init__()
        self._detail: Detail | None = None
        self._chosen: str | None = None

    def compose(self) -> ComposeResult:
        yield LinesView(id="request")

    def show(self, view: View) -> None:
        body = self.query_one("#request", LinesView)
        if view.chosen != self._chosen:
            self._chosen = view.chosen
            body.scroll_home(animate=False)
        self._detail = view.detail
        body.draw(lambda width: detail_lines(view, width))

    def chosen_request(self) -> str | None:
        return self._chosen

    def chosen_session(self) -> str | None:
        answer = self._detail.answer if self._detail and self._detail.id == self._chosen else None
        request = answer.get("request") if answer else None
        session = request.get("session") if isinstance(request, Mapping) else None
        return str(session) if session else None
