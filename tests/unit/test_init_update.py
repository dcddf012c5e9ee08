"""`envbuild init --update`, and `venv --from` on an existing recipe: changes of the sources meet the user's own."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st
from lab.drafts import draft_of

from envbuild.base.errors import EnvbuildError
from envbuild.cli.commands import cli
from envbuild.imports.origin import merge
from examples import examples

FILE = Path("recipes/lab/recipe.toml")
SEEDS = sorted((Path(__file__).parent / "data" / "init").iterdir())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ENVBUILD_STORE", str(tmp_path / "store"))
    say("torch==2.7.1\nnumpy==2.2.6\ntqdm\n")
    done = run("lab", "--from", "requirements.txt", "--target", "cpu-x86_64")
    assert done.exit_code == 0, done.output
    return tmp_path


def say(text: str) -> None:
    Path("requirements.txt").write_text(text)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["init", *arguments])


def update(*arguments: str) -> dict[str, Any]:
    done = run("--update", "--json", *arguments)
    assert done.exit_code == 0, (done.output, done.exception)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def edit(old: str, new: str) -> None:
    assert FILE.read_text().count(old) == 1
    FILE.write_text(FILE.read_text().replace(old, new))


def test_changes_of_the_sources_come_in_and_edits_stay(folder: Path) -> None:
    edit('"tqdm"]', '"tqdm"]  # progress\nconstraints = ["setuptools<81"]')
    edit("[targets.cpu-x86_64]", "# CPUs of the login node\n[targets.cpu-x86_64]")
    edited = FILE.read_text()
    assert update()["diff"] == []
    say("torch==2.8.0\nnumpy==2.3.0\nrich\n")
    dry = update("--dry-run")
    assert FILE.read_text() == edited
    made = update("lab")
    assert made["conflicts"] == [] and made["diff"] == dry["diff"]
    lines = {line for line in made["diff"] if line[0] in "+-" and line[:3] not in ("+++", "---")}
    assert lines == {
        '-requirements = ["numpy==2.2.6", "tqdm"]  # progress',
        '+requirements = ["numpy==2.3.0", "rich"]  # progress',
        '-requirements = ["torch==2.7.1+cpu"]',
        '+requirements = ["torch==2.8.0+cpu"]',
    }
    assert "# CPUs of the login node\n[targets" in FILE.read_text() and "setuptools<81" in FILE.read_text()
    assert update()["diff"] == [], "it is remembered"


def test_the_users_value_stays_where_both_changed_and_is_listed_once(folder: Path) -> None:
    edit("numpy==2.2.6", "numpy<2.3")
    edit(', "tqdm"', "")
    say("torch==2.7.1\nnumpy==2.3.0\ntqdm>=4\n")
    made = update()
    assert made["diff"] == []
    assert made["conflicts"] == [
        "requirements: numpy: the sources have 'numpy==2.3.0' now (before: 'numpy==2.2.6'); the recipe keeps"
        " 'numpy<2.3'",
        "requirements: tqdm: the sources have 'tqdm>=4' now (before: 'tqdm'); the recipe stays without it",
    ]
    assert update()["conflicts"] == []


def test_a_package_that_the_user_moved_is_not_required_twice(folder: Path) -> None:
    edit('["torch==2.7.1+cpu"]', '["torch==2.7.1+cpu", "rich>=13"]')
    say("torch==2.7.1\nnumpy==2.2.6\ntqdm\nrich\n")
    (line,) = update()["conflicts"]
    assert line.endswith("the recipe keeps 'rich>=13' in targets.cpu-x86_64.requirements")


def test_a_target_goes_with_its_index_unless_the_user_edited_it(folder: Path) -> None:
    two = "--extra-index-url https://download.pytorch.org/whl/{}\n"
    source = folder / "gpu.txt"
    for name in ("plain", "edited"):
        source.write_text(two.format("cu126") + two.format("cu128") + "torch\n")
        assert run(name, "--from", "gpu.txt").exit_code == 0
        path = Path("recipes", name, "recipe.toml")
        if name == "edited":
            path.write_text(
                path.read_text().replace("[targets.cu128-x86_64]", '[targets.cu128-x86_64]\ngpus = ["h100"]')
            )
        source.write_text(two.format("cu126") + "torch\n")
        made = update(name)
        targets = tomllib.loads(path.read_text())["targets"]
        if name == "plain":
            assert list(targets) == ["cu126-x86_64"] and made["conflicts"] == []
        else:
            assert targets["cu128-x86_64"]["requirements"] == ["torch"] and "gpus" in targets["cu128-x86_64"]
            assert made["conflicts"][0].startswith("targets.cu128-x86_64: the sources have it no more")


def test_another_source_and_extras_are_remembered(folder: Path) -> None:
    Path("pyproject.toml").write_text(
        '[project]\nname = "x"\ndependencies = ["torch==2.7.1"]\n[project.optional-dependencies]\ngpu = ["rich"]\n'
    )
    made = update("--from", "pyproject.toml", "--extra", "gpu")
    assert "+++" in made["diff"][1] and "rich" in FILE.read_text() and "numpy" not in FILE.read_text()
    Path("pyproject.toml").write_text(Path("pyproject.toml").read_text().replace("rich", "rich>=13"))
    assert "rich>=13" in "".join(update()["diff"])


def test_line_ends_stay(folder: Path) -> None:
    FILE.write_bytes(FILE.read_bytes().replace(b"\n", b"\r\n"))
    say("torch==2.7.1\nnumpy==2.3.0\n")
    update()
    assert FILE.read_bytes().count(b"\r\n") == FILE.read_bytes().count(b"\n") and b"2.3.0" in FILE.read_bytes()


@pytest.mark.parametrize(
    ("break_it", "said", "code"),
    [
        (lambda: Path("recipes/lab/imported.toml").unlink(), "has no record of its sources", 2),
        (lambda: Path("recipes/lab/imported.toml").write_text("x = 1\n"), "`from` names no sources", 2),
        (lambda: Path("recipes/lab/imported.toml").write_text("x = \n"), "imported.toml:1:", 2),
        (lambda: Path("requirements.txt").unlink(), "requirements.txt: no such file or folder", 2),
        (lambda: Path("recipes/two").mkdir() or Path("recipes/two/recipe.toml").write_text(""), "lab, two", 2),
        (lambda: edit('name = "lab"', 'name = "bal"'), "'bal' is not the name of its folder", 2),
    ],
)
def test_refusals(folder: Path, break_it: Any, said: str, code: int) -> None:
    break_it()
    before = FILE.read_text()
    done = run("--update")
    assert isinstance(done.exception, EnvbuildError) and said in done.exception.message
    assert done.exception.exit_code == code and FILE.read_text() == before


def test_venv_from_takes_the_name_of_the_folder_and_refuses_other_sources(folder: Path) -> None:
    """What it builds is of tests/real; here, nothing is: --target names one that the recipe does not have."""
    runner = CliRunner()
    Path("other.txt").write_text("torch\n")
    for words, said in (
        (["lab", "--from", "other.txt"], "was written from requirements.txt, not from other.txt"),
        (["lab", "--from", "requirements.txt", "--target", "cu126-x86_64"], "has no target 'cu126-x86_64'"),
    ):
        done = runner.invoke(cli, ["venv", *words])
        assert isinstance(done.exception, EnvbuildError) and said in done.exception.message, done.output
    say("torch==2.7.1\nnumpy==2.3.0\ntqdm\n-e ./lib\n")
    done = runner.invoke(cli, ["venv", "lab", "--from", "requirements.txt", "--target", "cu126-x86_64"])
    assert '+requirements = ["numpy==2.3.0", "tqdm"]' in done.stderr and "requirements.txt:4: -e ./lib" in done.stderr
    assert "numpy==2.3.0" in FILE.read_text()


def _values(data: dict[str, Any]) -> dict[str, Any]:
    """`data` without order, and without what is empty, except for targets."""
    found = {}
    for key, value in data.items():
        if isinstance(value, dict):
            value = _values(value)
        is_target = re.fullmatch(r"[a-z0-9.]+-(x86_64|aarch64)", key)
        if key not in ("name", "description") and (value not in ([], {}) or is_target):
            found[key] = sorted(value) if isinstance(value, list) else value
    return found


@examples(30)
@given(st.sampled_from(SEEDS), st.sampled_from(SEEDS), st.sampled_from(["cpu-x86_64", "cu126-x86_64"]))
def test_without_edits_the_new_recipe_comes_out(one: Path, other: Path, target: str) -> None:
    old, new = draft_of(one)[0], draft_of(other, target=target)[0]
    text, conflicts = merge(old.text, old.data, new.data)
    assert conflicts == []
    assert _values(tomllib.loads(text)) == _values(dict(new.data))
