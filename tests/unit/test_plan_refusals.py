"""What `plan` and --dry-run accept, a build does: they refuse what it refuses, by the same words, and write nothing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from lab import artifacts
from lab.wheels import make_recipe, make_wheel

from envbuild.base.errors import EnvbuildError
from envbuild.cli.commands import cli
from envbuild.contract.kinds import ARTIFACTS
from envbuild.image.layout import Blobs
from envbuild.image.model import GOARCH
from envbuild.lock.lifecycle import lock_folders
from envbuild.matrix import SelectedRecipe, make_jobs
from envbuild.recipe.find import command_word
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import ARCHES, Target, host_arch
from envbuild.run_environment import load_environment

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = sorted(path.parent.name for path in REPOSITORY.glob("recipes/*/recipe.toml"))
HERE = host_arch()
OTHER = next(arch for arch in ARCHES if arch != HERE)


@dataclass(frozen=True)
class Outcome:
    """What `envbuild ARGUMENTS` ended with."""

    code: int = 0
    said: str = ""
    hint: str = ""


def outcome(*arguments: str) -> Outcome:
    """Run `envbuild ARGUMENTS` in this process."""
    try:
        cli.main(list(arguments), standalone_mode=False)
    except EnvbuildError as error:
        return Outcome(error.exit_code, error.message, error.hint or "")
    return Outcome()


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder as current one, an empty store, and no docker daemon."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVBUILD_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("DOCKER_HOST", "unix:///nonexistent/docker.sock")
    return tmp_path


def test_the_matrix_lists_just_the_builds_that_plan_accepts(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> None:
    labels = {arch: arch for arch in ARCHES}
    recipes = [SelectedRecipe(name, load_recipe(REPOSITORY / f"recipes/{name}/recipe.toml")) for name in NAMES]
    jobs, omitted = make_jobs(recipes, labels, load_environment())
    listed = {(job.recipe, job.target, job.artifact) for job in jobs}
    left = {
        (one.recipe, target, kind): one.error.message
        for one in omitted
        for target in one.targets
        for kind in one.artifacts
    }
    assert listed and left and not listed & left.keys()
    for one in recipes:
        for target in one.loaded.recipe.targets:
            for kind in ARTIFACTS:
                build = one.name, target, kind
                found = outcome("plan", one.name, "--target", target, "--artifact", kind, "--locked", "--elsewhere")
                assert (found.code == 0) == (build in listed), (build, found)
                unasked = kind == "conda" and not one.loaded.recipe.conda.dependencies
                assert build in listed or unasked or left[build] == found.said
    capsys.readouterr()


HOROVOD = "horovod", "--target", f"cpu-{HERE}", "--locked"
GH200 = "gh200_cu126", "--target", "cu126-aarch64", "--locked"
CPU = "pt_cpu", "--target", f"cpu-{HERE}", "--locked"
ARM = "pt_cpu", "--target", f"cpu-{OTHER}", "--locked"
HUB = "pytorch_hub", "--target", "cpu-x86_64", "--locked"
EFA = "pt_efa", "--target", f"cu130-{OTHER}", "--locked"


@pytest.mark.parametrize(
    ("build", "planned", "code", "said"),
    [
        (("docker", *GH200, "--out", "oci:x"), "docker", 2, "and images do not"),
        (("enroot", *GH200), "enroot", 2, "and images do not"),
        (("apptainer", *GH200), "apptainer", 2, "and images do not"),
        (("build", *GH200, "--artifact", "enroot,apptainer"), "enroot", 2, "and images do not"),
        (("venv", *HUB), "venv", 2, "a virtual environment would have no torch"),
        (("enroot", *HUB), "enroot", 3, "no image lock for this target yet"),
        (("conda", *HUB), "conda", 2, "has no [conda] packages"),
        (("venv", *ARM), "venv", 6, "cannot be built on this"),
        (("conda", *ARM), "conda", 6, "cannot be built on this"),
        (("docker", *EFA, "--out", "oci:x"), "docker", 6, "libfabric, aws-ofi-nccl for"),
        (("apptainer", *EFA), "apptainer", 6, "libfabric, aws-ofi-nccl for"),
        # What only the command knows, a plan does not.
        (("docker", *CPU), None, 6, "docker"),
        (("docker", *CPU, "--target", f"cpu-{OTHER}"), None, 2, "several targets need --out or --push"),
        (("docker", *CPU, "--out", "oci:taken"), None, 2, "is no OCI layout"),
        (("venv", *CPU, "--out", "taken"), None, 2, "was not made by envbuild"),
        (("enroot", *CPU, "--out", "taken"), None, 2, "is a folder"),
        (("enroot", "--from", "oci:taken", "--out", "taken"), None, 2, "is a folder"),
        (("apptainer", *CPU, "--engine", "apptainer"), None, 6, "neither apptainer nor singularity"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else None,
)
def test_a_build_its_dry_run_and_its_plan_refuse_alike(
    build: tuple[str, ...], planned: str | None, code: int, said: str, nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nowhere / "taken").mkdir()
    (nowhere / "taken/thesis.tex").write_text("years")
    if "--engine" in build:
        monkeypatch.setenv("PATH", str(nowhere))
    refused = outcome(*build)
    assert refused.code == code and said in refused.said, refused
    assert outcome(*build, "--dry-run") == refused
    if planned is not None:
        assert outcome("plan", *build[1:5], "--artifact", planned) == refused
    assert sorted(path.name for path in nowhere.iterdir() if path.name != "store") == ["taken"]


def test_a_plan_for_another_host_leaves_out_what_only_this_one_lacks(
    nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert outcome("plan", *ARM, "--elsewhere") == Outcome()
    assert outcome("plan", *EFA, "--artifact", "docker", "--elsewhere") == Outcome()
    refused = outcome("plan", *GH200, "--artifact", "docker", "--elsewhere")
    assert refused.code == 2 and "and images do not" in refused.said


def test_a_host_without_a_compiler_is_refused_by_plan_and_build(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(nowhere))
    monkeypatch.delenv("CC", raising=False)
    for arguments in (["venv"], ["venv", "--dry-run"], ["plan"]):
        refused = outcome(*arguments, *HOROVOD)
        assert refused.code == 6 and "this host has no C compiler" in refused.said, arguments


@pytest.mark.parametrize(
    ("name", "commands"),
    [
        ("my store", [["venv"], ["venv", "--dry-run"], ["plan"]]),
        *((name, [["plan"]]) for name in ("a,b", "a#b", "a\\b", "$a")),
    ],
)
def test_a_store_in_which_nothing_can_be_compiled_is_refused_by_plan_and_build(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, name: str, commands: list[list[str]]
) -> None:
    monkeypatch.setenv("ENVBUILD_STORE", str(nowhere / name))
    for arguments in commands:
        refused = outcome(*arguments, *HOROVOD)
        assert refused.code == 6 and f"cannot be compiled in {str(nowhere / name)!r}" in refused.said, arguments


# A recipe whose locks can all be made without a network: a wheel in a folder, an image in another.


@pytest.fixture
def recipe(nowhere: Path, monkeypatch: pytest.MonkeyPatch, compiler: None) -> Path:
    """The recipe `r` on an OCI layout, with a layer that is compiled in it."""
    wheels = nowhere / "wheels"
    make_wheel(wheels, "torch")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    blobs = Blobs(nowhere / "blobs")
    below = artifacts.layer(blobs, {"usr/bin/python3.11": "x"})
    image, _ = artifacts.image(blobs, [below], arch=GOARCH[HERE])
    artifacts.layout(nowhere / "base", blobs, [(image, "1")])
    return make(nowhere / "recipes")


def make(folder: Path) -> Path:
    base = os.path.relpath(folder.parent / "base", folder / "r")
    table = f'[image]\nbase = "oci:{base}:1"\nbuild_base = "oci:{base}:1"\npython = "/usr/bin/python3.11"\n'
    layer = f'[layers.greet]\nversion = "1.0"\nurl = "file:///greet.tar.gz"\nsha256 = "{"5" * 64}"\n'
    return make_recipe(folder, "r", ["torch"], extra=table + layer, targets=f"[targets.cpu-{HERE}]\n")


def follow(failed: Outcome) -> str:
    """Run the command that the hint names, as it stands there, and return it."""
    command = re.search(r"`(.+?)`", failed.hint)
    assert failed.code == 3 and command, failed
    done = subprocess.run(["/bin/sh", "-c", command[1]], capture_output=True, text=True)
    assert done.returncode == 0, (command, done.stderr)
    return command[1]


@pytest.mark.parametrize("name", ["r", "far/r/recipe.toml"])
def test_the_hint_of_every_missing_lock_is_the_command_that_makes_it(name: str, recipe: Path, nowhere: Path) -> None:
    make(nowhere / "far")
    # ./recipes/r is found first: the name alone would lock another recipe.
    word = "r" if name == "r" else "far/r"
    target = f"cpu-{HERE}"
    followed = []
    for artifact in ("venv", "docker"):
        line = ["plan", name, "--artifact", artifact, "--locked"]
        while (done := outcome(*line)).code:
            assert len(followed) < 3, done
            followed.append(follow(done))
    assert followed == [f"envbuild lock {word} --target {target} --{part}" for part in ("wheels", "image")]
    assert outcome("lock", name, "--check") == Outcome()


def files(folder: Path) -> dict[Path, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file() and "store" not in path.parts)
    return {path: path.read_bytes() for path in paths}


def test_one_lock_makes_all_that_the_check_judges_and_builds_ask_for(recipe: Path, nowhere: Path) -> None:
    target = f"cpu-{HERE}"
    endings = {"requirements.txt": "wheels", "image.toml": "image", "build.toml": "image"}
    builds = [["plan", "r", "--locked", "--artifact", kind] for kind in ("venv", "docker", "enroot")]
    done = outcome("lock", "r", "--check")
    assert len(done.said.splitlines()) == 3
    assert follow(done) == "envbuild lock r --wheels --image"
    assert outcome("lock", "r", "--check") == Outcome()
    made = files(recipe)
    for ending, part in endings.items():
        (recipe / f"{target}.{ending}").unlink()
        done = outcome("lock", "r", "--check")
        assert f"{target}.{ending}: no " in done.said and len(done.said.splitlines()) == 1
        assert 3 in [outcome(*line).code for line in builds], ending
        assert follow(done) == f"envbuild lock r --{part}"
        assert outcome("lock", "r", "--check") == Outcome()
    for path in recipe.glob(f"{target}.*"):
        path.unlink()
    assert outcome("lock", "r") == Outcome()
    assert files(recipe) == made
    assert [outcome(*line) for line in builds] == [Outcome()] * 3


@pytest.mark.parametrize("ending", ["requirements.txt", "image.toml", "build.toml"])
def test_the_hint_of_a_damaged_lock_makes_it_anew_and_keeps_the_old_file(ending: str, recipe: Path) -> None:
    assert outcome("lock", "r") == Outcome()
    path = recipe / f"cpu-{HERE}.{ending}"
    good = path.read_text()
    path.write_text("<<<<<<< HEAD\n")
    done = outcome("lock", "r", "--check")
    assert path.name in done.said
    assert follow(done).startswith("mv ")
    assert path.read_text() == good and Path(f"{path}.old").read_text() == "<<<<<<< HEAD\n"


def test_what_cannot_be_locked_keeps_nothing_else_from_being_locked(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (recipe / "recipe.toml").read_text()
    (recipe / "recipe.toml").write_text(text.replace('"torch"', '"torch==9"'))
    done = outcome("lock", "r")
    assert done.code == 3 and "torch" in done.said
    assert {path.name for path in recipe.glob("*.*")} == {
        "recipe.toml",
        f"cpu-{HERE}.image.toml",
        f"cpu-{HERE}.build.toml",
    }
    assert outcome("lock", "r", "--offline", "--image", "--upgrade") == Outcome()
    assert capsys.readouterr().err.count("left as it is (--offline)") == 2
    (recipe / f"cpu-{HERE}.image.toml").unlink()
    done = outcome("lock", "r", "--offline", "--image")
    assert done.code == 3 and "--offline forbids resolving it" in done.said


@pytest.mark.parametrize(
    "command",
    [
        ["plan"],
        ["plan", "--artifact", "docker"],
        ["venv", "--dry-run"],
        ["docker", "--dry-run", "--out", "oci:x"],
        ["enroot", "--dry-run"],
        ["apptainer", "--dry-run"],
        ["build", "--artifact", "enroot,apptainer", "--dry-run"],
        ["lock", "--dry-run"],
    ],
    ids=" ".join,
)
def test_plans_and_dry_runs_resolve_what_is_not_locked_and_write_nothing(
    command: list[str], recipe: Path, nowhere: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(nowhere)
    ended = outcome(command[0], "r", *command[1:])
    assert ended == Outcome(), ended.said
    assert "not written (dry run)" in capsys.readouterr().err
    assert files(nowhere) == before and not (nowhere / "build").exists()


def test_a_lock_is_never_written_into_an_installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = make_recipe(tmp_path / "lib/envbuild/_bundled/recipes", "r", ["torch"])
    (tmp_path / "lib64").symlink_to("lib")
    bundled = tmp_path / "lib64/envbuild/_bundled/recipes"
    monkeypatch.setattr("envbuild.lock.lifecycle.shipped_folder", lambda: bundled)
    target = Target.parse("cpu-x86_64")
    for path in (place, bundled / "r"):
        folders = lock_folders(load_recipe(path / "recipe.toml"), target)
        assert folders == [path, Path("build/r/cpu-x86_64")]


def test_a_recipe_is_named_in_hints_so_that_it_is_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def words(*paths: str) -> Sequence[str]:
        return [command_word(load_recipe(Path(path))) for path in paths]

    make_recipe(tmp_path / "recipes", "r", [])
    make_recipe(tmp_path / "my own", "r", [])
    make_recipe(tmp_path, "top", [])
    assert words("recipes/r/recipe.toml", "my own/r/recipe.toml", "top/recipe.toml") == ["r", "'my own/r'", "./top"]
    (tmp_path / "one.toml").write_text((tmp_path / "top/recipe.toml").read_text())
    assert words("one.toml") == ["one.toml"]
    assert words(str(REPOSITORY / "recipes/pt_cpu/recipe.toml")) == ["pt_cpu"]
