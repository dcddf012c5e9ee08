"""Fields of dataclasses for the keys that a TOML file may leave out, and checks of their values."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import field, is_dataclass
from typing import Any, TypedDict, TypeVar, Unpack, cast

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
    made = isinstance(default, dict) or is_dataclass(default)
    how: dict[str, Any] = {"default_factory": type(default)} if made else {"default": default}
    return cast(T, field(**how, metadata={"doc": doc, **rules}))


def required(doc: str, **rules: Unpack[Rules]) -> Any:
    """Return the dataclass field of a key that has to be there, with its meaning and rules."""
    return field(metadata={"doc": doc, **rules})


def form(pattern: str, what: str) -> Check:
    """Return a check for values that match all of `pattern`; its message is the value and `what`."""
    return lambda value: None if re.fullmatch(pattern, value) else f"{value!r} {what}"
