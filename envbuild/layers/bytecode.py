"""Compile modules while their tree is streamed, and add the .pyc files behind them.

Images are read-only to most who run them, so bytecode that is not in them is made again at each start: with
it `import torch` takes half the time. The files are of the timestamp kind (PEP 552) with the layer's fixed
mtime, so that editing a module inside a container takes effect.

Bytecode must not differ from one machine to the next. It is made by processes that import nothing but
built-in modules, each with a fixed hash seed and a fixed share of the modules, whatever the number of
processors: marshal's output depends on what else a process holds (python/cpython#78274).
"""

from __future__ import annotations

import os
import struct
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO

from envbuild import process
from envbuild.errors import HostError
from envbuild.image.entry import FILE, Entry, Readable, Tree

# Larger modules are rare, generated tables; they are compiled when imported, as without this.
_MAX_SOURCE = 4 << 20
# Modules in one process: enough to make its start cheap, few enough to keep all processors busy.
_SHARE = 200
_SHARE_BYTES = 4 << 20
_WORKER = r"""
import marshal, sys
read, write = sys.stdin.buffer.read, sys.stdout.buffer.write
sys.setrecursionlimit(10000)
import builtins
while head := read(8):
    name = read(int.from_bytes(head[:4], "little")).decode("utf-8", "surrogateescape")
    source = read(int.from_bytes(head[4:], "little"))
    try:
        code = marshal.dumps(compile(source, name, "exec", dont_inherit=True, optimize=-1))
    except (SyntaxError, ValueError, RecursionError, MemoryError, OverflowError):
        code = b""
    write(len(code).to_bytes(4, "little"))
    write(code)
"""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A host interpreter that makes bytecode: its path, full version, cache tag and magic number."""

    python: str
    version: str
    tag: str
    magic: bytes

    @property
    def identity(self) -> str:
        """What decides the bytecode besides the source."""
        return f"{self.tag} {self.version} {self.magic.hex()}"


def find_compiler(python: str) -> Compiler:
    """Ask the interpreter at `python` what it is. Raises HostError when it does not run."""
    script = (
        "import sys, importlib.util as u;"
        "print(sys.implementation.cache_tag, '.'.join(map(str, sys.version_info[:3])), u.MAGIC_NUMBER.hex())"
    )
    done = process.run([python, "-S", "-c", script], check=False, env=_environment())
    words = done.stdout.split()
    if done.returncode != 0 or len(words) != 3:
        raise HostError(f"{python} does not run:\n{process.tail(done)}")
    return Compiler(python, words[1], words[0], bytes.fromhex(words[2]))


def with_bytecode(tree: Tree, compiler: Compiler | None, below: Sequence[str], mtime: int) -> Tree:
    """`tree`, then the bytecode of every module under the folders `below`.

    Without a compiler `tree` as it is. A module that does not compile (tests of other Python versions,
    templates) has no bytecode.
    """
    if compiler is None:
        yield from tree
        return
    prefixes = tuple(folder + "/" for folder in below)
    with tempfile.TemporaryFile() as spool, _Pool(compiler, spool) as pool:
        own: set[str] = set()  # numpy's wheel has a .pyc of its own, which its RECORD lists
        for entry, content in tree:
            if entry.path.endswith(".pyc"):
                own.add(entry.path)
            wanted = (
                entry.kind == FILE
                and entry.path.endswith(".py")
                and entry.path.startswith(prefixes)
                and entry.size <= _MAX_SOURCE
                and content is not None
            )
            if wanted and content is not None:
                source = content.read(entry.size)
                pool.add(entry.path, source)
                yield entry, _Once(source, content)
            else:
                yield entry, content
        for entry, content in _compiled(pool, compiler, mtime):
            if entry.path not in own:
                yield entry, content


def _compiled(pool: _Pool, compiler: Compiler, mtime: int) -> Tree:
    for path, source_size, code in pool.results():
        folder, _, name = path.rpartition("/")
        # PEP 552: magic, flags 0 (timestamp), the source's mtime and size.
        head = compiler.magic + struct.pack("<III", 0, mtime & 0xFFFFFFFF, source_size)
        place = f"{folder}/__pycache__/{name.removesuffix('.py')}.{compiler.tag}.pyc"
        yield Entry(place, FILE, 0o644, len(head) + code.size, mtime=mtime), _Joined(head, code)


@dataclass(slots=True)
class _Piece:
    """A part of the spool, read from its start to its end."""

    spool: IO[bytes]
    at: int
    size: int

    def read(self, size: int = -1, /) -> bytes:
        count = self.size if size < 0 else min(size, self.size)
        data = os.pread(self.spool.fileno(), count, self.at)
        self.at += len(data)
        self.size -= len(data)
        return data


@dataclass(slots=True)
class _Joined:
    head: bytes
    piece: _Piece

    def read(self, size: int = -1, /) -> bytes:
        if self.head:
            count = len(self.head) if size < 0 else size
            data, self.head = self.head[:count], self.head[count:]
            return data
        return self.piece.read(size)


@dataclass(slots=True)
class _Once:
    """Content that was read already, then what its archive still has (nothing, unless the size was wrong)."""

    data: bytes
    rest: Readable

    def read(self, size: int = -1, /) -> bytes:
        if self.data:
            count = len(self.data) if size < 0 else size
            data, self.data = self.data[:count], self.data[count:]
            return data
        return self.rest.read(size)


class _Pool:
    """Shares of modules on their way through compiling processes; results lie in `spool`."""

    def __init__(self, compiler: Compiler, spool: IO[bytes]) -> None:
        self._compiler, self._spool, self._end = compiler, spool, 0
        self._threads = ThreadPoolExecutor(len(os.sched_getaffinity(0)))
        self._share: list[tuple[str, bytes]] = []
        self._size = 0
        self._waiting: list[Future[list[tuple[str, int, bytes]]]] = []
        self._done: list[tuple[str, int, _Piece]] = []

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)

    def add(self, path: str, source: bytes) -> None:
        self._share.append((path, source))
        self._size += len(source)
        if len(self._share) >= _SHARE or self._size >= _SHARE_BYTES:
            self._send()
        while len(self._waiting) > 4 or (self._waiting and self._waiting[0].done()):
            self._collect()

    def results(self) -> Iterator[tuple[str, int, _Piece]]:
        """(path, size of the source, compiled code) of each module, in the order they came."""
        self._send()
        while self._waiting:
            self._collect()
        yield from self._done

    def _send(self) -> None:
        if self._share:
            self._waiting.append(self._threads.submit(_compile, self._compiler, self._share))
            self._share, self._size = [], 0

    def _collect(self) -> None:
        for path, size, code in self._waiting.pop(0).result():
            if code:
                self._spool.write(code)
                self._done.append((path, size, _Piece(self._spool, self._end, len(code))))
                self._end += len(code)
        self._spool.flush()


def _compile(compiler: Compiler, share: list[tuple[str, bytes]]) -> list[tuple[str, int, bytes]]:
    child = subprocess.Popen(
        [compiler.python, "-S", "-s", "-B", "-W", "ignore", "-c", _WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=_environment(),
        cwd="/",
        start_new_session=True,  # a Ctrl-C is ours to handle; when we die, it reads the end of its input
    )
    frames = []
    for path, source in share:
        name = os.fsencode("/" + path)
        frames += [struct.pack("<II", len(name), len(source)), name, source]
    out, _ = child.communicate(b"".join(frames))
    if child.returncode != 0:
        raise HostError(f"{compiler.python} failed while compiling (exit {child.returncode})")
    results, at = [], 0
    for path, source in share:
        size = int.from_bytes(out[at : at + 4], "little")
        results.append((path, len(source), out[at + 4 : at + 4 + size]))
        at += 4 + size
    return results


def _environment() -> dict[str, str]:
    return {"PYTHONHASHSEED": "0", "PATH": os.defpath, "LC_ALL": "C.UTF-8"}
