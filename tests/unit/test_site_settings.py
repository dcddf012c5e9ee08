"""site.toml, and which place wins."""

from pathlib import Path

import pytest

from envbuild.base.errors import RecipeError
from envbuild.site.settings import Site, load_site


def site(tmp_path: Path, text: str = "", **env: str) -> Site:
    (tmp_path / "site.toml").write_text(text)
    return load_site({"HOME": str(tmp_path), "ENVBUILD_SITE": str(tmp_path / "site.toml"), **env}, etc=tmp_path / "etc")


def test_defaults(tmp_path: Path) -> None:
    plain = load_site({"HOME": str(tmp_path)}, etc=tmp_path / "etc")
    assert plain.store == tmp_path / ".cache/envbuild"
    assert plain.recipe_folders == (tmp_path / "etc/envbuild/recipes",)
    assert plain.mirrored("https://x.org/simple") == ["https://x.org/simple"]


def test_the_user_s_file_goes_over_the_site_s(tmp_path: Path) -> None:
    for folder, store in (("etc/envbuild", "/site"), (".config/envbuild", "~/mine")):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "site.toml").write_text(f'store = "{store}"\nrecipes = ["r"]\n')
    found = load_site({"HOME": str(tmp_path)}, etc=tmp_path / "etc")
    assert found.store == tmp_path / "mine"
    assert found.recipe_folders[1:] == (tmp_path / "etc/envbuild/r", tmp_path / ".config/envbuild/r")


def test_the_variable_goes_over_the_file(tmp_path: Path) -> None:
    assert site(tmp_path, 'store = "/file"').store == Path("/file")
    assert site(tmp_path, 'store = "/file"', ENVBUILD_STORE="/variable").store == Path("/variable")
    assert site(tmp_path, XDG_CACHE_HOME="/cache").store == Path("/cache/envbuild")


def test_the_home_folder_is_meant_by_its_sign_in_quotes_too(tmp_path: Path) -> None:
    """`ENVBUILD_STORE='~/x'` made a folder that is called "~"."""
    home = tmp_path / "home"
    assert site(tmp_path, HOME=str(home), ENVBUILD_STORE="~/x").store == home / "x"
    assert site(tmp_path, ENVBUILD_STORE="~root/x").store == Path("~root/x").expanduser()
    home.mkdir()
    (home / "mine.toml").write_text('store = "~root/y"\n')
    found = load_site({"HOME": str(home), "ENVBUILD_SITE": "~/mine.toml"})
    assert found.files == (home / "mine.toml",) and found.store == Path("~root/y").expanduser()


def test_indexes_by_name(tmp_path: Path) -> None:
    found = site(tmp_path, '[indexes]\ninternal = "https://x.org/simple"\nlocal = "file:///srv/simple"\n')
    assert found.indexes == {"internal": "https://x.org/simple", "local": "file:///srv/simple"}
    with pytest.raises(RecipeError) as caught:
        site(tmp_path, '[indexes]\nA = "https://x.org"\nb = "https://me:s3cret@x.org/simple"\nc = "/srv"\n')
    said = caught.value.message
    assert [line.split(": ")[0].rpartition("site.toml:")[2] for line in said.splitlines()] == ["2:1", "3:1", "4:1"]
    assert "netrc" in said and "s3cret" not in said


def test_mirrors_match_whole_path_parts_and_the_longest_prefix(tmp_path: Path) -> None:
    found = site(
        tmp_path,
        '[mirrors]\n"https://d.org/whl" = ["https://m1.org/a/", "file:///m2"]\n"https://d.org/whl/cpu" = ["https://c.org"]\n',
    )
    assert found.mirrored("https://d.org/whl/cu126") == [
        "https://m1.org/a/cu126",
        "file:///m2/cu126",
        "https://d.org/whl/cu126",
    ]
    assert found.mirrored("https://d.org/whl/cpu") == ["https://c.org", "https://d.org/whl/cpu"]
    assert found.mirrored("https://d.org/whlx") == ["https://d.org/whlx"]


def test_mistakes_are_reported_together_with_their_places(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        site(tmp_path, 'stor = "x"\nrecipes = "r"\n[mirrors]\n"d.org" = ["https://m.org"]\n')
    for place in ("site.toml:1:1", "site.toml:2:", "site.toml:4:"):
        assert place in caught.value.message
    assert "did you mean 'store'" in caught.value.message


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no such file"):
        load_site({"HOME": str(tmp_path), "ENVBUILD_SITE": "/nowhere/site.toml"})
