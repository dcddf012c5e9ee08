"""The interface of the nodes on which torchrun runs: processes of this host, or containers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path, PurePath
from typing import Protocol


class Agent(Protocol):
    """A running program on a node."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None:
        """Return the exit code, None while the program runs."""
        ...


class Nodes(Protocol):
    """The simulated nodes of one verification.

    `work` is the path of their shared folder as programs see it; `interface` is the network interface between
    them.
    """

    @property
    def work(self) -> PurePath: ...

    @property
    def interface(self) -> str: ...

    def address(self, node: int) -> str:
        """Return the address by which other nodes reach `node`."""
        ...

    def free_port(self) -> int:
        """Return a free TCP port of node 0."""
        ...

    def start(self, node: int, program: str, arguments: Sequence[str], extra: Mapping[str, str], log: Path) -> Agent:
        """Start a program of the artifact on a node, with `extra` variables.

        Its output goes to `log`, a file on this host.
        """
        ...

    def stop(self, agents: Sequence[Agent]) -> None:
        """Stop the agents that still run, with all their child processes."""
        ...

    def collect(self, into: Path) -> None:
        """Copy the files of `work` into the folder `into` on this host."""
        ...

    def kill_rank(self, run_id: str, rank: int) -> int | None:
        """Send SIGKILL to one rank of a torchrun job. Return its process ID, None when there is no such rank."""
        ...


# (a work folder on this host, the number of nodes, the caller's environment) → the nodes, closed at the end
OpenNodes = Callable[[Path, int, Mapping[str, str]], AbstractContextManager[Nodes]]
