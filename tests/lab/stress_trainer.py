"""Run the trainer on two ranks many times: `python tests/lab/stress_trainer.py 100`.

torch with gloo sometimes aborts a process that has finished its training. Prints `N passed, M failed`
and exits with 1 if any run failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_once(folder: Path, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """One run of three epochs on two ranks, from no snapshot."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*command, "-m", "ddp_train", "3", "2", "--dataset_size", "256"],
        cwd=folder,
        env=environ,
        text=True,
        capture_output=True,
        timeout=300,
    )


def main() -> int:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)
    failed = 0
    began = time.monotonic()
    for number in range(1, runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            try:
                result = run_once(Path(folder), environ)
            except subprocess.TimeoutExpired:
                failed += 1
                print(f"run {number}: no end within 300 s", flush=True)
                continue
        finished = "Epoch 2 | Training snapshot saved" in result.stdout
        # torchrun itself may hide an abort that comes after the last rank reported success.
        if result.returncode != 0 or not finished or "terminate called" in result.stderr:
            failed += 1
            print(f"run {number}: exit code {result.returncode}\n{result.stderr[-2000:]}", flush=True)
    seconds = time.monotonic() - began
    print(f"{runs - failed} passed, {failed} failed ({seconds / max(runs, 1):.1f} s each)")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
