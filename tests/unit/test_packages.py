"""`envbuild add` and `remove`: which list of a recipe changes, and how; locks are of tests/real/test_init.py."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from envbuild.base.errors import EnvbuildError
from envbuild.cli.commands import cli
from envbuild.imports.packages import PackageEdit, add_packages, remove_packages
from envbuild.recipe.load import LoadedRecipe, load_recipe

WHL = "https://download.pytorch.org/whl"
TEXT = f"""\
# Ours
name = "lab"
description = "d"
python = "3.11"
requirements = [
  "numpy==2.2.6",  # old code
  "Pillow[extra]>=11",
  "tomli; python_version < '3.11'",
  "tomli>=2; python_version >= '3.11'",
]
indexes = {{ numpy = "team" }}

# The login node
[targets.cpu-x86_64]
requirements = ["torch==2.13.0+cpu"]
indexes = ["{WHL}/cpu"]

[targets.cu126-x86_64]
requirements = ["torch==2.13.0+cu126", "deepspeed"]
indexes = ["{WHL}/cu126"]
"""


def load(folder: Path, text: str = TEXT) -> LoadedRecipe:
    path = folder / "recipes/lab/recipe.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return load_recipe(path)


def add(folder: Path, *words: str, text: str = TEXT, target: str | None = None, conda: bool | None = None) -> str:
    return done(add_packages(load(folder, text), words, target=target, conda=conda))


def done(edit: PackageEdit) -> str:
    assert edit.after.document.text.startswith("# Ours\n")
    return edit.after.document.text


@pytest.mark.parametrize(
    ("word", "old", "new"),
    [
        ("Rich", " >= '3.11'\",\n]", ' >= \'3.11\'",\n  "rich",\n]'),
        ("NumPy>=2.3", '"numpy==2.2.6",  # old', '"numpy>=2.3",  # old'),
        ("pillow", '"Pillow[extra]>=11"', '"pillow"'),
        ("a[z,b] >= 1 ; python_version > '3'", " >= '3.11'\",\n]", None),
        ("tomli>=3; python_version>='3.11'", "\"tomli>=2; python_version >= '3.11'\"", None),
        ("deepspeed>=0.17", '"deepspeed"', '"deepspeed>=0.17"'),
    ],
)
def test_one_list_changes_and_nothing_else(tmp_path: Path, word: str, old: str, new: str | None) -> None:
    assert TEXT.count(old) == 1
    text = add(tmp_path, word)
    if new is not None:
        assert text == TEXT.replace(old, new)
    changed = [one for one in text.splitlines() if one not in TEXT.splitlines()]
    assert len(changed) == 1 and "# The login node" in text


def test_markers(tmp_path: Path) -> None:
    def tomli(*words: str) -> list[str]:
        return [one for one in tomllib.loads(add(tmp_path, *words))["requirements"] if one.startswith("tomli")]

    other = 'tomli; python_version >= "3.13"'
    assert tomli(other)[-1] == other and len(tomli(other)) == 3
    assert tomli("tomli==2.2") == ["tomli==2.2"], "one for all Pythons replaces them"


def test_torch_is_of_each_target(tmp_path: Path) -> None:
    targets = tomllib.loads(add(tmp_path, "torch==2.14.0"))["targets"]
    assert [one["requirements"][0] for one in targets.values()] == ["torch==2.14.0+cpu", "torch==2.14.0+cu126"]
    bare = "# Ours\nname = 'lab'\ndescription = 'd'\npython = '3.11'\nrequirements = []\n[targets.cpu-x86_64]\n"
    found = tomllib.loads(add(tmp_path, "torch==2.14.0", text=bare))["targets"]["cpu-x86_64"]
    assert found == {"requirements": ["torch==2.14.0+cpu"], "indexes": [f"{WHL}/cpu"]}
    one = tomllib.loads(add(tmp_path, "torch==2.12.0", target="cpu-x86_64"))["targets"]
    assert one["cu126-x86_64"]["requirements"][0] == "torch==2.13.0+cu126"


CONDA = """\
# Ours
name = "lab"
description = "d"
python = "3.11"
requirements = []
environment = "conda"
[conda]
dependencies = ["numpy 2.2.*"]
[targets.cpu-x86_64]
"""


def test_a_recipe_of_conda_packages_gets_match_specs(tmp_path: Path) -> None:
    conda: dict[str, Any] = tomllib.loads(add(tmp_path, "numpy 2.3.*", "pytorch", text=CONDA))["conda"]
    assert conda["dependencies"] == ["numpy 2.3.*", "pytorch"]
    assert tomllib.loads(add(tmp_path, "einops>=0.8", text=CONDA, conda=False))["conda"]["requirements"] == [
        "einops>=0.8"
    ]


def test_removal_takes_a_package_out_of_all_lists_and_settings(tmp_path: Path) -> None:
    loaded = load(tmp_path)
    text = done(remove_packages(loaded, ["numpy", "TOMLI", "torch"], target=None))
    data = tomllib.loads(text)
    assert data["requirements"] == ["Pillow[extra]>=11"] and "indexes" not in str(data.get("indexes") or "")
    assert [one["requirements"] for one in data["targets"].values()] == [[], ["deepspeed"]]
    assert "old code" not in text and "# The login node" in text
    only = tomllib.loads(done(remove_packages(loaded, ["torch"], target="cpu-x86_64")))["targets"]
    assert [one["requirements"] for one in only.values()] == [[], ["torch==2.13.0+cu126", "deepspeed"]]


@pytest.mark.parametrize(
    ("words", "said", "hint"),
    [
        ("add ./lib", "./lib is a file or folder", "[project]"),
        ("add requirements.txt", "is a file or folder", "init --update --from"),
        ("add numpy=1.26", "numpy=1.26 is not a requirement", "write numpy==1.26"),
        ("add numpy@1.26", "numpy@1.26 is not a requirement", "write numpy==1.26"),
        ("add git+https://host/x", "an address without a name", ""),
        ("add numpy>>2", "'numpy>>2' is not a requirement", ""),
        ("add python", "Python cannot be a requirement", "edit `python`"),
        ("add rich RICH", "rich is given twice", ""),
        ("add rich --target cpu-aarch64", "has no target 'cpu-aarch64'", ""),
        ("add numpy --target cpu-x86_64", "'numpy' is also required by", ""),
        ("remove nunpy", "does not require 'nunpy'", "did you mean 'numpy'?"),
        ("remove numpy==2.2.6", "is not the name of a package", "write numpy"),
        ("add rich --recipe nowhere", "there is no recipe 'nowhere'", ""),
    ],
)
def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, said: str, hint: str) -> None:
    load(tmp_path)
    monkeypatch.chdir(tmp_path)
    failed = CliRunner().invoke(cli, words.split()).exception
    assert isinstance(failed, EnvbuildError) and failed.exit_code == 2
    assert said in failed.message and hint in (failed.hint or "")
    assert Path("recipes/lab/recipe.toml").read_text() == TEXT


def test_a_recipe_that_comes_with_envbuild_is_not_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for words in (["add", "rich"], ["remove", "numpy", "--recipe", "pt_cpu"], ["init", "pt_cu126", "--update"]):
        failed = CliRunner().invoke(cli, words).exception
        assert isinstance(failed, EnvbuildError) and "is part of envbuild and cannot be edited" in failed.message
