"""Fetch conda packages by sha256: from the store, the site's mirrors, or their channel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from envbuild.cache.retry import Mismatch, RequestFailed
from envbuild.errors import BuildError
from envbuild.progress import OnProgress
from envbuild.site.pip_config import PipConfig, redact
from envbuild.site.settings import Site
from envbuild.store.client import Client, path_of
from envbuild.store.fetch import Answers, download, fetch_each, locate
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

    Files at file: URLs are used in place. With `offline`, only local files are used. pip's proxy, certificates, timeout
    and retries apply. Raises BuildError that names each package that no source has, with the answer of every source.
    """

    def on_disk(archive: CondaArchive, answers: list[str]) -> Path | None:
        return store.find_archive(archive.sha256, archive.name) or _on_disk(archive, store, site, answers)

    def remote(missing: Sequence[CondaArchive], answers: Answers[CondaArchive]) -> dict[CondaArchive, Path]:
        return {} if offline else _download_all(missing, answers, store, Client(pip, env), site)

    return locate(wanted, on_disk, remote, lambda missing, answers: _not_found(missing, answers, offline))


def _on_disk(archive: CondaArchive, store: Store, site: Site, answers: list[str]) -> Path | None:
    for url in site.mirrored(archive.url):
        if not url.startswith("file:"):
            continue
        path = path_of(url)
        try:
            digest = store.file_digest(path)
        except OSError as error:
            answers.append(f"{path}: {error.strerror}")
            continue
        if digest == archive.sha256:
            return path
        answers.append(f"{path}: hash mismatch: it has sha256:{digest}")
    return None


def _download_all(
    missing: Sequence[CondaArchive], answers: Answers[CondaArchive], store: Store, client: Client, site: Site
) -> dict[CondaArchive, Path]:
    # Channels that failed for every request; without this, sixty packages would wait sixty times for a dead one.
    down: dict[str, str] = {}

    def fetch(archive: CondaArchive, on_progress: OnProgress) -> Path | None:
        name, sha256, told = archive.name, archive.sha256, answers[archive]
        known = partial(store.find_archive, sha256, name)
        for url in site.mirrored(archive.url):
            if url.startswith("file:"):
                continue
            shown = redact(url)
            channel = url.rsplit("/", 2)[0]  # or its mirror
            if channel in down:
                told.append(f"{shown}: {down[channel]}")
                continue
            try:
                hashes = frozenset({sha256})
                return download(url, name, hashes, sha256, known, client, store, on_progress, KIND, archive.size)
            except Mismatch as error:
                told.append(f"{shown}: hash mismatch: it has sha256:{error.sha256}")
            except RequestFailed as error:
                if error.is_down:
                    down[channel] = str(error)
                told.append(f"{shown}: {error}")
        return None

    sizes = [archive.size for archive in missing if archive.size is not None]
    total = sum(sizes) if len(sizes) == len(missing) else None
    return fetch_each(missing, fetch, client, store, f"fetching {len(missing)} conda packages", total)


def _not_found(missing: Sequence[CondaArchive], answers: Answers[CondaArchive], offline: bool) -> BuildError:
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
