"""Values as TOML."""

from __future__ import annotations

import re
from collections.abc import Mapping


def toml_value(value: object) -> str:
    """Return a string, number, boolean, list or mapping as an inline value of TOML."""
    if isinstance(value, Mapping):
        return f"{{ {', '.join(toml_pairs(value))} }}" if value else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(toml_value, value))}]"
    import json  # only commands that write TOML need it

    # JSON's scalars are TOML's, except for DEL, which TOML forbids, and an escaped surrogate.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def toml_key(key: str) -> str:
    """Return a key, in quotes if it needs them."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else toml_value(key)


def toml_pairs(table: Mapping[str, object]) -> list[str]:
    """Return KEY = VALUE for each entry of `table`."""
    return [f"{toml_key(key)} = {toml_value(value)}" for key, value in table.items()]
