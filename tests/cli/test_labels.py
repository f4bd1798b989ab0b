"""Named windows of time and notes: what they are, where their names stand for moments, and what counts as a
benchmark, in the daemon and in a file alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope import labels, schema, windows
from kvscope.client import Daemon, StoreFile, change_label
from kvscope.collectors.live import LiveView
from kvscope.errors import KvscopeError, UsageError
from kvscope.frame import Frame, Scope
from kvscope.labels import Change
from kvscope.lookup import Listing
from kvscope.query import Limits
from kvscope.windows import Window

from . import rows
from .conftest import FakeDaemon, Run

S = 10**9
T0 = rows.T0_NS


class Source:
    """A daemon, or a file, with labels of its own."""

    def __init__(self, url: str = "", path: Path = Path()) -> None:
        self.url, self.path = url, path
        self._opened: list[Daemon | StoreFile] = []
        self.arguments = ("--url", url) if url else ("--db", str(path))

    def open(self) -> Daemon | StoreFile:
        if not self._opened:
            self._opened.append(Daemon(self.url) if self.url else StoreFile(self.path))
        return self._opened[0]

    def frame(self, daemon: FakeDaemon, **scope: Any) -> Frame:
        """Without the short limit that queries have in the API of the tests: a busy machine takes longer."""
        if not self.url:
            return self.open().frame(Scope(**scope))
        view = LiveView(daemon, Limits(seconds=60))
        try:
            return view.frame(Scope(**scope))
        finally:
            view.close()

    def close(self) -> None:
        for one in self._opened:
            one.close()
        self._opened.clear()

    def change(self, name: str, **what: Any) -> list[labels.Label]:
        change = Change(name=name, **what)
        self.close()  # no process may have the file open, this one included
        opened = self.open() if self.url else None
        return opened.change_label(change) if isinstance(opened, Daemon) else change_label(self.path, change)

    def query(self, sql: str, **parameters: Any) -> list[list[Any]]:
        named = not sql.startswith("SELECT")
        found: list[list[Any]] = self.open().query(sql * named, sql * (not named), parameters)["rows"]
        return found


@pytest.fixture(params=["daemon", "file"])
def source(
    request: pytest.FixtureRequest, daemon: FakeDaemon, url: str, store_file: Path, tmp_path: Path
) -> Iterator[Source]:
    copy = Path(shutil.copy(store_file, tmp_path / "copy.duckdb"))
    source = Source(url) if request.param == "daemon" else Source(path=copy)
    yield source
    source.close()
    daemon.connection.execute("DELETE FROM labels")


def at(seconds: float) -> str:
    """A moment so long after the first request of the rows was due."""
    return str(T0 + round(seconds * S))


def test_a_window_is_made_listed_changed_and_removed(source: Source, run: Run) -> None:
    made = run(
        "label", "outage-7", "--kind", "incident", "--since", "2026-11-29T15:54:10", "--until",
        "2026-11-29T15:54:20", "--note", "switch 3 was replaced", "--by", "ana", *source.arguments,
    )  # fmt: skip
    assert (made.returncode, made.stderr) == (0, "")
    assert "outage-7  incident  2026-11-29 15:54:10.000  2026-11-29 15:54:20.000" in made.stdout
    (listed,) = json.loads(run("label", "--list", "--json", *source.arguments).stdout)
    assert (listed["name"], listed["kind"]) == ("outage-7", "incident")
    assert (listed["since_ns"], listed["until_ns"]) == (1795967650 * S, 1795967660 * S)
    assert [(n["note"], n["made_by"]) for n in listed["notes"]] == [("switch 3 was replaced", "ana")]

    # What is not said stays; notes stand beside each other, the newest first.
    (noted,) = source.change("outage-7", note="again on Monday")
    assert (noted.kind, noted.until_ns) == ("incident", 1795967660 * S)
    assert [note.note for note in noted.notes] == ["again on Monday", "switch 3 was replaced"]
    assert source.change("outage-7", until="")[0].until_ns is None
    assert source.change("outage-7", until=at(30))[0].until_ns == T0 + 30 * S

    gone = run("label", "outage-7", "--remove", *source.arguments)
    assert (gone.returncode, gone.stdout) == (0, "outage-7: removed\n")
    assert run("label", "--list", *source.arguments).stdout == "no named windows\n"
    assert run("notes", *source.arguments).stderr == "no notes\n"
    # The name is free again, and what was noted about the former window is not of this one.
    (anew,) = source.change("outage-7", kind="release")
    assert (anew.kind, anew.notes, anew.until_ns) == ("release", [], None)


def test_a_name_alone_shows_that_window(source: Source, run: Run) -> None:
    source.change("outage-7", kind="incident", since=at(0), note="switch 3")
    source.change("v1.4", kind="release", since=at(5))
    shown = run("label", "outage-7", *source.arguments)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert "switch 3" in shown.stdout
    assert "v1.4" not in shown.stdout
    (one,) = json.loads(run("label", "outage-7", "--json", *source.arguments).stdout)
    assert one["name"] == "outage-7"
    absent = run("label", "outage-8", *source.arguments)
    assert (absent.returncode, absent.stdout) == (2, "")
    assert absent.stderr.startswith("kvscope: no window 'outage-8'; --list tells")


def test_the_row_made_last_counts_even_where_the_clock_was_set_back(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    source.change("b", kind="benchmark", since=at(0))
    monkeypatch.setattr(labels.time, "time_ns", lambda: T0)
    assert source.change("b", until=at(9))[0].until_ns == T0 + 9 * S


def test_notes_are_found_by_all_words_in_any_case(source: Source, run: Run) -> None:
    source.change("outage-7", kind="incident", since=at(0), until=at(9), note="the Switch\nwas replaced")
    source.change("v1.4", kind="release", since=at(5), note="block size 32, evil\x1b[31m")
    found = run("notes", "switch", "INCIDENT", *source.arguments).stdout
    assert "outage-7 (incident)" in found
    assert (
        "  from 2026-11-29 15:54:09.123 to 2026-11-29 15:54:18.123\n  the Switch\n  was replaced\n" in found
    )
    assert "v1.4" not in found
    everything = run("notes", *source.arguments).stdout
    assert everything.index("v1.4") < everything.index("outage-7")  # the newest first
    assert "\x1b" not in everything
    (one,) = json.loads(run("notes", "size", "--json", *source.arguments).stdout)
    assert (one["name"], one["since_ns"], one["until_ns"]) == ("v1.4", T0 + 5 * S, None)
    assert run("notes", "switch", "release", *source.arguments).stderr == "no such notes\n"


def test_a_name_stands_for_its_beginning_and_end(source: Source, daemon: FakeDaemon, run: Run) -> None:
    source.change("two", kind="incident", since=at(2), until=at(4))  # requests 2 and 3
    ids = "SELECT (id - 9223372036854775808)::BIGINT FROM requests ORDER BY ALL"
    assert source.query(ids, since="@two", until="@two.end") == [[2], [3]]
    assert source.query(ids, until="@two") == [[1]]
    assert source.query(ids, since="@two.end")[0] == [4]
    assert source.query("SELECT $since, $until FROM requests LIMIT 1", since="@two", until="@two.end") == [
        [T0 + 2 * S, T0 + 4 * S]
    ]
    listed = source.open().requests(Listing(since="@two", until="@two.end", sort="id:asc"))
    assert [int(row["id"]) - 2**63 for row in listed] == [2, 3]
    asked = run("query", ids, "--during", "two", "--format", "csv", *source.arguments)
    assert asked.stdout.split()[-2:] == ["2", "3"]
    asked = run("requests", "--during", "@two", "--json", *source.arguments)
    assert len(json.loads(asked.stdout)) == 2
    assert source.frame(daemon, at="@two.end", window="2s").at_ns == T0 + 4 * S
    # A window may begin where another ends; one without an end ends now.
    (later, _) = source.change("after", kind="incident", since="@two.end")
    assert (later.since_ns, later.until_ns) == (T0 + 4 * S, None)
    assert source.query(ids, since="@after", until="@after.end")[0] == [4]


def test_a_name_that_is_none_is_said_with_the_nearest(source: Source, run: Run) -> None:
    source.change("outage-7", kind="incident", since=at(0))
    asked = run("query", "ttft", "--during", "outage7", *source.arguments)
    assert asked.returncode == 2
    assert asked.stderr == "kvscope: --during: no window 'outage7'; did you mean outage-7?\n"
    asked = run("requests", "--since", "@x", *source.arguments)
    assert asked.returncode == 2
    assert "`kvscope label --list` tells those there are" in asked.stderr
    asked = run("requests", "--since", "1h", "--during", "outage-7", *source.arguments)
    assert "--during stands for --since and --until" in asked.stderr


def test_requests_of_a_benchmarks_window_count_as_of_its_label(source: Source, daemon: FakeDaemon) -> None:
    by_label = "SELECT label, count(*) FROM requests GROUP BY ALL ORDER BY ALL"
    before = source.query(by_label)
    assert before == [["", 8], ["benchmark", 1]]
    source.change("nightly", kind="benchmark", since=at(2), until=at(5))  # requests 2, 3 and 4
    source.change("outage", kind="incident", since=at(2), until=at(5))  # changes nothing
    # Number 3 has a label of its own and keeps it.
    assert source.query(by_label) == [["", 6], ["benchmark", 1], ["nightly", 2]]
    assert source.query(by_label, since=at(3)) == [["", 5], ["benchmark", 1], ["nightly", 1]]
    assert source.query("SELECT count(*) FROM waits", label="") == [[6]]
    assert source.query("SELECT min(label), count(*) FROM request_steps", label="nightly")[0][0] == "nightly"
    assert source.query("SELECT count(*) FROM requests", where=["label=nightly"]) == [[2]]
    assert {row[0] for row in source.query("outcomes", label="nightly")} == {"nightly"}

    opened = source.open()
    assert {int(row["id"]) - 2**63 for row in opened.requests(Listing(where=["label=nightly"]))} == {2, 4}
    shown = opened.request(str(rows.PUSH_LATE["id"]))["request"]
    assert shown["label"] == "nightly"
    frame = source.frame(daemon, window="1h", at=at(60), label="nightly")
    assert {int(row.id) - 2**63 for row in frame.recent} == {2, 4}
    assert (frame.label, frame.labels["nightly"]) == ("nightly", 2)
    assert frame.windows == [
        Window("nightly", "benchmark", T0 + 2 * S, T0 + 5 * S),
        Window("outage", "incident", T0 + 2 * S, T0 + 5 * S),
    ]
    production = source.frame(daemon, window="1h", at=at(60))
    assert {int(row.id) - 2**63 for row in production.recent} == {1, 5, 6, 7, 8, 9}

    source.change("nightly", remove=True)
    assert source.query(by_label) == before


def test_a_request_in_flight_counts_as_of_the_benchmark_too(url: str, daemon: FakeDaemon) -> None:
    source = Source(url)
    try:
        source.change("soak", kind="benchmark", since=at(9.5))  # number 10 is in flight
        opened = source.open()
        assert [row["in_flight"] for row in opened.requests(Listing(where=["label=soak"]))] == [True]
        assert opened.request(str(rows.LIVE["id"]))["request"]["label"] == "soak"
        soak, production = (
            source.frame(daemon, window="1h", at=at(20), label=label).in_flight for label in ("soak", "")
        )
        assert [(int(row.id), row.label) for row in soak] == [(rows.LIVE["id"], "soak")]
        assert rows.LIVE["id"] not in {int(row.id) for row in production}
    finally:
        source.close()
        daemon.connection.execute("DELETE FROM labels")


def test_of_benchmarks_that_overlap_the_later_one_counts_in_memory_as_in_sql(source: Source) -> None:
    source.change("long", kind="benchmark", since=at(1))
    source.change("short", kind="benchmark", since=at(3), until=at(5))
    found = dict(source.query("SELECT arrived_at_ns, label FROM requests WHERE label <> 'benchmark'"))  # type: ignore[arg-type]
    assert {(ns - T0) // S: label for ns, label in found.items()} == {
        **dict.fromkeys((1, 2, 5, 6, 7, 8, 9), "long"),
        4: "short",
    }
    steps = windows.steps(
        [Window("long", "benchmark", T0 + S, None), Window("short", "benchmark", T0 + 3 * S, T0 + 5 * S)]
    )
    assert {ns: windows.label_of(steps, "", ns) for ns in found} == found
    assert windows.label_of(steps, "own", T0 + 4 * S) == "own"


WINDOWS = st.lists(
    st.builds(
        lambda name, since, length: Window(name, "benchmark", since, length and since + length),
        st.text("ab'", min_size=1, max_size=2),
        st.integers(0, 20),
        st.none() | st.integers(1, 9),
    ),
    max_size=12,
    unique_by=lambda one: one.name,
)


@given(WINDOWS)
@settings(max_examples=60, deadline=None)
def test_at_any_moment_the_benchmark_counts_that_began_last(found: list[Window]) -> None:
    steps = windows.steps(found)
    with duckdb.connect() as connection:
        source = "(SELECT range AS arrived_at_ns, NULL::VARCHAR AS label FROM range(-1, 33))"
        in_sql = dict(
            connection.execute(
                f"SELECT arrived_at_ns, label FROM {windows.labelled_sql(source, steps)}"
            ).fetchall()
        )
    for at_ns in range(-1, 33):
        there = [w for w in found if w.since_ns <= at_ns and (w.until_ns is None or at_ns < w.until_ns)]
        wanted = min(there, key=lambda w: (-w.since_ns, w.name)).name if there else None
        assert windows.label_of(steps, None, at_ns) == wanted
        assert in_sql[at_ns] == wanted


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"name": "new"}, "needs a kind: incident, release, benchmark"),
        ({"name": "new", "remove": True}, "no window 'new' to remove"),
        ({"name": "new", "kind": "party"}, "is no kind; there are: incident, release, benchmark"),
        ({"name": "two words", "kind": "release"}, "is no name of a window"),
        ({"name": "a.end", "kind": "release"}, "not .end at its end"),
        ({"name": "@a", "kind": "release"}, "is no name of a window"),
        ({"name": "", "kind": "release"}, "is no name of a window"),
        ({"name": "a\n", "kind": "release"}, "is no name of a window"),
        ({"name": "a" * 81, "kind": "release"}, "name: at most 80 characters"),
        ({"name": "a", "kind": "release", "note": "n" * 1001}, "note: at most 1000 characters"),
        ({"name": "a", "kind": "release", "note": "\0"}, "NUL"),
        ({"name": "a", "kind": "release", "by": "b" * 81}, "by: at most 80"),
        ({"name": "a", "kind": "release", "since": "soon"}, "since: 'soon' is no duration"),
        ({"name": "a", "kind": "release", "until": "@b"}, "until: no window 'b'"),
        ({"name": "a", "kind": "incident", "since": "1h", "until": "2h"}, "would end before it begins"),
        ({"name": "there"}, "nothing is new about 'there'"),
    ],
)
def test_what_is_no_change_is_refused_in_one_line(source: Source, change: dict[str, Any], says: str) -> None:
    source.change("there", kind="release")
    with pytest.raises(UsageError) as caught:
        source.change(**change)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert [one.name for one in source.open().labels()] == ["there"]


def test_labels_are_bounded(source: Source, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "MAX_ROWS", 2)
    source.change("a", kind="release")
    source.change("a", note="n")
    with pytest.raises(UsageError, match="2 labels and notes, which is the most"):
        source.change("a", note="m")


@pytest.mark.parametrize(
    ("content", "type_", "status"),
    [
        (b'{"name": "a", "kind": "release", "colour": "red"}', "application/json", 400),
        (b'{"name": ["a"], "kind": "release"}', "application/json", 400),
        (b"[" * 5000, "application/json", 400),
        (b'{"name": "a", "kind": "release"}', "text/plain", 415),
        (b'{"name": "' + b"a" * 200_000 + b'"}', "application/json", 413),
    ],
)
def test_a_body_that_is_no_change_is_refused(
    daemon: FakeDaemon, http: httpx.Client, content: bytes, type_: str, status: int
) -> None:
    answer = http.post("/api/v1/labels", content=content, headers={"content-type": type_})
    assert (answer.status_code, bool(answer.json()["error"])) == (status, True)
    assert http.get("/api/v1/labels").json() == {"labels": []}


def test_a_directory_a_missing_file_and_a_store_in_use_are_refused(
    run: Run, store_file: Path, tmp_path: Path
) -> None:
    arguments = ("label", "a", "--kind", "release", "--db")
    refused = run(*arguments, str(tmp_path))
    assert (refused.returncode, "write to the daemon (--url), a store or a snapshot" in refused.stderr) == (
        1,
        True,
    )
    assert "no such file" in run(*arguments, str(tmp_path / "none.duckdb")).stderr
    copy = Path(shutil.copy(store_file, tmp_path / "copy.duckdb"))
    with duckdb.connect(str(copy)):
        refused = run(*arguments, str(copy))
    assert (refused.returncode, "write to the daemon instead (--url)" in refused.stderr) == (1, True)
    (tmp_path / "text.duckdb").write_text("no database")
    assert "can't be written" in run(*arguments, str(tmp_path / "text.duckdb")).stderr
    with duckdb.connect(str(tmp_path / "other.duckdb")) as other:
        other.execute("CREATE TABLE t (a INT)")
    with pytest.raises(KvscopeError, match="no kvscope store"):
        change_label(tmp_path / "other.duckdb", Change(name="a", kind="release"))
    assert run("label", "--list", "--db", str(copy)).stdout == "no named windows\n"


def test_commands_say_what_is_missing(run: Run) -> None:
    for arguments, says in (
        (("label",), "name a window, or list those there are with --list"),
        (("label", "--note", "n"), "name the window"),
        (("label", "a", "--list"), "leave the name away"),
    ):
        asked = run(*arguments)
        assert (asked.returncode, says in asked.stderr) == (2, True)


def test_an_archive_of_the_store_tells_the_same(store_file: Path, run: Run, tmp_path: Path) -> None:
    copy = Path(shutil.copy(store_file, tmp_path / "copy.duckdb"))
    change_label(copy, Change(name="nightly", kind="benchmark", since=at(2), until=at(5), note="n"))
    assert run("archive", str(tmp_path / "archive"), "--db", str(copy)).returncode == 0
    answers = []
    for path in (copy, tmp_path / "archive"):
        source = Source(path=path)
        answers.append(
            (
                source.query("SELECT label, count(*) FROM requests GROUP BY ALL ORDER BY ALL"),
                source.query("SELECT count(*) FROM requests", since="@nightly", until="@nightly.end"),
                source.open().labels(),
            )
        )
        source.close()
    assert answers[0] == answers[1]
    assert answers[0][0] == [["", 6], ["benchmark", 1], ["nightly", 2]]


def test_a_kept_table_is_cut_by_no_time(source: Source) -> None:
    source.change("old", kind="incident", since="0", until="1970-01-02")
    assert source.query("SELECT name FROM requests, labels LIMIT 1", since=at(1)) == [["old"]]
    assert {table.name for table in schema.TABLES if table.kept} == {"engines", "labels"}
