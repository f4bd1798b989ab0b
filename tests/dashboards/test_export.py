"""`kvscope dashboards export`: files that Grafana, Prometheus, Kubernetes and Docker can take as they are."""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvscope import __version__, cli
from kvscope.dashboards import alerting, export
from kvscope.dashboards import shipped as ship
from kvscope.dashboards.wheel import own_wheel
from kvscope.errors import KvscopeError

JAEGER, PROMETHEUS = "http://kvscope.inference:9177", "http://prometheus.monitoring:9090"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What this kvscope ships, exported."""
    directory = tmp_path_factory.mktemp("export") / "out"
    command = ["dashboards", "export", str(directory), "--prometheus-url", PROMETHEUS, "--jaeger-url", JAEGER]
    assert cli.main(command) == 0
    return directory


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text("utf-8"))


def paths(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


# --- what is written -------------------------------------------------------------------------------


def test_every_yaml_is_valid_and_every_dashboard_is_there(out: Path) -> None:
    written = [out / name for name in paths(out)]
    yamls = [path for path in written if path.suffix == ".yaml"]
    assert len(yamls) > 8
    assert all(isinstance(read(path), dict) for path in yamls)
    dashboards = ship.shipped().dashboards
    for uid in dashboards:
        found = json.loads((out / "grafana" / "dashboards" / f"{uid}.json").read_text())
        assert (found["uid"], found["title"]) == (uid, dashboards[uid]["title"])
        assert found["panels"] == dashboards[uid]["panels"]
    readme = (out / "README.md").read_text()
    for folder in {path.relative_to(out).parts[0] for path in written} - {"README.md"}:
        assert f"`{folder}" in readme


def test_grafana_finds_sources_dashboards_and_the_way_to_a_trace(out: Path) -> None:
    provisioning = out / "grafana" / "provisioning"
    sources = {s["uid"]: s for s in read(provisioning / "datasources" / "kvscope.yaml")["datasources"]}
    assert sources["kvscope-jaeger"]["url"] == JAEGER
    prometheus = sources["kvscope-prometheus"]
    assert prometheus["url"] == PROMETHEUS
    assert prometheus["jsonData"]["exemplarTraceIdDestinations"] == [
        {"name": "trace_id", "datasourceUid": "kvscope-jaeger"}
    ]
    (provider,) = read(provisioning / "dashboards" / "kvscope.yaml")["providers"]
    assert (provider["type"], provider["folder"]) == ("file", "kvscope")
    for path in (out / "grafana" / "dashboards").glob("*.json"):
        variables = json.loads(path.read_text())["templating"]["list"]
        chosen = {v["name"]: v["current"]["value"] for v in variables if v["type"] == "datasource"}
        assert chosen == {"datasource": "kvscope-prometheus", "jaeger": "kvscope-jaeger"}


def test_alerts_in_grafanas_files_are_those_of_prometheus(out: Path) -> None:
    groups = read(out / "grafana" / "provisioning" / "alerting" / "kvscope.yaml")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    shipped = [r for g in ship.rule_groups(ship.shipped().rule_files) for r in g["rules"] if "alert" in r]
    assert [rule["data"][0]["model"]["expr"] for rule in rules] == [r["expr"].strip() for r in shipped]
    assert {rule["data"][0]["datasourceUid"] for rule in rules} == {"kvscope-prometheus"}
    assert len({rule["uid"] for rule in rules}) == len({rule["title"] for rule in rules}) == len(rules) > 0
    for group in groups:
        assert re.fullmatch(r"\d+0s", group["interval"])


def test_texts_of_alerts_lose_nothing_to_grafanas_variables() -> None:
    """In its files Grafana takes `$x` for a variable of its environment, and `$$` for a dollar."""
    annotations = {"summary": "{{ $labels.engine }} at {{ $value | humanize }}, costs $5 {{ $labels }}"}
    groups = [{"name": "g", "rules": [{"alert": "A", "expr": 'x{y=~"a$"}', "annotations": annotations}]}]
    (group,) = alerting.provisioning_file(alerting.alert_groups(groups))["groups"]
    (rule,) = group["rules"]
    assert rule["annotations"] == {
        "summary": "{{ .Labels.engine }} at {{ .Values.query.Value | humanize }}, costs $$5 {{ .Labels }}"
    }
    # It leaves queries as they are.
    assert rule["data"][0]["model"]["expr"] == 'x{y=~"a$"}'


def test_prometheus_gets_its_rules_as_they_are_shipped(out: Path) -> None:
    for name, text in ship.shipped().rule_files.items():
        assert (out / "prometheus" / "rules" / name).read_text() == text
    rule = read(out / "kubernetes" / "kvscope-rules.yaml")
    assert rule["kind"] == "PrometheusRule"
    names = [group["name"] for group in rule["spec"]["groups"]]
    assert len(set(names)) == len(names) > 0


def test_kubernetes_objects_have_the_labels_and_fit(out: Path) -> None:
    for uid in ship.shipped().dashboards:
        path = out / "kubernetes" / f"{uid}.yaml"
        found = read(path)
        assert (found["kind"], found["apiVersion"]) == ("ConfigMap", "v1")
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert found["metadata"]["annotations"]["grafana_folder"] == "kvscope"
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", found["metadata"]["name"])
        assert list(found["data"]) == [f"{uid}.json"]
        exported = (out / "grafana" / "dashboards" / f"{uid}.json").read_text()
        assert json.loads(found["data"][f"{uid}.json"]) == json.loads(exported)
        assert path.stat().st_size < 1 << 20
    sources = read(out / "kubernetes" / "kvscope-datasources.yaml")
    assert sources["metadata"]["labels"]["grafana_datasource"] == "1"
    assert yaml.safe_load(sources["data"]["kvscope.yaml"])["datasources"]


def dashboard_of(size: int) -> ship.Shipped:
    panels = [{"id": n, "type": "text", "title": "x" * 10} for n in range(size // 70)]
    return ship.Shipped({"kvscope-large": {"uid": "kvscope-large", "title": "Large", "panels": panels}}, {})


def test_a_dashboard_that_is_too_large_is_packed_and_then_refused() -> None:
    wanted = export.files(dashboard_of(1_100_000), prometheus_url="http://a", jaeger_url="http://b")
    packed = yaml.safe_load(wanted["kubernetes/kvscope-large.yaml"])["data"]["kvscope-large.json"]
    assert "\n" not in packed.strip()
    assert len(wanted["kubernetes/kvscope-large.yaml"]) < 1 << 20
    with pytest.raises(KvscopeError, match="kvscope-large is too large for a ConfigMap"):
        export.files(dashboard_of(3_000_000), prometheus_url="http://a", jaeger_url="http://b")


# --- compose ---------------------------------------------------------------------------------------


def interpolated(value: Any, env: dict[str, str]) -> Any:
    """As Docker's compose fills in `${NAME:-default}`."""
    if isinstance(value, dict):
        return {key: interpolated(item, env) for key, item in value.items()}
    if isinstance(value, list):
        return [interpolated(item, env) for item in value]
    if isinstance(value, str):
        return re.sub(r"\$\{(\w+):-([^}]*)\}", lambda m: env.get(m[1]) or m[2], value)
    return value


def test_compose_mounts_what_was_exported_and_listens_on_loopback(out: Path) -> None:
    compose = interpolated(read(out / "compose.yaml"), {})
    services = compose["services"]
    assert list(services) == ["kvscope", "prometheus", "grafana"]
    assert "$" not in json.dumps(compose)
    for name, service in services.items():
        assert re.fullmatch(r"[a-z/]+:v?\d+\.\d+\.\d+", service.get("image", "built/here:1.0.0"))
        assert "ports" not in service, "all is on the host's loopback"
        assert service["network_mode"] == "host"
        for volume in service["volumes"]:
            source, target = volume.split(":")[:2] if isinstance(volume, str) else ("", "")
            if source.startswith("."):
                assert (out / source).exists(), f"{name}: {source}"
                assert volume.endswith(":ro")
            elif source:
                assert source in compose["volumes"], f"{name}: {source}"
                assert target.startswith("/")
    assert (out / services["kvscope"]["build"] / "Dockerfile").is_file()
    assert services["kvscope"]["environment"]["KVSCOPE_HOST"] == "127.0.0.1"
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert "--enable-feature=exemplar-storage" in services["prometheus"]["command"]


def test_composes_services_find_each_other(out: Path) -> None:
    compose = read(out / "compose.yaml")
    daemon = compose["services"]["kvscope"]["environment"]
    api = f"{daemon['KVSCOPE_HOST']}:{daemon['KVSCOPE_PORT']}"
    scraped = [
        target
        for job in read(out / "compose" / "prometheus.yaml")["scrape_configs"]
        for config in job["static_configs"]
        for target in config["targets"]
    ]
    assert api in scraped
    urls = {s["uid"]: s["url"] for s in read(out / "compose" / "datasources.yaml")["datasources"]}
    assert urls == {"kvscope-jaeger": f"http://{api}", "kvscope-prometheus": "http://127.0.0.1:9090"}
    mounts = dict(v.split(":")[:2] for v in compose["services"]["grafana"]["volumes"])
    (provider,) = read(out / "grafana" / "provisioning" / "dashboards" / "kvscope.yaml")["providers"]
    assert mounts["./grafana/dashboards"] == provider["options"]["path"]


@pytest.mark.parametrize("env", [{}, {"KVSCOPE_DIR": "/rings", "KVSCOPE_UID": "7", "KVSCOPE_GID": "8"}])
def test_composes_daemon_reads_the_engines_rings_as_their_user(out: Path, env: dict[str, str]) -> None:
    daemon = interpolated(read(out / "compose.yaml"), env)["services"]["kvscope"]
    rings = env.get("KVSCOPE_DIR") or f"/dev/shm/kvscope-{os.getuid()}"
    mount = daemon["volumes"][0]
    assert (mount["source"], mount["target"]) == (rings, rings)
    assert mount["bind"] == {"create_host_path": False}, "Docker would make it as root, and engines refuse it"
    assert daemon["environment"]["KVSCOPE_DIR"] == rings
    assert daemon["user"] == ("7:8" if env else f"{os.getuid()}:{os.getgid()}")


def test_composes_daemon_is_this_kvscope(out: Path, tmp_path: Path) -> None:
    folder = out / "compose" / "kvscope"
    (wheel,) = folder.glob("*.whl")
    assert f"COPY {wheel.name} " in (folder / "Dockerfile").read_text()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--no-index"]
    done = subprocess.run(
        [*pip, "--disable-pip-version-check", "--target", tmp_path / "site", wheel],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import kvscope.cli, kvscope.dashboards;"
        "assert kvscope.__file__.startswith(sys.argv[1]), kvscope.__file__; kvscope.cli.main(['--version'])"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "site"], cwd=tmp_path, capture_output=True, text=True
    )
    assert ran.stdout == f"kvscope {__version__}\n", ran.stderr
    assert (tmp_path / "site" / "kvscope" / "sql" / "ttft.sql").is_file()
    names = zipfile.ZipFile(wheel).namelist()
    assert not [name for name in names if "__pycache__" in name or name.startswith("/") or ".." in name]
    assert "kvscope/dashboards/grafana/kvscope-overview.json" in names
    about = zipfile.ZipFile(wheel).read(f"kvscope-{__version__}.dist-info/METADATA").decode()
    assert re.search(r"^Requires-Dist: duckdb.*collector", about, re.MULTILINE)


# --- writing ---------------------------------------------------------------------------------------


@pytest.fixture
def wanted() -> dict[str, bytes]:
    return {"README.md": b"one\n", "grafana/a.json": b"{}\n", "prometheus/r.yaml": b"groups: []\n"}


def test_the_same_again_writes_nothing(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: (out / name).stat().st_mtime_ns for name in paths(out)}
    command = ["dashboards", "export", str(out), "--prometheus-url", PROMETHEUS, "--jaeger-url", JAEGER]
    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["directory"] == str(out)
    assert found["files"] == dict.fromkeys(found["files"], "unchanged")
    assert sorted(found["files"]) == sorted(before)
    assert {name: (out / name).stat().st_mtime_ns for name in paths(out)} == before


def test_files_that_differ_are_left_alone_and_named(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "README.md").write_text("mine")
    (tmp_path / "notes.txt").write_text("mine too")
    assert cli.main(["dashboards", "export", str(tmp_path)]) == 2
    err = capsys.readouterr().err
    assert "there are other README.md; name another folder, or overwrite them with --force" in err
    assert err.count("\n") == 1
    assert paths(tmp_path) == ["README.md", "notes.txt"]
    assert (tmp_path / "README.md").read_text() == "mine"
    assert cli.main(["dashboards", "export", str(tmp_path), "--force"]) == 0
    assert re.search(r"^updated .*README\.md$", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "README.md").read_text() != "mine"
    assert (tmp_path / "notes.txt").read_text() == "mine too"


def test_only_what_differs_is_written(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    assert set(export.write(tmp_path / "new", wanted).values()) == {"created"}
    changed = {**wanted, "grafana/a.json": b"[]\n"}
    assert export.write(tmp_path / "new", changed, force=True) == {
        "README.md": "unchanged",
        "grafana/a.json": "updated",
        "prometheus/r.yaml": "unchanged",
    }
    assert paths(tmp_path / "new") == sorted(wanted), "nothing temporary is left"


def test_other_users_can_read_it_whatever_the_umask(tmp_path: Path, wanted: dict[str, bytes]) -> None:
    before = os.umask(0o077)
    try:
        export.write(tmp_path / "new", wanted)
    finally:
        os.umask(before)
    for path in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o755 if path.is_dir() else 0o644), path


@pytest.mark.parametrize("where", ["file", "file/below", "folder"])
def test_a_place_that_can_not_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], where: str
) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder" / "README.md").mkdir(parents=True)
    code = cli.main(["dashboards", "export", str(tmp_path / where)])
    assert code in (1, 2)
    err = capsys.readouterr().err
    assert "Traceback" not in err
    assert err.count("\n") == 1


def test_addresses_with_a_password_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["dashboards", "export", str(tmp_path), "--prometheus-url", "http://me:hunter2@prometheus:9090"]
    assert cli.main(command) == 2
    assert "hunter2" not in capsys.readouterr().err
    assert paths(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("grafana/a.json", "{", "a.json is damaged"),
        ("grafana/a.json", "[]", "a.json is damaged"),
        ("grafana/a.json", '{"uid": "a b", "title": "x"}', "a.json is damaged"),
        ("grafana/a.json", '{"uid": "a", "title": 5}', "a.json is damaged"),
        ("prometheus/r.yaml", "groups: [", "r.yaml is damaged"),
        ("prometheus/r.yaml", "[]", "r.yaml is damaged"),
        ("nothing", "", "came without dashboards; install it again"),
    ],
)
def test_a_damaged_installation_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    line: str,
) -> None:
    root = tmp_path / "installed"
    for folder in ("grafana", "prometheus"):
        (root / folder).mkdir(parents=True)
    if name.startswith("prometheus"):
        (root / "grafana" / "ok.json").write_text('{"uid": "ok", "title": "Ok"}')
    (root / name).write_text(text)
    monkeypatch.setattr(ship, "files", lambda package: root)
    assert cli.main(["dashboards", "export", str(tmp_path / "out")]) == 1
    assert line in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_wheel_is_the_same_each_time() -> None:
    assert own_wheel() == own_wheel()
