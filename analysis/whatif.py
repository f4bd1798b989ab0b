"""What if: the time to first token (TTFT) that requests would have had under another connector, another
choice of decoder, a faster wire or other settings of reuse, predicted from the requests of a window.

examples:
  kvscope whatif --since 1h
  kvscope whatif --since 1h --where connector=pull --scenario push
  kvscope whatif --since 1d --threshold 512 --ttl 60
  kvscope whatif --db snapshot.duckdb --json

Each scenario is of the requests that it applies to, says what it assumes, and how far off it was when it was
last checked on real engines (`make validate-whatif`). Loads are taken as they were: what a change would do to
the queues of other requests is in none of them.
"""

from __future__ import annotations

import argparse
import functools
import textwrap
from collections.abc import Sequence
from importlib import resources
from typing import Any, NamedTuple

import msgspec

from kvscope import query
from kvscope.analysis.paging import OVER, Source, Window, add_window_arguments, ask, window
from kvscope.analysis.session_data import valued_sql
from kvscope.analysis.traffic import engines, is_simulated
from kvscope.client import DaemonError, StoreFile
from kvscope.errors import UsageError
from kvscope.query import QueryError
from kvscope.source import add_source_arguments, open_source, print_json
from kvscope.text import duration_ns, ms, printable, table, utc

FIGURES = "whatif_validated.json"
"""What `make validate-whatif` measured last, beside this module."""
QUANTILES = (50, 90, 99)
MAX_TOKENS = 10**9
FILE_S = 60.0
"""A query of a file, which keeps nobody waiting, may take so long."""
FEW = 100
"""Below so many requests a p99 is one of the slowest requests."""


class Scenario(NamedTuple):
    """A change, and what it makes of the requests that it applies to."""

    name: str
    title: str
    assumption: str
    sql: str
    """A SELECT of `ttft_ns` and `predicted_ns`, NULL where there is no prediction."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_window_arguments(parser)
    names = [scenario.name for scenario in scenarios(1, 1)]
    parser.add_argument(
        "--scenario",
        action="append",
        choices=names,
        metavar="NAME",
        help=f"only {', '.join(names)}; repeatable",
    )
    parser.add_argument(
        "--threshold", type=int, metavar="TOKENS", help="reuse: kept KV of fewer tokens is computed anew"
    )
    parser.add_argument(
        "--ttl", metavar="SECONDS", help="reuse: D keeps a turn's KV for so long, such as 60 or 5m"
    )
    parser.add_argument("--json", action="store_true", help="as JSON; times in nanoseconds")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    threshold, ttl_ns = _tokens(arguments.threshold), _ttl_ns(arguments.ttl)
    wanted = set(arguments.scenario or ())
    for name, given in (("threshold", threshold), ("ttl", ttl_ns)):
        if name in wanted and given is None:
            raise UsageError(f"the scenario {name} needs --{name}")
    chosen = [s for s in scenarios(threshold, ttl_ns) if not wanted or s.name in wanted]
    with open_source(arguments) as source:
        if isinstance(source, StoreFile):
            source.limits = source.limits._replace(seconds=FILE_S)
        about = window(source, arguments)
        simulated = is_simulated(engines(source, about.parameters()), about.label)
        answers = [_answer(source, about, scenario) for scenario in chosen]
    if arguments.json:
        print_json({"window": about._asdict(), "simulated": simulated, "scenarios": answers})
    else:
        print(told(about, simulated, answers))
    return 0


def _tokens(value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_TOKENS:
        raise UsageError(f"--threshold is a number of tokens from 0 to {MAX_TOKENS}")
    return value


def _ttl_ns(text: str | None) -> int | None:
    """A bare number is seconds."""
    if text is None:
        return None
    return duration_ns(f"{text}s" if text.replace(".", "", 1).isascii() and text[-1:].isdigit() else text)


def _answer(source: Source, about: Window, scenario: Scenario) -> dict[str, Any]:
    quantiles = ", ".join(str(q / 100) for q in QUANTILES)
    row, error = dict[str, Any](), ""
    try:
        (row,) = ask(
            source,
            f"SELECT count(*) AS requests, quantile_cont(ttft_ns, [{quantiles}]) AS now, "
            f"quantile_cont(predicted_ns, [{quantiles}]) AS predicted, avg(predicted_ns - ttft_ns) AS "
            f"mean_shift_ns FROM ({scenario.sql}) WHERE predicted_ns IS NOT NULL",
            about.parameters(),
        )
    except (QueryError, DaemonError) as failed:
        error = str(failed)  # the other scenarios may have an answer
    return {
        "scenario": scenario.name,
        "title": scenario.title,
        "requests": row.get("requests"),
        **{f"now_p{q}_ns": _whole(row.get("now"), i) for i, q in enumerate(QUANTILES)},
        **{f"predicted_p{q}_ns": _whole(row.get("predicted"), i) for i, q in enumerate(QUANTILES)},
        "mean_shift_ns": _whole([row.get("mean_shift_ns")], 0),
        "assumption": scenario.assumption,
        "validated": validated(scenario.name),
        "error": error,
    }


def _whole(values: Sequence[float | None] | None, at: int) -> int | None:
    value = None if values is None else values[at]
    return None if value is None else round(value)


@functools.cache
def figures() -> dict[str, Any]:
    """The figures file; empty where there is none."""
    try:
        text = resources.files("kvscope.analysis").joinpath(FIGURES).read_bytes()
    except OSError:
        return {}
    return msgspec.json.decode(text, type=dict[str, Any])


def validated(name: str) -> dict[str, Any] | None:
    """How far off a scenario was when it was last checked; None where it never was."""
    found = figures()
    for figure in found.get("scenarios", ()):
        if figure["scenario"] == name:
            about = ("measured_at", "kvscope", "vllm", "nixl", "how")
            return {"error_percent": figure["error_percent"], **{key: found.get(key) for key in about}}
    return None


# --- how it is told ------------------------------------------------------------------------------


def told(about: Window, simulated: bool, answers: list[dict[str, Any]]) -> str:
    """For a terminal."""
    traffic = printable(about.label) or "production"
    lines = [
        f"{about.requests} requests of {traffic}, {utc(about.since_ns)} to {utc(about.until_ns)} UTC"
        + (", simulated" if simulated else ""),
        "",
    ]
    head = ("what if", "requests", *(f"p{q} now → then" for q in QUANTILES), "mean", "checked")
    rows = []
    for answer in answers:
        shifts = (_shift(answer[f"now_p{q}_ns"], answer[f"predicted_p{q}_ns"]) for q in QUANTILES)
        mean_ns = answer["mean_shift_ns"]
        mean = "" if mean_ns is None else f"{'+' if mean_ns > 0 else ''}{ms(mean_ns)}"
        rows.append((answer["title"], answer["requests"], *shifts, mean, _error(answer["validated"])))
    lines += [table(head, rows), "TTFT in ms; mean: of the change of each request.", ""]
    for answer in answers:
        few = ""
        if answer["error"]:
            few = f" Not answered: {printable(answer['error'])[:200]}."
        elif not answer["requests"]:
            few = " It applies to no request of this window."
        elif answer["requests"] < FEW:
            few = f" Of {answer['requests']} requests only: its p99 says little."
        lines.append(
            textwrap.fill(f"{answer['title']}: {answer['assumption']}{few}", 100, subsequent_indent="  ")
        )
    if any(answer["validated"] for answer in answers):
        found = figures()
        lines += [
            "",
            textwrap.fill(
                f"Checked {found['measured_at']} with kvscope {found['kvscope']}, vLLM {found['vllm']}, "
                f"NIXL {found['nixl']}: {found['how']}. The figure is the predicted median TTFT against "
                "the measured one.",
                100,
            ),
        ]
    return "\n".join(lines)


def _shift(now_ns: int | None, then_ns: int | None) -> str:
    if now_ns is None or then_ns is None:
        return ""
    percent = f" ({100 * (then_ns / now_ns - 1):+.0f} %)" if now_ns else ""
    return f"{now_ns / 1e6:.1f} → {then_ns / 1e6:.1f}{percent}"


def _error(found: dict[str, Any] | None) -> str:
    return "not validated" if found is None else f"{found['error_percent']:+.1f} %"


# --- the scenarios -------------------------------------------------------------------------------

REGRETS_SQL = (
    query.questions()["regret"].sql.rpartition("\nSELECT\n")[0] + "\nSELECT ttft_ns, regret_ns FROM judged"
)
"""Early-binding regret by request, NULL where it is not known: what the named question sums up."""

_COMPUTED_NS = "greatest(0, ttft_ns + net_ns)"
"""TTFT of a turn that read back, had P computed the tokens."""
_READ_BACK_NS = "greatest(0, ttft_ns - net_ns)"
"""The other way round."""
_REUSE_ASSUMES = (
    "computing costs P's own median per computed token of the model; where KV was not read back, the wait "
    "for it follows a straight line through P's turns where it was, as in `kvscope sessions`; only turns of "
    "conversations for which the change decides are counted"
)


def scenarios(threshold: int | None = None, ttl_ns: int | None = None) -> list[Scenario]:
    """All of them; those about reuse only where their setting is given."""
    first_token = f"ttft_ns IS NOT NULL AND {OVER}"
    pair = f"{first_token} AND p_engine <> '' AND d_engine <> ''"
    found = [
        Scenario(
            "push",
            "pulled under push",
            "D is asked when P is, so that its frontend, queue, blocks and handshake lie beside prefill, "
            "and only what they take longer than it is waited for; posting, the wire and what follows last "
            "as long as they did.",
            f"SELECT ttft_ns, predicted_push_ttft_ns AS predicted_ns FROM requests WHERE {first_token}",
        ),
        Scenario(
            "pull",
            "pushed under pull",
            "P's answer crosses to its API server, the router and D's API server, each in the time that "
            "the request took through P's frontend or D's, whichever is shorter; D's own frontend, queue "
            "and blocks follow; posting, the wire and what comes after last as long as they did, and "
            "nothing is to be signalled.",
            f"SELECT ttft_ns, predicted_pull_ttft_ns AS predicted_ns FROM requests WHERE {first_token}",
        ),
        Scenario(
            "no-coordination",
            "without coordination",
            "every coordination step takes no time, waits for capacity stay, and so does what was not "
            "observed.",
            f"SELECT ttft_ns, ttft_ns - coordination_ns AS predicted_ns FROM waits WHERE {pair}",
        ),
        Scenario(
            "decoder",
            "another decoder at hand-over",
            "the decoder is chosen when prefill has finished, and the wait for capacity there is the "
            "mean of the least loaded other decoder's requests of the same second; only requests with "
            "another decoder to compare with.",
            f"SELECT ttft_ns, ttft_ns - regret_ns AS predicted_ns FROM ({REGRETS_SQL})",
        ),
        Scenario(
            "best-rate",
            "transfer at the pair's best rate",
            "the KV moves at the fastest rate that was seen of its pair in this window; only what the "
            "polls prove to have been wire is saved, the wait for the next poll stays.",
            f"""
            WITH rates AS (
                SELECT p_engine, d_engine, connector, max(best_rate_bytes_per_s) AS rate
                FROM requests
                GROUP BY ALL
            ), moved AS (
                SELECT request_id AS id, engine, max(bytes) AS rank_bytes
                FROM transfers
                WHERE state = 'done'
                GROUP BY ALL
            )
            SELECT
                ttft_ns,
                ttft_ns - greatest(0, coalesce(transfer_post_ns, 0) + transfer_wire_ns
                    - round(1e9 * coalesce(rank_bytes, transfer_bytes) / rate)) AS predicted_ns
            FROM requests AS r
            JOIN rates USING (p_engine, d_engine, connector)
            LEFT JOIN moved AS m
                ON m.id = r.id AND m.engine = CASE connector WHEN 'push' THEN r.p_engine ELSE r.d_engine END
            WHERE {pair} AND transfer_wire_ns IS NOT NULL AND transfer_bytes > 0 AND rate > 0
            """,
        ),
    ]
    if threshold is not None:
        found.append(
            Scenario(
                "threshold",
                f"reuse from {threshold} tokens on",
                f"kept KV of fewer tokens is computed anew, of more is read back; {_REUSE_ASSUMES}.",
                f"""{valued_sql()}
                SELECT ttft_ns, CASE
                    WHEN reuse_outcome = 'pulled' AND wanted_tokens < {threshold} THEN {_COMPUTED_NS}
                    WHEN reuse_outcome = 'below threshold' AND wanted_tokens >= {threshold}
                        THEN {_READ_BACK_NS}
                END AS predicted_ns
                FROM valued
                WHERE ttft_ns IS NOT NULL
                """,
            )
        )
    if ttl_ns is not None:
        found.append(
            Scenario(
                "ttl",
                f"KV kept on D for {ttl_ns / 1e9:g} s",
                "turns that came later than that after the one before are computed anew, those that came "
                "earlier and found it expired are read back; what the kept blocks cost D is not in it; "
                f"{_REUSE_ASSUMES}.",
                f"""{valued_sql()}
                SELECT ttft_ns, CASE
                    WHEN reuse_outcome = 'pulled' AND pause_ns > {ttl_ns} THEN {_COMPUTED_NS}
                    WHEN reuse_outcome = 'expired' AND pause_ns <= {ttl_ns} THEN {_READ_BACK_NS}
                END AS predicted_ns
                FROM valued
                WHERE ttft_ns IS NOT NULL
                """,
            )
        )
    return found
