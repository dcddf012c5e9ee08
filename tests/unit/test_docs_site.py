"""The site of docs/: its version and addresses have one place, nothing but pages is in it, and nav has them all."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]


def copied(top: Path) -> Path:
    """Return a copy of the pages in `top`."""
    for name in ("docs", "mkdocs.yml", "pyproject.toml", "CHANGELOG.md", "envbuild/__init__.py"):
        place = top / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(TOP / name, place) if (TOP / name).is_dir() else shutil.copy(TOP / name, place)
    return top


def build(copy: Path) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    return subprocess.run(line, cwd=copy, capture_output=True, text=True, env={"NO_MKDOCS_2_WARNING": "1"})


def release(copy: Path, version: str, urls: str) -> None:
    (copy / "envbuild/__init__.py").write_text(f'__version__ = "{version}"\n')
    project = re.sub(r"\[project\.urls\]\n((?:\S.*\n)*)", "", (copy / "pyproject.toml").read_text())
    (copy / "pyproject.toml").write_text(f"{project}\n[project.urls]\n{urls}")


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of a release with addresses, and with a page that has every kind of code."""
    copy = copied(tmp_path_factory.mktemp("site") / "released")
    release(copy, "7.8.9", 'Repository = "https://git.example.org/team/tool"\nDocumentation = "https://tool.example"\n')
    lines = [
        "    envbuild venv pt_cpu",
        "    [paths]\n    shared = 1",
        "    $ ls\n    a",
        "    on:\n      push:",
        "    a b  c",
    ]
    text = "\n\n".join(f"Text.\n\n{line}" for line in lines) + "\n\n- a list\n\n    no code, a part of the list\n"
    table = "| `k` | b | c |\n| --- | --- | --- |\n| 1 | 2 % | 3 |\n| 4 | 5 | |\n"
    (copy / "docs/howto/run.md").write_text(f"# Run\n\n`--out` or `x --a-b y-z`\n\n{table}\n{text}")
    done = build(copy)
    assert done.returncode == 0, done.stderr
    return copy / "build/site"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """The site of a package without addresses, from a folder with other files than pages, and a page that nav lacks."""
    copy = copied(tmp_path_factory.mktemp("site") / "unaddressed")
    release(copy, "7.8.9", "")
    for name in ("__pycache__/hooks.cpython-311.pyc", "howto/note.txt", "howto/images.md~", "pictures/try", ".env"):
        (copy / "docs" / name).parent.mkdir(exist_ok=True)
        (copy / "docs" / name).write_text("x")
    (copy / "docs" / "howto/lost.md").write_text("# Lost\n")
    return copy / "build/site", build(copy)


@pytest.fixture(scope="module")
def unaddressed(built: tuple[Path, object]) -> Path:
    return built[0]


def test_version_and_addresses_come_from_the_package(released: Path) -> None:
    page = (released / "howto/project/index.html").read_text()
    assert "envbuild 7.8.9" in page and '<link rel="canonical" href="https://tool.example/howto/project/">' in page
    assert 'href="https://git.example.org/team/tool/blob/HEAD/examples/own_project/README.md"' in page
    assert re.search(r'<a href="https://git.example.org/team/tool" title="[^"]*" class="md-source">', page)


def test_a_site_without_addresses_has_no_link_to_a_repository(unaddressed: Path) -> None:
    page = (unaddressed / "howto/project/index.html").read_text()
    assert "md-source" not in page and "is examples/own_project.</p>" in page


def test_nothing_but_pages_pictures_and_schemas_is_published(unaddressed: Path) -> None:
    files = {str(path.relative_to(unaddressed)) for path in unaddressed.rglob("*") if path.is_file()}
    own = {one for one in files if not one.startswith(("assets/", "search/")) and not one.endswith("index.html")}
    expected = {"404.html", "sitemap.xml", "sitemap.xml.gz", "site.css"}
    expected |= {one.name for one in (TOP / "docs").glob("*.schema.json")}
    expected |= {f"pictures/{one.name}" for one in (TOP / "docs/pictures").iterdir() if one.suffix in (".png", ".svg")}
    assert own == expected
    pages = {str(one.relative_to(TOP / "docs").with_suffix("")) for one in (TOP / "docs").rglob("*.md")}
    folders = {re.sub(r"(^|(?<=/))README$|^index$", "", one) for one in pages} | {"changelog", "howto/lost"}
    assert {one.removesuffix("index.html").strip("/") for one in files if one.endswith("index.html")} == {
        one.strip("/") for one in folders
    }


def test_a_page_that_the_navigation_lacks_fails_the_build(
    built: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    _, done = built
    assert done.returncode == 1 and "howto/lost.md" in done.stderr
    assert "Aborted with 1 warnings" in done.stdout, "something else failed it, too"


def test_code_is_coloured_by_what_it_is_options_stay_on_one_line_and_cells_have_their_headings(released: Path) -> None:
    html = (released / "howto/run/index.html").read_text()
    assert re.findall(r'<div class="language-(\w+) highlight">', html) == ["bash", "toml", "console", "yaml", "text"]
    assert '<code class="word">--out</code> or <code>x <span class="word">--a-b</span> y-z</code>' in html
    assert re.findall(r'<td data-heading="(\w)">(.*?)</td>', html) == [
        ("k", "1"),
        ("b", "2\N{NO-BREAK SPACE}%"),
        ("c", "3"),
        ("k", "4"),
        ("b", "5"),
        ("c", ""),
    ]
