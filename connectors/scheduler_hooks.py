"""What is recorded in EngineCore: a request's way through the scheduler.

Requests are remembered from arrival to finish only. The sets that are looked at in every step hold the
few requests something is awaited of, never all of them.
"""

from __future__ import annotations

from time import monotonic_ns, time_ns
from typing import Any

from kvscope import events
from kvscope.connectors.guard import Observer, timed
from kvscope.events import UNKNOWN
from kvscope.ring import RingWriter

SAMPLE_NS = 1_000_000_000
PULL_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
"""Of kv_transfer_params: vLLM reads no KV back from D when one is missing."""


class Leg:
    """What is remembered of a live request; never the request itself."""

    __slots__ = ("attempts", "considered", "deferred_ns", "flags", "local_tokens", "remote_tokens")

    def __init__(self, flags: int) -> None:
        self.flags = flags
        self.considered = False
        self.deferred_ns = 0
        self.attempts = 0
        self.local_tokens = 0
        self.remote_tokens = 0


class SchedulerHooks(Observer):
    """Hooks of the connector (facade) in EngineCore. All run on its main thread."""

    def __init__(self, writer: RingWriter) -> None:
        super().__init__(writer)
        self.legs: dict[str, Leg] = {}
        self.prefilling: dict[str, Any] = {}
        """Requests (vLLM's objects) with prompt tokens left to compute."""
        self.awaiting_token: dict[str, Any] = {}
        """Scheduled requests (vLLM's objects) without an output token yet."""
        self.loading: set[str] = set()
        self.loaded: set[str] = set()
        """Load reported; no scheduler pass since."""
        self.sending: set[str] = set()
        self.steps = 0
        self._sampled_ns = monotonic_ns()
        self._sampled_steps = 0
        self._sampled_tokens = 0

    def switched_off(self, name: str) -> None:
        # Requests are let go of when they finish: without that hook none may be remembered.
        if name.startswith("after_request_finished"):
            self.before_on_new_request = None  # type: ignore[assignment, method-assign]
            for kept in (self.legs, self.prefilling, self.awaiting_token):
                kept.clear()
            for ids in (self.loading, self.loaded, self.sending):
                ids.clear()

    def before_on_new_request(self, connector: Any, request: Any) -> None:
        now_ns, wall_ns = monotonic_ns(), time_ns()
        # vLLM changes these parameters later on.
        params = request.kv_transfer_params or {}
        given = params.get
        flags = leg_flags(params)
        if getattr(request, "abort_immediately", False):
            flags |= events.FLAG_CLEANUP
        text = self.text
        engine, peer, transfer = given("remote_engine_id"), given("remote_request_id"), given("transfer_id")
        session = getattr(request, "session_id", None)
        trace = getattr(request, "trace_headers", None)
        remote_tokens = given("remote_num_tokens")
        request_id = request.request_id
        self.legs[request_id] = Leg(flags)
        # Most requests have few of the ids: what is not there costs no call.
        self.record(
            events.REQUEST_ARRIVED,
            text(request_id),
            now_ns - (wall_ns - int(request.arrival_time * 1e9)),
            flags,
            request.num_prompt_tokens,
            text(_id(engine)) if engine is not None else 0,
            text(_id(peer)) if peer is not None else 0,
            _number(remote_tokens),
            text(_id(transfer)) if transfer is not None else 0,
            text(_id(session)) if session is not None else 0,
            text(_id(trace.get("traceparent"))) if trace else 0,
            UNKNOWN if request.max_tokens is None else request.max_tokens,
        )

    def after_get_num_new_matched_tokens(
        self, connector: Any, result: Any, request: Any, num_computed_tokens: int
    ) -> None:
        leg = self.legs.get(request.request_id)
        if leg is None:
            return
        leg.attempts += 1
        leg.local_tokens = num_computed_tokens
        if not leg.considered:
            leg.considered = True
            remote_tokens, load_async = result
            self.record(
                events.REQUEST_CONSIDERED,
                self.text(request.request_id),
                num_computed_tokens,
                UNKNOWN if remote_tokens is None else remote_tokens,
                int(load_async),
            )

    def before_update_state_after_alloc(
        self, connector: Any, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        request_id = request.request_id
        leg = self.legs.get(request_id)
        if leg is None:
            return
        # Under MultiConnector a child that was not chosen is shown no blocks.
        held = sum(map(len, blocks.blocks)) or UNKNOWN
        attempts, leg.attempts = leg.attempts, 0
        if num_external_tokens > 0:
            leg.remote_tokens = num_external_tokens
            self.loading.add(request_id)
            self.record(events.BLOCKS_ALLOCATED, self.text(request_id), held, num_external_tokens, attempts)
            return
        self.loaded.discard(request_id)
        # The request's own count is set later in this pass, unless it was loaded or preempted half way.
        computed = request.num_computed_tokens or leg.local_tokens
        self.record(
            events.REQUEST_SCHEDULED,
            self.text(request_id),
            held,
            computed,
            attempts or UNKNOWN,  # after a load vLLM does not ask the connector again
            request.num_preemptions,
            leg.deferred_ns,
        )
        leg.deferred_ns = 0
        if not request.num_output_tokens:
            self.awaiting_token[request_id] = request
        # A D leg computes the last prompt token in its first decode step: that is no prefill.
        if request.num_prompt_tokens - computed > 1 or not leg.flags & events.FLAG_REMOTE_PREFILL:
            self.prefilling[request_id] = request

    def before_build_connector_meta(self, connector: Any, scheduler_output: Any) -> None:
        self.steps += 1
        self._sampled_steps += 1
        step_tokens = scheduler_output.total_num_scheduled_tokens
        self._sampled_tokens += step_tokens
        preempted = scheduler_output.preempted_req_ids
        if self.prefilling or self.loaded or preempted:
            self._step(scheduler_output.num_scheduled_tokens, step_tokens, preempted)
        now_ns = monotonic_ns()
        if now_ns - self._sampled_ns >= SAMPLE_NS:
            self._sample(now_ns)

    @timed
    def _step(self, scheduled: dict[str, int], step_tokens: int, preempted: Any) -> None:
        for request_id in self.loaded:
            self.record(events.PROMOTION_DEFERRED, self.text(request_id))
            self.legs[request_id].deferred_ns = monotonic_ns()
        self.loaded.clear()
        for request_id in preempted or ():
            if request_id in self.legs:
                self.prefilling.pop(request_id, None)
                self.record(events.REQUEST_PREEMPTED, self.text(request_id))
        done = []
        for request_id, request in self.prefilling.items():
            tokens = scheduled.get(request_id)
            if tokens:
                self.record(events.PREFILL_CHUNK, self.text(request_id), tokens, step_tokens, self.steps)
                # vLLM adds the step's tokens to the request's count after this hook.
                if request.num_computed_tokens + tokens >= request.num_prompt_tokens:
                    done.append(request_id)
        for request_id in done:
            del self.prefilling[request_id]

    def _sample(self, now_ns: int) -> None:
        interval_ns = now_ns - self._sampled_ns
        self.record(
            events.ENGINE_SAMPLE, 0, self._sampled_steps, self._sampled_tokens, self.hook_ns, interval_ns
        )
        self._sampled_ns = now_ns
        self._sampled_steps = self._sampled_tokens = self.hook_ns = 0

    def before_update_connector_output(self, connector: Any, connector_output: Any) -> None:
        if connector_output.finished_recving or connector_output.finished_sending:
            self._reported(connector_output)

    @timed
    def _reported(self, connector_output: Any) -> None:
        # Before 0.30 a failed load is told by its block ids alone.
        failed = getattr(connector_output, "failed_recving", None)
        for request_id in connector_output.finished_recving or ():
            if request_id not in self.loading:
                continue  # another connector's, under MultiConnector
            self.loading.discard(request_id)
            if failed is None:
                outcome = UNKNOWN if connector_output.invalid_block_ids else 0
            else:
                outcome = int(request_id in failed)
            self.record(events.LOAD_REPORTED, self.text(request_id), outcome)
            leg = self.legs.get(request_id)
            if leg is not None:  # else it was aborted while it loaded
                self.loaded.add(request_id)
                if outcome == 1:
                    leg.remote_tokens = 0
        for request_id in connector_output.finished_sending or ():
            if request_id in self.sending:
                self.sending.discard(request_id)
                self.record(events.SEND_REPORTED, self.text(request_id))

    def before_take_events(self, connector: Any) -> None:
        # vLLM calls this once per step, after the step's tokens were appended to their requests.
        if self.awaiting_token:
            self._find_first_tokens()

    @timed
    def _find_first_tokens(self) -> None:
        for request_id, request in list(self.awaiting_token.items()):
            tokens = request.num_output_tokens
            if tokens:
                del self.awaiting_token[request_id]
                self.record(events.FIRST_TOKEN, self.text(request_id), tokens)

    def after_request_finished(self, connector: Any, result: Any, request: Any, block_ids: Any) -> None:
        request_id = request.request_id
        leg = self.legs.pop(request_id, None)
        waiting = self.awaiting_token.pop(request_id, None)
        self.prefilling.pop(request_id, None)
        self.loaded.discard(request_id)
        if leg is None:
            return
        key = self.text(request_id)
        lease = bool(result[0])
        if lease:
            self.sending.add(request_id)
        output_tokens = request.num_output_tokens
        if waiting is not None and output_tokens:
            self.record(events.FIRST_TOKEN, key, output_tokens)
        blocks = len(block_ids) if isinstance(block_ids, list) else sum(map(len, block_ids))
        self.record(
            events.REQUEST_FINISHED,
            key,
            self.text(request.status.name),
            request.num_prompt_tokens,
            output_tokens,
            request.num_computed_tokens,
            leg.local_tokens,
            0 if request_id in self.loading else leg.remote_tokens,
            request.num_preemptions,
            int(lease),
            blocks,
        )

    after_request_finished_all_groups = after_request_finished

    def before_shutdown(self, connector: Any) -> None:
        self.record(events.ENGINE_STOPPED, 0)


def leg_flags(params: dict[str, Any]) -> int:
    """The bits of request.arrived that kv_transfer_params tell."""
    flags = 0
    if params.get("do_remote_decode"):
        flags |= events.FLAG_REMOTE_DECODE
        blocks = params.get("remote_block_ids")
        if blocks or params.get("remote_request_id"):
            flags |= events.FLAG_REUSE_OFFERED
            if not blocks or any(params.get(field) is None for field in PULL_FIELDS):
                flags |= events.FLAG_REUSE_INCOMPLETE
    if params.get("do_remote_prefill"):
        flags |= events.FLAG_REMOTE_PREFILL
    return flags


def _number(value: Any) -> int:
    """A count from outside; what is none must not make the hook fail."""
    return value if type(value) is int and 0 <= value < 1 << 63 else UNKNOWN


def _id(value: Any) -> str:
    """An id from outside as text; other things than ids are not recorded."""
    return str(value) if isinstance(value, (str, int)) else ""
