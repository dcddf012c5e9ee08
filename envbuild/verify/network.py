"""The network of a verification's job: the variables of each node.

NCCL_HOSTID makes NCCL treat simulated nodes on one host as separate hosts (NVIDIA/nccl, src/misc/utils.cc), so
that their traffic uses the network and not shared memory; ranks of different nodes may then share a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath

from envbuild.fabrics import Fabric, find_fabric
from envbuild.recipe.accelerators import Accelerator
from envbuild.site.settings import FabricTable
from envbuild.verify.network_checks import nccl_version
from envbuild.verify.network_variables import differing, fabric_variables, plugin_variables
from envbuild.verify.nodes import Nodes
from envbuild.verify.subject import Subject

_DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET"}


@dataclass(frozen=True, slots=True)
class Network:
    """The fabric and the variables that a job's nodes get for it.

    `variables` are common to all nodes; `gpus` lists the GPUs that each node may use, () for all of them.
    `replaced` names the variables of the caller's environment that differ in the job: name → (the caller's
    value, the job's value).
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
        found = dict(self.variables)
        found["NCCL_HOSTID"] = f"envbuild-{name}-{node}"
        if self.gpus:
            found[self.accelerator.visible] = ",".join(self.gpus[node])
        return {**found, **_DEBUG, "NCCL_DEBUG_FILE": f"{work}/{name}-nccl{node}.%h.%p.txt"}


def network_of(
    subject: Subject, nodes: Nodes, shape: tuple[int, int], env: Mapping[str, str], site: FabricTable
) -> Network:
    """Return the network of a job of `shape` (nodes, ranks per node) in the artifact.

    Raises UsageError for an unknown fabric.
    """
    fabric = find_fabric(subject.state.fabric)
    accelerator = subject.target.family
    if not accelerator.gpu:
        return Network(fabric, accelerator)
    shared = nodes.interface == "lo"  # the nodes use this host's network, with the site's interface
    variables = {"NCCL_SOCKET_IFNAME": f"={nodes.interface}"}
    variables |= fabric_variables(fabric, site)
    if site.interface and not shared:
        variables["NCCL_SOCKET_IFNAME"] = f"={nodes.interface}"
    path = "" if subject.alone else env.get("LD_LIBRARY_PATH", "")
    variables |= plugin_variables(
        subject.state.layers, PurePath(subject.roots[0]), nccl_version(subject.state), path, accelerator=accelerator
    )
    named = {name: value for name, value in variables.items() if name != "NCCL_SOCKET_IFNAME"}
    gpus = visible_gpus(env, accelerator)
    count, each = shape
    split = tuple(tuple(gpus[node * each : (node + 1) * each]) for node in range(count))
    return Network(
        fabric,
        accelerator,
        variables,
        split if shared and count > 1 and len(gpus) >= count * each else (),
        differing(named, env),
    )


def visible_gpus(env: Mapping[str, str], accelerator: Accelerator, dev: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that a process with `env` may use, as `accelerator.visible` names them."""
    given = env.get(accelerator.visible)
    if given is not None:
        return [part.strip() for part in given.split(",") if part.strip()]
    return [str(number) for number, _ in enumerate(dev.glob(accelerator.devices))]
