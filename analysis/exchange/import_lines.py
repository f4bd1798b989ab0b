"""Reads files of others: bounded lines, gzip by suffix, and counts of what could not be understood."""

from __future__ import annotations

import contextlib
import gzip
import io
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, cast

from kvscope.errors import KvscopeError
from kvscope.text import printable

MAX_LINE_BYTES = 64 << 20
_MAX_KINDS = 1000


class Notes:
    """What an import came across."""

    def __init__(self) -> None:
        self.requests = 0
        self.joined = 0
        """Requests of which both legs were found."""
        self.left_out: Counter[str] = Counter()
        """What was not stored, by kind: not an error."""
        self.not_understood: Counter[str] = Counter()
        self.assumed: list[str] = []
        """Sentences: what the source does not say."""

    def count(self, what: str) -> None:
        self.left_out[what] += 1

    def broken(self, what: str) -> None:
        self.not_understood[what] += 1

    def assume(self, what: str) -> None:
        if what not in self.assumed and len(self.assumed) < _MAX_KINDS:
            self.assumed.append(what)


@contextlib.contextmanager
def reading(path: Path) -> Iterator[IO[bytes]]:
    """The file's bytes, unpacked where its name ends in .gz.

    Raises:
        KvscopeError: it can't be read, or it is no gzip file although its name says so.
    """
    try:
        with contextlib.ExitStack() as stack:
            file: Any = stack.enter_context(path.open("rb"))
            if path.suffix == ".gz":
                file = stack.enter_context(io.BufferedReader(cast(Any, gzip.GzipFile(fileobj=file))))
            yield file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise KvscopeError(f"{printable(path)}: its gzip data is damaged ({printable(error)[:80]})") from None
    except OSError as error:
        raise KvscopeError(f"{printable(path)}: {printable(error.strerror or error)[:120]}") from None


def lines(file: IO[bytes], notes: Notes, limit: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Lines without their ends, empty ones left out; one beyond the limit is counted and skipped."""
    while line := file.readline(limit + 1):
        if len(line) > limit and not line.endswith(b"\n"):
            notes.broken(f"lines of more than {limit >> 10} KiB")
            while line and not line.endswith(b"\n"):
                line = file.readline(limit)
            continue
        line = line.strip()
        if line:
            yield line
