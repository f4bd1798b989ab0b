"""`kvscope shell` on a terminal and from a pipe, and answers written to files."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from kvscope.commands import shell
from kvscope.demo.terminal import Terminal
from kvscope.errors import KvscopeError

from . import rows
from .conftest import Run

KVSCOPE = [sys.executable, "-m", "kvscope.cli"]
NO_DAEMON = "http://127.0.0.1:9"


@pytest.fixture(params=["daemon", "file"])
def source(request: pytest.FixtureRequest, store_file: Path, url: str) -> list[str]:
    return ["--url", url] if request.param == "daemon" else ["--db", str(store_file)]


def environment(tmp_path: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("KVSCOPE_") and k != "COLUMNS"}
    return {**kept, "XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}


def piped(tmp_path: Path, text: str | bytes, *arguments: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [*KVSCOPE, "shell", *arguments],
        input=text.encode() if isinstance(text, str) else text,
        capture_output=True,
        env=environment(tmp_path),
        timeout=60,
        check=False,
    )
    return subprocess.CompletedProcess([], done.returncode, done.stdout.decode(), done.stderr.decode())


# --- statements ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "statements", "rest"),
    [
        ("SELECT 1;", ["SELECT 1"], ""),
        ("SELECT 1; SELECT 2;\n SELECT", ["SELECT 1", "SELECT 2"], "SELECT"),
        ("SELECT ';' || \";\" FROM x;", ["SELECT ';' || \";\" FROM x"], ""),
        ("SELECT 'it''s;' -- a; b\n;", ["SELECT 'it''s;' -- a; b"], ""),
        ("SELECT /* ; */ 1; -- end;", ["SELECT /* ; */ 1"], "-- end;"),
        ("SELECT $$;$$, $a$ ; $$ $a$, $since;", ["SELECT $$;$$, $a$ ; $$ $a$, $since"], ""),
        ("SELECT 'open;", [], "SELECT 'open;"),
        ("SELECT /* open;", [], "SELECT /* open;"),
        (";;\n;", [], ""),
        ("SELECT 3 - 1 / 2;", ["SELECT 3 - 1 / 2"], ""),
    ],
)
def test_statements_end_at_semicolons_that_are_not_quoted(
    text: str, statements: list[str], rest: str
) -> None:
    assert shell.split(text) == (statements, rest)


# --- from a pipe -----------------------------------------------------------------------------------


def test_piped_it_has_no_prompt_and_answers_one_after_the_other(tmp_path: Path, source: list[str]) -> None:
    text = """.where connector=push
SELECT count(*) AS pushed
FROM waits;
.where
.format csv
SELECT id, p_engine, read_after_expiry FROM requests ORDER BY id LIMIT 1; .since 1h is no command here
"""
    done = piped(tmp_path, text.split(" .since")[0], *source)
    assert (done.returncode, done.stderr) == (0, "")
    assert "kvscope" not in done.stdout
    assert done.stdout.split()[:3] == ["pushed", "──────", "3"]
    assert done.stdout.splitlines()[-1].startswith(f"{rows.PUSH['id']},engine-p,")


def test_piped_it_stops_at_the_first_error_with_its_exit_code(tmp_path: Path, source: list[str]) -> None:
    taken = tmp_path / "taken.csv"
    taken.touch()
    for text, code, words in (
        ("SELECT 1; SELEC 2; SELECT 33;", 1, "syntax error"),
        ("DROP TABLE requests; SELECT 33;", 2, "only SELECT"),
        (".nope\nSELECT 33;", 2, "no command"),
        (".where nope=1\nSELECT 33;", 2, "nope"),
        (".ask nope\nSELECT 33;", 2, "no question"),
        (".ask\nSELECT 33;", 2, "write .ask NAME"),
        (f".output {taken}\nSELECT 33;", 2, "is there already; name another file"),
        (".schema nope\nSELECT 33;", 2, "no table"),
        (b"SELECT '\xff\xfe'; SELECT 33;", 2, "no valid text"),
        ("SELECT '" + "x" * 70000, 2, "64 KiB"),
    ):
        done = piped(tmp_path, text, *source)
        assert (done.returncode, len(done.stderr.splitlines())) == (code, 1), (text[:40], done.stderr)
        assert words in done.stderr
        assert "33" not in done.stdout
        assert "--force" not in done.stderr, "the shell has none"


def test_without_a_daemon_it_does_not_start(tmp_path: Path) -> None:
    for text in ("SELECT 1;", ""):
        done = piped(tmp_path, text, "--url", NO_DAEMON)
        assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1)
        assert "no kvscope daemon" in done.stderr


def test_the_bare_name_of_a_question_is_answered(tmp_path: Path, source: list[str]) -> None:
    asked = piped(tmp_path, ".where connector=push\n.format csv\n.ask ttft\n", *source)
    bare = piped(tmp_path, ".where connector=push\n.format csv\nttft;\n", *source)
    assert (bare.returncode, bare.stderr, bare.stdout) == (0, "", asked.stdout)
    assert bare.stdout.startswith("label,")


def test_tables_columns_and_questions_are_told(tmp_path: Path, source: list[str]) -> None:
    told = piped(tmp_path, ".tables\n.schema waits\n.schema request_steps\n.questions\n.help\n", *source)
    assert (told.returncode, told.stderr) == (0, "")
    for words in ("handshakes", "Earliest arrival known", "main_step", "Name of the step", "ttft", ".quit"):
        assert words in told.stdout


def test_named_questions_have_the_scope_and_say_what_it_is_not_for(tmp_path: Path, source: list[str]) -> None:
    done = piped(
        tmp_path, ".label benchmark\n.format csv\n.ask slowest 1\n.ask leases\n.quit\nSELEC", *source
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1].split(",")[0] == str(rows.PULL["id"])
    assert "does not depend on label" in done.stderr


# --- on a terminal ---------------------------------------------------------------------------------


@pytest.fixture
def terminal(tmp_path: Path, source: list[str]) -> Iterator[Terminal]:
    started = Terminal([*KVSCOPE, "shell", *source], 120, 40, environment(tmp_path))
    yield started
    started.close()


def interrupt(terminal: Terminal) -> None:
    """Ctrl-C until it is told: one is lost in the moment in which readline changes the terminal's mode."""
    since = len(terminal.chunks)
    for _ in range(2):
        terminal.press("\x03")
        with contextlib.suppress(KvscopeError):
            terminal.wait_for(r"\^C[\s\S]*> $", 5, since)
            return
    terminal.press("\x03")
    terminal.wait_for(r"\^C[\s\S]*> $", 10, since)


def test_on_a_terminal_errors_and_interrupts_are_told_and_it_goes_on(
    terminal: Terminal, tmp_path: Path
) -> None:
    terminal.wait_for("kvscope> ", 30)
    terminal.press("SELECT 40 +\n")
    terminal.wait_for(r"\.\.\.> ", 10)
    terminal.press("2 AS n;\n")
    terminal.wait_for(r"n\s+──\s+42", 30)
    terminal.press("SELEC 1;\n")
    terminal.wait_for("kvscope: .*syntax error", 30)
    terminal.press(".since 1000d\n")
    terminal.wait_for(r"kvscope since=1000d> ", 10)
    terminal.press(".label ''\n")
    terminal.wait_for(r"kvscope since=1000d label=''> ", 10)
    since = len(terminal.chunks)
    terminal.press(".since yesterday\n")
    terminal.wait_for(r"is no duration[\s\S]*label=''> $", 10, since)
    terminal.press("SELECT 'half")
    terminal.wait_for("'half", 10)
    interrupt(terminal)
    since = len(terminal.chunks)
    terminal.press("SELECT 6 * 7 AS m;\n")
    terminal.wait_for(r"m\s+──\s+42", 30, since)
    since = len(terminal.chunks)
    terminal.press(
        "WITH RECURSIVE r(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM r) SELECT count(*) FROM r;\n"
    )
    terminal.wait_for("FROM r;", 10, since)
    interrupt(terminal)
    assert "Traceback" not in terminal.written()
    terminal.press("\x04")
    assert terminal.process.wait(20) == 0
    assert terminal.settings_now() == terminal.settings, "the terminal is left as it was"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [], "no history is written"


# --- files -----------------------------------------------------------------------------------------

SQL = """
SELECT id, client_id, ttft_ns, read_after_expiry, waterfall, to_timestamp(0) AS t FROM requests ORDER BY id"""


def test_answers_in_files_keep_their_types(run: Run, tmp_path: Path, source: list[str]) -> None:
    for name in ("a.parquet", "a.arrow"):
        done = run("query", SQL, "-o", str(tmp_path / name), *source)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    read = [
        pyarrow.parquet.read_table(tmp_path / "a.parquet"),
        pyarrow.ipc.open_file(str(tmp_path / "a.arrow")).read_all(),
    ]
    for table in read:
        assert table.schema.field("id").type == pyarrow.uint64()
        assert pyarrow.types.is_timestamp(table.schema.field("t").type)
        assert table["id"].to_pylist() == [row["id"] for row in rows.STORED]
        assert table["ttft_ns"].to_pylist() == [row["ttft_ns"] for row in rows.STORED]
        assert table["read_after_expiry"].to_pylist()[0] is None
        assert table["waterfall"].to_pylist()[0] == rows.PUSH["waterfall"]
    assert run("query", "ttft", "-o", str(tmp_path / "q.parquet"), *source).returncode == 0
    assert pyarrow.parquet.read_table(tmp_path / "q.parquet").num_rows == 5


def test_text_formats_go_to_files_too_and_none_is_replaced_unasked(
    run: Run, tmp_path: Path, source: list[str]
) -> None:
    path = tmp_path / "a.csv"
    assert run("query", SQL, "-o", str(path), *source).returncode == 0
    assert path.read_text().startswith("id,client_id,ttft_ns,read_after_expiry,waterfall,t\n")
    before = path.read_text()
    refused = run("query", "SELECT 1", "-o", str(path), *source)
    assert (refused.returncode, "--force" in refused.stderr, path.read_text()) == (2, True, before)
    assert run("query", "SELECT 1 AS one", "-o", str(path), "--force", *source).returncode == 0
    assert path.read_text() == "one\n1\n"
    assert run("query", "SELECT 1 AS one", "-o", str(tmp_path / "b.json"), *source).returncode == 0
    assert json.loads((tmp_path / "b.json").read_text())["rows"] == [[1]]
    assert run("query", "SELECT 1", "-o", str(tmp_path / "b.xyz"), *source).returncode == 2
    assert run("query", "SELECT 1", "-o", str(tmp_path / "absent" / "b.csv"), *source).returncode == 2
    assert run("query", "SELEC 1", "-o", str(tmp_path / "c.csv"), *source).returncode in (1, 2)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a.csv", "b.json"], "nothing half-written"


def test_a_cut_answer_says_so_in_every_format(run: Run, tmp_path: Path, url: str, store_file: Path) -> None:
    many = "SELECT range AS n FROM range(1000)"
    for name, count in (("a.parquet", 100), ("a.csv", 100)):
        done = run("query", many, "-o", str(tmp_path / name))
        assert (done.returncode, f"cut after {count} rows" in done.stderr) == (0, True), done.stderr
        assert "the daemon's settings sql_rows" in done.stderr
    assert pyarrow.parquet.read_table(tmp_path / "a.parquet").num_rows == 100
    done = run("query", many, "--db", str(store_file), "--sql-rows", "7", "--format", "csv")
    assert (done.stdout.count("\n"), "cut after 7 rows" in done.stderr) == (8, True)
    more = ["--sql-rows", "30000", "-o", str(tmp_path / "whole.arrow")]
    whole = run("query", "SELECT range AS n FROM range(20000)", "--db", str(store_file), *more)
    assert (whole.returncode, whole.stderr) == (0, "")


def test_bytes_go_to_a_pipe_and_not_to_a_terminal(tmp_path: Path, url: str) -> None:
    command = [*KVSCOPE, "query", "SELECT 42 AS n", "--format", "arrow", "--url", url]
    done = subprocess.run(command, capture_output=True, env=environment(tmp_path), timeout=60, check=True)
    assert pyarrow.ipc.open_file(pyarrow.py_buffer(done.stdout)).read_all().to_pylist() == [{"n": 42}]
    terminal = Terminal(command, 120, 40, environment(tmp_path))
    try:
        terminal.wait_for("not for a terminal; name a file with -o", 30)
        assert terminal.process.wait(10) == 2
    finally:
        terminal.close()
