"""The lock of a Debian base: names, versions and hashes, no mirror."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from envbuild.base.errors import LockError
from envbuild.base.toml import Document, decode, key, required

# name of an architecture in targets → Debian's name
DEBIAN_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
ARCHIVES = ("debian", "debian-security")
_NAME = r"[a-z0-9][a-z0-9+.\-]+"
# No part of it leaves the archive.
_PATH = r"(?:(?!\.{1,2}/)[A-Za-z0-9_.+~%:\-]+/)*[A-Za-z0-9_.+~%:\-]+\.deb"


@dataclass(frozen=True, slots=True)
class LockedDeb:
    """A locked Debian package."""

    name: str = required("Its name.", pattern=_NAME)
    version: str = required("Its version.", pattern=r"[0-9A-Za-z.+~:\-]+")
    arch: str = required('Debian\'s name of its architecture, or "all".', pattern=_NAME)
    path: str = required("The path below the root of `archive`.", pattern=_PATH)
    sha256: str = required("Hexadecimal.", pattern="[0-9a-f]{64}")
    size: int = required("Bytes.", minimum=1)
    archive: str = key("debian", "The archive that has it.", choices=ARCHIVES)

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.arch})"

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}"

    @property
    def hashes(self) -> frozenset[str]:
        """The accepted digests, as those of a wheel."""
        return frozenset({self.sha256})


@dataclass(frozen=True, slots=True)
class DebianLock:
    """The locked packages of a base, sorted by name."""

    suite: str = required("Debian's release.", pattern=r"[a-z][a-z0-9.\-]*")
    date: str = required(
        "The date of the newest archive, in UTC; the snapshot of that date has all of the packages forever.",
        pattern=r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ",
    )
    packages: tuple[LockedDeb, ...] = required("The packages.", min_items=1, name="package")
    releases: tuple[str, ...] = key((), "sha256 of the signed InRelease of the suite, its updates, its security fixes.")

    def as_toml_table(self) -> dict[str, Any]:
        """Return the lock as plain values for TOML."""
        releases = {"releases": list(self.releases)} if self.releases else {}
        return {"suite": self.suite, "date": self.date, **releases, "package": [asdict(deb) for deb in self.packages]}


def from_table(table: dict[str, Any], where: str) -> DebianLock:
    """Return the lock in a table of `as_toml_table`. Raises LockError, naming `where` and the fault."""
    return checked(decode(Document(Path(where), "", table), DebianLock, error=LockError), where)


def checked(lock: DebianLock, where: str) -> DebianLock:
    """Return `lock`. Raises LockError, naming `where`, if its packages are unsorted or of several architectures."""
    if unsorted := [b.name for a, b in pairwise(lock.packages) if a.name >= b.name]:
        raise LockError(f"{where}: {unsorted[0]} is listed twice or out of order")
    if len(arches := {deb.arch for deb in lock.packages} - {"all"}) > 1:
        raise LockError(f"{where}: packages of several architectures: {', '.join(sorted(arches))}")
    return lock
