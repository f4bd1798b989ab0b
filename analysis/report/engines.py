"""What the engines of a window ran, and in what they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from kvscope.analysis.report.data import Gathered
from kvscope.analysis.report.parts import NONE, Column, Table, shown

MAX_KEYS = 100
MAX_DEPTH = 3
MAX_DIFFERENCES = 40
MAX_ENGINES = 30

Fingerprints = Mapping[str, Mapping[str, str]]
"""By engine: setting to value."""


def serving(found: Gathered) -> list[dict[str, Any]]:
    """Rows of `engines` that served requests of the window; all where there are none. Leases, failures and
    handshakes are of all labels, so their engines may be of another."""
    names = _served(found)
    rows = found.rows("engines")
    return [row for row in rows if row["engine"] in names] or rows


def _served(found: Gathered) -> set[Any]:
    return {row[name] for row in found.rows("fleet") for name in ("p_engine", "d_engine")}


def taking_part(found: Gathered) -> list[dict[str, Any]]:
    """Rows of `engines` of which the window tells; all where it tells of none."""
    names = _served(found)
    for question in ("leases", "failures", "handshakes"):
        names |= {row["engine"] for row in found.rows(question)}
    rows = found.rows("engines")
    return [row for row in rows if row["engine"] in names] or rows


def fingerprints(rows: list[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """By engine: what it runs. Where an engine's processes differ, all values are there."""
    found: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        known = found.setdefault(shown(row["engine"]), {})
        settings = {"kvscope": shown(row["kvscope"]), **dict(_settings(row["fingerprint"]))}
        for key, value in settings.items():
            if value not in (values := known.setdefault(key, [])):
                values.append(value)
    return {
        engine: {key: " and ".join(values[:3]) for key, values in settings.items()}
        for engine, settings in found.items()
    }


def differences(prints: Fingerprints) -> Table | None:
    """A row per setting in which engines differ, a column per value; None where all are alike."""
    keys = sorted({key for settings in prints.values() for key in settings})
    rows = []
    for key in keys:
        by_value: dict[str, list[str]] = {}
        for engine, settings in prints.items():
            by_value.setdefault(settings.get(key, NONE), []).append(engine)
        if len(by_value) > 1:
            rows += [[key, value, shown(engines)] for value, engines in by_value.items()]
    if not rows:
        return None
    columns = [Column("", title, False) for title in ("setting", "value", "engines")]
    return Table(
        "In what the engines differ", columns, rows[:MAX_DIFFERENCES], max(0, len(rows) - MAX_DIFFERENCES)
    )


def alike(prints: Fingerprints) -> Table | None:
    """The settings in which all engines agree."""
    first, *others = prints.values()
    rows = [[key, value] for key, value in first.items() if all(other.get(key) == value for other in others)]
    columns = [Column("", title, False) for title in ("setting", "value")]
    return Table("What all of them run", columns, rows[:MAX_KEYS], folded=True) if rows else None


def _settings(text: object) -> Iterator[tuple[str, str]]:
    """The entries of a fingerprint, nested ones by their path. An engine's, it may be anything."""
    try:
        found = msgspec.json.decode(str(text or "{}"), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return
    yield from islice(_flat(found, "", MAX_DEPTH), MAX_KEYS)


def _flat(found: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, str]]:
    for key, value in list(found.items())[:MAX_KEYS]:
        name = shown(f"{prefix}{key}")
        if isinstance(value, dict) and value and depth > 1:
            yield from _flat(value, f"{name}.", depth - 1)
        else:
            yield name, shown(value)
