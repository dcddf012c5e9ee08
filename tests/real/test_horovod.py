"""The recipe `horovod`, built and trained with: Horovod's steps are DistributedDataParallel's.

Its layer is compiled against the lock's torch, once for this file, in a fifth of the time: without the compiler's
optimization (-O3 in the recipe), Horovod's own sources as one, with fewer of torch's headers.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
from pathlib import Path
from typing import Any

import pytest
from lab.conda_server import Server

from envbuild.artifacts.survey import survey
from envbuild.elf import MACHINES
from envbuild.recipe.targets import host_arch
from envbuild.verify.receipt import passing_receipt

from .conftest import Command, own_copy
from .test_conda import recipe, site

LIMIT_S = 240
# What a job script of envbuild tells each rank that mpirun starts (ddp_train/launch).
RANK = """
rank=$OMPI_COMM_WORLD_RANK size=$OMPI_COMM_WORLD_SIZE
export HOROVOD_RANK="$rank" HOROVOD_SIZE="$size" HOROVOD_HOSTNAME="n$((rank / 2))"
export HOROVOD_LOCAL_RANK="$((rank % 2))" HOROVOD_LOCAL_SIZE=2
export HOROVOD_CROSS_RANK="$((rank / 2))" HOROVOD_CROSS_SIZE="$((size / 2))"
export HOROVOD_GLOO_IFACE=lo HOROVOD_GLOO_RENDEZVOUS_ADDR=127.0.0.1 HOROVOD_GLOO_RENDEZVOUS_PORT="$ENVBUILD_PORT"
exec "$@"
"""

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
    """`envbuild venv horovod`, built and verified once; what `--json` printed, what was said, the command."""
    folder = tmp_path_factory.mktemp("horovod")
    patch = own_copy(Command(folder), "horovod") / "patches/no-debug-information.patch"
    assert patch.read_text().count('"-O2 -g" "-O3"') == 2
    patch.write_text(patch.read_text().replace('"-O2 -g" "-O3"', '"-O2 -g" "-O0"') + ONE_SOURCE)
    command = Command(folder, {"ENVBUILD_STORE": str(session_store)})
    done = command("venv", "horovod", "--locked", "--json")
    assert done.returncode == 0, done.stderr
    return {**json.loads(done.stdout), "said": done.stderr, "command": command}


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def _run(command: list[str | Path], folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **env}, capture_output=True, text=True,
        timeout=LIMIT_S,
    )  # fmt: skip


def _mpirun(
    ranks: int, venv: Path, folder: Path, *arguments: str, told: bool = True
) -> subprocess.CompletedProcess[str]:
    """ddp_train under mpirun, two ranks on each of `ranks` / 2 nodes that are this host."""
    program = shutil.which("mpirun")
    if program is None:
        pytest.skip("there is no mpirun (openmpi-bin)")
    start = ["bash", "-c", RANK, "bash"] if told else []
    return _run(
        [program, "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *start,
         venv / "bin/python", "-m", "ddp_train", *arguments],
        folder, ENVBUILD_PORT=str(_free_port()),
    )  # fmt: skip


def _report(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return report


def test_the_layer_is_in_the_record_and_is_built_once(horovod: dict[str, Any]) -> None:
    command, venv = horovod["command"], Path(horovod["path"])
    assert "horovod 0.28.1: built in" in horovod["said"]
    state = json.loads((venv / "envbuild.json").read_text())
    assert [one["name"] for one in state["layers"]] == ["horovod"]
    assert ["horovod", "0.28.1"] in [row[:2] for row in state["packages"]]
    assert passing_receipt(venv, horovod["digest"]) is not None
    assert not list(venv.rglob("*.pyc.*")), "the build left nothing in the environment"
    again = command("venv", "horovod", "--locked", "--no-verify", "--out", "again", "--json")
    assert again.returncode == 0 and "pip wheel" not in again.stderr, again.stderr
    assert json.loads(again.stdout)["digest"] == horovod["digest"]
    version = _run([command.folder / "again/bin/horovodrun", "--version"], command.folder)
    assert version.stdout.strip() == "0.28.1", version.stderr
    (site,) = (command.folder / "again").glob("lib/python3*/site-packages")
    (library,) = site.glob("horovod/torch/*.so")
    machine = MACHINES[host_arch()]
    found = survey(command.folder / "again", site, machine).files
    assert (found.missing, found.altered, found.unowned) == ([], [], [])
    with library.open("r+b") as stream:
        stream.seek(4096)
        stream.write(b"altered")
    found = survey(command.folder / "again", site, machine).files
    assert found.altered and all(library.name in one for one in found.altered)


def test_an_image_with_it_is_refused_and_says_what_to_do(horovod: dict[str, Any]) -> None:
    done = horovod["command"]("docker", "horovod", "--locked", "--out", "oci:image")
    assert done.returncode == 2 and "for images yet" in done.stderr, done.stderr


def test_two_nodes_of_two_ranks_take_the_steps_of_ddp_and_resume(horovod: dict[str, Any], tmp_path: Path) -> None:
    venv = Path(horovod["path"])
    common = ["1", "--model", "cnn", "--dataset_size", "256", "--report", "report.json"]
    ours, theirs = tmp_path / "horovod", tmp_path / "ddp"
    ours.mkdir()
    theirs.mkdir()
    first = _mpirun(4, venv, ours, "1", *common, "--strategy", "horovod")
    assert first.returncode == 0, first.stdout + first.stderr
    begun = _report(ours)["losses"]
    second = _mpirun(4, venv, ours, "3", *common, "--strategy", "horovod", "--bandwidth", "0.2")
    assert second.returncode == 0, second.stdout + second.stderr
    report = _report(ours)
    assert (report["strategy"], report["backend"], report["world_size"]) == ("horovod", "gloo", 4)
    assert report["start_epoch"] == 1 and report["bandwidth"]
    assert [one["group_rank"] for one in report["ranks"]] == [0, 0, 1, 1]
    assert all(check["ok"] for rank in report["ranks"] for check in rank["allreduce"])
    assert len({rank["parameters_digest"] for rank in report["ranks"]}) == 1
    torchrun = _run(
        [venv / "bin/torchrun", "--nproc-per-node", "4", "--master-port", str(_free_port()), "-m", "ddp_train",
         "3", *common],
        theirs,
    )  # fmt: skip
    assert torchrun.returncode == 0, torchrun.stdout + torchrun.stderr
    expected = [one["loss"] for one in _report(theirs)["losses"]]
    assert [one["loss"] for one in begun + report["losses"]] == pytest.approx(expected, rel=1e-4)


def test_ranks_that_would_train_alone_are_refused(horovod: dict[str, Any], tmp_path: Path) -> None:
    """mpirun starts them, and this Horovod, built without MPI, knows nothing of each other."""
    done = _mpirun(2, Path(horovod["path"]), tmp_path, "1", "1", "--strategy", "horovod", told=False)
    assert done.returncode != 0
    assert "2 ranks were started and Horovod sees 1" in done.stderr and "without MPI" in done.stderr
    assert not (tmp_path / "snapshot.pt").exists()


def test_a_python_project_comes_into_a_conda_environment(
    session_store: Path, conda_server: Server, tmp_path: Path
) -> None:
    """A project whose build imports the environment's NumPy, through all of `envbuild conda`."""
    project = tmp_path / "worded-1.0"
    project.mkdir()
    (project / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "setuptools.build_meta"\n'
        '[project]\nname = "worded"\nversion = "1.0"\nscripts = {worded = "worded:main"}\n'
    )

    (project / "setup.py").write_text(
        "import numpy, sys\nfrom setuptools import setup\n"
        "open('worded.py', 'w').write(f'def main(): print({numpy.__version__!r})')\n"
        "setup(py_modules=['worded'])\n"
    )
    (project / "LICENSE").write_text("MIT\n")
    archive = shutil.make_archive(str(tmp_path / "worded"), "gztar", tmp_path, "worded-1.0")
    sha256 = hashlib.sha256(Path(archive).read_bytes()).hexdigest()
    place = recipe(tmp_path)
    with (place / "recipe.toml").open("a") as stream:
        stream.write(
            f'[layers.worded]\nversion = "1.0"\nurl = "{Path(archive).as_uri()}"\nsha256 = "{sha256}"\n'
            'system = "wheel"\n'
        )
    command = Command(tmp_path, {"ENVBUILD_STORE": str(session_store), **site(tmp_path, conda_server.url)})
    done = command("conda", "pt_cpu", "--no-verify", "--out", "env", "--json")
    assert done.returncode == 0, done.stderr
    assert "worded 1.0: pip wheel" in done.stderr
    (version,) = {
        row[1] for row in json.loads((tmp_path / "env/envbuild.json").read_text())["packages"] if row[0] == "numpy"
    }  # fmt: skip
    told = subprocess.run([tmp_path / "env/bin/worded"], capture_output=True, text=True)
    assert told.stdout.strip() == version, told.stderr
    again = command("conda", "pt_cpu", "--no-verify", "--out", "env", "--json")
    assert not json.loads(again.stdout)["built"], again.stderr
