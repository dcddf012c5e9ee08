"""How the package is laid out: docs/architecture.md. Import directions: [tool.importlinter] in pyproject.toml."""

from __future__ import annotations

import ast
import re
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from envbuild.runtimes import of_sites

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


# The closure of a module is itself and all that it imports at its top, again and again: what a reader has to know.
# Flow, budget of today in modules and lines, and the goal. A budget only falls, until it is the goal.
BUDGETS = [
    ("envbuild.build.folder", (90, 16_000), (90, 16_000)),
    ("envbuild.build.squash", (80, 14_000), (80, 14_000)),
    ("envbuild.build.prepare", (78, 13_700), (78, 13_700)),
    ("envbuild.jobs.plan", (60, 9_000), (60, 9_000)),
    ("envbuild.jobcheck.lint.engine", (30, 4_000), (30, 4_000)),
    ("envbuild.inspect.reader", (60, 10_000), (60, 10_000)),
]
MOST_MODULES, GOAL_OF_MODULES = 290, 290
# Rooms that a reader needs for the image library.
BELOW_IMAGE = {"envbuild", "envbuild.image", "envbuild.cache", "envbuild.base", "envbuild.data"}


def modules_of(package: Path) -> dict[str, Path]:
    """Return the file of each module of the package in the folder `package`, by its dotted name."""
    named = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        named[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return named


def eager_imports(body: Iterable[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports that run when the module is imported."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If):
            yield from eager_imports(node.orelse if "TYPE_CHECKING" in ast.dump(node.test) else node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from eager_imports(node.body + [one for part in node.handlers for one in part.body] + node.orelse)
        elif isinstance(node, ast.With | ast.ClassDef):
            yield from eager_imports(node.body)


def closure_of(start: str, modules: dict[str, Path]) -> set[str]:
    """Return `start` and all modules that it imports at its top, directly or by another one."""
    closure: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in closure:
            continue
        closure.add(name)
        for node in eager_imports(ast.parse(modules[name].read_text()).body):
            assert isinstance(node, ast.Import) or node.level == 0, f"{name} has a relative import"
            if isinstance(node, ast.Import):
                imported = [alias.name for alias in node.names]
            else:
                imported = [f"{node.module}.{alias.name}" for alias in node.names]
            for word in imported:  # with the packages around it, whose __init__ runs first
                parts = word.split(".")
                waiting += {".".join(parts[:end]) for end in range(1, len(parts) + 1)} & modules.keys()
    return closure


def lines_of(closure: set[str], modules: dict[str, Path]) -> int:
    return sum(len(modules[name].read_text().splitlines()) for name in closure)


@pytest.mark.parametrize(("flow", "budget", "goal"), BUDGETS, ids=[row[0] for row in BUDGETS])
def test_a_flow_is_followed_within_its_budget(flow: str, budget: tuple[int, int], goal: tuple[int, int]) -> None:
    modules = modules_of(PACKAGE)
    closure = closure_of(flow, modules)
    assert len(closure) <= budget[0] and lines_of(closure, modules) <= budget[1], sorted(closure)
    assert budget[0] >= goal[0] and budget[1] >= goal[1]


def test_the_house_has_at_most_so_many_modules() -> None:
    assert len(MODULES) <= max(MOST_MODULES, GOAL_OF_MODULES)


def test_the_image_library_needs_the_cache_and_the_base_alone() -> None:
    modules = modules_of(PACKAGE)
    library = [name for name in modules if name == "envbuild.image" or name.startswith("envbuild.image.")]
    needed = set().union(*(closure_of(name, modules) for name in library))
    assert {".".join(name.split(".")[:2]) for name in needed} <= BELOW_IMAGE


def test_a_closure_leaves_out_imports_in_functions_and_for_types_alone(tmp_path: Path) -> None:
    files = {
        "__init__.py": "",
        "start.py": """\
            from typing import TYPE_CHECKING

            import json
            from house.room import lamp
            from house.room.table import leg

            if TYPE_CHECKING:
                from house import typed

            try:
                import house.tried
            except ImportError:
                from house import fallback


            def late() -> None:
                from house import hidden
            """,
        "room/__init__.py": "from house import porch",
        "room/lamp.py": "# a module, and no name of the package",
        "room/table.py": "leg = 1\nfrom house import start  # a circle ends",
        "porch.py": "class Porch:\n    from house import steps",
        "steps.py": "",
        "tried.py": "",
        "fallback.py": "",
        "typed.py": "",
        "hidden.py": "",
        "unused.py": "from house import start",
    }
    for name, text in files.items():
        path = tmp_path / "house" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    modules = modules_of(tmp_path / "house")
    closure = closure_of("house.start", modules)
    expected = ["", ".fallback", ".porch", ".room", ".room.lamp", ".room.table", ".start", ".steps", ".tried"]
    assert sorted(closure) == [f"house{name}" for name in expected]
    assert lines_of(closure, modules) == 17 + 1 + 1 + 2 + 2
    assert closure_of("house.typed", modules) == {"house.typed"}


# Modules that know no container runtime by its name: what differs is in envbuild/runtimes.
WITHOUT_RUNTIMES = [*(PACKAGE / "jobs").rglob("*.py"), *(PACKAGE / "verify").rglob("*.py"), PACKAGE / "build/kinds.py"]


def lines_naming(words: Iterable[str], text: str) -> list[str]:
    """Return the lines of `text` that have one of `words`, also as a part of another word."""
    return [line for line in text.splitlines() if re.search("|".join(words), line, re.IGNORECASE)]


def test_a_container_runtime_is_named_in_its_room_alone() -> None:
    words = of_sites()[1:]
    assert {"enroot", "apptainer", "pyxis"} <= {*words} and len(WITHOUT_RUNTIMES) > 30
    assert not {path.name: found for path in WITHOUT_RUNTIMES if (found := lines_naming(words, path.read_text()))}


def test_a_line_that_names_a_container_runtime_is_found() -> None:
    text = "options = _PYXIS\n# the rest of it\nif runtime == 'enroot':\n"
    assert lines_naming(of_sites()[1:], text) == ["options = _PYXIS", "if runtime == 'enroot':"]


def test_each_folder_says_what_it_is_for() -> None:
    rooms = [path for path in MODULES if path.name == "__init__.py"]
    assert len(rooms) > 20
    assert not [str(path) for path in rooms if not ast.get_docstring(ast.parse(path.read_text()))]


def test_the_walk_through_a_build_has_modules_that_exist() -> None:
    """The page has at most 35 of them; a moved module must be moved there, too."""
    page = (PACKAGE.parent / "docs/architecture.md").read_text()
    walk = re.findall(r"^\| \d+ \| `([\w/]+)\.py` \|", page, re.MULTILINE)
    assert 20 <= len(walk) <= 35
    assert not [name for name in walk if not (PACKAGE / f"{name}.py").is_file()]
