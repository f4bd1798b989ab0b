"""vLLM's own scheduler and NIXL workers without an engine: no model, no network, and an agent of paper.

Each comes stock or instrumented; what calls it is vLLM's own code wherever that runs without a model.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import nixl
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvscope.connectors import facade, hooks
from kvscope.ring import About

BLOCK = 16
BLOCKS = 256


def make_scheduler(model: Path, mode: str, engine: str, instrumented: bool) -> Any:
    """vLLM's scheduler with a NIXL connector of `mode`."""
    config = VllmConfig(
        model_config=ModelConfig(model=str(model), dtype="float32", max_model_len=1024),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=1024,
            max_model_len=1024,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        ),
        cache_config=CacheConfig(block_size=BLOCK, enable_prefix_caching=False),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlPushConnector" if mode == hooks.PUSH else "NixlPullConnector",
            kv_connector_module_path="kvscope.connectors" if instrumented else None,
            kv_role="kv_both",
            engine_id=engine,
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.num_gpu_blocks = BLOCKS
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=32, dtype=torch.float32)
    caches = KVCacheConfig(BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    return Scheduler(config, caches, StructuredOutputManager(config), block_size=BLOCK, log_stats=True)


def make_request(request_id: str, prompt_tokens: int, output_tokens: int, params: dict[str, Any]) -> Any:
    sampling = SamplingParams(max_tokens=output_tokens, extra_args={"kv_transfer_params": params})
    sampling.update_from_generation_config({}, 511)
    return Request(request_id, list(range(1, prompt_tokens + 1)), sampling, None)


def step(scheduler: Any, received: set[str] | None = None, sent: set[str] | None = None) -> None:
    """One step of the engine's loop; the model would have said token 7."""
    scheduled = scheduler.schedule()
    ids = list(scheduled.num_scheduled_tokens)
    requests = [scheduler.requests[request_id] for request_id in ids]
    tokens = [[7] if request.num_computed_tokens >= request.num_tokens else [] for request in requests]
    output = ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=tokens,
        logprobs=None,
        prompt_logprobs_dict={},
        pooler_output=[],
        kv_connector_output=KVConnectorOutput(finished_recving=received, finished_sending=sent),
    )
    scheduler.update_from_output(scheduled, output)


class Agent:
    """As much of NIXL's agent as a worker needs once the peers are connected."""

    def __init__(self) -> None:
        self.state = "PROC"
        """Of all transfers."""
        self.inbox: dict[str, list[bytes]] = {}
        self.sent: list[bytes] = []

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        return "PROC"

    def check_xfer_state(self, handle: Any) -> str:
        return self.state

    def get_xfer_telemetry(self, handle: Any) -> Any:
        return SimpleNamespace(startTime=5, postDuration=6, xferDuration=7, totalBytes=8, descCount=9)

    def release_xfer_handle(self, handle: Any) -> None:
        pass

    def get_new_notifs(self, backends: Any = ()) -> dict[str, list[bytes]]:
        inbox, self.inbox = self.inbox, {}
        return inbox

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, backend: Any = None) -> None:
        self.sent.append(notif_msg)


class Topology(SimpleNamespace):
    """One rank on either side."""

    def get_engine_info(self, engine: str) -> Any:
        return SimpleNamespace(
            remote_tp_size=1, remote_dcp_size=1, remote_block_size=BLOCK, remote_physical_blocks_per_logical=1
        )

    def block_size_ratio(self, size: int) -> int:
        return 1

    def tp_ratio(self, size: int) -> int:
        return 1


class OnePass:
    """In place of the writer thread's events: lets its loop run once, without waiting."""

    def __init__(self) -> None:
        self._stop = True

    def is_set(self) -> bool:
        self._stop = not self._stop
        return self._stop

    def wait(self, timeout: float = 0) -> bool:
        return True

    def set(self) -> None:
        pass

    def clear(self) -> None:
        pass


def make_worker(mode: str, engine: str, peer: str, instrumented: bool) -> Any:
    """vLLM's worker of `mode`, connected to `peer`. What needs registered memory is the posting itself."""
    stock = nixl.NixlPushConnectorWorker if mode == hooks.PUSH else nixl.NixlPullConnectorWorker
    worker = stock.__new__(stock)
    worker.shutdown = lambda: None  # called by __del__
    worker.engine_id, worker.tp_rank, worker.pcp_rank, worker.world_size = engine, 0, 0, 1
    worker.dcp_size, worker.block_size, worker._lease_extension = 1, BLOCK, 20
    worker.pcp_dcp_sharded = worker.use_host_buffer = worker.enable_permute_local_kv = False
    worker.enable_heterogeneous_attn_post_process = worker._is_hma_required = worker._has_mamba = False
    worker.use_mla = worker._bidirectional_kv_xfer_enabled = worker._is_csa_linear = False
    worker._mixed_mem_types = False
    worker._physical_blocks_per_logical_kv_block = 1
    worker.nixl_wrapper, worker.transfer_topo = Agent(), Topology()
    worker.xfer_stats = NixlKVConnectorStats()
    for name in ("_reqs_to_send", "_recving_metadata", "_handshake_futures", "_engine_clock_offset",
                 "expected_consumer_notifications_by_req", "_pending_recv_notifs", "_engine_last_active",
                 "_push_finished_blocks", "_pending_d_registrations"):  # fmt: skip
        setattr(worker, name, {})
    for name in ("_reqs_to_process", "_recv_failures", "_replicated_pcp_done_sending", "_send_failures",
                 "_invalid_remote_engines", "_failed_remote_engines"):  # fmt: skip
        setattr(worker, name, set())
    for name in ("_ready_requests", "_failed_recv_reqs", "_invalid_block_ids", "_pending_completion_notifs",
                 "_evict_finished_inbox", "_reg_send_inbox", "_finished_blocks_inbox",
                 "_deferred_push_inbox"):  # fmt: skip
        setattr(worker, name, queue.Queue())
    worker._recving_transfers, worker._sending_transfers = defaultdict(list), defaultdict(list)
    worker.consumer_notification_counts_by_req = defaultdict(int)
    worker._handshake_lock, worker._sending_transfers_lock = threading.RLock(), threading.Lock()
    worker._push_writer_stop = OnePass()
    worker._push_writer_wake = OnePass()
    worker._evict_stale_engines = worker._cleanup_remote_engines = lambda: None
    worker._sync_device_after_direct_recv = lambda done: None

    worker._remote_agents = {peer: {(0, 0): "agent"}}
    plan = SimpleNamespace(all_source_ranks=[0], local_consumers=1, source_ranks_per_group=[[0]])
    worker.tp_mappings = {peer: plan}
    worker.region_group_ids, worker.dst_region_group_ids = [], {peer: []}
    worker.src_xfer_handles_by_block_size = {BLOCK: 1}
    worker.dst_xfer_side_handles = {peer: {0: 1}}

    def write(**arguments: Any) -> Any:
        handle = object()
        worker.nixl_wrapper.transfer(handle)
        return handle

    def read(*arguments: Any, request_id: str, **more: Any) -> bool:
        worker._recving_transfers[request_id].append(write())
        return True

    worker._xfer_blocks, worker._read_blocks = write, read
    if instrumented:
        facade._observe_worker(worker, mode, lambda source, present, missing: About(engine, source))
    return worker


def metadata(**lists: Any) -> Any:
    """What a scheduler tells its worker in a step."""
    made = NixlConnectorMetadata()
    for name, value in lists.items():
        setattr(made, name, value)
    return made
