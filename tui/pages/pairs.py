"""Pairs of prefill and decode engine: which link, handshake or engine is slower than it could be, and how."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding

from kvscope.frame import Answer, Engine
from kvscope.text import printable, size
from kvscope.tui.lines import Line, width
from kvscope.tui.page import FilterBy, LinesView, Page
from kvscope.tui.pages import grid
from kvscope.tui.pages.grid import Row
from kvscope.tui.table import Column, LiveTable
from kvscope.tui.view import View

SLOW = 0.5
"""Below this part of the pair's best rate, a transfer is slow."""
LOW_GB_PER_S = 1.0
"""No RDMA or NVLink is slower; TCP often is."""
LARGE_BYTES = 1 << 20
"""Smaller transfers say nothing of a link."""
SMALL_DESCRIPTOR_BYTES = 32 << 10
MANY_DESCRIPTORS = 256
POST_PERCENT = 25.0
SLOW_HANDSHAKE_MS = 500.0

OLD = "These figures are older: "
"""Before the reason why there are no newer ones."""

_MARK_SLOW, _MARK_PERHAPS, _MARK_FAILED = "▼", "▽", "!"


@dataclass
class Operation:
    """Transfers of one kind between the two engines of a pair; None is "not observed"."""

    name: str
    """READ (D pulls), WRITE (P pushes), or READ back (P reads KV that D has kept)."""
    engine: str
    """Who posts them."""
    transfers: int = 0
    failed: int = 0
    still_open: int = 0
    gb_per_s: float | None = None
    best_gb_per_s: float | None = None
    bytes: float | None = None
    descriptors: float | None = None
    descriptor_bytes: float | None = None
    post_ms: float | None = None
    us_per_descriptor: float | None = None
    wire_lower_ms: float | None = None
    wire_upper_ms: float | None = None
    peers_gb_per_s: float | None = None
    """Median rate of the other pairs' transfers of this kind."""

    @property
    def post_percent(self) -> float | None:
        """Posting's part of the time from the post call to done."""
        if self.post_ms is None or self.wire_upper_ms is None or self.post_ms + self.wire_upper_ms <= 0:
            return None
        return 100 * self.post_ms / (self.post_ms + self.wire_upper_ms)

    @property
    def possible_gb_per_s(self) -> float | None:
        """The most that the polls allow of a median transfer; None where they allow anything."""
        if not self.bytes or not self.wire_lower_ms:
            return None
        return max(self.bytes / self.wire_lower_ms / 1e6, self.gb_per_s or 0.0)

    def mark(self, best: float | None) -> tuple[str, str]:
        """Against the pair's best rate and its peers', with its style: slow, or perhaps so (a late poll)."""
        if self.slower_than(best) or self.slower_than(self.peers_gb_per_s):
            return _MARK_SLOW, "bad"
        if best is not None and self.gb_per_s is not None and self.gb_per_s < SLOW * best:
            return _MARK_PERHAPS, "warn"
        return " ", ""

    def slower_than(self, rate: float | None) -> bool:
        """Under half of it, whatever the polls missed."""
        if rate is None or self.gb_per_s is None or not self.bytes or not self.wire_lower_ms:
            return False
        return max(self.gb_per_s, self.bytes / self.wire_lower_ms / 1e6) < SLOW * rate


@dataclass
class Pair:
    """A prefill and a decode engine; None is "not observed"."""

    p: str
    d: str
    requests: int = 0
    not_finished: int = 0
    p50_ttft_ms: float | None = None
    p50_coordination_ms: float | None = None
    known_best_gb_per_s: float | None = None
    operations: list[Operation] = field(default_factory=list)
    handshakes: int = 0
    handshakes_failed: int = 0
    handshake_ms: float | None = None
    """The longest."""
    several: int = 0
    """Connectors: figures are of the busiest."""

    @property
    def best_gb_per_s(self) -> float | None:
        """The baseline as attribution knows it; else the fastest transfer's, without its post call."""
        if self.known_best_gb_per_s is not None:
            return self.known_best_gb_per_s
        known = [one.best_gb_per_s for one in self.operations if one.best_gb_per_s is not None]
        return max(known, default=None)

    @property
    def transfers_failed(self) -> int:
        """Of all ranks: several may belong to one request, which may have finished all the same."""
        return sum(one.failed for one in self.operations)

    def handshake(self) -> tuple[str, str]:
        """State and latency, and its style. Without one in the window the two knew each other before."""
        if self.handshakes_failed:
            return f"{self.handshakes_failed} of {self.handshakes} failed", "bad"
        if not self.handshakes:
            return "earlier", "dim"
        slow = (self.handshake_ms or 0) >= SLOW_HANDSHAKE_MS
        return f"{grid.ms(self.handshake_ms)} ms", "warn" if slow else ""


_NO_OPERATION: list[Operation | None] = [None]


class Transfers(NamedTuple):
    """A row of the table: a pair and one of its operations, where it has any."""

    pair: Pair
    operation: Operation | None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.pair.p, self.pair.d, self.operation.name if self.operation else ""


def gather(pairs: Answer | None, transfers: Answer | None, handshakes: Answer | None) -> list[Pair]:
    """The pairs that the answers tell of, those with most requests first."""
    found: dict[tuple[str, str], Pair] = {}
    for row in sorted(grid.rows_of(pairs), key=lambda row: row.some("requests"), reverse=True):
        key = row.raw("p_engine"), row.raw("d_engine")
        pair = found.get(key)
        if pair is None:  # the busiest connector of the pair comes first: medians can't be added up
            pair = found[key] = Pair(
                *key,
                p50_ttft_ms=row.number("p50_ttft_ms"),
                p50_coordination_ms=row.number("p50_coordination_ms"),
            )
        pair.several += 1
        pair.requests += int(row.some("requests"))
        pair.not_finished += int(row.some("not_finished"))
        best = row.number("best_gb_per_s")
        if best is not None:
            pair.known_best_gb_per_s = max(best, pair.known_best_gb_per_s or 0.0)
    for row in grid.rows_of(transfers):
        engine, peer, operation = row.raw("engine"), row.raw("peer"), row.text("operation")
        key, back = _sides(found, engine, peer, writes=operation == "WRITE")
        pair = found.setdefault(key, Pair(*key))
        pair.operations.append(_operation(row, f"{operation} back" if back else operation, engine))
    for row in grid.rows_of(handshakes):
        key, _ = _sides(found, row.raw("engine"), row.raw("peer"), writes=False)
        pair = found.setdefault(key, Pair(*key))
        pair.handshakes += int(row.some("handshakes"))
        pair.handshakes_failed += int(row.some("failed"))
        longest = row.number("max_ms")
        if longest is not None:
            pair.handshake_ms = max(longest, pair.handshake_ms or 0.0)
    _compare(list(found.values()))
    return list(found.values())


def _compare(pairs: Sequence[Pair]) -> None:
    """Tell each operation what the same one does on other pairs, where there are two or more."""
    for kind in {one.name for pair in pairs for one in pair.operations}:
        same = [one for pair in pairs for one in pair.operations if one.name == kind]
        for one in same:
            peers = [other.gb_per_s for other in same if other is not one and other.gb_per_s is not None]
            one.peers_gb_per_s = statistics.median(peers) if len(peers) > 1 else None


def _sides(
    known: dict[tuple[str, str], Pair], engine: str, peer: str, writes: bool
) -> tuple[tuple[str, str], bool]:
    """(P, D) of two engines, and whether P reads back: else P writes and D reads."""
    if (engine, peer) in known and (peer, engine) not in known:
        return (engine, peer), not writes
    if (peer, engine) in known and (engine, peer) not in known:
        return (peer, engine), False
    if writes or any(engine == p or peer == d for p, d in known):
        return (engine, peer), not writes
    return (peer, engine), False


def _operation(row: Row, name: str, engine: str) -> Operation:
    return Operation(
        name,
        engine,
        transfers=int(row.some("transfers")),
        failed=int(row.some("failed")),
        still_open=int(row.some("still_open")),
        gb_per_s=row.number("p50_gb_per_s"),
        best_gb_per_s=row.number("best_gb_per_s"),
        bytes=row.number("p50_bytes"),
        descriptors=row.number("p50_descriptors"),
        descriptor_bytes=row.number("p50_bytes_per_descriptor"),
        post_ms=row.number("p50_post_ms"),
        us_per_descriptor=row.number("us_per_descriptor"),
        wire_lower_ms=row.number("p50_wire_lower_ms"),
        wire_upper_ms=row.number("p50_wire_upper_ms"),
    )


# --- what is wrong, in words ------------------------------------------------------------------------


class Note(NamedTuple):
    kind: str
    text: str
    advice: str
    style: str


def notes(pairs: Sequence[Pair], failures: Answer | None, engines: Sequence[Engine]) -> list[Note]:
    """What is wrong with these pairs, the gravest first: one note of a kind, its evidence, and what to do."""
    short = names(pairs, 24)
    found = [*_handshake_notes(pairs, short), *_reads_and_writes(pairs, short)]
    found += _rate_notes(pairs, short, engines)
    found += _open_notes(pairs, short)
    found += _failure_notes(failures, short)
    by_kind: dict[str, list[Note]] = {}
    for note in sorted(found, key=lambda note: note.style != "bad"):
        by_kind.setdefault(note.kind, []).append(note)
    return [
        same[0]._replace(text=f"{same[0].text} (and {len(same) - 1} more)") if len(same) > 1 else same[0]
        for same in by_kind.values()
    ]


def _handshake_notes(pairs: Sequence[Pair], short: dict[str, str]) -> Iterable[Note]:
    for pair in sorted(pairs, key=lambda pair: -(pair.handshake_ms or 0)):
        if pair.handshakes_failed:
            yield Note(
                "Handshake failed",
                f"{_arrow(pair, short)}, {pair.handshakes_failed} of {pair.handshakes}",
                "Is P's side channel (VLLM_NIXL_SIDE_CHANNEL_HOST, _PORT) in reach, and the layout equal?",
                "bad",
            )
        elif pair.handshakes and (pair.handshake_ms or 0) >= SLOW_HANDSHAKE_MS:
            yield Note(
                "Cold pair",
                f"{_arrow(pair, short)}, its first requests waited {grid.count(pair.handshake_ms)} ms "
                "for a handshake",
                "A request through each pair warms it up.",
                "warn",
            )


def _rate_notes(pairs: Sequence[Pair], short: dict[str, str], engines: Sequence[Engine]) -> Iterable[Note]:
    for pair in pairs:
        for one in pair.operations:
            yield from _small_descriptors(pair, one, short)
            possible = one.possible_gb_per_s
            if possible is not None and possible < LOW_GB_PER_S and (one.bytes or 0) >= LARGE_BYTES:
                yield Note(
                    "Low rate",
                    f"{one.name} {_arrow(pair, short)} at most {grid.rate(possible)} GB/s",
                    "RDMA and NVLink do more than 1: did UCX fall back to TCP or emulation?"
                    + _transport(one.engine, engines),
                    "bad",
                )
            elif one.slower_than(one.peers_gb_per_s):
                yield Note(
                    "Slow link",
                    f"{one.name} {_arrow(pair, short)} {grid.rate(one.gb_per_s)} GB/s, "
                    f"on other pairs {grid.rate(one.peers_gb_per_s)}",
                    "Its NIC, its route or its engines differ.",
                    "bad",
                )
            elif one.slower_than(pair.best_gb_per_s):
                yield Note(
                    "Below its baseline",
                    f"{one.name} {_arrow(pair, short)} {grid.rate(one.gb_per_s)} GB/s, "
                    f"its best was {grid.rate(pair.best_gb_per_s)}",
                    "Its link is shared, or slower than it was.",
                    "warn",
                )


def _small_descriptors(pair: Pair, one: Operation, short: dict[str, str]) -> Iterable[Note]:
    post, descriptor = one.post_percent, one.descriptor_bytes
    if post is None or descriptor is None or post < POST_PERCENT:
        return
    if descriptor <= SMALL_DESCRIPTOR_BYTES and (one.descriptors or 0) >= MANY_DESCRIPTORS:
        yield Note(
            "Many small descriptors",
            f"{one.name} {_arrow(pair, short)}, {grid.count(one.descriptors)} of {size(descriptor)}, "
            f"posting them is {grid.percent(post)} of the transfer",
            "Larger KV blocks make fewer.",
            "warn",
        )


def _open_notes(pairs: Sequence[Pair], short: dict[str, str]) -> Iterable[Note]:
    for pair in pairs:
        for one in pair.operations:
            if one.still_open:
                yield Note(
                    "Never seen done",
                    f"{one.name} {_arrow(pair, short)}, {one.still_open} of {one.transfers} transfers",
                    "NIXL told neither success nor failure: does the other engine still run?",
                    "warn",
                )


def _transport(engine: str, engines: Sequence[Engine]) -> str:
    """Of the engine that posts: NIXL's backends and what UCX was told."""
    for one in engines:
        if one.engine == engine and one.fingerprint:
            backends, told = one.fingerprint.get("nixl_backends"), one.fingerprint.get("environment")
            parts = [f"backends {', '.join(map(str, backends))}"] if isinstance(backends, list) else []
            parts += [f"{name}={value}" for name, value in told.items()] if isinstance(told, dict) else []
            if parts:
                return f" ({printable(', '.join(parts))[:120]})"
    return ""


def _reads_and_writes(pairs: Sequence[Pair], short: dict[str, str]) -> Iterable[Note]:
    """READs that are slow where WRITEs are fast: on a pair that does both, or over all pairs."""
    both = [pair for pair in pairs if {one.name[0] for one in pair.operations} >= {"R", "W"}]
    for group in [*([pair] for pair in both), list(pairs)]:
        operations = [one for pair in group for one in pair.operations]
        reads = [one for one in operations if one.name[0] == "R" and (one.bytes or 0) >= LARGE_BYTES]
        possible = max((one.possible_gb_per_s or float("inf") for one in reads), default=None)
        write = max((one.gb_per_s or 0.0 for one in operations if one.name[0] == "W"), default=0.0)
        if possible is not None and possible < SLOW * write:
            where = f"{_arrow(group[0], short)}, " if len(group) == 1 else ""
            yield Note(
                "Slow READ beside fast WRITE",
                f"{where}{grid.rate(possible)} against {grid.rate(write)} GB/s",
                "UCX may write natively and read over TCP (cuda_ipc does); push would avoid it.",
                "bad",
            )
            return


def _failure_notes(failures: Answer | None, short: dict[str, str]) -> Iterable[Note]:
    by_name: dict[str, list[Row]] = {}
    for row in grid.rows_of(failures):
        if row.text("kind") == "nixl":
            by_name.setdefault(row.text("name"), []).append(row)
    for name, same in by_name.items():
        same.sort(key=lambda row: -row.some("failures"))
        engines = ", ".join(_failures_of(row, short, alone=len(same) == 1) for row in same[:3])
        more = f" and {len(same) - 3} more engines" if len(same) > 3 else ""
        last = max(row.text("last_at") for row in same)[-8:]
        total = grid.count(sum(row.some("failures") for row in same))
        yield Note(f"Failed: {name[:40]}", f"{total} on {engines}{more}, last at {last}", "", "bad")


def _failures_of(row: Row, short: dict[str, str], alone: bool) -> str:
    """Of one engine: how many, and the last one's detail, which most often is the peer."""
    peer = row.raw("last_detail")
    said = [] if alone else [grid.count(row.number("failures"))]
    said += [short.get(peer) or printable(peer)[:60]] if peer else []
    engine = short.get(row.raw("engine")) or row.text("engine")[:24]
    return f"{engine} ({', '.join(said)})" if said else engine


def _arrow(pair: Pair, short: dict[str, str]) -> str:
    return f"{short[pair.p]} → {short[pair.d]}"


# --- the matrix -------------------------------------------------------------------------------------


class Matrix(NamedTuple):
    lines: list[Line]
    first: int
    """Column of D engines shown first."""
    row: int
    """Line at which the chosen P begins."""


_CELL, _SMALL_CELL = 18, 13


def matrix(
    pairs: Sequence[Pair],
    cells: int,
    chosen: tuple[str, str] = ("", ""),
    first: int = 0,
    full: bool = True,
) -> Matrix:
    """P × D: requests, median coordination wait, and what is wrong; with `full` GB/s by operation, handshake
    and failures too, in three lines. Where there are more D engines than fit, those from `first` on, and the
    chosen one in any case."""
    p_ids = sorted({pair.p for pair in pairs}, key=grid.natural)
    d_ids = sorted({pair.d for pair in pairs}, key=grid.natural)
    cell = _CELL if full else _SMALL_CELL
    short = names(pairs, min(16, cell))
    by_key = {(pair.p, pair.d): pair for pair in pairs}
    side = max((width([(short[p], "")]) for p in p_ids), default=0)
    side = max(side, 5)
    fitting = max(1, (cells - side) // (cell + grid.GAP))
    first = max(0, min(first, len(d_ids) - fitting))
    if chosen[1] in d_ids:
        at = d_ids.index(chosen[1])
        first = min(first, at) if at < first + fitting else at - fitting + 1
    shown = d_ids[first : first + fitting]
    hidden = len(d_ids) - len(shown)
    gap = (" " * grid.GAP, "")
    heading: Line = [("P \\ D".ljust(side), "dim")]
    for d in shown:
        heading += [gap, (short[d].rjust(cell), "title")]
    lines = [heading]
    row = 0
    for p in p_ids:
        if p == chosen[0]:
            row = len(lines)
        for number, label in enumerate((short[p], "", "") if full else (short[p],)):
            line: Line = [(label.ljust(side), "title")]
            for d in shown:
                pair = by_key.get((p, d))
                line.append(gap)
                line += grid.padded(_cell(pair, number, full), cell, right=True)
            if chosen[0] == p and chosen[1] in shown:
                start = side + grid.GAP + shown.index(chosen[1]) * (cell + grid.GAP)
                line = _highlighted(line, start, cell)
            lines.append(line)
    if hidden:
        lines.append([(f"{hidden} more D engines: < and >", "dim")])
    return Matrix(lines, first, row)


def _cell(pair: Pair | None, number: int, full: bool) -> Line:
    """One line of a cell."""
    if pair is None:
        return [("·", "dim")] if number == 0 else []
    marks = [one.mark(pair.best_gb_per_s) for one in pair.operations]
    if not full:
        worst = next((mark for mark in marks if mark[0] == _MARK_SLOW), (" ", ""))
        failed = pair.not_finished or pair.transfers_failed or pair.handshakes_failed
        trouble = (_MARK_FAILED, "bad") if failed else worst
        return [(f"{pair.requests}", "strong"), (f" {grid.ms(pair.p50_coordination_ms)} ", ""), trouble]
    if number == 0:
        return [
            (f"{pair.requests}", "strong"),
            (" req", "dim"),
            (f" {grid.ms(pair.p50_coordination_ms)}", ""),
            (" ms", "dim"),
        ]
    if number == 1:
        line: Line = []
        for one, mark in zip(pair.operations, marks, strict=True):
            letter = one.name[0] + ("b" if one.name.endswith("back") else "")
            line += [(f" {letter} ", "dim"), (grid.rate(one.gb_per_s), mark[1]), (mark[0].strip(), mark[1])]
        return [*line, *([(" GB/s", "dim")] if len(marks) == 1 else [])] or [("no transfer", "dim")]
    if pair.handshakes_failed:
        return [("handshake failed", "bad")]
    if pair.not_finished:
        return [(f"{pair.not_finished} not finished", "bad")]
    if pair.transfers_failed:
        return [(f"{pair.transfers_failed} transfers failed", "bad")]
    text, style = pair.handshake()
    return [
        ("handshake ", "dim"),
        (f"{grid.count(pair.handshake_ms)} ms" if pair.handshakes else text, style),
    ]


def _highlighted(line: Line, start: int, cells: int) -> Line:
    """`line` with the cursor's style on the spans in these cells."""
    at = 0
    made: Line = []
    for text, style in line:
        inside = start <= at < start + cells
        made.append((text, f"{style} cursor".strip() if inside else style))
        at += width([(text, style)])
    return made


def _place(row: Transfers) -> Any:
    return [grid.natural(part) for part in row.key]


def names(pairs: Sequence[Pair], cells: int) -> dict[str, str]:
    return grid.labels(sorted({id_ for pair in pairs for id_ in (pair.p, pair.d)}), cells)


def legend(cells: int, full: bool) -> list[Line]:
    what = "GB/s (R read, W write, Rb back), handshake" if full else "! failed"
    lines: list[Line] = [
        [(f"Requests, median coordination wait, {what}", "dim")],
        [
            (_MARK_SLOW, "bad"),
            (" under half of the pair's best or of its peers' rate  ", "dim"),
            (_MARK_PERHAPS, "warn"),
            (" perhaps: a late poll", "dim"),
        ],
    ]
    if width(lines[0]) + 2 + width(lines[1]) <= cells:
        return [[*lines[0], ("  ", ""), *lines[1]]]
    return [grid.padded(line, cells) for line in lines]


# --- the page ---------------------------------------------------------------------------------------


def top(
    pairs: Sequence[Pair],
    failures: Answer | None,
    engines: Sequence[Engine],
    cells: int,
    chosen: tuple[str, str] = ("", ""),
    first: int = 0,
    height: int = 40,
) -> Matrix:
    """What stands above the table: notes, the matrix, what its marks mean; in `height` lines if it can be."""
    lines: list[Line] = []
    for note in notes(pairs, failures, engines):
        lines += grid.wrapped(f"{note.kind}: {note.text}. {note.advice}", cells, note.style, "  ")
    lines += [[]] if lines else []
    full = len(lines) + 3 * len({pair.p for pair in pairs}) + 4 <= height
    grid_ = matrix(pairs, cells, chosen, first, full)
    above = len(lines)
    below = legend(cells, full)
    if any(pair.several > 1 for pair in pairs):
        below.append([("Several connectors: times are those of the busiest.", "dim")])
    return Matrix([*lines, *grid_.lines, *below, []], grid_.first, above + grid_.row)


def nothing(advice: str, errors: Sequence[str], cells: int) -> list[Line]:
    """Why there is no pair to show, and what to do."""
    if errors:
        return [
            line for error in dict.fromkeys(errors) for line in grid.wrapped(printable(error), cells, "bad")
        ]
    then = {
        "engines": "No engine is instrumented: page 1 says how.",
        "filter": "Nothing fits the filter: escape takes it off.",
    }.get(advice, "A pair appears with its first handshake, transfer or request. ] makes the window longer.")
    first = "No pair of prefill and decode engine in this window"
    return [*grid.wrapped(first, cells, "strong"), *grid.wrapped(then, cells)]


def columns(name: Callable[[str, int], str]) -> list[Column[Transfers]]:
    """Of the table; `name(id, cells)` shortens an engine's id."""

    def pair_name(row: Transfers, cells: int) -> str:
        each = (cells - 3) // 2
        return f"{name(row.pair.p, each)} → {name(row.pair.d, each)}"

    def rate(row: Transfers, cells: int) -> Line:
        if row.operation is None:
            return [(grid.NONE, "dim")]
        mark, style = row.operation.mark(row.pair.best_gb_per_s)
        return [(grid.rate(row.operation.gb_per_s), style), (mark, style)]

    def not_finished(row: Transfers) -> int | None:
        """On one row of the pair's: its other operations are of the same requests."""
        first = row.operation is None or row.operation is row.pair.operations[0]
        return row.pair.not_finished if first else None

    def alarming(of: Callable[[Transfers], int | None]) -> Callable[[Transfers, int], Line]:
        def cell(row: Transfers, cells: int) -> Line:
            value = of(row)
            return [(grid.count(value), "bad" if value else "dim")]

        return cell

    def of(field_: str, form: Callable[[float | None], str]) -> Callable[[Transfers, int], str]:
        return lambda row, cells: form(getattr(row.operation, field_)) if row.operation else grid.NONE

    def by(field_: str) -> Callable[[Transfers], Any]:
        return lambda row: getattr(row.operation, field_) if row.operation else None

    def share(row: Transfers, cells: int) -> str:
        best, one = row.pair.best_gb_per_s, row.operation
        return grid.percent(100 * one.gb_per_s / best if one and one.gb_per_s is not None and best else None)

    def bytes_(value: float | None) -> str:
        return size(value) if value is not None else grid.NONE

    return [
        Column("pair", "P → D", pair_name, least=19, sort=_place, descending=False),
        Column(
            "requests",
            "requests",
            lambda row, cells: str(row.pair.requests),
            8,
            right=True,
            sort=lambda row: row.pair.requests,
        ),
        Column(
            "ttft",
            "TTFT ms",
            lambda row, cells: grid.ms(row.pair.p50_ttft_ms),
            8,
            right=True,
            sort=lambda row: row.pair.p50_ttft_ms,
            priority=3,
        ),
        Column(
            "coordination",
            "coord. ms",
            lambda row, cells: grid.ms(row.pair.p50_coordination_ms),
            9,
            right=True,
            sort=lambda row: row.pair.p50_coordination_ms,
            priority=1,
        ),
        Column(
            "handshake",
            "handshake",
            lambda row, cells: [row.pair.handshake()],
            13,
            right=True,
            sort=lambda row: (row.pair.handshakes_failed, row.pair.handshake_ms or 0.0),
        ),
        Column("operation", "op", of("name", str), 9, sort=by("name"), descending=False),
        Column("rate", "GB/s", rate, 7, right=True, sort=by("gb_per_s"), descending=False),
        Column(
            "best",
            "best",
            lambda row, cells: grid.rate(row.pair.best_gb_per_s),
            6,
            right=True,
            sort=lambda row: row.pair.best_gb_per_s,
            priority=2,
        ),
        Column("share", "of best", share, 7, right=True, priority=9),
        Column(
            "post",
            "post",
            of("post_percent", grid.percent),
            5,
            right=True,
            sort=by("post_percent"),
            priority=4,
        ),
        Column(
            "us",
            "µs/desc",
            of("us_per_descriptor", grid.rate),
            7,
            right=True,
            sort=by("us_per_descriptor"),
            priority=5,
        ),
        Column(
            "descriptors",
            "desc.",
            of("descriptors", grid.count),
            7,
            right=True,
            sort=by("descriptors"),
            priority=6,
        ),
        Column(
            "descriptor",
            "each",
            of("descriptor_bytes", bytes_),
            8,
            right=True,
            sort=by("descriptor_bytes"),
            descending=False,
            priority=7,
        ),
        Column("size", "transfer", of("bytes", bytes_), 8, right=True, sort=by("bytes"), priority=8),
        Column(
            "transfers",
            "transfers",
            of("transfers", grid.count),
            9,
            right=True,
            sort=by("transfers"),
            priority=10,
        ),
        Column(
            "open",
            "open",
            alarming(by("still_open")),
            5,
            right=True,
            sort=by("still_open"),
            priority=8,
        ),
        Column("failed", "failed", alarming(by("failed")), 6, right=True, sort=by("failed"), priority=1),
        Column(
            "not_finished",
            "not fin.",
            alarming(not_finished),
            8,
            right=True,
            sort=lambda row: row.pair.not_finished,
        ),
    ]


class PairsPage(Page):
    key = "6"
    title = "Pairs"
    about = "P × D: requests, handshakes, GB/s by operation against the pair's own best, failures."
    questions = ("pairs", "transfers", "handshakes", "failures")
    hints = (("enter", "its requests"), ("< >", "other D engines"))
    BINDINGS: ClassVar[list[Any]] = [
        Binding("less_than_sign", "columns(-1)", "D engines to the left", show=False),
        Binding("greater_than_sign", "columns(1)", "D engines to the right", show=False),
    ]

    def __init__(self) -> None:
        super().__init__()
        self._view: View | None = None
        self._pairs: list[Pair] = []
        self._short: dict[int, dict[str, str]] = {}
        """Names of the engines by the room there is for one."""
        self._cursor = ("", "")
        """The pair that the table's cursor is on."""
        self._chosen = ("", "")
        """The same, while the matrix follows it."""
        self._first = 0
        self._row = 0
        """Line of the matrix on which the chosen pair is."""

    def compose(self) -> ComposeResult:
        yield LinesView()
        yield LiveTable(columns(self._engine), key=lambda row: row.key)

    def show(self, view: View) -> None:
        self._view = view
        self._pairs = gather(view.answer("pairs"), view.answer("transfers"), view.answer("handshakes"))
        self._short = {}
        table: LiveTable[Transfers] = self.query_one(LiveTable)
        table.display = bool(self._pairs)
        rows = [Transfers(pair, one) for pair in self._pairs for one in (pair.operations or _NO_OPERATION)]
        table.set_rows(rows)
        self._choose(table.cursor_row)

    def on_resize(self, event: events.Resize) -> None:
        self.call_after_refresh(self._draw)  # when the parts have their sizes too

    def on_live_table_highlighted(self, message: LiveTable.Highlighted) -> None:
        self._choose(message.row)

    def on_live_table_opened(self, message: LiveTable.Opened) -> None:
        pair: Pair = message.row.pair
        self.post_message(FilterBy(f"p_engine={pair.p}", f"d_engine={pair.d}", page="2"))

    def action_columns(self, by: int) -> None:
        self._chosen = ("", "")  # which would be scrolled back into sight
        self._first = max(0, self._first + by)
        self._draw()

    def _choose(self, row: Transfers | None) -> None:
        """The pair to keep in sight: where it is the same still, what was scrolled to stays."""
        cursor = (row.pair.p, row.pair.d) if row else ("", "")
        if cursor != self._cursor:
            self._cursor = self._chosen = cursor
        self._draw()

    def _engine(self, engine: str, cells: int) -> str:
        if cells not in self._short:
            self._short[cells] = names(self._pairs, cells)
        return self._short[cells].get(engine, "")

    def _draw(self) -> None:
        above = self.query_one(LinesView)
        above.draw(self._lines)
        if not self._pairs:
            above.styles.height = "1fr"
            return
        most = self._most()
        above.styles.height = min(len(above.lines), most)
        if self.query_one(LiveTable).cursor == 0:
            above.scroll_to(y=0, animate=False)  # the notes
        elif not above.scroll_offset.y <= self._row < above.scroll_offset.y + most - 1:
            above.scroll_to(y=max(0, self._row - 1), animate=False)

    def _most(self) -> int:
        """Lines that what stands above the table may have."""
        return max(3, self.room.height * 6 // 10)

    def _lines(self, cells: int) -> list[Line]:
        view = self._view
        if view is None:
            return []
        errors = [error for error in map(view.unanswered, self.questions) if error]
        if not self._pairs:
            if not errors and view.answer("pairs") is None:
                return [[("asking …", "dim")]]
            return nothing(view.advice, errors, cells)
        engines = view.frame.engines if view.frame else []
        failures = view.answer("failures")
        drawn = top(self._pairs, failures, engines, cells, self._chosen, self._first, self._most())
        old = [
            line for error in errors[:1] for line in grid.wrapped(f"{OLD}{printable(error)}", cells, "bad")
        ]
        self._first, self._row = drawn.first, drawn.row + len(old)
        return [*old, *drawn.lines]
