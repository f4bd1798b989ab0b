"""What is told afterwards of requests that two real engines served."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from kvscope import cli
from kvscope.analysis.report.parts import shown

from ..analysis import browser, html_check
from .conftest import Scene
from .test_engines import every_mode

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]


@every_mode
def test_its_report_opens_and_its_figures_are_those_of_the_queries(
    scene: Scene, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arrived = [row["arrived_at_ns"] for row in scene.rows(scene.results)]
    window = ("--since", str(min(arrived)), "--until", str(max(arrived) + 1))
    html, answers = tmp_path / "report.html", tmp_path / "report.json"
    for path in (html, answers):
        arguments = ["report", "--url", scene.collector.url, *window, "--label", "test", "-o", str(path)]
        assert cli.main(arguments) == 0
        capsys.readouterr()

    told = json.loads(answers.read_bytes())["answers"]
    rows: dict[str, list[dict[str, Any]]] = {}
    for name, answer in told.items():
        assert cli.main([*shlex.split(answer["command"])[1:], "--format", "json"]) == 0, name
        rows[name] = [
            dict(zip(answer["columns"], row, strict=True))
            for row in json.loads(capsys.readouterr().out)["rows"]
        ]
        if name == "unseen":  # of how many events: the engines go on recording
            assert [row[:3] for row in answer["rows"]] == [list(row.values())[:3] for row in rows[name]]
        elif name != "engines":
            assert [list(row.values()) for row in rows[name]] == answer["rows"], name
    assert rows["fleet"][0]["requests"] == len(arrived)

    tables = html_check.read(html.read_text()).tables
    steps = ("step", "class", "requests", "share_percent", "mean_ms", "p50_ms", "p90_ms", "p99_ms")
    assert tables["Steps of all connectors"][1:] == [
        [shown(row[name]) for name in steps] for row in rows["fleet_steps"]
    ]
    slowest = tables["The longest TTFT"][1:]
    assert [row[0] for row in slowest] == [row["id"] for row in rows["slowest"]]

    with browser.page(tmp_path) as tab:
        for width in (375, 1280):
            tab.open(html, width)
            assert tab.requests == [html.as_uri()]
            assert tab.complaints == []
            assert tab.evaluate("document.documentElement.scrollWidth") <= width
            assert tab.evaluate("document.querySelectorAll('svg.figure').length") > 5
