"""Package indexes of a resolution: the releases that they offer, and packages that are bound to a single index.

A public index can have a package with the name of a private one and a higher version ("dependency confusion"). A recipe
binds such packages to their index."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envbuild.base.errors import LockError
from envbuild.base.masking import redact
from envbuild.base.text import normalise
from envbuild.base.toml import nearest, toml_pairs
from envbuild.base.workers import each
from envbuild.cache.http import PlainRedirect, RequestFailed
from envbuild.environment import Environment
from envbuild.lock.format import BuiltPackage
from envbuild.recipe.checks import AGE_OFF, applicable, parse_age, requirement_parts
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.store.client import Client
from envbuild.store.sources import Link, PackageSource, local_files, probe_index, remote_sources

if TYPE_CHECKING:
    from packaging.requirements import Requirement
    from packaging.version import Version


_SDISTS = (".tar.gz", ".zip")
_AT_ONCE = 8
_TOO_OLD = timedelta(days=2 * 365)
_ISO = "%Y-%m-%dT%H:%M:%SZ"


@dataclass(frozen=True, slots=True)
class ReleaseAges:
    """`exclude_newer` of a recipe for one target: age or date of each index, "" for all without an entry.

    Ages count back from `as_of` (RFC 3339), so that a resolution can be repeated.
    """

    ages: Mapping[str, str] = field(default_factory=dict)
    as_of: str = ""

    @property
    def kept(self) -> str:
        """The time that a lock keeps: `as_of`, "" if no age counts back from it."""
        relative = any(age != AGE_OFF and isinstance(parse_age(age), timedelta) for age in self.ages.values())
        return self.as_of if relative else ""

    def limit(self, index: str = "") -> datetime | None:
        """Return the time from which files of `index` are left out, None for no limit."""
        age = self.ages.get(index, self.ages.get("", AGE_OFF))
        if age == AGE_OFF:
            return None
        parsed = parse_age(age)
        return datetime.fromisoformat(self.as_of) - parsed if isinstance(parsed, timedelta) else parsed

    def allowed_from(self, uploaded: datetime, index: str = "") -> str:
        """Return when a file that is too new will be allowed, as the end of a sentence."""
        parsed = parse_age(self.ages.get(index, self.ages.get("", "")))
        if isinstance(parsed, timedelta):
            return f"allowed from {uploaded + parsed:%Y-%m-%d %H:%M} UTC on"
        return f"allowed by a date from {uploaded:%Y-%m-%d} on"

    def notes(self) -> list[str]:
        """Return a line for each limit."""
        notes = []
        for index in self.ages:
            limit, source = self.limit(index), f"of {index} " if index else ""
            key = f"[exclude_newer_index] {self.ages[index]}" if index else f"exclude_newer = {self.ages[index]}"
            age_text = f"uploaded from {limit:{_ISO}} on are left out" if limit else "are taken whatever their age"
            notes.append(f"files {source}{age_text} ({key})")
        return notes


def release_ages(recipe: LoadedRecipe, target: Target, as_of: str = "") -> ReleaseAges:
    """Return the release ages of `target`; they count back from `as_of`, by default from now."""
    return ReleaseAges(recipe.exclude_newer(target), as_of or f"{datetime.now(UTC):{_ISO}}")


@dataclass(frozen=True, slots=True)
class OfferedFile:
    """A wheel with its tags (PEP 425), or an sdist, which has none; an empty `requires_python` allows every Python."""

    tags: frozenset[Any]
    requires_python: str


@dataclass(frozen=True, slots=True)
class TooNew:
    """A file that `exclude_newer` leaves out: of which index (a URL), and its upload, None if the index states none."""

    link: Link
    index: str
    uploaded: datetime | None


@dataclass(frozen=True, slots=True)
class ProjectRelease:
    """A version of a project: its files without yanked ones, and the time of the first upload if it is known."""

    version: Version
    files: tuple[OfferedFile, ...]
    uploaded: datetime | None = None

    def __str__(self) -> str:
        return f"{self.version} ({self.uploaded:%Y-%m-%d})" if self.uploaded else f"{self.version}"

    def fits(self, python: str, platform: str) -> bool:
        """Return whether any wheel installs on `python` and `platform` (x86_64-manylinux_2_28)."""
        tags = tag_set(python, platform)
        return any(_accepts(file.requires_python, python) and not file.tags.isdisjoint(tags) for file in self.files)


@dataclass
class Offers:
    """Releases of projects in local find-links, find-links pages, pip's indexes and `indexes`.

    A project in `bound` (normalised name → URL of an index) is looked up in its index alone. Unreadable pages are left
    out: uv reports them when they affect a resolution. Files that are newer than `ages` allows are left out; `limits`
    maps the URLs of indexes to their key in it.
    """

    environment: Environment
    indexes: Sequence[str]
    offline: bool
    bound: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    ages: ReleaseAges = field(default_factory=ReleaseAges, kw_only=True)
    limits: Mapping[str, str] = field(default_factory=dict, kw_only=True)
    _known: dict[str, list[ProjectRelease]] = field(default_factory=dict)
    _redirects: dict[str, str] = field(default_factory=dict)

    def releases(self, names: Iterable[str]) -> dict[str, list[ProjectRelease]]:
        """Return the releases of each of `names` (normalised), oldest version first."""
        missing = [name for name in dict.fromkeys(names) if name not in self._known]
        if missing:
            links = self._links(missing)
            self._known |= {name: releases_of(name, links[name]) for name in missing}
        return self._known

    def ambiguous_names(self, packages: Sequence[LockedPackage | BuiltPackage]) -> list[str]:
        """Return a warning if several indexes have different files under the name of one of `packages`.

        An index that shares a file (by sha256) with an earlier index counts as its copy. Bound names are left out,
        and no page is read if there is only one index.
        """
        if sum(source.is_index for source in self._sources) < 2:
            return []
        by_name: dict[str, list[tuple[str, set[str | None]]]] = {package.name: [] for package in packages}
        for name, source, links in self._pages([name for name in by_name if name not in self.bound]):
            files = {link.sha256 for link in links}
            copied = any(files & other - {None} for _, other in by_name[name])
            if source.is_index and links and not copied:
                by_name[name].append((source.name, files))
        urls = {package: [url for url, _ in by_name[package.name]] for package in packages}
        shared = [f"{p.name} {p.version} ({' and '.join(several)})" for p, several in urls.items() if len(several) > 1]
        if not shared:
            return []
        return [
            "warning: several indexes have different files under one name, and the newest version counts: "
            f"{', '.join(shared)}; bind a package to one index with [indexes] in the recipe"
        ]

    def check_pages(self, recipe: LoadedRecipe, packages: Iterable[LockedPackage | BuiltPackage]) -> None:
        """Raise LockError if the page of a package came over plain HTTP: uv follows redirects from HTTPS to it."""
        if any(source.url.lower().startswith("https:") for source in self._sources):
            self._pages([package.name for package in packages])
        for name, page in self._redirects.items():
            raise LockError(
                f"{recipe.path}: the page of {name} is not trusted: {page}",
                "let the index serve it over HTTPS, or name another index",
            )

    @functools.cached_property
    def _sources(self) -> list[PackageSource]:
        return remote_sources(self.environment, self.indexes, self.offline, patient=False)

    @functools.cached_property
    def _local(self) -> list[Link]:
        folders = local_files(self.environment.pip, (".whl", *_SDISTS))
        return [Link(name, "", None) for _, files in folders for name in files]

    def _links(self, names: Sequence[str]) -> Mapping[str, list[Link]]:
        by_name: dict[str, list[Link]] = {name: [] if name in self.bound else [*self._local] for name in names}
        for name, source, links in self._pages(names):
            by_name[name] += [link for link in links if self._too_new(link, source) is None]
        return by_name

    def _too_new(self, link: Link, source: PackageSource) -> TooNew | None:
        """Return why `exclude_newer` leaves a file out, None for a file that may be taken."""
        limit = self.ages.limit(self.limits.get(source.url, "")) if source.is_index else None
        if limit is None or ((uploaded := link.time) is not None and uploaded < limit):
            return None
        return TooNew(link, source.url, uploaded)

    def too_new(self, names: Iterable[str]) -> dict[str, list[TooNew]]:
        """Return name → files that `exclude_newer` leaves out, for each of `names` that has any."""
        by_project: defaultdict[str, list[TooNew]] = defaultdict(list)
        for name, source, links in self._pages(names) if self.ages.ages else ():
            by_project[name] += filter(None, (self._too_new(link, source) for link in links))
        return {name: files for name, files in by_project.items() if files}

    def age_notes(self, versions: Mapping[str, str]) -> list[str]:
        """Return a note for files in find-links and files without a time of upload, which no release age concerns."""
        if not self.ages.ages:
            return []
        pages = [(name, links) for name, source, links in self._pages(versions) if not source.is_index]
        notes, local = [], []
        for name, version in versions.items():
            links = [*self._local, *(link for own, links in pages if own == name for link in links)]
            local += [name] * any(str(release.version) == version for release in releases_of(name, links))
        if local:
            notes.append(f"note: exclude_newer does not concern files of find-links: {', '.join(local)}")
        unknown: defaultdict[str, list[str]] = defaultdict(list)
        for name, files in self.too_new(versions).items():
            for index in dict.fromkeys(file.index for file in files if file.uploaded is None):
                unknown[index].append(name)
        for index, names in unknown.items():
            notes.append(f"note: {no_time(index)} of {', '.join(names)}; files without one were left out")
        return notes

    def write_settings(self, path: Path) -> None:
        """Write uv's configuration with the indexes and release ages of the resolution to `path`."""
        keys = {"": ""} if "" in self.ages.ages else {}
        keys |= {url: self.limits[url] for url in self.indexes if url in self.limits}
        newest = {url: self._uv_limit(key) for url, key in keys.items()}
        self.environment.write_uv_settings(path, self.indexes, newest)
        packages = {name: self._uv_limit(self.limits[url]) for name, url in self.bound.items() if url in self.limits}
        if packages:
            with path.open("a", encoding="utf-8") as stream:
                stream.write("\n".join(["", "[exclude-newer-package]", *toml_pairs(packages), ""]))

    def _uv_limit(self, key: str) -> str | bool:
        limit = self.ages.limit(key)
        return f"{limit:{_ISO}}" if limit else False

    def _pages(self, names: Iterable[str]) -> list[tuple[str, PackageSource, list[Link]]]:
        """Return (name, source, its links) of each name and each source that may serve it."""
        client = Client(self.environment.pip, self.environment.variables)
        own = {url: PackageSource(url, is_index=True, patient=False) for url in self.bound.values()}

        def ask(job: tuple[str, PackageSource], _: object) -> list[Link]:
            name, source = job
            try:
                return source.links(name, client)
            except RequestFailed as error:
                if isinstance(error, PlainRedirect):
                    self._redirects[name] = f"{source.name}: {error}"
                return []

        of_name = {name: [own[self.bound[name]]] if name in self.bound else self._sources for name in names}
        jobs = [(name, source) for name, sources in of_name.items() for source in sources]
        return [(*job, links) for job, links in zip(jobs, each(jobs, ask, _AT_ONCE), strict=True)]


def releases_of(name: str, links: Iterable[Link]) -> list[ProjectRelease]:
    """Return the releases of the project `name` in `links`, oldest version first; other projects are left out."""
    from packaging.utils import parse_sdist_filename, parse_wheel_filename

    files: defaultdict[Version, list[OfferedFile]] = defaultdict(list)
    times: dict[Version, datetime] = {}
    for link in links:
        tags: frozenset[Any] = frozenset()
        try:
            if link.filename.endswith(".whl"):
                project, version, _, tags = parse_wheel_filename(link.filename)
            else:
                project, version = parse_sdist_filename(link.filename)
        except ValueError:
            continue
        if project != name or link.yanked:
            continue
        files[version].append(OfferedFile(tags, link.requires_python))
        if time := link.time:
            times[version] = min(time, times.get(version, time))
    return [ProjectRelease(version, tuple(files[version]), times.get(version)) for version in sorted(files)]


@functools.cache
def _accepts(requires_python: str, python: str) -> bool:
    from packaging.specifiers import SpecifierSet

    try:
        return SpecifierSet(requires_python).contains(f"{python}.0")
    except ValueError:  # as uv and pip: an invalid one allows every Python
        return True


@functools.cache
def tag_set(python: str, platform: str) -> frozenset[Any]:
    """Return the wheel tags (PEP 425, PEP 600) that install on CPython `python` and `ARCH-manylinux_2_N`."""
    from packaging import tags

    arch, _, minor = platform.partition("-manylinux_2_")
    legacy = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
    platforms: list[str] = [f"linux_{arch}"]
    for glibc in range(5, int(minor) + 1):
        platforms += [f"{name}_{arch}" for name in (f"manylinux_2_{glibc}", legacy.get(glibc)) if name]
    version = tuple(int(part) for part in python.split("."))
    pure = tags.compatible_tags(version, f"cp{version[0]}{version[1]}", platforms)
    return frozenset([*tags.cpython_tags(version, platforms=platforms), *pure])


def skipped_warnings(
    requirements: Iterable[str],
    constraints: Iterable[str],
    locked: Mapping[str, str],
    offers: Offers,
    python: str,
    platform: str,
    without_wheel: Callable[[str], str | None],
    source: str,
) -> tuple[str, ...]:
    """Return a warning for each direct requirement whose newest allowed release is not `locked` for lack of a wheel.

    `locked` maps names to versions. `without_wheel` resolves one requirement alone and returns the requirement
    without a wheel, or None: a release with a wheel may depend on a release without wheels. Raises LockError, which
    names `source`, when a locked release is over two years older than the newest one.
    """
    from packaging.version import Version

    limits, lines_of = applicable(constraints, python, platform), applicable(requirements, python, platform)
    lines_of = {name: [*lines, *limits.get(name, ())] for name, lines in lines_of.items() if name in locked}
    open_ended = {name: lines for name, lines in lines_of.items() if not any(map(_is_pin, lines))}
    releases = offers.releases(open_ended)
    young, old = [], []
    for name, lines in open_ended.items():
        version = Version(locked[name])
        newer = [release for release in allowed_releases(releases[name], lines, python) if release.version > version]
        if not newer:
            continue
        fitting = [release for release in newer if release.fits(python, platform)]
        newest = (fitting or newer)[-1]
        own = f"{name}=={newest.version}"
        extras = f"[{','.join(sorted(lines[0].extras))}]" if lines[0].extras else ""
        cause = without_wheel(f"{name}{extras}=={newest.version}") if fitting else own
        if cause is None:
            continue
        chosen = next(
            (release for release in releases[name] if release.version == version), ProjectRelease(version, ())
        )
        subject = newest.version if cause == own else f"it needs {cause}, which"
        text = (
            f"{name} {chosen} is locked instead of {newest}: {subject} has no wheel for Python {python} on {platform}"
        )
        lacking = requirement_parts(cause)[0]
        hint = (
            f"pin {name} to the version that you want ({name}=={chosen.version} keeps the locked one), or let envbuild "
            f'build {lacking}: `build = ["{lacking}"]` in the recipe'
        )
        if chosen.uploaded and newest.uploaded and newest.uploaded - chosen.uploaded > _TOO_OLD:
            old.append((text, hint))
        else:
            young.append(f"{text}; {hint}")
    if old:
        raise LockError(
            f"{source}: releases without wheels would be replaced by ones over two years older:"
            + "".join(f"\n  {text}" for text, _ in old),
            "; ".join(hint for _, hint in old),
        )
    return tuple(young)


def allowed_releases(
    releases: Iterable[ProjectRelease], lines: Sequence[Requirement], python: str
) -> list[ProjectRelease]:
    """Return the `releases` that all of `lines` allow and that support `python`, with or without a wheel.

    As in uv, pre-releases count only if a line names one or if there is no other release.
    """
    from packaging.specifiers import SpecifierSet

    specifier = functools.reduce(operator.and_, (line.specifier for line in lines), SpecifierSet())
    fitting = [
        release
        for release in releases
        if any(_accepts(file.requires_python, python) for file in release.files)
        and specifier.contains(release.version, prereleases=True)
    ]
    final = [] if specifier.prereleases else [release for release in fitting if not release.version.is_prerelease]
    return final or fitting


def _is_pin(line: Requirement) -> bool:
    """Return whether the requirement `line` allows only one version, so that newer releases do not matter."""
    return any(
        specifier.operator in ("==", "===") and not specifier.version.endswith("*") for specifier in line.specifier
    )


def reachable(indexes: Sequence[str], environment: Environment, offline: bool) -> tuple[list[str], list[str]]:
    """Return the URLs (first mirrors) of the indexes that answer, and a note for each index that does not.

    With `offline`, only local folders are used.
    """
    answering, notes = list[str](), list[str]()
    for index in indexes:
        refusals: list[str] = []
        for candidate in environment.site.mirrored(index):
            if offline and not candidate.startswith("file:"):
                continue
            refusal = probe_index(candidate, environment.pip, environment.variables)
            if refusal is None:
                answering.append(candidate)
                break
            refusals.append(refusal)
        else:
            unasked = f"--offline: index {index} was not asked"
            notes.append(f"index {index} cannot be reached: {'; '.join(refusals)}" if refusals else unasked)
    return answering, notes


def bound_indexes(
    recipe: LoadedRecipe, names: Collection[str], environment: Environment, offline: bool
) -> dict[str, str]:
    """Return name → index URL for the `names` that the recipe binds to an index; {} if pip forbids all indexes.

    Raises LockError for an index that the site does not name or that does not answer.
    """
    bound: dict[str, str] = {}
    for project, index in recipe.recipe.indexes.items():
        if normalise(project) not in names or environment.pip.no_index:
            continue
        known = environment.site.indexes
        if index not in known:
            raise LockError(
                f"{recipe.where('indexes', project)}: this site has no index {index!r}{nearest(index, known)}",
                f'name its URL in site.toml, [indexes] {index} = "https://…"; '
                f"the site names {', '.join(known) or 'none'}",
            )
        urls, reasons = reachable([known[index]], environment, offline)
        if offline and not urls:  # uv says what it lacks
            urls = [known[index]]
        if not urls:
            raise LockError(
                f"{recipe.where('indexes', project)}: {project} may come only from {index!r}: {reasons[0]}",
                "run it where this index is reached, or name a mirror of it in site.toml",
            )
        bound[normalise(project)] = urls[0]
    return bound


def index_limits(ages: ReleaseAges, environment: Environment) -> dict[str, str]:
    """Return the URLs, with those of mirrors, of the indexes that have an entry in `ages` → their key in it."""
    named = {index: environment.site.indexes.get(index, index) for index in ages.ages if index}
    return {url: index for index, address in named.items() for url in environment.site.mirrored(address)}


def no_time(index: str) -> str:
    """Return the beginning of a sentence about files whose age is not known."""
    return f"{redact(index)} states no time of upload for files"


def check_bound(recipe: LoadedRecipe, packages: Iterable[LockedPackage | BuiltPackage], offers: Offers) -> None:
    """Raise LockError for a bound package that only other packages require, because uv then ignores the binding."""
    loose = {p.name for p in packages} & (recipe.bound.keys() - offers.bound.keys())
    for project in recipe.recipe.indexes if not offers.environment.pip.no_index else ():
        if normalise(project) in loose:
            raise LockError(
                f"{recipe.where('indexes', project)}: {project} is not bound to it: only other packages require it",
                f"add {project!r} to `requirements` of the recipe, the target or [conda], wherever it is missing",
            )
