"""The daemon's metrics: the only definition of their names, types, units, labels and meanings.

`GET /metrics` of the daemon serves them as text or as OpenMetrics, whichever is asked for; exemplars (the
trace id of the latest request in a bucket) come with OpenMetrics only. A scrape reads counts kept in memory,
never the store, and all scrapes of one second get the same answer.

Counters count what this daemon stored, at the moment it was committed: of the same requests they say what
`kvscope query` says. They only grow, whatever `retention_hours` deletes. After a restart they begin at 0,
except for the events read and lost, which the store remembers; requests that an earlier daemon stored are not
counted again when their rings are read again. So `rate()` and `increase()` see a reset, and nothing twice. A
request counts once it is over and stored, about half a second after its end.

Shares are one division of rates. Over any window, coordination's share of TTFT is

    sum(rate(kvscope_ttft_class_seconds_total{class="coordination"}[5m]))
      / sum(rate(kvscope_ttft_class_seconds_total[5m]))

An engine's series go ten minutes after its processes have. For 64 engines there are at most 10,000 series,
whatever the rings hold: a pair, an engine, or a connector × model × traffic, for which there is no more room
counts under `other`.

To let a Prometheus on another host scrape, listen on an address that it reaches (`--host 0.0.0.0`, or one
address). A daemon on loopback answers only to `localhost` and 127.0.0.1 as targets, one on an address to that
address as well, one on 0.0.0.0 to any host name. The API has no passwords: keep it inside a trusted network.
Exemplars need Prometheus's `--enable-feature=exemplar-storage`.

    scrape_configs:
      - job_name: kvscope
        static_configs:
          - targets: ["127.0.0.1:9177"]

Early-binding regret is counted two minutes after a request's hand-over, when the requests that it is compared
with are over too: those that the other decoders were handed in the same second.
"""

from __future__ import annotations

from typing import NamedTuple

from kvscope import steps

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

PRODUCTION = "production"
UNKNOWN = "unknown"
OTHER = "other"

P_ROLE, D_ROLE, BOTH_ROLES = "prefill", "decode", "both"

GROUP = ("connector", "model", "traffic")
"""Labels that every figure of requests carries."""
_PAIR = ("p_engine", "d_engine", *GROUP)
_ENGINE = ("engine", "traffic")
_TRANSFER = ("operation", "traffic")

LABELS = {
    "class": f"class of the step: {', '.join(steps.CLASSES)}",
    "connector": f"push, pull, bidirectional, local (no KV was moved); `{OTHER}` where there is no more room",
    "d_engine": f"engine id of the decode leg; `{OTHER}` in pairs for which there is no more room",
    "end": "released, expired, or lost (engine gone)",
    "engine": "engine id, without control characters",
    "host": "host name of the engine",
    "joined_by": "remote id, push match, transfer id, client id (inferred), or why not: single leg, peer not "
    "instrumented, unjoined",
    "kind": "nixl, hook (one of kvscope raised) or recorder (it gave up)",
    "kvscope": "version of kvscope in the engine",
    "model": f"model name as served; `{UNKNOWN}` where not known, `{OTHER}` where there is no more room",
    "name": f"vLLM's failure type or the hook's name; `{OTHER}` where there are too many",
    "operation": "READ (pull, reuse) or WRITE (push)",
    "outcome": "requests: finished, aborted, error, ignored, lost (engine gone), incomplete (quiet); "
    "reuse: pulled, below threshold, expired, metadata missing, local hit, failed, not offered",
    "p_engine": f"engine id of the prefill leg; `{OTHER}` in pairs for which there is no more room",
    "result": "ok or failed",
    "role": f"where a step is spent: {P_ROLE}, {D_ROLE}, {BOTH_ROLES} (one engine serves alone), "
    f"{UNKNOWN}; of an engine: the legs it was seen with",
    "schema": "version of the store",
    "source": "tokens: computed, cached_p, cached_d, transferred, read_back, recomputed; samples: what "
    "was to be read",
    "state": "transfers: done, failed, open (never seen done); processes: recording, stopped (recorder "
    "gave up), ended (nothing in flight), gone (died)",
    "step": "one of docs/steps.md",
    "table": "table of the store",
    "to": "the other connector: push or pull",
    "traffic": f"KVSCOPE_LABEL of the engines, so that a benchmark and users never mix; `{PRODUCTION}` "
    "where empty",
    "use": "running (requests that compute), staging (their KV is not all here yet), kept (leases), total "
    "(of the engine)",
    "version": "version of the daemon",
    "vllm": "version of vLLM in the engine",
}
"""What each label says."""

_WAIT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0, 180.0)
_TTFT_BUCKETS = (
    *(0.01, 0.025, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 10.0, 20.0, 60.0, 300.0),
)  # fmt: skip
_LEAD_BUCKETS = (
    *(-10.0, -2.5, -1.0, -0.25, -0.1, -0.025, -0.01, 0.0),
    *(0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0),
)  # fmt: skip
_TPOT_BUCKETS = (0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0)
_MARGIN_BUCKETS = (0.0, 1.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_COMMIT_BUCKETS = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)


class Metric(NamedTuple):
    """One metric."""

    section: str
    name: str
    kind: str
    unit: str
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]
    """Upper bounds of a histogram's, without +Inf."""

    @property
    def series(self) -> int:
        """How many one set of labels makes."""
        if self.kind != HISTOGRAM:
            return 1
        return len(self.buckets) + (1 if self.buckets[0] < 0 else 3)

    @property
    def openmetrics_unit(self) -> str:
        """The unit where it is part of the name, as OpenMetrics wants it."""
        return self.unit if self.name.removesuffix("_total").endswith(f"_{self.unit}") else ""


METRICS: list[Metric] = []
"""All of them, in the order in which they are told."""
_section = ""


def _add(
    kind: str, name: str, unit: str, labels: tuple[str, ...], help_: str, buckets: tuple[float, ...] = ()
) -> Metric:
    metric = Metric(_section, "kvscope_" + name, kind, unit, help_, labels, buckets)
    METRICS.append(metric)
    return metric


def _counter(name: str, unit: str, labels: tuple[str, ...], help_: str) -> Metric:
    return _add(COUNTER, f"{name}_total", unit, labels, help_)


def _gauge(name: str, unit: str, labels: tuple[str, ...], help_: str) -> Metric:
    return _add(GAUGE, name, unit, labels, help_)


def _seconds(name: str, labels: tuple[str, ...], buckets: tuple[float, ...], help_: str) -> Metric:
    return _add(HISTOGRAM, f"{name}_seconds", "seconds", labels, help_, buckets)


_section = "Requests"

REQUESTS = _counter("requests", "requests", (*GROUP, "outcome"), "Requests that are over.")
TTFT = _seconds(
    "ttft",
    GROUP,
    _TTFT_BUCKETS,
    "Time to first token, from the earliest arrival known on either leg. Requests that never had one are "
    "left out.",
)
TTFT_CLASS = _counter(
    "ttft_class_seconds",
    "seconds",
    (*GROUP, "class"),
    "TTFT by class. The classes add up to TTFT exactly: compute wait is compute + capacity, coordination "
    "wait is coordination, transfer stands beside them.",
)
TTFT_SPLIT = _seconds(
    "ttft_split",
    (*GROUP, "class"),
    _WAIT_BUCKETS,
    "Part of a request's TTFT in each class, 0 where it spent none there. Percentiles of parts don't add "
    "up to a percentile of TTFT.",
)
STEP = _seconds(
    "step",
    (*GROUP, "step", "class", "role"),
    _WAIT_BUCKETS,
    "Time of a request in each step on its critical path; requests that did not pass through it are left "
    "out. decode.generate is not in TTFT.",
)
LEAD = _seconds(
    "lead",
    GROUP,
    _LEAD_BUCKETS,
    "How much earlier than the end of prefill D was ready: registered (push) or able to read (pull). "
    "Negative is a lag. As some are negative there is no sum and no count; the bucket +Inf counts all.",
)
LAG = _counter(
    "lag_seconds", "seconds", GROUP, "Time by which D was ready after the end of prefill; a lead counts as 0."
)
TPOT = _seconds("tpot", GROUP, _TPOT_BUCKETS, "Time per output token after the first.")
TOKENS = _counter(
    "prompt_tokens",
    "tokens",
    (*GROUP, "source"),
    "Prompt tokens by where their KV came from. On P: computed + cached_p (P's prefix cache) + read_back "
    "(from D, bidirectional). On D, of the same prompts: cached_d (D's prefix cache), transferred "
    "(received from P), recomputed (P had them, and a failure or preemption made D compute them). So they "
    "add up per engine, not over both.",
)
OUTPUT_TOKENS = _counter("output_tokens", "tokens", GROUP, "Tokens generated.")
RECOMPUTED = _counter(
    "recomputed_requests",
    "requests",
    GROUP,
    "Requests for which D computed prompt tokens that P had: silent recompute.",
)
READ_LATE = _counter(
    "reads_after_expiry",
    "requests",
    GROUP,
    "Requests whose completion came after the blocks were given back: D may have used another request's KV.",
)
PREEMPTIONS = _counter("preemptions", "preemptions", GROUP, "Preemptions, on both legs.")
REUSE = _counter(
    "reuse_requests",
    "requests",
    (*GROUP, "outcome"),
    "Bidirectional: what became of the KV that D had kept for a later turn; `not offered` where the "
    "request named none, as first turns do, and all where bidirectional never engages.",
)
REUSE_OFFERED = _counter(
    "reuse_offered_tokens", "tokens", GROUP, "Bidirectional: tokens whose KV D had kept for these requests."
)
PREDICTED = _counter(
    "predicted_ttft_seconds",
    "seconds",
    (*GROUP, "to"),
    "TTFT that requests would have had with the other connector, where that can be predicted. Divide by "
    "kvscope_predicted_base_seconds_total.",
)
PREDICTED_BASE = _counter(
    "predicted_base_seconds", "seconds", (*GROUP, "to"), "TTFT that the same requests had."
)
PREDICTED_REQUESTS = _counter(
    "predicted_requests", "requests", (*GROUP, "to"), "How many requests that were."
)
REGRET = _counter(
    "early_binding_regret_seconds",
    "seconds",
    GROUP,
    "Time that requests waited for capacity on their decoder after prefill had finished, beyond what those "
    "did that were handed over to the least loaded other decoder in the same second: at most what a router "
    "saves that chooses the decoder at the hand-over. Divide by kvscope_early_binding_requests_total.",
)
REGRET_REQUESTS = _counter(
    "early_binding_requests",
    "requests",
    GROUP,
    "How many requests that is of: those with another decoder to compare with that were over two minutes "
    "after their hand-over. 0 where there is one decoder only.",
)
JOINS = _counter(
    "joins",
    "requests",
    (*GROUP, "joined_by"),
    "Requests by how their legs were joined, or why they were not.",
)
CLAMPED = _counter(
    "clamped_requests", "requests", GROUP, "Requests of which boundaries were out of order and were moved."
)

_section = "Pairs"

_PAIRS = (
    " Pairs are taken as they come; those that come when there is no more room are counted together under "
    "p_engine and d_engine `other`."
)
PAIR_REQUESTS = _counter("pair_requests", "requests", _PAIR, "Requests of a P → D pair." + _PAIRS)
PAIR_TTFT_CLASS = _counter(
    "pair_ttft_class_seconds", "seconds", (*_PAIR, "class"), "TTFT by class of a P → D pair." + _PAIRS
)
PAIR_BYTES = _counter(
    "pair_transfer_bytes", "bytes", _PAIR, "Bytes moved between P and D of a pair, all ranks." + _PAIRS
)

_section = "Transfers, handshakes, leases, failures"

TRANSFERS = _counter(
    "transfers", "transfers", (*_TRANSFER, "state"), "NIXL transfers, one per rank and direction."
)
TRANSFER_BYTES = _counter("transfer_bytes", "bytes", _TRANSFER, "Bytes moved by NIXL transfers.")
TRANSFER_DESCRIPTORS = _counter(
    "transfer_descriptors", "descriptors", _TRANSFER, "Descriptors of NIXL transfers, after merging."
)
TRANSFER_POST = _seconds(
    "transfer_post",
    _TRANSFER,
    _WAIT_BUCKETS,
    "Time in the post call of a transfer, which blocks the thread that posts.",
)
TRANSFER_LOWER = _seconds(
    "transfer_wire_lower",
    _TRANSFER,
    _WAIT_BUCKETS,
    "Least time on the wire of a transfer that the polls allow.",
)
TRANSFER_UPPER = _seconds(
    "transfer_wire_upper",
    _TRANSFER,
    _WAIT_BUCKETS,
    "Most time on the wire of a transfer that the polls allow.",
)
HANDSHAKES = _counter(
    "handshakes", "handshakes", (*_ENGINE, "result"), "NIXL handshakes that an engine asked for."
)
HANDSHAKE = _seconds("handshake", ("traffic",), _WAIT_BUCKETS, "Duration of a NIXL handshake.")
LEASES = _counter(
    "leases",
    "leases",
    (*_ENGINE, "end"),
    "Leases (blocks kept for the peer, per rank) that are over, by how they ended. Those armed are these and "
    "kvscope_leases_held.",
)
LEASE_RENEWALS = _counter(
    "lease_renewals", "renewals", _ENGINE, "Heartbeats that moved the deadline of leases that are over."
)
LEASE_MARGIN = _seconds(
    "lease_margin",
    ("traffic",),
    _MARGIN_BUCKETS,
    "Time left until the deadline when a lease was released; one that expired counts as 0.",
)
LEASES_HELD = _gauge("leases_held", "leases", ("engine",), "Leases that are not over.")
FAILURES = _counter(
    "failures",
    "failures",
    (*_ENGINE, "kind", "name"),
    "Failures logged by vLLM's connector, hooks of kvscope that raised, recorders that stopped.",
)

_section = "Now"

IN_FLIGHT = _gauge(
    "requests_in_flight", "requests", (), "Requests that are not over, or not handed to the store yet."
)
STUCK = _gauge(
    "requests_stuck",
    "requests",
    ("step",),
    "Requests that have been in one step for more than 30 s, those that generate apart; `over, blocks "
    "held` where the request is over and P still keeps its blocks, `not looked at` beyond 2,000.",
)
KV_BLOCKS = _gauge("kv_blocks", "blocks", ("engine", "use"), "KV blocks of an engine by use.")
STEP_MEAN = _gauge(
    "engine_step_seconds",
    "seconds",
    ("engine",),
    "Mean time from one engine step to the next, while it stepped.",
)
HOOK_SHARE = _gauge(
    "hook_share_ratio",
    "ratio",
    ("engine",),
    "Part of the time spent in kvscope's hooks, in that process of the engine where it is greatest.",
)
ENGINE_INFO = _gauge(
    "engine_info",
    "1",
    ("engine", "role", *GROUP, "host", "vllm", "kvscope"),
    "1 for every engine seen whose processes have not been gone for ten minutes.",
)

_section = "About itself"

EVENTS_READ = _counter(
    "events_read", "events", _ENGINE, "Events read of the engine's rings, by all daemons with this store."
)
EVENTS_LOST = _counter(
    "events_lost",
    "events",
    _ENGINE,
    "Events overwritten before they were read, or torn: their steps are unknown.",
)
EVENTS_TORN = _counter("events_torn", "events", _ENGINE, "Of those lost: damaged slots.")
EVENTS_REJECTED = _counter("events_rejected", "events", _ENGINE, "Events read and not understood.")
HOOKS_MISSING = _gauge(
    "hooks_missing", "hooks", ("engine",), "Hooks that the engine's vLLM lacks: their steps are unknown."
)
PROCESSES = _gauge("engine_processes", "processes", ("state",), "Engine processes with a ring, by state.")
CLOCK_ERROR = _gauge(
    "clock_error_seconds",
    "seconds",
    (),
    "Greatest bound on the clock error between the two legs of a request, of the last five minutes; 0 on "
    "one host.",
)
PROBLEMS = _gauge(
    "problems", "problems", (), "What the daemon itself complains of; `kvscope status` says it in words."
)
UNREADABLE = _gauge("unreadable_files", "files", (), "Files in the directory of rings that can't be read.")
STORED = _counter("stored_rows", "rows", ("table",), "Rows committed to the store.")
REFUSED = _counter("refused_rows", "rows", (), "Rows whose values did not fit their columns: not stored.")
COMMIT = _seconds("commit", (), _COMMIT_BUCKETS, "Duration of a commit to the store.")
WAITING = _gauge("waiting_rows", "rows", (), "Rows that wait to be committed.")
WAITING_LIMIT = _gauge(
    "waiting_rows_limit",
    "rows",
    (),
    "So many may wait; beyond it the daemon stops reading, and the rings buffer.",
)
STORE_BYTES = _gauge("store_bytes", "bytes", (), "Size of the store's file and its log.")
STORE_FAILING = _gauge("store_failing", "1", (), "1 while nothing can be committed, else 0.")
FAULTS = _counter("faults", "events", (), "Events that kvscope stumbled over; the daemon's log says where.")
UNTOLD = _counter("untold_requests", "requests", (), "Requests that kvscope could not make out: not stored.")
UNCOUNTED = _counter("uncounted_rows", "rows", (), "Rows that were stored and could not be counted here.")
CLEANUPS = _counter("cleanup_requests", "requests", (), "vLLM's own clean-up requests, which are not shown.")
STRAGGLERS = _counter(
    "stragglers", "events", (), "Events of a request that came after it was stored, and were left out."
)
EXPORTED = _counter(
    "exported_requests",
    "requests",
    ("result",),
    "Stored requests by whether they were exported as traces; both 0 where otlp_endpoint is empty.",
)
SAMPLES_DROPPED = _counter("dropped_samples", "samples", (), "Samples for which there was no room.")
SAMPLE_FAULTS = _counter(
    "sample_faults", "rounds", ("source",), "Rounds in which a source of samples failed."
)
SERIES = _gauge("series", "series", (), "Series of this answer, this one apart.")
STARTED = _gauge("start_time_seconds", "seconds", (), "When the daemon began, Unix time.")
BUILD_INFO = _gauge("build_info", "1", ("version", "schema"), "1; what the daemon is.")
