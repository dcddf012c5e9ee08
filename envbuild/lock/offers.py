"""Releases that pip's sources offer, with the Pythons and platforms that their wheels support."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from envbuild.environment import Environment
from envbuild.names import normalise
from envbuild.store.sources import Link

if TYPE_CHECKING:
    from packaging.version import Version

_SDISTS = (".tar.gz", ".zip")
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class OfferedFile:
    """A wheel with its tags (PEP 425), or an sdist, which has none; an empty `requires_python` allows every Python."""

    tags: frozenset[Any]
    requires_python: str

    def accepts(self, python: str) -> bool:
        """Return whether the file's `requires_python` allows `python` (3.11)."""
        return _accepts(self.requires_python, python)

    def fits(self, python: str, platform: str) -> bool:
        """Return whether the file is a wheel that installs on `python` and `platform` (x86_64-manylinux_2_28)."""
        return self.accepts(python) and not self.tags.isdisjoint(tag_set(python, platform))


@dataclass(frozen=True, slots=True)
class ProjectRelease:
    """A version of a project: its files without yanked ones, and the time of the first upload if it is known."""

    version: Version
    files: tuple[OfferedFile, ...]
    uploaded: datetime | None = None

    def __str__(self) -> str:
        return f"{self.version} ({self.uploaded:%Y-%m-%d})" if self.uploaded else f"{self.version}"

    def accepts(self, python: str) -> bool:
        """Return whether any file supports `python`."""
        return any(file.accepts(python) for file in self.files)

    def fits(self, python: str, platform: str) -> bool:
        """Return whether any wheel installs on `python` and `platform`."""
        return any(file.fits(python, platform) for file in self.files)


@dataclass
class Offers:
    """Releases of projects in local find-links, find-links pages, pip's indexes and `indexes`.

    Unreadable pages are left out: uv reports them when they affect a resolution.
    """

    environment: Environment
    indexes: Sequence[str]
    offline: bool
    _known: dict[str, list[ProjectRelease]] = field(default_factory=dict)

    def releases(self, names: Iterable[str]) -> dict[str, list[ProjectRelease]]:
        """Return the releases of each of `names` (normalised), oldest version first."""
        missing = [name for name in dict.fromkeys(names) if name not in self._known]
        if missing:
            links = self._links(missing)
            self._known |= {name: releases_of(name, links[name]) for name in missing}
        return self._known

    def _links(self, names: Sequence[str]) -> dict[str, list[Link]]:
        from envbuild.cache.retry import RequestFailed
        from envbuild.store.client import Client
        from envbuild.store.sources import local_files, remote_sources
        from envbuild.workers import each

        environment = self.environment
        local = [
            Link(name, "", None) for _, files in local_files(environment.pip, (".whl", *_SDISTS)) for name in files
        ]
        sources = remote_sources(
            environment.pip, environment.site, self.indexes, self.offline, environment.default_index
        )
        for source in sources:
            source.patient = False
        client = Client(environment.pip, environment.variables)

        def ask(job: tuple[str, int], _: object) -> list[Link]:
            try:
                return sources[job[1]].links(job[0], client)
            except RequestFailed:
                return []

        jobs = [(name, number) for name in names for number in range(len(sources))]
        found: defaultdict[str, list[Link]] = defaultdict(lambda: list(local))
        for (name, _), links in zip(jobs, each(jobs, ask, _AT_ONCE), strict=True):
            found[name] += links
        return found


def releases_of(name: str, links: Iterable[Link]) -> list[ProjectRelease]:
    """Return the releases of the project `name` in `links`, oldest version first; other projects are left out."""
    files: defaultdict[Version, list[OfferedFile]] = defaultdict(list)
    times: dict[Version, datetime] = {}
    for link in links:
        parsed = _parse(link.filename)
        if parsed is None or parsed[0] != name or link.yanked:
            continue
        _, version, tags = parsed
        files[version].append(OfferedFile(tags, link.requires_python))
        if (time := _time(link.uploaded)) is not None:
            times[version] = min(time, times.get(version, time))
    return [ProjectRelease(version, tuple(files[version]), times.get(version)) for version in sorted(files)]


def _parse(filename: str) -> tuple[str, Version, frozenset[Any]] | None:
    """Return (normalised name, version, tags) of a wheel or sdist, None for any other file."""
    from packaging.utils import InvalidSdistFilename, InvalidWheelFilename, parse_sdist_filename, parse_wheel_filename

    try:
        if filename.endswith(".whl"):
            name, version, _, tags = parse_wheel_filename(filename)
            return normalise(name), version, tags
        if filename.endswith(_SDISTS):
            name, version = parse_sdist_filename(filename)
            return normalise(name), version, frozenset()
    except (InvalidWheelFilename, InvalidSdistFilename):
        pass
    return None


def _time(text: str) -> datetime | None:
    from datetime import UTC

    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        return None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


@functools.cache
def _accepts(requires_python: str, python: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    try:
        return SpecifierSet(requires_python).contains(f"{python}.0")
    except InvalidSpecifier:  # as uv and pip: an invalid one allows every Python
        return True


@functools.cache
def tag_set(python: str, platform: str) -> frozenset[Any]:
    """Return the wheel tags that install on CPython `python` and `platform`."""
    return frozenset(compatible_tags(python, platform))


def compatible_tags(python: str, platform: str) -> Iterator[Any]:
    """Return the wheel tags (PEP 425, PEP 600) that install on CPython `python` and `ARCH-manylinux_2_N`."""
    from packaging import tags

    arch, _, minor = platform.partition("-manylinux_2_")
    legacy = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms: list[str] = []
    for glibc in range(int(minor), 4, -1):
        platforms.append(f"manylinux_2_{glibc}_{arch}")
        if glibc in legacy:
            platforms.append(f"{legacy[glibc]}_{arch}")
    platforms.append(f"linux_{arch}")
    version = tuple(int(part) for part in python.split("."))
    yield from tags.cpython_tags(version, platforms=platforms)
    yield from tags.compatible_tags(version, f"cp{version[0]}{version[1]}", platforms)
