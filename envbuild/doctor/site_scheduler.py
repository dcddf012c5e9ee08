"""Checks of a site's [scheduler] and [node] values against the scheduler on this host."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from envbuild.doctor import batch
from envbuild.doctor.probe import HostFinding, find, run_probe
from envbuild.doctor.site_rules import duration
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.schedulers.base import Queue
from envbuild.site.schedulers import SCHEDULER_NAMES, TITLES, listed
from envbuild.site.settings import Site
from envbuild.toml import closest

_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024, "": 1}


def on_site(site: Site, variables: Mapping[str, str]) -> bool:
    """Return whether this host has the site's scheduler and therefore belongs to the site."""
    kind = site.scheduler.kind
    return kind not in SCHEDULERS or batch.queues(kind, variables) is not None


def judge_scheduler(site: Site, variables: Mapping[str, str]) -> Iterable[HostFinding]:
    """Compare the site's settings with the scheduler on this host."""
    kind = site.scheduler.kind
    if kind not in SCHEDULERS:
        hint = f"name {listed(SCHEDULER_NAMES)}"
        return [HostFinding("[scheduler] kind", "info", "none: `envbuild job` needs --scheduler", hint)]
    facts = SCHEDULERS[kind].host
    if facts is None:
        return _kubernetes(site, variables)
    found = batch.queues(kind, variables)
    if found is None:
        return [elsewhere("[scheduler] kind", f"no {TITLES[kind]} answers on this host")]
    return _queue(site, facts.queue, found)


def _queue(site: Site, word: str, found: list[Queue]) -> Iterator[HostFinding]:
    wanted, title = site.scheduler.partition, TITLES[site.scheduler.kind]
    names = ", ".join(one.name for one in found)
    chosen = next((one for one in found if (one.name == wanted if wanted else one.default)), None)
    if chosen is None and wanted:
        near = closest(wanted, [one.name for one in found])
        what = f"there is no {word} {wanted!r}" + (f"; did you mean {near!r}?" if near else "")
        yield HostFinding("[scheduler] partition", "fail", what, f"there are {names or 'none'}")
    elif chosen is None and any(one.default is not None for one in found):
        what = f"is not said, and {title} has no default"
        yield HostFinding("[scheduler] partition", "fail", what, f"one of {names}")
    elif chosen is None or chosen.default is None:
        yield HostFinding("[scheduler] kind", "ok", f"{title} answers; queues {names or 'none'}")
    else:
        yield HostFinding("[scheduler] partition", "ok", f"{chosen.name}, {chosen.nodes} nodes")
    if chosen is not None:
        yield from _limits(site, chosen)


def _limits(site: Site, queue: Queue) -> Iterator[HostFinding]:
    most, asked = duration(queue.time), duration(site.scheduler.time)
    if most is not None and asked is not None and asked > most:
        what = f"{site.scheduler.time} is more than {queue.name} allows, {queue.time}"
        yield HostFinding("[scheduler] time", "fail", what, f'time = "{queue.time}" or less')
    memory = site.node.memory
    megabytes = float(memory.rstrip("KMGT") or 0) * _MEGABYTES[memory[-1:] if memory[-1:].isalpha() else ""]
    for key, said, value, has, unit in (
        ("gpus", site.node.gpus, site.node.gpus, queue.gpus, ""),
        ("cpus", site.node.cpus, site.node.cpus, queue.cpus, ""),
        ("memory", memory, megabytes, queue.memory, " MB"),
    ):
        if has is not None and value > has:
            what = f"{said} asked for; a node of {queue.name} has {has}{unit}"
            yield HostFinding(f"[node] {key}", "fail", what, "jobs would wait for ever, or be refused")


def _kubernetes(site: Site, variables: Mapping[str, str]) -> list[HostFinding]:
    tool = find("kubectl", variables)
    if tool is None:
        return [elsewhere("[scheduler] kind", "kubectl is not on this host")]
    namespace, claim = site.kubernetes.namespace, site.kubernetes.claim
    base = [tool, "--request-timeout=2s", f"--namespace={namespace}", "get", "--output=name"]
    code, said = run_probe([*base, f"namespace/{namespace}"], variables)
    if code != 0 and "NotFound" not in said:
        return [elsewhere("[scheduler] kind", "no cluster answers to kubectl")]
    if code != 0:
        what = f"there is no namespace {namespace}"
        return [HostFinding("[kubernetes] namespace", "fail", what, "kubectl get namespaces")]
    if not claim:
        return []
    code, said = run_probe([*base, f"persistentvolumeclaim/{claim}"], variables)
    if code != 0 and "NotFound" in said:
        what = f"there is no claim {claim} in {namespace}"
        return [HostFinding("[kubernetes] claim", "fail", what, "kubectl get pvc")]
    return [HostFinding("[kubernetes] claim", "ok", claim)]


def missing(name: str, what: str, here: bool, hint: str) -> HostFinding:
    """Return the finding for a requirement on nodes that this host does not meet.

    It is a failure if this host belongs to the site (`here`).
    """
    if here:
        return HostFinding(name, "fail", what, hint)
    return HostFinding(name, "info", f"{what} here; not one of the site's hosts, so nodes may differ", hint)


def elsewhere(name: str, why: str) -> HostFinding:
    """Return the finding for a requirement that only other hosts of the site can judge."""
    return HostFinding(name, "info", f"cannot be judged here: {why}", "run this on a login node")
