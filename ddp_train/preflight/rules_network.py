"""Checks of faults between nodes: missing nodes, addresses, routes, connections, names and clocks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .model import FAIL, WARN, Facts, Finding, Node, Requirements, few, is_loopback, listed
from .wire import NO_ROUTE, OK, REFUSED, STALLED, STRANGER, TIMED_OUT

_SHOWN = 12
_SKEW_WARN_S, _SKEW_FAIL_S = 1.0, 60.0

REMEDIES = {
    TIMED_OUT: "packets are dropped on the way: let firewalls (nftables, security groups) pass all TCP"
    " between the job's nodes, and check that [fabric] interface is the network that connects them",
    REFUSED: "nothing listens there, or a firewall rejects: see what that node prints, and let firewalls pass all TCP"
    " between the job's nodes",
    NO_ROUTE: "there is no route between these addresses: name the interface of a network that all nodes share in"
    " [fabric] interface of the site",
    STALLED: "small packets pass and large ones do not: give the interfaces of all nodes, and the switch, one MTU",
    STRANGER: "another machine has the same address: two nodes, or a node and a container bridge, share it",
}


def answers(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    for node in nodes:
        at = (node.number,)
        if node.facts is None:
            head = f"{nodes[0].host} ({nodes[0].address})"
            yield Finding(
                FAIL,
                "answers",
                at,
                f"does not answer: the head, {head}, waited and heard nothing",
                "read what that node prints itself; when it prints nothing, it was not started: the launcher must start"
                " one process on every node (srun --ntasks-per-node=1, mpirun --map-by ppr:1:node)",
            )
        elif not node.finished:
            fault = f"answered and then fell silent: {node.error or 'its connection broke'}"
            yield Finding(FAIL, "answers", at, fault, "read what that node prints itself")
        if node.doubled:
            fault = f"several processes say that they are node {node.number}"
            remedy = "start one a node (--ntasks-per-node=1), each with its own ENVBUILD_NODE"
            yield Finding(FAIL, "answers", at, fault, remedy)


def addresses(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    for node in nodes:
        at, facts = (node.number,), node.known
        if is_loopback(node.address):
            remedy = "name an interface of a network that the nodes share in [fabric] interface of the site"
            yield Finding(FAIL, "address", at, "has a loopback address, which others cannot reach", remedy)
        twins = [n.number for n in nodes if n.address == node.address]
        if len(twins) > 1:
            remedy = "give each node its own; look for copied network settings"
            yield Finding(FAIL, "address", tuple(twins), "have one and the same address", remedy)
        if not facts.interfaces:
            continue
        holder = [name for name, has in facts.interfaces.items() if node.address in has]
        if not holder:
            yield Finding(
                FAIL,
                "address",
                at,
                f"{node.address} is on none of its interfaces: it has {_shown(facts)}",
                "name the interface of the network that the nodes share in [fabric] interface of the site",
            )
        elif node.interface and node.interface not in holder:
            has = _has(facts, node.interface)
            yield Finding(
                FAIL,
                "interface",
                at,
                f"{node.address} is on {holder[0]}, not on {node.interface}, which has {has}",
                f"set [fabric] interface of the site to {holder[0]}, or to one that all nodes have in one network",
            )
        for name, value in facts.variables.items():
            if not any_interface(name, value, facts.interfaces):
                yield Finding(
                    FAIL,
                    "interface",
                    at,
                    f"{name}={value}, and its interfaces are {', '.join(facts.interfaces)}",
                    "name an interface of these nodes in [fabric] interface of the site, or leave it out",
                )


def routes(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    for node in nodes[1:]:
        if not node.seen or node.seen == node.address or is_loopback(node.address):
            continue
        own = [name for name, has in node.known.interfaces.items() if node.seen in has]
        if own:
            fault = f"reaches the head over {own[0]} ({node.seen}), not over {node.interface or node.address}"
            remedy = "traffic takes another network than the one asked for: check the routes (ip route get HEAD)"
        else:
            fault = f"reaches the head as {node.seen}, which is not its own: its address is translated (NAT)"
            remedy = "choose a network on which the nodes see each other's own addresses"
        yield Finding(WARN, "route", (node.number,), fault, remedy)


def pairs(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    failed: dict[tuple[int, str], list[int]] = {}
    for node in nodes:
        for other, word in node.pairs.items():
            if word != OK and 0 <= other < len(nodes):
                failed.setdefault((other, word), []).append(node.number)
    for (other, word), sources in failed.items():
        fault = f"cannot be reached from {listed(nodes, sources)}: {word}"
        yield Finding(FAIL, "pairs", (other,), fault, REMEDIES.get(word, REMEDIES[REFUSED]))


def clocks(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    for node in nodes[1:]:
        off = abs(node.ahead_s) - node.error_s
        if node.facts is not None and off > _SKEW_WARN_S:
            status = FAIL if off > _SKEW_FAIL_S else WARN
            side = "ahead of" if node.ahead_s > 0 else "behind"
            fault = f"its clock is {abs(node.ahead_s):.0f} s {side} the head's"
            yield Finding(status, "clock", (node.number,), fault, "let chrony or ntpd run on all nodes")


def names(nodes: Sequence[Node], required: Requirements) -> Iterator[Finding]:
    by_host = {node.host: node for node in nodes}
    # All addresses of a host's interfaces are its own: a site may name nodes by one network and train over
    # another.
    own = {
        node.host: {node.address, *(a for has in node.known.interfaces.values() for a in has if not is_loopback(a))}
        for node in nodes
    }
    by_name = "jobs of envbuild go by addresses; programs that use names"
    for node in nodes:
        at, names = (node.number,), node.known.names
        if late := [host for host, addresses in names.items() if addresses is None]:
            remedy = "a name server does not answer (/etc/resolv.conf): torchrun waits for it at every look-up"
            verb = "is" if len(late) == 1 else "are"
            yield Finding(WARN, "names", at, f"{few(late)} {verb} not looked up in time", remedy)
        if unknown := [host for host, addresses in names.items() if addresses == []]:
            remedy = f"{by_name} fail: /etc/hosts or DNS must know all nodes"
            verb = "has" if len(unknown) == 1 else "have"
            yield Finding(WARN, "names", at, f"{few(unknown)} {verb} no address", remedy)
        for host, addresses in names.items():
            where = node.known.lines.get(host, "")
            fault = f"{host} is {', '.join(addresses or ())}" + (f" (/etc/hosts, {where})" if where else "")
            if any(is_loopback(address) for address in addresses or ()):
                remedy = f"{by_name} give it to others, who cannot reach it: give {host} its own address there"
                yield Finding(WARN, "names", at, fault, remedy)
            elif addresses and host in by_host and by_host[host].known.interfaces and not own[host] & set(addresses):
                remedy = f"{by_name} reach another machine: {host} has {by_host[host].address}"
                yield Finding(WARN, "names", at, fault, remedy)
        for address, name in node.known.reverse.items():
            host = next((n.host for n in nodes if n.address == address), "")
            if name and host and name.partition(".")[0] != host.partition(".")[0]:
                fault = f"{address} is called {name}, and is {host}"
                remedy = "correct the reverse entry in /etc/hosts or DNS"
                yield Finding(WARN, "names", at, fault, remedy)


def any_interface(variable: str, value: str, interfaces: Mapping[str, object]) -> bool:
    """Return whether `value` of GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME selects any of `interfaces`.

    gloo's are whole names; NCCL's are prefixes, with `=` whole names, with `^` exclusions. Sources: torch's
    ProcessGroupGloo, NCCL's documentation of the variable.
    """
    if variable.startswith("GLOO"):
        return all(name in interfaces for name in value.split(","))
    kind = value[:2] if value[:2] in ("^=",) else value[:1] if value[:1] in ("^", "=") else ""
    names = value[len(kind) :].split(",")
    whole = "=" in kind

    def chosen(name: str) -> bool:
        return any(name == prefix if whole else name.startswith(prefix) for prefix in names)

    return any(chosen(name) != ("^" in kind) for name in interfaces)


def _has(facts: Facts, interface: str) -> str:
    """Return the addresses of an interface that other nodes may use."""
    usable = [address for address in facts.interfaces.get(interface, ()) if not address.startswith("fe80:")]
    return " ".join(usable) or "no address"


def _shown(facts: Facts) -> str:
    return ", ".join(f"{name} {_has(facts, name)}" for name in [*facts.interfaces][:_SHOWN])
