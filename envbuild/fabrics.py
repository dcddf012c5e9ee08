"""The networks between nodes that recipes may name: data/fabrics.toml, which says what each column means."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envbuild.errors import UsageError

# Every recipe asks: importlib.resources would cost ten milliseconds.
_FILE = Path(__file__).parent / "data" / "fabrics.toml"


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable that a fabric needs; `source` is the address that says so, `date` when it was read or written."""

    name: str
    value: str
    why: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class FabricAdapter:
    """The adapters of a fabric as Linux shows them. `called` are their names in messages, `sysfs` their class below
    /sys/class, `driver` the driver that tells them from others of the class, `mounted` the folder that a container
    must be given, `devices` a glob of files for preflight, `resource` the one of Kubernetes that has them."""

    called: tuple[str, ...]
    sysfs: str
    driver: str = ""
    link_layers: Mapping[str, str] = field(default_factory=dict)
    mounted: str = ""
    devices: str = ""
    resource: str = ""


@dataclass(frozen=True, slots=True)
class FabricOptions:
    """What a fabric changes in the source layer `layer`: options for configure, and Debian packages to build with.
    `accelerator` are the families of targets for which it holds, () for all."""

    layer: str
    configure: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    accelerator: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Fabric:
    """A network between nodes. `nccl_net` is for NCCL_NET, "" leaves NCCL its choice; `names` are those by which
    NCCL's log may call it; `provider` is libfabric's, "" without libfabric; `run_on` the hardware on which the
    settings were run, "" for none."""

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
        """Name → value, as the data has them ({interface} stands for the site's)."""
        return {row.name: row.value for row in self.rows}

    @property
    def by_plugin(self) -> bool:
        """Whether NCCL needs its libfabric plugin for it."""
        return bool(self.provider)

    def options_of(self, layer: str, family: str) -> tuple[FabricOptions, ...]:
        """What it changes in the source layer `layer` of targets with accelerators of `family`."""
        found = (one for one in self.options if one.layer == layer)
        return tuple(one for one in found if family in (one.accelerator or (family,)))


@functools.cache
def load_fabrics() -> Mapping[str, Fabric]:
    """All fabrics, by name."""
    rows = tomllib.loads(_FILE.read_text(encoding="utf-8"))["fabrics"]
    return {name: _fabric(name, row) for name, row in rows.items()}


def _fabric(name: str, row: dict[str, Any]) -> Fabric:
    rows = tuple(Variable(**one) for one in row.pop("variables", ()))
    options = tuple(FabricOptions(**_frozen(one)) for one in row.pop("options", ()))
    adapter = FabricAdapter(**_frozen(row.pop("adapter"))) if "adapter" in row else None
    return Fabric(name=name, adapter=adapter, options=options, rows=rows, **_frozen(row))


def _frozen(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: tuple(one) if isinstance(one, list) else one for key, one in row.items()}


def fabric_names() -> tuple[str, ...]:
    """The names that a recipe's `fabric` may be."""
    return tuple(load_fabrics())


def fabric_name_problem(name: str) -> str | None:
    """Why `name` is not a fabric's."""
    known = fabric_names()
    return None if name in known else f"no fabric is called {name!r}; there are {', '.join(known)}"


def find_fabric(name: str) -> Fabric:
    """The fabric of that name. Raises UsageError for an artifact whose fabric this envbuild does not know."""
    known = load_fabrics()
    if name not in known:
        raise UsageError(
            f"no fabric is called {name!r}; known are {', '.join(known)}",
            "verify the artifact with the envbuild that built it, or a newer one",
        )
    return known[name]


def adapter_of(provider: str) -> FabricAdapter | None:
    """The adapters that libfabric's `provider` needs; None where it needs none."""
    return next(
        (f.adapter for f in load_fabrics().values() if provider and f.provider == provider), None
    )


def preflight_devices(provider: str) -> str:
    """ENVBUILD_DEVICES of a preflight: the files by which a node shows that it has what `provider` needs, as GLOB or
    GLOB=DRIVER; "" where it needs no adapter."""
    adapter = adapter_of(provider)
    if adapter is None or not adapter.devices:
        return ""
    return f"{adapter.devices}={adapter.driver}" if adapter.driver else adapter.devices
