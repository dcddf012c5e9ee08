"""Collective operations, independent of the library that implements them."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Collectives(Protocol):
    """Collective operations: all ranks call them in the same order, with tensors of the same shape and type."""

    def all_reduce(self, tensor: Any, *, largest: bool = False) -> None:
        """Sum `tensor` over all ranks in place, or take the maximum of each element if `largest`."""
        ...

    def all_gather(self, tensor: Any) -> list[Any]:
        """Return the one-dimensional `tensor` of every rank, in order of rank."""
        ...

    def broadcast(self, tensor: Any) -> None:
        """Replace `tensor` by rank 0's, in place."""
        ...

    def barrier(self) -> None:
        """Wait for all ranks."""
        ...

    def prepare(self, model: Any, optimizer: Any, device: Any) -> tuple[Any, Any]:
        """Return the model and the optimizer for training.

        They average gradients over the ranks and start from rank 0's parameters. The bare `model` shares its
        parameters with the returned one, and the returned optimizer keeps the state of `optimizer`.
        """
        ...

    def leave(self) -> None:
        """Leave the group; no other method may be called afterwards."""
        ...


class TorchCollectives:
    """Collective operations of torch's default process group."""

    def all_reduce(self, tensor: Any, *, largest: bool = False) -> None:
        """See `Collectives`."""
        kind = torch.distributed.ReduceOp
        torch.distributed.all_reduce(tensor, op=kind.MAX if largest else kind.SUM)

    def all_gather(self, tensor: Any) -> list[Any]:
        """See `Collectives`."""
        parts = [torch.zeros_like(tensor) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, tensor)
        return parts

    def broadcast(self, tensor: Any) -> None:
        """See `Collectives`."""
        torch.distributed.broadcast(tensor, src=0)

    def barrier(self) -> None:
        """See `Collectives`."""
        torch.distributed.barrier()

    def prepare(self, model: Any, optimizer: Any, device: Any) -> tuple[Any, Any]:
        """See `Collectives`; the model is wrapped in DistributedDataParallel."""
        ids = [device.index] if device.type == "cuda" else None
        return torch.nn.parallel.DistributedDataParallel(model, device_ids=ids), optimizer

    def leave(self) -> None:
        """See `Collectives`."""
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
