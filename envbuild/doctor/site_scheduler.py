"""Checks of a site's [scheduler] and [node] values against the scheduler on this host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from envbuild.doctor import batch
from envbuild.doctor.probe import HostFinding, find, run_probe
from envbuild.doctor.site_rules import duration
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.schedulers.base import Queue
from envbuild.site.schedulers import SCHEDULER_NAMES, TITLES, listed
from envbuild.site.settings import Site
from envbuild.toml import closest

_SLURM_UNITS = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024, "": 1}


def on_site(site: Site, variables: Mapping[str, str]) -> bool:
    """Return whether this host has the site's scheduler and therefore belongs to the site."""
    kind = site.scheduler.kind
    if kind not in SCHEDULERS:
        return True
    return batch.queues(kind, variables) is not None


def judge_scheduler(site: Site, variables: Mapping[str, str]) -> Iterator[HostFinding]:
    """Compare the site's settings with the scheduler on this host."""
    kind = site.scheduler.kind
    if kind not in SCHEDULERS:
        yield HostFinding(
            "[scheduler] kind", "info", "none: `envbuild job` needs --scheduler", f"name {listed(SCHEDULER_NAMES)}"
        )
    elif facts := SCHEDULERS[kind].host:
        found = batch.queues(kind, variables)
        if found is None:
            yield elsewhere("[scheduler] kind", f"no {TITLES[kind]} answers on this host")
        else:
            yield from _queue(site, facts.queue, found)
    else:
        yield from _kubernetes(site, variables)


def _queue(site: Site, word: str, found: list[Queue]) -> Iterator[HostFinding]:
    wanted, title = site.scheduler.partition, TITLES[site.scheduler.kind]
    names = [one.name for one in found]
    chosen = next((one for one in found if (one.name == wanted if wanted else one.default)), None)
    if chosen is None and wanted:
        yield _unknown(word, wanted, names)
        return
    if chosen is None and any(one.default is not None for one in found):
        yield HostFinding(
            "[scheduler] partition", "fail", f"is not said, and {title} has no default", f"one of {', '.join(names)}"
        )
        return
    if chosen is None or chosen.default is None:
        what = f"{title} answers; queues {', '.join(names) or 'none'}"
        yield HostFinding("[scheduler] kind", "ok", what)
    else:
        what = f"{chosen.name}, {chosen.nodes} nodes"
        yield HostFinding("[scheduler] partition", "ok", what)
    if chosen is not None:
        yield from _limits(site, chosen)


def _limits(site: Site, queue: Queue) -> Iterator[HostFinding]:
    most, asked = duration(queue.time), duration(site.scheduler.time)
    if most is not None and asked is not None and asked > most:
        yield HostFinding(
            "[scheduler] time",
            "fail",
            f"{site.scheduler.time} is more than {queue.name} allows, {queue.time}",
            f'time = "{queue.time}" or less',
        )
    memory = site.node.memory
    unit = memory[-1:] if memory[-1:].isalpha() else ""
    megabytes = float(memory.rstrip("KMGT") or 0) * _SLURM_UNITS[unit]
    for key, value, has in (
        ("gpus", site.node.gpus, queue.gpus),
        ("cpus", site.node.cpus, queue.cpus),
        ("memory", megabytes, queue.memory),
    ):
        if has is not None and value > has:
            said = memory if key == "memory" else value
            unit = " MB" if key == "memory" else ""
            yield HostFinding(
                f"[node] {key}",
                "fail",
                f"{said} asked for; a node of {queue.name} has {has}{unit}",
                "jobs would wait for ever, or be refused",
            )


def _kubernetes(site: Site, variables: Mapping[str, str]) -> Iterator[HostFinding]:
    tool = find("kubectl", variables)
    if tool is None:
        yield elsewhere("[scheduler] kind", "kubectl is not on this host")
        return
    base = [tool, "--request-timeout=2s", f"--namespace={site.kubernetes.namespace}", "get", "--output=name"]
    code, said = run_probe([*base, f"namespace/{site.kubernetes.namespace}"], variables)
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
        code, said = run_probe([*base, f"persistentvolumeclaim/{claim}"], variables)
        lost = code != 0 and "NotFound" in said
        what = f"there is no claim {claim} in {site.kubernetes.namespace}" if lost else claim
        yield HostFinding("[kubernetes] claim", "fail" if lost else "ok", what, "kubectl get pvc" if lost else "")


def missing(name: str, what: str, here: bool, hint: str) -> HostFinding:
    """Return the finding for a requirement on nodes that this host does not meet.

    It is a failure if this host belongs to the site (`here`).
    """
    if here:
        return HostFinding(name, "fail", what, hint)
    return HostFinding(name, "info", f"{what} here; not one of the site's hosts, so nodes may differ", hint)


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
