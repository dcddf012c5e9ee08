"""Writing files so that a reader sees the old content or the new one, never half of either."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import envbuild


def shipped(name: str) -> Path:
    """The file or folder `name` that comes with envbuild: inside an installed wheel, or at a checkout's top."""
    package = Path(envbuild.__file__).parent
    bundled = package / "_bundled" / name
    return bundled if bundled.exists() else package.parent / name


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` beside `path` and rename it into place; parents are made. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
