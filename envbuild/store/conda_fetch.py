"""Fetch conda packages by sha256: from the store, the site's mirrors, or their channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from envbuild.cache.retry import Mismatch, RequestFailed
from envbuild.errors import BuildError
from envbuild.progress import OnProgress
from envbuild.site.pip_config import PipConfig, redact
from envbuild.site.settings import Site
from envbuild.store.client import Client
from envbuild.store.fetch import download, fetch_each
from envbuild.store.store import Store

KIND = "conda/archives"


@dataclass(frozen=True, slots=True)
class CondaArchive:
    """A locked conda package: its canonical URL, the required sha256 (hex), and its size in bytes if known."""

    url: str
    sha256: str
    size: int | None = None

    @property
    def name(self) -> str:
        """File name of the package."""
        return self.url.rpartition("/")[2]


def fetch_archives(
    wanted: Sequence[CondaArchive], store: Store, pip: PipConfig, site: Site, *, offline: bool, env: Mapping[str, str]
) -> dict[CondaArchive, Path]:
    """Return a file with the locked content for each of `wanted`: from the store, its mirrors, or its channel.

    Files at file: URLs are used in place. With `offline`, only local files are used. pip's proxy, certificates,
    timeout and retries apply. Raises BuildError that names each package that no source has, with the answer of
    every source.
    """
    found: dict[CondaArchive, Path] = {}
    answers: dict[CondaArchive, list[str]] = {archive: [] for archive in wanted}
    for archive in wanted:
        path = store.find_archive(archive.sha256, archive.name) or _on_disk(archive, store, site, answers[archive])
        if path is not None:
            found[archive] = path
    missing = [archive for archive in answers if archive not in found]
    if missing and not offline:
        found |= _fetch_all(missing, store, Client(pip, env), site, answers)
        missing = [archive for archive in missing if archive not in found]
    if missing:
        raise _not_found(missing, answers, offline)
    return {archive: found[archive] for archive in wanted}


def _on_disk(archive: CondaArchive, store: Store, site: Site, answers: list[str]) -> Path | None:
    for url in site.mirrored(archive.url):
        if not url.startswith("file:"):
            continue
        path = Path(unquote(urlsplit(url).path))
        try:
            digest = store.file_digest(path)
        except OSError as error:
            answers.append(f"{path}: {error.strerror}")
            continue
        if digest == archive.sha256:
            return path
        answers.append(f"{path}: hash mismatch: it has sha256:{digest}")
    return None


def _fetch_all(
    missing: Sequence[CondaArchive], store: Store, client: Client, site: Site, answers: Mapping[CondaArchive, list[str]]
) -> dict[CondaArchive, Path]:
    store.folder("partial")
    store.clean_stale()
    # Channels that failed for every request; without this, sixty packages would wait sixty times for a dead one.
    down: dict[str, str] = {}

    def fetch(archive: CondaArchive, on_progress: OnProgress) -> Path | None:
        return _fetch_one(archive, store, client, site, down, answers[archive], on_progress)

    sizes = [archive.size for archive in missing]
    known = [size for size in sizes if size is not None]
    total = sum(known) if len(known) == len(sizes) else None
    return fetch_each(missing, fetch, client, f"fetching {len(missing)} conda packages", total)


def _fetch_one(
    archive: CondaArchive,
    store: Store,
    client: Client,
    site: Site,
    down: dict[str, str],
    answers: list[str],
    on_progress: OnProgress,
) -> Path | None:
    def known() -> Path | None:
        return store.find_archive(archive.sha256, archive.name)

    for url in site.mirrored(archive.url):
        if url.startswith("file:"):
            continue
        shown = redact(url)
        if _channel(url) in down:
            answers.append(f"{shown}: {down[_channel(url)]}")
            continue
        hashes = frozenset({archive.sha256})
        try:
            return download(
                url, archive.name, hashes, archive.sha256, known, client, store, on_progress, KIND, archive.size
            )
        except Mismatch as error:
            answers.append(f"{shown}: hash mismatch: it has sha256:{error.sha256}")
        except RequestFailed as error:
            if error.is_down:
                down[_channel(url)] = str(error)
            answers.append(f"{shown}: {error}")
        except OSError as error:
            raise store.unwritable(error) from error
    return None


def _channel(url: str) -> str:
    """Return the URL of the channel, or of its mirror, in a package's URL."""
    return url.rsplit("/", 2)[0]


def _not_found(missing: Sequence[CondaArchive], answers: Mapping[CondaArchive, list[str]], offline: bool) -> BuildError:
    lines = []
    for archive in missing:
        lines.append(f"{archive.name}: no source has it with the locked hash")
        lines.append(f"    wanted sha256:{archive.sha256}")
        lines += [f"    {answer}" for answer in answers[archive]]
        if not answers[archive]:
            lines.append(f"    {redact(archive.url)}: not asked, --offline")
    hint = (
        "run it once without --offline, or give the channel a mirror in a folder (file:///...) under [mirrors] "
        "in site.toml"
        if offline
        else "check the channel's mirrors in site.toml, their credentials (netrc, or user:password@ in the mirror's "
        "URL), proxy and cert (PIP_* variables, pip.conf); lock again if the files were replaced"
    )
    return BuildError("\n".join(lines), hint)
