"""`kvscope import`: archives, and excerpts of real traces and debug logs of vLLM 0.32."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import duckdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvscope import cli, schema, steps
from kvscope.analysis.exchange import import_lines, import_log, import_otlp, imports
from kvscope.analysis.exchange.partial import Mark, split
from kvscope.client import StoreFile
from kvscope.query import questions

from ..cli import rows
from .made import store

DATA = Path(__file__).parent / "data"
PULL = (DATA / "vllm-pull-p.log", DATA / "vllm-pull-d.log")
PUSH = (DATA / "vllm-push-p.log", DATA / "vllm-push-d.log")
BIDIRECTIONAL = (DATA / "vllm-bidirectional-p.jsonl", DATA / "vllm-bidirectional-d.jsonl")
TRACES, PROTOBUF = DATA / "vllm-traces.jsonl", DATA / "vllm-traces.binpb"

MS = 1_000_000


def imported(target: Path, *sources: Path | str) -> dict[str, Any]:
    """Runs the command; what it tells as JSON."""
    import io
    from contextlib import redirect_stdout

    said = io.StringIO()
    with redirect_stdout(said):
        assert cli.main(["import", *map(str, sources), "-o", str(target), "--json"]) == 0
    told: dict[str, Any] = json.loads(said.getvalue())
    return told


def selected(path: Path, sql: str) -> list[tuple[Any, ...]]:
    with duckdb.connect(str(path), read_only=True) as database:
        return database.execute(sql).fetchall()


def requests(path: Path) -> dict[str, dict[str, Any]]:
    """By the client's id."""
    with duckdb.connect(str(path), read_only=True) as database:
        found = database.execute("FROM requests")
        names = [column[0] for column in found.description or []]
        return {row[1]: dict(zip(names, row, strict=True)) for row in found.fetchall()}


def check_sums(path: Path) -> None:
    """The steps of every request with a TTFT add up to it, and so does its waterfall."""
    spent = " + ".join(f"coalesce({s.column}, 0)" for s in steps.STEPS if s.in_ttft)
    wrong = selected(
        path,
        f"SELECT client_id FROM requests WHERE ttft_ns IS NOT NULL AND (ttft_ns != {spent} OR "
        "ttft_ns != list_sum([w.ns FOR w IN waterfall IF w.critical]))",
    )
    assert wrong == []


# --- traces -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("traces") / "t.duckdb"
    told = imported(target, TRACES)
    assert told["stored"] == {"requests": 5, "engines": 2}
    assert (told["requests_of_traces_and_logs"], told["of_these_joined"]) == (5, 3)
    assert told["left_out"] == {"spans that are no llm_request": 2}
    return target


def span_attributes(name: str) -> list[dict[str, Any]]:
    """Of the real spans of a client's request, P's first: their start and what vLLM measured."""
    found = []
    for line in TRACES.read_text().splitlines():
        for resource in json.loads(line)["resourceSpans"]:
            for scope in resource["scopeSpans"]:
                for span in scope["spans"]:
                    told = {a["key"]: next(iter(a["value"].values())) for a in span.get("attributes", ())}
                    if name in str(told.get("gen_ai.request.id")):
                        found.append({"start": int(span["startTimeUnixNano"]), **told})
    return sorted(found, key=lambda span: int(span["gen_ai.request.max_tokens"]))


def test_both_spans_of_a_request_make_one(traces: Path) -> None:
    row = requests(traces)["traced-1"]
    p, d = span_attributes("traced-1")
    ttft = d["start"] - p["start"] + round(d["gen_ai.latency.time_to_first_token"] * 1e9)
    assert row["ttft_ns"] == ttft
    assert row["arrived_at_ns"] == p["start"]
    assert row["joined_by"] == "client id"
    assert row["p_engine"].startswith("vllm-prefill/")
    assert row["d_engine"].startswith("vllm-decode/")
    assert (row["prompt_tokens"], row["output_tokens"]) == (200, 8)
    assert row["trace_id"] == "ab" * 16
    assert row["label"] == "imported"


def test_what_a_span_measured_is_a_step_and_the_rest_is_unknown(traces: Path) -> None:
    row = requests(traces)["traced-1"]
    p, d = span_attributes("traced-1")
    assert row["prefill_compute_ns"] == pytest.approx(p["gen_ai.latency.time_in_model_prefill"] * 1e9, abs=2)
    assert row["prefill_queue_ns"] == pytest.approx(p["gen_ai.latency.time_in_queue"] * 1e9, abs=2)
    assert row["decode_first_step_ns"] == pytest.approx(
        d["gen_ai.latency.time_in_model_prefill"] * 1e9, abs=2
    )
    assert row["registration_route_ns"] == d["start"] - p["start"] - round(
        p["gen_ai.latency.time_to_first_token"] * 1e9
    )
    assert row["unknown_ns"] > 0
    assert row["transfer_wire_ns"] is None
    assert row["registration_handshake_ns"] is None
    assert row["connector"] is None
    assert row["transfer_bytes"] is None
    check_sums(traces)


def test_a_leg_alone_is_unknown_but_for_its_ttft(traces: Path) -> None:
    row = requests(traces)["never-fetched"]
    assert row["joined_by"] == "unjoined"
    assert row["ttft_ns"] == row["unknown_ns"] > 0


def test_a_request_that_failed_has_no_first_token(traces: Path) -> None:
    row = requests(traces)["bad-handshake"]
    assert (row["outcome"], row["outcome_detail"], row["ttft_ns"]) == ("error", "no token generated", None)


def test_protobuf_tells_the_same_as_json(traces: Path, tmp_path: Path) -> None:
    imported(tmp_path / "p.duckdb", PROTOBUF)
    assert requests(tmp_path / "p.duckdb") == requests(traces)


def test_protobuf_with_varint_lengths_and_alone(traces: Path, tmp_path: Path) -> None:
    data, messages = PROTOBUF.read_bytes(), []
    while data:
        size = int.from_bytes(data[:4], "big")
        messages.append(data[4 : 4 + size])
        data = data[4 + size :]
    delimited = b"".join(bytes([len(m) & 127 | 128, len(m) >> 7]) + m for m in messages)
    (tmp_path / "delimited.pb").write_bytes(delimited)
    (tmp_path / "alone.pb").write_bytes(b"".join(messages))  # a message is what its parts are put together
    for name in ("delimited", "alone"):
        imported(tmp_path / f"{name}.duckdb", tmp_path / f"{name}.pb")
        assert requests(tmp_path / f"{name}.duckdb") == requests(traces)


def test_the_files_of_both_engines_may_come_apart_and_packed(traces: Path, tmp_path: Path) -> None:
    for service in ("vllm-prefill", "vllm-decode"):
        lines = [line for line in TRACES.read_text().splitlines() if service in line]
        with gzip.open(tmp_path / f"{service}.jsonl.gz", "wt") as file:
            file.write("\n".join(lines))
    target = tmp_path / "t.duckdb"
    imported(target, tmp_path / "vllm-decode.jsonl.gz", tmp_path / "vllm-prefill.jsonl.gz")
    assert requests(target) == requests(traces)


def test_two_spans_that_may_both_be_prefills_are_not_joined(tmp_path: Path) -> None:
    text = TRACES.read_text()
    for number in ("8", "12"):
        text = text.replace(
            '{"key":"gen_ai.request.max_tokens","value":{"intValue":"%s"}}' % number,  # noqa: UP031
            '{"key":"gen_ai.request.max_tokens","value":{"intValue":"1"}}',
        )
    (tmp_path / "t.jsonl").write_text(text)
    told = imported(tmp_path / "t.duckdb", tmp_path / "t.jsonl")
    assert told["of_these_joined"] == 0
    assert told["stored"]["requests"] == 8


def test_broken_lines_are_counted_and_the_rest_is_read(traces: Path, tmp_path: Path) -> None:
    mixed = tmp_path / "t.jsonl"
    mixed.write_bytes(TRACES.read_bytes() + b'{"resourceSpans": [{\n{"x": 1}\n\xff\xfe\n')
    told = imported(tmp_path / "t.duckdb", mixed)
    assert told["not_understood"] == {"lines that are no JSON": 2, "lines without resourceSpans": 1}
    assert requests(tmp_path / "t.duckdb") == requests(traces)


def test_what_kvscope_exports_is_not_mistaken_for_vllms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    db = store(tmp_path / "s.duckdb", [rows.PUSH])
    assert cli.main(["export", "otlp", "--db", str(db), "-o", str(tmp_path / "t.jsonl")]) == 0
    assert cli.main(["import", str(tmp_path / "t.jsonl"), "-o", str(tmp_path / "t.duckdb")]) == 1
    assert "nothing to import in t.jsonl" in (said := capsys.readouterr().err)
    assert "takes vLLM's traces, not those of kvscope, which a snapshot or an archive moves" in said
    assert "spans of kvscope itself" in said
    assert not (tmp_path / "t.duckdb").exists()


# --- logs ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pulled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("logs") / "pull.duckdb"
    told = imported(target, *PULL, "--year", "2026")
    assert (told["requests_of_traces_and_logs"], told["of_these_joined"]) == (5, 3)
    return target


def test_legs_are_joined_by_the_request_id_that_d_names(pulled: Path) -> None:
    row = requests(pulled)["traced-1"]
    assert (row["joined_by"], row["connector"], row["outcome"]) == ("remote id", "pull", "finished")
    assert row["p_request"] == "cmpl-traced-1-0-94110c86"
    assert row["d_request"] == "cmpl-traced-1-0-817375cb"
    assert row["p_engine"].startswith("p-")
    assert row["d_engine"].startswith("d-")
    assert row["transferred_tokens"] == 200
    assert row["model"] == "tiny"


def test_what_a_log_does_not_tell_is_null(pulled: Path) -> None:
    row = requests(pulled)["traced-1"]
    for name in ("ttft_ns", "output_tokens", "transfer_bytes", "prefill_compute_ns", "decode_first_step_ns"):
        assert row[name] is None, name


def test_seconds_are_no_more_exact_than_they_are(pulled: Path) -> None:
    row = requests(pulled)["traced-1"]
    assert row["waterfall"]
    assert all(entry["error_ns"] >= 10**9 for entry in row["waterfall"])


def test_leases_and_their_ends(pulled: Path) -> None:
    found = selected(
        pulled,
        'SELECT client_id, "end", (deadline_at_ns - armed_at_ns) / 1e9, (ended_at_ns - armed_at_ns) / 1e9 '
        "FROM leases JOIN requests ON request_id = requests.id ORDER BY 1",
    )
    assert len(found) == 4
    assert ("never-fetched", "expired", 5.0, 5.0) in found
    row = requests(pulled)["never-fetched"]
    assert (row["outcome"], row["outcome_detail"]) == ("incomplete", "lease expired, never read")


def test_failures_and_whose_they_are(pulled: Path) -> None:
    found = selected(
        pulled,
        "SELECT client_id, name, detail FROM failures LEFT JOIN requests ON request_id = requests.id "
        "ORDER BY 2",
    )
    assert found == [
        ("bad-handshake", "handshake_failed", "engine-gone"),
        (None, "handshake_setup_failed", "engine-gone"),
    ]
    row = requests(pulled)["bad-handshake"]
    assert (row["outcome"], row["outcome_detail"]) == ("error", "handshake_failed")


def test_hand_shakes_take_what_vllm_measured(pulled: Path) -> None:
    ((engine, ns),) = selected(pulled, "SELECT engine, ns FROM handshakes")
    assert engine.startswith("d-")
    assert ns == pytest.approx((0.0206164519986487 + 0.08916558300188626) * 1e9)


def test_push_is_joined_by_the_clients_id_and_marked_as_inferred(tmp_path: Path) -> None:
    imported(tmp_path / "push.duckdb", *PUSH)
    row = requests(tmp_path / "push.duckdb")["traced-1"]
    assert (row["joined_by"], row["connector"]) == ("client id", "push")
    assert selected(tmp_path / "push.duckdb", "SELECT DISTINCT operation FROM transfers") == [("WRITE",)]


@pytest.fixture(scope="module")
def conversation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("logs") / "bidirectional.duckdb"
    imported(target, *BIDIRECTIONAL)
    return target


def test_a_conversation_is_chained_by_the_kv_that_p_reads_back(conversation: Path) -> None:
    found = sorted(requests(conversation).values(), key=lambda row: row["arrived_at_ns"])
    assert [row["turn"] for row in found] == [1, 2, 3]
    assert {row["session"] for row in found} == {found[0]["id"]}
    assert [row["reuse_outcome"] for row in found] == [None, "pulled", "pulled"]
    assert [row["reuse_pulled_tokens"] for row in found] == [None, 315, 371]
    assert all(row["connector"] == "bidirectional" for row in found)


def test_json_lines_tell_milliseconds(conversation: Path) -> None:
    row = max(requests(conversation).values(), key=lambda row: row["arrived_at_ns"])
    assert row["arrived_at_ns"] % 10**9 == 589 * MS
    assert {entry["error_ns"] for entry in row["waterfall"]} == {MS}
    assert row["prefill_compute_ns"] == 78 * MS
    assert row["registration_blocks_ns"] == 10 * MS
    assert row["unknown_ns"] == (59 + 15 + 98 + 36) * MS


@pytest.mark.parametrize(
    ("prefix", "error_ns"),
    [("2026-11-29T22:34:31.123456789Z stdout F ", 1), ("2026-11-29T23:34:31.123+01:00 ", MS)],
)
def test_the_time_that_a_container_runtime_wrote_is_preferred(prefix: str, error_ns: int) -> None:
    line = PULL[1].read_bytes().splitlines()[0]
    told = import_log.Stamps(imports._offset("+05:00"), 1999).read(prefix.encode() + line)
    assert told is not None
    assert told.when.error_ns == error_ns
    assert told.when.at_ns // 10**9 == 1795991671
    assert (told.pid, told.process) == (13136, "EngineCore")


def test_colours_and_the_offset_of_local_time() -> None:
    grey, end = "\x1b[90m", "\x1b[0m"
    begin = "\x1b[0;36m(EngineCore pid=7)\x1b[0;0m \x1b[32mINFO"
    line = f"{begin}{end} {grey}11-29 22:34:31{end} {grey}[a.py:1]{end} Hi"
    told = import_log.Stamps(imports._offset("-01:30"), 2026).read(line.encode())
    assert told is not None
    assert told.when.at_ns == (1795991671 + 5400) * 10**9
    assert told.message == "Hi"


def test_the_year_is_that_in_which_the_file_was_last_changed() -> None:
    head = PULL[1].read_bytes()
    assert import_log.log_year(1795991671, head) == 2026
    assert import_log.log_year(1800000000, head) == 2026  # January 2027: the log is of November before


def test_importing_twice_stores_once(tmp_path: Path) -> None:
    target = tmp_path / "twice.duckdb"
    first = imported(target, *PULL, TRACES)
    again = imported(target, *PULL, TRACES)
    assert again["stored"] == {}
    assert again["there_already"] == first["stored"]
    assert len(selected(target, "FROM requests")) == 10


def test_what_was_imported_is_asked_as_any_store(
    pulled: Path, conversation: Path, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (pulled, conversation, traces):
        source = StoreFile(path)
        for name in questions():
            source.query(name, "", {})
        source.close()
    assert cli.main(["explain", "traced-1", "--db", str(traces)]) == 0
    said = capsys.readouterr().out
    assert "prefill.compute" in said
    assert "= TTFT" in said
    assert "unknown" in said
    assert cli.main(["explain", "traced-1", "--db", str(pulled)]) == 0
    assert "remote id" in capsys.readouterr().out
    for path in (pulled, traces):
        assert cli.main(["top", "--db", str(path), "--once"]) == 0
        assert "label imported" in capsys.readouterr().out
    assert cli.main(["sessions", "--db", str(conversation)]) == 0
    assert "1 conversation, 3 turns" in capsys.readouterr().out


# --- archives and stores ------------------------------------------------------------------------------


def archive(folder: Path, source: Path) -> Path:
    with duckdb.connect(str(source), read_only=True) as database:
        for table in schema.TABLES:
            for half in (0, 1):
                place = folder / "v1" / table.name / "d=2026-11-29" / f"h={half:02}"
                place.mkdir(parents=True)
                database.execute(
                    f"COPY (SELECT * FROM {table.name} WHERE id % 2 = {half}) TO '{place}/a.parquet'"
                )
    return folder


def test_an_archive_answers_as_before(tmp_path: Path) -> None:
    source = store(
        tmp_path / "s.duckdb",
        rows.STORED,
        transfers=rows.TRANSFERS,
        leases=rows.LEASES,
        handshakes=rows.HANDSHAKES,
        failures=rows.FAILURES,
        engines=rows.ENGINES,
    )
    directory = archive(tmp_path / "archive", source)
    imported(tmp_path / "from_archive.duckdb", directory)
    imported(tmp_path / "from_store.duckdb", source)
    answers = []
    for path in (source, directory, tmp_path / "from_archive.duckdb", tmp_path / "from_store.duckdb"):
        asked = StoreFile(path)
        answers.append({name: asked.query(name, "", {})["rows"] for name in questions()})
        asked.close()
    assert answers[0] == answers[1] == answers[2] == answers[3]
    again = imported(tmp_path / "from_archive.duckdb", directory, source)
    assert again["stored"] == {}


def test_samples_of_two_daemons_that_have_the_same_number_are_both_kept(tmp_path: Path) -> None:
    names = [column.name for column in schema.SAMPLES.columns]
    sample = dict.fromkeys(names) | {"id": 1, "at_ns": 5, "host": "a", "name": "cpu", "value": 1.0}
    for host in ("a", "b"):
        store(tmp_path / f"{host}.duckdb", [], samples=[sample | {"host": host}])
    imported(tmp_path / "both.duckdb", tmp_path / "a.duckdb", tmp_path / "b.duckdb", tmp_path / "a.duckdb")
    assert selected(tmp_path / "both.duckdb", "SELECT host FROM samples ORDER BY 1") == [("a",), ("b",)]


def test_a_label_may_be_given(tmp_path: Path) -> None:
    source = store(tmp_path / "s.duckdb", [rows.PUSH, rows.PULL], engines=rows.ENGINES)
    imported(tmp_path / "kept.duckdb", source)
    imported(tmp_path / "named.duckdb", source, "--label", "old")
    labels = "SELECT DISTINCT label FROM requests ORDER BY 1"
    assert selected(tmp_path / "kept.duckdb", labels) == [("",), ("benchmark",)]
    assert selected(tmp_path / "named.duckdb", labels) == [("old",)]
    assert selected(tmp_path / "named.duckdb", "SELECT DISTINCT label FROM engines") == [("old",)]


# --- what is wrong ------------------------------------------------------------------------------------


def test_a_file_that_is_no_store_is_not_touched(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "notes.txt"
    target.write_text("mine")
    assert cli.main(["import", str(TRACES), "-o", str(target)]) == 1
    assert "--force replaces it" in capsys.readouterr().err
    assert target.read_text() == "mine"
    imported(target, TRACES, "--force")
    assert len(requests(target)) == 5


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_a_source_is_not_the_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], force: list[str]
) -> None:
    path = store(tmp_path / "s.duckdb", [rows.PUSH])
    (tmp_path / "link.duckdb").symlink_to(path)
    assert cli.main(["import", str(tmp_path / "link.duckdb"), "-o", str(path), *force]) == 2
    assert "is both source and target" in capsys.readouterr().err
    assert len(requests(path)) == 1


def test_a_failure_leaves_a_store_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "s.duckdb"
    imported(target, TRACES)

    def interrupted(self: import_log.Logs) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(import_log.Logs, "_store_engines", interrupted)
    assert cli.main(["import", *map(str, PULL), "-o", str(target)]) == 130
    assert len(requests(target)) == 5
    assert cli.main(["import", *map(str, PULL), "-o", str(tmp_path / "new.duckdb")]) == 130
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s.duckdb"]


@pytest.mark.parametrize(
    ("content", "name", "said"),
    [
        (b"hello\nworld\n", "a.log", "neither a kvscope archive nor OTLP traces nor a vLLM log"),
        (b"", "a.log", "neither a kvscope archive"),
        (b"no gzip", "a.jsonl.gz", "its gzip data is damaged"),
        (gzip.compress(b"x" * 10000, mtime=0)[:40], "a.jsonl.gz", "its gzip data is damaged"),
        (b'{"resourceSpans": []}\n', "a.jsonl", "nothing to import"),
        (b"\0\0\0\x04abcd", "a.pb", "nothing to import"),
        (b"\0\0\0\xffabcd", "a.pb", "nothing to import"),
        (b"(EngineCore pid=1) INFO 11-29 22:34:31 [a.py:1] Hello\n", "a.log", "VLLM_LOGGING_LEVEL=DEBUG"),
    ],
)
def test_what_is_no_source_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, name: str, said: str
) -> None:
    (tmp_path / name).write_bytes(content)
    assert cli.main(["import", str(tmp_path / name), "-o", str(tmp_path / "o.duckdb")]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "o.duckdb").exists()


def test_wrong_arguments_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "o.duckdb")
    for arguments, said in (
        (["--utc-offset", "east"], "is no offset"),
        (["--year", "12"], "--year is a year"),
        (["--label", "a\0b"], "NUL"),
    ):
        assert cli.main(["import", str(TRACES), "-o", target, *arguments]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["import", str(tmp_path / "none.log"), "-o", target]) == 1
    assert "No such file" in capsys.readouterr().err


class Nothing:
    """Takes rows as a store does, and checks that they would fit."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, tuple[Any, ...]]] = []

    def add(self, table: str, row: tuple[Any, ...]) -> None:
        assert len(row) == len(schema.BY_NAME[table].columns)
        self.rows.append((table, row))


def read_bytes(data: bytes, kind: str) -> tuple[import_lines.Notes, list[tuple[str, tuple[Any, ...]]]]:
    import io
    from datetime import timedelta

    notes, into = import_lines.Notes(), Nothing()
    file = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]
    if kind == "otlp":
        joining = import_otlp.Joining(into, notes, "x")  # type: ignore[arg-type]
        import_otlp.read(file, joining, notes)
        joining.finish()
    else:
        logs = import_log.Logs(into, notes, "x")  # type: ignore[arg-type]
        logs.read(file, "f", timedelta(), 2026)
        logs.finish()
    return notes, into.rows


ORIGINALS = {
    "otlp": [TRACES.read_bytes(), PROTOBUF.read_bytes()],
    "log": [path.read_bytes() for path in (*PULL, *PUSH, *BIDIRECTIONAL)],
}
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@pytest.mark.parametrize("kind", ORIGINALS)
@FUZZ
@given(data=st.data())
def test_any_bytes_are_read_to_their_end(kind: str, data: st.DataObject) -> None:
    read_bytes(data.draw(st.binary(max_size=3000)), kind)


@pytest.mark.parametrize("kind", ORIGINALS)
@FUZZ
@given(data=st.data())
def test_damaged_files_give_rows_that_fit_and_add_up(kind: str, data: st.DataObject) -> None:
    content = bytearray(data.draw(st.sampled_from(ORIGINALS[kind])))
    for _ in range(data.draw(st.integers(1, 12))):
        at = data.draw(st.integers(0, len(content) - 1))
        change = data.draw(st.binary(min_size=0, max_size=6))
        content[at : at + data.draw(st.integers(0, 6))] = change
    _, found = read_bytes(bytes(content), kind)
    names = [column.name for column in schema.REQUESTS.columns]
    for table, row in found:
        for column, value in zip(schema.BY_NAME[table].columns, row, strict=True):
            if column.type == "BIGINT" and value is not None:
                assert -(2**63) <= value < 2**63
            if isinstance(value, str):
                value.encode()
        if table == "requests":
            told = dict(zip(names, row, strict=True))
            spent = [told[s.column] for s in steps.STEPS if s.in_ttft and told[s.column] is not None]
            assert all(ns >= 0 for ns in spent)
            if told["ttft_ns"] is not None:
                assert sum(spent) == told["ttft_ns"]


def test_lines_that_are_too_long_are_counted_and_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    import io

    notes = import_lines.Notes()
    file = io.BytesIO(b"short\n" + b"x" * 5000 + b"\nagain\n" + b"y" * 3000)
    assert list(import_lines.lines(file, notes, 1024)) == [b"short", b"again"]
    assert notes.not_understood == {"lines of more than 1 KiB": 2}


def test_legs_beyond_what_is_held_are_stored_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_log, "HELD", 2)
    monkeypatch.setattr(import_otlp, "HELD", 2)
    for kind, original in (("log", ORIGINALS["log"][1]), ("otlp", ORIGINALS["otlp"][0])):
        notes, found = read_bytes(original, kind)
        assert sum(table == "requests" for table, _ in found) >= 4
        assert any("before all files were read" in what for what in notes.left_out)


def test_a_deep_or_strange_json_line_is_one_broken_line() -> None:
    notes, found = read_bytes(b'{"resourceSpans":' + b"[" * 100_000 + b"\n", "otlp")
    assert found == []
    assert sum(notes.not_understood.values()) == 1
    for strange in (
        b'{"resourceSpans": 7}',
        b'{"resourceSpans": [7, null, {"scopeSpans": {"spans": 1}}]}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [%s]}]}]}'
        % b'{"name": "llm_request", "startTimeUnixNano": 1e400}',
        b'{"resourceSpans": [{"scopeSpans": [{"spans": [%s]}]}]}'
        % b'{"name": "llm_request", "attributes": [{"key": 1}]}',
    ):
        assert read_bytes(strange + b"\n", "otlp")[1] == []


# --- splitting ----------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    times=st.lists(st.none() | st.integers(-50, 200), max_size=8),
    end=st.none() | st.integers(0, 150),
)
def test_steps_touch_and_add_up_whatever_was_told(times: list[int | None], end: int | None) -> None:
    names = [step.name for step in steps.STEPS if step.in_ttft]
    marks = [Mark(names[i], at) for i, at in enumerate(times)]
    found = split(0, marks, end)
    at = 0
    for entry in found.waterfall:
        assert entry["from_ns"] == at
        assert entry["ns"] >= 0
        at += entry["ns"]
    if end is not None:
        assert sum(found.totals.values()) == at == end
    in_order = [t for t in times if t is not None]
    if in_order == sorted(in_order) and all(t >= 0 and (end is None or t <= end) for t in in_order):
        assert found.clamped_ns == 0
    elif any(t < 0 or (end is not None and t > end) for t in in_order):
        assert found.clamped_ns > 0


def test_a_boundary_that_was_not_told_makes_its_neighbours_unknown() -> None:
    found = split(
        0, [Mark("prefill.queue", 5), Mark("prefill.compute", None), Mark("decode.first_step", 30)], 40
    )
    assert found.totals == {"prefill.queue": 5, "unknown": 35}
