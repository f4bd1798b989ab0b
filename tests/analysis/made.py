"""Store files of hand-made requests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb

from kvscope import storefile

from ..cli import rows

Row = dict[str, Any]


def store(path: Path, requests: Sequence[Row], **tables: Sequence[Row]) -> Path:
    """A store of these requests; `engines`, `transfers` and others by name."""
    with duckdb.connect(str(path)) as database:
        storefile.create_tables(database)
        for table, found in {"requests": requests, **tables}.items():
            rows.insert(database, table, list(found))
    return path
