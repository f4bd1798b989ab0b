"""Write the requests of a window for other programs: `perfetto`, a trace that ui.perfetto.dev and chrome://tracing
open, or `otlp`, OTLP/JSON lines as an OpenTelemetry collector reads and writes them.

examples:
  kvscope export perfetto --since 15m -o slow.json
  kvscope export perfetto --since 1h --where 'ttft_ns>1s' -o slow.json
  kvscope export otlp --db incident.duckdb --label benchmark -o - | gzip > traces.jsonl.gz

Requests in flight are left out. Any number of requests is written with little memory.
"""

from __future__ import annotations

import argparse
import sys
from typing import NamedTuple

from kvscope.analysis.exchange import export_otlp, export_perfetto
from kvscope.analysis.paging import add_window_arguments, window
from kvscope.errors import UsageError
from kvscope.outfile import Progress, output
from kvscope.source import add_source_arguments, open_source, print_json
from kvscope.text import printable

FORMATS = {"perfetto": export_perfetto.write, "otlp": export_otlp.write}


class Written(NamedTuple):
    """What an export holds."""

    requests: int
    events: int
    """Spans, or trace events."""
    untold: int
    """Requests whose times can't be told."""
    simulated: bool


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "format", choices=FORMATS, help="perfetto (Chrome trace JSON) or otlp (OTLP/JSON lines)"
    )
    parser.add_argument(
        "-o", "--output", required=True, metavar="FILE", help="where to; - for standard output"
    )
    parser.add_argument("--force", action="store_true", help="replace the file where there is one")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    add_window_arguments(parser)
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.json and arguments.output == "-":
        raise UsageError("--json would mix with the trace on standard output; name a file")
    with open_source(arguments) as source:
        about = window(source, arguments)
        progress = Progress("requests written:", about.requests)
        try:
            with output(arguments.output, arguments.force) as file:
                written = Written(*FORMATS[arguments.format](source, about, file, progress.tell))
        finally:
            progress.close()
    if arguments.json:
        print_json({"file": arguments.output, "label": about.label, **written._asdict()})
        return 0
    label = f"label {printable(about.label)}" if about.label else "production"
    untold = f", {written.untold} left out (their times can't be told)" if written.untold else ""
    print(
        f"{written.requests} {'simulated ' if written.simulated else ''}requests ({label}) "
        f"as {written.events} {'spans' if arguments.format == 'otlp' else 'events'}{untold}",
        file=sys.stderr,
    )
    return 0
