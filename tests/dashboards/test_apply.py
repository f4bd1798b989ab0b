"""`kvscope dashboards apply` on a stand-in for Grafana: nothing is written twice, an error is one line."""

from __future__ import annotations

import base64
import copy
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from kvscope import cli
from kvscope.dashboards import alerting
from kvscope.dashboards import shipped as ship

from .grafana_server import PASSWORD, TOKEN, USER, GrafanaServer, reply, serving

PROMETHEUS, JAEGER = "http://prometheus:9090", "http://kvscope:9177"

DASHBOARD: dict[str, Any] = {
    "uid": "kvscope-one",
    "title": "kvscope / One",
    "tags": ["kvscope"],
    "schemaVersion": 42,
    "version": 1,
    "description": None,
    "templating": {
        "list": [
            {"type": "datasource", "name": "datasource", "query": "prometheus"},
            {"type": "datasource", "name": "jaeger", "query": "jaeger"},
            {"type": "query", "name": "model", "query": "label_values(model)"},
        ]
    },
    "panels": [{"id": 1, "type": "stat", "title": "Share", "targets": [{"expr": "kvscope_share"}]}],
}
RULES = """\
groups:
  - name: kvscope-waits
    interval: 15s
    rules:
      - record: kvscope:share:rate5m
        expr: a / b
      - alert: KvscopeCoordinationShare
        expr: |-
          kvscope:share:rate5m > 0.4
        for: 90s
        labels: {severity: warning}
        annotations:
          summary: 'Too much on {{ $labels.engine }}: {{ $value | humanizePercentage }}'
      - alert: KvscopeCoordinationShare
        expr: kvscope:share:rate5m > 0.8
        labels: {severity: critical}
  - name: only recorded
    rules:
      - record: kvscope:other
        expr: c
"""


@pytest.fixture
def grafana() -> Iterator[GrafanaServer]:
    with serving() as server:
        yield server


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What is shipped: two dashboards and a rule file. The token comes from the environment."""
    root = tmp_path / "shipped"
    (root / "grafana").mkdir(parents=True)
    (root / "prometheus").mkdir()
    put_dashboard(root, DASHBOARD)
    put_dashboard(root, {**DASHBOARD, "uid": "kvscope-two", "title": "kvscope / Two"})
    (root / "prometheus" / "rules.yaml").write_text(RULES)
    monkeypatch.setattr(ship, "files", lambda package: root)
    for name in ("GRAFANA_URL", "GRAFANA_USER", "GRAFANA_PASSWORD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    return root


def put_dashboard(root: Path, dashboard: dict[str, Any]) -> None:
    (root / "grafana" / f"{dashboard['uid']}.json").write_text(json.dumps(dashboard))


class Ran:
    """What a command did, as a user sees it."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    @property
    def actions(self) -> dict[str, str]:
        """Of each object, `kind uid` to what was done."""
        found = re.findall(
            r"^(would \w+|\w+) +(folder|data source|dashboard|rule group) +(\S+)", self.out, re.M
        )
        return {f"{kind} {uid}": action for action, kind, uid in found}


Apply = Callable[..., Ran]


@pytest.fixture
def apply(grafana: GrafanaServer, capsys: pytest.CaptureFixture[str]) -> Apply:
    def run(*flags: str, sources: bool = True, url: str = "") -> Ran:
        named = ("--prometheus-url", PROMETHEUS, "--jaeger-url", JAEGER) if sources else ()
        try:
            code = cli.main(["dashboards", "apply", "--grafana-url", url or grafana.url, *named, *flags])
        except SystemExit as ended:
            code = int(ended.code or 0)
        return Ran(code, *capsys.readouterr())

    return run


OBJECTS = [
    "folder kvscope",
    "data source kvscope-jaeger",
    "data source kvscope-prometheus",
    "dashboard kvscope-one",
    "dashboard kvscope-two",
    "rule group kvscope-waits",
]


# --- what gets there -------------------------------------------------------------------------------


def test_all_is_created_and_a_second_run_writes_nothing(grafana: GrafanaServer, apply: Apply) -> None:
    first = apply()
    assert (first.code, first.actions) == (0, dict.fromkeys(OBJECTS, "created"))
    assert first.out.endswith(f"Grafana 12.4.3 at {grafana.url}: 6 created\n")
    assert len(grafana.writes) == 6
    grafana.asked.clear()
    second = apply()
    assert (second.code, second.actions) == (0, dict.fromkeys(OBJECTS, "unchanged"))
    assert grafana.writes == []


def test_what_kvscope_ships_is_taken_and_compares_equal_afterwards(
    grafana: GrafanaServer, apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    first = apply()
    assert first.code == 0, first.err
    assert set(grafana.dashboards) == set(ship.shipped().dashboards)
    rules = [rule for group in grafana.groups.values() for rule in group["rules"]]
    alerts = [r for g in ship.rule_groups(ship.shipped().rule_files) for r in g["rules"] if "alert" in r]
    assert len(rules) == len(alerts) > 0
    for rule in rules:
        assert "$value " not in str(rule["annotations"])
    grafana.asked.clear()
    assert set(apply().actions.values()) == {"unchanged"}
    assert grafana.writes == []


def test_dashboards_open_with_the_sources_and_exemplars_lead_to_the_traces(
    grafana: GrafanaServer, apply: Apply
) -> None:
    apply()
    variables = grafana.dashboards["kvscope-one"]["dashboard"]["templating"]["list"]
    assert [v.get("current", {}).get("value") for v in variables] == [
        "kvscope-prometheus",
        "kvscope-jaeger",
        None,
    ]
    assert grafana.dashboards["kvscope-one"]["folder"] == "kvscope"
    source = grafana.sources["kvscope-prometheus"]
    assert (source["type"], source["url"], source["access"]) == ("prometheus", PROMETHEUS, "proxy")
    assert source["jsonData"]["exemplarTraceIdDestinations"] == [
        {"name": "trace_id", "datasourceUid": "kvscope-jaeger"}
    ]
    assert grafana.sources["kvscope-jaeger"]["url"] == JAEGER


def test_an_alert_fires_for_any_value_as_in_prometheus(grafana: GrafanaServer, apply: Apply) -> None:
    ran = apply()
    group = grafana.groups["kvscope", "kvscope-waits"]
    assert group["interval"] == 20  # a multiple of Grafana's 10 s
    one, two = group["rules"]
    assert [rule["title"] for rule in (one, two)] == [
        "KvscopeCoordinationShare",
        "KvscopeCoordinationShare (critical)",
    ]
    assert (one["uid"], one["for"], one["condition"]) == ("kvscope-coordination-share", "1m30s", "threshold")
    assert one["data"][0]["model"]["expr"] == "kvscope:share:rate5m > 0.4"
    assert one["data"][0]["datasourceUid"] == "kvscope-prometheus"
    assert "is_number($query)" in one["data"][1]["model"]["expression"]
    assert one["noDataState"] == "OK"
    assert one["labels"] == {"severity": "warning"}
    assert one["annotations"] == {
        "summary": "Too much on {{ $labels.engine }}: {{ $values.query.Value | humanizePercentage }}"
    }
    assert "1 recorded series, such as kvscope:share:rate5m" in ran.err
    assert ("kvscope", "only recorded") not in grafana.groups


def test_no_rules_leaves_alerts_to_prometheus(grafana: GrafanaServer, apply: Apply) -> None:
    assert "rule group kvscope-waits" not in apply("--no-rules").actions
    assert grafana.groups == {}


def test_only_what_changed_is_updated(grafana: GrafanaServer, apply: Apply, own_files: Path) -> None:
    apply()
    put_dashboard(own_files, {**DASHBOARD, "description": "New in this version"})
    (own_files / "prometheus" / "rules.yaml").write_text(RULES.replace("> 0.8", "> 0.7"))
    grafana.asked.clear()
    changed = apply("--diff")
    updated = {name for name, action in changed.actions.items() if action == "updated"}
    assert updated == {"dashboard kvscope-one", "rule group kvscope-waits"}
    assert grafana.writes == [
        "POST /api/dashboards/db",
        "PUT /api/v1/provisioning/folder/kvscope/rule-groups/kvscope-waits",
    ]
    assert '+  "description": "New in this version"' in changed.out
    assert re.search(r"^-.*rate5m > 0.8", changed.out, re.M)
    assert re.search(r"^\+.*rate5m > 0.7", changed.out, re.M)
    assert grafana.dashboards["kvscope-one"]["dashboard"]["description"] == "New in this version"
    assert set(apply().actions.values()) == {"unchanged"}


@pytest.mark.parametrize("was", [{"extra": "by hand"}, {"title": "Renamed"}, {"panels": []}])
def test_a_dashboard_that_was_changed_by_hand_becomes_ours_again(
    grafana: GrafanaServer, apply: Apply, was: dict[str, Any]
) -> None:
    apply()
    saved = grafana.dashboards["kvscope-one"]["dashboard"]
    grafana.dashboards["kvscope-one"]["dashboard"] = {**saved, **was, "version": 7}
    assert apply().actions["dashboard kvscope-one"] == "updated"
    mended = grafana.dashboards["kvscope-one"]["dashboard"]
    assert {k: v for k, v in mended.items() if k != "version"} == {
        k: v for k, v in saved.items() if k != "version"
    }


def test_a_dashboard_that_was_moved_comes_back_into_the_folder(grafana: GrafanaServer, apply: Apply) -> None:
    apply()
    grafana.dashboards["kvscope-one"]["folder"] = "elsewhere"
    assert apply().actions["dashboard kvscope-one"] == "updated"
    assert grafana.dashboards["kvscope-one"]["folder"] == "kvscope"


def test_an_alert_that_is_no_longer_shipped_goes(
    grafana: GrafanaServer, apply: Apply, own_files: Path
) -> None:
    apply()
    kept = RULES.replace(
        "alert: KvscopeCoordinationShare\n        expr: kvscope", "record: x\n        expr: k"
    )
    (own_files / "prometheus" / "rules.yaml").write_text(kept)
    assert apply().actions["rule group kvscope-waits"] == "updated"
    assert len(grafana.groups["kvscope", "kvscope-waits"]["rules"]) == 1


def test_whom_an_alert_notifies_and_that_it_is_paused_stays(
    grafana: GrafanaServer, apply: Apply, own_files: Path
) -> None:
    apply()
    rule = grafana.groups["kvscope", "kvscope-waits"]["rules"][0]
    rule.update(isPaused=True, notification_settings={"receiver": "on-call"})
    assert apply().actions["rule group kvscope-waits"] == "unchanged"
    (own_files / "prometheus" / "rules.yaml").write_text(RULES.replace("90s", "5m"))
    assert apply().actions["rule group kvscope-waits"] == "updated"
    rule = grafana.groups["kvscope", "kvscope-waits"]["rules"][0]
    assert (rule["for"], rule["isPaused"], rule["notification_settings"]) == (
        "5m",
        True,
        {"receiver": "on-call"},
    )


def test_a_folder_that_was_renamed_is_still_the_folder(grafana: GrafanaServer, apply: Apply) -> None:
    apply()
    grafana.folders["kvscope"]["title"] = "Inference / kvscope"
    assert apply().actions["folder kvscope"] == "unchanged"
    assert grafana.folders["kvscope"]["title"] == "Inference / kvscope"


# --- data sources ----------------------------------------------------------------------------------


def existing(grafana: GrafanaServer, uid: str, type_: str, **more: Any) -> dict[str, Any]:
    """Give Grafana a data source of its own."""
    grafana.sources[uid] = {
        "id": 900,
        "uid": uid,
        "name": f"The site's {uid}",
        "type": type_,
        "access": "proxy",
        "url": "http://there",
        "version": 3,
        "readOnly": False,
        "jsonData": {},
        **more,
    }
    return copy.deepcopy(grafana.sources[uid])


def test_a_sites_own_sources_are_used_and_left_alone(grafana: GrafanaServer, apply: Apply) -> None:
    mimir = existing(grafana, "mimir", "prometheus")
    tracing = existing(grafana, "tracing", "jaeger")
    ran = apply("--prometheus-uid", "mimir", "--jaeger-uid", "tracing", sources=False)
    assert ran.code == 0
    assert (ran.actions["data source mimir"], ran.actions["data source tracing"]) == ("used", "used")
    assert grafana.sources == {"mimir": mimir, "tracing": tracing}
    assert "has no link from exemplars (trace_id) to tracing; --link-exemplars adds it" in ran.err
    variables = grafana.dashboards["kvscope-one"]["dashboard"]["templating"]["list"]
    assert [v["current"]["value"] for v in variables[:2]] == ["mimir", "tracing"]
    rule = grafana.groups["kvscope", "kvscope-waits"]["rules"][0]
    assert rule["data"][0]["datasourceUid"] == "mimir"


def test_linking_exemplars_keeps_the_rest_of_a_sites_source(grafana: GrafanaServer, apply: Apply) -> None:
    others = {"name": "traceID", "datasourceUid": "tempo"}
    before = existing(
        grafana,
        "mimir",
        "prometheus",
        basicAuth=True,
        basicAuthUser="reader",
        isDefault=True,
        jsonData={"httpHeaderName1": "X-Scope-OrgID", "exemplarTraceIdDestinations": [others]},
    )
    flags = ("--prometheus-uid", "mimir", "--jaeger-url", JAEGER, "--link-exemplars")
    assert apply(*flags, sources=False).actions["data source mimir"] == "updated"
    after = grafana.sources["mimir"]
    assert after["jsonData"]["httpHeaderName1"] == "X-Scope-OrgID"
    assert after["jsonData"]["exemplarTraceIdDestinations"] == [
        others,
        {"name": "trace_id", "datasourceUid": "kvscope-jaeger"},
    ]
    for key in ("name", "url", "basicAuth", "basicAuthUser", "isDefault"):
        assert after[key] == before[key]
    assert apply(*flags, sources=False).actions["data source mimir"] == "unchanged"


def test_a_later_run_needs_no_addresses(grafana: GrafanaServer, apply: Apply) -> None:
    apply()
    grafana.asked.clear()
    assert apply(sources=False).code == 0
    assert grafana.writes == []


def test_a_new_address_is_the_only_thing_that_changes(grafana: GrafanaServer, apply: Apply) -> None:
    apply()
    grafana.sources["kvscope-prometheus"]["jsonData"]["timeInterval"] = "5s"
    ran = apply("--prometheus-url", "http://thanos:10902", "--jaeger-url", JAEGER, sources=False)
    assert ran.actions["data source kvscope-prometheus"] == "updated"
    source = grafana.sources["kvscope-prometheus"]
    assert (source["url"], source["jsonData"]["timeInterval"]) == ("http://thanos:10902", "5s")


def test_without_traces_it_says_what_is_missing(grafana: GrafanaServer, apply: Apply) -> None:
    ran = apply("--prometheus-url", PROMETHEUS, sources=False)
    assert ran.code == 0
    assert "note: no source of traces: exemplars lead nowhere" in ran.err
    assert "exemplarTraceIdDestinations" not in grafana.sources["kvscope-prometheus"]["jsonData"]


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        ((), "say which Prometheus Grafana shall ask: --prometheus-url"),
        (("--prometheus-uid", "nowhere"), "Grafana has no data source nowhere"),
        (("--prometheus-uid", "loki"), "data source loki is of type loki, not prometheus"),
        (("--prometheus-url", PROMETHEUS, "--folder-uid", "nowhere"), "Grafana has no folder nowhere"),
        (("--prometheus-url", PROMETHEUS, "--prometheus-uid", "x"), "--prometheus-url or --prometheus-uid"),
        (("--prometheus-url", "http://me:secret@prometheus"), "without a password in it"),
        (("--prometheus-url", "prometheus:9090"), "takes an address such as http://prometheus:9090"),
        (("--prometheus-uid", "a/../b"), "takes a uid: up to 40 letters"),
        (("--timeout", "0"), "--timeout is a number of seconds"),
    ],
)
def test_sources_named_wrongly(
    grafana: GrafanaServer, apply: Apply, flags: tuple[str, ...], line: str
) -> None:
    existing(grafana, "loki", "loki")
    ran = apply(*flags, sources=False)
    assert ran.code == 2
    assert line in ran.err
    assert "secret" not in ran.err
    assert grafana.dashboards == {}


def test_a_provisioned_source_that_differs_is_named(grafana: GrafanaServer, apply: Apply) -> None:
    existing(grafana, "kvscope-prometheus", "prometheus", readOnly=True)
    ran = apply()
    assert ran.code == 1
    assert "data source kvscope-prometheus comes from a provisioning file of Grafana" in ran.err


def test_a_provisioned_dashboard_that_differs_is_named(grafana: GrafanaServer, apply: Apply) -> None:
    apply()
    grafana.dashboards["kvscope-two"]["provisioned"] = True
    assert apply().code == 0, "equal: nothing has to be changed"
    grafana.dashboards["kvscope-two"]["dashboard"]["title"] = "Older"
    ran = apply()
    assert ran.code == 1
    assert "dashboard kvscope-two comes from a provisioning file of Grafana" in ran.err


# --- dry run, JSON ---------------------------------------------------------------------------------


def test_a_dry_run_says_what_it_would_do_and_does_nothing(grafana: GrafanaServer, apply: Apply) -> None:
    ran = apply("--dry-run")
    assert (ran.code, ran.actions) == (0, dict.fromkeys(OBJECTS, "would create"))
    assert ran.out.endswith(": 6 to create; nothing was written (--dry-run)\n")
    assert grafana.writes == []
    apply()
    grafana.dashboards["kvscope-one"]["dashboard"]["title"] = "Mine"
    grafana.asked.clear()
    ran = apply("--dry-run", "--diff")
    assert ran.actions["dashboard kvscope-one"] == "would update"
    assert '-  "title": "Mine"' in ran.out
    assert '+  "title": "kvscope / One"' in ran.out
    assert grafana.writes == []


def test_json_says_the_same(grafana: GrafanaServer, apply: Apply) -> None:
    ran = apply("--json", "--diff")
    found = json.loads(ran.out)
    assert found["grafana"] == {"url": grafana.url, "version": "12.4.3"}
    assert [f"{o['kind']} {o['uid']}" for o in found["objects"]] == OBJECTS
    assert {o["action"] for o in found["objects"]} == {"created"}
    assert "kvscope / One" in found["objects"][3]["diff"]
    assert (found["error"], found["interrupted"], found["dry_run"]) == (None, False, False)
    assert len(found["notes"]) == 1
    grafana.fails("GET /api/dashboards/uid/kvscope-two", 500)
    ran = apply("--json")
    found = json.loads(ran.out)
    assert ran.code == 1
    assert len(found["objects"]) == 4
    assert "Grafana fails to read dashboard kvscope-two (500" in found["error"]
    assert "diff" not in found["objects"][0]


# --- errors ----------------------------------------------------------------------------------------


def one_line(ran: Ran) -> str:
    """The error: a single line on stderr, notes aside."""
    lines = [line for line in ran.err.splitlines() if not line.startswith("note:")]
    assert len(lines) == 1, ran.err
    assert "Traceback" not in ran.err
    return lines[0]


SAVE = "POST /api/dashboards/db"


@pytest.mark.parametrize(
    ("request_", "status", "line"),
    [
        ("GET /api/frontend/settings", 401, "wants to know who asks (401: made to fail: 401): the token"),
        ("GET /api/frontend/settings", 500, "Grafana fails to ask for its version (500"),
        (
            "GET /api/folders",
            403,
            "refuses to read folder kvscope (403: made to fail: 403): its service",
        ),
        ("POST /api/folders", 403, "needs the role Admin, or Editor where the data sources exist"),
        (
            "POST /api/folders",
            409,
            "create folder kvscope (409: made to fail: 409): something else has",
        ),
        ("POST /api/datasources", 409, "refuses to create data source kvscope-jaeger (409"),
        (SAVE, 400, "refuses to save dashboard kvscope-one (400: made to fail: 400)"),
        (
            SAVE,
            404,
            "save dashboard kvscope-one (404: made to fail: 404): it is not there any more",
        ),
        (SAVE, 412, "(412: made to fail: 412): it was changed by someone else meanwhile"),
        (SAVE, 422, "refuses to save dashboard kvscope-one (422"),
        (SAVE, 429, "it is asked too often; run this again later"),
        (SAVE, 502, "Grafana fails to save dashboard kvscope-one (502: made to fail: 502): see its log"),
        ("PUT /api/v1/provisioning", 503, "Grafana fails to save rule group kvscope-waits (503"),
        ("PUT /api/v1/provisioning", 409, "refuses to save rule group kvscope-waits (409"),
    ],
)
def test_what_grafana_refuses_is_one_line_that_says_what_to_do(
    grafana: GrafanaServer, apply: Apply, request_: str, status: int, line: str
) -> None:
    grafana.fails(request_, status)
    ran = apply()
    assert ran.code == 1
    assert line in one_line(ran)


def test_a_failure_in_the_middle_says_what_was_done_and_can_go_on(
    grafana: GrafanaServer, apply: Apply
) -> None:
    grafana.fails(SAVE, 500)
    ran = apply()
    assert one_line(ran).endswith("(before that: 3 created; what was done stays done)")
    assert list(ran.actions) == OBJECTS[:3]
    grafana.heals()
    ran = apply()
    assert list(ran.actions.values()) == ["unchanged"] * 3 + ["created"] * 3


def test_a_dashboard_saved_meanwhile_is_not_overwritten(grafana: GrafanaServer, apply: Apply) -> None:
    apply()
    grafana.dashboards["kvscope-one"]["dashboard"]["title"] = "Mine"

    def saved_meanwhile(handler: BaseHTTPRequestHandler) -> None:
        grafana.dashboards["kvscope-one"]["dashboard"]["version"] += 1
        found = copy.deepcopy(grafana.dashboards["kvscope-one"]["dashboard"])
        found["version"] -= 1
        reply(handler, 200, json.dumps({"dashboard": found, "meta": {"folderUid": "kvscope"}}))

    grafana.instead("GET /api/dashboards/uid/kvscope-one", saved_meanwhile)
    ran = apply()
    assert ran.code == 1
    assert "(412: The dashboard has been changed by someone else)" in one_line(ran)
    assert grafana.dashboards["kvscope-one"]["dashboard"]["title"] == "Mine"


def test_nothing_listens(apply: Apply) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        ran = apply(url=url)
    assert ran.code == 3
    assert one_line(ran) == (
        f"kvscope: no Grafana at {url} (Connection refused); start it or correct --grafana-url"
    )


def test_no_such_host(apply: Apply) -> None:
    ran = apply(url="http://grafana.invalid")
    assert ran.code == 3
    assert "no Grafana at http://grafana.invalid (" in one_line(ran)


@pytest.mark.parametrize("request_", ["GET /api/frontend/settings", SAVE])
def test_it_does_not_answer_in_time(grafana: GrafanaServer, apply: Apply, request_: str) -> None:
    over = threading.Event()
    grafana.instead(request_, lambda handler: over.wait(30) and None)
    try:
        ran = apply("--timeout", "0.4")
    finally:
        over.set()
    assert ran.code == 3
    assert "does not answer within 0.4 s; see its log, or give it more time with --timeout" in one_line(ran)


def test_an_answer_that_goes_on_and_on_ends_with_the_time(grafana: GrafanaServer, apply: Apply) -> None:
    def drip(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:
            handler.wfile.write(b" " * 16)

    grafana.instead("GET /api/frontend/settings", drip)
    ran = apply("--timeout", "0.4")
    assert ran.code in (1, 3)
    assert "does not answer within" in one_line(ran) or "more than 16 MiB" in one_line(ran)


@pytest.mark.parametrize(
    ("status", "text", "type_"),
    [
        (404, "<html>nginx</html>", "text/html"),
        (404, '{"detail": "Not Found"}', "application/json"),
        (200, "<!doctype html><title>Welcome</title>", "text/html"),
        (200, '{"status": "success"}', "application/json"),
        (200, '{"buildInfo": []}', "application/json"),
        (200, '{"buildInfo": {"version": 12}}', "application/json"),
        (200, "[1, 2]", "application/json"),
        (200, "null", "application/json"),
        (204, "", "application/json"),
    ],
)
def test_what_answers_is_no_grafana(
    grafana: GrafanaServer, apply: Apply, status: int, text: str, type_: str
) -> None:
    grafana.instead("GET /api/frontend/settings", lambda handler: reply(handler, status, text, type_))
    ran = apply()
    assert ran.code == 3
    assert f"what answers at {grafana.url} is no Grafana (" in one_line(ran)
    assert grafana.writes == []


@pytest.mark.parametrize("text", ["{", "", "\x00\x01", "[" * 5000, '{"buildInfo": NaN', "\ud7ff"[:0] + "é{"])
def test_what_answers_is_not_json(grafana: GrafanaServer, apply: Apply, text: str) -> None:
    grafana.instead("GET /api/frontend/settings", lambda handler: reply(handler, 200, text))
    ran = apply()
    assert ran.code == 3
    assert "is no Grafana (its answer is not " in one_line(ran)


def test_a_redirect_to_a_login_page_is_not_followed(grafana: GrafanaServer, apply: Apply) -> None:
    where = "https://sso.example/login?state=abc"
    grafana.instead(
        "GET /api/frontend/settings", lambda handler: reply(handler, 302, "", "text/html", Location=where)
    )
    ran = apply()
    assert ran.code == 1
    line = one_line(ran)
    assert f"{grafana.url} redirects to https://sso.example/login, a login page or a proxy" in line
    assert "state=" not in line
    assert len(grafana.asked) == 1


def test_a_huge_answer_is_cut_off(grafana: GrafanaServer, apply: Apply) -> None:
    grafana.instead(
        "GET /api/folders/kvscope", lambda handler: reply(handler, 200, json.dumps({"x": "y" * (17 << 20)}))
    )
    ran = apply("--timeout", "60")
    assert ran.code == 1
    assert "sends more than 16 MiB; is it Grafana?" in one_line(ran)


DEEP = '{"dashboard": ' + '{"a": ' * 400 + "1" + "}" * 400 + ', "meta": {}}'


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ("GET /api/folders/", "[]"),
        ("GET /api/folders/", '"text"'),
        ("GET /api/datasources/", "null"),
        ("GET /api/dashboards/", '{"dashboard": 5, "meta": {}}'),
        ("GET /api/dashboards/", '{"dashboard": {}, "meta": "x"}'),
        ("GET /api/v1/", "17"),
        ("GET /api/v1/", "<html>"),
    ],
)
def test_an_answer_of_the_wrong_type_is_one_line(
    grafana: GrafanaServer, apply: Apply, request_: str, text: str
) -> None:
    grafana.instead(request_, lambda handler: reply(handler, 200, text))
    ran = apply()
    assert ran.code == 1
    assert one_line(ran)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        ("GET /api/folders/", '{"title": 5, "uid": ["x"]}'),
        ("GET /api/datasources/", '{"type": "jaeger prometheus", "jsonData": 3, "name": 7, "url": [1]}'),
        (
            "GET /api/datasources/",
            '{"type": "jaeger prometheus", "jsonData": {"exemplarTraceIdDestinations": {"a": 1}}}',
        ),
        ("GET /api/dashboards/", '{"dashboard": {"version": "x", "title": ["\\u001b[31m"]}, "meta": {}}'),
        ("GET /api/dashboards/", DEEP),
        ("GET /api/v1/", '{"rules": {"a": 1}, "interval": "x"}'),
        ("GET /api/v1/", '{"rules": [1, {"uid": [], "annotations": 7, "for": {}}], "interval": null}'),
    ],
)
def test_nonsense_within_an_answer_does_not_end_it(
    grafana: GrafanaServer, apply: Apply, request_: str, text: str
) -> None:
    grafana.instead(request_, lambda handler: reply(handler, 200, text))
    ran = apply("--diff")
    assert ran.code in (0, 1)
    assert "Traceback" not in ran.err
    assert "\x1b" not in ran.out + ran.err


@pytest.mark.parametrize(
    "body",
    [
        "<html><script>alert(1)</script></html>",
        '{"message": "\\u001b[2J\\u0007 cleared\\nline two"}',
        '{"message": "' + "x" * 5000 + '"}',
        '{"message": {"a": 1}}',
        "[[[]]]",
        "",
    ],
)
def test_a_hostile_error_stays_one_short_line(grafana: GrafanaServer, apply: Apply, body: str) -> None:
    grafana.instead(SAVE, lambda handler: reply(handler, 500, body))
    line = one_line(apply())
    assert line.isprintable()
    assert len(line) < 500
    assert "<script>" not in line


# --- who asks --------------------------------------------------------------------------------------


BASIC = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
SECRETS = (TOKEN, PASSWORD, quote(PASSWORD, safe=""), BASIC)


def as_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAFANA_TOKEN")
    monkeypatch.setenv("GRAFANA_USER", USER)
    monkeypatch.setenv("GRAFANA_PASSWORD", PASSWORD)


def test_a_user_and_a_password_do_too(
    grafana: GrafanaServer, apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_user(monkeypatch)
    assert apply().code == 0
    assert {h["Authorization"] for h in grafana.seen_headers} == {f"Basic {BASIC}"}


def test_a_token_from_a_file_goes_before_the_environment(
    grafana: GrafanaServer, apply: Apply, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFANA_TOKEN", "of-something-else")
    (tmp_path / "token").write_text(f"  {TOKEN}\n")
    assert apply("--token-file", str(tmp_path / "token")).code == 0
    assert {h["Authorization"] for h in grafana.seen_headers} == {f"Bearer {TOKEN}"}


def test_a_grafana_that_asks_nobody_needs_no_token(
    grafana: GrafanaServer, apply: Apply, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GRAFANA_TOKEN")
    ran = apply()
    assert ran.code == 1
    assert "(401: Unauthorized): set GRAFANA_TOKEN, or GRAFANA_USER and GRAFANA_PASSWORD" in one_line(ran)
    grafana.anonymous = True
    assert apply().code == 0


@pytest.mark.parametrize("how", ["token", "user"])
@pytest.mark.parametrize("where", ["message", "version", "redirect", "found", "reason"])
def test_no_secret_is_ever_shown(
    grafana: GrafanaServer, apply: Apply, monkeypatch: pytest.MonkeyPatch, how: str, where: str
) -> None:
    if how == "user":
        as_user(monkeypatch)
    said = " ".join(SECRETS)

    def echo(handler: BaseHTTPRequestHandler) -> None:
        if where == "message":
            reply(handler, 500, json.dumps({"message": f"bad header {said}"}))
        elif where == "reason":
            reply(handler, 400, said, "text/plain")
        elif where == "version":
            reply(handler, 200, json.dumps({"buildInfo": {"version": f"12.{said}"}}))
        elif where == "redirect":
            reply(handler, 302, "", Location=f"/login/{said.replace(' ', '/')}")
        else:
            reply(handler, 200, json.dumps({"dashboard": {"title": said}, "meta": {}}))

    grafana.instead("GET /api/dashboards/" if where == "found" else "GET /api/frontend", echo)
    for flags in ((), ("--json", "--diff"), ("--dry-run", "--diff")):
        ran = apply(*flags)
        mine = SECRETS[:1] if how == "token" else SECRETS[1:]
        for secret in mine:
            assert secret not in ran.out + ran.err
            assert secret[:30] not in ran.out + ran.err


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"", "holds no token"),
        (b"\xff\xfe", "holds no token: it is not plain text"),
        (b"two words", "characters that no Grafana token has"),
        (b"x" * 9000, "holds no token"),
        (None, "can't be read: No such file or directory"),
    ],
)
def test_a_token_file_without_a_token(apply: Apply, tmp_path: Path, content: bytes | None, line: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_bytes(content)
    ran = apply("--token-file", str(path))
    assert ran.code == 2
    assert line in one_line(ran)
    assert "two words" not in ran.err


@pytest.mark.parametrize(
    ("url", "line"),
    [
        ("grafana:3000", "is no URL of a Grafana"),
        ("ftp://grafana", "is no URL of a Grafana"),
        ("http://me:hunter2@grafana:3000", "leave user and password out of --grafana-url"),
        ("http://me:hunter2@gra fana", "is no URL of a Grafana"),
        ("https://grafana/?verify=false", "--grafana-url is an address without ? and #"),
        ("http://grafana:99999", "is no URL of a Grafana"),
        ("http://", "is no URL of a Grafana"),
    ],
)
def test_an_address_that_is_none(apply: Apply, url: str, line: str) -> None:
    ran = apply(url=url)
    assert ran.code == 2
    assert line in one_line(ran)
    assert "hunter2" not in ran.err


def test_a_token_on_an_open_line_is_said(apply: Apply) -> None:
    ran = apply("--timeout", "0.2", url="http://grafana.invalid:3000")
    assert "note: http://grafana.invalid:3000 is not https: whoever is on the way can read" in ran.err


def test_grafana_under_a_path(apply: Apply) -> None:
    with serving("/ops/grafana") as server:
        ran = apply(url=f"{server.url}/")
        assert ran.code == 0, ran.err
        assert len(server.dashboards) == 2


OPENSSL = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost "
    "-keyout key.pem -out cert.pem"
)


def test_certificates_are_checked(apply: Apply, tmp_path: Path) -> None:
    """A server whose certificate nobody signed is not told the token."""
    import ssl

    made = subprocess.run(
        OPENSSL.split(),
        cwd=tmp_path,
        capture_output=True,
    )
    assert made.returncode == 0, made.stderr
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    heard: list[bytes] = []

    def once(listening: socket.socket) -> None:
        try:
            connection, _ = listening.accept()
            with context.wrap_socket(connection, server_side=True) as wrapped:
                heard.append(wrapped.recv(65536))
        except OSError:
            pass

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=once, args=(listening,), daemon=True)
        thread.start()
        ran = apply(url=f"https://127.0.0.1:{listening.getsockname()[1]}")
        thread.join(10)
    assert ran.code == 3
    assert "TLS fails (" in one_line(ran)
    assert not any(heard)


def test_without_the_extra_it_says_how_to_get_it(apply: Apply, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(sys.modules):
        if name.endswith(("dashboards.apply", "dashboards.shipped", "dashboards.export")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "yaml", None)
    ran = apply()
    assert ran.code == 1
    assert one_line(ran) == "kvscope: dashboards needs yaml: pip install 'kvscope[grafana]'"


# --- Ctrl-C ----------------------------------------------------------------------------------------


def test_ctrl_c_stops_between_two_objects(grafana: GrafanaServer) -> None:
    reached, release = threading.Event(), threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        reached.set()
        release.wait(30)
        body = {"uid": "kvscope-jaeger", "name": "x", "type": "jaeger", "access": "proxy", "url": JAEGER}
        grafana.sources["kvscope-jaeger"] = {**body, "version": 1, "readOnly": False, "jsonData": {}}
        reply(handler, 200, '{"message": "Datasource added"}')

    grafana.instead("POST /api/datasources", slow)
    command = [sys.executable, "-m", "kvscope.cli", "dashboards", "apply", "--grafana-url", grafana.url]
    process = subprocess.Popen(
        [*command, "--prometheus-url", PROMETHEUS, "--jaeger-url", JAEGER, "--timeout", "60"],
        env={**os.environ, "GRAFANA_TOKEN": TOKEN},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert reached.wait(60)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert "stopping after this object" in process.stderr.readline()
        release.set()
        out, err = process.communicate(timeout=60)
    finally:
        release.set()
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert list(Ran(130, out, err).actions) == OBJECTS[:2]
    assert "2 created; stopped before the end, run it again for the rest" in out
    assert "Traceback" not in err
    assert len(grafana.writes) == 2


# --- the rules as Grafana has them -----------------------------------------------------------------


def test_durations_are_written_as_grafana_writes_them() -> None:
    given = ("0s", "", "90s", "60m", "1h30m", "36h", "7d", "1w", "8d", "250ms", "2m")
    written = ["0s", "0s", "1m30s", "1h", "1h30m", "1d12h", "1w", "1w", "8d", "250ms", "2m"]
    assert [alerting.duration(text) for text in given] == written


def test_uids_of_alerts_are_short_and_differ() -> None:
    names = ["KvscopeTTFTBurnFast", "Kvscope" + "VeryLongName" * 5, "Kvscope" + "VeryLongName" * 6, "Other"]
    groups = [{"name": "g", "rules": [{"alert": name, "expr": "x"} for name in names]}]
    uids = [rule["uid"] for group in alerting.alert_groups(groups) for rule in group["rules"]]
    assert uids[0] == "kvscope-ttft-burn-fast"
    assert uids[3] == "kvscope-other"
    assert len(set(uids)) == 4
    assert all(ship.is_uid(uid) for uid in uids)
