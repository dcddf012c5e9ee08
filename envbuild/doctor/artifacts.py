"""Verdicts on each kind of artifact on this host, derived from the findings of the checks. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envbuild.doctor.model import HostFinding, Status
from envbuild.kinds import ARTIFACTS, Artifact

STEPS = ("build", "verify", "run")
# Content of the store that replaces an unprobed source.
_HELD = {"package index": "wheels", "conda-forge": "conda packages", "Debian's archive": "image blobs"}
_LEAST_MEMORY = 1_500_000_000


@dataclass(frozen=True, slots=True)
class StepVerdict:
    """Verdict on one step of one kind of artifact on this host.

    `status` is `ok`, `info` (works under a condition), `warn` (works partly, or not on this host) or `fail`
    (does not work).
    """

    status: Status
    what: str
    hint: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the verdict as a JSON object."""
        return {"status": self.status, "what": self.what, "remedy": self.hint}


def judge(found: Mapping[str, HostFinding]) -> dict[str, dict[str, StepVerdict]]:
    """Return kind → step → verdict; `found` maps names to findings."""
    return {
        name: {"build": _build(kind, found), "verify": _verify(kind, found), "run": _run(kind, found)}
        for name, kind in ARTIFACTS.items()
    }


def _build(kind: Artifact, found: Mapping[str, HostFinding]) -> StepVerdict:
    for name in ("configuration", "authorities", "uv", "store", "tmp"):
        finding = found.get(name)
        if finding is not None and finding.status == "fail":
            return StepVerdict("fail", f"{name}: {finding.what}", finding.hint)
    if kind.by_uv and "uv" in found and not found["uv"].facts:
        return StepVerdict("fail", found["uv"].what, found["uv"].hint)
    missing = [m for m in _facts(found, "packages").get("missing", ()) if m in kind.imports]
    if missing:
        return StepVerdict("fail", f"envbuild lacks {', '.join(missing)}", found["packages"].hint)
    current = found.get("current folder")
    if current is not None and current.status == "fail":
        return StepVerdict("warn", f"not in the current folder: {current.what}", "use --out")
    lost = [name for name in kind.sources if _unreached(found, name)]
    if lost:
        hint = found[lost[0]].hint
        what = f"only from what the store holds: {' and '.join(lost)} cannot be reached"
        return StepVerdict("warn", what, hint)
    unasked = [name for name in kind.sources if _unasked(found, name)]
    if unasked:
        return _from_the_store(unasked, found)
    store = found.get("store")
    if store is not None and store.status == "warn":
        return StepVerdict("warn", f"store: {store.what}", store.hint)
    if kind.form == "folder" and current is not None and current.status == "warn":
        return StepVerdict("warn", f"current folder: {current.what}", current.hint)
    return StepVerdict("ok", "yes")


def _verify(kind: Artifact, found: Mapping[str, HostFinding]) -> StepVerdict:
    usable = _facts(found, "memory").get("usable")
    if usable is not None and usable < _LEAST_MEMORY:
        return StepVerdict("warn", f"too little memory: {found['memory'].what}", found["memory"].hint)
    only = "" if _facts(found, "GPU").get("gpus") else "; for CPUs only, there is no GPU"
    if kind.form == "registry":
        if not _facts(found, "docker daemon").get("answers"):
            hint = "start dockerd or set DOCKER_HOST; or --no-verify here and `envbuild verify` where one is"
            return StepVerdict("warn", "no: no docker daemon answers", hint)
        return StepVerdict("ok", f"yes{only}")
    if kind.form == "file":
        how = _launchers(kind, found)
        if not how:
            return _no_launch(kind, found)
        return StepVerdict("ok", f"by {how[0]}{only}")
    return StepVerdict("ok", f"yes{only}")


def _run(kind: Artifact, found: Mapping[str, HostFinding]) -> StepVerdict:
    where = _schedulers(found)
    jobs = f"; jobs by {' and '.join(where)}" if where else ""
    if kind.form == "folder":
        return StepVerdict("ok", f"yes{jobs}")
    if kind.form == "registry":
        engines = [name for name in ("docker", "podman") if _works(found, name)]
        if _facts(found, "docker daemon").get("answers"):
            engines = ["docker"]
        elif "docker" in engines:
            engines.remove("docker")
        if _facts(found, "Kubernetes").get("answers"):
            engines.append("Kubernetes")
        if engines:
            return StepVerdict("ok", f"by {', '.join(engines)}")
        return StepVerdict(
            "warn", "no: no engine for images", "push it (--push) and run it where one is, or build enroot or apptainer"
        )
    how = _launchers(kind, found)
    if "pyxis" in kind.containers and _facts(found, "pyxis").get("there"):
        how = ["pyxis", *how]
    if not how:
        return _no_launch(kind, found)
    return StepVerdict("ok", f"by {', '.join(how)}{jobs}")


def _no_launch(kind: Artifact, found: Mapping[str, HostFinding]) -> StepVerdict:
    finding = found.get("own launch")
    if finding is None or not finding.hint:
        return StepVerdict("warn", f"no: no {kind.name}, and our own launch was not tried", f"install {kind.name}")
    return StepVerdict("warn", f"no: no {kind.name}, and our own launch is forbidden", finding.hint)


def _launchers(kind: Artifact, found: Mapping[str, HostFinding]) -> list[str]:
    """Return the programs that start images of this kind on this host, best first."""
    how = [name for name in kind.starters if _works(found, name)]
    ways = _facts(found, "own launch").get("ways") or ()
    return how + [f"envbuild itself ({', '.join(ways)})"] * bool(ways)


def _schedulers(found: Mapping[str, HostFinding]) -> list[str]:
    here = ["Slurm"] if _facts(found, "Slurm").get("answers") else []
    return here + (["PBS"] if _facts(found, "PBS").get("queues") is not None else [])


def _unreached(found: Mapping[str, HostFinding], name: str) -> bool:
    facts = _facts(found, name)
    return bool(facts.get("asked")) and not facts.get("reached") and not facts.get("local")


def _unasked(found: Mapping[str, HostFinding], name: str) -> bool:
    facts = _facts(found, name)
    return facts.get("asked") is False and not facts.get("local")


def _from_the_store(unasked: Sequence[str], found: Mapping[str, HostFinding]) -> StepVerdict:
    """Return the verdict on a build whose sources were not probed, based on the contents of the store."""
    holds = _facts(found, "store").get("holds", {})
    empty = [_HELD[name] for name in unasked if not holds.get(_HELD[name])]
    not_asked = f"{' and '.join(unasked)} not asked"
    if empty:
        return StepVerdict(
            "warn",
            f"unknown: {not_asked}, and the store holds no {' and no '.join(empty)}",
            "run `envbuild doctor` without --offline; for a node without a network `envbuild bundle` collects all",
        )
    return StepVerdict("info", f"only from what the store holds: {not_asked}")


def _works(found: Mapping[str, HostFinding], name: str) -> bool:
    return bool(_facts(found, name).get("works"))


def _facts(found: Mapping[str, HostFinding], name: str) -> Mapping[str, Any]:
    return found[name].facts if name in found else {}
