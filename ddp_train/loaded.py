"""Network use of this process: mapped network libraries and TCP connections.

Sources: proc_pid_maps(5), proc_pid_net(5) and the kernel's Documentation/networking/proc_net_tcp.rst,
getifaddrs(3).
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
import sys
from pathlib import Path

# Libraries that carry the ranks' traffic, or are loaded for it.
_LIBRARY = re.compile(r"lib(nccl|rccl|torch_cuda|torch_hip|fabric|cxi|efa|ibverbs)(-[\w-]+|_[\w-]+)?\.so(\.[\w.]+)?")
_ESTABLISHED = "01"
_PROC = Path("/proc/self")


def mapped_libraries(proc: Path = _PROC) -> list[str]:
    """Return the sorted paths of the mapped NCCL, plugin, libfabric and GPU torch libraries."""
    libraries = set()
    for line in _lines(proc / "maps"):
        path = line.rstrip("\n").split(None, 5)[5:]
        if path and _LIBRARY.fullmatch(os.path.basename(path[0]).replace(" (deleted)", "")):
            libraries.add(path[0])
    return sorted(libraries)


def connections(proc: Path = _PROC) -> list[list[str]]:
    """Return [own address, peer address], each `address:port`, of this process's established TCP connections."""
    own = set()
    for entry in _listed(proc / "fd"):
        try:
            target = os.readlink(entry)
        except OSError:  # closed in the meantime
            continue
        if target.startswith("socket:["):
            own.add(target[8:-1])
    pairs = set()
    for name in ("tcp", "tcp6"):
        for line in _lines(proc / "net" / name)[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _ESTABLISHED and fields[9] in own:
                pairs.add((_address(fields[1]), _address(fields[2])))
    return [list(pair) for pair in sorted(pairs)]


class _SockAddr(ctypes.Structure):
    _fields_ = [("family", ctypes.c_uint16), ("data", ctypes.c_uint8 * 26)]


class _IfAddrs(ctypes.Structure):
    pass


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.POINTER(_SockAddr)),
    ("netmask", ctypes.c_void_p),
    ("other", ctypes.c_void_p),
    ("data", ctypes.c_void_p),
]


def interfaces() -> dict[str, list[str]]:
    """Return the addresses of each network interface; empty if the C library lacks getifaddrs or it fails."""
    by_name: dict[str, list[str]] = {}
    first = ctypes.POINTER(_IfAddrs)()
    try:
        libc = ctypes.CDLL(None)
        if libc.getifaddrs(ctypes.byref(first)) != 0:
            return {}
    except (OSError, AttributeError):
        return {}
    try:
        entry = first
        while entry:
            address = entry.contents
            if address.address:
                family, data = address.address.contents.family, bytes(address.address.contents.data)
                name = address.name.decode(errors="replace")
                # The family is followed by a port, for IPv6 also by the flow label, and then by the address.
                if family == socket.AF_INET:
                    by_name.setdefault(name, []).append(str(ipaddress.ip_address(data[2:6])))
                elif family == socket.AF_INET6:
                    by_name.setdefault(name, []).append(str(ipaddress.ip_address(data[6:22])))
            entry = address.next
    finally:
        libc.freeifaddrs(first)
    return by_name


def _address(text: str) -> str:
    """Return `address:port` from the kernel's `0100007F:1F90`: 32-bit words in this machine's byte order."""
    words, port = text.split(":")
    raw = b"".join(int(words[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(words), 8))
    address = ipaddress.ip_address(raw)
    plain = getattr(address, "ipv4_mapped", None) or address
    return f"[{plain}]:{int(port, 16)}" if plain.version == 6 else f"{plain}:{int(port, 16)}"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []
