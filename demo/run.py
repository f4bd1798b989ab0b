"""`kvscope demo`: a real prefill and decode engine, a router, the daemon, a load, and `kvscope top` on it.

Where there is no terminal, a summary of what was found in place of `kvscope top`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvscope import text
from kvscope.client import Daemon
from kvscope.demo import simulate, supervise
from kvscope.demo.collector import collector
from kvscope.demo.traffic import Plan, traffic
from kvscope.errors import KvscopeError
from kvscope.explain import explain

MODES = ("push", "pull", "bidirectional")
STORED_TIMEOUT_S = 30
TURNS = 3
WINDOW = "2m"
"""Of `kvscope top`: short, as a demo is."""
TOP_GRACE_S = 5
LEAVE_SCREEN = (
    "".join(f"\x1b[?{mode}l" for mode in (1000, 1003, 1006, 1015, 2004, 1004, 1049)) + "\x1b[?25h\x1b[0m"
)
"""No mouse, no marks around pastes, the first screen, a cursor: for a program that was killed."""

Say = Callable[[str], None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="kvscope demo",
        description="Start a prefill and a decode engine (vLLM on CPU, a tiny model, real NIXL transfers), a "
        "router, the kvscope daemon and a load, and look at it with `kvscope top`; q ends all of it. Where "
        "there is no terminal, send some requests and print where their time to first token went. Nothing "
        "stays on the disk. Starting takes about a minute; engines need 4 GB of memory.",
        epilog="examples:\n  kvscope demo\n  kvscope demo --mode pull\n  kvscope demo --simulate",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--mode", choices=MODES, help="who moves the KV cache (default: push; `top` on simulated events: all)"
    )
    parser.add_argument(
        "--requests",
        type=_count,
        default=24,
        metavar="N",
        help="without `top`: requests to send (default: 24)",
    )
    parser.add_argument(
        "--sequential", action="store_true", help="push: the router asks D only when P has answered"
    )
    parser.add_argument(
        "--simulate", action="store_true", help="simulated events instead of engines: 5 seconds"
    )
    parser.add_argument("--no-top", action="store_true", help="the summary, in a terminal too")
    parser.add_argument(
        "--stay", action="store_true", help="the summary, and leave all of it running until Ctrl-C"
    )
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    arguments = parser.parse_args(argv)
    top = _has_top(arguments)
    if arguments.mode is None and (arguments.sequential or not (top and arguments.simulate)):
        arguments.mode = "push"
    if arguments.sequential and arguments.mode != "push":
        parser.error("--sequential is about push: pull and bidirectional are sequential by nature")
    say: Say = (lambda line: print(line, file=sys.stderr, flush=True)) if arguments.json else _say
    for number in supervise.ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:  # `nohup` has its way
            signal.signal(number, _leave)
    run = {
        (False, False): _real,
        (False, True): _real_top,
        (True, False): _simulated,
        (True, True): _simulated_top,
    }[arguments.simulate, top]
    try:
        with _folder() as folder:
            code = run(arguments, folder, say)
    except KeyboardInterrupt:
        say("stopped; everything is gone")
        return 130
    if top:
        say("ended; everything is gone")
    return code


def _has_top(arguments: argparse.Namespace) -> bool:
    """Whether there is someone to look at `kvscope top`, and something to look with."""
    if arguments.json or arguments.no_top or arguments.stay:
        return False
    # Textual draws on standard error.
    terminal = all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))
    return (
        terminal
        and os.environ.get("TERM", "dumb") != "dumb"
        and importlib.util.find_spec("textual") is not None
    )


def _leave(number: int, frame: object) -> None:
    """Any of these signals ends it as Ctrl-C does; another one does not keep it from cleaning up."""
    for other in supervise.ENDING:
        signal.signal(other, signal.SIG_IGN)
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


def _real(arguments: argparse.Namespace, folder: Path, say: Say) -> int:
    with _engines(arguments, folder, say) as (daemon_url, router_url):
        say(f"Sending {arguments.requests} requests ...")
        since_ns = time.time_ns()
        sent = asyncio.run(_load(router_url, arguments.mode, arguments.requests))
        failed = [result for result in sent if not result.ok]
        if failed:
            say(f"{len(failed)} of {len(sent)} requests failed, the first with: {failed[0].error[:300]}")
        served = len(sent) - len(failed)
        _show(daemon_url, since_ns, served, arguments, say, "real engines on CPU, tiny model")
    return 0


def _real_top(arguments: argparse.Namespace, folder: Path, say: Say) -> int:
    with _engines(arguments, folder, say) as (daemon_url, router_url):
        from kvscope.demo.load import sending

        with sending(router_url, conversations=arguments.mode == "bidirectional") as failed:
            code = _top(daemon_url)
        if failed.count:
            say(f"{failed.count} requests of the load failed")
        say("Ending the engines ...")
    return code


@contextlib.contextmanager
def _engines(arguments: argparse.Namespace, folder: Path, say: Say) -> Iterator[tuple[str, str]]:
    """Engines, a router and a daemon; yields the addresses of the daemon and the router."""
    missing = [name for name in ("torch", "vllm", "nixl") if importlib.util.find_spec(name) is None]
    if missing:
        raise KvscopeError(
            f"the demo runs real engines and {', '.join(missing)} is not installed: pip install "
            "'kvscope[all,engines]', or see it simulated with `kvscope demo --simulate`"
        )
    from kvscope.demo.deployment import deployment
    from kvscope.demo.engines import DECODE, PREFILL, EngineSpec

    rings = folder / "rings"
    environment = {"KVSCOPE_DIR": str(rings), "KVSCOPE_LABEL": "demo"}
    specs = [
        EngineSpec(name, role, arguments.mode, instrumented=True, environment=environment)
        for name, role in (("p", PREFILL), ("d", DECODE))
    ]
    say(f"Starting a prefill and a decode engine ({arguments.mode}), which takes about half a minute ...")
    with (
        collector(rings, folder) as daemon,
        deployment(specs, folder=folder, sequential=arguments.sequential, progress=_progress(say)) as running,
    ):
        say(f"Ready after {running.ready_s:.0f} s.")
        yield daemon.url, running.url


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


def _simulated(arguments: argparse.Namespace, folder: Path, say: Say) -> int:
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
    return 0


def _simulated_top(arguments: argparse.Namespace, folder: Path, say: Say) -> int:
    modes = (arguments.mode,) if arguments.mode else MODES
    say(f"SIMULATED: generated requests ({', '.join(modes)}); no engine runs.")
    plan = Plan(modes, 2 * len(modes), in_flight=40, recent=400, per_s=4.0, sequential=arguments.sequential)
    with traffic(plan, folder / "rings", folder), collector(folder / "rings", folder) as daemon:
        return _top(daemon.url)


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


# --- kvscope top ---------------------------------------------------------------------------------


def _top(url: str) -> int:
    """Show `kvscope top` until the user leaves it; the terminal is afterwards as it was. Returns its code."""
    before = termios.tcgetattr(sys.stdin)
    started: list[subprocess.Popen[bytes]] = []
    try:
        with supervise.signals_held():
            started.append(subprocess.Popen(_top_command(url, "--window", WINDOW)))
        return started[0].wait()
    finally:
        # From here on Ctrl-C would only leave things behind.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for process in started:
            if process.poll() is None:
                process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(TOP_GRACE_S)
                process.kill()
                process.wait()
            if process.returncode:
                print(LEAVE_SCREEN, end="", flush=True)
        with contextlib.suppress(termios.error):  # the terminal is gone
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _top_command(url: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "kvscope.cli", "top", "--url", url, *arguments]


def _top_text(url: str, since_ns: int, form: str, width: int = 100) -> str:
    """What `kvscope top` shows of the time since then, as `--once` or `--json`; why not, where it can't."""
    at_ns = time.time_ns()
    window = ("--window", f"{-(-(at_ns - since_ns) // 1_000_000)}ms", "--at", str(at_ns))
    command, environment = _top_command(url, form, *window), {**os.environ, "COLUMNS": str(width)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.stdout if done.returncode == 0 else done.stderr


# --- what it found -------------------------------------------------------------------------------


def _show(url: str, since_ns: int, expected: int, arguments: argparse.Namespace, say: Say, what: str) -> None:
    daemon = Daemon(url)
    slowest = _wait_for_rows(daemon, since_ns, expected)
    since = {"since": str(since_ns)}
    ttft, steps = daemon.query("ttft", "", since), daemon.query("steps", "", since)
    detail = daemon.request(slowest) if slowest else {}
    if arguments.json:
        found = {"data": what, "url": url, "ttft": ttft, "steps": steps, "slowest": detail}
        with contextlib.suppress(msgspec.DecodeError):
            found["top"] = msgspec.json.decode(_top_text(url, since_ns, "--json"))
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        for title, answer in ((f"Time to first token ({what})", ttft), ("Steps on the critical path", steps)):
            say(f"\n{title}")
            say(text.table([column["name"] for column in answer["columns"]], answer["rows"]))
        width = max(80, min(160, shutil.get_terminal_size((100, 24)).columns))
        if detail:
            say("\nThe slowest request")
            say(explain(detail, width, False).rstrip())
        say("\nThe fleet, as `kvscope top` shows it")
        say(_top_text(url, since_ns, "--once", width).rstrip())
    if arguments.stay:
        say(f"\nStill running. Look at it:  kvscope top --url {url}\nCtrl-C ends all of it.")
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
