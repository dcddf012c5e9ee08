"""Launches that fail for a known reason, for real, on two nodes; `envbuild diagnose` must name it from their logs.

The rows of the rendezvous' ways to fail: each is provoked with plain torchrun, as people write it by hand.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from lab.lint import lint
from lab.slurm import Cluster, missing, slurm_cluster

from envbuild.cli.diagnose import diagnose_command

TRAIN = """
import os, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(4))
print("rank", dist.get_rank(), "of", dist.get_world_size(), flush=True)
dist.barrier()
dist.destroy_process_group()
os._exit(0)
"""
# The torchruns of one node, forked from a process that has imported torch without garbage collection: an import takes a
# second. The argument is a JSON object of NAME: ARGUMENTS; each writes NAME.log, NAME.pid and NAME.code for `launch`.
AGENTS = """
import gc
gc.disable()
import json, os, pathlib, sys
from torch.distributed.run import main
names = {}
for name, arguments in json.loads(sys.argv[1]).items():
    child = os.fork()
    if child == 0:
        output = os.open(f"{name}.log", os.O_WRONLY | os.O_CREAT, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["torchrun", *arguments]
        sys.exit(main())
    names[child] = name
    pathlib.Path(f"{name}.pid").write_text(str(child))
while names:
    child, status = os.wait()
    pathlib.Path(f"{names.pop(child)}.code").write_text(f"{os.waitstatus_to_exitcode(status)}.")
"""
LISTEN = """
import socket, time
taken = socket.create_server(("0.0.0.0", 29504))
print("listening", flush=True)
time.sleep(300)
"""
LIMIT_S = 100
GRACE_S = 10
WAYS = (
    *("head-only", "localhost-endpoint", "name-unknown", "port-in-use", "run-ids-differ", "endpoints-differ"),
    "head-unreachable",  # a firewall
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    if reason := missing():
        pytest.skip(reason)
    pytest.importorskip("torch", reason="this Python has no torch, which the jobs run")
    with slurm_cluster(tmp_path_factory.mktemp("cluster") / "lab") as running:
        (running.shared / "train.py").write_text(TRAIN)
        yield running


def torchrun(endpoint: str, *more: str, id: str = "job", wait: int = 6) -> list[str]:
    """The arguments on one node; `wait` seconds for the others."""
    options = ["--nnodes=2", "--nproc-per-node=1", f"--rdzv-id={id}", "--rdzv-backend=c10d"]
    options += [f"--rdzv-endpoint={endpoint}", f"--rdzv-conf=join_timeout={wait},read_timeout=4", *more]
    return [*options, "train.py"]


def launch(cluster: Cluster, jobs: dict[str, Sequence[Sequence[str]]]) -> None:
    """Run the torchruns of all jobs, the first of each on n1, the second on n2, into NAME-n1.log and NAME-n2.log.

    When one node of a job has failed, the other may wait for it until a time limit: it gets a few seconds more.
    """
    env = {"LOGLEVEL": "INFO", "OMP_NUM_THREADS": "1"}
    started: dict[str, list[Path]] = {name: [] for name in jobs}
    running = []
    for number, node in enumerate(cluster.nodes):
        here = {f"{name}-{node}": commands[number] for name, commands in jobs.items() if len(commands) > number}
        for one in here:
            started[one.rpartition("-")[0]].append(cluster.shared / one)
        if here:
            running.append(cluster.popen([sys.executable, "-c", AGENTS, json.dumps(here)], on=node, env=env))
    ends = dict.fromkeys(jobs, time.monotonic() + LIMIT_S)
    while started:
        for name, agents in list(started.items()):
            codes = {agent: _code(agent) for agent in agents}
            if any(codes.values()):
                ends[name] = min(ends[name], time.monotonic() + GRACE_S)
            if None not in codes.values() or time.monotonic() > ends[name]:
                for agent in (agent for agent, code in codes.items() if code is None):
                    pid = agent.with_suffix(".pid").read_text()
                    cluster.run(["kill", "-KILL", pid], on=agent.name.rpartition("-")[2])
                del started[name]
        time.sleep(0.1)
    for agents_of_node in running:
        _, errors = agents_of_node.communicate(timeout=LIMIT_S)
        assert agents_of_node.returncode == 0, errors


def _code(agent: Path) -> int | None:
    """The exit status of an agent, None while it runs."""
    file = agent.with_suffix(".code")
    text = file.read_text() if file.exists() else ""
    return int(text.rstrip(".")) if text.endswith(".") else None


def diagnosed(cluster: Cluster, name: str) -> list[dict[str, Any]]:
    logs = [str(path) for path in sorted(cluster.shared.glob(f"{name}-n?.log"))]
    done = CliRunner().invoke(diagnose_command, [*logs, "--json"])
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)["findings"]
    assert found, [Path(path).read_text()[-3000:] for path in logs]
    return found


@pytest.fixture(scope="module")
def launched(cluster: Cluster) -> Path:
    """All launches between nodes with right names, side by side: most of their time is a wait for a node that never
    comes. Returns the script of a job of the kind that guide 003 prints: torchrun in the batch script, on the head.
    """
    script = cluster.shared / "hand.sbatch"
    command = " ".join([sys.executable, "-m", "torch.distributed.run", *torchrun("$head:29541")])
    script.write_text(
        "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --output=hand-n1.log\n"
        f'head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n{command}\n'
    )
    job = cluster.sbatch(script)
    taken = cluster.popen([sys.executable, "-c", LISTEN], on="n1")
    assert taken.stdout is not None and taken.stdout.readline()
    cluster.block("n1", port=29531)
    here = ("--rdzv-conf=is_host=1,join_timeout=6,read_timeout=4", "--local-addr=10.89.7.11")
    launch(
        cluster,
        {
            "head-only": [torchrun("n1:29501")],
            "localhost-endpoint": [torchrun("localhost:29502")] * 2,
            "name-unknown": [torchrun("node17.nowhere:29503")],
            "port-in-use": [torchrun("10.89.7.11:29504", *here)],
            "run-ids-differ": [torchrun("n1:29505", id="11"), torchrun("n1:29505", id="22")],
            "endpoints-differ": [torchrun("n1:29506"), torchrun("n2:29506")],
            "head-unreachable": [torchrun("n1:29531", wait=12)] * 2,
            "good": [torchrun("n1:29532", wait=60)] * 2,
        },
    )
    cluster.unblock("n1")
    taken.kill()
    taken.wait()
    assert cluster.wait(job, LIMIT_S).state == "FAILED"
    return script


def test_each_way_to_miss_each_other_with_right_names_is_named(cluster: Cluster, launched: Path) -> None:
    for name in WAYS:
        assert diagnosed(cluster, name)[0]["id"] == name


def test_names_beside_the_loopback_address_are_named(cluster: Cluster) -> None:
    """Debian's default: 127.0.1.1 and the host's own name in /etc/hosts."""
    for node, other in (("n1", "n2"), ("n2", "n1")):
        right = f"{cluster.address(other)} {other}\n"
        cluster.set_hosts(node, f"127.0.0.1 localhost\n127.0.1.1 {node}\n{right}")
    head = cluster.address("n1")
    try:
        launch(
            cluster,
            {
                "loopback-address": [torchrun("n1:29511", wait=60)] * 2,
                "endpoint-not-recognised": [torchrun(f"{head}:29512")] * 2,
            },
        )
    finally:
        for node in cluster.nodes:
            cluster.set_hosts(node)
    found = diagnosed(cluster, "loopback-address")[0]
    assert (found["id"], "127.0.1.1" in found["cause"]) == ("loopback-address", True)
    found = diagnosed(cluster, "endpoint-not-recognised")[0]
    assert (found["id"], head in found["cause"]) == ("endpoint-not-recognised", True)


def test_a_node_that_cannot_look_up_its_own_name_is_named(cluster: Cluster) -> None:
    for node in cluster.nodes:
        cluster.set_hosts(node, "127.0.0.1 localhost\n")
    try:
        launch(cluster, {"own-name-unknown": [torchrun("10.89.7.11:29521")]})
    finally:
        for node in cluster.nodes:
            cluster.set_hosts(node)
    assert diagnosed(cluster, "own-name-unknown")[0]["id"] == "own-name-unknown"


def test_a_good_job_yields_nothing(cluster: Cluster, launched: Path) -> None:
    logs = [str(path) for path in sorted(cluster.shared.glob("good-n?.log"))]
    assert "rank 0 of 2" in Path(logs[0]).read_text() + Path(logs[1]).read_text()
    done = CliRunner().invoke(diagnose_command, [*logs, "--json"])
    assert json.loads(done.stdout)["findings"] == []


def test_what_lint_finds_in_a_script_is_what_diagnose_finds_in_its_log(cluster: Cluster, launched: Path) -> None:
    faults = {one.fault.id for one in lint(launched.read_text(), str(launched))}
    assert {"head-only", "fixed-port"} <= faults
    found = diagnosed(cluster, "hand")[0]
    assert found["id"] == "head-only-quiet"
    assert "start torchrun on every node" in found["remedy"]
