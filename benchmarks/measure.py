"""What the benchmarks share: running commands, and the memory that they take."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path


def environment() -> dict[str, str]:
    """The environment, in which envbuild has its own bytecode as when it is installed: else it starts 0.2 s later."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def run(command: list[object], env: dict[str, str], cwd: Path) -> str:
    done = subprocess.run([str(part) for part in command], env=env, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{command} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    return done.stdout


def peak_memory(command: list[str], env: dict[str, str], cwd: Path) -> float:
    """The largest proportional set size (MB) of the command and all that it started."""
    child = subprocess.Popen(command, env=env, cwd=cwd, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    peak = 0
    while child.poll() is None:
        peak = max(peak, sum(_pss(pid) for pid in _family(child.pid)))
        time.sleep(0.05)
    assert child.returncode == 0
    return peak / 1000


def _family(root: int) -> set[int]:
    parents = {}
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                parents[int(path.name)] = int((path / "stat").read_text().rpartition(")")[2].split()[1])
    family = {root}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family


def _pss(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1])
    return 0
