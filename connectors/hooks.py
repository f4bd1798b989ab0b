"""Every place where kvscope listens in vLLM: the only list of them, in no need of vLLM itself.

Feature detection in a running engine, the contract check of an unpacked one, and the tests all read it.
"""

from __future__ import annotations

from typing import NamedTuple

OLDEST, NEWEST = (0, 24), (0, 33)
"""vLLM versions (major, minor) whose hooks were compared; newer ones get the connector's hooks only."""

CONNECTOR, WORKER, WRAPPER = "connector", "worker", "nixl"
PULL, PUSH = "pull", "push"


class Hook(NamedTuple):
    """A method of vLLM's (or of its NIXL wrapper) that is overridden to listen."""

    owner: str
    """`connector`: the facade in EngineCore; `worker`: the NIXL worker; `nixl`: the worker's NIXL agent."""
    method: str
    args: tuple[str, ...] = ()
    """Leading arguments after `self` that we read; another name in this place is another method to us."""
    modes: tuple[str, ...] = (PULL, PUSH)
    each_step: bool = False
    """Called in every engine step, mostly with nothing to do: it accounts for the time of real work itself,
    as reading the clock would cost more than the hook."""
    required: bool = True
    """False where a supported version does without it."""
    instead_of: str = ""
    """The older name of this hook: not missed, and not used where this one is present."""

    @property
    def name(self) -> str:
        return f"{self.owner}.{self.method}"


HOOKS = (
    Hook(CONNECTOR, "on_new_request", ("request",)),
    Hook(CONNECTOR, "get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    Hook(CONNECTOR, "update_state_after_alloc", ("request", "blocks", "num_external_tokens")),
    Hook(CONNECTOR, "build_connector_meta", ("scheduler_output",), each_step=True),
    Hook(CONNECTOR, "update_connector_output", ("connector_output",), each_step=True),
    Hook(CONNECTOR, "take_events", each_step=True),
    Hook(CONNECTOR, "request_finished", ("request", "block_ids")),
    Hook(CONNECTOR, "request_finished_all_groups", ("request", "block_ids")),
    Hook(CONNECTOR, "shutdown"),
    Hook(WORKER, "start_load_kv", ("metadata",), each_step=True),
    Hook(WORKER, "get_transfer_results", each_step=True, required=False, instead_of="get_finished"),
    Hook(WORKER, "get_finished", each_step=True),
    Hook(WORKER, "_pop_done_transfers", ("transfers",), each_step=True),
    Hook(WORKER, "_ensure_handshake", ("engine_id",)),
    Hook(WORKER, "_nixl_handshake", ("host", "port", "remote_tp_size", "expected_engine_id")),
    Hook(WORKER, "_handle_heartbeat", ("payload",)),
    Hook(WORKER, "_handle_failed_transfer", ("req_id",)),
    Hook(WORKER, "_log_failure", ("failure_type", "req_id")),
    Hook(WORKER, "shutdown"),
    Hook(WORKER, "_read_blocks_for_req", ("req_id", "meta"), (PULL,)),
    Hook(WORKER, "_is_turn2_read_expired", ("meta",), (PULL,), required=False),
    Hook(WORKER, "_send_registration_to_p", ("req_id", "reg_data"), (PUSH,)),
    Hook(WORKER, "_do_send_reg_notif", ("req_id", "reg_data"), (PUSH,)),
    Hook(WORKER, "_handle_push_reg_notif", ("notif",), (PUSH,)),
    Hook(WORKER, "_do_start_push_kv", ("request_id", "local_block_ids", "registration_data"), (PUSH,)),
    Hook(WORKER, "_xfer_blocks_for_req", ("req_id", "meta"), (PUSH,)),
    Hook(WRAPPER, "transfer", ("handle",)),
    Hook(WRAPPER, "get_xfer_telemetry", ("handle",)),
    Hook(WRAPPER, "release_xfer_handle", ("handle",)),
    Hook(WRAPPER, "get_new_notifs", each_step=True),
    Hook(WRAPPER, "send_notif", ("remote_agent_name", "notif_msg")),
)

STATE = {
    "NixlBaseConnectorWorker": (
        "nixl_wrapper",
        "_reqs_to_send",
        "_reqs_to_process",
        "_recving_metadata",
        "_recving_transfers",
        "consumer_notification_counts_by_req",
    ),
    "NixlPushConnectorWorker": ("_sending_transfers",),
    "NixlConnectorMetadata": ("reqs_to_send",),
    "ReqMeta": ("local_block_ids", "remote"),
    "RemoteMeta": ("engine_id", "request_id"),
}
"""What the hooks read of vLLM's objects, by class."""


def hooks_of(owner: str, mode: str) -> list[Hook]:
    return [hook for hook in HOOKS if hook.owner == owner and mode in hook.modes]


def is_supported(version: str) -> bool:
    """Whether `version` of vLLM is among those whose hooks were compared."""
    major, _, rest = version.partition(".")
    minor = rest.partition(".")[0]
    return major.isdecimal() and minor.isdecimal() and OLDEST <= (int(major), int(minor)) <= NEWEST
