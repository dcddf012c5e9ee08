"""The network in use: the interface that was asked for, NCCL's real library."""

from __future__ import annotations

import json
import mmap
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from envbuild.jobcheck.diagnose.engine import explain
from envbuild.jobcheck.diagnose.nccl_log import NcclLog, parse_nccl_log
from envbuild.recipe.targets import host_arch
from envbuild.run_environment import load_environment
from envbuild.store.fetch import WantedWheel, locate_wheels

from .conftest import REPOSITORY


def test_gloo_is_on_the_interface_that_was_asked_for(pt_cpu: dict[str, Any]) -> None:
    receipt = json.loads(Path(pt_cpu["receipt"]).read_text())
    checks = {check["name"]: check for check in receipt["checks"]}
    assert checks["fabric"]["status"] == "pass"
    assert checks["fabric"]["evidence"]["interface"] == "lo"
    # A connection has two ends: four ranks have six of them.
    assert len(checks["fabric"]["evidence"]["connections"]) == 12
    table = checks["bandwidth"]["evidence"]["table"]
    assert checks["bandwidth"]["status"] == "pass" and table[-1]["busbw"] > 0
    assert "libraries" not in checks, "for CUDA targets"


# nvidia-nccl-cu12 as PyPI has it: the oldest that a recipe here names, and a newer one.
NCCL_WHEELS = {
    ("2.26.2", "x86_64"): "694cf3879a206553cc9d7dbda76b13efaf610fdb70a50cba303de1b0d1530ac6",
    ("2.26.2", "aarch64"): "5c196e95e832ad30fbbb50381eb3cbd1fadd5675e587a548563993609af19522",
    ("2.29.7", "x86_64"): "ecd0a012051abc20c1aa87328841efa8cade3ced65803046e38c2f03c0891fea",
    ("2.29.7", "aarch64"): "0cf032ee22b560447daf0456108a75e32bd74a4de6c6b64725637a359fa48cd8",
}
VERSIONS = sorted({version for version, _ in NCCL_WHEELS})
# Starts NCCL as far as it goes without a GPU: its bootstrap network, then a communicator.
START = """
import ctypes, sys
class Id(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_char * 128)]
nccl, unique, comm = ctypes.CDLL(sys.argv[1]), Id(), ctypes.c_void_p()
version = ctypes.c_int()
nccl.ncclGetVersion(ctypes.byref(version))
print(version.value)
if nccl.ncclGetUniqueId(ctypes.byref(unique)) == 0:
    nccl.ncclCommInitRank.argtypes = [ctypes.c_void_p, ctypes.c_int, Id, ctypes.c_int]
    nccl.ncclCommInitRank(ctypes.byref(comm), 1, unique, 0)
"""


@pytest.fixture(scope="module")
def nccl(session_store: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """libnccl.so.2 of each version."""
    environment = load_environment({**os.environ, "ENVBUILD_STORE": str(session_store)})
    wanted = {
        version: WantedWheel("nvidia-nccl-cu12", version, frozenset({NCCL_WHEELS[version, host_arch()]}))
        for version in VERSIONS
    }
    found = locate_wheels(list(wanted.values()), environment, offline=False)
    libraries = {}
    for version, wheel in wanted.items():
        with zipfile.ZipFile(found[wheel]) as archive:
            member = next(name for name in archive.namelist() if name.endswith("libnccl.so.2"))
            libraries[version] = Path(archive.extract(member, tmp_path_factory.mktemp("nccl")))
    return libraries


def test_what_the_patterns_look_for_is_what_nccl_prints(nccl: dict[str, Path]) -> None:
    """Each constant text is in one of the libraries, and those of all releases are in both."""
    table = tomllib.loads((resources.files("envbuild.data") / "nccl_log.toml").read_text())
    rows = [row for row in table["lines"] if row.get("of", "nccl") == "nccl"]
    has: dict[str, list[str]] = {}
    for version, library in nccl.items():
        with library.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as data:
            for row in rows:
                for text in row.get("texts", ()):
                    if data.find(text.encode()) >= 0:
                        has.setdefault(text, []).append(version)
    for row in rows:
        for text in row.get("texts", ()):
            everywhere = "[2.18.5" in row["source"] and "2.29.7]" in row["source"]
            assert has.get(text) == VERSIONS if everywhere else has.get(text), (text, has.get(text))


def started(library: Path, log: Path, **env: str) -> NcclLog:
    """What NCCL logs when it starts here; GPUs are hidden, so that it is the same on every host."""
    subprocess.run(
        [sys.executable, "-c", START, str(library)],
        env={**os.environ, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log), "CUDA_VISIBLE_DEVICES": "", **env},
        capture_output=True,
        timeout=120,
        check=True,
    )
    return parse_nccl_log(log.read_text())


@pytest.mark.parametrize("version", VERSIONS)
def test_real_lines_of_nccl_are_understood(version: str, nccl: dict[str, Path], tmp_path: Path) -> None:
    log = tmp_path / "nccl.txt"
    without = started(nccl[version], log, NCCL_SOCKET_IFNAME="lo")
    assert [fault.kind for fault in without.having("fatal")] == ["fatal"] * len(without.faults)
    assert "no GPU is visible" in explain(log.read_text(), "verification"), log.read_text()
    astray = started(nccl[version], log, NCCL_SOCKET_IFNAME="nosuch0")
    assert [fault.text for fault in astray.faults] == ["Bootstrap : no socket interface found"]
    assert "NCCL_SOCKET_IFNAME names no interface" in explain(log.read_text(), "verification")


def test_libraries_of_nccl_are_named_when_they_are_mapped(nccl: dict[str, Path]) -> None:
    code = (
        "import ctypes, sys; from ddp_train.loaded import mapped_libraries\n"
        "kept = [ctypes.CDLL(path) for path in sys.argv[1:]]; print(*mapped_libraries(), sep='\\n')"
    )
    paths = sorted(str(library) for library in nccl.values())
    done = subprocess.run(
        [sys.executable, "-c", code, *paths],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == paths
