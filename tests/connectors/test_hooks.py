"""No hook may hurt vLLM: each is forced to raise on a subclass of vLLM's own class, one at a time."""

from __future__ import annotations

import functools
import gc
import importlib
import logging
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl")

from vllm_parts import make_request, make_scheduler, recorded, step

from kvscope import events
from kvscope.connectors import hooks
from kvscope.connectors.contract import CLASSES
from kvscope.connectors.guard import FAILURES_ALLOWED, Observer, overrides, subclass
from kvscope.connectors.recorder import open_observer
from kvscope.connectors.scheduler_hooks import SchedulerHooks
from kvscope.connectors.worker_hooks import PullHooks, PushHooks
from kvscope.ring import About, RingReader

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
RESULT = object()

CASES = [(hook, mode) for hook in hooks.HOOKS for mode in hook.modes]


class Failed(Exception):
    """Of vLLM's own."""


def stock_class(owner: str, mode: str) -> type:
    if owner == hooks.WRAPPER:
        from vllm.distributed.nixl_utils import NixlWrapper

        return NixlWrapper
    return getattr(importlib.import_module(NIXL), CLASSES[owner, mode])


def listening(hook: hooks.Hook, mode: str, rings: Path, body: Callable[..., Any]) -> Any:
    """An object of a class that listens to `hook` alone; vLLM's method is vLLM's in all but its body."""
    stock = stock_class(hook.owner, mode)
    method = functools.wraps(getattr(stock, hook.method))(body)
    base = type(stock)(stock.__name__, (stock,), {hook.method: method, "__del__": lambda self: None})
    observer: type[Observer] = SchedulerHooks
    if hook.owner != hooks.CONNECTOR:
        observer = PushHooks if mode == hooks.PUSH else PullHooks
    methods, present, missing = overrides([hook], base, observer)
    assert (present, missing) == ([hook.name], [])
    made = subclass(base, methods)
    listener = made.__new__(made)
    listener._kvscope = open_observer(observer, About("engine", "worker"))
    assert listener._kvscope is not None
    return listener


def arguments(hook: hooks.Hook) -> list[Any]:
    return [object() for _ in hook.args]


@pytest.mark.parametrize(("hook", "mode"), CASES, ids=lambda case: getattr(case, "name", case))
class TestHookThatRaises:
    def test_vllm_gets_what_its_own_method_returned_and_the_fault_is_recorded(
        self, hook: hooks.Hook, mode: str, rings: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVSCOPE_TEST_RAISE", hook.name)
        given = arguments(hook)
        seen = []

        def body(self: Any, *args: Any, **kwargs: Any) -> Any:
            seen.append((args, kwargs))
            return RESULT

        listener = listening(hook, mode, rings, body)
        for _ in range(FAILURES_ALLOWED + 2):
            assert getattr(listener, hook.method)(*given) is RESULT
        assert getattr(listener, hook.method)(**dict(zip(hook.args, given, strict=True))) is RESULT

        assert seen[:-1] == [(tuple(given), {})] * (FAILURES_ALLOWED + 2)
        assert seen[-1] == ((), dict(zip(hook.args, given, strict=True)))
        faults = [fields for name, _, fields in recorded(rings) if name == "hook.failed"]
        assert {fault["hook"] for fault in faults} == {hook.name}
        assert all("KVSCOPE_TEST_RAISE" in fault["error"] for fault in faults)
        # One series per half of the hook (before, after); each ends with its being off.
        off = [fault["disabled"] for fault in faults]
        assert sum(off) * FAILURES_ALLOWED == len(off)

    def test_vllm_gets_its_own_exception(
        self, hook: hooks.Hook, mode: str, rings: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("KVSCOPE_TEST_RAISE", "all")

        def body(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise Failed

        listener = listening(hook, mode, rings, body)
        with pytest.raises(Failed):
            getattr(listener, hook.method)(*arguments(hook))

    def test_odd_arguments_are_a_fault_of_ours_only(self, hook: hooks.Hook, mode: str, rings: Path) -> None:
        """Without any pretending: the real hook given objects it can't read."""
        listener = listening(hook, mode, rings, lambda self, *args, **kwargs: RESULT)
        for _ in range(FAILURES_ALLOWED + 1):
            assert getattr(listener, hook.method)(*arguments(hook)) is RESULT


def test_all_hooks_of_a_scheduler_raise_and_requests_run_as_ever(
    rings: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSCOPE_TEST_RAISE", "all")
    scheduler = make_scheduler(model, "NixlPullConnector")
    request = make_request("p-1", 100, 1, do_remote_decode=True)
    scheduler.add_request(request)
    for _ in range(4):
        step(scheduler)
    step(scheduler, sent={"p-1"})
    assert list(request.output_token_ids) == [7]
    assert not scheduler.requests
    names = {fields["hook"] for name, _, fields in recorded(rings) if name == "hook.failed"}
    assert names == {
        f"connector.{method}"
        for method in (
            "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc",
            "build_connector_meta", "update_connector_output", "take_events", "request_finished_all_groups",
        )
    }  # fmt: skip


def unwritable(tmp_path: Path) -> Path:
    blocker = tmp_path / "a-file"
    blocker.write_text("")
    return blocker / "rings"


def test_without_a_place_for_rings_there_is_one_warning_and_vllm_serves(
    tmp_path: Path,
    rings: Path,
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("KVSCOPE_DIR", str(unwritable(tmp_path)))
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    scheduler = make_scheduler(model, "NixlPushConnector")
    request = make_request("p-1", 40, 1, do_remote_decode=True)
    scheduler.add_request(request)
    for _ in range(3):
        step(scheduler)
    assert list(request.output_token_ids) == [7]
    ours = [record for record in caplog.records if record.name.startswith("vllm.kvscope")]
    assert [record.levelname for record in ours] == ["WARNING"]
    assert "nothing is recorded" in ours[0].getMessage()


@pytest.mark.parametrize("slots", ["many", "-5", "3"])
def test_a_bad_size_is_one_warning(
    slots: str, rings: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("KVSCOPE_RING_SLOTS", slots)
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    assert open_observer(SchedulerHooks, About("engine", "scheduler")) is None
    assert len(caplog.records) == 1


def test_a_recorder_that_breaks_is_stopped_and_says_so(rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector")
    observer = scheduler.connector._kvscope

    def broken(*args: Any) -> None:
        raise OSError("the ring is gone")

    observer.record = broken
    scheduler.add_request(make_request("p-1", 40, 1, do_remote_decode=True))
    step(scheduler)
    assert observer.before_on_new_request is None
    assert observer.before_take_events is None
    assert "the ring is gone" in (RingReader(observer.writer.path).stopped_reason() or "")


def test_a_forked_child_neither_writes_nor_keeps_the_lock(rings: Path) -> None:
    observer = open_observer(SchedulerHooks, About("engine", "scheduler"))
    assert observer is not None
    ready, hold = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.write(ready[1], b"1" if observer.before_take_events is None else b"0")  # type: ignore[attr-defined]
        os.read(hold[0], 1)
        os._exit(0)
    try:
        assert os.read(ready[0], 1) == b"1"
        reader = RingReader(observer.writer.path)
        assert reader.writer_alive()
        observer.writer.close()
        assert not reader.writer_alive()
    finally:
        os.write(hold[1], b"1")
        os.waitpid(child, 0)


def test_a_request_is_not_held_after_its_end(rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector")
    request = make_request("local", 40, 2)
    reference = weakref.ref(request)
    scheduler.add_request(request)
    for _ in range(4):
        step(scheduler)
    del request
    step(scheduler)
    gc.collect()
    assert reference() is None
    observer = scheduler.connector._kvscope
    assert not any((observer.legs, observer.prefilling, observer.awaiting_token, observer.loaded))


def test_the_time_of_hooks_is_sampled(rings: Path, model: Path) -> None:
    scheduler = make_scheduler(model, "NixlPullConnector")
    observer = scheduler.connector._kvscope
    scheduler.add_request(make_request("local", 40, 2))
    step(scheduler)
    observer._sampled_ns = time.monotonic_ns() - 2_000_000_000
    step(scheduler)
    (sample,) = [e for e in RingReader(observer.writer.path).events() if e.kind == events.ENGINE_SAMPLE]
    steps, tokens, hook_ns, interval_ns = sample.args[:4]
    assert (steps, tokens) == (2, 41)
    assert 0 < hook_ns < interval_ns
    assert interval_ns >= 2_000_000_000


def test_without_the_hook_that_ends_requests_none_is_kept_in_memory(rings: Path) -> None:
    observer = open_observer(SchedulerHooks, About("engine", "scheduler"))
    assert isinstance(observer, SchedulerHooks)
    ends = next(hook for hook in hooks.HOOKS if hook.method == "request_finished_all_groups")
    observer.prefilling["r"] = observer.awaiting_token["r"] = object()
    observer.loaded.add("r")
    for _ in range(FAILURES_ALLOWED):
        observer.failed("after_request_finished_all_groups", ends, RuntimeError("broken"))
    kept = (observer.legs, observer.prefilling, observer.awaiting_token, observer.loaded)
    assert not any(kept)
    assert observer.before_on_new_request is None, "a new request would be kept for ever"
