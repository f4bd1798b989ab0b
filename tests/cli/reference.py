"""What each named question should answer, worked out in plain Python from the rows of the store.

Nothing here is shared with the SQL: rows are grouped and counted by hand. Times in ms, as in the answers.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from itertools import pairwise
from typing import Any

from kvscope.steps import STEPS

Row = dict[str, Any]
Tables = dict[str, list[Row]]
IN_TTFT = [step for step in STEPS if step.in_ttft]
CLASSES = ("compute", "capacity", "transfer", "coordination", "unknown")
SECOND, QUARTER = 10**9, 250_000_000
BAD = ("lost", "error", "aborted", "incomplete")


def percentile(values: Iterable[float | None], q: float) -> float | None:
    """Between two values in order in proportion."""
    known = sorted(v for v in values if v is not None)
    if not known:
        return None
    place = q * (len(known) - 1)
    low = math.floor(place)
    high = min(low + 1, len(known) - 1)
    return known[low] + (known[high] - known[low]) * (place - low)


def mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return sum(known) / len(known) if known else None


def total(values: Iterable[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return sum(known) if known else None


def ms(ns: float | None) -> float | None:
    return None if ns is None else ns / 1e6


def percent(part: float | None, of: float | None) -> float | None:
    return None if part is None or not of else 100 * part / of


def utc(ns: int) -> str:
    return datetime.fromtimestamp(ns // SECOND, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


def groups(rows: Iterable[Row], *keys: str | Callable[[Row], Any]) -> dict[tuple[Any, ...], list[Row]]:
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        found[tuple(row[k] if isinstance(k, str) else k(row) for k in keys)].append(row)
    return found


def of_class(row: Row, class_: str) -> int:
    return sum(row[step.column] or 0 for step in IN_TTFT if step.class_ == class_)


def main_step(row: Row) -> Any:
    return max(IN_TTFT, key=lambda step: row[step.column] or 0)


def tpot(row: Row) -> float | None:
    if row["decode_generate_ns"] is None or (row["output_tokens"] or 0) < 2:
        return None
    return float(row["decode_generate_ns"] / (row["output_tokens"] - 1))


def first_tokens(tables: Tables) -> list[Row]:
    return [row for row in tables["requests"] if row["ttft_ns"] is not None]


def column(rows: Iterable[Row], name: str) -> list[Any]:
    return [row[name] for row in rows]


def spans(rows: Sequence[Row], count: int) -> Callable[[Row], int]:
    """The beginning of the span of a request, of about so many of at least a second."""
    at = column(rows, "arrived_at_ns")
    ns = max(SECOND, (max(at) - min(at) + count - 1) // count)
    return lambda row: row["arrived_at_ns"] // ns * ns


# --- TTFT --------------------------------------------------------------------------------------------


def ttft_figures(rows: list[Row]) -> Row:
    ttft = column(rows, "ttft_ns")
    return {
        "requests": len(rows),
        "p50_ms": ms(percentile(ttft, 0.5)),
        "p90_ms": ms(percentile(ttft, 0.9)),
        "p99_ms": ms(percentile(ttft, 0.99)),
        "mean_ms": ms(mean(ttft)),
    } | {f"{c}_ms": ms(mean(of_class(r, c) for r in rows)) for c in CLASSES}


def ttft(tables: Tables) -> list[Row]:
    found = groups(first_tokens(tables), "label", "connector")
    return [{"label": k[0], "connector": k[1]} | ttft_figures(rows) for k, rows in found.items()]


def ttft_models(tables: Tables) -> list[Row]:
    found = groups(first_tokens(tables), "label", "model", "connector")
    return [
        dict(zip(("label", "model", "connector"), k, strict=True)) | ttft_figures(r) for k, r in found.items()
    ]


BANDS = (0, 256, 1024, 4096, 16384, 65536)


def ttft_lengths(tables: Tables) -> list[Row]:
    found = groups(first_tokens(tables), "label", lambda r: max(b for b in BANDS if b <= r["prompt_tokens"]))
    answer = []
    for (label, start), rows in found.items():
        known = [r for r in rows if r["p_cached_tokens"] is not None]
        later = [band for band in BANDS if band > start]
        answer.append(
            {
                "label": label,
                "from_tokens": start,
                "below_tokens": later[0] if later else None,
                "cached_percent": percent(
                    total(column(known, "p_cached_tokens")), total(column(known, "prompt_tokens"))
                ),
            }
            | ttft_figures(rows)
        )
    return answer


def fleet_trend(tables: Tables) -> list[Row]:
    rows = first_tokens(tables)
    found = groups(rows, "label", spans(tables["requests"], 60))
    answer = []
    for (label, at_ns), some in found.items():
        figures = ttft_figures(some)
        figures["p50_ttft_ms"], figures["p99_ttft_ms"] = figures.pop("p50_ms"), figures.pop("p99_ms")
        del figures["p90_ms"]
        answer.append({"label": label, "at_ns": at_ns} | figures)
    return answer


def fleet_bands(tables: Tables) -> list[Row]:
    answer = []
    for (label,), rows in groups(first_tokens(tables), "label").items():
        edges = [percentile(column(rows, "ttft_ns"), q) or 0.0 for q in (0, 0.5, 0.9, 0.99, 1)]
        placed = groups(
            rows, lambda r, edges=edges: next(i for i in range(4) if r["ttft_ns"] <= edges[i + 1])
        )
        for (place,), some in placed.items():
            figures = ttft_figures(some)
            steps = Counter(main_step(r).name for r in some)
            answer.append(
                {
                    "label": label,
                    "band": ("p0-50", "p50-90", "p90-99", "p99-100")[place],
                    "from_ms": ms(edges[place]),
                    "to_ms": ms(edges[place + 1]),
                    "main_step": min(steps, key=lambda s: (-steps[s], s)),
                }
                | {k: v for k, v in figures.items() if not k.startswith("p")}
            )
    return answer


def fleet(tables: Tables) -> list[Row]:
    requests = tables["requests"]
    at = column(requests, "arrived_at_ns")
    seconds = (max(at) - min(at)) / 1e9
    answer = []
    levels = {"all": ("label",), "connector": ("label", "connector")}
    levels["pair"] = ("label", "connector", "p_engine", "d_engine")
    for level, keys in levels.items():
        for key, rows in groups(requests, *keys).items():
            if level == "pair" and None in key:
                continue
            told = [r for r in rows if r["ttft_ns"] is not None]
            ttfts = column(told, "ttft_ns")
            answer.append(
                dict.fromkeys(levels["pair"])
                | dict(zip(keys, key, strict=True))
                | {
                    "level": level,
                    "requests": len(told),
                    "generating": 0,
                    "not_finished": sum(r["outcome"] in BAD for r in rows),
                    "p50_ttft_ms": ms(percentile(ttfts, 0.5)),
                    "p90_ttft_ms": ms(percentile(ttfts, 0.9)),
                    "p99_ttft_ms": ms(percentile(ttfts, 0.99)),
                    "mean_ttft_ms": ms(mean(ttfts)),
                    "p50_tpot_ms": ms(percentile(map(tpot, rows), 0.5)),
                    "p90_tpot_ms": ms(percentile(map(tpot, rows), 0.9)),
                    "requests_per_s": len(told) / seconds,
                    "output_tokens_per_s": (total(column(rows, "output_tokens")) or 0) / seconds,
                    "not_joined": sum(r["joined_by"] == "unjoined" for r in rows),
                    "peer_not_instrumented": sum(r["joined_by"] == "peer not instrumented" for r in rows),
                    "recomputed": sum((r["recomputed_tokens"] or 0) > 0 for r in rows),
                    "read_after_expiry": sum(bool(r["read_after_expiry"]) for r in rows),
                    "clock_error_ms": ms(max((r["clock_error_ns"] or 0 for r in rows), default=0)),
                    "clamped": sum((r["clamped_ns"] or 0) > 0 for r in rows),
                }
                | {f"{c}_percent": percent(sum(of_class(r, c) for r in told), sum(ttfts)) for c in CLASSES}
            )
    return answer


# --- steps -------------------------------------------------------------------------------------------


def step_figures(rows: list[Row]) -> list[Row]:
    answer = []
    for step in IN_TTFT:
        had = [r[step.column] for r in rows if r[step.column]]
        if had:
            answer.append(
                {
                    "step": step.name,
                    "class": step.class_,
                    "requests": len(had),
                    "share_percent": percent(sum(had), sum(column(rows, "ttft_ns"))),
                    "mean_ms": ms(sum(had) / len(rows)),
                    "p50_ms": ms(percentile(had, 0.5)),
                    "p90_ms": ms(percentile(had, 0.9)),
                    "p99_ms": ms(percentile(had, 0.99)),
                    "one_in": 1,
                }
            )
    return answer


def steps(tables: Tables) -> list[Row]:
    found = groups(first_tokens(tables), "label", "connector")
    return [
        {"label": k[0], "connector": k[1]} | one for k, rows in found.items() for one in step_figures(rows)
    ]


def fleet_steps(tables: Tables) -> list[Row]:
    found = groups(first_tokens(tables), "label")
    return [{"label": k[0]} | one for k, rows in found.items() for one in step_figures(rows)]


def step_trend(tables: Tables) -> list[Row]:
    found = groups(first_tokens(tables), "label", spans(tables["requests"], 30))
    answer = [{"label": k[0], "at_ns": k[1]} | one for k, rows in found.items() for one in step_figures(rows)]
    for row in answer:
        del row["mean_ms"]
    return answer


def step_intervals(tables: Tables) -> list[Row]:
    answer = []
    for (label, connector), rows in groups(first_tokens(tables), "label", "connector").items():
        parts: dict[str, tuple[str | None, list[float]]] = {"ttft": (None, column(rows, "ttft_ns"))}
        parts["tpot"] = (None, [math.floor(t) for t in map(tpot, rows) if t is not None])
        for class_ in CLASSES[:-1]:
            parts[class_] = (class_, [of_class(r, class_) for r in rows])
        for step in IN_TTFT:
            parts[step.name] = (step.class_, [r[step.column] or 0 for r in rows])
        for part, (class_of, values) in parts.items():
            if not sum(values):
                continue
            row: Row = {"label": label, "connector": connector, "part": part, "class": class_of}
            row |= {"requests": len(values), "mean_ms": ms(mean(values)), "one_in": 1}
            for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
                half = 1.96 * math.sqrt(q * (1 - q) / len(values))
                row[f"{name}_ms"] = ms(percentile(values, q))
                row[f"{name}_low_ms"] = ms(percentile(values, max(0.0, q - half)))
                row[f"{name}_high_ms"] = ms(percentile(values, min(1.0, q + half)))
            answer.append(row)
    return answer


# --- requests ----------------------------------------------------------------------------------------


def slowest(tables: Tables) -> list[Row]:
    rows = sorted(first_tokens(tables), key=lambda r: (-r["ttft_ns"], r["id"]))[:20]
    return [
        {
            name: r[name]
            for name in ("id", "client_id", "label", "connector", "outcome", "p_engine", "d_engine")
        }
        | {
            "arrived": f"{utc(r['arrived_at_ns'])}.{r['arrived_at_ns'] // 10**6 % 1000:03d}",
            "ttft_ms": ms(r["ttft_ns"]),
            "compute_wait_ms": ms(of_class(r, "compute") + of_class(r, "capacity")),
            "transfer_ms": ms(of_class(r, "transfer")),
            "coordination_ms": ms(of_class(r, "coordination")),
            "unknown_ms": ms(of_class(r, "unknown")),
            "main_step": main_step(r).name,
            "main_class": main_step(r).class_,
            "main_step_ms": ms(r[main_step(r).column]),
        }
        for r in rows
    ]


def outcomes(tables: Tables) -> list[Row]:
    keys = ("label", "connector", "outcome", "outcome_detail", "current_step", "joined_by")
    names = ("label", "connector", "outcome", "detail", "step", "joined_by")
    return [
        dict(zip(names, key, strict=True))
        | {
            "requests": len(rows),
            "recomputed": sum((r["recomputed_tokens"] or 0) > 0 for r in rows),
            "recomputed_tokens": total(column(rows, "recomputed_tokens")) or 0,
            "read_after_expiry": sum(bool(r["read_after_expiry"]) for r in rows),
            "first_at": utc(min(column(rows, "arrived_at_ns"))),
            "last_at": utc(max(column(rows, "arrived_at_ns"))),
        }
        for key, rows in groups(tables["requests"], *keys).items()
    ]


def stuck(tables: Tables) -> list[Row]:
    keys = (
        "label",
        "outcome",
        "outcome_detail",
        "current_step",
        "connector",
        "p_engine",
        "d_engine",
        "joined_by",
    )
    names = ("label", "outcome", "detail", "step", *keys[4:])
    some = [r for r in tables["requests"] if r["outcome"] != "finished" or r["read_after_expiry"]]
    answer = []
    for key, rows in groups(some, *keys).items():
        known = [sum(of_class(r, c) for c in CLASSES) if r["ttft_ns"] is None else r["ttft_ns"] for r in rows]
        answer.append(
            dict(zip(names, key, strict=True))
            | {
                "requests": len(rows),
                "without_first_token": sum(r["ttft_ns"] is None for r in rows),
                "read_after_expiry": sum(bool(r["read_after_expiry"]) for r in rows),
                "p50_known_ms": ms(percentile(known, 0.5)),
                "max_known_ms": ms(max(known)),
                "last_id": max(rows, key=lambda r: r["arrived_at_ns"])["id"],
                "first_at": utc(min(column(rows, "arrived_at_ns"))),
                "last_at": utc(max(column(rows, "arrived_at_ns"))),
            }
        )
    return answer


def tokens(tables: Tables) -> list[Row]:
    answer = []
    for key, rows in groups(tables["requests"], "label", "model", "connector").items():
        row: Row = dict(zip(("label", "model", "connector"), key, strict=True)) | {"requests": len(rows)}
        for name in ("prompt", "p_cached", "reuse_pulled", "d_cached", "transferred", "recomputed", "output"):
            row[f"{name}_tokens"] = total(column(rows, f"{name}_tokens"))
        for side in ("p", "d"):
            known = [r for r in rows if r[f"{side}_cached_tokens"] is not None]
            row[f"{side}_cached_percent"] = percent(
                row[f"{side}_cached_tokens"], total(column(known, "prompt_tokens"))
            )
        row["p_computed_tokens"] = total(
            max(0, r["prompt_tokens"] - r["p_cached_tokens"] - (r["reuse_pulled_tokens"] or 0))
            for r in rows
            if r["p_engine"] is not None
            and (r["prefill_compute_ns"] or 0) > 0
            and r["p_cached_tokens"] is not None
        )
        row["recomputed"] = sum((r["recomputed_tokens"] or 0) > 0 for r in rows)
        answer.append(row)
    return answer


def pairs(tables: Tables) -> list[Row]:
    keys = ("label", "connector", "p_engine", "d_engine")
    both = [r for r in tables["requests"] if r["p_engine"] is not None and r["d_engine"] is not None]
    answer = []
    for key, rows in groups(both, *keys).items():
        rates = [
            r["transfer_bytes"] / r["wire_upper_ns"]
            for r in rows
            if r["transfer_bytes"] is not None and r["wire_upper_ns"]
        ]
        best = [r["best_rate_bytes_per_s"] for r in rows if r["best_rate_bytes_per_s"] is not None]
        answer.append(
            dict(zip(keys, key, strict=True))
            | {
                "requests": len(rows),
                "not_finished": sum(r["outcome"] in BAD for r in rows),
                "p50_ttft_ms": ms(percentile(column(rows, "ttft_ns"), 0.5)),
                "p99_ttft_ms": ms(percentile(column(rows, "ttft_ns"), 0.99)),
                "p50_coordination_ms": ms(percentile((of_class(r, "coordination") for r in rows), 0.5)),
                "p50_transfer_ms": ms(percentile((of_class(r, "transfer") for r in rows), 0.5)),
                "transferred_bytes": total(column(rows, "transfer_bytes")),
                "p50_gb_per_s": percentile(rates, 0.5),
                "best_gb_per_s": max(best) / 1e9 if best else None,
            }
        )
    return answer


def leads(tables: Tables) -> list[Row]:
    keys = ("label", "connector", "p_engine", "d_engine")
    known = [r for r in tables["requests"] if r["lead_ns"] is not None]
    return [
        dict(zip(keys, key, strict=True))
        | {
            "requests": len(rows),
            "lagging": sum(r["lead_ns"] < 0 for r in rows),
            "p10_lead_ms": ms(percentile(column(rows, "lead_ns"), 0.1)),
            "p50_lead_ms": ms(percentile(column(rows, "lead_ns"), 0.5)),
            "p90_lead_ms": ms(percentile(column(rows, "lead_ns"), 0.9)),
            "mean_lag_ms": ms(mean(max(0, -r["lead_ns"]) for r in rows)),
        }
        for key, rows in groups(known, *keys).items()
    ]


def reuse(tables: Tables) -> list[Row]:
    cost = {}
    for key, rows in groups(tables["requests"], "label", "p_engine", "model").items():
        computed = [
            (
                r["prefill_compute_ns"],
                r["prompt_tokens"] - (r["p_cached_tokens"] or 0) - (r["reuse_pulled_tokens"] or 0),
            )
            for r in rows
            if r["prefill_compute_ns"]
        ]
        cost[key] = [ns / count for ns, count in computed if count > 0]
    answer = []
    offered = [r for r in tables["requests"] if r["reuse_outcome"] is not None]
    for key, rows in groups(offered, "label", "reuse_outcome", "p_engine", "model").items():
        added = {r["id"]: sum(r[s.column] or 0 for s in IN_TTFT if ".reuse_" in s.name) for r in rows}
        pulled = [r for r in rows if r["reuse_outcome"] == "pulled"]
        costs = cost[key[0], key[2], key[3]]
        per_token = percentile(costs, 0.5)
        assert per_token is not None
        answer.append(
            dict(zip(("label", "reuse_outcome", "p_engine", "model"), key, strict=True))
            | {
                "requests": len(rows),
                "offered_tokens": total(column(rows, "reuse_offered_tokens")),
                "pulled_tokens": total(column(rows, "reuse_pulled_tokens")) or 0,
                "skipped_tokens": sum(
                    r["reuse_offered_tokens"] - (r["reuse_pulled_tokens"] or 0) for r in rows
                ),
                "p50_ttft_ms": ms(percentile(column(rows, "ttft_ns"), 0.5)),
                "mean_wait_added_ms": ms(mean(added.values())),
                "us_per_token": per_token / 1e3,
                "cost_requests": len(costs),
                "mean_net_benefit_ms": ms(
                    mean(r["reuse_pulled_tokens"] * per_token - added[r["id"]] for r in pulled)
                ),
            }
        )
    return answer


def sessions(tables: Tables) -> list[Row]:
    answer = []
    chained = [r for r in tables["requests"] if r["session"] is not None]
    for (session,), unordered in groups(chained, "session").items():
        rows = sorted(unordered, key=lambda r: (r["arrived_at_ns"], r["id"]))
        last = rows[-1]
        pauses = [
            after["arrived_at_ns"] - (r["arrived_at_ns"] + r["ttft_ns"] + r["decode_generate_ns"])
            for r, after in pairwise(rows)
            if after["turn"] == r["turn"] + 1
        ]
        engines = {r["id"]: r["d_engine"] for r in rows}
        kept = [
            lease["deadline_at_ns"] - lease["armed_at_ns"]
            for lease in tables["leases"]
            if engines.get(lease["request_id"]) == lease["engine"]
        ]
        counts = Counter(r["reuse_outcome"] for r in rows if r["reuse_outcome"] is not None)
        answer.append(
            {name: last[name] for name in ("label", "model", "p_engine", "d_engine", "prompt_tokens")}
            | {
                "session": session,
                "turns": len(rows),
                "first_at": utc(rows[0]["arrived_at_ns"]),
                "last_at": utc(last["arrived_at_ns"]),
                "last_id": last["id"],
                "reuse_offered_tokens": total(column(rows, "reuse_offered_tokens")) or 0,
                "reuse_pulled_tokens": total(column(rows, "reuse_pulled_tokens")) or 0,
                "recomputed_tokens": total(column(rows, "recomputed_tokens")) or 0,
                "outcomes": ", ".join(
                    f"{o} {n}" for o, n in sorted(counts.items(), key=lambda c: (-c[1], c[0]))
                ),
                "p50_pause_ms": ms(percentile(pauses, 0.5)),
                "max_pause_ms": ms(max(pauses, default=None)),
                "ttl_ms": ms(percentile(kept, 0.5)),
                "p50_ttft_ms": ms(percentile(column(rows, "ttft_ns"), 0.5)),
            }
        )
    return answer


# --- load, interference, regret ----------------------------------------------------------------------


def ended_ns(row: Row) -> int | None:
    if row["decode_generate_ns"] is None:
        return None
    return int(row["arrived_at_ns"] + row["ttft_ns"] + row["decode_generate_ns"])


def in_flight(rows: list[Row], second: int) -> int:
    """Requests that arrived in an earlier second and had not ended in one; those that are over without an
    observed end had with their first token."""
    arrived = sum(r["arrived_at_ns"] // SECOND < second for r in rows)
    ends = [
        r["arrived_at_ns"] + r["ttft_ns"] if end is None and r["outcome"] != "in flight" else end
        for r in rows
        for end in [ended_ns(r)]
    ]
    return arrived - sum(end is not None and end // SECOND < second for end in ends)


def coordination_load(tables: Tables) -> list[Row]:
    told = first_tokens(tables)
    answer = []
    at = {r["id"]: in_flight(told, r["arrived_at_ns"] // SECOND) for r in told}
    arrivals = Counter(r["arrived_at_ns"] // SECOND for r in told)
    for (label, place), rows in groups(told, "label", lambda r: at[r["id"]].bit_length()).items():
        ttfts, coordination = column(rows, "ttft_ns"), [of_class(r, "coordination") for r in rows]
        answer.append(
            {
                "label": label,
                "in_flight_from": 2 ** (place - 1) if place else 0,
                "in_flight_to": 2**place - 1,
                "requests": len(rows),
                "arrivals_per_s": mean(arrivals[r["arrived_at_ns"] // SECOND] for r in rows),
                "p50_ttft_ms": ms(percentile(ttfts, 0.5)),
                "p90_ttft_ms": ms(percentile(ttfts, 0.9)),
                "p50_coordination_ms": ms(percentile(coordination, 0.5)),
                "p90_coordination_ms": ms(percentile(coordination, 0.9)),
            }
            | {f"{c}_percent": percent(sum(of_class(r, c) for r in rows), sum(ttfts)) for c in CLASSES[:-1]}
        )
    return answer


def workload(tables: Tables) -> list[Row]:
    at = column(tables["requests"], "arrived_at_ns")
    answer = []
    for (label,), rows in groups(tables["requests"], "label").items():
        told = [r for r in rows if r["ttft_ns"] is not None]
        seconds = {r["arrived_at_ns"] // SECOND for r in told}
        offered = [r for r in rows if r["reuse_outcome"] is not None]
        row: Row = {
            "label": label,
            "requests": len(rows),
            "requests_per_s": len(rows) / ((max(at) - min(at)) / 1e9),
            "reuse_offered_percent": 100 * len(offered) / len(rows),
            "reuse_pulled_percent": percent(
                sum(r["reuse_pulled_tokens"] or 0 for r in offered),
                total(column(offered, "reuse_offered_tokens")),
            ),
            "p50_in_flight": percentile((in_flight(told, second) for second in seconds), 0.5),
            "pairs": len(
                {(r["p_engine"], r["d_engine"]) for r in rows if None not in (r["p_engine"], r["d_engine"])}
            ),
        }
        for side in ("p", "d"):
            known = [r for r in rows if r[f"{side}_cached_tokens"] is not None]
            row[f"{side}_cached_percent"] = percent(
                total(column(known, f"{side}_cached_tokens")), total(column(known, "prompt_tokens"))
            )
            row[f"{side}_engines"] = sorted(
                {r[f"{side}_engine"] for r in rows if r[f"{side}_engine"] is not None}
            )
        for name in ("prompt", "output"):
            row[f"p50_{name}_tokens"] = percentile(column(rows, f"{name}_tokens"), 0.5)
            row[f"p90_{name}_tokens"] = percentile(column(rows, f"{name}_tokens"), 0.9)
        for name in ("connector", "model"):
            counts = Counter(r[name] for r in rows)
            row[f"{name}s"] = ", ".join(
                f"{k} {n}" for k, n in sorted(counts.items(), key=lambda c: (-c[1], c[0]))
            )
        answer.append(row)
    return answer


def interference(tables: Tables) -> list[Row]:
    touched: Counter[tuple[str, int]] = Counter()
    for t in tables["transfers"]:
        first = (t["posted_at_ns"] - (t["post_ns"] or 0)) // QUARTER
        last = (t["posted_at_ns"] + (t["wire_upper_ns"] or 0)) // QUARTER
        for quarter in range(first, last + 1):
            touched[t["engine"], quarter] += 1
            touched[t["peer"], quarter] += 1
    judged: list[Row] = []
    for r in first_tokens(tables):
        quarter = (r["arrived_at_ns"] + r["ttft_ns"]) // QUARTER + 1
        end = ended_ns(r)
        if tpot(r) is not None and end is not None and end >= (quarter + 1) * QUARTER:
            judged.append(
                {"label": r["label"], "side": "decode", "n": touched[r["d_engine"], quarter], "ns": tpot(r)}
            )
        computed = r["prompt_tokens"] - (r["p_cached_tokens"] or 0)
        if r["p_engine"] and r["prefill_compute_ns"] and computed > 0 and not r["reuse_pulled_tokens"]:
            before = sum(r[f"prefill_{name}_ns"] or 0 for name in ("frontend", "queue", "blocks"))
            quarter = (r["arrived_at_ns"] + before) // QUARTER - 1
            ns = r["prefill_compute_ns"] / computed
            judged.append(
                {"label": r["label"], "side": "prefill", "n": touched[r["p_engine"], quarter], "ns": ns}
            )
    names = {0: "none", 1: "1", 2: "2 to 3", 3: "2 to 3"}
    found = groups(judged, "label", "side", lambda r: names.get(r["n"], "4 or more"))
    answer = []
    for (label, side, transfers), rows in found.items():
        p50 = percentile(column(rows, "ns"), 0.5)
        alone = percentile(column(found.get((label, side, "none"), ()), "ns"), 0.5)
        answer.append(
            {
                "label": label,
                "side": side,
                "transfers": transfers,
                "requests": len(rows),
                "p50_ms_per_token": ms(p50),
                "p90_ms_per_token": ms(percentile(column(rows, "ns"), 0.9)),
                "mean_ms_per_token": ms(mean(column(rows, "ns"))),
                "slower_percent": None if not alone or p50 is None else 100 * (p50 / alone - 1),
            }
        )
    return answer


def regret(tables: Tables) -> list[Row]:
    waits = ("registration.admit", "registration.blocks", "readiness.admit")
    codes = {step.code for step in STEPS if step.name in waits}
    compute = next(step.code for step in STEPS if step.name == "prefill.compute")
    handed: list[Row] = []
    for r in first_tokens(tables):
        ends = [i["from_ns"] + i["ns"] for i in r["waterfall"] if i["step"] == compute]
        if not r["p_engine"] or not r["d_engine"] or r["unknown_ns"] or not ends:
            continue
        found = [i for i in r["waterfall"] if i["step"] in codes]
        felt = sum(
            max(0, i["from_ns"] + i["ns"] - max(i["from_ns"], max(ends))) for i in found if i["critical"]
        )
        second = (r["arrived_at_ns"] + max(ends)) // SECOND
        handed.append(r | {"second": second, "felt": felt, "whole": sum(i["ns"] for i in found)})
    keys = ("label", "model", "connector", "second")
    load = {
        key: {
            engine: sum(column(rows, "whole")) // len(rows)
            for (engine,), rows in groups(some, "d_engine").items()
        }
        for key, some in groups(handed, *keys).items()
    }
    answer = []
    for (label, connector), rows in groups(handed, "label", "connector").items():
        regrets, of = [], 0
        for r in rows:
            others = [ns for engine, ns in load[tuple(r[k] for k in keys)].items() if engine != r["d_engine"]]
            if others:
                regrets.append(max(0, r["felt"] - min(others)))
                of += r["ttft_ns"]
        some_regret = sum(one > 0 for one in regrets)
        answer.append(
            {
                "label": label,
                "connector": connector,
                "requests": len(rows),
                "compared": len(regrets),
                "regretted": some_regret,
                "regretted_percent": percent(some_regret, len(regrets)),
                "p50_regret_ms": ms(percentile(regrets, 0.5)),
                "p90_regret_ms": ms(percentile(regrets, 0.9)),
                "max_regret_ms": ms(max(regrets, default=None)),
                "total_regret_s": sum(regrets) / 1e9 if regrets else None,
                "regret_percent": percent(sum(regrets), of),
            }
        )
    return answer


# --- engines and what moves between them --------------------------------------------------------------


def transfers(tables: Tables) -> list[Row]:
    keys = ("operation", "engine", "peer")
    answer = []
    for key, rows in groups(tables["transfers"], *keys).items():
        rates = [
            r["bytes"] / (r["post_ns"] + r["wire_upper_ns"])
            for r in rows
            if r["bytes"] is not None and r["wire_upper_ns"] is not None and r["post_ns"] is not None
        ]
        sized = [r["bytes"] / r["descriptors"] for r in rows if r["bytes"] is not None and r["descriptors"]]
        telemetry = percentile(column(rows, "telemetry_xfer_us"), 0.5)
        post, descriptors = total(column(rows, "post_ns")), total(column(rows, "descriptors"))

        def whole(value: float | None) -> int | None:
            return None if value is None else round(value)

        answer.append(
            dict(zip(keys, key, strict=True))
            | {
                "transfers": len(rows),
                "failed": sum(r["state"] == "failed" for r in rows),
                "still_open": sum(r["state"] == "open" for r in rows),
                "bytes": total(column(rows, "bytes")),
                "p50_bytes": whole(percentile(column(rows, "bytes"), 0.5)),
                "p50_descriptors": whole(percentile(column(rows, "descriptors"), 0.5)),
                "p50_bytes_per_descriptor": whole(percentile(sized, 0.5)),
                "p50_post_ms": ms(percentile(column(rows, "post_ns"), 0.5)),
                "us_per_descriptor": None if post is None or not descriptors else post / descriptors / 1e3,
                "p50_wire_lower_ms": ms(percentile(column(rows, "wire_lower_ns"), 0.5)),
                "p50_wire_upper_ms": ms(percentile(column(rows, "wire_upper_ns"), 0.5)),
                "p50_gb_per_s": percentile(rates, 0.5),
                "best_gb_per_s": max(rates, default=None),
                "p50_telemetry_ms": None if telemetry is None else telemetry / 1e3,
            }
        )
    return answer


def leases(tables: Tables) -> list[Row]:
    answer = []
    for (engine, end), rows in groups(tables["leases"], "engine", "end").items():
        ended = [r for r in rows if r["ended_at_ns"] is not None]
        margins = [r["deadline_at_ns"] - r["ended_at_ns"] for r in ended]
        held = [r["ended_at_ns"] - r["armed_at_ns"] for r in ended]
        answer.append(
            {
                "engine": engine,
                "lease_end": end,
                "leases": len(rows),
                "renewed": sum(r["renewals"] > 0 for r in rows),
                "p50_held_ms": ms(percentile(held, 0.5)),
                "min_margin_ms": ms(min(margins, default=None)),
                "p50_margin_ms": ms(percentile(margins, 0.5)),
                "first_at": utc(min(column(rows, "armed_at_ns"))),
                "last_at": utc(max(column(rows, "armed_at_ns"))),
            }
        )
    return answer


def handshakes(tables: Tables) -> list[Row]:
    return [
        {
            "engine": engine,
            "peer": peer,
            "handshakes": len(rows),
            "failed": sum(r["ok"] is False for r in rows),
            "p50_ms": ms(percentile(column(rows, "ns"), 0.5)),
            "max_ms": ms(max(column(rows, "ns"))),
            "clock_offset_ms": ms(percentile(column(rows, "clock_offset_ns"), 0.5)),
            "last_at": utc(max(column(rows, "started_at_ns"))),
        }
        for (engine, peer), rows in groups(tables["handshakes"], "engine", "peer").items()
    ]


def failures(tables: Tables) -> list[Row]:
    keys = ("kind", "name", "engine", "source")
    return [
        dict(zip(keys, key, strict=True))
        | {
            "failures": len(rows),
            "requests": len({r["request_id"] for r in rows if r["request_id"] is not None}),
            "last_detail": max(rows, key=lambda r: r["at_ns"])["detail"],
            "first_at": utc(min(column(rows, "at_ns"))),
            "last_at": utc(max(column(rows, "at_ns"))),
        }
        for key, rows in groups(tables["failures"], *keys).items()
    ]


def engines(tables: Tables) -> list[Row]:
    same = (
        "engine",
        "source",
        "rank",
        "host",
        "pid",
        "label",
        "state",
        "state_detail",
        "kvscope",
        "hooks_missing",
    )
    return [
        {name: r[name] for name in same}
        | {"started_at": utc(r["started_at_ns"]), "fingerprint": json.loads(r["fingerprint"])}
        for r in tables["engines"]
    ]


def incomplete(row: Row) -> bool:
    return bool(row["lost"] or row["rejected"] or row["hooks_missing"] or row["state"] in ("stopped", "gone"))


def losses(tables: Tables) -> list[Row]:
    same = (
        "engine",
        "source",
        "rank",
        "lost",
        "torn",
        "rejected",
        "hooks_missing",
        "state",
        "state_detail",
        "ring",
    )
    return [
        {name: r[name] for name in same}
        | {"events": r["read"], "lost_percent": percent(r["lost"], r["read"] + r["lost"])}
        for r in filter(incomplete, tables["engines"])
    ]


def unseen(tables: Tables) -> list[Row]:
    answer = []

    def tell(label: str, kind: str, count: int, of: int) -> None:
        share = percent(count, of)
        answer.append({"label": label, "kind": kind, "count": count, "of": of, "share_percent": share})

    for (label,), rows in groups(tables["engines"], "label").items():
        events = sum(r["read"] + r["lost"] for r in rows)
        for name in ("lost", "torn", "rejected"):
            tell(label, f"events {name}", sum(column(rows, name)), events)
        tell(label, "hooks missing", sum(bool(r["hooks_missing"]) for r in rows), len(rows))
        tell(label, "recorders stopped", sum(r["state"] == "stopped" for r in rows), len(rows))
        tell(label, "processes gone", sum(r["state"] == "gone" for r in rows), len(rows))
    for (label,), rows in groups(tables["requests"], "label").items():
        told = [r for r in rows if r["ttft_ns"] is not None]
        for kind, joined in (("legs not joined", "unjoined"), ("peer not instrumented",) * 2):
            tell(label, kind, sum(r["joined_by"] == joined for r in rows), len(rows))
        tell(label, "joins inferred", sum(r["joined_by"].startswith("client id") for r in rows), len(rows))
        tell(label, "no first token", len(rows) - len(told), len(rows))
        unknown_ms = math.ceil(sum(r["unknown_ns"] or 0 for r in told) / 1e6)
        tell(label, "TTFT unknown", unknown_ms, math.ceil(sum(column(told, "ttft_ns")) / 1e6))
        wired = [r for r in rows if r["wire_lower_ns"] is not None]
        tell(label, "wire not separated", sum(r["best_rate_bytes_per_s"] is None for r in wired), len(wired))
        tell(label, "boundaries moved", sum((r["clamped_ns"] or 0) > 0 for r in rows), len(rows))
        tell(label, "clocks uncertain", sum((r["clock_error_ns"] or 0) > 0 for r in rows), len(rows))
    return answer
