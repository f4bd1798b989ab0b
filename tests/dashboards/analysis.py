"""What an expression says, read from its syntax tree: the labels of its result, and what is wrong with it."""

from __future__ import annotations

from typing import Any

import promql_parser as promql

from kvscope import metrics as m

TARGET = frozenset({"instance", "job"})
"""Labels that Prometheus adds to all that it scrapes."""
OVER_COUNTERS = frozenset({"rate", "increase"})
OVER_GAUGES = frozenset({"max_over_time"})
OVER_GAUGES = frozenset({"max_over_time"})
OVER_GAUGES = frozenset({"max_over_time"})
OF_A_VECTOR = frozenset({"sort", "sort_desc", "abs", "clamp_min"})
PICKS = frozenset({"topk", "bottomk"})
SETS = frozenset({"and", "unless", "or"})
SINCE_THE_BEGINNING = frozenset({"kvscope_handshake_seconds_bucket"})
"""Too rare for a window."""
COMPARES = frozenset({"==", "!=", ">", "<", ">=", "<="})

Labels = frozenset[str] | None
"""None: a number, not a vector."""


class Wrong(Exception):
    """The expression can't mean what it was written for."""


def _all_series() -> dict[str, tuple[m.Metric, frozenset[str], bool]]:
    found = {}
    for metric in m.METRICS:
        labels = frozenset(metric.labels) | TARGET
        if metric.kind != m.HISTOGRAM:
            found[metric.name] = metric, labels, metric.kind == m.COUNTER
            continue
        parts = ("bucket",) if metric.buckets[0] < 0 else ("bucket", "sum", "count")
        for part in parts:
            found[f"{metric.name}_{part}"] = metric, labels | ({"le"} if part == "bucket" else set()), True
    return found


SERIES = _all_series()
"""Metric, labels and whether it is a counter, by name as Prometheus stores it."""


def parse(expr: str) -> promql.Expr:
    try:
        return promql.parse(expr)
    except ValueError as error:
        raise Wrong(str(error)) from None


def labels(e: Any, in_rate: bool = False) -> Labels:
    """Labels that each series of the result has. Raises Wrong."""
    match e:
        case promql.ParenExpr() | promql.UnaryExpr():
            return labels(e.expr)
        case promql.NumberLiteral():
            return None
        case promql.VectorSelector():
            return _selected(e, in_rate)
        case promql.MatrixSelector():
            return labels(e.vector_selector, in_rate)
        case promql.AggregateExpr():
            return _aggregated(e)
        case promql.Call():
            return _called(e)
        case promql.BinaryExpr():
            return _combined(e)
    raise Wrong(f"{type(e).__name__}: not read by this test")


def _selected(e: Any, in_rate: bool) -> Labels:
    if e.name not in SERIES:
        raise Wrong(f"{e.name} is none of kvscope/metrics.py")
    _, known, is_counter = SERIES[e.name]
    for matcher in e.matchers.matchers:
        if matcher.name not in known:
            raise Wrong(f"{e.name} has no label {matcher.name}")
    if is_counter != in_rate and e.name not in SINCE_THE_BEGINNING:
        raise Wrong(f"{e.name} {'is a counter, without rate()' if is_counter else 'is a gauge in a rate'}")
    return known


def _aggregated(e: Any) -> Labels:
    of = labels(e.expr)
    if of is None:
        raise Wrong(f"{e.op} of a number")
    if str(e.op) in PICKS:
        return of
    if str(e.op) in ("sum", "avg") and _has_percentile(e.expr):
        raise Wrong(f"{e.op} of percentiles")
    if e.modifier is None:
        return frozenset()
    if e.modifier.type != promql.AggModifierType.By:
        raise Wrong("without (...) is not read by this test")
    by = frozenset(e.modifier.labels)
    if by - of:
        raise Wrong(f"by {sorted(by - of)}, which the series don't have")
    return by


def _called(e: Any) -> Labels:
    name, arguments = e.func.name, e.args
    if name == "time":
        return None
    if name in OVER_COUNTERS:
        return labels(arguments[0], in_rate=True)
    if name in OVER_GAUGES:
        return labels(arguments[0])
    if name in OF_A_VECTOR:
        return labels(arguments[0])
    if name == "histogram_quantile":
        of = labels(arguments[1])
        if of is None or "le" not in of:
            raise Wrong("histogram_quantile without le")
        return of - {"le"}
    if name == "label_replace":
        of = labels(arguments[0])
        if of is None:
            raise Wrong("label_replace of a number")
        return of | {arguments[1].val}
    raise Wrong(f"{name}() is not read by this test")


def _combined(e: Any) -> Labels:
    born = _is_newborn(e)
    left, right, op = labels(e.lhs, born), labels(e.rhs, born), str(e.op)
    if left is None or right is None:
        return right if left is None else left
    matching = e.modifier.matching if e.modifier else None
    if matching is not None:
        if matching.type != promql.LabelModifierType.Include:
            raise Wrong("ignoring (...) is not read by this test")
        if missing := frozenset(matching.labels) - (left & right):
            raise Wrong(f"on {sorted(missing)}, which one side does not have")
    elif left != right and op not in ("or",):
        raise Wrong(f"{sorted(left)} {op} {sorted(right)}: the sides match on nothing")
    if op in SETS:
        return left & right if op == "or" else left
    if op in ("+", "-") and (_has_percentile(e.lhs) or _has_percentile(e.rhs)):
        raise Wrong(f"{op} of percentiles")
    if op in COMPARES:
        return left
    if matching is None:
        return left
    extra = frozenset(e.modifier.group_labels or ())
    if extra - right:
        raise Wrong(f"group_left {sorted(extra - right)}, which the right side does not have")
    many = e.modifier.card == promql.VectorMatchCardinality.ManyToOne
    return (left if many else frozenset(matching.labels)) | extra


def _is_newborn(e: Any) -> bool:
    """`x unless x offset w`: a counter that was not there a window ago has counted all of it since."""
    sides = (e.lhs, e.rhs)
    return (
        str(e.op) == "unless"
        and all(isinstance(side, promql.VectorSelector) for side in sides)
        and e.lhs.name == e.rhs.name
        and e.lhs.offset is None
        and e.rhs.offset is not None
    )


def _has_percentile(e: Any) -> bool:
    return "histogram_quantile" in str(e)
