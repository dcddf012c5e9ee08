"""Locks in other tools' formats."""

from __future__ import annotations

import re


def without_credentials(pylock: str) -> str:
    """A PEP 751 file less user names and passwords in its URLs: a site's index may need them, a file must not."""
    return re.sub(r"(://)[^/@\s\"']+@", r"\1", pylock)
