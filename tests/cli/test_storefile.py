"""Parquet directories: they give the answers of the store that they were written from."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from kvscope import client, frame, lookup, query, schema
from kvscope.errors import KvscopeError
from kvscope.storefile import TIMES, open_file

from . import rows
from .conftest import Run

HOUR_NS = 3600 * 10**9


def copy(connection: duckdb.DuckDBPyConnection, directory: Path, table: str, columns: str = "*") -> None:
    """Write a table as the archive's layout wants it."""
    target = directory / "v1" / table
    target.mkdir(parents=True, exist_ok=True)
    at = f"make_timestamp_ns({TIMES[table]})"
    connection.execute(
        f"COPY (SELECT {columns}, strftime({at}, '%Y-%m-%d') AS d, strftime({at}, '%H') AS h FROM {table}) "
        f"TO '{str(target).replace(chr(39), chr(39) * 2)}' "
        "(FORMAT parquet, PARTITION_BY (d, h), OVERWRITE_OR_IGNORE)"
    )


def fill(connection: duckdb.DuckDBPyConnection) -> None:
    """The hand-made rows, and requests like them an hour and 30 hours before."""
    rows.fill(connection)
    for hours in (1, 30):
        older = [
            {**row, "id": row["id"] + 100 * hours, "arrived_at_ns": row["arrived_at_ns"] - hours * HOUR_NS}
            for row in rows.STORED
        ]
        rows.insert(connection, "requests", older)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A store with requests of three hours, and its copy in Parquet."""
    base = tmp_path_factory.mktemp("a store's")
    directory = base / "archive of 'x'"
    with duckdb.connect(str(base / "store.duckdb")) as connection:
        rows.fill(connection)
        for hours in (1, 30):
            older = [
                {
                    **row,
                    "id": row["id"] + 100 * hours,
                    "arrived_at_ns": row["arrived_at_ns"] - hours * HOUR_NS,
                }
                for row in rows.STORED
            ]
            rows.insert(connection, "requests", older)
        for table in schema.BY_NAME:
            if table != "samples":
                copy(connection, directory, table)
    return base / "store.duckdb", directory


@pytest.fixture(scope="module")
def sources(stored: tuple[Path, Path]) -> Iterator[tuple[client.StoreFile, client.StoreFile]]:
    opened = client.StoreFile(stored[0]), client.StoreFile(stored[1])
    yield opened
    for source in opened:
        source.close()


def both(sources: tuple[client.StoreFile, client.StoreFile], ask: Callable[[client.StoreFile], Any]) -> Any:
    """What the directory answers, which is what the store answers."""
    store, directory = map(ask, sources)
    assert directory == store
    return directory


def answered(source: client.StoreFile, name: str, sql: str = "", **parameters: Any) -> dict[str, Any]:
    answer = source.query(name, sql, parameters)
    del answer["elapsed_ms"]
    return answer


@pytest.mark.parametrize("name", query.questions())
def test_each_question_gets_the_same_answer(
    sources: tuple[client.StoreFile, client.StoreFile], name: str
) -> None:
    assert both(sources, lambda source: answered(source, name))["rows"]
    if "where" in query.questions()[name].parameters:
        window = {"since": rows.T0_NS, "until": rows.T0_NS + HOUR_NS, "label": "", "where": ["id>0"]}
        assert both(sources, lambda source: answered(source, name, **window))["rows"]


def test_requests_frames_and_span_are_the_same(
    sources: tuple[client.StoreFile, client.StoreFile],
) -> None:
    assert both(sources, lambda source: source.span()) == (
        rows.T0_NS + 10**9 - 30 * HOUR_NS,
        rows.T0_NS + 9 * 10**9,
    )
    request = both(sources, lambda source: source.request(str(rows.PUSH["id"])) | {"as_of_ns": 0})
    assert request["transfers"][0]["id"] == "11"
    assert [one["engine"] for one in request["engines"]] == ["engine-d", "engine-d", "engine-p", "engine-p"]
    assert request["request"]["waterfall"][0]["step"] == "prefill.frontend"
    listing = lookup.Listing(where=["coordination_ns>100ms"], since="2026-11-29T14:00Z")
    assert len(both(sources, lambda source: source.requests(listing))) == 2
    for at in ("", str(rows.T0_NS + 1_500_000_000), str(rows.T0_NS - HOUR_NS + 5 * 10**9)):
        shown = both(sources, lambda source, at=at: source.frame(frame.Scope(at=at, window="10m")))
        assert shown.answers["fleet_steps"].rows
    assert shown.recent_total == 3


def test_a_table_without_files_is_empty(tmp_path: Path) -> None:
    with duckdb.connect() as connection:
        fill(connection)
        copy(connection, tmp_path, "requests")
    source = client.StoreFile(tmp_path)
    assert answered(source, "transfers")["rows"] == answered(source, "engines")["rows"] == []
    assert source.frame(frame.Scope()).engines == []
    assert len(source.requests(lookup.Listing(limit=100))) == 27
    source.close()


def test_a_column_that_an_older_kvscope_did_not_write_is_not_observed(tmp_path: Path) -> None:
    with duckdb.connect() as connection:
        fill(connection)
        copy(connection, tmp_path, "requests", "* EXCLUDE (clamped_ns, waterfall)")
        newer = tmp_path / "v1" / "requests" / "d=2026-11-30" / "h=00"
        newer.mkdir(parents=True)
        connection.execute(
            f"COPY (SELECT *, 1 AS added_later FROM requests WHERE id = {rows.PUSH['id']}) "
            f"TO '{newer}/one.parquet'"
        )
    source = client.StoreFile(tmp_path)
    sql = "SELECT count(*), count(clamped_ns), count(waterfall) FROM requests"
    assert answered(source, "", sql)["rows"] == [[28, 1, 1]]
    assert answered(source, "", f"{sql} WHERE id = {rows.PUSH['id']}")["rows"] == [[2, 1, 1]]
    source.close()


def test_only_the_files_of_the_time_asked_for_are_opened(tmp_path: Path) -> None:
    with duckdb.connect() as connection:
        fill(connection)
        copy(connection, tmp_path, "requests")
    source = client.StoreFile(tmp_path)
    (broken,) = (tmp_path / "v1" / "requests" / "d=2026-11-28").rglob("*.parquet")
    broken.write_bytes(b"damaged since")
    recent = {"since": rows.T0_NS - 2 * HOUR_NS}
    assert answered(source, "", "SELECT count(*) FROM requests", **recent)["rows"] == [[18]]
    assert len(source.frame(frame.Scope(at=str(rows.T0_NS + 10**10), window="2h")).recent) == 15
    with pytest.raises(query.QueryError, match=r"\.parquet"):
        answered(source, "", "SELECT count(*) FROM requests")
    source.close()


def test_what_is_no_parquet_directory_is_said_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(KvscopeError, match=r"no kvscope Parquet directory; it would hold v1/requests"):
        open_file(tmp_path)
    hour = tmp_path / "v1" / "requests" / "d=2026-11-29" / "h=15"
    hour.mkdir(parents=True)
    with pytest.raises(KvscopeError, match="no kvscope Parquet directory"):
        open_file(tmp_path)
    (hour / "x.parquet").write_text("not Parquet")
    with pytest.raises(KvscopeError, match=r"can't be read .*x\.parquet") as caught:
        open_file(tmp_path)
    assert "\n" not in str(caught.value)
    pattern = tmp_path / "with [a-z]"
    pattern.mkdir()
    with pytest.raises(KvscopeError, match="another name"):
        open_file(pattern)


def as_user(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`kvscope ARGUMENTS` by somebody whom permissions hold for, as they don't for root."""
    held = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"]
    command = [sys.executable, "-m", "kvscope.cli", *map(str, arguments)]
    return subprocess.run(
        command if os.geteuid() else [*held, *command],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "kept", ["v1", "v1/requests", "v1/requests/d=2026-11-29", "v1/requests/d=2026-11-29/h=15", "file"]
)
def test_what_may_not_be_read_is_not_passed_over(
    stored: tuple[Path, Path], tmp_path: Path, kept: str
) -> None:
    directory = tmp_path / "archive"
    shutil.copytree(stored[1], directory)
    files = (directory / "v1/requests/d=2026-11-29/h=15").iterdir()
    path = next(files) if kept == "file" else directory / kept
    path.chmod(0)
    try:
        asked = as_user("query", "ttft", "--db", directory)
        imported = as_user("import", directory, "-o", tmp_path / "i.duckdb")
    finally:
        path.chmod(0o755)
    for result in (asked, imported):
        assert (result.returncode, result.stdout) == (1, "")
        assert result.stderr.startswith(f"kvscope: {path}")
        assert "Permission denied" in result.stderr
        assert result.stderr.count("\n") == 1
    assert not (tmp_path / "i.duckdb").exists()


def test_a_link_to_a_file_that_is_gone_is_not_passed_over(tmp_path: Path) -> None:
    with duckdb.connect() as connection:
        fill(connection)
        copy(connection, tmp_path, "requests")
    gone = tmp_path / "v1/requests/d=2026-11-29/h=15/moved.parquet"
    gone.symlink_to("/nowhere/moved.parquet")
    with pytest.raises(KvscopeError, match=r"moved\.parquet: can't be read \(No such file"):
        open_file(tmp_path)


def test_a_file_that_is_no_store_or_may_not_be_read_is_called_so(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    path.write_text("{}")
    with pytest.raises(KvscopeError, match="its name is not that of a DuckDB file"):
        open_file(path)
    locked = tmp_path / "s.duckdb"
    with duckdb.connect(str(locked)):
        pass
    locked.chmod(0)
    result = as_user("query", "ttft", "--db", locked)
    assert (result.returncode, result.stdout) == (1, "")
    assert (
        result.stderr == f"kvscope: {locked}: it may not be read; have its owner allow it, or name a copy\n"
    )


def test_a_folder_that_may_not_be_written_is_told_by_the_name_that_was_given(
    stored: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "mine" / "v1").mkdir(parents=True)
    folders = (tmp_path / "mine" / "v1", tmp_path / "mine")
    for folder in folders:
        folder.chmod(0o555)
    target = tmp_path / "mine"
    try:
        said = [
            as_user("query", "ttft", "--db", stored[0], "-o", target / "x.csv").stderr,
            as_user("import", stored[0], "-o", target / "x.duckdb").stderr,
            as_user("archive", target, "--db", stored[0]).stderr,
        ]
    finally:
        for folder in folders:
            folder.chmod(0o755)
    for text in said:
        assert "Permission denied" in text
        assert ".part" not in text
        assert ".lock" not in text
    assert str(target / "x.csv") in said[0]
    assert said[1].count(f"{target}/x.duckdb") == 2
    assert said[2] == f"kvscope: {target}: Permission denied; name another directory, or mend this one\n"


@pytest.mark.parametrize(
    "sql",
    ["SELECT * FROM read_text('/etc/passwd')", "SELECT * FROM glob('/etc/*')", "SELECT * FROM '/etc/passwd'",
     "WITH a AS (DELETE FROM engines RETURNING id) SELECT * FROM a", "COPY engines TO 'stolen.parquet'"],
)  # fmt: skip
def test_sql_reaches_no_other_files(sources: tuple[client.StoreFile, client.StoreFile], sql: str) -> None:
    with pytest.raises(KvscopeError) as caught:
        answered(sources[1], "", sql)
    assert "\n" not in str(caught.value)


def test_the_commands_take_a_directory_too(run: Run, stored: tuple[Path, Path]) -> None:
    directory = ["--db", str(stored[1])]
    window = ["--since", "2026-11-29T15:54:09Z", "--until", "2026-11-29T15:54:12Z"]
    answer = json.loads(
        run("query", "slowest", *window, "--where", "connector=push", "--json", *directory).stdout
    )
    assert [row[0] for row in answer["rows"]] == [str(rows.PUSH["id"]), str(rows.PUSH_LATE["id"])]
    several = run("query", "ttft", "--where", "connector=push", "--where", "ttft_ns>1s", *directory)
    assert (several.returncode, several.stdout.count("push")) == (0, 0)
    assert run("explain", str(rows.PUSH["id"]), *directory).returncode == 0
