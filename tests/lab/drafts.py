"""Recipes that `envbuild init` would write, read again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from envbuild.imports import read_source
from envbuild.imports.compose import compose
from envbuild.imports.statement import Draft, Statement
from envbuild.recipe.model import Recipe


def draft_of(*paths: Path, groups: tuple[str, ...] = (), target: str | None = "cpu-x86_64") -> tuple[Draft, Recipe]:
    """The draft from `paths`, and its recipe."""
    return composed([entry for path in paths for entry in read_source(path, groups)], groups, target)


def composed(
    entries: Sequence[Statement], groups: tuple[str, ...] = (), target: str | None = "cpu-x86_64"
) -> tuple[Draft, Recipe]:
    """The draft from what files say, and its recipe."""
    draft = compose("lab", entries, groups, target)
    return draft, draft.loaded(Path("recipes/lab/recipe.toml")).recipe
