"""What viewers see while requests come, go on and end: real rings, a real store, the real HTTP API."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from kvscope import client, frame, join, query
from kvscope import events as ev
from kvscope.collectors import channel, live
from kvscope.collectors import daemon as daemon_module
from kvscope.collectors.api import MAX_REFRESH_NS
from kvscope.collectors.daemon import Daemon
from kvscope.collectors.live import LiveView, Stream, TooManyViewers
from kvscope.demo.simulate import Fleet, RecordedEngine, SimulatedEngine, Simulation
from kvscope.errors import KvscopeError, UsageError
from kvscope.frame import Frame, RequestRow, Scope
from kvscope.labels import Change, row_of
from kvscope.settings import Settings

from . import collecting
from .collecting import Served, until

ALL = Scope(window="1h", label="simulated")
_FRAME = msgspec.json.Decoder(Frame)


class Held(Fleet):
    """A simulated P and D whose events are recorded when they are due."""

    def __init__(
        self, directory: Path, mode: str, slots: int, seed: int = 0, label: str = "simulated"
    ) -> None:
        engines = tuple(SimulatedEngine(f"sim-{role}{seed}-{mode}", mode, label=label) for role in "pd")
        self.simulation = Simulation(mode, seed, engines=engines)  # type: ignore[arg-type]
        self.now_ns = time.monotonic_ns()
        self.events = 0
        self.p, self.d = (RecordedEngine(engine, directory, slots) for engine in engines)

    def write_until(self, t_ns: int) -> None:
        """Record what happened before `t_ns`."""
        simulation = self.simulation
        later, texts = [], []
        for ring in simulation.rings():
            later.append([event for event in ring.events if event.t_ns >= t_ns])
            texts.append(dict(ring.texts))
            ring.events[:] = [event for event in ring.events if event.t_ns < t_ns]
        self.write()
        for ring, events, known in zip(simulation.rings(), later, texts, strict=True):
            ring.events[:] = events
            ring.texts.update(known)

    def start(self, before: int) -> str:
        """Record a request that arrived just now up to its first event of that kind; returns its name."""
        name = f"r{self.simulation.random.getrandbits(64):016x}"
        at = time.monotonic_ns()
        self.simulation.request(name, at)
        rings = self.simulation.rings()
        self.write_until(
            min(e.t_ns for ring in rings for e in ring.events if e.kind == before and e.t_ns >= at)
        )
        return name


class Viewer:
    """Applies frames one after the other, as docs/api.md says."""

    def __init__(self) -> None:
        self.in_flight: dict[str, RequestRow] = {}
        self.recent: dict[str, RequestRow] = {}
        self.last: Frame | None = None
        self.wholes = 0

    def apply(self, made: Frame) -> None:
        if made.whole:
            self.wholes += 1
            self.in_flight, self.recent = {}, {}
        for id_ in made.gone:
            self.in_flight.pop(id_, None)
            self.recent.pop(id_, None)
        for row in made.in_flight:
            self.in_flight[row.id] = row
            self.recent.pop(row.id, None)
        for row in made.recent:
            self.recent[row.id] = row
            self.in_flight.pop(row.id, None)
        since_ns = made.at_ns - made.window_ns
        kept = sorted(
            (r for r in self.recent.values() if r.arrived_at_ns >= since_ns), key=lambda r: r.arrived_at_ns
        )
        self.recent = {row.id: row for row in kept[-frame.MAX_RECENT :]}
        self.last = made


class Bench:
    """A daemon whose steps the test makes, and its live view on a clock that goes on with every frame."""

    def __init__(self, folder: Path) -> None:
        self.rings = folder / "rings"
        self.daemon = Daemon(Settings(dir=self.rings, store=folder / "s.duckdb"))
        self.seconds = 0.0
        self.later_ns = 0
        """How far the viewers' time is ahead."""
        self.view = LiveView(
            self.daemon, now=lambda: time.time_ns() + self.later_ns, clock=lambda: self.seconds
        )

    def next(self, stream: Stream) -> Frame:
        """The next frame, a moment later."""
        self.seconds += 0.2
        return _FRAME.decode(stream.next_line())

    def whole(self, scope: Scope = ALL) -> Frame:
        """A whole frame, when figures may be made anew."""
        self.seconds += channel.MIN_FIGURES_S
        return self.view.frame(scope)

    def step(self) -> None:
        while self.daemon._collector.step():
            pass

    def settle(self) -> None:
        """Store all that is complete."""
        self.step()
        ticket = self.daemon._collector.finish()
        assert self.daemon._store.wait_committed(ticket, 30)

    def close(self) -> None:
        self.view.close()
        self.daemon._collector.rings.close()
        self.daemon._store.close()


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(daemon_module, "TAKE_INTERVAL_S", 0.0)
    monkeypatch.setattr(daemon_module, "SCAN_INTERVAL_S", 0.0)
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def test_a_request_in_flight_moves_to_recent_when_it_is_over(bench: Bench) -> None:
    fleet = Held(bench.rings, "pull", 1 << 12)
    name = fleet.start(before=ev.LOAD_REPORTED)
    bench.step()
    stream = bench.view.stream(ALL)
    first = bench.next(stream)
    (row,) = first.in_flight
    assert (first.whole, first.live, first.recent, first.recent_total) == (True, True, [], 0)
    assert (row.client_id, row.in_flight, row.outcome, row.step) == (
        name,
        True,
        "in flight",
        "readiness.report",
    )
    assert row.waits_for == "D sim-d0-pull's scheduler to hear of it"
    assert row.step_since_ns is not None
    assert row.arrived_at_ns < row.step_since_ns < row.arrived_at_ns + 10**9
    assert (row.p_engine, row.d_engine, row.connector) == ("sim-p0-pull", "sim-d0-pull", "pull")

    fleet.write()
    bench.step()  # complete, and not handed over yet
    second = bench.next(stream)
    assert (second.whole, second.in_flight, second.gone) == (False, [], [row.id])
    (over,) = second.recent
    assert (over.id, over.in_flight, over.outcome, over.step, over.waits_for) == (
        row.id,
        False,
        "finished",
        None,
        "",
    )
    assert over.ttft_ns == sum(
        (over.compute_ns, over.capacity_ns, over.transfer_ns, over.coordination_ns, over.unknown_ns)
    )
    bench.settle()
    third = bench.next(stream)
    assert {r.id for r in third.recent} <= {row.id}
    assert (third.in_flight, third.recent_total) == ([], 1)
    assert [r.id for r in bench.whole(ALL).recent] == [row.id]
    stream.close()
    fleet.close()


def test_deltas_one_after_the_other_are_the_whole_frame(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(join, "SETTLE_NS", 20_000_000)
    chance = random.Random(7)
    fleets = [
        Held(bench.rings, mode, 1 << 14, seed) for seed, mode in enumerate(("push", "pull", "bidirectional"))
    ]
    scopes = [ALL, Scope(window="1h", where=("connector=push",), label="simulated"), Scope(window="1h")]
    streams = [bench.view.stream(scope) for scope in scopes]
    viewers = [Viewer() for _ in scopes]
    started = 0
    for _ in range(60):
        for fleet in fleets:
            if chance.random() < 0.4:
                # Up to a second ago, so that it goes on from turn to turn.
                fleet.simulation.request(f"r{started}", time.monotonic_ns() - chance.randrange(900_000_000))
                started += 1
            if chance.random() < 0.7:
                fleet.write_until(time.monotonic_ns() - chance.randrange(100_000_000))
        if chance.random() < 0.8:
            bench.daemon._collector.step()
        for scope, stream, viewer in zip(scopes, streams, viewers, strict=True):
            if chance.random() < 0.6:  # some are slow
                viewer.apply(bench.next(stream))
                whole = bench.view.channel(scope)._frame(-1)
                assert viewer.in_flight == {row.id: row for row in whole.in_flight}
                assert viewer.recent == {row.id: row for row in whole.recent}
                assert not viewer.in_flight.keys() & viewer.recent.keys()
    for fleet in fleets:
        fleet.write()
        fleet.close()
    bench.settle()
    for scope, stream, viewer in zip(scopes, streams, viewers, strict=True):
        viewer.apply(bench.next(stream))
        assert viewer.in_flight == {}
        with bench.daemon.cursor() as cursor:
            where = "connector = 'push'" if scope.where else "true"
            stored = cursor.execute(f"SELECT id::VARCHAR FROM requests WHERE {where}").fetchall()
        assert sorted(viewer.recent) == sorted(id_ for (id_,) in stored), "none missed, none doubled"
        assert viewer.last is not None
        assert viewer.last.recent_total == len(stored)
        stream.close()
    assert started > 50
    assert all(viewer.wholes <= 3 for viewer in viewers), "changes, not everything again and again"


def test_a_request_that_is_stored_while_it_is_looked_at_is_over_not_doubled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Held(bench.rings, "pull", 1 << 12)
    name = fleet.start(before=ev.TRANSFER_DONE)
    bench.step()
    stream, viewer = bench.view.stream(ALL), Viewer()
    viewer.apply(bench.next(stream))
    before = bench.daemon.look()
    fleet.write()
    bench.settle()
    monkeypatch.setattr(Daemon, "look", lambda self: before)
    for _ in range(2):
        viewer.apply(bench.next(stream))
        assert viewer.in_flight == {}
        assert [row.client_id for row in viewer.recent.values()] == [name]
    made = bench.whole()
    assert ([row.client_id for row in made.recent], made.in_flight) == ([name], [])
    assert made.answers["fleet"].dicts()[0]["requests"] == 1
    stream.close()
    fleet.close()


def test_figures_are_those_of_the_questions_for_the_same_window(bench: Bench) -> None:
    fleets = [Held(bench.rings, mode, 1 << 14, seed) for seed, mode in enumerate(("push", "pull"))]
    for _ in range(20):
        for fleet in fleets:
            fleet.simulation.request(f"s{fleet.events}", time.monotonic_ns() - 20 * 10**9)
            fleet.write()
    bench.settle()
    for fleet in fleets:
        fleet.start(before=ev.REQUEST_FINISHED if fleet is fleets[0] else ev.TRANSFER_POSTED)
    # One that has its first token and goes on.
    fleets.append(Held(bench.rings, "push", 1 << 12, seed=2))
    fleets[2].simulation.stalls["decode.generate"] = 10**9
    generating = fleets[2].start(before=ev.FIRST_TOKEN)
    fleets[2].write_until(time.monotonic_ns() + 10**9)
    bench.step()
    for where in ((), ("connector=pull",), ("ttft_ns>150ms",)):
        made = bench.whole(Scope(window="10m", where=where, label="simulated"))
        parameters: dict[str, Any] = {
            "since": str(made.figures_at_ns - made.window_ns),
            "until": str(made.figures_at_ns),
            "label": "simulated",
            "where": list(where),
        }
        assert set(made.answers) == set(frame.QUESTIONS)
        for name, answer in made.answers.items():
            found = query.ask(bench.daemon.cursor(), name, parameters, live=bench.view.requests())
            rows = [[query.plain(v, t) for v, t in zip(row, found.types, strict=True)] for row in found.rows]
            assert (answer.columns, answer.rows) == (found.columns, rows), name
    everything = bench.whole(Scope(window="10m", label="simulated"))
    total = everything.answers["fleet"].dicts()[0]
    assert (total["requests"], total["generating"]) == (41, 1)
    assert {row.client_id: row.step for row in everything.in_flight}[generating] == "decode.generate"
    for fleet in fleets:
        fleet.close()


def test_rings_that_a_next_daemon_reads_again_show_no_request_twice(tmp_path: Path, bench: Bench) -> None:
    fleet = Held(bench.rings, "push", 1 << 12)
    names = [fleet.request() for _ in range(5)]
    bench.settle()
    bench.daemon._store.close()
    again = Bench(tmp_path)
    while not again.daemon._collector.pipeline.joiner.live():
        again.daemon._collector.step()
    assert again.daemon.look().requests == []
    made = again.whole()
    assert (made.in_flight, sorted(row.client_id for row in made.recent)) == ([], sorted(names))
    assert made.recent_total == made.answers["fleet"].dicts()[0]["requests"] == 5
    later = fleet.start(before=ev.TRANSFER_POSTED)
    again.step()
    assert [row.client_id for row in again.whole().in_flight] == [later]
    again.close()
    fleet.close()


def test_the_label_is_production_where_there_is_some_else_the_most_frequent(bench: Bench) -> None:
    fleet = Held(bench.rings, "push", 1 << 12)
    fleet.request()
    bench.settle()
    made = bench.whole(Scope(window="1h"))
    assert (made.label, made.labels, len(made.recent)) == ("simulated", {"simulated": 1}, 1)
    other = bench.whole(Scope(window="1h", label="other"))
    assert (other.label, other.recent, other.in_flight) == ("other", [], [])
    fleet.close()


def test_another_label_in_the_lead_begins_the_stream_anew(bench: Bench) -> None:
    fleet = Held(bench.rings, "push", 1 << 12)
    fleet.request()
    bench.settle()
    stream = bench.view.stream(Scope(window="1h"))
    assert bench.next(stream).label == "simulated"
    production = Held(bench.rings, "pull", 1 << 12, seed=5, label="")
    production.request()
    bench.settle()

    def changed() -> Frame | None:
        made = bench.next(stream)
        return made if made.label == "" else None

    made = until(changed)
    assert made.whole
    assert [row.label for row in made.recent] == [""]
    stream.close()
    fleet.close()
    production.close()


def test_a_filter_is_of_live_rows_too(bench: Bench) -> None:
    fleets = [Held(bench.rings, mode, 1 << 12, seed) for seed, mode in enumerate(("push", "pull"))]
    names = [fleet.start(before=ev.TRANSFER_POSTED) for fleet in fleets]
    bench.step()
    for where, expected in (
        (("connector=push",), names[:1]),
        (("current_step=transfer.post",), names),
        (("outcome=in flight", "p_engine=sim-p1-pull"), names[1:]),
        (("compute_ns>1h",), []),
    ):
        made = bench.whole(Scope(window="1h", where=where, label="simulated"))
        assert sorted(row.client_id for row in made.in_flight) == sorted(expected), where
        assert made.where == list(where)
    for fleet in fleets:
        fleet.close()


def test_a_request_comes_to_pass_a_filter_by_waiting(bench: Bench) -> None:
    fleet = Held(bench.rings, "pull", 1 << 14)
    fleet.start(before=ev.LOAD_REPORTED)
    bench.step()
    stream = bench.view.stream(Scope(window="1h", label="simulated", where=("ttft>30s",)))
    viewer = Viewer()
    viewer.apply(bench.next(stream))
    assert len(viewer.in_flight) == 0
    bench.later_ns = 31 * 10**9
    viewer.apply(bench.next(stream))
    assert (viewer.wholes, len(viewer.in_flight)) == (1, 1)
    viewer.apply(bench.next(stream))
    assert len(viewer.in_flight) == 1
    stream.close()
    fleet.close()


def test_a_benchmark_that_is_named_begins_the_stream_anew_without_its_requests(bench: Bench) -> None:
    fleet = Held(bench.rings, "pull", 1 << 14, label="")
    for _ in range(2):
        fleet.request()
    bench.settle()
    fleet.request()
    bench.step()  # over, and not stored yet
    name = fleet.start(before=ev.LOAD_REPORTED)
    bench.step()
    production, soak = (bench.view.stream(Scope(window="1h", label=label)) for label in ("", "soak"))
    viewers = Viewer(), Viewer()
    for viewer, stream in zip(viewers, (production, soak), strict=True):
        viewer.apply(bench.next(stream))
    assert [(len(v.recent), len(v.in_flight)) for v in viewers] == [(3, 1), (0, 0)]

    daemon = bench.daemon
    change = Change(name="soak", kind="benchmark", since="1h")
    daemon.keep("labels", row_of(daemon.cursor(), change))
    bench.view.relabelled()
    for viewer, stream in zip(viewers, (production, soak), strict=True):
        viewer.apply(bench.next(stream))
    assert [(len(v.recent), len(v.in_flight)) for v in viewers] == [(0, 0), (3, 1)]
    assert {row.label for row in viewers[1].recent.values()} == {"soak"}
    assert [(row.client_id, row.label) for row in viewers[1].in_flight.values()] == [(name, "soak")]
    assert [v.wholes for v in viewers] == [2, 2]

    # What ends, arrives and is stored from now on is of the benchmark too.
    fleet.write()
    fleet.request()
    bench.settle()
    for viewer, stream in zip(viewers, (production, soak), strict=True):
        viewer.apply(bench.next(stream))
    assert [(len(v.recent), len(v.in_flight)) for v in viewers] == [(0, 0), (5, 0)]
    assert {row.label for row in viewers[1].recent.values()} == {"soak"}
    filtered = bench.whole(Scope(window="1h", label="soak", where=("label=soak",)))
    assert len(filtered.recent) == 5
    assert [one.name for one in filtered.windows] == ["soak"]
    for stream in (production, soak):
        stream.close()
    fleet.close()


def test_the_past_is_answered_with_what_had_arrived_by_then(bench: Bench) -> None:
    fleet = Held(bench.rings, "pull", 1 << 12)
    before_ns = time.time_ns()
    fleet.start(before=ev.TRANSFER_DONE)
    bench.step()
    now = bench.whole(Scope(window="1h", at=str(time.time_ns() + 10**9), label="simulated"))
    assert (now.live, len(now.in_flight)) == (False, 1)
    then = bench.whole(Scope(window="1h", at=str(before_ns), label="simulated"))
    assert (then.live, then.in_flight, then.at_ns) == (False, [], before_ns)
    fleet.close()


def test_a_viewer_that_missed_too_much_gets_a_whole_frame(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.view.feed = channel.Feed(limit=5)
    fleet = Held(bench.rings, "push", 1 << 14)
    fleet.request()
    bench.settle()
    stream, viewer = bench.view.stream(ALL), Viewer()
    viewer.apply(bench.next(stream))
    for _ in range(9):
        fleet.request()
    bench.settle()
    viewer.apply(bench.next(stream))
    assert (viewer.wholes, len(viewer.recent)) == (2, 10)
    fleet.request()
    bench.settle()
    viewer.apply(bench.next(stream))
    assert (viewer.wholes, len(viewer.recent)) == (2, 11)
    stream.close()
    fleet.close()


def test_a_slow_viewer_is_told_of_ids_that_went_long_ago(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Held(bench.rings, "push", 1 << 12)
    fleet.start(before=ev.TRANSFER_POSTED)
    bench.step()
    slow, quick = bench.view.stream(ALL), bench.view.stream(ALL)
    viewer = Viewer()
    viewer.apply(bench.next(slow))
    assert len(viewer.in_flight) == 1
    fleet.write()
    bench.settle()
    for _ in range(5):
        bench.next(quick)
    viewer.apply(bench.next(slow))
    assert (len(viewer.in_flight), len(viewer.recent), viewer.wholes) == (0, 1, 1)
    slow.close()
    quick.close()
    fleet.close()


def test_what_leaves_the_window_is_let_go(bench: Bench) -> None:
    fleet = Held(bench.rings, "push", 1 << 12)
    fleet.request()
    bench.settle()
    stream, viewer = bench.view.stream(ALL), Viewer()
    viewer.apply(bench.next(stream))
    assert len(viewer.recent) == 1
    bench.later_ns = 3600 * 10**9
    viewer.apply(bench.next(stream))
    assert (viewer.recent, viewer.wholes) == ({}, 1)
    assert viewer.last is not None
    assert viewer.last.recent_total == 0
    stream.close()
    fleet.close()


def test_viewers_that_come_at_once_share_what_is_made(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Held(bench.rings, "push", 1 << 12)
    fleet.start(before=ev.TRANSFER_POSTED)
    bench.step()
    view = LiveView(bench.daemon, clock=lambda: 0.0)
    made = []
    build, look = frame.build, Daemon.look
    monkeypatch.setattr(frame, "build", lambda *a, **k: made.append("figures") or build(*a, **k))
    monkeypatch.setattr(Daemon, "look", lambda self: made.append("look") or look(self))
    streams = [view.stream(ALL) for _ in range(8)]
    lines = {stream.next_line() for stream in streams}
    assert len(lines) == 1
    assert sorted(made) == ["figures", "look"]
    view.frame(ALL)
    assert sorted(made) == ["figures", "look"]
    view.close()
    fleet.close()


def test_no_viewer_costs_nothing(bench: Bench) -> None:
    fleet = Held(bench.rings, "push", 1 << 12)
    stream = bench.view.stream(ALL)
    bench.next(stream)
    assert bench.daemon._store.on_requests is not None
    stream.close()
    assert bench.view.streams == 0
    bench.seconds += live.IDLE_S + 1
    fleet.request()
    bench.settle()
    assert bench.daemon._store.on_requests is None
    assert bench.view._channels == {}
    assert [row.outcome for row in bench.whole(ALL).recent] == ["finished"], "and it begins again"
    fleet.close()


def test_figures_that_fail_are_said_to_be_old(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = bench.view.stream(ALL)
    assert bench.next(stream).problems[:1] != ["FIGURES ARE OLD: too slow"]

    def fail(*_: object, **__: object) -> Frame:
        raise query.QueryError("too slow")

    monkeypatch.setattr(frame, "build", fail)

    def told() -> list[str]:
        bench.seconds += 60
        return [text for text in bench.next(stream).problems if "FIGURES ARE OLD: too slow" in text]

    assert until(told)
    old_ns = bench.next(stream).figures_at_ns
    with pytest.raises(query.QueryError, match="too slow"):
        bench.whole(ALL)
    monkeypatch.undo()
    until(lambda: not told())
    assert bench.next(stream).figures_at_ns > old_ns
    stream.close()


def test_a_stream_whose_figures_can_not_be_made_anew_goes_on_with_the_old(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.view.feed = channel.Feed(limit=2)
    fleet = Held(bench.rings, "push", 1 << 14)
    fleet.request()
    bench.settle()
    stream, viewer = bench.view.stream(ALL), Viewer()
    viewer.apply(bench.next(stream))
    tried = []

    def fail(*_: object, **__: object) -> Frame:
        tried.append(1)
        raise query.QueryError("too slow")

    assert viewer.last is not None
    with monkeypatch.context() as patched:
        patched.setattr(frame, "build", fail)
        for _ in range(4):
            fleet.request()
        bench.settle()  # more than the feed holds: all is to be taken anew
        for _ in range(5):
            viewer.apply(bench.next(stream))
            assert viewer.last.problems[0] == "FIGURES ARE OLD: too slow"
            assert (viewer.wholes, len(viewer.recent)) == (1, 1)
    assert tried == [1], "and it is not tried again at once"
    bench.seconds += channel.FIGURES_RETRY_S
    viewer.apply(bench.next(stream))
    assert (viewer.wholes, len(viewer.recent)) == (2, 5)
    assert "FIGURES ARE OLD: too slow" not in viewer.last.problems
    stream.close()
    fleet.close()


def test_whole_frames_that_are_asked_for_in_a_row_share_their_figures(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Held(bench.rings, "push", 1 << 12)
    fleet.request()
    bench.settle()
    made = []
    build = frame.build
    monkeypatch.setattr(frame, "build", lambda *a, **k: made.append(1) or build(*a, **k))
    bench.whole()
    for _ in range(3):
        bench.seconds += 0.2
        bench.view.frame(ALL)
    assert len(made) == 1
    bench.whole()
    assert len(made) == 2
    fleet.close()


def test_a_stream_that_is_slow_keeps_its_scope(bench: Bench) -> None:
    assert MAX_REFRESH_NS < live.IDLE_S * 1e9


def test_streams_are_counted_and_one_too_many_is_turned_away(bench: Bench) -> None:
    streams = [bench.view.stream(ALL) for _ in range(live.MAX_STREAMS)]
    with pytest.raises(TooManyViewers, match="16 viewers are connected"):
        bench.view.stream(ALL)
    streams[0].close()
    streams[0].close()
    bench.view.stream(ALL)
    with pytest.raises(TooManyViewers):
        bench.view.stream(ALL)


def test_scopes_that_are_followed_are_bounded(bench: Bench) -> None:
    view = LiveView(bench.daemon, clock=lambda: 0.0)
    for minutes in range(1, live.MAX_CHANNELS + 6):
        view.channel(Scope(window=f"{minutes}m"))
    assert len(view._channels) == live.MAX_CHANNELS
    view.close()


@pytest.mark.parametrize(
    "scope",
    [
        Scope(window="31d"),
        Scope(window="0s"),
        Scope(window="long"),
        Scope(where=("nope=1",)),
        Scope(where=("connector=push",) * 21),
        Scope(label="x" * 300),
        Scope(label="a\0b"),
        Scope(at="yesterday"),
    ],
    ids=str,
)
def test_a_scope_that_is_not_understood_is_refused(bench: Bench, scope: Scope) -> None:
    for ask in (bench.whole, bench.view.stream):
        with pytest.raises(UsageError) as refused:
            ask(scope)
        assert "\n" not in str(refused.value)
    with pytest.raises(UsageError, match="a stream is of now"):
        bench.view.stream(Scope(at="5m"))
    assert bench.view.streams == 0


def test_who_waits_for_figures_is_told_when_the_daemon_stops(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.view.close()
    with pytest.raises(KvscopeError, match="shutting down"):
        bench.whole(ALL)


# --- the real daemon over HTTP -------------------------------------------------------------------


@pytest.fixture
def served(tmp_path: Path, start: Callable[..., Any]) -> Any:
    return start(Served, "--dir", str(tmp_path / "rings"), "--store", str(tmp_path / "s.duckdb"))


def test_stream_is_read_typed_and_ends_when_it_is_closed(tmp_path: Path, served: Served) -> None:
    fleet = Held(tmp_path / "rings", "push", 1 << 14)
    daemon = client.Daemon(served.url)
    seen = Viewer()
    ended = threading.Event()

    def read() -> None:
        for made in daemon.stream(ALL, 0.2):
            seen.apply(made)
        ended.set()

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: seen.wholes == 1)
    name = fleet.start(before=ev.TRANSFER_POSTED)
    until(lambda: [row.client_id for row in list(seen.in_flight.values())] == [name])
    fleet.write()
    until(lambda: [row.client_id for row in list(seen.recent.values())] == [name])
    assert seen.in_flight == {}
    whole = daemon.frame(ALL)
    assert ([row.client_id for row in whole.recent], whole.live) == ([name], True)
    until(lambda: {e.source for e in daemon.frame(ALL).engines} == {"scheduler", "worker"})
    assert all(engine.started_at_ns for engine in daemon.frame(ALL).engines)
    began = time.monotonic()
    daemon.close()
    assert ended.wait(10)
    assert time.monotonic() - began < 5
    thread.join()
    fleet.close()


def connect(url: str) -> socket.socket:
    """A viewer that has its first frame."""
    host, port = url.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(30)
    connection.sendall(b"GET /api/v1/stream?refresh=200ms HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while b"\n" not in answer.partition(b"\r\n\r\n")[2]:
        part = connection.recv(65536)
        answer += part
        if not part or b" 503 " in answer[:20]:
            break
    if b" 200 " not in answer[:20]:
        connection.close()
        raise ConnectionRefusedError(answer)
    return connection


def test_viewers_that_go_without_a_word_leave_nothing_behind(served: Served) -> None:
    viewers = [connect(served.url) for _ in range(live.MAX_STREAMS)]
    refused = httpx.get(f"{served.url}/api/v1/stream", timeout=30)
    assert refused.status_code == 503
    assert "16 viewers are connected" in refused.json()["error"]
    with pytest.raises(client.DaemonError, match="16 viewers"):
        next(client.Daemon(served.url).stream(ALL))
    threads = len(list(Path(f"/proc/{served.process.pid}/task").iterdir()))
    for viewer in viewers:
        viewer.close()

    def again() -> list[socket.socket] | None:
        found: list[socket.socket] = []
        try:
            for _ in range(live.MAX_STREAMS):
                found.append(connect(served.url))
        except ConnectionRefusedError:
            for one in found:
                one.close()
            return None
        return found

    for viewer in until(again):
        viewer.close()
    assert len(list(Path(f"/proc/{served.process.pid}/task").iterdir())) <= threads + 2


def test_daemon_stops_at_once_with_viewers_connected(served: Served) -> None:
    viewers = [connect(served.url) for _ in range(3)]
    reader = client.Daemon(served.url)
    frames = reader.stream(ALL, 60)
    next(frames)
    began = time.monotonic()
    code, stderr = served.stop()
    took = time.monotonic() - began
    assert code == 0
    assert took < 5
    assert "Traceback" not in stderr
    assert "ancel" not in stderr, "streams ended by themselves"
    with pytest.raises(client.NoDaemon, match="ended the stream"):
        next(frames)
    for viewer in viewers:
        rest = b""
        while part := viewer.recv(65536):
            rest += part
        assert rest.endswith(b"0\r\n\r\n"), "an end, not a broken line"
        viewer.close()


def test_a_signal_that_comes_while_a_viewer_comes_stops_the_daemon(
    tmp_path: Path, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = """
import os, signal
from kvscope.collectors.live import LiveView
stream = LiveView.stream
def interrupt(self, scope):
    with self._lock:
        os.kill(os.getpid(), signal.SIGTERM)
    return stream(self, scope)
LiveView.stream = interrupt
"""
    monkeypatch.setattr(collecting, "SERVE", interrupted + collecting.SERVE)
    served = start(Served, "--dir", str(tmp_path / "rings"), "--store", str(tmp_path / "s.duckdb"))
    with socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2]))) as viewer:
        viewer.sendall(b"GET /api/v1/stream HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert served.process.wait(30) == 0


def test_nothing_there_and_a_page_that_is_no_daemon_are_told_apart(served: Served) -> None:
    served.stop()
    with pytest.raises(client.NoDaemon, match="start one with"):
        client.Daemon(served.url).frame(ALL)
    with pytest.raises(client.NoDaemon, match="start one with"):
        next(client.Daemon(served.url).stream(ALL))
