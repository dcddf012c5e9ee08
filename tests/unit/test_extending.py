"""Adding a thing costs one module and one entry: a toy of each, put into its table, is seen by all that reads it."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from envbuild.artifacts import venv
from envbuild.artifacts.folder import FolderBuild
from envbuild.base.errors import UsageError, VerificationError
from envbuild.contract.kinds import ARTIFACTS, FileArtifact, FolderArtifact, kinds_of
from envbuild.contract.receipt import PASS, passing_receipt, receipt_path
from envbuild.contract.state import FILE, State, read_state
from envbuild.data.schedulers import LAUNCHERS, TITLES
from envbuild.doctor.registry import judge
from envbuild.environment import Environment, load_environment
from envbuild.fabrics import fabric_name_problem, fabric_names, find_fabric, load_fabrics
from envbuild.jobs.artifact import open_artifact
from envbuild.jobs.model import JobRequest
from envbuild.jobs.plan import plan_job, wanted_kinds
from envbuild.jobs.schedulers import SCHEDULERS, render
from envbuild.kinds import kind_at, plan_of
from envbuild.kinds.commit import Result, failed_path, open_subject
from envbuild.kinds.folder import make_environment
from envbuild.kinds.prepare import prepare
from envbuild.matrix import SelectedRecipe, make_jobs
from envbuild.plan.plan import state_of
from envbuild.recipe.accelerators import ACCELERATORS, CUDA, gpu_families
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Target, host_arch
from envbuild.site.settings import Site, load_site
from envbuild.verify.model import Check, Settings, Verdict

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = f"cpu-{host_arch()}"
TOY = FolderArtifact("toy", "Build a toy.", "toy", sources=("package index",), imports=("rattler",))


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FolderArtifact:
    """A kind of environments that hold a state and nothing else: `artifacts/toy.py` and one entry."""

    def build(wanted: FolderBuild) -> State:
        state = state_of(wanted.plan, "3.11.7", "toy", [("torch", "2", "")])
        (wanted.staged / FILE).write_text(state.render())
        return state

    module = SimpleNamespace(
        TITLE="toy",
        build=build,
        is_current=lambda *_: True,
        command=venv.command,
        launch_environment=lambda _, env: {**env, "TOY": "1"},
    )
    monkeypatch.setitem(sys.modules, "envbuild.artifacts.toy", module)
    monkeypatch.setitem(ARTIFACTS, "toy", TOY)
    monkeypatch.chdir(tmp_path)
    return TOY


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return load_environment({"HOME": str(tmp_path), "ENVBUILD_STORE": str(tmp_path / "store")})


def site_of(folder: Path, text: str) -> Site:
    (folder / "lab.toml").write_text(text)
    return load_site({"HOME": str(folder), "USER": "ada"}, str(folder / "lab.toml"))


def built(
    kind: FolderArtifact, environment: Environment, monkeypatch: pytest.MonkeyPatch, *, status: str = PASS, **table: Any
) -> Result:
    """Build a toy of pt_cpu with `table` in its [verify]; its verification ends with `status` without a training."""

    def verify(_subject: Any, settings: Settings, *_: Any, **__: Any) -> Verdict:
        return Verdict((Check("toy", "toy", status, "", ""),), settings, 0.1, Path("logs"))

    monkeypatch.setattr("envbuild.verify.run.verify", verify)
    loaded, target = load_recipe(REPOSITORY / "recipes/pt_cpu/recipe.toml"), Target.parse(HERE)
    plan, trainer = prepare(loaded, target, environment, artifact=kind.name, locked=True, offline=True, log=print)
    plan, path = replace(plan, verify=replace(plan.verify, **table)), kind.default_path("pt_cpu", HERE)
    return make_environment(kind, plan, trainer, environment, path, offline=True)


def test_an_artifact_kind_is_planned_and_offered(toy: FolderArtifact, environment: Environment) -> None:
    loaded = load_recipe(REPOSITORY / "recipes/pt_cpu/recipe.toml")
    plan = plan_of(toy, loaded, Target.parse(HERE), environment, locked=True, offline=True, log=print)
    assert plan.artifact == "toy" and plan.has_torch
    jobs, _ = make_jobs([SelectedRecipe("pt_cpu", loaded)], dict.fromkeys(("x86_64", "aarch64"), "r"), environment)
    assert f"envbuild toy pt_cpu --target {HERE} --locked" in [job.command for job in jobs]
    verdicts = judge({})
    assert list(verdicts) == list(ARTIFACTS) and verdicts["toy"]["build"].status == "ok"


def test_an_artifact_kind_is_built_verified_and_found_again(
    toy: FolderArtifact, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = built(toy, environment, monkeypatch)
    assert result.built and result.verified and result.path == Path("build/pt_cpu", HERE, "toy")
    receipt = passing_receipt(result.path, result.digest)
    assert receipt is not None and receipt["artifact"]["kind"] == "toy"
    again = built(toy, environment, monkeypatch)
    assert not again.built and not again.verified
    assert kind_at(result.path) is toy
    subject = open_subject(result.path, environment)
    assert (subject.digest, subject.runtime, subject.root) == (result.digest, "host", result.path)
    with pytest.raises(UsageError, match="no runtime to choose"):
        open_subject(result.path, environment, "own")


def test_an_artifact_kind_that_fails_leaves_the_one_before_it(
    toy: FolderArtifact, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = built(toy, environment, monkeypatch)
    monkeypatch.setattr(sys.modules["envbuild.artifacts.toy"], "is_current", lambda *_: False)
    with pytest.raises(VerificationError) as failed:
        built(toy, environment, monkeypatch, status="fail")
    kept = failed_path(good.path)
    assert read_state(kept) and json.loads(receipt_path(kept).read_text())["passed"] is False
    assert passing_receipt(good.path, good.digest) is not None
    assert failed.value.hint and f"the failed artifact is {kept}" in failed.value.hint
    assert not [one for one in good.path.parent.iterdir() if one.name.startswith(".")]


def test_an_environment_has_the_verification_of_its_recipe(
    toy: FolderArtifact, environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else `envbuild verify`, which knows no recipe, would judge by a [verify] that is no more."""
    good = built(toy, environment, monkeypatch)
    with pytest.raises(VerificationError):
        built(toy, environment, monkeypatch, status="fail", command="false")
    again = open_subject(failed_path(good.path), environment)
    assert again.state.verify["command"] == "false" and again.digest == good.digest
    assert built(toy, environment, monkeypatch, command="true").built
    assert open_subject(good.path, environment).state.verify["command"] == "true"
    assert not built(toy, environment, monkeypatch, command="true").built


def test_an_artifact_kind_runs_in_jobs(
    toy: FolderArtifact, environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result = built(toy, environment, monkeypatch)
    site = site_of(tmp_path, '[scheduler]\nkind = "slurm"\n')
    assert wanted_kinds("slurm", site) == ("venv", "conda", "toy")
    opened = open_artifact("pt_cpu", wanted_kinds("slurm", site), HERE)
    assert (opened.artifact.kind, opened.artifact.digest) == ("toy", result.digest)
    plan = plan_job(JobRequest(current=tmp_path), opened, site)
    assert plan.runtime == "folder" and opened.artifact.path in render(plan)


def test_a_kind_of_image_file_is_started_by_its_container_runtime(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    toy = FileArtifact("toy", "", "{recipe}.toy", (), (), starters=("toyrun",), containers=("apptainer",))
    monkeypatch.setitem(ARTIFACTS, "toy", toy)
    site = site_of(tmp_path, '[scheduler]\nkind = "pbs"\n[container]\nruntime = "apptainer"\n')
    assert kinds_of("file") == ("enroot", "apptainer", "toy")
    assert wanted_kinds("pbs", site) == ("apptainer", "toy", "enroot", "venv", "conda")
    assert toy.default_path("r", HERE) == Path("build/r", HERE, "r.toy")


def test_a_scheduler_takes_jobs(
    toy: FolderArtifact, environment: Environment, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    built(toy, environment, monkeypatch)
    monkeypatch.setitem(SCHEDULERS, "toy", replace(SCHEDULERS["flux"], suffix=".toy"))
    monkeypatch.setitem(LAUNCHERS, "toy", LAUNCHERS["flux"])
    monkeypatch.setitem(TITLES, "toy", "Toy")
    site = site_of(tmp_path, "")
    opened = open_artifact("pt_cpu", wanted_kinds("toy", site), HERE)
    plan = plan_job(JobRequest(scheduler="toy", current=tmp_path), opened, site)
    assert (plan.scheduler, plan.launcher) == ("toy", "flux") and "#flux:" in render(plan)


def test_an_accelerator_has_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    toy = replace(CUDA, name="toy", title="Toys", tag="toy([0-9])", form="toyN (toy1)", usual=("toy1",))
    with pytest.raises(UsageError, match="toy1"):
        Target.parse("toy1-x86_64")
    monkeypatch.setitem(ACCELERATORS, "toy", toy)
    target = Target.parse("toy1-x86_64")
    assert target.family is toy and target.version == "1" and toy in gpu_families()


def test_a_fabric_may_be_named_by_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = load_fabrics()
    assert fabric_name_problem("toy")
    monkeypatch.setitem(known, "toy", replace(known["any"], name="toy"))
    assert fabric_name_problem("toy") is None and find_fabric("toy").name == "toy"
    assert "toy" in fabric_names()
