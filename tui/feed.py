"""The threads that fetch: frames of now or of the past, answers to questions, one request's detail.

They never touch the screen: what they got lies in a `Mailbox`, the newest of each kind, until the application
takes it. A slow screen makes no queue, and a daemon that hangs hangs a thread, never the program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from kvscope.client import NoDaemon, OtherVersion
from kvscope.errors import KvscopeError, UsageError
from kvscope.frame import Answer, Frame, Scope
from kvscope.lookup import NotFound
from kvscope.query import questions
from kvscope.text import duration_ns, printable
from kvscope.tui.view import Detail, State, Trouble, figures_at_ns, merged

BACK_OFF_S = (0.5, 1.0, 2.0, 5.0)
"""Between attempts to reach a daemon that is gone; the last one repeats."""
SETTLE_S = 0.05
"""Of several changes of scope in a row only the last is asked for."""
QUESTION_ROWS = 1000
CLOSE_S = 0.5
"""How long leaving waits for the threads; one that hangs is left behind."""

Parameters = Mapping[str, Any]


class Source(Protocol):
    """What frames come from: a daemon or a store file."""

    def frame(self, scope: Scope) -> Frame: ...
    def query(self, name: str, sql: str, parameters: Any) -> dict[str, Any]: ...
    def request(self, text: str) -> dict[str, Any]: ...
    def close(self) -> None: ...


class StreamSource(Source, Protocol):
    """A daemon."""

    def stream(self, scope: Scope, refresh_s: float) -> Iterator[Frame]: ...
    def end_streams(self) -> None: ...


class Mail(msgspec.Struct):
    """What came since the mailbox was emptied."""

    generation: int = 0
    frame: Frame | None = None
    came: bool = False
    """A frame came after any trouble; in a pause it is held back."""
    answers: dict[str, tuple[Answer | str, int]] = {}
    """By question, with the end of its window; a text is why it could not be answered."""
    detail: Detail | None = None
    trouble: Trouble | None = None
    notice: str = ""
    """One line for the user."""
    ended: bool = False
    """The past that was played has ended."""


class Mailbox:
    """The newest of each kind, from all threads; `bell` is called when there is something to take.

    What belongs to an earlier scope is thrown away: whoever puts something in says of which generation.
    """

    def __init__(self, bell: Callable[[], None]) -> None:
        self._bell = bell
        self._lock = threading.Lock()
        self._mail = Mail()
        self._rung = False
        self._generation = 0

    def renew(self) -> int:
        """Begin another generation: nothing of the ones before is delivered any more."""
        with self._lock:
            self._generation += 1
            self._mail = Mail()
            return self._generation

    def put(
        self,
        generation: int,
        *,
        frame: Frame | None = None,
        answers: Mapping[str, tuple[Answer | str, int]] | None = None,
        detail: Detail | None = None,
        trouble: Trouble | None = None,
        notice: str = "",
        ended: bool = False,
    ) -> None:
        with self._lock:
            if generation != self._generation:
                return
            mail = self._mail
            if frame is not None:
                mail.frame = merged(mail.frame, frame) if mail.frame is not None else frame
                mail.trouble = None
                mail.came = True
            mail.answers.update(answers or {})
            mail.detail = detail or mail.detail
            if trouble is not None:
                mail.trouble, mail.came = trouble, False
            mail.notice = notice or mail.notice
            mail.ended = ended or mail.ended
            ring, self._rung = not self._rung, True
        if ring:
            self._bell()

    def take(self, frames: bool = True, detail: bool = True) -> Mail:
        """Empty it; without `frames` those stay, and newer ones are added to them; `detail` likewise."""
        with self._lock:
            mail, self._mail = self._mail, Mail()
            mail.generation = self._generation
            if not frames:
                self._mail.frame, mail.frame = mail.frame, None
            if not detail:
                self._mail.detail, mail.detail = mail.detail, None
            self._rung = False
            return mail


class Asker:
    """One thread that asks what frames do not hold, for the window of the frame that is shown.

    Each question is asked again with every frame that has new figures, but never more than a fifth of the
    time.
    """

    def __init__(self, source: Source, box: Mailbox, clock: Callable[[], float] = time.monotonic) -> None:
        self._source = source
        self._box = box
        self._clock = clock
        self._changed = threading.Condition()
        self._of: tuple[int, Frame] | None = None
        self._questions: tuple[str, ...] = ()
        self._detail = ""
        self._work = 0
        """Grows with every frame and every wish."""
        self._urgent = 0
        """Grows with what need not wait."""
        self._stopped = False
        self._settled: tuple[str, int] | None = None
        """Detail of a request that is over, and the generation: it will not change."""
        self._thread = threading.Thread(target=self._run, name="kvscope-asker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> bool:
        """Stop; False if it is still busy."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def frame(self, generation: int, frame: Frame, at_once: bool = False) -> None:
        """A frame is shown: ask for its window; `at_once` where the user has chosen its time."""
        with self._changed:
            # Of the frame only the window is needed; its requests would keep memory.
            bare = msgspec.structs.replace(frame, in_flight=[], recent=[], gone=[], samples=[], engines=[])
            self._of = (generation, bare)
            self._work += 1
            self._urgent += at_once
            self._changed.notify_all()

    def want(self, questions: Sequence[str], detail: str | None) -> None:
        """From now on answer these, and this request's detail."""
        with self._changed:
            wishes = (tuple(questions), detail or "")
            if wishes != (self._questions, self._detail):
                self._questions, self._detail = wishes
                self._settled = None
                self._work += 1
                self._urgent += 1
                self._changed.notify_all()

    def _run(self) -> None:
        done = 0
        asked: tuple[int, int, tuple[str, ...]] | None = None
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._work != done)  # noqa: B023
                if self._stopped:
                    return
                done, urgent = self._work, self._urgent
                of, questions, detail = self._of, self._questions, self._detail
            began = self._clock()
            if of is not None:
                window = (of[0], figures_at_ns(of[1]), questions)
                for name in questions if window != asked else ():
                    self._box.put(of[0], answers={name: (self._answer(name, of[1]), window[1])})
                asked = window
            if detail and of is not None and self._settled != (detail, of[0]):
                self._box.put(of[0], detail=self._look_up(detail, of[0]))
            pause = 4 * (self._clock() - began)
            with self._changed:
                # What the user wishes need not wait, a new frame must.
                self._changed.wait_for(
                    lambda: self._stopped or self._urgent != urgent,  # noqa: B023
                    timeout=min(pause, 60.0),
                )

    def _answer(self, name: str, frame: Frame) -> Answer | str:
        try:
            found = self._source.query(name, "", question_parameters(name, frame))
            return Answer([str(column["name"]) for column in found["columns"]], found["rows"])
        except KvscopeError as error:
            return str(error)
        except Exception as error:  # whatever a foreign daemon answered must not end the thread
            return unexpected(error)

    def _look_up(self, text: str, generation: int) -> Detail:
        try:
            found = self._source.request(text)
            if not found["request"]["in_flight"]:
                self._settled = (text, generation)
            return Detail(text, found)
        except KvscopeError as error:
            return Detail(text, None, str(error))
        except Exception as error:
            return Detail(text, None, unexpected(error))


class LiveFeed:
    """Reads a daemon's stream of frames, and again when that breaks.

    Each scope has a thread of its own; the streams of earlier ones are ended.
    """

    def __init__(
        self,
        source: StreamSource,
        box: Mailbox,
        refresh_s: float,
        back_off_s: Sequence[float] = BACK_OFF_S,
    ) -> None:
        self._source = source
        self._box = box
        self._refresh_s = refresh_s
        self._back_off_s = back_off_s
        self._stop: threading.Event | None = None
        self._thread: threading.Thread | None = None

    @property
    def running(self) -> bool:
        return self._stop is not None

    def start(self, scope: Scope) -> None:
        """Frames of this scope from now on."""
        self.stop()
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(scope, self._box.renew(), self._stop), name="kvscope-live", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """No more frames."""
        if self._stop is not None:
            self._stop.set()
            self._source.end_streams()
        self._stop = None

    def close(self) -> bool:
        """Stop; False if it is still busy."""
        self.stop()
        if self._thread is not None:
            self._thread.join(CLOSE_S)
        return self._thread is None or not self._thread.is_alive()

    def _run(self, scope: Scope, generation: int, stop: threading.Event) -> None:
        attempt = 0
        if stop.wait(SETTLE_S):
            return
        while not stop.is_set():
            try:
                came = False
                for frame in self._source.stream(scope, self._refresh_s):
                    if stop.is_set():
                        return  # and the stream is closed with its generator
                    came, attempt = True, 0
                    self._box.put(generation, frame=frame)
                if not came:
                    raise KvscopeError("the daemon ended the stream before its first frame; see its log")
            except Exception as error:
                if stop.is_set():
                    return
                self._box.put(generation, trouble=trouble_of(error))
            if stop.wait(self._back_off_s[min(attempt, len(self._back_off_s) - 1)]):
                return
            attempt += 1


class HistoryFeed:
    """Frames of chosen moments: one thread that fetches the moment chosen last, or plays on from there.

    Args:
        present: Unix nanoseconds of now, where the source's data goes on; None where it has an end.
    """

    def __init__(
        self,
        source: Source,
        box: Mailbox,
        refresh_s: float,
        *,
        present: Callable[[], int] | None = None,
        clock: Callable[[], float] = time.monotonic,
        back_off_s: Sequence[float] = BACK_OFF_S,
    ) -> None:
        self._source = source
        self._box = box
        self._refresh_s = refresh_s
        self._present = present
        self._clock = clock
        self._back_off_s = back_off_s
        self._changed = threading.Condition()
        self._scope = Scope()
        self._at_ns: int | None = None
        self._generation = 0
        self._asked = 0
        """Grows with every wish."""
        self._worst = False
        self._begin = False
        self._playing = False
        self._speed = 1.0
        self._moved: float | None = None
        """When playing last moved on; the time that fetching takes counts."""
        self._extent: tuple[int, int] | None = None
        self._active = False
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="kvscope-history", daemon=True)

    def close(self) -> bool:
        """Stop; False if it is still busy."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    @property
    def at_ns(self) -> int | None:
        """The moment chosen: where the window ends. None until it is known."""
        return self._at_ns

    @property
    def extent(self) -> tuple[int, int] | None:
        """First arrival and last moment of the data; None until they are known, or where there is none."""
        return self._extent

    def show(self, scope: Scope, at_ns: int | None = None, begin: bool = False) -> None:
        """Show the window of `scope` that ends at `at_ns`; else where `scope.at` says, else the last one (or
        the first: `begin`)."""
        with self._changed:
            self._scope = scope
            self._begin = begin
            self._at_ns = at_ns
            self._active = True
            self._generation = self._box.renew()
            self._wish()

    def go(self, at_ns: int) -> None:
        """Choose another moment, within the data."""
        with self._changed:
            self._at_ns = self._within(at_ns)
            self._moved = None
            self._wish()

    def step(self, by_ns: int) -> None:
        """Choose one so much later (or earlier)."""
        if self._at_ns is not None:
            self.go(self._at_ns + by_ns)

    def play(self, playing: bool, speed: float) -> None:
        """Move on by itself, `speed` seconds in one, or stop doing so."""
        with self._changed:
            self._playing, self._speed = playing, speed
            self._moved = None
            self._changed.notify_all()

    def worst(self) -> None:
        """Choose the window around the slowest moment there is."""
        with self._changed:
            self._worst = True
            self._wish()

    def leave(self) -> None:
        """Fetch nothing until `show` is called again."""
        with self._changed:
            self._active = self._playing = self._worst = False

    def _wish(self) -> None:
        self._asked += 1
        if self._thread.ident is None:
            self._thread.start()
        self._changed.notify_all()

    def _within(self, at_ns: int) -> int:
        first, last = self._extent or (0, at_ns)
        if self._present is not None:
            last = self._present()
        return max(first + 1, min(at_ns, last))

    def _run(self) -> None:
        done = 0
        attempt = 0
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._stopped or self._asked != done or self._playing)  # noqa: B023
                if self._stopped:
                    return
                if self._asked == done:
                    self._wait_and_move(done)
                    if self._stopped or not (self._active and (self._playing or self._asked != done)):
                        continue
                done = self._asked
                if not self._active:
                    continue
                generation, scope, at_ns, worst = self._generation, self._scope, self._at_ns, self._worst
                self._worst = False
            try:
                self._fetch(generation, scope, at_ns, worst)
                attempt = 0
            except Exception as error:
                self._box.put(generation, trouble=trouble_of(error))
                with self._changed:
                    pause = self._back_off_s[min(attempt, len(self._back_off_s) - 1)]
                    attempt += 1
                    self._changed.wait_for(lambda: self._stopped or self._asked != done, timeout=pause)  # noqa: B023
                    if not isinstance(error, UsageError):
                        done = -1  # the same once more

    def _wait_and_move(self, done: int) -> None:
        """Play: wait for the next frame's time, and move the moment by what has passed."""
        began = self._clock() if self._moved is None else self._moved
        self._changed.wait_for(
            lambda: self._stopped or not self._playing or self._asked != done,
            timeout=max(0.01, self._refresh_s - (self._clock() - began)),
        )
        if not self._playing or self._asked != done or self._at_ns is None:
            return
        self._moved = self._clock()
        wanted = self._at_ns + round((self._moved - began) * self._speed * 1e9)
        self._at_ns = self._within(wanted)
        if self._at_ns < wanted:
            self._playing = False
            self._asked += 1  # its last window
            self._box.put(self._generation, ended=True)

    def _fetch(self, generation: int, scope: Scope, at_ns: int | None, worst: bool) -> None:
        if self._extent is None:
            self._extent = self._ask_extent()
        if worst:
            at_ns = self._find_worst(generation, scope) or at_ns
        if at_ns is None and self._begin and self._extent:
            at_ns = self._within(self._extent[0] + duration_ns(scope.window) // 10)
        if at_ns is not None:
            scope = msgspec.structs.replace(scope, at=str(at_ns))
        frame = self._source.frame(scope)
        with self._changed:
            if self._extent and not scope.at:  # the source's own idea of its end
                self._extent = (self._extent[0], max(self._extent[1], frame.at_ns))
            if generation == self._generation and (self._at_ns is None or worst):
                self._at_ns = frame.at_ns
        self._box.put(generation, frame=frame)

    def _ask_extent(self) -> tuple[int, int] | None:
        last = "max(arrived_at_ns + coalesce(ttft_ns, 0) + coalesce(decode_generate_ns, 0)) + 1"
        found = self._source.query("", f"SELECT min(arrived_at_ns), {last} FROM requests", {})
        first, end = found["rows"][0]
        return None if first is None or end is None else (int(first), int(end))

    def _find_worst(self, generation: int, scope: Scope) -> int | None:
        """End of the window in whose middle p99 is greatest, closer and closer."""
        if self._extent is None:
            self._box.put(generation, notice="there are no requests in the data")
            return None
        since, until = self._extent[0], self._within(2**63 - 1)
        window_ns = duration_ns(scope.window)
        for _ in range(4):  # 60 buckets each time: from a year to seconds
            asked: dict[str, Any] = {"since": str(since), "until": str(until), "where": list(scope.where)}
            if scope.label is not None:
                asked["label"] = scope.label
            answer = self._source.query("fleet_trend", "", asked)
            names = [column["name"] for column in answer["columns"]]
            rows = [dict(zip(names, row, strict=True)) for row in answer["rows"]]
            known = [row for row in rows if row["p99_ttft_ms"] is not None]
            if not known:
                self._box.put(generation, notice="no request with a first token fits the filter")
                return None
            start = int(max(known, key=lambda row: row["p99_ttft_ms"])["at_ns"])
            widest = max(10**9, 2 * (until - since) // 60)
            end = min([row["at_ns"] for row in rows if row["at_ns"] > start] + [until, start + widest])
            since, until = start, end
            if end - start <= window_ns:
                break
        middle = (since + until) // 2
        return self._within(max(since + 1, middle + window_ns // 2))


def question_parameters(name: str, frame: Frame) -> dict[str, Any]:
    """Those that the question takes, for the window of the figures of `frame`."""
    question = questions().get(name)
    takes = question.parameters if question else ()
    values = {
        "since": str(figures_at_ns(frame) - frame.window_ns),
        "until": str(figures_at_ns(frame)),
        "label": frame.label,
        "where": list(frame.where),
        "limit": QUESTION_ROWS,
    }
    return {parameter: value for parameter, value in values.items() if parameter in takes}


def trouble_of(error: Exception) -> Trouble:
    """What to tell the user about it."""
    if isinstance(error, NoDaemon):
        return Trouble(State.LOST, str(error))
    if isinstance(error, OtherVersion):
        return Trouble(State.OLD, str(error))
    if isinstance(error, (NotFound, msgspec.MsgspecError)):
        return Trouble(
            State.OLD,
            "the daemon's live view is not one that this kvscope understands; "
            "use the same kvscope version here and there",
        )
    if isinstance(error, KvscopeError):
        return Trouble(State.FAILED, str(error))
    return Trouble(State.FAILED, unexpected(error))


def unexpected(error: Exception) -> str:
    return f"unexpected: {type(error).__name__}: {printable(error)[:200]}"
