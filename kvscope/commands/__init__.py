"""The commands that ask a daemon or a store file: one module each, with `add_arguments` and `run`.

A module's docstring is its help: the first paragraph describes it, the rest are examples.
"""

from __future__ import annotations

from kvscope.source import (
    add_during_argument,
    add_source_arguments,
    add_window_arguments,
    apply_during,
    daemon_url,
    open_source,
    print_json,
)

__all__ = [
    "add_during_argument",
    "add_source_arguments",
    "add_window_arguments",
    "apply_during",
    "daemon_url",
    "open_source",
    "print_json",
]
