"""A recipe's name as an artifact: what is found of it, where, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from lab import artifacts
from lab.commands import TOP

from envbuild.base.errors import EnvbuildError, LockError, UsageError
from envbuild.build.built import check_lock, find_built
from envbuild.cli.commands import cli
from envbuild.contract.receipt import receipt_path
from envbuild.job_inputs import open_artifact
from envbuild.lock.conda import CondaLock, CondaPackage
from envbuild.lock.conda_format import part_of
from envbuild.lock.conda_format import render as render_conda
from envbuild.lock.conda_kind import conda_lock
from envbuild.lock.format import Lock
from envbuild.lock.wheels import wheel_lock
from envbuild.recipe.find import default_recipe
from envbuild.recipe.load import load_recipe
from envbuild.recipe.sources import LockedPackage
from envbuild.recipe.targets import Target

FOLDERS, ALL = ("venv", "conda"), ("venv", "conda", "docker", "enroot", "apptainer")
HERE = "cpu-x86_64"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one recipe, `mine`, whose lock is that of pt_minimal."""
    folder = tmp_path / "project"
    own_recipe(folder, "mine")
    (folder / "src/deep").mkdir(parents=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return folder


def own_recipe(folder: Path, name: str) -> Path:
    place = folder / "recipes" / name
    place.mkdir(parents=True)
    for file in (TOP / "recipes/pt_minimal").glob("*.t*"):
        (place / file.name).write_text(file.read_text().replace("pt_minimal", name))
    return place / "recipe.toml"


def lock_digest(name: str = "mine") -> str:
    lock = wheel_lock(load_recipe(Path(f"recipes/{name}/recipe.toml")), Target.parse(HERE)).inspect().lock
    assert lock is not None
    return lock.digest


def built(path: Path, recipe: str = "mine", **state: object) -> Path:
    artifacts.make_venv(path, artifacts.frame(recipe=recipe, **state))
    about = json.loads((path / "envbuild.json").read_text())
    assert about["recipe"] == recipe
    return path


def receipt(place: Path, **artifact: str) -> None:
    told = {"format": 1, "passed": True, "checks": [], "artifact": {"digest": "sha256:x", **artifact}}
    receipt_path(place).write_text(json.dumps(told))


def test_a_recipe_means_its_artifact_by_name_by_path_and_as_the_default(project: Path) -> None:
    with pytest.raises(UsageError, match=r"found no artifact of recipe 'mine' in build/mine") as caught:
        find_built("mine", FOLDERS)
    assert "(`envbuild venv mine`)" in (caught.value.hint or "")  # it has no [conda]
    built(project / f"build/mine/{HERE}/venv")
    for text in ("mine", "recipes/mine", "recipes/mine/recipe.toml", None):
        found = find_built(text, FOLDERS)
        assert found is not None and str(found.path) == f"build/mine/{HERE}/venv", text
    for text in (f"build/mine/{HERE}/venv", "nothing", "docker-daemon:mine", "host/mine:1", "./mine", ""):
        assert find_built(text, FOLDERS) is None, text
    with pytest.raises(UsageError, match="for cpu-aarch64"):
        find_built("mine", FOLDERS, target="cpu-aarch64")


def test_it_is_found_from_subfolders_and_a_folder_that_all_may_write_to_ends_the_search(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built(project / f"build/mine/{HERE}/venv")
    monkeypatch.chdir(project / "src/deep")
    found = find_built("mine", FOLDERS)
    assert found is not None and found.path.resolve() == project / f"build/mine/{HERE}/venv"
    assert default_recipe().resolve() == project / "recipes/mine/recipe.toml"
    shown = CliRunner().invoke(cli, ["show", "mine"])
    assert "from ../../recipes/mine/recipe.toml" in shown.stdout, shown.output
    project.chmod(0o777)
    assert find_built("mine", FOLDERS) is None
    assert default_recipe().parent.name == "pt_cpu"


def test_several_recipes_are_no_default_and_none_is_pt_cpu(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for command in (
        ["venv", "--dry-run"],
        ["docker", "--out", "oci:x", "--dry-run"],
        ["enroot", "--dry-run"],
        ["apptainer", "--dry-run"],
        ["lock", "--check"],
        ["plan"],
        ["check"],
        ["show"],
    ):
        done = CliRunner().invoke(cli, command, catch_exceptions=False)
        assert done.exit_code == 0 and "mine" in done.output and "pt_cpu" not in done.output, (command, done.output)
    done = CliRunner().invoke(cli, ["conda"])
    assert isinstance(done.exception, UsageError) and "recipe mine has no [conda]" in done.exception.message
    own_recipe(project, "other")
    with pytest.raises(UsageError, match="name a recipe: recipes has 2: mine, other"):
        default_recipe()
    (project.parent / "empty/recipes").mkdir(parents=True)
    monkeypatch.chdir(project.parent / "empty")
    assert default_recipe() == TOP / "recipes/pt_cpu/recipe.toml"
    monkeypatch.chdir(TOP)  # whose recipes are the shipped ones
    assert default_recipe().resolve() == TOP / "recipes/pt_cpu/recipe.toml"


def test_a_recipe_needs_no_description(project: Path) -> None:
    recipe = project / "recipes/mine/recipe.toml"
    lines = recipe.read_text().splitlines(keepends=True)
    recipe.write_text("".join(line for line in lines if not line.startswith("description")))
    assert CliRunner().invoke(cli, ["show"]).stdout.startswith("mine\n  from ")
    (listed,) = [line for line in CliRunner().invoke(cli, ["list"]).stdout.splitlines() if line.startswith("mine")]
    assert listed.split()[1].startswith("[cpu-")


def test_several_artifacts_are_listed_unless_one_kind_is_preferred(project: Path) -> None:
    top = project / f"build/mine/{HERE}"
    built(top / "venv")
    (top / "mine.sqsh").touch()
    receipt(top / "docker", path="mine:1")
    with pytest.raises(UsageError) as caught:
        find_built("mine", ALL)
    assert caught.value.message.startswith("3 artifacts of recipe 'mine' match: ")
    for name in ("venv", "docker.receipt.json", "mine.sqsh"):
        assert f"build/mine/{HERE}/{name}" in caught.value.message
    for kinds, name in ((("enroot", "venv"), "mine.sqsh"), (("venv", "enroot"), "venv")):
        found = find_built("mine", kinds, prefer=True)
        assert found is not None and found.path.name == name
    built(project / "build/mine/cpu-aarch64/venv")
    with pytest.raises(UsageError, match="mine is built for cpu-aarch64, cpu-x86_64"):
        find_built("mine", ("enroot", "venv"), prefer=True)
    for command in (["verify", "mine"], ["inspect", "mine"], ["diff", "mine", "mine"], ["report", "mine"]):
        done = CliRunner().invoke(cli, command)
        assert isinstance(done.exception, UsageError) and "artifacts of recipe 'mine'" in done.exception.message


def test_an_image_is_inspected_where_it_is_and_reported_by_its_receipt(project: Path) -> None:
    place = project / f"build/mine/{HERE}/docker"
    place.parent.mkdir(parents=True)
    for artifact, spelling in (
        ({"path": "mine:1"}, "docker-daemon:mine:1"),
        ({"path": "mine:1", "pushed": "host/mine@sha256:1"}, "docker://host/mine@sha256:1"),
    ):
        receipt(place, **artifact)
        found = find_built("mine", ALL)
        assert found is not None and (found.spelling, found.documented) == (
            spelling,
            f"build/mine/{HERE}/docker.receipt.json",
        )
    receipt_path(place).write_text("[]")
    with pytest.raises(UsageError, match="cannot be read"):
        assert find_built("mine", ALL).spelling  # type: ignore[union-attr]


def test_commands_take_a_recipe_for_its_artifact(project: Path) -> None:
    place = built(project / f"build/mine/{HERE}/venv")
    told = CliRunner().invoke(cli, ["inspect", "mine", "--json"])
    assert json.loads(told.stdout)["artifact"] == f"build/mine/{HERE}/venv", told.output
    assert CliRunner().invoke(cli, ["diff", "mine", str(place)]).stdout.startswith("equal")
    for words in ("push mine registry.invalid/x:1", "report mine", "verify mine", "run mine -- true"):
        done = CliRunner().invoke(cli, words.split())
        assert isinstance(done.exception, EnvbuildError) and f"build/mine/{HERE}/venv" in done.exception.message, words
    done = CliRunner().invoke(cli, ["run", "sh", "script"])
    assert isinstance(done.exception, UsageError) and done.exception.hint == "put -- before it: envbuild run -- sh …"


def test_an_environment_of_another_lock_is_refused_with_the_command(project: Path) -> None:
    place = built(project / f"build/mine/{HERE}/venv", lock_digest=lock_digest())
    assert open_artifact("mine", FOLDERS, None, unverified=True, locked=True).artifact.path == str(place)
    recipe = project / "recipes/mine/recipe.toml"
    before = recipe.read_text()
    recipe.write_text(before.replace("requirements = [", 'requirements = ["attrs", ', 1))
    assert recipe.read_text() != before
    with pytest.raises(LockError, match="stale: the recipe changed since it was made") as caught:
        open_artifact("mine", FOLDERS, None, unverified=True, locked=True)
    assert f"`envbuild venv mine --target {HERE}`" in (caught.value.hint or "")
    for command in (["run", "mine", "--", "true"], ["run", "--", "true"], ["job", "mine", "--site", "slurm-modules"]):
        done = CliRunner().invoke(cli, [*command[:1], "--unverified", *command[1:]])
        assert isinstance(done.exception, LockError), (command, done.output)
    recipe.write_text(before)
    (place / "envbuild.json").write_text(artifacts.state(recipe="mine", lock_digest="sha256:old"))
    with pytest.raises(
        LockError, match=r"was built before .*requirements.txt changed: its packages differ from the lock"
    ):
        open_artifact("mine", FOLDERS, None, unverified=True, locked=True)
    (project / f"recipes/mine/{HERE}.requirements.txt").unlink()
    with pytest.raises(LockError, match="no lock for this target yet"):
        open_artifact("mine", FOLDERS, None, unverified=True, locked=True)
    assert open_artifact(str(place), FOLDERS, None, unverified=True, locked=True).lock  # named by its path


def test_the_lock_of_a_recipe_that_is_not_here_cannot_be_compared(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built(project / f"build/gone/{HERE}/venv", "gone")
    found = find_built("gone", FOLDERS)
    assert found is not None
    check_lock(found, "sha256:x")
    assert "cannot compare it with its lock: recipe gone was not found" in capsys.readouterr().err


@pytest.mark.parametrize(
    "line",
    [
        "job --site slurm-modules",
        "job --site slurm-modules --nodes 2 --script train.py -- --lr 0.1 x",
        "preflight --host n1,n2",
        "run train.py",
        "run --nodes 2 -- python -V",
    ],
)
def test_commands_that_run_take_the_default_recipe(project: Path, line: str) -> None:
    (project / "train.py").touch()
    done = CliRunner().invoke(cli, line.split())
    assert isinstance(done.exception, UsageError), done.output
    assert done.exception.message.startswith("found no artifact of recipe 'mine' in build/mine"), done.exception.message


def test_the_locks_of_all_pythons_of_a_target_count(project: Path) -> None:
    recipe = project / "recipes/mine/recipe.toml"
    recipe.write_text(recipe.read_text().replace("[targets.cpu-x86_64]", '[targets.cpu-x86_64]\npythons = ["3.12"]', 1))
    loaded = load_recipe(recipe)
    other = loaded.for_python(Target.parse(HERE), "3.12")
    assert other is not None
    digests = []
    for one in (loaded, other):
        kind = wheel_lock(one, Target.parse(HERE))
        package = LockedPackage("numpy", "2", (64 * "1",))
        lock = Lock("mine", HERE, one.recipe.python, "x86_64-manylinux_2_28", kind.digest, (package,))
        kind.write(recipe.parent / kind.file, lock)
        digests.append(lock.digest)
    assert len({*digests}) == 2
    for digest in digests:
        built(project / f"build/mine/{HERE}/venv", lock_digest=digest)
        assert open_artifact("mine", FOLDERS, None, unverified=True, locked=True).lock == digest
        shutil.rmtree(project / "build")


def test_a_conda_environment_has_the_conda_lock(project: Path) -> None:
    recipe = project / "recipes/mine/recipe.toml"
    before = recipe.read_text()
    recipe.write_text(before + "[conda]\ndependencies = ['zlib']\nchannels = ['https://c']\n")
    kind = conda_lock(load_recipe(recipe), Target.parse(HERE))
    package = CondaPackage("zlib", "1", "0", "noarch", "https://c/noarch/zlib-1-0.conda", "0" * 32, "0" * 64)
    lock = CondaLock("mine", HERE, kind.digest, (package,), Lock("mine", HERE, "3.11", "x", kind.digest, ()))
    (recipe.parent / kind.file).write_text(render_conda([part_of(lock, ["https://c"])]))
    found = kind.inspect().lock
    assert found is not None
    place = built(project / f"build/mine/{HERE}/conda", lock_digest=found.digest, artifact="conda")
    assert open_artifact("mine", FOLDERS, None, unverified=True, locked=True).artifact.kind == "conda"
    (place / "envbuild.json").write_text(artifacts.state(recipe="mine", artifact="conda", lock_digest=lock_digest()))
    with pytest.raises(LockError, match=r"was built before .*conda-lock.yml changed") as caught:
        open_artifact("mine", FOLDERS, None, unverified=True, locked=True)
    assert f"`envbuild conda mine --target {HERE}`" in (caught.value.hint or "")
    recipe.write_text(before)
    with pytest.raises(LockError, match="its recipe no longer has any"):
        open_artifact("mine", FOLDERS, None, unverified=True, locked=True)


def test_a_target_that_the_recipe_has_no_more_is_refused(project: Path) -> None:
    built(project / "build/mine/cu126-x86_64/venv", target="cu126-x86_64")
    with pytest.raises(LockError, match="cu126-x86_64, a target that its recipe no longer has"):
        open_artifact("mine", FOLDERS, None, unverified=True, locked=True)
