"""A recipe before it is written, and its text."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from envbuild.base.errors import RecipeError
from envbuild.base.toml import Document, parse_toml, table_text
from envbuild.imports.statement import Statement
from envbuild.recipe.load import LoadedRecipe, decode_recipe
from envbuild.recipe.model import NAME_PATTERN


@dataclass(frozen=True, slots=True)
class Draft:
    """A recipe before it is written: its `data`, the statements that it has, and those that were not carried.

    `warning` is what the user has to decide: GPUs that the sources name and the targets do not carry. It is in the
    recipe's text, too.
    """

    name: str
    data: Mapping[str, Any]
    carried: tuple[Statement, ...]
    lost: tuple[Statement, ...]
    warning: str = ""

    @property
    def text(self) -> str:
        """The recipe file."""
        comment = textwrap.fill(self.warning, 100, initial_indent="# ", subsequent_indent="# ")
        return (f"{comment}\n" if comment else "") + table_text(self.data)

    def loaded(self, path: Path) -> LoadedRecipe:
        """Return the recipe as it will be read from `path`. Raises RecipeError when it cannot be read."""
        try:
            return decode_recipe(Document(path, self.text, parse_toml(self.text)))
        except ValueError as error:
            raise RecipeError(f"{path}: {error}") from None


def recipe_name(text: str) -> str:
    """Return `text` as the name of a recipe."""
    name = re.sub(r"[^a-z0-9_.-]+", "_", text.lower()).strip("_.-")
    return name if re.fullmatch(NAME_PATTERN, name) else "environment"
