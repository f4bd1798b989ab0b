"""The store when the disk, the file, the data or another process is not as it should be."""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import duckdb
import pytest

from kvscope import __version__, schema
from kvscope.collectors import store as store_module
from kvscope.collectors.store import Store, StoreError

from .collecting import ask, query, row, until

HOUR = 3600 * 10**9


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(tmp_path / "state" / "kvscope.duckdb")
    yield store
    store.close()


def failure(id_: int, **values: object) -> dict[str, list[store_module.Row]]:
    return {"failures": [row("failures", id=id_, at_ns=time.time_ns(), engine="p", **values)]}


def fill_up(path: Path) -> None:
    """Take what is left of the disk."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(b"x" * 4096):
            pass


def test_all_tables_come_back_as_put(store: Store) -> None:
    interval = {"step": 3, "from_ns": 5, "ns": 7, "critical": True, "observed": 1, "error_ns": 0}
    rows = {
        "requests": [row("requests", id=2**64 - 1, arrived_at_ns=1, waterfall=[interval, interval])],
        "transfers": [row("transfers", id=1, request_id=2, bytes=2**62)],
        "leases": [row("leases", id=1, end="released")],
        "handshakes": [row("handshakes", id=1, ok=True)],
        "failures": [row("failures", id=1, detail="naïve \U0001f600 'quoted'")],
        "engines": [row("engines", id=1, hooks_missing=["a", "b"], fingerprint='{"vllm": "0.32"}')],
        "samples": [row("samples", id=1, at_ns=1, engine="e", name="host.cpu", value=0.1)],
    }
    assert store.wait_committed(store.put(rows), 10)
    for name, put in rows.items():
        assert ask(store, f"FROM {name}") == put
    assert store.status()["rows_stored"] == 7


def test_row_put_twice_is_stored_once(store: Store) -> None:
    store.put(failure(1))
    assert store.wait_committed(store.put(failure(1)), 10)
    assert ask(store, "SELECT count(*) FROM failures") == [(1,)]


def test_row_put_again_after_a_restart_is_stored_once(tmp_path: Path) -> None:
    now = time.time_ns()
    request = row(
        "requests",
        id=1,
        p_engine="p",
        p_request="a",
        d_engine="d",
        d_request="b",
        arrived_at_ns=now,
        ttft_ns=10**9,
        decode_generate_ns=10**9,
    )
    lease = row("leases", id=5, engine="d", armed_at_ns=now)
    first = Store(tmp_path / "s.duckdb")
    first.put({"requests": [request], "leases": [lease], **failure(1)})
    assert first.close()
    second = Store(tmp_path / "s.duckdb")
    assert not second.has_request("p", "a")
    for engine in ("p", "d"):
        second.expect_again(engine, now)
    assert second.has_request("p", "a")
    assert second.has_request("d", "b")
    second.put({"requests": [request], "leases": [lease], **failure(1)})
    assert second.close()
    for table in ("requests", "leases", "failures"):
        assert query(tmp_path / "s.duckdb", f"SELECT count(*) FROM {table}") == [(1,)]


def test_rest_of_a_stored_request_whose_first_leg_was_overwritten_is_dropped(tmp_path: Path) -> None:
    now = time.time_ns()
    whole = row(
        "requests",
        id=1,
        p_engine="p",
        p_request="a",
        d_engine="d",
        d_request="b",
        arrived_at_ns=now,
        ttft_ns=2 * 10**9,
        decode_generate_ns=10**9,
    )
    rest = row("requests", id=2, d_engine="d", d_request="b", arrived_at_ns=now + 10**9)
    reused = row("requests", id=3, d_engine="d", d_request="b", arrived_at_ns=now + 4 * 10**9)
    first = Store(tmp_path / "s.duckdb")
    first.put({"requests": [whole]})
    assert first.close()
    second = Store(tmp_path / "s.duckdb")
    second.expect_again("d", now)
    second.put({"requests": [rest]})
    second.put({"requests": [reused]})
    assert second.close()
    assert query(tmp_path / "s.duckdb", "SELECT id FROM requests ORDER BY id") == [(1,), (3,)]


def test_engine_row_is_replaced_and_its_position_comes_back(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    for next_seq in (10, 20):
        store.put(
            {
                "engines": [
                    row(
                        "engines",
                        id=7,
                        ring="r",
                        next_seq=next_seq,
                        read=next_seq,
                        lost=1,
                        torn=0,
                        rejected=0,
                        state="recording",
                        fingerprint="{}",
                    )
                ]
            }
        )
    assert store.close()
    again = Store(tmp_path / "s.duckdb")
    assert ask(again, "SELECT id, next_seq FROM engines") == [(7, 20)]
    assert again.position("r") == (20, 20, 1, 0, 0)
    assert again.position("other") is None
    again.close()


def test_value_that_fits_no_column_loses_only_its_row(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row("failures", id=1, rank=2**40), row("failures", id=2, detail="\ud800"), row("failures", id=3)]
    assert store.wait_committed(store.put({"failures": rows}), 10)
    assert ask(store, "SELECT id FROM failures") == [(3,)]
    assert store.status()["rows_refused"] == 2
    assert len(caplog.records) == 1


def test_store_of_another_version_is_refused_and_both_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.duckdb"
    with monkeypatch.context() as patched:
        patched.setattr(schema, "VERSION", 987)
        Store(path).close()
    before = path.read_bytes()
    with pytest.raises(StoreError, match=rf"store version 987 .*writes version {schema.VERSION}; move"):
        Store(path)
    assert path.read_bytes() == before


def test_store_of_the_first_version_is_refused_and_says_what_to_do(tmp_path: Path) -> None:
    """It has no table `samples`, and is a store nonetheless."""
    path = tmp_path / "s.duckdb"
    with duckdb.connect(str(path)) as connection:
        for table in schema.TABLES:
            if table.name != "samples":
                connection.execute(schema.create_sql(table))
        connection.execute("CREATE TABLE meta (key VARCHAR, value VARCHAR)")
        connection.execute("INSERT INTO meta VALUES ('schema_version', '1'), ('made_by', 'kvscope 0.0.9')")
    with pytest.raises(StoreError) as refused:
        Store(path)
    assert str(refused.value) == (
        f"{path}: store version 1 (made by kvscope 0.0.9), kvscope {__version__} writes version "
        f"{schema.VERSION}; move the file away, or name another file with --store"
    )


def test_an_engines_samples_come_again_after_a_restart_and_others_never_do(tmp_path: Path) -> None:
    def own(id_: int, at_ns: int, **more: object) -> store_module.Row:
        keys = {"engine": "e", "source": "worker", "rank": 0, "name": "engine.step_ns", **more}
        return row("samples", id=id_, at_ns=at_ns, **keys)

    now = time.time_ns()
    first = Store(tmp_path / "s.duckdb")
    first.put({"samples": [own(1, now), own(2, now, rank=1), own(3, now, name="process.cpu")]})
    first.put({"samples": [own(4, now + 1)]})
    assert first.close()
    second = Store(tmp_path / "s.duckdb")
    second.expect_again("e", now - HOUR)
    again = [own(1, now), own(4, now + 1), own(2, now, rank=1)]
    new = [own(5, now + 2), own(6, now + 1, rank=1), own(7, now, name="process.cpu"), own(8, now, rank=2)]
    second.put({"samples": again + new + [own(9, now, engine="other")]})
    assert second.close()
    assert query(tmp_path / "s.duckdb", "SELECT id FROM samples ORDER BY id") == [(i,) for i in range(1, 10)]


def test_foreign_duckdb_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    with duckdb.connect(str(path)) as connection:
        connection.execute("CREATE TABLE mine (i INTEGER)")
    with pytest.raises(StoreError, match="no kvscope store"):
        Store(path)


def test_file_that_is_no_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    path.write_bytes(b"not a database" * 1000)
    with pytest.raises(StoreError, match="not a valid DuckDB") as refused:
        Store(path)
    assert "\n" not in str(refused.value)
    assert path.read_bytes().startswith(b"not a database")


def test_second_process_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    path = tmp_path / "s.duckdb"
    code = (
        "import sys, pathlib; from kvscope.collectors.store import Store;"
        "store = Store(pathlib.Path(sys.argv[1])); print('open', flush=True); input()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "open\n"
        with pytest.raises(StoreError, match=f"process {first.pid} has this store open"):
            Store(path)
        first.communicate("\n")


def test_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"file: (Not a directory|File exists)"):
        Store(tmp_path / "file" / "s.duckdb")


def test_directory_that_may_not_be_written(mount: Callable[[str], Path]) -> None:
    path = mount("size=1m,ro") / "s.duckdb"
    with pytest.raises(StoreError, match=r"can't be written \(read-only file system\)"):
        Store(path)


def test_full_disk_holds_rows_back_and_goes_on_by_itself(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(store_module, "QUEUE_ROWS", 3000)
    monkeypatch.setattr(store_module, "RETRY_S", 0.05)
    disk = mount("size=16m")
    store = Store(disk / "s.duckdb")
    filler = disk / "filler"
    fill_up(filler)
    put = 0
    while store.wait_for_room(0.5) and put < 20000:
        store.put({"failures": [row("failures", id=put + i, detail=f"{put + i}" * 20) for i in range(500)]})
        put += 500
    assert put < 20000, "the queue is bounded"
    assert "the disk is full" in store.status()["error"]
    assert ask(store, "SELECT count(*) FROM failures")[0][0] < put, "readers are still served"
    filler.unlink()
    until(lambda: not store.error and store.status()["rows_queued"] == 0)
    assert ask(store, "SELECT count(*), count(DISTINCT id) FROM failures") == [(put, put)]
    messages = [record.getMessage() for record in caplog.records]
    assert [m for m in messages if "the disk is full" in m] == [messages[0]], "one line, not one per try"
    assert "writing again" in messages[-1]
    assert store.close()


def test_commit_that_is_durable_although_its_checkpoint_failed_is_stored_once(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"CHECKPOINT_AT": "1MB", "COMMIT_INTERVAL_S": 0.0, "RETRY_S": 0.05, "QUEUE_ROWS": 100}
    for name, value in small.items():
        monkeypatch.setattr(store_module, name, value)
    durable = []
    commit = Store._commit

    def watched(store: Store, tables: dict[str, object], again: bool) -> None:
        try:
            commit(store, tables, again)
        except duckdb.FatalException as error:
            durable.append("is durable" in str(error))
            raise

    monkeypatch.setattr(Store, "_commit", watched)
    disk = mount("size=4m")
    store = Store(disk / "s.duckdb")
    put = 0
    while store.wait_for_room(0.5):
        assert put < 100_000
        rows = [row("failures", id=put + i, detail=os.urandom(60).hex()) for i in range(50)]
        store.wait_committed(store.put({"failures": rows}), 0.2)
        put += 50
    subprocess.run(["mount", "-o", "remount,size=64m", str(disk)], check=True)
    until(lambda: not store.error and store.status()["rows_queued"] == 0)
    assert any(durable), "the case did not come about"
    assert ask(store, "SELECT count(*), count(DISTINCT id) FROM failures") == [(put, put)]
    assert store.close()


def test_close_does_not_wait_for_a_full_disk(
    mount: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = mount("size=4m")
    store = Store(disk / "s.duckdb")
    fill_up(disk / "filler")
    store.put({"failures": [row("failures", id=i, detail=f"{i}" * 100) for i in range(5000)]})
    until(lambda: store.error)
    began = time.monotonic()
    assert not store.close(30)
    assert time.monotonic() - began < 10


def test_database_that_duckdb_gave_up_on_is_opened_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)
    reader = store.cursor()
    store._writer.close()  # as good as invalidated: every statement fails from now on
    assert store.wait_committed(store.put(failure(1)), 10)
    assert ask(store, "SELECT count(*) FROM failures") == [(1,)]
    with pytest.raises(duckdb.Error):
        reader.execute("SELECT 1")


def test_snapshot_is_a_store_of_its_own(store: Store, tmp_path: Path) -> None:
    engine = row("engines", id=1, fingerprint='{"a": 1}')
    assert store.wait_committed(store.put({"engines": [engine], **failure(1)}), 10)
    path = tmp_path / "copy.duckdb"
    store.snapshot(path)
    assert query(path, "SELECT fingerprint->>'a' FROM engines") == [("1",)]
    copy = Store(path)
    assert ask(copy, "SELECT count(*) FROM failures") == [(1,)]
    copy.close()
    with pytest.raises(StoreError, match="exists"):
        store.snapshot(path)
    with pytest.raises(StoreError, match=r"(?i)no such file"):
        store.snapshot(tmp_path / "missing" / "copy.duckdb")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["copy.duckdb", "state"]


@pytest.mark.parametrize(
    "sql",
    [
        "FROM read_csv('/etc/passwd')",
        "COPY failures TO '/tmp/x'",
        "ATTACH '/tmp/x'",
        "SET memory_limit = '1TB'",
        "INSTALL httpfs",
    ],
)
def test_reader_can_not_leave_the_store(store: Store, sql: str) -> None:
    with store.cursor() as cursor, pytest.raises(duckdb.Error):
        cursor.execute(sql)


def test_rows_older_than_the_retention_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETENTION_INTERVAL_S", 0.0)
    store = Store(tmp_path / "s.duckdb", retention_hours=1)
    now = time.time_ns()
    store.put(
        {
            "requests": [
                row("requests", id=i, arrived_at_ns=now - age * HOUR) for i, age in enumerate((0, 2))
            ],
            "leases": [row("leases", id=i, armed_at_ns=now - age * HOUR) for i, age in enumerate((0, 2))],
            "engines": [row("engines", id=1, started_at_ns=now - 9 * HOUR, fingerprint="{}")],
        }
    )
    assert store.close()
    for table in ("requests", "leases", "engines"):
        assert query(tmp_path / "s.duckdb", f"SELECT count(*) FROM {table}") == [(1,)]


def test_commits_are_at_most_ten_a_second(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    commits = []
    commit = store._commit
    monkeypatch.setattr(store, "_commit", lambda *a: (commits.append(time.monotonic()), commit(*a)))
    ticket = 0
    for i in range(300):
        ticket = store.put(failure(i))
        time.sleep(0.001)
    assert store.wait_committed(ticket, 10)
    assert all(b - a >= 0.099 for a, b in itertools.pairwise(commits))
    assert len(commits) >= 2
