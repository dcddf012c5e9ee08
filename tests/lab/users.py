"""Another user for a part of a test: root may read everything."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def as_nobody(closed: Path) -> Iterator[None]:
    """Take all permissions from `closed`, and go on as a user who has no others there."""
    mode = closed.stat().st_mode
    opened: list[tuple[Path, int]] = []
    for folder in closed.parents:  # pytest's folders are the user's own
        if folder.stat().st_mode & 0o005 != 0o005:
            opened.append((folder, folder.stat().st_mode))
            folder.chmod(0o755)
    closed.chmod(0)
    root = os.geteuid() == 0
    if root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)
        closed.chmod(mode)
        for folder, before in opened:
            folder.chmod(before)
