"""The libraries of this host's GPU driver, which images do not contain.

Not run on a host with a GPU yet. Source: the driver's README, "Installed components"; nvidia-container-cli(1).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Mapping

from envbuild import process

# Library → the soname that programs load; the driver's own files end in its version.
_SONAMES = {
    "libcuda": "libcuda.so.1",
    "libcudadebugger": "libcudadebugger.so.1",
    "libnvidia-ml": "libnvidia-ml.so.1",
    "libnvidia-nvvm": "libnvidia-nvvm.so.4",
    "libnvidia-ptxjitcompiler": "libnvidia-ptxjitcompiler.so.1",
}
# Programs load this library by its full file name.
_VERSIONED = "libnvidia-gpucomp"
_FILE = re.compile(r"(lib[\w-]+)\.so(\.[\d.]+)?")
_CACHED = re.compile(r"^\s*(\S+) \((.*)\) => (\S+)$", re.MULTILINE)


def driver_libraries(variables: Mapping[str, str]) -> dict[str, str]:
    """Return name → path of each library of the GPU driver; empty on a host without a driver."""
    search = variables.get("PATH", os.defpath)
    if tool := shutil.which("nvidia-container-cli", path=search):
        listed = process.run([tool, "list", "--libraries"], env=variables, check=False)
        if listed.returncode == 0 and (found := named(listed.stdout.split())):
            return found
    cache = shutil.which("ldconfig", path=f"{search}:/sbin:/usr/sbin")
    return named(cached(process.run([cache, "-p"], check=False).stdout)) if cache else {}


def cached(text: str, machine: str | None = None) -> list[str]:
    """Return the paths in the output of `ldconfig -p` that are for `machine` (default: this host's)."""
    mark = {"x86_64": "x86-64", "aarch64": "AArch64"}.get(machine or os.uname().machine, "")
    return [path for _, flags, path in _CACHED.findall(text) if mark in flags]


def named(paths: Iterable[str]) -> dict[str, str]:
    """Return name → path of the driver's libraries among `paths`: the first of each name that programs load."""
    found: dict[str, str] = {}
    for path in paths:
        match = _FILE.fullmatch(os.path.basename(path))
        if match and match[1] in _SONAMES:
            found.setdefault(_SONAMES[match[1]], path)
        elif match and match[1] == _VERSIONED:
            found.setdefault(os.path.basename(os.path.realpath(path)), path)
    return found
