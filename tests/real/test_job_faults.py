"""Rendered jobs on a real Slurm whose nodes are set up wrong, or die: the job trains to its end all the same."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lab import lmod, slurm
from lab.apptainer import Apptainer
from lab.jobs import Ended, Jobs
from lab.slurm import slurm_cluster

# Long enough to be hit in the middle, with a snapshot every epoch.
LONG = ("12", "1", "--dataset_size", "8000")
# What installers write, and what is left where nobody wrote anything.
LOOPBACK, NONE = "127.0.0.1 localhost\n127.0.1.1 {node}\n", "127.0.0.1 localhost\n"


@pytest.fixture(scope="module")
def jobs(
    tmp_path_factory: pytest.TempPathFactory,
    session_store: Path,
    pt_cpu: dict[str, Any],
    squash: dict[str, Any],
    real_apptainer: Apptainer,
) -> Iterator[Jobs]:
    if reason := slurm.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("faults")
    share = [session_store, Path(pt_cpu["path"]), Path(squash["apptainer"]["path"]), real_apptainer.folder]
    with slurm_cluster(folder / "cluster", second_network=True, share=share) as cluster:
        jobs = Jobs(cluster, {"ENVBUILD_STORE": str(session_store)})
        jobs.write_site()
        yield jobs


@contextmanager
def names_of_hosts(jobs: Jobs, *texts: str) -> Iterator[None]:
    """Nodes whose /etc/hosts is `texts`: names that mislead or are unknown do not matter to jobs."""
    for node, text in zip(jobs.cluster.nodes, texts, strict=True):
        jobs.cluster.set_hosts(node, text.format(node=node))
    try:
        yield
    finally:
        for node in jobs.cluster.nodes:
            jobs.cluster.set_hosts(node)


def resumed(jobs: Jobs, ended: Ended, interface: str = "eth0") -> dict[str, Any]:
    report = dict(jobs.trained(ended, ranks=1, interface=interface))
    assert report["resumed_from"].endswith("snapshot.pt"), ended.log
    # From the middle: neither from the beginning, nor was all of it done before.
    assert 0 < report["start_epoch"] < int(LONG[0])
    assert report["snapshots"][-1]["epoch"] == int(LONG[0]) - 1
    return report


def under_way(jobs: Jobs, job: int) -> None:
    snapshot = jobs.cluster.shared / f"pt_cpu_{job}" / "snapshot.pt"
    jobs.cluster.until(snapshot.exists, 120)


def test_a_killed_rank_restarts_from_the_snapshot_on_the_interface_that_the_site_names(
    jobs: Jobs, pt_cpu: dict[str, Any]
) -> None:
    """The head does not know its own name, and the other node calls itself 127.0.1.1."""
    jobs.write_site('[fabric]\ninterface = "eth1"\n')
    with names_of_hosts(jobs, NONE, LOOPBACK):
        job = jobs.submit(pt_cpu["path"], ranks=1, arguments=LONG)
        jobs.write_site()
        under_way(jobs, job)
        # The process that torchrun started on the other node; its own has the same words and no RANK.
        find = "for p in $(pgrep -f ddp_train); do grep -qz ^RANK= /proc/$p/environ && echo $p; done"
        (rank,) = jobs.cluster.run(["bash", "-c", find], on="n2").stdout.split()
        jobs.cluster.run(["kill", "-9", rank], on="n2", check=True)
        ended = jobs.ended(job)
    report = resumed(jobs, ended, "eth1")
    assert report["ranks"][0]["store"].startswith(jobs.cluster.address("n1", 1))
    assert ended.end.restarts == 0
    assert max(rank["restart_count"] for rank in report["ranks"]) == 1


def test_a_job_whose_node_dies_goes_on_from_the_snapshot(jobs: Jobs, pt_cpu: dict[str, Any]) -> None:
    job = jobs.submit(pt_cpu["path"], ranks=1, arguments=LONG)
    under_way(jobs, job)
    jobs.cluster.kill_node("n2")
    jobs.cluster.start_node("n2")
    jobs.cluster.resume_now(job)
    ended = jobs.ended(job)
    resumed(jobs, ended)
    assert ended.end.restarts == 1
    # Each start meets under a name of its own, and both are in one log.
    assert f"pt_cpu-{job}-0" in ended.log and f"pt_cpu-{job}-1" in ended.log


# One rank waits for data that never comes, and the other one for that rank.
_HANGS = """\
import datetime, os, time
import torch, torch.distributed as dist
from ddp_train.flight import record_hangs, write_record

dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=5))
record_hangs()

def load():
    time.sleep(300)

def step():
    dist.all_reduce(torch.ones(7))

step()
print("rank", dist.get_rank(), "has", os.environ["SLURM_CPUS_ON_NODE"], "CPUs", flush=True)
if dist.get_rank() == 1:
    load()
try:
    step()
except RuntimeError:
    write_record()
    raise
"""


def test_diagnose_names_the_rank_that_a_hung_job_waited_for_and_its_line(jobs: Jobs, pt_cpu: dict[str, Any]) -> None:
    """And a step has the CPUs that its job has: all of a node that it has alone."""
    jobs.write_site()
    jobs.site.write_text(jobs.site.read_text().replace("exclusive = false", "exclusive = true"))
    script = jobs.cluster.shared / "hangs.py"
    script.write_text(_HANGS)
    options = ("--script", script, "--max-restarts", "0")
    job = jobs.submit(pt_cpu["path"], *options, ranks=1, arguments=())
    jobs.write_site()
    ended = jobs.ended(job)
    assert ended.end.state == "FAILED", ended.log
    assert "rank 0 has 4 CPUs" in ended.log and "rank 1 has 4 CPUs" in ended.log, ended.log
    # As the last line of the log says.
    command = ended.log.splitlines()[-1].rpartition(": ")[2].split()
    assert command[:2] == ["envbuild", "diagnose"]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=True)
    first = done.stdout.splitlines()[0]
    assert first.startswith("1. rank 1 has not entered gloo:all_reduce of 7 Float (number 2), in which rank 0"), done
    assert f"{script}:12 in step" in first and f"it was at {script}:9 in load" in first


# Handles SIGTERM as a user's script does: the first rank has a state to write, which takes longer than the others live.
_WRITER = """\
import os, pathlib, signal, sys, time
run, rank = pathlib.Path(os.environ["ENVBUILD_RUN"]), os.environ["RANK"]

def end(number, frame):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(6 if rank == "0" else 0)
    (run / f"state-{rank}").write_text("whole")
    sys.exit(0)

signal.signal(signal.SIGTERM, end)
(run / f"up-{rank}").write_text(os.environ["SLURM_CPUS_ON_NODE"])
while True:
    time.sleep(0.1)
"""


def test_told_to_end_a_container_keeps_its_image_until_every_rank_has_saved_its_state(
    jobs: Jobs, squash: dict[str, Any], real_apptainer: Apptainer
) -> None:
    """Every node has the time it needs. Slurm signals every process of a step, and squashfuse, which holds the image,
    is one.

    A job that shares its nodes has a CPU for each rank where the site names no number.
    """
    modules = {"apptainer/lab": {"PATH": str(real_apptainer.bin)}}
    lmod.module_tree(jobs.cluster.modules, modules)
    jobs.write_site(
        f'[container]\nruntime = "apptainer"\n\n[modules]\ninit = "{lmod.INIT}"\nrun = ["apptainer/lab"]\n',
        APPTAINER_USERNS="true",
    )
    jobs.site.write_text(jobs.site.read_text().replace("cpus = 2", "cpus = 0"))
    script = jobs.cluster.shared / "writer.py"
    script.write_text(_WRITER)
    job = jobs.submit(squash["apptainer"]["path"], "--script", script, arguments=())
    jobs.write_site()
    run = jobs.cluster.shared / f"pt_cpu_{job}"
    up = [run / f"up-{rank}" for rank in range(4)]
    jobs.cluster.until(lambda: all(one.exists() and one.read_text() for one in up), 120)
    assert {one.read_text() for one in up} == {"2"}
    keepers = {
        name
        for node in jobs.cluster.nodes
        for name in jobs.cluster.run(["pgrep", "--list-name", "squashfuse"], on=node).stdout.split()[1:2]
    }
    # Otherwise, the image was unpacked, and a signal harms no mount.
    assert keepers in ({"squashfuse"}, {"squashfuse_ll"})
    # As #SBATCH --signal=B:USR1@120 does two minutes before the end.
    jobs.cluster.run(["scancel", "--batch", "--signal=USR1", str(job)], check=True)
    ended = jobs.ended(job)
    assert sorted(path.name for path in run.glob("state-*")) == [f"state-{rank}" for rank in range(4)], ended.log
    assert ended.end.state == "FAILED" and ended.end.exit_code == 1, ended.log
    assert "Killed" not in ended.log and "forcing" not in ended.log


def test_a_job_that_is_submitted_by_a_job_trains(jobs: Jobs, pt_cpu: dict[str, Any]) -> None:
    """The outer job's memory for each CPU, said in its environment, excludes the inner one's for each node.

    The head calls itself 127.0.1.1, and the other node does not know its own name.
    """
    jobs.write_site()
    jobs.site.write_text(jobs.site.read_text().replace("cpus = 2", 'cpus = 2\nmemory = "1G"'))
    line = [jobs.command(), "job", "--site", jobs.site, pt_cpu["path"], "--nodes", "2", "--nproc-per-node", "1"]
    words = " ".join(shlex.quote(str(word)) for word in [*line, "--submit", "--", "2", "1"])
    outer = jobs.cluster.shared / "outer.sh"
    outer.write_text(f'#!/bin/bash\n[ -n "$SLURM_MEM_PER_CPU" ] && {words} >inner 2>inner.log\n')
    shared = jobs.cluster.shared
    with names_of_hosts(jobs, LOOPBACK, NONE):
        end = jobs.cluster.wait(jobs.cluster.sbatch(outer, "--mem-per-cpu=100", "--output=outer.log", env=jobs.env))
        jobs.write_site()
        assert end.state == "COMPLETED", (shared / "inner.log").read_text()
        jobs.trained(jobs.ended(int((shared / "inner").read_text().splitlines()[-1])), ranks=1)
