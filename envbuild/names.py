"""Names of projects on package indexes."""

from __future__ import annotations

import re


def normalise(name: str) -> str:
    """Return a project name in its normalized form (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()
