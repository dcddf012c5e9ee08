"""Debian base over the network: resolve package names to a lock, and fetch the locked packages.

The resolver is deterministic. It selects the named packages and their dependencies from several suites, each in its
newest version. A selected package that satisfies a relation is preferred; otherwise the first existing alternative is
selected, and of several providers the first by name (Debian Policy 7.1, 7.5, 7.6).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from envbuild.base.errors import BuildError, LockError
from envbuild.base.progress import OnProgress, log, transfer
from envbuild.cache.http import NotFound, RequestFailed
from envbuild.debian.control import Relation, compare_versions, parse_control, parse_relations
from envbuild.debian.lock import DEBIAN_ARCH, DebianLock, LockedDeb, from_table
from envbuild.debian.release import (
    DebianRelease,
    DebianSuite,
    fetch_packages,
    fetch_release,
    load_keys,
    locked_release,
    suites,
)
from envbuild.image.layer import open_layer
from envbuild.store.client import Client, SourceAnswer, fetch_each, fetch_file
from envbuild.store.fetch import Answers, located
from envbuild.store.store import Store

if TYPE_CHECKING:
    from pysequoia import Cert

_CHUNK, _MOST_RELEASE = 1 << 20, 1 << 24
_NAME = re.compile(rb"^Package:[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)
_VERSION = re.compile(rb"^Version:[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)
_PROVIDES = re.compile(rb"^Provides:", re.MULTILINE | re.IGNORECASE)
# Qualifiers that every package satisfies, because there is one architecture only (Policy 7.1).
_ANY = frozenset({"", "any", "native", "all"})
_Group = tuple[Relation, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Package:
    """A package of a suite; its paragraph `raw` is parsed when needed: a suite has 60,000 packages, a base 60."""

    name: str
    version: str
    archive: str
    raw: bytes

    def fields(self) -> dict[str, str]:
        """Return the fields by lower-case name. Raises LockError for a faulty paragraph."""
        return parse_control(self.raw.decode("utf-8", "replace"), f"the entry of {self.name}")

    def relations(self, *names: str) -> tuple[_Group, ...]:
        """Return the groups of the relationship fields `names`, in that order."""
        fields = self.fields()
        return tuple(group for name in names for group in parse_relations(fields.get(name, ""), f"{self.name}: {name}"))

    def provided(self) -> dict[str, list[str | None]]:
        """Return the additional names that it provides, with their versions (None for no version)."""
        given: dict[str, list[str | None]] = {}
        for group in self.relations("provides"):
            for relation in group:
                given.setdefault(relation.name, []).append(relation.version or None)
        return given


@dataclass(slots=True)
class PackageIndex:
    """Newest version of each package in all added suites; of equal versions, the first added."""

    packages: dict[str, Package] = field(default_factory=dict)
    _providing: dict[str, Package] = field(default_factory=dict)

    def add(self, path: Path, archive: str) -> None:
        """Add a Packages file, compressed or not. Raises LockError when it is damaged."""
        try:
            with open_layer(path, "its content") as stream:
                rest = b""
                while chunk := stream.read(_CHUNK):
                    *whole, rest = (rest + chunk).split(b"\n\n")
                    self._add(whole, archive)
                self._add([rest.strip(b"\n")], archive)
        except (BuildError, OSError, ValueError) as error:
            raise LockError(f"{path}: not a list of packages: {error}") from error

    def providers(self, relation: Relation) -> list[Package]:
        """Return the packages that provide the name in `relation`, by name; a bound needs a versioned Provides."""
        needle = relation.name.encode()
        packages = [
            package
            for package in self._providing.values()
            if needle in package.raw and any(map(relation.admits, package.provided().get(relation.name, ())))
        ]
        return sorted(packages, key=lambda package: package.name)

    def _add(self, paragraphs: Iterable[bytes], archive: str) -> None:
        for raw in paragraphs:
            if not raw.strip():
                continue
            name, version = _NAME.search(raw), _VERSION.search(raw)
            if name is None or version is None:
                raise ValueError("an entry without Package or Version")
            package = Package(name[1].decode(), version[1].decode(), archive, raw)
            known = self.packages.get(package.name)
            if known is not None and compare_versions(package.version, known.version) <= 0:
                continue
            self.packages[package.name] = package
            self._providing.pop(package.name, None)
            if _PROVIDES.search(raw):
                self._providing[package.name] = package


@dataclass(slots=True)
class _Selection:
    """Packages selected so far, each with the first package that depends on it."""

    packages: dict[str, Package] = field(default_factory=dict)
    asked_by: dict[str, str] = field(default_factory=dict)
    _virtual: dict[str, list[tuple[Package, str | None]]] = field(default_factory=dict)

    def add(self, package: Package, asked_by: str) -> None:
        self.packages[package.name] = package
        self.asked_by[package.name] = asked_by
        for name, versions in package.provided().items():
            self._virtual.setdefault(name, []).extend((package, v) for v in versions)

    def meeting(self, relation: Relation) -> Iterator[Package]:
        """Yield the selected packages that satisfy `relation` by their own name or as providers."""
        own = self.packages.get(relation.name)
        if own is not None and relation.admits(own.version):
            yield own
        for package, version in self._virtual.get(relation.name, ()):
            if relation.admits(version):
                yield package

    def chain(self, name: str) -> str:
        """Return the chain of dependants from `name` to the requested package, as text."""
        text, asker = name, self.asked_by[name]
        while asker:
            text, asker = f"{text}, needed by {asker}", self.asked_by[asker]
        return text


def resolve(index: PackageIndex, roots: Iterable[str], without: Iterable[str], arch: str) -> list[Package]:
    """Return `roots` and all dependencies, sorted by name. `arch` is Debian's name of the architecture.

    Packages in `without` and their exclusive dependencies are left out even if others depend on them; `roots`
    never are. Raises LockError for an unknown name, an unsatisfiable dependency, and packages that conflict with each
    other.
    """
    names = sorted(set(roots))
    left_out = frozenset(without) - set(names)
    selection = _Selection()
    waiting: deque[Package] = deque()
    for name in names:
        package = index.packages.get(name)
        if package is None:
            raise _unknown(index, name)
        selection.add(package, "")
        waiting.append(package)
    while waiting:
        package = waiting.popleft()
        for group in package.relations("pre-depends", "depends"):
            usable = [r for r in group if r.qualifier in _ANY or r.qualifier == arch]
            if any(True for relation in usable for _ in selection.meeting(relation)):
                continue
            usable_names = _first(index, usable)
            if not usable_names:
                raise _unmet(index, selection, package, group)
            if not usable_names.isdisjoint(left_out):
                continue
            chosen = index.packages[min(usable_names)]
            selection.add(chosen, package.name)
            waiting.append(chosen)
    _check_conflicts(selection)
    return [selection.packages[name] for name in sorted(selection.packages)]


def _first(index: PackageIndex, group: Sequence[Relation]) -> frozenset[str]:
    """Return the packages that satisfy the first satisfiable alternative of `group`."""
    for relation in group:
        own = index.packages.get(relation.name)
        if own is not None and relation.admits(own.version):
            return frozenset([own.name])
        if providers := index.providers(relation):
            return frozenset(package.name for package in providers)
    return frozenset()


def _check_conflicts(selection: _Selection) -> None:
    for name in sorted(selection.packages):
        package = selection.packages[name]
        rows = [
            (kind, relation)
            for kind in ("conflicts", "breaks")
            for group in package.relations(kind)
            for relation in group
        ]
        for kind, relation in rows:
            for other in selection.meeting(relation):
                # A package may exclude a name that it provides itself: it then is the only provider.
                if other.name != name:
                    raise LockError(
                        f"{name} {package.version} {kind} with {other.name} {other.version} (it excludes {relation})\n"
                        f"    {selection.chain(name)}\n    {selection.chain(other.name)}",
                        "leave one of them out of the base's packages",
                    )


def _unmet(index: PackageIndex, selection: _Selection, package: Package, group: _Group) -> LockError:
    needs = " | ".join(map(str, group))
    has = [
        f"{relation.name} is {installed.version}"
        for relation in group
        if (installed := index.packages.get(relation.name))
    ]
    return LockError(
        f"nothing meets {needs}, needed by {selection.chain(package.name)}"
        + (f"; {', '.join(has)}" if has else "; no package has that name or provides it"),
        "the mirror may lack a part of the suite: name another, or lock later",
    )


def _unknown(index: PackageIndex, name: str) -> LockError:
    from difflib import get_close_matches

    if providers := index.providers(Relation(name)):
        hint = f"{', '.join(p.name for p in providers[:5])} provide it: name one of them"
    else:
        near = get_close_matches(name, index.packages, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else "see packages.debian.org for names"
    return LockError(f"this suite has no package {name!r} for this architecture", hint)


def resolve_base(
    suite: str,
    packages: Iterable[str],
    without: Iterable[str],
    arch: str,
    *,
    archives: Sequence[DebianSuite],
    client: Client,
    store: Store,
    keyring: Path | None = None,
    allow_expired: bool = False,
    old: DebianLock | None = None,
) -> DebianLock:
    """Lock `packages` of `suite` and their dependencies, for `arch` (x86_64, aarch64, or Debian's names).

    For the suite, its updates and its security fixes, the first valid one of `archives` is used. An archive with an
    expired Release file is valid only with `allow_expired`; snapshots do not expire. Without a valid one, the lists of
    the lock `old` are used, which are in the store or its vault. Raises LockError when one of the three has none, and
    when the packages cannot be resolved.
    """
    arch = DEBIAN_ARCH.get(arch, arch)
    keys = load_keys(keyring)
    index, releases = PackageIndex(), []
    kept = old.releases if old and old.suite == suite else ()
    for name, sha256 in zip_longest(suites(suite), kept, fillvalue=""):
        candidates = [archive for archive in archives if archive.suite == name]
        releases.append(_add_first(index, candidates, name, arch, client, store, keys, allow_expired, sha256))
    chosen = tuple(_locked(package) for package in resolve(index, packages, without, arch))
    signed = tuple(store.blobs.add(release.signed).partition(":")[2] for release in releases if release.signed)
    date = max(release.date for release in releases)
    lock = DebianLock(suite, date, chosen, signed if len(signed) == len(releases) else ())
    # Parse the result now: a path that the lock format refuses must fail here, not on the next run.
    return from_table(lock.as_toml_table(), f"the packages of {suite}")


def _add_first(
    index: PackageIndex,
    candidates: Sequence[DebianSuite],
    suite: str,
    arch: str,
    client: Client,
    store: Store,
    keys: Sequence[Cert],
    allow_expired: bool,
    kept: str,
) -> DebianRelease:
    """Add the first valid archive of `candidates` to `index`, else that of the InRelease `kept`; return its Release."""
    answers: list[str] = []
    expired = False
    for archive in candidates:
        try:
            release = fetch_release(archive, client, keys)
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            if release.valid_until and release.valid_until < now and "snapshot" not in archive.url:
                message = (
                    f"{archive}: its Release file expired on {release.valid_until}: newer security fixes are missing"
                )
                if not allow_expired:
                    expired = True
                    raise LockError(message)
                log(f"warning: {message}")
            _add(index, release, arch, client, store)
        except NotFound:
            answers.append(f"{archive}: not there")
        except RequestFailed as error:
            answers.append(f"{archive}: {error}")
        except LockError as error:
            answers.append(error.message)
        else:
            for answer in answers:
                log(f"{answer}; using {archive} instead")
            return release
    if kept and (path := _locked_file(kept, [], [], store, client)):
        release = locked_release(path.read_bytes(), DebianSuite("", suite))
        _add(index, release, arch, client, store)
        log(f"warning: no archive serves {suite}; using the lists of {release.date} that the lock names")
        return release
    raise LockError(
        "\n    ".join([f"no archive serves {suite}:", *(answers or ["none is known"])]),
        "name a mirror of Debian's that is renewed in site.toml, or accept this one: envbuild lock --allow-expired"
        if expired
        else "name a mirror of Debian's in site.toml, or check the proxy",
    )


def _add(index: PackageIndex, release: DebianRelease, arch: str, client: Client, store: Store) -> None:
    for component in release.archive.components:
        with transfer(f"package list of {release.archive} {component} for {arch}", None) as on_progress:
            path = fetch_packages(release, component, arch, client, store, on_progress)
        index.add(path, release.archive.kind)


def _locked_file(
    sha256: str, archives: Sequence[DebianSuite], answers: list[SourceAnswer], store: Store, client: Client
) -> Path | None:
    places = [(str(archive), f"{archive.folder}/InRelease") for archive in archives]
    about = (places, answers, store, client, lambda _: None, dict[str, str]())
    return store.find("", sha256) or fetch_file(sha256, "", sha256, *about, _MOST_RELEASE)


def signed_lists(
    lock: DebianLock, arch: str, store: Store, archives: Sequence[DebianSuite], client: Client
) -> list[str]:
    """Return the digests of the InRelease files of `lock` and of the package lists that they name, now in the store.

    `arch` is Debian's. Those that no source has any more are left out, with a warning: builds read none of them.
    """
    found: list[Path] = []
    for suite, sha256 in zip(suites(lock.suite), lock.releases, strict=False):
        answers: list[SourceAnswer] = []
        of_suite = [archive for archive in archives if archive.suite == suite]
        if (signed := _locked_file(sha256, of_suite, answers, store, client)) is None:
            log(f"warning: the signed lists of {suite} are not kept: {'; '.join(map(str, answers)) or 'offline'}")
            continue
        for archive in of_suite or [DebianSuite("", suite)]:
            with suppress(LockError):
                release = locked_release(signed.read_bytes(), archive)
                found += [signed, fetch_packages(release, "main", arch, client, store, lambda _: None)]
                break
    return [f"sha256:{path.name}" for path in found]


def _locked(package: Package) -> LockedDeb:
    fields = package.fields()
    size = fields.get("size", "")
    architecture, path, sha256 = (fields.get(name, "") for name in ("architecture", "filename", "sha256"))
    count = int(size) if size.isdecimal() and len(size) <= 18 else 0
    return LockedDeb(package.name, package.version, architecture, path, sha256.lower(), count, package.archive)


def fetch_debs(lock: DebianLock, store: Store, archives: Sequence[DebianSuite], client: Client) -> list[Path]:
    """Return the files of the packages of `lock`, in its order; blobs of `store` are not downloaded again.

    The store's vault and `archives` are tried in order; an empty list means offline. Raises BuildError
    with every unavailable package and the answer of each archive; completed downloads are kept for the next run.
    """

    hint = "name a mirror of Debian's in site.toml, check the proxy, or lock again: mirrors keep no old versions"
    remote = partial(download_debs, archives, store, client)
    paths = located(lock.packages, lambda deb, _: store.find("", deb.sha256), remote, "Debian packages", hint)
    return list(paths.values())


def download_debs(
    archives: Sequence[DebianSuite],
    store: Store,
    client: Client,
    missing: Sequence[LockedDeb],
    answers: Answers[LockedDeb],
) -> dict[LockedDeb, Path]:
    """Return the file of each package that the vault or an archive has; add the answers of the others."""
    down: dict[str, str] = {}

    def fetch(deb: LockedDeb, on_progress: OnProgress) -> Path | None:
        roots = dict.fromkeys(archive.url for archive in archives if archive.kind == deb.archive)
        # Quote "+": some servers read it as a blank.
        places = [(str(DebianSuite(root, deb.archive)), f"{root}/{quote(deb.path)}") for root in roots]
        about = (places, answers[deb], store, client, on_progress, down)
        return fetch_file(deb.sha256, "", deb.sha256, *about, deb.size)

    # The largest first, so that not one large download remains at the end.
    missing = sorted(missing, key=lambda deb: -deb.size)
    title, size = f"fetching {len(missing)} Debian packages", sum(deb.size for deb in missing)
    return fetch_each(missing, fetch, client, title, size)
