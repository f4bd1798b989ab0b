"""Pieces of PromQL: they fill in the dashboard's variables and keep away what would be no number.

Three rules: a share is one division of rates; a percentile comes out of one histogram and is never added to
another; nothing is 0/0, where nothing happened there is no value.
"""

from __future__ import annotations

from kvscope import metrics as m

STEP, RANGE = "[$__rate_interval]", "[$__range]"
"""Windows: around each point of a graph; all that the dashboard shows."""

_VARIABLES = {
    "traffic": 'traffic="$traffic"',
    "connector": 'connector=~"$connector"',
    "model": 'model=~"$model"',
    "role": 'role=~"$role"',
    "engine": 'engine=~"$engine"',
}
_PAIR_VARIABLES = {"p_engine": 'p_engine=~"$p_engine"', "d_engine": 'd_engine=~"$d_engine"'}


def series(metric: m.Metric, *matchers: str, part: str = "", every: str = "", pairs: bool = False) -> str:
    """A selector of what the variables choose.

    Args:
        part: of a histogram: `bucket`, `sum` or `count`.
        every: a label by which nothing is chosen, whatever its variable says.
        pairs: whether the dashboard has the variables p_engine and d_engine.

    Raises:
        ValueError: the metric lacks a label, or has no such part.
    """
    labels = (*metric.labels, "le") if part == "bucket" else metric.labels
    if strange := {matcher.partition("=")[0].rstrip("!") for matcher in matchers} - set(labels):
        raise ValueError(f"{metric.name} has no {strange}")
    if (metric.kind == m.HISTOGRAM) != bool(part):
        raise ValueError(f"{metric.name} is a {metric.kind}")
    variables = _VARIABLES | (_PAIR_VARIABLES if pairs else {})
    chosen = [variables[label] for label in metric.labels if label in variables and label != every]
    name = f"{metric.name}_{part}" if part else metric.name
    return f"{name}{{{', '.join((*chosen, *matchers))}}}"


def total(vector: str, *by: str, how: str = "sum") -> str:
    """The sum over all series but for these labels."""
    return f"{how} by ({', '.join(by)}) ({vector})" if by else f"{how}({vector})"


def rate(selector: str, *by: str, window: str = STEP) -> str:
    """Per second."""
    return total(f"rate({selector}{window})", *by)


def increase(selector: str, *by: str, window: str = RANGE) -> str:
    """How many in the window."""
    return total(f"increase({selector}{window})", *by)


def grown(selector: str, window: str = RANGE) -> str:
    """How much each series rose in the window, also those born in it, whose first event `increase` does not
    see: of those it is all that they count. For counters that have no series before their first event."""
    return f"({selector} unless {selector} offset {window[1:-1]} or increase({selector}{window}))"


def ratio(part: str, whole: str, *on: str) -> str:
    """`part / whole`; no value where `whole` is 0. Both have the labels `on`, `part` may have more."""
    return f"{part} / on ({', '.join(on)}) group_left () ({whole} > 0)"


def quantile(q: float, metric: m.Metric, *by: str, matchers: tuple[str, ...] = (), window: str = STEP) -> str:
    """Of a histogram; no value where nothing fell into it."""
    buckets = rate(series(metric, *matchers, part="bucket"), "le", *by, window=window)
    return f"histogram_quantile({q}, {buckets}) >= {metric.buckets[0] if metric.buckets[0] < 0 else 0}"


def mean(metric: m.Metric, *by: str, matchers: tuple[str, ...] = (), window: str = STEP) -> str:
    """Of what a histogram holds; no value where it holds nothing."""
    sums = rate(series(metric, *matchers, part="sum"), *by, window=window)
    return ratio(sums, rate(series(metric, *matchers, part="count"), *by, window=window), *by)


def or_zero(vector: str, **labels: str) -> str:
    """0 where there is no series yet as nothing of the kind has happened, while a daemon answers."""
    zero = f"0 * max({m.STARTED.name})"
    for label, value in labels.items():
        zero = f'label_replace({zero}, "{label}", "{value}", "", "")'
    return f"{vector} or on () {zero}"


def highest(count: int, vector: str, gauge: str, *by: str) -> str:
    """`vector` of the `count` series that were highest in the window in `gauge`, the same at each point."""
    return top(count, vector, total(f"max_over_time({gauge}{RANGE} @ end())", *by, how="max"), *by)


def top(count: int, vector: str, ranked: str, *by: str) -> str:
    """`vector` of the `count` series that are greatest in `ranked`."""
    return f"{vector} and on ({', '.join(by)}) topk({count}, {ranked})"
