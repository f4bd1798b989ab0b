"""What the other connector would have made of a request, against simulated requests whose steps are known."""

from __future__ import annotations

import pytest

from kvscope import events as ev
from kvscope.attribution import CROSSINGS, Breakdown
from kvscope.demo.simulate import Simulation, Truth

from .test_attribution import breakdowns, simulate

SEEDS = range(40)
BEFORE_P = ("prefill.frontend", "prefill.queue", "prefill.blocks", "prefill.compute")


def one(mode: str, seed: int, d_shift_ns: int = 0) -> tuple[Simulation, Truth, Breakdown]:
    simulation, (truth,) = simulate(mode, seed, d_shift_ns)
    (breakdown,) = breakdowns(simulation).values()
    return simulation, truth, breakdown


def frontends(simulation: Simulation) -> tuple[int, int]:
    """Of P and of D: nanoseconds from arrival to the scheduler."""
    found = []
    for engine in (simulation.p, simulation.d):
        (arrived,) = (e for e in engine.scheduler.events if e.kind == ev.REQUEST_ARRIVED)
        found.append(arrived.t_ns - arrived.args[0])
    return found[0], found[1]


def intervals(breakdown: Breakdown) -> dict[str, int]:
    """All steps, overlapped ones too."""
    return {i.step.name: i.ns for i in (*breakdown.critical, *breakdown.overlapped)}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("d_shift_ns", [0, 5_000_000_000])
def test_a_pushed_request_under_pull(seed: int, d_shift_ns: int) -> None:
    """P as it was, its answer's way, D's frontend, queue and blocks, then everything from the match on but
    the signal."""
    simulation, truth, breakdown = one("push", seed, d_shift_ns)
    p_frontend, d_frontend = frontends(simulation)
    every = intervals(breakdown)
    after_match = sum(
        ns
        for step, ns in truth.steps.items()
        if step.startswith(("transfer.", "readiness.", "decode.first")) and step != "readiness.signal"
    )
    expected = sum(every[step] for step in BEFORE_P) + CROSSINGS * min(p_frontend, d_frontend)
    expected += d_frontend + every["registration.admit"] + every["registration.blocks"] + after_match
    assert breakdown.predicted_pull_ttft_ns == expected
    assert breakdown.predicted_push_ttft_ns is None


@pytest.mark.parametrize("seed", SEEDS)
def test_a_sequential_push_under_pull_keeps_the_hand_over_it_had(seed: int) -> None:
    _, truth, breakdown = one("sequential push", seed)
    saved = truth.steps["registration.notify"] + truth.steps["readiness.signal"]
    assert breakdown.predicted_pull_ttft_ns == truth.ttft_ns - saved


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pulled_request_under_push(seed: int) -> None:
    """What D did before it could read lies beside prefill, as far as that is as long."""
    simulation, truth, breakdown = one("pull", seed)
    beside = frontends(simulation)[1] + sum(
        truth.steps.get(f"registration.{n}", 0) for n in ("admit", "blocks", "handshake")
    )
    before_match = max(beside, sum(truth.steps[step] for step in BEFORE_P))
    after_match = sum(
        ns for step, ns in truth.steps.items() if step.startswith(("transfer.", "readiness.", "decode.first"))
    )
    assert breakdown.predicted_push_ttft_ns == before_match + after_match
    assert breakdown.predicted_pull_ttft_ns is None


@pytest.mark.parametrize("seed", SEEDS)
def test_under_push_prefill_waits_for_a_d_that_is_slower(seed: int) -> None:
    simulation, (truth,) = simulate("pull", seed, 0)
    for recorder in (simulation.d.scheduler, simulation.d.worker):
        recorder.events[:] = [
            e if e.kind == ev.REQUEST_ARRIVED else e._replace(t_ns=e.t_ns + 10**10) for e in recorder.events
        ]
    (breakdown,) = breakdowns(simulation).values()
    every = intervals(breakdown)
    assert every["registration.admit"] > 10**10
    before_match = frontends(simulation)[1] + sum(
        every.get(f"registration.{n}", 0) for n in ("admit", "blocks", "handshake")
    )
    after_match = sum(
        ns for step, ns in truth.steps.items() if step.startswith(("transfer.", "readiness.", "decode.first"))
    )
    assert breakdown.predicted_push_ttft_ns == before_match + after_match


def test_a_request_that_only_one_engine_served_has_no_prediction() -> None:
    _, _, breakdown = one("local", 1)
    assert (breakdown.predicted_push_ttft_ns, breakdown.predicted_pull_ttft_ns) == (None, None)
