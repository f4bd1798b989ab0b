"""The command line in processes of its own: what people see, exit codes, and what is imported."""

from __future__ import annotations

import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from kvscope import __version__, query
from kvscope.cli import COMMANDS
from kvscope.commands.requests import short_names

from . import rows
from .conftest import FakeDaemon, Run, ring, status

MINE = ("status", "requests", "explain", "query", "snapshot", "archive")
HEAVY = ("duckdb", "httpx", "starlette", "pyarrow", "uvicorn", "anyio")


def failed(result: subprocess.CompletedProcess[str], code: int) -> str:
    """Assert that it failed as it should and return what it said, which is one line."""
    assert result.returncode == code, result
    assert "Traceback" not in result.stderr
    lines = result.stderr.splitlines()
    assert lines
    return lines[-1]


# --- start -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["nonsense"], []])
def test_the_start_imports_none_of_the_extras(arguments: list[str]) -> None:
    script = (
        "import sys, contextlib; from kvscope.cli import main\n"
        "with contextlib.suppress(SystemExit): main(sys.argv[1:])\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "arguments", [["query", "--list"], ["query", "ttft", "--describe"], ["requests", "--help"]]
)
def test_with_msgspec_alone_what_needs_no_extra_works(arguments: list[str]) -> None:
    block = (
        "import sys; sys.modules.update(dict.fromkeys(%r)); from kvscope.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", block % (HEAVY,), *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("arguments", "missing"), [(["status"], "httpx"), (["query", "ttft", "--db", "x"], "duckdb")]
)
def test_a_missing_extra_is_named(arguments: list[str], missing: str) -> None:
    block = (
        "import sys; sys.modules.update(dict.fromkeys(%r)); from kvscope.cli import main; sys.exit(main())"
    )
    done = subprocess.run(
        [sys.executable, "-c", block % (HEAVY,), *arguments], capture_output=True, text=True, check=False
    )
    line = failed(done, 1)
    assert line == f"kvscope: {arguments[0]} needs {missing}: pip install 'kvscope[collector]'"


def test_help_and_version(run: Run) -> None:
    text = run("--help")
    assert text.returncode == 0
    for name in COMMANDS:
        assert f"\n  {name} " in text.stdout
    assert run("--version").stdout == f"kvscope {__version__}\n"
    assert run().returncode == 2


@pytest.mark.parametrize("command", MINE)
def test_each_command_explains_itself_with_an_example(run: Run, command: str) -> None:
    text = run(command, "--help", COLUMNS="100")
    assert text.returncode == 0
    assert f"\n  kvscope {command}" in text.stdout
    assert "--url" in text.stdout


# --- errors ----------------------------------------------------------------------------------------


def test_without_a_daemon_one_line_says_what_to_do(run: Run) -> None:
    for arguments in (
        ["status"],
        ["requests"],
        ["explain", "x"],
        ["query", "ttft"],
        ["snapshot", "/tmp/x.duckdb"],
    ):
        line = failed(run(*arguments, "--url", "http://127.0.0.1:9"), 3)
        assert line == (
            "kvscope: no kvscope daemon at http://127.0.0.1:9; "
            "start one with `kvscope serve` or point --url to it"
        )


def test_the_address_comes_from_flag_environment_or_settings(run: Run, url: str) -> None:
    port = url.rpartition(":")[2]
    assert "http://127.0.0.1:9;" in failed(run("requests", "--port", "9", KVSCOPE_URL=""), 3)
    assert run("requests", KVSCOPE_URL="", KVSCOPE_PORT=port).returncode == 0
    assert run("requests", "--url", url, KVSCOPE_URL="http://127.0.0.1:9").returncode == 0
    assert run("requests", "--port", port, KVSCOPE_URL="http://127.0.0.1:9").returncode == 0
    assert "kvscope: " in failed(run("requests", KVSCOPE_URL="", KVSCOPE_PORT="many"), 2)


def test_another_server_is_not_taken_for_a_daemon(run: Run) -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html>")

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        line = failed(run("status", "--url", f"http://127.0.0.1:{server.server_port}"), 3)
        server.shutdown()
    assert "is no kvscope daemon" in line


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["requets"], 2, "did you mean requests?"),
        (["requests", "--where", "nope=1"], 2, "no column 'nope'"),
        (["requests", "--where", "ttft>1"], 2, "write 1ms"),
        (["requests", "--limit", "many"], 2, "invalid int value"),
        (["requests", "--limit", "0"], 2, "limit is"),
        (["requests", "--since", "yesterday"], 2, "no duration"),
        (["requests", "--url", "ftp://x"], 2, "no URL"),
        (["requests", "--url", "http://[::1"], 2, "no URL"),
        (["requests", "--lim", "3"], 2, "unrecognized"),
        (["explain"], 2, "REQUEST"),
        (["explain", "nobody"], 1, "no request 'nobody'"),
        (["explain", ""], 2, "an id has"),
        (["query"], 2, "kvscope query --list"),
        (["query", "nope"], 2, "there are: coordination_load"),
        (["query", "nope", "--describe"], 2, "there are: coordination_load"),
        (["query", "DROP TABLE requests"], 2, "only SELECT"),
        (["query", "SELECT 1 --" + "x" * 65536], 2, "64 KiB"),
        (["query", "ttft", "--limit", "5"], 2, "takes no parameter"),
        (["query", "ttft", "--db", "absent.duckdb"], 1, "no such file"),
        (["query", "ttft", "--db", "/"], 1, "no kvscope Parquet directory"),
        (["query", "ttft", "--until", "yesterday"], 2, "until: 'yesterday' is no duration before now"),
        (["query", "ttft", "--since", "5m", "--until", "10m"], 2, "since is not before until"),
        (["query", "ttft", "--where", "nope=1"], 2, "no column 'nope'"),
        (["query", "leases", "--where", "connector=push"], 2, "takes no parameter 'where'"),
        (["query", "engines", "--since", "5m"], 2, "takes no parameter 'since' (it takes: none)"),
        (["query", "SELECT 1", "--label", ""], 2, "does not read requests"),
        (["snapshot", "copy.db"], 2, "ends in .duckdb"),
        (["requests", "--config", "/absent.toml", "--url", ""], 2, "no such settings file"),
        (["query", "ttft", "--config", "/absent.toml"], 2, "no such settings file"),
        (["query", "ttft", "--port", "99999"], 2, "--port: '99999' does not fit"),
        (["query", "ttft", "--port", "9", "--url", "http://x"], 2, "--url stands for --host and --port"),
        (["query", "ttft", "--db", "x.duckdb", "--url", "http://x"], 2, "not both"),
        (["label", "x", "--db", "x.duckdb", "--url", "http://x", "--remove"], 2, "not both"),
        (["query", "ttft", "--sql-seconds", "2"], 2, "--sql-seconds is for --db"),
        (["shell", "--sql-rows", "2"], 2, "--sql-rows is for --db"),
        (["query", "ttft", "--since", "10"], 2, "since: 10 is no moment; write 10m"),
        (["requests", "--since", "1795913000"], 2, "write 1795913000000000000"),
    ],
)
def test_bad_input_is_one_line_and_its_exit_code(
    run: Run, arguments: list[str], code: int, words: str
) -> None:
    environment = {"KVSCOPE_URL": ""} if "" in arguments and "--config" in arguments else {}
    line = failed(run(*arguments, **environment), code)
    assert words in line
    assert line.startswith("kvscope")


def test_what_matches_is_listed_when_an_id_is_ambiguous(run: Run) -> None:
    result = run("explain", "req-000")
    assert str(rows.PULL["id"]) in result.stderr
    assert result.returncode == 1
    assert result.stderr.splitlines()[0] == "kvscope: 8 requests match 'req-000'; write more of the id"
    assert result.stdout == ""


def test_ctrl_c_ends_it_quietly(url: str) -> None:
    endless = "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r"
    command = [sys.executable, "-m", "kvscope.cli", "query", endless, "--url", url]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        time.sleep(1.2)
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 130
        assert process.stderr is not None
        assert process.stderr.read() == ""


@pytest.mark.parametrize("characters", [10, 1500], ids=["on exit", "while writing"])
def test_a_reader_that_stops_reading_is_no_error(url: str, characters: int) -> None:
    wide = f"SELECT repeat('x', {characters}) FROM range(100)"
    command = [sys.executable, "-m", "kvscope.cli", "query", wide, "--format", "csv", "--url", url]
    read, write = os.pipe()
    os.close(read)
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False, env=env)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


# --- answers ---------------------------------------------------------------------------------------


@pytest.fixture(params=["daemon", "file"])
def source(request: pytest.FixtureRequest, store_file: Path) -> list[str]:
    return [] if request.param == "daemon" else ["--db", str(store_file)]


def test_requests_as_a_table_and_as_json(run: Run, source: list[str]) -> None:
    table = run("requests", "--sort", "ttft_ns", "--limit", "3", *source)
    head, _, first, *_ = table.stdout.splitlines()
    assert " ".join(head.split()) == (
        "arrived (UTC) id connector outcome TTFT compute transfer coord. unknown main step pair"
    )
    assert " ".join(first.split()) == (
        "2026-11-29 15:54:10.123 req-0001-791 push finished 412.000 81.000 23.000 301.000 7.000 "
        "readiness.detect 180.000 engine-p → engine-d"
    )
    assert "\x1b" not in run("requests", *source).stdout
    found = json.loads(run("requests", "--where", "connector=push", "--json", *source).stdout)
    assert {row["outcome"] for row in found} == {"finished", "lost"}
    none = run("requests", "--where", "connector=none", *source)
    assert (none.returncode, none.stdout, none.stderr) == (0, "", "no such requests\n")


def test_requests_in_flight_say_where_they_are(run: Run) -> None:
    line = run("requests", "--limit", "1").stdout.splitlines()[-1]
    assert "in flight" in line
    assert "in transfer.dispatch" in line


def test_short_names_are_prefixes_that_stay_apart() -> None:
    def named(*names: str | None) -> list[str]:
        return short_names([{"client_id": name, "id": i} for i, name in enumerate(names)])

    assert named("short") == ["short"]
    assert named("a" * 12 + "1x", "a" * 12 + "2x") == ["a" * 12 + "1", "a" * 12 + "2"]
    assert named("a" * 40 + "1", "a" * 40 + "2", "b") == ["0", "1", "b"]
    assert named("same", "same", None) == ["0", "1", "2"]


def test_explain_prints_what_explain_says(run: Run, source: list[str]) -> None:
    golden = (Path(__file__).parent / "golden" / "push.txt").read_text()
    assert run("explain", "req-0001", *source).stdout == golden
    assert (
        json.loads(run("explain", "req-0001", "--json", *source).stdout)["request"]["ttft_ns"] == 412_000_000
    )


def test_query_in_each_format(run: Run, source: list[str]) -> None:
    assert "p50_ms" in run("query", "ttft", *source).stdout
    read = list(
        csv.DictReader(
            io.StringIO(run("query", "slowest", "--limit", "2", "--format", "csv", *source).stdout)
        )
    )
    assert [row["ttft_ms"] for row in read] == ["412.0", "160.0"]
    sql = "SELECT count(*) AS n FROM waits WHERE arrived_at_ns >= $since AND coordination_ns > 0"
    answer = json.loads(run("query", sql, "--since", "36500d", "--json", *source).stdout)
    assert answer["rows"] == [[7]]
    assert "╭─" in run("query", "EXPLAIN SELECT 1", *source).stdout
    assert "─" in run("query", "DESCRIBE waits", *source).stdout


def test_query_selects_by_time_label_and_filters(run: Run, source: list[str]) -> None:
    def ids(*arguments: str) -> list[str]:
        answer = json.loads(run("query", "slowest", "--json", *arguments, *source).stdout)
        return [row[0] for row in answer["rows"]]

    push, late, pull = (str(row["id"]) for row in (rows.PUSH, rows.PUSH_LATE, rows.PULL))
    assert ids("--where", "connector=push") == [push, late]
    assert ids("--where", "connector=push", "--where", "ttft_ns>200ms") == [push]
    assert ids("--since", "2026-11-29T15:54:11Z", "--until", "2026-11-29 15:54:12.5") == [late, pull]
    assert ids("--label", "benchmark") == [pull]
    own = run("query", "SELECT count(*) AS n FROM waits", "--where", "connector=push", *source)
    assert own.stdout.split()[-1] == "3"


def test_query_lists_and_describes(run: Run) -> None:
    listed = run("query", "--list").stdout
    assert all(name in listed for name in query.questions())
    described = run("query", "pairs", "--describe").stdout
    assert all(column in described for column in query.questions()["pairs"].columns)
    question = json.loads(run("query", "pairs", "--describe", "--json").stdout)
    assert question["columns"] == query.questions()["pairs"].columns
    assert {one["name"] for one in json.loads(run("query", "--list", "--json").stdout)} == set(
        query.questions()
    )


@pytest.mark.parametrize(
    ("sql", "code"),
    [
        ("selec 1", 1),
        ("select * from nosuch", 1),
        ("select 'x'::int", 1),
        ("select count(*) from range(1e9::bigint) a, range(1e9::bigint) b", 1),
        ("drop table requests", 2),
        ("select 1; select 2", 2),
        ("select $then", 2),
        ("select 1 --" + "x" * 65536, 2),
    ],
)
def test_wrong_sql_has_the_same_exit_code_of_a_daemon_and_of_a_file(
    run: Run, source: list[str], sql: str, code: int
) -> None:
    limit = ["--sql-seconds", "1"] if source else []
    failed(run("query", sql, *source, *limit), code)


def test_a_table_without_rows_says_so(run: Run, source: list[str]) -> None:
    def said(*arguments: str) -> str:
        result = run("query", "ttft", *arguments, *source)
        assert (result.returncode, result.stdout.startswith("label")) == (0, True)
        return result.stderr

    assert said("--where", "connector=psh") == "no rows\n"
    assert "production itself is the empty label, ''" in said("--label", "production")
    assert "ttft tells each label" in said("--label", "canary")
    assert said("--label", "") == ""
    assert said("--where", "connector=psh", "--format", "csv") == ""


def test_help_says_which_questions_and_sources_a_flag_is_for(run: Run) -> None:
    text = " ".join(run("query", "--help").stdout.split())
    assert "default 20, of questions that take it" in text
    assert "--sql-* are for --db" in text


@pytest.mark.parametrize(
    "arguments",
    [["query", "slowest"], ["query", "ttft", "-o", "-", "--format", "csv"], ["requests"], ["sessions"],
     ["report", "-o", "-"], ["export", "-o", "-"], ["whatif"], ["--version"]],
)  # fmt: skip
def test_closed_standard_output_is_one_line(store_file: Path, arguments: list[str]) -> None:
    for close in (">&-", ">&- 2>&-"):
        line = f'exec "$@" {close}'
        command = ["sh", "-c", line, "sh", sys.executable, "-m", "kvscope.cli", *arguments]
        if arguments != ["--version"]:
            command += ["--db", str(store_file)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1
        assert done.stderr == "" if "2>" in close else failed(done, 1).startswith("kvscope: standard output")
        assert len(done.stderr.splitlines()) <= 1


def test_complaints_do_not_go_to_standard_output_where_errors_are_closed(store_file: Path) -> None:
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "kvscope.cli", "query", "SELEC 1"]
    done = subprocess.run(
        [*command, "--db", str(store_file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (1, "")


def test_a_cut_result_says_so(run: Run) -> None:
    result = run("query", "SELECT range FROM range(1000)")
    assert "cut after 100 rows" in result.stderr
    assert result.returncode == 0


def test_a_store_that_a_daemon_holds_is_not_read_around_it(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "held.duckdb"
    script = (
        f"import duckdb, time; c = duckdb.connect({str(path)!r}); print('held', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        line = failed(run("requests", "--db", str(path)), 1)
        holder.kill()
    assert "a daemon is using it" in line


def test_a_snapshot_is_asked_for_with_an_absolute_path(run: Run, daemon: FakeDaemon, tmp_path: Path) -> None:
    result = run("snapshot", str(tmp_path / "copy.duckdb"))
    assert result.stdout == f"{tmp_path / 'copy.duckdb'}\n"
    assert daemon.snapshots == [tmp_path / "copy.duckdb"]
    path = str(tmp_path / "other.duckdb")
    assert json.loads(run("snapshot", path, "--json").stdout) == {"path": path}


# --- status ----------------------------------------------------------------------------------------


def test_status_of_a_healthy_daemon(run: Run, daemon: FakeDaemon) -> None:
    result = run("status")
    assert result.returncode == 0
    assert "all well" in result.stdout
    assert "vllm 0.32.0" in result.stdout
    assert json.loads(run("status", "--json").stdout) == daemon.status()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"rings": [ring("p", lost=5, torn=2, read=95)]},
            "! LOST 5 events (5 %, 2 of them torn) of p scheduler 0",
        ),
        ({"rings": [ring("p", hooks_missing=["on_x"])]}, "! HOOK MISSING: on_x, which vLLM 0.32.0 lacks"),
        (
            {"rings": [ring("p", state="stopped", state_detail="no space")]},
            "! RECORDER STOPPED in p scheduler 0: no",
        ),
        ({"rings": [ring("p", state="gone")]}, "! ENGINE GONE: p scheduler 0"),
        ({"rings": [ring("p", rejected=3)]}, "! NOT UNDERSTOOD: 3 events"),
        ({"rings": []}, "! no engine records into /rings"),
        (
            {"unreadable": [{"path": "/rings/x", "reason": "/rings/x: no ring"}]},
            "! UNREADABLE: /rings/x: no ring",
        ),
        ({"unreadable": [{"path": "/rings/x", "reason": "no ring"}]}, "! UNREADABLE: /rings/x: no ring"),
        ({"problems": ["the disk is full"]}, "! the disk is full"),
        ({"store": status()["store"] | {"rows_refused": 4}}, "! NOT STORED: 4 rows"),
        ({"pipeline": status()["pipeline"] | {"faults": 1}}, "! NOT JOINED: 1 events"),
        ({"pipeline": status()["pipeline"] | {"untold": 2}}, "! NOT STORED: 2 requests"),
    ],
)
def test_status_shouts_what_is_wrong(
    run: Run, daemon: FakeDaemon, changes: dict[str, object], words: str
) -> None:
    daemon.status_answer = status(**changes)
    result = run("status")
    assert result.returncode == 1
    assert words in result.stdout
    assert "all well" not in result.stdout
    assert result.stderr == ""
