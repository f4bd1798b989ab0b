"""Why a first token was slow, in a sentence: what each step's time is, and what would shorten it.

The only definition of such advice; `kvscope explain` and the screens both say it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvscope import steps
from kvscope.text import printable, span

Row = Mapping[str, Any]


class Advice(NamedTuple):
    """Of one step; `{mover}` stands for the engine that posts the transfer: P in push, else D."""

    why: str
    """What the time was spent on."""
    help: str
    """What would shorten it."""


_FRONTEND = "more cores or API server processes there, or shorter prompts to tokenize, would help"
_SHORTER_STEPS = "shorter engine steps there (smaller batches, chunked prefill) would help"
_POST = Advice(
    "handing the transfer's descriptors to NIXL, on the engine's own thread",
    "fewer and larger descriptors (a larger block size) would help",
)
_WIRE = Advice(
    "moving the bytes",
    "a faster link or transport, or fewer bytes (a shorter prompt, prefix hits on D), would help; "
    "compare the pair's GB/s with its peers",
)
_HANDSHAKE = Advice(
    "waiting for a NIXL handshake, its own or one of another engine that came first",
    "a request through each pair before traffic arrives would take that from users",
)

ADVICE: dict[str, Advice] = {
    "prefill.frontend": Advice("P's API server had it before P's scheduler did", _FRONTEND),
    "prefill.queue": Advice(
        "it stood behind other requests on P", "more prefill capacity or a less loaded P would help"
    ),
    "prefill.blocks": Advice(
        "P had no free KV blocks for it",
        "more KV memory on P, or leases that end sooner (Engines shows what holds the blocks), would help",
    ),
    "prefill.reuse_dispatch": Advice(
        "P had the blocks, but reading back from D is posted at an engine step of P only", _SHORTER_STEPS
    ),
    "prefill.reuse_handshake": _HANDSHAKE,
    "prefill.reuse_post": _POST,
    "prefill.reuse_wire": Advice(
        "moving D's KV back to P",
        "a faster link, or a higher threshold for reading back where computing is quicker, would help",
    ),
    "prefill.reuse_detect": Advice(
        "the KV was back on P, but P looks for completions once per engine step", _SHORTER_STEPS
    ),
    "prefill.reuse_report": Advice(
        "P's worker knew, but its scheduler learns it at the end of a step, from the slowest rank",
        _SHORTER_STEPS,
    ),
    "prefill.reuse_promote": Advice(
        "P's scheduler knew, but takes it up at its next pass only", _SHORTER_STEPS
    ),
    "prefill.reuse_admit": Advice(
        "its KV was back, but P's batch had no room", "more prefill capacity would help"
    ),
    "prefill.compute": Advice(
        "computing the prompt",
        "faster or more prefill, or more prefix hits, would help; another hand-off would not",
    ),
    "registration.route": Advice(
        "the hand-over to D through router, HTTP and D's frontend",
        "a router that sends both legs at once (push), or fewer hops, would help",
    ),
    "registration.admit": Advice(
        "it stood behind other requests on D", "more decode capacity or a less loaded D would help"
    ),
    "registration.blocks": Advice(
        "D had no free KV blocks for it",
        "more decode capacity would help; Engines shows what holds D's blocks",
    ),
    "registration.handshake": _HANDSHAKE,
    "registration.notify": Advice(
        "D had blocks, but P's writer did not hold D's registration yet",
        "a router that sends the request to D sooner, or shorter engine steps on D, would help",
    ),
    "transfer.dispatch": Advice(
        "both sides were ready, but {mover} posts transfers at its engine steps or when its writer wakes",
        "shorter engine steps on {mover}, or a CPU that its writer need not share, would help",
    ),
    "transfer.post": _POST,
    "transfer.wire": _WIRE,
    "readiness.detect": Advice(
        "the KV was there, but {mover} looks for completions once per engine step",
        "shorter engine steps on {mover} (smaller batches, chunked prefill) would help, a faster link "
        "would not",
    ),
    "readiness.signal": Advice(
        "P knew that its WRITE was done, but D's worker takes in notifications once per engine step",
        "shorter engine steps on D would help",
    ),
    "readiness.report": Advice(
        "D's worker knew, but its scheduler learns it at the end of a step, from the slowest rank",
        "shorter engine steps on D would help",
    ),
    "readiness.promote": Advice(
        "D's scheduler knew, but takes it up at its next pass only", "shorter engine steps on D would help"
    ),
    "readiness.admit": Advice(
        "its KV was there, but D's batch had no room for it",
        "more decode capacity (max_num_seqs, KV blocks, another D) would help",
    ),
    "decode.first_step": Advice(
        "D computed the step that gives the first token",
        "smaller batches on D, or less recomputing there, would help",
    ),
    "decode.generate": Advice("generating, after the first token", "that is TPOT, no part of TTFT"),
    "unknown": Advice(
        "a boundary of it was not observed",
        "missing hooks, lost events or an engine without kvscope hide it; the notes say which",
    ),
}

NEAR = 0.1
"""Waits that differ by less than this part of TTFT are about as much: another request may have it the other
way round."""
OVERDUE_NS = 10 * 10**9
"""So long in a step that waits for the peer is no longer a matter of speed."""
_PEER = (steps.COORDINATION, steps.TRANSFER)
_OVERDUE = "for so long it usually means that the other side is gone, hangs or was never told"

WAITS = {
    "compute wait": (steps.COMPUTE, steps.CAPACITY),
    "transfer": (steps.TRANSFER,),
    "coordination wait": (steps.COORDINATION,),
    "unknown": (steps.UNKNOWN,),
}
"""What a TTFT is made of, in words, by class."""


def of_step(name: str, connector: str | None) -> Advice:
    """What a step's time is and what would shorten it; empty for a step that is not known."""
    found = ADVICE.get(name, Advice("", ""))
    return Advice(*(text.format(mover="P" if connector == "push" else "D") for text in found))


def verdict(request: Row, as_of_ns: int | None = None) -> str:
    """Why this request was slow, or what it waits for, in a sentence or two; empty where that is not known.

    Args:
        request: a row of `requests`.
        as_of_ns: Unix time of the answer, for a request in flight.
    """
    spent = {step: request.get(step.column) or 0 for step in steps.STEPS if step.in_ttft}
    total = sum(spent.values())
    if untold(request):
        return ""
    if request.get("ttft_ns") is None:
        return _unfinished(request, total, as_of_ns)
    if not total:
        return ""
    waits = {
        name: sum(ns for step, ns in spent.items() if step.class_ in classes)
        for name, classes in WAITS.items()
    }
    most = max(waits, key=lambda name: waits[name])
    main = max((step for step in spent if step.class_ in WAITS[most]), key=lambda step: spent[step])
    advice = of_step(main.name, request.get("connector"))
    longest = max(spent, key=lambda step: spent[step])
    second = max((name for name in waits if name != most), key=lambda name: waits[name])
    if waits[most] - waits[second] < NEAR * total:
        what = (
            f"About as much {most} as {second}, {100 * waits[most] / total:.0f} and "
            f"{100 * waits[second] / total:.0f} % of {span(total)}; of the {most} the largest part"
        )
    else:
        what = f"Mostly {most}, {100 * waits[most] / total:.0f} % of {span(total)}; the largest part"
    said = [f"{what} in {main.name}, {span(spent[main])}: {advice.why}; {advice.help}."]
    if longest is not main:
        said.append(f"Its longest step is {longest.name}, {span(spent[longest])}.")
    lead = request.get("lead_ns")
    if request.get("connector") == "push" and lead is not None and lead < 0:
        said.append(f"D's registration came {span(-lead)} after prefill had finished.")
    if request.get("recomputed_tokens"):
        said.append(f"D recomputed {request['recomputed_tokens']} prompt tokens.")
    if request.get("read_after_expiry"):
        said.append("Its KV was read after P had given it back: the answer may be wrong.")
    return " ".join(said)


def untold(request: Row) -> bool:
    """Whether it had a first token that its source does not tell of: vLLM's logs don't; an event was lost."""
    return request.get("ttft_ns") is None and request.get("outcome") == "finished"


def _unfinished(request: Row, known_ns: int, as_of_ns: int | None) -> str:
    step = str(request.get("current_step") or "")
    advice = of_step(step, request.get("connector"))
    where = f"in {printable(step)}" if step else "in a step not known"
    arrived = request.get("arrived_at_ns")
    if request.get("in_flight") and as_of_ns is not None and arrived is not None:
        age = max(0, as_of_ns - arrived)
        in_step = max(0, age - known_ns)
        waits_for_peer = step in steps.BY_NAME and steps.BY_NAME[step].class_ in _PEER
        help_ = _OVERDUE if waits_for_peer and in_step > OVERDUE_NS else advice.help
        why = f": {advice.why}; {help_}" if advice.why else ""
        return f"No first token after {span(age)}; {where} for {span(in_step)}{why}."
    why = f" ({advice.why})" if advice.why else ""
    return f"No first token ({printable(request.get('outcome')) or 'not finished'}); last seen {where}{why}."
