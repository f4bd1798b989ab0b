"""Runs the SQL that users write in processes of their own, so that none can harm the daemon.

DuckDB's limits hold for joins, sorts and aggregates, but a scalar function may take any memory and any time,
and can't be interrupted. So each such query gets a process (`sandboxed`) with limits that the kernel holds,
which is killed when its time is over. The store's file is locked by the daemon: the process asks it for the
columns that DuckDB scans, and gets them as the query may see them, read within the query's own transaction.

Starting one takes half a second of CPU time. So from the first query on, for as long as queries come, one
waits in reserve: one that answered well, else a new one. All die with the daemon: the kernel kills them when
the thread ends that started them, which is why it is always the same one.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

import duckdb
import msgspec
import pyarrow

import kvscope
from kvscope import query, schema
from kvscope.collectors import sandboxed
from kvscope.errors import KvscopeError
from kvscope.selection import Selection
from kvscope.text import printable, span

COMMAND = (sys.executable, "-m", sandboxed.__name__)
START_S = 60.0
"""What a process gets to start, on a host that is busy."""
AGAIN_S = 5.0
"""What a process gets to be ready for another query."""
GRACE_S = 0.5
"""Longer than its time: a query that heeds the interrupt tells more than one that is killed."""
IDLE_S = 300.0
"""How long a process in reserve waits for a query."""
MAX_SHIPPED_BYTES = 256 << 20
"""Of rows, for one query."""
BATCH_ROWS = 4096
PIPE_BYTES = 1 << 20
_F_SETPIPE_SZ = 1031
"""Of Linux; Python names it from 3.10 on only where it was built with it."""
_KEPT_VARIABLES = ("PATH", "HOME", "LANG", "LC_ALL", "TZ", "LD_LIBRARY_PATH", "VIRTUAL_ENV")

_HOME = str(Path(kvscope.__file__).parents[1])
"""Where this kvscope is imported from."""

_FROM_CHILD: msgspec.json.Decoder[sandboxed.FromChild] = msgspec.json.Decoder(sandboxed.FromChild)


class Answered(NamedTuple):
    content: bytes
    """JSON as of `query.result_json`, or an Arrow stream."""
    truncated: bool


class Sandbox:
    """Answers queries; from any thread, but no more at once than there may be processes.

    Args:
        limits: of each query.
        memory_mb: what a process may use on top of what it has when it starts.
    """

    def __init__(self, limits: query.Limits, memory_mb: int) -> None:
        self._limits = limits
        self._memory_mb = memory_mb
        self._starter = ThreadPoolExecutor(1, "kvscope-sandbox")
        self._lock = threading.Lock()
        # Guarded by _lock.
        self._reserve: Future[_Child] | None = None
        self._idle: threading.Timer | None = None
        self._children: set[_Child] = set()
        self._running: dict[duckdb.DuckDBPyConnection, _Child] = {}
        self._closed = False

    def run(
        self,
        cursor: duckdb.DuckDBPyConnection,
        sql: str,
        parameters: query.Parameters,
        live: pyarrow.Table | None = None,
        arrow: bool = False,
    ) -> Answered:
        """Answer one SELECT or EXPLAIN that a user wrote; `cursor` is closed afterwards.

        Args:
            live: as for `query.run_sql`.
            arrow: as an Arrow stream, not as JSON.

        Raises:
            QueryRefused: it is something else, or too long, or a parameter is wrong.
            QueryError: DuckDB's own complaint, or it took too long or too much.
            KvscopeError: no process can be started.
        """
        with contextlib.closing(cursor):
            if len(sql.encode("utf-8", "replace")) > query.MAX_SQL_BYTES:
                raise query.QueryRefused(f"the SQL text is longer than {query.MAX_SQL_BYTES // 1024} KiB")
            selection = query.selected(query.resolved(cursor, parameters))
            child = self._take()
            with self._lock:
                self._running[cursor] = child
            try:
                with query.reading(cursor, self._limits.seconds, selection, live):
                    return self._converse(child, cursor, self._job(sql, parameters, selection, arrow))
            finally:
                with self._lock:
                    del self._running[cursor]
                if not child.answered:
                    child.end()
                self._give_back(child)

    def stop(self, cursor: duckdb.DuckDBPyConnection) -> None:
        """End the query that was given this cursor, if it runs; from any thread."""
        with self._lock:
            if (child := self._running.get(cursor)) is not None:
                child.kill()

    def close(self) -> None:
        """End all processes; queries that run fail. No more are answered."""
        with self._lock:
            self._closed = True
            children = list(self._children)
            if self._idle is not None:
                self._idle.cancel()
        for child in children:
            child.kill()
        self._starter.shutdown()
        for child in children:
            child.end()

    def _job(
        self, sql: str, parameters: query.Parameters, selection: Selection, arrow: bool
    ) -> sandboxed.Job:
        given = {name: list(v) if isinstance(v, tuple) else v for name, v in parameters.items()}
        return sandboxed.Job(
            sql,
            given,  # type: ignore[arg-type]
            selection.since_ns,
            selection.until_ns,
            selection.label,
            arrow,
            *self._limits,
        )

    # --- processes -------------------------------------------------------------------------------

    def _take(self) -> _Child:
        with self._lock:
            reserve, self._reserve = self._reserve, None
            if self._idle is not None:
                self._idle.cancel()
        if reserve is not None:
            with contextlib.suppress(KvscopeError):
                child = reserve.result()
                if child.lives():
                    return child
                child.end()
        return self._submit().result()

    def _submit(self) -> Future[_Child]:
        try:
            return self._starter.submit(self._start)
        except RuntimeError:
            raise KvscopeError("the daemon is stopping") from None

    def _start(self) -> _Child:
        """In the thread of `_starter`, whose end is the end of what it starts."""
        child = _Child(self._memory_mb, self._forget)
        with self._lock:
            self._children.add(child)
            closed = self._closed
        if closed:
            child.end()
            raise KvscopeError("the daemon is stopping")
        child.wait_ready(START_S)
        return child

    def _again(self, child: _Child) -> _Child:
        """In the thread of `_starter`: that process once it is ready for another query, else a new one."""
        if child.answered:
            with contextlib.suppress(KvscopeError):
                child.wait_ready(AGAIN_S)
                return child
        return self._start()

    def _forget(self, child: _Child) -> None:
        with self._lock:
            self._children.discard(child)

    def _give_back(self, child: _Child) -> None:
        with self._lock:
            if needed := self._reserve is None and not self._closed:
                self._reserve = self._starter.submit(self._again, child)
                if self._idle is not None:
                    self._idle.cancel()
                self._idle = threading.Timer(IDLE_S, self._retire)
                self._idle.daemon = True
                self._idle.start()
        if not needed:
            child.end()

    def _retire(self) -> None:
        with self._lock:
            reserve, self._reserve = self._reserve, None
        if reserve is not None:
            with contextlib.suppress(KvscopeError):
                reserve.result().end()

    # --- a query ---------------------------------------------------------------------------------

    def _converse(self, child: _Child, cursor: duckdb.DuckDBPyConnection, job: sandboxed.Job) -> Answered:
        shipped = 0
        with child.limited(self._limits.seconds + GRACE_S) as (source, sink):
            sandboxed.send(sink, job)
            while True:
                message = _FROM_CHILD.decode(sandboxed.receive(source))
                if isinstance(message, sandboxed.Need):
                    shipped += self._ship(cursor, message, sink, shipped)
                elif isinstance(message, sandboxed.Answer):
                    if message.bytes > sandboxed.max_answer_bytes(job.bytes):
                        raise EOFError
                    content = sandboxed.read_exactly(source, message.bytes)
                    child.answered = True
                    return Answered(content, message.truncated)
                elif isinstance(message, sandboxed.Complaint):
                    child.answered = True
                    raise (query.QueryRefused if message.refused else query.QueryError)(
                        printable(message.text)
                    )

    def _ship(
        self, cursor: duckdb.DuckDBPyConnection, need: sandboxed.Need, sink: IO[bytes], shipped: int
    ) -> int:
        """Send rows; returns their bytes. What the process names is compared with what there is."""
        table = schema.BY_NAME.get(need.table)
        if table is None or not set(need.columns) <= {column.name for column in table.columns}:
            raise EOFError
        most = min(MAX_SHIPPED_BYTES, self._memory_mb << 19)
        columns = ", ".join(f'"{name}"' for name in need.columns)
        reader = cursor.sql(f"SELECT {columns} FROM {table.name}").to_arrow_reader(BATCH_ROWS)
        sent = 0
        with pyarrow.ipc.new_stream(pyarrow.PythonFile(sink, "w"), reader.schema) as writer:
            for batch in _batches(reader):
                sent += batch.nbytes
                if shipped + sent > most:
                    raise query.QueryError(
                        f"the query reads more than {most >> 20} MB of the store; choose less with since, "
                        "until or where, name the columns it needs, or ask a snapshot with --db"
                    )
                writer.write_batch(batch)
        sink.flush()
        return sent


def _batches(reader: pyarrow.RecordBatchReader) -> Iterator[pyarrow.RecordBatch]:
    """What DuckDB reads for an Arrow stream, and its own complaint where it can't."""
    while True:
        try:
            batch = reader.read_next_batch()
        except StopIteration:
            return
        except (pyarrow.ArrowException, OSError) as error:
            kind = duckdb.InterruptException if "INTERRUPT Error" in str(error) else duckdb.Error
            raise kind(str(error)) from None
        yield batch


class _Child:
    """One process.

    Args:
        ended: is told when it is no more.

    Raises:
        KvscopeError: it can't be started.
    """

    def __init__(self, memory_mb: int, ended: Callable[[_Child], None]) -> None:
        self._ended = ended
        self.answered = False
        """As it should, and it is not ready yet for another query."""
        self._killed = False
        self._out_of_time_s: float | None = None
        variables = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
        try:
            self._process = subprocess.Popen(
                [*COMMAND, str(os.getpid()), str(memory_mb)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # What the daemon could import, and nothing of where it was started.
                cwd="/",
                env={
                    **variables,
                    "PYTHONPATH": os.pathsep.join([*filter(os.path.isabs, sys.path), _HOME]),
                    # Address space is what is limited: no reserves of it.
                    "MALLOC_ARENA_MAX": "2",
                    "ARROW_DEFAULT_MEMORY_POOL": "system",
                },
            )
        except OSError as error:  # no memory, or too many processes or files
            raise KvscopeError(
                f"no process can be started to run the query: {error.strerror}; ask again in a moment"
            ) from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._sink: IO[bytes] = self._process.stdin
        self._source: IO[bytes] = self._process.stdout
        for pipe in (self._sink, self._source):
            with contextlib.suppress(OSError):  # a user may have only so many bytes of pipes
                fcntl.fcntl(pipe, _F_SETPIPE_SZ, PIPE_BYTES)

    def wait_ready(self, seconds: float) -> None:
        """Raises:
        KvscopeError: it is not, in so many seconds.
        """
        try:
            with self.limited(seconds) as (source, _):
                if not isinstance(_FROM_CHILD.decode(sandboxed.receive(source)), sandboxed.Ready):
                    raise EOFError
            self.answered = False
        except query.QueryError:
            self.end()
            raise KvscopeError(
                "the process that would run the query does not start; the daemon's log may say why"
            ) from None

    def lives(self) -> bool:
        return self._process.poll() is None

    @contextlib.contextmanager
    def limited(self, seconds: float) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
        """Talk with it: what it sends, and what is sent to it. It is killed after `seconds`.

        Raises:
            QueryError: it was killed, ended, or sent what it should not.
        """
        timer = threading.Timer(seconds, self._out_of_time, [seconds])
        timer.daemon = True
        timer.start()
        try:
            yield self._source, self._sink
        except (EOFError, OSError, pyarrow.ArrowException, msgspec.MsgspecError, ValueError):
            # A ValueError: no valid text, or `end` has closed the pipes.
            raise query.QueryError(self._why_not()) from None
        finally:
            timer.cancel()

    def _out_of_time(self, seconds: float) -> None:
        self._out_of_time_s = seconds
        self.kill()

    def _why_not(self) -> str:
        """Why it does not answer as it should."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        if self._out_of_time_s is not None:
            took = span(round(self._out_of_time_s * 1e9))
            return f"the query was killed after {took}: it did not stop when told to; ask for less at a time"
        if self._killed:
            return "the query was stopped because the daemon is stopping, or nobody waits for its answer"
        if code is None:
            return "the query's process does not answer as it should; write the query in another way"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"the query ended its process ({how}); write it in another way, or ask for less"

    def kill(self) -> None:
        self._killed = True
        self._process.kill()

    def end(self) -> None:
        """Kill it, if it still lives, and leave nothing of it."""
        self.kill()
        for pipe in (self._sink, self._source):
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()
        self._ended(self)
