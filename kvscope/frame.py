"""A frame: all that the screens of `kvscope top` show of one window of time.

A daemon makes them of what it holds, and a store file is read the same way, so that the live view, the
replay of a past hour and a script see the same figures. Figures are answers of named questions
(`kvscope query` gives the same ones); requests are compact rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from kvscope import __version__, query, steps, windows
from kvscope.errors import UsageError
from kvscope.filters import Filter, checked_text, parse_filters
from kvscope.health import engine_problems
from kvscope.samples import FRESH_NS, Sample
from kvscope.selection import Selection, make_views, moment_ns, requests_sql
from kvscope.storefile import relation
from kvscope.text import duration_ns
from kvscope.views import waits, waits_sql
from kvscope.windows import Window

if TYPE_CHECKING:
    import duckdb
    import pyarrow

MAX_RECENT = 10_000
"""Requests that are over, in one frame: the latest of the window."""
MAX_WINDOW_NS = 366 * 86400 * 10**9
MAX_ENGINES = 10_000
MAX_LABELS = 100
MAX_WINDOWS = 20
MAX_SAMPLES = 100_000
MAX_LIFE_NS = 86400 * 10**9
"""How far back a request is looked for that was in flight at a moment in the past."""
SAMPLES_NS = 600 * 10**9
"""How far back samples are looked for; by the time between two of a kind their interval is known."""
IN_FLIGHT = "in flight"

QUESTIONS = ("fleet", "fleet_bands", "fleet_steps", "fleet_trend")
"""Named questions that every frame answers."""


class Scope(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """What a frame is of; the parameters of `/api/v1/live`."""

    window: str = "5m"
    """How long: a duration such as 90s, 5m or 2h."""
    at: str = ""
    """Its end: a duration before now, a moment (ISO 8601, UTC unless it says otherwise), Unix nanoseconds, or
    `@NAME` or `@NAME.end` of a named window; empty is now."""
    where: tuple[str, ...] = ()
    """Filters as of `kvscope requests`; all must hold."""
    label: str | None = None
    """Kind of traffic; None is production, or the most frequent one where there is no production."""


class RequestRow(msgspec.Struct, array_like=True, frozen=True):
    """One request, compact; in JSON an array in this order. None is "not observed"."""

    id: str
    """Names it; of 64 bits, so that it is a text here."""
    client_id: str
    arrived_at_ns: int
    in_flight: bool
    """More is to come, or P still holds its blocks."""
    outcome: str
    """finished, aborted, error, ignored, lost, incomplete, or `in flight`."""
    step: str | None
    """Step it is in, or was in when last seen; None when finished."""
    step_since_ns: int | None
    """Unix time at which it entered that step; None when finished."""
    waits_for: str
    """In flight: what it waits for, in words; empty when it waits for nothing or that is not known."""
    connector: str
    model: str
    label: str
    p_engine: str | None
    d_engine: str | None
    session: str | None
    turn: int | None
    prompt_tokens: int | None
    output_tokens: int | None
    ttft_ns: int | None
    """Arrival to first token; the five classes add up to it."""
    compute_ns: int
    """This and the next four: nanoseconds of its TTFT by class, as far as it has come."""
    capacity_ns: int
    transfer_ns: int
    coordination_ns: int
    unknown_ns: int
    main_step: str | None
    """The longest step."""
    main_step_ns: int
    """Nanoseconds in it."""
    generate_ns: int | None
    """First token to the end."""
    lead_ns: int | None
    transfer_bytes: int | None
    recomputed_tokens: int | None
    reuse_outcome: str | None
    read_after_expiry: bool
    joined_by: str
    clock_error_ns: int


class Engine(msgspec.Struct, kw_only=True):
    """One ring: an engine process, what it runs, and how much of it was read."""

    ring: str
    engine: str
    source: str
    rank: int
    host: str
    pid: int
    started_at_ns: int
    last_event_at_ns: int | None = None
    """When it recorded the last event that was read."""
    label: str = ""
    kvscope: str = ""
    state: str = ""
    state_detail: str | None = None
    read: int = 0
    lost: int = 0
    torn: int = 0
    rejected: int = 0
    hooks_missing: list[str] = []
    fingerprint: dict[str, Any] = {}


class Answer(msgspec.Struct):
    """What a named question answered."""

    columns: list[str]
    """Names of the columns."""
    rows: list[list[Any]]
    """Values in the order of the columns; 64-bit ids are texts."""

    def dicts(self) -> list[dict[str, Any]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


class Finding(msgspec.Struct, kw_only=True):
    """Something that the daemon found and an operator should know, with what to do."""

    kind: str
    """Which kind of finding."""
    text: str
    """What was found, in one line."""
    advice: str = ""
    """What to do about it."""
    since_ns: int | None = None
    """Unix time since which it holds."""


class Frame(msgspec.Struct, kw_only=True):
    """One window of time."""

    kvscope: str
    """Version of who made it."""
    live: bool
    """Its end is now; False for the past."""
    at_ns: int
    """End of the window, Unix time."""
    figures_at_ns: int = 0
    """End of the window that `answers` and `labels` are of: in a stream up to seconds earlier. 0: `at_ns`."""
    window_ns: int
    """Its length."""
    where: list[str]
    """Filters that its requests pass."""
    label: str
    """Kind of traffic that it is of."""
    labels: dict[str, int]
    """Requests of the window by label, before filters."""
    answers: dict[str, Answer]
    """By question: those of `QUESTIONS`."""
    whole: bool = True
    """False in a stream after the first: `in_flight` and `recent` hold what is new or changed since."""
    in_flight: list[RequestRow] = []
    """Requests that are not over, the oldest of them where there are very many."""
    gone: list[str] = []
    """Ids that are no longer in flight, where the frame is not whole."""
    recent: list[RequestRow] = []
    """Requests of the window that are over, at most `MAX_RECENT`."""
    recent_total: int = 0
    """All such requests of the window."""
    engines: list[Engine] = []
    """The engine processes that record."""
    samples: list[Sample] = []
    """The latest of each kind."""
    problems: list[str] = []
    """What is lost, missing or broken, one line each, the gravest first."""
    windows: list[Window] = []
    """The named windows (name, kind, beginning, end) of which some time is in this one."""
    findings: list[Finding] = []
    """What the daemon found; none so far."""


def build(
    cursor: duckdb.DuckDBPyConnection,
    scope: Scope,
    *,
    now_ns: int,
    live: pyarrow.Table | None = None,
    limits: query.Limits = query.Limits(),  # noqa: B008 - immutable
    recent: bool = True,
) -> Frame:
    """The frame of `scope`, read from a store; closes `cursor`.

    For a moment in the past all is reconstructed from what is stored. For now, `in_flight`, `engines`,
    `samples` and `problems` are left empty: only the daemon knows them.

    Args:
        live: requests that may not be stored yet, with the columns of the table `requests`.
        recent: list those that are over; False saves time where they are known already.

    Raises:
        UsageError: the scope is not understood.
        QueryError: it took too long.
    """
    with contextlib.closing(cursor):
        scope = resolved(cursor, scope)
        at_ns, window = moments(scope, now_ns)
        filters = parse_filters(scope.where)
        with query.reading(cursor, limits.seconds, window, live):
            labels = _labels(cursor)
            label = _label(scope.label, filters, labels)
            as_of_ns = at_ns if scope.at else None
            selection = window._replace(label=label, filters=filters, as_of_ns=as_of_ns)
            make_views(cursor, selection, live)
            rows, total = _recent(cursor) if recent else ([], _count(cursor))
            frame = Frame(
                kvscope=__version__,
                live=not scope.at,
                at_ns=at_ns,
                figures_at_ns=at_ns,
                window_ns=at_ns - window.since_ns,
                where=list(scope.where),
                label=label,
                labels=labels,
                answers=_answers(cursor, selection, limits),
                recent=rows,
                recent_total=total,
                windows=windows.overlapping(windows.current(cursor), window.since_ns, at_ns)[:MAX_WINDOWS],
            )
            if scope.at:
                frame.in_flight = _in_flight(cursor, selection, at_ns, live)
                frame.engines = _engines(cursor, window)
                frame.samples = _samples(cursor, at_ns)
                # Their state and losses are stored once, as of the end, not of that moment.
                frame.problems = [f"{one} (as last seen)" for one in engine_problems(frame.engines)]
    return frame


def resolved(cursor: duckdb.DuckDBPyConnection, scope: Scope) -> Scope:
    """The scope with a moment in the place of a window's name.

    Raises:
        UsageError: there is no such window.
    """
    at = windows.moment(cursor, scope.at, "at")
    return scope if at == scope.at else msgspec.structs.replace(scope, at=str(at))


def moments(scope: Scope, now_ns: int) -> tuple[int, Selection]:
    """The end of the window, and the rows that began in it.

    Raises:
        UsageError: the scope is not understood.
    """
    at_ns = moment_ns(scope.at, now_ns, "at")
    at_ns = now_ns if at_ns is None else at_ns
    window_ns = duration_ns(scope.window)
    if not 0 < window_ns <= MAX_WINDOW_NS:
        raise UsageError("window is a duration from 1ns to 366d")
    return at_ns, Selection(max(1, at_ns - window_ns), at_ns)


def row_of(row: Mapping[str, Any]) -> RequestRow:
    """The compact form of a row of `waits`; a live one also says `step_since_ns` and `waits_for`."""
    step = row["current_step"]
    since_ns = row.get("step_since_ns")
    if since_ns is None and step is not None and row["arrived_at_ns"] is not None:
        spent_ns = (
            sum(row[name] or 0 for name in _CLASS_COLUMNS) if row["ttft_ns"] is None else row["ttft_ns"]
        )
        since_ns = row["arrived_at_ns"] + spent_ns
    return RequestRow(
        id=str(row["id"]),
        client_id=row["client_id"] or "",
        arrived_at_ns=row["arrived_at_ns"] or 0,
        in_flight=row["outcome"] == IN_FLIGHT,
        outcome=row["outcome"] or "",
        step=step,
        step_since_ns=since_ns,
        waits_for=row.get("waits_for") or "",
        connector=row["connector"] or "",
        model=row["model"] or "",
        label=row["label"] or "",
        p_engine=row["p_engine"],
        d_engine=row["d_engine"],
        session=None if row["session"] is None else str(row["session"]),
        turn=row["turn"],
        prompt_tokens=row["prompt_tokens"],
        output_tokens=row["output_tokens"],
        ttft_ns=row["ttft_ns"],
        compute_ns=row["compute_ns"] or 0,
        capacity_ns=row["capacity_ns"] or 0,
        transfer_ns=row["transfer_ns"] or 0,
        coordination_ns=row["coordination_ns"] or 0,
        unknown_ns=row["unknown_ns"] or 0,
        main_step=row["main_step"],
        main_step_ns=row["main_step_ns"] or 0,
        generate_ns=row["decode_generate_ns"],
        lead_ns=row["lead_ns"],
        transfer_bytes=row["transfer_bytes"],
        recomputed_tokens=row["recomputed_tokens"],
        reuse_outcome=row["reuse_outcome"],
        read_after_expiry=bool(row["read_after_expiry"]),
        joined_by=row["joined_by"] or "",
        clock_error_ns=row["clock_error_ns"] or 0,
    )


def as_of(row: Mapping[str, Any], at_ns: int) -> RequestRow:
    """The compact form of a row of `waits`, its waterfall included, as the request was at an earlier moment
    at which it was in flight: what came later is left out."""
    spent_ns = at_ns - row["arrived_at_ns"]
    ttft_ns = row["ttft_ns"]
    then = {**row, "outcome": IN_FLIGHT, "output_tokens": None, "decode_generate_ns": None}
    if ttft_ns is not None and ttft_ns <= spent_ns:
        then |= {"current_step": "decode.generate", "step_since_ns": row["arrived_at_ns"] + ttft_ns}
        return row_of(then)
    known: dict[str, int] = {}
    current, entered_ns = row["current_step"], 0
    for entry in row["waterfall"] or ():
        if not entry["critical"] or entry["from_ns"] > spent_ns:
            continue
        step = steps.find(entry["step"])
        end_ns = entry["from_ns"] + entry["ns"]
        known[step.column] = known.get(step.column, 0) + min(end_ns, spent_ns) - entry["from_ns"]
        if end_ns > spent_ns:
            current, entered_ns = step.name, entry["from_ns"]
            break
        entered_ns = max(entered_ns, end_ns)
    then |= dict.fromkeys(("ttft_ns", "lead_ns", "transfer_bytes", "recomputed_tokens"))
    then |= {step.column: known.get(step.column) for step in steps.STEPS if step.in_ttft}
    then |= {"read_after_expiry": False, "current_step": current}
    then["step_since_ns"] = row["arrived_at_ns"] + entered_ns
    return row_of({**then, **waits(then)})


_CLASS_COLUMNS = [f"{class_}_ns" for class_ in steps.CLASSES]
_SPENT = " + ".join(f"coalesce({name}, 0)" for name in _CLASS_COLUMNS)
_ROW = (
    "id::VARCHAR, coalesce(client_id, ''), coalesce(arrived_at_ns, 0), "
    "outcome IS NOT DISTINCT FROM 'in flight', coalesce(outcome, ''), current_step, "
    f"CASE WHEN current_step IS NOT NULL THEN arrived_at_ns + coalesce(ttft_ns, {_SPENT}) END, '', "
    "coalesce(connector, ''), coalesce(model, ''), coalesce(label, ''), p_engine, d_engine, "
    "session::VARCHAR, turn, prompt_tokens, output_tokens, ttft_ns, "
    + ", ".join(f"coalesce({name}, 0)" for name in _CLASS_COLUMNS)
    + ", main_step, coalesce(main_step_ns, 0), decode_generate_ns, lead_ns, transfer_bytes, "
    "recomputed_tokens, reuse_outcome, coalesce(read_after_expiry, false), coalesce(joined_by, ''), "
    "coalesce(clock_error_ns, 0)"
)
"""`row_of` as SQL, for the many requests that are over."""


def _labels(cursor: duckdb.DuckDBPyConnection) -> dict[str, int]:
    cursor.execute(
        "SELECT coalesce(label, '') AS label, count(*) AS requests FROM requests "
        f"GROUP BY ALL ORDER BY requests DESC, label LIMIT {MAX_LABELS}"
    )
    return dict(cursor.fetchall())


def _label(asked: str | None, filters: Sequence[Filter], labels: Mapping[str, int]) -> str:
    """The label that the frame is of: the one asked for, production, or the most frequent."""
    if asked is not None:
        return checked_text("label", asked)
    named = [str(one.value) for one in filters if (one.column, one.operator) == ("label", "=")]
    return named[0] if named else "" if "" in labels else next(iter(labels), "")


def _answers(
    cursor: duckdb.DuckDBPyConnection, selection: Selection, limits: query.Limits
) -> dict[str, Answer]:
    found = {}
    for name in QUESTIONS:
        result = query.answer(cursor, query.questions()[name].sql, selection, limits=limits)
        rows = [[query.plain(v, t) for v, t in zip(row, result.types, strict=True)] for row in result.rows]
        found[name] = Answer(result.columns, rows)
    return found


_OVER = "outcome IS DISTINCT FROM 'in flight'"


def _recent(cursor: duckdb.DuckDBPyConnection) -> tuple[list[RequestRow], int]:
    rows = cursor.execute(
        f"SELECT {_ROW} FROM waits WHERE {_OVER} ORDER BY arrived_at_ns DESC, id LIMIT {MAX_RECENT}"
    ).fetchall()
    recent = [RequestRow(*row) for row in rows]
    if len(recent) < MAX_RECENT:
        return recent, len(recent)
    return recent, _count(cursor)


def _count(cursor: duckdb.DuckDBPyConnection) -> int:
    ((total,),) = cursor.execute(f"SELECT count(*) FROM waits WHERE {_OVER}").fetchall()
    return int(total)


def _in_flight(
    cursor: duckdb.DuckDBPyConnection, selection: Selection, at_ns: int, live: pyarrow.Table | None
) -> list[RequestRow]:
    """Requests that were not over at that moment, also those that arrived before the window; the oldest
    first."""
    ever = selection._replace(since_ns=max(0, at_ns - MAX_LIFE_NS), until_ns=at_ns + 1)
    then_sql = requests_sql(cursor, ever, live, first_token=False)
    ended = ever._replace(as_of_ns=None, filters=())
    ended_sql = waits_sql(f"({requests_sql(cursor, ended, live, first_token=False)})")
    cursor.execute(
        f"SELECT * FROM ({ended_sql}) AS ended "
        f"SEMI JOIN (SELECT id FROM ({then_sql}) WHERE outcome = '{IN_FLIGHT}') AS open USING (id) "
        f"ORDER BY arrived_at_ns, id LIMIT {MAX_RECENT}"
    )
    names = [column[0] for column in cursor.description or []]
    return [as_of(dict(zip(names, row, strict=True)), at_ns) for row in cursor.fetchall()]


def _engines(cursor: duckdb.DuckDBPyConnection, window: Selection) -> list[Engine]:
    """The engine processes of the window, in the state in which they were last seen: of each place the latest
    that had started, without those that are over and of which no request of the window tells."""
    at_ns = window.until_ns
    seen = requests_sql(cursor, window)
    cursor.execute(
        f"WITH seen AS (SELECT unnest([p_engine, d_engine]) AS engine FROM ({seen})) "
        "SELECT ring, engine, source, rank, host, pid, started_at_ns, label, kvscope, state, state_detail, "
        '"read", lost, torn, rejected, hooks_missing, fingerprint '
        f"FROM {relation(cursor, 'engines')} WHERE started_at_ns <= {at_ns} "
        "QUALIFY row_number() OVER (PARTITION BY engine, source, rank ORDER BY started_at_ns DESC, id) = 1 "
        f"AND (state IN ('recording', 'stopped') OR started_at_ns >= {window.since_ns} "
        "OR engine IN (SELECT engine FROM seen)) "
        f"ORDER BY engine, source, rank LIMIT {MAX_ENGINES}"
    )
    names = [column[0] for column in cursor.description or []]
    found = []
    for values in cursor.fetchall():
        row = dict(zip(names, values, strict=True))
        for name in ("ring", "engine", "source", "host", "label", "kvscope", "state"):
            row[name] = row[name] or ""
        for name in ("rank", "pid", "started_at_ns", "read", "lost", "torn", "rejected"):
            row[name] = row[name] or 0
        row["hooks_missing"] = [hook for hook in row["hooks_missing"] or () if hook]
        row["fingerprint"] = _fingerprint(row["fingerprint"])
        found.append(Engine(**row))
    return found


def _fingerprint(text: str | None) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {}


def _samples(cursor: duckdb.DuckDBPyConnection, at_ns: int) -> list[Sample]:
    """The latest of each kind, none older than a minute (or two intervals)."""
    rows = cursor.execute(
        "SELECT max(at_ns) AS last_ns, coalesce(host, ''), coalesce(engine, ''), coalesce(source, ''), "
        "coalesce(rank, 0), name, coalesce(label, ''), arg_max(value, at_ns) "
        f"FROM {relation(cursor, 'samples', at_ns - SAMPLES_NS, at_ns + 1)} "
        f"WHERE at_ns > {at_ns - SAMPLES_NS} AND at_ns <= {at_ns} "
        "AND name IS NOT NULL AND value IS NOT NULL "
        "GROUP BY ALL "
        # The latest two: [last, the one before], which may not be there.
        f"HAVING {at_ns} - last_ns < greatest({FRESH_NS}, 2 * (last_ns - max(at_ns, 2)[2])) "
        f"ORDER BY ALL LIMIT {MAX_SAMPLES}"
    ).fetchall()
    return [Sample(*row) for row in rows]
