"""`[slim]`: a real image without headers, tests and debug sections trains as the full one; chips are asked for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from .conftest import FILES_ONLY, REPOSITORY, Command

SLIM = '\n[slim]\ngpus = true\ndebug = true\nfiles = ["include", "static", "tests"]\n'
TRAIN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
TRAIN += ["-m", "ddp_train", "3", "3", "--model", "cnn", "--backend", "gloo", "--dataset_size", "512"]


def trained(folder: Path, *line: str | Path, env: dict[str, str]) -> list[Any]:
    """Train by the command `line`; return the losses and the digest of all parameters."""
    made = [*TRAIN, "--report", str(folder / "report.json"), "--checkpoint_path", str(folder / "snapshot.pt")]
    done = subprocess.run([*line, *made], cwd=folder, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads((folder / "report.json").read_text())
    return [[one["loss"] for one in report["losses"]], report["ranks"][0]["parameters_digest"]]


def test_a_slim_image_is_verified_and_trains_bit_equal_to_the_full_environment(
    envbuild: Command, pt_cpu: dict[str, Any], tmp_path: Path
) -> None:
    recipe = tmp_path / "recipes/pt_cpu"
    shutil.copytree(REPOSITORY / "recipes/pt_cpu", recipe)
    with (recipe / "recipe.toml").open("a") as stream:
        stream.write(f'{SLIM}{FILES_ONLY}imports_except = ["*"]\n')
    line = ("enroot", "pt_cpu", "--locked", "--no-bytecode", "--out", "slim.sqsh")
    made = envbuild.json(*line)
    receipt = json.loads(Path(made["receipt"]).read_text())
    assert receipt["slim"] == {"rules": 1, "gpus": [], "debug": True, "files": ["include", "static", "tests"]}
    installed = next(check["evidence"] for check in receipt["checks"] if check["name"] == "installed")
    assert installed["slim"]["torch"]["removed"] > 5000 and installed["slim"]["torch"]["blanked"] == {}
    assert installed["slim"]["numpy"]["removed"] > 100
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    folders = [tmp_path / name for name in ("of_full", "of_slim")]
    for one in folders:
        one.mkdir()
    full = trained(folders[0], Path(pt_cpu["path"]) / "bin/python", env=env)
    # The image has no bytecode: the rank takes what its agent compiled.
    start = ["env", f"PYTHONPYCACHEPREFIX={folders[1]}", "/opt/env/bin/python"]
    start = envbuild.line("run", "--bind", folders[1], made["path"], "--", *start)
    assert trained(folders[1], *start, env=env) == full


def test_a_program_for_other_chips_than_those_of_the_driver_stand_in_is_not_started(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    source = REPOSITORY / "tests/lab/cuda_stand_in.c"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", library, source], check=True)

    def started(chips: str, wanted: str, **more: str) -> tuple[int, str]:
        line = [sys.executable, "-m", "ddp_train.chips", wanted, "--", "echo", "started"]
        env = {**os.environ, "CHIPS": chips, "LD_LIBRARY_PATH": str(tmp_path), **more}
        done = subprocess.run(line, env=env, cwd=REPOSITORY, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr

    assert started("90 90", "sm_90") == (0, "started\n")
    assert started("80 90 100", "sm_80,sm_90,sm_100") == (0, "started\n")
    code, said = started("90 80 100", "sm_90")
    assert code == 5 and "code for sm_90 alone" in said and "this node has sm_100, sm_80" in said
    assert started("80", "sm_90", LD_LIBRARY_PATH="/nonexistent") == (0, "started\n")  # no driver: others tell that
