"""Sessions and reuse: whether a later turn finds its KV, what that saves, and what is computed twice."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as d

from kvscope import metrics as m
from kvscope.dashboards import figures as f
from kvscope.dashboards import links, pages
from kvscope.dashboards import panels as p
from kvscope.dashboards.pages import Row
from kvscope.dashboards.panels import Query, limits
from kvscope.dashboards.promql import STEP, increase, or_zero, quantile, rate, ratio, series

REUSE_STEPS = r'step=~"prefill\\.reuse_.+"'
_OFFERED = 'outcome!="not offered"'


def dashboard() -> d.Dashboard:
    return pages.dashboard(
        links.SESSIONS,
        "kvscope / Sessions and reuse",
        """Bidirectional: D keeps the KV of a turn, P reads it back for the next instead of computing it.
        And prefix caches, and what is computed although somebody had it. `kvscope top`, page Sessions,
        shows each session.""",
        [
            Row(100, "Does a later turn find its KV?", _found()),
            Row(200, "What does it save?", _saved()),
            Row(300, "What does it cost?", _cost()),
            Row(400, "Does the KV last until the next turn?", _lasts()),
            Row(500, "Is anything computed twice?", _twice()),
        ],
    )


def _found() -> list[p.Panel]:
    return [
        p.number(
            101,
            "Requests with offers",
            """Share of bidirectional requests that named KV kept by D: turns after the first. 0:
            bidirectional never engages; streaming responses carry no kv_transfer_params, so the client or
            the router has to hand them on.""",
            p.PERCENT,
            [Query(f.reuse_share(_OFFERED))],
            height=8,
            decimals=1,
            no_value="no bidirectional",
        ),
        p.number(
            102,
            "Offers that were used",
            """Share of the offers for which P read KV back. Low: it had expired, or was below the
            threshold, or P had the prefix itself (a local hit, which is better). The outcomes beside say
            which.""",
            p.PERCENT,
            [Query(f.reuse_share('outcome="pulled"', _OFFERED))],
            height=8,
            thresholds=limits(0.5, 0.8, least=True),
            decimals=1,
            no_value="no offers",
        ),
        p.graph(
            103,
            "Outcomes",
            """What became of the KV that D had kept, by request. expired: the pause between turns is longer
            than the lease. metadata missing: P did not know D yet. below threshold: too short to be worth
            it.""",
            p.REQUESTS_PER_S,
            [Query(rate(series(m.REUSE), "outcome"), "{{outcome}}")],
            span=16,
            stacked=True,
            colours={"pulled": p.GOOD, "expired": p.BAD, "failed": "dark-red", "not offered": p.NEUTRAL},
            links=[links.to_requests("Requests whose KV had expired (JSON)", "reuse_outcome=expired")],
        ),
    ]


def _saved() -> list[p.Panel]:
    # What D says of the same prompts stands apart: the two don't add up.
    return [
        p.graph(
            201,
            "Prompt tokens on P, by where their KV came from",
            """computed, cached_p (P's prefix cache), read_back (from D). They add up to the prompts. Only
            computed costs compute: more hits or more read back push it down.""",
            p.TOKENS_PER_S,
            [Query(rate(series(m.TOKENS, 'source=~"computed|cached_p|read_back"'), "source"), "{{source}}")],
            stacked=True,
            colours={"computed": "yellow", "cached_p": "green", "read_back": "blue"},
        ),
        p.graph(
            202,
            "Prompt tokens on D, by where their KV came from",
            """cached_d (D's prefix cache), transferred (from P), recomputed (P had them, and D computed
            them again). Hits on D save transfers; recomputed is waste.""",
            p.TOKENS_PER_S,
            [
                Query(
                    rate(series(m.TOKENS, 'source=~"cached_d|transferred|recomputed"'), "source"),
                    "{{source}}",
                )
            ],
            stacked=True,
            colours={"cached_d": "green", "transferred": "blue", "recomputed": "red"},
        ),
        p.graph(
            203,
            "Offered and read back",
            """Tokens whose KV D had kept, and those of them that P read. The gap is local hits, and KV that
            had gone.""",
            p.TOKENS_PER_S,
            [
                Query(or_zero(rate(series(m.REUSE_OFFERED))), "offered"),
                Query(or_zero(rate(series(m.TOKENS, 'source="read_back"'))), "read back"),
            ],
        ),
        p.graph(
            204,
            "Prefix hits",
            """Share of the prompt tokens that P, or D, found in its own prefix cache. A router with prefix
            affinity raises it.""",
            p.PERCENT,
            [
                Query(_hits("cached_p", "computed|cached_p|read_back"), "on P"),
                Query(_hits("cached_d", "cached_d|transferred|recomputed"), "on D"),
            ],
            greatest=1,
        ),
    ]


def _hits(source: str, all_sources: str) -> str:
    return ratio(
        rate(series(m.TOKENS, f'source="{source}"')), rate(series(m.TOKENS, f'source=~"{all_sources}"'))
    )


def _cost() -> list[p.Panel]:
    return [
        p.graph(
            301,
            "Reading back: added to the mean TTFT",
            """Steps in which P reads KV back before it computes. Worth it while they add less than
            computing these tokens would. Spread over all requests with a first token.""",
            p.SECONDS,
            [Query(f.step_means(REUSE_STEPS), "{{step}}")],
            stacked=True,
        ),
        p.graph(
            302,
            "Reading back: p99 of each step",
            """Of the requests that read back; percentiles don't add up. reuse_wire is the link from D to P,
            reuse_detect and reuse_dispatch follow P's step time. Click on a dot for the trace.""",
            p.SECONDS,
            [Query(f.step_quantile(0.99, REUSE_STEPS), "{{step}}", exemplar=True)],
        ),
    ]


def _lasts() -> list[p.Panel]:
    return [
        p.graph(
            401,
            "Blocks kept for later",
            """KV blocks that leases hold, of all blocks of the engine; the ten engines with the most. Kept
            KV is memory that no running request can use: if requests wait for blocks meanwhile, keep it for
            less long.""",
            p.PERCENT,
            [Query(f.kv_use("kept"), "{{engine}}")],
            span=8,
            greatest=1,
            links=[links.to_dashboard("This engine", links.ENGINES, engine=links.label("engine"))],
            height=10,
        ),
        p.graph(
            402,
            "Leases that expired",
            f"""{p.COUNTED} Kept by D: the user paused for longer than the lease lasts, or never went on,
            which is not a fault. Kept by P: D came too late for a prompt, which is one.""",
            p.COUNT,
            [
                Query(or_zero(f.expired(STEP, kept_by_d=True)), "kept by D for a later turn"),
                Query(or_zero(f.expired(STEP)), "kept by P for D"),
            ],
            span=8,
            colours={"kept by D for a later turn": p.WARN, "kept by P for D": p.BAD},
            height=10,
        ),
        p.graph(
            403,
            "Time left at release",
            """How long before its deadline a lease was released. Near 0: the next one expires. Expired ones
            count as 0.""",
            p.SECONDS,
            [Query(quantile(q, m.LEASE_MARGIN), f"p{q * 100:g}") for q in (0.01, 0.5)],
            span=8,
            height=10,
        ),
    ]


def _twice() -> list[p.Panel]:
    return [
        p.graph(
            501,
            "Requests that were computed twice",
            f"""D computed prompt tokens that P had computed. {p.COUNTED} Nothing fails and nothing is
            logged; TTFT and TPOT suffer. Look for expired leases, failed transfers and preemptions at the
            same time.""",
            p.COUNT,
            [Query(_rare(m.RECOMPUTED), "{{connector}}")],
            links=[links.to_requests("These requests (JSON)", "recomputed_tokens>0")],
        ),
        p.graph(
            502,
            "Preemptions",
            f"""Requests that had to give back their blocks. {p.COUNTED} More KV memory, fewer requests at
            once, or fewer kept blocks.""",
            p.COUNT,
            [Query(_rare(m.PREEMPTIONS), "{{connector}}")],
        ),
    ]


def _rare(metric: m.Metric) -> str:
    return or_zero(increase(series(metric), "connector", window=STEP), connector="none")
