"""Fingerprints of what is installed: distributions by their RECORD (PyPA "Recording installed projects",
PEP 376 and 627), conda packages by their list of files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable

# Files that an installer adds for itself; they tell of its run, not of the distribution.
_INSTALLER_FILE = re.compile(
    rb"\"?[^/,]+\.dist-info/(?:uv_cache\.json|INSTALLER|REQUESTED|direct_url\.json)\"?(?:,|$)"
)


def record_digest(record: bytes) -> str:
    """sha256 of the sorted lines of a RECORD, less the installer's own files."""
    kept = [line for line in record.splitlines() if not _INSTALLER_FILE.match(line)]
    return "sha256:" + hashlib.sha256(b"\n".join(sorted(kept))).hexdigest()


def conda_digest(rows: Iterable[tuple[str, str]]) -> str:
    """sha256 of a conda package's files: (path in the prefix, hexadecimal sha256 in the package), in any order.

    The second is "" for what the package does not hold, such as the scripts of its entry points. So it
    depends on no prefix.
    """
    return "sha256:" + hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()
