"""Data sets, identical on every rank."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .args import DEFAULT_SYNTHETIC_SIZE, SYNTHETIC, Arguments
from .errors import BAD_INPUT, TrainError
from .idx import read_training_set
from .tensors import tensor_bytes

FEATURES = 20
CLASSES = 10
_REGRESSION_NOISE = 0.1
_IMAGE_NOISE = 2.0
# Mean and standard deviation of MNIST's pixels, as fractions of 255.
_PIXEL_MEAN = 0.1307
_PIXEL_STD = 0.3081


@dataclass(frozen=True)
class DataSet:
    """Samples in memory.

    `inputs` is float32 (N, 20), float32 (N, 1, 28, 28), or uint8 (N, 1, 28, 28) pixels. `targets` is float32 (N,
    1) for a regression, or int64 (N,) class numbers when `classes`.
    """

    inputs: Any
    targets: Any
    classes: bool

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: list[int], device: Any) -> tuple[Any, Any]:
        """Return inputs (float32, pixels normalised) and targets of these samples, on `device`."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        inputs = self.inputs[chosen].to(device)
        if inputs.dtype == torch.uint8:
            inputs = (inputs.to(torch.float32) / 255 - _PIXEL_MEAN) / _PIXEL_STD
        return inputs, self.targets[chosen].to(device)

    def digest(self) -> str:
        """Return the SHA-256 (hex) of all samples: nodes that read their own copies compare it."""
        digest = hashlib.sha256(tensor_bytes(self.inputs))
        digest.update(tensor_bytes(self.targets))
        return digest.hexdigest()


def synthetic_regression(size: int, seed: int) -> DataSet:
    """Return `size` samples of 20 normal features, labeled by a hidden linear teacher with noise of 0.1."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(FEATURES, 1, generator=generator) / FEATURES**0.5
    bias = torch.randn(1, generator=generator)
    inputs = torch.randn(size, FEATURES, generator=generator)
    noise = _REGRESSION_NOISE * torch.randn(size, 1, generator=generator)
    return DataSet(inputs, inputs @ teacher + bias + noise, classes=False)


def synthetic_images(size: int, seed: int) -> DataSet:
    """Return `size` images: a pattern of 4 x 4 blocks per class, with noise of twice the pattern's amplitude."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randn(CLASSES, 1, 7, 7, generator=generator)
    patterns = blocks.repeat_interleave(4, dim=2).repeat_interleave(4, dim=3)
    labels = torch.randint(CLASSES, (size,), generator=generator)
    noise = _IMAGE_NOISE * torch.randn(size, 1, 28, 28, generator=generator)
    return DataSet(patterns[labels] + noise, labels, classes=True)


def load_data(arguments: Arguments) -> DataSet:
    """Return the data set that the command line selects. Raises TrainError."""
    if arguments.data == SYNTHETIC:
        size = arguments.dataset_size or DEFAULT_SYNTHETIC_SIZE
        make = synthetic_images if arguments.model == "cnn" else synthetic_regression
        return make(size, arguments.seed)
    images, labels = read_training_set(Path(arguments.data))
    size = arguments.dataset_size or len(images)
    if size > len(images):
        raise TrainError(f"--dataset_size {size}: {arguments.data} holds only {len(images)} images", BAD_INPUT)
    return DataSet(images[:size].unsqueeze(1), labels[:size].to(torch.int64), classes=True)
