"""Schedulers and container runtimes of jobs: Slurm, PBS, Kubernetes, docker, pyxis."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from envbuild.doctor.ask import ask, find, first_line
from envbuild.doctor.model import Host, HostFinding

_DOCKER_S = 3.0


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition of Slurm, as `sinfo` has it. `time` is its limit as Slurm writes it, `gpus` of one node,
    `memory` of one node in MB."""

    name: str
    default: bool
    time: str
    cpus: int
    memory: int
    gpus: int
    nodes: int


def slurm(host: Host) -> Iterator[HostFinding]:
    """Slurm: its version, whether the controller answers, its partitions, whether we are in an allocation."""
    tool = find("scontrol", host.variables)
    if tool is None:
        return
    asked, version = ask([tool, "--version"], host.variables)
    version = first_line(version) if asked == 0 else "Slurm's tools"
    code, said = ask([tool, "ping"], host.variables)
    facts: dict[str, object] = {"path": tool, "answers": code == 0}
    if code != 0 or " is DOWN" in said:
        facts["answers"] = False
        what = f"{version}, but its controller does not answer: {first_line(said)}"
        yield HostFinding(
            "Slurm",
            "info",
            what,
            "on a cluster: ask its administrator; else only its tools are installed",
            facts,
        )
        return
    found = partitions(host.variables) or []
    facts["partitions"] = [one.name for one in found]
    names = ", ".join(f"{p.name}{'*' if p.default else ''} ({p.nodes} nodes)" for p in found)
    yield HostFinding("Slurm", "ok", f"{version}; partitions {names or 'none'}", facts=facts)
    yield from _pyxis(host)
    if job := host.variables.get("SLURM_JOB_ID"):
        nodes = host.variables.get("SLURM_JOB_NODELIST", "?")
        yield HostFinding(
            "allocation", "info", f"job {job} of Slurm on {nodes}", facts={"job": job}
        )


def partitions(variables: Mapping[str, str]) -> list[Partition] | None:
    """The partitions that sinfo lists; None where there is no Slurm that answers."""
    tool = find("sinfo", variables)
    if tool is None:
        return None
    code, said = ask([tool, "--noheader", "--format=%P|%l|%c|%m|%G|%D"], variables)
    if code != 0:
        return None
    found: dict[str, Partition] = {}
    for line in said.splitlines():
        row = line.strip().split("|")
        if len(row) != 6:
            continue
        gpus = sum(int(n) for n in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", row[4]))
        name = row[0].rstrip("*")
        one = Partition(
            name,
            row[0].endswith("*"),
            row[1],
            _number(row[2]),
            _number(row[3]),
            gpus,
            _number(row[5]),
        )
        # Nodes of different kinds are listed apart: the best of each counts.
        old = found.get(name)
        found[name] = one if old is None else Partition(
            name, one.default, one.time, max(old.cpus, one.cpus), max(old.memory, one.memory),
            max(old.gpus, one.gpus), old.nodes + one.nodes,
        )  # fmt: skip
    return list(found.values())


def _number(text: str) -> int:
    match = re.match(r"\d+", text)
    return int(match[0]) if match else 0


def has_pyxis(variables: Mapping[str, str]) -> bool | None:
    """Whether Slurm here has pyxis, by srun's own help, which lists the options of its plugins; None without srun."""
    tool = find("srun", variables)
    if tool is None:
        return None
    _, said = ask([tool, "--help"], variables)
    return "--container-image" in said


def _pyxis(host: Host) -> Iterator[HostFinding]:
    found = has_pyxis(host.variables)
    if found is not None:
        what = "srun has --container-image" if found else "srun has no --container-image"
        remedy = "" if found else 'site.toml: [container] runtime = "enroot", "apptainer" or "none"'
        yield HostFinding("pyxis", "ok" if found else "info", what, remedy, {"there": found})


def pbs(host: Host) -> Iterator[HostFinding]:
    """PBS: its version, its queues."""
    tool = find("qsub", host.variables)
    if tool is None:
        return
    code, said = ask([tool, "--version"], host.variables)
    queues_ = queues(host.variables)
    facts = {"path": tool, "queues": queues_}
    version = first_line(said, 60) if code == 0 else tool
    if queues_ is None:
        yield HostFinding("PBS", "info", f"{version}; qstat lists no queues", facts=facts)
    else:
        yield HostFinding(
            "PBS", "ok", f"{version}; queues {', '.join(queues_) or 'none'}", facts=facts
        )
    if job := host.variables.get("PBS_JOBID"):
        yield HostFinding("allocation", "info", f"job {job} of PBS", facts={"job": job})


def queues(variables: Mapping[str, str]) -> list[str] | None:
    """The queues that qstat lists; None where there is no PBS that answers."""
    tool = find("qstat", variables)
    if tool is None:
        return None
    code, said = ask([tool, "-Q"], variables)
    if code != 0:
        return None
    lines = said.splitlines()
    rule = next((n for n, line in enumerate(lines) if line.startswith("---")), None)
    return [] if rule is None else [line.split()[0] for line in lines[rule + 1 :] if line.split()]


def kubernetes(host: Host) -> Iterator[HostFinding]:
    """Kubernetes: whether a cluster answers, and whether it knows training jobs."""
    tool = find("kubectl", host.variables)
    if tool is None:
        return
    if host.offline:
        yield HostFinding(
            "Kubernetes", "info", f"{tool}; not asked (--offline)", facts={"path": tool}
        )
        return
    command = [tool, "--request-timeout=2s", "api-resources", "--no-headers", "--output=name"]
    code, said = ask(command, host.variables)
    if code != 0:
        # Its own log comes first, what it says to people last.
        why = first_line(said.splitlines()[-1]) if said else "nothing is said"
        what = f"kubectl is here, and no cluster answers: {why}"
        yield HostFinding(
            "Kubernetes", "info", what, "set KUBECONFIG where there is a cluster", {"path": tool}
        )
        return
    kinds = [
        k
        for k in ("pytorchjobs.kubeflow.org", "trainjobs.trainer.kubeflow.org")
        if k in said.split()
    ]
    remedy = "" if kinds else "install Kubeflow's training operator or Trainer"
    yield HostFinding(
        "Kubernetes", "ok" if kinds else "warn", f"answers; training jobs: {', '.join(kinds) or 'none'}", remedy,
        {"path": tool, "kinds": kinds, "answers": True},
    )  # fmt: skip


def docker_daemon(host: Host) -> Iterator[HostFinding]:
    """The docker daemon, asked by its API."""
    from envbuild.errors import HostError
    from envbuild.image.daemon import connect

    try:
        with connect(host.variables) as client:
            client.api.timeout = _DOCKER_S
            info, version = client.info(), client.version()
    except HostError as error:
        what = error.message.splitlines()[0][:200]
        yield HostFinding("docker daemon", "info", what, error.hint or "", {"answers": False})
        return
    driver = info.get("Driver", "?")
    runtimes = sorted(info.get("Runtimes") or {})
    facts = {
        "answers": True,
        "version": version.get("Version"),
        "driver": driver,
        "runtimes": runtimes,
        "arch": version.get("Arch"),
    }
    what = f"{facts['version']}, storage driver {driver}"
    what += ", with NVIDIA's runtime" if "nvidia" in runtimes else ""
    if driver == "vfs":
        remedy = "vfs copies every layer: let the daemon use overlay2 or containerd's store"
        yield HostFinding("docker daemon", "warn", what, remedy, facts)
    else:
        yield HostFinding("docker daemon", "ok", what, "", facts)
