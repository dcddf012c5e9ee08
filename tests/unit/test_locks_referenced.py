"""Locks that the branches and tags of a git repository name: none is overlooked, no doubt is an answer."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from envbuild.base.errors import BuildError, LockError, UsageError
from envbuild.locks import locked_names, referenced_locks
from envbuild.recipe.load import load_recipe

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


def git(folder: Path, *words: str) -> None:
    line = ["git", "-C", str(folder), "-c", "user.name=lab", "-c", "user.email=lab@example.org", *words]
    subprocess.run(line, check=True, capture_output=True)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with the shipped recipes in a tag, and a file in its only branch."""
    shutil.copytree(RECIPES, tmp_path / "repository/any where")
    git(tmp_path, "init", "--quiet", "repository")
    git(tmp_path / "repository", "add", ".")
    git(tmp_path / "repository", "commit", "--quiet", "-m", "recipes")
    git(tmp_path / "repository", "tag", "-a", "-m", "a tag of an object", "v1")
    git(tmp_path / "repository", "rm", "--quiet", "-r", "any where")
    (tmp_path / "repository/conda-lock.yml").write_text("of another tool")
    (tmp_path / "repository/dev.requirements.txt").write_text("numpy\n")
    (tmp_path / "repository/dev.conda-lock.yml").write_text("version: 1\n")
    git(tmp_path / "repository", "add", ".")
    git(tmp_path / "repository", "commit", "--quiet", "-m", "no recipes")
    return tmp_path / "repository"


def test_each_current_lock_of_the_shipped_recipes_is_found(repository: Path) -> None:
    names = locked_names(map(load_recipe, sorted(RECIPES.glob("*/recipe.toml"))))
    assert any("conda" in name for of in names.values() for name in of) and len(names) > 15
    found = referenced_locks(repository, os.environ)
    assert not names.keys() - found
    git(repository, "tag", "-d", "v1")
    assert referenced_locks(repository, os.environ) == set()


def test_a_lock_of_another_format_and_a_damaged_repository_are_errors(repository: Path) -> None:
    (repository / "a.requirements.txt").write_text("# envbuild lock, format 9; made by a later version\n")
    git(repository, "add", ".")
    git(repository, "commit", "--quiet", "-m", "later")
    with pytest.raises(LockError, match=r"a.requirements.txt: lock format '9'"):
        referenced_locks(repository, os.environ)
    (repository / ".git/refs/heads/broken").write_text("0" * 39 + "1\n")
    with pytest.raises(BuildError, match=r"git [a-z-]+ failed in"):
        referenced_locks(repository, os.environ)
    shutil.rmtree(repository / ".git")
    with pytest.raises(BuildError, match="git rev-parse failed in"):
        referenced_locks(repository, os.environ)


def test_a_clone_that_may_lack_branches_is_refused(repository: Path, tmp_path: Path) -> None:
    git(tmp_path, "clone", "--quiet", "--depth=1", repository.as_uri(), "shallow")
    with pytest.raises(UsageError, match="shallow clone"):
        referenced_locks(tmp_path / "shallow", os.environ)
