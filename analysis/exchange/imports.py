"""Make a store of what others wrote, or add to one: Parquet archives and snapshots of kvscope, vLLM's
traces (OTLP/JSON lines or protobuf, as an OpenTelemetry collector writes files) and vLLM's debug logs.

examples:
  kvscope import /archive -o incident.duckdb
  kvscope import traces.jsonl.gz -o traces.duckdb
  kvscope import prefill.log decode.log -o logs.duckdb --utc-offset=+02:00
  kvscope explain REQUEST --db logs.duckdb

Traces and logs know less than kvscope records: what they don't tell stays unknown. Give the files of both
engines at once, so that legs can be joined. What is imported twice is stored once.
"""

from __future__ import annotations

import argparse
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

from kvscope import schema, storefile
from kvscope.analysis.exchange import import_log, import_otlp
from kvscope.analysis.exchange.import_lines import Notes, reading
from kvscope.analysis.exchange.import_store import Store, opened, table_batches
from kvscope.errors import KvscopeError, UsageError
from kvscope.filters import checked_text
from kvscope.outfile import Progress
from kvscope.source import print_json
from kvscope.text import printable

ARCHIVE, OTLP, LOG = "archive", "otlp", "log"
KINDS = (ARCHIVE, OTLP, LOG)
IMPORTED = "imported"
"""Label of what was not recorded by kvscope."""
MAX_SOURCES = 1000
BATCH_ROWS = 20_000
_HEAD_BYTES = 1 << 16
_WANTED = [table.name for table in schema.TABLES if table is not schema.ENGINES]
"""Tables of which a row makes an import worth while."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources", nargs="+", type=Path, metavar="SOURCE", help="directories or files, also .gz"
    )
    parser.add_argument(
        "-o", "--output", required=True, type=Path, metavar="STORE", help="a store: new, or to be added to"
    )
    parser.add_argument("--force", action="store_true", help="replace the store where there is one")
    parser.add_argument(
        "--kind",
        choices=KINDS,
        help="what the sources are; default told from each: archive (or snapshot), otlp, log",
    )
    parser.add_argument(
        "--label", help=f"kind of traffic of what is imported; default {IMPORTED}; archives keep their own"
    )
    parser.add_argument(
        "--utc-offset",
        default="+00:00",
        metavar="±HH:MM",
        help="of the local time in logs; default +00:00 (UTC)",
    )
    parser.add_argument(
        "--year", type=int, metavar="YYYY", help="of logs, whose lines tell none; default by file time"
    )
    parser.add_argument("--json", action="store_true", help="print what was imported as JSON")


def run(arguments: argparse.Namespace) -> int:
    if len(arguments.sources) > MAX_SOURCES:
        raise UsageError(f"at most {MAX_SOURCES} sources at once")
    if arguments.year is not None and not 1971 <= arguments.year <= 2200:
        raise UsageError("--year is a year such as 2026")
    label = checked_text("label", IMPORTED if arguments.label is None else arguments.label)
    offset = _offset(arguments.utc_offset)
    for path in arguments.sources:
        if arguments.output.exists() and path.exists() and path.samefile(arguments.output):
            raise UsageError(f"{printable(path)} is both source and target; name another target with -o")
    kinds = [arguments.kind or _kind(path) for path in arguments.sources]
    notes = Notes()
    with opened(arguments.output, arguments.force) as store:
        joining = import_otlp.Joining(store, notes, label)
        logs = import_log.Logs(store, notes, label)
        progress = Progress("rows imported:")
        try:
            for path, kind in zip(arguments.sources, kinds, strict=True):
                if kind == ARCHIVE:
                    _archive(path, arguments.label, store, progress)
                    continue
                with reading(path) as file:
                    if kind == OTLP:
                        import_otlp.read(file, joining, notes)
                    else:
                        logs.read(file, path.name, offset, arguments.year or _year(path, notes))
                progress.tell(notes.requests)
            joining.finish()
            logs.finish()
            store.flush()
        finally:
            progress.close()
        if not any(found.get(table) for found in (store.stored, store.known) for table in _WANTED):
            raise KvscopeError(_nothing(arguments.sources, kinds, notes))
    if LOG in kinds:
        notes.assume(f"times without a zone are taken for UTC{arguments.utc_offset}: see --utc-offset")
    _tell(arguments, kinds, store, notes)
    return 0


def _archive(path: Path, label: str | None, store: Store, progress: Progress) -> None:
    """A Parquet directory, a snapshot or a store: its rows as they are."""
    import pyarrow

    connection = storefile.open_file(path)
    try:
        for table in schema.TABLES:
            names = [column.name for column in table.columns]
            for batch in table_batches(connection, table.name, BATCH_ROWS):
                if label is not None and "label" in names and table is not schema.SAMPLES:
                    place = names.index("label")
                    same = pyarrow.array([label] * batch.num_rows, pyarrow.string())
                    batch = batch.set_column(place, "label", same)
                store.add_batch(table.name, batch)
                progress.tell(sum(store.stored.values()))
    finally:
        connection.close()


def _kind(path: Path) -> str:
    """What a source is, by what it begins with.

    Raises:
        KvscopeError: it can't be read, or it is none of the three.
    """
    if path.is_dir():
        return ARCHIVE
    with reading(path) as file:
        head = file.read(_HEAD_BYTES)
    if head[8:12] == b"DUCK":
        return ARCHIVE
    if b"resourceSpans" in head or b"resource_spans" in head:
        return OTLP
    if import_log.looks_like_log(head):
        return LOG
    if import_otlp.is_binary(head):
        return OTLP
    raise KvscopeError(
        f"{printable(path)}: neither a kvscope archive nor OTLP traces nor a vLLM log; --kind says what it is"
    )


def _year(path: Path, notes: Notes) -> int:
    """The year of a log's lines, by the time of the file."""
    with reading(path) as file:
        head = file.read(_HEAD_BYTES)
    year = import_log.log_year(path.stat().st_mtime, head)
    if import_log.tells_no_year(head):
        notes.assume(f"lines without a year are taken for {year}, by the time of the file: see --year")
    return year


_OFFSET = re.compile(r"([+-])(\d\d):?([0-5]\d)", re.ASCII)


def _offset(text: str) -> timedelta:
    match = _OFFSET.fullmatch(text.strip())
    if match is None or int(match[2]) > 14:
        raise UsageError(
            f"--utc-offset: {printable(text)[:40]!r} is no offset; write it like --utc-offset=+02:00"
        )
    sign = -1 if match[1] == "-" else 1
    return sign * timedelta(hours=int(match[2]), minutes=int(match[3]))


def _nothing(sources: list[Path], kinds: list[str], notes: Notes) -> str:
    names = ", ".join(printable(path.name) for path in sources[:3])
    why = _counts({**notes.not_understood, **notes.left_out})
    hint = " (is it of VLLM_LOGGING_LEVEL=DEBUG?)" if LOG in kinds else ""
    if notes.left_out[import_otlp.OWN_SPANS]:
        hint = " (import takes vLLM's traces, not those of kvscope, which a snapshot or an archive moves)"
    return f"nothing to import in {names}{hint}{': ' + why if why else ''}"


def _counts(found: dict[str, int]) -> str:
    shown = sorted(found.items(), key=lambda item: -item[1])[:8]
    return ", ".join(f"{count} {what}" for what, count in shown)


def _tell(arguments: argparse.Namespace, kinds: list[str], store: Store, notes: Notes) -> None:
    if arguments.json:
        told: dict[str, Any] = {
            "store": str(arguments.output),
            "kinds": sorted(set(kinds)),
            "stored": {name: count for name, count in store.stored.items() if count},
            "there_already": {name: count for name, count in store.known.items() if count},
            "requests_of_traces_and_logs": notes.requests,
            "of_these_joined": notes.joined,
            "not_understood": dict(notes.not_understood),
            "left_out": dict(notes.left_out),
            "assumed": notes.assumed,
        }
        print_json(told)
        return
    print(f"{printable(arguments.output)}: stored {_counts(store.stored) or 'nothing'}")
    if any(store.known.values()):
        print(f"there already: {_counts({n: c for n, c in store.known.items() if c})}")
    if notes.requests:
        print(f"of {notes.requests} requests of traces and logs, both legs were found of {notes.joined}")
    if notes.not_understood:
        print(f"not understood: {_counts(notes.not_understood)}")
    if notes.left_out:
        print(f"left out: {_counts(notes.left_out)}")
    for sentence in notes.assumed:
        print(f"assumed: {sentence}")
