"""Decoder of TOML data into frozen dataclasses, which reports every mistake with its position; their JSON Schema."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Literal,
    TypedDict,
    TypeVar,
    Union,
    Unpack,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from envbuild.base.errors import EnvbuildError, RecipeError
from envbuild.base.toml.document import Document, Keys

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Table = TypeVar("Table", bound=DataclassInstance)


T = TypeVar("T")
Check = Callable[[Any], str | None]


class Rules(TypedDict, total=False):
    """Rules of a key besides its meaning: see the package's docstring."""

    name: str
    pattern: str
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]]
    minimum: int
    min_items: int
    names: bool
    check: Check
    key_check: Check
    entry_check: Callable[[str, Any], str | None]
    example: Any


def key(default: T, doc: str, **rules: Unpack[Rules]) -> T:
    """Return the dataclass field of a key with this default (a table or a dict: an empty one), meaning and rules."""
    # Dicts are mutable, and tables may hold dicts: each instance makes its own.
    made = isinstance(default, dict) or dataclasses.is_dataclass(default)
    how: dict[str, Any] = {"default_factory": type(default)} if made else {"default": default}
    return cast(T, dataclasses.field(**how, metadata={"doc": doc, **rules}))


def required(doc: str, **rules: Unpack[Rules]) -> Any:
    """Return the dataclass field of a key that has to be there, with its meaning and rules."""
    return dataclasses.field(metadata={"doc": doc, **rules})


def internal(default: T) -> T:
    """Return the dataclass field of a value that no file may set."""
    return dataclasses.field(default=default, metadata={"internal": True})


def form(pattern: str, what: str) -> Check:
    """Return a check for values that match all of `pattern`; its message is the value and `what`."""
    return lambda value: None if re.fullmatch(pattern, value) else f"{value!r} {what}"


Problem = tuple[Keys, str]

# The name of each TOML type, and of its JSON Schema counterpart.
_KINDS: dict[type, tuple[str, str]] = {
    bool: ("a boolean", "boolean"),
    int: ("an integer", "integer"),
    float: ("a number", "number"),
    str: ("a string", "string"),
    list: ("an array", "array"),
    dict: ("a table", "object"),
}
_hints = lru_cache(maxsize=64)(get_type_hints)
_CONTAINERS = {tuple: ("array", "items", "minItems"), dict: ("object", "additionalProperties", "minProperties")}


def decode(
    document: Document,
    cls: type[Table],
    *,
    check: Callable[[Document], Iterable[Problem]] | None = None,
    error: type[EnvbuildError] = RecipeError,
) -> Table:
    """Turn the document into an instance of the dataclass `cls`.

    `check` may find mistakes that concern several keys at once; it gets unvalidated data. Raises `error` whose
    message has one `FILE:LINE:COL: ...` line for each mistake.
    """
    problems: list[Problem] = []
    result: Table = _decode(cls, {}, document.data, (), problems)
    problems.extend(check(document) if check else ())
    if not problems:
        return result
    lines = {(document.position(keys), f"{document.where(*keys)}: {what}") for keys, what in problems}
    raise error("\n".join(text for _, text in sorted(lines)))


def _decode(hint: Any, rules: Mapping[str, Any], value: Any, keys: Keys, problems: list[Problem]) -> Any:
    """Return `value` decoded as the type `hint`; append its mistakes to `problems`."""
    base, inner = _shape(hint)
    kind = {tuple: list}.get(base, dict if dataclasses.is_dataclass(base) else base)
    given = type(value)  # exact: a bool is an int to isinstance
    if given is list and rules.get("names"):
        return _decode_names(inner, rules, value, keys, problems)
    if given is int and kind is float and value.bit_length() <= 64:
        value = float(value)
    elif given is not kind:
        got = _KINDS.get(given, ("a date or time",))[0]
        _add(problems, keys, f"expected {_expected(hint)}, got {got}")
        return None
    if dataclasses.is_dataclass(base):
        return _decode_table(base, value, keys, problems)
    if base not in (tuple, dict):
        rules = {**rules, "choices": inner} if inner else rules
        _add(problems, keys, _scalar_problem(base, rules, value))
        return value
    if len(value) < rules.get("min_items", 0):
        _add(problems, keys, f"expected at least {rules['min_items']}, got {len(value)}")
    if base is tuple:
        return tuple(_decode(inner, rules, v, (*keys, i), problems) for i, v in enumerate(value))
    for key, v in value.items():
        if "key_check" in rules:
            _add(problems, (*keys, key), rules["key_check"](key))
        if "entry_check" in rules and type(v) is inner:
            _add(problems, (*keys, key), rules["entry_check"](key, v))
    return {key: _decode(inner, rules, v, (*keys, key), problems) for key, v in value.items()}


def _decode_names(inner: Any, rules: Mapping[str, Any], value: list[Any], keys: Keys, problems: list[Problem]) -> Any:
    """Return the short form of a dict, a list of its keys, as a dict of empty tables."""
    names = _decode(tuple[str, ...], {"check": rules.get("key_check", lambda _: None)}, value, keys, problems)
    for number, name in enumerate(names):
        if name in names[:number]:
            _add(problems, (*keys, number), f"{name!r} is there twice")
    return {name: _decode(inner, {}, {}, (*keys, name), problems) for name in names}


def _decode_table(cls: Any, value: dict[str, Any], keys: Keys, problems: list[Problem]) -> Any:
    """Return an instance of the dataclass `cls`, or None when there are problems."""
    fields, hints = _fields(cls), _hints(cls)
    for key in value.keys() - fields.keys():
        place = f"in [{_dotted(keys)}]" if keys else "at the top level"
        problems.append(((*keys, key), f"unknown key {key!r} {place}{nearest(key, fields)}"))
    found: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            found[field.name] = _decode(hints[field.name], field.metadata, value[name], (*keys, name), problems)
        elif _is_required(field):
            problems.append((keys, f"missing key {_label((*keys, name))}"))
    return None if problems else cls(**found)


def _fields(cls: Any) -> dict[str, dataclasses.Field[Any]]:
    """Return the fields of the dataclass `cls` that files may set, by the names of their keys."""
    fields = (field for field in dataclasses.fields(cls) if not field.metadata.get("internal"))
    return {field.metadata.get("name", field.name): field for field in fields}


def _scalar_problem(base: type, rules: Mapping[str, Any], value: Any) -> str | None:
    if base is float and not math.isfinite(value):
        return f"expected a finite number, got {value}"
    choices = _choices(rules)
    if choices and value not in choices:
        return f"{value!r} is not accepted{nearest(value, choices)}"
    if "minimum" in rules and value < rules["minimum"]:
        return f"expected at least {rules['minimum']}, got {value}"
    # Before the pattern, whose message repeats the value: a check may recognize a secret.
    found: str | None = rules["check"](value) if "check" in rules else None
    # fullmatch: "$" alone also matches before a final newline.
    if found is None and "pattern" in rules and not re.fullmatch(rules["pattern"], value):
        return f"{value!r} does not match {rules['pattern']}"
    return found


def _choices(rules: Mapping[str, Any]) -> tuple[Any, ...]:
    choices = rules.get("choices", ())
    return tuple(choices() if callable(choices) else choices)


def _add(problems: list[Problem], keys: Keys, what: str | None) -> None:
    if what is not None:
        problems.append((keys, f"{_label(keys)}: {what}"))


def _shape(hint: Any) -> tuple[Any, Any]:
    """Return the base (scalar, dataclass, tuple or dict) of a type hint, and its entry type or choices."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return _shape(next(arg for arg in args if arg is not type(None)))
    if origin is Literal:
        return type(args[0]), args
    if origin is tuple:
        return tuple, args[0]
    if origin is dict:
        return dict, args[1]
    return hint, None


def _expected(hint: Any) -> str:
    base, inner = _shape(hint)
    return f"an array of {_expected(inner).split(' ', 1)[1]}s" if base is tuple else _KINDS.get(base, _KINDS[dict])[0]


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _label(keys: Keys) -> str:
    """Return a key as messages spell it: `'nodes' in [verify]`, `'requirements[2]'`."""
    indexes = ""
    while len(keys) > 1 and isinstance(keys[-1], int):
        keys, indexes = keys[:-1], f"[{keys[-1]}]{indexes}"
    name = f"{keys[-1]}{indexes}"
    return f"{name!r} in [{_dotted(keys[:-1])}]" if len(keys) > 1 else repr(name)


def _dotted(keys: Keys) -> str:
    return ".".join(str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else repr(key) for key in keys)


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the entry of `known` that is most similar to `word`, or has it as a part, or None if there is none."""
    import difflib  # imported only when there is a mistake

    names = list(known)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.8)
    having = [name for name in names if word in re.split(r"[-_.]", name)]
    return next(iter((*near, *having, *difflib.get_close_matches(word, names, n=1))), None)


def nearest(word: Any, accepted: Iterable[Any]) -> str:
    """Return the tail of a message about an unknown `word`: `; did you mean 'x'? Accepted: x, y`."""
    known = [str(name) for name in accepted]
    meant, names = closest(str(word), known), ", ".join(known)
    return f"; did you mean {meant!r}? Accepted: {names}" if meant else f"; accepted: {names}"


def json_schema(cls: type[DataclassInstance], *, id: str, title: str) -> dict[str, Any]:
    """Return a JSON Schema (draft 2020-12) for `cls`. It has no `check` functions, so it accepts more than `decode`."""
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": id, "title": title}
    return {**head, **_schema(cls, {})}


def _schema(hint: Any, rules: Mapping[str, Any]) -> dict[str, Any]:
    base, inner = _shape(hint)
    if dataclasses.is_dataclass(base):
        fields, hints = _fields(base), _hints(base)  # type: ignore[arg-type]
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [name for name, field in fields.items() if _is_required(field)],
            "properties": {name: _property(hints[field.name], field) for name, field in fields.items()},
        }
    if base in (tuple, dict):
        kind, entries, least = _CONTAINERS[base]
        size = {least: rules["min_items"]} if "min_items" in rules else {}
        found = {"type": kind, entries: _schema(inner, rules), **size}
        return {"anyOf": [{"type": "array", "items": {"type": "string"}}, found]} if rules.get("names") else found
    result: dict[str, Any] = {"type": _KINDS[base][1]}
    if choices := inner or _choices(rules):
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
