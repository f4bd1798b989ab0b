"""Hand-made rows of all shapes for the tests of queries, explanations and commands. Times in ms here."""

from __future__ import annotations

from typing import Any

import duckdb

from kvscope import __version__, schema
from kvscope.steps import BY_NAME, OBSERVED, STEPS

T0_NS = 1_795_967_649_123_000_000  # 2026-11-29 15:54:09.123 UTC

Row = dict[str, Any]


def waterfall(*intervals: tuple[Any, ...]) -> list[Row]:
    """From (step, from ms, to ms[, "overlapped"][, observed][, error ms])."""
    entries = []
    for step, start, end, *rest in intervals:
        observed = next((r for r in rest if r in OBSERVED), "hook")
        error = next((r for r in rest if isinstance(r, float)), 0.0)
        critical = "overlapped" not in rest and BY_NAME[step].in_ttft
        entries.append(
            {
                "step": BY_NAME[step].code,
                "from_ns": round(start * 1e6),
                "ns": round(end * 1e6) - round(start * 1e6),
                "critical": critical,
                "observed": OBSERVED.index(observed),
                "error_ns": round(error * 1e6),
            }
        )
    return entries


def request(number: int, *intervals: tuple[Any, ...], first_token: bool = True, **columns: Any) -> Row:
    """A row of `requests`; its steps and TTFT follow from the waterfall."""
    entries = waterfall(*intervals)
    row: Row = dict.fromkeys(c.name for c in schema.REQUESTS.columns)
    for entry in entries:
        step = STEPS[entry["step"]]
        if entry["critical"] or not step.in_ttft:
            row[step.column] = (row[step.column] or 0) + entry["ns"]
    row |= {
        "id": 2**63 + number,
        "client_id": f"req-{number:04d}-{number * 7919 % 9973:04d}",
        "arrived_at_ns": T0_NS + number * 10**9,
        "label": "",
        "model": "tiny",
        "outcome": "finished",
        "joined_by": "remote id",
        "p_engine": "engine-p",
        "d_engine": "engine-d",
        "p_request": f"cmpl-req-{number:04d}-0-aaaa{number:04x}",
        "d_request": f"cmpl-req-{number:04d}-0-bbbb{number:04x}",
        "d_legs": 1,
        "prompt_tokens": 512,
        "output_tokens": 64,
        "p_cached_tokens": 0,
        "d_cached_tokens": 0,
        "transferred_tokens": 512,
        "recomputed_tokens": 0,
        "preemptions": 0,
        "transfer_bytes": 33554432,
        "transfer_descriptors": 512,
        "ttft_ns": sum(e["ns"] for e in entries if e["critical"]) if first_token else None,
        "clock_error_ns": 0,
        "clamped_ns": 0,
        "waterfall": [e for e in entries if STEPS[e["step"]].in_ttft],
    }
    return row | columns


PUSH = request(
    1,
    ("prefill.frontend", 0, 2),
    ("prefill.queue", 2, 14),
    ("prefill.compute", 14, 75),
    ("registration.route", 0, 3.5, "overlapped"),
    ("registration.admit", 3.5, 4, "overlapped"),
    ("registration.notify", 4, 30, "overlapped"),
    ("transfer.dispatch", 75, 124),
    ("transfer.post", 124, 126),
    ("transfer.wire", 126, 147, "estimated"),
    ("readiness.detect", 147, 327, "poll"),
    ("readiness.signal", 327, 365),
    ("readiness.report", 365, 392),
    ("readiness.promote", 392, 397),
    ("unknown", 397, 404, "not observed"),
    ("decode.first_step", 404, 412),
    ("decode.generate", 412, 1400),
    connector="push",
    joined_by="push match",
    lead_ns=45_000_000,
    wire_lower_ns=21_000_000,
    wire_upper_ns=201_000_000,
    best_rate_bytes_per_s=1.6e9,
    predicted_pull_ttft_ns=430_000_000,
)
PUSH_LATE = request(
    2,
    ("prefill.frontend", 0, 1),
    ("prefill.compute", 1, 61),
    ("registration.route", 61, 75),
    ("registration.handshake", 75, 80),
    ("registration.notify", 80, 96),
    ("transfer.post", 96, 97),
    ("transfer.wire", 97, 117, "estimated"),
    ("readiness.detect", 117, 125, "poll"),
    ("readiness.promote", 125, 126),
    ("decode.first_step", 126, 140),
    connector="push",
    joined_by="push match",
    lead_ns=-35_000_000,
    wire_lower_ns=20_000_000,
    wire_upper_ns=28_000_000,
)
PULL = request(
    3,
    ("prefill.frontend", 0, 1.25),
    ("prefill.compute", 1.25, 41.25),
    ("registration.route", 41.25, 46.5, 0.25),
    ("registration.admit", 46.5, 48),
    ("transfer.dispatch", 48, 60.125),
    ("transfer.post", 60.125, 61),
    ("transfer.wire", 61, 75, "telemetry"),
    ("readiness.detect", 75, 80, "poll"),
    ("readiness.report", 80, 81),
    ("readiness.promote", 81, 81),
    ("readiness.admit", 81, 84),
    ("decode.first_step", 84, 99.75),
    connector="pull",
    lead_ns=-18_875_000,
    wire_lower_ns=9_000_000,
    wire_upper_ns=19_000_000,
    predicted_push_ttft_ns=90_000_000,
    clock_error_ns=250_000,
    label="benchmark",
)
PULLED_BACK = request(
    4,
    ("prefill.reuse_dispatch", 0, 3),
    ("prefill.reuse_wire", 3, 7),
    ("prefill.reuse_report", 7, 9),
    ("prefill.compute", 9, 20),
    ("registration.route", 20, 25),
    ("transfer.wire", 25, 30),
    ("decode.first_step", 30, 40),
    connector="bidirectional",
    session=2**63 + 3,
    turn=2,
    reuse_outcome="pulled",
    reuse_offered_tokens=448,
    reuse_pulled_tokens=448,
)
BELOW = request(
    5,
    ("prefill.compute", 0, 25),
    ("registration.route", 25, 30),
    ("transfer.wire", 30, 36),
    ("decode.first_step", 36, 46),
    connector="bidirectional",
    reuse_outcome="below threshold",
    reuse_offered_tokens=16,
    reuse_pulled_tokens=0,
)
EXPIRED = request(
    6,
    ("prefill.compute", 0, 60),
    ("registration.route", 60, 66),
    ("transfer.wire", 66, 70),
    ("decode.first_step", 70, 80),
    connector="bidirectional",
    reuse_outcome="expired",
    reuse_offered_tokens=448,
    reuse_pulled_tokens=0,
    read_after_expiry=True,
)
LOST = request(
    7,
    ("prefill.frontend", 0, 2),
    ("prefill.compute", 2, 62),
    ("registration.route", 62, 70),
    ("transfer.dispatch", 70, 74),
    first_token=False,
    connector="push",
    outcome="lost",
    current_step="transfer.wire",
    output_tokens=None,
)
LOCAL = request(
    8,
    ("registration.admit", 0, 4),
    ("prefill.compute", 4, 54),
    connector="local",
    joined_by="single leg",
    p_engine=None,
    p_request=None,
    transferred_tokens=None,
    transfer_bytes=None,
    transfer_descriptors=None,
)
RECOMPUTED = request(
    9,
    ("prefill.compute", 0, 50),
    ("unknown", 50, 90, "not observed"),
    ("decode.first_step", 90, 160),
    connector="pull",
    recomputed_tokens=512,
    transferred_tokens=0,
    preemptions=1,
    outcome_detail="transfer_failed",
    client_id="evil\x1b[31m\nid",
)
LIVE = request(
    10,
    ("prefill.frontend", 0, 2),
    ("prefill.compute", 2, 62),
    ("registration.route", 62, 70),
    first_token=False,
    connector="pull",
    outcome="in flight",
    current_step="transfer.dispatch",
    output_tokens=None,
)
STORED = [PUSH, PUSH_LATE, PULL, PULLED_BACK, BELOW, EXPIRED, LOST, LOCAL, RECOMPUTED]

TRANSFERS: list[Row] = [
    {
        "id": 11,
        "request_id": PUSH["id"],
        "posted_at_ns": T0_NS + 10**9 + 126_000_000,
        "operation": "WRITE",
        "engine": "engine-p",
        "rank": 0,
        "peer": "engine-d",
        "bytes": 33554432,
        "descriptors": 512,
        "post_ns": 2_000_000,
        "wire_lower_ns": 21_000_000,
        "wire_upper_ns": 201_000_000,
        "telemetry_post_us": 1900,
        "telemetry_xfer_us": 203000,
        "state": "done",
    },
    {
        "id": 12,
        "request_id": PULL["id"],
        "posted_at_ns": T0_NS + 3 * 10**9 + 61_000_000,
        "operation": "READ",
        "engine": "engine-d",
        "rank": 0,
        "peer": "engine-p",
        "bytes": 33554432,
        "descriptors": 512,
        "post_ns": 875_000,
        "wire_lower_ns": 9_000_000,
        "wire_upper_ns": 19_000_000,
        "telemetry_post_us": 800,
        "telemetry_xfer_us": 19500,
        "state": "done",
    },
]
LEASES: list[Row] = [
    {
        "id": 21,
        "request_id": PULL["id"],
        "engine": "engine-p",
        "rank": 0,
        "request": PULL["p_request"],
        "armed_at_ns": T0_NS + 3_041_000_000,
        "deadline_at_ns": T0_NS + 33_041_000_000,
        "renewals": 2,
        "ended_at_ns": T0_NS + 3_081_000_000,
        "end": "released",
    },
    {
        "id": 22,
        "request_id": EXPIRED["id"],
        "engine": "engine-p",
        "rank": 0,
        "request": EXPIRED["p_request"],
        "armed_at_ns": T0_NS + 6_060_000_000,
        "deadline_at_ns": T0_NS + 6_061_000_000,
        "renewals": 0,
        "ended_at_ns": T0_NS + 6_061_500_000,
        "end": "expired",
    },
]
HANDSHAKES: list[Row] = [
    {
        "id": 31,
        "engine": "engine-d",
        "rank": 0,
        "peer": "engine-p",
        "started_at_ns": T0_NS,
        "ns": 5_000_000,
        "ok": True,
        "clock_offset_ns": 120_000,
    }
]
FAILURES: list[Row] = [
    {
        "id": 41,
        "at_ns": T0_NS + 9_050_000_000,
        "engine": "engine-d",
        "source": "worker",
        "rank": 0,
        "kind": "nixl",
        "name": "transfer_failed",
        "detail": "engine-p",
        "request_id": RECOMPUTED["id"],
    }
]


def engine(number: int, name: str, source: str, **columns: Any) -> Row:
    return {
        "id": number,
        "ring": f"ring-{number}",
        "engine": name,
        "source": source,
        "rank": 0,
        "host": "host-a",
        "pid": 4000 + number,
        "started_at_ns": T0_NS - 10**10,
        "label": "",
        "kvscope": "0.1.0",
        "hooks_missing": [],
        "fingerprint": '{"vllm": "0.32.0", "nixl": "1.5.1", "model": "tiny"}',
        "next_seq": 1001,
        "read": 1000,
        "lost": 0,
        "torn": 0,
        "rejected": 0,
        "state": "recording",
        "state_detail": "",
    } | columns


ENGINES = [
    engine(51, "engine-p", "scheduler"),
    engine(52, "engine-p", "worker", lost=25, torn=1),
    engine(53, "engine-d", "scheduler", hooks_missing=["on_new_request"]),
    engine(54, "engine-d", "worker", fingerprint='{"vllm": "0.33.0", "nixl": "1.5.1", "model": "tiny"}'),
]


def insert(connection: duckdb.DuckDBPyConnection, table: str, rows: list[Row]) -> None:
    names = [column.name for column in schema.BY_NAME[table].columns]
    marks = ", ".join("?" for _ in names)
    for row in rows:
        assert set(row) == set(names), (table, set(row) ^ set(names))
        connection.execute(f"INSERT INTO {table} VALUES ({marks})", [row[name] for name in names])


def fill(connection: duckdb.DuckDBPyConnection) -> None:
    """Make the store's tables and put the rows in."""
    tables = {
        "requests": STORED,
        "transfers": TRANSFERS,
        "leases": LEASES,
        "handshakes": HANDSHAKES,
        "failures": FAILURES,
        "engines": ENGINES,
        "samples": [],
        "labels": [],
    }
    for table in schema.TABLES:
        connection.execute(schema.create_sql(table))
        insert(connection, table.name, tables[table.name])
    connection.execute("CREATE TABLE meta (key VARCHAR, value VARCHAR)")
    version = str(schema.VERSION)
    connection.execute(
        "INSERT INTO meta VALUES ('schema_version', ?), ('made_by', ?)", [version, __version__]
    )
