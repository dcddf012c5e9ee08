"""The lock of a Debian base: names, versions and hashes, no mirror; and its defaults, data/debian.toml."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from envbuild.base.errors import LockError, RecipeError
from envbuild.base.toml import Document, decode, key, required
from envbuild.data import load_table

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


_TRIPLETS = ("x86_64-linux-gnu", "aarch64-linux-gnu")
_FILE = Path(__file__).resolve().parents[1] / "data" / "debian.toml"


@dataclass(frozen=True, slots=True)
class TreeRules:
    """Rules for the tree of a base image.

    `drop` and `keep` match whole paths to leave out and to keep. The others replace maintainer scripts: `copies` maps
    target → source, `links` path → text, `folders` path → (mode, gid), `alternatives` path → files, best first.
    """

    drop: re.Pattern[str]
    keep: re.Pattern[str]
    copies: Mapping[str, str]
    links: Mapping[str, str]
    folders: Mapping[str, tuple[int, int]]
    alternatives: Mapping[str, tuple[str, ...]]


def default_packages(suite: str, *, python: bool = True) -> tuple[str, ...]:
    """Return the packages of a base of `suite`; `python` adds Python. Raises RecipeError for a suite without data."""
    data = load_table("debian")
    if suite not in data["suites"]:
        known = " and ".join(sorted(data["suites"]))
        raise RecipeError(f"unknown Debian release {suite!r}; known are {known}", f"choose one of {known}")
    own = data["suites"][suite]["python"] if python else []
    return tuple(sorted(data["base"]["packages"] + own))


def default_without() -> tuple[str, ...]:
    """Return the packages that a base omits because only maintainer scripts need them."""
    return tuple(load_table("debian")["base"]["without"])


@lru_cache(maxsize=1)
def load_rules() -> TreeRules:
    """Return the rules for the tree of a base."""
    slim, made = load_table("debian")["slim"], load_table("debian")["made"]
    folders = {path: (mode, gid) for path, (mode, gid) in made["folders"].items()}
    alternatives = {
        path.format(triplet=triplet): tuple(name.format(triplet=triplet) for name in names)
        for path, names in made["alternatives"].items()
        for triplet in _TRIPLETS
    }
    return TreeRules(_any_of(slim["drop"]), _any_of(slim["keep"]), made["copies"], made["links"], folders, alternatives)


def _any_of(globs: list[str]) -> re.Pattern[str]:
    # A "*" at the end matches everything below, any other "*" matches within one name.
    texts = []
    for glob in globs:
        text = re.escape(glob.removesuffix("*")).replace(r"\*", "[^/]+")
        texts.append(text + (".+" if glob.endswith("*") else ""))
    return re.compile("|".join(texts))


def newest_suite() -> str:
    """Return the suite with the newest glibc, for bases that do not need Debian's Python."""
    return str(load_table("debian")["base"]["newest"])


def suites_by_python() -> dict[str, str]:
    """Return Python version → suite."""
    minimal = re.compile(r"python(\d+\.\d+)-minimal")
    suites = load_table("debian")["suites"].items()
    return {m[1]: suite for suite, table in suites for name in table["python"] if (m := minimal.fullmatch(name))}


def rules_digest() -> str:
    """Return the digest of the whole data file, an input of the digest of a base."""
    return hashlib.sha256(_FILE.read_bytes()).hexdigest()
