"""The variables by which a launch in an artifact uses its fabric.

How NCCL finds its plugin: from 2.21 on NCCL_NET_PLUGIN may be a path (dlopen; up to 254 characters from 2.26 on),
before, only the end of a name that is searched along LD_LIBRARY_PATH. Source: NVIDIA/nccl, src/net.cc of v2.18.5-1
and v2.21.5-1, src/plugin/plugin_open.cc and src/plugin/net.cc of v2.26.2-1 to v2.29.7-1. The plugin is
libnccl-net.so before aws-ofi-nccl 1.15 and libnccl-net-ofi.so since; it answers to NCCL_NET="AWS Libfabric" in every
version (src/nccl_ofi_interface_nvidia.c* of v1.9.2-aws to v1.21.1).
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
# NCCL keeps a plugin's name in 255 bytes, with the NUL.
_LONGEST_NAME = 254


def fabric_variables(fabric: Fabric, site: FabricTable) -> dict[str, str]:
    """What a job on GPUs is given: NCCL_NET, the fabric's variables, the site's interface, and last, over all of
    them, the site's own variables."""
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
    layers: Sequence[BuiltLayer],
    root: PurePath,
    nccl: str,
    path: str = "",
    *,
    accelerator: Accelerator = CUDA,
) -> dict[str, str]:
    """How NCCL of version `nccl` ("" if unknown), or RCCL by `accelerator`, finds the plugin in the environment at
    `root`, and the plugin the host's libfabric. `path` is what LD_LIBRARY_PATH would be without. Empty for an artifact
    without them."""
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
    """Variables that the caller's environment has with another value: name → (the caller's, the wanted one)."""
    return {
        name: (env[name], value)
        for name, value in wanted.items()
        if name != "LD_LIBRARY_PATH" and env.get(name, value) != value
    }


def _at_least(version: str, least: tuple[int, ...]) -> bool:
    """Whether `version` is `least` or newer; an unknown one is taken for new."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(least)])
    return not numbers or numbers >= least
