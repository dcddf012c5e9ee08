"""Fault injection: kill a rank during training and check that the job resumes from its snapshot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from envbuild.verify.launch import Outcome, Running, TrainingJob
from envbuild.verify.model import Check, judge

RESTART_TITLE = "a killed rank: restart and finish from the snapshot"
_SAVED = re.compile(r"Epoch (\d+) \| Training snapshot saved")


@dataclass(slots=True)
class Killer:
    """A poll callback that sends SIGKILL to rank `rank` once the log shows `after` saved snapshots."""

    rank: int
    after: int = 2
    killed: dict[str, Any] = field(default_factory=dict)

    def __call__(self, running: Running) -> None:
        if self.killed:
            return
        saved = [int(epoch) for epoch in _SAVED.findall(running.log())]
        if len(saved) < self.after:
            return
        pid = running.nodes.kill_rank(running.run_id, self.rank)
        if pid is not None:
            self.killed = {"rank": self.rank, "pid": pid, "after_epoch": saved[-1]}


def check_restart(
    job: TrainingJob, outcome: Outcome, killed: Mapping[str, Any], reference: Sequence[float], tolerance: float
) -> Check:
    """Check that the killed job restarted, resumed from a snapshot and finished on the undisturbed loss curve."""
    report = outcome.reports[0] if outcome.reports else {}
    start = report.get("start_epoch", 0)
    losses = [float(entry["loss"]) for entry in report.get("losses", [])]
    total = len(reference)
    expected = list(reference[start:])
    close = len(losses) == len(expected) and all(
        abs(a - b) <= tolerance * max(abs(b), 1e-12) for a, b in zip(losses, expected, strict=True)
    )
    good = bool(killed) and outcome.finished and bool(report.get("resumed_from")) and 0 < start < total and close
    if not killed:
        seen = f"the job ended before a rank could be killed: exit codes {outcome.returncodes}"
    elif not outcome.finished:
        seen = f"rank {killed['rank']} killed; exit codes {outcome.returncodes}, no recovery"
    else:
        seen = (
            f"rank {killed['rank']} killed after epoch {killed['after_epoch']}; resumed at epoch {start} of "
            f"{total}, {len(losses)} epochs run, curve {'as undisturbed' if close else 'differs'}"
        )
    return judge(
        "restart",
        RESTART_TITLE,
        good,
        seen=seen,
        expected=f"restarted, resumed from the snapshot, finished epoch {total - 1} on the undisturbed curve",
        cause="agents and ranks share the rendezvous store (set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1), "
        "--max-restarts is 0, or the snapshot lies where other nodes do not see it",
        evidence={
            "killed": dict(killed),
            "start_epoch": start,
            "losses": losses,
            "returncodes": outcome.returncodes,
            "max_restarts": job.max_restarts,
            "seconds": round(outcome.seconds, 3),
        },
    )
