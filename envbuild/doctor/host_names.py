"""Checks of host name, clock and locale, common causes of failures in multi-node jobs."""

from __future__ import annotations

import ctypes
import ipaddress
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import envbuild
from envbuild.doctor.model import Host, HostFinding
from envbuild.doctor.probe import find, first_line, run_probe

# adjtimex(2): the state of an unsynchronised clock.
_TIME_ERROR = 5


def own_name(host: Host) -> Iterator[HostFinding]:
    """Check whether this host's name resolves to an address that other hosts reach, not to Debian's 127.0.1.1."""
    name = socket.gethostname()
    in_file = [
        line.partition("#")[0].split()[0]
        for line in _text(host.root / "etc/hosts").splitlines()
        if name in line.partition("#")[0].split()[1:]
    ]
    loops = [address for address in in_file if _loopback(address)]
    facts = {"hostname": name, "hosts": in_file}
    if loops:
        what = f"/etc/hosts gives {loops[0]} for {name}"
        hint = (
            "harmless to jobs that envbuild writes, which pass addresses on; elsewhere torchrun's nodes "
            f"meet at {loops[0]} or hang: give {name} its own address in /etc/hosts"
        )
        yield HostFinding("own name", "warn", what, hint, facts)
        return
    try:
        found = sorted({str(row[4][0]) for row in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        hint = f"give {name} its address in /etc/hosts or DNS: torchrun without --local-addr stops at once"
        yield HostFinding("own name", "warn", f"{name} means no address: {why}", hint, facts)
        return
    outer = [address for address in found if not _loopback(address)]
    if not outer:
        hint = f"give {name} its own address in /etc/hosts or DNS"
        yield HostFinding("own name", "warn", f"{name} means {', '.join(found)} alone", hint, facts)
        return
    yield HostFinding("own name", "ok", f"{name} means {', '.join(found)}", facts={**facts, "addresses": found})


def _loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def clock(host: Host) -> Iterator[HostFinding]:
    """Check whether the clock is plausible and synchronised."""
    newest = max((path.stat().st_mtime for path in Path(envbuild.__file__).parent.glob("*.py")), default=0.0)
    now = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime())
    if time.time() < newest - 86400:
        hint = "set the clock (chrony, ntpd): certificates are refused and builds are dated wrongly"
        yield HostFinding("clock", "warn", f"{now} is before envbuild itself was written", hint)
        return
    state = None
    function = getattr(ctypes.CDLL(None), "adjtimex", None)
    if function is not None:
        state = function(ctypes.create_string_buffer(512))  # struct timex, all 0: read only
    if state == _TIME_ERROR:
        hint = "on cluster nodes let chrony or ntpd run; in a virtual machine its host may do it"
        yield HostFinding(
            "clock", "info", f"{now}; the kernel does not report a synchronised clock", hint, {"synchronised": False}
        )
        return
    yield HostFinding("clock", "ok", now, facts={"synchronised": state is not None and state >= 0})


def locale(host: Host) -> Iterator[HostFinding]:
    """Check whether file names and output use UTF-8, and whether the configured locale exists."""
    named = next((host.variables[n] for n in ("LC_ALL", "LC_CTYPE", "LANG") if host.variables.get(n)), "")
    encoding = sys.getfilesystemencoding()
    if encoding.lower() != "utf-8":
        yield HostFinding(
            "locale", "warn", f"{named or 'none'}: names of files are {encoding}", "export LC_ALL=C.UTF-8"
        )
        return
    tool = find("locale", host.variables)
    if named and tool:
        env = {key: value for key, value in host.variables.items() if key != "LC_ALL"}
        # `run_probe` sets LC_ALL, but the check is about the caller's locale.
        code, said = run_probe([tool, "-a"], env)
        known = {_plain(line) for line in said.splitlines()} if code == 0 else set()
        if known and _plain(named) not in known | {"c", "posix"}:
            hint = "export LC_ALL=C.UTF-8, or let the administrator generate it (locale-gen)"
            yield HostFinding("locale", "warn", f"{first_line(named)} is not installed", hint)
            return
    yield HostFinding("locale", "ok", f"{first_line(named) or 'none named'}, {encoding}")


def _plain(name: str) -> str:
    return name.strip().lower().replace("-", "")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""


def who(host: Host) -> Iterator[HostFinding]:
    """Report the current user."""
    root = os.geteuid() == 0
    yield HostFinding(
        "user", "ok", "root" if root else f"user {os.getuid()}; nothing here needs root", facts={"uid": os.getuid()}
    )
