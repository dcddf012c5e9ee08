"""Source-built layers in every artifact: built in an image with compilers or by this host, kept, and proven."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from lab import artifacts
from lab.apptainer import FLAGS, Apptainer
from lab.conda_channel import Channel
from lab.dockerd import Lab
from lab.sources import SourceArchive, pack
from lab.wheels import make_recipe, make_wheel

from envbuild.image.layout import Blobs
from envbuild.recipe.targets import host_arch
from envbuild.run_environment import load_environment
from envbuild.verify.image_file import open_image_file
from envbuild.verify.image_runtime import runtime_for

from .conftest import NO_DAEMON, Command, keep_layer, link_tree, tiny_site, use_base_of_pt_minimal
from .test_conda import conda_recipe, site
from .test_docker import docker
from .test_dockerfile import PACKAGES

ARCH = host_arch()
OTHER = {"x86_64": "aarch64", "aarch64": "x86_64"}[ARCH]
_TREE = "opt/env"


def layer_table(name: str, archive: SourceArchive, **more: object) -> str:
    """[layers.NAME] of a recipe, for an archive that is here."""
    told = {"version": archive.version, "url": archive.url, "sha256": archive.sha256, **more}
    return f"[layers.{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in told.items())


def fabric_site(folder: Path, session_store: Path, archive: SourceArchive, configure: Sequence[str]) -> Command:
    """The command in `folder`, with a recipe `fabric` of libfabric and a tiny wheel on the base of pt_minimal.

    It is verified without training, in which a source layer has no part.
    """
    make_wheel(folder / "wheels", "tiny")
    layers = layer_table("libfabric", archive, configure=list(configure))
    place = make_recipe(folder / "recipes", "fabric", ["tiny"], extra=f"[verify]\ntrainer = false\n{layers}")
    use_base_of_pt_minimal(place)
    return tiny_site(folder, session_store)


@pytest.fixture(scope="module")
def fabric(tmp_path_factory: pytest.TempPathFactory, session_store: Path, libfabric_source: SourceArchive) -> Command:
    """The command in a folder with a recipe that has libfabric with one provider, which takes half as long to build."""
    light = ["--disable-static", "--enable-only", "--enable-tcp", "CFLAGS=-O0"]
    return fabric_site(tmp_path_factory.mktemp("fabric"), session_store, libfabric_source, light)


@pytest.fixture(scope="module")
def files(fabric: Command) -> dict[str, Any]:
    """`envbuild build fabric --artifact enroot,apptainer`: what it said, and by kind what `--json` printed."""
    done = fabric("build", "fabric", "--artifact", "enroot,apptainer", "--json")
    assert done.returncode == 0, done.stderr
    enroot, apptainer = json.loads(done.stdout)["artifacts"]
    return {"said": done.stderr, "enroot": enroot, "apptainer": apptainer}


def checks_of(made: dict[str, Any]) -> dict[str, Any]:
    receipt = json.loads(Path(made["receipt"]).read_text())
    assert receipt["passed"]
    return {check["name"]: check for check in receipt["checks"]}


def inside(file: str, work: Path, *command: str) -> str:
    """What `command` prints in an image file, started as verification starts it."""
    environment = load_environment({**os.environ, "ENVBUILD_STORE": str(work / "store")})
    work = work / "work"
    work.mkdir(exist_ok=True)
    with runtime_for(open_image_file(Path(file)), None, environment).open(work) as launch:
        line, variables = launch(command[0], command[1:], {})
        done = subprocess.run(line, env=dict(variables), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_image_files_hold_the_layer_and_pass_with_it(
    fabric: Command, files: dict[str, Any], session_store: Path, tmp_path: Path
) -> None:
    lock = fabric.folder / f"recipes/fabric/cpu-{ARCH}.build.toml"
    assert f"{lock.relative_to(fabric.folder)}: no lock of the builder" in files["said"]
    names = lock.read_text()
    assert 'name = "gcc"' in names and 'name = "python3.11-minimal"' in names
    for kind in ("enroot", "apptainer"):
        checks = checks_of(files[kind])
        assert checks["layer:libfabric"]["status"] == "pass"
        assert "1 source-built layer" in checks["installed"]["seen"]
        assert "provider: tcp" in inside(files[kind]["path"], tmp_path, "fi_info", "-p", "tcp")
    held = inside(
        files["enroot"]["path"],
        tmp_path,
        "sh",
        "-c",
        f"cd /{_TREE}; ls lib/libfabric.so.1 share/licenses/libfabric/COPYING; which gcc || echo no gcc",
    )
    assert held.split() == ["lib/libfabric.so.1", "share/licenses/libfabric/COPYING", "no", "gcc"]
    shown = fabric.json("inspect", files["enroot"]["path"])
    (layer,) = shown["source_built"]
    assert (layer["name"], layer["version"], layer["location"]) == ("libfabric", "2.1.0", _TREE)
    bill = json.loads(fabric("inspect", files["apptainer"]["path"], "--sbom", "cyclonedx").stdout)
    (part,) = [one for one in bill["components"] if one["name"] == "libfabric"]
    assert part["type"] == "library" and part["purl"].startswith("pkg:generic/libfabric@2.1.0?")
    assert {"name": "envbuild:licence", "value": f"{_TREE}/{layer['licences'][0]}"} in part["properties"]
    assert "libfabric 2.1.0" in fabric("show", "fabric").stdout
    keep_layer(session_store, "libfabric")


def test_apptainer_itself_runs_what_was_built(files: dict[str, Any], real_apptainer: Apptainer) -> None:
    said = real_apptainer("exec", *FLAGS, files["apptainer"]["path"], "fi_info", "-p", "tcp")
    assert "provider: tcp" in said.stdout


def test_built_again_nothing_is_compiled_and_not_a_bit_differs(fabric: Command, files: dict[str, Any]) -> None:
    line = ["build", "fabric", "--artifact", "enroot,apptainer", "--locked", "--offline"]
    shutil.rmtree(fabric.folder / "build")
    done = fabric(*line, "--no-verify", "--json")
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)["artifacts"]
    assert [one["digest"] for one in again] == [files[kind]["digest"] for kind in ("enroot", "apptainer")]
    assert "configure" not in done.stderr and "builder" not in done.stderr


def test_the_docker_image_passes_in_two_containers_and_has_the_same_layer(
    fabric: Command, files: dict[str, Any], docker_daemon: Lab
) -> None:
    env = docker_daemon.environment()
    done = fabric("docker", "fabric", "--locked", "--json", **env)
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert checks_of(made)["layer:libfabric"]["status"] == "pass" and "configure" not in done.stderr
    said = docker(docker_daemon, "run", "--rm", made["path"], "fi_info", "-p", "tcp")
    assert "provider: tcp" in said
    text = f"/{_TREE}/share/envbuild/layers/libfabric.json"
    listed = json.loads(docker(docker_daemon, "run", "--rm", made["path"], "cat", text))
    layers = fabric.json("layers", "fabric", "--locked", "--offline")["layers"]
    folder = Path(layers[0]["path"])
    assert {row["path"] for row in listed["files"]} == {
        str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()
    }


def test_the_venv_passes_where_it_is_and_fails_when_a_file_of_the_layer_is_another(
    session_store: Path, libfabric_source: SourceArchive, tmp_path: Path
) -> None:
    # This host's compilers make the layer once for all workers: test_source_layers.py has the same. How fast the
    # library is does not matter here: without optimization and a static library, the compiler has a quarter to do.
    fabric = fabric_site(tmp_path, session_store, libfabric_source, ["--disable-static", "CFLAGS=-O0"])
    made = fabric.json("venv", "fabric")
    assert checks_of(made)["layer:libfabric"]["status"] == "pass"
    moved = tmp_path / "moved"
    shutil.move(made["path"], moved)
    said = subprocess.run([moved / "bin/fi_info", "-p", "tcp"], capture_output=True, text=True)
    assert said.returncode == 0 and "provider: tcp" in said.stdout, said.stderr
    library = moved / "lib/libfabric.so.1"
    assert library.stat().st_nlink == 1, "it is shared with the store"
    with library.open("r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        last = stream.read(1)
        stream.seek(-1, os.SEEK_END)
        stream.write(bytes([last[0] ^ 1]))
    (moved / "share/licenses/libfabric/COPYING").unlink()
    done = fabric("verify", moved)
    assert done.returncode == 5
    real = os.path.realpath(library).removeprefix(f"{os.path.realpath(moved)}/")
    assert f"altered file {real}" in done.stderr
    assert "missing file share/licenses/libfabric/COPYING" in done.stderr
    keep_layer(session_store, "libfabric")


# ---- a small project of our own; nothing is trained


@pytest.fixture
def small(tmp_path: Path, session_store: Path, fabric: Command, files: dict[str, Any]) -> Command:
    """The command at a site with one tiny wheel; see `recipe`, whose Debian packages are those locked for `fabric`."""
    make_wheel(tmp_path / "wheels", "tiny")
    (place := tmp_path / "recipes/small").mkdir(parents=True)
    for name in (f"cpu-{ARCH}.image.toml", f"cpu-{ARCH}.build.toml"):
        lock = (fabric.folder / "recipes/fabric" / name).read_text()
        (place / name).write_text(lock.replace('"fabric"', '"small"'))
    return tiny_site(tmp_path, session_store)


def recipe(folder: Path, archive: SourceArchive, extra: str = "", options: Sequence[str] = ()) -> Path:
    """A recipe `small` with the layer greet."""
    layers = layer_table("greet", archive, configure=list(options))
    return make_recipe(folder / "recipes", "small", ["tiny"], extra=f"{extra}\n{layers}")


def test_two_images_differ_in_the_layer_alone_and_diff_says_so(small: Command, tmp_path: Path) -> None:
    archive = pack("greet", tmp_path)
    made = []
    for word in ("hello", "good evening"):
        recipe(tmp_path, archive, options=[f"--with-word={word}"])
        out = tmp_path / f"{word.split()[-1]}.sqsh"
        made.append(small.json("enroot", "small", "--no-verify", "--out", out)["path"])
        assert inside(made[-1], tmp_path, "greet").startswith(word)
    found = small("diff", *made)
    assert found.returncode == 1
    assert "~ greet 1.0, same version, other content" in found.stdout
    changed = json.loads(small("diff", *made, "--json").stdout)
    assert not changed["python_packages"] and not changed["debian_packages"]
    files = {row["name"] for row in changed["files"] if row["name"].startswith(_TREE)}
    named = ("bin/greet", "lib/libgreet.so.1", "libexec/greet/helper", "share/envbuild/layers/greet.json")
    assert {f"{_TREE}/lib/libgreet.so.1", f"{_TREE}/{named[-1]}"} <= files
    assert files <= {f"{_TREE}/{name}" for name in named}
    assert "greet  1.0" in small("inspect", made[0]).stdout


def test_the_same_sources_and_packages_give_the_same_layer_in_another_store(
    small: Command, session_store: Path, tmp_path: Path
) -> None:
    archive = pack("greet", tmp_path)
    recipe(tmp_path, archive)
    line = ["layers", "small", "--json"]
    first = small.json(*line[:-1])["layers"][0]
    other = tmp_path / "store"
    # Packages need not be fetched again; builder and layer are made anew.
    link_tree(session_store / "blobs", other / "blobs")
    done = small(*line, "--locked", ENVBUILD_STORE=str(other))
    assert done.returncode == 0, done.stderr
    second = json.loads(done.stdout)["layers"][0]
    assert "the builder image of" in done.stderr and "greet 1.0: configure" in done.stderr
    assert second["path"].startswith(str(other)) and second["digest"] == first["digest"]
    assert second["files"] == first["files"]


def test_a_base_without_compilers_is_refused_and_one_with_them_is_taken(small: Command, tmp_path: Path) -> None:
    archive = pack("greet", tmp_path)
    blobs = Blobs(tmp_path / "blobs")
    below = artifacts.layer(blobs, {"usr/bin/python3.11": "x"})
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[ARCH]
    image, _ = artifacts.image(blobs, [below], arch=arch)
    artifacts.layout(tmp_path / "base", blobs, [(image, "1")])
    base = '[image]\nbase = "oci:../../base:1"\npython = "/usr/bin/python3.11"\n'
    place = recipe(tmp_path, archive, base)
    before = sorted(tmp_path.rglob("*"))
    for command in (["plan", "small", "--artifact", "docker"], ["enroot", "small"]):
        done = small(*command)
        assert done.returncode == 2, done.stderr
        assert "recipe.toml:5:" in done.stderr and "`build_base`" in done.stderr
    assert sorted(tmp_path.rglob("*")) == before, "something was written"
    # Such an image here: the builder of Debian packages, as an image of its own. Its packages are those of the base in
    # test_dockerfile.py, so that the store has the layer already.
    make_recipe(tmp_path / "recipes", "devel", [], extra=f"[image]\npackages = {json.dumps(PACKAGES)}")
    devel = ["docker", "devel", "--target", f"cpu-{ARCH}", "--no-verify", "--out", "oci:devel"]
    small.json(*devel)
    recipe(tmp_path, archive, base + 'build_base = "oci:../../devel"\n')
    out = tmp_path / "small.sqsh"
    done = small("enroot", "small", "--no-verify", "--out", out)
    assert done.returncode == 0, done.stderr
    assert 'reference = "oci:../../devel"' in (place / f"cpu-{ARCH}.build.toml").read_text()
    assert "greet 1.0: built in" in done.stderr
    names = [row["name"] for row in small.json("inspect", out)["source_built"]]
    assert names == ["greet"]


def test_another_processors_layers_are_asked_of_a_node_that_has_it(small: Command, tmp_path: Path) -> None:
    place = recipe(tmp_path, pack("greet", tmp_path))
    use_base_of_pt_minimal(place, OTHER)
    line = ["docker", "small", "--target", f"cpu-{OTHER}", "--out", "oci:image"]
    done = small(*line, "--locked")
    assert done.returncode == 3
    assert small("lock", "small", "--target", f"cpu-{OTHER}").returncode == 0
    assert (place / f"cpu-{OTHER}.build.toml").is_file()
    assert small("lock", "small", "--target", f"cpu-{OTHER}", "--check").returncode == 0
    done = small(*line, "--locked")
    assert done.returncode == 6 and f"lacks some of greet for {OTHER}" in done.stderr
    assert "envbuild layers" in done.stderr and not (tmp_path / "image").exists()
    (place / f"cpu-{OTHER}.build.toml").unlink()
    assert small("lock", "small", "--target", f"cpu-{OTHER}", "--check").returncode == 3
    done = small(*line, "--locked")
    assert done.returncode == 3 and f"cpu-{OTHER}.build.toml: no lock of the builder" in done.stderr
    for artifact in ("venv", "docker"):
        plan = ["plan", "small", "--target", f"cpu-{OTHER}", "--artifact", artifact, "--no-verify"]
        assert small(*plan).returncode == 6
        planned = small.json(*plan, "--elsewhere")
        assert "source" in [layer["kind"] for layer in planned["layers"]]


def test_a_build_that_fails_leaves_the_venv_that_is_there(small: Command, tmp_path: Path) -> None:
    recipe(tmp_path, pack("greet", tmp_path))
    made = small.json("venv", "small", "--no-verify")
    greet = Path(made["path"]) / "bin/greet"
    assert subprocess.run([greet], capture_output=True, text=True).stdout.startswith("hello")
    assert small.json("venv", "small", "--no-verify")["built"] is False
    (Path(made["path"]) / "share/envbuild/layers/greet.json").unlink()
    assert small.json("venv", "small", "--no-verify")["built"] is True
    (tmp_path / "worse").mkdir()
    recipe(tmp_path, pack("greet", tmp_path / "worse", {"main.c": "int main(void) { return x; }\n"}))
    done = small("venv", "small", "--no-verify")
    assert done.returncode == 4 and "greet 1.0: make failed" in done.stderr
    assert "main.c" in done.stderr and greet.is_file()
    assert not [path for path in greet.parents[2].iterdir() if ".envbuild-" in path.name]


def test_a_file_that_a_wheel_has_already_is_not_replaced(small: Command, tmp_path: Path) -> None:
    recipe(tmp_path, pack("greet", tmp_path))
    script = {"tiny-1.0.data/scripts/greet": b"#!python\nprint('tiny')\n"}
    make_wheel(tmp_path / "wheels", "tiny", files=script)
    for line in (["venv", "small"], ["enroot", "small"]):
        done = small(*line, "--no-verify")
        assert done.returncode == 4, done.stderr
        assert "layer greet 1.0 and tiny 1.0 both have bin/greet" in done.stderr
        assert not list(tmp_path.glob("build/small/*/*"))


def pack_worded(folder: Path) -> SourceArchive:
    """A Python project whose build imports the environment's NumPy; its program prints that version."""
    project = folder / "worded-1.0"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "worded"\nversion = "1.0"\nscripts = {worded = "worded:main"}\n'
    )
    (project / "setup.py").write_text(
        "import numpy, sys\nfrom setuptools import setup\n"
        "open('worded.py', 'w').write(f'def main(): print({numpy.__version__!r})')\n"
        "setup(py_modules=['worded'])\n"
    )
    (project / "LICENSE").write_text("MIT\n")
    archive = Path(shutil.make_archive(str(folder / "worded"), "gztar", folder, project.name))
    return SourceArchive(archive, hashlib.sha256(archive.read_bytes()).hexdigest(), "1.0")


def test_conda_environments_and_their_images_hold_the_layers_beside_the_packages(
    conda_channel: Channel, session_store: Path, tmp_path: Path
) -> None:
    variables = site(tmp_path, conda_channel.folder.as_uri())
    command = Command(tmp_path, {"ENVBUILD_STORE": str(session_store), **variables, **NO_DAEMON})
    tables = layer_table("greet", pack("greet", tmp_path)) + layer_table(
        "worded", pack_worded(tmp_path), system="wheel"
    )
    conda_recipe(tmp_path, ["tqdm", "numpy"], tables)
    done = command("conda", "tiny", "--no-verify", "--json")
    assert done.returncode == 0 and "worded 1.0: pip wheel" in done.stderr, done.stderr
    prefix = Path(json.loads(done.stdout)["path"])
    assert command.json("conda", "tiny", "--no-verify")["built"] is False
    state = json.loads((prefix / "envbuild.json").read_text())
    (numpy,) = {row[1] for row in state["packages"] if row[0] == "numpy"}
    image = command.json("enroot", "tiny", "--no-verify")["path"]
    for program, text in (("greet", "hello"), ("worded", numpy)):
        said = subprocess.run([prefix / "bin" / program], capture_output=True, text=True)
        assert said.stdout.startswith(text), said.stderr
        assert inside(image, tmp_path, program) == said.stdout
    for where in (prefix, image):
        found = command.json("inspect", where)["source_built"]
        assert [(one["name"], one["version"]) for one in found] == [("greet", "1.0"), ("worded", "1.0")]
    assert all(one["files"].startswith("sha256:") for one in state["layers"])
