"""Paths of a conda package's files in an environment.

Sources: conda's "Package specification" (noarch Python packages); the entry point scripts of conda and rattler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.errors import BuildError
from envbuild.layers.conda_package import Info
from envbuild.layers.wheel import Scheme
from envbuild.lock.conda import CondaPackage

_BYTECODE = re.compile(r"(?:.*/)?__pycache__/[^/]+\.pyc")
_POINT = re.compile(r"\s*([^\s./\\][^/\\\x00-\x1f]*?)\s*=\s*([\w.]+)\s*:\s*([\w.]+)\s*(?:\[.*\]\s*)?")
_SCRIPT = """#!/{prefix}/bin/python{python}
# -*- coding: utf-8 -*-
import re
import sys

from {module} import {first}

if __name__ == '__main__':
\tsys.argv[0] = re.sub(r'(-script\\.pyw?|\\.exe)?$', '', sys.argv[0])
\tsys.exit({function}())
"""


@dataclass(frozen=True, slots=True)
class CondaFile:
    """A located conda package: its entry in the lock, its file, and the file's size in bytes."""

    package: CondaPackage
    path: Path
    size: int

    @property
    def name(self) -> str:
        return self.package.name


def installed_paths(info: Info, scheme: Scheme, where: str) -> list[str]:
    """Return the paths, relative to the prefix, of a package's files and links in an environment, without its record.

    Raises BuildError, naming `where`, for an invalid entry point.
    """
    listed = (path for path, row in info.paths.items() if row.kind != "directory")
    placed = (place_of(path, info, scheme) for path in listed)
    found = {path: None for path in placed if not is_bytecode(path)}
    return list(found | {path: None for path, _ in entry_points(info, scheme, where)})


def entry_points(info: Info, scheme: Scheme, where: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path relative to the prefix, content) of the scripts that conda creates for a package's entry points."""
    for point in info.entry_points if info.is_python else ():
        match = _POINT.fullmatch(point)
        if not match:
            raise BuildError(f"{where}: info/link.json: entry point {point!r}")
        script = _SCRIPT.format(
            prefix=scheme.prefix,
            python=scheme.python,
            module=match[2],
            first=match[3].partition(".")[0],
            function=match[3],
        )
        yield f"bin/{match[1]}", script.encode()


def place_of(path: str, info: Info, scheme: Scheme) -> str:
    """Return the installed path of a package's path, relative to the prefix."""
    first, _, rest = path.partition("/")
    if info.is_python and rest:
        if first == "site-packages":
            return f"lib/python{scheme.python}/site-packages/{rest}"
        if first == "python-scripts":
            return f"bin/{rest}"
    return path


def is_bytecode(path: str) -> bool:
    """Return whether the path is a module's bytecode, which the compiler of the image provides instead."""
    return _BYTECODE.fullmatch(path) is not None
