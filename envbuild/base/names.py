"""Names and versions of projects on package indexes."""

from __future__ import annotations

import re


def normalise(name: str) -> str:
    """Return a project name in its normalized form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def normalise_version(version: str) -> str:
    """Return a version in its normalized form (PEP 440), as locks have it; any other text unchanged."""
    from packaging.version import InvalidVersion, Version

    try:
        return str(Version(version))
    except InvalidVersion:
        return version
