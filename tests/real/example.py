"""examples/own_project in every kind of artifact, by hand: built, verified by its own training, run on Slurm.

    pytest tests/real/example.py -n 2

tqdm's repository is the one that git reads for https://github.com/tqdm/tqdm: without a network, one of this machine
that holds tqdm's released files. CI runs the .sqsh of it (test_jobs.py). The image in dockerd runs in no job.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import slurm
from lab.apptainer import Apptainer
from lab.conda_channel import Channel
from lab.dockerd import Lab
from lab.jobs import Jobs
from lab.slurm import slurm_cluster

from envbuild.recipe.targets import host_arch

from .conftest import Command
from .test_conda import site
from .test_jobs import EXAMPLE, tqdm_repository

TARGET = f"cpu-{host_arch()}"
BUILT = {"antlr4-python3-runtime": "4.9.3", "tqdm": "4.69.1"}


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory, session_store: Path, real_apptainer: Apptainer) -> Iterator[Jobs]:
    if reason := slurm.missing():
        pytest.skip(reason)
    share = [session_store, real_apptainer.folder]
    with slurm_cluster(tmp_path_factory.mktemp("jobs") / "cluster", share=share) as cluster:
        jobs = Jobs(cluster, {"ENVBUILD_STORE": str(session_store)})
        jobs.write_site()
        yield jobs


@pytest.fixture(scope="module")
def example(jobs: Jobs, session_store: Path, conda_channel: Channel, docker_daemon: Lab) -> Command:
    """A copy of the example, locked, on the disk that nodes share; its commands reach the lab's channel and daemon."""
    folder = jobs.cluster.shared / "own_project"
    shutil.copytree(EXAMPLE, folder)
    command = Command(
        folder,
        {
            "ENVBUILD_STORE": str(session_store),
            **docker_daemon.environment(),
            **site(folder, conda_channel.folder.as_uri()),
            **tqdm_repository(jobs.cluster.folder / "tqdm", session_store),
        },
    )
    for kind in ("--wheels", "--conda"):
        done = command("lock", "own_project", "--target", TARGET, kind, "--upgrade", "tqdm")
        assert done.returncode == 0, done.stderr
    return command


@pytest.mark.parametrize("kind", ["venv", "conda", "docker", "enroot", "apptainer"])
def test_it_is_built_verified_by_its_training_and_trains_on_two_nodes(kind: str, example: Command, jobs: Jobs) -> None:
    made: dict[str, Any] = example.json(kind, "own_project", "--locked", "--target", TARGET)
    receipt = json.loads(Path(made["receipt"]).read_text())
    checks = {check["name"]: check for check in receipt["checks"]}
    assert receipt["passed"] and checks["command"]["status"] == "pass"
    assert {"own_project", "tqdm", "omegaconf"} <= {*checks["imports"]["evidence"]["modules"]}
    assert receipt["project"]["version"] == "0.1.0"
    shown = example.json("inspect", made["path"])
    assert {one["name"]: one["version"] for one in shown["source_built"]} == BUILT
    if kind == "docker":
        return
    arguments = ("--max-steps", "10", "--out", f"{kind}.pt", "lr=0.05")
    job = jobs.submit(made["path"], "--module", "own_project.train", "--name", kind, arguments=arguments)
    ended = jobs.ended(job, kind)
    assert ended.end.state == "COMPLETED" and "step 5 loss: " in ended.log, ended.log
    assert list(jobs.cluster.shared.rglob(f"{kind}.pt"))
