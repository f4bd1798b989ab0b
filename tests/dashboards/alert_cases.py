"""For each alert: series with which it fires, with what it then says, and series with which it is quiet."""

from __future__ import annotations

from typing import NamedTuple

GROUP = {"connector": "push", "model": "m", "traffic": "production"}
PAIR = {"p_engine": "p1", "d_engine": "d1", **GROUP}
KIND = "push, m, production"
AT = {"instance": "h:9177"}

Series = dict[str, str]
"""Name with labels to values: a promtool line."""


class Case(NamedTuple):
    """One alert."""

    at_m: int
    """Minutes after which it is looked at."""
    firing: Series
    labels: dict[str, str]
    """Of the alert that fires, severity apart."""
    summary: str
    description: str
    quiet: dict[str, Series]
    """By why it must be quiet."""
    more: tuple[Firing, ...] = ()
    """Other ways to fire."""


class Firing(NamedTuple):
    """Another way in which an alert fires."""

    firing: Series
    labels: dict[str, str]
    summary: str
    description: str


def series(metric: str, labels: dict[str, str] | None = None, /, **more: str) -> str:
    found = {**(labels or {}), **more}
    return metric + "{" + ",".join(f'{key}="{value}"' for key, value in found.items()) + "}"


def ttft(slow: str, of: str, labels: dict[str, str] = GROUP, coordination: str = "0+60x500") -> Series:
    """Requests (and those within 2 s) per minute, with most of their TTFT in coordination."""
    return {
        series("kvscope_ttft_seconds_bucket", labels, le="2.0"): slow,
        series("kvscope_ttft_seconds_count", labels): of,
        series("kvscope_ttft_class_seconds_total", labels, **{"class": "coordination"}): coordination,
        series("kvscope_ttft_class_seconds_total", labels, **{"class": "compute"}): "0+40x500",
        series("kvscope_ttft_class_seconds_total", labels, **{"class": "unknown"}): "0x500",
    }


def pair(seconds: str, class_: str, requests: str = "0+50x300", bytes_: str = "0+5000000x300") -> Series:
    """Every five minutes, as it takes a day."""
    return {
        series("kvscope_pair_ttft_class_seconds_total", PAIR, **{"class": class_}): seconds,
        series("kvscope_pair_transfer_bytes_total", PAIR): bytes_,
        series("kvscope_pair_requests_total", PAIR): requests,
    }


def reuse(**outcomes: str) -> Series:
    group = {**GROUP, "connector": "bidirectional"}
    return {
        series("kvscope_reuse_requests_total", group, outcome=outcome.replace("_", " ")): values
        for outcome, values in outcomes.items()
    }


def share(name: str, part: str, whole: str, of: str = "kvscope_requests_total") -> Series:
    return {series(name, GROUP): part, series(of, GROUP, outcome="finished"): whole}


def leases(expired: str, released: str) -> Series:
    return {
        series("kvscope_leases_total", engine="p1", traffic="production", end="expired"): expired,
        series("kvscope_leases_total", engine="p1", traffic="production", end="released"): released,
    }


def failures(kind: str, values: str, name: str) -> Series:
    labels = {"engine": "p1", "traffic": "production", "kind": kind, "name": name}
    return {series("kvscope_failures_total", labels): values}


def joins(missing: str, joined: str) -> Series:
    return {
        series("kvscope_joins_total", GROUP, joined_by="peer not instrumented"): missing,
        series("kvscope_joins_total", GROUP, joined_by="remote id"): joined,
    }


def processes(state: str, values: str) -> Series:
    return {series("kvscope_engine_processes", AT, state=state): values}


def engine(name: str, values: str) -> Series:
    return {series(name, engine="p1", traffic="production"): values}


def own(name: str, values: str) -> Series:
    others = ("refused_rows", "faults", "untold_requests", "uncounted_rows")
    found = {series(f"kvscope_{other}_total", AT): "0x60" for other in others}
    return found | {series(name, AT): values}


def problems(count: str, unreadable: str) -> Series:
    return {series("kvscope_problems", AT): count, series("kvscope_unreadable_files", AT): unreadable}


def daemon(up: str, info: str) -> Series:
    at = {"job": "kvscope", **AT}
    return {series("up", at): up, series("kvscope_build_info", at, version="1", schema="2"): info}


CASES: dict[str, Case] = {
    "KvscopeTtftBurnFast": Case(
        90,
        ttft("0+80x120", "0+100x120"),
        {**GROUP, "class": "coordination"},
        f"First tokens are too slow, most of all for coordination: {KIND}",
        "20.0 times as many requests as the objective allows (0.99 within 2 s) had a slower first token, "
        "over 5m and over 1h. Of all TTFT of 1h, coordination took the most.",
        {
            "a burn of 5 is no emergency": ttft("0+95x120", "0+100x120"),
            "it is over": ttft("0+80x80 6480+100x40", "0+100x120"),
            "it has only begun": ttft("0+100x85 8580+80x20", "0+100x120"),
            "nothing is asked": ttft("80x120", "100x120"),
        },
    ),
    "KvscopeTtftBurnSlow": Case(
        420,
        ttft("0+92x450", "0+100x450"),
        {**GROUP, "class": "coordination"},
        f"First tokens are too slow, most of all for coordination: {KIND}",
        "8.0 times as many requests as the objective allows (0.99 within 2 s) had a slower first token, over "
        "30m and over 6h. Of all TTFT of 6h, coordination took the most.",
        {
            "a burn of 5": ttft("0+95x450", "0+100x450"),
            "it is over": ttft("0+90x360 32500+100x90", "0+100x450"),
        },
    ),
    "KvscopeCoordinationShare": Case(
        40,
        ttft("0+100x60", "0+100x60"),
        GROUP,
        f"Coordination wait is above budget: {KIND}",
        "60% of TTFT of the last 15 minutes was coordination wait, which more or faster accelerators would "
        "not shorten; the budget is 40%.",
        {
            "the share is within budget": ttft("0+100x60", "0+100x60", coordination="0+20x60"),
            "the waits are tiny": ttft("0+2000x60", "0+2000x60"),
            "too few requests": ttft("0+1x60", "0+1x60"),
            "nothing is asked": ttft("100x60", "100x60", coordination="60x60"),
        },
    ),
    "KvscopeRequestsStuck": Case(
        12,
        {series("kvscope_requests_stuck", AT, step="transfer.wire"): "0x5 3x10"},
        {**AT, "step": "transfer.wire"},
        "Requests are stuck in transfer.wire",
        "3 requests have been in transfer.wire for more than 30 s, and have been so for two minutes; daemon "
        "h:9177 sees them.",
        {
            "one is late now and then": {
                series("kvscope_requests_stuck", AT, step="transfer.wire"): "0 1 0 1 0 1 0 1 0 1 0 0 1"
            }
        },
    ),
    "KvscopeReadAfterExpiry": Case(
        25,
        {series("kvscope_reads_after_expiry_total", GROUP): "0x20 2x20"},
        GROUP,
        f"Answers may be wrong: KV was read after its lease had expired: {KIND}",
        "About 2 requests of the last hour were completed after P had given their blocks back; D may have "
        "decoded on another request's KV. They all ended with HTTP 200.",
        {
            "long ago": {series("kvscope_reads_after_expiry_total", GROUP): "5x40"},
        },
    ),
    "KvscopeLeasesExpiring": Case(
        30,
        leases("0+1x40", "0+9x40"),
        {"engine": "p1", "traffic": "production"},
        "Leases expire on p1 (production)",
        "10% of the leases that ended in the last 15 minutes expired instead of being released: blocks were "
        "held for nothing, and a late read may meet other KV.",
        {
            "a client leaves now and then": leases("0+1x40", "0+99x40"),
            "it is over": leases("0+1x10 10x40", "0+9x40"),
            "no lease ends": leases("7x40", "100x40"),
        },
    ),
    "KvscopeSilentRecompute": Case(
        30,
        share("kvscope_recomputed_requests_total", "0+5x40", "0+100x40"),
        GROUP,
        f"D computes prompts again that P had computed: {KIND}",
        "5% of the requests of the last 15 minutes had prompt tokens computed twice. Users see a slow first "
        "token and no error.",
        {
            "it is over": share("kvscope_recomputed_requests_total", "0+5x10 50x40", "0+100x40"),
            "one in two hundred": share("kvscope_recomputed_requests_total", "0+1x40", "0+200x40"),
            "nothing is asked": share("kvscope_recomputed_requests_total", "5x40", "5x40"),
        },
    ),
    "KvscopeConnectorFailures": Case(
        22,
        failures("nixl", "_x20 1x10", "transfer_failed"),
        {"engine": "p1", "traffic": "production", "name": "transfer_failed"},
        "vLLM's connector logs transfer_failed on p1",
        "1 failures transfer_failed in the last 15 minutes (production). vLLM logs these and goes on: the "
        "request waits for its lease, or is computed again.",
        {
            "long ago": failures("nixl", "_x1 3x30", "transfer_failed"),
            "it is over": failures("nixl", "0+1x3 3x30", "transfer_failed"),
            "a hook's": failures("hook", "_x20 1x10", "schedule"),
        },
        (
            Firing(
                failures("nixl", "1x10 1+1x20", "handshake_failed"),
                {"engine": "p1", "traffic": "production", "name": "handshake_failed"},
                "vLLM's connector logs handshake_failed on p1",
                "11 failures handshake_failed in the last 15 minutes (production). vLLM logs these and goes "
                "on: the request waits for its lease, or is computed again.",
            ),
        ),
    ),
    "KvscopePairTransferSlow": Case(
        1500,
        pair("0+5x275 1380+20x24", "transfer"),
        PAIR,
        "Transfers are slow: p1 → d1 (push, production)",
        "A byte takes 3.2 times as long from P to D as on average over the pair's own last day.",
        {
            "as always": pair("0+5x300", "transfer"),
            "a little slower": pair("0+10x275 2760+15x24", "transfer"),
            "too few requests": pair("0+5x275 1380+20x24", "transfer", "0+5x300"),
            "nothing is moved": pair("100x300", "transfer", bytes_="100x300"),
        },
    ),
    "KvscopePairCoordinationSlow": Case(
        1500,
        pair("0+5x275 1380+20x24", "coordination"),
        PAIR,
        "The hand-over is slow: p1 → d1 (push, production)",
        "Coordination wait per request is 3.2 times that of the pair's own last day.",
        {
            "as always": pair("0+5x300", "coordination"),
            "a little slower": pair("0+10x275 2760+15x24", "coordination"),
            "too short to matter": pair("0+0.05x275 13.8+0.2x24", "coordination"),
            "too few requests": pair("0+5x275 1380+20x24", "coordination", "0+5x300"),
        },
    ),
    "KvscopeReuseNeverOffered": Case(
        100,
        reuse(not_offered="0+2x120"),
        {**GROUP, "connector": "bidirectional"},
        "Bidirectional reuse never engages: bidirectional, m, production",
        "No request of the last hour named KV that D had kept from an earlier turn: D keeps blocks for "
        "nothing, and P computes every turn from its beginning.",
        {
            "some turns name it": reuse(not_offered="0+2x120", pulled="0+0.05x120"),
            "too few requests": reuse(not_offered="0+0.5x120"),
            "nothing is asked": reuse(not_offered="500x120"),
        },
    ),
    "KvscopeReuseMissed": Case(
        100,
        reuse(expired="0+2x120", pulled="0+0.1x120", not_offered="0+5x120"),
        {**GROUP, "connector": "bidirectional"},
        "KV kept for later turns is not read back: bidirectional, m, production",
        "95.24% of the requests of the last hour that named kept KV could not use it: it had expired, its "
        "metadata was missing, it was below the threshold, or reading failed.",
        {
            "most are read back": reuse(expired="0+0.5x120", pulled="0+2x120"),
            "P has it all itself": reuse(local_hit="0+2x120"),
            "too few requests": reuse(expired="0+0.5x120"),
            "never offered": reuse(not_offered="0+2x120"),
        },
    ),
    "KvscopeEngineGone": Case(
        10,
        processes("gone", "0x5 2x10"),
        AT,
        "Engine processes died on h:9177",
        "2 engine processes died within the last ten minutes. Their requests are lost, and their peers wait "
        "for leases to expire.",
        {"it shut down": processes("ended", "0x5 2x10") | processes("gone", "0x15")},
    ),
    "KvscopeRecorderStopped": Case(
        15,
        processes("stopped", "0x5 1x10"),
        AT,
        "Engines serve unrecorded on h:9177",
        "In 1 engine processes kvscope's recorder gave up. They serve; what their requests wait for is "
        "unknown.",
        {"all record": processes("stopped", "0x15") | processes("recording", "4x15")},
    ),
    "KvscopeNothingRecorded": Case(
        20,
        processes("recording", "2x5 0x20"),
        AT,
        "No engine records on h:9177",
        "Daemon h:9177 has had no engine process that records for ten minutes.",
        {
            "one does": processes("recording", "1x25"),
            "they are being replaced": processes("recording", "2x15 0x5 2x5"),
        },
    ),
    "KvscopeEventsLost": Case(
        30,
        engine("kvscope_events_lost_total", "0x20 30x20"),
        {"engine": "p1", "traffic": "production"},
        "Events of p1 are lost",
        "30 events of the last 15 minutes were overwritten before the daemon read them, or were torn: the "
        "steps that they bound are unknown.",
        {"it is over": engine("kvscope_events_lost_total", "0x5 30x40")},
    ),
    "KvscopeEventsNotUnderstood": Case(
        30,
        engine("kvscope_events_rejected_total", "0x10 0+2x30"),
        {"engine": "p1", "traffic": "production"},
        "Events of p1 are not understood",
        "30 events of the last 15 minutes were read and not understood: engine and daemon have different "
        "versions of kvscope.",
        {"long ago": engine("kvscope_events_rejected_total", "30x40")},
    ),
    "KvscopeHooksMissing": Case(
        10,
        {series("kvscope_hooks_missing", engine="p1"): "2x15"},
        {"engine": "p1"},
        "Hooks are missing in p1",
        "2 hooks that kvscope needs are not in this engine's vLLM: their steps are unknown in every request.",
        {"all are there": {series("kvscope_hooks_missing", engine="p1"): "0x15"}},
    ),
    "KvscopeHooksRaising": Case(
        22,
        failures("hook", "_x20 4x10", "schedule"),
        {"engine": "p1", "traffic": "production", "name": "schedule"},
        "kvscope fails inside p1: schedule",
        "4 times in the last 15 minutes. The engine is not hurt; steps may be unknown.",
        {"vLLM's own": failures("nixl", "_x20 4x10", "transfer_failed")},
    ),
    "KvscopeNotJoined": Case(
        40,
        joins("0+10x60", "0+90x60"),
        GROUP,
        f"Requests are seen on one engine only: {KIND}",
        "10% of the requests of the last 15 minutes lack their other leg: half of their TTFT is not in the "
        "figures.",
        {
            "one in fifty": joins("0+2x60", "0+98x60"),
            "too few requests": joins("0+0.1x60", "0+0.9x60"),
        },
    ),
    "KvscopeClockError": Case(
        20,
        {series("kvscope_clock_error_seconds", AT): "0.05x30"},
        AT,
        "Clocks of P and D are far apart",
        "The clocks of two legs may differ by up to 50ms more than was corrected: shorter steps between the "
        "engines mean nothing.",
        {"a good network": {series("kvscope_clock_error_seconds", AT): "0.009x30"}},
    ),
    "KvscopeDaemonDown": Case(
        20,
        daemon("1x10 0x20", "1x10 _x20"),
        {"job": "kvscope", **AT},
        "kvscope's daemon does not answer h:9177",
        "Prometheus gets no metrics from h:9177. Engines go on; their rings keep the last minutes.",
        {
            "it answers": daemon("1x30", "1x30"),
            "another job is down": daemon("1x30", "1x30")
            | {series("up", job="vllm", instance="h:8000"): "0x30"},
            "one scrape failed": daemon("1x18 0x1 1x10", "1x18 _x1 1x10"),
        },
        (
            Firing(
                {series("up", job="vllm", instance="h:8000"): "1x30"},
                {},
                "kvscope's daemon does not answer ",
                "Prometheus gets no metrics from any daemon. Engines go on; their rings keep the last "
                "minutes.",
            ),
        ),
    ),
    "KvscopeDaemonRestarting": Case(
        20,
        {series("kvscope_start_time_seconds", AT): "100x5 200x3 300x3 400x20"},
        AT,
        "kvscope's daemon restarts again and again on h:9177",
        "It began anew 3 times in half an hour.",
        {"it was updated": {series("kvscope_start_time_seconds", AT): "100x5 200x30"}},
    ),
    "KvscopeStoreFailing": Case(
        10,
        {series("kvscope_store_failing", AT): "0x5 1x10"},
        AT,
        "kvscope can't store on h:9177",
        "Nothing can be committed: rows wait in memory, then events in the rings, then they are lost.",
        {"it stores": {series("kvscope_store_failing", AT): "0x15"}},
    ),
    "KvscopeDaemonBehind": Case(
        10,
        {
            series("kvscope_waiting_rows", AT): "0x5 20000x10",
            series("kvscope_waiting_rows_limit", AT): "32768x15",
        },
        AT,
        "kvscope's daemon is behind on h:9177",
        "The queue before its store is 61.04% full; when it is full, the rings fill up, and then events are "
        "lost.",
        {
            "a burst": {
                series("kvscope_waiting_rows", AT): "0x8 20000x1 0x10",
                series("kvscope_waiting_rows_limit", AT): "32768x20",
            },
            "less than half": {
                series("kvscope_waiting_rows", AT): "16000x20",
                series("kvscope_waiting_rows_limit", AT): "32768x20",
            },
        },
    ),
    "KvscopeCommitsSlow": Case(
        20,
        {
            series("kvscope_commit_seconds_sum", AT): "0+120x30",
            series("kvscope_commit_seconds_count", AT): "0+60x30",
        },
        AT,
        "kvscope's store is slow on h:9177",
        "A commit takes 2s on average; requests show up that much later.",
        {
            "0.9 s": {
                series("kvscope_commit_seconds_sum", AT): "0+54x30",
                series("kvscope_commit_seconds_count", AT): "0+60x30",
            },
            "nothing to commit": {
                series("kvscope_commit_seconds_sum", AT): "9x30",
                series("kvscope_commit_seconds_count", AT): "1x30",
            },
        },
    ),
    "KvscopeOwnFaults": Case(
        30,
        own("kvscope_untold_requests_total", "0x20 3x20"),
        AT,
        "kvscope stumbled on h:9177",
        "About 3 rows, events or requests of the last hour were not stored, joined or counted.",
        {"long ago": own("kvscope_untold_requests_total", "3x40")},
    ),
    "KvscopeProblems": Case(
        15,
        problems("1x20", "2x20"),
        AT,
        "kvscope's daemon on h:9177 has something to say",
        "3 problems or unreadable files; `kvscope status` names them, such as engines with NIXL that are not "
        "instrumented.",
        {"all well": problems("0x20", "0x20")},
    ),
}
