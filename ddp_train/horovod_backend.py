"""`--strategy horovod`: Horovod's ranks as a group. Imported only for this strategy.

mpirun starts the ranks of a Horovod that was built with MPI. Without MPI, horovodrun passes each rank its place
and runs the rendezvous server; a job script of envbuild passes the same values, and rank 0 runs the server
(horovod_rendezvous.py).
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Mapping
from typing import Any

import torch

from .distributed import Group, choose_backend
from .errors import BAD_INPUT, TrainError, one_line
from .horovod_rendezvous import PATIENCE_S, meet
from .place import RankInfo

# Variables in which launchers pass the number of ranks.
_SIZES = ("HOROVOD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "WORLD_SIZE")


class HorovodCollectives:
    """Collectives by Horovod, see `Collectives`. `hvd` is the initialised module horovod.torch."""

    def __init__(self, hvd: Any) -> None:
        self._hvd = hvd

    def all_reduce(self, tensor: Any, *, largest: bool = False) -> None:
        """See `Collectives`."""
        self._hvd.allreduce_(tensor, op=self._hvd.Max if largest else self._hvd.Sum)

    def all_gather(self, tensor: Any) -> list[Any]:
        """See `Collectives`."""
        return list(self._hvd.allgather(tensor).chunk(self._hvd.size()))

    def broadcast(self, tensor: Any) -> None:
        """See `Collectives`."""
        self._hvd.broadcast_(tensor, root_rank=0)

    def barrier(self) -> None:
        """See `Collectives`."""
        self._hvd.barrier()

    def prepare(self, model: Any, optimizer: Any, device: Any) -> tuple[Any, Any]:
        """See `Collectives`; the optimizer is wrapped in a DistributedOptimizer, the model is returned unchanged."""
        self._hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        wrapped = self._hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
        # The wrapper starts without state; all ranks have that of rank 0's snapshot.
        wrapped.load_state_dict(optimizer.state_dict())
        return model, wrapped

    def leave(self) -> None:
        """See `Collectives`."""
        self._hvd.barrier()
        self._hvd.shutdown()


def connect_horovod(environ: Mapping[str, str], host: str, requested: str) -> Group:
    """Join Horovod's job. `requested` is --backend: gloo trains on CPUs, nccl on GPUs.

    Raises TrainError when Horovod is missing, or when the launcher's ranks did not find each other.
    """
    if "TORCHELASTIC_RUN_ID" in environ:
        raise TrainError(
            "--strategy horovod: torchrun does not start Horovod's ranks; use mpirun or horovodrun", BAD_INPUT
        )
    hvd = _horovod()
    by_mpi = bool(hvd.mpi_built()) and environ.get("HOROVOD_CONTROLLER", "mpi") == "mpi"
    if not by_mpi:
        meet(environ)
    # By default, Gloo aborts a rank whose peers start more than 30 s later; a value set by the caller is kept.
    os.environ.setdefault("HOROVOD_GLOO_TIMEOUT_SECONDS", str(int(PATIENCE_S)))
    try:
        hvd.init()
    except (RuntimeError, ValueError, OSError) as error:
        raise TrainError(f"cannot join Horovod's job: {one_line(error)}") from error
    place = RankInfo(
        rank=hvd.rank(),
        local_rank=hvd.local_rank(),
        group_rank=hvd.cross_rank(),
        local_world_size=hvd.local_size(),
        world_size=hvd.size(),
        restart_count=0,
        host=host,
        distributed=True,
    )
    _check_all_are_here(environ, place, hvd)
    if choose_backend(requested, place) == "nccl":
        torch.cuda.set_device(place.local_rank)
        device = torch.device("cuda", place.local_rank)
        backend = "nccl" if hvd.nccl_built() else _controller(hvd)
    else:
        device, backend = torch.device("cpu"), _controller(hvd)
    return Group(place, device, backend, HorovodCollectives(hvd))


def _horovod() -> Any:
    try:
        # Its import prints warnings on standard output, whose readers do not expect them.
        with contextlib.redirect_stdout(sys.stderr):
            hvd: Any = importlib.import_module("horovod.torch")
    except (ImportError, OSError) as error:
        raise TrainError(
            f"--strategy horovod: horovod.torch cannot be imported by {sys.executable}:"
            f" {one_line(error)}; an environment of a recipe with [layers.horovod] has it"
        ) from error
    if not hasattr(hvd, "init"):
        raise TrainError(
            f"--strategy horovod: {os.path.dirname(hvd.__file__)} has no compiled library; it was built without PyTorch"
        )
    return hvd


def _check_all_are_here(environ: Mapping[str, str], place: RankInfo, hvd: Any) -> None:
    """Raise TrainError if Horovod does not see all ranks: each would train alone, unnoticed."""
    started = next((environ[name] for name in _SIZES if environ.get(name, "").isdigit()), "1")
    if int(started) == place.world_size:
        return
    if hvd.mpi_built():
        why = "its MPI is another than the one whose mpirun started them"
    else:
        why = "this Horovod was built without MPI; start them with horovodrun, or by envbuild job"
    raise TrainError(
        f"--strategy horovod: {started} ranks were started and Horovod sees {place.world_size}: {why}", BAD_INPUT
    )


def _controller(hvd: Any) -> str:
    return "mpi" if hvd.mpi_built() and hvd.mpi_enabled() else "gloo"
