"""Libraries as the dynamic loader uses them: the inventory of a host's, and which of them one process loads.

Sources: ld.so(8); glibc 2.36 to 2.41, elf/dl-load.c (search), dl-deps.c (order), dl-version.c (versions), dl-lookup.c
(symbols). Symbols are bound at once, as by RTLD_NOW, with which NCCL and Python load. Not judged: the space for static
TLS, what constructors do, and libraries that a library loads by itself.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from .elf import Elf, read_elf  # relative: this file is a part of two packages

FORMAT = 1  # of an inventory
FABRIC = "libfabric.so.1"
MPI = re.compile(r"lib(?:mpi|mpich)\.so\.\d+")
# Where the loader searches at last, below /lib and /usr/lib: Debian's folders, then those of other distributions.
_USUAL = ("/lib/{}-linux-gnu", "/usr/lib/{}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


@dataclass(frozen=True)
class Library:
    """A library as the loader uses it, and as an inventory has it: fields of Elf, and symbols by their versions.

    `given` are the defined symbols; `wanted` those that other libraries must define, as (name, version or "").
    """

    machine: int
    runpath: str
    inherited: bool
    needed: Sequence[str]
    soname: str
    needs: Sequence[Sequence[str]]
    defines: Sequence[str]
    given: Mapping[str, Sequence[str]]
    wanted: Sequence[Sequence[str]]


def library_of(elf: Elf) -> Library:
    """Return a dynamic ELF file that was read with its symbols as a library."""
    symbols = elf.symbols
    wanted = [(name.decode(errors="replace"), v) for name, v in symbols.undefined(re.compile(b""))] if symbols else []
    given, versions = symbols.given() if symbols else {}, sorted(elf.defines)
    return Library(
        elf.machine, elf.runpath, elf.inherited, elf.needed, elf.soname, elf.needs, versions, given, sorted(wanted)
    )


def run_path(path: str, library: Elf | Library) -> list[str]:
    """Return the folders of the RUNPATH or RPATH of the library at `path`."""
    folders = [folder.replace("${ORIGIN}", "$ORIGIN") for folder in library.runpath.split(":")]
    here = os.path.dirname(path)  # may be relative
    return [os.path.normpath(f.replace("$ORIGIN", here)) for f in folders if f.startswith(("/", "$ORIGIN"))]


def inventory(places: Iterable[str], *, alone: bool = False) -> dict[str, Any]:
    """Return the libraries of this host in `places`, which are files and folders, as a JSON object.

    Unless `alone`, it also has the libraries that these load from elsewhere, and the folders in which the loader
    searches for them. Unreadable files are left out.
    """
    todo: list[str] = []
    for place in places:
        todo += sorted(glob.glob(f"{glob.escape(place)}/*.so*")) if os.path.isdir(place) else [place]
    system = [] if alone else system_folders()
    searched = [*map(os.path.dirname, todo), *system]
    libraries: dict[str, Library] = {}
    links: dict[str, str] = {}
    for path in todo:  # grows
        real = os.path.realpath(path)
        if real != path:
            links[path] = real
        with suppress(OSError):
            if real not in libraries and (elf := read_elf(Path(real), symbols=True)) and elf.dynamic:
                libraries[real] = library_of(elf)
                for name in () if alone else elf.needed:
                    folders = [*run_path(path, libraries[real]), *searched]
                    todo += [p for p in (f"{folder}/{name}" for folder in folders) if os.path.exists(p)][:1]
    rows = {path: asdict(library) for path, library in sorted(libraries.items())}
    return {"format": FORMAT, "folders": system, "links": links, "libraries": rows}


def system_folders() -> list[str]:
    """Return the folders in which this host's loader searches for libraries."""
    configured = configured_folders(os.listdir, lambda path: Path(path).read_bytes())
    return list(dict.fromkeys([*configured, *usual_folders(os.uname().machine)]))


def usual_folders(machine: str) -> list[str]:
    """Return the folders in which loaders for `machine` (x86_64, aarch64) search without any configuration."""
    return [folder.format(machine) for folder in _USUAL]


def configured_folders(names: Callable[[str], list[str]], read: Callable[[str], bytes]) -> list[str]:
    """Return the folders of /etc/ld.so.conf and of the folder that distributions include there.

    `names` lists a folder and `read` reads a file, of this host or of an image; both may raise OSError.
    """
    conf, lines = "/etc/ld.so.conf", list[str]()
    paths = [conf]
    with suppress(OSError):
        paths += (f"{conf}.d/{name}" for name in sorted(names(f"{conf}.d")) if name.endswith(".conf"))
    for path in paths:
        with suppress(OSError):
            lines += read(path).decode(errors="replace").splitlines()
    return [line.strip() for line in lines if line.strip().startswith("/")]


_OF_PYTHON = re.compile("_?Py[A-Z_]")
# Returns the library at a path, the same object for each name of one file; None for any other file, or none.
Find = Callable[[str], "Library | None"]


@dataclass(frozen=True)
class LoadFault:
    """Why a library cannot be loaded: the one at `path` needs `name`, a library, version or symbol.

    `of` is the path of the library that lacks the version, else "".
    """

    path: str
    kind: Literal["absent", "version", "symbol"]
    name: str
    of: str = ""


@dataclass(eq=False)
class MappedLibrary:
    """A loaded library, and the one that loaded it; `names` are those by which it was asked for."""

    path: str
    library: Library
    by: MappedLibrary | None
    names: set[str]
    needed: list[MappedLibrary] = field(default_factory=list)


class Process:
    """A process that runs the program at `program`, "" for an unknown Python.

    `library_path` is LD_LIBRARY_PATH, `folders` are those in which the loader searches at last.
    """

    def __init__(
        self, find: Find, machine: int, library_path: Sequence[str], folders: Sequence[str], program: str = ""
    ) -> None:
        self.mapped: list[MappedLibrary] = []
        self._find, self._machine = find, machine
        self._library_path, self._folders = library_path, folders
        self._main: MappedLibrary | None = None
        self._global: list[MappedLibrary] = []
        if program and self.assume(program):
            self._main, self._global = self.mapped[0], list(self.mapped)

    def assume(self, path: str) -> bool:
        """Take the library or program at `path` for loaded, whatever it needs; return whether there is one."""
        before = len(self.mapped)
        root = self._map(path, None)
        self._load_needed(before)
        return root is not None

    def load(self, name: str) -> LoadFault | None:
        """Load the library `name`, a path or a name, as dlopen does; return the first fault."""
        before = len(self.mapped)
        root = self._map(name, None)
        if root is None:
            return LoadFault("", "absent", name)
        fault = self._load_needed(before) or self._check_versions(before) or self._bind(root, before)
        if fault:
            del self.mapped[before:]
        return fault

    def loaded(self, name: str) -> str:
        """Return the path of the loaded library called `name`, "" if it is not loaded."""
        return next((m.path for m in self.mapped if name in m.names or m.library.soname == name), "")

    def _load_needed(self, before: int) -> LoadFault | None:
        faults = []
        for at, here in enumerate(self.mapped):  # grows
            for name in here.library.needed if at >= before else ():
                if needed := self._map(name, here):
                    here.needed.append(needed)
                else:
                    faults.append(LoadFault(here.path, "absent", name))
        return faults[0] if faults else None

    def _map(self, name: str, by: MappedLibrary | None) -> MappedLibrary | None:
        for mapped in self.mapped:
            if "/" not in name and (name in mapped.names or mapped.library.soname == name):
                mapped.names.add(name)
                return mapped
        for path in [name] if "/" in name else (f"{folder}/{name}" for folder in self._searched(by)):
            library = self._find(path)
            if library is None or library.machine != self._machine:
                continue
            if known := next((mapped for mapped in self.mapped if mapped.library is library), None):
                known.names.add(name)
                return known
            self.mapped.append(MappedLibrary(path, library, by, {name}))
            return self.mapped[-1]
        return None

    def _searched(self, by: MappedLibrary | None) -> Iterator[str]:
        own = run_path(by.path, by.library) if by else []
        if not own or (by and by.library.inherited):  # RPATHs of all that led here; a RUNPATH switches them off
            above = by
            while above:
                yield from run_path(above.path, above.library) if above.library.inherited else ()
                above = above.by
            if self._main and self._main.library.inherited:
                yield from run_path(self._main.path, self._main.library)
            own = []
        yield from self._library_path
        yield from own
        yield from self._folders

    def _check_versions(self, before: int) -> LoadFault | None:
        for mapped in self.mapped[before:]:
            for name, version in mapped.library.needs:
                of = next((m for m in self.mapped if name in m.names or m.library.soname == name), None)
                # A library without versions is accepted, with a warning.
                if of and of.library.defines and version not in of.library.defines:
                    return LoadFault(mapped.path, "version", version, of.path)
        return None

    def _bind(self, root: MappedLibrary, before: int) -> LoadFault | None:
        scope = [root]
        for mapped in scope:  # grows
            scope += [needed for needed in mapped.needed if needed not in scope]
        tables = [mapped.library.given for mapped in [*self._global, *scope]]
        for mapped in reversed(self.mapped[before:]):
            for name, version in mapped.library.wanted:
                if not (self._main is None and _OF_PYTHON.match(name)) and not any(
                    not version or not own or own == version for table in tables for own in table.get(name, ())
                ):
                    return LoadFault(mapped.path, "symbol", f"{name}@{version}" if version else name)
        return None
