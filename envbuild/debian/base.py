"""A Debian base over the network: from the names of packages to a lock, from a lock to files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from envbuild.base.errors import BuildError, LockError, file_error
from envbuild.base.progress import OnProgress, log, transfer
from envbuild.cache.download import locked_partial
from envbuild.cache.http import Mismatch, NotFound, RequestFailed
from envbuild.debian.lock import DEBIAN_ARCH, DebianLock, LockedDeb, from_table
from envbuild.debian.release import fetch_packages, fetch_release, load_keys
from envbuild.debian.resolve import Package, PackageIndex, resolve
from envbuild.debian.sources import DebianSuite, suites
from envbuild.image.layout import Blobs
from envbuild.image.model import Descriptor
from envbuild.store.client import Client
from envbuild.store.fetch_file import fetch_each

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
    allow_expired: bool = False,
) -> DebianLock:
    """Lock `packages` of `suite` and their dependencies, for `arch` (x86_64, aarch64, or Debian's names).

    For each of the suite, its updates and its security fixes, the first good one of `archives` is used. An archive
    whose Release file has expired is good only with `allow_expired`, except a snapshot, which is old on purpose.
    Raises LockError when one of the three has no good archive, and when the packages cannot be resolved.
    """
    arch = DEBIAN_ARCH.get(arch, arch)
    keys = load_keys(keyring)
    index, dates = PackageIndex(), []
    for name in suites(suite):
        candidates = [archive for archive in archives if archive.suite == name]
        dates.append(_add_first(index, candidates, name, arch, client, blobs, keys, allow_expired))
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
    allow_expired: bool,
) -> str:
    """Add the first good archive of `candidates` to `index`; return the date of its Release."""
    answers: list[str] = []
    expired = False
    for archive in candidates:
        try:
            release = fetch_release(archive, client, keys)
            now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            if release.valid_until and release.valid_until < now and "snapshot" not in archive.url:
                told = f"{archive}: its Release file expired on {release.valid_until}: newer security fixes are missing"
                if not allow_expired:
                    expired = True
                    raise LockError(told)
                log(f"warning: {told}")
            for component in archive.components:
                with transfer(f"package list of {archive} {component} for {arch}", None) as on_progress:
                    path = fetch_packages(release, component, arch, client, blobs, on_progress)
                index.add(path, archive.kind)
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
        "name a mirror of Debian's that is renewed in site.toml, or accept this one: envbuild lock --allow-expired"
        if expired
        else "name a mirror of Debian's in site.toml, or check the proxy",
    )


def _locked(package: Package) -> LockedDeb:
    fields = package.fields()
    size = fields.get("size", "")
    architecture, path, sha256 = (fields.get(name, "") for name in ("architecture", "filename", "sha256"))
    count = int(size) if size.isdecimal() and len(size) <= 18 else 0
    return LockedDeb(package.name, package.version, architecture, path, sha256.lower(), count, package.archive)


def fetch_debs(lock: DebianLock, blobs: Blobs, archives: Sequence[DebianSuite], client: Client) -> list[Path]:
    """Return a file for each package of `lock`, in its order; files in `blobs` are not downloaded again.

    `archives` are tried in order; none means offline. Raises BuildError that names every package that no archive has,
    with the answer of each archive; completed downloads are kept for the next run.
    """
    missing = [deb for deb in lock.packages if not _here(deb, blobs)]
    if missing:
        answers: dict[str, list[str]] = {deb.name: [] for deb in missing}
        down: dict[str, str] = {}

        def fetch(deb: LockedDeb, on_progress: OnProgress) -> None:
            _fetch_one(deb, blobs, archives, client, answers[deb.name], down, on_progress)

        title, size = f"fetching {len(missing)} Debian packages", sum(deb.size for deb in missing)
        try:
            # The largest first, so that not one large download remains at the end.
            fetch_each(sorted(missing, key=lambda deb: -deb.size), fetch, client, title, size)
        except OSError as error:
            raise BuildError(
                file_error(error, blobs.root),
                "set ENVBUILD_STORE (or `store` in site.toml) to a writable folder with free disk space",
            ) from error
        if lacking := [deb for deb in missing if not _here(deb, blobs)]:
            raise _not_found(lacking, answers)
    return [blobs.path(deb.digest) for deb in lock.packages]


def _here(deb: LockedDeb, blobs: Blobs) -> bool:
    return blobs.has(Descriptor("", deb.digest, deb.size))


def _fetch_one(
    deb: LockedDeb,
    blobs: Blobs,
    archives: Sequence[DebianSuite],
    client: Client,
    answers: list[str],
    down: dict[str, str],
    on_progress: OnProgress,
) -> None:
    roots = dict.fromkeys(archive.url for archive in archives if archive.kind == deb.archive)
    with locked_partial(blobs.partial(deb.digest), client.stop) as partial:
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
                blobs.adopt(partial, deb.digest)
                break


def _not_found(lacking: Sequence[LockedDeb], answers: dict[str, list[str]]) -> BuildError:
    lines = []
    for deb in lacking:
        lines.append(f"{deb}: no archive has {deb.path} with {deb.digest}")
        lines += [f"    {answer}" for answer in answers[deb.name]] or ["    none is asked"]
    return BuildError(
        "\n".join(lines),
        "name a mirror of Debian's in site.toml, check the proxy, or lock again: mirrors keep no old versions",
    )
