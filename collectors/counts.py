"""Counters and histograms in memory, by metric and by the values of its labels. Not thread-safe."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

from kvscope.metrics import Metric
from kvscope.text import printable, shortened

Labels = tuple[str, ...]

VALUE_CHARACTERS = 128
"""Label values are cut to this."""


def clean(value: object) -> str:
    """A label value: ids and names come from clients and from rings."""
    return shortened(printable(value), VALUE_CHARACTERS)


class Histogram:
    """Counts per bucket, not added up; the sum; and the latest exemplar of each bucket."""

    __slots__ = ("bounds", "counts", "exemplars", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        self.exemplars: list[tuple[str, float, float] | None] = [None] * (len(bounds) + 1)
        """(trace id, value, Unix time)"""

    def observe(self, value: float, trace_id: str = "", at: float = 0.0) -> None:
        bucket = bisect_left(self.bounds, value)
        self.counts[bucket] += 1
        self.sum += value
        if trace_id:
            self.exemplars[bucket] = (trace_id, value, at)

    def copy(self) -> Histogram:
        other = Histogram(self.bounds)
        other.counts, other.sum, other.exemplars = self.counts[:], self.sum, self.exemplars[:]
        return other


class Counts:
    """All counters and histograms."""

    def __init__(self) -> None:
        self.counters: dict[str, dict[Labels, float]] = {}
        """By the metric's name."""
        self.histograms: dict[str, dict[Labels, Histogram]] = {}
        self.series = 0

    def count(self, metric: Metric, labels: Labels, value: float | None = 1.0) -> None:
        """Add to a counter; what is not known, or less than nothing, is left out."""
        if value is None or value < 0:
            return
        try:
            self.counters[metric.name][labels] += value
        except KeyError:
            self.counters.setdefault(metric.name, {})[labels] = float(value)
            self.series += 1

    def observe(
        self, metric: Metric, labels: Labels, value: float, trace_id: str = "", at: float = 0.0
    ) -> None:
        """Add to a histogram, with the exemplar of a trace at a Unix time."""
        try:
            child = self.histograms[metric.name][labels]
        except KeyError:
            child = Histogram(metric.buckets)
            self.histograms.setdefault(metric.name, {})[labels] = child
            self.series += metric.series
        child.observe(value, trace_id, at)

    def drop(self, metric: Metric, is_gone: Callable[[Labels], bool]) -> None:
        """Forget counters."""
        children = self.counters.get(metric.name, {})
        gone = [labels for labels in children if is_gone(labels)]
        for labels in gone:
            del children[labels]
        self.series -= len(gone)

    def copy(self) -> Counts:
        other = Counts()
        other.series = self.series
        other.counters = {name: dict(children) for name, children in self.counters.items()}
        other.histograms = {
            name: {labels: one.copy() for labels, one in children.items()}
            for name, children in self.histograms.items()
        }
        return other
