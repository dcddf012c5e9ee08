"""Reader of tar archives and of their members' metadata, and tables of members for caches.

Sources: POSIX.1-2001 "pax Interchange Format" (ustar headers, x and g records), GNU tar manual "Basic Tar Format" (L
and K names, base-256 numbers, S sparse members) and "Storing Sparse Files" (pax 0.0, 0.1, 1.0), star's SCHILY.xattr
records. Deviations from these that Go's archive/tar accepts are accepted, because every container tool uses it.

A table has the members of a layer as columns of JSON with the file's name, in zstd with a checksum.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from envbuild.base.atomic import replacing
from envbuild.base.errors import BuildError
from envbuild.base.files import parse_json
from envbuild.image.entry import BLOCK, CHAR, DIR, FIFO, FILE, HARDLINK, SYMLINK, Readable, read_fully
from envbuild.image.limits import Quota

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

# The type flags of POSIX.1-2001.
TYPE_FLAGS = {FILE: b"0", HARDLINK: b"1", SYMLINK: b"2", CHAR: b"3", BLOCK: b"4", DIR: b"5", FIFO: b"6"}

Pieces = tuple[tuple[int, int], ...]  # (offset in the file, length), both in bytes
Items = Generator[tuple["Member", Readable | None], None, None]
_CHUNK = 1 << 20
_MOST_PADDING = 1 << 30
_OCTAL = re.compile(rb"[0-7]+")


@dataclass(slots=True)
class Member:
    """The metadata of a tar member; names are unchanged, in surrogate-escaped UTF-8.

    `size` is the file's logical size in bytes; `stored` is the number of its bytes in the archive, at `offset`. They
    differ for sparse files, for which `pieces` maps the stored bytes to offsets in the file. `sha256` is that of the
    file's content (hexadecimal), "" where it is not known.
    """

    name: str
    kind: str
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int
    link: str
    device: tuple[int, int]
    offset: int = 0
    stored: int = 0
    pieces: Pieces | None = None
    xattrs: tuple[tuple[str, bytes], ...] = ()
    sha256: str = ""


class Chunks(io.RawIOBase):
    """A stream over an iterator of bytes. Closing it also closes `source`, the file that the bytes come from."""

    def __init__(self, chunks: Iterator[bytes], source: object = None) -> None:
        self._chunks = chunks
        self._source = source
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        while not self._ready:
            data = next(self._chunks, None)
            if data is None:
                return 0
            self._ready = memoryview(data)
        view = memoryview(buffer).cast("B")
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def close(self) -> None:
        if not self.closed and isinstance(self._source, io.IOBase):
            self._source.close()
        super().close()


class PositionedStream:
    """A stream with a position: it seeks if possible, else it reads and discards."""

    def __init__(self, stream: BinaryIO, where: str) -> None:
        self.where = where
        self._stream = stream
        self.position = 0
        self._end: int | None = None
        if stream.seekable():
            self._end = stream.seek(0, 2)
            stream.seek(0)

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer only at the end."""
        data = read_fully(self._stream, size)
        self.position += len(data)
        return data

    def exactly(self, size: int) -> bytes:
        data = self.read(size)
        if len(data) < size:
            raise self.cut()
        return data

    def go(self, position: int) -> None:
        """Skip to `position`. Raises BuildError when the stream ends earlier."""
        if self._end is not None:
            if position > self._end:
                raise self.cut()
            self._stream.seek(position)
            self.position = position
        while self.position < position:
            self.exactly(min(position - self.position, _CHUNK))

    def finish(self) -> None:
        """Read an unseekable stream to the end, so that the checksum of compressed data is verified.

        Raises BuildError for more than a padding: it may decompress to terabytes.
        """
        most = self.position + _MOST_PADDING
        while self._end is None and self.read(_CHUNK):
            if self.position > most:
                raise BuildError(f"{self.where}: more than {_MOST_PADDING} bytes after the end of the tar archive")

    def cut(self) -> BuildError:
        return BuildError(f"{self.where}: the tar archive is cut short")


class Slice:
    """The next `size` bytes of a layer."""

    def __init__(self, source: PositionedStream, size: int) -> None:
        self._source, self._left = source, size

    def read(self, size: int = -1, /) -> bytes:
        if not self._left:
            return b""
        data = self._source.exactly(self._left if size < 0 else min(size, self._left))
        self._left -= len(data)
        return data


def _sparse_chunks(stream: Readable, size: int, pieces: Pieces) -> Iterator[bytes]:
    """Yield the content of a sparse file, from the stored bytes in `stream`."""
    position = 0
    for offset, length in (*pieces, (size, 0)):
        while position < offset:
            count = min(offset - position, _CHUNK)
            yield bytes(count)
            position += count
        end = offset + length
        while position < end:
            data = stream.read(min(end - position, _CHUNK))
            if not data:
                return
            yield data
            position += len(data)


def number(raw: bytes, source: PositionedStream) -> int:
    """Parse a number of a header: octal digits with spaces and NULs around them, or base 256."""
    text = raw.rstrip(b"\0 ")
    if _OCTAL.fullmatch(text):  # nearly all
        return int(text, 8)
    if raw[0] & 0x80:
        bits = 8 * len(raw) - 1
        value = int.from_bytes(raw, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if raw[0] & 0x40 else value
    text = raw.lstrip(b" \0").partition(b"\0")[0].rstrip(b" ")
    if not text:
        return 0
    if _OCTAL.fullmatch(text):
        return int(text, 8)
    raise BuildError(f"{source.where}: not a tar archive, or damaged: {raw!r} is not a number")


_KINDS = {b"\0": FILE, b"7": FILE, b"S": FILE} | {flag: kind for kind, flag in TYPE_FLAGS.items()}
_XATTR = "SCHILY.xattr."
_ZEROS = bytes(512)
# The maximum length of a name or a pax header in bytes, as in Go's archive/tar.
_MAX_SPECIAL = 1 << 20
_MAX_SIZE = 1 << 62
_MAX_PIECES = 1 << 18
_PIECE = 128  # bytes of memory for a piece of a sparse map
_HOLE = 16  # times that a byte of a hole counts: it takes no space in the archive, and time to hash
_PAIR = 128  # bytes of memory for an extended attribute, besides its name and value
_SPARSE = frozenset(
    f"GNU.sparse.{name}" for name in ("major", "minor", "name", "realsize", "size", "map", "offset", "numbytes")
)
_MEANT = _SPARSE | {"path", "linkpath", "size", "uid", "gid", "mtime"}
_DIGITS = 18
_DAMAGED = "the map of a sparse file is damaged"


def members(source: PositionedStream, quota: Quota | None = None) -> Iterator[Member]:
    """Yield the members in order; a member's data can be read from `source` before the next member is requested.

    `quota` is that of the image to which the archive belongs; without one, the archive has its own. Raises BuildError
    when the data is not a tar archive, is truncated, has a member of an unknown kind, or exceeds the quota.
    """
    quota = quota or Quota()
    shared: dict[str, bytes] = {}
    pairs: list[tuple[str, bytes]] = []  # the records before a member; their order matters for sparse maps
    names: dict[str, bytes] = {}  # those of GNU's L and K headers
    while (block := source.read(512)) and block != _ZEROS:
        if len(block) < 512 and source.position > 512:
            raise source.cut()
        if len(block) < 512:
            has = f"it has {len(block)} bytes, and a tar at least 512"
            raise BuildError(f"{source.where}: not a tar archive, or cut short: {has}")
        _check_sum(block, source)
        kind = block[156:157]
        size = number(block[124:136], source)
        if size < 0:
            raise BuildError(f"{source.where}: a tar header with a negative size")
        if kind in b"xXgLK":
            data = _special(source, size)
            if kind == b"g":
                quota.text(source.where, data)
                shared.update(_records(data, source))
            elif kind in b"xX":
                pairs = _records(data, source)
            else:
                names["path" if kind == b"L" else "linkpath"] = _text(data)
            continue
        member = _member(block, size, {**shared, **dict(pairs), **names}, pairs, source)
        _count(member, quota, source.where)
        yield member
        end = member.offset + member.stored
        source.go(end)
        if end % 512:
            source.read(-end % 512)  # the last padding may be missing: the data is complete
        pairs, names = [], {}
    if block:
        after = source.read(512)
        if after and after != _ZEROS[: len(after)]:
            raise BuildError(f"{source.where}: not a tar archive, or damaged: one block of zeros")
    if pairs or names:
        raise source.cut()


def tar_items(stream: BinaryIO, name: str, quota: Quota | None = None) -> Items:
    """Yield the members of a layer's uncompressed tar with their content. Raises BuildError as `members` does."""
    source = PositionedStream(stream, name)
    for member in members(source, quota):
        if member.kind != FILE:
            yield member, None
            continue
        part = Slice(source, member.stored)
        yield member, part if member.pieces is None else Chunks(_sparse_chunks(part, member.size, member.pieces))
    source.finish()


def _member(
    block: bytes, size: int, pax: dict[str, bytes], pairs: list[tuple[str, bytes]], source: PositionedStream
) -> Member:
    name, link = _text(block[0:100]), _text(block[157:257])
    if block[257:263] == b"ustar\0":
        # star's own format has times in the last bytes of ustar's prefix
        prefix = _text(block[345 : 476 if block[508:512] == b"tar\0" else 500])
        name = prefix + b"/" + name if prefix else name
    name, link = pax.get("path", name), pax.get("linkpath", link)
    flag = block[156:157]
    kind = _KINDS.get(flag)
    shown = name.decode("utf-8", "replace")
    if kind is None:
        raise BuildError(f"{source.where}: {shown}: a member of unknown kind {flag!r}")
    if flag == b"\0" and name.endswith(b"/"):
        kind = DIR
    size = _decimal(pax["size"], source) if "size" in pax else size
    if not 0 <= size < _MAX_SIZE:
        raise BuildError(f"{source.where}: {shown}: a size of {size} bytes")
    device = (0, 0)
    if kind in (CHAR, BLOCK):
        device = (number(block[329:337], source), number(block[337:345], source))
    member = Member(
        "",
        kind,
        number(block[100:108], source) & 0o7777,
        _decimal(pax["uid"], source) if "uid" in pax else number(block[108:116], source),
        _decimal(pax["gid"], source) if "gid" in pax else number(block[116:124], source),
        _decimal(pax["mtime"], source) if "mtime" in pax else number(block[136:148], source),
        size if kind == FILE else 0,
        link.decode("utf-8", "surrogateescape"),
        device,
        stored=size if kind == FILE else 0,
    )
    try:
        if flag == b"S":
            member.size, member.pieces = _gnu_pieces(block, source)
        elif kind == FILE and not _SPARSE.isdisjoint(pax):
            name = _pax_pieces(member, pairs, source) or name
    except ValueError as error:
        raise BuildError(f"{source.where}: {shown}: {error}") from None
    member.name = name.decode("utf-8", "surrogateescape")
    if b"\0" in name or b"\0" in link:
        raise BuildError(f"{source.where}: {shown!r}: a name with a NUL in it")
    xattrs = {key.removeprefix(_XATTR): value for key, value in pax.items() if key.startswith(_XATTR)}
    member.xattrs = tuple(sorted(xattrs.items()))
    # The bytes of a sparse map are already read, and subtracted from the stored bytes.
    member.offset = source.position
    return member


def _special(source: PositionedStream, size: int) -> bytes:
    if size > _MAX_SPECIAL:
        raise BuildError(f"{source.where}: an extended tar header of {size} bytes")
    data = source.exactly(size)
    source.exactly(-size % 512)
    return data


def _records(data: bytes, source: PositionedStream) -> list[tuple[str, bytes]]:
    """Parse the `length key=value` records of a pax header; a record with an empty value is ignored."""
    records: list[tuple[str, bytes]] = []
    position = 0
    while position < len(data):
        space = data.find(b" ", position, position + 20)
        digits = data[position:space] if space > 0 else b""
        end = position + int(digits) if digits.isdigit() else 0
        key, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not space < end <= len(data) or data[end - 1 : end] != b"\n" or not equals or not key:
            raise BuildError(f"{source.where}: a damaged pax header")
        if value:
            name = key.decode("utf-8", "surrogateescape")
            if name in _MEANT or name.startswith(_XATTR):
                records.append((name, value))
        position = end
    return records


def _count(member: Member, quota: Quota, where: str) -> None:
    quota.entry(where)
    quota.content(where, member.size + (_HOLE - 1) * max(0, member.size - member.stored))
    texts = (text for name, value in member.xattrs for text in (name, value))
    more = _PIECE * len(member.pieces or ()) + _PAIR * len(member.xattrs)
    quota.text(where, member.name, member.link, *texts, more=more)


def _check_sum(block: bytes, source: PositionedStream) -> None:
    checksum = number(block[148:156], source)
    rest = block[:148] + b" " * 8 + block[156:]
    # The low half of Adler-32 is the sum and one, modulo 65521 (RFC 1950), in a twentieth of the time of `sum`. The
    # sum of 512 bytes of ASCII is smaller than that.
    if rest.isascii() and (zlib.adler32(rest) & 0xFFFF) - 1 == checksum:
        return
    # Some old writers summed signed bytes.
    if checksum != sum(rest) and checksum != sum(rest) - 256 * sum(byte > 127 for byte in rest):
        raise BuildError(f"{source.where}: not a tar archive, or damaged: a wrong header checksum")


def _text(raw: bytes) -> bytes:
    return raw.partition(b"\0")[0]


def _decimal(raw: bytes, source: PositionedStream) -> int:
    """Parse a number of a pax record; a time is rounded down to whole seconds."""
    whole, _, fraction = raw.partition(b".")
    digits = whole.removeprefix(b"-")
    if not digits.isdigit() or len(digits) > 20 or (fraction and not fraction.isdigit()):
        raise BuildError(f"{source.where}: a damaged pax header: {raw[:40]!r} is not a number")
    return int(whole) - (whole.startswith(b"-") and fraction.strip(b"0") != b"")


def _gnu_pieces(block: bytes, source: PositionedStream) -> tuple[int, Pieces]:
    """Return the real size and the map of an S member, also from the blocks that follow. Raises ValueError."""
    size = number(block[483:495], source)
    stored = number(block[124:136], source)
    numbers: list[int] = []
    table, more = block[386:482], block[482]
    while True:
        for at in range(0, len(table) - 23, 24):
            if table[at] == 0:
                break
            numbers += (number(table[at : at + 12], source), number(table[at + 12 : at + 24], source))
        if not more:
            return size, _checked(numbers, size, stored)
        if len(numbers) > 2 * _MAX_PIECES:
            raise ValueError(_DAMAGED)
        following = source.exactly(512)
        table, more = following[:504], following[504]


def _pax_pieces(member: Member, pairs: list[tuple[str, bytes]], source: PositionedStream) -> bytes | None:
    """Set the map and real size of `member` from its pax records; return its real name, if any. Raises ValueError."""
    values = dict(pairs)
    major, minor = values.get("GNU.sparse.major"), values.get("GNU.sparse.minor")
    if (major, minor) == (b"1", b"0"):
        numbers, taken = _stored_map(member.stored, source)
        member.stored -= taken
        size = values.get("GNU.sparse.realsize", b"")
    elif (major, minor) in ((None, None), (b"0", b"0"), (b"0", b"1")):
        size = values.get("GNU.sparse.size", values.get("GNU.sparse.realsize", b""))
        text = values.get("GNU.sparse.map")
        if text is None:
            keys = ("GNU.sparse.offset", "GNU.sparse.numbytes")
            # Offsets and lengths alternate.
            turns = [(key, value) for key, value in pairs if key in keys]
            if any(key != keys[i % 2] for i, (key, _) in enumerate(turns)):
                raise ValueError(_DAMAGED)
            parts = [value for _, value in turns]
        else:
            parts = text.split(b",")
        numbers = [_natural(part) for part in parts]
    else:
        raise ValueError("a sparse file of an unknown form")
    member.size = _natural(size)
    member.pieces = _checked(numbers, member.size, member.stored)
    return values.get("GNU.sparse.name")


def _stored_map(stored: int, source: PositionedStream) -> tuple[list[int], int]:
    """Read a map of pax 1.0, one number per line in whole blocks. Return the numbers after the count, and the size."""
    numbers: list[int] = []
    text, taken = b"", 0
    while not numbers or len(numbers) < 1 + 2 * numbers[0]:
        line, newline, rest = text.partition(b"\n")
        if newline:
            numbers.append(_natural(line))
            text = rest
            if numbers[0] > _MAX_PIECES:
                raise ValueError(_DAMAGED)
        elif taken + 512 > stored or len(text) > _DIGITS:
            raise ValueError(_DAMAGED)
        else:
            text += source.exactly(512)
            taken += 512
    return numbers[1:], taken


def _checked(numbers: list[int], size: int, stored: int) -> Pieces:
    pieces = tuple(zip(numbers[::2], numbers[1::2], strict=False))
    position = total = 0
    for offset, length in pieces:
        if offset < position or length < 0:
            raise ValueError(_DAMAGED)
        position = offset + length
        total += length
    if len(numbers) % 2 or total != stored or not position <= size:
        raise ValueError(_DAMAGED)
    return pieces


def _natural(text: bytes) -> int:
    if not text.isdigit() or len(text) > _DIGITS:
        raise ValueError(_DAMAGED)
    return int(text)


# The limit protects our memory from a damaged table; no table of a real layer comes near.
_MOST = 1 << 30
_COLUMNS = ("name", "kind", "mode", "uid", "gid", "mtime", "size", "link", "offset", "stored", "sha256")
_NAME = "name"


def packed(members: Sequence[Member]) -> dict[str, Any]:
    """Return `members` as an object for JSON."""
    return {
        "members": [[getattr(member, name) for member in members] for name in _COLUMNS],
        "devices": {i: m.device for i, m in enumerate(members) if m.device != (0, 0)},
        "pieces": {i: m.pieces for i, m in enumerate(members) if m.pieces is not None},
        "xattrs": {i: [(name, v.hex()) for name, v in m.xattrs] for i, m in enumerate(members) if m.xattrs},
    }


def unpacked(table: Mapping[str, Any]) -> tuple[Member, ...]:
    """Return the members in `table`. Raises KeyError, ValueError, TypeError or IndexError for a damaged one."""
    entries = tuple(
        Member(name, kind, mode, uid, gid, mtime, size, link, (0, 0), offset, stored, sha256=sha256)
        for name, kind, mode, uid, gid, mtime, size, link, offset, stored, sha256 in zip(*table["members"], strict=True)
    )
    for ordinal, (major, minor) in table["devices"].items():
        entries[int(ordinal)].device = (major, minor)
    for ordinal, pieces in table["pieces"].items():
        entries[int(ordinal)].pieces = tuple((offset, length) for offset, length in pieces)
    for ordinal, xattrs in table["xattrs"].items():
        entries[int(ordinal)].xattrs = tuple((name, bytes.fromhex(value)) for name, value in xattrs)
    return entries


def write_table(path: Path, table: Mapping[str, Any]) -> None:
    """Write `table` to `path` atomically. Raises OSError."""
    import zstandard

    text = json.dumps({**table, _NAME: path.name}, separators=(",", ":")).encode("ascii")
    data = zstandard.ZstdCompressor(level=3, write_checksum=True).compress(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def read_table(path: Path, form: object = None) -> dict[str, Any]:
    """Return the table in `path`, whose `format` is `form`, None for any.

    Raises OSError, and ValueError for a damaged one, and for one of another name or format.
    """
    import zstandard

    try:
        data = path.read_bytes()
        if not 0 < zstandard.frame_content_size(data) < _MOST:
            raise ValueError("no table")
        table = parse_json(zstandard.ZstdDecompressor().decompress(data))
    except zstandard.ZstdError as error:
        raise ValueError(str(error)) from None
    if not isinstance(table, dict) or table.pop(_NAME, path.name) != path.name:
        raise ValueError("no table")
    if form is not None and table.get("format") != form:
        raise ValueError("another format")
    return table
