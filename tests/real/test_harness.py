"""The harness itself, with stock engines: what it starts works, is steady enough, and ends."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from kvscope.demo import supervise
from kvscope.demo.deployment import Deployment, deployment
from kvscope.demo.engines import BIDIRECTIONAL, DECODE, MODES, PREFILL, PUSH, EngineSpec
from kvscope.demo.load import Load, Result, make_prompt, run_conversation, run_load, send


def wait_until(condition: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.1)


def metric(text: str, name: str) -> float:
    """Sum of a metric over its label sets; 0 when it is not there yet."""
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))


@pytest.fixture(scope="module", params=MODES)
def running(request: pytest.FixtureRequest) -> Iterator[Deployment]:
    mode = request.param
    before = set(os.listdir("/dev/shm"))
    with deployment([EngineSpec("p", PREFILL, mode), EngineSpec("d", DECODE, mode)]) as started:
        processes = [pid for engine in started.engines.values() for pid in engine.pids().values()]
        assert len(processes) >= 6
        yield started
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    assert not started.folder.exists()
    left = {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("psm_")}
    assert not left


def mode_of(running: Deployment) -> str:
    return running.engines["p"].spec.mode


def plain(running: Deployment, result: Result) -> Result:
    """The same request straight to D, which then computes the prompt itself."""

    url = running.engines["d"].url
    chat = isinstance(result.prompt, str)

    async def ask() -> Result:
        async with httpx.AsyncClient(timeout=60) as client:
            return await send(client, url, result.prompt, len(result.output_ids), chat=chat)

    return asyncio.run(ask())


@pytest.mark.real
@pytest.mark.parametrize("chat", [False, True])
def test_output_equals_that_of_a_plain_request(running: Deployment, chat: bool) -> None:
    results = asyncio.run(run_load(running.url, Load([40, 300, 900], output_tokens=8, seed=3, chat=chat)))
    for result in results:
        assert result.ok, result.error
        assert len(result.output_ids) == 8
        assert result.output_ids == plain(running, result).output_ids
    moved_by = running.engines["p" if mode_of(running) == PUSH else "d"]
    assert metric(moved_by.metrics(), "vllm:nixl_bytes_transferred_sum") > 0


@pytest.mark.real
def test_hops_are_recorded_in_order(running: Deployment) -> None:
    concurrent = mode_of(running) == PUSH
    (result,) = asyncio.run(run_load(running.url, Load([200])))
    hops = result.hops
    assert hops["outcome"] == "ok"
    assert hops["received_ns"] <= hops["prefill_sent_ns"] < hops["prefill_answered_ns"]
    assert (hops["decode_sent_ns"] < hops["prefill_answered_ns"]) == concurrent
    assert hops["decode_sent_ns"] < hops["decode_first_byte_ns"] <= hops["first_byte_forwarded_ns"]
    assert result.sent_ns < hops["received_ns"]
    assert hops["first_byte_forwarded_ns"] <= hops["finished_ns"]
    assert hops["prefill_engine"] == running.engines["p"].engine_id
    assert result.request_id in hops["prefill_internal_id"]


@pytest.mark.real
def test_push_can_be_sequential(running: Deployment) -> None:
    if mode_of(running) != PUSH:
        pytest.skip("only push has an order to choose")
    (result,) = asyncio.run(run_load(running.url, Load([200], sequential=True)))
    assert result.ok, result.error
    assert result.hops["decode_sent_ns"] >= result.hops["prefill_answered_ns"]


@pytest.mark.real
def test_second_turn_is_pulled_back_from_decode(running: Deployment) -> None:
    if mode_of(running) != BIDIRECTIONAL:
        pytest.skip("only bidirectional pulls back")

    def pulled() -> float:
        return metric(running.engines["p"].metrics(), "vllm:nixl_bytes_transferred_sum")

    before = pulled()
    first, second = asyncio.run(run_conversation(running.url, turns=2, first_prompt_tokens=300))
    assert first.ok, first.error
    assert second.ok, second.error
    assert second.hops["turn"] == 2
    assert second.output_ids == plain(running, second).output_ids
    wait_until(lambda: pulled() > before)


@pytest.mark.real
def test_an_error_of_a_leg_reaches_the_client(running: Deployment) -> None:
    (result,) = asyncio.run(run_load(running.url, Load([5000])))
    assert result.status == 400
    assert "4096" in result.error
    assert "leg: 400" in result.hops["outcome"]


@pytest.mark.real
def test_a_client_that_leaves_aborts_decode(running: Deployment) -> None:
    if mode_of(running) == BIDIRECTIONAL:
        pytest.skip("the same code as pull")
    body = {"model": "tiny", "prompt": make_prompt(50, random.Random(5)), "max_tokens": 3500, "stream": True}
    with (
        httpx.Client(timeout=60) as client,
        client.stream("POST", running.url + "/v1/completions", json=body | {"ignore_eos": True}) as answer,
    ):
        next(answer.iter_lines())
        request_id = answer.headers["x-request-id"]
    wait_until(lambda: metric(running.engines["d"].metrics(), "vllm:num_requests_running") == 0)
    hops = httpx.get(running.url + "/hops", params={"id": request_id}).json()
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
