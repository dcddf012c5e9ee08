"""Command line of the trainer."""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from .errors import BAD_INPUT
from .output import print_error

DEFAULT_SYNTHETIC_SIZE = 2048
SYNTHETIC = "synthetic"


@dataclass(frozen=True)
class Arguments:
    """Arguments of a training run.

    `batch_size` is per rank. `dataset_size` None means all samples of a folder. `bandwidth` is the time of the
    measurement in seconds; None means no measurement.
    """

    total_epochs: int
    save_every: int
    batch_size: int
    checkpoint_path: str
    model: str
    data: str
    dataset_size: int | None
    lr: float
    backend: str
    report: str | None
    seed: int
    bandwidth: float | None = None
    strategy: str = "ddp"


# Set by torchrun, horovodrun and Open MPI's mpirun: the local rank.
_LOCAL_RANKS = ("LOCAL_RANK", "HOROVOD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
_LAST_WORDS_S = 5.0


class _Parser(argparse.ArgumentParser):
    """Parser that prints an error as one line, once per node rather than once per rank."""

    def error(self, message: str) -> NoReturn:
        if next((os.environ[name] for name in _LOCAL_RANKS if name in os.environ), "0") == "0":
            print_error(f"{message} (see python -m ddp_train --help)")
        else:
            # Launchers kill all ranks of a node when one exits: the rank that prints the error must exit first.
            time.sleep(_LAST_WORDS_S)
        sys.exit(BAD_INPUT)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {text}")
    return value


def _rate(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"must be a positive number, not {text}")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if not 0 <= value < 2**32:
        raise argparse.ArgumentTypeError(f"must lie between 0 and 2**32 - 1, not {text}")
    return value


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty")
    return text


# argparse prints the converter's name in "invalid … value": use words that users know.
_positive.__name__ = _seed.__name__ = "whole number"
_rate.__name__ = "number"


def build_parser() -> argparse.ArgumentParser:
    """Return the parser; it accepts each option with underscores and with dashes."""
    parser = _Parser(prog="ddp_train", description="Distributed training job", allow_abbrev=False)
    parser.add_argument("total_epochs", type=_positive, help="epochs in all, resumed ones included")
    parser.add_argument("save_every", type=_positive, help="epochs from one snapshot to the next")
    parser.add_argument("--batch_size", "--batch-size", type=_positive, default=32, help="samples per rank and step")
    parser.add_argument(
        "--checkpoint_path",
        "--checkpoint-path",
        type=_path,
        default="snapshot.pt",
        help="snapshot to resume from and to write (default: %(default)s)",
    )
    parser.add_argument("--model", choices=("linear", "mlp", "cnn"), default="linear")
    parser.add_argument(
        "--data",
        type=_path,
        default=SYNTHETIC,
        metavar="synthetic|DIR",
        help="generated data, or a folder with MNIST-style train-*-ubyte[.gz] files",
    )
    parser.add_argument(
        "--dataset_size",
        "--dataset-size",
        type=_positive,
        default=None,
        help=f"samples (default: {DEFAULT_SYNTHETIC_SIZE}, or all of DIR)",
    )
    parser.add_argument("--lr", type=_rate, default=0.01, help="learning rate (default: 0.01)")
    parser.add_argument(
        "--backend",
        choices=("auto", "gloo", "nccl"),
        default="auto",
        help="gloo trains on CPUs, nccl on GPUs, auto on GPUs if every rank of the node has one",
    )
    parser.add_argument("--report", type=_path, default=None, metavar="FILE", help="JSON report")
    parser.add_argument("--seed", type=_seed, default=0)
    parser.add_argument(
        "--bandwidth",
        type=_rate,
        default=None,
        metavar="SECONDS",
        help="after training, measure the all-reduce bus bandwidth over sizes for about SECONDS",
    )
    parser.add_argument(
        "--strategy",
        choices=("ddp", "horovod"),
        default="ddp",
        help="ddp under torchrun, horovod under mpirun or horovodrun (default: %(default)s)",
    )
    return parser


def parse_arguments(argv: list[str] | None = None) -> Arguments:
    """Parse `argv` (default: sys.argv[1:]); exit with code 2 if it is invalid."""
    return Arguments(**vars(build_parser().parse_args(argv)))
