"""The dashboards ask for what the daemon tells, keep the rules of the house, and lead where they say."""

from __future__ import annotations

import json
import re
import sys
import urllib.parse
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvscope import metrics as m
from kvscope.dashboards import build, promql
from kvscope.dashboards.expressions import VALUES, Expression, expressions, filled, panels
from kvscope.dashboards.panels import CLASS_COLOURS
from kvscope.filters import parse_filter
from kvscope.lookup import Listing

from .analysis import SERIES, Wrong, labels, parse

ROOT = Path(__file__).parent.parent.parent
GRAFANA = ROOT / "dashboards" / "grafana"

Json = dict[str, Any]

DASHBOARDS: dict[str, Json] = {
    path.stem: json.loads(path.read_text()) for path in sorted(GRAFANA.glob("*.json"))
}
PANELS = [(uid, panel) for uid, dashboard in DASHBOARDS.items() for panel in panels(dashboard)]
QUERIES = [(uid, e) for uid, dashboard in DASHBOARDS.items() for e in expressions(dashboard)]
ON_TRACES = {"${jaeger}"}

QUESTIONS = [
    "Is it compute or coordination?",
    "Which step?",
    "Which pair or engine?",
    "Push, pull or bidirectional: what would change?",
    "Is anything stuck, expired, recomputed?",
    "Can I trust these numbers?",
]


def named(uid: str, panel: Json) -> str:
    return f"{uid}: {panel['title']}"


def variables(uid: str) -> set[str]:
    return {variable["name"] for variable in DASHBOARDS[uid]["templating"]["list"]}


def legend_labels(legend: str) -> set[str]:
    return set(re.findall(r"\{\{\s*(\w+)\s*\}\}", legend))


# --- the files -----------------------------------------------------------------------------------------


def test_a_committed_file_is_not_what_the_code_makes() -> None:
    assert build.stale() == [], "run `make dashboards`"
    assert set(DASHBOARDS) == set(build.dashboards())


def test_a_stale_a_missing_and_a_strange_file_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(build, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["build"])
    (tmp_path / "docs").mkdir()
    assert build.main() == 0
    assert build.stale() == []
    grafana = tmp_path / "dashboards" / "grafana"
    (grafana / "kvscope-flow.json").write_text("{}")
    (grafana / "kvscope-self.json").unlink()
    (grafana / "old.json").write_text("{}")
    monkeypatch.setattr(sys, "argv", ["build", "--check"])
    assert build.main() == 1
    names = ", ".join(f"dashboards/grafana/{name}.json" for name in ("kvscope-flow", "kvscope-self", "old"))
    assert capsys.readouterr().err == f"stale: {names}; run `make dashboards`\n"


def test_the_overview_asks_the_questions_in_the_order_of_a_request() -> None:
    rows = [panel["title"] for panel in DASHBOARDS["kvscope-overview"]["panels"] if panel["type"] == "row"]
    assert rows == QUESTIONS
    assert list(build.dashboards()) == [
        f"kvscope-{name}" for name in ("overview", "flow", "pairs", "sessions", "engines", "self")
    ]


# --- expressions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("uid", DASHBOARDS)
def test_an_expression_that_means_nothing(uid: str) -> None:
    wrong = []
    for e in expressions(DASHBOARDS[uid]):
        try:
            found = labels(parse(e.expr))
        except Wrong as error:
            wrong.append((e.panel, e.ref_id, str(error)))
            continue
        assert found is not None, f"{e.panel} shows a number, not series"
        if missing := legend_labels(e.legend) - found:
            wrong.append((e.panel, e.ref_id, f"the result has no {missing} for its legend"))
    assert wrong == []


@pytest.mark.parametrize(
    ("expr", "why"),
    [
        ("sum(rate(kvscope_ttft_seconds_sum[5m])", "unclosed"),
        ("rate(kvscope_nothing_total[5m])", "none of"),
        ('rate(kvscope_requests_total{engine="a"}[5m])', "no label engine"),
        ("kvscope_requests_total", "without rate"),
        ("kvscope_requests_total unless kvscope_joins_total offset 5m", "without rate"),
        ("kvscope_requests_total unless kvscope_requests_total", "without rate"),
        ("rate(kvscope_kv_blocks[5m])", "gauge"),
        ("rate(kvscope_lead_seconds_sum[5m])", "none of"),
        ("sum by (engine) (rate(kvscope_requests_total[5m]))", "by ['engine']"),
        ("histogram_quantile(0.5, sum by (model) (rate(kvscope_ttft_seconds_bucket[5m])))", "without le"),
        ("sum(histogram_quantile(1, sum by (le, model) (rate(kvscope_ttft_seconds_bucket[5m]))))", "sum of"),
        (
            "histogram_quantile(0.5, sum by (le) (rate(kvscope_ttft_seconds_bucket[5m])))"
            " + histogram_quantile(0.5, sum by (le) (rate(kvscope_tpot_seconds_bucket[5m])))",
            "+ of percentiles",
        ),
        (
            "sum by (class) (rate(kvscope_ttft_class_seconds_total[5m]))"
            " / sum(rate(kvscope_ttft_seconds_sum[5m]))",
            "match on nothing",
        ),
        ("kvscope_kv_blocks / on (host) kvscope_kv_blocks", "one side"),
    ],
)  # fmt: skip
def test_wrong_expressions_are_caught(expr: str, why: str) -> None:
    with pytest.raises(Wrong, match=re.escape(why)):
        labels(parse(expr))


def test_a_variable_that_nobody_gives() -> None:
    with pytest.raises(KeyError):
        filled('x{a="$strange"}', VALUES)
    assert filled('x{a=~"${model:regex}"}[$__range]', {"model": "m", "__range": "1h"}) == 'x{a=~"m"}[1h]'


def test_a_metric_or_a_label_that_a_selector_must_not_have() -> None:
    with pytest.raises(ValueError, match="operation"):
        promql.series(m.TTFT, 'operation="READ"', part="sum")
    with pytest.raises(ValueError, match="histogram"):
        promql.series(m.TTFT)


NOT_SHOWN = {
    "kvscope_cleanup_requests_total",  # vLLM's own, of no consequence
    "kvscope_predicted_requests_total",  # for those who want to know what the prediction rests on
}


def test_a_metric_that_no_panel_shows() -> None:
    shown = {name for _, e in QUERIES for name in re.findall(r"kvscope_\w+", e.expr)}
    hidden = {metric.name for metric, _, _ in SERIES.values()}
    hidden -= {metric.name for name, (metric, _, _) in SERIES.items() if name in shown}
    assert hidden == NOT_SHOWN


def test_windows_are_those_that_grafana_chooses() -> None:
    windows = Counter(
        window
        for _, panel in PANELS
        for target in panel["targets"]
        for window in re.findall(r"\[([^\]]+)\]", target.get("expr", ""))
    )
    assert set(windows) == {"$__rate_interval", "$__range"}


def test_graphs_follow_the_time_and_numbers_cover_the_window() -> None:
    for uid, panel in PANELS:
        for target in panel["targets"]:
            if "expr" not in target:
                continue
            graph = panel["type"] == "timeseries"
            assert target["range"] == graph, named(uid, panel)
            assert target["instant"] != graph, named(uid, panel)
            assert ("$__rate_interval" in target["expr"]) <= graph, named(uid, panel)


def test_percentiles_are_never_stacked() -> None:
    for uid, panel in PANELS:
        custom = panel.get("fieldConfig", {}).get("defaults", {}).get("custom", {})
        if custom.get("stacking", {}).get("mode", "none") != "none":
            assert not any("histogram_quantile" in target["expr"] for target in panel["targets"]), named(
                uid, panel
            )


def test_latency_panels_have_exemplars() -> None:
    """Of the metrics that carry some: the requests' own."""
    for uid, panel in PANELS:
        percentiles = [
            target
            for target in panel["targets"]
            if panel["type"] == "timeseries"
            and re.search(r"quantile.*(ttft|step|lead|tpot)\w*_seconds_bucket", target.get("expr", ""))
        ]
        if percentiles and panel["title"] != "TPOT p99 by connector":
            assert any(target.get("exemplar") for target in percentiles), named(uid, panel)
            assert "trace" in panel["description"], named(uid, panel)


def test_classes_have_the_colours_of_kvscope_top() -> None:
    shown = 0
    for uid, panel in PANELS:
        if [target.get("legendFormat") for target in panel["targets"]] != ["{{class}}"]:
            continue
        found = {
            override["matcher"]["options"].strip("/^$"): override["properties"][0]["value"]["fixedColor"]
            for override in panel["fieldConfig"]["overrides"]
        }
        assert found == CLASS_COLOURS, named(uid, panel)
        shown += 1
    assert shown >= 4


# --- the rules of the house ----------------------------------------------------------------------------


def test_every_panel_says_what_it_means() -> None:
    for uid, panel in PANELS:
        about = named(uid, panel)
        assert panel["title"], about
        assert len(panel["description"]) >= 40, about
        assert panel["description"].endswith("."), about
        if panel["datasource"]["uid"] not in ON_TRACES and panel["type"] != "table":
            assert panel["fieldConfig"]["defaults"]["unit"], about


def test_no_data_source_is_fixed() -> None:
    for uid, dashboard in DASHBOARDS.items():
        found = set(re.findall(r'"uid": "([^"]*)"', json.dumps(dashboard))) - {uid}
        assert found <= {"${datasource}", "${jaeger}"}, uid
        assert [v["name"] for v in dashboard["templating"]["list"]][:2] == ["datasource", "jaeger"]


def test_panels_have_ids_of_their_own_and_lie_apart() -> None:
    for uid, dashboard in DASHBOARDS.items():
        ids = Counter(panel["id"] for panel in dashboard["panels"])
        assert None not in ids, uid
        assert max(ids.values()) == 1, uid
        cells: Counter[tuple[int, int]] = Counter()
        for panel in dashboard["panels"]:
            at = panel["gridPos"]
            assert at["x"] + at["w"] <= 24, named(uid, panel)
            cells.update((at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"]))
        assert max(cells.values()) == 1, uid


def test_thresholds_rise() -> None:
    for uid, panel in PANELS:
        found = re.findall(r'"steps": (\[.*?\])', json.dumps(panel.get("fieldConfig", {})))
        for steps in map(json.loads, found):
            values = [step["value"] for step in steps]
            assert values[0] is None, named(uid, panel)
            assert values[1:] == sorted(values[1:]), named(uid, panel)


# --- what is read at the usual size, 1600 pixels wide ---------------------------------------------------


def of_type(*types: str) -> list[tuple[str, Json]]:
    return [(uid, panel) for uid, panel in PANELS if panel["type"] in types]


def test_a_title_that_is_cut_off() -> None:
    for uid, panel in PANELS:
        letters = 14 + 8 * (panel["gridPos"]["w"] - 3)
        assert len(panel["title"]) <= letters, f"{named(uid, panel)}: more than {letters} letters"


def test_a_legend_that_hides_lines() -> None:
    """A table below a graph shows three rows, and the largest may not be among them."""
    for uid, panel in of_type("timeseries"):
        legend = panel["options"]["legend"]
        if legend["displayMode"] == "list":
            assert legend["calcs"] == [], named(uid, panel)
            continue
        assert legend["placement"] == "right", named(uid, panel)
        assert panel["gridPos"]["w"] >= 12, named(uid, panel)
        assert (legend["sortBy"], legend["sortDesc"]) == ("Mean", True), named(uid, panel)


def test_a_legend_of_ten_engines_that_is_cut_off() -> None:
    for uid, panel in of_type("timeseries"):
        if any(legend_labels(target["legendFormat"]) & {"engine", "p_engine"} for target in panel["targets"]):
            assert panel["gridPos"]["h"] >= 10, named(uid, panel)


def test_a_graph_that_draws_all_of_many_engines_or_pairs() -> None:
    for uid, panel in of_type("timeseries"):
        for target in panel["targets"]:
            if legend_labels(target["legendFormat"]) & {"engine", "p_engine", "d_engine"}:
                assert "topk(10" in target["expr"], named(uid, panel)


def test_a_graph_of_zeros_has_an_axis_that_means_something() -> None:
    for uid, panel in of_type("timeseries"):
        defaults = panel["fieldConfig"]["defaults"]
        end = defaults.get("max", defaults["custom"].get("axisSoftMax"))
        assert end is not None, named(uid, panel)
        assert 0 < end <= (1024 if defaults["unit"].lower().startswith("b") else 1), named(uid, panel)


def test_names_and_values_of_bars_are_written_small() -> None:
    for uid, panel in of_type("bargauge"):
        beside = panel["options"]["namePlacement"] == "left"
        text = {"valueSize": 16} if beside else {"titleSize": 13, "valueSize": 16}
        assert panel["options"]["text"] == text, named(uid, panel)
        assert beside <= (panel["gridPos"]["w"] >= 6), named(uid, panel)


def test_a_bar_of_less_than_nothing() -> None:
    """It would be empty, and the smaller loss the longer bar."""
    for uid, panel in of_type("bargauge"):
        assert panel["fieldConfig"]["defaults"]["min"] == 0, named(uid, panel)
        assert not any(" - " in target["expr"] for target in panel["targets"]), named(uid, panel)


def test_only_figures_have_units() -> None:
    """An engine that is named 1 is not `1 s`."""
    for uid, panel in of_type("table"):
        config = panel.get("fieldConfig", {"defaults": {}, "overrides": []})
        assert "unit" not in config["defaults"], named(uid, panel)
        if panel["datasource"]["uid"] in ON_TRACES:
            continue
        (organize,) = (t["options"] for t in panel["transformations"] if t["id"] == "organize")
        figures = {title for name, title in organize["renameByName"].items() if name.startswith("Value")}
        with_unit = {
            override["matcher"]["options"]
            for override in config["overrides"]
            if any(property_["id"] == "unit" for property_ in override["properties"])
        }
        assert with_unit == figures, named(uid, panel)


def test_a_table_that_is_wider_than_its_panel() -> None:
    for uid, panel in of_type("table"):
        if panel["datasource"]["uid"] in ON_TRACES:
            continue
        (organize,) = (t["options"] for t in panel["transformations"] if t["id"] == "organize")
        titles = list(organize["renameByName"].values())
        widths = {
            override["matcher"]["options"]: property_["value"]
            for override in panel["fieldConfig"]["overrides"]
            for property_ in override["properties"]
            if property_["id"] == "custom.width"
        }
        # What is left is shared by the others.
        room = panel["gridPos"]["w"] * 1576 / 24 - 24 - sum(widths.values())
        share = room / max(1, len(titles) - len(widths))
        assert share >= panel["fieldConfig"]["defaults"]["custom"]["minWidth"], named(uid, panel)
        for title in titles:
            width = widths.get(title, share)
            assert width >= 8 * len(title), f"{named(uid, panel)}: {title}"
            if title.lower().endswith("engine"):
                assert width >= 220, f"{named(uid, panel)}: names of engines are cut off"


def test_rare_events_are_counted() -> None:
    """0.06 per second is not read by anybody."""
    rare = "lease|handshake|failure|recomputed|preempt|late_reads|after_expiry|lost|torn|rejected|clamped"
    for uid, panel in of_type("timeseries"):
        unit = panel["fieldConfig"]["defaults"]["unit"]
        if unit not in ("cps", "reqps") or panel["title"] == "Tokens":
            continue
        for target in panel["targets"]:
            names = re.findall(r"kvscope_\w+", target["expr"])
            assert not any(re.search(rare, name) for name in names), named(uid, panel)


def test_a_number_with_a_meaning_is_said_in_words() -> None:
    (store,) = (p for uid, p in of_type("stat") if (uid, p["title"]) == ("kvscope-self", "Store"))
    (mapping,) = store["fieldConfig"]["defaults"]["mappings"]
    assert {value: told["text"] for value, told in mapping["options"].items()} == {"0": "ok", "1": "failing"}


def test_variables_ask_for_labels_that_there_are() -> None:
    for uid, dashboard in DASHBOARDS.items():
        known: set[str] = set()
        for variable in dashboard["templating"]["list"]:
            if variable["type"] == "query":
                text = variable["query"]["query"]
                match = re.fullmatch(r"label_values\((.+), (\w+)\)", text)
                assert match, text
                metric, _, _ = SERIES[match[1].split("{")[0]]
                assert match[2] in (*metric.labels, "instance"), text
                assert labels(parse(filled(match[1], VALUES)), metric.kind == m.COUNTER), text
                # Each is narrowed by those before it only.
                assert set(re.findall(r"\$(\w+)", text)) <= known, text
            known.add(variable["name"])
        used = {
            name
            for panel in panels(dashboard)
            for target in panel["targets"]
            for name in re.findall(r"\$(\w+)", json.dumps(target))
            if not name.startswith("__")
        }
        assert used <= known, uid


def test_traffic_never_mixes() -> None:
    for uid, dashboard in DASHBOARDS.items():
        variable = next(v for v in dashboard["templating"]["list"] if v["name"] == "traffic")
        assert not variable["multi"], uid
        assert variable["current"]["value"] == m.PRODUCTION
    for uid, e in QUERIES:
        for name, body in re.findall(r"\b(kvscope_\w+)(\{[^}]*\})?", e.expr):
            if name in SERIES and "traffic" in SERIES[name][1] and name != m.ENGINE_INFO.name:
                assert 'traffic="production"' in body, f"{uid}: {e.panel}"


# --- links ---------------------------------------------------------------------------------------------


def links(panel: Json) -> list[Json]:
    config = panel.get("fieldConfig", {})
    found = list(config.get("defaults", {}).get("links", []))
    for override in config.get("overrides", []):
        found += [
            link
            for property_ in override["properties"]
            if property_["id"] == "links"
            for link in property_["value"]
        ]
    return found


LINKS = [(uid, panel, link) for uid, panel in PANELS for link in links(panel)]
MACRO = re.compile(r"\$\{([^}:]+)(?::\w+)?\}")


def result_labels(panel: Json, uid: str) -> set[str]:
    found = [labels(parse(e.expr)) for e in expressions(DASHBOARDS[uid]) if e.panel_id == panel["id"]]
    return set.intersection(*(set(some or ()) for some in found))


def test_links_know_what_they_carry() -> None:
    for uid, panel, link in LINKS:
        for name in MACRO.findall(link["url"]):
            about = f"{named(uid, panel)}: {name}"
            if name.startswith("__field.labels."):
                assert name.removeprefix("__field.labels.") in result_labels(panel, uid), about
            elif name.startswith("__data.fields["):
                assert name.removeprefix("__data.fields[").rstrip("]") in result_labels(panel, uid), about
            else:
                assert name in variables(uid) | {"__from", "__to", "__url_time_range"}, about


def test_links_lead_to_dashboards_that_exist() -> None:
    found: Counter[str] = Counter()
    for uid, panel, link in LINKS:
        if not link["url"].startswith("/d/"):
            continue
        target, _, rest = link["url"].removeprefix("/d/").partition("?")
        assert target in DASHBOARDS, named(uid, panel)
        carried = set(re.findall(r"\$\{(\w+):queryparam\}", rest)) | set(re.findall(r"var-(\w+)=", rest))
        assert carried <= variables(target), f"{named(uid, panel)} -> {target}: {carried - variables(target)}"
        assert "traffic" in carried
        found[target] += 1
    assert set(found) == set(DASHBOARDS) - {"kvscope-overview"}
    assert any(
        "var-p_engine=" in link["url"] and "var-d_engine=" in link["url"]
        for uid, _, link in LINKS
        if uid == "kvscope-overview"
    ), "no way from a pair to its dashboard"


def test_links_ask_the_daemon_what_it_answers() -> None:
    asked = 0
    for uid, panel, link in LINKS:
        if "/api/v1/requests?" not in link["url"]:
            continue
        url = MACRO.sub("1", link["url"])
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(url).query, strict_parsing=True)
        given: Json = {name: values[0] for name, values in query.items() if name != "where"}
        listing = msgspec.convert({**given, "where": query.get("where", [])}, Listing, strict=False)
        for text in listing.where:
            parse_filter(text)
        assert listing.sort == "ttft_ns", named(uid, panel)
        asked += 1
    assert asked > 10


def test_links_to_traces_name_the_engine_and_the_window() -> None:
    found = [link["url"] for _, _, link in LINKS if link["url"].startswith("/explore")]
    assert found
    for url in found:
        panes = json.loads(urllib.parse.parse_qs(urllib.parse.urlsplit(url).query)["panes"][0])
        (pane,) = panes.values()
        assert pane["datasource"] == "${jaeger}"
        assert pane["range"] == {"from": "${__from}", "to": "${__to}"}
        assert pane["queries"][0]["service"] == "${__data.fields[d_engine]:percentencode}"


# --- docs ----------------------------------------------------------------------------------------------


def test_the_docs_name_every_dashboard_and_question() -> None:
    text = (ROOT / "docs" / "grafana.md").read_text()
    for uid, dashboard in DASHBOARDS.items():
        assert uid in text
        for panel in dashboard["panels"]:
            if panel["type"] == "row":
                assert panel["title"] in text, f"docs/grafana.md lacks: {panel['title']}"


def test_expressions_are_told_with_their_panel() -> None:
    first = expressions(DASHBOARDS["kvscope-overview"], {"traffic": "canary"})[0]
    assert isinstance(first, Expression)
    assert (first.panel, first.ref_id, first.legend, first.instant) == ("Coordination wait", "A", "", True)
    assert 'traffic="canary"' in first.expr
    assert "$" not in "".join(e.expr for _, e in QUERIES)
