"""The runbook: for each alert what it means for users, where to see it, what it usually is, what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvscope.dashboards.alerts import PAGE, Alert

MAX_COMMAND = 80
"""Characters beyond which what is said of a command stands above it."""


class Entry(NamedTuple):
    """What to know of an alert at 3 am."""

    users: str
    """What it means for users."""
    see: tuple[str, ...]
    """Commands, each with `# why` behind it."""
    causes: tuple[str, ...]
    """Likely ones, in the order to check; each says how it is told from the others, and what to do."""
    silence: str
    """When it may be silenced."""


def anchor(name: str) -> str:
    """Of an alert's entry, as GitHub and most others make it."""
    return name.lower()


def page(alerts: Sequence[Alert], parameters: Iterable[tuple[str, object, str]]) -> str:
    """docs/runbook.md. A KeyError names an alert without an entry."""
    parts = [_HEAD, _contents(alerts)]
    for alert in alerts:
        parts.append(_section(alert, ENTRIES[alert.name]))
    rows = [
        f"| `{name}` | `{str(default).replace('|', chr(92) + '|')}` | {doc}. |"
        for name, default, doc in parameters
    ]
    parts.append("\n".join([_PARAMETERS, "| Parameter | Default | Meaning |", "| --- | --- | --- |", *rows]))
    return "\n\n".join(parts) + "\n"


def _contents(alerts: Sequence[Alert]) -> str:
    rows = [f"| [{a.name}](#{anchor(a.name)}) | {a.severity} | {ENTRIES[a.name].users} |" for a in alerts]
    return "\n".join(["| Alert | Severity | For users it means |", "| --- | --- | --- |", *rows])


def _section(alert: Alert, entry: Entry) -> str:
    numbered = "\n".join(f"{at}. {cause}" for at, cause in enumerate(entry.causes, 1))
    pairs = [line.partition("  # ")[::2] for line in entry.see]
    width = max(len(command) for command, _ in pairs if len(command) <= MAX_COMMAND)
    commands = [
        f"{command:<{width}}  # {why}" if len(command) <= MAX_COMMAND else f"# {why}\n{command}"
        for command, why in pairs
    ]
    waits = f"for {alert.for_}" if alert.for_ != "0m" else "at once"
    wakes = "It pages." if alert.severity == PAGE else "It can wait for the morning."
    return "\n\n".join(
        [
            f"## {alert.name}",
            f"**{entry.users}** {wakes}",
            f"Fires {waits} above {alert.threshold:g}. Dashboard: `{alert.dashboard}`.",
            "See it:",
            "```sh\n" + "\n".join(commands) + "\n```",
            "Likely causes, in the order to check, and what to do:",
            numbered,
            f"Silence it: {entry.silence}",
        ]
    )


_HEAD = """\
# Runbook

<!-- Written by `python -m kvscope.dashboards.build`. Change dashboards/runbook.py, not this page. -->

One entry for each alert of `dashboards/prometheus/kvscope-alerts.yaml`: what it means for users, where to see
it, what it usually is, and what to do.

First, whatever the alert:

```sh
export KVSCOPE_URL=http://HOST:9177  # the daemon: host of the alert's label `instance`
kvscope status                       # what is lost, missing or broken; if it is not well, mend that first
kvscope top --once                   # compute or coordination, by band, step and pair
```

More prefill or decode capacity helps where *compute* or *capacity* lead. Where *coordination* leads it does
not: the hand-over, the router, a setting or a dead peer is at fault. `kvscope explain ID` says of one request
where its time went and what would shorten it. Ids are in `kvscope requests`, in the dashboards' exemplars (a
trace id will do) and in your gateway's log (the client's request id will do).

If kvscope itself is ever in doubt: engines started without KVSCOPE_ENABLE and `kv_connector_module_path` have
nothing of it in them, and the daemon may be stopped at any time."""

_PARAMETERS = """\
## Thresholds

Defaults of `dashboards/parameters.py`; all are in the rules as numbers, to be changed there too.
"""

_SLOW = "kvscope requests --since 15m --sort ttft_ns  # the slowest, and their longest step"
_FLEET = "kvscope query fleet --since 15m  # shares by connector and by pair"
_STEPS = "kvscope query steps --since 15m  # which step takes it"
_EXPLAIN = "kvscope explain ID  # one of them, step by step, with advice"
_STATUS = "kvscope status  # what the daemon itself says"
_LOSSES = "kvscope query losses  # by process: lost, torn, not understood, hooks missing"
_PAIRS = "kvscope query pairs --since 15m  # each pair beside its peers and its own best rate"
_TRANSFERS = "kvscope query transfers --since 15m  # READ and WRITE, descriptors, post time, GB/s by peer"
_TOP_PAIRS = "kvscope top --page pairs  # the same, live; enter filters by the pair"
_FAILURES = "kvscope query failures --since 1h  # what vLLM's connector logged, by engine and kind"
_LEASES = "kvscope query leases --since 1h  # how leases ended, and the margin that was left"
_OUTCOMES = "kvscope query outcomes --since 1h  # what came of requests, and what went wrong silently"

_BURN_CAUSES = (
    "The alert's label `class` says who is asked. **compute**: longer prompts or fewer prefix hits "
    "(`kvscope query slowest --since 1h` shows prompt sizes by `explain`): add prefill, or route by prefix.",
    "**capacity**: a queue or no free KV blocks. `prefill.queue` and `prefill.blocks` are P's, "
    "`registration.admit`, `registration.blocks` and `readiness.admit` are D's; `kvscope top --page engines` "
    "shows what holds the blocks (running, staging, kept by leases). Add the engines that are short, raise "
    "max_num_seqs, or shorten leases. Zero preemptions don't rule this out: a D whose pool is full admits no "
    "transfers.",
    "**coordination**: go to [KvscopeCoordinationShare](#kvscopecoordinationshare).",
    "**transfer**: go to [KvscopePairTransferSlow](#kvscopepairtransferslow).",
    "**unknown**: `kvscope status` says which hooks or events are missing; the other classes are a lower "
    "bound until that is mended.",
    "All at once and since a moment: a deployment, a dead engine "
    "([KvscopeEngineGone](#kvscopeenginegone)) or a load that is not users'. Compare with "
    "`kvscope query fleet --since 2h --until 1h`.",
)

_TRUST = "while engines without kvscope, or with another vLLM, are meant to serve beside the others."

ENTRIES: dict[str, Entry] = {
    "KvscopeTtftBurnFast": Entry(
        "So many first tokens are too slow that the month's error budget is gone in two days.",
        (_FLEET, _STEPS, _SLOW, _EXPLAIN),
        _BURN_CAUSES,
        "while a load test is meant to overload production; better, give that a KVSCOPE_LABEL of its own.",
    ),
    "KvscopeTtftBurnSlow": Entry(
        "First tokens have been too slow for hours: the month's error budget is gone in five days.",
        (
            "kvscope query fleet --since 6h  # shares by connector and by pair",
            "kvscope query fleet_bands --since 6h  # whether the slow ones wait for something else",
            "kvscope query fleet_trend --since 6h  # since when",
            _EXPLAIN,
        ),
        _BURN_CAUSES,
        "once the cause is known and its mending is planned, until then.",
    ),
    "KvscopeCoordinationShare": Entry(
        "Users wait for engines to find each other, not for accelerators: more of these would not help.",
        (
            "kvscope query fleet_steps --since 15m  # which step; rows of class coordination",
            "kvscope query leads --since 15m  # push: whether D registers before P has finished",
            _TRANSFERS,
            "kvscope requests --since 15m --where 'coordination_ns>100ms' --sort coordination_ns  # ids",
            _EXPLAIN,
        ),
        (
            "`registration.route`, or lags instead of leads: the router sends D its request only when P has "
            "answered. Under push send both legs at once; under pull that hop is the price, so shorten it "
            "(fewer proxies, no re-tokenizing).",
            "`transfer.dispatch`, `readiness.detect`, `readiness.signal`, `readiness.report`: both sides are "
            "ready and wait for the end of an engine step, P's under push, D's under pull. Shorter steps "
            "help (smaller batches, chunked prefill); a faster link does not.",
            "`registration.handshake`: the first request of each new pair pays for it, and others wait "
            "behind it. If it does not stop, engines restart or peers are dead: `kvscope query "
            "handshakes --since 1h`. Send a request through each pair before traffic arrives.",
            "`registration.notify`: D registers late or its writer is starved of a core; "
            "`kvscope top --page engines` shows its threads.",
            "`prefill.frontend`: the API server is short of cores.",
            "Short prompts: the hand-over costs the same for all, so its share grows as prompts shrink. If "
            "the mean wait is what it always was, route short prompts to one engine, or raise "
            "`coordination_s`.",
        ),
        "where prompts are short by nature and the mean wait is accepted; set `coordination_s` to it.",
    ),
    "KvscopeRequestsStuck": Entry(
        "Users wait for a first token that does not come, or P keeps blocks that nobody fetches.",
        (
            "kvscope top --page stuck  # each one, what it waits for, and the advice of its step",
            "kvscope requests --where 'outcome=in flight' --sort arrived_at_ns:asc  # the oldest, with ids",
            _EXPLAIN,
            _FAILURES,
            _LEASES,
        ),
        (
            "Many in `prefill.queue`, `prefill.blocks`, `registration.admit` or `registration.blocks`: "
            "overload. Shed load or add the engine that is short. Zombies count: requests whose client left "
            "may keep their place until a timeout.",
            "All of one P or D: that engine hangs or is gone. Take it out of the router, then restart it; "
            "blocks that peers keep for it come back when their leases end.",
            "`transfer.*` or `readiness.*` under push, and a failure of P in `failures`: P could not post, "
            "logged that, and told nobody; D warns after 480 s and waits on. Abort these requests.",
            "`registration.handshake`: the peer's side channel is not reachable (HTTP answers before it "
            "does). Check VLLM_NIXL_SIDE_CHANNEL_HOST and its port from the other host.",
            "`readiness.admit` or `readiness.promote`: the KV is there and D can't take it up, as it has no "
            "free block for the next step. Lower max_num_seqs or the prompts' length; restart that D if "
            "nothing moves.",
            "`over, blocks held`: D was aborted or never fetched. Blocks come back when the lease ends; "
            "see [KvscopeLeasesExpiring](#kvscopeleasesexpiring).",
            "`not looked at`: more than 2,000 are old at once. It is the first case.",
        ),
        "never while users wait. In a planned drain of an engine, for that long.",
    ),
    "KvscopeReadAfterExpiry": Entry(
        "Some answers may be wrong: decoded on KV of another request. HTTP said 200.",
        (
            "kvscope requests --since 1h --where read_after_expiry=true  # which: tell their owners",
            _LEASES,
            "kvscope query handshakes --since 1h  # clock_offset_ms between the engines",
            _EXPLAIN,
        ),
        (
            "D holds requests longer than the lease (30 s): its queue. If `registration.*` or `transfer.*` "
            "of these took that long, raise `kv_lease_duration` on P **now** and add decode capacity after.",
            "Heartbeats do not renew: `kvscope query leases` shows few or none renewed. Under push the "
            "router's placeholder id never matches on P: send D the id that P answered, or raise the lease.",
            "Clocks: a deadline of another host is compared with an offset; a `clock_offset_ms` that jumps "
            "is wrong. Mend time synchronisation.",
            "Bidirectional: D's kept KV had lapsed when P read it back. Shorten what the router remembers "
            "to less than D's TTL.",
        ),
        "never. Each is a possible wrong answer.",
    ),
    "KvscopeLeasesExpiring": Entry(
        "KV blocks are held for nothing, so others queue; a D that comes late computes again or fails.",
        (
            _LEASES,
            'kvscope query "SELECT engine, request, armed_at_ns, renewals FROM leases '
            'WHERE \\"end\\" = \'expired\'" --since 1h  # which',
            _OUTCOMES,
            "kvscope top --page engines  # blocks kept for peers",
        ),
        (
            "Clients that leave between the legs: `outcomes` shows aborted ones. Let the router abort both "
            "legs; a few are normal.",
            "The router sends P work and no D: it gave up, or D refused. Look for its errors at that time.",
            "D comes too late: its queue is longer than the lease. Raise `kv_lease_duration` or add D.",
            "Heartbeats that do not match (`renewed` is 0): see "
            "[KvscopeReadAfterExpiry](#kvscopereadafterexpiry).",
            "On a D (bidirectional): next turns don't come, or come without the handle: see "
            "[KvscopeReuseNeverOffered](#kvscopereuseneveroffered). D keeps blocks for its TTL (480 s).",
        ),
        "where clients are known to leave often and blocks are not short; raise `lease_expired_share`.",
    ),
    "KvscopeSilentRecompute": Entry(
        "A slow first token, and D is busy with prefill that P had done: everyone's tokens come slower.",
        (
            "kvscope requests --since 1h --where 'recomputed_tokens>0' --sort recomputed_tokens  # which",
            _FAILURES,
            _OUTCOMES,
            _EXPLAIN,
        ),
        (
            "Transfers or handshakes fail and the load failure policy is `recompute`: `failures` has them at "
            "the same times. Mend the link or the peer: "
            "[KvscopeConnectorFailures](#kvscopeconnectorfailures).",
            "D preempts: KV that was received is thrown away and never fetched again. `kvscope requests "
            "--where 'preemptions>0' --since 1h` lists them. More KV memory on D, or a lower max_num_seqs.",
            "Leases that end too soon: [KvscopeLeasesExpiring](#kvscopeleasesexpiring).",
        ),
        "while a P is drained on purpose.",
    ),
    "KvscopeConnectorFailures": Entry(
        "Requests fail with HTTP 500, are computed twice, or wait for a lease, as the failure's name says.",
        (
            _FAILURES,
            "kvscope query handshakes --since 1h  # failed, by peer",
            _TRANSFERS,
            "kvscope status  # engines that are gone",
        ),
        (
            "`handshake_*`: the peer is dead, not up yet, or unreachable on its side channel, or P and D "
            "differ in model, block size or tensor parallelism (the detail says). Such an error reaches the "
            "router or nobody: the client hangs. A dead peer costs each request 5 s.",
            "`transfer_*`: the link or the transport. All of one pair: its link, its NIC, its UCX_TLS or "
            "backend. All of one engine: restart it.",
            "`push_*`: P could not write to D; D is not told, and its request hangs. Take "
            "that P out, abort such requests.",
            "`notification_failed`: the bytes are there and the word is not; blocks wait for their lease.",
        ),
        "while engines are being replaced, for that long.",
    ),
    "KvscopePairTransferSlow": Entry(
        "Requests through this pair get their first token later than they did; others are not hit.",
        (
            _PAIRS,
            _TRANSFERS,
            _TOP_PAIRS,
            "kvscope query pairs --since 25h --until 1h  # the pair's own day, to compare",
            "kvscope requests --since 15m --where p_engine=P --where d_engine=D --sort transfer_ns  # ids",
        ),
        (
            "One pair only: its link. Check the NIC's errors and speed on both hosts, and what else uses it.",
            "All pairs of one engine: that host (NIC, PCIe, a neighbour), or a restart with other settings.",
            "READ far below WRITE, or all at a fraction of the link: the transport fell back (UCX without "
            "RDMA or cuda_ipc: about 0.5 GB/s where 49 were possible). Compare UCX_TLS and NIXL's backend "
            "with an engine that is quick: `kvscope query engines`. Push instead of pull may avoid it.",
            "More descriptors than before (`p50_descriptors`, `us_per_descriptor`): a smaller block size or "
            "layout. A larger block size helps; a faster link does not.",
            "Slower as more are in flight: the link is full. Spread over more pairs.",
            "Shorter prompts: fixed costs weigh more. If `p50_bytes` fell as the rate did, all is well.",
        ),
        "after a change that is meant to stay: within a day the baseline is the new one.",
    ),
    "KvscopePairCoordinationSlow": Entry(
        "Requests through this pair wait longer for the two engines to agree than they did.",
        (
            _PAIRS,
            "kvscope query fleet_steps --since 15m --where p_engine=P --where d_engine=D  # which step",
            "kvscope query handshakes --since 1h  # whether it shakes hands again and again",
            "kvscope top --page engines  # step times and threads of both engines",
        ),
        (
            "Engine steps of P (push) or D (pull) became longer: bigger batches, longer prompts without "
            "chunked prefill. `readiness.detect` or `transfer.dispatch` grew. See Engines for the step time.",
            "New handshakes: one of the two was restarted. It passes by itself.",
            "A polling or writer thread without a core: cgroup limits, a noisy neighbour, an engine that was "
            "pinned to fewer cores.",
            "`registration.route` grew: the router or its network on the way to that D.",
        ),
        "after a change that is meant to stay: within a day the baseline is the new one.",
    ),
    "KvscopeReuseNeverOffered": Entry(
        "Later turns of a conversation are computed from the beginning, and blocks are kept for nothing.",
        (
            "kvscope query reuse --since 1h  # empty: nobody names kept KV",
            "kvscope query sessions --since 1h  # no conversation has more than one turn",
            "kvscope top --page engines  # blocks that D keeps",
        ),
        (
            "Clients stream: vLLM's streaming answers carry no `kv_transfer_params`, so the router has no "
            "handle for the next turn. Keep it from a not streamed leg, or do without bidirectional.",
            "The router drops or does not remember `kv_transfer_params` of D's answer, or a restart made it "
            "forget.",
            "Turns of one conversation go to different routers that share no memory.",
            "There are no later turns: all traffic is single prompts. Then use pull, and D keeps nothing.",
        ),
        "where traffic has no second turns; better, leave bidirectional.",
    ),
    "KvscopeReuseMissed": Entry(
        "Later turns name KV that is kept for them and can't use it: computed again, or HTTP 500 if expired.",
        (
            "kvscope query reuse --since 1h  # by outcome and P",
            "kvscope query sessions --since 1h  # pauses between turns against the time D keeps (ttl_ms)",
            "kvscope requests --since 1h --where reuse_outcome=expired  # ids; other outcomes likewise",
            _EXPLAIN,
        ),
        (
            "`expired`: users pause longer than D keeps (`p50_pause_ms` against `ttl_ms`). Raise "
            "`decoder_kv_blocks_ttl`, or let the router forget handles sooner: with the load failure policy "
            "`fail` each is an HTTP 500.",
            "`metadata missing`: the router passes on a part of the parameters only; remote_host, "
            "remote_port, remote_engine_id and remote_request_id must all come back. D's blocks stay pinned.",
            "`below threshold`: turns are shorter than `kv_recompute_threshold`; computing is quicker. Lower "
            "it only if `mean_net_benefit_ms` of those pulled is well above 0.",
            "`failed`: the link or the peer, as in [KvscopeConnectorFailures](#kvscopeconnectorfailures).",
            "`expired` at once, with hosts of different clocks: see [KvscopeClockError](#kvscopeclockerror).",
        ),
        "where short turns are normal and `below threshold` is all there is.",
    ),
    "KvscopeEngineGone": Entry(
        "Requests on a dead engine are lost, and requests for it hang until a timeout.",
        (
            "kvscope status  # ENGINE GONE: which, and its pid",
            "kvscope requests --since 15m --where outcome=lost  # what was lost, and in which step",
            "kvscope top --page stuck  # who waits for it",
        ),
        (
            "It crashed or was killed: the kernel's log (out of memory), the container's exit code, vLLM's "
            "log. Take it out of the router, restart it.",
            "It died during transfers: look at its peers too, one may follow "
            "([KvscopeConnectorFailures](#kvscopeconnectorfailures)).",
            "A deployment that kills engines without letting them shut down: give them time to end.",
        ),
        "during a planned replacement that kills engines. It ends by itself ten minutes after the death.",
    ),
    "KvscopeRecorderStopped": Entry(
        "Nothing: the engine serves. Its requests can't be explained.",
        (_STATUS, _LOSSES, "kvscope query failures --since 1h  # kind recorder or hook"),
        (
            "The ring's file system is full or was taken away: `kvscope status` says so in RECORDER STOPPED. "
            "Free /dev/shm (KVSCOPE_DIR).",
            "A fault of kvscope: keep the engine's log line that names kvscope, and report it.",
            "The recorder begins again when the engine is restarted, at a time of your choice.",
        ),
        "until the engine is restarted.",
    ),
    "KvscopeNothingRecorded": Entry(
        "Nothing by itself: engines may be gone, or serve unrecorded.",
        (_STATUS, "ls -l ${KVSCOPE_DIR:-/dev/shm/kvscope-$(id -u)}  # rings that the engines make"),
        (
            "No engine runs on this host: start them, or stop the daemon.",
            'Engines run without kvscope: `"kv_connector_module_path": "kvscope.connectors"` or '
            "KVSCOPE_ENABLE=1 is missing, perhaps since an update of their image.",
            "Engines and daemon don't share the directory: KVSCOPE_DIR, the same user, in containers the "
            "same mount.",
        ),
        "on hosts whose engines are scaled to zero.",
    ),
    "KvscopeEventsLost": Entry(
        "Nothing. Steps of some requests are unknown, so shares are a lower bound.",
        (_LOSSES, _STATUS, "kvscope query fleet --since 15m  # unknown_percent: how much is missing"),
        (
            "The daemon was not running or is behind: [KvscopeDaemonDown](#kvscopedaemondown), "
            "[KvscopeDaemonBehind](#kvscopedaemonbehind).",
            "It is too slow for the rate: more CPU for it, or larger rings (KVSCOPE_RING_SLOTS, next start).",
            "Torn ones: something else writes into the rings, or memory is bad.",
        ),
        "during a planned stop of the daemon.",
    ),
    "KvscopeEventsNotUnderstood": Entry(
        "Nothing. What these events tell is missing from the figures.",
        (_LOSSES, "kvscope query engines  # kvscope's version in each engine"),
        (
            "Engines have a newer kvscope than the daemon: update the daemon first, always.",
            "Damaged rings: the column torn of `losses`.",
        ),
        "during a rolling update.",
    ),
    "KvscopeHooksMissing": Entry(
        "Nothing. Some steps of this engine are unknown in every request.",
        (_STATUS, "kvscope query engines  # vLLM's version in the fingerprint"),
        (
            "vLLM was updated to a version that kvscope does not know: update kvscope, "
            "`make contract VERSION=...` in its repository names what changed.",
            "A patched vLLM or a connector of your own that replaces the methods.",
        ),
        _TRUST,
    ),
    "KvscopeHooksRaising": Entry(
        "Nothing: what kvscope raises never reaches vLLM. Steps may be unknown.",
        ("kvscope query failures --since 1h  # kind hook or recorder, with the exception", _STATUS),
        (
            "vLLM was updated: see [KvscopeHooksMissing](#kvscopehooksmissing).",
            "A fault of kvscope: report the exception with vLLM's version.",
            "In doubt, start that engine without kvscope.",
        ),
        "once reported, until the update.",
    ),
    "KvscopeNotJoined": Entry(
        "Nothing. For these requests only one engine's half is known.",
        (
            "kvscope query outcomes --since 15m  # joined_by: peer not instrumented, or unjoined",
            "kvscope status  # NOT INSTRUMENTED: which process",
            "kvscope requests --since 15m --where joined_by=unjoined  # ids",
        ),
        (
            "`peer not instrumented`: an engine runs without kvscope, often the newest one.",
            "`unjoined`: the other engine's events did not come: it is on a host without a daemon, or the "
            "daemon reads another KVSCOPE_DIR.",
            "The router rewrites request ids and names no P: nothing ties the legs together. Let it pass "
            "`kv_transfer_params` on.",
        ),
        _TRUST,
    ),
    "KvscopeClockError": Entry(
        "Nothing, unless deadlines are compared across hosts. Short steps between the engines mean nothing.",
        (
            "kvscope query handshakes --since 1h  # clock_offset_ms, as the engines estimated it",
            "kvscope query fleet --since 15m  # clock_error_ms and clamped, by pair",
            "chronyc tracking  # on both hosts",
        ),
        (
            "A host's time synchronisation stopped or jumped: mend chrony or NTP there.",
            "Handshakes take long (a loaded side channel), so the offset is known less well: `p50_ms`.",
        ),
        "never needed: below `clock_error_s` it ends by itself.",
    ),
    "KvscopeDaemonDown": Entry(
        "Nothing: engines don't need the daemon. Nobody sees what happens now.",
        (
            "kvscope status  # exit code 3: no daemon answers",
            "systemctl status kvscope  # or: kubectl describe pod",
            "curl -s $KVSCOPE_URL/metrics | head  # what Prometheus asks for",
        ),
        (
            "It is not running: its log says why (disk full, out of memory). Start it; it reads what the "
            "rings still hold, the last minutes to hours.",
            "Prometheus can't reach it: it listens on loopback, or answers only to `localhost` and its own "
            "address as host name (docs/metrics.md).",
            "It answers too slowly: scrape time-out below a second or two on a starved host.",
        ),
        "while the daemon is stopped on purpose, for no longer than the rings last.",
    ),
    "KvscopeDaemonRestarting": Entry(
        "Nothing. Counters begin anew each time, and a part of the events may be lost.",
        (_STATUS, "journalctl -u kvscope --since -1h  # or: kubectl logs --previous"),
        (
            "Out of memory: lower `store_memory_mb`, or raise the limit.",
            "A store that it can't open: the log's last line names the file and what to do.",
            "A liveness probe that is too strict.",
        ),
        "during an update of the daemon.",
    ),
    "KvscopeStoreFailing": Entry(
        "Nothing. What happens now will not be found later, once memory and rings are full.",
        (_STATUS, "df -h  # the store's file system, and the one of /dev/shm"),
        (
            "The disk is full: free it, or lower `retention_hours`. The daemon tries again by itself.",
            "The file system is read-only or gone.",
            "Another program has the store's file open: use `kvscope query --list`, or a copy "
            "made by `kvscope snapshot FILE.duckdb`.",
        ),
        "not before room is being made.",
    ),
    "KvscopeDaemonBehind": Entry(
        "Nothing. What `kvscope` shows is late, and soon events are lost.",
        (_STATUS, "kvscope query losses  # whether any were lost already"),
        (
            "Slow commits: [KvscopeCommitsSlow](#kvscopecommitsslow).",
            "No CPU: engines that spin take every core. Give the daemon one.",
            "Heavy questions of dashboards or users: shorten their windows, lower `sql_seconds`.",
        ),
        "never: mend it, or events are lost.",
    ),
    "KvscopeCommitsSlow": Entry(
        "Nothing. Requests show up seconds later.",
        (_STATUS, "iostat -x 5 3  # the store's disk"),
        (
            "The disk: network storage, or shared with checkpoints or models being loaded. Put the store on "
            "a local disk.",
            "A very large store: lower `retention_hours`.",
            "No CPU or memory: see [KvscopeDaemonBehind](#kvscopedaemonbehind).",
        ),
        "while models are loaded from the same disk.",
    ),
    "KvscopeOwnFaults": Entry(
        "Nothing. Some requests are missing from the figures.",
        (_STATUS, "journalctl -u kvscope --since -1h  # the daemon's log says where"),
        (
            "Different versions of kvscope in engines and daemon: `kvscope query engines`.",
            "A fault of kvscope: report the log's lines. `kvscope snapshot FILE.duckdb` keeps the evidence.",
        ),
        "once reported, until the update.",
    ),
    "KvscopeProblems": Entry(
        "Nothing by itself: the daemon sees something that hides requests or that will hurt.",
        (_STATUS,),
        (
            "NOT INSTRUMENTED: an engine with NIXL runs without kvscope; its half of requests is unknown.",
            "UNREADABLE: a file in KVSCOPE_DIR of another user or version; the line says what to do.",
            "vLLM's metrics can't be read: set `vllm_metrics` to where the engines serve them.",
            "Anything else: the line names the cause and what to do.",
        ),
        _TRUST,
    ),
}
