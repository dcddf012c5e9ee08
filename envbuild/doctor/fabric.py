"""Checks of the network between nodes: interfaces, adapters of the known fabrics, libfabric.

Sources: the kernel's Documentation/ABI of /sys/class/net and /sys/class/infiniband; netdevice(7); fi_info(1).
"""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.doctor.model import Host, HostFinding, Status
from envbuild.doctor.probe import find, first_line, run_probe
from envbuild.fabrics import load_fabrics

_SIOCGIFADDR = 0x8915
# Bridges and interface pairs of containers, which do not lead to other nodes.
_INNER = ("lo", "docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "podman", "lxc")


@dataclass(frozen=True, slots=True)
class Interface:
    """One network interface; `addresses` are IPv4 and IPv6 without link-local ones, `speed` is in Mbit/s."""

    name: str
    up: bool
    addresses: tuple[str, ...]
    speed: int | None

    @property
    def inner(self) -> bool:
        """Whether the interface is internal to this host."""
        return self.name.startswith(_INNER)


def interfaces(root: Path = Path("/")) -> list[Interface]:
    """Return the interfaces of this network namespace, sorted by name."""
    sixes = _ipv6(root)
    found = []
    for _, name in sorted(socket.if_nameindex(), key=lambda row: row[1]):
        folder = root / "sys/class/net" / name
        state = _text(folder / "operstate")
        speed = _text(folder / "speed")
        four = _ipv4(name)
        found.append(
            Interface(
                name,
                state == "up" or (state in ("unknown", "") and bool(four or name in sixes)),
                tuple(([four] if four else []) + sixes.get(name, [])),
                int(speed) if speed.isdigit() and int(speed) else None,
            )
        )
    return found


def _ipv4(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
        return socket.inet_ntoa(packed[20:24])
    return ""


def _ipv6(root: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in _text(root / "proc/net/if_inet6").splitlines():
        fields = line.split()
        if len(fields) == 6:
            with contextlib.suppress(ValueError):
                address = ipaddress.IPv6Address(bytes.fromhex(fields[0]))
                if not address.is_link_local:
                    found.setdefault(fields[5], []).append(str(address))
    return found


def network(host: Host) -> Iterator[HostFinding]:
    """Check the interfaces that lead to other nodes."""
    found = interfaces(host.root)
    outer = [one for one in found if one.up and one.addresses and not one.inner]
    facts = {"interfaces": [{"name": i.name, "up": i.up, "addresses": i.addresses, "speed": i.speed} for i in found]}
    texts = [f"{i.name} {i.addresses[0]}" + (f" ({i.speed / 1000:g} Gbit/s)" if i.speed else "") for i in outer]
    if not outer:
        hint = "jobs of several nodes need an interface with an address; one node works without"
        yield HostFinding("interfaces", "info", "only the loopback interface has an address", hint, facts)
    else:
        more = len(outer) > 1
        hint = "name the one that joins the nodes: site.toml, [fabric] interface" if more else ""
        yield HostFinding("interfaces", "ok", ", ".join(texts), hint, facts)


def adapters(host: Host) -> Iterator[HostFinding]:
    """Check the adapters of the known fabrics."""
    rows, kinds, down, mounted = [], set(), [], set()
    known = [(f.name, f.adapter) for f in load_fabrics().values() if f.adapter]
    classes = dict.fromkeys(adapter.sysfs for _, adapter in known)
    for device in (d for name in classes for d in _entries(host.root / "sys/class" / name)):
        driver = os.path.basename(os.path.realpath(device / "device/driver"))
        found = [
            (name, adapter)
            for name, adapter in known
            if adapter.sysfs == device.parent.name and adapter.driver in ("", driver)
        ]
        if not found:
            continue
        # A fabric that names the driver takes precedence over one that accepts the whole class.
        name, adapter = max(found, key=lambda row: row[1].driver)
        ports = [
            (_text(port / "link_layer"), _text(port / "state"), _text(port / "rate"))
            for port in _entries(device / "ports")
        ]
        kind = next((adapter.link_layers[p[0]] for p in ports if p[0] in adapter.link_layers), name)
        kinds.add(kind)
        mounted |= {adapter.mounted} - {""}
        active = any("ACTIVE" in state for _, state, _ in ports)
        rate = next((rate for _, _, rate in ports if rate), "")
        rows.append(f"{device.name} ({kind}{f', {rate}' if rate else ''})")
        down += [] if active or not ports else [device.name]
    facts = {"adapters": rows, "kinds": sorted(kinds), "down": down}
    if not rows:
        *names, last = (name for _, adapter in known for name in adapter.called)
        text = f"no {', '.join(names)} or {last}"
        yield HostFinding("adapters", "info", text, facts=facts)
    elif down:
        hint = "see ibstat, or let the administrator look at cable and switch"
        yield HostFinding("adapters", "warn", f"{', '.join(rows)}; not active: {', '.join(down)}", hint, facts)
    else:
        absent = ", ".join(sorted(f for f in mounted if not (host.root / f.lstrip("/")).is_dir()))
        hint = f"pass {absent} into this container" if absent else ""
        status: Status = "warn" if absent else "ok"
        text = ", ".join(rows) + (f"; {absent} is not here" if absent else "")
        yield HostFinding("adapters", status, text, hint, facts)


def libfabric(host: Host) -> Iterator[HostFinding]:
    """Check the providers of the host's libfabric."""
    vendors = [fabric.fi_info for fabric in load_fabrics().values() if fabric.fi_info]
    tool = find("fi_info", host.variables, ":".join(["/usr/sbin", "/sbin", *vendors]))
    if tool is None:
        yield HostFinding("libfabric", "info", "no fi_info; artifacts bring their own libfabric, but for Slingshot")
        return
    code, said = run_probe([tool, "-l"], host.variables)
    providers = [line.strip().rstrip(":") for line in said.splitlines() if line.strip().endswith(":")]
    if code != 0:
        yield HostFinding("libfabric", "warn", f"{tool}: {first_line(said)}")
        return
    facts = {"path": tool, "providers": providers}
    yield HostFinding("libfabric", "ok", f"providers {', '.join(providers)} ({tool})", facts=facts)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except (OSError, ValueError):
        return ""
