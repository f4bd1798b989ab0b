"""A report as Markdown for a ticket, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from kvscope.analysis.report.parts import Report, Section, Table, Waterfall
from kvscope.text import printable

FORMAT = 1
"""Version of the JSON."""
_MARKS = re.compile(r"([\\`*_\[\]|~#])")


def markdown(report: Report) -> str:
    """For a ticket: verdict, figures as tables, waterfalls as text, and the commands that ask for them."""
    lines = [f"# {_text(report.title)}", ""]
    if report.simulated:
        lines += ["**Simulated**", ""]
    lines += [f"- {_text(name)}: {_text(value)}" for name, value in report.facts]
    lines += ["", "## Verdict", "", " ".join(map(_text, report.verdict)), ""]
    lines += [f"- {_text(one)}" for one in report.cautions]
    for section in report.sections:
        lines += _section(section, 2)
    lines += ["", f"Times are UTC. {_text('–')} stands for what is not known, which is never 0."]
    return "\n".join(lines) + "\n"


def as_json(report: Report) -> str:
    """The verdict, what is cautioned against, and every answer as it came; docs/report.md tells the keys."""
    data: dict[str, Any] = {
        "format": FORMAT,
        "title": report.title,
        "verdict": report.verdict,
        "cautions": report.cautions,
        **report.data,
    }
    return msgspec.json.format(msgspec.json.encode(data)).decode() + "\n"


def _section(section: Section, level: int) -> Iterator[str]:
    yield from ("", f"{'#' * level} {_text(section.title)}", "")
    waterfalls = [part for part in section.parts if isinstance(part, Waterfall)]
    for text in section.text:
        yield from (_text(text), "")
    if section.notes:
        yield from (*(f"- {_text(note)}" for note in section.notes), "")
    for one in waterfalls:
        yield from ("```text", *map(printable, one.lines), "```", "")
    for part in section.parts:
        if isinstance(part, Table) and not part.folded:
            yield from _table(part)
    for query in section.queries:
        yield from (f"{_text(query.title)}: {_code(query.command)}", "")
    for within in section.within:
        yield from _section(within, level + 1)


def _table(table: Table) -> Iterator[str]:
    yield from (f"**{_text(table.caption)}**", "")
    yield "| " + " | ".join(_text(column.title) for column in table.columns) + " |"
    yield "|" + "".join(" ---: |" if column.number else " --- |" for column in table.columns)
    yield from ("| " + " | ".join(map(_text, row)) + " |" for row in table.rows)
    yield ""
    if table.left_out:
        yield from (f"{table.left_out} more rows are left out; the query has them.", "")


def _code(text: str) -> str:
    """Between more backticks than it has in a row."""
    longest = max((len(run) for run in re.findall("`+", text)), default=0)
    fence, space = "`" * (longest + 1), " " if longest else ""
    return f"{fence}{space}{printable(text)}{space}{fence}"


def _text(text: object) -> str:
    """One line that Markdown shows as it is: an id must not become a link, a mark, or HTML."""
    plain = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _MARKS.sub(r"\\\1", plain)
