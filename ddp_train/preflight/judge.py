"""Judgement of the facts of all nodes: pure, each finding with its nodes and the advised change.

A failure is a fault that breaks training by the scripts of `envbuild job`. These use addresses, so a wrong
look-up of a host name is only a warning: it breaks only programs that use names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from . import rules_network as network
from . import rules_node as node
from .model import FAIL, Finding, Node, Requirements

Check = Callable[[Sequence[Node], Requirements], Iterator[Finding]]
_CHECKS: tuple[Check, ...] = (
    network.answers,
    network.addresses,
    network.routes,
    network.pairs,
    node.shared,
    node.artifact,
    node.same,
    node.resources,
    network.clocks,
    network.names,
    node.speed,
)


def judge(nodes: Sequence[Node], required: Requirements) -> list[Finding]:
    """Return all findings, failures first; the same fault on several nodes is one finding."""
    merged: dict[tuple[str, str, str, str], list[int]] = {}
    for check in _CHECKS:
        for finding in check(nodes, required):
            key = (finding.status, finding.check, finding.fault, finding.remedy)
            merged.setdefault(key, []).extend(finding.nodes)
    findings = [
        Finding(status, check, tuple(dict.fromkeys(numbers)), fault, remedy)
        for (status, check, fault, remedy), numbers in merged.items()
    ]
    return sorted(findings, key=lambda finding: finding.status != FAIL)
