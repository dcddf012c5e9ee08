"""Human-readable values: ages (30d), sizes (50G), durations, names and versions of packages."""

from __future__ import annotations

import re
from collections.abc import Mapping

_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
AGES, SIZES = "12h, 30d or 8w", "50G or 800M"
# uv's rule for names of indexes, without upper case.
INDEX_NAME = r"^[a-z0-9][a-z0-9_.-]*$"


def seconds(text: str) -> int | None:
    """Return the seconds in an age such as those in AGES, None for any other text."""
    return _number(text, _SECONDS)


def size(text: str) -> int | None:
    """Return the bytes in a size such as those in SIZES, in decimal units; None for any other text."""
    return _number(text, _BYTES)


def _number(text: str, units: Mapping[str, int]) -> int | None:
    match = re.fullmatch(r"([0-9]{1,9})([a-zA-Z]?)", text)
    return int(match[1]) * units[match[2]] if match and match[2] in units else None


def human_size(count: float) -> str:
    """Return `count` bytes in decimal units, as package indexes print sizes."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def human_time(seconds: float) -> str:
    """Return a duration: "12 s", "3 min 20 s"."""
    whole = int(seconds)
    return f"{whole} s" if whole < 60 else f"{whole // 60} min {whole % 60} s"


def normalise(name: str) -> str:
    """Return the normalized form of a project name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def normalise_version(version: str) -> str:
    """Return a version in its normalized form (PEP 440), as locks have it; any other text unchanged."""
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(version))
    except InvalidVersion:
        return version
