"""Reads vLLM's own `/metrics` of the engines of this host: what runs and waits there, as vLLM counts it.

Servers are asked at 127.0.0.1 and the port that their engines recorded, or where the setting `vllm_metrics`
says, side by side, each within two seconds. What they answer is not trusted: it is cut at a size, and only
lines with a name that is wanted are parsed at all. Redirects are not followed, proxies not used.

An address of the setting belongs to the recorded engines with its port: those on its host where several
hosts have that port, else nobody's, and then it goes by its own `host:port`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import platform
import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from typing import NamedTuple
from urllib.parse import urlsplit

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvscope.client import Connection
from kvscope.collectors.rings import RingProcess
from kvscope.samples import Sample
from kvscope.text import printable

logger = logging.getLogger(__name__)

TIMEOUT_S = 2.0
"""For the whole answer."""
MAX_BYTES = 8 << 20
MAX_LINES = 8192
"""Of wanted lines: 64 engines behind one server have 2,000. Parsing 8,000 takes 0.2 s."""
MAX_SERVERS = 256
MAX_LABEL = 64
MAX_LINE = 4096
WORKERS = 16
ROUND_S = 2 * TIMEOUT_S
"""For all servers together; who had no turn is asked in the next round."""
NO_ANSWER = f"no answer within {TIMEOUT_S:.0f} s"
BACK_OFF_S = (5.0, 10.0, 20.0)
"""Until a server that did not answer is asked again."""
TOLD_AFTER_S = 180.0
"""Failing for so long is a problem: a ring is there minutes before its engine's server listens."""

GAUGES = {
    "num_requests_running": ("vllm.running", ""),
    "num_requests_waiting": ("vllm.waiting", ""),
    "num_requests_waiting_by_reason": ("vllm.waiting", "reason"),
    "num_requests_kv_fetch_by_stage": ("vllm.kv_fetch", "stage"),
    "kv_cache_usage_perc": ("vllm.kv_cache_usage", ""),
}
"""vLLM's name (without its prefix) -> ours, and the label that tells several apart."""
RATES = {
    "num_preemptions_total": ("vllm.preemptions_per_s", ""),
    "nixl_xfer_time_seconds_count": ("vllm.nixl_transfers_per_s", ""),
    "nixl_bytes_transferred_sum": ("vllm.nixl_bytes_per_s", ""),
    "nixl_num_failed_transfers_total": ("vllm.nixl_failures_per_s", "failed_transfers"),
    "nixl_num_failed_notifications_total": ("vllm.nixl_failures_per_s", "failed_notifications"),
    "nixl_num_kv_expired_reqs_total": ("vllm.nixl_failures_per_s", "kv_expired_reqs"),
    "nixl_num_notifications_after_expiry_total": ("vllm.nixl_failures_per_s", "notifications_after_expiry"),
}
"""Counters -> our rate per second, and its label."""
MEANS = {
    "nixl_xfer_time_seconds": ("vllm.nixl_xfer_ns", 1e9),
    "nixl_post_time_seconds": ("vllm.nixl_post_ns", 1e9),
    "nixl_num_descriptors": ("vllm.nixl_descriptors", 1.0),
}
"""Histograms -> our mean of what came since the reading before, and the factor of its unit."""

_COUNTERS = {*RATES, *(f"{name}_{part}" for name in MEANS for part in ("sum", "count"))}
_WANTED = re.compile(
    rf"(?:vllm[:_])(?:{'|'.join(sorted({*GAUGES, *_COUNTERS}, key=len, reverse=True))})[ {{]"
)


class Server(NamedTuple):
    """A server to ask, and whose metrics it tells."""

    url: str
    engines: tuple[tuple[str, str, str, str], ...]
    """(host, engine id, data-parallel index, model) of the recorded engines behind it."""


class Reading(NamedTuple):
    """What one engine behind a server told."""

    model: str
    gauges: dict[tuple[str, str], float]
    """(our name, label) -> value."""
    counters: dict[str, float]
    """vLLM's name without its prefix -> total."""


Answer = tuple[float, dict[str, Reading]] | str
"""When a server answered (s) and what, by engine label; or why it did not."""


class _State:
    """What is remembered of a server."""

    def __init__(self) -> None:
        self.before: dict[str, tuple[float, Reading]] = {}
        """Engine label -> when (s), what."""
        self.asked: Future[Answer] | None = None
        """The last question."""
        self.failures = 0
        self.failing_since_s = 0.0
        self.next_s = 0.0
        self.problem = ""


class VllmMetrics:
    """What the sampler asks for vLLM's own metrics.

    Args:
        urls: the setting `vllm_metrics`.
    """

    def __init__(self, urls: Sequence[str] = ()) -> None:
        self._urls = tuple(dict.fromkeys(urls))
        self._states: dict[str, _State] = {}
        self._client = httpx.Client(
            timeout=TIMEOUT_S,
            follow_redirects=False,
            trust_env=False,
            headers={"Accept": "text/plain", "Accept-Encoding": "identity"},
            limits=httpx.Limits(max_connections=WORKERS, max_keepalive_connections=0),
        )

    def read(self, at_ns: int, processes: list[RingProcess]) -> Iterator[Sample]:
        """Samples of every server that answers; those due, side by side."""
        servers = servers_of(self._urls, processes)
        self._states = {server.url: self._states.get(server.url) or _State() for server in servers}
        now_s = time.monotonic()
        questions: dict[Future[Answer], Server] = {}
        for server in servers:
            state = self._states[server.url]
            if state.next_s <= now_s and (state.asked is None or state.asked.done()):
                state.asked = Future()
                questions[state.asked] = server
        turns = deque(questions.items())
        for _ in range(min(WORKERS, len(turns))):
            # Not of a pool, whose threads the end of the process would wait for.
            threading.Thread(target=self._work, args=(turns,), name="kvscope-metrics", daemon=True).start()
        wait(questions, ROUND_S)
        for question, server in questions.items():
            if question.cancel():
                continue  # its turn did not come: others hold up the round
            state = self._states[server.url]
            answer = question.result() if question.done() else NO_ANSWER
            if isinstance(answer, str):
                self._failed(server, state, answer)
                continue
            state.failures, state.problem = 0, ""
            when_s, readings = answer
            for host, engine, reading, label in _owners(server, readings):
                yield from _samples(at_ns, host, engine, reading, when_s, state.before.get(label))
            state.before = {label: (when_s, reading) for label, reading in readings.items()}

    def problems(self) -> list[str]:
        """One line for each server that does not answer."""
        return [state.problem for state in self._states.values() if state.problem]

    def _failed(self, server: Server, state: _State, reason: str) -> None:
        now_s = time.monotonic()
        state.before = {}
        state.failures += 1
        if state.failures == 1:
            state.failing_since_s = now_s
        state.next_s = now_s + BACK_OFF_S[min(state.failures, len(BACK_OFF_S)) - 1]
        if now_s >= state.failing_since_s + TOLD_AFTER_S:
            engines = ", ".join(printable(engine) for _, engine, _, _ in server.engines[:4])
            of = f" of engine {engines}" if engines else ""
            state.problem = (
                f"vLLM's metrics{of} are missing: {printable(server.url)}: {reason}; "
                "name the right address with vllm_metrics"
            )

    def _work(self, turns: deque[tuple[Future[Answer], Server]]) -> None:
        with contextlib.suppress(IndexError):  # none is left
            while True:
                question, server = turns.popleft()
                if question.set_running_or_notify_cancel():
                    question.set_result(self._ask(server))

    def _ask(self, server: Server) -> Answer:
        connection = Connection()
        # However slowly it answers: httpx's time-out is of each read alone.
        deadline = threading.Timer(TIMEOUT_S, connection.end)
        deadline.daemon = True
        deadline.start()
        try:
            text = self._get(server.url, connection)
            if connection.ended:
                return NO_ANSWER  # without a length, an answer that is cut looks like a whole one
            return time.monotonic(), parse(text)
        except httpx.TimeoutException:
            return NO_ANSWER
        except httpx.HTTPError as error:
            if connection.ended:
                return NO_ANSWER
            return f"no answer ({printable(error)[:120]})"
        except (ValueError, httpx.InvalidURL) as error:
            return printable(error)[:120]
        except Exception as error:  # the parser is not made for hostile text
            logger.debug("where it failed", exc_info=True)
            return f"an answer that can't be read ({type(error).__name__})"
        finally:
            deadline.cancel()

    def _get(self, url: str, connection: Connection) -> str:
        """Raises ValueError (with the reason) or httpx.HTTPError."""
        end_s = time.monotonic() + TIMEOUT_S
        parts: list[bytes] = []
        size = 0
        with self._client.stream("GET", url, extensions={"trace": connection.trace}) as response:
            if response.status_code != 200:
                raise ValueError(f"it answered {response.status_code}")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise ValueError("it answered compressed, unasked")
            for part in response.iter_raw():
                size += len(part)
                if size > MAX_BYTES:
                    raise ValueError(f"its answer is longer than {MAX_BYTES >> 20} MiB")
                if time.monotonic() > end_s:
                    raise ValueError(f"its answer takes longer than {TIMEOUT_S:.0f} s")
                parts.append(part)
        return b"".join(parts).decode("utf-8", "replace")


def servers_of(urls: Sequence[str], processes: Iterable[RingProcess]) -> list[Server]:
    """The servers to ask: the given ones, and those of recorded engines that none of these belongs to."""
    groups: dict[tuple[str, int], list[tuple[str, str, str, str]]] = {}
    for process in processes:
        port = process.fingerprint.get("api_port")
        if process.source == "scheduler" and type(port) is int and 0 < port < 65536:
            index = str(process.fingerprint.get("data_parallel_index", 0))
            model = str(process.fingerprint.get("model", ""))
            groups.setdefault((process.host, port), []).append((process.host, process.engine, index, model))
    found = []
    for url in urls:
        parsed = urlsplit(url)
        port = parsed.port or (443 if parsed.scheme == "https" else 80)
        keys = [key for key in groups if key[1] == port]
        if len(keys) > 1:
            keys = [key for key in keys if key[0] == parsed.hostname]
        found.append(Server(url, tuple(groups.pop(keys[0])) if keys else ()))
    here = platform.node()
    for (host, port), engines in groups.items():
        if host == here:  # a container with a name of its own may have a network of its own, too
            found.append(Server(f"http://127.0.0.1:{port}/metrics", tuple(engines)))
    return found[:MAX_SERVERS]


def parse(text: str) -> dict[str, Reading]:
    """Wanted metrics by the label `engine`.

    Raises:
        ValueError: there are none, or they can't be parsed.
    """
    lines = [line for line in text.split("\n") if len(line) <= MAX_LINE and _WANTED.match(line)]
    if not lines:
        raise ValueError("what it answered has no metrics of vLLM")
    if len(lines) > MAX_LINES:
        raise ValueError("it answered too many metrics")
    found: dict[str, Reading] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for sample in family.samples:
            if not math.isfinite(sample.value):
                continue
            name = sample.name[5:]
            index = printable(sample.labels.get("engine", "0"))[:MAX_LABEL]
            reading = found.setdefault(
                index, Reading(printable(sample.labels.get("model_name", ""))[:256], {}, {})
            )
            if name in GAUGES:
                ours, label = GAUGES[name]
                reading.gauges[ours, printable(sample.labels.get(label, ""))[:MAX_LABEL]] = sample.value
            elif name in _COUNTERS:
                reading.counters[name] = reading.counters.get(name, 0.0) + sample.value
    for reading in found.values():
        if any(name == "vllm.waiting" and label for name, label in reading.gauges):
            reading.gauges.pop(("vllm.waiting", ""), None)  # their sum
    return found


def _owners(server: Server, readings: dict[str, Reading]) -> Iterator[tuple[str, str, Reading, str]]:
    """Host and engine id of each engine that the server tells of."""
    parsed = urlsplit(server.url)
    for label, reading in readings.items():
        known = [engine for engine in server.engines if engine[2] == label]
        if not known and len(readings) == 1 and len(server.engines) == 1:
            known = list(server.engines)
        if len(known) == 1:
            host, engine, _, model = known[0]
            # Another server may have taken the port.
            if not model or not reading.model or model == reading.model:
                yield host, engine, reading, label
        elif not server.engines:
            name = f"{parsed.hostname}:{parsed.port or ''}".rstrip(":")
            yield (parsed.hostname or ""), name + (f"/{label}" if len(readings) > 1 else ""), reading, label


def _samples(
    at_ns: int, host: str, engine: str, reading: Reading, when_s: float, before: tuple[float, Reading] | None
) -> Iterator[Sample]:
    def sample(name: str, label: str, value: float) -> Sample:
        return Sample(at_ns, host, engine, "", 0, name, label, value)

    for (name, label), value in reading.gauges.items():
        yield sample(name, label, value)
    if before is None or when_s <= before[0]:
        return
    seconds = when_s - before[0]
    old = before[1].counters
    grown = {name: value - old[name] for name, value in reading.counters.items() if name in old}
    if any(value < 0 for value in grown.values()):
        return  # the server was started anew
    for name, value in grown.items():
        if name in RATES:
            ours, label = RATES[name]
            yield sample(ours, label, value / seconds)
    for name, (ours, factor) in MEANS.items():
        count = grown.get(f"{name}_count", 0.0)
        if count > 0 and f"{name}_sum" in grown:
            yield sample(ours, "", grown[f"{name}_sum"] / count * factor)
