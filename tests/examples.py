"""The number of examples of a property test that names its own."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import settings

# `tests/run --fast` tries a quarter of the examples.
SHARE = min(1.0, settings.default.max_examples / 100) if settings.default else 1.0


def examples(count: int, **options: Any) -> settings:
    """Return hypothesis' settings with `count` examples, a quarter of them in `tests/run --fast`, and its `options`."""
    return settings(max_examples=math.ceil(count * SHARE), **options)
