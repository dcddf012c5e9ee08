"""Tiny real wheels and recipes of them, for tests of everything but training."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path


def make_wheel(
    folder: Path,
    name: str,
    version: str = "1.0",
    *,
    requires: Sequence[str] = (),
    files: Mapping[str, bytes] | None = None,
    tag: str = "py3-none-any",
) -> Path:
    """Write a valid wheel of `name` into `folder` and return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    module = name.replace("-", "_")
    info = f"{module}-{version}.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    metadata += "".join(f"Requires-Dist: {line}\n" for line in requires)
    entries = {
        f"{module}/__init__.py": f"__version__ = {version!r}\n".encode(),
        **(files or {}),
        f"{info}/METADATA": metadata.encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: lab\nRoot-Is-Purelib: true\nTag: {tag}\n".encode(),
    }
    record = "".join(f"{path},{_hash(data)},{len(data)}\n" for path, data in entries.items())
    path = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for entry, data in entries.items():
            archive.writestr(zipfile.ZipInfo(entry, (2020, 1, 1, 0, 0, 0)), data)
        archive.writestr(f"{info}/RECORD", record + f"{info}/RECORD,,\n")
    return path


def make_recipe(folder: Path, name: str, requirements: Sequence[str], *, targets: str = "", extra: str = "") -> Path:
    """Write `folder`/`name`/recipe.toml for this host's CPU and return its folder."""
    place = folder / name
    place.mkdir(parents=True, exist_ok=True)
    lines = ", ".join(f'"{requirement}"' for requirement in requirements)
    targets = targets or "[targets.cpu-x86_64]\n[targets.cpu-aarch64]\n"
    (place / "recipe.toml").write_text(
        f'name = "{name}"\ndescription = "a lab recipe"\npython = "3.11"\nrequirements = [{lines}]\n{extra}\n{targets}'
    )
    return place


def _hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
