"""Fixtures: a directory for rings, the demo's tiny model."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

# The import mode is importlib: helpers are not a package.
sys.path.insert(0, str(Path(__file__).parent))
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture
def rings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the connectors made in this test record."""
    directory = tmp_path / "rings"
    monkeypatch.setenv("KVSCOPE_DIR", str(directory))
    monkeypatch.setenv("KVSCOPE_RING_SLOTS", "4096")
    monkeypatch.delenv("KVSCOPE_TEST_RAISE", raising=False)
    return directory


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from kvscope.demo.model import make_model

    return make_model(tmp_path_factory.mktemp("model") / "tiny")
