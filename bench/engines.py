"""TTFT and TPOT of instrumented over stock engines, on real ones, paired.

    python bench/engines.py [--mode push|pull] [--pairs 100] [--json]

A stock P and D and an instrumented P and D run at once, each pair behind a router of its own, while the
daemon collects from the instrumented ones. Each prompt goes to both, one request at a time, in random order:
what a pair of requests shares (the prompt, the machine's mood) cancels in the ratio. Nothing is dropped; the
interval is a bootstrap of the median ratio. Both P share one core and both D another: a machine with more
cores, and nothing else to do, gives a narrower interval, not another ratio.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from kvscope.client import Daemon
from kvscope.demo.collector import collector
from kvscope.demo.deployment import router, warm_up
from kvscope.demo.engines import DECODE, PREFILL, PULL, PUSH, EngineError, EngineSpec, engines
from kvscope.demo.load import Result, make_prompt, send
from kvscope.demo.model import make_model
from kvscope.ring import default_directory

PROMPT_TOKENS = (64, 200, 450, 900)
OUTPUT_TOKENS = 16
RESAMPLES = 2000
STOCK, OURS = 0, 1


def measure(mode: str, pairs: int) -> dict[str, Any]:
    """Start two pairs of engines and compare them."""
    where = default_directory().parent
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir=where if where.is_dir() else None))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        daemon = stack.enter_context(collector(folder / "rings", folder))
        rings = {"KVSCOPE_DIR": str(folder / "rings"), "KVSCOPE_LABEL": "bench"}
        stock = [EngineSpec("stock-p", PREFILL, mode), EngineSpec("stock-d", DECODE, mode)]
        ours = [
            dataclasses.replace(
                spec, name=spec.name.removeprefix("stock-"), instrumented=True, environment=rings
            )
            for spec in stock
        ]
        started = stack.enter_context(engines([*stock, *ours], make_model(folder / "model"), folder))
        urls = []
        for specs in (stock, ours):
            urls.append(stack.enter_context(router([started[spec.name] for spec in specs], folder)))
            warm_up(urls[-1], mode, 2)
        results = asyncio.run(send_pairs(urls, pairs))
        stored = Daemon(daemon.url).query("", "SELECT count(*) FROM requests", {})["rows"][0][0]
        load = os.getloadavg()[0]
    return {
        "pairs": pairs,
        "ttft": compare([(a.ttft_ns, b.ttft_ns) for a, b in results]),
        "tpot": compare([(a.tpot_ns, b.tpot_ns) for a, b in results]),
        "same_output": all(a.output_ids == b.output_ids for a, b in results),
        "stored_meanwhile": stored,
        "load": round(load, 1),
    }


async def send_pairs(urls: Sequence[str], pairs: int) -> list[tuple[Result, Result]]:
    """The same prompts to both, in turn; results as (stock, ours)."""
    rng = random.Random(1)
    found = []
    async with httpx.AsyncClient(timeout=120, trust_env=False) as client:
        for number in range(pairs):
            prompt = make_prompt(PROMPT_TOKENS[number % len(PROMPT_TOKENS)], rng)
            both = {}
            for side in rng.sample((STOCK, OURS), 2):
                both[side] = result = await send(client, urls[side], prompt, OUTPUT_TOKENS)
                if not result.ok:
                    raise EngineError(f"a request failed: {result.status} {result.error[:500]}")
            found.append((both[STOCK], both[OURS]))
    return found


def compare(times: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Of (stock, ours) in ns: medians, the median ratio with its 95 % interval, and the ratios' quartiles."""
    ratios = [ours / stock for stock, ours in times]
    rng = random.Random(1)
    medians = [statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES)]
    bounds = statistics.quantiles(medians, n=40)
    low, _, high = statistics.quantiles(ratios, n=4)
    return {
        "stock_ms": round(statistics.median(stock for stock, _ in times) / 1e6, 2),
        "ours_ms": round(statistics.median(ours for _, ours in times) / 1e6, 2),
        "ratio": round(statistics.median(ratios), 4),
        "ci95": [round(bounds[0], 4), round(bounds[-1], 4)],
        "quartiles": [round(low, 3), round(high, 3)],
    }


def show(mode: str, found: dict[str, Any]) -> None:
    same = "the same" if found["same_output"] else "DIFFERENT"
    print(
        f"{mode}: {found['pairs']} pairs, outputs {same}, load average {found['load']}, "
        f"{found['stored_meanwhile']} requests collected meanwhile"
    )
    print(f"  {'':<6}{'stock ms':>10}{'ours ms':>10}{'ratio':>8}  {'95 % interval':<16}{'quartiles':<14}")
    for name in ("ttft", "tpot"):
        row = found[name]
        (low, high), (first, third) = row["ci95"], row["quartiles"]
        print(
            f"  {name.upper():<6}{row['stock_ms']:>10.2f}{row['ours_ms']:>10.2f}{row['ratio']:>8.3f}"
            f"  {f'{low:.3f} to {high:.3f}':<16}{f'{first:.2f} to {third:.2f}':<14}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description="TTFT and TPOT of instrumented over stock engines.")
    parser.add_argument("--mode", choices=(PUSH, PULL), help="one mode only (default both)")
    parser.add_argument("--pairs", type=int, default=100, help="pairs of requests per mode (default 100)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    if arguments.pairs < 2:
        parser.error("--pairs: 2 or more")
    found = {}
    for mode in [arguments.mode] if arguments.mode else [PUSH, PULL]:
        found[mode] = measure(mode, arguments.pairs)
        if not arguments.json:
            show(mode, found[mode])
    if arguments.json:
        print(json.dumps({"engines": found}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
