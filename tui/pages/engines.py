"""Engines: each engine on a line, and all that is known of the chosen one below."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from textual import on
from textual.app import ComposeResult

from kvscope.text import printable, size
from kvscope.tui.lines import Line, fit
from kvscope.tui.page import LinesView, Page
from kvscope.tui.pages import grid
from kvscope.tui.pages.engine import (
    BLOCKS,
    STATE_STYLES,
    Group,
    connector,
    detail_lines,
    groups,
    held,
    order,
    version,
)  # fmt: skip
from kvscope.tui.pages.rows import Head
from kvscope.tui.table import Column, LiveTable
from kvscope.tui.view import View

FREE = "·"

# --- the table ---------------------------------------------------------------------------------------


def marks(group: Group) -> str:
    """`≠` a version that others do not have, `h` hooks missing, `L` events lost."""
    found = "≠" if group.differs and not group.over else ""
    return found + ("h" if group.hooks_missing else "") + ("L" if group.lost else "")


def blocks_bar(blocks: Mapping[str, float] | None, cells: int) -> Line:
    """KV blocks by use, whole cells; what nothing is known to hold is free or cached."""
    if not blocks or cells <= 0:
        return []
    total = blocks["total"]
    line: Line = []
    at, done = 0, 0.0
    for use, (character, style) in BLOCKS.items():
        done += max(0.0, blocks.get(use, 0.0))
        end = min(cells, round(done / total * cells))
        if end > at:
            line.append((character * (end - at), style))
            at = end
    return [*line, (FREE * (cells - at), "dim")]


def columns() -> list[Column[Group]]:
    def state(group: Group, cells: int) -> Line:
        return [(fit(printable(group.state), cells), STATE_STYLES.get(group.state, ""))]

    def figure(
        name: str, title: str, of: Callable[[Group], float | None], text: Callable[[float], str], width: int,
        priority: int,
    ) -> Column[Group]:  # fmt: skip
        def cell(group: Group, cells: int) -> str:
            value = of(group)
            return "" if value is None else text(value)

        return Column(name, title, cell, width, right=True, sort=of, priority=priority)

    return [
        Column(
            "marks", "", lambda group, cells: [(marks(group), "warn")], 3,
            sort=lambda group: len(marks(group)),
        ),
        Column(
            "engine", "engine", lambda group, cells: group.name, least=10, sort=order, descending=False,
        ),
        Column(
            "role", "role", lambda group, cells: group.role, 4,
            sort=lambda group: group.role, descending=False,
        ),
        Column("state", "state", state, 9, sort=order, descending=False),
        Column(
            "blocks", "KV blocks", lambda group, cells: blocks_bar(group.blocks(), cells), least=10,
            sort=lambda group: held(group.blocks()), priority=1,
        ),
        figure("use", "use", lambda g: held(g.blocks()), lambda v: f"{v:.0%}", 4, 2),
        figure("running", "run", lambda g: g.sum_of("vllm.running"), grid.count, 5, 2),
        figure("waiting", "wait", lambda g: g.sum_of("vllm.waiting"), grid.count, 5, 2),
        figure("step", "step ms", lambda g: g.of_any("engine.step_ns"), lambda v: f"{v / 1e6:.1f}", 8, 1),
        figure("tokens", "tok/step", lambda g: g.of_any("engine.step_tokens"), grid.rate, 8, 5),
        figure("hooks", "hooks", lambda g: g.of_any("engine.hook_share"), lambda v: f"{v:.2%}", 6, 3),
        figure("cpu", "CPU", lambda g: g.processes("process.cpu"), lambda v: f"{v:.2f}", 6, 3),
        figure("memory", "memory", lambda g: g.processes("process.rss_bytes"), size, 8, 6),
        Column(
            "versions", "vLLM", lambda group, cells: version(group.rings[0], "vllm"), 9,
            sort=lambda group: version(group.rings[0], "vllm"), descending=False, priority=7,
        ),
        Column(
            "connector", "connector", lambda group, cells: connector(group.fingerprint), 22,
            sort=lambda group: connector(group.fingerprint), descending=False, priority=8,
        ),
        figure("lost", "lost", lambda g: g.lost or None, lambda v: f"{v:,.0f}", 7, 9),
    ]  # fmt: skip


# --- the page ----------------------------------------------------------------------------------------


def header(found: Sequence[Group], width: int) -> list[Line]:
    """How many engines there are, and what the marks and bars mean."""
    over = sum(group.over for group in found)
    counts = f"{len(found) - over} engines record" + (f", {over} over" if over else "")
    line: Line = [(counts, "strong"), ("   ≠ other versions  h hooks missing  L events lost", "dim")]
    legend: Line = [("KV blocks ", "dim")]
    for use, (character, style) in BLOCKS.items():
        legend += [(character, style), (f" {use}  ", "dim")]
    legend.append((f"{FREE} free or cached", "dim"))
    return [grid.padded(line, width), grid.padded(legend, width)]


class EnginesPage(Page):
    key = "5"
    title = "Engines"
    about = (
        "Each engine: its role, versions and settings, what holds its KV blocks, running and waiting "
        "requests, step time, time in kvscope's hooks, CPU by process and thread, its host, and its rings "
        "with their losses."
    )
    questions = ("leases",)
    hints = (("up/down", "choose an engine"), ("s", "sort"))

    DEFAULT_CSS = """
    EnginesPage > #engines { height: auto; max-height: 45%; min-height: 3; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._groups: list[Group] = []
        self._leases: list[grid.Row] = []

    def compose(self) -> ComposeResult:
        yield Head(id="engines-head")
        yield LiveTable(
            columns(),
            lambda group: group.name,
            row_style=lambda group: "dim" if group.over else "",
            id="engines",
        )
        yield LinesView(id="engine")

    def show(self, view: View) -> None:
        frame = view.frame
        if frame is None:
            return
        pairs = [row for row in view.rows("fleet") if row.get("level") == "pair"]
        self._groups = groups(frame.engines, frame.samples, pairs)
        self._leases = grid.rows_of(view.answer("leases"))
        table = self._table()
        table.set_rows(self._groups)
        self.query_one("#engines-head", Head).draw(lambda width: header(self._groups, width))
        self._show_chosen()

    @on(LiveTable.Highlighted, "#engines")
    def chosen(self) -> None:
        self._show_chosen()

    def _table(self) -> LiveTable[Group]:
        return self.query_one("#engines", LiveTable)

    def _show_chosen(self) -> None:
        group = self._table().cursor_row
        self.query_one("#engine", LinesView).draw(lambda width: detail_lines(group, width, self._leases))
