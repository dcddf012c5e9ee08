"""JSON Schema (draft 2020-12) of a dataclass that TOML is decoded into."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from envbuild.toml.decode import KINDS, choices_of, hints_of, is_required, shape_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


def json_schema(cls: type[DataclassInstance], *, id: str, title: str) -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) of the files that `decode` turns into `cls`.

    JSON Schema cannot express `check` functions, so it accepts more than `decode` does.
    """
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": id, "title": title}
    return {**head, **_schema(cls, {})}


def _schema(hint: Any, rules: Mapping[str, Any]) -> dict[str, Any]:
    base, inner = shape_of(hint)
    if dataclasses.is_dataclass(base):
        fields, hints = dataclasses.fields(base), hints_of(base)  # type: ignore[arg-type]
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [field.name for field in fields if is_required(field)],
            "properties": {field.name: _property(hints[field.name], field) for field in fields},
        }
    if base is tuple:
        least = {"minItems": rules["min_items"]} if "min_items" in rules else {}
        return {"type": "array", "items": _schema(inner, rules), **least}
    if base is dict:
        least = {"minProperties": rules["min_items"]} if "min_items" in rules else {}
        return {"type": "object", "additionalProperties": _schema(inner, rules), **least}
    result: dict[str, Any] = {"type": KINDS[base][1]}
    if choices := inner or choices_of(rules):
        result["enum"] = list(choices)
    return result | {rule: rules[rule] for rule in ("pattern", "minimum") if rule in rules}


def _property(hint: Any, field: dataclasses.Field[Any]) -> dict[str, Any]:
    result = _schema(hint, field.metadata)
    if "doc" in field.metadata:
        result["description"] = field.metadata["doc"]
    if isinstance(field.default, str | bool | int | float | tuple):
        result["default"] = field.default
    if "example" in field.metadata:
        result["examples"] = [field.metadata["example"]]
    return result
