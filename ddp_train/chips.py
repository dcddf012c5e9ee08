"""`python -m ddp_train.chips sm_90[,…] -- COMMAND`: run COMMAND only on a host whose GPUs are among these chips.

Environments that `[slim]` made have code for these alone; on others their programs would fail late, or in one function
only. Asks the driver's library, without a context on a GPU (CUDA Driver API: cuDeviceGetAttribute, 75 and 76).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence

from .errors import BAD_INPUT, TrainError

# What `envbuild verify` sets for such an environment: its chips.
CHIPS = "DDP_TRAIN_CHIPS"
_DRIVER = "libcuda.so.1"
_MAJOR, _MINOR = 75, 76
# The exit code for a node that a job cannot use, as envbuild's own.
UNUSABLE = 5


def check_chips(chips: Sequence[str]) -> None:
    """Raise TrainError if a GPU that this process may use is none of `chips` (sm_90). Without a driver, it passes."""
    wrong = sorted({chip for chip in visible_chips() if chip not in chips})
    if wrong:
        raise TrainError(
            f"this environment has code for {', '.join(chips)} alone ([slim] of its recipe), and this node has "
            f"{', '.join(wrong)}: choose other nodes, or add these GPUs to `gpus` of the target and build again"
        )


def visible_chips() -> list[str]:
    """Return the chip of each GPU that this process may use; [] without a driver."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return []
    count, device = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    chips = []
    for number in range(count.value):
        major, minor = ctypes.c_int(), ctypes.c_int()
        if (
            driver.cuDeviceGet(ctypes.byref(device), number)
            or driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
            or driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
        ):
            continue
        chips.append(f"sm_{major.value}{minor.value}")
    return chips


def main(argv: Sequence[str]) -> int:
    """Check, and become the command. Returns an exit code if that is not possible."""
    if len(argv) < 3 or argv[1] != "--":
        print((__doc__ or "").partition("\n\n")[0], file=sys.stderr)
        return BAD_INPUT
    try:
        check_chips(argv[0].split(","))
    except TrainError as error:
        print(f"envbuild: {error.message}", file=sys.stderr)
        return UNUSABLE
    os.execvp(argv[2], list(argv[2:]))
    return UNUSABLE  # for type checkers: exec does not return


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
