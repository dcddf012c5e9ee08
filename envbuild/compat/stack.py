"""Stack of a recipe's target, the input of the compatibility checks, from its layers and its lock or pins."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from envbuild.base.text import normalise
from envbuild.compat.rows import load_rows
from envbuild.fabrics import load_fabrics
from envbuild.recipe.checks import requirement_parts
from envbuild.recipe.load import LoadedRecipe
from envbuild.recipe.model import layer_kind
from envbuild.recipe.targets import CUDA, ROCM, Target

# The `;` is excluded because a pin under a marker may not apply here.
_PIN = re.compile(r"===?([^,;*]+)")
# conda-forge's names for torch.
_CONDA_TORCH = ("pytorch", "libtorch")


@dataclass(frozen=True, slots=True)
class Stack:
    """Known contents of one artifact; None means absent or unknown.

    `torch` and `nccl` are versions in the spelling of their packages. `torch_origin` is "lock", "recipe" or
    "conda"; `nccl_origin` is "pin" (torch's own), "lock", "wheel" ([layers.nccl]), "source", "host" or "conda";
    `nccl_in` tells how this build of torch includes NCCL ("wheel", "inside"). For ROCm, `nccl` is the NCCL that
    RCCL is based on. `plugin` is the version of aws-ofi-nccl, `plugin_aws` whether it is built for AWS.
    `libfabric_origin` is "source", "host" or "conda". `base` is whether images are built on an existing image,
    which may contain any of these. `packages` maps normalised names of distributions to their only version.
    """

    arch: str
    python: str
    glibc: str
    fabric: str = "any"
    provider: str = ""
    cuda: str | None = None
    rocm: str | None = None
    torch: str | None = None
    torch_origin: str = ""
    nccl: str | None = None
    nccl_origin: str = ""
    nccl_in: str = ""
    plugin: str | None = None
    plugin_aws: bool = False
    libfabric: str | None = None
    libfabric_origin: str = ""
    base: bool = False
    driver: str | None = None
    packages: tuple[tuple[str, str], ...] = ()

    @property
    def gpus(self) -> bool:
        """Whether torch is for GPUs, so that NCCL or RCCL runs its collectives."""
        return self.cuda is not None or self.rocm is not None

    def value(self, name: str) -> str | None:
        """Return the value for a rule's `when`: a field as text, or the version of the package `name`."""
        if name in _FIELDS:
            value = getattr(self, name)
            return str(value).lower() if isinstance(value, bool) else value or None
        return dict(self.packages).get(name)


# Fields that rules may name; those in EXACT are compared as text, the others as versions.
EXACT = frozenset({"arch", "fabric", "provider", "plugin_aws", "libfabric_origin", "nccl_origin", "nccl_in"})
_FIELDS = EXACT | {"python", "glibc", "cuda", "rocm", "driver", "torch", "nccl", "plugin", "libfabric"}


def stack_of(loaded: LoadedRecipe, target: Target, packages: Mapping[str, str] | None, *, conda: bool = False) -> Stack:
    """Return the stack of `target` with locked `packages` and `conda` packages; None: with the recipe's pins."""
    recipe, table = loaded.recipe, loaded.recipe.targets[target.name]
    if packages is None:
        versions, origin = dict(_pins(recipe.requirements + table.requirements)), "recipe"
    else:
        versions = {normalise(name): version for name, version in packages.items()}
        origin = "conda" if conda else "lock"
    names = ("torch", *_CONDA_TORCH) if conda else ("torch",)
    torch = next((versions[name] for name in names if name in versions), None)
    stack = Stack(
        arch=target.arch,
        python=recipe.python,
        glibc=table.glibc,
        fabric=recipe.fabric,
        provider=load_fabrics()[recipe.fabric].provider,
        cuda=target.version if target.family is CUDA else None,
        rocm=target.version if target.family is ROCM else None,
        torch=torch,
        torch_origin=origin if torch else "",
        base=recipe.image.base != "debian",
        packages=() if conda else tuple(sorted({**dict(_pins(recipe.constraints)), **versions}.items())),
    )
    if conda:
        stack = replace(
            stack,
            nccl=versions.get("nccl"),
            nccl_origin="conda" if "nccl" in versions else "",
            plugin=versions.get("aws-ofi-nccl"),
            libfabric=versions.get("libfabric"),
            libfabric_origin="conda" if "libfabric" in versions else "",
            cuda=_conda_cuda(versions) or stack.cuda if stack.cuda else None,
        )
    return _with_layers(_with_nccl(stack, target, versions), loaded, target)


def _conda_cuda(versions: Mapping[str, str]) -> str | None:
    """Return the CUDA version of the conda packages, which may be newer than the target's."""
    version = versions.get("cuda-version") or versions.get("cudatoolkit") or ""
    match = re.match(r"[0-9]+\.[0-9]+", version)
    return match[0] if match else None


def _pins(requirements: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield names and versions of exactly pinned requirements."""
    for name, rest in map(requirement_parts, requirements):
        if match := _PIN.fullmatch(rest):
            yield name, match[1]


def _with_nccl(stack: Stack, target: Target, versions: Mapping[str, str]) -> Stack:
    """Return `stack` with torch's own NCCL: the version of the locked wheel, else the pin of torch's release."""
    if stack.torch is None or stack.torch_origin == "conda":
        return stack
    rows = load_rows()
    if stack.rocm is not None:
        rccl = rows.rccl_of(stack.rocm)
        return replace(stack, nccl=rccl.nccl, nccl_origin="pin", nccl_in="inside") if rccl else stack
    if stack.cuda is None:
        return stack
    build, pin = rows.torch_build(stack.torch, stack.arch), rows.pin(stack.torch, stack.cuda)
    stack = replace(stack, nccl_in=build.nccl if build and stack.cuda in build.cuda else "")
    if locked := versions.get(f"{target.family.nccl_wheel}{target.accelerator[:4]}"):
        return replace(stack, nccl=locked, nccl_origin="lock")
    return replace(stack, nccl=pin.nccl, nccl_origin="pin") if pin else stack


def _with_layers(stack: Stack, loaded: LoadedRecipe, target: Target) -> Stack:
    tables = ((name, table) for name, table in loaded.recipe.layers.items() if table.for_target(target.name))
    for name, table in tables:
        kind = layer_kind(name, table)
        if name == "nccl" and (stack.cuda or kind != "wheel"):
            stack = replace(stack, nccl=table.version, nccl_origin=kind)
        elif name == "libfabric":
            stack = replace(stack, libfabric=table.version, libfabric_origin=kind)
        elif name == "aws-ofi-nccl":
            stack = replace(stack, plugin=table.version, plugin_aws=_aws(stack, table.configure))
    return stack


def _aws(stack: Stack, options: tuple[str, ...]) -> bool:
    """Return whether the plugin is built for AWS: the recipe's options override those of the fabric."""
    of_fabric = load_fabrics()[stack.fabric].options_of("aws-ofi-nccl", "cuda")
    for option in reversed([*(o for row in of_fabric for o in row.configure), *options]):
        name, _, value = option.partition("=")
        if name in ("--enable-platform-aws", "--disable-platform-aws"):
            return name.startswith("--enable") and value != "no"
    return False
