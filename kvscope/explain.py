"""A request explained as text: where its time to first token went, and how that is known."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvscope import steps
from kvscope.text import ms, printable, shortened, size, span, table, utc

Row = Mapping[str, Any]

_SHORT = {steps.COORDINATION: "coord."}
_SEEN = {
    steps.ESTIMATED: "est.",
    steps.TELEMETRY: "nixl",
    steps.INFERRED: "infer.",
    steps.NOT_OBSERVED: "none",
}
_COLOURS = {
    steps.COMPUTE: "32",
    steps.CAPACITY: "33",
    steps.TRANSFER: "36",
    steps.COORDINATION: "31",
    steps.UNKNOWN: "35",
}
_MIN_BAR = 6
_MAX_TRANSFERS = 8


def explain(found: Row, width: int = 80, colour: bool = False) -> str:
    """The request as text of `width` columns.

    Args:
        found: as from `lookup.look_up`: `request` (a row of `requests`, steps by name or code) and, where
            known, `transfers`, `leases`, `failures`, `engines` and `as_of_ns` (for a request in flight).
        colour: mark classes by ANSI colours.
    """
    request = found["request"]
    sections = [
        _header(request, found.get("engines") or (), width),
        _wrapped(answer(request), width),
        _waterfall(request, found.get("as_of_ns"), width, colour),
        [line for note in _notes(found) for line in _wrapped("- " + note, width, "  ")],
        _transfers(found.get("transfers") or (), width),
    ]
    return "\n\n".join("\n".join(lines) for lines in sections if lines) + "\n"


def answer(request: Row) -> str:
    """One line: `412 ms: 81 compute wait, 23 transfer, 301 coordination wait (…), 7 unknown`."""
    spent = _spent(request)
    total = request.get("ttft_ns")
    covered = sum(spent.values())
    if total is None:
        state = f"no first token ({_state(request)}); known so far"
        total = covered
        if not covered:
            return f"no first token ({_state(request)}); nothing of its time was observed"
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
    name = printable(request.get("client_id") or request.get("id"))
    lines = [f"request {name}", f"{request.get('connector') or 'connector not known'}, {_state(request)}"]

    def add(key: str, value: str) -> None:
        if value:
            lines.extend(_wrapped(f"  {key:<10} {value}", width, " " * 13))

    add("id", str(request.get("id")))
    add("arrived", f"{utc(request.get('arrived_at_ns'))} UTC")
    for side, key in (("p", "prefill"), ("d", "decode")):
        if request.get(f"{side}_engine"):
            add(
                key, f"{printable(request[f'{side}_engine'])}, as {printable(request.get(f'{side}_request'))}"
            )
    if (request.get("d_legs") or 0) > 1:
        add("legs", f"{request['d_legs']} decode legs; told here is the one with the first token")
    add("model", ", label ".join(printable(request[k]) for k in ("model", "label") if request.get(k)))
    if request.get("turn"):
        add(
            "session",
            f"turn {request['turn']} of the conversation that request {request.get('session')} began",
        )
    add("trace", printable(request.get("trace_id")))
    add("tokens", _tokens(request))
    add("joined by", printable(request.get("joined_by")) if request.get("joined_by") else "")
    add("versions", _versions(request, engines))
    return lines


def _tokens(request: Row) -> str:
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
    return ", ".join(
        f"{request[key]} {word}"
        for key, word in words.items()
        if request.get(key) or (key in always and request.get(key) is not None)
    )


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


# --- waterfall ---------------------------------------------------------------------------------------


def _waterfall(request: Row, as_of_ns: int | None, width: int, colour: bool) -> list[str]:
    intervals = sorted(
        (_interval(entry) for entry in request.get("waterfall") or ()),
        key=lambda i: (i["from_ns"], i["from_ns"] + i["ns"], not i["critical"]),
    )
    ttft = request.get("ttft_ns")
    generate_ns = request.get("decode_generate_ns")
    if ttft is not None and generate_ns is not None:
        # Stored as its column alone: it begins with the first token.
        entry = {"from_ns": ttft, "ns": generate_ns, "critical": False, "error_ns": 0}
        intervals.append({**entry, "step": steps.BY_NAME["decode.generate"], "observed": steps.HOOK})
    open_ = _open_interval(request, intervals, as_of_ns)
    if open_ is not None:
        intervals.append(open_)
    if not intervals:
        return []
    axis_ns = ttft or max(i["from_ns"] + i["ns"] for i in intervals) or 1
    errors = any(i["error_ns"] for i in intervals)
    head = f"{'':1} {'from':>7} {'to':>7} {'ms':>7} {'step':<23} {'class':<8} {'seen':<6}" + (
        f" {'± ms':>6} " if errors else ""
    )
    bar_width = max(_MIN_BAR, width - len(head) - 1)
    end = f"{(axis_ns + 500_000) // 10**6} ms" if axis_ns >= 10**7 else f"{ms(axis_ns)} ms"
    scale = f"0{end:>{bar_width - 1}}" if len(end) < bar_width - 1 else end
    lines = [f"{head} {scale}".rstrip()]
    for i in intervals:
        start, end = i["from_ns"], i["from_ns"] + i["ns"]
        step: steps.Step = i["step"]
        mark = ">" if i is open_ else "*" if i["critical"] else " "
        bar = "" if not step.in_ttft else _bar(start, end, axis_ns, bar_width, bool(i["critical"]))
        class_ = f"{_SHORT.get(step.class_, step.class_):<8}"
        seen = f"{_SEEN.get(i['observed'], i['observed']):<6}"
        if errors:
            shorter = "!" if i["ns"] < i["error_ns"] else " "
            seen += f" {ms(i['error_ns']) if i['error_ns'] else '':>6}{shorter}"
        if colour:
            class_, bar = (f"\x1b[{_COLOURS[step.class_]}m{text}\x1b[0m" for text in (class_, bar))
        to = "" if i is open_ else ms(end)
        line = f"{mark} {ms(start):>7} {to:>7} {ms(i['ns']):>7} {step.name:<23} {class_} {seen} {bar}"
        lines.append(line.rstrip())
    if any(i["ns"] < i["error_ns"] for i in intervals):
        lines.append(f"{'':25} ! shorter than the clocks' error: its length is not known")
    covered = sum(i["ns"] for i in intervals if i["critical"] and i["step"].in_ttft and i is not open_)
    lines.append(f"{'':17} {ms(covered):>7} sum of the critical path (*)" + _sum_verdict(covered, ttft))
    if any(not i["critical"] and i["step"].in_ttft for i in intervals):
        lead = request.get("lead_ns")
        known = "" if lead is None else f"; lead {ms(lead)} ms"
        lines.append(f"{'':25} ░ overlapped: not in the sum{known}")
    return lines


def _interval(entry: Row) -> dict[str, Any]:
    """An entry of the waterfall with its step, whether steps came by code (store) or by name (API)."""
    step, observed = entry["step"], entry["observed"]
    return {
        **entry,
        "step": steps.STEPS[step] if isinstance(step, int) else steps.BY_NAME[step],
        "observed": steps.OBSERVED[observed] if isinstance(observed, int) else observed,
    }


def _open_interval(request: Row, intervals: Sequence[Row], as_of_ns: int | None) -> dict[str, Any] | None:
    """The step that a request in flight is in, up to now."""
    if not request.get("in_flight") or as_of_ns is None or request.get("arrived_at_ns") is None:
        return None
    name = str(request.get("current_step") or "")
    known_ns = max((i["from_ns"] + i["ns"] for i in intervals if i["critical"]), default=0)
    age_ns = as_of_ns - request["arrived_at_ns"] - known_ns
    return {
        "step": steps.BY_NAME.get(name, steps.BY_NAME["unknown"]),
        "from_ns": known_ns,
        "ns": max(0, age_ns),
        "critical": True,
        "observed": steps.HOOK,
        "error_ns": 0,
    }


def _bar(start: int, end: int, axis_ns: int, width: int, critical: bool) -> str:
    first = min(width - 1, max(0, start * width // axis_ns))
    last = min(width, max(first + 1, -(-end * width // axis_ns)))
    full = "█" if critical else "░"
    return " " * first + (full * (last - first) if end > start else "│")


def _sum_verdict(covered: int, ttft: int | None) -> str:
    if ttft is None:
        return "; no first token"
    if covered == ttft:
        return " = TTFT"
    return f", but TTFT is {ms(ttft)}: a fault of kvscope, please report it"


# --- notes -------------------------------------------------------------------------------------------


def _notes(found: Row) -> Iterator[str]:
    request = found["request"]
    yield from _outcome_notes(request, found.get("as_of_ns"))
    yield from _lead_notes(request)
    yield from _reuse_notes(request)
    yield from _lease_notes(found.get("leases") or (), request)
    for failure in (found.get("failures") or ())[:5]:
        detail = f" ({printable(failure['detail'])})" if failure.get("detail") else ""
        name = shortened(printable(failure.get("name")), 60)
        where = f"{printable(failure['engine'])}, {failure['source']} {failure['rank']}"
        yield f"failure {name}{detail} in {where}"
    yield from _quality_notes(request, found.get("engines") or ())
    yield from _prediction_notes(request)


def _outcome_notes(request: Row, as_of_ns: int | None) -> Iterator[str]:
    outcome = request.get("outcome")
    detail = printable(request.get("outcome_detail")) or "not known"
    step = printable(request.get("current_step")) or "a step not known"
    if request.get("in_flight") and as_of_ns is not None and request.get("arrived_at_ns") is not None:
        age = as_of_ns - request["arrived_at_ns"]
        yield f"in flight for {span(age)}; now in {step} (>)"
    elif outcome == "lost":
        yield f"lost: an engine of it is gone; the last thing known is that it was in {step}"
    elif outcome == "incomplete":
        yield f"incomplete: nothing more came from its engines; last known in {step}"
    elif outcome in ("aborted", "error", "ignored"):
        yield f"{outcome}: {detail}"
    if request.get("recomputed_tokens"):
        yield (
            f"silently recomputed: D computed {request['recomputed_tokens']} of "
            f"{request.get('prompt_tokens')} prompt tokens although P had them (a failed load or a "
            "preemption)"
        )
    if request.get("read_after_expiry"):
        yield (
            "READ AFTER EXPIRY: P had given the blocks back before D was done with them; the answer may rest "
            "on the KV of another request; give leases more time, or find why D came so late"
        )
    if request.get("preemptions"):
        yield f"preemptions: {request['preemptions']}, for want of KV blocks"


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
        yield f"floor: {ms(ttft - coordination)} ms with no coordination wait at all"
    predictions = (
        ("predicted_push_ttft_ns", "push", "D registered before prefill had finished"),
        ("predicted_pull_ttft_ns", "pull", "D asked as soon as prefill had finished"),
    )
    for column, connector, assumption in predictions:
        if request.get(column) is not None:
            change = request[column] - ttft
            yield (
                f"prediction, not validated: {connector} would have taken {ms(request[column])} ms "
                f"({'+' if change > 0 else '-'}{ms(abs(change))}), assuming {assumption} "
                "and all else unchanged"
            )


# --- transfers ---------------------------------------------------------------------------------------


def _transfers(transfers: Sequence[Row], width: int) -> list[str]:
    if not transfers:
        return []
    rows = []
    for t in transfers[:_MAX_TRANSFERS]:
        lower, upper = t.get("wire_lower_ns"), t.get("wire_upper_ns")
        rate = f"{t['bytes'] / upper:.2f}" if t.get("bytes") and upper else ""
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
    if len(transfers) > _MAX_TRANSFERS:
        lines.append(f"and {len(transfers) - _MAX_TRANSFERS} transfers more")
    lines.append(
        "wire: least and most time that the polls allow; nixl: its own duration, which ends at the poll"
    )
    return [line for text in lines for line in _wrapped(text, width)] if len(lines[-1]) > width else lines


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    return textwrap.wrap(text, width, subsequent_indent=indent, break_on_hyphens=False) or [""]
