"""Rows of data/compatibility.toml; comments in the file explain the columns."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, TypeVar

from envbuild.compat.versions import matches

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Driver:
    """The oldest driver (`minimum`) for the CUDA versions `cuda`."""

    cuda: str
    minimum: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """CUDA versions that the torch wheels of `versions` are built for on `arch`.

    `default` is the CUDA version of the default index's plain wheel, "cpu" for a wheel without CUDA, "" if
    unknown. `glibc` ("2.28") and `nccl` ("wheel", "inside") are also "" if unknown. The data file explains the
    columns.
    """

    versions: str
    arch: str
    cuda: tuple[str, ...]
    source: str
    date: str
    complete: bool = False
    default: str = ""
    glibc: str = ""
    nccl: str = ""


@dataclass(frozen=True, slots=True)
class NcclPin:
    """NCCL version that the torch versions `torch` pin when they are built for one of `cuda`."""

    torch: str
    cuda: tuple[str, ...]
    nccl: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class TorchRocm:
    """ROCm versions that the torch wheels of `versions` are built for; the list may be incomplete."""

    versions: str
    rocm: tuple[str, ...]
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Rccl:
    """NCCL version that the RCCL of the ROCm versions `rocm` is based on: torch for ROCm contains that RCCL."""

    rocm: str
    nccl: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Nccl:
    """Versions of the net API that the NCCL `versions` look for in a plugin."""

    versions: str
    apis: tuple[int, ...]
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Plugin:
    """aws-ofi-nccl of `versions`: its net APIs, the libfabric that it compiles with, the file that NCCL opens."""

    versions: str
    apis: tuple[int, ...]
    libfabric: str
    library: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class Libfabric:
    """libfabric of `versions`: the providers in its source, and its newest symbol version."""

    versions: str
    providers: tuple[str, ...]
    symbol: str
    source: str
    date: str


@dataclass(frozen=True, slots=True)
class CompatRule:
    """A combination that does not work: a stack with all of `when`. `fix` is the advised change."""

    id: str
    subject: str
    when: dict[str, str]
    reason: str
    fix: str
    source: str
    date: str
    status: str = "bad"


@dataclass(frozen=True, slots=True)
class Rows:
    """All rows of the data."""

    drivers: tuple[Driver, ...] = ()
    torch: tuple[TorchBuild, ...] = ()
    torch_rocm: tuple[TorchRocm, ...] = ()
    rccl: tuple[Rccl, ...] = ()
    nccl_pins: tuple[NcclPin, ...] = ()
    nccl: tuple[Nccl, ...] = ()
    plugins: tuple[Plugin, ...] = ()
    libfabric: tuple[Libfabric, ...] = ()
    rules: tuple[CompatRule, ...] = ()


@functools.cache
def load_rows() -> Rows:
    """Return the rows of data/compatibility.toml."""
    text = resources.files("envbuild.data").joinpath("compatibility.toml").read_text("utf-8")
    data = tomllib.loads(text)
    tables = {
        "drivers": Driver, "torch": TorchBuild, "torch_rocm": TorchRocm, "rccl": Rccl,
        "nccl_pins": NcclPin, "nccl": Nccl, "plugins": Plugin,
        "libfabric": Libfabric, "rules": CompatRule,
    }  # fmt: skip
    return Rows(**{name: _rows(tables[name], found) for name, found in data.items()})


def _rows(kind: Callable[..., T], tables: list[dict[str, Any]]) -> tuple[T, ...]:
    return tuple(kind(**{name: _value(value) for name, value in one.items()}) for one in tables)


def _value(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    return value.isoformat() if hasattr(value, "isoformat") else value


def torch_build(rows: Rows, torch: str, arch: str) -> TorchBuild | None:
    """Return the row of torch's builds for `arch`."""
    return _first(row for row in rows.torch if row.arch == arch and matches(torch, row.versions))


def pin_row(rows: Rows, torch: str, cuda: str) -> NcclPin | None:
    """Return the row with the NCCL that torch pins."""
    return _first(row for row in rows.nccl_pins if cuda in row.cuda and matches(torch, row.torch))


def nccl_pin(torch: str, cuda: str) -> str | None:
    """Return the NCCL that torch `torch` for CUDA `cuda` ("12.6") pins, or None if unknown.

    >>> nccl_pin("2.7.1+cu126", "12.6")
    '2.26.2'
    """
    row = pin_row(load_rows(), torch, cuda)
    return row.nccl if row else None


def torch_rocm_row(rows: Rows, torch: str) -> TorchRocm | None:
    """Return the row of torch's builds for ROCm."""
    return _first(row for row in rows.torch_rocm if matches(torch, row.versions))


def rccl_row(rows: Rows, rocm: str) -> Rccl | None:
    """Return the row of the RCCL that comes with ROCm `rocm`."""
    return _first(row for row in rows.rccl if matches(rocm, row.rocm))


def nccl_row(rows: Rows, version: str) -> Nccl | None:
    """Return the row of NCCL `version`."""
    return _first(row for row in rows.nccl if matches(version, row.versions))


def plugin_row(rows: Rows, version: str) -> Plugin | None:
    """Return the row of aws-ofi-nccl `version`."""
    return _first(row for row in rows.plugins if matches(version, row.versions))


def libfabric_row(rows: Rows, version: str) -> Libfabric | None:
    """Return the row of libfabric `version`."""
    return _first(row for row in rows.libfabric if matches(version, row.versions))


def driver_row(rows: Rows, cuda: str) -> Driver | None:
    """Return the row of drivers for CUDA `cuda`."""
    return _first(row for row in rows.drivers if matches(cuda, row.cuda))


def _first(found: Iterable[T]) -> T | None:
    return next(iter(found), None)
