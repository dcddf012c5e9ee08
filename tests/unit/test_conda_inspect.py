"""Conda environments looked into and compared: in folders, in images, made by any tool."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from lab import artifacts as lab
from lab.forked import run_forked

from envbuild.base.errors import UsageError
from envbuild.base.packages import channel_name
from envbuild.data import load_table
from envbuild.describe import describe
from envbuild.environment import Environment
from envbuild.image.layout import Blobs
from envbuild.inspect.compare import Comparison, compare
from envbuild.inspect.facts import CondaRecord, Inventory
from envbuild.inspect.metadata import reader_of
from envbuild.inspect.reader import open_artifact
from envbuild.inspect.sbom import cyclonedx
from envbuild.report.gather import sized_packages
from envbuild.run_environment import load_environment

SIX = f"{lab.SITE}/six.py"
FORGE = "https://conda.anaconda.org/conda-forge"


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return load_environment({"ENVBUILD_STORE": str(tmp_path / "store"), "HOME": str(tmp_path)})


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


def conda(place: str, installer: str = "uv", **more: Any) -> dict[str, bytes | str]:
    """What an environment at `place` holds: python, a conda package with scripts, one of pip."""
    python: dict[str, bytes | str] = {
        "bin/python3.11": f"ELF {lab.PLACEHOLDER}/lib\0rest".encode(),
        "bin/python": "-> python3.11",
        "bin/2to3": f"#!{lab.PLACEHOLDER}/bin/python\nmain()\n",
        "bin/idle": "#!/bin/sh\nexit\n",
        "lib/python3.11/os.py": "1",
        "lib/pkgconfig/python.pc": f"prefix={lab.PLACEHOLDER}\n",
    }
    rows = "six.py,,\nsix-1.0.dist-info/INSTALLER,,\n../../../bin/six,,\n"
    six: dict[str, bytes | str] = {
        SIX: "1",
        f"{lab.SITE}/six-1.0.dist-info/METADATA": "Name: six\nVersion: 1.0\n",
        f"{lab.SITE}/six-1.0.dist-info/RECORD": rows,
        f"{lab.SITE}/six-1.0.dist-info/INSTALLER": "conda",
    }
    return {
        "conda-meta/history": place,
        **lab.conda_package("python", "3.11.9", python, place, build="h9_cpython"),
        **lab.conda_package("six", "1.0", six, place, entry_point=True, **more),
        **lab.package("tqdm", "4.1", {"tqdm/__init__.py": "1"}, installer=f"{place}/{installer}"),
    }


def folder(place: Path, files: lab.Files | None = None, **more: Any) -> Path:
    return lab.make_venv(place, conda(str(place), **more) if files is None else files)


def image(place: Path, blobs: Blobs, files: lab.Files, prefix: str = "opt/env", **run: Any) -> Path:
    layers = [lab.layer(blobs, {"etc/x": "1"}), lab.layer(blobs, lab.under(prefix, files))]
    return lab.layout(place, blobs, [(lab.image(blobs, layers, **run)[0], None)])


def look(text: str | Path, environment: Environment) -> dict[str, Any]:
    with open_artifact(str(text), environment, None) as opened:
        return describe(opened.about, opened.contents(hashes=False))


def diff(one: Path, other: Path, environment: Environment) -> Comparison:
    with open_artifact(str(one), environment, None) as left, open_artifact(str(other), environment, None) as right:
        return compare(left, right, files=True)


def names(found: Comparison) -> dict[str, list[tuple[str, str]]]:
    parts = ("settings", "conda", "python", "debian", "files")
    told = {part: [(c.kind, c.name) for c in getattr(found, part) or ()] for part in parts}
    return {part: changes for part, changes in told.items() if changes}


def test_a_folder_with_conda_meta_is_a_conda_environment_whoever_made_it(
    tmp_path: Path, environment: Environment
) -> None:
    foreign = folder(tmp_path / "foreign")
    found = look(foreign, environment)
    assert (found["kind"], found["recipe"], found["digest"]) == ("conda", None, None)
    assert found["python"] == {"version": "3.11", "full": "3.11.9", "interpreter": None}
    assert [(p["name"], p["version"], p["build"]) for p in found["conda_packages"]] == [
        ("python", "3.11.9", "h9_cpython"),
        ("six", "1.0", "h0_0"),
    ]
    assert {p["name"] for p in found["python_packages"]} == {"six", "tqdm"}
    assert look(f"conda:{foreign}", environment) == {**found, "artifact": f"conda:{foreign}"}
    own = folder(tmp_path / "own")
    (own / "envbuild.json").write_text(lab.state(artifact="conda", environment="conda"))
    found = look(own, environment)
    assert (found["kind"], found["recipe"]["name"], found["target"]) == ("conda", "lab", "cpu-x86_64")
    with pytest.raises(UsageError, match="is not a virtual environment") as caught:
        look(f"venv:{own}", environment)
    assert "conda:DIR" in str(caught.value.hint)
    with pytest.raises(UsageError, match="is not a conda environment"):
        look(f"conda:{tmp_path}", environment)


def test_of_an_installation_of_conda_only_its_own_packages_are_told(tmp_path: Path, environment: Environment) -> None:
    root = folder(tmp_path / "conda")
    folder(root / "envs" / "other")
    (root / "pkgs" / "six-1.0-h0_0").mkdir(parents=True)
    found, plain = (look(place, environment) for place in (root, folder(tmp_path / "plain")))
    for key in ("conda_packages", "files"):
        assert found[key] == plain[key]
    assert [p["name"] for p in found["python_packages"]] == ["six", "tqdm"]


@pytest.mark.parametrize(
    ("prefix", "env"),
    [("opt/env", []), ("opt/conda", ["CONDA_PREFIX=/opt/conda"]), ("opt/conda", ["PATH=/usr/bin:/opt/conda/bin:/bin"])],
)
def test_a_conda_environment_in_an_image_tells_the_same_as_one_in_a_folder(
    tmp_path: Path, blobs: Blobs, environment: Environment, prefix: str, env: list[str]
) -> None:
    made = image(tmp_path / "image", blobs, conda(f"/{prefix}"), prefix, Env=env)
    found, there = look(made, environment), look(folder(tmp_path / "folder"), environment)
    assert found["python"] == there["python"]
    assert found["conda_packages"] == [{**package, "location": prefix} for package in there["conda_packages"]]


@pytest.mark.parametrize(
    ("more", "channel"),
    [
        ({}, FORGE),
        ({"url": "https://me:hunter2@repo.example.org/a/linux-64/six.conda"}, "https://me:****@repo.example.org/a"),
        ({"url": "https://repo.example.org/t/hunter2/a/linux-64/six.conda"}, "https://repo.example.org/t/****/a"),
        (
            {"url": None, "channel": "https://me:hunter2@repo.example.org/a/linux-64"},
            "https://me:****@repo.example.org/a",
        ),
        ({"url": "", "channel": "https://repo.example.org/t/hunter2"}, "https://repo.example.org/t/****"),
        ({"url": "six.conda", "channel": "defaults"}, "defaults"),
    ],
)
def test_a_channel_is_told_without_its_credentials(
    tmp_path: Path, environment: Environment, more: dict[str, Any], channel: str
) -> None:
    place = folder(tmp_path / "one", **more)
    found = look(place, environment)
    assert found["conda_packages"][1]["channel"] == channel
    with open_artifact(str(place), environment, None) as opened:
        contents = opened.contents(hashes=False)
        assert "hunter2" not in repr(contents) + cyclonedx(opened.about, contents, None)


@pytest.mark.parametrize("kind", ["folder", "image"])
def test_a_report_counts_a_python_package_of_conda_once_whatever_conda_calls_it(
    kind: str, tmp_path: Path, blobs: Blobs, environment: Environment
) -> None:
    files = conda("/opt/env") | lab.conda_package("pytorch", "2.5", lab.package("torch", "2.5", {"torch/a": "1"}), "/")
    place = folder(tmp_path / "env", files) if kind == "folder" else image(tmp_path / "image", blobs, files)
    with open_artifact(str(place), environment, None) as opened:
        found = {(one.name, one.kind) for one in sized_packages(opened.contents(hashes=False))}
    assert found == {("python", "conda"), ("six", "conda"), ("pytorch", "conda"), ("tqdm", "Python")}


def test_channels_have_the_names_that_conda_gives_them() -> None:
    assert channel_name(FORGE) == "conda-forge"
    assert channel_name(f"{FORGE}/label/rc") == "conda-forge/label/rc"
    assert channel_name("https://repo.anaconda.com/pkgs/main") == "pkgs/main"
    assert channel_name("https://repo.example.org/a") == "https://repo.example.org/a"


WORDS = [
    "name",
    "version",
    "build",
    "url",
    "channel",
    "subdir",
    "fn",
    "sha256",
    "license",
    "paths_data",
    "paths",
    "_path",
    "path_type",
    "sha256_in_prefix",
    "prefix_placeholder",
]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=6),
    max_leaves=20,
)
RECORDS = st.fixed_dictionaries(
    {"name": st.text(max_size=4), "version": VALUES, "build": VALUES}, optional=dict.fromkeys(WORDS[3:], VALUES)
)


@example(b'{"name": "0", "version": null, "build": null, "paths_data": {"paths": []}}')
@given(st.binary(max_size=50) | (VALUES | RECORDS).map(lambda value: json.dumps(value).encode()))
def test_a_record_that_makes_no_sense_tells_little_and_breaks_nothing(data: bytes) -> None:
    reader = reader_of("opt/env/conda-meta/x-1-0.json")
    assert reader is not None
    note = json.loads(json.dumps(reader(data)))  # as a listing keeps it
    if note:
        assert note.pop("recorded") is not None
        package = CondaRecord(location="opt/env", **note)
        assert isinstance(note.pop("size", 0), int)
        assert all(isinstance(value, str) for value in note.values()) and package.name


def test_only_records_are_read() -> None:
    paths = ("conda-meta/history", "conda-meta/a/b.json", "my-conda-meta/a.json", "conda-meta/state")
    assert not [path for path in paths if reader_of(path)]
    assert reader_of("conda-meta/a.json") and reader_of("opt/conda/conda-meta/a.json")


def test_a_damaged_record_is_left_out_and_the_others_are_told(tmp_path: Path, environment: Environment) -> None:
    place = folder(tmp_path / "one")
    (place / "conda-meta/broken-1-0.json").write_text('{"name": "bro')
    old = json.dumps({"name": "old", "version": "1", "build": "0", "files": ["x"]})
    (place / "conda-meta/old-1-0.json").write_text(old)
    packages = {p["name"]: p for p in look(place, environment)["conda_packages"]}
    assert set(packages) == {"old", "python", "six"} and packages["old"]["record"] is None


def test_environments_at_different_places_with_the_same_packages_are_equal(
    tmp_path: Path, environment: Environment
) -> None:
    one, other = folder(tmp_path / "a"), folder(tmp_path / "longer" / "place", installer="pip")
    (other / "envbuild.json").write_text(lab.state(target="", recipe="", python=""))
    (other / "CACHEDIR.TAG").write_text("x")
    (other / f"{lab.SITE}/__pycache__").mkdir()
    (other / f"{lab.SITE}/__pycache__/six.pyc").write_text("x")
    assert (one / "bin/2to3").read_text() != (other / "bin/2to3").read_text()
    found = diff(one, other, environment)
    assert found.equal and found.files == (), names(found)
    assert found.left_out == tuple(load_table("comparison")["conda"])


def test_an_environment_equals_the_same_one_in_an_image(tmp_path: Path, blobs: Blobs, environment: Environment) -> None:
    one = folder(tmp_path / "one")
    made = image(tmp_path / "image", blobs, conda("/opt/env", installer="envbuild"), User="7")
    found = diff(one, made, environment)
    assert found.equal and found.files == (), names(found)
    twin = image(tmp_path / "twin", blobs, {**conda("/opt/env", installer="envbuild"), SIX: "2"})
    # Two images are compared file by file, wherever a file comes from.
    assert names(diff(made, twin, environment)) == {
        "files": [("changed", f"opt/env/{SIX}")],
        "settings": [("removed", "user")],
    }


@pytest.mark.parametrize("kind", ["folder", "image"])
@pytest.mark.parametrize(
    "path",
    [
        "bin/2to3",  # its package's, with the place in it
        "bin/idle",  # its package's, without
        "bin/six",  # of an entry point
        "bin/python3.11",
        "lib/pkgconfig/python.pc",
        "lib/python3.11/os.py",
        SIX,
    ],
)
def test_a_file_that_is_not_what_its_package_holds_is_found(
    tmp_path: Path, blobs: Blobs, environment: Environment, path: str, kind: str
) -> None:
    place = tmp_path / "other" if kind == "folder" else Path("/opt/env")
    files = conda(str(place))
    content = files[path]
    altered = content + b"!" if isinstance(content, bytes) else content + "!"
    files[path] = altered
    other = folder(place, files) if kind == "folder" else image(tmp_path / "image", blobs, files)
    found = diff(folder(tmp_path / "one"), other, environment)
    assert names(found) == {"files": [("changed", path)]}
    (change,) = found.files or ()
    assert change.parts and "content" in change.parts


def test_packages_of_another_version_build_or_content_are_told(tmp_path: Path, environment: Environment) -> None:
    def made(name: str, **packages: tuple[str, str, str]) -> Path:
        place = str(tmp_path / name)
        files: dict[str, bytes | str] = {"conda-meta/history": ""}
        for package, (version, build, content) in packages.items():
            files |= lab.conda_package(package, version, {f"share/{package}": content}, place, build=build)
        return lab.make_venv(Path(place), files)

    one = made("one", a=("1", "0", "x"), b=("1", "0", "x"), c=("1", "0", "x"), d=("1", "0", "x"))
    other = made("two", a=("2", "0", "x"), b=("1", "1", "x"), c=("1", "0", "y"), e=("1", "0", "x"))
    found = diff(one, other, environment)
    told = {change.name: (change.before, change.after) for change in found.conda}
    assert told == {
        "a": ("1 0", "2 0"),
        "b": ("1 0", "1 1"),
        "c": ("1 0", "1 0"),
        "d": ("1 0", None),
        "e": (None, "1 0"),
    }
    assert found.conda[2].parts and not found.equal


@pytest.mark.parametrize("kinds", ["folders", "venv in an image", "conda in an image"])
def test_a_conda_environment_and_a_venv_are_compared_by_their_site_packages(
    tmp_path: Path, blobs: Blobs, environment: Environment, kinds: str
) -> None:
    six = lab.package("six", "1.0", {"six.py": "2"})
    venv = {**lab.frame(), **six, **lab.package("tqdm", "4.1", {"tqdm/__init__.py": "1"})}
    one: Path = folder(tmp_path / "one")
    other = lab.make_venv(tmp_path / "venv", venv)
    if kinds == "venv in an image":
        other = image(tmp_path / "image", blobs, venv)
    elif kinds == "conda in an image":
        one = image(tmp_path / "image", blobs, conda("/opt/env"))
    found = diff(one, other, environment)
    info = f"{lab.SITE}/six-1.0.dist-info"
    assert [change.name for change in found.files or ()] == [f"{info}/METADATA", f"{info}/RECORD", SIX]
    assert names(found)["python"] == [("changed", "six")] and not found.conda
    assert found.left_out == tuple(load_table("comparison")["site"])


def test_an_image_without_an_environment_lacks_all_packages_of_a_conda_environment(
    tmp_path: Path, blobs: Blobs, environment: Environment
) -> None:
    found = diff(folder(tmp_path / "one"), image(tmp_path / "i", blobs, {"x": ""}), environment)
    assert names(found)["conda"] == [("removed", "python"), ("removed", "six")]
    assert found.files is None and any("no environment" in note for note in found.notes)


def test_the_bill_of_materials_names_conda_packages_with_hash_and_licence(
    tmp_path: Path, environment: Environment
) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    texts = []
    for name in ("one", "two"):
        # Without pip's: the RECORD of what it installs may name the place.
        files = {k: v for k, v in conda(str(tmp_path / name)).items() if "tqdm" not in k}
        place = folder(tmp_path / name, files)
        with open_artifact(str(place), environment, None) as opened:
            texts.append(cyclonedx(opened.about, opened.contents(hashes=False), None))
    assert texts[0] == texts[1]
    licences = ("MIT OR Apache-2.0", "LicenseRef-Own", "GPL (any", "")
    contents = Inventory(
        {}, conda=tuple(CondaRecord("p", str(n), "0", "opt", license=text) for n, text in enumerate(licences))
    )
    texts.append(cyclonedx(opened.about, contents, None))
    for text in texts:
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    components = {c["purl"]: c for c in json.loads(texts[0])["components"]}
    purl = "pkg:conda/python@3.11.9?build=h9_cpython&channel=conda-forge&subdir=linux-64&type=conda"
    found = components[purl]
    assert len(found["hashes"][0]["content"]) == 64
    assert found["licenses"] == [{"license": {"id": "BSD-3-Clause"}}]
    bz2 = folder(tmp_path / "bz2", fn="six-1.0-h0_0.tar.bz2")
    with open_artifact(str(bz2), environment, None) as opened:
        assert "type=tar.bz2" in cyclonedx(opened.about, opened.contents(hashes=False), None)


def run(*arguments: str | Path, store: Path) -> subprocess.CompletedProcess[str]:
    variables = {"ENVBUILD_STORE": str(store), "HOME": str(store), "PATH": os.environ["PATH"]}
    return run_forked(*map(str, arguments), cwd=Path.cwd(), env=variables)


def test_the_commands_show_conda_packages(tmp_path: Path) -> None:
    one, store = folder(tmp_path / "one"), tmp_path / "store"
    lines = run("inspect", one, store=store).stdout.splitlines()
    table = lines.index("conda packages (2):")
    assert lines[table + 1].split() == ["python", "3.11.9", "h9_cpython", "conda-forge"]
    files = {**conda(str(tmp_path / "b")), **lab.conda_package("new", "1", {}, str(tmp_path / "b"))}
    other = lab.make_venv(tmp_path / "b", files)
    done = run("diff", one, other, store=store)
    assert (done.returncode, done.stdout.splitlines()) == (
        1,
        ["different: 1 conda package", "conda packages:", "  + new 1 h0_0"],
    )
    data = json.loads(run("diff", one, other, "--json", store=store).stdout)
    assert data["conda_packages"] == [{"change": "added", "name": "new", "before": None, "after": "1 h0_0"}]
    assert run("diff", one, one, store=store).returncode == 0


RECIPE = """\
name = "r"
description = "d"
python = "3.11"
requirements = [{requirements}]
environment = "conda"
[conda]
channels = ["conda-forge", "https://repo.example.org/own"]
dependencies = ["numpy 2.*"]
requirements = ["einops==0.8.1"]
[targets.cpu-x86_64]
conda = ["pytorch 2.7.* cpu*"]
"""


@pytest.mark.parametrize("requirements", ["", '"torch==2.10.0"'])
def test_a_recipe_is_shown_and_built_by_ci_as_far_as_it_is_locked(tmp_path: Path, requirements: str) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE.format(requirements=requirements))
    store, path = tmp_path / "store", str(tmp_path / "recipe.toml")
    shown = run("show", path, store=store)
    assert shown.returncode == 0, shown.stderr
    for text in (
        "images hold a conda environment",
        "conda channels conda-forge, https://repo.example.org/own",
        "conda dependencies numpy 2.*",
        "with pip einops==0.8.1",
        "conda pytorch 2.7.* cpu*",
        "cpu.conda-lock.yml: no conda lock for this target yet",
    ):
        assert text in shown.stdout
    data = json.loads(run("show", path, "--json", store=store).stdout)
    assert data["conda_locks"]["cpu-x86_64"]["current"] is False
    assert set(data["locks"]) == ({"cpu-x86_64"} if requirements else set())
    done = run("matrix", path, store=store)
    assert json.loads(done.stdout) == []  # nothing is locked: each job could only fail
    assert "no conda lock for this target yet" in done.stderr
    done = run("matrix", path, "--artifact", "venv", store=store)
    assert ("no requirements; it cannot be a venv" in done.stderr) is not bool(requirements)
