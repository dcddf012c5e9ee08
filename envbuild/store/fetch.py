"""Locked files, fetched by hash: wheels from any of the site's sources, conda packages from mirrors or channels."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from envbuild.base.errors import BuildError
from envbuild.base.masking import redact
from envbuild.base.progress import OnProgress, reuse
from envbuild.cache.http import Mismatch, RequestFailed
from envbuild.store.client import Client, SourceAnswer, download, fetch_each, fetch_file, from_vault, path_of
from envbuild.store.sources import FetchSettings, PackageSource, local_files, matches, remote_sources, single_file
from envbuild.store.store import Store

ARCHIVES = "conda/archives"


@dataclass(frozen=True, slots=True)
class WantedWheel:
    """A locked wheel: normalised name, version, and the accepted sha256 digests (hex)."""

    name: str
    version: str
    hashes: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


@dataclass(frozen=True, slots=True)
class CondaArchive:
    """A locked conda package: its canonical URL, and the required sha256 (hex)."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        """File name of the package."""
        return self.url.rpartition("/")[2]

    @property
    def hashes(self) -> frozenset[str]:
        """The accepted digests, as those of a wheel."""
        return frozenset({self.sha256})

    def __str__(self) -> str:
        return self.name


class LockedFile(Protocol):
    """A file that a lock names by its sha256 (hex), of which several may be accepted."""

    @property
    def hashes(self) -> frozenset[str]: ...


Item = TypeVar("Item", bound=LockedFile)
Answers = Mapping[Item, list[SourceAnswer]]
# A message about missing files names so many of the files that have the same cause, and so many causes.
_NAMED, _CAUSES = 5, 4


@dataclass
class WheelSources:
    """The sources of each project; see `locate_wheels`. All wheels share the pages that were read."""

    host: FetchSettings
    indexes: Sequence[str]
    bound: Mapping[str, str]
    offline: bool
    patient: bool = True
    _known: dict[str | None, list[PackageSource]] = field(default_factory=dict)

    def __call__(self, project: str) -> list[PackageSource]:
        """Return the sources of `project` in their order. Raises KeyError for an index that the site does not name."""
        index = self.bound.get(project)
        if index is not None and "://" in index:
            urls = [url for url in self.host.site.mirrored(index) if not self.offline or url.startswith("file:")]
            return [single_file(url, path_of(index).name) for url in urls]
        only = None if index is None else self.host.site.indexes[index]
        if index not in self._known:
            self._known[index] = remote_sources(self.host, self.indexes, self.offline, only=only, patient=self.patient)
        return self._known[index]


def locate_wheels(
    wheels: Sequence[WantedWheel],
    host: FetchSettings,
    indexes: Sequence[str] = (),
    *,
    bound: Mapping[str, str] = {},
    offline: bool,
) -> dict[WantedWheel, Path]:
    """Return a file with locked content for each of `wheels`: from the store, from find-links, or from indexes.

    Files in local find-links folders are used in place. An unreachable index is an error only when a wheel is found
    nowhere else. A project in `bound` comes from that index of the site only, or is the file at that URL. Raises
    BuildError that names each missing wheel with every source's answer.
    """
    folders, sources_of = local_files(host.pip), WheelSources(host, indexes, bound, offline)

    def on_disk(wheel: WantedWheel, answers: list[SourceAnswer]) -> Path | None:
        return local_wheel(wheel, folders, host.store, answers)

    def remote(missing: Sequence[WantedWheel], answers: Answers[WantedWheel]) -> dict[WantedWheel, Path]:
        sources = {}
        for wheel in missing:
            try:
                sources[wheel] = sources_of(wheel.name)
            except KeyError as error:
                answers[wheel].append(SourceAnswer(f"index {error.args[0]!r}", "not named in [indexes] of site.toml"))
        return download_wheels(sources, answers, host.store, Client(host.pip, host.variables))

    hint = (
        "run it once without --offline, put the wheels into a folder that pip's find-links names, or build from a "
        "bundle that another host makes: `envbuild bundle RECIPE`"
        if offline
        else "check pip's index-url, find-links, proxy and cert (PIP_* variables, pip.conf), or lock again if the "
        "files were replaced"
    )
    return located(wheels, on_disk, remote, "wheels", hint)


def fetch_archives(archives: Sequence[CondaArchive], host: FetchSettings, *, offline: bool) -> dict[CondaArchive, Path]:
    """Return a file with the locked content for each of `archives`: from the store, its mirrors, or its channel.

    Files at file: URLs are used in place. With `offline`, only local files are used. pip's proxy, certificates, timeout
    and retries apply. Raises BuildError that names each package that no source has, with the answer of every source.
    """

    def on_disk(archive: CondaArchive, answers: list[SourceAnswer]) -> Path | None:
        known = host.store.find(ARCHIVES, archive.sha256, archive.name.__eq__)
        return known or _at_file_urls(archive, host, answers)

    remote = partial(download_archives, host, Client(host.pip, host.variables), offline)
    bundle = "build from a bundle that another host makes: `envbuild bundle RECIPE --kind conda`"
    hint = (
        "run it once without --offline, give the channel a mirror in a folder (file:///...) under [mirrors] "
        f"in site.toml, or {bundle}"
        if offline
        else "check the channel's mirrors in site.toml, their credentials (netrc, or user:password@ in the mirror's "
        "URL), proxy and cert (PIP_* variables, pip.conf); lock again if the files were replaced. Without a network, "
        f"{bundle}"
    )
    return located(archives, on_disk, remote, "conda packages", hint)


def located(
    items: Sequence[Item],
    on_disk: Callable[[Item, list[SourceAnswer]], Path | None],
    remote: Callable[[Sequence[Item], Answers[Item]], dict[Item, Path]],
    title: str,
    hint: str,
) -> dict[Item, Path]:
    """Return a file for each of `items`: from `on_disk`, else from `remote`. Raises BuildError when some have none.

    The functions add the answer of each source that does not have an item to the item's list.
    """
    answers: dict[Item, list[SourceAnswer]] = {item: [] for item in items}
    paths = {item: path for item in answers if (path := on_disk(item, answers[item])) is not None}
    for item in answers:
        reuse(title, str(item), item in paths)
    if missing := [item for item in answers if item not in paths]:
        paths |= remote(missing, answers)
    nowhere = [SourceAnswer("pip", "no source is configured")]
    if absent := {item: answers[item] or nowhere for item in answers if item not in paths}:
        raise BuildError("\n".join(_described(absent, title)), hint)
    return {item: paths[item] for item in items}


def _described(absent: Answers[Item], title: str) -> list[str]:
    """Return the lines of the message for `absent`; items with the same answers of all sources share lines."""
    causes: dict[tuple[tuple[str, str], ...], list[Item]] = {}
    for item, answers in absent.items():
        causes.setdefault(tuple(dict.fromkeys((answer.source, answer.reason) for answer in answers)), []).append(item)
    frequent = sorted(causes.items(), key=lambda cause: -len(cause[1]))
    lines = []
    for cause, items in frequent[:_CAUSES]:
        if len(items) == 1:
            lines.append(f"{items[0]}: no source has it with the locked hash")
            lines += [f"    wanted sha256:{digest}" for digest in sorted(items[0].hashes)[:3]]
            lines += [f"    {answer}" for answer in dict.fromkeys(absent[items[0]])]
        else:
            names = ", ".join(str(item) for item in items[:_NAMED])
            rest = f" and {len(items) - _NAMED} more" if len(items) > _NAMED else ""
            lines += [f"{len(items)} {title}: no source has them with the locked hash", f"    {names}{rest}"]
            lines += [f"    {source}: {reason}" for source, reason in cause]
    if others := sum(len(items) for _, items in frequent[_CAUSES:]):
        lines.append(f"and {others} more {title}")
    return lines


def stored_wheel(wheel: WantedWheel, store: Store) -> Path | None:
    """Return the file of `wheel` in the store, None without one. A file with another wheel's name does not count."""
    fits = partial(matches, name=wheel.name, version=wheel.version)
    return next(filter(None, (store.find("wheels", sha256, fits) for sha256 in sorted(wheel.hashes))), None)


def local_wheel(
    wheel: WantedWheel, folders: Sequence[tuple[Path, list[str]]], store: Store, answers: list[SourceAnswer]
) -> Path | None:
    """Return the file of `wheel` in the store or in `folders` of find-links, None without one; add their `answers`."""
    if path := stored_wheel(wheel, store):
        return path
    for folder, names in folders:
        others = []
        for name in (name for name in names if matches(name, wheel.name, wheel.version)):
            try:
                digest = store.digests.of(folder / name)
            except OSError as error:
                answers.append(SourceAnswer(str(folder), f"{name} cannot be read: {error.strerror}"))
                continue
            if digest in wheel.hashes:
                return folder / name
            others.append(f"{name} has another hash, sha256:{digest}")
        answers.append(SourceAnswer(str(folder), "; ".join(others) or "not there"))
    return None


def _at_file_urls(archive: CondaArchive, host: FetchSettings, answers: list[SourceAnswer]) -> Path | None:
    for path in (path_of(url) for url in host.site.mirrored(archive.url) if url.startswith("file:")):
        answer = partial(SourceAnswer, str(path.parents[1]), address=str(path))
        try:
            digest = host.store.digests.of(path)
        except FileNotFoundError:
            answers.append(answer("not there"))
        except OSError as error:
            answers.append(answer(str(error.strerror)))
        else:
            if digest == archive.sha256:
                return path
            answers.append(answer(f"hash mismatch: it has sha256:{digest}"))
    return None


def download_wheels(
    sources: Mapping[WantedWheel, Sequence[PackageSource]],
    answers: Answers[WantedWheel],
    store: Store,
    client: Client,
    *,
    again: bool = False,
) -> dict[WantedWheel, Path]:
    """Return the file of each wheel that the vault or one of its `sources` has; add the answers of the others."""

    def fetch(wheel: WantedWheel, on_progress: OnProgress) -> Path | None:
        hashes, source_answers = wheel.hashes, answers[wheel]
        known = partial(stored_wheel, wheel, store)

        def named(file: Path) -> str:
            assert store.vault is not None
            if not matches(name := store.vault.wheel_name(file), wheel.name, wheel.version):
                raise ValueError(f"it has another wheel: {name!r:.120}")
            return name

        about: dict[str, Any] = {"kind": "wheels", "named": named, "on_progress": on_progress, "stop": client.stop}
        if not again and (path := from_vault(hashes, store, source_answers, **about)):
            return path
        for source in sources[wheel]:
            try:
                links = source.links(wheel.name, client)
            except RequestFailed as error:
                source_answers.append(SourceAnswer(source.name, f"cannot be used: {error}"))
                continue
            links = [link for link in links if matches(link.filename, wheel.name, wheel.version)]
            good = [link for link in links if link.sha256 in hashes or link.sha256 is None]
            for link in sorted(good, key=lambda link: link.sha256 is None):
                name = link.filename
                key = link.sha256 or hashlib.sha256("".join([name, *sorted(hashes)]).encode()).hexdigest()
                try:
                    return download(link.url, name, hashes, key, known, client, store, on_progress)
                except Mismatch as error:
                    source_answers.append(SourceAnswer(source.name, f"hash mismatch: {name} has sha256:{error.sha256}"))
                except RequestFailed as error:
                    source_answers.append(SourceAnswer(source.name, f"{name}: {error}"))
            if not good:
                seen = ", ".join(f"{link.filename} sha256:{link.sha256}" for link in links[:3])
                source_answers.append(SourceAnswer(source.name, f"other files: {seen}" if links else "not there"))
        return None

    paths = fetch_each(list(sources), fetch, client, f"looking for {len(sources)} wheels")
    # An index had the file when it was locked: an older page may have come from one of its servers, or from a cache.
    stale = (
        {}
        if again
        else {
            wheel: asked
            for wheel in sources
            if wheel not in paths
            and (asked := [source for source in sources[wheel] if source.forget_without(wheel.name, wheel.version)])
        }
    )
    return paths | download_wheels(stale, answers, store, client, again=True) if stale else paths


def download_archives(
    host: FetchSettings, client: Client, offline: bool, missing: Sequence[CondaArchive], answers: Answers[CondaArchive]
) -> dict[CondaArchive, Path]:
    """Return the file of each package that the vault, a mirror or its channel has; add the answers of the others."""
    store, down = host.store, dict[str, str]()

    def fetch(archive: CondaArchive, on_progress: OnProgress) -> Path | None:
        urls = [url for url in host.site.mirrored(archive.url) if not url.startswith("file:")]
        places = [(redact(url.rsplit("/", 2)[0]), url) for url in urls]  # a channel, or its mirror
        if offline:
            down.update((channel, "not asked, --offline") for channel, _ in places)
        about = (archive.sha256, ARCHIVES, archive.name)
        return fetch_file(*about, places, answers[archive], store, client, on_progress, down)

    return fetch_each(missing, fetch, client, f"fetching {len(missing)} conda packages")
