"""Many small cases that are one test: pytest takes milliseconds for each of its own, mostly more than the case."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def each_case(
    names: str | Sequence[str], cases: Iterable[Any], ids: Callable[[Any], str] = repr
) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Return a decorator as pytest.mark.parametrize, for a test that tries all cases and names those that fail."""
    parameters = [one.strip() for one in names.split(",")] if isinstance(names, str) else list(names)
    rows = list(cases)

    def decorate(test: Callable[..., None]) -> Callable[[], None]:
        def run() -> None:
            failures = {}
            for row in rows:
                values = (row,) if len(parameters) == 1 else row
                try:
                    test(**dict(zip(parameters, values, strict=True)))
                except (Exception, pytest.fail.Exception) as failure:  # noqa: BLE001 - it is raised below
                    failures[ids(row)] = failure
            if failures:
                text = "\n\n".join(f"{case}\n{type(one).__name__}: {one}" for case, one in failures.items())
                first = next(iter(failures.values()))
                raise AssertionError(f"{len(failures)} of {len(rows)} cases fail:\n{text}") from first

        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(run, name, getattr(test, name))
        return run

    return decorate
