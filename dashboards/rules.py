"""Prometheus rules: recordings and alerts as YAML that is the same for the same parameters, byte for byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from kvscope.dashboards.alerts import Alert, alerts
from kvscope.dashboards.parameters import Parameters, check, listed
from kvscope.dashboards.recordings import Recording, recordings
from kvscope.dashboards.runbook import anchor, page

__all__ = [
    "Alert",
    "Parameters",
    "Recording",
    "alerts",
    "annotations",
    "expanded",
    "files",
    "listed",
    "recordings",
]

RECORDING_FILE, ALERT_FILE = "kvscope-recording.yaml", "kvscope-alerts.yaml"
NOTE = (
    "# Written by `python -m kvscope.dashboards.build`. Change dashboards/*.py, not this file.\n"
    "# Thresholds are in dashboards/parameters.py; docs/runbook.md says what each alert means.\n"
)
_RECORDED = re.compile(r"kvscope:\w+:\w+")


def files(parameters: Parameters | None = None) -> dict[str, str]:
    """The rule files by name.

    Raises:
        UsageError: parameters that make no rule.
    """
    parameters = parameters or Parameters()
    check(parameters)
    return {
        RECORDING_FILE: _file(recordings(parameters), _recording),
        ALERT_FILE: _file(alerts(parameters), lambda alert: _alert(alert, parameters)),
    }


def runbook() -> str:
    """docs/runbook.md."""
    return page(alerts(Parameters()), listed())


def told(alert: Alert, parameters: Parameters | None = None) -> dict[str, str]:
    """What an alert tells, as templates of Prometheus."""
    parameters = parameters or Parameters()
    return {
        "summary": alert.summary,
        "description": alert.description,
        "runbook_url": f"{parameters.runbook}#{anchor(alert.name)}",
        "dashboard_uid": alert.dashboard,
    }


def expanded(query: str, parameters: Parameters | None = None) -> str:
    """The same with metrics of the daemon only, for where the recording rules are not loaded."""
    known = {r.name: r.expr for r in recordings(parameters or Parameters()) if not r.labels}
    return _RECORDED.sub(lambda found: f"({known[found[0]]})", query)


def _file(rules: Sequence[Recording] | Sequence[Alert], lines: object) -> str:
    assert callable(lines)
    out = ["groups:"]
    for group, members in groupby(rules, key=lambda rule: rule.group):
        out += [f"  - name: {group}", "    rules:"]
        for rule in members:
            out += _item(lines(rule))
    return NOTE + "\n".join(out) + "\n"


def _item(lines: Iterable[str]) -> Iterator[str]:
    for at, line in enumerate(lines):
        yield f"      {'  ' if at else '- '}{line}"


def _recording(rule: Recording) -> Iterator[str]:
    yield f"record: {rule.name}"
    yield from _block("expr", rule.expr)
    if rule.labels:
        yield from _map("labels", dict(rule.labels))


def _alert(alert: Alert, parameters: Parameters) -> Iterator[str]:
    yield f"alert: {alert.name}"
    yield from _block("expr", alert.expr)
    yield f"for: {alert.for_}"
    yield from _map("labels", {"severity": alert.severity})
    yield from _map("annotations", told(alert, parameters))


def _block(key: str, text: str) -> Iterator[str]:
    yield f"{key}: |-"
    yield from (f"  {line}" for line in text.splitlines())


def _map(key: str, values: dict[str, str]) -> Iterator[str]:
    yield f"{key}:"
    # A JSON string is a YAML string.
    yield from (f"  {name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values.items())
