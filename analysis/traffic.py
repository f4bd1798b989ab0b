"""What is known of the engines that served some traffic: whether they were real, and what they ran."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from kvscope.analysis.paging import Source, ask
from kvscope.query import Parameters
from kvscope.text import printable

SIMULATED = "simulated"
"""What the simulation says in place of kvscope's version, and how the label of its requests begins."""
_MOST = 10_000


class Engine(NamedTuple):
    """A process of an engine."""

    name: str
    source: str
    rank: int
    label: str
    kvscope: str
    fingerprint: dict[str, Any]

    @property
    def is_simulated(self) -> bool:
        return self.kvscope == SIMULATED


def engines(source: Source, parameters: Parameters) -> list[Engine]:
    """The processes of the engines that served the requests which a query with these parameters is about, the
    latest first. Their own label may be another: a benchmark's window gives its label to requests alone."""
    found = ask(
        source,
        "SELECT engine, source, rank, label, kvscope, fingerprint FROM engines WHERE engine <> '' AND engine "
        "IN (SELECT p_engine FROM requests UNION SELECT d_engine FROM requests) "
        f"ORDER BY started_at_ns DESC, id LIMIT {_MOST}",
        parameters,
    )
    return [
        Engine(
            row["engine"] or "",
            row["source"] or "",
            row["rank"] or 0,
            row["label"] or "",
            row["kvscope"] or "",
            _object(row["fingerprint"]),
        )
        for row in found
    ]


def is_simulated(found: Sequence[Engine], label: str | None) -> bool:
    """Whether the label or one of the engines says so: figures of their requests are to be called so."""
    return (label or "").startswith(SIMULATED) or any(engine.is_simulated for engine in found)


def versions(found: Sequence[Engine]) -> dict[str, str]:
    """What they ran, such as {"vllm": "0.32.0"}; several versions with commas."""
    names = ("kvscope", "vllm", "nixl", "model", "connector")
    told: dict[str, set[str]] = {name: set() for name in names}
    for engine in found:
        told["kvscope"].add(printable(engine.kvscope))
        for name in names[1:]:
            if value := engine.fingerprint.get(name):
                told[name].add(printable(value)[:200])
    return {name: ", ".join(sorted(values - {""})) for name, values in told.items() if values - {""}}


def _object(text: object) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text) if isinstance(text, str) else text
    except (msgspec.MsgspecError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
