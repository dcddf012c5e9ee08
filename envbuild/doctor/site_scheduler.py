"""Whether a site's scheduler, and what is asked of it, is what this host sees."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from envbuild.doctor import batch
from envbuild.doctor.ask import ask, find
from envbuild.doctor.model import HostFinding
from envbuild.doctor.site_rules import duration
from envbuild.site.job_site import JobSite
from envbuild.toml import closest

_SLURM_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024, "": 1}


def on_site(site: JobSite, variables: Mapping[str, str]) -> bool:
    """Whether this host has the site's scheduler: it is one of its login nodes then, or one that runs jobs."""
    kind = site.scheduler.kind
    if kind == "slurm":
        return batch.partitions(variables) is not None
    if kind == "pbs":
        return batch.queues(variables) is not None
    return kind == "none"


def judge_scheduler(site: JobSite, variables: Mapping[str, str]) -> Iterator[HostFinding]:
    kind = site.scheduler.kind
    if kind == "slurm":
        yield from _slurm(site, variables)
    elif kind == "pbs":
        known = batch.queues(variables)
        if known is None:
            yield elsewhere("[scheduler] kind", "no PBS answers on this host")
        elif site.scheduler.partition and site.scheduler.partition not in known:
            yield _unknown("queue", site.scheduler.partition, known)
        else:
            yield HostFinding(
                "[scheduler] kind", "ok", f"PBS answers; queues {', '.join(known) or 'none'}"
            )
    elif kind == "kubernetes":
        yield from _kubernetes(site, variables)
    else:
        yield HostFinding(
            "[scheduler] kind",
            "info",
            "none: `envbuild job` needs --scheduler",
            "name slurm, pbs or kubernetes",
        )


def _slurm(site: JobSite, variables: Mapping[str, str]) -> Iterator[HostFinding]:
    found = batch.partitions(variables)
    if found is None:
        yield elsewhere("[scheduler] kind", "no Slurm answers on this host")
        return
    wanted = site.scheduler.partition
    chosen = [p for p in found if (p.name == wanted if wanted else p.default)]
    if not chosen:
        if wanted:
            yield _unknown("partition", wanted, [p.name for p in found])
        else:
            names = ", ".join(p.name for p in found)
            yield HostFinding(
                "[scheduler] partition",
                "fail",
                "is not said, and Slurm has no default",
                f"one of {names}",
            )
        return
    (partition,) = chosen
    yield HostFinding("[scheduler] partition", "ok", f"{partition.name}, {partition.nodes} nodes")
    most, asked = duration(partition.time), duration(site.scheduler.time)
    if most is not None and asked is not None and asked > most:
        yield HostFinding(
            "[scheduler] time",
            "fail",
            f"{site.scheduler.time} is more than {partition.name} allows, {partition.time}",
            f'time = "{partition.time}" or less',
        )
    memory = site.node.memory
    unit = memory[-1:] if memory[-1:].isalpha() else ""
    megabytes = float(memory.rstrip("KMGT") or 0) * _SLURM_UNITS[unit]
    for key, value, has in (
        ("gpus", site.node.gpus, partition.gpus),
        ("cpus", site.node.cpus, partition.cpus),
        ("memory", megabytes, partition.memory),
    ):
        if value > has:
            said = memory if key == "memory" else value
            unit = " MB" if key == "memory" else ""
            yield HostFinding(
                f"[node] {key}",
                "fail",
                f"{said} asked for; a node of {partition.name} has {has}{unit}",
                "jobs would wait for ever, or be refused",
            )


def _kubernetes(site: JobSite, variables: Mapping[str, str]) -> Iterator[HostFinding]:
    tool = find("kubectl", variables)
    if tool is None:
        yield elsewhere("[scheduler] kind", "kubectl is not on this host")
        return
    base = [
        tool,
        "--request-timeout=2s",
        f"--namespace={site.kubernetes.namespace}",
        "get",
        "--output=name",
    ]
    code, said = ask([*base, f"namespace/{site.kubernetes.namespace}"], variables)
    if code != 0 and "NotFound" not in said:
        yield elsewhere("[scheduler] kind", "no cluster answers to kubectl")
    elif code != 0:
        yield HostFinding(
            "[kubernetes] namespace",
            "fail",
            f"there is no namespace {site.kubernetes.namespace}",
            "kubectl get namespaces",
        )
    elif claim := site.kubernetes.claim:
        code, said = ask([*base, f"persistentvolumeclaim/{claim}"], variables)
        lost = code != 0 and "NotFound" in said
        what = f"there is no claim {claim} in {site.kubernetes.namespace}" if lost else claim
        yield HostFinding(
            "[kubernetes] claim", "fail" if lost else "ok", what, "kubectl get pvc" if lost else ""
        )


def missing(name: str, what: str, here: bool, remedy: str) -> HostFinding:
    """What must be on nodes and is not on this host: wrong where this is one of the site's hosts."""
    if here:
        return HostFinding(name, "fail", what, remedy)
    return HostFinding(
        name, "info", f"{what} here; not one of the site's hosts, so nodes may differ", remedy
    )


def elsewhere(name: str, why: str) -> HostFinding:
    return HostFinding(name, "info", f"cannot be judged here: {why}", "run this on a login node")


def _unknown(what: str, name: str, known: list[str]) -> HostFinding:
    near = closest(name, known)
    meant = f"; did you mean {near!r}?" if near else ""
    return HostFinding(
        "[scheduler] partition",
        "fail",
        f"there is no {what} {name!r}{meant}",
        f"there are {', '.join(known) or 'none'}",
    )
