"""Resume from a snapshot."""

from __future__ import annotations

import contextlib
import glob
import time
from collections.abc import Mapping
from typing import Any

from .args import Arguments
from .distributed import Group
from .models import build_optimizer
from .output import log
from .snapshot import Found, SnapshotFile, apply_snapshot, from_bytes, to_bytes

# `envbuild verify` sets it to a path pattern, so that a second launch starts up beside the first: it continues
# once a file matches, the first one's report. Reports name it, since older trainers do not support it.
RESUME_AFTER = "DDP_TRAIN_RESUME_AFTER"
_POLL_S = 0.02


def wait_for_turn(environ: Mapping[str, str], group: Group) -> None:
    """Wait until a file matches the pattern in RESUME_AFTER, if it is set. All ranks call it."""
    pattern = environ.get(RESUME_AFTER)
    if pattern is None:
        return
    with contextlib.suppress(ImportError):
        import torch._dynamo  # noqa: F401 - the optimizer would import it later

    def wait() -> None:
        while not glob.glob(pattern):
            time.sleep(_POLL_S)

    group.on_rank0(wait)


def resume(arguments: Arguments, group: Group, store: SnapshotFile, model: Any) -> tuple[Found, Any]:
    """Let rank 0 find a snapshot and send it to all ranks; return it and the optimizer."""
    search = Found(None, None)
    if group.leads:
        search = store.find(model, arguments.model)
    # An empty dictionary means "none": every rank takes part in either case.
    payload = group.broadcast(to_bytes(search.snapshot or {}) if group.leads else None)
    snapshot = from_bytes(payload)
    if not snapshot:
        return search, build_optimizer(model, arguments.lr)
    optimizer = apply_snapshot(snapshot, model, arguments.lr)
    if group.leads:
        log(f"Resuming training from snapshot at Epoch {snapshot['EPOCHS_RUN']}")
    return Found(snapshot, search.path, search.rejected), optimizer
