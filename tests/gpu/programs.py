"""Programs that steps start with the tried Python: the trainer, several at a time; a torch with a broken library."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from envbuild.layers.wheels import blank_ranges, blanked_bytes
from envbuild.slim import SlimRules

from .machine import APART, TOP, Context, clean_environment, torch_folder

# What torch needs of its own packages, in this order: on GPUs cuDNN, cuBLAS; on CPUs its OpenMP.
_NEEDED = ("libcudnn.so", "libcublas.so", "libcusparse.so", "libgomp", "libtorch_cpu.so")
# Less than an ELF header: of more, the loader maps pages beyond the file's end, and the process gets SIGBUS.
_LEFT = 16
_ADDRESS = "127.0.0.1"
# The runner ends a step sooner.
_LONG_S = 600.0


class Ended(NamedTuple):
    """A program that ended: its exit code, None after its time ran out, and its output."""

    code: int | None
    text: str


def run_all(
    commands: Sequence[tuple[Sequence[str], Mapping[str, str]]], folder: Path, seconds: float = _LONG_S
) -> list[Ended]:
    """Run (command, variables) beside each other for at most `seconds`; their logs go into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = [folder / f"program{number}.log" for number in range(len(commands))]
    children = []
    for (command, env), log in zip(commands, logs, strict=True):
        with log.open("wb") as stream:
            children.append(
                subprocess.Popen(command, env=env, cwd=folder, stdin=subprocess.DEVNULL, stdout=stream, stderr=stream)
            )
    deadline = time.monotonic() + seconds
    codes: list[int | None] = []
    for child in children:
        try:
            codes.append(child.wait(max(0.0, deadline - time.monotonic())))
        except subprocess.TimeoutExpired:
            child.terminate()
            codes.append(None)
    return [Ended(code, log.read_text(errors="replace")) for code, log in zip(codes, logs, strict=True)]


def trainer(context: Context, *arguments: str) -> list[str]:
    """Return the command of the checkout's trainer as one process; it needs torch alone."""
    return [context.python["executable"], "-m", "ddp_train", *arguments, "--backend", context.backend]


def trainer_environment(**more: str) -> dict[str, str]:
    """Return the variables of the checkout's trainer; sums are computed in the same order in each run."""
    return clean_environment(
        PYTHONPATH=str(TOP), OMP_NUM_THREADS="1", CUBLAS_WORKSPACE_CONFIG=":4096:8", GLOO_SOCKET_IFNAME="lo", **more
    )


def train_apart(context: Context, nodes: int, nproc: int, folder: Path, *arguments: str) -> list[Ended]:
    """Train under torchrun alone on `nodes` × `nproc` ranks. Several nodes are several hosts for NCCL, on one GPU."""
    with socket.socket() as probe:
        probe.bind((_ADDRESS, 0))
        port = probe.getsockname()[1]
    python, *program = trainer(context, *arguments)
    commands = []
    for node in range(nodes):
        agent = [
            python,
            "-m",
            "torch.distributed.run",
            f"--nnodes={nodes}",
            f"--nproc-per-node={nproc}",
            "--rdzv-id=gpu",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={_ADDRESS}:{port}",
            f"--local-addr={_ADDRESS}",
            f"--rdzv-conf=is_host={int(node == 0)}",
        ]
        apart = {"NCCL_HOSTID": f"node{node}", **APART, "NCCL_SOCKET_IFNAME": "=lo"} if nodes > 1 else {}
        commands.append(([*agent, *program], trainer_environment(**apart)))
    return run_all(commands, folder)


def break_library(context: Context, folder: Path) -> str | None:
    """Link the tried torch and NVIDIA's packages into `folder`, and cut one library off, as in a partial copy.

    Return its path; None if torch has all libraries from elsewhere. The loader takes $ORIGIN from the links.
    """
    site = torch_folder(context).parent
    own = [path for path in context.python["libraries"] if path.startswith(f"{site}/")]
    chosen = next((path for name in _NEEDED for path in own if os.path.basename(path).startswith(name)), None)
    if chosen is None:
        return None
    _link_torch(site, folder)
    broken = folder / os.path.relpath(chosen, site)
    broken.unlink()
    with open(chosen, "rb") as stream:
        broken.write_bytes(stream.read(_LEFT))
    return str(broken)


def slim_torch(context: Context, folder: Path, rules: SlimRules) -> dict[str, int]:
    """Link the tried torch and NVIDIA's packages into `folder`, with copies of the libraries that `rules` blank.

    Return the blanked bytes of each library, by its path.
    """
    site, found = torch_folder(context).parent, dict[str, int]()
    _link_torch(site, folder)
    for link in sorted(folder.rglob("*.so*")):
        path = os.path.relpath(link, folder)
        if not any(rules.blanks(name, path) for name in ("torch", "nvidia-nccl-cu12")):
            continue
        with open(site / path, "rb") as library:
            ranges = blank_ranges(library, rules)
            library.seek(0)
            link.unlink()
            with link.open("wb") as copy:
                copy.writelines(blanked_bytes(library, ranges))
        found[path] = sum(end - start for start, end in ranges)
    return found


def _link_torch(site: Path, folder: Path) -> None:
    for top in ("torch", "torch.libs", "torchgen", "nvidia"):
        for parent, _, names in os.walk(site / top):
            place = folder / os.path.relpath(parent, site)
            place.mkdir(parents=True, exist_ok=True)
            for name in names:
                os.symlink(os.path.join(parent, name), place / name)
