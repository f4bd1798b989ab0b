"""List and search what was noted about named windows, the newest first. Of WORDS all must occur, in any case,
in the note or in its window's name or kind.

examples:
  kvscope notes
  kvscope notes switch incident
  kvscope notes outage-7 --json
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from kvscope.commands import add_source_arguments, open_source, print_json
from kvscope.labels import search
from kvscope.text import printable, utc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="WORDS", help="what to look for; all notes without")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    with open_source(arguments) as source:
        found = search(source.labels(), " ".join(arguments.words))
    if arguments.json:
        about = ("name", "kind", "since_ns", "until_ns")
        print_json(
            [
                {**{name: getattr(label, name) for name in about}, **msgspec.to_builtins(note)}
                for label, note in found
            ]
        )
    elif not found:
        print("no such notes" if arguments.words else "no notes", file=sys.stderr)
    for label, note in () if arguments.json else found:
        until = f" to {utc(label.until_ns)}" if label.until_ns is not None else ""
        by = f", {printable(note.made_by)}" if note.made_by else ""
        print(f"{utc(note.made_at_ns)}  {printable(label.name)} ({printable(label.kind)}){by}")
        print(f"  from {utc(label.since_ns)}{until}")
        print("".join(f"  {printable(line)}\n" for line in note.note.splitlines()))
    return 0
