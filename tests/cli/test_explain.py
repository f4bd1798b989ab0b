"""Explanations, word for word. After a wanted change: `UPDATE_GOLDEN=1 pytest tests/cli/test_explain.py`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from kvscope import lookup
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
            "prediction, not validated: push would have taken 90.000 ms (-9.750), assuming D registered",
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
