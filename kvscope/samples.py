"""What is sampled beside requests: the only definition of the samples' names, units and meanings.

A sample is one number at one moment. Engines tell some themselves (once a second while they step), the
daemon counts KV blocks by use, and every few seconds (`sample_seconds`) it reads the host and vLLM's own
`/metrics`. Rates and means are of the time since the reading before; where nothing happened there is no mean.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

RING, KVSCOPE, VLLM, HOST = "ring", "kvscope", "vllm", "host"

FRESH_NS = 60 * 10**9
"""A sample that is older than this, and than two intervals, says nothing about a moment."""


class Kind(NamedTuple):
    """One kind of sample."""

    name: str
    unit: str
    doc: str
    source: str
    """Where it comes from: `ring` (the engine's own), `kvscope` (counted by the daemon), `vllm`, `host`."""


class Sample(msgspec.Struct, array_like=True, frozen=True):
    """One number at one moment; in JSON an array in this order."""

    at_ns: int
    """Unix time."""
    host: str
    """Host name."""
    engine: str
    """Engine id; empty where it is of the host."""
    source: str
    """scheduler or worker where it is of one process; empty where it is of the whole engine or host."""
    rank: int
    """Of a worker."""
    name: str
    """Of a `Kind`."""
    label: str
    """What tells several of one name apart: a thread, a network device, a reason; else empty."""
    value: float
    """In the unit of its kind."""


def row(id_: int, sample: Sample) -> tuple[Any, ...]:
    """A row of the table `samples`."""
    return (id_, *msgspec.structs.astuple(sample))


KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("engine.steps_per_s", "1/s", "Engine steps per second while it stepped", RING),
        Kind("engine.step_ns", "ns", "Mean time from one engine step to the next", RING),
        Kind("engine.step_tokens", "tokens", "Mean tokens in a step", RING),
        Kind("engine.hook_share", "ratio", "Part of the time spent in kvscope's hooks in this process", RING),
        Kind("kv_blocks.total", "blocks", "KV blocks of the engine", KVSCOPE),
        Kind(
            "kv_blocks.running",
            "blocks",
            "Held by requests that compute, as of their last scheduling",
            KVSCOPE,
        ),
        Kind("kv_blocks.staging", "blocks", "Held by requests whose KV is not all here yet", KVSCOPE),
        Kind("kv_blocks.kept", "blocks", "Held by leases: kept for the peer after the leg's end", KVSCOPE),
        Kind("vllm.running", "requests", "vLLM's num_requests_running", VLLM),
        Kind(
            "vllm.waiting",
            "requests",
            "vLLM's num_requests_waiting; label: the reason where it tells them (`capacity`, or `deferred`: "
            "waits for KV, for one), else empty",
            VLLM,
        ),
        Kind(
            "vllm.kv_fetch",
            "requests",
            "vLLM's num_requests_kv_fetch_by_stage (from 0.32 on, where KV is received); label: "
            "`waiting_to_start`, `in_progress`, `completed_waiting`",
            VLLM,
        ),
        Kind("vllm.kv_cache_usage", "ratio", "vLLM's kv_cache_usage_perc", VLLM),
        Kind("vllm.preemptions_per_s", "1/s", "Of vLLM's num_preemptions", VLLM),
        Kind("vllm.nixl_transfers_per_s", "1/s", "Transfers counted by vLLM's nixl_xfer_time_seconds", VLLM),
        Kind(
            "vllm.nixl_xfer_ns",
            "ns",
            "Mean of vLLM's nixl_xfer_time_seconds: up to one engine step longer than the wire",
            VLLM,
        ),
        Kind("vllm.nixl_post_ns", "ns", "Mean of vLLM's nixl_post_time_seconds", VLLM),
        Kind("vllm.nixl_bytes_per_s", "bytes/s", "Of vLLM's nixl_bytes_transferred", VLLM),
        Kind("vllm.nixl_descriptors", "descriptors", "Mean of vLLM's nixl_num_descriptors", VLLM),
        Kind(
            "vllm.nixl_failures_per_s",
            "1/s",
            "Of vLLM's nixl_num_* counters; label: `failed_transfers`, `failed_notifications`, "
            "`kv_expired_reqs`, `notifications_after_expiry`",
            VLLM,
        ),
        Kind(
            "process.cpu",
            "cores",
            "CPU that the process used, in cores; where scheduler and worker are one process, both tell it",
            HOST,
        ),
        Kind("process.rss_bytes", "bytes", "Resident memory of the process", HOST),
        Kind(
            "process.switches_per_s",
            "1/s",
            "Context switches of the process's main thread, which steps the engine; label: `voluntary` or "
            "`involuntary`",
            HOST,
        ),
        Kind(
            "thread.cpu",
            "cores",
            "CPU of the process's threads of that name (the label), in cores; idle ones are left out, the "
            "least busy beyond 15 names are `other`",
            HOST,
        ),
        Kind("host.cpu", "cores", "CPU in use on the host, in cores", HOST),
        Kind("host.cores", "cores", "Cores of the host", HOST),
        Kind("host.run_queue", "tasks", "Tasks that run or wait for a core", HOST),
        Kind("host.memory_available_bytes", "bytes", "Memory that could be had without swapping", HOST),
        Kind("host.nic_rx_bytes_per_s", "bytes/s", "Received by the network device (the label)", HOST),
        Kind("host.nic_tx_bytes_per_s", "bytes/s", "Sent by the network device (the label)", HOST),
    )
}
OWN_NAMES = frozenset(kind.name for kind in KINDS.values() if kind.source == RING)
"""Those that engines record themselves: they come again when a ring is read again."""
