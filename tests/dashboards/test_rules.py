"""Prometheus rules: each alert fires for its reason, says what is the matter, and is quiet otherwise."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import duckdb
import pytest
import yaml

from kvscope import cli, metrics, steps
from kvscope.dashboards import rules
from kvscope.dashboards.runbook import ENTRIES, anchor
from kvscope.errors import UsageError

from ..cli import rows
from ..prometheus import tool
from .alert_cases import CASES, Firing, Series

ROOT = Path(__file__).parent.parent.parent
COMMITTED = ROOT / "dashboards" / "prometheus"
ALERTS = {alert.name: alert for alert in rules.alerts(rules.Parameters())}


@pytest.fixture(scope="module")
def promtool() -> str:
    return tool("promtool")


def run(*command: str | Path) -> str:
    """What a command said; fails with it where the command failed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_promtool_accepts_them(promtool: str) -> None:
    said = run(promtool, "check", "rules", *sorted(COMMITTED.glob("*.yaml")))
    assert f"{len(ALERTS)} rules found" in said
    assert f"{len(rules.recordings(rules.Parameters()))} rules found" in said


def test_the_committed_files_are_those_of_the_code() -> None:
    found = {path.name: path.read_text("utf-8") for path in COMMITTED.iterdir()}
    assert found == rules.files(), "run `python -m kvscope.dashboards.build`"
    assert (ROOT / "docs" / "runbook.md").read_text("utf-8") == rules.runbook()


# --- firing and quiet -----------------------------------------------------------------------------------


def test_every_alert_has_a_firing_and_a_quiet_case() -> None:
    assert CASES.keys() == ALERTS.keys()
    assert not [name for name, case in CASES.items() if not case.quiet]


@pytest.mark.parametrize("name", ALERTS)
def test_it_fires_and_is_quiet(name: str, promtool: str, tmp_path: Path) -> None:
    case, alert = CASES[name], ALERTS[name]
    tests = [
        _test(name, f"it fires ({at})", case.at_m, one.firing, [_expected(alert, one)])
        for at, one in enumerate((Firing(*case[1:5]), *case.more))
    ]
    if alert.for_ != "0m":
        tests[0]["promql_expr_test"] = [_waited(alert, case.at_m)]
    tests += [_test(name, why, case.at_m, series, []) for why, series in case.quiet.items()]
    if rules.Parameters().users in alert.query:
        benchmark = {one.replace('"production"', '"bench-7"'): v for one, v in case.firing.items()}
        tests.append(_test(name, "a benchmark", case.at_m, benchmark, []))
    check(promtool, tmp_path, tests)


def _waited(alert: rules.Alert, at_m: int) -> dict[str, Any]:
    """It was pending for as long as it says."""
    steps_ = int(alert.for_.removesuffix("m")) // int(_interval(alert.name).removesuffix("m"))
    pending = f'ALERTS{{alertname="{alert.name}", alertstate="pending"}}'
    return {
        "expr": f"count(count_over_time({pending}[2d]) >= {steps_})",
        "eval_time": f"{at_m}m",
        "exp_samples": [{"labels": "{}", "value": 1}],
    }


def test_alerts_about_users_are_quiet_for_benchmarks() -> None:
    users = {name for name, alert in ALERTS.items() if rules.Parameters().users in alert.query}
    groups = ("kvscope-requests", "kvscope-handover", "kvscope-pairs", "kvscope-reuse")
    told = {name for name, alert in ALERTS.items() if alert.group in groups}
    # Requests in flight are not told apart by traffic.
    assert told - {"KvscopeRequestsStuck"} == users - {"KvscopeNotJoined"}


def test_a_case_that_is_wrong_is_found(promtool: str, tmp_path: Path) -> None:
    case = CASES["KvscopeEventsLost"]
    quiet = _test("KvscopeEventsLost", "it fires all the same", case.at_m, case.firing, [])
    with pytest.raises(AssertionError, match="it fires all the same"):
        check(promtool, tmp_path, [quiet])


def _test(alert: str, why: str, at_m: int, series: Series, expected: list[Any]) -> dict[str, Any]:
    return {
        "name": why,
        "interval": _interval(alert),
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [{"eval_time": f"{at_m}m", "alertname": alert, "exp_alerts": expected}],
    }


def _interval(alert: str) -> str:
    """Of the samples in a case, and of the evaluations."""
    return "5m" if CASES[alert].at_m > 1000 else "1m"


def _expected(alert: rules.Alert, firing: Firing) -> dict[str, Any]:
    told = {
        "summary": firing.summary,
        "description": firing.description,
        "runbook_url": f"docs/runbook.md#{alert.name.lower()}",
        "dashboard_uid": alert.dashboard,
    }
    return {"exp_labels": {**firing.labels, "severity": alert.severity}, "exp_annotations": told}


def check(promtool: str, folder: Path, tests: list[dict[str, Any]]) -> None:
    """`promtool test rules` with the committed alert and the recordings that it reads."""
    name = tests[0]["alert_rule_test"][0]["alertname"]
    files = {path.stem: yaml.safe_load(path.read_text("utf-8")) for path in COMMITTED.iterdir()}
    (alert,) = (rule for rule in _rules(files["kvscope-alerts"]) if rule["alert"] == name)
    recordings = [rule for rule in _rules(files["kvscope-recording"]) if rule["record"] in alert["expr"]]
    (folder / "rules.yaml").write_text(
        json.dumps({"groups": [{"name": "one", "rules": [*recordings, alert]}]})  # JSON is YAML
    )
    (folder / "tests.yaml").write_text(
        json.dumps({"rule_files": ["rules.yaml"], "evaluation_interval": _interval(name), "tests": tests})
    )
    run(promtool, "test", "rules", folder / "tests.yaml")


def _rules(file: dict[str, Any]) -> list[dict[str, Any]]:
    return [rule for group in file["groups"] for rule in group["rules"]]


# --- what they say --------------------------------------------------------------------------------------


def test_only_metrics_and_labels_that_there_are() -> None:
    """A name that is spelt wrong would be quiet for ever."""
    of: dict[str, set[str]] = {"up": {"job", "instance"}}
    for metric in metrics.METRICS:
        labels = {*metric.labels, "job", "instance"}
        of[metric.name] = labels
        if metric.kind == metrics.HISTOGRAM:
            of |= {metric.name + "_bucket": {*labels, "le"}, metric.name + "_sum": labels}
            of[metric.name + "_count"] = labels
    recorded = {recording.name for recording in rules.recordings(rules.Parameters())}
    exprs = [alert.expr for alert in ALERTS.values()]
    exprs += [recording.expr for recording in rules.recordings(rules.Parameters())]
    for expr in exprs:
        for name, matchers in re.findall(r"\b((?:kvscope|up)[\w:]*)(?:\{([^}]*)\})?", expr):
            assert name in recorded if ":" in name else name in of, f"{name} in {expr}"
            for label, value in re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*"([^"]*)"', matchers):
                assert label in of[name], f"{label} of {name} in {expr}"
                if label == "class":
                    assert value in steps.CLASSES
                if label == "le":
                    assert float(value) in metrics.TTFT.buckets


def test_expanded_alerts_need_no_recording_rules() -> None:
    for alert in ALERTS.values():
        assert "kvscope:" not in rules.expanded(alert.expr), alert.name


def test_every_dashboard_that_an_alert_names_is_there() -> None:
    there = {path.stem for path in (ROOT / "dashboards" / "grafana").glob("*.json")}
    assert {alert.dashboard for alert in ALERTS.values()} <= there


def test_thresholds_are_parameters() -> None:
    made = rules.files(rules.Parameters(ttft_slo_s=0.5, coordination_share=0.25, quiet_traffic="lab"))
    assert 'le="0.5"' in made["kvscope-recording.yaml"]
    assert "> 0.25" in made["kvscope-alerts.yaml"]
    assert "the budget is 25%" in made["kvscope-alerts.yaml"]
    assert 'traffic!~"lab"' in made["kvscope-alerts.yaml"]
    assert "bench" not in made["kvscope-alerts.yaml"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"ttft_slo_s": 0.7}, "ttft_slo_s is 0.7: it must be a bucket's bound: 0.01,"),
        ({"ttft_objective": 1.0}, "between 0 and 1"),
        ({"quiet_traffic": '"} or vector(1)'}, "quotes"),
        ({"quiet_traffic": "("}, "no regular expression"),
        ({"runbook": "http://wiki\n"}, "control characters"),
    ],
)
def test_parameters_that_make_no_rule_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        rules.files(rules.Parameters(**wrong))


# --- the runbook ----------------------------------------------------------------------------------------


def test_every_alert_has_an_entry_and_every_entry_an_alert() -> None:
    assert ENTRIES.keys() == ALERTS.keys()
    text = rules.runbook()
    for name, entry in ENTRIES.items():
        assert f"\n## {name}\n" in text
        assert entry.users
        assert entry.see
        assert entry.silence
        assert len(entry.causes) >= 2 or name == "KvscopeProblems", name
    for _, _, doc in rules.listed():
        assert doc in text


def test_every_link_of_the_runbook_leads_somewhere() -> None:
    links = re.findall(r"\]\(#([^)]*)\)", rules.runbook())
    assert links
    assert set(links) <= {anchor(name) for name in ALERTS}


def commands() -> list[str]:
    """Every `kvscope ...` of the runbook, of its listings and of its sentences."""
    text = rules.runbook()
    blocks = re.findall(r"```sh\n(.*?)```", text, re.S)
    listed = [re.split(r"\s+# ", line)[0] for block in blocks for line in block.splitlines()]
    spoken = re.findall(r"`(kvscope [^`]*)`", re.sub(r"```.*?```", "", text, flags=re.S))
    found = [command for command in (*listed, *spoken) if command.startswith("kvscope ")]
    return sorted(set(found))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "store.duckdb"
    with duckdb.connect(str(path)) as connection:
        rows.fill(connection)
    return path


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_runbook_works(
    command: str, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, *arguments = shlex.split(command)[1:]
    known = {"ID": str(rows.PUSH["client_id"]), "FILE.duckdb": str(tmp_path / "copy.duckdb")}
    arguments = [known.get(argument, argument) for argument in arguments]
    if name in ("query", "explain", "requests"):
        code = cli.main([name, *arguments, "--db", str(store)])
        assert (code, capsys.readouterr().err) in ((0, ""), (0, "no such requests\n"), (0, "no rows\n"))
    else:  # it asks a daemon, and there is none: it is understood, no more
        once = ["--once"] if name == "top" and "--page" not in arguments else []
        code = cli.main([name, *arguments, "--url", "http://127.0.0.1:9", *once])
        assert code == 3, capsys.readouterr().err
