"""`python -m envbuild.recipe.schema > docs/recipe.schema.json`: the recipe's schema for editors."""

from __future__ import annotations

import json

from envbuild.recipe.model import Recipe
from envbuild.toml import json_schema


def render() -> str:
    """The text of docs/recipe.schema.json."""
    schema = json_schema(Recipe, id="urn:envbuild:recipe", title="envbuild recipe")
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    print(render(), end="")
