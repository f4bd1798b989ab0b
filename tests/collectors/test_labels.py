"""Named windows in a real store: on disk before the answer, never too old, in every copy."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from kvscope import labels
from kvscope.collectors import store as store_module
from kvscope.collectors.api import create_app
from kvscope.collectors.daemon import Daemon
from kvscope.collectors.store import Store, StoreError
from kvscope.labels import Change
from kvscope.settings import Settings

from .collecting import ask, query

LATEST = "SELECT name, kind, until_at_ns FROM labels ORDER BY made_at_ns DESC LIMIT 1"


def change(store: Store, name: str, **what: str | None) -> None:
    store.keep("labels", labels.row_of(store.cursor(), Change(name=name, **what)))  # type: ignore[arg-type]


def test_a_window_is_on_disk_when_it_was_kept_and_in_every_snapshot(tmp_path: Path) -> None:
    store = Store(tmp_path / "s.duckdb")
    threads = [
        threading.Thread(target=change, args=(store, f"w{i}"), kwargs={"kind": "release"}) for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ask(store, "SELECT count(DISTINCT name) FROM labels") == [(8,)]
    change(store, "last", kind="incident", since="0", until="1970-01-02")
    assert ask(store, LATEST) == [("last", "incident", 86400 * 10**9)]
    store.snapshot(tmp_path / "copy.duckdb")
    assert query(tmp_path / "copy.duckdb", LATEST) == [("last", "incident", 86400 * 10**9)]
    assert store.close()
    again = Store(tmp_path / "s.duckdb")
    assert ask(again, "SELECT count(*) FROM labels") == [(9,)]
    assert again.close()


def test_a_window_is_never_too_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETENTION_INTERVAL_S", 0.0)
    monkeypatch.setattr(labels.time, "time_ns", lambda: 1)
    store = Store(tmp_path / "s.duckdb", retention_hours=1)
    change(store, "old", kind="incident")
    monkeypatch.undo()
    change(store, "new", kind="release")
    assert store.close()
    assert query(tmp_path / "s.duckdb", "SELECT count(*) FROM labels") == [(2,)]


def test_a_window_that_can_not_be_written_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path / "s.duckdb")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(store, "_commit", full)
    row = labels.row_of(store.cursor(), Change(name="a", kind="release"))
    began = time.monotonic()
    with pytest.raises(StoreError, match="No space left"):
        store.keep("labels", row, timeout_s=0.2)
    assert time.monotonic() - began < 5
    monkeypatch.undo()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.keep("labels", row)


def test_questions_do_not_wait_for_changes_that_wait_for_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    daemon = Daemon(Settings(dir=tmp_path / "rings", store=tmp_path / "s.duckdb", sample_seconds=0))
    mended = threading.Event()
    monkeypatch.setattr(daemon, "keep", lambda table, row: mended.wait(30))
    with TestClient(create_app(daemon), base_url="http://127.0.0.1") as http, ThreadPoolExecutor(9) as pool:
        change = {"name": "a", "kind": "release"}
        changes = [pool.submit(http.post, "/api/v1/labels", json=change) for _ in range(8)]
        time.sleep(0.3)
        question = pool.submit(http.post, "/api/v1/query", json={"name": "ttft"})
        try:
            assert question.result(10).status_code == 200
        finally:
            mended.set()
        assert {one.result().status_code for one in changes} == {200}
    daemon.stop()
