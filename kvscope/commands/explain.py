"""Explain one request: where its time to first token went, step by step, what was on the critical path, how
each time was observed, and what could have been different.

examples:
  kvscope explain chatcmpl-8f2c41
  kvscope explain 4611686018427387905 --db snapshot.duckdb
  kvscope explain req-17 --json

REQUEST is its numeric id, the client's request id, vLLM's internal id on either engine, its trace id, or
the beginning of one of the first three that fits no other request.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from kvscope.commands import add_source_arguments, open_source, print_json
from kvscope.explain import explain
from kvscope.lookup import Ambiguous
from kvscope.text import table, utc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request", metavar="REQUEST", help="an id, or the beginning of one")
    parser.add_argument("--json", action="store_true", help="the request and all that belongs to it as JSON")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        with open_source(arguments) as source:
            found = source.request(arguments.request)
    except Ambiguous as error:
        print(f"kvscope: {error}", file=sys.stderr)
        rows = [(m["id"], m["client_id"], utc(m["arrived_at_ns"]), m["outcome"]) for m in error.matches]
        print(table(("id", "client id", "arrived (UTC)", "outcome"), rows), file=sys.stderr)
        return error.exit_code
    if arguments.json:
        print_json(found)
    else:
        tty = sys.stdout.isatty()
        width = min(160, max(80, shutil.get_terminal_size((80, 24)).columns))
        colour = tty and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        sys.stdout.write(explain(found, width, colour))
    return 0
