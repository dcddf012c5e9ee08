"""Artifacts compared: what differs is said, what is equal is equal wherever and however it was made."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lab import artifacts as lab
from lab.forked import run_forked

from envbuild.cli.inspect import diff_command, inspect_command
from envbuild.contract.manifest import read_manifest, scan, seal, write_manifest
from envbuild.environment import Environment
from envbuild.image.layout import Blobs
from envbuild.inspect.compare import Comparison, compare
from envbuild.inspect.reader import open_artifact
from envbuild.run_environment import load_environment

NUMPY: dict[str, bytes | str] = {"numpy/__init__.py": "1", "numpy/core.so": b"\x7fELF"}
CODE = f"{lab.SITE}/numpy/__init__.py"


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return load_environment({"ENVBUILD_STORE": str(tmp_path / "store"), "HOME": str(tmp_path)})


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    return Blobs(tmp_path / "blobs")


def env(installer: str = "uv", **more: Any) -> dict[str, bytes | str]:
    return {**lab.frame(**more), **lab.package("numpy", "2.1", NUMPY, installer=installer)}


def diff(one: Path, other: Path, environment: Environment, *, files: bool = True) -> Comparison:
    with open_artifact(str(one), environment, None) as left, open_artifact(str(other), environment, None) as right:
        return compare(left, right, files=files)


def image(
    folder: Path, blobs: Blobs, *layers: dict[str, bytes | str], run: dict[str, Any] | None = None, **more: Any
) -> Path:
    made = [lab.layer(blobs, files, **more) for files in layers]
    return lab.layout(folder, blobs, [(lab.image(blobs, made, **(run or {}))[0], None)])


def names(found: Comparison) -> dict[str, list[tuple[str, str]]]:
    parts = {"settings": found.settings, "python": found.python, "debian": found.debian, "files": found.files or ()}
    return {key: [(change.kind, change.name) for change in changes] for key, changes in parts.items() if changes}


def test_venvs_made_twice_elsewhere_by_other_uv_runs_are_equal(tmp_path: Path, environment: Environment) -> None:
    info = f"{lab.SITE}/numpy-2.1.dist-info"
    one = lab.make_venv(tmp_path / "one", {**env(), f"{info}/uv_cache.json": "{1}"})
    files = {**env(interpreter="/opt/py/bin/python3.11"), "bin/python": "-> /opt/py/bin/python3.11"}
    files |= {"pyvenv.cfg": str(files["pyvenv.cfg"]).replace("/usr/bin", "/opt/py/bin")}
    files |= {f"{info}/uv_cache.json": "{2}", f"{lab.SITE}/numpy/__pycache__/x.pyc": b"bytecode"}
    # another order of rows and another hash of the installer's own file
    rows = str(files[f"{info}/RECORD"]).splitlines()
    rows.append("numpy-2.1.dist-info/uv_cache.json,sha256=x,1")
    files[f"{info}/RECORD"] = "\n".join(reversed(rows))
    other = lab.make_venv(tmp_path / "other", files)
    for path in other.rglob("*"):
        if not path.is_symlink():
            os.utime(path, (1, 1))
            path.chmod(path.stat().st_mode & ~0o077)
    found = diff(one, other, environment)
    assert found.equal, names(found)
    assert found.files == () and found.left_out


@pytest.mark.parametrize("installer", ["uv", "envbuild"])
def test_a_venv_equals_the_environment_of_an_image_with_the_same_wheels(
    tmp_path: Path, blobs: Blobs, environment: Environment, installer: str
) -> None:
    extra = {"bin/activate": "x", ".gitignore": "*", "lib64": "-> lib", "CACHEDIR.TAG": "x"}
    venv = lab.make_venv(tmp_path / "venv", {**env(), **extra})
    base = {"etc/passwd": "root", "usr/lib/python3/dist-packages/six-1.dist-info/METADATA": "Name: six\nVersion: 1\n"}
    made = image(tmp_path / "image", blobs, base, lab.under("opt/env", env(installer, artifact="docker")))
    found = diff(venv, made, environment)
    assert found.equal and found.files == (), names(found)
    assert "the text of scripts in bin" in found.left_out


CHANGES: list[tuple[dict[str, bytes | str], dict[str, list[tuple[str, str]]]]] = [
    ({CODE: "2"}, {"files": [("changed", CODE)]}),
    ({f"{lab.SITE}/own.pth": "import evil"}, {"files": [("added", f"{lab.SITE}/own.pth")]}),
    ({CODE: "-> core.so"}, {"files": [("changed", CODE)]}),
    ({"bin/numpy": "-> python"}, {"files": [("changed", "bin/numpy")]}),
    (
        lab.package("six", "1.0", {"six.py": "1"}),
        {
            "python": [("added", "six")],
            "files": [
                ("added", name)
                for name in sorted(lab.package("six", "1.0", {"six.py": "1"}))
                if not name.endswith("INSTALLER")
            ],
        },
    ),
    (
        lab.package("numpy", "2.1", {**NUMPY, "numpy/core.so": b"\x7fELF2"}),
        {
            "python": [("changed", "numpy")],
            "files": [("changed", f"{lab.SITE}/numpy-2.1.dist-info/RECORD"), ("changed", f"{lab.SITE}/numpy/core.so")],
        },
    ),
]


@pytest.mark.parametrize(("changed", "expected"), CHANGES)
@pytest.mark.parametrize("kinds", ["venv", "image", "between"])
def test_one_change_is_found_and_nothing_else(
    tmp_path: Path,
    blobs: Blobs,
    environment: Environment,
    changed: dict[str, bytes | str],
    expected: dict[str, list[tuple[str, str]]],
    kinds: str,
) -> None:
    def build(name: str, files: dict[str, bytes | str], kind: str) -> Path:
        if kind == "venv":
            return lab.make_venv(tmp_path / name, files)
        return image(tmp_path / name, blobs, {"etc/x": "1"}, lab.under("opt/env", files))

    first, second = {"venv": ("venv",) * 2, "image": ("image",) * 2, "between": ("venv", "image")}[kinds]
    one, other = build("one", env(), first), build("other", {**env(), **changed}, second)
    found = diff(one, other, environment)
    files = [
        (change.kind, change.name.removeprefix("opt/env/"))
        for change in found.files or ()
        # Folders come with their files; an installer's own file is compared within one kind only.
        if "dir" not in (change.before, change.after) and not change.name.endswith("INSTALLER")
    ]
    assert {"python": names(found).get("python", []), "files": files} == {"python": [], "files": [], **expected}
    assert not found.settings and not found.debian
    swap = {"added": "removed", "removed": "added", "changed": "changed"}
    back = names(diff(other, one, environment))
    assert back["files"] == [(swap[kind], name) for kind, name in names(found)["files"]]


def test_in_images_modes_owners_and_links_count_and_times_do_not(
    tmp_path: Path, blobs: Blobs, environment: Environment
) -> None:
    files: dict[str, bytes | str] = {"etc/x": "1", "etc/l": "-> x"}
    plain = image(tmp_path / "plain", blobs, files)
    assert diff(plain, image(tmp_path / "time", blobs, files, mtime=5), environment).equal
    for name, more in {"owner": {"uid": 7}, "mode": {"mode": 0o4755}}.items():
        found = diff(plain, image(tmp_path / name, blobs, files, **more), environment)
        assert found.files and {part for c in found.files for part in c.parts or ()} == {name}
    other = image(tmp_path / "link", blobs, {**files, "etc/l": "-> y"})
    (change,) = diff(plain, other, environment).files or ()
    assert change.name == "etc/l" and change.parts == {"link": ("x", "y")}


def test_how_files_are_spread_over_layers_does_not_matter(
    tmp_path: Path, blobs: Blobs, environment: Environment
) -> None:
    one = image(tmp_path / "one", blobs, {"etc/": "", "etc/x": "1", "etc/y": "2"})
    other = image(
        tmp_path / "other",
        blobs,
        {"etc/": "", "etc/z": "", "etc/x": "0"},
        {"etc/x": "1", "etc/y": "2", "etc/.wh.z": ""},
    )
    found = diff(one, other, environment)
    assert found.equal, names(found)


def test_images_of_the_same_layers_are_not_read_at_all(tmp_path: Path, blobs: Blobs, environment: Environment) -> None:
    one = image(tmp_path / "one", blobs, {"etc/x": "1"}, run={"Env": ["A=1"]})
    other = tmp_path / "other"
    shutil.copytree(one, other)
    for layer in (one / "blobs").rglob("*"):
        if layer.is_file() and layer.read_bytes()[:2] == b"\x1f\x8b":
            for folder in (one, other):
                path = folder / layer.relative_to(one)
                size = path.stat().st_size
                path.unlink()
                path.write_bytes(bytes(size))
    assert diff(one, other, environment).equal


def test_settings_of_images_are_compared_and_secrets_stay_hidden(
    tmp_path: Path, blobs: Blobs, environment: Environment
) -> None:
    files: dict[str, bytes | str] = {"etc/x": "1"}
    one = image(
        tmp_path / "one",
        blobs,
        files,
        run={
            "Env": ["A=1", "EMPTY=", "API_KEY=hunter1"],
            "Cmd": ["sh"],
            "Labels": {"org.envbuild.plan.digest": "sha256:1", "own": "1"},
        },
    )
    other = image(
        tmp_path / "other",
        blobs,
        files,
        run={
            "Env": ["A=2", "API_KEY=hunter2"],
            "Cmd": ["sh", "-c"],
            "Labels": {"org.envbuild.plan.digest": "sha256:2", "own": "1"},
        },
    )
    found = diff(one, other, environment)
    assert names(found) == {
        "settings": [("changed", "cmd"), ("changed", "env A"), ("changed", "env API_KEY"), ("removed", "env EMPTY")]
    }
    assert "hunter" not in repr(found)


def test_debian_packages_are_compared(tmp_path: Path, blobs: Blobs, environment: Environment) -> None:
    def status(**packages: str) -> dict[str, bytes | str]:
        rows = [
            f"Package: {n}\nStatus: install ok installed\nArchitecture: amd64\nVersion: {v}\n"
            for n, v in packages.items()
        ]
        return {"var/lib/dpkg/status": "\n".join(rows)}

    one = image(tmp_path / "one", blobs, status(bash="1", dash="1", gone="1"))
    other = image(tmp_path / "other", blobs, status(bash="2", dash="1", new="1"))
    found = diff(one, other, environment, files=False)
    assert names(found) == {"debian": [("changed", "bash:amd64"), ("removed", "gone:amd64"), ("added", "new:amd64")]}
    assert found.files is None


def test_an_image_without_an_environment_is_compared_by_packages_and_that_is_said(
    tmp_path: Path, blobs: Blobs, environment: Environment
) -> None:
    venv = lab.make_venv(tmp_path / "venv", env())
    site = "usr/local/lib/python3.11/site-packages"
    foreign = image(tmp_path / "image", blobs, lab.package("numpy", "2.0", NUMPY, site=site))
    found = diff(venv, foreign, environment)
    assert ("changed", "numpy") in names(found)["python"]
    assert found.files is None and any("no environment" in note for note in found.notes)


def run(*arguments: str | Path, store: Path) -> subprocess.CompletedProcess[str]:
    variables = {"ENVBUILD_STORE": str(store), "HOME": str(store), "PATH": os.environ["PATH"]}
    return run_forked("diff", *map(str, arguments), cwd=Path.cwd(), env=variables)


def test_the_command_exits_with_0_1_or_2_and_bounds_its_output(tmp_path: Path) -> None:
    one = lab.make_venv(tmp_path / "one", env())
    many = {f"{lab.SITE}/f{n}.py": "1" for n in range(100)} | {f"{lab.SITE}/\x1b[2J.py": ""}
    other = lab.make_venv(tmp_path / "other", {**env(target="cpu-aarch64"), **many})
    store = tmp_path / "store"
    assert run(one, one, store=store).returncode == 0
    done = run(one, other, store=store)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[0]) == (1, "different: 1 setting, 101 files")
    assert "target: cpu-x86_64 -> cpu-aarch64" in done.stdout
    assert len(lines) < 50 and "61 more; --all lists them" in lines[-1] and "\x1b" not in done.stdout
    assert len(run(one, other, "--all", store=store).stdout.splitlines()) > 100
    data = json.loads(run(one, other, "--json", store=store).stdout)
    assert data["equal"] is False and len(data["files"]) == 101
    assert data["settings"] == [{"change": "changed", "name": "target", "before": "cpu-x86_64", "after": "cpu-aarch64"}]
    assert run(one, other, "--no-files", "--json", store=store).returncode == 1
    done = run(one, tmp_path / "nowhere", store=store)
    assert (done.returncode, done.stdout) == (2, "") and "does not exist" in done.stderr


def test_a_file_that_changed_since_the_verification_is_named(tmp_path: Path, environment: Environment) -> None:
    one, other = (lab.make_venv(tmp_path / name, env()) for name in ("one", "other"))
    for folder in (one, other):
        manifest = write_manifest(folder, 1)[0].digest
        with open_artifact(str(folder), environment, None) as opened:
            digest = opened.about.digest
        receipt = {"passed": True, "artifact": {"digest": digest, "manifest": manifest}, "plan": {"digest": "p"}}
        (tmp_path / f"{folder.name}.receipt.json").write_text(json.dumps(receipt))
    line, variables = [str(one), str(other), "--no-files"], {"ENVBUILD_STORE": str(environment.store.root)}
    run = CliRunner(env=variables).invoke
    assert "receipt" not in run(diff_command, line).output
    state = (other / CODE).stat()
    (other / CODE).write_text("2")
    assert f"{other}: its receipt: passed, but {CODE} changed since" in run(diff_command, line).output
    found = json.loads(run(diff_command, [*line, "--json"]).stdout)
    assert [found[side]["receipt"]["changed"] for side in "ab"] == [[], [CODE]]
    known = read_manifest(other)
    assert known is not None and state.st_size == (other / CODE).stat().st_size
    seal(other, known, scan(other), environment.store)
    assert "receipt" not in run(diff_command, line).output
    assert f"but {CODE} changed since" in run(diff_command, [*line, "--exact"]).output
    assert json.loads(run(inspect_command, [str(other), "--json", "--exact"]).stdout)["receipt"]["changed"] == [CODE]
