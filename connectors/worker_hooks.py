"""What is recorded in a worker: loads, handshakes, transfers, notifications and leases of one rank.

Three threads run these hooks: the worker's main thread, vLLM's push writer and its handshake thread. They
share plain dicts and deques only, whose single operations are atomic; some hooks run under vLLM's locks.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from itertools import count
from time import monotonic_ns
from typing import Any

from kvscope import events
from kvscope.connectors import notifications
from kvscope.connectors.guard import Observer, timed
from kvscope.events import UNKNOWN
from kvscope.ring import RingWriter

SAMPLE_NS = 1_000_000_000
MAX_REMEMBERED = 4096
"""Ids kept to say a thing once: the set is emptied when it is full, and a thing may be said again."""

LOAD_FAILURES = ("handshake_failed", "push_reg_handshake_failed")
"""vLLM's failure types after which a load is over although no transfer failed."""

NEVER_NS = 1 << 62

THREAD_NAMES = {
    "nixl-push-writer": "nixl-push-write",
    "vllm-nixl-handshake-initiator": "nixl-handshake",
}
"""Beginnings of vLLM's thread names -> names of 15 characters, all that the kernel keeps."""


class Transfer:
    """A posted transfer until its completion was seen."""

    __slots__ = ("number", "polled_from_ns", "posted_ns", "request")

    def __init__(self, number: int, request: str, posted_ns: int, polled_from_ns: int) -> None:
        self.number = number
        self.request = request
        self.posted_ns = posted_ns
        self.polled_from_ns = polled_from_ns
        """A polling pass that began later has surely polled it."""


class Current(threading.local):
    """The request that this thread works on: vLLM's NIXL calls do not say."""

    request = ""
    engine = ""
    posted: tuple[Transfer, ...] = ()
    notified = 0
    """Notifications sent for it."""

    def __init__(self) -> None:
        """Runs once in each thread, at its first use: nowhere else does naming it cost nothing afterwards."""
        name_thread()


def name_thread() -> None:
    """Give vLLM's connector threads their names in the kernel too, so that their CPU can be told apart:
    before 3.14 Python keeps names to itself. Never raises."""
    with contextlib.suppress(Exception):
        name = threading.current_thread().name
        for start, short in THREAD_NAMES.items():
            if name.startswith(start):
                with open("/proc/thread-self/comm", "w") as comm:
                    comm.write(short)


class WorkerHooks(Observer):
    """Hooks that pull and push share: the worker's own and those of its NIXL agent."""

    write = False
    """Whether this worker's transfers are WRITEs."""

    def __init__(self, writer: RingWriter) -> None:
        super().__init__(writer)
        self.current = Current()
        self.transfers: dict[int, Transfer] = {}
        """By id() of NIXL's handle: holding the handle itself would put off its release."""
        self.next_transfer = count(1).__next__
        self.poll_ns = self.previous_poll_ns = 0
        """When the present and the last polling pass over transfers began."""
        self.arrived: deque[tuple[str, int]] = deque(maxlen=MAX_REMEMBERED)
        """Completions that no polling pass has judged yet."""
        self.leases: dict[str, int] = {}
        """Requests whose blocks are kept for the peer, and the readers that are done."""
        self.told_unmatched: set[str] = set()
        """Requests whose heartbeats are not worth an event (any more)."""
        self.failed_requests: set[str] = set()
        self._sampled_ns = monotonic_ns()
        self._sampled_steps = 0
        self.stopped = False

    # --- a load, on the thread that carries it out ---

    def take_up(self, request: str, engine: str) -> None:
        current = self.current
        current.request = request
        current.engine = engine
        current.posted = ()

    def put_down(self) -> None:
        self.current.request = ""

    def after_ensure_handshake(
        self, worker: Any, result: Any, engine_id: str, *args: Any, **kwargs: Any
    ) -> None:
        request = self.current.request
        if result is not None and request:  # heartbeats ask for handshakes too, for no request
            self.record(events.HANDSHAKE_WAITED, self.text(request), self.text(engine_id))

    def before_nixl_handshake(
        self,
        worker: Any,
        host: str,
        port: int,
        remote_tp_size: int,
        expected_engine_id: str,
        *args: Any,
        **kwargs: Any,
    ) -> int:
        request = self.current.request
        if request:  # 0.24 to 0.26: push's writer thread itself does the handshake, for a request
            self.record(events.HANDSHAKE_WAITED, self.text(request), self.text(expected_engine_id))
        self.record(events.HANDSHAKE_STARTED, 0, self.text(expected_engine_id))
        return monotonic_ns()

    def after_nixl_handshake(
        self, worker: Any, begin_ns: int | None, result: Any,
        host: str, port: int, remote_tp_size: int, expected_engine_id: str, *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        offset = result[1] if isinstance(result, tuple) else None
        self.record(
            events.HANDSHAKE_FINISHED,
            0,
            self.text(expected_engine_id),
            UNKNOWN if begin_ns is None else begin_ns,
            int(result is not None),
            int(offset is not None),
            0 if offset is None else int(offset * 1e9),
        )

    # --- transfers: the NIXL agent ---

    def before_transfer(self, nixl: Any, handle: Any, *args: Any, **kwargs: Any) -> int:
        return monotonic_ns()

    def after_transfer(
        self, nixl: Any, begin_ns: int | None, result: Any, handle: Any, *args: Any, **kwargs: Any
    ) -> None:
        if result is None:
            return  # it raised: not posted
        now_ns = monotonic_ns()
        current = self.current
        transfer = Transfer(self.next_transfer(), current.request, now_ns, NEVER_NS if self.write else now_ns)
        self.transfers[id(handle)] = transfer
        if current.request:  # else nothing would empty it again
            current.posted += (transfer,)
        self.record(
            events.TRANSFER_POSTED,
            self.text(current.request),
            transfer.number,
            int(self.write),
            now_ns if begin_ns is None else begin_ns,
            int(result == "DONE"),
            self.text(current.engine),
        )

    def before_pop_done_transfers(self, worker: Any, transfers: Any) -> None:
        # In push the receiving side has no transfers of its own: its entries are not polled.
        if transfers and not (self.write and transfers is worker._recving_transfers):
            self.previous_poll_ns, self.poll_ns = self.poll_ns, monotonic_ns()

    def after_get_xfer_telemetry(
        self, nixl: Any, result: Any, handle: Any, *args: Any, **kwargs: Any
    ) -> None:
        transfer = self.transfers.pop(id(handle), None)
        if transfer is None:
            return
        last_ns = transfer.posted_ns
        if self.previous_poll_ns > transfer.polled_from_ns:
            last_ns = self.previous_poll_ns
        if result is None:
            figures = (UNKNOWN,) * 5
        else:
            figures = (
                int(result.startTime) * 1000,
                int(result.postDuration),
                int(result.xferDuration),
                int(result.totalBytes),
                int(result.descCount),
            )
        self.record(
            events.TRANSFER_DONE,
            self.text(transfer.request),
            transfer.number,
            last_ns,
            max(self.poll_ns, last_ns),
            *figures,
        )

    def before_release_xfer_handle(self, nixl: Any, handle: Any) -> None:
        self.transfers.pop(id(handle), None)

    # --- notifications: the NIXL agent ---

    def after_get_new_notifs(self, nixl: Any, result: Any, *args: Any, **kwargs: Any) -> None:
        if result:
            self._take_notifications(result)

    @timed
    def _take_notifications(self, by_agent: dict[str, list[bytes]]) -> None:
        for messages in by_agent.values():
            for message in messages:
                found = notifications.completion(message)
                if found is not None:
                    request, expected = found
                    self.record(events.NOTIFICATION_RECEIVED, self.text(request), expected)
                    self.arrived.append(found)

    def after_send_notif(
        self, nixl: Any, result: Any, remote_agent_name: Any, notif_msg: Any, *args: Any, **kwargs: Any
    ) -> None:
        current = self.current
        current.notified += 1
        if current.request and not current.posted and notifications.completion(notif_msg) is not None:
            self.record(events.NOTIFICATION_SENT, self.text(current.request))

    # --- leases and results: the worker's main thread ---

    def after_start_load_kv(self, worker: Any, result: Any, metadata: Any) -> None:
        if metadata.reqs_to_send:
            self._arm_leases(worker, metadata.reqs_to_send)

    @timed
    def _arm_leases(self, worker: Any, requests: Any) -> None:
        for request in requests:
            deadline = worker._reqs_to_send.get(request)
            if deadline is not None:  # else the peer was done before
                self.leases[request] = worker.consumer_notification_counts_by_req.get(request, 0)
                self.record(events.LEASE_ARMED, self.text(request), int(deadline * 1e9))

    def before_handle_heartbeat(self, worker: Any, payload: str) -> dict[str, float | None]:
        deadlines = worker._reqs_to_send
        return {request: deadlines.get(request) for request in payload.split(",") if request}

    def after_handle_heartbeat(
        self, worker: Any, deadlines: dict[str, float | None] | None, result: Any, payload: str
    ) -> None:
        for request, old in (deadlines or {}).items():
            new = worker._reqs_to_send.get(request)
            if new is None:
                # It may have come in one batch with the completion that ended the lease.
                ended = request in dict(self.arrived)
                if not ended and request not in self.told_unmatched:
                    _add(self.told_unmatched, request)
                    self.record(events.LEASE_UNMATCHED, self.text(request))
            elif new != old:
                self.record(events.LEASE_RENEWED, self.text(request), int(new * 1e9))

    def before_handle_failed_transfer(self, worker: Any, req_id: str, *args: Any, **kwargs: Any) -> None:
        _add(self.failed_requests, req_id)

    def before_log_failure(
        self, worker: Any, failure_type: str, req_id: str | None = None, *args: Any, **kwargs: Any
    ) -> None:
        engine = kwargs.get("dst_engine_id") or kwargs.get("remote_engine_id")
        if engine is None and req_id is not None:
            meta = kwargs.get("meta") or worker._recving_metadata.get(req_id)
            engine = meta.remote.engine_id if meta is not None and meta.remote is not None else None
        if req_id is not None and failure_type in LOAD_FAILURES:
            _add(self.failed_requests, req_id)
        self.record(events.FAILURE, self.text(req_id), self.text(failure_type), self.text(engine))

    def after_get_transfer_results(self, worker: Any, result: Any) -> None:
        sent, received = result.finished_sending, result.finished_recving
        if sent or received or self.arrived:
            self._settle(worker, sent, received, result.failed_recving)
        self._count_step()

    def after_get_finished(self, worker: Any, result: Any) -> None:
        sent, received = result
        if sent or received or self.arrived:
            self._settle(worker, sent, received, self.failed_requests)
        self._count_step()

    def _count_step(self) -> None:
        self._sampled_steps += 1
        now_ns = monotonic_ns()
        if now_ns - self._sampled_ns >= SAMPLE_NS:
            self.record(
                events.ENGINE_SAMPLE, 0, self._sampled_steps, UNKNOWN, self.hook_ns, now_ns - self._sampled_ns
            )
            self._sampled_ns = now_ns
            self._sampled_steps = self.hook_ns = 0

    def _released(self, request: str) -> None:
        self.leases.pop(request, None)
        # The peer's last heartbeat may cross its completion: that is not a heartbeat gone astray.
        _add(self.told_unmatched, request)
        self.record(events.LEASE_RELEASED, self.text(request))

    @timed
    def _settle(self, worker: Any, sent: Any, received: Any, failed: Any) -> None:
        """Tell which loads are over, and what ended the leases that vLLM dropped in this pass:
        notifications, or the deadline."""
        for request in received:
            self.record(events.LOAD_DONE, self.text(request), int(request in failed))
        done: dict[str, int] = {}
        while self.arrived:
            request, expected = self.arrived.popleft()
            readers = done[request] = done.get(request, self.leases.get(request, 0)) + 1
            if request in self.leases:
                self.leases[request] = readers
            if request in sent:
                late = readers > expected
            else:
                late = not (
                    request in worker._reqs_to_send
                    or request in worker._reqs_to_process
                    or request in worker._recving_metadata
                    or request in received
                )
            if late:
                self.record(events.NOTIFICATION_LATE, self.text(request))
            elif request in sent and readers >= expected:
                self._released(request)
        for request in sent:
            readers_done = self.leases.pop(request, None)
            if readers_done is not None:
                self.record(events.LEASE_EXPIRED, self.text(request), readers_done)
        self.failed_requests.difference_update(sent)
        self.failed_requests.difference_update(received)

    def before_shutdown(self, worker: Any) -> None:
        if not self.stopped:  # vLLM calls it again from __del__
            self.stopped = True
            self.record(events.ENGINE_STOPPED, 0)


class PullHooks(WorkerHooks):
    """The reader (D; in bidirectional P too) takes up a load and reads on the worker's main thread."""

    def before_read_blocks_for_req(self, worker: Any, req_id: str, meta: Any) -> None:
        remote = meta.remote
        self.take_up(req_id, remote.engine_id)
        self.record(
            events.LOAD_STARTED,
            self.text(req_id),
            self.text(remote.engine_id),
            self.text(remote.request_id),
            _count(meta.local_block_ids),
        )

    def after_read_blocks_for_req(self, worker: Any, memo: None, result: Any, req_id: str, meta: Any) -> None:
        self.put_down()

    def after_is_turn2_read_expired(self, worker: Any, result: Any, meta: Any) -> None:
        if result:
            self.record(events.READ_EXPIRED, self.text(self.current.request))


class PushHooks(WorkerHooks):
    """D registers and P writes, both on vLLM's push writer thread."""

    write = True

    def before_send_registration_to_p(self, worker: Any, req_id: str, reg_data: dict[str, Any]) -> None:
        engine = reg_data["remote_engine_id"]
        self.take_up(req_id, engine)
        meta = worker._recving_metadata.get(req_id)
        remote = meta.remote if meta is not None else None
        self.record(
            events.LOAD_STARTED,
            self.text(req_id),
            self.text(engine),
            self.text(remote.request_id) if remote is not None else 0,
            _count(reg_data["local_block_ids"]),
        )

    def after_send_registration_to_p(
        self, worker: Any, memo: None, result: Any, req_id: str, reg_data: dict[str, Any]
    ) -> None:
        self.put_down()

    def before_do_send_reg_notif(self, worker: Any, req_id: str, reg_data: dict[str, Any]) -> None:
        self.current.notified = 0

    def after_do_send_reg_notif(
        self, worker: Any, memo: None, result: Any, req_id: str, reg_data: dict[str, Any]
    ) -> None:
        if self.current.notified:  # else vLLM logged why it could not be sent
            self.record(events.REGISTRATION_SENT, self.text(req_id), self.text(reg_data["remote_engine_id"]))

    def before_handle_push_reg_notif(self, worker: Any, notif: bytes) -> None:
        found = notifications.registration(notif)
        if found is not None:
            self.record(
                events.REGISTRATION_RECEIVED, self.text(found.request_id), self.text(found.decode_engine_id)
            )

    def before_do_start_push_kv(
        self, worker: Any, request_id: str, local_block_ids: Any, registration_data: dict[str, Any]
    ) -> None:
        engine = registration_data["decode_engine_id"]
        self.take_up(request_id, engine)
        self.record(
            events.PUSH_MATCHED,
            self.text(request_id),
            self.text(engine),
            self.text(registration_data["request_id"]),
        )

    def after_do_start_push_kv(
        self, worker: Any, memo: None, result: Any,
        request_id: str, local_block_ids: Any, registration_data: dict[str, Any],
    ) -> None:  # fmt: skip
        self.put_down()

    def after_xfer_blocks_for_req(self, worker: Any, result: Any, req_id: str, meta: Any) -> None:
        # Only now are the handles where the main thread's polling passes find them.
        now_ns = monotonic_ns()
        for transfer in self.current.posted:
            transfer.polled_from_ns = now_ns

    def after_pop_done_transfers(self, worker: Any, memo: None, result: Any, transfers: Any) -> None:
        if not result or transfers is not worker._sending_transfers:
            return
        done, failed = result if isinstance(result, tuple) else (result, ())
        for request in done:
            broken = request in failed or request in self.failed_requests
            self.record(events.SEND_DONE, self.text(request), int(broken))
            # vLLM lets go of the blocks now unless the lease ran out in this very pass.
            held = request in worker._reqs_to_send or request in worker._reqs_to_process
            if held and not broken:
                self._released(request)


def _add(remembered: set[str], request: str) -> None:
    if len(remembered) >= MAX_REMEMBERED:
        remembered.clear()
    remembered.add(request)


def _count(block_ids: Any) -> int:
    """KV blocks in vLLM's per-group lists; registrations may carry one flat list."""
    return sum(len(group) if isinstance(group, (list, tuple)) else 1 for group in block_ids)
