"""Survey of an environment: distributions, files against their RECORDs, ELF files for their processor and accelerator.

The files are on this host, or in an image that envbuild reads without running it.
"""

from __future__ import annotations

import functools
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from envbuild.base.elf import Elf, elf_machine, machine_name, refused_file
from envbuild.base.libraries import (
    Find,
    LoadFault,
    MappedLibrary,
    Process,
    configured_folders,
    run_path,
    usual_folders,
)
from envbuild.contract.conda_meta import is_conda, survey_conda
from envbuild.contract.installed import HOST, Distribution, FileReport, Files, HostFiles, check_files, distributions
from envbuild.contract.layer_lists import check_layers
from envbuild.data import load_table
from envbuild.verify.elf_files import ElfReport, read_text, scan_elf

_MAX_METADATA = 1 << 20

# What torch loads before anything else, in this order: its own libraries and those of NVIDIA's wheels.
_PRELOADED = [re.compile(rf"/site-packages/{folder}/[^/]+\Z") for folder in ("torch/lib", "nvidia/[^/]+/lib")]
_BASE = re.compile(r"(GLIBC|GLIBCXX|CXXABI)_([0-9]+(?:\.[0-9]+)*)")
_STUB = "libcuda.so"


class SymbolFamily(NamedTuple):
    """Symbols and the libraries that have them: a row of data/linkage.toml."""

    name: str
    symbols: re.Pattern[str]
    libraries: re.Pattern[str]
    single: bool


@functools.cache
def symbol_families() -> tuple[SymbolFamily, ...]:
    """Return the rows of data/linkage.toml."""
    return tuple(
        SymbolFamily(row["name"], re.compile(row["symbols"]), re.compile(row["libraries"]), "single" in row)
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
    loads, linkage = _Loads(root, libraries, machine, files), Linkage(len(libraries))
    _check_symbols(loads, linkage)
    _check_versions(loads, linkage)
    linkage.copies = list(_copies(loads))
    linkage.stubs = list(_stubs(loads))
    return linkage


def library_finder(files: Files, known: Mapping[str, Elf]) -> Find:
    """Return the function that finds the libraries among `files` for the loader; `known` were read before."""
    elfs: dict[str, Elf | None] = {files.real(path): elf for path, elf in known.items()}

    @functools.cache
    def find(path: str) -> Elf | None:
        real = files.real(path)
        if real not in elfs:
            elf, head = files.elf(real), files.head(real)
            # The tables of an image's large file may not have been kept: that does not make it a damaged one.
            elfs[real] = refused_file(head) if elf is None and elf_machine(head) is None else elf
        return elfs[real]

    return find


@dataclass
class _Loaded:
    """A library, and the `scope` of all that is loaded with it, itself first, without the `absent` ones."""

    library: MappedLibrary
    scope: list[MappedLibrary]
    absent: set[str] = field(default_factory=set)
    versions: list[LoadFault] = field(default_factory=list)


class _Loads:
    """The libraries of an environment, each loaded in a process of its own."""

    def __init__(self, root: str, libraries: Mapping[str, Elf], machine: int, files: Files) -> None:
        self.root, self.libraries, self.files = root, libraries, files
        self.configured = configured_folders(files.names, files.read)
        own = [f"{root}/lib"] if is_conda(Path(root), files) else []  # python's DT_RPATH, which all libraries inherit
        before, after = files.library_path(), [*own, *self.configured, *usual_folders(machine_name(machine))]
        self.folders = [*before, *after]
        self._bare = Process(library_finder(files, libraries), machine, before, after)
        self._torch = self._bare.fork()
        preloaded = [[path for path in libraries if pattern.search(path)] for pattern in _PRELOADED]
        self.torch = [*filter(None, map(self._torch.open, chain(*preloaded)))]
        self._by_name: dict[str, list[str]] = {}
        for path, elf in libraries.items():
            for name in {posixpath.basename(path), elf.soname} - {""}:
                self._by_name.setdefault(name, []).append(path)
        self._of_torch = {mapped.elf for mapped in self.torch}
        self.loaded = {path: loaded for path in libraries if (loaded := self._load(path))}
        self._users: dict[Elf, list[_Loaded]] = {}
        for loaded in self.loaded.values():
            for mapped in loaded.scope[1:]:
                self._users.setdefault(mapped.elf, []).append(loaded)

    def _load(self, path: str) -> _Loaded | None:
        process = self._bare.fork()
        library = process.open(path)
        if library and any(map(self._needs_torch, library.scope())):
            process = self._torch.fork()  # it is loaded after torch, and gets the libraries that torch loaded
            library = process.open(path)
        if library is None:
            return None
        loaded = _Loaded(library, library.scope(), versions=[*process.absent_versions(library)])
        for mapped in loaded.scope:  # grows
            for name in mapped.absent:
                # In place of a library in no searched folder, all files of its name in the environment are loaded: its
                # package may load one of them by path.
                others = [*filter(None, map(process.open, self._by_name.get(name, ())))]
                loaded.absent |= set() if others else {name}
                for other in others:
                    loaded.scope += [needed for needed in other.scope() if needed not in loaded.scope]
        return loaded

    def _needs_torch(self, mapped: MappedLibrary) -> bool:
        return mapped.elf in self._of_torch or any(map(self._torch.loaded, mapped.absent))

    def users(self, loaded: _Loaded) -> list[_Loaded]:
        """Return the libraries that are loaded with one."""
        return self._users.get(loaded.library.elf, [])

    def symbols(self, loaded: _Loaded) -> dict[Elf, str]:
        """Return the libraries, and their paths, in which the loader looks for symbols of one."""
        of_users = (user.scope for user in self.users(loaded))
        return {mapped.elf: mapped.path for mapped in chain(loaded.scope[1:], self.torch, *of_users)}

    def shown(self, path: str) -> str:
        """Return a path relative to the environment, if it is inside."""
        return posixpath.relpath(path, self.root) if path.startswith(f"{self.root}/") else path


def _check_symbols(loads: _Loads, linkage: Linkage) -> None:
    for loaded in loads.loaded.values():
        for library in loaded.absent & {*loaded.library.absent}:
            linkage.absent[library] = linkage.absent.get(library, 0) + 1
    linkage.absent = dict(sorted(linkage.absent.items()))
    for path, loaded in loads.loaded.items():
        for family in symbol_families():
            count, missing = _missing(loads, loaded, family)
            linkage.symbols += count
            if not missing:
                continue
            # Where the library is absent, or the process brings it by other ways, the symbols are not judged.
            lacking = loaded.absent.union(*(user.absent for user in loads.users(loaded)))
            names = map(posixpath.basename, loads.symbols(loaded).values())
            if any(map(family.libraries.fullmatch, names)) and not any(map(family.libraries.fullmatch, lacking)):
                inside = [
                    mapped.path
                    for mapped in loaded.scope[1:]
                    if family.libraries.fullmatch(posixpath.basename(mapped.path))
                ]
                named = ", ".join(
                    loads.shown(library) if len(inside) == 1 else posixpath.basename(library) for library in inside
                )
                where = f"not defined in {named}" if inside else "defined in no library that it loads"
                more = f" and {len(missing) - 1} more symbols of {family.name} are" if len(missing) > 1 else " is"
                linkage.undefined.append(f"{loads.shown(path)}: {missing[0]}{more} {where}")


def missing_symbols(
    root: str, libraries: Mapping[str, Elf], machine: int, files: Files, family: SymbolFamily, paths: Iterable[str]
) -> dict[str, tuple[int, list[str]]]:
    """Link `libraries` as `link`; return the number of symbols of `family` that each of `paths` needs, and the missing.

    Symbols of absent libraries are missing too.
    """
    loads = _Loads(root, libraries, machine, files)
    return {path: _missing(loads, loads.loaded[path], family) for path in paths}


def _missing(loads: _Loads, loaded: _Loaded, family: SymbolFamily) -> tuple[int, list[str]]:
    """Return the number of undefined symbols of `family` in a library, and those that no library has."""
    needed = [symbol for symbol in loaded.library.elf.wanted if family.symbols.match(symbol[0])]
    elfs = loads.symbols(loaded) if needed else ()
    missing = [
        f"{name}@{version}" if version else name
        for name, version in needed
        if not any(elf.has(name, version) for elf in elfs)
    ]
    return len(needed), missing


def _check_versions(loads: _Loads, linkage: Linkage) -> None:
    newest: dict[str, tuple[int, ...]] = {}
    for path, loaded in loads.loaded.items():
        for _, version in loaded.library.elf.needs:
            if match := _BASE.fullmatch(version):
                number = tuple(map(int, match[2].split(".")))
                newest[match[1]] = max(newest.get(match[1], ()), number)
        lacking: dict[str, list[str]] = {}
        for fault in loaded.versions:
            lacking.setdefault(fault.of, []).append(fault.name)
        for place, versions in lacking.items():
            linkage.versions.append(f"{loads.shown(path)}: needs {', '.join(sorted(versions))} of {loads.shown(place)}")
    linkage.base = {name: ".".join(map(str, number)) for name, number in sorted(newest.items())}


def _copies(loads: _Loads) -> Iterator[str]:
    """Yield the families of symbols for which libraries of the environment load different files."""
    for family in (family for family in symbol_families() if family.single):
        users: dict[str, str] = {}
        for path, loaded in loads.loaded.items():
            for name, mapped in loaded.library.needed.items():
                if family.libraries.fullmatch(name):
                    users.setdefault(mapped.path, path)
        mains: dict[str, list[str]] = {}  # the parts of cuDNN are files of their own
        for place in sorted(users):
            mains.setdefault(posixpath.basename(place).partition(".so")[0], []).append(place)
        for places in mains.values():
            if len(places) > 1 and len(other := {loads.files.digest(place): place for place in places}) > 1:
                named = (f"{loads.shown(library)} (for {loads.shown(users[library])})" for library in other.values())
                yield f"{family.name} is there {len(other)} times: {', '.join(named)}"


def _stubs(loads: _Loads) -> Iterator[str]:
    """Yield the stubs of CUDA's driver library that the loader would take for the driver's."""
    folders = {folder for path, elf in loads.libraries.items() for folder in run_path(path, elf)}
    for folder in dict.fromkeys([*loads.folders, *sorted(folders)]):
        # What this host has outside of an environment is not a part of it.
        if isinstance(loads.files, HostFiles) and not folder.startswith(f"{loads.root}/"):
            continue
        # ldconfig lists a library by its own name, libcuda.so.1; in other folders the loader looks for that file.
        for name in (_STUB, f"{_STUB}.1") if folder in loads.configured else (f"{_STUB}.1",):
            place = f"{folder}/{name}"
            with suppress(OSError):
                if "stubs" in [*folder.split("/"), *loads.files.target(place).split("/")]:
                    yield f"{loads.shown(place)} is a stub of the driver's library where the loader searches"
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
