"""The network of a verification: its variables, and the GPUs that each simulated node may use.

NCCL_HOSTID makes NCCL treat simulated nodes on one host as separate hosts (src/misc/utils.cc), so that their
traffic uses the network and not shared memory; ranks of different nodes may then share a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath

from envbuild.base.progress import Log
from envbuild.fabrics import Fabric, fabric_variables, find_fabric, nccl_version, plugin_variables
from envbuild.recipe.accelerators import Accelerator
from envbuild.site.tables import FabricTable
from envbuild.verify.model import Nodes, Settings, Subject

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
    variables |= plugin_variables(state.layers, root, nccl, path, net_plugin=accelerator.net_plugin)
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
