"""The schema, docs/reference/recipe.md and the shipped recipes say what the code does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import MISSING, fields
from pathlib import Path

import jsonschema
import pytest

from envbuild.base.errors import RecipeError
from envbuild.contract.verification import VerifySettings
from envbuild.data import load_table
from envbuild.recipe.find import list_recipes, shipped_folder
from envbuild.recipe.load import load_recipe
from envbuild.recipe.model import PYTHONS, Recipe, TargetTable
from envbuild.recipe.project import ProjectTable

TOP = Path(__file__).parents[2]
SCHEMA_FILE = TOP / "docs" / "recipe.schema.json"
PAGE = (TOP / "docs/reference/recipe.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE, re.S | re.M)
SHIPPED = sorted((TOP / "recipes").glob("*/recipe.toml"))


def test_schema_file_is_current() -> None:
    done = subprocess.run([sys.executable, "-m", "envbuild.recipe.model"], capture_output=True, text=True, check=True)
    assert SCHEMA_FILE.read_text() == done.stdout


def test_the_two_recipes_are_shipped() -> None:
    assert {"pt_cpu", "pt_minimal"} <= {file.parent.name for file in SHIPPED}
    assert all(item.error is None for item in list_recipes([shipped_folder()]))


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.parent.name)
def test_shipped_recipe(file: Path) -> None:
    schema = json.loads(SCHEMA_FILE.read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(tomllib.loads(file.read_text()), schema)
    assert load_recipe(file).recipe.name == file.parent.name
    named = re.match(r"#:schema (\S+)", file.read_text())
    assert named and (file.parent / named[1]).resolve() == SCHEMA_FILE


def test_shipped_targets() -> None:
    for name in ("pt_cpu", "pt_minimal"):
        loaded = load_recipe(TOP / "recipes" / name / "recipe.toml")
        assert list(loaded.recipe.targets) == ["cpu-x86_64", "cpu-aarch64"]
        for table in loaded.recipe.targets.values():
            pinned = loaded.recipe.requirements + table.requirements
            assert all("==" in requirement for requirement in pinned)


def example(folder: Path, text: str) -> Path:
    file = folder / "recipes" / "pt_lab" / "recipe.toml"
    file.parent.mkdir(parents=True)
    file.write_text(text)
    return file


def test_the_example_of_the_page_is_a_recipe(tmp_path: Path) -> None:
    assert load_recipe(example(tmp_path, BLOCKS[0][1])).recipe.verify.model == "cnn"


def test_the_mistakes_of_the_page_are_reported_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (kind, text), (_, expected) = BLOCKS[1:3]
    assert kind == "toml"
    file = example(tmp_path, text)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError) as caught:
        load_recipe(file.relative_to(tmp_path))
    assert caught.value.message + "\n" == expected


@pytest.mark.parametrize(
    ("cls", "title"),
    [
        (Recipe, "## Keys"),
        (TargetTable, "### `[targets.NAME]`"),
        (VerifySettings, "### `[verify]`"),
        (ProjectTable, "### `[project]`"),
    ],
)
def test_the_page_has_every_key_with_its_default(cls: type, title: str) -> None:
    section = re.split(r"^##", PAGE.partition(f"\n{title}\n")[2], flags=re.M)[0]
    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| (?:`([^`|]*)`)?[^|]*\|", section, re.M))
    keys = [field for field in fields(cls) if not field.metadata.get("internal")]
    assert list(rows) and set(rows) == {field.name for field in keys}
    for field in keys:
        if field.default not in (MISSING, None):
            written = tomllib.loads(f"x = {rows[field.name]}")["x"]
            expected = list(field.default) if isinstance(field.default, tuple) else field.default
            assert written == expected, field.name
        elif field.default_factory is MISSING:
            assert rows[field.name] == "", field.name


def test_the_table_of_pythons_has_the_releases_of_torch_and_debian() -> None:
    """A range of releases ends where a later release has no wheel for the Python."""
    text = (TOP / "docs/howto/python.md").read_text()
    rows = dict(re.findall(r"^\| (3\.\d+) \| (.+) \|$", text, re.M))
    assert tuple(rows) == PYTHONS
    torch = [row for row in load_table("releases")["torch"] if row["arch"] == "x86_64"]
    series = list(dict.fromkeys(".".join(row["version"].split(".")[:2]) for row in torch))
    for python, cells in rows.items():
        having = [
            name
            for name in series
            if any(python in row["python"] for row in torch if row["version"].startswith(f"{name}."))
        ]
        first, last = having[0], having[-1]
        everything = "all since " if first == series[0] else "from "
        expected = f"{first} to {last}" if last != series[-1] else f"{everything}{first}" + " on" * (first != series[0])
        packages = load_table("debian")["suites"]
        suites = [name for name, suite in packages.items() if f"python{python}-minimal" in suite["python"]]
        debian = {"bookworm": "Debian 12", "trixie": "Debian 13"}
        assert cells == f"{expected} | {debian[suites[0]] if suites else 'no'}", python
