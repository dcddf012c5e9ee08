"""Conversion between tensors and bytes without NumPy, which a training environment may lack."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    """Return the elements of `tensor` in row-major order, in this machine's byte order."""
    flat = tensor.detach().cpu().contiguous()
    size = int(flat.numel()) * int(flat.element_size())
    # `flat` lives until the copy is made, so the address stays valid.
    return ctypes.string_at(flat.data_ptr(), size) if size else b""


def bytes_tensor(payload: bytes, device: Any = "cpu") -> torch.Tensor:
    """Return `payload` as a tensor of type uint8, shape (len(payload),)."""
    if not payload:
        return torch.empty(0, dtype=torch.uint8, device=device)
    return torch.frombuffer(bytearray(payload), dtype=torch.uint8).to(device)


def model_digest(model: Any) -> str:
    """Return the SHA-256 (hex) of all parameters and buffers: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor_bytes(tensor))
    return digest.hexdigest()
