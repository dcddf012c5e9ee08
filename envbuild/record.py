"""RECORD files (PyPA "Recording installed projects", PEP 376 and 627) as fingerprints of distributions."""

from __future__ import annotations

import hashlib

# Files that an installer adds for itself; they tell of its run, not of the distribution.
_INSTALLER_FILES = ("/uv_cache.json", "/INSTALLER", "/REQUESTED", "/direct_url.json")


def record_digest(record: bytes) -> str:
    """sha256 of the sorted lines of a RECORD, less the installer's own files."""
    kept = [
        line
        for line in record.splitlines()
        if not line.split(b",", 1)[0].decode(errors="replace").endswith(_INSTALLER_FILES)
    ]
    return "sha256:" + hashlib.sha256(b"\n".join(sorted(kept))).hexdigest()
