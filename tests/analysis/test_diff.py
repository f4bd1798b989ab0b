"""`kvscope diff`: known shifts, unlike runs, limits for CI, and sides of all kinds."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from pathlib import Path
from typing import Any

import duckdb
import pytest

from kvscope import cli
from kvscope.analysis import diff, intervals
from kvscope.analysis.diff import configuration_differences, limit, side, verdict
from kvscope.analysis.intervals import Estimate, Shift
from kvscope.errors import UsageError

from ..cli import rows
from .made import Row, store

MS = 1_000_000


def pulled(number: int, rng: random.Random, route_ms: float = 5, **columns: Any) -> Row:
    """TTFT of about 80 ms, of which the hand-over takes `route_ms` and some."""
    prefill, route = rng.uniform(40, 60), route_ms + rng.uniform(0, 2)
    return rows.request(
        number,
        ("prefill.compute", 0, prefill),
        ("registration.route", prefill, prefill + route),
        ("decode.first_step", prefill + route, prefill + route + 10),
        ("decode.generate", prefill + route + 10, prefill + route + 10 + 63 * 7),
        **{"connector": "pull"} | columns,
    )


def some(count: int, seed: int, **columns: Any) -> list[Row]:
    rng = random.Random(seed)
    return [pulled(number, rng, **columns) for number in range(count)]


ENGINES = [
    rows.engine(1, "engine-p", "scheduler"),
    rows.engine(2, "engine-d", "scheduler"),
]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main(["diff", *map(str, arguments)])
    told = capsys.readouterr()
    return code, told.out, told.err


def asked(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, dict[str, Any]]:
    code, out, _ = run(capsys, *arguments, "--json")
    return code, json.loads(out)


def shifts(answer: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {f"{s['metric']}.{s['statistic']}": s for s in answer["shifts"]}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("diff")
    made = {
        "before": some(400, 1),
        "again": some(400, 2),
        "slower": some(400, 3, route_ms=9),
        "few": some(5, 4, route_ms=50),
        "longer": some(400, 5, prompt_tokens=900),
    }
    return {name: store(folder / f"{name}.duckdb", found, engines=ENGINES) for name, found in made.items()}


def test_a_shift_is_found_where_it_was_made_and_marked_clear(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer = asked(capsys, files["before"], files["slower"])
    assert code == 0
    found = shifts(answer)
    for statistic in ("mean", "p50", "p90"):
        one = found[f"registration.route.{statistic}"]
        assert one["shift_ns"] == pytest.approx(4 * MS, abs=0.3 * MS)
        assert one["low_ns"] < 4 * MS < one["high_ns"]
        assert one["clear"]
        assert found[f"coordination.{statistic}"]["shift_ns"] == one["shift_ns"]
    assert found["ttft.mean"]["clear"]
    assert not found["prefill.compute.p50"]["clear"]
    assert found["tpot.p50"]["shift_ns"] == pytest.approx(0, abs=1)
    by_metric = [s["metric"] for s in answer["shifts"] if s["statistic"] == "mean"]
    steps = [name for name in by_metric if intervals.BY_NAME[name].kind == "step"]
    assert by_metric[0] == "ttft"
    assert steps[0] == "registration.route"


def test_the_same_load_again_shows_noise_as_noise(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, files["before"], files["again"], "--fail-if", "ttft.p50 > +10%")
    assert code == 0
    assert re.search(r"^workload: alike(, with small differences)?$", out, re.MULTILINE)
    assert "configuration: alike\n" in out
    assert "Warning" not in out
    assert "held" in out


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("registration.route.p50 > +20%", 1),
        ("registration.route.p50 > +200%", 0),
        ("coordination.mean > +3ms", 1),
        ("coordination.mean > +5ms", 0),
        ("ttft.p50 > +0%", 1),
        ("tpot.p50 > +10%", 0),
    ],
)
def test_a_limit_decides_the_exit_code(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], text: str, code: int
) -> None:
    got, out, _ = run(capsys, files["before"], files["slower"], "--fail-if", text)
    assert got == code
    (line,) = (line for line in out.splitlines() if line.startswith(text))
    assert ("failed" in line) == bool(code)


def test_an_excess_within_noise_does_not_fail() -> None:
    found = {"ttft": {"p90": Shift(100 * MS, 120 * MS, -1 * MS, 41 * MS)}}
    outcome, line = verdict(limit("ttft.p90 > +10%"), found)
    assert outcome == "held"
    assert "may be noise" in line
    found = {"ttft": {"p90": Shift(100 * MS, 120 * MS, 1 * MS, 41 * MS)}}
    assert verdict(limit("ttft.p90 > +10%"), found)[0] == "failed"


def test_too_few_requests_are_not_judged(files: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, files["before"], files["few"], "--anyway", "--fail-if", "ttft.p90 > +1%")
    assert code == 0
    assert "not judged, too few requests" in out


def test_unlike_loads_are_not_ranked_unless_asked(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, files["before"], files["longer"])
    assert code == 1
    assert "workload: unlike\n" in out
    assert "Not compared" in out
    assert "prompt tokens, median" in out
    assert "--anyway" in out
    assert "shift of" not in out
    code, out, _ = run(capsys, files["before"], files["longer"], "--anyway")
    assert code == 0
    assert "shift of p90" in out
    code, answer = asked(capsys, files["before"], files["longer"])
    assert (code, answer["refused"], answer["shifts"]) == (1, True, [])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model": "other"}, "models"),
        ({"output_tokens": 640}, "output tokens, median"),
        ({"p_cached_tokens": 256}, "prompt tokens cached or read back"),
        ({"connector": "push"}, "requests by push"),
    ],
)
def test_each_difference_of_load_is_named(
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    what: str,
) -> None:
    other = store(tmp_path / "other.duckdb", some(200, 7, **changes), engines=ENGINES)
    code, answer = asked(capsys, files["before"], other)
    assert code == 1
    assert what in [one["what"] for one in answer["workload"] if one["material"]]


def test_the_rate_of_requests_is_load(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = some(400, 8)
    for row in made:
        row["arrived_at_ns"] = rows.T0_NS + (row["arrived_at_ns"] - rows.T0_NS) // 2
    code, answer = asked(capsys, files["before"], store(tmp_path / "s.duckdb", made, engines=ENGINES))
    assert code == 1
    assert [one["what"] for one in answer["workload"] if one["material"]] == ["requests per second"]


def test_settings_that_differ_are_named(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newer = json.dumps({"vllm": "0.33.0", "nixl": "1.5.1", "model": "tiny", "extra_config": {"a": 1}})
    engines = [ENGINES[0] | {"fingerprint": newer}, ENGINES[1] | {"fingerprint": newer}]
    engines.append(rows.engine(3, "idle", "scheduler", fingerprint='{"vllm": "0.1"}'))
    code, answer = asked(capsys, files["before"], store(tmp_path / "s.duckdb", some(400, 9), engines=engines))
    assert code == 1
    found = {one["what"]: (one["a"], one["b"]) for one in answer["configuration"]}
    assert found == {"vllm": ("0.32.0", "0.33.0"), "extra_config.a": ("not set", "1")}


def test_engines_that_are_not_known_are_told_of() -> None:
    (found,) = configuration_differences({}, {"vllm": "1"})
    assert (found.a, found.b, found.material) == ("not known", "known", False)
    (neither,) = configuration_differences({}, {})
    assert (neither.a, neither.b, neither.material) == ("not known", "not known", False)


def test_configurations_that_are_not_known_are_not_called_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(store(tmp_path / f"{name}.duckdb", some(60, 1))) for name in "ab"]
    cli.main(["diff", *paths])
    assert "configuration: not known of either side" in capsys.readouterr().out
    known = store(tmp_path / "known.duckdb", some(60, 2), engines=ENGINES)
    cli.main(["diff", str(known), paths[0]])
    assert "configuration: not known of B\n" in capsys.readouterr().out


def test_a_sequential_router_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def pushed(number: int, sequential: bool) -> Row:
        more = () if sequential else ("overlapped",)
        start = 50 if sequential else 0
        return rows.request(
            number,
            ("prefill.compute", 0, 50),
            ("registration.route", start, start + 5, *more),
            ("transfer.wire", 60, 70),
            connector="push",
        )

    paths = [
        store(tmp_path / f"{order}.duckdb", [pushed(i, order) for i in range(30)], engines=ENGINES)
        for order in (False, True)
    ]
    _, answer = asked(capsys, *paths)
    (found,) = answer["configuration"]
    assert (found["what"], found["a"], found["b"]) == (
        "router order under push",
        "both at once",
        "D after P",
    )


def test_labels_never_mix_and_production_comes_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = some(60, 1) + [
        row | {"id": row["id"] + 1000, "label": "benchmark"} for row in some(80, 2, route_ms=40)
    ]
    path = store(tmp_path / "s.duckdb", made, engines=ENGINES)
    _, answer = asked(capsys, path, f"{path},label=benchmark", "--anyway")
    assert (answer["a"]["label"], answer["a"]["requests"]) == ("", 60)
    assert (answer["b"]["label"], answer["b"]["requests"]) == ("benchmark", 80)
    assert shifts(answer)["registration.route.p50"]["clear"]
    code, _, err = run(capsys, path, f"{path},label=none", "--anyway")
    assert code == 1
    assert "no request with a first token" in err


def test_windows_and_filters_choose_requests(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    # Requests arrive one a second from T0 on.
    middle = rows.T0_NS + 200 * 10**9
    path = files["before"]
    code, answer = asked(capsys, f"{path},..{middle}", f"{path},{middle}..,connector=pull")
    assert code == 0
    assert (answer["a"]["requests"], answer["b"]["requests"]) == (200, 200)
    code, answer = asked(capsys, "--db", path, f"..{middle}", f"{middle}..")
    assert (answer["a"]["requests"], answer["b"]["requests"]) == (200, 200)


def test_small_differences_are_told_and_called_alike(
    files: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = some(400, 2)
    for row in made[:210]:
        row["prompt_tokens"] += 20
    code, out, _ = run(capsys, files["before"], store(tmp_path / "s.duckdb", made, engines=ENGINES))
    assert code == 0
    assert "workload: alike, with small differences\n" in out
    assert "prompt tokens, median" in out


def test_requests_on_both_sides_are_warned_of(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    middle, later = rows.T0_NS + 200 * 10**9, rows.T0_NS + 250 * 10**9
    path = files["before"]
    _, out, _ = run(capsys, "--db", path, f"..{later}", f"{middle}..")
    assert "Warning: 50 requests are on both sides" in out
    for a, b, shared in (
        ("..", "..", 400),
        (f"{path},..{later}", f"{middle}..", 50),
        (f"..{middle}", f"{middle}..", 0),
        (f"..{later},id<{rows.request(0)['id'] + 10}", "..", 10),
        (f"{files['again']}", "..", 0),
    ):
        _, answer = asked(capsys, "--db", path, a, b, "--anyway")
        assert answer["shared_requests"] == shared, (a, b)


def test_named_windows_are_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One of production, and one of a benchmark, whose requests count as of its name."""
    windows = [
        {
            "id": number,
            "made_at_ns": 1,
            "name": name,
            "kind": kind,
            "from_at_ns": rows.T0_NS + start * 10**9,
            "until_at_ns": rows.T0_NS + (start + 100) * 10**9,
            "note": None,
            "made_by": "",
            "removed": False,
        }
        for number, name, kind, start in ((1, "outage", "incident", 0), (2, "nightly", "benchmark", 200))
    ]
    path = store(tmp_path / "s.duckdb", some(400, 1), engines=ENGINES, labels=windows)
    code, answer = asked(capsys, "--db", path, "@outage", "@nightly")
    assert code == 0
    assert (answer["a"]["label"], answer["a"]["requests"]) == ("", 100)
    assert (answer["b"]["label"], answer["b"]["requests"]) == ("nightly", 100)
    code, _, err = run(capsys, "--db", path, "@outage", "@nightlee")
    assert code == 2
    assert "did you mean @nightly" in err


def test_sides_are_read() -> None:
    assert side("2h..1h").parameters == {"since": "2h", "until": "1h"}
    assert side("1h..").parameters == {"since": "1h"}
    assert side("..").parameters == {}
    assert (side("..").path, side("..,label=x").path) == (None, None)
    assert side("@nightly").parameters == {"since": "@nightly", "until": "@nightly.end"}
    assert side("@a..@b.end").parameters == {"since": "@a", "until": "@b.end"}
    assert side("label=").parameters == {"label": ""}
    assert side("gone/before.duckdb,label=x").path == Path("gone/before.duckdb")
    assert side("../a.duckdb").path == Path("../a.duckdb")
    assert side("connector=push,2h..").parameters == {"since": "2h", "where": ["connector=push"]}


def test_two_windows_on_a_side_are_told_in_the_users_words() -> None:
    with pytest.raises(UsageError, match="a side is of one window; between A and B is a space"):
        side("@w1,@w2")
    with pytest.raises(UsageError, match="a side is of one kind of traffic"):
        side("label=a,label=b")


@pytest.mark.parametrize(
    "text", ["", "yesterday", "1h..,2h..", "a.duckdb,b.duckdb", "colour=red", "nul\0.duckdb", "x" * 5000]
)
def test_what_is_no_side(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError):
        side(text)
    code, _, err = run(capsys, text, "1h..")
    assert code == 2
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ttft > +5%",
        "ttft.p50 < +5%",
        "ttft.p50 > -5%",
        "ttft.p50 > 5",
        "ttft.p75 > +5%",
        "speed.p50 > +5%",
        "ttft.p50 > +5 parsecs",
        "ttft.p50 > +5%; rm",
        "x" * 10_000,
    ],
)
def test_a_wrong_limit_is_asked_wrongly(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str], text: str
) -> None:
    code, _, err = run(capsys, files["before"], files["again"], "--fail-if", text)
    assert code == 2
    assert len(err.splitlines()) == 1


def test_a_file_that_is_none_is_told_in_a_line(
    files: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, files["before"], "none/such.duckdb")
    assert code == 1
    assert "there is no such file" in err


@pytest.mark.parametrize("count", [57, 600, 5000])
def test_intervals_of_percentiles_are_values_in_order(count: int) -> None:
    """What SQL gives for the ends is the value of that rank."""
    values = random.Random(count).sample(range(10**9), count)
    database = duckdb.connect()
    database.execute("CREATE TABLE waits AS SELECT unnest(?::BIGINT[]) AS ttft_ns", [values])
    measure = intervals.BY_NAME["ttft"]
    cursor = database.execute(intervals.select([measure], count, "true"))
    head = [column[0] for column in cursor.description or []]
    (row,) = cursor.fetchall()
    found = intervals.estimates([measure], count, dict(zip(head, row, strict=True)))["ttft"]
    ordered = sorted(values)
    for name, q in intervals.QUANTILES.items():
        ends = intervals.ranks(count, q)
        if ends is None:
            assert found[name].low is None
        else:
            assert (found[name].low, found[name].high) == (ordered[ends[0] - 1], ordered[ends[1] - 1])
    assert found["mean"].value == pytest.approx(statistics.fmean(values))
    half = 1.96 * statistics.stdev(values) / math.sqrt(count)
    assert found["mean"].high == pytest.approx(statistics.fmean(values) + half)


def test_intervals_of_percentiles_hold_what_they_promise() -> None:
    """Of many samples, 95 % have the true percentile between their ends; p99 needs some hundred requests."""
    rng = random.Random(5)
    for q, count in ((0.5, 40), (0.9, 200), (0.99, 1000)):
        true = -math.log(1 - q)
        ends = intervals.ranks(count, q)
        assert ends is not None
        held = 0
        for _ in range(600):
            ordered = sorted(rng.expovariate(1) for _ in range(count))
            held += ordered[ends[0] - 1] <= true <= ordered[ends[1] - 1]
        assert held / 600 > 0.93
    assert intervals.ranks(500, 0.99) is None


def test_the_interval_of_a_difference_adds_half_widths_in_quadrature() -> None:
    found = intervals.shift(Estimate(10, 7, 16), Estimate(20, 12, 24))
    assert (found.low, found.high) == (10 - math.hypot(8, 6), 10 + math.hypot(4, 3))
    assert intervals.shift(Estimate(10, None, None), Estimate(20, 12, 24)).low is None


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["diff", "--help"])
    assert "kvscope diff 2h..1h 1h.." in capsys.readouterr().out
    assert diff.__doc__
