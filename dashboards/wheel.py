"""The running kvscope as a wheel, so that an exported container holds the same version as its dashboards."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import kvscope
from kvscope.errors import KvscopeError

_SUFFIXES = {".py", ".sql", ".tcss", ".json", ".yaml", ".typed"}
_EPOCH = (1980, 1, 1, 0, 0, 0)
"""The same files make the same wheel."""


def own_wheel() -> tuple[str, bytes]:
    """Name and content of a wheel with this kvscope.

    Raises:
        KvscopeError: it was not installed, so that nothing tells what it needs.
    """
    try:
        about = distribution("kvscope")
    except PackageNotFoundError:
        raise KvscopeError("this kvscope is not installed; install it, then export") from None
    name = f"kvscope-{about.version}"
    info = f"{name}.dist-info"
    content = {
        f"kvscope/{path.as_posix()}": (root / path).read_bytes()
        for root in map(Path, kvscope.__path__)
        for path in sorted(_below(root))
    }
    for part in ("METADATA", "entry_points.txt"):
        if text := about.read_text(part):
            content[f"{info}/{part}"] = text.encode()
    content[f"{info}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: kvscope\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    record = "".join(f"{path},sha256={_digest(data)},{len(data)}\n" for path, data in content.items())
    content[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, data in content.items():
            archive.writestr(zipfile.ZipInfo(path, _EPOCH), data, zipfile.ZIP_DEFLATED)
    return f"{name}-py3-none-any.whl", packed.getvalue()


def _below(root: Path, inside: Path = Path()) -> list[Path]:
    """Files of the package, through the links that lead to its outer folders."""
    found: list[Path] = []
    for path in (root / inside).iterdir():
        relative = inside / path.name
        if path.is_dir():
            if path.name != "__pycache__" and not path.name.startswith("."):
                found += _below(root, relative)
        elif path.suffix in _SUFFIXES:
            found.append(relative)
    return found


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
