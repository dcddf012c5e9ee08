"""Sparse files in tar archives: maps of the stored bytes; the holes between them read as zeros.

Source: GNU tar manual, appendix "Storing Sparse Files": the old GNU form (S), pax versions 0.0, 0.1, 1.0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from envbuild.errors import BuildError
from envbuild.image.entry import Readable
from envbuild.image.tar_stream import Member, Pieces, PositionedStream

_MAX_PIECES = 1 << 20
_MAX_SIZE = 16 << 40  # ext4's largest file; a bound is needed because holes take no space in an archive
_DIGITS = 18
_CHUNK = 1 << 20


def gnu_pieces(
    block: bytes, source: PositionedStream, name: str, number: Callable[[bytes, PositionedStream], int]
) -> tuple[int, Pieces]:
    """Return the real size and the map of an S member; the map may continue in the blocks that follow."""
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
            return size, _checked(numbers, size, stored, source, name)
        if len(numbers) > 2 * _MAX_PIECES:
            raise _damaged(source, name)
        following = source.exactly(512)
        table, more = following[:504], following[504]


def pax_pieces(member: Member, pairs: list[tuple[str, bytes]], source: PositionedStream, name: str) -> bytes | None:
    """Set the map and the real size of `member` from its pax records, and return its real name if they contain one."""
    values = dict(pairs)
    major, minor = values.get("GNU.sparse.major"), values.get("GNU.sparse.minor")
    if (major, minor) == (b"1", b"0"):
        numbers, taken = _stored_map(member.stored, source, name)
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
                raise _damaged(source, name)
            parts = [value for _, value in turns]
        else:
            parts = text.split(b",")
        numbers = [_natural(part, source, name) for part in parts]
    else:
        raise BuildError(f"{source.where}: {name}: a sparse file of an unknown form")
    member.size = _natural(size, source, name)
    member.pieces = _checked(numbers, member.size, member.stored, source, name)
    return values.get("GNU.sparse.name")


class Unpacked:
    """The content of a sparse file, read from the stored bytes in `stream`."""

    def __init__(self, stream: Readable, size: int, pieces: Pieces) -> None:
        self._chunks = _chunks(stream, size, pieces)
        self._rest = b""

    def read(self, size: int = -1, /) -> bytes:
        parts = [self._rest]
        got = len(self._rest)
        while size < 0 or got < size:
            data = next(self._chunks, b"")
            if not data:
                break
            parts.append(data)
            got += len(data)
        data = b"".join(parts)
        if size < 0:
            size = got
        self._rest = data[size:]
        return data[:size]


def _chunks(stream: Readable, size: int, pieces: Pieces) -> Iterator[bytes]:
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


def _stored_map(stored: int, source: PositionedStream, name: str) -> tuple[list[int], int]:
    """Read a map in the form of pax 1.0.

    It precedes the data, one number per line, padded to whole blocks. Returns the numbers after the count, and the
    number of bytes read.
    """
    numbers: list[int] = []
    text, taken, wanted = b"", 0, 1
    while len(numbers) < wanted:
        if taken + 512 > stored:
            raise _damaged(source, name)
        text += source.exactly(512)
        taken += 512
        *lines, text = text.split(b"\n")
        for line in lines[: wanted - len(numbers)]:
            numbers.append(_natural(line, source, name))
            if len(numbers) == 1:
                wanted = 1 + 2 * numbers[0]
                if numbers[0] > _MAX_PIECES:
                    raise _damaged(source, name)
        # The first line is the count of pairs; the rest of the same block may hold the first numbers.
        if len(numbers) == 1:
            numbers += [_natural(line, source, name) for line in lines[1:wanted]]
        if len(numbers) < wanted and len(text) > _DIGITS:
            raise _damaged(source, name)
    return numbers[1:], taken


def _checked(numbers: list[int], size: int, stored: int, source: PositionedStream, name: str) -> Pieces:
    pieces = tuple(zip(numbers[::2], numbers[1::2], strict=False))
    position = total = 0
    for offset, length in pieces:
        if offset < position or length < 0:
            raise _damaged(source, name)
        position = offset + length
        total += length
    if len(numbers) % 2 or total != stored or not position <= size <= _MAX_SIZE:
        raise _damaged(source, name)
    return pieces


def _natural(text: bytes, source: PositionedStream, name: str) -> int:
    if not text.isdigit() or len(text) > _DIGITS:
        raise _damaged(source, name)
    return int(text)


def _damaged(source: PositionedStream, name: str) -> BuildError:
    return BuildError(f"{source.where}: {name}: the map of a sparse file is damaged")
