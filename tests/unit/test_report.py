"""`envbuild report`: every receipt gives a page that is whole, runs nothing and loads nothing."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lab.forked import run_forked

from envbuild.base.errors import UsageError, VerificationError
from envbuild.build.commit import failed_path
from envbuild.cli.report import reported
from envbuild.compat.rows import CompatFinding
from envbuild.contract.receipt import receipt_path
from envbuild.inspect.metadata import interest
from envbuild.report.data import ReportEntry, SizedPackage
from envbuild.report.gather import gather, page_path, read_receipt_of, receipt_changes
from envbuild.report.page import report_page
from envbuild.report.sections import evidence_html, h, prose, visible
from envbuild.run_environment import load_environment
from examples import examples

# Of a real run of `envbuild verify --faults`; its paths and host are renamed.
REAL: dict[str, Any] = json.loads((Path(__file__).parent / "data/report/pt_minimal.receipt.json").read_text())
# What a receipt might do to a page, a terminal or a reader.
EVIL = [
    "</style><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "\u202egpj.exe",
    "\ud800",
    "a\0b",
    "javascript:alert(1)",
    "`<b>`",
    "https://example.org/\"onmouseover='x'",
    "&lt;b&gt;",
    "é" * 300,
]
NUMBERS = [float("nan"), float("inf"), -1, 0, 1e308, -1e308, 5e-324, 10**400, True]
VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Reads a page as strictly as the page is written."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        assert not [name for name in names if name.startswith("on") or name in ("src", "srcset", "srcdoc", "action")]
        found = dict(attrs)
        self.ids += [found["id"] or ""] if "id" in found else []
        self.links += [found["href"] or ""] if "href" in found else []
        # The alternative of a picture is its own, or its parent's.
        assert tag != "svg" or found.get("aria-hidden") == "true" or found.get("role") == "img", found
        assert found.get("role") != "img" or found.get("aria-label")
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(page: str) -> Checker:
    """The page, which is whole and harmless."""
    page.encode()
    found = Checker()
    found.feed(page)
    found.close()
    assert found.open == []
    assert len(found.ids) == len(set(found.ids))
    allowed = ("#", "https://", "http://", "data:application/json;base64,", "data:application/gzip;base64,")
    assert [link for link in found.links if not link.startswith(allowed)] == []
    assert {link[1:] for link in found.links if link.startswith("#")} <= set(found.ids)
    assert not {"script", "img", "iframe", "object", "form", "link", "base"} & set(found.tags)
    assert found.tags.count("style") == 1
    assert not [c for c in page if not c.isprintable() and c not in "\n\t"]
    return found


def entry(receipt: dict[str, Any] = REAL, **more: Any) -> ReportEntry:
    return ReportEntry(receipt, "venv.receipt.json", **more)


def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    receipt = copy.deepcopy(REAL)
    change(receipt)
    return receipt


def test_the_page_of_a_real_receipt_has_its_verdict_and_sections() -> None:
    found = read(report_page([entry()]))
    text = " ".join(" ".join(found.text).split())
    assert "Passed" in text and "23 passed, 1 not tried" in text and "2 simulated nodes × 2 ranks" in text
    assert [one for one in found.ids if not one.startswith("x")] == [
        "checks",
        "training",
        "all-reduce-bandwidth",
        "launches",
        "packages",
        "libraries-as-loaded",
        "provenance",
    ]
    assert text.count("resumed from the snapshot") and "after a killed rank" in text
    assert "Content-Security-Policy" in report_page([entry()])
    assert found.tags.count("h1") == 1 and {"header", "nav", "main", "footer", "caption"} <= set(found.tags)
    assert report_page([entry()]) == report_page([entry()])


def test_the_loss_is_drawn_by_step_and_in_older_receipts_by_epoch() -> None:
    def forget(receipt: dict[str, Any]) -> None:
        for check in receipt["checks"]:
            check["evidence"] = {k: v for k, v in check["evidence"].items() if not k.endswith("steps")}

    evidence = {check["name"]: check["evidence"] for check in REAL["checks"]}
    epochs, steps = len(evidence["curve"]["losses"]), sum(map(len, evidence["curve"]["steps"]))
    assert steps == 16 * epochs == sum(map(len, evidence["curve"]["one_process_steps"]))
    # One point is of both the distributed and the resumed run; the killed one begins later.
    killed = epochs - evidence["restart"]["start_epoch"]
    page, old = report_page([entry()]), report_page([entry(changed(forget))])

    def points(drawn: str) -> int:
        return sum(way.count("L") + 1 for way in re.findall(r'<path d="(M[^"]+)" class="line"', drawn))

    assert points(page) == 2 * steps + 1 + 16 * killed and "Mean loss of a step over epochs" in page
    assert points(old) == 2 * epochs + 1 + killed and "Mean loss over epochs" in old
    # The end of each epoch has a dot, whose title has the number; the evidence has those of the other steps.
    assert page.count("<circle") == old.count("<circle") == 2 * epochs + 1 + killed
    assert all(str(step) in page for row in evidence["curve"]["steps"] for step in row)


def test_measurements_have_names_and_units() -> None:
    measured = {"step_s": 0.004648, "import_s": 1.724, "peak_memory_bytes": 406097920, "gpu": "H100", "busbw_gbs": "?"}
    text = " ".join(read(report_page([entry({**REAL, "performance": measured})])).text)
    for said in ("one step", "4.6 ms", "import of torch", "1.72 s", "peak memory", "406.1 MB", "H100", "busbw gbs"):
        assert said in text, said
    assert "0.004648" not in text


def test_the_receipt_and_the_sbom_are_in_the_page_byte_for_byte() -> None:
    links = [link for link in read(report_page([entry(sbom='{"a": "</a>"}')])).links if link.startswith("data:")]
    data = [json.loads(base64.b64decode(link.partition(",")[2])) for link in links]
    assert data == [{"a": "</a>"}, REAL]


def receipts_of_days(number: int) -> list[ReportEntry]:
    """Receipts of one artifact, whose measurements differ from day to day, as far as their digits go."""

    def measured(value: Any, chance: random.Random) -> Any:
        if isinstance(value, dict):
            return {name: measured(one, chance) for name, one in value.items()}
        if isinstance(value, list):
            return [measured(one, chance) for one in value]
        return float(f"{value * chance.uniform(0.99, 1.01):.7g}") if isinstance(value, float) else value

    found = []
    for day in range(number):
        receipt = changed(lambda one: None)
        receipt["verified_at"] = f"2026-{1 + day // 28:02}-{1 + day % 28:02}T10:00:00+00:00"
        for check in receipt["checks"]:
            check["evidence"] = measured(check["evidence"], random.Random(day))
            if check["name"] == "parameters":
                check["evidence"]["sha256"] = dict.fromkeys(check["evidence"]["sha256"], f"{day:064}")
        before = found[-1].receipt if found else None
        differences = receipt_changes(before, receipt, "the day before") if before else None
        found.append(ReportEntry(receipt, f"{day}.receipt.json", sbom='{"of": "all"}', changes=differences))
    return found


def test_a_page_of_many_receipts_is_small_and_has_each_whole() -> None:
    entries = receipts_of_days(40)
    page = report_page(entries)
    # A receipt has 32 kB, and had 135 kB on the page.
    assert len(page) / len(entries) < 54_000, len(page) / len(entries)
    found = read(page)
    links = [link for link in found.links if link.startswith("data:application/gzip")]
    saved = [json.loads(gzip.decompress(base64.b64decode(link.partition(",")[2]))) for link in links]
    assert saved[0] == {"of": "all"}, "all have the same packages and SBOM"
    assert saved[1:] == [one.receipt for one in entries]
    assert page == report_page(entries)


def test_what_a_receipt_has_in_common_with_another_is_a_link_to_it() -> None:
    first, second = receipts_of_days(2)
    page = report_page([first, second])
    numbers = {one["name"]: number for number, one in enumerate(first.receipt["checks"], start=1)}
    link = '<p>The same as in <a href="#{}">0.receipt.json</a>.</p>'
    assert link.format("r1-packages") in page and link.format("r1-provenance") not in page
    for check, shared in (("versions", True), ("launch", False), ("bandwidth", False)):
        assert (link.format(f"r1-check-{numbers[check]}") in page) is shared, check
    assert "The same as" not in report_page([first])


def test_a_failure_is_told_first_with_its_usual_cause() -> None:
    def fail(receipt: dict[str, Any]) -> None:
        receipt["passed"] = False
        receipt["checks"][5] |= {
            "status": "fail",
            "seen": "exit codes [1]\n    RuntimeError",
            "cause": "see https://a.b/c.",
        }

    page = report_page([entry(changed(fail))])
    found = read(page)
    assert found.ids[0] == "why-it-failed" and "https://a.b/c" in found.links
    assert "RuntimeError" in page and "<details open>" in page


def test_passed_needs_that_no_check_says_otherwise() -> None:
    lied = changed(lambda receipt: receipt["checks"][0].update(status="fail"))
    assert "Failed" in read(report_page([entry(lied)])).text


def test_packages_are_listed_by_size_and_the_chain_has_its_sources() -> None:
    packages = [
        SizedPackage(f"p{number}", "1", "conda" if number % 2 else "Python", 10 ** (number % 9)) for number in range(90)
    ]
    chain = [
        CompatFinding("good", "glibc", "fits", "", "https://github.com/a/b README.md", "2026-01-01"),
        CompatFinding("bad", "driver", "is old", "update it", "", ""),
    ]
    page = report_page([entry(packages=packages, files=9, size=2 * 10**9, chain=chain, basis="as locked", sbom="{}")])
    found = read(page)
    rows = re.findall(r'<th scope="row">(p\d+)</th>', page)
    assert len(rows) == 90 and rows[:2] == ["p17", "p26"] and "90 packages, 1.1 GB; the artifact has 9 files" in page
    assert "https://github.com/a/b" in found.links and "Fix: update it" in page and "All 90 packages" in found.text
    assert "Nothing to judge" in report_page([entry(chain=[])])


def test_several_receipts_have_a_grid_steps_over_time_and_what_changed() -> None:
    later = changed(lambda receipt: receipt.update(verified_at="2026-12-25T12:00:00+00:00"))
    later["checks"][0]["evidence"]["packages"]["numpy"] = "9.9.9"
    other = changed(lambda receipt: receipt.update(target="cpu-aarch64", passed=False))
    entries = [entry(), entry(later, changes=receipt_changes(REAL, later, "the one before")), entry(other)]
    page = report_page(entries)
    found = read(page)
    assert {"#r1", "#r2", "#r3", "#overview"} <= set(found.links) and "2 of 3 passed" in found.text
    assert "Training step of pt_minimal" in found.text and "9.9.9" in found.text and "r2-what-changed" in found.ids
    assert page.index('href="#r2"') < page.index('href="#r1"')  # the newest first


@pytest.mark.parametrize("evil", EVIL, ids=range(len(EVIL)))
def test_no_text_of_a_receipt_is_more_than_text(evil: str) -> None:
    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {(key if key in KEPT else f"{key}{evil}"): poison(one) for key, one in value.items()}
        if isinstance(value, list):
            return [poison(one) for one in value]
        return evil if isinstance(value, str) and value not in ("pass", "fail") else value

    receipt = poison(REAL)
    packages = [SizedPackage(evil, evil, evil, 5)]
    notes = (evil, f"see `{evil}`")
    changes = receipt_changes(REAL, receipt, evil)
    read(report_page([entry(receipt, packages=packages, sbom=evil, notes=notes, changes=changes, basis=evil)]))
    read(report_page([entry(receipt), entry()]))


KEPT = {
    *REAL,
    *REAL["artifact"],
    *REAL["checks"][0],
    "losses",
    "one_process",
    "steps",
    "one_process_steps",
    "table",
    "worlds",
    "ranks",
    "packages",
    "base",
}


@pytest.mark.parametrize("number", NUMBERS, ids=str)
def test_any_number_gives_a_page(number: Any) -> None:
    def poison(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: poison(one) for key, one in value.items()}
        if isinstance(value, list):
            return [poison(one) for one in value]
        return number if isinstance(value, (int, float)) and not isinstance(value, bool) else value

    receipt = poison(REAL)
    page = report_page([entry(receipt, changes=receipt_changes(REAL, receipt, "before"))])
    read(page)
    drawn = page[page.index("<body") :].partition("data:application/json")[0]
    for attribute in ("x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "width", "height"):
        assert f' {attribute}="nan' not in drawn and f' {attribute}="inf' not in drawn
    read(report_page([entry(receipt), entry()]))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(EVIL),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@examples(50)
@given(st.integers(0, 10**9), st.lists(VALUES, min_size=1, max_size=6))
def test_any_damage_to_a_receipt_gives_a_page(seed: int, values: list[Any]) -> None:
    chosen = random.Random(seed)
    receipt: Any = copy.deepcopy(REAL)
    for value in values:
        place = receipt
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            if not keys:
                break
            key = chosen.choice(keys)
            if isinstance(place[key], (dict, list)) and place[key] and chosen.random() < 0.85:
                place = place[key]
                continue
            if chosen.random() < 0.3:
                del place[key]
            else:
                place[key] = value
            break
    changes = receipt_changes(REAL, receipt, "before")
    read(report_page([entry(receipt, changes=changes), *([entry()] if seed % 2 else [])]))


@examples(50)
@given(st.dictionaries(st.sampled_from([*REAL, "performance", "slim", "project"]), VALUES))
def test_any_object_gives_a_page(receipt: dict[str, Any]) -> None:
    read(report_page([entry(receipt)]))
    read(report_page([entry(receipt), entry(receipt)]))


def test_evidence_of_any_form_is_shown_and_long_evidence_is_cut() -> None:
    page = evidence_html(
        {"none": [{}], "deep": {"a": [[1, {"b": 2}]]}, "rows": [{"n": i} for i in range(300)], "t": "x" * 5000}
    )
    read(f"<!DOCTYPE html><html><style></style>{page}</html>")
    assert "… and 100 more rows" in page and "1000 more characters" in page and "&quot;b&quot;: 2" in page


@pytest.mark.parametrize("depth", [100, 500, 900])
def test_deep_evidence_gives_a_page(tmp_path: Path, depth: int) -> None:
    deep = "[" * depth + "]" * depth
    (tmp_path / "a.json").write_text('{"passed": true, "checks": [{"name": "x", "evidence": {"deep": ' + deep + "}}]}")
    read(report_page([entry(read_receipt_of(tmp_path / "a.json"))]))


def test_text_is_escaped_and_made_visible() -> None:
    assert h("p", "<a>", class_='"') == '<p class="&quot;">&lt;a&gt;</p>'
    assert visible("a\u202eb\x1b[0m\n") == "a\\u202eb\\u001b[0m\n"
    assert prose("see `x<y` and https://a.b/c?d=1, then") == (
        'see <code>x&lt;y</code> and <a href="https://a.b/c?d=1" rel="noreferrer">https://a.b/c?d=1</a>, then'
    )


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return run_forked("report", *arguments, cwd=cwd, env=os.environ)


def test_the_command_writes_one_page_and_prints_its_path(tmp_path: Path) -> None:
    receipt_path(tmp_path / "venv").write_text(json.dumps(REAL))
    done = command("venv.receipt.json", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "report.html\n", "")
    read((tmp_path / "report.html").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "venv.receipt.json"]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.json", None, "cannot be read"),
        ("a.json", "{", "it is not JSON"),
        ("a.json", "[]", "no `passed` and `checks`"),
        ("a.json", '{"passed": true}', "no `passed` and `checks`"),
        ("./a", None, "does not exist"),
    ],
)
def test_what_is_no_receipt_is_exit_2_with_advice(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    done = command(name, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "hint: " in done.stderr
    assert not (tmp_path / "report.html").exists()


def test_changes_are_since_the_next_older_receipt_of_the_same_artifact(tmp_path: Path) -> None:
    at = ["2026-01-03", "2026-01-01", "2026-01-02", "2026-01-02"]
    for number, day in enumerate(at):
        receipt = changed(lambda one, day=day: one.update(verified_at=f"{day}T00:00:00+00:00"))  # type: ignore[misc]
        receipt["recipe"]["name"] = "other" if number == 3 else "pt_minimal"
        (tmp_path / f"{number}.json").write_text(json.dumps(receipt))
    found = gather([str(tmp_path / f"{number}.json") for number in range(4)], load_environment())
    assert [one.changes and one.changes.before[:25] for one in found] == [
        "the receipt of 2 Jan 2026",
        None,
        "the receipt of 1 Jan 2026",
        None,
    ]
    (one,) = gather([str(tmp_path / "0.json")], load_environment(), str(tmp_path / "3.json"))
    assert one.changes and one.changes.before.startswith(str(tmp_path / "3.json"))


@pytest.mark.parametrize("works", [True, False])
def test_open_starts_the_users_browser_and_says_when_there_is_none(tmp_path: Path, works: bool) -> None:
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\nprintf %s "$1" > {tmp_path}/opened\nexit {int(not works)}\n')
    browser.chmod(0o755)
    (tmp_path / "a.json").write_text(json.dumps(REAL))
    line = [sys.executable, "-m", "envbuild", "report", "a.json", "--open"]
    none = {"PATH": str(tmp_path), "DISPLAY": "", "WAYLAND_DISPLAY": ""}  # no other browser
    env = {**os.environ, **none, "BROWSER": f"{browser} %s", "PYTHONPATH": os.getcwd()}
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "report.html\n")
    assert (tmp_path / "opened").read_text() == (tmp_path / "report.html").as_uri()
    assert ("no browser could be started" in done.stderr) is not works


def test_a_receipt_cannot_name_a_file_as_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, has in (("pt_minimal", True), ("./pt_minimal", False), ("../pt_minimal", False), ("/etc/passwd", False)):
        (tmp_path / "a.json").write_text(json.dumps({**REAL, "recipe": {"name": name, "digest": ""}}))
        (one,) = gather(["a.json"], load_environment())
        assert (one.chain is not None) is has, name


def test_a_build_writes_the_page_of_a_failed_verification_and_of_a_passed_one(tmp_path: Path) -> None:
    place = tmp_path / "venv"
    failing = {**REAL, "passed": False}
    receipt_path(place).write_text(json.dumps(REAL))
    with pytest.raises(VerificationError), reported("", [place]):
        receipt_path(failed_path(place)).write_text(json.dumps(failing))
        raise VerificationError("one check failed")
    page = page_path(place)
    assert "Failed" in read(page.read_text()).text
    page.unlink()
    with reported("", [place]):
        receipt_path(place).write_text(json.dumps({**REAL, "seconds": 7.0}))
    text = " ".join(read(page.read_text()).text)
    assert "Passed" in text and "What changed" in text and "7.0 s" in text
    page.unlink()
    with pytest.raises(VerificationError), reported(str(tmp_path / "own.html"), [place]):
        raise VerificationError("no receipt was written")
    with reported(None, [place]):
        pass
    new = tmp_path / "build/recipe/target/venv"  # the folders are made by the build
    with reported("", [new]):
        new.parent.mkdir(parents=True)
        receipt_path(new).write_text(json.dumps(REAL))
    assert page_path(new).exists()
    two = [place, new.with_name("venv.sqsh")]
    receipt_path(two[1]).write_text(json.dumps(REAL))
    with reported("", two):
        pass
    assert "2 of 2 passed" in read((tmp_path / "report.html").read_text()).text
    assert not page.exists() and not (tmp_path / "own.html").exists()
    with pytest.raises(UsageError), reported(str(tmp_path / "a/b/c.html"), [place]):
        pass


def test_the_receipt_may_be_larger_than_others_but_not_endless(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_receipt_of(Path("/dev/zero"))


def test_a_report_of_no_receipt_is_refused_before_the_build(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "envbuild", "venv", "pt_minimal", "--no-verify", "--report"]
    done = subprocess.run(line, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and "--report needs a receipt" in done.stderr and not list(tmp_path.iterdir())


def test_the_size_of_a_package_is_the_sum_of_its_record() -> None:
    reader = interest("lib/python3.11/site-packages/a-1.dist-info/RECORD")
    assert reader is not None
    huge = "9" * 5000
    assert (
        reader(f"a/b.py,sha256=x,12\na/c.py,sha256=y,30\na-1.dist-info/RECORD,,\na/d,,{huge}\n".encode())["size"] == 42
    )
