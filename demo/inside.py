"""Loaded in every process of a test engine as its `sitecustomize`. Standard library only.

What it changes, and why, is in `engines.py` under "Steadiness".
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import platform
import sys
from collections.abc import Callable
from types import ModuleType

PROGRESS_POLL_US = 1000


def sleep_in_progress_thread(bindings: ModuleType) -> None:
    """NIXL's UCX progress thread polls with time-out 0, a core per engine; let it sleep until an event."""
    stock = bindings.nixlAgent

    def agent(name: str, config: object) -> object:
        config.pthrDelay = PROGRESS_POLL_US  # type: ignore[attr-defined]
        return stock(name, config)

    bindings.nixlAgent = agent  # type: ignore[attr-defined]


def permit_amx() -> None:
    """Ask the kernel for AMX tiles (x86; elsewhere it refuses, which is fine).

    vLLM's CPU attention uses tiles and relies on oneDNN having asked in an earlier, larger matmul. A decode
    engine whose first forward is a single token has had none, and dies of SIGILL.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18
    if platform.machine() == "x86_64":
        ctypes.CDLL(None).syscall(arch_prctl, request_permission, tile_data)


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "nixl_cu12._bindings": sleep_in_progress_thread,
    "nixl_cu13._bindings": sleep_in_progress_thread,
}


class _AfterImport(importlib.abc.MetaPathFinder):
    """Runs a patch when its module has been loaded."""

    def find_spec(
        self, name: str, path: object = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = PATCHES.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def load(module: ModuleType) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = load  # type: ignore[method-assign]
        return spec


permit_amx()
sys.meta_path.insert(0, _AfterImport())
