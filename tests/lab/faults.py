"""envbuild with the n-th change of the file system failing: what tests/lab/fault_injector.c counts, from Python."""

from __future__ import annotations

import errno
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab.command_server import CommandServer, start_server

SOURCE = Path(__file__).with_name("fault_injector.c")
TIMEOUT_S = 60.0
_CONTROL = struct.Struct("qqiiiiq32s1024s256s")
# The faults of reads: that of a change, by a read. They are walked where they are asked for.
READ = "read:"
# name → (errno or -1 for SIGKILL, whether later calls that need space fail too)
FAULTS = {
    "EIO": (errno.EIO, 0),
    "ENOSPC": (errno.ENOSPC, 0),
    "EINTR": (errno.EINTR, 0),
    **{
        name: (getattr(errno, name), 0)
        for name in ("ESHUTDOWN", "ENOTCONN", "EUCLEAN", "ETIMEDOUT", "EBUSY", "ENOTSUP")
    },
    "full": (errno.ENOSPC, 1),
    "kill": (-1, 0),
}


@dataclass(frozen=True)
class Ran:
    """A command that ended. `status` is None when it hung; `call` and `path` are those of the fault, "" without one.

    `tool`: the fault was in a process that the command started.
    """

    status: int | None
    said: str
    calls: int
    call: str
    path: str
    tool: bool


def missing() -> str | None:
    """Why no fault can be injected here; None when it can."""
    return None if shutil.which("cc") else "no C compiler here (Debian's package gcc)"


@dataclass(frozen=True)
class Commands:
    """envbuild's commands in `folder`; what they change below `root` is counted."""

    server: CommandServer
    control: Path
    root: Path
    env: Mapping[str, str]

    def __call__(
        self, arguments: Sequence[str | Path], folder: Path, fault: str | None = None, number: int = 0, only: str = ""
    ) -> Ran:
        """Run one command. With `fault`, the call `number`, from 1, fails in that way.

        `only` is a pattern of paths below the root, which begin with "/": other calls do not count. Changes count, or
        reads where `fault` begins with READ.
        """
        kind, stays = FAULTS[fault.removeprefix(READ)] if fault else (0, 0)
        reads = bool(fault and fault.startswith(READ))
        with self.control.open("r+b") as stream:  # never shorter: it is mapped
            stream.write(_CONTROL.pack(0, number if fault else 0, kind, stays, 0, 0, reads, b"", b"", only.encode()))
        output = self.control.with_name("output")
        output.write_bytes(b"")
        child, status = self.server.run(arguments, folder, self.env, output, output, TIMEOUT_S)
        calls, _, _, _, hit, pid, _, call, path, _ = _CONTROL.unpack(self.control.read_bytes())
        text = [part.rstrip(b"\0").decode(errors="replace") if hit else "" for part in (call, path)]
        return Ran(status, output.read_text(errors="replace"), calls, text[0], text[1], bool(hit) and pid != child)


@contextmanager
def commands(work: Path, root: Path, env: Mapping[str, str]) -> Iterator[Commands]:
    """Yield commands whose changes below `root` can fail; `work` is a folder elsewhere, for the injector's files."""
    library, control = work / "fault_injector.so", work / "control"
    line = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", library, SOURCE, "-ldl"]
    subprocess.run(line, check=True)
    control.write_bytes(bytes(_CONTROL.size))
    own = {"LD_PRELOAD": str(library), "FAULT_CONTROL": str(control), "FAULT_ROOT": str(root)}
    variables = {**os.environ, **env, **own}
    server = start_server(variables)
    try:
        yield Commands(server, control, root, variables)
    finally:
        server.stop()
