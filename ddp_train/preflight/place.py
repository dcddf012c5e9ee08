"""This node among the others of a job, from the variables of the job's script."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import BAD_INPUT, TrainError
from .model import Node

# Up to this number of nodes, all pairs are tried, as gloo connects them; beyond it, each node tries this many.
ALL_PAIRS = 64


@dataclass(frozen=True)
class NodeInfo:
    """This node and the other nodes of the job. The head is node 0."""

    node: int
    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    interface: str
    port: int
    folder: str
    run: str

    @property
    def nodes(self) -> int:
        return len(self.hosts)

    @property
    def address(self) -> str:
        return self.addresses[self.node]

    @property
    def head(self) -> str:
        return self.addresses[0]

    def empty(self, node: int) -> Node:
        """Return the record of a node that has not answered."""
        return Node(node, self.hosts[node], self.addresses[node])

    def partners(self, node: int) -> list[int]:
        """Return the nodes that `node` tries: all others, or in large jobs its neighbours and a regular sample."""
        if self.nodes <= ALL_PAIRS:
            return [other for other in range(self.nodes) if other != node]
        steps = {1, self.nodes - 1, *(round(i * self.nodes / ALL_PAIRS) for i in range(1, ALL_PAIRS))}
        return sorted({(node + step) % self.nodes for step in steps} - {node})


def find_node_info(environ: Mapping[str, str]) -> NodeInfo:
    """Return the node's data from the variables of a job's script. Raises TrainError for a missing or invalid value."""

    def variable(name: str) -> str:
        value = environ.get(f"ENVBUILD_{name}", "")
        if not value:
            raise TrainError(
                f"ENVBUILD_{name} is not set: the scripts of `envbuild job` and `envbuild preflight` start this",
                BAD_INPUT,
            )
        return value

    def number(name: str, most: int) -> int:
        value = variable(name)
        if not (value.isascii() and value.isdigit() and int(value) <= most):
            raise TrainError(f"ENVBUILD_{name} is {value!r}, not a number up to {most}", BAD_INPUT)
        return int(value)

    count = number("NODES", 1 << 20)
    hosts, addresses = tuple(variable("HOSTS").split()), tuple(variable("ADDRESSES").split())
    if not len(hosts) == len(addresses) == count:
        raise TrainError(
            f"ENVBUILD_NODES is {count}, with {len(hosts)} names in ENVBUILD_HOSTS and {len(addresses)} addresses in"
            " ENVBUILD_ADDRESSES",
            BAD_INPUT,
        )
    node = number("NODE", count - 1)
    if environ.get("ENVBUILD_ADDRESS", addresses[node]) != addresses[node]:
        raise TrainError(
            f"ENVBUILD_ADDRESS is {environ['ENVBUILD_ADDRESS']!r}, and node {node} of ENVBUILD_ADDRESSES is"
            f" {addresses[node]!r}",
            BAD_INPUT,
        )
    interface = environ.get("ENVBUILD_INTERFACE", "")
    port = number("PORT", 65535)
    return NodeInfo(node, hosts, addresses, interface, port, variable("RUN"), variable("RUN_ID"))
