"""envbuild with the n-th change of the file system failing: what tests/lab/fault_injector.c counts, from Python."""

from __future__ import annotations

import errno
import json
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SOURCE = Path(__file__).with_name("fault_injector.c")
SERVER = Path(__file__).with_name("fault_server.py")
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

    server: subprocess.Popen[str]
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
        request = {
            "arguments": [str(one) for one in arguments],
            "folder": str(folder),
            "env": dict(self.env),
            "output": str(output),
            "timeout_s": TIMEOUT_S,
        }
        stdin, stdout = _streams(self.server)
        stdin.write(json.dumps(request) + "\n")
        stdin.flush()
        answer = stdout.readline()
        assert answer, f"the server ended with {self.server.wait()}"
        calls, _, _, _, hit, pid, _, call, path, _ = _CONTROL.unpack(self.control.read_bytes())
        text = [part.rstrip(b"\0").decode(errors="replace") if hit else "" for part in (call, path)]
        child, status = json.loads(answer)
        return Ran(status, output.read_text(errors="replace"), calls, text[0], text[1], bool(hit) and pid != child)


@contextmanager
def commands(work: Path, root: Path, env: Mapping[str, str]) -> Iterator[Commands]:
    """Yield commands whose changes below `root` can fail; `work` is a folder elsewhere, for the injector's files."""
    library, control = work / "fault_injector.so", work / "control"
    line = ["cc", "-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o", library, SOURCE, "-ldl"]
    subprocess.run(line, check=True)
    control.write_bytes(bytes(_CONTROL.size))
    own = {"LD_PRELOAD": str(library), "FAULT_CONTROL": str(control), "FAULT_ROOT": str(root)}
    server = subprocess.Popen(
        [sys.executable, SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **env, **own},
    )
    try:
        yield Commands(server, control, root, env)
    finally:
        _streams(server)[0].close()
        server.kill()
        server.wait()


def _streams(server: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    assert server.stdin is not None and server.stdout is not None
    return server.stdin, server.stdout
