"""What lies in an environment: distributions, files against their RECORDs, processors of libraries.

Run as a module it prints this as JSON: so are environments surveyed that only a container can read. It and
what it imports therefore need nothing but Python 3.9.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from envbuild.artifacts.conda_survey import is_conda, survey_conda
from envbuild.artifacts.elf_scan import ElfReport, scan_elf
from envbuild.artifacts.installed import Distribution, FileReport, check_files, distributions
from envbuild.artifacts.layer_files import check_layers

# The modules that a survey elsewhere needs, from the package's folder.
MODULES = (
    "__init__.py",
    "elf.py",
    "names.py",
    "record.py",
    "artifacts/__init__.py",
    "artifacts/conda_survey.py",
    "artifacts/elf_scan.py",
    "artifacts/installed.py",
    "artifacts/layer_files.py",
    "artifacts/survey.py",
    "recipe/__init__.py",
    "recipe/accelerators.py",
    "recipe/torch_build.py",
)


@dataclass(frozen=True)
class Survey:
    """`distributions` by normalised name; `files` and `elf` with paths relative to the environment. `layers` has of
    each source-built layer, by name, the digest of what its list says is installed."""

    distributions: dict[str, Distribution]
    files: FileReport
    elf: ElfReport
    layers: dict[str, str] = field(default_factory=dict)


def survey(root: Path, site_packages: Path, elf_machine: int) -> Survey:
    """Survey the environment at `root`; `elf_machine` is the e_machine its libraries should have.

    Of a conda environment the packages are conda's and what pip added, and paths of files begin at `root`.
    """
    elf = scan_elf(root, elf_machine)
    elf.foreign = [(os.path.relpath(path, root), machine) for path, machine in elf.foreign]
    if is_conda(root):
        found, files = survey_conda(root, site_packages)
    else:
        found, files = distributions(site_packages), check_files(site_packages)
    return Survey(found, files, elf, check_layers(root, files))


def read_survey(text: str) -> Survey:
    """The survey that `main` printed elsewhere. Raises ValueError, KeyError or TypeError for other text."""
    data: dict[str, Any] = json.loads(text)
    elf = data["elf"]
    return Survey(
        {name: Distribution(**found) for name, found in data["distributions"].items()},
        FileReport(**data["files"]),
        ElfReport(
            dict(elf["counts"]),
            [(path, machine) for path, machine in elf["foreign"]],
            elf["torch"],
        ),
        dict(data.get("layers", {})),
    )


def main(root: str, site_packages: str, elf_machine: str) -> None:
    """Print the survey of an environment as one JSON object."""
    print(json.dumps(asdict(survey(Path(root), Path(site_packages), int(elf_machine)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
