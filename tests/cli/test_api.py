"""The HTTP API: answers, limits, and what it turns away."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope import __version__, client, query
from kvscope.collectors import api
from kvscope.errors import KvscopeError
from kvscope.frame import Frame, Scope

from ..collectors.collecting import until
from . import rows
from .conftest import LIMIT_S, FakeDaemon


def is_one_line(response: httpx.Response) -> bool:
    answer = response.json()
    return (
        response.headers["content-type"] == "application/json"
        and {"error", "hint"} <= set(answer)
        and bool(answer["error"])
        and "\n" not in answer["error"] + answer["hint"]
        and "Traceback" not in response.text
    )


def post(http: httpx.Client, body: Any, **headers: str) -> httpx.Response:
    return http.post("/api/v1/query", json=body, headers=headers)


def test_health_and_status(http: httpx.Client, daemon: FakeDaemon) -> None:
    assert http.get("/healthz").json() == {"ok": True, "kvscope": __version__}
    assert http.get("/api/v1/status").json() == daemon.status()


def test_requests_are_listed_with_their_sums(http: httpx.Client) -> None:
    parameters = [
        ("where", "connector=push"),
        ("where", "ttft_ns>100ms"),
        ("sort", "ttft_ns"),
        ("limit", "5"),
    ]
    found = http.get("/api/v1/requests", params=parameters).json()["requests"]
    assert [row["client_id"] for row in found] == [rows.PUSH["client_id"], rows.PUSH_LATE["client_id"]]
    assert found[0]["coordination_ns"] == 301_000_000
    assert found[0]["id"] == str(rows.PUSH["id"]), "JSON readers keep 53 bits of a number"
    assert "waterfall" not in found[0]
    newest = http.get("/api/v1/requests").json()["requests"][0]
    assert (newest["in_flight"], newest["outcome"]) == (True, "in flight")


def test_one_request_by_any_id(http: httpx.Client) -> None:
    by_id = http.get(f"/api/v1/requests/{rows.PULL['id']}").json()
    assert by_id["request"]["client_id"] == rows.PULL["client_id"]
    assert [lease["end"] for lease in by_id["leases"]] == ["released"]
    assert by_id["engines"][0]["fingerprint"]["vllm"] == "0.32.0"
    again = http.get(f"/api/v1/requests/{rows.PULL['d_request']}").json()
    assert {**again, "as_of_ns": 0} == {**by_id, "as_of_ns": 0}
    absent = http.get("/api/v1/requests/nobody")
    assert absent.status_code == 404
    assert is_one_line(absent)
    several = http.get("/api/v1/requests/req-000")
    assert several.status_code == 300
    assert is_one_line(several)
    assert len(several.json()["matches"]) == 8
    assert http.get("/api/v1/requests/" + "x" * 1025).status_code == 400


def test_queries_by_name_and_by_sql(http: httpx.Client) -> None:
    listed = http.get("/api/v1/queries").json()["queries"]
    assert {one["name"] for one in listed} == set(query.questions())
    assert all(one["columns"] and one["title"] and one["sql"] for one in listed)
    named = post(http, {"name": "slowest", "parameters": {"limit": 2}}).json()
    assert [column["name"] for column in named["columns"]] == list(query.questions()["slowest"].columns)
    assert (len(named["rows"]), named["truncated"]) == (2, False)
    own = post(
        http, {"sql": "SELECT id, ttft_ns, 'nan'::DOUBLE AS n FROM requests ORDER BY id LIMIT 1"}
    ).json()
    assert own["rows"] == [[str(rows.PUSH["id"]), 412_000_000, None]]
    assert own["columns"][0] == {"name": "id", "type": "UBIGINT"}


def test_an_arrow_stream_where_it_is_asked_for(http: httpx.Client) -> None:
    answer = post(http, {"sql": "SELECT id, waterfall FROM requests ORDER BY id"}, accept=api.ARROW)
    assert answer.headers["content-type"] == api.ARROW
    assert answer.headers["x-kvscope-truncated"] == "false"
    table = pyarrow.ipc.open_stream(answer.content).read_all()
    assert table["id"].to_pylist() == [row["id"] for row in rows.STORED]
    cut = post(http, {"sql": "SELECT range FROM range(1000)"}, accept=api.ARROW)
    assert cut.headers["x-kvscope-truncated"] == "true"
    assert pyarrow.ipc.open_stream(cut.content).read_all().num_rows == 100


def test_limits_hold(http: httpx.Client) -> None:
    many = post(http, {"sql": "SELECT range FROM range(1000)"}).json()
    assert (len(many["rows"]), many["truncated"]) == (100, True)
    wide = post(http, {"sql": "SELECT repeat('x', 50000) FROM range(50)"}).json()
    assert (len(wide["rows"]) < 10, wide["truncated"]) == (True, True)
    began = time.monotonic()
    endless = post(
        http,
        {"sql": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"},
    )
    assert endless.status_code == 422
    assert is_one_line(endless)
    assert time.monotonic() - began < 10


def test_a_slow_query_does_not_hold_up_the_rest(http: httpx.Client, url: str) -> None:
    endless = {
        "sql": "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
    }
    slow = threading.Thread(target=lambda: httpx.post(f"{url}/api/v1/query", json=endless, timeout=30))
    slow.start()
    time.sleep(0.2)
    began = time.monotonic()
    assert http.get("/healthz").is_success
    assert time.monotonic() - began < 1
    assert slow.is_alive()
    slow.join()


BAD_BODIES = {
    "not JSON": b"{",
    "bad UTF-8": b'{"sql": "\xff"}',
    "a list": b"[]",
    "both": b'{"name": "ttft", "sql": "SELECT 1"}',
    "neither": b"{}",
    "unknown field": b'{"sql": "SELECT 1", "limit": 3}',
    "wrong type": b'{"sql": 5}',
    "parameter of a wrong type": b'{"name": "ttft", "parameters": {"since": [1]}}',
    "unknown question": b'{"name": "nope"}',
    "unknown parameter": b'{"name": "ttft", "parameters": {"limit": 5}}',
    "a write": b'{"sql": "WITH a AS (DELETE FROM requests RETURNING id) SELECT * FROM a"}',
    "a file": b'{"sql": "FROM read_text(\'/etc/passwd\')"}',
    "65 KB of SQL": json.dumps({"sql": "SELECT 1 --" + "x" * 65536}).encode(),
    "deep": b'{"parameters": ' + b"[" * 50000 + b"]" * 50000 + b"}",
}


@pytest.mark.parametrize("what", BAD_BODIES)
def test_a_bad_body_is_refused_in_one_line(http: httpx.Client, what: str) -> None:
    headers = {"content-type": "application/json"}
    response = http.post("/api/v1/query", content=BAD_BODIES[what], headers=headers)
    assert response.status_code == (422 if what in ("a write", "a file") else 400), "DuckDB says it of those"
    assert is_one_line(response)


@pytest.mark.parametrize(
    "parameters",
    [
        {"limit": "x"},
        {"limit": "0"},
        {"where": "nope=1"},
        {"nonsense": "1"},
        {"sort": "nope"},
        {"since": "soon"},
    ],
)
def test_a_bad_list_is_refused_in_one_line(http: httpx.Client, parameters: dict[str, str]) -> None:
    response = http.get("/api/v1/requests", params=parameters)
    assert response.status_code == 400
    assert is_one_line(response)


def test_a_large_body_is_cut_off(http: httpx.Client) -> None:
    response = http.post(
        "/api/v1/query", content=b" " * (api.MAX_BODY_BYTES + 1), headers={"content-type": "application/json"}
    )
    assert response.status_code == 413
    assert is_one_line(response)


def test_foreign_hosts_and_pages_are_turned_away(http: httpx.Client) -> None:
    for host in ("evil.example", "evil.example:9177", "127.0.0.1.evil.example", "", "[::1"):
        response = http.get("/api/v1/status", headers={"host": host})
        assert response.status_code in (400, 403), host
    assert is_one_line(http.get("/api/v1/status", headers={"host": "evil.example"}))
    for host in ("localhost", "LOCALHOST:1", "127.0.0.1:9177", "[::1]:9177"):
        assert http.get("/healthz", headers={"host": host}).is_success, host
    assert http.get("/healthz", headers={"origin": "https://evil.example"}).status_code == 403
    assert http.get("/healthz", headers={"origin": "http://localhost:3000"}).is_success
    plain = http.post("/api/v1/query", content=b'{"sql": "SELECT 1"}', headers={"content-type": "text/plain"})
    assert plain.status_code == 415
    assert is_one_line(plain)


def test_the_hosts_follow_the_address() -> None:
    assert api.allowed_hosts("127.0.0.1") == api.allowed_hosts("localhost") == api.LOOPBACK
    assert api.allowed_hosts("0.0.0.0") is None
    assert "10.0.0.5" in (api.allowed_hosts("10.0.0.5") or ())


def test_other_pages_and_methods(http: httpx.Client) -> None:
    for response in (
        http.get("/"),
        http.get("/api/v1/query"),
        http.post("/api/v1/status"),
        http.get("/api/v2/x"),
    ):
        assert response.status_code in (404, 405)
        assert is_one_line(response)


def test_snapshots_go_to_new_absolute_duckdb_files_only(
    http: httpx.Client, daemon: FakeDaemon, tmp_path: Path
) -> None:
    good = tmp_path / "copy.duckdb"
    assert http.post("/api/v1/snapshot", json={"path": str(good)}).json() == {"path": str(good)}
    for bad in ("copy.duckdb", "/etc/passwd", "", "/tmp/a\0b.duckdb"):
        response = http.post("/api/v1/snapshot", json={"path": bad})
        assert response.status_code == 400, bad
        assert is_one_line(response)
    assert daemon.snapshots == [good]


def test_faults_of_the_daemon_are_one_line_without_a_trace(
    http: httpx.Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("a secret path /home/x")

    monkeypatch.setattr(daemon, "status", broken)
    with caplog.at_level(logging.ERROR):
        response = http.get("/api/v1/status")
    assert response.status_code == 500
    assert "a secret path" in caplog.text, "the log has it"
    assert is_one_line(response)
    assert "secret" not in response.text

    def closed() -> dict[str, Any]:
        raise KvscopeError("the store is closed")

    monkeypatch.setattr(daemon, "status", closed)
    assert http.get("/api/v1/status").json() == {"error": "the store is closed", "hint": ""}


def test_a_caller_that_leaves_in_mid_body_harms_nothing(http: httpx.Client, url: str) -> None:
    host, port = url.removeprefix("http://").split(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(
                b"POST /api/v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                b"Content-Length: 100\r\n\r\n{"
            )
    assert http.get("/healthz").is_success


def test_questions_end_when_their_clients_go(
    http: httpx.Client, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = query.questions()["ttft"]._replace(
        sql="SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range > b.range"
    )
    begun: list[float] = []
    monkeypatch.setattr(query, "checked", lambda *_: begun.append(time.monotonic()) or slow)
    host, port = url.removeprefix("http://").split(":")
    connections = [socket.create_connection((host, int(port))) for _ in range(2 * api.THREADS)]
    for connection in connections:
        connection.sendall(
            b"POST /api/v1/query HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            b'Content-Length: 16\r\n\r\n{"name": "ttft"}'
        )
    until(lambda: len(begun) == api.THREADS)
    for connection in connections:
        connection.close()
    assert http.get("/api/v1/requests").is_success
    assert time.monotonic() - begun[0] < LIMIT_S - 1, "it did not wait for their limit"
    assert len(begun) == api.THREADS, "nor was asked what nobody waits for any more"


def test_one_snapshot_at_a_time_and_no_question_waits_for_it(
    http: httpx.Client, url: str, daemon: FakeDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = threading.Event()
    monkeypatch.setattr(daemon, "snapshot", lambda path, everything: written.wait(60))
    body = {"path": str(tmp_path / "copy.duckdb")}
    with ThreadPoolExecutor(api.THREADS) as pool:
        asked = [
            pool.submit(httpx.post, f"{url}/api/v1/snapshot", json=body, timeout=60)
            for _ in range(api.THREADS)
        ]
        try:
            assert http.get("/api/v1/requests").is_success
            until(lambda: sum(one.done() for one in asked) == api.THREADS - 1)
        finally:
            written.set()
    answers = [one.result() for one in asked]
    assert sorted(answer.status_code for answer in answers) == [200, *[503] * (api.THREADS - 1)]
    assert all(is_one_line(answer) for answer in answers if answer.status_code == 503)


# --- live ----------------------------------------------------------------------------------------

WHILE_ROWS = {"window": "1h", "at": str(rows.T0_NS + 1800 * 10**9)}


def test_a_frame_is_what_docs_say_and_its_ids_are_texts(http: httpx.Client) -> None:
    made = http.get("/api/v1/live", params=WHILE_ROWS).json()
    assert set(made) == set(Frame.__struct_fields__)
    assert (made["live"], made["whole"], made["label"]) == (False, True, "")
    assert rows.PUSH["client_id"] in {row[1] for row in made["recent"]}
    assert all(isinstance(row[0], str) for row in made["recent"])
    frame = msgspec.convert(made, Frame)
    assert frame.recent_total == len(frame.recent)
    assert frame.answers["fleet"].dicts()[0]["level"] == "all"
    labelled = http.get("/api/v1/live", params={**WHILE_ROWS, "label": "benchmark"}).json()
    assert {row[10] for row in labelled["recent"]} == {"benchmark"}


def test_requests_in_flight_are_in_frames_and_in_the_questions_once_they_have_a_first_token(
    http: httpx.Client, daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = {**rows.LIVE, "label": ""}
    generating = {**rows.PUSH, "id": 77, "outcome": "in flight", "current_step": "decode.generate"}
    monkeypatch.setattr(daemon, "live_rows", [waiting, generating, {**rows.PULL, "outcome": "in flight"}])
    made = http.get("/api/v1/live", params={"label": "", "window": "77h"}).json()
    assert {row[0]: row[5] for row in made["in_flight"]}["77"] == "decode.generate"
    assert str(waiting["id"]) in {row[0] for row in made["in_flight"]}
    counted = post(
        http, {"sql": "SELECT count(*), count(*) FILTER (outcome = 'in flight') FROM requests"}
    ).json()
    assert counted["rows"] == [[len(rows.STORED) + 1, 1]], (
        "not the one without a token, not the stored one twice"
    )


@pytest.mark.parametrize("path", ["live", "stream"])
@pytest.mark.parametrize(
    "parameters",
    [
        "window=1y",
        "window=",
        "window=-5m",
        "window=31d",
        "window=0s",
        "window=5m&window=6m",
        "where=nope=1",
        "where=connector",
        "where=" + "x" * 2000,
        "&".join(["where=connector=push"] * 21),
        "label=" + "x" * 300,
        "label=a%00b",
        "label=a&label=b",
        "at=yesterday",
        "at=99999999999999999999",
        "limit=5",
        "windows=5m",
        "%00=1",
        "refresh=10ms",
        "refresh=2h",
        "refresh=fast",
    ],
)
def test_a_bad_frame_is_refused_in_one_line(http: httpx.Client, path: str, parameters: str) -> None:
    response = http.get(f"/api/v1/{path}?{parameters}")
    assert response.status_code == 400, response.text[:300]
    assert is_one_line(response)


def test_a_stream_of_the_past_is_refused_with_what_to_ask(http: httpx.Client) -> None:
    response = http.get("/api/v1/stream?at=5m")
    assert (response.status_code, is_one_line(response)) == (400, True)
    assert "/api/v1/live" in response.json()["hint"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["window", "at", "where", "label", "refresh", "x", ""]), st.text(max_size=40)
        ),
        max_size=4,
    )
)
def test_whatever_is_asked_no_trace_comes_back(
    server: tuple[FakeDaemon, str], asked: list[tuple[str, str]]
) -> None:
    with httpx.Client(base_url=server[1], trust_env=False, timeout=30) as http:
        response = http.get(
            "/api/v1/live", params=[(n, v.encode("utf-8", "replace").decode()) for n, v in asked]
        )
    assert response.status_code in (200, 400)
    if response.status_code == 400:
        assert is_one_line(response)


def test_a_stream_is_lines_of_json_of_which_the_first_is_whole(http: httpx.Client) -> None:
    with http.stream(
        "GET", "/api/v1/stream", params={"refresh": "200ms", "where": "connector=push"}
    ) as response:
        assert response.headers["content-type"] == "application/x-ndjson"
        lines = response.iter_lines()
        made = [msgspec.json.decode(next(lines), type=Frame) for _ in range(3)]
    assert [one.whole for one in made] == [True, False, False]
    assert made[0].where == ["connector=push"]
    assert made[0].at_ns < made[1].at_ns < made[2].at_ns


def serving(content: bytes, status: str = "200 OK", version: bytes = b"0.0.9") -> tuple[str, socket.socket]:
    """A server that answers every live question like that, and says that it is of that version."""
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                asked = connection.recv(65536)
                health = b"/healthz" in asked
                body = b'{"ok": true, "kvscope": "' + version + b'"}' if health else content
                head = f"HTTP/1.1 {'200 OK' if health else status}\r\nContent-Length: {len(body)}\r\n"
                connection.sendall(head.encode() + b"Connection: close\r\n\r\n" + body)

    threading.Thread(target=answer, daemon=True).start()
    return f"http://127.0.0.1:{listener.getsockname()[1]}", listener


@pytest.mark.parametrize(
    ("content", "status", "error", "words"),
    [
        (
            b'{"error": "no such page", "hint": ""}',
            "404 Not Found",
            client.OtherVersion,
            "kvscope 0.0.9 and has no",
        ),
        (
            b'{"kvscope": "9", "live": 1}',
            "200 OK",
            client.OtherVersion,
            "use the same version here and there",
        ),
        (b"[1, 2", "200 OK", client.OtherVersion, "use the same version"),
        (b"<html>", "404 Not Found", client.NoDaemon, "is no kvscope daemon"),
        (
            b'{"error": "the store is closed", "hint": ""}',
            "200 OK",
            client.DaemonError,
            "the store is closed",
        ),
        (b'{"error": "busy", "hint": "wait"}', "503 Busy", client.DaemonError, "busy; wait"),
    ],
    ids=["older", "newer", "no JSON", "no daemon", "a fault in the stream", "busy"],
)
def test_what_answers_otherwise_is_told_in_one_line(
    content: bytes, status: str, error: type[KvscopeError], words: str
) -> None:
    url, listener = serving(content + b"\n", status)
    daemon = client.Daemon(url)
    with listener:
        for ask in (lambda: daemon.frame(Scope()), lambda: next(daemon.stream(Scope()))):
            with pytest.raises(error, match=words) as refused:
                ask()
            assert "\n" not in str(refused.value)
    daemon.close()


def test_a_line_without_end_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_LINE_BYTES", 1000)
    url, listener = serving(b"x" * 5000)
    with listener, pytest.raises(client.DaemonError, match="a frame of more than"):
        next(client.Daemon(url).stream(Scope()))
