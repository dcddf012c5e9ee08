"""`envbuild matrix`: which builds a CI runs, in the forms that GitHub and GitLab take."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from lab.ci import matrix, write_locks, write_recipe

from envbuild.base.errors import UsageError
from envbuild.contract.kinds import ARTIFACTS
from envbuild.matrix import GITHUB_LIMIT, MatrixJob, SelectedRecipe, as_github, as_gitlab, parse_runners
from envbuild.matrix import make_jobs as jobs_and_omissions
from envbuild.recipe.load import load_recipe
from envbuild.run_environment import load_environment

REPOSITORY = Path(__file__).resolve().parents[2]
GOLDEN = REPOSITORY / "tests/golden/matrix"
# What a recipe without [conda] gives.
WITHOUT_CONDA = [name for name, kind in ARTIFACTS.items() if not kind.of_conda]
LABELS = {"x86_64": "intel", "aarch64": "arm"}


def make_jobs(recipes: Sequence[SelectedRecipe], runners: dict[str, str], **chosen: list[str]) -> list[MatrixJob]:
    return jobs_and_omissions(recipes, runners, load_environment({"HOME": "/nowhere"}), **chosen)[0]


def load(root: Path, name: str, *targets: str) -> SelectedRecipe:
    return SelectedRecipe(name, load_recipe(write_recipe(root, name, *targets)))


@pytest.mark.parametrize("form", ["github", "gitlab", "json"])
def test_the_matrix_of_shipped_recipes_is_as_recorded(form: str) -> None:
    """To record a wanted change: envbuild matrix pt_minimal pt_cpu --format FORM > tests/golden/matrix/FORM.json."""
    for names in (["pt_minimal", "pt_cpu"], ["pt_cpu", "pt_minimal", "pt_cpu"]):
        done = matrix(*names, "--format", form, cwd=REPOSITORY)
        assert done.returncode == 0, done.stderr
        assert done.stdout == (GOLDEN / f"{form}.json").read_text()


def test_all_forms_tell_the_same_jobs() -> None:
    jobs = json.loads((GOLDEN / "json.json").read_text())
    github = (GOLDEN / "github.json").read_text()
    assert json.loads(github) == {"include": jobs} and github.count("\n") == 1
    pipeline = json.loads((GOLDEN / "gitlab.json").read_text())
    scripts = {name: job["script"] for name, job in pipeline.items() if "-" in name}
    assert scripts == {job["id"]: [job["command"] + " --report" * job["verify"]] for job in jobs}


def test_cuda_is_built_on_the_cpu_runner_of_its_architecture_and_verified_only_where_gpus_are(tmp_path: Path) -> None:
    recipe = load(tmp_path, "g", "cu126-x86_64", "cu126-aarch64", "cpu-aarch64")
    runners = parse_runners(["cu126-aarch64=grace"], LABELS)
    jobs = {job.target: job for job in make_jobs([recipe], runners, artifacts=["venv"])}
    told = {name: (job.runner, job.gpu, job.verify) for name, job in jobs.items()}
    assert told == {
        "cu126-x86_64": ("intel", True, False),
        "cu126-aarch64": ("grace", True, True),
        "cpu-aarch64": ("arm", False, True),
    }
    assert {name for name, job in jobs.items() if "--no-verify" in job.command} == {"cu126-x86_64"}


def test_targets_and_artifacts_can_be_chosen(tmp_path: Path) -> None:
    recipes = [load(tmp_path, "b", "cpu-aarch64"), load(tmp_path, "a", "cpu-x86_64", "cpu-aarch64")]
    every = [job.id for job in make_jobs(recipes, LABELS)]
    assert every == [
        f"{name}-{kind}" for name in ("a-cpu-x86_64", "a-cpu-aarch64", "b-cpu-aarch64") for kind in WITHOUT_CONDA
    ]
    some = make_jobs(recipes, LABELS, artifacts=["docker"], targets=["cpu-aarch64"])
    assert [job.id for job in some] == ["a-cpu-aarch64-docker", "b-cpu-aarch64-docker"]


def test_a_recipe_named_by_its_path_is_built_by_that_path(tmp_path: Path) -> None:
    path = write_recipe(tmp_path / "with space", "one")
    done = matrix("./with space/recipes/one", str(path), "--artifact", "venv", cwd=tmp_path)
    (job,) = json.loads(done.stdout)
    assert shlex.split(job["command"])[2] == "./with space/recipes/one"


def test_two_recipes_of_one_name_are_refused(tmp_path: Path) -> None:
    recipes = [load(tmp_path / "x", "same"), load(tmp_path / "y", "same")]
    with pytest.raises(UsageError, match="two recipes are named 'same'"):
        make_jobs(recipes, LABELS)


def test_more_jobs_than_github_runs_are_refused_and_other_forms_take_them(tmp_path: Path) -> None:
    recipes = [
        load(tmp_path, f"r{n}", "cpu-x86_64", "cpu-aarch64") for n in range(GITHUB_LIMIT // len(WITHOUT_CONDA) // 2)
    ]
    jobs = make_jobs(recipes, LABELS)
    assert len(json.loads(as_github(jobs))["include"]) == GITHUB_LIMIT
    with pytest.raises(UsageError, match="257 jobs"):
        as_github([*jobs, jobs[0]])
    assert len(json.loads(as_gitlab(jobs))) == GITHUB_LIMIT + 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--artifact", "dokcer"], "did you mean 'docker'"),
        (["--target", "cpu-amd64"], "not a target"),
        (["--target", "cu999-x86_64"], "no recipe here has the target 'cu999-x86_64'"),
        (["--runner", "arm64=x"], "no architecture 'arm64'"),
        (["--runner", "x86_64"], "not ARCH=LABEL"),
        (["--runner", "x86_64= "], "not ARCH=LABEL"),
        (["--runner", "x86_64=a\nb"], "not ARCH=LABEL"),
        (["--format", "yaml"], "gitlab"),
        (["nonesuch"], "no recipe 'nonesuch'"),
    ],
)
def test_misuse_is_one_clear_message(arguments: list[str], said: str, tmp_path: Path) -> None:
    write_recipe(tmp_path, "one")
    done = matrix(*arguments, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "") and said in done.stderr, done.stderr


def test_the_mistakes_of_all_recipes_are_shown(tmp_path: Path) -> None:
    for name, wrong in (("one", "pyton = 1\n"), ("two", "requirments = []\n")):
        path = write_recipe(tmp_path, name)
        path.write_text(wrong + path.read_text())
    for names in ([], ["one", "three", "two"]):
        done = matrix(*names, cwd=tmp_path)
        assert (done.returncode, done.stdout) == (2, "")
        assert "pyton" in done.stderr and "requirments" in done.stderr
        assert ("three" in done.stderr) == bool(names)


def test_a_recipe_on_an_existing_image_has_no_virtual_environment(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, "hub", locked=False)
    text = path.read_text().replace("torch==2.10.0", "tqdm==4.70.1")
    path.write_text(text + '\n[image]\nbase = "example/torch:1"\npython = "/opt/python"\n')
    write_locks(path)
    wheels = path.with_name("cpu-x86_64.requirements.txt")
    wheels.write_text(wheels.read_text().replace("torch==2.10.0", "tqdm==4.70.1"))
    done = matrix("hub", "--format", "json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {job["artifact"] for job in json.loads(done.stdout)} == {"docker", "enroot", "apptainer"}
    assert "left out: hub (cpu-x86_64; venv): recipe hub takes torch from" in done.stderr


def test_a_build_without_a_lock_is_left_out_and_said(tmp_path: Path) -> None:
    """A job has --locked: without a lock, or with a stale one, it could only fail."""
    path = write_recipe(tmp_path, "one", "cpu-x86_64", "cpu-aarch64")
    path.with_name("cpu-x86_64.image.toml").unlink()
    stale = path.with_name("cpu-aarch64.requirements.txt")
    stale.write_text(stale.read_text().replace("recipe-digest: sha256:", "recipe-digest: sha256:0"))
    done = matrix("one", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [job["id"] for job in json.loads(done.stdout)] == ["one-cpu-x86_64-venv"]
    images, arm = done.stderr.splitlines()
    assert images.startswith(
        "left out: one (cpu-x86_64; docker, enroot, apptainer): recipes/one/cpu-x86_64.image.toml: no image lock"
    )
    assert "`envbuild lock one --target cpu-x86_64 --image`" in images
    assert arm.startswith("left out: one (cpu-aarch64; venv, docker, enroot, apptainer): ") and "stale" in arm
    done = matrix("one", "--strict", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (3, "") and done.stderr.count("left out: one") == 2
    assert matrix("one", "--strict", "--artifact", "venv", "--target", "cpu-x86_64", cwd=tmp_path).returncode == 0
