"""The overview: the operator's questions, in the order in which they come up."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as d

from kvscope import metrics as m
from kvscope.dashboards import figures as f
from kvscope.dashboards import links, pages
from kvscope.dashboards import panels as p
from kvscope.dashboards.pages import Row
from kvscope.dashboards.panels import Column, Limit, Query, limits
from kvscope.dashboards.promql import (
    RANGE,
    STEP,
    grown,
    increase,
    mean,
    or_zero,
    quantile,
    rate,
    ratio,
    series,
    top,
    total,
)
from kvscope.steps import CAPACITY, COMPUTE, COORDINATION, TRANSFER, UNKNOWN

STEP_COLOURS = {f.of_steps(class_): colour for class_, colour in p.CLASS_COLOURS.items()}
PAIR = ("p_engine", "d_engine")
TO_FLOW = links.to_dashboard("Which step? Request flow", links.FLOW)
TO_PAIR = links.to_dashboard(
    "This pair", links.PAIRS, p_engine=links.cell("p_engine"), d_engine=links.cell("d_engine")
)
PAIR_TRACES = links.to_traces("Traces of its decode engine", links.cell("d_engine"))
PAIR_REQUESTS = links.to_requests(
    "Its requests, slowest first (JSON)",
    f"p_engine={links.cell('p_engine')}",
    f"d_engine={links.cell('d_engine')}",
)
THIS_ENGINE = links.to_dashboard("This engine", links.ENGINES, engine=links.cell("engine"))
PAIR_LINKS = [TO_PAIR, PAIR_REQUESTS, PAIR_TRACES]


def dashboard() -> d.Dashboard:
    return pages.dashboard(
        links.OVERVIEW,
        "kvscope / Overview",
        """Where the time to first token goes, over prefill and decode engines: compute wait or coordination
        wait, and what to do about it.""",
        [
            Row(100, "Is it compute or coordination?", _compute_or_coordination()),
            Row(200, "Which step?", _which_step()),
            Row(300, "Which pair or engine?", _which_pair()),
            Row(400, "Push, pull or bidirectional: what would change?", _what_would_change()),
            Row(500, "Is anything stuck, expired, recomputed?", _anything_wrong()),
            Row(600, "Can I trust these numbers?", _trust()),
        ],
    )


def _compute_or_coordination() -> list[p.Panel]:
    return [
        p.number(
            101,
            "Coordination wait",
            """Share of all TTFT that engines spent waiting for each other: hand-over, dispatch, polls,
            signals. Faster accelerators would not help. High: look at the steps below, at push instead of
            pull, at shorter engine steps.""",
            p.PERCENT,
            [Query(f.class_share(COORDINATION))],
            thresholds=f.COORDINATION_LIMITS,
            links=[TO_FLOW],
            decimals=1,
        ),
        p.number(
            102,
            "Compute wait",
            """Share of all TTFT spent computing or waiting for a place to compute (compute + capacity).
            High: more or faster engines, or more prefix hits, help; another hand-off does not.""",
            p.PERCENT,
            [Query(f.class_share(f"{COMPUTE}|{CAPACITY}"))],
            links=[TO_FLOW],
            decimals=1,
        ),
        p.number(
            103,
            "Transfer",
            """Share of all TTFT in which KV moved or its descriptors were posted. It stands beside the
            waits, in neither. High: compare the rates of the pairs, look for a slow transport or small
            blocks.""",
            p.PERCENT,
            [Query(f.class_share(TRANSFER))],
            thresholds=f.TRANSFER_LIMITS,
            links=[links.to_dashboard("Pairs and transfers", links.PAIRS)],
            decimals=1,
        ),
        p.number(
            104,
            "TTFT p99",
            """99 of 100 requests had their first token within this time, from the earliest arrival known on
            either leg. Interpolated within the buckets of the histogram.""",
            p.SECONDS,
            [Query(quantile(0.99, m.TTFT, window=RANGE))],
            links=[links.to_requests("Slowest requests (JSON)")],
        ),
        p.number(
            105,
            "TTFT p50",
            "Half of the requests had their first token within this time.",
            p.SECONDS,
            [Query(quantile(0.5, m.TTFT, window=RANGE))],
        ),
        p.number(
            106,
            "Requests",
            "Requests that ended, per second. A request counts once it is over and stored.",
            p.REQUESTS_PER_S,
            [Query(rate(series(m.REQUESTS), window=RANGE))],
        ),
        p.graph(
            107,
            "Shares of TTFT by class",
            """Parts of all TTFT; they add up to 100 %. Compute wait is compute + capacity, coordination
            wait is coordination. Unknown is what was not observed: see whether events are lost or hooks
            missing.""",
            p.PERCENT,
            [Query(f.class_shares(), "{{class}}")],
            span=8,
            stacked=True,
            colours=p.CLASS_COLOURS,
            greatest=1,
            links=[TO_FLOW],
        ),
        p.graph(
            108,
            "Mean TTFT by class",
            """What each class adds to the mean TTFT of a request; means add up, so the top of the stack is
            the mean TTFT. The class that grows with it is the cause of a spike.""",
            p.SECONDS,
            [Query(f.class_means(), "{{class}}")],
            span=8,
            stacked=True,
            colours=p.CLASS_COLOURS,
            links=[TO_FLOW],
        ),
        p.graph(
            109,
            "TTFT",
            """Percentiles of whole requests. Each dot is one request: click on it for its trace, which
            shows both legs and all steps. Percentiles don't add up, so they are never stacked.""",
            p.SECONDS,
            [Query(quantile(q, m.TTFT), f"p{q * 100:g}", exemplar=q == 0.99) for q in (0.5, 0.9, 0.99)],
            span=8,
            links=[links.to_requests("Slowest requests (JSON)")],
        ),
    ]


def _which_step() -> list[p.Panel]:
    return [
        p.bars(
            201,
            "Where TTFT goes, by step",
            """Share of the time of all steps within TTFT, the ten largest, coloured by class (green
            compute, yellow capacity, blue transfer, red coordination). docs/steps.md says from what to what
            each goes, and `kvscope explain` what would shorten it.""",
            p.PERCENT,
            [Query(f"sort_desc(topk(10, {f.step_shares()}))", "{{step}}")],
            span=10,
            height=9,
            many=True,
            colours=STEP_COLOURS,
            links=[TO_FLOW],
            decimals=1,
        ),
        p.graph(
            202,
            "Coordination by step",
            """What each step of coordination wait adds to the mean TTFT; they add up to the red part above.
            readiness.* and transfer.dispatch follow the length of engine steps: smaller batches or chunked
            prefill shorten them. registration.route is router, HTTP and frontend.""",
            p.SECONDS,
            [Query(f.step_means(f'class="{COORDINATION}"'), "{{step}}")],
            span=14,
            height=9,
            stacked=True,
            links=[TO_FLOW],
        ),
    ]


def _which_pair() -> list[p.Panel]:
    ranked = increase(series(m.PAIR_TTFT_CLASS, f'class="{COORDINATION}"'), *PAIR)
    requests = increase(series(m.PAIR_REQUESTS), *PAIR)
    seconds = increase(series(m.PAIR_TTFT_CLASS), *PAIR)

    def share(class_: str) -> str:
        return ratio(increase(series(m.PAIR_TTFT_CLASS, f'class="{class_}"'), *PAIR), seconds, *PAIR)

    def column(title: str, expr: str, unit: str, thresholds: list[Limit] | None = None) -> Column:
        return Column(title, top(10, f"({expr})", ranked, *PAIR), unit, thresholds or ())

    return [
        p.rows(
            301,
            "Pairs that waited longest for each other",
            """The ten P → D pairs with the most coordination wait in the window. One pair that stands out
            has a slow link, a busy engine or a router far away; all alike point to a setting. Click on a
            pair.""",
            {"p_engine": "Prefill engine", "d_engine": "Decode engine"},
            [
                column("Waited", ranked, p.SECONDS),
                column("Requests", requests, p.COUNT),
                column("Mean TTFT", ratio(seconds, requests, *PAIR), p.SECONDS),
                column("Coordination", share(COORDINATION), p.PERCENT, f.COORDINATION_LIMITS),
                column("Transfer", share(TRANSFER), p.PERCENT, f.TRANSFER_LIMITS),
                column("Moved", rate(series(m.PAIR_BYTES), *PAIR, window=RANGE), p.BYTES_PER_S),
            ],
            sort="Waited",
            links={"Prefill engine": PAIR_LINKS, "Decode engine": PAIR_LINKS},
        ),
        engines_table(
            302,
            """The ten engines with the longest engine steps now. Long steps delay every hand-over, as
            transfers are posted and seen at step boundaries. KV near 100 %: requests wait for blocks; see
            what holds them. Click on an engine.""",
            10,
        ),
    ]


def engines_table(id_: int, description: str, count: int = 0) -> p.Panel:
    """A row for each engine, or for the `count` with the longest steps."""
    steps = total(series(m.STEP_MEAN), "engine", how="max")
    ranked = (
        f"({steps} or 0 * {total(series(m.LEASES_HELD), 'engine', how='max')})"  # idle ones have no steps
    )
    info = f"max by (engine, role, connector) ({series(m.ENGINE_INFO)})"

    def column(title: str, expr: str, unit: str, thresholds: list[Limit] | None = None) -> Column:
        with_info = f"({expr}) * on (engine) group_left (role, connector) {info}"
        shown = top(count, with_info, ranked, "engine") if count else with_info
        return Column(title, shown, unit, thresholds or ())

    return p.rows(
        id_,
        "Engines",
        description,
        {"engine": "Engine", "role": "Role", "connector": "Connector"},
        [
            column("Step time", steps, p.SECONDS),
            column("KV held", f.kv_part('use!="total"'), p.PERCENT, limits(0.85, 0.95)),
            column("Leases", total(series(m.LEASES_HELD), "engine"), p.COUNT),
            column(
                "In hooks", total(series(m.HOOK_SHARE), "engine", how="max"), p.PERCENT, limits(0.01, 0.03)
            ),
        ],
        sort="Step time",
        links={"Engine": [THIS_ENGINE]},
    )


def failures_table(id_: int, description: str) -> p.Panel:
    """A row for each kind of failure of each engine."""
    failures = total(grown(series(m.FAILURES)), "engine", "kind", "name")
    return p.rows(
        id_,
        "Failures",
        description,
        {"engine": "Engine", "kind": "Kind", "name": "Name"},
        [Column("Failures", or_zero(failures, engine="none", kind="none", name="none"), p.COUNT, limits(1))],
        sort="Failures",
        span=8,
        height=8,
        links={"Engine": [THIS_ENGINE]},
    )


def _what_would_change() -> list[p.Panel]:
    return [
        p.bars(
            401,
            "Mean TTFT by connector",
            """As it was. Unlike loads are not comparable: compare connectors only under the same prompts and
            concurrency.""",
            p.SECONDS,
            [Query(mean(m.TTFT, "connector", window=RANGE), "{{connector}}")],
            span=6,
            height=7,
        ),
        p.number(
            402,
            "TTFT with the other connector",
            """Predicted change for the same requests, where it can be told: push moves registration before
            the end of prefill, pull after it. Negative is faster. Validate it by running the same load both
            ways.""",
            p.PERCENT,
            [Query(f.predicted_change(), "{{connector}} → {{to}}")],
            span=6,
            height=7,
            thresholds=[Limit(None, "blue"), Limit(-0.05, p.NEUTRAL), Limit(0.05, p.WARN)],
            decimals=1,
            no_value="no prediction",
        ),
        p.bars(
            403,
            "D was late",
            """Share of requests for which D was not ready when prefill had finished. In pull it always is,
            as D is asked only then. In push it means that the router asks D too late: it should send both
            legs at once.""",
            p.PERCENT,
            [Query(f.late_share(), "{{connector}}")],
            span=4,
            height=7,
            links=[TO_FLOW],
            greatest=1,
            decimals=0,
            no_value="not known",
        ),
        p.bars(
            404,
            "Lateness of D",
            """Mean time from the end of prefill until D was ready, over all requests of which it is known;
            early counts as 0. It is what push with an early D would save.""",
            p.SECONDS,
            [Query(f.mean_lag(), "{{connector}}")],
            span=4,
            height=7,
            links=[TO_FLOW],
            no_value="not known",
        ),
        p.number(
            405,
            "KV read back",
            """Bidirectional: share of requests for which P read KV back from D instead of computing it.
            First turns offer none. At 0 bidirectional never engages: streaming responses carry no
            kv_transfer_params, so the client or router has nothing to offer.""",
            p.PERCENT,
            [Query(f.reuse_share('outcome="pulled"'))],
            span=4,
            height=7,
            links=[links.to_dashboard("Sessions and reuse", links.SESSIONS)],
            decimals=1,
            no_value="no bidirectional",
        ),
    ]


def _anything_wrong() -> list[p.Panel]:
    engines = links.to_dashboard("Engines", links.ENGINES)
    pairs = links.to_dashboard("Pairs and transfers", links.PAIRS)
    return [
        p.number(
            501,
            "Stuck now",
            """Requests that have been in one step for more than 30 s, whatever the traffic. Those in
            registration or transfer wait for a peer: look for a dead engine or a failed handshake. `kvscope
            top`, page Stuck, names them.""",
            p.COUNT,
            [Query(total(m.STUCK.name))],
            span=3,
            thresholds=limits(1),
            decimals=0,
        ),
        p.number(
            502,
            "Leases expired",
            """Leases on P that ran out before D had read the KV. Each costs its request an error or a
            recompute: a longer lease, or a D that is asked sooner. What D keeps for a later turn is not
            counted here: see Sessions and reuse.""",
            p.COUNT,
            [Query(or_zero(f.expired(RANGE)))],
            span=3,
            thresholds=limits(1),
            links=[pairs],
            decimals=0,
        ),
        p.number(
            503,
            "Late reads",
            """Requests whose transfer completed after the blocks had been given back: D may have used
            another request's KV, and answered 200. Treat the outputs as wrong; lengthen the lease.""",
            p.COUNT,
            [Query(or_zero(increase(series(m.READ_LATE))))],
            span=3,
            thresholds=limits(1),
            links=[links.to_requests("These requests (JSON)", "read_after_expiry=true")],
            decimals=0,
        ),
        p.number(
            504,
            "Recomputed",
            """In silence: requests for which D computed prompt tokens that P had computed: a failure or a
            preemption threw the KV away. It looks like a slow prefill. See the failures of the engines.""",
            p.COUNT,
            [Query(or_zero(increase(series(m.RECOMPUTED))))],
            span=3,
            thresholds=limits(1, 10),
            links=[links.to_dashboard("Sessions and reuse", links.SESSIONS)],
            decimals=0,
        ),
        p.number(
            505,
            "Failed or lost",
            """Requests that ended in an error, with their engine, or went quiet. Not those that clients
            aborted.""",
            p.COUNT,
            [Query(or_zero(increase(series(m.REQUESTS, 'outcome=~"error|lost|incomplete"'))))],
            span=3,
            thresholds=limits(1, 10),
            links=[links.to_requests("Lost requests (JSON)", "outcome=lost")],
            decimals=0,
        ),
        p.number(
            506,
            "Failures",
            """Failures of vLLM's connector and of kvscope's hooks. The engines dashboard says which.""",
            p.COUNT,
            [Query(or_zero(total(grown(series(m.FAILURES)))))],
            span=3,
            thresholds=limits(1),
            links=[engines],
            decimals=0,
        ),
        p.number(
            507,
            "Bad transfers",
            """NIXL transfers that ended in an error or were never seen to end.""",
            p.COUNT,
            [Query(or_zero(increase(series(m.TRANSFERS, 'state!="done"'))))],
            span=3,
            thresholds=limits(1),
            links=[pairs],
            decimals=0,
        ),
        p.number(
            508,
            "Preemptions",
            """Requests that had to give back their blocks, on either leg. Too little KV memory for the
            load.""",
            p.COUNT,
            [Query(or_zero(increase(series(m.PREEMPTIONS))))],
            span=3,
            thresholds=limits(1, 10),
            links=[engines],
            decimals=0,
        ),
        p.graph(
            509,
            "Stuck requests by step",
            """The step says who is waited for: docs/steps.md. `over, blocks held`: the request is over and
            P still keeps its blocks, as D never said that it was done.""",
            p.COUNT,
            [Query(f"{total(m.STUCK.name, 'step')} > 0 or {_none_stuck()}", "{{step}}")],
            height=7,
            stacked=True,
        ),
        p.graph(
            510,
            "What went wrong",
            f"""{p.COUNTED} A burst on all engines at once is a network or a router, on one engine that
            engine.""",
            p.COUNT,
            [
                Query(or_zero(f.expired(STEP)), "leases expired"),
                Query(or_zero(increase(series(m.READ_LATE), window=STEP)), "late reads"),
                Query(or_zero(increase(series(m.RECOMPUTED), window=STEP)), "recomputed"),
                Query(
                    or_zero(increase(series(m.REQUESTS, 'outcome=~"error|lost|incomplete"'), window=STEP)),
                    "failed or lost",
                ),
                Query(or_zero(total(grown(series(m.FAILURES), STEP))), "failures"),
            ],
            height=7,
        ),
    ]


def _none_stuck() -> str:
    return f'label_replace({total(m.STUCK.name)} == 0, "step", "none", "", "")'


def _trust() -> list[p.Panel]:
    itself = links.to_dashboard("kvscope itself", links.SELF)
    return [
        p.number(
            601,
            "Daemons",
            "Daemons of kvscope that Prometheus reaches. With none, nothing on this page is of now.",
            p.COUNT,
            [Query(f"count({m.BUILD_INFO.name})")],
            span=3,
            thresholds=limits(1, least=True),
            links=[itself],
            no_value="none",
        ),
        p.number(
            602,
            "Unknown part",
            """Share of TTFT between boundaries of which one was not observed: never guessed. High: events
            lost, hooks missing, or one engine of the pair without kvscope.""",
            p.PERCENT,
            [Query(f.class_share(UNKNOWN))],
            span=3,
            thresholds=f.UNKNOWN_LIMITS,
            links=[itself],
            decimals=1,
        ),
        p.number(
            603,
            "No partner",
            """Share of requests of which only one leg is known: the other engine is not instrumented, or
            its ring was overwritten.""",
            p.PERCENT,
            [Query(f.joined_badly_share())],
            span=3,
            thresholds=f.JOIN_LIMITS,
            links=[itself],
            decimals=1,
        ),
        p.number(
            604,
            "Events lost",
            """Overwritten before they were read, or torn. Make rings larger (KVSCOPE_SLOTS) or give the
            daemon more CPU.""",
            p.COUNT,
            [Query(or_zero(increase(series(m.EVENTS_LOST))))],
            span=3,
            thresholds=limits(1),
            links=[itself],
            decimals=0,
        ),
        p.number(
            605,
            "Hooks missing",
            """Hooks that a vLLM lacks, over all engines: the steps that they would tell are unknown.
            `kvscope status` names them.""",
            p.COUNT,
            [Query(or_zero(total(series(m.HOOKS_MISSING))))],
            span=3,
            thresholds=limits(1, 1000),
            links=[itself],
            decimals=0,
        ),
        p.number(
            606,
            "Not recording",
            "Engine processes that are gone, or whose recorder gave up. Orderly ends don't count.",
            p.COUNT,
            [Query(total(f'{m.PROCESSES.name}{{state=~"stopped|gone"}}'))],
            span=3,
            thresholds=limits(1),
            links=[itself],
            decimals=0,
        ),
        p.number(
            607,
            "Clock error",
            """Greatest bound on the error between the clocks of two legs. Steps across hosts that are
            shorter say little. 0 on one host.""",
            p.SECONDS,
            [Query(f"max({m.CLOCK_ERROR.name})")],
            span=3,
            thresholds=f.CLOCK_LIMITS,
            links=[itself],
        ),
        p.number(
            608,
            "Problems",
            "What the daemon itself complains of; `kvscope status` says it in words.",
            p.COUNT,
            [Query(total(m.PROBLEMS.name))],
            span=3,
            thresholds=limits(1),
            links=[itself],
            decimals=0,
        ),
    ]
