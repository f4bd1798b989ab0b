"""What changed from A to B: how the workload and the configuration differ, and by how much the time to first
token (TTFT), its classes and steps, and the time per output token (TPOT) shifted, with 95 % confidence
intervals.

examples:
  kvscope diff 2h..1h 1h..
  kvscope diff before.duckdb after.duckdb
  kvscope diff label=canary label= --anyway
  kvscope diff @nightly-11 @nightly-12 --fail-if 'coordination.p90 > +10%' --fail-if 'ttft.p50 > +20ms'
  kvscope diff archive,2026-11-28..2026-11-29,connector=push 1d..,connector=push

A side is one of these, or several with commas between them: a window SINCE..UNTIL (either end may be left
away; moments as everywhere), a window that was named (@NAME), label=LABEL (empty: production), a filter of
requests (connector=push), a path of a store, snapshot or archive (else the daemon or --db). Without a label
a side is production or, where there is none, its most frequent label.

Runs whose workload or configuration differ are not ranked unless with --anyway: what differs is told, and
the exit code is 1. It is 1 as well where a --fail-if came true: METRIC.STATISTIC > AMOUNT, with ttft, tpot, a
class or a step; mean, p50, p90 or p99; +10% or +5ms. A limit is exceeded where the shift is more than the
amount and its interval excludes 0. With too few requests for an interval nothing is judged.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kvscope.analysis import intervals, traffic
from kvscope.analysis.intervals import BY_NAME, MEASURES, STATISTICS, Estimate, Shift
from kvscope.analysis.paging import Source, ask, of_one_label
from kvscope.client import StoreFile, opened
from kvscope.errors import KvscopeError, UsageError
from kvscope.filters import parse_filter
from kvscope.source import add_source_arguments, open_source, print_json
from kvscope.text import duration_ns, printable, table, utc

MAX_SIDE_CHARACTERS = 4000
FILE_S = 60.0
"""A query of a file, which keeps nobody waiting, may take so long."""

# What makes two runs unlike: differences beyond these.
PROMPT_RATIO = 0.10
"""Median or 90th percentile of prompt lengths."""
OUTPUT_RATIO = 0.25
"""Median of output lengths."""
RATE_RATIO = 0.25
"""Requests per second."""
SHARE_POINTS = 0.05
"""Share of prompt tokens from a cache or read back; share of a connector."""

NOT_COMPARED = {"side_channel", "api_port", "data_parallel_index"}
"""Entries of a fingerprint that tell an engine from its neighbour."""


# --- sides -----------------------------------------------------------------------------------------


class Side(NamedTuple):
    """Which requests one side is about."""

    text: str
    path: Path | None = None
    parameters: dict[str, str | list[str]] = {}  # noqa: RUF012 - never changed


def side(text: str) -> Side:
    """Read a side.

    Raises:
        UsageError: it is none.
    """
    if len(text) > MAX_SIDE_CHARACTERS:
        raise UsageError(f"a side has at most {MAX_SIDE_CHARACTERS} characters")
    path: Path | None = None
    parameters: dict[str, str | list[str]] = {}
    where: list[str] = []
    for part in text.split(","):
        found: dict[str, str] = {}
        if part.startswith("label="):
            found = {"label": part.removeprefix("label=")}
        elif part.strip() == "..":  # not the folder: the whole time
            pass
        elif part.startswith("@") and ".." not in part:
            found = {"since": part, "until": f"{part}.end"}
        elif _is_path(part):
            if path is not None:
                raise UsageError(f"{printable(text)[:80]!r}: a side is of one file")
            path = Path(part)
        elif ".." in part:
            since, _, until = part.partition("..")
            found = {name: end for name, end in (("since", since), ("until", until)) if end.strip()}
        else:
            try:
                parse_filter(part)
            except UsageError as error:
                raise UsageError(
                    f"{printable(part)[:60]!r} is no part of a side: no window such as 2h..1h, no @NAME, no "
                    f"label=LABEL, no file, and no filter ({error})"
                ) from None
            where.append(part)
        if twice := found.keys() & parameters.keys():
            what = "kind of traffic" if "label" in twice else "window"
            raise UsageError(
                f"{printable(text)[:80]!r}: a side is of one {what}; between A and B is a space, no comma"
            )
        parameters |= found
    if where:
        parameters["where"] = where
    return Side(text, path, parameters)


def _is_path(part: str) -> bool:
    if not part or "\0" in part:
        return False
    if "=" in part and not Path(part).exists():
        return False
    if part.endswith(".duckdb") or Path(part).exists():
        return True
    return "/" in part and ".." not in part.replace("../", "").replace("/..", "")


# --- what is asked of a side -----------------------------------------------------------------------


class Workload(NamedTuple):
    """What a side's requests were."""

    label: str
    requests: int
    """With a first token."""
    since_ns: int
    until_ns: int
    requests_per_s: float | None
    prompt_p50: float | None
    prompt_p90: float | None
    output_p50: float | None
    cached_share: float | None
    """Of prompt tokens: from a prefix cache of P or read back from D."""
    not_finished: int
    with_tpot: int
    models: list[str]
    connectors: dict[str, float]
    """Share of requests."""
    push_order: str | None
    """How a router sends push: both legs at once, or D when P has answered."""
    engines: list[str]


class Sided(NamedTuple):
    """All that is known of a side."""

    side: Side
    workload: Workload
    configuration: dict[str, str]
    simulated: bool
    estimates: dict[str, dict[str, Estimate]]
    """By measure and statistic."""


_WORKLOAD = """
SELECT
    coalesce(label, '') AS label,
    count(ttft_ns) AS requests,
    min(arrived_at_ns) AS since_ns,
    max(arrived_at_ns) + 1 AS until_ns,
    count(ttft_ns) / nullif((max(arrived_at_ns) - min(arrived_at_ns)) / 1e9, 0) AS requests_per_s,
    quantile_cont(prompt_tokens, 0.5) AS prompt_p50,
    quantile_cont(prompt_tokens, 0.9) AS prompt_p90,
    quantile_cont(output_tokens, 0.5) AS output_p50,
    sum(coalesce(p_cached_tokens, 0) + coalesce(reuse_pulled_tokens, 0)) / nullif(sum(prompt_tokens), 0)
        AS cached_share,
    count(*) FILTER (outcome IN ('lost', 'error', 'aborted', 'incomplete')) AS not_finished,
    count(*) FILTER (ttft_ns IS NOT NULL AND output_tokens > 1 AND decode_generate_ns IS NOT NULL)
        AS with_tpot,
    list_sort(list(DISTINCT coalesce(model, ''))) AS models,
    histogram(coalesce(connector, '')) AS connectors,
    CASE WHEN count(*) FILTER (connector = 'push' AND ttft_ns IS NOT NULL) > 0 THEN
        CASE WHEN avg((prefill_compute_ns > 0 AND registration_route_ns > 0)::INTEGER)
            FILTER (connector = 'push' AND ttft_ns IS NOT NULL) > 0.5 THEN 'D after P' ELSE 'both at once' END
    END AS push_order,
    list_distinct(list(DISTINCT p_engine) || list(DISTINCT d_engine)) AS engines
FROM waits
WHERE arrived_at_ns IS NOT NULL
GROUP BY 1
ORDER BY requests DESC, label
LIMIT 1000
"""


@contextlib.contextmanager
def _opened(one: Side, arguments: argparse.Namespace) -> Iterator[Source]:
    with opened("", str(one.path)) if one.path else open_source(arguments) as source:
        if isinstance(source, StoreFile):
            source.limits = source.limits._replace(seconds=FILE_S)
        yield source


def sided(source: Source, one: Side) -> Sided:
    """Ask for all that is compared.

    Raises:
        KvscopeError: there is no request with a first token.
    """
    found = [row for row in ask(source, _WORKLOAD, one.parameters) if row["requests"]]
    if not found:
        raise KvscopeError(
            f"{printable(one.text)[:80]}: no request with a first token; `kvscope requests` lists what "
            "there is"
        )
    row = of_one_label(found)
    row["connectors"] = _shares(row["connectors"])
    row["engines"] = sorted(name for name in row["engines"] if name)
    work = Workload(**row)
    # From here on exactly these, whatever arrives meanwhile.
    parameters = {
        **one.parameters,
        "since": str(work.since_ns),
        "until": str(work.until_ns),
        "label": work.label,
    }
    served = traffic.engines(source, parameters)
    configuration = _configuration(served)
    if work.push_order:
        configuration["router order under push"] = work.push_order
    return Sided(
        one,
        work,
        configuration,
        traffic.is_simulated(served, work.label),
        _estimates(source, work, parameters),
    )


def _shares(counts: Any) -> dict[str, float]:
    """Of DuckDB's histogram, which is a map."""
    pairs = counts.items() if isinstance(counts, Mapping) else counts
    total = sum(count for _, count in pairs)
    return {str(name): count / total for name, count in sorted(pairs)}


def _estimates(
    source: Source, work: Workload, parameters: Mapping[str, str | list[str]]
) -> dict[str, dict[str, Estimate]]:
    found: dict[str, dict[str, Estimate]] = {}
    of_ttft = [measure for measure in MEASURES if measure.kind != "tpot"]
    parts = [
        (of_ttft[at : at + intervals.COLUMNS_AT_ONCE], work.requests, "ttft_ns IS NOT NULL")
        for at in range(0, len(of_ttft), intervals.COLUMNS_AT_ONCE)
    ]
    if work.with_tpot:
        # The same condition as in _WORKLOAD: the count must be theirs.
        has_tpot = "ttft_ns IS NOT NULL AND output_tokens > 1 AND decode_generate_ns IS NOT NULL"
        parts.append(([BY_NAME["tpot"]], work.with_tpot, has_tpot))
    for measures, count, condition in parts:
        (row,) = ask(source, intervals.select(measures, count, condition), parameters)
        found |= intervals.estimates(measures, count, row)
    return found


def _configuration(served: Sequence[traffic.Engine]) -> dict[str, str]:
    """What the engines ran, by name; of several values all. P's and D's settings are told together."""
    values: dict[str, set[str]] = {}
    for engine in served:
        values.setdefault("kvscope", set()).add(engine.kvscope)
        for name, value in _flat(engine.fingerprint):
            if name not in NOT_COMPARED:
                values.setdefault(name, set()).add(str(value))
    return {name: ", ".join(sorted(found)) for name, found in values.items()}


def _flat(entries: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """`extra_config` and the like by their entries."""
    for name, value in entries.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{key}", inner) for key, inner in value.items())
        else:
            yield name, value


def _shared(a: Sided, b: Sided, arguments: argparse.Namespace) -> int:
    """Requests with a first token that are on both sides, where these are of the same source."""
    paths = [Path(found).resolve() if (found := s.side.path or arguments.db) else None for s in (a, b)]
    since_ns = max(a.workload.since_ns, b.workload.since_ns)
    until_ns = min(a.workload.until_ns, b.workload.until_ns)
    if paths[0] != paths[1] or a.workload.label != b.workload.label or since_ns >= until_ns:
        return 0
    filters = [text for one in (a, b) for text in one.side.parameters.get("where", ())]
    parameters: dict[str, str | list[str]] = {
        "since": str(since_ns),
        "until": str(until_ns),
        "label": a.workload.label,
        "where": list(dict.fromkeys(filters)),
    }
    with _opened(a.side, arguments) as source:
        (row,) = ask(source, "SELECT count(ttft_ns) AS requests FROM waits", parameters)
    return int(row["requests"])


# --- what differs ------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Something that is not the same on both sides."""

    what: str
    a: str
    b: str
    material: bool
    """So great that the two are not alike."""


def workload_differences(a: Workload, b: Workload) -> list[Difference]:
    """Those that can be seen; beyond the limits above they are material."""
    rows = [
        ("prompt tokens, median", a.prompt_p50, b.prompt_p50, PROMPT_RATIO),
        ("prompt tokens, p90", a.prompt_p90, b.prompt_p90, PROMPT_RATIO),
        ("output tokens, median", a.output_p50, b.output_p50, OUTPUT_RATIO),
        ("requests per second", a.requests_per_s, b.requests_per_s, RATE_RATIO),
    ]
    found = [
        Difference(name, _number(x), _number(y), _far(x, y, ratio))
        for name, x, y, ratio in rows
        if _number(x) != _number(y)
    ]
    found += [
        Difference(name, _percent(x), _percent(y), abs((x or 0) - (y or 0)) > SHARE_POINTS)
        for name, x, y in (
            ("prompt tokens cached or read back", a.cached_share, b.cached_share),
            *(
                (
                    f"requests by {connector or 'an unknown connector'}",
                    a.connectors.get(connector, 0.0),
                    share,
                )
                for connector, share in sorted((dict.fromkeys(a.connectors, 0.0) | b.connectors).items())
            ),
        )
        if _percent(x) != _percent(y)
    ]
    if a.models != b.models:
        found.append(Difference("models", _listed(a.models), _listed(b.models), True))
    if bool(a.not_finished) != bool(b.not_finished):
        found.append(Difference("not finished", str(a.not_finished), str(b.not_finished), False))
    return found


def configuration_differences(a: Mapping[str, str], b: Mapping[str, str]) -> list[Difference]:
    """Each setting that is not the same; all of them are material. Where nothing is known of a side's
    engines, that is told, and nothing can be compared."""
    if not a or not b:
        known = ("known", "not known")
        return [Difference("configuration", known[not a], known[not b], False)]
    return [
        Difference(name, a.get(name, "not set"), b.get(name, "not set"), True)
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def _far(a: float | None, b: float | None, ratio: float) -> bool:
    if a is None or b is None:
        return a is not b
    return abs(b - a) > ratio * max(min(a, b), 1e-9)


def _number(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4g}"


def _percent(value: float | None) -> str:
    return "not known" if value is None else f"{100 * value:.1f} %"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(printable(name) or "not known" for name in names)


# --- limits ------------------------------------------------------------------------------------------


class Limit(NamedTuple):
    """`coordination.p90 > +10%`."""

    text: str
    measure: str
    statistic: str
    ratio: float | None
    ns: float | None


_LIMIT = re.compile(
    r"\s*([a-z_]+(?:\.[a-z_]+)?)\.(\w+)\s*>\s*\+?\s*(\d{1,9}(?:\.\d{1,9})?)\s*(%|[a-z]+)\s*", re.ASCII
)


def limit(text: str) -> Limit:
    """Read a limit.

    Raises:
        UsageError: it is none.
    """
    match = _LIMIT.fullmatch(text[:200])
    if not match:
        raise UsageError(
            f"--fail-if {printable(text)[:60]!r} is no limit; write METRIC.STATISTIC > AMOUNT, such as "
            "'coordination.p90 > +10%' or 'ttft.p50 > +5ms'"
        )
    measure, statistic, amount, unit = match.groups()
    if measure not in BY_NAME:
        raise UsageError(f"--fail-if: no metric {measure[:40]!r}; there are: {', '.join(BY_NAME)}")
    if statistic not in STATISTICS:
        raise UsageError(f"--fail-if: no statistic {statistic[:40]!r}; there are: {', '.join(STATISTICS)}")
    if unit == "%":
        return Limit(text.strip(), measure, statistic, float(amount) / 100, None)
    return Limit(text.strip(), measure, statistic, None, float(duration_ns(amount + unit)))


def verdict(one: Limit, shifts: Mapping[str, Mapping[str, Shift]]) -> tuple[str, str]:
    """`failed`, `held` or `not judged`, and why in a line."""
    found = shifts.get(one.measure, {}).get(one.statistic)
    if found is None or found.low is None or found.high is None:
        return "not judged", f"{one.text}: not judged, too few requests for an interval"
    allowed = one.ns if one.ns is not None else (one.ratio or 0.0) * found.a
    told = (
        f"{one.measure}.{one.statistic} {_signed(found.value)} ms{_relative(found)}, "
        f"95 % interval {_signed(found.low)} to {_signed(found.high)} ms"
    )
    if found.value > allowed and found.low > 0:
        return "failed", f"{one.text}: failed, {told}"
    noise = ", which may be noise" if found.value > allowed else ""
    return "held", f"{one.text}: held, {told}{noise}"


# --- the command -------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="the side before, such as 2h..1h")
    parser.add_argument("b", metavar="B", help="the side after, such as 1h..")
    parser.add_argument("--anyway", action="store_true", help="compare unlike runs too")
    parser.add_argument(
        "--fail-if",
        action="append",
        default=[],
        metavar="LIMIT",
        help="exit code 1 where it came true; repeatable",
    )
    parser.add_argument("--json", action="store_true", help="as JSON; times in nanoseconds")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    limits = [limit(text) for text in arguments.fail_if]
    both = []
    for text in (arguments.a, arguments.b):
        one = side(text)
        with _opened(one, arguments) as source:
            both.append(sided(source, one))
    a, b = both
    workload = workload_differences(a.workload, b.workload)
    configuration = configuration_differences(a.configuration, b.configuration)
    unlike = [one for one in (*workload, *configuration) if one.material]
    refused = bool(unlike) and not arguments.anyway
    shared = 0 if refused else _shared(a, b, arguments)
    shifts = {} if refused else all_shifts(a, b)
    verdicts = [] if refused else [verdict(one, shifts) for one in limits]
    if arguments.json:
        print_json(_json(a, b, workload, configuration, refused, shared, shifts, verdicts))
    else:
        print(told(a, b, workload, configuration, unlike, refused, shared, shifts))
        for _, line in verdicts:
            print(line)
    return 1 if refused or any(outcome == "failed" for outcome, _ in verdicts) else 0


def all_shifts(a: Sided, b: Sided) -> dict[str, dict[str, Shift]]:
    """By measure and statistic: TTFT, then the classes, the steps and TPOT, each by the shift of the mean,
    the greatest first."""
    found = {
        name: {s: intervals.shift(a.estimates[name][s], b.estimates[name][s]) for s in STATISTICS}
        for name in BY_NAME
        if name in a.estimates and name in b.estimates
    }
    kinds = ("ttft", "class", "step", "tpot")
    order = sorted(found, key=lambda n: (kinds.index(BY_NAME[n].kind), -abs(found[n]["mean"].value), n))
    return {name: found[name] for name in order}


# --- how it is told ------------------------------------------------------------------------------------


def told(
    a: Sided,
    b: Sided,
    workload: Sequence[Difference],
    configuration: Sequence[Difference],
    unlike: Sequence[Difference],
    refused: bool,
    shared: int,
    shifts: Mapping[str, Mapping[str, Shift]],
) -> str:
    """For a terminal."""
    lines = [_about("A", a), _about("B", b)]
    for title, found in (("workload", workload), ("configuration", configuration)):
        unknown = [name for name, one in (("A", a), ("B", b)) if not one.configuration]
        if title == "configuration" and unknown:
            lines += ["", f"configuration: not known of {unknown[0] if len(unknown) == 1 else 'either side'}"]
            continue
        alike = "alike, with small differences" if found else "alike"
        lines += ["", f"{title}: {'unlike' if any(one.material for one in found) else alike}"]
        if found:
            rows = [(one.what, one.a, one.b, "unlike" if one.material else "") for one in found]
            lines.append(table(("what", "A", "B", ""), rows, max_width=50))
    lines.append("")
    if refused:
        lines.append(
            textwrap.fill(
                f"Not compared: the runs are not alike ({'; '.join(one.what for one in unlike[:6])}). Choose "
                "windows of like load, or the same part of both with a filter (such as connector=push), or "
                "say --anyway where these differences are what you want to know the effect of.",
                100,
            )
        )
        return "\n".join(lines)
    if unlike:
        lines += ["Compared although the runs are not alike: shifts have all of the causes above.", ""]
    if shared:
        lines += [
            f"Warning: {shared} requests are on both sides; intervals and * are for sides that share none.",
            "",
        ]
    figures = [
        (
            name,
            f"{row['mean'].a / 1e6:.3f}",
            f"{row['mean'].b / 1e6:.3f}",
            *(_told_shift(row[s]) for s in STATISTICS),
        )
        for name, row in shifts.items()
        if any(one.a or one.b for one in row.values())
    ]
    lines.append(table(("ms", "mean A", "mean B", *(f"shift of {s}" for s in STATISTICS)), figures))
    lines.append(
        "Shifts are B - A with their 95 % interval; * is clear of noise, ? has too few requests to be judged."
    )
    return "\n".join(lines)


def _about(name: str, one: Sided) -> str:
    work = one.workload
    return (
        f"{name}  {printable(one.side.text)[:80]}: {work.requests} requests of "
        f"{printable(work.label) or 'production'}, {utc(work.since_ns)} to {utc(work.until_ns)} UTC"
        + (", simulated" if one.simulated else "")
    )


def _told_shift(one: Shift) -> str:
    if one.low is None or one.high is None:
        return f"{_signed(one.value)} ?"
    mark = " *" if one.is_clear else ""
    return f"{_signed(one.value)} ({_signed(one.low)} to {_signed(one.high)}){mark}"


def _signed(ns: float) -> str:
    return f"{ns / 1e6:+.3f}" if abs(ns) < 1e8 else f"{ns / 1e6:+.0f}"


def _relative(one: Shift) -> str:
    return f" ({100 * one.value / one.a:+.1f} %)" if one.a else ""


def _json(
    a: Sided,
    b: Sided,
    workload: Sequence[Difference],
    configuration: Sequence[Difference],
    refused: bool,
    shared: int,
    shifts: Mapping[str, Mapping[str, Shift]],
    verdicts: Sequence[tuple[str, str]],
) -> dict[str, Any]:
    def about(one: Sided) -> dict[str, Any]:
        return {"side": one.side.text, **one.workload._asdict(), "simulated": one.simulated}

    return {
        "a": about(a),
        "b": about(b),
        "workload": [one._asdict() for one in workload],
        "configuration": [one._asdict() for one in configuration],
        "refused": refused,
        "shared_requests": shared,
        "shifts": [
            {
                "metric": name,
                "statistic": statistic,
                "a_ns": one.a,
                "b_ns": one.b,
                "shift_ns": one.value,
                "low_ns": one.low,
                "high_ns": one.high,
                "clear": one.is_clear,
            }
            for name, row in shifts.items()
            for statistic, one in row.items()
        ],
        "limits": [{"outcome": outcome, "line": line} for outcome, line in verdicts],
    }
