"""A scene: real engines of one mode, instrumented and stock, a daemon, and routers between any two.

Starting engines takes most of these tests' time: there is one scene per mode, and what kills its processes
comes last.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from kvscope.client import Daemon
from kvscope.demo.collector import Collector, collector
from kvscope.demo.deployment import router, warm_up
from kvscope.demo.engines import DECODE, PREFILL, Engine, EngineSpec, engines, paused
from kvscope.demo.load import Load, Result, run_load
from kvscope.demo.model import make_model
from kvscope.steps import STEPS

HERE = Path(__file__).parent
SHARING = ("test_engines.py", "test_analysis.py", "test_prometheus.py", "test_harness.py", "test_faults.py")
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
    _rows: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def daemon(self) -> Daemon:
        return Daemon(self.collector.url)

    def url(self, p: str = "p", d: str = "d") -> str:
        """A router between two engines."""
        if (p, d) not in self.urls:
            pair = [self.engines[p], self.engines[d]]
            self.urls[p, d] = self.stack.enter_context(router(pair, self.folder))
        return self.urls[p, d]

    @property
    def stock(self) -> tuple[str, str]:
        """The stock pair; the other one where there is none."""
        return ("stock-p", "stock-d") if "stock-p" in self.engines else ("p", "d")

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """While it lasts, only the instrumented pair runs."""
        return paused(engine for name, engine in self.engines.items() if name.startswith("stock-"))

    @contextlib.contextmanager
    def more(self, specs: Sequence[EngineSpec]) -> Iterator[None]:
        """More engines, for a while, which may record for the same daemon."""
        with engines(_recording(specs, self.folder), make_model(self.folder / "model"), self.folder) as more:
            self.engines |= more
            yield
        for name in more:
            del self.engines[name]

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
        """One stored request with its waterfall. Several tests look at all of the main load."""
        if request_id in self._rows:
            return self._rows[request_id]
        found: dict[str, Any] = self.daemon.request(request_id)["request"]
        if not found["in_flight"]:
            self._rows[request_id] = found
        return found


def steps(row: dict[str, Any]) -> dict[str, int]:
    """Step name to nanoseconds on the critical path."""
    return {s.name: row[s.column] for s in STEPS if s.in_ttft and row[s.column] is not None}


@contextlib.contextmanager
def scene_of(
    mode: str, specs: Sequence[EngineSpec], pairs: Sequence[tuple[str, str]], load: Load | None = None
) -> Iterator[Scene]:
    """Start it all, warm up these pairs, send the main load through the first, and end it all."""
    left_before = _shared_memory()
    folder = Path(tempfile.mkdtemp(prefix="kvs-", dir="/dev/shm"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        daemon = stack.enter_context(collector(folder / "rings", folder))
        model = make_model(folder / "model")
        started = stack.enter_context(engines(_recording(specs, folder), model, folder))
        scene = Scene(mode, started, daemon, folder, stack)
        processes = [pid for engine in started.values() for pid in engine.pids().values()]
        assert len(processes) >= 3 * len(specs), "API server, EngineCore and worker"
        for p, d in pairs:
            warm_up(scene.url(p, d), mode, 2)
        if load is not None:
            scene.before = {name: engine.metrics() for name, engine in started.items()}
            with scene.alone():
                scene.results = scene.send(load)
            poster = started["p" if mode == "push" else "d"]
            count, before = "vllm:nixl_xfer_time_seconds_count", scene.before[poster.spec.name]
            moved = metric(before, count) + len(scene.results)
            wait_until(lambda: metric(poster.metrics(), count) >= moved, what="vLLM's counters")
            scene.after = poster.metrics()
        yield scene
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    assert not folder.exists()
    assert _shared_memory() <= left_before


def _recording(specs: Sequence[EngineSpec], folder: Path) -> list[EngineSpec]:
    rings = {"KVSCOPE_DIR": str(folder / "rings"), "KVSCOPE_LABEL": "test"}
    return [dataclasses.replace(spec, environment={**rings, **spec.environment}) for spec in specs]


def _shared_memory() -> set[str]:
    """What engines may leave behind when they are killed; others make semaphores and such meanwhile."""
    return {name for name in os.listdir("/dev/shm") if name.startswith("psm_")}


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
        mode = item.callspec.params.get("scene") if hasattr(item, "callspec") else None
        if mode is None:
            return 0, 0, 0
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
