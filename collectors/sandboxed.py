"""The process in which queries that users wrote are run, one after the other: started by `sandbox`.

It holds none of the store's rows. Its tables are empty shells: when DuckDB scans one, it names the
columns that the query needs, and the shell asks the daemon for these alone, over the pipe. So neither the
text of the query nor a look at it decides what is sent, but DuckDB's own plan.

What the process may use is bounded by the kernel, because DuckDB's own limits leave scalar functions out:
address space, CPU time, no core file, no file to write, a low priority. A query that went well leaves nothing
behind: its cursor and its rows are dropped. After any other the process ends.
"""

from __future__ import annotations

import ctypes
import io
import os
import re
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from typing import IO, TYPE_CHECKING, Annotated, Any

import msgspec

from kvscope import query, schema
from kvscope.errors import KvscopeError
from kvscope.selection import Selection
from kvscope.text import size
from kvscope.views import VIEWS

if TYPE_CHECKING:
    import duckdb
    import pyarrow

MAX_MESSAGE_BYTES = 1 << 20
"""Of one message; what follows it is bounded for itself."""
MAX_TEXT = 2000
NICENESS = 5
MAX_QUERIES = 100
"""Of one process."""
MAX_KEPT_BYTES = 64 << 20
"""Of address space, beyond what it began with: a process that kept more of a query ends."""
_PR_SET_PDEATHSIG = 1
_LENGTH = struct.Struct("!I")
_WORD = re.compile(r"\w+")


class Ready(msgspec.Struct, tag="ready"):
    """The process waits for a job."""


class Job(msgspec.Struct, tag="job"):
    """What is asked, and what it may cost."""

    sql: str
    parameters: dict[str, str | int | list[str] | None]
    since_ns: int
    until_ns: int | None
    label: str | None
    arrow: bool
    """Answer with an Arrow stream, not with JSON."""
    rows: int
    bytes: int
    seconds: float


class Need(msgspec.Struct, tag="need"):
    """Asks for rows; an Arrow stream follows."""

    table: Annotated[str, msgspec.Meta(max_length=100)]
    columns: Annotated[list[str], msgspec.Meta(min_length=1, max_length=1000)]


class Answer(msgspec.Struct, tag="answer"):
    """So many bytes of the answer follow."""

    bytes: Annotated[int, msgspec.Meta(ge=0)]
    truncated: bool


class Complaint(msgspec.Struct, tag="complaint"):
    """There is no answer, and why."""

    refused: bool
    last: bool
    """The process ends."""
    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]


FromChild = Ready | Need | Answer | Complaint


def max_answer_bytes(limit: int) -> int:
    """Of an answer whose values weigh at most `limit`: JSON writes some of them longer."""
    return 2 * limit + (1 << 20)


def send(pipe: IO[bytes], message: msgspec.Struct) -> None:
    content = msgspec.json.encode(message)
    pipe.write(_LENGTH.pack(len(content)) + content)
    pipe.flush()


def receive(pipe: IO[bytes]) -> bytes:
    """The next message, undecoded.

    Raises:
        EOFError: the other side is gone, or sends what is no message.
    """
    (length,) = _LENGTH.unpack(read_exactly(pipe, _LENGTH.size))
    if length > MAX_MESSAGE_BYTES:
        raise EOFError
    return read_exactly(pipe, length)


def read_exactly(pipe: IO[bytes], count: int) -> bytes:
    """So many bytes.

    Raises:
        EOFError: there are not that many.
    """
    content = pipe.read(count)
    if len(content) < count:
        raise EOFError
    return content


def main(argv: Sequence[str]) -> int:
    """Arguments: process id of the daemon, and the megabytes that the query may use."""
    parent, memory_mb = int(argv[0]), int(argv[1])
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the daemon decides
    source, sink = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    sys.meta_path.insert(0, _WithoutPandas())
    connection = _connect(memory_mb)
    empty = _empty_tables(connection)
    before = _address_space()
    _bound(before + (memory_mb << 20))
    nothing = os.open(os.devnull, os.O_RDWR)
    for _ in range(MAX_QUERIES):
        cursor = connection.cursor()
        _shells(cursor, empty, source, sink)
        send(sink, Ready())
        # From here on nothing that is printed by chance reaches the pipe or the daemon's log.
        for number in (0, 1, 2):
            os.dup2(nothing, number)
        try:
            job = msgspec.json.decode(receive(source), type=Job)
        except EOFError:
            break
        content, message = _answered(cursor, job, memory_mb)
        send(sink, message)
        sink.write(content)
        sink.flush()
        del cursor, content
        if (isinstance(message, Complaint) and message.last) or _address_space() - before > MAX_KEPT_BYTES:
            break
    return 0


def _answered(cursor: duckdb.DuckDBPyConnection, job: Job, memory_mb: int) -> tuple[bytes, msgspec.Struct]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = int(used.ru_utime + used.ru_stime + job.seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, resource.RLIM_INFINITY))
    os.setpriority(os.PRIO_PROCESS, 0, NICENESS)
    too_large = Complaint(False, True, f"the query needed more than {memory_mb} MB; ask for less at a time")
    try:
        content, truncated = _run(cursor, job)
    except query.QueryRefused as error:
        return b"", Complaint(True, False, str(error)[:MAX_TEXT])
    except (MemoryError, query.OutOfMemory):
        return b"", too_large
    except KvscopeError as error:
        # What a scan raised comes as text in an error of DuckDB's.
        if "MemoryError" in str(error):
            return b"", too_large
        return b"", Complaint(False, isinstance(error, query.TooSlow), str(error)[:MAX_TEXT])
    if len(content) > max_answer_bytes(job.bytes):
        return b"", Complaint(False, True, f"the answer has {size(len(content))}; ask for less")
    return content, Answer(len(content), truncated)


def _run(cursor: duckdb.DuckDBPyConnection, job: Job) -> tuple[bytes, bool]:
    import pyarrow

    selection = Selection(job.since_ns, job.until_ns, job.label)
    limits = query.Limits(job.rows, job.bytes, job.seconds)
    with query.timed(cursor, job.seconds):
        cursor.execute("BEGIN TRANSACTION READ ONLY")
        if not job.arrow:
            result = query.answer(cursor, job.sql, selection, job.parameters, limits)
            return msgspec.json.encode(query.result_json(result), enc_hook=str), result.truncated
        table, truncated = query.answer_arrow(cursor, job.sql, selection, job.parameters, limits)
    stream = io.BytesIO()
    with pyarrow.ipc.new_stream(stream, table.schema) as writer:
        writer.write_table(table)
    return stream.getvalue(), truncated


def _connect(memory_mb: int) -> duckdb.DuckDBPyConnection:
    import duckdb

    return duckdb.connect(
        config={
            "threads": 1,
            "memory_limit": f"{memory_mb // 2}MB",
            "max_temp_directory_size": "0B",
            "enable_external_access": "false",
            "python_enable_replacements": "false",
            "lock_configuration": "true",
        }
    )


class _WithoutPandas(MetaPathFinder):
    """pyarrow would load pandas where it is installed, which takes as long as all the rest."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> None:
        if fullname == "pandas":
            raise ModuleNotFoundError(fullname)


def _empty_tables(connection: duckdb.DuckDBPyConnection) -> dict[str, pyarrow.Table]:
    """The store's tables without rows."""
    import pyarrow

    pyarrow.set_cpu_count(1)  # threads take address space
    pyarrow.set_io_thread_count(1)
    empty = {}
    for table in schema.TABLES:
        connection.execute(schema.create_sql(table))
        empty[table.name] = connection.sql(f"FROM {table.name}").to_arrow_table()
        connection.execute(f"DROP TABLE {table.name}")
    return empty


def _shells(
    cursor: duckdb.DuckDBPyConnection, empty: dict[str, pyarrow.Table], source: IO[bytes], sink: IO[bytes]
) -> None:
    """Register a table without rows for each of the store, which gets them when scanned, and the views."""
    import pyarrow
    import pyarrow.dataset

    def fetch(table: str, columns: list[str]) -> pyarrow.Table:
        send(sink, Need(table, columns))
        return pyarrow.ipc.open_stream(pyarrow.PythonFile(source, "r")).read_all()

    class Shell(pyarrow.dataset.InMemoryDataset):  # type: ignore[misc]
        """What DuckDB takes for a data set; it asks for a scanner once per scan."""

        def __init__(self, name: str, empty: pyarrow.Table) -> None:
            super().__init__(empty)
            self._name = name
            self._fetched: list[pyarrow.Table] = []

        def scanner(self, columns: list[str] | None = None, filter: Any = None, **options: Any) -> Any:
            names = self.schema.names
            if columns is not None:
                # Columns that only the filter reads are not among them.
                wanted = {*columns, *_WORD.findall(str(filter))}
                names = [name for name in names if name in wanted] or names[:1]
            table = next((one for one in self._fetched if set(names) <= set(one.column_names)), None)
            if table is None:
                table = fetch(self._name, names)
                self._fetched.append(table)
            # DuckDB reads it as the types it was told before, whatever came.
            table = table.cast(pyarrow.schema([self.schema.field(name) for name in table.column_names]))
            found = pyarrow.dataset.dataset(table)
            return found.scanner(columns=columns, filter=filter, use_threads=False, **options)

    for name, table in empty.items():
        cursor.register(name, Shell(name, table))
    for name, sql in VIEWS.items():
        cursor.execute(f"CREATE TEMP VIEW {name} AS {sql}")


def _address_space() -> int:
    """Bytes that the process has."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _bound(address_space: int) -> None:
    """Let the process have no more bytes than that, and write no file."""
    resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
