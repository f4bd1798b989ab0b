"""What a report is made of, before it is HTML, Markdown or JSON: plain data, as untrusted as its source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from kvscope.text import printable, shortened
from kvscope.waterfall import Interval

NONE = "–"
"""In place of what is not known: unknown is not zero."""
MAX_TEXT = 160
"""Characters of a cell; ids come from clients."""

Values = Mapping[str, Any]


class Column(NamedTuple):
    """One column of a table; `name` as in the answer, where it is of one."""

    name: str
    title: str
    number: bool = True


class Table(NamedTuple):
    caption: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    left_out: int = 0
    """Rows beyond those here."""
    folded: bool = False
    """It says what a figure shows."""


class Stack(NamedTuple):
    """One bar: milliseconds or percent by class."""

    name: str
    parts: Mapping[str, float]
    text: str
    """Its length in words."""


class Bars(NamedTuple):
    """Bars, one below the other."""

    title: str
    about: str
    bars: Sequence[Stack]
    scale: float | None = None
    """Length of a full bar; None: each bar is full."""


class Trend(NamedTuple):
    """Bars side by side, in the order of time."""

    title: str
    about: str
    spans: Sequence[tuple[int, Mapping[str, float]]]
    """Unix nanoseconds of the beginning, and milliseconds by class."""
    length_ns: int
    """Of each span."""
    since_ns: int
    until_ns: int


class Waterfall(NamedTuple):
    """A request's steps, both legs on one axis."""

    title: str
    about: str
    intervals: Sequence[Interval]
    axis_ns: int
    lines: Sequence[str]
    """The same as text."""


Figure = Bars | Trend | Waterfall


class Query(NamedTuple):
    """What a figure rests on."""

    title: str
    command: str
    sql: str = ""


@dataclass
class Section:
    name: str
    """Its place in the page's address, and its key in JSON."""
    title: str
    text: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """More sentences, each for itself."""
    parts: list[Figure | Table] = field(default_factory=list)
    queries: list[Query] = field(default_factory=list)
    within: list[Section] = field(default_factory=list)


@dataclass
class Report:
    title: str
    facts: list[tuple[str, str]]
    simulated: bool
    verdict: list[str]
    """Two sentences."""
    cautions: list[str]
    """What the verdict does not rest on firmly."""
    sections: list[Section]
    data: dict[str, Any]
    """For JSON: all answers."""


def shown(value: object) -> str:
    """A value of an answer, with as many digits as `kvscope query` prints; on one line."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return shortened(", ".join(printable(one) for one in value), MAX_TEXT) or NONE
    return shortened(printable(value), MAX_TEXT)


def table(
    caption: str, columns: Sequence[Column], rows: Sequence[Values], most: int = 30, folded: bool = False
) -> Table:
    """These columns of the first `most` rows."""
    cells = [[shown(row.get(column.name)) for column in columns] for row in rows[:most]]
    return Table(caption, columns, cells, max(0, len(rows) - most), folded)
