"""The fleet page: whether first tokens wait for compute or coordination, with the answers' own figures."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from textual.app import App, ComposeResult

from kvscope import steps
from kvscope.frame import Answer, Frame
from kvscope.tui.lines import PATTERN, plain, width
from kvscope.tui.page import FilterBy
from kvscope.tui.pages import big, fleet
from kvscope.tui.pages.entries import EntriesView
from kvscope.tui.pages.pairs import Note
from kvscope.tui.view import View

from . import frames

WIDTHS = (80, 100, 160, 240)
HOSTILE = "evil\x1b[31m\nид名前" + "x" * 300
BARS = {character: class_ for class_, character in PATTERN.items()}


def page(frame: Frame, cells: int = 100) -> list[str]:
    return [plain(entry.line) for entry in fleet.entries(frame, cells)]


def with_rows(question: str, rows: list[dict[str, Any]], **changes: Any) -> Frame:
    frame = frames.frame(**changes)
    return msgspec.structs.replace(frame, answers={**frame.answers, question: frames.answer(*rows)})


def line_with(lines: list[str], beginning: str) -> str:
    return next(line for line in lines if line.startswith(beginning))


@pytest.mark.parametrize("cells", WIDTHS)
def test_the_figures_are_those_of_the_answers(cells: int) -> None:
    rows = [frames.in_flight(1), frames.in_flight(2, "decode.generate", ttft_ns=10**8)]
    rows.append(frames.in_flight(3, outcome="finished", step=None))  # P still holds its blocks
    lines = page(frames.frame(in_flight=rows), cells)
    text = "\n".join(lines)
    if cells < fleet.WIDE:
        assert "p50   180.0  p90   410.0  p99   760.0" in text
    else:
        for figure in ("180", "410", "760"):
            assert all(any(row.strip() in line for line in lines[2:7]) for row in big.big(figure))
    assert "p50     9.5  p90    14.0" in text
    assert "0.40 requests/s" in text
    assert "6 output tokens/s" in text
    assert "2 in flight" in text
    assert "1 of them generating" in text
    for row in frames.answers()["fleet_bands"].dicts():
        assert f" {row['mean_ms']:.1f}" in line_with(lines, str(row["band"]))
    step = next(line for line in lines if "readiness.detect " in line and " W " in line)
    assert "40 %" in step
    assert "80.0" in step
    assert "160.0" in step
    push = line_with(lines, "push ")
    assert "120" in push
    assert "180.0" in push
    assert "760.0" in push
    pair = line_with(lines, f"{frames.P} → {frames.D}")
    assert "120" in pair
    assert "57 %" in pair or "58 %" in pair


@pytest.mark.parametrize(
    ("shares", "said"),
    [
        ({}, "58 % of TTFT is coordination wait: mostly readiness.detect (40 %), transfer.dispatch (18 %)"),
        (
            {"coordination_percent": 20.0, "compute_percent": 57.5},
            "62 % of TTFT is compute wait: mostly prefill.compute (18 %), prefill.queue (5 %)",
        ),
        (
            {"coordination_percent": 40.0, "compute_percent": 37.5},
            "42 % of TTFT is compute wait, 40 % coordination wait: mostly readiness.detect (40 %)",
        ),
        ({"coordination_percent": 10.0, "transfer_percent": 62.5}, "62 % of TTFT is transfer"),
        ({"coordination_percent": 0.0, "unknown_percent": 60.0}, "60 % of TTFT is unknown"),
    ],
)
def test_the_verdict_names_the_largest_wait_and_its_steps(shares: dict[str, float], said: str) -> None:
    assert page(frames.frame(answers=frames.answers(**shares)))[0].startswith(said)


def test_capacity_is_compute_wait_that_needs_capacity() -> None:
    frame = frames.frame(
        answers=frames.answers(compute_percent=10.0, capacity_percent=70.0, coordination_percent=10.0)
    )
    first, second = page(frame)[:2]
    assert "80 % of TTFT is compute wait" in first
    assert "More capacity would help" in second


def test_unknown_time_is_shown_and_never_counted_to_a_class() -> None:
    lines = page(frames.frame())
    assert "unknown 2 %" in lines[1]
    bars = [line for line in lines if line.startswith(("p0", "p50", "p90", "p99"))]
    assert all("?" in line for line in bars)


@pytest.mark.parametrize("cells", WIDTHS)
def test_a_figure_that_was_not_observed_is_no_zero(cells: int) -> None:
    answers = frames.answers(p50_tpot_ms=None, output_tokens_per_s=None, p99_ttft_ms=None)
    text = "\n".join(page(frames.frame(answers=answers), cells))
    assert "TPOT ms  p50       –" in text
    assert "– output tokens/s" in text


@pytest.mark.parametrize("cells", WIDTHS)
def test_bars_have_as_many_cells_as_their_parts(cells: int) -> None:
    """A slow tail does not squeeze the others."""
    rows = frames.answers()["fleet_bands"].dicts()
    parts = {"compute_ms": 800.0, "capacity_ms": 0.0, "transfer_ms": 600.0, "coordination_ms": 6500.0}
    rows[3] = {**rows[3], "mean_ms": 8000.0, **parts, "unknown_ms": 100.0}
    bars = [
        [(len(text), style) for text, style in line if style in steps.CLASSES and set(text) <= set(BARS)]
        for line in fleet.bands(with_rows("fleet_bands", rows), cells)[1:]
    ]
    room = {sum(length for length, _ in bar) for bar in bars}
    assert len(room) == 1, "all bars fill their column"
    for bar, row in zip(bars, rows, strict=True):
        for class_ in steps.CLASSES:
            drawn = sum(length for length, style in bar if style == class_)
            assert abs(drawn - max(room) * row[f"{class_}_ms"] / row["mean_ms"]) <= 1


@pytest.mark.parametrize("cells", WIDTHS)
@pytest.mark.parametrize("name", [frames.P, HOSTILE, "9f3c2b1e-8e63-4a7f-9d1b-0a1b2c3d4e5f_dp0", ""])
def test_no_line_is_wider_than_the_screen(cells: int, name: str) -> None:
    rows = frames.answers(p99_ttft_ms=123456.7, peer_not_instrumented=1234)["fleet"].dicts()
    rows += [{**rows[2], "p_engine": name, "d_engine": f"{name}{number}"} for number in range(3)]
    rows += [{**rows[1], "connector": name}]
    for entry in fleet.entries(with_rows("fleet", rows, where=[f"client_id~{name}"]), cells):
        assert width(entry.line) <= cells, plain(entry.line)


def test_hostile_names_do_not_drive_the_terminal_and_still_filter() -> None:
    rows = frames.answers()["fleet"].dicts()
    rows[2] = {**rows[2], "p_engine": HOSTILE[:20]}
    frame = with_rows("fleet", rows, where=[HOSTILE])
    assert all(line.isprintable() for line in page(frame))
    opens = [entry.opens for entry in fleet.entries(frame, 100) if entry.opens]
    assert opens == [("connector=push",), (f"p_engine={HOSTILE[:20]}", f"d_engine={frames.D}")]


def test_engines_that_begin_alike_are_told_apart() -> None:
    rows = frames.answers()["fleet"].dicts()
    ids = [f"9f3c2b1e-8e63-4a7f-9d1b-0a1b2c3d4e5f_dp{rank}" for rank in range(4)]
    rows[2:] = [{**rows[2], "p_engine": p, "d_engine": d} for p in ids[:2] for d in ids[2:]]
    names = [line[:27] for line in page(with_rows("fleet", rows), 80) if "…" in line and "→" in line]
    assert len(set(names)) == 4
    assert all("_dp0 →" in name or "_dp1 →" in name for name in names), "by what they differ in"


def test_classes_differ_without_colour() -> None:
    assert len(set(PATTERN.values())) == len(set(steps.LETTER.values())) == len(steps.CLASSES)
    text = "\n".join(page(frames.frame()))
    for class_ in steps.CLASSES:
        assert any(
            f" {steps.LETTER[class_]} " in line and line.startswith(class_) for line in text.split("\n")
        )
    assert "█ C compute  ▓ B capacity  ▒ T transfer  ░ W coordination  ? unknown" in text


@pytest.mark.parametrize(
    ("frame", "said", "advised"),
    [
        (frames.empty(), "No engine is instrumented", "KVSCOPE_ENABLE=1"),
        (frames.empty(engines=frames.ENGINES), "No first token in the 5 min up to 08:00:00 UTC", "router"),
        (
            frames.empty(where=["connector=pull"], labels={"": 7}),
            "fits the filter connector=pull",
            "Escape",
        ),
        (frames.empty(where=["connector=pull"]), "No engine is instrumented", "KVSCOPE_ENABLE=1"),
        (frames.empty(live=False), "Nothing is recorded of the 5 min up to 08:00:00 UTC", "--at"),
        (frames.empty(live=False, at_ns=2, figures_at_ns=2), "Nothing is recorded yet", "kvscope status"),
        (
            frames.empty(engines=frames.ENGINES, in_flight=[frames.in_flight(1)]),
            "1 in flight, the oldest for 3.0 s, and no first token",
            "Page 4",
        ),
        (
            frames.empty(engines=frames.ENGINES, label="", labels={"": 0, "bench": 7}),
            "No first token",
            "(bench 7): b shows",
        ),
        (
            frames.frame(answers=frames.answers(requests=0)),
            "3 in flight, the oldest for 40.0 s, and",
            "Page 4",
        ),
    ],
)
def test_without_a_first_token_it_says_so_and_what_to_do(frame: Frame, said: str, advised: str) -> None:
    text = " ".join(page(frame))
    assert said in text
    assert advised in text
    assert "%" not in text


def test_a_frame_without_answers_is_no_error() -> None:
    assert page(frames.frame(answers={}))


def test_what_went_wrong_is_named() -> None:
    answers = frames.answers(
        not_finished=3,
        not_joined=2,
        peer_not_instrumented=4,
        recomputed=5,
        read_after_expiry=6,
        clock_error_ms=0.25,
        clamped=7,
    )
    frame = frames.frame(answers=answers)
    text = " ".join(page(frame, 240))
    assert (
        "Not right: 1 STUCK, up to 40.0 s in registration.handshake · 3 not finished · 2 not joined · "
        "4 peer not instrumented · 5 recomputed · "
        "6 read after expiry · 7 with steps out of order"
    ) in text
    assert "clocks" not in text, "the header has it"
    assert "clocks agree to ± 0.25 ms" in "\n".join(map(plain, fleet.text_lines(frame, 240)))


def test_nothing_wrong_takes_no_line() -> None:
    frame = frames.frame(answers=frames.answers(not_finished=0, clock_error_ms=0), in_flight=[])
    lines = [*page(frame), *map(plain, fleet.text_lines(frame, 100))]
    assert not any(word in line for line in lines for word in ("Not right", "clocks", "wait for a first"))


@pytest.mark.parametrize("cells", WIDTHS)
def test_a_hang_is_told_beside_figures_that_look_healthy(cells: int) -> None:
    """TTFT is of those that have theirs."""
    rows = [frames.in_flight(number, "readiness.signal", 300 * frames.S) for number in range(20)]
    frame = frames.frame(in_flight=rows, answers=frames.answers(not_finished=0))
    lines = [entry.line for entry in fleet.entries(frame, cells)]
    late = next(span for line in lines for span in line if "for a first token" in span[0])
    assert late == ("20 wait for a first token, the oldest 5 min", "bad")
    assert any(
        plain(line).startswith("Not right: 20 STUCK, up to 5 min in readiness.signal") for line in lines
    )
    assert "20 wait for a first token" in "\n".join(map(plain, fleet.text_lines(frame, cells)))


NOTES = {
    "6": [
        Note("Handshake failed", "prefill-0 → decode-0, 2 of 3", "Is it in reach?", "bad"),
        Note("Slow link", "WRITE prefill-0 → decode-1 1.20 GB/s, on other pairs 7.50", "", "bad"),
    ],
    "7": [],
}


def test_what_other_pages_found_is_on_the_first_screen() -> None:
    def first(cells: int) -> list[str]:
        return [plain(entry.line) for entry in fleet.entries(frames.frame(), cells, NOTES)][:20]

    assert "Handshake failed · Slow link (page 6, Pairs)" in first(79)
    assert line_with(first(79), "transfer.wire"), "what is most of it is in sight still"
    wide = line_with(first(160), "Handshake failed")
    assert wide.startswith("Handshake failed: prefill-0 → decode-0, 2 of 3 · Slow link: WRITE")
    assert wide.endswith("7.50 (page 6, Pairs)")
    assert not any("page 7" in line for line in first(160))


def test_the_page_asks_for_what_it_names() -> None:
    async def run() -> None:
        app = OnePage(frames.frame())
        answers = {
            "pairs": {"p_engine": frames.P, "d_engine": frames.D, "requests": 5},
            "handshakes": {"engine": frames.D, "peer": frames.P, "handshakes": 3, "failed": 2},
            "transfers": {"operation": "READ", "engine": frames.D, "peer": frames.P, "still_open": 1},
            "failures": {"kind": "nixl", "name": "transfer_failed", "failures": 3, "engine": frames.D},
            "reuse": {"reuse_outcome": "expired", "requests": 4},
        }
        assert set(answers) == set(app.fleet.questions)
        for question, row in answers.items():
            app.view.told(question, frames.answer(row))
        async with app.run_test(size=(160, 24)):
            shown = "\n".join(map(plain, app.query_one(EntriesView).lines))
        for kind in ("Handshake failed", "Never seen done", "Failed: transfer_failed"):
            assert kind in shown
        assert "KV handles missed: 4 of 4, mostly expired (page 7, Sessions)" in shown

    asyncio.run(run())


def test_requests_without_a_first_token_that_went_wrong_are_named_too() -> None:
    text = "\n".join(page(frames.frame(answers=frames.answers(requests=0, not_finished=9))))
    assert "9 not finished" in text


def test_steps_beyond_the_room_are_counted() -> None:
    lines = page(frames.frame(), 80)
    assert "1 more step: 2 %" in lines


def test_the_trend_keeps_gaps_in_their_places() -> None:
    rows = frames.answers()["fleet_trend"].dicts()
    frame = with_rows("fleet_trend", rows[:10] + rows[20:])
    lines = {line.split()[0]: line for line in map(plain, fleet.trend(frame, 100))}
    line = lines["coordination"]
    start = line.index("█")
    marks = line[start : start + 60]
    assert marks[:10] == "█" * 10
    assert marks[10:20] == " " * 10
    assert marks[20:] == "█" * 39 + " "
    assert line.endswith("115.0  115.0"), "last, most"
    assert "760.0" in lines["TTFT"], "the one bucket with the slow request"


def test_the_trend_ends_where_all_requests_have_their_first_token() -> None:
    """The newest spans hold only those that were quick enough, which looks like recovery."""
    rows = frames.answers()["fleet_trend"].dicts()
    rows[-4:] = [{**row, "p99_ttft_ms": 5.0} for row in rows[-4:]]
    answers = {**frames.answers(p99_ttft_ms=18_000.0), "fleet_trend": frames.answer(*rows)}
    for live in (True, False):  # the past is shown as it was then
        frame = frames.frame(answers=answers, live=live)
        assert plain(fleet.trend(frame, 100)[-1]).split()[-2:] == ["300.0", "760.0"]


def test_damaged_answers_are_not_observed() -> None:
    def damaged(number: int, value: Any) -> Any:
        return value if isinstance(value, str) else [float("nan"), "many", [], None, 10**30][number % 5]

    answers = {
        name: Answer(answer.columns, [[damaged(i, v) for i, v in enumerate(row[:-1])] for row in answer.rows])
        for name, answer in frames.answers().items()
    }
    answers["fleet"] = frames.answer({"level": "all", "requests": 5, "compute_percent": "many"})
    text = "\n".join(page(frames.frame(answers=answers)))
    assert "–" in text
    assert "nan" not in text
    assert "many" not in text


class OnePage(App[None]):
    """The page alone, and what it asks for."""

    def __init__(self, frame: Frame) -> None:
        super().__init__()
        self.fleet = fleet.FleetPage()
        self.view = View(clock=lambda: 0.0)
        self.view.apply(frame)
        self.asked: list[tuple[str, ...]] = []

    def compose(self) -> ComposeResult:
        yield self.fleet

    def on_mount(self) -> None:
        self.fleet.show(self.view)
        self.query_one(EntriesView).focus()

    def on_filter_by(self, message: FilterBy) -> None:
        self.asked.append(message.filters)


def test_enter_on_a_connector_or_pair_asks_for_its_filter() -> None:
    async def run() -> None:
        app = OnePage(frames.frame())
        async with app.run_test(size=(80, 18)) as pilot:
            view = app.query_one(EntriesView)
            assert view.chosen is None
            await pilot.press("enter")
            await pilot.press("down")
            assert view.scroll_offset.y > 0, "the chosen row is in sight"
            app.fleet.show(app.view)  # the next frame
            await pilot.press("enter", "down", "enter", "home", "enter")
            await pilot.pause()
        assert app.asked == [("connector=push",), (f"p_engine={frames.P}", f"d_engine={frames.D}")]

    asyncio.run(run())


def test_the_first_screen_of_80_by_24_tells_it_all() -> None:
    """Header, tabs and footer take four lines."""
    seen = page(frames.frame(), 79)[:20]
    text = "\n".join(seen)
    assert "of TTFT is coordination wait" in text
    assert "TTFT ms  p50" in text
    assert "in flight" in text
    for band in ("p0-50", "p50-90", "p90-99", "p99-100"):
        assert line_with(seen, band)
    for step in ("readiness.detect", "prefill.compute", "transfer.dispatch", "transfer.wire"):
        assert line_with(seen, step)
