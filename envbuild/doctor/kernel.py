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
from envbuild.doctor.probe import Host, HostFinding, find, first_line, read_text, run_probe

_CONFIGURED = {"gzip": "ZLIB", "lzo": "LZO", "xz": "XZ", "lz4": "LZ4", "zstd": "ZSTD"}
# Result for a skipped trial: only root mounts images.
_NO = (False, "only root mounts images", "")
_EXTRACTED = ("extract", "gzip")
_TRIALS_S = 3.5
# Settings of the kernel that restrict namespaces.
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
    works, why, hint = answers.get(_EXTRACTED, (False, f"could not be tried: {first_line(trouble)}", ""))
    if not works:
        settings = {name.replace("/", "."): read_text(host.root / "proc/sys" / name).strip() for name in _SETTINGS}
        forbidden = {name: value for name, value in settings.items() if value}
        facts = {"ways": [], "forbidden": forbidden} if _EXTRACTED in answers else {"ways": []}
        yield HostFinding("own launch", "warn", why, hint, facts)
        yield _configured(host, "not tried")
        return
    mounted = [name for name in COMPRESSORS if answers.get(("mount", name), _NO)[0]]
    by_fuse, _, _ = answers.get(("squashfuse", "gzip"), _NO)
    possible = {"mount": bool(mounted), "squashfuse": by_fuse, "extract": True}
    ways = [way for way, works in possible.items() if works]
    what = f"works by {', '.join(ways)}"
    if len(ways) > 1:
        yield HostFinding("own launch", "ok", what, facts={"ways": ways})
    else:
        slow = "install squashfuse, and let users open /dev/fuse: unpacking is slower"
        yield HostFinding("own launch", "info", what, slow, {"ways": ways})
    if mounted:
        lacking = ", ".join(name for name in COMPRESSORS if name not in mounted)
        what = f"Linux {platform.release()} mounts {', '.join(mounted)}" + (f"; not {lacking}" if lacking else "")
        yield HostFinding("squashfs", "ok", what, facts={"kernel": mounted, "by": "mounting"})
    else:
        yield _configured(host, answers.get(("mount", "gzip"), _NO)[1])


def _answers(folder: Path) -> dict[tuple[str, str], tuple[bool, str, str]]:
    """Return the results that launch_trials.py has written so far, by method and compressor."""
    found = {}
    for line in read_text(folder / ANSWERS).splitlines():
        with contextlib.suppress(ValueError):  # an incomplete last line
            way, compressor, works, why, hint = json.loads(line)
            found[way, compressor] = (works, why, hint)
    return found


def _configured(host: Host, why: str) -> HostFinding:
    """Report the kernel configuration of squashfs when mounts could not be tested."""
    text = _kernel_config(host.root)
    if not text:
        return HostFinding("squashfs", "info", f"not known ({why}; the kernel's configuration is not here)")
    on = {line.partition("=")[0] for line in text.splitlines() if line.endswith(("=y", "=m"))}
    there = [n for n, option in _CONFIGURED.items() if {"CONFIG_SQUASHFS", f"CONFIG_SQUASHFS_{option}"} <= on]
    what = f"Linux {platform.release()} has {', '.join(there) or 'no squashfs'} by its configuration ({why})"
    return HostFinding("squashfs", "ok" if there else "warn", what, facts={"kernel": there, "by": "configuration"})


def _kernel_config(root: Path) -> str:
    with contextlib.suppress(OSError, EOFError):
        return gzip.decompress((root / "proc/config.gz").read_bytes()).decode(errors="replace")
    release = platform.release()
    return read_text(root / f"boot/config-{release}") or read_text(root / f"lib/modules/{release}/config")


def fuse(host: Host) -> list[HostFinding]:
    """Check whether /dev/fuse can be opened."""
    device = host.root / "dev/fuse"
    if not device.exists():
        hint = "modprobe fuse; in a container, pass --device /dev/fuse"
        return [HostFinding("/dev/fuse", "info", "not there: nothing is mounted by squashfuse", hint)]
    try:
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        hint = "let the administrator run `chmod 0666 /dev/fuse`"
        return [HostFinding("/dev/fuse", "info", f"{error.strerror}", hint)]
    return [HostFinding("/dev/fuse", "ok", "can be opened", facts={"opens": True})]


def subordinate_ids(host: Host) -> list[HostFinding]:
    """Check subordinate user and group ids, which rootless Docker, Podman and apptainer --fakeroot need."""
    if os.geteuid() == 0:
        return [HostFinding("subuid", "info", "not needed by root")]
    names = {str(os.getuid())}
    with contextlib.suppress(KeyError, OSError):  # for example a container's user without a name
        names.add(getpass.getuser())
    lacking = []
    for file in ("etc/subuid", "etc/subgid"):
        if not names & {line.partition(":")[0] for line in read_text(host.root / file).splitlines()}:
            lacking.append(f"/{file}")
    tools = [tool for tool in ("newuidmap", "newgidmap") if find(tool, host.variables) is None]
    if not lacking and not tools:
        what = "numbers for this user, newuidmap and newgidmap are here"
        return [HostFinding("subuid", "ok", what, facts={"there": True})]
    parts = [f"nothing for this user in {' and '.join(lacking)}"] if lacking else []
    parts += [f"{' and '.join(tools)} missing"] if tools else []
    hint = "only rootless Docker, Podman and `apptainer build --fakeroot` need them, envbuild does not"
    return [HostFinding("subuid", "info", "; ".join(parts), hint, {"there": False})]
