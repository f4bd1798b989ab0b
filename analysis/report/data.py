"""Asks for all that a report tells: named questions of one window and label, and a few requests whole."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any, NamedTuple

from kvscope import query
from kvscope.analysis import paging
from kvscope.analysis.paging import Row, Source
from kvscope.client import Daemon, NoDaemon
from kvscope.errors import KvscopeError, UsageError
from kvscope.filters import parse_filters
from kvscope.health import problems
from kvscope.labels import Label
from kvscope.lookup import Listing
from kvscope.text import printable
from kvscope.windows import Window, overlapping

LAST_NS = 3600 * 10**9
"""How far back a daemon is asked where nothing is said."""
SLOWEST = 5
"""Requests told whole."""
UNFINISHED = 20
"""Requests listed that did not come to an end, or have not yet."""
FAILURES = 20
MAX_PROBLEMS = 20
MAX_WINDOWS = 20

_LIMITS = {"slowest": SLOWEST, "failures": FAILURES}
QUESTIONS = (
    "fleet",
    "fleet_trend",
    "fleet_bands",
    "fleet_steps",
    "steps",
    "pairs",
    "slowest",
    "outcomes",
    "leads",
    "leases",
    "handshakes",
    "failures",
    "reuse",
    "engines",
    "stuck",
    "unseen",
    "losses",
)

Progress = Callable[[str], None]


class Scope(NamedTuple):
    """What the report is of."""

    since_ns: int | None
    until_ns: int | None
    label: str
    where: tuple[str, ...]
    at: str
    """How a command is told the source: `--url …` or `--db …`."""


class _Row(dict[str, Any]):
    """A row of an answer; a column that it does not have is not known."""

    def __missing__(self, name: str) -> None:
        return None


@dataclass
class Answer:
    """What a question answered, and how to ask it again."""

    name: str
    command: str
    sql: str
    columns: list[str] = field(default_factory=list)
    rows: list[list[Any]] = field(default_factory=list)
    truncated: bool = False
    approximate: str = ""
    """Why its figures are not exact; empty where they are."""
    error: str = ""
    """Why there is none."""

    def dicts(self) -> list[dict[str, Any]]:
        return [_Row(zip(self.columns, row, strict=False)) for row in self.rows]

    @property
    def one_in(self) -> int:
        """Where it is of a sample: of one in at most so many requests. 1 is all of them."""
        return max((row["one_in"] or 1 for row in self.dicts()), default=1)


@dataclass
class Gathered:
    """All that a report tells."""

    scope: Scope
    made_at_ns: int
    source: str
    """In words."""
    source_version: str
    """Of the daemon; empty for a file."""
    labels: dict[str, int]
    """Requests of the window by label, before filters."""
    stored: tuple[int, int] | None
    """First and last arrival of the requests that it is of; None without requests."""
    answers: dict[str, Answer] = field(default_factory=dict)
    requests: list[dict[str, Any]] = field(default_factory=list)
    """The slowest, as `kvscope explain --json` gives them."""
    unfinished: list[dict[str, Any]] = field(default_factory=list)
    unfinished_command: str = ""
    windows: list[Label] = field(default_factory=list)
    """What people named and noted of this time."""
    problems: list[str] = field(default_factory=list)
    """What the daemon says is lost, missing or broken."""

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of an answer; none where there is none."""
        found = self.answers.get(name)
        return found.dicts() if found else []

    @property
    def failed(self) -> list[Answer]:
        return [one for one in self.answers.values() if one.error]


def gather(
    source: Source,
    since: str | None,
    until: str | None,
    label: str | None,
    where: Sequence[str],
    at: tuple[str, str],
    now_ns: int,
    progress: Progress = lambda text: None,
) -> Gathered:
    """Ask `source` everything.

    Args:
        at: the source in words, and as arguments of a command.

    Raises:
        UsageError: the window or a filter is not understood.
        KvscopeError: there is no answer at all. A single question without one is noted in its answer.
    """
    progress("the window")
    filters = parse_filters(list(where))
    since_ns, until_ns = paging.moments(source, since, until, now_ns)
    if isinstance(source, Daemon):
        # One window for all questions, though the daemon goes on.
        until_ns = now_ns // 10**6 * 10**6 if until_ns is None else until_ns
        since_ns = max(1, until_ns - LAST_NS) if since_ns is None else since_ns
    elif since_ns is not None and until_ns is None:
        until_ns = _end_ns(source, now_ns)
        if since_ns >= until_ns:
            until_ns = now_ns  # nothing is stored since: the window is empty
    if since_ns is not None and until_ns is not None and since_ns >= until_ns:
        wrong = "since is not before until" if until else "since is in the future"
        raise UsageError(f"{wrong}; ask for another window")
    by_label = _by_label(source, since_ns, until_ns)
    if label is None:
        named = [str(one.value) for one in filters if (one.column, one.operator) == ("label", "=")]
        label = named[0] if named else paging.of_one_label(by_label)["label"] if by_label else ""
    scope = Scope(since_ns, until_ns, label, tuple(where), at[1])
    version = printable(source.status().get("version")) if isinstance(source, Daemon) else ""
    labels = {row["label"]: row["requests"] for row in by_label}
    found = Gathered(scope, now_ns, at[0], version, labels, _arrivals(source, scope))
    found.windows = _windows(source, scope.since_ns, scope.until_ns)
    if isinstance(source, Daemon):
        found.problems = list(problems(source.status()))[:MAX_PROBLEMS]
    for name in QUESTIONS:
        progress(name)
        found.answers[name] = ask(source, scope, name)
    for row in found.rows("slowest")[:SLOWEST]:
        progress("the slowest requests")
        try:
            found.requests.append(source.request(str(row.get("id"))))
        except NoDaemon:
            raise
        except KvscopeError as error:  # it may be gone by now
            found.answers["slowest"].error = str(error)
    progress("requests that did not finish")
    _unfinished(source, found)
    return found


def ask(source: Source, scope: Scope, name: str) -> Answer:
    """The answer to a named question of that scope, with those of its parameters that the question takes."""
    question = query.questions()[name]
    given = {**_parameters(scope), **({"limit": _LIMITS[name]} if name in _LIMITS else {})}
    parameters = {p: given[p] for p in question.parameters if p in given}
    answer = Answer(name, command(scope, "query", name, parameters), question.sql)
    try:
        raw = source.query(name, "", parameters)
        answer.columns = [str(column["name"]) for column in raw["columns"]]
        answer.rows, answer.truncated = raw["rows"], bool(raw["truncated"])
        answer.approximate = str(raw.get("approximate") or "")
    except NoDaemon:
        raise
    except KvscopeError as error:
        answer.error = str(error)
    return answer


def command(scope: Scope, name: str, what: str, parameters: dict[str, Any]) -> str:
    """The command line that asks the same."""
    words = ["kvscope", name, what] if what else ["kvscope", name]
    for key, value in parameters.items():
        for one in value if isinstance(value, list) else [value]:
            text = iso(one) if key in ("since", "until") else str(one)
            # With a sign, as an argument may begin with a dash.
            words.append(f"--{key}={text}")
    return " ".join(map(shlex.quote, map(printable, words))) + (f" {scope.at}" if scope.at else "")


def iso(ns: int) -> str:
    """A moment in UTC to the nanosecond, as `--since` takes it; no more digits than it needs."""
    seconds, fraction = divmod(ns, 10**9)
    try:
        text = datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%dT%H:%M:%S")
    except (OverflowError, ValueError, OSError):
        return str(ns)
    return text + (f".{fraction:09d}".rstrip("0") if fraction else "") + "Z"


def _windows(source: Source, since_ns: int | None, until_ns: int | None) -> list[Label]:
    """Windows that people named and that overlap this one; none from a daemon that knows none."""
    try:
        labels = source.labels()
    except NoDaemon:
        raise
    except KvscopeError:
        return []
    named = [Window(one.name, one.kind, one.since_ns, one.until_ns) for one in labels]
    names = {one.name for one in overlapping(named, since_ns or 0, until_ns)}
    return [one for one in labels if one.name in names][:MAX_WINDOWS]


def _by_label(source: Source, since_ns: int | None, until_ns: int | None) -> list[Row]:
    """Requests by label, the most frequent first."""
    sql = (
        "SELECT coalesce(label, '') AS label, count(*) AS requests FROM requests "
        "GROUP BY ALL ORDER BY requests DESC, label LIMIT 100"
    )
    bounds = {"since": since_ns, "until": until_ns}
    return paging.ask(source, sql, {name: ns for name, ns in bounds.items() if ns is not None})


def _arrivals(source: Source, scope: Scope) -> tuple[int, int] | None:
    """The first and the last arrival in the scope; None without requests."""
    sql = "SELECT min(arrived_at_ns) AS first_ns, max(arrived_at_ns) AS last_ns FROM requests"
    ((first_ns, last_ns),) = source.query("", sql, _parameters(scope))["rows"]
    return None if first_ns is None else (int(first_ns), int(last_ns))


def _parameters(scope: Scope) -> dict[str, Any]:
    """Of a query about requests."""
    given = {
        "since": scope.since_ns,
        "until": scope.until_ns,
        "label": scope.label,
        "where": list(scope.where) or None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _end_ns(source: Source, now_ns: int) -> int:
    """When the last stored request was over, to the next second."""
    sql = (
        "SELECT max(arrived_at_ns + coalesce(ttft_ns, 0) + coalesce(decode_generate_ns, 0)) AS end_ns "
        "FROM requests"
    )
    ((end_ns,),) = source.query("", sql, {})["rows"]
    return now_ns if end_ns is None else (int(end_ns) // 10**9 + 1) * 10**9


def _unfinished(source: Source, found: Gathered) -> None:
    """Requests of the window that were lost, in error, aborted or incomplete, or are in flight without a
    first token; the oldest first."""
    scope = found.scope
    listing = Listing(
        where=[*scope.where, f"label={scope.label}", "outcome!=finished"],
        sort="arrived_at_ns:asc",
        limit=10 * UNFINISHED,
        since=str(scope.since_ns or ""),
        until=str(scope.until_ns or ""),
    )
    given = {"where": listing.where, "sort": listing.sort, "limit": listing.limit}
    given |= {"since": scope.since_ns} if scope.since_ns else {}
    given |= {"until": scope.until_ns} if scope.until_ns else {}
    found.unfinished_command = command(scope, "requests", "", given)
    try:
        rows = source.requests(listing)
    except NoDaemon:
        raise
    except KvscopeError as error:
        found.problems.append(f"requests that did not finish: {error}")
        return
    over = [row for row in rows if row["outcome"] != "in flight" or row["ttft_ns"] is None]
    found.unfinished = over[:UNFINISHED]
