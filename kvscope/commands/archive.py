"""Write the hours of a store that have closed as Parquet, DIR/v1/<table>/d=YYYY-MM-DD/h=HH/*.parquet, which
any tool reads. An hour has closed 45 minutes after its end. What is there already is left alone; rows that
came late are added. Asked of a daemon, DIR is on its host: its own archive, or a directory that is new, empty
or an archive, which gets what the daemon has, archived hours too. Hours are written whole.

examples:
  kvscope archive /backup/kvscope
  kvscope archive ./incident --since 6h
  kvscope archive ./everything --db snapshot.duckdb --all
  kvscope query ttft --db ./everything
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvscope.client import Daemon
from kvscope.commands import (
    add_source_arguments,
    add_window_arguments,
    apply_during,
    daemon_url,
    print_json,
)
from kvscope.errors import UsageError
from kvscope.selection import moment_ns
from kvscope.source import file_of
from kvscope.text import printable, size, utc
from kvscope.windows import moment

TELL_EVERY_S = 2.0
Done = dict[str, Any]
"""What was written: `files`, each with table, hour_ns, rows and bytes."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="DIR", help="made when missing")
    add_window_arguments(parser)
    parser.add_argument(
        "--all", action="store_true", help="with --db: hours too that have not closed, the last one"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    apply_during(arguments)
    directory = arguments.directory.absolute()
    if file_of(arguments):
        steps = _from_file(arguments, directory)
    elif arguments.all:
        raise UsageError("--all is for a file (--db): take a snapshot of the daemon first, and archive that")
    else:
        steps = Daemon(daemon_url(arguments)).archive(directory, arguments.since, arguments.until)
    files: list[Done] = []
    left_out_from_ns: int | None = None
    next_line = time.monotonic() + TELL_EVERY_S
    for step in steps:
        files += step["files"]
        left_out_from_ns = left_out_from_ns or step.get("left_out_from_ns")
        if sys.stderr.isatty() and step["files"] and time.monotonic() > next_line:
            next_line = time.monotonic() + TELL_EVERY_S
            hour = step["files"][-1]["hour_ns"]
            print(f"{'' if hour is None else utc(hour)[:13] + 'h: '}{_sum(files)}", file=sys.stderr)
    if arguments.json:
        totals = {name: sum(one[name] for one in files) for name in ("rows", "bytes")}
        print_json(
            {
                "path": str(directory),
                "hours": _hours(files),
                **totals,
                "left_out_from_ns": left_out_from_ns,
                "files": files,
            }
        )
        return 0
    print(f"{printable(directory)}: {_sum(files) if files else 'nothing new'}")
    if left_out_from_ns is not None:
        until = f"{utc(left_out_from_ns)[:16]} UTC"
        more = "--all takes it too" if arguments.db else "archive a snapshot (--db FILE --all) to have it now"
        print(f"hours have closed up to {until}; what began later is left out ({more})")
    return 0


def _hours(files: list[Done]) -> int:
    return len({one["hour_ns"] for one in files} - {None})


def _sum(files: list[Done]) -> str:
    rows, count = sum(one["rows"] for one in files), _hours(files)
    hours = f"{count} hour{'' if count == 1 else 's'}"
    return f"{hours}, {rows:,} rows, {size(sum(one['bytes'] for one in files))} written"


def _from_file(arguments: argparse.Namespace, directory: Path) -> Iterator[Done]:
    from kvscope import archive, schema, storefile

    path = Path(arguments.db)
    if path.is_dir():
        raise UsageError(f"{printable(path)}: a Parquet directory already; copy it with any tool")
    with contextlib.closing(storefile.open_file(path)) as connection:
        # A store of before archives has no name for its files: the same file gets the same one again.
        named = hashlib.blake2b(bytes(path.resolve()), digest_size=6).hexdigest()
        collector = storefile.collector_of(connection) or named
        target = archive.Archive(archive.checked_directory(directory), collector)
        with connection.cursor() as cursor:
            since_ns = moment_ns(moment(cursor, arguments.since)) or 0
            until_ns = moment_ns(moment(cursor, arguments.until, "until"), name="until")
            if until_ns is not None and since_ns >= until_ns:
                raise UsageError("since is not before until; turn them round")
            if not arguments.all:
                closed_ns = archive.closed_until_ns(time.time_ns())
                from_ns = max(since_ns, closed_ns)
                left_out = (until_ns is None or from_ns < until_ns) and any(
                    archive.hours(cursor, storefile.stored, table.name, from_ns, until_ns)
                    for table in schema.TABLES
                    if not table.kept
                )
                yield {"files": [], "left_out_from_ns": closed_ns if left_out else None}
                until_ns = closed_ns if until_ns is None else min(until_ns, closed_ns)
            with target.locked():
                for _, written in archive.write(target, cursor, storefile.stored, since_ns, until_ns):
                    yield {"files": [one._asdict() for one in written]}
