"""The subject of a verification: an artifact, and how to survey it and start nodes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from envbuild.artifacts.state import State
from envbuild.artifacts.survey import Survey
from envbuild.recipe.targets import Target
from envbuild.verify.nodes import Nodes, OpenNodes


@dataclass(frozen=True, slots=True)
class Subject:
    """An artifact and the operations that verification needs.

    `root` is the environment's folder as its own processes see it. `alone` means that they see nothing but the
    artifact (a container), so that every path is part of it. `kind` is the artifact's kind in the receipt, if
    it differs from the state's (one state serves every kind of image). `digest` identifies the content,
    `runtime` names the program that runs it, and `nodes` opens the nodes on which torchrun is started.
    """

    path: Path
    root: Path
    state: State
    target: Target
    digest: str
    runtime: str
    survey: Callable[[Nodes], Survey]
    nodes: OpenNodes
    alone: bool = False
    kind: str = ""

    @property
    def roots(self) -> tuple[str, ...]:
        """The root as given and with symbolic links resolved: programs may report paths of either form."""
        given = os.fspath(self.root.absolute())
        return (given,) if self.alone else (given, os.path.realpath(self.root))

    def relative(self, text: str) -> str:
        """Return `text` with paths relative to the artifact's root, independent of the artifact's location."""
        for root in self.roots:
            text = text.replace(root + os.sep, "").replace(root, ".")
        return text

    def holds(self, path: str) -> bool:
        """Return whether `path` lies inside the artifact; a symbolic link inside counts, whatever its target."""
        inside = tuple(root + os.sep for root in self.roots)
        return self.alone or os.path.abspath(path).startswith(inside)
