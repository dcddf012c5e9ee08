"""Survey of an environment: distributions, files against their RECORDs, ELF files for their processor and accelerator.

The files are those of this host, or those of an image that was read from outside.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from envbuild.artifacts.conda_survey import is_conda, survey_conda
from envbuild.artifacts.linkage import Linkage, link
from envbuild.base.elf import Elf, elf_machine, machine_name
from envbuild.contract.installed import HOST, Distribution, FileReport, Files, check_files, distributions
from envbuild.contract.layer_lists import check_layers
from envbuild.gpu_code import Containers
from envbuild.recipe.accelerators import MAX_VERSION_FILE, VERSION_FILE, torch_builds, torch_libraries
from envbuild.recipe.targets import Target

# Code for GPUs is in ELF files too (NVIDIA's cubin, AMD's code objects); it is not for the processor.
_ACCELERATORS = frozenset({190, 224})
_MAX_METADATA = 1 << 20


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


@dataclass(frozen=True)
class Survey:
    """The survey of an environment; `distributions` are by normalized name.

    Paths in `elf` are relative to the environment; paths in `files` are relative to site-packages, in a conda
    environment and for source layers to the environment. `layers` maps the name of each source layer to the digest of
    the files in its list. `requires` are the requirements in the metadata of the installed torch.
    """

    distributions: dict[str, Distribution]
    files: FileReport
    elf: ElfReport
    layers: dict[str, str] = field(default_factory=dict)
    linkage: Linkage = field(default_factory=Linkage)
    requires: tuple[str, ...] = ()


def survey(
    root: Path,
    site_packages: Path,
    elf_machine: int,
    known: FileReport | None = None,
    files: Files = HOST,
    *,
    gpu: bool = False,
) -> Survey:
    """Survey the environment at `root`; `elf_machine` is the expected e_machine of its libraries.

    `known` is the report on its files if they have been compared with its manifest, and not with the RECORDs alone.
    With `gpu`, libraries are read for code for GPUs. Raises OSError.
    """
    elf = scan_elf(root, elf_machine, files, gpu=gpu)
    elf.gpu_code = {os.path.relpath(path, root): found for path, found in elf.gpu_code.items()}
    linkage = link(os.fspath(root), elf.libraries, elf_machine, files)
    elf.libraries.clear()  # their symbols take much memory
    elf.foreign = [(os.path.relpath(path, root), machine) for path, machine in elf.foreign]
    if is_conda(root, files):
        found, report = survey_conda(root, site_packages, known, files)
    else:
        found = distributions(site_packages, files=files)
        report = known or check_files(site_packages, files=files)
    layers = check_layers(root, None if known else report, files)
    return Survey(found, report, elf, layers, linkage, _requires(site_packages, found.get("torch"), files))


def scan_elf(folder: Path, wanted: int, files: Files = HOST, *, gpu: bool = False) -> ElfReport:
    """Read the header of every file below `folder`; `wanted` is the expected e_machine. With `gpu`, code for GPUs."""
    report = ElfReport()
    version, libraries, known = None, set(), torch_libraries()
    for path in files.walk(str(folder)):
        name = os.path.basename(path)
        if name in known:
            libraries.add(name)
        elif name == "version.py" and path.endswith(f"/site-packages/{VERSION_FILE}"):
            version = _read(path, files)
        machine = elf_machine(files.head(path))
        if machine is None or machine in _ACCELERATORS:
            continue
        name = machine_name(machine)
        report.counts[name] = report.counts.get(name, 0) + 1
        if machine != wanted:
            report.foreign.append((path, name))
        elif not files.target(path):
            if gpu and (found := files.gpu_code(path)):
                report.gpu_code[path] = found
            if (elf := files.elf(path)) and elf.dynamic:
                report.libraries[path] = elf
    if version is not None:
        report.torch = sorted(libraries) + [f"{name}={found}" for name, found in torch_builds(version).items()]
    return report


def folder_gpu_code(root: Path, target: Target) -> dict[str, Containers]:
    """Return the containers of each library in the environment at `root`, by its path there. Raises OSError."""
    found = scan_elf(root, target.elf_machine, gpu=True).gpu_code
    return {os.path.relpath(path, root): containers for path, containers in found.items()}


def _requires(site_packages: Path, torch: Distribution | None, files: Files) -> tuple[str, ...]:
    path = f"{site_packages}/torch-{torch.version}.dist-info/METADATA" if torch else ""
    text = (_read(path, files, _MAX_METADATA) if path else "") or ""
    head = text.partition("\n\n")[0].splitlines()
    return tuple(line.partition(":")[2].strip() for line in head if line.startswith("Requires-Dist:"))


def _read(path: str, files: Files, most: int = MAX_VERSION_FILE) -> str | None:
    try:
        return files.read(path)[:most].decode("utf-8", "replace")
    except OSError:
        return None
