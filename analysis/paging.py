"""Reads any number of rows of a window by time, in pages: answers are limited in rows and bytes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvscope import schema
from kvscope import source as sources
from kvscope.client import Daemon, StoreFile
from kvscope.errors import KvscopeError, UsageError
from kvscope.query import Parameters
from kvscope.selection import TIMES, moment_ns
from kvscope.text import printable

PAGE_ROWS = 1000
"""Of requests about 4 MB, waterfalls included."""
PART_NS = 3600 * 10**9
"""A request's transfers and leases began within this time of its arrival."""
FIRST_SLICE_NS = 10**9

Row = dict[str, Any]
Source = Daemon | StoreFile


class Window(NamedTuple):
    """The requests that something is about: those of one kind of traffic, unless that was never asked for."""

    since_ns: int
    until_ns: int
    """What arrived before."""
    label: str | None
    where: tuple[str, ...] = ()
    requests: int = 0
    """How many there are, without those in flight."""

    def parameters(self) -> dict[str, str | Sequence[str]]:
        """Of a query about it."""
        found: dict[str, str | Sequence[str]] = {"since": str(self.since_ns), "until": str(self.until_ns)}
        if self.label is not None:
            found["label"] = self.label
        if self.where:
            found["where"] = self.where
        return found


OVER = "outcome IS DISTINCT FROM 'in flight'"
"""Condition of requests of which nothing more is to come."""


def add_window_arguments(parser: argparse.ArgumentParser) -> None:
    """Which requests: `--since`, `--until`, `--during`, `--label`, `--where`."""
    sources.add_window_arguments(parser)
    parser.add_argument(
        "--label",
        metavar="LABEL",
        help="this kind of traffic ('' is production); default production, or the most frequent",
    )
    parser.add_argument(
        "--where",
        action="append",
        default=[],
        metavar="FILTER",
        help="only requests that pass, such as connector=push; repeatable",
    )


def moments(
    source: Source, since: str | None, until: str | None, now_ns: int | None = None
) -> tuple[int | None, int | None]:
    """Unix nanoseconds of both; None where not given. The source knows those of named windows.

    Raises:
        UsageError: one is no moment, or they are in the wrong order.
    """
    given = {name: text for name, text in (("since", since), ("until", until)) if text}
    if any(text.strip().startswith("@") for text in given.values()):
        (row,) = ask(source, "SELECT $since AS since, $until AS until, count(*) FROM requests", given)
        since_ns, until_ns = (int(row[name]) if name in given else None for name in ("since", "until"))
    else:
        since_ns, until_ns = (moment_ns(given.get(name), now_ns, name) for name in ("since", "until"))
    if since_ns is not None and until_ns is not None and since_ns >= until_ns:
        raise UsageError("since is not before until; turn them round")
    return since_ns, until_ns


def window(source: Source, arguments: argparse.Namespace) -> Window:
    """The window that the arguments name, its ends and its label as they are in `source`.

    Raises:
        KvscopeError: there is no request in it.
        UsageError: an argument is wrong.
    """
    sources.apply_during(arguments)
    parameters: dict[str, str | Sequence[str]] = {}
    both = moments(source, arguments.since, arguments.until)
    for name, at_ns in zip(("since", "until"), both, strict=True):
        if at_ns is not None:
            parameters[name] = str(at_ns)
    if arguments.where:
        parameters["where"] = arguments.where
    if arguments.label is not None:
        parameters["label"] = arguments.label
    found = ask(
        source,
        "SELECT coalesce(label, '') AS label, min(arrived_at_ns) AS first_ns, max(arrived_at_ns) AS last_ns, "
        f"count(*) AS requests FROM requests WHERE {OVER} AND arrived_at_ns IS NOT NULL GROUP BY 1 "
        "ORDER BY requests DESC, label LIMIT 1000",
        parameters,
    )
    if not found:
        about = "" if arguments.label is None else f" of label {printable(arguments.label)[:40]!r}"
        raise KvscopeError(f"no request{about} in this window; `kvscope requests` lists what there is")
    chosen = of_one_label(found)
    return Window(
        chosen["first_ns"], chosen["last_ns"] + 1, chosen["label"], tuple(arguments.where), chosen["requests"]
    )


def of_one_label(found: Sequence[Row]) -> Row:
    """Of rows by label, the most frequent first: what something is about where nobody named a label. That is
    production, or the most frequent where production has none."""
    return next((row for row in found if row["label"] == ""), found[0])


def ask(source: Source, sql: str, parameters: Parameters) -> list[Row]:
    """The rows that a SELECT gives, by names.

    Raises:
        KvscopeError: they are more than an answer may hold.
    """
    answer = source.query("", sql, parameters)
    if answer["truncated"]:
        raise KvscopeError(
            "an answer was cut, and figures would be of a part; ask for a smaller window, or raise the "
            "daemon's limits (sql_rows, sql_bytes)"
        )
    return _rows(answer)


def requests(source: Source, about: Window, columns: Sequence[str] = ()) -> Iterator[list[Row]]:
    """The requests of a window that are over, by arrival, in pages; all columns where none are named."""
    names = columns or [column.name for column in schema.REQUESTS.columns]
    yield from _pages(source, schema.REQUESTS.name, names, about, OVER)


def parts(source: Source, table: str, page: Sequence[Row]) -> Iterator[Row]:
    """The rows of `transfers` or `leases` that belong to these requests, which are in order of arrival."""
    if not page:
        return
    names = [column.name for column in schema.BY_NAME[table].columns]
    first_ns, last_ns = (row["arrived_at_ns"] for row in (page[0], page[-1]))
    ids = ", ".join(str(int(row["id"])) for row in page)
    about = Window(max(0, first_ns - PART_NS), last_ns + PART_NS, None)
    for found in _pages(
        source, table, names, about, f"request_id IN ({ids})", last_ns - first_ns + 2 * PART_NS
    ):
        yield from found


def _pages(
    source: Source,
    table: str,
    names: Sequence[str],
    about: Window,
    condition: str,
    slice_ns: int = FIRST_SLICE_NS,
) -> Iterator[list[Row]]:
    """In order of time, then id. What is asked for at once is a slice of time that has about a page, so that
    the store need not sort all that is left for each page."""
    at = TIMES[table]
    listed = ", ".join(f'"{name}"' for name in names)
    reached_ns, reached_id = about.since_ns, ""
    while reached_ns < about.until_ns:
        until_ns = min(reached_ns + slice_ns, about.until_ns)
        after = f" AND ({at} > {reached_ns} OR id > {int(reached_id)})" if reached_id else ""
        answer = source.query(
            "",
            f"SELECT {listed} FROM {table} WHERE {condition}{after} ORDER BY {at}, id LIMIT {PAGE_ROWS}",
            {**about.parameters(), "since": str(reached_ns), "until": str(until_ns)},
        )
        page = _rows(answer)
        if page:
            yield page
        if answer["truncated"] or len(page) == PAGE_ROWS:
            if not page:
                raise KvscopeError(
                    f"a row of {table} is larger than an answer may be; raise the daemon's limits"
                )
            reached_ns, reached_id = page[-1][at], page[-1]["id"]
            slice_ns = max(1, slice_ns // 2)
        else:
            reached_ns, reached_id = until_ns, ""
            slice_ns *= 2 if len(page) > PAGE_ROWS // 8 else 8


def _rows(answer: dict[str, Any]) -> list[Row]:
    names = [column["name"] for column in answer["columns"]]
    return [dict(zip(names, row, strict=True)) for row in answer["rows"]]
