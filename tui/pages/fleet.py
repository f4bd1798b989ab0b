"""Where the fleet's first tokens wait: the page to start with, and what `--once` prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from textual.app import ComposeResult

from kvscope import steps
from kvscope.advice import NEAR
from kvscope.frame import Frame, RequestRow
from kvscope.text import printable, span, utc
from kvscope.tui.header import DAWN_NS
from kvscope.tui.lines import PATTERN, Line, sparkline, width
from kvscope.tui.page import FilterBy, Page
from kvscope.tui.pages import big, grid, sessions
from kvscope.tui.pages import pairs as pairs_page
from kvscope.tui.pages.entries import EntriesView, Entry
from kvscope.tui.pages.grid import Cell, Column, Row
from kvscope.tui.pages.pairs import Note
from kvscope.tui.view import View, figures_at_ns
from kvscope.tui.wrong import how_alarming, wrong_requests

WIDE = 118
"""From so many columns on, blocks stand side by side."""
_STEPS_NARROW, _STEPS_WIDE = 6, 12
_COMPUTE_WAIT = (steps.COMPUTE, steps.CAPACITY)

_ADVICE = {
    "compute wait": (
        _COMPUTE_WAIT,
        steps.COMPUTE,
        "More or faster accelerators would shorten it.",
        "Accelerators would help.",
    ),
    "coordination wait": (
        (steps.COORDINATION,),
        steps.COORDINATION,
        "Accelerators would not shorten it.",
        "Accelerators would not help.",
    ),
    "transfer": (
        (steps.TRANSFER,),
        steps.TRANSFER,
        "Page 6 (Pairs) has the rate of each pair.",
        "Page 6 has the rates.",
    ),
    "unknown": (
        (steps.UNKNOWN,),
        steps.UNKNOWN,
        "It was not observed: page 5 (Engines) has the hooks and engines that are missing.",
        "Page 5 says what is missing.",
    ),
}
"""Of the largest wait: its classes, its style, what follows, and that in short."""
_NOTES_FROM = {"6": "Pairs", "7": "Sessions"}
"""Pages whose notes are here too, by key."""

Notes = Mapping[str, Sequence[Note]]
"""What other pages found wrong, by the page's key."""


class FleetPage(Page):
    key = "1"
    title = "Fleet"
    about = "Whether first tokens wait for compute or for coordination: by band of TTFT, step, pair, time."
    questions = ("failures", "handshakes", "transfers", "pairs", "reuse")
    hints = (("enter", "only this"),)

    def compose(self) -> ComposeResult:
        yield EntriesView()

    def show(self, view: View) -> None:
        if view.frame is None:
            return
        # The last frame may hold changes only; the view has all requests in flight, and their ages.
        frame = msgspec.structs.replace(
            view.frame, in_flight=view.in_flight, at_ns=view.now_ns, figures_at_ns=view.until_ns
        )
        found = pairs_page.gather(view.answer("pairs"), view.answer("transfers"), view.answer("handshakes"))
        notes = {
            "6": pairs_page.notes(found, view.answer("failures"), frame.engines),
            "7": sessions.notes(view.answer("reuse")),
        }
        self.query_one(EntriesView).draw_entries(lambda cells: entries(frame, cells, notes))

    def on_entries_view_opened(self, message: EntriesView.Opened) -> None:
        self.post_message(FilterBy(*message.entry.opens or ()))


def entries(frame: Frame, cells: int, notes: Notes | None = None) -> list[Entry]:
    """The page; its rows of connectors and pairs open as filters."""
    lines = head(frame, cells, True, notes or {})
    tables: list[Entry] = []
    if whole(frame):
        if cells >= WIDE:
            left = cells * 51 // 100
            block = [*bands(frame, left), [], *trend(frame, left)]
            lines += grid.beside(block, steps_table(frame, cells - left - 4, _STEPS_WIDE), left)
        else:
            lines += [*bands(frame, cells), [], *steps_table(frame, cells, _STEPS_NARROW)]
        for part in (connectors(frame, cells), pairs(frame, cells)):
            tables += [Entry([]), *part] if part else []
        if cells < WIDE:
            tables += [Entry([]), *map(Entry, trend(frame, cells))]
    return [*map(Entry, lines), *tables]


def text_lines(frame: Frame, cells: int) -> list[Line]:
    """The page for paper: every step, figures of normal size."""
    lines = head(frame, cells, False, {})
    if whole(frame):
        blocks = [
            bands(frame, cells),
            steps_table(frame, cells, len(steps.STEPS)),
            [entry.line for entry in connectors(frame, cells)],
            [entry.line for entry in pairs(frame, cells)],
            trend(frame, cells),
        ]
        for at, block in enumerate(block for block in blocks if block):
            lines += [[], *block] if at else block
    return lines


def whole(frame: Frame) -> Row | None:
    """The row of all requests; None where there was no first token."""
    row = _all(frame)
    return row if row and row.number("requests") else None


def head(frame: Frame, cells: int, big_figures: bool, notes: Notes) -> list[Line]:
    """The verdict, what is wrong, the figures; or why there are none, and what to do."""
    row = whole(frame)
    wrong = outcomes(frame, cells, clocks=not big_figures)  # the header of the screen has them
    wrong += noted(notes, cells)
    if row is None:
        return [*nothing(frame, cells), *wrong]
    return [*verdict(frame, row, cells), *wrong, *figures(frame, row, cells, big_figures)]


def nothing(frame: Frame, cells: int) -> list[Line]:
    """Why there is no first token to tell of, and what to do."""
    window = f"the {span(frame.window_ns)} up to {utc(figures_at_ns(frame), date=False)[:8]} UTC"
    if open_ := [row for row in frame.in_flight if row.outcome == "in flight"]:
        oldest = span(max(0, frame.at_ns - min(row.arrived_at_ns for row in open_)))
        first = f"{len(open_)} in flight, the oldest for {oldest}, and no first token in {window}"
        then = "Page 4 (Stuck) says what each of them waits for."
    elif frame.where and (frame.engines or frame.labels):
        first = f"No first token in {window} fits the filter {filters(frame)}"
        then = "Escape takes the filter off, / changes it, ] makes the window longer."
    elif not frame.live and not frame.engines and not frame.labels:
        none = figures_at_ns(frame) < DAWN_NS
        first = "Nothing is recorded yet" if none else f"Nothing is recorded of {window}"
        then = "Requests are stored when they are over; `kvscope status` says whether engines record."
        if not none:
            then = "Choose another time (--at), or make the window longer: ]"
    elif not frame.engines:
        first = "No engine is instrumented"
        then = (
            "Start vLLM with KVSCOPE_ENABLE=1, or with kv_connector_module_path kvscope.connectors in "
            "--kv-transfer-config, on a host where `kvscope serve` runs; this page fills by itself."
        )
    else:
        first = f"No first token in {window}"
        then = "Send requests through the router, or make the window longer: ]"
        if elsewhere := {label: n for label, n in frame.labels.items() if n and label != frame.label}:
            names = ", ".join(f"{printable(label) or 'production'} {n}" for label, n in elsewhere.items())
            then = f"There are requests with another label ({names}): b shows them."
    return [*grid.wrapped(first, cells, "strong"), *grid.wrapped(then, cells), []]


def filters(frame: Frame) -> str:
    return printable(" ".join(frame.where)) or "none"


def verdict(frame: Frame, row: Row, cells: int) -> list[Line]:
    """In words: what most of TTFT is, which steps make it, and what follows."""
    shares = {class_: row.some(f"{class_}_percent") for class_ in steps.CLASSES}
    waits = {
        "compute wait": sum(shares[class_] for class_ in _COMPUTE_WAIT),
        "coordination wait": shares[steps.COORDINATION],
        "transfer": shares[steps.TRANSFER],
        "unknown": shares[steps.UNKNOWN],
    }
    most, next_ = sorted(waits, key=lambda name: -waits[name])[:2]
    classes, style, long, short = _ADVICE[most]
    if most == "compute wait" and shares[steps.CAPACITY] > shares[steps.COMPUTE]:
        style = steps.CAPACITY
        long, short = "More room in batches or more KV blocks would shorten it.", "More capacity would help."
    first = f"{grid.percent(waits[most])} of TTFT is {most}"
    told = {most}
    if waits[most] - waits[next_] < 100 * NEAR:
        first += f", {grid.percent(waits[next_])} {next_}"
        told.add(next_)
        classes = (*classes, *_ADVICE[next_][0])
        long = short = "No single change would shorten most of it."
    named = [
        f"{step.text('step')} ({grid.percent(step.number('share_percent'))})"
        for step in _rows(frame, "fleet_steps")
        if step.text("class") in classes and step.text("step") != steps.UNKNOWN
    ]
    for several in range(min(3, len(named)), 0, -1):
        longer = f"{first}: mostly {', '.join(named[:several])}"
        if len(longer) <= cells:
            first = longer
            break
    rest = ", ".join(f"{name} {grid.percent(share)}" for name, share in waits.items() if name not in told)
    second = f"{long} The rest: {rest}."
    if len(second) > cells:
        second = f"{short} {rest[0].upper()}{rest[1:]}"
    return [*grid.wrapped(first, cells, f"{style} strong"), *grid.wrapped(second, cells, "dim")]


def outcomes(frame: Frame, cells: int, clocks: bool) -> list[Line]:
    """What did not go right, by name; nothing when all did. `clocks`: their error too."""
    wrong = wrong_requests(frame, frame.in_flight, frame.at_ns)
    found = [text for text, style in wrong if style != "dim"]
    error = [text for text, style in wrong if style == "dim" and clocks]
    if found:
        style = "bad" if any(style == "bad" for _, style in wrong) else "warn"
        return grid.wrapped("Not right: " + " · ".join([*found, *error]), cells, style, "  ")
    return [line for text in error for line in grid.wrapped(f"The engines' {text}", cells, "dim")]


def noted(notes: Notes, cells: int) -> list[Line]:
    """What other pages found wrong, with their keys: all of it where that fits a line, else by name."""
    lines: list[Line] = []
    for key, found in notes.items():
        if not found:
            continue
        where = f" (page {key}, {_NOTES_FROM[key]})"
        text = " · ".join(f"{note.kind}: {note.text}" for note in found) + where
        if len(text) > cells:
            text = " · ".join(note.kind for note in found) + where
        style = "bad" if any(note.style == "bad" for note in found) else "warn"
        lines += grid.wrapped(text, cells, style, "  ")
    return lines


def figures(frame: Frame, row: Row, cells: int, big_figures: bool) -> list[Line]:
    """Shares and TTFT, large where there is room, with rates beside them."""
    tokens = row.number("output_tokens_per_s")
    open_ = [
        one for one in frame.in_flight if one.outcome == "in flight"
    ]  # P may hold blocks of others still
    waiting = [one for one in open_ if one.ttft_ns is None]
    beside: list[Line] = [
        _numbers("TTFT ms", row, ("p50", "p90", "p99"), "ttft"),
        _numbers("TPOT ms", row, ("p50", "p90"), "tpot"),
        [
            *_figure(grid.rate(row.number("requests_per_s")), "requests/s"),
            ("  ", ""),
            *_figure(grid.count(tokens), "output tokens/s"),
        ],
        [
            *_figure(str(len(open_)), "in flight"),
            ("  ", ""),
            *_figure(str(len(open_) - len(waiting)), "of them generating"),
        ],
    ]
    late = _late(waiting, frame.at_ns, row.number("p99_ttft_ms"))
    if not big_figures:
        first = _figure(grid.count(row.number("requests")), "first tokens")
        last = [late] if late else []
        return [
            [*beside[0], ("   ", ""), *first],
            beside[1],
            [*beside[2], ("   ", ""), *beside[3]],
            *last,
            [],
        ]
    shares = [
        ("compute wait", _sum(row, [f"{class_}_percent" for class_ in _COMPUTE_WAIT]), steps.COMPUTE),
        ("coordination", row.number("coordination_percent"), steps.COORDINATION),
    ]
    blocks = [_large(name, "-" if value is None else f"{value:.0f}%", style) for name, value, style in shares]
    if cells >= WIDE:
        blocks += [
            _large(f"TTFT {name} {unit}", text, "strong")
            for name in ("p50", "p90", "p99")
            for text, unit in [_short(row.number(f"{name}_ttft_ms"))]
        ]
        beside, late = [*beside[1:], late], []
    lines: list[Line] = [[] for _ in range(big.ROWS + 1)]
    for block in blocks:
        for line, part in zip(lines, block, strict=True):
            line += [*part, ("   ", "")]
    for at, part in enumerate(beside):
        lines[at] += part
    return [*lines, late]


def _late(waiting: Sequence[RequestRow], now_ns: int, p99_ms: float | None) -> Line:
    """How many wait for a first token, and for how long: TTFT is of those that have theirs."""
    if not waiting:
        return []
    oldest = span(max(0, now_ns - min(one.arrived_at_ns for one in waiting)))
    styles = {how_alarming(one, now_ns, p99_ms) for one in waiting}
    style = next((style for style in ("bad", "warn") if style in styles), "")
    wait = "wait" if len(waiting) > 1 else "waits"
    return [(f"{len(waiting):,} {wait} for a first token, the oldest {oldest}", style)]


def _large(title: str, text: str, style: str) -> list[Line]:
    """A figure under its title, as wide as the wider of both."""
    rows = big.big(text)
    cells = max(len(title), len(rows[0]))
    return [[(title.ljust(cells), "dim")], *([(row.ljust(cells), style)] for row in rows)]


def _short(ms: float | None) -> tuple[str, str]:
    """At most four characters, and their unit."""
    if ms is None:
        return "-", "ms"
    if ms < 10:
        return f"{ms:.1f}", "ms"
    return (f"{ms:.0f}", "ms") if ms < 9999.5 else (f"{ms / 1000:.0f}", "s")


def _numbers(title: str, row: Row, names: Sequence[str], of: str) -> Line:
    line: Line = [(title, "dim")]
    for name in names:
        line += [(f"  {name}", "dim"), (grid.ms(row.number(f"{name}_{of}_ms")).rjust(8), "strong")]
    return line


def _figure(number: str, unit: str) -> Line:
    return [(number, "strong"), (f" {unit}", "dim")]


def legend(title: str, cells: int) -> Line:
    """What the patterns, letters and colours mean; without the title and spaces where there is less room."""
    for start, between, gap in ((f"{title}  ", " ", "  "), ("", "", " ")):
        line: Line = [(start, "title")]
        for class_ in steps.CLASSES:
            own = class_ == steps.UNKNOWN  # its pattern is its letter
            line.append((gap if len(line) > 1 else "", ""))
            line.append((PATTERN[class_], class_))
            line.append((f" {class_}" if own else f"{between}{steps.LETTER[class_]} {class_}", ""))
        if width(line) <= cells:
            break
    return line


def bands(frame: Frame, cells: int) -> list[Line]:
    """One stacked bar per band of TTFT percentiles, from the fastest half to the slowest hundredth. Each is
    as long as all of its band: on one scale a slow tail would leave a cell or two to most requests."""
    rows = _rows(frame, "fleet_bands")
    columns = [
        Column("band", right=False),
        Column("requests"),
        Column("", right=False, bar=cells, least=12),
        Column(""),
        Column("longest step", right=False, rank=1),
    ]

    table: list[list[Cell]] = [
        [
            row.text("band"),
            grid.count(row.number("requests")),
            grid.class_cell(
                {class_: row.some(f"{class_}_ms") for class_ in steps.CLASSES}, row.some("mean_ms")
            ),
            f"{grid.ms(row.number('mean_ms'))} ms",
            [(row.text("main_step") or grid.NONE, _style_of(row.text("main_step")))],
        ]
        for row in rows
    ]
    return [legend("TTFT", cells), *grid.table(columns, table, cells)[1:]] if rows else []


def _style_of(name: str) -> str:
    step = steps.BY_NAME.get(name)
    return step.class_ if step else ""


def steps_table(frame: Frame, cells: int, most: int) -> list[Line]:
    """The steps by their share of all TTFT; those beyond `most` are summed up in a line."""
    rows = _rows(frame, "fleet_steps")
    scale = max((row.some("share_percent") for row in rows), default=0.0)
    columns = [
        Column("steps by share", right=False, least=22),
        Column("", right=False),
        Column("share"),
        Column("", right=False, bar=60, least=4),
        Column("p50 ms"),
        Column("p99 ms"),
        Column("requests", rank=1),
    ]
    table: list[list[Cell]] = [
        [
            row.text("step"),
            [(steps.LETTER.get(row.text("class"), "?"), row.text("class"))],
            grid.percent(row.number("share_percent")),
            grid.class_cell({row.text("class"): row.some("share_percent")}, scale),
            grid.ms(row.number("p50_ms")),
            grid.ms(row.number("p99_ms")),
            grid.count(row.number("requests")),
        ]
        for row in rows[:most]
    ]
    lines = grid.table(columns, table, cells)
    if rest := rows[most:]:
        share = sum(row.some("share_percent") for row in rest)
        several = f"{len(rest)} more steps" if len(rest) > 1 else "1 more step"
        lines.append([(f"{several}: {grid.percent(share)}", "dim")])
    return lines if rows else []


def connectors(frame: Frame, cells: int) -> list[Entry]:
    rows = [row for row in _rows(frame, "fleet") if row.text("level") == "connector"]
    names = [row.text("connector") or grid.NONE for row in rows]
    opens = [(f"connector={row.raw('connector')}",) for row in rows]
    return _parts("by connector", rows, names, opens, cells)


def pairs(frame: Frame, cells: int) -> list[Entry]:
    """Each pair of prefill and decode engine."""
    rows = [row for row in _rows(frame, "fleet") if row.text("level") == "pair"]
    most = 36 if cells >= 220 else 18 if cells >= 158 else 12
    short = grid.labels((row.raw(side) for row in rows for side in ("p_engine", "d_engine")), most)
    names = [f"{short[row.raw('p_engine')]} → {short[row.raw('d_engine')]}" for row in rows]
    opens = [(f"p_engine={row.raw('p_engine')}", f"d_engine={row.raw('d_engine')}") for row in rows]
    return _parts("by pair P → D", rows, names, opens, cells, least=27)


def _parts(
    title: str,
    rows: Sequence[Row],
    names: Sequence[str],
    opens: Sequence[tuple[str, ...]],
    cells: int,
    least: int = 13,
) -> list[Entry]:
    """Rows of a part of the fleet: what its TTFT is and of what it is made."""
    columns = [
        Column(title, right=False, least=least),
        Column("requests"),
        Column("req/s", rank=4),
        Column("p50 ms"),
        Column("p90 ms", rank=3),
        Column("p99 ms"),
        Column("of TTFT", right=False, bar=60, least=10),
        Column("coord."),
        Column("TPOT ms", rank=2),
        Column("tokens/s", rank=4),
        Column("not fin.", rank=1),
    ]

    table: list[list[Cell]] = [
        [
            name,
            grid.count(row.number("requests")),
            grid.rate(row.number("requests_per_s")),
            grid.ms(row.number("p50_ttft_ms")),
            grid.ms(row.number("p90_ttft_ms")),
            grid.ms(row.number("p99_ttft_ms")),
            grid.class_cell({class_: row.some(f"{class_}_percent") for class_ in steps.CLASSES}, 100.0),
            grid.percent(row.number("coordination_percent")),
            grid.ms(row.number("p50_tpot_ms")),
            grid.count(row.number("output_tokens_per_s")),
            [(grid.count(row.number("not_finished")), "bad" if row.number("not_finished") else "")],
        ]
        for row, name in zip(rows, names, strict=True)
    ]
    lines = grid.table(columns, table, cells)
    return [Entry(line, where) for line, where in zip(lines, [None, *opens], strict=True)] if rows else []


def trend(frame: Frame, cells: int) -> list[Line]:
    """Mean milliseconds of TTFT by class over the window, to one scale; and p99, to its own."""
    rows = _rows(frame, "fleet_trend")
    if not rows:
        return []
    title = f"over the last {span(frame.window_ns)}" if frame.live else f"over {span(frame.window_ns)}"
    names = [*steps.CLASSES, "TTFT p99"]
    columns = [
        Column("trend", right=False),
        Column("", right=False),
        Column(f"mean ms {title}", right=False, bar=61, least=10),
        Column("last"),
        Column("most"),
    ]
    slots = slotted(frame, rows)
    series = [_series(slots, name) for name in names]
    top = max((value for values in series[:-1] for value in values if value is not None), default=0.0)
    table: list[list[Cell]] = []
    for name, values in zip(names, series, strict=True):
        known = [value for value in values if value is not None]
        style = name if name in steps.CLASSES else "strong"
        scale = top if name in steps.CLASSES else None
        table.append(
            [
                name,
                [(steps.LETTER.get(name, ""), style)],
                _spark_cell(values, style, scale),
                grid.ms(known[-1] if known else None),
                grid.ms(max(known, default=None)),
            ]
        )
    return grid.table(columns, table, cells)


def _spark_cell(values: Sequence[float | None], style: str, top: float | None) -> Cell:
    return lambda cells: [sparkline(_squeezed(values, cells), style, top)]


def slotted(frame: Frame, rows: Sequence[Row]) -> list[Row | None]:
    """The spans of `fleet_trend` in their places over the window; None where there was no request,
    or not all of them have a first token yet."""
    length_ns = max(10**9, (frame.window_ns + 59) // 60)
    end_ns = figures_at_ns(frame)
    start_ns = (end_ns - frame.window_ns) // length_ns * length_ns
    slots: list[Row | None] = [None] * max(1, min(61, -(-(end_ns - start_ns) // length_ns)))
    complete_ns = end_ns - _unripe_ns(frame)
    for row in rows:
        at_ns = int(row.some("at_ns"))
        if at_ns + length_ns <= complete_ns or complete_ns == end_ns:
            slots[max(0, min(len(slots) - 1, (at_ns - start_ns) // length_ns))] = row
    return slots


def _unripe_ns(frame: Frame) -> int:
    """The newest part of the window, of which only the quick requests have a first token so far: p99 of
    TTFT, at most half of the window."""
    row = _all(frame)
    p99_ms = row.number("p99_ttft_ms") if row else None
    return min(round((p99_ms or 0) * 1e6), frame.window_ns // 2)


def _series(slots: Sequence[Row | None], name: str) -> list[float | None]:
    column = "p99_ttft_ms" if name == "TTFT p99" else f"{name}_ms"
    return [None if row is None else row.number(column) for row in slots]


def _squeezed(values: Sequence[float | None], cells: int) -> list[float | None]:
    """In so many cells: where several fall into one, the greatest of them."""
    if len(values) <= cells:
        return list(values)
    groups: list[list[float]] = [[] for _ in range(cells)]
    for at, value in enumerate(values):
        if value is not None:
            groups[at * cells // len(values)].append(value)
    return [max(group, default=None) for group in groups]


def _sum(row: Row, columns: Sequence[str]) -> float | None:
    known = [value for value in map(row.number, columns) if value is not None]
    return sum(known) if known else None


def _rows(frame: Frame, question: str) -> list[Row]:
    return grid.rows_of(frame.answers.get(question))


def _all(frame: Frame) -> Row | None:
    return next((row for row in _rows(frame, "fleet") if row.text("level") == "all"), None)
