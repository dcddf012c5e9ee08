"""Checks of the batch system, and of the consistency of a site file's tables with it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from envbuild.base.errors import HostError
from envbuild.base.toml import closest
from envbuild.data.schedulers import LAUNCHERS, SCHEDULER_NAMES, TITLES, listed
from envbuild.doctor.probe import Host, HostFinding, find, first_line, run_probe
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.schedulers.base import Queue
from envbuild.recipe.targets import gpu_families
from envbuild.runtimes import RUNTIMES, of_sites
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
            text = f"{family.kubernetes} is asked for by [node] gpus"
            yield _bad("[kubernetes] resources", text, "set [node] gpus, and remove it here")
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
            markers = listed(
                tuple(batch_system.script.marker for batch_system in SCHEDULERS.values() if batch_system.script), "and"
            )
            yield _bad("[scheduler] directives", f"{text!r}: {markers} are added to each", "leave them out")
        elif chosen and (option := chosen.own_option(text)):
            hint = "use the key of [scheduler] or [node], or an option of `envbuild job`"
            yield _odd("[scheduler] directives", f"{text!r} replaces {option} of jobs", hint)


def _container(site: Site) -> Iterator[HostFinding]:
    kind, launcher = site.scheduler.kind, site.scheduler.launcher
    runtime = site.container.runtime
    only = RUNTIMES[runtime].launcher if runtime in RUNTIMES else ""
    if only and only not in LAUNCHERS.get(kind, ()):
        yield _bad("[container] runtime", f"{runtime} is started by {only}", f"{everywhere()} with {kind}")
    if only and launcher not in (None, only):
        hint = f'launcher = "{only}", or runtime = "{RUNTIMES[runtime].instead}"'
        yield _bad("[container] runtime", f"{runtime} is started by {only}, not by {launcher}", hint)


def everywhere() -> str:
    """Return the values of [container] runtime that need no launcher."""
    none, *names = of_sites()
    return listed(tuple(f'"{name}"' for name in (*names, none) if name == none or not RUNTIMES[name].launcher))


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
        problem = "is not said: artifacts and snapshots must lie where all nodes see them"
        yield _odd("[paths] shared", problem, 'shared = "/fsx/{user}" or what this site has')


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


def _bad(name: str, text: str, hint: str) -> HostFinding:
    return HostFinding(name, "fail", text, hint)


def _odd(name: str, text: str, hint: str) -> HostFinding:
    return HostFinding(name, "warn", text, hint)


_DOCKER_S = 3.0
_MEGABYTES = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024, "": 1}


def slurm(host: Host) -> Iterator[HostFinding]:
    """Check Slurm: version, response of the controller, partitions, and the current allocation."""
    tool = find("scontrol", host.variables)
    if tool is None:
        return
    code, version = run_probe([tool, "--version"], host.variables)
    version = first_line(version) if code == 0 else "Slurm's tools"
    code, output = run_probe([tool, "ping"], host.variables)
    if code != 0 or " is DOWN" in output:
        text = f"{version}, but its controller does not answer: {first_line(output)}"
        hint = "on a cluster: ask its administrator; else only its tools are installed"
        yield HostFinding("Slurm", "info", text, hint, {"path": tool, "answers": False})
        return
    queue_list = queues("slurm", host.variables) or []
    facts = {"path": tool, "answers": True, "partitions": [queue.name for queue in queue_list]}
    names = ", ".join(f"{p.name}{'*' if p.default else ''} ({p.nodes} nodes)" for p in queue_list)
    yield HostFinding("Slurm", "ok", f"{version}; partitions {names or 'none'}", facts=facts)
    pyxis = has_pyxis(host.variables)
    if pyxis:
        yield HostFinding("pyxis", "ok", "srun has --container-image", facts={"there": True})
    elif pyxis is False:
        hint = f"site.toml: [container] runtime = {everywhere()}"
        yield HostFinding("pyxis", "info", "srun has no --container-image", hint, {"there": False})
    yield from _allocation("slurm", host)


def queues(name: str, variables: Mapping[str, str]) -> list[Queue] | None:
    """Return the queues (Slurm: partitions) that the scheduler `name` lists, or None if it does not answer."""
    facts = SCHEDULERS[name].host
    tool = find(facts.list_queues[0], variables) if facts else None
    if facts is None or tool is None:
        return None
    code, output = run_probe([tool, *facts.list_queues[1:]], variables)
    return facts.queues(output) if code == 0 else None


def has_pyxis(variables: Mapping[str, str]) -> bool | None:
    """Return whether Slurm has pyxis, or None without srun: srun's help lists the options of its plugins."""
    tool = find("srun", variables)
    return None if tool is None else "--container-image" in run_probe([tool, "--help"], variables)[1]


def pyxis_scope(variables: Mapping[str, str]) -> str | None:
    """Return pyxis's container_scope from this host's plugstack.conf, None if no line there names pyxis.

    Sources: pyxis, config.c; spank(8).
    """
    folder = Path(variables.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent
    for path in (folder / "plugstack.conf", *sorted(folder.glob("plugstack.conf.d/*"))):
        with suppress(OSError):
            for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
                if "pyxis" in line and line.split()[0] in ("required", "optional"):
                    match = re.search(r"\bcontainer_scope=(\w+)", line)
                    return match[1] if match else "global"
    return None


def scheduler(name: str, host: Host) -> Iterator[HostFinding]:
    """Check the scheduler `name`: version, queues, and the current allocation."""
    facts = SCHEDULERS[name].host
    tool = find(SCHEDULERS[name].submission.command[0], host.variables)
    if facts is None or tool is None:
        return
    code, output = run_probe([tool, *facts.version], host.variables)
    version = first_line(output, 60) if code == 0 else tool
    queue_list = queues(name, host.variables)
    if queue_list is None:
        text = f"{version}; {facts.list_queues[0]} lists no queues"
        yield HostFinding(TITLES[name], "info", text, facts={"path": tool, "queues": None})
    else:
        names = [queue.name for queue in queue_list]
        text = f"{version}; queues {', '.join(names) or 'none'}"
        yield HostFinding(TITLES[name], "ok", text, facts={"path": tool, "queues": names})
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
    code, output = run_probe(command, host.variables)
    if code != 0:
        # kubectl prints its log first, its message to the user last.
        why = first_line(output.splitlines()[-1]) if output else "nothing is said"
        text = f"kubectl is here, and no cluster answers: {why}"
        return [HostFinding("Kubernetes", "info", text, "set KUBECONFIG where there is a cluster", {"path": tool})]
    kinds = [k for k in ("pytorchjobs.kubeflow.org", "trainjobs.trainer.kubeflow.org") if k in output.split()]
    facts = {"path": tool, "kinds": kinds, "answers": True}
    if kinds:
        return [HostFinding("Kubernetes", "ok", f"answers; training jobs: {', '.join(kinds)}", facts=facts)]
    hint = "install Kubeflow's training operator or Trainer"
    return [HostFinding("Kubernetes", "warn", "answers; training jobs: none", hint, facts)]


def docker_daemon(host: Host) -> list[HostFinding]:
    """Check the docker daemon through its API."""
    from envbuild.image.daemon import connect

    try:
        with connect(host.variables) as client:
            client.api.timeout = _DOCKER_S
            info, version = client.info(), client.version()
    except HostError as error:
        text = error.message.splitlines()[0][:200]
        return [HostFinding("docker daemon", "info", text, error.hint or "", {"answers": False})]
    driver, runtimes = info.get("Driver", "?"), sorted(info.get("Runtimes") or {})
    facts = {"answers": True, "version": version.get("Version"), "driver": driver}
    facts |= {"runtimes": runtimes, "arch": version.get("Arch")}
    text = f"{facts['version']}, storage driver {driver}"
    text += ", with NVIDIA's runtime" if "nvidia" in runtimes else ""
    if driver != "vfs":
        return [HostFinding("docker daemon", "ok", text, facts=facts)]
    hint = "vfs copies every layer: let the daemon use overlay2 or containerd's store"
    return [HostFinding("docker daemon", "warn", text, hint, facts)]


def on_site(site: Site, variables: Mapping[str, str]) -> bool:
    """Return whether this host has the site's scheduler and therefore belongs to the site."""
    kind = site.scheduler.kind
    return kind not in SCHEDULERS or queues(kind, variables) is not None


def judge_scheduler(site: Site, variables: Mapping[str, str]) -> Iterable[HostFinding]:
    """Compare the site's settings with the scheduler on this host."""
    kind = site.scheduler.kind
    if kind not in SCHEDULERS:
        hint = f"name {listed(SCHEDULER_NAMES)}"
        return [HostFinding("[scheduler] kind", "info", "none: `envbuild job` needs --scheduler", hint)]
    facts = SCHEDULERS[kind].host
    if facts is None:
        return _cluster(site, variables)
    queue_list = queues(kind, variables)
    if queue_list is None:
        return [elsewhere("[scheduler] kind", f"no {TITLES[kind]} answers on this host")]
    return _queue(site, facts.queue, queue_list)


def _queue(site: Site, word: str, queue_list: list[Queue]) -> Iterator[HostFinding]:
    partition, title = site.scheduler.partition, TITLES[site.scheduler.kind]
    names = ", ".join(queue.name for queue in queue_list)
    chosen = next((queue for queue in queue_list if (queue.name == partition if partition else queue.default)), None)
    if chosen is None and partition:
        near = closest(partition, [queue.name for queue in queue_list])
        problem = f"there is no {word} {partition!r}" + (f"; did you mean {near!r}?" if near else "")
        yield HostFinding("[scheduler] partition", "fail", problem, f"there are {names or 'none'}")
    elif chosen is None and any(queue.default is not None for queue in queue_list):
        problem = f"is not said, and {title} has no default"
        yield HostFinding("[scheduler] partition", "fail", problem, f"one of {names}")
    elif chosen is None or chosen.default is None:
        yield HostFinding("[scheduler] kind", "ok", f"{title} answers; queues {names or 'none'}")
    else:
        yield HostFinding("[scheduler] partition", "ok", f"{chosen.name}, {chosen.nodes} nodes")
    if chosen is not None:
        yield from _limits(site, chosen)


def _limits(site: Site, queue: Queue) -> Iterator[HostFinding]:
    most, asked = duration(queue.time), duration(site.scheduler.time)
    if most is not None and asked is not None and asked > most:
        problem = f"{site.scheduler.time} is more than {queue.name} allows, {queue.time}"
        yield HostFinding("[scheduler] time", "fail", problem, f'time = "{queue.time}" or less')
    memory = site.node.memory
    megabytes = float(memory.rstrip("KMGT") or 0) * _MEGABYTES[memory[-1:] if memory[-1:].isalpha() else ""]
    for key, request, value, has, unit in (
        ("gpus", site.node.gpus, site.node.gpus, queue.gpus, ""),
        ("cpus", site.node.cpus, site.node.cpus, queue.cpus, ""),
        ("memory", memory, megabytes, queue.memory, " MB"),
    ):
        if has is not None and value > has:
            problem = f"{request} asked for; a node of {queue.name} has {has}{unit}"
            yield HostFinding(f"[node] {key}", "fail", problem, "jobs would wait for ever, or be refused")


def _cluster(site: Site, variables: Mapping[str, str]) -> list[HostFinding]:
    tool = find("kubectl", variables)
    if tool is None:
        return [elsewhere("[scheduler] kind", "kubectl is not on this host")]
    namespace, claim = site.kubernetes.namespace, site.kubernetes.claim
    base = [tool, "--request-timeout=2s", f"--namespace={namespace}", "get", "--output=name"]
    code, output = run_probe([*base, f"namespace/{namespace}"], variables)
    if code != 0 and "NotFound" not in output:
        return [elsewhere("[scheduler] kind", "no cluster answers to kubectl")]
    if code != 0:
        problem = f"there is no namespace {namespace}"
        return [HostFinding("[kubernetes] namespace", "fail", problem, "kubectl get namespaces")]
    if not claim:
        return []
    code, output = run_probe([*base, f"persistentvolumeclaim/{claim}"], variables)
    if code != 0 and "NotFound" in output:
        problem = f"there is no claim {claim} in {namespace}"
        return [HostFinding("[kubernetes] claim", "fail", problem, "kubectl get pvc")]
    return [HostFinding("[kubernetes] claim", "ok", claim)]


def missing(name: str, problem: str, here: bool, hint: str) -> HostFinding:
    """Return the finding for a requirement that this host does not meet: a failure on a host of the site (`here`)."""
    if here:
        return HostFinding(name, "fail", problem, hint)
    return HostFinding(name, "info", f"{problem} here; not one of the site's hosts, so nodes may differ", hint)


def elsewhere(name: str, why: str) -> HostFinding:
    """Return the finding for a requirement that can be checked only on other hosts of the site."""
    return HostFinding(name, "info", f"cannot be judged here: {why}", "run this on a login node")
