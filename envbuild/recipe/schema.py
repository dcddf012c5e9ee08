"""JSON schema of recipes for editors: `python -m envbuild.recipe.schema > docs/recipe.schema.json`."""

from __future__ import annotations

import json

from envbuild.recipe.model import Recipe
from envbuild.toml import json_schema


def render() -> str:
    """Return the text of docs/recipe.schema.json."""
    schema = json_schema(Recipe, id="urn:envbuild:recipe", title="envbuild recipe")
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    print(render(), end="")
