"""What `kvscope top` costs and how quickly it answers keys, on a SIMULATED fleet under load.

    python bench/top.py [--in-flight 1000] [--recent 10000] [--per-s 33] [--seconds 30] [--json]

The real daemon collects rings into which another process records (kvscope.demo.traffic), and the real
program runs in a terminal of its own, shows anew every 500 ms and is read as fast as it writes. CPU is user
and system time of the whole process, in per cent of one core. The daemon's is taken without a viewer first.
From key to screen: the time from a key to the first and to the last byte of the output that follows it, of
keys pressed just after the screen was shown anew, so that the next showing is not taken for the answer.
Escape is left out: a program waits for what may follow it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvscope.client import Daemon
from kvscope.demo.collector import Collector, collector
from kvscope.demo.terminal import Terminal
from kvscope.demo.traffic import Plan, traffic
from kvscope.ring import default_directory

SIZES = ((200, 55), (120, 40))
REFRESH = "500ms"
PAGES = {"Fleet": "1", "Requests": "2"}
DOWN, ESCAPE = "\x1b[B", "\x1b"
KEYS = {"down": DOWN, "s": "s", "1": "1", "2": "2", "/": "/"}
SCRIPT = ("down", "down", "s", "1", "2", "/")
"""Pressed on the Requests page, again and again."""
PRESSES = 36
SETTLE_S = 3.0
QUIET_S = 0.04
"""An output is over when nothing has come for so long."""
CATCH_UP_S = 300


def measure(plan: Plan, seconds: float) -> dict[str, Any]:
    where = default_directory().parent
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir=where if where.is_dir() else None))
    try:
        with traffic(plan, folder / "rings", folder), collector(folder / "rings", folder) as daemon:
            catch_up(daemon, plan)
            alone = cpu_percent([daemon.pid], seconds)[0]
            found: dict[str, Any] = {"daemon_alone_percent": alone, "sizes": {}}
            for columns, rows in SIZES:
                with top(daemon.url, columns, rows) as terminal:
                    found["sizes"][f"{columns}x{rows}"] = {
                        "pages": {
                            page: watch(terminal, daemon, key, seconds, alone) for page, key in PAGES.items()
                        },
                        "keys": answer_times(terminal),
                    }
            found |= counts(daemon)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {**found, "per_s": plan.per_s, "seconds": seconds, "load": round(os.getloadavg()[0], 1)}


def counts(daemon: Collector) -> dict[str, int]:
    client = Daemon(daemon.url)
    status = client.status()
    stored = client.query("", "SELECT count(*) FROM requests", {})["rows"][0][0]
    client.close()
    lost = sum(ring["lost"] for ring in status["rings"])
    return {"in_flight": status["pipeline"]["live"], "stored": stored, "lost": lost}


def catch_up(daemon: Collector, plan: Plan) -> None:
    """Wait until the daemon has read the past."""
    deadline = time.monotonic() + CATCH_UP_S
    while True:
        found = counts(daemon)
        if found["stored"] >= plan.recent and found["in_flight"] < 1.3 * plan.in_flight:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"the daemon did not catch up in {CATCH_UP_S} s: {found}")
        time.sleep(1)


@contextlib.contextmanager
def top(url: str, columns: int, rows: int) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "kvscope.cli", "top", "--url", url, "--refresh", REFRESH]
    terminal = Terminal(command, columns, rows)
    try:
        terminal.wait_for("TTFT", 30)
        yield terminal
    finally:
        terminal.close()


def watch(terminal: Terminal, daemon: Collector, key: str, seconds: float, alone: float) -> dict[str, Any]:
    """CPU while one page is shown."""
    terminal.press(key)
    time.sleep(SETTLE_S)
    chunks = len(terminal.chunks)
    ours, theirs = cpu_percent([terminal.process.pid, daemon.pid], seconds)
    came = terminal.chunks[chunks:]
    times = [at for at, _ in came]
    shown = sum(at - before > QUIET_S * 1e9 for before, at in itertools.pairwise(times))
    return {
        "shown_per_s": round(shown / seconds, 1),
        "cpu_percent": ours,
        "daemon_percent": theirs,
        "daemon_more_percent": round(theirs - alone, 1),
        "bytes_per_s": round(sum(len(data) for _, data in came) / seconds),
    }


def answer_times(terminal: Terminal) -> dict[str, Any]:
    """From key to screen, ms, of all keys and by key."""
    terminal.press(KEYS["2"])
    time.sleep(SETTLE_S)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in KEYS}
    unanswered = 0
    for number in range(PRESSES):
        name = SCRIPT[number % len(SCRIPT)]
        shown = terminal.burst(time.monotonic_ns(), QUIET_S, 2.0)
        if shown is None:
            time.sleep(0.1)  # a page that had nothing new to show
        pressed_ns = terminal.press(KEYS[name])
        answer = terminal.burst(pressed_ns, QUIET_S, 1.0)
        if answer is None:
            unanswered += 1
        else:
            first, last = ((at - pressed_ns) / 1e6 for at in answer)
            times[name].append((first, last))
        if name == "/":
            terminal.press(ESCAPE)
            time.sleep(0.5)
    return {
        "presses": PRESSES,
        "unanswered": unanswered,
        **spread([both for found in times.values() for both in found]),
        "by_key": {name: spread(found) for name, found in times.items() if found},
    }


def spread(times: list[tuple[float, float]]) -> dict[str, float]:
    """Median and maximum of (first, last)."""
    return {
        f"{end}_{what}_ms": round(of([both[i] for both in times]), 1)
        for i, end in enumerate(("first", "last"))
        for what, of in (("median", statistics.median), ("max", max))
        if times
    }


def cpu_percent(pids: list[int], seconds: float) -> list[float]:
    """Per cent of a core that each process uses, all its threads, user and system."""
    begin, used = time.monotonic(), [cpu_s(pid) for pid in pids]
    time.sleep(seconds)
    took = time.monotonic() - begin
    return [round((cpu_s(pid) - before) / took * 100, 1) for pid, before in zip(pids, used, strict=True)]


def cpu_s(pid: int) -> float:
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def show(found: dict[str, Any]) -> None:
    print(
        f"top, simulated fleet: {found['in_flight']:,} in flight, {found['stored']:,} stored, "
        f"{found['per_s']:g} requests/s, every {REFRESH}; load average {found['load']}, {found['lost']} lost"
    )
    print(f"  the daemon without a viewer: {found['daemon_alone_percent']} % of a core")
    print(
        f"  {'terminal':<10}{'page':<10}{'CPU % of a core':>16}{'daemon, more':>14}{'shown/s':>9}{'KB/s':>7}"
    )
    for size, rows in found["sizes"].items():
        for page, row in rows["pages"].items():
            print(
                f"  {size:<10}{page:<10}{row['cpu_percent']:>16.1f}{row['daemon_more_percent']:>14.1f}"
                f"{row['shown_per_s']:>9.1f}{row['bytes_per_s'] / 1e3:>7.1f}"
            )
    print("  from key to screen, ms: first byte and last byte, each median / max")
    print(f"  {'terminal':<10}{'key':<10}{'presses':>8}{'first':>16}{'last':>16}")
    for size, rows in found["sizes"].items():
        keys = rows["keys"]
        for name, row in {"all": keys, **keys["by_key"]}.items():
            if "last_max_ms" in row:
                presses = f"{keys['presses']}" if name == "all" else ""
                first, last = (
                    f"{row[f'{end}_median_ms']} / {row[f'{end}_max_ms']}" for end in ("first", "last")
                )
                print(f"  {size:<10}{name:<10}{presses:>8}{first:>16}{last:>16}")
        if keys["unanswered"]:
            print(f"  {size:<10}{keys['unanswered']} presses without an answer in a second")


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU and answer times of `kvscope top` on a simulated load")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--in-flight", type=int, default=1000, help="requests in flight (default 1000)")
    parser.add_argument("--recent", type=int, default=10_000, help="requests that are over (default 10000)")
    parser.add_argument("--per-s", type=float, default=33, help="requests that arrive a second (default 33)")
    parser.add_argument(
        "--seconds", type=float, default=30, help="how long each CPU figure takes (default 30)"
    )
    arguments = parser.parse_args()
    plan = Plan(in_flight=arguments.in_flight, recent=arguments.recent, per_s=arguments.per_s)
    found = measure(plan, arguments.seconds)
    if arguments.json:
        print(json.dumps({"top": found}, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
