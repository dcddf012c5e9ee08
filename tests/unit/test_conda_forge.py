"""Conda locks over real records of conda-forge: those that ship are solved again, by two solvers, and keep every bound.

The records are beside the repository (../shared/conda-forge, or $ENVBUILD_CONDA_FORGE); without them the tests skip.
ENVBUILD_REPEATS=12 makes the locks twelve times.
"""

from __future__ import annotations

import gzip
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lab.conda_shim import conda_shim
from rattler import MatchSpec, PackageRecord
from rattler.package import BuildString

from envbuild.lock.conda import canonical_depends
from envbuild.lock.conda_format import parse, parse_packages, render
from envbuild.lock.conda_solve import recipe_specs, virtual_packages
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Target

TOP = Path(__file__).parents[2]
PLACES = [Path(os.environ.get("ENVBUILD_CONDA_FORGE", "/nonexistent"))]
PLACES += [one / "shared/conda-forge" for one in TOP.parents]
RECORDS = next((path for path in PLACES if (path / "noarch/repodata.json.gz").is_file()), None)
pytestmark = pytest.mark.skipif(RECORDS is None, reason="shared/conda-forge is not here: records of conda-forge")

FORGE = "https://conda.anaconda.org/conda-forge"
SHIPPED = [TOP / "recipes/pt_cpu/cpu.conda-lock.yml", TOP / "recipes/pt_cuda_conda/cu129.conda-lock.yml"]
RECIPE = """\
name = "demo"
description = "PyTorch from conda-forge"
python = "{python}"
requirements = []
environment = "conda"

[targets.{target}]

[conda]
channels = ["conda-forge"]
dependencies = {dependencies}
"""
# py-rattler in a process of its own: its threads can crash the interpreter at its end.
OWN_CHOICE = """
import asyncio, json, os, sys
from rattler import Channel, Gateway, GenericVirtualPackage, MatchSpec, PackageName, Version, solve
from rattler.package import BuildString
for request in json.loads(sys.argv[1]):
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


@pytest.fixture(scope="module")
def records(channel: Path) -> dict[str, dict[str, Any]]:
    """The records by SUBDIR/FILE."""
    found: dict[str, dict[str, Any]] = {}
    for path in channel.glob("*/repodata.json"):
        data = json.loads(path.read_text())
        for name, row in {**data.get("packages", {}), **data.get("packages.conda", {})}.items():
            found[f"{path.parent.name}/{name}"] = row
    return found


def envbuild(folder: Path, channel: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `envbuild ARGUMENTS` in `folder`, with a store of its own, at a site whose conda-forge is `channel`."""
    folder.mkdir(exist_ok=True)
    (folder / "site.toml").write_text(f'[mirrors]\n"{FORGE}" = ["{channel.as_uri()}"]\n')
    own = {"ENVBUILD_SITE": str(folder / "site.toml"), "ENVBUILD_STORE": str(folder / "store")}
    command = [sys.executable, "-m", "envbuild", *arguments]
    env = {**os.environ, **own, **variables}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def demo(folder: Path, target: str, *dependencies: str, python: str = "3.11") -> None:
    folder.mkdir(exist_ok=True)
    text = RECIPE.format(python=python, target=target, dependencies=json.dumps(dependencies))
    (folder / "recipe.toml").write_text(text)


def locked_again(folder: Path, channel: Path, *options: str, **variables: str) -> list[str]:
    """Return the texts of the locks that ship, made from nothing but their recipes."""
    places = [folder / path.parent.name for path in SHIPPED]
    for place, path in zip(places, SHIPPED, strict=True):
        place.mkdir(parents=True)
        shutil.copy(path.with_name("recipe.toml"), place)
    names = [str(place / "recipe.toml") for place in places]
    done = envbuild(folder, channel, "lock", *names, "--conda", *options, **variables)
    assert done.returncode == 0, done.stderr
    return [(place / path.name).read_text() for place, path in zip(places, SHIPPED, strict=True)]


def test_the_locks_that_ship_are_solved_again_to_the_same_bytes(tmp_path: Path, channel: Path) -> None:
    shipped = [path.read_text() for path in SHIPPED]
    for number in range(int(os.environ.get("ENVBUILD_REPEATS", "1"))):
        assert locked_again(tmp_path / str(number), channel) == shipped


def test_conda_lock_solves_them_to_the_same_bytes(tmp_path: Path, channel: Path) -> None:
    """The program that conda-lock calls is a stand-in: no conda can be had here."""
    (tmp_path / "shim").mkdir()
    variables = conda_shim(tmp_path / "shim")
    found = locked_again(tmp_path / "made", channel, "--solver", "conda-lock", **variables)
    assert found == [path.read_text() for path in SHIPPED]


def test_the_locks_that_ship_are_rattlers_own_choice(channel: Path) -> None:
    requests, locked = [], []
    for path in SHIPPED:
        recipe = load_recipe(path.with_name("recipe.toml"))
        for name, part in parse(path.read_text(), path.name).items():
            target = Target.parse(name)
            specs = [spec.text for spec in recipe_specs(recipe, target)]
            virtual = virtual_packages(recipe, target)
            requests.append(
                {"channel": channel.as_uri(), "platform": part.platform, "specs": specs, "virtual": virtual}
            )
            locked.append(sorted(package.file_name for package in part.packages))
    assert len(requests) == 3
    command = [sys.executable, "-c", OWN_CHOICE, json.dumps(requests)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [json.loads(line) for line in done.stdout.splitlines()] == locked


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
def test_each_package_of_a_lock_that_ships_is_the_channels_record(
    path: Path, records: dict[str, dict[str, Any]]
) -> None:
    for platform, packages in parse_packages(path.read_text(), path.name).items():
        for package in packages:
            row = records[package.url.removeprefix(f"{FORGE}/")]
            own = {"name": package.name, "version": package.version, "build": package.build, "subdir": package.subdir}
            own |= {"md5": package.md5, "sha256": package.sha256}
            assert own == {key: row[key] for key in own}
            assert package.subdir in (platform, "noarch")
            assert package.depends == canonical_depends(row["depends"])


def test_every_bound_of_every_record_is_kept(records: dict[str, dict[str, Any]]) -> None:
    """A merged dependency accepts the records that all of its specs accept, and no others."""
    candidates: dict[str, list[PackageRecord]] = {}
    for name, version, build in sorted({(row["name"], row["version"], row["build"]) for row in records.values()}):
        record = PackageRecord(name, version, BuildString(build), 0, "noarch")
        candidates.setdefault(name, []).append(record)
    lists = {tuple(row["depends"]) for row in records.values()}
    merged: dict[tuple[str, ...], str] = {}
    for depends in lists:
        given: dict[str, list[str]] = {}
        for spec in depends:
            given.setdefault(spec.split()[0], []).append(spec)
        kept = {spec.split()[0]: spec for spec in canonical_depends(depends)}
        assert given.keys() == kept.keys()
        merged |= {(*given[name], kept[name]): name for name in given}
    assert len(merged) > 1000 and sum(len(specs) > 2 for specs in merged) > 20
    for (*specs, spec), name in merged.items():
        single, several = MatchSpec(spec), [MatchSpec(one) for one in specs]
        for record in candidates.get(name, []):
            assert single.matches(record) == all(one.matches(record) for one in several), (specs, spec)


@pytest.mark.parametrize(
    ("target", "python", "dependencies", "conflict"),
    [
        ("cpu-x86_64", "3.11", ["pytorch * cuda12*"], "__cuda *, for which no candidates were found"),
        ("cpu-x86_64", "3.11", ["pytorch >=2.7", "libblas * *openblas"], "libblas * *mkl, for which no candidates"),
        ("cpu-x86_64", "3.13", ["pytorch 2.12.*"], "python >=3.11,<3.12.0a0, for which no candidates"),
        ("cpu-x86_64", "3.11", ["pytorch 2.12.* cpu*", "nomkl"], "nomkl 1.0 would constrain"),
        ("cpu-aarch64", "3.11", ["pytorch * cuda12*"], "No candidates were found for pytorch * cuda12*"),
        ("cu126-x86_64", "3.11", ["pytorch 2.12.* cuda*", "cuda-version 12.6.*"], "cuda-version >=12.9,<13, for which"),
    ],
)
def test_the_message_for_an_unsatisfiable_recipe_names_the_conflict(
    target: str, python: str, dependencies: list[str], conflict: str, tmp_path: Path, channel: Path
) -> None:
    demo(tmp_path, target, *dependencies, python=python)
    done = envbuild(tmp_path, channel, "lock", "recipe.toml", "--conda")
    assert done.returncode == 3 and f"target {target} cannot be solved" in done.stderr, done.stderr
    assert conflict in done.stderr and len(done.stderr.splitlines()) < 25
    assert all(f"asks for '{spec}'" in done.stderr for spec in dependencies)
    assert ("the packages are for CUDA" in done.stderr) == (conflict.startswith("__cuda"))
    assert not list(tmp_path.glob("*.yml"))


def test_packages_move_when_the_recipe_or_upgrade_lets_them(tmp_path: Path, channel: Path) -> None:
    lock = "lock", "recipe.toml", "--conda"

    def versions(*arguments: str) -> dict[str, str]:
        done = envbuild(tmp_path, channel, *lock, *arguments)
        assert done.returncode == 0, done.stderr
        (packages,) = parse_packages((tmp_path / "cpu.conda-lock.yml").read_text(), "lock").values()
        return {package.name: f"{package.version} {package.build}" for package in packages}

    # As `conda env export` and conda's users write them.
    demo(tmp_path, "cpu-x86_64", "pytorch=2.11.0=cpu_mkl_py311_h338015a_101", "numpy=2.3.*", "tqdm")
    old = versions()
    assert old["pytorch"] == "2.11.0 cpu_mkl_py311_h338015a_101" and old["numpy"].startswith("2.3.")
    demo(tmp_path, "cpu-x86_64", "pytorch", "numpy", "tqdm")
    assert versions() == old
    moved = versions("--upgrade=pytorch")
    assert moved["pytorch"] == "2.12.0 cpu_mkl_py311_h338015a_100" and moved["libtorch"].startswith("2.12.0 ")
    assert {name for name in old if moved.get(name) != old[name]} <= {"pytorch", "libtorch"}
    newest = versions("--upgrade")
    assert newest["numpy"] == "2.4.6 py311h2e04523_0" and newest["pytorch"] == moved["pytorch"]


def test_the_locked_cuda_is_named_where_it_is_another_than_the_targets(tmp_path: Path, channel: Path) -> None:
    demo(tmp_path, "cu126-x86_64", "pytorch >=2.7,<3 cuda12*", "numpy >=2.2,<3")
    arguments = ["--conda", "--target", "cu126-x86_64", "--report", "report.md"]
    for export in ("conda-lock", "explicit", "environment"):
        arguments += ["--export", export]
    done = envbuild(tmp_path, channel, "lock", "recipe.toml", *arguments)
    assert "the conda packages are those of CUDA 12.9, not 12.6" in done.stderr
    assert len(done.stdout.split()) == 3 and all((tmp_path / path).is_file() for path in done.stdout.split())
    pytorch = next(line for line in (tmp_path / "report.md").read_text().splitlines() if line.startswith("| pytorch "))
    assert "MB" in pytorch or "GB" in pytorch
    said = envbuild(tmp_path, channel, "check", "recipe.toml", "--target", "cu126-x86_64").stdout
    assert "CUDA 12.9" in said and "CUDA 12.6" not in said


def limited(folder: Path, age: str, *dependencies: str) -> None:
    """Write the recipe with `exclude_newer`, which stands in its fifth line."""
    demo(folder, "cpu-x86_64", *dependencies)
    recipe = folder / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("environment =", f'exclude_newer = "{age}"\nenvironment ='))


def test_packages_that_are_too_new_are_left_out(tmp_path: Path, channel: Path) -> None:
    """packaging 25.0 is of April 2025, 26.0 of January 2026."""
    limited(tmp_path, "2026-01-01", "packaging")
    done = envbuild(tmp_path, channel, "lock", "recipe.toml", "--conda", "--report", "report.md")
    assert done.returncode == 0, done.stderr
    limit = "files uploaded from 2026-01-02T00:00:00Z on are left out (exclude_newer = 2026-01-01)"
    assert limit in done.stderr and limit in (tmp_path / "report.md").read_text()
    text = (tmp_path / "cpu.conda-lock.yml").read_text()
    assert "packaging-25.0-" in text and "as_of" not in text
    assert envbuild(tmp_path, channel, "lock", "recipe.toml", "--conda", "--check").returncode == 0
    limited(tmp_path, "1 hour", "packaging")
    assert envbuild(tmp_path, channel, "lock", "recipe.toml", "--conda", "--check").returncode == 3
    assert envbuild(tmp_path, channel, "lock", "recipe.toml", "--conda", "--upgrade").returncode == 0
    text = (tmp_path / "cpu.conda-lock.yml").read_text()
    assert "packaging-25.0-" not in text and "envbuild_exclude_newer_as_of_linux-64: " in text
    (part,) = parse(text, "lock").values()
    assert render([part]) == text and part.as_of


def test_a_spec_of_packages_that_are_too_new_is_refused_with_the_day(tmp_path: Path, channel: Path) -> None:
    limited(tmp_path, "2026-01-01", "packaging 26.3.*")
    done = envbuild(tmp_path, channel, "lock", "recipe.toml", "--conda")
    line = (
        "12:17: 'packaging 26.3.*' matches packaging 26.3 pyhc364b38_0 alone, which is too new, of 2026-08-05 00:02 UTC"
    )
    assert done.returncode == 3 and f"{line}: allowed by a date from 2026-08-05 on" in done.stderr, done.stderr
    assert "change `exclude_newer` at recipe.toml:5:1" in done.stderr
    (tmp_path / "shim").mkdir()
    by_conda_lock = envbuild(
        tmp_path, channel, "lock", "recipe.toml", "--conda", "--solver", "conda-lock", **conda_shim(tmp_path / "shim")
    )
    assert by_conda_lock.returncode == 3 and "conda-lock chose " in by_conda_lock.stderr, by_conda_lock.stderr
    assert "leave --solver out" in by_conda_lock.stderr


def test_packages_of_unknown_age_are_left_out_and_named(tmp_path: Path, channel: Path) -> None:
    known = tmp_path / "channel"
    shutil.copytree(channel, known)
    data = json.loads((known / "noarch/repodata.json").read_text())
    for row in [
        row for row in data["packages.conda"].values() if row["name"] == "packaging" and row["version"] == "25.0"
    ]:
        del row["timestamp"]
    (known / "noarch/repodata.json").write_text(json.dumps(data))
    limited(tmp_path, "2026-01-01", "packaging")
    done = envbuild(tmp_path, known, "lock", "recipe.toml", "--conda")
    assert "note: the channels state no time for packages of packaging; those were left out" in done.stderr, done.stderr
    assert "packaging-24.2-" in (tmp_path / "cpu.conda-lock.yml").read_text()
    limited(tmp_path, "2026-01-01", "packaging 25.0.*")
    refused = envbuild(tmp_path, known, "lock", "recipe.toml", "--conda").stderr
    assert (
        "'packaging 25.0.*' matches packaging 25.0 pyh29332c3_1 alone, and its channel states no time for it" in refused
    )
