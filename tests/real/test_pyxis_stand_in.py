"""Jobs in containers by a plugin of our own that stands in for pyxis, on a real Slurm of two nodes.

The image is small and has no torch: its programs are the preflight and scripts of one process.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lab import pyxis_stand_in, slurm, small_image
from lab.jobs import Jobs
from lab.pyxis_stand_in import CREATED, DATA
from lab.slurm import Cluster, slurm_cluster

from envbuild.cli.commands import cli

from .conftest import REPOSITORY


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Jobs]:
    """The image is `small.sqsh` in the shared folder."""
    if reason := slurm.missing() or pyxis_stand_in.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("pyxis")
    plugin, tree = folder / "cluster/plugin", folder / "tree"
    ctypes = next(Path("/usr/lib").glob("python3.*/lib-dynload/_ctypes.*.so"))  # it has a library of its own
    tools = ("/usr/bin/touch", "/bin/mkdir", "/bin/readlink", str(ctypes))
    library = small_image.write_tree(tree, *tools)
    shutil.copytree(REPOSITORY / "ddp_train", library / "ddp_train")
    # What the image of pyxis' fault has, and what an image says as a job does.
    variables = {"PYTORCH_VERSION": "2.13.0", "OF_BOTH": "image", "OF_IMAGE": "image"}
    with slurm_cluster(folder / "cluster", plugins=pyxis_stand_in.install(plugin)) as cluster:
        small_image.write_image(tree, cluster.shared / "small.sqsh", **variables)
        jobs = Jobs(cluster, {"PATH": f"{plugin}/bin:{slurm.PATH}"})
        jobs.write_site('[container]\nruntime = "pyxis"\n')
        yield jobs


@pytest.fixture
def cluster(jobs: Jobs) -> Iterator[Cluster]:
    """The cluster, of which no container is left before and after."""
    yield jobs.cluster
    for node in jobs.cluster.nodes:
        jobs.cluster.run(["rm", "-rf", DATA, CREATED], on=node, check=True)


def srun(cluster: Cluster, *words: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    line = ["srun", "--nodelist=n1", "--container-image=./small.sqsh", *words]
    done = cluster.run(line, env=env)
    return done.returncode, done.stdout, done.stderr


def test_the_stand_in_shows_what_pyxis_shows(cluster: Cluster) -> None:
    told = {"OF_BOTH": "job", "OF_JOB": "job"}
    show = 'echo "$OF_BOTH $OF_IMAGE $OF_JOB $RANK $LOCAL_RANK $(readlink /proc/self/cwd)"'
    assert srun(cluster, "sh", "-c", show, env=told)[:2] == (0, "image image job 0 0 /workspace\n")
    named = ("--container-env=OF_BOTH", "--container-workdir=/opt")
    assert srun(cluster, *named, "sh", "-c", show, env=told)[1] == "job image job 0 0 /opt\n"
    code, _, said = srun(cluster, "touch", "/opt/x")
    assert code == 1 and "Read-only file system" in said
    assert srun(cluster, "--container-writable", "touch", "/opt/x")[0] == 0
    assert srun(cluster, "sh", "-c", "exit 7")[0] == 7
    code, _, said = srun(cluster, "--container-workdir=/nowhere", "true")
    assert code == 1 and "couldn't chdir to /nowhere" in said
    code, _, said = srun(cluster, "--container-mounts=/nowhere:/data", "true")
    assert code == 1 and "couldn't start container" in said
    mounted = f"--container-mounts=$(echo {cluster.shared}):/data"
    assert "small.sqsh" in srun(cluster, mounted, "ls", "/data")[1]
    # srun ends before the container is removed.
    cluster.until(lambda: cluster.run(["ls", DATA], on="n1").stdout == "")
    srun(cluster, "--container-name=kept", "--container-writable", "touch", "/opt/x")
    assert srun(cluster, "--container-name=kept", "ls", "/opt/x")[1] == "/opt/x\n"
    srun(cluster, "sh", "-c", "kill -9 $$")
    left = cluster.run(["ls", DATA], on="n1").stdout.split()
    assert left[1] == "pyxis_kept" and left[0].endswith(".0")


# Waits to be ended where it is started first; started again, it says which variables of a launcher it sees.
_SCRIPT = """\
import json, os, pathlib, sys, time
run = pathlib.Path(os.environ["ENVBUILD_RUN"])
if sys.argv[1:] == ["wait"] and not (run / "waiting").exists():
    (run / "waiting").touch()
    time.sleep(600)
named = [name for name in os.environ if name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")]
(run / "seen").write_text(json.dumps(named))
"""


def submit(jobs: Jobs, *options: str, arguments: tuple[str, ...] = ()) -> int:
    """Submit the script, as one process."""
    script = jobs.cluster.shared / "script.py"
    script.write_text(_SCRIPT)
    line = ["--unverified", "--strategy", "single", "--script", script, "--name", "small"]
    image = jobs.cluster.shared / "small.sqsh"
    return int(jobs.render(image, *line, *options, "--submit", "--", *arguments).splitlines()[-1])


def waiting(jobs: Jobs, job: int) -> None:
    jobs.cluster.until((jobs.cluster.shared / f"small_{job}/waiting").exists)
    assert containers(jobs)


def on_all(cluster: Cluster, *command: str | Path) -> str:
    """What `command` prints on the nodes, of which Slurm chooses one."""
    return "".join(cluster.run(command, on=node).stdout for node in cluster.nodes)


def containers(jobs: Jobs) -> str:
    return on_all(jobs.cluster, "ls", DATA)


def test_a_requeued_job_starts_again_and_no_program_sees_the_ranks_of_pyxis(jobs: Jobs, cluster: Cluster) -> None:
    job = submit(jobs, arguments=("wait",))
    waiting(jobs, job)
    cluster.run(["scontrol", "requeue", str(job)], check=True)
    cluster.resume_now(job)
    ended = jobs.ended(job, "small")
    assert (ended.end.state, ended.end.restarts) == ("COMPLETED", 1), ended.log
    seen = ended.run / "seen"
    assert seen.exists(), ended.log
    assert json.loads(seen.read_text()) == []
    assert containers(jobs) == ""


def test_a_cancelled_job_leaves_no_container(jobs: Jobs, cluster: Cluster) -> None:
    job = submit(jobs, arguments=("wait",))
    waiting(jobs, job)
    cluster.run(["scancel", str(job)], check=True)
    assert jobs.ended(job, "small").end.state == "CANCELLED"
    cluster.until(lambda: containers(jobs) == "")


def test_the_preflight_and_the_training_have_one_container(jobs: Jobs, cluster: Cluster) -> None:
    """And beside the training goes what a cancelled job left on the node, nothing else."""
    left, kept = f"pyxis_envbuild-lab-{os.getuid()}-999999-0", "pyxis_envbuild-lab-60001-999999-0"
    on_all(cluster, "mkdir", "-p", DATA / left, DATA / kept)
    job = submit(jobs, "--preflight", arguments=("wait",))
    cluster.until((jobs.cluster.shared / f"small_{job}/waiting").exists)
    node = cluster.job(job)["NodeList"]
    cluster.until(lambda: left not in cluster.run(["ls", DATA], on=node).stdout)
    cluster.run(["scancel", "--batch", "--signal=USR1", str(job)], check=True)
    ended = jobs.ended(job, "small")
    assert "preflight: " in ended.log, ended.log
    created = on_all(cluster, "cat", CREATED).splitlines()
    assert len(created) == 1, created
    assert cluster.run(["ls", DATA], on=node).stdout.split() == [kept]


def test_the_line_of_the_help_trains_and_leaves_its_snapshot_in_the_current_folder(
    jobs: Jobs, cluster: Cluster, squash: dict[str, Any]
) -> None:
    folder = cluster.shared / "help"
    folder.mkdir()
    os.link(squash["enroot"]["path"], folder / "pt.sqsh")
    shown = CliRunner().invoke(cli, ["enroot", "--help"]).output
    (line,) = (one.strip() for one in shown.splitlines() if one.strip().startswith("srun "))
    done = cluster.run(["bash", "-c", line], cwd=folder, timeout_s=300)
    assert done.returncode == 0, done.stderr
    assert (folder / "snapshot.pt").exists()
