"""Conversion of an environment to a stream, which nodes pass on like an image, and back to a folder.

The stream is a line of JSON, [size of the manifest, times of its files, rows of bytecode]; the manifest of
envbuild/contract/manifest.py, which has the SHA-256 of every file; the contents of its files in its order; and
the contents of the bytecode, which it does not list. Bytecode contains the time of its source in seconds, so the
stream keeps the times.
"""

# ruff: noqa: UP006, UP032, UP035, B905, SIM115 - Python 3.6

import hashlib
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import IO, Any, Callable, Iterator, List, Set, Tuple

from .disk import MOST, Lost, seal

MANIFEST = "envbuild.manifest"
_CHANGED = "{} changed since the environment was verified"
_THREADS = 16  # a network file system answers many questions at once as fast as one

# Path, mode, size and time of a file, and its SHA-256, "" for bytecode.
Row = Tuple[str, int, int, int, str]


def opened(source: str, manifest: str) -> Tuple[str, Callable[[], int], Callable[[int], bytes]]:
    """Return the seal of `source`, and functions that return its size and its next bytes.

    The source is a file, or an environment whose manifest has the SHA-256 `manifest`. Raises OSError, Lost.
    """
    if manifest:
        packed = Packed(source, manifest)
        return manifest, packed.size, packed.read
    file = open(source, "rb")  # closed at the end of the process
    return seal(os.fstat(file.fileno())), lambda: os.fstat(file.fileno()).st_size, file.read


class Packed:
    """The environment at `root`, whose manifest has the SHA-256 `digest`, as a stream. Raises OSError, Lost."""

    def __init__(self, root: str, digest: str) -> None:
        self.root = root
        with open(self._at(MANIFEST), "rb") as file:
            self.manifest = file.read()
        self.listed = _listed(self.manifest, digest)
        self.stream: Iterator[bytes] = iter(())

    def _at(self, path: str) -> str:
        return os.path.join(self.root, _native(path))

    def size(self) -> int:
        """Begin the stream, and return its size. Raises OSError, and Lost if the files differ from the manifest."""
        files = [row for row in self.listed if len(row) > 2]
        with ThreadPoolExecutor(_THREADS) as pool:
            infos = list(pool.map(lambda row: os.lstat(self._at(row[0])), files))
            folders = sorted({os.path.dirname(path) for path, *_ in files if path.endswith(".py")})
            code = sorted(row for rows in pool.map(self._bytecode, folders) for row in rows)
        for (path, _, size, _), info in zip(files, infos):
            if not stat.S_ISREG(info.st_mode) or info.st_size != size:
                raise Lost(_CHANGED.format(path))
        rows: List[Row] = [
            (path, mode, size, int(i.st_mtime), sha256) for (path, mode, size, sha256), i in zip(files, infos)
        ]
        known = {row[0] for row in rows}  # it lists bytecode of the build
        code = [row for row in code if row[0] not in known]
        head = json.dumps([len(self.manifest), [row[3] for row in rows], [row[:4] for row in code]]).encode() + b"\n"
        rows += code
        self.stream = self._stream(head + self.manifest, rows)
        return len(head) + len(self.manifest) + sum(row[2] for row in rows)

    def read(self, _size: int) -> bytes:
        """Return the next bytes of the stream, none at its end. Raises OSError, Lost."""
        return next(self.stream, b"")

    def _bytecode(self, folder: str) -> List[Row]:
        """Return the bytecode of the sources in `folder`."""
        place = os.path.join(folder, "__pycache__")
        try:
            names = os.listdir(self._at(place))
        except OSError:
            return []
        rows = []
        for name in names:
            if name.endswith(".pyc"):
                path = os.path.join(place, os.fsencode(name).decode("utf-8", "surrogateescape"))
                info = os.lstat(self._at(path))
                if stat.S_ISREG(info.st_mode):
                    rows.append((path, stat.S_IMODE(info.st_mode), info.st_size, int(info.st_mtime), ""))
        return rows

    def _stream(self, head: bytes, rows: List[Row]) -> Iterator[bytes]:
        yield head
        with ThreadPoolExecutor(_THREADS) as pool:
            for group in _groups(rows):
                if group[0][2] > MOST:
                    yield from self._file(group[0])
                else:
                    data = b"".join(pool.map(lambda row: b"".join(self._file(row)), group))
                    yield from [data] if data else []

    def _file(self, row: Row) -> Iterator[bytes]:
        with open(self._at(row[0]), "rb", 0) as file:
            yield from _checked(file, row)


def _native(path: str) -> str:
    """Return a path as this Python names it: 3.6 reads file names as ASCII where LC_ALL is C or POSIX."""
    return os.fsdecode(path.encode("utf-8", "surrogateescape"))


def _groups(rows: List[Row]) -> Iterator[List[Row]]:
    """Yield the rows in groups of at most MOST bytes; a larger file gets its own group."""
    group: List[Row] = []
    size = 0
    for row in rows:
        if group and size + row[2] > MOST:
            yield group
            group, size = [], 0
        group.append(row)
        size += row[2]
    if group:
        yield group


def _checked(file: IO[bytes], row: Row) -> Iterator[bytes]:
    """Yield the next file of the stream in blocks. Raises Lost at its end if its SHA-256 is not that of the row."""
    path, _, left, _, sha256 = row
    digest = hashlib.sha256()
    while left:
        data = file.read(min(left, MOST))
        if not data:
            raise Lost(_CHANGED.format(path))
        left -= len(data)
        digest.update(data)
        yield data
    if sha256 and digest.hexdigest() != sha256:
        raise Lost(_CHANGED.format(path))


def _listed(manifest: bytes, digest: str) -> List[List[Any]]:
    """Return the manifest's rows, if it has the SHA-256 `digest`. Raises Lost."""
    if "sha256:" + hashlib.sha256(manifest).hexdigest() != digest:
        raise Lost(_CHANGED.format(MANIFEST))
    return [json.loads(line) for line in manifest.decode().splitlines()]


def unpack(stream: IO[bytes], root: str, digest: str) -> None:
    """Write a stream's environment into the empty folder `root`; `digest` is its manifest's. Raises Lost, OSError."""
    size, times, code = json.loads(stream.readline().decode())
    manifest = stream.read(size)
    listed = _listed(manifest, digest)
    with open(os.path.join(root, MANIFEST), "wb") as file:
        file.write(manifest)
    rows = [(*row[:3], time, row[3]) for row, time in zip((row for row in listed if len(row) > 2), times)]
    made = {root}
    for row in [*rows, *((*row, "") for row in code)]:
        path = _inside(root, row[0], made)
        with open(path, "xb") as file:
            for data in _checked(stream, row):
                file.write(data)
            os.fchmod(file.fileno(), row[1])
        os.utime(path, (row[3], row[3]))
    for path, target in (row for row in listed if len(row) == 2):  # last, lest a file is written through a link
        os.symlink(_native(target), _inside(root, path, made))


def _inside(root: str, path: str, made: Set[str]) -> str:
    """Return the path of a new file below `root`, whose folder is made unless it is in `made`. Raises Lost, OSError."""
    if os.path.normpath(path) != path or path.startswith(("/", "..")):
        raise Lost("{} is not a path in an environment".format(path))
    whole = os.path.join(root, _native(path))
    folder = os.path.dirname(whole)
    if folder not in made:
        os.makedirs(folder, exist_ok=True)
        made.add(folder)
    return whole
