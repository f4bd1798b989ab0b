"""Writes the reference pages in this folder from the code, so that they can't say anything else.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 and name those that are stale
"""

from __future__ import annotations

import argparse
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from kvscope import events, query, ring, schema, settings, steps

DOCS = Path(__file__).parent
NOTE = "<!-- Written by docs/generate.py (make docs). Change the code, not this page. -->"


class Undocumented(Exception):
    """Something in the code has no description."""


def page(title: str, *parts: str) -> str:
    return "\n\n".join([f"# {title}", NOTE, *parts]) + "\n"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown. Every cell must say something: an empty one is an undocumented entry."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        cells = [" ".join(str(cell).split()).replace("|", "\\|") for cell in row]
        if not all(cells):
            raise Undocumented(f"{' '.join(cells[:2])}: no {head[cells.index('')].lower()}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def paragraph(name: str, text: str) -> str:
    if not text.strip():
        raise Undocumented(f"{name} has no description")
    return text.strip()


def code(text: object) -> str:
    return f"`{text}`"


def module_text(doc: str | None) -> str:
    """A module's docstring, its indented parts as code blocks."""
    lines = (doc or "").strip().splitlines()
    out: list[str] = []
    for indented, group in groupby(lines, key=lambda line: line.startswith("    ")):
        text = "\n".join(line[4:] if indented else line for line in group)
        out.append(f"```text\n{text}\n```" if indented else text.strip("\n"))
    return "\n\n".join(part for part in out if part)


def events_page() -> str:
    parts = [
        module_text(events.__doc__),
        f"Vocabulary version: {events.VERSION}.",
        table(
            ("Code", "Event", "Recorded by", "Meaning"),
            ((e.code, f"[`{e.name}`](#{e.name.replace('.', '')})", e.source, e.doc) for e in _vocabulary()),
        ),
    ]
    for event in _vocabulary():
        text = paragraph(event.name, event.doc)
        parts += [f"## {event.name}", f"Code {event.code}, {event.source}. {text}"]
        if event.fields:
            rows = ((i, code(name), doc) for i, (name, doc) in enumerate(event.fields.items()))
            parts.append(table(("Position", "Field", "Meaning"), rows))
    return page("Events", *parts)


def _vocabulary() -> list[events.EventType]:
    return [events.VOCABULARY[number] for number in sorted(events.VOCABULARY)]


def steps_page() -> str:
    parts = [
        "The time to first token is a partition into these steps: disjoint, in order, summing up exactly. "
        "A boundary that was not observed makes the step `unknown`: never zero, never guessed.",
        f"Stages: {', '.join(steps.STAGES)}. Classes: {', '.join(steps.CLASSES)}.",
        "Compute wait is compute + capacity; coordination wait is coordination; transfer stands beside them.",
    ]
    for stage in dict.fromkeys(step.stage for step in steps.STEPS):
        rows = [
            (s.code, code(s.name), s.class_, s.doc, code(s.column), "yes" if s.in_ttft else "no")
            for s in steps.STEPS
            if s.stage == stage
        ]
        head = ("Code", "Step", "Class", "From → to", "Column of `requests`", "In TTFT")
        parts += [f"## {stage}", table(head, rows)]
    observed = table(("Code", "How a boundary or an interval was observed"), enumerate(steps.OBSERVED))
    return page("Steps", *parts, "## How it was observed", observed)


_TYPES = {"H": "u16", "I": "u32", "Q": "u64", "q": "i64"}


def layout(format_: str, base: int, *fields: tuple[str, str]) -> str:
    """Offsets of the fields of a struct format, each with a name and a meaning."""
    rows, at = [], base
    codes = _split(format_)
    if len(codes) != len(fields):
        raise Undocumented(f"{format_} has {len(codes)} fields and {len(fields)} descriptions")
    for one, (name, doc) in zip(codes, fields, strict=True):
        size = struct.calcsize("<" + one)
        type_ = _TYPES.get(one, f"{size} bytes" if one.endswith("s") else f"{one[:-1]} × i64")
        rows.append((at, size, type_, code(name), doc))
        at += size
    return table(("Offset", "Bytes", "Type", "Field", "Meaning"), rows)


def _split(format_: str) -> list[str]:
    """`<8sHH` to `8s`, `H`, `H`."""
    found, number = [], ""
    for character in format_.removeprefix("<"):
        if character.isdigit():
            number += character
        else:
            found.append(number + character)
            number = ""
    return found


def ring_page() -> str:
    common = (
        ("kind", "code of the event, or 1 for a piece of a text"),
        ("chunk", "which piece of the text, from 0"),
        ("length", "bytes of the whole text; 0 in events"),
        ("t_ns", "CLOCK_MONOTONIC when it was recorded, nanoseconds"),
        ("key", "of the request it speaks of, 0 for none; in a piece of a text, of that text"),
    )
    fields = "fields", "of the event; unused ones are 0"
    piece = "piece", "UTF-8; the last is filled up with zeros"
    tail = (
        ("crc32", "of the bytes before it, begun with the low half of `seq`"),
        ("seq_high", "high half of `seq`"),
        ("seq", "number of the slot's content, from 1; 0 in a slot never written"),
    )
    slot_tail = ring._SLOT.format.removeprefix(f"<{ring.SLOT_BYTES - 16}s")
    constants = (
        ("HEADER_BYTES", ring.HEADER_BYTES, "size of the header; the slots follow"),
        ("STATE_OFFSET", ring.STATE_OFFSET, "where the state lies in the header"),
        ("SLOT_BYTES", ring.SLOT_BYTES, "size of a slot; number n lies in slot n % slots"),
        ("MIN_SLOTS", ring.MIN_SLOTS, "fewest slots of a ring"),
        ("MAX_SLOTS", ring.MAX_SLOTS, "most slots of a ring"),
        ("DEFAULT_SLOTS", ring.DEFAULT_SLOTS, "slots when nothing is set"),
        ("MAX_FIELDS", events.MAX_FIELDS, "most fields of an event"),
        ("CHUNK_BYTES", ring.CHUNK_BYTES, "most bytes of a text in one slot"),
        ("MAX_TEXT_BYTES", events.MAX_TEXT_BYTES, "most bytes of a text; longer ones are cut"),
        ("MAX_SEQ", ring.MAX_SEQ, "numbers from here on are taken for damage"),
        ("ABANDONED_SLOT_NS", ring.ABANDONED_SLOT_NS, "grace for a number that is not written yet"),
        ("DEAD_RINGS_KEPT", ring.DEAD_RINGS_KEPT, "rings of dead processes that a new writer leaves"),
    )
    about = [(code(name), doc) for name, doc in _about_fields()]
    return page(
        "The ring on disk",
        module_text(ring.__doc__),
        f"File names end in `{ring.SUFFIX}`; a file ending in `{ring.DRAFT_SUFFIX}` is being made. "
        f"All numbers are little-endian. Magic: `{ring.MAGIC!r}`; version: {events.VERSION}, that of the "
        "[events](events.md).",
        "## Sizes",
        table(("Constant", "Value", "Meaning"), ((code(name), value, doc) for name, value, doc in constants)),
        "## Header",
        layout(
            ring._HEADER.format + ring._CRC.format.removeprefix("<"),
            0,
            ("magic", "says that this is a ring"),
            ("version", "of the events and of this layout; a reader refuses any but its own"),
            ("slot_bytes", "size of a slot"),
            ("slots", "how many"),
            ("ring_id", "random UUID"),
            ("pid", "of the writer, in its own namespace"),
            ("about_bytes", "size of the description that follows"),
            ("wall_ns", "Unix time when the ring was made, nanoseconds"),
            ("mono_ns", "CLOCK_MONOTONIC at the same moment: the anchor between the two"),
            ("crc32", "of all before it, gone on with over the description"),
        ),
        f"At {ring._ABOUT_OFFSET}: the description, JSON in UTF-8, of this shape:",
        table(("Key", "Meaning"), about),
        "## State",
        layout(
            ring._STATE.format,
            ring.STATE_OFFSET,
            ("state", f"{ring.RECORDING} recording, {ring.STOPPED} stopped for good"),
            ("crc32", "of the reason; a state whose checksum doesn't hold is not believed"),
            ("reason", "UTF-8, filled up with zeros"),
        ),
        "## Slot with an event",
        layout(ring._FIELDS.format + slot_tail, 0, *common, fields, *tail),
        "## Slot with a piece of a text",
        layout(ring._CHUNK.format + slot_tail, 0, *common, piece, *tail),
        "A text is whole when all pieces of its length are there. Pieces of several texts may alternate.",
    )


def _about_fields() -> list[tuple[str, str]]:
    docs = {
        "engine_id": "vLLM's engine id in kv_transfer_config",
        "source": "connector role: `scheduler` or `worker`",
        "rank": "worker rank within the engine (TP x PP)",
        "label": "KVSCOPE_LABEL: kind of traffic; empty is production",
        "host": "host name",
        "boot_id": "rings with one boot id share one CLOCK_MONOTONIC",
        "kvscope": "version of kvscope in the engine",
        "hooks": "hooks in place",
        "hooks_missing": "hooks that this vLLM lacks: their steps are unknown",
        "fingerprint": "versions of vLLM, NIXL and the model, connector, sizes, cache policy and the like",
    }
    if set(docs) != set(ring.About.__struct_fields__):
        raise Undocumented(f"ring.About: {sorted(set(docs) ^ set(ring.About.__struct_fields__))}")
    return [(name, docs[name]) for name in ring.About.__struct_fields__]


def schema_page() -> str:
    parts = [module_text(schema.__doc__), f"Schema version: {schema.VERSION}."]
    for one in schema.TABLES:
        rows = ((code(c.name), code(c.type), c.doc) for c in one.columns)
        text = paragraph(one.name, one.doc)
        parts += [f"## {one.name}", f"{text} Key: `{one.key}`.", table(("Column", "Type", "Meaning"), rows)]
    return page("Tables of the store", *parts)


def settings_page() -> str:
    rows = (
        (code(s.name), code(s.flag), code(s.variable), code(s.default) if s.default else "none", s.doc)
        for s in settings.listed()
    )
    head = ("Key", "Flag", "Environment", "Default", "Meaning")
    variables = ((code(name), doc) for name, doc in settings.ENGINE_VARIABLES.items())
    return page(
        "Settings",
        module_text(settings.__doc__),
        table(head, rows),
        "## In the environment of the engines",
        table(("Variable", "Meaning"), variables),
    )


def queries_page() -> str:
    parameters = ((code(f"${name}"), doc) for name, doc in query.PARAMETERS.items())
    parts = [module_text(query.__doc__), "## Parameters", table(("Parameter", "Meaning"), parameters)]
    for question in query.questions().values():
        takes = ", ".join(code(name) for name in question.parameters) or "none"
        parts += [
            f"## {question.name}",
            f"**{question.title}.** {paragraph(question.name, question.description)}",
            f"Parameters: {takes}.",
            table(("Column", "Meaning"), ((code(name), doc) for name, doc in question.columns.items())),
            f"```sql\n{question.sql}\n```",
        ]
    return page("Named questions", *parts)


PAGES: dict[str, Callable[[], str]] = {
    "events.md": events_page,
    "steps.md": steps_page,
    "ring.md": ring_page,
    "schema.md": schema_page,
    "settings.md": settings_page,
    "queries.md": queries_page,
}


def stale() -> list[str]:
    """Names of the pages that are not what the code says."""

    def text(path: Path) -> str:
        return path.read_text("utf-8") if path.exists() else ""

    return [name for name, make in PAGES.items() if text(DOCS / name) != make()]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/*.md from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a page is stale")
    if parser.parse_args().check:
        if names := stale():
            print(f"stale: {', '.join(names)}; run `make docs`", file=sys.stderr)
        return bool(names)
    for name, make in PAGES.items():
        (DOCS / name).write_text(make(), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
