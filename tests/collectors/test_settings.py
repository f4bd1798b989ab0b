"""Settings that are wrong, and which one wins."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from kvscope import settings
from kvscope.errors import UsageError


def load(*flags: str, env: dict[str, str] | None = None) -> settings.Settings:
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser)
    return settings.load(parser.parse_args(list(flags)), env or {})


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("port = 1\nsql_rows = 2\nsql_seconds = 3\n")
    env = {"KVSCOPE_CONFIG": str(file), "KVSCOPE_PORT": "4", "KVSCOPE_SQL_ROWS": "5", "KVSCOPE_LABEL": "x"}
    found = load("--port", "6", env=env)
    assert (found.port, found.sql_rows, found.sql_seconds, found.host) == (6, 5, 3.0, "127.0.0.1")
    assert load("--config", str(file)).port == 1


def test_file_in_the_config_directory_is_read_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert load().store == tmp_path / "state" / "kvscope" / "kvscope.duckdb"
    (tmp_path / "kvscope").mkdir()
    (tmp_path / "kvscope" / "config.toml").write_text("store = '~/x.duckdb'")
    assert load().store == Path.home() / "x.duckdb"


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("port = '9'", "port: '9' does not fit: expected int, got str"),
        ("port = 70000", "port: 70000 does not fit: expected int <= 65535"),
        ("prot = 9", "prot: no such setting; there are dir, store, "),
        ("dir = 7", "dir: 7 does not fit: expected a path"),
        ("log_level = 'loud'", "log_level: 'loud' does not fit: "),
        ("sample_seconds = -1", "sample_seconds: -1 does not fit: expected float >= 0.0"),
        (
            "sample_seconds = 1e-10",
            "sample_seconds: 1e-10 does not fit: expected 0, or at least 0.5 seconds",
        ),
        (
            "vllm_metrics = 'http://a/metrics'",
            "vllm_metrics: 'http://a/metrics' does not fit: expected array",
        ),
        (
            "vllm_metrics = ['ftp://a/metrics']",
            "vllm_metrics: ['ftp://a/metrics'] does not fit: expected a url",
        ),
        (
            "vllm_metrics = ['http://u:p@a/m']",
            "vllm_metrics: ['http://u:p@a/m'] does not fit: expected a url",
        ),
        (
            "window = '5 parsecs'",
            "window: '5 parsecs' does not fit: '5 parsecs' is no duration; write it like",
        ),
        (
            "otlp_endpoint = 'tempo:4318'",
            "otlp_endpoint: 'tempo:4318' does not fit: expected a url such as http://tempo:4318",
        ),
        ("window = '90d'", "window: '90d' does not fit: expected a duration from 1s to 30d"),
        ("refresh = '1ms'", "refresh: '1ms' does not fit: expected a duration from 100ms to 1h"),
        ("refresh = 1", "refresh: 1 does not fit: expected str, got int"),
        ("[port]", "port: {} does not fit: expected int, got object"),
        ("port =", "not valid TOML: "),
    ],
)
def test_wrong_file_is_one_line_naming_file_and_key(tmp_path: Path, text: str, line: str) -> None:
    file = tmp_path / "c.toml"
    file.write_text(text)
    with pytest.raises(UsageError, match=re.escape(f"{file}: {line}")) as refused:
        load("--config", str(file))
    assert "\n" not in str(refused.value)


def test_addresses_are_a_list_in_the_file_and_have_commas_elsewhere(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text("vllm_metrics = ['http://10.0.0.7:8000/metrics', 'https://b/m']\nwindow = '2h'\n")
    assert load("--config", str(file)).vllm_metrics == ("http://10.0.0.7:8000/metrics", "https://b/m")
    assert load("--config", str(file)).window == "2h"
    assert load("--vllm-metrics", "http://a/m, http://[::1]:8000/m,").vllm_metrics == (
        "http://a/m",
        "http://[::1]:8000/m",
    )
    assert load(env={"KVSCOPE_VLLM_METRICS": "http://a/m"}).vllm_metrics == ("http://a/m",)


def test_a_daemon_has_no_flags_of_the_view() -> None:
    with pytest.raises(SystemExit):
        load("--window", "5m")
    parser = argparse.ArgumentParser()
    settings.add_arguments(parser, "host", "window")
    assert settings.load(parser.parse_args(["--window", "90s"]), {}).window == "90s"


def test_wrong_flag_and_wrong_variable_are_named() -> None:
    with pytest.raises(UsageError, match=r"^--port: 'x' does not fit: expected int"):
        load("--port", "x")
    with pytest.raises(UsageError, match=r"^KVSCOPE_SQL_SECONDS in the environment: '-1' does not fit"):
        load(env={"KVSCOPE_SQL_SECONDS": "-1"})


def test_what_kubernetes_sets_for_a_service_of_our_name_is_no_setting() -> None:
    assert load(env={"KVSCOPE_PORT": "tcp://10.0.0.7:9177"}).port == 9177


def test_missing_file_is_an_error_only_when_it_was_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such settings file"):
        load("--config", str(tmp_path / "none"))
    with pytest.raises(UsageError, match="can't be read"):
        load("--config", str(tmp_path))
    load()


def test_every_setting_is_listed_with_its_meaning() -> None:
    listed = settings.listed()
    assert [one.name for one in listed] == list(settings.Settings.__struct_fields__)
    for one in listed:
        assert one.doc
        assert one.default
        assert one.variable == f"KVSCOPE_{one.name.upper()}"
    assert "/root" not in str(listed)
