"""Answer a named question, or one SELECT of your own, over the tables of the store and the views waits
(requests with sums by class) and request_steps (a row per request and step).

examples:
  kvscope query --list
  kvscope query ttft --since 1h
  kvscope query pairs --describe
  kvscope query fleet --since 15m --until 5m --where connector=push --where 'prompt_tokens>1000'
  kvscope query "SELECT d_engine, max(readiness_detect_ns) FROM requests GROUP BY ALL" --since 10m

The tables hold only what the parameters select; a daemon's table requests also has those in flight that have
had their first token.
"""

from __future__ import annotations

import argparse
import csv
import sys
import textwrap
from typing import Any

from kvscope.commands import add_source_arguments, open_source, print_json
from kvscope.errors import UsageError
from kvscope.query import PARAMETERS, checked, questions
from kvscope.text import table

FORMATS = ("table", "csv", "json")


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
            parser.add_argument(f"--{name}", metavar=name.upper(), help=doc)
    parser.add_argument("--format", choices=FORMATS, help="table (default), csv or json")
    parser.add_argument("--json", action="store_true", help="as --format json")
    add_source_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    text = (arguments.question or "").strip()
    format_ = "json" if arguments.json else arguments.format or "table"
    if arguments.list:
        _print_list(format_)
    elif not text:
        raise UsageError("name a question or write SQL; `kvscope query --list` tells the questions")
    elif arguments.describe:
        _describe(text, format_)
    else:
        named = text.replace("_", "").isalnum()
        parameters = {p: value for p in PARAMETERS if (value := getattr(arguments, p)) is not None}
        with open_source(arguments) as source:
            answer = source.query(text if named else "", "" if named else text, parameters)
        _print_answer(answer, format_)
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


def _print_answer(answer: dict[str, Any], format_: str) -> None:
    head = [column["name"] for column in answer["columns"]]
    if format_ == "json":
        print_json(answer)
    elif format_ == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(head)
        writer.writerows(answer["rows"])
    elif answer["rows"] and head == ["explain_key", "explain_value"]:
        print("\n".join(str(row[1]).rstrip() for row in answer["rows"]))
    else:
        print(table(head, answer["rows"]))
    if answer["truncated"]:
        print(
            f"cut after {len(answer['rows'])} rows; ask for less, or raise the daemon's limits",
            file=sys.stderr,
        )
