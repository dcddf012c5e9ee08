"""tools/refresh: the rows of data/releases.toml from recorded metadata of releases, and judgements that rest on them.

data/refresh.json has names, dates and metadata of files as PyPI served them on 2026-11-28, and torch/version.py,
without descriptions and optional requirements. The libraries are made up here.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import tomllib
import zipfile
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import IO, Any

import pytest
from ruamel.yaml import YAML
from unit.gpu_files import fatbin
from unit.test_release import load

from envbuild.cache.http import RequestFailed
from envbuild.compat.judge import gpu_findings, judge
from envbuild.compat.rows import UNKNOWN, load_rows, matches
from envbuild.compat.stack import Stack
from envbuild.store.client import RangeFile
from envbuild.store.sources import Link

TOP = Path(__file__).resolve().parents[2]
tool = load("refresh")
TODAY = date(2026, 11, 28)
RECORDED = json.loads((Path(__file__).parent / "data/refresh.json").read_text(encoding="utf-8"))
CODE = b"".join([fatbin("sm_80", "sm_90")] * 60 + [fatbin("sm_90a")])
Rows = dict[tuple[str, ...], dict[str, Any]]


class RecordedIndex:
    """The recorded files as an index; `unreadable` are the names of files that it refuses to send."""

    def __init__(self) -> None:
        self.unreadable: set[str] = set()
        self.builds: dict[str, set[str]] = {}
        self.tags: dict[str, str] = {}
        self.code_read = 0

    def links(self, project: str) -> list[Link]:
        return [
            Link(one["filename"], one["filename"], None, one["requires_python"], one["uploaded"])
            for one in RECORDED.get(project, [])
        ]

    def _file(self, link: Link) -> dict[str, str]:
        if link.filename in self.unreadable:
            raise RequestFailed("HTTP 503")
        return next(one for files in RECORDED.values() for one in files if one["filename"] == link.filename)

    def open(self, link: Link) -> IO[bytes]:
        file = self._file(link)
        wheel = io.BytesIO()
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(
                f"{'-'.join(link.filename.split('-')[:2])}.dist-info/METADATA", file["metadata"] + "\n\nlong"
            )
            if "version_py" in file:
                archive.writestr("torch/version.py", file["version_py"])
                archive.writestr("torch/lib/libtorch_cuda.so", CODE)
                self.code_read += 1
        return wheel

    def metadata(self, link: Link) -> str:
        return self._file(link)["metadata"]

    def torch_versions(self, build: str) -> set[str] | None:
        return self.builds.get(build)

    def newest_tag(self, url: str) -> str | None:
        return self.tags.get(url)


@pytest.fixture
def index() -> RecordedIndex:
    return RecordedIndex()


def refreshed(index: RecordedIndex, path: Path, *, write: bool = True) -> tuple[int, Rows]:
    """Return the exit code of a refresh, and the rows of the file."""
    code = tool.refresh(index, path, TODAY, lambda _: None, write=write)
    tables = tomllib.loads(path.read_text()) if path.exists() else {}
    rows = {(row["version"], row["arch"]): row for row in tables.get("torch", [])}
    return code, rows | {(row["name"], row["version"]): row for row in tables.get("packages", [])}


def test_a_release_states_what_it_is_built_for_and_what_it_requires(index: RecordedIndex, tmp_path: Path) -> None:
    code, rows = refreshed(index, tmp_path / "rows.toml")
    assert code == 0
    assert rows["2.15.0", "x86_64"] == {
        "version": "2.15.0",
        "arch": "x86_64",
        "cuda": "13.2",
        "builds": [UNKNOWN],
        "python": ["3.11", "3.12", "3.13", "3.14", "3.15"],
        "glibc": "2.28",
        "nccl": "2.30.7",
        "cudnn": "9.26.0.51",
        "triton": "~=3.9.0",
        "source": "torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "date": date(2026, 10, 28),
        "code": {"libtorch_cuda.so": ["sm_80", "sm_90"]},  # sm_90a is in one container of 61
    }
    # A wheel for CPUs requires nothing of CUDA; a tag older than PEP 600 does not state the glibc.
    old = rows["2.6.0", "aarch64"]
    assert (old["cuda"], old["nccl"], old["cudnn"], old["triton"], old["glibc"]) == ("cpu", "", "", "", "2.28")
    assert rows["2.6.0", "x86_64"]["glibc"] == UNKNOWN and rows["2.6.0", "x86_64"]["nccl"] == "2.21.5"
    assert rows["2.10.0", "x86_64"]["cuda"] == "12.8" and "code" not in rows["2.15.0", "aarch64"]


def test_packages_state_their_torch_and_their_pythons(index: RecordedIndex, tmp_path: Path) -> None:
    _, rows = refreshed(index, tmp_path / "rows.toml")
    vision = rows["torchvision", "0.29.2"]  # the newest of its series
    assert ("torchvision", "0.29.1") not in rows
    assert vision["torch"] == ">=2.14.0" and "wheels" not in vision
    assert (
        rows["transformers", "5.24.0"]["torch"] == ""
        and rows["transformers", "5.24.0"]["requires_python"] == ">=3.11.0"
    )
    # One of triton 3.9's wheels is for every CPython from 3.12 on (abi3).
    assert rows["triton", "3.8.0"]["wheels"][-1] == "3.14" and "wheels" not in rows["triton", "3.9.0"]


def test_a_second_run_writes_the_same_bytes_and_a_removed_row_comes_back(index: RecordedIndex, tmp_path: Path) -> None:
    path = tmp_path / "rows.toml"
    refreshed(index, path)
    text, read = path.read_bytes(), index.code_read
    assert refreshed(index, path)[0] == 0 and path.read_bytes() == text
    assert refreshed(index, path, write=False)[0] == 0
    kept = [part for part in text.decode().split("\n[[") if 'version = "2.14.1"\narch = "x86_64"' not in part]
    path.write_text("\n[[".join(kept))
    assert len(path.read_bytes()) < len(text)
    assert refreshed(index, path, write=False)[0] == 1 and len(path.read_bytes()) < len(text), "--check writes nothing"
    refreshed(index, path)
    assert path.read_bytes() == text and index.code_read > read


def test_the_day_is_renewed_when_rows_change_or_it_is_old(
    index: RecordedIndex, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "rows.toml"
    refreshed(index, path)
    for today, kept in ((date(2026, 12, 25), True), (date(2026, 12, 26), False)):
        tool.refresh(index, path, today, lambda _: None, write=True)
        assert tomllib.loads(path.read_text())["read"] == (TODAY if kept else today)


def test_what_cannot_be_read_is_unknown_or_what_the_file_has(
    index: RecordedIndex, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.toml"
    index.unreadable = {"torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl"}
    _, rows = refreshed(index, path)
    assert {rows["2.15.0", "x86_64"][name] for name in ("cuda", "nccl", "cudnn", "triton")} == {UNKNOWN}
    assert "gap: torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl: HTTP 503" in capsys.readouterr().out
    index.unreadable = set()
    _, rows = refreshed(index, path)
    text = path.read_bytes()
    assert rows["2.15.0", "x86_64"]["cuda"] == "13.2"
    index.unreadable = {"torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl"}
    refreshed(index, path)
    assert path.read_bytes() == text, "a failure takes nothing away"


def test_a_release_that_needs_a_row_by_hand_is_a_gap(
    index: RecordedIndex, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    index.tags = {"https://github.com/ofiwg/libfabric": "2.6.0", "https://github.com/aws/aws-ofi-nccl": "1.21.1"}
    refreshed(index, tmp_path / "rows.toml")
    assert "by hand" not in capsys.readouterr().out
    index.tags["https://github.com/ofiwg/libfabric"] = "9.1.0"
    monkeypatch.setattr(tool, "load_rows", lambda: replace(load_rows(), nccl=()))
    refreshed(index, tmp_path / "rows.toml")
    said = capsys.readouterr().out
    assert "gap: libfabric 9.1.0: compatibility.toml has no row" in said and "gap: nccl 2.32.3: " in said


def test_other_indexes_and_tags_count_where_they_are_reached(index: RecordedIndex, tmp_path: Path) -> None:
    index.builds = {"cu126": {"2.14.1 x86_64"}, "cu130": {"2.14.1 x86_64", "2.14.1 aarch64"}}
    index.tags = {"https://github.com/ofiwg/libfabric": "2.6.0"}
    path = tmp_path / "rows.toml"
    _, rows = refreshed(index, path)
    assert rows["2.14.1", "x86_64"]["builds"] == ["12.6", "13.0"] and rows["2.14.1", "aarch64"]["builds"] == ["13.0"]
    assert tomllib.loads(path.read_text())["tags"] == {"aws-ofi-nccl": UNKNOWN, "libfabric": "2.6.0"}
    index.builds, index.tags = {}, {}
    _, rows = refreshed(index, path)
    assert rows["2.14.1", "x86_64"]["builds"] == ["12.6", "13.0"], "an index that is down takes nothing away"
    assert tomllib.loads(path.read_text())["tags"]["libfabric"] == "2.6.0"


def test_an_index_without_torch_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Empty(RecordedIndex):
        def links(self, project: str) -> list[Link]:
            return []

    path = tmp_path / "rows.toml"
    path.write_text("read = 2026-01-01\n")
    with pytest.raises(RequestFailed, match=r"no torch 2\.6\.0 or newer"):
        refreshed(Empty(), path)
    assert path.read_text() == "read = 2026-01-01\n"


def test_a_wheel_is_read_by_few_ranges() -> None:
    wheel, large = io.BytesIO(), bytes(range(256)) * (1 << 13)
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("torch/lib/libtorch_cuda.so", large)
        archive.writestr("torch/version.py", "cuda = '13.2'")
    data, asked = wheel.getvalue(), list[tuple[int, int]]()

    def ask(start: int, end: int) -> bytes:
        asked.append((start, end))
        return data[start:end]

    file = io.BufferedReader(RangeFile(len(data), ask), 1 << 13)
    with zipfile.ZipFile(file) as archive:
        assert archive.read("torch/version.py") == b"cuda = '13.2'"
        assert sum(end - start for start, end in asked) < 300_000
        before = len(asked)
        assert archive.read("torch/lib/libtorch_cuda.so") == large
        assert len(asked) - before < 9, "ranges grow"


# The workflow


def steps() -> dict[str, str]:
    """Return the scripts of the workflow that runs the tool, by a word of each."""
    workflow = YAML(typ="safe").load((TOP / ".github/workflows/refresh.yml").read_text())
    scripts = [step["run"] for step in workflow["jobs"]["read"]["steps"] if "run" in step]
    return {word: next(one for one in scripts if word in one) for word in ("tools/refresh", "envbuild lock", "gh pr")}


def run(script: str, folder: Path, **variables: str) -> None:
    environment = {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "HOME": str(folder), **variables}
    subprocess.run(["bash", "-eo", "pipefail", "-c", script], cwd=folder / "work", env=environment, check=True)


def test_the_workflow_opens_a_pull_request_with_the_difference(tmp_path: Path) -> None:
    work, programs = tmp_path / "work", tmp_path / "bin"
    programs.mkdir()
    fakes = {
        "gh": 'printf "%s\n" "$@" > ../asked; cp body.md ../body',
        # pt_bad is half locked when it fails.
        "envbuild": 'echo new > "recipes/$2/lock"; echo more > "recipes/$2/more"; [ "$2" != pt_bad ]',
        "python": 'echo "+ torch 9.0 x86_64"; echo new > envbuild/data/releases.toml',
    }
    for name, script in fakes.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{script}\n")
        (programs / name).chmod(0o755)
    for name in ("envbuild/data/releases.toml", "recipes/pt_good/lock", "recipes/pt_bad/lock"):
        (work / name).parent.mkdir(parents=True)
        (work / name).write_text("old\n")
    run("git init -q --bare -b main ../origin; git init -q -b main; git remote add origin ../origin", tmp_path)
    run("git add .; git -c user.name=a -c user.email=a@b commit -qm a; git push -q origin HEAD", tmp_path)
    run(steps()["tools/refresh"], tmp_path, GITHUB_OUTPUT=str(tmp_path / "output"))
    assert (tmp_path / "output").read_text() == "changed=true\n"
    run(steps()["envbuild lock"], tmp_path, RECIPES="pt_good pt_bad")
    run(steps()["gh pr"], tmp_path, RECIPES="pt_good pt_bad", BRANCH="refresh-7")
    changed = subprocess.run(
        ["git", "-C", tmp_path / "origin", "diff", "--name-only", "main", "refresh-7"], capture_output=True, text=True
    )
    assert changed.stdout.split() == ["envbuild/data/releases.toml", "recipes/pt_good/lock", "recipes/pt_good/more"]
    body = (tmp_path / "body").read_text()
    assert "+ torch 9.0 x86_64" in body and "- pt_bad keeps its locks" in body and "pt_good" not in body
    assert (tmp_path / "asked").read_text().startswith("pr\ncreate\n")


# The shipped rows


def test_the_shipped_file_is_as_the_tool_writes_it() -> None:
    text = (TOP / "envbuild/data/releases.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    assert tool.render(tables, tables["read"]) == text


def test_rows_by_hand_agree_with_those_of_releases() -> None:
    rows = load_rows()
    assert rows.read >= "2026-11-28" and rows.by_hand >= "2026-11-22"
    for release in rows.releases:
        for row in rows.torch:
            if row.arch == release.arch and matches(release.version, row.versions):
                assert row.default == release.cuda, release
                assert row.glibc in ("", release.glibc), release
                assert release.cuda == "cpu" or (row.nccl == "wheel") is bool(release.nccl), release
        pin = rows.pin(release.version, release.cuda)
        assert release.cuda == "cpu" or (pin and pin.nccl == release.nccl), release


BARE = Stack("x86_64", "3.13", "2.28", cuda="13.2", torch="2.15.0", torch_origin="recipe")


def texts(stack: Stack, status: str) -> list[str]:
    return [f"{one.subject}: {one.text}" for one in judge(stack) if one.status == status]


def test_a_release_without_a_row_by_hand_is_judged_by_its_wheels() -> None:
    rows = load_rows()
    alone = replace(rows, torch=tuple(row for row in rows.torch if not matches("2.15.0", row.versions)))
    (said,) = [one for one in judge(BARE, alone) if one.subject == "torch"]
    assert said.status == "good" and "plain wheel of the default index" in said.text
    assert said.source == "torch-2.15.0-cp311-cp311-manylinux_2_28_x86_64.whl" and said.date == "2026-10-28"
    (other,) = [one for one in judge(replace(BARE, cuda="12.6"), alone) if one.subject == "torch"]
    assert (
        other.status == "unknown" and "built for CUDA 13.2 on x86_64; whether for 12.6 too is not known" in other.text
    )
    old = replace(BARE, nccl="2.29.7", nccl_origin="wheel")
    assert any("torch 2.15.0 for CUDA 13.2 pins 2.30.7" in one for one in texts(old, "bad"))
    assert not texts(replace(old, nccl="2.32.3"), "bad")
    (gpus,) = gpu_findings(BARE, ("v100",), {})
    assert gpus.status == "bad" and "sm_70" in gpus.text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"python": "3.10"}, "torch 2.15.0 has wheels for Python 3.11 to 3.15 on x86_64, not 3.10"),
        ({"packages": (("torchvision", "0.28.0"),)}, "torchvision 0.28.0 requires torch==2.13.0, here is 2.15.0"),
        ({"python": "3.15", "packages": (("triton", "3.8.0"),)}, "triton 3.8.0 is for Python 3.10 to 3.14, not 3.15"),
        ({"python": "3.10", "packages": (("transformers", "5.24.0"),)}, "transformers 5.24.0 is for Python >=3.11.0"),
    ],
)
def test_what_releases_require_is_judged(change: dict[str, Any], said: str) -> None:
    found = [one for one in judge(replace(BARE, **change)) if said in one.text]
    assert [one.status for one in found] == ["bad"] and found[0].fix and found[0].source
    fits = {"packages": (("torchvision", "0.29.2"), ("triton", "3.9.0"), ("transformers", "5.24.0"))}
    assert not texts(replace(BARE, python="3.15", **fits), "bad")  # type: ignore[arg-type]


def test_a_torch_newer_than_all_rows_is_said_once() -> None:
    stack = replace(BARE, torch="2.99.0", torch_origin="lock", nccl="2.40.1", nccl_origin="lock")
    (said,) = texts(stack, "unknown")
    newest = load_rows().newest_torch
    assert said.startswith(f"torch: torch 2.99.0 is newer than torch {newest}, the newest that this envbuild knows (20")
