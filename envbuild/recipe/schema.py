"""JSON schema of recipes for editors: `python -m envbuild.recipe.schema > docs/recipe.schema.json`."""

from __future__ import annotations

import json

from envbuild.base.toml import json_schema
from envbuild.recipe.model import Recipe

if __name__ == "__main__":
    print(json.dumps(json_schema(Recipe, id="urn:envbuild:recipe", title="envbuild recipe"), indent=2))
