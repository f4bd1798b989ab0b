"""`kvscope archive`, and the examples of docs/archive.md: other tools read what it writes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from kvscope import client, storefile
from kvscope.text import utc

from ..collectors.collecting import Served
from . import rows
from .conftest import Run

HOUR_NS = 3600 * 10**9
PAGE = Path(__file__).parent.parent.parent / "docs" / "archive.md"


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with requests of long ago, of five hours, and of now."""
    path = tmp_path_factory.mktemp("store") / "s.duckdb"
    now_ns = time.time_ns()
    with duckdb.connect(str(path)) as connection:
        storefile.create_tables(connection)
        for number, at_ns in enumerate((*(rows.T0_NS - h * HOUR_NS for h in range(20, 25)), now_ns - 10**9)):
            some = [
                {**one, "id": one["id"] + 100 * number, "arrived_at_ns": at_ns + i}
                for i, one in enumerate(rows.STORED)
            ]
            rows.insert(connection, "requests", some)
        rows.insert(connection, "engines", rows.ENGINES)
        rows.insert(connection, "leases", rows.LEASES)
    return path


@pytest.fixture(scope="module")
def directory(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of it as Parquet."""
    directory = tmp_path_factory.mktemp("it's an") / "archive"
    command = [sys.executable, "-m", "kvscope.cli", "archive", str(directory), "--db", str(store), "--all"]
    subprocess.run(command, check=True, timeout=60)
    return directory


def count(directory: Path) -> int:
    source = client.StoreFile(directory)
    try:
        return int(source.query("", "SELECT count(DISTINCT id) FROM requests", {})["rows"][0][0])
    finally:
        source.close()


def test_a_file_is_archived_but_for_the_hour_that_goes_on(run: Run, store: Path, tmp_path: Path) -> None:
    target = tmp_path / "new"
    result = run("archive", str(target), "--db", str(store), "--json")
    told = json.loads(result.stdout)
    assert result.returncode == 0, result.stderr
    assert told["path"] == str(target)
    assert told["rows"] == sum(one["rows"] for one in told["files"])
    assert told["bytes"] == sum(path.stat().st_size for path in target.rglob("*.parquet"))
    assert count(target) == 45
    left_out_from_ns = told["left_out_from_ns"]
    assert left_out_from_ns % HOUR_NS == 0
    assert left_out_from_ns < time.time_ns()
    again = run("archive", str(target), "--db", str(store))
    assert again.stdout == (
        f"{target}: nothing new\nhours have closed up to {utc(left_out_from_ns)[:16]} UTC; "
        "what began later is left out (--all takes it too)\n"
    )
    earlier = run("archive", str(target), "--db", str(store), "--until", "5h")
    assert earlier.stdout == f"{target}: nothing new\n"
    more = run("archive", str(target), "--db", str(store), "--all")
    assert re.fullmatch(r".*: 1 hour, 9 rows, [\d.]+ kB written\n", more.stdout)
    assert count(target) == 54


def test_only_the_hours_asked_for(run: Run, store: Path, tmp_path: Path) -> None:
    at_ns = rows.T0_NS - 22 * HOUR_NS
    window = ("--since", str(at_ns), "--until", str(at_ns + 1))
    told = json.loads(run("archive", str(tmp_path / "new"), "--db", str(store), *window, "--json").stdout)
    assert {one["hour_ns"] for one in told["files"] if one["table"] == "requests"} == {
        at_ns - at_ns % HOUR_NS
    }
    assert count(tmp_path / "new") == 9


def test_a_snapshot_takes_any_path_of_the_right_ending(run: Run) -> None:
    result = run("snapshot", "copy.db")
    assert (result.returncode, result.stderr) == (2, "kvscope: copy.db: name a file that ends in .duckdb\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["{tmp}/full", "--db", "{store}"], 2, "it has other files"),
        (["{tmp}/missing/new", "--db", "{store}"], 2, "there is no"),
        (["{tmp}/a[b]", "--db", "{store}"], 2, "give the directory another name"),
        (["{tmp}/new", "--db", "{tmp}/none.duckdb"], 1, "there is no such file"),
        (["{tmp}/new", "--db", "{tmp}"], 2, "a Parquet directory already"),
        (["{tmp}/new", "--db", "{store}", "--since", "1h", "--until", "2h"], 2, "since is not before until"),
        (["{tmp}/new", "--db", "{store}", "--since", "@no-such"], 2, "no window"),
        (["{tmp}/new", "--all"], 2, "take a snapshot of the daemon first"),
    ],
)
def test_what_will_not_do_is_said_in_one_line(
    run: Run, store: Path, tmp_path: Path, arguments: list[str], code: int, said: str
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").touch()
    result = run("archive", *(one.format(tmp=tmp_path, store=store) for one in arguments))
    assert result.returncode == code, result.stderr
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert not (tmp_path / "new").exists()


def test_ctrl_c_leaves_no_half_file(store: Path, tmp_path: Path) -> None:
    code = (
        "import sys, os; from kvscope import archive, cli; sync = os.fsync\n"
        "def slow(handle): print('syncing', flush=True); import time; time.sleep(30)\n"
        "os.fsync = slow; sys.exit(cli.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "archive", str(tmp_path / "new"), "--db", str(store)]
    (tmp_path / "new" / "v1").mkdir(parents=True)
    for table in ("requests", "leases"):
        (tmp_path / "new" / "v1" / table).mkdir()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "syncing\n"
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130, stderr
    left = [path.name for path in (tmp_path / "new").rglob("*") if path.is_file()]
    assert [name for name in left if not name.endswith(".lock")] == []


# --- a daemon's ------------------------------------------------------------------------------------


@pytest.fixture
def served(store: Path, tmp_path: Path) -> Iterator[Served]:
    """A daemon that has moved what is older than an hour: all but the last nine requests."""
    path = tmp_path / "state" / "s.duckdb"
    path.parent.mkdir()
    path.write_bytes(store.read_bytes())
    flags = ["--dir", str(tmp_path / "rings"), "--store", str(path), "--archive", str(tmp_path / "archive")]
    for _ in range(2):  # it archives when it starts, and deletes when it starts again
        served = Served(*flags, "--retention-hours", "1")
        end = time.monotonic() + 60
        while served.status()["archive"]["last_pass_at_ns"] is None:
            assert time.monotonic() < end
            time.sleep(0.05)
        if _ == 0:
            assert served.stop()[0] == 0
    yield served
    served.kill()


def asked(served: Served, sql: str) -> Any:
    return client.Daemon(served.url).query("", sql, {})["rows"]


def test_a_daemon_with_an_archive_answers_as_before(served: Served, run: Run, tmp_path: Path) -> None:
    assert asked(served, "SELECT count(DISTINCT id), count(*) FROM requests") == [[54, 54]]
    ask = client.Daemon(served.url)
    snapshot, everything = tmp_path / "hot.duckdb", tmp_path / "all.duckdb"
    assert run("snapshot", str(snapshot), "--url", served.url).returncode == 0
    assert run("snapshot", str(everything), "--all", "--url", served.url).returncode == 0
    assert count(snapshot) in (9, 54)  # before and after its second pass
    assert count(everything) == 54
    status = run("status", "--url", served.url).stdout
    assert f"archive   {tmp_path / 'archive'}, " in status
    result = run("archive", str(tmp_path / "copy"), "--url", served.url)
    assert result.returncode == 0, result.stderr
    assert count(tmp_path / "copy") == 45, "all but the hour that has not closed"
    result = run("archive", str(tmp_path / "archive"), "--url", served.url)
    told, left_out = result.stdout.splitlines()
    assert told == f"{tmp_path / 'archive'}: nothing new"
    assert "what began later is left out (archive a snapshot" in left_out
    earlier = run("archive", str(tmp_path / "archive"), "--url", served.url, "--until", "5h")
    assert earlier.stdout == f"{tmp_path / 'archive'}: nothing new\n"
    refused = run("archive", str(tmp_path / "archive" / "inside"), "--url", served.url)
    assert (refused.returncode, "the daemon's archive is" in refused.stderr) == (2, True)
    for body in ({"path": "relative"}, {"path": "/tmp/\x1b"}, {"path": ""}, {"path": "/x", "more": 1}):
        with pytest.raises(client.UsageError):
            ask._ask("POST", "archive", json=body)


def test_users_sql_can_not_write_into_the_archive(served: Served, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*.parquet"))
    for sql in (
        f"COPY requests TO '{tmp_path}/archive/stolen.parquet'",
        f"EXPLAIN ANALYZE COPY requests TO '{tmp_path}/archive/stolen.parquet'",
    ):
        with pytest.raises(client.KvscopeError):
            asked(served, sql)
    assert sorted(tmp_path.rglob("*.parquet")) == before


def test_a_daemon_whose_archive_can_not_be_written_says_so_and_collects(run: Run, tmp_path: Path) -> None:
    (tmp_path / "archive").touch()
    (tmp_path / "rings").mkdir()
    flags = ["--dir", str(tmp_path / "rings"), "--store", str(tmp_path / "s.duckdb")]
    served = Served(*flags, "--archive", str(tmp_path / "archive"))
    try:
        end = time.monotonic() + 30
        while not (problems := served.status()["problems"]):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert problems[0].startswith("ARCHIVE: ")
        assert "  ! ARCHIVE: " in run("status", "--url", served.url).stdout
        assert asked(served, "SELECT count(*) FROM requests") == [[0]]
    finally:
        served.kill()


# --- other tools -----------------------------------------------------------------------------------


def examples() -> dict[str, str]:
    """The page's Python, by the name before it."""
    found = re.findall(r"^(\w+)[^\n]*:\n\n```python\n(.*?)```", PAGE.read_text("utf-8"), re.M | re.S)
    return dict(found)


def test_each_tool_has_an_example() -> None:
    assert list(examples()) == ["DuckDB", "pandas", "Polars", "Spark"]


@pytest.mark.parametrize("tool", ["DuckDB", "pandas", "Polars"])
def test_the_example_of_the_page_gives_what_kvscope_gives(directory: Path, tool: str) -> None:
    source = client.StoreFile(directory)
    sql = (
        "SELECT connector, count(*), median(ttft_ns) / 1e6 FROM requests WHERE ttft_ns IS NOT NULL "
        "GROUP BY connector ORDER BY connector"
    )
    wanted = [tuple(row) for row in source.query("", sql, {})["rows"]]
    source.close()
    assert len(wanted) == 4
    quoted = str(directory).replace("'", "''") if tool == "DuckDB" else str(directory)
    names: dict[str, Any] = {}
    exec(compile(examples()[tool].replace("/archive/kvscope", quoted), f"{PAGE} {tool}", "exec"), names)
    assert names["found"] == wanted
