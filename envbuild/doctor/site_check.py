"""Checks of a site file against this host; values that only the nodes can confirm are reported as such."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path

from envbuild.base.errors import EnvbuildError
from envbuild.base.masking import redact
from envbuild.doctor import batch, connectivity, storage
from envbuild.doctor.batch import elsewhere, judge_scheduler, missing, on_site
from envbuild.doctor.probe import Host, HostFinding, HostProbe, find, first_line, run_checks, run_probe
from envbuild.doctor.site_rules import contradictions
from envbuild.doctor.tools import has_module
from envbuild.environment import Environment
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.site.settings import Site, load_site
from envbuild.store.remote_site import cache_of, open_remote
from envbuild.verify.model import check_texts

_MODULES_S = 8.0
_DEADLINE_S = 12.0


def check_site(
    name: str | None, variables: Mapping[str, str], environment: Environment | None, *, offline: bool = False
) -> list[HostFinding]:
    """Check the site called `name` (None: the effective one) and return the findings.

    They are mistakes in its files with positions, contradictions, and differences from this host. Raises
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
        HostProbe("site", "[mirrors]", partial(_mirrors, site)),
        HostProbe("site", "[trust]", lambda _: _trust(site)),
        HostProbe("site", "cache", partial(_cache, site)),
    ]
    results = run_checks(checks, Host(variables, environment, offline=offline), _DEADLINE_S)
    return [*findings, *(finding for _, found in results for finding in found)]


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


def _cache(site: Site, host: Host) -> Iterator[HostFinding]:
    url, mode = cache_of(site, host.variables)
    if not url:
        return
    if host.offline or host.environment is None:
        yield HostFinding("cache", "info", f"{url}: not asked" + (" (--offline)" if host.offline else ""))
        return
    try:
        remote = open_remote(site, host.environment.pip, host.variables, host.environment.store)
        assert remote is not None
        count = len(remote.registry.tags())
        yield HostFinding("cache", "ok", f"{url} ({mode}): {count} entries")
    except EnvbuildError as error:
        hint = error.hint or "builds go on without it; see docs/howto/cache.md"
        yield HostFinding("cache", "warn", f"{url}: {error.message}", hint)


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
        code, said = run_probe([bash, "-c", f"{start}{purge}module load {shlex.join(names)}"], variables, _MODULES_S)
        # Old versions of Environment Modules report an error and exit with 0.
        if code != 0 or "ERROR" in said or "Unable to locate" in said:
            what = f"{' '.join(names)}: {_why(said)}"
            yield missing(f"[modules] {key}", what, here, "module avail, or module spider NAME")
        else:
            yield HostFinding(f"[modules] {key}", "ok", f"{' '.join(names)} can be loaded")


def _why(said: str) -> str:
    lines = [line.strip() for line in said.splitlines()]
    told = [line for line in lines if "nable to locate" in line or "unknown" in line or "ERROR" in line]
    return first_line("\n".join(told or lines)) or "cannot be loaded"


def _paths(site: Site, host: Host) -> Iterator[HostFinding]:
    here = on_site(site, host.variables)
    home = os.path.realpath(host.variables.get("HOME") or "/nonexistent")
    texts = {"shared": site.paths.shared, "scratch": site.paths.scratch, "cache": site.paths.cache}
    for key, path in ((key, Path(text)) for key, text in texts.items() if text):
        name = f"[paths] {key}"
        there = next((one for one in (path, path.parent) if one.is_dir()), None)
        needed = here and key != "scratch"  # a login node may lack the nodes' scratch disk
        if there is None:
            what = f"neither {path} nor {path.parent} exists"
            yield missing(name, what, needed, "correct the path, or have it made")
            continue
        if not os.access(there, os.W_OK | os.X_OK):
            what = f"{there} cannot be written by this user"
            yield missing(name, what, needed, "another folder, or another mode")
            continue
        mount = storage.mount_at(there)
        kind = mount.kind if mount else "unknown file system"
        if key == "shared" and mount and not mount.shared and site.scheduler.kind != "none":
            what = f"{path} lies on {kind}, a file system that only this host has"
            hint = "right only if it is exported to the nodes; `envbuild preflight` on nodes tells"
            yield HostFinding(name, "warn", what, hint)
        elif key == "cache" and f"{os.path.realpath(path)}/".startswith(f"{home}/"):
            what = f"{path} is in the home folder, where quotas are small"
            yield HostFinding(name, "warn", what, "a folder on scratch")
        else:
            yield HostFinding(name, "ok", f"{path} ({kind})" + ("" if there == path else ", to be made"))


def _container(site: Site, host: Host) -> Iterator[HostFinding]:
    runtime, here, name = site.container.runtime, on_site(site, host.variables), "[container] runtime"
    if runtime == "pyxis":
        found = batch.has_pyxis(host.variables)
        if found is None:
            yield elsewhere(name, "no srun on this host")
        elif found:
            yield HostFinding(name, "ok", "srun has --container-image")
            scope = batch.pyxis_scope(host.variables)
            if scope != "job":
                state = f"container_scope={scope}" if scope else "its container_scope is not visible on this host"
                what = f"pyxis: {state}; a cancelled job's containers stay until a later job of its user removes them"
                yield HostFinding(
                    name, "info", what, "ask for container_scope=job in plugstack.conf: Slurm removes them"
                )
        else:
            what, hint = "srun has no --container-image, so no pyxis", 'runtime = "enroot", "apptainer" or "none"'
            yield missing(name, what, here, hint)
    elif runtime != "none":
        path = find(runtime, host.variables)
        what = path or f"{runtime} is not on this host; nodes must have it"
        yield HostFinding(name, "ok" if path else "info", what)
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
            what = f"{name!r}: a name is wanted, not NCCL's patterns"
            yield HostFinding(key, "fail", what, f"one of this host: {listed}")
        elif name == "lo":
            yield HostFinding(key, "fail", "lo leads to no other node", f"this host has {listed}")
        elif name in known:
            yield HostFinding(key, "ok", name)
        else:
            what = f"{name} is not on this host, which has {listed}; nodes must have it"
            yield HostFinding(key, "info", what, "envbuild preflight on the nodes tells")


def _mirrors(site: Site, host: Host) -> Iterator[HostFinding]:
    rows: list[tuple[str, connectivity.Probe]] = []
    for url, mirrors in site.mirrors.items():
        page = "torch/" if "/whl" in url or "/simple" in url else ""
        rows += [(f"[mirrors] {redact(url)}", connectivity.Probe(mirror, page)) for mirror in mirrors]
    rows += [(f"[indexes] {name}", connectivity.Probe(url, "")) for name, url in site.indexes.items()]
    for name, table in site.registries.items():
        rows += [(f"[registries] {name}", connectivity.Probe(m, "v2/", True)) for m in table.mirrors]
    if site.debian.mirror:
        rows.append(("[debian] mirror", connectivity.Probe(site.debian.mirror, "dists/")))
    if not rows:
        return
    if host.offline or host.environment is None:
        yield HostFinding("[mirrors]", "info", "not asked" + (" (--offline)" if host.offline else ""))
        return
    answers = connectivity.ask_all([probe for _, probe in rows], host.environment)
    for (name, probe), answer in zip(rows, answers, strict=True):
        # A server without this page is reachable all the same.
        if answer is None or answer.startswith("it answers"):
            yield HostFinding(name, "ok", redact(probe.url))
        else:
            hint = "correct or remove it; it is tried first"
            yield HostFinding(name, "fail", f"{redact(probe.url)}: {answer}", hint)
