"""The page Request: the waterfall on screen against the rows it is drawn from."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import duckdb
import pytest
from textual.app import App, ComposeResult

from kvscope import lookup, steps
from kvscope.advice import verdict
from kvscope.explain import explain
from kvscope.text import ms
from kvscope.tui.lines import PATTERN, Line, plain, width
from kvscope.tui.page import LinesView
from kvscope.tui.pages.request import RequestPage, detail_lines, request_lines
from kvscope.tui.view import Detail, View
from kvscope.waterfall import SHORT, intervals

from ..cli import rows
from . import frames

AS_OF_NS = rows.LIVE["arrived_at_ns"] + 1_500_000_000
WIDTHS = (80, 100, 104, 160, 240)
EVIL = "\x1b]0;title\x07"
EVERY = [*rows.STORED, rows.LIVE]


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    connection = duckdb.connect()
    rows.fill(connection)
    yield connection
    connection.close()


def found(database: duckdb.DuckDBPyConnection, row: Mapping[str, Any]) -> dict[str, Any]:
    return {**lookup.look_up(database.cursor(), [rows.LIVE], str(row["id"])), "as_of_ns": AS_OF_NS}


def text(lines: list[Line]) -> str:
    return "\n".join(map(plain, lines))


def words(lines: list[Line]) -> str:
    return " ".join(text(lines).split())


def step_lines(lines: list[Line]) -> list[Line]:
    """Those of the waterfall that tell of a step."""
    names = "|".join(map(re.escape, steps.BY_NAME))
    return [line for line in lines if re.match(rf"[*> ] .{{3}} ({names}) ", plain(line) + " ")]


def drawn(line: Line) -> tuple[int, int, str]:
    """Where a step's bar begins and ends, and its characters."""
    bar, _ = line[-1]
    at = width(line) - width([(bar, "")])
    body = bar.lstrip(" ")
    return at + len(bar) - len(body), at + len(bar), body


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row["client_id"][:8].encode().hex())
@pytest.mark.parametrize("cells", WIDTHS)
def test_it_fits_its_width_and_is_plain_text(
    database: duckdb.DuckDBPyConnection, row: dict[str, Any], cells: int
) -> None:
    lines = request_lines(found(database, row), cells)
    for line in lines:
        assert width(line) <= cells, plain(line)
        assert plain(line).isprintable(), "ids from clients can't drive a terminal"


@pytest.mark.parametrize("row", EVERY, ids=lambda row: row["client_id"][:8].encode().hex())
@pytest.mark.parametrize("cells", WIDTHS)
def test_every_step_is_there_with_its_time_and_within_the_axis(
    database: duckdb.DuckDBPyConnection, row: dict[str, Any], cells: int
) -> None:
    told = found(database, row)
    lines = step_lines(request_lines(told, cells))
    expected = intervals(told["request"], AS_OF_NS)
    assert len(lines) == len(expected)
    axis = told["request"]["ttft_ns"] or max(i.end_ns for i in expected)
    starts = []
    for line, interval in zip(lines, expected, strict=True):
        said = plain(line)
        assert interval.step.name in said
        assert f" {ms(interval.ns)} " in said
        assert f" {ms(interval.from_ns)} " in said
        first, end, bar = drawn(line)
        assert end <= cells
        if interval.step.in_ttft:
            starts.append(first)
            full = PATTERN[interval.step.class_] if interval.critical else "╌"
            assert set(bar) == {full if interval.ns else "│"}
            assert line[-1][1] == interval.step.class_
            left = cells - drawn_axis(lines, cells)
            assert abs(first - left - interval.from_ns * (cells - left) / axis) <= 1.5
    assert starts == sorted(starts), "in order of time, so that the bars go down and to the right"


def drawn_axis(lines: list[Line], cells: int) -> int:
    """Columns of the bars: from where the first begins to the edge."""
    return cells - min(drawn(line)[0] for line in lines if set(drawn(line)[2]) != {"▶"})


def test_columns_line_up(database: duckdb.DuckDBPyConnection) -> None:
    for row in EVERY:
        lines = request_lines(found(database, row), 120)
        head = next(plain(line) for line in lines if plain(line).strip().startswith("leg step"))
        at = {name: head.index(name) for name in ("leg", "step", "class", "seen")}
        ends = {name: head.index(name) + len(name) for name in (" ms", "from", "to", "share")}
        for line in map(plain, step_lines(lines)):
            for name in ("step", "class", "seen"):
                assert line[at[name] - 1] == " "
                assert line[at[name]] != " "
            for name in ends:
                assert line[ends[name] : ends[name] + 1] == " "


def test_legs_of_a_push() -> None:
    legs = {
        line[6:].split()[0]: line[2:5].strip()
        for line in map(plain, step_lines(request_lines({"request": rows.PUSH}, 80)))
    }
    assert legs == {
        "prefill.frontend": "P",
        "prefill.queue": "P",
        "prefill.compute": "P",
        "registration.route": "D",
        "registration.admit": "D",
        "registration.notify": "D→P",
        "transfer.dispatch": "P",
        "transfer.post": "P",
        "transfer.wire": "P",
        "readiness.detect": "P",
        "readiness.signal": "P→D",
        "readiness.report": "D",
        "readiness.promote": "D",
        "unknown": "",
        "decode.first_step": "D",
        "decode.generate": "D",
    }


def test_legs_of_a_pull_and_of_a_request_without_p() -> None:
    pull = text(step_lines(request_lines({"request": rows.PULL}, 80)))
    assert re.search(r"P→D registration.route", pull)
    assert re.search(r"\* D   transfer.wire", pull)
    local = step_lines(request_lines({"request": rows.LOCAL}, 80))
    assert {plain(line)[2:5].strip() for line in local} == {"D"}


def test_the_handshake_of_a_writer_is_on_p() -> None:
    row = rows.request(
        60, ("prefill.compute", 0, 10), ("transfer.dispatch", 10, 11), ("registration.handshake", 11, 50),
        ("transfer.dispatch", 50, 51), connector="push",
    )  # fmt: skip
    assert "* P   registration.handshake" in text(request_lines({"request": row}, 80))
    assert "* D   registration.handshake" in text(request_lines({"request": rows.PUSH_LATE}, 80))


def test_it_says_what_explain_says(database: duckdb.DuckDBPyConnection) -> None:
    """The same definition: figures, notes and facts of `kvscope explain` are on the screen."""
    for row in EVERY:
        told = found(database, row)
        screen = words(request_lines(told, 160))
        assert " ".join(verdict(told["request"], AS_OF_NS).split()) in screen
        printed = explain(told, 160)
        for line in printed.splitlines():
            if line.startswith("- ") and "lease on" not in line:
                assert " ".join(line.split())[:100] in screen


def test_the_verdict_comes_first(database: duckdb.DuckDBPyConnection) -> None:
    lines = request_lines(found(database, rows.PUSH), 120)
    assert plain(lines[0]).startswith("request req-0001-7919  push, finished")
    assert plain(lines[2]).startswith(
        "Mostly coordination wait, 73 % of 412 ms; the largest part in readiness.detect"
    )
    assert lines[2][0][1] == "strong"


def test_the_critical_path_adds_up_and_the_overlapped_branch_has_its_lead(
    database: duckdb.DuckDBPyConnection,
) -> None:
    screen = text(request_lines(found(database, rows.PUSH), 80))
    assert "sum of the critical path (*) 412.000 = TTFT" in screen
    assert "╌ overlapped: not in the sum; lead 45.000 ms" in screen
    critical = [line for line in screen.splitlines() if line.startswith("* ") and "path" not in line]
    assert len(critical) == sum(entry["critical"] for entry in rows.PUSH["waterfall"])
    assert "  D   decode.generate" in screen


def test_a_sum_that_is_not_ttft_is_an_alarm() -> None:
    wrong = {**rows.PUSH, "ttft_ns": rows.PUSH["ttft_ns"] + 1_000_000}
    line = next(
        line for line in request_lines({"request": wrong}, 160) if "a fault of kvscope" in plain(line)
    )
    assert line[-1][1] == "bad"


def test_a_step_within_the_clocks_error_is_marked() -> None:
    row = rows.request(
        61, ("prefill.compute", 0, 40), ("registration.route", 40, 40.5, 0.75),
        ("decode.first_step", 40.5, 50), connector="pull", clock_error_ns=750_000,
    )  # fmt: skip
    screen = text(request_lines({"request": row}, 80))
    assert "0.750!" in screen
    assert "! shorter than the clocks' error" in screen
    assert "clocks agree to ± 0.750 ms" in " ".join(screen.split())


def test_in_flight_the_open_step_grows(database: duckdb.DuckDBPyConnection) -> None:
    told = found(database, rows.LIVE)
    before = next(line for line in step_lines(request_lines(told, 100)) if plain(line).startswith(">"))
    assert "transfer.dispatch" in plain(before)
    assert "1430.0" in plain(before)
    later = {**told, "as_of_ns": AS_OF_NS + 10**9}
    after = next(line for line in step_lines(request_lines(later, 100)) if plain(line).startswith(">"))
    assert "2430.0" in plain(after)
    assert "No first token after 2.5 s; in transfer.dispatch for 2.4 s" in words(request_lines(later, 100))


def test_in_flight_and_generating() -> None:
    row = {
        **rows.PUSH, "in_flight": True, "outcome": "in flight", "current_step": "decode.generate",
        "decode_generate_ns": None,
    }  # fmt: skip
    lines = step_lines(request_lines({"request": row, "as_of_ns": row["arrived_at_ns"] + 5 * 10**8}, 100))
    assert plain(lines[-1]).startswith("> D   decode.generate")
    assert "88.000" in plain(lines[-1])


def test_a_lost_request_says_where_it_was_last_seen(database: duckdb.DuckDBPyConnection) -> None:
    lines = request_lines(found(database, rows.LOST), 100)
    assert "No first token (lost); last seen in transfer.wire" in words(lines)
    note = next(line for line in lines if plain(line).startswith("- lost"))
    assert note[0][1] == "bad"
    assert not any(plain(line).startswith(">") for line in step_lines(lines))


def test_unknown_time_is_shown_as_such(database: duckdb.DuckDBPyConnection) -> None:
    lines = step_lines(request_lines(found(database, rows.RECOMPUTED), 100))
    unknown = next(line for line in lines if "unknown" in plain(line))
    assert set(drawn(unknown)[2]) == {"?"}
    assert " none " in plain(unknown)


def test_out_of_order_boundaries_are_said() -> None:
    screen = words(request_lines({"request": {**rows.PULL, "clamped_ns": 2_000_000}}, 100))
    assert "boundaries were out of order by 2.000 ms in all and were moved" in screen


def test_transfers_and_leases_per_rank(database: duckdb.DuckDBPyConnection) -> None:
    screen = text(request_lines(found(database, rows.PULL), 120))
    assert re.search(r"READ +0 +33.6 MB +512 +0.875 +9.000–19.000 +19.500 +1.69 +done", screen)
    assert re.search(r"P +0 +41.000 +40 ms +2 +released +30.0 s", screen)
    assert "lease on P" not in screen, "said by the table already"
    late = text(request_lines(found(database, rows.EXPIRED), 120))
    assert re.search(r"P +0 +60.000 +1.5 ms +0 +expired +-500 us past its deadline", late)


def test_many_transfers_are_cut_and_counted() -> None:
    transfers = [{**rows.TRANSFERS[0], "rank": rank} for rank in range(100)]
    screen = text(request_lines({"request": rows.PUSH, "transfers": transfers}, 120))
    assert "and 36 transfers more" in screen


def test_tokens_by_source_and_the_session() -> None:
    row = {**rows.PULLED_BACK, "p_cached_tokens": 16, "recomputed_tokens": 3}
    screen = words(request_lines({"request": row}, 120))
    tokens = "512 prompt, 16 cached on P, 448 read back from D, 512 transferred to D, 3 recomputed on D, "
    assert tokens + "64 generated" in screen
    assert f"turn 2 of the conversation that request {2**63 + 3} began" in screen


@pytest.mark.parametrize("class_", steps.CLASSES)
def test_classes_are_told_apart_without_colour(class_: str) -> None:
    step = next(step for step in steps.STEPS if step.class_ == class_ and step.in_ttft)
    row = rows.request(62, (step.name, 0, 10), ("decode.first_step", 10, 11))
    line = plain(step_lines(request_lines({"request": row}, 80))[0])
    assert SHORT.get(class_, class_) in line
    assert PATTERN[class_] * 3 in line


# --- the page ----------------------------------------------------------------------------------------


def showing(detail: Detail | None, chosen: str | None = "1") -> View:
    view = View(clock=lambda: 0.0)
    view.chosen, view.detail = chosen, detail
    return view


def test_without_a_request_it_says_how_to_choose_one() -> None:
    assert "Choose one on Requests (2)" in words(detail_lines(showing(None, None), 80))


def test_what_it_waits_for_is_said() -> None:
    view = showing(Detail("1001", {"request": rows.LIVE}), "1001")
    view.apply(frames.frame())
    assert plain(detail_lines(view, 80)[1]) == f"waits for {frames.P} to post the WRITE"


def test_while_it_is_asked_for_nothing_of_another_request_is_shown() -> None:
    screen = words(detail_lines(showing(Detail("2", {"request": rows.PUSH})), 80))
    assert screen == "asking for request 1 …"


def test_an_error_is_said_and_the_last_answer_stays() -> None:
    assert "no request '1'" in words(detail_lines(showing(Detail("1", None, "no request '1'; …")), 80))
    screen = words(detail_lines(showing(Detail("1", {"request": rows.PUSH}, "no daemon")), 80))
    assert screen.startswith("no daemon request req-0001-7919")


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"request": None},
        {"request": {**rows.PUSH, "waterfall": [{"step": "warp.drive"}]}},
        {"request": {**rows.PUSH, "waterfall": [{**rows.PUSH["waterfall"][0], "ns": "x"}]}},
        {"request": rows.PUSH, "transfers": [{}]},
        {"request": rows.PUSH, "leases": [{}]},
        {"request": rows.PUSH, "engines": [{}]},
    ],
)
def test_an_answer_that_is_none_of_ours_is_no_traceback(answer: dict[str, Any]) -> None:
    assert "can't be drawn" in words(detail_lines(showing(Detail("1", answer)), 80))


class Alone(App[None]):
    def compose(self) -> ComposeResult:
        yield RequestPage()


@pytest.mark.anyio
async def test_another_request_is_shown_from_its_top() -> None:
    app = Alone()
    async with app.run_test(size=(80, 12)) as pilot:
        page = app.query_one(RequestPage)
        view = showing(Detail("1", {"request": {**rows.PULLED_BACK, "session": "123"}}))
        page.show(view)
        await pilot.pause()
        assert (page.chosen_request(), page.chosen_session()) == ("1", "123")
        lines = page.query_one(LinesView)
        lines.scroll_to(y=10, animate=False)
        await pilot.pause()
        page.show(view)
        await pilot.pause()
        assert int(lines.scroll_offset.y) == 10, "a refresh leaves the place"
        view.chosen, view.detail = "2", Detail("2", {"request": rows.PUSH})
        page.show(view)
        await pilot.pause()
        assert int(lines.scroll_offset.y) == 0
        assert page.chosen_session() is None


@pytest.mark.anyio
@pytest.mark.parametrize(
    "changes",
    [
        {"request": {**rows.PUSH, "id": EVIL}},
        {"request": {**rows.PULLED_BACK, "session": EVIL}},
        {"request": {**rows.PUSH, "prompt_tokens": EVIL}},
        {"request": rows.PUSH, "failures": [{"engine": "d", "name": "x", "source": EVIL, "rank": 0}]},
    ],
)
async def test_nothing_that_a_daemon_tells_drives_the_terminal(changes: dict[str, Any]) -> None:
    app = Alone()
    async with app.run_test(size=(100, 60)) as pilot:
        app.query_one(RequestPage).show(showing(Detail("1", changes)))
        await pilot.pause()
        strips = app.screen._compositor.render_strips()
        assert all(segment.text.isprintable() for strip in strips for segment in strip)
        assert any("title" in segment.text for strip in strips for segment in strip), "it is shown"
