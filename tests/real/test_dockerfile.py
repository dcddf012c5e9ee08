"""Dockerfile.cpu and Dockerfile.gpu on a real daemon, with all packages from a private index."""

from __future__ import annotations

import base64
import http.server
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from lab import sources
from lab.buildkit import find_docker
from lab.dockerd import Lab
from lab.wheels import make_recipe

from envbuild.lock.format import parse

from .conftest import FILES_ONLY, REPOSITORY, Command

BASE = "lab-base:1"
# What Dockerfile.gpu installs where it is missing, here by hand: no archive of Debian can be reached in the
# builds, and apt-get of the lab's base does nothing. Of the compilers, those that the layers of this test need.
PACKAGES = ("gcc", "libc6-dev", "make", "patch", "python3.11-venv")
PASSWORD, MARKER = "hunter2-of-the-index", "marker-in-the-authority"
KNOWN = "TOTAL_EPOCHS SAVE_EVERY"  # in ddp_train/__init__.py, which each image has
VERSIONS = """
import importlib.metadata, json
print(json.dumps({one.name.lower(): one.version for one in importlib.metadata.distributions()}))
"""
LAYERS = """
[layers.greet]
version = "1.0"
url = "{index}/greet-1.0.tar.gz"
sha256 = "{greet.sha256}"
patches = ["greet.patch"]
[layers.caller]
version = "1.0"
system = "make"
url = "{index}/caller-1.0.tar.gz"
sha256 = "{caller.sha256}"
configure = ["GREET={{greet}}"]
requires = ["greet"]
"""


@pytest.fixture(scope="module")
def docker(docker_daemon: Lab) -> Callable[..., str]:
    """Run docker; returns what it printed to both streams."""
    program = find_docker()
    env = {**os.environ, **docker_daemon.environment(), "DOCKER_BUILDKIT": "1"}

    def run(*arguments: str | Path, **options: Any) -> str:
        done = subprocess.run(
            [program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=env,
            **options,
        )
        assert done.returncode == 0, done.stdout
        return done.stdout

    return run


@pytest.fixture(scope="module")
def base(
    docker: Callable[..., str], docker_daemon: Lab, session_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """Debian with Python, venv and compilers in the daemon: envbuild's own base, without the environment."""
    folder = tmp_path_factory.mktemp("base")
    listed = json.dumps(PACKAGES)
    make_recipe(
        folder / "recipes", "base", [], extra=f'[image]\npackages = {listed}\nsuite = "bookworm"\nworkdir = "/"\n'
    )
    command = Command(folder, {"ENVBUILD_STORE": str(session_store), **docker_daemon.environment()})
    command.json("docker", "base", "--no-verify", "--target", "cpu-x86_64")
    changes = 'RUN rm -r /opt/env; ln -sf true /usr/bin/apt-get\nENV PATH=/usr/bin:/bin VIRTUAL_ENV=""\nCMD ["bash"]\n'
    docker("build", "-t", BASE, "-", input=f"FROM base:cpu-x86_64\n{changes}")
    return BASE


class Index(http.server.SimpleHTTPRequestHandler):
    """A package index that requires a password. Its archives of sources need none, as on public servers."""

    files: Path

    def do_GET(self) -> None:
        expected = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != expected and not self.path.endswith(".tar.gz"):
            self.send_response(401)
            self.send_header("WWW-Authenticate", "Basic")
            self.end_headers()
        else:
            super().do_GET()

    def translate_path(self, path: str) -> str:
        name = unquote(path.rstrip("/").rpartition("/")[2])
        return str(self.files / name if name.endswith((".whl", ".tar.gz")) else self.files)  # every page lists all

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """A private index over TLS of all that the builds install: its host and port, and a folder.

    The folder holds the secrets, `pip.conf` and `ca.pem`, and the index's `files`.
    """
    folder = tmp_path_factory.mktemp("index")
    files = folder / "files"
    lock = REPOSITORY / "recipes/pt_cpu/cpu-x86_64.requirements.txt"
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(files)]
    download += ["--python-version", "3.11", "--only-binary", ":all:"]  # for the images' Python, not this host's
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    wanted = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    subprocess.run([*download, *wanted], check=True)
    subprocess.run([*download, "--no-deps", "--require-hashes", "-r", str(lock)], check=True)
    subject = ["-subj", "/CN=lab", "-days", "2", "-addext", "subjectAltName=IP:127.0.0.1"]
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "key.pem"]
    subprocess.run(
        ["openssl", "req", "-x509", *key, "-out", "cert.pem", *subject], cwd=folder, check=True, capture_output=True
    )
    (folder / "ca.pem").write_text(f"# {MARKER}\n{(folder / 'cert.pem').read_text()}")
    handler = type("Handler", (Index,), {"files": files})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"127.0.0.1:{server.server_port}"
    settings = f"[global]\nindex-url = https://me:{PASSWORD}@{address}/simple/\n[install]\ncompile = no\n"
    (folder / "pip.conf").write_text(settings)
    try:
        yield address, folder
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def checkout(index: tuple[str, Path], session_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the Dockerfiles read, and a recipe with source layers.

    pt_cpu's verification checks files and imports: the test trains in the image.
    """
    address, folder = index
    context = tmp_path_factory.mktemp("checkout")
    without = shutil.ignore_patterns("__pycache__")
    for name in ("ddp_train", "envbuild", "recipes", "sites"):
        shutil.copytree(REPOSITORY / name, context / name, ignore=without)
    for name in (".dockerignore", "Dockerfile.cpu", "Dockerfile.gpu", "LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(REPOSITORY / name, context / name)
    with (context / "recipes/pt_cpu/recipe.toml").open("a") as recipe:
        recipe.write(FILES_ONLY)
    # Without torch, and with two layers from source, the second built with the first.
    greet, caller = (sources.pack(name, folder / "files") for name in ("greet", "caller"))
    layers = LAYERS.format(index=f"https://{address}", greet=greet, caller=caller)
    layered = make_recipe(context / "recipes", "layered", ["tqdm==4.70.1"], extra=layers)
    (layered / "greet.patch").write_text("--- a/COPYING\n+++ b/COPYING\n@@ -0,0 +1 @@\n+patched for the lab\n")
    done = Command(context, {"ENVBUILD_STORE": str(session_store)})("lock", "layered", "--target", "cpu-x86_64")
    assert done.returncode == 0, done.stderr
    return context


@pytest.fixture(scope="module")
def build(docker: Callable[..., str], base: str, index: tuple[str, Path], checkout: Path) -> Callable[..., str]:
    """Build an image of the checkout; returns docker's output."""
    _, folder = index
    secrets = [f"--secret=id={name},src={folder / file}" for name, file in (("pip_conf", "pip.conf"), ("ca", "ca.pem"))]

    def run(file: str, tag: str, **arguments: str) -> str:
        given = [f"--build-arg={name}={value}" for name, value in {"BASE": base, **arguments}.items()]
        line = ["build", "--progress=plain", "--network=host", "-f", file, "-t", tag, *given, *secrets, "."]
        return docker(*line, cwd=checkout)

    return run


def assert_locked(docker: Callable[..., str], image: str, lock: str) -> None:
    """The image has the packages of a lock, and the trainer."""
    versions = json.loads(docker("run", "--rm", image, "python", "-c", VERSIONS).splitlines()[-1])
    assert versions.pop("ddp-train", versions.pop("ddp_train", None))
    assert {name.replace("_", "-"): version for name, version in versions.items()} == parse(lock, "lock").versions


def assert_nowhere(docker: Callable[..., str], image: str, folder: Path, *secrets: str) -> None:
    """None of `secrets` is in the image's layers, configuration or history."""
    output = docker("history", "--no-trunc", image) + docker("inspect", image)
    assert not [secret for secret in secrets if secret in output]
    (found,) = json.loads(docker("inspect", "--type", "image", image))
    # The daemon's folders of the layers: `docker save` of a torch environment takes 20 s.
    if folders := found["GraphDriver"]["Data"]:
        layers = [folders["UpperDir"], *folders["LowerDir"].split(":")]
        assert len(layers) == len(found["RootFS"]["Layers"])
    else:  # vfs
        docker("save", "-o", folder / "saved.tar", image)
        layers = [folder / "saved.tar"]
    search = ["grep", "-r", "-a", "-o", "-H", "-F", "--devices=skip", "\n".join([KNOWN, *secrets])]
    done = subprocess.run([*search, *layers], capture_output=True, text=True, env={**os.environ, "LC_ALL": "C"})
    assert done.returncode == 0, done.stderr
    assert {line.rpartition(":")[2] for line in done.stdout.splitlines()} == {KNOWN}, done.stdout


def test_pt_cpu_is_verified_in_the_build_and_no_secret_is_left(
    build: Callable[..., str], docker: Callable[..., str], tmp_path: Path
) -> None:
    output = build("Dockerfile.cpu", "pt_cpu:file")
    assert re.search(r"verified: .* in [\d.]+ s", output) and PASSWORD not in output
    line = ("torchrun", "--nproc-per-node", "1", "-m", "ddp_train", "2", "1", "--backend", "gloo")
    assert "Loss: " in docker("run", "--rm", "pt_cpu:file", *line)
    assert_locked(docker, "pt_cpu:file", (REPOSITORY / "recipes/pt_cpu/cpu-x86_64.requirements.txt").read_text())
    assert_nowhere(docker, "pt_cpu:file", tmp_path, PASSWORD, MARKER)


def test_source_layers_are_built_in_the_first_stage_of_dockerfile_gpu(
    build: Callable[..., str], docker: Callable[..., str], base: str, checkout: Path
) -> None:
    """NVIDIA's images cannot be had here: a recipe for CPUs and the lab's base stand in."""
    build("Dockerfile.gpu", "layered:file", BUILD_BASE=base, RECIPE="layered", TARGET="cpu-x86_64")
    assert "hello" in docker("run", "--rm", "layered:file", "call")
    licence = docker("run", "--rm", "layered:file", "cat", "/opt/env/share/licenses/greet/COPYING")
    assert "patched for the lab" in licence
    variables = json.loads(docker("inspect", "--type", "image", "layered:file"))[0]["Config"]["Env"]
    assert {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"} <= set(variables)
    assert_locked(docker, "layered:file", (checkout / "recipes/layered/cpu-x86_64.requirements.txt").read_text())
