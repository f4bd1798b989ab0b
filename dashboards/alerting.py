"""Prometheus alerting rules as Grafana evaluates them: for its HTTP API, and for its provisioning files.

Recording rules stay Prometheus's: Grafana would need a place to write to. An alert fires, as in Prometheus,
for every series that its expression returns, whatever the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from hashlib import blake2b
from typing import Any

from kvscope.dashboards.shipped import FOLDER_TITLE, FOLDER_UID, PROMETHEUS_UID

BASE_INTERVAL_S = 10
"""Grafana evaluates at multiples of it."""
DEFAULT_INTERVAL_S = 60
MAX_UID = 40

_UNITS_S = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800, "y": 31536000}
_DURATION = re.compile(r"(\d+)(ms|[smhdwy])")
_LABELS, _VALUE = re.compile(r"\$labels\b"), re.compile(r"\$value\b")


def alert_groups(
    groups: Iterable[Mapping[str, Any]],
    prometheus_uid: str = PROMETHEUS_UID,
    folder_uid: str = FOLDER_UID,
) -> list[dict[str, Any]]:
    """The groups that have alerts, as `PUT /api/v1/provisioning/folder/…/rule-groups/…` takes them."""
    found: list[dict[str, Any]] = []
    uids: set[str] = set()
    titles: set[str] = set()
    for group in groups:
        alerts = [rule for rule in group.get("rules") or [] if rule.get("alert")]
        if not alerts:
            continue
        rules = []
        for rule in alerts:
            title = _free(str(rule["alert"]), rule, titles)
            rules.append(_rule(rule, title, _uid(title, uids), group["name"], prometheus_uid, folder_uid))
        interval = seconds(group.get("interval") or "") or DEFAULT_INTERVAL_S
        found.append(
            {
                "title": group["name"],
                "folderUid": folder_uid,
                "interval": max(1, -int(-interval // BASE_INTERVAL_S)) * BASE_INTERVAL_S,
                "rules": rules,
            }
        )
    return found


def provisioning_file(groups: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What `alert_groups` made, as a file in Grafana's `provisioning/alerting`."""
    return {
        "apiVersion": 1,
        "groups": [
            {
                "orgId": 1,
                "name": group["title"],
                "folder": FOLDER_TITLE,
                "interval": f"{group['interval']}s",
                "rules": [
                    {
                        **{key: value for key, value in rule.items() if key in _FILE_KEYS},
                        "annotations": {k: _in_file(v) for k, v in rule["annotations"].items()},
                        "labels": {k: _in_file(v) for k, v in rule["labels"].items()},
                    }
                    for rule in group["rules"]
                ],
            }
            for group in groups
        ],
    }


def recorded_and_used(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Names of recording rules that the alerts read: Prometheus must record them."""
    rules = [rule for group in groups for rule in group.get("rules") or []]
    alerts = " ".join(str(rule.get("expr")) for rule in rules if rule.get("alert"))
    words = set(re.findall(r"[A-Za-z_:][\w:]*", alerts))
    return sorted({str(rule["record"]) for rule in rules if rule.get("record")} & words)


def seconds(text: object) -> float:
    """Seconds of a Prometheus duration such as `1h30m`; 0 for none."""
    return sum(int(count) * _UNITS_S[unit] for count, unit in _DURATION.findall(str(text)))


def duration(text: object) -> str:
    """A Prometheus duration as Grafana writes it: the largest units first, `90s` is `1m30s`."""
    rest = round(seconds(text) * 1000)
    parts = []
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("m", 60_000), ("s", 1000), ("ms", 1)):
        count, rest = divmod(rest, size)
        parts.append(f"{count}{unit}" if count else "")
    weeks, days = divmod(seconds(text), 604_800)
    if weeks and not days:
        return f"{weeks:.0f}w"
    return "".join(parts) or "0s"


_FILE_KEYS = ("uid", "title", "condition", "data", "noDataState", "execErrState", "for")


def _rule(
    rule: Mapping[str, Any], title: str, uid: str, group: str, prometheus_uid: str, folder_uid: str
) -> dict[str, Any]:
    return {
        "uid": uid,
        "orgID": 1,
        "folderUID": folder_uid,
        "ruleGroup": group,
        "title": title,
        "condition": "threshold",
        "data": [
            _query("query", prometheus_uid, expr=str(rule["expr"]).strip(), instant=True, range=False),
            # Prometheus fires for any value, NaN too; Grafana only for one above a threshold.
            _query(
                "any_value",
                "__expr__",
                type="math",
                expression="is_number($query) || is_nan($query) || is_inf($query)",
            ),
            _query(
                "threshold",
                "__expr__",
                type="threshold",
                expression="any_value",
                conditions=[{"evaluator": {"type": "gt", "params": [0]}}],
            ),
        ],
        "noDataState": "OK",  # no series: nothing is wrong, as in Prometheus
        "execErrState": "Error",
        "for": duration(rule.get("for") or "0s"),
        "annotations": {k: _template(str(v)) for k, v in (rule.get("annotations") or {}).items()},
        "labels": {k: _template(str(v)) for k, v in (rule.get("labels") or {}).items()},
        "isPaused": False,
    }


def _query(ref: str, source: str, **model: Any) -> dict[str, Any]:
    # Grafana adds the two limits where they are missing, and the rule would never compare equal.
    limits = {"intervalMs": 1000, "maxDataPoints": 43200}
    return {
        "refId": ref,
        "queryType": "",
        "relativeTimeRange": {"from": 600, "to": 0},
        "datasourceUid": source,
        "model": {"refId": ref, **limits, **model},
    }


def _template(text: str) -> str:
    """`$value` is a number in Prometheus, in Grafana a sentence; its number is `$values.query.Value`."""
    return _VALUE.sub("$values.query.Value", text)


def _in_file(text: str) -> str:
    """Without the `$` that Grafana takes for an environment variable in its files."""
    text = text.replace("$values.query", ".Values.query")
    return _LABELS.sub(".Labels", text).replace("$", "$$")


def _free(title: str, rule: Mapping[str, Any], taken: set[str]) -> str:
    """Grafana wants titles that differ within a folder; Prometheus has one name for several severities."""
    severity = (rule.get("labels") or {}).get("severity")
    candidates = [title, *([f"{title} ({severity})"] if severity else [])]
    candidates += [f"{title} ({n})" for n in range(2, len(taken) + 3)]
    found = next(name for name in candidates if name not in taken)
    taken.add(found)
    return found


def _uid(title: str, taken: set[str]) -> str:
    """A uid that stays the same as long as the title does."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z][a-z]*|[a-z]+|\d+", title)
    name = "-".join(word.lower() for word in words if word)
    name = name if name.startswith("kvscope") else f"kvscope-{name}"
    if len(name) > MAX_UID or name in taken:
        name = f"{name[: MAX_UID - 9]}-{blake2b(title.encode(), digest_size=4).hexdigest()}"
    taken.add(name)
    return name
