"""Locked packages as files: from the store, else from the first archive with exactly the locked content."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote

from envbuild.cache.download import locked_partial
from envbuild.cache.retry import Mismatch, NotFound, RequestFailed
from envbuild.debian.lock import DebianLock, LockedDeb
from envbuild.debian.sources import DebianSuite
from envbuild.errors import BuildError
from envbuild.image.blobs import Blobs
from envbuild.progress import OnProgress, transfer
from envbuild.store.client import Client
from envbuild.workers import each

_PARALLEL = 6


def fetch_debs(lock: DebianLock, blobs: Blobs, archives: Sequence[DebianSuite], client: Client) -> list[Path]:
    """Return a file for each package of `lock`, in its order; files in `blobs` are not downloaded again.

    `archives` are tried in order; none means offline. Raises BuildError that names every package that no
    archive has, with the answer of each archive; completed downloads are kept for the next run.
    """
    missing = [deb for deb in lock.packages if not _here(deb, blobs)]
    if missing:
        answers: dict[str, list[str]] = {deb.name: [] for deb in missing}
        size = sum(deb.size for deb in missing)
        try:
            with transfer(f"fetching {len(missing)} Debian packages", size) as on_progress:
                down: dict[str, str] = {}

                def fetch(deb: LockedDeb, _: object) -> None:
                    _fetch_one(deb, blobs, archives, client, answers[deb.name], down, on_progress)

                # The largest first, so that not one large download remains at the end.
                each(sorted(missing, key=lambda deb: -deb.size), fetch, _PARALLEL, client.stop)
        except OSError as error:
            raise BuildError(
                f"the store {blobs.root} cannot be written: {error.strerror or error}",
                "set ENVBUILD_STORE (or `store` in site.toml) to a writable folder with free disk space",
            ) from error
        if lacking := [deb for deb in missing if not _here(deb, blobs)]:
            raise _not_found(lacking, answers)
    return [blobs.path(f"sha256:{deb.sha256}") for deb in lock.packages]


def _here(deb: LockedDeb, blobs: Blobs) -> bool:
    try:
        return blobs.path(f"sha256:{deb.sha256}").stat().st_size == deb.size
    except OSError:
        return False


def _fetch_one(
    deb: LockedDeb,
    blobs: Blobs,
    archives: Sequence[DebianSuite],
    client: Client,
    answers: list[str],
    down: dict[str, str],
    on_progress: OnProgress,
) -> None:
    digest = f"sha256:{deb.sha256}"
    roots = dict.fromkeys(archive.url for archive in archives if archive.kind == deb.archive)
    with locked_partial(blobs.partial(digest), client.stop) as partial:
        for root in roots:
            if _here(deb, blobs):  # another process was faster
                break
            source = str(DebianSuite(root, deb.archive))
            if root in down:
                answers.append(f"{source}: {down[root]}")
                continue
            # Quote "+": some servers read it as a blank.
            url = f"{root}/{quote(deb.path)}"
            try:
                client.download(url, partial, frozenset([deb.sha256]), on_progress, deb.size)
            except NotFound:
                answers.append(f"{source}: not there")
            except Mismatch as other:
                answers.append(f"{source}: has other content, sha256:{other.sha256}")
            except RequestFailed as error:
                answers.append(f"{source}: {error}")
                if error.is_down:
                    down[root] = str(error)
            else:
                blobs.adopt(partial, digest)
                break


def _not_found(lacking: Sequence[LockedDeb], answers: dict[str, list[str]]) -> BuildError:
    lines = []
    for deb in lacking:
        lines.append(f"{deb}: no archive has {deb.path} with sha256:{deb.sha256}")
        lines += [f"    {answer}" for answer in answers[deb.name]] or ["    none is asked"]
    return BuildError(
        "\n".join(lines),
        "name a mirror of Debian's in site.toml, check the proxy, or lock again: mirrors keep no old versions",
    )
