"""Tables of the store: the only definition of their columns.

Times are nanoseconds since the Unix epoch (`*_at_ns`), durations nanoseconds (`*_ns`). NULL is "not
observed", never zero. Ids are unsigned 64-bit numbers that come out the same when a ring is read again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from kvscope.steps import STEPS

VERSION = 2
"""Of the store. A daemon refuses a store of another version and names both."""


class Column(NamedTuple):
    name: str
    type: str
    """DuckDB type."""
    doc: str


class Table(NamedTuple):
    name: str
    doc: str
    columns: tuple[Column, ...]
    key: str
    """Column that names a row for good: a row read twice from a ring is stored once."""
    kept: bool = False
    """Few rows, wanted at any time: no selection of time leaves one out, and none is too old to keep."""


WATERFALL_TYPE = (
    "STRUCT(step UTINYINT, from_ns BIGINT, ns BIGINT, critical BOOLEAN, observed UTINYINT, error_ns BIGINT)[]"
)

REQUESTS = Table(
    "requests",
    "One row per request: both legs, its steps, what came of it.",
    (
        Column(
            "id", "UBIGINT", "Names the request: hash of ring and number of its first leg's arrival event"
        ),
        Column("client_id", "VARCHAR", "The client's request id, parsed from vLLM's internal one"),
        Column("arrived_at_ns", "BIGINT", "Earliest arrival known: where TTFT starts"),
        Column("label", "VARCHAR", "Kind of traffic (KVSCOPE_LABEL of the engines); empty is production"),
        Column("model", "VARCHAR", "Model name as served"),
        Column("connector", "VARCHAR", "push, pull, bidirectional, or local where no KV was moved"),
        Column(
            "outcome",
            "VARCHAR",
            "finished, aborted, error, ignored, lost (engine gone), incomplete (quiet); never in flight",
        ),
        Column("outcome_detail", "VARCHAR", "vLLM's failure type or status; NULL when there was none"),
        Column("current_step", "VARCHAR", "Step it is in, or was in when last seen; NULL when finished"),
        Column(
            "read_after_expiry",
            "BOOLEAN",
            "A completion came after the blocks were given back: the reader "
            "may have used another request's KV",
        ),
        Column(
            "joined_by",
            "VARCHAR",
            "How the legs were joined: remote id, push match, transfer id, client id "
            "(inferred), or why not: single leg, peer not instrumented, unjoined",
        ),
        Column("p_engine", "VARCHAR", "Engine id of the prefill leg"),
        Column("d_engine", "VARCHAR", "Engine id of the decode leg"),
        Column("p_request", "VARCHAR", "Internal request id on P"),
        Column("d_request", "VARCHAR", "Internal request id on D"),
        Column(
            "d_legs", "USMALLINT", "Decode legs (n>1 sampling); the row tells of the one with the first token"
        ),
        Column(
            "session",
            "UBIGINT",
            "Id of the first request of the conversation, chained by KV reuse; else NULL",
        ),
        Column("turn", "USMALLINT", "Place in the session, from 1; else NULL"),
        Column("trace_id", "VARCHAR", "W3C trace id, where the request carried one"),
        Column("prompt_tokens", "BIGINT", "Prompt tokens"),
        Column("output_tokens", "BIGINT", "Tokens D generated"),
        Column("p_cached_tokens", "BIGINT", "Prompt tokens P took from its own prefix cache"),
        Column("d_cached_tokens", "BIGINT", "Prompt tokens D took from its own prefix cache"),
        Column("transferred_tokens", "BIGINT", "Prompt tokens whose KV D received from P"),
        Column(
            "recomputed_tokens", "BIGINT", "Prompt tokens D computed although P had (failure or preemption)"
        ),
        Column(
            "reuse_outcome",
            "VARCHAR",
            "Bidirectional, KV kept on D: pulled, below threshold, expired, "
            "metadata missing, local hit, failed; NULL where none was offered",
        ),
        Column("reuse_offered_tokens", "BIGINT", "Tokens whose KV D had kept for this request"),
        Column("reuse_pulled_tokens", "BIGINT", "Tokens P read back from D"),
        Column("preemptions", "UINTEGER", "Preemptions on both legs"),
        Column("transfer_bytes", "BIGINT", "Bytes moved between P and D, all ranks"),
        Column("transfer_descriptors", "BIGINT", "Descriptors, all ranks, after merging"),
        Column("ttft_ns", "BIGINT", "Arrival to first token; the steps below add up to it exactly"),
        *(
            Column(s.column, "BIGINT", f"{s.class_}: {s.doc}" + ("" if s.in_ttft else " (not in TTFT)"))
            for s in STEPS
        ),
        Column(
            "lead_ns",
            "BIGINT",
            "Push: prefill finished minus registration held by P; negative is the wait "
            "that a late registration cost. Pull: prefill finished minus D ready to read",
        ),
        Column(
            "best_rate_bytes_per_s", "DOUBLE", "The pair's fastest rate known when wire and detect were split"
        ),
        Column("wire_lower_ns", "BIGINT", "Transfer: least time on the wire that the polls allow"),
        Column("wire_upper_ns", "BIGINT", "Transfer: most time on the wire that the polls allow"),
        Column(
            "predicted_push_ttft_ns",
            "BIGINT",
            "Pulled request: TTFT had D been asked at the same time as P",
        ),
        Column(
            "predicted_pull_ttft_ns", "BIGINT", "Pushed request: TTFT had D been asked after prefill ended"
        ),
        Column("clock_error_ns", "BIGINT", "Bound on the clock error between the two legs; 0 on one host"),
        Column(
            "clamped_ns", "BIGINT", "Time by which boundaries were out of order and were moved; 0 when none"
        ),
        Column(
            "waterfall",
            WATERFALL_TYPE,
            "Every interval up to the first token, overlapped ones too; from_ns counts from arrival",
        ),
    ),
    "id",
)

TRANSFERS = Table(
    "transfers",
    "One row per NIXL transfer (a request has one per rank and direction).",
    (
        Column("id", "UBIGINT", "Hash of ring and the transfer's number in its process"),
        Column("request_id", "UBIGINT", "requests.id"),
        Column("posted_at_ns", "BIGINT", "When the post call returned"),
        Column("operation", "VARCHAR", "READ or WRITE"),
        Column("engine", "VARCHAR", "Engine that posted it"),
        Column("rank", "UINTEGER", "Its worker rank"),
        Column("peer", "VARCHAR", "The other engine"),
        Column("bytes", "BIGINT", "Bytes moved"),
        Column("descriptors", "BIGINT", "Descriptors, after merging"),
        Column("post_ns", "BIGINT", "Time in the post call"),
        Column("wire_lower_ns", "BIGINT", "Least time on the wire"),
        Column("wire_upper_ns", "BIGINT", "Most time on the wire"),
        Column("telemetry_post_us", "BIGINT", "NIXL's own post duration"),
        Column("telemetry_xfer_us", "BIGINT", "NIXL's own transfer duration (ends at the poll)"),
        Column("state", "VARCHAR", "done, failed or open"),
    ),
    "id",
)

LEASES = Table(
    "leases",
    "One row per lease: blocks kept for the peer after a leg's end, per rank.",
    (
        Column("id", "UBIGINT", "Hash of ring and number of the arming event"),
        Column("request_id", "UBIGINT", "requests.id; NULL when the request is not known"),
        Column("engine", "VARCHAR", "Engine that kept the blocks"),
        Column("rank", "UINTEGER", "Worker rank"),
        Column("request", "VARCHAR", "Internal request id, where request_id is NULL"),
        Column("armed_at_ns", "BIGINT", "When it began"),
        Column("deadline_at_ns", "BIGINT", "Its last deadline"),
        Column("renewals", "UINTEGER", "Heartbeats that moved the deadline"),
        Column("ended_at_ns", "BIGINT", "When it ended; NULL when the engine was gone before"),
        Column("end", "VARCHAR", "released, expired, or lost (engine gone)"),
    ),
    "id",
)

HANDSHAKES = Table(
    "handshakes",
    "One row per NIXL handshake.",
    (
        Column("id", "UBIGINT", "Hash of ring and number of the event"),
        Column("engine", "VARCHAR", "Engine that asked"),
        Column("rank", "UINTEGER", "Worker rank"),
        Column("peer", "VARCHAR", "Engine that answered"),
        Column("started_at_ns", "BIGINT", "Start"),
        Column("ns", "BIGINT", "Duration"),
        Column("ok", "BOOLEAN", "Connected"),
        Column(
            "clock_offset_ns", "BIGINT", "Peer's clock minus ours as vLLM estimated it; NULL when it did not"
        ),
    ),
    "id",
)

FAILURES = Table(
    "failures",
    "Failures logged by vLLM's connector, hooks of kvscope that raised, recorders that stopped.",
    (
        Column("id", "UBIGINT", "Hash of ring and number of the event"),
        Column("at_ns", "BIGINT", "When"),
        Column("engine", "VARCHAR", "Engine"),
        Column("source", "VARCHAR", "scheduler or worker"),
        Column("rank", "UINTEGER", "Worker rank"),
        Column("kind", "VARCHAR", "nixl, hook or recorder"),
        Column("name", "VARCHAR", "vLLM's failure type, or the hook's name"),
        Column("detail", "VARCHAR", "The exception, or the peer"),
        Column("request_id", "UBIGINT", "requests.id; NULL when none"),
    ),
    "id",
)

ENGINES = Table(
    "engines",
    "One row per ring: an engine process's identity, fingerprint, and how much of it was read.",
    (
        Column("id", "UBIGINT", "Hash of the ring id"),
        Column("ring", "VARCHAR", "Ring id"),
        Column("engine", "VARCHAR", "Engine id"),
        Column("source", "VARCHAR", "scheduler or worker"),
        Column("rank", "UINTEGER", "Worker rank"),
        Column("host", "VARCHAR", "Host name"),
        Column("pid", "UINTEGER", "Process id on that host"),
        Column("started_at_ns", "BIGINT", "When the ring was made"),
        Column("label", "VARCHAR", "KVSCOPE_LABEL"),
        Column("kvscope", "VARCHAR", "kvscope version in the engine"),
        Column("hooks_missing", "VARCHAR[]", "Hooks that this vLLM lacks: their steps are unknown"),
        Column("fingerprint", "JSON", "Versions, model, connector and its settings, sizes, cache policy"),
        Column("next_seq", "UBIGINT", "Number of the first event not read yet"),
        Column("read", "UBIGINT", "Events read"),
        Column("lost", "UBIGINT", "Events overwritten before they were read, or torn"),
        Column("torn", "UBIGINT", "Of the lost: damaged slots"),
        Column("rejected", "UBIGINT", "Events read and not understood"),
        Column(
            "state",
            "VARCHAR",
            "recording, stopped (recorder gave up), ended (nothing in flight), gone (died)",
        ),
        Column("state_detail", "VARCHAR", "Why it stopped, or how it died"),
    ),
    "id",
    kept=True,
)

LABELS = Table(
    "labels",
    "Windows of time that people named, and notes about them. Rows are only added: of each name the row made "
    "last counts.",
    (
        Column("id", "UBIGINT", "Random"),
        Column("made_at_ns", "BIGINT", "When the row was made"),
        Column("name", "VARCHAR", "Of the window; unique among those not removed"),
        Column("kind", "VARCHAR", "incident, release or benchmark"),
        Column("from_at_ns", "BIGINT", "When the window begins"),
        Column("until_at_ns", "BIGINT", "When it ends; NULL where it has no end (yet)"),
        Column("note", "VARCHAR", "What was noted with this row; NULL where nothing was"),
        Column("made_by", "VARCHAR", "Who made the row, where they said so; else empty"),
        Column("removed", "BOOLEAN", "With this row the window was removed"),
    ),
    "id",
    kept=True,
)

SAMPLES = Table(
    "samples",
    "What is sampled beside requests: one number at one moment. docs/samples.md lists the names.",
    (
        Column(
            "id", "UBIGINT", "Of an engine's own: hash of ring, number and name; of all others: counted up"
        ),
        Column("at_ns", "BIGINT", "When"),
        Column("host", "VARCHAR", "Host name"),
        Column("engine", "VARCHAR", "Engine id; empty where it is of the host"),
        Column(
            "source",
            "VARCHAR",
            "scheduler or worker where it is of one process; empty where of engine or host",
        ),
        Column("rank", "UINTEGER", "Worker rank; 0 where it is of no worker"),
        Column("name", "VARCHAR", "What was sampled"),
        Column("label", "VARCHAR", "Which of several: a thread, a network device, a reason; else empty"),
        Column("value", "DOUBLE", "In the name's unit"),
    ),
    "id",
)

TABLES = (REQUESTS, TRANSFERS, LEASES, HANDSHAKES, FAILURES, ENGINES, SAMPLES, LABELS)
BY_NAME = {table.name: table for table in TABLES}


_TRACE_ID = re.compile(r"[0-9a-f]{32}")


def trace_id_of(row: Mapping[str, Any]) -> str:
    """The trace id, 32 hex digits, under which a request (a row of `requests`) is found: its own W3C one or,
    where it carried none, its `id` with zeros before it."""
    own = (row["trace_id"] or "").lower()
    return own if _TRACE_ID.fullmatch(own) and own.strip("0") else f"{int(row['id']):032x}"


def create_sql(table: Table) -> str:
    """CREATE TABLE with every column commented."""
    columns = ",\n  ".join(f'"{c.name}" {c.type}' for c in table.columns)
    statements = [f"CREATE TABLE {table.name} (\n  {columns}\n);"]
    statements.append(f"COMMENT ON TABLE {table.name} IS {_quote(table.doc)};")
    statements += [f'COMMENT ON COLUMN {table.name}."{c.name}" IS {_quote(c.doc)};' for c in table.columns]
    return "\n".join(statements)


def _quote(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
