"""Where the commands of a source build run: this host, or an image with compilers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Protocol


class Workshop(Protocol):
    """A place with compilers, and one folder that it shares with this host."""

    @property
    def work(self) -> Path:
        """The shared folder, as this host sees it: an empty folder of the build's own."""
        ...

    @property
    def inside(self) -> PurePath:
        """The same folder as commands see it."""
        ...

    def run(
        self, command: Sequence[str], cwd: PurePath, variables: Mapping[str, str], log: Path
    ) -> int:
        """Run `command` in `cwd` (below `inside`) with `variables` over the place's own, what it prints appended to
        `log`. Returns the exit status; 127 when there is no such program. A Ctrl-C stops it and all it started."""
        ...
