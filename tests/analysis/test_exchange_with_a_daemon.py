"""What these commands get from a daemon over HTTP is what they get from the same rows in a file."""

from __future__ import annotations

import json
from pathlib import Path

from ..cli.conftest import Run, run, server, store_file, url

__all__ = ["run", "server", "store_file", "url"]


def test_exports_are_the_same(run: Run, store_file: Path, tmp_path: Path) -> None:
    for format_ in ("otlp", "perfetto"):
        for name, source in (("daemon", []), ("file", ["--db", str(store_file)])):
            done = run("export", format_, "-o", str(tmp_path / f"{format_}.{name}"), *source)
            assert done.returncode == 0, done.stderr
        asked, read = ((tmp_path / f"{format_}.{name}").read_bytes() for name in ("daemon", "file"))
        assert asked == read
        assert len(asked) > 1000


def test_sessions_are_the_same(run: Run, store_file: Path) -> None:
    asked, read = run("sessions", "--json"), run("sessions", "--json", "--db", str(store_file))
    assert asked.returncode == read.returncode == 0, asked.stderr
    assert json.loads(asked.stdout) == json.loads(read.stdout)
    assert json.loads(asked.stdout)["overall"]["conversations"] == 1


def test_no_daemon_is_said(run: Run, tmp_path: Path) -> None:
    for arguments in (["sessions"], ["export", "otlp", "-o", str(tmp_path / "t.jsonl")]):
        done = run(*arguments, KVSCOPE_URL="http://127.0.0.1:9")
        assert done.returncode == 3
        assert "no kvscope daemon" in done.stderr
    assert list(tmp_path.iterdir()) == []
