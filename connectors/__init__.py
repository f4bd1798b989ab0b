"""Instrumented NIXL connectors: `"kv_connector_module_path": "kvscope.connectors"`, all else unchanged.

vLLM imports this package in API servers, EngineCores and workers while it reads its configuration, so the
import does nothing: no vLLM, no thread, no file. The classes are made when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    NixlConnector: Any
    NixlPullConnector: Any
    NixlPushConnector: Any

__all__ = ["NixlConnector", "NixlPullConnector", "NixlPushConnector"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvscope.connectors.facade import connector_class

    return connector_class(name)
