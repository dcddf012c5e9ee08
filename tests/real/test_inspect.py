"""inspect and diff on real artifacts: in a daemon, a registry, files; and with dpkg and tar as second opinions."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from lab import artifacts as made
from lab.dockerd import Lab
from lab.registry import Lab as RegistryLab
from lab.registry import missing, registry
from lab.wheels import make_recipe

from envbuild.base.libraries import inventory
from envbuild.image.layout import Blobs

from .conftest import ARCH, Command, use_base_of_pt_minimal

LIBC = Path(f"/usr/lib/{os.uname().machine}-linux-gnu/libc.so.6")
SITE = "usr/local/lib/python3.11/site-packages"
NO_DAEMON = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryLab]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with registry(tmp_path_factory.mktemp("registry")) as lab:
        yield lab


@pytest.fixture
def command(tmp_path: Path, loopback: RegistryLab, docker_daemon: Lab) -> Command:
    site = tmp_path / "site.toml"
    site.write_text(f'[registries."{loopback.address}"]\ninsecure = true\n')
    env = {"ENVBUILD_STORE": str(tmp_path / "store"), "ENVBUILD_SITE": str(site)}
    return Command(tmp_path, {**env, **docker_daemon.environment()})


@pytest.fixture
def forms(command: Command, loopback: RegistryLab, docker_daemon: Lab) -> dict[str, str]:
    """One image that envbuild did not make, carried by other tools to where images lie: place → spelling."""
    blobs = Blobs(command.folder / "blobs")
    status = Path("/var/lib/dpkg/status").read_bytes()
    libraries = {f"usr/lib/{path.name}": path.read_bytes() for path in (LIBC, *LIBC.parent.glob("ld-linux-*.so.*"))}
    base = made.layer(blobs, {"var/lib/dpkg/status": status, "usr/bin/": "", "old": "1", **libraries})
    top = made.layer(blobs, {**made.package("six", "1.16", {"six.py": "1"}, site=SITE), ".wh.old": ""})
    descriptor, config = made.image(blobs, [base, top], Env=["PATH=/bin", "HF_TOKEN=hunter2"], Cmd=["sh"])
    made.layout(command.folder / "layout", blobs, [(descriptor, "lab:1")])
    made.docker_archive(command.folder / "image.tar", blobs, config, [base, top], "inspected:1")
    copy = ["skopeo", "copy", "--quiet", "--insecure-policy", "--dest-tls-verify=false"]
    remote = f"docker://{loopback.address}/team/lab:1"
    subprocess.run([*copy, "oci:layout:lab:1", remote], cwd=command.folder, check=True)
    load = ["docker", "load", "--quiet", "--input", "image.tar"]
    subprocess.run(load, cwd=command.folder, check=True, env=command.variables({}))
    return {
        "layout": "layout",
        "archive": "docker-archive:image.tar",
        "registry": remote,
        "daemon": "inspected:1",
        "daemon, spelt out": "docker-daemon:inspected:1",
    }


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="not installed: skopeo")
def test_an_image_is_the_same_wherever_it_lies(command: Command, forms: dict[str, str]) -> None:
    listed = ["dpkg-query", "--show", "--showformat=${db:Status-Status} ${Package} ${Version} ${Architecture}\n"]
    rows = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.splitlines()
    expected = sorted(row.split()[1:] for row in rows if row.startswith("installed "))
    node = command.folder / "node/libfabric.so.1"
    node.parent.mkdir()
    shutil.copy(LIBC.with_name("libm.so.6"), node)  # it needs libc.so.6, too
    stack = command.folder / "stack.toml"
    stack.write_text(f'[host_stack]\nmode = "inject"\nlibfabric = "{node.parent}"\n')
    (command.folder / "stack.stack.json").write_text(json.dumps(inventory([str(node)], alone=True)))
    for place, text in forms.items():
        # a store of its own each: nothing is known from the place before
        store = {"ENVBUILD_STORE": str(command.folder / f"store {place}")}
        found = command.json("inspect", text, **store)
        packages = [[p["name"], p["version"], p["arch"]] for p in found["debian_packages"]]
        assert sorted(packages) == expected, place
        assert [p["name"] for p in found["python_packages"]] == ["six"]
        assert found["env"] == {"PATH": "/bin", "HF_TOKEN": "****"} and found["cmd"] == ["sh"]
        assert [layer["title"] for layer in found["layers"]] == [f"RUN step {n} --token=****" for n in range(2)]
        done = command("diff", "layout", text, **store)
        assert (done.returncode, done.stdout) == (0, "equal\n"), place
        sbom = command("inspect", text, "--sbom", "cyclonedx", **store)
        assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(sbom.stdout) is None
        if place in ("registry", "daemon"):
            verdict = command.json("check", text, "--site", stack, **store)
            assert [(row["status"], row["text"]) for row in verdict["findings"]] == [
                ("good", f"libfabric.so.1 is the nodes' {node}")
            ], place


@pytest.mark.skipif(shutil.which("skopeo") is None, reason="not installed: skopeo")
def test_a_container_changed_and_committed_differs_in_just_that(command: Command, forms: dict[str, str]) -> None:
    from contextlib import closing

    import docker

    with closing(docker.DockerClient(base_url=command.env["DOCKER_HOST"])) as client:
        box = client.containers.create("inspected:1", ["none"])
        (command.folder / "six.py").write_text("2")
        with tarfile.open(command.folder / "in.tar", "w") as archive:
            archive.add(command.folder / "six.py", "six.py")
        box.put_archive(f"/{SITE}", (command.folder / "in.tar").read_bytes())
        box.commit("inspected", "2", conf={"Env": ["PATH=/bin", "HF_TOKEN=hunter3"]})
        box.remove()
    done = command("diff", "inspected:1", "inspected:2", "--json")
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    assert "hunter" not in done.stdout
    assert [c["name"] for c in found["settings"] if c["name"].startswith("env")] == ["env HF_TOKEN"]
    assert f"{SITE}/six.py" in [c["name"] for c in found["files"]]
    assert not found["debian_packages"] and not found["python_packages"]


def test_misuse_names_what_is_missing(command: Command) -> None:
    done = command("inspect", "nothing:here")
    assert done.returncode == 2 and "has no image nothing:here" in done.stderr
    done = command("inspect", "buidl/venv", **NO_DAEMON)
    assert done.returncode == 6 and "buidl/venv is no file or folder" in done.stderr


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> tuple[Command, dict[str, str]]:
    """NumPy and Jinja as two venvs and an image layout, from one lock."""
    folder = tmp_path_factory.mktemp("pair")
    command = Command(folder, {"ENVBUILD_STORE": str(session_store), **NO_DAEMON})
    recipe = make_recipe(folder / "recipes", "pair", ["numpy", "jinja2"], targets=f"[targets.cpu-{ARCH}]\n")
    use_base_of_pt_minimal(recipe)
    for name in ("venv", "deep/venv"):
        command.json("venv", recipe, "--no-verify", "--out", folder / name)
    command.json("docker", recipe, "--no-verify", "--out", "oci:image")
    return command, {"venv": "venv", "other": "deep/venv", "image": "image"}


def test_a_venv_built_twice_is_equal_and_equals_the_image_of_its_lock(pair: tuple[Command, dict[str, str]]) -> None:
    command, places = pair
    for one, other in (("venv", "other"), ("venv", "image")):
        found = command.json("diff", places[one], places[other])
        assert found["equal"] and found["files"] == [], found
    # Python writes bytecode by itself; that is no difference.
    script = "import numpy, jinja2"
    subprocess.run(
        [command.folder / "venv/bin/python", "-c", script],
        check=True,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""},
    )
    assert command("diff", "venv", "deep/venv").returncode == 0


def test_what_was_changed_in_a_venv_after_its_build_is_found(pair: tuple[Command, dict[str, str]]) -> None:
    command, places = pair
    changed = command.folder / "changed"
    shutil.copytree(command.folder / places["venv"], changed, symlinks=True)
    site = changed / "lib/python3.11/site-packages"
    (site / "jinja2/__init__.py").write_text("changed = True\n")
    (site / "hook.pth").write_text("import this\n")
    shutil.rmtree(next(site.glob("markupsafe-*.dist-info")))
    for other in ("venv", "image"):
        done = command("diff", places[other], "changed", "--json", "--all")
        found = json.loads(done.stdout)
        assert done.returncode == 1
        assert [(c["change"], c["name"]) for c in found["python_packages"]] == [("removed", "markupsafe")]
        names = {c["name"]: c["change"] for c in found["files"]}
        base = "lib/python3.11/site-packages"
        assert names.pop(f"{base}/jinja2/__init__.py") == "changed"
        assert names.pop(f"{base}/hook.pth") == "added"
        assert set(names.values()) == {"removed"} and all("markupsafe-" in name for name in names)


def test_bills_of_materials_of_a_venv_and_an_image_are_valid_and_reproducible(
    pair: tuple[Command, dict[str, str]],
) -> None:
    command, places = pair
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    purls = {}
    for place in ("venv", "image"):
        texts = {command("inspect", places[place], "--sbom", "cyclonedx").stdout for _ in range(2)}
        (text,) = texts
        assert validator.validate_str(text) is None
        bom = json.loads(text)
        purls[place] = {c["purl"] for c in bom["components"]}
        numpy = next(c for c in bom["components"] if c["name"] == "numpy")
        assert numpy["licenses"]
    python = {purl for purl in purls["image"] if purl.startswith("pkg:pypi/")}
    assert python == purls["venv"]
    assert any("pkg:deb/debian/libc6@" in purl for purl in purls["image"] - python)
