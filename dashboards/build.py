"""Writes all that is generated for Grafana and Prometheus: `python -m kvscope.dashboards.build [--check]`.

The dashboards (dashboards/grafana/*.json), the rules (dashboards/prometheus/*.yaml), docs/runbook.md.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from kvscope.dashboards import daemon, engines, flow, overview, pairs, rules, sessions

ROOT = Path(__file__).resolve().parent.parent
GRAFANA, PROMETHEUS, RUNBOOK = "dashboards/grafana", "dashboards/prometheus", "docs/runbook.md"
MAKERS = (overview, flow, pairs, sessions, engines, daemon)


def dashboards() -> dict[str, dict[str, Any]]:
    """By uid, in the order in which they are told."""
    made = [_cleaned(json.loads(json.dumps(maker.dashboard(), cls=JSONEncoder))) for maker in MAKERS]
    return {dashboard["uid"]: dashboard for dashboard in made}


def _cleaned(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Without what the SDK writes and Grafana's own types don't know."""
    for variable in dashboard["templating"]["list"]:
        for name in ("auto", "auto_min", "auto_count"):  # of interval variables, of which there is none
            variable.pop(name, None)
    for panel in dashboard["panels"]:
        if panel["type"] == "table":
            panel["options"].pop("footer", None)  # moved from the options to the columns
    return dashboard


def texts() -> dict[str, str]:
    """What the files should say, by path in the repository."""
    found = {
        f"{GRAFANA}/{uid}.json": json.dumps(dashboard, indent=2, ensure_ascii=False) + "\n"
        for uid, dashboard in dashboards().items()
    }
    found |= {f"{PROMETHEUS}/{name}": text for name, text in rules.files().items()}
    return found | {RUNBOOK: rules.runbook()}


def stale() -> list[str]:
    """Files that are missing, that say something else, or that nothing makes."""
    wanted = texts()
    there = [RUNBOOK, *(f"{GRAFANA}/{p.name}" for p in (ROOT / GRAFANA).glob("*"))]
    there += [f"{PROMETHEUS}/{p.name}" for p in (ROOT / PROMETHEUS).glob("*")]
    found = {name: (ROOT / name).read_text("utf-8") for name in there if (ROOT / name).exists()}
    return sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))


def main() -> int:
    parser = argparse.ArgumentParser(description="write dashboards, rules and the runbook")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when a file is stale")
    names = stale()
    if parser.parse_args().check:
        if names:
            print(f"stale: {', '.join(names)}; run `make dashboards`", file=sys.stderr)
        return bool(names)
    wanted = texts()
    for name in names:
        path = ROOT / name
        if name in wanted:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(wanted[name], "utf-8")
        else:
            path.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main())
