"""`tests/gpu/run --device cpu` from a bundle, without a network: the steps of the GPU run that CPUs can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from gpu.steps import STEPS

from .conftest import REPOSITORY, Command

# Of each step that a CPU can run, what it must come to.
VERDICTS = {
    "build": "pass",
    "facts": "pass",
    "two-ranks": "pass",
    "one-rank": "skipped",
    "plant-library": "pass",
    "bandwidth": "pass",
    "slim": "pass",
}
# `artifact` is the command `envbuild verify`, and `repeat` is `slim` without a copy of torch.
LEFT_OUT = {"artifact", "repeat"}


def test_the_steps_that_cpus_can_run_pass_without_a_network(bundle: tuple[Command, Path], tmp_path: Path) -> None:
    options = ["--device", "cpu", "--bundle", bundle[1], "--limit", "1500"]
    options += ["--steps", *(name for name in STEPS if name not in LEFT_OUT)]
    line = [REPOSITORY / "tests/gpu/run", *options, "--out", tmp_path / "report"]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *line],
        env={**os.environ, "PYTHON": os.path.realpath(sys.executable), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    report = json.loads((tmp_path / "report/report.json").read_text())
    rows = {row["name"]: row for row in report["steps"]}
    assert rows.keys() >= VERDICTS.keys(), done.stdout + done.stderr
    assert {name: rows[name]["verdict"] for name in VERDICTS} == VERDICTS, done.stdout + done.stderr
    assert all(row["seen"] == "needs a GPU" for name, row in rows.items() if name not in VERDICTS)
    assert done.returncode == 0
    assert rows["two-ranks"]["evidence"]["checks"]["restart"]["status"] == "pass"
    # The tried torch is the bundle's.
    assert report["machine"]["executable"] == str(tmp_path / "report/build/venv/bin/python")
