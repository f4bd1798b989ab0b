"""Starts real vLLM engines on CPU, keeps them steady and ends them without a trace.

    with engines([EngineSpec("p", PREFILL), EngineSpec("d", DECODE)], model, folder) as started:
        started["d"].metrics()

Each engine runs under `supervise.py`, so nothing survives the starter, whatever it dies of.

Steadiness. Two stock engines on two cores stall for seconds. The causes, cured without touching what
is measured (push, P stepping for unclaimed leases, sequences of 50-1500 token prompts, 2 cores):

* NIXL's UCX progress thread polls with time-out 0: a core per engine, from the moment the agent exists.
  `inside.py` sets NIXL's own `pthrDelay`, so that the thread sleeps until an event. Without it fewer than
  100 requests were done in 240 s, with it 200 in 82 s; and both engines are ready in 32 s instead of 44.
* vLLM pins the NIXL worker to the last core of its NUMA node, so P's and D's share one; unpinned, each
  engine's two shm_broadcast loops (EngineCore waits for the worker, the worker for EngineCore, by
  sched_yield for 1 s after each step) keep both cores busy for the other engine too: median 288 ms, maximum
  2.3 s. `taming.pin` gives each engine its own share of the cores, as separate hosts would have: median
  81 ms, maximum 0.2 s. (A nap in place of sched_yield did as well, 121 ms and 0.3 s, but alters the engine.)
  Why sharing costs seconds is not proven: bare yielding processes delayed others by 14 ms at most.
* An API server shares its engine's core with those waiting loops, and tokens reach the client in bunches:
  `taming.favour` gives API servers and the router a higher priority, as if they had cores of their own.
* A decode engine's first forward may be one token, before anything asked the kernel for AMX: SIGILL in vLLM's
  attention. `inside.py` asks at the start.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from kvscope.demo import inside, supervise, taming
from kvscope.errors import KvscopeError

PREFILL = "prefill"
DECODE = "decode"

PUSH = "push"
PULL = "pull"
BIDIRECTIONAL = "bidirectional"
MODES = (PUSH, PULL, BIDIRECTIONAL)

CONNECTOR = {PUSH: "NixlPushConnector", PULL: "NixlPullConnector", BIDIRECTIONAL: "NixlPullConnector"}

START_TIMEOUT_S = 240
STOP_GRACE_S = 5

# Shorter than vLLM's 480 s for D: a conversation's last turn keeps D stepping until its blocks expire.
LEASE_S = 30
DECODER_BLOCKS_TTL_S = 60

Progress = Callable[[str, float], None]
"""Called about once a second with what is being waited for and the seconds so far."""


class EngineError(KvscopeError):
    """An engine that did not start, or died; the message ends with the last lines of its log."""


@dataclass(frozen=True)
class EngineSpec:
    """One engine to start."""

    name: str
    role: str
    """`prefill` or `decode`."""
    mode: str = PUSH
    """`push`, `pull` or `bidirectional`; both engines of a pair use the same."""
    instrumented: bool = False
    """Load the connector from `kvscope.connectors` instead of from vLLM."""
    connector: str = ""
    """Another connector class than the mode's, such as NixlConnector."""
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    """kv_connector_extra_config, over the defaults: kv_lease_duration in s ..."""
    load_failure_policy: str = "fail"
    """kv_load_failure_policy: `fail` or `recompute`."""
    arguments: Sequence[str] = ()
    """More command-line arguments of the API server, after the defaults."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More environment variables, over the defaults."""

    def transfer_config(self, engine_id: str) -> dict[str, Any]:
        """The --kv-transfer-config of this engine."""
        extra: dict[str, Any] = {
            "kv_lease_duration": LEASE_S,
            "decoder_kv_blocks_ttl": DECODER_BLOCKS_TTL_S,
        }
        if self.mode == BIDIRECTIONAL:
            extra["bidirectional_kv_xfer"] = True
        config = {
            "kv_connector": self.connector or CONNECTOR[self.mode],
            "kv_role": "kv_both",
            "engine_id": engine_id,
            "kv_load_failure_policy": self.load_failure_policy,
            "kv_connector_extra_config": extra | dict(self.extra_config),
        }
        if self.instrumented:
            config["kv_connector_module_path"] = "kvscope.connectors"
        return config


@dataclass
class Engine:
    """A started engine and the ways to reach it."""

    spec: EngineSpec
    engine_id: str
    """NIXL engine id: new at each start, or the peer would take a restarted engine for the old one."""
    port: int
    side_channel_port: int
    log: Path
    supervisor: subprocess.Popen[bytes]
    cores: Sequence[int]
    """All its threads run on these, once it is ready."""
    started_s: float
    """time.monotonic() at the start."""
    ready_s: float = 0
    """Seconds from the start until /health answered."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def pids(self) -> dict[str, int]:
        """Pids of the live processes: `api_server`, `engine_core`, `worker`, and others by name."""
        found: dict[str, int] = {}
        for pid in supervise.descendants(self.supervisor.pid):
            try:
                line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found.setdefault(_process_name(line), pid)
        return found

    def kill(self, process: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to `api_server`, `engine_core` or `worker`."""
        os.kill(self.pids()[process], number)

    def metrics(self) -> str:
        """A scrape of /metrics."""
        return httpx.get(self.url + "/metrics", timeout=30).raise_for_status().text

    def log_tail(self, lines: int = 25) -> str:
        """The log's last lines, after a line that says so."""
        end = self.log.read_text(errors="replace").splitlines()[-lines:]
        return "\n".join([f"The end of its log {self.log}:", *end])

    def stack_dump(self) -> str:
        """The Python and native stacks of every process of the engine, by py-spy where it is installed."""
        return "\n".join(
            f"=== {self.spec.name} {name} pid {pid}\n{taming.threads_text(pid)}\n{_stack(pid)}"
            for name, pid in self.pids().items()
            if name in ("api_server", "engine_core", "worker")
        )

    def stop(self) -> None:
        """End every process of the engine; returns when all are gone. May be called twice."""
        supervise.stop(self.supervisor)


def _process_name(command_line: str) -> str:
    for mark, name in (
        ("EngineCore", "engine_core"),
        ("Worker", "worker"),
        ("entrypoints.openai.api_server", "api_server"),
        ("APIServer", "api_server"),
        ("resource_tracker", "resource_tracker"),
    ):
        if mark in command_line:
            return name
    return command_line.strip()[:60]


def _stack(pid: int) -> str:
    tool = shutil.which("py-spy") or str(Path(sys.executable).with_name("py-spy"))
    if not Path(tool).exists():
        return "(py-spy is not installed)"
    for options in (["--native"], []):
        got = subprocess.run(
            [tool, "dump", *options, "--nonblocking", "--pid", str(pid)], capture_output=True, text=True
        )
        if got.returncode == 0:
            return got.stdout
    return got.stderr


_given_ports: set[int] = set()


def free_port() -> int:
    """A port nobody listens on, below the range the kernel gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20000, 32000)
        if port in _given_ports:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given_ports.add(port)
        return port


def _environment(spec: EngineSpec, folder: Path, side_channel_port: int, core: int) -> dict[str, str]:
    site = folder / "site"
    site.mkdir(exist_ok=True)
    shutil.copy(inside.__file__, site / "sitecustomize.py")
    path = [str(site), os.environ.get("PYTHONPATH", "")]
    if spec.instrumented:
        path.append(str(Path(__file__).resolve().parents[1]))
    settings = {
        "PYTHONPATH": os.pathsep.join(part for part in path if part),
        "TMPDIR": str(folder / "tmp"),
        "VLLM_RPC_BASE_PATH": str(folder / "tmp"),
        "VLLM_CPU_OMP_THREADS_BIND": str(core),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel_port),
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "UCX_TLS": "tcp,self,sm",
        "CUDA_VISIBLE_DEVICES": "",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONFAULTHANDLER": "1",
    }
    return {**os.environ, **settings, **spec.environment}


def launch(spec: EngineSpec, model: Path, folder: Path, cores: Sequence[int] = ()) -> Engine:
    """Start one engine without waiting for it. `folder` gets its log and temporary files."""
    cores = cores or sorted(os.sched_getaffinity(0))
    own = folder / spec.name
    (own / "tmp").mkdir(parents=True, exist_ok=True)
    engine_id = f"{spec.name}-{uuid.uuid4().hex[:12]}"
    port, side_channel_port = free_port(), free_port()
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", "tiny",
        "--host", "127.0.0.1", "--port", str(port),
        "--enforce-eager", "--max-model-len", "4096", "--no-enable-prefix-caching",
        "--kv-cache-memory-bytes", str(256 << 20), "--max-num-seqs", "16",
        "--disable-uvicorn-access-log", "--generation-config", "vllm",
        "--kv-transfer-config", json.dumps(spec.transfer_config(engine_id)),
        *spec.arguments,
    ]  # fmt: skip
    log = own / "engine.log"
    environment = _environment(spec, own, side_channel_port, cores[0])
    supervisor = supervise.start(command, STOP_GRACE_S, log, folder=own, environment=environment)
    return Engine(spec, engine_id, port, side_channel_port, log, supervisor, cores, time.monotonic())


def wait_ready(started: Sequence[Engine], progress: Progress | None = None) -> None:
    """Wait until every engine answers /health, then pin all. Raises EngineError when one died."""
    begin = told = time.monotonic()
    waiting = list(started)
    while waiting:
        now = time.monotonic()
        for engine in list(waiting):
            if engine.supervisor.poll() is not None:
                raise EngineError(f"engine {engine.spec.name} died at start. {engine.log_tail()}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(engine.url + "/health", timeout=5).status_code == 200:
                    engine.ready_s = time.monotonic() - engine.started_s
                    waiting.remove(engine)
        if waiting and now - begin > START_TIMEOUT_S:
            late = waiting[0]
            raise EngineError(f"engine {late.spec.name} not ready in {START_TIMEOUT_S} s. {late.log_tail()}")
        if progress and waiting and now - told >= 1:
            told = now
            progress("engines " + ", ".join(engine.spec.name for engine in waiting), now - begin)
        time.sleep(0.2)
    for engine in started:
        assert engine.supervisor.stdin
        engine.supervisor.stdin.write(b"r")
        engine.supervisor.stdin.flush()
        pids = engine.pids()
        taming.pin(pids, engine.cores)
        taming.favour(pids["api_server"])


@contextlib.contextmanager
def engines(
    specs: Sequence[EngineSpec], model: Path, folder: Path, progress: Progress | None = None
) -> Iterator[dict[str, Engine]]:
    """Start engines together, yield them by name when all are ready, and end them whatever happens.

    Call it in the main thread: SIGTERM is turned into an exception meanwhile, Ctrl-C is one already.
    """
    started: list[Engine] = []
    with _sigterm_raises():
        try:
            for number, spec in enumerate(specs):
                started.append(launch(spec, model, folder, taming.cores_of(number, len(specs))))
            wait_ready(started, progress)
            yield {engine.spec.name: engine for engine in started}
        finally:
            for engine in started:  # all life lines first: they end side by side
                supervise.cut(engine.supervisor)
            for engine in started:
                engine.stop()


@contextlib.contextmanager
def paused(idle: Iterable[Engine]) -> Iterator[None]:
    """Stop engines that have nothing to do: four of them on two cores would be in each other's way."""
    pids = [pid for engine in idle for pid in engine.pids().values()]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _sigterm_raises() -> Iterator[None]:
    def leave(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: whoever owns it deals with SIGTERM
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
