"""The pictures in docs/pictures: shown where they are said to be, and needing nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import io
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

ROOT = Path(__file__).parent.parent
PICTURES = sorted((ROOT / "docs" / "pictures").glob("*.svg"))
MOST_BYTES = 100_000


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def drawn() -> str:
    console = Console(record=True, width=40, file=io.StringIO())
    console.print("  in the middle  of it   ", style="bold red")
    console.print("plain < text & more")
    return console.export_svg(title="a title")


def texts(picture: str) -> list[tuple[float, float, str]]:
    """Where each piece of text stands, how long it is, and what it says."""
    return [
        (float(e.get("x") or 0), float(e.get("textLength") or 0), (e.text or "").replace("\xa0", " "))
        for e in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")
        if e.get("textLength")
    ]


def test_every_picture_is_shown_and_every_picture_shown_is_there() -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "pictures" / "README.md"]
    shown = {
        (page.parent / link).resolve()
        for page in pages
        for link in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())
    }
    assert {path.resolve() for path in PICTURES} == shown
    assert PICTURES


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_a_picture_needs_nothing_from_elsewhere_and_is_small(path: Path) -> None:
    picture = path.read_text()
    assert len(picture) < MOST_BYTES
    assert "@font-face" not in picture
    assert re.findall(r"https?://[^\s\"')]+", picture) == ["http://www.w3.org/2000/svg"]
    assert texts(picture)


def test_what_a_picture_loads_is_taken_out_and_its_text_stays_where_it_was() -> None:
    before, after = drawn(), loaded().self_contained(drawn())
    assert "@font-face" in before
    assert "@font-face" not in after
    assert "cdnjs" not in after

    def ends(picture: str) -> list[tuple[Any, Any, str]]:
        cell = loaded().CELL
        return [
            (
                pytest.approx(x + cell * (len(text) - len(text.lstrip()))),
                pytest.approx(length - cell * (len(text) - len(text.strip()))),
                text.strip(),
            )
            for x, length, text in texts(picture)
            if text.strip()
        ]

    assert len(texts(after)) == 2
    assert ends(before) == texts(after)
    assert loaded().self_contained(drawn()) == after
