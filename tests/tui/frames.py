"""Frames made by hand, with figures that tests name; nothing here asks a daemon."""

from __future__ import annotations

from typing import Any

from kvscope import steps
from kvscope.frame import Answer, Engine, Finding, Frame, RequestRow
from kvscope.samples import Sample

S = 10**9
MS = 10**6
NOW = 1_800_000_000 * S
"""2027-01-15 08:00:00 UTC."""
WINDOW = 300 * S

P, D = "prefill-0", "decode-0"


def request(number: int = 1, **changes: Any) -> RequestRow:
    """Finished: TTFT 200 ms is compute 40, capacity 10, transfer 30, coordination 115, unknown 5."""
    row: dict[str, Any] = {
        "id": str(number),
        "client_id": f"client-{number:06d}",
        "arrived_at_ns": NOW - 60 * S + number * MS,
        "in_flight": False,
        "outcome": "finished",
        "step": None,
        "step_since_ns": None,
        "waits_for": "",
        "connector": "push",
        "model": "tiny",
        "label": "",
        "p_engine": P,
        "d_engine": D,
        "session": None,
        "turn": None,
        "prompt_tokens": 512,
        "output_tokens": 16,
        "ttft_ns": 200 * MS,
        "compute_ns": 40 * MS,
        "capacity_ns": 10 * MS,
        "transfer_ns": 30 * MS,
        "coordination_ns": 115 * MS,
        "unknown_ns": 5 * MS,
        "main_step": "readiness.detect",
        "main_step_ns": 80 * MS,
        "generate_ns": 150 * MS,
        "lead_ns": 12 * MS,
        "transfer_bytes": 4 << 20,
        "recomputed_tokens": 0,
        "reuse_outcome": None,
        "read_after_expiry": False,
        "joined_by": "engine ids",
        "clock_error_ns": 0,
    }
    return RequestRow(**{**row, **changes})


def in_flight(
    number: int, step: str = "transfer.dispatch", age_ns: int = 3 * S, **changes: Any
) -> RequestRow:
    """A request that has been in `step` for `age_ns`, without a first token yet."""
    return request(
        number,
        **{
            "in_flight": True,
            "outcome": "in flight",
            "step": step,
            "step_since_ns": NOW - age_ns,
            "waits_for": f"{P} to post the WRITE",
            "arrived_at_ns": NOW - age_ns - 50 * MS,
            "ttft_ns": None,
            "output_tokens": None,
            "generate_ns": None,
            **changes,
        },
    )


FLEET: dict[str, Any] = {
    "level": "all",
    "connector": None,
    "p_engine": None,
    "d_engine": None,
    "requests": 120,
    "generating": 3,
    "not_finished": 1,
    "p50_ttft_ms": 180.0,
    "p90_ttft_ms": 410.0,
    "p99_ttft_ms": 760.0,
    "mean_ttft_ms": 200.0,
    "compute_percent": 20.0,
    "capacity_percent": 5.0,
    "transfer_percent": 15.0,
    "coordination_percent": 57.5,
    "unknown_percent": 2.5,
    "p50_tpot_ms": 9.5,
    "p90_tpot_ms": 14.0,
    "requests_per_s": 0.4,
    "output_tokens_per_s": 6.4,
    "not_joined": 0,
    "peer_not_instrumented": 0,
    "recomputed": 0,
    "read_after_expiry": 0,
    "clock_error_ms": 0.02,
    "clamped": 0,
}
CLASSES_MS = {
    "compute_ms": 40.0,
    "capacity_ms": 10.0,
    "transfer_ms": 30.0,
    "coordination_ms": 115.0,
    "unknown_ms": 5.0,
}


def answer(*rows: dict[str, Any]) -> Answer:
    """An answer of rows that all have the same columns."""
    columns = list(rows[0]) if rows else []
    return Answer(columns, [[row[name] for name in columns] for row in rows])


def answers(**fleet: Any) -> dict[str, Answer]:
    """Those of every frame; `fleet` changes the row over all requests."""
    every = {**FLEET, **fleet}
    connector = {**every, "level": "connector", "connector": "push"}
    pair = {**every, "level": "pair", "connector": "push", "p_engine": P, "d_engine": D}
    bands = [("p0-50", 60, 50.0, 180.0), ("p50-90", 48, 180.0, 410.0), ("p90-99", 10, 410.0, 760.0)]
    return {
        "fleet": answer(every, connector, pair),
        "fleet_bands": answer(
            *(
                {
                    "band": band,
                    "requests": requests,
                    "from_ms": low,
                    "to_ms": high,
                    "mean_ms": 200.0,
                    **CLASSES_MS,
                    "main_step": "readiness.detect",
                }
                for band, requests, low, high in (*bands, ("p99-100", 2, 760.0, 900.0))
            )
        ),
        "fleet_steps": answer(
            *(
                {
                    "step": name,
                    "class": steps.BY_NAME[name].class_,
                    "requests": 120,
                    "share_percent": share,
                    "mean_ms": 2 * share,
                    "p50_ms": 2 * share,
                    "p90_ms": 3 * share,
                    "p99_ms": 4 * share,
                }
                for name, share in (
                    ("readiness.detect", 40.0),
                    ("prefill.compute", 18.0),
                    ("transfer.dispatch", 17.5),
                    ("transfer.wire", 15.0),
                    ("prefill.queue", 5.0),
                    ("unknown", 2.5),
                    ("decode.first_step", 2.0),
                )
            )
        ),
        "fleet_trend": answer(
            *(
                {
                    "at_ns": NOW - WINDOW + bucket * 5 * S,
                    "requests": 2,
                    "p50_ttft_ms": 180.0,
                    "p99_ttft_ms": 300.0 + (460.0 if bucket == 42 else 0.0),
                    "mean_ms": 200.0,
                    **CLASSES_MS,
                }
                for bucket in range(60)
            )
        ),
    }


def engine(name: str = P, **changes: Any) -> Engine:
    """A ring that is read well."""
    fields: dict[str, Any] = {
        "ring": f"{name}-scheduler-0-100",
        "engine": name,
        "source": "scheduler",
        "rank": 0,
        "host": "node-a",
        "pid": 100,
        "started_at_ns": NOW - 3600 * S,
        "last_event_at_ns": NOW - S,
        "kvscope": "0.1.0",
        "state": "live",
        "read": 5000,
        "fingerprint": {
            "vllm": "0.32.0",
            "nixl": "1.5.1",
            "connector": "push",
            "model": "tiny",
            "role": "prefill",
        },
    }
    return Engine(**{**fields, **changes})


ENGINES = [
    engine(P),
    engine(P, source="worker", ring=f"{P}-worker-0-101", pid=101),
    engine(D, pid=200, ring=f"{D}-scheduler-0-200"),
    engine(D, source="worker", ring=f"{D}-worker-0-201", pid=201),
]
SAMPLES = [
    Sample(NOW - S, "node-a", P, "", 0, "kv_blocks.total", "", 1000.0),
    Sample(NOW - S, "node-a", P, "", 0, "kv_blocks.running", "", 400.0),
    Sample(NOW - S, "node-a", P, "", 0, "kv_blocks.kept", "", 100.0),
    Sample(NOW - S, "node-a", P, "", 0, "vllm.running", "", 2.0),
    Sample(NOW - S, "node-a", P, "scheduler", 0, "process.cpu", "", 0.9),
    Sample(NOW - S, "node-a", "", "", 0, "host.cores", "", 8.0),
]


def frame(**changes: Any) -> Frame:
    """A live frame of 5 minutes with three requests in flight and twenty that are over."""
    fields: dict[str, Any] = {
        "kvscope": "0.1.0",
        "live": True,
        "at_ns": NOW,
        "window_ns": WINDOW,
        "where": [],
        "label": "",
        "labels": {"": 120},
        "answers": answers(),
        "in_flight": [
            in_flight(1001),
            in_flight(1002, "prefill.compute", 1 * S, waits_for=""),
            in_flight(1003, "registration.handshake", 40 * S, waits_for=f"handshake with {P}"),
        ],
        "recent": [request(number, ttft_ns=(100 + number) * MS) for number in range(1, 21)],
        "recent_total": 20,
        "engines": list(ENGINES),
        "samples": list(SAMPLES),
    }
    return Frame(**{**fields, **changes})


def empty(**changes: Any) -> Frame:
    """A daemon that reads nothing yet."""
    fields: dict[str, Any] = {"in_flight": [], "recent": [], "recent_total": 0, "engines": [], "samples": []}
    fields["answers"] = {name: answer() for name in answers()}
    return frame(**{**fields, "labels": {}, **changes})


FINDING = Finding(
    kind="stuck", text="2 requests wait for decode-1", advice="restart decode-1", since_ns=NOW - 60 * S
)


def many(count: int = 10_000) -> list[RequestRow]:
    """Requests that are over, all different, as many as asked for."""
    return [
        request(
            number,
            arrived_at_ns=NOW - WINDOW + number * (WINDOW // (count + 1)),
            ttft_ns=(number * 7919 % 100_003) * 10_000 + MS,
            prompt_tokens=number * 31 % 4096,
            d_engine=f"decode-{number % 5}",
        )
        for number in range(1, count + 1)
    ]
