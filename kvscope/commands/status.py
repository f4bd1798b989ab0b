"""Show what the daemon reads and how well: engines and their versions, events lost, hooks missing, files it
can't read, the store. What is wrong comes first. Exit code 0 when all is well, 1 when something is lost,
missing or broken, 3 when no daemon answers.

examples:
  kvscope status
  kvscope status --json
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from kvscope.client import Daemon
from kvscope.commands import add_source_arguments, daemon_url, print_json
from kvscope.health import problems, version
from kvscope.text import printable, size, span, table, utc


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="as the daemon tells it")
    add_source_arguments(parser, db=False)


def run(arguments: argparse.Namespace) -> int:
    status = Daemon(daemon_url(arguments)).status()
    wrong = list(problems(status))
    if arguments.json:
        print_json(status)
    else:
        print(status_text(status, wrong))
    return 1 if wrong else 0


def status_text(status: Mapping[str, Any], wrong: Sequence[str]) -> str:
    """All of it for people."""
    store, pipeline = status["store"], status["pipeline"]
    lines = [f"kvscope {printable(status['version'])}, up {span(int(status['uptime_s'] * 1e9))}", ""]
    if wrong:
        lines += [f"  ! {line}" for line in wrong] + [""]
    else:
        lines += ["all well: nothing lost, no hook missing, every file read", ""]
    if status["rings"]:
        lines += [_rings(status["rings"]), ""]
    counts = ", ".join(f"{value} {printable(key).replace('_', ' ')}" for key, value in pipeline.items())
    lines += [
        f"rings     {printable(status['dir'])}",
        f"store     {printable(store['path'])}, {size(store['bytes'])}, "
        f"{store['rows_stored']} rows stored since start, "
        f"{store['rows_queued']} of {store['queue_limit']} waiting",
        f"pipeline  {counts}",
    ]
    if archive := status.get("archive"):
        passed = archive["last_pass_at_ns"]
        lines.append(
            f"archive   {printable(archive['path'])}, {archive['rows_written']} rows and "
            f"{size(archive['bytes_written'])} written since start, "
            f"{'no pass finished yet' if passed is None else 'last pass ' + utc(passed)[:16]}"
        )
    return "\n".join(lines)


def _rings(rings: Sequence[Mapping[str, Any]]) -> str:
    return table(
        (
            "engine",
            "source",
            "rank",
            "host",
            "pid",
            "state",
            "events",
            "lost",
            "last event (UTC)",
            "versions",
            "label",
        ),
        (
            (
                r["engine"],
                r["source"],
                r["rank"],
                r["host"],
                r["pid"],
                r["state"],
                r["read"],
                r["lost"],
                utc(r["last_event_at_ns"]),
                _versions(r),
                r["label"],
            )
            for r in sorted(rings, key=lambda r: (r["engine"], r["source"], r["rank"], r["ring"]))
        ),
        max_width=48,
    )


def _versions(ring: Mapping[str, Any]) -> str:
    found = {"kvscope": ring["kvscope"], "vllm": version(ring, "vllm"), "nixl": version(ring, "nixl")}
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)
