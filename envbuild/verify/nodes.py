"""What launching asks of the places where torchrun runs: processes of this host, or containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from typing import Protocol


class Agent(Protocol):
    """One program under way on a node."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        ...


class Nodes(Protocol):
    """The simulated nodes of one verification.

    `work` is the folder that all of them share, as they see it; `interface` the network interface on which
    they reach each other.
    """

    @property
    def work(self) -> PurePath: ...

    @property
    def interface(self) -> str: ...

    def address(self, node: int) -> str:
        """The address of a node for the others."""
        ...

    def free_port(self) -> int:
        """A TCP port of node 0 that nothing listens on."""
        ...

    def start(
        self, node: int, program: str, arguments: Sequence[str], extra: Mapping[str, str], log: Path
    ) -> Agent:
        """Start a program of the artifact on a node, with `extra` variables; what it prints goes to `log`,
        a file of this host."""
        ...

    def stop(self, agents: Sequence[Agent]) -> None:
        """Stop what still runs, and all that it started."""
        ...

    def collect(self, into: Path) -> None:
        """Bring the files of `work` to `into` on this host."""
        ...

    def kill_rank(self, run_id: str, rank: int) -> int | None:
        """Send SIGKILL to one rank of a torchrun job; its process id, None when there is no such rank."""
        ...


# (a work folder on this host, how many nodes, the caller's environment) → the nodes, closed at the end
OpenNodes = Callable[[Path, int, Mapping[str, str]], AbstractContextManager[Nodes]]
