"""What is always in sight: the header's two lines, tabs, footer, and what stands in for a page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvscope.text import printable, span, utc
from kvscope.tui.lines import Line, fit, width
from kvscope.tui.view import State, View
from kvscope.tui.wrong import wrong_requests

BADGE = {
    State.CONNECTING: "warn",
    State.LIVE: "good strong",
    State.STALE: "warn",
    State.LOST: "bad",
    State.OLD: "bad",
    State.FAILED: "bad",
    State.EMPTY: "warn",
    State.PAUSED: "warn",
    State.HISTORY: "strong",
}
DAWN_NS = 10**18
"""2001: the end of the data before that is that there is none."""
MIN_WIDTH, MIN_HEIGHT = 40, 10


class Target(NamedTuple):
    """Cells of one line that do something when clicked."""

    start: int
    end: int
    action: str


def header_lines(view: View, cells: int, wall_ns: int = 0, questions: Sequence[str] = ()) -> list[Line]:
    """Two lines: what is shown, and what is wrong with it; `questions` are those that the page asks."""
    return [_shown(view, cells, wall_ns, questions), _wrong(view, cells)]


def _shown(view: View, cells: int, wall_ns: int, questions: Sequence[str]) -> Line:
    state = view.state
    line: Line = [(" ", ""), (f" {state.value} ", f"{BADGE[state]} key")]
    parts: list[tuple[str, str]] = []
    frame = view.frame
    if frame is None:
        return line
    window = span_short(frame.window_ns)
    if view.stale:
        age = span(round(view.age_s * 1e9)) if view.age_s >= 1 else "just now"
        ago = age if age == "just now" else f"{age} ago"
        parts.append((f"last figures {_clock(view.until_ns, wall_ns)}, {ago}", "warn"))
    elif view.history and view.until_ns < DAWN_NS:
        parts.append(("no requests at all", "warn"))
    elif view.history:
        to = view.wanted_ns if view.wanted_ns is not None else frame.at_ns
        coming = "…" if to != frame.at_ns else ""
        run = f"▶ ×{view.speed:g}" if view.playing else "❚❚"
        parts.append((f"{window} to {_clock(to, wall_ns)}{coming} {run}", "strong"))
    else:
        parts.append((f"{window} to {_clock(view.until_ns, wall_ns)}", ""))
        if behind := view.behind_s:
            parts.append((f"figures {behind:.0f} s old", "warn"))
    if view.filters:
        parts.append((f"where {printable(' '.join(view.filters))}", "strong"))
    if view.pending and not view.trouble:
        parts.insert(0, ("one moment …", "warn"))
    elif view.advice == "requests":
        parts.append(("no request in this time", "warn"))
    elif view.advice == "filter":
        parts.append(("no request fits the filter", "warn"))
    if (old_ns := view.old_since_ns(questions)) is not None:
        parts.append((f"some figures as of {_clock(old_ns, wall_ns)}, asking …", "warn"))
    for name in questions:
        if (error := view.unanswered(name)) and view.answer(name) is not None:
            parts.append((f"{name} as before: {printable(error)}", "warn"))
    if frame.label or len(frame.labels) > 1:
        parts.append((f"label {printable(frame.label) or 'production'}", ""))
    for named in frame.windows:
        parts.append((f"{printable(named.kind)} {printable(named.name)}", "strong"))
    error_ms = view.total.get("clock_error_ms")
    if isinstance(error_ms, int | float) and error_ms >= 0.001:
        parts.append((f"clocks ±{span(round(error_ms * 1e6))}", ""))
    shown = _fitted(line, parts, cells)
    if view.filters and not any(text.startswith("where ") for text, _ in shown):
        shown = _fitted([line[0], (f" {state.value} F ", line[1][1])], parts, cells)
    return shown


def _fitted(line: Line, parts: Sequence[tuple[str, str]], cells: int) -> Line:
    """With as many of the parts as there is room for."""
    line = [*line]
    for text, style in parts:
        left = cells - width(line) - 2
        if left < 12:
            break
        line += [("  ", ""), (fit(text, left).rstrip(), style)]
    return line


def wrong_with(view: View) -> list[str]:
    """All that is wrong, in words, the gravest first: what is lost or missing, requests that are stuck or
    went wrong, then what was found."""
    lines = [printable(problem) for problem in view.problems]
    requests = wrong_requests(view.frame, view.in_flight, view.now_ns)
    lines += [text for text, style in requests if style != "dim"]
    if view.frame is not None:
        lines += [printable(finding.text) for finding in view.frame.findings]
    return lines


def _wrong(view: View, cells: int) -> Line:
    if view.trouble:
        return [(" ", ""), (fit(printable(view.trouble.text), cells - 1).rstrip(), "bad")]
    if view.frame is None:
        return [(" waiting for the first figures", "dim")]
    lines = wrong_with(view)
    if not lines:
        if view.state is State.STALE:
            return [(" ", ""), ("no news from the daemon: it hangs, or the network does", "warn")]
        fitting = " (of requests: only those that fit the filter)" if view.filters else ""
        return [(" nothing is lost, missing or broken" + fitting, "dim")]
    more = f" (+{len(lines) - 1} more: !)" if len(lines) > 1 else ""
    text = f"! {lines[0]}"
    return [(" ", ""), (fit(text, cells - 1 - len(more)).rstrip(), "bad"), (more, "strong")]


def tab_line(pages: Sequence[tuple[str, str]], shown: str, cells: int) -> tuple[Line, list[Target]]:
    """The pages' names; on a narrow screen those not shown are digits only."""
    names = [f" {key} {title} " for key, title in pages]
    if sum(map(len, names)) > cells:
        names = [f" {key} {title} " if key == shown else f" {key} " for key, title in pages]
    line: Line = []
    targets = []
    at = 0
    for (key, _), name in zip(pages, names, strict=True):
        line.append((name, "cursor strong" if key == shown else ""))
        targets.append(Target(at, at + len(name), f"page('{key}')"))
        at += len(name)
    return line, targets


def key_line(keys: Sequence[tuple[str, str, str]], cells: int) -> tuple[Line, list[Target]]:
    """As many (key, what it does, action) as there is room for; the last one, to quit, in any case."""
    line: Line = []
    targets = []
    at = 0
    *others, last = keys
    room = cells + 2 - len(f"{last[0]} {last[1]}  ")
    shown = []
    for key, label, action in others:
        room -= len(f"{key} {label}  ")
        if room < 0:
            break
        shown.append((key, label, action))
    for key, label, action in (*shown, last):
        text = f" {label}  "
        line += [(key, "strong"), (text, "")]
        if action:
            targets.append(Target(at, at + len(key) + len(text) - 2, action))
        at += len(key) + len(text)
    return line, targets


def instead_of_page(view: View, cells: int, height: int, source: str) -> list[Line] | None:
    """What to show where there are no figures to show, and what to do; None where there are."""
    if cells < MIN_WIDTH or height < MIN_HEIGHT:
        return [[("make the terminal larger", "warn")], [(f"{MIN_WIDTH}×{MIN_HEIGHT} at least", "")]]
    state = view.state
    nothing_then = state is State.HISTORY and view.advice == "engines"
    if view.frame is not None and state is not State.EMPTY and not nothing_then:
        return None
    text: list[str] = []
    if nothing_then:
        text = [
            "",
            "!Nothing is recorded of this time.",
            "",
            source,
            "",
            "w goes to the worst moment there is, ← and → through time.",
        ]
    if state is State.CONNECTING:
        text = ["", f"Waiting for {source} …"]
    elif state is State.LOST:
        text = [
            "",
            "!No daemon answers.",
            "",
            printable(view.trouble.text) if view.trouble else "",
            "",
            "On the engines' host:        kvscope serve",
            "From elsewhere:              kvscope top --url http://HOST:9177",
            "A store file or snapshot:    kvscope top --db FILE",
            "",
            "This screen shows figures as soon as the daemon answers.",
        ]
    elif state is State.OLD:
        text = [
            "",
            "!The daemon is of another kvscope version.",
            "",
            printable(view.trouble.text) if view.trouble else "",
            "",
            "Its version:                 kvscope status",
            "This one:                    kvscope --version",
        ]
    elif state is State.FAILED:
        text = [
            "",
            "!There are no figures.",
            "",
            printable(view.trouble.text) if view.trouble else "",
            "",
            "It is tried again every few seconds.",
        ]
    elif state is State.EMPTY:
        text = [
            "",
            "!The daemon runs, but no engine is instrumented (or none has started yet).",
            "",
            "1. In the environment that vLLM runs in:",
            "       pip install --no-deps kvscope",
            "2. In --kv-transfer-config of each engine:",
            '       "kv_connector_module_path": "kvscope.connectors"',
            "   or, where it can't be changed, in its environment:  KVSCOPE_ENABLE=1",
            "3. Start the engines. They and the daemon run as the same user on the same host;",
            "   in containers they share one directory, named by KVSCOPE_DIR.",
            "",
            "To see kvscope at work without engines:  kvscope demo --simulate",
        ]
    lines: list[Line] = []
    for line in text:
        style = "title" if line.startswith("!") else ""
        lines += [[("  " + part, style)] for part in _wrapped(line.removeprefix("!"), cells - 3)]
    return lines


def span_short(ns: int) -> str:
    """A window as it is written on the command line: `5m`."""
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if ns % (size * 10**9) == 0 and ns:
            return f"{ns // (size * 10**9)}{unit}"
    return span(ns)


def _clock(ns: int, wall_ns: int) -> str:
    """A moment; with its date where that is not today's."""
    with_date = abs(wall_ns - ns) > 20 * 3600 * 10**9
    return utc(ns, date=with_date).partition(".")[0] + " UTC"


def _wrapped(text: str, cells: int) -> list[str]:
    import textwrap

    if text.startswith(" ") or not text:
        return [text]
    return textwrap.wrap(text, max(20, cells), drop_whitespace=True, replace_whitespace=False) or [""]
