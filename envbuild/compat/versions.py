"""Comparison of versions as NVIDIA, PyPI, libfabric and AWS write them.

`2.26.2-1` (NCCL's releases), `1.22.0amzn4.0` (AWS's libfabric) and `2.7.1+cu126` are read up to the end of the
release number: the first two are not valid under PEP 440.
"""

from __future__ import annotations

import re

_RELEASE = re.compile(r"v?([0-9]{1,9}(?:\.[0-9]{1,9})*)(.*)", re.DOTALL | re.IGNORECASE)
_BEFORE = re.compile(r"[-_.]?(a|b|c|rc|alpha|beta|pre|preview|dev)[-_.]?[0-9]*(?![a-z])", re.IGNORECASE)
_CLAUSE = re.compile(r"\s*(==|!=|>=|<=|>|<)\s*(\S+)\s*")

# Release numbers without trailing zeros; 0 for a pre-release, else 1.
Key = tuple[tuple[int, ...], int]


def key(version: str) -> Key | None:
    """Return the sort key of a version, or None if it does not begin with a number."""
    found = _RELEASE.fullmatch(version.strip())
    if found is None:
        return None
    numbers = [int(part) for part in found[1].split(".")]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers), 0 if _BEFORE.match(found[2]) else 1


def older(version: str, than: str) -> bool | None:
    """Return whether `version` precedes `than`, or None if one of them is not a version."""
    first, second = key(version), key(than)
    return None if first is None or second is None else first < second


def matches(version: str, specifier: str) -> bool | None:
    """Return whether `version` satisfies `specifier` (">=1.14,<1.15"), or None if one of them is malformed.

    As by PEP 440, "<1.15" has no pre-release of 1.15: that is more like 1.15 than like what precedes it.
    """
    found = key(version)
    if found is None:
        return None
    for clause in specifier.split(","):
        parts = _CLAUSE.fullmatch(clause)
        limit = key(parts[2]) if parts else None
        if parts is None or limit is None:
            return None
        holds = {
            "==": found == limit,
            "!=": found != limit,
            ">=": found >= limit,
            "<=": found <= limit,
            ">": found > limit,
            "<": found < limit and found != (limit[0], 0),
        }[parts[1]]
        if not holds:
            return False
    return True
