"""Checks and probe programs: their input, their results, and their execution with time limits."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from envbuild.base.errors import EnvbuildError
from envbuild.base.masking import redact
from envbuild.base.workers import run_parallel
from envbuild.environment import Environment

Status = Literal["ok", "info", "warn", "fail"]
# Enough time for a healthy batch system or driver to answer.
PATIENCE_S = 3.0
_DEADLINE_S = 4.0


@dataclass(frozen=True, slots=True)
class HostFinding:
    """One result of a check.

    `status` is "ok", "info" (worth knowing), "warn" (a problem for some uses) or "fail" (blocks envbuild).
    `summary` is one line; `hint` is the advised change, or ""; `facts` holds the same data for programs (JSON).
    """

    name: str
    status: Status
    summary: str
    hint: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return the finding as a JSON object."""
        row = {"name": self.name, "status": self.status, "what": self.summary}
        return {**row, "remedy": self.hint, "facts": dict(self.facts)}


@dataclass(frozen=True, slots=True)
class Host:
    """Input of the checks: the host, with /proc, /sys and /etc below `root`.

    `variables` are the caller's. If site.toml or pip's configuration is unreadable, `problem` is the reason, `hint` the
    advised change, and `environment` has defaults or is None.
    """

    variables: Mapping[str, str]
    environment: Environment | None = None
    problem: str = ""
    hint: str = ""
    offline: bool = False
    root: Path = Path("/")


@dataclass(frozen=True, slots=True)
class HostProbe:
    """A check of this host. Its function may return or yield several findings, and may raise or hang."""

    area: str
    name: str
    run: Callable[[Host], Iterable[HostFinding]]


def run_checks(
    checks: Sequence[HostProbe], host: Host, deadline_s: float = _DEADLINE_S
) -> list[tuple[HostProbe, list[HostFinding]]]:
    """Run the checks and return each with its findings. A check that raises or is late gets a finding about that."""
    findings: list[list[HostFinding]] = [[] for _ in checks]
    ended: set[int] = set()

    def run(number: int) -> None:
        try:
            for finding in checks[number].run(host):
                findings[number].append(finding)
        except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
            findings[number].append(_crashed(checks[number].name, error))
        ended.add(number)

    run_parallel([partial(run, number) for number in range(len(checks))], deadline_s)
    text, hint = f"no answer in {deadline_s:g} s", "a server, file system or tool does not answer; look at it by hand"
    results = []
    for number, check in enumerate(checks):
        # In this order: a check may end while its findings are copied.
        late = [] if number in ended else [HostFinding(check.name, "warn", text, hint, {"timeout": True})]
        results.append((check, [*findings[number], *late]))
    return results


def facts_of(results: Sequence[tuple[HostProbe, Sequence[HostFinding]]]) -> Mapping[str, HostFinding]:
    """Return the findings by name, the first of several with the same name."""
    host_findings = [finding for _, findings in results for finding in findings]
    return {finding.name: finding for finding in reversed(host_findings)}


def _crashed(name: str, error: Exception) -> HostFinding:
    if isinstance(error, EnvbuildError):
        return HostFinding(name, "warn", redact(error.message.splitlines()[0]), error.hint or "")
    text = redact(str(error).splitlines()[0] if str(error) else "")
    problem = f"could not be checked: {type(error).__name__}{f': {text}' if text else ''}"
    return HostFinding(name, "warn", problem, "", {"crashed": True})


def find(program: str, variables: Mapping[str, str], more: str = "/usr/sbin:/sbin") -> str | None:
    """Return the path of `program` on PATH or in the folders `more`, or None."""
    return shutil.which(program, path=f"{variables.get('PATH') or os.defpath}:{more}")


def run_probe(
    command: Sequence[str], variables: Mapping[str, str], patience_s: float = PATIENCE_S
) -> tuple[int | None, str]:
    """Return (exit status, output) of `command`, or (None, reason) if it cannot run or takes more than `patience_s`."""
    # Charliecloud requires $USER, which containers often lack.
    env = {"USER": "user", **variables, "LC_ALL": "C"}
    try:
        child = subprocess.Popen(
            list(command),
            env=env,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        return None, error.strerror or str(error)
    except ValueError:  # a NUL in a variable or an argument
        return None, "cannot be run"
    try:
        out, _ = child.communicate(timeout=patience_s)
    except subprocess.TimeoutExpired:
        return None, f"no answer in {patience_s:g} s"
    finally:
        # Its child processes may keep the pipe open: kill them instead of waiting.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.5)
        if child.stdout is not None:
            with contextlib.suppress(OSError):
                child.stdout.close()
    return child.returncode, out.decode(errors="replace").strip()


def first_line(text: str, most: int = 160) -> str:
    """Return the first non-empty line of a program's output, without control characters, at most `most` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return "".join(c if c.isprintable() else "?" for c in line)[:most]


def read_text(path: Path) -> str:
    """Return the text of a file of the system, or "" if it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except (OSError, ValueError):
        return ""
