"""The page of `envbuild report` in a real browser: nothing is loaded, nothing complains, everybody can read it."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chromium import Tab, chromium, missing

from envbuild.contract.receipt import receipt_path

# The rules of axe, and those that it cannot decide. It finds no background for text on an element that scrolls or lies
# over another, and reads one digit as no text; contrast of all colours is judged where it finds it.
RUN = """document.querySelectorAll("details").forEach(one => one.open = true), axe.run({resultTypes: ["violations"]})
.then(found => JSON.stringify(found.violations.map(one => [one.id, one.nodes.map(node => node.html)])))"""


@pytest.fixture(scope="module")
def page(pt_cpu: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a real venv, of its receipt at another time, and of one that failed."""
    folder = tmp_path_factory.mktemp("report")
    receipt = json.loads(receipt_path(Path(pt_cpu["path"])).read_text())
    receipt["verified_at"] = "2020-01-01T00:00:00+00:00"
    (folder / "old.receipt.json").write_text(json.dumps(receipt))
    receipt["checks"][0] |= {
        "status": "fail",
        "seen": "1 file differs\n    torch/version.py",
        "cause": "a partial copy",
    }
    (folder / "failed.receipt.json").write_text(json.dumps({**receipt, "passed": False, "target": "cpu-aarch64"}))
    line = ("report", pt_cpu["path"], folder / "old.receipt.json", folder / "failed.receipt.json")
    done = pt_cpu["command"](*line, "--out", folder / "report.html")
    assert done.returncode == 0, done.stderr
    return folder / "report.html"


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    if reason := missing():
        pytest.skip(reason)
    with chromium(tmp_path_factory.mktemp("chromium") / "profile") as started:
        yield started


@pytest.mark.parametrize(("width", "dark"), [(1200, False), (360, True)])
def test_everybody_can_read_it_and_nothing_is_loaded(tab: Tab, page: Path, width: int, dark: bool) -> None:
    tab.open(page, width=width, dark=dark)
    assert tab.requests() == [page.as_uri()] and tab.complaints() == []
    script = Path(next(iter(importlib.util.find_spec("axe_core_python").submodule_search_locations))) / "axe.min.js"  # type: ignore[union-attr,arg-type]
    tab.run(script.read_text() + "; 0")
    assert json.loads(tab.run(RUN)) == []
    # Unfolded, too, the page itself does not scroll sideways.
    assert tab.run("document.documentElement.scrollWidth") == width
    assert tab.requests() == [page.as_uri()] and tab.complaints() == []


def test_no_text_runs_over_the_edge_of_a_chart(tab: Tab, page: Path) -> None:
    for width in (360, 1200):
        tab.open(page, width=width)
        outside = tab.run("""[...document.querySelectorAll("section text")].filter(one => {
            const own = one.getBoundingClientRect(), room = one.closest("section").getBoundingClientRect();
            return own.width && (own.left < room.left || own.right > room.right) }).map(one => one.textContent)""")
        assert outside == []


def test_the_page_is_about_the_artifact(page: Path, pt_cpu: dict[str, Any]) -> None:
    text = page.read_text()
    assert "2 of 3 passed" in text and "1 file differs" in text and pt_cpu["digest"] in text
    assert "the SBOM (CycloneDX 1.6): pt_cpu-" in text and "Size</th>" in text and "Training step of pt_cpu" in text
    assert "the receipt of 1 Jan 2020" in text


def test_it_prints_on_a_few_pages(tab: Tab, page: Path) -> None:
    tab.open(page, media="print", dark=True)
    assert tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert tab.run("getComputedStyle(document.querySelector('.button')).display") == "none"
    assert 3 <= tab.pdf().count(b"/Type /Page\n") < 20
