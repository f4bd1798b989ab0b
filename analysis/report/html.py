"""A report as one HTML page: nothing from elsewhere, no script, all text of others escaped."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources

from kvscope.analysis.report.parts import Query, Report, Section, Table
from kvscope.analysis.report.svg import drawn, escaped, legend, patterns

LONG = 40
"""Characters of a cell from which on it is broken into lines."""
_CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def page(report: Report) -> str:
    style = resources.files("kvscope.analysis.report").joinpath("report.css").read_text("utf-8")
    facts = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(value)}</dd>" for name, value in report.facts)
    links = "".join(f'<li><a href="#{one.name}">{escaped(one.title)}</a></li>' for one in report.sections)
    simulated = '<p class="simulated">Simulated</p>' if report.simulated else ""
    said = "".join(f'<p class="said">{escaped(sentence)}</p>' for sentence in report.verdict)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{_CSP}">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escaped(report.title)}</title>",
            '<link rel="icon" href="data:,">',
            f"<style>\n{style}</style>",
            "</head>",
            "<body>",
            '<a class="skip" href="#verdict">Skip to the verdict</a>',
            patterns(),
            f"<header><h1>{escaped(report.title)}</h1>{simulated}",
            f'<dl class="facts">{facts}</dl></header>',
            "<main>",
            '<section class="verdict" id="verdict" aria-labelledby="verdict-title">',
            f'<h2 id="verdict-title">Verdict</h2>{said}{_cautions(report)}</section>',
            f'<nav aria-label="Sections"><ul>{links}</ul></nav>',
            legend(),
            *(_section(one, 2) for one in report.sections),
            "</main>",
            "<footer><p>Times are UTC. – stands for what is not known, which is never 0. Compute wait is "
            "compute and capacity; coordination wait is coordination, which accelerators would not shorten."
            "</p></footer>",
            "</body>",
            "</html>",
            "",
        ]
    )


def _cautions(report: Report) -> str:
    if not report.cautions:
        return ""
    entries = "".join(f"<li>{escaped(one)}</li>" for one in report.cautions)
    return f'<ul class="cautions" aria-label="Cautions">{entries}</ul>'


def _section(section: Section, level: int) -> str:
    name = section.name
    body = [f'<section id="{name}" aria-labelledby="{name}-head">']
    body.append(f'<h{level} id="{name}-head">{escaped(section.title)}</h{level}>')
    body += [f"<p>{escaped(text)}</p>" for text in section.text]
    if section.notes:
        body.append(f"<ul>{''.join(f'<li>{escaped(note)}</li>' for note in section.notes)}</ul>")
    for number, part in enumerate(section.parts):
        if isinstance(part, Table):
            body.append(_folded(part) if part.folded else _table(part))
        else:
            body.append(
                f"<figure><figcaption>{escaped(part.title)}</figcaption>"
                f'<p class="about">{escaped(part.about)}</p>{drawn(part, f"{name}-{number}")}</figure>'
            )
    body += [_query(query) for query in section.queries]
    body += [_section(one, level + 1) for one in section.within]
    return "\n".join([*body, "</section>"])


def _folded(table: Table) -> str:
    rows = f"{len(table.rows)} row{'' if len(table.rows) == 1 else 's'}"
    return (
        f"<details><summary>As a table: {escaped(table.caption)} ({rows})</summary>{_table(table)}</details>"
    )


def _table(table: Table) -> str:
    numbers = [column.number for column in table.columns]
    head = "".join(
        f'<th scope="col"{_class(column.number, "")}>{escaped(column.title)}</th>' for column in table.columns
    )
    rows = "".join(f"<tr>{_cells(row, numbers)}</tr>\n" for row in table.rows)
    left = f'<p class="about">{table.left_out} more rows are left out; the query has them.</p>'
    return (
        # Reached by the keyboard, as it may scroll.
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escaped(table.caption)}"><table>'
        f"<caption>{escaped(table.caption)}</caption><thead><tr>{head}</tr></thead>\n<tbody>{rows}</tbody>"
        f"</table></div>{left if table.left_out else ''}"
    )


def _cells(row: Sequence[str], numbers: Sequence[bool]) -> str:
    """The first cell names the row."""
    first, *others = (
        f"{_class(number, cell)}>{escaped(cell)}" for cell, number in zip(row, numbers, strict=True)
    )
    return f'<th scope="row"{first}</th>' + "".join(f"<td{cell}</td>" for cell in others)


def _class(number: bool, text: str) -> str:
    """Numbers stand to the right; long texts are broken into lines."""
    return ' class="n"' if number else ' class="long"' if len(text) > LONG else ""


def _query(query: Query) -> str:
    sql = "\n".join(map(escaped, query.sql.splitlines()))
    code = f"<pre><code>{sql}</code></pre>" if sql else ""
    return (
        f"<details><summary>How to ask for it: {escaped(query.title)}</summary>"
        f"<pre><code>{escaped(query.command)}</code></pre>{code}</details>"
    )
