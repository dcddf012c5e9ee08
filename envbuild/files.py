"""Atomic writes: a reader sees the old content of a file or the new content, never a part of either."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import envbuild


def shipped(name: str) -> Path:
    """Return the file or folder `name` that ships with envbuild: inside an installed wheel, or at a checkout's top."""
    package = Path(envbuild.__file__).parent
    bundled = package / "_bundled" / name
    return bundled if bundled.exists() else package.parent / name


@contextlib.contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[Path]:
    """Yield a new file beside `path` for the block to write; it replaces `path` atomically if the block succeeds.

    `mode` is the file's permissions. Raises OSError.
    """
    handle, name = tempfile.mkstemp(prefix=".new-", dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str, mode: int = 0o644) -> None:
    """Write `text` to `path` with an atomic replace; missing parent folders are created. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, mode) as temporary, temporary.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
