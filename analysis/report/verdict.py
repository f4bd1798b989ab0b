"""The fleet's verdict in two sentences: where first tokens waited, and what would shorten that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvscope.advice import NEAR, WAITS, of_step
from kvscope.analysis.report.data import Gathered
from kvscope.analysis.report.parts import shown
from kvscope.text import shortened

Row = Mapping[str, Any]

FEW = 30
"""Requests: percentiles of fewer say little."""
FEW_OF_A_PART = 5
"""Requests: of a pair or a band with fewer nothing is said."""
MAX_UNSEEN = 4
"""Kinds of what was not seen that a caution names."""
_SAID = ("no first token", "legs not joined", "peer not instrumented", "TTFT unknown", "boundaries moved")
"""Kinds of what was not seen that have cautions of their own."""
UNSEEN_PERCENT = 10.0
"""Of TTFT: more that was not observed is a caution of its own."""

_FOLLOWS = {
    "compute wait": "Accelerators would shorten it",
    "transfer": "Neither accelerators nor another hand-off would shorten it much",
    "coordination wait": "Accelerators would not shorten it",
    "unknown": "It was not observed",
}
_WRONG = (
    ("not_finished", "did not finish"),
    ("recomputed", "had prompt tokens computed again by D"),
    ("read_after_expiry", "may have read other KV after their lease had expired"),
    ("not_joined", "have a leg that never found its partner"),
    ("peer_not_instrumented", "have a leg on an engine that does not record"),
    ("clamped", "have boundaries out of order, which were moved"),
)
"""Columns of `fleet` that count requests."""


def whole(found: Gathered) -> Row | None:
    """The row of all requests; None where there was no first token."""
    row = next((row for row in found.rows("fleet") if row["level"] == "all"), None)
    return row if row and row["requests"] else None


def waits(row: Row) -> dict[str, float]:
    """Percent of TTFT by wait, of a row of `fleet`."""
    return {
        name: round(sum(row[f"{class_}_percent"] or 0.0 for class_ in classes), 2)
        for name, classes in WAITS.items()
    }


def verdict(found: Gathered) -> list[str]:
    """Two sentences; where there was no first token, that, and what to do."""
    row = whole(found)
    if row is None:
        return nothing(found)
    shares = waits(row)
    order = sorted(shares, key=lambda name: -shares[name])
    most, next_ = order[:2]
    rest = ", ".join(f"{name} {shares[name]:.1f} %" for name in order[1:])
    near = shares[most] - shares[next_] < 100 * NEAR
    if near:
        first = f"A near tie of {most} ({shares[most]:.1f} % of TTFT) with the rest ({rest})"
    else:
        first = f"Mostly {most}: {shares[most]:.1f} % of TTFT ({rest})"
    first += f", mean TTFT {shown(row['mean_ttft_ms'])} ms over {requests(row['requests'])}"
    step = _step(found, WAITS[most])
    if step is not None:
        first += f"; its largest step is {step['step']} ({shown(step['share_percent'])} % of TTFT)"
    if pair := _pair(found, WAITS[most]):
        first += f"; {pair}"
    second = _FOLLOWS[most]
    if near:
        second = "No single change would shorten most of it"
    elif most == "compute wait" and (row["capacity_percent"] or 0) > (row["compute_percent"] or 0):
        second = "More room in batches or more KV blocks would shorten it"
    if step is not None and (advice := of_step(str(step["step"]), _connector(found, step))).help:
        second += f": for {step['step']} ({advice.why}), {advice.help}"
    return [first + ".", second + "."]


def requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"


def nothing(found: Gathered) -> list[str]:
    """Why there is nothing to tell of, and what to do."""
    scope = found.scope
    if (fleet := found.answers.get("fleet")) and fleet.error:
        return ["There is no verdict, as the question fleet has no answer.", "Ask for a shorter window."]
    if scope.where and found.labels.get(scope.label):
        return [
            "No request with a first token passes the filters in this window.",
            f"Ask with fewer filters: {requests(found.labels[scope.label])} of this label arrived in it.",
        ]
    elsewhere = {name: count for name, count in found.labels.items() if name != scope.label}
    if found.labels.get(scope.label):
        return [
            "No request of this window has had a first token.",
            "The list of those that did not finish says in which step each was last seen.",
        ]
    if elsewhere:
        names = ", ".join(f"{label_name(name)} {count}" for name, count in elsewhere.items())
        return [
            "No request of this label arrived in this window.",
            f"There are others: {names}; see --label.",
        ]
    return [
        "No request arrived in this window.",
        "Ask for another window with --since and --until, or of another source with --url or --db.",
    ]


def label_name(label: str) -> str:
    return shown(label) if label else "production"


def cautions(found: Gathered, simulated: bool) -> list[str]:
    """What the verdict does not rest on firmly, the gravest first."""
    said = []
    if simulated:
        said.append("Simulated: these requests come from a simulation, not from engines.")
    said += [f"No answer to {one.name}: {shown(one.error)}." for one in found.failed]
    said += [
        f"Approximate: {one.name} looked at one in {one.one_in} requests."
        for one in found.answers.values()
        if one.one_in > 1
    ]
    said += [
        f"Approximate: {shown(reason)} ({', '.join(names)})." for reason, names in _approximate(found).items()
    ]
    row = whole(found)
    if row is None:
        return said
    if row["requests"] < FEW:
        said.append(f"Thin data: {requests(row['requests'])}; percentiles of so few say little.")
    shares = waits(row)
    if shares["unknown"] > UNSEEN_PERCENT:
        said.append(f"Not observed: {shares['unknown']:.1f} % of TTFT, which may belong to any class.")
    said += [f"{requests(row[name])} {text}." for name, text in _WRONG if row[name]]
    said += _tail(found, shares)
    longest = next(iter(found.rows("fleet_steps")), None)
    most = max(shares, key=lambda name: shares[name])
    if longest is not None and longest["class"] not in WAITS[most]:
        share = shown(longest["share_percent"])
        said.append(f"The longest step of all is {longest['step']} ({longest['class']}), {share} % of TTFT.")
    if generating := row["generating"]:
        said.append(f"{requests(generating)} of the window were still generating when this was made.")
    unseen = [row for row in found.rows("unseen") if row["count"] and row["kind"] not in _SAID]
    if unseen:
        kinds = ", ".join(f"{shown(row['kind'])} ({shown(row['count'])})" for row in unseen[:MAX_UNSEEN])
        said.append(f"Not seen in full: {kinds}; Data quality says more.")
    return said


def _approximate(found: Gathered) -> dict[str, list[str]]:
    """Why figures are not exact, and of which questions; where one says how large its sample is, that is said
    already."""
    reasons: dict[str, list[str]] = {}
    for one in found.answers.values():
        if one.approximate and one.one_in == 1:
            reasons.setdefault(one.approximate, []).append(one.name)
    return reasons


def _tail(found: Gathered, shares: Mapping[str, float]) -> list[str]:
    """The slowest hundredth, where it waits for something else than the rest."""
    band = next((row for row in found.rows("fleet_bands") if row["band"] == "p99-100"), None)
    if band is None or not band["mean_ms"] or band["requests"] < FEW_OF_A_PART:
        return []
    slow = {name: sum(band[f"{class_}_ms"] or 0 for class_ in classes) for name, classes in WAITS.items()}
    most = max(slow, key=lambda name: slow[name])
    if most == max(shares, key=lambda name: shares[name]):
        return []
    share = 100 * slow[most] / band["mean_ms"]
    return [
        f"The slowest hundredth differs: mostly {most}, {share:.0f} % of a mean of "
        f"{shown(band['mean_ms'])} ms ({requests(band['requests'])})."
    ]


def _step(found: Gathered, classes: Sequence[str]) -> Row | None:
    """The step of these classes that takes most of TTFT."""
    return next((row for row in found.rows("fleet_steps") if row["class"] in classes), None)


def _connector(found: Gathered, step: Row) -> str | None:
    """The connector whose requests spend most in the step: what helps may depend on it."""
    spent = {
        row["connector"]: (row["p50_ms"] or 0) * row["requests"]
        for row in found.rows("steps")
        if row["step"] == step["step"]
    }
    return max(spent, key=lambda name: spent[name]) if spent else None


def _pair(found: Gathered, classes: Sequence[str]) -> str:
    """The pair whose requests wait longest, and how that compares."""

    def wait_ms(row: Row) -> float:
        return float(sum(row[f"{c}_percent"] or 0 for c in classes) / 100 * (row["mean_ttft_ms"] or 0))

    rows = [row for row in found.rows("fleet") if row["level"] == "pair" and row["mean_ttft_ms"] is not None]
    if len(rows) == 1:
        return f"its only pair is {pair_name(rows[0])}"
    enough = [row for row in rows if row["requests"] >= FEW_OF_A_PART]
    all_ = whole(found)
    if not enough or all_ is None:
        return ""
    worst = max(enough, key=wait_ms)
    name = pair_name(worst, several_connectors(rows))
    return (
        f"longest on the pair {name}, {wait_ms(worst):.1f} ms a request over "
        f"{requests(worst['requests'])} against {wait_ms(all_):.1f} ms of all"
    )


def pair_name(row: Row, connector: bool = False) -> str:
    """P and D, and how KV went between them where pairs have several connectors."""
    name = f"{shortened(shown(row['p_engine']), 60)} → {shortened(shown(row['d_engine']), 60)}"
    return f"{name} ({shown(row['connector'])})" if connector else name


def several_connectors(rows: Sequence[Row]) -> bool:
    """Whether a pair is there more than once."""
    return len({(row["p_engine"], row["d_engine"]) for row in rows}) < len(rows)
