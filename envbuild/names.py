"""Names of projects on package indexes."""

from __future__ import annotations

import re


def normalise(name: str) -> str:
    """A project name as PEP 503 compares it."""
    return re.sub(r"[-_.]+", "-", name).lower()
