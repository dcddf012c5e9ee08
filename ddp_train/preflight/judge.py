"""What is wrong with what the nodes of a job told: pure judgement, each finding with its nodes and what to do.

A failure is what training by the scripts of `envbuild job` cannot do without. Those go by addresses, so that a host
name which is looked up wrongly is a warning: only programs that use names trip over it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from . import rules_network as network
from . import rules_node as node
from .model import FAIL, Finding, Node, Wanted

Check = Callable[[Sequence[Node], Wanted], Iterator[Finding]]
_CHECKS: tuple[Check, ...] = (
    network.answers, network.addresses, network.routes, network.pairs, node.shared, node.artifact, node.same,
    node.resources, network.clocks, network.names,
)  # fmt: skip


def judge(nodes: Sequence[Node], wanted: Wanted) -> list[Finding]:
    """All findings, failures first; what is wrong with several nodes in the same way is one."""
    merged: dict[tuple[str, str, str, str], list[int]] = {}
    for check in _CHECKS:
        for one in check(nodes, wanted):
            key = (one.status, one.check, one.what, one.remedy)
            merged.setdefault(key, []).extend(one.nodes)
    found = [
        Finding(status, check, tuple(dict.fromkeys(numbers)), what, remedy)
        for (status, check, what, remedy), numbers in merged.items()
    ]
    return sorted(found, key=lambda one: one.status != FAIL)
