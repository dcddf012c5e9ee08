"""The variables that make programs in an artifact use its fabric.

How NCCL finds its plugin: since 2.21, NCCL_NET_PLUGIN may be a path for dlopen (up to 254 characters since
2.26); before, it is only the suffix of a name that is searched along LD_LIBRARY_PATH. Source: NVIDIA/nccl,
src/net.cc of v2.18.5-1 and v2.21.5-1, src/plugin/plugin_open.cc and src/plugin/net.cc of v2.26.2-1 to
v2.29.7-1. The plugin is libnccl-net.so before aws-ofi-nccl 1.15 and libnccl-net-ofi.so since; NCCL_NET="AWS
Libfabric" selects it in every version (src/nccl_ofi_interface_nvidia.c* of v1.9.2-aws to v1.21.1).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath

from envbuild.artifacts.state import BuiltLayer
from envbuild.fabrics import Fabric
from envbuild.recipe.accelerators import CUDA, Accelerator
from envbuild.site.settings import FabricTable

PLUGIN = "aws-ofi-nccl"
# NCCL stores a plugin's name in 255 bytes, including the NUL.
_LONGEST_NAME = 254


def fabric_variables(fabric: Fabric, site: FabricTable) -> dict[str, str]:
    """Return the variables of a GPU job: NCCL_NET, the site's interface, the fabric's variables, the site's variables.

    Later ones override earlier ones.
    """
    found = {"NCCL_NET": fabric.nccl_net} if fabric.nccl_net else {}
    if site.interface:
        found["NCCL_SOCKET_IFNAME"] = site.interface
    for name, value in fabric.variables.items():
        if "{interface}" not in value:
            found[name] = value
        elif site.interface:
            found[name] = value.replace("{interface}", site.interface)
    return {**found, **site.variables}


def plugin_variables(
    layers: Sequence[BuiltLayer], root: PurePath, nccl: str, path: str = "", *, accelerator: Accelerator = CUDA
) -> dict[str, str]:
    """Return the variables by which NCCL finds its plugin, and the plugin the host's libfabric.

    `nccl` is the version of NCCL ("" if unknown), or of RCCL, by `accelerator`. `path` is the value that
    LD_LIBRARY_PATH has otherwise; `root` is the folder of the environment. Empty for an artifact without plugin
    and libfabric.
    """
    by_name = {layer.name: layer for layer in layers}
    folders: list[str] = []
    found: dict[str, str] = {}
    if plugin := by_name.get(PLUGIN):
        folder = PurePath(plugin.path) / "lib" if plugin.path else root / "lib"
        end = "-ofi" if _at_least(plugin.version, (1, 15)) else ""
        whole = str(folder / f"{accelerator.net_plugin}{end}.so")
        if _at_least(nccl, (2, 21)) and len(whole.encode()) <= _LONGEST_NAME:
            found["NCCL_NET_PLUGIN"] = whole
        else:
            folders.append(str(folder))
            if end:
                found["NCCL_NET_PLUGIN"] = "ofi"
    if (host := by_name.get("libfabric")) and host.path:
        folders += [f"{host.path}/lib64", f"{host.path}/lib"]
    if folders:
        found["LD_LIBRARY_PATH"] = ":".join([*folders, *([path] if path else [])])
    return found


def differing(wanted: Mapping[str, str], env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Return the variables whose value differs in the caller's environment: name → (the caller's, the wanted one)."""
    return {
        name: (env[name], value)
        for name, value in wanted.items()
        if name != "LD_LIBRARY_PATH" and env.get(name, value) != value
    }


def _at_least(version: str, least: tuple[int, ...]) -> bool:
    """Return whether `version` is `least` or newer; an unknown version counts as newer."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(least)])
    return not numbers or numbers >= least
