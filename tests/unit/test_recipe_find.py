"""Finding recipes by name and by path."""

from __future__ import annotations

from pathlib import Path

import pytest
from lab.users import as_nobody

import envbuild
from envbuild.base.errors import RecipeError, UsageError
from envbuild.recipe.find import choose_target, find_recipe, list_recipes, search_folders, shipped_folder
from envbuild.recipe.load import load_recipe

TEXT = """\
name = "{name}"
description = "{description}"
python = "3.11"
requirements = []
[targets.cpu-x86_64]
"""


def put(folder: Path, name: str, description: str = "x", text: str = TEXT) -> Path:
    file = folder / name / "recipe.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text.format(name=name, description=description))
    return file


def test_first_folder_wins(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    file = put(near, "both", "near")
    put(far, "both", "far")
    other = put(far, "far-only")
    folders = [tmp_path / "absent", near, far]
    assert find_recipe("both", folders) == file
    assert find_recipe("far-only", folders) == other
    listed = list_recipes(folders)
    assert [(item.name, item.path) for item in listed] == [("both", file), ("far-only", other)]
    assert listed[0].loaded is not None
    assert listed[0].loaded.recipe.description == "near"


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = put(tmp_path, "here")
    (tmp_path / "alone.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert find_recipe("./here", []) == Path("here/recipe.toml")
    assert find_recipe("here/", []) == Path("here/recipe.toml")
    assert find_recipe(str(file), []) == file
    assert find_recipe("alone.toml", []) == Path("alone.toml")
    monkeypatch.chdir(tmp_path / "here")
    assert find_recipe(".", []) == Path("recipe.toml")
    for missing in ("./none", "none.toml", "..", "x" * 300 + "/y", "../here.toml"):
        with pytest.raises(UsageError, match="there is no recipe file "):
            find_recipe(missing, [tmp_path])


def test_a_folder_called_like_a_recipe_is_not_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "here")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError):
        find_recipe("here", [])


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        ("pt_cpuu", "'pt_cpuu'; did you mean 'pt_cpu'? Accepted: lab, pt_cpu"),
        ("zzz", "'zzz'; accepted: lab, pt_cpu"),
        ("", "''; accepted: lab, pt_cpu"),
    ],
)
def test_unknown_name(tmp_path: Path, name: str, tail: str) -> None:
    put(tmp_path, "pt_cpu")
    put(tmp_path, "lab")
    (tmp_path / "recipe.toml").write_text("")
    (tmp_path / "empty").mkdir()
    folders = [tmp_path, tmp_path / "absent"]
    with pytest.raises(UsageError) as caught:
        find_recipe(name, folders)
    assert caught.value.exit_code == 2
    assert caught.value.message == f"there is no recipe {tail}"
    assert caught.value.hint == f"Searched: {tmp_path}, {tmp_path}/absent"


def test_a_broken_recipe_does_not_hide_the_others(tmp_path: Path) -> None:
    put(tmp_path, "a-broken", text="name = [")
    put(tmp_path, "b-good")
    put(tmp_path, "c-wrong", text="name = 1\n")
    (tmp_path / "d-loop").symlink_to(tmp_path / "d-loop")
    (tmp_path / "e-folder" / "recipe.toml").mkdir(parents=True)
    listed = list_recipes([tmp_path])
    assert [(item.name, item.loaded is None) for item in listed] == [
        ("a-broken", True),
        ("b-good", False),
        ("c-wrong", True),
    ]
    assert isinstance(listed[0].error, RecipeError) and listed[1].error is None
    assert "missing key 'python'" in listed[2].error.message  # type: ignore[union-attr]


def test_search_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/xdg")
    site = [Path("/site/b"), Path("/site/a")]
    shipped = shipped_folder()
    expected = [Path("recipes"), *site, Path("/xdg/envbuild/recipes"), shipped]
    assert search_folders(site) == expected
    # A site that names the shipped folder puts it where it says, once.
    assert search_folders([shipped, *site]) == [Path("recipes"), shipped, *site, expected[3]]
    monkeypatch.chdir(shipped.parent)
    assert search_folders([]) == [Path("recipes"), expected[3]]


@pytest.mark.parametrize("value", [None, "", "relative/config"])
def test_user_folder_without_xdg(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    if value is not None:
        monkeypatch.setenv("XDG_CONFIG_HOME", value)
    assert Path("/home/someone/.config/envbuild/recipes") in search_folders()


def test_shipped_folder_of_a_checkout_and_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "envbuild"
    monkeypatch.setattr(envbuild, "__file__", str(package / "__init__.py"))
    assert shipped_folder() == tmp_path / "recipes"
    (package / "_bundled" / "recipes").mkdir(parents=True)
    assert shipped_folder() == package / "_bundled" / "recipes"


def test_a_target_that_other_recipes_have_is_found_in_all_search_folders(tmp_path: Path) -> None:
    near, far = tmp_path / "near", tmp_path / "far"
    loaded = load_recipe(put(near, "mine"))
    cuda = TEXT.replace("cpu-x86_64", "cu126-x86_64")
    put(near, "one", text=cuda)
    put(far, "two", text=cuda)
    put(far, "broken", text="name = 1")
    assert choose_target(loaded, "cpu-x86_64", [near, far]).name == "cpu-x86_64"
    with pytest.raises(UsageError, match="'mine' has no target 'cu126-x86_64'") as caught:
        choose_target(loaded, "cu126-x86_64", [near, far])
    assert (caught.value.hint or "").startswith("to add it, write the table [targets.cu126-x86_64] into ")
    assert (caught.value.hint or "").endswith("recipes with this target: one, two")
    with pytest.raises(UsageError, match="did you mean 'cpu-x86_64'"):
        choose_target(loaded, "cpu-x86-64", [near, far])


@pytest.mark.parametrize("closed", ["file", "folder", "search folder"])
def test_a_recipe_that_may_not_be_read_is_not_said_to_be_missing(tmp_path: Path, closed: str) -> None:
    file = put(tmp_path / "recipes", "mine")
    place = {"file": file, "folder": file.parent, "search folder": tmp_path / "recipes"}[closed]
    with as_nobody(place):
        with pytest.raises(UsageError, match=r"cannot read recipe file .*permission denied") as by_path:
            find_recipe(str(file.parent), [])
        with pytest.raises(UsageError, match=r"permission denied|no recipe 'mine'") as by_name:
            find_recipe("mine", [tmp_path / "recipes"])
    assert f"owner of {place} for" in str(by_path.value.hint)
    said = f"{by_name.value.message} {by_name.value.hint}"
    assert "permission denied" in said


def test_a_search_folder_that_may_not_be_entered_hides_no_other(tmp_path: Path) -> None:
    put(tmp_path / "closed", "mine")
    file = put(tmp_path / "open", "mine")
    with as_nobody(tmp_path / "closed"):
        assert find_recipe("mine", [tmp_path / "closed", tmp_path / "open"]) == file
