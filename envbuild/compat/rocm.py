"""Compatibility checks that differ between ROCm and CUDA: torch's build and its RCCL."""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.compat import rows as data
from envbuild.compat.finding import LOOK_IT_UP, CompatFinding
from envbuild.compat.rows import Rows
from envbuild.compat.stack import Stack
from envbuild.recipe.accelerators import torch_index


def rocm_links(stack: Stack, rows: Rows) -> Iterator[CompatFinding]:
    """Check torch's build for ROCm, and name the RCCL inside it."""
    if stack.rocm is None:
        return
    if stack.torch is None:
        text = "no torch is pinned or locked: which build it will be is not known"
        fix = "pin torch in the recipe, or make the lock with `envbuild lock`"
        yield CompatFinding("unknown", "torch", text, fix)
        return
    what = f"torch {stack.torch}"
    if stack.torch_origin == "conda":
        yield CompatFinding("note", "torch", f"{what} comes from conda, whose solver matched its build")
        return
    row = data.torch_rocm_row(rows, stack.torch)
    if row is None or stack.rocm not in row.rocm:
        text = f"no row says that {what} is built for ROCm {stack.rocm}"
        yield CompatFinding("unknown", "torch", text, LOOK_IT_UP)
    else:
        text = f"{what} is built for ROCm {stack.rocm}: {torch_index(f'rocm{stack.rocm}')} has it"
        yield CompatFinding("good", "torch", text, "", row.source, row.date)
    rccl = data.rccl_row(rows, stack.rocm)
    if rccl is None:
        text = f"no row says which RCCL ROCm {stack.rocm} has"
        yield CompatFinding("unknown", "nccl", text, LOOK_IT_UP)
    else:
        text = f"ROCm {stack.rocm} has RCCL {rccl.nccl}, inside torch's wheel"
        yield CompatFinding("good", "nccl", text, "", rccl.source, rccl.date)
