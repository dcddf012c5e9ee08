"""Checks of kernel features: image mounts, rootless namespaces, FUSE.

Image mounts are tested by a launch of a tiny image, as in verification. Sources: the kernel's
fs/squashfs/Kconfig, user_namespaces(7), subuid(5).
"""

from __future__ import annotations

import contextlib
import getpass
import gzip
import json
import os
import platform
import tempfile
from collections.abc import Iterator
from pathlib import Path

from envbuild.doctor.launch_trials import ANSWERS, COMPRESSORS, START
from envbuild.doctor.model import Host, HostFinding
from envbuild.doctor.probe import find, first_line, run_probe

_CONFIGURED = {"gzip": "ZLIB", "lzo": "LZO", "xz": "XZ", "lz4": "LZ4", "zstd": "ZSTD"}
# Result for a skipped trial: only root mounts images.
_NO = (False, "only root mounts images", "")
EXTRACTED = ("extract", "gzip")
_TRIALS_S = 3.5
_SETTINGS = (
    "user/max_user_namespaces",
    "user/max_mnt_namespaces",
    "kernel/unprivileged_userns_clone",
    "kernel/apparmor_restrict_unprivileged_userns",
)


def launching(host: Host) -> Iterator[HostFinding]:
    """Check envbuild's own launch: squashfs mounts by the kernel, squashfuse, extraction."""
    with tempfile.TemporaryDirectory(prefix="envbuild-doctor-", ignore_cleanup_errors=True) as folder:
        _, trouble = run_probe([*START, folder], host.variables, _TRIALS_S)
        answers = _answers(Path(folder))
    if EXTRACTED not in answers:
        yield HostFinding("own launch", "warn", f"could not be tried: {first_line(trouble)}", "", {"ways": []})
        yield from _configured(host, "not tried")
        return
    works, why, hint = answers[EXTRACTED]
    if not works:
        facts = {"ways": [], "forbidden": _forbidden(host)}
        yield HostFinding("own launch", "warn", why, hint, facts)
        yield from _configured(host, "not tried")
        return
    mounted = [name for name in COMPRESSORS if answers.get(("mount", name), _NO)[0]]
    ways = ["mount"] if mounted else []
    ways += ["squashfuse"] if answers.get(("squashfuse", "gzip"), _NO)[0] else []
    ways.append("extract")
    alone = len(ways) == 1
    slow = "install squashfuse, and let users open /dev/fuse: unpacking is slower"
    what = f"works by {', '.join(ways)}"
    yield HostFinding("own launch", "info" if alone else "ok", what, slow if alone else "", {"ways": ways})
    if mounted:
        lacking = [name for name in COMPRESSORS if name not in mounted]
        what = f"Linux {platform.release()} mounts {', '.join(mounted)}"
        what += f"; not {', '.join(lacking)}" if lacking else ""
        yield HostFinding("squashfs", "ok", what, facts={"kernel": mounted, "by": "mounting"})
    else:
        yield from _configured(host, answers.get(("mount", "gzip"), _NO)[1])


def _answers(folder: Path) -> dict[tuple[str, str], tuple[bool, str, str]]:
    """Return the results that launch_trials.py has written so far, by method and compressor."""
    try:
        lines = (folder / ANSWERS).read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    found = {}
    for line in lines:
        with contextlib.suppress(ValueError):  # an incomplete last line
            way, compressor, works, why, hint = json.loads(line)
            found[way, compressor] = (works, why, hint)
    return found


def _configured(host: Host, why: str) -> Iterator[HostFinding]:
    """Report the kernel configuration of squashfs when mounts could not be tested."""
    text = _kernel_config(host.root)
    if text is None:
        yield HostFinding("squashfs", "info", f"not known ({why}; the kernel's configuration is not here)")
        return
    on = {line.partition("=")[0] for line in text.splitlines() if line.endswith(("=y", "=m"))}
    there = [n for n, option in _CONFIGURED.items() if f"CONFIG_SQUASHFS_{option}" in on]
    if "CONFIG_SQUASHFS" not in on:
        there = []
    what = f"Linux {platform.release()} has {', '.join(there) or 'no squashfs'} by its configuration ({why})"
    yield HostFinding("squashfs", "ok" if there else "warn", what, facts={"kernel": there, "by": "configuration"})


def _kernel_config(root: Path) -> str | None:
    with contextlib.suppress(OSError, EOFError):
        return gzip.decompress((root / "proc/config.gz").read_bytes()).decode(errors="replace")
    for place in (f"boot/config-{platform.release()}", f"lib/modules/{platform.release()}/config"):
        with contextlib.suppress(OSError):
            return (root / place).read_text(errors="replace")
    return None


def _forbidden(host: Host) -> dict[str, str]:
    """Return the current kernel settings that restrict namespaces."""
    found = {}
    for name in _SETTINGS:
        with contextlib.suppress(OSError):
            found[name.replace("/", ".")] = (host.root / "proc/sys" / name).read_text().strip()
    return found


def fuse(host: Host) -> Iterator[HostFinding]:
    """Check whether /dev/fuse can be opened."""
    device = host.root / "dev/fuse"
    if not device.exists():
        yield HostFinding(
            "/dev/fuse",
            "info",
            "not there: nothing is mounted by squashfuse",
            "modprobe fuse; in a container, pass --device /dev/fuse",
        )
        return
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        yield HostFinding("/dev/fuse", "info", f"{error.strerror}", "let the administrator run `chmod 0666 /dev/fuse`")
        return
    yield HostFinding("/dev/fuse", "ok", "can be opened", facts={"opens": True})


def subordinate_ids(host: Host) -> Iterator[HostFinding]:
    """Check subordinate user and group ids, which rootless Docker, Podman and apptainer --fakeroot need."""
    if os.geteuid() == 0:
        yield HostFinding("subuid", "info", "not needed by root")
        return
    try:
        names = {getpass.getuser(), str(os.getuid())}
    except (KeyError, OSError):  # for example a container's user without a name
        names = {str(os.getuid())}
    lacking = []
    for file in ("subuid", "subgid"):
        try:
            text = (host.root / "etc" / file).read_text(errors="replace")
        except OSError:
            text = ""
        if not names & {line.partition(":")[0] for line in text.splitlines()}:
            lacking.append(f"/etc/{file}")
    tools = [t for t in ("newuidmap", "newgidmap") if find(t, host.variables) is None]
    if lacking or tools:
        parts = ([f"nothing for this user in {' and '.join(lacking)}"] if lacking else []) + (
            [f"{' and '.join(tools)} missing"] if tools else []
        )
        hint = "only rootless Docker, Podman and `apptainer build --fakeroot` need them, envbuild does not"
        yield HostFinding("subuid", "info", "; ".join(parts), hint, {"there": False})
        return
    yield HostFinding("subuid", "ok", "numbers for this user, newuidmap and newgidmap are here", facts={"there": True})
