"""A dashboard: its rows, its variables, its links to the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from grafana_foundation_sdk.builders import dashboard as build
from grafana_foundation_sdk.cog.builder import Builder
from grafana_foundation_sdk.models import dashboard as d

from kvscope import metrics as m
from kvscope.dashboards.panels import Panel
from kvscope.dashboards.sources import PROMETHEUS

TAGS = ["kvscope", "vllm"]


class Row(NamedTuple):
    """A question, and the panels that answer it."""

    id: int
    question: str
    panels: Sequence[Panel]


def dashboard(
    uid: str,
    title: str,
    description: str,
    rows_: Sequence[Row],
    *,
    pairs: bool = False,
    traces: bool = False,
) -> d.Dashboard:
    """A dashboard with the variables and links that all have.

    Args:
        pairs: whether it has the variables p_engine and d_engine too.
        traces: whether it has the variables `traced` (an engine) and `trace` (an id) too.
    """
    made = (
        build.Dashboard(title)
        .uid(uid)
        .description(" ".join(description.split()))
        .tags(TAGS)
        .timezone("browser")
        .time("now-1h", "now")
        .refresh("30s")
        .tooltip(d.DashboardCursorSync.CROSSHAIR)
        .editable()
        .version(1)
    )
    for variable in _variables(pairs, traces):
        made.with_variable(variable)
    made.link(
        build.DashboardLink("kvscope")
        .type(d.DashboardLinkType.DASHBOARDS)
        .tags(TAGS)
        .as_dropdown(False)
        .keep_time(True)
        .include_vars(True)
    )
    for row in rows_:
        made.with_row(build.Row(row.question).id(row.id))
        for panel in row.panels:
            made.with_panel(panel)
    return made.build()


def _variables(pairs: bool, traces: bool) -> list[Builder[d.VariableModel]]:
    group = 'traffic="$traffic", model=~"$model", connector=~"$connector"'
    found: list[Builder[d.VariableModel]] = [
        build.DatasourceVariable("datasource").label("Prometheus").type("prometheus"),
        build.DatasourceVariable("jaeger")
        .label("Traces")
        .type("jaeger")
        .description("The daemon's Jaeger API, or the Jaeger that it exports to"),
        _query("traffic", "Traffic", m.ENGINE_INFO, "", "KVSCOPE_LABEL of the engines. Traffic never mixes")
        .multi(False)
        .current(d.VariableOption(text=m.PRODUCTION, value=m.PRODUCTION)),
        _all(_query("model", "Model", m.TTFT_CLASS, 'traffic="$traffic"', "Of requests")),
        _all(
            _query(
                "connector", "Connector", m.TTFT_CLASS, 'traffic="$traffic", model=~"$model"', "Of requests"
            )
        ),
        _all(_query("role", "Role", m.ENGINE_INFO, 'traffic="$traffic"', "Of steps and of engines")),
        _every(
            _query("engine", "Engine", m.ENGINE_INFO, f'{group}, role=~"$role"', "Of what is told by engine")
        ),
    ]
    if pairs:
        found += [
            _all(_query("p_engine", "Prefill engine", m.PAIR_REQUESTS, group, "Of pairs")),
            _all(
                _query(
                    "d_engine",
                    "Decode engine",
                    m.PAIR_REQUESTS,
                    f'{group}, p_engine=~"$p_engine"',
                    "Of pairs",
                )
            ),
        ]
    if traces:
        decoders = f'{group}, role!="prefill"'
        found += [
            _query(
                "traced", "Traces of", m.ENGINE_INFO, decoders, "Engine whose requests are listed", "engine"
            ).multi(False),
            build.TextBoxVariable("trace").label("Trace").description("Id of the trace to show"),
        ]
    found.append(
        _query(
            "daemon", "Daemon", m.BUILD_INFO, "", "Whose list of requests links lead to", "instance"
        ).multi(False)
    )
    return found


def _query(
    name: str, title: str, metric: m.Metric, matchers: str, description: str, label_: str = ""
) -> build.QueryVariable:
    text = f"label_values({metric.name}{{{matchers}}}, {label_ or name})"
    return (
        build.QueryVariable(name)
        .label(title)
        .description(description)
        .datasource(PROMETHEUS)
        .query({"query": text, "refId": name, "qryType": 1})
        .refresh(d.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(d.VariableSort.ALPHABETICAL_ASC)
    )


def _every(variable: build.QueryVariable) -> build.QueryVariable:
    """Several, or each of them by name."""
    everything = d.VariableOption(selected=True, text=["All"], value=["$__all"])
    return variable.multi(True).include_all(True).current(everything)


def _all(variable: build.QueryVariable) -> build.QueryVariable:
    """Several, or whatever there is."""
    return _every(variable).all_value(".*")
