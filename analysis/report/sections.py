"""Answers made into the sections of a report, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvscope import __version__, query, steps
from kvscope.analysis.report import engines
from kvscope.analysis.report.data import Answer, Gathered
from kvscope.analysis.report.parts import (
    Bars,
    Column,
    Query,
    Report,
    Section,
    Stack,
    Table,
    Trend,
    shown,
    table,
)
from kvscope.analysis.report.requests import slowest, unfinished
from kvscope.analysis.report.verdict import (
    cautions,
    label_name,
    pair_name,
    requests,
    several_connectors,
    verdict,
    whole,
)
from kvscope.analysis.traffic import SIMULATED
from kvscope.text import span, utc

Row = Mapping[str, Any]
MAX_PAIRS = 10

_PERCENT = [f"{class_}_percent" for class_ in steps.CLASSES]
_MS = [f"{class_}_ms" for class_ in steps.CLASSES]
_RATES = (
    "part", "p50_tpot_ms", "p90_tpot_ms", "requests_per_s", "output_tokens_per_s", "not_finished",
    "not_joined", "recomputed", "read_after_expiry",
)  # fmt: skip
_TITLES = {
    "part": "connector",
    "p_engine": "P",
    "d_engine": "D",
    "at_ns": "from (UTC)",
    "lease_end": "end",
    "p50_gb_per_s": "p50 GB/s",
    "best_gb_per_s": "best GB/s",
}


def report(found: Gathered, title: str | None = None) -> Report:
    """All of it."""
    simulated = is_simulated(found)
    parts = [
        *([_windows(found)] if found.windows else []),
        _overview(found),
        _trend(found),
        _bands(found),
        _steps(found),
        _pairs(found),
        slowest(found),
        unfinished(found),
        _plain(found, "outcomes", "Outcomes", "What came of the requests, and how their legs were joined."),
        _plain(
            found,
            "leads",
            "Leads and lags",
            "How much earlier than the end of prefill the decode side was ready; a lag is negative.",
        ),
        _plain(found, "leases", "Leases", "Blocks kept for the peer, and how that ended. Of all labels."),
        _plain(found, "handshakes", "Handshakes", "NIXL handshakes. Of all labels."),
        _plain(
            found,
            "failures",
            "Failures",
            "What the connector logged as failed, hooks that raised, recorders that stopped. Of all labels.",
        ),
        *([_plain(found, "reuse", "Reuse", _about("reuse"))] if found.rows("reuse") else []),
        _engines(found),
        _quality(found),
    ]
    return Report(
        title or f"Where first tokens waited: {window(found)}",
        _facts(found),
        simulated,
        verdict(found),
        cautions(found, simulated),
        parts,
        _data(found, simulated),
    )


def is_simulated(found: Gathered) -> bool:
    """Whether the label or an engine that served its requests says so; without requests no engine did."""
    rows = engines.serving(found) if found.stored else []
    said = [found.scope.label, *(str(row[name] or "") for row in rows for name in ("label", "kvscope"))]
    return any(text.startswith(SIMULATED) for text in said)


def window(found: Gathered) -> str:
    """In UTC, to the second."""
    since_ns, until_ns = _bounds(found)
    if not since_ns or until_ns is None:
        return "no requests"
    first, last = utc(since_ns)[:19], utc(until_ns)[:19]
    return f"{first} to {last[11:] if first[:10] == last[:10] else last} UTC"


def _bounds(found: Gathered) -> tuple[int | None, int | None]:
    """The window asked for; where it has no beginning, from the first to the last arrival."""
    if found.scope.since_ns is None:
        return found.stored or (None, None)
    return found.scope.since_ns, found.scope.until_ns


def _facts(found: Gathered) -> list[tuple[str, str]]:
    scope = found.scope
    row = whole(found)
    all_of_it = "" if scope.since_ns or scope.until_ns else " (all that is stored)"
    other = [name for name in found.labels if name != scope.label]
    facts = [
        ("Window", window(found) + all_of_it),
        ("Label", label_name(scope.label) + (f" (others: {_names(other)})" if other else "")),
        ("Filters", shown(list(scope.where)) if scope.where else "none"),
        ("Requests", f"{row['requests'] if row else 0} with a first token"),
        ("Source", shown(found.source)),
        ("Made", f"{utc(found.made_at_ns)[:19]} UTC by kvscope {__version__}"),
    ]
    if found.source_version and found.source_version != __version__:
        facts.append(
            ("Daemon", f"kvscope {found.source_version}: its questions may differ from the SQL given here")
        )
    return facts


def _names(labels: Sequence[str]) -> str:
    return ", ".join(label_name(name) for name in labels[:10])


def _data(found: Gathered, simulated: bool) -> dict[str, Any]:
    """What the JSON has beside what is shown: scope and answers as they came."""
    scope = found.scope
    return {
        "made_at_ns": found.made_at_ns,
        "kvscope": __version__,
        "source": found.source,
        "since_ns": scope.since_ns,
        "until_ns": scope.until_ns,
        "label": scope.label,
        "labels": found.labels,
        "where": list(scope.where),
        "simulated": simulated,
        "answers": {
            one.name: {
                "columns": one.columns,
                "rows": one.rows,
                "truncated": one.truncated,
                "approximate": one.approximate or None,
                "error": one.error or None,
                "command": one.command,
                "sql": one.sql,
            }
            for one in found.answers.values()
        },
        "slowest": found.requests,
        "unfinished": found.unfinished,
        "problems": found.problems,
        "windows": msgspec.to_builtins(found.windows),
    }


# --- sections ----------------------------------------------------------------------------------------


def _table(
    caption: str, names: Sequence[str], rows: Sequence[Row], most: int = 30, folded: bool = False
) -> Table:
    """These columns of an answer; those that hold numbers alone are told as such."""
    columns = [
        Column(name, _heading(name), all(isinstance(row[name], int | float | None) for row in rows))
        for name in names
    ]
    return table(caption, columns, rows, most, folded)


def _heading(name: str) -> str:
    if name in _TITLES:
        return _TITLES[name]
    for end, unit in (("_ms", " ms"), ("_percent", " %"), ("_bytes", " bytes")):
        if name.endswith(end):
            name = name.removesuffix(end) + unit
            break
    return name.replace("_", " ").replace("ttft", "TTFT").replace("tpot", "TPOT")


def _section(answer: Answer | None, name: str, title: str, text: str = "") -> Section:
    """One without parts yet; it says so where there is no answer or a part of one."""
    section = Section(name, title, [text] if text else [])
    if answer is None:
        section.text.append("This kvscope does not have the question.")
        return section
    section.queries.append(Query(f"question {answer.name}", answer.command, answer.sql))
    if answer.error:
        section.text.append(f"Not answered: {shown(answer.error)}.")
    elif answer.truncated:
        section.text.append(f"Cut after {len(answer.rows)} rows by the limits of the query.")
    section.text += _approximate(answer)
    return section


def _approximate(answer: Answer) -> list[str]:
    """Why its figures are not exact; nothing where they are."""
    if (one_in := answer.one_in) > 1:
        return [f"Approximate: of many requests an even sample was looked at, one in {one_in}."]
    return [f"Approximate: {shown(answer.approximate)}."] if answer.approximate else []


def _about(name: str) -> str:
    return query.questions()[name].description


def _plain(found: Gathered, name: str, title: str, text: str) -> Section:
    """A section that is the question's table."""
    answer = found.answers.get(name)
    section = _section(answer, name, title, text)
    if answer and answer.rows:
        shown_ = [column for column in answer.columns if column != "label"]
        section.parts.append(_table(title, shown_, answer.dicts()))
    elif answer and not answer.error:
        section.text.append("There are none.")
    return section


def parts_of(row: Row, names: Sequence[str]) -> dict[str, float]:
    """By class, for a figure; what is not known has no length."""
    return {class_: float(row[name] or 0) for class_, name in zip(steps.CLASSES, names, strict=True)}


def _windows(found: Gathered) -> Section:
    """What people named and noted of this time."""
    section = Section("windows", "Named windows and notes")
    section.queries.append(Query("the list", f"kvscope label --list {found.scope.at}".rstrip()))
    names = (("name", "name"), ("kind", "kind"), ("since", "from (UTC)"), ("until", "until (UTC)"))
    rows = [
        {**msgspec.structs.asdict(one), "since": utc(one.since_ns), "until": utc(one.until_ns) or None}
        for one in found.windows
    ]
    section.parts.append(table("Windows", [Column(name, title, False) for name, title in names], rows))
    notes = [
        {"window": one.name, "at": utc(note.made_at_ns), "by": note.made_by or None, "note": note.note}
        for one in found.windows
        for note in one.notes
    ]
    if notes:
        columns_ = [Column(name, name, False) for name in ("window", "at", "by", "note")]
        section.parts.append(table("Notes, the latest of each window first", columns_, notes, most=20))
    return section


def _overview(found: Gathered) -> Section:
    section = _section(found.answers.get("fleet"), "overview", "Overview")
    rows = [row for row in found.rows("fleet") if row["level"] in ("all", "connector") and row["requests"]]
    if not rows:
        section.text.append("No request with a first token.")
        return section
    named = [{**row, "part": row["connector"] if row["level"] == "connector" else "all"} for row in rows]
    bars = [
        Stack(
            str(shown(row["part"])),
            parts_of(row, _PERCENT),
            f"{shown(row['mean_ttft_ms'])} ms, {requests(row['requests'])}",
        )
        for row in named
    ]
    section.parts = [
        Bars(
            "What TTFT is made of",
            "Each bar is the mean TTFT, split by class; its figure is the mean in ms.",
            bars,
        ),
        _table(
            "TTFT by connector",
            ("part", "requests", "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "mean_ttft_ms", *_PERCENT),
            named,
        ),
        _table("Throughput and what went wrong", _RATES, named),
    ]
    return section


def _trend(found: Gathered) -> Section:
    section = _section(found.answers.get("fleet_trend"), "trend", "Over time")
    rows = [row for row in found.rows("fleet_trend") if row["at_ns"] is not None]
    since_ns, until_ns = _bounds(found)
    if not rows or since_ns is None or until_ns is None:
        section.text.append("Nothing to show.")
        return section
    length_ns = max(10**9, (until_ns - since_ns + 59) // 60)  # as the question makes its spans
    worst = max(rows, key=lambda row: row["mean_ms"])
    section.text.append(
        f"The slowest of {len(rows)} spans of {span(length_ns)} began at {utc(worst['at_ns'])[:19]} UTC: "
        f"mean {shown(worst['mean_ms'])} ms over {requests(worst['requests'])}, of it coordination "
        f"{shown(worst['coordination_ms'])} ms."
    )
    section.parts = [
        Trend(
            "Mean TTFT by class over time",
            "A bar per span of time, by arrival; its height is the mean TTFT of requests that arrived in it.",
            [(int(row["at_ns"]), parts_of(row, _MS)) for row in rows],
            length_ns,
            since_ns // length_ns * length_ns,
            until_ns,
        ),
        _table(
            "TTFT over time",
            ("at_ns", "requests", "p50_ttft_ms", "p99_ttft_ms", "mean_ms", *_MS),
            [{**row, "at_ns": utc(row["at_ns"])[:19]} for row in rows],
            most=100,
            folded=True,
        ),
    ]
    return section


def _bands(found: Gathered) -> Section:
    section = _section(
        found.answers.get("fleet_bands"),
        "bands",
        "By percentile band",
        "The typical request and the slow ones need not wait for the same thing.",
    )
    rows = found.rows("fleet_bands")
    if not rows:
        section.text.append("Nothing to show.")
        return section
    bars = [
        Stack(
            f"{shown(row['band'])}, {requests(row['requests'])}",
            parts_of(row, _MS),
            f"{shown(row['mean_ms'])} ms, longest {shown(row['main_step'])}",
        )
        for row in rows
    ]
    section.parts = [
        Bars(
            "What TTFT is made of, by band",
            "Each bar is the mean TTFT of its band, split by class; its figure is the mean in ms.",
            bars,
        ),
        _table(
            "Bands of TTFT",
            ("band", "requests", "from_ms", "to_ms", "mean_ms", *_MS, "main_step"),
            rows,
        ),
    ]
    return section


def _steps(found: Gathered) -> Section:
    section = _section(
        found.answers.get("fleet_steps"),
        "steps",
        "Steps",
        "What each step on the critical path takes; percentiles are of the requests that had it.",
    )
    if by_connector := found.answers.get("steps"):
        section.queries.append(Query("question steps", by_connector.command, by_connector.sql))
    rows = found.rows("fleet_steps")
    if not rows:
        section.text.append("Nothing to show.")
        return section
    bars = [
        Stack(
            str(shown(row["step"])),
            {str(row["class"]): float(row["share_percent"] or 0)},
            f"{shown(row['share_percent'])} %, p99 {shown(row['p99_ms'])} ms",
        )
        for row in rows
    ]
    names = ("step", "class", "requests", "share_percent", "mean_ms", "p50_ms", "p90_ms", "p99_ms")
    section.parts = [
        Bars("Steps by their share of all TTFT", "The longest bar is the largest step.", bars, _most(rows)),
        _table("Steps of all connectors", names, rows),
    ]
    by_name = found.rows("steps")
    if len({row["connector"] for row in by_name}) > 1:
        section.parts.append(
            _table("Steps by connector", ("connector", *names), by_name, most=100, folded=True)
        )
    return section


def _most(rows: Sequence[Row]) -> float:
    return max((float(row["share_percent"] or 0) for row in rows), default=0) or 1


def _pairs(found: Gathered) -> Section:
    section = _section(
        found.answers.get("pairs"),
        "pairs",
        "Pairs of prefill and decode engine",
        "The pair with the highest median coordination wait first. Rates are lower bounds.",
    )
    if fleet := found.answers.get("fleet"):
        section.queries.append(Query("question fleet (its rows of pairs)", fleet.command, fleet.sql))
    rows = sorted(found.rows("pairs"), key=lambda row: -(row["p50_coordination_ms"] or 0))
    if not rows:
        section.text.append("No request had both.")
        return section
    split = [row for row in found.rows("fleet") if row["level"] == "pair" and row["requests"]]
    place = {_pair_key(row): number for number, row in enumerate(rows)}
    split.sort(key=lambda row: place.get(_pair_key(row), len(rows)))
    scale = max((row["mean_ttft_ms"] or 0 for row in split[:MAX_PAIRS]), default=0) or 1
    bars = [
        Stack(
            pair_name(row, several_connectors(split)),
            {
                class_: share / 100 * (row["mean_ttft_ms"] or 0)
                for class_, share in parts_of(row, _PERCENT).items()
            },
            f"mean {shown(row['mean_ttft_ms'])} ms, {requests(row['requests'])}",
        )
        for row in split[:MAX_PAIRS]
    ]
    about = "The length of a bar is the pair's mean TTFT; the order is that of the table."
    names = (
        "connector", "p_engine", "d_engine", "requests", "not_finished", "p50_ttft_ms", "p99_ttft_ms",
        "p50_coordination_ms", "p50_transfer_ms", "transferred_bytes", "p50_gb_per_s", "best_gb_per_s",
    )  # fmt: skip
    left = len(split) - MAX_PAIRS
    if left > 0:
        about += f" {left} more pairs are left out."
    section.parts = [
        *([Bars("Mean TTFT of pairs", about, bars, scale)] if bars else []),
        _table("Pairs", names, rows, most=MAX_PAIRS),
    ]
    return section


def _pair_key(row: Row) -> tuple[Any, ...]:
    return row["connector"], row["p_engine"], row["d_engine"]


def _engines(found: Gathered) -> Section:
    section = _section(found.answers.get("engines"), "engines", "Engines and what they ran")
    rows = engines.taking_part(found)
    if not rows:
        section.text.append("No engine is known.")
        return section
    if left := len(found.rows("engines")) - len(rows):
        section.text.append(f"Of processes of engines that no figure here tells of, {left} are left out.")
    prints = engines.fingerprints(rows)
    differ = engines.differences(prints)
    if len(prints) > 1 and differ is None:
        section.text.append("All run the same.")
    names = (
        "engine",
        "source",
        "rank",
        "host",
        "state",
        "state_detail",
        "kvscope",
        "hooks_missing",
        "started_at",
    )
    parts: list[Table | None] = [
        differ,
        engines.alike(prints),
        _table("Processes of engines", names, rows, most=engines.MAX_ENGINES),
    ]
    section.parts = [part for part in parts if part]
    return section


def _quality(found: Gathered) -> Section:
    unseen, losses = found.answers.get("unseen"), found.answers.get("losses")
    section = _section(
        unseen, "quality", "Data quality", "What is missing from or uncertain in the figures of this report."
    )
    section.text += list(_clean(found))
    section.notes = [f"The daemon says: {shown(problem)}" for problem in found.problems]
    if unseen and unseen.rows:
        names = [column for column in unseen.columns if column not in ("label", "kind")]
        section.parts.append(_table("What kvscope could not see", ["kind", *names], unseen.dicts()))
    if losses:
        section.queries.append(Query("question losses", losses.command, losses.sql))
    if losses and losses.rows:
        names = [column for column in losses.columns if column not in ("label", "ring")]
        section.parts.append(_table("Processes of which something was not recorded", names, losses.dicts()))
    elif losses and not losses.error:
        section.text.append("Nothing is known to be missing from the recordings.")
    if row := whole(found):
        names_ = ("not_joined", "peer_not_instrumented", "clock_error_ms", "clamped", "unknown_percent")
        section.parts.append(_table("Requests of this window", names_, [row]))
    return section


def _clean(found: Gathered) -> Iterator[str]:
    row = whole(found)
    if row is None:
        return
    error = row["clock_error_ms"]
    if error is None:
        yield "The clock error between the legs is not known."
    elif error:
        yield (
            f"The clocks of the legs agree to ± {shown(error)} ms; shorter steps between them are in doubt."
        )
    else:
        yield "The legs share one clock."
    yield f"{row['unknown_percent']} % of TTFT lies between boundaries that were not observed."
