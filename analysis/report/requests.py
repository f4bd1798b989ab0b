"""The sections that tell of single requests: the slowest, with their waterfalls, and those without an end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvscope.advice import verdict
from kvscope.analysis.report.data import UNFINISHED, Gathered
from kvscope.analysis.report.parts import Column, Query, Section, Table, Waterfall, shown, table
from kvscope.explain import answer, notes
from kvscope.text import ms, printable, shortened, span, utc
from kvscope.waterfall import Interval, intervals, waterfall

Row = Mapping[str, Any]

MAX_NOTES = 12
MAX_NOTE = 400
"""Characters."""
_LINE = 100
"""Columns of the waterfall as text."""
_SLOWEST = (
    Column("id", "id", False),
    Column("client_id", "client's id", False),
    Column("arrived", "arrived (UTC)", False),
    Column("connector", "connector", False),
    Column("outcome", "outcome", False),
    Column("ttft_ms", "TTFT ms"),
    Column("compute_wait_ms", "compute wait ms"),
    Column("transfer_ms", "transfer ms"),
    Column("coordination_ms", "coordination ms"),
    Column("unknown_ms", "unknown ms"),
    Column("main_step", "longest step", False),
    Column("main_step_ms", "its ms"),
    Column("p_engine", "P", False),
    Column("d_engine", "D", False),
)
_UNFINISHED = (
    Column("id", "id", False),
    Column("client_id", "client's id", False),
    Column("arrived", "arrived (UTC)", False),
    Column("outcome", "outcome", False),
    Column("outcome_detail", "detail", False),
    Column("current_step", "last seen in", False),
    Column("for", "known for", True),
    Column("connector", "connector", False),
    Column("p_engine", "P", False),
    Column("d_engine", "D", False),
)
_STUCK = (
    Column("outcome", "outcome", False),
    Column("detail", "detail", False),
    Column("step", "last seen in", False),
    Column("connector", "connector", False),
    Column("p_engine", "P", False),
    Column("d_engine", "D", False),
    Column("requests", "requests"),
    Column("without_first_token", "without first token"),
    Column("read_after_expiry", "read after expiry"),
    Column("p50_known_ms", "p50 known ms"),
    Column("max_known_ms", "max known ms"),
    Column("last_id", "last id", False),
    Column("last_at", "last at", False),
)


def slowest(found: Gathered) -> Section:
    """A table, and each of them with its waterfall."""
    section = Section("slowest", "Slowest requests")
    asked = found.answers.get("slowest")
    if asked is None:
        return section
    section.queries.append(Query("question slowest", asked.command, asked.sql))
    if asked.error:
        section.text.append(f"Not answered, or not in full: {shown(asked.error)}.")
    rows = found.rows("slowest")
    if not rows:
        section.text.append("There are none.")
        return section
    section.parts.append(table("The longest TTFT", _SLOWEST, rows))
    section.within = [_one(found, number, one) for number, one in enumerate(found.requests, 1)]
    return section


def _one(found: Gathered, number: int, one: Row) -> Section:
    request = one["request"]
    as_of_ns = one.get("as_of_ns")
    name = shortened(printable(request.get("client_id") or request.get("id")), 80)
    section = Section(f"request-{number}", f"Request {number}: {name}")
    section.text = [text for text in (answer(request) + ".", verdict(request, as_of_ns)) if text]
    section.notes = [_sentence(text) for text, _ in list(notes(one))[:MAX_NOTES]]
    command = f"kvscope explain {int(request['id'])}" + (f" {found.scope.at}" if found.scope.at else "")
    section.queries.append(Query("the request", command))
    drawn = intervals(request, as_of_ns)
    if not drawn:
        section.text.append("None of its steps was observed.")
        return section
    lines = ["".join(text for text, _ in line).rstrip() for line in waterfall(request, as_of_ns, _LINE)]
    axis_ns = request.get("ttft_ns") or max(i.end_ns for i in drawn) or 1
    section.text.append(_sum(request, drawn))
    if any(i.shorter_than_error for i in drawn):
        section.text.append("Steps marked ! are shorter than the clocks' error: their length is not known.")
    section.parts = [
        Waterfall(
            f"Steps of request {number}: {name}",
            f"Both legs on one axis, from arrival, {ms(axis_ns)} ms long. Filled bars are on the critical "
            "path; hollow ones went on meanwhile.",
            drawn,
            axis_ns,
            lines,
        ),
        _steps(f"request {number}: {name}", drawn),
    ]
    return section


def _sentence(text: str) -> str:
    shown_ = shortened(printable(text), MAX_NOTE)
    return shown_[:1].upper() + shown_[1:] + ("" if shown_.endswith((".", "…")) else ".")


def _sum(request: Row, drawn: list[Interval]) -> str:
    """Whether the critical path adds up to TTFT, as it must."""
    covered = sum(i.ns for i in drawn if i.critical and i.step.in_ttft and not i.open)
    ttft = request.get("ttft_ns")
    if ttft is None:
        return f"Its critical path has come to {ms(covered)} ms; there was no first token."
    if covered == ttft:
        return f"The steps on its critical path add up to {ms(covered)} ms, which is TTFT."
    return (
        f"The steps on its critical path add up to {ms(covered)} ms, but TTFT is {ms(ttft)} ms: a fault of "
        "kvscope, please report it."
    )


def _steps(name: str, drawn: list[Interval]) -> Table:
    columns = [
        Column("from", "from ms"),
        Column("ms", "ms"),
        Column("leg", "leg", False),
        Column("step", "step", False),
        Column("class", "class", False),
        Column("critical", "critical path", False),
        Column("seen", "observed by", False),
        Column("error", "± ms"),
    ]
    rows = [
        {
            "from": ms(i.from_ns),
            "ms": ms(i.ns),
            "leg": i.leg or None,
            "step": i.step.name,
            "class": i.step.class_,
            "critical": i.critical,
            "seen": i.observed,
            "error": ms(i.error_ns),
        }
        for i in drawn
    ]
    return table(f"Steps of {name}", columns, rows, most=100, folded=True)


def unfinished(found: Gathered) -> Section:
    """Requests that were lost, in error, aborted, incomplete, or had no first token yet."""
    section = Section("unfinished", "Requests that did not finish")
    section.text.append(
        "Lost (an engine is gone), in error, aborted, incomplete (nothing more came), or in flight without a "
        f"first token when this was made; the oldest {UNFINISHED} at most. Outcomes counts them all."
    )
    section.queries.append(Query("the list", found.unfinished_command))
    if stuck := found.answers.get("stuck"):
        section.queries.append(Query("question stuck", stuck.command, stuck.sql))
    if rows := found.rows("stuck"):
        section.parts.append(table("Stuck and lost, or their KV read late", _STUCK, rows, most=20))
    if not found.unfinished:
        section.text.append("The list is empty.")
        return section
    rows = [
        {**row, "arrived": utc(row["arrived_at_ns"]), "for": _known(row, found.made_at_ns)}
        for row in found.unfinished
    ]
    section.parts.append(table("Without an end", _UNFINISHED, rows, most=UNFINISHED))
    return section


def _known(row: Row, now_ns: int) -> str | None:
    """How long a request has been in flight; None for one that is over."""
    if row.get("outcome") != "in flight" or row.get("arrived_at_ns") is None:
        return None
    return span(max(0, now_ns - row["arrived_at_ns"]))
