"""`python -m ddp_train.launch.rank SECONDS PROGRAM…`: a rank of a job of pods, which ends when all ranks have finished.

Kubeflow's training operator calls a job Succeeded when its first pod completes, and then removes those that run.
torchrun waits 300 seconds for the other nodes; after that, the node that keeps the store ends, and torchrun ends the
ranks of all others. So a rank that has finished waits here until every rank has, and none loses its save.

PROGRAM, a script or -m MODULE with its arguments, is a child of this process. Files in the folder `end` of the run's
folder tell the ranks of each other:

    end/ATTEMPT/ranks/RANK   this rank has finished
    end/ATTEMPT/pods/POD     changes while the pod lives
    end/ATTEMPT/pods/all     all ranks have finished; only rank 0 counts them

ATTEMPT is the address and the port that torchrun chooses anew for each start of the ranks. The job's pods start their
ranks together, after all earlier ones have ended: what has another name is of an earlier attempt or job.

Sources: pytorch/pytorch v2.13, torch/distributed/elastic/agent/server/api.py (_exit_barrier) and
multiprocessing/subprocess_handler; kubeflow/training-operator v1.9.4, pkg/controller.v1/pytorch.
"""

from __future__ import annotations

import ctypes
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from ..errors import BAD_INPUT, RUNTIME, TrainError, os_reason
from ..place import PR_SET_PDEATHSIG, RankInfo, die_with_parent, find_rank_info

_FOLDER = "end"
_ALL = "all"
_BEAT_S = 15.0
# A pod is lost after this many looks without a change of its file: longer than a network file system shows an old one.
# Looks are counted, because a look at a file system that hangs takes longer than the pause before it.
_POLL_S = 2.0
_LOST_AFTER = 150
_REPORTED_AFTER_S = 30.0
# With these torchrun ends ranks; the others are a program's own.
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_SIGNALS = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Barrier:
    """The end of the ranks' work. `folder` is that of this attempt."""

    folder: Path
    place: RankInfo

    @property
    def _pods(self) -> Path:
        return self.folder / "pods"

    @property
    def _ranks(self) -> Path:
        return self.folder / "ranks"

    def join(self) -> None:
        """Remove the files of earlier attempts, and write that this pod lives. Raises OSError."""
        for folder in (self._pods, self._ranks):
            folder.mkdir(parents=True, exist_ok=True)
        (self._ranks / str(self.place.rank)).unlink(missing_ok=True)
        if self.place.rank == 0:
            (self._pods / _ALL).unlink(missing_ok=True)
            for other in self.folder.parent.iterdir():
                if other != self.folder:
                    shutil.rmtree(other, ignore_errors=True)
        if self.place.local_rank == 0:
            self._beat(0)

    def show_life(self) -> None:
        """Go on to show that this pod lives, in a thread of its first rank."""
        if self.place.local_rank == 0:
            threading.Thread(target=self._beats, daemon=True).start()

    def _beats(self) -> None:
        number = 0
        while True:
            time.sleep(_BEAT_S)
            number += 1
            with suppress(OSError):
                self._beat(number)

    def _beat(self, number: int) -> None:
        (self._pods / str(self.place.group_rank)).write_text(f"{os.getpid()} {number}\n")

    def wait(self, seconds: float) -> str:
        """Wait until all ranks have finished; return "", or why the others' work is not known to be done.

        Raises OSError if the folder cannot be read or written.
        """
        (self._ranks / str(self.place.rank)).touch()
        began, looks = time.monotonic(), 0
        seen: dict[int, tuple[str, int]] = {}
        reported = False
        while (missing := self._missing()) is None or missing:
            pods = sorted({rank // self.place.local_world_size for rank in missing or (0,)})
            for pod in pods:
                text, since = seen.get(pod, ("", looks))
                now = self._sign(pod)
                seen[pod] = (now, looks if now != text else since)
            lost = [pod for pod in pods if looks - seen[pod][1] >= _LOST_AFTER and pod != self.place.group_rank]
            if lost:
                return f"{_named(lost)} gave no sign of life, and had not finished"
            if time.monotonic() - began > seconds:
                return f"the ranks of {_named(pods)} had not finished after {seconds:.0f} s"
            if missing and not reported and time.monotonic() - began > _REPORTED_AFTER_S:
                reported = True
                print(f"envbuild: waiting for the ranks of {_named(pods)}, which still work", file=sys.stderr)
            time.sleep(min(_POLL_S, 0.1 * 2**looks) if looks < 8 else _POLL_S)
            looks += 1
        return ""

    def _missing(self) -> set[int] | None:
        """Return the ranks that have not finished, for rank 0, which tells the others; these get None or no rank."""
        if self.place.rank != 0:
            return set() if _ALL in os.listdir(self._pods) else None
        finished = {int(name) for name in os.listdir(self._ranks) if name.isdecimal()}  # NFS adds .nfs…
        missing = set(range(self.place.world_size)) - finished
        if not missing:
            (self._pods / _ALL).touch()
        return missing

    def _sign(self, pod: int) -> str:
        try:
            return (self._pods / str(pod)).read_text()
        except FileNotFoundError:
            return ""


def _named(pods: Sequence[int]) -> str:
    return f"pod {', '.join(map(str, pods[:10]))}{' and others' if len(pods) > 10 else ''}"


def find_barrier(environ: Mapping[str, str]) -> Barrier:
    """Return the barrier of this attempt of the job. Raises TrainError for a process that torchrun did not start."""
    place = find_rank_info(environ)
    meeting = [environ.get(name, "") for name in ("ENVBUILD_RUN", "MASTER_ADDR", "MASTER_PORT")]
    if not all(meeting):
        raise TrainError("start ddp_train.launch.rank with torchrun, in a job of pods", BAD_INPUT)
    run, *attempt = meeting
    return Barrier(Path(run) / _FOLDER / re.sub(r"[^A-Za-z0-9.-]", "_", "-".join(attempt)), place)


class _Rank:
    """The rank's program. `ending`: a signal asked it to stop; `waits`: it waits for the other ranks at its end."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.ending = self.waits = False

    def received(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal. The program got it too, if torchrun made this process the leader of their group."""
        self.ending |= number in _ENDING
        if self.waits and number in _ENDING:
            _end_by(number)
        elif not self.waits and self.process is not None and os.getpgrp() != os.getpid():
            self.process.send_signal(number)


def _end_by(number: int) -> None:
    """End this process by the signal `number`, so that torchrun reports it; without a core file of its own."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def main(argv: Sequence[str]) -> int:
    """Run the program and wait for the other ranks; return the exit code."""
    if len(argv) < 2 or not argv[0].isdecimal():
        print(__doc__.partition("\n\n")[0], file=sys.stderr)
        return BAD_INPUT
    die_with_parent(os.environ)
    try:
        barrier = find_barrier(os.environ)
        barrier.join()
    except TrainError as error:
        print(f"envbuild: {error.message}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"envbuild: {error.filename}: {os_reason(error)}: pods must be able to write there", file=sys.stderr)
        return RUNTIME
    rank = _Rank()
    for caught in _SIGNALS:
        signal.signal(caught, rank.received)
    libc = ctypes.CDLL(None)
    rank.process = subprocess.Popen(
        [sys.executable, "-u", *argv[1:]], preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    )
    barrier.show_life()
    code = rank.process.wait()
    if code < 0:
        _end_by(-code)
    rank.waits = True
    if code or rank.ending:  # the others were asked, too, or start again
        return code
    try:
        problem = barrier.wait(float(argv[0]))
    except OSError as error:
        problem = f"{error.filename}: {os_reason(error)}: the other ranks' end cannot be seen"
    if not problem:
        return 0
    print(f"envbuild: rank {barrier.place.rank} has finished its work, but {problem}", file=sys.stderr)
    return RUNTIME


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
