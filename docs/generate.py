"""Writes the reference pages in this folder from the code, so that they can't say anything else.

python docs/generate.py            write them
python docs/generate.py --check    exit 1 and name those that are stale
"""

from __future__ import annotations

import argparse
import ast
import inspect
import struct
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import TypeGuard

from kvscope import client, events, frame, labels, metrics, query, ring, samples, schema, settings, steps
from kvscope.analysis import whatif
from kvscope.collectors import api, live
from kvscope.tui import app, command, help, lines

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


def samples_page() -> str:
    parts = [module_text(samples.__doc__)]
    sources = {
        samples.RING: "The engines' own",
        samples.KVSCOPE: "Counted by the daemon",
        samples.VLLM: "From vLLM's /metrics",
        samples.HOST: "From the host",
    }
    for source, title in sources.items():
        rows = ((code(k.name), k.unit, k.doc) for k in samples.KINDS.values() if k.source == source)
        parts += [f"## {title}", table(("Name", "Unit", "Meaning"), rows)]
    parts += [
        "## Asking for them",
        "They are rows of the table [`samples`](schema.md#samples), one number each; the engines' own are "
        "stored as means over `sample_seconds`:",
        '```text\nkvscope query "SELECT engine, source, max(value) AS cores FROM samples '
        "WHERE name = 'process.cpu' GROUP BY ALL\"\n```",
    ]
    return page("Samples", *parts)


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
    parameters = ((code(name), doc) for name, doc in query.PARAMETERS.items())
    parts = [
        module_text(query.__doc__),
        "## Parameters",
        table(("Parameter", "Meaning"), parameters),
        "They are flags of `kvscope query` (`--where` can be repeated) and keys of `parameters` in the API, "
        "where `where` is a list. All but `limit` apply to any SQL by themselves; SQL may also use `$since` "
        "and `$until` (Unix nanoseconds; 0 and now where they are not given), `$label` and `$limit`. A "
        "parameter that would change nothing is refused: a question about other tables than requests takes "
        "neither `label` nor `where`, one about engines alone no time.",
        "## How fast",
        "Of ten million simulated requests in a day (4 GB), on two cores with DuckDB's default memory, "
        "measured by `bench/offline.py`: every question about the last hour (417,000 requests) takes 0.02 "
        f"to 0.8 s, `steps` over all 1.7 s. Beyond {query.EXACT_ROWS:,} rows percentiles are of samples, "
        "which the answer says. Over all, most others take less than 8 s; `interference` and `regret` take "
        "longer than a daemon gives a question (`sql_seconds`), so ask them about less. One request is "
        "found by its id in 0.07 s, by the client's, vLLM's or its trace id in 0.2 to 0.5 s. The process "
        "took up to 0.9 GB.",
    ]
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


def metrics_page() -> str:
    parts = [module_text(metrics.__doc__)]
    for title, members in groupby(metrics.METRICS, key=lambda metric: metric.section):
        rows = (
            (
                code(one.name),
                f"{one.kind}, {one.unit}",
                ", ".join(code(label) for label in one.labels) or "none",
                paragraph(one.name, one.help),
            )
            for one in members
        )
        parts += [f"## {title}", table(("Metric", "Type, unit", "Labels", "Meaning"), rows)]
    buckets = (
        (code(one.name), ", ".join(f"{bound:g}" for bound in one.buckets))
        for one in metrics.METRICS
        if one.buckets
    )
    used = {label for one in metrics.METRICS for label in one.labels}
    if used != set(metrics.LABELS):
        raise Undocumented(f"metrics.LABELS: {sorted(used ^ set(metrics.LABELS))}")
    parts += [
        "## Labels",
        table(("Label", "Meaning"), ((code(name), doc) for name, doc in metrics.LABELS.items())),
        "## Buckets",
        table(("Histogram", "Upper bounds, beside +Inf"), buckets),
    ]
    return page("Metrics", *parts)


LIVE = """\
`GET /api/v1/live` answers with one frame: all that the screens of `kvscope top` show of one window, of now
or of the past. `GET /api/v1/stream` answers with a frame a line (`application/x-ndjson`) until the viewer
goes or the daemon stops; it takes no `at`. A window is at most {days} days long. {streams} streams may be
open; one more gets a 503. When a frame of a stream can't be made, its line is an error like any other, and
the last one. A line has at most {mib} MiB.

The first frame of a stream is whole. Those that follow say `whole: false`, and their requests are changes:

1. drop the requests named by `gone`, in flight or recent;
2. put those of `in_flight`, and drop the same ids from the recent ones;
3. put those of `recent`, and drop the same ids from those in flight;
4. drop recent ones that arrived before `at_ns - window_ns`, and all but the {recent:,} that arrived last.

All else in a frame is whole. A viewer that fell behind, or whose label is not the leading one any more,
gets a whole frame again. Requests are followed with every frame. Figures cost a query each and are made
anew every second or few: they are of the window that ends at `figures_at_ns`, and the same questions about
that window answer the same. Requests in flight are of the label and the filters, whenever they arrived. One
whose `outcome` is not `in flight` is over for its client, while P still holds its blocks."""


def api_page() -> str:
    scope = dict(_fields(frame, "Scope"))
    parameters = [(code(name), code(type_), doc) for name, (type_, doc) in scope.items()]
    refresh = f"{api.MIN_REFRESH_NS // 10**6}ms to {api.MAX_REFRESH_NS // 10**9}s; default 1s"
    head = ("Parameter", "Type", "Meaning")
    parts = [
        module_text(api.__doc__),
        "## Live",
        LIVE.format(
            days=live.MAX_WINDOW_NS // (86400 * 10**9),
            streams=live.MAX_STREAMS,
            mib=client.MAX_LINE_BYTES >> 20,
            recent=frame.MAX_RECENT,
        ),
        "## Parameters",
        table(head, [*parameters, ("`refresh`", "`str`", f"Stream only: {refresh}")]),
    ]
    for name, text in (
        ("Frame", "A JSON object."),
        ("RequestRow", "A JSON array, in this order."),
        ("Engine", "A JSON object."),
        ("Sample", "A JSON array, in this order."),
        ("Answer", "A JSON object."),
        ("Finding", "A JSON object."),
    ):
        rows = [(code(field), code(type_), doc) for field, (type_, doc) in _fields(_home(name), name)]
        parts += [f"## {name}", text, table(("Field", "Type", "Meaning"), rows)]
    for name, text in (
        (
            "Change",
            "Body of `POST /api/v1/labels`; `GET` and the answer to `POST` are `{labels: [Label, …]}`.",
        ),
        ("Label", "A named window ([labels.md](labels.md))."),
        ("Note", "A JSON object."),
    ):
        rows = [(code(field), code(type_), doc) for field, (type_, doc) in _fields(labels, name)]
        parts += [f"## {name}", text, table(("Field", "Type", "Meaning"), rows)]
    return page("HTTP API", *parts)


def _home(name: str) -> ModuleType:
    return samples if name == "Sample" else frame


def _fields(module: ModuleType, name: str) -> list[tuple[str, tuple[str, str]]]:
    """Fields of a struct: type and meaning, from the text below each, else from the column of that name."""
    columns = {c.name: c.doc for one in (schema.ENGINES, schema.REQUESTS) for c in one.columns}
    classes = {f"{class_}_ns": f"Nanoseconds of its TTFT: {class_}" for class_ in steps.CLASSES}
    found = []
    body = next(n.body for n in ast.parse(inspect.getsource(module)).body if _is_class(n, name))
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field = node.target.id
            own = ""
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                own = str(after.value.value)
            doc = classes.get(field) or own or columns.get(field) or ""
            found.append((field, (ast.unparse(node.annotation), doc)))
    return found


def _is_class(node: ast.stmt, name: str) -> TypeGuard[ast.ClassDef]:
    return isinstance(node, ast.ClassDef) and node.name == name


TOP_STATES = """\
- **No daemon, or it went away**: the header says which address, why, and what to start; it asks again by
  itself, less and less often, and goes on where it was. The last figures stay, dim and marked STALE.
- **No engine records, or none has had a request**: the two wiring steps, or where to send a request.
- **A daemon of another version**: named, with what to upgrade.
- **Losses, engines that are not instrumented, missing hooks, clock errors, findings**: counted in the
  header on every page, the gravest first; `!` lists them with what to do.
- **Another kind of traffic**: one label at a time, production if there is any; `b` goes to the next."""

TOP_PAST = """\
`kvscope top --db FILE --at TIME` shows the window that ended then, of a store, a snapshot or a directory of
Parquet files (`v1/<table>/d=<day>/h=<hour>/*.parquet`); `--speed N` plays on from there. In a live view ←
goes back in time as well, and `l` back to now. Requests in flight are shown as they were at that moment,
from what was stored of them later: what each waited for in words is known live only. Figures are as of that
moment too: a request without a first token by then is in none, and one that still generated has no TPOT and
no output tokens yet. Engines are in the
state in which they were last seen."""

TOP_FIGURES = """\
Every figure is the answer of a named question about the window in the header, so `kvscope query fleet
--since … --until …` (and `fleet_bands`, `fleet_steps`, `fleet_trend`, `pairs`, `sessions`, …) says the same.
Percentiles are exact and never added up: a band's bar is the mean split of the requests in it. A request
counts from its first token on; one that still generates is counted too, and its TPOT comes when it ends.
Of the past, `kvscope query` also knows how a request of the window went on after `--until`; where none was in
flight then, both say the same. Output tokens are of requests that began and ended in the window."""


def top_page() -> str:
    pages = ((code(one.key), f"[{one.title}](pictures/README.md)", one.about) for one in app.PAGES)
    keys = [(code(key.shown), key.doc) for key in help.KEYS]
    known = {key.shown for key in help.KEYS}
    own = [
        (code(shown), f"{doc} ({one.title})")
        for one in app.PAGES
        for shown, doc in one.hints
        if shown not in known
    ]
    return page(
        "kvscope top",
        module_text(
            (command.__doc__ or "").replace("\n  kvscope", "\n    kvscope").replace("examples:\n", "")
        ),
        "![The fleet page](pictures/fleet.svg)",
        "## Pages",
        table(("Key", "Page", "What it shows"), pages),
        "## Keys",
        table(("Key", "What it does"), [*keys, *own]),
        "A click on a column's head sorts by it, a double click opens a row.",
        "## Classes",
        table(
            ("Class", "In bars", "Letter", "Meaning"),
            (
                (code(name), lines.PATTERN[name], steps.LETTER[name], doc)
                for name, doc in help.MEANING.items()
            ),
        ),
        "Colours are five of the terminal's own sixteen; with `NO_COLOR` set or `TERM=dumb` the patterns and "
        "letters remain.",
        "## Figures",
        TOP_FIGURES,
        "## The past",
        TOP_PAST,
        "## What it says when something is wrong",
        TOP_STATES,
    )


def whatif_page() -> str:
    every = whatif.scenarios(512, 60 * 10**9)
    found = whatif.figures()
    checked = (
        f"Last checked {found['measured_at']}, with kvscope {found['kvscope']}, vLLM {found['vllm']} and "
        f"NIXL {found['nixl']}: {found['how']}. Load average of the machine at the beginning: "
        f"{found['load_average']}."
        if found
        else "It was not checked yet."
    )
    rows = [
        (
            "pulled under push" if figure["scenario"] == "push" else "pushed under pull",
            f"{figure['base_p50_ms']:.1f} ms",
            f"{figure['predicted_p50_ms']:.1f} ms",
            f"{figure['measured_p50_ms']:.1f} ms",
            f"**{figure['error_percent']:+.1f} %**",
            f"{100 * (figure['base_p50_ms'] / figure['measured_p50_ms'] - 1):+.1f} %",
            figure["requests"],
        )
        for figure in found.get("scenarios", ())
    ]
    head = ("", "It was", "Predicted", "Measured", "Error", "Error of “no change”", "Requests")
    return page(
        "What if",
        module_text(
            (whatif.__doc__ or "").replace("\n  kvscope", "\n    kvscope").replace("examples:\n", "")
        ),
        "## Scenarios",
        table(
            ("`--scenario`", "What if", "It assumes that"),
            ((code(one.name), one.title, one.assumption) for one in every),
        ),
        "`threshold` and `ttl` come with `--threshold TOKENS` and `--ttl SECONDS` only; the table has "
        "512 tokens and 60 s.",
        "## How far off it is",
        "`make validate-whatif` sends the same load through real engines under push and under pull, and "
        "holds the median TTFT that one mode predicted for the other against the one that was measured. "
        "It fails beyond 15 %, and writes what it found to `analysis/whatif_validated.json`, from which "
        "this page and the command take it. The other scenarios are not validated: their arithmetic is "
        "tested, their assumptions are not.",
        checked,
        *([table(head, rows)] if rows else []),
        "A prediction takes what lies side by side to be free, as it is where P and D have hosts of their "
        "own. Here they share two cores, so that push gains less than it would elsewhere; with a small "
        "model, whose first token takes 0.1 s, most of it in the frontends, it was predicted 19 % too fast "
        "(240 requests, 4 layers 128 wide, 2026-11-30). Only medians were checked, not the predictions of "
        "single requests that `kvscope explain` shows.",
    )


PAGES: dict[str, Callable[[], str]] = {
    "whatif.md": whatif_page,
    "top.md": top_page,
    "events.md": events_page,
    "steps.md": steps_page,
    "ring.md": ring_page,
    "schema.md": schema_page,
    "samples.md": samples_page,
    "settings.md": settings_page,
    "queries.md": queries_page,
    "metrics.md": metrics_page,
    "api.md": api_page,
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
