"""A request as spans: they say what its row says, whatever the row."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvscope import schema, spans, steps
from kvscope.collectors.pipeline import Pipeline
from kvscope.demo.simulate import Fleet
from kvscope.ring import RingReader
from kvscope.spans import Span
from kvscope.steps import BY_NAME, OBSERVED, STEPS

T0_NS = 1_795_967_649_123_456_789

Row = dict[str, Any]


def make_row(entries: list[Row], **columns: Any) -> Row:
    """A row of `requests` whose steps and TTFT follow from its waterfall."""
    row: Row = dict.fromkeys(column.name for column in schema.REQUESTS.columns)
    row |= {
        "id": 2**63 + 7,
        "arrived_at_ns": T0_NS,
        "connector": "push",
        "model": "tiny",
        "outcome": "finished",
        "p_engine": "engine-p",
        "d_engine": "engine-d",
        "p_request": "cmpl-p",
        "d_request": "cmpl-d",
        "prompt_tokens": 512,
        "read_after_expiry": False,
        "waterfall": entries,
    }
    for entry in entries:
        if entry["critical"]:
            column = STEPS[entry["step"]].column
            row[column] = (row[column] or 0) + entry["ns"]
    row["ttft_ns"] = sum(entry["ns"] for entry in entries if entry["critical"])
    return row | columns


def entry(step: str, from_ns: int, ns: int, critical: bool = True, **more: Any) -> Row:
    return {
        "step": BY_NAME[step].code,
        "from_ns": from_ns,
        "ns": ns,
        "critical": critical,
        "observed": 0,
        "error_ns": 0,
    } | more


PUSH = make_row(
    [
        entry("prefill.queue", 0, 14_000),
        entry("prefill.compute", 14_000, 61_000),
        entry("transfer.dispatch", 75_000, 49_000),
        entry("transfer.wire", 124_000, 20_000, observed=OBSERVED.index("estimated"), error_ns=250),
        entry("readiness.signal", 144_000, 8_000),
        entry("decode.first_step", 152_000, 8_000),
        entry("registration.route", 0, 4_000, critical=False),
        entry("registration.notify", 4_000, 26_000, critical=False),
    ],
    decode_generate_ns=900_000,
    lead_ns=45_000,
)


def by_name(trace: list[Span]) -> dict[str, Span]:
    assert max(Counter(span.name for span in trace).values()) == 1
    return {span.name: span for span in trace}


def check(row: Row, trace: list[Span]) -> None:
    """The invariants of every trace."""
    root, *others = trace
    ids = {span.span_id: span for span in trace}
    assert len(ids) == len(trace)
    assert (root.name, root.parent_id, root.start_ns) == (spans.ROOT, "", row["arrived_at_ns"])
    legs = [span for span in others if "kvscope.request" in span.attributes or "leg" in span.name]
    assert all(span.parent_id == root.span_id for span in legs)
    assert sorted(leg.service for leg in legs) == sorted(e for e in (row["p_engine"], row["d_engine"]) if e)
    told = [span for span in others if span not in legs]
    critical = [span for span in told if span.attributes["kvscope.path"] == spans.CRITICAL]
    if row["ttft_ns"] is not None:
        assert sum(span.ns for span in critical) == row["ttft_ns"]
        at = row["arrived_at_ns"]
        for span in critical:
            assert span.start_ns == at
            at = span.end_ns
    for span in told:
        parent = ids[span.parent_id]
        assert parent.start_ns <= span.start_ns
        assert span.end_ns <= parent.end_ns
        assert span.ns == span.attributes["kvscope.ns"] >= 0
        assert span.attributes["kvscope.class"] == BY_NAME[span.name].class_
        assert span.service == parent.service
    assert all(type(v) in (str, int) for span in trace for v in span.attributes.values())
    assert len({span.trace_id for span in trace}) == 1


def test_push_shows_both_legs_the_critical_path_and_the_branch_beside_it() -> None:
    trace = spans.of_request(PUSH)
    check(PUSH, trace)
    found = by_name(trace)
    p, d = found[spans.P_LEG], found[spans.D_LEG]
    assert (p.service, p.kind, d.service, d.kind) == ("engine-p", "internal", "engine-d", "server")
    assert found[spans.ROOT].kind == "client", "a graph of services draws root's engine → D"
    assert found[spans.ROOT].service == "engine-p"
    assert found[spans.ROOT].ns == 160_000 + 900_000
    # A step between the two is of the leg that waits for it.
    assert found["registration.notify"].parent_id == p.span_id
    assert found["registration.route"].parent_id == found["readiness.signal"].parent_id == d.span_id
    assert (d.start_ns - T0_NS, d.end_ns - T0_NS) == (0, 1_060_000)
    assert (p.start_ns - T0_NS, p.end_ns - T0_NS) == (0, 144_000)
    assert found["registration.notify"].attributes["kvscope.path"] == "overlapped"
    assert found["decode.generate"].attributes["kvscope.path"] == "after first token"
    (link,) = found["transfer.dispatch"].links
    assert link == (p.trace_id, found["registration.notify"].span_id, "overlapped branch")
    assert [span.name for span in trace if span.links] == ["transfer.dispatch"]
    wire = found["transfer.wire"].attributes
    assert (wire["kvscope.observed"], wire["kvscope.clock_error_ns"]) == ("estimated", 250)


def test_branches_meet_after_the_end_of_both() -> None:
    row = make_row(
        [
            entry("transfer.dispatch", 0, 10),
            entry("transfer.post", 10, 10),
            entry("registration.route", 0, 10, critical=False),
        ]
    )
    assert [span.name for span in spans.of_request(row) if span.links] == ["transfer.post"]


def test_root_says_what_the_row_says_in_the_terms_of_the_conventions() -> None:
    row = PUSH | {"session": 2**63 + 1, "turn": 2, "output_tokens": 64, "label": ""}
    attributes = spans.of_request(row)[0].attributes
    expected = {
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 512,
        "gen_ai.usage.output_tokens": 64,
        "gen_ai.conversation.id": str(2**63 + 1),
        "kvscope.id": str(2**63 + 7),
        "kvscope.connector": "push",
        "kvscope.outcome": "finished",
        "kvscope.ttft_ns": 160_000,
        "kvscope.coordination_ns": 57_000,
        "kvscope.main_step": "prefill.compute",
        "kvscope.read_after_expiry": "false",
        "kvscope.lead_ns": 45_000,
    }
    assert expected.items() <= attributes.items()
    assert "kvscope.label" not in attributes, "production is no text"
    assert not any("None" in str(value) for value in attributes.values())


def test_failed_request_has_the_status_error() -> None:
    assert spans.of_request(PUSH)[0].error == ""
    for outcome, detail, reason in (("error", "KVLoadError", "KVLoadError"), ("lost", None, "lost")):
        root = spans.of_request(PUSH | {"outcome": outcome, "outcome_detail": detail})[0]
        assert (root.error, root.attributes["error.type"]) == (reason, reason)
    assert spans.of_request(PUSH | {"outcome": "aborted"})[0].error == "", "the client's own doing"


def test_ids_are_the_same_each_time_and_of_no_other_request() -> None:
    trace, other = spans.of_request(PUSH), spans.of_request(PUSH | {"id": 8})
    assert trace == spans.of_request(PUSH)
    assert {s.span_id for s in trace}.isdisjoint(s.span_id for s in other)
    assert trace[0].trace_id == f"{2**63 + 7:032x}"


def test_own_trace_context_is_the_trace() -> None:
    own = "4bf92f3577b34da6a3ce929d0e0e4736"
    trace = spans.of_request(PUSH | {"trace_id": own})
    assert {span.trace_id for span in trace} == {own}
    assert trace[0].parent_id == "", "its span's id is not known"


def test_later_turn_links_to_the_one_before() -> None:
    first = PUSH | {"id": 1, "trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"}
    link = spans.root_link({"id": 1, "trace_id": first["trace_id"]})
    root = spans.of_request(PUSH, link)[0]
    (found,) = root.links
    before = spans.of_request(first)[0]
    assert (found.trace_id, found.span_id) == (before.trace_id, before.span_id)


def test_leg_of_which_nothing_was_seen_is_shown_as_such() -> None:
    row = make_row([entry("prefill.compute", 0, 5), entry("unknown", 5, 5)])
    trace = spans.of_request(row)
    check(row, trace)
    found = by_name(trace)
    d = found[spans.D_LEG]
    assert (d.start_ns - T0_NS, d.ns, d.attributes["kvscope.observed"]) == (0, 10, "not observed")
    assert found["unknown"].parent_id == found[spans.ROOT].span_id, "where it was is not known"


def test_local_request_has_one_leg_and_one_engine() -> None:
    row = make_row(
        [entry("prefill.compute", 0, 5)],
        p_engine=None,
        p_request=None,
        connector="local",
        decode_generate_ns=3,
    )
    trace = spans.of_request(row)
    check(row, trace)
    assert [(span.name, span.service, span.kind) for span in trace[:2]] == [
        ("request", "engine-d", "client"),
        ("local leg", "engine-d", "internal"),
    ]


def test_times_that_no_trace_can_hold_make_none() -> None:
    assert spans.of_request(PUSH | {"arrived_at_ns": None}) == []
    assert spans.of_request(PUSH | {"arrived_at_ns": -5}) == []
    assert spans.of_request(PUSH | {"arrived_at_ns": 2**63 - 1}) == []
    assert spans.of_request(make_row([entry("prefill.compute", -T0_NS, 5)])) == []


def test_request_without_first_token_ends_with_the_last_thing_known() -> None:
    row = PUSH | {"ttft_ns": None, "decode_generate_ns": None, "outcome": "lost"}
    assert spans.of_request(row)[0].ns == 160_000
    empty = make_row([], ttft_ns=None)
    check(empty, spans.of_request(empty))
    assert [span.ns for span in spans.of_request(empty)] == [0, 0, 0]


IN_TTFT = [step.name for step in STEPS if step.in_ttft]


@st.composite
def rows(draw: st.DrawFn) -> Row:
    lengths = st.integers(0, 10**11)
    entries, at = [], 0
    for name in draw(st.lists(st.sampled_from(IN_TTFT), max_size=12)):
        ns = draw(lengths)
        entries.append(entry(name, at, ns, observed=draw(st.integers(0, len(OBSERVED) - 1))))
        at += ns
    total, begin = at, 0
    for name in draw(st.lists(st.sampled_from(IN_TTFT), max_size=4)):
        ns = draw(st.integers(0, total - begin))
        entries.append(entry(name, begin, ns, critical=False))
        begin += ns
    engines = draw(st.sampled_from([("p", "d"), ("p", None), (None, "d")]))
    return make_row(
        entries,
        id=draw(st.integers(0, 2**64 - 1)),
        connector=draw(st.sampled_from(["push", "pull", "bidirectional", "local"])),
        p_engine=engines[0],
        d_engine=engines[1],
        p_request=engines[0],
        d_request=engines[1],
        decode_generate_ns=draw(st.none() | lengths),
        outcome=draw(st.sampled_from(["finished", "error", "in flight", None])),
    )


@given(rows())
@settings(max_examples=200, deadline=None)
def test_steps_on_the_critical_path_add_up_to_ttft_whatever_the_row(row: Row) -> None:
    check(row, spans.of_request(row))


@pytest.mark.parametrize("mode", ["push", "pull", "bidirectional"])
def test_steps_of_simulated_requests_add_up_to_their_ttft(tmp_path: Path, mode: str) -> None:
    fleet = Fleet(tmp_path, mode, 4096, seed=5)
    for _ in range(20):
        fleet.request()
    pipeline, readers = Pipeline(), [RingReader(path) for path in sorted(tmp_path.glob("*.ring"))]
    for reader in readers:
        pipeline.add_ring(reader)
    for reader in readers:
        pipeline.feed(reader, list(reader.events()), 0)
    names = [column.name for column in schema.REQUESTS.columns]
    found = [
        dict(zip(names, values, strict=True)) for values in pipeline.take_rows(0, final=True)["requests"]
    ]
    assert len(found) == 20
    for row in found:
        assert row["ttft_ns"] is not None
        trace = spans.of_request(row)
        check(row, trace)
        assert {s.attributes["kvscope.step"] for s in trace if "kvscope.step" in s.attributes} >= {
            "prefill.compute"
        }


def test_every_step_has_a_name_among_the_operations() -> None:
    assert {step.name for step in steps.STEPS} < set(spans.NAMES)
    assert len(set(spans.NAMES)) == len(spans.NAMES)
