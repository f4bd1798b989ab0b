"""Bring folder, data sources, dashboards and alert rules to a Grafana: read, compare, write what differs.

Objects are known by their uid. What Grafana sets by itself (ids, versions, times) is not compared, and what a
site added to a data source stays. Dashboards and rules become what this kvscope ships: changes made by hand
are overwritten, so copies under another uid are the place for them.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec

from kvscope import __version__
from kvscope.dashboards import alerting
from kvscope.dashboards import shipped as ship
from kvscope.dashboards.grafana_api import Grafana, GrafanaRefused
from kvscope.dashboards.shipped import Shipped
from kvscope.errors import KvscopeError, UsageError
from kvscope.text import shortened

MAX_DIFF_LINES = 2000

CREATED, UPDATED, UNCHANGED, USED = "created", "updated", "unchanged", "used"


class Sources(NamedTuple):
    """Where Grafana finds the data: an address makes our own data source, a uid names an existing one."""

    prometheus_url: str = ""
    prometheus_uid: str = ""
    jaeger_url: str = ""
    jaeger_uid: str = ""
    link_exemplars: bool = False
    """Change the existing Prometheus data source so that its exemplars lead to the traces."""


class Change(msgspec.Struct, frozen=True):
    """What happened to one object, or would."""

    kind: str
    uid: str
    title: str
    action: str
    """created, updated, unchanged, or used: it is the site's own, and stays as it is."""
    diff: str = ""


class _Step(NamedTuple):
    """One object: what is there, what shall be, and how to write that."""

    kind: str
    uid: str
    title: str
    now: Any
    """None where there is none."""
    then: Any
    write: Callable[[], None] | None
    """None for what is the site's own."""


def apply(
    grafana: Grafana,
    found: Shipped,
    sources: Sources,
    *,
    folder_uid: str = ship.FOLDER_UID,
    rules: bool = True,
    dry_run: bool = False,
    stop: Callable[[], bool] = lambda: False,
    tell: Callable[[Change], None] = lambda change: None,
    note: Callable[[str], None] = lambda line: None,
) -> None:
    """Make `grafana` have what was `found`; `tell` of each object once it is done, `note` what else matters.

    Stops between two objects when `stop` says so. With `dry_run` nothing is written.

    Raises:
        UsageError: the data sources are not those that were named.
        NoGrafana, GrafanaRefused: as `Grafana` does; what was told before is done.
    """
    for step in _steps(grafana, found, sources, folder_uid, rules, note):
        action = _action(step)
        if action in (CREATED, UPDATED) and not dry_run and step.write is not None:
            step.write()
        diff = "" if action == USED else "\n".join(map(grafana.shown, _diff(step)))
        tell(Change(step.kind, step.uid, grafana.shown(step.title), action, diff))
        if stop():
            return


def _steps(
    grafana: Grafana,
    found: Shipped,
    sources: Sources,
    folder_uid: str,
    rules: bool,
    note: Callable[[str], None],
) -> Iterator[_Step]:
    """The objects in the order in which they need each other; each is read when the one before is written."""
    yield _folder(grafana, folder_uid)
    chosen: dict[str, tuple[str, str]] = {}
    jaeger = _source(grafana, "jaeger", sources.jaeger_url, sources.jaeger_uid)
    link_uid = ""
    if jaeger is None:
        note("no source of traces: exemplars lead nowhere until you give --jaeger-url or --jaeger-uid")
    else:
        yield jaeger
        chosen["jaeger"] = (jaeger.uid, jaeger.title)
        link_uid = jaeger.uid
    link = bool(link_uid) and (not sources.prometheus_uid or sources.link_exemplars)
    prometheus = _source(
        grafana, "prometheus", sources.prometheus_url, sources.prometheus_uid, link_uid if link else ""
    )
    if prometheus is None:
        raise UsageError(
            "say which Prometheus Grafana shall ask: --prometheus-url with its address as Grafana reaches "
            "it, or --prometheus-uid with a data source that Grafana has"
        )
    yield prometheus
    if link_uid and not link and not _linked(prometheus.now, link_uid):
        note(
            f"data source {prometheus.uid} has no link from exemplars ({ship.EXEMPLAR_LABEL}) to "
            f"{link_uid}; --link-exemplars adds it"
        )
    chosen["datasource"] = (prometheus.uid, prometheus.title)
    for uid, dashboard in found.dashboards.items():
        yield _dashboard(grafana, uid, ship.with_sources(dashboard, chosen), folder_uid)
    if not rules:
        return
    groups = ship.rule_groups(found.rule_files)
    for group in alerting.alert_groups(groups, prometheus.uid, folder_uid):
        yield _rule_group(grafana, folder_uid, group)
    if recorded := alerting.recorded_and_used(groups):
        note(
            f"the alerts read {len(recorded)} recorded series, such as {recorded[0]}, which Prometheus has "
            "to record: `kvscope dashboards export` writes its rule file"
        )


def _action(step: _Step) -> str:
    try:
        if step.write is None:
            return USED
        if step.now is None:
            return CREATED
        return UNCHANGED if step.now == step.then else UPDATED
    except RecursionError:
        raise GrafanaRefused(f"what Grafana has as {step.kind} {step.uid} is not its own", 0) from None


# --- the objects -----------------------------------------------------------------------------------


def _folder(grafana: Grafana, uid: str) -> _Step:
    there = grafana.folder(uid)
    if there is None and uid != ship.FOLDER_UID:
        raise UsageError(f"Grafana has no folder {uid}; give the uid of one that it has, or leave it out")
    title = there.get("title") if there else None
    title = title if isinstance(title, str) else ship.FOLDER_TITLE
    # A folder that was renamed is still the folder.
    now = {"title": title, "uid": uid} if there else None
    return _Step(
        "folder",
        uid,
        title,
        now,
        {"title": title, "uid": uid},
        lambda: grafana.create_folder(uid, ship.FOLDER_TITLE),
    )


def _source(grafana: Grafana, type_: str, url: str, uid: str, link_uid: str = "") -> _Step | None:
    """A data source, its exemplars leading to `link_uid`; None where none was named and there is none yet."""
    existing = bool(uid)
    uid = uid or {"prometheus": ship.PROMETHEUS_UID, "jaeger": ship.JAEGER_UID}[type_]
    there = grafana.data_source(uid)
    if there is None:
        if existing:
            raise UsageError(f"Grafana has no data source {uid}; give the uid of one that it has")
        if not url:
            return None
    elif type_ not in str(there.get("type")):
        raise UsageError(
            f"data source {uid} is of type {shortened(grafana.shown(there.get('type')), 40)}, not {type_}; "
            "give the uid of another"
        )
    name = {"prometheus": ship.PROMETHEUS_NAME, "jaeger": ship.JAEGER_NAME}[type_]
    has = there or {}
    if isinstance(has.get("name"), str):
        name = has["name"]
    json_data = has["jsonData"] if isinstance(has.get("jsonData"), dict) else {}
    wanted: dict[str, Any] = {}
    if link_uid:
        wanted["exemplarTraceIdDestinations"] = _destinations(json_data, link_uid)
    if existing and not wanted:
        return _Step("data source", uid, name, there, there, None)
    if not existing and type_ == "prometheus":
        wanted["httpMethod"] = "POST"
    address = url.rstrip("/") or str(has.get("url") or "")
    now = {
        "url": str(has.get("url") or "").rstrip("/"),
        "jsonData": {key: json_data[key] for key in wanted if key in json_data},
    }
    then = {"url": address.rstrip("/"), "jsonData": wanted}
    body = {
        **{key: has[key] for key in _KEPT if key in has},
        "uid": uid,
        "name": name,
        "type": has.get("type") or type_,
        "access": has.get("access") or "proxy",
        "url": address,
        "jsonData": {**json_data, **wanted},
    }

    def write() -> None:
        if there is None:
            grafana.create_data_source(body)
        elif there.get("readOnly") is True:
            raise GrafanaRefused(
                f"data source {uid} comes from a provisioning file of Grafana and can't be changed here; "
                "change that file, or name another source",
                403,
            )
        else:
            grafana.update_data_source(uid, body)

    return _Step("data source", uid, name, now if there else None, then, write)


_KEPT = ("user", "database", "basicAuth", "basicAuthUser", "withCredentials", "isDefault", "version")
"""Of a data source that is there: an update without them would reset them."""


def _destinations(json_data: Mapping[str, Any], link_uid: str) -> list[Any]:
    """Where exemplars lead: ours, and what a site set for other labels."""
    has = json_data.get("exemplarTraceIdDestinations")
    others = [
        entry
        for entry in (has if isinstance(has, list) else [])
        if isinstance(entry, dict) and entry.get("name") != ship.EXEMPLAR_LABEL
    ]
    return [*others, {"name": ship.EXEMPLAR_LABEL, "datasourceUid": link_uid}]


def _linked(source: Any, link_uid: str) -> bool:
    json_data = source.get("jsonData") if isinstance(source, dict) else None
    has = json_data.get("exemplarTraceIdDestinations") if isinstance(json_data, dict) else None
    return isinstance(has, list) and any(
        isinstance(entry, dict) and entry.get("datasourceUid") == link_uid for entry in has
    )


def _dashboard(grafana: Grafana, uid: str, dashboard: dict[str, Any], folder_uid: str) -> _Step:
    there = grafana.dashboard(uid)
    has: Any = there.get("dashboard") if there else {}
    meta: Any = there.get("meta") if there else {}
    if not isinstance(has, dict) or not isinstance(meta, dict):
        raise GrafanaRefused(
            f"what Grafana has as dashboard {uid} is none; remove it, then run this again", 0
        )
    then = {"folder": folder_uid, **_own(dashboard)}
    now = {"folder": meta.get("folderUid") or folder_uid, **_own(has)}
    version = has.get("version")

    def write() -> None:
        if meta.get("provisioned") is True:
            raise GrafanaRefused(
                f"dashboard {uid} comes from a provisioning file of Grafana and can't be changed here; "
                "put the files of `kvscope dashboards export` in its place, or remove it",
                400,
            )
        body = {key: value for key, value in dashboard.items() if key not in ("id", "version")}
        if isinstance(version, int):
            # Not overwriting: who saved since it was read is not undone.
            body["version"] = version
        grafana.save_dashboard(
            {
                "dashboard": body,
                "folderUid": folder_uid,
                "overwrite": False,
                "message": f"kvscope {__version__}",
            }
        )

    return _Step("dashboard", uid, dashboard["title"], now if there else None, then, write)


def _own(dashboard: Mapping[str, Any]) -> dict[str, Any]:
    """What is ours of a dashboard: without what Grafana numbers, and without what says nothing."""
    try:
        own = _filled({key: value for key, value in dashboard.items() if key not in ("id", "version")})
    except RecursionError:
        raise GrafanaRefused("a dashboard that Grafana has is nested too deep; remove it", 0) from None
    return own if isinstance(own, dict) else {}


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _filled(v) for k, v in value.items() if v is not None and v != {} and v != []}
    return [_filled(item) for item in value] if isinstance(value, list) else value


def _rule_group(grafana: Grafana, folder_uid: str, group: dict[str, Any]) -> _Step:
    there = grafana.rule_group(folder_uid, group["title"])
    rules = there.get("rules") if there else []
    has: dict[str, dict[str, Any]] = {
        str(rule.get("uid")): rule
        for rule in (rules if isinstance(rules, list) else [])
        if isinstance(rule, dict)
    }
    now = {
        "interval": there.get("interval") if there else None,
        "rules": {uid: _compared(rule) for uid, rule in has.items()},
    }
    then = {
        "interval": group["interval"],
        "rules": {rule["uid"]: _compared(rule) for rule in group["rules"]},
    }
    # A site's own settings of a rule stay: whom it notifies, and that it is paused.
    kept = [
        {**rule, **{key: has.get(rule["uid"], {}).get(key, rule.get(key)) for key in _SITES}}
        for rule in group["rules"]
    ]
    body = {**group, "rules": [{k: v for k, v in rule.items() if v is not None} for rule in kept]}
    return _Step(
        "rule group",
        group["title"],
        f"{len(group['rules'])} alerts",
        now if there else None,
        then,
        lambda: grafana.put_rule_group(folder_uid, body),
    )


_SITES = ("isPaused", "notification_settings")
_RULE_KEYS = ("title", "condition", "data", "noDataState", "execErrState", "for", "annotations", "labels")


def _compared(rule: Mapping[str, Any]) -> dict[str, Any]:
    own = {key: rule.get(key) for key in _RULE_KEYS}
    own["for"] = alerting.duration(own["for"] or "0s")
    return {key: value or {} if key in ("annotations", "labels") else value for key, value in own.items()}


# --- what changed ----------------------------------------------------------------------------------


def _diff(step: _Step) -> list[str]:
    if step.now == step.then:
        return []
    before, after = _lines(step.now), _lines(step.then)
    name = f"{step.kind} {step.uid}"
    lines = list(difflib.unified_diff(before, after, f"{name} (Grafana)", f"{name} (kvscope)", lineterm=""))
    cut = len(lines) - MAX_DIFF_LINES
    if cut > 0:
        lines = [*lines[:MAX_DIFF_LINES], f"… {cut} more lines"]
    return lines


def _lines(value: Any) -> list[str]:
    if value is None:
        return []
    try:
        return json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False).splitlines()
    except (RecursionError, TypeError, ValueError):
        raise KvscopeError("what Grafana has is nested too deep to compare; remove it") from None
