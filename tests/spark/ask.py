"""Run by a Python with PySpark: answers questions of an archive, in Spark's SQL, as JSON.

ask.py ARCHIVE FILE        FILE: {"questions": {name: SQL}, "example": Python that leaves `found`}
"""

from __future__ import annotations

import json
import sys
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession  # type: ignore[import-not-found]

WORKERS = "local-cluster[2,1,1024]"
"""Two executors in processes of their own, with one core and 1 GB each: files are read as on a cluster."""


def plain(value: Any) -> Any:
    return int(value) if isinstance(value, Decimal) else value


def main() -> None:
    archive, asked = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text("utf-8"))
    began = time.monotonic()
    spark = (
        SparkSession.builder.master(WORKERS)
        .appName("kvscope")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "4")
        .config("spark.sql.session.timeZone", "UTC")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    started_s = time.monotonic() - began
    for table in (archive / "v1").iterdir():
        if table.is_dir():
            spark.read.parquet(str(table)).createOrReplaceTempView(table.name)
    answers, seconds = {}, {"start": round(started_s, 1)}
    for name, sql in asked["questions"].items():
        began = time.monotonic()
        found = spark.sql(sql)
        rows = [[plain(value) for value in row] for row in found.collect()]
        answers[name] = {"columns": found.columns, "rows": rows}
        seconds[name] = round(time.monotonic() - began, 1)
    names = {"spark": spark}
    exec(compile(asked["example"], "docs/archive.md", "exec"), names)
    types = dict(spark.table("requests").dtypes)
    executors = spark.sparkContext._jsc.sc().getExecutorMemoryStatus().size() - 1
    print(json.dumps({"answers": answers, "example": names["found"], "types": types, "seconds": seconds,
                      "executors": executors}))  # fmt: skip
    spark.stop()


if __name__ == "__main__":
    main()
