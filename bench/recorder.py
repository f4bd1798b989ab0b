"""Nanoseconds to record one event, beside an empty call in the same run.

    python bench/recorder.py [--json] [--seconds N]

`best` and `median` are of blocks of 1000 calls one after the other, `p99` of single calls, `cold` is the
median of a call after 2 ms of sleep (an engine's step), `busy` the median block beside a thread that never
stops running Python.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvscope import events
from kvscope.ring import About, RingWriter, default_directory

BLOCK = 1000
COLUMNS = ("best", "median", "p99", "cold", "busy")


def empty(kind: int, key: int, *args: int) -> None:
    """What a call costs that does nothing."""


def block_ns(call: Callable[..., object]) -> float:
    """Per call, over one block. The clock is read twice: what else runs on the core counts too."""
    start = time.perf_counter_ns()
    for _ in range(BLOCK):
        call(events.TRANSFER_DONE, 1234567890123456789, 17, 1, 2, 3, 4, 5, 6, 7)
    return (time.perf_counter_ns() - start) / BLOCK


def single_ns(call: Callable[..., object]) -> int:
    start = time.perf_counter_ns()
    call(events.TRANSFER_DONE, 1234567890123456789, 17, 1, 2, 3, 4, 5, 6, 7)
    return time.perf_counter_ns() - start


def cold_ns(call: Callable[..., object]) -> int:
    time.sleep(0.002)
    return single_ns(call)


def busy_blocks(call: Callable[..., object], seconds: float) -> list[float]:
    """Blocks beside a thread that gives the GIL away only when it must.

    The two take turns of a switch interval each, so that the median is of blocks without a turn of the
    other. A call that let go of the GIL would pay 5 ms each time, and show it.
    """
    stop = threading.Event()

    def spin() -> None:
        n = 0
        while not stop.is_set():
            n = (n * 31 + 7) % 1000003

    thread = threading.Thread(target=spin, daemon=True)
    thread.start()
    try:
        return repeat(lambda: block_ns(call), seconds)
    finally:
        stop.set()
        thread.join()


def repeat(measure: Callable[[], float], seconds: float) -> list[float]:
    end = time.monotonic() + seconds
    found = [measure()]
    while time.monotonic() < end:
        found.append(measure())
    return found


def measure(call: Callable[..., object], seconds: float) -> dict[str, float]:
    part = seconds / 4
    blocks = repeat(lambda: block_ns(call), part)
    singles = sorted(repeat(lambda: single_ns(call), part))
    return {
        "best": min(blocks),
        "median": statistics.median(blocks),
        "p99": singles[len(singles) * 99 // 100],
        "cold": statistics.median(repeat(lambda: cold_ns(call), part)),
        "busy": statistics.median(busy_blocks(call, part)),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="Nanoseconds to record one event.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--seconds", type=float, default=8.0, help="in all, about (default 8)")
    args = parser.parse_args()
    where = default_directory().parent
    with tempfile.TemporaryDirectory(dir=where if where.is_dir() else None) as directory:
        writer = RingWriter(Path(directory), About("bench", "worker", label="bench"))
        calls: dict[str, Callable[..., object]] = {
            "empty call": empty,
            "record": writer.record,
            "text, known": lambda *_: writer.text("bench-request-0123456789"),
        }
        found = {name: measure(call, args.seconds / len(calls)) for name, call in calls.items()}
        writer.close()
    if args.json:
        print(json.dumps({"recorder_ns": found, "python": sys.version.split()[0]}, indent=2))
        return 0
    print(f"{'ns per call':<14}" + "".join(f"{name:>10}" for name in COLUMNS))
    for name, row in found.items():
        print(f"{name:<14}" + "".join(f"{row[column]:>10,.0f}" for column in COLUMNS))
    return 0


if __name__ == "__main__":
    sys.exit(main())
