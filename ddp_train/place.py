"""This process among the ranks, from the launcher's environment variables."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from .errors import BAD_INPUT, TrainError

# `envbuild verify` sets it to get the complete report of a run whose checks fail.
JUDGED_LATER = "DDP_TRAIN_JUDGED_LATER"
PR_SET_PDEATHSIG = 1
_TOGETHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


@dataclass(frozen=True)
class RankInfo:
    """A rank. Ranks count from 0; `group_rank` is the node's, `restart_count` is torchrun's on this node."""

    rank: int
    local_rank: int
    group_rank: int
    local_world_size: int
    world_size: int
    restart_count: int
    host: str
    distributed: bool


def _number(environ: Mapping[str, str], name: str, default: int = -1) -> int:
    text = environ.get(name)
    if text is None and default >= 0:
        return default
    try:
        value = int(text or "")
    except ValueError:
        value = -1
    if value < 0:
        raise TrainError(
            f"environment variable {name} is {text!r}, not a number of 0 or more: start the job with torchrun",
            BAD_INPUT,
        )
    return value


def _check_all_are_set(environ: Mapping[str, str]) -> None:
    absent = [name for name in _TOGETHER if name not in environ]
    if absent:
        given = [name for name in _TOGETHER if name in environ]
        raise TrainError(
            f"some environment variables of torchrun are missing: {' and '.join(given)} without {' and '.join(absent)};"
            " pyxis sets RANK and LOCAL_RANK where the image has PYTORCH_VERSION. Start the job with"
            f" torchrun, or train with one process: unset {' '.join(given)}",
            BAD_INPUT,
        )


def find_rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Return this process's rank from torchrun's variables; without RANK and WORLD_SIZE, one process on its own.

    Raises TrainError for missing or contradictory variables.
    """
    host = socket.gethostname()
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return RankInfo(0, 0, 0, 1, 1, 0, host, distributed=False)
    _check_all_are_set(environ)
    rank = _number(environ, "RANK")
    world_size = _number(environ, "WORLD_SIZE")
    local_world_size = _number(environ, "LOCAL_WORLD_SIZE", world_size)
    place = RankInfo(
        rank=rank,
        local_rank=_number(environ, "LOCAL_RANK"),
        group_rank=_number(environ, "GROUP_RANK", rank // max(local_world_size, 1)),
        local_world_size=local_world_size,
        world_size=world_size,
        restart_count=_number(environ, "TORCHELASTIC_RESTART_COUNT", 0),
        host=host,
        distributed=True,
    )
    if rank >= world_size or place.local_rank >= local_world_size:
        raise TrainError(
            f"RANK {rank} of WORLD_SIZE {world_size}, LOCAL_RANK {place.local_rank} of"
            f" LOCAL_WORLD_SIZE {local_world_size} contradict each other: start the job with torchrun",
            BAD_INPUT,
        )
    return place


def die_with_parent(environ: Mapping[str, str]) -> None:
    """Under torchrun on Linux, request that the kernel kill this rank when torchrun dies.

    torchrun stops its ranks itself unless it was killed with SIGKILL (out of memory, or by a batch system); the
    ranks would then occupy their node. The lack of this kernel feature is not an error. A torchrun that died before
    is noticed in verification alone, which sets a variable for torchrun that no other parent has.
    """
    if "TORCHELASTIC_RUN_ID" not in environ or not sys.platform.startswith("linux"):
        return
    try:
        libc = ctypes.CDLL(None)
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    except (OSError, AttributeError):
        return
    if environ.get(JUDGED_LATER) == "1" and _is_adopted():
        os.kill(os.getpid(), signal.SIGKILL)


def _is_adopted() -> bool:
    """Return whether the parent lacks the variable that verification gives to torchrun, because torchrun has died."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):  # the /proc of another PID namespace tells nothing
            return False
        given = Path(f"/proc/{os.getppid()}/environ").read_bytes().split(b"\0")
    except OSError:
        return False
    return f"{JUDGED_LATER}=1".encode() not in given
