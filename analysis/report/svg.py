"""Figures as inline SVG: widths in percent and texts in pixels, so that they are read at any width.

Classes are told apart by colour, by pattern, and by their letter; a screen reader gets title and description,
and the page has the same figures as a table.
"""

from __future__ import annotations

import html
import unicodedata
from collections.abc import Iterator, Mapping

from kvscope import steps
from kvscope.analysis.report.parts import Bars, Figure, Trend, Waterfall
from kvscope.text import ms, printable, shortened, utc

_BAR, _GAP = 14, 6
"""Height of a bar, and what is below it, in pixels."""
_TEXT = 13
"""Baseline of a text below the top of its row."""
_TREND_HEIGHT = 180
_LETTER_PERCENT = 5.0
"""A part as wide as this, or as high as this part of a bar of the trend, has its letter in it."""
_LINE = 44
"""Small letters that fit into a line of a window of 375 pixels."""

_PATTERNS = {
    steps.COMPUTE: "",
    steps.CAPACITY: '<path d="M-2 2l4-4M0 8L8 0M6 10l4-4"/>',
    steps.TRANSFER: '<path d="M0 2h8M0 6h8"/>',
    steps.COORDINATION: '<path d="M0 0L8 8M8 0L0 8"/>',
    steps.UNKNOWN: '<path d="M2 0v8M6 0v8"/>',
}


def escaped(text: object) -> str:
    return html.escape(printable(text))


def patterns() -> str:
    """What the figures refer to, once on a page."""
    made = "".join(
        f'<pattern id="p-{class_}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f'<rect width="8" height="8" class="c-{class_}"/><g class="gap">{lines}</g></pattern>'
        for class_, lines in _PATTERNS.items()
    )
    return (
        '<svg class="patterns" width="0" height="0" aria-hidden="true" focusable="false">'
        f"<title>Patterns of the classes</title><defs>{made}</defs></svg>"
    )


def legend() -> str:
    """What the letters and patterns mean."""
    entries = "".join(
        f'<li><svg class="swatch" width="22" height="14" aria-hidden="true" focusable="false">'
        f'<title>{class_}</title><rect width="22" height="14" fill="url(#p-{class_})"/></svg> '
        f"<b>{steps.LETTER[class_]}</b> {class_}</li>"
        for class_ in steps.CLASSES
    )
    return f'<ul class="legend" aria-label="Classes in the figures">{entries}</ul>'


def drawn(figure: Figure, name: str) -> str:
    """The figure as an SVG whose ids begin with `name`."""
    body: list[str] = []
    if isinstance(figure, Bars):
        height = _bars(figure, body)
    elif isinstance(figure, Trend):
        height = _TREND_HEIGHT + 40
        body += _trend(figure)
    else:
        height = _waterfall(figure, body)
    return (
        f'<svg class="figure" width="100%" height="{height}" role="img" '
        f'aria-labelledby="{name}-title" aria-describedby="{name}-desc">'
        f'<title id="{name}-title">{escaped(figure.title)}</title>'
        f'<desc id="{name}-desc">{escaped(figure.about)}</desc>{"".join(body)}</svg>'
    )


def _bars(figure: Bars, body: list[str]) -> int:
    """Returns the height of what it adds to `body`."""
    top = 0
    for bar in figure.bars:
        top = _over(top, bar.name, bar.text, body)
        scale = figure.scale or sum(bar.parts.values())
        body += _parts(bar.parts, scale, top)
        top += _BAR + _GAP
    return top


def _over(top: int, left: str, right: str, body: list[str]) -> int:
    """The text over a bar, on two lines where one is too short on a phone; returns where the bar begins."""
    left = printable(left)
    while _width(left) > _LINE:
        left = shortened(left, len(left) - 1)
    body.append(f'<text x="0" y="{top + _TEXT}" class="name">{escaped(left)}</text>')
    if _width(left) + _width(right) + 1 > _LINE:
        top += _TEXT + 3
    body.append(f'<text x="100%" y="{top + _TEXT}" text-anchor="end" class="value">{escaped(right)}</text>')
    return top + _TEXT + 5


def _width(text: str) -> float:
    """Roughly, in small letters."""
    return sum(
        2 if unicodedata.east_asian_width(c) in "WF" else 1.7 if c.isupper() or c in "mw@%" else 1
        for c in text
    )


def _parts(parts: Mapping[str, float], scale: float, top: int) -> Iterator[str]:
    at = 0.0
    for class_ in steps.CLASSES:
        width = 100 * max(0.0, parts.get(class_, 0.0)) / scale if scale > 0 else 0.0
        if width <= 0:
            continue
        yield _rect(at, width, top, _BAR, f"url(#p-{class_})", class_)
        if width >= _LETTER_PERCENT:
            yield _letter(at + width / 2, top + 11, class_)
        at += width


def _letter(x: float, y: float, class_: str) -> str:
    return f'<text x="{x:.3f}%" y="{y:.1f}" text-anchor="middle" class="letter">{steps.LETTER[class_]}</text>'


def _rect(x: float, width: float, y: float, height: float, fill: str, class_: str) -> str:
    return (
        f'<rect x="{x:.3f}%" y="{y:.1f}" width="{width:.3f}%" height="{height:.1f}" fill="{fill}" '
        f'class="s-{class_}"/>'
    )


def _trend(figure: Trend) -> Iterator[str]:
    top_ms = max((sum(parts.values()) for _, parts in figure.spans), default=0) or 1
    end_ns = max(figure.until_ns, figure.spans[-1][0] + figure.length_ns)
    whole_ns = max(1, end_ns - figure.since_ns)
    base = 20 + _TREND_HEIGHT
    yield f'<text x="0" y="{_TEXT}" class="value">{top_ms:.1f} ms</text>'
    yield '<line x1="0" x2="100%" y1="20" y2="20" class="grid"/>'
    yield f'<line x1="0" x2="100%" y1="{20 + _TREND_HEIGHT / 2}" y2="{20 + _TREND_HEIGHT / 2}" class="grid"/>'
    best: dict[str, tuple[float, float, float]] = {}
    width = 100 * figure.length_ns / whole_ns
    for at_ns, parts in figure.spans:
        x = 100 * (at_ns - figure.since_ns) / whole_ns
        bottom = float(base)
        for class_ in steps.CLASSES:
            height = _TREND_HEIGHT * max(0.0, parts.get(class_, 0.0)) / top_ms
            if height <= 0:
                continue
            bottom -= height
            yield _rect(x, max(0.2, width * 0.92), bottom, height, f"url(#p-{class_})", class_)
            if height > best.get(class_, (0.0, 0.0, 0.0))[0]:
                best[class_] = (height, x + width / 2, bottom + height / 2 + 4)
    for class_, (height, x, y) in best.items():  # where there is most room
        if height >= _TREND_HEIGHT * _LETTER_PERCENT / 100 + 4:
            yield _letter(x, y, class_)
    yield f'<line x1="0" x2="100%" y1="{base}" y2="{base}" class="axis"/>'
    yield f'<text x="0" y="{base + 16}" class="value">{_time(figure.since_ns)}</text>'
    yield f'<text x="100%" y="{base + 16}" text-anchor="end" class="value">{_time(end_ns)} UTC</text>'


def _time(ns: int) -> str:
    return utc(ns)[5:19]


def _waterfall(figure: Waterfall, body: list[str]) -> int:
    """Those up to the first token; returns the height of what it adds to `body`."""
    body.append(f'<text x="0" y="{_TEXT}" class="value">0</text>')
    body.append(f'<text x="100%" y="{_TEXT}" text-anchor="end" class="value">{ms(figure.axis_ns)} ms</text>')
    top = 20
    for i in figure.intervals:
        if not i.step.in_ttft:
            continue
        class_ = i.step.class_
        leg = f"{i.leg}: " if i.leg else ""
        error = f" ± {ms(i.error_ns)}{' !' if i.shorter_than_error else ''}" if i.error_ns else ""
        top = _over(
            top,
            f"{leg}{i.step.name} {steps.LETTER[class_]}",
            f"{'' if i.critical else 'meanwhile '}{'so far ' if i.open else ''}{ms(i.ns)} ms{error}",
            body,
        )
        x = min(100.0, max(0.0, 100 * i.from_ns / figure.axis_ns))
        width = min(100.0 - x, max(0.0, 100 * i.ns / figure.axis_ns))
        body.append(f'<line x1="0" x2="100%" y1="{top + _BAR}" y2="{top + _BAR}" class="grid"/>')
        fill, kind = (f"url(#p-{class_})", class_) if i.critical else ("none", f"{class_} meanwhile")
        # What took no time, or less than can be seen, is seen where it was.
        body.append(_rect(min(x, 99.5), max(0.5, width), top, _BAR, fill, kind))
        top += _BAR + _GAP
    return top
