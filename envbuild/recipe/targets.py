"""Targets: the accelerator and the CPU architecture of an environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from envbuild.base.elf import MACHINES
from envbuild.base.errors import HostError, UsageError
from envbuild.base.toml import closest
from envbuild.recipe.accelerators import ACCELERATORS, Accelerator, accelerator_of

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
        found = accelerator_of(self.accelerator)
        assert found is not None, self.accelerator
        return found

    @property
    def version(self) -> str | None:
        """`12.6` for cu126; None for CPUs."""
        return self.family.version(self.accelerator)

    def platform(self, glibc: str) -> str:
        """Return the platform in the spelling of uv's --python-platform: `x86_64-manylinux_2_28`."""
        return f"{self.arch}-manylinux_{glibc.replace('.', '_')}"

    @property
    def elf_machine(self) -> int:
        """e_machine in the ELF header of this architecture's programs and libraries."""
        return MACHINES[self.arch]


def target_problem(name: str) -> str | None:
    """Return why `name` is not the name of a target, or None."""
    tag, _, arch = name.partition("-")
    if arch in ARCHES and accelerator_of(tag) is not None:
        return None
    usual = [f"{tag}-{arch}" for one in ACCELERATORS.values() for tag in one.usual for arch in ARCHES]
    close = closest(name.lower(), usual)
    if "." not in name and accelerator_of(f"{name}.0"):  # TOML reads the rest as a key of another table
        return f'not a target; quote a name with a dot: [targets."{name}.N-{ARCHES[0]}"]'
    *first, last = (one.form for one in ACCELERATORS.values())
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
