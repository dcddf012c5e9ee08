"""The networks between nodes that recipes may name, from data/fabrics.toml, which documents each field."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envbuild.base.errors import UsageError
from envbuild.data import load_table


@dataclass(frozen=True, slots=True)
class Variable:
    """A variable that a fabric needs; `source` is the page that documents it, `date` the day on which it was read."""

    name: str
    value: str
    why: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class FabricAdapter:
    """The network adapters of a fabric, as Linux shows them.

    `called` are their names in messages, `sysfs` is their class below /sys/class, `driver` the driver that
    distinguishes them from other adapters of that class, `mounted` the folder that a container needs, `devices` a glob
    of files for preflight, `resource` the Kubernetes resource that provides them.
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
    def variables(self) -> dict[str, str]:
        """Name → value as in the data file, where {interface} stands for the site's interface."""
        return {row.name: row.value for row in self.rows}

    @property
    def by_plugin(self) -> bool:
        """Whether NCCL needs its libfabric plugin for this network."""
        return bool(self.provider)

    def options_of(self, layer: str, family: str) -> tuple[FabricOptions, ...]:
        """Return the options for the source layer `layer` of targets with accelerators of `family`."""
        return tuple(one for one in self.options if one.layer == layer and family in (one.accelerator or (family,)))


@functools.cache
def load_fabrics() -> Mapping[str, Fabric]:
    """Return all fabrics by name."""
    fabrics = {}
    for name, row in load_table("fabrics")["fabrics"].items():
        own = _frozen(row)
        rows = tuple(Variable(**one) for one in own.pop("variables", ()))
        own["options"] = tuple(FabricOptions(**_frozen(one)) for one in row.get("options", ()))
        own["adapter"] = FabricAdapter(**_frozen(row["adapter"])) if "adapter" in row else None
        fabrics[name] = Fabric(name=name, rows=rows, **own)
    return fabrics


def _frozen(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(one) if isinstance(one, list) else one for key, one in row.items()}


def fabric_names() -> tuple[str, ...]:
    """Return the valid values of `fabric` in a recipe."""
    return tuple(load_fabrics())


def fabric_name_problem(name: str) -> str | None:
    """Return why `name` is not the name of a fabric, None if it is one."""
    known = fabric_names()
    return None if name in known else f"no fabric is called {name!r}; there are {', '.join(known)}"


def find_fabric(name: str) -> Fabric:
    """Return the fabric called `name`. Raises UsageError for an artifact whose fabric this envbuild does not know."""
    known = load_fabrics()
    if name not in known:
        raise UsageError(
            f"no fabric is called {name!r}; known are {', '.join(known)}",
            "verify the artifact with the envbuild that built it, or a newer one",
        )
    return known[name]


def adapter_of(provider: str) -> FabricAdapter | None:
    """Return the adapters that libfabric's `provider` needs, None when it needs none."""
    return next((f.adapter for f in load_fabrics().values() if provider and f.provider == provider), None)


def preflight_devices(provider: str) -> str:
    """Return ENVBUILD_DEVICES for a preflight: device files of a node that has the adapters of `provider`.

    The form is GLOB or GLOB=DRIVER, "" when `provider` needs no adapter.
    """
    adapter = adapter_of(provider)
    return "=".join(filter(None, (adapter.devices, adapter.driver))) if adapter and adapter.devices else ""
