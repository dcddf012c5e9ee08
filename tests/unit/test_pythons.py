"""Which Python a build gets: of the host, of the store, or one that uv would download."""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from pathlib import Path

import pytest
from lab.wheels import make_recipe, make_wheel

from envbuild import pythons
from envbuild.base.errors import HostError, LockError
from envbuild.build.folder import prepare_folder
from envbuild.contract.kinds import VENV
from envbuild.environment import Environment
from envbuild.imports.origin import compose_here
from envbuild.imports.statement import Statement
from envbuild.interpreter import HostPython
from envbuild.lock.lifecycle import LockUse
from envbuild.pythons import OfferedPython, choose_python, keep_python
from envbuild.recipe.load import load_recipe
from envbuild.recipe.targets import Target
from envbuild.run_environment import load_environment
from envbuild.store.usage import choose, items, remove

MACHINE = platform.machine()


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # uv finds the Python of .venv in the current folder


def environment_of(folder: Path, site: str = "", **variables: str) -> Environment:
    """An environment without a Python on PATH; its store exists."""
    (folder / "site.toml").write_text(site)
    (folder / "store").mkdir(exist_ok=True)
    given = {"HOME": str(folder), "PATH": str(folder), "ENVBUILD_SITE": str(folder / "site.toml")}
    return load_environment({**given, "ENVBUILD_STORE": str(folder / "store"), **variables})


def list_of_downloads(folder: Path, url: str, version: str = "3.12.9") -> dict[str, str]:
    """The variable that gives uv a list with one Python, at `url`."""
    major, minor, patch = map(int, version.split("."))
    row = {
        "name": "cpython",
        "arch": {"family": MACHINE, "variant": None},
        "os": "linux",
        "libc": "gnu",
        "major": major,
        "minor": minor,
        "patch": patch,
        "prerelease": "",
        "url": url,
        "sha256": "0" * 64,
        "variant": None,
        "build": "1",
    }
    (folder / "list.json").write_text(json.dumps({f"cpython-{version}-linux-{MACHINE}-gnu": row}))
    return {"UV_PYTHON_DOWNLOADS_JSON_URL": str(folder / "list.json")}


def put_in_store(environment: Environment, version: str, *, works: bool = True) -> Path:
    """A stand-in for a Python in the store, which says its version."""
    root = environment.store.root / "interpreters" / f"cpython-{version}-linux-{MACHINE}-gnu"
    program = root / "bin" / "python{}.{}".format(*version.split("."))
    program.parent.mkdir(parents=True)
    said = f"echo cpython-{version.replace('.', '')[:3]} {version} cb0d0d0a; echo {program}" if works else "exit 1"
    program.write_text(f"#!/bin/sh\n{said}\n")
    program.chmod(0o755)
    return root


def test_envbuild_s_own_python_serves_its_version_and_is_remembered(tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    wanted = "{}.{}".format(*sys.version_info)
    found = choose_python(wanted, environment, offline=True)
    assert isinstance(found, HostPython) and found.version == platform.python_version() and found.minor == wanted
    environment.__dict__["uv"] = "/nonexistent/uv"  # nobody is asked again
    assert choose_python(wanted, environment, offline=True) == found


def test_the_newest_of_the_store_that_runs_is_taken(tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    for version, works in (("3.99.9", True), ("3.99.10", True), ("3.99.11", False), ("3.9.1", True)):
        put_in_store(environment, version, works=works)
    found = choose_python("3.99", environment, offline=True)
    assert isinstance(found, HostPython) and (found.version, found.minor) == ("3.99.10", "3.99")
    assert found.build == f"cpython-3.99.10-linux-{MACHINE}-gnu"


def test_a_file_is_offered_even_offline_and_a_missing_one_is_not(tmp_path: Path) -> None:
    archive = tmp_path / "python.tar.gz"
    environment = environment_of(tmp_path, **list_of_downloads(tmp_path, archive.as_uri()))
    with pytest.raises(HostError, match=f"there is no file {archive}") as refused:
        choose_python("3.12", environment, offline=True)
    assert refused.value.hint and f"`{environment.uv} python install 3.12`" in refused.value.hint
    archive.touch()
    found = choose_python("3.12", environment, offline=True)
    assert isinstance(found, OfferedPython) and (found.version, found.mirror) == ("3.12.9", "")
    assert not (environment.store.root / "interpreters").exists()


@pytest.mark.parametrize(
    ("site", "variables", "why"),
    [
        ('[python]\ndownloads = "never"\n', {}, r"\[python\] downloads of .*/site.toml forbids to download one"),
        ("", {"UV_PYTHON_DOWNLOADS": "never"}, "UV_PYTHON_DOWNLOADS=never forbids"),
        ("", {"UV_PYTHON_DOWNLOADS": "manual"}, "UV_PYTHON_DOWNLOADS=manual forbids"),
        ("", {"UV_PYTHON_PREFERENCE": "only-system"}, "UV_PYTHON_PREFERENCE=only-system forbids"),
    ],
)
def test_who_forbids_a_download_is_named(tmp_path: Path, site: str, variables: dict[str, str], why: str) -> None:
    (tmp_path / "python.tar.gz").touch()
    given = list_of_downloads(tmp_path, (tmp_path / "python.tar.gz").as_uri()) | variables
    with pytest.raises(HostError, match=why) as refused:
        choose_python("3.12", environment_of(tmp_path, site, **given))
    assert "--python PATH" in str(refused.value.hint) and "it has " in refused.value.message


@pytest.mark.parametrize("prefix", ["https://github.com/astral-sh", "https://server.example/copies"])
def test_a_mirror_of_the_site_is_tried_first(tmp_path: Path, prefix: str) -> None:
    """By the address of the project, whatever server uv asks, and by that server's."""
    tail = "20991231/cpython-3.12.9%2B20991231-x.tar.gz"
    url = f"https://server.example/copies/python-build-standalone/releases/download/{tail}"
    copies = tmp_path / "copies"
    site = f'[mirrors]\n"{prefix}" = ["{copies.as_uri()}"]\n'
    environment = environment_of(tmp_path, site, **list_of_downloads(tmp_path, url))
    archive = copies / "python-build-standalone/releases/download" / tail.replace("%2B", "+")
    archive.parent.mkdir(parents=True)
    archive.touch()
    found = choose_python("3.12", environment, offline=True)
    assert isinstance(found, OfferedPython) and found.url.startswith(copies.as_uri())
    assert found.mirror == f"{copies.as_uri()}/python-build-standalone/releases/download"
    archive.unlink()
    with pytest.raises(HostError, match=r"there is no file .*; --offline forbids to ask https://server.example"):
        choose_python("3.12", environment, offline=True)


def test_a_server_that_does_not_answer_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pythons, "_PATIENCE_S", 0.2)
    monkeypatch.setattr(pythons.Client, "reach", lambda *_: time.sleep(5))
    environment = environment_of(tmp_path, **list_of_downloads(tmp_path, "https://u:secret@silent.example/a.tar.gz"))
    started = time.monotonic()
    with pytest.raises(HostError, match=r"silent\.example does not answer") as refused:
        choose_python("3.12", environment)
    assert time.monotonic() - started < 4 and "secret" not in refused.value.message


def test_a_word_that_is_no_version_is_not_downloaded(tmp_path: Path) -> None:
    with pytest.raises(HostError, match="uv can download a version alone"):
        choose_python("no-such-python", environment_of(tmp_path))


def test_prune_keeps_a_python_while_an_environment_links_to_it(tmp_path: Path) -> None:
    environment = environment_of(tmp_path)
    store, roots = environment.store, [put_in_store(environment, version) for version in ("3.99.1", "3.99.2")]
    venv = tmp_path / "venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin/python").symlink_to(roots[0] / "bin/python3.99")
    for root in roots:  # the second one's environment has another Python by now
        keep_python(root.name, venv, store)
    for root in roots:
        os.utime(root, (1, 1))

    def prune() -> set[str]:
        return {item.name for item in remove(store, choose(items(store), time.time(), older_s=10)).removed}

    assert prune() == {f"interpreters/{roots[1].name}"}
    assert {item.name for item in items(store) if item.needed} == {f"interpreters/{roots[0].name}"}
    (venv / "bin/python").unlink()
    assert prune() == {f"interpreters/{roots[0].name}"} and not any(root.exists() for root in roots)


@pytest.mark.parametrize(
    ("tag", "requires", "chosen"),
    [
        ("py3-none-any", ">=3.10", "3.13"),  # this host's
        ("py3-none-any", ">=3.10,<3.13", "3.12"),  # the sources accept no Python of this host but this
        ("cp311-cp311-linux_x86_64", ">=3.10", "3.11"),  # no wheel for a Python of this host
        ("py3-none-any", "<3.12", "3.11"),
    ],
)
def test_an_imported_recipe_has_a_python_of_this_host_with_wheels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tag: str, requires: str, chosen: str
) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "0.0.0")
    make_wheel(tmp_path / "wheels", "alpha", tag=tag)
    environment = environment_of(tmp_path, PIP_FIND_LINKS=str(tmp_path / "wheels"), PIP_NO_INDEX="1")
    for version in ("3.12.4", "3.13.1", "3.99.1"):
        put_in_store(environment, version)
    statements = [Statement("requirement", "alpha", "x"), Statement("python", requires, "x")]
    draft = compose_here("small", statements, (), "cpu-x86_64", environment)
    assert draft.data["python"] == chosen
    (tmp_path / "store/interpreters").rename(tmp_path / "gone")
    assert compose_here("small", statements, (), "cpu-x86_64", environment).data["python"] in ("3.11", "3.12")


def test_a_build_refuses_before_it_reads_a_lock_and_names_the_python_that_would_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(platform, "python_version", lambda: "0.0.0")
    environment = environment_of(tmp_path, UV_PYTHON_DOWNLOADS="never")
    text = f'[targets.cpu-{MACHINE}]\npythons = ["3.12", "3.13"]\n'
    loaded = load_recipe(make_recipe(tmp_path, "small", ["alpha"], targets=text) / "recipe.toml")
    use: LockUse = {"locked": True, "offline": True, "log": print}

    def prepared(python: str | None = None) -> None:
        prepare_folder(VENV, loaded, Target("cpu", MACHINE), environment, python=python, **use)

    with pytest.raises(HostError, match=r"no Python 3\.11") as refused:
        prepared()
    assert refused.value.hint and not refused.value.hint.startswith("run ")
    put_in_store(environment, "3.13.1")
    with pytest.raises(HostError, match=r"no Python 3\.11") as refused:
        prepared()
    assert refused.value.hint and f" venv {loaded.folder} --python 3.13`" in refused.value.hint
    with pytest.raises(LockError, match=r"python3\.13\.requirements\.txt: no lock"):
        prepared("3.13")
    put_in_store(environment, "3.99.1")
    with pytest.raises(HostError, match=r"--python 3\.99 is Python 3\.99\.1; recipe small wants Python 3\.11"):
        prepared("3.99")
