"""Checks of kernel features: image mounts, rootless namespaces, FUSE.

Image mounts are tested by launches of tiny images, as in verification, in a separate process: the doctor's checks
run in threads, and launches run code between fork and exec, which is not safe in a process with threads. Sources:
the kernel's fs/squashfs/Kconfig, user_namespaces(7), subuid(5).
"""

from __future__ import annotations

import contextlib
import getpass
import gzip
import io
import json
import os
import platform
import struct
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from envbuild.base.errors import EnvbuildError
from envbuild.doctor.probe import Host, HostFinding, find, first_line, read_text, run_probe
from envbuild.environment import Environment
from envbuild.image.squashfs.model import NAMES, codec_of
from envbuild.image.squashfs.tables import data_start, write_tables
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site
from envbuild.store.store import Store

# The compressors that Linux knows.
COMPRESSORS = {name: number for number, name in NAMES.items() if name != "lzma"}
# Imports only envbuild and Python's own modules, independent of the caller's variables and current folder.
_BOOT = "import sys; sys.path.insert(0, sys.argv.pop(1)); from envbuild.doctor.kernel import main; main()"
_START = (sys.executable, "-I", "-c", _BOOT, str(Path(__file__).parents[2]))
_ANSWERS = "answers"
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
        _, trouble = run_probe([*_START, folder], host.variables, _TRIALS_S)
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
    """Return the results that `main` has written so far, by method and compressor."""
    found = {}
    for line in read_text(folder / _ANSWERS).splitlines():
        with contextlib.suppress(ValueError):  # an incomplete last line
            way, compressor, works, why, hint = json.loads(line)
            found[way, compressor] = (works, why, hint)
    return found


def _configured(host: Host, why: str) -> HostFinding:
    """Report the kernel configuration of squashfs when mounts could not be tested."""
    release, text = platform.release(), ""
    with contextlib.suppress(OSError, EOFError):
        text = gzip.decompress((host.root / "proc/config.gz").read_bytes()).decode(errors="replace")
    places = (f"boot/config-{release}", f"lib/modules/{release}/config")
    text = text or next(filter(None, (read_text(host.root / place) for place in places)), "")
    if not text:
        return HostFinding("squashfs", "info", f"not known ({why}; the kernel's configuration is not here)")
    on = {line.partition("=")[0] for line in text.splitlines() if line.endswith(("=y", "=m"))}
    options = {name: "ZLIB" if name == "gzip" else name.upper() for name in COMPRESSORS}
    there = [name for name, option in options.items() if {"CONFIG_SQUASHFS", f"CONFIG_SQUASHFS_{option}"} <= on]
    what = f"Linux {release} has {', '.join(there) or 'no squashfs'} by its configuration ({why})"
    return HostFinding("squashfs", "ok" if there else "warn", what, facts={"kernel": there, "by": "configuration"})


def main() -> None:
    """Write each result to FOLDER/answers (FOLDER is the first argument), one line each, as soon as it is known."""
    from envbuild.verify.own_runtime import EXTRACT, MOUNT, SQUASHFUSE

    folder = Path(sys.argv[1])
    mounts = [(MOUNT, name) for name in COMPRESSORS] if os.geteuid() == 0 else []
    with (folder / _ANSWERS).open("w", encoding="utf-8") as answers:
        for way, compressor in ((EXTRACT, "gzip"), (SQUASHFUSE, "gzip"), *mounts):
            said = [way, compressor, *_attempt(folder, way, compressor)]
            answers.write(json.dumps(said) + "\n")
            answers.flush()


def _attempt(folder: Path, way: str, compressor: str) -> tuple[bool, str, str]:
    """Return (success, reason of a failure, hint) of a launch of a tiny image by the method `way`."""
    from envbuild.contract.kinds import ENROOT
    from envbuild.verify.image_file import ImageFile
    from envbuild.verify.own_runtime import own_runtime

    image = folder / f"{compressor}.sqsh"
    image.write_bytes(tiny_image(compressor))
    store = folder / "store"
    environment = Environment(dict(os.environ), Site(store=store), PipConfig(), Store(store))
    try:
        own_runtime(ImageFile(image, ENROOT.name, 0, compressor), way, environment)
    except EnvbuildError as error:
        return False, error.message.splitlines()[0], error.hint or ""
    return True, "", ""


def tiny_image(compressor: str) -> bytes:
    """Return an empty squashfs with uncompressed blocks: only its superblock names the compressor."""
    # Only lz4 requires compressor options: version 1, no flags.
    options = struct.pack("<II", 1, 0) if compressor == "lz4" else b""
    codec = replace(codec_of("xz"), number=COMPRESSORS[compressor], options=options, compress=bytes)
    image = io.BytesIO()
    image.seek(data_start(codec))
    write_tables(image, 0, [], [], codec, 0)
    return image.getvalue()


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
