"""The dashboards' JSON has Grafana's own types: `tsc` against @grafana/schema says so."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvscope.dashboards.expressions import panels

ROOT = Path(__file__).parent.parent.parent
SCHEMA = Path(__file__).parent / "schema"
GRAFANA = ROOT / "dashboards" / "grafana"
CACHE = ROOT / "build" / "grafana-schema"
INSTALL_S, CHECK_S = 120, 120

Json = dict[str, Any]


class Compiler:
    """TypeScript's, with Grafana's types, in a folder that is kept from one run to the next."""

    def __init__(self) -> None:
        lock = SCHEMA / "package-lock.json"
        installed = CACHE / "installed-from"
        if not installed.exists() or installed.read_bytes() != lock.read_bytes():
            CACHE.mkdir(parents=True, exist_ok=True)
            for name in ("package.json", "package-lock.json"):
                shutil.copy(SCHEMA / name, CACHE / name)
            command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
            done = subprocess.run(command, cwd=CACHE, capture_output=True, text=True, timeout=INSTALL_S)
            assert done.returncode == 0, f"npm can't install {lock}: {done.stderr[-1000:]}"
            shutil.copy(lock, installed)

    def complaints(self, folder: Path, declarations: Iterator[tuple[str, Json]]) -> list[str]:
        """What is wrong with values that should have these types (of types.ts)."""
        lines = ["import type * as t from './types';"]
        lines += [
            f"export const value{number}: t.{type_} = {json.dumps(value)};"
            for number, (type_, value) in enumerate(declarations)
        ]
        shutil.copy(SCHEMA / "types.ts", folder / "types.ts")
        (folder / "node_modules").symlink_to(CACHE / "node_modules")
        (folder / "check.ts").write_text("\n".join(lines) + "\n")
        command = [str(CACHE / "node_modules" / ".bin" / "tsc"), "--noEmit", "--strict", "--skipLibCheck"]
        command += ["--module", "esnext", "--moduleResolution", "bundler", "--pretty", "false", "check.ts"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=CHECK_S)
        assert done.returncode in (0, 1, 2), done.stderr
        return done.stdout.splitlines()


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    if shutil.which("npm") is None:
        pytest.skip("there is no npm, which brings Grafana's types")
    return Compiler()


def declarations(dashboard: Json) -> Iterator[tuple[str, Json]]:
    """(type, value) of all that a dashboard consists of."""
    apart = ("panels", "templating")
    yield "Dashboard", {name: value for name, value in dashboard.items() if name not in apart}
    yield from (("Variable", variable) for variable in dashboard["templating"]["list"])
    yield from (("Row", panel) for panel in dashboard["panels"] if panel["type"] == "row")
    yield from (("Panel", panel) for panel in panels(dashboard))


def test_a_key_or_a_value_that_grafana_does_not_know(compiler: Compiler, tmp_path: Path) -> None:
    everything = [
        declared
        for path in sorted(GRAFANA.glob("*.json"))
        for declared in declarations(json.loads(path.read_text()))
    ]
    assert len(everything) > 150
    assert compiler.complaints(tmp_path, iter(everything)) == []


def wrong_option(panel: Json) -> None:
    panel["options"]["legend"]["colourMode"] = "value"


def wrong_enum(panel: Json) -> None:
    panel["options"]["tooltip"]["mode"] = "mulit"


def wrong_type(panel: Json) -> None:
    panel["fieldConfig"]["defaults"]["unit"] = 5


def wrong_custom(panel: Json) -> None:
    panel["fieldConfig"]["defaults"]["custom"]["stacking"]["mode"] = "nromal"


def wrong_override(panel: Json) -> None:
    panel["fieldConfig"]["overrides"][0]["properties"][0]["value"]["mode"] = "fix"


def wrong_query(panel: Json) -> None:
    panel["targets"][0]["legend"] = "{{class}}"


def wrong_panel(panel: Json) -> None:
    panel["gridpos"] = panel.pop("gridPos")


WRONG: list[Callable[[Json], None]] = [
    wrong_option,
    wrong_enum,
    wrong_type,
    wrong_custom,
    wrong_override,
    wrong_query,
    wrong_panel,
]


def test_what_is_wrong_is_caught(compiler: Compiler, tmp_path: Path) -> None:
    dashboard = json.loads((GRAFANA / "kvscope-overview.json").read_text())
    good = next(panel for panel in panels(dashboard) if panel["title"] == "Shares of TTFT by class")
    bad = [copy.deepcopy(good) for _ in WRONG]
    for change, panel in zip(WRONG, bad, strict=True):
        change(panel)
    complaints = compiler.complaints(tmp_path, (("Panel", panel) for panel in bad))
    # One line for each declaration; the first is the import.
    caught = {
        int(line.split("(")[1].split(",")[0]) - 2 for line in complaints if line.startswith("check.ts(")
    }
    assert [change.__name__ for i, change in enumerate(WRONG) if i not in caught] == []
