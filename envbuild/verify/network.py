"""The network of a job: the variables that make programs in an artifact use its fabric.

How NCCL finds its plugin: since 2.21, NCCL_NET_PLUGIN may be a path for dlopen (up to 254 characters since
2.26); before, it is only the suffix of a name that is searched along LD_LIBRARY_PATH. Source: NVIDIA/nccl,
src/net.cc of v2.18.5-1 and v2.21.5-1, src/plugin/plugin_open.cc and src/plugin/net.cc of v2.26.2-1 to
v2.29.7-1. The plugin is libnccl-net.so before aws-ofi-nccl 1.15 and libnccl-net-ofi.so since; NCCL_NET="AWS
Libfabric" selects it in every version (src/nccl_ofi_interface_nvidia.c* of v1.9.2-aws to v1.21.1).

NCCL_HOSTID makes NCCL treat simulated nodes on one host as separate hosts (src/misc/utils.cc), so that their
traffic uses the network and not shared memory; ranks of different nodes may then share a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from envbuild.base.progress import Log
from envbuild.contract.state import BuiltLayer, State
from envbuild.fabrics import Fabric, find_fabric
from envbuild.recipe.accelerators import CUDA, Accelerator
from envbuild.site.tables import FabricTable
from envbuild.verify.model import Nodes, Settings, Subject

PLUGIN = "aws-ofi-nccl"
# NCCL stores a plugin's name in 255 bytes, including the NUL.
_LONGEST_NAME = 254
_NCCL_WHEEL = re.compile(r"nvidia-nccl-cu\d+|nccl")
# Read by the trainer (ddp_train/chips.py).
_CHIPS = "DDP_TRAIN_CHIPS"
_DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET"}


@dataclass(frozen=True, slots=True)
class Network:
    """The fabric, the variables that all nodes of a job get for it, and the GPUs that each node may use (() for all).

    `replaced` are the caller's variables that differ in the job: name → (the caller's value, the job's value).
    """

    fabric: Fabric
    accelerator: Accelerator
    variables: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[tuple[str, ...], ...] = ()
    replaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def of_node(self, node: int, name: str, work: str) -> dict[str, str]:
        """Return the variables of `node` in the job `name`, whose NCCL logs go into the folder `work`."""
        if not self.accelerator.gpu:
            return {}
        found = {**self.variables, "NCCL_HOSTID": f"envbuild-{name}-{node}"}
        if self.gpus:
            found[self.accelerator.visible] = ",".join(self.gpus[node])
        return {**found, **_DEBUG, "NCCL_DEBUG_FILE": f"{work}/{name}-nccl{node}.%h.%p.txt"}


def network_of(
    subject: Subject, nodes: Nodes, shape: tuple[int, int], env: Mapping[str, str], site: FabricTable
) -> Network:
    """Return the network of a job of `shape` (nodes, ranks per node). Raises UsageError for an unknown fabric."""
    fabric, accelerator, state = find_fabric(subject.state.fabric), subject.target.family, subject.state
    if not accelerator.gpu:
        return Network(fabric, accelerator)
    shared = nodes.interface == "lo"  # the nodes use this host's network, with the site's interface
    variables = {"NCCL_SOCKET_IFNAME": f"={nodes.interface}", **fabric_variables(fabric, site)}
    if site.interface and not shared:
        variables["NCCL_SOCKET_IFNAME"] = f"={nodes.interface}"
    path = "" if subject.isolated else env.get("LD_LIBRARY_PATH", "")
    root, nccl = PurePath(subject.roots[0]), nccl_version(state)
    if chips := state.slim.get("gpus"):
        variables[_CHIPS] = ",".join(chips)
    variables |= plugin_variables(state.layers, root, nccl, path, accelerator=accelerator)
    gpus, (count, each) = visible_gpus(env, accelerator), shape
    split = tuple(tuple(gpus[node * each : (node + 1) * each]) for node in range(count))
    enough = shared and count > 1 and len(gpus) >= count * each
    return Network(fabric, accelerator, variables, split if enough else (), _replaced(variables, env))


def _replaced(variables: Mapping[str, str], env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    ours = {name: value for name, value in variables.items() if name not in ("LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME")}
    return {name: (env[name], value) for name, value in ours.items() if env.get(name, value) != value}


def visible_gpus(env: Mapping[str, str], accelerator: Accelerator, dev: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that a process with `env` may use, as `accelerator.visible` names them."""
    given = env.get(accelerator.visible)
    if given is not None:
        return [part.strip() for part in given.split(",") if part.strip()]
    return [str(number) for number, _ in enumerate(dev.glob(accelerator.devices))]


def fit_to_gpus(settings: Settings, env: Mapping[str, str], accelerator: Accelerator, log: Log) -> Settings:
    """Return `settings` with no more ranks per node than this host has GPUs. Simulated nodes share them."""
    gpus = len(visible_gpus(env, accelerator)) if accelerator.gpu else 0
    wanted = settings.nproc_per_node
    if not 0 < gpus < wanted:
        return settings
    log(f"{wanted} ranks per node were asked for, and this host has fewer GPUs: training with {gpus} per node")
    return replace(settings, nproc_per_node=gpus, wanted_nproc_per_node=wanted)


def fabric_variables(fabric: Fabric, site: FabricTable) -> dict[str, str]:
    """Return the variables of a GPU job: NCCL_NET, the site's interface, the fabric's variables, then the site's."""
    found = {"NCCL_NET": fabric.nccl_net} if fabric.nccl_net else {}
    if site.interface:
        found["NCCL_SOCKET_IFNAME"] = site.interface
    for name, value in fabric.variables.items():
        if site.interface or "{interface}" not in value:
            found[name] = value.replace("{interface}", site.interface)
    return {**found, **site.variables}


def nccl_version(state: State) -> str:
    """Return the version of NCCL that the artifact was built with; "" if torch contains its own NCCL."""
    built = next((layer.version for layer in state.layers if layer.name == "nccl"), "")
    return built.split("-")[0] or next((v for name, v, _ in state.packages if _NCCL_WHEEL.fullmatch(name)), "")


def plugin_variables(
    layers: Sequence[BuiltLayer], root: PurePath, nccl: str, path: str = "", *, accelerator: Accelerator = CUDA
) -> dict[str, str]:
    """Return the variables by which NCCL finds its plugin, and the plugin the host's libfabric.

    `root` is the folder of the environment, `nccl` the version of NCCL or RCCL ("" if unknown), `path` the value
    that LD_LIBRARY_PATH has otherwise.
    """
    by_name = {layer.name: layer for layer in layers}
    folders: list[str] = []
    found: dict[str, str] = {}
    if plugin := by_name.get(PLUGIN):
        folder = PurePath(plugin.path or root) / "lib"
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
        found["LD_LIBRARY_PATH"] = ":".join(filter(None, (*folders, path)))
    return found


def _at_least(version: str, least: tuple[int, ...]) -> bool:
    """Return whether `version` is `least` or newer; an unknown version counts as newer."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(least)])
    return not numbers or numbers >= least
