"""Dynamic symbols of an ELF file.

Sources: System V ABI, chapter 5 (symbol table, DT_HASH); the Linux Standard Base's symbol versioning (DT_VERSYM);
glibc, elf/dl-lookup.c (DT_GNU_HASH).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from functools import cached_property

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
        """Read the tables at `places` (by tag); `versions` are by number. Raises as `read`, and struct.error."""
        self._strings, self._versions = strings, versions
        self._entry = struct.Struct(order + "IBBHQQ")

        def numbers(offset: int, count: int, kind: str = "I") -> tuple[int, ...]:
            form = f"{order}{count}{kind}"
            return struct.unpack(form, read(offset, struct.calcsize(form)))

        count = 0
        if _GNU_HASH in places:
            at = places[_GNU_HASH]
            buckets, first, words, _ = numbers(at, 4)
            at += 16 + 8 * words
            count, at = max(numbers(at, buckets), default=0), at + 4 * buckets
            if count >= first:  # the table's last chain ends with the last symbol
                end = count + _CHAIN
                while not numbers(at + 4 * (count - first), 1)[0] & 1:
                    if (count := count + 1) == end:
                        raise ValueError("a hash chain without an end")
                count += 1
            else:  # binutils writes 1 as the first symbol of an empty table
                count = max(first, (places[STRTAB] - places[SYMTAB]) // _SYMBOL)
        elif _HASH in places:
            count = numbers(places[_HASH], 2)[1]
        self._table = read(places[SYMTAB], count * _SYMBOL)
        self._marks = numbers(places[_VERSYM], count, "H") if _VERSYM in places else (0,) * count

    def undefined(self, wanted: re.Pattern[bytes]) -> Iterator[tuple[bytes, str]]:
        """Yield (name, version or "") of the undefined symbols that are not weak and whose names match `wanted`."""
        for (name, info, _, section, _, _), mark in self._rows():
            if not section and name and info >> 4 in _BOUND and wanted.match(self._strings, name):
                yield self._name(name), self._version(mark)

    def has(self, name: bytes, version: str) -> bool:
        """Return whether the symbol is defined, for the loader: in this `version` if both sides have versions."""
        found = self._defined.get(name, ())
        return any(not version or not own or own == version for own in map(self._version, found))

    @cached_property
    def _defined(self) -> dict[bytes, tuple[int, ...]]:
        """The numbers of the versions of the defined symbols."""
        found: dict[bytes, tuple[int, ...]] = {}
        for (offset, _, _, section, _, _), mark in self._rows():
            if section:
                name = self._name(offset)
                found[name] = (*found.get(name, ()), mark)
        return found

    def _rows(self) -> Iterator[tuple[tuple[int, ...], int]]:
        return zip(self._entry.iter_unpack(self._table), self._marks, strict=True)

    def _name(self, offset: int) -> bytes:
        return self._strings[offset : self._strings.find(b"\0", offset)]

    def _version(self, mark: int) -> str:
        # Numbers 0 and 1 are symbols without a version; the highest bit hides one from the linker, not from the loader.
        return self._versions.get(mark & 0x7FFF, "") if mark & 0x7FFF > 1 else ""
