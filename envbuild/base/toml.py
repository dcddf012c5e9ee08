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

pattern, choices, minimum and check apply to each entry of a tuple or a dict.
"""

from __future__ import annotations

import codecs
import dataclasses
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
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
from envbuild.base.files import read_small

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    Table = TypeVar("Table", bound=DataclassInstance)

Keys = tuple[str | int, ...]
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
# tomllib keeps every prefix of a key: one of 20 kB takes 400 MB.
_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:(?:[\w-]++|"[^"\n]*"|'[^'\n]*')[ \t]*+\.[ \t]*+){64}""")
_SCALAR = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\]|\\.)*"|\'[^\']*\'|[^],}#\n]+', re.S)


@dataclasses.dataclass(frozen=True)
class Document:
    """Parsed TOML file: its `data`, and the position of each key in the file."""

    path: Path
    text: str = dataclasses.field(repr=False)
    data: dict[str, Any]

    @cached_property
    def _offsets(self) -> dict[Keys, int]:
        return Scanner(self.text).offsets

    def position(self, keys: Sequence[str | int]) -> tuple[int, int]:
        """Return the 1-based line and column of a key (str) or array element (int), else of its parent."""
        path = tuple(keys)
        while path and path not in self._offsets:
            path = path[:-1]
        return _line_column(self.text, self._offsets[path] if path else 0)

    def where(self, *keys: str | int) -> str:
        """Return the position as `FILE:LINE:COL`."""
        line, column = self.position(keys)
        return f"{self.path}:{line}:{column}"


def read(path: Path, error: type[EnvbuildError] = RecipeError) -> Document:
    """Parse the TOML file at `path`. Raises `error` when it cannot be read, is not UTF-8, or is not TOML."""
    try:
        raw = read_small(path).removeprefix(codecs.BOM_UTF8)
    except FileNotFoundError:
        raise error(f"{path}: no such file") from None
    except IsADirectoryError:
        raise error(f"{path}: a directory, where a TOML file is expected") from None
    except OSError as problem:
        raise error(f"{path}: cannot be read: {problem.strerror}") from None
    try:
        text = raw.decode().replace("\r\n", "\n")
    except UnicodeDecodeError as problem:
        good = raw[: problem.start].decode()
        line, column = _line_column(good, len(good))
        raise error(f"{path}:{line}:{column}: byte 0x{raw[problem.start]:02x} is not UTF-8") from None
    try:
        return Document(path, text, parse_toml(text))
    except tomllib.TOMLDecodeError as problem:
        raise error(_syntax_error(path, text, str(problem))) from None
    except ValueError as problem:  # for example an integer with thousands of digits
        raise error(f"{path}: {problem}") from None


def parse_toml(text: str) -> dict[str, Any]:
    """Return the data in `text`. Raises ValueError, for a mistake in TOML's syntax tomllib's own."""
    if _LONG_KEY.search(text):
        raise ValueError("a key of more than 64 parts")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("arrays or tables are nested too deeply") from None


def value_at(value: Any, *keys: str | int) -> Any:
    """Return the value at `keys` in unvalidated data, None if it is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def table_at(value: Any, *keys: str | int) -> dict[str, Any]:
    """Return the table at `keys` in unvalidated data, {} if there is none."""
    table = value_at(value, *keys)
    return table if isinstance(table, dict) else {}


def list_at(value: Any, *keys: str | int) -> list[Any]:
    """Return the list at `keys` in unvalidated data, [] if there is none."""
    values = value_at(value, *keys)
    return values if isinstance(values, list) else []


def _syntax_error(path: Path, text: str, message: str) -> str:
    """Return tomllib's message with the position at the front, as editors expect, instead of at the end."""
    match = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.S)
    if match is None:
        return f"{path}: {message}"
    if match[2] is None:
        line, column = _line_column(text, len(text.rstrip("\n")))
        return f"{path}:{line}:{column}: {match[1]} at the end of the file"
    meant = ""
    if match[1] == r"Illegal character '\n'":
        meant = ": a quote is missing in this line"
    elif match[1].startswith(("Unclosed array", "Unclosed inline table")):
        # tomllib stopped at a character that is neither a comma nor the end: mostly the next value.
        row = text.split("\n")[int(match[2]) - 1]
        value = re.compile(r""""[^"]*"|'[^']*'|[\w.+-]+|[{\[]""").match(row, int(match[3]) - 1)
        end = "]" if "array" in match[1] else "}"
        if value and match[3] == "1":
            meant = f": {end} is missing before this line"
        elif value:
            meant = f"; is a comma missing before {value[0]}?"
    return f"{path}:{match[2]}:{match[3]}: {match[1]}{meant}"


def _line_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


class Scanner:
    """Scanner for the offset of every key and array element in a text that tomllib has accepted.

    tomllib does not report the positions of values, and no TOML package on PyPI does. The text is known to be
    valid, so only tokens and nesting need to be recognized. `headers` are the offsets of the tables' headers; `ends`
    maps each key to the end of its value, and each table to the end of its last value, else of its header.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = self.end = 0
        self.offsets: dict[Keys, int] = {}
        self.headers: dict[Keys, int] = {}
        self.ends: dict[Keys, int] = {}
        self.last: dict[Keys, int] = {}  # array of tables -> index of its newest element
        table: Keys = ()
        self.take("")
        while self.at < len(text):
            if text[self.at] == "[":
                table = self.header()
            else:
                self.pair(table)

    def match(self, pattern: re.Pattern[str]) -> str:
        """Skip the text that `pattern` matches, and return it."""
        match = pattern.match(self.text, self.at)
        assert match is not None, f"scanner lost at offset {self.at}"
        self.at = match.end()
        return match[0]

    def take(self, token: str) -> bool:
        """Skip `token` and the blanks around it if it comes next; return whether it did."""
        self.match(_BLANK)
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        if token:
            self.end = self.at
        self.match(_BLANK)
        return True

    def header(self) -> Keys:
        start = self.at
        if self.take("[["):
            array = self.dotted(())
            self.take("]]")
            self.last[array] = self.last.get(array, -1) + 1
            table = (*array, self.last[array])
            self.offsets[table] = start
        else:
            self.take("[")
            table = self.dotted(())
            self.take("]")
        self.headers[table], self.ends[table] = start, self.end
        return table

    def pair(self, table: Keys) -> None:
        keys = self.dotted(table)
        self.take("=")
        self.value(keys)
        self.ends[keys] = self.ends[table] = self.end

    def dotted(self, base: Keys) -> Keys:
        while True:
            if base in self.last:
                base = (*base, self.last[base])
            start, name = self.at, self.match(_KEY)
            base = (*base, tomllib.loads(f"key = {name}")["key"] if name[0] in "\"'" else name)
            self.offsets.setdefault(base, start)
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
            self.match(_SCALAR)
            self.end = self.at
            self.take("")


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
    """Return `table` and its inner tables as TOML, with the header `[KEYS]`."""
    only_tables = table and all(isinstance(item, Mapping) for item in table.values())
    lines = [f"\n[{'.'.join(map(toml_key, keys))}]"] if keys and not only_tables else []
    lines += [f"{toml_key(key)} = {_lines(item)}" for key, item in table.items() if not isinstance(item, Mapping)]
    inner = [table_text(item, (*keys, key)) for key, item in table.items() if isinstance(item, Mapping)]
    return "".join(f"{line}\n" for line in lines) + "".join(inner)


def _lines(value: object) -> str:
    short = toml_value(value)
    if not isinstance(value, list) or len(short) < _LINE:
        return short
    return "[\n" + "".join(f"  {toml_value(item)},\n" for item in value) + "]"


T = TypeVar("T")
Check = Callable[[Any], str | None]


class Rules(TypedDict, total=False):
    """Rules of a key besides its meaning: see the module's docstring."""

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
    """Return the dataclass field of a key with a default (for a table or dict: an empty one), meaning and rules."""
    # Dicts are mutable, and tables may hold dicts: each instance makes its own.
    made = isinstance(default, dict) or dataclasses.is_dataclass(default)
    how: dict[str, Any] = {"default_factory": type(default)} if made else {"default": default}
    return cast(T, dataclasses.field(**how, metadata={"doc": doc, **rules}))


def required(doc: str, **rules: Unpack[Rules]) -> Any:
    """Return the dataclass field of a required key, with its meaning and rules."""
    return dataclasses.field(metadata={"doc": doc, **rules})


def internal(default: T) -> T:
    """Return the dataclass field of a value that no file may set."""
    return dataclasses.field(default=default, metadata={"internal": True})


def form(pattern: str, problem: str) -> Check:
    """Return a check that values fully match `pattern`; its message is the value and `problem`."""
    return lambda value: None if re.fullmatch(pattern, value) else f"{value!r} {problem}"


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
    lines = {(document.position(keys), f"{document.where(*keys)}: {problem}") for keys, problem in problems}
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
    fields_read: dict[str, Any] = {}
    for name, field in fields.items():
        if name in value:
            fields_read[field.name] = _decode(hints[field.name], field.metadata, value[name], (*keys, name), problems)
        elif _is_required(field):
            problems.append((keys, f"missing key {_label((*keys, name))}"))
    return None if problems else cls(**fields_read)


@lru_cache(maxsize=128)
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
    problem: str | None = rules["check"](value) if "check" in rules else None
    # fullmatch: "$" alone also matches before a final newline.
    if problem is None and "pattern" in rules and not re.fullmatch(rules["pattern"], value):
        return f"{value!r} does not match {rules['pattern']}"
    return problem


def _choices(rules: Mapping[str, Any]) -> tuple[Any, ...]:
    choices = rules.get("choices", ())
    return tuple(choices() if callable(choices) else choices)


def _add(problems: list[Problem], keys: Keys, problem: str | None) -> None:
    if problem is not None:
        problems.append((keys, f"{_label(keys)}: {problem}"))


@lru_cache(maxsize=128)
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
    """Return the entry of `known` that is most similar to `word` or contains it, None if there is none."""
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
    """Return a JSON Schema (draft 2020-12) for `cls`. It omits `check` functions, so it accepts more than `decode`."""
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
        schema = {"type": kind, entries: _schema(inner, rules), **size}
        return {"anyOf": [{"type": "array", "items": {"type": "string"}}, schema]} if rules.get("names") else schema
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
