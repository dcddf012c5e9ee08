"""`resolve_base`: from the names of packages to a lock, over the network."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.cache.retry import NotFound, RequestFailed
from envbuild.debian.index import Package, PackageIndex
from envbuild.debian.lock import DEBIAN_ARCH, DebianLock, LockedDeb, from_table
from envbuild.debian.release import DebianRelease, fetch_packages, fetch_release, load_keys
from envbuild.debian.resolve import resolve
from envbuild.debian.sources import DebianSuite, suites
from envbuild.errors import LockError
from envbuild.image.blobs import Blobs
from envbuild.progress import log, transfer
from envbuild.store.client import Client

if TYPE_CHECKING:
    from pysequoia import Cert


def resolve_base(
    suite: str,
    packages: Iterable[str],
    without: Iterable[str],
    arch: str,
    *,
    archives: Sequence[DebianSuite],
    client: Client,
    blobs: Blobs,
    keyring: Path | None = None,
) -> DebianLock:
    """Lock `packages` of `suite` and their dependencies, for `arch` (x86_64, aarch64, or Debian's names).

    For each of the suite, its updates and its security fixes, the first good one of `archives` is used. Raises
    LockError when one of the three has no good archive, and when the packages cannot be resolved.
    """
    arch = DEBIAN_ARCH.get(arch, arch)
    keys = load_keys(keyring)
    index, dates = PackageIndex(), []
    for name in suites(suite):
        candidates = [archive for archive in archives if archive.suite == name]
        dates.append(_add_first(index, candidates, name, arch, client, blobs, keys))
    chosen = resolve(index, packages, without, arch)
    lock = DebianLock(suite, max(dates), tuple(_locked(package) for package in chosen))
    # Parse the result now: a path that the lock format refuses must fail here, not on the next run.
    return from_table(lock.as_toml_table(), f"the packages of {suite}")


def _add_first(
    index: PackageIndex,
    candidates: Sequence[DebianSuite],
    suite: str,
    arch: str,
    client: Client,
    blobs: Blobs,
    keys: Sequence[Cert],
) -> str:
    """Add the first good archive of `candidates` to `index`; return the date of its Release."""
    answers: list[str] = []
    for archive in candidates:
        try:
            release = fetch_release(archive, client, keys)
            _say_if_old(release)
            for component in archive.components:
                with transfer(f"package list of {archive} {component} for {arch}", None) as on_progress:
                    path, form = fetch_packages(release, component, arch, client, blobs, on_progress)
                index.add(path, form, archive.kind)
        except NotFound:
            answers.append(f"{archive}: not there")
        except RequestFailed as error:
            answers.append(f"{archive}: {error}")
        except LockError as error:
            answers.append(error.message)
        else:
            for answer in answers:
                log(f"{answer}; {archive} is used instead")
            return release.date
    raise LockError(
        "\n    ".join([f"no archive serves {suite}:", *(answers or ["none is known"])]),
        "name a mirror of Debian's in site.toml, or check the proxy",
    )


def _say_if_old(release: DebianRelease) -> None:
    from datetime import UTC, datetime

    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    if release.valid_until and release.valid_until < now and "snapshot" not in release.archive.url:
        log(f"{release.archive} has not been renewed since {release.date}: newer security fixes may be missing")


def _locked(package: Package) -> LockedDeb:
    fields = package.fields()
    size = fields.get("size", "")
    return LockedDeb(
        package.name,
        package.version,
        fields.get("architecture", ""),
        fields.get("filename", ""),
        fields.get("sha256", "").lower(),
        int(size) if size.isdecimal() else 0,
        package.archive,
    )
