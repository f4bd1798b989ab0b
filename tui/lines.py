"""Lines of styled text: what every page draws, whether it goes to a terminal, a picture or `--once`.

A line is a list of (text, style) spans. Styles are names; `palette` says how each looks, and without colour
the classes still differ by their pattern and letter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.segment import Segment
from rich.style import Style

from kvscope import steps
from kvscope.text import printable

Span = tuple[str, str]
Line = list[Span]

PATTERN = {
    steps.COMPUTE: "█",
    steps.CAPACITY: "▓",
    steps.TRANSFER: "▒",
    steps.COORDINATION: "░",
    steps.UNKNOWN: "?",
}
"""A class's character in bars, so that bars are read without colour."""
SPARKS = "▁▂▃▄▅▆▇█"

# Style names beside those of the classes: title, strong, dim, good, warn, bad, key, head (of a table),
# cursor (its chosen row), link. Several may stand together: "compute strong".
_COLOUR = {
    steps.COMPUTE: Style(color="green"),
    steps.CAPACITY: Style(color="yellow"),
    steps.TRANSFER: Style(color="cyan"),
    steps.COORDINATION: Style(color="red"),
    steps.UNKNOWN: Style(color="magenta"),
    "title": Style(bold=True),
    "strong": Style(bold=True),
    "dim": Style(dim=True),
    "good": Style(color="green"),
    "warn": Style(color="yellow", bold=True),
    "bad": Style(color="red", bold=True),
    "key": Style(bold=True, reverse=True),
    "head": Style(bold=True, underline=True),
    "cursor": Style(reverse=True),
    "link": Style(underline=True),
}
_NO_COLOUR = {
    **dict.fromkeys(steps.CLASSES, Style()),
    "title": Style(bold=True),
    "strong": Style(bold=True),
    "dim": Style(),
    "good": Style(),
    "warn": Style(bold=True),
    "bad": Style(bold=True, reverse=True),
    "key": Style(bold=True, reverse=True),
    "head": Style(bold=True, underline=True),
    "cursor": Style(reverse=True),
    "link": Style(underline=True),
}


class Palette:
    """How each style looks: the 16 colours that every terminal has, or bold and reverse only."""

    def __init__(self, colour: bool = True) -> None:
        self._known = dict(_COLOUR if colour else _NO_COLOUR)
        self._known[""] = Style()

    def __getitem__(self, name: str) -> Style:
        """The look of a style, or of several separated by spaces; a name that there is not looks plain."""
        found = self._known.get(name)
        if found is None:
            parts = name.split()
            found = sum((self._known[part] for part in parts if part in self._known), Style())
            self._known[name] = found
        return found


def segments(line: Line, palette: Palette, base: str = "") -> list[Segment]:
    """For the terminal, which no text of others can drive; `base` is a style under all of it."""
    under = f"{base} " if base else ""
    return [Segment(printable(text), palette[under + style]) for text, style in line if text]


def plain(line: Line) -> str:
    """Its text alone."""
    return "".join(text for text, _ in line).rstrip()


def width(line: Line) -> int:
    """Terminal cells it takes."""
    return sum(cell_len(text) for text, _ in line)


def fit(text: str, cells: int, right: bool = False) -> str:
    """`text` in exactly so many cells; a cut is shown by an ellipsis."""
    if cells <= 0:
        return ""
    length = cell_len(text)
    if length > cells:
        return set_cell_size(text, cells - 1) + "…"
    return " " * (cells - length) + text if right else text + " " * (cells - length)


def class_bar(parts: Mapping[str, float], scale: float, cells: int) -> Line:
    """A stacked bar of at most `cells`: `scale` fills it. The sum is right, small parts may vanish."""
    spans: Line = []
    done = 0.0
    at = 0
    for class_ in steps.CLASSES:
        done += max(0.0, parts.get(class_) or 0.0)
        end = min(cells, round(done / scale * cells)) if scale > 0 else 0
        if end > at:
            spans.append((PATTERN[class_] * (end - at), class_))
            at = end
    return spans


def sparkline(values: Sequence[float | None], style: str, top: float | None = None) -> Span:
    """One character per value; None is a gap. `top` is the value of a full one, by default the greatest."""
    known = [value for value in values if value is not None]
    most = top if top is not None else max(known, default=0.0)
    last = len(SPARKS) - 1
    return (
        "".join(
            " "
            if value is None
            else SPARKS[0]
            if most <= 0
            else SPARKS[min(last, max(0, round(value / most * last)))]
            for value in values
        ),
        style,
    )
