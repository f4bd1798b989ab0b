"""vLLM's own metrics: what a real engine serves, and what a broken or hostile server does."""

from __future__ import annotations

import contextlib
import gzip
import platform
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from kvscope.collectors import vllm_metrics
from kvscope.collectors.rings import RingProcess
from kvscope.collectors.vllm_metrics import VllmMetrics, servers_of
from kvscope.samples import KINDS, Sample

from .collecting import until

RECORDED = (Path(__file__).parent / "recorded" / "vllm-0.32.0-metrics.txt").read_text()
"""Of a prefill engine of vLLM 0.32.0 that had pushed 64 requests; other metrics left out."""
PLAIN = 'vllm:num_requests_running{engine="0",model_name="tiny"} 3.0\n'


class Server:
    """Serves /metrics by a function of the handler; counts what it is asked."""

    def __init__(self, answer: Callable[[BaseHTTPRequestHandler], None]) -> None:
        outer = self
        self.answer = answer
        self.paths: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.paths.append(self.path)
                with contextlib.suppress(OSError):  # the client has had enough
                    outer.answer(self)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.port = self.http.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/metrics"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def says(self, body: str | bytes, status: int = 200, **headers: str) -> None:
        self.answer = text(body, status, **headers)


def text(body: str | bytes, status: int = 200, **headers: str) -> Callable[[BaseHTTPRequestHandler], None]:
    raw = body.encode() if isinstance(body, str) else body

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(status)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(raw)))
        handler.end_headers()
        handler.wfile.write(raw)

    return answer


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def make(body: str | bytes = PLAIN, **headers: str) -> Server:
        servers.append(Server(text(body, **headers)))
        return servers[-1]

    yield make
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def scheduler(port: int, engine: str = "e", host: str = "", **fingerprint: Any) -> RingProcess:
    about = {"api_port": port, "data_parallel_index": 0, "model": "tiny", **fingerprint}
    return RingProcess(Path("/x.ring"), engine, "scheduler", 0, host or platform.node(), "b", 1, about)


def read(metrics: VllmMetrics, *processes: RingProcess) -> list[Sample]:
    return list(metrics.read(1000, list(processes)))


def values(samples: list[Sample]) -> dict[tuple[str, str], float]:
    return {(sample.name, sample.label): sample.value for sample in samples}


class TestARealEngine:
    def test_what_it_serves_becomes_samples_of_its_engine(self, serve: Callable[..., Server]) -> None:
        samples = read(VllmMetrics(), scheduler(serve(RECORDED).port))
        assert values(samples) == {
            ("vllm.running", ""): 0,
            ("vllm.waiting", "capacity"): 0,
            ("vllm.waiting", "deferred"): 0,
            ("vllm.kv_fetch", "waiting_to_start"): 0,
            ("vllm.kv_fetch", "in_progress"): 0,
            ("vllm.kv_fetch", "completed_waiting"): 0,
            ("vllm.kv_cache_usage", ""): 0,
        }
        assert {(s.at_ns, s.host, s.engine, s.source) for s in samples} == {(1000, platform.node(), "e", "")}

    def test_counters_become_rates_and_means_of_what_came_since(self, serve: Callable[..., Server]) -> None:
        server, metrics = serve(RECORDED), VllmMetrics()
        read(metrics, scheduler(server.port))
        began = time.monotonic()
        later = RECORDED
        for name, value in (
            ("nixl_xfer_time_seconds_count", "64.0"),
            ("nixl_post_time_seconds_count", "64.0"),
            ("nixl_num_descriptors_count", "64.0"),
        ):
            later = _replaced(later, name, value, "66.0")
        later = _replaced(later, "nixl_xfer_time_seconds_sum", "0.13903699999999997", "0.33903699999999997")
        later = _replaced(later, "nixl_num_descriptors_sum", "396.0", "410.0")
        later = _replaced(later, "nixl_num_kv_expired_reqs_total", "0.0", "5.0")
        server.says(later)
        found = values(read(metrics, scheduler(server.port)))
        seconds = time.monotonic() - began + 2
        assert found["vllm.nixl_xfer_ns", ""] == pytest.approx(100e6)
        assert found["vllm.nixl_descriptors", ""] == 7
        assert found["vllm.nixl_transfers_per_s", ""] > 2 / seconds
        assert found["vllm.nixl_failures_per_s", "kv_expired_reqs"] > 5 / seconds
        assert found["vllm.nixl_failures_per_s", "failed_transfers"] == 0
        assert found["vllm.preemptions_per_s", ""] == 0
        assert {name for name, _ in found} <= set(KINDS)

    def test_engine_that_started_anew_has_no_rates_at_first(self, serve: Callable[..., Server]) -> None:
        server, metrics = serve(RECORDED), VllmMetrics()
        read(metrics, scheduler(server.port))
        server.says(_replaced(RECORDED, "nixl_xfer_time_seconds_count", "64.0", "3.0"))
        assert not [name for name, _ in values(read(metrics, scheduler(server.port))) if "nixl" in name]


def _replaced(text: str, name: str, old: str, new: str) -> str:
    line = f'vllm:{name}{{engine="0",model_name="tiny"}} '
    assert line + old + "\n" in text, name
    return text.replace(line + old + "\n", line + new + "\n")


class TestWhoseMetrics:
    def test_underscores_in_place_of_the_colon(self, serve: Callable[..., Server]) -> None:
        samples = read(VllmMetrics(), scheduler(serve(PLAIN.replace(":", "_")).port))
        assert values(samples) == {("vllm.running", ""): 3}

    def test_waiting_where_vllm_gives_no_reasons(self, serve: Callable[..., Server]) -> None:
        samples = read(VllmMetrics(), scheduler(serve("vllm:num_requests_waiting 4\n").port))
        assert values(samples) == {("vllm.waiting", ""): 4}

    def test_engines_of_one_server_are_told_apart(self, serve: Callable[..., Server]) -> None:
        body = "".join(f'vllm:num_requests_running{{engine="{i}",model_name="tiny"}} {i}\n' for i in range(3))
        port = serve(body).port
        processes = [scheduler(port, f"e_dp{i}", data_parallel_index=i) for i in (0, 2)]
        samples = read(VllmMetrics(), *processes)
        assert [(s.engine, s.value) for s in samples] == [("e_dp0", 0), ("e_dp2", 2)]

    def test_another_model_at_the_port_is_not_ours(self, serve: Callable[..., Server]) -> None:
        assert read(VllmMetrics(), scheduler(serve().port, model="large")) == []

    def test_given_address_that_no_engine_recorded_goes_by_its_own_name(
        self, serve: Callable[..., Server]
    ) -> None:
        server = serve()
        (sample,) = read(VllmMetrics([server.url]))
        assert (sample.engine, sample.value) == (f"127.0.0.1:{server.port}", 3)

    def test_given_address_is_asked_instead_of_the_loopback(self, serve: Callable[..., Server]) -> None:
        server = serve()
        url = f"http://localhost:{server.port}/else"
        (sample,) = read(VllmMetrics([url]), scheduler(server.port))
        assert sample.engine == "e"
        assert server.paths == ["/else"]

    def test_a_containers_loopback_is_not_ours(self) -> None:
        assert servers_of([], [scheduler(8000, host="pod-7")]) == []
        pods = [scheduler(8000, "a", host="10.0.0.1"), scheduler(8000, "b", host="10.0.0.2")]
        (server,) = servers_of(["http://10.0.0.2:8000/metrics"], pods)
        assert [engine for _, engine, _, _ in server.engines] == ["b"]

    def test_workers_and_engines_without_a_server_are_not_asked(self) -> None:
        worker = scheduler(8000)._replace(source="worker")
        for port in (None, "8000", True, 0, 70000, 1.5):
            assert servers_of([], [worker, scheduler(port)]) == []  # type: ignore[arg-type]


NONE = "no metrics of vLLM"
HOSTILE = {
    "nothing": ("", NONE),
    "html": ("<html>it works</html>", NONE),
    "binary": (bytes(range(256)) * 100, NONE),
    "a value that is none": ("vllm:num_requests_running{engine='0'} many\n", ""),
    "labels that do not end": ('vllm:num_requests_running{engine="0\n' * 10, ""),
    "labels that the parser trips over": (PLAIN.replace(",", ",\r="), "can't be read (IndexError)"),
    "no value": ("vllm:num_requests_running{} \n", ""),
    "a line that is too long": ('vllm:num_requests_running{engine="' + "x" * 100_000 + '"} 1\n', NONE),
    "too many": (
        "".join(f'vllm:num_requests_running{{engine="{i}"}} 1\n' for i in range(vllm_metrics.MAX_LINES + 1)),
        "too many",
    ),
    "too much": (b"x" * vllm_metrics.MAX_BYTES + b"\n" + PLAIN.encode(), "longer than 8 MiB"),
}


class TestHostileServers:
    @pytest.mark.parametrize(("body", "reason"), HOSTILE.values(), ids=HOSTILE.keys())
    def test_nonsense_gives_no_samples_and_the_next_engine_is_read(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, body: str | bytes, reason: str
    ) -> None:
        monkeypatch.setattr(vllm_metrics, "TOLD_AFTER_S", 0.0)
        bad, good = serve(body), serve()
        metrics = VllmMetrics()
        samples = read(metrics, scheduler(bad.port, "bad"), scheduler(good.port, "good"))
        assert [sample.engine for sample in samples] == ["good"]
        (line,) = metrics.problems()
        assert reason in line
        assert line.isprintable()

    def test_numbers_that_are_none_are_left_out(self, serve: Callable[..., Server]) -> None:
        body = "vllm:num_requests_running NaN\nvllm:num_requests_waiting +Inf\nvllm:kv_cache_usage_perc 0.5\n"
        samples = read(VllmMetrics(), scheduler(serve(body).port))
        assert values(samples) == {("vllm.kv_cache_usage", ""): 0.5}

    def test_labels_are_cut_and_printable(self, serve: Callable[..., Server]) -> None:
        body = 'vllm:num_requests_waiting_by_reason{engine="0",reason="\x1b[2J' + "x" * 1000 + '"} 1\n'
        (sample,) = read(VllmMetrics(), scheduler(serve(body).port))
        assert sample.label.isprintable()
        assert len(sample.label) <= vllm_metrics.MAX_LABEL

    def test_redirects_are_not_followed(self, serve: Callable[..., Server]) -> None:
        target = serve()
        metrics = VllmMetrics()
        assert read(metrics, scheduler(serve("", status=302, Location=target.url).port)) == []
        assert target.paths == []

    def test_compressed_answers_are_refused(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_metrics, "TOLD_AFTER_S", 0.0)
        bomb = serve(gzip.compress(PLAIN.encode() * 1000), Content_Encoding="gzip")
        metrics = VllmMetrics()
        assert read(metrics, scheduler(bomb.port)) == []
        assert "compressed, unasked" in metrics.problems()[0]

    def test_an_endless_answer_is_cut_by_time(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_metrics, "TIMEOUT_S", 0.2)

        def endless(handler: BaseHTTPRequestHandler) -> None:
            handler.send_response(200)
            handler.end_headers()
            while True:
                handler.wfile.write(PLAIN.encode())
                time.sleep(0.01)

        server = serve()
        server.answer = endless
        began = time.monotonic()
        assert read(VllmMetrics(), scheduler(server.port)) == []
        assert time.monotonic() - began < 2

    def test_a_server_that_dribbles_its_headers_is_let_go(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_metrics, "TIMEOUT_S", 0.3)
        given_up = threading.Event()

        def dribble(handler: BaseHTTPRequestHandler) -> None:
            handler.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            try:
                while True:
                    handler.wfile.write(b"x")
                    time.sleep(0.02)
            except OSError:
                given_up.set()

        server = serve()
        server.answer = dribble
        metrics = VllmMetrics()
        assert read(metrics, scheduler(server.port)) == []
        assert given_up.wait(10)
        until(lambda: not any(thread.name == "kvscope-metrics" for thread in threading.enumerate()))

    def test_a_question_that_goes_on_is_not_asked_again_and_holds_up_no_exit(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_metrics, "ROUND_S", 0.2)
        monkeypatch.setattr(vllm_metrics, "BACK_OFF_S", (0.0,))
        go_on, asked, get = threading.Event(), [], VllmMetrics._get

        def stuck(self: VllmMetrics, url: str, *rest: Any) -> str:
            asked.append(threading.current_thread())
            go_on.wait(60)
            return get(self, url, *rest)

        monkeypatch.setattr(VllmMetrics, "_get", stuck)
        server, metrics = serve(), VllmMetrics()
        for _ in range(3):
            assert read(metrics, scheduler(server.port)) == []
        (thread,) = asked
        assert thread.daemon
        go_on.set()
        thread.join(30)
        assert read(metrics, scheduler(server.port))

    def test_servers_that_hang_hold_up_neither_the_others_nor_the_round(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_metrics, "ROUND_S", 0.5)
        go_on = threading.Event()
        hanging = [serve() for _ in range(vllm_metrics.WORKERS - 1)]
        for server in hanging:
            server.answer = lambda handler: (go_on.wait(30), None)[1]
        good = serve()
        processes = [scheduler(server.port, "hangs") for server in hanging]
        metrics = VllmMetrics()
        began = time.monotonic()
        samples = read(metrics, *processes, scheduler(good.port, "good"))
        assert [sample.engine for sample in samples] == ["good"]
        assert time.monotonic() - began < 1.9  # less than the time-out of one
        go_on.set()


class TestAServerThatDoesNotAnswer:
    def test_it_is_one_problem_after_a_while_and_none_when_it_answers(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = {"s": 100.0}
        monkeypatch.setattr(vllm_metrics.time, "monotonic", lambda: clock["s"])
        server, metrics = serve(), VllmMetrics()
        server.says("", status=503)
        for after_s, told in ((0, 0), (100, 0), (179, 0), (200, 1), (900, 1)):
            clock["s"] = 100.0 + after_s
            assert read(metrics, scheduler(server.port, "e\x1b1")) == []
            assert len(metrics.problems()) == told
        (line,) = metrics.problems()
        assert line == (
            f"vLLM's metrics of engine e\N{REPLACEMENT CHARACTER}1 are missing: {server.url}: "
            "it answered 503; name the right address with vllm_metrics"
        )
        server.says(PLAIN)
        clock["s"] += 60
        assert read(metrics, scheduler(server.port))
        assert metrics.problems() == []

    def test_it_is_asked_again_less_and_less_often(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        clock = {"s": 0.0}
        monkeypatch.setattr(vllm_metrics.time, "monotonic", lambda: clock["s"])
        server, metrics = serve(), VllmMetrics()
        server.says("", status=404)
        asked = []
        for second in range(100, 180):
            clock["s"] = float(second)
            before = len(server.paths)
            read(metrics, scheduler(server.port))
            if len(server.paths) > before:
                asked.append(second - 100)
        assert asked == [0, 5, 15, 35, 55, 75]

    def test_nobody_listening_is_said_without_a_traceback(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(vllm_metrics, "TOLD_AFTER_S", 0.0)
        metrics = VllmMetrics(["http://127.0.0.1:1/metrics"])
        assert read(metrics) == []
        (line,) = metrics.problems()
        assert "no answer" in line
        assert "\n" not in line

    def test_an_engine_that_is_gone_is_no_problem(
        self, serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(vllm_metrics, "TOLD_AFTER_S", 0.0)
        server, metrics = serve(), VllmMetrics()
        server.says("", status=500)
        read(metrics, scheduler(server.port))
        assert len(metrics.problems()) == 1
        read(metrics)
        assert metrics.problems() == []
