"""Find processes by their environment. Run as a script it kills them: containers have their own processes.

Needs nothing but Python 3.9. Source: proc_pid_environ(5).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

_PROC = Path("/proc")


def find_rank(run_id: str, rank: int, proc: Path = _PROC) -> int | None:
    """The process of `rank` in the torchrun job `run_id`."""
    wanted = (f"TORCHELASTIC_RUN_ID={run_id}", f"RANK={rank}")
    return next(find_with(wanted, proc), None)


def find_with(variables: tuple[str, ...], proc: Path = _PROC) -> Iterator[int]:
    """The processes that have all of `variables` (NAME=VALUE) in the environment they began with."""
    wanted = {text.encode() for text in variables}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            has = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # gone meanwhile, or somebody else's
            continue
        if wanted <= set(has):
            yield int(entry.name)


def main(what: str, *words: str) -> None:
    """`rank RUN_ID RANK` kills one rank and prints its process id; `all NAME=VALUE` kills all that have it."""
    if what == "rank":
        rank = find_rank(words[0], int(words[1]))
        found = [] if rank is None else [rank]
    else:
        found = list(find_with(words))
    for pid in found:
        os.kill(pid, signal.SIGKILL)
        print(pid)


if __name__ == "__main__":
    main(*sys.argv[1:])
