"""Have the daemon write a consistent copy of its store to a new file, on the daemon's host, which any program
may open (the store itself is locked while a daemon runs). Of a daemon with an archive it has what is still in
the store; with --all what was moved to the archive too.

examples:
  kvscope snapshot before-upgrade.duckdb
  kvscope snapshot everything.duckdb --all
  kvscope query ttft --db before-upgrade.duckdb
"""

from __future__ import annotations

import argparse
from pathlib import Path

from kvscope.client import Daemon
from kvscope.commands import add_source_arguments, daemon_url, print_json
from kvscope.errors import UsageError
from kvscope.text import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="a new file, ending in .duckdb")
    parser.add_argument("--all", action="store_true", help="what was moved to the archive too")
    parser.add_argument("--json", action="store_true", help="print the file's path as JSON")
    add_source_arguments(parser, db=False)


def run(arguments: argparse.Namespace) -> int:
    path = arguments.file.absolute()
    if path.suffix != ".duckdb":
        raise UsageError(f"{printable(arguments.file)}: name a file that ends in .duckdb")
    daemon = Daemon(daemon_url(arguments))
    daemon.snapshot(path, arguments.all)
    if arguments.json:
        print_json({"path": str(path)})
    else:
        print(path)
    return 0
