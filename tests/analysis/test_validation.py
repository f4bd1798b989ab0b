"""How `make validate-whatif` compares, and what it keeps of it."""

from __future__ import annotations

from typing import Any

import pytest

from kvscope.analysis import whatif
from kvscope.demo.engines import EngineError
from kvscope.demo.validate_whatif import compared, described

MS = 1_000_000


def turn(mode: str, ttft_ms: list[float], predicted_ms: list[float | None]) -> list[dict[str, Any]]:
    column, other = f"predicted_{'pull' if mode == 'push' else 'push'}_ttft_ns", f"predicted_{mode}_ttft_ns"
    return [
        {"ttft_ns": round(t * MS), column: None if p is None else round(p * MS), other: None}
        for t, p in zip(ttft_ms, predicted_ms, strict=True)
    ]


def test_each_mode_is_held_against_what_the_other_one_measured() -> None:
    rows = {
        "push": [
            turn("push", [80, 100, 120], [110, 130, 150]),
            turn("push", [100, 100, 100], [120, 120, 120]),
        ],
        "pull": [
            turn("pull", [125, 125, 125], [90, 90, None]),
            turn("pull", [150, 150, 150], [100, 100, 100]),
        ],
    }
    push, pull = compared(rows)
    assert (push["scenario"], push["requests"]) == ("push", 5)
    assert (push["base_p50_ms"], push["predicted_p50_ms"], push["measured_p50_ms"]) == (137.5, 100, 100)
    assert push["error_percent"] == 0
    assert push["error_by_turn_percent"] == [-10, 0]
    assert pull["error_percent"] == round(100 * (120 / 137.5 - 1), 1)
    assert pull["error_by_turn_percent"] == [4, -20]


def test_a_mode_without_predictions_is_no_success() -> None:
    rows = {"push": [turn("push", [80], [90])], "pull": [turn("pull", [90], [None])]}
    with pytest.raises(EngineError, match="predicted_push"):
        compared(rows)


def test_what_is_kept_says_when_and_how() -> None:
    found = described(3, 40, 1, 0.5)
    assert "3 turns of 40 requests" in found["how"]
    assert {"measured_at", "kvscope", "vllm", "nixl", "load_average"} <= found.keys()


def test_the_figures_of_the_package_are_whole_where_there_are_any() -> None:
    found = whatif.figures()
    for figure in found.get("scenarios", ()):
        assert figure["scenario"] in ("push", "pull")
        about = whatif.validated(figure["scenario"])
        assert about is not None
        assert all(value is not None for value in about.values())
