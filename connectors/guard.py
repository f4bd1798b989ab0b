"""The rule that no hook may hurt vLLM, in one place: overrides that listen, and what happens when one raises.

A hook is a method `before_X` or `after_X` of an `Observer`, X being the method of vLLM's that it listens to.
Its override calls vLLM's own method outside of any `try`, so that results and exceptions pass untouched.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
from collections.abc import Callable, Iterable
from functools import wraps
from time import monotonic_ns
from typing import Any

from kvscope import events
from kvscope.connectors.hooks import HOOKS, Hook
from kvscope.ring import RingWriter

logger = logging.getLogger("vllm.kvscope")
"""Below vLLM's own logger, so that its handlers and level apply."""

FAILURES_ALLOWED = 3
"""A hook that raised this often is off for the life of the process."""

TEST_RAISE = "KVSCOPE_TEST_RAISE"
"""For tests: hooks (by name, with commas; or `all`) that raise instead of working."""

MAX_ERROR_CHARS = 300


def attributes(hook: Hook) -> tuple[str, str]:
    """Names of the observer's methods that are called before and after vLLM's."""
    method = hook.method.lstrip("_")
    return f"before_{method}", f"after_{method}"


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of an `Observer` whose time is added to its `hook_ns`: the real work of an `each_step` hook.
    That of all other hooks is added by their overrides."""

    @wraps(method)
    def accounted(self: Any, *args: Any, **kwargs: Any) -> Any:
        begin = monotonic_ns()
        try:
            return method(self, *args, **kwargs)
        finally:
            self.hook_ns += monotonic_ns() - begin

    return accounted


class Observer:
    """What the hooks of one connector share: its ring and the account of their failures and time.

    A hook that is off is an attribute that is None.
    """

    def __init__(self, writer: RingWriter) -> None:
        self.writer = writer
        self.record = writer.record
        self.text = writer.text
        self.hook_ns = 0
        """Time spent in hooks since the last sample. Threads may lose each other's additions: it is a sum
        of microseconds for an overview."""
        self._failures: dict[str, int] = {}
        for hook in HOOKS:
            for name in attributes(hook):
                if hasattr(self, name) and _must_raise(hook):
                    setattr(self, name, _raiser(hook.name))

    def failed(self, name: str, hook: Hook, error: Exception) -> None:
        """Account for the hook `name` having raised. Never raises."""
        try:
            count = self._failures[name] = self._failures.get(name, 0) + 1
            if count > FAILURES_ALLOWED:
                return  # another thread was in it when it was switched off
            off = count == FAILURES_ALLOWED
            if off:
                setattr(self, name, None)
                self.switched_off(name)
            text = f"{type(error).__name__}: {error}"[:MAX_ERROR_CHARS]
            self.record(events.HOOK_FAILED, 0, self.text(hook.name), self.text(text), int(off))
            if off:
                logger.warning("kvscope: hook %s is off after %d failures (%s)", hook.name, count, text)
        except Exception as second:
            self.give_up(f"{type(second).__name__}: {second}")

    def switched_off(self, name: str) -> None:
        """The hook `name` is off from now on: nothing may be kept that it would have let go of."""

    def give_up(self, reason: str) -> None:
        """Stop recording for good: the recorder itself does not work."""
        switch_off(self)
        with contextlib.suppress(Exception):
            for hook in HOOKS:
                for name in attributes(hook):
                    self.switched_off(name)
        with contextlib.suppress(Exception):
            self.writer.stop(reason)
        with contextlib.suppress(Exception):
            logger.warning("kvscope: recording stopped, vLLM goes on (%s)", reason)


class _Off:
    """An observer whose hooks are all off."""


def switch_off(observer: Any) -> None:
    for hook in HOOKS:
        for name in attributes(hook):
            setattr(observer, name, None)


OFF: Any = _Off()
switch_off(OFF)


def overrides(
    hooks: Iterable[Hook], base: type, observer: type[Observer]
) -> tuple[dict[str, Callable[..., Any]], list[str], list[str]]:
    """Overrides for a subclass of `base`, the names of the hooks they serve, and of those `base` lacks.

    A method that is there with other arguments counts as lacking: we would misread it.
    """
    methods: dict[str, Callable[..., Any]] = {}
    present, missing = [], []
    replaced = set()
    for hook in hooks:
        if hook.method in replaced:
            continue
        stock = getattr(base, hook.method, None)
        if stock is None or not _has_arguments(stock, hook.args):
            if not hook.instead_of:
                missing.append(hook.name)
            continue
        if hook.instead_of:
            replaced.add(hook.instead_of)
        methods[hook.method] = _override(stock, hook, observer)
        present.append(hook.name)
    return methods, present, missing


def subclass(base: type, methods: dict[str, Any]) -> type:
    """A subclass of `base` that goes by its name: vLLM looks classes up by name."""
    members = {"__module__": "kvscope.connectors", "__doc__": base.__doc__, "_kvscope": OFF}
    made: type = type(base)(base.__name__, (base,), {**members, **methods})
    return made


def _has_arguments(method: Any, names: tuple[str, ...]) -> bool:
    try:
        parameters = list(inspect.signature(method).parameters)
    except (TypeError, ValueError):
        return False
    return tuple(parameters[1 : len(names) + 1]) == names


def _override(stock: Any, hook: Hook, observer: type[Observer]) -> Callable[..., Any]:
    before, after = attributes(hook)
    has_before, has_after = hasattr(observer, before), hasattr(observer, after)
    if has_before and has_after:
        return _around(stock, hook, before, after)
    if has_before:
        return _before(stock, hook, before)
    if has_after:
        return _after(stock, hook, after)
    raise TypeError(f"{observer.__name__} does not listen to {hook.name}")


# The three forms repeat the guarded and timed call: a function shared by them would cost a frame each time.


def _before(stock: Any, hook: Hook, name: str) -> Callable[..., Any]:
    accounts = not hook.each_step

    @wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer = self._kvscope
        listen = getattr(observer, name)
        if listen is not None:
            try:
                begin_ns = monotonic_ns() if accounts else 0
                listen(self, *args, **kwargs)
                if accounts:
                    observer.hook_ns += monotonic_ns() - begin_ns
            except Exception as error:
                observer.failed(name, hook, error)
        return stock(self, *args, **kwargs)

    return method


def _after(stock: Any, hook: Hook, name: str) -> Callable[..., Any]:
    accounts = not hook.each_step

    @wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = stock(self, *args, **kwargs)
        observer = self._kvscope
        listen = getattr(observer, name)
        if listen is not None:
            try:
                begin_ns = monotonic_ns() if accounts else 0
                listen(self, result, *args, **kwargs)
                if accounts:
                    observer.hook_ns += monotonic_ns() - begin_ns
            except Exception as error:
                observer.failed(name, hook, error)
        return result

    return method


def _around(stock: Any, hook: Hook, before: str, after: str) -> Callable[..., Any]:
    """`after` gets what `before` returned, and is also called (with no result) when vLLM's method raised."""
    accounts = not hook.each_step

    @wraps(stock)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        observer = self._kvscope
        memo = result = None
        listen = getattr(observer, before)
        if listen is not None:
            try:
                begin_ns = monotonic_ns() if accounts else 0
                memo = listen(self, *args, **kwargs)
                if accounts:
                    observer.hook_ns += monotonic_ns() - begin_ns
            except Exception as error:
                observer.failed(before, hook, error)
        try:
            result = stock(self, *args, **kwargs)
            return result
        finally:
            listen = getattr(observer, after)
            if listen is not None:
                try:
                    begin_ns = monotonic_ns() if accounts else 0
                    listen(self, memo, result, *args, **kwargs)
                    if accounts:
                        observer.hook_ns += monotonic_ns() - begin_ns
                except Exception as error:
                    observer.failed(after, hook, error)

    return method


def _must_raise(hook: Hook) -> bool:
    wanted = os.environ.get(TEST_RAISE, "")
    return wanted == "all" or hook.name in wanted.split(",")


def _raiser(name: str) -> Callable[..., Any]:
    def hook(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError(f"{TEST_RAISE}: {name}")

    return hook
