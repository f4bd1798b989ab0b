"""Fixtures: processes that don't outlive their test, and disks that are small or read-only."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """Make a `Writer` or `Served` that is killed after the test."""
    started: list[Any] = []

    def make(kind: type[Any], *arguments: Any) -> Any:
        started.append(kind(*arguments))
        return started[-1]

    yield make
    for one in started:
        one.process.kill()
        one.process.communicate()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Mount a small tmpfs; skips where that is not allowed."""
    mounted = []

    def make(options: str) -> Path:
        target = tmp_path / f"mounted{len(mounted)}"
        target.mkdir()
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(target)], capture_output=True, check=False
        )
        if done.returncode:
            pytest.skip("no permission to mount")
        mounted.append(target)
        return target

    yield make
    for target in mounted:
        subprocess.run(["umount", "-l", str(target)], check=True)
