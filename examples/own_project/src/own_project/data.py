"""Points on a noisy line, the same for every rank."""

import numpy as np
import torch


def make_line(samples: int, seed: int = 0) -> torch.utils.data.TensorDataset:
    """Return `samples` pairs (x, 3x + 1 + noise)."""
    rng = np.random.default_rng(seed)
    x = rng.uniform(-1, 1, (samples, 1)).astype("float32")
    y = 3 * x + 1 + rng.normal(0, 0.05, x.shape).astype("float32")
    return torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y))
