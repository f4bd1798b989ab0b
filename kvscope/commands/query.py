"""Answer a named question, or one SELECT of your own, over the tables of the store and the views waits
(requests with sums by class) and request_steps (a row per request and step).

examples:
  kvscope query --list
  kvscope query ttft --since 1h
  kvscope query pairs --describe
  kvscope query fleet --since 15m --until 5m --where connector=push --where 'prompt_tokens>1000'
  kvscope query "SELECT d_engine, max(readiness_detect_ns) FROM requests GROUP BY ALL" --since 10m
  kvscope query "SELECT * FROM waits" --since 1h -o waits.parquet

The tables hold only what the parameters select; a daemon's table requests also has those in flight that have
had their first token. Parquet and Arrow go to a file (-o) or a pipe, with all types as they are. The flags
--sql-* are for --db: a daemon has limits of its own. `kvscope shell` takes one query after the other;
docs/sql.md says more.
"""

from __future__ import annotations

import argparse
import textwrap
from pathlib import Path

from kvscope.commands import (
    add_during_argument,
    add_source_arguments,
    apply_during,
    open_source,
    print_json,
)
from kvscope.commands.results import FORMATS, JSON, LIMITS, Target, format_of, set_limits
from kvscope.errors import UsageError
from kvscope.query import PARAMETERS, checked, questions
from kvscope.text import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("question", nargs="?", metavar="NAME|SQL", help="a question's name, or one SELECT")
    parser.add_argument("--list", action="store_true", help="the questions there are")
    parser.add_argument(
        "--describe", action="store_true", help="what the question's columns mean, and its SQL"
    )
    for name, doc in PARAMETERS.items():
        if name == "where":
            parser.add_argument("--where", action="append", metavar="FILTER", help=f"{doc}; repeatable")
        else:
            of = ", of questions that take it" if name == "limit" else ""
            parser.add_argument(f"--{name}", metavar=name.upper(), help=doc + of)
    add_during_argument(parser)
    parser.add_argument(
        "--format",
        choices=FORMATS,
        help="default: as the file's suffix says, else table; arrow is an IPC file",
    )
    parser.add_argument("--json", action="store_true", help="as --format json")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the answer there")
    parser.add_argument("--force", action="store_true", help="replace FILE where it exists")
    add_source_arguments(parser, True, *LIMITS)


def run(arguments: argparse.Namespace) -> int:
    text = (arguments.question or "").strip()
    format_ = format_of(JSON if arguments.json else arguments.format, arguments.output)
    if arguments.list:
        _print_list(format_)
    elif not text:
        raise UsageError("name a question or write SQL; `kvscope query --list` tells the questions")
    elif arguments.describe:
        _describe(text, format_)
    else:
        apply_during(arguments)
        named = text.replace("_", "").isalnum()
        parameters = {p: value for p in PARAMETERS if (value := getattr(arguments, p)) is not None}
        target = Target(format_, arguments.output, arguments.force)
        with open_source(arguments) as source:
            set_limits(source, arguments)
            target.ask(source, text if named else "", "" if named else text, parameters)
    return 0


def _print_list(format_: str) -> None:
    if format_ == "json":
        print_json(
            [{"name": q.name, "title": q.title, "description": q.description} for q in questions().values()]
        )
    else:
        print(table(("question", "about"), ((q.name, q.title) for q in questions().values())))


def _describe(name: str, format_: str) -> None:
    question = checked(name)
    if format_ == "json":
        print_json(question._asdict())
        return
    print(f"{question.name}: {question.title}\n")
    print(textwrap.fill(question.description, 80))
    print("\nparameters")
    for parameter in question.parameters:
        print(f"  --{parameter:<10} {PARAMETERS[parameter]}")
    print("\ncolumns")
    width = max(map(len, question.columns))
    for column, doc in question.columns.items():
        print(textwrap.fill(f"  {column:<{width}}  {doc}", 100, subsequent_indent=" " * (width + 4)))
    print(f"\n{question.sql}")
