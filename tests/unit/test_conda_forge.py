"""Conda locks over real records of conda-forge: the same bytes each time, rattler's own choice, and every bound.

The records are beside the repository (../shared/conda-forge, or $ENVBUILD_CONDA_FORGE); without them the tests skip.
ENVBUILD_REPEATS=12 makes the lock twelve times.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rattler import MatchSpec, PackageRecord
from rattler.package import BuildString

from envbuild.lock.conda_format import parse_packages

TOP = Path(__file__).parents[2]
PLACES = [Path(os.environ.get("ENVBUILD_CONDA_FORGE", "/nonexistent"))]
PLACES += [one / "shared/conda-forge" for one in TOP.parents]
RECORDS = next((path for path in PLACES if (path / "noarch/repodata.json.gz").is_file()), None)
pytestmark = pytest.mark.skipif(RECORDS is None, reason="shared/conda-forge is not here: records of conda-forge")

FORGE = "https://conda.anaconda.org/conda-forge"
RECIPE = """\
name = "demo"
description = "PyTorch from conda-forge"
python = "3.11"
requirements = []
environment = "conda"

[targets.cpu-x86_64]
[targets.cpu-aarch64]
[targets.cu126-x86_64]
conda = ["pytorch * cuda12*"]

[conda]
channels = ["conda-forge"]
dependencies = ["pytorch >=2.7,<3", "numpy >=2.2,<3", "pillow", "pyyaml 6.*", "tqdm"]
"""
# py-rattler in a process of its own: its threads can crash the interpreter at its end.
OWN_CHOICE = """
import asyncio, json, os, sys
from rattler import Channel, Gateway, GenericVirtualPackage, MatchSpec, PackageName, Version, solve
from rattler.package import BuildString
request = json.loads(sys.argv[1])
virtual = [GenericVirtualPackage(PackageName(n), Version(v), BuildString(b)) for n, v, b in request["virtual"]]
found = asyncio.run(solve([Channel(request["channel"])], [MatchSpec(s) for s in request["specs"]], Gateway(),
                          platforms=[request["platform"], "noarch"], virtual_packages=virtual))
print(json.dumps(sorted(record.file_name for record in found)), flush=True)
os._exit(0)
"""


@pytest.fixture(scope="module")
def channel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert RECORDS
    folder = tmp_path_factory.mktemp("conda-forge")
    for path in RECORDS.glob("*/repodata.json.gz"):
        place = folder / path.parent.name / "repodata.json"
        place.parent.mkdir()
        place.write_bytes(gzip.decompress(path.read_bytes()))
    return folder


def lock(folder: Path, channel: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `envbuild ARGUMENTS` in `folder` with a store of its own."""
    folder.mkdir(exist_ok=True)
    (folder / "recipe.toml").write_text(RECIPE)
    (folder / "site.toml").write_text(f'[mirrors]\n"{FORGE}" = ["{channel.as_uri()}"]\n')
    environment = {**os.environ, "ENVBUILD_SITE": str(folder / "site.toml"), "ENVBUILD_STORE": str(folder / "store")}
    command = [sys.executable, "-m", "envbuild", *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)


def records(channel: Path) -> dict[str, dict[str, Any]]:
    """Return the records by file name."""
    found: dict[str, dict[str, Any]] = {}
    for path in channel.glob("*/repodata.json"):
        data = json.loads(path.read_text())
        found |= data.get("packages", {}) | data.get("packages.conda", {})
    return found


def test_a_lock_is_the_same_each_time_rattlers_choice_and_keeps_every_bound(tmp_path: Path, channel: Path) -> None:
    texts = set()
    for number in range(int(os.environ.get("ENVBUILD_REPEATS", "2"))):
        lock(tmp_path / str(number), channel, "lock", "recipe.toml", "--conda", "--target", "cpu-x86_64")
        texts.add((tmp_path / str(number) / "cpu.conda-lock.yml").read_text())
    (text,) = texts
    packages = parse_packages(text, "lock")["linux-64"]
    request = {
        "channel": channel.as_uri(),
        "platform": "linux-64",
        "specs": ["python 3.11.*", "pytorch >=2.7,<3", "numpy >=2.2,<3", "pillow", "pyyaml 6.*", "tqdm"],
        "virtual": [
            ["__unix", "0", "0"],
            ["__linux", "0", "0"],
            ["__glibc", "2.28", "0"],
            ["__archspec", "1", "x86_64"],
        ],
    }
    command = [sys.executable, "-c", OWN_CHOICE, json.dumps(request)]
    own = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert sorted(package.file_name for package in packages) == own
    known = records(channel)
    candidates: dict[str, set[tuple[str, str]]] = {}
    for row in known.values():
        candidates.setdefault(row["name"], set()).add((row["version"], row["build"]))
    for package in packages:
        given: dict[str, list[str]] = {}
        for spec in known[package.file_name]["depends"]:
            given.setdefault(spec.split()[0], []).append(spec)
        assert given.keys() == set(package.needs)
        for merged in package.depends:
            name = merged.split()[0]
            for version, build in candidates.get(name, set()):
                record = PackageRecord(name, version, BuildString(build), 0, "noarch")
                expected = all(MatchSpec(spec).matches(record) for spec in given[name])
                assert MatchSpec(merged).matches(record) == expected, (package.name, given[name], merged)


def test_the_locked_cuda_is_named_where_it_is_another_than_the_targets(tmp_path: Path, channel: Path) -> None:
    arguments = ["--conda", "--target", "cu126-x86_64", "--report", "report.md"]
    for export in ("conda-lock", "explicit", "environment"):
        arguments += ["--export", export]
    done = lock(tmp_path, channel, "lock", "recipe.toml", *arguments)
    assert "the conda packages are those of CUDA 12.9, not 12.6" in done.stderr
    assert len(done.stdout.split()) == 3 and all((tmp_path / path).is_file() for path in done.stdout.split())
    pytorch = next(line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| pytorch "))
    assert "MB" in pytorch or "GB" in pytorch
    said = lock(tmp_path, channel, "check", "recipe.toml", "--target", "cu126-x86_64").stdout
    assert "CUDA 12.9" in said and "CUDA 12.6" not in said
