"""The report in Chromium: nothing from elsewhere, nothing wrong, readable on a phone and in print."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvscope import cli

from ..cli import rows
from .browser import Page, page
from .made import store
from .test_report import HOSTILE, many

ROOT = Path(__file__).parents[2]
CSS = ROOT / "analysis" / "report" / "report.css"
DOCS = ROOT / "docs"
MOST_BYTES = 250_000
"""Of the picture in the docs."""


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with page(tmp_path_factory.mktemp("browser")) as one:
        yield one


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of all kinds of rows, and of texts that are long, wide or hostile."""
    folder = tmp_path_factory.mktemp("page")
    evil = [row | {"id": row["id"] + 500, "client_id": text, "p_engine": text, "d_engine": "W" * 200}
            for row, text in zip(many(5, 3), HOSTILE, strict=True)]  # fmt: skip
    db = store(
        folder / "store.duckdb",
        [*rows.STORED, *many(60), *evil],
        engines=rows.ENGINES,
        leases=rows.LEASES,
        failures=rows.FAILURES,
    )
    path = folder / "incident.html"
    assert cli.main(["report", "--db", str(db), "-o", str(path)]) == 0
    return path


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [375, 1280])
def test_it_opens_without_a_request_or_a_complaint_and_fits(
    html: Path, width: int, dark: bool, tab: Page
) -> None:
    tab.open(html, width, dark)
    assert tab.requests == [html.absolute().as_uri()]
    assert tab.complaints == []
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    wide = """[...document.querySelectorAll('body *')].filter(one => !one.closest('.scroll, .skip')
        && one.getBoundingClientRect().right > innerWidth + 1).map(one => one.outerHTML.slice(0, 99))"""
    assert tab.evaluate(wide) == []
    colour = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert colour == ("rgb(20, 23, 27)" if dark else "rgb(255, 255, 255)")


def test_a_page_that_asks_for_more_would_be_found(html: Path, tmp_path: Path, tab: Page) -> None:
    """The test above sees a request, and the page's own policy stops it."""
    text = html.read_text()
    bad = '<img src="http://127.0.0.1:9/x.png"><script>1</script>'
    free = tmp_path / "free.html"
    free.write_text(re.sub(r"<meta http-equiv[^>]*>", "", text).replace("<main>", f"<main>{bad}"))
    tab.open(free, 375)
    assert len(tab.requests) > 1
    held = tmp_path / "held.html"
    held.write_text(text.replace("<main>", f"<main>{bad}"))
    tab.open(held, 375)
    assert [one for one in tab.complaints if "Content Security Policy" in one]


def test_texts_in_figures_neither_leave_them_nor_overlap(html: Path, tab: Page) -> None:
    tab.open(html, 375)
    overlaps = """[...document.querySelectorAll('svg.figure')].flatMap(svg => {
        const right = svg.getBoundingClientRect().right + 1;
        const texts = [...svg.querySelectorAll('text.name, text.value')];
        const boxes = texts.map(one => one.getBoundingClientRect());
        return texts.filter((one, i) => boxes[i].right > right || boxes[i].left < -1
            || boxes.some((box, j) => j > i && box.top === boxes[i].top
                && box.left < boxes[i].right && boxes[i].left < box.right)).map(one => one.textContent);
    })"""
    assert tab.evaluate(overlaps) == []


def test_print_opens_all_details_and_cuts_no_figure(html: Path, tab: Page) -> None:
    closed = """[...document.querySelectorAll('details')].filter(one =>
        [...one.children].some(part => !part.checkVisibility())).length"""
    tab.open(html, 700)
    assert tab.evaluate(closed) > 5
    tab.open(html, 700, media="print")
    assert tab.evaluate(closed) == 0
    assert tab.evaluate("document.documentElement.scrollWidth") <= 700
    breaks = "[...document.querySelectorAll('figure')].map(one => getComputedStyle(one).breakInside)"
    assert set(tab.evaluate(breaks)) == {"avoid"}
    pdf = tab.pdf()
    assert pdf.startswith(b"%PDF")
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) > 3


def test_a_screen_reader_gets_headings_figures_and_tables(html: Path, tab: Page) -> None:
    tab.open(html, 375)
    tree = tab.tree()
    roles = {role for role, _ in tree}
    assert {"banner", "main", "navigation", "contentinfo"} <= roles
    named = {(role, name) for role, name in tree}
    assert ("heading", "Verdict") in named
    assert ("image", "What TTFT is made of, by band") in named
    assert ("table", "Bands of TTFT") in named
    assert ("columnheader", "mean ms") in named
    assert ("rowheader", "p50-90") in named
    unnamed = [role for role, name in tree if role in ("image", "table", "region", "navigation") and not name]
    assert unnamed == []


def test_the_docs_show_a_small_picture_of_it() -> None:
    picture = DOCS / "pictures" / "report.png"
    assert "](pictures/report.png)" in (DOCS / "report.md").read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size <= MOST_BYTES


# --- colours -----------------------------------------------------------------------------------------


def _schemes() -> list[dict[str, str]]:
    """The colours of light, dark and print, by name."""
    blocks = re.findall(r":root \{(.*?)\}", CSS.read_text(), flags=re.DOTALL)
    return [dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block)) for block in blocks]


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    darker, lighter = sorted((_luminance(one), _luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def test_colours_have_the_contrast_of_wcag_aa() -> None:
    schemes = _schemes()
    assert len(schemes) == 3
    texts = [("ink", "page"), ("ink", "box"), ("soft", "page"), ("link", "page"), ("warn", "warn-box")]
    shapes = [(name, "page") for name in ("compute", "capacity", "transfer", "coordination", "unknown")]
    for scheme in schemes:
        low = {pair: _contrast(scheme[pair[0]], scheme[pair[1]]) for pair in texts}
        assert min(low.values()) >= 4.5, low
        low = {pair: _contrast(scheme[pair[0]], scheme[pair[1]]) for pair in shapes}
        assert min(low.values()) >= 3, low
