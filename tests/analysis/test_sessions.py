"""`kvscope sessions`: conversations whose every figure is known."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvscope import cli, query
from kvscope.analysis.paging import Window
from kvscope.analysis.session_data import MIN_TURNS, TTLS_S, overall
from kvscope.client import StoreFile

from ..cli import rows
from .made import Row, store

MS, S = 1_000_000, 10**9
US_PER_TOKEN = 100
TTL_S = 60
D_ENGINE = rows.engine(
    2,
    "engine-d",
    "scheduler",
    fingerprint='{"block_size": 16, "extra_config": {"decoder_kv_blocks_ttl": 60}}',
)


def turn(
    number: int,
    at_s: float,
    *,
    session: int | None,
    place: int | None,
    outcome: str | None = None,
    offered: int | None = None,
    pulled: int = 0,
    wait_ms: float = 0,
    **columns: Any,
) -> Row:
    """A turn of 512 prompt tokens: what is not read back costs 100 us a token, then 20 ms to the first token
    and 80 ms more to the end."""
    computed_ms = (512 - pulled) * US_PER_TOKEN / 1e3
    start = wait_ms
    steps: list[tuple[Any, ...]] = [("prefill.reuse_dispatch", 0, wait_ms)] if wait_ms else []
    steps += [
        ("prefill.compute", start, start + computed_ms),
        ("registration.route", start + computed_ms, start + computed_ms + 20),
        ("decode.generate", start + computed_ms + 20, start + computed_ms + 100),
    ]
    return rows.request(
        number,
        *steps,
        **{
            "arrived_at_ns": rows.T0_NS + round(at_s * S),
            "connector": "bidirectional",
            "session": session,
            "turn": place,
            "reuse_outcome": outcome,
            "reuse_offered_tokens": offered,
            "reuse_pulled_tokens": pulled if outcome else None,
        }
        | columns,
    )


def lease(number: int, of: Row, held_s: float, end: str = "released", **columns: Any) -> Row:
    armed_ns = of["arrived_at_ns"] + of["ttft_ns"] + (of["decode_generate_ns"] or 0)
    return {
        "id": number,
        "request_id": of["id"],
        "engine": "engine-d",
        "rank": 0,
        "request": of["d_request"],
        "armed_at_ns": armed_ns,
        "deadline_at_ns": armed_ns + TTL_S * S,
        "renewals": 0,
        "ended_at_ns": armed_ns + round(held_s * S),
        "end": end,
    } | columns


def plain(count: int) -> list[Row]:
    """Requests that tell P's cost per token."""
    return [turn(5000 + i, 1000 + i, session=None, place=None) for i in range(count)]


def a_conversation(
    first: int, outcomes: list[tuple[str, int, int, float, float]]
) -> tuple[list[Row], list[Row]]:
    """Turns and the leases after them, from (outcome, offered, pulled, wait ms, pause s) of the later."""
    session = 2**63 + first
    turns = [turn(first, first, session=session, place=1)]
    leases = []
    for place, (outcome, offered, pulled, wait_ms, pause_s) in enumerate(outcomes, 2):
        before = turns[-1]
        end_s = (before["arrived_at_ns"] - rows.T0_NS + before["ttft_ns"] + before["decode_generate_ns"]) / S
        leases.append(lease(first * 100 + place, before, min(pause_s, TTL_S)))
        turns.append(
            turn(
                first + place,
                end_s + pause_s,
                session=session,
                place=place,
                outcome=outcome,
                offered=offered,
                pulled=pulled,
                wait_ms=wait_ms,
            )
        )
    leases.append(lease(first * 100 + 99, turns[-1], TTL_S, "expired"))
    return turns, leases


def asked(capsys: pytest.CaptureFixture[str], path: Path, *arguments: str) -> dict[str, Any]:
    assert cli.main(["sessions", "--db", str(path), "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.fixture
def one(tmp_path: Path) -> Path:
    """A conversation of four turns: read back after 2 s, below the threshold after 5, expired after 100."""
    turns, leases = a_conversation(
        10,
        [("pulled", 400, 400, 9.0, 2.0), ("below threshold", 32, 0, 0, 5.0), ("expired", 480, 0, 0, 100.0)],
    )
    return store(tmp_path / "s.duckdb", [*turns, *plain(MIN_TURNS)], leases=leases, engines=[D_ENGINE])


def test_tokens_and_why_they_were_not_read_back(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, one)
    sums = found["overall"]
    assert (sums["conversations"], sums["turns"], sums["later_turns"]) == (1, 4, 3)
    assert (sums["offered_tokens"], sums["pulled_tokens"], sums["recomputed_tokens"]) == (912, 400, 512)
    assert found["outcomes"] == {"below threshold": 1, "expired": 1, "pulled": 1}
    assert found["label"] == ""
    assert not found["simulated"]


def test_net_benefit_is_prefill_spared_minus_wait(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = asked(capsys, one)["overall"]
    assert sums["saved_ns"] == 400 * US_PER_TOKEN * 1000
    assert sums["wait_ns"] == 9 * MS
    assert sums["net_ns"] == 31 * MS
    assert sums["turns_at_a_loss"] == 0


def test_a_cost_that_no_request_tells_is_not_known_and_of_how_many_it_is_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, _ = a_conversation(10, [("pulled", 400, 400, 9.0, 2.0)])
    other = [row | {"model": "other"} for row in plain(4)[3:]]
    few = store(tmp_path / "few.duckdb", [*turns, *plain(3), *other])
    assert cli.main(["sessions", "--db", str(few)]) == 0
    assert "100 us, of at least 5 requests" in capsys.readouterr().out
    none = store(tmp_path / "none.duckdb", [row | {"prefill_compute_ns": None} for row in turns])
    sums = asked(capsys, none)["overall"]
    assert (sums["pulled_turns"], sums["saved_ns"], sums["net_ns"]) == (1, None, None)
    assert cli.main(["sessions", "--db", str(none)]) == 0
    assert "what reading back was worth is not known" in capsys.readouterr().out


def test_sessions_whatif_and_the_question_reuse_value_a_turn_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two models on one P, of which one costs twice as much per token; in a benchmark both cost more."""
    turns: list[Row] = []
    of = [("pulled", 400, 400, 9.0, 2.0), ("pulled", 100, 100, 12.0, 8.0), ("below threshold", 64, 0, 0, 5.0)]
    for first, model, times in ((10, "small", 1), (50, "large", 2)):
        for row in a_conversation(first, of)[0]:
            cost_ns = times * row["prefill_compute_ns"]
            turns.append(row | {"model": model, "prefill_compute_ns": cost_ns})
    slow = [row | {"label": "benchmark", "prefill_compute_ns": 10**9, "model": "small"} for row in plain(30)]
    path = store(tmp_path / "s.duckdb", [*turns, *slow])
    found = asked(capsys, path)
    net_ns = found["overall"]["net_ns"]
    assert net_ns == ((40 - 9) + (10 - 12) + (80 - 9) + (20 - 12)) * MS

    answer = StoreFile(path).query("reuse", "", {})
    names = [column["name"] for column in answer["columns"]]
    reuse = [dict(zip(names, row, strict=True)) for row in answer["rows"]]
    pulled = [row for row in reuse if row["reuse_outcome"] == "pulled"]
    assert {row["model"]: row["us_per_token"] for row in pulled} == {"small": 100, "large": 200}
    assert sum(row["requests"] * row["mean_net_benefit_ms"] for row in pulled) == pytest.approx(net_ns / MS)

    def shift_ns(*arguments: str) -> int:
        """Of all TTFT together."""
        assert cli.main(["whatif", "--db", str(path), "--json", *arguments]) == 0
        scenario = json.loads(capsys.readouterr().out)["scenarios"][-1]
        shifted: int = scenario["requests"] * scenario["mean_shift_ns"]
        return shifted

    assert shift_ns("--threshold", "1000") == net_ns, "nothing is read back any more"
    assert shift_ns("--ttl", "1") == net_ns
    (lower,) = (row for row in found["threshold"]["candidates"] if row["threshold"] == 64)
    assert lower["turns_read_back"] == 6
    assert shift_ns("--threshold", "64") == pytest.approx(net_ns - lower["net_ns"], abs=2)


def test_block_seconds_and_how_many_were_used(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """512 + 64 tokens are 36 blocks; held for 2, 5, 60 and 60 s; 25 of the first 36 are read back."""
    sums = asked(capsys, one)["overall"]
    assert sums["held_block_s"] == pytest.approx(36 * (2 + 5 + 60 + 60))
    assert sums["used_block_s"] == pytest.approx(25 * 2)
    assert (sums["held_blocks"], sums["used_blocks"]) == (4 * 36, 25)


def test_blocks_are_not_known_without_a_block_size(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, leases = a_conversation(10, [("pulled", 400, 400, 9.0, 2.0)])
    path = store(
        tmp_path / "s.duckdb", turns, leases=leases, engines=[rows.engine(2, "engine-d", "scheduler")]
    )
    sums = asked(capsys, path)["overall"]
    assert sums["held_block_s"] is None
    assert sums["used_block_s"] is None
    assert cli.main(["sessions", "--db", str(path)]) == 0
    assert "KV held on D between turns: not known" in capsys.readouterr().out


def test_a_lease_whose_end_was_not_seen_counts_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, leases = a_conversation(10, [("pulled", 400, 400, 9.0, 2.0)])
    leases[-1] |= {"ended_at_ns": None, "end": "lost"}
    path = store(tmp_path / "s.duckdb", turns, leases=leases, engines=[D_ENGINE])
    sums = asked(capsys, path)["overall"]
    assert (sums["leases"], sums["measured_leases"]) == (2, 1)
    assert sums["held_block_s"] == pytest.approx(36 * 2)


def test_ranks_of_an_engine_hold_the_same_blocks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns, leases = a_conversation(10, [("pulled", 400, 400, 9.0, 2.0)])
    leases += [row | {"id": row["id"] + 10**6, "rank": 1} for row in leases]
    path = store(tmp_path / "s.duckdb", turns, leases=leases, engines=[D_ENGINE])
    assert asked(capsys, path)["overall"]["held_block_s"] == pytest.approx(36 * (2 + 60))


def test_pauses_against_the_ttl(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = asked(capsys, one)["overall"]
    assert (sums["pauses"], sums["p50_pause_ns"], sums["max_pause_ns"]) == (3, 5 * S, 100 * S)
    assert (sums["ttl_ns"], sums["overslept"]) == (TTL_S * S, 1)
    assert sums["pause_counts"] == [0, 1, 1, 0, 1, 0, 0, 0]


def test_a_pause_is_only_between_turns_that_were_both_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns, leases = a_conversation(10, [("pulled", 400, 400, 9.0, 2.0), ("pulled", 400, 400, 9.0, 3.0)])
    path = store(tmp_path / "s.duckdb", [turns[0], turns[2]], leases=leases, engines=[D_ENGINE])
    assert asked(capsys, path)["overall"]["pauses"] == 0


def test_threshold_and_ttl_that_the_data_favour(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reading 32 tokens back loses 17 ms, reading 400 back wins 20 ms; all pauses end within 10 s."""
    turns: list[Row] = []
    leases: list[Row] = []
    for i in range(MIN_TURNS):
        more = a_conversation(100 * i + 100, [("pulled", 400, 400, 20.0, 9.0), ("pulled", 32, 32, 20.2, 9.0)])
        turns += more[0]
        leases += more[1]
    path = store(tmp_path / "s.duckdb", turns, leases=leases, engines=[D_ENGINE])
    found = asked(capsys, path)
    best = found["threshold"]["favoured"]
    assert best["threshold"] == 64
    assert best["net_ns"] == MIN_TURNS * 20 * MS
    assert best["turns_read_back"] == MIN_TURNS
    nothing_spared = next(c for c in found["threshold"]["candidates"] if c["threshold"] == 0)
    assert nothing_spared["net_ns"] == MIN_TURNS * (20 * MS + 3_200_000 - 20_200_000)
    ttl = found["ttl"]
    assert ttl["now"] == 60
    assert ttl["favoured"]["ttl_s"] == 10
    assert ttl["turns"] == 2 * MIN_TURNS
    by_ttl = {row["ttl_s"]: row for row in ttl["candidates"]}
    assert tuple(by_ttl) == TTLS_S
    assert by_ttl[5]["turns_read_back"] == 0
    assert by_ttl[10]["block_s"] == pytest.approx(MIN_TURNS * 36 * (9 + 9 + 10))
    assert cli.main(["sessions", "--db", str(path)]) == 0
    out = capsys.readouterr().out
    assert "  * 64 tokens: net benefit 400 ms, 20 turns read back\n" in out
    assert "    512 tokens: 0 turns read back\n" in out
    assert "    5 s: 0 of 40 turns read back, " in out


def test_few_turns_favour_nothing(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = asked(capsys, one)
    for setting in ("threshold", "ttl"):
        assert found[setting]["favoured"] is None
        assert "not enough data: 1 of 20 turns" in found[setting]["why_not"]
    assert cli.main(["sessions", "--db", str(one)]) == 0
    assert "not enough data: 1 of 20 turns that read KV back" in capsys.readouterr().out


def test_the_list_is_sorted_and_limited(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns: list[Row] = []
    for first, pulled in ((10, 100), (50, 300), (90, 200)):
        turns += a_conversation(first, [("pulled", 400, pulled, 9.0, 2.0)])[0]
    path = store(tmp_path / "s.duckdb", turns)
    found = asked(capsys, path, "--sort", "pulled_tokens", "--limit", "2")
    assert [row["pulled_tokens"] for row in found["conversations"]] == [300, 200]
    assert asked(capsys, path, "--sort", "pulled_tokens:asc")["conversations"][0]["pulled_tokens"] == 100
    assert cli.main(["sessions", "--db", str(path), "--sort", "nothing"]) == 2
    assert "'nothing' is no order" in capsys.readouterr().err


def test_one_conversation_by_its_id_or_by_a_request_of_it(
    one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    by_session = asked(capsys, one, str(2**63 + 10))
    assert [row["turn"] for row in by_session["turns"]] == [1, 2, 3, 4]
    assert [row["net_ns"] for row in by_session["turns"]] == [None, 31 * MS, None, None]
    assert [row["pause_ns"] for row in by_session["turns"]] == [None, 2 * S, 5 * S, 100 * S]
    assert asked(capsys, one, by_session["turns"][2]["client_id"])["turns"] == by_session["turns"]
    assert cli.main(["sessions", "--db", str(one), str(2**63 + 5000)]) == 1
    assert "is no turn of a conversation" in capsys.readouterr().err


def test_labels_do_not_mix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    real, bench = (a_conversation(first, [("pulled", 400, 400, 9.0, 2.0)])[0] for first in (10, 50))
    for row in bench:
        row["label"] = "benchmark"
    path = store(tmp_path / "s.duckdb", [*real, *bench])
    assert asked(capsys, path)["overall"]["conversations"] == 1
    assert asked(capsys, path, "--label", "benchmark")["conversations"][0]["session"] == str(2**63 + 50)
    only = store(tmp_path / "b.duckdb", bench)
    assert asked(capsys, only)["label"] == "benchmark"
    assert cli.main(["sessions", "--db", str(only)]) == 0
    assert capsys.readouterr().out.startswith("label benchmark: 1 conversation, 2 turns seen")


def test_a_window_keeps_the_leases_of_its_last_turns(one: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = asked(capsys, one, str(2**63 + 10))["turns"]
    until = str(int(whole[1]["arrived_at_ns"]) + 1)
    found = asked(capsys, one, "--until", until)["overall"]
    assert (found["turns"], found["leases"]) == (2, 2)


def test_simulated_figures_are_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns, _ = a_conversation(10, [("pulled", 400, 400, 9.0, 2.0)])
    path = store(tmp_path / "s.duckdb", turns, engines=[D_ENGINE | {"kvscope": "simulated"}])
    assert cli.main(["sessions", "--db", str(path)]) == 0
    assert capsys.readouterr().out.startswith("production, simulated: ")


def test_nothing_to_show_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sessions", "--db", str(store(tmp_path / "e.duckdb", []))]) == 1
    assert "no request in this window" in capsys.readouterr().err
    assert cli.main(["sessions", "--db", str(store(tmp_path / "p.duckdb", [rows.PUSH]))]) == 0
    assert "no conversation of production reuses KV" in capsys.readouterr().err


def test_tokens_in_ps_own_cache_were_not_computed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """P reads back what its prefix cache lacks, and what D kept may be longer than the prompt."""
    turns, _ = a_conversation(10, [("pulled", 400, 300, 9.0, 2.0), ("below threshold", 600, 0, 0, 5.0)])
    turns[1]["p_cached_tokens"] = 100
    turns[2]["p_cached_tokens"] = 480
    path = store(tmp_path / "s.duckdb", turns, engines=[D_ENGINE])
    assert asked(capsys, path)["overall"]["recomputed_tokens"] == 512 - 480


def test_one_conversation_says_whose_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns, _ = a_conversation(10, [("pulled", 400, 400, 9.0, 2.0)])
    turns = [one | {"label": "nightly"} for one in turns]
    engines = [D_ENGINE | {"kvscope": "simulated"}]
    path = store(tmp_path / "s.duckdb", [*turns, *plain(1)], engines=engines)
    assert cli.main(["sessions", str(turns[0]["id"]), "--db", str(path)]) == 0
    assert capsys.readouterr().out.splitlines()[0].endswith("(label nightly, simulated): 2 turns")


def test_without_a_lease_it_is_not_known_how_many_overslept(tmp_path: Path) -> None:
    turns, _ = a_conversation(10, [("pulled", 400, 400, 9.0, 2.0)])
    source = StoreFile(store(tmp_path / "none.duckdb", turns, engines=[D_ENGINE]))
    assert overall(source, Window(0, 2**63 - 1, ""))["overslept"] is None


def test_one_is_one_and_nothing_is_no_benefit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns, _ = a_conversation(10, [("pulled", 90, 90, 9.0, 2.0)])
    path = store(tmp_path / "s.duckdb", turns[1:])
    assert cli.main(["sessions", "--db", str(path)]) == 0
    out = capsys.readouterr().out
    assert "1 conversation, 1 turn seen (1 after a first one)" in out
    assert "1 turn that read back spared 9 ms of prefill and waited 9 ms" in out
    assert "for it: no net benefit; 0 turns lost by it" in out
    assert cli.main(["sessions", "--db", str(path), str(turns[1]["id"])]) == 0
    assert "(production): 1 turn\n" in capsys.readouterr().out


def test_a_loss_is_called_one_and_favours_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns: list[Row] = []
    for i in range(MIN_TURNS):
        turns += a_conversation(100 * i + 100, [("pulled", 90, 90, 19.0, 2.0)])[0]
    path = store(tmp_path / "s.duckdb", turns)
    assert cli.main(["sessions", "--db", str(path)]) == 0
    out = capsys.readouterr().out
    assert "net loss 200 ms, 10 ms a turn; 20 turns lost by it" in out
    assert "kv_recompute_threshold: reading back did not pay at any threshold" in out
    assert "decoder_kv_blocks_ttl: reading back did not pay at any TTL" in out


def test_a_conversation_that_is_not_in_the_window_is_an_error(
    one: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["sessions", "--db", str(one), str(2**63 + 10), "--since", "2030-01-01"]) == 1
    assert f"no turn of conversation {2**63 + 10} in this window" in capsys.readouterr().err


def test_of_an_answer_that_was_cut_nothing_is_told(
    one: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = query.Limits(rows=2)
    monkeypatch.setattr(query, "Limits", lambda: few)
    assert cli.main(["sessions", "--db", str(one), str(2**63 + 10)]) == 1
    told = capsys.readouterr()
    assert told.out == ""
    assert "ask for a smaller window, or raise the daemon's limits" in told.err
