"""Models and their losses.

No model has dropout or batch normalisation: W ranks with batches of b then take the same steps, up to rounding,
as one process with batches of b * W.
"""

from __future__ import annotations

from typing import Any

import torch

from .data import CLASSES, FEATURES

_PIXELS = 28 * 28


def build_model(name: str, classes: bool) -> Any:
    """Return the model `linear`, `mlp` or `cnn`: from 28 x 28 images if `classes`, else from 20 features to 1 value."""
    nn = torch.nn
    if name == "cnn":
        return nn.Sequential(
            nn.Conv2d(1, 8, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(8, 16, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 7 * 7, CLASSES),
        )
    if classes:
        if name == "linear":
            return nn.Sequential(nn.Flatten(), nn.Linear(_PIXELS, CLASSES))
        return nn.Sequential(nn.Flatten(), nn.Linear(_PIXELS, 128), nn.ReLU(), nn.Linear(128, CLASSES))
    if name == "linear":
        # Not in a Sequential: the keys of its state must be `weight` and `bias`.
        return nn.Linear(FEATURES, 1)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.ReLU(), nn.Linear(64, 1))


def build_optimizer(model: Any, lr: float) -> Any:
    """Return SGD with momentum, whose buffers a snapshot must keep."""
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


def batch_loss(outputs: Any, targets: Any, classes: bool) -> Any:
    """Return the mean loss over a batch: cross entropy for classes, else the squared error."""
    functional = torch.nn.functional
    if classes:
        return functional.cross_entropy(outputs, targets)
    return functional.mse_loss(outputs, targets)
