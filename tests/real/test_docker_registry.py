"""Images in a real registry on loopback: pushed, changed and pushed again, built upon."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from lab.dockerd import Lab
from lab.hub import hub_image
from lab.registry import Lab as RegistryLab
from lab.registry import missing, registry
from lab.wheels import make_recipe, make_wheel

from envbuild.base.packages import digest_of
from envbuild.cache.http import Transport
from envbuild.image.layout import Blobs
from envbuild.image.model import (
    DOCKER_CONFIG,
    DOCKER_INDEX,
    DOCKER_LAYER_GZIP,
    DOCKER_MANIFEST,
    OCI_INDEX,
    Descriptor,
    canonical,
)
from envbuild.image.registry import open_registry

from .conftest import FILES_ONLY, REPOSITORY, Command, own_copy

NO_DAEMON = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}
HUB = "pytorch/pytorch:2.7.1-cuda12.6-cudnn9-runtime"


@pytest.fixture(scope="module")
def loopback(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RegistryLab]:
    reason = missing()
    if reason is not None:
        pytest.skip(reason)
    with registry(tmp_path_factory.mktemp("registry")) as lab:
        yield lab


@pytest.fixture
def command(tmp_path: Path, session_store: Path, loopback: RegistryLab, docker_daemon: Lab) -> Command:
    """The command at a site where docker.io is mirrored by the registry on loopback."""
    site = tmp_path / "site.toml"
    site.write_text(
        f'[registries."docker.io"]\nmirrors = ["http://{loopback.address}"]\n'
        f'[registries."{loopback.address}"]\ninsecure = true\n'
    )
    env = {"ENVBUILD_STORE": str(session_store), "ENVBUILD_SITE": str(site)}
    return Command(tmp_path, {**env, **docker_daemon.environment()})


@pytest.fixture(scope="module")
def hub(loopback: RegistryLab, session_store: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """An index with an image of the shape of PyTorch's on Docker Hub; returns its amd64 manifest's digest."""
    blobs = Blobs(tmp_path_factory.mktemp("hub"))
    variables = {**os.environ, "ENVBUILD_STORE": str(session_store)}
    manifest, described = hub_image(blobs, variables)
    reach = Transport(insecure=frozenset([loopback.address]))
    there = open_registry(f"{loopback.address}/{HUB}", reach, {})
    there.push(blobs, described, manifest.raw, manifest.media_type, manifest.digest)
    one = manifest.descriptor
    item = Descriptor(one.media_type, one.digest, one.size, "amd64", "linux")
    index = {"schemaVersion": 2, "mediaType": OCI_INDEX, "manifests": [item.as_json()]}
    there.put_manifest(canonical(index), OCI_INDEX, HUB.rpartition(":")[2])
    there.close()
    return manifest.digest


def test_pytorch_hub_is_locked_built_verified_and_pushed_back(
    command: Command, loopback: RegistryLab, docker_daemon: Lab, hub: str
) -> None:
    """It trains in one process, because torch is compiled at each start here; tests/real/test_docker.py has a whole
    verification."""
    place = own_copy(command, "pytorch_hub", FILES_ONLY)
    name = f"{loopback.address}/team/hub:1"
    made = command.json("docker", "pytorch_hub", "--tag", name)
    lock = (place / "cpu-x86_64.image.toml").read_text()
    assert hub in lock and loopback.address not in lock, "a lock holds the digest and no mirror"
    receipt = json.loads(Path(made["receipt"]).read_text())
    assert receipt["passed"]
    train = "python -m ddp_train 1 1 --backend gloo --report report.json && cat report.json"
    env = {**os.environ, **docker_daemon.environment()}
    run = ["docker", "run", "--rm", name, "sh", "-c", train]
    done = subprocess.run(run, capture_output=True, text=True, env=env)
    assert done.returncode == 0 and '"torch_version": "2.13' in done.stdout, done.stdout + done.stderr
    job = ["job", "pytorch_hub", "--scheduler", "kubernetes", "--work", "/data", "--strategy", "single"]
    refused = command(*job)
    assert refused.returncode == 2 and "was not pushed" in refused.stderr, refused.stderr
    pushed = command.json("docker", "pytorch_hub", "--locked", "--tag", name, "--push")
    assert pushed["digest"] == made["digest"]
    # The base's two layers are in the registry already, in another repository: taken over, not sent.
    assert pushed["pushed"]["mounted"] == 2 and pushed["pushed"]["uploaded_bytes"] < 2_000_000
    assert pushed["reference"] == f"{loopback.address}/team/hub@{made['digest']}"
    receipt = json.loads(Path(made["receipt"]).read_text())
    assert receipt["artifact"]["pushed"] == pushed["reference"]
    schema = json.loads((REPOSITORY / "docs/receipt.schema.json").read_text())
    jsonschema.validate(receipt, schema)
    rendered = command(*job)
    assert f'image: "{pushed["reference"]}"' in rendered.stdout, rendered.stderr
    attested_for_others(command, pushed["reference"])
    seen = subprocess.run(
        ["skopeo", "inspect", "--tls-verify=false", f"docker://{name}"], capture_output=True, text=True, check=True
    )
    labels = json.loads(seen.stdout)["Labels"]
    assert labels["com.example.lab"] == "hub" and labels["org.envbuild.recipe"] == "pytorch_hub"
    assert labels["org.opencontainers.image.base.digest"] == hub


def attested_for_others(command: Command, image: str) -> None:
    """Attest a pushed image; a colleague who has the site's key and the image's digest alone trusts and runs it."""
    for name in ("ci", "stranger", "other"):
        key = command.folder / f"{name}.pem"
        subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
        subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", key.with_suffix(".pub")], check=True)
    for name, more in (("stranger", ()), ("ci", ("--with", "sbom", "--with", "provenance"))):
        command.json("attest", image, "--key", f"{name}.pem", *more)
    folder = command.folder.with_name(f"{command.folder.name}-colleague")  # else the artifacts of the project count
    folder.mkdir()
    site = Path(command.env["ENVBUILD_SITE"]).read_text() + f'[trust]\nsigners = ["{command.folder}/ci.pub"]\n'
    (folder / "site.toml").write_text(site)
    env = {"ENVBUILD_STORE": str(folder / "store"), "ENVBUILD_SITE": str(folder / "site.toml")}
    colleague = Command(folder, {**command.env, **env})
    told = colleague.json("trust", image)
    assert told["with"] == ["sbom", "provenance"] and told["signer"].endswith("ci.pub")
    job = ("job", image, "--scheduler", "kubernetes", "--work", "/data", "--strategy", "single")
    assert f'image: "{image}"' in colleague(*job).stdout
    (folder / "site.toml").write_text(site.replace("ci.pub", "other.pub"))
    refused = colleague("trust", image)
    assert refused.returncode == 5 and "it has no receipt attested by a signer" in refused.stderr, refused.stderr


def test_a_base_that_moved_is_still_built_as_locked(
    command: Command, loopback: RegistryLab, hub: str, session_store: Path
) -> None:
    own_copy(command, "pytorch_hub")
    first = command.json("docker", "pytorch_hub", "--no-verify", "--out", "oci:first", **NO_DAEMON)
    reach = Transport(insecure=frozenset([loopback.address]))
    there = open_registry(f"{loopback.address}/{HUB}", reach, {})
    raw, kind = there.manifest(hub)
    other = canonical({**json.loads(raw), "annotations": {"com.example": "rebuilt"}})
    there.put_manifest(other, kind, HUB.rpartition(":")[2])
    second = command.json("docker", "pytorch_hub", "--locked", "--no-verify", "--out", "oci:second", **NO_DAEMON)
    assert second["digest"] == first["digest"]
    said = command("lock", "pytorch_hub", "--target", "cpu-x86_64", "--upgrade").stderr
    assert hub in said and digest_of(other) in said


def test_a_base_without_the_architecture_or_interpreter_is_refused(command: Command, hub: str) -> None:
    place = own_copy(command, "pytorch_hub")
    recipe = (place / "recipe.toml").read_text()
    (place / "recipe.toml").write_text(recipe.replace("[targets.cpu-x86_64]", "[targets.cpu-aarch64]"))
    done = command("docker", "pytorch_hub", "--target", "cpu-aarch64", "--out", "oci:x")
    assert done.returncode == 3 and "arm64" in done.stderr, done.stderr
    (place / "recipe.toml").write_text(recipe.replace("/opt/conda/bin", "/usr/local/bin"))
    done = command("docker", "pytorch_hub", "--no-verify", "--out", "oci:x")
    assert done.returncode == 4 and "/opt/conda/bin/python3.11" in done.stderr, done.stderr


@pytest.fixture
def small(command: Command) -> Command:
    """A recipe of a 6 MB wheel and a small one, wheels from a folder of the test."""
    wheels = command.folder / "wheels"
    make_wheel(wheels, "large", files={"large/data.bin": os.urandom(6_000_000)})
    for version in ("1.0", "2.0"):
        make_wheel(wheels, "little", version)
    command.env |= {"PIP_FIND_LINKS": str(wheels), "PIP_NO_INDEX": "1"}
    folder = make_recipe(command.folder / "recipes", "small", ["large==1.0", "little==1.0"])
    lock = (REPOSITORY / "recipes/pt_cpu/cpu-x86_64.image.toml").read_text()
    (folder / "cpu-x86_64.image.toml").write_text(lock.replace('"pt_cpu"', '"small"'))
    return command


def test_after_a_small_change_only_what_changed_is_pushed(small: Command, loopback: RegistryLab) -> None:
    name = f"{loopback.address}/team/small:1"
    first = small.json("docker", "small", "--no-verify", "--tag", name, "--push", **NO_DAEMON)
    assert first["pushed"]["uploaded_bytes"] > 6_000_000
    make_recipe(small.folder / "recipes", "small", ["large==1.0", "little==2.0"])
    second = small.json("docker", "small", "--no-verify", "--tag", name, "--push", **NO_DAEMON)
    # The small packages' layer, the record of the whole with its manifest of 5,000 files, and the configuration.
    assert second["pushed"]["uploaded"] == 3 and second["pushed"]["uploaded_bytes"] < 600_000
    assert second["digest"] != first["digest"]
    third = small.json("docker", "small", "--no-verify", "--tag", name, "--push", **NO_DAEMON)
    assert third["pushed"]["uploaded"] == 0


# What `enroot import` asks a registry for, and nothing else (enroot 4.1, src/docker.sh).
ENROOT_ACCEPTS = f"{DOCKER_MANIFEST}, {DOCKER_INDEX}"


def served(name: str) -> tuple[int, str]:
    """The status and media type that a registry answers when it is asked as enroot asks."""
    host, _, rest = name.partition("/")
    path, _, pointer = rest.rpartition(":")
    url = f"http://{host}/v2/{path}/manifests/{pointer}"
    request = urllib.request.Request(url, headers={"Accept": ENROOT_ACCEPTS})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as answer:
            return answer.status, answer.headers["Content-Type"]
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_in_dockers_format_enroot_is_served_what_it_asks_for(small: Command, loopback: RegistryLab) -> None:
    name = f"{loopback.address}/team/small:docker"
    push = ("docker", "small", "--no-verify", "--push", "--tag")
    plain = small.json(*push, name.replace(":docker", ":oci"), **NO_DAEMON)
    assert served(name.replace(":docker", ":oci"))[0] == 404
    made = small.json(*push, name, "--format", "docker", **NO_DAEMON)
    assert served(name) == (200, DOCKER_MANIFEST)
    seen = subprocess.run(
        ["skopeo", "inspect", "--raw", "--tls-verify=false", f"docker://{name}"], capture_output=True, check=True
    )
    manifest = json.loads(seen.stdout)
    assert manifest["mediaType"] == DOCKER_MANIFEST
    assert manifest["config"]["mediaType"] == DOCKER_CONFIG
    assert {layer["mediaType"] for layer in manifest["layers"]} == {DOCKER_LAYER_GZIP}
    # The image is the same; what nodes pull is this manifest.
    assert made["digest"] == plain["digest"] and made["pushed"]["uploaded"] == 0
    assert made["reference"].endswith(f"@{digest_of(seen.stdout)}") and made["reference"] != plain["reference"]


@pytest.mark.parametrize("form", ["oci", "docker"])
def test_docker_pulls_and_runs_what_was_pushed(
    small: Command, loopback: RegistryLab, docker_daemon: Lab, form: str
) -> None:
    name = f"{loopback.address}/team/pulled:{form}"
    push = ("docker", "small", "--no-verify", "--tag", name, "--push", "--format", form)
    pushed = small.json(*push, **NO_DAEMON)
    env = {**os.environ, **docker_daemon.environment()}
    run = ["docker", "run", "--rm", pushed["reference"], "python", "-c", "import little; print(little.__version__)"]
    done = subprocess.run(run, capture_output=True, text=True, env=env)
    assert done.stdout == "1.0\n", done.stderr


@pytest.mark.parametrize("source", ["docker-daemon", "docker-archive", "oci"])
def test_local_images_serve_as_bases(small: Command, docker_daemon: Lab, source: str, tmp_path: Path) -> None:
    """A base by daemon, archive or layout: its digest is locked, and another image in its place refused."""
    env = {**os.environ, **docker_daemon.environment()}
    folder = make_recipe(
        small.folder / "recipes",
        "above",
        ["little==2.0"],
        extra=f'[image]\nbase = "{_place(source)}"\npython = "/usr/bin/python3.11"\n',
    )
    small.json("docker", "small", "--no-verify", "--tag", "lab/base:1")
    if source == "docker-archive":
        with (folder / "base.tar").open("wb") as stream:
            subprocess.run(["docker", "save", "lab/base:1"], stdout=stream, env=env, check=True)
    elif source == "oci":  # compressed as Docker 20.10 does not read it
        plain = f"oci:{small.folder / 'plain'}"
        small.json("docker", "small", "--no-verify", "--out", plain, "--tag", "lab/base:1", **NO_DAEMON)
        subprocess.run(
            [
                "skopeo",
                "copy",
                "--dest-compress-format",
                "zstd",
                "--dest-compress",
                f"{plain}:lab/base:1",
                f"oci:{folder / 'base'}:1",
            ],
            check=True,
            capture_output=True,
        )
        manifests = [
            path.read_bytes() for path in (folder / "base/blobs/sha256").iterdir() if path.stat().st_size < 5000
        ]
        assert any(b"tar+zstd" in text for text in manifests)
    # The base has bytecode of version 1.0, which must not run in an image that has none of version 2.0.
    bare = ["--no-bytecode"] if source == "oci" else []
    made = small.json("docker", "above", "--no-verify", *bare)
    script = "import little, sys; print(little.__version__, sys.prefix)"
    done = subprocess.run(
        ["docker", "run", "--rm", made["path"], "python", "-c", script], capture_output=True, text=True, env=env
    )
    assert done.stdout == "2.0 /opt/env\n", done.stderr
    if source == "oci":
        shutil.rmtree(folder / "base")
        out = f"oci:{folder / 'base'}"
        small.json("docker", "small", "--no-verify", "--no-bytecode", "--out", out, **NO_DAEMON)
        store = {"ENVBUILD_STORE": str(tmp_path / "empty")}
        refused = small("docker", "above", "--locked", "--no-verify", "--out", "oci:x", **store)
        assert refused.returncode == 4 and "but the lock names sha256:" in refused.stderr, refused.stderr


def _place(source: str) -> str:
    return {
        "docker-daemon": "docker-daemon:lab/base:1",
        "docker-archive": "docker-archive:base.tar",
        "oci": "oci:base",
    }[source]
