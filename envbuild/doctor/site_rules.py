"""Contradictions within a site file, independent of the host. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from envbuild.data.schedulers import LAUNCHERS, listed
from envbuild.doctor.probe import HostFinding
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.recipe.accelerators import gpu_families
from envbuild.site.jobs import UNLIMITED, KubernetesTable, huge_pages_problem, runtime_conflicts, unlimited
from envbuild.site.settings import Site


def contradictions(site: Site) -> Iterator[HostFinding]:
    """Yield the contradictions in `site`."""
    yield from _scheduler(site)
    yield from _container(site)
    chosen = SCHEDULERS.get(site.scheduler.kind)
    yield from _pods(site) if chosen and chosen.pods else _no_pods(site)
    limits = {*site.kubernetes.resources}
    for family in gpu_families():
        if family.kubernetes in limits:
            what, hint = f"{family.kubernetes} is asked for by [node] gpus", "set [node] gpus, and remove it here"
            yield _bad("[kubernetes] resources", what, hint)
    limits |= {"cpu"} if site.node.cpus else set()
    limits |= {"memory"} if site.node.memory else set()
    if problem := huge_pages_problem(limits):
        yield _bad("[kubernetes] resources", problem, "set [node] cpus and memory")
    modules = site.modules
    if modules.init and not (modules.run or modules.build):
        yield _odd("[modules] init", "no module is loaded after it", "name modules in run and build, or remove it")
    if modules.run and modules.build != modules.run:
        hint = "an artifact built with other modules than those of the job may not start"
        yield HostFinding("[modules] build", "info", "differs from run", hint)
    yield from _environment(site)


def _scheduler(site: Site) -> Iterator[HostFinding]:
    scheduler, kind = site.scheduler, site.scheduler.kind
    launchers = LAUNCHERS.get(kind, ())
    if scheduler.launcher is not None and scheduler.launcher not in launchers:
        hint = f"of {kind}: {', '.join(launchers) or 'none'}"
        yield _bad("[scheduler] launcher", f"{scheduler.launcher} does not go with {kind}", hint)
    if scheduler.auto_resume and ("srun" not in launchers or scheduler.launcher not in (None, "srun")):
        yield _bad("[scheduler] auto_resume", "is an option of srun on SageMaker HyperPod", "auto_resume = false")
    chosen = SCHEDULERS.get(kind)
    used = chosen.site_keys if chosen else frozenset()
    for key in ("qos", "constraint", "partition", "account", "directives"):
        if getattr(scheduler, key) and key not in used:
            more = "" if key in ("qos", "constraint") else ", or name the scheduler"
            yield _odd(f"[scheduler] {key}", f"is not used with {kind}", f"leave it out{more}")
    if kind != "none" and site.node.memory and "memory" not in used:
        yield _odd("[node] memory", f"is not used with {kind}", "leave it out")
    for text in scheduler.directives:
        if text.startswith("#"):
            markers = listed(tuple(one.script.marker for one in SCHEDULERS.values() if one.script), "and")
            yield _bad("[scheduler] directives", f"{text!r}: {markers} are added to each", "leave them out")
        elif chosen and (option := chosen.own_option(text)):
            hint = "use the key of [scheduler] or [node], or an option of `envbuild job`"
            yield _odd("[scheduler] directives", f"{text!r} replaces {option} of jobs", hint)


def _container(site: Site) -> Iterator[HostFinding]:
    kind, launcher = site.scheduler.kind, site.scheduler.launcher
    if site.container.runtime == "pyxis" and "srun" not in LAUNCHERS.get(kind, ()):
        yield _bad("[container] runtime", "pyxis is a part of Slurm", f'"enroot", "apptainer" or "none" with {kind}')
    if site.container.runtime == "pyxis" and launcher not in (None, "srun"):
        hint = 'launcher = "srun", or runtime = "enroot"'
        yield _bad("[container] runtime", f"pyxis is started by srun, not by {launcher}", hint)


def _pods(site: Site) -> Iterator[HostFinding]:
    if site.container.runtime != "none":
        yield _odd("[container] runtime", "pods bring their own; it is not used", 'runtime = "none"')
    if site.modules.run or site.modules.build:
        yield _odd("[modules]", "pods have no modules; they are not used", "leave the table out")
    if not site.kubernetes.claim:
        hint = 'claim = "NAME of a persistent volume claim"'
        yield _odd("[kubernetes] claim", "is not said: snapshots go with their pod", hint)
    limits = {*site.kubernetes.resources} | ({"cpu"} if site.node.cpus else set())
    limits |= {"memory"} if site.node.memory else set()
    if missing := unlimited(limits):
        yield _odd("[node]", f"pods ask for no {missing}: {UNLIMITED}", "set [node] cpus and memory")
    for key, problem, hint in runtime_conflicts(site.kubernetes):
        yield _bad(f"[kubernetes] {key}", problem, hint)


def _no_pods(site: Site) -> Iterator[HostFinding]:
    kind = site.scheduler.kind
    if site.kubernetes != KubernetesTable():
        hint = 'leave the table out, or kind = "kubernetes"'
        yield _odd("[kubernetes]", f"is not used with the scheduler {kind}", hint)
    if kind in SCHEDULERS and not site.paths.shared:
        what = "is not said: artifacts and snapshots must lie where all nodes see them"
        yield _odd("[paths] shared", what, 'shared = "/fsx/{user}" or what this site has')


def _environment(site: Site) -> Iterator[HostFinding]:
    named = site.environment
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        if name in named:
            yield _bad(f"[environment] {name}", "is for torchrun to set, on each node anew", "remove it")
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        if name in named and site.fabric.interface:
            yield _odd(f"[environment] {name}", "goes against [fabric] interface", "keep the interface alone")
    for name in ("NCCL_DEBUG", "NCCL_IB_GID_INDEX"):
        if name in named and name in site.fabric.variables:
            yield _odd(f"[environment] {name}", "is in [fabric] variables too", "keep that one")
    for name in ("http_proxy", "https_proxy"):
        if name in named and "://" not in named[name]:
            yield _odd(f"[environment] {name}", "has no scheme", "write http://HOST:PORT")
    if "XDG_RUNTIME_DIR" in named:
        yield _bad("[environment] XDG_RUNTIME_DIR", "does not exist on nodes", "remove it")


def duration(text: str) -> int | None:
    """Return the seconds of a time in Slurm's spelling (D-HH:MM:SS, HH:MM:SS, MM:SS, minutes), or None for no limit."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(?:(\d+):)?(\d+):)?(\d+)", text.strip())
    if not match:
        return None
    days, hours, minutes, last = (int(part or 0) for part in match.groups())
    if match[3] is None:  # one number: minutes, or hours after days
        return days * 86400 + (last * 3600 if match[1] else last * 60)
    if match[2] is None and match[1]:  # D-HH:MM
        return days * 86400 + minutes * 3600 + last * 60
    return days * 86400 + hours * 3600 + minutes * 60 + last


def _bad(name: str, what: str, hint: str) -> HostFinding:
    return HostFinding(name, "fail", what, hint)


def _odd(name: str, what: str, hint: str) -> HostFinding:
    return HostFinding(name, "warn", what, hint)
