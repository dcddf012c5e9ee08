"""Reader of the members of a tar archive. It reads headers, and the data of those members that the caller reads.

Sources: POSIX.1-2001 "pax Interchange Format" (ustar headers, x and g records), GNU tar manual "Basic Tar Format" (L
and K names, base-256 numbers, S sparse members) and "Storing Sparse Files" (pax 0.0, 0.1, 1.0), star's SCHILY.xattr
records. Deviations from these that Go's archive/tar accepts are accepted, because every container tool uses it.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import BinaryIO

from envbuild.base.errors import BuildError
from envbuild.image.entry import BLOCK, CHAR, DIR, FILE, Readable
from envbuild.image.limits import Quota
from envbuild.image.tar_stream import TYPE_FLAGS, Member, Pieces, PositionedStream, Slice, Unpacked, number

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


def tar_items(stream: BinaryIO, name: str, quota: Quota | None = None) -> Iterator[tuple[Member, Readable | None]]:
    """Yield the members of a layer's uncompressed tar with their content. Raises BuildError as `members` does."""
    source = PositionedStream(stream, name)
    for member in members(source, quota):
        if member.kind != FILE:
            yield member, None
            continue
        part = Slice(source, member.stored)
        yield member, part if member.pieces is None else Unpacked(part, member.size, member.pieces)
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
    found: list[tuple[str, bytes]] = []
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
                found.append((name, value))
        position = end
    return found


def _count(member: Member, quota: Quota, where: str) -> None:
    quota.entry(where)
    quota.content(where, member.size + (_HOLE - 1) * max(0, member.size - member.stored))
    texts = (text for name, value in member.xattrs for text in (name, value))
    more = _PIECE * len(member.pieces or ()) + _PAIR * len(member.xattrs)
    quota.text(where, member.name, member.link, *texts, more=more)


def _check_sum(block: bytes, source: PositionedStream) -> None:
    said = number(block[148:156], source)
    rest = block[:148] + b" " * 8 + block[156:]
    # The low half of Adler-32 is the sum and one, modulo 65521 (RFC 1950), in a twentieth of the time of `sum`. The
    # sum of 512 bytes of ASCII is smaller than that.
    if rest.isascii() and (zlib.adler32(rest) & 0xFFFF) - 1 == said:
        return
    # Some old writers summed signed bytes.
    if said != sum(rest) and said != sum(rest) - 256 * sum(byte > 127 for byte in rest):
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
