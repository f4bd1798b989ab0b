"""`kvscope whatif`: what each scenario makes of requests whose answer is known."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvscope import cli, schema
from kvscope.analysis import whatif
from kvscope.client import StoreFile
from kvscope.query import QueryError
from kvscope.regret import Regrets

from ..cli import rows
from .made import Row, store

MS = 1_000_000


def asked(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """The scenarios by name."""
    assert cli.main(["whatif", "--db", str(path), "--json", *arguments]) == 0
    return {s["scenario"]: s for s in json.loads(capsys.readouterr().out)["scenarios"]}


def pulled(number: int, decode_ms: float = 10, **columns: Any) -> Row:
    return rows.request(
        number,
        ("prefill.frontend", 0, 2),
        ("prefill.compute", 2, 52),
        ("registration.route", 52, 57),
        ("registration.admit", 57, 60),
        ("transfer.post", 60, 61),
        ("transfer.wire", 61, 81),
        ("readiness.detect", 81, 90),
        ("decode.first_step", 90, 90 + decode_ms),
        **{"connector": "pull", "predicted_push_ttft_ns": round((82 + decode_ms) * MS)} | columns,
    )


def test_the_other_connector_is_of_the_requests_that_have_a_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = [pulled(i, decode_ms=i) for i in range(1, 102)]
    made += [pulled(200, predicted_push_ttft_ns=None), pulled(201, outcome="in flight")]
    found = asked(capsys, store(tmp_path / "s.duckdb", made))["push"]
    assert found["requests"] == 101
    assert found["now_p50_ns"] == (90 + 51) * MS
    assert found["predicted_p50_ns"] == (82 + 51) * MS
    assert found["now_p90_ns"] - found["predicted_p90_ns"] == 8 * MS
    assert found["mean_shift_ns"] == -8 * MS


def test_without_coordination_is_ttft_without_its_coordination_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = asked(capsys, store(tmp_path / "s.duckdb", [pulled(1)]))["no-coordination"]
    assert found["now_p50_ns"] - found["predicted_p50_ns"] == (2 + 5 + 9) * MS


def test_the_best_rate_saves_only_proven_wire(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = pulled(1, transfer_bytes=10**6, best_rate_bytes_per_s=1e8)  # 10 ms
    # Two ranks: 500 kB each at that rate take 5 ms of the 21 ms of posting and wire.
    moved = [
        rows.TRANSFERS[1]
        | {"id": 100 + rank, "request_id": fast["id"], "rank": rank, "bytes": 500_000}
        | {"posted_at_ns": fast["arrived_at_ns"]}
        for rank in range(2)
    ]
    found = asked(capsys, store(tmp_path / "a.duckdb", [fast], transfers=moved))["best-rate"]
    assert found["mean_shift_ns"] == -(21 - 5) * MS
    found = asked(capsys, store(tmp_path / "b.duckdb", [fast]))["best-rate"]
    assert found["mean_shift_ns"] == -(21 - 10) * MS, "without the transfers, all bytes"


def turn(number: int, at_s: float, outcome: str, pulled_tokens: int, offered: int, **columns: Any) -> Row:
    """100 tokens are computed in 50 ms where nothing is read back; reading back takes 6 ms."""
    back = 6 if outcome == "pulled" else 0
    compute = (columns.get("prompt_tokens", 512) - pulled_tokens) / 10
    return rows.request(
        number,
        ("prefill.reuse_wire", 0, back),
        ("prefill.compute", back, back + compute),
        ("decode.first_step", back + compute, back + compute + 10),
        ("decode.generate", back + compute + 10, 1000),
        connector="bidirectional",
        session=7,
        turn=number,
        arrived_at_ns=rows.T0_NS + round(at_s * 1e9),
        reuse_outcome=outcome,
        reuse_pulled_tokens=pulled_tokens,
        reuse_offered_tokens=offered,
        **columns,
    )


TURNS = [
    turn(1, 0, "below threshold", 0, 100),
    turn(2, 3, "pulled", 400, 400),  # 2 s after the end of the one before
    turn(3, 14, "pulled", 200, 200),  # 10 s
    turn(4, 45, "expired", 0, 300),  # 30 s
]


def test_a_higher_threshold_computes_what_was_read_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store(tmp_path / "s.duckdb", TURNS)
    found = asked(capsys, path, "--threshold", "300")["threshold"]
    assert found["requests"] == 1
    assert found["mean_shift_ns"] == (20 - 6) * MS, "200 tokens at 0.1 ms, and no wait of 6 ms"


def test_a_lower_threshold_reads_back_what_was_computed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store(tmp_path / "s.duckdb", TURNS)
    found = asked(capsys, path, "--threshold", "64")["threshold"]
    assert (found["requests"], found["mean_shift_ns"]) == (1, -(10 - 6) * MS)
    assert asked(capsys, path, "--threshold", "150")["threshold"]["requests"] == 0, (
        "nothing is decided otherwise"
    )


def test_another_ttl_is_held_against_the_pauses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store(tmp_path / "s.duckdb", TURNS)
    found = asked(capsys, path, "--ttl", "5")["ttl"]
    assert (found["requests"], found["mean_shift_ns"]) == (1, (20 - 6) * MS)
    found = asked(capsys, path, "--ttl", "1m")["ttl"]
    assert (found["requests"], found["mean_shift_ns"]) == (1, -(30 - 6) * MS)
    assert asked(capsys, path, "--ttl", "20")["ttl"]["requests"] == 0


def many(seed: int) -> list[Row]:
    """Requests of several groups on three decoders, waiting in all of D's capacity steps."""
    rng = random.Random(seed)
    made = []
    for number in range(300):
        at, waits = rng.randrange(0, 4000), [rng.randrange(0, 90) for _ in range(3)]
        prefill, overlapped = rng.randrange(1, 80), rng.random() < 0.3
        start = 5 if overlapped else prefill
        bounds = [start, start + waits[0], start + waits[0] + waits[1]]
        ready = max(prefill, bounds[2])
        more = ("overlapped",) if overlapped else ()
        made.append(
            rows.request(
                number,
                ("prefill.compute", 0, prefill),
                ("registration.admit", bounds[0], bounds[1], *more),
                ("registration.blocks", bounds[1], bounds[2], *more),
                ("readiness.admit", ready, ready + waits[2]),
                ("decode.first_step", ready + waits[2], ready + waits[2] + 10),
                arrived_at_ns=rows.T0_NS + at * MS,
                d_engine=f"d{rng.randrange(3)}",
                connector=rng.choice(("push", "pull")),
                model=rng.choice(("tiny", "large")),
                unknown_ns=1 if rng.random() < 0.1 else None,
                ttft_ns=10**9,
            )
        )
    return made


@pytest.mark.parametrize("seed", range(5))
def test_regret_of_stored_requests_is_the_metrics(tmp_path: Path, seed: int) -> None:
    """SQL and `kvscope.regret` say the same of each request."""
    made = many(seed)
    regrets = Regrets()
    for row in made:
        regrets.add(row, (row["connector"], row["model"]), row["arrived_at_ns"] / 1e9 + 60)
    told = sorted(one.regret_ns for one in regrets.judged(2**40))
    source = StoreFile(store(tmp_path / "s.duckdb", made))
    sql = f"SELECT regret_ns FROM ({whatif.REGRETS_SQL}) WHERE regret_ns IS NOT NULL"
    found = source.query("", sql, {})["rows"]
    assert sorted(row[0] for row in found) == told
    assert any(regret > 0 for regret in told)


@pytest.mark.parametrize("seed", range(3))
def test_the_named_question_regret_agrees(tmp_path: Path, seed: int) -> None:
    made = many(seed)
    regrets = Regrets()
    for row in made:
        regrets.add(row, (row["connector"], row["model"]), row["arrived_at_ns"] / 1e9 + 60)
    told: dict[str, list[int]] = {}
    for one in regrets.judged(2**40):
        told.setdefault(one.group[0], []).append(one.regret_ns)
    source = StoreFile(store(tmp_path / "s.duckdb", made))
    answer = source.query("regret", "", {})
    names = [column["name"] for column in answer["columns"]]
    found = {row["connector"]: row for row in (dict(zip(names, r, strict=True)) for r in answer["rows"])}
    assert found.keys() == told.keys()
    for connector, regret in told.items():
        assert found[connector]["compared"] == len(regret)
        assert found[connector]["regretted"] == sum(one > 0 for one in regret)
        assert found[connector]["total_regret_s"] == round(sum(regret) / 1e9, 3)


def test_another_decoder_takes_the_regret_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store(tmp_path / "s.duckdb", many(1))
    found = asked(capsys, path, "--where", "connector=pull")["decoder"]
    assert found["requests"] > 20
    assert found["mean_shift_ns"] < 0
    alone = asked(capsys, path, "--where", "d_engine=d1")["decoder"]
    assert alone["requests"] == 0, "one decoder: nothing to compare with"


def test_the_figure_is_told_as_last_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    figures = {
        "measured_at": "2026-01-02",
        "kvscope": "9",
        "vllm": "8",
        "nixl": "7",
        "how": "a way",
        "scenarios": [{"scenario": "push", "error_percent": -3.25}],
    }
    monkeypatch.setattr(whatif, "figures", lambda: figures)
    path = store(tmp_path / "s.duckdb", [pulled(1)])
    found = asked(capsys, path)
    assert found["push"]["validated"]["error_percent"] == -3.25
    assert found["pull"]["validated"] is None
    assert cli.main(["whatif", "--db", str(path)]) == 0
    out = capsys.readouterr().out
    assert "-3.2 %" in out
    assert "not validated" in out
    assert "It applies to no request" in out
    assert "2026-01-02" in out
    assert "Of 1 requests only" in out


def test_a_scenario_that_takes_too_long_does_not_hide_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = whatif.ask

    def slow(source: Any, sql: str, parameters: Any) -> Any:
        if "handover_ns" in sql:
            raise QueryError("the query was stopped after 10 s")
        return ask(source, sql, parameters)

    monkeypatch.setattr(whatif, "ask", slow)
    path = store(tmp_path / "s.duckdb", [pulled(1)])
    assert cli.main(["whatif", "--db", str(path)]) == 0
    out = capsys.readouterr().out
    assert "Not answered: the query was stopped after 10 s." in out
    found = asked(capsys, path)
    assert (found["decoder"]["requests"], found["push"]["requests"]) == (None, 1)


def test_a_simulated_store_is_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = rows.engine(1, "engine-p", "scheduler", kvscope="simulated")
    path = store(tmp_path / "s.duckdb", [pulled(1)], engines=[engine])
    assert cli.main(["whatif", "--db", str(path)]) == 0
    assert "simulated" in capsys.readouterr().out


def test_requests_of_a_benchmark_window_are_called_simulated_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their label is not their engine's."""
    engines = [
        rows.engine(1, "engine-p", "scheduler", kvscope="simulated"),
        rows.engine(2, "real-p", "scheduler"),
    ]
    made = [pulled(1, label="nightly"), pulled(2, label="real", p_engine="real-p", d_engine="real-d")]
    path = store(tmp_path / "s.duckdb", made, engines=engines)
    for label, simulated in (("nightly", True), ("real", False)):
        assert cli.main(["whatif", "--db", str(path), "--json", "--label", label]) == 0
        assert json.loads(capsys.readouterr().out)["simulated"] is simulated


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["--scenario", "threshold"], 2, "needs --threshold"),
        (["--threshold", "-1"], 2, "number of tokens"),
        (["--ttl", "soon"], 2, "no duration"),
        (["--label", "none such"], 1, "no request"),
    ],
)
def test_what_can_not_be_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, line: str
) -> None:
    path = store(tmp_path / "s.duckdb", [pulled(1)])
    assert cli.main(["whatif", "--db", str(path), *arguments]) == code
    assert line in capsys.readouterr().err


def test_scenarios_read_only_columns_that_there_are() -> None:
    names = {column.name for column in schema.REQUESTS.columns}
    assert {"predicted_push_ttft_ns", "predicted_pull_ttft_ns", "best_rate_bytes_per_s"} <= names
