"""Strict TOML: files decoded into frozen dataclasses, every mistake reported with its line.

`read` parses a file, `decode` turns it into an instance of a dataclass, `json_schema` describes
that dataclass to editors. A field may be a str, bool, int, float, Literal, another dataclass,
`tuple[X, ...]`, `dict[str, X]` or `X | None` (which TOML expresses by leaving the key out), and
its `field(metadata=...)` may hold:

    doc        what the key means           example    a good value, for the schema
    pattern    regular expression           choices    the accepted values
    minimum    least number                 check      function: value -> what is wrong, or None
    min_items  least number of entries      key_check  the same, for the keys of a dict

pattern, choices, minimum and check apply to each entry of a tuple or a dict.
"""

from __future__ import annotations

import dataclasses
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from envbuild.errors import EnvbuildError, RecipeError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Table = TypeVar("Table", bound=DataclassInstance)

Keys = tuple[str | int, ...]
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


@dataclasses.dataclass(frozen=True)
class Document:
    """A parsed TOML file: its `data`, and where in the file each key of it is written."""

    path: Path
    text: str = dataclasses.field(repr=False)
    data: dict[str, Any]

    @cached_property
    def _offsets(self) -> dict[Keys, int]:
        return _Scanner(self.text).offsets

    def position(self, keys: Sequence[str | int]) -> tuple[int, int]:
        """The 1-based line and column of a key (str) or array element (int), else of its parent."""
        path = tuple(keys)
        while path and path not in self._offsets:
            path = path[:-1]
        offset = self._offsets[path] if path else 0
        return self.text.count("\n", 0, offset) + 1, offset - self.text.rfind("\n", 0, offset)

    def where(self, *keys: str | int) -> str:
        """The same position as `FILE:LINE:COL`."""
        line, column = self.position(keys)
        return f"{self.path}:{line}:{column}"


def read(path: Path, error: type[EnvbuildError] = RecipeError) -> Document:
    """Parse the TOML file at `path`.

    Raises `error` when the file cannot be read, is not UTF-8, or is not TOML.
    """
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except IsADirectoryError:
        raise error(f"{path}: a directory, where a TOML file is expected") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    try:
        text = raw.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as problem:
        good = raw[: problem.start].decode("utf-8-sig").rpartition("\n")
        place = f"{path}:{good[0].count(chr(10)) + bool(good[1]) + 1}:{len(good[2]) + 1}"
        raise error(f"{place}: byte 0x{raw[problem.start]:02x} is not UTF-8") from None
    try:
        return Document(path, text, tomllib.loads(text))
    except tomllib.TOMLDecodeError as problem:
        raise error(_syntax_error(path, text, str(problem))) from None
    except RecursionError:
        raise error(f"{path}: arrays or tables are nested too deeply") from None
    except ValueError as problem:  # an integer with thousands of digits
        raise error(f"{path}: {problem}") from None


def _syntax_error(path: Path, text: str, message: str) -> str:
    """tomllib puts the position at the end of its message; editors want it in front."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.S)
    if found is None:
        return f"{path}: {message}"
    if found[2] is None:
        end = len(text.rstrip("\n"))
        line, column = text.count("\n", 0, end) + 1, end - text.rfind("\n", 0, end)
        return f"{path}:{line}:{column}: {found[1]} at the end of the file"
    return f"{path}:{found[2]}:{found[3]}: {found[1]}"


class _Scanner:
    """Finds the offset of every key and array element of a text that tomllib has accepted.

    tomllib does not tell where a value came from, and nor does any TOML package on the index.
    Since the text is known to be valid, tokens and nesting are all there is to recognise.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self.offsets: dict[Keys, int] = {}
        self.last: dict[Keys, int] = {}  # array of tables -> index of its newest element
        self.blank = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
        self.key = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
        self.scalar = re.compile(
            r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\]|\\.)*"|\'[^\']*\'|[^],}#\n]+',
            re.S,
        )
        table: Keys = ()
        self.take("")
        while self.at < len(text):
            if text[self.at] == "[":
                table = self.header()
            else:
                self.pair(table)

    def take(self, token: str) -> bool:
        """Step over `token` and what is blank around it, if it comes next."""
        self.at = self.match(self.blank).end()
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        self.at = self.match(self.blank).end()
        return True

    def match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        found = pattern.match(self.text, self.at)
        assert found is not None, f"scanner lost at offset {self.at}"
        return found

    def header(self) -> Keys:
        start = self.at
        if not self.text.startswith("[[", start):
            self.take("[")
            table = self.dotted(())
            self.take("]")
            return table
        self.take("[[")
        array = self.dotted(())
        self.take("]]")
        self.last[array] = self.last.get(array, -1) + 1
        element = (*array, self.last[array])
        self.offsets[element] = start
        return element

    def pair(self, table: Keys) -> None:
        keys = self.dotted(table)
        self.take("=")
        self.value(keys)

    def dotted(self, base: Keys) -> Keys:
        while True:
            if base in self.last:
                base = (*base, self.last[base])
            found = self.match(self.key)
            name = found[0]
            if name[0] in "\"'":
                name = tomllib.loads(f"key = {name}")["key"]
            base = (*base, name)
            self.offsets.setdefault(base, self.at)
            self.at = found.end()
            if not self.take("."):
                return base

    def value(self, keys: Keys) -> None:
        if self.take("["):
            index = 0
            while not self.take("]"):
                self.offsets[(*keys, index)] = self.at
                self.value((*keys, index))
                self.take(",")
                index += 1
        elif self.take("{"):
            while not self.take("}"):
                self.pair(keys)
                self.take(",")
        else:
            self.at = self.match(self.scalar).end()
            self.take("")


def decode(
    document: Document,
    cls: type[Table],
    *,
    check: Callable[[Document], Iterable[Problem]] | None = None,
    error: type[EnvbuildError] = RecipeError,
) -> Table:
    """Turn the document into an instance of the dataclass `cls`.

    `check` may find mistakes that concern several keys at once; it sees data that has not been
    validated. Raises `error` whose message has one `FILE:LINE:COL: ...` line for each mistake.
    """
    problems: list[Problem] = []
    result: Table = _decode(cls, {}, document.data, (), problems)
    problems.extend(check(document) if check else ())
    if not problems:
        return result
    lines = {
        (document.position(keys), f"{document.where(*keys)}: {what}") for keys, what in problems
    }
    raise error("\n".join(text for _, text in sorted(lines)))


def _decode(
    hint: Any, rules: Mapping[str, Any], value: Any, keys: Keys, problems: list[Problem]
) -> Any:
    """`value` as the type `hint` wants it; what is wrong with it goes to `problems`."""
    base, inner = _shape(hint)
    kind = {tuple: list}.get(base, dict if dataclasses.is_dataclass(base) else base)
    given = type(value)  # exact: a bool is an int to isinstance
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
    for key in value if "key_check" in rules else ():
        _add(problems, (*keys, key), rules["key_check"](key))
    return {key: _decode(inner, rules, v, (*keys, key), problems) for key, v in value.items()}


def _decode_table(cls: Any, value: dict[str, Any], keys: Keys, problems: list[Problem]) -> Any:
    """An instance of the dataclass `cls`, or None when there are problems."""
    fields, hints = {field.name: field for field in dataclasses.fields(cls)}, _hints(cls)
    for key in value.keys() - fields.keys():
        place = f"in [{_dotted(keys)}]" if keys else "at the top level"
        problems.append(((*keys, key), f"unknown key {key!r} {place}{nearest(key, fields)}"))
    found: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            found[name] = _decode(hints[name], field.metadata, value[name], (*keys, name), problems)
        elif _required(field):
            problems.append((keys, f"missing key {_label((*keys, name))}"))
    return None if problems else cls(**found)


def _scalar_problem(base: type, rules: Mapping[str, Any], value: Any) -> str | None:
    if base is float and not math.isfinite(value):
        return f"expected a finite number, got {value}"
    if "choices" in rules and value not in rules["choices"]:
        return f"{value!r} is not accepted{nearest(value, rules['choices'])}"
    if "minimum" in rules and value < rules["minimum"]:
        return f"expected at least {rules['minimum']}, got {value}"
    # Before the pattern, whose message repeats the value: a check may know that it is secret.
    found: str | None = rules["check"](value) if "check" in rules else None
    # fullmatch, since "$" alone lets a final newline pass.
    if found is None and "pattern" in rules and not re.fullmatch(rules["pattern"], value):
        return f"{value!r} does not match {rules['pattern']}"
    return found


def _add(problems: list[Problem], keys: Keys, what: str | None) -> None:
    if what is not None:
        problems.append((keys, f"{_label(keys)}: {what}"))


def _shape(hint: Any) -> tuple[Any, Any]:
    """A type hint as its base (scalar, dataclass, tuple or dict) and its entry type or choices."""
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
    if base is tuple:
        return f"an array of {_expected(inner).split(' ', 1)[1]}s"
    return _KINDS.get(base, ("a table",))[0]


@lru_cache(maxsize=64)
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _label(keys: Keys) -> str:
    """How a message names a key: `'nodes' in [verify]`, `'requirements[2]'`."""
    cut = len(keys)
    while cut > 1 and isinstance(keys[cut - 1], int):
        cut -= 1
    name = str(keys[cut - 1]) + "".join(f"[{index}]" for index in keys[cut:])
    return f"{name!r} in [{_dotted(keys[: cut - 1])}]" if cut > 1 else repr(name)


def _dotted(keys: Keys) -> str:
    return ".".join(
        str(key) if re.fullmatch(r"[A-Za-z0-9_-]+", str(key)) else repr(key) for key in keys
    )


def closest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `word` most likely means, if any is like it."""
    import difflib  # only a mistake pays for it

    return next(iter(difflib.get_close_matches(word, list(known), n=1)), None)


def nearest(word: Any, accepted: Iterable[Any]) -> str:
    """`; did you mean 'x'? Accepted: x, y`: the tail of a message about an unknown `word`."""
    known = [str(name) for name in accepted]
    meant, names = closest(str(word), known), ", ".join(known)
    return f"; did you mean {meant!r}? Accepted: {names}" if meant else f"; accepted: {names}"


def json_schema(cls: type[DataclassInstance], *, id: str, title: str) -> dict[str, Any]:
    """A JSON Schema (draft 2020-12) of the files that `decode` turns into `cls`.

    A `check` function cannot be expressed in it, so it accepts more than `decode` does.
    """
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": id, "title": title}
    return {**head, **_schema(cls, {})}


def _schema(hint: Any, rules: Mapping[str, Any]) -> dict[str, Any]:
    base, inner = _shape(hint)
    if dataclasses.is_dataclass(base):
        fields, hints = dataclasses.fields(base), _hints(base)  # type: ignore[arg-type]
        return {
            "type": "object",
            "additionalProperties": False,
            "required": [field.name for field in fields if _required(field)],
            "properties": {field.name: _property(hints[field.name], field) for field in fields},
        }
    if base is tuple:
        least = {"minItems": rules["min_items"]} if "min_items" in rules else {}
        return {"type": "array", "items": _schema(inner, rules), **least}
    if base is dict:
        least = {"minProperties": rules["min_items"]} if "min_items" in rules else {}
        return {"type": "object", "additionalProperties": _schema(inner, rules), **least}
    result: dict[str, Any] = {"type": _KINDS[base][1]}
    if inner or "choices" in rules:
        result["enum"] = list(inner or rules["choices"])
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
