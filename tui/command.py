"""The live view: whether the fleet's first tokens wait for compute or for coordination, and why, down to one
request. Asks a daemon (here or elsewhere), or shows the past of a store file. Press ? in it for its keys.

examples:
  kvscope top
  kvscope top --url http://gpu-node-7:9177 --window 15m --where connector=push
  kvscope top --once
  kvscope top --db snapshot.duckdb --at 2026-11-29T12:30:00 --speed 10

Times are UTC unless they say otherwise; --at also takes a duration before now, Unix nanoseconds, or @NAME.end
of a named window (kvscope label).
--once prints the fleet page as text, --json as JSON; both exit with 3 where no daemon answers. The view
itself waits for the daemon.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvscope import settings
from kvscope.client import Daemon, StoreFile
from kvscope.errors import UsageError
from kvscope.filters import parse_filter
from kvscope.frame import Frame, Scope
from kvscope.source import add_source_arguments, daemon_url
from kvscope.text import duration_ns, printable

if TYPE_CHECKING:
    from kvscope.tui.app import Start

PAGE_NAMES = ("fleet", "requests", "request", "stuck", "engines", "pairs", "sessions")
MAX_SPEED = 1000.0


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    found = settings.load(arguments)
    for text in arguments.where:
        parse_filter(text)
    if arguments.speed is not None and not 0 < arguments.speed <= MAX_SPEED:
        raise UsageError(f"--speed is a number above 0, at most {MAX_SPEED:g}")
    if arguments.db and arguments.url:
        raise UsageError("name a daemon (--url) or a file (--db), not both")
    printed = "--once" if arguments.once else "--json" if arguments.json else ""
    if printed and (arguments.page or arguments.speed is not None):
        unused = "--page" if arguments.page else "--speed"
        raise UsageError(f"{printed} prints the fleet page of one moment; leave {unused} away")
    scope = Scope(window=found.window, at=arguments.at, where=tuple(arguments.where), label=arguments.label)
    name = arguments.db or daemon_url(arguments)
    source: Daemon | StoreFile = StoreFile(Path(arguments.db)) if arguments.db else Daemon(name)
    if arguments.json or arguments.once or not (sys.stdout.isatty() and sys.stdin.isatty()):
        try:
            return _print(source, scope, printable(name), arguments.json)
        finally:
            source.close()
    from kvscope.tui.app import Start

    if isinstance(source, StoreFile) and arguments.speed is not None and not scope.at:
        scope = _from_the_beginning(source, scope)
    return _show(
        Start(
            source=source,
            name=printable(name),
            scope=scope,
            refresh_s=duration_ns(found.refresh) / 1e9,
            live=not arguments.db,
            history=bool(arguments.db or arguments.at or arguments.speed is not None),
            speed=arguments.speed,
            page=str(PAGE_NAMES.index(arguments.page or PAGE_NAMES[0]) + 1),
        )
    )


def _parser() -> argparse.ArgumentParser:
    description, _, example = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="kvscope top",
        description=" ".join(description.split()),
        epilog=example.rstrip(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--where", action="append", default=[], metavar="FILTER", help="only requests such as connector=push"
    )
    parser.add_argument(
        "--label", metavar="LABEL", help="kind of traffic (KVSCOPE_LABEL); default production ('')"
    )
    parser.add_argument("--at", default="", metavar="TIME", help="show the past: the window that ends then")
    parser.add_argument(
        "--speed", type=float, metavar="N", help="play the past, N seconds in one; a file from its beginning"
    )
    pages = ", ".join(PAGE_NAMES)
    parser.add_argument("--page", choices=PAGE_NAMES, help=f"begin there: {pages}", metavar="PAGE")
    parser.add_argument("--once", action="store_true", help="print the fleet page as text and end")
    parser.add_argument("--json", action="store_true", help="print all of it as JSON and end")
    add_source_arguments(parser, True, "window", "refresh")
    return parser


def _from_the_beginning(source: StoreFile, scope: Scope) -> Scope:
    """The first whole window of a file; its last is where one looks who does not play it."""
    span = source.span()
    if span is None:
        return scope
    at_ns = min(span[0] + duration_ns(scope.window), span[1] + 1)
    return msgspec.structs.replace(scope, at=str(at_ns))


def _show(start: Start) -> int:
    from kvscope.tui.app import Top

    app = Top(start)
    try:
        app.run()
    finally:
        app.close_feeds()
    return app.return_code or 0


def _print(source: Daemon | StoreFile, scope: Scope, name: str, as_json: bool) -> int:
    frame: Frame = source.frame(scope)
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(frame)).decode() + "\n")
    else:
        from kvscope.tui.once import once_text

        sys.stdout.write(once_text(frame, shutil.get_terminal_size((100, 24)).columns, name))
    return 0
