"""What each rank was doing when a job hung: torch's flight recorder and the rank's stack, in files.

torch records the collectives that a rank enters. With NCCL, torch writes the record itself when a collective times
out. With gloo nobody does, so this module does, and it adds the stack, which shows what a rank that is late does
instead. The bundled trainer calls it. A script of your own can, after init_process_group:

    from ddp_train.flight import record_hangs
    record_hangs()

Files, for `envbuild diagnose`: the value of TORCH_FR_DUMP_TEMP_FILE, which jobs of `envbuild job` set, followed by
the rank (the record, a pickle of torch's format) and by RANK.stack (lines FILE:LINE in FUNCTION, the
innermost first, below a line `failed` if the last collective failed, which the record calls ended).

Sources: torch, torch/csrc/distributed/c10d/FlightRecorder.hpp, ProcessGroupNCCL.cpp and
torch/distributed/flight_recorder.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import sys
import threading
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
_DEEPEST = 100  # frames of a stack


def flight_variables(prefix: str, gpu: bool) -> dict[str, str]:
    """Return the variables that switch the recorder on, with files PREFIX and the rank; `gpu`: for NCCL."""
    variables = {"TORCH_FR_BUFFER_SIZE": "2000", PREFIX: prefix}
    if gpu:
        variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
        if _torch() < (2, 9):  # by their names before; later, every rank would warn of them
            variables |= {"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix}
    return variables


def _torch() -> tuple[int, ...]:
    """Return major and minor version of this Python's torch; () if it has none, or one without metadata."""
    try:
        version = re.match(r"(\d+)\.(\d+)", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        version = None
    return tuple(map(int, version.groups())) if version else ()


def record_hangs() -> None:
    """Write this rank's files on SIGTERM, which torchrun sends to ranks that it ends; then let SIGTERM end the rank.

    Call this in the main thread, after the process group was made. Without the variables of a job, nothing is done,
    nor if another program waits for signals (asyncio).
    """
    target = _target()
    if target is None or threading.current_thread() is not threading.main_thread():
        return
    for old in (target, _stack_file(target)):  # of this rank before torchrun restarted it
        with contextlib.suppress(OSError):
            old.unlink()
    # A rank that waits in a collective runs no signal handler of Python, but the C handler wakes the thread.
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    previous = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    if previous != -1:
        signal.set_wakeup_fd(previous)
        return
    unhandled = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if unhandled:
        signal.signal(signal.SIGTERM, _ignore)
    _forget_in_children()
    threading.Thread(target=_wait, args=(reader, writer, unhandled), name="flight", daemon=True).start()


def write_record(failed: bool = True) -> None:
    """Write this rank's files at once; `failed` if its last collective timed out. Without a job, nothing is done."""
    target = _target()
    if target is not None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0)
        with contextlib.suppress(OSError):
            _write(target, frame, ["failed\n"] if failed else [])


def _target() -> Path | None:
    prefix, rank = os.environ.get(PREFIX, ""), os.environ.get("RANK", "")
    return Path(prefix + rank) if prefix and rank.isdecimal() else None


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """Handle SIGTERM: the thread does the work."""


def _forget_in_children() -> None:
    """Let SIGTERM end forked processes, such as workers that load data: they have no thread, but this rank's socket.

    While a process forks, it is blocked: the child must not receive it before it has forgotten the socket.
    """
    masks: list[Any] = []

    def before() -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]))

    def after() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.pop())

    def in_child() -> None:
        signal.set_wakeup_fd(-1)
        if signal.getsignal(signal.SIGTERM) is _ignore:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        after()

    os.register_at_fork(before=before, after_in_parent=after, after_in_child=in_child)


def _wait(reader: socket.socket, _writer: socket.socket, ends: bool) -> None:
    """Wait for SIGTERM, whose number the C handler writes to `_writer`, which this reference keeps open."""
    while number := reader.recv(1):
        if number[0] != signal.SIGTERM:
            continue
        write_record(failed=False)
        if ends:
            _die()


def _die() -> None:
    """End this process by SIGTERM. Only the main thread may restore a handler through Python's module."""
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = [ctypes.c_int, ctypes.c_void_p]
    libc.signal(int(signal.SIGTERM), None)
    os.kill(os.getpid(), signal.SIGTERM)


def _write(target: Path, frame: FrameType | None, lines: list[str]) -> None:
    while frame is not None and len(lines) < _DEEPEST:
        lines.append(f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}\n")
        frame = frame.f_back
    _stack_file(target).write_text("".join(lines), encoding="utf-8", errors="replace")
    record = _record()
    if record:
        target.write_bytes(record)


def _stack_file(target: Path) -> Path:
    return target.with_name(target.name + ".stack")


def _record() -> bytes:
    """Return the record of gloo's collectives, as a pickle; b"" if this torch has none, or the backend is NCCL."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_initialized() or torch.distributed.get_backend() == "nccl":
        return b""
    dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)  # torch 2.9
    if dump is None:
        return b""
    # torch asks for the attribute _inductor, whose import takes seconds.
    absent = "torch._inductor" not in sys.modules
    if absent:
        torch._inductor = None
    try:
        return bytes(dump(True, True, False))
    except RuntimeError:
        return b""
    finally:
        if absent:
            del torch._inductor
