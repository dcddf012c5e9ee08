"""A parsed TOML file and the positions of its keys."""

from __future__ import annotations

import dataclasses
import re
import tomllib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from envbuild.errors import EnvbuildError, RecipeError
from envbuild.toml.scanner import Keys, Scanner


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
        offset = self._offsets[path] if path else 0
        return self.text.count("\n", 0, offset) + 1, offset - self.text.rfind("\n", 0, offset)

    def where(self, *keys: str | int) -> str:
        """Return the position as `FILE:LINE:COL`."""
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
    except ValueError as problem:  # for example an integer with thousands of digits
        raise error(f"{path}: {problem}") from None


def _syntax_error(path: Path, text: str, message: str) -> str:
    """Return tomllib's message with the position in front, where editors expect it, instead of at the end."""
    found = re.fullmatch(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", message, re.S)
    if found is None:
        return f"{path}: {message}"
    if found[2] is None:
        end = len(text.rstrip("\n"))
        line, column = text.count("\n", 0, end) + 1, end - text.rfind("\n", 0, end)
        return f"{path}:{line}:{column}: {found[1]} at the end of the file"
    return f"{path}:{found[2]}:{found[3]}: {found[1]}"
