"""What this kvscope ships for Grafana and Prometheus: the generated files, read as package data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
import yaml  # type: ignore[import-untyped, unused-ignore]

from kvscope.errors import KvscopeError

FOLDER_UID = "kvscope"
FOLDER_TITLE = "kvscope"
PROMETHEUS_UID = "kvscope-prometheus"
JAEGER_UID = "kvscope-jaeger"
PROMETHEUS_NAME = "kvscope Prometheus"
JAEGER_NAME = "kvscope traces"
EXEMPLAR_LABEL = "trace_id"
VARIABLES = {"datasource": "prometheus", "jaeger": "jaeger"}
"""Dashboard variable to the type of data source it chooses."""

_UID = re.compile(r"[A-Za-z0-9_-]{1,40}")


class Shipped(NamedTuple):
    """The committed files, checked."""

    dashboards: dict[str, dict[str, Any]]
    """By uid."""
    rule_files: dict[str, str]
    """Prometheus rule files as text, by file name."""


def shipped(root: Any = None) -> Shipped:
    """The dashboards and the rules of this kvscope, from the folder `root` instead where one is given.

    Raises:
        KvscopeError: a file is missing or damaged.
    """
    root = root or files("kvscope.dashboards")
    dashboards: dict[str, dict[str, Any]] = {}
    for name, text in _texts(root / "grafana", ".json").items():
        try:
            found = msgspec.json.decode(text)
            uid, title = found["uid"], found["title"]
        except (msgspec.MsgspecError, KeyError, TypeError):
            raise _damaged(name) from None
        if not isinstance(title, str) or not isinstance(uid, str) or not _UID.fullmatch(uid):
            raise _damaged(name)
        dashboards[uid] = found
    if not dashboards:
        raise KvscopeError("this kvscope came without dashboards; install it again")
    return Shipped(dashboards, _texts(root / "prometheus", ".yaml"))


def rule_groups(rule_files: Mapping[str, str]) -> list[dict[str, Any]]:
    """The groups of Prometheus rules in these files, in order.

    Raises:
        KvscopeError: a file is damaged.
    """
    groups: list[dict[str, Any]] = []
    for name, text in rule_files.items():
        try:
            groups.extend(yaml.safe_load(text)["groups"])
        except (yaml.YAMLError, KeyError, TypeError):
            raise _damaged(name) from None
    return groups


def with_sources(dashboard: dict[str, Any], chosen: Mapping[str, tuple[str, str]]) -> dict[str, Any]:
    """`dashboard` opening with the data sources `chosen`: variable to (uid, name)."""
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(dashboard))
    for variable in found.get("templating", {}).get("list", []):
        if variable.get("type") == "datasource" and variable.get("name") in chosen:
            uid, name = chosen[variable["name"]]
            variable["current"] = {"selected": False, "text": name, "value": uid}
    return found


def is_uid(text: str) -> bool:
    """Whether Grafana takes it as a uid."""
    return _UID.fullmatch(text) is not None


def _texts(folder: Any, suffix: str) -> dict[str, str]:
    if not folder.is_dir():
        return {}
    paths = sorted((path for path in folder.iterdir() if path.name.endswith(suffix)), key=lambda p: p.name)
    try:
        return {path.name: path.read_text("utf-8") for path in paths}
    except (OSError, UnicodeDecodeError):
        raise _damaged(suffix) from None


def _damaged(name: str) -> KvscopeError:
    return KvscopeError(f"this kvscope's own file {name} is damaged; install it again")
