"""The page Engines: what engines run and do, what is wrong with them, and nothing that is not known."""

from __future__ import annotations

from typing import Any

import pytest
from textual.app import App, ComposeResult

from kvscope.frame import Engine
from kvscope.samples import KINDS, Sample
from kvscope.tui.lines import plain, width
from kvscope.tui.page import LinesView
from kvscope.tui.pages import engine as one_engine
from kvscope.tui.pages import grid
from kvscope.tui.pages.engine import Group, detail_lines, groups, held
from kvscope.tui.pages.engines import EnginesPage, blocks_bar, columns, header, marks
from kvscope.tui.table import LiveTable, lay_out
from kvscope.tui.view import View

from . import frames
from .frames import NOW, D, P, S

PAIRS = [{"level": "pair", "p_engine": P, "d_engine": D}]
FINGERPRINT: dict[str, Any] = {
    "vllm": "0.32.0",
    "nixl": "1.5.1",
    "torch": "2.13.0",
    "model": "tiny",
    "connector": "NixlPushConnector",
    "transfer_mode": "push",
    "kv_role": "kv_producer",
    "nixl_backends": ["UCX", "LIBFABRIC"],
    "extra_config": {"kv_lease_duration": 30, "enforce_handshake_compat": False},
    "block_size": 16,
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 1,
    "max_num_seqs": 64,
    "async_scheduling": True,
}


def ring(name: str = P, source: str = "scheduler", rank: int = 0, **changes: Any) -> Engine:
    number = {"scheduler": 100, "worker": 101}[source] + rank
    fields = {
        "source": source, "rank": rank, "pid": number, "ring": f"{name}-{source}-{rank}",
        "state": "recording", "fingerprint": FINGERPRINT,
    }  # fmt: skip
    return frames.engine(name, **{**fields, **changes})


def sample(
    name: str, value: float, engine: str = P, source: str = "", rank: int = 0, label: str = ""
) -> Sample:
    assert name in KINDS
    return Sample(NOW, "node-a", engine, source, rank, name, label, value)


SAMPLES = [
    sample("kv_blocks.total", 1000),
    sample("kv_blocks.running", 400),
    sample("kv_blocks.staging", 100),
    sample("kv_blocks.kept", 250),
    sample("vllm.kv_cache_usage", 0.81),
    sample("vllm.running", 7),
    sample("vllm.waiting", 5, label="capacity"),
    sample("vllm.waiting", 3, label="deferred"),
    sample("vllm.kv_fetch", 2, label="in_progress"),
    sample("engine.steps_per_s", 41.25, source="scheduler"),
    sample("engine.step_ns", 24_300_000, source="scheduler"),
    sample("engine.step_tokens", 131, source="scheduler"),
    sample("engine.hook_share", 0.0031, source="scheduler"),
    sample("engine.hook_share", 0.0125, source="worker"),
    sample("process.cpu", 0.75, source="scheduler"),
    sample("process.cpu", 1.5, source="worker"),
    sample("process.rss_bytes", 2e9, source="worker"),
    sample("thread.cpu", 0.9, source="worker", label="VLLM::Worker"),
    sample("thread.cpu", 0.125, source="worker", label="nixl-push-write"),
    sample("host.cpu", 3.9, engine=""),
    sample("host.cores", 4, engine=""),
    sample("host.run_queue", 11, engine=""),
    sample("host.memory_available_bytes", 8e9, engine=""),
    sample("host.nic_rx_bytes_per_s", 2.5e6, engine="", label="eth0"),
    sample("host.nic_tx_bytes_per_s", 40e6, engine="", label="eth0"),
]
RINGS = [ring(), ring(source="worker")]


def group(rings: list[Engine] | None = None, samples: list[Sample] | None = None) -> Group:
    (made,) = groups(RINGS if rings is None else rings, SAMPLES if samples is None else samples, PAIRS)
    return made


def text(made: Group, cells: int = 160) -> str:
    return "\n".join(plain(line) for line in detail_lines(made, cells))


def cells(made: Group, room: int = 240) -> dict[str, str]:
    found = {}
    for column, _, size in lay_out(columns(), room):
        cell = column.cell(made, size)
        found[column.name] = cell if isinstance(cell, str) else plain(cell)
    return found


def test_the_figures_are_those_of_the_samples() -> None:
    found = cells(group())
    assert (found["role"], found["state"]) == ("P", "recording")
    assert (found["running"], found["waiting"]) == ("7", "8")
    assert (found["step"], found["tokens"], found["hooks"]) == ("24.3", "131", "0.31%")
    assert (found["cpu"], found["memory"], found["use"]) == ("2.25", "2 GB", "75%")
    assert found["connector"] == "NixlPushConnector"


def test_the_detail_tells_all_of_it() -> None:
    said = text(group())
    assert "vllm 0.32.0, nixl 1.5.1, kvscope 0.1.0, torch 2.13.0" in said
    assert "NixlPushConnector, role kv_producer, backends UCX+LIBFABRIC" in said
    assert "kv_lease_duration=30, enforce_handshake_compat=off" in said
    assert "block size 16, TP 2, PP 1, max_num_seqs 64, async scheduling on" in said
    assert "400 running, 100 staging, 250 kept, 250 free or cached of 1,000; vLLM says 81% in use" in said
    assert "7 running, 8 waiting (5 capacity, 3 deferred), 2 fetching KV (2 in progress)" in said
    assert "41.2/s, 24.3 ms each, 131 tokens in each" in said
    assert "node-a: 3.9 of 4 cores busy, run queue 11, 8 GB memory to be had" in said
    assert "eth0 2.5 MB/s in, 40 MB/s out" in said
    assert "threads of worker 0, cores: nixl-push-write 0.12, VLLM::Worker 0.90" in said


def test_a_run_queue_longer_than_the_cores_is_a_warning() -> None:
    lines = detail_lines(group(), 160)
    warned = [plain(line) for line in lines if any(style == "warn" for _, style in line)]
    assert any("run queue 11 on 4 cores" in line for line in warned)
    calm = [s for s in SAMPLES if s.name != "host.run_queue"] + [sample("host.run_queue", 4, engine="")]
    assert "run queue 4" in text(group(samples=calm))
    assert "wait for a core" not in text(group(samples=calm))


def test_what_is_not_known_is_blank_and_not_zero() -> None:
    made = group(samples=[])
    found = cells(made)
    for name in ("blocks", "use", "running", "waiting", "step", "tokens", "hooks", "cpu", "memory"):
        assert found[name] == "", name
    said = text(made)
    for word in ("KV blocks", "requests", "steps", "host", "network", "threads"):
        assert not any(line.startswith(word) for line in said.splitlines()), word
    bare = text(group([ring(fingerprint={}, kvscope="")], []))
    assert "None" not in bare
    assert "versions" not in bare


def test_zero_is_shown_where_it_is_known() -> None:
    found = cells(group(samples=[sample("vllm.running", 0), sample("vllm.waiting", 0)]))
    assert (found["running"], found["waiting"]) == ("0", "0")


def test_blocks_by_use() -> None:
    bar = blocks_bar(group().blocks(), 20)
    assert bar == [("█" * 8, "compute"), ("▒" * 2, "transfer"), ("░" * 5, "coordination"), ("·" * 5, "dim")]
    assert held(group().blocks()) == 0.75
    total_only = group(samples=[sample("kv_blocks.total", 10)])
    assert held(total_only.blocks()) is None
    assert blocks_bar(None, 20) == []
    over = blocks_bar({"total": 10, "running": 9, "kept": 9}, 20)
    assert width(over) == 20


@pytest.mark.parametrize(
    ("pairs", "role", "expected"),
    [
        (PAIRS, None, "P"),
        ([*PAIRS, {"p_engine": D, "d_engine": P}], None, "P+D"),
        ([], "kv_producer", "P"),
        ([], "kv_consumer", "D"),
        ([], "kv_both", ""),
    ],
)
def test_roles(pairs: list[dict[str, Any]], role: str | None, expected: str) -> None:
    (made,) = groups([ring(fingerprint={"kv_role": role})], [], pairs)
    assert made.role == expected


def test_versions_that_differ_are_marked() -> None:
    other = ring(D, fingerprint={**FINGERPRINT, "vllm": "0.33.0"})
    made = {g.name: g for g in groups([*RINGS, other], [], PAIRS)}
    assert marks(made[P]) == marks(made[D]) == "≠"
    assert "vllm 0.33.0 ≠" in text(made[D])
    assert "not the same in all engines: vllm" in text(made[D])
    over = {g.name: g for g in groups([*RINGS, other, ring("old", state="ended")], [], PAIRS)}["old"]
    assert marks(over) == ""
    assert "≠" not in text(over)
    ended = ring(D, fingerprint={**FINGERPRINT, "vllm": "0.33.0"}, state="ended")
    assert all(marks(g) == "" for g in groups([*RINGS, ended], [], PAIRS)), "what is over differs in vain"


def test_losses_and_missing_hooks_are_marked() -> None:
    made = group([ring(lost=25, torn=1, rejected=2), ring(source="worker", hooks_missing=["on_new_request"])])
    assert marks(made) == "hL"
    said = text(made)
    assert "missing: on_new_request; their steps are unknown" in said
    line = next(line for line in said.splitlines() if line.startswith("scheduler 0"))
    assert line.split()[-4:] == ["5,000", "25", "1", "2"]


def test_engines_that_are_over_come_last_and_dim() -> None:
    found = groups(
        [
            ring("a", state="ended"), ring("b", state="gone", state_detail="killed"), ring("c"),
            ring("d", state="stopped", state_detail="disk full"), ring("d", source="worker"),
        ],
        [], [],
    )  # fmt: skip
    assert [(g.name, g.state) for g in found] == [
        ("c", "recording"), ("d", "stopped"), ("b", "gone"), ("a", "ended"),
    ]  # fmt: skip
    assert [g.over for g in found] == [False, False, True, True]
    assert "disk full" in text(found[1])
    head = plain(header(found, 120)[0])
    assert head.startswith("2 engines record, 2 over")


def test_a_restarted_engine_is_shown_as_it_is_now() -> None:
    before = ring(state="gone", started_at_ns=NOW - 100 * S, pid=1, lost=99)
    made = group([before, ring(started_at_ns=NOW - 10 * S, pid=2)])
    assert (made.state, [r.pid for r in made.rings], made.lost) == ("recording", [2], 0)


def test_one_process_with_two_rings_uses_its_cpu_once() -> None:
    both = [ring(pid=7), ring(source="worker", pid=7)]
    samples = [sample("process.cpu", 1.5, source=source) for source in ("scheduler", "worker")]
    assert cells(group(both, samples))["cpu"] == "1.50"


def test_of_many_ranks_the_slowest_step_and_all_processes() -> None:
    rings = [ring(source="worker", rank=rank) for rank in range(40)]
    samples = [sample("engine.step_ns", (rank + 1) * 1e6, source="worker", rank=rank) for rank in range(40)]
    made = group(rings, samples)
    assert cells(made)["step"] == "40.0"
    assert f"and {40 - one_engine.MAX_PROCESSES} processes more" in text(made)


@pytest.mark.parametrize("room", [80, 100, 160, 240])
def test_it_fits_and_is_plain_text(room: int) -> None:
    evil = ring(
        "evil\x1b[31m\n日本語" * 9, host="h\x07" * 40, state_detail="x\x1b]0;y\x07",
        hooks_missing=["on\x9b"], kvscope="\x1b[2J", label="l\n",
        fingerprint={**FINGERPRINT, "extra_config": {"a\x1b[0m": "b\n" * 200}, "model": "m\r" * 100},
    )  # fmt: skip
    (made,) = groups([evil], [sample("thread.cpu", 1, evil.engine, "scheduler", label="t\x1b")], [])
    for line in [*detail_lines(made, room), *header([made], room)]:
        assert width(line) <= room
        assert plain(line).isprintable()
    for column, _, size in lay_out(columns(), room - 1):
        cell = column.cell(made, size)
        assert isinstance(cell, str) or plain(cell).isprintable()


def test_how_full_the_kv_blocks_are_is_told_at_80_columns() -> None:
    shown = [column.name for column, _, _ in lay_out(columns(), 80 - 1)]
    assert {"blocks", "use", "running", "waiting", "step"} <= set(shown)


class Alone(App[None]):
    def compose(self) -> ComposeResult:
        yield EnginesPage()


@pytest.mark.anyio
async def test_the_detail_is_of_the_chosen_engine() -> None:
    app = Alone()
    async with app.run_test(size=(100, 24)) as pilot:
        view = View(clock=lambda: 0.0)
        view.apply(frames.frame(engines=[*RINGS, ring(D)], samples=SAMPLES))
        page = app.query_one(EnginesPage)
        page.show(view)
        table = app.query_one(LiveTable)
        table.focus()
        await pilot.pause()
        detail = page.query_one("#engine", LinesView)

        def first() -> str:
            return next(plain(line) for line in detail.lines if line)

        shown = [table.rows[0].name, table.rows[1].name]
        assert first().startswith(shown[0])
        await pilot.press("down")
        await pilot.pause()
        assert first().startswith(shown[1])
        view.told(
            "leases",
            frames.answer(*({"engine": name, "lease_end": "expired", "leases": 3} for name in shown)),
        )
        page.show(view)
        assert any("leases     3 expired" in plain(line) for line in detail.lines)


def test_how_leases_ended_is_told_of_the_engine_that_kept_the_blocks() -> None:
    """And how close to the deadline those came that did not expire."""
    answer = frames.answer(
        {"engine": P, "lease_end": "released", "leases": 40, "min_margin_ms": 800.0},
        {"engine": P, "lease_end": "expired", "leases": 3, "min_margin_ms": -0.2},
        {"engine": P, "lease_end": None, "leases": 2, "min_margin_ms": None},
        {"engine": D, "lease_end": "expired", "leases": 9, "min_margin_ms": -0.2},
    )
    line = next(
        line for line in detail_lines(group(), 120, grid.rows_of(answer)) if plain(line).startswith("leases")
    )
    assert plain(line) == "leases     40 released (800 ms left at least), 3 expired, 2 held"
    assert line[1][1] == "warn"


def test_nothing_chosen_draws_nothing() -> None:
    assert detail_lines(None, 80) == []
