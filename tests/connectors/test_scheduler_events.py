"""What vLLM's real scheduler makes the connector record: the order, the fields, and what must not be said."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl")

from vllm.v1.request import RequestStatus
from vllm_parts import BLOCK, make_request, make_scheduler, recorded, step

from kvscope import events
from kvscope.connectors.scheduler_hooks import leg_flags
from kvscope.ring import RingReader, ring_paths

FROM_P = {
    "do_remote_prefill": True, "remote_engine_id": "P", "remote_request_id": "p-9", "remote_host": "h",
    "remote_port": 1, "remote_block_ids": [[1, 2, 3]], "tp_size": 1, "remote_num_tokens": 48,
}  # fmt: skip


def names(directory: Path, request_id: str) -> list[str]:
    return [name for name, request, _ in recorded(directory) if request == request_id]


def fields(directory: Path, name: str, request_id: str) -> dict[str, Any]:
    (found,) = [f for n, r, f in recorded(directory) if (n, r) == (name, request_id)]
    return found


@pytest.mark.parametrize("odd", ["many", -3, 2**63, 1.5, [], True])
def test_an_odd_count_from_a_client_is_unknown_and_harms_no_hook(odd: Any, rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector")
    scheduler.add_request(make_request("local", 40, 1, remote_num_tokens=odd, remote_engine_id=odd))
    assert fields(rings, "request.arrived", "local")["remote_tokens"] == events.UNKNOWN


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPullConnector", "NixlPushConnector"])
def test_p_leg(connector: str, rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, connector)
    scheduler.add_request(make_request("p-1", 100, 1, do_remote_decode=True, transfer_id="t-1"))
    for _ in range(3):
        step(scheduler)
    step(scheduler, sent={"p-1"})
    assert names(rings, "p-1") == [
        "request.arrived", "request.considered", "request.scheduled", "prefill.chunk", "prefill.chunk",
        "request.first_token", "request.finished", "send.reported",
    ]  # fmt: skip
    arrived = fields(rings, "request.arrived", "p-1")
    assert arrived["flags"] == events.FLAG_REMOTE_DECODE
    assert arrived["transfer_id"] == "t-1"
    assert abs(arrived["arrival_ns"] - time.monotonic_ns()) < 60e9
    finished = fields(rings, "request.finished", "p-1")
    assert finished["status"] == "FINISHED_LENGTH_CAPPED"
    assert (finished["prompt_tokens"], finished["output_tokens"], finished["lease"]) == (100, 1, 1)
    assert finished["blocks"] == -(-100 // BLOCK)


@pytest.mark.parametrize("connector", ["NixlPullConnector", "NixlPushConnector"])
def test_d_leg(connector: str, rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, connector)
    scheduler.add_request(make_request("d-1", 48, 2, **FROM_P))
    step(scheduler)
    step(scheduler)
    step(scheduler, received={"d-1"})
    step(scheduler)
    step(scheduler)
    assert names(rings, "d-1") == [
        "request.arrived", "request.considered", "blocks.allocated", "load.reported", "request.scheduled",
        "request.first_token", "request.finished",
    ]  # fmt: skip
    arrived = fields(rings, "request.arrived", "d-1")
    assert arrived["flags"] == events.FLAG_REMOTE_PREFILL
    assert (arrived["remote_engine"], arrived["remote_request"], arrived["remote_tokens"]) == ("P", "p-9", 48)
    assert fields(rings, "blocks.allocated", "d-1") == {"blocks": 3, "remote_tokens": 48, "attempts": 1}
    scheduled = fields(rings, "request.scheduled", "d-1")
    assert (scheduled["computed_tokens"], scheduled["deferred_ns"]) == (47, 0)
    assert fields(rings, "request.finished", "d-1")["remote_tokens"] == 48


def test_a_loaded_request_that_finds_no_place_is_deferred_once(rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector", max_num_seqs=1)
    scheduler.add_request(make_request("d-1", 48, 2, **FROM_P))
    step(scheduler)
    scheduler.add_request(make_request("local", 40, 6))
    step(scheduler)
    step(scheduler, received={"d-1"})
    while "d-1" in scheduler.requests:
        step(scheduler)
    found = names(rings, "d-1")
    assert found.count("promotion.deferred") == 1
    assert found.index("load.reported") < found.index("promotion.deferred") < found.index("request.scheduled")
    (deferred,) = [
        e for p in ring_paths(rings) for e in RingReader(p).events() if e.kind == events.PROMOTION_DEFERRED
    ]
    noted = fields(rings, "request.scheduled", "d-1")["deferred_ns"]
    assert 0 <= noted - deferred.t_ns < 10_000_000


def test_a_request_that_waits_for_blocks_counts_the_passes(rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector", blocks=6)
    scheduler.add_request(make_request("local", 40, 6))
    step(scheduler)
    scheduler.add_request(make_request("d-1", 48, 2, **FROM_P))
    while "local" in scheduler.requests:
        step(scheduler)
    step(scheduler)
    assert names(rings, "d-1")[:3] == ["request.arrived", "request.considered", "blocks.allocated"]
    assert fields(rings, "blocks.allocated", "d-1")["attempts"] > 1


def test_preemption(rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector", blocks=7)
    for name in ("a", "b"):
        scheduler.add_request(make_request(name, 44, 20))
    for _ in range(60):
        step(scheduler)
    assert not scheduler.requests
    found = names(rings, "b")
    assert "request.preempted" in found
    assert found.count("request.scheduled") == found.count("request.preempted") + 1
    assert found.count("request.first_token") == 1
    preemptions = [f["preemptions"] for n, r, f in recorded(rings) if (n, r) == ("request.scheduled", "b")]
    assert preemptions == list(range(len(preemptions)))
    # The prompt is computed once more, in chunks that are recorded.
    assert found.index("request.preempted") < len(found) - found[::-1].index("prefill.chunk")


def test_abort_while_loading_is_finished_first_and_reported_later(rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector")
    scheduler.add_request(make_request("d-1", 48, 2, **FROM_P))
    step(scheduler)
    scheduler.finish_requests("d-1", RequestStatus.FINISHED_ABORTED)
    step(scheduler, received={"d-1"})
    step(scheduler)
    assert names(rings, "d-1")[3:] == ["request.finished", "load.reported"]
    finished = fields(rings, "request.finished", "d-1")
    assert (finished["status"], finished["remote_tokens"]) == ("FINISHED_ABORTED", 0)


def test_a_failed_load_is_told(rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector")
    scheduler.add_request(make_request("d-1", 48, 2, **FROM_P))
    step(scheduler)
    blocks = set(scheduler.kv_cache_manager.get_block_ids("d-1")[0])
    step(scheduler, received={"d-1"}, failed_recving={"d-1"}, invalid_block_ids=blocks)
    assert fields(rings, "load.reported", "d-1")["failed"] == 1
    assert fields(rings, "request.finished", "d-1")["status"] == "FINISHED_ERROR"
    assert fields(rings, "request.finished", "d-1")["remote_tokens"] == 0


def test_ids_of_another_connector_are_ignored(rings: Path, model: Path) -> None:
    """Under MultiConnector every child is told of every transfer."""
    scheduler = make_scheduler(model, "NixlPullConnector")
    scheduler.add_request(make_request("local", 40, 4))
    step(scheduler)
    from vllm.v1.outputs import KVConnectorOutput

    scheduler.connector.update_connector_output(
        KVConnectorOutput(finished_recving={"local", "foreign"}, finished_sending={"local", "foreign"})
    )
    step(scheduler)
    found = [name for name, _, _ in recorded(rings)]
    assert not {"load.reported", "send.reported", "promotion.deferred"} & set(found)


def test_a_child_of_multiconnector_records(rings: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Instrumented by the plugin: the children's config stays as it is."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvscope.connectors import plugin

    monkeypatch.setattr(KVConnectorFactory, "_registry", dict(KVConnectorFactory._registry))
    monkeypatch.setenv("KVSCOPE_ENABLE", "1")
    plugin.register()
    child = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    scheduler = make_scheduler(model, "MultiConnector", connectors=[child])
    scheduler.add_request(make_request("p-1", 100, 1, do_remote_decode=True))
    scheduler.add_request(make_request("d-1", 48, 2, **FROM_P))
    for _ in range(4):
        step(scheduler)
    step(scheduler, received={"d-1"}, sent={"p-1"})
    for _ in range(3):
        step(scheduler)
    assert not scheduler.requests
    assert "send.reported" in names(rings, "p-1")
    found = names(rings, "d-1")
    assert found[2:5] == ["blocks.allocated", "load.reported", "request.scheduled"]
    assert found[-2:] == ["request.first_token", "request.finished"]


def test_cleanup_requests_are_flagged(rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector")
    request = make_request("ghost", 1, 1, **FROM_P)
    request.abort_immediately = True
    scheduler.add_request(request)
    scheduler.finish_requests("ghost", RequestStatus.FINISHED_ABORTED)
    assert (
        fields(rings, "request.arrived", "ghost")["flags"] == events.FLAG_REMOTE_PREFILL | events.FLAG_CLEANUP
    )


PULLABLE = {"remote_engine_id": "D", "remote_request_id": "d-1", "remote_host": "h", "remote_port": 1}
OFFERED = events.FLAG_REMOTE_DECODE | events.FLAG_REUSE_OFFERED
INCOMPLETE = OFFERED | events.FLAG_REUSE_INCOMPLETE


@pytest.mark.parametrize(
    ("params", "flags"),
    [
        ({}, 0),
        ({"do_remote_decode": False, "do_remote_prefill": True}, events.FLAG_REMOTE_PREFILL),
        (
            {"do_remote_decode": True, "remote_engine_id": None, "remote_block_ids": None},
            events.FLAG_REMOTE_DECODE,
        ),
        ({"do_remote_decode": True, "remote_block_ids": [[1]], **PULLABLE}, OFFERED),
        ({"do_remote_decode": True, "remote_block_ids": [[1]], **PULLABLE, "remote_host": None}, INCOMPLETE),
        ({"do_remote_decode": True, "remote_block_ids": [[1]]}, INCOMPLETE),
        ({"do_remote_decode": True, **PULLABLE}, INCOMPLETE),
    ],
)
def test_flags(params: dict[str, Any], flags: int) -> None:
    assert leg_flags(params) == flags


def test_shutdown_is_recorded(rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector")
    scheduler.shutdown()
    assert [name for name, _, _ in recorded(rings)] == ["engine.stopped"]


def test_who_writes(rings: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVSCOPE_LABEL", "test")
    monkeypatch.setenv("UCX_TLS", "tcp")
    make_scheduler(
        model,
        "NixlPullConnector",
        bidirectional_kv_xfer=True,
        api_key="hush",
        backend_params={"password": "hush"},
    )
    (path,) = ring_paths(rings)
    about = RingReader(path).about
    assert (about.engine_id, about.source, about.rank, about.label) == ("engine-1", "scheduler", 0, "test")
    assert about.hooks_missing == []
    assert "connector.on_new_request" in about.hooks
    known = about.fingerprint
    assert known["connector"] == "NixlPullConnector"
    assert known["transfer_mode"] == "pull"
    assert known["extra_config"] == {"bidirectional_kv_xfer": True, "backend_params": {}}
    assert known["environment"]["UCX_TLS"] == "tcp"
    for name in ("vllm", "nixl", "torch", "python", "kvscope", "model", "kv_role", "block_size", "num_blocks",
                 "max_num_seqs", "max_num_batched_tokens", "prefix_caching", "chunked_prefill",
                 "async_scheduling",
                 "max_model_len", "kv_cache_dtype", "tensor_parallel_size", "pipeline_parallel_size",
                 "data_parallel_size", "decode_context_parallel_size", "nixl_backends", "side_channel",
                 "kv_load_failure_policy"):  # fmt: skip
        assert name in known, name
    assert "hush" not in str(about)
