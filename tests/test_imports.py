"""The walls: who imports whom, and what is loaded when. The reasons are in pyproject.toml."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "kvscope"

INSIDE_VLLM = {"kvscope", "msgspec", "vllm", *sys.stdlib_module_names}
"""What the connectors may import. vLLM is there already where they run."""
HEAVY = ("duckdb", "pyarrow", "numpy", "starlette", "uvicorn", "httpx", "textual", "torch", "vllm")


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that a fresh interpreter has loaded after `statement`."""
    code = f"import sys\n{statement}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_help_of_top_needs_no_textual() -> None:
    statement = "from kvscope.tui.command import main\ntry: main(['--help'])\nexcept SystemExit: pass"
    assert loaded_by(statement).isdisjoint(HEAVY)


@pytest.mark.parametrize(
    "module",
    ["kvscope", "kvscope.events", "kvscope.ring", "kvscope.steps", "kvscope.schema", "kvscope.join",
     "kvscope.attribution", "kvscope.query", "kvscope.settings", "kvscope.cli", "kvscope.connectors.plugin"],
)  # fmt: skip
def test_loads_nothing_heavy(module: str) -> None:
    if find_spec(module) is None:
        pytest.fail(f"there is no {module}")
    assert loaded_by(f"import {module}").isdisjoint(HEAVY)


def test_what_the_connectors_load_of_others_is_msgspec() -> None:
    others = loaded_by("import kvscope.connectors.plugin, kvscope.ring") - loaded_by("pass")
    # msgspec looks for typing_extensions and does without.
    assert others - sys.stdlib_module_names - {"typing_extensions"} == {"kvscope", "msgspec"}


def imports_of(source: str) -> set[str]:
    """Full names of all modules imported anywhere in `source`, in functions too."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def module_file(name: str) -> Path | None:
    path = ROOT.joinpath(*name.split("."))
    return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def test_what_runs_inside_vllm_imports_the_standard_library_and_msgspec_only() -> None:
    todo = set((ROOT / "connectors").rglob("*.py"))
    seen: set[Path] = set()
    while todo:
        path = todo.pop()
        seen.add(path)
        imported = imports_of(path.read_text())
        outside = {name for name in imported if name.partition(".")[0] not in INSIDE_VLLM}
        assert not outside, f"{path.relative_to(ROOT)} imports {', '.join(sorted(outside))}"
        files = {module_file(name) for name in imported if name.startswith("kvscope")}
        todo |= {file for file in files if file is not None} - seen
    assert PACKAGE / "ring.py" in seen


def lint(where: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).parent / "lint-imports"), "--no-cache"]
    return subprocess.run(command, cwd=where, capture_output=True, text=True, timeout=120)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    for folder in ("kvscope", "connectors", "collectors", "tui", "dashboards", "demo", "analysis"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, tmp_path / folder, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_walls_stand() -> None:
    done = lint(ROOT)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("file", "line", "chain"),
    [
        ("connectors/__init__.py", "import duckdb", "kvscope.connectors -> duckdb"),
        ("kvscope/ring.py", "import numpy", "kvscope.ring -> numpy"),
        ("kvscope/steps.py", "import kvscope.collectors", "kvscope.steps -> kvscope.collectors"),
        ("connectors/__init__.py", "import kvscope.collectors", "kvscope.connectors -> kvscope.collectors"),
        ("demo/__init__.py", "def f():\n    import kvscope.collectors", "kvscope.demo -> kvscope.collectors"),
        ("collectors/__init__.py", "import kvscope.cli", "kvscope.collectors -> kvscope.cli"),
        ("kvscope/join.py", "import kvscope.query", "kvscope.join -> kvscope.query"),
        ("kvscope/unlisted.py", "", "kvscope.unlisted"),
    ],
)
def test_a_hole_in_a_wall_is_reported(copy: Path, file: str, line: str, chain: str) -> None:
    with (copy / file).open("a") as source:
        source.write(f"\n{line}\n")
    done = lint(copy)
    assert done.returncode == 1, done.stderr
    assert "BROKEN" in done.stdout
    assert chain in " ".join(done.stdout.split())
