"""A training under srun that is told to end: SIGURG to all processes of the step is one SIGTERM to the training."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
from unit.job_plans import PLAN

from envbuild.jobs.ending import orderly_shutdown
from envbuild.jobs.schedulers.slurm import SLURM

# What holds the image beside it (squashfuse) ends at SIGTERM, and then the training cannot save its state.
_TRAINING = """\
exec 2>>"$ENVBUILD_RUN/err"
trap 'told=yes; echo told >>"$ENVBUILD_RUN/log"' TERM
told=
echo begun >>"$ENVBUILD_RUN/log"
while [ -z "$told" ]; do sleep 0.1; done
sleep 0.5
exit 7
"""


def _start(run: Path, nodes: int) -> subprocess.Popen[bytes]:
    (run / "training.sh").write_text(_TRAINING)
    begin = 'exec sh "$ENVBUILD_RUN/training.sh"\n'
    text = orderly_shutdown(replace(PLAN, nodes=nodes, nproc_per_node=1), SLURM.launchers["srun"], begin)
    return subprocess.Popen(
        ["sh", "-c", f"set -eu\nstep=training number=1 restarts=0\n{text}"],
        env={"PATH": os.environ["PATH"], "ENVBUILD_RUN": str(run)},
        start_new_session=True,
    )


def _until(path: Path, text: str) -> None:
    deadline = time.monotonic() + 20
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, "the training did not begin"
        time.sleep(0.02)


@pytest.mark.parametrize(("nodes", "code", "left"), [(2, 0, "7\n"), (1, 7, None)])
def test_a_step_that_is_told_twice_tells_the_training_once(
    tmp_path: Path, nodes: int, code: int, left: str | None
) -> None:
    node = _start(tmp_path, nodes)
    _until(tmp_path / "log", "begun")
    for _ in range(2):  # as Slurm does: every process
        os.killpg(node.pid, signal.SIGURG)
        time.sleep(0.2)
    assert node.wait(20) == code
    assert (tmp_path / "log").read_text() == "begun\ntold\n"
    ended = tmp_path / "ended-0.1"
    assert (ended.read_text() if ended.exists() else None) == left


def test_a_node_whose_container_starts_after_the_signal_ends_too(tmp_path: Path) -> None:
    (tmp_path / "told-0").touch()
    assert _start(tmp_path, 2).wait(20) == 0
    assert (tmp_path / "ended-0.1").read_text().strip() in ("7", "143")  # before or after its trap


def test_slurms_own_sigterm_reaches_the_training_by_itself(tmp_path: Path) -> None:
    node = _start(tmp_path, 2)
    _until(tmp_path / "log", "begun")
    os.killpg(node.pid, signal.SIGTERM)
    assert node.wait(20) == 0
    assert (tmp_path / "log").read_text() == "begun\ntold\n"
    assert (tmp_path / "ended-0.1").read_text() == "7\n"
