"""Releases without a wheel are never skipped in silence, and a failed resolution names its own cause."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import requests
from urllib3.exceptions import MaxRetryError, NewConnectionError, ProxyError

from envbuild.base.errors import LockError, joined
from envbuild.cache.http import reason_of
from envbuild.environment import Environment
from envbuild.lock.built import UvCompile, explanation, without_wheel
from envbuild.lock.format import Lock, parse, render
from envbuild.lock.offers import Offers, reachable, releases_of, skipped_warnings
from envbuild.recipe.sources import LockedPackage
from envbuild.run_environment import load_environment
from envbuild.store.client import Client
from envbuild.store.sources import Link, read_page

PYTHON, PLATFORM = "3.11", "x86_64-manylinux_2_28"
WHERE = "Python 3.11 on x86_64-manylinux_2_28"
ANY = "py3-none-any.whl"


def links(*files: str, requires: str = "") -> list[Link]:
    """Files as `NAME TIME`; those without a time are as an HTML page lists them."""
    parts = [file.partition(" ") for file in files]
    return [Link(name, "", None, requires, time) for name, _, time in parts]


def offers(**projects: list[Link]) -> Offers:
    known = {name: releases_of(name, files) for name, files in projects.items()}
    return Offers(cast(Environment, None), (), False, known)


def skipped(
    requirement: str,
    locked: str,
    files: list[Link],
    *,
    constraint: str = "",
    alone: Callable[[str], str | None] = lambda _: None,
) -> tuple[str, ...]:
    constraints = [constraint] if constraint else []
    return skipped_warnings(
        [requirement], constraints, {"demo": locked}, offers(demo=files), PYTHON, PLATFORM, alone, "r: target t"
    )


AGED = links(
    f"demo-0.3.1.dev5-{ANY} 2020-11-11T22:22:32.1Z",
    "demo-0.4.tar.gz 2021-06-01T00:00:00Z",
    "demo-0.19.8.tar.gz 2026-10-20T00:00:00Z",
    f"demo-0.20rc1-{ANY} 2026-10-21T00:00:00Z",
)
NATIVE = "cp312-cp312-manylinux_2_28_x86_64.whl"


def test_a_release_years_behind_one_without_a_wheel_is_an_error_with_the_ways_out() -> None:
    with pytest.raises(LockError) as caught:
        skipped("demo", "0.3.1.dev5", AGED)
    said = caught.value.message
    assert (
        said.startswith("r: target t: ")
        and "demo 0.3.1.dev5 (2020-11-11) is locked instead of 0.19.8 (2026-10-20)" in said
    )
    assert f"0.19.8 has no wheel for {WHERE}" in said
    hint = caught.value.hint or ""
    for way in ("demo==0.3.1.dev5", 'build = ["demo"]'):
        assert way in hint, way


@pytest.mark.parametrize(
    "files",
    [
        links(f"demo-1.0-{ANY} 2024-11-01T00:00:00Z", "demo-1.1.tar.gz 2026-10-31T00:00:00Z"),
        links(f"demo-1.0-{ANY}", "demo-1.1.tar.gz"),
        links(f"demo-1.0-{ANY}", "demo-1.1.zip 2026-10-31T00:00:00Z"),
        links(f"demo-1.0-{ANY}", f"demo-1.1-{NATIVE}"),
    ],
)
def test_a_younger_gap_and_unknown_times_are_a_warning(files: list[Link]) -> None:
    (warning,) = skipped("demo", "1.0", files)
    assert warning.startswith("demo 1.0") and "is locked instead of 1.1" in warning
    assert "has no wheel" in warning and "demo==1.0" in warning


@pytest.mark.parametrize(
    ("requirement", "constraint", "files"),
    [
        ("demo==1.0", "", AGED),
        ("demo", "demo<=1.0", links(f"demo-1.0-{ANY}", "demo-1.1.tar.gz")),
        ("demo; sys_platform == 'win32'", "", links(f"demo-1.0-{ANY}", "demo-1.1.tar.gz")),
        ("demo", "", links(f"demo-1.0-{ANY}", "demo-1.1rc1.tar.gz")),
        ("demo", "", links(f"demo-1.0-{ANY}") + links("demo-1.1.tar.gz", requires=">=3.12")),
        ("demo", "", links(f"demo-1.0-{ANY}", f"demo-1.1-{ANY}")),  # kept, or held by another
        ("demo", "", links(f"demo-1.0-{ANY}", "other-9.tar.gz", "demo-9.egg", "demo-9.tar.bz2")),
        ("demo", "", [*links(f"demo-1.0-{ANY}"), Link("demo-1.1.tar.gz", "", None, yanked=True)]),
    ],
)
def test_nothing_is_said_of_releases_that_are_not_asked_for(
    requirement: str, constraint: str, files: list[Link]
) -> None:
    assert skipped(requirement, "1.0", files, constraint=constraint) == ()


def test_a_pinned_requirement_asks_no_index() -> None:
    none = offers()
    none.releases = lambda names: {name: pytest.fail(name) for name in names}  # type: ignore[method-assign]
    locked = {"demo": "1.0", "other": "2.0"}
    lines = ["demo==1.0", "other"]
    assert skipped_warnings(lines, ["other===2.0"], locked, none, PYTHON, PLATFORM, lambda _: None, "r") == ()


def test_a_dependency_without_a_wheel_is_named() -> None:
    """As hydra-core 1.3, whose antlr4 has no wheel: it has one itself, and uv goes back to 0.11."""
    asked: list[str] = []

    def alone(line: str) -> str | None:
        asked.append(line)
        return "antlr4-python3-runtime>=4.9,<=4.9.3"

    files = links(
        f"demo-0.11-{ANY} 2019-12-29T13:58:49Z",
        f"demo-1.3-{ANY} 2026-10-25T00:00:00Z",
        "demo-1.4.tar.gz 2026-10-26T00:00:00Z",
    )
    with pytest.raises(LockError, match="over two years older") as caught:
        skipped("demo[extra]", "0.11", files, alone=alone)
    assert asked == ["demo[extra]==1.3"]
    said = f"it needs antlr4-python3-runtime>=4.9,<=4.9.3, which has no wheel for {WHERE}"
    assert said in caught.value.message
    hint = caught.value.hint or ""
    assert 'build = ["antlr4-python3-runtime"]' in hint


def test_upload_times_and_yanked_files_are_read_from_an_index_in_json() -> None:
    page = {
        "meta": {"api-version": "1.1"},
        "name": "demo",
        "versions": ["1.0", "2.0"],
        "files": [
            {"filename": f"demo-1.0-{ANY}", "url": "a", "hashes": {}, "size": 1, "yanked": "broken"},
            {
                "filename": "demo-2.0.tar.gz",
                "url": "b",
                "hashes": {},
                "size": 1,
                "requires-python": ">=3.9",
                "upload-time": "2026-10-20T10:00:00.5Z",
            },
        ],
    }
    kind = {"Content-Type": "application/vnd.pypi.simple.v1+json"}
    answer = SimpleNamespace(url="https://i/simple/demo/", headers=kind, content=json.dumps(page).encode())
    client = SimpleNamespace(page=lambda url, patient: answer)
    yanked, sdist = read_page("https://i/simple/demo/", "demo", cast(Client, client))
    assert yanked.yanked and not sdist.yanked and sdist.requires_python == ">=3.9"
    (release,) = releases_of("demo", [yanked, sdist])
    assert str(release) == "2.0 (2026-10-20)" and not release.fits(PYTHON, PLATFORM)


def test_files_in_find_links_folders_are_offered_without_an_index(tmp_path: Path) -> None:
    for name in (f"demo-1.0-{ANY}", "demo-2.0.tar.gz", f"other-3.0-{ANY}", "notes.txt"):
        (tmp_path / name).touch()
    environment = load_environment({"HOME": str(tmp_path), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)})
    releases = Offers(environment, (), True).releases(["demo", "absent"])
    assert [str(one.version) for one in releases["demo"]] == ["1.0", "2.0"]
    assert releases["absent"] == []


def test_the_lock_keeps_its_warnings() -> None:
    packages = (LockedPackage("demo", "1.0", ("0" * 64,)),)
    lock = Lock("r", "cpu-x86_64", PYTHON, PLATFORM, "sha256:0", packages, ("demo 1.0: old", "b"))
    assert parse(render(lock), "x").warnings == ("demo 1.0: old", "b")
    assert parse(render(lock), "x").digest == lock.digest


# What uv 0.13 printed, and the cause.
NO_SUCH = "cause: Because nunpy was not found in the {} and you require nunpy, we can conclude that"
NO_VERSION = "cause: Because there is no version of demo=={} and you require demo=={}, we can conclude"
NO_RANGE = "cause: Because only demo<=2.0 is available and you require demo>99, we can conclude that"
NO_WHEEL = "cause: Because demo==1.0 has no usable wheels and you require demo==1.0, we can conclude"
NO_ABI = """cause: Because demo==1.0 has no wheels with a matching Python ABI tag (e.g., `cp314`) and you require
         demo==1.0, we can conclude that your requirements are unsatisfiable."""
OF_DEPENDENCY = """cause: Because all of:
             inner<=0.9
             inner>=1.0,<=1.4
          have no usable wheels and only the following versions of inner are available:
             inner<=0.9
             inner>=1.0
         we can conclude that inner==1.* cannot be used.
         And because demo==1.0 depends on inner==1.* and you require demo==1.0, we can conclude that"""
CONFLICT = "cause: Because alpha==1.0 depends on demo>=2 and you require demo<2, we can conclude that"

SHELF = links(
    "demo-1.0-cp310-cp310-manylinux_2_28_x86_64.whl",
    "demo-1.0-cp311-cp311-manylinux_2_28_x86_64.whl",
    f"demo-2.0-{ANY}",
    "inner-1.4.tar.gz",
    f"inner-2.0-{ANY}",
)


def hint(stderr: str, **given: Any) -> str:
    uv = UvCompile(Path(), offers(demo=SHELF, inner=SHELF), given.pop("python", PYTHON), PLATFORM)
    values: dict[str, Any] = {
        "requirements": ("demo==1.0", "nunpy"),
        "of_target": (),
        "command": "r --target t",
        "unreached": True,
    }
    return uv.hint(stderr, **{**values, **given})


@pytest.mark.parametrize(
    ("stderr", "python", "said"),
    [
        (NO_SUCH.format("package registry"), "3.11", "check the spelling of nunpy"),
        (NO_SUCH.format("provided package locations"), "3.11", "check the spelling of nunpy"),
        (NO_VERSION.format("99.9", "99.9"), "3.11", f"with a wheel for {WHERE}: 2.0, 1.0"),
        (NO_RANGE, "3.11", f"change the requirement of demo; releases of demo with a wheel for {WHERE}"),
        (NO_WHEEL, "3.14", "demo 1.0 has wheels for Python 3.10, 3.11: set `python` in the recipe; "),
        (NO_ABI, "3.14", "releases of demo with a wheel for Python 3.14 on x86_64-manylinux_2_28: 2.0"),
        (OF_DEPENDENCY, "3.11", 'build = ["inner"]'),
        (CONFLICT, "3.11", "loosen or correct the requirement that uv names above"),
        ("error: dns error: failed to lookup", "3.11", "check the network"),
    ],
)
def test_the_hint_is_for_the_cause_and_not_for_an_index_that_was_left_out(stderr: str, python: str, said: str) -> None:
    told = hint(stderr, python=python)
    assert said in told and "index in the note" not in told


@pytest.mark.parametrize(
    ("stderr", "of_target", "said"),
    [
        (NO_VERSION.format("2.9+cu126", "2.9+cu126"), (), "run `envbuild lock r --target t` where"),
        (NO_SUCH.format("package registry"), ("nunpy",), "run `envbuild lock r --target t` where"),
        (NO_VERSION.format("9", "9"), ("demo==9",), "the index in the note may have more"),
        (NO_WHEEL, ("demo==1.0",), "set `python` in the recipe"),
        (NO_WHEEL, ("demo==1.0",), "the index in the note may have more"),
    ],
)
def test_an_index_that_was_left_out_is_named_for_what_it_would_serve(
    stderr: str, of_target: tuple[str, ...], said: str
) -> None:
    assert said in hint(stderr, python="3.14", of_target=of_target)
    assert "index in the note" not in hint(stderr, of_target=of_target, unreached=False)


@pytest.mark.parametrize(
    ("wheel", "said"),
    [
        (
            "demo-1.0-cp37-cp37m-manylinux1_x86_64.whl",
            "demo 1.0 has no wheel for Python 3.9 to 3.15 on x86_64: take another",
        ),
        ("demo-1.0-cp311-cp311-win_amd64.whl", "demo 1.0 has no wheel for Python 3.9 to 3.15 on x86_64: take another"),
        ("demo-1.0-cp311-cp311-manylinux_2_39_x86_64.whl", "set `glibc` in the target"),
    ],
)
def test_glibc_is_advised_where_it_helps(wheel: str, said: str) -> None:
    uv = UvCompile(Path(), offers(demo=links(wheel)), PYTHON, PLATFORM)
    assert said in uv.hint(NO_WHEEL, requirements=("demo==1.0",), of_target=(), command="r", unreached=False)


def test_what_has_no_wheel_is_read_from_uv() -> None:
    assert without_wheel(OF_DEPENDENCY) == "inner>=1.0,<=1.4"
    assert without_wheel(NO_WHEEL) == "demo==1.0" and without_wheel(CONFLICT) is None


def test_offline_asks_indexes_that_are_folders_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "simple").mkdir()
    folder, site = (tmp_path / "simple").as_uri(), tmp_path / "site.toml"
    site.write_text(f'[mirrors]\n"https://far.example/simple" = ["https://near.example/simple", "{folder}"]\n')
    environment = load_environment({"ENVBUILD_SITE": str(site), "HOME": str(tmp_path), "PIP_CONFIG_FILE": "/dev/null"})
    assert reachable([folder, "https://far.example/simple"], environment, offline=True) == ([folder, folder], [])
    found, notes = reachable(["https://other.example/simple", f"{folder}/none"], environment, offline=True)
    assert found == [] and notes[0] == "--offline: index https://other.example/simple was not asked"
    assert notes[1] == f"index {folder}/none cannot be reached: no such folder"


UNREACHED = """\
error: Request failed after 3 retries in 5.1s
  cause: Failed to fetch: http://127.0.0.1:9/simple/{name}/
  cause: error sending request for url (http://127.0.0.1:9/simple/{name}/)
  cause: client error (Connect)
  cause: tcp connect error
  cause: Connection refused (os error 111)
"""


def test_many_targets_and_one_index_that_is_down_are_a_few_lines() -> None:
    """uv's words differ in the package that it asks for first, and in seconds."""
    errors = []
    for number in range(12):
        done = subprocess.CompletedProcess([], 2, "", UNREACHED.format(name=f"package-{number}"))
        errors.append(
            LockError(f"recipe.toml: target {number} cannot be resolved:\n{explanation(done)}", "the network?")
        )
    error = joined(LockError, errors)
    assert len(error.message.splitlines()) == 13 and error.hint == "the network?"
    assert error.message.endswith(
        "target 11 cannot be resolved:\n  http://127.0.0.1:9/simple/ cannot be reached:"
        " Connection refused (os error 111)"
    )
    other = subprocess.CompletedProcess(
        [], 1, "", "error: Failed to fetch: `https://i.example/simple/a/`\n  HTTP 500\n"
    )
    assert "HTTP 500" in explanation(other)


def test_the_reason_behind_a_proxy_is_the_innermost_one() -> None:
    inner = NewConnectionError(None, "[Errno 111] Connection refused")  # type: ignore[arg-type]
    reason = ProxyError("Unable to connect to proxy", inner)
    error = requests.exceptions.ProxyError(MaxRetryError(None, "/", reason))  # type: ignore[arg-type]
    error.__context__ = error.args[0]
    assert "Connection refused" in reason_of(error) and "Unable" not in reason_of(error)


def test_uvs_markers_are_no_part_of_a_name() -> None:
    said = "Because thing{sys_platform == 'linux'}==1.5.1 has no usable wheels and you require it"
    assert without_wheel(said) == "thing==1.5.1"
