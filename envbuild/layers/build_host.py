"""Interface of build hosts, which run the commands of a source build: this host, or a builder image."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Protocol


class BuildHost(Protocol):
    """A build host with compilers, and one folder that it shares with this host."""

    @property
    def work(self) -> Path:
        """The shared folder, as this host sees it: a new, empty folder of the build."""
        ...

    @property
    def inside(self) -> PurePath:
        """The shared folder, as commands see it."""
        ...

    def run(self, command: Sequence[str], cwd: PurePath, variables: Mapping[str, str], log: Path) -> int:
        """Run `command` in `cwd` (below `inside`), append its output to `log`, and return the exit status.

        `variables` override the build host's own. The status is 127 when there is no such program. Ctrl-C stops the
        command and all its children.
        """
        ...
