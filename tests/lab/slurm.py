"""A real Slurm cluster on this machine: each node has its own network, name, processes, /tmp, /dev/shm and /etc/hosts.

Every host is a set of namespaces (tests/lab/slurm_node.sh). The nodes' processes are within the control host's
process namespace, and that host ends when this process closes a pipe, or dies: nothing is left behind. The network
is the cluster's own and leads nowhere else.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from lab import pbs as lab_pbs
from lab.slurm_files import CONTROL, default_hosts, write_files
from lab.slurm_space import ISOLATED, PATH, Space, begin, plain_environment, tail

T = TypeVar("T")
_TOOLS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "sshd": "openssh-server",
    "ssh": "openssh-client",
    "mpirun": "openmpi-bin",
    "ip": "iproute2",
    "iptables": "iptables",
    "nsenter": "util-linux",
}
_ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE"}
_FIRST_NODE = 11
READY_SECONDS = 30
STOP_SECONDS = 20


@dataclass(frozen=True)
class JobEnd:
    """How a job ended. `exit_code` is 128 and the signal when one ended it; `restarts` counts requeues."""

    state: str
    exit_code: int
    restarts: int


@dataclass
class Cluster:
    """A running cluster. Hosts are "ctl", where users log in and submit, and `nodes`."""

    folder: Path
    nodes: tuple[str, ...]
    second_network: bool
    spaces: dict[str, Space] = field(repr=False)

    @property
    def shared(self) -> Path:
        """An empty folder that has this path on all hosts, as everything outside /tmp has. In /tmp they share what lies
        beside `folder`, the repository, the interpreter, and what `share` named."""
        return self.folder / "shared"

    @property
    def modules(self) -> Path:
        """Where Lmod of every host looks for modules (lab.lmod.module_tree)."""
        return self.folder / "modules"

    def address(self, host: str, network: int = 0) -> str:
        """`host`'s address on eth0, or with `network=1` that on eth1."""
        last = 1 if host == "ctl" else _FIRST_NODE + self.nodes.index(host)
        return f"10.89.{7 + network}.{last}"

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        on: str = "ctl",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdout: int | None = subprocess.PIPE,
        stderr: int | None = subprocess.PIPE,
    ) -> subprocess.Popen[str]:
        """Start `command` on a host; os.killpg(process.pid, …) ends it."""
        return self.spaces[on].popen(command, cwd=cwd or self.shared, env=env, stdout=stdout, stderr=stderr)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        on: str = "ctl",
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        check: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Run `command` on a host, in `shared` by default. Its environment is a login's and `env`, no more."""
        return self.spaces[on].run(command, cwd=cwd or self.shared, env=env, timeout_s=timeout_s, check=check)

    def sbatch(self, script: Path, *options: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
        """Submit a script on ctl; the job's number. Raises RuntimeError with sbatch's own words."""
        done = self.run(["sbatch", "--parsable", *options, script], cwd=cwd, env=env, check=True)
        return int(done.stdout.split(";")[0])

    def qsub(self, script: Path, *options: str, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> int:
        """Submit a script by qsub in a cluster with `pbs=True`; the job's number. Raises as `sbatch` does.

        The job sees PBS's variables and none of Slurm's; PBS_JOBID is `<number>.ctl`.
        """
        line: list[str | Path] = ["qsub", *lab_pbs.log_options(script), *options, script]
        done = self.run(line, cwd=cwd, env={**(env or {}), lab_pbs.MARK: "1"}, check=True)
        found = re.search(r"\d+", done.stdout.strip().splitlines()[-1]) if done.stdout else None
        if found is None:
            raise RuntimeError(f"qsub printed no number:\n{done.stdout}{done.stderr}")
        return int(found[0])

    def job(self, job: int) -> dict[str, str]:
        """What `scontrol show job` says, key by key."""
        done = self.run(["scontrol", "-o", "show", "job", str(job)], check=True)
        return dict(re.findall(r"(\S+?)=(\S*)", done.stdout))

    def wait(self, job: int, timeout_s: float = 60) -> JobEnd:
        """Wait until a job has ended. Raises TimeoutError with what Slurm says, after it was cancelled."""
        deadline = time.monotonic() + timeout_s
        while True:
            seen = self.job(job)
            if seen["JobState"] in _ENDED:
                code, signal = map(int, seen["ExitCode"].split(":"))
                code = code or (128 + signal if signal else 0)
                return JobEnd(seen["JobState"], code, int(seen["Restarts"]))
            if time.monotonic() > deadline:
                self.run(["scancel", str(job)])
                raise TimeoutError(f"job {job} did not end in {timeout_s} s: {seen}\n{self._log()}")
            time.sleep(0.2)

    def until(self, predicate: Callable[[], T], timeout_s: float = 30) -> T:
        """Call `predicate` until it returns something true; that. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while not (value := predicate()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not in {timeout_s} s: {self.states()}\n{self._log()}")
            time.sleep(0.1)
        return value

    def resume_now(self, job: int) -> None:
        """Let a job that was requeued, or soon is, start without the two minutes that Slurm holds it."""
        self.until(lambda: self.job(job)["JobState"] == "PENDING", 60)
        # Within the second in which the first run's credential was revoked, a new one is taken for it.
        time.sleep(2)
        self.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], check=True)

    def hosts(self, host: str) -> str:
        """The host's /etc/hosts."""
        return (self.folder / "hosts" / host).read_text()

    def set_hosts(self, host: str, text: str | None = None) -> None:
        """Change the host's /etc/hosts; None: back to the right names."""
        # In place: a new file would not be the one that is mounted.
        (self.folder / "hosts" / host).write_text(default_hosts(_addresses(self.nodes)) if text is None else text)

    def block(self, host: str, *, port: int | None = None, source: str | None = None, reject: bool = False) -> None:
        """A firewall on `host`: what comes for TCP `port`, or from host `source`, or both, is dropped, or rejected."""
        rule = ["iptables", "-w", "-A", "INPUT", "-p", "tcp", "!", "-i", "lo"]
        if port is not None:
            rule += ["--dport", str(port)]
        if source is not None:
            rule += ["-s", self.address(source)]
        self.run([*rule, "-j", "REJECT" if reject else "DROP"], on=host, check=True)

    def unblock(self, host: str) -> None:
        self.run(["iptables", "-w", "-F", "INPUT"], on=host, check=True)

    def kill_node(self, node: str, *, noticed: bool = True) -> None:
        """Let a node lose its power: no process ends in order, no peer hears of it.

        Slurm notices by itself after half a minute; with `noticed` it is told at once, which requeues jobs. A step that
        is just being launched may outlive that on the other nodes by minutes: let it print something before.
        """
        for network in range(1 + self.second_network):
            port = f"v{network}-{_FIRST_NODE + self.nodes.index(node)}"
            self.run(["ip", "link", "set", port, "down"], check=True)
        self.spaces.pop(node).kill()
        if noticed:
            down = ["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed"]
            self.run(down, check=True)

    def start_node(self, node: str) -> None:
        """Boot a node that was killed, and wait until Slurm takes it."""
        self.boot(node)
        self.until(lambda: self.states()[node] in ("IDLE", "MIXED", "ALLOCATED"))

    def boot(self, node: str) -> None:
        """Start a node's namespaces and daemons, without waiting for Slurm."""
        log = self.folder / "log" / node
        last = _FIRST_NODE + self.nodes.index(node)
        with log.open("ab") as output:
            process = self.spaces["ctl"].popen(
                ["bash", "/run/lab/node.sh", "start", node, str(last), str(1 + self.second_network)],
                stdout=output.fileno(),
                stderr=output.fileno(),
            )
        self.spaces[node] = begin(process, log)

    def states(self) -> dict[str, str]:
        """Each node's state in Slurm, such as IDLE or DOWN; a `*` says that it does not answer."""
        done = self.run(["sinfo", "--noheader", "-N", "-o", "%N %T"])
        return {name: state.upper() for name, state in map(str.split, done.stdout.splitlines())}

    def _log(self) -> str:
        return tail(self.folder / "log/slurmctld")

    def _wait_until_idle(self) -> None:
        self.until(lambda: list(self.states().values()) == ["IDLE"] * len(self.nodes), READY_SECONDS)


def missing(*, pbs: bool = False) -> str | None:
    """Why a cluster cannot run here; None when it can."""
    if os.geteuid() != 0:
        return "the lab's cluster needs root"
    absent = [tool for tool in _TOOLS if shutil.which(tool) is None]
    if absent:
        packages = ", ".join(sorted({_TOOLS[tool] for tool in absent}))
        return f"not installed: {', '.join(absent)} (Debian: {packages})"
    return lab_pbs.missing() if pbs else None


@contextmanager
def slurm_cluster(
    folder: Path,
    nodes: Sequence[str] = ("n1", "n2"),
    *,
    pbs: bool = False,
    cpus: int = 4,
    second_network: bool = False,
    share: Sequence[Path] = (),
    plugins: str = "",
    users: Sequence[str] = (),
) -> Iterator[Cluster]:
    """Start a cluster with its files in `folder` (made when missing) and wait until its nodes are idle.

    `pbs`: with Slurm's PBS layer. `second_network`: the nodes have eth1, in another subnet. `share`: folders in /tmp
    that the nodes see besides `folder`. `plugins`: lines of plugstack.conf, for SPANK. `users`: accounts beside root,
    who may start rootless containers. Raises RuntimeError or TimeoutError with the end of a log.
    """
    folder = folder.resolve()
    addresses = _addresses(nodes)
    write_files(folder, addresses, cpus=cpus, pbs=pbs, path=PATH, share=share, plugins=plugins, users=users)
    log = folder / "log/ctl"
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*ISOLATED, "bash", folder / "node.sh", "control", folder],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=plain_environment(),
            # A Ctrl-C is for the tests; they stop the cluster.
            start_new_session=True,
        )
    assert process.stdin is not None
    spaces: dict[str, Space] = {}
    try:
        spaces["ctl"] = begin(process, log)
        cluster = Cluster(folder, tuple(nodes), second_network, spaces)
        cluster.until(lambda: cluster.run(["scontrol", "ping"]).returncode == 0, READY_SECONDS)
        for node in nodes:
            cluster.boot(node)
        cluster._wait_until_idle()
        yield cluster
    finally:
        process.stdin.close()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for space in spaces.values():
            space.process.wait()


def _addresses(nodes: Sequence[str]) -> dict[str, str]:
    return {node: f"{CONTROL.rpartition('.')[0]}.{_FIRST_NODE + i}" for i, node in enumerate(nodes)}
