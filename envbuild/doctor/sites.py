"""Site files: a check of a site file on this host, and a first site file from the findings on this host."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from envbuild.base.errors import EnvbuildError
from envbuild.base.libraries import inventory
from envbuild.base.masking import redact
from envbuild.base.toml import toml_value
from envbuild.base.workers import run_parallel
from envbuild.data.schedulers import TITLES, listed
from envbuild.doctor import batch, machine, network
from envbuild.doctor.batch import contradictions, elsewhere, judge_scheduler, missing, on_site
from envbuild.doctor.probe import Host, HostFinding, HostProbe, find, first_line, run_checks, run_probe
from envbuild.doctor.tools import has_module, module_init
from envbuild.environment import Environment
from envbuild.fabrics import load_fabrics
from envbuild.gpus import gpu_of
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.jobs.schedulers.base import HostFacts, Queue
from envbuild.runtimes import RUNTIMES
from envbuild.site.jobs import value_problem
from envbuild.site.settings import Site, load_site
from envbuild.store.remote import cache_of, open_remote, open_vault
from envbuild.verify.model import check_texts

_MODULES_S = 8.0
_DEADLINE_S = 12.0


def check_site(
    name: str | None, variables: Mapping[str, str], environment: Environment | None, *, offline: bool = False
) -> list[HostFinding]:
    """Check the site called `name` (None: the effective one) and return the findings.

    The findings are mistakes in its files with positions, contradictions, and differences from this host. Raises
    UsageError for an unknown name.
    """
    try:
        site = load_site(variables, name)
    except EnvbuildError as error:
        if error.exit_code == 2 and ":" in error.message:
            lines = redact(error.message).splitlines()
            return [HostFinding("file", "fail", line, error.hint or "") for line in lines]
        raise
    files = ", ".join(map(str, site.files)) or "no file: defaults are in force"
    findings = [HostFinding("file", "ok" if site.files else "info", files)]
    findings += contradictions(site)
    checks = [
        HostProbe("site", "[scheduler]", lambda host: judge_scheduler(site, host.variables)),
        HostProbe("site", "[modules]", partial(_modules, site)),
        HostProbe("site", "[paths]", partial(_paths, site)),
        HostProbe("site", "[container]", partial(_container, site)),
        HostProbe("site", "[fabric]", lambda _: _interface(site)),
        HostProbe("site", "[host_stack]", partial(_places, site)),
        HostProbe("site", "[mirrors]", partial(_mirrors, site)),
        HostProbe("site", "[trust]", lambda _: _trust(site)),
        HostProbe("site", "cache", partial(_cache, site, "cache")),
        HostProbe("site", "vault", partial(_cache, site, "vault")),
    ]
    results = run_checks(checks, Host(variables, environment, offline=offline), _DEADLINE_S)
    return [*findings, *(finding for _, findings in results for finding in findings)]


def _trust(site: Site) -> Iterator[HostFinding]:
    from envbuild.trust.keys import load_public

    for key in ("signers", "cache_signers"):
        for signer in getattr(site.trust, key):
            try:
                load_public(Path(signer))
                yield HostFinding(f"[trust] {key}", "ok", signer)
            except EnvbuildError as error:
                yield HostFinding(f"[trust] {key}", "fail", error.message, error.hint or "")
    if unknown := [name for name in site.trust.checks if name not in check_texts()]:
        known = ", ".join(check_texts())
        yield HostFinding("[trust] checks", "fail", f"there is no check {', '.join(unknown)}", f"there are {known}")
    if (site.trust.checks or site.trust.max_age or site.trust.names) and not site.trust.restricts:
        yield HostFinding("[trust]", "warn", "has no effect without signers", "name files of public keys in signers")


def _cache(site: Site, key: str, host: Host) -> Iterator[HostFinding]:
    """Judge the team's cache, or its vault: `key` in the site file."""
    url, mode = cache_of(site, host.variables, key)
    if not url:
        return
    if host.offline or host.environment is None:
        yield HostFinding(key, "info", f"{url}: not asked" + (" (--offline)" if host.offline else ""))
        return
    try:
        if key == "vault" and (vault := open_vault(site, host.environment.pip, host.variables)):
            count = f"{len(vault.locks())} locks"
        elif remote := open_remote(site, host.environment.pip, host.variables, host.environment.store):
            count = f"{len(remote.registry.tags())} entries"
        yield HostFinding(key, "ok", f"{url} ({mode}): {count}")
    except EnvbuildError as error:
        hint = error.hint or f"builds go on without it; see docs/howto/{key}.md"
        yield HostFinding(key, "warn", f"{url}: {error.message}", hint)


def _modules(site: Site, host: Host) -> Iterator[HostFinding]:
    table, variables = site.modules, host.variables
    if not (table.run or table.build or table.init):
        return
    here = on_site(site, variables)
    bash = find("bash", variables)
    if table.init and not Path(table.init).is_file():
        yield missing("[modules] init", f"{table.init} does not exist", here, "find it with `envbuild doctor`")
        return
    if bash is None:
        yield elsewhere("[modules]", "bash is not on this host")
        return
    start = f". {shlex.quote(table.init)}; " if table.init else ""
    # A non-login shell, as in jobs: a profile could hide missing modules.
    if not has_module([bash, "-c"], variables, start, _MODULES_S):
        hint = 'init = "…", the file that defines it (`envbuild doctor` finds it)'
        yield missing("[modules]", "a batch shell has no `module`", here, hint)
        return
    purge = "module purge || exit 3; " if table.purge else ""
    for key, names in (("run", table.run), ("build", () if table.build == table.run else table.build)):
        if not names:
            continue
        code, output = run_probe([bash, "-c", f"{start}{purge}module load {shlex.join(names)}"], variables, _MODULES_S)
        # Old versions of Environment Modules report an error and exit with 0.
        if code != 0 or "ERROR" in output or "Unable to locate" in output:
            problem = f"{' '.join(names)}: {_why(output)}"
            yield missing(f"[modules] {key}", problem, here, "module avail, or module spider NAME")
        else:
            yield HostFinding(f"[modules] {key}", "ok", f"{' '.join(names)} can be loaded")


def _why(output: str) -> str:
    lines = [line.strip() for line in output.splitlines()]
    deciding = [line for line in lines if "nable to locate" in line or "unknown" in line or "ERROR" in line]
    return first_line("\n".join(deciding or lines)) or "cannot be loaded"


def _paths(site: Site, host: Host) -> Iterator[HostFinding]:
    here = on_site(site, host.variables)
    home = os.path.realpath(host.variables.get("HOME") or "/nonexistent")
    texts = {"shared": site.paths.shared, "scratch": site.paths.scratch, "cache": site.paths.cache}
    for key, path in ((key, Path(text)) for key, text in texts.items() if text):
        name = f"[paths] {key}"
        there = next((folder for folder in (path, path.parent) if folder.is_dir()), None)
        needed = here and key != "scratch"  # a login node may lack the nodes' scratch disk
        if there is None:
            problem = f"neither {path} nor {path.parent} exists"
            yield missing(name, problem, needed, "correct the path, or have it made")
            continue
        if not os.access(there, os.W_OK | os.X_OK):
            problem = f"{there} cannot be written by this user"
            yield missing(name, problem, needed, "another folder, or another mode")
            continue
        mount = machine.mount_at(there)
        kind = mount.kind if mount else "unknown file system"
        if key == "shared" and mount and not mount.shared and site.scheduler.kind != "none":
            problem = f"{path} lies on {kind}, a file system that only this host has"
            hint = "right only if it is exported to the nodes; `envbuild preflight` on nodes tells"
            yield HostFinding(name, "warn", problem, hint)
        elif key == "cache" and f"{os.path.realpath(path)}/".startswith(f"{home}/"):
            problem = f"{path} is in the home folder, where quotas are small"
            yield HostFinding(name, "warn", problem, "a folder on scratch")
        else:
            yield HostFinding(name, "ok", f"{path} ({kind})" + ("" if there == path else ", to be made"))


def _container(site: Site, host: Host) -> Iterator[HostFinding]:
    runtime, here, name = site.container.runtime, on_site(site, host.variables), "[container] runtime"
    if runtime in RUNTIMES and RUNTIMES[runtime].launcher:
        has_pyxis = batch.has_pyxis(host.variables)
        if has_pyxis is None:
            yield elsewhere(name, "no srun on this host")
        elif has_pyxis:
            yield HostFinding(name, "ok", "srun has --container-image")
            scope = batch.pyxis_scope(host.variables)
            if scope != "job":
                state = f"container_scope={scope}" if scope else "its container_scope is not visible on this host"
                text = f"pyxis: {state}; a cancelled job's containers stay until a later job of its user removes them"
                yield HostFinding(
                    name, "info", text, "ask for container_scope=job in plugstack.conf: Slurm removes them"
                )
        else:
            text, hint = "srun has no --container-image, so no pyxis", f"runtime = {batch.everywhere()}"
            yield missing(name, text, here, hint)
    elif runtime in RUNTIMES:
        path = find(runtime, host.variables)
        text = path or f"{runtime} is not on this host; nodes must have it"
        yield HostFinding(name, "ok" if path else "info", text)
    for source in (mount.split(":")[0] for mount in site.container.mounts):
        if not Path(source).exists():
            hint = "nodes must have it, or the container is not started"
            yield missing("[container] mounts", f"{source} does not exist", here, hint)


def _interface(site: Site) -> Iterator[HostFinding]:
    scheduler, key = SCHEDULERS.get(site.scheduler.kind), "[fabric] interface"
    if not site.fabric.interface or (scheduler and scheduler.pods):
        return
    known = [name for _, name in socket.if_nameindex()]
    listed = ", ".join(known)
    for name in site.fabric.interface.split(","):
        if name.startswith(("^", "=")):
            text = f"{name!r}: a name is wanted, not NCCL's patterns"
            yield HostFinding(key, "fail", text, f"one of this host: {listed}")
        elif name == "lo":
            yield HostFinding(key, "fail", "lo leads to no other node", f"this host has {listed}")
        elif name in known:
            yield HostFinding(key, "ok", name)
        else:
            text = f"{name} is not on this host, which has {listed}; nodes must have it"
            yield HostFinding(key, "info", text, "envbuild preflight on the nodes tells")


def _mirrors(site: Site, host: Host) -> Iterator[HostFinding]:
    rows: list[tuple[str, network.Probe]] = []
    for url, mirrors in site.mirrors.items():
        page = "torch/" if "/whl" in url or "/simple" in url else ""
        rows += [(f"[mirrors] {redact(url)}", network.Probe(mirror, page)) for mirror in mirrors]
    rows += [(f"[indexes] {name}", network.Probe(url, "")) for name, url in site.indexes.items()]
    for name, table in site.registries.items():
        rows += [(f"[registries] {name}", network.Probe(m, "v2/", True)) for m in table.mirrors]
    if site.debian.mirror:
        rows.append(("[debian] mirror", network.Probe(site.debian.mirror, "dists/")))
    if not rows:
        return
    if host.offline or host.environment is None:
        yield HostFinding("[mirrors]", "info", "not asked" + (" (--offline)" if host.offline else ""))
        return
    answers = network.ask_all([probe for _, probe in rows], host.environment)
    for (name, probe), answer in zip(rows, answers, strict=True):
        # A server without this page is reachable all the same.
        if answer is None or answer.startswith("it answers"):
            yield HostFinding(name, "ok", redact(probe.url))
        else:
            hint = "correct or remove it; it is tried first"
            yield HostFinding(name, "fail", f"{redact(probe.url)}: {answer}", hint)


_WAIT_S = 8.0
# The caller's variables that nodes need for network access.
_VARIABLES = ["http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"]
_VARIABLES += ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"]
_SHARED = ("/fsx", "/lustre", "/scratch", "/gpfs", "/work", "/shared", "/projects", "/nfs", "/home")
_LINE = 48


def site_file(variables: Mapping[str, str]) -> str:
    """Return the text of a site file for this host. A proxy with a password is left out, with a comment."""
    host = Host(variables)
    tables = {
        "scheduler": _scheduler(variables),
        "modules": _modules_text(host),
        "environment": _environment(variables),
        "paths": _paths_text(host),
        "container": _container_text(variables),
        "node": _node(host),
        "fabric": _fabric(),
        "host_stack": _host_stack(host),
    }
    lines_of: dict[str, list[str]] = {}

    def gather(name: str) -> None:
        lines_of[name] = list(tables[name])

    run_parallel([partial(gather, name) for name in tables], _WAIT_S)
    lines = [
        "# A site file of envbuild, written by `envbuild site init` from what this host has.",
        "# Read it through, correct what nodes have otherwise, then: envbuild site check FILE",
        "# Every key: docs/reference/site.md.",
        "# In force as ~/.config/envbuild/site.toml or by $ENVBUILD_SITE; or by --site FILE.",
    ]
    unknown = ["# could not be found out: something on this host does not answer"]
    for name in tables:
        lines += ["", f"[{name}]", *lines_of.get(name, unknown)]
    return "\n".join(lines) + "\n"


def _said(key: str, value: object, why: str = "", *, off: bool = False) -> str:
    """Return the line `key = value # why`; `off` comments it out."""
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


def _queues(name: str, facts: HostFacts, queues: list[Queue]) -> Iterator[str]:
    """Yield [scheduler] for the scheduler `name` with its `queues`."""
    names = ", ".join(
        f"{queue.name} ({queue.nodes} nodes, {queue.time})" if queue.nodes else queue.name for queue in queues
    )
    yield _said("kind", name, f"its {facts.queue}s: {names or 'none'}"[:200])
    chosen = _chosen(queues)
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
        if scheduler.host and (queues := batch.queues(name, variables)) is not None:
            return name, scheduler.host, queues
    return None


def _chosen(queues: list[Queue]) -> Queue | None:
    return next((queue for queue in queues if queue.default), queues[0] if queues else None)


def _modules_text(host: Host) -> Iterator[str]:
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


def _paths_text(host: Host) -> Iterator[str]:
    shared = []
    mounted = [mount.at for mount in machine.mounts(host.root) if mount.shared and not re.search(r"[\s\\]", mount.at)]
    for place in dict.fromkeys([*_SHARED, *mounted]):
        mount = machine.mount_at(Path(place), host.root)
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


def _container_text(variables: Mapping[str, str]) -> Iterator[str]:
    # Many hosts have podman, whose nodes lack what users need for it.
    usual = (name for name, runtime in RUNTIMES.items() if runtime.host and runtime.host.kinds)
    program = next((name for name in usual if find(name, variables)), None)
    if batch.has_pyxis(variables):
        yield _said("runtime", "pyxis", "srun has --container-image")
    elif program:
        yield _said("runtime", program, "its program is here; nodes must have it, too")
    else:
        yield _said("runtime", "none", "images are started by `envbuild run`")
    yield _said("mounts", ["/fsx:/fsx"], "what containers see of the host", off=True)


def _node(host: Host) -> Iterator[str]:
    here = next((finding.facts for finding in machine.gpus(host) if "gpus" in finding.facts), {})
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
    outer = [interface for interface in network.interfaces() if interface.outer]
    own = tuple(row.interfaces for row in load_fabrics().values() if row.interfaces)
    best = max(outer, key=lambda interface: (interface.name.startswith(own), interface.speed or 0), default=None)
    if best is None:
        yield _said("interface", "eth0", "no interface here has an address", off=True)
    else:
        # Nodes may have other interface names, and jobs select the interface by the route. Slingshot's interface
        # is not on the default route, so it is named.
        names = ", ".join(f"{interface.name} {interface.addresses[0]}" for interface in outer)
        yield _said("interface", best.name, f"this host has {names}", off=not best.name.startswith(own))
    yield '# variables = { NCCL_IB_GID_INDEX = "3" }          # of every job on GPUs'


# Where HPE (CPE user guide), AWS (EFA installer) and NVIDIA install their libraries.
_VENDORS = {
    "libfabric": ("opt/cray/libfabric/*/lib64/libfabric.so.1", "opt/amazon/efa/lib*/libfabric.so.1"),
    "nccl_plugin": ("opt/amazon/ofi-nccl/lib/libnccl-net*.so", "opt/amazon/ofi-nccl/lib/*/libnccl-net*.so"),
    "mpi": ("opt/cray/pe/mpich/*/ofi/gnu/*/lib-abi-mpich/libmpi.so.*", "opt/amazon/openmpi*/lib*/libmpi.so.*"),
    "driver": ("usr/lib64/libcuda.so.1", f"usr/lib/{platform.machine()}-linux-gnu/libcuda.so.1"),
}


def _places(site: Site, host: Host) -> Iterator[HostFinding]:
    for place in site.host_stack.places:
        if not os.path.exists(place):
            hint = "correct the path; nodes of another kind need a site file of their own"
            yield missing("[host_stack]", f"{place} does not exist", on_site(site, host.variables), hint)


def _host_stack(host: Host) -> Iterator[str]:
    yield _said("mode", "image", "inject: jobs mount what is named here into containers, and ranks load it")
    for name, patterns in _VENDORS.items():
        paths = [path for pattern in patterns for path in sorted(host.root.glob(pattern))]
        tops = (path if name == "nccl_plugin" else path.parent for path in paths)
        places = list(dict.fromkeys(f"/{top.relative_to(host.root)}" for top in tops))
        if places:
            yield _said(name, places[-1], f"others: {', '.join(places[:-1])}"[:160] if places[:-1] else "")


def stack_inventory(site: Site) -> tuple[str, str]:
    """Return the file of the site's inventory of host libraries, and its text by this host; "" without [host_stack]."""
    table = site.host_stack
    places = [*table.places, *filter(None, [table.driver and f"{table.driver}/libcuda.so.1"])]
    return (table.inventory, json.dumps(inventory(places)) + "\n") if places else ("", "")
