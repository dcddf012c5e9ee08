"""Parser of control files, relationship fields and versions.

Source: Debian Policy 4.7, chapter 5 (control files), 5.6.12 (version), chapter 7 (relationships).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from envbuild.base.errors import LockError

_NAME = r"[a-z0-9][a-z0-9+.\-]*"
_RELATION = re.compile(
    rf"(?P<name>{_NAME})(?::(?P<qualifier>[a-z0-9\-]+))?"
    r"\s*(?:\(\s*(?P<operator><<|<=|=|>=|>>)\s*(?P<version>[^\s()]+)\s*\))?"
)
_VERSION = re.compile(
    r"(?:(?P<epoch>[0-9]{1,9}):)?(?P<upstream>[0-9A-Za-z.+~:\-]*?)(?:-(?P<revision>[0-9A-Za-z.+~]*))?"
)
# The results of `compare_versions` that satisfy an operator.
_ORDERS = {"<<": (-1,), "<=": (-1, 0), "=": (0,), ">=": (0, 1), ">>": (1,)}
_FIELD = re.compile(r"([!-9;-~]+):[ \t]*(.*)")


@dataclass(frozen=True, slots=True)
class Relation:
    """One alternative of a relationship: a package name, and if not "" an architecture and a version bound."""

    name: str
    qualifier: str = ""
    operator: str = ""
    version: str = ""

    def __str__(self) -> str:
        name = f"{self.name}:{self.qualifier}" if self.qualifier else self.name
        return f"{name} ({self.operator} {self.version})" if self.operator else name

    def admits(self, version: str | None) -> bool:
        """Return whether a package of `version` satisfies the relation; None stands for an unversioned Provides."""
        if not self.operator or version is None:
            return not self.operator
        return compare_versions(version, self.version) in _ORDERS[self.operator]


def parse_relations(field: str, where: str) -> tuple[tuple[Relation, ...], ...]:
    """Return the groups of alternatives in a relationship field. Raises LockError, naming `where`, for other text."""
    groups = []
    for group in field.split(","):
        if not group.strip():
            continue  # control files may have a trailing comma
        alternatives = []
        for text in group.split("|"):
            match = _RELATION.fullmatch(text.strip())
            if match is None:
                raise LockError(f"{where}: {text.strip()!r} is not a package relationship")
            alternatives.append(Relation(**match.groupdict(default="")))
        groups.append(tuple(alternatives))
    return tuple(groups)


def parse_control(text: str, where: str) -> dict[str, str]:
    """Return lower-case name → value of the fields in the paragraph `text` (names are case-insensitive).

    Continuation lines are joined by newlines, without their leading blank. Raises LockError, naming `where`, for an
    invalid line and for a duplicate field.
    """
    fields: dict[str, list[str]] = {}
    last = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if line.startswith("#") or (not line.strip() and not last):
            continue
        if line[:1] in (" ", "\t") and last:
            fields[last].append(line[1:].rstrip())
        elif match := _FIELD.fullmatch(line.rstrip()):
            last = match[1].lower()
            if last in fields:
                raise LockError(f"{where}, line {number}: the field {match[1]} is given twice")
            fields[last] = [match[2].rstrip()]
        elif line.strip():
            raise LockError(f"{where}, line {number}: neither `Field: value` nor a continuation")
    return {name: "\n".join(lines) for name, lines in fields.items()}


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs of a control file, which are separated by empty lines."""
    for part in re.split(r"\n(?:[ \t]*\n)+", text.replace("\r\n", "\n")):
        if part.strip():
            yield part.strip("\n")


def compare_versions(first: str, second: str) -> int:
    """Return -1, 0 or 1 if `first` is older than, equal to or newer than `second`. Raises LockError if invalid."""
    left, right = _key(first), _key(second)
    return (left > right) - (left < right)


@functools.lru_cache(maxsize=4096)
def _key(version: str) -> tuple[int, tuple[object, ...], tuple[object, ...]]:
    match = _VERSION.fullmatch(version)
    # Python's int refuses 4,300 digits; no version has so many characters.
    if match is None or not match["upstream"] or len(version) > 1000:
        raise LockError(f"{version!r} is not a Debian version")
    return int(match["epoch"] or 0), _part(match["upstream"]), _part(match["revision"] or "")


def _part(text: str) -> tuple[object, ...]:
    # Non-digits and digits alternate; "~" sorts before the end, the end before letters, letters before all else.
    key: list[object] = []
    for letters, digits in re.findall(r"([^0-9]*)([0-9]*)", text or "0")[:-1]:
        key += [(*map(_weight, letters), 0), int(digits or 0)]
    # The end sorts like a pair without letters and digits; an empty text counts as "0".
    return (*key, (0,), 0)


def _weight(letter: str) -> int:
    if letter == "~":
        return -1
    return ord(letter) if letter.isalpha() else ord(letter) + 256
