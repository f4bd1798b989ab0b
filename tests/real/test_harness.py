"""The harness itself, with stock engines where there are some: what it starts works, and ends.

That nothing is left of it, `conftest.scene_of` checks.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from kvscope.demo import supervise
from kvscope.demo.engines import BIDIRECTIONAL, MODES, PULL, PUSH
from kvscope.demo.load import Load, Result, make_prompt, run_conversation, run_load, send

from .conftest import Scene, metric, wait_until

every_mode = pytest.mark.parametrize("scene", MODES, indirect=True, scope="session")


def plain(scene: Scene, result: Result) -> Result:
    """The same request straight to D, which then computes the prompt itself."""

    url = scene.engines[scene.stock[1]].url
    chat = isinstance(result.prompt, str)

    async def ask() -> Result:
        async with httpx.AsyncClient(timeout=60) as client:
            return await send(client, url, result.prompt, len(result.output_ids), chat=chat)

    return asyncio.run(ask())


@pytest.mark.real
@every_mode
@pytest.mark.parametrize("chat", [False, True])
def test_output_equals_that_of_a_plain_request(scene: Scene, chat: bool) -> None:
    results = scene.send(Load([40, 300, 900], output_tokens=8, seed=3, chat=chat), *scene.stock)
    for result in results:
        assert len(result.output_ids) == 8
        assert result.output_ids == plain(scene, result).output_ids
    moved_by = scene.engines[scene.stock[0 if scene.mode == PUSH else 1]]
    assert metric(moved_by.metrics(), "vllm:nixl_bytes_transferred_sum") > 0


@pytest.mark.real
@every_mode
def test_hops_are_recorded_in_order(scene: Scene) -> None:
    p, _ = scene.stock
    (result,) = scene.send(Load([200]), *scene.stock)
    hops = result.hops
    assert hops["outcome"] == "ok"
    assert hops["received_ns"] <= hops["prefill_sent_ns"] < hops["prefill_answered_ns"]
    assert (hops["decode_sent_ns"] < hops["prefill_answered_ns"]) == (scene.mode == PUSH)
    assert hops["decode_sent_ns"] < hops["decode_first_byte_ns"] <= hops["first_byte_forwarded_ns"]
    assert result.sent_ns < hops["received_ns"]
    assert hops["first_byte_forwarded_ns"] <= hops["finished_ns"]
    assert hops["prefill_engine"] == scene.engines[p].engine_id
    assert result.request_id in hops["prefill_internal_id"]


@pytest.mark.real
@pytest.mark.parametrize("scene", [PUSH], indirect=True, scope="session")
def test_push_can_be_sequential(scene: Scene) -> None:
    (result,) = scene.send(Load([200], sequential=True), *scene.stock)
    assert result.hops["decode_sent_ns"] >= result.hops["prefill_answered_ns"]


@pytest.mark.real
@pytest.mark.parametrize("scene", [BIDIRECTIONAL], indirect=True, scope="session")
def test_second_turn_is_pulled_back_from_decode(scene: Scene) -> None:
    p, d = scene.stock

    def pulled() -> float:
        return metric(scene.engines[p].metrics(), "vllm:nixl_bytes_transferred_sum")

    before = pulled()
    first, second = asyncio.run(run_conversation(scene.url(p, d), turns=2, first_prompt_tokens=300))
    assert first.ok, first.error
    assert second.ok, second.error
    assert second.hops["turn"] == 2
    assert second.output_ids == plain(scene, second).output_ids
    wait_until(lambda: pulled() > before)


@pytest.mark.real
@every_mode
def test_an_error_of_a_leg_reaches_the_client(scene: Scene) -> None:
    (result,) = asyncio.run(run_load(scene.url(*scene.stock), Load([5000])))
    assert result.status == 400
    assert "4096" in result.error
    assert "leg: 400" in result.hops["outcome"]


@pytest.mark.real
@pytest.mark.parametrize("scene", [PUSH, PULL], indirect=True, scope="session")  # bidirectional: as pull
def test_a_client_that_leaves_aborts_decode(scene: Scene) -> None:
    url, d = scene.url(*scene.stock), scene.engines[scene.stock[1]]
    body = {"model": "tiny", "prompt": make_prompt(50, random.Random(5)), "max_tokens": 3500, "stream": True}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", url + "/v1/completions", json=body | {"ignore_eos": True}) as answer,
    ):
        next(answer.iter_lines())
        request_id = answer.headers["x-request-id"]
    wait_until(lambda: metric(d.metrics(), "vllm:num_requests_running") == 0)
    hops = httpx.get(url + "/hops", params={"id": request_id}).json()
    assert hops["outcome"] == "client left"


def test_nothing_survives_the_kill_of_the_starter(tmp_path: Path) -> None:
    # The engine stands for vLLM: it starts a process that leaves its session and ignores SIGTERM.
    engine = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "if os.fork() == 0: os.setsid()\n"
        f"open({str(tmp_path)!r} + f'/{{os.getpid()}}', 'w').close()\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-I", supervise.__file__, "0.2", sys.executable, "-c", engine]
    starter = (
        "import subprocess, time\n"
        f"subprocess.Popen({command!r}, stdin=subprocess.PIPE, start_new_session=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", starter])
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    pids = [int(path.name) for path in tmp_path.iterdir()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
