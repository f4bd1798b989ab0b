"""A request explained as text: where its time to first token went, and how that is known."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvscope import steps
from kvscope.advice import untold, verdict
from kvscope.text import ms, printable, shortened, size, span, table, utc
from kvscope.waterfall import Line, waterfall

Row = Mapping[str, Any]
Note = tuple[str, str]
"""A sentence and how grave it is: `bad`, `warn` or empty."""

_COLOURS = {
    steps.COMPUTE: "32",
    steps.CAPACITY: "33",
    steps.TRANSFER: "36",
    steps.COORDINATION: "31",
    steps.UNKNOWN: "35",
}
_MAX_TRANSFERS = 8


def explain(found: Row, width: int = 80, colour: bool = False) -> str:
    """The request as text of `width` columns.

    Args:
        found: as from `lookup.look_up`: `request` (a row of `requests`, steps by name or code) and, where
            known, `transfers`, `leases`, `failures`, `engines` and `as_of_ns` (for a request in flight).
        colour: mark classes by ANSI colours.
    """
    request, as_of_ns = found["request"], found.get("as_of_ns")
    said = verdict(request, as_of_ns)
    sections = [
        _header(request, found.get("engines") or (), width),
        [*_wrapped(answer(request), width), *(_wrapped(said, width) if said else ())],
        [_text(line, colour) for line in waterfall(request, as_of_ns, width)],
        [line for note, _ in notes(found) for line in _wrapped("- " + note, width, "  ")],
        transfers_text(found.get("transfers") or (), width),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def _text(line: Line, colour: bool) -> str:
    """A line for a terminal: only classes are coloured."""
    if not colour:
        return "".join(text for text, _ in line).rstrip()
    return "".join(
        f"\x1b[{_COLOURS[style]}m{text}\x1b[0m" if style in _COLOURS else text for text, style in line
    ).rstrip()


def answer(request: Row) -> str:
    """One line: `412 ms: 81 compute wait, 23 transfer, 301 coordination wait (…), 7 unknown`."""
    spent = _spent(request)
    total = request.get("ttft_ns")
    covered = sum(spent.values())
    if total is None:
        state = f"no first token ({_state(request)})"
        if untold(request):
            state = f"{_state(request)}, but what was recorded or imported tells of no first token"
        total = covered
        if not covered:
            return f"{state}; nothing of its time was observed"
        state += "; known so far"
    else:
        state = ""
    classes = {
        "compute wait": _class_ns(spent, steps.COMPUTE) + _class_ns(spent, steps.CAPACITY),
        "transfer": _class_ns(spent, steps.TRANSFER),
        "coordination wait": _class_ns(spent, steps.COORDINATION),
        "unknown": _class_ns(spent, steps.UNKNOWN),
    }
    decimals = 0 if total >= 10**8 else 1 if total >= 10**7 else 3
    shown = _rounded(list(classes.values()), decimals)
    parts = []
    for (name, ns), number in zip(classes.items(), shown, strict=True):
        part = f"{number} {name}"
        if name == "coordination wait" and ns:
            part += f" ({_largest(spent, steps.COORDINATION, ns, decimals)})"
        elif name == "compute wait" and (capacity := _class_ns(spent, steps.CAPACITY)) > 0:
            part += f" ({capacity / 1e6:.{decimals}f} of it capacity)"
        parts.append(part)
    text = f"{total / 1e6:.{decimals}f} ms: {', '.join(parts)}"
    return f"{state} {text}" if state else text


def _largest(spent: Mapping[str, int], class_: str, class_ns: int, decimals: int) -> str:
    """The steps that make up most of a class, at most three, and whether there are more."""
    mine = sorted(
        ((ns, name) for name, ns in spent.items() if ns > 0 and steps.BY_NAME[name].class_ == class_),
        key=lambda pair: (-pair[0], pair[1]),
    )
    named = [pair for i, pair in enumerate(mine[:3]) if i == 0 or pair[0] * 20 >= class_ns]
    text = ", ".join(f"{name} {ns / 1e6:.{decimals}f}" for ns, name in named)
    return text + ", …" if len(mine) > len(named) else text


def _rounded(values: Sequence[int], decimals: int) -> list[str]:
    """Nanoseconds as milliseconds, rounded so that they add up to their rounded sum."""
    unit = 10 ** (6 - decimals)
    floors = [value // unit for value in values]
    missing = (sum(values) + unit // 2) // unit - sum(floors)
    for i in sorted(range(len(values)), key=lambda i: -(values[i] % unit))[:missing]:
        floors[i] += 1
    return [f"{value / 10**decimals:.{decimals}f}" for value in floors]


def _spent(request: Row) -> dict[str, int]:
    """Step name to its nanoseconds on the critical path up to the first token."""
    return {step.name: request.get(step.column) or 0 for step in steps.STEPS if step.in_ttft}


def _class_ns(spent: Mapping[str, int], class_: str) -> int:
    return sum(ns for name, ns in spent.items() if steps.BY_NAME[name].class_ == class_)


def _state(request: Row) -> str:
    """Outcome, why, and the step a request that did not finish is in, or was in when last seen."""
    outcome, detail, step = (request.get(n) for n in ("outcome", "outcome_detail", "current_step"))
    return printable(", ".join(filter(None, (outcome or "in flight", detail, step and f"in {step}"))))


# --- header ------------------------------------------------------------------------------------------


def _header(request: Row, engines: Sequence[Row], width: int) -> list[str]:
    lines = list(title(request))
    for key, value in facts(request, engines):
        lines.extend(_wrapped(f"  {key:<10} {value}", width, " " * 13))
    return lines


def title(request: Row) -> tuple[str, str]:
    """Which request it is, and how it was moved and what came of it."""
    name = printable(request.get("client_id") or request.get("id"))
    connector = printable(request.get("connector")) or "connector not known"
    return f"request {name}", f"{connector}, {_state(request)}"


def facts(request: Row, engines: Sequence[Row] = ()) -> list[tuple[str, str]]:
    """What is known of it beside its steps, as pairs of a name and a text; only what is known."""
    found = {
        "id": str(request.get("id")),
        "arrived": f"{utc(request.get('arrived_at_ns'))} UTC",
    }
    for side, key in (("p", "prefill"), ("d", "decode")):
        if request.get(f"{side}_engine"):
            name = printable(request.get(f"{side}_request"))
            found[key] = f"{printable(request[f'{side}_engine'])}, as {name}"
    if (request.get("d_legs") or 0) > 1:
        found["legs"] = f"{request['d_legs']} decode legs; told here is the one with the first token"
    found["model"] = ", label ".join(printable(request[k]) for k in ("model", "label") if request.get(k))
    if request.get("turn"):
        found["session"] = (
            f"turn {request['turn']} of the conversation that request {request.get('session')} began"
        )
    found["trace"] = printable(request.get("trace_id"))
    found["tokens"] = ", ".join(f"{count} {word}" for word, count in tokens(request))
    found["joined by"] = printable(request.get("joined_by"))
    found["versions"] = _versions(request, engines)
    return [(key, value) for key, value in found.items() if value]


def tokens(request: Row) -> list[tuple[str, int]]:
    """Tokens by where they came from; a source that gave none is left out."""
    words = {
        "prompt_tokens": "prompt",
        "p_cached_tokens": "cached on P",
        "d_cached_tokens": "cached on D",
        "reuse_pulled_tokens": "read back from D",
        "transferred_tokens": "transferred to D",
        "recomputed_tokens": "recomputed on D",
        "output_tokens": "generated",
    }
    always = ("prompt_tokens", "output_tokens")
    return [
        (word, request[key])
        for key, word in words.items()
        if request.get(key) or (key in always and request.get(key) is not None)
    ]


def _versions(request: Row, engines: Sequence[Row]) -> str:
    """The legs' versions; once when they are alike, else side by side."""
    known = {}
    for side, engine in (("P", request.get("p_engine")), ("D", request.get("d_engine"))):
        row = next((e for e in engines if engine and e["engine"] == engine), None)
        if row is not None:
            prints = row.get("fingerprint")
            prints = prints if isinstance(prints, Mapping) else {}
            versions = {"kvscope": row.get("kvscope"), **{k: prints.get(k) for k in ("vllm", "nixl")}}
            known[side] = ", ".join(f"{k} {printable(v)}" for k, v in versions.items() if v)
    if len(set(known.values())) == 1:
        return next(iter(known.values()))
    return "; ".join(f"{side}: {text}" for side, text in known.items())


# --- notes -------------------------------------------------------------------------------------------


def notes(found: Row, leases: bool = True) -> Iterator[Note]:
    """What it means, in sentences, what happened first; `leases`: with a sentence on each lease."""
    request = found["request"]
    yield from _outcome_notes(request, found.get("as_of_ns"))
    for text in (*_lead_notes(request), *_reuse_notes(request)):
        yield text, ""
    if leases:
        yield from ((text, "") for text in _lease_notes(found.get("leases") or (), request))
    for failure in (found.get("failures") or ())[:5]:
        detail = f" ({printable(failure['detail'])})" if failure.get("detail") else ""
        name = shortened(printable(failure.get("name")), 60)
        where = f"{printable(failure['engine'])}, {failure['source']} {failure['rank']}"
        yield f"failure {name}{detail} in {where}", "bad"
    yield from ((text, "warn") for text in _quality_notes(request, found.get("engines") or ()))
    yield from ((text, "") for text in _prediction_notes(request))


def _outcome_notes(request: Row, as_of_ns: int | None) -> Iterator[Note]:
    outcome = request.get("outcome")
    detail = printable(request.get("outcome_detail")) or "not known"
    step = printable(request.get("current_step")) or "a step not known"
    if request.get("in_flight") and as_of_ns is not None and request.get("arrived_at_ns") is not None:
        age = as_of_ns - request["arrived_at_ns"]
        yield f"in flight for {span(age)}; now in {step} (>)", ""
    elif outcome == "lost":
        yield f"lost: an engine of it is gone; the last thing known is that it was in {step}", "bad"
    elif outcome == "incomplete":
        yield f"incomplete: nothing more came from its engines; last known in {step}", "bad"
    elif outcome in ("aborted", "error", "ignored"):
        yield f"{outcome}: {detail}", "bad"
    if request.get("recomputed_tokens"):
        yield (
            f"silently recomputed: D computed {request['recomputed_tokens']} of "
            f"{request.get('prompt_tokens')} prompt tokens although P had them (a failed load or a "
            "preemption)",
            "bad",
        )
    if request.get("read_after_expiry"):
        yield (
            "READ AFTER EXPIRY: P had given the blocks back before D was done with them; the answer may rest "
            "on the KV of another request; give leases more time, or find why D came so late",
            "bad",
        )
    if request.get("preemptions"):
        yield f"preemptions: {request['preemptions']}, for want of KV blocks", "warn"


def _lead_notes(request: Row) -> Iterator[str]:
    lead = request.get("lead_ns")
    if lead is None:
        if request.get("connector") == "push" and request.get("ttft_ns") is not None:
            yield "lead not observed: the end of prefill or the registration on P is missing"
    elif request.get("connector") == "push":
        if lead >= 0:
            yield (
                f"lead {ms(lead)} ms: P held D's registration that long before prefill had finished, so "
                "registering cost nothing"
            )
        else:
            yield (
                f"lag {ms(-lead)} ms: D's registration reached P that long after prefill had finished; a "
                "router that sends both legs at once, or a sooner admission on D, would save up to that"
            )
    elif lead < 0:
        yield f"D was ready to read {ms(-lead)} ms after prefill had finished (lead {ms(lead)} ms)"
    else:
        yield f"D was ready to read {ms(lead)} ms before prefill had finished"


_REUSE = {
    "pulled": "P read them back instead of computing them",
    "below threshold": "P computed them: fewer than its threshold for reading back",
    "expired": "they had expired on D, and P computed them; a longer lease on D would keep them",
    "metadata missing": "the router dropped fields of kv_transfer_params that reading needs; P computed them",
    "local hit": "P had them in its own prefix cache",
    "failed": "reading them back failed, and P computed them",
}


def _reuse_notes(request: Row) -> Iterator[str]:
    outcome = request.get("reuse_outcome")
    if outcome is None:
        return
    offered, pulled = request.get("reuse_offered_tokens"), request.get("reuse_pulled_tokens") or 0
    yield (
        f"reuse {printable(outcome)}: D had kept {'some' if offered is None else offered} tokens, "
        f"{pulled} were read back; {_REUSE.get(outcome, 'the reason is not known')}"
    )


def _lease_notes(leases: Sequence[Row], request: Row) -> Iterator[str]:
    for lease in leases[:4]:
        side = "P" if lease["engine"] == request.get("p_engine") else "D"
        renewals = f", {lease['renewals']} renewals" if lease.get("renewals") else ""
        text = f"lease on {side} rank {lease['rank']}: {printable(lease.get('end')) or 'held'}"
        armed, ended, deadline = (
            lease.get("armed_at_ns"),
            lease.get("ended_at_ns"),
            lease.get("deadline_at_ns"),
        )
        if armed is not None and ended is not None:
            text += f" after {span(ended - armed)}"
            if deadline is not None:
                left = deadline - ended
                text += f", {span(abs(left))} {'before' if left >= 0 else 'past'} its deadline"
        yield text + renewals
    if len(leases) > 4:
        yield f"and {len(leases) - 4} leases more"


def _quality_notes(request: Row, engines: Sequence[Row]) -> Iterator[str]:
    joined = str(request.get("joined_by") or "")
    if joined == "client id":
        yield "the legs were joined by the client's id alone: inferred, not certain"
    if joined in ("unjoined", "peer not instrumented", "single leg") and request.get("connector") != "local":
        yield f"one leg only ({joined}): the other engine's part of the time is unknown"
    if request.get("clock_error_ns"):
        error = ms(request["clock_error_ns"])
        yield f"the legs' clocks agree to ± {error} ms; shorter steps between the two are in doubt"
    if request.get("clamped_ns"):
        yield f"boundaries were out of order by {ms(request['clamped_ns'])} ms in all and were moved"
    if request.get("ttft_ns") is not None and not request.get("unknown_ns"):
        return
    for row in engines:
        name = f"{printable(row['engine'])} ({row['source']} {row['rank']})"
        if row.get("hooks_missing"):
            hooks = printable(", ".join(row["hooks_missing"]))
            yield f"hooks missing in {name}: {hooks}; their steps are unknown"
        if row.get("lost"):
            yield f"{row['lost']} events of {name} were lost in its lifetime, perhaps some of this request"


def _prediction_notes(request: Row) -> Iterator[str]:
    ttft = request.get("ttft_ns")
    if ttft is None:
        return
    coordination = _class_ns(_spent(request), steps.COORDINATION)
    if coordination:
        yield f"{ms(ttft - coordination)} ms without any coordination wait"
    predictions = (
        ("predicted_push_ttft_ns", "push", "D asked at the same time as P"),
        ("predicted_pull_ttft_ns", "pull", "D asked as soon as prefill had finished"),
    )
    for column, connector, assumption in predictions:
        if request.get(column) is not None:
            change = request[column] - ttft
            yield (
                f"prediction (how far off: docs/whatif.md): {connector} would have taken "
                f"{ms(request[column])} ms ({'+' if change > 0 else '-'}{ms(abs(change))}), "
                f"assuming {assumption} and all else unchanged"
            )


# --- transfers ---------------------------------------------------------------------------------------


def transfers_text(transfers: Sequence[Row], width: int, at_most: int = _MAX_TRANSFERS) -> list[str]:
    """A table of the request's transfers, one line per rank and operation; empty if there are none."""
    if not transfers:
        return []
    rows = []
    for t in transfers[:at_most]:
        lower, upper = t.get("wire_lower_ns"), t.get("wire_upper_ns")
        most_ns = (t.get("post_ns") or 0) + upper if upper is not None else 0
        rate = f"{t['bytes'] / most_ns:.2f}" if t.get("bytes") and most_ns else ""
        wire = "" if upper is None else f"{ms(lower)}–{ms(upper)}"
        telemetry = "" if t.get("telemetry_xfer_us") is None else ms(t["telemetry_xfer_us"] * 1000)
        rows.append(
            (
                t["operation"],
                t["rank"],
                size(t.get("bytes")),
                t.get("descriptors"),
                ms(t.get("post_ns")),
                wire,
                telemetry,
                rate,
                t["state"],
            )
        )
    head = ("op", "rank", "size", "descr.", "post ms", "wire ms", "nixl ms", "≥ GB/s", "state")
    lines = table(head, rows, max_width=width).splitlines()
    if len(transfers) > at_most:
        lines.append(f"and {len(transfers) - at_most} transfers more")
    lines.append(
        "wire: least and most time that the polls allow; nixl: its own duration, which ends at the poll"
    )
    return [line for text in lines for line in _wrapped(text, width)] if len(lines[-1]) > width else lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
