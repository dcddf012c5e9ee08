"""Images without a daemon: OCI layouts and archives, for any architecture, as any user, the same everywhere."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab.dockerd import Lab
from lab.wheels import make_recipe

from .conftest import NO_DAEMON, REPOSITORY, Command

QEMU = "/usr/bin/qemu-aarch64-static"
NOBODY = 65534
# Not root, but for this: the interpreter and the checkout may lie where only root looks.
AS_NOBODY = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs"]
AS_NOBODY += ["--inh-caps=-all,+dac_read_search", "--ambient-caps=-all,+dac_read_search"]
AS_NOBODY += ["--bounding-set=-all,+dac_read_search"]


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stderr
    return done


def under_qemu(root: Path, script: str, *options: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in the aarch64 tree at `root` with /dev, /proc and /sys, in a mount namespace of its own."""
    shutil.copy(QEMU, root / "qemu")
    mounts = 'for d in dev proc sys; do mount --rbind /$d "$1/$d"; done; exec /usr/sbin/chroot "$@"'
    return run(
        "unshare",
        "--mount",
        "--propagation",
        "private",
        "sh",
        "-ec",
        mounts,
        "sh",
        root,
        "/qemu",
        "/opt/env/bin/python",
        *options,
        "-c",
        script,
        env={"PATH": "/opt/env/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8", **env},
    )


def test_an_image_of_two_platforms_is_made_without_a_daemon(layout: dict[str, Any]) -> None:
    assert layout["path"] == str(layout["command"].folder / "image")
    assert [one["target"] for one in layout["targets"]] == ["cpu-x86_64", "cpu-aarch64"]
    assert layout["receipt"] is None  # nothing could run it, and nothing claims that it was run
    index = json.loads((Path(layout["path"]) / "index.json").read_text())
    assert index["manifests"][0]["digest"] == layout["digest"]


@pytest.mark.parametrize(("arch", "number"), [("amd64", 0), ("arm64", 1)])
def test_skopeo_reads_it(layout: dict[str, Any], arch: str, number: int) -> None:
    done = run("skopeo", "--override-arch", arch, "inspect", f"oci:{layout['path']}:pt_cpu:1")
    seen = json.loads(done.stdout)
    assert seen["Architecture"] == arch and seen["Os"] == "linux"
    assert seen["Labels"]["org.envbuild.target"] == layout["targets"][number]["target"]
    raw = run("skopeo", "inspect", "--raw", f"oci:{layout['path']}:pt_cpu:1").stdout
    digests = [item["digest"] for item in json.loads(raw)["manifests"]]
    assert set(digests) == {one["digest"] for one in layout["targets"]}


@pytest.fixture(scope="module")
def unpacked(layout: dict[str, Any]) -> Iterator[Path]:
    """The root of the aarch64 image. tar unpacks it, as no layer removes files of another: umoci, with which
    test_umoci.py compares, takes four times as long."""
    root: Path = layout["command"].folder / "root"
    root.mkdir()
    blobs = Path(layout["path"]) / "blobs/sha256"
    manifest = json.loads((blobs / layout["targets"][1]["digest"].removeprefix("sha256:")).read_text())
    for layer in manifest["layers"]:
        run("tar", "-xzf", blobs / layer["digest"].removeprefix("sha256:"), "-C", root)
    assert not list(root.rglob(".wh.*"))
    yield root
    shutil.rmtree(root)


# The ranks are forked from one process: emulated, torch takes a minute to import. Garbage collection would lengthen it.
TRAIN = """
import gc
gc.disable()
import numpy, os, platform, runpy, sys, torch, torch._dynamo
gc.freeze()
gc.enable()
print(torch.__version__, platform.machine(), torch.ones(2).sum().item(), flush=True)
sys.argv = ["ddp_train", "3", "3", "--backend", "gloo", "--model", "mlp", "--dataset_size", "256",
            "--checkpoint_path", "/trained/snapshot.pt", "--report", "/trained/report.json"]
ranks = []
for rank in "01":
    ranks.append(os.fork())
    if ranks[-1] == 0:
        os.environ |= {"RANK": rank, "GROUP_RANK": rank}
        runpy.run_module("ddp_train", run_name="__main__")
        os._exit(1)  # ddp_train ends the process
sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks))
"""


def test_the_aarch64_image_trains_on_two_ranks_under_qemu_user(unpacked: Path) -> None:
    """It was built with nothing emulated; only here its code runs: its torch trains over gloo, and its ranks agree."""
    (unpacked / "trained").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    world = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = under_qemu(unpacked, TRAIN, "-B", **world)
    version, machine, total = done.stdout.split("\n", 1)[0].split()
    assert version.startswith("2.10.0") and machine == "aarch64" and total == "2.0"
    report = json.loads((unpacked / "trained/report.json").read_text())
    assert report["status"] == "finished" and report["world_size"] == 2
    assert len({one["parameters_digest"] for one in report["ranks"]}) == 1
    assert all(row["ok"] for one in report["ranks"] for row in one["allreduce"])
    losses = [epoch["loss"] for epoch in report["losses"]]
    assert losses[-1] < losses[0]


def test_bytecode_of_the_image_is_taken_as_it_is(unpacked: Path, layout: dict[str, Any]) -> None:
    done = under_qemu(unpacked, "import json.decoder, numpy.linalg._linalg", PYTHONVERBOSE="1")
    for name in ("json/__pycache__/decoder", "linalg/__pycache__/_linalg"):
        # On a host without Python 3.11 the image has no bytecode; stderr says so, and the test is skipped.
        taken = any(f"{name}.cpython-311.pyc matches" in line for line in done.stderr.splitlines())
        assert taken, f"{name}: {layout['stderr']}"
    assert "wrote" not in done.stderr


def test_another_user_in_another_place_makes_the_same_digests(layout: dict[str, Any], tmp_path: Path) -> None:
    """As nobody, without a daemon, with a store, a home and a folder of their own."""
    ours = Command(tmp_path, layout["command"].env)
    make_recipe(tmp_path / "recipes", "plain", ["numpy"])
    line = ("docker", "plain", "--target", "cpu-x86_64", "--no-verify", "--out", "oci:x", "--json")
    expected = ours.json(*line[:-1])["digest"]
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    import tempfile

    place = Path(tempfile.mkdtemp(prefix="envbuild-nobody-"))
    try:
        shutil.copytree(tmp_path / "recipes", place / "recipes")
        os.chown(place, NOBODY, NOBODY)
        place.chmod(0o755)
        config = os.environ.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")  # pip's sources
        env = {
            **os.environ,
            **NO_DAEMON,
            "HOME": str(place),
            "ENVBUILD_STORE": str(place / "store"),
            "TMPDIR": str(place),
            "PYTHONHASHSEED": "7",
            "XDG_CONFIG_HOME": config,
        }
        done = subprocess.run(
            [*AS_NOBODY, *ours.line(*line, "--locked")], capture_output=True, text=True, cwd=place, env=env
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["digest"] == expected
    finally:
        shutil.rmtree(place)


def test_again_gives_the_same_and_replaces_the_old(layout: dict[str, Any]) -> None:
    command: Command = layout["command"]
    for _ in range(2):
        made = command.json("docker", "pt_cpu", "--locked", "--out", "oci:again")
        assert made["digest"] == layout["targets"][0]["digest"]
    names = {path.name for path in command.folder.iterdir()}
    assert not [name for name in names if name.startswith(".")], names
    run("skopeo", "inspect", f"oci:{command.folder}/again:pt_cpu:cpu-x86_64")


@pytest.fixture
def plain(session_store: Path, tmp_path: Path) -> Command:
    """The command with a recipe `plain` of one small wheel, for what holds of any image."""
    make_recipe(tmp_path / "recipes", "plain", ["networkx"])
    return Command(tmp_path, {"ENVBUILD_STORE": str(session_store), **NO_DAEMON})


def test_another_time_gives_another_image(plain: Command) -> None:
    line = ("docker", "plain", "--target", "cpu-x86_64", "--no-verify", "--no-bytecode", "--out", "oci:dated")
    made = plain.json(*line, SOURCE_DATE_EPOCH="1700000000")
    raw = run("skopeo", "inspect", "--config", f"oci:{made['path']}:plain:cpu-x86_64").stdout
    assert json.loads(raw)["created"] == "2023-11-14T22:13:20Z"
    assert plain.json(*line)["digest"] != made["digest"]
    refused = plain(*line, SOURCE_DATE_EPOCH="0")
    assert refused.returncode == 2 and "SOURCE_DATE_EPOCH" in refused.stderr


def test_an_archive_is_loaded_by_docker_and_holds_the_same_image(plain: Command, docker_daemon: Lab) -> None:
    line = ("docker", "plain", "--target", "cpu-x86_64", "--no-verify")
    made = plain.json(*line, "--out", "docker-archive:image.tar")
    env = {**os.environ, **docker_daemon.environment()}
    said = run("docker", "load", "--input", made["path"], env=env).stdout
    assert "plain:cpu-x86_64" in said
    with tarfile.open(made["path"]) as archive:
        manifest = json.loads(archive.extractfile("manifest.json").read())[0]  # type: ignore[union-attr]
    identity = run("docker", "image", "inspect", "-f", "{{.Id}}", "plain:cpu-x86_64", env=env)
    assert identity.stdout.strip() == "sha256:" + manifest["Config"].removesuffix(".json")
    loaded = plain.json(*line, **docker_daemon.environment())
    assert loaded["layers_sent"] == 0 and loaded["digest"] == made["digest"]


def test_a_full_disk_is_one_clear_message_and_leaves_the_old_image(layout: dict[str, Any], tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    small = tmp_path / "small"
    small.mkdir()
    run("mount", "-t", "tmpfs", "-o", "size=40m", "tmpfs", small)
    try:
        command = Command(tmp_path, {**layout["command"].env, "ENVBUILD_STORE": str(small / "store")})
        done = command("docker", "pt_cpu", "--locked", "--out", "oci:image")
        assert done.returncode == 4 and "No space left" in done.stderr, done.stderr
        assert not (tmp_path / "image").exists()
        # The store is large enough, the place is not.
        command = Command(small, layout["command"].env)
        shutil.rmtree(small / "store")
        done = command("docker", "pt_cpu", "--locked", "--out", "oci:image")
        assert done.returncode == 4 and "No space left" in done.stderr, done.stderr
        assert list(small.iterdir()) == []
    finally:
        run("umount", small)


def test_nothing_of_this_machine_is_in_the_image(plain: Command) -> None:
    """No path of the store or the checkout, no user name, no address that packages came from."""
    made = plain.json("docker", "plain", "--target", "cpu-x86_64", "--no-verify", "--out", "oci:image")
    secrets = [str(REPOSITORY), plain.env["ENVBUILD_STORE"], str(plain.folder)]
    needles = [text.encode() for text in secrets]
    for blob in (Path(made["path"]) / "blobs/sha256").iterdir():
        data = blob.read_bytes()
        if data[:2] == b"\x1f\x8b":
            data = subprocess.run(["gzip", "-dc"], input=data, capture_output=True, check=True).stdout
        assert not [needle for needle in needles if needle in data], blob.name


def test_the_plan_is_printed_and_nothing_is_made(layout: dict[str, Any], tmp_path: Path) -> None:
    command = Command(tmp_path, layout["command"].env)
    assert command("docker", "pt_cpu", "--locked", "--dry-run").returncode == 6  # no daemon
    plan = command.json("docker", "pt_cpu", "--locked", "--dry-run", "--out", "oci:image")
    kinds = [layer["kind"] for layer in plan["layers"]]
    assert kinds[:2] == ["base", "bytecode"] and kinds[-2:] == ["trainer", "config"]
    assert list(tmp_path.iterdir()) == []
