"""The address at which the other nodes of a job reach this one.

It does not come from host names: Debian's /etc/hosts maps this host's name to 127.0.1.1, and a name may be unknown on
other nodes and in containers.

Sources: netlink(7), rtnetlink(7); udp(7): connecting a UDP socket sends nothing and chooses the route.
"""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from ..errors import TrainError

_GETADDR, _NEWADDR, _DONE, _ERROR = 22, 20, 3, 2  # types of netlink messages
_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_ADDRESS, _LOCAL = 1, 2  # attributes IFA_ADDRESS and IFA_LOCAL
_HEADER, _IFADDR, _ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=BBBBI"), struct.Struct("=HH")
_FAMILIES = {int(socket.AF_INET): 4, int(socket.AF_INET6): 16}
# Interfaces of this name lead to containers and virtual machines on this host.
_BRIDGES = ("lo", "docker", "br-", "virbr", "cni", "flannel", "podman")
# An address of the documentation block (RFC 5737): the route to it is the default route.
_WORLD = "198.51.100.1"
_CHANGE = "[fabric] interface of the site"


@dataclass(frozen=True)
class Address:
    """An address of an interface. Addresses that are not `wide` have no meaning beyond this host or link."""

    interface: str
    text: str
    wide: bool = True

    @property
    def loops(self) -> bool:
        """Whether it leads back to this host."""
        return self.text.startswith("127.") or self.text == "::1"


def addresses() -> list[Address]:
    """Return the addresses of this host's interfaces in the kernel's order. Raises OSError."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        size = _HEADER.size + _IFADDR.size
        kernel.settimeout(10)
        kernel.sendall(_HEADER.pack(size, _GETADDR, _DUMP, 1, 0) + _IFADDR.pack(0, 0, 0, 0, 0))
        answers: list[tuple[int, str, bool] | None] = []
        while not answers or answers[-1] is not None:
            answers += list(read_answer(kernel.recv(1 << 16)))
    rows = [answer for answer in answers if answer is not None]
    return [Address(socket.if_indextoname(index), text, wide) for index, text, wide in rows]


def read_answer(data: bytes) -> Iterator[tuple[int, str, bool] | None]:
    """Yield (index of the interface, address, whether its scope is global) from netlink messages; None at the end.

    Raises OSError for the kernel's error message.
    """
    start = 0
    while start + _HEADER.size <= len(data):
        size, kind, *_ = _HEADER.unpack_from(data, start)
        body = start + _HEADER.size
        if kind == _DONE:
            yield None
            return
        if kind == _ERROR:
            raise OSError(-struct.unpack_from("=i", data, body)[0], "the kernel does not list addresses")
        family, _, _, scope, index = _IFADDR.unpack_from(data, body)
        if kind == _NEWADDR and family in _FAMILIES:
            values = dict(_attributes(data[body + _IFADDR.size : start + size]))
            value = values.get(_LOCAL, values.get(_ADDRESS, b""))
            if len(value) == _FAMILIES[family]:
                yield index, socket.inet_ntop(family, value), scope == 0
        start += max((size + 3) & ~3, _HEADER.size)


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    start = 0
    while start + _ATTRIBUTE.size <= len(data):
        size, kind = _ATTRIBUTE.unpack_from(data, start)
        yield kind, data[start + _ATTRIBUTE.size : start + size]
        start += max((size + 3) & ~3, _ATTRIBUTE.size)


def source_of(target: str) -> str:
    """Return the address from which this host would reach the address `target`, "" without a route."""
    family = socket.AF_INET6 if ":" in target else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))
            return str(probe.getsockname()[0]).partition("%")[0]
    except OSError:
        return ""


def choose(
    known: Sequence[Address], interface: str, target: str, *, alone: bool, source: Callable[[str], str] = source_of
) -> Address:
    """Return this node's address among `known`.

    That is the address of the interface called `interface`, else that of the route to the address `target`, else that
    of the default route, else the first that is not of a bridge. `alone` means that the job has no other node. Raises
    TrainError when other nodes cannot reach any.
    """
    wide = [address for address in known if address.wide]
    if interface:
        return _of_interface(wide, interface)
    text = ""
    if target and not Address("", target).loops:
        text = source(target)
    text = text or source(_WORLD)
    if text:
        chosen = next((address for address in known if address.text == text), Address("", text))
    else:
        outside = [address for address in wide if not address.interface.startswith(_BRIDGES)]
        chosen = _ip4_first([address for address in outside if address.interface == outside[0].interface])
    if not chosen.text and alone:
        return Address("lo", "127.0.0.1")
    if not chosen.text:
        raise TrainError(f"other nodes reach this node at none of its addresses; set {_CHANGE}")
    if chosen.loops and not alone:
        raise TrainError(f"other nodes do not reach this node at {chosen.text}; set {_CHANGE}")
    return chosen


def _of_interface(wide: Sequence[Address], interface: str) -> Address:
    """Return the address of the interface called `interface`, or of the first whose name begins so."""
    names = [name for _, name in socket.if_nameindex()]
    names += [address.interface for address in wide if address.interface not in names]
    matching = [name for name in names if name == interface] or [name for name in names if name.startswith(interface)]
    if not matching:
        usable = dict.fromkeys(address.interface for address in wide if not address.interface.startswith(_BRIDGES))
        raise TrainError(f"there is no interface {interface}; available are {' '.join(usable)}; change {_CHANGE}")
    chosen = _ip4_first([address for address in wide if address.interface == matching[0]])
    if not chosen.text:
        raise TrainError(f"interface {matching[0]} has no address; change {_CHANGE}")
    return chosen


def _ip4_first(known: Sequence[Address]) -> Address:
    return min(known, key=lambda address: ":" in address.text, default=Address("", ""))


def free_port(first: int) -> int:
    """Return a port that nothing on this host listens on: `first`, else another from 20000 to 29999.

    Each job looks in steps of its own: of two that start at one time, both may find a port free before either has it.
    Raises TrainError.
    """
    port, stride = first, 1013 + 2 * (first % 1000)
    for _ in range(100):
        if _is_free(port):
            return port
        port = 20000 + (port - 20000 + stride) % 10000
    raise TrainError(f"no free port after {first}")


def _is_free(port: int) -> bool:
    for family, host in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
        if family == socket.AF_INET6 and not socket.has_ipv6:
            continue
        try:
            socket.create_server((host, port), family=family).close()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:  # another error is a family that this host does not have
                return False
    return True
