"""`/metrics`: it says what the store says, stays small whatever comes, and Prometheus can read it."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics
from starlette.testclient import TestClient

from kvscope import events, metrics, query
from kvscope.collectors import exposition
from kvscope.collectors.aggregates import FORGET_S, Aggregates
from kvscope.collectors.api import allowed_hosts, create_app
from kvscope.collectors.daemon import Daemon
from kvscope.collectors.exposition import Exposition, Now
from kvscope.collectors.request_counts import role_of
from kvscope.collectors.store import Row, Store
from kvscope.demo.simulate import Fleet, Simulation
from kvscope.ring import About, RingWriter
from kvscope.schema import TABLES, trace_id_of
from kvscope.settings import Settings
from kvscope.steps import BY_NAME, CLASSES, STEPS

from .collecting import ask, row, until

ROOT = Path(__file__).parent.parent.parent
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
MS = 10**6
SECOND = 10**9


class Scrape:
    """What one scrape told."""

    def __init__(self, text: bytes) -> None:
        self.text = text.decode()
        is_openmetrics = self.text.endswith("# EOF\n")
        parse = openmetrics if is_openmetrics else parser
        self.families = list(parse.text_string_to_metric_families(self.text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def all(self, name: str, **labels: str) -> list[Any]:
        return [s for s in self.samples if s.name == name and labels.items() <= s.labels.items()]

    def total(self, name: str, **labels: str) -> float:
        """The sum over all series of a name that carry these labels."""
        return sum(sample.value for sample in self.all(name, **labels))

    def by(self, name: str, *labels: str) -> dict[tuple[str, ...], float]:
        found: Counter[tuple[str, ...]] = Counter()
        for sample in self.all(name):
            found[tuple(sample.labels[label] for label in labels)] += sample.value
        return {key: value for key, value in found.items() if value}

    def values(self, label: str) -> set[str]:
        return {sample.labels[label] for sample in self.samples if label in sample.labels}


def scrape(daemon: Daemon, accept: str = OPENMETRICS) -> Scrape:
    daemon._exposition._made_at = float("-inf")
    return Scrape(daemon.metrics(accept)[0])


def settings(path: Path) -> Settings:
    return Settings(dir=path / "rings", store=path / "s.duckdb", sample_seconds=0)


def record_sessions(fleet: Fleet, count: int) -> None:
    """Bidirectional: first turns, and second ones that read their KV back."""
    simulation = fleet.simulation
    assert isinstance(simulation, Simulation)
    for i in range(count):
        first = simulation.pull(f"first{i}", fleet.now_ns)
        simulation.pull(f"second{i}", first.end_ns + 5 * MS, first)
        fleet.now_ns += 7 * MS
    fleet.write()


class Scene:
    """A daemon that has collected requests of every connector, and its last scrape."""

    def __init__(self, path: Path) -> None:
        rings = path / "rings"
        fleets = [Fleet(rings, mode, 1 << 15, seed) for seed, mode in enumerate(MODES)]
        for fleet in fleets:
            for _ in range(40):
                fleet.request()
        for i in range(10):
            fleets[0].simulation.local(f"local{i}", fleets[0].now_ns)
            fleets[1].simulation.recompute(f"recomputed{i}", fleets[1].now_ns)
        fleets[0].simulation.stalls["transfer.dispatch"] = 12 * SECOND
        fleets[0].request()  # its lease is renewed
        fleets[1].simulation.abandon("abandoned", fleets[1].now_ns)
        for fleet in fleets:
            fleet.write()
        record_sessions(fleets[2], 10)
        self.requests = 3 * 40 + 10 + 10 + 1 + 1 + 20
        self.daemon = Daemon(settings(path))
        self.daemon.start()
        try:
            until(lambda: scrape(self.daemon).total("kvscope_requests_total") == self.requests)
            self.scrape = scrape(self.daemon)
            self.store: Store = self.daemon._store
        except BaseException:
            self.daemon.stop()
            raise

    def sql(self, sql: str) -> dict[tuple[Any, ...], Any]:
        """Rows by all but their last column."""
        return {found[:-1]: found[-1] for found in ask(self.store, sql)}


MODES = ("push", "pull", "bidirectional")


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    made = Scene(tmp_path_factory.mktemp("scene"))
    yield made
    made.daemon.stop()


# --- they say what the store says ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "labels", "sql"),
    [
        (
            "requests_total",
            ("connector", "outcome"),
            "SELECT connector, outcome, count(*) FROM requests GROUP BY ALL",
        ),
        (
            "joins_total",
            ("connector", "joined_by"),
            "SELECT connector, joined_by, count(*) FROM requests GROUP BY ALL",
        ),
        ("ttft_seconds_count", ("connector",), "SELECT connector, count(ttft_ns) FROM requests GROUP BY ALL"),
        (
            "ttft_seconds_sum",
            ("connector",),
            "SELECT connector, sum(ttft_ns) / 1e9 FROM requests GROUP BY ALL",
        ),
        (
            "lead_seconds_bucket",
            ("connector",),
            "SELECT connector, sum(len([b FOR b IN [-10, -2.5, -1, -0.25, -0.1, -0.025, -0.01, 0, 0.01, "
            "0.025, 0.1, 0.25, 1, 2.5, 10, 'inf'::DOUBLE] IF lead_ns / 1e9 <= b])) FROM requests WHERE "
            "lead_ns NOTNULL GROUP BY ALL",
        ),
        (
            "lag_seconds_total",
            ("connector",),
            "SELECT connector, sum(greatest(0, -lead_ns)) / 1e9 AS lag FROM requests GROUP BY ALL HAVING "
            "lag > 0",
        ),
        (
            "tpot_seconds_sum",
            ("connector",),
            "SELECT connector, sum(decode_generate_ns / (output_tokens - 1)) / 1e9 FROM requests"
            " WHERE output_tokens > 1 AND decode_generate_ns NOTNULL GROUP BY ALL",
        ),
        (
            "output_tokens_total",
            ("connector",),
            "SELECT connector, sum(output_tokens) FROM requests GROUP BY ALL",
        ),
        (
            "recomputed_requests_total",
            ("connector",),
            "SELECT connector, count(*) FROM requests WHERE recomputed_tokens > 0 GROUP BY ALL",
        ),
        (
            "reuse_requests_total",
            ("outcome",),
            "SELECT coalesce(reuse_outcome, 'not offered'), count(*) FROM requests"
            " WHERE connector = 'bidirectional' GROUP BY ALL",
        ),
        (
            "reuse_offered_tokens_total",
            ("connector",),
            "SELECT connector, sum(reuse_offered_tokens) AS n FROM requests GROUP BY ALL HAVING n > 0",
        ),
        (
            "predicted_ttft_seconds_total",
            ("connector", "to"),
            "SELECT connector, 'push', sum(predicted_push_ttft_ns) / 1e9 AS s FROM requests GROUP BY ALL "
            "HAVING s > 0 UNION ALL SELECT connector, 'pull', sum(predicted_pull_ttft_ns) / 1e9 AS s FROM "
            "requests GROUP BY ALL HAVING s > 0",
        ),
        (
            "pair_requests_total",
            ("p_engine", "d_engine"),
            "SELECT p_engine, d_engine, count(*) FROM requests WHERE p_engine NOTNULL AND d_engine "
            "NOTNULL GROUP BY ALL",
        ),
        (
            "pair_transfer_bytes_total",
            ("p_engine", "d_engine"),
            "SELECT p_engine, d_engine, sum(transfer_bytes) FROM requests"
            " WHERE p_engine NOTNULL AND d_engine NOTNULL GROUP BY ALL",
        ),
        (
            "transfers_total",
            ("operation", "state"),
            "SELECT operation, state, count(*) FROM transfers GROUP BY ALL",
        ),
        ("transfer_bytes_total", ("operation",), "SELECT operation, sum(bytes) FROM transfers GROUP BY ALL"),
        (
            "transfer_descriptors_total",
            ("operation",),
            "SELECT operation, sum(descriptors) FROM transfers GROUP BY ALL",
        ),
        (
            "transfer_post_seconds_sum",
            ("operation",),
            "SELECT operation, sum(post_ns) / 1e9 FROM transfers GROUP BY ALL",
        ),
        (
            "transfer_wire_upper_seconds_sum",
            ("operation",),
            "SELECT operation, sum(wire_upper_ns) / 1e9 FROM transfers GROUP BY ALL",
        ),
        ("leases_total", ("engine", "end"), 'SELECT engine, "end", count(*) FROM leases GROUP BY ALL'),
        (
            "lease_renewals_total",
            ("engine",),
            "SELECT engine, sum(renewals) AS n FROM leases GROUP BY ALL HAVING n > 0",
        ),
        (
            "handshakes_total",
            ("engine", "result"),
            "SELECT engine, if(ok, 'ok', 'failed'), count(*) FROM handshakes GROUP BY ALL",
        ),
        ("handshake_seconds_sum", (), "SELECT sum(ns) / 1e9 FROM handshakes"),
        (
            "failures_total",
            ("engine", "kind", "name"),
            "SELECT engine, kind, name, count(*) FROM failures GROUP BY ALL",
        ),
        ("events_read_total", ("engine",), 'SELECT engine, sum("read") FROM engines GROUP BY ALL'),
    ],
)
def test_counts_are_those_of_the_store(scene: Scene, name: str, labels: Sequence[str], sql: str) -> None:
    told, stored = scene.scrape.by(f"kvscope_{name}", *labels), scene.sql(sql)
    assert stored
    assert told == pytest.approx({key: float(value) for key, value in stored.items()})


def test_every_step_is_that_of_the_store(scene: Scene) -> None:
    counts, sums, stored_counts, stored_sums = ({}, {}, {}, {})  # type: ignore[var-annotated]
    for step in STEPS:
        found = ask(
            scene.store,
            f"SELECT connector, count({step.column}), sum({step.column}) / 1e9 FROM requests"
            f" WHERE {step.column} NOTNULL GROUP BY ALL",
        )
        stored_counts.update({(connector, step.name): count for connector, count, _ in found})
        stored_sums.update({(connector, step.name): seconds for connector, _, seconds in found})
    counts = scene.scrape.by("kvscope_step_seconds_count", "connector", "step")
    sums = scene.scrape.by("kvscope_step_seconds_sum", "connector", "step")
    assert len(stored_counts) > 40
    assert counts == stored_counts
    assert sums == pytest.approx({key: value for key, value in stored_sums.items() if value})


def test_buckets_hold_what_they_say(scene: Scene) -> None:
    for sample in scene.scrape.all("kvscope_ttft_seconds_bucket"):
        ((stored,),) = ask(
            scene.store,
            f"SELECT count(*) FROM requests WHERE connector = '{sample.labels['connector']}'"
            f" AND ttft_ns / 1e9 <= '{sample.labels['le']}'::DOUBLE",
        )
        assert sample.value == stored, sample


def test_what_lies_on_a_bound_is_in_the_bucket_below() -> None:
    told = expose([{"requests": [request(1)]}])  # 5 ms in each step
    buckets = told.all("kvscope_step_seconds_bucket", step="prefill.queue")
    assert [s.value for s in buckets if s.labels["le"] in ("0.0025", "0.005")] == [0, 1]


def test_shares_of_totals_are_those_of_kvscope_query(scene: Scene) -> None:
    with scene.daemon.cursor() as cursor:
        answer = query.run_sql(cursor, query.questions()["fleet"].sql, {})
    rows = {found["connector"] or "all": found for found in answer.dicts() if found["level"] != "pair"}
    assert set(rows) == {"all", "local", *MODES}
    for connector, figures in rows.items():
        labels = {} if connector == "all" else {"connector": connector}
        whole = scene.scrape.total("kvscope_ttft_class_seconds_total", **labels)
        for class_ in CLASSES:
            part = scene.scrape.total("kvscope_ttft_class_seconds_total", **labels, **{"class": class_})
            assert 100 * part / whole == pytest.approx(figures[f"{class_}_percent"], abs=0.01), (
                connector,
                class_,
            )
        assert whole == pytest.approx(scene.scrape.total("kvscope_ttft_seconds_sum", **labels))
        split = scene.scrape.total("kvscope_ttft_split_seconds_sum", **labels)
        assert whole == pytest.approx(split)


def test_classes_of_pairs_add_up_to_their_ttft(scene: Scene) -> None:
    told = scene.scrape.by("kvscope_pair_ttft_class_seconds_total", "p_engine", "d_engine")
    stored = scene.sql(
        "SELECT p_engine, d_engine, sum(ttft_ns) / 1e9 FROM requests"
        " WHERE p_engine NOTNULL AND d_engine NOTNULL GROUP BY ALL"
    )
    assert told == pytest.approx(stored)


def test_prompt_tokens_by_source(scene: Scene) -> None:
    told = scene.scrape.by("kvscope_prompt_tokens_total", "connector", "source")
    (stored,) = ask(
        scene.store,
        "SELECT sum(prompt_tokens - p_cached_tokens - reuse_pulled_tokens), sum(reuse_pulled_tokens),"
        " (SELECT sum(recomputed_tokens) FROM requests), (SELECT sum(transferred_tokens) FROM requests"
        " WHERE connector = 'push') FROM requests WHERE reuse_outcome NOTNULL",
    )
    first_turns = ask(
        scene.store,
        "SELECT sum(prompt_tokens) FROM requests WHERE connector = 'bidirectional' AND reuse_outcome IS NULL",
    )[0][0]
    assert told["bidirectional", "computed"] == stored[0] + first_turns
    assert told["bidirectional", "read_back"] == stored[1] > 0
    assert told["pull", "recomputed"] == stored[2] > 0
    assert told["push", "transferred"] == stored[3] > 0


def test_rows_of_every_table_are_counted(scene: Scene) -> None:
    for table in TABLES:
        ((stored,),) = ask(scene.store, f"SELECT count(*) FROM {table.name}")
        told = scene.scrape.total("kvscope_stored_rows_total", table=table.name)
        if table.name in ("engines", "samples"):  # updated; still coming
            assert told > 0
        else:
            assert told == stored, table.name


def test_engines_are_described(scene: Scene) -> None:
    roles = scene.scrape.by("kvscope_engine_info", "engine", "role", "connector", "traffic", "model")
    assert roles["sim-p0-push", "prefill", "push", "simulated", "simulated/tiny"] == 1
    assert roles["sim-d2-bidirectional", "decode", "bidirectional", "simulated", "simulated/tiny"] == 1
    assert len(roles) == 6
    assert scene.scrape.total("kvscope_engine_processes", state="recording") == 12
    assert scene.scrape.total("kvscope_kv_blocks", engine="sim-p0-push", use="total") == 16384


def test_a_step_is_told_on_the_side_where_it_is_spent(scene: Scene) -> None:
    told = scene.scrape.by("kvscope_step_seconds_count", "connector", "step", "role")
    assert ("push", "transfer.wire", "prefill") in told
    assert ("pull", "transfer.wire", "decode") in told
    assert ("local", "prefill.compute", "both") in told
    assert {role_of(step, "push") for step in BY_NAME} == {"prefill", "decode", "unknown"}


# --- over time -----------------------------------------------------------------------------------------


def test_a_restart_counts_nothing_twice(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path / "rings", "push", 4096)
    for _ in range(5):
        fleet.request()
    first = Daemon(settings(tmp_path))
    first.start()
    until(lambda: scrape(first).total("kvscope_requests_total") == 5)
    assert first.stop()
    before = scrape(first)
    second = Daemon(settings(tmp_path))
    second.start()
    try:
        until(lambda: second.status()["pipeline"]["requests"] == 5)  # read again
        fleet.request()
        until(lambda: scrape(second).total("kvscope_requests_total") == 1)
        until(lambda: scrape(second).total("kvscope_leases_total") == 1)
        read = "kvscope_events_read_total"
        until(lambda: scrape(second).total(read) > before.total(read))  # these go on where they were
        after = scrape(second)
    finally:
        second.stop()
    assert after.total("kvscope_ttft_seconds_count") == 1
    assert after.total("kvscope_transfers_total") == 1


def test_retention_takes_nothing_off_the_counters(tmp_path: Path) -> None:
    counted = Aggregates()
    store = Store(tmp_path / "s.duckdb", retention_hours=1.0, on_commit=counted.add)
    ticket = store.put({"requests": [request(1, arrived_at_ns=1), request(2, arrived_at_ns=1)]})
    assert store.wait_committed(ticket, 30)
    until(lambda: ask(store, "SELECT count(*) FROM requests") == [(0,)])
    assert sum(counted.snapshot([]).counters["kvscope_requests_total"].values()) == 2
    assert store.close()


def test_rows_that_are_refused_or_known_do_not_count(tmp_path: Path) -> None:
    counted = Aggregates()
    store = Store(tmp_path / "s.duckdb", on_commit=counted.add)
    store.put({"requests": [request(1), request(2, prompt_tokens="no number")]})
    ticket = store.put({"requests": [request(1), request(3)]})
    assert store.wait_committed(ticket, 30)
    until(lambda: sum(counted.snapshot([]).counters["kvscope_stored_rows_total"].values()) == 2)
    assert sum(counted.snapshot([]).counters["kvscope_requests_total"].values()) == 2
    assert store.close()


def test_a_row_that_cannot_be_counted_costs_no_other(caplog: pytest.LogCaptureFixture) -> None:
    counted = Aggregates()
    counted.add(
        {"requests": [request(1, ttft_ns="no number"), request(2)], "leases": [lease("engine")]}, 0.01
    )
    told = counted.snapshot([]).counters
    assert told["kvscope_uncounted_rows_total"] == {(): 1}
    assert told["kvscope_leases_total"]["engine", "unknown", "released"] == 1
    assert told["kvscope_pair_requests_total"][("p", "d", *GROUP)] == 1
    assert [record.getMessage() for record in caplog.records] == [
        "a row of requests can't be counted (TypeError: unsupported operand type(s) for /: 'str' and 'float')"
    ]


def test_series_of_an_engine_go_after_its_rings(clock: Clock) -> None:
    counted = Aggregates(clock)
    for name in ("old", "new"):
        counted.add(
            {
                "engines": [engine(name, f"ring-{name}", read=10)],
                "requests": [request(hash(name) % 1000, p_engine=name, d_engine="d")],
                "leases": [lease(name)],
                "handshakes": [row("handshakes", engine=name, ns=5, ok=True)],
                "failures": [row("failures", engine=name, kind="nixl", name="transfer_failed")],
            },
            0.01,
        )
    counted.add({"engines": [engine("d", "ring-d")]}, 0.01)
    clock.now += FORGET_S - 1
    told = str(counted.snapshot(["ring-new", "ring-d"]))
    assert "'old'" in told, "a moment ago it was there"
    clock.now += 2
    snapshot = counted.snapshot(["ring-new", "ring-d"])
    assert "'old'" not in str((snapshot.counters, snapshot.engines))
    assert set(snapshot.engines) == {"new", "d"}
    assert [labels[0] for labels in snapshot.counters["kvscope_pair_requests_total"]] == ["new"]
    assert sum(snapshot.counters["kvscope_requests_total"].values()) == 2, "figures of no engine stay"
    clock.now += 10 * FORGET_S
    assert set(counted.snapshot(["ring-new", "ring-d"]).engines) == {"new", "d"}, "however idle"


def test_events_of_an_engine_that_began_anew_only_grow(clock: Clock) -> None:
    counted = Aggregates(clock)
    counted.add(
        {"engines": [engine("e", "first", read=10, state="gone"), engine("e", "second", read=1)]}, 0.01
    )
    key = ("e", "production")
    assert counted.snapshot(["first", "second"]).counters["kvscope_events_read_total"][key] == 11
    clock.now += FORGET_S + 1
    after = counted.snapshot(["second"])
    assert after.counters["kvscope_events_read_total"][key] == 11
    assert after.processes == {"recording": 1}


def test_stuck_requests_are_told_by_step(tmp_path: Path) -> None:
    begun_ns = time.monotonic_ns() - 60 * SECOND
    about = About("engine-p", events.SCHEDULER)
    ring = RingWriter(tmp_path / "rings", about, 64, clock=lambda: begun_ns)
    ring.record(events.REQUEST_ARRIVED, ring.text("cmpl-a-0-12345678"), 1, events.FLAG_REMOTE_DECODE, 100)
    fresh = RingWriter(tmp_path / "rings", About("engine-q", events.SCHEDULER), 64)
    fresh.record(events.REQUEST_ARRIVED, fresh.text("cmpl-b-0-12345678"), 1, events.FLAG_REMOTE_DECODE, 100)
    daemon = Daemon(settings(tmp_path))
    daemon.start()
    try:
        until(lambda: scrape(daemon).total("kvscope_requests_in_flight") == 2)
        told = scrape(daemon)
    finally:
        daemon.stop()
    assert told.by("kvscope_requests_stuck", "step") == {("prefill.queue",): 1}
    assert len(told.all("kvscope_requests_stuck")) == len(STEPS) + 1, "0 is told too"


# --- exemplars -----------------------------------------------------------------------------------------


def test_exemplars_lead_to_requests_of_their_bucket(scene: Scene) -> None:
    stored = {
        trace_id_of({"id": id_, "trace_id": None}): ns
        for id_, ns in ask(scene.store, "SELECT id, ttft_ns FROM requests")
    }
    found = 0
    below = 0.0
    for sample in scene.scrape.all("kvscope_ttft_seconds_bucket"):
        bound = float(sample.labels["le"])
        if sample.exemplar:
            ttft_s = stored[sample.exemplar.labels["trace_id"]] / 1e9
            assert (below if below < bound else 0) < ttft_s <= bound
            assert sample.exemplar.value == pytest.approx(ttft_s)
            found += 1
        below = bound if bound != float("inf") else 0.0
    assert found >= 8
    for name in (
        "kvscope_step_seconds_bucket",
        "kvscope_ttft_split_seconds_bucket",
        "kvscope_lead_seconds_bucket",
    ):
        assert any(sample.exemplar for sample in scene.scrape.all(name)), name
    assert "trace_id" not in scene.daemon.metrics("text/plain")[0].decode()


def test_the_trace_id_of_a_request() -> None:
    own = "0af7651916cd43dd8448eb211c80319c"
    assert trace_id_of({"id": 255, "trace_id": own}) == own
    assert trace_id_of({"id": 255, "trace_id": own.upper()}) == own
    for wrong in (None, "", "0" * 32, own[:-1], own + "\n", 'x"} 1\n', "g" * 32):
        assert trace_id_of({"id": 255, "trace_id": wrong}) == "0" * 30 + "ff"
    assert trace_id_of({"id": "18446744073709551615", "trace_id": None}) == "0" * 16 + "f" * 16


def test_exemplars_carry_the_own_trace_id() -> None:
    own = "0af7651916cd43dd8448eb211c80319c"
    told = expose([{"requests": [request(7, trace_id=own)]}])
    found = {s.exemplar.labels["trace_id"] for s in told.all("kvscope_ttft_seconds_bucket") if s.exemplar}
    assert found == {own}


# --- whatever comes --------------------------------------------------------------------------------------


def fleet_of(p: int, d: int, connectors: Sequence[str], label: str = "") -> dict[str, list[Row]]:
    """Rows of every P → D pair with every connector: all steps, failures, leases, handshakes."""
    names = [f"p-{i}" for i in range(p)] + [f"d-{i}" for i in range(d)]
    requests, transfers = [], []
    for i in range(p):
        for j in range(d):
            for connector in connectors:
                number = len(requests)
                requests.append(
                    request(number, connector=connector, p_engine=f"p-{i}", d_engine=f"d-{j}", label=label)
                )
                operation = "WRITE" if connector == "push" else "READ"
                times = dict.fromkeys(("post_ns", "wire_lower_ns", "wire_upper_ns"), 5 * MS)
                transfers.append(
                    row(
                        "transfers",
                        id=number,
                        operation=operation,
                        engine=f"d-{j}",
                        state="done",
                        bytes=1,
                        **times,
                    )
                )
    for connector in ("local",) if connectors else ():
        requests.append(request(10**6, connector=connector, p_engine=None, d_engine="d-0", label=label))
    return {
        "engines": [
            engine(name, f"{name}-{source}", source=source, label=label)
            for name in names
            for source in ("scheduler", "worker")
        ],
        "requests": requests,
        "transfers": transfers,
        "leases": [lease(f"p-{i}") for i in range(p)],
        "handshakes": [row("handshakes", engine=f"d-{j}", ok=True, ns=MS) for j in range(d)],
    }


def test_all_pairs_of_64_engines_have_series_of_their_own() -> None:
    told = expose([fleet_of(32, 32, ["push"])])
    assert len(told.by("kvscope_pair_requests_total", "p_engine", "d_engine")) == 32 * 32
    assert "other" not in told.values("p_engine") | told.values("connector") | told.values("engine")
    assert len(told.samples) <= 10_000


def test_no_more_than_10000_series_for_64_engines_with_3_connectors() -> None:
    rows = fleet_of(32, 32, MODES)
    told = expose([rows])
    assert len(told.samples) <= 10_000
    assert len(told.samples) == told.total("kvscope_series") + 1
    assert told.values("connector") == {*MODES, "local"}
    pairs = told.by("kvscope_pair_requests_total", "p_engine", "d_engine")
    assert pairs["other", "other"] > 0
    assert sum(pairs.values()) == len(rows["requests"]) - 1, "none is left out"


def test_series_stay_bounded_whatever_the_rings_hold() -> None:
    many = [
        fleet_of(32, 32, MODES),
        *(fleet_of(2, 2, MODES, label=f"label {i}") for i in range(40)),
        {"requests": [request(i, model=f"model {i}", connector="odd") for i in range(500)]},
        {"requests": [request(i, p_engine=f"engine {i}") for i in range(2000)]},
        {"engines": [engine(f"engine {i}", f"ring {i}") for i in range(500)]},
        {"leases": [lease(f"engine {i}") for i in range(500)]},
        {
            "failures": [
                row("failures", engine=f"engine {i}", kind="nixl", name=f"name {i}") for i in range(500)
            ]
        },
    ]
    told = expose(many)
    assert len(told.samples) <= 10_000
    requests = sum(len(rows.get("requests", ())) for rows in many)
    assert told.total("kvscope_requests_total") == requests
    assert told.total("kvscope_failures_total") == 500
    assert told.total("kvscope_leases_total") == 32 + 40 * 2 + 500
    assert told.values("connector") >= {"push", "pull", "bidirectional", "other"}


HOSTILE = (
    'quote " and \\ and\nnewline',
    "x" * 5000,
    "\x1b[31mred\x00",
    "\ud800 surrogate",
    "a{b}=,c",
    "",
    "Ω é",
    "\u2028line",
)


def test_hostile_names_stay_on_their_line() -> None:
    rows = {
        "engines": [engine(name, f"ring {i}", label=name, host=name) for i, name in enumerate(HOSTILE)],
        "requests": [
            request(i, p_engine=name, d_engine=name, model=name, label=name, outcome=name, joined_by=name)
            for i, name in enumerate(HOSTILE)
        ],
        "failures": [row("failures", engine=name, kind="nixl", name=name) for name in HOSTILE],
    }
    for accept in (OPENMETRICS, "text/plain"):
        told = expose([rows], accept)
        for value in {value for sample in told.samples for value in sample.labels.values()}:
            assert value.isprintable()
            assert len(value) <= 128
        assert told.total("kvscope_requests_total") == len(HOSTILE)
        assert 'quote " and \\ and\N{REPLACEMENT CHARACTER}newline' in told.values("engine")


def test_empty_daemon(tmp_path: Path) -> None:
    daemon = Daemon(settings(tmp_path))
    told = scrape(daemon)
    daemon.stop()
    assert told.total("kvscope_requests_in_flight") == 0
    assert told.total("kvscope_build_info") == 1


# --- the answer ----------------------------------------------------------------------------------------


def test_text_or_openmetrics_as_accepted(scene: Scene) -> None:
    prometheus = (
        "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
        "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
    )
    for accept, expected in (
        (prometheus, "application/openmetrics-text; version=1.0.0"),
        ("text/plain", "text/plain; version=0.0.4"),
        ("", "text/plain; version=0.0.4"),
        ("application/openmetrics-text; version=no.number", "text/plain; version=0.0.4"),
        (",;=" * 1000, "text/plain; version=0.0.4"),
    ):
        text, content_type = scene.daemon.metrics(accept)
        assert content_type.startswith(expected), accept
        assert text.endswith(b"# EOF\n") == ("openmetrics" in content_type)


def test_scrapes_of_one_second_share_one_answer(clock: Clock) -> None:
    made = Counter[str]()

    def now() -> Now:
        made["now"] += 1
        return NOTHING

    exposed = Exposition(Aggregates(), now, clock)
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(exposed.answer(OPENMETRICS))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made["now"] == 1
    assert len(set(answers)) == 1
    exposed.answer("text/plain")
    assert made["now"] == 1
    clock.now += 1.0
    exposed.answer(OPENMETRICS)
    assert made["now"] == 2


def test_a_scrape_asks_the_store_nothing(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the store was asked")

    monkeypatch.setattr(Store, "cursor", fail)
    assert scrape(scene.daemon).total("kvscope_requests_total") == scene.requests


def test_over_http_with_the_guard_of_the_other_routes(scene: Scene) -> None:
    app = create_app(scene.daemon, hosts=allowed_hosts("127.0.0.1"))
    client = TestClient(app, base_url="http://localhost:9177")
    answer = client.get("/metrics", headers={"Accept": OPENMETRICS})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert Scrape(answer.content).total("kvscope_requests_total") == scene.requests
    assert client.get("/metrics", headers={"Host": "evil.example"}).status_code == 403
    anywhere = TestClient(
        create_app(scene.daemon, hosts=allowed_hosts("0.0.0.0")), base_url="http://node-7:9177"
    )
    assert anywhere.get("/metrics").status_code == 200
    at_address = create_app(scene.daemon, hosts=allowed_hosts("10.0.0.5"))
    assert TestClient(at_address, base_url="http://10.0.0.5:9177").get("/metrics").status_code == 200


# --- what is defined -------------------------------------------------------------------------------------


def test_every_metric_is_told_and_documented(scene: Scene) -> None:
    page = (ROOT / "docs" / "metrics.md").read_text("utf-8")
    assert [one.name for one in metrics.METRICS if f"`{one.name}`" not in page] == []
    defined = {one.name.removesuffix("_total"): one for one in metrics.METRICS}
    assert len(defined) == len(metrics.METRICS), "two have one name"
    told = {family.name: family for family in scene.scrape.families}
    assert set(told) == set(defined)
    for name, family in told.items():
        one = defined[name]
        assert (family.type, family.documentation) == (one.kind, one.help)
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(one.labels), sample.name


def test_names_are_as_prometheus_wants_them() -> None:
    for one in metrics.METRICS:
        assert re.fullmatch(r"kvscope_[a-z][a-z_]*", one.name), one.name
        assert one.name.endswith("_total") == (one.kind == metrics.COUNTER), one.name
        assert one.help.endswith("."), one.name
        assert not {"instance", "job", "le", "quantile"} & set(one.labels), one.name
        assert not {label for label in one.labels if "request" in label}, one.name
        assert list(one.buckets) == sorted(set(one.buckets)), one.name
        assert (one.kind == metrics.HISTOGRAM) == bool(one.buckets), one.name
        if one.kind == metrics.HISTOGRAM:
            assert "engine" not in one.labels, f"{one.name}: engines on counters only"


def test_promtool_finds_nothing_to_say(scene: Scene) -> None:
    found = subprocess.run(
        [ROOT / "tests" / "promtool.sh", ROOT / "build" / "prometheus"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        pytest.skip(found.stderr.strip())
    text = scene.daemon.metrics("text/plain")[0]
    checked = subprocess.run(
        [found.stdout.strip(), "check", "metrics"], input=text, capture_output=True, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


# --- made by hand ----------------------------------------------------------------------------------------

GROUP = ("push", "model", "production")
NOTHING = Now(
    {
        "version": "0",
        "problems": [],
        "rings": [],
        "unreadable": [],
        "store": {"bytes": 0, "rows_refused": 0, "rows_queued": 0, "queue_limit": 1, "error": ""},
        "pipeline": {"live": 0, "faults": 0, "untold": 0, "cleanup_requests": 0, "stragglers": 0},
        "samples": {"dropped": 0, "faults": {}},
    },
    Counter(),
    Counter(),
    [],
)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def expose(batches: Sequence[dict[str, list[Row]]], accept: str = OPENMETRICS) -> Scrape:
    """What is told once these rows are committed; all rings are there still, and blocks are sampled."""
    counted = Aggregates()
    for rows in batches:
        counted.add(rows, 0.01)
    rings = [{"ring": one[1], "engine": one[2]} for rows in batches for one in rows.get("engines", ())]
    samples = [
        exposition.Sample(0, "", ring["engine"], source, 0, name, "", 1.0)
        for ring in rings
        for source, name in (
            ("", "kv_blocks.total"),
            ("", "kv_blocks.running"),
            ("", "kv_blocks.staging"),
            ("", "kv_blocks.kept"),
            ("scheduler", "engine.step_ns"),
            ("worker", "engine.hook_share"),
        )
    ]
    now = NOTHING._replace(status={**NOTHING.status, "rings": rings}, samples=samples)
    return Scrape(Exposition(counted, lambda: now).answer(accept)[0])


def request(id_: int, **values: Any) -> Row:
    """A row with every step, 5 ms each; in reach of the connector where it names one."""
    connector = values.get("connector", "push")
    steps = [
        step
        for step in STEPS
        if (connector == "bidirectional" or not step.name.startswith("prefill.reuse"))
        and (connector == "push" or step.name not in ("registration.notify", "readiness.signal"))
        and (connector != "local" or step.stage in ("prefill", "decode"))
    ]
    known = {
        "id": id_,
        "client_id": str(id_),
        "arrived_at_ns": 1_700_000_000 * SECOND,
        "label": "",
        "model": "model",
        "connector": "push",
        "outcome": "finished",
        "joined_by": "remote id",
        "read_after_expiry": False,
        "p_engine": "p",
        "d_engine": "d",
        "prompt_tokens": 100,
        "output_tokens": 10,
        "p_cached_tokens": 0,
        "d_cached_tokens": 0,
        "transferred_tokens": 100,
        "recomputed_tokens": 0,
        "reuse_outcome": "pulled" if connector == "bidirectional" else None,
        "reuse_pulled_tokens": 0,
        "preemptions": 0,
        "transfer_bytes": 1000,
        "transfer_descriptors": 4,
        "ttft_ns": 5 * MS * sum(step.in_ttft for step in steps),
        "lead_ns": 5 * MS,
        "predicted_push_ttft_ns": None if connector == "push" else 100 * MS,
        "predicted_pull_ttft_ns": 100 * MS if connector == "push" else None,
        "clock_error_ns": 0,
        "clamped_ns": 0,
        **{step.column: 5 * MS for step in steps},
    }
    return row("requests", **{**known, **values})


def engine(name: str, ring: str, **values: Any) -> Row:
    known = {
        "id": hash(ring) & (1 << 63) - 1,
        "ring": ring,
        "engine": name,
        "source": "scheduler",
        "rank": 0,
        "host": "host",
        "started_at_ns": 1,
        "label": "",
        "kvscope": "1",
        "hooks_missing": [],
        "fingerprint": "{}",
        "next_seq": 1,
        "read": 1,
        "lost": 0,
        "torn": 0,
        "rejected": 0,
        "state": "recording",
    }
    return row("engines", **{**known, **values})


def lease(engine: str) -> Row:
    times = {"armed_at_ns": 1, "deadline_at_ns": 30 * SECOND, "ended_at_ns": 20 * SECOND}
    return row("leases", engine=engine, end="released", renewals=1, **times)
