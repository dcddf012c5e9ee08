"""Survey of an environment: distributions, files against their RECORDs, ELF files for their processor and accelerator.

Run as a module, it prints the survey as JSON, for environments that only a container can read. It and its imports
therefore need only Python 3.9.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from envbuild.artifacts.conda_survey import is_conda, survey_conda
from envbuild.artifacts.installed import Distribution, FileReport, check_files, check_layers, distributions, walk_files
from envbuild.elf import elf_machine, machine_name
from envbuild.files import parse_json, read_regular
from envbuild.recipe.accelerators import MAX_VERSION_FILE, VERSION_FILE, torch_builds, torch_libraries

# The modules that a survey in a container needs, relative to the package's folder.
MODULES = (
    "__init__.py", "elf.py", "files.py", "fingerprint.py", "names.py",
    "artifacts/__init__.py", "artifacts/conda_survey.py", "artifacts/installed.py", "artifacts/survey.py",
    "recipe/__init__.py", "recipe/accelerators.py",
)  # fmt: skip
# Code for GPUs is in ELF files too (NVIDIA's cubin, AMD's code objects); it is not for the processor.
_ACCELERATORS = frozenset({190, 224})


def survey_files(folder: str) -> dict[str, bytes]:
    """Return the modules that a survey in a container needs, by their paths below the folder `folder`."""
    package = Path(__file__).parents[1]
    return {f"{folder}/envbuild/{name}": (package / name).read_bytes() for name in MODULES}


@dataclass
class ElfReport:
    """Counts of ELF files by machine name, and the files that are not for the wanted machine.

    `torch` has the names of torch's libraries for accelerators and, in the form `cuda=12.6`, the content of
    torch/version.py; None without torch.
    """

    counts: dict[str, int] = field(default_factory=dict)
    foreign: list[tuple[str, str]] = field(default_factory=list)
    torch: list[str] | None = None


@dataclass(frozen=True)
class Survey:
    """The survey of an environment; `distributions` are by normalized name.

    Paths in `elf` are relative to the environment; paths in `files` are relative to site-packages, in a conda
    environment and for source layers to the environment. `layers` maps the name of each source layer to the digest of
    the files in its list.
    """

    distributions: dict[str, Distribution]
    files: FileReport
    elf: ElfReport
    layers: dict[str, str] = field(default_factory=dict)


def survey(root: Path, site_packages: Path, elf_machine: int, known: FileReport | None = None) -> Survey:
    """Survey the environment at `root`; `elf_machine` is the expected e_machine of its libraries.

    `known` is the report on its files if they have been compared with its manifest, and not with the RECORDs alone.
    """
    elf = scan_elf(root, elf_machine)
    elf.foreign = [(os.path.relpath(path, root), machine) for path, machine in elf.foreign]
    if is_conda(root):
        found, files = survey_conda(root, site_packages, known)
    else:
        found, files = distributions(site_packages), known or check_files(site_packages)
    return Survey(found, files, elf, check_layers(root, None if known else files))


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
        report.torch = sorted(libraries) + [f"{name}={found}" for name, found in torch_builds(version).items()]
    return report


def _read(path: str) -> str | None:
    try:
        return read_regular(path)[:MAX_VERSION_FILE].decode("utf-8", "replace")
    except OSError:
        return None


def read_survey(text: str) -> Survey:
    """Return the survey that `main` printed elsewhere.

    Raises ValueError, KeyError, TypeError or AttributeError for any other text.
    """
    data: dict[str, Any] = parse_json(text)
    elf = data["elf"]
    return Survey(
        {name: Distribution(**found) for name, found in data["distributions"].items()},
        FileReport(**data["files"]),
        ElfReport(dict(elf["counts"]), [(path, machine) for path, machine in elf["foreign"]], elf["torch"]),
        dict(data.get("layers", {})),
    )


def main(root: str, site_packages: str, elf_machine: str) -> None:
    """Print the survey of an environment as one JSON object."""
    print(json.dumps(asdict(survey(Path(root), Path(site_packages), int(elf_machine)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
