"""What is right on two real engines and real NIXL transfers, in all three modes."""

from __future__ import annotations

import asyncio
import contextlib
import random
import shutil
import statistics
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvscope.demo import supervise
from kvscope.demo.engines import free_port
from kvscope.demo.load import Load, Result, make_prompt, run_conversation, send
from kvscope.lookup import Listing

from .conftest import Scene, metric, steps, wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

MODES = ("push", "pull", "bidirectional")
every_mode = pytest.mark.parametrize("scene", MODES, indirect=True, scope="session")
push = pytest.mark.parametrize("scene", ["push"], indirect=True, scope="session")
pull = pytest.mark.parametrize("scene", ["pull"], indirect=True, scope="session")
bidirectional = pytest.mark.parametrize("scene", ["bidirectional"], indirect=True, scope="session")
push_and_pull = pytest.mark.parametrize("scene", ["push", "pull"], indirect=True, scope="session")

MS = 1e6


def check_sums(row: dict[str, Any]) -> None:
    """The invariants of the partition, on a stored request."""
    critical = [i for i in row["waterfall"] if i["critical"]]
    at = 0
    for interval in critical:
        assert interval["from_ns"] == at
        assert interval["ns"] >= 0
        at += interval["ns"]
    assert at == row["ttft_ns"]
    assert sum(steps(row).values()) == row["ttft_ns"]
    assert all(i["ns"] >= 0 for i in row["waterfall"])


def part(row: dict[str, Any], step: str) -> dict[str, Any]:
    """The first interval of a step in the waterfall, critical or overlapped."""
    found: dict[str, Any] = next(i for i in row["waterfall"] if i["step"] == step)
    return found


@every_mode
def test_steps_of_every_request_add_up_and_none_is_unknown(scene: Scene) -> None:
    rows = scene.rows(scene.results)
    for row in rows:
        check_sums(row)
        assert row["outcome"] == "finished"
        assert row["connector"] == scene.mode
        assert row["joined_by"] == ("push match" if scene.mode == "push" else "remote id")
        assert not row["unknown_ns"], row
        assert row["clock_error_ns"] == 0
        # Hooks of two processes may see one moment a little apart, never more.
        assert row["clamped_ns"] < 1 * MS, row
        assert row["output_tokens"] == 6
        assert row["transferred_tokens"] == row["prompt_tokens"]
        assert row["transfer_bytes"] > 0


@every_mode
def test_none_of_two_hundred_requests_in_a_row_stalls(scene: Scene) -> None:
    assert len(scene.results) == 200
    assert max(result.duration_ns for result in scene.results) < 5_000 * MS


@every_mode
def test_nothing_is_lost_missing_or_failed(scene: Scene) -> None:
    stock = {e.pids()["engine_core"] for name, e in scene.engines.items() if name.startswith("stock-")}

    def told_of_stock() -> bool:
        return len(scene.daemon.status()["problems"]) >= len(stock)

    wait_until(told_of_stock, seconds=60, what="being told of the stock engines")
    problems: list[str] = scene.daemon.status()["problems"]
    assert sorted(line.partition(" runs with NIXL")[0] for line in problems) == sorted(
        f"NOT INSTRUMENTED: process {pid} (VLLM::EngineCore)" for pid in stock
    )
    status = scene.daemon.status()
    assert status["unreadable"] == []
    assert len(status["rings"]) == 4
    for ring in status["rings"]:
        assert ring["lost"] == ring["torn"] == ring["rejected"] == 0
        assert ring["state"] == "recording"
        assert ring["hooks_missing"] == []
        assert ring["fingerprint"]["vllm"] == "0.32.0"
    failed = scene.daemon.query("", "SELECT kind, name, detail FROM failures WHERE kind <> 'nixl'", {})
    assert failed["rows"] == []


@every_mode
def test_samples_of_both_engines_arrive(scene: Scene) -> None:
    names = ("process.cpu", "vllm.running", "kv_blocks.total", "engine.step_ns")
    wanted = {(scene.engines[engine].engine_id, name) for engine in ("p", "d") for name in names}

    def missing() -> set[tuple[str, str]]:
        found = scene.daemon.query("", "SELECT DISTINCT engine, name FROM samples", {})["rows"]
        return wanted - {(engine, name) for engine, name in found}

    with contextlib.suppress(AssertionError):  # the set says more
        wait_until(lambda: not missing())
    assert missing() == set()
    if scene.mode == "push":
        threads = (
            "SELECT DISTINCT engine FROM samples WHERE name = 'thread.cpu' AND label = 'nixl-push-write'"
        )
        assert len(scene.daemon.query("", threads, {})["rows"]) == 2


def _outside_kvscope(scene: Scene, results: list[Result]) -> list[float]:
    """Client's TTFT minus kvscope's, ms, per request, the client's and the router's own time taken off."""
    differences = []
    for result, row in zip(results, scene.rows(results), strict=True):
        hops = result.hops
        sent_ns = min(hops["prefill_sent_ns"], hops["decode_sent_ns"])
        hops_ns = (sent_ns - result.sent_ns) + (result.first_token_ns - hops["decode_first_byte_ns"])
        differences.append((result.ttft_ns - hops_ns - row["ttft_ns"]) / MS)
    return differences


@every_mode
def test_ttft_agrees_with_the_streaming_client(scene: Scene, capsys: pytest.CaptureFixture[str]) -> None:
    results = scene.results
    for attempt in range(4):
        differences = sorted(_outside_kvscope(scene, results))
        median, count = statistics.median(differences), len(differences)
        p1, p95 = differences[count // 100], differences[-1 - count // 20]
        line = f"p1 {p1:.2f} ms, median {median:.2f} ms, p95 {p95:.2f} ms of {count}"
        with capsys.disabled():
            print(f"\n{scene.mode}: client TTFT without client and router hops, minus kvscope's: {line}")
            print(f"  the worst: {', '.join(f'{ms:.0f} ms' for ms in (differences[0], *differences[-3:]))}")
        # kvscope claims no more than the client saw. Other work on the machine adds to the HTTP between
        # router and engines (3 ms at the median on two idle cores, 12 on busy ones), or holds the router up
        # between a stamp and its cause: a few may be hit, and a quiet run counts.
        if p1 > -2 and median < 20 and p95 < 60:
            return
        with scene.alone():
            results = scene.send(Load([(64, 200, 450, 900)[i % 4] for i in range(100)], 6, seed=70 + attempt))
    pytest.fail(f"the client's TTFT is another: {line}")


@every_mode
def test_queue_and_first_step_agree_with_vllms_own_metrics(scene: Scene) -> None:
    queue, first_step = [], []
    for result, row in zip(scene.results, scene.rows(scene.results), strict=True):
        decode = part(row, "decode.first_step")
        arrived = part(row, "registration.route")
        # vLLM's queue time on D ends when its first decode step is scheduled: it holds the whole hand-over.
        waited_ns = decode["from_ns"] - (arrived["from_ns"] + arrived["ns"])
        queue.append(abs(result.metrics["queue_time_ms"] - waited_ns / MS))
        first_step.append(abs(result.metrics["time_to_first_token_ms"] - decode["ns"] / MS))
    assert statistics.median(queue) < 3, queue
    assert statistics.median(first_step) < 3, first_step


@every_mode
def test_transfer_telemetry_equals_vllms_counters(scene: Scene) -> None:
    poster = "p" if scene.mode == "push" else "d"
    rows = scene.rows(scene.results)
    ids = ", ".join(str(row["id"]) for row in rows)
    answer = scene.daemon.query(
        "",
        f"SELECT count(*), sum(bytes), sum(telemetry_xfer_us) FROM transfers WHERE request_id IN ({ids})",
        {},
    )
    count, moved, xfer_us = answer["rows"][0]

    def increase(name: str) -> float:
        return metric(scene.after, name) - metric(scene.before[poster], name)

    assert increase("vllm:nixl_xfer_time_seconds_count") == count == len(rows)
    assert increase("vllm:nixl_bytes_transferred_sum") == moved
    assert increase("vllm:nixl_xfer_time_seconds_sum") == pytest.approx(xfer_us / 1e6, rel=1e-6)


@push_and_pull
def test_outputs_are_the_same_as_with_stock_engines(scene: Scene) -> None:
    load = Load([80, 333, 700], output_tokens=12, seed=11)
    expected = [result.output_ids for result in scene.send(load, "stock-p", "stock-d")]
    assert all(len(ids) == 12 for ids in expected)
    for pair in (("p", "d"), ("p", "stock-d"), ("stock-p", "d")):
        assert [result.output_ids for result in scene.send(load, *pair)] == expected, pair


@push_and_pull
def test_an_engine_beside_a_stock_one_is_told_alone(scene: Scene) -> None:
    """GIVEN one instrumented leg, its peer without a ring THEN its steps are there and the rest is said."""
    (alone_p,) = scene.rows(scene.send(Load([200], seed=21), "p", "stock-d"))
    assert alone_p["ttft_ns"] is None
    assert alone_p["prefill_compute_ns"] > 0
    assert alone_p["outcome"] == "finished"
    (alone_d,) = scene.rows(scene.send(Load([200], seed=22), "stock-p", "d"))
    assert alone_d["joined_by"] == "peer not instrumented"
    assert alone_d["p_engine"] is None
    assert alone_d["decode_first_step_ns"] > 0
    check_sums(alone_d)


# --- push ----------------------------------------------------------------------------------------


@push
def test_a_concurrent_router_leads_and_a_sequential_one_lags(scene: Scene) -> None:
    lengths = [900] * 6
    concurrent = scene.rows(scene.send(Load(lengths, seed=31)))
    sequential = scene.rows(scene.send(Load(lengths, seed=32, sequential=True)))
    assert statistics.median(row["lead_ns"] for row in concurrent) > 0
    for row in sequential:
        check_sums(row)
        assert row["lead_ns"] < 0
        # All of the lag is on the critical path, by name.
        late = (
            "registration.route",
            "registration.admit",
            "registration.blocks",
            "registration.handshake",
            "registration.notify",
        )
        assert sum(steps(row).get(name, 0) for name in late) == -row["lead_ns"]


@push
def test_a_busy_p_shows_as_waiting_for_its_step_not_as_wire(scene: Scene) -> None:
    idle = scene.rows(scene.send(Load([500] * 6, seed=41)))

    async def beside_a_long_prompt(seed: int) -> Result:
        rng = random.Random(seed)
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            short = asyncio.create_task(send(client, scene.url(), make_prompt(500, rng), 4))
            await asyncio.sleep(0.005)  # the long one comes while P computes the short one
            long = asyncio.create_task(send(client, scene.url(), make_prompt(3500, rng), 4))
            await long
            return await short

    busy_results = [asyncio.run(beside_a_long_prompt(seed)) for seed in range(9)]
    busy = scene.rows(busy_results)

    def waiting(row: dict[str, Any]) -> int:
        return sum(steps(row).get(name, 0) for name in ("transfer.dispatch", "readiness.detect"))

    def wire(row: dict[str, Any]) -> int:
        return steps(row).get("transfer.wire", 0)

    idle_wait = statistics.median(map(waiting, idle))
    # Not every long prompt comes in time: the upper quartile are those that met a busy P.
    busy_wait = statistics.quantiles(map(waiting, busy), n=4)[2]
    assert busy_wait > 5 * idle_wait, (idle_wait / MS, busy_wait / MS)
    assert statistics.median(map(wire, busy)) < busy_wait / 5
    for row in busy:
        check_sums(row)


# --- pull ----------------------------------------------------------------------------------------


@pull
def test_requests_through_the_real_vllm_router_are_explained_like_our_own(scene: Scene) -> None:
    port = free_port()
    tool = shutil.which("vllm-router") or str(Path(sys.executable).with_name("vllm-router"))
    command = [tool, "--host", "127.0.0.1", "--port", str(port), "--vllm-pd-disaggregation"]
    command += ["--prefill", scene.engines["p"].url, "--decode", scene.engines["d"].url]
    command += ["--kv-connector", "nixl", "--policy", "round_robin", "--prometheus-port", str(free_port())]
    process = supervise.start(command, 2, scene.folder / "vllm-router.log")
    url = f"http://127.0.0.1:{port}"
    try:

        def ask() -> httpx.Response | None:
            body = {"model": "tiny", "prompt": make_prompt(300, random.Random(5)), "max_tokens": 4}
            try:
                answer = httpx.post(url + "/v1/completions", json=body, timeout=60, trust_env=False)
            except httpx.HTTPError:
                return None
            return answer if answer.status_code == 200 else None

        since_ns = time.time_ns()
        wait_until(ask, 60, "the router's first answer")
        for _ in range(3):
            assert ask() is not None
    finally:
        supervise.stop(process)

    def stored() -> list[dict[str, Any]]:
        listed = scene.daemon.requests(Listing(limit=50))
        return [
            r for r in listed if r["arrived_at_ns"] > since_ns and r["outcome"] == "finished" and r["ttft_ns"]
        ]

    rows = wait_until(lambda: found if len(found := stored()) >= 4 else None)
    for row in (scene.row(row["id"]) for row in rows):
        assert len(row["p_request"]) > 100, "the router's own long id"
        assert row["joined_by"] == "remote id"
        assert not row["unknown_ns"]
        check_sums(row)
        text = subprocess.run(
            [sys.executable, "-m", "kvscope.cli", "explain", str(row["id"]), "--url", scene.collector.url],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "coordination wait" in text
        assert row["p_request"][:40] in text


# --- bidirectional -------------------------------------------------------------------------------


async def _turn(
    client: httpx.AsyncClient, scene: Scene, prompt: list[int], kept: dict[str, Any] | None
) -> tuple[list[int], dict[str, Any], str]:
    """One turn by hand, as a router would, so that what P is told of the turn before can be chosen."""
    name = f"turn-{uuid.uuid4().hex}"
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    headers = {"X-Request-Id": name}
    first = kept or {"do_remote_decode": True, "do_remote_prefill": False}
    p = await client.post(
        scene.engines["p"].url + "/v1/completions",
        json={**body, "max_tokens": 1, "kv_transfer_params": first},
        headers=headers,
    )
    if p.status_code != 200:
        return [], {}, name
    d = await client.post(
        scene.engines["d"].url + "/v1/completions",
        json={**body, "max_tokens": 8, "kv_transfer_params": p.json()["kv_transfer_params"]},
        headers=headers,
    )
    answer = d.raise_for_status().json()
    return answer["choices"][0]["token_ids"], answer["kv_transfer_params"], name


def _two_turns(scene: Scene, tokens: int, change: Any) -> list[dict[str, Any]]:
    async def run() -> list[str]:
        rng = random.Random(tokens)
        async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
            prompt = make_prompt(tokens, rng)
            output, kept, first = await _turn(client, scene, prompt, None)
            _, _, second = await _turn(client, scene, [*prompt, *output, *make_prompt(20, rng)], change(kept))
            return [first, second]

    return scene.rows([Result(name, "") for name in asyncio.run(run())], 60)


@bidirectional
def test_outputs_are_those_of_a_plain_request(scene: Scene) -> None:
    async def plain() -> list[list[int]]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            url = scene.engines["d"].url
            return [(await send(client, url, r.prompt, 6)).output_ids for r in scene.results[:8]]

    assert asyncio.run(plain()) == [result.output_ids for result in scene.results[:8]]


@bidirectional
def test_a_second_turn_is_pulled_and_chained(scene: Scene) -> None:
    results = asyncio.run(run_conversation(scene.url(), 3, seed=51))
    rows = scene.rows(results)
    assert [row["turn"] for row in rows] == [1, 2, 3]
    assert len({row["session"] for row in rows}) == 1
    assert rows[0]["reuse_outcome"] is None
    for row in rows[1:]:
        check_sums(row)
        assert row["reuse_outcome"] == "pulled"
        assert row["reuse_pulled_tokens"] > 200
        assert row["prefill_reuse_wire_ns"] is not None
        assert not row["unknown_ns"]


@bidirectional
def test_a_second_turn_below_the_threshold_is_recomputed_and_said(scene: Scene) -> None:
    _, second = _two_turns(scene, 30, lambda kept: kept)
    assert second["reuse_outcome"] == "below threshold"
    assert second["reuse_pulled_tokens"] == 0
    check_sums(second)


@bidirectional
def test_a_second_turn_with_metadata_missing_is_said(scene: Scene) -> None:
    _, second = _two_turns(scene, 300, lambda kept: {k: v for k, v in kept.items() if k != "remote_host"})
    assert second["reuse_outcome"] == "metadata missing"
    check_sums(second)


@bidirectional
def test_a_second_turn_that_comes_too_late_is_said(scene: Scene) -> None:
    def expired(kept: dict[str, Any]) -> dict[str, Any]:
        # As if the time to live had passed; vLLM keeps a safety margin of 5 s.
        return {**kept, "remote_blocks_expiry_time": time.perf_counter() + 1}

    _, second = _two_turns(scene, 300, expired)
    assert second["reuse_outcome"] == "expired"
    assert second["outcome"] == "error"
