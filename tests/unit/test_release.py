"""A release: addresses, pages, the contents of its files, the file for clusters without a network, the workflows."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lab.ci import valid
from lab.shellcheck import shellcheck
from lab.wheels import make_wheel
from ruamel.yaml import YAML

import envbuild

TOP = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((TOP / ".github/workflows").glob("*.yml"))
SITE = {"Repository": "https://git.example.org/a/b", "Documentation": "https://docs.example.org/b/"}


def load(name: str) -> ModuleType:
    loader = SourceFileLoader(f"tools_{name.replace('-', '_')}", str(TOP / "tools" / name))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    assert spec
    module = sys.modules[loader.name] = importlib.util.module_from_spec(spec)  # dataclasses look there
    sys.dont_write_bytecode, before = True, sys.dont_write_bytecode
    try:
        loader.exec_module(module)
    finally:
        sys.dont_write_bytecode = before
    return module


release = load("release")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files of a checkout that have addresses or tell how to install."""
    copy = tmp_path / "tree"
    shutil.copytree(TOP / "docs", copy / "docs", ignore=shutil.ignore_patterns("__pycache__", "pictures"))
    for name in ("README.md", "CITATION.cff", "pyproject.toml"):
        shutil.copy(TOP / name, copy)
    return copy


# Addresses and pages


def test_addresses_are_written_once_to_all_places_and_another_time_replaced(tree: Path) -> None:
    for repository in ("https://git.example.org/old/b", SITE["Repository"]):
        release.fill(tree, repository, SITE["Documentation"])
        release.fill(tree, repository, SITE["Documentation"])
    urls = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["urls"]
    assert SITE.items() <= urls.items() and len(urls) == 4
    cited = (tree / "CITATION.cff").read_text()
    assert cited.count(SITE["Repository"]) == 1 and valid("citation-file-format", cited)
    assert not [file for file in tree.rglob("*.*") if file.is_file() and b"git.example.org/old" in file.read_bytes()]


def test_without_an_address_none_is_invented(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    release.fill(tree, "", "https://docs.example.org/")
    for name in ("pyproject.toml", "CITATION.cff"):
        assert (tree / name).read_bytes() == (TOP / name).read_bytes()
    assert release.main(["fill"]) == 4 and "needs the address" in capsys.readouterr().err


def test_pages_tell_how_to_install_the_released_package_after_a_release(tree: Path) -> None:
    pages = [tree / "README.md", tree / "docs/install.md", tree / "docs" / "made-up.md"]
    block = "<!-- before the release -->\n\nOld {0}.\n\n<!-- since the release\n\nNew {0}.\n\n-->\n\n"
    pages[2].write_text("# Page\n\n" + block.format(1) + "Kept.\n\n<!-- other -->\n\n" + block.format(2))
    release.turn(tree)
    assert pages[2].read_text() == "# Page\n\nNew 1.\n\nKept.\n\n<!-- other -->\n\nNew 2.\n\n"
    for page in [tree / "README.md", *(tree / "docs").rglob("*.md")]:
        text = page.read_text()
        assert "the release\n" not in text and "the release -->" not in text and "no package index" not in text, page
    assert "\n    uv tool install envbuild && envbuild venv pt_cpu\n" in pages[0].read_text()
    assert "\n    uv tool install envbuild\n" in pages[1].read_text()
    before = {page: page.read_text() for page in pages}
    release.turn(tree)
    assert {page: page.read_text() for page in pages} == before


def test_an_index_and_a_release_get_pages_without_relative_links() -> None:
    for text, page in (
        ((TOP / "README.md").read_text(), "docs/install.md"),
        (release.section(envbuild.__version__), "docs/howto/locks.md#locks-of-the-shipped-recipes"),
    ):
        links = re.findall(r"\]\(([^)#][^)]*)\)", release.absolute(text, SITE["Repository"]))
        assert links and all(link.startswith("https://") for link in links)
        assert f"{SITE['Repository']}/blob/v{envbuild.__version__}/{page}" in links
        assert page not in release.absolute(text, "")


def test_the_version_is_in_one_place_and_pages_name_files_of_no_other() -> None:
    assert "version" in tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["dynamic"]
    named = {
        found
        for page in [TOP / "README.md", *(TOP / "docs").rglob("*.md"), *(TOP / "tools").iterdir()]
        for found in re.findall(r"envbuild(?:-|@v)(\d+\.\d+\.\d+)", page.read_text(encoding="utf-8"))
    }
    assert named == {envbuild.__version__}


def test_the_changelog_has_a_section_for_this_version_and_each_line_is_short() -> None:
    text = (TOP / "CHANGELOG.md").read_text()
    assert text.split("\n## ")[1].splitlines()[0] == envbuild.__version__
    assert "### Known limits" in release.section(envbuild.__version__)
    assert not [line for line in text.splitlines() if len(line) > 120]
    with pytest.raises(release.ReleaseError, match="no section 9"):
        release.section("9")


def test_a_tag_of_another_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert release.main(["notes", "--tag", "v9.9"]) == 4
    assert "the tag is v9.9, and envbuild/__init__.py has the version" in capsys.readouterr().err


# The wheel and the source archive


def test_the_packages_must_have_the_tracked_files_and_no_others() -> None:
    tracked = [
        "envbuild/a.py",
        "recipes/r/recipe.toml",
        "sites/s.toml",
        "ddp_train/t.py",
        "Dockerfile.cpu",
        "LICENSE",
        "tests/unit/test_a.py",
        "docs/index.md",
        ".github/workflows/test.yml",
        "tools/release",
        "pyproject.toml",
    ]
    in_wheel = {release.bundled(name) for name in tracked} - {""}
    assert in_wheel == {"envbuild/a.py", *(f"envbuild/_bundled/{name}" for name in tracked[1:4])}
    assert [name for name in tracked if release.packed(name)] == [*tracked[:4], "LICENSE", "pyproject.toml"]
    release.compare("wheel", in_wheel, in_wheel)
    with pytest.raises(release.ReleaseError, match=r"lacks envbuild/a\.py; has envbuild/__pycache__/a\.pyc"):
        release.compare("wheel", in_wheel - {"envbuild/a.py"} | {"envbuild/__pycache__/a.pyc"}, in_wheel)


# The file for clusters without a network


@pytest.fixture(scope="module")
def offline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked file: a stand-in for each package, and an environment in place of a whole Python."""
    work = tmp_path_factory.mktemp("offline")
    made, index = work / "made", work / "index"
    program = "import dep\nimport sys\nprint('stand-in', dep.__version__, *sys.argv[1:])\n"
    wheel = make_wheel(
        made,
        "envbuild",
        "7.5",
        requires=["dep>=2", "uv", "extra; extra == 'x'"],
        files={"envbuild/__main__.py": program.encode()},
    )
    real = shutil.which("uv") or Path(sys.executable).with_name("uv")
    make_wheel(index, "uv", files={"uv-1.0.data/scripts/uv": f'#!/bin/sh\nexec {real} "$@"\n'.encode()})
    make_wheel(index, "dep", "1.0")
    make_wheel(index, "dep", "2.1")
    venv.create(work / "python", symlinks=False)
    env = {
        **os.environ,
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(index),
        "UV_NO_INDEX": "1",
        "UV_FIND_LINKS": str(index),
        "UV_NO_CONFIG": "1",
    }
    env = {name: value for name, value in env.items() if name not in ("PIP_EXTRA_INDEX_URL", "PIP_INDEX_URL")}
    line = [TOP / "tools/offline-bundle", wheel, "--python", work / "python", "--out", work / "dist"]
    done = subprocess.run([sys.executable, *line], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    file = Path(done.stdout.strip())
    assert file == work / f"dist/envbuild-7.5-linux-{os.uname().machine}.tar" and list(file.parent.iterdir()) == [file]
    with tarfile.open(file) as archive:
        assert {(one.uid, one.mtime) for one in archive} == {(0, 0)}
        assert not [one.name for one in archive if one.mode & 0o022]
    subprocess.run(["tar", "-xf", file, "-C", work], check=True)
    return work / file.stem


def install(offline: Path, *arguments: str | Path, home: Path) -> subprocess.CompletedProcess[str]:
    """Run the installer as a cluster does: no program in PATH, and sources of the user's that must not count."""
    env = {"HOME": str(home), "PATH": "/nowhere", "UV_INDEX_URL": "http://127.0.0.1:1/", "PYTHONPATH": "/nowhere"}
    line = ["/bin/sh", offline / "install", *arguments]
    return subprocess.run(line, env=env, capture_output=True, text=True)


def test_the_file_has_what_is_locked_and_nothing_else(offline: Path) -> None:
    names = sorted(one.name.split("-")[0] for one in (offline / "wheels").iterdir())
    assert names == ["dep", "envbuild", "uv"]
    locked = (offline / "requirements.txt").read_text()
    assert "dep==2.1" in locked and "extra" not in locked and locked.count("--hash=sha256:") == 3


def test_sh_alone_installs_it_and_a_second_time_replaces_it(offline: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with blank/envbuild"
    for said in ("one", "two"):
        done = install(offline, folder, home=tmp_path)
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == str(folder / "bin/envbuild")
        ran = subprocess.run([folder / "bin/envbuild", said], capture_output=True, text=True, env={})
        assert ran.stdout == f"stand-in 2.1 {said}\n", ran.stderr
        assert [one.name for one in folder.parent.iterdir()] == ["envbuild"], "nothing is left beside it"


def test_without_a_folder_it_goes_to_the_home(offline: Path, tmp_path: Path) -> None:
    assert install(offline, home=tmp_path).returncode == 0
    assert (tmp_path / ".local/share/envbuild/bin/envbuild").exists()


def test_a_changed_wheel_is_refused_and_the_old_installation_stays(offline: Path, tmp_path: Path) -> None:
    assert install(offline, tmp_path / "e", home=tmp_path).returncode == 0
    broken = tmp_path / "broken"
    shutil.copytree(offline, broken, symlinks=True)
    make_wheel(broken / "wheels", "dep", "2.1", files={"dep/evil.py": b""})
    done = install(broken, tmp_path / "e", home=tmp_path)
    assert done.returncode == 4 and "is as it was" in done.stderr
    assert subprocess.run([tmp_path / "e/bin/envbuild"], capture_output=True).stdout == b"stand-in 2.1\n"


def test_a_folder_with_something_else_is_left_alone(offline: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/file").write_text("kept")
    done = install(offline, tmp_path / "mine", home=tmp_path)
    assert done.returncode == 2 and "holds something else" in done.stderr
    assert (tmp_path / "mine/file").read_text() == "kept"
    assert install(offline, "--help", home=tmp_path).returncode == 2


def test_a_python_that_does_not_start_is_named(offline: Path, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(offline, foreign, symlinks=True)
    program = foreign / "python/bin/python3"
    program.unlink()
    program.write_bytes(b"\x7fELF nothing")
    program.chmod(0o755)
    done = install(foreign, tmp_path / "e", home=tmp_path)
    assert done.returncode == 6 and f"It is for Linux on {os.uname().machine} with glibc" in done.stderr


def test_a_python_for_another_processor_is_refused(tmp_path: Path) -> None:
    wheel = make_wheel(tmp_path, "envbuild", "7.5")
    (tmp_path / "python/bin").mkdir(parents=True)
    (tmp_path / "python/lib/python3.12").mkdir(parents=True)
    shutil.copy(Path(sys.executable).resolve(), tmp_path / "python/bin/python3")
    other = {"x86_64": "aarch64", "aarch64": "x86_64"}[os.uname().machine]
    line = [TOP / "tools/offline-bundle", wheel, "--python", tmp_path / "python", "--arch", other, "--out", tmp_path]
    done = subprocess.run([sys.executable, *line], capture_output=True, text=True)
    assert done.returncode == 1 and f"is not for {other}" in done.stderr and not list(tmp_path.glob("*.tar"))


# Files that GitHub and pre-commit read


@pytest.mark.parametrize("name", ["CHANGELOG.md", "SECURITY.md"])
def test_links_of_pages_outside_of_the_site_lead_somewhere(name: str) -> None:
    targets = re.findall(r"\]\((?!https?:|#)([^)#]+)", (TOP / name).read_text())
    assert targets and all((TOP / target).exists() for target in targets)


def read(file: Path) -> Any:
    return YAML(typ="safe").load(file.read_text())


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.name)
def test_a_workflow_is_valid_pinned_and_has_no_more_rights_than_it_needs(file: Path, tmp_path: Path) -> None:
    assert valid("github-workflows", file.read_text())
    loaded = read(file)
    assert loaded["permissions"] == {"contents": "read"}
    for name, job in loaded["jobs"].items():
        assert job["timeout-minutes"] <= 120, name
        for number, step in enumerate(job["steps"]):
            assert "${{ github.event" not in step.get("run", "") and "secrets." not in step.get("run", "")
            script = tmp_path / f"{name}-{number}.sh"
            text = re.sub(r"\$\{\{.*?\}\}", "value", step.get("run", ""))
            script.write_text(f"#!/usr/bin/env bash\nset -eo pipefail\n{text}")
            assert shellcheck("-S", "warning", script) == ""
    for line in file.read_text().splitlines():
        # A tag can be moved to other code; dependabot keeps the digest and the version behind it up to date.
        if re.match(r"\s*(- )?uses:", line):
            assert re.search(r"uses: [\w-]+/[\w.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line), line


def test_one_action_has_one_digest_in_all_workflows() -> None:
    pins = {tuple(pin) for file in WORKFLOWS for pin in re.findall(r"uses: (\S+)@(\S+ # \S+)", file.read_text())}
    assert len(pins) == len({action for action, _ in pins}) >= 8


def test_only_the_release_and_the_site_get_tokens_and_a_manual_run_publishes_nothing() -> None:
    rights = {
        (file.name, name): {right for right, value in job.get("permissions", {}).items() if value == "write"}
        for file in WORKFLOWS
        for name, job in read(file)["jobs"].items()
    }
    assert {place for place, rights in rights.items() if "id-token" in rights} == {
        ("release.yml", "publish"),
        ("docs.yml", "deploy"),
    }
    jobs = read(TOP / ".github/workflows/release.yml")["jobs"]
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'" and jobs["publish"]["environment"] == "pypi"
    assert "publish" in jobs["announce"]["needs"]


def test_the_workflow_runs_each_step_of_the_release() -> None:
    text = "\n".join(file.read_text() for file in WORKFLOWS)
    used = {
        word
        for line in re.findall(r"^ *(?:- run: )?tools/release ([a-z ]+)", text, re.MULTILINE)
        for word in line.split()
    }
    assert used == set(release.STEPS)


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        ("dependabot", ".github/dependabot.yml"),
        ("github-issue-config", ".github/ISSUE_TEMPLATE/config.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/diagnosis.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/fault.yml"),
        ("github-issue-forms", ".github/ISSUE_TEMPLATE/request.yml"),
        ("citation-file-format", "CITATION.cff"),
    ],
)
def test_files_have_the_form_that_their_readers_demand(schema: str, name: str) -> None:
    assert valid(schema, (TOP / name).read_text())


def test_pre_commit_and_the_tests_run_the_same_checks() -> None:
    (repository,) = read(TOP / ".pre-commit-config.yaml")["repos"]
    (hook,) = repository["hooks"]
    assert repository["repo"] == "local" and hook["entry"] == "tests/check" and hook["always_run"]
    assert re.search(r"^ *tests/check( |$)", (TOP / "tests/run").read_text(), re.MULTILINE)


def test_the_scripts_of_the_release_have_no_findings() -> None:
    assert shellcheck(TOP / "tools/offline_install.sh", TOP / "tests/check") == ""
