"""What is sampled beside requests: the only definition of the samples' names, units and meanings.

A sample is one number at one moment. Engines tell some themselves (once a second while they step), the
daemon counts KV blocks by use, and every few seconds it reads the host and vLLM's own `/metrics`.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec


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
    engine: str
    """Engine id; empty where it is of the host."""
    source: str
    """scheduler or worker where it is of one process; empty where it is of the whole engine or host."""
    rank: int
    name: str
    """Of a `Kind`."""
    label: str
    """What tells several of one name apart: a thread, a network device, a reason; else empty."""
    value: float


_RING, _KVSCOPE, _VLLM, _HOST = "ring", "kvscope", "vllm", "host"

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("engine.steps_per_s", "1/s", "Engine steps per second while it stepped", _RING),
        Kind("engine.step_ns", "ns", "Mean time from one engine step to the next", _RING),
        Kind("engine.step_tokens", "tokens", "Mean tokens in a step", _RING),
        Kind(
            "engine.hook_share", "ratio", "Part of the time spent in kvscope's hooks in this process", _RING
        ),
        Kind("kv_blocks.total", "blocks", "KV blocks of the engine", _KVSCOPE),
        Kind(
            "kv_blocks.running",
            "blocks",
            "Held by requests that compute, as of their last scheduling",
            _KVSCOPE,
        ),
        Kind("kv_blocks.staging", "blocks", "Held by requests whose KV is not all here yet", _KVSCOPE),
        Kind("kv_blocks.kept", "blocks", "Held by leases: kept for the peer after the leg's end", _KVSCOPE),
        Kind("vllm.running", "requests", "vLLM's num_requests_running", _VLLM),
        Kind("vllm.waiting", "requests", "vLLM's num_requests_waiting; by reason where it tells them", _VLLM),
        Kind("vllm.kv_cache_usage", "ratio", "vLLM's kv_cache_usage_perc", _VLLM),
        Kind("process.cpu", "cores", "CPU that the process used, in cores", _HOST),
        Kind("process.rss_bytes", "bytes", "Resident memory of the process", _HOST),
        Kind(
            "process.switches_per_s", "1/s", "Context switches of the process; label: voluntary or not", _HOST
        ),
        Kind("thread.cpu", "cores", "CPU of the process's threads of that name, in cores", _HOST),
        Kind("host.cpu", "cores", "CPU in use on the host, in cores", _HOST),
        Kind("host.cores", "cores", "Cores of the host", _HOST),
        Kind("host.run_queue", "tasks", "Tasks that run or wait for a core", _HOST),
        Kind("host.memory_available_bytes", "bytes", "Memory that could be had without swapping", _HOST),
        Kind("host.nic_rx_bytes_per_s", "bytes/s", "Received by the network device", _HOST),
        Kind("host.nic_tx_bytes_per_s", "bytes/s", "Sent by the network device", _HOST),
    )
}
