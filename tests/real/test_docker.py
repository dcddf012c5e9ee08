"""`envbuild docker` on a real daemon: recipe → image → trained in two containers → receipt."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from lab.dockerd import Lab
from lab.wheels import make_recipe, make_wheel

from .conftest import Command, link_tree, own_copy, use_base_of_pt_minimal

ROOT = Path(__file__).resolve().parents[2]
NO_DAEMON = {"DOCKER_HOST": "unix:///nonexistent/docker.sock"}


def docker(lab: Lab, *arguments: str) -> str:
    done = subprocess.run(
        ["docker", *arguments], capture_output=True, text=True, env={**os.environ, **lab.environment()}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def pt_docker(tmp_path_factory: pytest.TempPathFactory, session_store: Path, docker_daemon: Lab) -> dict[str, Any]:
    """`envbuild docker pt_cpu`, built and verified once, with a rank in each of two containers, of which one is killed;
    and the command's folder."""
    folder = tmp_path_factory.mktemp("pt_docker")
    env = {"ENVBUILD_STORE": str(session_store), **docker_daemon.environment()}
    command = Command(folder, env)
    recipe = own_copy(command, "pt_cpu") / "recipe.toml"
    recipe.write_text(recipe.read_text().replace("\nnodes = 1\n", "\nnodes = 2\n"))
    return {**command.json("docker", "pt_cpu", "--locked", "--faults", "--report=page.html"), "command": command}


def test_the_receipt_passed_and_names_what_ran(pt_docker: dict[str, Any]) -> None:
    receipt = json.loads(Path(pt_docker["receipt"]).read_text())
    schema = json.loads((ROOT / "docs/receipt.schema.json").read_text())
    jsonschema.validate(receipt, schema)
    assert receipt["passed"] and receipt["artifact"]["kind"] == "docker"
    assert receipt["artifact"]["digest"] == pt_docker["digest"]
    assert receipt["runtime"].startswith("docker ")
    checks = {check["name"]: check for check in receipt["checks"]}
    assert len(checks) == 25 and checks["restart"]["status"] == "pass"
    hosts = {row["host"] for world in checks["world"]["evidence"]["worlds"] for row in world["ranks"]}
    assert len(hosts) == 2, "the ranks were not in two containers"
    assert checks["fabric"]["evidence"]["interface"] == "eth0"
    seen = [c.rpartition(": ")[2] for c in checks["fabric"]["evidence"]["connections"]]
    assert seen and not [address for address in seen if address.startswith("127.")]
    assert checks["installed"]["evidence"]["files"] > 10_000
    page = (pt_docker["command"].folder / "page.html").read_text()
    assert "24 passed, 1 not tried" in page and "Mean loss of a step" in page


def test_docker_run_trains(pt_docker: dict[str, Any], docker_daemon: Lab) -> None:
    # Without torchrun, which verification started in both containers.
    trainer = ("python", "-m", "ddp_train", "2", "1", "--backend", "gloo")
    out = docker(docker_daemon, "run", "--rm", pt_docker["path"], *trainer)
    assert "Epoch 1" in out and "snapshot" in out


def test_nothing_is_left_in_the_daemon(pt_docker: dict[str, Any], docker_daemon: Lab) -> None:
    assert docker(docker_daemon, "ps", "-aq") == ""
    assert docker(docker_daemon, "volume", "ls", "-q") == ""
    assert "envbuild-verify" not in docker(docker_daemon, "network", "ls")


def test_a_second_call_sends_and_verifies_nothing(pt_docker: dict[str, Any]) -> None:
    receipt = Path(pt_docker["receipt"]).read_bytes()
    again = pt_docker["command"].json("docker", "pt_cpu", "--locked")
    assert again["digest"] == pt_docker["digest"] and again["layers_sent"] == 0
    assert Path(again["receipt"]).read_bytes() == receipt


def test_the_image_is_configured_as_users_expect(pt_docker: dict[str, Any], docker_daemon: Lab) -> None:
    found = json.loads(docker(docker_daemon, "image", "inspect", pt_docker["path"]))[0]
    config = found["Config"]
    assert config["WorkingDir"] == "/workspace" and config["Cmd"] == ["/bin/bash"]
    assert "VIRTUAL_ENV=/opt/env" in config["Env"] and not config.get("Entrypoint")
    labels = config["Labels"]
    assert labels["org.envbuild.recipe"] == "pt_cpu"
    assert labels["org.envbuild.lock.digest"].startswith("sha256:")
    out = docker(
        docker_daemon,
        "run",
        "--rm",
        pt_docker["path"],
        "bash",
        "-c",
        "id -un; command -v python; python -c 'import ssl; print(len(ssl.create_default_context().get_ca_certs()))'",
    ).split()
    assert out[:2] == ["root", "/opt/env/bin/python"] and int(out[2]) > 100


@pytest.fixture
def small(lab: Command, docker_daemon: Lab, layout: dict[str, Any], session_store: Path) -> Iterator[Command]:
    """A recipe `small` of two wheels, `alpha` and `beta`, with a store that has the Debian packages."""
    for name in ("alpha", "beta"):
        make_wheel(lab.folder / "wheels", name, "1.0")
    make_wheel(lab.folder / "wheels", "alpha", "2.0")
    make_recipe(lab.folder / "recipes", "small", ["alpha==1.0", "beta==1.0"])
    store = Path(lab.env["ENVBUILD_STORE"])
    for name in ("blobs", "layers"):
        link_tree(session_store / name, store / name)
    for arch in ("x86_64", "aarch64"):
        use_base_of_pt_minimal(lab.folder / "recipes" / "small", arch)
    lab.env.update(docker_daemon.environment())
    yield lab


def test_after_a_small_change_only_changed_layers_are_sent(small: Command) -> None:
    first = small.json("docker", "small", "--no-verify")
    make_recipe(small.folder / "recipes", "small", ["alpha==2.0", "beta==1.0"])
    second = small.json("docker", "small", "--no-verify")
    assert second["digest"] != first["digest"]
    assert second["layers_sent"] == 2  # the group of small packages, and the record of the whole


def test_an_image_that_was_tampered_with_fails_where_it_was(small: Command) -> None:
    from envbuild.contract.verification import VerifySettings
    from envbuild.site.settings import load_site
    from envbuild.verify.containers import BuiltImage, image_subject
    from envbuild.verify.run import verify

    made = small.json("docker", "small", "--no-verify")
    image, client, environment = _assembled(small)
    script = (
        "cd /opt/env/lib/python3.11/site-packages && echo '# edited' >> alpha/__init__.py"
        " && cp /bin/true alpha/strange.so && printf '\\050' | dd of=alpha/strange.so bs=1 seek=18 conv=notrunc"
        " && echo '# edited' >> /usr/lib/python3.11/calendar.py && chmod u+s /bin/sleep"
        " && printf x >> /usr/lib/python3.11/__pycache__/calendar.cpython-311.pyc"
        " && echo '# edited' >> /usr/lib/python3.11/sitecustomize.py && cp /bin/true /usr/local/bin/torchrun"
        " && mkdir -p /usr/local/lib/more && touch /usr/local/lib/more/libc10.so"
        " && mv beta /srv && ln -s /srv/beta ."
    )
    with client:
        container = client.containers.run(made["path"], ["sh", "-c", script], detach=True)
        assert container.wait()["StatusCode"] == 0, container.logs()
        broken = container.commit().id
        container.remove()
        settings = VerifySettings(nodes=1, trainer=False)  # no check of the files needs a launch
        built = BuiltImage(broken, image.state, image.digest, image.file_manifest)
        subject = image_subject(client.raw, built, settings)
        verdict = verify(subject, settings, load_site(environment), environment, print)
        client.images.remove(broken, force=True)
    failed = {check.name: check for check in verdict.checks if check.status == "fail"}
    assert set(failed) == {"installed", "architecture"} and "alpha/strange.so is arm" in failed["architecture"].seen
    site, library, named = "/opt/env/lib/python3.11/site-packages", "/usr/lib/python3.11", failed["installed"].evidence
    assert set(named["altered"]) == {
        f"{site}/alpha/__init__.py",
        f"{library}/calendar.py",
        f"{library}/__pycache__/calendar.cpython-311.pyc",
        "/usr/bin/sleep",
        f"{site}/beta",
        "/etc/python3.11/sitecustomize.py",
    }
    assert {
        f"{site}/alpha/strange.so",
        "/usr/local/bin/torchrun",
        "/usr/local/lib/more/libc10.so",
        "/srv/beta/__init__.py",
    } <= set(named["unowned"])
    assert f"{site}/beta/__init__.py" in named["missing"]


class _Client:
    """The docker SDK's client, closed at the end."""

    def __init__(self, raw: Any) -> None:
        self.raw, self.containers, self.images = raw, raw.containers, raw.images

    def __enter__(self) -> _Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()


def _assembled(command: Command) -> tuple[Any, _Client, dict[str, str]]:
    """The image `small` of the command, a client of its daemon, and its variables."""
    import docker as sdk

    from envbuild.build.image import prepare_image
    from envbuild.build.image_layers import assemble
    from envbuild.recipe.load import load_recipe
    from envbuild.run_environment import load_environment

    variables = command.variables({})
    environment = load_environment(variables)
    loaded = load_recipe(command.folder / "recipes/small/recipe.toml")
    one = prepare_image(
        loaded, loaded.target("cpu-x86_64")[0], environment, locked=True, offline=False, bytecode=True, log=print
    )
    image = assemble(one, [], environment, offline=False)
    return image, _Client(sdk.from_env(environment=variables)), variables


def test_an_interruption_leaves_no_litter(pt_docker: dict[str, Any], docker_daemon: Lab, tmp_path: Path) -> None:
    """In the middle of verification: containers, network and volume go, and the tag does not appear."""
    command = Command(tmp_path, pt_docker["command"].env)
    child = command.start("docker", "pt_cpu", "--locked", "--tag", "interrupted:1")
    deadline = time.monotonic() + 60
    while not docker(docker_daemon, "ps", "-q") and time.monotonic() < deadline:
        assert child.poll() is None, child.communicate()
        time.sleep(0.1)
    child.send_signal(signal.SIGTERM)
    _, stderr = child.communicate(timeout=60)
    assert child.returncode == 130 and "Traceback" not in stderr, stderr
    assert docker(docker_daemon, "ps", "-aq") == ""
    assert docker(docker_daemon, "volume", "ls", "-q") == ""
    assert "envbuild-verify" not in docker(docker_daemon, "network", "ls")
    assert docker(docker_daemon, "images", "-q", "interrupted") == ""


def test_what_a_killed_run_left_goes_with_the_next(pt_docker: dict[str, Any], docker_daemon: Lab) -> None:
    from envbuild.verify.containers import LABEL

    until = f"{LABEL}={int(time.time()) - 1}"
    young = f"{LABEL}={int(time.time()) + 600}"
    docker(docker_daemon, "network", "create", "--label", until, "stale")
    docker(docker_daemon, "volume", "create", "--label", until, "stale")
    docker(docker_daemon, "volume", "create", "--label", young, "young")
    docker(
        docker_daemon,
        "run",
        "-d",
        "--name",
        "stale",
        "--label",
        until,
        "--network",
        "stale",
        "-v",
        "stale:/v",
        pt_docker["path"],
        "sleep",
        "600",
    )
    import docker as sdk

    from envbuild.verify.containers import container_nodes

    client = sdk.from_env(environment={**os.environ, **docker_daemon.environment()})
    try:
        with container_nodes(client, pt_docker["path"], 1, 60):
            assert "stale" not in docker(docker_daemon, "ps", "-a", "--format", "{{.Names}}")
            assert "stale" not in docker(docker_daemon, "network", "ls")
            left = docker(docker_daemon, "volume", "ls", "-q").split()
            assert "stale" not in left and "young" in left
    finally:
        client.close()
        docker(docker_daemon, "volume", "rm", "young")


def test_two_builds_at_once_agree(small: Command) -> None:
    children = [small.start("docker", "small", "--no-verify", "--json") for _ in range(3)]
    results = []
    for child in children:
        stdout, stderr = child.communicate(timeout=120)
        assert child.returncode == 0, stderr
        results.append(json.loads(stdout))
    assert len({result["digest"] for result in results}) == 1


MISUSES = (
    (["docker", "small", "--no-verify"], 6, "no docker daemon answers at unix:///nonexistent"),
    (["docker", "small", "--out", "oci"], 2, "oci:DIR or docker-archive:FILE"),
    (["docker", "small", "--push"], 2, "--push needs --tag"),
    (["docker", "small", "--format", "docker", "--out", "oci:x"], 2, "--format docker is for --push"),
    (["docker", "small", "--push", "--tag", "Small"], 2, "upper case"),
    (["docker", "small", "--push", "--tag", "small"], 2, "names no registry or account"),
    (["docker", "small", "--target", "cpu-x86_64", "--target", "cpu-x86_64"], 2, "two targets"),
    (["docker", "small", "--out", "oci:taken", "--no-verify"], 2, "no OCI layout"),
)


def test_misuse_is_one_clear_message(small: Command) -> None:
    (small.folder / "taken").mkdir()
    (small.folder / "taken" / "thesis.tex").write_text("years")
    for arguments, code, said in MISUSES:
        done = small(*arguments, **NO_DAEMON)
        assert done.returncode == code and said in done.stderr, done.stderr
        assert "Traceback" not in done.stderr and done.stdout == ""
    assert (small.folder / "taken" / "thesis.tex").read_text() == "years"


def test_stopping_one_program_of_a_container_leaves_the_others(
    pt_docker: dict[str, Any], docker_daemon: Lab, tmp_path: Path
) -> None:
    import docker as sdk

    from envbuild.verify.containers import container_nodes

    client = sdk.from_env(environment={**os.environ, **docker_daemon.environment()})
    try:
        with container_nodes(client, pt_docker["path"], 1, 120) as nodes:
            line = ["-c", "echo on; sleep 100 & sleep 100; echo off"]
            agents = [nodes.start(0, "bash", line, {}, tmp_path / f"{n}.log") for n in range(2)]
            logs = [tmp_path / f"{n}.log" for n in range(2)]
            deadline = time.monotonic() + 20
            while [log.read_text() for log in logs] != ["on\n"] * 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            nodes.stop(agents[:1])
            assert agents[0].returncode == 137 and agents[1].poll() is None
            while (left := sleepers(client)) != 3 and time.monotonic() < deadline:
                time.sleep(0.05)
            assert left == 3  # the other's bash -c and its two
    finally:
        client.close()


def sleepers(client: Any) -> int:
    """How many processes of the only container have `sleep 100` in their command line."""
    rows = client.containers.list()[0].top()["Processes"]
    return sum("sleep 100" in " ".join(row) for row in rows)
