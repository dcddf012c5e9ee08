"""Snapshots: their contents, their checks, and the choice between two generations.

A snapshot is a torch.save file of a dictionary. Older scripts write and read only MODEL_STATE and EPOCHS_RUN
(the number of finished epochs, which is the epoch to resume at); this program adds OPTIMIZER_STATE, RNG_STATE,
MODEL and FORMAT.
"""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import warnings
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .errors import TrainError, one_line, os_reason
from .files import remove_leftovers, require_writable, sync_folder, temporary_name, write_temporary
from .models import build_optimizer
from .output import log

FORMAT = 1


class SnapshotError(Exception):
    """The reason why a file is not a usable snapshot, in one line."""


@dataclass(frozen=True)
class Found:
    """Result of a search: a checked snapshot and its path, or None; and the refused files."""

    snapshot: dict[str, Any] | None
    path: str | None
    rejected: list[dict[str, str]] = field(default_factory=list)


def make_snapshot(model: Any, optimizer: Any, name: str, epochs_run: int) -> dict[str, Any]:
    """Return the snapshot of a bare model (not wrapped in DDP) after `epochs_run` finished epochs."""
    return {
        "MODEL_STATE": model.state_dict(),
        "EPOCHS_RUN": epochs_run,
        "OPTIMIZER_STATE": optimizer.state_dict(),
        "RNG_STATE": torch.get_rng_state(),
        "MODEL": name,
        "FORMAT": FORMAT,
    }


def to_bytes(snapshot: dict[str, Any]) -> bytes:
    """Return the bytes of a snapshot file."""
    # To memory first: on a full disk torch.save raises an internal error, a write raises a clear one.
    buffer = io.BytesIO()
    torch.save(snapshot, buffer)
    return buffer.getvalue()


def from_bytes(payload: bytes) -> Any:
    """Return the object that to_bytes() serialized, with tensors on the CPU."""
    return torch.load(io.BytesIO(payload), weights_only=True, map_location="cpu")


def _parse(payload: bytes) -> Any:
    """Return the object in a torch.save file. Raises SnapshotError for any other bytes."""
    if not payload:
        raise SnapshotError("the file is empty")
    if payload.startswith(b"PK"):
        # torch.load does not verify the checksums that torch.save writes.
        try:
            with zipfile.ZipFile(io.BytesIO(payload)) as archive:
                damaged = archive.testzip()
        except Exception as error:  # noqa: BLE001 - damaged bytes can fail anywhere in zipfile
            raise SnapshotError(f"truncated or damaged: {one_line(error, 120)}") from None
        if damaged is not None:
            raise SnapshotError(f"damaged: wrong checksum of {damaged}")
    try:
        with warnings.catch_warnings():
            # Warnings about unusual pickle protocols; the result is checked anyway.
            warnings.simplefilter("ignore")
            return from_bytes(payload)
    except pickle.UnpicklingError as error:
        # "Unsupported global: …", "unsupported GLOBAL … is blocked", "Unsupported class …"
        if "unsupported global" in str(error).lower() or "unsupported class" in str(error).lower():
            raise SnapshotError(
                "holds Python objects other than tensors and plain values; not loaded, since it could run code"
            ) from None
        raise SnapshotError("not a file written by torch.save, or damaged") from None
    except Exception as error:  # noqa: BLE001 - foreign bytes can fail anywhere in the unpickler
        raise SnapshotError(f"not a file written by torch.save, or damaged ({one_line(error, 120)})") from None


def read_snapshot(path: Path) -> Any:
    """Return the object in the file at `path`. Raises SnapshotError."""
    if not path.is_file():
        raise SnapshotError("not a regular file")
    try:
        payload = path.read_bytes()
    except OSError as error:
        raise SnapshotError(f"cannot be read: {os_reason(error)}") from None
    return _parse(payload)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout == torch.strided


def _check_model_state(state: Any, model: Any) -> None:
    if not isinstance(state, dict):
        raise SnapshotError("MODEL_STATE is not a dictionary")
    expected = model.state_dict()
    if set(state) != set(expected):
        raise SnapshotError(f"of another model: it has {_names(state)}, this model has {_names(expected)}")
    for name, tensor in expected.items():
        value = state[name]
        if not _is_tensor(value):
            raise SnapshotError(f"{name} is not a tensor")
        if value.shape != tensor.shape or value.dtype != tensor.dtype:
            raise SnapshotError(
                f"of another model: {name} is {value.dtype} of shape {tuple(value.shape)},"
                f" expected {tensor.dtype} of shape {tuple(tensor.shape)}"
            )


def _names(state: Any, most: int = 4) -> str:
    names = [str(name)[:40] for name in state]
    shown = ", ".join(names[:most]) + (", …" if len(names) > most else "")
    return shown or "no parameters"


def _check_optimizer_state(saved: Any, model: Any) -> None:
    """Raise SnapshotError unless momentum buffers match the model's parameters, by number."""
    state = saved.get("state") if isinstance(saved, dict) else None
    if not isinstance(state, dict):
        raise SnapshotError("OPTIMIZER_STATE is not an optimizer's state")
    parameters = list(model.parameters())
    for number, entry in state.items():
        if not (isinstance(number, int) and 0 <= number < len(parameters) and isinstance(entry, dict)):
            raise SnapshotError(f"OPTIMIZER_STATE has an unexpected entry {str(number)[:40]}")
        buffer = entry.get("momentum_buffer")
        if buffer is not None and not (
            _is_tensor(buffer) and buffer.shape == parameters[number].shape and buffer.dtype == parameters[number].dtype
        ):
            raise SnapshotError(f"OPTIMIZER_STATE does not fit parameter {number} of the model")


def _check_rng_state(state: Any) -> None:
    try:
        torch.Generator().set_state(state)
    except (TypeError, RuntimeError):
        raise SnapshotError("RNG_STATE is not a state of torch's generator") from None


def check_snapshot(snapshot: Any, model: Any, name: str) -> dict[str, Any]:
    """Return the keys of `snapshot` that this program uses. Raises SnapshotError if they do not fit `model`.

    Nothing is applied to `model`: a refused snapshot does not change it.
    """
    if not isinstance(snapshot, dict):
        raise SnapshotError(f"holds a {type(snapshot).__name__}, not a snapshot's dictionary")
    for key in ("MODEL_STATE", "EPOCHS_RUN"):
        if key not in snapshot:
            raise SnapshotError(f"not a snapshot: {key} is missing")
    version = snapshot.get("FORMAT", FORMAT)
    if not isinstance(version, int) or version > FORMAT:
        raise SnapshotError(f"of format {version}; this program knows formats up to {FORMAT}")
    if snapshot.get("MODEL", name) != name:
        raise SnapshotError(f"of another model: {str(snapshot['MODEL'])[:40]}, not {name}")
    epochs = snapshot["EPOCHS_RUN"]
    if isinstance(epochs, bool) or not isinstance(epochs, int) or not 0 <= epochs < 2**63:
        raise SnapshotError(f"EPOCHS_RUN is {str(epochs)[:40]}, not a number of epochs")
    _check_model_state(snapshot["MODEL_STATE"], model)
    if "OPTIMIZER_STATE" in snapshot:
        _check_optimizer_state(snapshot["OPTIMIZER_STATE"], model)
    if "RNG_STATE" in snapshot:
        _check_rng_state(snapshot["RNG_STATE"])
    known = ("MODEL_STATE", "EPOCHS_RUN", "OPTIMIZER_STATE", "RNG_STATE", "MODEL", "FORMAT")
    return {key: snapshot[key] for key in known if key in snapshot}


def apply_snapshot(snapshot: dict[str, Any], model: Any, lr: float) -> Any:
    """Load a checked snapshot into `model` and torch's generator; return the optimizer.

    Learning rate and other settings are those of this run: only the momentum comes from the snapshot.
    """
    model.load_state_dict(snapshot["MODEL_STATE"])
    optimizer = build_optimizer(model, lr)
    saved = snapshot.get("OPTIMIZER_STATE")
    if saved is not None:
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": saved["state"], "param_groups": groups})
    if "RNG_STATE" in snapshot:
        torch.set_rng_state(snapshot["RNG_STATE"])
    return optimizer


class SnapshotFile:
    """The snapshot at `path`, with the previous generation at `path`.prev. Used by rank 0 only."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        with contextlib.suppress(OSError, RuntimeError):  # prepare() says why; RuntimeError: links in a circle
            if self.path.is_symlink():
                # A rename onto a link would replace the link instead of its target.
                self.path = self.path.resolve()
        self.previous = Path(f"{self.path}.prev")
        self._path_refused = False

    def prepare(self) -> None:
        """Remove files of killed runs. Raises TrainError if no snapshot can be written."""
        require_writable(self.path, "snapshot")
        try:
            remove_leftovers(self.path)
        except OSError as error:
            raise TrainError(f"cannot read {self.path.parent}: {os_reason(error)}") from None

    def find(self, model: Any, name: str) -> Found:
        """Return the newest generation that fits `model`; print why another one was refused."""
        rejected: list[dict[str, str]] = []
        for path in (self.path, self.previous):
            if not os.path.lexists(path):
                continue
            if path == self.previous:
                why = "cannot be used" if rejected else "does not exist"
                log(f"{self.path} {why}: trying the generation before it, {path}")
            log("Loading snapshot")
            try:
                snapshot = check_snapshot(read_snapshot(path), model, name)
            except SnapshotError as error:
                reason = one_line(error)
                log(f"Snapshot {path} refused: {reason}")
                rejected.append({"path": str(path), "reason": reason})
                self._path_refused = self._path_refused or path == self.path
                continue
            return Found(snapshot, str(path), rejected)
        if rejected:
            log("No usable snapshot: starting at epoch 0")
        return Found(None, None, rejected)

    def save(self, snapshot: dict[str, Any]) -> None:
        """Save `snapshot` at the path and keep the existing file. Raises TrainError."""
        try:
            temporary = write_temporary(self.path, to_bytes(snapshot))
            try:
                self._keep_current()
                temporary.replace(self.path)
            except OSError:
                with contextlib.suppress(OSError):
                    temporary.unlink()
                raise
            sync_folder(self.path.parent)
        except OSError as error:
            raise TrainError(f"cannot write snapshot {self.path}: {os_reason(error)}") from None

    def _keep_current(self) -> None:
        """Keep the existing file as .prev, or as .refused if it was refused, so that a good .prev is not replaced."""
        if not os.path.lexists(self.path):
            return
        suffix = ".refused" if self._path_refused else ".prev"
        kept = self.path.with_name(self.path.name + suffix)
        link = self.path.with_name(temporary_name(self.path).name + ".link")
        try:
            # A hard link, so that neither the path nor the kept name is ever without a file.
            with contextlib.suppress(FileNotFoundError):
                link.unlink()
            os.link(self.path, link, follow_symlinks=False)
            link.replace(kept)
        except OSError:
            # FAT and some network file systems have no hard links.
            self.path.replace(kept)
        self._path_refused = False
