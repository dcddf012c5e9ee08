"""Process group of a job: join, exchange small messages, agree on errors, leave."""

from __future__ import annotations

import contextlib
import gc
import inspect
import json
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch

from .chips import CHIPS, check_chips
from .collectives import Collectives, TorchCollectives
from .errors import BAD_INPUT, TrainError, one_line
from .output import print_error
from .place import RankInfo
from .tensors import bytes_tensor, tensor_bytes

# Time that a collective waits for the slowest rank; the death of a rank is noticed at once.
TIMEOUT = timedelta(minutes=10)


class Group:
    """This rank's view of the job; `backend` is None for one process without a process group.

    Every method but close() is collective: all ranks call it, in the same order.
    """

    def __init__(
        self, place: RankInfo, device: Any, backend: str | None, collectives: Collectives | None = None
    ) -> None:
        self.place = place
        self.device = device
        self.backend = backend
        self.collectives: Collectives = collectives or TorchCollectives()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which prints, reads and writes for all ranks."""
        return self.place.rank == 0

    def sum_over_ranks(self, tensor: Any) -> Any:
        """Sum `tensor` over all ranks, in place, and return it."""
        if self.backend is not None:
            self.collectives.all_reduce(tensor)
        return tensor

    def largest(self, tensor: Any) -> Any:
        """Replace each element of `tensor` by its maximum over all ranks, in place, and return it."""
        if self.backend is not None:
            self.collectives.all_reduce(tensor, largest=True)
        return tensor

    def gather(self, value: Any) -> list[Any]:
        """Return the `value` (of JSON types) of every rank, in order of rank."""
        if self.backend is None:
            return [value]
        # Not all_gather_object, which needs NumPy.
        own = bytes_tensor(json.dumps(value).encode(), self.device)
        size = torch.tensor([own.numel()], dtype=torch.int64, device=self.device)
        counts = [int(each.item()) for each in self.collectives.all_gather(size)]
        padded = torch.zeros(max(counts), dtype=torch.uint8, device=self.device)
        padded[: own.numel()] = own
        parts = self.collectives.all_gather(padded)
        return [json.loads(tensor_bytes(part[: counts[i]])) for i, part in enumerate(parts)]

    def broadcast(self, payload: bytes | None) -> bytes:
        """Return rank 0's `payload` (at least one byte) on every rank; the other ranks pass None."""
        if self.backend is None:
            return payload or b""
        size = torch.tensor([len(payload or b"")], dtype=torch.int64, device=self.device)
        self.collectives.broadcast(size)
        if payload is not None:
            buffer = bytes_tensor(payload, self.device)
        else:
            buffer = torch.zeros(int(size.item()), dtype=torch.uint8, device=self.device)
        self.collectives.broadcast(buffer)
        return tensor_bytes(buffer)

    def agree(self, error: TrainError | None) -> None:
        """Raise TrainError on every rank if any rank has an error, so that no rank waits for a failed one.

        Rank 0 prints the first error for all ranks.
        """
        own = None if error is None else [error.message, error.exit_code]
        failures = [(rank, *failure) for rank, failure in enumerate(self.gather(own)) if failure is not None]
        if not failures:
            return
        rank, message, exit_code = failures[0]
        if len(failures) < self.place.world_size and rank != 0:
            message = f"rank {rank}: {message}"
        if self.leads:
            print_error(message)
        if self.backend is not None:
            # Launchers kill all ranks when the first exits: rank 0 must have printed before that.
            with contextlib.suppress(RuntimeError):
                self.collectives.barrier()
        raise TrainError(message, exit_code, reported=True)

    @contextlib.contextmanager
    def agreement(self) -> Iterator[None]:
        """Run a block that may raise TrainError on some ranks only, then agree."""
        error = None
        try:
            yield
        except TrainError as raised:
            error = raised
        self.agree(error)

    def on_rank0(self, work: Callable[[], None]) -> None:
        """Run `work` on rank 0 only; if it raises TrainError, all ranks raise it."""
        with self.agreement():
            if self.leads:
                work()

    def close(self) -> None:
        """Leave the group.

        The caller must have dropped its DDP model. The collection frees the rest of it before the group's
        threads end: otherwise torch 2.13 with gloo sometimes aborts the process (SIGABRT).
        """
        gc.collect()
        if self.backend is not None:
            self.collectives.leave()
            self.backend = None


def choose_backend(requested: str, place: RankInfo) -> str:
    """Return `nccl` or `gloo`; `auto` selects nccl if each rank of the node has its own GPU. Raises TrainError."""
    if requested == "gloo":
        return "gloo"
    if not torch.cuda.is_available():
        missing = "torch finds no usable CUDA device"
    elif place.distributed and not torch.distributed.is_nccl_available():
        missing = "this torch was built without NCCL"
    elif torch.cuda.device_count() < place.local_world_size:
        missing = f"{torch.cuda.device_count()} GPUs for {place.local_world_size} ranks"
    else:
        return "nccl"
    if requested == "nccl":
        raise TrainError(f"--backend nccl: {missing} on {place.host}", BAD_INPUT)
    return "gloo"


def _check_same_backend(store: Any, place: RankInfo, backend: str) -> None:
    """Raise TrainError on every rank if their backends differ, since they would wait for each other forever."""
    keys = [f"ddp_train/backend/{rank}" for rank in range(place.world_size)]
    store.set(keys[place.rank], f"{backend} on {place.host}")
    # One request for all keys; torch 2.0 does not support it.
    many = getattr(store, "multi_get", lambda all_keys: [store.get(key) for key in all_keys])
    choices = [choice.decode() for choice in many(keys)]
    for rank, choice in enumerate(choices):
        if choice.split()[0] != choices[0].split()[0]:
            raise TrainError(
                f"the ranks disagree on the backend: rank 0 would use {choices[0]}, rank {rank}"
                f" {choice}; repair the GPU set-up or pass --backend gloo",
                BAD_INPUT,
            )


def _bound_to(device: Any) -> dict[str, Any]:
    """Return the option that binds NCCL to the rank's GPU from the start; torch before 2.3 binds later."""
    known = inspect.signature(torch.distributed.init_process_group).parameters
    return {"device_id": device} if device.type == "cuda" and "device_id" in known else {}


def connect(place: RankInfo, requested: str) -> Group:
    """Join the job's process group, or run as one process when `place` is not distributed. Raises TrainError."""
    backend = choose_backend(requested, place)
    if backend == "nccl":
        if chips := os.environ.get(CHIPS):
            check_chips(chips.split(","))
        # By default cuDNN may add in another order in each run: the same training then ends with other parameters.
        torch.backends.cudnn.deterministic = True
        torch.cuda.set_device(place.local_rank)
        device = torch.device("cuda", place.local_rank)
    else:
        device = torch.device("cpu")
    if not place.distributed:
        return Group(place, device, None)
    if not torch.distributed.is_available():
        raise TrainError("this torch was built without torch.distributed")
    try:
        meeting = torch.distributed.rendezvous("env://", place.rank, place.world_size, timeout=TIMEOUT)
        store, _, _ = next(iter(meeting))
        store.set_timeout(TIMEOUT)
        _check_same_backend(store, place, backend)
        torch.distributed.init_process_group(
            backend, store=store, rank=place.rank, world_size=place.world_size, timeout=TIMEOUT, **_bound_to(device)
        )
    except (RuntimeError, ValueError, OSError) as error:
        raise TrainError(f"cannot join the process group: {one_line(error)}") from error
    return Group(place, device, backend)
