"""A recipe without torch is refused before anything is built: verification trains with torch."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from lab.wheels import make_recipe

from envbuild.base.errors import RecipeError, UsageError
from envbuild.cli.commands import cli
from envbuild.contract.verification import VerifySettings
from envbuild.lock.conda import CondaLock, CondaPackage
from envbuild.lock.conda_format import part_of
from envbuild.lock.conda_format import render as render_conda
from envbuild.lock.format import Lock, render
from envbuild.plan import Plan, state_of
from envbuild.recipe.find import shipped_folder
from envbuild.recipe.load import load_recipe
from envbuild.recipe.model import ImageTable
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target
from envbuild.verify.static_checks import check_built_torch

TARGET = Target("cpu", platform.machine())
CONDA = CondaPackage("python", "3.11.9", "0", "noarch", "https://c/noarch/python-3.11.9-0.conda", "0" * 32, "0" * 64)
NO_SITE = {"ENVBUILD_SITE": os.devnull, "PIP_NO_INDEX": "1"}


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a recipe of one package, with current locks of every kind and a warning in the lock of wheels."""
    extra = "[conda]\ndependencies = ['python 3.11.*']\nchannels = ['https://c']\n"
    place = make_recipe(tmp_path / "recipes", "small", ["numpy"], extra=extra)
    loaded, name = load_recipe(place / "recipe.toml"), TARGET.name
    packages = (LockedPackage("numpy", "2.2.6", ("0" * 64,)),)
    lock = Lock("small", name, "3.11", TARGET.platform("2.28"), loaded.resolution_digest(TARGET), packages, ("aged",))
    (place / f"{name}.requirements.txt").write_text(render(lock))
    digest = loaded.conda_digest(TARGET)
    conda = CondaLock("small", name, digest, (CONDA,), replace(lock, packages=()))
    (place / "cpu.conda-lock.yml").write_text(render_conda([part_of(conda, ["https://c"])]))
    # The base hangs on the target, Python and [image] alone, which are those of pt_cpu.
    base = (shipped_folder() / "pt_cpu" / f"{name}.image.toml").read_text()
    (place / f"{name}.image.toml").write_text(base.replace('"pt_cpu"', '"small"'))
    monkeypatch.chdir(tmp_path)
    for variable, value in {**NO_SITE, "ENVBUILD_STORE": str(tmp_path / "store")}.items():
        monkeypatch.setenv(variable, value)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, [*arguments, "--locked", "--offline"])


@pytest.mark.parametrize("kind", ["venv", "conda", "docker", "enroot", "apptainer"])
def test_every_kind_is_refused_before_it_is_built(kind: str, small: Path) -> None:
    if kind == "conda":
        pytest.importorskip("rattler")
    options = [] if kind in ("venv", "conda") else ["--no-bytecode", "--target", TARGET.name]
    error = run(kind, "small", *options).exception
    assert isinstance(error, RecipeError) and error.exit_code == 2, error
    assert error.message.startswith("recipes/small/recipe.toml: ")
    assert "its lock has no torch" in error.message
    assert "add torch to " in str(error.hint) and "--no-verify" in str(error.hint)
    assert not (small / "build").exists()
    place = ["--out", "oci:image"] if kind == "docker" else []  # a dry run asks a daemon where the image would go there
    dry = run(kind, "small", *options, *place, "--no-verify", "--dry-run")
    assert dry.exit_code == 0, dry.exception


def test_a_warning_of_the_lock_is_repeated_by_every_use_of_it(small: Path) -> None:
    done = run("plan", "small", "--no-verify", "--json")
    assert done.stdout, done.stderr
    assert json.loads(done.stdout)["warnings"] == ["aged"]
    assert f"warning: {TARGET.name}: aged" in done.stderr


def test_torch_comes_from_locks_of_every_kind_and_from_an_existing_image() -> None:
    plan = Plan("r", "d", "l", "venv", "t", "3.11", "p", (), (), (), VerifySettings())
    assert not plan.has_torch
    assert replace(plan, packages=(LockedPackage("torch", "2.13.0", ()),)).has_torch
    assert replace(plan, conda=(replace(CONDA, name="pytorch"),)).has_torch
    assert not replace(plan, image=ImageTable()).has_torch
    assert replace(plan, image=ImageTable(base="docker.io/pytorch/pytorch:2.7.1")).has_torch


def test_verify_refuses_an_environment_without_torch(tmp_path: Path) -> None:
    plan = Plan("small", "d", "l", "venv", TARGET.name, "3.11", "p", (), (), (), VerifySettings())
    packages = (("numpy", "2.2.6", "0" * 64),)
    state = state_of(plan, python_version="3.11.9", interpreter="/usr/bin/python3", packages=packages)
    with pytest.raises(UsageError, match="it has no torch") as caught:
        check_built_torch(state, tmp_path)
    assert "recipe small" in (caught.value.hint or "")
    for name in ("torch", "pytorch"):
        check_built_torch(replace(state, packages=((name, "2.13.0", "0" * 64),)), tmp_path)
    check_built_torch(replace(state, artifact="image"), tmp_path)
