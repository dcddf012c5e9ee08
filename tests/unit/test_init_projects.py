"""`envbuild init` on the dependency files of public projects: nothing is lost in silence, and pins stay the same.

The files are beside the repository (../shared/projects, or $ENVBUILD_PROJECTS); the tests skip where they are not. The
scan of each file is independent of envbuild's readers: it looks at lines.
"""

from __future__ import annotations

import csv
import gzip
import os
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from lab.drafts import composed
from lab.golden import assert_golden_table

from envbuild.imports import read_source
from envbuild.imports.statement import Draft, Statement

TOP = Path(__file__).parents[2]
PLACES = [Path(os.environ.get("ENVBUILD_PROJECTS", "/nonexistent")), *(one / "shared/projects" for one in TOP.parents)]
PROJECTS = next((path for path in PLACES if (path / "index.tsv").is_file()), None)
FILES = [row["file"] for row in csv.DictReader((PROJECTS / "index.tsv").open(), delimiter="\t")] if PROJECTS else []
pytestmark = pytest.mark.skipif(not FILES, reason="shared/projects is not here: dependency files of public projects")

# Headings of TOML tables with dependencies: in the first, the strings are requirements, in the second the keys names.
ARRAYS = (
    r"project|dependency-groups|project\.optional-dependencies|tool\.flit\.metadata(\.requires-extra)?"
    r"|tool\.pdm\.dev-dependencies|build-system"
)
KEYS = r"(tool\.poetry\.)?(.*\.)?(dev-|pypi-)?dependencies"
FIELDS = r"(?:dependencies|requires|[a-z0-9-]+)"
NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
# Fields of [project] whose strings are no requirements.
OTHER = r"(license|license-files|classifiers|authors|maintainers|keywords|dynamic|include|exclude|packages)"


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower().strip("-")


@pytest.fixture(scope="session")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert PROJECTS
    folder = tmp_path_factory.mktemp("projects")
    for path in PROJECTS.rglob("*"):
        if path.is_file():
            place = folder / path.relative_to(PROJECTS)
            place.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            zipped = path.suffix == ".gz"
            (place.with_suffix("") if zipped else place).write_bytes(gzip.decompress(data) if zipped else data)
    return folder


def names_in(path: Path) -> Iterator[str]:
    """Yield the name of each package that a line of the file requires."""
    table, field = "", ""
    for line in path.read_text().splitlines():
        plain = re.sub(r"(^|\s)#.*", "", line).strip()
        if path.suffix == ".txt":
            if plain.startswith("-r"):
                yield from names_in(path.parent / plain[2:].strip())
            elif found := re.match(NAME, re.sub(r".*#egg=", "", plain)):
                yield found[0]
        elif path.suffix in (".yml", ".yaml"):
            found = re.match(rf"(?:- )?['\"]?(?:{NAME}::)?({NAME})", plain)
            if line.lstrip().startswith("-") and plain != "- pip:" and found and "://" not in plain.partition(" ")[0]:
                yield found[1]
        elif heading := re.fullmatch(r"\[+([^]]+)\]+", plain):
            table, field = heading[1].replace('"', ""), ""
        elif re.fullmatch(KEYS, table):
            if (found := re.match(rf"['\"]?({NAME})['\"]?\s*=", plain)) and not (
                plain.startswith("python ") or "{" in field
            ):
                yield found[1]
        elif re.fullmatch(ARRAYS, table):
            if found := re.match(rf"({FIELDS})\s*=\s*", plain):
                field, plain = found[1], plain[found.end() :]
                if not plain.startswith("["):
                    continue
            if not re.fullmatch(OTHER, field):
                for text in re.findall(r"\"([^\"]*)\"|'([^']*)'", plain):
                    if found := re.match(NAME, "".join(text)):
                        yield found[0]


def pins_in(path: Path) -> Iterator[tuple[str, str, str]]:
    """Yield name, version and platform of each package in a lock."""
    if path.name == "uv.lock":
        for name, version in re.findall(
            r'^\[\[package\]\]\nname = "(.*)"\nversion = "(.*)"', path.read_text(), re.MULTILINE
        ):
            yield name, version, ""
        return
    for entry in re.split(
        r"^\s*- (?=name:|category:)", path.read_text().partition("\npackage:")[2], flags=re.MULTILINE
    )[1:]:
        fields = dict(
            re.findall(
                r"^\s*(name|version|platform): '?([^'\n]*)'?$",
                "\n" + entry.partition("\nversion: 1\n")[0],
                re.MULTILINE,
            )
        )
        yield fields["name"], fields["version"], fields["platform"]


def said_in(draft: Draft) -> set[str]:
    """The words of the recipe and of the list of what it does not have."""
    text = "\n".join([draft.text, *(f"{one.text} {one.reason}" for one in draft.lost)])
    return {normal(word) for word in re.findall(NAME, text)}


@cache
def entries_of(path: Path) -> list[Statement]:
    """The statements of a file; those of the largest locks take a second."""
    return list(read_source(path))


@pytest.mark.parametrize("file", FILES)
def test_no_line_is_lost_in_silence_and_pins_stay(unpacked: Path, file: str) -> None:
    path = unpacked / file.removesuffix(".gz")
    draft, recipe = composed(entries_of(path), target=None)
    assert all(one.reason and one.place.startswith(str(path.parent)) for one in draft.lost)
    if "lock" not in path.stem or path.suffix == ".toml":
        said = said_in(draft) | {
            {"x86_64": "linux-64", "aarch64": "linux-aarch64"}[one.rpartition("-")[2]] for one in recipe.targets
        }
        said |= {"defaults"} if "pkgs/main" in draft.text else set()
        names = set(map(normal, names_in(path)))
        assert names or path.stem in ("pyproject",)
        assert names <= said, names - said
        pinned = re.findall(
            rf"^({NAME})(?:\[\w+\])?\s*==\s*([^\s;]+)", path.read_text() if path.suffix == ".txt" else "", re.MULTILINE
        )
        everything = {*recipe.requirements, *(text for one in recipe.targets.values() for text in one.requirements)}
        for name, version in pinned:
            assert any(re.match(rf"{re.escape(name)}\b.*=={re.escape(version)}", text) for text in everything), name
        return
    lost = {one.text.partition(" (")[0] for one in draft.lost}
    locked = {*recipe.requirements, *recipe.constraints, *recipe.conda.requirements}
    for table in recipe.targets.values():
        locked |= {*table.requirements, *(" ".join(text.split()[:2]) for text in table.conda)}
    count = 0
    for name, version, platform in pins_in(path):
        public = version.partition("+")[0]
        shown = {f"{name} {version}", f"{name}=={version}", f"{name}=={public}"}
        assert (
            shown & (locked | {text.rpartition(" ")[0] if " " in text else text for text in lost} | lost)
            or name == "nanochat"
        ), name
        count += bool(shown & locked)
        if platform.startswith("linux") and "multiple-categories" not in file:
            assert shown & locked, name
    assert count >= 20


COLUMNS = {
    "other system": r"for another operating system|not for Python",
    "extra or group": r"belongs to|an extra",
    "source": r"a source other|an address|its (URL|address|file|path)|a file of|a folder with code|.* is a path",
    "hashes, URLs": r"(URLs and )?hashes",
    "setting": r"a setting of|builds the|dynamic|envbuild adds",
}


def test_the_table_in_the_docs(unpacked: Path) -> None:
    lines = [f"| File | carried | {' | '.join(COLUMNS)} | other |", "| --- |" + " ---: |" * (len(COLUMNS) + 2)]
    for file in FILES:
        draft, _ = composed(entries_of(unpacked / file.removesuffix(".gz")), target="cpu-x86_64")
        kinds = Counter(
            next((name for name, pattern in COLUMNS.items() if re.match(pattern, one.reason)), "other")
            for one in draft.lost
        )
        counts = " | ".join(str(kinds[name] or "") for name in (*COLUMNS, "other"))
        lines.append(f"| {file.removesuffix('.gz')} | {len(draft.carried)} | {counts} |")
    assert_golden_table(lines, TOP / "docs/reference/init-projects.md", "tests/unit/test_init_projects.py")
