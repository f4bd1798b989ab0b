"""A real Spark reads the archive as it is, and finds what kvscope finds. Run by `make test-spark` only.

The archive is SIMULATED: 100,000 requests of 24 hours. Spark runs two executor processes.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import pytest

from kvscope import client, steps

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
REQUESTS = 100_000


def class_sum(class_: str) -> str:
    """The nanoseconds of a request's TTFT that are of this class."""
    columns = [step.column for step in steps.STEPS if step.class_ == class_ and step.in_ttft]
    return "(" + " + ".join(f"coalesce({column}, 0)" for column in columns) + ")"


def percentile(column: str, share: float, divisor: float = 1e6) -> str:
    return f"percentile({column}, {share}) / {divisor}"


COMPUTE, CAPACITY, TRANSFER, COORDINATION = map(class_sum, steps.CLASSES[:4])
IN_TTFT = [step for step in steps.STEPS if step.in_ttft]
LONGEST = f"greatest({', '.join(step.column for step in IN_TTFT)})"
MAIN_STEP = "CASE longest " + " ".join(f"WHEN {s.column} THEN '{s.name}'" for s in IN_TTFT) + " END"

IN_SPARK = {
    "ttft": f"""
        SELECT label, connector, count(*) AS requests, {percentile("ttft_ns", 0.5)} AS p50_ms,
            {percentile("ttft_ns", 0.9)} AS p90_ms, {percentile("ttft_ns", 0.99)} AS p99_ms,
            avg(ttft_ns) / 1e6 AS mean_ms, avg({COMPUTE}) / 1e6 AS compute_ms,
            avg({CAPACITY}) / 1e6 AS capacity_ms, avg({TRANSFER}) / 1e6 AS transfer_ms,
            avg({COORDINATION}) / 1e6 AS coordination_ms,
            avg(coalesce(unknown_ns, 0)) / 1e6 AS unknown_ms
        FROM requests WHERE ttft_ns IS NOT NULL
        GROUP BY label, connector ORDER BY label, requests DESC, connector""",
    "slowest": f"""
        SELECT CAST(id AS STRING) AS id, client_id, label, connector, outcome,
            ttft_ns / 1e6 AS ttft_ms, ({COMPUTE} + {CAPACITY}) / 1e6 AS compute_wait_ms,
            {TRANSFER} / 1e6 AS transfer_ms, {COORDINATION} / 1e6 AS coordination_ms,
            {MAIN_STEP} AS main_step, longest / 1e6 AS main_step_ms, p_engine, d_engine
        FROM (SELECT *, {LONGEST} AS longest FROM requests WHERE ttft_ns IS NOT NULL
              ORDER BY ttft_ns DESC, id LIMIT 20)
        ORDER BY ttft_ns DESC, id""",
    "transfers": f"""
        SELECT operation, engine, peer, count(*) AS transfers,
            count(*) FILTER (WHERE state = 'failed') AS failed,
            count(*) FILTER (WHERE state = 'open') AS still_open, sum(bytes) AS bytes,
            {percentile("post_ns", 0.5)} AS p50_post_ms,
            {percentile("wire_lower_ns", 0.5)} AS p50_wire_lower_ms,
            {percentile("wire_upper_ns", 0.5)} AS p50_wire_upper_ms,
            {percentile("telemetry_xfer_us", 0.5, 1e3)} AS p50_telemetry_ms
        FROM transfers GROUP BY operation, engine, peer ORDER BY transfers DESC, operation, engine, peer""",
}
"""Named questions in Spark's dialect, by the names of their columns. Not rounded: Spark rounds otherwise."""


def rounded(value: Any) -> Any:
    """As kvscope's questions round."""
    if not isinstance(value, float):
        return value
    return duckdb.execute("SELECT round(?::DOUBLE, 3)", [value]).fetchall()[0][0]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("spark")
    spec = importlib.util.spec_from_file_location("offline", ROOT / "bench" / "offline.py")
    assert spec is not None
    assert spec.loader is not None
    offline = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(offline)
    offline.write_store(where / "s.duckdb", REQUESTS)
    command = [sys.executable, "-m", "kvscope.cli", "archive", "--db", str(where / "s.duckdb"), "--all"]
    subprocess.run([*command, str(where / "archive")], check=True)
    return where / "archive"


@pytest.fixture(scope="module")
def told(archive: Path) -> dict[str, Any]:
    """What Spark answers."""
    page = (ROOT / "docs" / "archive.md").read_text("utf-8")
    (example,) = re.findall(r"^Spark[^\n]*:\n\n```python\n(.*?)```", page, re.M | re.S)
    asked = {"questions": IN_SPARK, "example": example.replace("/archive/kvscope", str(archive))}
    (archive.parent / "asked.json").write_text(json.dumps(asked))
    python = os.environ.get("SPARK_PYTHON", str(ROOT / "build" / "spark-venv" / "bin" / "python"))
    # `local-cluster` starts its workers from here, which its own start script would say.
    home = subprocess.check_output(
        [python, "-c", "import os, pyspark; print(os.path.dirname(pyspark.__file__))"], text=True
    )
    environment = {
        **os.environ, "SPARK_HOME": home.strip(), "PYSPARK_PYTHON": python, "SPARK_LOCAL_IP": "127.0.0.1"
    }  # fmt: skip
    done = subprocess.run(
        [python, str(HERE / "ask.py"), str(archive), str(archive.parent / "asked.json")],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=1800,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(f"seconds: {found['seconds']}")
    return found


def answer(archive: Path, name: str, sql: str = "") -> tuple[list[str], list[list[Any]]]:
    """What kvscope answers: names of the columns, and the rows."""
    source = client.StoreFile(archive)
    try:
        found = source.query(name, sql, {})
        return [column["name"] for column in found["columns"]], found["rows"]
    finally:
        source.close()


@pytest.mark.timeout(2000)
@pytest.mark.parametrize("name", IN_SPARK)
def test_spark_answers_what_kvscope_answers(archive: Path, told: dict[str, Any], name: str) -> None:
    names, rows = answer(archive, name)
    found = told["answers"][name]
    places = [names.index(column) for column in found["columns"]]
    assert len(rows) >= 3
    assert [[rounded(value) for value in row] for row in found["rows"]] == [
        [row[place] for place in places] for row in rows
    ]


@pytest.mark.timeout(2000)
def test_the_example_of_the_page_runs_on_a_cluster(archive: Path, told: dict[str, Any]) -> None:
    sql = (
        "SELECT connector, count(*), median(ttft_ns) / 1e6 FROM requests WHERE ttft_ns IS NOT NULL "
        "GROUP BY connector ORDER BY connector"
    )
    assert told["example"] == answer(archive, "", sql)[1]
    assert told["executors"] == 2


@pytest.mark.timeout(2000)
def test_spark_sees_every_column_with_its_type(told: dict[str, Any]) -> None:
    assert told["types"]["id"] == "decimal(20,0)"
    assert told["types"]["arrived_at_ns"] == "bigint"
    assert told["types"]["d"] == "date"
    assert "waterfall" in told["types"]
