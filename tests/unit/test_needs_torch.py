"""A recipe without torch is refused before anything is built: verification trains with torch."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from lab.wheels import make_recipe

from envbuild.lock.conda import CondaLock, CondaPackage
from envbuild.lock.conda_format import part_of
from envbuild.lock.conda_format import render as render_conda
from envbuild.lock.format import Lock, LockedPackage, render
from envbuild.plan.plan import Plan
from envbuild.recipe.find import shipped_folder
from envbuild.recipe.load import load_recipe
from envbuild.recipe.model import ImageTable, VerifyTable
from envbuild.recipe.targets import Target

TARGET = Target("cpu", platform.machine())
CONDA = CondaPackage(
    "python", "3.11.9", "0", "noarch", "https://c/noarch/python-3.11.9-0.conda", "0" * 32, "0" * 64
)
NO_SITE = {"ENVBUILD_SITE": os.devnull, "PIP_NO_INDEX": "1"}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """The folder of a recipe of one package, with current locks of every kind and a warning in the lock of wheels."""
    extra = "[conda]\ndependencies = ['python 3.11.*']\nchannels = ['https://c']\n"
    place = make_recipe(tmp_path / "recipes", "small", ["numpy"], extra=extra)
    loaded, name = load_recipe(place / "recipe.toml"), TARGET.name
    packages = (LockedPackage("numpy", "2.2.6", ("0" * 64,)),)
    lock = Lock(
        "small",
        name,
        "3.11",
        TARGET.platform("2.28"),
        loaded.resolution_digest(TARGET),
        packages,
        ("aged",),
    )
    (place / f"{name}.requirements.txt").write_text(render(lock))
    digest = loaded.conda_digest(TARGET)
    conda = CondaLock("small", name, digest, (CONDA,), replace(lock, packages=()))
    (place / "cpu.conda-lock.yml").write_text(render_conda([part_of(conda, ["https://c"])]))
    # The base hangs on the target, Python and [image] alone, which are those of pt_cpu.
    base = (shipped_folder() / "pt_cpu" / f"{name}.image.toml").read_text()
    (place / f"{name}.image.toml").write_text(base.replace('"pt_cpu"', '"small"'))
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **NO_SITE, "ENVBUILD_STORE": str(folder / "store")}
    command = [sys.executable, "-m", "envbuild", *arguments, "--locked", "--offline"]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=env)


@pytest.mark.parametrize("kind", ["venv", "conda", "docker", "enroot", "apptainer"])
def test_every_kind_is_refused_before_it_is_built(kind: str, small: Path) -> None:
    if kind == "conda":
        pytest.importorskip("rattler")
    options = [] if kind in ("venv", "conda") else ["--no-bytecode", "--target", TARGET.name]
    done = run(small, kind, "small", *options)
    assert done.returncode == 2, done.stderr
    assert "recipes/small/recipe.toml: " in done.stderr and "its lock has no torch" in done.stderr
    assert "add torch to " in done.stderr and "--no-verify" in done.stderr
    assert not (small / "build").exists()
    dry = run(small, kind, "small", *options, "--no-verify", "--dry-run")
    assert dry.returncode == 0, dry.stderr


def test_a_warning_of_the_lock_is_repeated_by_every_use_of_it(small: Path) -> None:
    done = run(small, "plan", "small", "--json")
    assert json.loads(done.stdout)["warnings"] == ["aged"]
    assert f"warning: {TARGET.name}: aged" in done.stderr


def test_torch_comes_from_locks_of_every_kind_and_from_an_existing_image() -> None:
    plan = Plan("r", "d", "l", "venv", "t", "3.11", "p", (), (), (), VerifyTable())
    assert not plan.has_torch
    assert replace(plan, packages=(LockedPackage("torch", "2.13.0", ()),)).has_torch
    assert replace(plan, conda=(replace(CONDA, name="pytorch"),)).has_torch
    assert not replace(plan, image=ImageTable()).has_torch
    assert replace(plan, image=ImageTable(base="docker.io/pytorch/pytorch:2.7.1")).has_torch
