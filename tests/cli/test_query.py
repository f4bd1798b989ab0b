"""The named questions, and what users' SQL may and may not do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from kvscope import lookup, query, schema, selection, steps, storefile, views
from kvscope.commands.results import Target
from kvscope.errors import KvscopeError, UsageError
from kvscope.query import Limits, QueryError, QueryRefused

from . import rows


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    """Writable, as in the daemon: what holds here does not rest on a file opened read-only."""
    connection = duckdb.connect(config={"memory_limit": "1GB"})
    rows.fill(connection)
    connection.execute("CREATE SEQUENCE numbers")
    storefile.lock(connection)
    yield connection
    connection.close()


def ask(database: duckdb.DuckDBPyConnection, name: str, **parameters: str | int) -> list[dict[str, object]]:
    return query.ask(database.cursor(), name, parameters).dicts()


# --- questions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", query.questions())
def test_each_question_gives_the_columns_it_documents(database: duckdb.DuckDBPyConnection, name: str) -> None:
    question = query.questions()[name]
    used = database.extract_statements(question.sql)[0].named_parameters
    # Label and where apply by themselves, but to `engines`.
    of_engines = {"label"} if "FROM engines" in question.sql else set()
    assert used <= {"since", "until", "limit", "one_in"} | of_engines
    assert used - {"one_in"} <= set(question.parameters)
    assert ("limit" in used) == ("limit" in question.parameters)
    result = query.ask(database.cursor(), name)
    assert result.columns == list(question.columns)
    assert result.rows, "the hand-made rows answer every question"
    assert "HUGEINT" not in result.types, "sums of 64 bits are cast, so that JSON keeps them"


def test_the_starter_questions_are_there() -> None:
    wanted = (
        "ttft steps slowest pairs leads outcomes reuse transfers leases handshakes failures engines losses "
        "fleet fleet_bands fleet_steps fleet_trend sessions"
    )
    assert set(query.questions()) >= set(wanted.split())


def test_ttft_parts_add_up_and_labels_do_not_mix(database: duckdb.DuckDBPyConnection) -> None:
    found = ask(database, "ttft")
    assert {(row["label"], row["connector"]) for row in found} == {
        ("", "push"), ("benchmark", "pull"), ("", "pull"), ("", "bidirectional"), ("", "local"),
    }  # fmt: skip
    for row in found:
        parts = sum(
            float(str(row[f"{part}_ms"]))
            for part in ("compute", "capacity", "transfer", "coordination", "unknown")
        )
        assert parts == pytest.approx(row["mean_ms"], abs=0.01)
    (push,) = (row for row in found if row["connector"] == "push")
    assert (push["requests"], push["mean_ms"], push["p50_ms"]) == (2, 276.0, 276.0)
    assert ask(database, "ttft", label="benchmark")[0]["requests"] == 1


def test_steps_share_adds_up_to_all_of_ttft(database: duckdb.DuckDBPyConnection) -> None:
    share: dict[object, float] = {}
    for row in ask(database, "steps"):
        key = (row["label"], row["connector"])
        share[key] = share.get(key, 0.0) + float(str(row["share_percent"]))
        assert steps.BY_NAME[str(row["step"])].class_ == row["class"]
    assert all(total == pytest.approx(100, abs=0.1) for total in share.values())


def test_answers_to_the_other_questions(database: duckdb.DuckDBPyConnection) -> None:
    slowest = ask(database, "slowest", limit=1)
    assert [(row["ttft_ms"], row["main_step"]) for row in slowest] == [(412.0, "readiness.detect")]
    leads = {row["connector"]: row for row in ask(database, "leads")}
    assert (leads["push"]["requests"], leads["push"]["lagging"], leads["push"]["mean_lag_ms"]) == (2, 1, 17.5)
    outcomes = ask(database, "outcomes")
    assert sum(int(str(row["read_after_expiry"])) for row in outcomes) == 1
    assert sum(int(str(row["recomputed_tokens"])) for row in outcomes) == 512
    reuse = {row["reuse_outcome"]: row for row in ask(database, "reuse")}
    assert set(reuse) == {"pulled", "below threshold", "expired"}
    assert reuse["pulled"]["mean_wait_added_ms"] == 9.0
    assert float(str(reuse["pulled"]["mean_net_benefit_ms"])) > 0
    assert [row["lost"] for row in ask(database, "losses")] == [25, 0]


def test_since_leaves_out_what_came_before(database: duckdb.DuckDBPyConnection) -> None:
    moment = rows.T0_NS + 7 * 10**9
    assert {row["connector"] for row in ask(database, "ttft", since=moment)} == {"local", "pull"}


def test_the_class_sums_come_from_the_steps(database: duckdb.DuckDBPyConnection) -> None:
    for stored in query.run_sql(database.cursor(), "SELECT * FROM waits").dicts():
        derived = views.waits(stored)
        assert {name: stored[name] for name in derived} == derived
        if stored["ttft_ns"] is not None:
            classes = ("compute_wait_ns", "transfer_ns", "coordination_ns")
            assert sum(stored[c] for c in classes) + (stored["unknown_ns"] or 0) == stored["ttft_ns"]
    assert [s.name for s in steps.STEPS if s.class_ == steps.UNKNOWN] == ["unknown"]
    described = query.run_sql(database.cursor(), "DESCRIBE waits").dicts()
    assert [row["column_name"] for row in described if row["column_name"] not in views.WAITS_COLUMNS] == []
    assert len(described) == len(views.WAITS_COLUMNS)


def test_a_comment_block_that_is_not_complete_is_refused() -> None:
    good = "-- title: T\n-- description: D\n-- parameters: limit\n-- column a: A\nSELECT 1 AS a"
    assert query.parse_question("x", good).columns == {"a": "A"}
    for broken in (
        good.replace("-- title: T\n", ""),
        good.replace("-- column a: A\n", ""),
        good.replace("limit", "since, limit"),
        good.replace("-- column a", "-- colum a"),
    ):
        with pytest.raises(ValueError, match=r"x\.sql"):
            query.parse_question("x", broken)


# --- hostile SQL -----------------------------------------------------------------------------------

HOSTILE = {
    "write in a CTE": ("WITH a AS (DELETE FROM requests RETURNING id) SELECT * FROM a", "read-only"),
    "EXPLAIN ANALYZE of a write": ("EXPLAIN ANALYZE DELETE FROM requests", "of a SELECT only"),
    "nextval": ("SELECT nextval('numbers')", "read-only"),
    "read_text": ("SELECT * FROM read_text('/etc/passwd')", "disabled"),
    "glob": ("SELECT * FROM glob('/etc/*')", "disabled"),
    "file as a table": ("SELECT * FROM '/etc/passwd'", "does not exist"),
    "a table from Python": ("SELECT * FROM a_python_table", "does not exist"),
    "COPY": ("COPY requests TO '/tmp/kvscope-stolen.csv'", "only SELECT"),
    "ATTACH": ("ATTACH ':memory:' AS other", "only SELECT"),
    "SET": ("SET memory_limit = '100GB'", "only SELECT"),
    "INSERT": ("INSERT INTO meta VALUES ('a', 'b')", "only SELECT"),
    "PRAGMA": ("PRAGMA database_list", "only SELECT"),
    "ROLLBACK": ("ROLLBACK", "only SELECT"),
    "two statements": ("SELECT 1; DROP TABLE requests", "exactly one"),
    "nothing": ("  -- nothing\n", "exactly one"),
    "not SQL": ("SELEC 1", "syntax error"),
    "65 KB of text": ("SELECT 1 --" + "x" * 65536, "64 KiB"),
    "another parameter": ("SELECT $then", r"\$since"),
    "lone surrogate": ("SELECT '\udcff'", "no valid text"),
    "NUL": ("SELECT '\0'", "NUL"),
}


@pytest.mark.parametrize(("sql", "reason"), HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("run", [query.run_sql, query.run_arrow])
def test_hostile_sql_is_refused_in_one_line(
    database: duckdb.DuckDBPyConnection, run: object, sql: str, reason: str
) -> None:
    a_python_table = duckdb.sql("SELECT 1 AS secret").to_arrow_table()
    before = database.execute("SELECT count(*), (SELECT count(*) FROM meta) FROM requests").fetchall()
    with pytest.raises(KvscopeError, match=f"(?i){reason}") as caught:
        run(database.cursor(), sql)  # type: ignore[operator]
    assert "\n" not in str(caught.value)
    assert database.execute("SELECT count(*), (SELECT count(*) FROM meta) FROM requests").fetchall() == before
    assert not Path("/tmp/kvscope-stolen.csv").exists()
    del a_python_table


def test_endless_recursion_is_stopped(database: duckdb.DuckDBPyConnection) -> None:
    # It ends by itself, after some 16 s: without the timer this test fails and does not hang.
    steps_ = "SELECT 1 UNION ALL SELECT n + 1 FROM r WHERE n < 2000000"
    endless = f"WITH RECURSIVE r(n) AS ({steps_}) SELECT count(*) FROM r"
    began = time.monotonic()
    with pytest.raises(QueryError, match="stopped after 300 ms"):
        query.run_sql(database.cursor(), endless, limits=Limits(seconds=0.3))
    assert time.monotonic() - began < 5
    assert query.run_sql(database.cursor(), "SELECT 1").rows == [(1,)]


@pytest.mark.parametrize(
    ("sql", "said"),
    [
        ("SELECT a.range FROM range(10000000) AS a, range(10000000)", "stopped after 300 ms"),
        ("SELECT CASE range WHEN 1999999 THEN error('too late') END FROM range(2000000)", "too late"),
    ],
)
def test_what_ends_an_arrow_stream_is_told_as_of_rows(
    database: duckdb.DuckDBPyConnection, sql: str, said: str
) -> None:
    limits = Limits(rows=10**9, bytes=10**9, seconds=0.3 if "stopped" in said else 10)
    with pytest.raises(QueryError, match=said):
        query.run_arrow(database.cursor(), sql, limits=limits)


def test_rows_and_bytes_are_capped_and_said_so(database: duckdb.DuckDBPyConnection) -> None:
    rows_ = query.run_sql(database.cursor(), "SELECT range FROM range(1000000)", limits=Limits(rows=300))
    assert (len(rows_.rows), rows_.truncated) == (300, True)
    exact = query.run_sql(database.cursor(), "SELECT range FROM range(300)", limits=Limits(rows=300))
    assert (len(exact.rows), exact.truncated) == (300, False)
    wide = query.run_sql(
        database.cursor(), "SELECT repeat('x', 1000) FROM range(100000)", limits=Limits(bytes=50_000)
    )
    assert wide.truncated
    assert len(wide.rows) < 60
    table, truncated = query.run_arrow(
        database.cursor(), "SELECT range FROM range(1000000)", limits=Limits(rows=300)
    )
    assert (table.num_rows, truncated) == (300, True)


def test_parameters_are_checked(database: duckdb.DuckDBPyConnection) -> None:
    sql = "SELECT count(*) FROM requests WHERE arrived_at_ns >= $since"
    assert query.run_sql(database.cursor(), sql, {"since": "1h"}).rows
    for bad in ({"since": "yesterday"}, {"since": "-5"}, {"limit": "0"}, {"limit": "many"}, {"limit": 5}):
        with pytest.raises(UsageError):
            query.run_sql(database.cursor(), f"{sql} LIMIT $limit" if bad.get("limit") != 5 else sql, bad)
    with pytest.raises(QueryRefused, match="takes no parameter"):
        query.ask(database.cursor(), "leases", {"limit": 3})
    with pytest.raises(QueryRefused, match="ttft"):
        query.ask(database.cursor(), "no_such")


# --- files -----------------------------------------------------------------------------------------


def test_a_file_that_is_no_store_of_this_version_is_named(tmp_path: Path, store_file: Path) -> None:
    with pytest.raises(KvscopeError, match="no such file"):
        storefile.open_file(tmp_path / "absent.duckdb")
    text = tmp_path / "text.duckdb"
    text.write_text("not a database")
    with pytest.raises(KvscopeError, match=r"not a DuckDB file"):
        storefile.open_file(text)
    other = tmp_path / "other.duckdb"
    duckdb.connect(str(other)).close()
    with pytest.raises(KvscopeError, match="no kvscope store"):
        storefile.open_file(other)
    old = tmp_path / "old.duckdb"
    with duckdb.connect(str(old)) as connection:
        rows.fill(connection)
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    with pytest.raises(KvscopeError, match=r"store version 99 .* reads version"):
        storefile.open_file(old)
    connection = storefile.open_file(store_file)
    with pytest.raises(duckdb.Error, match=r"(?i)locked"):
        connection.execute("SET memory_limit = '100GB'")
    connection.close()


# --- lists -----------------------------------------------------------------------------------------


def listed(database: duckdb.DuckDBPyConnection, **listing: object) -> list[object]:
    found = lookup.list_requests(database.cursor(), [rows.LIVE], lookup.Listing(**listing))  # type: ignore[arg-type]
    return [int(row["id"]) - 2**63 for row in found]


def test_lists_filter_sort_and_hold_requests_in_flight(database: duckdb.DuckDBPyConnection) -> None:
    assert listed(database) == [10, 9, 8, 7, 6, 5, 4, 3, 2, 1]
    assert listed(database, sort="ttft_ns", limit=3) == [1, 9, 2]
    assert listed(database, sort="ttft_ns:asc", limit=2) == [4, 5]
    assert listed(database, sort="ttft_ns:asc")[-2:] in ([7, 10], [10, 7]), "not observed comes last"
    assert listed(database, where=["connector=pull"]) == [10, 9, 3]
    assert listed(database, where=["connector=pull", "label="]) == [10, 9]
    assert listed(database, where=["coordination_ns>100ms"]) == [1]
    assert listed(database, where=["lead_ns<-20ms"]) == [2]
    assert listed(database, where=["client_id~0003"]) == [3]
    assert listed(database, where=["outcome!=finished"]) == [10, 7]
    doubtful = listed(database, where=["read_after_expiry=true"])
    assert doubtful == listed(database, where=["read_after_expiry=1"]) != []
    assert listed(database, where=["compute_wait_ns>=60ms", "outcome=in flight"]) == [10]
    assert listed(database, since=str(rows.T0_NS + 8 * 10**9)) == [10, 9, 8]


@pytest.mark.parametrize(
    "listing",
    [
        {"where": ["ttft_ns"]}, {"where": ["ttft_ns>soon"]}, {"where": ["waterfall=1"]}, {"where": ["no=1"]},
        {"where": ["ttft_ns~1"]}, {"where": [f"id={2**65}"]}, {"where": ["id=1"] * 21}, {"limit": 0},
        {"limit": 10**6}, {"sort": "nope"}, {"sort": "ttft_ns:up"}, {"since": "soon"},
        {"where": ['id"=1'], "sort": "id"}, {"sort": "id; DROP TABLE requests"},
    ],
)  # fmt: skip
def test_a_list_that_makes_no_sense_is_refused(
    database: duckdb.DuckDBPyConnection, listing: dict[str, object]
) -> None:
    with pytest.raises(UsageError) as caught:
        listed(database, **listing)
    assert "\n" not in str(caught.value)


def test_a_request_is_found_by_each_of_its_ids(database: duckdb.DuckDBPyConnection) -> None:
    for text in (
        rows.PUSH["id"],
        rows.PUSH["client_id"],
        rows.PUSH["p_request"],
        rows.PUSH["d_request"],
        "req-0001",
    ):
        found = lookup.look_up(database.cursor(), [], str(text))
        assert found["request"]["id"] == str(rows.PUSH["id"])
    assert [t["id"] for t in found["transfers"]] == ["11"]
    assert {e["engine"] for e in found["engines"]} == {"engine-p", "engine-d"}
    live = lookup.look_up(database.cursor(), [rows.LIVE], "req-0010")
    assert live["request"]["in_flight"] is True
    with pytest.raises(lookup.NotFound):
        lookup.look_up(database.cursor(), [], "nobody")
    with pytest.raises(lookup.NotFound):
        lookup.look_up(database.cursor(), [], "")
    with pytest.raises(lookup.Ambiguous) as caught:
        lookup.look_up(database.cursor(), [rows.LIVE], "req-00")
    assert len(caught.value.matches) == 9


def test_a_request_that_was_just_stored_is_not_shown_twice(database: duckdb.DuckDBPyConnection) -> None:
    live = {**rows.PUSH, "outcome": "in flight"}
    found = lookup.list_requests(database.cursor(), [live], lookup.Listing(where=[f"id={rows.PUSH['id']}"]))
    assert [row["outcome"] for row in found] == ["finished"]
    assert lookup.look_up(database.cursor(), [live], "req-0001")["request"]["outcome"] == "finished"


def test_a_finished_request_that_is_yet_to_be_stored_is_not_in_flight(
    database: duckdb.DuckDBPyConnection,
) -> None:
    ended = {**rows.LIVE, "outcome": "finished"}
    (found,) = lookup.list_requests(database.cursor(), [ended], lookup.Listing(limit=1))
    assert (found["id"], found["in_flight"]) == (str(rows.LIVE["id"]), False)


def test_json_names_steps_and_keeps_ids(database: duckdb.DuckDBPyConnection) -> None:
    request = lookup.look_up(database.cursor(), [], "req-0004")["request"]
    assert request["session"] == str(2**63 + 3)
    assert request["waterfall"][0] == {
        "step": "prefill.reuse_dispatch", "from_ns": 0, "ns": 3_000_000, "critical": True, "observed": "hook",
        "error_ns": 0, "class": "coordination",
    }  # fmt: skip
    as_tuples = {**rows.LIVE, "waterfall": [tuple(entry.values()) for entry in rows.LIVE["waterfall"]]}
    assert lookup.request_json(as_tuples) == lookup.request_json(rows.LIVE)


def test_every_question_takes_what_can_apply_to_it() -> None:
    of_requests = {
        name for name, one in query.questions().items() if {"label", "where"} & set(one.parameters)
    }
    others = set(query.questions()) - of_requests
    assert others == {"transfers", "leases", "handshakes", "failures", "engines", "losses"}
    for name, question in query.questions().items():
        timed = {"since", "until"} & set(question.parameters)
        assert timed == (set() if name in ("engines", "losses") else {"since", "until"}), name
        assert ({"label", "where"} <= set(question.parameters)) == (name in of_requests), name
    assert set(selection.TIMES) == set(schema.BY_NAME) - {"engines", "labels"}
    assert schema.REQUESTS.columns[0].name == "id"


def test_ctrl_c_while_duckdb_works_is_ctrl_c(database: duckdb.DuckDBPyConnection) -> None:
    """DuckDB says it in a way of its own."""
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            query.run_sql(database.cursor(), "SELECT max(sqrt(range)) FROM range(1000000000000)")
    finally:
        timer.cancel()


def test_an_answer_replaces_no_device_or_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="no plain file"):
        Target("csv", pipe, force=True)
