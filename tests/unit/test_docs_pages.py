"""Pages hang together: links lead somewhere, and none has a part of another."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from cases import each_case
from lab.commands import PAGES, TOP

# Shorter lines may say the same on two pages: a command, a row of a table.
_LONG = 90
_MADE_UP = "docs/envbuild/x.md"  # a changed file in test_matrix_changes.py
_SOURCES = {".py", ".toml", ".md", ".sh"}
# A page or a schema by its path from the top; not a part of an address.
_NAMED = re.compile(r"(?<![\w/.-])(?:\.\./)*(docs/[\w/-]+(?:\.schema)?\.(?:md|json))\b")


def name(page: Path) -> str:
    return str(page.relative_to(TOP))


@each_case("page", PAGES, ids=name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
    # On the site a page has no file's name.
    assert not re.findall(r"\[[\w/.-]+\.md\]\(", page.read_text(encoding="utf-8"))


def test_pages_that_code_and_data_name_exist() -> None:
    """A message that sends its reader to a page that was moved away helps nobody."""
    tops = ("envbuild", "ddp_train", "recipes", "sites", "tests", "docs")
    files = [one for top in tops for one in (TOP / top).rglob("*") if one.suffix in _SOURCES]
    files += [TOP / "Dockerfile.cpu", TOP / "Dockerfile.gpu", TOP / "pyproject.toml"]
    named = {
        (name(file), page)
        for file in files
        for page in _NAMED.findall(file.read_text(encoding="utf-8"))
        if page != _MADE_UP and not (TOP / page).exists()
    }
    assert named == set()


@each_case("page", PAGES, ids=name)
def test_no_note_to_an_editor_is_left(page: Path) -> None:
    assert not re.search(r"<!--[^>]*(section|docs/)", page.read_text(encoding="utf-8"))


def test_no_paragraph_stands_on_two_pages() -> None:
    """A part of one page was once pasted into a sentence of another."""
    places = defaultdict(set)
    for page in PAGES:
        for line in page.read_text(encoding="utf-8").splitlines():
            if len(line) > _LONG and not line.startswith(("    ", "|")):
                places[line].add(name(page))
    assert {line: on for line, on in places.items() if len(on) > 1} == {}


def paragraphs(text: str) -> Iterator[str]:
    """Yield the paragraphs and the entries of lists, without headings, tables, code, pictures and comments."""
    fenced, lines = False, list[str]()
    for line in [*text.splitlines(), ""]:
        fenced ^= line.lstrip().startswith("```")
        plain = not fenced and line.strip() and not re.match(r"\||    |#|<!--|```|!\[", line)
        if lines and (not plain or re.match(r"\s*([-*]|\d+\.) ", line)):
            yield " ".join(lines)
            lines.clear()
        if plain:
            lines.append(line.strip())


@each_case("page", PAGES, ids=name)
def test_no_paragraph_is_longer_than_five_lines_of_100_columns(page: Path) -> None:
    assert [one for one in paragraphs(page.read_text(encoding="utf-8")) if len(one) > 500] == []


@each_case("page", PAGES[1:], ids=name)
def test_each_page_says_first_who_needs_it(page: Path) -> None:
    if page != TOP / "docs/index.md":  # the landing page says it in a section
        heading, first = page.read_text(encoding="utf-8").split("\n\n", 2)[:2]
        assert heading.startswith("# ") and first.startswith("For "), first


@pytest.mark.parametrize("folder", ["howto", "reference", "seeds"])
def test_the_first_page_of_a_folder_links_to_all_of_its_pages(folder: str) -> None:
    first = TOP / "docs" / folder / "README.md"
    linked = set(re.findall(r"\]\(([\w-]+\.md)[#)]", first.read_text(encoding="utf-8")))
    assert linked >= {page.name for page in first.parent.glob("*.md")} - {first.name}


def test_the_drawing_of_the_rooms_has_all_of_them() -> None:
    page = (TOP / "docs/contributing.md").read_text(encoding="utf-8")
    drawing = page.partition("## The rooms")[2].partition("```text")[2].partition("```")[0]
    rooms = {path.parent.name for path in TOP.glob("envbuild/*/__init__.py")}
    assert set(re.findall(r"(\w+)/", drawing)) == rooms
