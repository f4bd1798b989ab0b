"""Ask one thing after the other: SQL that ends with a semicolon, and named questions. On a terminal it has a
prompt and a history, which is kept nowhere; from a pipe it stops at the first error.

examples:
  kvscope shell
  kvscope shell --db snapshot.duckdb --since '2026-11-29 15:00' --label ''
  echo 'SELECT connector, count(*) FROM requests GROUP BY ALL;' | kvscope shell --format csv

Type .help for its commands. Ctrl-C cancels what is typed or runs, Ctrl-D leaves. The flags --sql-* are for
--db: a daemon has limits of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from kvscope import schema, steps
from kvscope.client import Daemon, StoreFile
from kvscope.commands import add_source_arguments, add_window_arguments, apply_during, open_source
from kvscope.commands.results import FORMATS, LIMITS, Target, format_of, set_limits
from kvscope.errors import KvscopeError, UsageError
from kvscope.query import MAX_SQL_BYTES, PARAMETERS, QueryRefused, applicable, checked, questions, selected
from kvscope.text import printable, table
from kvscope.views import VIEWS, WAITS_COLUMNS

PROMPT, MORE = "kvscope", "   ...> "
_PROMPT_SCOPE = 60
"""Characters of the scope in the prompt."""
_VIEWS = {
    "waits": "Requests and, per request, the nanoseconds of TTFT by class, and its longest step",
    "request_steps": "One row per request and step on the critical path.",
}
_OTHER_VIEW = "A view that the named questions use."
_DERIVED = {
    "compute_wait_ns": "compute + capacity: what more or faster accelerators would shorten",
    "main_step": "Its longest step",
    "main_step_ns": "The longest step's time",
    "main_class": "The longest step's class",
    "step": "Name of the step",
    "class": "Class of the step",
    "ns": "Time in it; NULL where it was not observed",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_window_arguments(parser)
    parser.add_argument("--label", help=PARAMETERS["label"])
    parser.add_argument("--where", action="append", default=[], metavar="FILTER", help=PARAMETERS["where"])
    parser.add_argument("--format", choices=FORMATS[:3], default="table", help="default: table")
    add_source_arguments(parser, True, *LIMITS)


def run(arguments: argparse.Namespace) -> int:
    apply_during(arguments)
    scope: dict[str, Any] = {"since": arguments.since, "until": arguments.until, "where": arguments.where}
    if arguments.label is not None:
        scope["label"] = arguments.label
    scope = {name: value for name, value in scope.items() if value or name == "label"}
    _check(scope)
    with open_source(arguments) as source:
        set_limits(source, arguments)
        if isinstance(source, Daemon):
            source.status()  # that it is there is told now, not after the first query
        shell = Shell(source, scope, arguments.format)
        if sys.stdin.isatty():
            return _converse(shell)
        return _read_all(shell)


class Shell:
    """Carries out statements and commands.

    Args:
        scope: what they are about, as parameters of queries.
        format_: of answers.
    """

    def __init__(self, source: Daemon | StoreFile, scope: dict[str, Any], format_: str) -> None:
        self.source = source
        self.scope = scope
        self.format = format_
        self.output: Path | None = None
        """File for the next answer."""
        self.ended = False

    def prompt(self) -> str:
        """The prompt, with what the scope is."""
        parts = [
            f"{name}={shlex.quote(text)}"
            for name in PARAMETERS
            if name in self.scope
            for text in ([self.scope[name]] if isinstance(self.scope[name], str) else self.scope[name])
        ]
        shown = printable(" ".join(parts))
        if len(shown) > _PROMPT_SCOPE:
            shown = shown[: _PROMPT_SCOPE - 1] + "…"
        return f"{PROMPT} {shown}> " if shown else f"{PROMPT}> "

    def statement(self, sql: str) -> None:
        """Ask one SELECT, or the question whose name it is."""
        if sql in questions():
            self.ask(sql)
            return
        self._ask("", sql, applicable(sql))

    def command(self, line: str) -> None:
        """Carry out a line that begins with a dot.

        Raises:
            UsageError: there is no such command, or it is used otherwise.
        """
        name, _, rest = line.strip().partition(" ")
        command = COMMANDS.get(name)
        if command is None:
            raise UsageError(f"no command {printable(name)[:40]!r}; .help tells which there are")
        command.run(self, rest.strip())

    def _ask(self, name: str, sql: str, takes: set[str]) -> None:
        about = {parameter: value for parameter, value in self.scope.items() if parameter in takes}
        if left := [parameter for parameter in self.scope if parameter not in takes]:
            print(f"note: this does not depend on {', '.join(left)}", file=sys.stderr)
        target = Target(self.format if self.output is None else format_of(None, self.output), self.output)
        self.output = None
        target.ask(self.source, name, sql, about)

    # --- commands --------------------------------------------------------------------------------

    def help(self, rest: str) -> None:
        print(table(("command", "what it does"), ((one.usage, one.doc) for one in COMMANDS.values()), 100))

    def tables(self, rest: str) -> None:
        docs = [(one.name, one.doc) for one in schema.TABLES]
        docs += [(name, _VIEWS.get(name, _OTHER_VIEW)) for name in VIEWS]
        print(table(("table", "what it holds"), docs, 110))

    def schema(self, rest: str) -> None:
        name = rest.rstrip(";").lower()
        if name not in schema.BY_NAME and name not in VIEWS:
            raise UsageError(f"no table {printable(rest)[:40]!r}; there are: {', '.join(_relations())}")
        print(table(("column", "type", "meaning"), _columns(name, self.source), 100))

    def questions(self, rest: str) -> None:
        print(table(("question", "about"), ((one.name, one.title) for one in questions().values()), 100))

    def ask(self, rest: str) -> None:
        name, _, limit = rest.rstrip(";").partition(" ")
        if not name:
            raise UsageError("write .ask NAME; .questions tells the names")
        question = checked(name, {"limit": limit} if limit else {})
        kept = self.scope
        self.scope = {**kept, **({"limit": limit.strip()} if limit else {})}
        try:
            self._ask(name, "", set(question.parameters))
        finally:
            self.scope = kept

    def set_scope(self, name: str, rest: str) -> None:
        scope = {key: value for key, value in self.scope.items() if key != name}
        if rest:
            value = _unquoted(rest)
            scope[name] = [*self.scope.get("where", []), value] if name == "where" else value
        _check(scope)
        self.scope = scope

    def set_format(self, rest: str) -> None:
        if rest not in FORMATS[:3]:
            raise UsageError(f"the formats are {', '.join(FORMATS[:3])}; parquet and arrow go to an .output")
        self.format = rest

    def set_output(self, rest: str) -> None:
        path = Path(_unquoted(rest)).expanduser() if rest else None
        if path is not None:
            if path.is_file():
                raise UsageError(f"{printable(path)} is there already; name another file")
            Target(format_of(None, path), path)  # complains of it now, not after the query
        self.output = path

    def quit(self, rest: str) -> None:
        self.ended = True


class Command(NamedTuple):
    usage: str
    doc: str
    run: Callable[[Shell, str], None]


def _sets(name: str) -> Callable[[Shell, str], None]:
    return lambda shell, rest: shell.set_scope(name, rest)


COMMANDS = {
    ".help": Command(".help", "this list", Shell.help),
    ".tables": Command(".tables", "the tables and views, and what they hold", Shell.tables),
    ".schema": Command(".schema TABLE", "its columns, their types and meanings", Shell.schema),
    ".questions": Command(".questions", "the named questions", Shell.questions),
    ".ask": Command(".ask NAME [LIMIT]", "answer a named question, as does NAME; some take LIMIT", Shell.ask),
    ".since": Command(".since [MOMENT]", "only what began then or later; alone: all", _sets("since")),
    ".until": Command(".until [MOMENT]", "only what began before; alone: all", _sets("until")),
    ".label": Command(".label [LABEL]", "only this label ('': production); alone: all", _sets("label")),
    ".where": Command(".where [FILTER]", "only requests that pass this too; alone: all", _sets("where")),
    ".format": Command(".format FORMAT", f"of answers: {', '.join(FORMATS[:3])}", Shell.set_format),
    ".output": Command(
        ".output FILE", "write the next answer there: .csv, .json, .parquet or .arrow", Shell.set_output
    ),
    ".quit": Command(".quit", "leave; so does Ctrl-D", Shell.quit),
}  # fmt: skip


def _relations() -> list[str]:
    return [*schema.BY_NAME, *VIEWS]


def _columns(name: str, source: Daemon | StoreFile) -> list[tuple[str, str, str]]:
    stored = schema.BY_NAME.get(name)
    if stored is not None:
        return [(one.name, one.type, one.doc) for one in stored.columns]
    docs = {one.name: one.doc for one in schema.REQUESTS.columns} | _DERIVED
    if name == "waits":
        described = list(WAITS_COLUMNS.items())
    else:
        described = [(row[0], row[1]) for row in source.query("", f"DESCRIBE {name}", {})["rows"]]
    docs |= {f"{class_}_ns": f"Time in steps of the class {class_}" for class_ in steps.CLASSES}
    docs |= {one.name: one.doc for one in steps.STEPS}
    return [(column, type_, docs.get(column, "")) for column, type_ in described]


def _check(scope: dict[str, Any]) -> None:
    """Raises:
    UsageError: a value is not understood; windows' names are left to the source.
    """
    selected({name: v for name, v in scope.items() if not (isinstance(v, str) and v.startswith("@"))})


def _unquoted(text: str) -> str:
    """A value as it is written, or within quotes."""
    return text[1:-1] if len(text) >= 2 and text[0] == text[-1] and text[0] in "'\"" else text


# --- statements ------------------------------------------------------------------------------------

_PIECE = re.compile(
    r"'(?:[^']|'')*'"
    r'|"(?:[^"]|"")*"'
    r"|--[^\n]*\n"
    r"|/\*.*?\*/"
    r"|\$(\w*)\$.*?\$\1\$"
    r"|(?P<open>['\"]|--|/\*|\$\w*\$)"
    r"|(?P<end>;)"
    r"|[^'\"\-/$;]+|.",
    re.DOTALL,
)


def split(text: str) -> tuple[list[str], str]:
    """The statements of `text` that are ended by a semicolon, and the rest."""
    found: list[str] = []
    begin = 0
    for piece in _PIECE.finditer(text):
        if piece["open"]:
            break
        if piece["end"]:
            found.append(text[begin : piece.start()].strip())
            begin = piece.end()
    return [one for one in found if one], text[begin:].lstrip()


def _fed(shell: Shell, typed: str, line: str) -> str:
    """Carry out what `line` completes; returns what is still to be ended.

    Raises:
        KvscopeError: as the statement or the command says.
    """
    if not typed and line.lstrip().startswith("."):
        shell.command(line)
        return ""
    statements, rest = split(typed + line)
    if len(rest.encode("utf-8", "replace")) > MAX_SQL_BYTES:
        raise QueryRefused(f"the SQL text is longer than {MAX_SQL_BYTES // 1024} KiB; end it with ;")
    for sql in statements:
        shell.statement(sql)
    return rest


def _read_all(shell: Shell) -> int:
    """From a pipe; an error ends it."""
    with contextlib.suppress(AttributeError):
        sys.stdin.reconfigure(errors="surrogateescape")  # type: ignore[union-attr]
    typed = ""
    while not shell.ended and (line := sys.stdin.readline(2 * MAX_SQL_BYTES)):
        typed = _fed(shell, typed, line)
    if typed.strip() and not shell.ended:
        shell.statement(typed.strip())
    return 0


def _converse(shell: Shell) -> int:
    """On a terminal: an error is told and no more; Ctrl-C ends what is typed or runs, whenever it comes."""
    _edit_lines(shell)
    print("SQL that ends with ;  .help for commands, Ctrl-D to leave")
    told = True
    while True:
        try:
            if not told:
                print("^C")
                told = True
            _read_lines(shell)
            return 0
        except KeyboardInterrupt:  # which readline may pass on twice
            told = False


def _read_lines(shell: Shell) -> None:
    typed = ""
    while not shell.ended:
        try:
            line = input(MORE if typed else shell.prompt()) + "\n"
            typed = _fed(shell, typed, line)
        except EOFError:
            print()
            return
        except UnicodeDecodeError:
            print("kvscope: what was typed is no valid text", file=sys.stderr)
        except KvscopeError as error:
            print(f"kvscope: {' '.join(str(error).split())}", file=sys.stderr)
            typed = ""


def _edit_lines(shell: Shell) -> None:
    """Editing, a history in memory, and completion of names, where Python has readline."""
    try:
        import readline
    except ImportError:
        return
    columns = {column.name for one in schema.TABLES for column in one.columns} | set(WAITS_COLUMNS)
    words = sorted({*COMMANDS, *_relations(), *questions(), *columns})

    def complete(text: str, state: int) -> str | None:
        fitting = [word for word in words if word.startswith(text)] if text else []
        return fitting[state] if state < len(fitting) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n;,()=<>'\"")
    readline.parse_and_bind("tab: complete")
