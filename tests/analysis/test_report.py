"""`kvscope report`: its figures are the answers of the questions, its page is sound, it stands bad input."""

from __future__ import annotations

import contextlib
import json
import random
import re
import shlex
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import duckdb
import pytest
import uvicorn

from kvscope import cli, query, schema
from kvscope.analysis.report import data as report_data
from kvscope.analysis.report import sections as report_sections
from kvscope.analysis.report.html import page
from kvscope.analysis.report.parts import shown
from kvscope.analysis.report.text import as_json as as_json_text
from kvscope.analysis.report.text import markdown
from kvscope.client import Daemon, StoreFile
from kvscope.collectors.api import create_app

from ..cli import rows
from ..cli.conftest import FakeDaemon
from . import html_check
from .made import Row, store

EVIL = '<script>alert("1")</script>'
LONG = "x" * 5000
HOSTILE = [
    f"{EVIL}'\"&amp;</title></svg>",
    '"><img src=http://203.0.113.1/x onerror=alert(1)>',
    "\x1b[31m\x00\x07red\r\nline‮\u202egnp",
    "| a | `b` [link](http://203.0.113.1) **c** <!-- --> @all #1",
    LONG,
]


def busy(number: int, rng: random.Random, **columns: Any) -> Row:
    """A pull of about 120 ms, most of it coordination."""
    prefill = rng.uniform(20, 40)
    seen = prefill + 10 + rng.uniform(40, 80)
    return rows.request(
        number,
        ("prefill.compute", 0, prefill),
        ("registration.route", prefill, prefill + 5),
        ("transfer.wire", prefill + 5, prefill + 10, "estimated"),
        ("readiness.detect", prefill + 10, seen, "poll"),
        ("decode.first_step", seen, seen + 10),
        ("decode.generate", seen + 10, seen + 400),
        **{"connector": "pull", "id": 2**63 + 100 + number} | columns,
    )


def many(count: int, seed: int = 1, **columns: Any) -> list[Row]:
    rng = random.Random(seed)
    return [busy(number, rng, **columns) for number in range(1, count + 1)]


@pytest.fixture(scope="module")
def db(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two pairs, some hostile texts, all kinds of tables."""
    slow = [row | {"id": row["id"] + 1000, "d_engine": "engine-e"} for row in many(40, 2)]
    evil = [
        row | {"id": row["id"] + 2000, "client_id": text, "p_engine": text, "outcome_detail": text}
        for row, text in zip(many(5, 3, arrived_at_ns=rows.T0_NS + 50 * 10**9), HOSTILE, strict=True)
    ]
    evil[:2] = [
        row | {"ttft_ns": None, "outcome": "lost", "current_step": row["client_id"]} for row in evil[:2]
    ]
    return store(
        tmp_path_factory.mktemp("report") / "store.duckdb",
        [*rows.STORED, *many(60), *slow, *evil],
        engines=[
            *rows.ENGINES,
            rows.engine(60, HOSTILE[0], "worker", fingerprint=json.dumps({EVIL: HOSTILE})),
        ],
        transfers=rows.TRANSFERS,
        leases=rows.LEASES,
        handshakes=rows.HANDSHAKES,
        failures=[*rows.FAILURES, rows.FAILURES[0] | {"id": 42, "detail": HOSTILE[1], "name": HOSTILE[0]}],
    )


class Told(NamedTuple):
    """A report in its three formats."""

    json: dict[str, Any]
    html: str
    markdown: str

    @property
    def document(self) -> html_check.Document:
        return html_check.read(self.html)


def tell(
    path: Path, *where: str, since: str = "", label: str | None = None, title: str | None = None
) -> Told:
    """As the command does; all formats of one asking."""
    with contextlib.closing(StoreFile(path)) as source:
        at = (f"the file {path}", f"--db {shlex.quote(str(path))}")
        found = report_data.gather(source, since, None, label, where, at, time.time_ns())
    made = report_sections.report(found, title)
    return Told(json.loads(as_json_text(made)), page(made), markdown(made))


@pytest.fixture(scope="module")
def told(db: Path) -> Told:
    return tell(db, title=HOSTILE[3])


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    listener = socket.create_server(("127.0.0.1", 0))
    api = uvicorn.Server(uvicorn.Config(create_app(FakeDaemon(), query.Limits()), log_level="error"))
    thread = threading.Thread(target=api.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    while not api.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    api.should_exit = True
    thread.join(10)


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What `kvscope report` writes to standard output."""
    assert cli.main(["report", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(report(capsys, *arguments, "--json"))
    return found


# --- figures -----------------------------------------------------------------------------------------


def test_every_answer_is_what_its_own_command_prints(db: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = as_json(capsys, "--db", db, "--since", "2026-11-29T15:54:09", "--where", "prompt_tokens>=512")
    assert set(found["answers"]) >= set(report_data.QUESTIONS)
    for name, answer in found["answers"].items():
        words = shlex.split(answer["command"])
        assert words[:3] == ["kvscope", "query", name]
        assert cli.main([*words[1:], "--format", "json"]) == 0, name
        asked = json.loads(capsys.readouterr().out)
        assert answer["rows"] == asked["rows"], name
        assert answer["columns"] == [column["name"] for column in asked["columns"]]
        assert answer["sql"] == query.questions()[name].sql
        assert not answer["error"]
    assert found["answers"]["fleet_bands"]["rows"]


def test_the_pages_tables_have_the_figures_of_the_answers(told: Told) -> None:
    answers, document = told.json["answers"], told.document

    def cells(question: str, *names: str, where: str = "", value: object = None) -> list[list[str]]:
        found = [
            dict(zip(answers[question]["columns"], row, strict=True)) for row in answers[question]["rows"]
        ]
        return [[shown(row[name]) for name in names] for row in found if not where or row[where] == value]

    def table(caption: str) -> list[list[str]]:
        return document.tables[caption][1:]

    classes = ("compute_ms", "capacity_ms", "transfer_ms", "coordination_ms", "unknown_ms")
    bands = cells("fleet_bands", "band", "requests", "from_ms", "to_ms", "mean_ms", *classes, "main_step")
    assert table("Bands of TTFT") == bands
    steps = ("step", "class", "requests", "share_percent", "mean_ms", "p50_ms", "p90_ms", "p99_ms")
    assert table("Steps of all connectors") == cells("fleet_steps", *steps)
    trend = cells("fleet_trend", "requests", "p50_ttft_ms", "p99_ttft_ms", "mean_ms", *classes)
    assert [row[1:] for row in table("TTFT over time")] == trend
    names = ("engine", "lease_end", "leases", "renewed", "p50_held_ms", "min_margin_ms")
    assert [row[:6] for row in table("Leases")] == cells("leases", *names)
    assert [row[0] for row in table("The longest TTFT")] == [row[0] for row in cells("slowest", "id")]
    fleet = ("requests", "p50_ttft_ms", "p90_ttft_ms", "p99_ttft_ms", "mean_ttft_ms")
    assert table("TTFT by connector")[0][1:6] == cells("fleet", *fleet, where="level", value="all")[0]
    assert "23.456" not in document.text  # the check below would pass for any text otherwise
    for row in bands:
        assert f"{row[4]} ms" in document.text, "the figure says the same"


def test_a_request_is_told_with_all_its_steps(told: Told) -> None:
    assert told.json["slowest"][0]["request"]["id"] == str(rows.PUSH["id"])
    document = told.document
    steps = document.tables[f"Steps of request 1: {rows.PUSH['client_id']}"][1:]
    assert ["75.000", "49.000", "P", "transfer.dispatch", "coordination", "yes", "hook", "0.000"] in steps
    critical = [float(row[1]) for row in steps if row[5] == "yes"]
    assert sum(critical) == pytest.approx(412)
    assert "add up to 412.000 ms, which is TTFT" in document.text
    assert "D→P: registration.notify W" in document.text, "both legs are on the figure's axis"
    assert "meanwhile 26.000 ms" in document.text


def test_production_alone_where_there_is_any_else_the_most_frequent_label(
    db: Path, told: Told, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (told.json["label"], told.json["labels"]["benchmark"]) == ("", 1)
    assert "Label: production (others: benchmark)" in told.markdown
    found = as_json(capsys, "--db", db, "--label", "benchmark")
    assert {one["request"]["label"] for one in found["slowest"]} == {"benchmark"}
    assert tell(db, "label=benchmark").json["label"] == "benchmark"
    often = [row | {"id": row["id"] + 9} for row in many(5, label="often")]
    only = store(tmp_path / "only.duckdb", [*many(3, label="rare"), *often])
    assert tell(only).json["label"] == "often"


def test_a_daemon_a_file_and_a_parquet_directory_tell_the_same(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot, directory = tmp_path / "snapshot.duckdb", tmp_path / "archive"
    with duckdb.connect(str(snapshot)) as database:
        rows.fill(database)
        for table in schema.TABLES:
            folder = directory / "v1" / table.name / "d=2026-11-29" / "h=15"
            folder.mkdir(parents=True)
            database.execute(f"COPY {table.name} TO '{folder}/a.parquet'")
    window = ("--since", "2026-11-29T15:54", "--until", "2026-11-29T15:55")
    told = [
        as_json(capsys, *where, *window)
        for where in (("--url", url), ("--db", snapshot), ("--db", directory))
    ]
    rows_of = [{name: one["rows"] for name, one in found["answers"].items()} for found in told]
    assert rows_of[0] == rows_of[1] == rows_of[2]
    assert told[0]["verdict"] == told[1]["verdict"] == told[2]["verdict"]
    assert rows_of[0]["fleet"][0]
    assert [one["request"]["id"] for one in told[0]["slowest"]] == [
        one["request"]["id"] for one in told[2]["slowest"]
    ]


def test_a_daemons_report_lists_what_is_in_flight_without_a_first_token(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = as_json(capsys, "--url", url, "--since", "2026-11-29T15:54")
    assert {row["client_id"] for row in found["unfinished"]} == {
        rows.LOST["client_id"],
        rows.LIVE["client_id"],
    }
    assert found["source"] == f"the daemon at {url}"
    text = report(capsys, "--url", url, "--since", "2026-11-29T15:54", "--format", "html")
    assert rows.LIVE["client_id"] in {row[1] for row in html_check.read(text).tables["Without an end"]}


def test_a_password_in_the_url_is_not_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    secret = url.replace("http://", "http://me:hunter2@")
    assert "hunter2" not in report(capsys, "--url", secret, "--since", "2026-11-29T15:54", "--json")


# --- verdict -----------------------------------------------------------------------------------------


def test_the_verdict_names_the_wait_the_step_and_the_pair(tmp_path: Path) -> None:
    rng = random.Random(4)
    worse = [
        rows.request(
            500 + i,
            ("prefill.compute", 0, 30),
            ("readiness.detect", 30, 330 + rng.uniform(0, 9), "poll"),
            connector="pull",
            d_engine="engine-e",
        )
        for i in range(10)
    ]
    found = tell(store(tmp_path / "s.duckdb", [*many(60), *worse])).json
    first, second = found["verdict"]
    assert first.startswith("Mostly coordination wait: ")
    assert "its largest step is readiness.detect" in first
    assert "longest on the pair engine-p → engine-e, 30" in first
    assert second.startswith("Accelerators would not shorten it: for readiness.detect")
    assert "on D (smaller batches" in second, "in a pull D looks for completions"
    fleet = found["answers"]["fleet"]
    (whole,) = (dict(zip(fleet["columns"], row, strict=True)) for row in fleet["rows"] if "all" in row)
    assert f"{whole['coordination_percent']:.1f} % of TTFT" in first
    assert found["cautions"] == []


@pytest.mark.parametrize(
    ("compute", "route", "said"),
    [
        (100, 100, "A near tie of "),
        (104, 100, "A near tie of compute wait (51.0 % of TTFT) with the rest (coordination wait 49.0 %"),
        (150, 100, "Mostly compute wait: 60.0 %"),
        (100, 150, "Mostly coordination wait: 60.0 %"),
    ],
)
def test_a_near_tie_is_called_one(compute: int, route: int, said: str, tmp_path: Path) -> None:
    made = [
        rows.request(
            i,
            ("prefill.compute", 0, compute),
            ("registration.route", compute, compute + route),
            connector="push",
        )
        for i in range(30)
    ]
    found = tell(store(tmp_path / "s.duckdb", made)).json
    assert found["verdict"][0].startswith(said)
    assert ("No single change" in found["verdict"][1]) == ("near tie" in said)
    assert not [one for one in found["cautions"] if "Thin" in one]


def test_thin_and_unseen_data_are_called_so(tmp_path: Path) -> None:
    made = [
        rows.request(i, ("prefill.compute", 0, 40), ("unknown", 40, 100, "not observed"), connector="pull")
        for i in range(29)
    ]
    found = tell(store(tmp_path / "s.duckdb", made)).json
    assert found["verdict"][0].startswith("Mostly unknown: 60.0 % of TTFT")
    assert found["verdict"][1].startswith("It was not observed")
    assert "Thin data: 29 requests; percentiles of so few say little." in found["cautions"]
    assert "Not observed: 60.0 % of TTFT, which may belong to any class." in found["cautions"]


def test_a_slow_tail_that_waits_for_something_else_is_told(tmp_path: Path) -> None:
    queued = [
        rows.request(
            900 + i, ("prefill.queue", 0, 900 + i), ("prefill.compute", 900 + i, 930 + i), connector="pull"
        )
        for i in range(6)
    ]
    found = tell(store(tmp_path / "s.duckdb", [*many(594), *queued])).json
    assert found["verdict"][0].startswith("Mostly coordination wait")
    assert any(
        "The slowest hundredth differs: mostly compute wait, 100 %" in one for one in found["cautions"]
    )


def test_simulated_data_is_called_so(tmp_path: Path) -> None:
    made = tell(store(tmp_path / "s.duckdb", many(3, label="simulated")))
    assert made.json["simulated"] is True
    assert "Simulated" in made.document.text
    assert "**Simulated**" in made.markdown
    engines = [rows.engine(1, "engine-p", "scheduler", kvscope="simulated")]
    hidden = store(tmp_path / "hidden.duckdb", many(3, label="benchmark"), engines=engines)
    assert tell(hidden).json["simulated"] is True
    real = tell(store(tmp_path / "real.duckdb", many(3), engines=rows.ENGINES))
    assert real.json["simulated"] is False
    assert "imulated" not in real.document.text.replace(str(tmp_path), "")


def test_a_simulated_neighbour_does_not_make_it_simulated(tmp_path: Path) -> None:
    """Leases are of all labels: their engines may have served others only."""
    engines = [*rows.ENGINES, rows.engine(70, "sim-p", "scheduler", kvscope="simulated", label="benchmark")]
    leases = [rows.LEASES[0] | {"id": 70, "engine": "sim-p"}]
    made = tell(store(tmp_path / "s.duckdb", many(3), engines=engines, leases=leases))
    assert "sim-p" in made.document.text
    assert made.json["simulated"] is False


def test_the_chart_of_pairs_is_in_the_order_of_its_table(tmp_path: Path) -> None:
    """Whose median is the higher may have the lower mean."""
    steady = [row | {"id": row["id"] + 1000, "d_engine": "steady"} for row in many(20)]
    rare = [
        rows.request(
            number,
            ("prefill.compute", 0, 30),
            ("registration.route", 30, 30 + route),
            ("decode.first_step", 30 + route, 40 + route),
            ("decode.generate", 40 + route, 100 + route),
            connector="pull",
            id=2**62 + number,
            d_engine="rare",
        )
        for number, route in enumerate([5.0] * 15 + [5000.0] * 5)
    ]
    document = tell(store(tmp_path / "s.duckdb", [*steady, *rare])).document
    first, second = [row[2] for row in document.tables["Pairs"][1:]]
    assert (first, second) == ("steady", "rare")
    chart = document.text[document.text.index("Mean TTFT of pairs") :]
    assert chart.index("→ steady") < chart.index("→ rare")


def test_engines_that_differ_are_named_with_what_differs(db: Path) -> None:
    found = tell(db, "connector=push").document.tables["In what the engines differ"]
    assert ["vllm", "0.32.0", "engine-p"] in found
    assert ["vllm", "0.32.0 and 0.33.0", "engine-d"] in found, "its processes differ"
    assert not [row for row in found if row[0] in ("nixl", "model")]


def test_what_was_sampled_is_called_approximate(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = StoreFile.query

    def sampled(self: StoreFile, name: str, sql: str, parameters: query.Parameters) -> dict[str, Any]:
        answer = whole(self, name, sql, parameters)
        if name == "fleet_steps":
            names = [column["name"] for column in answer["columns"]]
            if "one_in" not in names:
                answer["columns"].append({"name": "one_in", "type": "BIGINT"})
                answer["rows"] = [[*row, 1] for row in answer["rows"]]
                names.append("one_in")
            for row in answer["rows"]:
                row[names.index("one_in")] = 7
        return answer

    monkeypatch.setattr(StoreFile, "query", sampled)
    document = tell(db).document
    assert "fleet_steps looked at one in 7 requests" in document.text
    assert "an even sample was looked at, one in 7" in document.text


def test_approximate_percentiles_are_called_so(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(query, "EXACT_ROWS", 10)
    made = tell(db)
    reason = f"percentiles are of random samples of {query.SAMPLE_ROWS:,}: there are more than 10 rows"
    assert made.json["answers"]["pairs"]["approximate"] == reason
    assert made.json["answers"]["losses"]["approximate"] is None
    for text in (made.document.text, made.markdown):
        assert len(re.findall(f"Approximate: {reason} \\([^)]*pairs[^)]*\\)\\.", text)) == 1, "in the verdict"
        assert f"Approximate: {reason}." in text, "beside the figure"


# --- the page ----------------------------------------------------------------------------------------


def test_the_page_is_sound(told: Told) -> None:
    document = told.document
    assert document.wrong == []
    assert document.tags["h1"] == document.tags["main"] == document.tags["header"] == 1
    assert '<html lang="en">' in told.html
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in told.html
    style = told.html[told.html.index("<style>") : told.html.index("</style>")]
    assert not re.search(r"url\(|@import|@font-face", style)


def test_what_clients_and_engines_say_is_text_and_nothing_else(told: Told) -> None:
    assert EVIL in told.document.text, "escaped, it is shown"
    assert "<script" not in told.html
    assert "<img" not in told.html
    assert not [c for c in told.html if not c.isprintable() and c != "\n"]
    assert LONG not in told.html
    assert len(told.html) < 2_000_000


def test_markdown_shows_texts_of_others_as_they_are(told: Told) -> None:
    text = told.markdown
    plain = re.sub(r"```text.*?```|(`+).*?\1", "", text, flags=re.DOTALL)
    assert "<" not in plain.replace("&lt;", "")
    assert r"\[link\](http" in text
    assert not re.search(r"(?<!\\)\[", plain)
    assert not [c for c in text if not c.isprintable() and c != "\n"]
    for block in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        counts = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(counts) == 1, block


def test_windows_that_people_named_and_their_notes_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = store(tmp_path / "s.duckdb", many(30))
    label = [
        "label",
        "outage-7",
        "--kind",
        "incident",
        "--since",
        "2026-11-29T15:54:15",
        "--until",
        "2026-11-29T15:54:25",
    ]
    assert cli.main([*label, "--note", f"router restarted {EVIL}", "--db", str(path)]) == 0
    capsys.readouterr()
    found = as_json(capsys, "--db", path, "--during", "outage-7")
    assert (found["since_ns"], found["until_ns"]) == (1_795_967_655_000_000_000, 1_795_967_665_000_000_000)
    fleet = found["answers"]["fleet"]
    assert dict(zip(fleet["columns"], fleet["rows"][0], strict=True))["requests"] == 10
    assert [one["name"] for one in found["windows"]] == ["outage-7"]
    document = tell(path, since="@outage-7").document
    assert document.wrong == []
    assert f"router restarted {EVIL}" in document.text
    assert tell(path, since="2026-11-29T15:54:30").json["windows"] == []


# --- nothing, and failures ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--label", "nothing"), "No request of this label arrived in this window."),
        (("--since", "2025-01-01", "--until", "2025-01-02"), "No request arrived in this window."),
        (("--where", "prompt_tokens>1000000"), "No request with a first token passes the filters"),
    ],
)
def test_an_empty_window_gives_a_page_that_says_so(
    db: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = html_check.read(report(capsys, "--db", db, *arguments, "--format", "html"))
    assert said in document.text
    assert document.wrong == []


def test_since_after_all_that_a_file_has_is_an_empty_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines that served nothing of it do not make it simulated."""
    engines = [rows.engine(1, "engine-p", "scheduler", kvscope="simulated")]
    old = many(3, label="simulated", arrived_at_ns=rows.T0_NS - 365 * 86400 * 10**9)
    path = store(tmp_path / "s.duckdb", old, engines=engines)
    found = as_json(capsys, "--db", path, "--since", "1s")
    assert "No request arrived in this window." in found["verdict"]
    assert found["simulated"] is False
    assert found["until_ns"] - found["since_ns"] == 10**9
    assert as_json(capsys, "--db", path, "--since", "1s", "--label", "simulated")["simulated"] is True


def test_a_store_without_a_single_row(tmp_path: Path) -> None:
    made = tell(store(tmp_path / "empty.duckdb", []))
    assert "No request arrived in this window." in made.document.text
    assert "No request arrived in this window." in made.markdown
    assert made.json["slowest"] == []


def test_rows_of_which_almost_nothing_is_known(tmp_path: Path) -> None:
    blank: Row = dict.fromkeys(column.name for column in schema.REQUESTS.columns)
    engine: Row = dict.fromkeys(column.name for column in schema.ENGINES.columns)
    made = [blank | {"id": 1}, blank | {"id": 2, "ttft_ns": 5, "arrived_at_ns": rows.T0_NS}]
    path = store(tmp_path / "blank.duckdb", made, engines=[engine | {"id": 1, "fingerprint": "[1]"}])
    document = tell(path).document
    assert document.wrong == []
    assert "None" not in document.text.replace("None of its steps was observed", "")


def test_a_question_without_an_answer_is_noted_and_the_rest_is_told(
    db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = StoreFile.query

    def slow(self: StoreFile, name: str, sql: str, parameters: query.Parameters) -> dict[str, Any]:
        if name == "pairs":
            raise query.QueryError("the query was stopped after 10.0 s")
        return whole(self, name, sql, parameters)

    monkeypatch.setattr(StoreFile, "query", slow)
    path = tmp_path / "r.html"
    assert cli.main(["report", "--db", str(db), "-o", str(path)]) == 1
    assert "without an answer: pairs" in capsys.readouterr().err
    document = html_check.read(path.read_text())
    assert document.wrong == []
    assert "Not answered: the query was stopped after 10.0 s." in document.text
    assert "Bands of TTFT" in document.tables


def test_a_file_is_not_replaced_unless_told_and_never_left_half_written(
    db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "incident.html"
    path.write_text("mine")
    assert cli.main(["report", "--db", str(db), "-o", str(path)]) == 2
    assert "--force" in capsys.readouterr().err
    assert path.read_text() == "mine"

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(StoreFile, "request", interrupted)
        assert cli.main(["report", "--db", str(db), "-o", str(path), "--force"]) == 130
    assert [one.name for one in tmp_path.iterdir()] == ["incident.html"]
    assert path.read_text() == "mine"
    assert cli.main(["report", "--db", str(db), "-o", str(path), "--force"]) == 0
    assert path.read_text().startswith("<!doctype html>")


def test_the_suffix_says_the_format(db: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, begin in (("a.md", "# Where"), ("a.json", "{"), ("a.HTML", "<!doctype html>")):
        assert cli.main(["report", "--db", str(db), "-o", str(tmp_path / name)]) == 0
        assert (tmp_path / name).read_text().startswith(begin)
    assert capsys.readouterr().out.splitlines()[0] == str(tmp_path / "a.md")
    assert cli.main(["report", "--db", str(db), "-o", str(tmp_path / "a.txt"), "--format", "md"]) == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("-o", "a.txt"), "its suffix names no format"),
        (("-o", "nowhere/a.html"), "no folder nowhere"),
        (("--json", "--format", "md"), "exclude each other"),
        (("--since", "yesterday"), "is no duration before now"),
        (("--since", "@nothing"), "no window 'nothing'"),
        (("--since", "2026-11-29T16:00", "--until", "2026-11-29T15:00"), "since is not before until"),
        (("--since", "2027-01-01"), "since is in the future"),
        (("--where", "colour=red"), "no column 'colour'"),
        (("--during", "a", "--since", "1h"), "leave those away"),
    ],
)
def test_what_is_asked_wrongly_is_said_in_a_line(
    db: Path, arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", "--db", str(db), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("rows_", [[["x"]], [], [[None, None]], [["a", "b"]]])
def test_a_daemon_that_answers_otherwise_is_named_in_a_line(
    url: str, rows_: list[Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def odd(*_: object) -> dict[str, Any]:
        return {"columns": [{"name": "requests"}], "rows": rows_, "truncated": False}

    monkeypatch.setattr(Daemon, "query", odd)
    assert cli.main(["report", "--url", url]) == 1
    error = capsys.readouterr().err
    assert "does not answer as kvscope" in error
    assert error.count("\n") == 1


def test_no_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["report", "--url", "http://127.0.0.1:9", "--since", "1h"]) == 3
    assert "no kvscope daemon" in capsys.readouterr().err


def test_the_json_has_the_keys_that_the_docs_tell(told: Told) -> None:
    text = (Path(__file__).parents[2] / "docs" / "report.md").read_text()
    documented = set(re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE))
    assert set(told.json) == documented
