"""The feeds: what is delivered, what is asked again, and that no failure of the other side ends them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import msgspec
import pytest

from kvscope.client import NoDaemon
from kvscope.errors import KvscopeError, UsageError
from kvscope.frame import Answer, Scope
from kvscope.lookup import NotFound
from kvscope.tui.feed import Asker, HistoryFeed, LiveFeed, Mailbox, question_parameters
from kvscope.tui.view import Detail, State, Trouble

from . import frames
from .fakes import FakeSource
from .frames import MS, NOW, WINDOW, S


class Bench:
    """Feeds on a fake source; mail is taken when the bell rings."""

    def __init__(self, source: FakeSource, *, live: bool = False) -> None:
        self.source = source
        self.bell = threading.Event()
        self.box = Mailbox(self.bell.set)
        self.asker = Asker(source, self.box)
        self.asker.start()
        self.live = LiveFeed(source, self.box, 0.01, back_off_s=(0.001,))
        self.past = HistoryFeed(
            source, self.box, 0.01, present=(lambda: NOW) if live else None, back_off_s=(0.001,)
        )
        self.frames: list[object] = []
        self.answers: dict[str, Answer | str] = {}
        self.until_ns: dict[str, int] = {}
        self.details: list[object] = []
        self.troubles: list[object] = []
        self.notices: list[str] = []
        self.ended = False

    def take(self) -> None:
        mail = self.box.take()
        if mail.frame:
            self.frames.append(mail.frame)
            self.asker.frame(mail.generation, mail.frame)
        self.answers.update((name, answer) for name, (answer, _) in mail.answers.items())
        self.until_ns.update((name, until_ns) for name, (_, until_ns) in mail.answers.items())
        self.details += [mail.detail] if mail.detail else []
        self.troubles += [mail.trouble] if mail.trouble else []
        self.notices += [mail.notice] if mail.notice else []
        self.ended = self.ended or mail.ended

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, f"frames {len(self.frames)}, troubles {self.troubles}"
            self.bell.wait(0.05)
            self.bell.clear()
            self.take()

    def close(self) -> None:
        self.source.close()
        self.live.close()
        self.past.close()
        self.asker.close()


@pytest.fixture
def bench() -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*sent: object, source: FakeSource | None = None, live: bool = False) -> Bench:
        made.append(Bench(source or FakeSource(*sent), live=live))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for one in made:
        one.close()


Make = Callable[..., Bench]

# --- the mailbox -------------------------------------------------------------------------------------


def test_frames_that_were_not_taken_become_one() -> None:
    rings: list[int] = []
    box = Mailbox(lambda: rings.append(1))
    generation = box.renew()
    box.put(generation, frame=frames.frame(in_flight=[frames.in_flight(1)], recent=[]))
    box.put(generation, frame=frames.frame(whole=False, in_flight=[], gone=["1"], recent=[frames.request(1)]))
    assert rings == [1], "one message is on its way already"
    mail = box.take()
    assert mail.frame is not None
    assert [row.id for row in mail.frame.recent] == ["1"]
    assert mail.frame.in_flight == []
    assert box.take().frame is None
    box.put(generation, frame=frames.frame())
    assert rings == [1, 1]


def test_mail_of_another_scope_is_thrown_away() -> None:
    box = Mailbox(lambda: None)
    old = box.renew()
    box.put(old, frame=frames.frame(), notice="old")
    new = box.renew()
    box.put(old, frame=frames.frame())
    assert box.take().frame is None
    box.put(new, frame=frames.frame())
    assert box.take().frame is not None


def test_in_a_pause_frames_wait_and_the_rest_is_delivered() -> None:
    box = Mailbox(lambda: None)
    generation = box.renew()
    detail = Detail("7", None)
    box.put(generation, frame=frames.frame(), answers={"pairs": ("too slow", NOW)}, detail=detail)
    mail = box.take(frames=False, detail=False)
    assert (mail.frame, mail.detail, mail.answers) == (None, None, {"pairs": ("too slow", NOW)})
    assert (mail.came, box.take(frames=False, detail=False).came) == (True, False)
    mail = box.take()
    assert mail.frame is not None
    assert mail.detail is detail


def test_a_frame_after_trouble_ends_it_and_trouble_after_a_frame_stays() -> None:
    box = Mailbox(lambda: None)
    generation = box.renew()
    trouble = Trouble(State.LOST, "no daemon")
    box.put(generation, trouble=trouble)
    box.put(generation, frame=frames.frame())
    mail = box.take(frames=False)
    assert (mail.trouble, mail.came) == (None, True)
    box.put(generation, frame=frames.frame())
    box.put(generation, trouble=trouble)
    mail = box.take(frames=False)
    assert (mail.trouble, mail.came) == (trouble, False)


# --- live --------------------------------------------------------------------------------------------


def test_frames_of_a_stream_arrive(bench: Make) -> None:
    one = bench(frames.frame(), frames.frame(whole=False, at_ns=NOW + S))
    one.live.start(Scope(window="1m", where=("connector=push",)))
    one.until(lambda: one.frames and one.frames[-1].at_ns == NOW + S)  # type: ignore[attr-defined]
    assert one.source.scopes == [Scope(window="1m", where=("connector=push",))]


@pytest.mark.parametrize(
    ("error", "state", "words"),
    [
        (NoDaemon("no kvscope daemon at http://x; start one"), State.LOST, "start one"),
        (NotFound("no such page; the API is under /api/v1/"), State.OLD, "same kvscope version"),
        (msgspec.ValidationError("Expected `int`, got `str`"), State.OLD, "same kvscope version"),
        (KvscopeError("the query was stopped after 10.0 s"), State.FAILED, "stopped after"),
        (ValueError("odd \x1b[2J"), State.FAILED, "unexpected: ValueError: odd \ufffd[2J"),
    ],
)
def test_a_stream_that_breaks_is_told_and_opened_again(
    bench: Make, error: Exception, state: State, words: str
) -> None:
    one = bench(frames.frame(), error)
    one.live.start(Scope())
    one.until(lambda: one.troubles)
    assert one.troubles[-1].state is state  # type: ignore[attr-defined]
    assert words in one.troubles[-1].text  # type: ignore[attr-defined]
    one.source.send(frames.frame(at_ns=NOW + 9 * S))
    one.until(lambda: one.frames[-1].at_ns == NOW + 9 * S)  # type: ignore[attr-defined]


def test_a_daemon_that_answers_nothing_is_not_asked_without_pause() -> None:
    waits: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0)
            return len(waits) > 6

    source = FakeSource(*[NoDaemon("no daemon")] * 10)
    feed = LiveFeed(source, Mailbox(lambda: None), 1.0)
    feed._run(Scope(), 0, Stop())
    assert waits[1:] == [0.5, 1.0, 2.0, 5.0, 5.0, 5.0]


def test_another_scope_ends_the_stream_before(bench: Make) -> None:
    one = bench(frames.frame())
    one.live.start(Scope())
    one.until(lambda: one.frames)
    one.live.start(Scope(window="1h"))
    one.until(lambda: len(one.source.scopes) == 2)
    one.source.send(frames.frame(window_ns=3600 * S))
    one.until(lambda: one.frames[-1].window_ns == 3600 * S)  # type: ignore[attr-defined]
    assert [scope.window for scope in one.source.scopes] == ["5m", "1h"]
    assert one.source.streams_ended == 1, "it need not wait for its next frame"


def test_of_many_changes_at_once_only_the_last_is_asked_for(bench: Make) -> None:
    one = bench(frames.frame())
    for window in ("1m", "2m", "5m", "10m"):
        one.live.start(Scope(window=window))
    one.until(lambda: one.frames)
    assert [scope.window for scope in one.source.scopes] == ["10m"]


def test_a_daemon_that_hangs_does_not_keep_the_program(bench: Make) -> None:
    release = threading.Event()

    class Hanging(FakeSource):
        def stream(self, scope: Scope, refresh_s: float) -> Iterator[object]:  # type: ignore[override]
            self.scopes.append(scope)
            release.wait(20)
            yield frames.frame()

    one = bench(source=Hanging())
    one.live.start(Scope())
    one.until(lambda: one.source.scopes)
    began = time.monotonic()
    assert one.live.close() is False
    assert time.monotonic() - began < 2
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("kvscope-"))
    release.set()


# --- questions -----------------------------------------------------------------------------------------


def test_questions_are_asked_for_the_window_of_the_frame(bench: Make) -> None:
    one = bench(frames.frame(where=["connector=push"], label="bench"))
    one.asker.want(("ttft",), None)
    one.live.start(Scope())
    one.until(lambda: "ttft" in one.answers)
    name, _, parameters = one.source.asked[-1]
    assert name == "ttft"
    assert parameters["since"] == str(NOW - WINDOW)
    assert parameters["until"] == str(NOW)
    assert parameters["where"] == ["connector=push"]
    assert parameters["label"] == "bench"
    assert one.until_ns["ttft"] == NOW


def test_after_a_slow_answer_a_new_frame_waits_but_not_where_the_user_chose_its_time() -> None:
    now = 0.0

    class Slow(FakeSource):
        def query(self, name: str, sql: str, parameters: dict) -> dict:  # type: ignore[type-arg]
            nonlocal now
            now += 15.0
            return super().query(name, sql, parameters)

    rang = threading.Event()
    box = Mailbox(rang.set)
    asker = Asker(Slow(), box, lambda: now)
    asker.want(("pairs",), None)
    asker.start()
    try:
        for moment in (NOW, NOW - 30 * S):
            asker.frame(box.renew(), frames.frame(at_ns=moment), at_once=True)
            assert rang.wait(10), "it pauses for a minute"
            rang.clear()
            assert box.take().answers["pairs"][1] == moment
        asker.frame(box.renew(), frames.frame(at_ns=NOW))
        assert not rang.wait(0.05)
    finally:
        asker.close()


def test_a_question_gets_only_the_parameters_that_it_takes() -> None:
    assert question_parameters("engines", frames.frame()) == {}
    assert "where" not in question_parameters("leases", frames.frame())


def test_a_question_that_fails_says_why_and_the_others_are_answered(bench: Make) -> None:
    one = bench(frames.frame())
    one.source.answers = {
        "outcomes": KvscopeError("the query was stopped"),
        "reuse": ValueError("odd"),
        "pairs": Answer(["p_engine"], [["prefill-0"]]),
    }
    one.asker.want(("outcomes", "reuse", "pairs"), None)
    one.live.start(Scope())
    one.until(lambda: len(one.answers) == 3)
    assert one.answers["outcomes"] == "the query was stopped"
    assert one.answers["reuse"] == "unexpected: ValueError: odd"
    assert one.answers["pairs"] == Answer(["p_engine"], [["prefill-0"]])


def test_a_new_wish_is_answered_without_a_new_frame(bench: Make) -> None:
    one = bench(frames.frame())
    one.live.start(Scope())
    one.until(lambda: one.frames)
    one.asker.want(("pairs",), None)
    one.until(lambda: "pairs" in one.answers)


def test_a_request_in_flight_is_looked_up_with_every_frame_and_one_that_is_over_once(bench: Make) -> None:
    one = bench(frames.frame())
    one.source.details["7"] = {"request": {"id": "7", "in_flight": True}}
    one.asker.want(("pairs",), "7")
    one.live.start(Scope())
    one.until(lambda: one.details)
    one.source.details["7"] = {"request": {"id": "7", "in_flight": False}}
    one.source.send(frames.frame(whole=False, at_ns=NOW + S))
    one.until(lambda: one.details[-1].answer["request"]["in_flight"] is False)  # type: ignore[attr-defined]
    asked = len(one.source.asked)
    one.source.send(frames.frame(whole=False, at_ns=NOW + 2 * S))
    one.until(lambda: len(one.source.asked) > asked)
    one.source.send(frames.frame(whole=False, at_ns=NOW + 3 * S))
    one.until(lambda: len(one.source.asked) > asked + 1)
    assert one.source.looked_up == ["7", "7"]


def test_a_question_is_asked_again_only_when_there_are_new_figures(bench: Make) -> None:
    one = bench(frames.frame(figures_at_ns=NOW - S))
    one.asker.want(("pairs",), "7")
    one.source.details["7"] = {"request": {"id": "7", "in_flight": True}}
    one.live.start(Scope())
    one.until(lambda: one.source.looked_up)
    one.source.send(frames.frame(whole=False, at_ns=NOW + S, figures_at_ns=NOW - S))
    one.until(lambda: len(one.source.looked_up) == 2)
    assert [asked[2]["until"] for asked in one.source.asked] == [str(NOW - S)]
    one.source.send(frames.frame(whole=False, at_ns=NOW + 2 * S, figures_at_ns=NOW + S))
    one.until(lambda: len(one.source.asked) == 2)


def test_a_request_that_is_not_found_says_so(bench: Make) -> None:
    one = bench(frames.frame())
    one.source.details["7"] = NotFound("no request '7'")
    one.asker.want((), "7")
    one.live.start(Scope())
    one.until(lambda: one.details)
    assert (one.details[-1].answer, one.details[-1].error) == (None, "no request '7'")  # type: ignore[attr-defined]


# --- history -------------------------------------------------------------------------------------------


def at(one: Bench) -> int:
    one.until(lambda: one.frames)
    return one.frames[-1].at_ns  # type: ignore[attr-defined,no-any-return]


def test_without_a_time_history_begins_at_the_end_of_the_data(bench: Make) -> None:
    one = bench()
    one.past.show(Scope(window="1m"))
    assert at(one) == NOW
    assert one.past.at_ns == NOW


def test_a_time_as_written_is_left_to_the_source(bench: Make) -> None:
    one = bench()
    one.past.show(Scope(at="2027-01-15T07:50:00"))
    one.until(lambda: one.frames)
    assert one.source.scopes[-1].at == "2027-01-15T07:50:00"


def test_steps_add_up_and_stay_within_the_data(bench: Make) -> None:
    one = bench()
    one.past.show(Scope())
    at(one)
    one.past.step(-30 * S)
    one.past.step(-30 * S)
    one.until(lambda: one.frames[-1].at_ns == NOW - 60 * S)  # type: ignore[attr-defined]
    one.past.step(-9999 * S)
    one.until(lambda: one.frames[-1].at_ns == one.source.extent[0] + 1)  # type: ignore[attr-defined]
    one.past.step(99999 * S)
    one.until(lambda: one.frames[-1].at_ns == NOW)  # type: ignore[attr-defined]


def test_on_a_daemon_the_past_reaches_up_to_now(bench: Make) -> None:
    one = bench(live=True)
    one.past.show(Scope(), NOW - S)
    at(one)
    one.past.step(5 * S)
    assert one.past.at_ns == NOW


def test_playing_moves_on_and_stops_at_the_end(bench: Make) -> None:
    one = bench()
    one.past.show(Scope(), NOW - 2 * S)
    at(one)
    one.past.play(True, 10.0)
    one.until(lambda: one.ended)
    one.until(lambda: one.frames[-1].at_ns == NOW)  # type: ignore[attr-defined]
    times = [frame.at_ns for frame in one.frames]  # type: ignore[attr-defined]
    assert times == sorted(times)
    assert len(times) > 2
    count = len(one.source.scopes)
    one.past.play(False, 1.0)
    assert len(one.source.scopes) == count


def test_begun_at_the_beginning_there_is_time_to_play(bench: Make) -> None:
    one = bench()
    one.past.show(Scope(), begin=True)
    assert at(one) == one.source.extent[0] + WINDOW // 10


def test_the_worst_moment_is_in_the_middle_of_the_window(bench: Make) -> None:
    class Slow(FakeSource):
        """One slow second in a day; buckets are a sixtieth of what is asked for."""

        slow = NOW - 40_000 * S

        def query(self, name: str, sql: str, parameters: dict) -> dict:  # type: ignore[type-arg]
            if name != "fleet_trend":
                return super().query(name, sql, parameters)
            self.asked.append((name, sql, dict(parameters)))
            since, until = int(parameters["since"]), int(parameters["until"])
            width = max(S, (until - since) // 60)
            rows = []
            for start in range(since, until, width):
                slow = start <= self.slow < start + width
                rows.append([start, 5, 9000.0 if slow else 100.0])
            return {"columns": [{"name": n} for n in ("at_ns", "requests", "p99_ttft_ms")], "rows": rows}

    source = Slow()
    source.extent = (NOW - 86_400 * S, NOW)
    one = bench(source=source)
    one.past.show(Scope(window="5m", where=("connector=push",), label="bench"))
    at(one)
    one.past.worst()
    one.until(lambda: len(one.frames) > 1)
    assert abs(one.frames[-1].at_ns - WINDOW // 2 - source.slow) < 30 * S  # type: ignore[attr-defined]
    assert one.past.at_ns == one.frames[-1].at_ns  # type: ignore[attr-defined]
    assert all(asked[2]["where"] == ["connector=push"] for asked in source.asked if asked[0] == "fleet_trend")
    assert all(asked[2]["label"] == "bench" for asked in source.asked if asked[0] == "fleet_trend")


def test_no_worst_moment_where_nothing_has_a_first_token(bench: Make) -> None:
    one = bench()
    one.source.answers["fleet_trend"] = Answer(["at_ns", "p99_ttft_ms"], [])
    one.past.show(Scope())
    at(one)
    one.past.worst()
    one.until(lambda: one.notices)
    assert one.notices == ["no request with a first token fits the filter"]


def test_a_failure_is_told_and_tried_again_but_not_one_of_the_user(bench: Make) -> None:
    one = bench()
    one.source.fails = NoDaemon("no daemon")
    one.past.show(Scope(), NOW - S)
    one.until(lambda: len(one.source.scopes) > 2)
    assert one.troubles[-1].state is State.LOST  # type: ignore[attr-defined]
    one.source.fails = None
    one.until(lambda: one.frames)
    one.source.fails = UsageError("at: write a duration")
    asked = len(one.source.scopes)
    for number in range(1, 31):
        one.past.step(-MS)
        one.until(lambda number=number: len(one.source.scopes) >= asked + number)
        one.bell.wait(0.002)  # time to try again, if it did
    assert len(one.source.scopes) == asked + 30
    assert one.troubles[-1].state is State.FAILED  # type: ignore[attr-defined]
    one.source.fails = None
    one.past.step(-MS)
    one.until(lambda: len(one.frames) > 1)
