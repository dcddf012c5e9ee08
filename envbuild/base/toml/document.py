"""A parsed TOML file with the positions of its keys, and values as TOML."""

from __future__ import annotations

import codecs
import dataclasses
import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from envbuild.base.errors import EnvbuildError, RecipeError
from envbuild.base.files import read_small

Keys = tuple[str | int, ...]
_BLANK = re.compile(r"(?:[ \t\n]|#[^\n]*)*")
_KEY = re.compile(r"""[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*'""")
# tomllib keeps every prefix of a key: one of 20 kB takes 400 MB.
_LONG_KEY = re.compile(r"""(?<![\w"'-])(?:(?:[\w-]++|"[^"\n]*"|'[^'\n]*')[ \t]*+\.[ \t]*+){64}""")
_SCALAR = re.compile(r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\]|\\.)*"|\'[^\']*\'|[^],}#\n]+', re.S)


@dataclasses.dataclass(frozen=True)
class Document:
    """A parsed TOML file: its `data`, and the position of each key in the file."""

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


def value_at(value: Any, *keys: str) -> Any:
    """Return the value below `keys` in data that nobody checked, None if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def table_at(value: Any, *keys: str) -> dict[str, Any]:
    """Return the table below `keys` in data that nobody checked, {} if there is none."""
    found = value_at(value, *keys)
    return found if isinstance(found, dict) else {}


def list_at(value: Any, *keys: str) -> list[Any]:
    """Return the list below `keys` in data that nobody checked, [] if there is none."""
    found = value_at(value, *keys)
    return found if isinstance(found, list) else []


def _syntax_error(path: Path, text: str, message: str) -> str:
    """Return tomllib's message with the position in front, where editors expect it, instead of at the end."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.S)
    if found is None:
        return f"{path}: {message}"
    if found[2] is None:
        line, column = _line_column(text, len(text.rstrip("\n")))
        return f"{path}:{line}:{column}: {found[1]} at the end of the file"
    meant = ""
    if found[1] == r"Illegal character '\n'":
        meant = ": a quote is missing in this line"
    elif found[1].startswith(("Unclosed array", "Unclosed inline table")):
        # tomllib stopped at a character that is neither a comma nor the end: mostly the next value.
        row = text.split("\n")[int(found[2]) - 1]
        value = re.compile(r""""[^"]*"|'[^']*'|[\w.+-]+|[{\[]""").match(row, int(found[3]) - 1)
        end = "]" if "array" in found[1] else "}"
        if value and found[3] == "1":
            meant = f": {end} is missing before this line"
        elif value:
            meant = f"; is a comma missing before {value[0]}?"
    return f"{path}:{found[2]}:{found[3]}: {found[1]}{meant}"


def _line_column(text: str, offset: int) -> tuple[int, int]:
    return text.count("\n", 0, offset) + 1, offset - text.rfind("\n", 0, offset)


class Scanner:
    """Scanner for the offset of every key and array element in a text that tomllib has accepted.

    tomllib does not report the positions of values, and no TOML package on PyPI does. The text is known to be
    valid, so only tokens and nesting need to be recognized. `headers` are the offsets of the tables' headers; `ends`
    has the end of the value of each key, and that of the last value, else the header, of each table.
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
        """Skip what `pattern` matches, and return it."""
        found = pattern.match(self.text, self.at)
        assert found is not None, f"scanner lost at offset {self.at}"
        self.at = found.end()
        return found[0]

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
