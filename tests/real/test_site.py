"""The site of docs/ in a real browser: nothing is cut or loaded from elsewhere, and search finds things."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import itertools
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import Tab, chromium, missing

TOP = Path(__file__).parents[2]
CONTRAST = """axe.run({runOnly: ["color-contrast", "image-alt", "link-name", "page-has-heading-one"]})
.then(found => JSON.stringify(found.violations.map(one => [one.id, one.nodes.map(node => node.html)])))"""
# Elements of the page's text that reach over its edge and have no bar to scroll them.
CUT = """[...document.querySelectorAll("article *")].filter(one => one.getBoundingClientRect().right > innerWidth + 1
&& !one.closest("pre, .md-typeset__scrollwrap")).map(one => one.outerHTML)"""
WIDE = """[...document.querySelectorAll(".md-typeset__scrollwrap")].filter(one => one.scrollWidth > one.clientWidth + 1)
.map(one => one.textContent.slice(0, 80))"""


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "site"
    line = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    subprocess.run(line, cwd=TOP, check=True, env={"NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[str]:
    """The address of the site: its search needs a server."""
    handler = functools.partial(_Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    if reason := missing():
        pytest.skip(reason)
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as started:
        yield started


@pytest.fixture
def _nothing_to_search(folder: Path) -> Iterator[None]:
    """Each page builds the index of the search anew, for as long as all else takes."""
    index = folder / "search/search_index.json"
    text = index.read_text()
    index.write_text(json.dumps({**json.loads(text), "docs": []}))
    yield
    index.write_text(text)


@pytest.mark.usefixtures("_nothing_to_search")
def test_no_page_is_cut_and_nothing_is_loaded_from_elsewhere(tab: Tab, site: str, folder: Path) -> None:
    wrong, pages = {}, sorted(str(path.parent.relative_to(folder)) for path in folder.rglob("index.html"))
    assert len(pages) > 40
    for page in pages:
        # What is below the window has its place, but is not painted.
        tab.open(site + page, width=1440, height=100)
        for width in (1440, 390):
            tab.resize(width, height=100)
            seen = [tab.run(CUT), tab.run(WIDE), tab.run("document.documentElement.scrollWidth"), tab.complaints()]
            seen.append([address for address in tab.requests() if not address.startswith((site, "data:"))])
            if seen != [[], [], width, [], []]:
                wrong[page, width] = seen
    assert wrong == {}


@pytest.mark.usefixtures("_nothing_to_search")
def test_everybody_can_read_it(tab: Tab, site: str) -> None:
    script = Path(next(iter(importlib.util.find_spec("axe_core_python").submodule_search_locations))) / "axe.min.js"  # type: ignore[union-attr,arg-type]
    for page, dark in itertools.product(("", "howto/jobs/", "reference/recipe/"), (False, True)):
        tab.open(site + page, width=1440, dark=dark)
        tab.run(script.read_text() + "; 0")
        assert json.loads(tab.run(CONTRAST)) == [], (page, dark)


WORDS = {
    "add a package": "howto/locks/",
    "quickstart": "",
    "install": "install/",
    "slurm": "howto/jobs/",
    "flight-behind": "reference/diagnoses/",
}


def test_search_finds(tab: Tab, site: str) -> None:
    """All words on one page, because each page builds the index anew."""
    tab.open(site, width=1440)
    for words, page in WORDS.items():
        found = tab.run(f"""new Promise(done => {{
            const links = () => [...document.querySelectorAll(".md-search-result__item > a")].map(one => one.pathname);
            const before = links().join(), field = document.querySelector("input.md-search__input");
            field.focus(); field.value = {json.dumps(words)};
            field.dispatchEvent(new KeyboardEvent("keyup", {{key: "e"}}));
            const look = () => {{
                const now = links();
                now.length && now.join() != before ? done(now) : setTimeout(look, 50) }}; look() }})""")
        assert f"/{page}" in found[:3], words
