"""The rules for logs of verification and of source builds: every row is found by its line, in the order of the ranks."""
# ruff: noqa: E501  (lines of logs stand on one line)

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib import resources
from itertools import combinations

import pytest

from envbuild.jobcheck.diagnose.engine import diagnose, explain
from envbuild.jobcheck.diagnose.rules import PLACES, Place, load_rules

_NET = "n1:1:1 [0] NCCL INFO NET/OFI aws-ofi-nccl initialization failed"
_GONE = "n1:1:1 [0] net.cc:1 NCCL WARN Error: network AWS Libfabric not found."
# By rank. The rows for verification were seen in launches with torch 2.13.
VERIFICATION = {
    "nccl-plugin-fatal": f"{_NET}\n{_GONE}",
    "nccl-fatal": "n1:1:1 [0] bootstrap.cc:3 NCCL WARN Bootstrap : no socket interface found",
    "driver-too-old": "RuntimeError: The NVIDIA driver on your system is too old (found version 12020).",
    "gpu-architecture": "torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device",
    "symbol-missing": "ImportError: /venv/lib/libtorch_cuda.so: undefined symbol: ncclDevCommDestroy",
    "library-cut": "OSError: /venv/lib/python3.11/site-packages/torch/lib/libgomp.so.1: file too short",
    "disk-full": "OSError: [Errno 28] No space left on device",
    "no-module": "ModuleNotFoundError: No module named 'apex.amp'",
    "no-library": "ImportError: libgomp.so.1: cannot open shared object file: No such file or directory",
    "old-libc": "ImportError: /lib/libc.so.6: version `GLIBC_2.34' not found (required by libtorch.so)",
    "port-in-use": "RuntimeError: The server socket has failed to listen: EADDRINUSE",
    "rendezvous-timeout": "torch.distributed.elastic.rendezvous.api.RendezvousTimeoutError",
    "name-unknown": "socket.gaierror: [Errno -2] Name or service not known",
    "full-mesh": "RuntimeError: Gloo connectFullMesh failed with … remote=[127.0.1.1]",
    "interface-unknown": "RuntimeError: Unable to find address for: hsn0",
    "gloo-abort-at-exit": "terminate called without an active exception",
    "worker-killed": "E api.py:869] got signal 9 (SIGKILL)",
    "trainer-gpus": "ddp_train: error: --backend nccl: 1 rank on this node, no GPU",
    "trainer-input": "ddp_train: error: --epochs: must be positive",
}
SOURCE_BUILD = {
    "build-killed": "exit status -9",
    "disk-full": "cc1: error: a.s: Disk quota exceeded",
    "build-memory": "g++: fatal error: Killed signal terminated program cc1plus",
    "compiler-broken": "configure: error: C++ compiler cannot create executables",
    "no-compiler": "configure: error: no acceptable C compiler found in $PATH",
    "autoconf-macro": "configure.ac:8: error: possibly undefined macro: AC_PROG_LIBTOOL",
    "build-program": "/bin/sh: 1: nvcc: not found",
    "build-header": "a.c:1:10: fatal error: rdma/fabric.h: No such file or directory",
    "build-standard": "all.h:9:2: error: #error C++20 or later compatible compiler is required to use PyTorch.",
    "build-mpi": "  Could NOT find MPI (missing: MPI_CXX_FOUND)",
    "build-library": "/usr/bin/ld: cannot find -lhwloc: No such file or directory",
    "patch-misfit": "1 out of 1 hunk FAILED",
    "no-install-target": "make: *** No rule to make target 'install'.  Stop.",
    "nvcc-refuses": "nvcc fatal   : Unsupported gpu architecture 'compute_35'",
}
LINES: list[tuple[Place, Mapping[str, str]]] = [("verification", VERIFICATION), ("source-build", SOURCE_BUILD)]


@pytest.mark.parametrize(("place", "lines"), LINES)
def test_every_row_is_found_by_its_line_and_stands_before_those_of_lower_rank(
    place: Place, lines: Mapping[str, str]
) -> None:
    rules = load_rules(place)
    assert [rule.id for rule in rules] == list(lines)
    assert len({rule.rank for rule in rules}) == len(rules)
    for name, line in lines.items():
        (found,) = diagnose([("log", line.splitlines())], rules).findings[:1]
        assert found.id == name
        assert explain(line, place).startswith(found.cause)
        assert not re.search(r"[{}?]", found.cause + found.hint)
    for higher, lower in combinations(lines, 2):
        both = f"{lines[lower]}\n{lines[higher]}".splitlines()
        assert diagnose([("log", both)], rules).findings[0].id == higher


def test_all_missing_programs_of_one_kind_of_message_are_named() -> None:
    lines = [f"sh: tool{number}: not found" for number in (1, 2, 1)]
    lines.append('Can\'t exec "libtoolize"')
    assert "the program tool1, tool2 are missing: " in explain("\n".join(lines), "source-build")
    many = "\n".join(f"ld: cannot find -lx{number}" for number in range(9))
    assert "the library libx4, x5, x6, x7, x8 are missing: " in explain(many, "source-build")


def test_a_name_is_one_row() -> None:
    table = tomllib.loads((resources.files("envbuild.data") / "diagnoses.toml").read_text())
    names = [row["id"] for row in table["rules"]]
    assert len(set(names)) == len(names)
    assert all(row["source"] and row["date"] for row in table["rules"])
    assert {place for row in table["rules"] for place in row.get("where", ())} == set(PLACES)
