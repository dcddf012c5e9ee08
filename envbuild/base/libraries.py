"""Libraries as the dynamic loader uses them: the inventory of a host's, and which of them one process loads.

Sources: ld.so(8); glibc 2.36 to 2.41, elf/dl-load.c (search), dl-deps.c (order), dl-version.c (versions), dl-lookup.c
(symbols). Symbols are bound at once, as by RTLD_NOW, with which NCCL and Python load. Not judged: the space for static
TLS, what constructors do, and libraries that a library loads by itself.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

from .elf import Elf, read_elf  # relative: this file is a part of two packages

FORMAT = 1  # of an inventory
FABRIC = "libfabric.so.1"
MPI = re.compile(r"lib(?:mpi|mpich)\.so\.\d+")
# Where the loader searches at last, below /lib and /usr/lib: Debian's folders, then those of other distributions.
_USUAL = ("/lib/{}-linux-gnu", "/usr/lib/{}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")


def run_path(path: str, elf: Elf) -> list[str]:
    """Return the folders of the RUNPATH or RPATH of the library at `path`."""
    folders = [folder.replace("${ORIGIN}", "$ORIGIN") for folder in elf.runpath.split(":")]
    here = os.path.dirname(path)  # may be relative
    return [os.path.normpath(f.replace("$ORIGIN", here)) for f in folders if f.startswith(("/", "$ORIGIN"))]


def inventory(places: Sequence[str], *, alone: bool = False) -> dict[str, Any]:
    """Return the libraries of this host in `places`, which are files and folders, as a JSON object.

    Unless `alone`, it also has the libraries that these load from elsewhere, and the folders in which the loader
    searches for them. Unreadable files are left out.
    """
    todo: list[str] = []
    for place in places:
        todo += sorted(glob.glob(f"{glob.escape(place)}/*.so*")) if os.path.isdir(place) else [place]
    system = [] if alone else system_folders()
    searched = list(dict.fromkeys([*map(os.path.dirname, todo), *system]))
    libraries: dict[str, Elf] = {}
    links = {place: real for place in places if (real := os.path.realpath(place)) != place}
    for path in todo:  # grows
        real = os.path.realpath(path)
        if real != path:
            links[path] = real
        with suppress(OSError):
            if real not in libraries and (elf := read_elf(Path(real), symbols=True)) and elf.dynamic:
                libraries[real] = elf
                for name in () if alone else elf.needed:
                    folders = [*run_path(path, elf), *searched]
                    todo += filter(os.path.exists, (f"{folder}/{name}" for folder in folders))
    rows = {path: asdict(elf) for path, elf in sorted(libraries.items())}
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
# Returns the ELF file at a path, the same object for each name of one file; None for any other file, or none.
Find = Callable[[str], "Elf | None"]


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
    """A loaded library, and the one that loaded it, if any.

    `needed` are the libraries that it needs, by the names by which it does; `absent` are the names of those that the
    loader does not find.
    """

    path: str
    elf: Elf
    by: MappedLibrary | None
    needed: dict[str, MappedLibrary] = field(default_factory=dict)
    absent: list[str] = field(default_factory=list)

    def scope(self) -> list[MappedLibrary]:
        """Return this library and all that are loaded with it, in the order in which symbols are looked up."""
        scope = [self]
        for mapped in scope:  # grows
            scope += [needed for needed in dict.fromkeys(mapped.needed.values()) if needed not in scope]
        return scope


class Process:
    """A process that runs the program at `program`, "" for an unknown Python.

    `library_path` is LD_LIBRARY_PATH, `folders` are those in which the loader searches at last.
    """

    def __init__(
        self, find: Find, machine: int, library_path: Sequence[str], folders: Sequence[str], program: str = ""
    ) -> None:
        self.mapped: list[MappedLibrary] = []
        self._named: dict[str, MappedLibrary] = {}  # loaded libraries by the names for which they are taken again
        self._find, self._machine = find, machine
        self._library_path, self._folders = library_path, folders
        self._main: MappedLibrary | None = None
        self._main = self.open(program) if program else None
        self._global = self._main.scope() if self._main else []

    def fork(self) -> Process:
        """Return another process, with the same libraries loaded."""
        other = copy(self)
        other.mapped, other._named = list(self.mapped), dict(self._named)
        return other

    def open(self, name: str) -> MappedLibrary | None:
        """Load the library or program `name`, a path or a name, and what it needs; None if there is none.

        Whether all that it needs is there and fits is not checked.
        """
        before = len(self.mapped)
        opened = self._map(name, None)
        for mapped in islice(self.mapped, before, None):  # grows
            for needed in mapped.elf.needed:
                if library := self._map(needed, mapped):
                    mapped.needed[needed] = library
                else:
                    mapped.absent.append(needed)
        return opened

    def load(self, name: str) -> LoadFault | None:
        """Load the library `name`, a path or a name, as dlopen does; return the first fault."""
        before = len(self.mapped)
        opened = self.open(name)
        if opened is None:
            return LoadFault("", "absent", name)
        new = self.mapped[before:]
        absent = (LoadFault(mapped.path, "absent", lacked) for mapped in new for lacked in mapped.absent)
        versions = (fault for mapped in new for fault in self.absent_versions(mapped))
        return next(chain(absent, versions, self._unbound(opened, new)), None)

    def absent_versions(self, mapped: MappedLibrary) -> Iterator[LoadFault]:
        """Yield the symbol versions that a loaded library needs of others and that these lack."""
        for name, version in mapped.elf.needs:
            of = self._named.get(name)
            # A library without versions is accepted, with a warning.
            if of and of.elf.defines and version not in of.elf.defines:
                yield LoadFault(mapped.path, "version", version, of.path)

    def loaded(self, name: str) -> str:
        """Return the path of the loaded library called `name`, "" if it is not loaded."""
        return self._named[name].path if name in self._named else ""

    def _map(self, name: str, by: MappedLibrary | None) -> MappedLibrary | None:
        if name in self._named:
            return self._named[name]
        for path in [name] if "/" in name else (f"{folder}/{name}" for folder in self._searched(by)):
            elf = self._find(path)
            if elf is None or elf.machine != self._machine:
                continue
            mapped = next((known for known in self.mapped if known.elf is elf), None)
            if mapped is None:
                mapped = MappedLibrary(path, elf, by)
                self.mapped.append(mapped)
            for known in (name, elf.soname):
                self._named.setdefault(known, mapped)
            return mapped
        return None

    def _searched(self, by: MappedLibrary | None) -> Iterator[str]:
        own = run_path(by.path, by.elf) if by else []
        if not own or (by and by.elf.inherited):  # RPATHs of all that led here; a RUNPATH switches them off
            above = by
            while above:
                yield from run_path(above.path, above.elf) if above.elf.inherited else ()
                above = above.by
            if self._main and self._main.elf.inherited:
                yield from run_path(self._main.path, self._main.elf)
            own = []
        yield from self._library_path
        yield from own
        yield from self._folders

    def _unbound(self, opened: MappedLibrary, new: list[MappedLibrary]) -> Iterator[LoadFault]:
        scope = [mapped.elf for mapped in [*self._global, *opened.scope()]]
        for mapped in reversed(new):
            for name, version in mapped.elf.wanted:
                of_python = self._main is None and _OF_PYTHON.match(name)
                if not of_python and not any(elf.has(name, version) for elf in scope):
                    yield LoadFault(mapped.path, "symbol", f"{name}@{version}" if version else name)
