"""Adding a thing costs one module and one entry: toys that are built, trained and judged for real.

The module of the toy kind has nothing of the venv's: it unpacks wheels with zipfile. `tests/unit/test_extending.py` has
toys of all other things.
"""

from __future__ import annotations

import json
import os
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from envbuild.base import host
from envbuild.build.commit import open_subject
from envbuild.build.folder import make_environment, prepare_folder
from envbuild.build.installing import FolderBuild
from envbuild.contract import kinds
from envbuild.contract.installed import distributions, names_and_versions
from envbuild.contract.kinds import FolderArtifact
from envbuild.contract.manifest import seal, write_manifest
from envbuild.contract.receipt import passing_receipt
from envbuild.contract.state import FILE, State, has_packages, site_packages
from envbuild.job_inputs import open_artifact
from envbuild.jobs.model import JobRequest
from envbuild.jobs.plan import plan_job, wanted_kinds
from envbuild.jobs.schedulers import render
from envbuild.layers.wheels import locate
from envbuild.plan import state_of
from envbuild.pythons import provide_python
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Target, host_arch
from envbuild.run_environment import load_environment
from envbuild.site.settings import load_site

from .conftest import REPOSITORY

HERE = f"cpu-{host_arch()}"
TOY = FolderArtifact("toy", "Build a toy.", "toy", sources=("package index",), imports=("rattler",))


def build(wanted: FolderBuild) -> State:
    """Unpack the wheels beside a link to Python; pyvenv.cfg is Python's own file for such a folder."""
    plan, environment, staged = wanted.plan, wanted.environment, wanted.staged
    python = provide_python(plan.python, environment, offline=wanted.offline)
    packages = site_packages(staged, plan.python)
    located, own = locate(plan, wanted.trainer, environment, wanted.offline)
    for wheel in (*located, *own):
        with zipfile.ZipFile(wheel.path) as archive:
            archive.extractall(packages)
            for entry in archive.infolist():
                if mode := entry.external_attr >> 16 & 0o777:
                    (packages / entry.filename).chmod(mode | 0o600)
    (staged / "bin").mkdir()
    (staged / "bin/python").symlink_to(python.path)
    (staged / "pyvenv.cfg").write_text(f"home = {Path(python.path).parent}\n")
    found = [(one.name, one.version, one.record) for one in distributions(packages).values()]
    state = state_of(plan, python.version, os.path.realpath(python.path), found, own=own)
    (staged / FILE).write_text(state.render())
    manifest, files = write_manifest(staged, host.workers(environment.variables))
    seal(staged, manifest, files, environment.store)
    return state


def is_current(path: Path, state: State, python: str | None = None) -> bool:
    return has_packages(path, state, names_and_versions(site_packages(path, state.python)).items())


def command(path: Path, program: str, *arguments: str) -> list[str]:
    module = ["-m", "torch.distributed.run"] if program == "torchrun" else []
    return [str(path.absolute() / "bin/python"), *module, *arguments]


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> FolderArtifact:
    """A kind of environments: `envbuild/build/toy.py` and one entry."""
    module = SimpleNamespace(
        TITLE="toy", build=build, is_current=is_current, command=command, launch_environment=lambda _, env: dict(env)
    )
    monkeypatch.setitem(sys.modules, "envbuild.build.toy", module)  # type: ignore[arg-type]
    monkeypatch.setitem(kinds.ARTIFACTS, "toy", TOY)  # type: ignore[attr-defined]
    record_property("files of an addition", ["envbuild/build/toy.py", "envbuild/contract/kinds.py"])
    return TOY


def test_a_kind_of_artifact_trains_and_is_judged(
    toy: FolderArtifact, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, session_store: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVBUILD_STORE", str(session_store))
    environment, target = load_environment(), Target.parse(HERE)
    loaded = load_recipe(REPOSITORY / "recipes/pt_cpu/recipe.toml")
    plan, trainer = prepare_folder(toy, loaded, target, environment, locked=True, offline=False, log=print)
    result = make_environment(toy, plan, trainer, environment, toy.default_path("pt_cpu", HERE), offline=False)
    assert result.built and result.verified and result.path == Path("build/pt_cpu", HERE, "toy")
    receipt = passing_receipt(result.path, result.digest)
    assert receipt is not None and receipt["artifact"]["kind"] == "toy" and receipt["runtime"] == "host"
    tried = {check["name"]: check["status"] for check in receipt["checks"]}
    assert [name for name, status in tried.items() if status != "pass"] == ["command", "restart"]
    assert {"installed", "linkage", "launch", "allreduce", "resume", "loss"} <= tried.keys()
    assert not make_environment(toy, plan, trainer, environment, result.path, offline=True).built

    (site_packages(result.path, plan.python) / "torch/nn/modules/linear.py").write_text("raise SystemExit(3)\n")
    subject = open_subject(result.path, environment)
    assert subject.survey(600.0).files.altered

    (tmp_path / "lab.toml").write_text('[scheduler]\nkind = "slurm"\n')
    site = load_site({"HOME": str(tmp_path), "USER": "ada"}, str(tmp_path / "lab.toml"))
    opened = open_artifact("pt_cpu", wanted_kinds("slurm", site), HERE, unverified=True)
    assert opened.artifact.kind == "toy"
    assert f"{result.path.absolute()}/bin/python -I" in render(plan_job(JobRequest(current=tmp_path), opened, site))
    assert json.loads((result.path / FILE).read_text())["artifact"] == "toy"
