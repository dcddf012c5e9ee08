"""Export of locks in other tools' formats."""

from __future__ import annotations

import re


def without_credentials(pylock: str) -> str:
    """Return a PEP 751 file without user names and passwords in its URLs; an exported file must not hold them."""
    return re.sub(r"(://)[^/@\s\"']+@", r"\1", pylock)
