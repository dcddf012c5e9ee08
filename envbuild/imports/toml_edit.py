"""Edits of a TOML text that preserve the comments, order and layout of everything else.

tomlkit edits values and arrays. New keys and removed tables are edits of the text, because tomlkit assigns a comment
above a header to the preceding table.
"""

from __future__ import annotations

import codecs
import copy
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import tomlkit

from envbuild.base.atomic import write_beside
from envbuild.base.errors import UsageError
from envbuild.base.toml import Keys, Scanner, parse_toml, read, table_text, value_at


def set_value(text: str, keys: Keys, value: Any) -> str:
    """Return `text` with `value` at `keys`; missing tables are added, and index len(array) appends to an array.

    Raises ValueError if the layout of `text` does not allow the edit.
    """
    expected = parse_toml(text)
    _put(expected, keys, copy.deepcopy(value))
    return _checked(_set(text, keys, value), expected)


def delete_value(text: str, keys: Keys) -> str:
    """Return `text` without the value, array element or table at `keys`, and its comment. Raises ValueError."""
    expected = parse_toml(text)
    del _at(expected, keys[:-1])[keys[-1]]
    scanner = Scanner(text)
    if keys not in scanner.headers:
        document = tomlkit.parse(text)
        del _at(document, keys[:-1])[keys[-1]]
        return _checked(document.as_string(), expected)
    above = keys[:-1]
    while above and above not in scanner.ends and not _at(expected, above):  # [image], of which there was [image.env]
        del _at(expected, above[:-1])[above[-1]]
        above = above[:-1]
    for table in [header for header in reversed(scanner.headers) if header[: len(keys)] == keys]:
        start, end = scanner.headers[table], _line_end(text, scanner.ends[table])
        text = text[:start] + re.sub(r"\A(?:[ \t]*\n)+", "", text[end:])
    return _checked(text.rstrip("\n") + "\n", expected)


def rewrite(path: Path, before: str, after: str) -> None:
    """Replace the text `before` of the file at `path` atomically; line ends and mode are preserved.

    Raises UsageError if the file was edited meanwhile, and OSError.
    """
    path = path.resolve()  # the file that a link names, not the link
    raw = path.read_bytes()
    if read(path).text != before:
        raise UsageError(f"{path} was changed by another program in the meantime", "run the command again")
    mark = codecs.BOM_UTF8.decode() if raw.startswith(codecs.BOM_UTF8) else ""
    text = after.replace("\n", "\r\n") if b"\r\n" in raw else after
    write_beside(path, mark + text, path.stat().st_mode & 0o777)


def _set(text: str, keys: Keys, value: Any) -> str:
    document, (*above, key) = tomlkit.parse(text), keys
    if isinstance(key, int):
        array = _at(document, above)
        if key == len(array):
            array.append(value)
        else:
            array[key] = value
        return document.as_string()
    scanner, data = Scanner(text), parse_toml(text)
    if value_at(data, *above) is None:
        parent = next(above[:end] for end in range(len(above), -1, -1) if value_at(data, *above[:end]) is not None)
        for name in reversed(above[len(parent) :]):
            value, key = {key: value}, name
        above = list(parent)
    table, entry = tuple(above), {str(key): value}
    if isinstance(value, dict) and key not in _at(data, above) and not _is_inline(table, scanner, data):
        return text.rstrip("\n") + "\n" + table_text(value, tuple(map(str, (*table, key))))
    if key in _at(data, above) or _is_inline(table, scanner, data):
        _at(document, above)[key] = value
        return document.as_string()
    if table and table not in scanner.ends:  # [image], of which there is [image.env] alone
        return text.rstrip("\n") + "\n" + table_text(entry, tuple(map(str, table)))
    end = _line_end(text, scanner.ends[table]) if table in scanner.ends else 0
    return text[:end] + ("" if text[:end].endswith("\n") or not end else "\n") + table_text(entry) + text[end:]


def _is_inline(table: Keys, scanner: Scanner, data: dict[str, Any]) -> bool:
    """Return whether the keys of `table` are in an inline table, or dotted keys of a table above it."""
    if not table or table in scanner.headers:
        return False
    # A table that only headers of others name, as [targets] by [targets.cpu-x86_64], can have them behind those.
    return bool(_at(data, table)) and not any(header[: len(table)] == table for header in scanner.headers)


def _line_end(text: str, at: int) -> int:
    position = text.find("\n", at)
    return len(text) if position < 0 else position + 1


def _at(value: Any, keys: Iterable[str | int]) -> Any:
    for key in keys:
        value = value[key]
    return value


def _put(data: Any, keys: Keys, value: Any) -> None:
    for key in keys[:-1]:
        data = data.setdefault(key, {}) if isinstance(data, dict) else data[key]
    if isinstance(data, list) and keys[-1] == len(data):
        data.append(value)
    else:
        data[keys[-1]] = value


def _checked(text: str, expected: dict[str, Any]) -> str:
    if parse_toml(text) != expected:
        raise ValueError("its layout cannot be edited")
    return text
