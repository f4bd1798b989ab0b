"""List requests, stored and in flight, with their time to first token (TTFT) and where it went. Times are
milliseconds; compute wait, transfer, coordination wait and unknown add up to TTFT.

examples:
  kvscope requests --since 10m --sort ttft_ns
  kvscope requests --where 'coordination_ns>100ms' --where connector=push
  kvscope requests --where 'outcome!=finished' --db snapshot.duckdb --json
  kvscope requests --during outage-7 --sort coordination_ns

Filters are column=value, or != > >= < <=, or ~ for "contains"; all must hold. Columns are those of the
table requests, the sums compute_ns, capacity_ns, transfer_ns, coordination_ns, compute_wait_ns, and
main_step; `kvscope query 'DESCRIBE waits'` lists them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from kvscope.commands import (
    add_source_arguments,
    add_window_arguments,
    apply_during,
    open_source,
    print_json,
)
from kvscope.lookup import Listing
from kvscope.text import ms, shortened, table, utc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--where", action="append", default=[], metavar="FILTER", help="such as connector=push"
    )
    parser.add_argument(
        "--sort", default="arrived_at_ns", metavar="COLUMN", help="largest first; COLUMN:asc turns it"
    )
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="requests at most (20)")
    add_window_arguments(parser)
    parser.add_argument("--json", action="store_true", help="all columns as JSON")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    apply_during(arguments)
    listing = Listing(
        where=arguments.where,
        sort=arguments.sort,
        limit=arguments.limit,
        since=arguments.since,
        until=arguments.until,
    )
    with open_source(arguments) as source:
        rows = source.requests(listing)
    if arguments.json:
        print_json(rows)
    elif rows:
        print(requests_table(rows))
    else:
        print("no such requests", file=sys.stderr)
    return 0


def requests_table(rows: Sequence[dict[str, Any]]) -> str:
    """The list as people read it."""
    head = (
        "arrived (UTC)",
        "id",
        "connector",
        "outcome",
        "TTFT",
        "compute",
        "transfer",
        "coord.",
        "unknown",
        "main step",
        "pair",
    )
    return table(
        head,
        (
            (
                utc(row["arrived_at_ns"]),
                name,
                row["connector"],
                row["outcome"],
                ms(row["ttft_ns"]),
                ms(row["compute_wait_ns"]),
                ms(row["transfer_ns"]),
                ms(row["coordination_ns"]),
                ms(row["unknown_ns"] or 0),
                _main_step(row),
                _pair(row),
            )
            for row, name in zip(rows, short_names(rows), strict=True)
        ),
        max_width=40,
    )


def short_names(rows: Sequence[dict[str, Any]], least: int = 12, most: int = 36) -> list[str]:
    """Client ids as short as they stay apart from each other; the numeric id where that is too long."""
    names = [str(row["client_id"] or row["id"]) for row in rows]
    for width in range(least, most + 1):
        if len({name[:width] for name in names}) == len(set(names)):
            break
    cut = [name[:width] for name in names]
    return [
        name if names.count(whole) == 1 and cut.count(name) == 1 else str(row["id"])
        for row, name, whole in zip(rows, cut, names, strict=True)
    ]


def _main_step(row: dict[str, Any]) -> str:
    if row["in_flight"] and row["current_step"]:
        return f"in {row['current_step']}"
    return f"{row['main_step']} {ms(row['main_step_ns'])}" if row["main_step"] else ""


def _pair(row: dict[str, Any]) -> str:
    return " → ".join(shortened(row[side] or "?", 12) for side in ("p_engine", "d_engine"))
