"""Sparse files in tar archives: maps of the stored bytes; the holes between them read as zeros.

Source: GNU tar manual, appendix "Storing Sparse Files": the old GNU form (S), pax versions 0.0, 0.1, 1.0.
"""

from __future__ import annotations

from collections.abc import Iterator

from envbuild.image.entry import Readable
from envbuild.image.tar_stream import Chunks, Member, Pieces, PositionedStream, number

_MAX_PIECES = 1 << 20
_MAX_SIZE = 16 << 40  # ext4's largest file; a bound is needed because holes take no space in an archive
_DIGITS = 18
_CHUNK = 1 << 20
_DAMAGED = "the map of a sparse file is damaged"


def gnu_pieces(block: bytes, source: PositionedStream) -> tuple[int, Pieces]:
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


def pax_pieces(member: Member, pairs: list[tuple[str, bytes]], source: PositionedStream) -> bytes | None:
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


class Unpacked(Chunks):
    """The content of a sparse file, read from the stored bytes in `stream`."""

    def __init__(self, stream: Readable, size: int, pieces: Pieces) -> None:
        super().__init__(_chunks(stream, size, pieces))


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
    if len(numbers) % 2 or total != stored or not position <= size <= _MAX_SIZE:
        raise ValueError(_DAMAGED)
    return pieces


def _natural(text: bytes) -> int:
    if not text.isdigit() or len(text) > _DIGITS:
        raise ValueError(_DAMAGED)
    return int(text)
