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
from dataclasses import dataclass
from pathlib import Path

from envbuild.doctor.probe import Host, HostFinding, find, first_line, read_text, run_probe
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
    def outer(self) -> bool:
        """Whether the interface leads to other nodes."""
        return self.up and bool(self.addresses) and not self.name.startswith(_INNER)


def interfaces(root: Path = Path("/")) -> list[Interface]:
    """Return the interfaces of this network namespace, sorted by name."""
    sixes = _ipv6(root)
    found = []
    for name in sorted(name for _, name in socket.if_nameindex()):
        folder = root / "sys/class/net" / name
        state, speed = read_text(folder / "operstate").strip(), read_text(folder / "speed").strip()
        addresses = (*_ipv4(name), *sixes.get(name, ()))
        up = state == "up" or (state in ("unknown", "") and bool(addresses))
        found.append(Interface(name, up, addresses, int(speed) if speed.isdigit() and int(speed) else None))
    return found


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        packed = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", os.fsencode(name)[:15]))
        return [socket.inet_ntoa(packed[20:24])]
    return []


def _ipv6(root: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in read_text(root / "proc/net/if_inet6").splitlines():
        fields = line.split()
        if len(fields) == 6:
            with contextlib.suppress(ValueError):
                address = ipaddress.IPv6Address(bytes.fromhex(fields[0]))
                if not address.is_link_local:
                    found.setdefault(fields[5], []).append(str(address))
    return found


def network(host: Host) -> list[HostFinding]:
    """Check the interfaces that lead to other nodes."""
    found = interfaces(host.root)
    facts = {"interfaces": [{"name": i.name, "up": i.up, "addresses": i.addresses, "speed": i.speed} for i in found]}
    outer = [one for one in found if one.outer]
    if not outer:
        hint = "jobs of several nodes need an interface with an address; one node works without"
        return [HostFinding("interfaces", "info", "only the loopback interface has an address", hint, facts)]
    texts = [f"{i.name} {i.addresses[0]}" + (f" ({i.speed / 1000:g} Gbit/s)" if i.speed else "") for i in outer]
    hint = "name the one that joins the nodes: site.toml, [fabric] interface" if len(outer) > 1 else ""
    return [HostFinding("interfaces", "ok", ", ".join(texts), hint, facts)]


def adapters(host: Host) -> list[HostFinding]:
    """Check the adapters of the known fabrics."""
    rows, kinds, down, mounted = [], set(), [], set()
    known = [(fabric.name, fabric.adapter) for fabric in load_fabrics().values() if fabric.adapter]
    classes = dict.fromkeys(adapter.sysfs for _, adapter in known)
    for device in (device for name in classes for device in sorted((host.root / "sys/class" / name).glob("*"))):
        driver = os.path.basename(os.path.realpath(device / "device/driver"))
        found = [row for row in known if row[1].sysfs == device.parent.name and row[1].driver in ("", driver)]
        if not found:
            continue
        # A fabric that names the driver takes precedence over one that accepts the whole class.
        name, adapter = max(found, key=lambda row: row[1].driver)
        ports = [
            [read_text(port / file).strip() for file in ("link_layer", "state", "rate")]
            for port in sorted((device / "ports").glob("*"))
        ]
        kind = next((adapter.link_layers[layer] for layer, _, _ in ports if layer in adapter.link_layers), name)
        kinds.add(kind)
        mounted |= {adapter.mounted} - {""}
        rate = next((f", {rate}" for _, _, rate in ports if rate), "")
        rows.append(f"{device.name} ({kind}{rate})")
        if ports and not any("ACTIVE" in state for _, state, _ in ports):
            down.append(device.name)
    facts = {"adapters": rows, "kinds": sorted(kinds), "down": down}
    text = ", ".join(rows)
    if not rows:
        *names, last = (name for _, adapter in known for name in adapter.called)
        return [HostFinding("adapters", "info", f"no {', '.join(names)} or {last}", facts=facts)]
    if down:
        hint = "see ibstat, or let the administrator look at cable and switch"
        return [HostFinding("adapters", "warn", f"{text}; not active: {', '.join(down)}", hint, facts)]
    if absent := ", ".join(sorted(f for f in mounted if not (host.root / f.lstrip("/")).is_dir())):
        hint = f"pass {absent} into this container"
        return [HostFinding("adapters", "warn", f"{text}; {absent} is not here", hint, facts)]
    return [HostFinding("adapters", "ok", text, facts=facts)]


def libfabric(host: Host) -> list[HostFinding]:
    """Check the providers of the host's libfabric."""
    vendors = [fabric.fi_info for fabric in load_fabrics().values() if fabric.fi_info]
    tool = find("fi_info", host.variables, ":".join(["/usr/sbin", "/sbin", *vendors]))
    if tool is None:
        what = "no fi_info; artifacts bring their own libfabric, but for Slingshot"
        return [HostFinding("libfabric", "info", what)]
    code, said = run_probe([tool, "-l"], host.variables)
    if code != 0:
        return [HostFinding("libfabric", "warn", f"{tool}: {first_line(said)}")]
    providers = [line.strip().rstrip(":") for line in said.splitlines() if line.strip().endswith(":")]
    facts = {"path": tool, "providers": providers}
    return [HostFinding("libfabric", "ok", f"providers {', '.join(providers)} ({tool})", facts=facts)]
