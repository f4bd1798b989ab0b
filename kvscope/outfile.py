"""Writes a result to a file that is either there as a whole or not at all, and tells how far a command is."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from kvscope.errors import KvscopeError, UsageError
from kvscope.text import printable

TELL_AFTER_S = 2.0
TELL_EVERY_S = 0.5


def check(path: Path, force: bool) -> None:
    """Whether a file can be written there, asked before anything costs time.

    Raises:
        UsageError: there is such a file, or no such folder.
    """
    shown = printable(path)
    if path.is_dir():
        raise UsageError(f"{shown} is a folder; name a file")
    if path.exists() and not path.is_file():
        raise UsageError(f"{shown} is no plain file; write to standard output and redirect it")
    if path.exists() and not force:
        raise UsageError(f"{shown} is there already; name another file, or --force to replace it")
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {printable(path.parent)}; make it first")


@contextlib.contextmanager
def new_file(path: Path, force: bool) -> Iterator[Path]:
    """Yields the path of a file beside `path` that takes its name at the end, if nothing was raised.

    Raises:
        UsageError: as `check`.
        KvscopeError: it can't be written.
    """
    check(path, force)
    # Of its own: neither what is there nor what another command writes is overwritten.
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        yield part
        os.replace(part, path)
    except OSError as error:
        if str(error.filename) != str(part):
            raise
        raise KvscopeError(
            f"{printable(path)}: can't be written ({error.strerror}); name another file"
        ) from None
    finally:
        part.unlink(missing_ok=True)


@contextlib.contextmanager
def output(target: str, force: bool) -> Iterator[IO[bytes]]:
    """A file to write bytes to: `-` for standard output, else as `new_file`."""
    if target == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with new_file(Path(target), force) as part, part.open("wb") as file:
        yield file


class Progress:
    """One line on a terminal's standard error that says how far it is, once that takes some time."""

    def __init__(self, what: str, total: int = 0) -> None:
        """`total` in the unit of `tell`; 0 where it is not known."""
        self._what, self._total = what, total
        self._next = time.monotonic() + TELL_AFTER_S
        self._told = False

    def tell(self, done: int) -> None:
        now = time.monotonic()
        if now < self._next or not sys.stderr.isatty():
            return
        share = f" of {self._total} ({100 * done // self._total} %)" if self._total else ""
        print(f"\r{self._what} {done}{share} ", end="", file=sys.stderr, flush=True)
        self._next, self._told = now + TELL_EVERY_S, True

    def close(self) -> None:
        """Take the line away."""
        if self._told:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
