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
    wanted = (f"TORCHELASTIC_RUN_ID={run_id}", f"RANK={rank}")
    return next(find_with(wanted, proc), None)


def find_with(variables: tuple[str, ...], proc: Path = Path("/proc")) -> Iterator[int]:
    """Yield the process IDs whose initial environment contains all of `variables` (NAME=VALUE)."""
    wanted = {text.encode() for text in variables}
    for entry in proc.iterdir():
        if not entry.name.isdigit():
            continue
        try:
            has = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # the process has ended, or belongs to another user
            continue
        if wanted <= set(has):
            yield int(entry.name)


def main(what: str, *words: str) -> None:
    """Kill one rank (`rank RUN_ID RANK`) or all processes with a variable (`all NAME=VALUE`), and print their IDs."""
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
