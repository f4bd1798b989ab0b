"""A real Prometheus scrapes the daemon of real engines: what dashboards and rules ask has an answer."""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvscope.dashboards import rules
from kvscope.dashboards.expressions import Expression, expressions
from kvscope.demo.load import Load, Result, run_conversation
from kvscope.steps import CLASSES

from ..prometheus import Prometheus, prometheus, tool
from .conftest import MODES, Scene, wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

every_mode = pytest.mark.parametrize("scene", MODES, indirect=True, scope="session")
bidirectional = pytest.mark.parametrize("scene", ["bidirectional"], indirect=True, scope="session")

DASHBOARDS = Path(__file__).parents[2] / "dashboards" / "grafana"
LABEL = "test"
"""Kind of traffic of the scenes."""
PARAMETERS = rules.Parameters(
    quiet_traffic="none", min_requests=5, min_reuse_requests=1, coordination_s=0.0001
)
"""As users get them, but for what a short load of the kind `test` can't reach."""

EVERYWHERE = {
    "KvscopeHooksRaising": "no hook raises",
    "kvscope-flow 306 A": "one decoder has none to be compared with",  # early-binding regret
}
NO_FAILURES = {"KvscopeConnectorFailures": "vLLM's connector logs no failure"}
NO_REUSE = dict.fromkeys(
    (
        "KvscopeReuseNeverOffered",
        "KvscopeReuseMissed",
        "kvscope-overview 405 A",  # KV read back
        "kvscope-sessions 101 A",  # requests with offers
        "kvscope-sessions 102 A",  # offers that were used
        "kvscope-sessions 103 A",  # outcomes
        "kvscope-sessions 301 A",  # reading back: added to the mean TTFT
        "kvscope-sessions 302 A",  # reading back: p99 of each step
    ),
    "in this mode nothing is kept for later turns",
)
EMPTY: dict[str, dict[str, str]] = {
    "push": {**EVERYWHERE, **NO_FAILURES, **NO_REUSE},
    "pull": {**EVERYWHERE, **NO_FAILURES, **NO_REUSE},
    "bidirectional": EVERYWHERE,
}
"""By mode: what has no answer on engines that are well (an alert, or dashboard, panel and query), and why."""
EITHER_WAY = {"bidirectional": set(NO_FAILURES)}
"""By mode: what depends on the tests before; those of kept KV that has expired make vLLM log a failure."""

QUIET = (
    "KvscopeReadAfterExpiry",
    "KvscopeRequestsStuck",
    "KvscopeEngineGone",
    "KvscopeRecorderStopped",
    "KvscopeNothingRecorded",
    "KvscopeEventsLost",
    "KvscopeEventsNotUnderstood",
    "KvscopeHooksMissing",
    "KvscopeHooksRaising",
    "KvscopeClockError",
    "KvscopeDaemonDown",
    "KvscopeDaemonRestarting",
    "KvscopeStoreFailing",
    "KvscopeDaemonBehind",
    "KvscopeCommitsSlow",
    "KvscopeOwnFaults",
)
"""Alerts that nothing here may set off."""


@dataclass
class Scraped:
    """A Prometheus that has seen a load from its beginning to its end."""

    scene: Scene
    prometheus: Prometheus
    since: float
    until: float
    """Unix times of the last scrape before the load and of one after it."""

    @property
    def window(self) -> str:
        """The load's time as a PromQL range that begins and ends with a scrape."""
        return f"{round((self.until - self.since) * 1000) + 1}ms"

    @property
    def values(self) -> dict[str, str]:
        return {"traffic": LABEL, "__rate_interval": self.window, "__range": self.window}


@pytest.fixture(scope="session")
def binary() -> str:
    """Skips before engines are started."""
    return tool("prometheus")


@pytest.fixture(scope="session")
def scraped(binary: str, scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scraped]:
    target = scene.collector.url.removeprefix("http://")
    folder = tmp_path_factory.mktemp(f"prometheus-{scene.mode}")
    with prometheus([target], folder, rules.files(PARAMETERS)) as server:
        known = wait_until(lambda: counted(server), what="the first scrape")
        since = last_scrape(server)
        results = load(scene)
        rows = scene.rows(results)
        assert [row["outcome"] for row in rows] == ["finished"] * len(rows)
        wait_until(lambda: counted(server) == known + len(rows), what=f"{len(rows)} requests in Prometheus")
        until = last_scrape(server)
        # Rules are evaluated a moment after the scrape that they read.
        wait_until(lambda: last_scrape(server) > until + 3, what="the rules")
        yield Scraped(scene, server, since, until)


def load(scene: Scene) -> list[Result]:
    if scene.mode != "bidirectional":
        return scene.send(Load([100, 300, 700, 1200] * 8, output_tokens=6, concurrency=2, seed=81))
    return [r for seed in range(6) for r in asyncio.run(run_conversation(scene.url(), 4, seed=820 + seed))]


def counted(server: Prometheus) -> float:
    """Requests that Prometheus knows of."""
    found = server.query("sum(kvscope_requests_total)")
    return found[0][1] if found else 0


def last_scrape(server: Prometheus) -> float:
    return server.value("timestamp(kvscope_build_info)")


def problem(found: list[tuple[dict[str, str], list[float]]], legend: str) -> str:
    """What is wrong with an answer; empty when nothing is."""
    if not any(values for _, values in found):
        return "no data"
    if any(math.isnan(value) for _, values in found for value in values):
        return "NaN"
    missing = {label for label in re.findall(r"{{\s*(\w+)\s*}}", legend) for m, _ in found if label not in m}
    return f"no label {', '.join(sorted(missing))}" if missing else ""


def ask(scraped: Scraped, expression: Expression) -> list[tuple[dict[str, str], list[float]]]:
    """As Grafana would: at one moment, or at points of the load's time."""
    if expression.instant:
        found = scraped.prometheus.query(expression.expr, scraped.until)
        return [(labels, [value]) for labels, value in found]
    return scraped.prometheus.query_range(expression.expr, scraped.since + 3, scraped.until, 2)


def check(scraped: Scraped, found: dict[str, str]) -> None:
    """Compare problems by place with those that there must be."""
    mode = scraped.scene.mode
    wrong = {place: what for place, what in found.items() if what}
    for place in EITHER_WAY.get(mode, set()) & wrong.keys():
        assert wrong.pop(place) == "no data"
    assert wrong == {place: "no data" for place in EMPTY[mode] if place in found}


@every_mode
@pytest.mark.parametrize("uid", [path.stem for path in sorted(DASHBOARDS.glob("*.json"))])
def test_every_expression_of_a_dashboard_has_data_and_its_labels(scraped: Scraped, uid: str) -> None:
    dashboard = json.loads((DASHBOARDS / f"{uid}.json").read_text("utf-8"))
    asked = expressions(dashboard, scraped.values)
    assert asked
    check(
        scraped,
        {f"{uid} {e.panel_id} {e.ref_id}": problem(ask(scraped, e), e.legend) for e in asked},
    )


@every_mode
def test_every_rule_has_data(scraped: Scraped) -> None:
    found = {}
    for recording in rules.recordings(PARAMETERS):
        series = recording.name + json.dumps(dict(recording.labels)).replace('": "', '="').replace('{"', "{")
        found[recording.name] = problem(as_lists(scraped.prometheus.query(series)), "")
    for alert in rules.alerts(PARAMETERS):
        told = f"{alert.summary} {alert.description}".replace("$labels.", "")
        if alert.name == "KvscopeDaemonDown":
            told = ""  # it may be about no daemon in particular
        answer = scraped.prometheus.query(alert.query)
        found[alert.name] = problem(as_lists(answer), told)
        without = scraped.prometheus.query(rules.expanded(alert.query, PARAMETERS))
        assert {frozenset(labels.items()) for labels, _ in without} == {
            frozenset(labels.items()) for labels, _ in answer
        }, alert.name
    check(scraped, found)


def as_lists(found: list[tuple[dict[str, str], float]]) -> list[tuple[dict[str, str], list[float]]]:
    return [(labels, [value]) for labels, value in found]


@every_mode
def test_no_alert_fires_without_a_reason(scraped: Scraped) -> None:
    exprs = {alert.name: alert.expr for alert in rules.alerts(PARAMETERS)}
    assert {name: found for name in QUIET if (found := scraped.prometheus.query(exprs[name]))} == {}
    told = scraped.prometheus.ask("rules")["groups"]
    assert [r["lastError"] for group in told for r in group["rules"] if r.get("lastError")] == []
    assert len(exprs) == sum(r["type"] == "alerting" for group in told for r in group["rules"])


@every_mode
def test_shares_are_those_of_kvscope_query(scraped: Scraped) -> None:
    window = {"since": str(round(scraped.since * 1e9)), "until": str(round(scraped.until * 1e9))}
    answer = scraped.scene.daemon.query("fleet", "", {**window, "label": LABEL})
    names = [column["name"] for column in answer["columns"]]
    fleet = [dict(zip(names, row, strict=True)) for row in answer["rows"]]
    (total,) = (row for row in fleet if row["level"] == "all")
    whole = f'sum(rate(kvscope_ttft_class_seconds_total{{traffic="{LABEL}"}}[{scraped.window}]))'
    for class_ in CLASSES:
        part = whole.replace("}[", f', class="{class_}"}}[')
        share = scraped.prometheus.value(f"{part} / {whole}", scraped.until)
        # The answer is rounded to a hundredth of a percent.
        assert share == pytest.approx(total[f"{class_}_percent"] / 100, rel=0.01, abs=0.0001), class_
    overview = json.loads((DASHBOARDS / "kvscope-overview.json").read_text("utf-8"))
    (panel,) = (e for e in expressions(overview, scraped.values) if e.panel_id == 101)  # coordination wait
    shown = scraped.prometheus.value(panel.expr, scraped.until)
    assert shown == pytest.approx(total["coordination_percent"] / 100, rel=0.01)


@every_mode
def test_exemplars_lead_to_traces(scraped: Scraped) -> None:
    found: list[dict[str, Any]] = []
    for metric in ("kvscope_ttft_seconds_bucket", "kvscope_step_seconds_bucket"):
        stored = scraped.prometheus.exemplars(metric, scraped.since, time.time())
        assert stored, metric
        found += stored
    ids = sorted({one["labels"]["trace_id"] for one in found})
    with httpx.Client(base_url=scraped.scene.collector.url, trust_env=False, timeout=30) as client:
        for id_ in ids[:100]:
            answer = client.get(f"/api/traces/{id_}")
            assert answer.status_code == 200, (id_, answer.text)
            (trace,) = answer.json()["data"]
            assert trace["traceID"] == id_
            assert trace["spans"]
