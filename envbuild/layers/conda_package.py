"""A conda package as a stream: its metadata, its files in the order of its archive, and the prefix in these files.

Sources: conda's "Package specification" (info/index.json, paths.json, link.json, and files, has_prefix and no_link of
packages without paths.json); conda-package-handling, "The .conda format": a zip with the stored members metadata.json,
pkg-NAME.tar.zst and info-NAME.tar.zst. The older .tar.bz2 is a single tar. Details of prefixes follow rattler, with
which the tests compare: in a text, each placeholder is replaced; in a binary file, each placeholder in a NUL-terminated
string is replaced, and the string is padded with NULs to its old length.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import zipfile
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from envbuild.errors import BuildError
from envbuild.image.compression import decompressed
from envbuild.image.entry import DIR, FILE, HARDLINK, SYMLINK, Readable
from envbuild.image.squashfs.segment import tar_items
from envbuild.image.tar_stream import Member
from envbuild.layers.contents import Guarded, reading

# These files are read as a whole; torch's paths.json has 4 MiB.
_MAX_INFO = 64 << 20
_METADATA = ("index.json", "paths.json", "link.json", "files", "has_prefix", "no_link")
# The placeholder that conda-build wrote before packages could declare their own.
_OLD_PLACEHOLDER = "/opt/anaconda1anaconda2anaconda3"
_SHA256 = re.compile(r"[0-9a-f]{64}")
# A longer string with a placeholder is an error: real ones are paths and lists of paths.
_MAX_STRING = 16 << 20
# The kinds of members that a path of a kind may have.
_MEMBER_KINDS = {
    "directory": (DIR,), "softlink": (SYMLINK,), "hardlink": (FILE, HARDLINK), "": (FILE, HARDLINK, SYMLINK)
}  # fmt: skip
Files = Generator[tuple[Member, Readable | None], None, None]


@dataclass(frozen=True, slots=True)
class PackagePath:
    """A path that a package installs, as its paths.json lists it.

    `kind` is "hardlink", "softlink", "directory", or "" for a package too old to declare it. `sha256` is hexadecimal,
    "" if not given; for a softlink it is that of the target file. `placeholder` is the text in the file that the final
    prefix replaces, by the rules of `mode` ("text" or "binary"); "" if nothing is replaced.
    """

    path: str
    kind: str = ""
    sha256: str = ""
    size: int | None = None
    placeholder: str = ""
    mode: str = ""
    no_link: bool = False


@dataclass(frozen=True, slots=True)
class Info:
    """The metadata of a package.

    `index` is its index.json, `paths` has the installed paths by their names in the archive, `entry_points` are those
    of a noarch Python package ("NAME = MODULE:FUNCTION").
    """

    index: dict[str, Any]
    paths: dict[str, PackagePath]
    entry_points: tuple[str, ...] = field(default=())

    @property
    def is_python(self) -> bool:
        """Whether the package is `noarch: python`: its files then go to the folders of the environment's Python."""
        return self.index.get("noarch") == "python"


def read_info(package: Path) -> Info:
    """Return the metadata of `package` without reading its files. Raises BuildError for a damaged package."""
    found: dict[str, bytes] = {}
    with contextlib.closing(_members(package, "info")) as items:
        for member, content in items:
            folder, _, rest = member.name.partition("/")
            if folder != "info":
                # In a .tar.bz2, info/ comes first, or (from old builders) last.
                if "index.json" in found and ("paths.json" in found or "files" in found):
                    break
            elif rest in _METADATA and content is not None:
                if member.size > _MAX_INFO:
                    raise BuildError(f"{package.name}: {member.name} has {member.size} bytes")
                found[rest] = content.read(member.size)
    return _info(found, package.name)


def package_files(package: Path) -> Files:
    """Yield the files and links of `package`, named as in its paths.json, without those in info/.

    A file's content must be read before the next file is requested. Raises BuildError as `read_info` does, and for a
    name that leads outside of the package.
    """
    with contextlib.closing(_members(package, "pkg")) as items:
        for member, content in items:
            if member.name.partition("/")[0] != "info":
                yield member, content


def clean(name: str, package: str) -> str:
    """Return a path in an archive without "./" before and "/" after it. Raises BuildError if it leads outside."""
    path = name.removeprefix("./").rstrip("/")
    if name.startswith("/") or "\0" in name or {"", ".", ".."} & set(path.split("/")):
        if name.rstrip("/") in (".", ""):
            return ""
        raise BuildError(f"{package}: {name!r} is not a path inside of a package")
    return path


def _members(package: Path, part: str) -> Files:
    """Yield the members of the part `info` or `pkg`; all members of a .tar.bz2, which has no parts."""
    name, kind = package.name, "conda package"
    with reading(name, kind), contextlib.ExitStack() as stack:
        if name.endswith(".tar.bz2"):
            import bz2

            stream = cast(BinaryIO, Guarded(stack.enter_context(bz2.open(package)), name, kind))
        else:
            archive = stack.enter_context(zipfile.ZipFile(package))
            inner = stack.enter_context(archive.open(_part(archive, part, name)))
            stream = decompressed(cast(BinaryIO, Guarded(inner, name, kind)), f"{name}: {part}")
        for member, content in tar_items(stream, name):
            member.name = clean(member.name, name)
            if member.name:
                yield member, content


def _part(archive: zipfile.ZipFile, part: str, name: str) -> zipfile.ZipInfo:
    version = {}
    if (info := archive.NameToInfo.get("metadata.json")) is not None:
        if info.file_size > _MAX_INFO:
            raise ValueError("metadata.json is too large")
        version = json.loads(archive.read(info))
    number = version.get("conda_pkg_format_version") if isinstance(version, dict) else None
    if number != 2:
        raise BuildError(f"{name}: a conda package of format {number!r}, only 2 is known")
    pattern = re.compile(rf"{part}-[^/]+\.tar\.zst")
    found = [info for info in archive.infolist() if pattern.fullmatch(info.filename)]
    if len(found) != 1:
        raise BuildError(f"{name}: a conda package has one {part}-*.tar.zst, this has {len(found)}")
    return found[0]


def _info(found: dict[str, bytes], package: str) -> Info:
    index = _json(found, "index.json", package)
    if "paths.json" in found:
        rows = _json(found, "paths.json", package).get("paths")
        if not isinstance(rows, list):
            raise BuildError(f"{package}: info/paths.json has no list of paths")
        listed = [_listed(row, package) for row in rows]
    else:
        listed = _old_paths(found, package)
    link = _json(found, "link.json", package) if "link.json" in found else {}
    noarch = link.get("noarch")
    points = noarch.get("entry_points") if isinstance(noarch, dict) else None
    if points is not None and not (isinstance(points, list) and all(isinstance(point, str) for point in points)):
        raise BuildError(f"{package}: info/link.json: entry_points is not a list of texts")
    return Info(index, {one.path: one for one in listed}, tuple(points or ()))


def _json(found: dict[str, bytes], name: str, package: str) -> dict[str, Any]:
    if name not in found:
        raise BuildError(f"{package}: not a conda package: it has no info/{name}")
    try:
        data = json.loads(found[name])
    except (ValueError, RecursionError) as error:
        raise BuildError(f"{package}: info/{name}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise BuildError(f"{package}: info/{name}: not a JSON object")
    return data


def _listed(row: Any, package: str) -> PackagePath:
    path = row.get("_path") if isinstance(row, dict) else None
    if not isinstance(path, str) or not path or clean(path, package) != path:
        raise BuildError(f"{package}: info/paths.json: {path!r} is not a path inside of a package")
    kind, digest, size = row.get("path_type"), row.get("sha256") or "", row.get("size_in_bytes")
    placeholder, mode = row.get("prefix_placeholder") or "", row.get("file_mode") or "text"
    if kind not in ("hardlink", "softlink", "directory"):
        raise BuildError(f"{package}: info/paths.json: {path}: unknown path_type {kind!r}")
    if digest and not (isinstance(digest, str) and _SHA256.fullmatch(digest)):
        raise BuildError(f"{package}: info/paths.json: {path}: {digest!r} is not a sha256")
    if size is not None and type(size) is not int:
        raise BuildError(f"{package}: info/paths.json: {path}: a size of {size!r}")
    if not isinstance(placeholder, str) or mode not in ("text", "binary"):
        raise BuildError(f"{package}: info/paths.json: {path}: unknown file_mode {mode!r}")
    mode = mode if placeholder else ""
    return PackagePath(path, kind, digest, size, placeholder, mode, row.get("no_link") is True)


def _old_paths(found: dict[str, bytes], package: str) -> list[PackagePath]:
    """Return the paths of a package older than paths.json. Like conda, this uses shlex for has_prefix."""
    if "files" not in found:
        raise BuildError(f"{package}: not a conda package: it has no info/paths.json")
    try:
        texts = {name: found.get(name, b"").decode() for name in ("files", "has_prefix", "no_link")}
        replaced: dict[str, tuple[str, str]] = {}
        for line in texts["has_prefix"].splitlines():
            words = [word.strip("'\"") for word in shlex.split(line, posix=False)]
            if len(words) == 1:
                words = [_OLD_PLACEHOLDER, "text", *words]
            if words:
                placeholder, mode, path = words
                replaced[path] = placeholder, mode
    except ValueError as error:
        raise BuildError(f"{package}: info/files and has_prefix: {error}") from None
    unlinked = set(texts["no_link"].splitlines())
    listed = []
    for path in filter(None, texts["files"].splitlines()):
        placeholder, mode = replaced.get(path, ("", ""))
        if clean(path, package) != path or mode not in ("", "text", "binary"):
            raise BuildError(f"{package}: info/files: {path!r}: a path or a mode that cannot be")
        listed.append(PackagePath(path, "", placeholder=placeholder, mode=mode, no_link=path in unlinked))
    return listed


def agrees(listed: PackagePath, member: Member) -> bool:
    """Return whether a member of the archive has the listed kind and size."""
    sized = listed.kind != "hardlink" or member.kind != FILE or listed.size in (None, member.size)
    return member.kind in _MEMBER_KINDS[listed.kind] and sized


def replaced_text(chunks: Iterable[bytes], old: bytes, new: bytes) -> Iterator[bytes]:
    """Yield `chunks` with `new` in place of each `old`."""
    held = b""
    for chunk in chunks:
        # A possible start of another placeholder is held back until more data arrives.
        *whole, held = (held + chunk).split(old)
        for piece in whole:
            yield piece + new
        keep = _start_length(held, old)
        if len(held) > keep:
            yield held[: len(held) - keep]
            held = held[len(held) - keep :]
    yield held


def replaced_binary(chunks: Iterable[bytes], old: bytes, new: bytes, where: str = "") -> Iterator[bytes]:
    """Yield `chunks` with `new` in place of each `old`, in strings that end at a NUL or at the end of the file.

    The length stays the same. Raises BuildError, naming `where`, when `new` is longer than `old`, or a string with the
    placeholder exceeds 16 MiB.
    """
    if len(new) > len(old):
        raise BuildError(f"{where}: its placeholder for the prefix has only {len(old)} bytes")
    strings = re.compile(re.escape(old) + rb"[^\0]*")

    def padded(match: re.Match[bytes]) -> bytes:
        return match[0].replace(old, new).ljust(len(match[0]), b"\0")

    held = b""
    for chunk in chunks:
        held += chunk
        done = held.rfind(b"\0") + 1
        at = held.find(old, done)
        # The last string may continue in the next chunk, and the last bytes may be the start of a placeholder.
        end = at if at >= 0 else max(done, len(held) - _start_length(held, old))
        yield strings.sub(padded, held[:end])
        held = held[end:]
        if len(held) > _MAX_STRING:
            raise BuildError(f"{where}: a string of more than {_MAX_STRING} bytes with the prefix in it")
    yield strings.sub(padded, held)


def _start_length(data: bytes, old: bytes) -> int:
    """Return the length of the longest end of `data` that is a proper start of `old`."""
    return next((size for size in range(len(old) - 1, 0, -1) if data.endswith(old[:size])), 0)
