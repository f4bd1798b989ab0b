"""The expressions of a dashboard as Grafana would send them: variables filled in."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

VALUES = {
    "traffic": "production",
    "model": ".*",
    "connector": ".*",
    "role": ".*",
    "engine": ".*",
    "p_engine": ".*",
    "d_engine": ".*",
    "__rate_interval": "1m",
    "__range": "1h",
}
"""Everything of production, in windows that Grafana might choose."""

_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::\w+)?\}|(\w+))")


class Expression(NamedTuple):
    """One query of a panel."""

    panel: str
    ref_id: str
    expr: str
    legend: str
    """What Grafana fills in with labels; empty in tables, which show all labels."""
    instant: bool
    """Whether it is asked for one moment, the end of the window; else at each point of it."""
    panel_id: int
    exemplar: bool


def expressions(dashboard: Mapping[str, Any], values: Mapping[str, str] | None = None) -> list[Expression]:
    """All queries to Prometheus of a dashboard's JSON, in order.

    Args:
        values: of variables, beside or instead of `VALUES`.

    Raises:
        KeyError: an expression has a variable that is not given.
    """
    known = {**VALUES, **(values or {})}
    return [
        Expression(
            panel["title"],
            target["refId"],
            filled(target["expr"], known),
            target.get("legendFormat", ""),
            bool(target.get("instant")),
            panel["id"],
            bool(target.get("exemplar")),
        )
        for panel in panels(dashboard)
        for target in panel.get("targets", ())
        if "expr" in target
    ]


def panels(dashboard: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """All panels but rows, those of folded rows too."""
    for panel in dashboard["panels"]:
        if panel["type"] == "row":
            yield from panel.get("panels") or ()
        else:
            yield panel


def filled(text: str, values: Mapping[str, str]) -> str:
    """`text` with its variables. Raises KeyError where one is not given."""
    return _VARIABLE.sub(lambda match: values[match[1] or match[2]], text)
