"""Which daemon or store file to ask, as the command line, the environment and the settings say."""

from __future__ import annotations

import argparse
import os
from contextlib import AbstractContextManager

from kvscope import settings
from kvscope.client import Daemon, StoreFile, opened


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


def daemon_url(arguments: argparse.Namespace) -> str:
    """The daemon's address: flag, environment, settings."""
    if url := arguments.url or os.environ.get("KVSCOPE_URL"):
        return str(url)
    found = settings.load(arguments)
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(found.host, found.host)
    return f"http://{f'[{host}]' if ':' in host else host}:{found.port}"


def open_source(arguments: argparse.Namespace) -> AbstractContextManager[Daemon | StoreFile]:
    """The file that `--db` names, else the daemon."""
    db = getattr(arguments, "db", None)
    return opened("" if db else daemon_url(arguments), db)
