"""Checks of the schedulers and container runtimes of jobs on this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from envbuild.doctor.probe import Host, HostFinding, find, first_line, run_probe
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.schedulers.base import Queue
from envbuild.site.schedulers import TITLES

_DOCKER_S = 3.0


def slurm(host: Host) -> Iterator[HostFinding]:
    """Check Slurm: version, response of the controller, partitions, and the current allocation."""
    tool = find("scontrol", host.variables)
    if tool is None:
        return
    code, version = run_probe([tool, "--version"], host.variables)
    version = first_line(version) if code == 0 else "Slurm's tools"
    code, said = run_probe([tool, "ping"], host.variables)
    if code != 0 or " is DOWN" in said:
        what = f"{version}, but its controller does not answer: {first_line(said)}"
        hint = "on a cluster: ask its administrator; else only its tools are installed"
        yield HostFinding("Slurm", "info", what, hint, {"path": tool, "answers": False})
        return
    found = queues("slurm", host.variables) or []
    facts = {"path": tool, "answers": True, "partitions": [one.name for one in found]}
    names = ", ".join(f"{p.name}{'*' if p.default else ''} ({p.nodes} nodes)" for p in found)
    yield HostFinding("Slurm", "ok", f"{version}; partitions {names or 'none'}", facts=facts)
    pyxis = has_pyxis(host.variables)
    if pyxis:
        yield HostFinding("pyxis", "ok", "srun has --container-image", facts={"there": True})
    elif pyxis is False:
        hint = 'site.toml: [container] runtime = "enroot", "apptainer" or "none"'
        yield HostFinding("pyxis", "info", "srun has no --container-image", hint, {"there": False})
    yield from _allocation("slurm", host)


def queues(name: str, variables: Mapping[str, str]) -> list[Queue] | None:
    """Return the queues (Slurm: partitions) that the scheduler `name` lists, or None if it does not answer."""
    facts = SCHEDULERS[name].host
    tool = find(facts.list_queues[0], variables) if facts else None
    if facts is None or tool is None:
        return None
    code, said = run_probe([tool, *facts.list_queues[1:]], variables)
    return facts.queues(said) if code == 0 else None


def has_pyxis(variables: Mapping[str, str]) -> bool | None:
    """Return whether Slurm has pyxis, or None without srun: srun's help lists the options of its plugins."""
    tool = find("srun", variables)
    return None if tool is None else "--container-image" in run_probe([tool, "--help"], variables)[1]


def scheduler(name: str, host: Host) -> Iterator[HostFinding]:
    """Check the scheduler `name`: version, queues, and the current allocation."""
    facts = SCHEDULERS[name].host
    tool = find(SCHEDULERS[name].submission.command[0], host.variables)
    if facts is None or tool is None:
        return
    code, said = run_probe([tool, *facts.version], host.variables)
    version = first_line(said, 60) if code == 0 else tool
    found = queues(name, host.variables)
    if found is None:
        what = f"{version}; {facts.list_queues[0]} lists no queues"
        yield HostFinding(TITLES[name], "info", what, facts={"path": tool, "queues": None})
    else:
        names = [one.name for one in found]
        what = f"{version}; queues {', '.join(names) or 'none'}"
        yield HostFinding(TITLES[name], "ok", what, facts={"path": tool, "queues": names})
    yield from _allocation(name, host)


def _allocation(name: str, host: Host) -> Iterator[HostFinding]:
    facts = SCHEDULERS[name].host
    if facts and (job := host.variables.get(facts.job)):
        where = f" on {host.variables.get(facts.nodes, '?')}" if facts.nodes else ""
        yield HostFinding("allocation", "info", f"job {job} of {TITLES[name]}{where}", facts={"job": job})


def kubernetes(host: Host) -> list[HostFinding]:
    """Check whether a Kubernetes cluster answers, and whether it supports training jobs."""
    tool = find("kubectl", host.variables)
    if tool is None:
        return []
    if host.offline:
        return [HostFinding("Kubernetes", "info", f"{tool}; not asked (--offline)", facts={"path": tool})]
    command = [tool, "--request-timeout=2s", "api-resources", "--no-headers", "--output=name"]
    code, said = run_probe(command, host.variables)
    if code != 0:
        # kubectl prints its log first, its message to the user last.
        why = first_line(said.splitlines()[-1]) if said else "nothing is said"
        what = f"kubectl is here, and no cluster answers: {why}"
        return [HostFinding("Kubernetes", "info", what, "set KUBECONFIG where there is a cluster", {"path": tool})]
    kinds = [k for k in ("pytorchjobs.kubeflow.org", "trainjobs.trainer.kubeflow.org") if k in said.split()]
    facts = {"path": tool, "kinds": kinds, "answers": True}
    if kinds:
        return [HostFinding("Kubernetes", "ok", f"answers; training jobs: {', '.join(kinds)}", facts=facts)]
    hint = "install Kubeflow's training operator or Trainer"
    return [HostFinding("Kubernetes", "warn", "answers; training jobs: none", hint, facts)]


def docker_daemon(host: Host) -> list[HostFinding]:
    """Check the docker daemon through its API."""
    from envbuild.errors import HostError
    from envbuild.image.daemon import connect

    try:
        with connect(host.variables) as client:
            client.api.timeout = _DOCKER_S
            info, version = client.info(), client.version()
    except HostError as error:
        what = error.message.splitlines()[0][:200]
        return [HostFinding("docker daemon", "info", what, error.hint or "", {"answers": False})]
    driver, runtimes = info.get("Driver", "?"), sorted(info.get("Runtimes") or {})
    facts = {"answers": True, "version": version.get("Version"), "driver": driver}
    facts |= {"runtimes": runtimes, "arch": version.get("Arch")}
    what = f"{facts['version']}, storage driver {driver}"
    what += ", with NVIDIA's runtime" if "nvidia" in runtimes else ""
    if driver != "vfs":
        return [HostFinding("docker daemon", "ok", what, facts=facts)]
    hint = "vfs copies every layer: let the daemon use overlay2 or containerd's store"
    return [HostFinding("docker daemon", "warn", what, hint, facts)]
