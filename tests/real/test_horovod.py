"""The recipe `horovod` in a .sif, trained with on a real Slurm: Horovod's steps are those of one process.

Its layer is compiled against the lock's torch, once, and kept (`keep_layer`), in a fifth of the time: without the
compiler's optimization (-O3 in the recipe), Horovod's own sources as one, with fewer of torch's headers.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import slurm
from lab.jobs import Jobs
from lab.slurm import slurm_cluster

from envbuild.contract.receipt import passing_receipt
from envbuild.run_environment import load_environment
from envbuild.verify.image_file import open_image_file
from envbuild.verify.image_runtime import runtime_for

from .conftest import FILES_ONLY, Command, keep_layer, own_copy
from .test_source_images import inside

LIMIT_S = 240
# Torch's headers are read once for all of Horovod's sources, and not for each. Those for tensors are enough: torch.h
# and extension.h have all of torch's modules and optimizers.
ONE_SOURCE = """\
@@ -349,2 +349,3 @@
-# PyTorch
+set(CMAKE_UNITY_BUILD ON)
+set(CMAKE_UNITY_BUILD_BATCH_SIZE 0)
 add_subdirectory(horovod/torch)
--- a/horovod/torch/mpi_ops_v2.cc
+++ b/horovod/torch/mpi_ops_v2.cc
@@ -26,2 +26,2 @@
-#include <torch/extension.h>
-#include <torch/torch.h>
+#include <torch/types.h>
+#include <torch/csrc/utils/pybind.h>
--- a/horovod/torch/adapter_v2.h
+++ b/horovod/torch/adapter_v2.h
@@ -19,2 +19,2 @@
-#include <torch/extension.h>
-#include <torch/torch.h>
+#include <torch/types.h>
+#include <torch/csrc/utils/pybind.h>
"""


@pytest.fixture(scope="module")
def horovod(tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> dict[str, Any]:
    """`envbuild apptainer horovod`, built and its files verified once; what `--json` printed, and the command."""
    folder = tmp_path_factory.mktemp("horovod")
    patch = own_copy(Command(folder), "horovod", FILES_ONLY) / "patches/no-debug-information.patch"
    assert patch.read_text().count('"-O2 -g" "-O3"') == 2
    patch.write_text(patch.read_text().replace('"-O2 -g" "-O3"', '"-O2 -g" "-O0"') + ONE_SOURCE)
    command = Command(folder, {"ENVBUILD_STORE": str(session_store)})
    done = command("apptainer", "horovod", "--locked", "--json")
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "command": command}


@pytest.fixture(scope="module")
def jobs(horovod: dict[str, Any], tmp_path_factory: pytest.TempPathFactory, session_store: Path) -> Iterator[Jobs]:
    """A cluster of two nodes that see the image."""
    if reason := slurm.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("horovod-jobs")
    with slurm_cluster(folder / "cluster", share=[session_store, Path(horovod["path"]).parent]) as cluster:
        jobs = Jobs(cluster, {"ENVBUILD_STORE": str(session_store)})
        # Milliseconds between Horovod's exchanges, 1 by default: with it, waiting ranks keep both processors busy.
        jobs.write_site(HOROVOD_CYCLE_TIME="20")
        yield jobs


def test_the_layer_is_in_the_image_and_is_built_once(
    horovod: dict[str, Any], session_store: Path, tmp_path: Path
) -> None:
    command, sif = horovod["command"], Path(horovod["path"])
    shown = command.json("inspect", sif)
    assert [(one["name"], one["version"]) for one in shown["source_built"]] == [("horovod", "0.28.1")]
    receipt = passing_receipt(sif, horovod["digest"])
    assert receipt is not None
    checks = {check["name"]: check for check in receipt["checks"]}
    assert checks["layer:horovod"]["status"] == checks["imports"]["status"] == "pass"
    again = command("enroot", "horovod", "--locked", "--no-verify", "--out", "again.sqsh", "--json")
    assert again.returncode == 0 and "pip wheel" not in again.stderr, again.stderr
    script = r"""
        horovodrun --version; cd /opt/env/lib/python3.11/site-packages/horovod
        ls torch/__pycache__/__init__.cpython-311.pyc; grep -c 'horovod/torch/.*\.so,sha256=' ../horovod-*/RECORD
    """
    said = inside(str(command.folder / "again.sqsh"), tmp_path, "sh", "-c", script).split()
    assert said == ["0.28.1", "torch/__pycache__/__init__.cpython-311.pyc", "1"], (
        "program, bytecode, row of the library"
    )
    keep_layer(session_store, "horovod")


def run_alone(image: Path, folder: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the trainer in the image, as one process."""
    environment = load_environment({**os.environ, "ENVBUILD_STORE": str(folder / "store")})
    with runtime_for(open_image_file(image), None, environment).open(folder) as launch:
        line, env = launch("/opt/env/bin/python", ["-m", "ddp_train", *words], {"OMP_NUM_THREADS": "1", **variables})
        return subprocess.run(line, env=dict(env), capture_output=True, text=True, timeout=LIMIT_S)


def test_two_nodes_of_two_ranks_take_the_steps_of_one_process_and_resume(
    horovod: dict[str, Any], jobs: Jobs, tmp_path: Path
) -> None:
    """As the ranks of DistributedDataParallel do: tests/real/test_trainer.py."""
    common = ("1", "--model", "cnn", "--dataset_size", "256")
    kept = str(jobs.cluster.shared / "kept.pt")
    by_horovod = ("--strategy", "horovod", "--name", "hvd")
    first = jobs.submit(horovod["path"], *by_horovod, arguments=("1", *common, "--checkpoint_path", kept))
    whole = ("--batch_size", str(4 * 32), "--report", "report.json")
    alone = run_alone(Path(horovod["path"]), tmp_path, "3", *common, *whole)
    assert alone.returncode == 0, alone.stderr
    begun = jobs.ended(first, "hvd").report["losses"]
    arguments = ("3", *common, "--checkpoint_path", kept, "--bandwidth", "0.2")
    second = jobs.ended(jobs.submit(horovod["path"], *by_horovod, arguments=arguments), "hvd")
    assert second.end.state == "COMPLETED", second.log
    report = second.report
    assert (report["strategy"], report["backend"], report["world_size"]) == ("horovod", "gloo", 4)
    assert report["start_epoch"] == 1 and report["bandwidth"]
    assert [one["group_rank"] for one in report["ranks"]] == [0, 0, 1, 1] and len(set(second.hosts)) == 2
    assert {rank["sys_prefix"] for rank in report["ranks"]} == {"/opt/env"}
    assert all(check["ok"] for rank in report["ranks"] for check in rank["allreduce"])
    assert len({rank["parameters_digest"] for rank in report["ranks"]}) == 1
    expected = [one["loss"] for one in json.loads((tmp_path / "report.json").read_text())["losses"]]
    assert [one["loss"] for one in begun + report["losses"]] == pytest.approx(expected, rel=1e-4)


def test_ranks_that_would_train_alone_are_refused(horovod: dict[str, Any], tmp_path: Path) -> None:
    """Two ranks are started as by mpirun, and this Horovod, built without MPI, knows nothing of each other."""
    ranks = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}
    done = run_alone(Path(horovod["path"]), tmp_path, "1", "1", "--strategy", "horovod", **ranks)
    assert done.returncode != 0
    assert "2 ranks were started and Horovod sees 1" in done.stderr and "without MPI" in done.stderr
    assert not (tmp_path / "snapshot.pt").exists()
