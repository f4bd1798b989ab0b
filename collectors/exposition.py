"""`GET /metrics`: what was counted, and what is now, in the form that Prometheus reads.

It is made at most once a second, whoever asks, and of what is in memory alone.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector as PrometheusCollector
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from kvscope import metrics as m
from kvscope import schema
from kvscope.collectors.aggregates import Aggregates, EngineInfo
from kvscope.collectors.counts import Histogram, Labels, clean
from kvscope.join import Joiner
from kvscope.legs import Request
from kvscope.metrics import COUNTER, Metric
from kvscope.samples import Sample
from kvscope.steps import STEPS

if TYPE_CHECKING:
    from kvscope.collectors.daemon import Collector

SHARED_S = 1.0
"""How long one answer serves all who ask."""
STUCK_NS = 30 * 10**9
MAX_LOOKED_AT = 2_000
SIFT_AT_ONCE, LOOK_AT_ONCE = 2_000, 100
"""Requests sifted, and looked at, in one go: collecting waits for so many."""
MAX_FORMATS = 4
GENERATE = "decode.generate"
HELD = "over, blocks held"
NOT_LOOKED_AT = "not looked at"
STUCK_STEPS = (*(step.name for step in STEPS if step.name != GENERATE), HELD, NOT_LOOKED_AT)
STATES = ("recording", "stopped", "ended", "gone")


class Now(NamedTuple):
    """What is at this moment."""

    status: dict[str, Any]
    """As of the daemon's API."""
    stuck: Counter[str]
    """Requests by the step that they are stuck in."""
    leases_held: Counter[str]
    """By engine."""
    samples: list[Sample]
    """The latest of each kind."""


class Exposition(PrometheusCollector):
    """Answers scrapes, from any thread.

    Args:
        now: what is now.
        clock: seconds that only go forward.
    """

    def __init__(
        self, aggregates: Aggregates, now: Callable[[], Now], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._aggregates = aggregates
        self._now = now
        self._clock = clock
        self._started = time.time()
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._made_at = float("-inf")
        self._families: list[Family] = []
        self._texts: dict[str, bytes] = {}
        """By content type."""

    def answer(self, accept: str) -> tuple[bytes, str]:
        """The metrics in a format that is accepted, and its content type."""
        try:
            encode, content_type = choose_encoder(accept)
        except Exception:  # a version that is none
            encode, content_type = choose_encoder("")
        with self._lock:
            if self._clock() - self._made_at >= SHARED_S:
                self._families = self._make()
                self._texts.clear()
                self._made_at = self._clock()
            if content_type not in self._texts:
                if len(self._texts) >= MAX_FORMATS:
                    self._texts.clear()
                self._texts[content_type] = encode(self)
            return self._texts[content_type], content_type

    def collect(self) -> Iterator[Family]:
        """For an encoder: what was made last."""
        yield from self._families

    def _make(self) -> list[Family]:
        now = self._now()
        # Of those that are gone it knows by itself when to forget them.
        present = [ring["ring"] for ring in now.status["rings"] if ring.get("gone_at_ns") is None]
        counted = self._aggregates.snapshot(present)
        values = {**counted.counters}
        for metric, children in _values(now, counted.engines):
            values[metric.name] = children
        values[m.PROCESSES.name] = {(state,): counted.processes[state] for state in STATES}
        values[m.CLOCK_ERROR.name] = {(): counted.clock_error_ns / 1e9}
        values[m.STARTED.name] = {(): self._started}
        families = []
        for metric in m.METRICS:
            if metric.name in values:
                families.append(_plain_family(metric, values[metric.name]))
            elif metric.name in counted.histograms:
                families.append(_histogram_family(metric, counted.histograms[metric.name]))
        series = sum(len(family.samples) for family in families)
        families.append(_plain_family(m.SERIES, {(): series}))
        return families


def _values(now: Now, engines: dict[str, EngineInfo]) -> Iterable[tuple[Metric, dict[Labels, float]]]:
    """What is not counted but read."""
    status = now.status
    store, pipeline, samples = status["store"], status["pipeline"], status["samples"]
    yield m.IN_FLIGHT, {(): pipeline["live"]}
    yield m.STUCK, {(step,): now.stuck[step] for step in STUCK_STEPS}
    held = {clean(engine): count for engine, count in now.leases_held.items()}
    yield m.LEASES_HELD, {(engine,): held.get(engine, 0) for engine in engines}
    yield from _samples(now.samples, engines)
    yield (
        m.ENGINE_INFO,
        {
            (name, e.role, e.connector, e.model, e.traffic, e.host, e.vllm, e.kvscope): 1
            for name, e in engines.items()
        },
    )
    yield m.HOOKS_MISSING, {(name,): e.hooks_missing for name, e in engines.items()}
    yield m.PROBLEMS, {(): len(status["problems"])}
    yield m.UNREADABLE, {(): len(status["unreadable"])}
    yield m.REFUSED, {(): store["rows_refused"]}
    yield m.WAITING, {(): store["rows_queued"]}
    yield m.WAITING_LIMIT, {(): store["queue_limit"]}
    yield m.STORE_BYTES, {(): store["bytes"]}
    yield m.STORE_FAILING, {(): int(bool(store["error"]))}
    yield m.FAULTS, {(): pipeline["faults"]}
    yield m.UNTOLD, {(): pipeline["untold"]}
    yield m.CLEANUPS, {(): pipeline["cleanup_requests"]}
    yield m.STRAGGLERS, {(): pipeline["stragglers"]}
    otlp = status.get("otlp") or {"exported": 0, "lost": 0}
    yield m.EXPORTED, {("ok",): otlp["exported"], ("failed",): otlp["lost"]}
    yield m.SAMPLES_DROPPED, {(): samples["dropped"]}
    yield m.SAMPLE_FAULTS, {(clean(source),): count for source, count in samples["faults"].items()}
    yield m.BUILD_INFO, {(status["version"], str(schema.VERSION)): 1}


def _samples(
    samples: list[Sample], engines: dict[str, EngineInfo]
) -> Iterable[tuple[Metric, dict[Labels, float]]]:
    blocks: dict[Labels, float] = {}
    steps: dict[Labels, float] = {}
    shares: dict[Labels, float] = {}
    for sample in samples:
        engine = clean(sample.engine)
        if engine not in engines:
            continue
        if sample.name.startswith("kv_blocks."):
            blocks[engine, sample.name.partition(".")[2]] = sample.value
        elif sample.name == "engine.step_ns" and sample.source == "scheduler":
            steps[engine,] = sample.value / 1e9
        elif sample.name == "engine.hook_share":
            shares[engine,] = max(sample.value, shares.get((engine,), 0.0))
    return (m.KV_BLOCKS, blocks), (m.STEP_MEAN, steps), (m.HOOK_SHARE, shares)


def _plain_family(metric: Metric, children: dict[Labels, float]) -> Family:
    make = CounterMetricFamily if metric.kind == COUNTER else GaugeMetricFamily
    family = make(metric.name, metric.help, labels=metric.labels, unit=metric.openmetrics_unit)
    for labels, value in children.items():
        family.add_metric(labels, value)
    return family


def _histogram_family(metric: Metric, children: dict[Labels, Histogram]) -> Family:
    family = HistogramMetricFamily(
        metric.name, metric.help, labels=metric.labels, unit=metric.openmetrics_unit
    )
    bounds = [*map(floatToGoString, metric.buckets), "+Inf"]
    for labels, child in children.items():
        total = 0
        buckets: list[Any] = []
        for bound, count, exemplar in zip(bounds, child.counts, child.exemplars, strict=True):
            total += count
            buckets.append((bound, total) if exemplar is None else (bound, total, _exemplar(*exemplar)))
        family.add_metric(labels, buckets, child.sum)
    return family


def _exemplar(trace_id: str, value: float, at: float) -> Exemplar:
    return Exemplar({"trace_id": trace_id}, value, round(at, 3))


# --- what is now ---------------------------------------------------------------------------------------


def read_now(collector: Collector, status: dict[str, Any], samples: list[Sample], now_ns: int) -> Now:
    """What is at the Unix time `now_ns`; holds the collector's lock for moments only."""
    with collector.lock:
        held = collector.pipeline.joiner.leases_held()
        live = collector.pipeline.joiner.live()
    return Now(status, _stuck(collector, live, now_ns), held, samples)


def _may_be_stuck(request: Request, joiner: Joiner, now_ns: int) -> bool:
    """Whether it is worth a closer look: old, and it does not just generate."""
    arrived = [
        joiner.clocks.wall_ns(leg.boot, leg.arrived_ns)
        for leg in request.legs()
        if leg.arrived_ns is not None
    ]
    if arrived and now_ns - min(arrived) <= STUCK_NS:
        return False
    p, d = request.p, request.decode_leg
    return d is None or d.first_token_ns is None or (p is not None and p.finished and not p.released)


def _stuck(collector: Collector, live: list[Request], now_ns: int) -> Counter[str]:
    joiner = collector.pipeline.joiner
    old: list[Request] = []
    for at in range(0, len(live), SIFT_AT_ONCE):
        with collector.lock:
            old += (r for r in live[at : at + SIFT_AT_ONCE] if _may_be_stuck(r, joiner, now_ns))
    found = Counter({NOT_LOOKED_AT: max(0, len(old) - MAX_LOOKED_AT)})
    old = old[:MAX_LOOKED_AT]
    for at in range(0, len(old), LOOK_AT_ONCE):
        with collector.lock:
            looked = collector.pipeline.look(old[at : at + LOOK_AT_ONCE], time.monotonic_ns(), now_ns)
        for one in looked:
            if one.in_flight and one.step != GENERATE and one.step_since_ns is not None:
                found[one.step or HELD] += now_ns - one.step_since_ns > STUCK_NS
    return found
