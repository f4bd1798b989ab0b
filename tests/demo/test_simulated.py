"""`kvscope demo --simulate`: the whole path without engines, and said to be so."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "kvscope.cli", "demo", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("mode", ["push", "pull", "bidirectional"])
def test_it_shows_where_the_time_went_and_that_it_is_simulated(mode: str) -> None:
    before = set(os.listdir("/dev/shm"))
    done = demo("--simulate", "--mode", mode, "--requests", "9")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SIMULATED") >= 2
    assert "Steps on the critical path" in done.stdout
    assert "coordination wait" in done.stdout
    assert " = TTFT" in done.stdout
    assert not {name for name in set(os.listdir("/dev/shm")) - before if name.startswith("kvs-")}


def test_json_counts_every_request_and_sums_up() -> None:
    done = demo("--simulate", "--mode", "push", "--sequential", "--requests", "12", "--json")
    found = json.loads(done.stdout)
    assert "SIMULATED" in found["data"]
    columns = [column["name"] for column in found["ttft"]["columns"]]
    (row,) = (dict(zip(columns, values, strict=True)) for values in found["ttft"]["rows"])
    assert row["requests"] == 12
    parts = ("compute_ms", "capacity_ms", "transfer_ms", "coordination_ms", "unknown_ms")
    assert sum(row[part] for part in parts) == pytest.approx(row["mean_ms"], abs=0.01)
    assert found["slowest"]["request"]["lead_ns"] < 0, "sequential push lags"


@pytest.mark.parametrize(
    "arguments",
    [("--requests", "0"), ("--requests", "many"), ("--mode", "sideways"), ("--mode", "pull", "--sequential")],
)
def test_wrong_arguments_are_one_line_and_exit_code_2(arguments: tuple[str, ...]) -> None:
    done = demo("--simulate", *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "kvscope demo: error:" in done.stderr.splitlines()[-1]


def test_without_engines_it_says_how_to_get_them_or_do_without() -> None:
    hide = "import sys; sys.modules['vllm'] = None; from kvscope.cli import main; sys.exit(main(['demo']))"
    done = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "vllm is not installed" in done.stderr
    assert "--simulate" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
