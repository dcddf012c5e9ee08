"""Fetch locked wheels by hash from any of the site's sources."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from urllib.parse import unquote, urlsplit

from envbuild.cache.download import locked_partial
from envbuild.cache.retry import Mismatch, RequestFailed
from envbuild.errors import BuildError
from envbuild.progress import OnProgress, transfer
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site
from envbuild.store.client import Client
from envbuild.store.sources import Link, PackageSource, local_files, matches, remote_sources
from envbuild.store.store import Store
from envbuild.workers import each

_PARALLEL = 8
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class WantedWheel:
    """A locked wheel: normalised name, version, and the accepted sha256 digests (hex)."""

    name: str
    version: str
    hashes: frozenset[str]

    def __str__(self) -> str:
        return f"{self.name}=={self.version}"


def locate_wheels(
    wanted: Sequence[WantedWheel],
    store: Store,
    pip: PipConfig,
    site: Site,
    indexes: Sequence[str],
    *,
    offline: bool,
    env: Mapping[str, str],
    default_index: Callable[[], str],
) -> dict[WantedWheel, Path]:
    """Return a file with locked content for each of `wanted`: from the store, from find-links, or from indexes.

    Files in local find-links folders are used in place. An unreachable index is an error only when a wheel is
    found nowhere else. If pip names no index, `default_index` returns its URL. Raises BuildError that names each
    missing wheel with the answer of every source.
    """
    found: dict[WantedWheel, Path] = {}
    answers: dict[WantedWheel, list[str]] = {wheel: [] for wheel in wanted}
    folders = local_files(pip)
    for wheel in wanted:
        path = _in_store(wheel, store) or _in_folders(wheel, folders, store, answers[wheel])
        if path is not None:
            found[wheel] = path
    missing = [wheel for wheel in wanted if wheel not in found]
    if missing:
        sources = remote_sources(pip, site, indexes, offline, default_index)
        found |= _fetch_all(missing, sources, Client(pip, env), store, answers)
    missing = [wheel for wheel in wanted if wheel not in found]
    if missing:
        raise _not_found(missing, answers, offline)
    return {wheel: found[wheel] for wheel in wanted}


def probe_index(url: str, pip: PipConfig, env: Mapping[str, str]) -> str | None:
    """Return None when the package index at `url` answers, else the reason of the failure."""
    if url.startswith("file:") and not Path(unquote(urlsplit(url).path)).is_dir():
        return "no such folder"
    source = PackageSource(url, is_index=True)
    # Without retries: a resolution leaves out an index that is down, and reports it.
    impatient = Client(_once(pip), env)
    try:
        source.links("torch", impatient)
    except RequestFailed as error:
        return str(error)
    return None


def _once(pip: PipConfig) -> PipConfig:
    from dataclasses import replace

    return replace(pip, retries=0)


def _in_store(wheel: WantedWheel, store: Store) -> Path | None:
    for digest in sorted(wheel.hashes):
        if path := store.find_wheel(digest):
            return path
    return None


def _in_folders(
    wheel: WantedWheel, folders: Sequence[tuple[Path, list[str]]], store: Store, answers: list[str]
) -> Path | None:
    for folder, names in folders:
        candidates = [name for name in names if matches(name, wheel.name, wheel.version)]
        others = []
        for name in candidates:
            try:
                digest = store.file_digest(folder / name)
            except OSError as error:
                answers.append(f"{folder}: {name} cannot be read: {error.strerror}")
                continue
            if digest in wheel.hashes:
                return folder / name
            others.append(f"{name} has another hash, sha256:{digest}")
        answers.append(f"{folder}: {'; '.join(others) or 'not there'}")
    return None


def _fetch_all(
    missing: Sequence[WantedWheel],
    sources: Sequence[PackageSource],
    client: Client,
    store: Store,
    answers: Mapping[WantedWheel, list[str]],
) -> dict[WantedWheel, Path]:
    if not sources:
        return {}
    store.folder("partial")
    store.clean_stale()

    def fetch(wheel: WantedWheel, on_progress: OnProgress) -> Path | None:
        return _fetch_one(wheel, sources, client, store, answers[wheel], on_progress)

    return fetch_each(missing, fetch, client, f"looking for {len(missing)} wheels")


def fetch_each(
    missing: Sequence[Item],
    fetch: Callable[[Item, OnProgress], Path | None],
    client: Client,
    title: str,
    total: int | None = None,
) -> dict[Item, Path]:
    """Return the file that `fetch` finds for each of `missing`, in parallel; `total` is in bytes, None if unknown."""
    with transfer(title, total) as on_progress:
        paths = each(missing, lambda item, _: fetch(item, on_progress), _PARALLEL, client.stop)
    return {item: path for item, path in zip(missing, paths, strict=True) if path is not None}


def _fetch_one(
    wheel: WantedWheel,
    sources: Sequence[PackageSource],
    client: Client,
    store: Store,
    answers: list[str],
    on_progress: OnProgress,
) -> Path | None:
    for source in sources:
        try:
            links = [
                link for link in source.links(wheel.name, client) if matches(link.filename, wheel.name, wheel.version)
            ]
        except RequestFailed as error:
            answers.append(f"{source.name}: cannot be used: {error}")
            continue
        good = [link for link in links if link.sha256 in wheel.hashes or link.sha256 is None]
        for link in sorted(good, key=lambda link: link.sha256 is None):
            try:
                return _download(link, wheel, client, store, on_progress)
            except Mismatch as error:
                answers.append(f"{source.name}: hash mismatch: {link.filename} has sha256:{error.sha256}")
            except RequestFailed as error:
                answers.append(f"{source.name}: {link.filename}: {error}")
            except OSError as error:
                raise store.unwritable(error) from error
        if not good:
            seen = ", ".join(f"{link.filename} sha256:{link.sha256}" for link in links[:3])
            answers.append(f"{source.name}: {'other files: ' + seen if links else 'not there'}")
    return None


def _download(link: Link, wheel: WantedWheel, client: Client, store: Store, on_progress: OnProgress) -> Path:
    key = link.sha256 or hashlib.sha256("".join([link.filename, *sorted(wheel.hashes)]).encode()).hexdigest()

    def known() -> Path | None:
        return _in_store(wheel, store)

    return download(link.url, link.filename, wheel.hashes, key, known, client, store, on_progress)


def download(
    url: str,
    name: str,
    hashes: frozenset[str],
    key: str,
    known: Callable[[], Path | None],
    client: Client,
    store: Store,
    on_progress: OnProgress,
    kind: str = "wheels",
    size: int | None = None,
) -> Path:
    """Download `url` into the store as `kind`/<sha256>/`name`; only one process downloads a `key` at a time.

    `known` returns the file if another process was faster. Raises the exceptions of `Client.download`.
    """
    with locked_partial(store.folder("partial") / key, client.stop) as partial:
        if there := known():
            return there
        digest = client.download(url, partial, hashes, on_progress, size)
        return store.adopt(partial, digest, name, kind)


def _not_found(missing: Sequence[WantedWheel], answers: Mapping[WantedWheel, list[str]], offline: bool) -> BuildError:
    lines = []
    for wheel in missing:
        lines.append(f"{wheel}: no source has a file with the locked hash")
        lines += [f"    wanted sha256:{digest}" for digest in sorted(wheel.hashes)[:3]]
        lines += [f"    {answer}" for answer in answers[wheel]] or ["    no source is configured"]
    hint = (
        "run it once without --offline, or put the wheels into a folder that pip's find-links names"
        if offline
        else "check pip's index-url, find-links, proxy and cert (PIP_* variables, pip.conf), or lock again if the "
        "files were replaced"
    )
    return BuildError("\n".join(lines), hint)
