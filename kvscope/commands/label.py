"""Name a window of time: an incident, a release, a benchmark. Wherever a moment is taken, @NAME is when it
begins and @NAME.end when it ends; --during NAME is both.

examples:
  kvscope label outage-7 --kind incident --since 2h --until 90m --note 'switch 3 was replaced'
  kvscope label v1.4 --kind release --note 'block size 32'
  kvscope label nightly-12 --kind benchmark --since 2026-11-29T01:00 --until 2026-11-29T02:00
  kvscope label outage-7 --note 'the link renegotiated to 100 Gb/s'
  kvscope label outage-7
  kvscope label outage-7 --remove
  kvscope label --list

A name alone shows that window. A new one begins now unless --since says otherwise, and has no end without
--until. Requests without a label of their own (KVSCOPE_LABEL) that arrived in a window of kind benchmark
count as of label NAME, not as production: in questions, lists and kvscope top. Prometheus counters were
counted already and stay. Names and notes go to the daemon, or with --db into a store or a snapshot that no
daemon uses.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvscope.client import Daemon, change_label
from kvscope.commands import add_source_arguments, daemon_url, open_source, print_json
from kvscope.errors import UsageError
from kvscope.labels import Change, Label
from kvscope.source import file_of
from kvscope.text import printable, table, utc
from kvscope.windows import KINDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="NAME", help="a word: letters, digits and . : / + - _")
    parser.add_argument("--list", action="store_true", help="the windows there are")
    parser.add_argument("--kind", choices=KINDS, help="what it is; a new window needs it")
    parser.add_argument(
        "--since",
        metavar="MOMENT",
        help="its beginning: a duration before now such as 2h, ISO 8601 (UTC), Unix nanoseconds or @NAME",
    )
    parser.add_argument("--until", metavar="MOMENT", help="its end likewise; '' for no end (yet)")
    parser.add_argument("--note", metavar="TEXT", help="a note about it; it stands beside earlier ones")
    parser.add_argument("--by", metavar="WHO", default="", help="who says so")
    parser.add_argument("--remove", action="store_true", help="forget the window and its notes")
    parser.add_argument("--json", action="store_true", help="the windows with their notes as JSON")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    a = arguments
    if not a.name:
        if a.remove or any(value is not None for value in (a.kind, a.since, a.until, a.note)):
            raise UsageError("name the window; `kvscope label --list` tells those there are")
        if not a.list:
            raise UsageError("name a window, or list those there are with --list")
        with open_source(a) as source:
            _show(source.labels(), a.json)
        return 0
    if a.list:
        raise UsageError("--list tells all windows; leave the name away")
    if not (a.remove or a.by or any(value is not None for value in (a.kind, a.since, a.until, a.note))):
        with open_source(a) as source:
            found = [one for one in source.labels() if one.name == a.name]
        if not found:
            raise UsageError(
                f"no window {printable(a.name)[:80]!r}; --list tells those there are, a new one needs --kind"
            )
        _show(found, a.json)
        return 0
    change = Change(
        name=a.name, kind=a.kind, since=a.since, until=a.until, note=a.note, by=a.by, remove=a.remove
    )
    if path := file_of(a):
        found = change_label(Path(path), change)
    else:
        daemon = Daemon(daemon_url(a))
        try:
            found = daemon.change_label(change)
        finally:
            daemon.close()
    _show([one for one in found if one.name == a.name], a.json, f"{a.name}: removed")
    return 0


def _show(labels: Sequence[Label], as_json: bool, nothing: str = "no named windows") -> None:
    if as_json:
        print_json([msgspec.to_builtins(one) for one in labels])
    elif labels:
        head = ("name", "kind", "since (UTC)", "until (UTC)", "notes", "last note")
        print(table(head, map(_row, labels)))
    else:
        print(nothing)


def _row(label: Label) -> tuple[object, ...]:
    last = label.notes[0].note if label.notes else ""
    return (
        label.name, label.kind, utc(label.since_ns), utc(label.until_ns), len(label.notes) or "", last
    )  # fmt: skip
