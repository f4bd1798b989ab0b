"""The questions of a frame, and frames of past moments put together from what is stored."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import msgspec
import pyarrow as pa
import pytest

from kvscope import client, frame, lookup, query, schema, storefile
from kvscope.errors import UsageError
from kvscope.frame import Frame, RequestRow, Scope

from . import rows

SECOND_NS = 10**9
MS = 10**6


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    connection = duckdb.connect(config={"memory_limit": "1GB"})
    rows.fill(connection)
    rows.insert(connection, "samples", SAMPLES)
    storefile.lock(connection)
    yield connection
    connection.close()


@pytest.fixture
def empty() -> Iterator[duckdb.DuckDBPyConnection]:
    """A store without rows; tests insert their own."""
    connection = duckdb.connect(config={"memory_limit": "1GB"})
    for table in schema.TABLES:
        connection.execute(schema.create_sql(table))
    yield connection
    connection.close()


def sample(number: int, at_ns: int, **columns: Any) -> rows.Row:
    return {
        "id": number, "at_ns": at_ns, "host": "host-a", "engine": "engine-p", "source": "", "rank": 0,
        "name": "vllm.running", "label": "", "value": 1.0,
    } | columns  # fmt: skip


SAMPLES = [
    sample(1, rows.T0_NS + 2 * SECOND_NS, value=3.0),
    sample(2, rows.T0_NS + 4 * SECOND_NS, value=5.0),
    sample(3, rows.T0_NS + 9 * SECOND_NS, value=7.0),
    sample(4, rows.T0_NS + 3 * SECOND_NS, name="thread.cpu", label="writer", value=0.25),
    sample(5, rows.T0_NS - 60 * SECOND_NS, name="host.cpu", engine="", value=1.5),
]


def arrow(database: duckdb.DuckDBPyConnection, *found: rows.Row) -> Any:
    table_schema = database.sql("FROM requests LIMIT 0").to_arrow_table().schema
    return pa.Table.from_pylist(list(found), schema=table_schema)


def at(database: duckdb.DuckDBPyConnection, ms: float, live: Any = None, **scope: Any) -> Frame:
    """The frame whose end is so long after T0."""
    moment = rows.T0_NS + round(ms * MS)
    now_ns = rows.T0_NS + 3600 * SECOND_NS
    return frame.build(database.cursor(), Scope(at=str(moment), **scope), now_ns=now_ns, live=live)


def ask(database: duckdb.DuckDBPyConnection, name: str, **parameters: Any) -> list[dict[str, Any]]:
    return query.ask(database.cursor(), name, parameters).dicts()


# --- the questions of a frame ----------------------------------------------------------------------


def test_fleet_tells_of_all_of_each_connector_and_of_each_pair(database: duckdb.DuckDBPyConnection) -> None:
    found = ask(database, "fleet", since=rows.T0_NS, until=rows.T0_NS + 10 * SECOND_NS)
    columns = ("label", "level", "connector", "p_engine", "requests")
    assert [tuple(row[column] for column in columns) for row in found] == [
        ("", "all", None, None, 7),
        ("", "connector", "bidirectional", None, 3),
        ("", "connector", "push", None, 2),
        ("", "connector", "local", None, 1),
        ("", "connector", "pull", None, 1),
        ("", "pair", "bidirectional", "engine-p", 3),
        ("", "pair", "push", "engine-p", 2),
        ("", "pair", "pull", "engine-p", 1),
        ("benchmark", "all", None, None, 1),
        ("benchmark", "connector", "pull", None, 1),
        ("benchmark", "pair", "pull", "engine-p", 1),
    ], "a benchmark is never mixed into production"
    everything, push, benchmark = found[0], found[2], found[8]
    assert (everything["not_finished"], everything["recomputed"], everything["read_after_expiry"]) == (
        1,
        1,
        1,
    )
    assert (everything["requests_per_s"], everything["output_tokens_per_s"]) == (0.7, 44.8)
    assert (everything["clock_error_ms"], benchmark["clock_error_ms"]) == (0.0, 0.25)
    # Two requests of 412 and 140 ms: exact percentiles between them, and what both were made of.
    assert (push["p50_ttft_ms"], push["p90_ttft_ms"], push["mean_ttft_ms"]) == (276.0, 384.8, 276.0)
    assert push["coordination_percent"] == round(100 * (301 + 45) / 552, 2)
    assert push["p50_tpot_ms"] == round(988 / 63, 3)
    for row in found:
        classes = ("compute", "capacity", "transfer", "coordination", "unknown")
        assert sum(row[f"{class_}_percent"] for class_ in classes) == pytest.approx(100, abs=0.05)


def test_fleet_of_no_requests_is_one_row_that_claims_nothing(empty: duckdb.DuckDBPyConnection) -> None:
    (only,) = ask(empty, "fleet", since=1, until=SECOND_NS)
    assert (only["level"], only["requests"], only["p50_ttft_ms"], only["compute_percent"]) == (
        "all", 0, None, None,
    )  # fmt: skip
    for name in ("fleet_bands", "fleet_steps", "fleet_trend", "sessions"):
        assert ask(empty, name) == []


def test_bands_show_that_the_slow_wait_for_something_else(empty: duckdb.DuckDBPyConnection) -> None:
    quick = [rows.request(n, ("prefill.compute", 0, 10 + n), connector="push") for n in range(90)]
    slow = [
        rows.request(n, ("prefill.compute", 0, 10), ("readiness.detect", 10, 200 + n), connector="push")
        for n in range(90, 100)
    ]
    rows.insert(empty, "requests", quick + slow)
    found = ask(empty, "fleet_bands")
    assert [(row["band"], row["requests"], row["main_step"]) for row in found] == [
        ("p0-50", 50, "prefill.compute"),
        ("p50-90", 40, "prefill.compute"),
        ("p90-99", 9, "readiness.detect"),
        ("p99-100", 1, "readiness.detect"),
    ]
    (fleet,) = (row for row in ask(empty, "fleet") if row["level"] == "all")
    assert [row["to_ms"] for row in found[:3]] == [fleet[f"p{p}_ttft_ms"] for p in (50, 90, 99)]
    assert [row["from_ms"] for row in found[1:]] == [row["to_ms"] for row in found[:3]]
    assert (found[0]["from_ms"], found[3]["to_ms"], found[3]["mean_ms"]) == (10.0, 299.0, 299.0)
    for row in found:
        classes = ("compute", "capacity", "transfer", "coordination", "unknown")
        assert sum(row[f"{class_}_ms"] for class_ in classes) == pytest.approx(row["mean_ms"], abs=0.01)


def test_steps_of_the_fleet_are_those_of_all_connectors_together(database: duckdb.DuckDBPyConnection) -> None:
    found = ask(database, "fleet_steps", label="")
    shares = [row["share_percent"] for row in found]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.1)
    first = found[0]
    assert (first["step"], first["class"], first["requests"]) == ("prefill.compute", "compute", 7)
    assert first["mean_ms"] == round(317 / 7, 3)
    (detect,) = (row for row in found if row["step"] == "readiness.detect")
    assert (detect["requests"], detect["p50_ms"], detect["mean_ms"]) == (2, 94.0, round(188 / 7, 3))
    assert {row["label"] for row in ask(database, "fleet_steps")} == {"", "benchmark"}


def test_the_trend_has_about_sixty_spans_and_no_empty_ones(empty: duckdb.DuckDBPyConnection) -> None:
    start_ns = rows.T0_NS // (60 * SECOND_NS) * (60 * SECOND_NS)
    rows.insert(
        empty,
        "requests",
        [
            rows.request(
                n,
                ("prefill.compute", 0, 10 * (n + 1)),
                arrived_at_ns=start_ns + n * 600 * SECOND_NS + 400 * MS,
            )
            for n in range(6)
        ],
    )
    hour = {"since": start_ns, "until": start_ns + 3600 * SECOND_NS}
    found = ask(empty, "fleet_trend", **hour)
    assert [row["at_ns"] for row in found] == [start_ns + n * 600 * SECOND_NS for n in range(6)]
    assert [row["p50_ttft_ms"] for row in found] == [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]
    assert all(row["compute_ms"] == row["mean_ms"] and row["requests"] == 1 for row in found)
    # A window that moves by less than a span keeps the spans where they are.
    moved = ask(
        empty, "fleet_trend", since=hour["since"] - 7 * SECOND_NS, until=hour["until"] - 7 * SECOND_NS
    )
    assert [row["at_ns"] for row in moved] == [row["at_ns"] for row in found]
    short = ask(empty, "fleet_trend", since=start_ns - 1, until=start_ns + SECOND_NS)
    assert [row["at_ns"] for row in short] == [start_ns], "no span is shorter than a second"


def test_a_session_tells_its_turns_pauses_and_what_became_of_kept_kv(
    empty: duckdb.DuckDBPyConnection,
) -> None:
    first = rows.request(
        1, ("prefill.compute", 0, 100), ("decode.generate", 100, 900), connector="bidirectional",
        session=2**63 + 1, turn=1,
    )  # fmt: skip
    second = rows.request(
        4, ("prefill.compute", 0, 50), ("decode.generate", 50, 1000), connector="bidirectional",
        session=2**63 + 1, turn=2, reuse_outcome="pulled", reuse_offered_tokens=512, reuse_pulled_tokens=448,
    )  # fmt: skip
    third = rows.request(
        10, ("prefill.compute", 0, 80), connector="bidirectional", prompt_tokens=2048, recomputed_tokens=7,
        session=2**63 + 1, turn=3, reuse_outcome="expired", reuse_offered_tokens=1024, reuse_pulled_tokens=0,
        d_engine="engine-e",
    )  # fmt: skip
    alone = rows.request(2, ("prefill.compute", 0, 5), connector="push")
    rows.insert(empty, "requests", [third, alone, first, second])
    lease = rows.LEASES[0]
    kept = {**lease, "id": 1, "request_id": first["id"], "engine": "engine-d", "armed_at_ns": rows.T0_NS,
            "deadline_at_ns": rows.T0_NS + 3 * SECOND_NS}  # fmt: skip
    of_prefill = {**kept, "id": 2, "engine": "engine-p", "deadline_at_ns": rows.T0_NS + 30 * SECOND_NS}
    rows.insert(empty, "leases", [kept, of_prefill])
    (only,) = ask(empty, "sessions")
    assert only == {
        "session": 2**63 + 1, "label": "", "model": "tiny", "p_engine": "engine-p", "d_engine": "engine-e",
        "turns": 3, "first_at": "2026-11-29 15:54:10", "last_at": "2026-11-29 15:54:19",
        "last_id": third["id"], "prompt_tokens": 2048, "reuse_offered_tokens": 1536,
        "reuse_pulled_tokens": 448, "recomputed_tokens": 7, "outcomes": "expired 1, pulled 1",
        "p50_pause_ms": 3550.0, "max_pause_ms": 5000.0, "ttl_ms": 3000.0, "p50_ttft_ms": 80.0,
    }  # fmt: skip
    assert ask(empty, "sessions", where=["session=1"]) == []
    # Without its second turn, the time from the first to the third is no pause.
    (filtered,) = ask(empty, "sessions", where=["turn!=2"])
    assert (filtered["turns"], filtered["max_pause_ms"]) == (2, None)


# --- frames ----------------------------------------------------------------------------------------


def test_the_figures_of_a_frame_are_the_answers_for_the_same_window(
    database: duckdb.DuckDBPyConnection,
) -> None:
    shown = at(database, 6500, window="5s", where=("ttft_ns>20ms",))
    window = {
        "since": rows.T0_NS + 1500 * MS, "until": rows.T0_NS + 6500 * MS, "label": shown.label,
        "where": ["ttft_ns>20ms"],
    }  # fmt: skip
    assert set(shown.answers) == set(frame.QUESTIONS)
    for name, answer in shown.answers.items():
        same = query.ask(database.cursor(), name, window)
        assert answer.columns == same.columns
        assert answer.dicts() == same.dicts()
        assert answer.rows, name
    assert (shown.at_ns, shown.window_ns, shown.where) == (window["until"], 5 * SECOND_NS, ["ttft_ns>20ms"])
    assert msgspec.json.decode(msgspec.json.encode(shown), type=Frame) == shown


def test_without_a_label_a_frame_is_of_production_or_else_of_the_most_frequent(
    database: duckdb.DuckDBPyConnection,
) -> None:
    all_of_it = at(database, 20_000)
    assert (all_of_it.label, all_of_it.labels) == ("", {"": 8, "benchmark": 1})
    assert all_of_it.answers["fleet"].dicts()[0]["requests"] == 7
    assert at(database, 20_000, label="benchmark").answers["fleet"].dicts()[0]["requests"] == 1
    only = at(database, 3500, window="1s")
    assert (only.label, only.labels) == ("benchmark", {"benchmark": 1}), "no production in this window"
    assert [row.label for row in only.recent] == ["benchmark"]
    asked = at(database, 20_000, where=("label=benchmark",))
    assert (asked.label, len(asked.recent)) == ("benchmark", 1), "a filter on the label says which"
    none = at(database, -5000)
    assert (none.label, none.labels, none.recent, none.in_flight) == ("", {}, [], [])


def in_flight(shown: Frame) -> RequestRow:
    (row,) = shown.in_flight
    assert row.in_flight
    assert row.outcome == "in flight"
    assert shown.recent == []
    return row


@pytest.mark.parametrize(
    ("ms", "step", "since_ms", "compute", "capacity", "coordination"),
    [
        (0, "prefill.frontend", 0, 0, 0, 0),
        (1, "prefill.frontend", 0, 0, 0, 1),
        (2, "prefill.queue", 2, 0, 0, 2),
        (20, "prefill.compute", 14, 6, 12, 2),
        (100, "transfer.dispatch", 75, 61, 12, 27),
        (400, "unknown", 397, 61, 12, 301),
        (411.5, "decode.first_step", 404, 68.5, 12, 301),
    ],
)
def test_a_request_in_flight_then_is_shown_as_it_was_then(
    database: duckdb.DuckDBPyConnection,
    ms: float,
    step: str,
    since_ms: int,
    compute: float,
    capacity: float,
    coordination: float,
) -> None:
    row = in_flight(at(database, 1000 + ms))
    arrived = rows.PUSH["arrived_at_ns"]
    assert (row.id, row.step, row.step_since_ns) == (str(rows.PUSH["id"]), step, arrived + since_ms * MS)
    assert (row.ttft_ns, row.generate_ns, row.output_tokens, row.lead_ns) == (None, None, None, None)
    assert (row.compute_ns, row.capacity_ns, row.coordination_ns) == (
        compute * MS, capacity * MS, coordination * MS,
    )  # fmt: skip
    parts = row.compute_ns + row.capacity_ns + row.transfer_ns + row.coordination_ns + row.unknown_ns
    assert parts == ms * MS, "as far as it had come"


def test_after_its_first_token_it_generates_until_it_is_over(database: duckdb.DuckDBPyConnection) -> None:
    first_token = at(database, 1412)
    row = in_flight(first_token)
    assert (row.step, row.step_since_ns) == ("decode.generate", rows.PUSH["arrived_at_ns"] + 412 * MS)
    assert (row.ttft_ns, row.coordination_ns, row.main_step) == (412 * MS, 301 * MS, "readiness.detect")
    assert (row.generate_ns, row.output_tokens, row.outcome) == (None, None, "in flight")
    assert [one.id for one in at(database, 2399.999999).in_flight] == [
        str(rows.PUSH["id"]), str(rows.PUSH_LATE["id"]),
    ][:1]  # fmt: skip
    over = at(database, 2400)
    assert str(rows.PUSH["id"]) not in {one.id for one in over.in_flight}
    (ended,) = (one for one in over.recent if one.id == str(rows.PUSH["id"]))
    assert (ended.outcome, ended.step, ended.generate_ns) == ("finished", None, 988 * MS)


def test_one_that_arrived_before_the_window_is_still_in_flight(database: duckdb.DuckDBPyConnection) -> None:
    shown = at(database, 1900, window="100ms")
    assert [row.id for row in shown.in_flight] == [str(rows.PUSH["id"])]
    assert shown.answers["fleet"].dicts()[0]["requests"] == 0, "figures are of those that arrived in it"


def test_a_stuck_request_stays_in_sight_as_long_as_a_daemon_waited_for_it(
    empty: duckdb.DuckDBPyConnection,
) -> None:
    stuck = rows.request(
        1, ("prefill.compute", 0, 60), ("registration.route", 60, 70), first_token=False, connector="pull",
        outcome="incomplete", current_step="registration.notify", output_tokens=None,
    )  # fmt: skip
    rows.insert(empty, "requests", [stuck])
    row = in_flight(at(empty, 1000 + 60_000, window="10s"))
    assert (row.step, row.step_since_ns) == ("registration.notify", stuck["arrived_at_ns"] + 70 * MS)
    assert (row.compute_ns, row.coordination_ns, row.ttft_ns) == (60 * MS, 10 * MS, None)
    assert in_flight(at(empty, 1000 + 1795_000)).step == "registration.notify", "D still had it"
    later = at(empty, 1000 + 1805_000, window="1h")
    assert later.in_flight == []
    assert [(one.outcome, one.step) for one in later.recent] == [("incomplete", "registration.notify")]
    assert later.answers["fleet"].dicts()[0]["not_finished"] == 1
    empty.execute("UPDATE requests SET current_step = 'registration.route'")
    assert in_flight(at(empty, 1000 + 85_000)).step == "registration.route"
    assert at(empty, 1000 + 95_000).in_flight == [], "no engine had it"


def test_a_past_frame_knows_nothing_of_what_came_later(empty: duckdb.DuckDBPyConnection) -> None:
    slow = rows.request(
        1, ("prefill.compute", 0, 20_000), ("decode.generate", 20_000, 80_000), connector="push"
    )
    quick = rows.request(2, ("prefill.compute", 0, 10), ("decode.generate", 10, 110), connector="push")
    rows.insert(empty, "requests", [slow, quick])

    def figures(ms: float, **scope: Any) -> list[object]:
        everything = at(empty, ms, window="5m", **scope).answers["fleet"].dicts()[0]
        names = ("requests", "generating", "p50_ttft_ms", "p50_tpot_ms", "output_tokens_per_s")
        return [everything[name] for name in names]

    of_quick = round(100 / 63, 3)
    per_s = (0.213, 0.427)
    assert figures(6000) == [1, 0, 10.0, of_quick, per_s[0]], "the slow one had no first token"
    assert figures(30_000) == [2, 1, 10_005.0, of_quick, per_s[0]], "it had not ended"
    assert figures(90_000) == [2, 0, 10_005.0, round((of_quick + 60_000 / 63) / 2, 3), per_s[1]]
    steps = at(empty, 6000, window="5m").answers["fleet_steps"].dicts()
    assert [(one["requests"], one["mean_ms"]) for one in steps] == [(1, 10.0)]
    # Filters are of what was known then, for figures and rows alike.
    for where, ms, requests, rows_then in (
        ("ttft_ns>1s", 6000, 0, 1),
        ("ttft_ns>1s", 30_000, 1, 1),
        ("outcome=finished", 30_000, 1, 0),
        ("outcome=in flight", 30_000, 1, 1),
        ("outcome=in flight", 90_000, 0, 0),
    ):
        shown = at(empty, ms, window="5m", where=(where,))
        assert shown.answers["fleet"].dicts()[0]["requests"] == requests, where
        assert len(shown.in_flight) == rows_then, where
    # `kvscope query` is of what arrived in the window, however it went on.
    (later,) = (row for row in ask(empty, "fleet", until=rows.T0_NS + 6000 * MS) if row["level"] == "all")
    assert (later["requests"], later["p50_ttft_ms"]) == (2, 10_005.0)


def test_filters_and_labels_hold_for_rows_too(database: duckdb.DuckDBPyConnection) -> None:
    assert at(database, 1100, where=("connector=pull",)).in_flight == []
    assert at(database, 1100, label="benchmark").in_flight == []
    shown = at(database, 20_000, where=("connector=bidirectional",))
    assert {row.connector for row in shown.recent} == {"bidirectional"}
    assert (len(shown.recent), shown.recent_total) == (3, 3)
    assert shown.labels == {"": 8, "benchmark": 1}, "before filters"


def test_recent_are_the_latest_and_all_are_counted(
    database: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frame, "MAX_RECENT", 3)
    shown = at(database, 30_000)
    assert [int(row.id) - 2**63 for row in shown.recent] == [9, 8, 7]
    assert shown.recent_total == 8


def test_a_row_is_the_same_whichever_way_it_is_made(database: duckdb.DuckDBPyConnection) -> None:
    shown = {
        row.id: row for row in at(database, 30_000).recent + at(database, 30_000, label="benchmark").recent
    }
    for stored in query.run_sql(database.cursor(), "SELECT * FROM waits").dicts():
        assert frame.row_of(stored) == shown[str(stored["id"])]
    live = {**rows.LIVE, **query_waits(rows.LIVE), "step_since_ns": 77, "waits_for": "a notification"}
    row = frame.row_of(live)
    assert (row.in_flight, row.step, row.step_since_ns) == (True, "transfer.dispatch", 77)
    assert (row.waits_for, row.coordination_ns, row.main_step) == (
        "a notification",
        10 * MS,
        "prefill.compute",
    )


def query_waits(row: rows.Row) -> dict[str, Any]:
    from kvscope.views import waits

    return waits(row)


def test_a_frame_of_now_leaves_to_the_daemon_what_only_it_knows(database: duckdb.DuckDBPyConnection) -> None:
    generating = rows.request(
        11, ("prefill.compute", 0, 60), connector="push", outcome="in flight", output_tokens=None,
        current_step="decode.generate",
    )  # fmt: skip
    live = arrow(database, rows.LIVE, generating, {**rows.PUSH, "outcome": "in flight"})
    now_ns = rows.T0_NS + 11_500 * MS
    shown = frame.build(database.cursor(), Scope(window="5s"), now_ns=now_ns, live=live)
    assert (shown.live, shown.at_ns, shown.window_ns) == (True, now_ns, 5 * SECOND_NS)
    assert (shown.in_flight, shown.engines, shown.samples, shown.problems) == ([], [], [], [])
    assert [int(row.id) - 2**63 for row in shown.recent] == [9, 8, 7], "what is stored is over"
    everything = shown.answers["fleet"].dicts()[0]
    assert (everything["requests"], everything["generating"], everything["not_finished"]) == (3, 1, 1)
    unlisted = frame.build(database.cursor(), Scope(window="5s"), now_ns=now_ns, live=live, recent=False)
    assert (unlisted.recent, unlisted.answers) == ([], shown.answers)


def test_the_recent_past_of_a_daemon_has_those_still_in_flight(database: duckdb.DuckDBPyConnection) -> None:
    pulled = {"where": ("connector=pull",), "window": "500ms"}
    row = in_flight(at(database, 10_030, live=arrow(database, rows.LIVE), **pulled))
    assert (row.id, row.step) == (str(rows.LIVE["id"]), "prefill.compute")
    row = in_flight(at(database, 15_000, live=arrow(database, rows.LIVE), **pulled))
    assert (row.step, row.step_since_ns) == ("transfer.dispatch", rows.LIVE["arrived_at_ns"] + 70 * MS)


def test_samples_are_the_latest_of_the_last_minute(database: duckdb.DuckDBPyConnection) -> None:
    def values(ms: float) -> dict[tuple[str, str], float]:
        return {(one.name, one.label): one.value for one in at(database, ms, window="1s").samples}

    assert values(1000) == {}
    assert values(4000) == {("vllm.running", ""): 5.0, ("thread.cpu", "writer"): 0.25}
    assert values(63_500) == {("vllm.running", ""): 7.0}
    assert values(-59_000) == {("host.cpu", ""): 1.5}


def test_samples_that_are_taken_rarely_are_shown_until_the_next_is_due(
    empty: duckdb.DuckDBPyConnection,
) -> None:
    taken = [sample(n, rows.T0_NS + n * 120 * SECOND_NS, value=float(n)) for n in (1, 2)]
    rows.insert(empty, "samples", taken)
    values = {s: [one.value for one in at(empty, s * 1000).samples] for s in (150, 350, 470, 485)}
    assert values == {150: [1.0], 350: [2.0], 470: [2.0], 485: []}


def test_a_step_that_this_version_does_not_have_is_unknown(empty: duckdb.DuckDBPyConnection) -> None:
    newer = rows.request(1, ("prefill.compute", 0, 60), ("unknown", 60, 100), connector="push")
    newer["waterfall"][1] |= {"step": 200, "observed": 200}
    rows.insert(empty, "requests", [newer])
    row = in_flight(at(empty, 1080))
    assert (row.step, row.compute_ns, row.unknown_ns) == ("unknown", 60 * MS, 20 * MS)


def test_engines_and_problems_are_those_of_the_window(empty: duckdb.DuckDBPyConnection) -> None:
    day_ns = 86400 * SECOND_NS
    rows.insert(
        empty,
        "engines",
        [
            rows.engine(1, "engine-p", "worker", started_at_ns=rows.T0_NS - day_ns, state="gone"),
            rows.engine(2, "engine-p", "worker", lost=25, torn=1, fingerprint="[1]"),
            rows.engine(3, "engine-p", "worker", started_at_ns=rows.T0_NS + day_ns, rejected=5),
            rows.engine(4, "engine-d", "worker", state="ended", hooks_missing=["on_x", None]),
            rows.engine(5, "old", "worker", started_at_ns=rows.T0_NS - day_ns, state="gone"),
            rows.engine(6, "stopped", "worker", started_at_ns=rows.T0_NS - day_ns, state="stopped"),
        ],
    )
    rows.insert(empty, "requests", [rows.PUSH])
    shown = at(empty, 2000, window="5s")
    assert [(one.engine, one.ring) for one in shown.engines] == [
        ("engine-d", "ring-4"), ("engine-p", "ring-2"), ("stopped", "ring-6"),
    ]  # fmt: skip
    assert shown.engines[0].hooks_missing == ["on_x"]
    assert (shown.engines[1].fingerprint, shown.engines[0].fingerprint["vllm"]) == ({}, "0.32.0")
    assert shown.problems == [
        "LOST 25 events (2.4 %, 1 of them torn) of engine-p worker 0 (as last seen)",
        "RECORDER STOPPED in stopped worker 0: reason not known (as last seen)",
        "HOOK MISSING: on_x, which vLLM 0.32.0 lacks; its steps are unknown (as last seen)",
    ]
    later = at(empty, 3600_000, window="5s")
    assert [one.engine for one in later.engines] == ["engine-p", "stopped"], "that engine had ended"


@pytest.mark.parametrize(
    ("scope", "words"),
    [
        ({"window": "soon"}, "no duration"),
        ({"window": "0s"}, "window is a duration from"),
        ({"window": "367d"}, "window is a duration from"),
        ({"at": "then"}, "at: 'then' is no duration before now"),
        ({"where": ("nope=1",)}, "no column"),
        ({"where": ("id=1",) * 21}, "at most 20"),
        ({"label": "\ud800"}, "no valid text"),
    ],
)
def test_a_scope_that_makes_no_sense_is_refused_in_one_line(
    database: duckdb.DuckDBPyConnection, scope: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        frame.build(database.cursor(), Scope(**scope), now_ns=rows.T0_NS)
    assert "\n" not in str(caught.value)


# --- a store file ----------------------------------------------------------------------------------


def test_a_store_file_gives_frames_and_says_which_time_it_covers(store_file: Path) -> None:
    source = client.StoreFile(store_file)
    assert source.span() == (rows.T0_NS + SECOND_NS, rows.T0_NS + 9 * SECOND_NS)
    last = source.frame(Scope(window="1h"))
    assert last.at_ns == rows.RECOMPUTED["arrived_at_ns"] + 160 * MS + 1, (
        "its end is that of the last request"
    )
    assert not last.live
    assert (len(last.recent), last.labels) == (7, {"": 8, "benchmark": 1})
    assert [row.step for row in last.in_flight] == ["transfer.wire"], "lost, which was not known yet"
    past = source.frame(Scope(at="2026-11-29T15:54:10.223Z"))
    assert [row.step for row in past.in_flight] == ["transfer.dispatch"]
    found = source.query("slowest", "", {"where": ["connector=push"], "limit": 1, "until": str(last.at_ns)})
    assert [row[0] for row in found["rows"]] == [str(rows.PUSH["id"])]
    assert len(source.requests(lookup.Listing(since="2026-11-29T15:54:17Z"))) == 2
    source.close()


def test_an_empty_store_file_gives_a_frame_of_now(tmp_path: Path) -> None:
    with duckdb.connect(str(tmp_path / "empty.duckdb")) as connection:
        rows.fill(connection)
        connection.execute("DELETE FROM requests")
    shown = client.StoreFile(tmp_path / "empty.duckdb").frame(Scope(window="1h"))
    assert time.time_ns() - shown.at_ns < 60 * SECOND_NS
    assert (shown.in_flight, shown.recent) == ([], [])


def test_a_store_file_without_requests_has_no_span(tmp_path: Path) -> None:
    path = tmp_path / "empty.duckdb"
    with duckdb.connect(str(path)) as connection:
        rows.fill(connection)
        connection.execute("DELETE FROM requests")
    source = client.StoreFile(path)
    assert source.span() is None
    shown = source.frame(Scope())
    assert (shown.recent, shown.in_flight, shown.labels) == ([], [], {})
    source.close()


def test_the_fleet_and_its_pairs_count_the_same_as_not_finished(empty: duckdb.DuckDBPyConnection) -> None:
    outcomes = ("finished", "lost", "error", "aborted", "incomplete", "ignored", None)
    stored = [{**rows.PUSH, "id": number, "outcome": outcome} for number, outcome in enumerate(outcomes)]
    rows.insert(empty, "requests", stored)
    (pair,) = query.ask(empty.cursor(), "pairs", {}).dicts()
    fleet = query.ask(empty.cursor(), "fleet", {}).dicts()
    assert pair["not_finished"] == 4
    assert {row["not_finished"] for row in fleet} == {4}
