"""Which rows a query is about: a span of time, a kind of traffic, filters.

On a reading connection, temporary views that are named like the tables take their place, restricted to the
selection; so neither named questions nor users' SQL say anything about it. On a daemon, the view `requests`
also has the requests that are in flight and have had their first token. Wherever requests are read, those of
a benchmark's window have its label (see `windows`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, NamedTuple

from kvscope import schema, steps, storefile, windows
from kvscope.errors import UsageError
from kvscope.filters import Filter, literal
from kvscope.join import LONG_QUIET_NS, LOST_QUIET_NS, QUIET_NS
from kvscope.text import duration_ns, printable
from kvscope.views import VIEWS, waits_sql

if TYPE_CHECKING:
    import duckdb

LIVE = "live_requests"
"""Name under which a cursor has the requests that are not stored: a table with the columns of `requests`."""
LATE_NS = 600 * 10**9
"""How much earlier a request may turn out to have arrived than was known while it was in flight."""

TIMES = {name: column for name, column in storefile.TIMES.items() if not schema.BY_NAME[name].kept}
"""By table that is restricted: the column that says when a row began."""


class Selection(NamedTuple):
    """The rows that a query is about."""

    since_ns: int = 0
    """Unix time: what began then or later; 0 for all."""
    until_ns: int | None = None
    """Unix time: what began before; None for all."""
    label: str | None = None
    """Kind of traffic, `''` for production; None for all."""
    filters: tuple[Filter, ...] = ()
    as_of_ns: int | None = None
    """Unix time: requests as they were then, without what came later; None as they ended."""


def moment_ns(value: str | int | None, now_ns: int | None = None, name: str = "since") -> int | None:
    """Unix nanoseconds of a moment: a duration before now, ISO 8601 (UTC unless it says otherwise) or Unix
    nanoseconds; None where nothing is given. A small number, as text, is a forgotten unit; 0 is all.

    Raises:
        UsageError: it is none of these.
    """
    if value is None or value == "":
        return None
    wrong = UsageError(
        f"{name}: {printable(value)[:40]!r} is no duration before now such as 10m, no moment such as "
        "2026-11-29T15:54:09, and no Unix nanoseconds"
    )
    if isinstance(value, int) or (value.isascii() and value.isdigit()):
        moment = int(value) if len(str(value)) < 20 else -1
        if isinstance(value, str) and 0 < moment < _LEAST_NS:
            raise UsageError(f"{name}: {value} is no moment; {_meant(moment)}")
    elif match := _ISO.fullmatch(value.strip()):
        try:
            moment = _iso_ns(match)
        except (ValueError, OverflowError):
            raise wrong from None
    else:
        try:
            ago_ns = duration_ns(value)
        except UsageError:
            raise wrong from None
        moment = max(0, (time.time_ns() if now_ns is None else now_ns) - ago_ns)
    if not 0 <= moment < 2**63:
        raise wrong
    return moment


_LEAST_NS = 10**16
"""Of Unix nanoseconds that people write: April 1970. Less may be seconds, milliseconds or microseconds."""


def _meant(number: int) -> str:
    """What to write instead of a number that is too small for Unix nanoseconds."""
    for factor in (10**9, 10**6, 10**3):
        if 10**18 <= number * factor < 2**63:  # 2001 to 2262
            return f"Unix time is in nanoseconds here: write {number * factor}"
    minutes = number if number < 10_000 else 10
    return f"write {minutes}m (minutes before now), 2026-11-29T15:54:09, or Unix nanoseconds"


_ISO = re.compile(
    r"(\d{4})-(\d\d)-(\d\d)(?:[Tt ](\d\d):(\d\d)(?::(\d\d)(?:[.,](\d{1,9}))?)?)?"
    r"(?: ?(?:[Zz]|UTC|([+-])([01]\d|2[0-3]):?([0-5]\d)))?",
    re.ASCII,
)
_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def _iso_ns(match: re.Match[str]) -> int:
    year, month, day, hour, minute, second = (int(part or 0) for part in match.groups()[:6])
    sign = -1 if match[8] == "-" else 1
    offset = timedelta(hours=int(match[9] or 0), minutes=int(match[10] or 0)) * sign
    moment = datetime(year, month, day, hour, minute, second, tzinfo=timezone.utc) - offset
    return int((moment - _EPOCH).total_seconds()) * 10**9 + int((match[7] or "").ljust(9, "0"))


def make_views(cursor: duckdb.DuckDBPyConnection, selection: Selection | None, live: Any = None) -> None:
    """Make the views on `cursor`, and those that take the tables' places where something is selected.

    Args:
        live: a pyarrow table with the columns of `requests`: requests that may not be stored yet.
    """
    if live is not None:
        cursor.register(LIVE, live)
    chosen = selection or Selection()
    benchmarks = windows.benchmarks(cursor, chosen.since_ns, chosen.until_ns)
    if live is not None or chosen != Selection() or benchmarks or storefile.has_archived(cursor):
        for name in TIMES:
            if name == schema.REQUESTS.name:
                sql = requests_sql(cursor, chosen, live, benchmarks=benchmarks)
            else:
                stored = storefile.relation(cursor, name, chosen.since_ns, chosen.until_ns)
                sql = f"SELECT * FROM {stored}{_where(_time_conditions(name, chosen))}"
            cursor.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {sql}")
    for name, sql in VIEWS.items():
        cursor.execute(f"CREATE OR REPLACE TEMP VIEW {name} AS {sql}")


def requests_sql(
    cursor: duckdb.DuckDBPyConnection,
    selection: Selection,
    live: Any = None,
    first_token: bool = True,
    benchmarks: Sequence[windows.Step] | None = None,
) -> str:
    """A SELECT of the requests of `selection`, stored and `live`.

    Args:
        first_token: leave out those in flight that have had no first token.
        benchmarks: windows whose requests count as of their label; None for those of the store.
    """
    name, at = schema.REQUESTS.name, TIMES[schema.REQUESTS.name]
    if benchmarks is None:
        benchmarks = windows.benchmarks(cursor, selection.since_ns, selection.until_ns)
    stored_rows = storefile.relation(cursor, name, selection.since_ns, selection.until_ns)
    table = windows.labelled_sql(_as_of(stored_rows, selection), benchmarks)
    names = [column.name for column in schema.REQUESTS.columns]
    conditions = _time_conditions(name, selection)
    if selection.label is not None:
        conditions.append(f"coalesce(label, '') = {literal(selection.label)}")
    stored = {column.name for column in schema.REQUESTS.columns}
    conditions += [one.sql(selection.as_of_ns) for one in selection.filters if one.column in stored]
    if first_token:
        conditions.append("(ttft_ns IS NOT NULL OR outcome IS DISTINCT FROM 'in flight')")
    sql = f"SELECT * FROM {table}{_where(conditions)}"
    if live is not None and live.num_rows:
        # The bound lets the store skip all but the youngest rows.
        least_ns = min((at_ns for at_ns in live.column(at).to_pylist() if at_ns is not None), default=0)
        columns = ", ".join(f'CAST("{c.name}" AS {c.type}) AS "{c.name}"' for c in schema.REQUESTS.columns)
        sql += (
            f" UNION ALL SELECT {columns} FROM {windows.labelled_sql(_as_of(LIVE, selection), benchmarks)} "
            "ANTI JOIN "
            f"(SELECT id FROM {storefile.relation(cursor, name, least_ns - LATE_NS)} "
            f"WHERE {at} >= {least_ns - LATE_NS}) "
            "AS stored USING (id)"
            f"{_where(conditions)}"
        )
    derived = [one.sql() for one in selection.filters if one.column not in stored]
    if derived:
        listed = ", ".join(f'"{name}"' for name in names)
        sql = f"SELECT {listed} FROM ({waits_sql(f'({sql})')}){_where(derived)}"
    return sql


_SPENT = " + ".join(f"coalesce({step.column}, 0)" for step in steps.STEPS if step.in_ttft)
_IN_NO_ENGINE = "('prefill.frontend', 'registration.route', 'unknown')"
"""Steps in which no engine is known to work on a request, or to have it in its queue."""
END_NS = (
    f"(arrived_at_ns + coalesce(ttft_ns, {_SPENT}) + coalesce(decode_generate_ns, 0) + CASE outcome "
    f"WHEN 'incomplete' THEN if(current_step IN {_IN_NO_ENGINE}, {QUIET_NS}, {LONG_QUIET_NS}) "
    f"WHEN 'lost' THEN {LOST_QUIET_NS} ELSE 0 END)"
)
"""When a request was over, as SQL. Where no end was observed: when a daemon had waited for one in vain."""


def _as_of(source: str, selection: Selection) -> str:
    """For a FROM: `source` as of the selection's moment. Steps that were still to come stay in the columns of
    requests without a first token, which no figure is of."""
    at_ns = selection.as_of_ns
    if at_ns is None:
        return source
    over = f"outcome IS DISTINCT FROM 'in flight' AND {END_NS} <= {at_ns}"
    return (
        f"(SELECT * REPLACE (CASE WHEN {over} THEN outcome ELSE 'in flight' END AS outcome, "
        f"CASE WHEN arrived_at_ns + ttft_ns <= {at_ns} THEN ttft_ns END AS ttft_ns, "
        f"CASE WHEN {over} THEN output_tokens END AS output_tokens, "
        f"CASE WHEN {over} THEN decode_generate_ns END AS decode_generate_ns) FROM {source})"
    )


def _time_conditions(table: str, selection: Selection) -> list[str]:
    column = TIMES[table]
    conditions = [f"{column} >= {selection.since_ns}"] if selection.since_ns else []
    if selection.until_ns is not None:
        conditions.append(f"{column} < {selection.until_ns}")
    return conditions


def _where(conditions: list[str]) -> str:
    return f" WHERE {' AND '.join(conditions)}" if conditions else ""
