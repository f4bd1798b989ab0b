"""A scene: real engines of one mode, instrumented and stock, a daemon, and routers between any two."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvscope.client import Daemon
from kvscope.demo.collector import Collector, collector
from kvscope.demo.deployment import router, warm_up
from kvscope.demo.engines import DECODE, PREFILL, Engine, EngineSpec, engines
from kvscope.demo.load import Load, Result, run_load
from kvscope.demo.model import make_model
from kvscope.steps import STEPS

HERE = Path(__file__).parent
SHARING = ("test_engines.py", "test_prometheus.py")
MODES = ("push", "pull", "bidirectional")
OWN_METRICS = ("--enable-per-request-metrics", "--enable-force-include-usage")


def wait_until(condition: Callable[[], Any], seconds: float = 30, what: str = "the condition") -> Any:
    """Poll until it holds; returns what it returned."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, f"{what} did not come true in {seconds} s"
        time.sleep(0.1)
    return value


def metric(text: str, name: str) -> float:
    """Sum of a metric over its label sets; 0 when it is not there yet."""
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.M))


@dataclass
class Scene:
    """Running engines by name, the daemon that collects from the instrumented ones, and ways to ask it."""

    mode: str
    engines: dict[str, Engine]
    collector: Collector
    folder: Path
    stack: contextlib.ExitStack
    results: list[Result] = field(default_factory=list)
    """The main load, sent once through the instrumented pair when the scene was set."""
    before: dict[str, str] = field(default_factory=dict)
    """Each engine's /metrics before the main load."""
    after: str = ""
    """/metrics of the engine that posts the transfers, after the main load."""
    urls: dict[tuple[str, str], str] = field(default_factory=dict)

    @property
    def daemon(self) -> Daemon:
        return Daemon(self.collector.url)

    def url(self, p: str = "p", d: str = "d") -> str:
        """A router between two engines."""
        if (p, d) not in self.urls:
            pair = [self.engines[p], self.engines[d]]
            self.urls[p, d] = self.stack.enter_context(router(pair, self.folder))
        return self.urls[p, d]

    def send(self, load: Load, p: str = "p", d: str = "d") -> list[Result]:
        results = asyncio.run(run_load(self.url(p, d), load))
        for result in results:
            assert result.ok, f"{result.status} {result.error[:500]}"
        return results

    def rows(self, results: Sequence[Result], seconds: float = 30) -> list[dict[str, Any]]:
        """The stored requests of these results, in their order."""
        names = ", ".join(f"'{result.request_id}'" for result in results)
        sql = f"SELECT client_id, id FROM requests WHERE client_id IN ({names})"

        def stored() -> dict[str, str] | None:
            found = dict(self.daemon.query("", sql, {})["rows"])
            return found if len(found) == len(results) else None

        ids = wait_until(stored, seconds, f"{len(results)} requests stored")
        return [self.row(ids[result.request_id]) for result in results]

    def row(self, request_id: str) -> dict[str, Any]:
        """One stored request with its waterfall."""
        found: dict[str, Any] = self.daemon.request(request_id)["request"]
        return found


def steps(row: dict[str, Any]) -> dict[str, int]:
    """Step name to nanoseconds on the critical path."""
    return {s.name: row[s.column] for s in STEPS if s.in_ttft and row[s.column] is not None}


@contextlib.contextmanager
def scene_of(
    mode: str, specs: Sequence[EngineSpec], pairs: Sequence[tuple[str, str]], load: Load | None = None
) -> Iterator[Scene]:
    """Start it all, warm up these pairs, send the main load through the first, and end it all."""
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        daemon = stack.enter_context(collector(folder / "rings", folder))
        rings = {"KVSCOPE_DIR": str(folder / "rings"), "KVSCOPE_LABEL": "test"}
        specs = [dataclasses.replace(s, environment={**rings, **s.environment}) for s in specs]
        started = stack.enter_context(engines(specs, make_model(folder / "model"), folder))
        scene = Scene(mode, started, daemon, folder, stack)
        for p, d in pairs:
            warm_up(scene.url(p, d), mode, 2)
        if load is not None:
            scene.before = {name: engine.metrics() for name, engine in started.items()}
            with _paused(engine for name, engine in started.items() if name.startswith("stock-")):
                scene.results = scene.send(load)
            poster = started["p" if mode == "push" else "d"]
            count, before = "vllm:nixl_xfer_time_seconds_count", scene.before[poster.spec.name]
            moved = metric(before, count) + len(scene.results)
            wait_until(lambda: metric(poster.metrics(), count) >= moved, what="vLLM's counters")
            scene.after = poster.metrics()
        yield scene


@contextlib.contextmanager
def _paused(idle: Iterable[Engine]) -> Iterator[None]:
    """Stop engines that have nothing to do: four of them on two cores would be in each other's way."""
    pids = [pid for engine in idle for pid in engine.pids().values()]
    try:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def specs_of(mode: str, stock: bool = True) -> list[EngineSpec]:
    """An instrumented pair `p`, `d`, and a stock pair `stock-p`, `stock-d`."""
    roles = (("p", PREFILL, ()), ("d", DECODE, OWN_METRICS))
    # The pair side by side: engines take the cores in turn, and P and D must not share one.
    found = [EngineSpec(name, role, mode, instrumented=True, arguments=more) for name, role, more in roles]
    if stock:
        found += [EngineSpec(f"stock-{name}", role, mode, arguments=more) for name, role, more in roles]
    return found


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What shares the scenes goes last, mode by mode: no other engines run beside them."""

    def order(item: pytest.Item) -> tuple[int, int, int]:
        if item.path.parent != HERE or item.path.name not in SHARING:
            return 0, 0, 0
        mode: str = item.callspec.params["scene"]  # type: ignore[attr-defined]
        return 1 + MODES.index(mode), SHARING.index(item.path.name), item.reportinfo()[1] or 0

    items.sort(key=order)


@pytest.fixture(scope="session")
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    """The scene of the mode that the test is parametrized with; the modules SHARING it come one by one."""
    mode = request.param
    stock = mode != "bidirectional"
    lengths = [(64, 200, 450, 900)[i % 4] for i in range(200)]
    pairs = (
        [("p", "d"), ("stock-p", "stock-d"), ("p", "stock-d"), ("stock-p", "d")] if stock else [("p", "d")]
    )
    with scene_of(mode, specs_of(mode, stock=stock), pairs, Load(lengths, output_tokens=6, seed=7)) as set_up:
        yield set_up
