"""The conda packages of a plan on this host: their files, the paths in an environment, and paths that several have.

The choice of the package that keeps a shared path is rattler's: the last package in dependency order. When a path is a
file in one package and a folder in another, the last package also decides, for the whole subtree. rattler itself
computes the order.

Sources: conda's "Package specification" (noarch Python packages); the entry point scripts of conda and rattler.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from envbuild.atomic import write_atomically
from envbuild.environment import Environment
from envbuild.errors import BuildError
from envbuild.layers.compose import WheelFile, key_of
from envbuild.layers.conda_package import Info, read_info
from envbuild.layers.wheel import Scheme, wheel_paths
from envbuild.lock.conda import CondaPackage
from envbuild.plan.plan import Plan
from envbuild.store.store import Store

_ACTIVATION = re.compile(r"etc/conda/activate\.d/.*", re.DOTALL)
_LINK_SCRIPT = re.compile(r"bin/\.[^/]+-(?:pre|post)-link\.sh")
# The bytecode of a module, which the compiler of the image provides instead.
BYTECODE = re.compile(r"(?:.*/)?__pycache__/[^/]+\.pyc")
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


@dataclass(frozen=True, slots=True)
class Shared:
    """The result of comparing all paths of an environment.

    `without` maps packages to the paths that another package keeps; `activated` are the packages with scripts that
    conda runs when it activates an environment, `linked` those with scripts that it runs when it links the package.
    """

    without: Mapping[str, tuple[str, ...]]
    activated: tuple[str, ...]
    linked: tuple[str, ...]


def locate_conda(plan: Plan, environment: Environment, *, offline: bool) -> list[tuple[CondaPackage, Path]]:
    """Return the file of each conda package of `plan`, in order. Raises BuildError for packages that no source has."""
    from envbuild.store.fetch import CondaArchive, fetch_archives

    wanted = [CondaArchive(package.url, package.sha256) for package in plan.conda]
    found = fetch_archives(
        wanted, environment.store, environment.pip, environment.site, offline=offline, env=environment.variables
    )
    return [(package, found[archive]) for package, archive in zip(plan.conda, wanted, strict=True)]


def installed_paths(info: Info, scheme: Scheme, where: str) -> list[str]:
    """Return the paths of a package's files and links below the prefix. Raises BuildError for a bad entry point."""
    placed = (place_of(path, info, scheme) for path, row in info.paths.items() if row.kind != "directory")
    scripts = (path for path, _ in entry_points(info, scheme, where))
    return list(dict.fromkeys([*(path for path in placed if not BYTECODE.fullmatch(path)), *scripts]))


def entry_points(info: Info, scheme: Scheme, where: str) -> Iterator[tuple[str, bytes]]:
    """Yield (path relative to the prefix, content) of the scripts that conda creates for a package's entry points."""
    for point in info.entry_points if info.is_python else ():
        match = _POINT.fullmatch(point)
        if not match:
            raise BuildError(f"{where}: info/link.json: entry point {point!r}")
        name, module, function = match.groups()
        script = _SCRIPT.format(
            prefix=scheme.prefix, python=scheme.python, module=module, first=function.partition(".")[0],
            function=function,
        )  # fmt: skip
        yield f"bin/{name}", script.encode()


def place_of(path: str, info: Info, scheme: Scheme) -> str:
    """Return the installed path of a package's path, relative to the prefix."""
    first, _, rest = path.partition("/")
    if info.is_python and rest:
        if first == "site-packages":
            return f"lib/python{scheme.python}/site-packages/{rest}"
        if first == "python-scripts":
            return f"bin/{rest}"
    return path


def shared_paths(files: Sequence[CondaFile], wheels: Sequence[WheelFile], scheme: Scheme, store: Store) -> Shared:
    """Return the paths that the conda packages `files` share.

    The result is stored, because reading all lists takes a second. Raises BuildError for a wheel that would replace a
    file of a conda package, and for damaged packages.
    """
    inputs: list[object] = [scheme.prefix, scheme.python]
    inputs += [[f.name, f.package.sha256, f.package.depends] for f in files]
    inputs += [[wheel.name, wheel.sha256] for wheel in wheels]
    note = store.folder("conda", "shared") / f"{key_of('conda-shared', inputs)}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        data = json.loads(note.read_text(encoding="utf-8"))
        without = {str(name): tuple(paths) for name, paths in data["without"].items()}
        return Shared(without, tuple(data["activated"]), tuple(data["linked"]))
    paths = {file.name: _paths(file, scheme) for file in files}
    lost = losers(paths, dependency_order([file.package for file in files]))
    shared = Shared(lost, _owners(paths, _ACTIVATION), _owners(paths, _LINK_SCRIPT))
    _check_wheels(wheels, paths, scheme)
    text = {"without": shared.without, "activated": shared.activated, "linked": shared.linked}
    try:
        write_atomically(note, json.dumps(text))
    except OSError as error:
        raise store.unwritable(error) from error
    return shared


def losers(paths: Mapping[str, Iterable[str]], order: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the paths that each package loses to others; in `order` a package comes after its dependencies."""
    rank = {name: number for number, name in enumerate(order)}
    owners: dict[str, set[str]] = {}
    for name, own in paths.items():
        for path in own:
            owners.setdefault(path, set()).add(name)
    lost: dict[str, set[str]] = {}

    def lose(path: str, names: Iterable[str]) -> None:
        for name in list(names):
            owners[path].discard(name)
            lost.setdefault(name, set()).add(path)

    folders = {parent for path in owners for parent in _parents(path)}
    for path in sorted(folders & owners.keys()):  # upper paths first: the decision includes the paths below them
        if not owners[path]:
            continue
        below = [other for other in owners if other.startswith(f"{path}/")]
        having = set[str]().union(*(owners[place] for place in (path, *below)))
        keeper = max(having, key=rank.__getitem__)
        for other in below if keeper in owners[path] else (path,):
            lose(other, owners[other])
    for path, names in owners.items():
        if len(names) > 1:
            lose(path, names - {max(names, key=rank.__getitem__)})
    return {name: tuple(sorted(lost[name])) for name in sorted(lost)}


def dependency_order(packages: Sequence[CondaPackage]) -> list[str]:
    """Return the names of `packages`, each after its dependencies."""
    from rattler import PackageRecord
    from rattler.package import BuildString

    records = [
        PackageRecord(
            p.name, p.version, BuildString(p.build), 0, p.subdir,
            noarch="generic" if p.subdir == "noarch" else None, depends=list(p.depends),
        )
        for p in packages
    ]  # fmt: skip
    return [record.name.normalized for record in PackageRecord.sort_topologically(records)]


def _paths(file: CondaFile, scheme: Scheme) -> list[str]:
    info, where = read_info(file.path), file.path.name
    place = info.index.get("python_site_packages_path")
    if file.name == "python" and place not in (None, f"lib/python{scheme.python}/site-packages"):
        raise BuildError(
            f"{where}: a Python whose packages lie in {place}: a free-threaded one, which images cannot hold yet",
            "ask for another build of python in [conda] dependencies",
        )
    return installed_paths(info, scheme, where)


def _owners(paths: Mapping[str, Sequence[str]], wanted: re.Pattern[str]) -> tuple[str, ...]:
    return tuple(sorted(name for name, own in paths.items() if any(map(wanted.fullmatch, own))))


def _check_wheels(wheels: Sequence[WheelFile], paths: Mapping[str, Sequence[str]], scheme: Scheme) -> None:
    owners = {f"{scheme.prefix}/{path}": name for name, own in paths.items() for path in own}
    for wheel in wheels:
        both = min((path for path in wheel_paths(wheel.path, scheme) if path in owners), default=None)
        if both:
            raise BuildError(
                f"{wheel.name} {wheel.version}, which pip adds, has a file of the conda package {owners[both]}: "
                f"/{both}",
                f"leave {wheel.name} out of `requirements` in [conda], or take it from a channel",
            )


def _parents(path: str) -> Iterator[str]:
    at = path.rfind("/")
    while at > 0:
        yield path[:at]
        at = path.rfind("/", 0, at)
