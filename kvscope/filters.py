"""Filters of requests, such as `connector=push` or `ttft_ns>300ms`: for SQL and for rows in memory alike."""

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

    def sql(self) -> str:
        """A condition on a row of `waits`; the value is rendered, so that views can hold it."""
        column = f'"{self.column}"'
        if isinstance(self.value, str):
            column = f"coalesce({column}, '')"  # `label=` finds requests without one
        if self.operator == "~":
            return f"contains({column}, {literal(self.value)})"
        return f"{column} {self.operator} {literal(self.value)}"

    def matches(self, row: Mapping[str, Any]) -> bool:
        value = row.get(self.column)
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
_FILTER = re.compile(r"\s*([a-z_]\w*)\s*(!=|>=|<=|=|>|<|~)(.*)", re.DOTALL | re.ASCII)


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
    """Read `connector=push`, `ttft_ns>300ms`, `client_id~abc`.

    Raises:
        UsageError: it is no filter, there is no such column, or the value does not fit it.
    """
    if len(text) > MAX_FILTER_CHARACTERS:
        raise UsageError(f"a filter has at most {MAX_FILTER_CHARACTERS} characters")
    match = _FILTER.fullmatch(text)
    if not match:
        raise UsageError(
            f"{printable(text)[:60]!r} is no filter; write column=value (or != > >= < <=, ~ for contains), "
            "such as connector=push or ttft_ns>300ms"
        )
    name, operator_, value = match[1], match[2], match[3].strip()
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
    return Filter(name, operator_, whole)


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
        hint = (
            f"did you mean {', '.join(near[:4])}?" if near else "`kvscope query 'DESCRIBE waits'` lists them"
        )
        raise UsageError(f"requests have no column {printable(name)[:40]!r}; {hint}")
    return type_
