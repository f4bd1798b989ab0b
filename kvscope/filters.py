"""Filters of requests, such as `connector=push` or `ttft>300ms`: for SQL and for rows in memory alike.

A name is a column of `waits`, or the word that the screens have for it: `ttft`, `prompt`, `readiness.detect`.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvscope.errors import UsageError
from kvscope.text import duration_ns, printable
from kvscope.views import WAITS_COLUMNS

MAX_FILTERS = 20
MAX_FILTER_CHARACTERS = 1000


class Filter(NamedTuple):
    """`column operator value`."""

    column: str
    operator: str
    value: str | int | float

    @property
    def waited(self) -> bool:
        """Whether requests that wait for their first token pass it once they have waited for long enough."""
        return self.column == "ttft_ns" and self.operator in (">", ">=")

    def sql(self, at_ns: int | None = None) -> str:
        """A condition on a row of `waits`; the value is rendered, so that views can hold it.

        Args:
            at_ns: Unix time at which requests are looked at that have had no first token.
        """
        column = f'"{self.column}"'
        if self.waited and at_ns is not None:
            column = f"coalesce(ttft_ns, CASE WHEN outcome = 'in flight' THEN {at_ns} - arrived_at_ns END)"
        if isinstance(self.value, str):
            column = f"coalesce({column}, '')"  # `label=` finds requests without one
        if self.operator == "~":
            return f"contains({column}, {literal(self.value)})"
        return f"{column} {self.operator} {literal(self.value)}"

    def matches(self, row: Mapping[str, Any], at_ns: int | None = None) -> bool:
        """The same for a row in memory."""
        value = row.get(self.column)
        if self.waited and value is None and at_ns is not None and row.get("outcome") == "in flight":
            value = at_ns - (row.get("arrived_at_ns") or at_ns)
        if isinstance(self.value, str):
            value = value or ""
        return value is not None and _OPERATORS[self.operator](value, self.value)


_OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
    "~": operator.contains,
}
_FILTER = re.compile(r"\s*([a-z_][\w.]*)\s*(!=|>=|<=|=|>|<|~)(.*)", re.DOTALL | re.ASCII)


def literal(value: str | int | float) -> str:
    """`value` as SQL."""
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return f"{value!r}::DOUBLE" if isinstance(value, float) else str(int(value))


def parse_filters(texts: Sequence[str]) -> tuple[Filter, ...]:
    """Read several, all of which must hold.

    Raises:
        UsageError: there are too many, or one is none.
    """
    if len(texts) > MAX_FILTERS:
        raise UsageError(f"at most {MAX_FILTERS} filters")
    return tuple(parse_filter(text) for text in texts)


def parse_filter(text: str) -> Filter:
    """Read `connector=push`, `ttft>300ms`, `client_id~abc`.

    Raises:
        UsageError: it is no filter, there is no such column, or the value does not fit it.
    """
    if len(text) > MAX_FILTER_CHARACTERS:
        raise UsageError(f"a filter has at most {MAX_FILTER_CHARACTERS} characters")
    match = _FILTER.fullmatch(text)
    if not match:
        raise UsageError(
            f"{printable(text)[:60]!r} is no filter; write column=value (or != > >= < <=, ~ for contains), "
            "such as connector=push or ttft>300ms"
        )
    name, operator_, value = column_named(match[1]), match[2], match[3].strip()
    type_ = column_type(name)
    if type_ == "VARCHAR":
        return Filter(name, operator_, checked_text(name, value))
    if operator_ == "~":
        raise UsageError(f"{name} is no text, and ~ is for texts")
    if type_ == "BOOLEAN" and value in ("true", "false"):
        return Filter(name, operator_, int(value == "true"))
    try:
        if type_ == "DOUBLE":
            if not math.isfinite(number := float(value)):
                raise ValueError
            return Filter(name, operator_, number)
        if name.endswith("_ns") and not value.lstrip("-").isdigit():
            sign = -1 if value.startswith("-") else 1
            return Filter(name, operator_, sign * duration_ns(value.lstrip("-")))
        whole = int(value)
    except ValueError:
        raise UsageError(f"{name}: {printable(value)[:40]!r} is no number") from None
    if not -(2**63) <= whole < 2**64:
        raise UsageError(f"{name}: {printable(value)[:40]} is too large")
    if whole and name.endswith("_ns") and not name.endswith("_at_ns"):
        raise UsageError(f"{name}: {whole} what? write {whole}ms, or {whole}ns if you mean nanoseconds")
    return Filter(name, operator_, whole)


def column_named(name: str) -> str:
    """The column that a word on the screens names, `readiness.detect` for instance; else the word itself."""
    name = name.replace(".", "_")
    if name in WAITS_COLUMNS:
        return name
    return _WORDS.get(name) or (
        f"{name}_ns" if f"{name}_ns" in WAITS_COLUMNS and name not in _UNCLEAR else name
    )


_WORDS = {
    "prompt": "prompt_tokens",
    "output": "output_tokens",
    "coord": "coordination_ns",
    "request": "client_id",
    "p": "p_engine",
    "d": "d_engine",
}
_UNCLEAR = ("compute",)  # one of the classes, or compute wait, which is two
_HINTS = {
    "pair": "write p_engine=… and d_engine=…, or one of them",
    "tpot": "decode_generate_ns is the time from the first token to the end",
    "compute": "write compute_wait, or compute_ns for the class alone",
}


def checked_text(name: str, value: str) -> str:
    """`value`, if it can stand in SQL.

    Raises:
        UsageError: it is no valid Unicode or has a NUL character.
    """
    try:
        value.encode()
    except UnicodeEncodeError:
        raise UsageError(f"{name}: {printable(value)[:40]!r} is no valid text") from None
    if "\0" in value:
        raise UsageError(f"{name}: {printable(value)[:40]!r} has a NUL character")
    return value


def column_type(name: str) -> str:
    """DuckDB type of a column of `waits` that can be compared.

    Raises:
        UsageError: there is none.
    """
    type_ = WAITS_COLUMNS.get(name)
    if type_ is None or type_.startswith("STRUCT"):
        near = [n for n in WAITS_COLUMNS if name and (name in n or n in name) and n != "waterfall"]
        hint = _HINTS.get(name) or (
            f"did you mean {', '.join(near[:4])}?" if near else "`kvscope query 'DESCRIBE waits'` lists them"
        )
        raise UsageError(f"requests have no column {printable(name)[:40]!r}; {hint}")
    return type_
