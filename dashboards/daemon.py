"""kvscope itself: whether the numbers of the other dashboards can be trusted."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as d

from kvscope import metrics as m
from kvscope.dashboards import figures as f
from kvscope.dashboards import links, pages
from kvscope.dashboards import panels as p
from kvscope.dashboards.pages import Row
from kvscope.dashboards.panels import Column, Query, limits
from kvscope.dashboards.promql import STEP, increase, or_zero, quantile, rate, ratio, series, total
from kvscope.steps import UNKNOWN

DAEMON = "instance"
"""Prometheus's label of what it scraped: tells daemons apart."""
_STATUS = links.Link("Status of this daemon (JSON)", "http://${__field.labels.instance}/api/v1/status", True)
_DAEMON_STATUS = links.Link(_STATUS.title, "http://${__data.fields[instance]}/api/v1/status", True)


def dashboard() -> d.Dashboard:
    return pages.dashboard(
        links.SELF,
        "kvscope / kvscope itself",
        """Whether events, hooks, clocks, joins and the store are in order. What is not observed is unknown,
        never guessed.""",
        [
            Row(100, "Can I trust these numbers?", _trust()),
            Row(200, "Are events lost?", _events()),
            Row(300, "Are legs joined, and clocks right?", _joined()),
            Row(400, "Does the daemon keep up?", _keeps_up()),
            Row(500, "Does it stumble?", _stumbles()),
            Row(600, "What is running?", _running()),
        ],
    )


def _trust() -> list[p.Panel]:
    return [
        p.number(
            101,
            "Daemons",
            "That Prometheus reaches. One that is missing takes its engines with it.",
            p.COUNT,
            [Query(f"count({m.BUILD_INFO.name})")],
            thresholds=limits(1, least=True),
            no_value="none",
        ),
        p.number(
            102,
            "Problems",
            "What daemons complain of; `kvscope status` says it in words.",
            p.COUNT,
            [Query(total(m.PROBLEMS.name))],
            thresholds=limits(1),
            decimals=0,
        ),
        p.number(
            103,
            "Unknown part of TTFT",
            "Between boundaries of which one was not observed. The rows below say why.",
            p.PERCENT,
            [Query(f.class_share(UNKNOWN))],
            thresholds=f.UNKNOWN_LIMITS,
            decimals=1,
        ),
        p.number(
            104,
            "Without a partner",
            "Share of requests of which only one leg is known.",
            p.PERCENT,
            [Query(f.joined_badly_share())],
            thresholds=f.JOIN_LIMITS,
            decimals=1,
        ),
        p.number(
            105,
            "Events lost",
            "In the window: overwritten before they were read, or torn.",
            p.COUNT,
            [Query(or_zero(increase(series(m.EVENTS_LOST))))],
            thresholds=limits(1),
            decimals=0,
        ),
        p.number(
            106,
            "Store",
            """Failing: nothing can be committed: disk full, or the file is gone. Rows wait, then rings
            overwrite.""",
            p.COUNT,
            [Query(f"max({m.STORE_FAILING.name})")],
            words={0: ("ok", p.GOOD), 1: ("failing", p.BAD)},
        ),
    ]


def _events() -> list[p.Panel]:
    return [
        p.graph(
            201,
            "Events read",
            """Per second, of the ten engines with the most. 0 while the engine works: its recorder has
            stopped, or the daemon has.""",
            p.PER_S,
            [Query(f.busiest(m.EVENTS_READ, rate(series(m.EVENTS_READ), "engine")), "{{engine}}")],
            span=8,
            height=10,
        ),
        p.graph(
            202,
            "Events lost, torn, rejected",
            f"""{p.COUNTED} Lost: the ring was overwritten before the daemon read it; make rings larger
            (KVSCOPE_SLOTS) or give the daemon CPU. Torn: damaged slots. Rejected: not understood, as of
            another version.""",
            p.COUNT,
            [
                Query(or_zero(increase(series(m.EVENTS_LOST), window=STEP)), "lost"),
                Query(or_zero(increase(series(m.EVENTS_TORN), window=STEP)), "torn (of those)"),
                Query(or_zero(increase(series(m.EVENTS_REJECTED), window=STEP)), "rejected"),
            ],
            span=6,
            colours={"lost": p.BAD},
            height=10,
        ),
        p.bars(
            203,
            "Engine processes",
            """With a ring, by state. gone: died without an end. stopped: the recorder gave up after an
            error, and the engine goes on without it.""",
            p.COUNT,
            [Query(total(m.PROCESSES.name, "state"), "{{state}}")],
            span=4,
            decimals=0,
            colours={"recording": p.GOOD, "stopped": p.BAD, "gone": p.WARN},
            height=10,
        ),
        p.rows(
            204,
            "Hooks missing",
            """By engine: its vLLM lacks what these hooks hang on, so their steps are unknown. `kvscope
            status` names them.""",
            {"engine": "Engine"},
            [Column("Hooks", total(series(m.HOOKS_MISSING), "engine", how="max"), p.COUNT, limits(1, 1000))],
            sort="Hooks",
            span=6,
            height=10,
        ),
    ]


def _joined() -> list[p.Panel]:
    return [
        p.graph(
            301,
            "How legs were joined",
            """Share of requests. remote id and push match are certain, client id is inferred. unjoined and
            peer not instrumented know one leg only. single leg: served by one engine.""",
            p.PERCENT,
            [Query(ratio(rate(series(m.JOINS), "joined_by"), rate(series(m.JOINS))), "{{joined_by}}")],
            span=8,
            stacked=True,
            greatest=1,
            colours={"unjoined": p.BAD, "peer not instrumented": p.WARN},
        ),
        p.graph(
            302,
            "Clock error",
            """Greatest bound on the error between the clocks of two legs, of the last five minutes, by
            daemon. Steps across hosts that are shorter than this say little.""",
            p.SECONDS,
            [Query(total(m.CLOCK_ERROR.name, DAEMON, how="max"), "{{instance}}")],
            span=8,
            soft_top=0.01,
            links=[_STATUS],
        ),
        p.graph(
            303,
            "Clamped requests",
            """Share of requests of which boundaries were out of order and were moved, marked as such:
            clocks, or a fault of kvscope.""",
            p.PERCENT,
            [Query(ratio(rate(series(m.CLAMPED)), rate(series(m.REQUESTS))), "clamped")],
            span=8,
        ),
    ]


def _keeps_up() -> list[p.Panel]:
    return [
        p.graph(
            401,
            "Rows that wait to be committed",
            """Of as many as may wait, by daemon. At 100 % the daemon stops reading and the rings buffer;
            then they overwrite. A faster disk, or a shorter retention.""",
            p.PERCENT,
            [
                Query(
                    ratio(total(m.WAITING.name, DAEMON), total(m.WAITING_LIMIT.name, DAEMON), DAEMON),
                    "{{instance}}",
                )
            ],
            span=6,
            greatest=1,
            links=[_STATUS],
        ),
        p.graph(
            402,
            "Commit",
            """Duration of a commit to the store. Above 1 s readers and the queue feel it: a slow disk, or a
            very large store.""",
            p.SECONDS,
            [Query(quantile(q, m.COMMIT), f"p{q * 100:g}") for q in (0.5, 0.99)],
            span=6,
        ),
        p.graph(
            403,
            "Rows stored",
            """Per second, by table. It follows the requests; samples and engines come whether there are any
            or not.""",
            p.PER_S,
            [Query(rate(m.STORED.name, "table"), "{{table}}")],
            span=6,
            stacked=True,
        ),
        p.graph(
            404,
            "Store",
            """Size of the store's file and its log, by daemon. It grows until `retention_hours` is reached,
            then stays: freed space is used again, the file never shrinks.""",
            p.BYTES,
            [Query(total(m.STORE_BYTES.name, DAEMON), "{{instance}}")],
            span=6,
            links=[_STATUS],
        ),
    ]


_TROUBLES = {
    m.FAULTS: "faults",
    m.UNTOLD: "requests not made out",
    m.UNCOUNTED: "rows not counted",
    m.REFUSED: "rows refused",
    m.STRAGGLERS: "stragglers",
    m.SAMPLES_DROPPED: "samples dropped",
}


def _stumbles() -> list[p.Panel]:
    return [
        p.bars(
            501,
            "What the daemon could not take in",
            """Over the window. faults, not made out, not counted: faults of kvscope, its log says where;
            please report them. refused: values that did not fit. stragglers: events of requests that
            are stored already, as of rings that are read again: no fault.""",
            p.COUNT,
            [Query(increase(metric.name), legend) for metric, legend in _TROUBLES.items()],
            thresholds=limits(1, 1000),
            span=6,
            decimals=0,
            many=True,
            # Some are as they should be, however many.
            colours={_TROUBLES[m.STRAGGLERS]: p.NEUTRAL},
        ),
        p.number(
            502,
            "Samples that could not be read",
            "Rounds in which a source of samples failed, over the window. vllm: its /metrics did not answer.",
            p.COUNT,
            [Query(or_zero(increase(m.SAMPLE_FAULTS.name, "source"), source="all sources"), "{{source}}")],
            span=6,
            height=8,
            thresholds=limits(1, 1000),
            decimals=0,
        ),
        p.number(
            504,
            "Traces exported",
            """Over OTLP, requests by result, over the window; 0 where no endpoint is set. failed: the
            receiver did not take them, and the store still has them.""",
            p.COUNT,
            [Query(or_zero(increase(m.EXPORTED.name, "result"), result="ok"), "{{result}}")],
            span=6,
            height=8,
            decimals=0,
            thresholds_of={"failed": limits(1)},
        ),
        p.rows(
            503,
            "Problems and unreadable files",
            """Now, by daemon. Files: a user or container other than the engines', or no ring at all.
            `kvscope status` says which.""",
            {DAEMON: "Daemon"},
            [
                Column("Problems", total(m.PROBLEMS.name, DAEMON), p.COUNT, limits(1)),
                Column("Files", total(m.UNREADABLE.name, DAEMON), p.COUNT, limits(1)),
            ],
            sort="Problems",
            span=6,
            height=8,
            links={"Daemon": [_DAEMON_STATUS]},
        ),
    ]


def _running() -> list[p.Panel]:
    return [
        p.rows(
            601,
            "Daemons",
            """Uptime, versions, series of a scrape (at most 10,000), requests not over yet. Counters begin
            at 0 when a daemon starts; rate() sees that.""",
            {DAEMON: "Daemon", "version": "Version", "schema": "Store"},
            [
                Column("Uptime", f"time() - {_told(m.STARTED)}", p.SECONDS),
                Column("Series", _told(m.SERIES), p.COUNT, limits(9000, 10_000)),
                Column("In flight", _told(m.IN_FLIGHT), p.COUNT),
                Column("Waiting rows", _told(m.WAITING), p.COUNT),
            ],
            sort="Uptime",
            span=16,
            height=7,
        ),
        p.graph(
            602,
            "Requests in flight",
            "That are not over, or not handed to the store yet.",
            p.COUNT,
            [Query(total(m.IN_FLIGHT.name), "in flight"), Query(total(m.STUCK.name), "stuck")],
            span=8,
            height=7,
            colours={"stuck": p.BAD},
        ),
    ]


def _told(metric: m.Metric) -> str:
    """A figure of each daemon, with its versions."""
    info = f"max by ({DAEMON}, version, schema) ({m.BUILD_INFO.name})"
    return f"max by ({DAEMON}) ({metric.name}) * on ({DAEMON}) group_left (version, schema) {info}"
