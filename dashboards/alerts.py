"""Alerting rules. Each fires where a figure is greater than a threshold; a figure that is not there is quiet.

Figures are by engine, pair or kind of request, so that an alert names what to look at, and rest on enough
requests to mean something. What each means and what to do is in runbook.py.
"""

from __future__ import annotations

from typing import NamedTuple

from kvscope import metrics as m
from kvscope.dashboards.parameters import Parameters
from kvscope.dashboards.recordings import GROUP, PAIR, over

PAGE, WARNING = "critical", "warning"
OVERVIEW, FLOW, PAIRS = "kvscope-overview", "kvscope-flow", "kvscope-pairs"
SESSIONS, ENGINES, SELF = "kvscope-sessions", "kvscope-engines", "kvscope-self"

_KIND = "{{ $labels.connector }}, {{ $labels.model }}, {{ $labels.traffic }}"
_PAIR = "{{ $labels.p_engine }} → {{ $labels.d_engine }} ({{ $labels.connector }}, {{ $labels.traffic }})"
_PERCENT = "{{ $value | humanizePercentage }}"
_DURATION = "{{ $value | humanizeDuration }}"
_COUNT = '{{ $value | printf "%.0f" }}'
_TIMES = '{{ $value | printf "%.1f" }}'
_SEES = "Daemon {{ $labels.instance }}"


class Alert(NamedTuple):
    """A rule: it fires where `query` has been greater than `threshold` for `for_`."""

    name: str
    group: str
    query: str
    """PromQL; may use recorded series."""
    threshold: float
    for_: str
    severity: str
    """critical: users are hurt or a part is gone; warning: look today."""
    summary: str
    description: str
    """With the figures, as templates of Prometheus."""
    dashboard: str
    """UID of the dashboard to look at."""

    @property
    def expr(self) -> str:
        return f"({self.query}) > {self.threshold:g}"


def alerts(parameters: Parameters) -> list[Alert]:
    """All of them, gravest matter first."""
    return [
        *_of_requests(parameters),
        *_of_handover(parameters),
        *_of_pairs(parameters),
        *_of_reuse(parameters),
        *_of_engines(),
        *_of_trust(parameters),
        *_of_daemon(parameters),
    ]


def _of_requests(p: Parameters) -> list[Alert]:
    group, users = "kvscope-requests", p.users
    coordination = f'sum by ({GROUP}) (rate({m.TTFT_CLASS.name}{{class="coordination", {users}}}[15m]))'
    share = over(coordination, "", f"sum by ({GROUP}) (rate({m.TTFT_CLASS.name}{{{users}}}[15m]))")
    requests = f"sum by ({GROUP}) (increase({m.TTFT.name}_count{{{users}}}[15m]))"
    return [
        *(
            Alert(
                f"KvscopeTtftBurn{speed}",
                group,
                _burn(p, short, long),
                factor,
                for_,
                severity,
                f"First tokens are too slow, most of all for {{{{ $labels.class }}}}: {_KIND}",
                f"{_TIMES} times as many requests as the objective allows ({p.ttft_objective:.4g} within "
                f"{p.ttft_slo_s:g} s) had a slower first token, over {short} and over {long}. Of all TTFT of "
                f"{long}, {{{{ $labels.class }}}} took the most.",
                OVERVIEW,
            )
            for speed, short, long, factor, for_, severity in (
                ("Fast", "5m", "1h", p.burn_fast, "2m", PAGE),
                ("Slow", "30m", "6h", p.burn_slow, "15m", WARNING),
            )
        ),
        Alert(
            "KvscopeCoordinationShare",
            group,
            f"{share}\n"
            f"and on ({GROUP}) {over(coordination, '', requests_per_s(users))} >= {p.coordination_s:g}\n"
            f"and on ({GROUP}) {requests} >= {p.min_requests}",
            p.coordination_share,
            "10m",
            WARNING,
            f"Coordination wait is above budget: {_KIND}",
            f"{_PERCENT} of TTFT of the last 15 minutes was coordination wait, which more or faster "
            f"accelerators would not shorten; the budget is {p.coordination_share:.0%}.",
            OVERVIEW,
        ),
        Alert(
            "KvscopeRequestsStuck",
            group,
            f"sum by (step, instance) ({m.STUCK.name})",
            0,
            "2m",
            PAGE,
            "Requests are stuck in {{ $labels.step }}",
            f"{_COUNT} requests have been in {{{{ $labels.step }}}} for more than 30 s, and have been so for "
            "two minutes; daemon {{ $labels.instance }} sees them.",
            FLOW,
        ),
    ]


def requests_per_s(users: str) -> str:
    """Requests with a first token per second of 15 minutes."""
    return f"sum by ({GROUP}) (rate({m.TTFT.name}_count{{{users}}}[15m]))"


def _burn(p: Parameters, short: str, long: str) -> str:
    """How many times faster than evenly the budget is used up, in the better of both windows; labelled with
    the class that takes most of TTFT."""
    class_ = f"sum by ({GROUP}, class) (rate({m.TTFT_CLASS.name}{{{p.users}}}[{long}]))"
    in_short, in_long = (f"kvscope:ttft_over_slo:ratio_rate{window}" for window in (short, long))
    return (
        f"(topk by ({GROUP}) (1, {class_}) > 0) * 0\n"
        f"+ on ({GROUP}) group_left ()\n"
        f"((({in_long} < {in_short}) or {in_short}) / {1 - p.ttft_objective:.6g})"
    )


def _of_handover(p: Parameters) -> list[Alert]:
    group, users = "kvscope-handover", p.users
    leases = f"sum by (engine, traffic) (increase({m.LEASES.name}{{%s}}[15m]))"
    return [
        Alert(
            "KvscopeReadAfterExpiry",
            group,
            f"sum by ({GROUP}) (increase({m.READ_LATE.name}{{{users}}}[1h]))",
            0,
            "0m",
            PAGE,
            f"Answers may be wrong: KV was read after its lease had expired: {_KIND}",
            f"About {_COUNT} requests of the last hour were completed after P had given their blocks back; "
            "D may have decoded on another request's KV. They all ended with HTTP 200.",
            OVERVIEW,
        ),
        Alert(
            "KvscopeLeasesExpiring",
            group,
            over(leases % f'end="expired", {users}', "", leases % users),
            p.lease_expired_share,
            "5m",
            WARNING,
            "Leases expire on {{ $labels.engine }} ({{ $labels.traffic }})",
            f"{_PERCENT} of the leases that ended in the last 15 minutes expired instead of being released: "
            "blocks were held for nothing, and a late read may meet other KV.",
            OVERVIEW,
        ),
        Alert(
            "KvscopeSilentRecompute",
            group,
            over(
                f"sum by ({GROUP}) (increase({m.RECOMPUTED.name}{{{users}}}[15m]))",
                "",
                f"sum by ({GROUP}) (increase({m.REQUESTS.name}{{{users}}}[15m]))",
            ),
            p.recomputed_share,
            "5m",
            WARNING,
            f"D computes prompts again that P had computed: {_KIND}",
            f"{_PERCENT} of the requests of the last 15 minutes had prompt tokens computed twice. Users see "
            "a slow first token and no error.",
            OVERVIEW,
        ),
        Alert(
            "KvscopeConnectorFailures",
            group,
            _new_failures(f'kind="nixl", {users}'),
            0,
            "0m",
            WARNING,
            "vLLM's connector logs {{ $labels.name }} on {{ $labels.engine }}",
            f"{_COUNT} failures {{{{ $labels.name }}}} in the last 15 minutes ({{{{ $labels.traffic }}}}). "
            "vLLM logs these and goes on: the request waits for its lease, or is computed again.",
            PAIRS,
        ),
    ]


def _new_failures(matchers: str) -> str:
    """Failures of the last 15 minutes; also the first ever, before which there was no series to grow."""
    by = "sum by (engine, traffic, name)"
    series = f"{m.FAILURES.name}{{{matchers}}}"
    return f"({by} (increase({series}[15m])) > 0)\nor ({by} ({series}) unless {by} ({series} offset 15m)) > 0"


def _of_pairs(p: Parameters) -> list[Alert]:
    group = "kvscope-pairs"
    enough = f"sum by ({PAIR}) (increase({m.PAIR_REQUESTS.name}{{{p.users}}}[15m])) >= {p.min_requests}"
    rate, wait = "kvscope:pair_transfer:bytes_per_second", "kvscope:pair_coordination:seconds_per_request"
    return [
        Alert(
            "KvscopePairTransferSlow",
            group,
            f"{rate}1d / {rate}15m\nand on ({PAIR}) {enough}",
            p.pair_slowdown,
            "15m",
            WARNING,
            f"Transfers are slow: {_PAIR}",
            f"A byte takes {_TIMES} times as long from P to D as on average over the pair's own last day.",
            PAIRS,
        ),
        Alert(
            "KvscopePairCoordinationSlow",
            group,
            f"({wait}15m >= {p.coordination_s:g}) / ({wait}1d > 0)\nand on ({PAIR}) {enough}",
            p.pair_slowdown,
            "15m",
            WARNING,
            f"The hand-over is slow: {_PAIR}",
            f"Coordination wait per request is {_TIMES} times that of the pair's own last day.",
            PAIRS,
        ),
    ]


def _of_reuse(p: Parameters) -> list[Alert]:
    def reuse(matchers: str = "") -> str:
        more = f"{matchers}, " if matchers else ""
        return f"sum by ({GROUP}) (increase({m.REUSE.name}{{{more}{p.users}}}[1h]))"

    offered = reuse('outcome!="not offered"')
    missed = reuse('outcome!~"not offered|pulled|local hit"')
    return [
        Alert(
            "KvscopeReuseNeverOffered",
            "kvscope-reuse",
            f"{over(reuse(_OUTCOME_NOT_OFFERED), '', reuse())}\n"
            f"and on ({GROUP}) {reuse()} >= {p.min_reuse_requests}",
            0.9999,
            "30m",
            WARNING,
            f"Bidirectional reuse never engages: {_KIND}",
            "No request of the last hour named KV that D had kept from an earlier turn: D keeps blocks for "
            "nothing, and P computes every turn from its beginning.",
            SESSIONS,
        ),
        Alert(
            "KvscopeReuseMissed",
            "kvscope-reuse",
            f"({missed} or {offered} * 0)\n/ ({offered} > 0)\n"
            f"and on ({GROUP}) {offered} >= {p.min_reuse_requests}",
            p.reuse_missed_share,
            "30m",
            WARNING,
            f"KV kept for later turns is not read back: {_KIND}",
            f"{_PERCENT} of the requests of the last hour that named kept KV could not use it: it had "
            "expired, its metadata was missing, it was below the threshold, or reading failed.",
            SESSIONS,
        ),
    ]


_OUTCOME_NOT_OFFERED = 'outcome="not offered"'


def _of_engines() -> list[Alert]:
    group = "kvscope-engines"
    processes = f'sum by (instance) ({m.PROCESSES.name}{{state="%s"}})'
    return [
        Alert(
            "KvscopeEngineGone",
            group,
            processes % "gone",
            0,
            "0m",
            PAGE,
            "Engine processes died on {{ $labels.instance }}",
            f"{_COUNT} engine processes died within the last ten minutes. Their requests are lost, and their "
            "peers wait for leases to expire.",
            ENGINES,
        ),
        Alert(
            "KvscopeRecorderStopped",
            group,
            processes % "stopped",
            0,
            "5m",
            WARNING,
            "Engines serve unrecorded on {{ $labels.instance }}",
            f"In {_COUNT} engine processes kvscope's recorder gave up. They serve; what their requests wait "
            "for is unknown.",
            SELF,
        ),
        Alert(
            "KvscopeNothingRecorded",
            group,
            f"{processes % 'recording'} == bool 0",
            0,
            "10m",
            WARNING,
            "No engine records on {{ $labels.instance }}",
            f"{_SEES} has had no engine process that records for ten minutes.",
            ENGINES,
        ),
    ]


def _of_trust(p: Parameters) -> list[Alert]:
    group = "kvscope-trust"
    lost = f"sum by (engine, traffic) (increase({m.EVENTS_LOST.name}[15m]))"
    rejected = f"sum by (engine, traffic) (increase({m.EVENTS_REJECTED.name}[15m]))"
    joins = f"sum by ({GROUP}) (increase({m.JOINS.name}{{%s}}[15m]))"
    unpaired = f'joined_by=~"unjoined|peer not instrumented", {p.users}'
    return [
        Alert(
            "KvscopeEventsLost",
            group,
            lost,
            0,
            "0m",
            WARNING,
            "Events of {{ $labels.engine }} are lost",
            f"{_COUNT} events of the last 15 minutes were overwritten before the daemon read them, or were "
            "torn: the steps that they bound are unknown.",
            SELF,
        ),
        Alert(
            "KvscopeEventsNotUnderstood",
            group,
            rejected,
            0,
            "5m",
            WARNING,
            "Events of {{ $labels.engine }} are not understood",
            f"{_COUNT} events of the last 15 minutes were read and not understood: engine and daemon have "
            "different versions of kvscope.",
            SELF,
        ),
        Alert(
            "KvscopeHooksMissing",
            group,
            f"max by (engine) ({m.HOOKS_MISSING.name})",
            0,
            "5m",
            WARNING,
            "Hooks are missing in {{ $labels.engine }}",
            f"{_COUNT} hooks that kvscope needs are not in this engine's vLLM: their steps are unknown in "
            "every request.",
            SELF,
        ),
        Alert(
            "KvscopeHooksRaising",
            group,
            _new_failures('kind!="nixl"'),
            0,
            "0m",
            WARNING,
            "kvscope fails inside {{ $labels.engine }}: {{ $labels.name }}",
            f"{_COUNT} times in the last 15 minutes. The engine is not hurt; steps may be unknown.",
            SELF,
        ),
        Alert(
            "KvscopeNotJoined",
            group,
            f"{over(joins % unpaired, '', joins % p.users)}\n"
            f"and on ({GROUP}) {joins % p.users} >= {p.min_requests}",
            p.not_joined_share,
            "10m",
            WARNING,
            f"Requests are seen on one engine only: {_KIND}",
            f"{_PERCENT} of the requests of the last 15 minutes lack their other leg: half of their TTFT is "
            "not in the figures.",
            SELF,
        ),
        Alert(
            "KvscopeClockError",
            group,
            f"max by (instance) ({m.CLOCK_ERROR.name})",
            p.clock_error_s,
            "10m",
            WARNING,
            "Clocks of P and D are far apart",
            f"The clocks of two legs may differ by up to {_DURATION} more than was corrected: shorter steps "
            "between the engines mean nothing.",
            SELF,
        ),
    ]


def _of_daemon(p: Parameters) -> list[Alert]:
    group = "kvscope-daemon"
    own = (m.REFUSED, m.FAULTS, m.UNTOLD, m.UNCOUNTED)
    faults = "\n+ ".join(f"sum by (instance) (increase({metric.name}[1h]))" for metric in own)
    commits = f"sum by (instance) (rate({m.COMMIT.name}_%s[5m]))"
    seen = f"last_over_time({m.BUILD_INFO.name}[1d])"
    return [
        Alert(
            "KvscopeDaemonDown",
            group,
            f"(1 - up) and on (job, instance) {seen}\n"
            f"or absent({m.BUILD_INFO.name}) unless on () (up and on (job, instance) {seen})",
            0,
            "2m",
            WARNING,
            "kvscope's daemon does not answer {{ $labels.instance }}",
            "Prometheus gets no metrics from {{ with $labels.instance }}{{ . }}{{ else }}any daemon"
            "{{ end }}. Engines go on; their rings keep the last minutes.",
            SELF,
        ),
        Alert(
            "KvscopeDaemonRestarting",
            group,
            f"sum by (instance) (changes({m.STARTED.name}[30m]))",
            p.restarts,
            "0m",
            WARNING,
            "kvscope's daemon restarts again and again on {{ $labels.instance }}",
            f"It began anew {_COUNT} times in half an hour.",
            SELF,
        ),
        Alert(
            "KvscopeStoreFailing",
            group,
            f"max by (instance) ({m.STORE_FAILING.name})",
            0,
            "1m",
            WARNING,
            "kvscope can't store on {{ $labels.instance }}",
            "Nothing can be committed: rows wait in memory, then events in the rings, then they are lost.",
            SELF,
        ),
        Alert(
            "KvscopeDaemonBehind",
            group,
            f"sum by (instance) ({m.WAITING.name}) / sum by (instance) ({m.WAITING_LIMIT.name})",
            p.queue_share,
            "2m",
            WARNING,
            "kvscope's daemon is behind on {{ $labels.instance }}",
            f"The queue before its store is {_PERCENT} full; when it is full, the rings fill up, and then "
            "events are lost.",
            SELF,
        ),
        Alert(
            "KvscopeCommitsSlow",
            group,
            over(commits % "sum", "", commits % "count"),
            p.commit_s,
            "5m",
            WARNING,
            "kvscope's store is slow on {{ $labels.instance }}",
            f"A commit takes {_DURATION} on average; requests show up that much later.",
            SELF,
        ),
        Alert(
            "KvscopeOwnFaults",
            group,
            faults,
            0,
            "0m",
            WARNING,
            "kvscope stumbled on {{ $labels.instance }}",
            f"About {_COUNT} rows, events or requests of the last hour were not stored, joined or counted.",
            SELF,
        ),
        Alert(
            "KvscopeProblems",
            group,
            f"sum by (instance) ({m.PROBLEMS.name}) + sum by (instance) ({m.UNREADABLE.name})",
            0,
            "10m",
            WARNING,
            "kvscope's daemon on {{ $labels.instance }} has something to say",
            f"{_COUNT} problems or unreadable files; `kvscope status` names them, such as engines with NIXL "
            "that are not instrumented.",
            SELF,
        ),
    ]
