"""Which rows a query is about: times, kinds of traffic, filters, and requests that are not stored yet."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope import query, storefile, views
from kvscope.errors import UsageError
from kvscope.filters import MAX_FILTER_CHARACTERS, Filter, parse_filter
from kvscope.selection import Selection, moment_ns, requests_sql

from . import rows

SECOND_NS = 10**9
IDS = "SELECT (id - 9223372036854775808)::BIGINT FROM {} ORDER BY ALL"


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    """Writable, as in the daemon, and of a name that has to be quoted."""
    path = tmp_path_factory.mktemp("store") / "a \"store'.duckdb"
    connection = duckdb.connect(str(path), config={"memory_limit": "1GB"})
    rows.fill(connection)
    storefile.lock(connection)
    yield connection
    connection.close()


def ids(
    database: duckdb.DuckDBPyConnection, table: str = "requests", live: Any = None, **parameters: Any
) -> list[int]:
    return [n for (n,) in query.run_sql(database.cursor(), IDS.format(table), parameters, live=live).rows]


def arrow(database: duckdb.DuckDBPyConnection, *found: rows.Row) -> Any:
    schema = database.sql("FROM requests LIMIT 0").to_arrow_table().schema
    return pa.Table.from_pylist(list(found), schema=schema)


# --- moments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ns"),
    [
        ("10m", 10**18 - 600 * SECOND_NS),
        (10**18, 10**18),
        ("1000000000000000000", 10**18),
        ("0", 0),
        ("2026-11-29T15:54:09.123Z", rows.T0_NS),
        ("2026-11-29 15:54:09.123", rows.T0_NS),
        ("2026-11-29T16:54:09.123+01:00", rows.T0_NS),
        ("2026-11-29T09:54:09,123000000-0600", rows.T0_NS),
        ("2026-11-29 15:54", rows.T0_NS - 9_123_000_000),
        ("1970-01-02", 86400 * SECOND_NS),
        ("999999d", 0),
        ("", None),
        (None, None),
    ],
)
def test_a_moment_is_a_duration_a_date_or_unix_nanoseconds(text: str | int | None, ns: int | None) -> None:
    assert moment_ns(text, now_ns=10**18) == ns


@pytest.mark.parametrize(
    "text",
    ["yesterday", "-5", -5, 2**63, "9" * 19, "9" * 5000, "2026-13-01", "2026-02-30", "2026-11-29T25:00",
     "2026-11-29T15:54:09+99:99", "1960-01-01", "0001-01-01T00:00+01:00", "10 m", "2026-11-29T15"],
)  # fmt: skip
def test_what_is_no_moment_is_refused_in_one_line(text: str | int) -> None:
    with pytest.raises(UsageError, match=r"until: .* is no duration before now") as caught:
        moment_ns(text, name="until")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("10", "until: 10 is no moment; write 10m"),
        ("1", "write 1m"),
        ("20261129", "2026-11-29T15:54:09"),
        ("1795913000", "write 1795913000000000000$"),
        ("1795913000000", "write 1795913000000000000$"),
        ("1795913000000000", "write 1795913000000000000$"),
        (str(10**16 - 1), "Unix nanoseconds"),
    ],
)
def test_a_number_without_its_unit_is_refused_with_what_to_write(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        moment_ns(text, name="until")
    assert moment_ns(int(text)) == int(text), "programs say what they mean"
    assert moment_ns(str(10**16)) == 10**16


# --- what is selected ------------------------------------------------------------------------------


def test_since_is_within_and_until_is_not(database: duckdb.DuckDBPyConnection) -> None:
    third, fifth = rows.T0_NS + 3 * SECOND_NS, rows.T0_NS + 5 * SECOND_NS
    assert ids(database) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert ids(database, since=third, until=fifth) == [3, 4]
    assert ids(database, since=str(third + 1), until=str(fifth + 1)) == [4, 5]
    assert ids(database, "waits", until="2026-11-29T15:54:11") == [1]
    assert ids(database, "request_steps WHERE step = 'prefill.compute'", since=fifth) == [5, 6, 7, 8, 9]


def test_each_table_goes_by_its_own_time(database: duckdb.DuckDBPyConnection) -> None:
    third = {"since": rows.T0_NS + 3 * SECOND_NS, "until": rows.T0_NS + 4 * SECOND_NS}
    found = {
        name: query.run_sql(database.cursor(), f"SELECT id FROM {name}", third).rows
        for name in ("transfers", "leases", "handshakes", "failures", "samples")
    }
    assert found == {"transfers": [(12,)], "leases": [(21,)], "handshakes": [], "failures": [], "samples": []}
    joined = "SELECT count(*) FROM engines, requests"
    assert query.run_sql(database.cursor(), joined, third).rows == [(4,)], "engines are there all the time"


def test_label_and_filters_hold_for_all_views_of_requests(database: duckdb.DuckDBPyConnection) -> None:
    assert ids(database, label="benchmark") == [3]
    assert ids(database, label="") == [1, 2, 4, 5, 6, 7, 8, 9]
    assert ids(database, label="nothing of that kind") == []
    assert ids(database, where=["connector=push"]) == ids(database, where="connector=push") == [1, 2, 7]
    assert ids(database, "waits", where=["connector=push", "ttft_ns>200ms"]) == [1]
    assert ids(database, where=["coordination_ns>100ms"]) == [1], "a column that only waits has"
    assert ids(database, where=["main_step~detect", "label="]) == [1]
    steps_ = "request_steps WHERE step = 'prefill.compute'"
    assert ids(database, steps_, where=["compute_wait_ns>100ms"], label="") == [9]
    whole = query.run_sql(database.cursor(), "SELECT * FROM requests")
    filtered = query.run_sql(database.cursor(), "SELECT * FROM requests", {"where": ["main_step=x"]})
    assert (filtered.columns, filtered.types) == (whole.columns, whole.types)


def test_named_questions_are_about_the_same_rows(database: duckdb.DuckDBPyConnection) -> None:
    found = query.ask(database.cursor(), "ttft", {"where": ["d_engine=engine-d"], "label": "", "since": 1})
    assert {row["connector"]: row["requests"] for row in found.dicts()} == {
        "bidirectional": 3, "push": 2, "pull": 1, "local": 1,
    }  # fmt: skip
    (only,) = query.ask(database.cursor(), "slowest", {"until": rows.T0_NS + 2 * SECOND_NS}).dicts()
    assert only["id"] == rows.PUSH["id"]
    values = query.run_sql(
        database.cursor(), "SELECT $since, $until, $label, $limit", {"since": 5, "until": 7, "label": "x"}
    ).rows
    assert values == [(5, 7, "x", 20)]


@pytest.mark.parametrize(
    ("sql", "parameters", "words"),
    [
        ("SELECT * FROM engines", {"since": "1h"}, "does not read a table with times"),
        ("SELECT * FROM leases", {"label": ""}, "does not read requests"),
        ("SELECT * FROM leases", {"where": ["id=1"]}, "does not read requests"),
        ("SELECT * FROM requests", {"limit": 5}, r"write \$limit"),
        ("SELECT * FROM requests", {"since": ["1h"]}, "since is one value"),
        ("SELECT * FROM requests", {"label": ["a", "b"]}, "label is one value"),
        ("SELECT * FROM requests", {"since": 5, "until": 5}, "since is not before until"),
        ("SELECT * FROM requests", {"where": ["id=1"] * 21}, "at most 20 filters"),
        ("SELECT * FROM requests", {"where": ["nope=1"]}, "no column 'nope'"),
        ("SELECT * FROM requests", {"label": "\ud800"}, "no valid text"),
        ("SELECT * FROM requests", {"then": 1}, "unknown parameter"),
    ],
)
def test_a_parameter_that_would_change_nothing_is_refused(
    database: duckdb.DuckDBPyConnection, sql: str, parameters: Any, words: str
) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        query.run_sql(database.cursor(), sql, parameters)
    assert "\n" not in str(caught.value)


# --- hostile filters -------------------------------------------------------------------------------

TEXTS = [name for name, type_ in views.WAITS_COLUMNS.items() if type_ == "VARCHAR"]
NUMBERS = [name for name, type_ in views.WAITS_COLUMNS.items() if type_ not in ("VARCHAR", "BOOLEAN")]
NUMBERS = [name for name in NUMBERS if not views.WAITS_COLUMNS[name].startswith("STRUCT")]
OPERATORS = ("=", "!=", ">", ">=", "<", "<=")
HOSTILE = ["'", "''", "' OR true --", "'; DROP TABLE requests; --", "\\'", "\\", "%", "$since", "?", "\n",
           "é\u202e", "$$", "E'x'", '"', "{}", "/*", "\x1b[31m", "😀"]  # fmt: skip


def parsed(text: str) -> Filter | None:
    try:
        return parse_filter(text)
    except UsageError:
        return None


@settings(deadline=None, max_examples=60)
@given(
    column=st.sampled_from(TEXTS),
    operator=st.sampled_from([*OPERATORS, "~"]),
    value=st.one_of(st.sampled_from(HOSTILE), st.text(max_size=40)),
)
def test_a_filter_means_in_sql_what_it_means_in_memory(
    database: duckdb.DuckDBPyConnection, column: str, operator: str, value: str
) -> None:
    text = f"{column}{operator}{value}"
    one = parsed(text)
    if one is None:
        assert "\0" in value
        return
    everything = query.run_sql(database.cursor(), "SELECT * FROM waits").dicts()
    # Texts are compared byte by byte there and by code points here: the same order.
    expected = sorted(row["id"] - 2**63 for row in everything if one.matches(row))
    assert ids(database, where=[text], label=None) == expected
    assert ids(database) == [1, 2, 3, 4, 5, 6, 7, 8, 9], "nothing else happened"


@settings(deadline=None, max_examples=60)
@given(
    column=st.sampled_from(NUMBERS),
    operator=st.sampled_from(OPERATORS),
    value=st.one_of(
        st.integers(-(2**63), 2**64 - 1), st.integers(-3, 10**9), st.floats(), st.sampled_from(["1e3", "-0"])
    ),
)
def test_numbers_too(
    database: duckdb.DuckDBPyConnection, column: str, operator: str, value: int | float | str
) -> None:
    duration = column.endswith("_ns") and not column.endswith("_at_ns") and isinstance(value, int)
    text = f"{column}{operator}{value}{'ns' * duration}"
    one = parsed(text)
    if one is None:
        return
    everything = query.run_sql(database.cursor(), "SELECT * FROM waits").dicts()
    expected = sorted(row["id"] - 2**63 for row in everything if one.matches(row))
    assert ids(database, where=[text]) == expected


@pytest.mark.parametrize(
    ("text", "column", "value"),
    [
        ("ttft>400ms", "ttft_ns", 400_000_000),
        ("prompt>=1000", "prompt_tokens", 1000),
        ("output<5", "output_tokens", 5),
        ("coord.>1s", "coord", None),
        ("coord>1s", "coordination_ns", SECOND_NS),
        ("transfer>1s", "transfer_ns", SECOND_NS),
        ("compute_wait>1s", "compute_wait_ns", SECOND_NS),
        ("readiness.detect>50ms", "readiness_detect_ns", 50_000_000),
        ("decode.generate>1s", "decode_generate_ns", SECOND_NS),
        ("lead<0", "lead_ns", 0),
        ("lead<-5ms", "lead_ns", -5_000_000),
        ("p=prefill-0", "p_engine", "prefill-0"),
        ("d~dec", "d_engine", "dec"),
        ("request~abc", "client_id", "abc"),
        ("unknown>1ms", "unknown_ns", 1_000_000),
        ("arrived_at_ns>5", "arrived_at_ns", 5),
    ],
)
def test_a_filter_takes_the_words_on_the_screens(text: str, column: str, value: object) -> None:
    if value is None:
        with pytest.raises(UsageError):
            parse_filter(text)
        return
    found = parse_filter(text)
    assert (found.column, found.value) == (column, value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ttft>400", "ttft_ns: 400 what? write 400ms"),
        ("ttft_ns>-400", "what?"),
        ("pair=a", "write p_engine=… and d_engine=…"),
        ("tpot>40ms", "decode_generate_ns is the time"),
        ("compute>1s", "write compute_wait, or compute_ns"),
        ("ttft>0.5", "write it like 300ms"),
    ],
)
def test_a_filter_that_is_not_clear_says_what_to_write(text: str, says: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_filter(text)
    assert says in str(caught.value)


def test_who_waits_for_a_first_token_for_longer_passes_in_memory_and_in_sql(
    database: duckdb.DuckDBPyConnection,
) -> None:
    waiting = {**rows.LIVE, **views.waits(rows.LIVE)}
    at_ns = waiting["arrived_at_ns"] + 2 * SECOND_NS
    live = arrow(database, rows.LIVE)
    for text, passes in (
        ("ttft>1s", True),
        ("ttft>=2s", True),
        ("ttft>2s", False),
        ("ttft<3s", False),
        ("ttft!=1s", False),
    ):
        one = parse_filter(text)
        assert one.matches(waiting, at_ns) is passes, text
        assert not one.matches(waiting), text
        cursor = database.cursor()
        cursor.register("live_requests", live)
        found = Selection(filters=(one,), as_of_ns=at_ns)
        sql = requests_sql(cursor, found, live, first_token=False)
        there = [id_ for (id_,) in cursor.execute(f"SELECT id FROM ({sql})").fetchall()]
        assert (waiting["id"] in there) is passes, text
    lost = {**waiting, "outcome": "lost"}
    assert not parse_filter("ttft>1s").matches(lost, at_ns)


def test_a_hostile_label_is_only_a_label(database: duckdb.DuckDBPyConnection) -> None:
    for label in HOSTILE:
        assert ids(database, label=label) == []
    assert ids(database, label="' OR label = '") == []


def test_a_filter_that_is_too_long_or_not_finite_is_refused() -> None:
    for text in ("client_id=" + "x" * MAX_FILTER_CHARACTERS, "best_rate_bytes_per_s>inf", "ttft_ns>nan"):
        with pytest.raises(UsageError):
            parse_filter(text)


# --- requests that are not stored yet --------------------------------------------------------------


def test_those_with_a_first_token_count_while_they_generate(database: duckdb.DuckDBPyConnection) -> None:
    waiting = rows.LIVE
    generating = rows.request(
        11, ("prefill.compute", 0, 62), ("decode.first_step", 62, 70), connector="push",
        outcome="in flight", current_step="decode.generate", output_tokens=None,
    )  # fmt: skip
    ended = {**waiting, "id": waiting["id"] + 5, "outcome": "error"}
    live = arrow(database, waiting, generating, ended)
    assert ids(database, live=live) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15]
    assert ids(database, live=live, where=["connector=push"], since=rows.T0_NS + 3 * SECOND_NS) == [7, 11]
    assert ids(database, live=live, where=["compute_ns=70ms", "connector=push"]) == [11], (
        "filters on sums hold for them too"
    )
    assert ids(database, live=live, until=rows.T0_NS + 10 * SECOND_NS) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert ids(database, live=live, label="benchmark") == [3]
    pairs = query.ask(database.cursor(), "pairs", {"where": ["connector=push"]}, live=live).dicts()
    assert [(row["requests"], row["not_finished"]) for row in pairs] == [(4, 1)], (
        "in flight is not unfinished"
    )
    outcomes = query.ask(database.cursor(), "outcomes", {"where": ["connector=push"]}, live=live).dicts()
    assert {(row["outcome"], row["step"]) for row in outcomes} >= {("in flight", "decode.generate")}


def test_one_that_was_stored_meanwhile_is_not_counted_twice(database: duckdb.DuckDBPyConnection) -> None:
    # Its first leg was joined later: it turned out to have arrived earlier than was known.
    again = {
        **rows.PUSH,
        "outcome": "in flight",
        "arrived_at_ns": rows.PUSH["arrived_at_ns"] + 30 * SECOND_NS,
    }
    live = arrow(database, again)
    assert ids(database, live=live) == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert query.run_sql(
        database.cursor(), "SELECT outcome FROM requests WHERE id = 9223372036854775809", live=live
    ).rows == [("finished",)]
    assert ids(database, live=arrow(database)) == [1, 2, 3, 4, 5, 6, 7, 8, 9], "none in flight"


def test_only_the_young_part_of_the_store_is_searched_for_them(database: duckdb.DuckDBPyConnection) -> None:
    from kvscope.selection import LATE_NS, Selection, requests_sql

    cursor = database.cursor()
    sql = requests_sql(cursor, Selection(), arrow(database, rows.LIVE))
    assert f"arrived_at_ns >= {rows.LIVE['arrived_at_ns'] - LATE_NS}" in sql


def test_live_requests_of_one_reader_are_not_seen_by_another(database: duckdb.DuckDBPyConnection) -> None:
    with query.reading(
        first := database.cursor(), live=arrow(database, {**rows.LIVE, "outcome": "finished"})
    ):
        assert first.execute("SELECT count(*) FROM requests").fetchall() == [(10,)]
        assert ids(database) == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_hostile_sql_reaches_no_more_with_live_requests(database: duckdb.DuckDBPyConnection) -> None:
    live = arrow(database, rows.LIVE)
    for sql in (
        "WITH a AS (DELETE FROM requests RETURNING id) SELECT * FROM a",
        "SELECT * FROM requests, '/etc/passwd'",
    ):
        with pytest.raises(query.QueryError):
            query.run_sql(database.cursor(), sql, {"where": ["id=1"]}, live=live)
    table, _ = query.run_arrow(database.cursor(), IDS.format("requests"), {"label": "benchmark"}, live=live)
    assert table.num_rows == 1
