"""Dockerfile.cpu and Dockerfile.gpu on a real daemon: by hand, and by `envbuild docker --builder dockerfile`."""

from __future__ import annotations

import base64
import http.server
import json
import os
import shutil
import signal
import ssl
import subprocess
import tarfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lab import sources
from lab.dockerd import Lab
from lab.wheels import make_recipe, make_wheel

from envbuild.artifacts.dockerfile import DockerCommand, find_docker
from envbuild.artifacts.image_manifest import FILE_NAME, OCI, compare, parse
from envbuild.base.errors import HostError
from envbuild.image.daemon import connect
from envbuild.image.limits import ImageLimits
from envbuild.verify.containers import image_rows

from .conftest import REPOSITORY, Command, own_copy

BASE, BUILD_BASE = "lab-base:1", "lab-build:1"
# What envbuild installs where it is missing, here by hand: the builds have no network.
COMPILERS = ("gcc", "g++", "libc6-dev", "make", "patch", "autoconf", "automake", "libtool", "pkg-config")
PASSWORD, MARKER = "hunter2-of-the-index", "marker-in-the-authority"
# Every file of an environment with its sha256, less what installers write each in their own way.
WALK = """
import hashlib, json, os
root = "/opt/env/lib/python3.11/site-packages"
notes = ("INSTALLER", "REQUESTED", "RECORD", "direct_url.json", "uv_cache.json")
found = {}
for parent, folders, files in os.walk(root):
    if "__pycache__" in folders:
        folders.remove("__pycache__")
    for name in files:
        if not (parent.endswith(".dist-info") and name in notes):
            path = os.path.join(parent, name)
            found[os.path.relpath(path, root)] = hashlib.sha256(open(path, "rb").read()).hexdigest()
own = ("python", "pydoc", "activate", "Activate", "deactivate")
scripts = sorted(name for name in os.listdir("/opt/env/bin") if not name.startswith(own))
print(json.dumps([found, scripts]))
"""

LIST_BYTECODE = "cd $VIRTUAL_ENV/lib/*/site-packages; ls */__pycache__; cat alpha/__pycache__/*"


@pytest.fixture(scope="module")
def build_command(docker_daemon: Lab) -> DockerCommand:
    """The docker that envbuild finds: one with BuildKit."""
    try:
        return find_docker({**os.environ, **docker_daemon.environment()})
    except HostError as error:
        pytest.skip(error.message)


@pytest.fixture(scope="module")
def docker(build_command: DockerCommand) -> Any:
    """Run docker; returns what it printed to both streams."""

    def run(*arguments: str | Path, check: bool = True, **options: Any) -> str:
        done = subprocess.run(
            [build_command.program, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=build_command.env,
            **options,
        )
        assert (done.returncode == 0) == check, done.stdout
        return done.stdout

    return run


@pytest.fixture(scope="module")
def make_base(
    docker: Any, docker_daemon: Lab, session_store: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., str]:
    """Make Debian with Python, venv and other packages under a name: envbuild's own base, without the environment."""

    def make(name: str, *packages: str) -> str:
        folder = tmp_path_factory.mktemp("base")
        listed = json.dumps(["python3.11-venv", *packages])
        make_recipe(
            folder / "recipes", "base", [], extra=f'[image]\npackages = {listed}\nsuite = "bookworm"\nworkdir = "/"\n'
        )
        env = {"ENVBUILD_STORE": str(session_store), **docker_daemon.environment()}
        command = Command(folder, env)
        command.json("docker", "base", "--no-verify", "--target", "cpu-x86_64")
        container = docker("create", "base:cpu-x86_64", "true").strip()
        docker("export", "-o", folder / "all.tar", container)
        docker("rm", container)
        subprocess.run(["tar", "--delete", "-f", folder / "all.tar", "opt/env"], check=True)
        docker("import", "--change", "CMD bash", folder / "all.tar", name)
        return name

    return make


@pytest.fixture(scope="module")
def base(make_base: Callable[..., str]) -> str:
    """Debian with Python and venv."""
    return make_base(BASE)


@pytest.fixture(scope="module")
def build_base(make_base: Callable[..., str]) -> str:
    """The same with compilers."""
    return make_base(BUILD_BASE, *COMPILERS)


@pytest.fixture
def small(lab: Command, docker_daemon: Lab, base: str) -> Command:
    """A recipe `small` on the lab's base, of wheels with all that wheels can bring."""
    points = b"[console_scripts]\nalpha-run = alpha:main\n"
    make_wheel(
        lab.folder / "wheels",
        "alpha",
        files={
            "alpha-1.0.dist-info/entry_points.txt": points,
            "alpha-1.0.data/scripts/alpha-sh": b"#!python\nprint(1)\n",
            "alpha-1.0.data/data/share/alpha.txt": b"data\n",
            # As numpy's wheel does: a compiled module with a hash in RECORD.
            "alpha/__pycache__/__init__.cpython-311.pyc": b"brought along",
            "alpha/broken.py": b"not python at all (\n",
        },
    )
    make_wheel(lab.folder / "wheels", "Beta_pkg", requires=["alpha"])
    extra = f'[image]\nbase = "docker-daemon:{base}"\npython = "/usr/bin/python3.11"\n'
    extra += "[image.env]\nODD = '''it's \"odd\" $HOME  \\ ${PATH} é'''\nPATH_TO = \"/a b\"\n"
    make_recipe(lab.folder / "recipes", "small", ["alpha", "beta-pkg"], extra=extra)
    lab.env.update(docker_daemon.environment())
    return lab


def contents(docker: Any, image: str) -> Any:
    return json.loads(docker("run", "--rm", image, "/opt/env/bin/python", "-c", WALK))


def config(docker: Any, image: str) -> Any:
    return json.loads(docker("inspect", "--type", "image", image))[0]["Config"]


def assert_nowhere(docker: Any, image: str, folder: Path, *secrets: str) -> None:
    """None of `secrets` is in the image's layers, configuration or history."""
    docker("save", "-o", folder / "saved.tar", image)
    wanted = [secret.encode() for secret in secrets]
    with tarfile.open(folder / "saved.tar") as archive:
        for member in archive:
            source = archive.extractfile(member) if member.isfile() else None
            data = source.read() if source else b""  # layers here are uncompressed
            assert not [secret for secret in wanted if secret in data], member.name
    said = docker("history", "--no-trunc", image) + docker("inspect", image)
    assert not [secret for secret in secrets if secret in said]


def test_both_builders_give_the_same_environment(small: Command, docker: Any) -> None:
    native = small.json("docker", "small", "--no-verify", "--tag", "small:native")
    bundle = small.folder / "ca.pem"
    bundle.write_text(f"# {MARKER}\n")
    proxy = f"http://me:{PASSWORD}@127.0.0.1:9"
    made = small.json(
        "docker",
        "small",
        "--builder",
        "dockerfile",
        "--no-verify",
        "--tag",
        "small:file",
        PIP_CERT=str(bundle),
        HTTPS_PROXY=proxy,
        https_proxy=proxy,
    )
    assert native["path"] == "small:native" and made["path"] == "small:file"
    files, scripts = contents(docker, "small:file")
    assert [files, scripts] == contents(docker, "small:native")
    assert "alpha/__init__.py" in files and scripts == ["alpha-run", "alpha-sh", "torchrun"]
    ours, theirs = config(docker, "small:file"), config(docker, "small:native")
    assert sorted(e for e in ours["Env"] if e != "PYTORCH_VERSION=") == sorted(theirs["Env"])
    assert any(e.startswith('ODD=it\'s "odd" $HOME  \\ ${PATH} é') for e in ours["Env"])
    assert ours["WorkingDir"] == theirs["WorkingDir"] and ours["Cmd"] == theirs["Cmd"]
    for label, value in theirs["Labels"].items():
        if label != "org.envbuild.plan.digest":
            assert ours["Labels"][label] == value.removeprefix("docker-daemon:"), label
    assert made["image_id"] == docker("images", "-q", "--no-trunc", "small:file").strip()
    assert_nowhere(docker, "small:file", small.folder, PASSWORD, MARKER)
    assert list((small.folder / "store" / "docker").iterdir()) == []
    again = small.json("docker", "small", "--builder", "dockerfile", "--no-verify")
    assert again["digest"] == made["digest"], "nothing changed, and docker's cache was not used"
    assert "envbuild-unfinished" not in docker("images", "--all")
    # What a wheel brings compiled stays as it is; the rest is compiled, once.
    listed = docker("run", "--rm", "small:file", "sh", "-c", LIST_BYTECODE)
    assert "brought along" in listed and "__main__.cpython-311.pyc" in listed


def test_the_image_holds_the_manifest_of_all_its_files(small: Command, docker: Any, docker_daemon: Lab) -> None:
    image = small.json("docker", "small", "--builder", "dockerfile", "--no-verify", "--tag", "small:file")["image_id"]
    manifest = parse(docker("run", "--rm", image, "cat", f"/{FILE_NAME}").encode(), image)
    docker("tag", image, "envbuild-unfinished:1700000000.0")  # as of a run that was killed
    small.json("docker", "small", "--builder", "dockerfile", "--no-verify", "--tag", "small:file")
    assert "envbuild-unfinished" not in docker("images", "--all")
    container = docker(
        "create", image, "sh", "-c", "rm /etc/debian_version; chmod 600 /etc/issue; : >/opt/env/new"
    ).strip()
    docker("start", "--attach", container)
    changed = docker("commit", container).strip()
    docker("rm", container)
    with connect(docker_daemon.environment()) as client:
        reports = [compare(manifest, image_rows(client, one, ImageLimits(), 120), OCI) for one in (image, changed)]
    found = [(one.missing, one.altered, one.unowned) for one in reports]
    docker("rmi", changed)
    assert found[0] == ([], [], []) and "opt/env/envbuild.json" in manifest.rows
    assert [path for kind in found[1] for path in kind] == ["/etc/debian_version", "/etc/issue", "/opt/env/new"]


def test_pt_cpu_is_built_trained_and_equal_to_the_venv(
    docker: Any, base: str, docker_daemon: Lab, session_store: Path, tmp_path: Path, pt_cpu: dict[str, Any]
) -> None:
    env = {"ENVBUILD_STORE": str(session_store), **docker_daemon.environment()}
    command = Command(tmp_path, env)
    own_copy(command, "pt_cpu")
    made = command.json("docker", "pt_cpu", "--locked", "--builder", "dockerfile", "--base", base, "--tag", "pt:file")
    receipt = json.loads(Path(made["receipt"]).read_text())
    assert receipt["passed"]
    digest = docker("run", "--rm", "pt:file", "sha256sum", "/opt/env/envbuild-image.manifest").split()[0]
    manifest = f"sha256:{digest}"
    assert receipt["artifact"] == {"kind": "docker", "path": "pt:file", "digest": made["digest"], "manifest": manifest}
    installed = next(check for check in receipt["checks"] if check["name"] == "installed")
    assert len(installed["evidence"]["packages"]) == 15
    files, scripts = contents(docker, "pt:file")
    venv = Path(pt_cpu["path"])
    here = subprocess.run(
        [venv / "bin/python", "-c", WALK.replace("/opt/env", str(venv))], capture_output=True, text=True, check=True
    )
    assert len(files) > 10_000 and [files, scripts] == json.loads(here.stdout)
    assert f"PYTORCH_VERSION={receipt['versions']['torch']}" in config(docker, "pt:file")["Env"]


@pytest.fixture
def checkout(small: Command) -> Path:
    """What `git clone` of this tree gives, with the recipe `small` and its lock."""
    place = small.folder / "checkout"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
    )
    if listed.returncode != 0:
        pytest.skip("not in a git repository")
    for name in filter(None, listed.stdout.split("\0")):
        if (REPOSITORY / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPOSITORY / name, place / name)
    done = small("lock", "small", "--wheels", "--target", "cpu-x86_64")
    assert done.returncode == 0, done.stderr
    shutil.copytree(small.folder / "recipes" / "small", place / "recipes" / "small")
    return place


@contextmanager
def private_index(wheels: Path, folder: Path) -> Iterator[tuple[str, Path]]:
    """A package index over TLS that asks for a password: its URL, and the authority to trust."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    openssl(
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-keyout",
        "key.pem",
        "-out",
        "cert.pem",
        "-subj",
        "/CN=lab",
        "-days",
        "2",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    )
    bundle = folder / "ca.pem"
    bundle.write_text(f"# {MARKER}\n{(folder / 'cert.pem').read_text()}")
    wanted = "Basic " + base64.b64encode(f"me:{PASSWORD}".encode()).decode()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.headers.get("Authorization") != wanted:
                self.send_response(401)
                self.send_header("WWW-Authenticate", "Basic")
                self.end_headers()
            else:
                super().do_GET()

        def translate_path(self, path: str) -> str:
            name = path.rstrip("/").rpartition("/")[2]
            return str(wheels / name if name.endswith(".whl") else wheels)  # every page lists all

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "cert.pem", folder / "key.pem")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"https://me:{PASSWORD}@127.0.0.1:{server.server_port}/simple/", bundle
    finally:
        server.shutdown()
        server.server_close()


def test_by_hand_from_a_private_index_leaves_no_secret(checkout: Path, small: Command, docker: Any) -> None:
    with private_index(small.folder / "wheels", small.folder) as (url, bundle):
        conf = small.folder / "secret.conf"
        conf.write_text(f"[global]\nindex-url = {url}\n")
        said = docker(
            "build",
            "--progress=plain",
            "--network=host",
            "-f",
            "Dockerfile.cpu",
            "-t",
            "by-hand:1",
            "--build-arg",
            f"BASE={BASE}",
            "--build-arg",
            "RECIPE=small",
            "--build-arg",
            "EXTRA_INDEX_URL=",
            "--secret",
            f"id=pip_conf,src={conf}",
            "--secret",
            f"id=ca,src={bundle}",
            ".",
            cwd=checkout,
        )
    assert "Successfully installed alpha-1.0" in said and PASSWORD not in said
    files, scripts = contents(docker, "by-hand:1")
    assert {"alpha/__init__.py", "ddp_train/__main__.py"} < set(files) and "alpha-run" in scripts
    assert_nowhere(docker, "by-hand:1", small.folder, PASSWORD, MARKER, "secret.conf")
    assert config(docker, "by-hand:1")["Labels"]["org.envbuild.recipe"] == "small"
    assert "alpha" in docker("run", "--rm", "by-hand:1", "python", "-c", "import alpha; print(alpha)")


def test_by_hand_from_a_folder_of_wheels_for_either_dockerfile(checkout: Path, small: Command, docker: Any) -> None:
    """Without a network at all. The CUDA base cannot be had here: the lab's stands in for both stages."""
    shutil.copytree(small.folder / "wheels", checkout / "wheels")
    shutil.copy(
        checkout / "recipes/small/cpu-x86_64.requirements.txt", checkout / "recipes/small/cu126-x86_64.requirements.txt"
    )
    for name in ("cpu", "gpu"):
        docker(
            "build",
            "--network=none",
            "-f",
            f"Dockerfile.{name}",
            "-t",
            f"wheels:{name}",
            "--build-arg",
            f"BASE={BASE}",
            "--build-arg",
            f"BUILD_BASE={BASE}",
            "--build-arg",
            "RECIPE=small",
            "--build-arg",
            "NO_INDEX=1",
            ".",
            cwd=checkout,
        )
    assert contents(docker, "wheels:cpu") == contents(docker, "wheels:gpu")
    env = config(docker, "wheels:gpu")["Env"]
    assert {"NVIDIA_VISIBLE_DEVICES=all", "NVIDIA_DRIVER_CAPABILITIES=compute,utility"} <= set(env)


def test_a_wheel_that_was_damaged_in_the_store_is_replaced_before_the_build(small: Command) -> None:
    assert small("lock", "small", "--wheels", "--target", "cpu-x86_64").returncode == 0
    lock = (small.folder / "recipes/small/cpu-x86_64.requirements.txt").read_text()
    digest = lock.partition("--hash=sha256:")[2][:64]
    place = small.folder / "store" / "wheels" / digest
    place.mkdir(parents=True)
    make_wheel(place, "alpha", files={"alpha/evil.py": b"1"})
    done = small("docker", "small", "--builder", "dockerfile", "--no-verify", "--tag", "damaged:1")
    assert done.returncode == 0, done.stderr
    assert f"wheels/{digest}/alpha-1.0-py3-none-any.whl: damaged" in done.stderr and list(place.iterdir()) == []


def test_an_interruption_leaves_no_context_no_container_and_no_name(small: Command, docker: Any) -> None:
    make_wheel(small.folder / "wheels", "gamma")  # so that no step is docker's to remember
    make_recipe(small.folder / "recipes", "cut", ["gamma"])
    line = ("docker", "cut", "--builder", "dockerfile", "--base", BASE, "--no-verify")
    child = small.start(*line)
    assert child.stderr is not None
    for text in child.stderr:
        if "RUN" in text:
            break
    child.send_signal(signal.SIGINT)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in stderr, stderr
    assert list((small.folder / "store" / "docker").iterdir()) == []
    assert docker("ps", "-aq") == "" and docker("images", "-q", "cut") == ""


@pytest.mark.parametrize(
    ("arguments", "env", "code", "said"),
    [
        ([], {"PATH": "/nonexistent"}, 6, "docker's command line is not installed"),
        ([], {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}, 6, "no docker daemon answers"),
        (["--target", "cpu-aarch64", "--base", BASE], {}, 6, "builds for linux/amd64, cpu-aarch64 is linux/arm64"),
        (["--base", "no-such-image:1"], {}, 4, "no-such-image"),
    ],
)
def test_what_docker_lacks_is_said(
    small: Command, arguments: list[str], env: dict[str, str], code: int, said: str
) -> None:
    if "docker.sock" in str(env):  # the recipe's own base is in the daemon
        arguments = ["--base", BASE]
    else:
        assert small("lock", "small", "--wheels", "--target", "cpu-x86_64").returncode == 0
    done = small("docker", "small", "--builder", "dockerfile", "--no-verify", *arguments, **env)
    assert done.returncode == code and said in done.stderr.partition("error: ")[2], done.stderr


def test_a_base_without_the_lock_s_python_is_said(small: Command, docker: Any) -> None:
    text = f"FROM {BASE}\nRUN rm -r /usr/lib/python3.11/ensurepip\n"
    docker("build", "-t", "no-venv:1", "-", input=text)
    done = small("docker", "small", "--builder", "dockerfile", "--no-verify", "--base", "no-venv:1")
    assert done.returncode == 4
    assert "has no Python 3.11 with venv and ensurepip" in done.stderr.partition("error: ")[2]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--builder", "dockerfile", "--push", "--tag", "host.example/one:1"], "docker push host.example/one:1"),
        (["--builder", "dockerfile", "--out", "oci:out"], "docker save small:cpu-x86_64"),
        (["--builder", "dockerfile", "--base", "Not A Name"], "Not A Name"),
        (["--builder", "dockerfile", "--target", "cpu-x86_64", "--target", "cpu-aarch64"], "of one target"),
        (["--base", BASE], "--base is for --builder dockerfile"),
    ],
)
def test_misuse_is_one_clear_message(small: Command, arguments: list[str], said: str) -> None:
    if "--base" not in arguments:
        arguments = [*arguments, "--base", BASE]
    done = small("docker", "small", "--no-verify", *arguments)
    assert done.returncode == 2 and said in done.stderr and done.stdout == "", done.stderr


LAYERS = """
[layers.greet]
version = "1.0"
url = "{greet.url}"
sha256 = "{greet.sha256}"
patches = ["greet.patch"]
[layers.caller]
version = "1.0"
system = "make"
url = "{caller.url}"
sha256 = "{caller.sha256}"
configure = ["GREET={{greet}}"]
requires = ["greet"]
"""


@pytest.fixture
def layered(small: Command, build_base: str) -> Command:
    """`small` with two layers from source, the second built with the first, and an image to build them in."""
    folder = small.folder / "archives"
    folder.mkdir()
    greet, caller = sources.pack("greet", folder), sources.pack("caller", folder)
    place = small.folder / "recipes/small"
    (place / "greet.patch").write_text("--- a/COPYING\n+++ b/COPYING\n@@ -0,0 +1 @@\n+patched for the lab\n")
    text = (place / "recipe.toml").read_text()
    text = text.replace("[image]\n", f'[image]\nbuild_base = "docker-daemon:{build_base}"\n')
    (place / "recipe.toml").write_text(text + LAYERS.format(greet=greet, caller=caller))
    return small


def test_layers_are_built_in_a_stage_and_only_their_files_are_in_the_image(layered: Command, docker: Any) -> None:
    made = layered.json("docker", "small", "--builder", "dockerfile", "--no-verify", "--tag", "layered:1")
    run = ("run", "--rm", "layered:1")
    assert "hello" in docker(*run, "call")
    found = json.loads(docker(*run, "cat", "/opt/env/share/envbuild/layers/greet.json"))
    assert any(row["path"].startswith("lib/libgreet.so") for row in found["files"])
    assert found["licences"] == ["share/licenses/greet/COPYING"]
    assert "patched for the lab" in docker(*run, "cat", "/opt/env/share/licenses/greet/COPYING")
    left = docker(*run, "sh", "-c", "command -v gcc make; ls -d /opt/layers /inputs; true")
    assert "bin/" not in left and left.count("No such file") == 2
    again = layered.json("docker", "small", "--builder", "dockerfile", "--no-verify")
    assert again["digest"] == made["digest"], "nothing changed, and docker's cache was not used"
    assert list((layered.folder / "store" / "docker").iterdir()) == []


def test_a_layer_that_does_not_compile_fails_the_build_with_the_compiler_s_words(layered: Command) -> None:
    folder = layered.folder / "broken"
    folder.mkdir()
    broken = sources.pack("greet", folder, {"greet.c": "int greet(void) { return oops; }\n"})
    file = layered.folder / "recipes/small/recipe.toml"
    text = file.read_text()
    rest = text.partition('url = "')[2]
    old = rest.partition('"')[0], rest.partition('sha256 = "')[2][:64]
    file.write_text(text.replace(old[0], broken.url).replace(old[1], broken.sha256))
    done = layered("docker", "small", "--builder", "dockerfile", "--no-verify", "--tag", "broken:1")
    assert done.returncode == 4, done.stderr
    message = done.stderr.partition("error: docker build failed")[2]
    assert "greet 1.0: make failed" in message and "oops" in message and "--mount" not in message


def test_by_hand_a_recipe_with_layers_but_no_sources_is_refused(checkout: Path, small: Command, docker: Any) -> None:
    shutil.copytree(small.folder / "wheels", checkout / "wheels")
    with (checkout / "recipes/small/recipe.toml").open("a") as file:
        file.write('[layers.libfabric]\nversion = "2.1.0"\n')
    said = docker(
        "build",
        "--network=none",
        "-f",
        "Dockerfile.cpu",
        "--build-arg",
        f"BASE={BASE}",
        "--build-arg",
        "RECIPE=small",
        "--build-arg",
        "NO_INDEX=1",
        ".",
        cwd=checkout,
        check=False,
    )
    assert "this recipe has layers that are built from source" in said
