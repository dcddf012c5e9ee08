"""Libraries as the dynamic loader uses them: the inventory of a host's, and which of them one process loads.

Sources: ld.so(8); glibc 2.36 to 2.41, elf/dl-load.c (search), dl-deps.c (order), dl-version.c (versions), dl-lookup.c
(symbols), dl-hwcaps.c (folders for processors). Symbols are bound at once, as by RTLD_NOW, with which NCCL and Python
load. Not judged: the space for static TLS, what constructors do, and libraries that a library loads by itself.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict, dataclass, field
from itertools import chain, islice, product
from pathlib import Path
from typing import Any, Literal

# Relative, because this file is a part of two packages.
from .elf import Elf, file_head, machine_name, newest_glibc, read_elf, refused_file

FORMAT = 1  # of an inventory
FABRIC = "libfabric.so.1"
MPI = re.compile(r"lib(?:mpi|mpich)\.so\.\d+")
# Where the loader searches at last, below /lib and /usr/lib: Debian's folders, then those of other distributions.
_USUAL = ("/lib/{}-linux-gnu", "/usr/lib/{}-linux-gnu", "/lib64", "/usr/lib64", "/lib", "/usr/lib")
# Flags in /proc/cpuinfo of the levels of x86-64, each with those of the lower ones; and what else glibc names.
_LEVELS = {
    "x86-64-v2": "cx16 lahf_lm popcnt sse4_1 sse4_2 ssse3",
    "x86-64-v3": "avx avx2 bmi1 bmi2 f16c fma abm movbe xsave",
    "x86-64-v4": "avx512f avx512bw avx512cd avx512dq avx512vl",
}
_HASWELL, _AVX512 = "avx2 fma bmi1 bmi2 abm movbe popcnt", "avx512cd avx512bw avx512dq avx512vl"
_TOKEN = re.compile(r"\$(?:(ORIGIN|LIB|PLATFORM)\b|\{(ORIGIN|LIB|PLATFORM)\})")


@dataclass(frozen=True)
class Processor:
    """A node's processor as glibc names it: the `levels` of x86-64 that it has, best first, and $PLATFORM.

    `features` are the names of folders for it in which glibc searched before 2.37.
    """

    levels: Sequence[str] = ()
    platform: str = ""
    features: Sequence[str] = ()

    def subfolders(self, glibc: tuple[int, int]) -> list[str]:
        """Return the subfolders in which the loader of `glibc` searches before each folder, with it as the last."""
        found = [f"glibc-hwcaps/{level}/" for level in self.levels if glibc >= (2, 33)]
        names = ["tls", self.platform, *self.features] if self.features and glibc < (2, 37) else []
        return found + ["".join(f"{part}/" for part in parts if part) for parts in product(*((n, "") for n in names))]


def processor() -> Processor:
    """Return this host's processor."""
    machine, text = os.uname().machine, ""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    rows = dict(re.findall(r"(?m)^(\w+)\s*: (.*)$", text))
    flags, levels = {*rows.get("flags", "").split()}, list[str]()
    if machine != "x86_64":
        return Processor(platform=machine)
    for level, needed in _LEVELS.items():
        if not flags.issuperset(needed.split()):
            break
        levels.insert(0, level)
    intel = rows.get("vendor_id") == "GenuineIntel"
    features = ["avx512_1"] if intel and flags.issuperset(_AVX512.split()) else []
    platform = "haswell" if intel and flags.issuperset(_HASWELL.split()) else machine
    return Processor(levels, platform, [*features, machine])


def run_path(path: str, elf: Elf, lib: str = "", platform: str = "") -> list[str]:
    """Return the folders of the RUNPATH or RPATH of the library at `path`; `lib` is $LIB, `platform` is $PLATFORM."""
    values = {"ORIGIN": os.path.dirname(path), "LIB": lib, "PLATFORM": platform}  # ORIGIN may be relative
    named = (folder for folder in elf.runpath.split(":") if folder.startswith(("/", "$ORIGIN", "${ORIGIN}")))
    return [os.path.normpath(_TOKEN.sub(lambda match: values[match[1] or match[2]], folder)) for folder in named]


def inventory(places: Sequence[str], *, alone: bool = False) -> dict[str, Any]:
    """Return the libraries of this host in `places`, which are files and folders, as a JSON object.

    Unless `alone`, it also has the libraries that these load from elsewhere, and the folders in which the loader
    searches for them. Files that not all users can read are left out.
    """
    todo: list[str] = []
    node, libs = processor(), _libs(os.uname().machine)
    subfolders = [*dict.fromkeys(chain(node.subfolders((2, 36)), node.subfolders((2, 37)), ("",)))]
    for place in places:
        found = (glob.glob(f"{glob.escape(place)}/{folder}*.so*") for folder in subfolders)
        todo += sorted(chain(*found)) if os.path.isdir(place) else [place]
    system = [] if alone else system_folders()
    searched = list(dict.fromkeys([*map(os.path.dirname, todo), *system]))
    libraries: dict[str, Elf] = {}
    links = {place: real for place in places if (real := os.path.realpath(place)) != place}
    for path in todo:  # grows
        real = os.path.realpath(path)
        if real != path:
            links[path] = real
        with suppress(OSError):
            if real in libraries or not os.stat(real).st_mode & stat.S_IROTH:
                continue
            elf = read_elf(Path(real), symbols=True) or refused_file(file_head(real))
            if elf and (elf.dynamic or elf.fault):
                libraries[real] = elf
                own = chain(*(run_path(path, elf, lib, node.platform) for lib in libs))
                folders = [*dict.fromkeys(own), *searched]
                for name in () if alone else elf.needed:
                    paths = (f"{folder}/{sub}{name}" for folder in folders for sub in subfolders)
                    todo += filter(os.path.exists, paths)
    rows = {path: asdict(elf) for path, elf in sorted(libraries.items())}
    return {"format": FORMAT, "folders": system, "links": links, "libraries": rows, "processor": asdict(node)}


def system_folders() -> list[str]:
    """Return the folders in which this host's loader searches for libraries."""
    configured = configured_folders(os.listdir, lambda path: Path(path).read_bytes())
    return list(dict.fromkeys([*configured, *usual_folders(os.uname().machine)]))


def usual_folders(machine: str) -> list[str]:
    """Return the folders in which loaders for `machine` (x86_64, aarch64) search without any configuration."""
    return [folder.format(machine) for folder in _USUAL]


def _libs(machine: str) -> list[str]:
    """Return the values of $LIB by distributions."""
    return [*dict.fromkeys(folder.removeprefix("/usr")[1:] for folder in usual_folders(machine))]


def configured_folders(names: Callable[[str], list[str]], read: Callable[[str], bytes]) -> list[str]:
    """Return the folders of /etc/ld.so.conf and of the files that it includes.

    `names` lists a folder and `read` reads a file, of this host or of an image; both may raise OSError.
    """
    folders, seen = list[str](), set[str]()

    def add(path: str) -> None:
        with suppress(OSError):
            lines = () if path in seen else read(path).decode(errors="replace").splitlines()
            seen.add(path)
            for words in (line.partition("#")[0].split() for line in lines):
                for pattern in words[1:] if words[:1] == ["include"] else ():
                    folder, name = os.path.split(os.path.join(os.path.dirname(path), pattern))
                    with suppress(OSError):
                        for file in sorted(fnmatch.filter(names(folder), name)):
                            add(f"{folder}/{file}")
                folders.extend(word for word in words[:1] if word.startswith("/"))

    add("/etc/ld.so.conf")
    return folders


_OF_PYTHON = re.compile("_?Py[A-Z_]")
# Returns the ELF file at a path, the same object for each name of one file; None for any other file, or none.
Find = Callable[[str], "Elf | None"]


@dataclass(frozen=True)
class LoadFault:
    """Why a library cannot be loaded: the one at `path` needs `name`, a library, version or symbol.

    `of` is the path of the library that lacks the version, else "". If the loader refuses the file at `path`, `name` is
    its reason.
    """

    path: str
    kind: Literal["absent", "refused", "version", "symbol"]
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
    """A process that runs the program at `program`, "" for an unknown Python, on a node with `processor`.

    `library_path` is LD_LIBRARY_PATH, `folders` are those in which the loader searches at last.
    """

    def __init__(
        self,
        find: Find,
        machine: int,
        library_path: Sequence[str],
        folders: Sequence[str],
        program: str = "",
        processor: Processor = Processor(),
    ) -> None:
        self.mapped: list[MappedLibrary] = []
        self._named: dict[str, MappedLibrary] = {}  # loaded libraries by the names for which they are taken again
        self._find, self._machine = find, machine
        self._library_path, self._folders = library_path, folders
        # The loader is of one build with the system's libc, and $LIB is the folder of both.
        libcs = ((folder, find(f"{folder}/libc.so.6")) for folder in folders)
        folder, libc = next(((folder, elf) for folder, elf in libcs if elf and elf.machine == machine), ("", None))
        self._glibc = newest_glibc(libc.defines if libc else ())
        self._values = folder.removeprefix("/usr")[1:], processor.platform or machine_name(machine)
        self._subfolders = processor.subfolders(self._glibc) if libc else [""]
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
        refused = (LoadFault(mapped.path, "refused", why) for mapped in new if (why := self._refusal(mapped.elf)))
        absent = (LoadFault(mapped.path, "absent", lacked) for mapped in new for lacked in mapped.absent)
        versions = (fault for mapped in new for fault in self.absent_versions(mapped))
        return next(chain(refused, absent, versions, self._unbound(opened, new)), None)

    def _refusal(self, elf: Elf) -> str:
        """Return why dlopen refuses a file, "" if it does not."""
        stack = elf.exec_stack and self._glibc >= (2, 41) and not any(mapped.elf.exec_stack for mapped in self._global)
        return elf.fault or elf.dlopen_fault or ("it asks for an executable stack, which glibc 2.41 refuses" * stack)

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
        searched = (f"{folder}/{sub}{name}" for folder in self._searched(by) for sub in self._subfolders)
        for path in [name] if "/" in name else searched:
            elf = self._find(path)
            if elf is None or (elf.machine != self._machine and not elf.fault):
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
        own = run_path(by.path, by.elf, *self._values) if by else []
        if not own or (by and by.elf.inherited):  # RPATHs of all that led here; a RUNPATH switches them off
            above = by
            while above:
                yield from run_path(above.path, above.elf, *self._values) if above.elf.inherited else ()
                above = above.by
            if self._main and self._main.elf.inherited:
                yield from run_path(self._main.path, self._main.elf, *self._values)
            own = []
        yield from self._library_path
        yield from own
        yield from self._folders

    def _unbound(self, opened: MappedLibrary, new: list[MappedLibrary]) -> Iterator[LoadFault]:
        scope = [*self._global, *opened.scope()]
        for mapped in reversed(new):
            for name, version in mapped.elf.wanted:
                of = next((other for other in scope if other.elf.has(name, version)), None)
                if of is None and not (self._main is None and _OF_PYTHON.match(name)):
                    yield LoadFault(mapped.path, "symbol", f"{name}@{version}" if version else name)
                # A library without versions is accepted; without a table of versions, it ends the loader (dl-lookup.c).
                elif of and version and not of.elf.versioned:
                    libraries = (library for library, needed in mapped.elf.needs if needed == version)
                    if any(self._named.get(library) is of for library in libraries):
                        yield LoadFault(mapped.path, "version", version, of.path)
