"""Links from panels and values: to other dashboards, to traces, to the daemon's list of requests."""

from __future__ import annotations

import json
import re
from typing import NamedTuple
from urllib.parse import quote

from kvscope.dashboards.sources import JAEGER

OVERVIEW, FLOW, PAIRS = "kvscope-overview", "kvscope-flow", "kvscope-pairs"
SESSIONS, ENGINES, SELF = "kvscope-sessions", "kvscope-engines", "kvscope-self"


class Link(NamedTuple):
    """From a panel, or from a value in it, to somewhere else."""

    title: str
    url: str
    new_tab: bool = False


_KEPT = ("datasource", "jaeger", "traffic", "model", "connector", "role", "engine", "daemon")


def to_dashboard(title: str, uid: str, **variables: str) -> Link:
    """Another dashboard, for the same window and with the same variables but for these."""
    kept = [f"${{{name}:queryparam}}" for name in _KEPT if name not in variables]
    given = [f"var-{name}={value}" for name, value in variables.items()]
    return Link(title, f"/d/{uid}?" + "&".join(["${__url_time_range}", *kept, *given]))


def to_requests(title: str, *filters: str) -> Link:
    """The daemon's list of requests since the window began, the slowest first; filters as `column=value`."""
    where = [f"where={_encoded(text)}" for text in filters]
    # Grafana counts milliseconds, the daemon nanoseconds.
    rest = ["since=${__from}000000", *where, "sort=ttft_ns", "limit=100"]
    return Link(title, "http://${daemon}/api/v1/requests?" + "&".join(rest), True)


def to_traces(title: str, engine: str) -> Link:
    """Grafana's search for traces of the window in which `engine` took part."""
    source = {"type": JAEGER.type_val, "uid": JAEGER.uid}
    query = {"refId": "A", "datasource": source, "queryType": "search", "service": engine, "limit": 50}
    pane = {"datasource": JAEGER.uid, "queries": [query], "range": {"from": "${__from}", "to": "${__to}"}}
    panes = json.dumps({"a": pane}, separators=(",", ":"))
    return Link(title, f"/explore?schemaVersion=1&panes={_encoded(panes)}", True)


def _encoded(text: str) -> str:
    """For a URL, but for the variables in it, which Grafana fills in."""
    parts = re.split(r"(\$\{[^}]*\})", text)
    return "".join(part if i % 2 else quote(part, safe="") for i, part in enumerate(parts))


def label(name: str) -> str:
    """A label of the series that was clicked on, for links."""
    return f"${{__field.labels.{name}:percentencode}}"


def cell(name: str) -> str:
    """A column of the row that was clicked on, for links."""
    return f"${{__data.fields[{name}]:percentencode}}"
