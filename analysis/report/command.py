"""Write a report of a window, to attach to a ticket: whether first tokens waited for compute or for
coordination, when, in which steps, on which pairs, the slowest requests, what the engines ran, and what was
not seen. One HTML page that needs nothing from elsewhere; or Markdown or JSON.

examples:
  kvscope report --since 1h -o incident.html
  kvscope report --during outage-7 --title 'Outage 7' -o outage-7.html
  kvscope report --since 2026-11-29T12:00 --until 2026-11-29T12:30 --where d_engine=decode-3 -o incident.html
  kvscope report --db snapshot.duckdb --label benchmark -o benchmark.json
  kvscope report --since 15m --format md

Without --since a daemon is asked for its last hour, a file for all that it has. Times are UTC unless they say
otherwise. Labels never mix: without --label the report is of production, or where there was none of the most
frequent label. Exit code 1: the report was written, but a question in it has no answer.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from kvscope import __version__
from kvscope.analysis.paging import add_window_arguments
from kvscope.analysis.report.data import gather
from kvscope.analysis.report.html import page
from kvscope.analysis.report.sections import report
from kvscope.analysis.report.text import as_json, markdown
from kvscope.errors import KvscopeError, UsageError
from kvscope.outfile import TELL_AFTER_S, output
from kvscope.source import add_source_arguments, apply_during, daemon_url, open_source
from kvscope.text import printable, shortened

FORMATS = {"html": page, "md": markdown, "json": as_json}
_SUFFIXES = {".html": "html", ".htm": "html", ".md": "md", ".markdown": "md", ".json": "json"}
STDOUT = "-"
MAX_TITLE = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_window_arguments(parser)
    parser.add_argument(
        "-o",
        "--output",
        default=STDOUT,
        metavar="FILE",
        help="the file to write; - (default) is standard output",
    )
    parser.add_argument("--format", choices=FORMATS, help="default: by the file's suffix, else md")
    parser.add_argument("--json", action="store_true", help="as --format json")
    parser.add_argument("--title", help="its heading")
    parser.add_argument("--force", action="store_true", help="replace the file where it exists")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    apply_during(arguments)
    kind = _format(arguments)
    title = None if arguments.title is None else shortened(printable(arguments.title), MAX_TITLE)
    progress = _Progress()
    # The file first: whether it may be written is known before anything is asked, which may take long.
    with output(arguments.output, arguments.force) as file:
        try:
            with open_source(arguments) as source, _understood(arguments):
                found = gather(
                    source,
                    arguments.since,
                    arguments.until,
                    arguments.label,
                    arguments.where,
                    _named(arguments),
                    time.time_ns(),
                    progress.say,
                )
                text = FORMATS[kind](report(found, title))
        finally:
            progress.end()
        file.write(text.encode())
    if arguments.output != STDOUT:
        print(arguments.output)
    if found.failed:
        names = ", ".join(one.name for one in found.failed)
        print(f"kvscope: without an answer: {names}; the report says why", file=sys.stderr)
    return 1 if found.failed else 0


def _format(arguments: argparse.Namespace) -> str:
    if arguments.json:
        if arguments.format not in (None, "json"):
            raise UsageError("--json and another --format exclude each other; give one")
        return "json"
    if arguments.format:
        return str(arguments.format)
    if arguments.output == STDOUT:
        return "md"
    found = _SUFFIXES.get(Path(arguments.output).suffix.lower())
    if found is None:
        raise UsageError(
            f"{printable(arguments.output)}: its suffix names no format; end it in .html, .md or .json, "
            "or give --format"
        )
    return found


def _named(arguments: argparse.Namespace) -> tuple[str, str]:
    """The source in words, and as arguments of a command."""
    if arguments.db:
        return f"the file {arguments.db}", f"--db {shlex.quote(str(arguments.db))}"
    parts = urlsplit(daemon_url(arguments))
    url = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))  # no password
    return f"the daemon at {url}", f"--url {shlex.quote(url)}"


@contextlib.contextmanager
def _understood(arguments: argparse.Namespace) -> Iterator[None]:
    """What comes over a network may be of any shape; a daemon of another version may answer differently."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        if arguments.db:
            raise
        raise KvscopeError(
            f"{_named(arguments)[0]} does not answer as kvscope {__version__} understands it ({error}); "
            "use the same version here and there"
        ) from None


class _Progress:
    """One line on standard error where that is a terminal, once it takes a while."""

    def __init__(self) -> None:
        self._begin = time.monotonic()
        self._said = False

    def say(self, text: str) -> None:
        if sys.stderr.isatty() and time.monotonic() - self._begin > TELL_AFTER_S:
            self._said = True
            print(f"\r\x1b[Kasking for {text}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._said:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
