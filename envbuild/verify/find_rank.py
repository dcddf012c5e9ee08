"""Find the process of a rank of a torchrun job. Run as a script it kills it: containers have their own processes.

Needs nothing but Python 3.9.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path


def find_rank(run_id: str, rank: int, proc: Path = Path("/proc")) -> int | None:
    """The process of `rank` in the torchrun job `run_id`, from its environment (proc_pid_environ(5))."""
    wanted = {f"TORCHELASTIC_RUN_ID={run_id}".encode(), f"RANK={rank}".encode()}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            variables = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or somebody else's
            continue
        if wanted <= set(variables):
            return int(entry.name)
    return None


if __name__ == "__main__":
    found = find_rank(sys.argv[1], int(sys.argv[2]))
    if found is not None:
        os.kill(found, signal.SIGKILL)
        print(found)
