"""What is lost, missing or broken, one line each, the gravest first: for `status` and `top` alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from kvscope.text import printable


def engine_problems(engines: Iterable[Mapping[str, Any] | msgspec.Struct]) -> Iterator[str]:
    """Of the engine processes: rows of a frame's `engines`, or of the daemon's status."""
    rows = [e if isinstance(e, Mapping) else msgspec.structs.asdict(e) for e in engines]
    for row in rows:
        name = f"{printable(row['engine'])} {printable(row['source'])} {row['rank']}"
        if row["state"] == "stopped":
            yield f"RECORDER STOPPED in {name}: {printable(row['state_detail']) or 'reason not known'}"
        if row["state"] == "gone":
            detail = printable(row["state_detail"])
            yield f"ENGINE GONE: {name} (pid {row['pid']}) died{f': {detail}' if detail else ''}"
        if row["lost"]:
            share = 100 * row["lost"] / (row["lost"] + row["read"])
            yield f"LOST {row['lost']} events ({share:.2g} %, {row['torn']} of them torn) of {name}"
        if row["rejected"]:
            yield f"NOT UNDERSTOOD: {row['rejected']} events of {name}; use one kvscope version everywhere"
    hooks = sorted({(hook, version(row, "vllm")) for row in rows for hook in row["hooks_missing"]})
    for hook, vllm in hooks:
        where = f"vLLM {vllm}" if vllm else "that engine's vLLM"
        yield f"HOOK MISSING: {printable(hook)}, which {where} lacks; its steps are unknown"


def problems(status: Mapping[str, Any]) -> Iterator[str]:
    """Of a daemon's status: its own problems, those of the engines, and what it could not read or store."""
    for problem in status["problems"]:
        yield printable(problem)
    if not status["rings"]:
        yield (
            f"no engine records into {printable(status['dir'])}: is KVSCOPE_DIR the same there, and the "
            "connector instrumented (kv_connector_module_path)?"
        )
    elif all(ring["state"] in ("ended", "gone") for ring in status["rings"]):
        yield f"no engine records into {printable(status['dir'])} any more"
    yield from engine_problems(status["rings"])
    for file in status["unreadable"]:
        yield f"UNREADABLE: {printable(file['reason'] if file['path'] in file['reason'] else _joined(file))}"
    if refused := status["store"]["rows_refused"]:
        yield f"NOT STORED: {refused} rows whose values do not fit their columns"
    if faults := status["pipeline"]["faults"]:
        yield f"NOT JOINED: {faults} events that kvscope stumbled over; see the daemon's log"
    if untold := status["pipeline"]["untold"]:
        yield f"NOT STORED: {untold} requests that kvscope could not make out; see the daemon's log"


def version(row: Mapping[str, Any], name: str) -> str:
    """Version of `vllm`, `nixl` or another part from an engine's fingerprint; empty when not known."""
    return printable((row["fingerprint"] or {}).get(name))


def _joined(file: Mapping[str, str]) -> str:
    return f"{file['path']}: {file['reason']}"
