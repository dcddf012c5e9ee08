"""`envbuild job` on a real Slurm of two nodes: every kind of artifact, every launcher, modules, PBS's directives."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import lmod, slurm
from lab.apptainer import Apptainer
from lab.jobs import EPOCHS, Fabric, Jobs, copy_fabric
from lab.slurm import slurm_cluster
from sdists import commit

from envbuild import runtimes
from envbuild.compat.host_stack import judge_stack, parse_inventory
from envbuild.image.limits import ImageLimits
from envbuild.job_inputs import open_artifact
from envbuild.jobs.model import JobRequest
from envbuild.jobs.plan import plan_job
from envbuild.jobs.schedulers import render
from envbuild.recipe.targets import host_arch
from envbuild.run_environment import load_environment
from envbuild.runtimes.base import Runtime
from envbuild.site.settings import load_site
from envbuild.verify.static_checks import read_libraries

from .conftest import Command

PORTS = 20000
# Each node has a /tmp of its own.
STAGE = '[stage]\ndir = "/tmp"\n\n'
# Ranks of each node. torchrun starts them, whatever starts torchrun. A venv by srun: test_job_faults.py.
RANKS = {"sqsh": 1, "mpirun": 2, "pbs": 1, "apptainer": 1}
EXAMPLE = Path(__file__).parents[2] / "examples/own_project"
TQDM = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"
[project]
name = "tqdm"
version = "4.69.1"
[tool.setuptools.packages.find]
include = ["tqdm", "tqdm.*"]
"""

# toyrun FOLDER IMAGE PROGRAM ARGUMENT…: a program in a mounted image, which sees a folder of the host at its path.
TOYRUN = """#!/bin/sh
set -e
if [ "$1" != --inside ]; then exec unshare --mount --propagation private "$0" --inside "$@"; fi
folder=$2 image=$3 root=/mnt/root
shift 3
mount -t tmpfs toyrun /mnt
mkdir /mnt/image /mnt/changes /mnt/overlay "$root"
squashfuse "$image" /mnt/image
mount -t overlay -o lowerdir=/mnt/image,upperdir=/mnt/changes,workdir=/mnt/overlay toyrun "$root"
mkdir -p "$root$folder"
mount --rbind "$folder" "$root$folder"
touch "$root/etc/hosts"
mount --bind /etc/hosts "$root/etc/hosts"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
exec chroot "$root" /bin/sh -c 'cd "$0" && exec "$@"' "$folder" "$@"
"""


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory,
    session_store: Path,
    pt_cpu: dict[str, Any],
    squash: dict[str, Any],
    real_apptainer: Apptainer,
) -> Iterator[Jobs]:
    """Two nodes on which three jobs fit at a time."""
    if reason := slurm.missing(pbs=True):
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("jobs")
    share = [session_store, Path(pt_cpu["path"]), Path(squash["enroot"]["path"]), real_apptainer.folder]
    with slurm_cluster(folder / "cluster", pbs=True, cpus=6, share=share) as cluster:
        jobs = Jobs(cluster, {"ENVBUILD_STORE": str(session_store)})
        jobs.write_site()
        yield jobs


@pytest.fixture(scope="module")
def owners(jobs: Jobs) -> Iterator[list[subprocess.Popen[str]]]:
    """Programs on the head that have the ports which the first jobs would take."""
    listen = "import socket, sys; s = socket.create_server(('', int(sys.argv[1]))); print(1, flush=True); s.accept()"
    found = [jobs.cluster.popen([sys.executable, "-c", listen, str(PORTS + job)], on="n1") for job in range(1, 5)]
    for owner in found:
        assert owner.stdout is not None and owner.stdout.readline() == "1\n"
    yield found
    for owner in found:
        owner.kill()


@pytest.fixture(scope="module")
def fabric(jobs: Jobs) -> Fabric:
    """The nodes' own libfabric."""
    return copy_fabric(jobs.cluster.shared / "stack")


@pytest.fixture(scope="module")
def started(
    jobs: Jobs,
    fabric: Fabric,
    pt_cpu: dict[str, Any],
    squash: dict[str, Any],
    real_apptainer: Apptainer,
    owners: list[subprocess.Popen[str]],
) -> dict[str, int]:
    """The same training with every kind of artifact and launcher, submitted at once: three run beside each other."""
    venv, sqsh, sif = pt_cpu["path"], squash["enroot"]["path"], squash["apptainer"]["path"]
    found = {"mpirun": jobs.submit(venv, "--launcher", "mpirun", "--preflight", ranks=RANKS["mpirun"])}
    jobs.write_site(STAGE)
    found["sqsh"] = jobs.submit(sqsh, "--name", "own.sqsh", ranks=RANKS["sqsh"])
    jobs.write_site()
    script = jobs.cluster.shared / "job.pbs"
    by_pbs = ("--scheduler", "pbs", "--launcher", "mpirun", "--nodes", "2", "--nproc-per-node", "1")
    jobs.render(venv, *by_pbs, "--out", script, *EPOCHS)
    found["pbs"] = jobs.cluster.qsub(script)
    # Apptainer is what the site's module has; without its setuid starter root needs a user namespace here.
    modules = {"apptainer/lab": {"PATH": str(real_apptainer.bin)}}
    lmod.module_tree(jobs.cluster.modules, modules)
    module = f'[modules]\ninit = "{lmod.INIT}"\nrun = ["apptainer/lab"]\n\n'
    jobs.write_site(
        f'{STAGE}[container]\nruntime = "apptainer"\n\n{module}{fabric.table(*fabric.needs)}', APPTAINER_USERNS="true"
    )
    found["apptainer"] = jobs.submit(sif, "--preflight", ranks=RANKS["apptainer"])
    jobs.write_site()
    return found


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("sqsh", "own.sqsh"),
        ("mpirun", "pt_cpu"),
        ("pbs", "pt_cpu"),
        ("apptainer", "pt_cpu"),
    ],
)
def test_the_rendered_job_trains_on_both_nodes(
    jobs: Jobs, started: dict[str, int], pt_cpu: dict[str, Any], what: str, name: str
) -> None:
    ended = jobs.ended(started[what], name)
    report = jobs.trained(ended, ranks=RANKS[what])
    inside = "/opt/env" if what in ("sqsh", "apptainer") else pt_cpu["path"]
    assert {rank["sys_prefix"] for rank in report["ranks"]} == {inside}
    assert ended.run.name.split(".ctl")[0] == f"{name}_{started[what]}"


def test_the_preflight_in_apptainer_loads_the_nodes_libfabric(
    jobs: Jobs, started: dict[str, int], fabric: Fabric
) -> None:
    """It fails if another one is loaded, or none."""
    ended = jobs.ended(started["apptainer"])
    assert fabric.path in json.loads((ended.run / "host_stack.json").read_text())["libraries"]
    assert "preflight: ok: 2 of 2 nodes" in ended.log, ended.log


@pytest.mark.parametrize(("what", "name"), [("sqsh", "own.sqsh"), ("apptainer", "pt_cpu")])
def test_an_image_is_brought_to_the_disk_of_each_node(
    jobs: Jobs, started: dict[str, int], what: str, name: str
) -> None:
    log = jobs.ended(started[what], name).log
    assert "the image is on the disks of 2 of 2 nodes" in log, log
    assert log.index("on the disks") < log.index("Epoch")


LOADED = """\
import json, os, pathlib, sys
import torch, torch.distributed
torch.distributed.init_process_group("gloo")
ones = torch.ones(1)
torch.distributed.all_reduce(ones)
maps = {line.split(None, 5)[5] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if "/lib" in line}
modules = {one.__file__ for one in list(sys.modules.values()) if getattr(one, "__file__", None)}
told = {"sum": ones.item(), "torch": torch.__file__, "files": sorted(maps | modules)}
told |= {"path": os.environ["PATH"], "prefix": sys.prefix}
pathlib.Path(__file__).with_name(os.environ["RANK"]).write_text(json.dumps(told))
torch.distributed.destroy_process_group()
"""


# What a script of the user's sees, and arguments that a shell, Slurm or torchrun could change.
SEEN = """\
import json, os, pathlib, sys
here = {"arguments": sys.argv[1:], "prefix": sys.prefix, "xdg": os.environ.get("XDG_RUNTIME_DIR")}
here |= {name: value for name, value in os.environ.items() if name.startswith("ENVBUILD_")}
pathlib.Path(__file__).with_name(os.environ["RANK"]).write_text(json.dumps(here))
"""
AWKWARD = ['it\'s "q"', "$HOME `id` \\", "*", "", "--flag=a b", "naïve\ttab", "a$$b ${local_rank}"]


def test_a_venv_is_brought_to_the_disk_of_each_node_and_a_script_there_gets_its_arguments_as_they_are(
    jobs: Jobs, pt_cpu: dict[str, Any]
) -> None:
    """And all is loaded from that disk. The second job finds the environment there."""
    venv = pt_cpu["path"]
    jobs.write_site(STAGE)
    folder = jobs.cluster.shared / "loaded"
    folder.mkdir()
    (folder / "train.py").write_text(LOADED)
    world = ("--nodes", "2", "--nproc-per-node", "1", "--submit", "--name")
    said = jobs.render(venv, *world, "loaded", "--preflight", "--exact", "--script", folder / "train.py")
    ended = jobs.ended(int(said.splitlines()[-1]), "loaded")
    assert ended.end.state == "COMPLETED", ended.log
    assert "the environment is on the disks of 2 of 2 nodes" in ended.log and "0 had it" in ended.log, ended.log
    here = f"/tmp/envbuild-{os.getuid()}"
    for rank in (0, 1):
        told = json.loads((folder / str(rank)).read_text())
        assert told["sum"] == 2 and told["torch"].startswith(f"{here}/")
        assert told["prefix"] == f"{here}/{ended.run.name}-0"
        assert any(one.endswith("libtorch_cpu.so") for one in told["files"])
        assert not [one for one in told["files"] if one.startswith(f"{venv}/")], "the shared one was read"
        assert told["path"].startswith(f"{here}/")
    folder = jobs.cluster.shared / "it's a folder"
    folder.mkdir()
    script = folder / "train $HOME $local_rank.py"
    script.write_text(SEEN)
    said = jobs.render(venv, *world, "again", "--script", script, "--", *AWKWARD)
    jobs.write_site()
    ended = jobs.ended(int(said.splitlines()[-1]), "again")
    assert ended.end.state == "COMPLETED" and "2 had it; 0 MB from the shared file system" in ended.log, ended.log
    for number in (0, 1):
        told = json.loads((folder / str(number)).read_text())
        assert told["prefix"] == f"{here}/{ended.run.name}-0"
        assert told["arguments"] == AWKWARD and told["xdg"] is None
        assert told["ENVBUILD_NODES"] == "2" and told["ENVBUILD_HOSTS"] == "n1 n2"
        assert told["ENVBUILD_ADDRESSES"].split() == [jobs.cluster.address(n) for n in ("n1", "n2")]
        assert told["ENVBUILD_ADDRESS"] == told["ENVBUILD_ADDRESSES"].split()[int(told["ENVBUILD_NODE"])]
        assert told["ENVBUILD_RUN"] == str(ended.run) and told["ENVBUILD_INTERFACE"] == "eth0"


def test_occupied_ports_of_the_head_were_left_to_their_owners(
    jobs: Jobs, started: dict[str, int], owners: list[subprocess.Popen[str]]
) -> None:
    assert sorted(started.values()) == [1, 2, 3, 4]
    assert all(owner.poll() is None for owner in owners)


def tqdm_repository(folder: Path, session_store: Path) -> dict[str, str]:
    """Put tqdm's wheel into a git repository in `folder`; return variables that make git read it."""
    environment = load_environment({**os.environ, "ENVBUILD_STORE": str(session_store)})
    folder.mkdir()
    environment.write_uv_settings(settings := folder.with_name("uv.toml"), ())
    line = [environment.uv, "pip", "install", "--quiet", "--config-file", settings, "--python", sys.executable]
    line += ["--no-deps", "--target", folder, "tqdm==4.69.1"]
    subprocess.run(line, env=environment.uv_environment(), check=True)
    commit(folder, {"pyproject.toml": TQDM}, "v4.69.1")
    url = "https://github.com/tqdm/tqdm"
    variables = {f"url.{folder.as_uri()}.insteadOf": url, "protocol.file.allow": "always"}
    found = {"GIT_CONFIG_COUNT": str(len(variables))}
    for number, (key, value) in enumerate(variables.items()):
        found |= {f"GIT_CONFIG_KEY_{number}": key, f"GIT_CONFIG_VALUE_{number}": value}
    return found


def test_the_example_project_is_verified_by_its_own_training_and_trains_on_both_nodes(
    jobs: Jobs, session_store: Path
) -> None:
    """examples/own_project by its README, in a .sqsh, verified by that training alone; tqdm is of a local repository.

    With the trainer's, too: tests/real/example.py."""
    folder = jobs.cluster.shared / "own_project"
    shutil.copytree(EXAMPLE, folder)
    recipe = folder / "recipes/own_project/recipe.toml"
    recipe.write_text(recipe.read_text().replace("\n[verify]\n", "\n[verify]\ntrainer = false\n"))
    repository = tqdm_repository(jobs.cluster.folder / "tqdm", session_store)
    envbuild = Command(folder, {"ENVBUILD_STORE": str(session_store), **repository})
    locked = envbuild("lock", "own_project", "--target", f"cpu-{host_arch()}", "--wheels", "--upgrade", "tqdm")
    assert locked.returncode == 0, locked.stderr
    done = envbuild("enroot", "own_project", "--locked", "--out", "own.sqsh")
    assert done.returncode == 0, done.stderr
    receipt = json.loads((folder / "own.sqsh.receipt.json").read_text())
    checks = {check["name"]: check for check in receipt["checks"]}
    assert {"own_project", "tqdm"} <= {*checks["imports"]["evidence"]["modules"]}
    assert checks["command"]["status"] == "pass" and receipt["project"]["version"] == "0.1.0"
    sources = {one["name"]: one["version"] for one in envbuild.json("inspect", "own.sqsh")["source_built"]}
    assert sources == {"antlr4-python3-runtime": "4.9.3", "tqdm": "4.69.1"}, "what has no wheel"
    options = ("--module", "own_project.train", "--name", "own")
    arguments = ("--max-steps", "10", "--out", "own.pt", "lr=0.05")
    job = jobs.submit(folder / "own.sqsh", *options, ranks=1, arguments=arguments)
    ended = jobs.ended(job, "own")
    assert ended.end.state == "COMPLETED" and "step 5 loss: " in ended.log, ended.log
    assert list(jobs.cluster.shared.rglob("own.pt"))


def test_what_did_not_pass_its_verification_is_refused(jobs: Jobs, squash: dict[str, Any], tmp_path: Path) -> None:
    copy = jobs.cluster.shared / "copy.sqsh"
    os.link(squash["enroot"]["path"], copy)
    refused = jobs.render(copy, code=5)
    assert "receipt" in refused
    assert "NOT VERIFIED" in jobs.render(copy, "--unverified")


def test_an_artifact_that_changes_after_its_submission_does_not_train_where_the_site_names_signers(
    jobs: Jobs, squash: dict[str, Any], envbuild: Command
) -> None:
    image, key = jobs.cluster.shared / "attested.sqsh", jobs.cluster.folder / "key.pem"
    built = Path(squash["enroot"]["path"])
    os.link(built, image)
    shutil.copy(built.with_name(f"{built.name}.receipt.json"), image.with_name(f"{image.name}.receipt.json"))
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", key.with_suffix(".pub")], check=True)
    assert envbuild("attest", image, "--key", key).returncode == 0
    jobs.write_site('[trust]\nsigners = ["key.pub"]\n')
    script, training = jobs.cluster.shared / "attested.sbatch", jobs.cluster.shared / "attested.py"
    training.write_text("print('this is trained')")
    one = ("--strategy", "single", "--script", training, "--name", "attested")
    jobs.render(image, *one, "--out", script)
    (jobs.cluster.shared / "logs").mkdir(exist_ok=True)
    honest = jobs.ended(jobs.cluster.sbatch(script), "attested")
    assert honest.end.state == "COMPLETED" and "trusted: attested by" in honest.log, honest.log
    assert "this is trained" in honest.log
    image.unlink()
    shutil.copy(built, image)
    with image.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    changed = jobs.ended(jobs.cluster.sbatch(script), "attested")
    jobs.write_site()
    assert changed.end.state == "FAILED" and "nothing was trained" in changed.log, changed.log
    assert "attested.sqsh" in changed.log and "this is trained" not in changed.log


def test_a_container_runtime_is_one_row(
    jobs: Jobs, squash: dict[str, Any], monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """A runtime that envbuild does not know starts the ranks of a .sqsh on both nodes."""
    shared = jobs.cluster.shared
    program, script = shared / "toyrun", shared / "toyrun.sbatch"
    program.write_text(TOYRUN)
    program.chmod(0o755)
    row = Runtime(kinds=("enroot",), words=lambda container: [f"{program} {shared} {container.image}"])
    monkeypatch.setitem(runtimes.RUNTIMES, "toyrun", row)  # type: ignore[attr-defined]
    record_property("files of an addition", ["envbuild/runtimes/__init__.py"])
    jobs.write_site('[container]\nruntime = "toyrun"\n')
    site = load_site(dict(os.environ), str(jobs.site))
    jobs.write_site()
    opened = open_artifact(squash["enroot"]["path"], (), None)
    folder = shared / "of toyrun"
    folder.mkdir()
    (folder / "train.py").write_text(SEEN)
    request = JobRequest(
        nodes=2,
        nproc_per_node=1,
        name="toyrun",
        script=str(folder / "train.py"),
        arguments=tuple(AWKWARD),
        current=shared,
    )
    (shared / "logs").mkdir(exist_ok=True)
    script.write_text(render(plan_job(request, opened, site)))
    ended = jobs.ended(jobs.cluster.sbatch(script), "toyrun")
    assert ended.end.state == "COMPLETED", ended.log
    for number in (0, 1):
        seen = json.loads((folder / str(number)).read_text())
        assert (seen["prefix"], seen["arguments"]) == ("/opt/env", AWKWARD)
        assert seen["ENVBUILD_ADDRESS"] == jobs.cluster.address(f"n{int(seen['ENVBUILD_NODE']) + 1}")


MAPPED = """\
import ctypes
ctypes.CDLL("libfabric.so.1")
with open("/proc/self/maps") as lines:
    print("loaded", *{line.split()[5] for line in lines if "libfabric" in line})
"""


def test_the_verdict_on_the_nodes_libraries_is_what_the_preflight_finds(
    jobs: Jobs, squash: dict[str, Any], fabric: Fabric
) -> None:
    """The libfabric of this host in an image, with and without the libraries that it needs of the host."""
    place = fabric.place
    image, script = squash["enroot"]["path"], place / "mapped.py"
    script.write_text(MAPPED)
    (jobs.cluster.shared / "logs").mkdir(exist_ok=True)
    started, libraries = {}, read_libraries(Path(image), ImageLimits())
    for name, more in (("whole", fabric.needs), ("bare", ())):
        jobs.write_site(fabric.table(*more))
        written = ("site", "init", "--from", jobs.site, "--out", jobs.site, "--force")
        assert jobs.cluster.run([jobs.command(), *written]).returncode == 0
        table = load_site(dict(os.environ), str(jobs.site)).host_stack
        host = parse_inventory(Path(table.inventory).read_text(), table.inventory)
        told = next(one for one in judge_stack(table, host, libraries) if one.subject == "libfabric")
        job = place / f"{name}.sbatch"
        jobs.render(image, "--strategy", "single", "--script", script, "--name", name, "--preflight", "--out", job)
        started[name] = (told, jobs.cluster.sbatch(job))
    jobs.write_site()
    for name, (told, number) in started.items():
        ended = jobs.ended(number, name)
        assert (told.status == "good") == (ended.end.state == "COMPLETED"), (told, ended.log)
        if told.status == "good":
            assert fabric.path in told.text and f"loaded {fabric.path}" in ended.log, (told, ended.log)
        else:
            missing = re.search(r"needs ([^\s,]+)", told.text)
            assert missing and re.search(f"cannot load libfabric.so.1: .*{re.escape(missing[1])}", ended.log), ended.log
        kept = json.loads((ended.run / "host_stack.json").read_text())
        assert fabric.path in kept["libraries"] and kept["folders"] == []
    assert started["bare"][0].status == "bad"


@pytest.mark.parametrize("kind", ["venv", "enroot"])
def test_without_a_scheduler_the_command_that_is_said_trains_here(
    kind: str, envbuild: Command, pt_cpu: dict[str, Any], squash: dict[str, Any]
) -> None:
    path = pt_cpu["path"] if kind == "venv" else squash[kind]["path"]
    told = envbuild("job", path, "--site", "local", "--nproc-per-node", "1", "1", "1")
    assert told.returncode == 2
    (command,) = re.findall(r"to train on this host: `(.+?)`;", told.stderr)
    done = subprocess.run(
        ["bash", "-c", command], cwd=envbuild.folder, env=envbuild.variables({}), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert (envbuild.folder / "snapshot.pt").exists()
