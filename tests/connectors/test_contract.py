"""The contract check sees what is there, what is gone and what has changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from kvscope.connectors import contract, hooks


@pytest.fixture
def vllm(tmp_path: Path) -> Path:
    """A copy of the installed vLLM's connectors."""
    pytest.importorskip("vllm")
    source = contract.installed() / contract.CONNECTORS
    copy = tmp_path / "vllm" / contract.CONNECTORS
    copy.mkdir(parents=True)
    shutil.copy(source / "base.py", copy)
    shutil.copytree(source / "nixl", copy / "nixl", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def replace(vllm: Path, file: str, old: str, new: str) -> None:
    path = vllm / "vllm" / contract.CONNECTORS / "nixl" / file
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_installed_vllm_has_all_hooks(vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert contract.main([str(vllm)]) == 0
    table = capsys.readouterr().out
    assert all(hook.name in table for hook in hooks.HOOKS if hook.method != "get_finished")


def test_a_hook_that_is_gone_and_one_that_changed_fail_it(
    vllm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    replace(
        vllm,
        "base_worker.py",
        "def _handle_heartbeat(self, payload: str)",
        "def _on_beat(self, payload: str)",
    )
    replace(
        vllm,
        "pull_worker.py",
        "def _read_blocks_for_req(self, req_id: str,",
        "def _read_blocks_for_req(self, ids: str,",
    )
    assert contract.main([str(vllm), "--json"]) == 1
    broken = {f["name"]: f["state"] for f in json.loads(capsys.readouterr().out) if f["broken"]}
    assert broken == {"worker._handle_heartbeat": "missing", "worker._read_blocks_for_req": "changed"}


def test_an_optional_hook_may_be_missing(vllm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    replace(vllm, "pull_worker.py", "_is_turn2_read_expired", "_is_something_else")
    assert contract.main([str(vllm)]) == 0
    assert "worker._is_turn2_read_expired" in capsys.readouterr().out


def test_state_that_hooks_read_is_checked(vllm: Path) -> None:
    replace(vllm, "base_worker.py", "_reqs_to_send", "_leases")
    states = {finding.name: finding.state for finding in contract.check(vllm) if finding.broken}
    assert states == {"NixlBaseConnectorWorker._reqs_to_send": "missing"}


def test_a_folder_without_vllm_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert contract.main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(
    ("version", "supported"),
    [("0.24.0", True), ("0.33.1rc2", True), ("0.32.0+cpu", True), ("0.23.0", False), ("0.34.0", False),
     ("1.0", False), ("", False), ("dev", False)],
)  # fmt: skip
def test_supported_versions(version: str, supported: bool) -> None:
    assert hooks.is_supported(version) == supported
