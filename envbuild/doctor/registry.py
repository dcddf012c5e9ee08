"""All checks of the doctor, in the order of the report, and the verdicts on artifacts that follow from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from envbuild.base.errors import EnvbuildError
from envbuild.base.masking import redact
from envbuild.contract.kinds import ARTIFACTS, Artifact
from envbuild.data.schedulers import TITLES
from envbuild.doctor import batch, machine, network, tools
from envbuild.doctor.probe import Host, HostFinding, HostProbe, Status
from envbuild.environment import Environment
from envbuild.run_environment import load_environment
from envbuild.runtimes import starting
from envbuild.site.pip_config import PipConfig
from envbuild.site.settings import Site
from envbuild.store.store import Store

# Schedulers with checks of more than their version and queues.
_OWN_CHECKS = {"slurm": batch.slurm, "kubernetes": batch.kubernetes}

# Content of the store that replaces an unprobed source.
_HELD = {"package index": "wheels", "conda-forge": "conda packages", "Debian's archive": "image blobs"}
_LEAST_MEMORY = 1_500_000_000

_AREAS: dict[str, dict[str, Callable[[Host], Iterable[HostFinding]]]] = {
    "envbuild": {
        "envbuild": tools.envbuild_itself,
        "configuration": tools.configuration,
        "uv": tools.uv,
        "Pythons": tools.pythons,
    },
    "tools": {"programs": tools.programs, "modules": tools.modules, "docker daemon": batch.docker_daemon},
    "kernel": {"own launch": machine.launching, "/dev/fuse": machine.fuse, "subuid": machine.subordinate_ids},
    "machine": {
        "user": machine.who,
        "processors": machine.processors,
        "memory": machine.memory,
        "/dev/shm": machine.shared_memory,
        "GPU": machine.gpus,
        "clock": machine.clock,
        "locale": machine.locale,
    },
    "file systems": {
        "store": machine.store,
        "home": machine.home,
        "tmp": machine.temporary,
        "current folder": machine.current,
    },
    "network": {
        "own name": machine.own_name,
        "interfaces": network.network,
        "adapters": network.adapters,
        "libfabric": network.libfabric,
    },
    "jobs": {title: _OWN_CHECKS.get(name) or partial(batch.scheduler, name) for name, title in TITLES.items()},
    "sources": {
        "proxies": network.proxies,
        "authorities": network.certificates,
        "package index": network.package_index,
        "recipes' sources": network.sources,
    },
}
CHECKS = tuple(HostProbe(area, name, run) for area, checks in _AREAS.items() for name, run in checks.items())


def this_host(variables: Mapping[str, str], *, offline: bool = False) -> Host:
    """Return the host as input of the checks, even if its site.toml or pip's configuration is faulty."""
    try:
        return Host(variables, load_environment(variables), offline=offline)
    except EnvbuildError as error:
        problem, hint = redact(error.message), error.hint or ""
    except (OSError, RuntimeError) as error:  # Path.home() raises RuntimeError without a home
        problem, hint = f"{type(error).__name__}: {error}", "set HOME to a folder of yours"
    # Defaults, so that the other checks can run.
    fallback = Path(variables.get("ENVBUILD_STORE") or "/nonexistent/envbuild")
    environment = Environment(variables, Site(store=fallback), PipConfig(), Store(fallback))
    return Host(variables, environment if "ENVBUILD_STORE" in variables else None, problem, hint, offline)


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """Verdict on one step of one kind: `ok`, `info` (on a condition), `warn` (partly, not on this host), `fail`."""

    status: Status
    summary: str
    hint: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the verdict as a JSON object."""
        return {"status": self.status, "what": self.summary, "remedy": self.hint}


def judge(findings: Mapping[str, HostFinding]) -> dict[str, dict[str, StepVerdict]]:
    """Return kind → step → verdict; `findings` maps names to findings."""
    return {
        name: {"build": _build(kind, findings), "verify": _verify(kind, findings), "run": _run(kind, findings)}
        for name, kind in ARTIFACTS.items()
    }


def _build(kind: Artifact, findings: Mapping[str, HostFinding]) -> StepVerdict:
    for name in ("configuration", "authorities", "uv", "store", "tmp"):
        finding = findings.get(name)
        if finding is not None and finding.status == "fail":
            return StepVerdict("fail", f"{name}: {finding.summary}", finding.hint)
    if kind.by_uv and "uv" in findings and not findings["uv"].facts:
        return StepVerdict("fail", findings["uv"].summary, findings["uv"].hint)
    pythons = findings.get("Pythons") if kind.by_uv and kind.form == "folder" else None
    if pythons is not None and pythons.status == "fail":
        return StepVerdict("fail", pythons.summary, pythons.hint)
    missing = [m for m in _facts(findings, "packages").get("missing", ()) if m in kind.imports]
    if missing:
        return StepVerdict("fail", f"envbuild lacks {', '.join(missing)}", findings["packages"].hint)
    current, store = findings.get("current folder"), findings.get("store")
    if current is not None and current.status == "fail":
        return StepVerdict("warn", f"not in the current folder: {current.summary}", "use --out")
    remote = {name: _facts(findings, name) for name in kind.sources if not _facts(findings, name).get("local")}
    if lost := [name for name, facts in remote.items() if _is_lost(facts)]:
        text = f"only from what the store holds: {' and '.join(lost)} cannot be reached"
        return StepVerdict("warn", text, findings[lost[0]].hint)
    if unasked := [name for name, facts in remote.items() if facts.get("asked") is False]:
        return _from_the_store(unasked, findings)
    if store is not None and store.status == "warn":
        return StepVerdict("warn", f"store: {store.summary}", store.hint)
    if kind.form == "folder" and current is not None and current.status == "warn":
        return StepVerdict("warn", f"current folder: {current.summary}", current.hint)
    return StepVerdict("ok", "yes") if pythons is None else _with_python(pythons)


def _with_python(pythons: HostFinding) -> StepVerdict:
    """Return the verdict on a virtual environment, for which only its Python may be missing."""
    here, offered, lacking = (", ".join(pythons.facts.get(key, ())) for key in ("here", "downloads", "lacking"))
    ways = [f"this host's Python {here}"] if here else []
    ways += [f"Python {offered}, which uv downloads" if not here else f"{offered} by download"] if offered else []
    if not ways:
        return StepVerdict("ok", "yes")  # the check did not end in time
    return StepVerdict("info" if lacking else "ok", f"{'only' if lacking else 'yes,'} with {'; '.join(ways)}")


def _is_lost(facts: Mapping[str, Any]) -> bool:
    """Return whether a probed source did not answer, or its check did not end in time."""
    return bool(facts.get("timeout") or (facts.get("asked") and not facts.get("reached")))


def _from_the_store(unasked: Sequence[str], findings: Mapping[str, HostFinding]) -> StepVerdict:
    """Return the verdict on a build whose sources were not probed, based on the contents of the store."""
    holds = _facts(findings, "store").get("holds", {})
    empty = [_HELD[name] for name in unasked if not holds.get(_HELD[name])]
    not_asked = f"{' and '.join(unasked)} not asked"
    if not empty:
        return StepVerdict("info", f"only from what the store holds: {not_asked}")
    text = f"unknown: {not_asked}, and the store holds no {' and no '.join(empty)}"
    hint = "run `envbuild doctor` without --offline; for a node without a network `envbuild bundle` collects all"
    return StepVerdict("warn", text, hint)


def _verify(kind: Artifact, findings: Mapping[str, HostFinding]) -> StepVerdict:
    usable = _facts(findings, "memory").get("usable")
    if usable is not None and usable < _LEAST_MEMORY:
        return StepVerdict("warn", f"too little memory: {findings['memory'].summary}", findings["memory"].hint)
    only = "" if _facts(findings, "GPU").get("gpus") else "; for CPUs only, there is no GPU"
    if kind.form == "registry" and not _facts(findings, "docker daemon").get("answers"):
        hint = "start dockerd or set DOCKER_HOST; or --no-verify here and `envbuild verify` where one is"
        return StepVerdict("warn", "no: no docker daemon answers", hint)
    if kind.form != "file":
        return StepVerdict("ok", f"yes{only}")
    how = _launchers(kind, findings)
    return StepVerdict("ok", f"by {how[0]}{only}") if how else _no_launch(kind, findings)


def _run(kind: Artifact, findings: Mapping[str, HostFinding]) -> StepVerdict:
    where = ["Slurm"] if _facts(findings, "Slurm").get("answers") else []
    where += ["PBS"] if _facts(findings, "PBS").get("queues") is not None else []
    jobs = f"; jobs by {' and '.join(where)}" if where else ""
    if kind.form == "folder":
        return StepVerdict("ok", f"yes{jobs}")
    if kind.form == "registry":
        if _facts(findings, "docker daemon").get("answers"):
            engines = ["docker"]
        else:
            engines = ["podman"] if _facts(findings, "podman").get("works") else []
        engines += ["Kubernetes"] if _facts(findings, "Kubernetes").get("answers") else []
        if engines:
            return StepVerdict("ok", f"by {', '.join(engines)}")
        hint = "push it (--push) and run it where one is, or build enroot or apptainer"
        return StepVerdict("warn", "no: no engine for images", hint)
    how = _launchers(kind, findings)
    plugins = [name for name, runtime in starting(kind.name).items() if runtime.launcher]
    how = [*(name for name in plugins if _facts(findings, name).get("there")), *how]
    return StepVerdict("ok", f"by {', '.join(how)}{jobs}") if how else _no_launch(kind, findings)


def _no_launch(kind: Artifact, findings: Mapping[str, HostFinding]) -> StepVerdict:
    finding = findings.get("own launch")
    if finding is None or not finding.hint:
        return StepVerdict("warn", f"no: no {kind.name}, and our own launch was not tried", f"install {kind.name}")
    return StepVerdict("warn", f"no: no {kind.name}, and our own launch is forbidden", finding.hint)


def _launchers(kind: Artifact, findings: Mapping[str, HostFinding]) -> list[str]:
    """Return the programs that start images of this kind on this host, best first."""
    hosts = [runtime.host for runtime in starting(kind.name).values() if runtime.host]
    programs = [name for host in hosts if kind.name in host.kinds for name in host.programs]
    how = [name for name in programs if _facts(findings, name).get("works")]
    ways = _facts(findings, "own launch").get("ways")
    return [*how, f"envbuild itself ({', '.join(ways)})"] if ways else how


def _facts(findings: Mapping[str, HostFinding], name: str) -> Mapping[str, Any]:
    return findings[name].facts if name in findings else {}
