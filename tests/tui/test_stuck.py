"""The page Stuck: what has been in a step for long, what it waits for, what vLLM's gauges do not tell."""

from __future__ import annotations

from typing import Any

import pytest
from textual.app import App, ComposeResult

from kvscope.frame import RequestRow
from kvscope.tui.lines import Line, plain, width
from kvscope.tui.page import OpenRequest
from kvscope.tui.pages.rows import Context
from kvscope.tui.pages.stuck import (
    StuckPage,
    cause,
    columns,
    gauge,
    grouped,
    hidden,
    oldest_first,
    summary,
    verdict,
)
from kvscope.tui.table import LiveTable, lay_out
from kvscope.tui.view import View
from kvscope.tui.wrong import HELD, LONG_NS, STUCK_NS, age_ns, how_alarming, step_name, wrong_requests

from . import frames
from .frames import NOW, D, P, S


def view(**changes: Any) -> View:
    made = View(clock=lambda: 0.0)
    made.apply(frames.frame(**{"recent": [], **changes}))
    return made


def text(one: View, cells: int = 120) -> str:
    return "\n".join(plain(line) for line in summary(one, cells))


@pytest.mark.parametrize(
    ("age_s", "p99_ms", "expected"),
    [
        (0.5, 100.0, ""),
        (1.5, 100.0, "warn"),
        (1.5, 760.0, ""),
        (1.5, None, ""),
        (10.5, None, "warn"),
        (10.5, 9000.0, "warn"),
        (30.5, 9000.0, "bad"),
    ],
)
def test_age_marks(age_s: float, p99_ms: float | None, expected: str) -> None:
    row = frames.in_flight(1, age_ns=round(age_s * S))
    assert how_alarming(row, NOW, p99_ms) == expected


def test_generating_for_long_is_not_stuck() -> None:
    row = frames.in_flight(1, "decode.generate", 300 * S, ttft_ns=S)
    assert how_alarming(row, NOW, 100.0) == ""
    text, how = verdict(view(in_flight=[row]))
    assert text.startswith("Nothing waits too long for a first token: 0 wait")
    assert how == "good"
    assert oldest_first(row, NOW) < oldest_first(frames.in_flight(2, age_ns=S), NOW)


@pytest.mark.parametrize(
    ("step", "changes", "expected"),
    [
        ("prefill.frontend", {}, "none"),
        ("prefill.queue", {}, "P waiting"),
        ("prefill.compute", {}, "P running"),
        ("prefill.compute", {"p_engine": None}, "D running"),
        ("registration.route", {"d_engine": None}, "none"),
        ("registration.admit", {}, "D waiting"),
        ("transfer.wire", {}, "D waiting"),
        ("readiness.signal", {"d_engine": None}, "none"),
        ("decode.first_step", {}, "D running"),
        ("unknown", {}, ""),
        (None, {"waits_for": ""}, ""),
        (None, {"outcome": "finished"}, "none"),
    ],
)
def test_which_gauge_of_vllm_counts_it(step: str | None, changes: dict[str, Any], expected: str) -> None:
    assert gauge(frames.in_flight(1, **{"step": step, **changes})) == expected


@pytest.mark.parametrize(
    ("step", "changes", "words"),
    [
        ("registration.route", {"d_engine": None}, "its blocks held for a D that has not come"),
        ("prefill.frontend", {}, "API server"),
        (None, {"outcome": "finished"}, "P still holds blocks"),
    ],
)
def test_what_no_gauge_counts_is_named(step: str | None, changes: dict[str, Any], words: str) -> None:
    row = frames.in_flight(1, **{"step": step, **changes})
    assert words in hidden(row)
    assert words in " ".join(text(view(in_flight=[row])).split())
    assert "In no vLLM gauge" in text(view(in_flight=[row]))


@pytest.mark.parametrize(("age_s", "said"), [(5, False), (12, True)])
def test_what_d_registered_and_p_has_not_begun_is_named_when_it_is_late(age_s: int, said: bool) -> None:
    """Under push P begins while D waits: for young ones that is as it should be."""
    row = frames.in_flight(1, "registration.notify", age_s * S, p_engine=None)
    shown = text(view(in_flight=[row]))
    assert ("1 registered by D, no progress on P (oldest 12.0 s)" in shown) is said
    assert ("registered by D" in shown) is said
    assert "In no vLLM gauge" not in shown, "D counts it as waiting"


def test_an_engine_that_should_generate_and_is_silent_is_named() -> None:
    """sglang#32267."""
    rows = [frames.in_flight(number, "decode.generate", 300 * S, ttft_ns=S) for number in (1, 2)]
    engines = [frames.engine(P), frames.engine(D, last_event_at_ns=NOW - 45 * S)]
    hangs = view(in_flight=rows, engines=engines)
    assert "2 generate on decode-0, silent for 45.0 s: does its engine hang?" in text(hangs)
    assert ("2 generate on decode-0, silent for 45.0 s", "warn") in wrong_requests(hangs.frame, rows, NOW)
    assert "silent" not in text(view(in_flight=rows)), "it records"
    assert "silent" not in text(view(in_flight=rows[:0], engines=engines)), "it has nothing to do"


def test_what_is_wrong_is_the_same_for_all_pages() -> None:
    rows = [frames.in_flight(number, "readiness.signal", 300 * S) for number in range(20)]
    answers = frames.answers(read_after_expiry=3, not_finished=9, recomputed=2, clock_error_ms=0.02)
    hangs = view(in_flight=rows, answers=answers)
    assert wrong_requests(hangs.frame, hangs.in_flight, hangs.now_ns) == [
        ("20 STUCK, up to 5 min in readiness.signal", "bad"),
        ("9 not finished", "bad"),
        ("2 recomputed", "bad"),
        ("3 read after expiry", "bad"),
        ("clocks agree to ± 0.02 ms", "dim"),
    ]
    assert verdict(hangs)[0].startswith("20 STUCK for more than 30 s")
    well = view(in_flight=[], answers=frames.answers(not_finished=0, clock_error_ms=0))
    assert wrong_requests(well.frame, [], NOW) == []
    assert wrong_requests(None, [], NOW) == []


def test_what_a_gauge_counts_is_not() -> None:
    assert hidden(frames.in_flight(1, "transfer.wire")) == ""
    assert "In no vLLM gauge" not in text(view())


def test_one_that_is_over_but_holds_blocks_is_aged_from_its_end() -> None:
    row = frames.in_flight(
        1, step=None, step_since_ns=None, outcome="finished", arrived_at_ns=NOW - 60 * S, ttft_ns=S,
        generate_ns=19 * S, waits_for=f"P {P} to free its blocks; lease ends in 12 s",
    )  # fmt: skip
    assert step_name(row) == HELD
    assert age_ns(row, NOW) == 40 * S
    text = verdict(view(in_flight=[row]))[0]
    assert text.startswith("1 STUCK")
    assert "0 wait for a first token, 0 generate, 1 are over with blocks held" in text


def test_causes_are_told_without_ages_and_sizes() -> None:
    for waits_for, expected in (
        ("D to fetch; lease ends in 12 s", "D to fetch"),
        ("D to fetch; lease over", "D to fetch; lease over"),
        ("handshake with P p, 12 s, behind that with q", "handshake with P p, behind that with q"),
        (
            "READ of 33.6 MB from P p running on 1 of 2 ranks, 2.5 min",
            "READ from P p running on 1 of 2 ranks",
        ),
        ("READ of 512 tokens from P p running, 3 s", "READ from P p running"),
        ("notification 1 of 2 from P p", "notification 1 of 2 from P p"),
    ):
        assert cause(frames.in_flight(1, waits_for=waits_for)) == expected


def test_groups_count_and_the_oldest_comes_first() -> None:
    rows = [
        frames.in_flight(1, "transfer.wire", 2 * S),
        frames.in_flight(2, "transfer.wire", 31 * S),
        frames.in_flight(3, "prefill.queue", 4 * S),
        frames.in_flight(4, "prefill.compute", 1 * S),
        frames.in_flight(5, "readiness.signal", 3 * S),
    ]
    found = grouped(rows, step_name, NOW)
    assert [(g.name, g.requests, g.oldest_ns // S) for g in found] == [
        ("transfer.wire", 2, 31),
        ("prefill.queue", 1, 4),
        ("2 others", 2, 3),
    ]
    assert found[0].style == "bad"


def test_the_summary_names_steps_and_causes() -> None:
    said = text(view())
    assert said.startswith(
        "1 STUCK for more than 30 s in one step, the oldest 40.0 s in registration.handshake"
    )
    assert "3 wait for a first token, 0 generate" in " ".join(said.split())
    line = next(line for line in said.splitlines() if "transfer.dispatch" in line)
    assert line.split() == [
        "transfer.dispatch",
        "1",
        "3.0",
        "s",
        P,
        "to",
        "post",
        "the",
        "WRITE",
        "1",
        "3.0",
        "s",
    ]


def test_nothing_stuck_says_so_and_as_of_when() -> None:
    assert text(view(in_flight=[])) == "Nothing is in flight, so nothing is stuck (as of 08:00:00 UTC)."
    said = text(view(in_flight=[frames.in_flight(1, age_ns=S // 2)]))
    assert said.startswith(
        "Nothing waits too long for a first token: 1 wait for a first token, 0 generate, the oldest 500 ms in"
    )
    assert "as of 08:00:00 UTC" in said


def test_of_the_past_it_says_where_to_look() -> None:
    assert "what never finished is in Requests" in text(view(in_flight=[], live=False))


def test_before_the_first_frame() -> None:
    assert "waiting for the first figures" in text(View())


@pytest.mark.parametrize("cells", [80, 100, 160, 240])
def test_it_fits_and_is_plain_text(cells: int) -> None:
    evil = frames.in_flight(1, client_id="evil\x1b[2J\n" * 9, waits_for="handshake with P e\x1b[31mvil " * 9,
                            d_engine="日本語" * 9)  # fmt: skip
    one = view(in_flight=[evil, *frames.frame().in_flight])
    lines = summary(one, cells)
    context = Context()
    context.update(one)
    for column, _, size in lay_out(columns(context), cells - 1):
        made = column.cell(evil, size)
        if not isinstance(made, str):
            lines.append(made)
    for line in lines:
        assert width(line) <= cells
        assert plain(line).isprintable()


def cell(row: RequestRow, name: str) -> Line | str:
    context = Context()
    context.update(view(in_flight=[row]))
    return next(column for column in columns(context) if column.name == name).cell(row, 40)


def test_cells() -> None:
    row = frames.in_flight(1, "registration.handshake", 40 * S, waits_for=f"handshake with P {P}, 40 s")
    assert cell(row, "age") == [("40.0 s", "bad")]
    assert cell(row, "step") == [("registration.handshake", "coordination")]
    assert cell(row, "waits_for") == f"handshake with P {P}, 40 s"
    assert cell(row, "gauge") == [("D waiting", "")]
    assert cell(frames.in_flight(1, "registration.route", d_engine=None), "gauge") == [("none", "warn")]
    assert cell(row, "pair") == f"{P} → {D}"


class Alone(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.opened: list[str] = []

    def compose(self) -> ComposeResult:
        yield StuckPage()

    def on_open_request(self, message: OpenRequest) -> None:
        self.opened.append(message.request_id)


@pytest.mark.anyio
async def test_the_oldest_is_first_and_enter_opens_it() -> None:
    app = Alone()
    async with app.run_test(size=(80, 24)) as pilot:
        generates = frames.in_flight(4, "decode.generate", 100 * S, ttft_ns=S)
        app.query_one(StuckPage).show(view(in_flight=[generates, *frames.frame().in_flight]))
        table = app.query_one(LiveTable)
        table.focus()
        await pilot.pause()
        assert [row.id for row in table.rows] == ["1003", "1001", "1002", "4"]
        await pilot.press("enter")
        await pilot.pause()
        assert app.opened == ["1003"]


def test_the_thresholds_are_those_of_the_help() -> None:
    assert f"{LONG_NS // S} s" in StuckPage.about
    assert f"{STUCK_NS // S} s" in StuckPage.about
