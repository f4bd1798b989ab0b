"""How fast stored requests answer: each named question, percentiles by step over all, one request by id.

The store is SIMULATED: DuckDB writes requests of the last 24 hours with durations drawn per step, all tables
and columns as a daemon writes them, waterfalls too. Each question is then asked in a process of its own, by
the same code and with the same limits on DuckDB's memory and threads as a daemon's, several times.

    python bench/offline.py [--json] [--requests 10000000] [--keep FILE]

Ten million take about 10 minutes and 10 GB of disk, in the directory of FILE or else of temporary files.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb

from kvscope import lookup, query, schema, storefile
from kvscope.collectors.store import THREADS
from kvscope.steps import STEPS

MEMORY_MB = 512
"""What the daemon gives DuckDB by default."""
BATCH = 500_000
HOUR_NS = 3600 * 10**9
DAY_NS = 24 * HOUR_NS
LOOK_UPS = 9
"""Requests that are looked up, each in another part of the store."""
PAIRS = 8
"""Engines of each kind; every P works with every D."""

_MEAN_MS = {
    "prefill.frontend": 1.5,
    "prefill.queue": 12,
    "prefill.blocks": 1,
    "prefill.reuse_dispatch": 3,
    "prefill.reuse_post": 0.5,
    "prefill.reuse_wire": 4,
    "prefill.reuse_detect": 5,
    "prefill.reuse_report": 2,
    "prefill.reuse_promote": 1,
    "prefill.compute": 70,
    "registration.route": 6,
    "registration.admit": 8,
    "registration.blocks": 2,
    "registration.handshake": 40,
    "registration.notify": 5,
    "transfer.dispatch": 12,
    "transfer.post": 1,
    "transfer.wire": 15,
    "readiness.detect": 14,
    "readiness.signal": 6,
    "readiness.report": 4,
    "readiness.promote": 2,
    "readiness.admit": 10,
    "decode.first_step": 14,
    "unknown": 7,
}
_ONLY = {
    "readiness.signal": "connector = 'push'",
    "registration.notify": "connector = 'push' AND part(i, 1) < 0.2",
    "registration.route": "(connector IN ('pull', 'bidirectional') OR part(i, 1) < 0.2)",
    "registration.admit": "(connector IN ('pull', 'bidirectional') OR part(i, 1) < 0.2)",
    "registration.blocks": "(connector IN ('pull', 'bidirectional') OR part(i, 1) < 0.2)",
    "registration.handshake": "part(i, 2) < 0.01",
    "readiness.admit": "part(i, 3) < 0.2",
    "unknown": "part(i, 4) < 0.02",
}
"""Condition under which a step is on the critical path, beside what holds for its stage."""


def main() -> None:
    parser = argparse.ArgumentParser(description="questions of simulated stored requests: time and memory")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--requests", type=int, default=10_000_000, help="requests (default 10000000)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the store here, and reuse one there")
    parser.add_argument("--measure", metavar="NAME", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(_measure(arguments.keep, arguments.measure)))
        return
    with tempfile.TemporaryDirectory(prefix="kvscope-bench-") as work:
        path = arguments.keep or Path(work) / "offline.duckdb"
        if not path.exists():
            write_store(path, arguments.requests)
        found = _run(path)
    if arguments.json:
        print(json.dumps({"offline": found}, indent=2))
        return
    print(f"{found['requests']:,} requests over 24 h, SIMULATED; {found['store_bytes'] / 1e9:.1f} GB")
    print(
        f"{'question':24} {'rows':>6} {'first s':>8} {'median s':>8} {'CPU s':>7} {'peak MB':>8} approximate"
    )
    for one in found["measured"]:
        print(
            f"{one['name']:24} {one['rows']:>6} {one['first_s']:>8.3f} {one['seconds']:>8.3f} "
            f"{one['cpu_s']:>7.2f} {one['peak_mb']:>8} {'yes' if one['approximate'] else ''}"
        )


# --- the store ---------------------------------------------------------------------------------------


def write_store(path: Path, requests: int) -> None:
    """A store of so many simulated requests, the youngest of now, in the order in which they ended."""
    draft = path.with_name(path.name + ".part")
    draft.unlink(missing_ok=True)
    began = time.monotonic()
    with duckdb.connect(str(draft), config={"threads": THREADS, "memory_limit": "2GB"}) as database:
        database.execute("SET enable_progress_bar = false")
        storefile.create_tables(database)
        first_ns = time.time_ns() - DAY_NS
        database.execute(
            "CREATE TEMP MACRO part(i, k) AS (hash(i * 64 + k) >> 11)::DOUBLE / 9007199254740992;"
            "CREATE TEMP MACRO drawn_ns(i, k, mean_ms) AS "
            "(-ln(1 - part(i, k)) * mean_ms * 1e6 + 1000)::BIGINT"
        )
        for start in range(0, requests, BATCH):
            stop = min(start + BATCH, requests)
            batch = _batch_sql(start, stop, requests, first_ns)
            database.execute(f"CREATE TEMP TABLE batch AS {batch}")
            names = ", ".join(f'"{column.name}"' for column in schema.REQUESTS.columns)
            database.execute(f"INSERT INTO requests SELECT {names} FROM batch ORDER BY arrived_at_ns")
            for sql in _OTHER_TABLES:
                database.execute(sql)
            database.execute("DROP TABLE batch")
            if sys.stderr.isatty() or stop == requests:
                took_s = time.monotonic() - began
                print(f"\r{stop:,} of {requests:,} requests, {took_s:.0f} s", end="", file=sys.stderr)
        print(file=sys.stderr)
        database.execute(_ENGINES_SQL.format(started_ns=first_ns))
        database.execute("CHECKPOINT")
    draft.rename(path)


def _batch_sql(start: int, stop: int, requests: int, first_ns: int) -> str:
    """Rows of `requests` numbered from `start` to before `stop`."""
    in_ttft = [step for step in STEPS if step.in_ttft]
    local = ("prefill.frontend", "prefill.queue", "prefill.blocks", "prefill.compute")
    drawn = []
    for step in in_ttft:
        conditions = [_ONLY.get(step.name, "true")]
        if step.name.startswith("prefill.reuse_"):
            conditions.append("reuse_outcome = 'pulled'")
        elif step.name not in local:
            conditions.append("connector <> 'local'")
        mean = _MEAN_MS.get(step.name)
        value = "NULL::BIGINT" if mean is None else f"drawn_ns(i, {8 + step.code}, {mean})"
        drawn.append(f"CASE WHEN {' AND '.join(conditions)} THEN {value} END AS {step.column}")
    spent = [f"coalesce({step.column}, 0)" for step in in_ttft]
    entries = ", ".join(
        f"{{step: {step.code}::UTINYINT, from_ns: {' + '.join(spent[:place]) or 0}, ns: {step.column}, "
        f"critical: true, observed: {int(step.name == 'readiness.detect')}::UTINYINT, error_ns: 0::BIGINT}}"
        for place, step in enumerate(in_ttft)
    )
    columns = {column.name: f"NULL::{column.type}" for column in schema.REQUESTS.columns}
    finished = "(part(i, 5) >= 0.005)"
    columns |= {step.column: step.column for step in in_ttft}
    columns |= {
        "id": "hash(i + 1)",
        "client_id": "client",
        "arrived_at_ns": "arrived_at_ns",
        "label": "label",
        "model": "'simulated/' || (1 + i % 2)",
        "connector": "connector",
        "outcome": f"CASE WHEN {finished} THEN 'finished' "
        "WHEN i % 2 = 0 THEN 'aborted' ELSE 'incomplete' END",
        "current_step": f"CASE WHEN NOT {finished} THEN 'transfer.wire' END",
        "read_after_expiry": "part(i, 6) < 0.0001",
        "joined_by": "CASE WHEN connector = 'local' THEN 'single leg' "
        "WHEN part(i, 7) < 0.003 THEN 'unjoined' "
        "WHEN connector = 'push' THEN 'push match' ELSE 'remote id' END",
        "p_engine": f"CASE WHEN connector <> 'local' THEN 'sim-p' || (hash(i * 64) % {PAIRS}) END",
        "d_engine": f"'sim-d' || (hash(i * 64 + 1) % {PAIRS})",
        "p_request": "CASE WHEN connector <> 'local' "
        "THEN 'cmpl-' || client || '-0-' || left(md5(client), 8) END",
        "d_request": "'cmpl-' || client || '-0-' || right(md5(client), 8)",
        "d_legs": "1",
        "session": "CASE WHEN connector = 'bidirectional' THEN hash(i - i % 8) END",
        "turn": "CASE WHEN connector = 'bidirectional' THEN 1 + i % 8 END",
        "trace_id": "CASE WHEN i % 4 = 0 THEN md5('trace' || i) END",
        "prompt_tokens": "prompt_tokens",
        "output_tokens": "output_tokens",
        "p_cached_tokens": "CASE WHEN connector <> 'local' THEN prompt_tokens // 8 END",
        "d_cached_tokens": "prompt_tokens // 16",
        "transferred_tokens": "CASE WHEN connector <> 'local' THEN prompt_tokens - prompt_tokens // 16 END",
        "recomputed_tokens": "CASE WHEN part(i, 62) < 0.001 THEN prompt_tokens ELSE 0 END",
        "reuse_outcome": "reuse_outcome",
        "reuse_offered_tokens": "CASE WHEN reuse_outcome IS NOT NULL THEN prompt_tokens // 2 END",
        "reuse_pulled_tokens": "CASE reuse_outcome WHEN 'pulled' THEN prompt_tokens // 2 "
        "WHEN 'expired' THEN 0 END",
        "preemptions": "0",
        "transfer_bytes": "CASE WHEN connector <> 'local' THEN prompt_tokens * 131072 END",
        "transfer_descriptors": "CASE WHEN connector <> 'local' THEN prompt_tokens // 16 END",
        "ttft_ns": f"CASE WHEN {finished} THEN {' + '.join(spent)} END",
        "decode_generate_ns": f"CASE WHEN {finished} THEN drawn_ns(i, 40, 12) * output_tokens END",
        "lead_ns": "CASE connector WHEN 'push' THEN drawn_ns(i, 41, 40) - 10000000 "
        "WHEN 'local' THEN NULL ELSE -drawn_ns(i, 41, 20) END",
        "best_rate_bytes_per_s": "2e10",
        "wire_lower_ns": "transfer_wire_ns // 2",
        "wire_upper_ns": "transfer_wire_ns + coalesce(readiness_detect_ns, 0)",
        "clock_error_ns": "0",
        "clamped_ns": "CASE WHEN part(i, 63) < 0.001 THEN 1000 ELSE 0 END",
        "waterfall": f"list_filter([{entries}], lambda entry: entry.ns > 0)",
    }
    selected = ", ".join(f"({value})::{schema_type(name)} AS {name}" for name, value in columns.items())
    return (
        f"WITH numbered AS (SELECT range AS i, {first_ns} + range * {DAY_NS // requests} "
        f"+ (hash(range) % 100000000)::BIGINT AS arrived_at_ns FROM range({start}, {stop})), "
        "kinds AS (SELECT *, md5(i::VARCHAR) AS client, "
        "CASE WHEN part(i, 50) < 0.05 THEN 'benchmark' ELSE '' END AS label, "
        "CASE WHEN i % 64 < 8 THEN 'bidirectional' WHEN part(i, 51) < 0.05 THEN 'local' "
        "WHEN part(i, 51) < 0.6 THEN 'push' ELSE 'pull' END AS connector, "
        "100 + (part(i, 52) * part(i, 53) * 16000)::BIGINT AS prompt_tokens, "
        "1 + drawn_ns(i, 54, 100) // 1000000 AS output_tokens FROM numbered), "
        "reused AS (SELECT *, CASE WHEN connector = 'bidirectional' AND i % 8 > 0 THEN "
        "CASE WHEN part(i, 55) < 0.7 THEN 'pulled' ELSE 'expired' END END AS reuse_outcome FROM kinds), "
        f"drawn AS (SELECT *, {', '.join(drawn)} FROM reused) SELECT {selected} FROM drawn"
    )


def schema_type(name: str) -> str:
    return next(column.type for column in schema.REQUESTS.columns if column.name == name)


_OTHER_TABLES = (
    """INSERT INTO transfers
    SELECT
        hash(id), id, arrived_at_ns + ttft_ns // 2, CASE connector WHEN 'push' THEN 'WRITE' ELSE 'READ' END,
        CASE connector WHEN 'push' THEN p_engine ELSE d_engine END, 0,
        CASE connector WHEN 'push' THEN d_engine ELSE p_engine END,
        transfer_bytes, transfer_descriptors, transfer_post_ns, wire_lower_ns, wire_upper_ns,
        transfer_post_ns // 1000, wire_upper_ns // 1000, 'done'
    FROM batch WHERE transfer_bytes IS NOT NULL ORDER BY arrived_at_ns""",
    """INSERT INTO leases
    SELECT
        hash(id + 1), id, p_engine, 0, p_request, arrived_at_ns + ttft_ns // 2,
        arrived_at_ns + ttft_ns // 2 + 30000000000, 0, arrived_at_ns + ttft_ns, 'released'
    FROM batch WHERE p_engine IS NOT NULL ORDER BY arrived_at_ns""",
    """INSERT INTO handshakes
    SELECT hash(id + 2), d_engine, 0, p_engine, arrived_at_ns, registration_handshake_ns, true, NULL
    FROM batch WHERE registration_handshake_ns > 0 AND p_engine IS NOT NULL ORDER BY arrived_at_ns""",
    """INSERT INTO failures
    SELECT hash(id + 3), arrived_at_ns, d_engine, 'worker', 0, 'nixl', 'transfer_failed', p_engine, id
    FROM batch WHERE recomputed_tokens > 0 ORDER BY arrived_at_ns""",
)
_ENGINES_SQL = f"""INSERT INTO engines
    SELECT
        hash(name || source), name || source, name, source, 0, 'simulated', 1, {{started_ns}}, '',
        'simulated', [], '{{{{"model": "simulated/1"}}}}', 1, 1000,
        CASE WHEN name = 'sim-p1' THEN 5 ELSE 0 END,
        0, 0, 'recording', ''
    FROM (SELECT unnest(['sim-p', 'sim-d']) || unnest(range({PAIRS})) AS name),
        (SELECT unnest(['scheduler', 'worker']) AS source)"""


# --- the questions -----------------------------------------------------------------------------------


def _run(path: Path) -> dict[str, Any]:
    with _opened(path) as database:
        ((requests,),) = database.execute("SELECT count(*) FROM requests").fetchall()
    names = [f"{name} (hour)" for name in query.questions()]
    names += [f"{name} (all)" for name in query.questions()]
    names += [f"{_LOOK_UP}{column}" for column in ("id", *_ID_TEXTS)]
    measured = []
    for name in names:
        command = [sys.executable, __file__, "--measure", name, "--keep", str(path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            continue
        measured.append(json.loads(done.stdout))
    return {
        "load": "simulated",
        "requests": requests,
        "store_bytes": path.stat().st_size,
        "memory_limit_mb": MEMORY_MB,
        "measured": measured,
    }


_LOOK_UP = "request by "
_ID_TEXTS = ("client_id", "p_request", "d_request", "trace_id")


def _opened(path: Path) -> duckdb.DuckDBPyConnection:
    config: dict[str, Any] = {"threads": THREADS, "memory_limit": f"{MEMORY_MB}MB"}
    return duckdb.connect(str(path), read_only=True, config=config)


def _measure(path: Path, name: str) -> dict[str, Any]:
    """Ask some times in this process: the first is as of a store that was just opened."""
    with _opened(path) as database:
        ((last_ns,),) = database.execute("SELECT max(arrived_at_ns) FROM requests").fetchall()
        before_mb = _peak_mb()
        ask = _asker(database, name, last_ns)
        seconds, cpu = [], []
        for _ in range(LOOK_UPS if name.startswith(_LOOK_UP) else 3):
            wall, used = time.perf_counter(), time.process_time()
            rows, approximate = ask()
            seconds.append(round(time.perf_counter() - wall, 4))
            cpu.append(round(time.process_time() - used, 3))
    return {
        "name": name,
        "rows": rows,
        "first_s": seconds[0],
        "seconds": statistics.median(seconds),
        "cpu_s": min(cpu),
        "before_mb": before_mb,
        "peak_mb": _peak_mb(),
        "approximate": approximate,
    }


def _asker(database: duckdb.DuckDBPyConnection, name: str, last_ns: int) -> Any:
    limits = query.Limits(seconds=300.0)
    question, _, span = name.partition(" (")
    if question in query.questions():
        window = {"since": last_ns - HOUR_NS, "until": last_ns} if span == "hour)" else {}
        if "since" not in query.questions()[question].parameters:
            window = {}

        def ask() -> tuple[int, bool]:
            found = query.ask(database.cursor(), question, window, limits)
            return len(found.rows), bool(found.approximate)

        return ask
    column = name.rpartition(" ")[2]
    ids = _some_ids(database, column)

    def look_up() -> tuple[int, bool]:
        lookup.look_up(database.cursor(), [], next(ids), limits.seconds)
        return 1, False

    return look_up


def _some_ids(database: duckdb.DuckDBPyConnection, column: str) -> Iterator[str]:
    """Of requests from all over the store."""
    ((rows,),) = database.execute("SELECT count(*) FROM requests").fetchall()
    for part in range(1, LOOK_UPS + 1):
        ((text,),) = database.execute(
            f"SELECT {column}::VARCHAR FROM requests WHERE rowid >= {rows * part // (LOOK_UPS + 1)} "
            f"AND {column} IS NOT NULL LIMIT 1"
        ).fetchall()
        yield text


def _peak_mb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
