"""RECORD files (PyPA "Recording installed projects", PEP 376 and 627) as fingerprints of distributions."""

from __future__ import annotations

import hashlib
import re

# Files that an installer adds for itself; they tell of its run, not of the distribution.
_INSTALLER_FILE = re.compile(
    rb"\"?[^/,]+\.dist-info/(?:uv_cache\.json|INSTALLER|REQUESTED|direct_url\.json)\"?(?:,|$)"
)


def record_digest(record: bytes) -> str:
    """sha256 of the sorted lines of a RECORD, less the installer's own files."""
    kept = [line for line in record.splitlines() if not _INSTALLER_FILE.match(line)]
    return "sha256:" + hashlib.sha256(b"\n".join(sorted(kept))).hexdigest()
