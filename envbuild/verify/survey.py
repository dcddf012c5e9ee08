"""Survey of an environment: distributions, files against their RECORDs, ELF files for their processor and accelerator.

The files are on this host, or in an image that envbuild reads without running it.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from envbuild.base.elf import Elf, machine_name
from envbuild.base.libraries import configured_folders, run_path, usual_folders
from envbuild.contract.conda_meta import is_conda, survey_conda
from envbuild.contract.installed import HOST, Distribution, FileReport, Files, HostFiles, check_files, distributions
from envbuild.contract.layer_lists import check_layers
from envbuild.data import load_table
from envbuild.verify.elf_files import ElfReport, read_text, scan_elf

_MAX_METADATA = 1 << 20

# What torch loads before anything else: its own libraries and those of NVIDIA's wheels.
_PRELOADED = re.compile(r"/site-packages/(?:torch/lib|nvidia/[^/]+/lib)/[^/]+\Z")
_OF_TORCH = ("libtorch", "libc10")
_BASE = re.compile(r"(GLIBC|GLIBCXX|CXXABI)_([0-9]+(?:\.[0-9]+)*)")
_STUB = "libcuda.so"


class SymbolFamily(NamedTuple):
    """Symbols and the libraries that have them: a row of data/linkage.toml."""

    name: str
    symbols: re.Pattern[bytes]
    libraries: re.Pattern[str]
    single: bool


@functools.cache
def symbol_families() -> tuple[SymbolFamily, ...]:
    """Return the rows of data/linkage.toml."""
    return tuple(
        SymbolFamily(row["name"], re.compile(row["symbols"].encode()), re.compile(row["libraries"]), "single" in row)
        for row in load_table("linkage")["families"]
    )


@dataclass
class Linkage:
    """Faults of the libraries as lines of text, and the numbers of read `libraries` and of looked-up `symbols`.

    `base` is the newest version of each of GLIBC, GLIBCXX and CXXABI that they need. `absent` maps each missing library
    to the number of files that need it: optional parts of packages, the driver, or libraries that a program loads by
    itself.
    """

    libraries: int = 0
    symbols: int = 0
    undefined: list[str] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    copies: list[str] = field(default_factory=list)
    stubs: list[str] = field(default_factory=list)
    base: dict[str, str] = field(default_factory=dict)
    absent: dict[str, int] = field(default_factory=dict)

    @property
    def faults(self) -> list[str]:
        return [*self.undefined, *self.versions, *self.copies, *self.stubs]


def link(root: str, libraries: Mapping[str, Elf], machine: int, files: Files) -> Linkage:
    """Link the `libraries` of the environment at `root`, by their paths, for the processor `machine`."""
    loader, linkage = _Loader(root, libraries, machine, files), Linkage(len(libraries))
    _check_symbols(loader, linkage)
    _check_versions(loader, linkage)
    linkage.copies = list(_copies(loader))
    linkage.stubs = list(_stubs(loader))
    return linkage


class _Loader:
    """The dynamic loader's search for libraries, without loading any."""

    def __init__(self, root: str, libraries: Mapping[str, Elf], machine: int, files: Files) -> None:
        self.root, self.libraries, self.files, self.machine = root, libraries, files, machine
        self.elf, self.find = functools.cache(self._elf), functools.cache(self._find)
        self.closure = functools.cache(self._closure)
        self.configured = configured_folders(files.names, files.read)
        own = [f"{root}/lib"] if is_conda(Path(root), files) else []  # python's DT_RPATH, which all libraries inherit
        self.folders = [*files.library_path(), *own, *self.configured, *usual_folders(machine_name(machine))]
        self.preloaded: dict[str, str] = {}
        self.by_name: dict[str, list[str]] = {}
        for path, elf in libraries.items():
            for library in {posixpath.basename(path), elf.soname} - {""}:
                self.by_name.setdefault(library, []).append(path)
                if _PRELOADED.search(path):
                    self.preloaded.setdefault(library, path)

    def _elf(self, path: str) -> Elf | None:
        """Return the library at `path`, None for a file that is no library for this processor."""
        elf = self.libraries.get(path) or self.files.elf(path)
        return elf if elf and elf.machine == self.machine else None

    def run_path(self, path: str) -> list[str]:
        """Return the folders of the RUNPATH or RPATH of a library."""
        elf = self.elf(path)
        return run_path(path, elf) if elf else []

    def _find(self, path: str, name: str) -> str:
        """Return the path at which the loader finds `name` for the library at `path`, "" if it is missing."""
        elf = self.elf(path)
        with_torch = _PRELOADED.search(path) or (elf and any(needed.startswith(_OF_TORCH) for needed in elf.needed))
        for folder in self.run_path(path):
            if self.elf(f"{folder}/{name}"):
                return f"{folder}/{name}"
        # What uses torch is loaded after it, and the loader takes a loaded library with the same name.
        if with_torch and name in self.preloaded:
            return self.preloaded[name]
        for folder in self.folders:
            if self.elf(f"{folder}/{name}"):
                return f"{folder}/{name}"
        return self.preloaded.get(name, "")

    def _closure(self, path: str) -> tuple[list[str], set[str]]:
        """Return the libraries that are loaded with the library at `path`, in the loader's order, and the absent ones.

        A library in no searched folder is replaced by all files of its name in the environment: its package may load
        one of them by path.
        """
        paths, absent, todo = dict[str, None](), set[str](), deque([path])
        while todo:
            here = todo.popleft()
            elf = self.elf(here)
            for name in elf.needed if elf else ():
                library = self.find(here, name)
                more = [library] if library else self.by_name.get(name, [])
                absent |= set() if more else {name}
                todo += [
                    needed_library for needed_library in more if needed_library not in paths and needed_library != path
                ]
                paths |= dict.fromkeys(more)
        return list(paths), absent

    def shown(self, path: str) -> str:
        """Return a path relative to the environment, if it is inside."""
        return posixpath.relpath(path, self.root) if path.startswith(f"{self.root}/") else path


def _check_symbols(loader: _Loader, linkage: Linkage) -> None:
    users = _users(loader)
    for path in loader.libraries:
        for library in loader.closure(path)[1] & set(loader.libraries[path].needed):
            linkage.absent[library] = linkage.absent.get(library, 0) + 1
    linkage.absent = dict(sorted(linkage.absent.items()))
    for path, elf in loader.libraries.items():
        for family in symbol_families() if elf.symbols else ():
            count, missing = _missing(loader, path, family, users)
            linkage.symbols += count
            if not missing:
                continue
            # Where the library is absent, or the process brings it by other ways, the symbols are not judged.
            lacking = {library for user in (path, *users.get(path, ())) for library in loader.closure(user)[1]}
            names = map(posixpath.basename, _scope(loader, path, users))
            if any(map(family.libraries.fullmatch, names)) and not any(map(family.libraries.fullmatch, lacking)):
                inside = [
                    library
                    for library in loader.closure(path)[0]
                    if family.libraries.fullmatch(posixpath.basename(library))
                ]
                named = ", ".join(
                    loader.shown(library) if len(inside) == 1 else posixpath.basename(library) for library in inside
                )
                where = f"not defined in {named}" if inside else "defined in no library that it loads"
                more = f" and {len(missing) - 1} more symbols of {family.name} are" if len(missing) > 1 else " is"
                linkage.undefined.append(f"{loader.shown(path)}: {missing[0]}{more} {where}")


def missing_symbols(
    root: str, libraries: Mapping[str, Elf], machine: int, files: Files, family: SymbolFamily, paths: Iterable[str]
) -> dict[str, tuple[int, list[str]]]:
    """Link `libraries` as `link`; return the number of symbols of `family` that each of `paths` needs, and the missing.

    Symbols of absent libraries are missing too.
    """
    loader = _Loader(root, libraries, machine, files)
    users = _users(loader)
    return {path: _missing(loader, path, family, users) for path in paths}


def _users(loader: _Loader) -> dict[str, list[str]]:
    """Return the libraries that load each library."""
    users: dict[str, list[str]] = {}
    for path in loader.libraries:
        for library in loader.closure(path)[0]:
            users.setdefault(library, []).append(path)
    return users


def _missing(loader: _Loader, path: str, family: SymbolFamily, users: Mapping[str, list[str]]) -> tuple[int, list[str]]:
    """Return the number of undefined symbols of `family` in the library at `path`, and those that no library has."""
    symbols = loader.libraries[path].symbols
    needed = [*symbols.undefined(family.symbols)] if symbols else []
    scope = map(loader.elf, dict.fromkeys(_scope(loader, path, users)) if needed else ())
    tables = [elf.symbols for elf in scope if elf and elf.symbols]
    missing = [
        name.decode(errors="replace") + (f"@{version}" if version else "")
        for name, version in needed
        if not any(table.has(name, version) for table in tables)
    ]
    return len(needed), missing


def _scope(loader: _Loader, path: str, users: Mapping[str, list[str]]) -> Iterator[str]:
    """Yield the libraries in which the loader looks for symbols of the library at `path`; some twice."""
    yield from loader.closure(path)[0]
    yield from loader.preloaded.values()
    for user in users.get(path, ()):
        yield user
        yield from loader.closure(user)[0]


def _check_versions(loader: _Loader, linkage: Linkage) -> None:
    newest: dict[str, tuple[int, ...]] = {}
    for path, elf in loader.libraries.items():
        lacking: dict[str, list[str]] = {}
        for library, version in elf.needs:
            if match := _BASE.fullmatch(version):
                number = tuple(map(int, match[2].split(".")))
                newest[match[1]] = max(newest.get(match[1], ()), number)
            place = loader.find(path, library)
            elf_file = loader.elf(place) if place else None
            # The loader accepts a library without versions, with a warning.
            if elf_file is not None and elf_file.defines and version not in elf_file.defines:
                lacking.setdefault(place, []).append(version)
        for place, versions in lacking.items():
            linkage.versions.append(
                f"{loader.shown(path)}: needs {', '.join(sorted(versions))} of {loader.shown(place)}"
            )
    linkage.base = {name: ".".join(map(str, number)) for name, number in sorted(newest.items())}


def _copies(loader: _Loader) -> Iterator[str]:
    """Yield the families of symbols for which libraries of the environment load different files."""
    for family in (family for family in symbol_families() if family.single):
        users: dict[str, str] = {}
        for path, elf in loader.libraries.items():
            for name in filter(family.libraries.fullmatch, elf.needed):
                users.setdefault(loader.find(path, name), path)
        mains: dict[str, list[str]] = {}  # the parts of cuDNN are files of their own
        for place in sorted(users.keys() - {""}):
            mains.setdefault(posixpath.basename(place).partition(".so")[0], []).append(place)
        for places in mains.values():
            if len(places) > 1 and len(other := {loader.files.digest(place): place for place in places}) > 1:
                named = (f"{loader.shown(library)} (for {loader.shown(users[library])})" for library in other.values())
                yield f"{family.name} is there {len(other)} times: {', '.join(named)}"


def _stubs(loader: _Loader) -> Iterator[str]:
    """Yield the stubs of CUDA's driver library that the loader would take for the driver's."""
    folders = {folder for path in loader.libraries for folder in loader.run_path(path)}
    for folder in dict.fromkeys([*loader.folders, *sorted(folders)]):
        # What this host has outside of an environment is not a part of it.
        if isinstance(loader.files, HostFiles) and not folder.startswith(f"{loader.root}/"):
            continue
        # ldconfig lists a library by its own name, libcuda.so.1; in other folders the loader looks for that file.
        for name in (_STUB, f"{_STUB}.1") if folder in loader.configured else (f"{_STUB}.1",):
            place = f"{folder}/{name}"
            with suppress(OSError):
                if "stubs" in [*folder.split("/"), *loader.files.target(place).split("/")]:
                    yield f"{loader.shown(place)} is a stub of the driver's library where the loader searches"
                    break


@dataclass(frozen=True)
class Survey:
    """The survey of an environment; `distributions` are by normalized name.

    Paths in `elf` are relative to the environment; paths in `files` are relative to site-packages, in a conda
    environment and for source layers to the environment. `layers` maps the name of each source layer to the digest of
    the files in its list. `requires` are the requirements in the metadata of the installed torch.
    """

    distributions: dict[str, Distribution]
    files: FileReport
    elf: ElfReport
    layers: dict[str, str] = field(default_factory=dict)
    linkage: Linkage = field(default_factory=Linkage)
    requires: tuple[str, ...] = ()


def survey(
    root: Path,
    site_packages: Path,
    elf_machine: int,
    known: FileReport | None = None,
    files: Files = HOST,
    *,
    gpu: bool = False,
) -> Survey:
    """Survey the environment at `root`; `elf_machine` is the expected e_machine of its libraries.

    `known` is the report on its files if they were already compared with its manifest. With `gpu`, libraries are read
    for code for GPUs. Raises OSError.
    """
    elf = scan_elf(root, elf_machine, files, gpu=gpu)
    elf.gpu_code = {os.path.relpath(path, root): containers for path, containers in elf.gpu_code.items()}
    linkage = link(os.fspath(root), elf.libraries, elf_machine, files)
    elf.libraries.clear()  # their symbols take much memory
    elf.foreign = [(os.path.relpath(path, root), machine) for path, machine in elf.foreign]
    if is_conda(root, files):
        installed, report = survey_conda(root, site_packages, known, files)
    else:
        installed = distributions(site_packages, files=files)
        report = known or check_files(site_packages, files=files)
    layers = check_layers(root, None if known else report, files)
    return Survey(installed, report, elf, layers, linkage, _requires(site_packages, installed.get("torch"), files))


def _requires(site_packages: Path, torch: Distribution | None, files: Files) -> tuple[str, ...]:
    path = f"{site_packages}/torch-{torch.version}.dist-info/METADATA" if torch else ""
    text = (read_text(path, files, _MAX_METADATA) if path else "") or ""
    head = text.partition("\n\n")[0].splitlines()
    return tuple(line.partition(":")[2].strip() for line in head if line.startswith("Requires-Dist:"))
