"""A host without the recipe's Python: uv downloads one from a mirror, or the build ends before it began."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lab.patchelf import patchelf
from lab.python_mirror import PythonMirror, python_mirror
from lab.wheels import make_recipe, make_wheel

from envbuild.base.progress import log
from envbuild.build import image
from envbuild.image.entry import FILE, Entry
from envbuild.interpreter import read_python
from envbuild.layers.bytecode import compiler_of, with_bytecode
from envbuild.lock.base import image_lock
from envbuild.recipe.load import load_recipe
from envbuild.run_environment import load_environment, with_tmpdir

from .conftest import REPOSITORY, Command, shared

MINOR = "{}.{}".format(*sys.version_info)
# envbuild, for which its own Python is of another version.
ELSEWHERE = "import platform; platform.python_version = lambda: '0.0.0'; from envbuild.cli import main; main()"


class Elsewhere(Command):
    """The command on a host without a Python on PATH."""

    def line(self, *arguments: str | Path) -> list[str]:
        return [sys.executable, "-c", ELSEWHERE, *map(str, arguments)]


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> PythonMirror:
    if patchelf() is None:
        pytest.skip("patchelf is not installed")
    folder, version = shared(tmp_path_factory, "mirror", lambda place: python_mirror(place).version)
    return PythonMirror(folder, version)


@pytest.fixture
def elsewhere(lab: Command) -> Command:
    make_wheel(lab.folder / "wheels", "alpha")
    place = make_recipe(lab.folder / "recipes", "small", ["alpha==1.0"]) / "recipe.toml"
    place.write_text(place.read_text().replace("3.11", MINOR))
    programs = lab.folder / "programs"
    programs.mkdir()
    for name in ("sh", "realpath", "dirname"):
        (programs / name).symlink_to(str(shutil.which(name)))
    return Elsewhere(lab.folder, {**lab.env, "PATH": str(programs)})


def test_the_python_comes_from_a_mirror_and_goes_when_nothing_uses_it(elsewhere: Command, mirror: PythonMirror) -> None:
    line = ("venv", "small", "--no-verify", "--out", "v")
    planned = elsewhere(*line, "--dry-run", **mirror.variables)
    assert planned.returncode == 0 and "which uv downloads" in planned.stderr, planned.stderr
    assert not (elsewhere.folder / "store/interpreters").exists()
    built = elsewhere(*line, **mirror.variables)
    assert built.returncode == 0, built.stderr
    (told,) = [one for one in built.stderr.splitlines() if one.startswith("this host has no Python")]
    assert f"cpython-{mirror.version}" in told and (elsewhere.folder / "store").as_posix() in told
    state = json.loads((elsewhere.folder / "v/envbuild.json").read_text())
    (python,) = (elsewhere.folder / "store/interpreters").glob("cpython-*")
    assert state["python_build"] == python.name and Path(state["interpreter"]).is_relative_to(python)
    run = subprocess.run([elsewhere.folder / "v/bin/python", "-c", "import alpha, ssl; print(alpha)"], text=True)
    assert run.returncode == 0
    assert elsewhere("store", "prune", "--older-than", "0h").returncode == 0 and python.exists()
    (elsewhere.folder / "v").rename(elsewhere.folder / "w")
    again = elsewhere(*line, "--offline", "--out", "w")
    assert again.returncode == 0 and "nothing changed" in again.stderr, again.stderr
    assert elsewhere("store", "prune", "--older-than", "0h").returncode == 0 and python.exists()
    shutil.rmtree(elsewhere.folder / "w")
    assert elsewhere("store", "prune", "--older-than", "0h").returncode == 0 and not python.exists()


def test_the_python_is_kept_in_a_vault_and_comes_from_it_without_a_mirror(
    elsewhere: Command, mirror: PythonMirror
) -> None:
    line, vault = ("venv", "small", "--no-verify", "--out"), {"ENVBUILD_VAULT": f"oci:{elsewhere.folder}/vault"}
    built = elsewhere.json(*line, "v", **mirror.variables, **vault, ENVBUILD_VAULT_MODE="readwrite")
    index = json.loads((elsewhere.folder / "vault/index.json").read_text())["manifests"]
    tags = [row["annotations"]["org.opencontainers.image.ref.name"] for row in index]
    assert sorted(tag.partition("-")[0] for tag in tags) == ["lock", "python"], tags
    shutil.rmtree(elsewhere.folder / "store")
    alone = {**vault, "PIP_FIND_LINKS": "", "UV_PYTHON_INSTALL_MIRROR": "https://mirror.invalid"}
    planned = elsewhere(*line, "w", "--offline", "--dry-run", **alone)
    assert f"Python {mirror.version}, which the vault keeps" in planned.stderr, planned.stderr
    done = elsewhere(*line, "w", "--locked", "--offline", "--json", **alone)
    assert done.returncode == 0 and json.loads(done.stdout)["digest"] == built["digest"], done.stderr
    run = subprocess.run([elsewhere.folder / "w/bin/python", "-c", "import alpha, ssl; print(alpha)"])
    assert run.returncode == 0
    (archive,) = (elsewhere.folder / "store/sources").glob("*/cpython-*")
    blob = elsewhere.folder / "vault/blobs/sha256" / archive.parent.name
    blob.unlink()
    blob.write_bytes(b"another")
    shutil.rmtree(elsewhere.folder / "store")
    done = elsewhere(*line, "x", "--locked", "--offline", **alone)
    assert done.returncode == 6 and "hash mismatch" in done.stderr, done.stderr


@pytest.mark.parametrize(
    ("more", "why"), [(("--offline",), "--offline forbids to ask https://"), ((), "cannot download one")]
)
def test_without_mirror_and_network_nothing_is_resolved(elsewhere: Command, more: tuple[str, ...], why: str) -> None:
    started = time.monotonic()
    # An address that no network has: RFC 2606.
    done = elsewhere(
        "venv", "small", *more, UV_PYTHON_INSTALL_MIRROR="https://mirror.invalid", SSL_CERT_FILE="", HTTPS_PROXY=""
    )
    assert time.monotonic() - started < 5 * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    assert done.returncode == 6 and done.stdout == "" and done.stderr.count("error: ") == 1, done.stderr
    assert why in done.stderr and f"python install {MINOR}`" in done.stderr
    command = done.stderr.partition("run `")[2].split()[0]
    assert Path(command).is_absolute() and os.access(command, os.X_OK)
    assert not list((elsewhere.folder / "recipes/small").glob("*requirements*"))


def test_the_image_s_own_python_compiles_as_the_host_s_would(
    layout: dict[str, Any], session_store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The packages of the base are in the store, where the session's image has put them."""
    environment = load_environment({**os.environ, "ENVBUILD_STORE": str(session_store)})
    loaded = load_recipe(REPOSITORY / "recipes/pt_cpu/recipe.toml")
    target, _ = loaded.target()
    lock = image_lock(loaded, target).inspect().lock
    assert lock is not None and layout["command"]
    for of_this_host in ("find_python", "own_python"):
        monkeypatch.setattr(image, of_this_host, lambda *_: None)
    with with_tmpdir(environment) as running:
        own = image.image_compiler(lock, "3.11", running, conda=False, offline=True, log=log)
    assert own is not None and own.version.startswith("3.11.")
    sources = [path for path in sorted(Path(json.__file__).parents[1].glob("*.py")) if path.stat().st_size < 1 << 20]

    def compiled(compiler: Any) -> list[tuple[str, bytes]]:
        tree = [(Entry(f"lib/{path.name}", FILE, size=path.stat().st_size), path.open("rb")) for path in sources]
        done = with_bytecode(iter(tree), compiler, ["lib"], 0)
        return [(entry.path, content.read()) for entry, content in done if content and entry.path.endswith(".pyc")]

    made, host = compiled(own), compiler_of(read_python(sys.executable))
    assert len(made) > 100
    if host.identity == own.identity:  # Debian 12, on Debian 12
        assert made == compiled(host)
