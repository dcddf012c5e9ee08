"""`envbuild conda` as users run it, on a real channel that a site's mirror setting puts in conda-forge's place."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from lab import registry as lab_registry
from lab import slurm
from lab.apptainer import Apptainer
from lab.conda_channel import Channel
from lab.conda_server import Server, serve
from lab.jobs import Jobs
from lab.slurm import slurm_cluster

from .conftest import NO_DAEMON, QUICK, REPOSITORY, Command

FORGE = "https://conda.anaconda.org/conda-forge"
ARCH = os.uname().machine


def site(folder: Path, url: str) -> dict[str, str]:
    """The variables of a site that has a mirror of conda-forge at `url`."""
    file = folder / "site.toml"
    file.write_text(f'[mirrors]\n"{FORGE}" = ["{url}"]\n')
    return {"ENVBUILD_SITE": str(file)}


def recipe(folder: Path, change: tuple[str, str] | None = None) -> Path:
    """pt_cpu as it is shipped, in `folder`/recipes, where its locks may be written."""
    place = folder / "recipes/pt_cpu"
    place.mkdir(parents=True)
    for name in ("recipe.toml", *(f"cpu-{arch}.requirements.txt" for arch in ("aarch64", "x86_64"))):
        text = (REPOSITORY / "recipes/pt_cpu" / name).read_text()
        if change and name == "recipe.toml":
            assert change[0] in text
            text = text.replace(*change)
        (place / name).write_text(text)
    return place


def conda_recipe(folder: Path, dependencies: Sequence[str], extra: str = "") -> Path:
    """A recipe of conda packages without pip's, which no training can verify."""
    place = folder / "recipes/tiny"
    place.mkdir(parents=True)
    (place / "recipe.toml").write_text(
        'name = "tiny"\ndescription = "lab"\npython = "3.11"\nrequirements = []\n'
        'environment = "conda"\n'
        f"[conda]\ndependencies = {json.dumps(list(dependencies))}\n{extra}\n[verify]\ntrainer = false\n"
        "[targets.cpu-x86_64]\n[targets.cpu-aarch64]\n"
    )
    return place


@dataclass
class Site:
    """A folder with a recipe, at a site whose mirror of conda-forge is the lab's channel."""

    command: Command
    server: Server
    made: dict[str, Any]

    @property
    def prefix(self) -> Path:
        return Path(self.made["path"])

    @property
    def lock(self) -> Path:
        return self.command.folder / "recipes/pt_cpu/cpu.conda-lock.yml"


@pytest.fixture(scope="module")
def pt_conda(tmp_path_factory: pytest.TempPathFactory, conda_channel: Channel, session_store: Path) -> Iterator[Site]:
    """`envbuild conda pt_cpu`: locked for both architectures, built and quickly verified once."""
    folder = tmp_path_factory.mktemp("pt_conda")
    recipe(folder, ("[targets.cpu-x86_64]", f"{QUICK}\n[targets.cpu-x86_64]"))
    with serve(conda_channel.folder) as server:
        command = Command(folder, {"ENVBUILD_STORE": str(session_store), **site(folder, server.url)})
        done = command("lock", "pt_cpu", "--conda")
        assert done.returncode == 0, done.stderr
        yield Site(command, server, command.json("conda", "pt_cpu", "--locked", "--report=page.html"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, conda_channel: Channel, session_store: Path) -> Iterator[Site]:
    """NumPy alone, locked and built once: what goes wrong with packages does so without torch, too."""
    folder = tmp_path_factory.mktemp("tiny_conda")
    conda_recipe(folder, ["numpy"])
    with serve(conda_channel.folder) as server:
        command = Command(folder, {"ENVBUILD_STORE": str(session_store), **site(folder, server.url)})
        yield Site(command, server, command.json("conda", "tiny", "--no-verify"))


def test_the_environment_is_verified(pt_conda: Site) -> None:
    receipt = json.loads(Path(pt_conda.made["receipt"]).read_text())
    assert receipt["passed"] and receipt["artifact"]["kind"] == "conda"
    assert {check["name"] for check in receipt["checks"] if check["status"] != "pass"} == {"command", "restart"}
    page = (pt_conda.command.folder / "page.html").read_text()
    assert "2 not tried" in page and "numpy" in page and "Mean loss of a step" in page
    again = pt_conda.command.json("conda", "pt_cpu", "--locked")
    assert not again["built"] and not again["verified"]
    assert again["digest"] == pt_conda.made["digest"]
    assert str(pt_conda.command.folder) not in receipt["artifact"]["digest"]


def test_it_is_built_from_what_was_pushed_without_any_channel(tiny: Site, tmp_path: Path) -> None:
    if (reason := lab_registry.missing()) is not None:
        pytest.skip(reason)
    with lab_registry.registry(tmp_path / "registry") as server:
        settings = tmp_path / "site.toml"
        settings.write_text(f'[registries."{server.address}"]\ninsecure = true\n')
        tag, line = f"{server.address}/team/tiny:conda", {"ENVBUILD_SITE": str(settings)}
        tiny.command.json("conda", "tiny", "--locked", "--out", tmp_path / "built")
        tiny.command.json("push", tmp_path / "built", tag, **line)
        node = Command(tmp_path, {**line, "ENVBUILD_STORE": str(tmp_path / "node"), "PIP_NO_INDEX": "1"})
        made = node.json("pull", tag, "--out", "env", "--no-verify")
    assert made["digest"] == tiny.made["digest"] and made["fetched_bytes"] == made["bytes"]
    shown = "import numpy, sys; print(sys.prefix, numpy.ones(2).sum())"
    told = subprocess.run([tmp_path / "env/bin/python", "-c", shown], capture_output=True, text=True, check=True)
    assert told.stdout.split() == [str(tmp_path / "env"), "2.0"]


def test_its_programs_run_from_where_it_lies(pt_conda: Site) -> None:
    # Its verification started bin/python and bin/torchrun, and trained.
    program, env = pt_conda.prefix / "bin/numpy-config", {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([program, "--version"], capture_output=True, text=True, env=env)
    assert done.returncode == 0 and re.fullmatch(r"[\d.]+\n", done.stdout), done.stderr
    staged = subprocess.run(
        ["grep", "-rlF", "envbuild-", pt_conda.prefix / "bin", pt_conda.prefix / "conda-meta"],
        capture_output=True,
        text=True,
    )
    assert staged.stdout == ""  # no file remembers the place where it was made


def test_no_file_of_it_and_no_lock_names_the_mirror(pt_conda: Site) -> None:
    port = f"127.0.0.1:{pt_conda.server.port}"
    places = [pt_conda.prefix / "conda-meta", pt_conda.lock, Path(pt_conda.made["receipt"])]
    found = subprocess.run(["grep", "-rlF", port, *places], capture_output=True, text=True)
    assert found.stdout == ""
    for path in (pt_conda.prefix / "conda-meta").glob("*.json"):
        assert json.loads(path.read_text())["url"].startswith(f"{FORGE}/"), path


def test_verify_sees_what_was_changed_in_it(tiny: Site, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(tiny.prefix, copy, symlinks=True)
    packages = copy / "lib/python3.11/site-packages"
    (packages / "numpy/version.py").write_text("raise RuntimeError\n")
    (packages / "stray.py").write_text("")
    done = tiny.command("verify", copy)
    assert done.returncode == 5
    assert "numpy/version.py" in done.stderr and "stray.py" in done.stderr


def test_inspect_and_diff_know_its_packages(pt_conda: Site, tmp_path: Path) -> None:
    about = json.loads(pt_conda.command("inspect", pt_conda.prefix, "--json").stdout)
    assert about["kind"] == "conda"
    names = {package["name"] for package in about["conda_packages"]}
    assert {"python", "pytorch", "numpy", "tqdm"} <= names
    assert "ddp-train" in {package["name"] for package in about["python_packages"]}


def test_a_copy_elsewhere_is_equal_and_its_scripts_run(tiny: Site, tmp_path: Path) -> None:
    other = tmp_path / "a longer place, with blanks, é, # and \\" / "env"
    (temporary := tmp_path / "t").mkdir()
    made = tiny.command.json("conda", "tiny", "--locked", "--prefix", other, "--no-verify", TMPDIR=str(temporary))
    assert made["digest"] == tiny.made["digest"]
    assert list(temporary.iterdir()) == []  # uv locks an environment that is no venv by a file there
    done = tiny.command("diff", tiny.prefix, other)
    assert done.returncode == 0, done.stdout
    done = subprocess.run([other / "bin/numpy-config", "--version"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_name_is_a_folder_that_conda_finds(tiny: Site, tmp_path: Path) -> None:
    env = {"CONDA_ENVS_DIRS": str(tmp_path / "envs")}
    made = tiny.command.json("conda", "tiny", "--name", "ddp", "--no-verify", **env)
    assert made["path"] == str(tmp_path / "envs/ddp")
    assert (tmp_path / "envs/ddp/conda-meta/history").is_file()
    done = tiny.command("conda", "tiny", "--name", "a/b", **env)
    assert done.returncode == 2 and "--name" in done.stderr


def test_offline_from_the_cache_alone(tiny: Site, tmp_path: Path) -> None:
    away = site(tmp_path, "http://127.0.0.1:9/conda-forge")
    made = tiny.command.json("conda", "tiny", "--locked", "--offline", "--no-verify", "--out", tmp_path / "env", **away)
    assert made["digest"] == tiny.made["digest"]
    done = tiny.command(
        "conda",
        "tiny",
        "--locked",
        "--offline",
        "--no-verify",
        "--out",
        tmp_path / "other",
        ENVBUILD_STORE=str(tmp_path / "empty"),
        **away,
    )
    assert done.returncode == 4 and "offline" in done.stderr
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize(
    ("fault", "said"), [("404", "404"), ("401", "401"), ("truncate", "sha256"), ("drop", "numpy"), ("tamper", "sha256")]
)
def test_a_bad_package_leaves_the_old_environment(
    tiny: Site, conda_channel: Channel, tmp_path: Path, fault: str, said: str
) -> None:
    folder = tmp_path / "channel"
    shutil.copytree(conda_channel.folder, folder, copy_function=os.link)
    package = Channel(folder).package("numpy", "linux-64" if ARCH == "x86_64" else "linux-aarch64")
    data = bytearray(package.read_bytes())
    old = tmp_path / "env"
    tiny.command.json("conda", "tiny", "--locked", "--no-verify", "--out", old)
    state = json.loads((old / "envbuild.json").read_text())
    state["plan_digest"] = "sha256:" + "0" * 64  # as if it were of an older recipe
    (old / "envbuild.json").write_text(json.dumps(state))
    before = sorted(path.name for path in (old / "conda-meta").iterdir())
    with serve(folder) as server:
        if fault == "tamper":
            data[len(data) // 2] ^= 1
            package.unlink()
            package.write_bytes(data)
        else:
            server.faults[package.name] = fault  # type: ignore[assignment]
        env = {**site(tmp_path, server.url), "ENVBUILD_STORE": str(tmp_path / "store"), "PIP_RETRIES": "0"}
        done = tiny.command("conda", "tiny", "--locked", "--no-verify", "--out", old, **env)
    assert done.returncode == 4, done.stderr
    assert "numpy" in done.stderr and said in done.stderr and "hint:" in done.stderr
    assert sorted(path.name for path in (old / "conda-meta").iterdir()) == before
    assert not list(tmp_path.glob(".env.envbuild-*"))


def test_killed_at_any_moment_the_next_build_ends_well(tiny: Site, tmp_path: Path) -> None:
    line = ("conda", "tiny", "--locked", "--no-verify", "--out", tmp_path / "env")
    env = {"ENVBUILD_STORE": str(tmp_path / "store")}
    # While packages are unpacked in the store; in the staging folder; while packages are linked there.
    for seen in ("store/conda/pkgs/*", ".env.envbuild-*", ".env.envbuild-*/conda-meta/*.json"):
        before = set(tmp_path.glob(seen))
        child = tiny.command.start(*line, **env)
        while before >= set(tmp_path.glob(seen)):
            assert child.poll() is None, child.communicate()
        child.kill()
        child.communicate()
        assert child.returncode == -signal.SIGKILL
    made = tiny.command.json(*line, **env)
    assert made["digest"] == tiny.made["digest"]
    assert not list(tmp_path.glob(".env.envbuild-*"))


def test_two_builds_at_once_share_an_empty_store(tiny: Site, tmp_path: Path) -> None:
    env = {"ENVBUILD_STORE": str(tmp_path / "store")}
    both = [
        tiny.command.start("conda", "tiny", "--locked", "--no-verify", "--json", "--out", tmp_path / name, **env)
        for name in ("one", "two")
    ]
    said = [child.communicate() for child in both]
    assert [child.returncode for child in both] == [0, 0], said
    assert {json.loads(out)["digest"] for out, _ in said} == {tiny.made["digest"]}


def test_credentials_of_a_private_mirror_reach_no_file(conda_channel: Channel, tmp_path: Path) -> None:
    conda_recipe(tmp_path, ["numpy"])
    with serve(conda_channel.folder, user="reader", password="pa55word") as server:
        url = server.url.replace("http://", "http://reader:pa55word@")
        command = Command(tmp_path, {"ENVBUILD_STORE": str(tmp_path / "store"), **site(tmp_path, url)})
        done = command("conda", "tiny", "--no-verify")
        assert done.returncode == 0, done.stderr
        assert "pa55word" not in done.stderr + done.stdout
        wrong = site(tmp_path, server.url.replace("http://", "http://reader:wr0ng@"))
        refused = command("lock", "tiny", "--conda", "--upgrade", ENVBUILD_STORE=str(tmp_path / "s2"), **wrong)
        assert refused.returncode == 3 and "401" in refused.stderr
        assert "wr0ng" not in refused.stderr
    (tmp_path / "site.toml").unlink()
    shutil.rmtree(tmp_path / "store/uv", ignore_errors=True)
    found = subprocess.run(["grep", "-rlaF", "-e", "pa55word", "-e", "wr0ng", tmp_path], capture_output=True, text=True)
    assert found.stdout == ""


@pytest.fixture(scope="module")
def conda_images(tmp_path_factory: pytest.TempPathFactory, pt_conda: Site) -> dict[str, Any]:
    """The same recipe with `environment = "conda"` as .sqsh, verified, and .sif."""
    folder = tmp_path_factory.mktemp("conda_images")
    place = recipe(folder, ("[targets.cpu-x86_64]", f'environment = "conda"\n{QUICK}\n[targets.cpu-x86_64]'))
    shutil.copy(pt_conda.lock, place)
    command = Command(folder, {**pt_conda.command.env, **NO_DAEMON})
    files = [command.json("enroot", "pt_cpu", "--verify", "quick"), command.json("apptainer", "pt_cpu", "--no-verify")]
    return {"command": command, "files": files}


def test_a_squashfs_of_conda_packages_is_verified(conda_images: dict[str, Any]) -> None:
    receipt = json.loads(Path(conda_images["files"][0]["receipt"]).read_text())
    assert receipt["passed"]
    seen = {check["name"]: check["status"] for check in receipt["checks"]}
    assert seen["installed"] == "pass"


def test_the_environment_and_the_images_hold_the_same(conda_images: dict[str, Any], pt_conda: Site) -> None:
    sqsh, sif = (Path(one["path"]) for one in conda_images["files"])
    done = conda_images["command"]("diff", pt_conda.prefix, sqsh)
    assert done.returncode == 0, done.stdout
    assert sif.read_bytes().endswith(sqsh.read_bytes())


def test_a_container_of_conda_packages_is_verified_and_holds_what_the_environment_does(
    tiny: Site, docker_daemon: Any
) -> None:
    """Its files, and NumPy imported in it. A .sqsh of such layers is trained in above."""
    daemon = docker_daemon.environment()
    made = tiny.command.json("docker", "tiny", "--tag", "conda:1", **daemon)
    receipt = json.loads(Path(made["receipt"]).read_text())
    checks = {check["name"]: check for check in receipt["checks"]}
    assert receipt["passed"] and checks["installed"]["status"] == checks["imports"]["status"] == "pass"
    assert "numpy" in checks["imports"]["evidence"]["modules"]
    done = tiny.command("diff", tiny.prefix, f"docker-daemon:{made['path']}", **daemon)
    assert done.returncode == 0, done.stdout


def test_apptainer_runs_programs_of_the_conda_environment(
    conda_images: dict[str, Any], real_apptainer: Apptainer
) -> None:
    clean = ["--userns", "--cleanenv", "--no-home"]
    done = real_apptainer("exec", *clean, conda_images["files"][1]["path"], "numpy-config", "--version")
    assert done.returncode == 0 and re.fullmatch(r"[\d.]+\n", done.stdout), done.stderr


def test_a_job_of_the_environment_trains_on_two_nodes_from_their_own_disks(
    pt_conda: Site, session_store: Path, tmp_path: Path
) -> None:
    """With --exact, a job compares all contents again, as it does for a venv in test_jobs.py."""
    if reason := slurm.missing():
        pytest.skip(reason)
    with slurm_cluster(tmp_path / "cluster", share=[session_store, pt_conda.prefix]) as cluster:
        jobs = Jobs(cluster, {"ENVBUILD_STORE": str(session_store)})
        # Each node has a /tmp of its own.
        jobs.write_site('[stage]\ndir = "/tmp"\n')
        staged = jobs.submit(pt_conda.prefix, "--preflight", "--name", "staged", ranks=1)
        ended = jobs.ended(staged, "staged")
        report = jobs.trained(ended, ranks=1)
        assert {rank["sys_prefix"] for rank in report["ranks"]} == {f"/tmp/envbuild-{os.getuid()}/{ended.run.name}-0"}
        assert "the environment is on the disks of 2 of 2 nodes" in ended.log, ended.log
