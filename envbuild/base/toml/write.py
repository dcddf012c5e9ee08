"""Values as TOML."""

from __future__ import annotations

import re
from collections.abc import Mapping

# An array whose line would be longer has a line for each of its values.
_LINE = 80


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


def table_text(table: Mapping[str, object], keys: tuple[str, ...] = ()) -> str:
    """Return `table`, and the tables in it, as TOML, with the header that `keys` name."""
    only_tables = table and all(isinstance(one, Mapping) for one in table.values())
    lines = [f"\n[{'.'.join(map(toml_key, keys))}]"] if keys and not only_tables else []
    lines += [f"{toml_key(key)} = {_lines(one)}" for key, one in table.items() if not isinstance(one, Mapping)]
    inner = [table_text(one, (*keys, key)) for key, one in table.items() if isinstance(one, Mapping)]
    return "".join(f"{line}\n" for line in lines) + "".join(inner)


def _lines(value: object) -> str:
    short = toml_value(value)
    if not isinstance(value, list) or len(short) < _LINE:
        return short
    return "[\n" + "".join(f"  {toml_value(one)},\n" for one in value) + "]"
