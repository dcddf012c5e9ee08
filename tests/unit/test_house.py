"""How the package is laid out: docs/architecture.md. Import directions: [tool.importlinter] in pyproject.toml."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "envbuild"
MODULES = sorted(PACKAGE.rglob("*.py"))


def test_no_module_has_more_than_600_lines() -> None:
    lines = {path: len(path.read_text().splitlines()) for path in MODULES}
    assert not {str(path): count for path, count in lines.items() if count > 600}


def test_a_class_name_is_unique_in_the_package() -> None:
    found = defaultdict(list)
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(PACKAGE)))
    assert len(found) > 300
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_the_formatter_formats_every_line() -> None:
    switch = "# " + "fmt:"
    sources = [
        path for folder in ("envbuild", "tests", "ddp_train") for path in (PACKAGE.parent / folder).rglob("*.py")
    ]
    assert len(sources) > 500
    assert not [str(path) for path in sources if switch in path.read_text()]
