"""What a scrape of `/metrics` costs at 64 engines, and what counting costs per stored request.

The load is SIMULATED: rows made by hand, 32 prefill × 32 decode engines, every pair. CPU seconds of this
process alone, so that other work on the machine matters little.

    python bench/scrape.py [--json]
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from kvscope.collectors.aggregates import Aggregates
from kvscope.collectors.exposition import Exposition, Now
from kvscope.schema import BY_NAME
from kvscope.steps import STEPS

ENGINES = 32
"""Of each kind."""
MS = 10**6
FORMATS = {"text": "text/plain", "openmetrics": "application/openmetrics-text;version=1.0.0"}


def main() -> None:
    parser = argparse.ArgumentParser(description="cost of a scrape at 64 engines, on simulated rows")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args()
    found = _run()
    if arguments.json:
        print(json.dumps({"scrape": found}, indent=2))
        return
    print(
        f"scrape at {2 * ENGINES} engines, every pair, simulated: {found['series']:,} series; "
        f"text {found['text_cpu_ms']} ms CPU, {found['text_bytes'] / 1e6:.1f} MB; "
        f"OpenMetrics {found['openmetrics_cpu_ms']} ms, {found['openmetrics_bytes'] / 1e6:.1f} MB"
    )
    print(
        f"  the counts are locked for {found['locked_ms']} ms of that; "
        f"counting a stored request takes {found['count_us_per_request']} us"
    )


def _run() -> dict[str, Any]:
    names = [f"{role}-{i}" for role in "pd" for i in range(ENGINES)]
    engines = [
        _row(
            "engines", ring=name, engine=name, source="scheduler", state="recording", started_at_ns=1, read=1
        )
        for name in names
    ]
    requests = [
        _request(number, f"p-{number % ENGINES}", f"d-{number // ENGINES % ENGINES}")
        for number in range(ENGINES * ENGINES)
    ]
    leases = [_row("leases", engine=name, end="released", renewals=1) for name in names[:ENGINES]]
    aggregates = Aggregates()
    aggregates.add({"engines": engines, "leases": leases, "requests": requests}, 0.01)
    count_s = _cpu_s(lambda: aggregates.add({"requests": requests}, 0.01))
    now = _now(names)
    found: dict[str, Any] = {
        "series": 0,
        "count_us_per_request": round(count_s / len(requests) * 1e6, 1),
        "locked_ms": round(_cpu_s(lambda: aggregates.snapshot(names)) * 1e3, 1),
    }
    for name, accept in FORMATS.items():
        texts: list[bytes] = []

        def scrape(accept: str = accept, texts: list[bytes] = texts) -> None:
            texts.append(Exposition(aggregates, lambda: now).answer(accept)[0])

        found[f"{name}_cpu_ms"] = round(_cpu_s(scrape) * 1e3)
        found[f"{name}_bytes"] = len(texts[0])
        found["series"] = sum(not line.startswith(b"#") for line in texts[0].splitlines())
    return found


def _cpu_s(work: Callable[[], object]) -> float:
    """The least of five."""
    times = []
    for _ in range(5):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return min(times)


def _row(table: str, **values: Any) -> tuple[Any, ...]:
    return tuple(values.get(column.name) for column in BY_NAME[table].columns)


def _request(number: int, p_engine: str, d_engine: str) -> tuple[Any, ...]:
    steps = [step for step in STEPS if not step.name.startswith("prefill.reuse")]
    return _row(
        "requests",
        id=number,
        label="",
        model="model",
        connector="push",
        outcome="finished",
        joined_by="remote id",
        p_engine=p_engine,
        d_engine=d_engine,
        prompt_tokens=1000,
        output_tokens=100,
        p_cached_tokens=0,
        transfer_bytes=10**8,
        ttft_ns=MS * sum(step.in_ttft for step in steps) * (1 + number % 200),
        lead_ns=(number % 200 - 100) * MS,
        **{step.column: MS * (1 + number % 200) for step in steps},
    )


def _now(rings: list[str]) -> Now:
    status = {
        "version": "0",
        "problems": [],
        "rings": [{"ring": ring} for ring in rings],
        "unreadable": [],
        "store": {"bytes": 0, "rows_refused": 0, "rows_queued": 0, "queue_limit": 1, "error": ""},
        "pipeline": dict.fromkeys(("live", "faults", "untold", "cleanup_requests", "stragglers"), 0),
        "samples": {"dropped": 0, "faults": {}},
    }
    return Now(status, Counter(), Counter(), [])


if __name__ == "__main__":
    main()
