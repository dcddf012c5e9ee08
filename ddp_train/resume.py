"""Going on from a snapshot."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .args import Arguments
from .distributed import Group
from .models import build_optimizer
from .output import say
from .place import number
from .snapshot import (
    Found,
    SnapshotError,
    SnapshotFile,
    apply_snapshot,
    from_bytes,
    read_snapshot,
    to_bytes,
)

# `envbuild verify` sets it, so that a second launch gets ready beside the first: it goes on once the first has saved
# this many epochs. Reports name it, since older trainers do not know it.
RESUME_AT = "DDP_TRAIN_RESUME_AT"
_POLL_S = 0.02


def wait_for_snapshot(arguments: Arguments, environ: Mapping[str, str], group: Group) -> None:
    """Where RESUME_AT says so, wait until the snapshot has so many epochs. All ranks call it."""
    if RESUME_AT not in environ:
        return
    with contextlib.suppress(ImportError):
        import torch._dynamo  # noqa: F401 - the optimizer would import it later
    epochs, path = number(environ, RESUME_AT), Path(arguments.checkpoint_path)

    def wait() -> None:
        while _epochs_in(path) < epochs:
            time.sleep(_POLL_S)

    group.on_rank0(wait)


def _epochs_in(path: Path) -> int:
    # 0 where there is no snapshot, or none that can be read.
    try:
        found = read_snapshot(path)["EPOCHS_RUN"]
    except (SnapshotError, KeyError, TypeError):
        return 0
    return found if isinstance(found, int) else 0


def resume(
    arguments: Arguments, group: Group, store: SnapshotFile, model: Any
) -> tuple[Found, Any]:
    """Rank 0 looks for a snapshot and hands it to all ranks; returns it and the optimizer."""
    found = Found(None, None)
    if group.leads:
        found = store.find(model, arguments.model)
    # An empty dictionary stands for "none": every rank takes part either way.
    payload = group.broadcast(to_bytes(found.snapshot or {}) if group.leads else None)
    snapshot = from_bytes(payload)
    if not snapshot:
        return found, build_optimizer(model, arguments.lr)
    optimizer = apply_snapshot(snapshot, model, arguments.lr)
    if group.leads:
        say(f"Resuming training from snapshot at Epoch {snapshot['EPOCHS_RUN']}")
    return Found(snapshot, found.path, found.rejected), optimizer
