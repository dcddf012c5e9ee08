"""The networks between nodes that recipes may name, and the variables that make NCCL in an artifact use them.

data/fabrics.toml has the networks and documents each field.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from envbuild.base.errors import UsageError
from envbuild.data import load_table

if TYPE_CHECKING:
    from envbuild.contract.state import BuiltLayer

PLUGIN = "aws-ofi-nccl"
# NCCL stores a plugin's name in 255 bytes, including the NUL.
_LONGEST_NAME = 254


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that a fabric needs; `source` is the page that documents it, `date` the day on which it was read.

    It is for targets whose accelerator family is in `accelerator`, () for all.
    """

    name: str
    value: str
    why: str
    source: str
    date: str
    accelerator: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FabricAdapter:
    """The network adapters of a fabric, as Linux shows them.

    `called` are their names in messages, `sysfs` their class below /sys/class, `driver` the driver that distinguishes
    them from other adapters of that class, `mounted` the folder that a container needs, `devices` a glob of files for
    preflight, `resource` the Kubernetes resource that provides them.
    """

    called: tuple[str, ...]
    sysfs: str
    driver: str = ""
    link_layers: Mapping[str, str] = field(default_factory=dict)
    mounted: str = ""
    devices: str = ""
    resource: str = ""


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """Build options that a fabric adds to the source layer `layer`: arguments of configure, and Debian packages.

    They apply to targets whose accelerator family is in `accelerator`, () for all.
    """

    layer: str
    configure: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    accelerator: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fabric:
    """A network between nodes.

    `nccl_net` is the value of NCCL_NET, "" to leave the choice to NCCL. `names` are the names that NCCL's log may use
    for it. `provider` is the provider of libfabric, "" without libfabric. `run_on` is the hardware on which the
    settings were run, "" for none.
    """

    name: str
    title: str
    provider: str
    nccl_net: str
    names: tuple[str, ...]
    run_on: str
    source: str
    date: str
    notes: tuple[str, ...] = ()
    interfaces: str = ""
    fi_info: str = ""
    signs: str = ""
    adapter: FabricAdapter | None = None
    options: tuple[FabricOptions, ...] = ()
    rows: tuple[Variable, ...] = ()

    @property
    def by_plugin(self) -> bool:
        """Whether NCCL needs its libfabric plugin for this network."""
        return bool(self.provider)

    def options_of(self, layer: str, family: str) -> tuple[FabricOptions, ...]:
        """Return the options for the source layer `layer` of targets with accelerators of `family`."""
        return tuple(
            options
            for options in self.options
            if options.layer == layer and family in (options.accelerator or (family,))
        )


class SiteNetwork(Protocol):
    """A site's network between nodes with GPUs: its interface, "" if unknown, and variables of every job."""

    @property
    def interface(self) -> str: ...

    @property
    def variables(self) -> Mapping[str, str]: ...


@functools.cache
def load_fabrics() -> Mapping[str, Fabric]:
    """Return all fabrics by name."""
    fabrics = {}
    for name, row in load_table("fabrics")["fabrics"].items():
        own = frozen(row)
        rows = tuple(Variable(**frozen(row)) for row in own.pop("variables", ()))
        own["options"] = tuple(FabricOptions(**frozen(option)) for option in row.get("options", ()))
        own["adapter"] = FabricAdapter(**frozen(row["adapter"])) if "adapter" in row else None
        fabrics[name] = Fabric(name=name, rows=rows, **own)
    return fabrics


def frozen(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a row of data, with tuples in place of lists."""
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}


def fabric_names() -> tuple[str, ...]:
    """Return the valid values of `fabric` in a recipe."""
    return tuple(load_fabrics())


def fabric_name_problem(name: str) -> str | None:
    """Return why `name` is not the name of a fabric, None if it is one."""
    known = fabric_names()
    return None if name in known else f"unknown fabric {name!r}; known are {', '.join(known)}"


def find_fabric(name: str) -> Fabric:
    """Return the fabric called `name`. Raises UsageError for an artifact whose fabric this envbuild does not know."""
    if problem := fabric_name_problem(name):
        raise UsageError(problem, "verify the artifact with the envbuild that built it, or a newer one")
    return load_fabrics()[name]


def adapter_of(provider: str) -> FabricAdapter | None:
    """Return the adapters that libfabric's `provider` needs, None when it needs none."""
    return next((f.adapter for f in load_fabrics().values() if provider and f.provider == provider), None)


def preflight_devices(provider: str) -> str:
    """Return ENVBUILD_DEVICES for a preflight: device files of a node that has the adapters of `provider`.

    The form is GLOB or GLOB=DRIVER, "" when `provider` needs no adapter.
    """
    adapter = adapter_of(provider)
    return "=".join(filter(None, (adapter.devices, adapter.driver))) if adapter and adapter.devices else ""


def fabric_variables(fabric: Fabric, site: SiteNetwork, family: str) -> dict[str, str]:
    """Return the variables of a job on accelerators of `family`: NCCL_NET, interface, the fabric's, then the site's."""
    variables = {"NCCL_NET": fabric.nccl_net} if fabric.nccl_net else {}
    if site.interface:
        variables["NCCL_SOCKET_IFNAME"] = site.interface
    for row in fabric.rows:
        if family in (row.accelerator or (family,)) and (site.interface or "{interface}" not in row.value):
            variables[row.name] = row.value.replace("{interface}", site.interface)
    return {**variables, **site.variables}


def plugin_variables(
    layers: Sequence[BuiltLayer], root: PurePath, nccl: str, path: str = "", *, net_plugin: str
) -> dict[str, str]:
    """Return the variables by which NCCL finds its plugin, and the plugin the host's libfabric.

    `root` is the folder of the environment, `nccl` the version of NCCL or RCCL ("" if unknown), `path` the other value
    of LD_LIBRARY_PATH, `net_plugin` the prefix of the plugin's file that the library opens.

    Since 2.21, NCCL_NET_PLUGIN may be a path for dlopen (up to 254 characters since 2.26); before, it is only the
    suffix of a name that is searched along LD_LIBRARY_PATH. Source: NVIDIA/nccl, src/net.cc of v2.18.5-1 and
    v2.21.5-1, src/plugin/plugin_open.cc and src/plugin/net.cc of v2.26.2-1 to v2.29.7-1. The plugin is libnccl-net.so
    before aws-ofi-nccl 1.15 and libnccl-net-ofi.so since; NCCL_NET="AWS Libfabric" selects it in every version
    (src/nccl_ofi_interface_nvidia.c* of v1.9.2-aws to v1.21.1).
    """
    by_name = {layer.name: layer for layer in layers}
    folders: list[str] = []
    variables: dict[str, str] = {}
    if plugin := by_name.get(PLUGIN):
        folder = PurePath(plugin.path or root) / "lib"
        end = "-ofi" if _at_least(plugin.version, (1, 15)) else ""
        variables = plugin_variable(str(folder / f"{net_plugin}{end}.so"), nccl)
        if not variables.get("NCCL_NET_PLUGIN", "").startswith("/"):
            folders.append(str(folder))
    if (host := by_name.get("libfabric")) and host.path:
        folders += [f"{host.path}/lib64", f"{host.path}/lib"]
    if folders:
        variables["LD_LIBRARY_PATH"] = ":".join(filter(None, (*folders, path)))
    return variables


def plugin_variable(path: str, nccl: str) -> dict[str, str]:
    """Return NCCL_NET_PLUGIN for the plugin at `path`; NCCL before 2.21 takes a suffix, and {} is NCCL's default."""
    if _at_least(nccl, (2, 21)) and len(path.encode()) <= _LONGEST_NAME:
        return {"NCCL_NET_PLUGIN": path}
    suffix = PurePath(path).name.partition("-net")[2].partition(".so")[0]
    return {"NCCL_NET_PLUGIN": suffix.removeprefix("-")} if suffix else {}


def _at_least(version: str, least: tuple[int, ...]) -> bool:
    """Return whether `version` is `least` or newer; an unknown version counts as newer."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version)[: len(least)])
    return not numbers or numbers >= least
