"""Settings of the daemon and the commands: each defined once, here, with its meaning.

A value comes from a flag (`--sql-rows 500`), else from the environment (`KVSCOPE_SQL_ROWS=500`), else
from a TOML file (`sql_rows = 500`), else from its default. The file is the one named by `--config` or
`KVSCOPE_CONFIG`, else `$XDG_CONFIG_HOME/kvscope/config.toml` where there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from kvscope.errors import UsageError
from kvscope.ring import default_directory
from kvscope.storefile import bad_directory
from kvscope.text import duration_ns

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENV_PREFIX = "KVSCOPE_"


def _xdg(variable: str, fallback: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / fallback) / "kvscope"


def default_store() -> Path:
    """The store of this user's daemon, under the XDG state directory."""
    return _xdg("XDG_STATE_HOME", ".local/state") / "kvscope.duckdb"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """What can be set. Units are in the names."""

    dir: Annotated[
        Path, Meta(description="Directory of the engines' rings; engines read this variable too")
    ] = msgspec.field(default_factory=default_directory)
    store: Annotated[Path, Meta(description="DuckDB file that the daemon writes")] = msgspec.field(
        default_factory=default_store
    )
    host: Annotated[
        str,
        Meta(
            description="Address the HTTP API listens on, and commands ask. It has no passwords: whoever "
            "reaches it can read everything, change labels and notes, and write snapshots and archives",
            min_length=1,
        ),
    ] = "127.0.0.1"
    port: Annotated[int, Meta(description="Port of the HTTP API; 0 takes a free one", ge=0, le=65535)] = 9177
    retention_hours: Annotated[
        float, Meta(description="Rows older than this are deleted from the store; 0: never", ge=0, le=87600)
    ] = 72.0
    archive: Annotated[
        str,
        Meta(
            description="Directory to which closed hours are written as Parquet; rows are deleted from the "
            "store only once they are there, and questions read both. Empty: none"
        ),
    ] = ""
    store_memory_mb: Annotated[
        int, Meta(description="Memory DuckDB may use for writing and for queries", ge=64)
    ] = 512
    sql_seconds: Annotated[
        float, Meta(description="A query that runs longer is cancelled", gt=0, le=3600)
    ] = 10.0
    sql_rows: Annotated[
        int, Meta(description="Most rows a query returns; the rest is cut and said so", ge=1)
    ] = 10_000
    sql_bytes: Annotated[int, Meta(description="Most bytes of rows a query returns", ge=1024)] = 16 << 20
    sql_memory_mb: Annotated[
        int,
        Meta(description="Memory a query in own SQL may use; it has a process of its own", ge=128, le=65536),
    ] = 512
    sample_seconds: Annotated[
        float,
        Meta(
            description="How often the host, vLLM's metrics and KV blocks are sampled, 0.5 at the least; 0 "
            "leaves out the host and vLLM's metrics",
            ge=0,
            le=3600,
        ),
    ] = 5.0
    vllm_metrics: Annotated[
        tuple[str, ...],
        Meta(
            description="Where engines serve their metrics, where that is not 127.0.0.1 at their port: URLs "
            "such as http://10.0.0.7:8000/metrics, a list in the file, commas between them elsewhere. An "
            "address belongs to the recorded engines with its port, else it is shown under host:port"
        ),
    ] = ()
    otlp_endpoint: Annotated[
        str,
        Meta(
            description="Receiver of OTLP/HTTP, such as http://tempo:4318, to which each stored request is "
            "exported as a trace; without a path, /v1/traces. Empty: none. Needs the extra otlp"
        ),
    ] = ""
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="What the daemon logs to stderr")
    ] = "info"
    window: Annotated[
        str, Meta(description="How long back `kvscope top` looks, from 1s to 30d: 90s, 5m, 2h")
    ] = "5m"
    refresh: Annotated[
        str, Meta(description="How often `kvscope top` shows anew, from 100ms to 1h: 500ms, 1s, 10s")
    ] = "1s"


VIEW_ONLY = ("window", "refresh")
"""Settings that mean nothing to a daemon."""


ENGINE_VARIABLES = {
    "KVSCOPE_DIR": "directory of the rings, made when missing; the daemon's setting `dir`",
    "KVSCOPE_ENABLE": "1 instruments vLLM's NIXL connectors where the connector's config can't be changed",
    "KVSCOPE_LABEL": "kind of traffic, such as benchmark; empty is production",
    "KVSCOPE_RING_SLOTS": "slots of each ring, 128 bytes each (default 65536); the oldest is overwritten",
}
"""What is read of an engine's environment, which no flag and no file sets."""


class Setting(NamedTuple):
    """One setting as documented."""

    name: str
    """Key in the file."""
    flag: str
    variable: str
    """Environment variable."""
    default: str
    doc: str


_TYPES: dict[str, Any] = get_type_hints(Settings, include_extras=True)


def listed() -> list[Setting]:
    """Every setting, for the generated docs; defaults that depend on the user are shown as a rule."""
    rules = {
        "dir": "/dev/shm/kvscope-<uid>",
        "store": "$XDG_STATE_HOME/kvscope/kvscope.duckdb",
        "archive": "none",
        "vllm_metrics": "found",
        "otlp_endpoint": "none",
    }
    defaults = Settings()
    return [
        Setting(
            name,
            _flag(name),
            ENV_PREFIX + name.upper(),
            rules.get(name) or str(getattr(defaults, name)),
            _doc(name),
        )
        for name in _TYPES
    ]


def add_arguments(parser: argparse.ArgumentParser, *names: str) -> None:
    """Give `parser` the flags of the named settings (the daemon's when none is named) and `--config`."""
    group = parser.add_argument_group("settings (flag, else KVSCOPE_* in the environment, else file)")
    group.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for name in names or [name for name in _TYPES if name not in VIEW_ONLY]:
        group.add_argument(_flag(name), dest=f"setting_{name}", metavar="VALUE", help=_doc(name))


def load(arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> Settings:
    """The settings in force.

    Args:
        arguments: parsed by a parser that `add_arguments` prepared.
        environment: instead of this process's own.

    Raises:
        UsageError: a key that does not exist or a value that does not fit, with where it was set.
    """
    env = os.environ if environment is None else environment
    values = _from_file(getattr(arguments, "config", None), env)
    for name in _TYPES:
        variable = ENV_PREFIX + name.upper()
        value = env.get(variable)
        if value and not value.startswith("tcp://"):  # Kubernetes sets these beside a service `kvscope`
            values[name] = _value(name, value, f"{variable} in the environment", text=True)
        flag = getattr(arguments, f"setting_{name}", None)
        if flag is not None:
            values[name] = _value(name, flag, _flag(name), text=True)
    return Settings(**values)


def _from_file(named: str | None, env: Mapping[str, str]) -> dict[str, Any]:
    named = named or env.get(ENV_PREFIX + "CONFIG")
    path = Path(named) if named else _xdg("XDG_CONFIG_HOME", ".config") / "config.toml"
    try:
        with path.open("rb") as file:
            found = tomllib.load(file)
    except FileNotFoundError:
        if named:
            raise UsageError(f"{path}: no such settings file") from None
        return {}
    except OSError as error:
        raise UsageError(f"{path}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    for key in found:
        if key not in _TYPES:
            raise UsageError(f"{path}: {key}: no such setting; there are {', '.join(_TYPES)}")
    return {key: _value(key, value, f"{path}: {key}", text=False) for key, value in found.items()}


def _value(name: str, value: object, where: str, text: bool) -> Any:
    if text and name == "vllm_metrics":
        value = [part.strip() for part in str(value).split(",") if part.strip()]
    try:
        found = msgspec.convert(value, _TYPES[name], strict=not text, dec_hook=_decode)
        if name in _CHECKS:
            _CHECKS[name](found)
    except (msgspec.ValidationError, TypeError, UsageError) as error:
        reason = str(error).replace("`", "").lower()
        raise UsageError(f"{where}: {value!r} does not fit: {reason}") from None
    return found


def _between(shortest: str, longest: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        if not duration_ns(shortest) <= duration_ns(text) <= duration_ns(longest):
            raise UsageError(f"expected a duration from {shortest} to {longest}")

    return check


def _are_urls(addresses: tuple[str, ...], example: str = "http://10.0.0.7:8000/metrics") -> None:
    for address in addresses:
        try:
            parsed = urlsplit(address)
            good = parsed.scheme in ("http", "https") and parsed.hostname and parsed.port != 0
        except ValueError:
            good = False
        if not good or not address.isprintable() or parsed.username is not None:
            raise UsageError(f"expected a url such as {example}")


def _is_receiver(address: str) -> None:
    _are_urls((address,) if address else (), "http://tempo:4318")


def _is_archive(directory: str) -> None:
    if directory and (reason := bad_directory(Path(directory))):
        raise UsageError(reason)


def _is_interval(seconds: float) -> None:
    if 0 < seconds < 0.5:
        raise UsageError("expected 0, or at least 0.5 seconds")


_CHECKS: dict[str, Callable[[Any], None]] = {
    "window": _between("1s", "30d"),
    "refresh": _between("100ms", "1h"),
    "archive": _is_archive,
    "sample_seconds": _is_interval,
    "vllm_metrics": _are_urls,
    "otlp_endpoint": _is_receiver,
}


def _decode(type_: type, value: object) -> object:
    if type_ is Path and isinstance(value, str) and value:
        return Path(value).expanduser()
    raise TypeError("expected a path")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _doc(name: str) -> str:
    return next(m.description or "" for m in _TYPES[name].__metadata__ if isinstance(m, Meta))
