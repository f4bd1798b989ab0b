"""Which daemon or store file to ask, as the command line, the environment and the settings say."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from kvscope import settings
from kvscope.client import Daemon, StoreFile, opened
from kvscope.errors import UsageError


def add_source_arguments(parser: argparse.ArgumentParser, db: bool = True, *names: str) -> None:
    """Whom to ask: `--url`, `--db`, the settings that name the daemon's address, and the settings `names`."""
    parser.add_argument(
        "--url", help="the daemon's URL (else KVSCOPE_URL, else from the settings host and port)"
    )
    if db:
        parser.add_argument(
            "--db",
            metavar="FILE",
            help="read this store, snapshot or Parquet directory instead of asking a daemon",
        )
    settings.add_arguments(parser, *names, "host", "port")


def add_window_arguments(parser: argparse.ArgumentParser, since: str = "", until: str = "") -> None:
    """From when to when: `--since`, `--until`, and `--during` for both at once.

    Args:
        since, until: their defaults.
    """
    moment = "a duration before now such as 10m, ISO 8601 (UTC), Unix nanoseconds, @NAME or @NAME.end"
    parser.add_argument(
        "--since", default=since, metavar="MOMENT", help=f"what began then or later: {moment}"
    )
    parser.add_argument(
        "--until", default=until, metavar="MOMENT", help="what began before: a moment likewise"
    )
    add_during_argument(parser)


def add_during_argument(parser: argparse.ArgumentParser) -> None:
    """`--during`, where a command has `--since` and `--until` of its own."""
    parser.add_argument(
        "--during", metavar="NAME", help="from the beginning to the end of a named window (kvscope label)"
    )


def apply_during(arguments: argparse.Namespace) -> None:
    """Have `since` and `until` say what `--during` says.

    Raises:
        UsageError: they say something themselves.
    """
    if not arguments.during:
        return
    if arguments.since or arguments.until:
        raise UsageError("--during stands for --since and --until; leave those away")
    name = arguments.during.strip().removeprefix("@")
    arguments.since, arguments.until = f"@{name}", f"@{name}.end"


def daemon_url(arguments: argparse.Namespace) -> str:
    """The daemon's address: flag, environment, settings.

    Raises:
        UsageError: the flags or the settings do not fit.
    """
    flags = any(getattr(arguments, f"setting_{name}", None) is not None for name in ("host", "port"))
    if arguments.url and flags:
        raise UsageError("--url stands for --host and --port; leave those away")
    url = arguments.url or ("" if flags else os.environ.get("KVSCOPE_URL", ""))
    if url and not arguments.config:
        return str(url)
    found = settings.load(arguments)
    if url:
        return str(url)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(found.host, found.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{found.port}"


def file_of(arguments: argparse.Namespace) -> str | None:
    """The file that `--db` names, if any.

    Raises:
        UsageError: a daemon is named too.
    """
    db: str | None = getattr(arguments, "db", None)
    if db and arguments.url:
        raise UsageError("name a daemon (--url) or a file (--db), not both")
    return db


@contextmanager
def open_source(arguments: argparse.Namespace) -> Iterator[Daemon | StoreFile]:
    """The file that `--db` names, else the daemon."""
    db = file_of(arguments)
    with opened("" if db else daemon_url(arguments), db) as source:
        try:
            yield source
        except UsageError as error:
            said = str(error)
            if not (getattr(arguments, "during", None) and said.startswith("since: no window")):
                raise
            # Who wrote --during knows of no since.
            raise UsageError(said.replace("since", "--during", 1).replace("mean @", "mean ")) from None


def print_json(value: object) -> None:
    """What `--json` prints."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")
