"""Request flow: both legs, step by step, in the order in which a request goes through them."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as d

from kvscope import metrics as m
from kvscope.dashboards import figures as f
from kvscope.dashboards import links, pages
from kvscope.dashboards import panels as p
from kvscope.dashboards.pages import Row
from kvscope.dashboards.panels import Column, Query, limits
from kvscope.dashboards.promql import RANGE, grown, increase, or_zero, quantile, rate, ratio, series, total
from kvscope.steps import COORDINATION

_SLOWEST = links.to_requests("Slowest requests (JSON)")

PREFILL = r'step=~"prefill\\.(frontend|queue|blocks|compute)"'
REGISTRATION = r'step=~"registration\\..+"'
TRANSFER = r'step=~"(transfer\\..+|readiness\\.detect)"'
READINESS = r'step=~"readiness\\.(signal|report|promote|admit)"'
FIRST_STEP = r'step=~"decode\\.first_step"'


def dashboard() -> d.Dashboard:
    return pages.dashboard(
        links.FLOW,
        "kvscope / Request flow",
        """One request through both engines: prefill leg, registration, transfer, readiness, decode leg.
        Steps on the critical path only: they add up to the time to first token.""",
        [
            Row(100, "Where does the time to first token go?", _whole()),
            Row(200, "Prefill leg: does it compute, or wait its turn?", _prefill()),
            Row(300, "Registration: is D asked, and has it room, in time?", _registration()),
            Row(400, "Transfer: are bytes moving, or waiting?", _transfer()),
            Row(500, "Readiness: how soon is the KV noticed?", _readiness()),
            Row(600, "Decode leg: does the first step come at once?", _decode()),
            Row(700, "Which requests?", _requests()),
        ],
        traces=True,
    )


def _requests() -> list[p.Panel]:
    return [
        p.found_traces(
            701,
            "Requests of one engine (Traces of)",
            """The latest requests, in the window, of the engine that is chosen above, with their durations
            from arrival to the last token. Click on one for its waterfall over both legs.""",
            "$traced",
        ),
        p.one_trace(
            702,
            "One request (Trace)",
            """The waterfall of the request whose trace id stands above: exemplars, `kvscope requests` and the
            client's own trace tell it. Steps on the critical path add up to its TTFT; overlapped ones stand
            beside them.""",
            "$trace",
        ),
    ]


def _whole() -> list[p.Panel]:
    return [
        p.graph(
            101,
            "Mean TTFT by class",
            """What each class adds to the mean TTFT; means add up. The class that grows in a spike is its
            cause.""",
            p.SECONDS,
            [Query(f.class_means(), "{{class}}")],
            stacked=True,
            colours=p.CLASS_COLOURS,
            links=[_SLOWEST],
        ),
        p.graph(
            102,
            "p99 of each class",
            """The 99th percentile of the part of a request's TTFT in each class, each by itself: they are
            of different requests and don't add up to the p99 of TTFT. Click on a dot for the trace of that
            request.""",
            p.SECONDS,
            [Query(quantile(0.99, m.TTFT_SPLIT, "class"), "{{class}}", exemplar=True)],
            colours=p.CLASS_COLOURS,
            links=[_SLOWEST],
        ),
        _steps_table(),
    ]


def _steps_table() -> p.Panel:
    by = ("step", "class", "role")
    sums = rate(series(m.STEP, f.IN_TTFT, part="sum"), *by, window=RANGE)
    every = rate(series(m.STEP, f.IN_TTFT, part="sum", every="role"), window=RANGE)
    counts = rate(series(m.STEP, f.IN_TTFT, part="count"), *by, window=RANGE)

    def percentile(q: float) -> str:
        return quantile(q, m.STEP, *by, matchers=(f.IN_TTFT,), window=RANGE)

    return p.rows(
        103,
        "Steps",
        """Every step on the critical path, over the window. Share is of the time of all steps; the others
        are of the requests that passed through the step. A step with a small share is not worth your time,
        however large its p99. docs/steps.md says what each is.""",
        {"step": "Step", "class": "Class", "role": "Side"},
        [
            Column("Share", ratio(sums, every), p.PERCENT, limits(0.15, 0.3)),
            Column("Mean", ratio(sums, counts, *by), p.SECONDS),
            Column("p50", percentile(0.5), p.SECONDS),
            Column("p99", percentile(0.99), p.SECONDS),
            Column("Requests", increase(series(m.STEP, f.IN_TTFT, part="count"), *by), p.COUNT),
        ],
        sort="Share",
        height=12,
    )


def _both(id_: int, name: str, matcher: str, means: str, tails: str) -> list[p.Panel]:
    """What a stage's steps add to the mean TTFT, and their p99."""
    return [
        p.graph(
            id_,
            f"{name}: added to the mean TTFT",
            f"""{means} Spread over all requests with a first token, so that the steps add up. Requests that
            never had one add their steps too.""",
            p.SECONDS,
            [Query(f.step_means(matcher), "{{step}}")],
            stacked=True,
            links=[_SLOWEST],
        ),
        p.graph(
            id_ + 1,
            f"{name}: p99 of each step",
            f"""{tails} Of the requests that passed through the step; percentiles don't add up. Click on
            a dot for the trace of that request.""",
            p.SECONDS,
            [Query(f.step_quantile(0.99, matcher), "{{step}}", exemplar=True)],
            links=[_SLOWEST],
        ),
    ]


def _prefill() -> list[p.Panel]:
    return _both(
        201,
        "Prefill",
        PREFILL,
        """queue and blocks: P has no place or no free KV blocks: more prefill, or leases that end sooner.
        compute: faster engines or more prefix hits. frontend: tokenizing and the API server.""",
        "A p99 of prefill.queue far above its p50 is a burst or a router that does not balance.",
    )


def _registration() -> list[p.Panel]:
    return [
        *_both(
            301,
            "Registration",
            REGISTRATION,
            """route: router, HTTP and D's frontend: a router that sends both legs at once hides it. admit
            and blocks: D has no place or no free KV blocks. handshake: a pair that had not met. notify: D's
            registration had not reached P's writer.""",
            """registration.handshake in seconds, and only once for each pair, is a first request: warm
            pairs up.""",
        ),
        p.graph(
            303,
            "Lead of D",
            """How much earlier than the end of prefill D was ready. Above 0 the hand-over costs nothing,
            which is what push buys. Below 0 (a lag) the request waited that long for D: a router that asks
            D only after P, or a full D. Click on a dot for its trace.""",
            p.SECONDS,
            [
                Query(quantile(q, m.LEAD, "connector"), f"{{{{connector}}}} p{q * 100:g}", exemplar=q == 0.5)
                for q in (0.1, 0.5, 0.9)
            ],
            signed=True,
            links=[_SLOWEST],
        ),
        p.number(
            304,
            "Handshakes of engines",
            """NIXL handshakes that engines asked for in the window. Many, with requests that wait for them,
            mean pairs that come and go. See the pairs dashboard for their duration.""",
            p.COUNT,
            [
                Query(
                    or_zero(total(grown(series(m.HANDSHAKES)), "result"), result="none"),
                    "{{result}}",
                )
            ],
            span=6,
            height=8,
            links=[links.to_dashboard("Pairs and transfers", links.PAIRS)],
            decimals=0,
            thresholds_of={"failed": limits(1)},
        ),
        p.bars(
            305,
            "D was late",
            """Share of requests for which D was not ready when prefill had finished, over the window. Under
            push near 100 % means a sequential router; under pull it is always so.""",
            p.PERCENT,
            [Query(f.late_share(), "{{connector}}")],
            span=6,
            greatest=1,
            decimals=0,
            no_value="not known",
        ),
        p.bars(
            306,
            "Early-binding regret",
            """Would a later choice of decoder have helped? Mean time that a request waited for capacity on
            its decoder after prefill, beyond what requests of the same second waited on the least loaded
            other one: at most what a router saves that chooses D at the hand-over. Counted two minutes
            after it. Near 0 the router balances well, or all decoders are full.""",
            p.SECONDS,
            [Query(f.mean_regret(), "{{connector}}")],
            span=6,
            no_value="one decoder only",
        ),
    ]


def _transfer() -> list[p.Panel]:
    return _both(
        401,
        "Transfer",
        TRANSFER,
        """dispatch: both sides are ready, but transfers are posted at engine steps or when a thread wakes.
        post: handing descriptors to NIXL: larger blocks make fewer. wire: bytes. detect: the bytes are
        there, but completion is looked for once per engine step.""",
        "A wire that grows with load shares its link; one that is slow alone has the wrong transport.",
    )


def _readiness() -> list[p.Panel]:
    return _both(
        501,
        "Readiness",
        READINESS,
        """signal: in push, D's worker takes in notifications once per step. report: the scheduler hears of
        it at the end of a step, from the slowest rank. promote: its next pass. admit: no place in D's
        batch. All but admit follow the length of D's steps.""",
        "readiness.admit alone is capacity: more decode engines; the others are D's step time.",
    )


def _decode() -> list[p.Panel]:
    return [
        *_both(
            601,
            "Decode",
            FIRST_STEP,
            "The step that gives the first token.",
            "Long where D's batch is large or a prefill is mixed into it.",
        ),
        p.graph(
            603,
            "Tokens",
            "Output tokens per second, and prompt tokens that D had to compute although P had computed them.",
            p.TOKENS_PER_S,
            [
                Query(rate(series(m.OUTPUT_TOKENS)), "output"),
                Query(or_zero(rate(series(m.TOKENS, 'source="recomputed"'))), "recomputed by D"),
            ],
        ),
        p.graph(
            604,
            "Coordination by side",
            """Coordination wait that is spent on P's side and on D's side, of all TTFT. It says whose step
            time or router to look at.""",
            p.PERCENT,
            [
                Query(
                    ratio(
                        rate(series(m.STEP, f'class="{COORDINATION}"', part="sum"), "role"),
                        rate(series(m.STEP, f.IN_TTFT, part="sum", every="role")),
                    ),
                    "{{role}}",
                )
            ],
            stacked=True,
        ),
    ]
