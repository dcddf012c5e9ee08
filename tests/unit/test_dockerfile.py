"""Dockerfile.cpu and Dockerfile.gpu against the recipes and files that they name, without a daemon."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from envbuild.lock.format import parse
from envbuild.recipe.load import load_recipe

ROOT = Path(__file__).resolve().parents[2]
CPU, GPU = ((ROOT / f"Dockerfile.{name}").read_text() for name in ("cpu", "gpu"))
BOTH = pytest.mark.parametrize("text", [CPU, GPU], ids=["cpu", "gpu"])


def argument(text: str, name: str) -> str:
    match = re.search(rf"^ARG {name}=(.*)$", text, re.MULTILINE)
    assert match, name
    return match[1]


@BOTH
def test_the_defaults_name_a_locked_recipe_and_its_python(text: str) -> None:
    recipe, target = argument(text, "RECIPE"), argument(text, "TARGET")
    loaded = load_recipe(ROOT / "recipes" / recipe / "recipe.toml")
    locked = parse((loaded.folder / f"{target}.requirements.txt").read_text(), recipe)
    assert target in loaded.recipe.targets
    python = (
        argument(CPU, "BASE").partition("python:")[2].partition("-")[0] if text == CPU else argument(text, "PYTHON")
    )
    assert python.removeprefix("python") == locked.python


@BOTH
def test_a_context_has_all_that_is_copied(text: str) -> None:
    sources = " ".join(re.findall(r"^COPY ([^-].*) \S+$", text, re.MULTILINE)).split()
    assert {"envbuild", "recipes", "pyproject.toml"} <= set(sources)
    assert [source for source in sources if not (ROOT / source).exists()] == []


@BOTH
def test_no_syntax_image_is_pulled_and_secrets_are_for_the_first_stage_alone(text: str) -> None:
    assert not re.search(r"^#\s*syntax\s*=", text, re.MULTILINE)
    build, _, image = text.rpartition("\nFROM ")
    assert build.count("--mount=type=secret,id=pip_conf") == build.count("--mount=type=secret,id=ca") == 2
    assert "--mount" not in image and "COPY --from=build /opt/env /opt/env" in image


def test_both_files_install_envbuild_in_the_same_words() -> None:
    def part(text: str) -> str:
        start, end = text.index("# The secrets replace"), text.index("ARG RECIPE")
        return text[start:end].replace("${PYTHON}", "python3")

    assert part(CPU) == part(GPU)
