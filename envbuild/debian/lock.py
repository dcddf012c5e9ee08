"""The lock of a Debian base: names, versions and hashes, no mirror."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from envbuild.errors import LockError

# name of an architecture in targets → Debian's name
DEBIAN_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
ARCHIVES = ("debian", "debian-security")
_NAME = re.compile(r"[a-z0-9][a-z0-9+.\-]+")
_DATE = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")
_SUITE = re.compile(r"[a-z][a-z0-9.\-]*")
# The texts of a package.
_TEXTS = {
    "name": _NAME,
    "version": re.compile(r"[0-9A-Za-z.+~:\-]+"),
    "arch": _NAME,
    "path": re.compile(r"[A-Za-z0-9_.+~%:\-]+(?:/[A-Za-z0-9_.+~%:\-]+)*\.deb"),
    "sha256": re.compile(r"[0-9a-f]{64}"),
}


@dataclass(frozen=True, slots=True)
class LockedDeb:
    """One package.

    `path` is relative to the root of `archive` ("debian" or "debian-security"), `size` is in bytes, `sha256` is
    hexadecimal, `arch` is Debian's name of the architecture, or "all".
    """

    name: str
    version: str
    arch: str
    path: str
    sha256: str
    size: int
    archive: str = "debian"

    def __str__(self) -> str:
        return f"{self.name} {self.version} ({self.arch})"

    @property
    def digest(self) -> str:
        return f"sha256:{self.sha256}"


@dataclass(frozen=True, slots=True)
class DebianLock:
    """All packages of a base, sorted by name.

    `date` is that of the newest archive (ISO 8601, UTC); the snapshot of that date has all of the packages forever.
    """

    suite: str
    date: str
    packages: tuple[LockedDeb, ...]

    def as_toml_table(self) -> dict[str, Any]:
        """Return the lock as plain values for TOML."""
        rows = [{field: getattr(deb, field) for field in LockedDeb.__slots__} for deb in self.packages]
        return {"suite": self.suite, "date": self.date, "package": rows}


def from_table(table: Mapping[str, Any], where: str) -> DebianLock:
    """Return the lock in a table of `as_toml_table`. Raises LockError, naming `where` and the fault."""
    suite, date = _text(table, "suite", _SUITE, where), _text(table, "date", _DATE, where)
    listed = table.get("package")
    if not isinstance(listed, list) or not listed:
        raise _faulty(where, "`package` is not a list of packages")
    packages = tuple(_deb(item, f"{where}, package {n}") for n, item in enumerate(listed, start=1))
    names = [deb.name for deb in packages]
    if unsorted := [b for a, b in pairwise(names) if a >= b]:
        raise _faulty(where, f"{unsorted[0]} stands twice or out of order")
    if len(arches := {deb.arch for deb in packages} - {"all"}) > 1:
        raise _faulty(where, f"packages of several architectures: {', '.join(sorted(arches))}")
    if unknown := table.keys() - {"suite", "date", "package"}:
        raise _faulty(where, f"unknown key {sorted(unknown)[0]!r}")
    return DebianLock(suite, date, packages)


def _deb(item: Any, where: str) -> LockedDeb:
    if not isinstance(item, Mapping):
        raise _faulty(where, "not a table")
    where = f"{where} ({_text(item, 'name', _NAME, where)})"
    texts = {key: _text(item, key, pattern, where) for key, pattern in _TEXTS.items()}
    size, archive = item.get("size"), item.get("archive")
    if type(size) is not int or size <= 0:
        raise _faulty(where, "`size` is not a count of bytes")
    if {".", ".."} & set(texts["path"].split("/")):
        raise _faulty(where, f"`path` is {texts['path']!r}, which leaves the archive")
    if archive not in ARCHIVES:
        raise _faulty(where, f"`archive` is {archive!r}, not one of {', '.join(ARCHIVES)}")
    if unknown := item.keys() - set(LockedDeb.__slots__):
        raise _faulty(where, f"unknown key {sorted(unknown)[0]!r}")
    return LockedDeb(**texts, size=size, archive=archive)


def _text(table: Mapping[str, Any], key: str, pattern: re.Pattern[str], where: str) -> str:
    value = table.get(key)
    if not isinstance(value, str) or not pattern.fullmatch(value):
        raise _faulty(where, f"`{key}` is {'missing' if value is None else repr(value)}")
    return value


def _faulty(where: str, what: str) -> LockError:
    return LockError(f"{where}: {what}", "lock again; this file is not made for editing")
