"""Each named question: recorded events, the question, and the rows that are worked out by hand (`reference`);
and the same answer from a running daemon, its snapshot and a Parquet directory.
"""

from __future__ import annotations

import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pytest
import uvicorn

from kvscope import archive, client, lookup, query, schema, storefile
from kvscope.client import StoreFile
from kvscope.collectors.api import create_app
from kvscope.collectors.daemon import Collector, Daemon
from kvscope.collectors.rings import Rings
from kvscope.collectors.store import Store
from kvscope.demo.simulate import RecordedEngine, SimulatedEngine, Simulation, Truth
from kvscope.settings import Settings

from . import reference
from .reference import Row, Tables

MS, SECOND = 10**6, 10**9


class Recorded(NamedTuple):
    path: Path
    """The store."""
    truths: dict[str, Truth]
    """What was simulated, by the client's request id."""
    tables: Tables


def simulate(rings: Path) -> dict[str, Truth]:
    """Write rings of some seconds, two kinds of traffic: push to two decode engines, pull, failures, an
    abandoned request, sessions and local requests."""
    start = time.monotonic_ns() - 120 * SECOND
    push_p, push_d0, push_d1, pull_p, pull_d = (
        SimulatedEngine(name, mode, label="")
        for name, mode in zip(
            ("push-p", "push-d0", "push-d1", "pull-p", "pull-d"), ("push",) * 3 + ("pull",) * 2, strict=True
        )
    )
    kept_p, kept_d = (SimulatedEngine(n, "bidirectional", label="benchmark") for n in ("kept-p", "kept-d"))
    alone = SimulatedEngine("alone-d", "push", label="")
    pushes = [Simulation("push", seed, engines=(push_p, d)) for seed, d in enumerate((push_d0, push_d1))]
    pull = Simulation("pull", 2, engines=(pull_p, pull_d))
    kept = Simulation("bidirectional", 3, engines=(kept_p, kept_d))
    local = Simulation("push", 4, engines=(push_p, alone))
    pushes[1].stalls["registration.admit"] = 150 * MS
    truths = []
    for i in range(28):
        truths.append(pushes[i % 2].push(f"push{i}", start + i * 170 * MS, sequential=i % 5 == 0))
    for i in range(14):
        truths.append(pull.pull(f"pull{i}", start + 30 * MS + i * 310 * MS))
    truths += [pull.recompute(f"again{i}", start + 6 * SECOND + i * 400 * MS) for i in range(2)]
    truths.append(pull.abandon("left", start + 8 * SECOND))
    for session in range(2):
        turn = kept.pull(f"kept{session}-0", start + session * 800 * MS)
        truths.append(turn)
        for number in (1, 2):
            turn = kept.pull(f"kept{session}-{number}", turn.end_ns + 900 * MS, earlier=turn)
            truths.append(turn)
    # More events than its ring holds.
    truths += [local.local(f"local{i}", start + i * 100 * MS) for i in range(30)]
    for engine in (push_p, push_d0, push_d1, pull_p, pull_d, kept_p, kept_d, alone):
        recorded = RecordedEngine(engine, rings, 64 if engine is alone else 2048)
        recorded.write()
        recorded.close()
    return {truth.name: truth for truth in truths}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    folder = tmp_path_factory.mktemp("recorded")
    truths = simulate(folder / "rings")
    store = Store(folder / "s.duckdb")
    collector = Collector(Rings(folder / "rings", store), store)
    collector.scan()
    while collector.step():
        pass
    assert store.wait_committed(collector.finish(everything=True), 30)
    collector.rings.close()
    assert store.close()
    with duckdb.connect(str(folder / "s.duckdb"), read_only=True) as database:
        tables = {}
        for name in schema.BY_NAME:
            found = database.execute(f"FROM {name}")
            columns = [column[0] for column in found.description or []]
            tables[name] = [dict(zip(columns, row, strict=True)) for row in found.fetchall()]
    return Recorded(folder / "s.duckdb", truths, tables)


@pytest.fixture(scope="module")
def source(recorded: Recorded) -> Iterator[StoreFile]:
    opened = StoreFile(recorded.path)
    yield opened
    opened.close()


def test_what_was_simulated_is_what_was_stored(recorded: Recorded) -> None:
    whole = [r for r in reference.first_tokens(recorded.tables) if not r["client_id"].startswith("local")]
    assert len(whole) == 28 + 14 + 2 + 6
    for row in whole:
        truth = recorded.truths[row["client_id"]]
        assert row["ttft_ns"] == truth.ttft_ns
        assert row["lead_ns"] == truth.lead_ns or truth.lead_ns is None
    assert len(recorded.tables["requests"]) > len(whole) + 5
    assert {r["outcome"] for r in recorded.tables["requests"]} > {"finished"}


KEYS = (
    "label level connector model p_engine d_engine step part class band at_ns from_tokens outcome detail "
    "joined_by id session kind engine source rank peer operation lease_end reuse_outcome side transfers "
    "in_flight_from name"
)
"""Columns by which rows are told apart."""


def key(row: Row, columns: Collection[str]) -> str:
    return str(
        [
            (name, row[name])
            for name in sorted(set(KEYS.split()) & set(columns))
            if not isinstance(row[name], float)
        ]
    )


def close(name: str, found: Any, wanted: Any) -> bool:
    """Equal, but for the digits that the question rounds to."""
    if isinstance(found, float) and isinstance(wanted, (int, float)):
        digits = 2 if name.endswith(("_percent", "arrivals_per_s")) else 1 if name.endswith("_tokens") else 3
        return math.isclose(found, wanted, rel_tol=1e-9, abs_tol=0.51 * 10**-digits)
    if name == "fingerprint":
        return bool(json.loads(found) == wanted)
    return bool(found == wanted)


NOT_COMPUTED = {"unseen": {"detail", "meaning"}}
"""Columns that are words."""


@pytest.mark.parametrize("name", query.questions())
def test_each_question_answers_what_is_worked_out_by_hand(
    recorded: Recorded, source: StoreFile, name: str
) -> None:
    question = query.questions()[name]
    answer = source.query(name, "", {"limit": 1000} if name in ("sessions", "failures") else {})
    assert (answer["truncated"], answer["approximate"]) == (False, "")
    columns = [column["name"] for column in answer["columns"]]
    types = {column["name"]: column["type"] for column in answer["columns"]}
    found = [dict(zip(columns, row, strict=True)) for row in answer["rows"]]
    wanted = getattr(reference, name)(recorded.tables)
    assert wanted, "the recorded events are such that each question has an answer"
    for row in wanted:
        for column, value in row.items():
            row[column] = query.plain(value, types[column])
        assert set(row) | NOT_COMPUTED.get(name, set()) == set(question.columns)
    if name == "slowest":
        assert [row["id"] for row in found] == [row["id"] for row in wanted]
    computed = list(wanted[0])
    found.sort(key=lambda row: key(row, computed))
    wanted.sort(key=lambda row: key(row, computed))
    assert [key(row, computed) for row in found] == [key(row, computed) for row in wanted]
    for one, other in zip(found, wanted, strict=True):
        differ = {c: (one[c], other[c]) for c in computed if not close(c, one[c], other[c])}
        assert not differ, key(one, computed)


# --- wherever it is asked ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sources(
    recorded: Recorded, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[client.Daemon, StoreFile, StoreFile]]:
    """A running daemon on a copy of the store, its snapshot, and a Parquet directory written from it."""
    folder = tmp_path_factory.mktemp("sources")
    (folder / "s.duckdb").write_bytes(recorded.path.read_bytes())
    daemon = Daemon(Settings(dir=folder / "rings", store=folder / "s.duckdb", sample_seconds=0))
    daemon.start()
    api = uvicorn.Server(uvicorn.Config(create_app(daemon), log_level="error"))
    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=api.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    asked = client.Daemon(f"http://127.0.0.1:{listener.getsockname()[1]}")
    while not api.started:
        time.sleep(0.01)
    daemon.snapshot(folder / "snapshot.duckdb")
    with duckdb.connect(str(folder / "snapshot.duckdb"), read_only=True) as database:
        for _ in archive.write(archive.Archive(folder / "archive", "test"), database, storefile.relation):
            pass
    files = StoreFile(folder / "snapshot.duckdb"), StoreFile(folder / "archive")
    yield asked, *files
    for one in (asked, *files):
        one.close()
    api.should_exit = True
    thread.join(10)
    daemon.stop()


def windows(tables: Tables, name: str) -> Iterator[dict[str, Any]]:
    """All, and a part by each parameter that the question takes."""
    takes = query.questions()[name].parameters
    at = sorted(row["arrived_at_ns"] for row in tables["requests"])
    yield {}
    parts = {
        "since": at[len(at) // 4],
        "until": at[3 * len(at) // 4],
        "label": "",
        "where": ["ttft_ns>100ms"],
    }
    if given := {parameter: value for parameter, value in parts.items() if parameter in takes}:
        yield given


@pytest.mark.parametrize("name", query.questions())
def test_daemon_snapshot_and_archive_give_the_same_answer(
    recorded: Recorded, sources: Sequence[client.Daemon | StoreFile], name: str
) -> None:
    for parameters in windows(recorded.tables, name):
        answers = [source.query(name, "", parameters) for source in sources]
        for answer in answers:
            del answer["elapsed_ms"]
        assert answers[0]["rows"] or parameters
        assert answers[1] == answers[0], "snapshot"
        assert answers[2] == answers[0], "archive"


def test_a_request_is_the_same_wherever_it_is_asked_for(
    recorded: Recorded, sources: Sequence[client.Daemon | StoreFile]
) -> None:
    told = next(row for row in recorded.tables["requests"] if row["client_id"] == "pull3")
    for text in (str(told["id"]), "pull3", told["p_request"], told["d_request"], told["d_request"][:-3]):
        found = [source.request(text) | {"as_of_ns": 0} for source in sources]
        assert found[0]["request"]["id"] == str(told["id"])
        assert found[0] == found[1] == found[2]
        assert (len(found[0]["transfers"]), len(found[0]["leases"])) == (1, 1)


# --- many requests -----------------------------------------------------------------------------------


def test_percentiles_of_many_rows_are_approximate_and_say_so(
    recorded: Recorded, source: StoreFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = source.query("ttft", "", {})
    assert exact["approximate"] == ""
    monkeypatch.setattr(query, "EXACT_ROWS", 10)
    sampled = source.query("ttft", "", {})
    assert "random samples" in sampled["approximate"]
    assert [row[:3] for row in sampled["rows"]] == [row[:3] for row in exact["rows"]]
    assert source.query("outcomes", "", {})["approximate"] == "", "it has no percentiles"
    own_sql = "SELECT quantile_cont(ttft_ns, 0.5) FROM requests"
    assert source.query("", own_sql, {})["approximate"] == "", "a user's own SQL is run as it is"
    few = source.query("ttft", "", {"where": ["connector=local"]})
    assert few["approximate"] == ""


def test_of_many_requests_an_even_sample_is_looked_at_and_that_is_said(tmp_path: Path) -> None:
    with duckdb.connect(str(tmp_path / "s.duckdb")) as database:
        storefile.create_tables(database)
        database.execute(
            "INSERT INTO requests (id, arrived_at_ns, label, connector, ttft_ns, prefill_compute_ns) "
            "SELECT hash(range), range * 1000000, '', if(range % 10 = 0, 'pull', 'push'), range, range "
            "FROM range(1, 70001)"
        )
    source = StoreFile(tmp_path / "s.duckdb")
    answer = source.query("step_intervals", "", {})
    assert "one_in" in answer["approximate"]
    columns = list(query.questions()["step_intervals"].columns)
    found = [dict(zip(columns, row, strict=True)) for row in answer["rows"]]
    (pull,) = (row for row in found if (row["connector"], row["part"]) == ("pull", "prefill.compute"))
    (push,) = (row for row in found if (row["connector"], row["part"]) == ("push", "prefill.compute"))
    assert (pull["one_in"], pull["requests"], pull["p50_ms"]) == (1, 7000, 0.035)
    assert push["one_in"] == 3
    assert push["requests"] == pytest.approx(63_000 / 3, rel=0.05)
    assert push["p50_low_ms"] < 0.035 < push["p50_high_ms"]
    assert push["p99_ms"] == pytest.approx(0.0693, rel=0.02)
    assert source.query("step_intervals", "", {})["rows"] == answer["rows"], "the same sample each time"
    source.close()


def test_requests_whose_end_was_not_observed_are_no_load_for_ever(tmp_path: Path) -> None:
    """Those of an engine that died would be in every later figure."""
    with duckdb.connect(str(tmp_path / "s.duckdb")) as database:
        storefile.create_tables(database)
        database.execute(
            "INSERT INTO requests (id, arrived_at_ns, outcome, ttft_ns, decode_generate_ns) "
            "SELECT range, range * 1000000000, if(range < 50, 'lost', 'finished'), 1000000, "
            "if(range < 50, NULL, 1000000) FROM range(1, 101)"
        )
    with contextlib.closing(StoreFile(tmp_path / "s.duckdb")) as source:
        load = source.query("coordination_load", "", {})
        workload = source.query("workload", "", {})
    columns = [column["name"] for column in load["columns"]]
    (row,) = load["rows"]
    assert (row[columns.index("in_flight_to")], row[columns.index("requests")]) == (0, 100)
    columns = [column["name"] for column in workload["columns"]]
    assert workload["rows"][0][columns.index("p50_in_flight")] == 0


def test_a_missing_request_is_said_to_be_missing(source: StoreFile) -> None:
    with pytest.raises(lookup.NotFound):
        source.request("cmpl-nobody-0-0badcafe")
