"""The meeting of a job's nodes: each writes a row into the run's folder, and reads those of the others."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..errors import TrainError, os_reason
from .address import addresses, choose, free_port
from .job import Run

_POLL_S = 0.2
# The first word of a row that says why its node cannot take part; no host has this name.
_UNUSABLE = "!"


@dataclass(frozen=True)
class Row:
    """A node: its host name, the address at which others reach it, and the interface of that address.

    `port` is that of the rendezvous, on the first node.
    """

    name: str
    address: str
    interface: str
    port: int = 0


def this_host() -> str:
    """Return this node's name: the scheduler's, where it tells."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


def meet(run: Run, number: int, *, writes: bool = True) -> list[Row]:
    """Write this node's row unless it is there, and return the rows of all nodes by their numbers.

    `writes` is false for the second and later processes of one node. Raises TrainError when no address of this node or
    another one is found, or when a node does not write its row in time.
    """
    row = run.file(f"at.{number}")
    if writes and not row.exists():
        peer = _hosts(run)[0] if number == 0 else _read(run, 0, _deadline(run)).address
        try:
            new = own_row(run, number, peer)
        except TrainError as error:
            _write(row, f"{_UNUSABLE} {this_host()}: {error.message}")  # so that no other node waits for this one
            raise
        _write(row, f"{new.name} {new.address} {new.interface} {new.port}")
        print(f"envbuild: node {number} is {new.name}, {new.address} on {new.interface}", flush=True)
    deadline = _deadline(run)
    rows = [_read(run, number, deadline) for number in range(run.job.nodes)]
    names = [row.name for row in rows]
    for name in names:
        if names.count(name) > 1:
            raise TrainError(f"{run.job.launcher} started two processes on node {name} and none on another")
    return rows


def _write(row: Path, line: str) -> None:
    draft = row.with_name(f"{row.name}.new")
    try:
        draft.write_text(f"{line}\n", encoding="utf-8")
        draft.replace(row)
    except OSError as error:
        raise TrainError(f"{row}: {os_reason(error)}; the run's folder must be writable on every node") from error


def own_row(run: Run, number: int, peer: str) -> Row:
    """Return this node's row; `peer` is an address of another node, "" if none is known. Raises TrainError."""
    alone = run.job.nodes == 1
    try:
        usable = addresses()
    except OSError as error:
        raise TrainError(f"the addresses of this node cannot be listed: {os_reason(error)}") from error
    chosen = choose(usable, run.job.interface, peer, alone=alone)
    port = free_port(run.first_port) if number == 0 else 0
    return Row(_scheduler_name(run, this_host()), chosen.text, chosen.interface, port)


def same_host(name: str, other: str) -> bool:
    """Return whether two names are of one host, with or without their domain."""
    return name.partition(".")[0] == other.partition(".")[0]


def _hosts(run: Run) -> list[str]:
    """Return an address of the second node, as the first host knows it, and the scheduler's names of all nodes."""
    try:
        return run.file("hosts").read_text(encoding="utf-8").splitlines() or [""]
    except OSError:
        return [""]


def _scheduler_name(run: Run, name: str) -> str:
    return next((host for host in _hosts(run)[1:] if same_host(host, name)), name)


def _deadline(run: Run) -> float:
    return time.monotonic() + run.job.join_timeout_s


def _read(run: Run, number: int, deadline: float) -> Row:
    """Return the row of node `number` as soon as it is there."""
    path = run.file(f"at.{number}")
    while True:
        with suppress(OSError, ValueError):
            text = path.read_text(encoding="utf-8")
            if text.startswith(_UNUSABLE):
                raise TrainError(f"node {number} cannot take part: {text[len(_UNUSABLE) :].strip()}")
            name, address, interface, port = text.split()
            return Row(name, address, interface, int(port))
        if time.monotonic() > deadline:
            raise TrainError(
                f"node {number} wrote nothing to {run.folder} within {run.job.join_timeout_s} s; the folder must be "
                "on a file system that all nodes see"
            )
        _refresh(run.folder)
        time.sleep(_POLL_S)


def _refresh(folder: Path) -> None:
    """Make an NFS client ask the server again which files there are: otherwise it may remember for a minute."""
    with suppress(OSError):
        os.utime(folder)
