"""What `?` shows: the keys, the pages, and how to read the figures. Also the texts of the command palette."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from kvscope import steps
from kvscope.tui.lines import PATTERN, Line

MEANING = {
    steps.COMPUTE: "an engine computes for it; faster accelerators help",
    steps.CAPACITY: "it waits behind others for a slot or KV blocks; more accelerators help",
    steps.TRANSFER: "its KV is on the wire",
    steps.COORDINATION: "one side waits for word from the other; accelerators don't help",
    steps.UNKNOWN: "not observed: never zero, never guessed",
}


class Key(NamedTuple):
    """A key of the application."""

    keys: str
    """As Textual names them, commas between."""
    shown: str
    action: str
    title: str
    """In a few words, for the command palette; empty where that makes no sense there."""
    doc: str
    short: str = ""
    """For the footer; empty where it is not shown there."""


KEYS = (
    Key("slash", "/", "filter", "Filter requests", "filter requests, on every page", "filter"),
    Key("question_mark", "?", "help", "Help", "this help", "help"),
    Key("escape", "esc", "leave", "", "close, or go back; then clear the filter"),
    Key("exclamation_mark", "!", "problems", "What is wrong", "all that is lost, missing or found", "wrong"),
    Key("tab", "tab", "next_page(1)", "", "next page; shift+tab the one before"),
    Key("p", "p", "pause", "Pause or go on", "pause; the figures stay as they are", "pause"),
    Key("s", "s", "sort(1)", "Sort by the next column", "sort by the next column; or click its head", "sort"),
    Key("S", "S", "sort_reverse", "Sort the other way round", "the other way round"),
    Key("c", "c", "copy", "Copy the request's id", "copy the request's id (over ssh too)", "copy id"),
    Key("o", "o", "open_session", "Open the request's session", "open the request's session"),
    Key("b", "b", "label", "Next kind of traffic", "next kind of traffic (KVSCOPE_LABEL)"),
    Key("right_square_bracket", "]", "window(1)", "Longer window", "longer window"),
    Key("left_square_bracket", "[", "window(-1)", "Shorter window", "shorter window"),
    Key("left", "←", "time(-0.1)", "Back in time", "back in time by a tenth of the window", "→ time"),
    Key("right", "→", "time(0.1)", "Forward in time", "forward in time"),
    Key("shift+left", "⇧←", "time(-1)", "Back by a window", "back by a whole window"),
    Key("shift+right", "⇧→", "time(1)", "Forward by a window", "forward by a whole window"),
    Key("w", "w", "worst", "Worst moment", "the moment with the worst p99 there is"),
    Key("space", "space", "play", "Play or stop", "in the past: play on from here, or stop"),
    Key("plus,equals_sign", "+", "speed(2)", "Play faster", "play faster"),
    Key("minus", "-", "speed(0.5)", "Play slower", "play slower"),
    Key("l", "l", "live", "Back to live", "back to live"),
    Key("ctrl+p", "^p", "command_palette", "", "all commands by name"),
    Key("q,ctrl+c", "q", "quit", "Quit", "quit", "quit"),
)  # fmt: skip


def help_lines(pages: Sequence[tuple[str, str, str]], cells: int) -> list[Line]:
    """The help in `cells` columns; pages are (key, title, about)."""
    lines: list[Line] = [[("How to read it", "title")]]
    lines += _paragraph(
        "Time to first token (TTFT) is split into classes; they add up. Compute wait is compute + capacity: "
        "accelerators would help. Coordination wait is red: they would not.",
        cells,
    )
    for class_, meaning in MEANING.items():
        head = [(f"  {PATTERN[class_] * 3} {steps.LETTER[class_]} ", class_), (f"{class_:<13}", "strong")]
        lines += _hanging(head, meaning, cells, 21)
    lines += [[], [("Pages", "title")]]
    for digit, title, about in pages:
        lines += _hanging([(f"  {digit} ", "strong"), (f"{title:<10}", "strong")], about, cells, 15)
    lines += [[], [("Keys", "title")]]
    lines += _hanging([("  1-7     ", "strong")], "the pages", cells, 10)
    for key in KEYS:
        lines += _hanging([(f"  {key.shown:<8}", "strong")], key.doc, cells, 10)
    lines += _hanging([("  enter   ", "strong")], "open what the cursor is on (or double-click)", cells, 10)
    lines += _hanging(
        [("  ↑ ↓     ", "strong")], "move; page up and down, home, end, mouse wheel too", cells, 10
    )
    lines += [[], [("Filters", "title")]]
    lines += _paragraph(
        'column=value, or != > >= < <=, or ~ for "contains": connector=push  ttft>300ms  '
        "outcome!=finished  p_engine~prefill  client_id~abc. All must hold; they apply to every page. "
        "An F beside the state: there are filters, but no room to show them. "
        "Names are the words on the screens (ttft, prompt, output, p, d, readiness.detect) and the columns "
        "of `kvscope query 'DESCRIBE waits'`. ttft>1s finds those too that have waited longer than that for "
        "a first token.",
        cells,
    )
    lines += [[], [("Why was it slow?", "title")]]
    lines += _paragraph(
        "2 shows the requests; s sorts by TTFT; enter opens the slowest one: its waterfall marks the steps "
        "that the first token had to wait for. `kvscope explain ID` says the same in the shell.",
        cells,
    )
    return lines


def _paragraph(text: str, cells: int) -> list[Line]:
    return [[("  " + line, "")] for line in textwrap.wrap(text, max(20, cells - 3))]


def _hanging(head: Line, text: str, cells: int, indent: int) -> list[Line]:
    first, *rest = textwrap.wrap(text, max(16, cells - indent - 1)) or [""]
    return [[*head, (first, "")], *([(" " * indent + line, "")] for line in rest)]
