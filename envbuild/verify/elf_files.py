"""ELF files of an artifact: their processors, the accelerator of its torch, the GPU code in its libraries."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.base.elf import MACHINES, Elf, elf_machine, machine_name
from envbuild.contract.installed import HOST, Files
from envbuild.gpus import Containers
from envbuild.recipe.targets import MAX_VERSION_FILE, VERSION_FILE, Target, torch_builds, torch_libraries

# Code for GPUs is in ELF files too (NVIDIA's cubin, AMD's code objects); it is not for the processor.
_ACCELERATORS = frozenset({190, 224})


@dataclass
class ElfReport:
    """Counts of ELF files by machine name, and the files that are not for the wanted machine.

    `torch` has the names of torch's libraries for accelerators and, in the form `cuda=12.6`, the content of
    torch/version.py; None without torch. `gpu_code` maps each library with code for GPUs to its containers, `libraries`
    are the dynamic files for the wanted machine, by path.
    """

    counts: dict[str, int] = field(default_factory=dict)
    foreign: list[tuple[str, str]] = field(default_factory=list)
    torch: list[str] | None = None
    gpu_code: dict[str, Containers] = field(default_factory=dict)
    libraries: dict[str, Elf] = field(default_factory=dict, compare=False, repr=False)


def scan_elf(folder: Path, expected_machine: int, files: Files = HOST, *, gpu: bool = False) -> ElfReport:
    """Read the header of every file below `folder`, with `gpu` also GPU code; `expected_machine` is an e_machine."""
    report = ElfReport()
    version, libraries, known = None, set(), torch_libraries()
    for path in files.walk(str(folder)):
        name = os.path.basename(path)
        if name in known:
            libraries.add(name)
        elif name == "version.py" and path.endswith(f"/site-packages/{VERSION_FILE}"):
            version = read_text(path, files)
        machine = elf_machine(files.head(path))
        if machine is None or machine in _ACCELERATORS:
            continue
        name = machine_name(machine)
        report.counts[name] = report.counts.get(name, 0) + 1
        if machine != expected_machine:
            report.foreign.append((path, name))
        elif not files.target(path):
            if gpu and (containers := files.gpu_code(path)):
                report.gpu_code[path] = containers
            if (elf := files.elf(path)) and elf.dynamic:
                report.libraries[path] = elf
    if version is not None:
        report.torch = sorted(libraries) + [f"{name}={value}" for name, value in torch_builds(version).items()]
    return report


def folder_gpu_code(root: Path, target: Target, files: Files = HOST) -> dict[str, Containers]:
    """Return the containers of each library in the environment at `root`, by its path there. Raises OSError."""
    containers_of = scan_elf(root, MACHINES[target.arch], files, gpu=True).gpu_code
    return {os.path.relpath(path, root): containers for path, containers in containers_of.items()}


def read_text(path: str, files: Files, most: int = MAX_VERSION_FILE) -> str | None:
    try:
        return files.read(path)[:most].decode("utf-8", "replace")
    except OSError:
        return None
