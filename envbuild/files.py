"""Files that ship with envbuild."""

from __future__ import annotations

from pathlib import Path

import envbuild


def shipped(name: str) -> Path:
    """Return the file or folder `name` that ships with envbuild: inside an installed wheel, or at a checkout's top."""
    package = Path(envbuild.__file__).parent
    bundled = package / "_bundled" / name
    return bundled if bundled.exists() else package.parent / name
