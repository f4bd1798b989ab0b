"""Engines and interference: what moving KV does to generation, and what kvscope itself costs."""

from __future__ import annotations

from grafana_foundation_sdk.models import dashboard as d

from kvscope import metrics as m
from kvscope.dashboards import figures as f
from kvscope.dashboards import links, pages
from kvscope.dashboards import panels as p
from kvscope.dashboards.overview import THIS_ENGINE, engines_table, failures_table
from kvscope.dashboards.pages import Row
from kvscope.dashboards.panels import Column, Query, limits
from kvscope.dashboards.promql import grown, or_zero, quantile, rate, series, total

_THIS = links.to_dashboard("This engine alone", links.ENGINES, engine=links.label("engine"))


def dashboard() -> d.Dashboard:
    return pages.dashboard(
        links.ENGINES,
        "kvscope / Engines and interference",
        """Each engine: its steps, its KV blocks, its leases; whether moving KV slows generation; what
        kvscope costs.""",
        [
            Row(100, "Which engine?", [engines_table(101, _ENGINES)]),
            Row(200, "Does moving KV slow generation?", _interference()),
            Row(300, "Has it room?", _room()),
            Row(400, "What goes wrong on it?", _wrong()),
            Row(500, "What does kvscope cost?", _hooks()),
            Row(600, "What runs here?", [_versions()]),
        ],
    )


_ENGINES = """Every engine that was seen in the last ten minutes. Long steps delay all that happens at step
           boundaries. KV held near 100 %: requests wait for blocks. Leases that only grow are leaks. Click
           on an engine."""


def _interference() -> list[p.Panel]:
    return [
        p.graph(
            201,
            "TPOT",
            """Time per output token after the first. If it rises with transfers (below), posting them on
            the engine's thread or sharing the memory bus slows generation. Click on a dot for its trace.""",
            p.SECONDS,
            [Query(quantile(q, m.TPOT), f"p{q * 100:g}", exemplar=q == 0.99) for q in (0.5, 0.9, 0.99)],
            links=[links.to_requests("Slowest requests (JSON)")],
        ),
        p.graph(
            202,
            "TPOT p99 by connector",
            """The same load under another connector interferes otherwise: pull posts on D's engine thread,
            push on a thread of P's own.""",
            p.SECONDS,
            [Query(quantile(0.99, m.TPOT, "connector"), "{{connector}}")],
        ),
        p.graph(
            203,
            "Engine step",
            """Mean time from one engine step to the next, while the engine stepped; the ten engines with the
            longest. Dispatch, detection and
            report of KV wait for the end of a step, so this is the unit of coordination wait. Chunked
            prefill or smaller batches shorten it.""",
            p.SECONDS,
            [Query(f.gauges(m.STEP_MEAN), "{{engine}}")],
            links=[_THIS],
            height=10,
        ),
        p.graph(
            204,
            "Seconds in post calls, per second",
            """How much of a thread handing transfers to NIXL takes, all engines together: READ on D's
            engine thread, WRITE on P's writer. Above 5 % of the engines' number it is worth larger
            blocks.""",
            p.PERCENT,
            [
                Query(
                    or_zero(rate(series(m.TRANSFER_POST, part="sum"), "operation"), operation="none"),
                    "{{operation}}",
                )
            ],
            links=[links.to_dashboard("Pairs and transfers", links.PAIRS)],
            height=10,
        ),
        p.graph(
            205,
            "Output tokens",
            """Generated per second. It falls when TPOT rises, or when fewer requests arrive: see the
            requests of the overview.""",
            p.TOKENS_PER_S,
            [Query(rate(series(m.OUTPUT_TOKENS), "connector"), "{{connector}}")],
            stacked=True,
        ),
        p.graph(
            206,
            "KV moved",
            "Bytes that transfers moved. Compare with TPOT above, at the same moment.",
            p.BYTES_PER_S,
            [Query(or_zero(rate(series(m.TRANSFER_BYTES), "operation"), operation="none"), "{{operation}}")],
            links=[links.to_dashboard("Pairs and transfers", links.PAIRS)],
        ),
    ]


def _room() -> list[p.Panel]:
    uses = {
        "running": "Held by requests that compute. Near 100 %: more KV memory, or fewer requests at once.",
        "staging": """Held by requests whose KV is not all here yet: D reserved them and waits for P. Much
        of it starves requests that could run: admit fewer, or speed transfers up.""",
        "kept": """Held by leases for the peer, after the request's own end. Much of it on P: D reads late.
        On D (bidirectional): turns that may never come.""",
    }
    return [
        p.graph(
            301 + i,
            f"KV blocks {use}",
            f"{meaning} Part of the engine's blocks, of the ten engines with the most.",
            p.PERCENT,
            [Query(f.kv_use(use), "{{engine}}")],
            span=8,
            height=10,
            greatest=1,
            links=[_THIS],
        )
        for i, (use, meaning) in enumerate(uses.items())
    ]


def _wrong() -> list[p.Panel]:
    return [
        failures_table(
            401,
            """Over the window: vLLM's connector (nixl), hooks of kvscope that raised (hook), recorders that
            gave up (recorder).""",
        ),
        _by_engine(
            402,
            "Leases expired",
            "By the engine that kept the blocks, over the window. Its peers come too late, or never.",
            "Expired",
            series(m.LEASES, 'end="expired"'),
        ),
        _by_engine(
            403,
            "Handshakes that failed",
            "By the engine that asked, over the window. Until one succeeds no KV reaches it from that peer.",
            "Failed",
            series(m.HANDSHAKES, 'result="failed"'),
        ),
    ]


def _by_engine(id_: int, title: str, description: str, column: str, counter: str) -> p.Panel:
    return p.rows(
        id_,
        title,
        description,
        {"engine": "Engine"},
        [Column(column, or_zero(total(grown(counter), "engine"), engine="none"), p.COUNT, limits(1))],
        sort=column,
        span=8,
        height=8,
        links={"Engine": [THIS_ENGINE]},
    )


def _hooks() -> list[p.Panel]:
    return [
        p.graph(
            501,
            "Time in kvscope's hooks",
            """Part of the time of the engine's process that spends most in hooks; the ten engines with the
            most. Above 1 % something is
            wrong: `make bench` says what it should be. KVSCOPE_ENABLE=0 and a restart take kvscope out.""",
            p.PERCENT,
            [Query(f.gauges(m.HOOK_SHARE), "{{engine}}")],
            thresholds=[p.Limit(None, "transparent"), p.Limit(0.01, p.WARN), p.Limit(0.03, p.BAD)],
            links=[_THIS],
            height=10,
        ),
        p.graph(
            502,
            "Events recorded",
            "Per second, of the ten engines with the most. It follows the requests and never the tokens.",
            p.PER_S,
            [Query(f.busiest(m.EVENTS_READ, rate(series(m.EVENTS_READ), "engine")), "{{engine}}")],
            links=[_THIS],
            height=10,
        ),
    ]


_HEADERS = {"vllm": "vLLM", "kvscope": "kvscope"}


def _versions() -> p.Panel:
    by = ("engine", "role", "connector", "model", "host", "vllm", "kvscope")
    return p.rows(
        601,
        "Versions",
        """Unlike versions in one fleet are a cause of failed handshakes, and make comparisons void. Hooks
        missing: this vLLM lacks what kvscope hangs on; `kvscope status` names them.""",
        {name: _HEADERS.get(name, name.capitalize()) for name in by},
        [
            Column(
                "Hooks missing",
                f"max by ({', '.join(by)}) ({series(m.ENGINE_INFO)}) * on (engine) group_left () "
                + total(series(m.HOOKS_MISSING), "engine", how="max"),
                p.COUNT,
                limits(1, 1000),
            )
        ],
        sort="Hooks missing",
        links={"Engine": [THIS_ENGINE]},
    )
