"""Pairs and transfers: which pair is slow, and whether it is its link, its descriptors or its leases."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as d

from kvscope import metrics as m
from kvscope.dashboards import figures as f
from kvscope.dashboards import links, pages
from kvscope.dashboards import panels as p
from kvscope.dashboards.overview import failures_table
from kvscope.dashboards.pages import Row
from kvscope.dashboards.panels import Column, Limit, Query
from kvscope.dashboards.promql import (
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
from kvscope.steps import COORDINATION, TRANSFER, UNKNOWN

PAIR = ("p_engine", "d_engine")
PAIR_LEGEND = f"{{{{p_engine}}}} {p.ARROW} {{{{d_engine}}}}"


def dashboard() -> d.Dashboard:
    return pages.dashboard(
        links.PAIRS,
        "kvscope / Pairs and transfers",
        """Each P → D pair: how long requests wait there, what moves, and what goes wrong between the two
        engines.""",
        [
            Row(100, "Which pair is slow?", _which()),
            Row(200, "Is it the link?", _link()),
            Row(300, "Is it the descriptors?", _descriptors()),
            Row(400, "Do pairs meet: handshakes and failures?", _meet()),
            Row(500, "Do leases last until the KV is read?", _leases()),
            Row(600, "Who talks to whom?", [_graph()]),
        ],
        pairs=True,
    )


def _of(metric: m.Metric, *matchers: str) -> str:
    return series(metric, *matchers, pairs=True)


def _most(vector: str) -> str:
    """Of the pairs with the most requests of the window, the same at each point."""
    ranked = f"sum by (p_engine, d_engine) (increase({_of(m.PAIR_REQUESTS)}[$__range] @ end()))"
    return top(f.SHOWN, vector, ranked, *PAIR)


def _graph() -> p.Panel:
    return p.pairs_graph(
        601,
        "Pairs as a graph",
        """Engines, and the requests between them. An engine apart from the others is one that the router
        does not reach.""",
    )


def _which() -> list[p.Panel]:
    by = (*PAIR, "connector")
    requests = increase(_of(m.PAIR_REQUESTS), *by)
    seconds = increase(_of(m.PAIR_TTFT_CLASS), *by)
    moved = increase(_of(m.PAIR_BYTES), *by)
    of_seconds = rate(_of(m.PAIR_TTFT_CLASS), *PAIR)
    this = links.to_dashboard(
        "This pair", links.PAIRS, p_engine=links.label("p_engine"), d_engine=links.label("d_engine")
    )
    these = links.to_requests(
        "Its requests, slowest first (JSON)",
        f"p_engine={links.label('p_engine')}",
        f"d_engine={links.label('d_engine')}",
    )
    of_series = [this, these]
    row_links = [
        links.to_dashboard(
            "This pair", links.PAIRS, p_engine=links.cell("p_engine"), d_engine=links.cell("d_engine")
        ),
        links.to_requests(
            "Its requests, slowest first (JSON)",
            f"p_engine={links.cell('p_engine')}",
            f"d_engine={links.cell('d_engine')}",
        ),
        links.to_dashboard("Its prefill engine", links.ENGINES, engine=links.cell("p_engine")),
        links.to_dashboard("Its decode engine", links.ENGINES, engine=links.cell("d_engine")),
        links.to_traces("Traces of its decode engine", links.cell("d_engine")),
    ]

    def share(class_: str) -> str:
        return ratio(increase(_of(m.PAIR_TTFT_CLASS, f'class="{class_}"'), *by), seconds, *by)

    def column(title: str, expr: str, unit: str, thresholds: list[Limit] | None = None) -> Column:
        return Column(title, expr, unit, thresholds or ())

    return [
        p.rows(
            101,
            "Pairs",
            """Every pair with requests in the window. Requests without a first token count as requests and
            add no time. One slow pair: its link or an engine of it. All pairs of one engine: that engine.
            All pairs: a setting, or the router. Moved: bytes of KV, in all and by a request.""",
            {"p_engine": "Prefill engine", "d_engine": "Decode engine", "connector": "Connector"},
            [
                column("Requests", requests, p.COUNT),
                column("Mean TTFT", ratio(seconds, requests, *by), p.SECONDS),
                column("Coordination", share(COORDINATION), p.PERCENT, f.COORDINATION_LIMITS),
                column("Transfer", share(TRANSFER), p.PERCENT, f.TRANSFER_LIMITS),
                column("Unknown", share(UNKNOWN), p.PERCENT, f.UNKNOWN_LIMITS),
                column("Moved", moved, p.BYTES),
                column("By a request", ratio(moved, requests, *by), p.BYTES),
            ],
            sort="Mean TTFT",
            height=10,
            links={"Prefill engine": row_links, "Decode engine": row_links},
        ),
        p.graph(
            102,
            "Coordination share by pair",
            """Of the TTFT of the pair's requests; the ten busiest pairs. A pair that leaves the others
            waits for something of its own: an engine with long steps, a slow control path.""",
            p.PERCENT,
            [
                Query(
                    _most(
                        ratio(
                            rate(_of(m.PAIR_TTFT_CLASS, f'class="{COORDINATION}"'), *PAIR),
                            of_seconds,
                            *PAIR,
                        )
                    ),
                    PAIR_LEGEND,
                )
            ],
            height=10,
            links=of_series,
        ),
        p.graph(
            103,
            "Mean TTFT by pair",
            """The ten busiest pairs. A pair far above the others is worth a trace, or a router that avoids
            it.""",
            p.SECONDS,
            [Query(_most(ratio(of_seconds, rate(_of(m.PAIR_REQUESTS), *PAIR), *PAIR)), PAIR_LEGEND)],
            height=10,
            links=of_series,
        ),
        p.graph(
            104,
            "Bytes moved by pair",
            """KV that crossed between the two engines, all ranks; the ten busiest pairs. It falls with
            prefix hits on D.""",
            p.BYTES_PER_S,
            [Query(_most(rate(_of(m.PAIR_BYTES), *PAIR)), PAIR_LEGEND)],
            height=10,
            links=of_series,
        ),
        p.graph(
            105,
            "Requests by pair",
            "The ten busiest pairs. Uneven: the router prefers some, which may be meant (prefix affinity).",
            p.REQUESTS_PER_S,
            [Query(_most(rate(_of(m.PAIR_REQUESTS), *PAIR)), PAIR_LEGEND)],
            height=10,
            links=of_series,
        ),
    ]


def _link() -> list[p.Panel]:
    return [
        p.graph(
            201,
            "Rate while bytes move",
            """Bytes over the most time that they can have been on the wire: what a transfer achieves at
            least. Compare with the link: a tenth of it is a wrong transport (TCP where RDMA should be, or a
            GET where only PUT is fast: READ against WRITE).""",
            p.BYTES_PER_S,
            [
                Query(
                    ratio(
                        rate(series(m.TRANSFER_BYTES), "operation"),
                        rate(series(m.TRANSFER_UPPER, part="sum"), "operation"),
                        "operation",
                    ),
                    "{{operation}}",
                )
            ],
        ),
        p.graph(
            202,
            "Time on the wire, mean",
            """Between the least and the most that polls allow: completion is only seen by a poll, once per
            engine step. A wide gap is not the network: it is readiness.detect.""",
            p.SECONDS,
            [
                Query(mean(m.TRANSFER_LOWER, "operation"), "{{operation}} at least"),
                Query(mean(m.TRANSFER_UPPER, "operation"), "{{operation}} at most"),
            ],
        ),
        p.graph(
            203,
            "Time on the wire at most, p99",
            """Of single transfers, one per rank. It grows with load where transfers share a link.""",
            p.SECONDS,
            [Query(quantile(0.99, m.TRANSFER_UPPER, "operation"), "{{operation}}")],
        ),
        p.graph(
            204,
            "Transfers",
            """NIXL transfers per second, one per rank and direction, by how they ended; open: never seen to
            end.""",
            p.PER_S,
            [Query(rate(series(m.TRANSFERS), "operation", "state"), "{{operation}} {{state}}")],
        ),
    ]


def _descriptors() -> list[p.Panel]:
    of_transfers = rate(series(m.TRANSFERS), "operation")
    descriptors = rate(series(m.TRANSFER_DESCRIPTORS), "operation")
    return [
        p.graph(
            301,
            "Post call",
            """Time in the call that hands a transfer to NIXL. It blocks the thread that posts: on D (pull)
            the engine's own, so it delays every other request's next token. Fewer, larger descriptors
            shorten it.""",
            p.SECONDS,
            [
                Query(quantile(q, m.TRANSFER_POST, "operation"), f"{{{{operation}}}} p{q * 100:g}")
                for q in (0.5, 0.99)
            ],
            span=8,
            soft_top=0.0001,
        ),
        p.graph(
            302,
            "Descriptors of a transfer, mean",
            """After merging. Thousands mean small blocks: a larger block size or a contiguous layout makes
            fewer.""",
            p.COUNT,
            [Query(ratio(descriptors, of_transfers, "operation"), "{{operation}}")],
            span=8,
        ),
        p.graph(
            303,
            "Bytes of a descriptor, mean",
            "A few kilobytes are slow on any transport: the call costs more than the bytes.",
            p.BYTES,
            [
                Query(
                    ratio(rate(series(m.TRANSFER_BYTES), "operation"), descriptors, "operation"),
                    "{{operation}}",
                )
            ],
            span=8,
        ),
    ]


def _meet() -> list[p.Panel]:
    return [
        p.graph(
            401,
            "Handshakes",
            f"""That engines asked for. {p.COUNTED} Each pair needs one before its first transfer; failed
            ones leave requests waiting on D until a time-out.""",
            p.COUNT,
            [
                Query(
                    or_zero(total(grown(series(m.HANDSHAKES), STEP), "result"), result="none"),
                    "{{result}}",
                )
            ],
            span=8,
            colours={"ok": p.GOOD, "failed": p.BAD},
        ),
        p.bars(
            402,
            "Duration of handshakes",
            """Of all handshakes since the daemon began. Seconds, on the path of the first request of each
            pair: send one through each pair before traffic arrives.""",
            p.SECONDS,
            [
                # They are too rare for a window: a pair meets once.
                Query(
                    f"histogram_quantile({q}, {total(series(m.HANDSHAKE, part='bucket'), 'le')}) >= 0",
                    f"p{q * 100:g}",
                )
                for q in (0.5, 0.99)
            ],
            span=8,
            no_value="none so far",
        ),
        failures_table(
            403,
            """Logged by vLLM's connector (nixl), hooks of kvscope that raised (hook), recorders that
            stopped (recorder). A failure on one side is often told to nobody on the other.""",
        ),
    ]


def _leases() -> list[p.Panel]:
    renewed = total(grown(series(m.LEASE_RENEWALS), STEP), "engine")
    return [
        p.graph(
            501,
            "Leases that ended",
            f"""Blocks kept for the peer, per rank, by how that ended. {p.COUNTED} Expired: the peer came too
            late or never, and the request failed or was computed anew. Lost: the engine is gone.""",
            p.COUNT,
            [Query(or_zero(total(grown(series(m.LEASES), STEP), "end"), end="none"), "{{end}}")],
            colours={"released": p.GOOD, "expired": p.BAD, "lost": "purple"},
            height=10,
        ),
        p.graph(
            502,
            "Time left at release",
            """How long before its deadline a lease was released: p1 and p50. Near 0 the next slow request
            expires: lengthen the lease (or find out why D comes late). Expired ones count as 0, in
            bidirectional also the many that D kept for a turn that never came.""",
            p.SECONDS,
            [Query(quantile(q, m.LEASE_MARGIN), f"p{q * 100:g}") for q in (0.01, 0.5)],
            height=10,
        ),
        p.graph(
            503,
            "Leases held",
            """Leases that are not over, of the ten engines with the most. Held ones that only grow are
            leaks: P's blocks never come back. What D keeps for later turns is among them.""",
            p.COUNT,
            [Query(f.gauges(m.LEASES_HELD, how="sum"), "{{engine}}")],
            links=[links.to_dashboard("This engine", links.ENGINES, engine=links.label("engine"))],
            height=10,
        ),
        p.graph(
            504,
            "Leases renewed",
            f"""Heartbeats that moved the deadline of leases that are over, on the ten engines with the most.
            {p.COUNTED} Leases that expire without any: the peer's heartbeats do not reach this engine, or
            name requests that it does not know.""",
            p.COUNT,
            [
                Query(
                    or_zero(f.busiest(m.LEASE_RENEWALS, renewed), engine="none"),
                    "{{engine}}",
                )
            ],
            height=10,
        ),
    ]
