"""Golden files: what a renderer writes, kept to be read in a review."""

from __future__ import annotations

import os
from pathlib import Path


def assert_golden(text: str, path: Path) -> None:
    """Assert that `path` holds `text`. ENVBUILD_WRITE_GOLDEN=1 writes it anew: look at the difference before you keep
    it."""
    if os.environ.get("ENVBUILD_WRITE_GOLDEN"):
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def assert_golden_table(rows: list[str], page: Path, test: str) -> None:
    """Assert that a page ends with that table, behind the marker of the test that makes it, as assert_golden does."""
    before, marker, _ = page.read_text(encoding="utf-8").partition(f"<!-- made by {test} -->\n")
    assert marker, f"{page} has no marker of {test}"
    assert_golden(before + marker + "\n" + "\n".join(rows) + "\n", page)
