"""A step of `tests/gpu/run`, and how it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .machine import Context

# What a step saw, in words and in figures.
Seen = tuple[str, dict[str, Any]]


class Skipped(Exception):
    """The step does not apply; the text is the reason."""


class Unexpected(Exception):
    """The machine did something else than the step expects: the text says what, `evidence` has the figures."""

    def __init__(self, text: str, evidence: dict[str, Any] | None = None) -> None:
        super().__init__(text)
        self.evidence = evidence or {}


@dataclass(frozen=True)
class Step:
    """A step: what it does, what it expects, and the most seconds that it may take.

    `run` returns what it saw. It raises Skipped if the step does not apply, Unexpected if something else happened.
    """

    name: str
    run: Callable[[Context], Seen]
    seconds: int
    does: str
    expects: str
    cuda_only: bool = False
