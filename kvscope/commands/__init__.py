"""The commands that ask a daemon or a store file: one module each, with `add_arguments` and `run`.

A module's docstring is its help: the first paragraph describes it, the rest are examples.
"""

from __future__ import annotations

import sys

import msgspec

from kvscope.source import add_source_arguments, daemon_url, open_source

__all__ = ["add_source_arguments", "daemon_url", "open_source", "print_json"]


def print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")
