"""One training run, from joining the group to the report."""

from __future__ import annotations

import contextlib
import gc
import math
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from .args import Arguments
from .bandwidth import bandwidth_table, measure_bandwidth
from .data import DataSet, load_data
from .distributed import Group, connect
from .errors import BAD_INPUT, TrainError
from .files import require_writable
from .flight import record_hangs, write_record
from .imports import IMPORTS, import_modules
from .models import batch_loss, build_model
from .output import log, print_error
from .place import JUDGED_LATER, find_rank_info
from .probes import PROBES, run_probes
from .report import FORMAT, describe_network, describe_rank, memory_use, rank_table, write_report
from .resume import RESUME_AFTER, resume, wait_for_turn
from .selfcheck import check_allreduce, require_exact
from .snapshot import SnapshotFile, make_snapshot
from .tensors import model_digest

_POINTS = 200  # of the loss in the report of one epoch


@dataclass
class Clock:
    """Durations in seconds, also of each epoch; `started` is time.perf_counter() at the start of the program."""

    started: float
    import_torch: float
    rendezvous: float = 0.0
    train: float = 0.0
    epochs: list[float] = field(default_factory=list)

    def as_report(self) -> dict[str, float]:
        """Return the report's `seconds`, rounded to milliseconds."""
        seconds = {
            "import_torch": self.import_torch,
            "rendezvous": self.rendezvous,
            "train": self.train,
            "total": time.perf_counter() - self.started,
        }
        return {name: round(value, 3) for name, value in seconds.items()}


class Trainer:
    """A model, its data and its optimizer on one rank.

    `model` is the bare model; `step_model` and `optimizer` are the model and the optimizer as the group wraps
    them.
    """

    def __init__(self, arguments: Arguments, group: Group, data: DataSet, model: Any, optimizer: Any) -> None:
        self.arguments = arguments
        self.group = group
        self.data = data
        self.model = model
        self.step_model, self.optimizer = model, optimizer
        if group.backend is not None:
            prepared = group.collectives.prepare(model, optimizer, group.device)
            self.step_model, self.optimizer = prepared
        self.sampler = torch.utils.data.distributed.DistributedSampler(
            data,  # the sampler reads only its length
            num_replicas=group.place.world_size,
            rank=group.place.rank,
            shuffle=True,
            seed=arguments.seed,
        )

    @property
    def steps(self) -> int:
        """Steps per epoch, the same on every rank."""
        return math.ceil(len(self.sampler) / self.arguments.batch_size)

    def run_epoch(self, epoch: int) -> tuple[float, list[float]]:
        """Train for one epoch; return the mean loss of all ranks' samples: of the epoch, and of each of its steps.

        Above _POINTS steps, several give one mean.
        """
        self.sampler.set_epoch(epoch)
        order = list(self.sampler)
        size = self.arguments.batch_size
        # float64, and summed on the device: a .item() in each step would wait for the GPU.
        together = max(1, math.ceil(self.steps / _POINTS))
        totals = torch.zeros((math.ceil(self.steps / together), 2), dtype=torch.float64, device=self.group.device)
        for step, start in enumerate(range(0, len(order), size)):
            inputs, targets = self.data.batch(order[start : start + size], self.group.device)
            self.optimizer.zero_grad()
            loss = batch_loss(self.step_model(inputs), targets, self.data.classes)
            loss.backward()
            self.optimizer.step()
            totals[step // together, 0] += loss.detach().to(torch.float64) * len(targets)
            totals[step // together, 1] += len(targets)
        self.group.sum_over_ranks(totals)
        loss_sum, count = totals.sum(dim=0).tolist()
        log(
            f"[RANK {self.group.place.rank}] Epoch {epoch} | Batchsize: {min(size, len(order))}"
            f" | Steps: {self.steps} | Loss: {loss_sum / count:.6f}"
        )
        return float(loss_sum / count), (totals[:, 0] / totals[:, 1]).tolist()


def _connect(arguments: Arguments, environ: Mapping[str, str]) -> Group:
    if arguments.strategy == "horovod":
        from .horovod_backend import connect_horovod

        return connect_horovod(environ, socket.gethostname(), arguments.backend)
    return connect(find_rank_info(environ), arguments.backend)


def _join(arguments: Arguments, environ: Mapping[str, str], clock: Clock) -> tuple[Group, dict[str, Any]]:
    """Join the group, print the table of ranks, and check that they can work together."""
    began = time.perf_counter()
    group = _connect(arguments, environ)
    entry = describe_rank(group)
    ranks = group.gather(entry)
    clock.rendezvous = time.perf_counter() - began
    if group.leads:
        log(rank_table(ranks))
    with group.agreement():
        _require_same(group.gather(_shared(arguments)), "command lines")
    # The probes, which run after the training, contain the same sums.
    entry["allreduce"] = [] if PROBES in environ else check_allreduce(group)
    with _judged(arguments, environ, group):
        require_exact(entry["allreduce"], group.place.host)
    return group, entry


def _shared(arguments: Arguments) -> dict[str, Any]:
    """Return the arguments that must be equal on all ranks; each node may have its own files."""
    files = ("checkpoint_path", "report")
    return {name: value for name, value in asdict(arguments).items() if name not in files}


@contextlib.contextmanager
def _judged(arguments: Arguments, environ: Mapping[str, str], group: Group) -> Iterator[None]:
    """Run a self-check whose failure is fatal, unless the report's reader judges it (JUDGED_LATER).

    In that case the failure is printed, and training continues.
    """
    if arguments.report is None or environ.get(JUDGED_LATER) != "1":
        with group.agreement():
            yield
        return
    try:
        yield
    except TrainError as error:
        print_error(error.message)


def _require_same(values: list[Any], title: str) -> None:
    for rank, value in enumerate(values):
        if value != values[0]:
            raise TrainError(f"the {title} of rank 0 and rank {rank} differ", BAD_INPUT)


def _load_data(arguments: Arguments, group: Group) -> DataSet:
    with group.agreement():
        data = load_data(arguments)
    with group.agreement():
        # Each node may read its own copy.
        _require_same(group.gather(data.digest()), "data sets")
    return data


def _prepare_files(arguments: Arguments, store: SnapshotFile) -> None:
    store.prepare()
    if arguments.report is not None:
        require_writable(Path(arguments.report), "report")


def _train(
    trainer: Trainer, store: SnapshotFile, start: int, clock: Clock
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train from epoch `start` to the last; return the report's `losses` and `snapshots`."""
    arguments, group = trainer.arguments, trainer.group
    losses: list[dict[str, Any]] = []
    saved: list[dict[str, Any]] = []
    for epoch in range(start, arguments.total_epochs):
        began = time.perf_counter()
        loss, steps = trainer.run_epoch(epoch)
        clock.epochs.append(round(time.perf_counter() - began, 6))
        with group.agreement():
            if not math.isfinite(loss):
                raise TrainError(f"the loss is {loss} in epoch {epoch}: training diverged, try a smaller --lr")
        losses.append({"epoch": epoch, "loss": loss, "steps": steps})
        if epoch % arguments.save_every == 0 or epoch == arguments.total_epochs - 1:
            group.on_rank0(_saver(trainer, store, epoch))
            saved.append({"epoch": epoch, "path": arguments.checkpoint_path})
    return losses, saved


def _saver(trainer: Trainer, store: SnapshotFile, epoch: int) -> Callable[[], None]:
    def save() -> None:
        store.save(make_snapshot(trainer.model, trainer.optimizer, trainer.arguments.model, epoch + 1))
        log(f"Epoch {epoch} | Training snapshot saved at {trainer.arguments.checkpoint_path}")

    return save


def _bandwidth(arguments: Arguments, group: Group) -> list[dict[str, Any]]:
    if arguments.bandwidth is None:
        return []
    rows = measure_bandwidth(group, arguments.bandwidth)
    if group.leads:
        log(bandwidth_table(rows) if rows else "No bandwidth to measure: this is one process")
    return rows


def _work(arguments: Arguments, environ: Mapping[str, str], clock: Clock) -> Group:
    """Do everything up to the report; return the group, which is still joined.

    Only this function holds the DDP model, so that it is freed before the group is left.
    """
    group, entry = _join(arguments, environ, clock)
    record_hangs()
    wait_for_turn(environ, group)
    store = SnapshotFile(arguments.checkpoint_path)
    group.on_rank0(lambda: _prepare_files(arguments, store))
    data = _load_data(arguments, group)
    torch.manual_seed(arguments.seed)
    model = build_model(arguments.model, data.classes).to(group.device)
    search, optimizer = resume(arguments, group, store, model)
    start = 0 if search.snapshot is None else int(search.snapshot["EPOCHS_RUN"])
    trainer = Trainer(arguments, group, data, model, optimizer)
    if start >= arguments.total_epochs and group.leads:
        log(f"Nothing left to do: {start} of {arguments.total_epochs} epochs are finished")
    gc.freeze()  # the imports of the optimizer and DDP live until exit, too
    gc.enable()  # __main__.py disabled it
    began = time.perf_counter()
    losses, saved = _train(trainer, store, start, clock)
    clock.train = time.perf_counter() - began
    entry.update(memory_use(group.device))  # before the bandwidth is measured, which takes more
    entry["parameters_digest"] = model_digest(model)
    bandwidth = _bandwidth(arguments, group)
    entry["probes"] = run_probes(group, environ)
    entry.update(describe_network(group))
    # After all measurements: an import may change torch, or start threads.
    entry["imports"] = import_modules(environ)
    ranks = group.gather(entry)
    report = {
        "format": FORMAT,
        "status": "finished",
        "variables": [JUDGED_LATER, RESUME_AFTER, PROBES, IMPORTS],
        "world_size": group.place.world_size,
        "strategy": arguments.strategy,
        "backend": group.backend,
        "ranks": ranks,
        "model": arguments.model,
        "data": arguments.data,
        "seed": arguments.seed,
        "batch_size": arguments.batch_size,
        "dataset_size": len(data),
        "steps_per_epoch": trainer.steps,
        "start_epoch": start,
        "resumed_from": search.path,
        "rejected_snapshots": search.rejected,
        "total_epochs": arguments.total_epochs,
        "losses": losses,
        "snapshots": saved,
        "bandwidth": bandwidth,
        "seconds": clock.as_report(),
        "epoch_seconds": clock.epochs,
        "started": clock.started,
    }
    if arguments.report is not None:
        target = arguments.report
        group.on_rank0(lambda: write_report(target, report))
    with _judged(arguments, environ, group):
        if len({rank["parameters_digest"] for rank in ranks}) > 1:
            raise TrainError("the ranks' parameters differ after training")
    return group


def run(arguments: Arguments, environ: Mapping[str, str], clock: Clock) -> None:
    """Run the training at the place in the launcher's variables.

    Raises TrainError, on all ranks alike, for expected failures.
    """
    try:
        _work(arguments, environ, clock).close()
    except RuntimeError as error:
        if "imed out" in str(error):  # a collective
            write_record()
        raise
