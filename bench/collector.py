"""What the collector sustains on one core, from ring to committed row, and bytes per request in the store.

The load is SIMULATED (kvscope.demo.simulate). The rings are written first; then one process, pinned to
one CPU, reads them into an empty store, and the clock stops when the last row is committed. On a machine
with other work the figure per CPU second is the one to compare: it counts all threads, DuckDB's too.

    python bench/collector.py [--json] [--requests 20000] [--profile]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

from kvscope.collectors.daemon import Collector
from kvscope.collectors.rings import Rings
from kvscope.collectors.store import Store
from kvscope.demo.simulate import Fleet


def main() -> None:
    parser = argparse.ArgumentParser(description="events/s from ring to committed row, on a simulated load")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--requests", type=int, default=20000, help="requests (default 20000)")
    parser.add_argument("--profile", action="store_true", help="where the collecting thread's time went")
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="kvscope-bench-"))
    try:
        found = _run(work, arguments.requests, arguments.profile)
    finally:
        shutil.rmtree(work)
    if arguments.json:
        print(json.dumps({"collector": found}, indent=2))
        return
    print(
        f"collector, {found['load']}: {found['events_per_cpu_s']:,} events per CPU second, "
        f"{found['events_per_wall_s']:,} per second on one core, "
        f"{found['store_bytes_per_request']:.0f} bytes per request in the store"
    )
    print(
        f"  {found['events']:,} events of {found['requests']:,} requests, {found['lost']} lost; "
        f"commit {found['commit_ms_p50']} ms at the median, {found['commit_ms_max']} at most"
    )


def _run(work: Path, requests: int, profile: bool) -> dict[str, Any]:
    rings_dir = work / "rings"
    slots = 64 + 12 * (requests // 2)
    fleets = [Fleet(rings_dir, mode, slots, seed) for seed, mode in enumerate(("push", "pull"))]
    for i in range(requests):
        fleets[i % 2].request()
    written = sum(fleet.events for fleet in fleets)

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    store = Store(work / "store.duckdb")
    rings = Rings(rings_dir, store)
    collector = Collector(rings, store)
    began = time.process_time()
    collector.scan()
    open_s = time.process_time() - began
    profiler = cProfile.Profile()
    cpu, wall = time.process_time(), time.perf_counter()
    if profile:
        profiler.enable()
    while collector.step():
        while not store.wait_for_room(1.0):
            pass
    ticket = collector.finish(everything=True)
    profiler.disable()
    assert store.wait_committed(ticket, 600)
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall

    slots_read, lost = (sum(getattr(t, name) for t in rings.tails.values()) for name in ("read", "lost"))
    counters = collector.pipeline.counters()
    status = store.status()
    for fleet in fleets:
        fleet.close()
    store.close()
    with_rows = Store(work / "store.duckdb")
    size = with_rows.status()["bytes"]
    rows = {}
    with with_rows.cursor() as cursor:
        for (name,) in cursor.execute("SELECT table_name FROM duckdb_tables()").fetchall():
            rows[name] = cursor.execute(f"SELECT count(*) FROM {name}").fetchall()[0][0]
    with_rows.close()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(30)
    return {
        "load": "simulated, half push and half pull",
        "requests": requests,
        "events": written,
        "events_per_request": round(written / requests, 1),
        "slots_read": slots_read,
        "lost": lost,
        "joined": counters["joined"],
        "rows": rows,
        "events_per_cpu_s": round(written / cpu),
        "events_per_wall_s": round(written / wall),
        "open_cpu_ms_per_ring": round(open_s / len(rings.tails) * 1e3, 1),
        "ring_slots": slots,
        "cpu_s": round(cpu, 2),
        "wall_s": round(wall, 2),
        "cpu_us_per_event": round(cpu / written * 1e6, 2),
        "store_bytes_per_request": round(size / requests, 1),
        "commit_ms_p50": status["commit_ms_p50"],
        "commit_ms_max": status["commit_ms_max"],
    }


if __name__ == "__main__":
    main()
