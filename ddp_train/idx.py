"""Reader of MNIST's IDX files: 00 00, type, number of dimensions, big-endian dimensions, then the bytes."""

from __future__ import annotations

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import torch

from .errors import BAD_INPUT, TrainError, os_reason

_UNSIGNED_BYTE = 0x08
_CHUNK = 1 << 20


def _bad(path: Path, reason: str) -> TrainError:
    return TrainError(f"{path}: {reason}", BAD_INPUT)


def _read_up_to(stream: io.BufferedIOBase, size: int) -> bytes:
    """Read at most `size` bytes, in chunks: a damaged header may state a size larger than the memory."""
    parts = []
    while size > 0:
        part = stream.read(min(size, _CHUNK))
        if not part:
            break
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _parse(stream: io.BufferedIOBase, path: Path, dimensions: int) -> torch.Tensor:
    header = _read_up_to(stream, 4 + 4 * dimensions)
    magic = bytes((0, 0, _UNSIGNED_BYTE, dimensions))
    if header[:4] != magic:
        raise _bad(path, f"bad magic number {header[:4].hex() or 'none'}, expected {magic.hex()}")
    if len(header) < 4 + 4 * dimensions:
        raise _bad(path, f"truncated: the header ends after {len(header)} bytes")
    shape = struct.unpack(f">{dimensions}I", header[4:])
    size = math.prod(shape)
    if size == 0:
        raise _bad(path, f"no data: the header says {' x '.join(map(str, shape))}")
    payload = _read_up_to(stream, size)
    if len(payload) < size:
        raise _bad(path, f"truncated: {len(payload)} of {size} data bytes")
    if stream.read(1):
        raise _bad(path, f"more than the {size} data bytes that its header says")
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).reshape(shape)


def read_idx(path: Path, dimensions: int) -> torch.Tensor:
    """Return the uint8 tensor in `path`, which is gzip if its name ends in .gz. Raises TrainError."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as stream:
            return _parse(stream, path, dimensions)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise _bad(path, f"truncated or damaged gzip data ({error})") from None
    except OSError as error:
        raise _bad(path, f"cannot be read: {os_reason(error)}") from None


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.exists():
            return candidate
    raise _bad(folder, f"holds neither {name} nor {name}.gz")


def read_training_set(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images, uint8, shape (N, 28, 28), and labels 0 to 9, uint8, shape (N,), of a folder. Raises TrainError."""
    try:
        if not folder.is_dir():
            raise _bad(folder, "is not a folder")
        images_path = _find(folder, "train-images-idx3-ubyte")
        labels_path = _find(folder, "train-labels-idx1-ubyte")
    except OSError as error:  # a folder that may not be searched
        raise _bad(folder, f"cannot be read: {os_reason(error)}") from None
    images = read_idx(images_path, 3)
    labels = read_idx(labels_path, 1)
    if tuple(images.shape[1:]) != (28, 28):
        raise _bad(images_path, f"images of {images.shape[1]} x {images.shape[2]}, not 28 x 28")
    if len(images) != len(labels):
        raise _bad(labels_path, f"{len(labels)} labels for {len(images)} images in {images_path}")
    if int(labels.max()) > 9:
        raise _bad(labels_path, f"label {int(labels.max())} is not one of 0 to 9")
    return images, labels
