"""`kvscope export`: trace files that others read, made of rows of all shapes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.trace.v1.trace_pb2 import Span, TracesData

from kvscope import cli, schema, spans
from kvscope.analysis import paging
from kvscope.analysis.paging import Window
from kvscope.client import StoreFile

from ..cli import rows
from .made import Row, store

Trace = dict[str, Any]

PRODUCTION = [row for row in rows.STORED if not row["label"]]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "store.duckdb"
    return store(
        path,
        rows.STORED,
        transfers=rows.TRANSFERS,
        leases=rows.LEASES,
        failures=rows.FAILURES,
        engines=rows.ENGINES,
    )


def exported(format_: str, db: Path, target: Path, *arguments: str) -> Path:
    assert cli.main(["export", format_, "--db", str(db), "-o", str(target), *arguments]) == 0
    return target


def events(trace: Trace, phase: str, **wanted: Any) -> list[dict[str, Any]]:
    return [e for e in trace["traceEvents"] if e["ph"] == phase and all(e[k] == v for k, v in wanted.items())]


def ns(us: float) -> int:
    return round(us * 1000)


def check_trace_event_format(trace: Trace) -> None:
    """What the Trace Event Format asks for, and what readers silently drop if it is not so."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    assert all(isinstance(value, str) for value in trace["otherData"].values())
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    asynchronous: dict[tuple[str, str, int], list[tuple[str, int]]] = defaultdict(list)
    flows: dict[int, list[dict[str, Any]]] = defaultdict(list)
    named: set[tuple[str, int, int]] = set()
    for event in trace["traceEvents"]:
        assert isinstance(event["name"], str)
        assert event["name"]
        assert type(event["pid"]) is int
        assert type(event["tid"]) is int
        if event["ph"] == "M":
            assert event["name"] in (
                "process_name", "process_sort_index", "thread_name", "thread_sort_index"
            )  # fmt: skip
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["ts"] >= 0
        assert isinstance(event["cat"], str)
        assert event["cat"]
        place = event["pid"], event["tid"]
        if event["ph"] == "X":
            assert event["dur"] >= 0
            slices[place].append((ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])))
        elif event["ph"] in "be":
            assert isinstance(event["id"], str)
            asynchronous[event["cat"], event["id"], event["pid"]].append((event["ph"], ns(event["ts"])))
        else:
            assert event["ph"] in "sf"
            flows[event["id"]].append(event)
    for place, found in slices.items():
        assert ("process_name", place[0], 0) in named
        assert ("thread_name", *place) in named
        open_until: list[int] = []
        for start, end in sorted(found, key=lambda s: (s[0], -s[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], f"slices of thread {place} overlap"
            open_until.append(end)
    for pair in asynchronous.values():
        (first, begin), (last, end) = pair
        assert (first, last) == ("b", "e")
        assert begin <= end
    for pair_ in flows.values():
        start_, finish = pair_
        assert (start_["ph"], finish["ph"], finish["bp"]) == ("s", "f", "e")
        assert start_["ts"] <= finish["ts"]
        for event in pair_:
            inside = slices[event["pid"], event["tid"]]
            assert any(begin <= ns(event["ts"]) <= end for begin, end in inside), "an arrow ends in no slice"


@pytest.fixture(scope="module")
def trace(file: Path, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    target = exported("perfetto", file, tmp_path_factory.mktemp("out") / "t.json", "--label", "")
    found: Trace = json.loads(target.read_text())
    return found


def test_the_trace_keeps_to_the_format(trace: Trace) -> None:
    check_trace_event_format(trace)


def test_a_requests_critical_path_adds_up_to_its_ttft(trace: Trace) -> None:
    spent: dict[str, int] = defaultdict(int)
    for event in events(trace, "X"):
        beside = event["args"].get("path") == "overlapped" or event["name"] == "decode.generate"
        if event["cat"] != "request" and not beside:
            spent[event["args"]["request"]] += ns(event["dur"])
    for row in PRODUCTION:
        if row["ttft_ns"] is not None:
            assert spent[str(row["id"])] == row["ttft_ns"]


def test_engines_are_processes_by_role_and_steps_are_where_they_take_place(trace: Trace) -> None:
    names = {e["args"]["name"]: e["pid"] for e in events(trace, "M", name="process_name")}
    assert set(names) == {"prefill engine-p", "decode engine-d"}
    push = str(rows.PUSH["id"])
    placed = {
        e["name"]: e["pid"] for e in events(trace, "X") if e["args"].get("request") == push
    }  # fmt: skip
    assert placed["prefill.compute"] == placed["transfer.wire"] == names["prefill engine-p"]
    assert placed["readiness.report"] == placed["decode.first_step"] == names["decode engine-d"]
    assert placed["unknown"] == names["decode engine-d"]


def test_times_are_those_of_the_store(trace: Trace) -> None:
    zero = int(trace["otherData"]["unix_ns_at_0"])
    (compute,) = (
        e for e in events(trace, "X", name="prefill.compute") if e["args"]["request"] == str(rows.PUSH["id"])
    )
    assert zero + ns(compute["ts"]) == rows.PUSH["arrived_at_ns"] + 14_000_000
    assert ns(compute["dur"]) == 61_000_000
    assert compute["cat"] == "compute"


def test_the_branch_that_was_ready_earlier_has_a_lane_of_its_own(trace: Trace) -> None:
    beside = [e for e in events(trace, "X") if e["args"].get("path") == "overlapped"]
    assert {e["name"] for e in beside} == {"registration.route", "registration.admit", "registration.notify"}
    lanes = {(e["pid"], e["tid"]) for e in beside}
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events(trace, "M", name="thread_name")}
    assert all(named[lane].startswith("overlapped") for lane in lanes)


def test_transfers_and_leases_are_asynchronous(trace: Trace) -> None:
    (write,) = events(trace, "b", cat="transfer")
    assert write["name"] == "WRITE 33.6 MB"
    assert write["id"] == hex(11)
    assert write["args"]["request_id"] == str(rows.PUSH["id"])
    (expired,) = events(trace, "b", cat="lease")
    assert expired["name"] == "lease expired"
    (end,) = events(trace, "e", cat="lease")
    assert ns(end["ts"]) - ns(expired["ts"]) == 1_500_000


def test_arrows_follow_the_critical_path_between_engines(trace: Trace) -> None:
    pids = {e["args"]["name"]: e["pid"] for e in events(trace, "M", name="process_name")}
    starts = {e["id"]: e for e in events(trace, "s")}
    for end in events(trace, "f"):
        assert starts[end["id"]]["pid"] != end["pid"]
    assert len(starts) >= 4
    assert {e["pid"] for e in starts.values()} <= set(pids.values())


def test_what_is_written_says_what_it_is_of(trace: Trace) -> None:
    told = trace["otherData"]
    assert told["label"] == "production"
    assert told["simulated"] == "no"
    assert told["vllm"] == "0.32.0, 0.33.0"
    assert told["requests"] == str(len(PRODUCTION))


def test_control_characters_do_not_get_into_names(trace: Trace) -> None:
    names = [e["name"] for e in events(trace, "X", cat="request")]
    assert "evil\N{REPLACEMENT CHARACTER}[31m\N{REPLACEMENT CHARACTER}id" in names


def test_concurrent_requests_get_lanes_that_do_not_overlap(tmp_path: Path) -> None:
    made = [
        rows.request(
            i,
            ("prefill.compute", 0, 900),
            ("registration.route", 900, 950),
            ("decode.first_step", 950, 1000 + i),
            ("decode.generate", 1000 + i, 4000),
            connector="pull",
            arrived_at_ns=rows.T0_NS + i * 10**8,
        )
        for i in range(40)
    ]
    target = exported("perfetto", store(tmp_path / "s.duckdb", made), tmp_path / "t.json")
    found = json.loads(target.read_text())
    check_trace_event_format(found)
    lanes = {(e["pid"], e["tid"]) for e in events(found, "X")}
    assert 10 < len(lanes) < 80


def test_simulated_requests_are_called_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = rows.engine(1, "engine-p", "scheduler", kvscope="simulated", label="simulated")
    path = store(tmp_path / "s.duckdb", [rows.PULL | {"label": "simulated"}], engines=[engine])
    target = exported("perfetto", path, tmp_path / "t.json")
    assert json.loads(target.read_text())["otherData"]["simulated"].startswith("yes")
    assert "1 simulated requests (label simulated)" in capsys.readouterr().err


# --- OTLP ---------------------------------------------------------------------------------------------


def read_otlp(path: Path) -> list[TracesData]:
    """Strictly: unknown fields are errors. OTLP/JSON has ids in hex where protobuf's own JSON has base64."""
    found = []
    for line in path.read_text().splitlines():
        message = json.loads(line)
        for resource in message["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    for holder in (span, *span.get("links", ())):
                        for name in ("traceId", "spanId", "parentSpanId"):
                            if name in holder:
                                assert len(holder[name]) in (16, 32)
                                holder[name] = _base64(bytes.fromhex(holder[name]))
        found.append(json_format.ParseDict(message, TracesData()))
    return found


def _base64(data: bytes) -> str:
    import base64

    return base64.b64encode(data).decode()


def all_spans(found: list[TracesData]) -> list[tuple[str, Span]]:
    return [
        (resource.resource.attributes[0].value.string_value, span)
        for message in found
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def test_otlp_lines_are_what_the_protocol_defines(file: Path, tmp_path: Path) -> None:
    found = all_spans(read_otlp(exported("otlp", file, tmp_path / "t.jsonl", "--label", "")))
    expected = [span for row in PRODUCTION for span in spans.of_request(row)]
    assert len(found) == len(expected)
    by_id = {span.span_id.hex(): (service, span) for service, span in found}
    for want in expected:
        service, got = by_id[want.span_id]
        assert service == want.service
        assert got.trace_id.hex() == want.trace_id
        assert (got.name, got.parent_span_id.hex()) == (want.name, want.parent_id)
        assert (got.start_time_unix_nano, got.end_time_unix_nano) == (want.start_ns, want.end_ns)
        assert Span.SpanKind.Name(got.kind) == f"SPAN_KIND_{want.kind.upper()}"
        attributes = {
            a.key: a.value.int_value if a.value.HasField("int_value") else a.value.string_value
            for a in got.attributes
        }
        assert attributes == want.attributes
        assert (got.status.code == 2) == bool(want.error)


def test_a_turn_links_to_the_one_before_it(tmp_path: Path) -> None:
    first = rows.PULL | {"label": "", "session": rows.PULL["id"], "turn": 1}
    second = rows.PULLED_BACK | {"session": rows.PULL["id"], "turn": 2}
    path = store(tmp_path / "s.duckdb", [first, second])
    found = all_spans(read_otlp(exported("otlp", path, tmp_path / "t.jsonl")))
    links = [link for _, span in found for link in span.links if span.name == spans.ROOT]
    assert [link.span_id.hex() for link in links] == [spans.root_link(first).span_id]


# --- pages and files ----------------------------------------------------------------------------------


def many(count: int) -> list[Row]:
    """Requests of which several arrive in the same nanosecond, and some after a long silence."""
    return [
        rows.request(
            i,
            ("prefill.compute", 0, 1),
            arrived_at_ns=rows.T0_NS + i // 7 + (i > count // 2) * 10**15,
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("page", [1, 3, 7, 100])
def test_every_request_is_read_once_and_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, page: int
) -> None:
    monkeypatch.setattr(paging, "PAGE_ROWS", page)
    made = many(60)
    source = StoreFile(store(tmp_path / "s.duckdb", made))
    about = Window(rows.T0_NS, made[-1]["arrived_at_ns"] + 1, "")
    found = [row for rows_ in paging.requests(source, about) for row in rows_]
    assert [row["id"] for row in found] == [str(row["id"]) for row in made]


def test_answers_cut_by_a_limit_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = many(60)
    source = StoreFile(store(tmp_path / "s.duckdb", made))
    whole = source.query

    def cut(name: str, sql: str, parameters: Any) -> dict[str, Any]:
        answer = whole(name, sql, parameters)
        return answer | {"rows": answer["rows"][:5], "truncated": len(answer["rows"]) > 5}

    monkeypatch.setattr(source, "query", cut)
    about = Window(rows.T0_NS, made[-1]["arrived_at_ns"] + 1, "")
    assert sum(len(found) for found in paging.requests(source, about)) == 60


def test_a_window_and_filters_choose(file: Path, tmp_path: Path) -> None:
    target = exported("perfetto", file, tmp_path / "t.json", "--where", "connector=push")
    assert json.loads(target.read_text())["otherData"]["requests"] == "3"
    since = str(rows.EXPIRED["arrived_at_ns"])
    exported("perfetto", file, target, "--since", since, "--force")
    assert json.loads(target.read_text())["otherData"]["requests"] == "4"


def test_a_named_window_chooses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    window = dict.fromkeys(column.name for column in schema.LABELS.columns) | {
        "id": 1,
        "made_at_ns": 1,
        "name": "incident-1",
        "kind": "incident",
        "from_at_ns": rows.EXPIRED["arrived_at_ns"],
        "until_at_ns": rows.LOCAL["arrived_at_ns"],
        "removed": False,
    }
    path = store(tmp_path / "s.duckdb", rows.STORED, labels=[window])
    target = exported("perfetto", path, tmp_path / "t.json", "--during", "incident-1")
    assert json.loads(target.read_text())["otherData"]["requests"] == "2"
    assert cli.main(["export", "otlp", "--db", str(path), "-o", "-", "--since", "@nothing"]) == 2
    assert "no window 'nothing'" in capsys.readouterr().err


def test_requests_in_flight_are_left_out(tmp_path: Path) -> None:
    path = store(tmp_path / "s.duckdb", [rows.PUSH, rows.PUSH_LATE | {"outcome": "in flight"}])
    target = exported("otlp", path, tmp_path / "t.jsonl")
    assert {s.name for _, s in all_spans(read_otlp(target))} >= {"request"}
    assert sum(s.name == "request" for _, s in all_spans(read_otlp(target))) == 1


def test_a_file_is_not_replaced_unless_asked(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "t.json"
    target.write_text("mine")
    assert cli.main(["export", "otlp", "--db", str(file), "-o", str(target)]) == 2
    assert "--force" in capsys.readouterr().err
    assert target.read_text() == "mine"


def test_what_fails_leaves_no_file(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(spans, "of_request", interrupted)
    assert cli.main(["export", "otlp", "--db", str(file), "-o", str(tmp_path / "t.jsonl")]) == 130
    assert list(tmp_path.iterdir()) == []
    assert cli.main(["export", "otlp", "--db", str(file), "-o", str(tmp_path / "no" / "t")]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_standard_output_has_the_trace_and_nothing_else(file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvscope.cli", "export", "perfetto", "--db", str(file), "-o", "-"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "KVSCOPE_URL": ""},
    )
    assert done.returncode == 0, done.stderr
    check_trace_event_format(json.loads(done.stdout))
    assert done.stderr.count("\n") == 1


def test_an_empty_window_is_said(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "t.json")
    assert cli.main(["export", "otlp", "--db", str(file), "-o", target, "--label", "nobody"]) == 1
    assert "no request of label 'nobody'" in capsys.readouterr().err


def test_a_row_whose_times_can_not_be_told_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absurd = [entry | {"from_ns": 9 * 10**18} for entry in rows.PUSH["waterfall"]]
    path = store(tmp_path / "s.duckdb", [rows.PUSH | {"waterfall": absurd}, rows.PUSH_LATE])
    for format_ in ("otlp", "perfetto"):
        exported(format_, path, tmp_path / format_)
        assert "1 requests (production)" in (said := capsys.readouterr().err)
        assert "1 left out" in said


def test_what_is_no_plain_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = store(tmp_path / "s.duckdb", [rows.PULL])
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert cli.main(["export", "perfetto", "--db", str(path), "-o", str(pipe), "--force"]) == 2
    assert "is no plain file" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_file_that_is_called_like_a_part_is_left_alone(tmp_path: Path) -> None:
    path = store(tmp_path / "s.duckdb", [rows.PULL])
    other = tmp_path / "out.json.part"
    other.write_text("mine")
    assert cli.main(["export", "perfetto", "--db", str(path), "-o", str(tmp_path / "out.json")]) == 0
    assert other.read_text() == "mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["out.json", "out.json.part", "s.duckdb"]
