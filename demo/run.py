"""`kvscope demo`: a real prefill and decode engine, a router, the daemon, a load, and what was found."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvscope import text
from kvscope.client import Daemon
from kvscope.demo import simulate
from kvscope.demo.collector import collector
from kvscope.errors import KvscopeError
from kvscope.explain import explain

MODES = ("push", "pull", "bidirectional")
STORED_TIMEOUT_S = 30
TURNS = 3

Say = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="kvscope demo",
        description="Start a prefill and a decode engine (vLLM on CPU, a tiny model, real NIXL transfers), a "
        "router, the kvscope daemon and a load, and show where the time to first token went. Everything ends "
        "with the command, and nothing stays on the disk. Takes about a minute; engines need 4 GB of memory.",
        epilog="examples:\n  kvscope demo\n  kvscope demo --mode pull\n  kvscope demo --simulate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--mode", choices=MODES, default="push", help="who moves the KV cache (default: push)"
    )
    parser.add_argument(
        "--requests", type=_count, default=24, metavar="N", help="requests to send (default: 24)"
    )
    parser.add_argument(
        "--sequential", action="store_true", help="push: the router asks D only when P has answered"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="simulated events instead of engines: 5 seconds"
    )
    parser.add_argument("--stay", action="store_true", help="leave all of it running until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="what was found as JSON")
    arguments = parser.parse_args(argv)
    if arguments.sequential and arguments.mode != "push":
        parser.error("--sequential is about push: pull and bidirectional are sequential by nature")
    say: Say = (lambda line: print(line, file=sys.stderr, flush=True)) if arguments.json else _say
    signal.signal(signal.SIGTERM, _leave)
    try:
        with _folder() as folder:
            (_simulated if arguments.simulate else _real)(arguments, folder, say)
    except KeyboardInterrupt:
        say("stopped; everything is gone")
        return 130
    return 0


def _leave(number: int, frame: object) -> None:
    """SIGTERM ends it as Ctrl-C does."""
    raise KeyboardInterrupt


def _count(value: str) -> int:
    number = int(value)
    if not 1 <= number <= 10_000:
        raise argparse.ArgumentTypeError("from 1 to 10000")
    return number


def _say(line: str) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A short path, for the sockets below it; in shared memory where there is one, as rings are."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- real engines --------------------------------------------------------------------------------


def _real(arguments: argparse.Namespace, folder: Path, say: Say) -> None:
    missing = [name for name in ("torch", "vllm", "nixl") if importlib.util.find_spec(name) is None]
    if missing:
        raise KvscopeError(
            f"the demo runs real engines and {', '.join(missing)} is not installed: pip install "
            "'kvscope[all,engines]', or see it simulated with `kvscope demo --simulate`"
        )
    from kvscope.demo.deployment import deployment
    from kvscope.demo.engines import DECODE, PREFILL, EngineSpec

    mode = arguments.mode
    rings = folder / "rings"
    environment = {"KVSCOPE_DIR": str(rings), "KVSCOPE_LABEL": "demo"}
    specs = [
        EngineSpec(name, role, mode, instrumented=True, environment=environment)
        for name, role in (("p", PREFILL), ("d", DECODE))
    ]
    say(f"Starting a prefill and a decode engine ({mode}), which takes about half a minute ...")
    with (
        collector(rings, folder) as daemon,
        deployment(specs, folder=folder, sequential=arguments.sequential, progress=_progress(say)) as running,
    ):
        say(f"Ready after {running.ready_s:.0f} s. Sending {arguments.requests} requests ...")
        since_ns = time.time_ns()
        sent = asyncio.run(_load(running.url, mode, arguments.requests))
        failed = [result for result in sent if not result.ok]
        if failed:
            say(f"{len(failed)} of {len(sent)} requests failed, the first with: {failed[0].error[:300]}")
        _show(
            daemon.url, since_ns, len(sent) - len(failed), arguments, say, "real engines on CPU, tiny model"
        )


def _progress(say: Say) -> Callable[[str, float], None]:
    last = [-10.0]

    def tell(what: str, seconds: float) -> None:
        if sys.stderr.isatty():
            print(f"\r  {seconds:4.0f} s  waiting for {what}\033[K", end="", file=sys.stderr, flush=True)
            if what == "warm-up" and seconds:
                print("\r\033[K", end="", file=sys.stderr, flush=True)
        elif abs(seconds - last[0]) >= 10:
            last[0] = seconds
            say(f"  {seconds:4.0f} s  waiting for {what}")

    return tell


async def _load(url: str, mode: str, requests: int) -> list[Any]:
    from kvscope.demo.load import Load, run_conversation, run_load

    if mode == "bidirectional":
        results = []
        for session in range((requests + TURNS - 1) // TURNS):
            results += await run_conversation(url, min(TURNS, requests - session * TURNS), seed=session)
        return results
    lengths = [(120, 300, 700, 1500)[i % 4] for i in range(requests)]
    return await run_load(url, Load(prompt_tokens=lengths, output_tokens=8, concurrency=2))


# --- simulated -----------------------------------------------------------------------------------


def _simulated(arguments: argparse.Namespace, folder: Path, say: Say) -> None:
    say(f"SIMULATED: {arguments.requests} generated requests ({arguments.mode}); no engine runs.")
    rings = folder / "rings"
    fleet = simulate.Fleet(rings, arguments.mode, slots=1 << 17)
    start = fleet.now_ns = fleet.now_ns - 60_000_000_000
    _simulate(fleet, arguments)
    fleet.write()
    since_ns = time.time_ns() - (time.monotonic_ns() - start) - 1_000_000_000
    with collector(rings, folder) as daemon:
        _show(daemon.url, since_ns, arguments.requests, arguments, say, "SIMULATED events, no engines")
    fleet.close()


def _simulate(fleet: simulate.Fleet, arguments: argparse.Namespace) -> None:
    simulation, at, earlier = fleet.simulation, fleet.now_ns, None
    for number in range(arguments.requests):
        name = f"simulated-{number}"
        if arguments.mode == "bidirectional":
            earlier = simulation.pull(name, at, earlier if number % TURNS else None)
            at = earlier.end_ns
        else:
            simulation.request(name, at, sequential=arguments.sequential)
            at += 40_000_000


# --- what it found -------------------------------------------------------------------------------


def _show(url: str, since_ns: int, expected: int, arguments: argparse.Namespace, say: Say, what: str) -> None:
    daemon = Daemon(url)
    slowest = _wait_for_rows(daemon, since_ns, expected)
    since = {"since": str(since_ns)}
    ttft, steps = daemon.query("ttft", "", since), daemon.query("steps", "", since)
    detail = daemon.request(slowest) if slowest else {}
    if arguments.json:
        found = {"data": what, "url": url, "ttft": ttft, "steps": steps, "slowest": detail}
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for title, answer in ((f"Time to first token ({what})", ttft), ("Steps on the critical path", steps)):
            say(f"\n{title}")
            say(text.table([column["name"] for column in answer["columns"]], answer["rows"]))
        if detail:
            say("\nThe slowest request")
            width = max(80, min(160, shutil.get_terminal_size((100, 24)).columns))
            say(explain(detail, width, False).rstrip())
    if arguments.stay:
        say(f"\nStill running. Ask it:  kvscope requests --url {url}\nCtrl-C ends all of it.")
        while True:
            time.sleep(3600)
    daemon.close()


def _wait_for_rows(daemon: Daemon, since_ns: int, expected: int) -> str | None:
    """Wait until all requests are stored, or time is up; returns the id of the slowest."""
    sql = "SELECT count(*), arg_max(id, ttft_ns) FROM requests WHERE arrived_at_ns >= $since"
    deadline = time.monotonic() + STORED_TIMEOUT_S
    while True:
        ((count, slowest),) = daemon.query("", sql, {"since": str(since_ns)})["rows"]
        if count >= expected or time.monotonic() > deadline:
            return None if slowest is None else str(slowest)
        time.sleep(0.1)
