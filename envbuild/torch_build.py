"""What a build of torch is for, told from its files without importing it.

Part of the survey that runs inside artifacts: nothing but Python 3.9 is needed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

VERSION_FILE = "torch/version.py"
# torch's own libraries for accelerators; conda has them in the environment's lib, wheels in torch/lib.
CUDA_LIBRARY, HIP_LIBRARY = "libtorch_cuda.so", "libtorch_hip.so"
# torch/version.py has a few lines; what is longer is none.
MAX_VERSION_FILE = 64 << 10
# `cuda: Optional[str] = '12.6'` in one release, `cuda = '12.6'` in others.
_CUDA = re.compile(r"^cuda\b[^=\n]*=\s*['\"]([0-9.]+)['\"]", re.MULTILINE)


def torch_cuda(text: str) -> str | None:
    """The CUDA version ("12.6") that torch was built for, from the text of torch/version.py; None without CUDA."""
    match = _CUDA.search(text)
    return match[1] if match else None


def accelerator_fault(
    target: str, wanted: str | None, cuda: str | None, libraries: Iterable[str], *, exact: bool
) -> str | None:
    """Why a torch built for `cuda`, with `libraries` of accelerators, does not suit the target called `target`.

    `wanted` is the target's CUDA ("12.6"), None for CPUs. Without `exact` only the major version counts: conda's
    builds of one major version stand in for each other. Returns None where it suits.
    """
    names = set(libraries)
    if wanted is None:
        if cuda is None and not names & {CUDA_LIBRARY, HIP_LIBRARY}:
            return None
        return f"is built for {f'CUDA {cuda}' if cuda else 'GPUs'}, and {target} is for CPUs"
    if cuda is None or CUDA_LIBRARY not in names:
        return f"has no CUDA in it, and {target} needs CUDA {wanted}"
    same = cuda == wanted if exact else cuda.split(".")[0] == wanted.split(".")[0]
    return None if same else f"is built for CUDA {cuda}, and {target} is for CUDA {wanted}"
