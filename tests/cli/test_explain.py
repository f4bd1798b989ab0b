"""Explanations, word for word. After a wanted change: `UPDATE_GOLDEN=1 pytest tests/cli/test_explain.py`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from kvscope import lookup, steps
from kvscope.advice import ADVICE, of_step, verdict
from kvscope.explain import answer, explain

from . import rows

GOLDEN = Path(__file__).parent / "golden"
AS_OF_NS = rows.LIVE["arrived_at_ns"] + 1_500_000_000


@pytest.fixture(scope="module")
def database() -> Iterator[duckdb.DuckDBPyConnection]:
    connection = duckdb.connect()
    rows.fill(connection)
    yield connection
    connection.close()


def found(database: duckdb.DuckDBPyConnection, row: dict[str, Any]) -> dict[str, Any]:
    return {**lookup.look_up(database.cursor(), [rows.LIVE], str(row["id"])), "as_of_ns": AS_OF_NS}


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("push", rows.PUSH), ("pull", rows.PULL), ("expired", rows.EXPIRED), ("lost", rows.LOST),
        ("live", rows.LIVE),
    ],
)  # fmt: skip
def test_golden(database: duckdb.DuckDBPyConnection, name: str, row: dict[str, Any]) -> None:
    text = explain(found(database, row))
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()


def test_the_answer_in_one_line() -> None:
    assert answer(rows.PUSH) == (
        "412 ms: 81 compute wait (12 of it capacity), 23 transfer, 301 coordination wait "
        "(readiness.detect 180, transfer.dispatch 49, readiness.signal 38, …), 7 unknown"
    )
    assert answer(rows.LOST).startswith("no first token (lost, in transfer.wire); known so far 74.0 ms:")
    nothing = rows.request(99, first_token=False, outcome="lost", current_step="prefill.frontend")
    assert answer(nothing) == "no first token (lost, in prefill.frontend); nothing of its time was observed"


def test_of_a_source_without_first_tokens_it_is_said_that_it_tells_none() -> None:
    imported = rows.request(60, ("prefill.queue", 0, 4), ("prefill.compute", 4, 60), first_token=False)
    assert answer(imported).startswith(
        "finished, but what was recorded or imported tells of no first token; known so far 60.0 ms: 60.0 comp"
    )
    nothing = rows.request(61, first_token=False)
    assert answer(nothing).endswith("tells of no first token; nothing of its time was observed")
    assert "No first token" not in explain({"request": imported}), "it had one"


@pytest.mark.parametrize(
    "row", [*rows.STORED, rows.LIVE], ids=lambda row: row["client_id"][:8].encode().hex()
)
@pytest.mark.parametrize("width", [80, 132])
def test_it_fits_its_width_and_is_plain_text(
    database: duckdb.DuckDBPyConnection, row: dict[str, Any], width: int
) -> None:
    text = explain(found(database, row), width)
    assert max(map(len, text.splitlines())) <= width
    assert all(line.isprintable() for line in text.splitlines()), "ids from clients can't drive a terminal"
    for entry in row["waterfall"]:
        assert f"{entry['ns'] / 1e6:.3f}" in text


def test_colours_change_nothing_but_colours(database: duckdb.DuckDBPyConnection) -> None:
    coloured = explain(found(database, rows.PUSH), colour=True)
    assert "\x1b[31m" in coloured
    lines = [line.rstrip() for line in re.sub(r"\x1b\[\d+m", "", coloured).splitlines()]
    assert lines == explain(found(database, rows.PUSH)).splitlines()


def test_the_rounded_parts_add_up(database: duckdb.DuckDBPyConnection) -> None:
    thirds = rows.request(
        50, ("prefill.compute", 0, 33.4), ("transfer.wire", 33.4, 66.8), ("registration.route", 66.8, 100.3)
    )
    total, *parts = [
        float(n) for n in re.findall(r"(\d+) (?:ms:|compute|transfer|coord|unkn)", answer(thirds))
    ]
    assert total == sum(parts) == 100


def test_a_sum_that_is_not_ttft_is_not_hidden() -> None:
    wrong = {**rows.PUSH, "ttft_ns": rows.PUSH["ttft_ns"] + 1_000_000}
    assert "but TTFT is 413.000: a fault of kvscope" in explain({"request": wrong})


def test_a_row_alone_is_enough() -> None:
    assert "sum of the critical path (*) = TTFT" in explain({"request": rows.PUSH_LATE})
    bare = dict.fromkeys(rows.PUSH) | {"id": 1}
    assert "nothing of its time was observed" in explain({"request": bare})


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (rows.PUSH_LATE, "lag 35.000 ms"),
        (rows.PULLED_BACK, "reuse pulled"),
        (rows.BELOW, "reuse below threshold"),
        (rows.EXPIRED, "READ AFTER EXPIRY"),
        (rows.RECOMPUTED, "silently recomputed: D computed 512 of 512"),
        (rows.RECOMPUTED, "failure transfer_failed (engine-p) in engine-d"),
        (
            rows.PULL,
            "push would have taken 90.000 ms (-9.750), assuming D asked at",
        ),
        (rows.PULL, "lease on P rank 0: released after 40 ms, 30.0 s before its deadline, 2 renewals"),
        ({**rows.PULL, "clamped_ns": 2_000_000}, "out of order by 2.000 ms"),
        ({**rows.PULL, "joined_by": "client id"}, "inferred, not certain"),
        ({**rows.PULL, "joined_by": "peer not instrumented"}, "one leg only"),
    ],
)
def test_what_has_to_be_said_is_said(
    database: duckdb.DuckDBPyConnection, row: dict[str, Any], words: str
) -> None:
    text = " ".join(explain({**found(database, row), "request": row}).split())
    assert words in text


def test_codes_of_a_newer_version_are_unknown_not_an_error(database: duckdb.DuckDBPyConnection) -> None:
    entry = {**rows.PUSH["waterfall"][0], "step": 200, "observed": 200}
    newer = {**rows.PUSH, "waterfall": [entry, *rows.PUSH["waterfall"][1:]]}
    ready = lookup.request_json(newer)
    assert (ready["waterfall"][0]["step"], ready["waterfall"][0]["observed"]) == ("unknown", "not observed")
    by_name = {**ready, "waterfall": [{**ready["waterfall"][0], "step": "prefill.new", "observed": "seen"}]}
    for row in (newer, ready, by_name):
        assert re.search(r"\* +0\.000 +2\.000 +2\.000 unknown +unknown +none", explain({"request": row}))


def test_every_step_has_its_advice() -> None:
    assert set(ADVICE) == set(steps.BY_NAME)
    for name in ADVICE:
        for connector in ("push", "pull", None):
            why, help_ = of_step(name, connector)
            assert why
            assert help_
            assert "{" not in why + help_


def test_the_verdict_names_class_main_step_and_what_would_help() -> None:
    assert verdict(rows.PUSH) == (
        "Mostly coordination wait, 73 % of 412 ms; the largest part in readiness.detect, 180 ms: the KV was "
        "there, but P looks for completions once per engine step; shorter engine steps on P (smaller "
        "batches, chunked prefill) would help, a faster link would not."
    )
    pulled = verdict({**rows.PUSH, "connector": "pull"})
    assert "but D looks for completions" in pulled, "in pull it is D that moves the KV"


@pytest.mark.parametrize(
    ("compute_ms", "said"),
    [
        (49, "About as much coordination wait as compute wait, 51 and 49 % of 100 ms; of the coordination "
             "wait the largest part in readiness.detect, 51 ms: "),
        (54, "About as much compute wait as coordination wait, 54 and 46 % of 100 ms; "),
        (55, "Mostly compute wait, 55 % of 100 ms; the largest part in prefill.compute, 55 ms: "),
        (100, "Mostly compute wait, 100 % of 100 ms; "),
    ],
)  # fmt: skip
def test_a_near_tie_is_said_to_be_one(compute_ms: int, said: str) -> None:
    row = rows.request(
        1, ("prefill.compute", 0, compute_ms), ("readiness.detect", compute_ms, 100), connector="push"
    )
    assert verdict(row).startswith(said)


def test_the_verdict_tells_of_the_class_even_where_another_step_is_the_longest() -> None:
    row = rows.request(
        51, ("prefill.compute", 0, 40), ("registration.route", 40, 75), ("readiness.detect", 75, 105)
    )
    said = verdict(row)
    assert said.startswith(
        "Mostly coordination wait, 62 % of 105 ms; the largest part in registration.route, 35 ms"
    )
    assert said.endswith("Its longest step is prefill.compute, 40 ms.")


def test_capacity_is_compute_wait_with_advice_of_its_own() -> None:
    row = rows.request(52, ("registration.blocks", 0, 90), ("prefill.compute", 90, 100))
    assert verdict(row).startswith(
        "Mostly compute wait, 100 % of 100 ms; the largest part in registration.blocks"
    )
    assert "more decode capacity would help" in verdict(row)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (rows.PUSH_LATE, "D's registration came 35 ms after prefill had finished."),
        (rows.EXPIRED, "the answer may be wrong"),
        (rows.RECOMPUTED, "D recomputed 512 prompt tokens."),
        (rows.LOST, "No first token (lost); last seen in transfer.wire"),
        (rows.request(53, first_token=False, outcome="lost"), "last seen in a step not known"),
    ],
)
def test_the_verdict_says_what_else_matters(row: dict[str, Any], words: str) -> None:
    assert words in verdict(row)


def test_the_verdict_of_a_request_in_flight_tells_for_how_long() -> None:
    said = verdict({**rows.LIVE, "in_flight": True}, AS_OF_NS)
    assert said.startswith(
        "No first token after 1.5 s; in transfer.dispatch for 1.4 s: both sides were ready"
    )


def test_after_long_the_verdict_is_that_the_other_side_is_missing() -> None:
    late = verdict({**rows.LIVE, "in_flight": True}, AS_OF_NS + 10**10)
    assert "the other side is gone, hangs or was never told" in late
    queued = {**rows.LIVE, "in_flight": True, "current_step": "registration.admit"}
    assert "more decode capacity" in verdict(queued, AS_OF_NS + 10**10), "a queue can be that long"


def test_of_nothing_there_is_no_verdict() -> None:
    assert verdict({"ttft_ns": 0}) == ""
