"""Layers of conda packages: every file at its installed path, streamed from the archive, and the package's record.

Sources: conda's "Package specification"; conda enhancement proposal 17 (paths of noarch Python packages); the records
in conda-meta as conda and rattler write them. The tests compare with an installation by rattler.

Differences from conda: modes are 0644 and 0755, times are fixed, and bytecode in `__pycache__` is left out, because it
contains the times of the sources. The record lists the installed files, so neither this bytecode nor files that another
package replaces. The layers are ordered and grouped like those of wheels; see docs/reference/layering.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, cast

from envbuild.errors import BuildError
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK, Entry, Readable, Tree
from envbuild.image.layer import with_parents
from envbuild.image.tar_stream import Member
from envbuild.layers.bytecode import Compiler, with_bytecode
from envbuild.layers.compose import LayerRequest, groups, key_of, title_of
from envbuild.layers.conda_files import BYTECODE, CondaFile, Shared, entry_points, place_of
from envbuild.layers.conda_package import (
    Info,
    PackagePath,
    agrees,
    package_files,
    read_info,
    replaced_binary,
    replaced_text,
)
from envbuild.layers.contents import HashedContent
from envbuild.layers.wheel import Scheme

META = "conda-meta"
_STEP = 1 << 18
# A text file with a replaced prefix is spooled until its length is known: a small one in memory, a larger one on disk.
_IN_MEMORY = 4 << 20


def conda_parts(
    files: Sequence[CondaFile], shared: Shared, scheme: Scheme, compiler: Compiler | None, mtime: int, alone: int
) -> list[LayerRequest]:
    """Return the layers of `files`: each of the `alone` largest packages in its own, the others in the last one."""
    return [_part(group, shared, scheme, compiler, mtime) for group in groups(files, alone)]


def _part(
    group: Sequence[CondaFile], shared: Shared, scheme: Scheme, compiler: Compiler | None, mtime: int
) -> LayerRequest:
    without = [shared.without.get(file.name, ()) for file in group]
    key: list[object] = [scheme.prefix, scheme.python, compiler and compiler.identity, mtime]
    for file, lost in zip(group, without, strict=True):
        one = file.package
        # Inputs of the record in conda-meta besides the package's own content.
        told = [one.subdir, one.url, one.md5, one.depends]
        key.append([one.name, one.version, one.build, one.sha256, told, lost])

    def files() -> Tree:
        for file, lost in zip(group, without, strict=True):
            yield from conda_tree(file, scheme, mtime, frozenset(lost))

    def tree() -> Tree:
        # The standard library and site-packages.
        modules = [f"{scheme.prefix}/lib/python{scheme.python}"]
        return with_parents(with_bytecode(files(), compiler, modules, mtime), mtime)

    return LayerRequest(title_of([(f.name, f.package.version) for f in group]), key_of("conda", key), tree)


def conda_tree(file: CondaFile, scheme: Scheme, mtime: int, without: frozenset[str] = frozenset()) -> Tree:
    """Yield the files of a package under `scheme`, in the order of its archive, then scripts and its record.

    `without` are paths, relative to the prefix, that another package provides instead. Raises BuildError, here or when
    content is read, for a package that is damaged, is not the locked one, or lacks files that it lists.
    """
    yield from _CondaTree(file, scheme, mtime, without).tree()


class _Checked(HashedContent):
    """A hashed content of `whole` bytes; at its end, the digest must be `wanted` (hexadecimal) if that is not ""."""

    def __init__(self, content: Readable, whole: int, wanted: str, where: str) -> None:
        super().__init__(content)
        self._whole, self._wanted, self._where = whole, wanted, where

    def read(self, size: int = -1, /) -> bytes:
        data = super().read(size)
        if self._wanted and self.size >= self._whole and self._sha256.hexdigest() != self._wanted:
            raise BuildError(f"{self._where}: not the file that info/paths.json lists")
        return data


class _Pieces:
    """A stream of the pieces of a content."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces, self._held = pieces, b""

    def read(self, size: int = -1, /) -> bytes:
        while size < 0 or len(self._held) < size:
            piece = next(self._pieces, None)
            if piece is None:
                break
            self._held = self._held + piece if self._held else piece
        count = len(self._held) if size < 0 else size
        data, self._held = self._held[:count], self._held[count:]
        return data


class _CondaTree:
    """The conversion of one package to a tree."""

    def __init__(self, file: CondaFile, scheme: Scheme, mtime: int, without: frozenset[str]) -> None:
        self._file, self._scheme, self._mtime, self._without = file, scheme, mtime, without
        self._name = file.path.name
        self._rows: dict[str, dict[str, Any]] = {}  # rows of the record's paths, by path
        self._modes: dict[str, int] = {}

    def tree(self) -> Tree:
        info, package = read_info(self._file.path), self._file.package
        names = [str(info.index.get(key)) for key in ("name", "version", "build")]
        if names != [package.name, package.version, package.build]:
            raise BuildError(f"{self._name}: it is {' '.join(names)}, locked is {package.stem}")
        missing = set(info.paths)
        with contextlib.closing(package_files(self._file.path)) as files:
            for member, content in files:
                listed = info.paths.get(member.name)
                if listed is None:  # a folder, or a file that installers ignore
                    continue
                missing.discard(member.name)
                yield from self._member(listed, member, content, info)
        if missing:
            some = ", ".join(sorted(missing)[:3])
            raise BuildError(f"{self._name}: info/paths.json lists files that the package does not contain: {some}")
        for path, script in entry_points(info, self._scheme, self._name):
            if path not in self._rows and path not in self._without:
                yield self._whole(path, script, 0o755)
                digest = {"sha256": _sha256(script), "size_in_bytes": len(script)}
                self._rows[path] = {"_path": path, "path_type": "unix_python_entry_point", **digest}
        yield self._whole(f"{META}/{self._file.package.stem}.json", self._record(info), 0o644)

    def _member(self, listed: PackagePath, member: Member, content: Readable | None, info: Info) -> Tree:
        where = f"{self._name}: {member.name}"
        if not agrees(listed, member):
            raise BuildError(f"{where}: a {member.kind}, which info/paths.json does not list")
        place = place_of(listed.path, info, self._scheme)
        if place in self._without or BYTECODE.fullmatch(place):
            return
        if place in self._rows:
            raise BuildError(f"{where}: comes twice")
        row: dict[str, Any] = {"_path": place, "path_type": listed.kind or "hardlink"}
        self._rows[place] = row
        if listed.no_link:
            row["no_link"] = True
        if member.kind == HARDLINK:
            yield from self._hard_link(listed, member, info, place, row)
        elif content is not None:
            yield from self._content(listed, member, content, place, row)
        elif member.kind == DIR:
            yield Entry(self._path(place), DIR, 0o755, mtime=self._mtime), None
            row |= {"sha256": listed.sha256} if listed.sha256 else {}
        elif member.kind == SYMLINK:
            yield Entry(self._path(place), SYMLINK, 0o777, 0, member.link, mtime=self._mtime), None
            digests = _digests(listed.sha256, _sha256(member.link.encode("utf-8", "surrogateescape")))
            row |= digests | {"path_type": "softlink", "size_in_bytes": listed.size or 0}
        else:
            raise BuildError(f"{where}: a member of kind {member.kind!r}")

    def _content(self, listed: PackagePath, member: Member, content: Readable, place: str, row: dict[str, Any]) -> Tree:
        """Yield a file, with its placeholder replaced by the prefix; its row has the resulting digests."""
        where = f"{self._name}: {member.name}"
        original = _Checked(content, member.size, listed.sha256, where)
        mode = self._modes[place] = 0o755 if member.mode & 0o111 else 0o644
        old, new = listed.placeholder.encode(), f"/{self._scheme.prefix}".encode()
        if not old:
            yield self._entry(place, mode, member.size), original
            row |= {"sha256": original.digest().hex(), "size_in_bytes": member.size}
            return
        chunks = iter(lambda: original.read(_STEP), b"")
        with contextlib.ExitStack() as stack:
            if listed.mode == "text":
                source, size = stack.enter_context(_spooled(replaced_text(chunks, old, new)))
            else:
                source, size = _Pieces(replaced_binary(chunks, old, new, where)), member.size
            result = HashedContent(source)
            yield self._entry(place, mode, size), result
            row |= _digests(original.digest().hex(), result.digest().hex())
        row |= {"size_in_bytes": size, "file_mode": listed.mode, "prefix_placeholder": listed.placeholder}

    def _hard_link(self, listed: PackagePath, member: Member, info: Info, place: str, row: dict[str, Any]) -> Tree:
        """Yield a second name of a file as a hard link, or as a file if the first one is missing or would differ."""
        name = member.link.removeprefix("./")
        other = info.paths.get(name)
        target = place_of(name, info, self._scheme)
        same = other and (other.placeholder, other.mode) == (listed.placeholder, listed.mode)
        if same and target in self._modes:
            mode = self._modes[place] = self._modes[target]
            yield Entry(self._path(place), HARDLINK, mode, 0, self._path(target), mtime=self._mtime), None
            row |= {k: v for k, v in self._rows[target].items() if k not in ("_path", "path_type", "no_link")}
            return
        # Reread the archive for the target's content. Rare: the target was replaced by another package, or is bytecode.
        with contextlib.closing(package_files(self._file.path)) as files:
            for found, content in files:
                if found.name == name and content is not None:
                    yield from self._content(listed, found, content, place, row)
                    return
        raise BuildError(f"{self._name}: {member.name}: a link to {member.link!r}, which is not there")

    def _record(self, info: Info) -> bytes:
        """Return the package's record in conda-meta; it contains no information about this host."""
        package = self._file.package
        rows = [self._rows[path] for path in sorted(self._rows, key=lambda path: path.split("/"))]
        record = dict(info.index)
        record |= {"depends": list(package.depends)} if package.depends else {}
        record |= {
            "name": package.name, "version": package.version, "build": package.build,
            "subdir": package.subdir, "channel": package.channel, "url": package.url,
            "fn": package.file_name, "md5": package.md5, "sha256": package.sha256,
            "size": self._file.size, "requested_specs": [],
            "files": [row["_path"] for row in rows],
            "paths_data": {"paths_version": 1, "paths": rows},
            "link": {"source": "", "type": 1},
        }  # fmt: skip
        return json.dumps(record, indent=2, sort_keys=True).encode() + b"\n"

    def _path(self, place: str) -> str:
        return f"{self._scheme.prefix}/{place}"

    def _entry(self, place: str, mode: int, size: int) -> Entry:
        return Entry(self._path(place), FILE, mode, size, mtime=self._mtime)

    def _whole(self, place: str, data: bytes, mode: int) -> tuple[Entry, Readable]:
        return self._entry(place, mode, len(data)), io.BytesIO(data)


@contextlib.contextmanager
def _spooled(pieces: Iterable[bytes]) -> Iterator[tuple[Readable, int]]:
    """Yield the joined pieces as a content, and their size."""
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as spooled:
        try:
            for piece in pieces:
                spooled.write(piece)
            size = spooled.tell()
            spooled.seek(0)
        except OSError as error:
            raise BuildError(
                f"no temporary file for a text with its prefix: {error.strerror}",
                "set TMPDIR to a writable folder with free disk space",
            ) from error
        yield cast("Readable", spooled), size


def _digests(original: str, result: str) -> dict[str, str]:
    """Return a row's digests as conda writes them: the second one only when it differs."""
    rows = {"sha256": original} if original else {}
    return rows if original == result else {**rows, "sha256_in_prefix": result}


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
