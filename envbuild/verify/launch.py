"""Launches of jobs: one torchrun agent for each node, and a wait for all of them.

Nodes are simulated: each agent has its own node identity, and all meet at a c10d rendezvous on a free port of
node 0. `is_host` marks the agent that hosts the store, and each agent gives its own address: this works
whatever /etc/hosts contains.

NCCL_HOSTID makes NCCL treat simulated nodes on one host as separate hosts (src/misc/utils.cc), so that their
traffic uses the network and not shared memory; ranks of different nodes may then share a GPU. NCCL_MNNVL_ENABLE=0
keeps it off NVLink, which NCCL takes between hosts where GPUs belong to one cluster (GB200; src/mnnvl.cc).
"""

from __future__ import annotations

import re
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from envbuild.base.files import parse_json
from envbuild.base.progress import Log, step
from envbuild.contract.verification import VerifySettings
from envbuild.fabrics import Fabric, fabric_variables, find_fabric, plugin_variables
from envbuild.jobcheck.diagnose.nccl_log import parse_nccl_log
from envbuild.layers.wheel import load_trainer
from envbuild.recipe.targets import Accelerator
from envbuild.runtimes.base import torchrun_word
from envbuild.site.tables import FabricTable
from envbuild.verify.model import Agent, Nodes, Subject
from envbuild.verify.probes import Request

# Read by the trainer (ddp_train/chips.py).
_CHIPS = "DDP_TRAIN_CHIPS"
_DEBUG = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,BOOTSTRAP,ENV,NET"}
# envbuild's own trainer, in the work folder: the artifact's copy must not judge the artifact.
TRAINER = ".trainer/start.py"
# The folder goes first even if the environment sets PYTHONSAFEPATH.
_START = b"""import os, runpy, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
runpy.run_module("ddp_train", run_name="__main__", alter_sys=True)
"""
_STEPS = 16
_POLL_S = 0.05
_GRACE_S = 10.0
_NCCL_LINES = 8
# A line of the trainer (ddp_train/loop.py), and the nodes that are shown of a job.
_EPOCH = re.compile(r"^\[RANK \d+\] Epoch (\d+) \|.*\| Loss: (\S+)$", re.MULTILINE)
_SHOWN_NODES = 8
_TITLES = {
    "reference": "training in one process, as reference",
    "train": "training on simulated nodes",
    "resume": "resuming from the snapshot",
    "faults": "training with a rank that is killed",
    "step": "training, to measure the time of a step",
}
# Node 0 starts torchrun's script. The other nodes, and all of a `lean` job, start its module with garbage collection
# off during the import: it takes a quarter of the start-up time.
_LEAN = "import gc; gc.disable(); from torch.distributed.run import main; gc.freeze(); gc.enable(); main()"
# What they import takes as long to tear down as half of the start-up. Node 0 leaves in order: it is the others' store.
_LEAVE = "; import os, sys; sys.stdout.flush(); sys.stderr.flush(); os._exit(0)"
_VARIABLES = {
    # Agents that share the store with their ranks lose it on a restart (pytorch #135712).
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    # The reports are judged by envbuild, so training continues after a failed self-check.
    "DDP_TRAIN_JUDGED_LATER": "1",
}


@dataclass(frozen=True, slots=True)
class Network:
    """The fabric, the variables that all nodes of a job get for it, and the GPUs that each node may use (() for all).

    `replaced` maps each caller's variable that the job changes to (the caller's value, the job's value).
    """

    fabric: Fabric
    accelerator: Accelerator
    variables: Mapping[str, str] = field(default_factory=dict)
    gpus: tuple[tuple[str, ...], ...] = ()
    replaced: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def of_node(self, node: int, name: str, work: str) -> dict[str, str]:
        """Return the variables of `node` in the job `name`, whose NCCL logs go into the folder `work`."""
        if not self.accelerator.gpu:
            return {}
        variables = {**self.variables, "NCCL_HOSTID": f"envbuild-{name}-{node}", "NCCL_MNNVL_ENABLE": "0"}
        if self.gpus:
            variables[self.accelerator.visible] = ",".join(self.gpus[node])
        return {**variables, **_DEBUG, "NCCL_DEBUG_FILE": f"{work}/{name}-nccl{node}.%h.%p.txt"}


def network_of(
    subject: Subject, nodes: Nodes, shape: tuple[int, int], env: Mapping[str, str], site: FabricTable
) -> Network:
    """Return the network of a job of `shape` (nodes, ranks per node). Raises UsageError for an unknown fabric."""
    fabric, accelerator, state = find_fabric(subject.state.fabric), subject.target.family, subject.state
    if not accelerator.gpu:
        return Network(fabric, accelerator)
    shared = nodes.interface == "lo"  # the nodes use this host's network, with the site's interface
    variables = {"NCCL_SOCKET_IFNAME": f"={nodes.interface}", **fabric_variables(fabric, site, accelerator.name)}
    if site.interface and not shared:
        variables["NCCL_SOCKET_IFNAME"] = f"={nodes.interface}"
    path = "" if subject.isolated else env.get("LD_LIBRARY_PATH", "")
    root, nccl = PurePath(subject.roots[0]), state.nccl
    if chips := state.slim.get("gpus"):
        variables[_CHIPS] = ",".join(chips)
    variables |= plugin_variables(state.layers, root, nccl, path, net_plugin=accelerator.net_plugin)
    gpus, (count, each) = visible_gpus(env, accelerator), shape
    split = tuple(tuple(gpus[node * each : (node + 1) * each]) for node in range(count))
    enough = shared and count > 1 and len(gpus) >= count * each
    return Network(fabric, accelerator, variables, split if enough else (), _replaced(variables, env))


def _replaced(variables: Mapping[str, str], env: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    ours = {name: value for name, value in variables.items() if name not in ("LD_LIBRARY_PATH", "NCCL_SOCKET_IFNAME")}
    return {name: (env[name], value) for name, value in ours.items() if env.get(name, value) != value}


def visible_gpus(env: Mapping[str, str], accelerator: Accelerator, dev: Path = Path("/dev")) -> list[str]:
    """Return the GPUs that a process with `env` may use, as `accelerator.visible` names them."""
    given = env.get(accelerator.visible)
    if given is not None:
        return [part.strip() for part in given.split(",") if part.strip()]
    return [str(number) for number, _ in enumerate(dev.glob(accelerator.devices))]


def fit_to_gpus(settings: VerifySettings, env: Mapping[str, str], accelerator: Accelerator, log: Log) -> VerifySettings:
    """Return `settings` with no more ranks per node than this host has GPUs. Simulated nodes share them."""
    gpus = len(visible_gpus(env, accelerator)) if accelerator.gpu else 0
    requested = settings.nproc_per_node
    if not 0 < gpus < requested:
        return settings
    log(f"{requested} ranks per node were requested, but this host has fewer GPUs: training with {gpus} per node")
    return replace(settings, nproc_per_node=gpus, wanted_nproc_per_node=requested)


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """A job on `nodes` × `nproc_per_node` ranks: the trainer with `arguments`, or `program`.

    With `named`, torchrun starts each line of a rank's output with [NODE.RANK OF THE NODE]. `bare` starts the program
    once on each node, without torchrun.
    """

    name: str
    arguments: tuple[str, ...]
    nodes: int
    nproc_per_node: int
    timeout_s: float
    max_restarts: int = 0
    lean: bool = False
    program: tuple[str, ...] = ()
    named: bool = False
    bare: bool = False

    @property
    def world_size(self) -> int:
        return self.nodes * self.nproc_per_node


@dataclass(slots=True)
class Outcome:
    """The outcome of a job: exit codes by node, the reports of rank 0 of every world, and the output of all nodes.

    `started` is time.monotonic() at its start.
    """

    job: TrainingJob
    returncodes: list[int | None]
    reports: list[dict[str, Any]]
    log: str
    seconds: float
    timed_out: bool
    command: list[str]
    started: float = 0.0

    @property
    def finished(self) -> bool:
        return not self.timed_out and all(code == 0 for code in self.returncodes)


@dataclass(slots=True)
class Running:
    """A running job; `wait` waits for its end."""

    job: TrainingJob
    run_id: str
    work: Path
    started: float
    nodes: Nodes
    command: list[str] = field(default_factory=list)
    children: list[Agent] = field(default_factory=list)

    def log(self) -> str:
        """Return the output of all nodes so far."""
        return "\n".join(_read(self.work / f"{self.job.name}-node{n}.log") for n in range(len(self.children)))

    def epochs(self) -> str:
        """Return a line for each node: the epoch that it finished last, and its loss."""
        lines = []
        for node in range(len(self.children[:_SHOWN_NODES])):
            last = deque(_EPOCH.finditer(_read(self.work / f"{self.job.name}-node{node}.log")), maxlen=1)
            done = f"epoch {int(last[0][1]) + 1}/{self.job.arguments[0]}  loss {last[0][2]}" if last else "starting"
            lines.append(f"node {node}: {done}")
        more = len(self.children) - len(lines)
        return "\n".join(lines + ([f"and {more} more nodes"] if more else []))

    def wait_for_output(self) -> None:
        """Wait until a node has printed something, all nodes have ended, or the job's time limit is reached."""
        deadline = self.started + self.job.timeout_s
        while time.monotonic() < deadline and not self.log().strip():
            if all(child.poll() is not None for child in self.children):
                return
            time.sleep(_POLL_S)

    def wait(self, on_poll: Callable[[Running], None] | None = None) -> Outcome:
        """Wait for all nodes until the job's time limit, and a grace period after the first failure; call `on_poll`."""
        deadline = self.started + self.job.timeout_s
        timed_out = failing = False
        while any(child.poll() is None for child in self.children) and not timed_out:
            if not failing and any(child.poll() for child in self.children):
                # The others would wait for the failed node until their own timeouts.
                failing, deadline = True, min(deadline, time.monotonic() + _GRACE_S)
            timed_out = time.monotonic() > deadline
            if on_poll is not None:
                on_poll(self)
            time.sleep(_POLL_S)
        self.nodes.stop(self.children)
        self.nodes.collect(self.work)
        codes = [child.returncode for child in self.children]
        return Outcome(
            job=self.job,
            returncodes=codes,
            reports=self._reports(),
            log="\n".join([self.log(), *([self._nccl_faults()] if any(codes) else [])]),
            seconds=time.monotonic() - self.started,
            timed_out=timed_out and not failing,
            command=self.command,
            started=self.started,
        )

    def _nccl_faults(self) -> str:
        """Return the distinct faults in this job's NCCL logs, as log lines; "" if NCCL went on after all of them."""
        logs = [parse_nccl_log(_read(path)) for path in sorted(self.work.glob(f"{self.job.name}-nccl*.txt"))]
        if not any(log.having("error", "fatal") for log in logs):
            return ""
        warnings = dict.fromkeys(f"NCCL WARN {fault.text}" for log in logs for fault in log.faults)
        return "\n".join(list(warnings)[:_NCCL_LINES])

    def _reports(self) -> list[dict[str, Any]]:
        reports = []
        for path in sorted(self.work.glob(f"{self.job.name}-report*.json")):
            try:
                reports.append(parse_json(path.read_bytes()))
            except ValueError:
                reports.append({"unreadable": path.name})
        return reports


@dataclass(frozen=True, slots=True)
class Bench:
    """The context of launches, with files in this host's folder `work`; `floor_of` is the origin of `floor` (GB/s)."""

    nodes: Nodes
    work: Path
    settings: VerifySettings
    subject: Subject
    network: Network
    request: Request
    floor: float = 0.0
    floor_of: str = ""

    @contextmanager
    def start(
        self,
        name: str,
        epochs: int,
        *,
        shape: tuple[int, int] | None = None,
        snapshot: str | None = None,
        max_restarts: int = 0,
        bandwidth_s: str | None = None,
        extra: Mapping[str, str] | None = None,
    ) -> Iterator[Running]:
        """Start the trainer on `shape` (nodes, ranks per node; default: the settings'), or as one process on 0 nodes.

        Every launch trains on the same global batches, whatever its number of ranks. A launch from a `snapshot` is
        lean; `extra` are additional variables. Leaving the context stops the processes that still run.
        """
        settings = self.settings
        nodes, nproc_per_node = shape or (settings.nodes, settings.nproc_per_node)
        batch = settings.batch_size * settings.nodes * settings.nproc_per_node
        options = (
            str(epochs),
            "1" if max_restarts else str(epochs),
            "--batch_size",
            str(batch // max(1, nodes * nproc_per_node)),
            "--model",
            settings.model,
            "--dataset_size",
            str(batch * _STEPS),
            "--checkpoint_path",
            str(self.nodes.work / f"{snapshot or name}.pt"),
            "--backend",
            self.network.accelerator.backend,
            *(("--bandwidth", bandwidth_s) if bandwidth_s else ()),
        )
        job = TrainingJob(
            name, options, nodes, nproc_per_node, settings.timeout_s, max_restarts, lean=snapshot is not None
        )
        with self.launch(job, extra or {}) as running, step(_TITLES[name], printed=True, note=running.epochs):
            yield running

    @contextmanager
    def launch(self, job: TrainingJob, extra: Mapping[str, str]) -> Iterator[Running]:
        """Start `job` on every node with `extra` variables. Leaving the context stops the processes that still run."""
        work, address, port = str(self.nodes.work), self.nodes.address(0), self.nodes.free_port()
        # Some runtimes show the host's /tmp in an image: torch's files must not stay there.
        common = {"GLOO_SOCKET_IFNAME": self.nodes.interface, "TMPDIR": work, **_VARIABLES}
        running = Running(job, f"envbuild-{job.name}-{uuid.uuid4().hex[:8]}", self.work, time.monotonic(), self.nodes)
        try:
            for node in range(max(1, job.nodes)):
                program, *arguments = _command(job, node, f"{address}:{port}", running.run_id, self.nodes)
                running.command = running.command or [program, *arguments]
                alone = _alone(job, node, address, port) if job.bare else {}
                variables = {**common, **alone, **self.network.of_node(node, job.name, work), **extra}
                log = self.work / f"{job.name}-node{node}.log"
                running.children.append(self.nodes.start(node, program, arguments, variables, log))
            yield running
        finally:
            self.nodes.stop(running.children)


def _alone(job: TrainingJob, node: int, address: str, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a single program on each node."""
    ranks = {"RANK": node, "GROUP_RANK": node, "WORLD_SIZE": job.nodes, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return {**{name: str(rank) for name, rank in ranks.items()}, "MASTER_ADDR": address, "MASTER_PORT": str(port)}


def _command(job: TrainingJob, node: int, endpoint: str, run_id: str, nodes: Nodes) -> list[str]:
    """Return the command of a torchrun agent, or of the bare trainer if `job.nodes` is 0."""
    if job.bare:
        return list(job.program)
    if job.program:
        agent = _agent(job, node, endpoint, run_id, nodes.address(node))
        # torchrun puts the role before the rank.
        named = [f"--role={node}.", "--tee=3"] if job.named else []
        return ["torchrun", *agent, *named, "--no-python", *map(torchrun_word, job.program)]
    trainer = [str(nodes.work / TRAINER), *job.arguments, "--report", str(nodes.work / f"{job.name}-report{node}.json")]
    if not job.nodes:
        return ["python", *trainer]
    program = ["python", "-c", _LEAN + (_LEAVE if node else "")] if job.lean or node else ["torchrun"]
    return [*program, *_agent(job, node, endpoint, run_id, nodes.address(node)), *map(torchrun_word, trainer)]


def _agent(job: TrainingJob, node: int, endpoint: str, run_id: str, address: str) -> list[str]:
    limit = int(job.timeout_s)
    return [
        f"--nnodes={job.nodes}",
        f"--nproc-per-node={job.nproc_per_node}",
        f"--max-restarts={job.max_restarts}",
        f"--rdzv-id={run_id}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-conf=is_host={int(node == 0)},join_timeout={limit},read_timeout={limit}",
        f"--local-addr={address}",
        "--monitor-interval=0.1",
    ]


def run_program(
    nodes: Nodes, program: str, arguments: Sequence[str], extra: Mapping[str, str], log: Path, timeout_s: float
) -> tuple[int | None, bool]:
    """Run a program on node 0 for at most `timeout_s` seconds. Return its exit code, and whether it ended by itself."""
    agent = nodes.start(0, program, arguments, extra, log)
    deadline = time.monotonic() + timeout_s
    try:
        while agent.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        ended = agent.poll() is not None
    finally:
        nodes.stop([agent])
    return agent.returncode, ended


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def trainer_files() -> dict[str, bytes]:
    """Return envbuild's trainer and the script that starts it, by their paths in a node's work folder."""
    folder = PurePath(TRAINER).parent
    return {TRAINER: _START, **{str(folder / name): content for name, content in load_trainer().files}}
