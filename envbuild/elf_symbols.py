"""Dynamic symbols of an ELF file, found as the dynamic loader finds them.

Sources: System V ABI, chapter 5 (symbol table, DT_HASH); the Linux Standard Base's symbol versioning (DT_VERSYM);
glibc, elf/dl-lookup.c (DT_GNU_HASH).
"""

from __future__ import annotations

import re
import struct
import sys
from array import array
from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache

# Tags of the dynamic section for the tables that symbols need.
_HASH, STRTAB, SYMTAB, _GNU_HASH, _VERSYM = 4, 5, 6, 0x6FFFFEF5, 0x6FFFFFF0
TABLES = (_HASH, STRTAB, SYMTAB, _GNU_HASH, _VERSYM)
_BOUND = (1, 10)  # STB_GLOBAL and STB_GNU_UNIQUE; a weak symbol may stay undefined
_SYMBOL = 24  # bytes of an entry of the symbol table
_CHAIN = 1 << 16  # more symbols of one hash are in no file
# Returns `length` bytes at an offset. Raises ValueError and EOFError for what is not in the file.
ReadAt = Callable[[int, int], bytes]


class Symbols:
    """The dynamic symbols of an ELF file."""

    def __init__(self, read: ReadAt, order: str, places: dict[int, int], strings: bytes, versions: dict[int, str]):
        """Read the tables at `places` (by tag); `versions` are by number. Raises as `read`, IndexError if damaged."""

        def numbers(kind: str, offset: int, count: int) -> array[int]:
            found = array(kind, read(offset, count * array(kind).itemsize))
            if (order == "<") != (sys.byteorder == "little"):
                found.byteswap()
            return found

        self._entry = struct.Struct(order + "IBBHQQ")
        self._strings, self._versions = strings, versions
        self._hash: tuple[array[int], array[int], array[int], int] | None = None
        self._first = count = 0  # the first symbol that DT_GNU_HASH has; undefined ones come before it
        if _GNU_HASH in places:
            at = places[_GNU_HASH]
            buckets, self._first, words, shift = numbers("I", at, 4)
            bloom, at = numbers("Q", at + 16, words), at + 16 + 8 * words
            heads, at = numbers("I", at, buckets), at + 4 * buckets
            if (count := max(heads, default=0)) >= self._first:
                end = count + _CHAIN
                while not numbers("I", at + 4 * (count - self._first), 1)[0] & 1:
                    if (count := count + 1) == end:
                        raise ValueError("a hash chain without an end")
                count += 1
                self._hash = bloom, heads, numbers("I", at, count - self._first), shift
            else:  # binutils writes 1 as the first symbol of an empty table
                count = self._first = max(self._first, (places[STRTAB] - places[SYMTAB]) // _SYMBOL)
        elif _HASH in places:
            count = self._first = numbers("I", places[_HASH], 2)[1]
        self._table = read(places[SYMTAB], count * _SYMBOL)
        self._marks = numbers("H", places[_VERSYM], count) if _VERSYM in places else None

    def undefined(self, wanted: re.Pattern[bytes]) -> Iterator[tuple[bytes, str]]:
        """Yield (name, version or "") of the undefined symbols that are not weak and whose names match `wanted`."""
        for number in range(1, self._first):
            name, info, _, section, _, _ = self._entry.unpack_from(self._table, number * _SYMBOL)
            if not section and info >> 4 in _BOUND and wanted.match(self._strings, name):
                yield self._strings[name : self._strings.index(b"\0", name)], self._version(number)

    def has(self, name: bytes, version: str) -> bool:
        """Return whether the symbol is defined, for the loader: in this `version` if both sides have versions."""
        for number in self._numbers(name):
            offset, _, _, section, _, _ = self._entry.unpack_from(self._table, number * _SYMBOL)
            if section and self._strings.startswith(name + b"\0", offset):
                own = self._version(number)
                if not version or not own or own == version:
                    return True
        return False

    def _version(self, number: int) -> str:
        # Numbers 0 and 1 are symbols without a version; the highest bit hides one from the linker, not from the loader.
        mark = self._marks[number] & 0x7FFF if self._marks else 0
        return self._versions.get(mark, "") if mark > 1 else ""

    def _numbers(self, name: bytes) -> Iterator[int]:
        """Yield the numbers of the symbols that may have this name."""
        if self._hash is None:
            yield from self._by_name.get(name, ())
            return
        (bloom, heads, chain, shift), key = self._hash, gnu_hash(name)
        word = bloom[key // 64 % len(bloom)]
        if not word >> key % 64 & word >> (key >> shift) % 64 & 1:
            return
        if (number := heads[key % len(heads)]) < self._first:
            return
        for place in range(number - self._first, len(chain)):
            if chain[place] | 1 == key | 1:
                yield place + self._first
            if chain[place] & 1:
                return

    @cached_property
    def _by_name(self) -> dict[bytes, list[int]]:
        found: dict[bytes, list[int]] = {}
        for number in range(1, len(self._table) // _SYMBOL):
            offset = self._entry.unpack_from(self._table, number * _SYMBOL)[0]
            found.setdefault(self._strings[offset : self._strings.index(b"\0", offset)], []).append(number)
        return found


@lru_cache(1 << 16)
def gnu_hash(name: bytes) -> int:
    """Return the hash of a symbol in DT_GNU_HASH."""
    key = 5381
    for byte in name:
        key = key * 33 + byte & 0xFFFFFFFF
    return key
