"""Moves closed hours of the store to the archive, in a thread of its own, every ten minutes.

A pass first deletes from the store what an earlier pass archived and is older than the retention; then writes
the hours that have closed, or got rows since; then has questions read those files of which a next pass may
delete the rows. So whatever is deleted has long been in a file that questions read. At last it looks whether
these can be read: their ends, or the whole of them after a question failed for a reason that names no file.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pyarrow as pa

from kvscope import archive, schema
from kvscope.archive import HOUR_NS, Archive, DamagedFile, Written
from kvscope.collectors.store import Store
from kvscope.errors import KvscopeError, UsageError
from kvscope.selection import moment_ns
from kvscope.storefile import LAYOUT, relation, stored
from kvscope.text import printable, utc
from kvscope.windows import moment

logger = logging.getLogger(__name__)

INTERVAL_S = 600.0
NICENESS = 10
"""Of the thread: engines and ingest come first."""
DELETE_S = 120.0
"""How long the store's writer may take before it deletes."""
BY_HAND_S = 5.0
"""How long one answer to `archive` may take, but for its last hour."""


class _Looked(NamedTuple):
    """What was found in a file."""

    identity: tuple[int, int, int] | None
    whole: bool
    """All of it was read."""
    damage: str


class Archiving:
    """The schedule of one store's archive.

    Args:
        retention_hours: rows older than this are deleted from the store once they are archived; 0: never.
        clock: Unix time in nanoseconds.

    Raises:
        UsageError: DuckDB could not read a directory of that name.
    """

    def __init__(
        self,
        store: Store,
        directory: Path,
        retention_hours: float,
        clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._store = store
        self._retention_ns = int(retention_hours * 3600e9)
        self._clock = clock
        self.archive = Archive(directory, store.collector)
        self._published: set[tuple[str, int]] = set()
        self._error = ""
        self._damaged: dict[Path, str] = {}
        self._looked: dict[Path, _Looked] = {}
        """By file that questions read."""
        self._doubt = False
        """Whether one of them is damaged, and it is not known which."""
        self._rows = self._bytes = 0
        self._last_pass_ns: int | None = None
        self._stopping, self._woken = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvscope-archive", daemon=True)
        try:
            _check_there(store, self.archive)
            self._publish()
        except KvscopeError as error:
            self._failed(error)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End soon; what is being written is given up when the store is closed."""
        self._stopping.set()
        self._woken.set()

    def step(self) -> list[Written]:
        """One pass; returns what it wrote.

        Raises:
            KvscopeError: it could not be finished.
        """
        until_ns = archive.closed_until_ns(self._clock())
        written: list[Written] = []
        damaged: dict[Path, str] = {}
        _check_there(self._store, self.archive)
        with self.archive.locked():
            self._delete()
            with self._store.cursor() as cursor:
                for hour_ns, table in self._due(cursor, until_ns):
                    if self._stopping.is_set():
                        return written
                    try:
                        done = self.archive.update(cursor, stored, table, hour_ns)
                    except DamagedFile as error:
                        damaged[self.archive.path(table, hour_ns)] = str(error)
                    else:
                        written += [done] if done else []
            self._publish()
        self._damaged = damaged
        self._rows += sum(one.rows for one in written)
        self._bytes += sum(one.bytes for one in written)
        self._last_pass_ns = self._clock()
        self._look()
        return written

    def _due(self, cursor: duckdb.DuckDBPyConnection, until_ns: int) -> list[tuple[int, str]]:
        """Hours whose rows are not known to be in their files, oldest first."""
        covered = self.archive.covered()
        marks = archive.always(cursor, stored)
        for table in schema.TABLES:
            if not table.kept:
                found = archive.hours(cursor, stored, table.name, 0, until_ns)
                marks.update({(table.name, hour_ns): mark for hour_ns, mark in found.items()})
        return sorted(
            (hour, table) for (table, hour), mark in marks.items() if covered.get((table, hour)) != mark
        )

    def _delete(self) -> None:
        if not self._retention_ns:
            return
        before_ns = self._clock() - self._retention_ns
        covered = {key: mark for key, mark in self.archive.covered().items() if key in self._published}
        self._store.in_writer(lambda writer: archive.drop_archived(writer, before_ns, covered), DELETE_S)

    def _publish(self) -> None:
        until_ns = moved_until_ns(self._store)
        if self._retention_ns:
            until_ns = max(until_ns, self._clock() - self._retention_ns + 2 * HOUR_NS)
        files = {
            (table, hour_ns): path
            for (table, hour_ns), path in self.archive.files().items()
            if hour_ns < until_ns and not schema.BY_NAME[table].kept
        }
        tables, hours = [table for table, _ in files], [hour_ns for _, hour_ns in files]
        self._store.publish(
            pa.table(
                {
                    "table_name": pa.array(tables, pa.string()),
                    "path": pa.array(map(str, files.values()), pa.string()),
                    "first_ns": pa.array(hours, pa.int64()),
                    "last_ns": pa.array([hour_ns + HOUR_NS - 1 for hour_ns in hours], pa.int64()),
                }
            )
        )
        self._published = set(files)

    def _look(self) -> None:
        """Find the damaged ones among the files that questions read."""
        whole, self._doubt = self._doubt, False
        paths = {self.archive.path(*key) for key in self._published}
        for path in list(self._looked):
            if path not in paths:
                del self._looked[path]
        for path in paths:
            if self._stopping.is_set():
                return
            is_, known = archive.identity(path), self._looked.get(path)
            if known is None or known.identity != is_ or (whole and not known.whole):
                self._looked[path] = _Looked(is_, whole, archive.damage(path, whole))

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while not self._stopping.is_set():
            try:
                self.step()
            except Exception as error:
                if not self._stopping.is_set():
                    self._failed(error)
            else:
                if self._error:
                    logger.warning("%s: written again", self.archive.directory)
                self._error = ""
            self._woken.wait(INTERVAL_S)
            self._woken.clear()

    def _failed(self, error: Exception) -> None:
        known = isinstance(error, KvscopeError)
        text = str(error) if known else f"archiving failed: {type(error).__name__}: {printable(error)}"
        if text != self._error:
            logger.error("%s", text)
        self._error = text

    # --- what it tells, from any thread ---

    def problems(self) -> list[str]:
        """One line each."""
        kept = "the store keeps its rows until they are archived"
        found = [f"ARCHIVE: {self._error}; {kept}"] if self._error else []
        if damaged := self._damage():
            more = f" (and {len(damaged) - 1} more)" if len(damaged) > 1 else ""
            found.append(f"ARCHIVE: {damaged[0]}{more}")
        return found

    def _damage(self) -> list[str]:
        """One line for each damaged file."""
        found = {}
        for path, one in list(self._looked.items()):
            with contextlib.suppress(KvscopeError):
                if one.damage and archive.identity(path) == one.identity:
                    found[path] = one.damage
        return list({**found, **self._damaged}.values())

    def explained(self, error: Exception) -> str:
        """Why a question failed, with what to do where the reason is a file of the archive."""
        said, reason = str(error), error.__context__
        if not isinstance(reason, duckdb.Error):  # as what the process of a user's SQL says
            return said
        paths = (self.archive.path(*key) for key in self._published)
        path = next((path for path in paths if str(path) in said), None)
        if path is not None and not path.exists():
            self._woken.set()
            return f"{path}: gone from the archive; ask again in a moment: then it is left out"
        if path is not None:
            found = archive.damage(path, whole=True)
            self._looked[path] = _Looked(archive.identity(path), True, found)
            return found or archive.damaged_line(path, said)
        # DuckDB names no file, and no kind of error, where it can't make out the beginning of a page.
        if type(reason) is not duckdb.Error:
            return said
        if damage := self._damage():
            return damage[0]
        if not all(one.whole for one in list(self._looked.values())):
            self._doubt = True
            self._woken.set()
            return (
                f"{said}: a file of the archive may be damaged; `kvscope status` names it when all have been "
                "read; until then ask with --since"
            )
        return said

    def status(self) -> dict[str, Any]:
        """For the daemon's status."""
        return {
            "path": str(self.archive.directory),
            "collector": self.archive.collector,
            "rows_written": self._rows,
            "bytes_written": self._bytes,
            "last_pass_at_ns": self._last_pass_ns,
            "error": self._error or next(iter(self._damage()), ""),
        }


def moved_until_ns(store: Store) -> int:
    """Unix time before which hours were moved to an archive; 0 where none were."""
    with store.cursor() as cursor:
        return archive.hot_from_ns(cursor)


def _check_there(store: Store, own: Archive) -> None:
    """Raises:
    ArchiveError: hours were moved to the archive, and there is none, as when its disk is not mounted.
    """
    if not (own.directory / LAYOUT).is_dir() and (moved_ns := moved_until_ns(store)):
        raise archive.ArchiveError(
            f"{printable(own.directory)}: no archive is there, and questions lack the hours before "
            f"{utc(moved_ns)[:16]} that were moved to it; "
            f"mount it, or make a folder {LAYOUT} in it to begin anew"
        )


def write_by_hand(
    store: Store,
    own: Archive | None,
    path: Path,
    since: str = "",
    until: str = "",
    seconds: float = BY_HAND_S,
) -> dict[str, Any]:
    """Write closed hours of the store and its archive to a directory, or those of the store to its archive.

    Args:
        own: the store's archive.
        path: absolute: that archive, or a directory that is new, empty or an archive.
        since, until: moments; empty for all.
        seconds: after these the answer comes, with what is left to do.

    Returns:
        `files` that were written; `next_ns`: from when on (Unix time) to ask again, None when done; and
        `left_out_from_ns`: when the first hour begins that has not closed, None where none was asked for.

    Raises:
        UsageError: the directory or a moment won't do.
        ArchiveError: it can't be written.
    """
    path = path.resolve()
    into_own = own is not None and path == own.directory
    if own is not None and not into_own and (own.directory in path.parents or path in own.directory.parents):
        raise UsageError(
            f"{printable(path)}: the daemon's archive is {own.directory}; name that or one apart"
        )
    target = (
        own if own is not None and into_own else Archive(archive.checked_directory(path), store.collector)
    )
    if own is not None and into_own:
        _check_there(store, own)
    end = time.monotonic() + seconds
    closed_ns = archive.closed_until_ns(time.time_ns())
    files: list[Written] = []
    with store.cursor() as cursor:
        since_ns = moment_ns(moment(cursor, since)) or 0
        until_ns = moment_ns(moment(cursor, until, "until"), name="until")
        # Asked to go on after the last hour, which is whole, since is the end of that.
        if until_ns is not None and since_ns >= until_ns and since_ns != until_ns + -until_ns % HOUR_NS:
            raise UsageError("since is not before until; turn them round")
        left_out_from_ns = closed_ns if until_ns is None or until_ns > closed_ns else None
        until_ns = closed_ns if until_ns is None else min(closed_ns, until_ns)
        rows = stored if into_own else relation
        next_ns: int | None = None
        with target.locked():
            for hour_ns, written in archive.write(target, cursor, rows, since_ns, until_ns):
                files += written
                if hour_ns != archive.UNTIMED and time.monotonic() > end:
                    next_ns = hour_ns + HOUR_NS
                    break
    return {
        "files": [one._asdict() for one in files],
        "next_ns": next_ns,
        "left_out_from_ns": left_out_from_ns,
    }
