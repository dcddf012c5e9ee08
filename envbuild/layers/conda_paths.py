"""Where the files of a conda package go in an environment.

Sources: conda's "Package specification" (noarch Python packages); the scripts of entry points as conda and rattler
write them.
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
_POINT = re.compile(
    r"\s*([^\s./\\][^/\\\x00-\x1f]*?)\s*=\s*([\w.]+)\s*:\s*([\w.]+)\s*(?:\[.*\]\s*)?"
)
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
    """A located conda package: what the lock says of it, its file, and the file's size in bytes."""

    package: CondaPackage
    path: Path
    size: int

    @property
    def name(self) -> str:
        return self.package.name


def installed_paths(info: Info, scheme: Scheme, where: str) -> list[str]:
    """The paths, relative to the prefix, of a package's files and links in an environment, without its record.

    Raises BuildError, naming `where`, for an entry point that is none.
    """
    listed = (path for path, row in info.paths.items() if row.kind != "directory")
    placed = (place_of(path, info, scheme) for path in listed)
    found = {path: None for path in placed if not is_bytecode(path)}
    return list(found | {path: None for path, _ in entry_points(info, scheme, where)})


def entry_points(info: Info, scheme: Scheme, where: str) -> Iterator[tuple[str, bytes]]:
    """(path relative to the prefix, content) of the scripts that conda makes of a package's entry points."""
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
    """Where a path of a package goes, relative to the prefix."""
    first, _, rest = path.partition("/")
    if info.is_python and rest:
        if first == "site-packages":
            return f"lib/python{scheme.python}/site-packages/{rest}"
        if first == "python-scripts":
            return f"bin/{rest}"
    return path


def is_bytecode(path: str) -> bool:
    """Whether it is a module's bytecode, which images have from their own compiler."""
    return _BYTECODE.fullmatch(path) is not None
