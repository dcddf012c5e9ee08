"""The packages of several suites by name, read as a stream from their Packages files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.debian.control import Relation, compare_versions, parse_control, parse_relations
from envbuild.errors import LockError

_CHUNK = 1 << 20
_NAME = re.compile(rb"^Package:[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)
_VERSION = re.compile(rb"^Version:[ \t]*(\S+)", re.MULTILINE | re.IGNORECASE)
_PROVIDES = re.compile(rb"^Provides:", re.MULTILINE | re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False)
class Package:
    """A package of a suite.

    `raw` is its paragraph, which is parsed only when needed: a suite has some 60,000 packages, a base 60.
    """

    name: str
    version: str
    archive: str
    raw: bytes

    def fields(self) -> dict[str, str]:
        """Return the fields by lower-case name. Raises LockError for a faulty paragraph."""
        return parse_control(self.raw.decode("utf-8", "replace"), f"the entry of {self.name}")

    def relations(self, *names: str) -> tuple[tuple[Relation, ...], ...]:
        """Return the groups of the relationship fields `names`, in that order."""
        fields = self.fields()
        return tuple(group for name in names for group in parse_relations(fields.get(name, ""), f"{self.name}: {name}"))


@dataclass(slots=True)
class PackageIndex:
    """The newest version of each package over all added suites; of equal versions, the one added first."""

    packages: dict[str, Package] = field(default_factory=dict)
    _providing: dict[str, Package] = field(default_factory=dict)

    def add(self, path: Path, form: str, archive: str) -> None:
        """Add a Packages file with the compression `form` (".xz", ".gz", "").

        Raises LockError, naming the file, when it is damaged.
        """
        import lzma
        import zlib

        try:
            for raw in _paragraphs(path, form):
                self._add(raw, archive)
        except (OSError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
            raise LockError(f"{path}: not a list of packages: {error}") from error

    def providers(self, relation: Relation) -> list[Package]:
        """Return the packages that provide the name in `relation`, sorted by name.

        Only a versioned Provides satisfies a version bound (Policy 7.5).
        """
        needle = relation.name.encode()
        found = [
            package
            for package in self._providing.values()
            if needle in package.raw and any(map(relation.admits, provided(package).get(relation.name, ())))
        ]
        return sorted(found, key=lambda package: package.name)

    def _add(self, raw: bytes, archive: str) -> None:
        name, version = _NAME.search(raw), _VERSION.search(raw)
        if name is None or version is None:
            raise ValueError("an entry without Package or Version")
        package = Package(name[1].decode(), version[1].decode(), archive, raw)
        known = self.packages.get(package.name)
        if known is not None and compare_versions(package.version, known.version) <= 0:
            return
        self.packages[package.name] = package
        self._providing.pop(package.name, None)
        if _PROVIDES.search(raw):
            self._providing[package.name] = package


def provided(package: Package) -> dict[str, list[str | None]]:
    """Return the names that `package` provides besides its own, with their versions (None for no version)."""
    given: dict[str, list[str | None]] = {}
    for group in package.relations("provides"):
        for relation in group:
            given.setdefault(relation.name, []).append(relation.version or None)
    return given


def _paragraphs(path: Path, form: str) -> Iterator[bytes]:
    import gzip
    import lzma

    opened: Any = {".xz": lzma.open, ".gz": gzip.open, "": open}[form]
    with opened(path, "rb") as stream:
        rest = b""
        while chunk := stream.read(_CHUNK):
            *whole, rest = (rest + chunk).split(b"\n\n")
            yield from (part for part in whole if part.strip())
        if rest.strip():
            yield rest.strip(b"\n")
