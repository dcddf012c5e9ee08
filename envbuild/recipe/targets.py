"""Targets: the accelerator and the CPU architecture of an environment.

ACCELERATORS has one row for each family of processors that torch supports; a new family needs only a new row.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from envbuild.base.errors import HostError, UsageError
from envbuild.base.toml import closest

VERSION_FILE = "torch/version.py"
# torch/version.py has a few lines; a larger file is a different file.
MAX_VERSION_FILE = 64 << 10
# `cuda: Optional[str] = '12.6'` in one release, `cuda = '12.6'` in others; `hip = '6.4.43482-0f2d60242'`.
_FIELD = r"^{}\b[^=\n]*=\s*['\"]([0-9.]+)[^'\"\n]*['\"]"


@dataclass(frozen=True)
class Accelerator:
    """A family of accelerators; an empty field means that the family does not have the feature.

    Names: `name` identifies the row; `title` is used in messages; `tag` matches the names of targets, local
    versions of wheels (`+cu126`) and PyTorch's indexes, and its groups joined by dots are the version; `form`
    explains the tag; `usual` are suggestions for a misspelled one.

    torch's build: the `torch_field` of torch.version and the `torch_library` identify the accelerator; `wheels`
    matches the distributions that only builds for it need; conda's build strings begin with `conda_builds`;
    `conda_virtual` is conda's virtual package; `nccl_wheel` is the prefix of the distribution with its NCCL.

    Hosts: `devices` is the pattern of the GPUs' device files, `probe` the pattern of the driver's files, both below
    /dev; `visible` is the variable that restricts a process to some GPUs; `driver_libraries` tells whether
    containers use libraries of the host's driver.

    Containers: `apptainer` is Apptainer's option; `docker_request` requests a daemon's GPU runtime, otherwise
    `docker_devices` are passed to a container; `container_variables` select devices for the hooks of container
    runtimes.

    Clusters: `kubernetes` is the resource of pods, `backend` torch's backend for collectives, `nccl` the name of
    the backend's library, and `net_plugin` the prefix of the aws-ofi-nccl file that this library opens.
    """

    name: str
    title: str
    tag: str
    form: str
    usual: tuple[str, ...]
    backend: str
    nccl: str = ""
    torch_field: str = ""
    torch_library: str = ""
    wheels: str = ""
    nccl_wheel: str = ""
    conda_builds: tuple[str, ...] = ()
    conda_virtual: str = ""
    devices: str = ""
    probe: str = ""
    visible: str = ""
    driver_libraries: bool = False
    apptainer: str = ""
    docker_request: bool = False
    docker_devices: tuple[str, ...] = ()
    container_variables: tuple[tuple[str, str], ...] = ()
    kubernetes: str = ""
    net_plugin: str = ""

    @property
    def gpu(self) -> bool:
        """Whether its torch needs GPUs."""
        return bool(self.torch_library)

    def version(self, tag: str) -> str | None:
        """Return `12.6` for the tag cu126; None for a tag of another family or without a version."""
        match = re.fullmatch(self.tag, tag)
        return ".".join(match.groups()) if match and match.groups() else None


CPU = Accelerator("cpu", "CPUs", "cpu", "cpu", ("cpu",), backend="gloo")
CUDA = Accelerator(
    "cuda",
    "CUDA",
    "cu([0-9]{2})([0-9])",
    "cuNNN (cu126)",
    ("cu118", "cu121", "cu124", "cu126", "cu128", "cu129", "cu130"),
    torch_field="cuda",
    torch_library="libtorch_cuda.so",
    wheels="nvidia-.*|cuda-bindings|cuda-toolkit|cuda-pathfinder|triton|pytorch-triton",
    conda_builds=("cuda", "gpu"),
    conda_virtual="__cuda",
    nccl_wheel="nvidia-nccl-",
    devices="nvidia[0-9]*",
    probe="nvidia*",
    visible="CUDA_VISIBLE_DEVICES",
    driver_libraries=True,
    apptainer="--nv",
    docker_request=True,
    # enroot's hook 98-nvidia.sh and NVIDIA's container runtime read these.
    container_variables=(("NVIDIA_VISIBLE_DEVICES", "all"), ("NVIDIA_DRIVER_CAPABILITIES", "compute,utility")),
    kubernetes="nvidia.com/gpu",
    backend="nccl",
    nccl="libnccl",
    net_plugin="libnccl-net",
)
# Sources: rocm.docs.amd.com, "Running ROCm Docker containers" (devices) and "GPU isolation techniques" (variable);
# apptainer-exec(1); github.com/ROCm/k8s-device-plugin (resource); aws-ofi-nccl, src/Makefile.am of v1.18.0. torch
# calls RCCL nccl, and its wheels contain RCCL.
ROCM = Accelerator(
    "rocm",
    "ROCm",
    r"rocm([0-9]+\.[0-9]+(?:\.[0-9]+)?)",
    "rocmN.N (rocm6.4)",
    ("rocm6.2.4", "rocm6.3", "rocm6.4", "rocm7.0", "rocm7.1", "rocm7.2"),
    torch_field="hip",
    torch_library="libtorch_hip.so",
    wheels="(pytorch-)?triton-rocm",
    conda_builds=("rocm",),
    devices="dri/renderD*",
    probe="kfd",
    visible="ROCR_VISIBLE_DEVICES",
    apptainer="--rocm",
    docker_devices=("/dev/kfd:/dev/kfd:rwm", "/dev/dri:/dev/dri:rwm"),
    kubernetes="amd.com/gpu",
    backend="nccl",
    nccl="librccl",
    net_plugin="librccl-net",
)
ACCELERATORS = {accelerator.name: accelerator for accelerator in (CPU, CUDA, ROCM)}


def accelerator_of(tag: str) -> Accelerator | None:
    """Return the family of the tag `cu126`, or None when no family has such tags."""
    return next((accelerator for accelerator in ACCELERATORS.values() if re.fullmatch(accelerator.tag, tag)), None)


def gpu_families() -> list[Accelerator]:
    """Return the families whose torch needs GPUs, in the table's order."""
    return [accelerator for accelerator in ACCELERATORS.values() if accelerator.gpu]


def torch_index(tag: str) -> str:
    """Return the URL of PyTorch's wheel index for `cu126`."""
    return f"https://download.pytorch.org/whl/{tag}"


def torch_libraries() -> set[str]:
    """Return the names of torch's accelerator libraries: conda installs them in lib, wheels in torch/lib."""
    return {accelerator.torch_library for accelerator in gpu_families()}


def torch_builds(text: str) -> dict[str, str]:
    """Return the accelerators of a torch build, {"cuda": "12.6"}, from the text of torch/version.py."""
    names = [accelerator.torch_field for accelerator in gpu_families()]
    matches = {name: re.search(_FIELD.format(name), text, re.MULTILINE) for name in names}
    return {name: match[1] for name, match in matches.items() if match}


def survey_builds(survey: Collection[str]) -> dict[str, str]:
    """Return the accelerators of a torch build from the entries of a survey, such as `cuda=12.6`."""
    pairs = (pair.partition("=") for pair in survey)
    return {name: version for name, equals, version in pairs if equals}


def accelerator_fault(target: str, builds: Mapping[str, str], libraries: Collection[str], *, exact: bool) -> str | None:
    """Return why a torch built for `builds`, with accelerator `libraries`, does not suit `target`, or None.

    Without `exact` only the major version counts: conda builds of one major version are interchangeable.
    """
    tag = target.partition("-")[0]
    accelerator = accelerator_of(tag)
    if accelerator is None or not accelerator.gpu:
        if not builds and not torch_libraries() & set(libraries):
            return None
        return f"is built for {builds_title(builds) or 'GPUs'}, and {target} is for CPUs"
    title, version = accelerator.title, accelerator.version(tag) or ""
    built_for = builds.get(accelerator.torch_field)
    if built_for is None or accelerator.torch_library not in libraries:
        return f"has no {title} in it, and {target} needs {title} {version}"
    parts = 2 if exact else 1  # a HIP version has more components than its target
    if built_for.split(".")[:parts] == version.split(".")[:parts]:
        return None
    return f"is built for {title} {built_for}, and {target} is for {title} {version}"


def builds_title(builds: Mapping[str, str]) -> str:
    """Return `CUDA 12.6` for {"cuda": "12.6"}; "" for a build for CPUs."""
    families = [accelerator for accelerator in gpu_families() if accelerator.torch_field in builds]
    return " and ".join(f"{family.title} {builds[family.torch_field]}" for family in families)


ARCHES = ("x86_64", "aarch64")
_ARCH_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, order=True)
class Target:
    """One accelerator on one architecture, written `cpu-x86_64` or `cu126-aarch64`. `accelerator` is its tag."""

    accelerator: str
    arch: str

    @classmethod
    def parse(cls, name: str) -> Target:
        """Return the target called `name`. Raises UsageError for an invalid name."""
        problem = target_problem(name)
        if problem is not None:
            raise UsageError(f"{name!r} is {problem}")
        accelerator, _, arch = name.partition("-")
        return cls(accelerator, arch)

    def __str__(self) -> str:
        return self.name

    @property
    def name(self) -> str:
        return f"{self.accelerator}-{self.arch}"

    @property
    def table(self) -> str:
        """Heading of the target's table in a recipe: `[targets.cpu-x86_64]`, with quotes if the name has a dot."""
        return f'[targets."{self.name}"]' if "." in self.name else f"[targets.{self.name}]"

    @property
    def family(self) -> Accelerator:
        """Table row of the accelerator: cpu, cuda, …"""
        accelerator = accelerator_of(self.accelerator)
        assert accelerator is not None, self.accelerator
        return accelerator

    @property
    def version(self) -> str | None:
        """`12.6` for cu126; None for CPUs."""
        return self.family.version(self.accelerator)

    def platform(self, glibc: str) -> str:
        """Return the platform in the spelling of uv's --python-platform: `x86_64-manylinux_2_28`."""
        return f"{self.arch}-manylinux_{glibc.replace('.', '_')}"


def target_problem(name: str) -> str | None:
    """Return why `name` is not the name of a target, or None."""
    tag, _, arch = name.partition("-")
    if arch in ARCHES and accelerator_of(tag) is not None:
        return None
    usual = [f"{tag}-{arch}" for accelerator in ACCELERATORS.values() for tag in accelerator.usual for arch in ARCHES]
    close = closest(name.lower(), usual)
    if "." not in name and accelerator_of(f"{name}.0"):  # TOML reads the rest as a key of another table
        return f'not a target; quote a name with a dot: [targets."{name}.N-{ARCHES[0]}"]'
    *first, last = (accelerator.form for accelerator in ACCELERATORS.values())
    form = f"not a target: expected ACCELERATOR-ARCH, of {', '.join(first)} or {last}, {' or '.join(ARCHES)}"
    return f"{form}; did you mean {close!r}?" if close else form


def host_arch() -> str:
    """Return this machine's architecture in the spelling of targets (for other machines: the kernel's spelling)."""
    machine = os.uname().machine.lower()
    return _ARCH_ALIASES.get(machine, machine)


def check_host(title: str, target: Target) -> None:
    """Raise HostError when a `title` for `target` cannot be built on this host."""
    if target.arch != host_arch():
        raise HostError(
            f"a {title} for {target.name} cannot be built on this {host_arch()} host: its Python runs in it",
            f"run envbuild on an {target.arch} node (a job on the cluster), or choose a target for "
            f"{host_arch()} with --target",
        )
