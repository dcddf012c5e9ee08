"""Scan of an artifact's ELF files for their processor, and for torch's accelerator.

Part of the survey that runs inside artifacts: needs only Python 3.9.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.artifacts.installed import walk_files
from envbuild.elf import elf_machine, machine_name
from envbuild.recipe.accelerators import MAX_VERSION_FILE, VERSION_FILE, torch_builds, torch_libraries

# Code for GPUs is in ELF files too (NVIDIA's cubin, AMD's code objects); it is not for the processor.
_ACCELERATORS = frozenset({190, 224})


@dataclass
class ElfReport:
    """Counts of ELF files by machine name, and the files that are not for the wanted machine.

    `torch` has the names of torch's libraries for accelerators and, in the form `cuda=12.6`, the content of
    torch/version.py; None without torch.
    """

    counts: dict[str, int] = field(default_factory=dict)
    foreign: list[tuple[str, str]] = field(default_factory=list)
    torch: list[str] | None = None


def scan_elf(folder: Path, wanted: int) -> ElfReport:
    """Read the header of every regular file below `folder`; `wanted` is the expected e_machine."""
    report = ElfReport()
    version, libraries, known = None, set(), torch_libraries()
    for path in walk_files(folder):
        name = os.path.basename(path)
        if name in known:
            libraries.add(name)
        elif name == "version.py" and path.endswith(f"/site-packages/{VERSION_FILE}"):
            version = _read(path)
        machine = elf_machine(path)
        if machine is None or machine in _ACCELERATORS:
            continue
        name = machine_name(machine)
        report.counts[name] = report.counts.get(name, 0) + 1
        if machine != wanted:
            report.foreign.append((path, name))
    if version is not None:
        builds = [f"{name}={found}" for name, found in torch_builds(version).items()]
        report.torch = sorted(libraries) + builds
    return report


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read(MAX_VERSION_FILE)
    except OSError:
        return None
