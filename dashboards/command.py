"""`kvscope dashboards`: bring the dashboards and the alert rules to Grafana, or write them as files."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import msgspec

from kvscope.errors import KvscopeError, UsageError
from kvscope.text import printable, shortened

if TYPE_CHECKING:
    from kvscope.dashboards.apply import Change
    from kvscope.dashboards.grafana_api import Credential, Grafana

INTERRUPTED = 130
MAX_TOKEN_BYTES = 8192
MAX_TIMEOUT_S = 600.0

_APPLY = """\
Make a Grafana have the folder, the data sources, the six dashboards and the alert rules. What is there is
compared and only what differs is written; run it again after an upgrade.

examples:
  export GRAFANA_TOKEN=glsa_…
  kvscope dashboards apply --grafana-url http://grafana:3000 --prometheus-url http://prometheus:9090 \\
    --jaeger-url http://kvscope:9177
  kvscope dashboards apply --grafana-url https://ops.example/grafana --prometheus-uid mimir --no-rules
  kvscope dashboards apply --grafana-url http://grafana:3000 --dry-run --diff

The token of a service account comes from GRAFANA_TOKEN or --token-file, a user from GRAFANA_USER and
GRAFANA_PASSWORD. Addresses of data sources are as Grafana reaches them.
Exit codes: 0 done, 1 Grafana refuses something, 2 asked wrongly, 3 nothing answers or it is no Grafana.
"""

_EXPORT = """\
Write the dashboards and rules as files into DIR: for Grafana's provisioning, Prometheus and Kubernetes, and a
compose file that runs Prometheus, Grafana and the daemon. DIR/README.md says what each is for.

examples:
  kvscope dashboards export out && cd out && docker compose up
  kvscope dashboards export out --prometheus-url http://prometheus.monitoring:9090 \\
    --jaeger-url http://kvscope.inference:9177

Files that are there and differ are left alone and named, unless --force is given.
"""


def main(argv: Sequence[str]) -> int:
    arguments = _parser().parse_args(argv)
    return int(arguments.run(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvscope dashboards",
        description="Grafana dashboards and Prometheus rules: bring them there, or write them as files.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, help_: str, text: str, run: Callable[[argparse.Namespace], int]) -> Any:
        description, _, rest = text.partition("\n\n")
        found = commands.add_parser(
            name,
            help=help_,
            description=" ".join(description.split()),
            epilog=rest.rstrip(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        found.set_defaults(run=run)
        return found

    one = add("apply", "make a Grafana have them", _APPLY, _apply)
    one.add_argument(
        "--grafana-url", metavar="URL", help="Grafana's address, with the path it is under (else GRAFANA_URL)"
    )
    one.add_argument("--token-file", metavar="FILE", help="a file with the token of a service account")
    one.add_argument("--prometheus-url", metavar="URL", help="make the data source kvscope-prometheus for it")
    one.add_argument("--prometheus-uid", metavar="UID", help="use this data source of Grafana instead")
    one.add_argument(
        "--jaeger-url", metavar="URL", help="the daemon's address: make the data source kvscope-jaeger for it"
    )
    one.add_argument("--jaeger-uid", metavar="UID", help="use this source of traces instead")
    one.add_argument(
        "--link-exemplars",
        action="store_true",
        help="have the source named by --prometheus-uid link exemplars to the traces",
    )
    one.add_argument("--folder-uid", metavar="UID", help="put them into this folder of Grafana (kvscope)")
    one.add_argument(
        "--no-rules", action="store_true", help="leave alerts out, where Prometheus evaluates them"
    )
    one.add_argument("--dry-run", action="store_true", help="say what would be done, and do nothing")
    one.add_argument("--diff", action="store_true", help="show what differs")
    one.add_argument(
        "--timeout", type=float, default=10.0, metavar="SECONDS", help="for each answer of Grafana (10)"
    )
    one.add_argument("--json", action="store_true", help="what was done as JSON")

    two = add("export", "write them as files", _EXPORT, _export)
    two.add_argument("directory", metavar="DIR", help="where to; made when missing")
    two.add_argument(
        "--prometheus-url", metavar="URL", help="Prometheus as Grafana reaches it (http://prometheus:9090)"
    )
    two.add_argument(
        "--jaeger-url", metavar="URL", help="the daemon as Grafana reaches it (http://kvscope:9177)"
    )
    two.add_argument("--force", action="store_true", help="overwrite files that differ")
    two.add_argument("--json", action="store_true", help="what was written as JSON")
    return parser


# --- apply -----------------------------------------------------------------------------------------


def _apply(arguments: argparse.Namespace) -> int:
    from kvscope.dashboards.apply import Sources, apply
    from kvscope.dashboards.grafana_api import Grafana
    from kvscope.dashboards.shipped import FOLDER_UID, shipped

    url = arguments.grafana_url or os.environ.get("GRAFANA_URL")
    if not url:
        raise UsageError("say which Grafana: --grafana-url http://grafana:3000")
    if not 0.1 <= arguments.timeout <= MAX_TIMEOUT_S:
        raise UsageError(f"--timeout is a number of seconds from 0.1 to {MAX_TIMEOUT_S:g}")
    sources = Sources(
        prometheus_url=_address("--prometheus-url", arguments.prometheus_url),
        prometheus_uid=_uid("--prometheus-uid", arguments.prometheus_uid),
        jaeger_url=_address("--jaeger-url", arguments.jaeger_url),
        jaeger_uid=_uid("--jaeger-uid", arguments.jaeger_uid),
        link_exemplars=arguments.link_exemplars,
    )
    for kind in ("prometheus", "jaeger"):
        if getattr(sources, f"{kind}_url") and getattr(sources, f"{kind}_uid"):
            raise UsageError(f"give --{kind}-url or --{kind}-uid, not both")
    folder_uid = _uid("--folder-uid", arguments.folder_uid) or FOLDER_UID
    credential = read_credential(os.environ, arguments.token_file)
    found = shipped()
    grafana = Grafana(url, credential, arguments.timeout)
    talk = _Talk(grafana, arguments)
    try:
        if grafana.exposed:
            talk.note(f"{grafana.url} is not https: whoever is on the way can read the credentials")
        talk.version = grafana.version()
        with _interruptible() as stopped:
            apply(
                grafana,
                found,
                sources,
                folder_uid=folder_uid,
                rules=not arguments.no_rules,
                dry_run=arguments.dry_run,
                stop=stopped,
                tell=talk.tell,
                note=talk.note,
            )
            talk.interrupted = stopped()
    except KvscopeError as error:
        talk.end(str(error))
        if talk.changes:
            error.args = (f"{error} (before that: {talk.counts()}; what was done stays done)",)
        raise
    except KeyboardInterrupt:
        talk.interrupted = True
    finally:
        grafana.close()
    talk.end(None)
    return INTERRUPTED if talk.interrupted else 0


def read_credential(env: Mapping[str, str], token_file: str | None) -> Credential:
    """Who asks Grafana, from the file or the environment: never from the command line, which others see.

    Raises:
        UsageError: the file can't be read, or what it holds is no token.
    """
    from kvscope.dashboards.grafana_api import Credential

    if token_file:
        try:
            with Path(token_file).open("rb") as file:
                raw = file.read(MAX_TOKEN_BYTES + 1)
            token = raw.decode("ascii").strip()
        except OSError as error:
            raise UsageError(f"{printable(token_file)}: can't be read: {error.strerror}") from None
        except UnicodeDecodeError:
            raise UsageError(f"{printable(token_file)} holds no token: it is not plain text") from None
        if not token or len(raw) > MAX_TOKEN_BYTES:
            raise UsageError(f"{printable(token_file)} holds no token; write it there, alone")
        return Credential(token=token)
    if token := env.get("GRAFANA_TOKEN", "").strip():
        return Credential(token=token)
    user, password = env.get("GRAFANA_USER", ""), env.get("GRAFANA_PASSWORD", "")
    if bool(user) != bool(password):
        raise UsageError("GRAFANA_USER and GRAFANA_PASSWORD go together; set both, or GRAFANA_TOKEN")
    return Credential(user=user, password=password)


class _Talk:
    """What the user gets to see of it."""

    def __init__(self, grafana: Grafana, arguments: argparse.Namespace) -> None:
        self._grafana, self._arguments = grafana, arguments
        self.version: str | None = None
        self.changes: list[Change] = []
        self._notes: list[str] = []
        self.interrupted = False

    def tell(self, change: Change) -> None:
        self.changes.append(change)
        if self._arguments.json:
            return
        word = change.action
        if self._arguments.dry_run:
            word = {"created": "would create", "updated": "would update"}.get(word, word)
        title = shortened(change.title, 60)
        print(f"{word:<12}  {change.kind:<11}  {change.uid}{f'  ({title})' if title else ''}", flush=True)
        if self._arguments.diff and change.diff:
            print(change.diff, flush=True)

    def note(self, line: str) -> None:
        self._notes.append(line)
        if not self._arguments.json:
            print(f"note: {line}", file=sys.stderr, flush=True)

    def counts(self) -> str:
        count = Counter(change.action for change in self.changes)
        words = ("created", "updated", "unchanged", "used")
        shown = {"created": "to create", "updated": "to update"} if self._arguments.dry_run else {}
        return ", ".join(f"{count[word]} {shown.get(word, word)}" for word in words if count[word])

    def end(self, error: str | None) -> None:
        """Say the sum of it, or all of it as JSON."""
        if self._arguments.json:
            changes = msgspec.to_builtins(self.changes)
            if not self._arguments.diff:
                changes = [{k: v for k, v in change.items() if k != "diff"} for change in changes]
            _print_json(
                {
                    "grafana": {"url": self._grafana.url, "version": self.version},
                    "dry_run": self._arguments.dry_run,
                    "objects": changes,
                    "notes": self._notes,
                    "interrupted": self.interrupted,
                    "error": error,
                }
            )
        elif error is None:
            would = "; nothing was written (--dry-run)" if self._arguments.dry_run else ""
            stopped = "; stopped before the end, run it again for the rest" if self.interrupted else ""
            counts = self.counts() or "nothing done"
            print(f"Grafana {self.version} at {self._grafana.url}: {counts}{would}{stopped}", flush=True)


@contextlib.contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Within it a first Ctrl-C is only noted, so that no object is left half done; a second one ends it."""
    asked = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("kvscope: stopping after this object; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    try:
        before = signal.signal(signal.SIGINT, note)
    except ValueError:  # not the main thread, which alone gets signals
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


# --- export ----------------------------------------------------------------------------------------


def _export(arguments: argparse.Namespace) -> int:
    from kvscope.dashboards.export import KVSCOPE_URL, PROMETHEUS_URL, files, write
    from kvscope.dashboards.shipped import shipped

    wanted = files(
        shipped(),
        prometheus_url=_address("--prometheus-url", arguments.prometheus_url) or PROMETHEUS_URL,
        jaeger_url=_address("--jaeger-url", arguments.jaeger_url) or KVSCOPE_URL,
    )
    directory = Path(arguments.directory)
    written = write(directory, wanted, arguments.force)
    if arguments.json:
        _print_json({"directory": str(directory), "files": written})
        return 0
    for name, action in written.items():
        print(f"{action:<9}  {printable(directory / name)}")
    count = Counter(written.values())
    print(", ".join(f"{count[word]} {word}" for word in ("created", "updated", "unchanged") if count[word]))
    return 0


# --- arguments -------------------------------------------------------------------------------------


def _address(flag: str, text: str | None) -> str:
    """An address for a data source, checked; empty for none.

    Raises:
        UsageError: it is none, or has a password in it, which every user of Grafana could read.
    """
    if not text:
        return ""
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good or not text.isprintable() or " " in text or "@" in text or parts.query or parts.fragment:
        raise UsageError(f"{flag} takes an address such as http://prometheus:9090, without a password in it")
    return text


def _uid(flag: str, text: str | None) -> str:
    from kvscope.dashboards.shipped import is_uid

    if text and not is_uid(text):
        raise UsageError(f"{flag} takes a uid: up to 40 letters, digits, - and _")
    return text or ""


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")
