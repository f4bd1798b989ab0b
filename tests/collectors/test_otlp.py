"""Export of traces: what a receiver gets, and what happens when it does not take them."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from kvscope import schema, spans
from kvscope.collectors import otlp
from kvscope.collectors.daemon import Daemon
from kvscope.collectors.otlp import Exporter, NotTaken, make_exporter
from kvscope.demo.simulate import Fleet
from kvscope.errors import UsageError
from kvscope.settings import Settings
from kvscope.spans import Span
from kvscope.steps import BY_NAME

from .collecting import Served, row, until

START_NS = 1_795_967_649_123_456_789


class Receiver:
    """Speaks OTLP/HTTP: decodes the protobuf, answers as it is told to."""

    def __init__(self) -> None:
        self.status = 200
        self.hang = threading.Event()
        self.hang.set()
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.calls = 0
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                receiver.calls += 1
                receiver.hang.wait(20)
                if self.headers.get("content-encoding") == "gzip":
                    body = gzip.decompress(body)
                if receiver.status == 200:
                    assert self.headers["content-type"] == "application/x-protobuf"
                    receiver.paths.append(self.path)
                    receiver.requests.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.hang.set()
        self._server.shutdown()
        self._server.server_close()

    def spans(self) -> list[tuple[str, Any]]:
        """(service, span) of all that came."""
        return [
            (next(a.value.string_value for a in one.resource.attributes if a.key == "service.name"), span)
            for request in list(self.requests)
            for one in request.resource_spans
            for scope in one.scope_spans
            for span in scope.spans
        ]

    def traces(self) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for _, span in self.spans():
            found.setdefault(span.trace_id.hex(), []).append(span)
        return found


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


@contextmanager
def running(folder: Path, endpoint: str) -> Iterator[Daemon]:
    daemon = Daemon(
        Settings(dir=folder / "rings", store=folder / "s.duckdb", sample_seconds=0, otlp_endpoint=endpoint)
    )
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.stop()


def stored(daemon: Daemon, text: str = "SELECT count(*) FROM requests") -> Any:
    with daemon.cursor() as cursor:
        return cursor.execute(text).fetchall()[0][0]


# --- a real receiver ------------------------------------------------------------------------------------


def test_receiver_gets_traces_whose_steps_sum_to_ttft(tmp_path: Path, receiver: Receiver) -> None:
    fleet = Fleet(tmp_path / "rings", "push", 4096)
    with running(tmp_path, receiver.url) as daemon:
        for _ in range(20):
            fleet.request()
        until(lambda: len(receiver.traces()) == 20)
        until(lambda: daemon.status()["otlp"]["exported"] == 20)
        assert daemon.status()["otlp"]["lost"] == 0
        assert daemon.status()["problems"] == []
        metrics = daemon.metrics("")[0].decode()
        assert 'kvscope_exported_requests_total{result="ok"} 20.0' in metrics
        with daemon.cursor() as cursor:
            names = [column.name for column in schema.REQUESTS.columns]
            rows = [dict(zip(names, r, strict=True)) for r in cursor.execute("FROM requests").fetchall()]
    assert receiver.paths == ["/v1/traces"] * len(receiver.paths)
    traces = receiver.traces()
    for request in rows:
        trace = traces[schema.trace_id_of(request)]
        critical = [s for s in trace if attributes(s).get("kvscope.path") == "critical"]
        assert sum(s.end_time_unix_nano - s.start_time_unix_nano for s in critical) == request["ttft_ns"]
        # Span for span what the Jaeger API shows.
        expected = {(s.span_id, s.parent_id, s.name, s.start_ns, s.end_ns) for s in spans.of_request(request)}
        assert expected == {
            (s.span_id.hex(), s.parent_span_id.hex(), s.name, s.start_time_unix_nano, s.end_time_unix_nano)
            for s in trace
        }
        (root,) = (s for s in trace if not s.parent_span_id)
        assert (root.kind, attributes(root)["gen_ai.request.model"]) == (
            root.SPAN_KIND_CLIENT,
            "simulated/tiny",
        )
        assert type(attributes(root)["kvscope.ttft_ns"]) is int
        (joined,) = (s for s in trace if s.links)
        assert joined.links[0].span_id in {s.span_id for s in trace}
    by_service = {service for service, _ in receiver.spans()}
    assert by_service == {request[f"{side}_engine"] for request in rows for side in "pd"}


def test_what_was_stored_last_is_exported_before_the_end(
    tmp_path: Path, receiver: Receiver, start: Callable[..., Any]
) -> None:
    fleet = Fleet(tmp_path / "rings", "pull", 4096)
    flags = ("--dir", tmp_path / "rings", "--store", tmp_path / "s.duckdb", "--otlp-endpoint", receiver.url)
    served = start(Served, *map(str, flags))
    for _ in range(5):
        fleet.request()
    until(lambda: served.status()["pipeline"]["live"] or served.requests())
    code, stderr = served.stop()
    assert (code, "not exported" in stderr) == (0, False)
    assert len(receiver.traces()) == 5


def test_receiver_that_is_down_costs_traces_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")  # of the SDK's own retries
    gone = Receiver()
    gone.close()
    fleet = Fleet(tmp_path / "rings", "push", 4096)
    began = time.monotonic()
    with running(tmp_path, gone.url + "/custom") as daemon:
        for _ in range(10):
            fleet.request()
        until(lambda: stored(daemon) == 10)
        assert time.monotonic() - began < 5, "collecting waits for no receiver"
        until(lambda: daemon.status()["otlp"]["error"])
        (problem,) = daemon.status()["problems"]
        assert problem == f"no traces get to {gone.url}/custom: Connection refused"
        began = time.monotonic()
        assert daemon.stop(), "all is in the store"
        assert time.monotonic() - began < 3
        status = daemon.status()["otlp"]
        assert (status["exported"], status["lost"], status["queued"]) == (0, 10, 0)
        assert any("NOT EXPORTED: 10 requests" in text for text in daemon.status()["problems"])


def test_receiver_that_hangs_does_not_hold_up_the_end(tmp_path: Path, receiver: Receiver) -> None:
    receiver.hang.clear()
    fleet = Fleet(tmp_path / "rings", "push", 4096)
    with running(tmp_path, receiver.url) as daemon:
        fleet.request()
        until(lambda: receiver.calls)
        began = time.monotonic()
        assert daemon.stop(2.0)
        assert time.monotonic() - began < 4
        assert daemon.status()["otlp"]["lost"] == 1


def test_off_by_default(tmp_path: Path) -> None:
    assert make_exporter("") is None
    with running(tmp_path, "") as daemon:
        assert daemon.status()["otlp"] is None
        assert 'kvscope_exported_requests_total{result="failed"} 0.0' in daemon.metrics("")[0].decode()


def test_without_opentelemetry_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "kvscope.collectors.otlp_sdk", None)
    with pytest.raises(UsageError, match=r"pip install 'kvscope\[otlp\]'"):
        Daemon(Settings(dir=tmp_path, store=tmp_path / "s.duckdb", otlp_endpoint="http://127.0.0.1:1"))
    assert not (tmp_path / "s.duckdb").exists()


def test_refusal_is_not_tried_again_and_a_busy_receiver_is(receiver: Receiver) -> None:
    exporter = make_exporter(receiver.url)
    assert exporter is not None
    (span,) = spans.of_request(named(request(1)))[:1]
    for status, again in ((400, False), (401, False), (413, False), (500, True), (404, False)):
        receiver.status = status
        with pytest.raises(NotTaken, match=f"HTTP {status}") as caught:
            exporter._sender.send([span])
        assert caught.value.again is again
    receiver.status = 200
    exporter._sender.send([span])
    exporter._sender.close()


def test_connection_error_that_an_older_sdk_raises_is_a_failure_like_others(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ConnectionRefusedError(111, "Connection refused")

    exporter = make_exporter(receiver.url)
    assert exporter is not None
    monkeypatch.setattr(exporter._sender._exporter, "export", fail)  # type: ignore[attr-defined]
    with pytest.raises(NotTaken, match="Connection refused") as caught:
        exporter._sender.send(spans.of_request(named(request(1))))
    assert caught.value.again
    exporter._sender.close()


# --- the queue, with a sender of the test's own ---------------------------------------------------------


class FakeSender:
    """Takes batches, or raises what it is told to."""

    def __init__(self, *problems: NotTaken) -> None:
        self.problems = list(problems)
        self.batches: list[list[Span]] = []
        self.tries = 0
        self.open = threading.Event()
        self.open.set()
        self.closed = False

    def send(self, batch: Sequence[Span]) -> None:
        self.tries += 1
        self.open.wait(20)
        if self.closed:
            raise NotTaken("closed", again=True)
        if self.problems:
            raise self.problems.pop(0)
        self.batches.append(list(batch))

    def close(self) -> None:
        self.closed = True
        self.open.set()


def request(number: int, **columns: Any) -> tuple[Any, ...]:
    compute = {
        "step": BY_NAME["prefill.compute"].code,
        "from_ns": 0,
        "ns": 5,
        "critical": True,
        "observed": 0,
        "error_ns": 0,
    }
    values = {
        "id": number,
        "arrived_at_ns": START_NS,
        "outcome": "finished",
        "d_engine": "d",
        "ttft_ns": 5,
        "prefill_compute_ns": 5,
        "waterfall": [compute],
    }
    return row("requests", **values | columns)


def named(values: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip((column.name for column in schema.REQUESTS.columns), values, strict=True))


@pytest.fixture
def export() -> Iterator[Callable[..., tuple[Exporter, FakeSender]]]:
    made: list[Exporter] = []

    def make(*problems: NotTaken) -> tuple[Exporter, FakeSender]:
        sender = FakeSender(*problems)
        exporter = Exporter("http://receiver", sender, backoff_s=0.001, linger_s=0.0)
        exporter.start()
        made.append(exporter)
        return exporter, sender

    yield make
    for exporter in made:
        exporter._sender.close()
        exporter.stop(5)


Export = Callable[..., tuple[Exporter, FakeSender]]


def busy() -> NotTaken:
    return NotTaken("HTTP 503 busy", again=True)


def test_batch_that_was_not_taken_is_sent_again(export: Export) -> None:
    exporter, sender = export(busy(), busy())
    exporter.add([request(1), request(2)])
    until(lambda: exporter.status()["exported"] == 2)
    assert (sender.tries, exporter.status()["lost"], exporter.problems()) == (3, 0, [])


def test_batch_is_given_up_after_some_tries_and_counted(export: Export) -> None:
    exporter, sender = export(*(busy() for _ in range(otlp.ATTEMPTS)))
    exporter.add([request(1)])
    until(lambda: exporter.status()["lost"] == 1)
    assert sender.tries == otlp.ATTEMPTS
    assert exporter.problems() == [
        "no traces get to http://receiver: HTTP 503 busy",
        "NOT EXPORTED: 1 requests to http://receiver; the store has them",
    ]
    exporter.add([request(2)])
    until(lambda: exporter.status()["exported"] == 1)
    assert len(exporter.problems()) == 1, "it works again; what was lost stays told"


def test_batch_that_is_refused_is_counted_at_once(export: Export) -> None:
    exporter, sender = export(NotTaken("HTTP 401 Unauthorized", again=False))
    exporter.add([request(1)])
    until(lambda: exporter.status()["lost"] == 1)
    assert sender.tries == 1


def test_full_queue_drops_and_counts_and_never_waits(export: Export, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp, "QUEUE_REQUESTS", 100)
    exporter, sender = export()
    sender.open.clear()
    exporter.add([request(0)])
    until(lambda: sender.tries)
    began = time.monotonic()
    exporter.add([request(number) for number in range(1, 151)])
    assert time.monotonic() - began < 0.5
    assert exporter.status() | {"endpoint": ""} == {
        "endpoint": "",
        "queued": 101,
        "queue_limit": 100,
        "exported": 0,
        "lost": 50,
        "error": "",
    }
    sender.open.set()
    until(lambda: exporter.status()["exported"] == 101)
    assert max(len({s.trace_id for s in batch}) for batch in sender.batches) == otlp.BATCH_REQUESTS


def test_request_that_cannot_be_told_takes_no_other_with_it(export: Export) -> None:
    exporter, sender = export()
    broken = {"step": 3, "from_ns": None, "ns": 1, "critical": True, "observed": 0, "error_ns": 0}
    exporter.add([request(1, waterfall=[broken]), request(2), request(3, arrived_at_ns=None)])
    until(lambda: exporter.status()["exported"] == 1)
    assert exporter.status()["lost"] == 2
    assert {s.trace_id for batch in sender.batches for s in batch} == {f"{2:032x}"}


def test_turns_of_a_session_are_linked(export: Export) -> None:
    exporter, sender = export()
    # The first is stored before it is known to be one; the fourth comes after one that was not exported.
    turns = [(1, None, None), (2, 1, 2), (9, None, None), (4, 1, 4)]
    exporter.add([request(id_, session=session, turn=turn) for id_, session, turn in turns])
    until(lambda: exporter.status()["exported"] == 4)
    roots = {int(s.trace_id, 16): s for batch in sender.batches for s in batch if s.name == spans.ROOT}
    assert [(link.trace_id, link.span_id) for link in roots[2].links] == [(f"{1:032x}", roots[1].span_id)]
    assert [roots[id_].links for id_ in (1, 9, 4)] == [(), (), ()]


def test_end_sends_what_is_queued_and_counts_what_is_not(export: Export) -> None:
    exporter, sender = export()
    exporter.add([request(number) for number in range(200)])
    assert exporter.stop(10)
    assert exporter.status()["exported"] == 200
    assert sender.closed
    exporter.add([request(1)])
    assert exporter.status()["lost"] == 1, "too late"

    failing, sender = export(*(busy() for _ in range(1000)))
    failing.add([request(number) for number in range(200)])
    until(lambda: failing.status()["error"])
    assert not failing.stop(10)
    assert (failing.status()["lost"], failing.status()["queued"]) == (200, 0)


def test_receivers_address_with_and_without_a_path() -> None:
    for address, url in (
        ("http://tempo:4318", "http://tempo:4318/v1/traces"),
        ("http://tempo:4318/", "http://tempo:4318/v1/traces"),
        ("https://host/otlp/v1/traces", "https://host/otlp/v1/traces"),
    ):
        exporter = make_exporter(address)
        assert exporter is not None
        assert exporter.endpoint == url


def test_jaeger_api_and_receiver_agree(tmp_path: Path, receiver: Receiver, start: Callable[..., Any]) -> None:
    fleet = Fleet(tmp_path / "rings", "bidirectional", 8192)
    flags = ("--dir", tmp_path / "rings", "--store", tmp_path / "s.duckdb", "--otlp-endpoint", receiver.url)
    served = start(Served, *map(str, flags))
    for _ in range(6):
        fleet.request()
    until(lambda: len(receiver.traces()) == 6)
    for trace_id, trace in receiver.traces().items():
        shown = httpx.get(f"{served.url}/api/traces/{trace_id}", trust_env=False).json()["data"][0]["spans"]
        assert {s["spanID"] for s in shown} == {s.span_id.hex() for s in trace}
        links = {r["spanID"] for s in shown for r in s["references"] if r["refType"] == "FOLLOWS_FROM"}
        assert links == {link.span_id.hex() for s in trace for link in s.links}
