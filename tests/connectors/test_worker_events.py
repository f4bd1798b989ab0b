"""vLLM's real worker classes, without their constructors and with a NIXL agent of paper."""

from __future__ import annotations

import importlib
import queue
import threading
import time
from collections import defaultdict
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl")

from vllm_parts import recorded

from kvscope import events
from kvscope.connectors import facade, hooks, worker_hooks
from kvscope.ring import About, RingReader, ring_paths

nixl = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl")
metadata = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata")
stats = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats")


class Agent:
    """As much of NIXL's agent as the hooks and vLLM's polling use."""

    def __init__(self) -> None:
        self.states: dict[Any, str] = {}
        self.notifications: list[dict[str, list[bytes]]] = []
        self.sent: list[bytes] = []
        self.answer = "PROC"

    def transfer(self, handle: Any, notif_msg: bytes = b"") -> str:
        self.states[handle] = "PROC"
        return self.answer

    def check_xfer_state(self, handle: Any) -> str:
        return self.states[handle]

    def get_xfer_telemetry(self, handle: Any) -> Any:
        return SimpleNamespace(startTime=5, postDuration=6, xferDuration=7, totalBytes=8, descCount=9)

    def release_xfer_handle(self, handle: Any) -> None:
        del self.states[handle]

    def get_new_notifs(self, backends: Any = ()) -> dict[str, list[bytes]]:
        return self.notifications.pop(0) if self.notifications else {}

    def send_notif(self, remote_agent_name: str, notif_msg: bytes, backend: Any = None) -> None:
        self.sent.append(notif_msg)


class Topology(SimpleNamespace):
    def get_engine_info(self, engine: str) -> Any:
        return SimpleNamespace(remote_block_size=16, remote_physical_blocks_per_logical=1)

    def block_size_ratio(self, size: int) -> int:
        return 1


def make_worker(mode: str) -> Any:
    stock = nixl.NixlPushConnectorWorker if mode == hooks.PUSH else nixl.NixlPullConnectorWorker
    worker = stock.__new__(stock)
    worker.shutdown = lambda: None  # called by __del__
    worker.engine_id, worker.tp_rank, worker.pcp_rank, worker.world_size = "me", 0, 0, 1
    worker.pcp_dcp_sharded = worker.use_host_buffer = worker.enable_permute_local_kv = False
    worker.enable_heterogeneous_attn_post_process = worker._is_hma_required = worker._has_mamba = False
    worker.use_mla = worker._bidirectional_kv_xfer_enabled = False
    worker._physical_blocks_per_logical_kv_block = 1
    worker.nixl_wrapper = Agent()
    worker.xfer_stats = stats.NixlKVConnectorStats()
    worker.transfer_topo = Topology()
    worker._lease_extension = 20
    for name in ("_reqs_to_send", "_recving_metadata", "_remote_agents", "_handshake_futures",
                 "expected_consumer_notifications_by_req", "_pending_recv_notifs", "_engine_last_active",
                 "_engine_clock_offset", "_push_finished_blocks", "_pending_d_registrations"):  # fmt: skip
        setattr(worker, name, {})
    for name in ("_reqs_to_process", "_recv_failures", "_replicated_pcp_done_sending", "_send_failures",
                 "_invalid_remote_engines", "_failed_remote_engines"):  # fmt: skip
        setattr(worker, name, set())
    for name in ("_ready_requests", "_failed_recv_reqs", "_invalid_block_ids", "_pending_completion_notifs",
                 "_evict_finished_inbox", "_reg_send_inbox", "_finished_blocks_inbox"):  # fmt: skip
        setattr(worker, name, queue.Queue())
    worker._recving_transfers, worker._sending_transfers = defaultdict(list), defaultdict(list)
    worker.consumer_notification_counts_by_req = defaultdict(int)
    worker._handshake_lock, worker._sending_transfers_lock = threading.RLock(), threading.Lock()
    worker._push_writer_wake = threading.Event()
    worker._evict_stale_engines = worker._cleanup_remote_engines = lambda: None
    worker._sync_device_after_direct_recv = lambda done: None
    facade._observe_worker(worker, mode, lambda source, present, missing: About("me", source))
    assert type(worker) is not stock
    assert type(worker.nixl_wrapper).__name__ == "Agent"
    return worker


def names(directory: Path) -> list[str]:
    return [name for name, _, _ in recorded(directory)]


def load(worker: Any, **lists: Any) -> None:
    meta = metadata.NixlConnectorMetadata()
    for name, value in lists.items():
        setattr(meta, name, value)
    worker.start_load_kv(meta)


def lend(worker: Any, request: str, seconds: float = 30) -> None:
    load(worker, reqs_in_batch={request})
    load(worker, reqs_to_send={request: time.perf_counter() + seconds})


def remote(local_blocks: Any, **more: Any) -> Any:
    peer = metadata.RemoteMeta(block_ids=[[1]], host="h", port=1, engine_id="P", request_id="p-1")
    return metadata.ReqMeta(local_block_ids=local_blocks, local_physical_block_ids=local_blocks, tp_size=1,
                            remote=peer, **more)  # fmt: skip


def test_transfers_that_no_hook_said_a_request_of_are_not_gathered(rings: Path) -> None:
    worker = make_worker(hooks.PUSH)
    for _ in range(3):
        worker.nixl_wrapper.transfer(object())
    assert worker._kvscope.current.posted == ()


class TestThreadNames:
    """The kernel's name of a thread, by which its CPU is told apart."""

    def name_after_a_hook(self, thread_name: str) -> tuple[str, str]:
        """Of a thread of that name, before and after hooks ran in it."""
        worker = make_worker(hooks.PUSH)
        names = []

        def work() -> None:
            comm = Path("/proc/thread-self/comm")
            names.append(comm.read_text().strip())
            for _ in range(2):
                worker.nixl_wrapper.transfer(object())
            names.append(comm.read_text().strip())

        thread = threading.Thread(target=work, name=thread_name)
        thread.start()
        thread.join()
        return names[0], names[1]

    @pytest.mark.parametrize(
        ("module", "name", "told"),
        [
            ("push_worker", "nixl-push-writer", "nixl-push-write"),
            ("base_worker", "vllm-nixl-handshake-initiator", "nixl-handshake"),
        ],
    )
    def test_the_connectors_threads_are_told_by_name(
        self, rings: Path, module: str, name: str, told: str
    ) -> None:
        source = Path(importlib.import_module(f"{nixl.__name__}.{module}").__file__ or "").read_text()
        assert f'"{name}"' in source  # so vLLM names it
        before, after = self.name_after_a_hook(f"{name}_0" if "handshake" in name else name)
        assert before != told
        assert after == told

    def test_other_threads_keep_their_name(self, rings: Path) -> None:
        before, after = self.name_after_a_hook("MainThread")
        assert before == after

    def test_a_name_that_can_not_be_set_costs_no_event(
        self, rings: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refused(*args: Any) -> Any:
            raise PermissionError

        monkeypatch.setattr(worker_hooks, "open", refused, raising=False)
        before, after = self.name_after_a_hook("nixl-push-writer")
        assert before == after
        assert names(rings) == ["transfer.posted", "transfer.posted"]


class TestLeases:
    def test_renewed_then_released_by_the_reader(self, rings: Path) -> None:
        worker = make_worker(hooks.PULL)
        lend(worker, "p-1", seconds=1)
        worker.nixl_wrapper.notifications += [
            {"D": [b"HB:p-1,stranger"]},
            {"D": [b"HB:stranger"]},
            {"D": [b"p-1:1"]},
        ]
        for _ in range(3):
            worker.get_transfer_results()
        found = recorded(rings)
        assert [(name, request) for name, request, _ in found] == [
            ("lease.armed", "p-1"), ("lease.renewed", "p-1"), ("lease.unmatched", "stranger"),
            ("notification.received", "p-1"), ("lease.released", "p-1"),
        ]  # fmt: skip
        armed, renewed = found[0][2]["deadline_ns"], found[1][2]["deadline_ns"]
        assert 18e9 < renewed - armed < 20e9
        assert 0 < armed - time.monotonic_ns() + 1e9 < 2e9

    def test_two_readers(self, rings: Path) -> None:
        worker = make_worker(hooks.PULL)
        lend(worker, "p-1")
        worker.nixl_wrapper.notifications += [{"D": [b"p-1:2"]}, {"E": [b"p-1:2"]}]
        assert worker.get_transfer_results().finished_sending == set()
        assert worker.get_transfer_results().finished_sending == {"p-1"}
        assert names(rings)[1:] == ["notification.received", "notification.received", "lease.released"]

    def test_expired_with_a_reader_missing(self, rings: Path) -> None:
        worker = make_worker(hooks.PULL)
        lend(worker, "p-1", seconds=0)
        worker.nixl_wrapper.notifications += [{"D": [b"p-1:2"]}, {}, {"E": [b"p-1:2"]}]
        for _ in range(3):
            worker.get_transfer_results()
        found = recorded(rings)
        assert [name for name, _, _ in found] == [
            "lease.armed", "notification.received", "lease.expired", "notification.received",
            "notification.late",
        ]  # fmt: skip
        assert found[2][2]["consumers"] == 1
        # vLLM itself counts the same two.
        assert len(worker.xfer_stats.data["num_kv_expired_reqs"]) == 1
        assert len(worker.xfer_stats.data["num_notifications_after_expiry"]) == 1

    def test_a_second_reader_in_the_same_poll_came_too_late(self, rings: Path) -> None:
        """n>1 sampling: two D requests read one P request; vLLM frees the blocks at the first."""
        worker = make_worker(hooks.PULL)
        lend(worker, "p-1")
        worker.nixl_wrapper.notifications += [{"D": [b"p-1:1", b"p-1:1"]}]
        worker.get_transfer_results()
        assert names(rings)[1:] == [
            "notification.received", "notification.received", "lease.released", "notification.late",
        ]  # fmt: skip

    def test_a_heartbeat_that_crosses_the_release_is_not_unmatched(self, rings: Path) -> None:
        worker = make_worker(hooks.PULL)
        lend(worker, "p-1")
        lend(worker, "p-2")
        worker.nixl_wrapper.notifications += [
            {"D": [b"p-1:1"]},
            {"D": [b"HB:p-1"]},
            {"D": [b"p-2:1", b"HB:p-2"]},
        ]
        for _ in range(3):
            worker.get_transfer_results()
        assert "lease.unmatched" not in names(rings)


class TestPull:
    def test_waits_for_the_handshake_then_posts_and_polls(
        self, rings: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        worker = make_worker(hooks.PULL)
        started: Future[Any] = Future()
        worker._handshake_initiation_executor = SimpleNamespace(submit=lambda *a: started)
        meta = remote([[4, 5]], awaiting_kvs=True)
        load(worker, reqs_to_recv={"d-1": meta})
        assert names(rings) == ["load.started", "handshake.waited"]

        handle = object()
        worker._remote_agents["P"] = {(0, 0): "agent"}
        worker.tp_mappings = {"P": SimpleNamespace(all_source_ranks=[], local_consumers=1,
                                                   source_ranks_per_group=[[]])}  # fmt: skip
        worker.transfer_topo.tp_ratio = lambda size: 1
        worker.transfer_topo.get_engine_info = lambda engine: SimpleNamespace(
            remote_tp_size=1, remote_dcp_size=1, remote_block_size=16, remote_physical_blocks_per_logical=1
        )
        worker.dcp_size, worker.region_group_ids = 1, []
        worker.dst_region_group_ids = {"P": []}

        def group(ids: Any, ratio: int) -> Any:
            worker.nixl_wrapper.transfer(handle)
            worker._recving_transfers["d-1"] = [handle]
            return ids

        # The posting itself needs registered memory: done here where vLLM expands the block ids.
        monkeypatch.setattr(worker, "_logical_to_kernel_block_ids", group, raising=False)
        worker._read_blocks_for_req("d-1", meta)
        monkeypatch.undo()
        assert worker.get_transfer_results().finished_recving == set()
        before = time.monotonic_ns()
        worker.nixl_wrapper.states[handle] = "DONE"
        assert worker.get_transfer_results().finished_recving == {"d-1"}

        found = recorded(rings)
        assert [name for name, _, _ in found][2:] == [
            "load.started", "transfer.posted", "transfer.done", "load.done",
        ]  # fmt: skip
        posted, done = found[3], found[4]
        assert posted[1] == done[1] == "d-1"
        assert (posted[2]["write"], posted[2]["done"], posted[2]["remote_engine"]) == (0, 0, "P")
        assert posted[2]["transfer"] == done[2]["transfer"]
        assert posted[2]["begin_ns"] < done[2]["last_poll_ns"] < before < done[2]["poll_ns"]
        assert [done[2][name] for name in ("start_ns", "post_us", "xfer_us", "bytes", "descriptors")] == [
            5000, 6, 7, 8, 9,
        ]  # fmt: skip
        assert found[5][2] == {"failed": 0}
        assert not worker._kvscope.transfers

    def test_nothing_to_read_only_notifies(self, rings: Path) -> None:
        worker = make_worker(hooks.PULL)
        observer = worker._kvscope
        observer.take_up("d-1", "P")
        worker.nixl_wrapper.send_notif("agent", notif_msg=b"p-1:1")
        worker.nixl_wrapper.send_notif("agent", notif_msg=b"HB:p-1")
        observer.put_down()
        worker.nixl_wrapper.send_notif("agent", notif_msg=b"p-1:1")
        assert [(name, request) for name, request, _ in recorded(rings)] == [("notification.sent", "d-1")]

    def test_a_failed_transfer(self, rings: Path) -> None:
        worker = make_worker(hooks.PULL)
        worker._recving_metadata["d-1"] = remote([[4]], awaiting_kvs=True)
        handle = object()
        worker.nixl_wrapper.transfer(handle)
        worker._recving_transfers["d-1"] = [handle]
        worker.nixl_wrapper.states[handle] = "ERR"
        assert worker.get_transfer_results().failed_recving == {"d-1"}
        found = recorded(rings)
        assert [name for name, _, _ in found] == ["transfer.posted", "failure", "load.done"]
        assert found[1][2] == {"type": "transfer_failed", "remote_engine": "P"}
        assert found[2][2] == {"failed": 1}
        assert not worker._kvscope.transfers


class TestHandshake:
    def test_its_end_carries_the_clock_offset(self, rings: Path) -> None:
        stock = nixl.NixlPullConnectorWorker

        class Base(stock):  # type: ignore[misc, valid-type]
            def _nixl_handshake(
                self, host: str, port: int, remote_tp_size: int, expected_engine_id: str, *a: Any
            ) -> Any:
                if port == 0:
                    raise TimeoutError
                return {(0, 0): "agent"}, -0.25

        worker = make_worker(hooks.PULL)
        from kvscope.connectors.guard import overrides, subclass
        from kvscope.connectors.worker_hooks import PullHooks

        methods, _, _ = overrides(hooks.hooks_of(hooks.WORKER, hooks.PULL), Base, PullHooks)
        observer = worker._kvscope
        worker.__class__ = subclass(Base, methods)
        worker._kvscope = observer
        assert worker._nixl_handshake("h", 1, 1, "P") == ({(0, 0): "agent"}, -0.25)
        with pytest.raises(TimeoutError):
            worker._nixl_handshake("h", 0, 1, "P")
        found = recorded(rings)
        assert [name for name, _, _ in found] == ["handshake.started", "handshake.finished"] * 2
        good, bad = found[1][2], found[3][2]
        assert (good["remote_engine"], good["ok"], good["has_offset"], good["clock_offset_ns"]) == (
            "P", 1, 1, -250_000_000,
        )  # fmt: skip
        assert (bad["ok"], bad["has_offset"]) == (0, 0)
        assert good["started_ns"] <= time.monotonic_ns()


class TestPush:
    def registration(self) -> dict[str, Any]:
        return {"request_id": "d-1", "decode_engine_id": "D", "decode_host": "h", "decode_port": 1,
                "decode_tp_size": 1, "local_block_ids": [[1, 2]], "remote_engine_id": "P", "remote_host": "h",
                "remote_port": 1, "remote_tp_size": 1}  # fmt: skip

    def test_d_registers(self, rings: Path) -> None:
        worker = make_worker(hooks.PUSH)
        worker._recving_metadata["d-1"] = remote([[1, 2]])
        pending: Future[Any] = Future()
        worker._handshake_initiation_executor = SimpleNamespace(submit=lambda *a: pending)
        worker._send_registration_to_p("d-1", self.registration())
        worker._remote_agents["P"] = {(0, 0): "agent"}
        worker._send_registration_to_p("d-1", self.registration())
        worker.nixl_wrapper.notifications += [{"P": [b"d-1:1"]}]
        worker._pending_completion_notifs.put(worker.nixl_wrapper.get_new_notifs()["P"][0])
        worker.tp_mappings = {}
        worker.transfer_topo.tp_ratio = lambda size: 1
        assert worker.get_transfer_results().finished_recving == {"d-1"}
        found = recorded(rings)
        assert [name for name, _, _ in found] == [
            "load.started", "handshake.waited", "load.started", "registration.sent", "notification.received",
            "load.done",
        ]  # fmt: skip
        assert {request for _, request, _ in found} == {"d-1"}
        assert found[0][2] == {"remote_engine": "P", "remote_request": "p-1", "blocks": 2}

    def test_a_registration_that_can_not_be_sent_was_not_sent(self, rings: Path) -> None:
        worker = make_worker(hooks.PUSH)
        worker._remote_agents["P"] = {}
        worker._send_registration_to_p("d-1", self.registration())
        assert "registration.sent" not in names(rings)

    def test_p_matches_writes_and_lets_go(self, rings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        worker = make_worker(hooks.PUSH)
        lend(worker, "p-1")
        worker._push_finished_blocks["p-1"] = [[7, 8]]
        worker._remote_agents["D"] = {(0, 0): "agent"}
        handle = object()

        def post(self: Any, req_id: str, meta: Any) -> None:
            self.nixl_wrapper.transfer(handle)
            self._sending_transfers[req_id] = [handle]

        message = b"PUSH_REG:" + msgspec.msgpack.encode({**self.registration(), "request_id": "p-1"})
        # Posting needs registered memory.
        monkeypatch.setattr(type(worker), "_xfer_blocks_for_req", post)
        worker._handle_push_reg_notif(message)
        assert worker.get_transfer_results().finished_sending == set()
        worker.nixl_wrapper.states[handle] = "DONE"
        assert worker.get_transfer_results().finished_sending == {"p-1"}
        found = recorded(rings)
        assert [name for name, _, _ in found] == [
            "lease.armed", "registration.received", "push.matched", "transfer.posted", "transfer.done",
            "send.done", "lease.released",
        ]  # fmt: skip
        assert found[1][2] == {"remote_engine": "D"}
        assert found[2][2] == {"remote_engine": "D", "remote_request": "p-1"}
        assert found[3][2]["write"] == 1

    def test_a_poll_before_the_handle_was_in_its_place_proves_nothing(self, rings: Path) -> None:
        """The writer thread posts, the main thread polls, then the writer publishes the handle."""
        worker = make_worker(hooks.PUSH)
        handle, observer = object(), worker._kvscope
        worker._sending_transfers["other"] = []
        observer.take_up("p-1", "D")
        worker.nixl_wrapper.transfer(handle)
        observer.before_pop_done_transfers(worker, worker._sending_transfers)
        worker._sending_transfers["p-1"] = [handle]
        observer.after_xfer_blocks_for_req(worker, None, "p-1", None)
        worker.nixl_wrapper.states[handle] = "DONE"
        worker._pop_done_transfers(worker._sending_transfers)
        (posted,) = [
            e for p in ring_paths(rings) for e in RingReader(p).events() if e.kind == events.TRANSFER_POSTED
        ]
        (done,) = [fields for name, _, fields in recorded(rings) if name == "transfer.done"]
        assert done["last_poll_ns"] <= posted.t_ns

    def test_expiry_without_a_registration(self, rings: Path) -> None:
        worker = make_worker(hooks.PUSH)
        lend(worker, "p-1", seconds=0)
        worker.get_transfer_results()
        assert names(rings) == ["lease.armed", "lease.expired"]


def test_shutdown_is_recorded_once(rings: Path) -> None:
    worker = make_worker(hooks.PULL)
    del worker.shutdown
    worker.shutdown()
    worker.shutdown()
    assert names(rings) == ["engine.stopped"]


def test_an_unknown_vllm_is_left_alone(
    rings: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    monkeypatch.setattr("kvscope.connectors.fingerprint.vllm_version", lambda: "0.99.0")
    worker = nixl.NixlPullConnectorWorker.__new__(nixl.NixlPullConnectorWorker)
    worker.shutdown = lambda: None
    worker.nixl_wrapper = Agent()
    facade._observe_worker(
        worker, hooks.PULL, lambda source, present, missing: About("me", source, hooks_missing=missing)
    )
    assert type(worker) is nixl.NixlPullConnectorWorker
    assert [record.levelname for record in caplog.records if "0.99.0" in record.getMessage()] == ["WARNING"]
    (path,) = ring_paths(rings)
    assert "worker._read_blocks_for_req" in RingReader(path).about.hooks_missing
