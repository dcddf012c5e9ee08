"""git reads a repository whose configuration names programs, and runs none of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from lab.wheels import make_recipe
from sdists import commit, git

from envbuild.base.errors import RecipeError, UsageError
from envbuild.base.git import run_git
from envbuild.layers.project import collect
from envbuild.matrix import changes_since
from envbuild.recipe.load import load_recipe
from envbuild.run_environment import load_environment

FILES = {"pkg/__init__.py": "x = 1\n", ".gitattributes": "*.py filter=evil diff=evil\n"}
# What a repository's configuration can name, the program being `{run}`.
PROGRAMS = {
    "a monitor of the file system": "[core]\nfsmonitor = {run}\n",
    "a folder of hooks": "[core]\nhooksPath = {folder}/hooks\n",
    "a filter": '[filter "evil"]\nclean = {run}; cat\nrequired = true\n',
    "a filter that stays running": '[filter "evil"]\nprocess = {run}\n',
    "a filter in another file": "[include]\npath = {folder}/more\n",
    "an external diff": "[diff]\nexternal = {run}\n",
    "a text conversion": '[diff "evil"]\ntextconv = {run}\n',
    "a pager": "[core]\npager = {run}\n[pager]\nstatus = {run}\ndiff = true\nls-files = true\n",
    "a server of missing objects": "[core]\nrepositoryformatversion = 1\n[extensions]\npartialClone = far\n"
    '[remote "far"]\nurl = {folder}\nuploadpack = {run};\npromisor = true\n[protocol]\nallow = always\n',
}


def infected(top: Path, name: str, marker: Path) -> None:
    """Give the repository at `top` a configuration whose programs write the file `marker`."""
    folder = top.parent / f"of {top.name}".replace(" ", "-")
    (folder / "hooks").mkdir(parents=True)
    run = folder / "run"
    run.write_text(f"#!/bin/sh\ntouch {marker}\n")
    run.chmod(0o755)
    (folder / "hooks/post-index-change").symlink_to(run)
    (folder / "more").write_text(f'[filter "evil"]\nclean = {run}; cat\n')
    here = top / ".git/config"
    here.write_text(here.read_text() + PROGRAMS[name].format(run=run, folder=folder))
    if "missing objects" in name:
        tree = git(top, "rev-parse", "HEAD^{tree}").strip()
        (top / f".git/objects/{tree[:2]}/{tree[2:]}").unlink()


def touched(top: Path) -> None:
    """Let git believe that a file may have changed, so that it reads it."""
    os.utime(top / "pkg/__init__.py", (1, 1))


def collected(top: Path, **more: str) -> str:
    recipe = make_recipe(top.parent / "recipes", "r", [], extra=f'[project]\npath = "../../{top.name}"\n')
    variables = {**os.environ, "ENVBUILD_STORE": str(top.parent / "store"), **more}
    code = collect(load_recipe(recipe / "recipe.toml"), load_environment(variables))
    assert code is not None
    return code.commit


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    top = tmp_path_factory.mktemp("repository") / "mine"
    commit(top, {})
    commit(top, FILES)
    return top


@pytest.fixture
def repository(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "mine")
    touched(tmp_path / "mine")
    return tmp_path / "mine"


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_of_a_repository_is_run(repository: Path, tmp_path: Path, name: str) -> None:
    infected(repository, name, marker := tmp_path / "marker")
    collected(repository)
    for words in (["diff", "HEAD"], ["diff", "--name-only", "HEAD~1...HEAD", "--"], ["status"], ["ls-files"]):
        run_git(repository, *words, variables=os.environ)
    if "missing" in name:
        with pytest.raises(UsageError, match="nothing that"):
            changes_since("HEAD~1", repository)
    else:
        assert changes_since("HEAD~1", repository)[1] == sorted(FILES)
    assert not marker.exists()
    (repository / "pkg/__init__.py").write_text("x = 3\n")
    # git as it is alone; `add` writes the index, and so runs the hook.
    for words in (["status"], ["diff", "HEAD"], ["add", "--all"], ["commit", "--allow-empty", "-qm", "x"]):
        user = ["-c", "user.name=ada", "-c", "user.email=ada@example.org"]
        subprocess.run(["git", *user, *words], cwd=repository, capture_output=True, check=False)
    assert marker.exists() or "pager" in name, "the program could not run at all"


def test_no_program_of_a_submodule_is_run_and_its_changes_count(repository: Path, tmp_path: Path) -> None:
    commit(tmp_path / "part", FILES)
    allow = ["-c", "protocol.file.allow=always"]
    git(repository, *allow, "submodule", "--quiet", "add", (tmp_path / "part").as_uri(), "sub")
    head = commit(repository, {})
    assert collected(repository) == head
    here = repository / ".git/modules/sub/config"
    here.write_text(here.read_text() + f'[filter "evil"]\nclean = touch {tmp_path}/marker; cat\n')
    touched(repository / "sub")
    assert collected(repository) == head and not (tmp_path / "marker").exists()
    (repository / "sub/pkg/__init__.py").write_text("x = 2\n")
    assert collected(repository) == f"{head}-dirty" and not (tmp_path / "marker").exists()
    git(repository, "status")
    assert (tmp_path / "marker").exists()


def test_a_filter_of_the_user_stays(repository: Path, tmp_path: Path) -> None:
    (tmp_path / "settings").write_text('[filter "evil"]\nclean = tr 2 1\n')
    (repository / "pkg/__init__.py").write_text("x = 2\n")
    head = git(repository, "rev-parse", "HEAD").strip()
    assert collected(repository) == f"{head}-dirty"
    assert collected(repository, GIT_CONFIG_GLOBAL=str(tmp_path / "settings")) == head


def test_a_filter_that_cannot_be_switched_off_is_named(repository: Path) -> None:
    here = repository / ".git/config"
    here.write_text(here.read_text() + '[filter "a=b"]\nclean = cat\n')
    with pytest.raises(UsageError, match=r"has a filter with an unusual name, 'filter\.a=b\.clean'"):
        collected(repository)


def test_a_repository_of_another_user_is_no_folder_without_git(repository: Path) -> None:
    with pytest.raises(RecipeError, match=r"git does not read the repository of .*\n.*dubious ownership") as caught:
        collected(repository, GIT_TEST_ASSUME_DIFFERENT_OWNER="1")
    assert "`include`" in str(caught.value.hint)


def test_git_is_run_in_one_module() -> None:
    top = Path(run_git.__code__.co_filename).parent
    runs = re.compile(r"""(run|start|follow|Popen|check_output)\(\s*\[\s*["']git["']|line = \["git",""")
    assert [path.name for path in sorted(top.rglob("*.py")) if runs.search(path.read_text())] == ["git.py"]
