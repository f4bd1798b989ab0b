"""What a request in flight waits for and since when, and what engines tell of themselves."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any

import pytest

from kvscope import events as ev
from kvscope.collectors.pipeline import LIVE_ROW_NS, LiveRequest, Pipeline
from kvscope.demo.simulate import MS, SimulatedRing
from kvscope.events import UNKNOWN, text_key
from kvscope.ring import About
from kvscope.schema import REQUESTS

S = 1000 * MS
START_NS = 10**15
WALL_NS = 1_700_000_000 * S
COLUMNS = [column.name for column in REQUESTS.columns]
P, D = "cmpl-r-0-aaaaaaaa", "cmpl-r-0-bbbbbbbb"


class Scene:
    """A P and a D engine with worker ranks; times in milliseconds; what was added is fed at every look."""

    def __init__(self, mode: str, ranks: int = 1) -> None:
        self.pipeline = Pipeline()
        self.rings: dict[str, tuple[SimulatedRing, Any]] = {}
        self._fed = 0
        for engine in ("p", "d"):
            self.add_ring(engine, engine, ev.SCHEDULER, 0, mode)
            for rank in range(ranks):
                self.add_ring(f"{engine}{rank}", engine, ev.WORKER, rank, mode)

    def add_ring(self, name: str, engine: str, source: str, rank: int, mode: str) -> None:
        fingerprint = {"transfer_mode": "push" if mode == "push" else "pull", "num_blocks": 100}
        about = About(engine, source, rank, "", host="h", boot_id="boot", fingerprint=fingerprint)
        ring = SimulatedRing(about, text_key(name).to_bytes(16, "little"))
        reader = SimpleNamespace(
            ring_id=uuid.UUID(bytes=ring.ring_id), about=about, wall_ns=WALL_NS, mono_ns=START_NS, texts={}
        )
        self.rings[name] = ring, reader
        self.pipeline.add_ring(reader)  # type: ignore[arg-type]

    def at(self, ms: float) -> int:
        return START_NS + round(ms * MS)

    def add(self, ring: str, ms: float, kind: int, request: str, *args: int | str) -> None:
        self.rings[ring][0].add(self.at(ms), kind, request, *args)

    def feed(self) -> None:
        self._fed += 1
        for ring, reader in self.rings.values():
            reader.texts = dict(ring.texts)
            self.pipeline.feed(reader, list(ring.events), self._fed)
            ring.events.clear()

    def look(self, ms: float) -> list[LiveRequest]:
        self.feed()
        live = self.pipeline.joiner.live()
        return self.pipeline.look(live, self.at(ms), WALL_NS + round(ms * MS))

    def one(self, ms: float) -> LiveRequest:
        """The only request, as it is at that time."""
        (found,) = self.look(ms)
        return found

    # --- what happens ---

    def arrive(
        self, engine: str, ms: float, request: str, flags: int, peer: str = "", named: str = ""
    ) -> None:
        self.add(engine, ms, ev.REQUEST_ARRIVED, request, self.at(ms), flags, 160, peer, named)

    def prefill(self, ms: float = 0, lease_ms: float = 30_000) -> None:
        """P's leg from its arrival to its end 50 ms later."""
        self.arrive("p", ms, P, ev.FLAG_REMOTE_DECODE)
        self.add("p", ms + 1, ev.REQUEST_CONSIDERED, P, 0, 0, 0)
        self.add("p", ms + 2, ev.REQUEST_SCHEDULED, P, 10, 0, 1, 0, 0)
        self.finish_prefill(ms + 50, lease_ms)

    def finish_prefill(self, ms: float, lease_ms: float = 30_000) -> None:
        self.add("p", ms, ev.REQUEST_FINISHED, P, "FINISHED_LENGTH_CAPPED", 160, 1, 160, 0, 0, 0, 1, 10)
        for name in (name for name in self.rings if name[0] == "p" and name != "p"):
            self.add(name, ms + 1, ev.LEASE_ARMED, P, self.at(ms + lease_ms))

    def admit(self, ms: float, named: str = P) -> None:
        """D's leg to its destination blocks, 2 ms later."""
        self.arrive("d", ms, D, ev.FLAG_REMOTE_PREFILL, "p", named)
        self.add("d", ms + 1, ev.REQUEST_CONSIDERED, D, 0, 160, 1)
        self.add("d", ms + 2, ev.BLOCKS_ALLOCATED, D, 10, 160, 1)


def told(live: LiveRequest) -> tuple[str | None, int, str]:
    """Step, milliseconds since the start at which it began, and what is waited for."""
    assert live.in_flight
    assert live.step_since_ns is not None
    return live.step, round((live.step_since_ns - WALL_NS) / MS), live.waits_for


def test_a_pull_says_step_by_step_what_it_waits_for() -> None:
    scene = Scene("pull")
    scene.arrive("p", 0, P, ev.FLAG_REMOTE_DECODE)
    assert told(scene.one(5)) == ("prefill.queue", 0, "its turn in the queue of P p")
    scene.add("p", 10, ev.REQUEST_CONSIDERED, P, 0, 0, 0)
    assert told(scene.one(12)) == ("prefill.blocks", 10, "KV blocks on P p (head of its queue)")
    scene.add("p", 20, ev.REQUEST_SCHEDULED, P, 10, 0, 1, 0, 0)
    assert told(scene.one(30)) == ("prefill.compute", 20, "")
    scene.finish_prefill(60)
    assert told(scene.one(100)) == ("registration.route", 60, "D to fetch; lease ends in 29 s")
    assert told(scene.one(18_100)) == ("registration.route", 60, "D to fetch; lease ends in 11 s")
    assert told(scene.one(30_100)) == ("registration.route", 60, "D to fetch; lease over")
    scene.arrive("d", 70, D, ev.FLAG_REMOTE_PREFILL, "p", P)
    assert told(scene.one(80)) == ("registration.admit", 70, "its turn in the queue of D d")
    scene.add("d", 90, ev.REQUEST_CONSIDERED, D, 0, 160, 1)
    assert told(scene.one(91)) == ("registration.blocks", 90, "KV blocks on D d (head of its queue)")
    scene.add("d", 95, ev.BLOCKS_ALLOCATED, D, 10, 160, 1)
    assert told(scene.one(96)) == ("transfer.dispatch", 95, "D d to start the READ")
    scene.add("d0", 100, ev.LOAD_STARTED, D, "p", P, 10)
    assert told(scene.one(101)) == ("transfer.post", 100, "D d to post the READ")
    scene.add("d0", 102, ev.TRANSFER_POSTED, D, 1, 0, scene.at(100), 0, "p")
    assert told(scene.one(3200)) == ("transfer.wire", 102, "READ of 160 tokens from P p running, 3 s")
    scene.add("d0", 110, ev.TRANSFER_DONE, D, 1, scene.at(105), scene.at(110), 0, 0, 0, 3_100_000, 4)
    scene.add("d0", 110, ev.LOAD_DONE, D, 0)
    assert told(scene.one(111)) == ("readiness.report", 110, "D d's scheduler to hear of it")
    scene.add("d", 112, ev.LOAD_REPORTED, D, 0)
    assert told(scene.one(113)) == ("readiness.promote", 112, "the next step of D d")
    scene.add("d", 114, ev.PROMOTION_DEFERRED, D)
    assert told(scene.one(115)) == ("readiness.admit", 114, "a place in the batch of D d")
    scene.add("d", 120, ev.REQUEST_SCHEDULED, D, 11, 159, 1, 0, scene.at(114))
    assert told(scene.one(121)) == ("decode.first_step", 120, "")
    scene.add("d", 130, ev.FIRST_TOKEN, D, 1)
    scene.add("p0", 131, ev.LEASE_RELEASED, P)
    scene.add("p", 132, ev.SEND_REPORTED, P)
    assert told(scene.one(140)) == ("decode.generate", 130, "")


def test_a_push_with_two_ranks_says_which_notification_is_missing() -> None:
    scene = Scene("push", ranks=2)
    scene.arrive("p", 0, P, ev.FLAG_REMOTE_DECODE)
    scene.add("p", 1, ev.REQUEST_CONSIDERED, P, 0, 0, 0)
    scene.add("p", 2, ev.REQUEST_SCHEDULED, P, 10, 0, 1, 0, 0)
    scene.add("p0", 3, ev.PUSH_MATCHED, P, "d", D)  # joins the two
    scene.rings["p0"][0].events.clear()
    scene.prefill()
    scene.admit(5, "unknown to P")
    for rank in ("d0", "d1"):
        scene.add(rank, 8, ev.LOAD_STARTED, D, "p", "unknown to P", 10)
        scene.add(rank, 9, ev.REGISTRATION_SENT, D, "p")
    for rank in ("p0", "p1"):
        scene.add(rank, 12, ev.REGISTRATION_RECEIVED, D, "d")
        scene.add(rank, 60, ev.PUSH_MATCHED, P, "d", D)
    assert told(scene.one(61)) == ("transfer.post", 60, "P p to post the WRITE")
    for number, rank in enumerate(("p0", "p1")):
        scene.add(rank, 62, ev.TRANSFER_POSTED, P, number, 1, scene.at(61), 0, "d")
    assert told(scene.one(70))[2] == "WRITE of 160 tokens to D d running on 2 of 2 ranks"
    scene.add("p0", 80, ev.TRANSFER_DONE, P, 0, scene.at(70), scene.at(80), 0, 0, 0, 3_100_000, 4)
    assert told(scene.one(90))[2] == "WRITE of 3.1 MB to D d running on 1 of 2 ranks"
    scene.add("p1", 91, ev.TRANSFER_DONE, P, 1, scene.at(70), scene.at(91), 0, 0, 0, 3_100_000, 4)
    assert told(scene.one(92)) == ("readiness.signal", 91, "notification 1 of 2 from P p")
    scene.add("d0", 93, ev.NOTIFICATION_RECEIVED, D, 1)
    assert told(scene.one(94)) == ("readiness.signal", 91, "notification 2 of 2 from P p")


def push_with_legs_joined() -> Scene:
    """By the transfer id that the router set: both legs are one request from the start."""
    scene = Scene("push")
    for engine, request, flags in (("p", P, ev.FLAG_REMOTE_DECODE), ("d", D, ev.FLAG_REMOTE_PREFILL)):
        peer = ("p", "unknown to P") if engine == "d" else ("", "")
        scene.add(engine, 0, ev.REQUEST_ARRIVED, request, scene.at(0), flags, 160, *peer, 160, "transfer")
    scene.add("p", 1, ev.REQUEST_CONSIDERED, P, 0, 0, 0)
    scene.add("p", 2, ev.REQUEST_SCHEDULED, P, 10, 0, 1, 0, 0)
    return scene


def test_d_that_is_ready_waits_for_prefill_and_p_that_is_done_for_the_registration() -> None:
    scene = push_with_legs_joined()
    scene.add("d", 1, ev.REQUEST_CONSIDERED, D, 0, 160, 1)
    assert told(scene.one(3)) == ("prefill.compute", 2, "")
    scene.add("d", 4, ev.BLOCKS_ALLOCATED, D, 10, 160, 1)
    assert told(scene.one(5)) == ("prefill.compute", 2, "P p to finish prefill")
    scene.finish_prefill(50)
    step, since, waits = told(scene.one(60))
    assert (step, since) == ("registration.notify", 4)
    assert waits == "D d to send its registration; lease ends in 29 s"
    scene.add("d0", 5, ev.REGISTRATION_SENT, D, "p")
    assert told(scene.one(60))[2] == "registration of D d to reach P p; lease ends in 29 s"
    scene.add("p0", 70, ev.REGISTRATION_RECEIVED, D, "d")
    assert told(scene.one(71)) == ("transfer.dispatch", 70, "P p to start the WRITE")


def test_p_that_is_done_waits_in_d_s_queue_not_in_a_step_nobody_knows() -> None:
    scene = push_with_legs_joined()
    scene.finish_prefill(50)
    assert told(scene.one(60)) == ("registration.admit", 0, "its turn in the queue of D d")


def test_a_handshake_says_with_whom_how_long_and_behind_whom() -> None:
    scene = Scene("pull")
    scene.prefill()
    scene.admit(60)
    scene.add("d0", 70, ev.LOAD_STARTED, D, "p", P, 10)
    scene.add("d0", 70, ev.HANDSHAKE_STARTED, "", "other")
    scene.add("d0", 71, ev.HANDSHAKE_WAITED, D, "p")
    assert told(scene.one(500)) == (
        "registration.handshake",
        71,
        "handshake with P p, behind that with other",
    )
    scene.add("d0", 12_000, ev.HANDSHAKE_FINISHED, "", "other", scene.at(70), 1, 0, 0)
    scene.add("d0", 12_001, ev.HANDSHAKE_STARTED, "", "p")
    assert told(scene.one(12_100))[2] == "handshake with P p, 12 s"
    # The end of a handshake is told of no request, and changes this one's step all the same.
    scene.add("d0", 13_000, ev.HANDSHAKE_FINISHED, "", "p", scene.at(12_001), 1, 0, 0)
    assert told(scene.one(13_100)) == ("transfer.dispatch", 13_000, "D d to start the READ")


def test_blocks_held_for_nobody_are_seen_though_the_client_has_its_answer() -> None:
    scene = Scene("push")
    scene.prefill()
    scene.admit(60)
    scene.add("p0", 70, ev.PUSH_MATCHED, P, "d", D)
    scene.add("p0", 71, ev.TRANSFER_POSTED, P, 1, 1, scene.at(70), 0, "d")
    scene.add("d", 500, ev.REQUEST_FINISHED, D, "FINISHED_ABORTED", 160, 0, 0, 0, 0, 0, 0, 0)
    live = scene.one(1000)
    assert (live.row[COLUMNS.index("outcome")], live.step, live.in_flight) == ("aborted", None, True)
    assert live.waits_for == "WRITE to D d, which did not finish; lease ends in 29 s"
    scene.add("p0", 31_000, ev.LEASE_EXPIRED, P, 0)
    assert scene.one(31_100).waits_for == "WRITE to D d, which did not finish; lease over"
    scene.add("p", 31_200, ev.SEND_REPORTED, P)
    assert not scene.one(31_300).in_flight


def test_a_request_is_looked_at_again_only_when_something_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene("pull")
    scene.prefill()
    made = []
    make = Pipeline._request_row
    monkeypatch.setattr(Pipeline, "_request_row", lambda self, one: made.append(1) or make(self, one))
    first = scene.one(100)
    assert scene.one(101) is first
    assert scene.one(102) is first
    later = scene.one(5_100)
    assert (later.row, later.waits_for) == (first.row, "D to fetch; lease ends in 24 s"), (
        "only the words are new"
    )
    assert len(made) == 1
    scene.admit(60)
    assert scene.one(5_200).row != first.row
    assert len(made) == 2
    scene.one(5_200 + LIVE_ROW_NS / MS + 1)
    assert len(made) == 3, "what is known of clocks and rates changes too"


def test_what_a_hostile_ring_claims_is_cut_and_made_printable() -> None:
    scene = Scene("pull")
    scene.arrive("d", 0, D, ev.FLAG_REMOTE_PREFILL, "x\x1b[2J" + "y" * 300, P)
    scene.add("d", 1, ev.REQUEST_CONSIDERED, D, 0, 160, 1)
    scene.add("d", 2, ev.BLOCKS_ALLOCATED, D, 10, 160, 1)
    scene.add("d0", 3, ev.LOAD_STARTED, D, "x", P, 10)
    scene.add("d0", 4, ev.TRANSFER_POSTED, D, 1, 0, scene.at(3), 0, "x")
    waits = scene.one(5).waits_for
    assert waits.isprintable()
    assert len(waits) < 150


# --- KV blocks and the engines' own samples ------------------------------------------------------


def blocks(scene: Scene, engine: str) -> dict[str, float]:
    scene.feed()
    found = [sample for sample in scene.pipeline.kv_blocks(7) if sample.engine == engine]
    assert {(s.at_ns, s.host, s.source, s.rank, s.label) for s in found} <= {(7, "h", "", 0, "")}
    return {sample.name.removeprefix("kv_blocks."): sample.value for sample in found}


def test_kv_blocks_are_counted_by_what_they_are_used_for() -> None:
    scene = Scene("pull")
    none = {"running": 0, "staging": 0, "kept": 0, "total": 100}
    assert blocks(scene, "p") == none
    scene.arrive("p", 0, P, ev.FLAG_REMOTE_DECODE)
    scene.add("p", 2, ev.REQUEST_SCHEDULED, P, 10, 0, 1, 0, 0)
    assert blocks(scene, "p") == {**none, "running": 10}
    scene.add("p", 3, ev.REQUEST_PREEMPTED, P)
    assert blocks(scene, "p") == none
    scene.add("p", 4, ev.REQUEST_SCHEDULED, P, 8, 0, 1, 1, 0)
    assert blocks(scene, "p") == {**none, "running": 8}
    scene.finish_prefill(50)
    assert blocks(scene, "p") == {**none, "kept": 10}
    scene.admit(60)
    assert blocks(scene, "d") == {**none, "staging": 10}
    scene.add("d", 70, ev.LOAD_REPORTED, D, 0)
    assert blocks(scene, "d") == {**none, "staging": 10}, (
        "loaded and not in a batch: they compute nothing yet"
    )
    scene.add("p", 71, ev.SEND_REPORTED, P)
    scene.add("d", 80, ev.REQUEST_SCHEDULED, D, 11, 159, 1, 0, 0)
    assert blocks(scene, "p") == none
    assert blocks(scene, "d") == {**none, "running": 11}


def test_blocks_that_d_keeps_for_the_next_turn_outlive_their_request() -> None:
    scene = Scene("bidirectional")
    scene.arrive("d", 0, D, 0)
    scene.add("d", 1, ev.REQUEST_SCHEDULED, D, 5, 0, 1, 0, 0)
    scene.add("d", 2, ev.REQUEST_FINISHED, D, "FINISHED_STOPPED", 160, 1, 160, 0, 0, 0, 1, 6)
    scene.add("d0", 3, ev.LEASE_ARMED, D, scene.at(480_000))
    scene.feed()
    assert len(scene.pipeline.take_rows(scene.at(0))["requests"]) == 1
    assert blocks(scene, "d")["kept"] == 6
    scene.add("d", 9, ev.SEND_REPORTED, D)
    assert blocks(scene, "d")["kept"] == 0


def test_an_engine_that_is_gone_holds_no_blocks() -> None:
    scene = Scene("pull")
    scene.prefill()
    assert blocks(scene, "p")["kept"] == 10
    scene.pipeline.ring_gone(scene.rings["p"][1], 0)
    assert blocks(scene, "p") == {}
    assert blocks(scene, "d")["kept"] == 0


def test_an_engine_that_is_gone_takes_with_it_what_it_computed_and_what_was_to_be_read() -> None:
    scene = Scene("pull")
    scene.prefill()
    scene.arrive("p", 20, "cmpl-s-0-aaaaaaaa", ev.FLAG_REMOTE_DECODE)
    scene.feed()
    assert scene.pipeline.ring_gone(scene.rings["p0"][1], 0) == 0, "its worker tells of no request"
    assert scene.pipeline.ring_gone(scene.rings["p"][1], 0) == 2
    assert scene.pipeline.ring_gone(scene.rings["d"][1], 0) == 0


def test_an_engine_that_is_gone_takes_no_request_with_it_that_was_read() -> None:
    scene = Scene("pull")
    scene.prefill()
    scene.arrive("d", 15, D, ev.FLAG_REMOTE_PREFILL, "p", P)
    scene.add("d", 30, ev.LOAD_REPORTED, D, 0)
    scene.feed()
    assert scene.pipeline.ring_gone(scene.rings["p"][1], 0) == 0
    assert scene.pipeline.ring_gone(scene.rings["d"][1], 0) == 1


def samples(scene: Scene) -> dict[str, float]:
    scene.feed()
    return {sample.name: sample.value for sample in scene.pipeline.take_samples()}


def test_an_engine_s_own_samples_are_handed_out_with_their_ring_s_time() -> None:
    scene = Scene("pull")
    scene.add("d0", 500, ev.ENGINE_SAMPLE, "", 10, UNKNOWN, 5 * MS, S)
    scene.feed()
    found = scene.pipeline.take_samples()
    assert {(s.at_ns, s.host, s.engine, s.source, s.rank) for s in found} == {
        (WALL_NS + 500 * MS, "h", "d", "worker", 0)
    }
    assert {s.name: s.value for s in found} == {
        "engine.hook_share": 0.005,
        "engine.steps_per_s": 10.0,
        "engine.step_ns": 100 * MS,
    }
    assert scene.pipeline.take_samples() == []
    scene.add("d", 501, ev.ENGINE_SAMPLE, "", 10, 500, 0, S)
    assert samples(scene)["engine.step_tokens"] == 50


@pytest.mark.parametrize(
    "claimed",
    [(10, 0, 0, 0), (10, 0, 0, -S), (10, 0, 2 * S, S), (10, 0, -1, S)],
    ids=["no time", "negative time", "more time in hooks than there was", "negative time in hooks"],
)
def test_an_absurd_sample_is_left_out(claimed: tuple[int, ...]) -> None:
    scene = Scene("pull")
    scene.add("d", 1, ev.ENGINE_SAMPLE, "", *claimed)
    assert samples(scene) == {}


def test_a_pause_is_no_slow_step() -> None:
    scene = Scene("pull")
    scene.add("d", 1, ev.ENGINE_SAMPLE, "", 1, 16, MS, 60 * S)
    assert set(samples(scene)) == {"engine.hook_share"}
    scene.add("d", 2, ev.ENGINE_SAMPLE, "", 0, 0, MS, S)
    assert set(samples(scene)) == {"engine.hook_share"}
    scene.add("d", 2, ev.ENGINE_SAMPLE, "", 1 << 62, 0, MS, S)
    assert set(samples(scene)) == {"engine.hook_share"}
