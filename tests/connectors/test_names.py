"""What vLLM looks up by name, class or signature must find the instrumented connectors as its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("vllm")
pytest.importorskip("nixl")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from kvscope.connectors import plugin

NAMES = ("NixlConnector", "NixlPullConnector", "NixlPushConnector")
nixl = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.nixl")


def config(name: str, module: str | None = "kvscope.connectors") -> KVTransferConfig:
    return KVTransferConfig(kv_connector=name, kv_connector_module_path=module, kv_role="kv_both")


@pytest.mark.parametrize("name", NAMES)
def test_module_path_gives_a_subclass_by_the_same_name(name: str) -> None:
    found = KVConnectorFactory.get_connector_class(config(name))
    stock = getattr(nixl, name)
    assert found is not stock
    assert issubclass(found, stock)
    assert found.__name__ == stock.__name__
    # Stats are rebuilt in the API server by the class's name.
    assert issubclass(found, KVConnectorFactory.get_connector_class_by_name(found.__name__))
    assert KVConnectorFactory.supports_hma_config(config(name))
    assert not found.__abstractmethods__


def test_an_alias_in_vllm_is_an_alias_here() -> None:
    connectors = importlib.import_module("kvscope.connectors")
    assert (connectors.NixlConnector is connectors.NixlPullConnector) == (
        nixl.NixlConnector is nixl.NixlPullConnector
    )


def test_another_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="MooncakeConnector"):
        KVConnectorFactory.get_connector_class(config("MooncakeConnector"))


def test_plugin_is_off_by_default_and_instruments_by_name_when_enabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry: dict[str, Any] = dict(KVConnectorFactory._registry)
    monkeypatch.setattr(KVConnectorFactory, "_registry", registry)
    before = dict(registry)
    for value in ("", "0", "no"):
        monkeypatch.setenv("KVSCOPE_ENABLE", value)
        plugin.register()
        assert registry == before
    monkeypatch.setenv("KVSCOPE_ENABLE", "1")
    plugin.register()
    plugin.register()
    for name in NAMES:
        found = KVConnectorFactory.get_connector_class(config(name, None))
        assert found is KVConnectorFactory.get_connector_class(config(name))
    assert {name for name in registry if registry[name] is not before[name]} == set(NAMES)


def test_plugin_never_raises() -> None:
    """A vLLM without the factory we know."""
    code = (
        "import sys; sys.modules['vllm'] = None\n"
        "from kvscope.connectors.plugin import register; register(); print('served')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "KVSCOPE_ENABLE": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "served\n", done.stderr
    assert "no effect" in done.stderr


@pytest.mark.parametrize("statement", ["import kvscope.connectors", "import kvscope.connectors.plugin",
                                       "from kvscope.connectors import contract, hooks"])  # fmt: skip
def test_importing_starts_nothing(statement: str) -> None:
    code = (
        f"import sys, threading\n{statement}\n"
        "print({'vllm', 'torch', 'duckdb', 'numpy', 'nixl'} & set(sys.modules), threading.active_count())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set() 1\n", done.stderr
