"""Users' own SQL on the daemon: it runs in processes of its own, and can't harm the daemon."""

from __future__ import annotations

import errno
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import psutil
import pyarrow
import pytest

from kvscope import query, storefile
from kvscope.collectors import api, sandbox
from kvscope.collectors.sandbox import Sandbox
from kvscope.demo.simulate import Fleet
from kvscope.errors import KvscopeError
from kvscope.query import Limits, QueryError, QueryRefused

from .collecting import Served, Writer, until

SECONDS = 2.0
MEMORY_MB = 256
GROWTH_MB = 128
"""What the daemon's own memory may grow by while it is stormed and goes on storing: answers, rows on their
way to a process, the store's cache."""


class Reply(NamedTuple):
    status: int
    answer: dict[str, Any]
    seconds: float


def post(url: str, **body: Any) -> Reply:
    question = urllib.request.Request(
        f"{url}/api/v1/query", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began = time.monotonic()
    try:
        with urllib.request.urlopen(question, timeout=120) as response:
            status, content = response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            status, content = error.code, error.read()
    return Reply(status, json.loads(content), time.monotonic() - began)


# --- hostile SQL, while the daemon collects ----------------------------------------------------------

SECRET = "the-secret-of-the-host"
SLOW = r"stopped after|was killed after"
BIG = "needed more than 256 MB"
HOSTILE = {
    "read_text": ("SELECT * FROM read_text('{secret}')", "disabled"),
    "read_blob": ("SELECT * FROM read_blob('{secret}')", "disabled"),
    "read_csv": ("SELECT * FROM read_csv('{secret}')", "disabled"),
    "glob": ("SELECT * FROM glob('/etc/*')", "disabled"),
    "the store's file": ("SELECT octet_length(content) FROM read_blob('{store}')", "disabled"),
    "a file as a table": ("SELECT * FROM '{secret}'", "does not exist|disabled"),
    "parquet": ("SELECT * FROM read_parquet('{secret}')", "disabled"),
    "http": ("SELECT * FROM read_csv('http://127.0.0.1:1/x.csv')", "disabled"),
    "COPY TO": ("COPY (SELECT 1) TO '{stolen}'", "only SELECT"),
    "COPY FROM": ("COPY requests FROM '{secret}'", "only SELECT"),
    "EXPORT": ("EXPORT DATABASE '{stolen}'", "only SELECT"),
    "ATTACH": ("ATTACH '{store}' AS other", "only SELECT"),
    "INSTALL": ("INSTALL httpfs", "only SELECT"),
    "LOAD": ("LOAD httpfs", "only SELECT"),
    "SET": ("SET memory_limit = '100GB'", "only SELECT"),
    "RESET": ("RESET memory_limit", "only SELECT"),
    "PRAGMA": ("PRAGMA threads = 64", "only SELECT"),
    "a secret": ("CREATE SECRET s (TYPE http)", "only SELECT"),
    "set_config": ("SELECT * FROM pragma_database_size(), (SELECT set_config('threads', '9'))", "not exist"),
    "a write in a CTE": ("WITH a AS (DELETE FROM requests RETURNING id) SELECT * FROM a", "[Cc]an only|not"),
    "EXPLAIN ANALYZE of a write": (
        "EXPLAIN ANALYZE INSERT INTO requests (id) VALUES (1)",
        "of a SELECT only",
    ),
    "several statements": ("SELECT 1; DROP TABLE requests", "exactly one"),
    "COMMIT": ("COMMIT", "only SELECT"),
    "repeat": ("SELECT length(repeat('x', 1000000000))", BIG),
    "cross join of strings": (
        "SELECT string_agg(a.range::VARCHAR || b.range::VARCHAR) FROM range(100000) a, range(100000) b",
        f"{BIG}|{SLOW}",
    ),
    "a long list": ("SELECT len(range(1000000000))", BIG),
    "doubling": (
        "WITH RECURSIVE r(s) AS (SELECT 'xxxx' UNION ALL SELECT s || s FROM r) SELECT max(len(s)) FROM r",
        BIG,
    ),
    "a wide answer": ("SELECT repeat('x', 100000000) FROM range(10)", f"{BIG}|cut"),
    "a sort": ("SELECT * FROM range(100000000) ORDER BY range DESC", f"{BIG}|{SLOW}"),
    "endless recursion": (
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r",
        SLOW,
    ),
    "a large join": ("SELECT count(*) FROM range(1000000) a, range(1000000) b WHERE a.range > b.range", SLOW),
    "no interrupt": ("SELECT md5(repeat(range::VARCHAR, 3000000)) FROM range(1000)", f"{SLOW}|{BIG}|ended"),
    "deep brackets": (f"SELECT {'(' * 20000}1{')' * 20000}", "depth"),
    "deep lists": (f"SELECT {'[' * 5000}1{']' * 5000}", "depth"),
    "deep SELECTs": (f"{'SELECT * FROM (' * 3000}SELECT 1{')' * 3000}", "."),
    "a long sum": (f"SELECT {'+'.join(['1'] * 30000)}", "depth"),
    "more than 64 KB": (f"SELECT 1 --{'x' * 65536}", "64 KiB"),
    "control characters": ('SELECT 1 FROM "a\x1b[31m\x07"', "exist"),
}


class Storm(NamedTuple):
    replies: dict[str, Reply]
    growth_mb: float
    stored: list[int]
    """Rows on disk, as they were seen meanwhile."""
    named: list[float]
    """Seconds that a named question took meanwhile."""
    quiet_s: float
    """Seconds that it took before."""
    folder: Path


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Storm]:
    """All of HOSTILE, two at once, on a daemon that collects what a fleet records meanwhile."""
    folder = tmp_path_factory.mktemp("storm")
    places = {"secret": folder / "secret.csv", "stolen": folder / "stolen", "store": folder / "s.duckdb"}
    places["secret"].write_text(f"{SECRET}\n")
    writer = Writer(folder / "rings")
    served = Served(
        *("--dir", str(folder / "rings"), "--store", str(folder / "s.duckdb")),
        *("--sql-seconds", str(SECONDS), "--sql-memory-mb", str(MEMORY_MB)),
    )
    stop = threading.Event()

    def record() -> None:
        while not stop.wait(0.05):
            writer.write(5)

    recording = threading.Thread(target=record)
    recording.start()
    try:
        until(lambda: served.stored() > 100)
        post(served.url, sql="SELECT count(*) FROM waits")
        quiet = [post(served.url, name="ttft", parameters={"since": "5m"}).seconds for _ in range(5)]
        process = psutil.Process(served.process.pid)
        before, most = process.memory_info().rss, 0
        stored, named = [], []
        with ThreadPoolExecutor(2) as pool:
            asked = {
                what: pool.submit(post, served.url, sql=_filled(sql, places))
                for what, (sql, _) in HOSTILE.items()
            }
            while not all(one.done() for one in asked.values()):
                most = max(most, process.memory_info().rss)
                stored.append(served.stored())
                named.append(post(served.url, name="ttft", parameters={"since": "5m"}).seconds)
                time.sleep(0.2)
        yield Storm(
            {what: one.result() for what, one in asked.items()},
            (most - before) / 1e6,
            stored,
            named,
            sorted(quiet)[2],
            folder,
        )
        stop.set()
        recording.join()
        code, _ = served.stop()
        assert code == 0
        with duckdb.connect(str(places["store"]), read_only=True) as connection:
            (counted,) = connection.execute("SELECT count(DISTINCT client_id) FROM requests").fetchall()
        assert counted == (len(writer.clients),), "no request was lost, none deleted"
    finally:
        stop.set()
        recording.join()
        for one in (served, writer):
            one.process.kill()
            one.process.communicate()


def _filled(sql: str, places: dict[str, Path]) -> str:
    for name, path in places.items():
        sql = sql.replace(f"{{{name}}}", str(path))
    return sql


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_sql_is_refused_or_stopped(storm: Storm, what: str) -> None:
    reply = storm.replies[what]
    if reply.status == 200:
        assert "cut" in HOSTILE[what][1], reply.answer
        assert reply.answer["truncated"]
        return
    line = f"{reply.answer['error']}; {reply.answer['hint']}"
    assert reply.status in (400, 422), line
    assert line.isprintable()
    assert SECRET not in line
    # On a host that is busy the time may be over first.
    assert re.search(f"{HOSTILE[what][1]}|{SLOW}", line), line


def test_each_is_stopped_within_its_limit(storm: Storm) -> None:
    # Before each there may be one that runs, and the start of a process, which a busy host delays.
    assert max(reply.seconds for reply in storm.replies.values()) < 12 + 30 * storm.quiet_s


def test_the_daemon_goes_on_collecting_and_answering(storm: Storm) -> None:
    assert len(storm.stored) > 5
    grown = [after - before for before, after in zip(storm.stored, storm.stored[1:], strict=False)]
    assert min(grown) >= 0
    assert sum(one > 0 for one in grown) > len(grown) / 2, "rows were stored all the time"
    assert sorted(storm.named)[len(storm.named) // 2] < 1 + 3 * storm.quiet_s, "so were questions answered"


def test_the_daemon_does_not_grow(storm: Storm) -> None:
    assert storm.growth_mb < GROWTH_MB


def test_nothing_is_written(storm: Storm) -> None:
    assert not (storm.folder / "stolen").exists()
    assert (storm.folder / "secret.csv").read_text() == f"{SECRET}\n"


FILES = [
    "read_text", "glob", "a file as a table", "COPY TO", "EXPORT", "ATTACH", "INSTALL", "LOAD", "SET",
    "PRAGMA", "a write in a CTE", "EXPLAIN ANALYZE of a write", "several statements", "COMMIT",
    "a large join", "deep brackets", "deep SELECTs", "more than 64 KB",
]  # fmt: skip


def test_a_file_that_is_read_without_a_daemon_is_left_as_it_is(tmp_path: Path) -> None:
    store = tmp_path / "s.duckdb"
    with duckdb.connect(str(store)) as connection:
        storefile.create_tables(connection)
    before = store.read_bytes()
    places = {"secret": tmp_path / "secret.csv", "stolen": tmp_path / "stolen", "store": store}
    places["secret"].write_text(SECRET)
    opened = storefile.open_file(store)
    for what in FILES:
        with pytest.raises(KvscopeError) as caught:
            query.run_sql(opened.cursor(), _filled(HOSTILE[what][0], places), limits=Limits(seconds=2.0))
        assert str(caught.value).isprintable(), what
        assert SECRET not in str(caught.value), what
    opened.close()
    assert store.read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.duckdb", "secret.csv"]


# --- processes -------------------------------------------------------------------------------------


def children(served: Served) -> list[psutil.Process]:
    return list(psutil.Process(served.process.pid).children(recursive=True))


def at_work(served: Served) -> list[psutil.Process]:
    """Those that compute."""
    before = {one: one.cpu_times().user for one in children(served)}
    time.sleep(0.5)
    return [one for one in before if one.is_running() and one.cpu_times().user > before[one] + 0.05]


def has_ended(process: psutil.Process) -> bool:
    """Whether it ran to its end; the daemon may have seen that, or not yet."""
    try:
        return bool(process.status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


ENDLESS = HOSTILE["endless recursion"][0]


def test_processes_come_when_asked_are_at_most_three_and_go_with_the_daemon(
    tmp_path: Path, start: Callable[..., Any]
) -> None:
    flags = ("--dir", str(tmp_path / "rings"), "--store", str(tmp_path / "s.duckdb"), "--sql-seconds", "2")
    served = start(Served, *flags)
    assert post(served.url, name="ttft").status == 200
    assert children(served) == [], "named questions need none"
    assert post(served.url, sql="SELECT 41 + 1").answer["rows"] == [[42]]
    (reserve,) = until(lambda: children(served))
    with ThreadPoolExecutor(5) as pool:
        asked = [pool.submit(post, served.url, sql=ENDLESS) for _ in range(5)]
        most = 0
        while not all(one.done() for one in asked):
            most = max(most, len(children(served)))
            assert post(served.url, name="ttft").status == 200
            time.sleep(0.05)
    assert {one.result().status for one in asked} == {422}
    assert 2 <= most <= 3
    until(lambda: len(children(served)) == 1 and children(served)[0].status() != psutil.STATUS_ZOMBIE)
    assert not psutil.pid_exists(reserve.pid), "one that had to be stopped is not used again"
    (reserve,) = left = children(served)
    assert [post(served.url, sql=f"SELECT {i}").status for i in range(5)] == [200] * 5
    assert until(lambda: [one.pid for one in children(served)]) == [reserve.pid], "one that did well is"
    served.kill()
    until(lambda: not any(one.is_running() for one in left))

    again = start(Served, *flags)
    assert post(again.url, sql="SELECT 1").status == 200
    left = until(lambda: children(again))
    with ThreadPoolExecutor(1) as pool:
        cut_short = pool.submit(post, again.url, sql=ENDLESS)
        until(lambda: any(one.cpu_times().user > 1 for one in children(again)))
        assert again.stop()[0] == 0
        with pytest.raises((KvscopeError, OSError, AssertionError)):
            assert cut_short.result().status == 200
    assert not any(one.is_running() for one in left)


def test_a_process_that_is_killed_costs_its_own_query_only(tmp_path: Path, start: Callable[..., Any]) -> None:
    served = start(Served, "--dir", str(tmp_path / "rings"), "--store", str(tmp_path / "s.duckdb"))
    assert post(served.url, sql="SELECT 1").status == 200
    (reserve,) = until(lambda: children(served))
    reserve.kill()
    until(lambda: has_ended(reserve))
    assert post(served.url, sql="SELECT 2").answer["rows"] == [[2]], "one in reserve that died is replaced"
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(post, served.url, sql=ENDLESS)
        busy = until(lambda: at_work(served))
        busy[0].kill()
        reply = asked.result()
    assert (reply.status, "SIGKILL" in reply.answer["error"]) == (422, True)
    assert post(served.url, sql="SELECT 3").answer["rows"] == [[3]]


def test_a_query_ends_when_its_client_goes(tmp_path: Path, start: Callable[..., Any]) -> None:
    flags = ("--dir", str(tmp_path / "rings"), "--store", str(tmp_path / "s.duckdb"), "--sql-seconds", "300")
    served = start(Served, *flags)
    place = urllib.parse.urlsplit(served.url)
    body = json.dumps({"sql": ENDLESS})
    head = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    connections = [socket.create_connection((place.hostname, place.port)) for _ in range(4)]
    for connection in connections:
        connection.sendall(f"POST /api/v1/query HTTP/1.1\r\n{head}\r\n\r\n{body}".encode())
    busy = until(lambda: len(found := at_work(served)) == api.OWN_SQL and found)
    for connection in connections:
        connection.close()
    until(lambda: all(map(has_ended, busy)))
    assert post(served.url, sql="SELECT 41 + 1").answer["rows"] == [[42]], "none holds its place"
    until(lambda: at_work(served) == [])


# --- answers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[duckdb.DuckDBPyConnection]:
    """What a daemon stored of a simulated fleet."""
    from kvscope.collectors.daemon import Daemon
    from kvscope.settings import Settings

    folder = tmp_path_factory.mktemp("stored")
    fleet = Fleet(folder / "rings", "push", 4096)
    daemon = Daemon(Settings(dir=folder / "rings", store=folder / "s.duckdb", sample_seconds=0))
    daemon.start()
    for _ in range(20):
        fleet.request()
    until(lambda: daemon.status()["pipeline"]["requests"] == 20)
    daemon.stop()
    connection = duckdb.connect(str(folder / "s.duckdb"))
    storefile.lock(connection)
    yield connection
    connection.close()


@pytest.fixture(scope="module")
def boxed() -> Iterator[Sandbox]:
    made = Sandbox(Limits(rows=500, seconds=20.0), MEMORY_MB)
    yield made
    made.close()


def live(database: duckdb.DuckDBPyConnection) -> pyarrow.Table:
    """A request that the store does not have, as a daemon has them in flight."""
    stored = database.cursor().sql("FROM requests LIMIT 1").to_arrow_table()
    return stored.set_column(0, "id", pyarrow.array([77], pyarrow.uint64()))


SAME: list[tuple[str, dict[str, Any]]] = [
    ("SELECT * FROM requests ORDER BY id", {}),
    ("FROM waits ORDER BY id", {"where": ["coordination_ns>1ms"]}),
    ("SELECT count(*) FROM requests", {}),
    ("SELECT count(*), sum(ttft_ns) FROM requests WHERE client_id LIKE '%1%' AND d_engine <> 'x'", {}),
    ("SELECT step, count(*), sum(ns) FROM request_steps GROUP BY ALL ORDER BY ALL", {"label": ""}),
    ("SELECT r FROM requests r ORDER BY r.id LIMIT 3", {}),
    ("SELECT COLUMNS('.*_ns') FROM requests ORDER BY ALL", {"since": "1d"}),
    (
        "SELECT a.id, b.state FROM requests a JOIN transfers b ON a.id = b.request_id "
        "JOIN requests c ON c.id = a.id WHERE c.prompt_tokens > 0 ORDER BY ALL",
        {},
    ),
    (
        "SELECT id FROM requests WHERE arrived_at_ns >= $since ORDER BY id LIMIT $limit",
        {"since": "2d", "limit": 3},
    ),
    ("SELECT engine, sum(read) FROM engines GROUP BY ALL ORDER BY ALL", {}),
    ("SELECT s.step FROM requests, unnest(waterfall) AS u(s) ORDER BY ALL", {}),
    ("DESCRIBE waits", {}),
    ("SELECT $label, $limit", {"limit": 7}),
    ("SELECT CAST(1.5 AS DECIMAL(9, 2)), DATE '2026-11-29', 'nan'::DOUBLE, NULL, 2::HUGEINT ** 100", {}),
]  # fmt: skip


@pytest.mark.parametrize(("sql", "parameters"), SAME, ids=[sql[:40] for sql, _ in SAME])
def test_the_answer_is_what_it_would_be_in_the_daemon(
    database: duckdb.DuckDBPyConnection, boxed: Sandbox, sql: str, parameters: dict[str, Any]
) -> None:
    limits = Limits(rows=500, seconds=20.0)
    wanted = query.result_json(query.run_sql(database.cursor(), sql, parameters, limits, live(database)))
    found = boxed.run(database.cursor(), sql, parameters, live(database))
    answer = json.loads(found.content)
    assert [column["type"] for column in answer["columns"]] == [c["type"] for c in wanted["columns"]]
    assert answer["rows"] == json.loads(json.dumps(wanted["rows"]))
    assert found.truncated == answer["truncated"] is False


def test_an_arrow_stream_has_the_same_types_and_is_cut_like_json(
    database: duckdb.DuckDBPyConnection, boxed: Sandbox
) -> None:
    sql = "SELECT id, label, waterfall, NULL::BIGINT AS n, to_timestamp(0) AS t FROM requests ORDER BY id"
    table, _ = query.run_arrow(database.cursor(), sql)
    found = boxed.run(database.cursor(), sql, {}, arrow=True)
    assert pyarrow.ipc.open_stream(found.content).read_all().equals(table)
    many = boxed.run(database.cursor(), "SELECT range FROM range(2000)", {}, arrow=True)
    assert (pyarrow.ipc.open_stream(many.content).read_all().num_rows, many.truncated) == (500, True)


def test_only_the_columns_that_the_plan_needs_are_sent(
    database: duckdb.DuckDBPyConnection, boxed: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = []
    ship = Sandbox._ship
    monkeypatch.setattr(
        Sandbox,
        "_ship",
        lambda self, cursor, need, *rest: needs.append(need) or ship(self, cursor, need, *rest),
    )
    sql = "SELECT ttft_ns FROM waits WHERE connector = 'push' AND 'prompt_tokens' <> '' -- model"
    boxed.run(database.cursor(), sql, {})
    assert [(one.table, set(one.columns)) for one in needs] == [("requests", {"ttft_ns", "connector"})]
    needs.clear()
    boxed.run(database.cursor(), "DESCRIBE requests", {})
    boxed.run(database.cursor(), "EXPLAIN SELECT * FROM requests", {})
    assert needs == []


def test_too_many_rows_to_send_are_refused_with_what_to_do(
    database: duckdb.DuckDBPyConnection, boxed: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "MAX_SHIPPED_BYTES", 100)
    with pytest.raises(QueryError, match=r"since, until or where, name the columns.*--db"):
        boxed.run(database.cursor(), "SELECT * FROM requests", {})
    assert boxed.run(database.cursor(), "SELECT 1", {}).content


def test_no_more_than_the_answer_is_kept_of_what_is_asked(
    database: duckdb.DuckDBPyConnection, boxed: Sandbox
) -> None:
    for sql, error in (("SELEC 1", QueryError), ("DROP TABLE requests", QueryRefused)):
        with pytest.raises(error) as caught:
            boxed.run(database.cursor(), sql, {})
        assert type(caught.value) is error
        assert "\n" not in str(caught.value)
    assert database.cursor().execute("SELECT count(*) FROM requests").fetchall() == [(20,)]


# --- a process that lies ---------------------------------------------------------------------------

LIAR = """
import os, struct, sys, time
def send(text):
    sys.stdout.buffer.write(struct.pack("!I", len(text)) + text.encode())
    sys.stdout.buffer.flush()
send('{"type": "ready"}')
(length,) = struct.unpack("!I", sys.stdin.buffer.read(4))
sys.stdin.buffer.read(length)
"""
LIES = {
    "a huge message": r"sys.stdout.buffer.write(b'\xff' * 100)",
    "no JSON": "send('{')",
    "another message": """send('{"type": "job"}')""",
    "another table": """send('{"type": "need", "table": "meta", "columns": ["key"]}')""",
    "another column": """send('{"type": "need", "table": "requests", "columns": ["id) FROM meta --"]}')""",
    "no columns": """send('{"type": "need", "table": "requests", "columns": []}')""",
    "an endless answer": """send('{"type": "answer", "bytes": 1000000000000, "truncated": false}')""",
    "half an answer": """send('{"type": "answer", "bytes": 10, "truncated": false}'); print('{')""",
    "a complaint that drives terminals": (
        r"""send('{"type": "complaint", "refused": false, "text": "a\\u001b[31m"}')"""
    ),
    "an exit": "sys.exit(3)",
    "a crash": "os.abort()",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_process_that_answers_nonsense_is_told_in_one_line(
    database: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch, lie: str
) -> None:
    stay = "" if lie in ("half an answer", "an exit", "a crash") else "\ntime.sleep(60)"
    monkeypatch.setattr(
        sandbox,
        "COMMAND",
        ("/usr/bin/env", "python3", "-c", LIAR + LIES[lie] + "\nsys.stdout.flush()" + stay),
    )
    liar = Sandbox(Limits(seconds=20.0), MEMORY_MB)
    with pytest.raises(QueryError) as caught:
        liar.run(database.cursor(), "SELECT 1", {})
    assert str(caught.value).isprintable()
    assert "was killed after" not in str(caught.value), "it was found out at once"
    liar.close()
    assert liar._children == set()


def test_a_process_that_says_nothing_is_killed(
    database: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "COMMAND", ("/usr/bin/env", "python3", "-c", LIAR + "time.sleep(60)"))
    boxed = Sandbox(Limits(seconds=0.5), MEMORY_MB)
    with pytest.raises(QueryError, match="was killed after"):
        boxed.run(database.cursor(), "SELECT 1", {})
    monkeypatch.setattr(sandbox, "COMMAND", ("/bin/false",))
    boxed._retire()
    with pytest.raises(KvscopeError, match="does not start"):
        boxed.run(database.cursor(), "SELECT 1", {})
    boxed.close()
    with pytest.raises(KvscopeError, match="is stopping"):
        boxed.run(database.cursor(), "SELECT 1", {})
    assert boxed._children == set()


def test_a_host_without_room_for_a_process_is_said_so_and_is_asked_again(
    database: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    boxed = Sandbox(Limits(), MEMORY_MB)

    def no_process(*arguments: object, **options: object) -> None:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    with monkeypatch.context() as patched:
        patched.setattr("subprocess.Popen", no_process)
        with pytest.raises(KvscopeError, match="no process can be started"):
            boxed.run(database.cursor(), "SELECT 1", {})
    assert boxed.run(database.cursor(), "SELECT 1", {}).content
    boxed.close()
    assert boxed._children == set()


def test_a_query_whose_process_is_closed_beside_it_fails_in_one_line(
    database: duckdb.DuckDBPyConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of the daemon, while rows are read to be sent."""
    boxed = Sandbox(Limits(), MEMORY_MB)
    ship = Sandbox._ship

    def close_and_ship(sandbox_: Sandbox, *arguments: Any) -> int:
        boxed.close()
        return ship(sandbox_, *arguments)

    monkeypatch.setattr(Sandbox, "_ship", close_and_ship)
    with pytest.raises(QueryError, match="the daemon is stopping"):
        boxed.run(database.cursor(), "SELECT count(ttft_ns) FROM requests", {})
    assert boxed._children == set()
