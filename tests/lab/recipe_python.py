"""Whether a test failed only because this host lacks the Python of most recipes: Debian 13 has no 3.11, and uv may not
reach a server that has."""

import shutil

MISSING = "this host has no Python 3.11"


def is_missing(output: str) -> bool:
    """Whether `output` says so, of a host that has none on PATH."""
    return MISSING in output and shutil.which("python3.11") is None
