"""What gets installed: the wheel holds the folders, and works with nothing but msgspec beside it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import requires, version
from pathlib import Path

import pytest

from kvscope import __version__

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LOCK = (ROOT / "requirements.lock").read_text()


def folders_with_code() -> set[str]:
    """Packages as found below `kvscope`, through the links."""
    found = set()
    for where, subfolders, files in os.walk(ROOT / "kvscope", followlinks=True):
        subfolders[:] = [name for name in subfolders if name != "__pycache__"]
        if any(name.endswith(".py") for name in files):
            found.add(".".join(Path(where).relative_to(ROOT).parts))
    return found


def test_every_folder_with_code_is_in_the_package_list() -> None:
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == folders_with_code()


def test_every_linked_folder_is_mapped_for_the_build() -> None:
    found = [path for path in (ROOT / "kvscope").iterdir() if path.is_symlink()]
    links = {f"kvscope.{link.name}": str(link.readlink()) for link in found}
    mapped = {name: f"../{folder}" for name, folder in PROJECT["tool"]["setuptools"]["package-dir"].items()}
    for name, target in mapped.items():
        outer, _, inner = name.removeprefix("kvscope.").partition(".")
        if name != "kvscope" and inner:  # comes with the link of the folder around it
            assert target == f"../{outer}/{inner.replace('.', '/')}"
    assert links == {name: target for name, target in mapped.items() if name.count(".") == 1}


def run(*command: str | Path, cwd: Path) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("wheel")
    # From a copy, so that no build folder is left in the repository or taken from it.
    source = where / "source"
    source.mkdir()
    for folder in ("kvscope", *(link.name for link in (ROOT / "kvscope").iterdir() if link.is_symlink())):
        shutil.copytree(ROOT / folder, source / folder, symlinks=True)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = (sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", where, source, cwd=where)
    return next(where.glob("*.whl"))


def test_the_wheel_holds_exactly_the_folders(wheel: Path) -> None:
    names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    expected = set()
    for package in folders_with_code():
        folder = ROOT.joinpath(*package.split("."))
        files = [path for path in folder.iterdir() if path.suffix in (".py", ".tcss", ".css", ".json")]
        expected |= {f"{package.replace('.', '/')}/{path.name}" for path in files}
    expected |= {f"kvscope/sql/{path.name}" for path in (ROOT / "kvscope" / "sql").glob("*.sql")}
    for folder, pattern in (("grafana", "*.json"), ("prometheus", "*.yaml")):
        found = (ROOT / "dashboards" / folder).glob(pattern)
        expected |= {f"kvscope/dashboards/{folder}/{path.name}" for path in found}
    assert names == expected | {"kvscope/py.typed"}
    assert f"kvscope-{__version__}-py3-none-any.whl" == wheel.name


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of an environment with msgspec and the wheel, as a vLLM image would add it."""
    where = tmp_path_factory.mktemp("bare")
    run(sys.executable, "-m", "venv", "--without-pip", where / "venv", cwd=where)
    python = where / "venv" / "bin" / "python"
    target = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=where).strip()
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps")
    run(*pip, f"msgspec=={version('msgspec')}", wheel, cwd=where)
    assert Path(target, "kvscope").is_dir()
    return python.parent


def test_the_wheel_beside_msgspec_alone_has_connectors(bare: Path) -> None:
    code = "import kvscope.connectors.plugin as p, kvscope.ring; print(p.__file__)"
    assert "site-packages" in run(bare / "python", "-c", code, cwd=bare)


def test_the_wheel_beside_msgspec_alone_explains_its_command(bare: Path) -> None:
    assert "usage: kvscope" in run(bare / "kvscope", "--help", cwd=bare)
    assert __version__ in run(bare / "kvscope", "--version", cwd=bare)


def test_the_wheel_registers_the_vllm_plugin(bare: Path) -> None:
    code = (
        "from importlib.metadata import entry_points\n"
        "print([e.load().__module__ for e in entry_points(group='vllm.general_plugins', name='kvscope')])"
    )
    assert run(bare / "python", "-c", code, cwd=bare) == "['kvscope.connectors.plugin']\n"


# --- dependencies ----------------------------------------------------------------------------------


def test_the_base_install_is_msgspec() -> None:
    assert [re.split(r"[<>=!~ ]", line)[0] for line in PROJECT["project"]["dependencies"]] == ["msgspec"]


def test_the_lock_pins_every_declared_dependency_within_its_range() -> None:
    from packaging.requirements import Requirement

    locked = dict(line.lower().replace("_", "-").split("==") for line in LOCK.splitlines() if "==" in line)
    for line in requires("kvscope") or []:
        requirement = Requirement(line)
        extra = {"extra": next(iter(re.findall(r"extra == ['\"](\w+)", line)), "")}
        if requirement.name == "kvscope" or (requirement.marker and not requirement.marker.evaluate(extra)):
            continue
        pinned = locked.get(requirement.name.lower().replace("_", "-"))
        assert pinned is not None, f"{requirement.name} is not in requirements.lock: make lock"
        assert requirement.specifier.contains(pinned), f"{requirement} is locked as {pinned}: make lock"


def test_the_lock_names_versions_and_no_places() -> None:
    lines = [line for line in LOCK.splitlines() if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!_-]+", line)] == []
