"""Jaeger's query API: what Grafana's Jaeger source reads of it, and what it turns away."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.testclient import TestClient

from kvscope import events, query, schema, spans
from kvscope.collectors import jaeger
from kvscope.collectors.api import create_app
from kvscope.collectors.daemon import Daemon
from kvscope.collectors.jaeger import Jaeger
from kvscope.collectors.store import Store
from kvscope.demo.simulate import Fleet
from kvscope.errors import UsageError
from kvscope.ring import About, RingWriter
from kvscope.settings import Settings
from kvscope.steps import BY_NAME

from .collecting import row, until

OWN_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
Answer = dict[str, Any]

# --- what Grafana reads: its Go structs, which refuse values of other types -------------------------------


class KeyValue(msgspec.Struct):
    key: str
    value: str | int | bool
    type: str


class Reference(msgspec.Struct, rename={"ref_type": "refType", "span_id": "spanID", "trace_id": "traceID"}):
    ref_type: str
    span_id: str
    trace_id: str


class JaegerSpan(
    msgspec.Struct,
    rename={
        "trace_id": "traceID",
        "span_id": "spanID",
        "process_id": "processID",
        "operation": "operationName",
        "start_us": "startTime",
        "duration_us": "duration",
    },
):
    trace_id: str
    span_id: str
    process_id: str
    operation: str
    start_us: int
    duration_us: int
    logs: list[Any]
    references: list[Reference]
    tags: list[KeyValue]
    warnings: list[str] | None
    flags: int

    def tag(self, key: str) -> object:
        return next((tag.value for tag in self.tags if tag.key == key), None)


class Process(msgspec.Struct, rename={"service": "serviceName"}):
    service: str
    tags: list[KeyValue]


class JaegerTrace(msgspec.Struct, rename={"trace_id": "traceID"}):
    trace_id: str
    processes: dict[str, Process]
    spans: list[JaegerSpan]
    warnings: list[str] | None


class JaegerTraces(msgspec.Struct):
    data: list[JaegerTrace]
    limit: int
    offset: int
    total: int


class AnyValue(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    """Without boolValue and doubleValue: some versions want texts there, others don't."""

    string_value: str = ""
    int_value: str = ""


class Attribute(msgspec.Struct):
    key: str
    value: AnyValue


class OtlpLink(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str
    attributes: list[Attribute]


class Status(msgspec.Struct):
    message: str = ""
    code: int = 0


class OtlpSpan(msgspec.Struct, rename="camel"):
    trace_id: str
    span_id: str
    parent_span_id: str
    name: str
    kind: int
    start_time_unix_nano: str
    end_time_unix_nano: str
    attributes: list[Attribute]
    links: list[OtlpLink]
    status: Status


class OtlpScope(msgspec.Struct):
    spans: list[OtlpSpan]
    scope: dict[str, str]


class Resource(msgspec.Struct):
    attributes: list[Attribute]


class ResourceSpans(msgspec.Struct, rename={"scopes": "scopeSpans"}):
    resource: Resource
    scopes: list[OtlpScope]


class OtlpResult(msgspec.Struct, rename={"resources": "resourceSpans"}):
    resources: list[ResourceSpans]


class OtlpTraces(msgspec.Struct):
    result: OtlpResult


# --- a daemon with simulated requests and a few of special kinds ------------------------------------------


def waterfall(*steps: tuple[str, int]) -> list[Answer]:
    entries, at = [], 0
    for name, ns in steps:
        entries.append(
            {
                "step": BY_NAME[name].code,
                "from_ns": at,
                "ns": ns,
                "critical": True,
                "observed": 0,
                "error_ns": 0,
            }
        )
        at += ns
    return entries


def special(number: int, **columns: Any) -> tuple[Any, ...]:
    """A row of a request a minute ago that took 10 ms of prefill and 3 ms of the first step."""
    values: Answer = {
        "id": number,
        "arrived_at_ns": time.time_ns() - 60 * 10**9 + number,
        "label": "",
        "connector": "pull",
        "outcome": "finished",
        "p_engine": "special-p",
        "d_engine": "special-d",
        "ttft_ns": 13_000_000,
        "prefill_compute_ns": 10_000_000,
        "decode_first_step_ns": 3_000_000,
        "decode_generate_ns": 7_000_000,
        "read_after_expiry": False,
        "waterfall": waterfall(("prefill.compute", 10_000_000), ("decode.first_step", 3_000_000)),
    }
    return row("requests", **values | columns)


SPECIAL = [
    special(101, session=101, turn=1, trace_id=OWN_TRACE),
    special(102, session=101, turn=2),
    special(103, outcome="error", outcome_detail="KVLoadError", ttft_ns=None, decode_generate_ns=None),
    special(104, trace_id=OWN_TRACE.upper(), p_engine="a/b 'c'"),
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("jaeger")
    store = Store(folder / "s.duckdb")
    store.put({"requests": SPECIAL})
    assert store.close()
    settings = Settings(dir=folder / "rings", store=folder / "s.duckdb", sample_seconds=0)
    fleets = [Fleet(folder / "rings", mode, 4096, seed) for seed, mode in enumerate(("push", "pull"))]
    for fleet in fleets:
        for _ in range(12):
            fleet.request()
    daemon = Daemon(settings)
    daemon.start()
    until(lambda: stored(daemon) == 24 + len(SPECIAL))
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def http(daemon: Daemon) -> Iterator[TestClient]:
    with TestClient(create_app(daemon), base_url="http://127.0.0.1") as client:
        yield client


def stored(daemon: Daemon) -> int:
    return int(sql(daemon, "SELECT count(*) FROM requests")[0][0])


def sql(daemon: Daemon, text: str) -> list[tuple[Any, ...]]:
    with daemon.cursor() as cursor:
        return cursor.execute(text).fetchall()


def search(http: TestClient, **parameters: str | int) -> list[JaegerTrace]:
    answer = http.get("/api/traces", params=parameters)
    assert answer.status_code == 200, answer.text
    return msgspec.json.decode(answer.content, type=JaegerTraces).data


def ids(found: list[JaegerTrace]) -> set[int]:
    return {
        int(str(span.tag("kvscope.id"))) for trace in found for span in trace.spans if span.tag("kvscope.id")
    }


def chosen(daemon: Daemon, where: str) -> set[int]:
    return {id_ for (id_,) in sql(daemon, f"SELECT id FROM requests WHERE {where}")}


# --- v2 ---------------------------------------------------------------------------------------------------


def test_services_are_the_engines_and_operations_the_spans(http: TestClient, daemon: Daemon) -> None:
    services = http.get("/api/services").json()
    assert services["data"] == sorted({name for (name,) in sql(daemon, "SELECT engine FROM engines")})
    assert services["errors"] is None
    assert services["total"] == len(services["data"]) == 4
    # As Grafana escapes it.
    names = http.get("/api/services/a%2Fb%20%27c%27/operations").json()["data"]
    assert {"request", "prefill leg", "decode leg", "transfer.wire"} <= set(names)


def test_trace_is_found_by_the_exemplars_id_and_adds_up(http: TestClient, daemon: Daemon) -> None:
    metrics = http.get("/metrics", headers={"accept": "application/openmetrics-text"}).text
    exemplars = {line.split('trace_id="')[1][:32] for line in metrics.splitlines() if "trace_id=" in line}
    assert exemplars
    for trace_id in exemplars:
        answer = http.get(f"/api/traces/{trace_id}")
        (trace,) = msgspec.json.decode(answer.content, type=JaegerTraces).data
        assert trace.trace_id == trace_id
        root = trace.spans[0]
        critical = [span for span in trace.spans if span.tag("kvscope.path") == "critical"]
        assert sum(int(str(span.tag("kvscope.ns"))) for span in critical) == root.tag("kvscope.ttft_ns")
        # In microseconds they still touch.
        for one, after in itertools.pairwise(critical):
            assert one.start_us + one.duration_us == after.start_us
        assert {ref.ref_type for span in trace.spans[1:] for ref in span.references} <= {
            "CHILD_OF",
            "FOLLOWS_FROM",
        }
        parents = {ref.span_id for s in trace.spans for ref in s.references if ref.ref_type == "CHILD_OF"}
        assert parents <= {span.span_id for span in trace.spans}
        services = {trace.processes[span.process_id].service for span in trace.spans}
        assert services == {root.tag("kvscope.p_engine"), root.tag("kvscope.d_engine")}


def test_trace_of_a_request_without_its_own_is_found_by_the_requests_id(http: TestClient) -> None:
    for text in (f"{102:032x}", "66"):
        (trace,) = msgspec.json.decode(http.get(f"/api/traces/{text}").content, type=JaegerTraces).data
        assert ids([trace]) == {102}
    (reference,) = trace.spans[0].references
    assert (reference.ref_type, reference.trace_id) == ("FOLLOWS_FROM", OWN_TRACE), "the turn before it"


def test_requests_that_carried_one_trace_are_one_trace(http: TestClient) -> None:
    for text in (OWN_TRACE, OWN_TRACE.upper()):
        (trace,) = msgspec.json.decode(http.get(f"/api/traces/{text}").content, type=JaegerTraces).data
        assert (trace.trace_id, ids([trace])) == (OWN_TRACE, {101, 104})
    assert http.get(f"/api/traces/{101:032x}").status_code == 404, "it has its own"


def test_dependencies_are_the_pairs_in_the_store(http: TestClient, daemon: Daemon) -> None:
    pairs = sql(daemon, "SELECT p_engine, d_engine, count(*) FROM requests GROUP BY ALL")
    asked = {"endTs": time.time_ns() // 10**6 + 60_000, "lookback": 3_600_000}
    for parameters in (asked, {}):
        found = http.get("/api/dependencies", params=parameters).json()["data"]
        assert {(one["parent"], one["child"], one["callCount"]) for one in found} == set(pairs)
    early = http.get("/api/dependencies", params={"endTs": 1000, "lookback": 1000}).json()
    assert early["data"] == []


def later(**parameters: str | int) -> dict[str, str | int]:
    """With a window that holds all requests: the simulated ones arrive a little in the future."""
    now_us = time.time_ns() // 1000
    return {"start": now_us - 3600 * 10**6, "end": now_us + 3600 * 10**6, "limit": 100, **parameters}


def test_search_by_service_is_for_requests_that_the_engine_had_a_part_in(
    http: TestClient, daemon: Daemon
) -> None:
    for (engine,) in sql(daemon, "SELECT engine FROM engines GROUP BY ALL"):
        expected = chosen(daemon, f"'{engine}' IN (p_engine, d_engine)")
        assert expected
        assert ids(search(http, **later(service=engine))) == expected
    assert ids(search(http, **later(service="a/b 'c'"))) == {104}
    assert search(http, **later(service="nobody")) == []


def test_search_by_time_and_the_latest_first(http: TestClient, daemon: Daemon) -> None:
    (first_ns, last_ns), *_ = sql(daemon, "SELECT min(arrived_at_ns), max(arrived_at_ns) FROM requests")
    only = search(http, start=first_ns // 1000, end=first_ns // 1000 + 1)
    assert ids(only) == chosen(daemon, f"arrived_at_ns = {first_ns}")
    newest = search(http, **later(limit=3))
    starts = [trace.spans[0].start_us for trace in newest]
    assert starts == sorted(starts, reverse=True)
    assert starts[0] == last_ns // 1000
    assert len(newest) == 3
    assert ids(search(http, lookback="1h", end=time.time_ns() // 1000 - 30 * 10**6)) == {101, 102, 103, 104}


@pytest.mark.parametrize(
    ("tags", "where"),
    [
        ({"kvscope.connector": "push"}, "connector = 'push'"),
        ({"gen_ai.request.model": "simulated/tiny"}, "model = 'simulated/tiny'"),
        ({"error": "true"}, "outcome = 'error'"),
        ({"error": True}, "outcome = 'error'"),
        ({"kvscope.outcome": "finished", "kvscope.session": "101"}, "false"),
        ({"gen_ai.conversation.id": "101"}, "session = 101"),
        ({"kvscope.read_after_expiry": "false"}, "read_after_expiry = false"),
        ({"kvscope.ttft_ns": 13000000}, "ttft_ns = 13000000"),
        ({"kvscope.step": "registration.notify"}, "connector = 'push'"),
        ({"kvscope.class": "transfer", "kvscope.connector": "pull"}, "connector = 'pull' AND id > 1000"),
        ({"kvscope.step": "transfer.wire", "kvscope.class": "compute"}, "false"),
        ({"no.such.tag": "x"}, "false"),
        ({"kvscope.connector": "x' OR true --"}, "false"),
    ],
)
def test_search_by_tags(http: TestClient, daemon: Daemon, tags: Answer, where: str) -> None:
    assert ids(search(http, **later(tags=json.dumps(tags)))) == chosen(daemon, where)


@pytest.mark.parametrize(
    ("parameters", "where"),
    [
        ({"minDuration": "20ms", "maxDuration": "20ms"}, "id IN (101, 102, 104)"),
        ({"minDuration": "12.999ms", "maxDuration": "13000µs"}, "id = 103"),
        ({"operation": "request", "maxDuration": "13ms"}, "id = 103"),
        ({"operation": "decode leg", "service": "special-d", "minDuration": "9ms"}, "id IN (101, 102, 104)"),
        ({"operation": "decode leg", "service": "special-p"}, "false"),
        ({"operation": "prefill leg", "service": "special-p"}, "id IN (101, 102, 103)"),
        ({"operation": "prefill.compute", "maxDuration": "10ms", "service": "special-p"}, "id < 104"),
        ({"operation": "prefill.compute", "minDuration": "10.000001ms", "service": "special-p"}, "false"),
        ({"operation": "prefill.compute", "service": "special-d"}, "false"),
        ({"operation": "decode.generate", "minDuration": "7ms", "maxDuration": "0.007s"},
         "id IN (101, 102, 104)"),
        ({"operation": "registration.notify"}, "connector = 'push'"),
        ({"operation": "All", "service": "special-p"}, "p_engine = 'special-p'"),
        ({"operation": "no such"}, "false"),
    ],
)  # fmt: skip
def test_search_by_operation_and_duration(
    http: TestClient, daemon: Daemon, parameters: dict[str, str], where: str
) -> None:
    assert ids(search(http, **later(**parameters))) == chosen(daemon, where)


def test_failed_request_is_marked_as_such(http: TestClient) -> None:
    (trace,) = search(http, **later(tags='{"error":"true"}'))
    root = trace.spans[0]
    assert (root.tag("error"), root.tag("error.type")) == (True, "KVLoadError")
    assert root.tag("otel.status_code") == "ERROR"


@pytest.mark.parametrize(
    ("path", "parameters"),
    [
        ("/api/traces", {"start": "yesterday"}),
        ("/api/traces", {"start": "-1"}),
        ("/api/traces", {"end": "9" * 19}),
        ("/api/traces", {"end": "٣"}),
        ("/api/traces", {"start": "2000", "end": "1000"}),
        ("/api/traces", {"limit": "0"}),
        ("/api/traces", {"limit": "501"}),
        ("/api/traces", {"limit": "1e3"}),
        ("/api/traces", {"limit": "9" * 5000}),
        ("/api/traces", {"minDuration": "fast"}),
        ("/api/traces", {"minDuration": "1h" * 60}),
        ("/api/traces", {"minDuration": "999999999999d"}),
        ("/api/traces", {"minDuration": "2s", "maxDuration": "1s"}),
        ("/api/traces", {"lookback": "\u202ex"}),
        ("/api/traces", {"tags": "kvscope.connector=push"}),
        ("/api/traces", {"tags": "[1]"}),
        ("/api/traces", {"tags": '{"a":{}}'}),
        ("/api/traces", {"tags": "[" * 20_000}),
        ("/api/traces", {"tags": json.dumps({str(n): "x" for n in range(21)})}),
        ("/api/traces", {"tags": json.dumps({"kvscope.connector": "x" * 1025})}),
        ("/api/traces", {"tags": '{"kvscope.connector":"a\\u0000b"}'}),
        ("/api/traces", {"service": "x" * 1025}),
        ("/api/traces", {"service": "a\0b"}),
        ("/api/traces/xyz", {}),
        ("/api/traces/" + "a" * 33, {}),
        ("/api/traces/%00", {}),
        ("/api/dependencies", {"endTs": "now"}),
        ("/api/dependencies", {"lookback": "9" * 19}),
        ("/api/v3/traces", {"query.start_time_min": "yesterday"}),
        ("/api/v3/traces", {"query.num_traces": "-3"}),
        ("/api/v3/traces", {"query.duration_min": "x"}),
        ("/api/v3/traces", {"query.attributes": "{"}),
        ("/api/v3/traces/-1", {}),
    ],
)
def test_hostile_parameters_are_turned_away_in_one_line(
    http: TestClient, path: str, parameters: dict[str, str]
) -> None:
    answer = http.get(path, params=parameters)
    assert answer.status_code == 400
    told = answer.json()
    assert told["error"]
    assert "\n" not in told["error"] + told["hint"]
    assert (told["error"] + told["hint"]).isprintable()
    assert len(answer.text) < 500


def test_absent_trace_is_not_found(http: TestClient) -> None:
    for path in ("/api/traces/", "/api/v3/traces/"):
        answer = http.get(path + "f" * 32)
        assert (answer.status_code, answer.json()["error"]) == (404, f"no trace {'f' * 32}")


def test_foreign_pages_are_turned_away_here_too(http: TestClient) -> None:
    assert http.get("/api/services", headers={"host": "evil.example"}).status_code == 403
    assert http.post("/api/traces").status_code == 405


def test_answer_ends_where_it_would_be_too_large(daemon: Daemon) -> None:
    with TestClient(create_app(daemon, query.Limits(bytes=60_000)), base_url="http://127.0.0.1") as small:
        found = small.get("/api/traces", params=later())
        assert len(found.content) < 80_000
        assert 1 <= len(found.json()["data"]) < 24


# --- v3 ---------------------------------------------------------------------------------------------------


def test_v3_tells_the_same_in_otlps_form(http: TestClient, daemon: Daemon) -> None:
    assert http.get("/api/v3/services").json()["services"] == http.get("/api/services").json()["data"]
    operations = http.get("/api/v3/operations", params={"service": "special-p"}).json()["operations"]
    assert {"name": "decode leg", "spanKind": "server"} in operations
    ((id_,), *_) = sql(daemon, "SELECT id FROM requests WHERE connector = 'push' ORDER BY id")
    old = msgspec.json.decode(http.get(f"/api/traces/{id_:032x}").content, type=JaegerTraces).data[0]
    answer = http.get(f"/api/v3/traces/{id_:032x}", params={"start_time": "x", "end_time": "y"})
    new = msgspec.json.decode(answer.content, type=OtlpTraces).result.resources
    told = [(span, resource) for resource in new for scope in resource.scopes for span in scope.spans]
    assert len(new) == 2
    for span, resource in told:
        (same,) = (one for one in old.spans if one.span_id == span.span_id)
        assert [a.value.string_value for a in resource.resource.attributes] == [
            old.processes[same.process_id].service
        ]
        assert span.name == same.operation
        assert int(span.start_time_unix_nano) // 1000 == same.start_us
        assert int(span.end_time_unix_nano) // 1000 == same.start_us + same.duration_us
        parents = [ref.span_id for ref in same.references if ref.ref_type == "CHILD_OF"]
        assert [span.parent_span_id] == (parents or [""])
        assert [link.span_id for link in span.links] == [
            ref.span_id for ref in same.references if ref.ref_type == "FOLLOWS_FROM"
        ]
        assert all(a.value.string_value or a.value.int_value for a in span.attributes)
    assert len(told) == len(old.spans)
    critical = [
        int(span.end_time_unix_nano) - int(span.start_time_unix_nano)
        for span, _ in told
        if AnyValue("critical") in [a.value for a in span.attributes if a.key == "kvscope.path"]
    ]
    assert [(sum(critical),)] == sql(daemon, f"SELECT ttft_ns FROM requests WHERE id = {id_}")


def test_v3_search_takes_moments_as_grafana_writes_them(http: TestClient, daemon: Daemon) -> None:
    first, last = (
        time.strftime("%Y-%m-%dT%H:%M:%S.5+00:00", time.gmtime(time.time() + offset))
        for offset in (-600, 600)
    )
    parameters = (
        "query.service_name=special-p&query.operation_name=prefill.compute&query.duration_min=10ms"
        '&query.attributes={"kvscope.class":"compute"}&query.num_traces=2'
    )
    # The + is not escaped, so it arrives as a space.
    times = f"&query.start_time_min={first}&query.start_time_max={last}"
    answer = http.get(f"/api/v3/traces?{parameters}{times}")
    assert answer.status_code == 200, answer.text
    found = msgspec.json.decode(answer.content, type=OtlpTraces).result.resources
    traces = {span.trace_id for one in found for scope in one.scopes for span in scope.spans}
    assert traces == {f"{103:032x}", f"{102:032x}"}
    failed = [s.status for one in found for scope in one.scopes for s in scope.spans if s.status.code]
    assert failed == [Status("KVLoadError", 2)]
    early = jaeger.search_v3({"query.start_time_max": "2026-01-01T00:00:00 02:00"}, now_ns=10**18)
    assert early.until_ns == 1767218400 * 10**9


# --- in flight --------------------------------------------------------------------------------------------


def test_request_in_flight_is_shown_as_far_as_it_has_come(tmp_path: Path) -> None:
    daemon = Daemon(Settings(dir=tmp_path / "rings", store=tmp_path / "s.duckdb", sample_seconds=0))
    daemon.start()
    ring = RingWriter(tmp_path / "rings", About("engine-p", events.SCHEDULER), 64)
    ring.record(events.REQUEST_ARRIVED, ring.text("chatcmpl-abc-12345678"), 1, events.FLAG_REMOTE_DECODE, 9)
    (live,) = until(daemon.live)
    with TestClient(create_app(daemon), base_url="http://127.0.0.1") as http:
        answer = http.get(f"/api/traces/{schema.trace_id_of(live)}")
        (trace,) = msgspec.json.decode(answer.content, type=JaegerTraces).data
        assert trace.spans[0].tag("kvscope.outcome") == "in flight"
        assert search(http) == [], "no first token yet"
    assert daemon.stop()


def test_request_in_flight_with_a_first_token_is_found(daemon: Daemon) -> None:
    in_flight = special(7, outcome="in flight", decode_generate_ns=None, p_engine="young")
    again = SPECIAL[0]  # handed over meanwhile
    api = Jaeger(daemon, lambda: daemon.requests_table([in_flight, again]), query.Limits())
    asked = jaeger.search_v2({"service": "young"})
    (trace,) = (
        msgspec.json.decode(bytes(raw), type=JaegerTrace) for raw in api.search(asked, jaeger._trace_v2)
    )
    assert ids([trace]) == {7}
    pairs = {(p["parent"], p["child"]): p["callCount"] for p in api.dependencies(jaeger.dependencies_of({}))}
    assert pairs["young", "special-d"] == 1
    assert pairs["special-p", "special-d"] == 3, "the one that is in both counts once"


def test_durations_as_go_writes_them() -> None:
    def shortest(text: str) -> int:
        return jaeger.search_v2({"minDuration": text}).min_ns

    assert shortest("1h30m") == 5400 * 10**9
    assert shortest("1.5s") == 1_500_000_000
    assert shortest("2us") == shortest("2µs") == 2000
    for text in ("1", "s", "1 s", "-1s", "1.s"):
        with pytest.raises(UsageError):
            shortest(text)


def test_every_root_attribute_can_be_searched_for(http: TestClient) -> None:
    names = list(spans.ROOT_ATTRIBUTES)
    for first in range(0, len(names), jaeger.MAX_TAGS):
        some = names[first : first + jaeger.MAX_TAGS]
        assert search(http, tags=json.dumps(dict.fromkeys(some, "x"))) == []
