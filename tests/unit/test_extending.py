"""Adding a thing costs one module and one entry: a toy of each, put into its table, is seen by all that reads it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from envbuild import runtimes
from envbuild.base.errors import RecipeError, UsageError, VerificationError
from envbuild.build import squash_files
from envbuild.build.commit import Result, failed_path, open_subject
from envbuild.build.folder import make_environment
from envbuild.build.image import plan_of
from envbuild.build.installing import FolderBuild
from envbuild.build.kinds import kind_at
from envbuild.build.prepare import prepare
from envbuild.build.squash import imported_file
from envbuild.contract import kinds
from envbuild.contract.kinds import ARTIFACTS, FileArtifact, FolderArtifact, kinds_of
from envbuild.contract.receipt import PASS, passing_receipt, receipt_path
from envbuild.contract.state import FILE, State, read_state
from envbuild.contract.verification import VerifySettings
from envbuild.data import schedulers as scheduler_rows
from envbuild.doctor.machine import tiny_image
from envbuild.doctor.registry import judge
from envbuild.environment import Environment
from envbuild.fabrics import fabric_name_problem, fabric_names, find_fabric, load_fabrics
from envbuild.image.reference import parse_source
from envbuild.job_inputs import open_artifact
from envbuild.jobs import schedulers
from envbuild.jobs.model import JobArtifact, JobInputs, JobRequest
from envbuild.jobs.plan import plan_job, wanted_kinds
from envbuild.jobs.schedulers import render
from envbuild.matrix import SelectedRecipe, make_jobs
from envbuild.plan import state_of
from envbuild.recipe import targets
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Accelerator, Target, gpu_families, host_arch
from envbuild.run_environment import load_environment
from envbuild.runtimes.base import HostStart, Runtime
from envbuild.site.settings import Site, load_site
from envbuild.verify import image_file, image_runtime
from envbuild.verify.model import Check, Verdict

REPOSITORY = Path(__file__).resolve().parents[2]
HERE = f"cpu-{host_arch()}"
# "docker" is also the name of a form of manifests.
ALLOWED = ("image.py: options.form == 'docker'",)
TOY = FolderArtifact("toy", "Build a toy.", "toy", sources=("package index",), imports=("rattler",))


class Addition:
    """What an addition of a thing changes: rows of tables, and new modules. The files are counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.files: set[str] = set()

    def row(self, module: ModuleType, table: str, name: str, value: object) -> None:
        """Put a row into a table of `module`."""
        self.monkeypatch.setitem(getattr(module, table), name, value)
        assert module.__file__ is not None
        self.files.add(str(Path(module.__file__).relative_to(REPOSITORY)))

    def module(self, name: str, content: object) -> None:
        """Add a module."""
        self.monkeypatch.setitem(sys.modules, name, content)  # type: ignore[arg-type]
        self.files.add(f"{name.replace('.', '/')}.py")


@pytest.fixture
def addition(monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]) -> Iterator[Addition]:
    """An addition; the summary of the tests shows the number of its files."""
    added = Addition(monkeypatch)
    yield added
    record_property("files of an addition", sorted(added.files))


@pytest.fixture
def toy(addition: Addition, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FolderArtifact:
    """A kind of environments that hold a state and nothing else: `build/toy.py` and one entry."""

    def build(wanted: FolderBuild) -> State:
        state = state_of(wanted.plan, "3.11.7", "toy", [("torch", "2", "")])
        (wanted.staged / FILE).write_text(state.render())
        return state

    module = SimpleNamespace(
        TITLE="toy",
        build=build,
        is_current=lambda *_: True,
        command=lambda path, program, *arguments: [str(path / "bin" / program), *arguments],
        launch_environment=lambda _, env: {**env, "TOY": "1"},
    )
    addition.module("envbuild.build.toy", module)
    addition.row(kinds, "ARTIFACTS", "toy", TOY)
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

    def verify(_subject: Any, settings: VerifySettings, *_: Any, **__: Any) -> Verdict:
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
    monkeypatch.setattr(sys.modules["envbuild.build.toy"], "is_current", lambda *_: False)
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
    assert again.state.verify.command == "false" and again.digest == good.digest
    assert built(toy, environment, monkeypatch, command="true").built
    assert open_subject(good.path, environment).state.verify.command == "true"
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


TOYRUN = Runtime(
    kinds=("toy", "enroot"),
    words=lambda container: ["toyrun start", container.image],
    host=HostStart(
        programs=("toyrun",),
        variables=("TOY_",),
        command=lambda started: ([str(started.runtime), started.image, *started.command], dict(started.variables)),
    ),
)


def test_a_kind_of_image_file_is_started_by_its_container_runtime(addition: Addition, tmp_path: Path) -> None:
    toy = FileArtifact("toy", "", "{recipe}.toy", (), ())
    addition.row(kinds, "ARTIFACTS", "toy", toy)
    addition.row(runtimes, "RUNTIMES", "toyrun", TOYRUN)
    site = site_of(tmp_path, '[scheduler]\nkind = "pbs"\n[container]\nruntime = "toyrun"\n')
    assert kinds_of("file") == ("enroot", "apptainer", "toy")
    assert wanted_kinds("pbs", site) == ("toy", "enroot", "venv", "conda")
    assert toy.default_path("r", HERE) == Path("build/r", HERE, "r.toy")


def test_a_format_of_image_files_is_read_and_written(addition: Addition, tmp_path: Path) -> None:
    """A page of its own before the squashfs."""
    toy = FileArtifact("toy", "", "{recipe}.toy", (), (), format="paged", mode=0o640, joint="-", last_words=1)
    addition.row(kinds, "ARTIFACTS", "toy", toy)
    paged = image_file.ImageFormat("paged", lambda head: head.startswith(b"PAGED"), lambda _, __: 4096)
    addition.row(image_file, "FORMATS", "paged", paged)
    addition.row(squash_files, "WRITERS", "paged", squash_files.write_sqsh)
    path = tmp_path / "x.toy"
    path.write_bytes(b"PAGED".ljust(4096) + tiny_image("gzip"))
    assert image_file.image_kind(path) == "toy" and kind_at(path) is toy
    image = image_file.open_image_file(path)
    assert (image.kind, image.offset, image.format, image.compressor) == ("toy", 4096, "paged", "gzip")
    with pytest.raises(UsageError, match="is no SIF image"):
        image_file.open_image_file(path, "apptainer")
    assert imported_file("toy", parse_source("docker://r.example.org/team/pytorch:2.7")).path == Path("2.7.toy")


def test_a_container_runtime_starts_image_files_and_jobs(
    addition: Addition, environment: Environment, tmp_path: Path
) -> None:
    """By one entry."""
    addition.row(runtimes, "RUNTIMES", "toyrun", TOYRUN)
    version = '[ "$1" != --version ] || exec echo toyrun version 1\n'
    (tmp_path / "toyrun").write_text(f'#!/bin/sh\n{version}echo "$TOY_HOST-$TOY_RANK" "$@"\n')
    (tmp_path / "toyrun").chmod(0o755)
    (tmp_path / "x.sqsh").write_bytes(tiny_image("gzip"))
    environment = replace(
        environment, variables={"PATH": f"{tmp_path}:/usr/bin:/bin", "TOY_HOST": "here", "OTHER": "1"}
    )
    image = image_file.open_image_file(tmp_path / "x.sqsh")
    started = image_runtime.runtime_for(image, "toyrun", environment)
    with started.open(tmp_path) as launch:
        command, given = launch("python", ["-V"], {"TOY_RANK": "0"})
        done = subprocess.run(command, env=dict(given), capture_output=True, text=True)
    assert started.name == "toyrun 1" and done.stdout == f"here-0 {tmp_path}/x.sqsh python -V\n"
    assert "OTHER" not in given and "toyrun" in image_runtime.names()
    with pytest.raises(UsageError, match=r"toyrun does not start \.sif images"):
        image_runtime.choose("apptainer", "toyrun", environment.variables)

    site = site_of(tmp_path, '[scheduler]\nkind = "pbs"\n[container]\nruntime = "toyrun"\n')
    artifact = JobArtifact("enroot", "/s/x.sqsh", "sha256:d", "r", HERE, "/opt/env/bin/python")
    plan = plan_job(JobRequest(current=tmp_path), JobInputs(artifact), site)
    assert "exec toyrun start \\\n    /s/x.sqsh \\\n    /opt/env/bin/python" in render(plan)
    assert (plan.runtime, plan.mounts) == ("toyrun", ((str(tmp_path), str(tmp_path)),))
    with pytest.raises(RecipeError, match="'toyrn' is not accepted; did you mean 'toyrun'"):
        site_of(tmp_path, '[container]\nruntime = "toyrn"\n')


@pytest.mark.parametrize("room", ["build", "jobs", "verify"])
def test_no_kind_and_no_runtime_is_asked_for_by_its_name(room: str) -> None:
    """What differs is a field of its row, or a function of its module."""
    names = {*ARTIFACTS, *runtimes.RUNTIMES} - {"folder"}
    modules = list((REPOSITORY / "envbuild" / room).rglob("*.py"))
    asked = [f"{path.name}: {text}" for path in modules for text in comparisons(path.read_text(), names)]
    assert [one for one in asked if one not in ALLOWED] == []


def comparisons(source: str, names: set[str]) -> Iterator[str]:
    """Yield the comparisons with one of `names`, also by their constants, such as ENROOT."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Compare):
            for part in (node.left, *node.comparators):
                texts = {one.value for one in ast.walk(part) if isinstance(one, ast.Constant)}
                texts |= {one.id.lower() for one in ast.walk(part) if isinstance(one, ast.Name) and one.id.isupper()}
                if texts & names:
                    yield ast.unparse(node)
        elif isinstance(node, ast.MatchValue) and isinstance(node.value, ast.Constant) and node.value.value in names:
            yield f"case {node.value.value}"


def test_a_comparison_with_a_name_is_found() -> None:
    source = "if a == 'enroot' or b in ('x', 'pyxis') or kind is ENROOT.name: pass\nmatch a:\n  case 'own': pass"
    found = list(comparisons(source, {"enroot", "pyxis", "own"}))
    assert found == ["a == 'enroot'", "b in ('x', 'pyxis')", "kind is ENROOT.name", "case own"]


def test_a_scheduler_takes_jobs(
    addition: Addition,
    toy: FolderArtifact,
    environment: Environment,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    built(toy, environment, monkeypatch)
    addition.files.clear()  # those of the artifact
    addition.row(schedulers, "SCHEDULERS", "toy", replace(schedulers.SCHEDULERS["flux"], suffix=".toy"))
    addition.row(scheduler_rows, "LAUNCHERS", "toy", scheduler_rows.LAUNCHERS["flux"])
    addition.row(scheduler_rows, "TITLES", "toy", "Toy")
    site = site_of(tmp_path, "")
    opened = open_artifact("pt_cpu", wanted_kinds("toy", site), HERE)
    plan = plan_job(JobRequest(scheduler="toy", current=tmp_path), opened, site)
    assert (plan.scheduler, plan.launcher) == ("toy", "flux") and "#flux:" in render(plan)


def test_an_accelerator_has_targets(addition: Addition) -> None:
    toy = Accelerator(
        "toy",
        "Toys",
        "toy([0-9])",
        "toyN (toy1)",
        ("toy1",),
        backend="toyccl",
        torch_library="libtorch_toy.so",
        visible="TOY_VISIBLE_DEVICES",
        kubernetes="example.org/toy",
    )
    with pytest.raises(UsageError, match="toy1"):
        Target.parse("toy1-x86_64")
    addition.row(targets, "ACCELERATORS", "toy", toy)
    target = Target.parse("toy1-x86_64")
    assert target.family is toy and target.version == "1" and toy in gpu_families()
    assert image_runtime.passed({"TOY_VISIBLE_DEVICES": "1", "TOY": "2"}) == {"TOY_VISIBLE_DEVICES": "1"}


def test_a_fabric_may_be_named_by_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    known = load_fabrics()
    assert fabric_name_problem("toy")
    monkeypatch.setitem(known, "toy", replace(known["any"], name="toy"))
    assert fabric_name_problem("toy") is None and find_fabric("toy").name == "toy"
    assert "toy" in fabric_names()
