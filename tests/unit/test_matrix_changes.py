"""`envbuild matrix --changed-since`: which recipes a change concerns, in real git checkouts."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.ci import commit, git, matrix, valid, write_recipe
from lab.wheels import make_recipe

from envbuild.base.toml import Document
from envbuild.matrix import SelectedRecipe, changed_recipes
from envbuild.recipe.load import LoadedRecipe, load_recipe
from envbuild.recipe.model import Recipe


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a git checkout, top, that has the recipes a, ab and b, and a recipe that is not in it."""
    folder = tmp_path_factory.mktemp("checkout")
    top = folder / "top"
    for name in ("a", "ab", "b"):
        write_recipe(top, name)
    git(top, "init", "--quiet")
    (top / "README.md").write_text("x")
    (top / "recipes/b/old.requirements.txt").write_text("a file that is neither empty nor short\n" * 9)
    commit(top)
    write_recipe(folder / "beside", "outside")
    return folder


@pytest.fixture
def checkout(original: Path, tmp_path: Path) -> Path:
    """A copy of the checkout of `original`."""
    shutil.copytree(original, tmp_path, dirs_exist_ok=True)
    return tmp_path / "top"


RECIPES = ("recipes/a", "recipes/ab", "recipes/b")


def changed(top: Path, since: str = "HEAD~1", cwd: Path | None = None) -> set[str]:
    names = [str(top / name) for name in RECIPES]
    done = matrix(*names, "--changed-since", since, "--format", "github", cwd=cwd or top)
    assert done.returncode == 0, done.stderr
    return {job["recipe"] for job in json.loads(done.stdout)["include"]}


def edit(*paths: str) -> Callable[[Path], None]:
    def change(top: Path) -> None:
        for path in paths:
            (top / path).parent.mkdir(parents=True, exist_ok=True)
            (top / path).write_text("# changed\n")

    return change


def move(top: Path) -> None:
    git(top, "mv", "recipes/b/old.requirements.txt", "recipes/a/old.requirements.txt")


@pytest.mark.parametrize(
    ("change", "concerned"),
    [
        (edit("recipes/ab/cpu-x86_64.image.toml"), {"ab"}),
        (edit("recipes/a/deep/er/ä ö.txt"), {"a"}),
        (edit("README.md", "Dockerfile.gpu", "recipes/README.md", "docs/envbuild/x.md", "tests/pyproject.toml"), set()),
        (move, {"a", "b"}),
        (edit("envbuild/new.py"), {"a", "ab", "b"}),
        (edit("ddp_train/data.py"), {"a", "ab", "b"}),
        (edit("pyproject.toml"), {"a", "ab", "b"}),
    ],
    ids=lambda value: value.__name__ if callable(value) else ",".join(sorted(value)) or "none",
)
def test_a_change_selects_the_recipes_it_concerns(
    checkout: Path, change: Callable[[Path], None], concerned: set[str]
) -> None:
    change(checkout)
    commit(checkout)
    assert changed(checkout) == concerned


def test_a_folder_below_selects_the_same_recipes(checkout: Path) -> None:
    move(checkout)
    commit(checkout)
    (checkout / "sub").mkdir()
    assert changed(checkout, cwd=checkout / "sub") == {"a", "b"}


def test_what_the_other_branch_changed_does_not_count(checkout: Path) -> None:
    git(checkout, "checkout", "--quiet", "-b", "mine")
    edit("recipes/a/x")(checkout)
    commit(checkout)
    git(checkout, "checkout", "--quiet", "main")
    edit("recipes/b/x")(checkout)
    commit(checkout)
    git(checkout, "checkout", "--quiet", "mine")
    assert changed(checkout, "main") == {"a"}


@pytest.mark.parametrize("form", ["github", "gitlab", "json"])
def test_no_change_is_an_empty_matrix_and_no_error(checkout: Path, form: str) -> None:
    done = matrix(*RECIPES, "--changed-since", "HEAD", "--format", form, cwd=checkout)
    assert done.returncode == 0
    found = json.loads(done.stdout)
    if form == "gitlab":  # which takes no pipeline without a job
        assert list(found) == ["stages", "default", "nothing-to-build"] and valid("gitlab-ci", done.stdout)
    else:
        assert found == ({"include": []} if form == "github" else [])


def test_a_recipe_outside_the_checkout_is_said_not_to_count(checkout: Path) -> None:
    done = matrix("../beside/recipes/outside", "--changed-since", "HEAD", cwd=checkout)
    assert (done.returncode, json.loads(done.stdout)) == (0, [])
    assert "outside is not in this checkout" in done.stderr


@pytest.mark.parametrize("revision", ["nonesuch", "", "--help", "0" * 40, "HEAD~9", "HEAD^{tree}", "a..b"])
def test_an_unknown_revision_is_refused_with_the_way_out(checkout: Path, revision: str) -> None:
    done = matrix(f"--changed-since={revision}", *RECIPES, cwd=checkout)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"no revision {revision!r}" in done.stderr and "leave --changed-since out" in done.stderr


def test_a_folder_without_git_and_a_machine_without_git_are_told_apart(tmp_path: Path) -> None:
    write_recipe(tmp_path, "one")
    done = matrix("one", "--changed-since", "HEAD", cwd=tmp_path, GIT_CEILING_DIRECTORIES=str(tmp_path))
    assert done.returncode == 2 and "needs a git checkout" in done.stderr
    done = matrix("one", "--changed-since", "HEAD", cwd=tmp_path, PATH=str(tmp_path))
    assert done.returncode == 6 and "cannot run git" in done.stderr


def test_a_shallow_clone_says_how_to_get_the_revision(checkout: Path, tmp_path: Path) -> None:
    first = git(checkout, "rev-parse", "HEAD")
    edit("recipes/a/x")(checkout)
    commit(checkout)
    shallow = tmp_path / "shallow"
    git(tmp_path, "clone", "--quiet", "--depth", "1", f"file://{checkout}", str(shallow))
    done = matrix(*RECIPES, "--changed-since", first, cwd=shallow)
    assert done.returncode == 2
    assert "shallow" in done.stderr and "fetch-depth: 0" in done.stderr
    # The revision is there now, but not the history that leads to it.
    git(shallow, "fetch", "--quiet", "--depth", "1", "origin", first)
    done = matrix(*RECIPES, "--changed-since", first, cwd=shallow)
    assert done.returncode == 2 and "have in common" in done.stderr and "shallow" in done.stderr
    git(shallow, "fetch", "--quiet", "--unshallow", "origin")
    assert changed(shallow, first) == {"a"}


PARTS = st.lists(st.sampled_from(["a", "ab", "b", "recipes", "docs", "x"]), min_size=1, max_size=4)


@given(folders=st.lists(PARTS, min_size=1, max_size=4), files=st.lists(PARTS, max_size=4))
def test_a_recipe_is_selected_just_when_a_file_lies_in_its_folder(
    folders: list[list[str]], files: list[list[str]]
) -> None:
    top, names = Path("/nowhere"), {str(number): "/".join(folder) for number, folder in enumerate(folders)}
    recipes = [SelectedRecipe(name, loaded(top / folder)) for name, folder in names.items()]
    found = changed_recipes(recipes, top, ["/".join(file) for file in files])
    expected = [
        name
        for name, folder in names.items()
        if any(f"{'/'.join(file)}/".startswith(folder + "/") for file in files)  # a submodule is its folder
    ]
    assert [one.name for one in found] == expected


def loaded(folder: Path) -> Any:
    return LoadedRecipe(cast("Recipe", None), folder / "recipe.toml", cast("Document", None))


@pytest.mark.parametrize(
    ("path", "concerned"),
    [("src/pkg/x.py", True), ("train.py", True), ("tests/x.py", False), ("README.md", False), ("../x", False)],
)
def test_own_code_and_the_script_of_verify_concern_their_recipe(tmp_path: Path, path: str, concerned: bool) -> None:
    top = tmp_path / "top"
    extra = (
        '[project]\npath = "../../own"\nexclude = ["tests/**", "*.md"]\n'
        '[verify]\ntrainer = false\nscript = "../../train.py"\n'
    )
    make_recipe(top / "recipes", "one", ["tqdm"], extra=extra)
    for name in ("own/pyproject.toml", "train.py", "README.md"):
        (top / name).parent.mkdir(exist_ok=True)
        (top / name).write_text('[project]\nname = "own"\nversion = "1"\n')
    recipes = [SelectedRecipe("one", load_recipe(top / "recipes/one/recipe.toml"))]
    place = "train.py" if path == "train.py" else os.path.normpath(f"own/{path}")
    assert bool(changed_recipes(recipes, top.resolve(), [place])) == concerned
