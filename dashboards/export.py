"""Write dashboards and rules as files: Grafana's provisioning, Prometheus rules, Kubernetes objects, and a
compose file with Prometheus, Grafana and the daemon."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import yaml  # type: ignore[import-untyped, unused-ignore]

from kvscope import __version__
from kvscope.dashboards import alerting
from kvscope.dashboards import shipped as ship
from kvscope.dashboards.shipped import Shipped
from kvscope.dashboards.wheel import own_wheel
from kvscope.errors import KvscopeError, UsageError
from kvscope.text import printable

GRAFANA_IMAGE = "grafana/grafana:13.1.1"
PROMETHEUS_IMAGE = "prom/prometheus:v3.13.1"
PYTHON_IMAGE = "python:3.11-slim"

PROMETHEUS_URL = "http://prometheus:9090"
KVSCOPE_URL = "http://kvscope:9177"
"""What the data sources ask where nothing else is said: the names of services in a cluster."""

_LOCAL_PROMETHEUS, _LOCAL_KVSCOPE = "127.0.0.1:9090", "127.0.0.1:9177"
MAX_CONFIGMAP_BYTES = 1_000_000
"""Kubernetes takes 1 MiB with all its fields."""

_WRITTEN_BY = f"# Written by `kvscope dashboards export`, kvscope {__version__}.\n"


def files(found: Shipped, *, prometheus_url: str, jaeger_url: str) -> dict[str, bytes]:
    """Every file: its path below the folder, and what it holds.

    Raises:
        KvscopeError: a dashboard does not fit into a ConfigMap, or this kvscope is not installed.
    """
    chosen = {
        "datasource": (ship.PROMETHEUS_UID, ship.PROMETHEUS_NAME),
        "jaeger": (ship.JAEGER_UID, ship.JAEGER_NAME),
    }
    dashboards = {
        uid: msgspec.json.format(msgspec.json.encode(ship.with_sources(dashboard, chosen))).decode() + "\n"
        for uid, dashboard in found.dashboards.items()
    }
    groups = ship.rule_groups(found.rule_files)
    sources = _yaml(_data_sources(prometheus_url, jaeger_url))
    local_sources = _yaml(_data_sources(f"http://{_LOCAL_PROMETHEUS}", f"http://{_LOCAL_KVSCOPE}"))
    wheel_name, wheel = own_wheel()
    texts = {
        "README.md": _README.format(
            version=__version__, grafana=GRAFANA_IMAGE, prometheus=PROMETHEUS_IMAGE, folder=ship.FOLDER_TITLE
        ),
        "grafana/provisioning/datasources/kvscope.yaml": sources,
        "grafana/provisioning/dashboards/kvscope.yaml": _yaml(_PROVIDER),
        "grafana/provisioning/alerting/kvscope.yaml": _yaml(
            alerting.provisioning_file(alerting.alert_groups(groups))
        ),
        **{f"grafana/dashboards/{uid}.json": text for uid, text in dashboards.items()},
        **{f"prometheus/rules/{name}": text for name, text in found.rule_files.items()},
        **{f"kubernetes/{uid}.yaml": _config_map(uid, text) for uid, text in dashboards.items()},
        "kubernetes/kvscope-datasources.yaml": _yaml(
            _object(
                "ConfigMap", "kvscope-datasources", {"grafana_datasource": "1"}, {"kvscope.yaml": sources}
            )
        ),
        "kubernetes/kvscope-rules.yaml": _yaml(
            {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "PrometheusRule",
                "metadata": {"name": "kvscope", "labels": {"app.kubernetes.io/name": "kvscope"}},
                "spec": {"groups": _uniquely_named(found.rule_files)},
            }
        ),
        "compose.yaml": _compose(),
        "compose/datasources.yaml": local_sources,
        "compose/prometheus.yaml": _yaml(_PROMETHEUS),
        "compose/kvscope/Dockerfile": _DOCKERFILE.format(python=PYTHON_IMAGE, wheel=wheel_name),
    }
    return {
        **{name: text.encode() for name, text in texts.items()},
        f"compose/kvscope/{wheel_name}": wheel,
    }


def write(directory: Path, wanted: Mapping[str, bytes], force: bool = False) -> dict[str, str]:
    """Write what is missing or differs; says of each file whether it was created, updated or unchanged.

    Raises:
        UsageError: files are there that differ, and it was not told to overwrite them; nothing was written.
        KvscopeError: a file can't be written.
    """
    if directory.exists() and not directory.is_dir():
        raise UsageError(f"{printable(directory)} is not a directory; name another")
    actions = {name: _action(directory / name, content) for name, content in wanted.items()}
    differ = [name for name, action in actions.items() if action == "updated"]
    if differ and not force:
        more = f" and {len(differ) - 3} more" if len(differ) > 3 else ""
        raise UsageError(
            f"in {printable(directory)} there are other {', '.join(differ[:3])}{more}; name another folder, "
            "or overwrite them with --force"
        )
    for name, content in wanted.items():
        if actions[name] != "unchanged":
            _replace(directory / name, content)
    return actions


def _action(path: Path, content: bytes) -> str:
    try:
        return "unchanged" if path.read_bytes() == content else "updated"
    except (FileNotFoundError, NotADirectoryError):
        return "created"
    except IsADirectoryError:
        raise UsageError(f"{printable(path)} is a directory; name another folder") from None
    except OSError as error:
        raise KvscopeError(f"{printable(path)}: can't be read: {error.strerror}") from None


def _replace(path: Path, content: bytes) -> None:
    """Whole or not at all: a Grafana may be watching the folder."""
    try:
        _make_directory(path.parent)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            os.chmod(temporary, 0o644)  # Grafana runs as another user
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        raise KvscopeError(f"{printable(path)}: can't be written: {error.strerror}") from None


def _make_directory(directory: Path) -> None:
    """Readable for all, whatever the umask: Grafana and Prometheus run as other users."""
    if not directory.is_dir():
        _make_directory(directory.parent)
        directory.mkdir(exist_ok=True)
        directory.chmod(0o755)


# --- YAML ------------------------------------------------------------------------------------------


class _Dumper(yaml.SafeDumper):  # type: ignore[misc, unused-ignore]
    """Long texts as blocks, so that a dashboard in a ConfigMap can be read and compared."""


def _as_block(dumper: Any, text: str) -> Any:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _as_block)


def _yaml(value: object) -> str:
    text = yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return _WRITTEN_BY + str(text)


# --- Grafana ---------------------------------------------------------------------------------------

_PROVIDER = {
    "apiVersion": 1,
    "providers": [
        {
            "name": "kvscope",
            # Without a folder uid: Grafana puts the alerts of its files into the folder of this title.
            "folder": ship.FOLDER_TITLE,
            "type": "file",
            "allowUiUpdates": False,
            "options": {"path": "/etc/grafana/dashboards"},
        }
    ],
}


def _data_sources(prometheus_url: str, jaeger_url: str) -> dict[str, Any]:
    return {
        "apiVersion": 1,
        "datasources": [
            {
                "uid": ship.JAEGER_UID,
                "name": ship.JAEGER_NAME,
                "type": "jaeger",
                "access": "proxy",
                "url": jaeger_url.replace("$", "$$"),
            },
            {
                "uid": ship.PROMETHEUS_UID,
                "name": ship.PROMETHEUS_NAME,
                "type": "prometheus",
                "access": "proxy",
                "url": prometheus_url.replace("$", "$$"),
                "jsonData": {
                    "httpMethod": "POST",
                    "exemplarTraceIdDestinations": [
                        {"name": ship.EXEMPLAR_LABEL, "datasourceUid": ship.JAEGER_UID}
                    ],
                },
            },
        ],
    }


# --- Kubernetes ------------------------------------------------------------------------------------


def _config_map(uid: str, text: str) -> str:
    if len(text.encode()) > MAX_CONFIGMAP_BYTES:
        text = msgspec.json.format(text.encode(), indent=-1).decode()
    if len(text.encode()) > MAX_CONFIGMAP_BYTES:
        raise KvscopeError(f"dashboard {uid} is too large for a ConfigMap; use `kvscope dashboards apply`")
    annotations = {"grafana_folder": ship.FOLDER_TITLE}
    return _yaml(_object("ConfigMap", uid, {"grafana_dashboard": "1"}, {f"{uid}.json": text}, annotations))


def _object(
    kind: str,
    name: str,
    labels: dict[str, str],
    data: dict[str, str],
    annotations: dict[str, str] | None = None,
) -> dict[str, Any]:
    metadata = {"name": name, "labels": {"app.kubernetes.io/name": "kvscope", **labels}}
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": "v1", "kind": kind, "metadata": metadata, "data": data}


def _uniquely_named(rule_files: Mapping[str, str]) -> list[dict[str, Any]]:
    """All groups under names that differ, as the operator wants them within one object."""
    groups: list[dict[str, Any]] = []
    for name, text in rule_files.items():
        part = name.removesuffix(".yaml").removeprefix("kvscope-")
        groups += [{**group, "name": f"{group['name']}-{part}"} for group in ship.rule_groups({name: text})]
    return groups


# --- compose ---------------------------------------------------------------------------------------

_PROMETHEUS = {
    "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
    "rule_files": ["/etc/prometheus/rules/*.yaml"],
    "scrape_configs": [
        {"job_name": "kvscope", "static_configs": [{"targets": [_LOCAL_KVSCOPE]}]},
        {"job_name": "prometheus", "static_configs": [{"targets": [_LOCAL_PROMETHEUS]}]},
    ],
}

_DOCKERFILE = """\
# The kvscope that exported this, with what the daemon needs.
FROM {python}
COPY {wheel} /tmp/
RUN pip install --no-cache-dir "/tmp/{wheel}[collector]" && rm /tmp/{wheel} \\
 && mkdir /store && chmod 1777 /store
ENV HOME=/store
CMD ["kvscope", "serve"]
"""


def _compose() -> str:
    uid, gid = os.getuid(), os.getgid()
    rings = f"${{KVSCOPE_DIR:-/dev/shm/kvscope-{uid}}}"
    services: dict[str, Any] = {
        "kvscope": {
            "build": "./compose/kvscope",
            # The host's network and processes: the daemon reads vLLM's /metrics on 127.0.0.1, and CPU and
            # memory of the engines.
            "network_mode": "host",
            "pid": "host",
            # As the engines' user, to whom the rings belong.
            "user": f"${{KVSCOPE_UID:-{uid}}}:${{KVSCOPE_GID:-{gid}}}",
            "environment": {
                "KVSCOPE_DIR": rings,
                "KVSCOPE_STORE": "/store/kvscope.duckdb",
                "KVSCOPE_HOST": "127.0.0.1",
                "KVSCOPE_PORT": "9177",
            },
            "volumes": [
                {"type": "bind", "source": rings, "target": rings, "bind": {"create_host_path": False}},
                "kvscope-store:/store",
            ],
            "restart": "unless-stopped",
        },
        "prometheus": {
            "image": PROMETHEUS_IMAGE,
            "network_mode": "host",
            "command": [
                "--config.file=/etc/prometheus/prometheus.yml",
                "--storage.tsdb.path=/prometheus",
                "--enable-feature=exemplar-storage",
                f"--web.listen-address={_LOCAL_PROMETHEUS}",
            ],
            "volumes": [
                "./compose/prometheus.yaml:/etc/prometheus/prometheus.yml:ro",
                "./prometheus/rules:/etc/prometheus/rules:ro",
                "prometheus-data:/prometheus",
            ],
            "restart": "unless-stopped",
        },
        "grafana": {
            "image": GRAFANA_IMAGE,
            "network_mode": "host",
            "environment": {
                "GF_SERVER_HTTP_ADDR": "127.0.0.1",
                "GF_SERVER_HTTP_PORT": "3000",
                "GF_SECURITY_ADMIN_PASSWORD": "${GRAFANA_PASSWORD:-admin}",
                "GF_ANALYTICS_REPORTING_ENABLED": "false",
                "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
                "GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH": (
                    "/etc/grafana/dashboards/kvscope-overview.json"
                ),
            },
            "volumes": [
                "./compose/datasources.yaml:/etc/grafana/provisioning/datasources/kvscope.yaml:ro",
                "./grafana/provisioning/dashboards:/etc/grafana/provisioning/dashboards:ro",
                "./grafana/dashboards:/etc/grafana/dashboards:ro",
                "grafana-data:/var/lib/grafana",
            ],
            "restart": "unless-stopped",
        },
    }
    return _yaml(
        {
            "name": "kvscope",
            "services": services,
            "volumes": {"kvscope-store": {}, "prometheus-data": {}, "grafana-data": {}},
        }
    )


_README = """\
# kvscope in Grafana and Prometheus

Written by `kvscope dashboards export`, kvscope {version}. After an upgrade run it again, with `--force`.

| folder | for |
| --- | --- |
| `compose.yaml`, `compose/` | trying it: Prometheus, Grafana and the daemon on this host |
| `grafana/dashboards/` | the dashboards, to import by hand or from a provisioning folder |
| `grafana/provisioning/` | Grafana's provisioning files: data sources, dashboards, alerts |
| `prometheus/rules/` | recording and alerting rules |
| `kubernetes/` | ConfigMaps for Grafana's sidecar, a PrometheusRule for Prometheus's operator |

## Compose

On a Linux host where vLLM's engines record (or will), as the user they run as:

    mkdir -m 700 -p /dev/shm/kvscope-$(id -u)    # their default; or set KVSCOPE_DIR as for them
    docker compose up --build

Grafana is at <http://127.0.0.1:3000> (user `admin`, password `admin` or GRAFANA_PASSWORD) and opens with the
overview, Prometheus at <http://127.0.0.1:9090>, the daemon at <http://127.0.0.1:9177>. All three listen on
loopback only and use the host's network. Where the engines run as another user, set KVSCOPE_UID, KVSCOPE_GID
and KVSCOPE_DIR. Stop a `kvscope serve` that runs already: both would listen on port 9177.
The images ({grafana}, {prometheus}) are pinned. Where there is a mirror instead of the internet, change the
`FROM` and `pip` lines of `compose/kvscope/Dockerfile`.

Prometheus evaluates the rules. To have Grafana notify by its own contact points, mount
`grafana/provisioning/alerting` too and take `prometheus/rules/kvscope-alerts.yaml` out, or every alert comes
twice. The recording rules stay in Prometheus in any case.

## A Grafana that is there

Either `kvscope dashboards apply --grafana-url …`, or files: `grafana/provisioning/*` goes to
`/etc/grafana/provisioning/`, `grafana/dashboards/` to `/etc/grafana/dashboards/` (the path in
`provisioning/dashboards/kvscope.yaml`). Correct the addresses in `provisioning/datasources/kvscope.yaml`, or
export with `--prometheus-url` and `--jaeger-url`. Prometheus takes the rules by `rule_files`, and stores the
exemplars that lead to traces when it runs with `--enable-feature=exemplar-storage`. It scrapes the daemon:

    scrape_configs:
      - job_name: kvscope
        static_configs:
          - targets: ["kvscope:9177"]

## Kubernetes

    kubectl apply --server-side -n monitoring -f kubernetes/

`--server-side`, because the dashboards are larger than the annotation in which kubectl would keep a copy.
Grafana's sidecar (`sidecar.dashboards`, `sidecar.datasources` of its Helm chart) finds the labels
`grafana_dashboard: "1"` and `grafana_datasource: "1"`; with `sidecar.dashboards.folderAnnotation` set to
`grafana_folder` the dashboards come into the folder {folder}. Where Prometheus's operator selects rules by
label, add that label to `kvscope-rules.yaml`; without the operator leave that file out and mount
`prometheus/rules/`.
"""
