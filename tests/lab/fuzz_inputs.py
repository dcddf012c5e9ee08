"""Inputs for fuzzing: mutations of real files. An input is determined by its reader's seeds and its number."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import random
import re
import zipfile
from collections.abc import Callable, Sequence
from typing import Any

import zstandard

Seeds = Sequence[bytes]
Mutate = Callable[[Seeds, random.Random], bytes]

_DEEP = 3000
# What readers of texts and of numbers may stumble on.
TOKENS = (
    b"\0",
    b"\xff\xfe",
    b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
    b"\xc3",
    b"\r\n",
    b"\n\n",
    b"\x0c",
    b"\x1b[31m",
    b"\xe2\x80\xa8",
    b"\xc2\xb2",
    b"\xd9\xa3",
    b"-1",
    b"0",
    b"1e999",
    b"-0.0",
    b"NaN",
    b"Infinity",
    b"-Infinity",
    b"9" * 25,
    b"9" * 5000,
    b"0x" + b"f" * 40,
    b"18446744073709551616",
    b"9223372036854775807",
    b"4294967295",
    b"null",
    b"true",
    b"[]",
    b"{}",
    b'""',
    b'"\\ud800"',
    b'"\\u0000"',
    b"[" * _DEEP,
    b'{"a":' * _DEEP,
    b"(" * _DEEP,
    b"a." * _DEEP,
    b"a" * 140_000,
    b"../" * 50,
    b"/",
    b"..",
    b"://",
    b"@",
    b":",
    b"=",
    b"&a [*a, *a]",
    b"<<: *a",
    b"!!python/object:os.system x",
    b"%",
    b"\\",
    b"'",
    b'"',
    b"`",
    b"$(",
    b"${",
    b"#",
    b"~",
    b"|",
    b"0001-01-01T00:00:00+23:59",
    b"9999-12-31T23:59:59-23:59",
    b"Mon, 01 Jan 0001 00:00:00 +2359",
    b"Fri, 31 Dec 9999 23:59:59 -2359",
    b"Thu, 99 Foo 99999 99:99:99 +9999",
)
# Values of another type, for one in JSON.
_VALUES = (
    None,
    True,
    -1,
    0,
    1.5,
    float("inf"),
    float("nan"),
    10**40,
    "",
    "x",
    "\0",
    "\ud800",
    "a" * 70_000,
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"a": {"b": [1]}},
    ["x", "y"],
    "../../x",
    "sha256:" + "0" * 64,
    "9999-99-99",
)
_NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
_PIECE = re.compile(rb"\w+|\s+|[^\w\s]+")
_LARGEST = 1 << 20  # bytes of an input


def mutated(seeds: Seeds, rng: random.Random) -> bytes:
    """One of `seeds` after one to six changes."""
    data = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 2, 3, 6))):
        data = rng.choice(_CHANGES)(data, seeds, rng)[:_LARGEST]
    return data


def _flip(data: bytes, _: Seeds, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _n in range(rng.choice((1, 2, 8))):
        if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _overwrite(data: bytes, _: Seeds, rng: random.Random) -> bytes:
    """Put an extreme binary number somewhere, mostly aligned."""
    size = rng.choice((1, 2, 4, 8))
    number = rng.choice(
        (0, 1, (1 << 8 * size) - 1, 1 << (8 * size - 1), (1 << (8 * size - 1)) - 1, rng.getrandbits(8 * size))
    )
    at = rng.randrange(len(data) + 1)
    at -= at % size if rng.random() < 0.8 else 0
    return data[:at] + number.to_bytes(size, rng.choice(("little", "big"))) + data[at + size :]


def _cut(data: bytes, _: Seeds, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def _span(data: bytes, rng: random.Random) -> tuple[int, int]:
    start = rng.randrange(len(data) + 1)
    return start, min(len(data), start + int(rng.choice((1, 8, 64, 512, 4096)) * rng.random()) + 1)


def _repeat(data: bytes, _: Seeds, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:end] + data[start:end] * rng.choice((1, 1, 2, 10, 300)) + data[end:]


def _delete(data: bytes, _: Seeds, rng: random.Random) -> bytes:
    start, end = _span(data, rng)
    return data[:start] + data[end:]


def _swap(data: bytes, _: Seeds, rng: random.Random) -> bytes:
    first, second = sorted((_span(data, rng), _span(data, rng)))
    if first[1] > second[0]:
        return data
    (a, b), (c, d) = first, second
    return data[:a] + data[c:d] + data[b:c] + data[a:b] + data[d:]


def _insert(data: bytes, _: Seeds, rng: random.Random) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.choice(TOKENS) + data[at:]


def _renumber(data: bytes, _: Seeds, rng: random.Random) -> bytes:
    """Replace one number in a text."""
    found = list(_NUMBER.finditer(data[:200_000]))
    if not found:
        return data
    match = rng.choice(found)
    return data[: match.start()] + rng.choice(TOKENS) + data[match.end() :]


def _lines(data: bytes, seeds: Seeds, rng: random.Random) -> bytes:
    """Swap, repeat, drop or borrow lines."""
    lines = data.split(b"\n")
    for _ in range(rng.choice((1, 3))):
        one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
        match rng.randrange(4):
            case 0:
                lines[one], lines[other] = lines[other], lines[one]
            case 1:
                lines[one:one] = [lines[other]] * rng.choice((1, 5, 200))
            case 2 if len(lines) > 1:
                del lines[one]
            case _:
                lines[one] = rng.choice(rng.choice(seeds).split(b"\n"))
    return b"\n".join(lines)


def _soup(data: bytes, seeds: Seeds, rng: random.Random) -> bytes:
    """Join pieces of the seeds, which are words, blanks and signs, in any order."""
    pieces = _PIECE.findall(data[:20_000]) + _PIECE.findall(rng.choice(seeds)[:20_000])
    return b"".join(rng.choice(pieces) if pieces else b"" for _ in range(rng.choice((3, 20, 100))))


def _splice(data: bytes, seeds: Seeds, rng: random.Random) -> bytes:
    other = rng.choice(seeds)
    return data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]


def _graft(data: bytes, seeds: Seeds, rng: random.Random) -> bytes:
    """Change a value in a JSON document."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        return _lines(data, seeds, rng)
    return json.dumps(grafted(document, rng)).encode()


_CHANGES = (
    _flip,
    _overwrite,
    _cut,
    _repeat,
    _delete,
    _swap,
    _insert,
    _insert,
    _renumber,
    _lines,
    _soup,
    _splice,
    _graft,
    _graft,
)


def grafted(document: Any, rng: random.Random, values: Sequence[Any] = _VALUES) -> Any:
    """`document` with one value removed, renamed, or replaced by one of `values`, at any depth."""
    holder, key, at = None, None, document
    while isinstance(at, dict | list) and at and (holder is None or rng.random() < 0.75):
        holder = at
        key = rng.choice(list(at)) if isinstance(at, dict) else rng.randrange(len(at))
        at = at[key]
    if holder is None:
        return rng.choice(values)
    match rng.randrange(5):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[rng.choice(("", "x", "\0", "é", *holder))] = holder.pop(key)
        case 2:
            holder[key] = rng.choice(([at, at], {"x": at}, str(at)))
        case _:
            holder[key] = rng.choice(values)
    return document


def tar_summed(mutate: Mutate) -> Mutate:
    """Tar archives whose headers have right checksums again, so that their fields are read; packed in any way."""

    def made(seeds: Seeds, rng: random.Random) -> bytes:
        data = bytearray(mutate(seeds, rng))
        if rng.random() < 0.85:
            _summed(data)
        return packed(bytes(data), rng)

    return made


def _summed(data: bytearray) -> None:
    at = 0
    while at + 512 <= len(data):
        block = data[at : at + 512]
        if not any(block):
            at += 512
            continue
        total = sum(block[:148]) + 8 * 32 + sum(block[156:])
        data[at + 148 : at + 156] = b"%06o\0 " % total
        digits = bytes(block[124:136]).strip(b"\0 ")
        size = int(digits, 8) if re.fullmatch(rb"[0-7]{1,11}", digits) else 0
        at += 512 + -(-size // 512) * 512


def packed(data: bytes, rng: random.Random) -> bytes:
    """`data` compressed as layers are, or not; sometimes damaged after that."""
    match rng.randrange(6):
        case 0:
            data = gzip.compress(data, 1, mtime=0)
        case 1:
            data = zstandard.ZstdCompressor(level=1).compress(data)
        case 2:
            data = zstandard.ZstdCompressor(level=1).compressobj().compress(data)  # without its end
        case _:
            return data
    return _flip(data, (data,), rng) if rng.random() < 0.2 else data


def zipped(seeds: Seeds, rng: random.Random) -> bytes:
    """A zip with members that were changed inside, or one changed as a whole."""
    if rng.random() < 0.5:
        return mutated(seeds, rng)
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(rng.choice(seeds))) as source,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made,
    ):
        members = [(info, source.read(info)) for info in source.infolist()]
        chosen = rng.randrange(len(members))
        for number, (info, data) in enumerate(members):
            if number == chosen and rng.random() < 0.8:
                data = mutated([data], rng)
            elif number == chosen:
                info = zipfile.ZipInfo(
                    mutated([info.filename.encode()], rng).decode("utf-8", "replace")[:60_000] or "x"
                )
            made.writestr(info, data)
    return out.getvalue()


def bzipped(mutate: Mutate) -> Mutate:
    return lambda seeds, rng: bz2.compress(mutate(seeds, rng), 1)


def of_number(seeds: Seeds, mutate: Mutate, name: str, number: int) -> bytes:
    """Input `number` of the reader `name`; the same on every machine."""
    return mutate(seeds, random.Random(f"{name} {number}"))
