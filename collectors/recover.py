"""`kvscope recover`: read a directory of rings once into a store, when no daemon did."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvscope.collectors.daemon import Collector
from kvscope.collectors.rings import Rings
from kvscope.collectors.store import Store
from kvscope.errors import KvscopeError
from kvscope.ring import ring_paths


def main(argv: Sequence[str] | None = None) -> int:
    """Recover; returns the exit code: 0 when all that could be read is in the store."""
    parser = argparse.ArgumentParser(
        prog="kvscope recover",
        description="Read the rings in a directory, of dead engines or of live ones, into a store file. "
        "The rings stay as they are. Requests that are not over are stored as far as they came.",
    )
    parser.add_argument("dir", type=Path, metavar="DIR", help="directory with *.ring files")
    parser.add_argument(
        "--db",
        type=Path,
        metavar="FILE",
        default=Path("kvscope-recovered.duckdb"),
        help="store to write, new or existing (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.ERROR, format="kvscope recover: %(message)s")
    try:
        found = recover(arguments.dir, arguments.db)
    except KvscopeError as error:
        print(f"kvscope recover: {error}", file=sys.stderr)
        return error.exit_code
    if arguments.json:
        print(msgspec.json.encode(found).decode())
    else:
        print(
            f"{arguments.dir}: {found['rings']} rings, {found['events']} events read, {found['lost']} lost, "
            f"{found['requests']} requests ({found['new_requests']} new) in {arguments.db}"
        )
        for reason in found["unreadable"]:
            print(f"not read: {reason}")
    return 0


def recover(directory: Path, db: Path) -> dict[str, Any]:
    """Read every ring in `directory` into the store `db` and say what was found.

    Raises:
        KvscopeError: there is no such directory, or the store can't be written.
    """
    if not directory.is_dir():
        raise KvscopeError(f"{directory}: no such directory")
    ring_paths(directory)  # says it if it may not be listed
    store = Store(db)
    rings = Rings(directory, store)
    try:
        before = _requests(store)
        collector = Collector(rings, store)
        ticket = collector.finish(everything=True)
        while not store.wait_committed(ticket, 0.2):
            if store.error:
                raise KvscopeError(store.error)
        tails = rings.tails.values()
        return {
            "rings": len(tails),
            "events": sum(tail.read for tail in tails),
            "lost": sum(tail.lost for tail in tails),
            "requests": collector.pipeline.counters()["requests"],
            "new_requests": _requests(store) - before,
            "unreadable": sorted(rings.refused.values()),
            "db": str(db),
        }
    finally:
        rings.close()
        store.close()


def _requests(store: Store) -> int:
    with store.cursor() as cursor:
        count: int = cursor.execute("SELECT count(*) FROM requests").fetchall()[0][0]
        return count
