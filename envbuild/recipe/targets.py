"""Targets: the accelerator and the CPU architecture that an environment is for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from envbuild.errors import UsageError
from envbuild.toml import closest

ARCHES = ("x86_64", "aarch64")
# Any cuNNN is accepted; these are the ones proposed for a misspelt name.
_USUAL_ACCELERATORS = ("cpu", "cu118", "cu121", "cu124", "cu126", "cu128", "cu129", "cu130")
_NAME = re.compile(r"(cpu|cu[0-9]{3})-(x86_64|aarch64)")
_ARCH_ALIASES = {"amd64": "x86_64", "arm64": "aarch64"}
_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


@dataclass(frozen=True, order=True)
class Target:
    """One accelerator on one architecture, written `cpu-x86_64` or `cu126-aarch64`."""

    accelerator: str
    arch: str

    @classmethod
    def parse(cls, name: str) -> Target:
        """The target called `name`. Raises UsageError when that is not a target's name."""
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
    def is_cuda(self) -> bool:
        return self.accelerator != "cpu"

    @property
    def cuda_version(self) -> str | None:
        """`12.6` for cu126; None without CUDA."""
        return f"{self.accelerator[2:4]}.{self.accelerator[4:]}" if self.is_cuda else None

    def platform(self, glibc: str) -> str:
        """The platform as uv's --python-platform spells it: `x86_64-manylinux_2_28`."""
        return f"{self.arch}-manylinux_{glibc.replace('.', '_')}"

    @property
    def elf_machine(self) -> int:
        """e_machine in the ELF header of this architecture's programs and libraries."""
        return _ELF_MACHINES[self.arch]


def target_problem(name: str) -> str | None:
    """Why `name` is not the name of a target; None when it is one."""
    if _NAME.fullmatch(name):
        return None
    usual = [f"{accelerator}-{arch}" for accelerator in _USUAL_ACCELERATORS for arch in ARCHES]
    close = closest(name.lower(), usual)
    form = "not a target: expected ACCELERATOR-ARCH, of cpu or cuNNN (cu126), x86_64 or aarch64"
    return f"{form}; did you mean {close!r}?" if close else form


def host_arch() -> str:
    """This machine's architecture as targets spell it (other machines: as the kernel does)."""
    machine = os.uname().machine.lower()
    return _ARCH_ALIASES.get(machine, machine)
