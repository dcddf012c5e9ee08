"""Compiled extensions of a lock against its torch, read from the wheels without installing them.

An extension is built against one torch. With another one, the loader may find no definition for a C++ symbol, or no
library of the CUDA that it was linked with, and the import fails. Both are in the symbol tables of the wheels' ELF
files, which are read by HTTP ranges and kept in the store by the wheels' sha256.

Symbols are linked as `envbuild verify` links those of an environment (verify/survey.py). A file is judged if it needs a
library of torch or calls torch's C++ namespaces; the driver, Python's own symbols and libraries of the system are not.
"""

from __future__ import annotations

import datetime
import email
import functools
import json
import math
import os
import posixpath
import re
import shutil
import tomllib
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from urllib.parse import quote

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import parse_wheel_filename

from envbuild.base import process
from envbuild.base.elf import HEAD, MACHINES, Elf, ElfParts, elf_machine, parse_elf
from envbuild.base.errors import EnvbuildError
from envbuild.base.libraries import Process
from envbuild.base.progress import step
from envbuild.base.text import human_size
from envbuild.base.workers import each
from envbuild.cache.hashed import read_note, write_note
from envbuild.cache.http import RequestFailed
from envbuild.compat.rows import CompatFinding, Status, load_rows, older
from envbuild.compat.rows import matches as allows
from envbuild.contract.installed import HostFiles
from envbuild.data import load_table
from envbuild.environment import Environment
from envbuild.interpreter import minor_of
from envbuild.lock.format import Lock
from envbuild.lock.offers import releases_of, tag_set
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.store.client import Client
from envbuild.store.fetch import WantedWheel, WheelSources, local_wheel
from envbuild.store.sources import Link, local_files, matches
from envbuild.store.store import Store
from envbuild.verify.survey import SymbolFamily, missing_symbols, symbol_families

# The symbols of a lock's wheels are linked as those of an environment at this path.
_ROOT = "/dev/null"  # where no host has files
_SITE = f"{_ROOT}/site-packages"
_NOTE = "wheel.json"
_LIBRARY = re.compile(r"(?:[^/]+\.data/(?:pure|plat)lib/)?(.+\.so(?:\.[0-9.]+)?)")
_OTHER_PYTHON = re.compile(r"\.(?:cpython-|pypy)(\d{1,6})[^/]{0,100}\.so")
# A file that its package loads with this torch alone: libtorch_c_dlpack_addon_torch28-cpu.so.
_FOR_TORCH = re.compile(r"torch[._-]?(\d)[._]?(\d{1,2})(?![\d.]*\d)")
# Libraries of torch that most extensions need; the others are read if a symbol is in none of these.
_LIGHT = re.compile(r"torch/lib/lib(?:c10\w*|torch|torch_cpu|torch_python|shm)\.so")
_OF_TORCH = re.compile(r"lib(?:torch|c10)\w*\.so")
_BASE = re.compile(r"(GLIBCXX|CXXABI)_([0-9]+(?:\.[0-9]+)*)")
# Releases that `suggest` reads at most, and wheels that are read at the same time.
_RELEASES, _AT_ONCE = 12, 8
# The most bytes that `lock` reads from servers for the extensions of one lock.
LOCK_BYTES = 256 << 20
# Older files in archives have the time of a reproducible build.
_FIRST_DATE = "2021"
# Extensions are built with release candidates, so many days before the release.
_CANDIDATE = datetime.timedelta(days=14)
_UNREADABLE = (RequestFailed, OSError, EnvbuildError, zipfile.BadZipFile, zlib.error, NotImplementedError, EOFError)


class _TooMuch(Exception):
    """The limit of bytes to read is exceeded."""


@dataclass
class _Budget:
    """Bytes that may still be read from servers."""

    left: float

    def spend(self, size: int) -> None:
        if size > self.left:
            raise _TooMuch(f"{human_size(size)} more would be read; `envbuild check` reads them")
        self.left -= size


class _NoFiles(HostFiles):
    """No files outside of the wheels: the libraries of this host are not those of the nodes."""

    def names(self, folder: str) -> list[str]:
        return []

    def read(self, path: str) -> bytes:
        raise FileNotFoundError(path)

    def elf(self, path: str) -> Elf | None:
        return None


@dataclass
class WheelTables:
    """The symbol tables of a wheel, read by `client` from the `url` and kept in `store`.

    `libraries` maps the ELF files, as they are installed, to their names in the wheel and their compressed sizes.
    `torch` are the specifiers of the metadata's requirements of torch.
    """

    name: str
    version: str
    filename: str
    sha256: str
    url: Callable[[], str]
    client: Client
    store: Store
    budget: _Budget

    def __str__(self) -> str:
        return f"{self.name} {self.version}"

    @functools.cached_property
    def _note(self) -> dict[str, Any]:
        place = self.store.root / "symbols" / self.sha256 / _NOTE
        with suppress(OSError, ValueError):
            return read_note(place)
        with self.client.open(self.url()) as stream, zipfile.ZipFile(stream) as wheel:
            libraries = [(match[1], info) for info in wheel.infolist() if (match := _LIBRARY.fullmatch(info.filename))]
            metadata = next((name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")), None)
            head = wheel.read(metadata).decode(errors="replace").partition("\n\n")[0] if metadata else ""
        fields = {
            "filename": self.filename,
            "libraries": {path: [info.filename, info.compress_size] for path, info in libraries},
            "torch": list(_requirements_of_torch(head)),
            "date": max(("{:04}-{:02}-{:02}".format(*info.date_time) for _, info in libraries), default=""),
        }
        with suppress(EnvbuildError, OSError):  # a read-only store only costs time
            self.store.folder("symbols", self.sha256)
            write_note(place, fields)
        return fields

    @property
    def libraries(self) -> dict[str, tuple[str, int]]:
        return {path: (name, size) for path, (name, size) in self._note["libraries"].items()}

    @property
    def torch(self) -> list[str]:
        return [str(text) for text in self._note["torch"]]

    @property
    def date(self) -> str:
        """Day (ISO 8601) of the newest library by the archive, "" if the build set another time."""
        date = str(self._note["date"])
        return date if date >= _FIRST_DATE else ""

    def elf(self, path: str) -> Elf | None:
        """Return the ELF file that is installed at `path`, None for any other file. Raises any of _UNREADABLE.

        Raises OSError for a damaged one, whose symbols are not known.
        """
        name, size = self.libraries[path]
        place = self.store.root / "symbols" / self.sha256 / quote(path, safe="")
        with suppress(OSError, zlib.error, ValueError, TypeError):
            row = json.loads(zlib.decompress(place.read_bytes()))
            return Elf(**row) if row else None
        if not (url := self.url()).startswith("file:"):
            self.budget.spend(size)
        with self.client.open(url) as stream, zipfile.ZipFile(stream) as wheel, wheel.open(name) as file:
            parts = ElfParts(wheel.getinfo(name).file_size)
            while piece := file.read(1 << 20):
                parts.add(piece)
        elf, head = parse_elf(parts.read, symbols=True), b""
        with suppress(EOFError):
            head = parts.read(0, HEAD)
        if elf is None and elf_machine(head) in MACHINES.values():
            raise OSError(f"the symbols of {path} cannot be read")
        data = json.dumps(elf and asdict(elf)).encode()
        with suppress(EnvbuildError):
            self.store.put("symbols", self.sha256, place.name, lambda: zlib.compress(data, 1))
        return elf


def _requirements_of_torch(head: str) -> Iterator[str]:
    """Yield the version specifiers of the metadata's requirements of torch, without those of extras."""
    for line in email.message_from_string(head).get_all("Requires-Dist", []):
        with suppress(InvalidRequirement):
            requirement = Requirement(line)
            marker = requirement.marker
            if requirement.name.lower() == "torch" and (marker is None or marker.evaluate({"extra": ""})):
                yield str(requirement.specifier)


def _matches(row: str, name: str) -> bool:
    """Return whether `name` is one that the `row` of [extensions] in data/linkage.toml names."""
    return re.fullmatch(load_table("linkage")["extensions"][row], name) is not None


@dataclass
class Extensions:
    """The extensions in the `lock` of a target, and their torch.

    At most `most` bytes are read from servers, with `offline` none. `pylock` is the lock's resolution (PEP 751), if it
    was just made: then every compiled wheel that requires torch counts, else only the packages that data/linkage.toml
    names and wheels that were read before.
    """

    loaded: LoadedRecipe
    target: Target
    lock: Lock
    environment: Environment
    offline: bool
    most: float = math.inf
    pylock: str = ""
    _known: dict[str, WheelTables] = field(default_factory=dict)
    _torch_full: bool = False

    def __post_init__(self) -> None:
        at, indexes = self.environment, self.loaded.recipe.targets[self.target.name].indexes
        self._budget = _Budget(self.most)
        self._client = Client(at.pip, at.variables)
        self._sources = WheelSources(at, indexes, self.loaded.bound, self.offline, patient=False)
        self._folders = local_files(at.pip)
        self._urls = dict(_wheel_urls(self.pylock))
        self._packages = {package.name: package for package in self.lock.packages}

    def findings(self, *, suggest: bool = False) -> list[CompatFinding]:
        """Judge each extension; with `suggest`, name the newest release that fits in place of one that does not."""
        findings = []
        for package in self._extensions() if "torch" in self._packages else ():
            judged = None
            with step(f"reading the symbols of {package.name} {package.version}", printed=True):
                try:
                    judged = self._judge(self._wheel(package), self._wheel(self._packages["torch"]))
                    if judged and judged.status == "bad" and suggest:
                        judged = replace(judged, fix=self._newest_fitting(package.name))
                except _TooMuch as error:
                    # Without libtorch_cuda, all is well with an extension whose metadata name this torch.
                    if not (self._torch_full and _is_pinned(self._wheel(package), self._packages["torch"].version)):
                        judged = self._unknown(package, error)
                except _UNREADABLE as error:
                    judged = judged or self._unknown(package, error)
            findings += [judged] if judged else []
        return findings

    def _unknown(self, package: LockedPackage, error: Exception) -> CompatFinding:
        torch = self._packages["torch"].version
        reason = getattr(error, "message", None) or str(error) or type(error).__name__
        text = f"whether {package.name} {package.version} loads with torch {torch} is not known: {reason}"
        return CompatFinding("unknown", "extension", text)

    def _extensions(self) -> list[LockedPackage]:
        """Return the locked packages that may be extensions of torch."""
        listed, others = list[LockedPackage](), list[LockedPackage]()
        for package in self.lock.packages:
            if _matches("names", package.name):
                listed.append(package)
            elif package.name != "torch" and not package.name.startswith("nvidia-"):
                urls = [self._urls[sha256][0] for sha256 in package.hashes if sha256 in self._urls]
                compiled = any(not name.endswith("-any.whl") for name in urls)
                if (compiled and not self.offline) or self._noted(package):
                    others.append(package)

        def requires_torch(package: LockedPackage, _: object) -> bool:
            with suppress(*_UNREADABLE):
                wheel = self._wheel(package)
                return bool(wheel.torch) and bool(wheel.libraries)
            return False

        needs = each(others, requires_torch, _AT_ONCE, self._client.stop)
        chosen = {package.name for package, needed in zip(others, needs, strict=True) if needed}
        return [package for package in self.lock.packages if package in listed or package.name in chosen]

    def _noted(self, package: LockedPackage) -> tuple[str, str] | None:
        """Return sha256 and file name of a wheel of `package` whose tables are in the store."""
        for sha256 in package.hashes:
            with suppress(OSError, ValueError, KeyError):
                place = self.environment.store.root / "symbols" / sha256
                wheel = sha256, str(read_note(place / _NOTE)["filename"])
                self.environment.store.note_use(place, place)
                return wheel
        return None

    def _wheel(self, package: LockedPackage) -> WheelTables:
        """Return the locked wheel of `package`. Raises RequestFailed."""
        if package.name not in self._known:
            sha256, filename = self._noted(package) or self._located(package)[:2]
            self._known[package.name] = self._tables(
                package.name, package.version, filename, sha256, lambda: self._located(package)[2]
            )
        return self._known[package.name]

    def _tables(self, name: str, version: str, filename: str, sha256: str, url: Callable[[], str]) -> WheelTables:
        return WheelTables(name, version, filename, sha256, url, self._client, self.environment.store, self._budget)

    def _located(self, package: LockedPackage) -> tuple[str, str, str]:
        """Return sha256, file name and URL of the locked wheel. Raises RequestFailed."""
        wheel = WantedWheel(package.name, package.version, frozenset(package.hashes))
        if path := local_wheel(wheel, self._folders, self.environment.store, []):
            return self.environment.store.digests.of(path), path.name, path.absolute().as_uri()
        for sha256 in package.hashes:
            if sha256 in self._urls and not self.offline:
                return sha256, *self._urls[sha256]
        reasons = list[str]()
        for link in self._links(package.name, reasons):
            if link.sha256 in package.hashes and matches(link.filename, package.name, package.version):
                return str(link.sha256), link.filename, link.url
        unread = "--offline, and its wheel is not in the store" if self.offline else "no index has the locked wheel"
        raise RequestFailed("; ".join(reasons) or unread)

    def _links(self, project: str, reasons: list[str]) -> Iterator[Link]:
        try:
            sources = self._sources(project)
        except KeyError as error:
            reasons.append(f"the site names no index {error.args[0]!r}")
            return
        for source in sources:
            try:
                yield from source.links(project, self._client)
            except RequestFailed as error:
                reasons.append(f"{source.name} cannot be used: {error}")

    def _torch_libraries(self, torch: WheelTables, *, every: bool) -> dict[str, Elf]:
        """Return torch's libraries; without `every`, those for accelerators have no symbols unless they were read."""
        self._torch_full |= every
        libraries = {}
        for path in torch.libraries:
            if path.startswith("torch/lib/"):
                whole = _LIGHT.fullmatch(path) or (self._torch_full and _is_heavy(path))
                elf = self._torch_library(path) if whole else None
                libraries[f"{_SITE}/{path}"] = elf or Elf(
                    MACHINES[self.target.arch], dynamic=True, soname=posixpath.basename(path)
                )
        return libraries

    @functools.cached_property
    def _torch_library(self) -> Callable[[str], Elf | None]:
        return functools.cache(self._wheel(self._packages["torch"]).elf)

    @functools.cached_property
    def _provided(self) -> dict[str, str]:
        """File names in NVIDIA's wheels, with the package."""
        nvidia = [package for package in self.lock.packages if package.name.startswith("nvidia-")]
        wheels = each(nvidia, lambda package, _: self._wheel(package).libraries, _AT_ONCE, self._client.stop)
        return {
            posixpath.basename(path): f"{package.name} {package.version}"
            for package, libraries in zip(nvidia, wheels, strict=True)
            for path in libraries
        }

    def _judge(self, wheel: WheelTables, torch: WheelTables) -> CompatFinding | None:
        """Judge one extension; None if no file of it needs torch. Raises any of _UNREADABLE, and _TooMuch."""
        libraries = {}
        for path in _loadable(wheel.libraries, self.lock.python, torch.version):
            if (elf := wheel.elf(path)) and elf.dynamic and elf.machine == MACHINES[self.target.arch]:
                libraries[f"{_SITE}/{path}"] = elf
        judged = {
            path: elf
            for path, elf in libraries.items()
            if any(map(_OF_TORCH.match, elf.needed)) or any(_torch_symbols(elf))
        }
        if not judged:
            return None
        bad, unknown = list[str](), list[str]()
        loader = Process(libraries.get, MACHINES[self.target.arch], (), sorted({*map(posixpath.dirname, libraries)}))
        for path in judged:
            loader.open(path)
        for path, elf in {**judged, **{mapped.path: mapped.elf for mapped in loader.mapped}}.items():
            newer, uncertain = self._newer_base(path, elf)
            bad += [*self._absent(path, elf, libraries, torch), *newer]
            unknown += uncertain
        try:
            symbols = self._missing(judged, libraries, torch)
        except _TooMuch:
            if not bad:
                raise
            symbols = {}
        for path, (_, missing) in symbols.items():
            if missing:
                more = f" and {len(missing) - 1} more symbols" if len(missing) > 1 else ""
                bad.append(f"{_shown(path)} needs {_demangled(missing[0])}{more}, which torch {torch.version} lacks")
        if any(name.startswith("_Z") for elf in judged.values() for name in _torch_symbols(elf)):
            others, uncertain = _other_builds(wheel, torch, self.target.arch)
            bad += others
            unknown += uncertain
        status: Status = "bad" if bad else "unknown" if unknown else "good"
        files = f"{len(judged)} file{'' if len(judged) == 1 else 's'}"
        needs = f"{sum(number for number, _ in symbols.values())} symbols that {files} of it need"
        bad[2:] = [f"and {len(bad) - 2} more"] if len(bad) > 2 else []
        texts = {
            "good": f"{wheel} loads with torch {torch.version}, which has the {needs}",
            "bad": f"{wheel} does not load with torch {torch.version}: {'; '.join(bad)}",
            "unknown": f"{wheel} finds its symbols in torch {torch.version}, but {'; '.join(unknown[:2])}",
        }
        fix = f"take another {wheel.name}; `envbuild check --suggest` looks for the newest that fits" if bad else ""
        source, today = f"{wheel.filename}, {torch.filename}", datetime.datetime.now(datetime.UTC).date().isoformat()
        return CompatFinding(status, "extension", texts[status], fix, source, today)

    def _missing(
        self, judged: Iterable[str], libraries: Mapping[str, Elf], torch: WheelTables
    ) -> dict[str, tuple[int, list[str]]]:
        """Return the number of torch's symbols that each of `judged` needs, and those that torch lacks."""
        for every in (False, True) if any(map(_is_heavy, torch.libraries)) else (True,):
            linked = {**self._torch_libraries(torch, every=every), **libraries}
            symbols = missing_symbols(_ROOT, linked, MACHINES[self.target.arch], _NoFiles(), _family(), judged)
            if not any(missing for _, missing in symbols.values()):
                break
        return symbols

    def _absent(self, path: str, elf: Elf, own: Mapping[str, Elf], torch: WheelTables) -> Iterator[str]:
        """Yield the libraries of torch and of CUDA that a file needs and no locked wheel has."""
        have = {posixpath.basename(file) for file in own} | {library.soname for library in own.values()}
        have |= {posixpath.basename(file) for file in torch.libraries}
        for name in elf.needed:
            if name in have:
                continue
            if _OF_TORCH.match(name):
                yield f"{_shown(path)} needs {name}, which torch {torch.version} lacks"
            elif _matches("cuda", name) and name not in self._provided:
                stem = name.partition(".so")[0]
                near = [f"{file} ({of})" for file, of in self._provided.items() if file.partition(".so")[0] == stem]
                yield f"{_shown(path)} needs {name}; the lock has {near[0] if near else 'none'}"

    def _newer_base(self, path: str, elf: Elf) -> tuple[list[str], list[str]]:
        """Return the needs of a newer glibc than the target's, and those of a newer libstdc++ than is usual with it."""
        glibc = self.loaded.recipe.targets[self.target.name].glibc
        bad, unknown, (major, minor) = [], [], elf.glibc
        if older(glibc, f"{major}.{minor}"):
            bad.append(f"{_shown(path)} needs glibc {major}.{minor}, the target allows {glibc}")
        rows = reversed(load_table("linkage")["extensions"]["base"])
        usual: dict[str, str] = next((row for row in rows if older(glibc, row["glibc"]) is False), {})
        needs = [_BASE.fullmatch(version) for library, version in elf.needs if library == "libstdc++.so.6"]
        newer = sorted(match[0] for match in needs if match and older(usual.get(match[1], match[2]), match[2]))
        if newer:
            has = f"systems with glibc {glibc} have GLIBCXX_{usual['GLIBCXX']}"
            unknown.append(f"{_shown(path)} needs {newer[-1]} of libstdc++; {has}")
        return bad, unknown

    def _newest_fitting(self, name: str) -> str:
        """Return advice: the newest release of `name` that fits the locked torch, by its files and its metadata."""
        reasons, torch = list[str](), self._packages["torch"]
        links = list(self._links(name, reasons))
        tags, read = tag_set(self.lock.python, self.lock.platform), 0
        for release in reversed(releases_of(name, links)):
            version = str(release.version)
            if release.version.is_prerelease or not release.fits(self.lock.python, self.lock.platform):
                continue
            if read == _RELEASES:
                break
            read += 1
            link = next(candidate for candidate in links if _installs(candidate, name, version, tags))
            wheel = self._tables(name, version, link.filename, link.sha256 or "", functools.partial(str, link.url))
            try:
                if not all(allows(torch.version, specifier) is not False for specifier in wheel.torch if specifier):
                    continue
                judged = self._judge(wheel, self._wheel(torch))
            except _UNREADABLE as error:
                reasons.append(f"{version}: {error}")
                continue
            if judged is None or judged.status == "good":
                return f"take {name} {version}, the newest release that fits torch {torch.version}"
        if not read:
            return f"no release of {name} could be read: {'; '.join(reasons) or 'the index has none'}"
        return f"none of the {read} newest releases of {name} fits; take another torch" + "".join(
            f" ({reason})" for reason in reasons[:1]
        )


def _installs(link: Link, name: str, version: str, tags: frozenset[Any]) -> bool:
    """Return whether `link` is the wheel of a release that installs by one of `tags`; its digest must be known."""
    if not link.sha256 or link.yanked or not matches(link.filename, name, version):
        return False
    return not parse_wheel_filename(link.filename)[3].isdisjoint(tags)


def _wheel_urls(pylock: str) -> Iterator[tuple[str, tuple[str, str]]]:
    """Yield sha256, file name and URL of each wheel in a resolution (PEP 751)."""
    for package in tomllib.loads(pylock).get("packages", []):
        for wheel in package.get("wheels", []):
            sha256, url = wheel.get("hashes", {}).get("sha256"), wheel.get("url")
            if sha256 and url:
                yield sha256, (wheel.get("name") or posixpath.basename(url), url)


def _is_pinned(wheel: WheelTables, torch: str) -> bool:
    """Return whether the metadata of an extension require a release of the minor series of this torch."""
    return any(text.startswith("==") and minor_of(text[2:].strip()) == minor_of(torch) for text in wheel.torch)


def _other_builds(wheel: WheelTables, torch: WheelTables, arch: str) -> tuple[list[str], list[str]]:
    """Return why an extension that calls C++ is built for another torch, and why it may be.

    Classes of torch change between minor releases without any change of symbols: torchvision 0.23 for torch 2.8 finds
    all of them in torch 2.9, and crashes when it is loaded.
    """
    if _is_pinned(wheel, torch.version):
        return [], []
    minor = minor_of(torch.version)
    if wrong := next((text for text in wheel.torch if text and allows(torch.version, text) is False), ""):
        return [f"it is built for another torch: its metadata require torch{wrong}"], []
    rows = [row.date for row in load_rows().releases if row.arch == arch and row.version.startswith(f"{minor}.")]
    released = min(filter(None, [*rows, torch.date]), default="")
    if not wheel.date or not released:
        return [], ["nothing says with which torch it was built"]
    if datetime.date.fromisoformat(wheel.date) < datetime.date.fromisoformat(released) - _CANDIDATE:
        return [], [f"it was built on {wheel.date}, before torch {minor}, whose C++ classes may differ"]
    return [], []


def _is_heavy(path: str) -> bool:
    """Return whether this is a library of torch that few extensions need: those for accelerators have up to 1 GB."""
    folder, name = posixpath.split(path)
    return folder == "torch/lib" and not _LIGHT.fullmatch(path) and bool(_OF_TORCH.match(name))


def _loadable(paths: Iterable[str], python: str, torch: str) -> list[str]:
    """Return the libraries of a wheel that may be loaded with this Python and this torch, by their names.

    Libraries for other versions of torch count if there is none for this one.
    """
    others = {path: match[1] for path in paths if (match := _OTHER_PYTHON.search(path))}
    own = [path for path in paths if others.get(path) in (None, python.replace(".", ""))]
    versions = {
        path: f"{match[1]}.{match[2]}" for path in own if (match := _FOR_TORCH.search(posixpath.basename(path)))
    }
    minor = minor_of(torch)
    return [path for path in own if minor not in versions.values() or versions.get(path) in (None, minor)]


def _family() -> SymbolFamily:
    return next(family for family in symbol_families() if family.name == "torch")


def _torch_symbols(elf: Elf) -> Iterator[str]:
    """Yield the symbols of torch that a file needs."""
    return (name for name, _ in elf.wanted if _family().symbols.match(name))


def _shown(path: str) -> str:
    return path.removeprefix(f"{_SITE}/")


def _demangled(symbol: str) -> str:
    """Return a C++ symbol as it is written, with its mangled name, if this host has c++filt."""
    name = symbol.partition("@")[0]
    if not (program := shutil.which("c++filt")):
        return symbol
    done = process.run([program, name], env=os.environ, check=False)
    plain = done.stdout.strip()
    return f"{plain} ({name})" if done.returncode == 0 and plain not in ("", name) else symbol
