"""Generator of a commented site file from the findings on this host."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from envbuild.base.toml import toml_value
from envbuild.data.schedulers import TITLES, listed
from envbuild.doctor import batch, fabric, machine, storage
from envbuild.doctor.probe import Host, find, run_parallel
from envbuild.doctor.tools import module_init
from envbuild.fabrics import load_fabrics
from envbuild.gpus import gpu_of
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.schedulers.base import HostFacts, Queue
from envbuild.site.jobs import value_problem

_WAIT_S = 8.0
# The caller's variables that nodes need for network access.
_VARIABLES = (
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "SSL_CERT_FILE",
    "REQUESTS_CA_BUNDLE",
    "CURL_CA_BUNDLE",
)
_SHARED = ("/fsx", "/lustre", "/scratch", "/gpfs", "/work", "/shared", "/projects", "/nfs", "/home")
_LINE = 48


def site_file(variables: Mapping[str, str]) -> str:
    """Return the text of a site file for this host. A proxy with a password is left out, with a comment."""
    host = Host(variables)
    tables = {
        "scheduler": _scheduler(variables),
        "modules": _modules(host),
        "environment": _environment(variables),
        "paths": _paths(host),
        "container": _container(variables),
        "node": _node(host),
        "fabric": _fabric(),
    }
    found: dict[str, list[str]] = {}

    def gather(name: str) -> None:
        found[name] = list(tables[name])

    run_parallel([partial(gather, name) for name in tables], _WAIT_S)
    lines = [
        "# A site file of envbuild, written by `envbuild site init` from what this host has.",
        "# Read it through, correct what nodes have otherwise, then: envbuild site check FILE",
        "# Every key: docs/reference/site.md.",
        "# In force as ~/.config/envbuild/site.toml or by $ENVBUILD_SITE; or by --site FILE.",
    ]
    unknown = ["# could not be found out: something on this host does not answer"]
    for name in tables:
        lines += ["", f"[{name}]", *found.get(name, unknown)]
    return "\n".join(lines) + "\n"


def _said(key: str, value: object, why: str = "", *, off: bool = False) -> str:
    """Return one line `key = value # why`; `off` comments it out."""
    text = f"{'# ' if off else ''}{key} = {toml_value(value)}"
    plain = "".join(c if c.isprintable() else " " for c in why)
    return f"{text.ljust(_LINE)} # {plain}" if why else text


def _scheduler(variables: Mapping[str, str]) -> Iterator[str]:
    if first := _answering(variables):
        yield from _queues(*first)
    elif find("kubectl", variables) and (
        variables.get("KUBECONFIG") or Path(variables.get("HOME") or "/nonexistent", ".kube/config").is_file()
    ):
        yield _said("kind", "kubernetes", "kubectl has a configuration")
        yield from ("", "[kubernetes]", _said("namespace", "default"))
        yield _said("claim", "data", "persistent volume claim with data and snapshots", off=True)
    else:
        yield _said("kind", "none", f"no {listed(tuple(TITLES.values()))} answers here")


def _queues(name: str, facts: HostFacts, found: list[Queue]) -> Iterator[str]:
    """Yield [scheduler] for the scheduler `name` with the queues `found`."""
    names = ", ".join(f"{one.name} ({one.nodes} nodes, {one.time})" if one.nodes else one.name for one in found)
    yield _said("kind", name, f"its {facts.queue}s: {names or 'none'}"[:200])
    chosen = _chosen(found)
    if chosen:
        default = f"{TITLES[name]}'s default" if chosen.default else "the first of them"
        yield _said("partition", chosen.name, default)
    for key, value, why in facts.examples:
        if key == "launcher":
            yield _said("time", "01:00:00", f"at most {chosen.time}" if chosen and chosen.time else "")
        yield _said(key, value, why, off=True)


def _answering(variables: Mapping[str, str]) -> tuple[str, HostFacts, list[Queue]] | None:
    """Return the first scheduler that answers on this host, and its queues."""
    for name, scheduler in SCHEDULERS.items():
        if scheduler.host and (found := batch.queues(name, variables)) is not None:
            return name, scheduler.host, found
    return None


def _chosen(found: list[Queue]) -> Queue | None:
    return next((one for one in found if one.default), found[0] if found else None)


def _modules(host: Host) -> Iterator[str]:
    if init := module_init(host):
        yield _said("init", init, "defines `module` in batch shells")
    else:
        yield "# This host has neither Lmod nor Environment Modules."
    yield _said("purge", True, "unload what a login shell loaded")
    names = host.variables.get("LOADEDMODULES", "").split(":")
    loaded = [name for name in names if name.strip() and name.isprintable()]
    why = "loaded now" if loaded else "exact versions, the same for building and running"
    for key in ("build", "run"):
        yield _said(key, loaded or ["python/3.11"], why, off=not loaded)


def _environment(variables: Mapping[str, str]) -> Iterator[str]:
    yield "# Variables of builds and jobs on nodes. Never secrets: scripts are read by others."
    seen = set()
    for name in _VARIABLES:
        value = variables.get(name)
        if not value or name.lower() in seen:
            continue
        seen.add(name.lower())
        if problem := value_problem(value):
            yield f"# {name} is left out: it {problem}"
        else:
            yield _said(name, value, "as in this shell")


def _paths(host: Host) -> Iterator[str]:
    shared = []
    mounted = [one.at for one in storage.mounts(host.root) if one.shared and not re.search(r"[\s\\]", one.at)]
    for place in dict.fromkeys([*_SHARED, *mounted]):
        mount = storage.mount_at(Path(place), host.root)
        if mount and mount.shared and mount.at != "/" and Path(place).is_dir():
            shared.append((place, mount.kind))
    shared.sort(key=lambda row: row[0] == "/home")  # the home folder last
    if shared:
        place, kind = shared[0]
        user = host.variables.get("USER")
        mine = place if place == "/home" and not (user and Path(place, user).is_dir()) else f"{place}/{{user}}"
        why = f"{kind}, seen by other hosts; all of them: {', '.join(path for path, _ in shared)}"[:160]
    else:
        mine, why = "/fsx/{user}", "no file system here is one over a network"
    yield _said("shared", mine, why, off=not shared)
    yield _said("cache", f"{mine}/.cache", "caches off $HOME", off=not shared)
    scratch = next((p for p in ("/local_scratch", "/localscratch", "/scratch/local", "/nvme") if os.path.isdir(p)), "")
    yield _said("scratch", scratch or "/tmp", "a node's own disk", off=not scratch)
    yield _said("logs", "logs")


def _container(variables: Mapping[str, str]) -> Iterator[str]:
    program = next((name for name in ("enroot", "apptainer") if find(name, variables)), None)
    if batch.has_pyxis(variables):
        yield _said("runtime", "pyxis", "srun has --container-image")
    elif program:
        yield _said("runtime", program, "its program is here; nodes must have it, too")
    else:
        yield _said("runtime", "none", "images are started by `envbuild run`")
    yield _said("mounts", ["/fsx:/fsx"], "what containers see of the host", off=True)


def _node(host: Host) -> Iterator[str]:
    here = next((found.facts for found in machine.gpus(host) if "gpus" in found.facts), {})
    gpus, types = len(here.get("gpus", ())), here.get("chips", ())
    _, facts, queues = _answering(host.variables) or ("", None, [])
    chosen = _chosen(queues)
    if facts and chosen and chosen.gpus is not None and chosen.cpus is not None:
        yield _said("gpus", chosen.gpus, f"of a node in {chosen.name}, by {facts.list_queues[0]}")
        yield _said("cpus", chosen.cpus, "0: not said")
        types = sorted({name for kind in chosen.gpu_types if (name := gpu_of(kind))}) or types
    else:
        yield _said("gpus", gpus, "of this host")
        yield _said("cpus", os.cpu_count() or 0, "of this host; 0: not said", off=True)
    if types:
        yield _said("gpu_types", types, "artifacts must have code for them")


def _fabric() -> Iterator[str]:
    outer = [one for one in fabric.interfaces() if one.outer]
    own = tuple(one.interfaces for one in load_fabrics().values() if one.interfaces)
    best = max(outer, key=lambda one: (one.name.startswith(own), one.speed or 0), default=None)
    if best is None:
        yield _said("interface", "eth0", "no interface here has an address", off=True)
    else:
        # Nodes may have other interface names, and jobs select the interface by the route. Slingshot's interface
        # is not on the default route, so it is named.
        names = ", ".join(f"{one.name} {one.addresses[0]}" for one in outer)
        yield _said("interface", best.name, f"this host has {names}", off=not best.name.startswith(own))
    yield '# variables = { NCCL_IB_GID_INDEX = "3" }          # of every job on GPUs'
