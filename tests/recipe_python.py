"""Whether a test failed only because this host lacks the Python of most recipes: Debian 13 has no 3.11, and uv may not
reach a server that has."""

import re
import shutil

MISSING = "this host has no Python 3.11"
# The errors of commands, scripts and Python, and the note on an image without bytecode. An image with it needs none.
_ERRORS = re.compile(
    r"this host has no Python 3\.11(,| and cannot run)|there is no python3\.11 on this node"
    r"|python3\.11: No such file or directory|No such file or directory: 'python3\.11'"
)


def is_missing(output: str) -> bool:
    """Whether `output` has an error for want of Python 3.11, and this host has none on PATH."""
    return _ERRORS.search(output) is not None and shutil.which("python3.11") is None
