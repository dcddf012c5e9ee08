"""Tell a running training to end, so that its ranks can save their state first.

A signal to a step of a job reaches all of its processes. SIGTERM would end squashfuse, which serves a container's
image, before a rank has saved its state. So the batch script sends SIGURG, which programs ignore by default.
(Apptainer does not pass it on: the Go runtime uses it.) torchrun must get SIGTERM only once: after a second one, it
would not wait for its ranks.

scancel and the time limit itself send SIGTERM to all processes. So the script starts enroot with that signal ignored,
which squashfuse inherits, and this program takes it again. Apptainer's squashfuse inherits neither an ignored signal,
because the Go runtime takes it back, nor a blocked one, because Apptainer's starter sets the signal mask anew.

Sources: scancel(1); signal(7); libfuse, lib/fuse_signals.c, which handles no ignored signal; Apptainer 1.4,
internal/pkg/runtime/engine/apptainer and cmd/starter/c/starter.c.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType

from .job import Run


def take_sigterm() -> None:
    """Let this process and its children get SIGTERM, which a job's script lets enroot and its file server ignore."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_IGN:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class _Child:
    """The training's process. `ending`: it was asked to stop; `owed`: it had not started when it was asked."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.ending = self.owed = False

    def tell(self) -> None:
        """Send the training its one SIGTERM."""
        if self.process is None:
            self.owed = True
        elif not self.ending:
            self.process.terminate()
        self.ending = True

    def received(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal. SIGTERM and SIGINT reach all processes: the training, if it runs, has its own."""
        if number != signal.SIGURG and self.process is not None:
            self.ending = True
        else:
            self.tell()


@contextmanager
def _compiled(environment: Mapping[str, str], run: Run) -> Iterator[dict[str, str]]:
    """Give torch.compile a folder on this node's disk, which is removed at the end; by default, one stays in /tmp."""
    name, folder = "TORCHINDUCTOR_CACHE_DIR", ""
    if name not in environment:
        with suppress(OSError):
            folder = tempfile.mkdtemp(prefix=f"envbuild-{run.id}-", dir=environment.get("TMPDIR") or "/tmp")
    try:
        yield {name: folder} if folder else {}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_child(command: Sequence[str], environment: Mapping[str, str], run: Run, number: int) -> int:
    """Run the training as a child process that gets SIGTERM once, and return the exit code.

    If the launcher would end all nodes after an error, a node that was asked to stop returns 0 and writes its exit
    code into the file ended-RESTARTS.NUMBER for the batch script: another node may still be saving its state. The code
    of the first node that failed untold becomes the job's (Run.failed).
    """
    ended = run.file(f"ended.{number}")
    ended.unlink(missing_ok=True)
    child = _Child()
    for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGURG):
        signal.signal(caught, child.received)
    # The batch script's file is for nodes whose container was still starting.
    if run.file("told").exists():
        child.tell()
    with _compiled(environment, run) as own:
        child.process = subprocess.Popen(command, env={**environment, **own})
        if child.owed:
            child.process.terminate()
        code = child.process.wait()
    code = 128 - code if code < 0 else code
    if code and child.ending and run.job.exit_codes:
        ended.write_text(f"{code}\n")
        return 0
    if code and not child.ending:
        run.failed(code)
    return code
