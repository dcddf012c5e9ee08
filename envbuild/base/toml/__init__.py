"""Strict TOML: decode files into frozen dataclasses and report every mistake with its line.

`read` parses a file, `decode` turns it into an instance of a dataclass, `json_schema` describes that dataclass
to editors. A field may be a str, bool, int, float, Literal, another dataclass, `tuple[X, ...]`, `dict[str, X]`
or `X | None` (in TOML, the key is left out), and its `key(...)` or `field(metadata=...)` may hold:

    doc        meaning of the key           example      a valid value, for the schema
    name       its name, if not the field's
    pattern    regular expression           choices      the accepted values, or () -> them
    minimum    smallest number              check        function: value -> the mistake, or None
    min_items  smallest number of entries   key_check    the same, for the keys of a dict
    names      whether a list of keys       entry_check  the same, for (key, value) of a dict
               stands for empty tables

pattern, choices, minimum and check apply to each entry of a tuple or a dict. `internal(...)` is the field of a value
that is no key.
"""

from __future__ import annotations

from envbuild.base.toml.decode import Problem, closest, decode, form, internal, json_schema, key, nearest, required
from envbuild.base.toml.document import (
    Document,
    Keys,
    list_at,
    parse_toml,
    read,
    table_at,
    table_text,
    toml_key,
    toml_pairs,
    toml_value,
    value_at,
)

__all__ = [
    "Document",
    "Keys",
    "Problem",
    "closest",
    "decode",
    "form",
    "internal",
    "json_schema",
    "key",
    "list_at",
    "nearest",
    "parse_toml",
    "read",
    "required",
    "table_at",
    "table_text",
    "toml_key",
    "toml_pairs",
    "toml_value",
    "value_at",
]
