"""The model of a verification: the artifact with its nodes, the settings, the results of checks, and the receipt."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, Protocol

from envbuild import __version__
from envbuild.base.errors import VerificationError
from envbuild.contract.receipt import BLOCKED, FAIL, FORMAT, NOT_TRIED, PASS
from envbuild.contract.state import State
from envbuild.contract.verification import VerifySettings
from envbuild.data import load_table
from envbuild.recipe.targets import Target

if TYPE_CHECKING:
    from envbuild.verify.survey import Survey

# Why a check was not tried.
_SHOWN = 5
OF_QUICK = "--verify quick leaves it out"
# A report of the trainer, as it wrote it (ddp_train/report.py).
Report = Mapping[str, Any]


class Agent(Protocol):
    """A running program on a node."""

    @property
    def returncode(self) -> int | None: ...

    def poll(self) -> int | None:
        """Return the exit code, None while the program runs."""


class Nodes(Protocol):
    """Simulated nodes; programs see their shared folder as `work`, and reach each other over `interface`."""

    @property
    def work(self) -> PurePath: ...

    @property
    def interface(self) -> str: ...

    def address(self, node: int) -> str:
        """Return the address by which other nodes reach `node`."""

    def free_port(self) -> int:
        """Return a free TCP port of node 0."""

    def share(self, files: Mapping[str, bytes]) -> None:
        """Write files, by their paths in `work`, which all nodes see."""

    def start(self, node: int, program: str, arguments: Sequence[str], extra: Mapping[str, str], log: Path) -> Agent:
        """Start a program of the artifact on a node, with `extra` variables; its output goes to this host's `log`."""

    def stop(self, agents: Sequence[Agent]) -> None:
        """Stop the agents that still run, with all their child processes."""

    def collect(self, into: Path) -> None:
        """Copy the files of `work` into the folder `into` on this host."""

    def kill_rank(self, run_id: str, rank: int) -> int | None:
        """Send SIGKILL to one rank of a torchrun job. Return its process ID, None without such a rank."""


@dataclass(frozen=True, slots=True)
class Subject:
    """An artifact and the operations that verification needs.

    `root` is the environment's folder as its own processes see it; `isolated` means that they see only the artifact (a
    container). `kind` is the artifact's kind in the receipt, if it differs from the state's. `runtime` names the
    program that runs it. `survey` reads its files within a time limit in seconds. `nodes` opens the nodes on which
    torchrun is started; it takes a work folder on this host, the number of nodes and the caller's environment.
    `manifest` is the sha256 of the manifest with which its files are compared, "" for none; `accept` is called when all
    checks passed.
    """

    root: Path
    state: State
    target: Target
    digest: str
    runtime: str
    survey: Callable[[float], Survey]
    nodes: Callable[[Path, int, Mapping[str, str]], AbstractContextManager[Nodes]]
    isolated: bool = False
    kind: str = ""
    manifest: str = ""
    accept: Callable[[], None] = lambda: None

    @property
    def roots(self) -> tuple[str, ...]:
        """The root as given and with symbolic links resolved: programs may report paths of either form."""
        given = os.fspath(self.root.absolute())
        return (given,) if self.isolated else (given, os.path.realpath(self.root))

    def relative(self, text: str) -> str:
        """Return `text` with paths relative to the artifact's root, independent of the artifact's location."""
        for root in self.roots:
            text = text.replace(root + os.sep, "").replace(root, ".")
        return text

    def holds(self, path: str) -> bool:
        """Return whether `path` lies inside the artifact; a symbolic link inside counts, whatever its target."""
        inside = tuple(root + os.sep for root in self.roots)
        return self.isolated or os.path.abspath(path).startswith(inside)


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; `cause` is the usual cause of a failure, `evidence` the data on which the result is
    based.

    `status` is "pass", "fail", "blocked" (not judged because the check named in `seen` failed) or "not tried" (`seen`
    says why).
    """

    name: str
    title: str
    status: str
    seen: str
    expected: str
    cause: str = ""
    evidence: dict[str, Any] = field(default_factory=dict)


def out_of_time(artifact: str, seconds: float) -> VerificationError:
    """Return the error for an artifact whose files could not be read within `seconds`."""
    return VerificationError(
        f"{artifact} could not be read within {seconds:g} s",
        "set `timeout_s` in [verify] of the recipe higher, or verify on a faster host",
    )


def check_texts() -> dict[str, dict[str, Any]]:
    """Return data/checks.toml: the title of each check, the usual cause of a failure, and the checks that it needs."""
    return load_table("checks")


def judge(
    name: str, good: bool, *, seen: str, expected: str, evidence: dict[str, Any], title: str = "", cause: str = ""
) -> Check:
    """Return a check that passes if `good`. `title` and `cause` override those of data/checks.toml."""
    texts = check_texts()[name.partition(":")[0]]
    if good:
        return Check(name, title or texts["title"], PASS, seen, expected, evidence=evidence)
    return Check(name, title or texts["title"], FAIL, seen, expected, cause or texts["cause"], evidence)


def listed(faults: list[str]) -> str:
    """Return the first of `faults`, and the number of further ones, for a message."""
    return "; ".join(faults[:_SHOWN]) + (f"; {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else "")


def blocked(name: str, by: str) -> Check:
    """Return a check that could not be judged because `by` failed."""
    return Check(name, check_texts()[name]["title"], BLOCKED, f"not judged: {by} failed", "")


def not_tried(name: str, why: str) -> Check:
    """Return a check that this verification does not make."""
    return Check(name, check_texts()[name]["title"], NOT_TRIED, f"not tried: {why}", "")


@dataclass(frozen=True, slots=True)
class Verdict:
    """The results of all checks, in order, and the figures of `performance`.

    `logs` is the folder of the nodes' logs, kept only after a failure.
    """

    checks: tuple[Check, ...]
    settings: VerifySettings
    seconds: float
    logs: Path | None
    performance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return all(check.status in (PASS, NOT_TRIED) for check in self.checks)


def make_receipt(subject: Subject, verdict: Verdict, path: Path | str) -> dict[str, Any]:
    """Return the receipt of `subject`, whose final path (or name, in a daemon) is `path`.

    It contains no environment variables except those that a fabric needs.
    """
    state, uname = subject.state, os.uname()
    versions = next((c.evidence for c in verdict.checks if c.name == "versions"), {})
    return {
        "format": FORMAT,
        "passed": verdict.passed,
        "artifact": {
            "kind": subject.kind or state.artifact,
            "path": os.fspath(path.absolute()) if isinstance(path, Path) else path,
            "digest": subject.digest,
            **({"manifest": subject.manifest} if subject.manifest else {}),
        },
        "recipe": {"name": state.recipe, "digest": state.recipe_digest},
        "lock": {"digest": state.lock_digest},
        "plan": {"digest": state.plan_digest},
        "target": state.target,
        "fabric": state.fabric,
        "packages": sorted(name for name, _, _ in state.packages),
        **({"project": state.project} if state.project else {}),
        **({"slim": state.slim} if state.slim else {}),
        "layers": [{"name": layer.name, "version": layer.version, "path": layer.path} for layer in state.layers],
        "runtime": subject.runtime,
        "settings": asdict(verdict.settings),
        "versions": {
            "envbuild": __version__,
            **{name: versions.get(name) for name in ("python", "torch", "torch_cuda")},
            **({"python_build": state.python_build} if state.python_build else {}),
            "nccl": state.nccl or None,
        },
        "host": {
            "name": uname.nodename,
            "kernel": uname.release,
            "arch": uname.machine,
            "libc": " ".join(platform.libc_ver()).strip(),
            "cpus": len(os.sched_getaffinity(0)),
            **({"processor": processor} if (processor := _processor()) else {}),
        },
        **({"performance": dict(verdict.performance)} if verdict.performance else {}),
        "verified_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(verdict.seconds, 3),
        "checks": [asdict(check) for check in verdict.checks],
    }


def _processor(path: Path = Path("/proc/cpuinfo")) -> str:
    """Return the model of the host's processor; "" if the kernel does not name it, as on most ARM machines."""
    with suppress(OSError), path.open(encoding="utf-8", errors="replace") as stream:
        return next((line.partition(":")[2].strip() for line in stream if line.startswith("model name")), "")
    return ""
