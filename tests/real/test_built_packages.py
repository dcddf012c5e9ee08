"""Packages without a wheel: locked from a git repository, an index and URLs, and built the same in two stores."""

from __future__ import annotations

import functools
import http.server
import json
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from lab.wheels import make_recipe, make_wheel
from sdists import commit, make_sdist, sha256

from envbuild.recipe.targets import host_arch

from .conftest import Command

SCM = """\
[build-system]
requires = ["setuptools>=77", "setuptools-scm>=8"]
build-backend = "setuptools.build_meta"
[project]
name = "lab-scm"
dynamic = ["version"]
[tool.setuptools]
py-modules = ["lab_scm"]
[tool.setuptools_scm]
"""
# Each module says what its build could import.
SEEN = "import lab_sdist, lab_url, lab_wheel, lab_scm, json; print(json.dumps([lab_sdist.SEEN, lab_url.SEEN]))"


@contextmanager
def served(folder: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing: the client's side of it is what counts."""

    handler = functools.partial(Quiet, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Command, Path]]:
    """The command, and a recipe of four packages without a wheel, one of them on an index of the target."""
    files = tmp_path / "files"
    archive = make_sdist(files / "simple/lab-sdist", "lab-sdist", "1.2", requires=["lab-wheel"])
    page = f'<a href="{archive.name}#sha256={sha256(archive)}">{archive.name}</a>'
    (files / "simple/lab-sdist/index.html").write_text(page)
    url = make_sdist(files, "lab-url", build=["setuptools<80"])
    wheel = make_wheel(files, "lab-wheel")
    repository = tmp_path / "repository"
    commit(repository, {"pyproject.toml": SCM, "lab_scm.py": "", "LICENSE": "Free\n"}, "v2.5")
    commit(repository, {"more.txt": "of another commit\n"})
    with served(files) as address:
        lines = [
            f"lab-scm @ git+{repository.as_uri()}@v2.5",
            "lab-sdist>=1",
            f"lab-url @ {address}/{url.name}#sha256={sha256(url)}",
            f"lab-wheel @ {address}/{wheel.name}#sha256={sha256(wheel)}",
        ]
        targets = f'[targets.cpu-{host_arch()}]\nindexes = ["{address}/simple"]\n[verify]\ntrainer = false\n'
        make_recipe(tmp_path / "recipes", "r", lines, extra='build = ["lab-sdist"]', targets=targets)
        yield Command(tmp_path, {"ENVBUILD_STORE": str(tmp_path / "store")}), repository


def test_they_are_locked_and_built_the_same_in_two_stores(site: tuple[Command, Path]) -> None:
    command, repository = site
    done = command("lock", "r", "--wheels")
    assert done.returncode == 0, done.stderr
    text = (command.folder / f"recipes/r/cpu-{host_arch()}.requirements.txt").read_text()
    rows = {row["name"]: row for row in (json.loads(line[9:]) for line in text.splitlines() if line[:9] == "# built: ")}
    assert {name: row["version"] for name, row in rows.items()} == {
        "lab-scm": "2.5",
        "lab-sdist": "1.2",
        "lab-url": "1.0",
    }
    assert "lab-wheel==1.0" in text and "127.0.0.1" not in text and str(command.folder) not in text
    assert {"setuptools", "setuptools-scm"} <= rows["lab-scm"]["build"].keys()
    assert rows["lab-url"]["build"]["setuptools"][0].startswith("79.") and not rows["lab-sdist"]["build"]
    first = command.json("venv", "r", "--locked", "--out", "first")
    python = command.folder / "first/bin/python"
    seen = json.loads(subprocess.run([python, "-c", SEEN], capture_output=True, text=True, check=True).stdout)
    assert seen[0] == ["pip", ""], "an isolated build sees pip alone"
    assert seen[1] == ["pip", "setuptools", ""]
    steps = [step[:3] for step in _steps(command)]
    assert ["source", "lab-scm", "2.5"] in steps and ["wheel", "lab-wheel", "1.0"] in steps
    bundled = command("bundle", "r", "--out", "bundle", "--no-tools", ENVBUILD_STORE=str(command.folder / "other"))
    assert bundled.returncode == 0, bundled.stderr
    # A commit that is gone, and a file that is another one, are named; nothing is built of them.
    shutil.rmtree(repository)
    gone = command("venv", "r", "--locked", "--out", "gone", ENVBUILD_STORE=str(command.folder / "third"))
    assert gone.returncode == 4 and "lab-scm 2.5: no source has its archive" in gone.stderr, gone.stderr
    # The bundle has the archives, fetched again, and the wheels of their builds.
    line = ("venv", "bundle/recipes/r", "--locked", "--offline", "--no-verify", "--out", "again")
    own = {"ENVBUILD_STORE": str(command.folder / "empty"), "ENVBUILD_VAULT": f"oci:{command.folder}/bundle"}
    again = command.json(*line, **own)
    assert again["digest"] == first["digest"]
    for path in sorted((command.folder / "first/lib").rglob("lab_*")):
        if path.is_file() and path.suffix != ".pyc":  # the verification's imports make these
            other = command.folder / "again" / path.relative_to(command.folder / "first")
            assert other.read_bytes() == path.read_bytes(), path


def _steps(command: Command) -> list[list[str]]:
    plan = command.json("plan", "r", "--locked")
    return [[step["kind"], step["name"], step["version"]] for step in plan["layers"]]


def test_what_cannot_be_built_is_refused(site: tuple[Command, Path]) -> None:
    command, _ = site
    recipe = command.folder / "recipes/r/recipe.toml"
    recipe.write_text(recipe.read_text().replace("@v2.5", "@v9"))
    done = command("lock", "r", "--wheels")
    assert done.returncode == 3 and "v9" in done.stderr, done.stderr
    recipe.write_text(recipe.read_text().replace("@v9", "@v2.5").replace('["lab-sdist"]', '["lab-sdist", "other"]'))
    done = command("lock", "r", "--wheels")
    assert done.returncode == 3 and "nothing requires 'other'" in done.stderr, done.stderr
