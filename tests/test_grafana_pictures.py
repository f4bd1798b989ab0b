"""The pictures of the Grafana dashboards in docs/pictures: one of each, shown and small."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs" / "pictures"
PROGRAM = ROOT / "docs" / "grafana_pictures"
DASHBOARDS = sorted((ROOT / "dashboards" / "grafana").glob("*.json"))
MOST_BYTES = 250_000


def test_every_dashboard_has_its_picture_and_the_page_about_them_shows_it() -> None:
    wanted = {f"grafana-{path.stem.removeprefix('kvscope-')}.png" for path in DASHBOARDS}
    assert {path.name for path in PICTURES.glob("grafana-*.png")} == wanted
    shown = re.findall(r"\]\(pictures/(grafana-\w+\.png)\)", (ROOT / "docs" / "grafana.md").read_text())
    assert sorted(shown) == sorted(wanted)


@pytest.mark.parametrize("path", sorted(PICTURES.glob("grafana-*.png")), ids=lambda path: path.stem)
def test_a_picture_of_a_dashboard_is_small(path: Path) -> None:
    assert path.read_bytes().startswith(b"\x89PNG")
    assert path.stat().st_size <= MOST_BYTES


def test_the_type_of_every_panel_can_be_drawn() -> None:
    (line,) = re.findall(r"DRAWN = \{(.*)\}", (PROGRAM / "panels.jsx").read_text())
    drawn = {"row", *re.findall(r"(\w+):", line)}
    for path in DASHBOARDS:
        panels = json.loads(path.read_text())["panels"]
        inner = [one for panel in panels for one in panel.get("panels") or ()]
        assert {panel["type"] for panel in [*panels, *inner]} <= drawn, path.name


def test_the_libraries_are_those_of_the_lock_file_which_names_no_address() -> None:
    wanted = json.loads((PROGRAM / "package.json").read_text())["dependencies"]
    locked = json.loads((PROGRAM / "package-lock.json").read_text())["packages"]
    assert locked[""]["dependencies"] == wanted
    for name, version in wanted.items():
        assert locked[f"node_modules/{name}"]["version"] == version
    assert not [name for name, one in locked.items() if "resolved" in one]
