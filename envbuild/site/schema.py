"""JSON schema of site files for editors: `python -m envbuild.site.schema > docs/site.schema.json`."""

from __future__ import annotations

import json

from envbuild.site.settings import SiteFile
from envbuild.toml import json_schema


def render() -> str:
    """Return the text of docs/site.schema.json."""
    schema = json_schema(SiteFile, id="urn:envbuild:site", title="envbuild site file")
    return json.dumps(schema, indent=2) + "\n"


if __name__ == "__main__":
    print(render(), end="")
