"""vLLM's own scheduler and classes, driven without an engine: no worker, no model run, no NIXL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvscope import events
from kvscope.ring import Event, RingReader, ring_paths

BLOCK = 16


def kv_cache_config(blocks: int) -> KVCacheConfig:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    return KVCacheConfig(blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])


def vllm_config(model: Path, connector: str, max_num_seqs: int = 4, **extra: Any) -> VllmConfig:
    return VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", max_model_len=1024),
        scheduler_config=SchedulerConfig(
            max_num_seqs=max_num_seqs, max_num_batched_tokens=64, max_model_len=1024,
            enable_chunked_prefill=True, is_encoder_decoder=False, async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
        kv_transfer_config=KVTransferConfig(
            kv_connector=connector,
            kv_connector_module_path=None if connector == "MultiConnector" else "kvscope.connectors",
            kv_role="kv_both",
            engine_id="engine-1",
            kv_connector_extra_config=extra,
        ),
        device_config=DeviceConfig("cpu"),
    )  # fmt: skip


def make_scheduler(
    model: Path, connector: str, blocks: int = 64, max_num_seqs: int = 4, **extra: Any
) -> Scheduler:
    config = vllm_config(model, connector, max_num_seqs, **extra)
    config.cache_config.num_gpu_blocks = blocks
    return Scheduler(
        config, kv_cache_config(blocks), StructuredOutputManager(config), block_size=BLOCK, log_stats=True
    )


def make_request(request_id: str, prompt_tokens: int, max_tokens: int = 2, **params: Any) -> Request:
    sampling = SamplingParams(
        max_tokens=max_tokens, extra_args={"kv_transfer_params": params} if params else None
    )
    sampling.update_from_generation_config({}, 511)
    return Request(request_id, list(range(1, prompt_tokens + 1)), sampling, None)


def step(
    scheduler: Scheduler, received: set[str] | None = None, sent: set[str] | None = None, **output: Any
) -> Any:
    """One engine step whose model run gives token 7 to each request that is past its prompt."""
    scheduled = scheduler.schedule()
    tokens = []
    ids = list(scheduled.num_scheduled_tokens)
    for request_id in ids:
        request = scheduler.requests[request_id]
        tokens.append([7] if request.num_computed_tokens >= request.num_tokens else [])
    connector_output = KVConnectorOutput(finished_recving=received, finished_sending=sent, **output)
    scheduler.update_from_output(
        scheduled,
        ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
            sampled_token_ids=tokens,
            logprobs=None,
            prompt_logprobs_dict={},
            pooler_output=[],
            kv_connector_output=connector_output,
        ),
    )
    return scheduled


def recorded(directory: Path) -> list[tuple[str, str, dict[str, Any]]]:
    """Name, request id and fields (texts resolved) of all events in the rings, in order; no samples."""
    rows: list[tuple[Event, dict[int, str]]] = []
    for path in ring_paths(directory):
        reader = RingReader(path)
        read = list(reader.events())
        rows += [(event, reader.texts) for event in read]
        reader.close()
    found = []
    for event, texts in sorted(rows, key=lambda row: row[0].t_ns):
        kind = events.VOCABULARY[event.kind]
        if event.kind != events.ENGINE_SAMPLE:
            fields = {
                name: texts.get(value, "") if doc.startswith("text") else value
                for (name, doc), value in zip(kind.fields.items(), event.args, strict=False)
            }
            found.append((kind.name, texts.get(event.key, ""), fields))
    return found
