"""Fingerprints of installed packages.

A distribution's fingerprint covers its RECORD (PyPA "Recording installed projects", PEP 376 and 627), a conda package's
its list of files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable

# Files that an installer adds: they describe the installation, not the distribution.
_INSTALLER_FILE = re.compile(rb"\"?[^/,]+\.dist-info/(?:uv_cache\.json|INSTALLER|REQUESTED|direct_url\.json)\"?(?:,|$)")


def record_digest(record: bytes) -> str:
    """Return the sha256 of the sorted lines of a RECORD, without the installer's own files."""
    kept = [line for line in record.splitlines() if not _INSTALLER_FILE.match(line)]
    return "sha256:" + hashlib.sha256(b"\n".join(sorted(kept))).hexdigest()


def conda_digest(rows: Iterable[tuple[str, str]]) -> str:
    """Return the sha256 of a conda package's list of files; it does not depend on the prefix.

    The rows are (path in the prefix, hexadecimal sha256 of the file in the package), in any order. The second is "" for
    files that are not in the package, such as scripts of entry points.
    """
    return "sha256:" + hashlib.sha256(json.dumps(sorted(rows)).encode()).hexdigest()
