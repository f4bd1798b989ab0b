"""The pairs page: the cases of links, descriptors and handshakes that operators were hurt by, by name."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from textual.app import App, ComposeResult

from kvscope.frame import Answer
from kvscope.tui.lines import plain, width
from kvscope.tui.page import FilterBy, LinesView
from kvscope.tui.pages import pairs
from kvscope.tui.table import LiveTable
from kvscope.tui.view import View

from . import frames

WIDTHS = (80, 100, 160, 240)
P, D = frames.P, frames.D
NOTHING = Answer([], [])


def pair(p: str = P, d: str = D, **changes: Any) -> dict[str, Any]:
    """A row of `pairs`."""
    return {
        "label": "",
        "connector": "push",
        "p_engine": p,
        "d_engine": d,
        "requests": 120,
        "not_finished": 0,
        "p50_ttft_ms": 180.0,
        "p99_ttft_ms": 760.0,
        "p50_coordination_ms": 103.5,
        "p50_transfer_ms": 27.0,
        "transferred_bytes": 10**10,
        "p50_gb_per_s": 40.0,
        "best_gb_per_s": 48.0,
        **changes,
    }


def transfer(
    operation: str, engine: str, peer: str, gb_per_s: float = 40.0, **changes: Any
) -> dict[str, Any]:
    """A row of `transfers`: 690 MB in 512 descriptors; polls saw the end at once."""
    wire_ms = 690.0 / gb_per_s
    return {
        "operation": operation,
        "engine": engine,
        "peer": peer,
        "transfers": 120,
        "failed": 0,
        "still_open": 0,
        "bytes": 10**10,
        "p50_bytes": 690_000_000,
        "p50_descriptors": 512,
        "p50_bytes_per_descriptor": 1_347_656,
        "p50_post_ms": 0.5,
        "us_per_descriptor": 0.976,
        "p50_wire_lower_ms": wire_ms,
        "p50_wire_upper_ms": wire_ms,
        "p50_gb_per_s": gb_per_s,
        "best_gb_per_s": gb_per_s,
        "p50_telemetry_ms": wire_ms,
        **changes,
    }


def handshake(engine: str = D, peer: str = P, **changes: Any) -> dict[str, Any]:
    """A row of `handshakes`."""
    return {
        "engine": engine,
        "peer": peer,
        "handshakes": 1,
        "failed": 0,
        "p50_ms": 5.0,
        "max_ms": 5.0,
        "clock_offset_ms": None,
        "last_at": "2027-01-15 07:59:00",
        **changes,
    }


def failure(**changes: Any) -> dict[str, Any]:
    """A row of `failures`."""
    return {
        "kind": "nixl",
        "name": "transfer_failed",
        "engine": D,
        "source": "worker",
        "failures": 3,
        "requests": 2,
        "last_detail": P,
        "first_at": "2027-01-15 07:58:00",
        "last_at": "2027-01-15 07:59:30",
        **changes,
    }


def gathered(*transfers: dict[str, Any], **others: dict[str, Any]) -> list[pairs.Pair]:
    return pairs.gather(
        frames.answer(others.get("pair", pair())),
        frames.answer(*transfers),
        frames.answer(others["handshake"]) if "handshake" in others else NOTHING,
    )


def text(found: list[pairs.Pair], cells: int = 160, failures: Answer = NOTHING) -> str:
    return "\n".join(plain(line) for line in pairs.top(found, failures, frames.ENGINES, cells).lines)


def table_row(found: list[pairs.Pair], at: int = 0) -> dict[str, str]:
    """The cells of a row of the table, by column."""
    rows = [pairs.Transfers(one, operation) for one in found for operation in one.operations or [None]]
    cells = {}
    for column in pairs.columns(lambda engine, cells: engine):
        made = column.cell(rows[at], 40)
        cells[column.name] = made if isinstance(made, str) else plain(made)
    return cells


def test_a_cell_and_a_row_have_the_answers_figures() -> None:
    found = gathered(transfer("WRITE", P, D), handshake=handshake())
    shown = text(found, 80)
    assert "120 req 103.5 ms" in shown
    assert "W 40.0 GB/s" in shown
    assert "handshake 5 ms" in shown
    assert table_row(found) == {
        "pair": f"{P} → {D}",
        "requests": "120",
        "ttft": "180.0",
        "coordination": "103.5",
        "handshake": "5.0 ms",
        "operation": "WRITE",
        "rate": "40.0",
        "best": "48.0",
        "share": "83 %",
        "post": "3 %",
        "us": "0.98",
        "descriptors": "512",
        "descriptor": "1.35 MB",
        "size": "690 MB",
        "transfers": "120",
        "open": "0",
        "failed": "0",
        "not_finished": "0",
    }


def test_what_was_not_observed_is_no_zero() -> None:
    unknown = dict.fromkeys(("p50_ttft_ms", "p50_coordination_ms", "best_gb_per_s"))
    row = transfer("WRITE", P, D)
    row |= dict.fromkeys(name for name in row if name.startswith(("p50", "best", "us_")))
    found = gathered(row, pair=pair(**unknown))
    cells = table_row(found)
    assert [cells[n] for n in ("ttft", "coordination", "rate", "best", "post", "us", "size")] == ["–"] * 7
    assert cells["handshake"] == "earlier", "no handshake in the window is none that took no time"
    assert "–" in text(found)


def test_operations_belong_to_the_pair_they_serve() -> None:
    found = gathered(
        transfer("WRITE", P, D), transfer("READ", P, D, 30.0), transfer("READ", "decode-9", P, 20.0)
    )
    assert [(one.p, one.d, [o.name for o in one.operations]) for one in found] == [
        (P, D, ["WRITE", "READ back"]),
        (P, "decode-9", ["READ"]),
    ]


def test_a_pair_with_several_connectors_shows_the_busiest_ones_medians() -> None:
    found = pairs.gather(
        frames.answer(
            pair(connector="pull", requests=5, p50_ttft_ms=999.0), pair(requests=100), pair("prefill-1")
        ),
        NOTHING,
        NOTHING,
    )
    assert (found[0].p, found[0].requests, found[0].p50_ttft_ms) == ("prefill-1", 120, 180.0)
    assert (found[1].requests, found[1].p50_ttft_ms) == (105, 180.0)
    assert "Several connectors" in text(found)


def test_slow_reads_beside_fast_writes_are_named() -> None:
    """vllm#52607: WRITE 49 GB/s, READ 0.5 between the same engines."""
    shown = text(gathered(transfer("WRITE", P, D, 49.0), transfer("READ", D, P, 0.5)))
    assert f"Slow READ beside fast WRITE: {P} → {D}, 0.50 against 49.0 GB/s" in shown
    assert "Low rate: READ" in shown
    assert "R 0.50▼" in shown
    assert "W 49.0" in shown
    assert "W 49.0▼" not in shown


def test_slow_reads_of_one_deployment_beside_the_writes_of_another_are_named() -> None:
    found = pairs.gather(
        frames.answer(pair(), pair("prefill-1", "decode-1", connector="pull")),
        frames.answer(transfer("WRITE", P, D, 49.0), transfer("READ", "decode-1", "prefill-1", 0.5)),
        NOTHING,
    )
    assert "Slow READ beside fast WRITE: 0.50 against 49.0 GB/s" in text(found)


def test_a_fallback_to_tcp_is_named_with_the_transport_in_use() -> None:
    engine = frames.engine(
        D, fingerprint={"nixl_backends": ["UCX"], "environment": {"UCX_TLS": "tcp,cuda_copy\x1b"}}
    )
    found = gathered(transfer("READ", D, P, 0.5), pair=pair(connector="pull", best_gb_per_s=0.5))
    shown = " ".join(plain(line).strip() for line in pairs.top(found, NOTHING, [engine], 160).lines)
    assert f"Low rate: READ {P} → {D} at most 0.50 GB/s" in shown
    assert "(backends UCX, UCX_TLS=tcp,cuda_copy�)" in shown


def test_a_link_slower_than_its_peers_is_named_though_it_was_never_faster() -> None:
    found = pairs.gather(
        frames.answer(*(pair(d=f"decode-{d}", best_gb_per_s=10.0 if d else 1.25) for d in range(3))),
        frames.answer(*(transfer("WRITE", P, f"decode-{d}", 6.0 + d if d else 1.2) for d in range(3))),
        NOTHING,
    )
    shown = text(found)
    assert f"Slow link: WRITE {P} → decode-0 1.20 GB/s, on other pairs 7.50" in shown
    assert "W 1.20▼" in shown
    assert shown.count("▼") == 2, "there, and where marks are explained"


def test_the_baseline_is_that_of_attribution() -> None:
    """A small transfer that was done while it was posted looks faster than the link is."""
    row = transfer("WRITE", P, D, 7.0, best_gb_per_s=39.2)
    found = gathered(row, pair=pair(best_gb_per_s=10.0))
    assert table_row(found)["best"] == "10.0"
    assert "Below its baseline" not in text(found)


def test_small_transfers_say_nothing_of_a_link() -> None:
    shown = text(gathered(transfer("READ", D, P, 0.5, p50_bytes=20_000), pair=pair(best_gb_per_s=0.5)))
    assert "Low rate" not in shown


def test_a_rate_that_a_late_poll_explains_is_no_finding() -> None:
    late = transfer("WRITE", P, D, 10.0, p50_wire_lower_ms=14.0, best_gb_per_s=48.0)
    shown = text(gathered(late))
    assert "W 10.0▽" in shown
    assert "Below its baseline" not in shown
    assert "Below its baseline: WRITE" in text(gathered(late | {"p50_wire_lower_ms": 60.0}))


def test_many_small_descriptors_are_named() -> None:
    """vllm#55434: 91k descriptors of 8 kB, posting them is most of the transfer."""
    row = transfer(
        "READ",
        D,
        P,
        p50_descriptors=91_000,
        p50_bytes_per_descriptor=8192,
        p50_post_ms=22.8,
        us_per_descriptor=0.251,
    )
    found = gathered(row)
    assert (
        f"Many small descriptors: READ {P} → {D}, 91000 of 8.19 kB, posting them is 57 % of the transfer"
    ) in text(found)
    assert table_row(found)["post"] == "57 %"


def test_failed_handshakes_are_named() -> None:
    found = gathered(handshake=handshake(handshakes=3, failed=2))
    shown = text(found)
    assert f"Handshake failed: {P} → {D}, 2 of 3" in shown
    assert "handshake failed" in shown
    assert table_row(found)["handshake"] == "2 of 3 failed"


def test_a_cold_pair_is_named() -> None:
    found = gathered(handshake=handshake(max_ms=2100.0))
    assert f"Cold pair: {P} → {D}, its first requests waited 2100 ms for a handshake" in text(found)


def test_a_pair_that_never_got_to_a_request_is_there() -> None:
    found = pairs.gather(NOTHING, NOTHING, frames.answer(handshake("decode-7", P, failed=1)))
    assert [(one.p, one.d) for one in found] == [(P, "decode-7")]
    assert "Handshake failed" in text(found)


def test_failures_are_named() -> None:
    failures = frames.answer(
        failure(), failure(kind="hook", name="on_new_request"), failure(name="handshake_setup_failed")
    )
    shown = text(gathered(pair=pair(not_finished=4)), failures=failures)
    assert f"Failed: transfer_failed: 3 on {D} ({P}), last at 07:59:30" in shown
    assert "Failed: handshake_setup_failed: 3" in shown
    assert "on_new_request" not in shown, "kvscope's own are on the engines page"
    assert "4 not finished" in shown


def test_a_failure_is_counted_once_however_many_rows_and_engines_tell_of_it() -> None:
    found = gathered(
        transfer("READ", D, P, failed=2), transfer("READ", P, D, failed=1), pair=pair(not_finished=4)
    )
    rows = [table_row(found, at) for at in range(2)]
    assert [row["operation"] for row in rows] == ["READ", "READ back"]
    assert [row["failed"] for row in rows] == ["2", "1"]
    assert [row["not_finished"] for row in rows] == ["4", pairs.grid.NONE]
    failures = frames.answer(
        failure(engine=P, failures=2, last_detail=D, last_at="2027-01-15 07:59:40"), failure()
    )
    shown = text(found, failures=failures)
    assert f"Failed: transfer_failed: 5 on {D} (3, {P}), {P} (2, {D}), last at 07:59:40" in shown
    assert shown.count("transfer_failed") == 1


def test_a_request_with_two_failed_ranks_is_one_request() -> None:
    found = gathered(transfer("WRITE", P, D, failed=2), pair=pair(not_finished=1))
    cells = table_row(found)
    assert (cells["not_finished"], cells["failed"]) == ("1", "2")
    assert "1 not finished" in text(found)
    assert "2 transfers failed" in text(gathered(transfer("WRITE", P, D, failed=2)))


def test_transfers_that_were_never_seen_done_are_named() -> None:
    """nixl#1401."""
    found = gathered(transfer("READ", D, P, still_open=3))
    assert f"Never seen done: READ {P} → {D}, 3 of 120 transfers" in text(found)
    assert table_row(found)["open"] == "3"


def test_healthy_pairs_have_no_notes() -> None:
    assert text(gathered(transfer("WRITE", P, D))).startswith("P \\ D")


def many(count: int) -> list[pairs.Pair]:
    names = range(count)
    return pairs.gather(
        frames.answer(
            *(pair(f"prefill-{p}", f"decode-{d}", requests=100 * p + d) for p in names for d in names)
        ),
        NOTHING,
        NOTHING,
    )


@pytest.mark.parametrize("cells", WIDTHS)
@pytest.mark.parametrize("name", [P, "evil\x1b[31m\nid名前" + "x" * 300])
def test_no_line_is_wider_than_the_screen(cells: int, name: str) -> None:
    found = pairs.gather(
        frames.answer(*(pair(name, f"{name}{d}", not_finished=12345) for d in range(12))),
        frames.answer(transfer("READ", f"{name}1", name, 0.5)),
        frames.answer(handshake(f"{name}1", name, failed=1)),
    )
    lines = pairs.top(found, frames.answer(failure(last_detail=name)), [], cells).lines
    assert max(map(width, lines)) <= cells
    assert all(plain(line).isprintable() for line in lines)


def test_the_chosen_pair_is_always_in_the_matrix() -> None:
    found = many(12)
    rows = [plain(line).split()[0] for line in pairs.matrix(found, 80, full=False).lines[1:13]]
    assert rows == [f"prefill-{number}" for number in range(12)], "2 before 10"
    for d in (f"decode-{number}" for number in range(12)):
        drawn = pairs.matrix(found, 80, ("prefill-7", d))
        row = plain(drawn.lines[drawn.row])
        assert d in plain(drawn.lines[0]).split()
        assert row.startswith("prefill-7")
        chosen = [span for span, style in drawn.lines[drawn.row] if "cursor" in style]
        assert str(700 + int(d.removeprefix("decode-"))) in chosen
    assert "9 more D engines" in plain(pairs.matrix(found, 80).lines[-1])


def test_a_cell_takes_one_line_where_there_is_no_room_for_three() -> None:
    found = many(12)
    found[0].operations.append(pairs.Operation("WRITE", found[0].p, failed=1))
    drawn = pairs.top(found, NOTHING, [], 240, height=20)
    assert len(drawn.lines) <= 20
    shown = "\n".join(map(plain, drawn.lines))
    assert "1111 103.5 !" in shown, "a failure is marked all the same"
    assert "1110 103.5" in shown


class OnePage(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.page = pairs.PairsPage()
        self.view = View(clock=lambda: 0.0)
        self.view.apply(frames.frame())
        self.asked: list[tuple[tuple[str, ...], str]] = []

    def compose(self) -> ComposeResult:
        yield self.page

    def on_mount(self) -> None:
        self.page.show(self.view)
        self.page.came_into_sight()

    def on_filter_by(self, message: FilterBy) -> None:
        self.asked.append((message.filters, message.page))


def test_the_matrix_follows_the_table_and_enter_shows_the_pairs_requests() -> None:
    async def run() -> None:
        app = OnePage()
        count = 12
        rows = [pair(f"prefill-{p}", f"decode-{d}") for p in range(count) for d in range(count)]
        async with app.run_test(size=(80, 24)) as pilot:
            assert [plain(line) for line in app.query_one(LinesView).lines] == ["asking …"]
            app.view.told("pairs", NOTHING)
            app.page.show(app.view)
            shown = "\n".join(map(plain, app.query_one(LinesView).lines))
            assert "No pair of prefill and decode engine" in shown
            assert "] makes the" in shown
            app.view.told("pairs", frames.answer(*rows))
            app.page.show(app.view)
            await pilot.press("end")
            await pilot.pause()
            lines = app.query_one(LinesView)
            top, height = int(lines.scroll_offset.y), lines.size.height
            seen = [plain(line) for line in lines.lines[top : top + height]]
            assert any(line.startswith("prefill-11") for line in seen)
            assert "decode-11" in plain(lines.lines[0])
            assert app.query_one(LiveTable).size.height > 5
            await pilot.press("enter")
            await pilot.press("<", "<")
            await pilot.pause()
            assert "decode-11" not in plain(lines.lines[0])
            app.view.apply(frames.frame(whole=False, at_ns=frames.NOW + frames.S))
            app.page.show(app.view)
            assert "decode-11" not in plain(lines.lines[0]), "the next frame leaves it where it was"
            await pilot.press("up")
            await pilot.pause()
            assert "decode-10" in plain(lines.lines[0]), "and the cursor brings it back"
        assert app.asked == [(("p_engine=prefill-11", "d_engine=decode-11"), "2")]

    asyncio.run(run())


def test_a_question_that_was_not_answered_says_why() -> None:
    async def run() -> None:
        app = OnePage()
        async with app.run_test(size=(80, 24)):
            app.view.not_told("pairs", "took longer than 10 s")
            app.page.show(app.view)
            assert "took longer than 10 s" in "\n".join(map(plain, app.query_one(LinesView).lines))
            app.view.told("pairs", frames.answer(pair()))
            app.view.not_told("transfers", "it took too long")
            app.page.show(app.view)
            shown = "\n".join(map(plain, app.query_one(LinesView).lines))
            assert "These figures are older: it took too long" in shown
            assert "120 req" in shown

    asyncio.run(run())
