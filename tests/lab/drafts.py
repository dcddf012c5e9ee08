"""Recipes that `envbuild init` would write, read again."""

from __future__ import annotations

from pathlib import Path

from envbuild.imports import read_source
from envbuild.imports.compose import compose
from envbuild.imports.statement import Draft
from envbuild.recipe.model import Recipe


def draft_of(*paths: Path, groups: tuple[str, ...] = (), target: str | None = "cpu-x86_64") -> tuple[Draft, Recipe]:
    """The draft from `paths`, and its recipe."""
    entries = [entry for path in paths for entry in read_source(path, groups)]
    draft = compose("lab", entries, groups, target)
    return draft, draft.loaded(Path("recipes/lab/recipe.toml")).recipe
