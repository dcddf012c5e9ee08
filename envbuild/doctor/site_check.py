"""Checks of a site file against this host; values that only the nodes can confirm are reported as such."""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from envbuild.doctor import batch, connectivity, storage
from envbuild.doctor.probe import Host, HostFinding, HostProbe, find, first_line, run_checks, run_probe
from envbuild.doctor.site_rules import contradictions
from envbuild.doctor.site_scheduler import elsewhere, judge_scheduler, missing, on_site
from envbuild.environment import Environment
from envbuild.errors import EnvbuildError
from envbuild.jobs.schedulers import SCHEDULERS
from envbuild.site.pip_config import redact
from envbuild.site.settings import Site, SiteFile, load_site
from envbuild.toml import decode, read

_MODULES_S = 8.0
_DEADLINE_S = 12.0


def check_site(
    name: str | None, variables: Mapping[str, str], environment: Environment | None, *, offline: bool = False
) -> list[HostFinding]:  # fmt: skip
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
    host = Host(variables, environment, offline=offline)
    checks = [
        HostProbe("site", "[scheduler]", lambda _: judge_scheduler(site, variables)),
        HostProbe("site", "[modules]", lambda _: _modules(site, variables)),
        HostProbe("site", "[paths]", lambda _: _paths(site, variables)),
        HostProbe("site", "[container]", lambda _: _container(site, variables)),
        HostProbe("site", "[fabric]", lambda _: _interface(site)),
        HostProbe("site", "[mirrors]", lambda h: _mirrors(site, h)),
    ]
    for _, found in run_checks(checks, host, _DEADLINE_S):
        findings += found
    return findings


def _modules(site: Site, variables: Mapping[str, str]) -> Iterator[HostFinding]:
    table = site.modules
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
    code, said = run_probe([bash, "-c", f"{start}type -t module"], variables, _MODULES_S)
    if code != 0 or "function" not in said.split():
        hint = 'init = "…", the file that defines it (`envbuild doctor` finds it)'
        yield missing("[modules]", "a batch shell has no `module`", here, hint)
        return
    purge = "module purge || exit 3; " if table.purge else ""
    for key, names in (("run", table.run), ("build", table.build)):
        if not names or (key == "build" and names == table.run):
            continue
        code, said = run_probe([bash, "-c", f"{start}{purge}module load {shlex.join(names)}"], variables, _MODULES_S)
        # Old versions of Environment Modules report an error and exit with 0.
        wrong = code != 0 or "ERROR" in said or "Unable to locate" in said
        if wrong:
            yield missing(
                f"[modules] {key}", f"{' '.join(names)}: {_why(said)}", here, "module avail, or module spider NAME"
            )
        else:
            yield HostFinding(f"[modules] {key}", "ok", f"{' '.join(names)} can be loaded")


def _why(said: str) -> str:
    lines = [line.strip() for line in said.splitlines()]
    told = [line for line in lines if "nable to locate" in line or "unknown" in line or "ERROR" in line]
    return first_line("\n".join(told or lines)) or "cannot be loaded"


def _paths(site: Site, variables: Mapping[str, str]) -> Iterator[HostFinding]:
    here = on_site(site, variables)
    home = os.path.realpath(variables.get("HOME") or "/nonexistent")
    for key in ("shared", "scratch", "cache"):
        text = getattr(site.paths, key)
        if not text:
            continue
        path, name = Path(text), f"[paths] {key}"
        there = next((one for one in (path, path.parent) if one.is_dir()), None)
        if there is None:
            # A login node may lack the nodes' scratch disk.
            yield missing(
                name,
                f"neither {path} nor {path.parent} exists",
                here and key != "scratch",
                "correct the path, or have it made",
            )
            continue
        if not os.access(there, os.W_OK | os.X_OK):
            yield missing(
                name,
                f"{there} cannot be written by this user",
                here and key != "scratch",
                "another folder, or another mode",
            )
            continue
        mount = storage.mount_at(there)
        if key == "shared" and mount and not mount.shared and site.scheduler.kind != "none":
            hint = "right only if it is exported to the nodes; `envbuild preflight` on nodes tells"
            yield HostFinding(name, "warn", f"{path} lies on {mount.kind}, a file system that only this host has", hint)
        elif key == "cache" and (os.path.realpath(path) + "/").startswith(home + "/"):
            yield HostFinding(
                name, "warn", f"{path} is in the home folder, where quotas are small", "a folder on scratch"
            )
        else:
            kind = mount.kind if mount else "unknown file system"
            yield HostFinding(name, "ok", f"{path} ({kind})" + ("" if there == path else ", to be made"))


def _container(site: Site, variables: Mapping[str, str]) -> Iterator[HostFinding]:
    runtime, here = site.container.runtime, on_site(site, variables)
    if runtime == "pyxis":
        found = batch.has_pyxis(variables)
        if found is None:
            yield elsewhere("[container] runtime", "no srun on this host")
        elif found:
            yield HostFinding("[container] runtime", "ok", "srun has --container-image")
        else:
            what = "srun has no --container-image, so no pyxis"
            hint = 'runtime = "enroot", "apptainer" or "none"'
            yield missing("[container] runtime", what, here, hint)
    elif runtime != "none":
        path = find(runtime, variables)
        if path:
            yield HostFinding("[container] runtime", "ok", path)
        else:
            yield HostFinding("[container] runtime", "info", f"{runtime} is not on this host; nodes must have it")
    for mount in site.container.mounts:
        source = mount.split(":")[0]
        if not Path(source).exists():
            yield missing(
                "[container] mounts",
                f"{source} does not exist",
                here,
                "nodes must have it, or the container is not started",
            )


def _interface(site: Site) -> Iterator[HostFinding]:
    scheduler = SCHEDULERS.get(site.scheduler.kind)
    if not site.fabric.interface or (scheduler and scheduler.pods):
        return
    known = [name for _, name in socket.if_nameindex()]
    for name in site.fabric.interface.split(","):
        if name.startswith(("^", "=")):
            yield HostFinding(
                "[fabric] interface",
                "fail",
                f"{name!r}: a name is wanted, not NCCL's patterns",
                f"one of this host: {', '.join(known)}",
            )
        elif name == "lo":
            yield HostFinding(
                "[fabric] interface", "fail", "lo leads to no other node", f"this host has {', '.join(known)}"
            )
        elif name not in known:
            what = f"{name} is not on this host, which has {', '.join(known)}; nodes must have it"
            yield HostFinding("[fabric] interface", "info", what, "envbuild preflight on the nodes tells")
        else:
            yield HostFinding("[fabric] interface", "ok", name)


def _mirrors(site: Site, host: Host) -> Iterator[HostFinding]:
    rows: list[tuple[str, connectivity.Probe]] = []
    for file in site.files:
        settings = decode(read(file), SiteFile)
        for url, mirrors in settings.mirrors.items():
            page = "torch/" if "/whl" in url or "/simple" in url else ""
            rows += [(f"[mirrors] {redact(url)}", connectivity.Probe(mirror, page)) for mirror in mirrors]
        for name, table in settings.registries.items():
            rows += [(f"[registries] {name}", connectivity.Probe(m, "v2/", True)) for m in table.mirrors]
        if settings.debian.mirror:
            rows.append(("[debian] mirror", connectivity.Probe(settings.debian.mirror, "dists/")))
    if not rows:
        return
    if host.offline or host.environment is None:
        yield HostFinding("[mirrors]", "info", "not asked" + (" (--offline)" if host.offline else ""))
        return
    answers = connectivity.ask_all([probe for _, probe in rows], host.environment)
    for (name, probe), answer in zip(rows, answers, strict=True):
        # A server without this page is reachable all the same.
        good = answer is None or answer.startswith("it answers")
        what = redact(probe.url) + ("" if good else f": {answer}")
        yield HostFinding(
            name, "ok" if good else "fail", what, "" if good else "correct or remove it; it is tried first"
        )
