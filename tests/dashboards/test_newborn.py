"""Counters without a series before their first event: panels count that event too (real promtool)."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvscope import metrics as m
from kvscope.dashboards.expressions import filled
from kvscope.dashboards.promql import grown, increase, series, total

from ..prometheus import tool

VALUES = {"traffic": "production", "engine": ".*", "__range": "5m"}
BORN_LATE = "_x18 1 1 1"
"""A sample every minute; the handshake came with the series."""
OLD = "7x20"
OLD_AND_GROWING = "7x18 9 9 9"
RESTARTED = "7x10 _ _ 0 0 0 0 0 2 2 2 2"
TWICE = "_x17 1 1 3 3"


def rose(expr: str, values: str, tmp_path: Path) -> float:
    """What `expr` gives at minute 20, of one engine with these samples; 0 where it gives nothing."""
    name = f'{m.HANDSHAKES.name}{{engine="d", traffic="production", result="ok"}}'
    test: dict[str, Any] = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values}],
        "promql_expr_test": [{"expr": filled(expr, VALUES), "eval_time": "20m", "exp_samples": []}],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "tests": [test]}))
    done = subprocess.run(
        [tool("promtool"), "test", "rules", path], capture_output=True, text=True, check=False
    )
    told = done.stdout + done.stderr
    if done.returncode == 0:
        return 0.0
    assert "got:" in told, told
    got = told.partition("got:")[2].splitlines()
    return float(next(line for line in got if line.strip()).split()[-1])


@pytest.mark.parametrize(
    ("values", "expected"), [(BORN_LATE, 1), (OLD, 0), (OLD_AND_GROWING, 2), (RESTARTED, 2), (TWICE, 3)]
)
def test_what_rose_in_the_window_also_from_nothing(values: str, expected: float, tmp_path: Path) -> None:
    found = rose(total(grown(series(m.HANDSHAKES)), "result"), values, tmp_path)
    assert found == pytest.approx(expected, rel=0.3)


def test_increase_alone_does_not_see_the_first_event(tmp_path: Path) -> None:
    """Why `grown` is there."""
    assert rose(increase(series(m.HANDSHAKES), "result"), BORN_LATE, tmp_path) == 0
