"""Tables and figures as lines: columns aligned, units in headings; what does not fit is left out by rank."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.cells import cell_len, set_cell_size

from kvscope.frame import Answer
from kvscope.text import printable
from kvscope.tui.lines import Line, class_bar, fit, width

NONE = "–"
"""In place of a figure that was not observed: unknown is not zero."""
GAP = 2
ELLIPSIS = "…"

MAX_ROWS = 2000
"""Of an answer; more is no use on a screen."""
MAX_TEXT = 200

Cell = str | Line | Callable[[int], Line]
"""Text, spans, or what draws a bar of so many cells."""


class Row:
    """A row of an answer. It came over a network: a value that is not what it should be is "not observed"."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def number(self, name: str) -> float | None:
        value = self._values.get(name)
        return value if isinstance(value, int | float) and abs(value) < 1e19 else None

    def some(self, name: str) -> float:
        """The number, or 0 where there is none: for sums and comparisons."""
        return self.number(name) or 0

    def text(self, name: str) -> str:
        """On one line, for the screen."""
        return printable(self.raw(name))

    def raw(self, name: str) -> str:
        """As it is, for filters; empty where there is none."""
        value = self._values.get(name)
        return "" if value is None else str(value)[:MAX_TEXT]


def rows_of(answer: Answer | None) -> list[Row]:
    if answer is None:
        return []
    return [Row(dict(zip(answer.columns, row, strict=False))) for row in answer.rows[:MAX_ROWS]]


def class_cell(parts: Mapping[str, float], scale: float) -> Callable[[int], Line]:
    """A stacked bar; `scale` fills the column."""
    return lambda cells: class_bar(parts, scale, cells)


class Column(NamedTuple):
    title: str
    right: bool = True
    rank: int = 0
    """Columns of the highest rank are left out first; those of rank 0 never are."""
    least: int = 0
    """A text may be cut down to so many cells; 0 is not at all."""
    bar: int = 0
    """Most cells of a bar, which takes what is left of the width, but no less than `least`; 0 is no bar."""


def table(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], cells: int) -> list[Line]:
    """The heading and the rows, in at most `cells`."""
    widths = _widths(columns, rows, cells)
    heading: Sequence[Cell] = [[(column.title, "dim")] for column in columns]
    return [_row(columns, widths, row) for row in (heading, *rows)]


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[Cell]], cells: int) -> list[int | None]:
    """Of each column; None where it is left out."""
    widths: list[int | None] = []
    for i, column in enumerate(columns):
        widest = max((0 if callable(row[i]) else _length(row[i]) for row in rows), default=0)
        widths.append(max(cell_len(column.title), column.least if column.bar else widest))
    for rank in sorted({column.rank for column in columns if column.rank}, reverse=True):
        for i in reversed([i for i, column in enumerate(columns) if column.rank == rank]):
            if _excess(columns, widths, cells, cut=True) > 0:
                widths[i] = None
    cuttable = [i for i, column in enumerate(columns) if column.least and not column.bar]
    while (excess := _excess(columns, widths, cells)) > 0:
        candidates = [i for i in cuttable if (widths[i] or 0) > columns[i].least]
        if not candidates:
            break
        widest = max(candidates, key=lambda i: widths[i] or 0)
        widths[widest] = (widths[widest] or 0) - 1
    for i, column in enumerate(columns):
        if column.bar and widths[i] is not None and excess < 0:
            more = min(-excess, max(0, column.bar - (widths[i] or 0)))
            widths[i], excess = (widths[i] or 0) + more, excess + more
    return widths


def _excess(columns: Sequence[Column], widths: Sequence[int | None], cells: int, cut: bool = False) -> int:
    """Cells that the columns take beyond those there are, where texts are `cut` as far as they may be."""
    taken = [
        min(width_, column.least) if cut and column.least and not column.bar else width_
        for column, width_ in zip(columns, widths, strict=True)
        if width_ is not None
    ]
    return sum(taken) + GAP * (len(taken) - 1) - cells


def _row(columns: Sequence[Column], widths: Sequence[int | None], row: Sequence[Cell]) -> Line:
    line: Line = []
    for column, cells, cell in zip(columns, widths, row, strict=True):
        if cells is None:
            continue
        if line:
            line.append((" " * GAP, ""))
        if isinstance(cell, str):
            line.append((fit(cell, cells, column.right and not column.bar), ""))
            continue
        line += padded(cell(cells) if callable(cell) else cell, cells, column.right and not column.bar)
    return line


def _length(cell: Cell) -> int:
    return cell_len(cell) if isinstance(cell, str) else 0 if callable(cell) else width(cell)


def padded(line: Line, cells: int, right: bool = False) -> Line:
    """`line` in exactly so many cells; a cut is shown by an ellipsis."""
    blank = cells - width(line)
    if blank >= 0:
        return [(" " * blank, ""), *line] if right else [*line, (" " * blank, "")]
    kept: Line = []
    left = cells - 1
    for text, style in line:
        part = set_cell_size(text, min(left, cell_len(text)))
        kept.append((part, style))
        left -= cell_len(part)
    return [*kept, (ELLIPSIS, "dim")] if cells > 0 else []


def beside(left: Sequence[Line], right: Sequence[Line], cells: int, gap: int = 4) -> list[Line]:
    """Two blocks of lines side by side; the left one is `cells` wide."""
    height = max(len(left), len(right))
    blank: Line = []
    return [
        [
            *padded(left[i] if i < len(left) else blank, cells),
            (" " * gap, ""),
            *(right[i] if i < len(right) else blank),
        ]
        for i in range(height)
    ]


def wrapped(text: str, cells: int, style: str = "", indent: str = "") -> list[Line]:
    """`text` broken between words into lines of `cells`; `indent` begins the second and later ones."""
    lines: list[Line] = []
    line = ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if line and line.strip() and cell_len(longer) > cells:
            lines.append([(fit(line, min(cells, cell_len(line))), style)])
            longer = indent + word
        line = longer
    lines.append([(fit(line, min(cells, cell_len(line))), style)])
    return lines


def natural(text: str) -> list[tuple[int, int | str]]:
    """A key that sorts decode-2 before decode-10."""
    parts = re.split(r"([0-9]{1,18})", text)
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in parts]


def labels(ids: Iterable[str], cells: int = 12) -> dict[str, str]:
    """A name of at most `cells` for each id (an engine's is often a UUID): its beginning, where that tells it
    from the others, else its beginning and its end, else numbered."""
    known = list(dict.fromkeys(ids))
    texts = {id_: printable(id_) or NONE for id_ in known}
    for cut in (_beginning, _both_ends):
        short = {id_: cut(text, cells) for id_, text in texts.items()}
        if len(set(short.values())) == len(known):
            return short
    return {id_: f"{fit(texts[id_], cells - 5).strip()}#{i + 1}" for i, id_ in enumerate(known)}


def _beginning(text: str, cells: int) -> str:
    return text if cell_len(text) <= cells else fit(text, cells)


def _both_ends(text: str, cells: int) -> str:
    if cell_len(text) <= cells:
        return text
    half = (cells - 1) // 2
    return set_cell_size(text, half) + ELLIPSIS + text[-(cells - 1 - half) :]


def ms(value: float | None) -> str:
    """Milliseconds to a tenth; what is less but not nothing is not shown as 0."""
    return NONE if value is None else "<0.1" if 0 < value < 0.05 else f"{value:.1f}"


def percent(value: float | None) -> str:
    return NONE if value is None else "<1 %" if 0 < value < 0.95 else f"{value:.0f} %"


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f}"


def rate(value: float | None) -> str:
    """Three digits or more, such as 0.52, 4.10, 48.6, 812."""
    if value is None:
        return NONE
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"
