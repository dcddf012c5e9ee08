"""Golden files: what a renderer writes, kept to be read in a review."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
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


def assert_golden_case(case: str, texts: Mapping[str, str], path: Path) -> None:
    """Assert that the table `path` holds the text of `case`, and no text but those of `texts`.

    ENVBUILD_WRITE_GOLDEN=1 writes the table anew, from all `texts`.
    """
    if os.environ.get("ENVBUILD_WRITE_GOLDEN"):
        path.write_text(_merge_table(texts), encoding="utf-8")
    golden = read_golden_cases(path)
    assert set(golden) == set(texts)
    assert texts[case] == golden[case]


def read_golden_cases(path: Path) -> dict[str, str]:
    """Return the whole text of each case of the table `path`.

    A table holds texts that have most of their lines in common. Each line stands there once, in its order, under a
    heading with the cases that have it: `@ all`, `@ all but CASE…` or `@ CASE…`. The first line lists the cases.
    """
    first, *rows = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    cases = first.removeprefix("cases: ").split()
    lines: dict[str, list[str]] = {case: [] for case in cases}
    chosen = cases
    for row in rows:
        if row.startswith("@ "):
            words = row.split()[1:]
            but = words[:2] == ["all", "but"]
            chosen = cases if words == ["all"] else words
            if but:
                chosen = [case for case in cases if case not in words[2:]]
        else:
            for case in chosen:
                lines[case].append(row)
    return {case: "".join(f"{line}\n" for line in lines[case]) for case in cases}


def _merge_table(texts: Mapping[str, str]) -> str:
    """Return the table of `texts`: the shortest text, to which each longer one adds its lines."""
    merged: list[tuple[str, frozenset[str]]] = []
    for case in sorted(texts, key=lambda name: (len(texts[name]), name)):
        text = texts[case]
        assert text.endswith("\n") and "\n@ " not in f"\n{text}", f"{case} has a line that a table cannot hold"
        lines, only = text[:-1].split("\n"), frozenset([case])
        known, merged = merged, []
        matcher = difflib.SequenceMatcher(None, [line for line, _ in known], lines, autojunk=False)
        for action, begin, end, begin_new, end_new in matcher.get_opcodes():
            same = action == "equal"
            merged += [(line, cases | only) if same else (line, cases) for line, cases in known[begin:end]]
            merged += [] if same else [(line, only) for line in lines[begin_new:end_new]]
    rows = [f"cases: {' '.join(sorted(texts))}"]
    last: frozenset[str] | None = None
    for line, cases in merged:
        if cases != last:
            others = sorted(set(texts) - cases)
            few = sorted(cases) if len(cases) <= len(others) else ["all", *(["but", *others] if others else [])]
            rows.append(f"@ {' '.join(few)}")
            last = cases
        rows.append(line)
    return "".join(f"{row}\n" for row in rows)
