"""The fleet page as text: for tickets and scripts."""

from __future__ import annotations

import msgspec
import pytest

from kvscope.tui.once import once_text

from . import frames


@pytest.mark.parametrize("width", [80, 100, 160, 240])
def test_it_is_the_page_with_the_answers_figures(width: int) -> None:
    text = once_text(frames.frame(), width)
    lines = text.split("\n")
    assert all(len(line) <= width for line in lines)
    assert "58 % of TTFT is coordination wait" in text
    assert "120 first tokens" in text
    assert "p50   180.0  p90   410.0  p99   760.0" in text
    assert "0.40 requests/s" in text
    order = [
        "kvscope top · 5 min",
        "58 %",
        "Not right",
        "first tokens",
        "p0-50",
        "steps by share",
        "by connector",
        "by pair",
        "trend",
    ]
    places = [text.index(part) for part in order]
    assert places == sorted(places)
    for row in frames.answers()["fleet_steps"].dicts():
        line = next(line for line in lines if line.startswith(f"{row['step']} "))
        assert f"{row['p50_ms']:.1f}" in line
        assert f"{row['p99_ms']:.1f}" in line


def test_the_title_says_of_what_it_is() -> None:
    frame = frames.frame(where=["connector=push", "d_engine=decode-0"], label="bench")
    title = " ".join(once_text(frame, 240, source="http://127.0.0.1:9177").split("\n")[0].split())
    assert "5 min up to 2027-01-15 08:00:00.000 UTC" in title
    assert "label bench" in title
    assert "filter connector=push d_engine=decode-0" in title
    assert "live from http://127.0.0.1:9177" in title
    earlier = msgspec.structs.replace(frame, figures_at_ns=frames.NOW - 2 * frames.S)
    assert "5 min up to 2027-01-15 07:59:58.000 UTC" in once_text(earlier, 240), "the figures' own window"
    past = once_text(
        msgspec.structs.replace(frame, live=False, label="", where=[]), 240, source="store.duckdb"
    )
    assert "history of store.duckdb" in past
    assert "label production" in past
    assert "filter none" in past


def test_problems_and_findings_come_before_the_verdict() -> None:
    text = once_text(frames.frame(problems=["25 events lost"], findings=[frames.FINDING]))
    assert text.index("! 25 events lost") < text.index("! 2 requests wait for decode-1: restart decode-1")
    assert text.index("! 2 requests") < text.index("% of TTFT")


def test_it_is_the_same_every_time_and_has_no_control_characters() -> None:
    hostile = "evil\x1b]0;title\x07\r\nid\u202e"
    frame = frames.frame(where=[hostile], label=hostile, problems=[hostile], kvscope=hostile)
    text = once_text(frame, source=hostile)
    assert text == once_text(frame, source=hostile)
    assert all(line.isprintable() for line in text.split("\n"))
    assert text.endswith("\n")
    assert not any(line.endswith(" ") for line in text.split("\n"))


def test_without_data_it_says_what_to_do() -> None:
    text = once_text(frames.empty())
    assert "No engine is instrumented" in text
    assert "KVSCOPE_ENABLE=1" in text
    assert "%" not in text
