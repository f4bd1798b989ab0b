"""Entry point `vllm.general_plugins`: with KVSCOPE_ENABLE=1 vLLM's NIXL connectors are instrumented by name.

For deployments whose connector config can't be changed: MultiConnector children, launchers. vLLM calls
`register` in API servers, EngineCores and workers before any connector is made, perhaps more than once.
"""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from typing import Any

NAMES = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")

logger = logging.getLogger("vllm.kvscope")


def register() -> None:
    """Let vLLM's connector factory hand out the instrumented classes. Never raises."""
    if os.environ.get("KVSCOPE_ENABLE") != "1":
        return
    try:
        factory = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.factory")
        registry: dict[str, Callable[[], Any]] = factory.KVConnectorFactory._registry
        for name in NAMES:
            if name in registry:
                registry[name] = _loader(name)
    except Exception as error:
        logger.warning("kvscope: KVSCOPE_ENABLE=1 has no effect, vLLM is not affected: %r", error)


def _loader(name: str) -> Callable[[], Any]:
    def load() -> Any:
        return getattr(importlib.import_module("kvscope.connectors"), name)

    return load
