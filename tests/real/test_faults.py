"""Kills and raising hooks on real engines: the daemon goes on, nothing is lost, vLLM serves on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest

from kvscope.demo.collector import Collector
from kvscope.demo.engines import DECODE, PREFILL, EngineSpec
from kvscope.demo.load import Load, Result, make_prompt, run_conversation, run_load
from kvscope.health import problems
from kvscope.lookup import Listing

from .conftest import MODES, Scene, wait_until

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


def outputs(scene: Scene, p: str, d: str) -> list[list[int]]:
    """Of some requests, and of a conversation, whose later turns are read back in bidirectional."""
    results = scene.send(Load([70, 300, 600], output_tokens=10, seed=61), p, d)
    results += asyncio.run(run_conversation(scene.url(p, d), 3, seed=61))
    return [result.output_ids for result in results]


# Bidirectional does all that pull does, with the same connector.
@pytest.mark.parametrize("scene", ["push", "bidirectional"], indirect=True, scope="session")
def test_every_hook_raising_changes_no_output_and_is_told_by_name(scene: Scene) -> None:
    # Instrumented by the plugin, not by its config. One engine does for both roles.
    raising = {"KVSCOPE_ENABLE": "1", "VLLM_PLUGINS": "kvscope", "KVSCOPE_TEST_RAISE": "all"}
    p, d = scene.stock
    with scene.more([EngineSpec("raising-p", PREFILL, scene.mode, environment=raising)]):
        engine = scene.engines["raising-p"]
        scene.engines["raising-d"] = replace(engine, spec=replace(engine.spec, role=DECODE))
        expected = outputs(scene, p, d)
        assert outputs(scene, "raising-p", d) == expected
        assert outputs(scene, p, "raising-d") == expected
        del scene.engines["raising-d"]

    def told() -> set[str]:
        answer = scene.daemon.query("", "SELECT DISTINCT name FROM failures WHERE kind = 'hook'", {})
        return {name for (name,) in answer["rows"]}

    expected_hooks = {
        "connector.on_new_request",
        "connector.request_finished_all_groups",
        "worker.start_load_kv",
        "nixl.transfer",
    }
    wait_until(lambda: expected_hooks <= told(), 30, f"failures of {expected_hooks}")
    engines = scene.daemon.query("", "SELECT DISTINCT engine FROM failures WHERE kind = 'hook'", {})["rows"]
    assert all(engine.startswith("raising-") for (engine,) in engines)


@pytest.mark.parametrize("scene", MODES, indirect=True, scope="session")
def test_daemon_killed_in_mid_load_and_restarted_loses_and_repeats_nothing(scene: Scene) -> None:
    results: list[Result] = []
    url = scene.url()
    load = Load([100, 400] * 15, output_tokens=4, concurrency=2, seed=62)
    sender = threading.Thread(target=lambda: results.extend(asyncio.run(run_load(url, load))))
    sender.start()
    before = scene.daemon.status()["pipeline"]["requests"]
    wait_until(lambda: scene.daemon.status()["pipeline"]["requests"] >= before + 8, 120, "8 requests stored")
    dead = scene.collector
    os.kill(dead.pid, signal.SIGKILL)
    dead.stop()
    time.sleep(1)  # the engines go on recording meanwhile
    scene.collector = Collector(dead.rings, dead.store, dead.log)
    scene.stack.callback(scene.collector.stop)
    sender.join()
    assert len(results) == 30
    assert all(result.ok for result in results)
    rows = scene.rows(results)
    assert all(row["outcome"] == "finished" and not row["unknown_ns"] for row in rows)
    ids = ", ".join(f"'{result.request_id}'" for result in results)
    answer = scene.daemon.query(
        "", f"SELECT client_id, count(*) FROM requests WHERE client_id IN ({ids}) GROUP BY ALL", {}
    )
    assert len(answer["rows"]) == 30
    assert all(count == 1 for _, count in answer["rows"])
    transfers = scene.daemon.query("", "SELECT count(*) - count(DISTINCT id) FROM transfers", {})
    assert transfers["rows"] == [[0]]
    assert all(ring["lost"] == 0 for ring in scene.daemon.status()["rings"])


# A WRITE can't be held up by stopping its target's worker before it is posted.
@pytest.mark.parametrize("scene", ["pull"], indirect=True, scope="session")
def test_engine_killed_in_mid_transfer_leaves_the_request_lost_in_its_last_step(scene: Scene) -> None:
    # Over TCP alone a READ needs its target's process, so that it can be held up.
    slow = {"UCX_TLS": "tcp,self"}
    roles = (("slow-p", PREFILL), ("slow-d", DECODE))
    specs = [EngineSpec(name, role, scene.mode, instrumented=True, environment=slow) for name, role in roles]
    with scene.alone(), scene.more(specs):
        kill_in_mid_transfer(scene, "slow-p", "slow-d")


def kill_in_mid_transfer(scene: Scene, p_name: str, d_name: str) -> None:
    name = "killed-in-mid-transfer"
    body: dict[str, Any] = {"model": "tiny", "prompt": make_prompt(900, random.Random(63)), "max_tokens": 4}
    headers = {"X-Request-Id": name}
    p, d = scene.engines[p_name], scene.engines[d_name]
    first = {"do_remote_decode": True, "do_remote_prefill": False}
    answer = httpx.post(
        p.url + "/v1/completions",
        json={**body, "max_tokens": 1, "kv_transfer_params": first},
        headers=headers,
        timeout=60,
    )
    kept = answer.raise_for_status().json()["kv_transfer_params"]
    pids = d.pids()
    pid = {(r["engine"], r["source"]): r["pid"] for r in scene.daemon.status()["rings"]}
    died = f"(pid {pid[d.engine_id, 'scheduler']}) died: 1 request in flight"
    died = f"ENGINE GONE: {d.engine_id} scheduler 0 {died}"
    p.kill("worker", signal.SIGSTOP)

    def ask_d() -> None:
        with contextlib.suppress(httpx.HTTPError):  # it is killed below
            request = {**body, "kv_transfer_params": kept}
            httpx.post(d.url + "/v1/completions", json=request, headers=headers, timeout=60)

    asking = threading.Thread(target=ask_d)
    asking.start()

    def row() -> dict[str, Any] | None:
        found = scene.daemon.requests(Listing(where=[f"client_id={name}"]))
        return found[0] if found else None

    def in_transfer() -> bool:
        found = row()
        return found is not None and found["current_step"] == "transfer.wire"

    wait_until(in_transfer, 30, "the transfer under way")
    for process in ("worker", "engine_core", "api_server"):
        os.kill(pids[process], signal.SIGKILL)
    p.kill("worker", signal.SIGCONT)
    asking.join()

    wait_until(
        lambda: (found := row()) is not None and found["outcome"] == "lost", 60, "the request told lost"
    )
    stored = wait_until(
        lambda: scene.daemon.query(
            "", f"SELECT outcome, current_step, ttft_ns FROM requests WHERE client_id = '{name}'", {}
        )["rows"],
        60,
        "the lost request stored",
    )
    assert stored == [["lost", "transfer.wire", None]]
    # Long after its ring was let go.
    wait_until(lambda: died in problems(scene.daemon.status()), 10, "the engine told gone")
    assert [line for line in problems(scene.daemon.status()) if d.engine_id in line] == [died]
    # What goes on goes on: P still serves.
    plain = httpx.post(p.url + "/v1/completions", json=body, timeout=120)
    assert plain.status_code == 200
