"""JSON schema of site files for editors: `python -m envbuild.site.schema > docs/site.schema.json`."""

from __future__ import annotations

import json

from envbuild.base.toml import json_schema
from envbuild.site.settings import SiteFile

if __name__ == "__main__":
    print(json.dumps(json_schema(SiteFile, id="urn:envbuild:site", title="envbuild site file"), indent=2))
