"""Fields of dataclasses for the keys that a TOML file may leave out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, TypedDict, TypeVar, Unpack, cast

T = TypeVar("T")
Check = Callable[[Any], str | None]


class Rules(TypedDict, total=False):
    """Rules of a key besides its meaning: see the package's docstring."""

    pattern: str
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]]
    minimum: int
    min_items: int
    check: Check
    key_check: Check
    entry_check: Callable[[str, Any], str | None]
    example: Any


def key(default: T, doc: str, **rules: Unpack[Rules]) -> T:
    """Return the dataclass field of a key with this default, meaning and rules."""
    # A dict is mutable: each instance needs its own.
    how: dict[str, Any] = {"default_factory": dict} if isinstance(default, dict) else {"default": default}
    return cast(T, field(**how, metadata={"doc": doc, **rules}))
