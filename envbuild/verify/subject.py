"""The subject of a verification: an artifact, how it is surveyed, and how nodes of it are started."""

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
    """An artifact with all that verification asks of it.

    `root` is the environment's folder as its own processes see it. `alone` tells that they see nothing
    but the artifact (a container), so that every path is part of it. `kind` is the artifact's for the receipt
    where it differs from the state's (one state serves every kind of image). `digest` names the content,
    `runtime` what runs it, `nodes` opens the places where torchrun is started.
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
        """The root as given and with links resolved: scripts find themselves by either."""
        given = os.fspath(self.root.absolute())
        return (given,) if self.alone else (given, os.path.realpath(self.root))

    def relative(self, text: str) -> str:
        """`text` with paths as seen from the artifact's root: equal wherever the artifact stands."""
        for root in self.roots:
            text = text.replace(root + os.sep, "").replace(root, ".")
        return text

    def holds(self, path: str) -> bool:
        """Whether `path` lies inside the artifact; a link inside counts, wherever it points."""
        inside = tuple(root + os.sep for root in self.roots)
        return self.alone or os.path.abspath(path).startswith(inside)
