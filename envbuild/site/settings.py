"""`site.toml`: a site's caches, recipes and mirrors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from envbuild.fabrics import fabric_name_problem
from envbuild.site.jobs import (
    ContainerTable,
    ModulesTable,
    NodeTable,
    PathsTable,
    SchedulerTable,
    job_variable_problem,
    value_problem,
)
from envbuild.site.kubernetes import KubernetesTable
from envbuild.toml import decode, read

if TYPE_CHECKING:
    from envbuild.toml import Document


def _url_problem(url: str) -> str | None:
    return None if "://" in url else "a mirror is a URL, such as https://mirror.example.org/pytorch"


def _variable_problem(name: str) -> str | None:
    # Receipts and messages name these variables: secrets (such as a proxy's password) do not belong here.
    if re.fullmatch(r"(NCCL|FI|OFI_NCCL|UCX|TORCH_NCCL)_[A-Z0-9_]+", name):
        return None
    return f"{name!r} is no variable of NCCL, libfabric, their plugin or UCX (NCCL_…, FI_…, OFI_NCCL_…, UCX_…)"


def _value_problem(value: str) -> str | None:
    return None if value.isprintable() else "a variable's value is text on one line"


@dataclass(frozen=True, slots=True)
class RegistryTable:
    """`[registries.HOST]`: access to one image registry."""

    mirrors: tuple[str, ...] = field(
        default=(),
        metadata={
            "doc": "URLs that have the registry's images; tried before it, for pulling only.",
            "check": _url_problem,
        },
    )
    insecure: bool = field(default=False, metadata={"doc": "Whether it is spoken to in plain HTTP."})


@dataclass(frozen=True, slots=True)
class DebianTable:
    """`[debian]`: the site's source of Debian packages."""

    mirror: str = field(
        default="",
        metadata={
            "doc": "URL of the archive (what holds dists/ and pool/). Default: the host's apt sources.",
            "pattern": r"^(https?://\S+|file:///\S*)?$",
        },
    )
    security_mirror: str = field(
        default="",
        metadata={"doc": "URL of the archive of security updates.", "pattern": r"^(https?://\S+|file:///\S*)?$"},
    )
    keyring: str = field(
        default="", metadata={"doc": "File with the keys that may sign releases, instead of Debian's own."}
    )


@dataclass(frozen=True, slots=True)
class FabricTable:
    """`[fabric]`: the network between this site's nodes, as verification uses it."""

    interface: str = field(
        default="",
        metadata={
            "doc": "The interface for NCCL_SOCKET_IFNAME on GPU nodes, such as hsn0; several with commas.",
            "pattern": r"^(\S*)$",
            "example": "hsn0,hsn1,hsn2,hsn3",
        },
    )
    busbw_floor: dict[str, float] = field(
        default_factory=dict,
        metadata={
            "doc": "GB/s of bus bandwidth that the largest all-reduce must reach, by the recipe's fabric."
            " A recipe's own busbw_floor goes over it.",
            "key_check": fabric_name_problem,
            "minimum": 0,
        },
    )
    variables: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "doc": "Variables of every job on GPUs, over those that the fabric needs.",
            "key_check": _variable_problem,
            "check": _value_problem,
        },
    )


@dataclass(frozen=True, slots=True)
class SiteFile:
    """Contents of one site.toml."""

    store: str | None = field(default=None, metadata={"doc": "Folder of the store.", "example": "/scratch/envbuild"})
    recipes: tuple[str, ...] = field(default=(), metadata={"doc": "Folders with more recipes, searched in this order."})
    mirrors: dict[str, tuple[str, ...]] = field(
        default_factory=dict,
        metadata={
            "doc": "URL prefix of an index → prefixes tried before it, in this order.",
            "key_check": _url_problem,
            "check": _url_problem,
        },
    )
    registries: dict[str, RegistryTable] = field(
        default_factory=dict, metadata={"doc": "Image registries by host, such as docker.io."}
    )
    debian: DebianTable = field(default_factory=DebianTable, metadata={"doc": "Where Debian packages come from."})
    fabric: FabricTable = field(default_factory=FabricTable, metadata={"doc": "The network between nodes with GPUs."})
    scheduler: SchedulerTable = field(default_factory=SchedulerTable, metadata={"doc": "Who starts jobs."})
    modules: ModulesTable = field(
        default_factory=ModulesTable, metadata={"doc": "Environment modules of builds and jobs."}
    )
    environment: dict[str, str] = field(
        default_factory=dict,
        metadata={
            "doc": "Variables of builds and jobs on nodes, such as https_proxy or SSL_CERT_FILE. Never secrets.",
            "key_check": job_variable_problem,
            "check": value_problem,
        },
    )
    paths: PathsTable = field(default_factory=PathsTable, metadata={"doc": "File systems, as nodes see them."})
    container: ContainerTable = field(default_factory=ContainerTable, metadata={"doc": "What starts images on nodes."})
    node: NodeTable = field(default_factory=NodeTable, metadata={"doc": "What one node has."})
    kubernetes: KubernetesTable = field(default_factory=KubernetesTable, metadata={"doc": "Where and how pods run."})


@dataclass(frozen=True, slots=True)
class Site:
    """Merged settings of the site. `recipe_folders` may contain folders that do not exist."""

    store: Path
    recipe_folders: tuple[Path, ...]
    mirrors: tuple[tuple[str, tuple[str, ...]], ...] = ()
    registries: tuple[tuple[str, RegistryTable], ...] = ()
    debian: DebianTable = DebianTable()
    fabric: FabricTable = FabricTable()

    def registry(self, host: str) -> RegistryTable:
        """Return the settings for the image registry `host`."""
        return dict(self.registries).get(host, RegistryTable())

    def mirrored(self, url: str) -> list[str]:
        """Return the URLs to try for `url`, in order: the mirrors of its longest matching prefix, then `url` itself."""
        for prefix, replacements in sorted(self.mirrors, key=lambda row: -len(row[0])):
            if url == prefix or url.startswith(prefix.rstrip("/") + "/"):
                rest = url[len(prefix.rstrip("/")) :]
                return [*(replacement.rstrip("/") + rest for replacement in replacements), url]
        return [url]


def site_files(env: Mapping[str, str], *, etc: Path = Path("/etc")) -> list[Path]:
    """Return the effective site files.

    $ENVBUILD_SITE replaces all others; otherwise they are /etc/envbuild/site.toml and then the user's own, if
    they exist.
    """
    if named := env.get("ENVBUILD_SITE"):
        return [Path(named)]
    home = Path(env.get("HOME") or Path.home())
    config = Path(env.get("XDG_CONFIG_HOME") or home / ".config") / "envbuild"
    places = (etc / "envbuild" / "site.toml", config / "site.toml")
    return [path for path in places if path.is_file()]


def load_site(env: Mapping[str, str], *, etc: Path = Path("/etc")) -> Site:
    """Return the settings of $ENVBUILD_SITE, else of /etc/envbuild/site.toml overridden by the user's file.

    The store is $ENVBUILD_STORE, else the one in a site.toml, else the user's cache folder. Raises RecipeError
    with all mistakes of a faulty file, or when the file in $ENVBUILD_SITE does not exist.
    """
    home = Path(env.get("HOME") or Path.home())
    documents = [read(path) for path in site_files(env, etc=etc)]
    store: Path | None = None
    recipes: list[Path] = [etc / "envbuild" / "recipes"]
    mirrors: dict[str, tuple[str, ...]] = {}
    registries: dict[str, RegistryTable] = {}
    debian = DebianTable()
    fabric = FabricTable()
    for document in documents:
        settings = decode(document, SiteFile)
        if settings.store is not None:
            store = _path(settings.store, document, home)
        recipes += [_path(folder, document, home) for folder in settings.recipes]
        mirrors |= settings.mirrors
        registries |= settings.registries
        if settings.debian != DebianTable():
            keyring = settings.debian.keyring
            place = str(_path(keyring, document, home)) if keyring else ""
            debian = replace(settings.debian, keyring=place)
        if settings.fabric != FabricTable():
            fabric = settings.fabric
    if chosen := env.get("ENVBUILD_STORE"):
        store = Path(chosen)
    if store is None:
        store = Path(env.get("XDG_CACHE_HOME") or home / ".cache") / "envbuild"
    return Site(store.absolute(), tuple(recipes), tuple(mirrors.items()), tuple(registries.items()), debian, fabric)


def _path(value: str, document: Document, home: Path) -> Path:
    """Return a path of site.toml: ~ is the home folder, relative paths are relative to the file's folder."""
    if value == "~" or value.startswith("~/"):
        return home / value[2:]
    return document.path.absolute().parent / value
