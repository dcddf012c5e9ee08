"""Plans of jobs as tests of renderers need them, and real bash to run what they render."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from envbuild.jobs.model import JobArtifact, JobPlan
from envbuild.site.jobs import ModulesTable, NodeTable, PathsTable, SchedulerTable
from envbuild.site.settings import Site
from envbuild.site.tables import FabricTable

REPOSITORY = str(Path(__file__).resolve().parents[2])
DIGEST = f"sha256:{'ab' * 32}"
VENV = JobArtifact(
    "venv",
    "/fsx/envs/pt",
    DIGEST,
    "pt_cpu",
    "cpu-x86_64",
    "/fsx/envs/pt/bin/python",
    verified_at="2026-01-02T03:04:05Z",
)
CONDA = replace(VENV, kind="conda", path="/fsx/conda/pt", python="/fsx/conda/pt/bin/python")
SQSH = replace(VENV, kind="enroot", path="/fsx/pt.sqsh", python="/opt/env/bin/python")
IMAGE = replace(SQSH, kind="docker", path=f"registry.example.org/team/pt@{DIGEST}")
SIF = replace(SQSH, kind="apptainer", path="/fsx/pt.sif")
EFA_SQSH = replace(
    SQSH, recipe="pt_efa", target="cu126-x86_64", fabric="efa", provider="efa", verified_at="", chips=("sm_90",)
)
GPU_SIF = replace(SIF, recipe="gh200", target="cu126-aarch64", fabric="slingshot", provider="cxi")
MOUNTS = (("/fsx", "/fsx"),)
SITE = Site("lab")
PLAN = JobPlan(
    "pt_cpu",
    "slurm",
    VENV,
    SITE,
    "folder",
    "srun",
    "ddp",
    2,
    2,
    ("-m", "ddp_train", "10", "1"),
    "/fsx/me",
    run_files=(("--checkpoint_path", "snapshot.pt"), ("--report", "report.json")),
    variables=(("OMP_NUM_THREADS", "2"),),
)
AWS = replace(
    SITE,
    name="aws",
    scheduler=SchedulerTable(kind="slurm", partition="gpu", auto_resume=True),
    paths=PathsTable(shared="/fsx", scratch="/scratch"),
    node=NodeTable(gpus=8, cpus=96, memory="480G"),
)
GH200 = replace(
    SITE,
    name="gh200",
    scheduler=SchedulerTable(kind="pbs", partition="workq", account="p-1", constraint="host_arch=aarch64"),
    fabric=FabricTable(interface="hsn0,hsn1"),
    node=NodeTable(gpus=4, cpus=72, memory="480"),
)
MODULES = replace(
    SITE,
    name="modules",
    scheduler=SchedulerTable(
        kind="slurm", account="a1", qos="long", constraint="icelake", requeue=False, directives=("--mail-type=END",)
    ),
    modules=ModulesTable(init="/etc/profile.d/lmod.sh", run=("python/3.11.7", "cuda/12.6")),
)
LOADED = MODULES.modules.run
NCCL = (("NCCL_NET", "AWS Libfabric"), ("FI_PROVIDER", "efa"), ("HTTPS_PROXY", "http://proxy.example:3128"))

# The addresses of a machine, and the address from which it reaches any other.
ADDRESSES = "eth0 2001:db8::7,eth0 192.0.2.7,hsn0 203.0.113.7,ib0 2001:db8:1::7"

# Stands in for srun, mpirun, ssh, blaunch, flux and apptainer: says what it was given, and does what they would on
# `nodes` nodes, all of which are this machine. The programs for nodes are the real ones.
_LAUNCHER = """\
#!{python} -S
import contextlib, json, os, pathlib, signal, subprocess, sys
tool, arguments = pathlib.Path(sys.argv[0]).name, sys.argv[1:]
with open(os.environ["RECORDED"], "ab", buffering=0) as stream:
    stream.write(json.dumps([tool, arguments]).encode() + b"\\n")
if "--version" in arguments:
    sys.exit(print(os.environ["MPI"]))
if tool == "ssh":
    sys.exit(subprocess.run(["sh", "-c", arguments[-1]]).returncode)
if tool in ("apptainer", "envbuild"):
    start = next(at for at, one in enumerate(arguments) if one.endswith("python"))
    os.execv(arguments[start], arguments[start:])
if tool == "pbsdsh":  # PBS signals all of a task, and the exit code is 0 whatever its program's is
    task = subprocess.Popen(arguments[arguments.index("/bin/sh"):], start_new_session=True)
    signal.signal(signal.SIGTERM, lambda number, frame: os.killpg(task.pid, number))
    task.wait()
    sys.exit(0)
if tool == "blaunch":  # blaunch -no-shell HOST COMMAND…
    os.execvp(arguments[2], arguments[2:])
if tool == "flux" and arguments[0] != "run":
    hosts = [f"n{{number}}" for number in range(int(os.environ["NODES"]))]
    said = {{"getattr": "f9", "job": "77", "hostlist": "\\n".join(hosts)}}  # getattr jobid, job id F58
    sys.exit(print(said[arguments[0]]))
programs = ("/python", "python3", "apptainer", "envbuild")
start = next(at for at, one in enumerate(arguments) if one in ("sh", "bash", "env") or one.endswith(programs))
tasks = []
for number in range(int(os.environ["NODES"])):
    own = {{"SLURM_NODEID": str(number), "SLURMD_NODENAME": f"n{{number}}"}}  # of what Slurm starts on a node
    own |= {{"FLUX_TASK_RANK": str(number)}}
    told = os.environ | own | {{"OMPI_COMM_WORLD_RANK": str(number)}}
    if tool.startswith("mpi") and "Open" not in os.environ["MPI"]:  # these give all of their own environment on
        told = own | os.environ | {{"PMI_RANK": str(number)}}
    tasks.append(subprocess.Popen(arguments[start:], env=told))
codes = []
for _ in tasks:  # when one fails, the others are ended
    code = os.waitstatus_to_exitcode(os.wait()[1])
    if code and not any(codes):
        for task in tasks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(task.pid, signal.SIGTERM)
    codes.append(128 - code if code < 0 else code)
sys.exit(next(filter(None, codes), 0) if tool.startswith("mpi") else max(codes))  # Open MPI's is the first
"""
_PYTHON = """\
#!{python} -S
import functools, json, os, runpy, subprocess, sys, types
if "ddp_train.launch" in sys.argv:  # the real one, on a machine with the addresses of $ADDRESSES and the route $SOURCE
    sys.path.insert(0, {repository!r})
    from ddp_train.launch import address, nodes
    nodes.addresses = lambda: [address.Address(*one.split()) for one in os.environ["ADDRESSES"].split(",") if one]
    nodes.choose = functools.partial(address.choose, source=lambda target: os.environ["SOURCE"])
    os.uname = lambda: types.SimpleNamespace(nodename=subprocess.check_output(["uname", "-n"], text=True).strip())
    sys.prefix = os.path.dirname(os.path.dirname(sys.argv[0]))
    sys.argv = sys.argv[sys.argv.index("ddp_train.launch"):]
    runpy.run_module("ddp_train.launch", run_name="__main__", alter_sys=True)
if os.path.exists(f"{{sys.argv[0]}}.sh"):
    os.execv("/bin/sh", ["sh", f"{{sys.argv[0]}}.sh", *sys.argv[1:]])
with open(os.environ["RECORDED"], "ab", buffering=0) as stream:
    stream.write(json.dumps(["python", sys.argv[1:], dict(os.environ)]).encode() + b"\\n")
sys.exit(int(os.environ.get("CODE", "0")))
"""
_SCONTROL = """\
#!/bin/sh
[ "$2" != hostnames ] || for i in $(seq 0 $((NODES - 1))); do echo "n$i"; done
"""


def executable(path: Path, text: str) -> Path:
    """Write a program."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.format(python=sys.executable, repository=REPOSITORY) if "{python}" in text else text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def recorder(path: Path, training: str = "") -> str:
    """An interpreter at `path` that records what it is called with, or runs the shell script `training` instead."""
    if training:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.sh").write_text(training)
    return str(executable(path, _PYTHON))


class Stage:
    """A folder in which scripts run by real bash, with a recording srun and its like first on PATH."""

    def __init__(self, folder: Path, nodes: int = 1) -> None:
        self.folder, self.nodes = folder, nodes
        self.bin = folder / "bin"
        for tool in ("srun", "mpirun", "mpiexec", "ssh", "pbsdsh", "blaunch", "flux", "apptainer", "envbuild"):
            executable(self.bin / tool, _LAUNCHER)
        executable(self.bin / "scontrol", _SCONTROL)
        (folder / "hosts").write_text("".join(f"n{i}\n" for i in range(nodes)))

    def run(
        self, script: str, *, env: Mapping[str, str] | None = None, shell: str = "bash"
    ) -> tuple[subprocess.CompletedProcess[str], list[Any]]:
        """How the script ended, and what was called: [tool, arguments] and ["python", arguments, variables]."""
        recorded = self.folder / "recorded"
        recorded.write_text("")
        path = self.folder / "job.sh"
        path.write_text(script, encoding="utf-8")
        done = subprocess.run(
            [shell, str(path)],
            env=self.environment(env or {}),
            cwd=self.folder,
            text=True,
            capture_output=True,
            timeout=60,
        )
        return done, [json.loads(line) for line in recorded.read_text().splitlines()]

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """A job's, and the login host's that came with it."""
        recorded = self.folder / "recorded"
        return {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "HOME": str(self.folder),
            "LC_ALL": "C.UTF-8",
            "NODES": str(self.nodes),
            "RECORDED": str(recorded),
            "MPI": "mpirun (Open MPI) 4.1.4",
            "SLURM_JOB_ID": "77",
            "SLURM_JOB_NODELIST": "n[0-9]",
            "LSB_JOBID": "77",
            "LSB_DJOB_HOSTFILE": str(self.folder / "hosts"),
            "PBS_JOBID": "77.head",
            "PBS_NODEFILE": str(self.folder / "hosts"),
            "ADDRESSES": ADDRESSES,
            "SOURCE": "192.0.2.7",
            "XDG_RUNTIME_DIR": "/run/user/of-the-login-node",
            "PYTHONPATH": "/of/the/login/node",
            **more,
        }
