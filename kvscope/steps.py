"""Stages, steps and classes: the only definition of their names (design: one class per step)."""

from __future__ import annotations

from typing import NamedTuple

COMPUTE = "compute"
CAPACITY = "capacity"
TRANSFER = "transfer"
COORDINATION = "coordination"
UNKNOWN = "unknown"
CLASSES = (COMPUTE, CAPACITY, TRANSFER, COORDINATION, UNKNOWN)
"""Compute wait is compute + capacity, coordination wait is coordination; transfer stands beside them."""

LETTER = {COMPUTE: "C", CAPACITY: "B", TRANSFER: "T", COORDINATION: "W", UNKNOWN: "?"}
"""A class's letter where there is room for one character: compute, blocked, transfer, (coordination) wait."""

STAGES = ("prefill", "registration", "transfer", "readiness", "decode")


class Step(NamedTuple):
    """A named interval of a request's life."""

    code: int
    """Position in `STEPS`; what the store keeps."""
    name: str
    class_: str
    doc: str
    in_ttft: bool = True

    @property
    def stage(self) -> str:
        return self.name.partition(".")[0]

    @property
    def column(self) -> str:
        """Name of its column in the store: nanoseconds on the critical path."""
        return self.name.replace(".", "_") + "_ns"


_DEFINITIONS = (
    ("prefill.frontend", COORDINATION, "arrival in P's API server → P's scheduler has the request"),
    (
        "prefill.queue",
        CAPACITY,
        "P's scheduler has it → head of the queue: behind other requests; "
        "after a preemption, until scheduled again",
    ),
    (
        "prefill.blocks",
        CAPACITY,
        "head of P's queue → scheduled (or reuse blocks allocated): no free KV blocks",
    ),
    (
        "prefill.reuse_dispatch",
        COORDINATION,
        "P's blocks for the reused KV allocated → worker posts the READ from D",
    ),
    ("prefill.reuse_handshake", COORDINATION, "felt wait for the handshake with D before the READ"),
    ("prefill.reuse_post", TRANSFER, "submitting the READ's descriptors"),
    ("prefill.reuse_wire", TRANSFER, "READ posted → done"),
    ("prefill.reuse_detect", COORDINATION, "earliest possible done → P's poll saw it"),
    ("prefill.reuse_report", COORDINATION, "P's worker saw it → P's scheduler knows"),
    ("prefill.reuse_promote", COORDINATION, "P's scheduler knows → its next pass"),
    ("prefill.reuse_admit", CAPACITY, "that pass did not schedule the request → prefill starts"),
    (
        "prefill.compute",
        COMPUTE,
        "first scheduled → prefill finished on P (or first token, where no P took part)",
    ),
    (
        "registration.route",
        COORDINATION,
        "hand-over through router, HTTP and D's frontend → D's scheduler has it",
    ),
    ("registration.admit", CAPACITY, "D's scheduler has it → head of the queue: behind other requests"),
    ("registration.blocks", CAPACITY, "head of D's queue → destination blocks allocated: no free KV blocks"),
    ("registration.handshake", COORDINATION, "felt wait for a NIXL handshake, incl. behind another engine's"),
    ("registration.notify", COORDINATION, "push: blocks allocated → P's writer holds the registration"),
    (
        "transfer.dispatch",
        COORDINATION,
        "both sides ready → worker posts the READ/WRITE (step boundary, wake-up)",
    ),
    ("transfer.post", TRANSFER, "submitting descriptors to the backend"),
    ("transfer.wire", TRANSFER, "posted → done, as far as polls and this pair's best rate tell"),
    ("readiness.detect", COORDINATION, "earliest possible done → the initiator's poll saw it"),
    ("readiness.signal", COORDINATION, "push: P saw done → D's worker holds the completion notification"),
    ("readiness.report", COORDINATION, "worker saw it → scheduler knows, incl. the slowest rank"),
    ("readiness.promote", COORDINATION, "scheduler knows → its next pass"),
    ("readiness.admit", CAPACITY, "that pass did not schedule the request → first decode step scheduled"),
    ("decode.first_step", COMPUTE, "first decode step scheduled → first token"),
    ("decode.generate", COMPUTE, "first token → finished; outside TTFT, inside TPOT"),
    ("unknown", UNKNOWN, "between two boundaries of which one was not observed, or not observable"),
)

STEPS: tuple[Step, ...] = tuple(
    Step(code, name, class_, doc, name != "decode.generate")
    for code, (name, class_, doc) in enumerate(_DEFINITIONS)
)
BY_NAME: dict[str, Step] = {step.name: step for step in STEPS}

# How a boundary or an interval was observed; what the store keeps is the position.
HOOK = "hook"
POLL = "poll"
TELEMETRY = "telemetry"
ESTIMATED = "estimated"
NOT_OBSERVED = "not observed"
OBSERVED = (HOOK, POLL, TELEMETRY, ESTIMATED, NOT_OBSERVED)


def find(step: object) -> Step:
    """A step by code or name; `unknown` for one that this version does not have."""
    if isinstance(step, int):
        return STEPS[step] if 0 <= step < len(STEPS) else BY_NAME["unknown"]
    return BY_NAME.get(str(step), BY_NAME["unknown"])


def find_observed(observed: object) -> str:
    """A way of observation by code or name; `not observed` for one that this version does not have."""
    if isinstance(observed, int):
        return OBSERVED[observed] if 0 <= observed < len(OBSERVED) else NOT_OBSERVED
    return str(observed) if observed in OBSERVED else NOT_OBSERVED
