"""The event vocabulary: the only definition of what is recorded inside an engine process.

An event is one timestamped fact: a code, the time (CLOCK_MONOTONIC ns), the key of the request it
speaks of (`text_key` of vLLM's internal request id; 0 for none) and up to `MAX_FIELDS` signed 64-bit
integers. Texts (ids, reasons) are carried by key: a `text` record with the characters goes before the
first event that uses it. Ids and sizes only; never prompt or output text.

Field conventions: `*_ns` are nanoseconds, on CLOCK_MONOTONIC where they name a moment; `UNKNOWN` (-1)
stands for a count that this vLLM version does not tell; a text field is 0 where there is none.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

VERSION = 1
"""Of this vocabulary. A reader refuses rings of a newer one; codes are never reused."""

MAX_FIELDS = 11
MAX_TEXT_BYTES = 1024
"""Longer texts are cut. Routers make request ids of more than 100 bytes."""

UNKNOWN = -1

SCHEDULER = "scheduler"
WORKER = "worker"
EITHER = "either"


class EventType(NamedTuple):
    """What one code means."""

    code: int
    name: str
    source: str
    """The connector role that records it: `scheduler` (EngineCore), `worker` (a ring per rank), `either`."""
    doc: str
    fields: dict[str, str]
    """Field name to its meaning, in the order they are recorded."""


VOCABULARY: dict[int, EventType] = {}


def _event(code: int, name: str, source: str, doc: str, **fields: str) -> int:
    if code in VOCABULARY or len(fields) > MAX_FIELDS:
        raise ValueError(f"event {name}: code {code} is taken or it has more than {MAX_FIELDS} fields")
    VOCABULARY[code] = EventType(code, name, source, doc, fields)
    return code


def text_key(text: str) -> int:
    """The 63-bit key that stands for `text` in event fields: the same in every process, never 0."""
    digest = blake2b(text.encode("utf-8", "replace")[:MAX_TEXT_BYTES], digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 1) or 1


TEXT = 1
"""Not an event: a slot (or several) with the characters of a text. The slot layout is in ring.py."""

# --- a request in the scheduler ------------------------------------------------------------------

# Bits of request.arrived `flags`.
FLAG_REMOTE_DECODE = 1  # do_remote_decode: the P leg
FLAG_REMOTE_PREFILL = 2  # do_remote_prefill: the D leg
FLAG_CLEANUP = 4  # abort_immediately: vLLM's own clean-up request, counted, never shown
FLAG_REUSE_OFFERED = 8  # P leg with blocks kept on D by an earlier turn
FLAG_REUSE_INCOMPLETE = 16  # such blocks, but the router dropped a field that a pull needs

REQUEST_ARRIVED = _event(
    10,
    "request.arrived",
    SCHEDULER,
    "The scheduler has the request (connector `on_new_request`).",
    arrival_ns="when the API server stamped the request: its wall clock, put on CLOCK_MONOTONIC by the hook",
    flags="bits: 1 P leg, 2 D leg, 4 clean-up, 8 earlier KV offered, 16 offered with fields missing",
    prompt_tokens="tokens in the prompt",
    remote_engine="text: the peer's engine id, from kv_transfer_params",
    remote_request="text: the peer's internal request id, from kv_transfer_params",
    remote_tokens="tokens whose KV the peer offers",
    transfer_id="text: transfer_id from kv_transfer_params, where the router sets one",
    session="text: the session id the client set",
    trace="text: the W3C traceparent, where vLLM passes it on",
    max_tokens="the most tokens the request may generate",
)
REQUEST_CONSIDERED = _event(
    11,
    "request.considered",
    SCHEDULER,
    "The request reached the head of the waiting queue: the first `get_num_new_matched_tokens`.",
    local_tokens="prompt tokens found in the local prefix cache",
    remote_tokens="tokens to be loaded from the peer",
    load_async="1 when they are loaded between steps",
)
BLOCKS_ALLOCATED = _event(
    12,
    "blocks.allocated",
    SCHEDULER,
    "Destination blocks allocated; the load may start (`update_state_after_alloc`, remote tokens > 0).",
    blocks="KV blocks held by the request",
    remote_tokens="tokens to be loaded",
    attempts="scheduler passes that considered the request, this one included",
)
REQUEST_SCHEDULED = _event(
    13,
    "request.scheduled",
    SCHEDULER,
    "The request is in a batch (`update_state_after_alloc`, remote tokens 0): on P the prefill starts; "
    "on D the first decode step; again after each preemption.",
    blocks="KV blocks held by the request",
    computed_tokens="tokens that need no computing (prefix cache or loaded)",
    attempts="scheduler passes that considered the request, this one included",
    preemptions="preemptions so far",
    deferred_ns="when the first scheduler pass since the load was reported left it out; 0 if none did",
)
PREFILL_CHUNK = _event(
    14,
    "prefill.chunk",
    SCHEDULER,
    "Prompt tokens of the request were put into a step.",
    tokens="tokens of this request in the step",
    step_tokens="tokens of all requests in the step",
    step="the scheduler's step counter, from this process's start",
)
REQUEST_PREEMPTED = _event(
    15,
    "request.preempted",
    SCHEDULER,
    "The scheduler took the request's blocks back.",
)
PROMOTION_DEFERRED = _event(
    16,
    "promotion.deferred",
    SCHEDULER,
    "The first scheduler pass since the load was reported did not schedule the request: no capacity.",
)
FIRST_TOKEN = _event(
    17,
    "request.first_token",
    SCHEDULER,
    "The first output token is in the scheduler's hands.",
    output_tokens="output tokens at that moment (more than 1 with speculative decoding)",
)
REQUEST_FINISHED = _event(
    18,
    "request.finished",
    SCHEDULER,
    "`request_finished`: on P the end of prefill.",
    status="text: vLLM's RequestStatus name",
    prompt_tokens="tokens in the prompt",
    output_tokens="tokens generated",
    computed_tokens="tokens with KV at the end",
    cached_tokens="prompt tokens taken from the local prefix cache",
    remote_tokens="prompt tokens whose KV came from the peer",
    preemptions="preemptions in all",
    lease="1 when the blocks stay for the peer after the end",
    blocks="KV blocks held at the end",
)
LOAD_REPORTED = _event(
    19,
    "load.reported",
    SCHEDULER,
    "Every rank reported the load done: the scheduler knows.",
    failed="1 when a rank reported it failed",
)
SEND_REPORTED = _event(
    20,
    "send.reported",
    SCHEDULER,
    "Every rank reported the send over: the kept blocks are freed.",
)

# --- a request in a worker -----------------------------------------------------------------------

LOAD_STARTED = _event(
    30,
    "load.started",
    WORKER,
    "The worker took up the load: pull, `_read_blocks_for_req` (again after a handshake); push, D's "
    "`_send_registration_to_p`.",
    remote_engine="text: the peer's engine id",
    remote_request="text: the peer's internal request id",
    blocks="local blocks to be filled",
)
HANDSHAKE_WAITED = _event(
    31,
    "handshake.waited",
    WORKER,
    "The request has to wait for a handshake with the peer.",
    remote_engine="text: the peer's engine id",
)
HANDSHAKE_STARTED = _event(
    32,
    "handshake.started",
    WORKER,
    "The handshake thread began (one at a time per worker). No request.",
    remote_engine="text: the peer's engine id",
)
HANDSHAKE_FINISHED = _event(
    33,
    "handshake.finished",
    WORKER,
    "The handshake ended. No request.",
    remote_engine="text: the peer's engine id",
    started_ns="when it began",
    ok="1 when the peer is connected",
    has_offset="1 when vLLM returned a clock offset (0.26 and later)",
    clock_offset_ns="the peer's EngineCore clock minus ours",
)
REGISTRATION_SENT = _event(
    34,
    "registration.sent",
    WORKER,
    "Push, D: the registration of the destination left for P.",
    remote_engine="text: P's engine id",
)
REGISTRATION_RECEIVED = _event(
    35,
    "registration.received",
    WORKER,
    "Push, P: the writer thread holds D's registration. The event's request is D's id.",
    remote_engine="text: D's engine id",
)
PUSH_MATCHED = _event(
    36,
    "push.matched",
    WORKER,
    "Push, P: finished blocks and a registration met (`_do_start_push_kv`; again after a handshake).",
    remote_engine="text: D's engine id",
    remote_request="text: D's internal request id",
)
TRANSFER_POSTED = _event(
    37,
    "transfer.posted",
    WORKER,
    "The transfer is with the NIXL backend.",
    transfer="number of the transfer in this process",
    write="1 WRITE (push), 0 READ (pull)",
    begin_ns="when the post call began",
    done="1 when it was complete on return",
    remote_engine="text: the peer's engine id",
)
TRANSFER_DONE = _event(
    38,
    "transfer.done",
    WORKER,
    "A poll saw the transfer complete.",
    transfer="number of the transfer in this process",
    last_poll_ns="the last poll that saw it running; the end of the post call if none did",
    poll_ns="when the poll that saw it complete began",
    start_ns="NIXL telemetry: start time",
    post_us="NIXL telemetry: post duration",
    xfer_us="NIXL telemetry: transfer duration; ends at the poll, not on the wire",
    bytes="bytes moved",
    descriptors="descriptors, after the backend merged them",
)
LOAD_DONE = _event(
    39,
    "load.done",
    WORKER,
    "This rank has all the KV it waited for.",
    failed="1 when it gave up",
)
SEND_DONE = _event(
    40,
    "send.done",
    WORKER,
    "Push, P: every WRITE of the request is complete on this rank.",
    failed="1 when one failed",
)
NOTIFICATION_RECEIVED = _event(
    41,
    "notification.received",
    WORKER,
    "A NIXL notification about the request arrived: on P (pull) a reader is done; on D (push) P's WRITE is.",
    count="the number in the notification: how many such the sender thinks there are",
)
NOTIFICATION_SENT = _event(
    42,
    "notification.sent",
    WORKER,
    "A notification without a transfer was sent: the reader had all blocks, or gave up.",
)
READ_EXPIRED = _event(
    43,
    "read.expired",
    WORKER,
    "Bidirectional, P: the blocks kept on D had expired; nothing was read.",
)

# --- leases --------------------------------------------------------------------------------------

LEASE_ARMED = _event(
    50,
    "lease.armed",
    WORKER,
    "The worker keeps the request's blocks for the peer until the deadline.",
    deadline_ns="when it will drop them",
)
LEASE_RENEWED = _event(
    51,
    "lease.renewed",
    WORKER,
    "A heartbeat moved the deadline (recorded when it moved).",
    deadline_ns="the new deadline",
)
LEASE_UNMATCHED = _event(
    52,
    "lease.unmatched",
    WORKER,
    "A heartbeat named a request that holds no lease here. Recorded once per request.",
)
LEASE_RELEASED = _event(
    53,
    "lease.released",
    WORKER,
    "The peer is done (notified, or the push completed): the lease ended.",
)
LEASE_EXPIRED = _event(
    54,
    "lease.expired",
    WORKER,
    "The deadline passed: the blocks go back although the peer may want them.",
    consumers="peers that had read by then",
)
NOTIFICATION_LATE = _event(
    55,
    "notification.late",
    WORKER,
    "A peer's completion came for a request that no longer holds blocks: it may have read reused blocks.",
)

# --- faults and the engine ------------------------------------------------------------------------

FAILURE = _event(
    60,
    "failure",
    WORKER,
    "vLLM logged a NIXL failure.",
    type="text: vLLM's own failure type, such as transfer_failed or handshake_failed",
    remote_engine="text: the peer's engine id, where vLLM names it",
)
HOOK_FAILED = _event(
    61,
    "hook.failed",
    EITHER,
    "A kvscope hook raised; vLLM went on. The hook stops after a few of these.",
    hook="text: the hook's name",
    error="text: the exception",
    disabled="1 when the hook is off from now on",
)
ENGINE_SAMPLE = _event(
    62,
    "engine.sample",
    EITHER,
    "Once a second while the engine steps.",
    steps="scheduler steps since the last sample",
    step_tokens="tokens scheduled since the last sample; unknown to a worker",
    hook_ns="time in this process's kvscope hooks that had something to do, since the last sample",
    interval_ns="time since the last sample",
)
ENGINE_STOPPED = _event(
    63,
    "engine.stopped",
    EITHER,
    "The connector was shut down in an orderly way.",
)
