"""Execution of checks: in parallel, isolated from each other, with a common deadline."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from envbuild.doctor.model import Host, HostFinding, HostProbe

DEADLINE_S = 4.0


@dataclass(slots=True)
class _Answer:
    findings: list[HostFinding]
    done: bool = False


def run_checks(
    checks: Sequence[HostProbe], host: Host, deadline_s: float = DEADLINE_S
) -> list[tuple[HostProbe, list[HostFinding]]]:
    """Run the checks and return each with its findings, in order.

    A check that raises, or has not ended after `deadline_s` seconds, gets an additional finding that says so.
    """
    answers = [_Answer([]) for _ in checks]

    def run(check: HostProbe, answer: _Answer) -> None:
        try:
            for finding in check.run(host):
                answer.findings.append(finding)
        except Exception as error:  # noqa: BLE001 - one broken check must not hide the others
            answer.findings.append(_crashed(check, error))
        answer.done = True

    jobs = [partial(run, *pair) for pair in zip(checks, answers, strict=True)]
    run_parallel(jobs, deadline_s)
    results = []
    for check, answer in zip(checks, answers, strict=True):
        found = list(answer.findings)
        if not answer.done:
            what = f"no answer in {deadline_s:g} s"
            hint = "a server, file system or tool does not answer; look at it by hand"
            found.append(HostFinding(check.name, "warn", what, hint, {"timeout": True}))
        results.append((check, found))
    return results


def run_parallel(jobs: Sequence[Callable[[], None]], deadline_s: float) -> None:
    """Run all of `jobs` in parallel; return when they are done, or after `deadline_s` seconds.

    The threads are daemons: one that hangs in a system call must not prevent the process from exiting.
    Exceptions of jobs are suppressed; a missing result shows the failure.
    """
    end = time.monotonic() + deadline_s

    def quietly(job: Callable[[], None]) -> None:
        with contextlib.suppress(Exception):
            job()

    threads = [threading.Thread(target=quietly, args=(job,), daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def facts_of(results: Sequence[tuple[HostProbe, Sequence[HostFinding]]]) -> Mapping[str, HostFinding]:
    """Return the findings by name; the first of several with one name."""
    found: dict[str, HostFinding] = {}
    for _, findings in results:
        for finding in findings:
            found.setdefault(finding.name, finding)
    return found


def _crashed(check: HostProbe, error: Exception) -> HostFinding:
    from envbuild.errors import EnvbuildError
    from envbuild.site.pip_config import redact

    if isinstance(error, EnvbuildError):
        return HostFinding(check.name, "warn", redact(error.message.splitlines()[0]), error.hint or "")
    text = redact(str(error).splitlines()[0] if str(error) else "")
    what = f"could not be checked: {type(error).__name__}{f': {text}' if text else ''}"
    return HostFinding(check.name, "warn", what, "", {"crashed": True})
