"""Views that every reading connection gets, made from `steps.STEPS`; `query` says what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvscope import schema, steps


def _sum_of(class_: str) -> str:
    return " + ".join(f"coalesce({s.column}, 0)" for s in steps.STEPS if s.class_ == class_ and s.in_ttft)


_IN_TTFT = [step for step in steps.STEPS if step.in_ttft]
_CLASSES = [
    class_ for class_ in steps.CLASSES if class_ != steps.UNKNOWN
]  # its one step has that column already


def waits_sql(source: str) -> str:
    """The view `waits` over a table or a bracketed SELECT with the columns of `requests`."""
    sums = ", ".join(f"{_sum_of(class_)} AS {class_}_ns" for class_ in _CLASSES)
    longest = f"greatest({', '.join(s.column for s in _IN_TTFT)})"
    names, classes = (
        " ".join(f"WHEN {s.column} THEN '{text}'" for s, text in ((s, getattr(s, field)) for s in _IN_TTFT))
        for field in ("name", "class_")
    )
    # The longest is computed one level below, else planning would copy it into each branch of the CASE.
    return (
        "SELECT *, compute_ns + capacity_ns AS compute_wait_ns, "
        f"CASE WHEN main_step_ns > 0 THEN CASE main_step_ns {names} END END AS main_step, "
        f"CASE WHEN main_step_ns > 0 THEN CASE main_step_ns {classes} END END AS main_class "
        f"FROM (SELECT *, {sums}, {longest} AS main_step_ns FROM {source})"
    )


VIEWS = {
    "waits": waits_sql("requests"),
    "request_steps": (
        "SELECT id, arrived_at_ns, label, connector, p_engine, d_engine, ttft_ns, unnest(["
        + ", ".join(f"{{step: '{s.name}', class: '{s.class_}', ns: {s.column}}}" for s in _IN_TTFT)
        + "], recursive := true) FROM requests"
    ),
    "step_values": (
        "SELECT id, arrived_at_ns, label, connector, ttft_ns AS ttft, "
        + "".join(f"{class_}_ns AS {class_}, " for class_ in _CLASSES)
        + ", ".join(f'{s.column} AS "{s.name}"' for s in _IN_TTFT)
        + ", CASE WHEN output_tokens > 1 THEN decode_generate_ns // (output_tokens - 1) END AS tpot "
        "FROM waits WHERE ttft_ns IS NOT NULL"
    ),
    "step_classes": "SELECT * FROM (VALUES "
    + ", ".join(f"('{s.name}', '{s.class_}')" for s in _IN_TTFT)
    + ") AS steps (step, class)",
}
"""Made on each reading connection, so that a store needs none of them and they can't be out of date."""

WAITS_COLUMNS: dict[str, str] = {
    **{column.name: column.type for column in schema.REQUESTS.columns},
    **{f"{class_}_ns": "BIGINT" for class_ in _CLASSES},
    "compute_wait_ns": "BIGINT",
    "main_step_ns": "BIGINT",
    "main_step": "VARCHAR",
    "main_class": "VARCHAR",
}
"""Columns of the view `waits` and their types."""


def waits(row: Mapping[str, Any]) -> dict[str, Any]:
    """What the view `waits` adds to a row of `requests`, for requests that are not in the store yet."""
    sums = dict.fromkeys(steps.CLASSES, 0)
    for step in _IN_TTFT:
        sums[step.class_] += row.get(step.column) or 0
    longest = max(_IN_TTFT, key=lambda step: row.get(step.column) or 0)
    longest_ns = row.get(longest.column) or 0
    return {
        **{f"{class_}_ns": sums[class_] for class_ in _CLASSES},
        "compute_wait_ns": sums[steps.COMPUTE] + sums[steps.CAPACITY],
        "main_step_ns": longest_ns,
        "main_step": longest.name if longest_ns else None,
        "main_class": longest.class_ if longest_ns else None,
    }
