"""Conversations whose turns reuse KV that D has kept (bidirectional): what was read back, what was not and
why, what that was worth, what D held for it, and which threshold and TTL the data would favour.

examples:
  kvscope sessions --since 1h
  kvscope sessions --sort held_block_s --limit 50
  kvscope sessions 9223372036854775811 --db incident.duckdb
  kvscope sessions --label benchmark --json

Prefill spared is an estimate: tokens read back x P's own median prefill cost per computed token of that
model. A request's id in place of a conversation's shows the conversation it belongs to.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from kvscope.analysis import session_data as data
from kvscope.analysis.paging import Row, Source, Window, add_window_arguments, moments, window
from kvscope.analysis.traffic import Engine, engines, is_simulated
from kvscope.errors import KvscopeError, UsageError
from kvscope.source import add_source_arguments, apply_during, open_source, print_json
from kvscope.text import ms, printable, span, table, utc

MAX_LIMIT = 10_000
MIN_TURNS_SHOWN = 1000
"""Turns of one conversation, at least."""
_EVER_NS = 2**63 - 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "id", nargs="?", metavar="ID", help="one conversation, or any request of it: its turns"
    )
    parser.add_argument(
        "--sort",
        default="last_at_ns",
        metavar="COLUMN",
        help="of the list, largest first; COLUMN:asc turns it",
    )
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="conversations at most (20)")
    add_window_arguments(parser)
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.limit <= MAX_LIMIT:
        raise UsageError(f"limit is a number from 1 to {MAX_LIMIT}")
    with open_source(arguments) as source:
        if arguments.id:
            return _one(arguments, source)
        found = _everything(source, window(source, arguments), arguments.sort, arguments.limit)
    if arguments.json:
        print_json(found)
    elif not found["overall"]["turns"]:
        print(
            f"no conversation of {_label(found['label'])} reuses KV that D has kept in this window",
            file=sys.stderr,
        )
    else:
        print("\n".join(_text(found)))
    return 0


def _everything(source: Source, about: Window, sort: str, limit: int) -> dict[str, Any]:
    """What `--json` prints."""
    rows = data.conversations(source, about, sort, limit)
    told = engines(source, about.parameters())
    return {
        "label": about.label,
        "simulated": is_simulated(told, about.label),
        "basis": _BASIS,
        "overall": data.overall(source, about),
        "outcomes": data.outcomes(source, about),
        "threshold": _candidates(data.thresholds(source, about), _setting(told, "kv_recompute_threshold")),
        "ttl": _candidates(data.ttls(source, about), _setting(told, "decoder_kv_blocks_ttl")),
        "conversations": rows,
    }


_BASIS = (
    "estimate: tokens read back x the P engine's median prefill time per computed token of that model, minus "
    "the time in the prefill.reuse_* steps on the critical path"
)


def _candidates(found: data.Candidates, now: object) -> dict[str, Any]:
    return {
        "now": now,
        "turns": found.turns,
        "favoured": found.favoured,
        "why_not": found.why_not or None,
        "candidates": found.rows,
    }


def _setting(told: Sequence[Engine], name: str) -> object:
    """A setting of the engines of this traffic, where all that tell it agree."""
    values = {
        engine.fingerprint["extra_config"][name]
        for engine in told
        if isinstance(engine.fingerprint.get("extra_config"), dict)
        and isinstance(engine.fingerprint["extra_config"].get(name), (int, float))
    }
    return next(iter(values)) if len(values) == 1 else None


# --- text ---------------------------------------------------------------------------------------------


def _label(label: str) -> str:
    return f"label {printable(label)}" if label else "production"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _net(ns: int) -> str:
    if not ns:
        return "no net benefit"
    return f"net benefit {span(ns)}" if ns > 0 else f"net loss {span(-ns)}"


def _text(found: dict[str, Any]) -> Iterator[str]:
    all_ = found["overall"]
    simulated = ", simulated" if found["simulated"] else ""
    yield (
        f"{_label(found['label'])}{simulated}: {_counted(all_['conversations'], 'conversation')}, "
        f"{_counted(all_['turns'], 'turn')} seen ({all_['later_turns']} after a first one)"
    )
    yield ""
    offered, pulled = all_["offered_tokens"], all_["pulled_tokens"]
    if offered:
        share = f" ({100 * (pulled or 0) / offered:.0f} %)"
        again = "not known" if all_["recomputed_tokens"] is None else all_["recomputed_tokens"]
        yield (
            f"tokens that D had kept: {offered} offered, {pulled or 0} read back{share}, "
            f"{again} computed again by P"
        )
    elif all_["offered_turns"]:
        yield "tokens that D had kept: how many is not known"
    if found["outcomes"]:
        listed = ", ".join(f"{count} {name}" for name, count in found["outcomes"].items())
        yield f"what became of it, by turns: {listed}"
    if all_["changed_d"]:
        yield (
            f"another engine: {_counted(all_['changed_d'], 'turn')} decoded by another D than the turn before"
        )
    yield from _benefit(all_)
    yield from _held(all_)
    yield from _pauses(all_)
    yield ""
    yield from _favoured("threshold", "kv_recompute_threshold", found["threshold"], _threshold_row)
    yield from _favoured("TTL", "decoder_kv_blocks_ttl", found["ttl"], _ttl_row)
    yield ""
    yield _list(found["conversations"])
    if len(found["conversations"]) < all_["conversations"]:
        yield f"{all_['conversations'] - len(found['conversations'])} more: see --limit and --sort"


def _benefit(all_: Row) -> Iterator[str]:
    if not all_["valued_turns"]:
        if all_["pulled_turns"]:
            yield "what reading back was worth is not known: no request tells P's cost per token"
        return
    net, turns = all_["net_ns"], all_["valued_turns"]
    each = f", {span(abs(round(net / turns)))} a turn" if net and turns > 1 else ""
    yield (
        f"estimate: {_counted(turns, 'turn')} that read back spared {span(all_['saved_ns'])} of prefill and "
        f"waited {span(all_['wait_ns'])} for it: {_net(net)}{each}; "
        f"{_counted(all_['turns_at_a_loss'], 'turn')} lost by it"
    )
    least, most = (all_[name] / 1e3 for name in ("least_ns_per_token", "most_ns_per_token"))
    cost = f"{least:.3g} us" if f"{least:.3g}" == f"{most:.3g}" else f"{least:.3g} to {most:.3g} us"
    requests = _counted(all_["cost_requests"], "request")
    yield f"  basis: P's own median prefill cost per computed token, {cost}, of at least {requests}"


def _held(all_: Row) -> Iterator[str]:
    if not all_["leases"]:
        return
    if not all_["measured_leases"]:
        yield "KV held on D between turns: not known (block size or ends of leases were not told)"
        return
    held, used = all_["held_block_s"], all_["used_block_s"] or 0
    share = f" ({100 * used / held:.0f} %)" if held else ""
    missing = all_["leases"] - all_["measured_leases"]
    yield (
        f"KV held on D between turns: {held:.0f} block-seconds after "
        f"{_counted(all_['measured_leases'], 'turn')}, of these {used:.0f}{share} for blocks that the next "
        "turn read back "
        f"({all_['used_blocks'] or 0} of {all_['held_blocks']} blocks)"
        + (f"; not known of {_counted(missing, 'more turn')}" if missing else "")
    )


def _pauses(all_: Row) -> Iterator[str]:
    if not all_["pauses"]:
        return
    shown = ", ".join(f"{name} {span(all_[f'{name}_pause_ns'])}" for name in ("p50", "p90", "p99", "max"))
    yield f"pauses between turns ({all_['pauses']}): {shown}"
    bounds = ["0 s", *(span(s * 10**9) for s in data.PAUSES_S)]
    names = [f"{low} to {high}" for low, high in itertools.pairwise(bounds)] + [f"over {bounds[-1]}"]
    counts = all_["pause_counts"]
    most = max(counts) or 1
    for name, count in zip(names, counts, strict=True):
        if count:
            yield f"  {name:<16} {count:>7}  {'█' * max(1, round(30 * count / most))}"
    if all_["ttl_ns"] is not None:
        longer = "1 pause was" if all_["overslept"] == 1 else f"{all_['overslept']} pauses were"
        yield f"  D keeps KV for {span(all_['ttl_ns'])} (median): {longer} longer"


def _favoured(name: str, setting: str, found: dict[str, Any], row: Any) -> Iterator[str]:
    now = "" if found["now"] is None else f" (now {found['now']})"
    if found["favoured"] is None:
        yield f"{name}, {setting}{now}: {found['why_not']}"
        return
    yield f"{name}, {setting}{now}: the data favour {row(found['favoured'])}, on {found['turns']} turns"
    for candidate in found["candidates"]:
        mark = "*" if candidate == found["favoured"] else " "
        yield f"  {mark} {row(candidate)}"


def _threshold_row(row: Row) -> str:
    return f"{row['threshold']} tokens: {_gain(row)}{_counted(row['turns_read_back'], 'turn')} read back"


def _ttl_row(row: Row) -> str:
    held = "" if row["block_s"] is None else f", {row['block_s']:.0f} block-seconds held"
    turns = _counted(row["pauses"], "turn")
    return f"{row['ttl_s']} s: {_gain(row)}{row['turns_read_back']} of {turns} read back{held}"


def _gain(row: Row) -> str:
    """Nothing where no turn would read back."""
    return f"{_net(row['net_ns'])}, " if row["turns_read_back"] else ""


def _list(rows: Sequence[Row]) -> str:
    head = (
        "conversation", "last (UTC)", "turns", "prompt", "offered", "pulled", "again", "reuse",
        "spared ms", "wait ms", "net ms", "held blk-s", "used", "longest pause", "TTL", "TTFT ms",
    )  # fmt: skip
    return table(
        head,
        (
            (
                row["session"],
                utc(row["last_at_ns"])[:19],
                row["turns"],
                row["prompt_tokens"],
                row["offered_tokens"],
                row["pulled_tokens"],
                row["recomputed_tokens"],
                row["outcomes"],
                ms(row["saved_ns"]),
                ms(row["wait_ns"]),
                ms(row["net_ns"]),
                _number(row["held_block_s"]),
                _number(row["used_block_s"]),
                _span(row["max_pause_ns"]),
                _span(row["ttl_ns"]),
                ms(row["ttft_ns"]),
            )
            for row in rows
        ),
        max_width=34,
    )


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _span(ns: int | None) -> str:
    return "" if ns is None else span(ns)


def _one(arguments: argparse.Namespace, source: Source) -> int:
    """One conversation: whatever its label, and all its turns unless a window is given."""
    apply_during(arguments)
    since_ns, until_ns = moments(source, arguments.since, arguments.until)
    session = data.session_of(source, arguments.id)
    if session is None:
        raise KvscopeError(
            f"request {printable(arguments.id)[:80]} is no turn of a conversation: it reused no KV that "
            "D had kept, and D kept none after it"
        )
    about = Window(since_ns or 0, _EVER_NS if until_ns is None else until_ns, None, tuple(arguments.where))
    rows = data.turns_of(source, about, session, max(arguments.limit, MIN_TURNS_SHOWN))
    if not rows:
        raise KvscopeError(f"no turn of conversation {session} in this window")
    labels = sorted({row["label"] for row in rows})
    served = engines(source, {**data.parameters(about), "where": [*arguments.where, f"session={session}"]})
    simulated = any(is_simulated(served, label) for label in labels)
    if arguments.json:
        print_json({"session": str(session), "simulated": simulated, "basis": _BASIS, "turns": rows})
        return 0
    head = ("turn", "arrived (UTC)", "id", "pause", "prompt", "offered", "pulled", "again", "reuse",
            "spared ms", "wait ms", "net ms", "blocks", "held", "used", "TTL", "TTFT ms", "D")  # fmt: skip
    told = ", ".join((*map(_label, labels), *(["simulated"] if simulated else [])))
    print(f"conversation {session}{f' ({told})' if told else ''}: {_counted(len(rows), 'turn')}")
    print(
        table(
            head,
            (
                (
                    row["turn"],
                    utc(row["arrived_at_ns"])[:19],
                    row["id"],
                    _span(row["pause_ns"]),
                    row["prompt_tokens"],
                    row["offered_tokens"],
                    row["pulled_tokens"],
                    row["recomputed_tokens"],
                    row["reuse_outcome"],
                    ms(row["saved_ns"]),
                    ms(row["wait_ns"]),
                    ms(row["net_ns"]),
                    row["blocks"],
                    _span(row["held_ns"]),
                    row["used_blocks"],
                    _span(row["ttl_ns"]),
                    ms(row["ttft_ns"]),
                    row["d_engine"],
                )
                for row in rows
            ),
            max_width=24,
        )
    )
    return 0
