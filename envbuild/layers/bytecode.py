"""Compilation of modules while their tree is streamed; the .pyc files follow the tree.

Most users cannot write to images, so missing bytecode would be compiled again at each start: with it, `import torch`
takes half the time. The files are timestamp-based (PEP 552) with the layer's fixed mtime, so that editing a module
inside a container takes effect.

Bytecode must be the same on every machine, but marshal's output depends on the other objects in its process
(python/cpython#78274). Therefore processes that import only built-in modules compile it, each with a fixed hash seed
and a fixed share of the modules, regardless of the number of processors. They intern all one-character strings first,
because imports at start-up may intern some of these, depending on the bytecode in the standard library.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import struct
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import IO

from envbuild.base.errors import BuildError, HostError
from envbuild.base.workers import Answer, Workers
from envbuild.image.entry import FILE, Entry, Tree, closing, read_fully
from envbuild.interpreter import HostPython, compiling_environment
from envbuild.layers.contents import Joined

# Larger modules are rare, generated tables; they are compiled when they are imported.
_MAX_SOURCE = 4 << 20
# Tests are a third of the modules and of the time, and nothing that runs in an image imports them. Other names are no
# sign of tests: torch imports modules of torch/testing/_internal.
_TESTS = re.compile(r"/(?:tests|python3\.\d+/test)/")
_RULES = 3  # of what is compiled, and how
# Modules per process: enough to make its start cheap, few enough to keep all processors busy.
_SHARE, _SHARE_BYTES = 200, 4 << 20
_MOST_PROCESSES = 8  # a single reader keeps no more busy, and shares in progress are held in memory
_WORKER = r"""
import marshal, sys
for number in range(256):
    sys.intern(chr(number))
read, write, flush = sys.stdin.buffer.read, sys.stdout.buffer.write, sys.stdout.buffer.flush
while head := read(8):
    name = read(int.from_bytes(head[:4], "little")).decode("utf-8", "surrogateescape")
    source = read(int.from_bytes(head[4:], "little"))
    try:
        code = marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=-1))
    except Exception:
        code = b""
    write(len(code).to_bytes(4, "little"))
    write(code)
    flush()
"""

# The magic numbers of releases. Source: CPython, Include/internal/pycore_magic_number.h.
_NUMBERS = {"3.9": 3425, "3.10": 3439, "3.11": 3495, "3.12": 3531, "3.13": 3571, "3.14": 3627}
MAGIC = {python: number.to_bytes(2, "little") + b"\r\n" for python, number in _NUMBERS.items()}

_Share = list[tuple[str, bytes]]  # (path, source)
_Compiled = list[tuple[str, int, bytes]]  # (path, size of the source, code)


@dataclass(frozen=True, slots=True)
class Compiler:
    """An interpreter that compiles bytecode: its path, full version, cache tag and magic number.

    `start` are the first words of its command lines and `home` is the folder of its library, if it is not installed on
    this host. If it must be unpacked first, `provide` returns it with its path.
    """

    python: str
    version: str
    tag: str
    magic: bytes
    start: tuple[str, ...] = ()
    home: str = ""
    provide: Callable[[], Compiler] | None = field(default=None, repr=False, compare=False)

    @property
    def identity(self) -> str:
        """Properties that determine the bytecode, in addition to the source."""
        return f"{self.tag} {self.version} {self.magic.hex()} {_RULES}"


def compiler_of(python: HostPython) -> Compiler:
    """Return the compiler for the interpreter `python`."""
    return Compiler(python.path, python.version, python.tag, bytes.fromhex(python.magic))


def with_bytecode(tree: Tree, compiler: Compiler | None, below: Sequence[str], mtime: int) -> Tree:
    """Yield `tree`, then the bytecode of every module under the folders `below`.

    Without a compiler, yield `tree` only. Tests are not compiled; modules that do not compile (templates) are skipped.
    Raises HostError when the interpreter dies, BuildError when it or a temporary file is not available.
    """
    if compiler is None:
        yield from tree
        return
    prefixes = tuple(folder + "/" for folder in below)
    with closing(tree), contextlib.closing(_Pool(compiler)) as pool:
        own: set[str] = set()  # numpy's wheel contains a .pyc, which its RECORD lists
        for entry, content in tree:
            if entry.path.endswith(".pyc"):
                own.add(entry.path)
            is_module = entry.path.endswith(".py") and entry.path.startswith(prefixes) and entry.size <= _MAX_SOURCE
            if content is not None and is_module and not _TESTS.search(entry.path):
                source = read_fully(content, entry.size)
                if len(source) == entry.size:  # else the writer of the tree raises an error
                    pool.add(entry.path, source)
                content = Joined(source, content)
            yield entry, content
        for path, source_size, code in pool.results():
            folder, _, name = path.rpartition("/")
            place = f"{folder}/__pycache__/{name.removesuffix('.py')}.{compiler.tag}.pyc"
            if place not in own:
                # PEP 552: magic, flags 0 (timestamp), the source's mtime and size.
                data = compiler.magic + struct.pack("<III", 0, mtime & 0xFFFFFFFF, source_size) + code
                yield Entry(place, FILE, 0o644, len(data), mtime=mtime), io.BytesIO(data)


def _no_room(error: OSError) -> BuildError:
    return BuildError(
        f"no temporary file for bytecode in {tempfile.gettempdir()}: {error.strerror}",
        "set TMPDIR to a writable folder with free disk space",
    )


class _Pool:
    """Pool of compiler processes that receive the modules in shares; the results are in a temporary file."""

    def __init__(self, compiler: Compiler) -> None:
        self._compiler = compiler.provide() if compiler.provide else compiler
        try:
            self._spool: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        except OSError as error:
            raise _no_room(error) from error
        processes = min(len(os.sched_getaffinity(0)), _MOST_PROCESSES)
        self._threads, self._most = Workers(processes), processes + 2
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False
        self._share: _Share = []
        self._size = 0
        self._waiting: deque[Answer[_Compiled]] = deque()
        self._done: list[tuple[str, int, int]] = []  # (path, size of the source, size of the code)

    def close(self) -> None:
        with self._lock:
            self._stopped = True
            for child in self._running:  # none is left except after an error or Ctrl-C
                child.kill()
        self._threads.close()
        with contextlib.suppress(OSError):  # a full disk was already reported by a write
            self._spool.close()

    def add(self, path: str, source: bytes) -> None:
        self._share.append((path, source))
        self._size += len(source)
        if len(self._share) >= _SHARE or self._size >= _SHARE_BYTES:
            self._send()
        while len(self._waiting) > self._most or (self._waiting and self._waiting[0].ready()):
            self._collect()

    def results(self) -> Iterator[tuple[str, int, bytes]]:
        """Yield (path, size of the source, compiled code) of each module, in the order of submission."""
        self._send()
        while self._waiting:
            self._collect()
        self._spool.seek(0)
        for path, source_size, size in self._done:
            yield path, source_size, self._spool.read(size)

    def _send(self) -> None:
        if self._share:
            self._waiting.append(self._threads.submit(self._compile, self._share))
            self._share, self._size = [], 0

    def _collect(self) -> None:
        modules = self._waiting.popleft().result()
        try:
            for path, size, code in modules:
                if code:
                    self._spool.write(code)
                    self._done.append((path, size, len(code)))
            self._spool.flush()
        except OSError as error:
            raise _no_room(error) from error

    def _compile(self, share: _Share) -> _Compiled:
        frames = []
        for path, source in share:
            name = os.fsencode("/" + path)
            frames += [struct.pack("<II", len(name), len(source)), name, source]
        status, out = self._run(b"".join(frames))
        results, at = [], 0
        for path, source in share:
            start = at + 4
            at = start + int.from_bytes(out[at:start], "little")
            if len(out) < max(start, at):
                raise HostError(
                    f"{self._compiler.python} ended with status {status} while compiling /{path}",
                    "build with --no-bytecode; programs in the container then start slower",
                )
            results.append((path, len(source), out[start:at]))
        return results

    def _run(self, data: bytes) -> tuple[int, bytes]:
        """Run a process with the input `data`; return (exit status, output). Raises HostError when it cannot start."""
        command = [*self._compiler.start, self._compiler.python, "-S", "-s", "-B", "-W", "ignore", "-c", _WORKER]
        with self._lock:
            if self._stopped:
                return -signal.SIGKILL, b""
            try:
                # In its own session the child gets no Ctrl-C, which we handle; when we die, its input ends.
                child = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    env=compiling_environment(self._compiler.home),
                    cwd="/",
                    start_new_session=True,
                )
            except OSError as error:
                raise HostError(f"cannot run {command[0]}: {error.strerror}") from error
            self._running.add(child)
        try:
            out, _ = child.communicate(data)
        finally:
            with self._lock:
                self._running.discard(child)
        return child.returncode, out
