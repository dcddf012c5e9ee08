"""Find processes by their environment; run as a script in a container, kill them.

Needs only Python 3.9. Source: proc_pid_environ(5).
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path


def find_rank(run_id: str, rank: int, proc: Path = Path("/proc")) -> int | None:
    """Return the process ID of `rank` in the torchrun job `run_id`, None when there is none."""
    variables = (f"TORCHELASTIC_RUN_ID={run_id}", f"RANK={rank}")
    return next(find_with(variables, proc), None)


def find_with(variables: tuple[str, ...], proc: Path = Path("/proc")) -> Iterator[int]:
    """Yield the process IDs whose initial environment contains all of `variables` (NAME=VALUE)."""
    variable_bytes = {text.encode() for text in variables}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            has = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        if variable_bytes <= set(has):
            yield int(entry.name)


def main(command: str, *words: str) -> None:
    """Kill one rank (`rank RUN_ID RANK`) or all processes with a variable (`all NAME=VALUE`), and print their IDs."""
    if command == "rank":
        rank = find_rank(words[0], int(words[1]))
        pids = [] if rank is None else [rank]
    else:
        pids = list(find_with(words))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
        print(pid)


if __name__ == "__main__":
    main(*sys.argv[1:])
