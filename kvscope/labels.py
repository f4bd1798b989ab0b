"""Changes of named windows, and the notes about them.

A change makes one row of the table `labels`; whoever has the store writes it. Everything here is given by
people or by programs: bounded, and checked in this one place.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope import storefile, windows
from kvscope.errors import UsageError
from kvscope.filters import checked_text
from kvscope.schema import LABELS
from kvscope.selection import moment_ns
from kvscope.text import printable

if TYPE_CHECKING:
    import duckdb

MAX_NAME_CHARACTERS = 80
MAX_NOTE_CHARACTERS = 1000
MAX_BY_CHARACTERS = 80
MAX_ROWS = 10_000
"""Of the table: they are kept for good and read with every question."""

_NAME = re.compile(r"\w[\w.:/+-]*")


class Change(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Body of POST /api/v1/labels: a new window, or what is new about one."""

    name: str
    """A word, so that @NAME can stand for a moment."""
    kind: str | None = None
    """incident, release or benchmark; a new window needs one."""
    since: str | None = None
    """When it begins: a moment, or @NAME of another window; a new one begins now."""
    until: str | None = None
    """When it ends; empty for no end (yet)."""
    note: str | None = None
    """A note, kept beside earlier ones."""
    by: str = ""
    """Who says so."""
    remove: bool = False
    """The window is no more, nor are its notes."""


class Note(msgspec.Struct, kw_only=True):
    """What somebody noted about a window."""

    made_at_ns: int
    """Unix time at which it was made."""
    made_by: str
    """Who made it, where they said so."""
    note: str
    """What was noted."""


class Label(msgspec.Struct, kw_only=True):
    """A window with its notes, as the API lists it."""

    name: str
    """Its name."""
    kind: str
    """incident, release or benchmark."""
    since_ns: int
    """Unix time at which it begins."""
    until_ns: int | None
    """Unix time at which it ends; null where it has no end (yet)."""
    notes: list[Note] = []
    """The newest first."""


def listed(cursor: duckdb.DuckDBPyConnection) -> list[Label]:
    """All windows, the latest first; closes `cursor`."""
    with contextlib.closing(cursor):
        found = {one.name: Label(**one._asdict()) for one in windows.current(cursor)}
        table = storefile.relation(cursor, LABELS.name)
        cursor.execute(
            f"SELECT name, made_at_ns, coalesce(made_by, ''), note FROM {table} "
            "QUALIFY made_at_ns > coalesce(max(made_at_ns) FILTER (removed) OVER (PARTITION BY name), -1) "
            "AND note IS NOT NULL ORDER BY made_at_ns DESC, id DESC"
        )
        for name, made_at_ns, made_by, note in cursor.fetchall():
            if name in found:
                found[name].notes.append(Note(made_at_ns=made_at_ns, made_by=made_by, note=note))
    return list(found.values())


def search(labels: Sequence[Label], text: str) -> list[tuple[Label, Note]]:
    """Notes in which, together with their window's name and kind, each word of `text` is found in any case;
    the newest first."""
    words = text.casefold().split()
    found = [
        (label, note)
        for label in labels
        for note in label.notes
        if all(word in f"{label.name} {label.kind} {note.note}".casefold() for word in words)
    ]
    return sorted(found, key=lambda one: one[1].made_at_ns, reverse=True)


def row_of(cursor: duckdb.DuckDBPyConnection, change: Change) -> tuple[Any, ...]:
    """The row of `labels` that makes the change; closes `cursor`.

    Raises:
        UsageError: the change is not understood, or there is no such window to change.
    """
    name = _checked_name(change.name)
    note = _checked("note", change.note or "", MAX_NOTE_CHARACTERS).strip() or None
    made_by = _checked("by", change.by, MAX_BY_CHARACTERS).strip()
    now_ns = time.time_ns()
    with contextlib.closing(cursor):
        table = storefile.relation(cursor, LABELS.name)
        ((rows, last_ns),) = cursor.execute(
            f"SELECT count(*), max(made_at_ns) FILTER (name = ?) FROM {table}", [name]
        ).fetchall()
        if rows >= MAX_ROWS:
            raise UsageError(
                f"the store has {MAX_ROWS} labels and notes, which is the most; begin a new store"
            )
        before = next((one for one in windows.current(cursor) if one.name == name), None)
        since_ns = moment_ns(windows.moment(cursor, change.since), now_ns)
        until_ns = moment_ns(windows.moment(cursor, change.until, "until"), now_ns, "until")
    if before is None:
        if change.remove or change.kind is None:
            what = (
                "remove" if change.remove else "change; a new one needs a kind: " + ", ".join(windows.KINDS)
            )
            raise UsageError(f"no window {printable(name)!r} to {what}")
        before = windows.Window(name, change.kind, now_ns, None)
    elif not change.remove and (change.kind, change.since, change.until, note) == (None, None, None, None):
        raise UsageError(f"nothing is new about {name!r}; give kind, since, until or a note, or remove it")
    kind = change.kind or before.kind
    if kind not in windows.KINDS:
        raise UsageError(f"{printable(kind)[:40]!r} is no kind; there are: {', '.join(windows.KINDS)}")
    since_ns = before.since_ns if since_ns is None else since_ns
    until_ns = before.until_ns if change.until is None else until_ns
    if until_ns is not None and until_ns <= since_ns:
        raise UsageError(f"the window {name!r} would end before it begins; turn since and until round")
    made_at_ns = max(now_ns, (last_ns or 0) + 1)  # the row made last counts, whatever the clock does
    return (
        secrets.randbits(64), made_at_ns, name, kind, since_ns, until_ns, note, made_by, change.remove
    )  # fmt: skip


def _checked_name(text: str) -> str:
    name = _checked("name", text, MAX_NAME_CHARACTERS)
    if not _NAME.fullmatch(name) or name.endswith(windows.END):
        raise UsageError(
            f"{printable(name)[:80]!r} is no name of a window; use letters, digits and . : / + - _, "
            f"not {windows.END} at its end"
        )
    return name


def _checked(name: str, text: str, most: int) -> str:
    if len(text) > most:
        raise UsageError(f"{name}: at most {most} characters, not {len(text)}")
    return checked_text(name, text)
