"""A whole deployment: engines, the router before them, warmed up.

with deployment([EngineSpec("p", PREFILL), EngineSpec("d", DECODE)]) as d:
    results = asyncio.run(run_load(d.url, Load(prompt_tokens=[200, 400])))
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from kvscope.demo import supervise, taming
from kvscope.demo.engines import (
    BIDIRECTIONAL,
    DECODE,
    PREFILL,
    Engine,
    EngineError,
    EngineSpec,
    Progress,
    engines,
    free_port,
)
from kvscope.demo.load import Load, run_conversation, run_load
from kvscope.demo.model import make_model

ROUTER_GRACE_S = 2


@dataclass
class Deployment:
    """Running engines behind a running router."""

    engines: dict[str, Engine]
    url: str
    """Of the router."""
    folder: Path
    """Logs of the router and, one folder per engine, of the engines."""
    ready_s: float
    """Seconds from the start until warmed up."""

    def stack_dump(self) -> str:
        return "\n".join(engine.stack_dump() for engine in self.engines.values())


@contextlib.contextmanager
def deployment(
    specs: Sequence[EngineSpec],
    *,
    folder: Path | None = None,
    model: Path | None = None,
    sequential: bool = False,
    progress: Progress | None = None,
) -> Iterator[Deployment]:
    """Start engines and a router, warm both up, and end them.

    Args:
        specs: At least one prefill and one decode engine, all of one mode.
        folder: Keep logs and the model here. Without it nothing is left on the disk.
        model: A model made earlier by `make_model`.
        sequential: Push: the router sends D only when P has answered.
        progress: Told about once a second what is being waited for.
    """
    begin = time.monotonic()
    with contextlib.ExitStack() as stack:
        # Short names: the sockets of vLLM and NIXL live below it, and their paths may have 107 characters.
        own = folder or Path(tempfile.mkdtemp(prefix="kvs-"))
        own.mkdir(parents=True, exist_ok=True)
        if folder is None:
            stack.callback(shutil.rmtree, own, ignore_errors=True)
        model = model or make_model(own / "model")
        started = stack.enter_context(engines(specs, model, own, progress))
        url = stack.enter_context(router(list(started.values()), own, sequential))
        warm_up(url, specs[0].mode, len(specs), progress)
        yield Deployment(started, url, own, time.monotonic() - begin)


@contextlib.contextmanager
def router(started: Sequence[Engine], folder: Path, sequential: bool = False) -> Iterator[str]:
    """Run the router before these engines; yields its url."""
    port = free_port()
    command = [sys.executable, "-m", "kvscope.demo.router"]
    command += ["--port", str(port), "--mode", started[0].spec.mode]
    for engine in started:
        if engine.spec.role == PREFILL:
            command += ["--prefill", f"{engine.url},{engine.engine_id},127.0.0.1,{engine.side_channel_port}"]
        elif engine.spec.role == DECODE:
            command += ["--decode", engine.url]
    if sequential:
        command.append("--sequential")
    log = folder / "router.log"
    process = supervise.start(command, ROUTER_GRACE_S, log)
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for_router(url, process, log)
        taming.favour(supervise.descendants(process.pid)[0])
        yield url
    finally:
        supervise.stop(process)


def _wait_for_router(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(url + "/health", timeout=5).status_code == 200:
                return
        if process.poll() is not None or time.monotonic() > deadline:
            raise EngineError(f"the router did not start; its log ends:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


def warm_up(url: str, mode: str, pairs: int, progress: Progress | None = None) -> None:
    """Requests of two lengths through every pair of engines: first handshake, first kernels, first pages."""
    begin = time.monotonic()
    if progress:
        progress("warm-up", 0.0)
    load = Load(prompt_tokens=[64, 700] * pairs, output_tokens=4, seed=1)
    results = asyncio.run(run_load(url, load))
    if mode == BIDIRECTIONAL:  # P's handshake with D happens at the first pull back
        results += asyncio.run(run_conversation(url, turns=2, seed=1))
    if progress:
        progress("warm-up", time.monotonic() - begin)
    for result in results:
        if not result.ok:
            raise EngineError(f"warm-up request failed: {result.status} {result.error[:500]}")
