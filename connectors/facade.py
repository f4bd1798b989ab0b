"""The connectors that vLLM instantiates: subclasses of its own, which listen.

A connector in EngineCore listens to itself. One in a worker lets its worker and the worker's NIXL agent
listen, by giving these two objects a subclass of their class: vLLM's constructors name the classes they
make, and nothing of theirs runs before the KV caches are registered.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from kvscope import events
from kvscope.connectors import fingerprint, hooks
from kvscope.connectors.guard import OFF, Observer, overrides, subclass
from kvscope.connectors.recorder import open_observer
from kvscope.connectors.scheduler_hooks import SchedulerHooks
from kvscope.connectors.worker_hooks import PullHooks, PushHooks
from kvscope.ring import About

NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"

logger = logging.getLogger("vllm.kvscope")


def connector_class(name: str) -> Any:
    """The class for the connector `name`; vLLM's own, with a warning, when it can't be made to listen."""
    stock = getattr(importlib.import_module(NIXL), name)
    try:
        return instrumented(stock)
    except Exception as error:
        logger.warning("kvscope: %s is not instrumented, vLLM is not affected: %r", name, error)
        return stock


@cache
def instrumented(stock: type) -> type:
    """The subclass of vLLM's connector `stock` that records; one only, as two names may mean one class."""
    mode = hooks.PUSH if "Push" in stock.__name__ else hooks.PULL
    methods, present, missing = overrides(hooks.hooks_of(hooks.CONNECTOR, mode), stock, SchedulerHooks)

    constructor: Any = stock.__init__  # type: ignore[misc]

    def __init__(
        self: Any, vllm_config: Any, role: Any, kv_cache_config: Any, *args: Any, **kwargs: Any
    ) -> None:
        constructor(self, vllm_config, role, kv_cache_config, *args, **kwargs)
        try:
            describe = partial(fingerprint.describe, vllm_config, kv_cache_config, mode)
            if self.connector_scheduler is not None:
                about = describe(self, self.connector_scheduler, events.SCHEDULER, present, missing)
                self._kvscope = open_observer(SchedulerHooks, about) or OFF
            elif self.connector_worker is not None:
                _observe_worker(self.connector_worker, mode, partial(describe, self, self.connector_worker))
        except Exception as error:
            logger.warning("kvscope: nothing is recorded in this process, vLLM is not affected: %r", error)

    return subclass(stock, {**methods, "__init__": __init__})


def _observe_worker(worker: Any, mode: str, describe: Callable[..., About]) -> None:
    """Let the worker and its NIXL agent listen."""
    kind: type[Observer] = PushHooks if mode == hooks.PUSH else PullHooks
    wanted, wrapped = hooks.hooks_of(hooks.WORKER, mode), hooks.hooks_of(hooks.WRAPPER, mode)
    version = fingerprint.vllm_version()
    if hooks.is_supported(version):
        methods, present, missing = overrides(wanted, type(worker), kind)
        nixl_methods, nixl_present, nixl_missing = overrides(wrapped, type(worker.nixl_wrapper), kind)
    else:
        logger.warning("kvscope does not know the workers of vLLM %s: only schedulers are recorded", version)
        methods, nixl_methods, present, nixl_present = {}, {}, [], []
        missing = [hook.name for hook in wanted if hook.required]
        nixl_missing = [hook.name for hook in wrapped]
    present += nixl_present
    missing += nixl_missing
    observer = open_observer(kind, describe(events.WORKER, present, missing))
    if observer is None or not present:
        return
    nixl = worker.nixl_wrapper
    nixl.__class__ = subclass(type(nixl), nixl_methods)
    worker.__class__ = subclass(type(worker), methods)
    nixl._kvscope = worker._kvscope = observer
