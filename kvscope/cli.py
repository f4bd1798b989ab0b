"""The command line: finds the sub-command, imports it only then, and turns errors into one line.

Exit codes: 0 done; 1 it failed, or (`status`) something is lost or missing; 2 it was asked wrongly;
3 nothing answers (no daemon, no Grafana); 130 interrupted (Ctrl-C); 141 the reader of a pipe went away.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

from kvscope import __version__
from kvscope.errors import KvscopeError
from kvscope.text import printable

INTERRUPTED = 130
PIPE_CLOSED = 141


class Command(NamedTuple):
    """A sub-command: `main(argv)` of its module, or `add_arguments(parser)` and `run(arguments)`."""

    module: str
    help: str


COMMANDS = {
    "serve": Command(
        "kvscope.collectors.serve", "collect from this host's engines and answer questions (the daemon)"
    ),
    "status": Command(
        "kvscope.commands.status", "what the daemon reads, and what is lost, missing or unreadable"
    ),
    "requests": Command("kvscope.commands.requests", "list requests with where their time went"),
    "explain": Command(
        "kvscope.commands.explain", "one request: its waterfall, critical path and what it means"
    ),
    "query": Command("kvscope.commands.query", "answer a named question, or your own SELECT"),
    "shell": Command("kvscope.commands.shell", "a prompt for SQL and named questions, one after the other"),
    "snapshot": Command("kvscope.commands.snapshot", "copy the daemon's store to a file for other programs"),
    "archive": Command("kvscope.commands.archive", "write closed hours as Parquet, for any other tool"),
    "recover": Command(
        "kvscope.collectors.recover", "read the rings of engines that are gone, without a daemon"
    ),
    "label": Command("kvscope.commands.label", "name a window of time: an incident, a release, a benchmark"),
    "notes": Command("kvscope.commands.notes", "list and search what was noted about named windows"),
    "top": Command(
        "kvscope.tui.command", "the live view: compute wait or coordination wait, down to one request"
    ),
    "report": Command(
        "kvscope.analysis.report.command",
        "one page about a window, to attach to a ticket: HTML, Markdown or JSON",
    ),
    "sessions": Command(
        "kvscope.analysis.sessions", "conversations: KV read back or not and why, and what that was worth"
    ),
    "diff": Command(
        "kvscope.analysis.diff", "what changed between two windows, labels or files, and by how much"
    ),
    "whatif": Command(
        "kvscope.analysis.whatif", "predicted TTFT under push, pull, another decoder or other settings"
    ),
    "export": Command(
        "kvscope.analysis.exchange.export", "write requests for Perfetto, or as OpenTelemetry traces"
    ),
    "import": Command(
        "kvscope.analysis.exchange.imports",
        "make a store of a Parquet archive, of vLLM's traces or of its debug logs",
    ),
    "dashboards": Command(
        "kvscope.dashboards.command", "bring dashboards and alert rules to Grafana, or write them as files"
    ),
    "demo": Command(
        "kvscope.demo.run", "try it: a prefill and a decode engine, a router and a load on this machine"
    ),
}

_EXTRAS = {
    **dict.fromkeys(("duckdb", "pyarrow", "starlette", "uvicorn", "httpx", "anyio", "tomli"), "collector"),
    **dict.fromkeys(("textual", "rich"), "tui"),
    "yaml": "grafana",
    **dict.fromkeys(("opentelemetry", "google"), "otlp"),
    **dict.fromkeys(("torch", "vllm", "nixl", "nixl_cu12", "transformers", "tokenizers"), "engines"),
}
"""Module to the extra that brings it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run `kvscope`; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if sys.stderr is None:  # closed; print would take standard output instead
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - until the end
    if sys.stdout is None:
        return _fail("standard output is closed; redirect it to a file or to /dev/null", 1)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except KvscopeError as error:
        return _fail(str(error), error.exit_code)
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if missing not in _EXTRAS:
            raise
        return _fail(f"{arguments[0]} needs {missing}: pip install 'kvscope[{_EXTRAS[missing]}]'", 1)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is left in the buffer would raise again when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:
        return _fail(f"{error.filename}: {error.strerror}" if error.filename else str(error), 1)


def _run(arguments: list[str]) -> int:
    name = arguments[0] if arguments else ""
    if name.startswith("-") or not name:
        parser = _parser()
        parser.parse_args(arguments)
        parser.print_help()
        return 0 if name else 2
    command = COMMANDS.get(name)
    if command is None:
        near = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(COMMANDS)}"
        return _fail(f"no command {printable(name)[:40]!r}; {hint}", 2)
    module = importlib.import_module(command.module)
    if hasattr(module, "main"):
        return int(module.main(arguments[1:]) or 0)
    return _run_parsed(name, command, module, arguments[1:])


def _run_parsed(name: str, command: Command, module: ModuleType, arguments: list[str]) -> int:
    description, _, example = (module.__doc__ or command.help).partition("\n\n")
    parser = argparse.ArgumentParser(
        prog=f"kvscope {name}",
        description=" ".join(description.split()),
        epilog=example.rstrip() or None,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments)))


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    parser = argparse.ArgumentParser(
        prog="kvscope",
        usage="kvscope [-h] [--version] COMMAND ...",
        description="Where the time to first token goes in vLLM prefill/decode deployments over NIXL.",
        epilog="\n".join(
            [
                "commands:",
                *(f"  {name:<{width}}  {command.help}" for name, command in COMMANDS.items()),
                "",
                "`kvscope COMMAND --help` says more.",
                "Exit codes: 0 done, 1 failed (status: something is lost or missing), 2 asked wrongly,",
                "3 nothing answers (no daemon, no Grafana).",
            ]
        ),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvscope {__version__}")
    return parser


def _fail(line: str, code: int) -> int:
    print(f"kvscope: {' '.join(line.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
