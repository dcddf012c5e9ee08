"""Reader of ELF files and their dynamic symbols.

ddp_train has this file and libraries.py too, by links, for nodes without envbuild: they need Python 3.9 alone.

Sources: System V ABI, chapters 4 and 5 (header, program header, dynamic section, symbol table, DT_HASH); the Linux
Standard Base's symbol versioning (DT_VERNEED, DT_VERDEF, DT_VERSYM); glibc, elf/dl-lookup.c (DT_GNU_HASH). Like the
dynamic linker, it uses program headers: section headers may be stripped.
"""

from __future__ import annotations

import os
import re
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

HEAD = 20  # bytes of a file that name its processor
# Values of e_machine.
MACHINES = {"i386": 3, "ppc64": 21, "s390x": 22, "arm": 40, "x86_64": 62, "aarch64": 183, "riscv64": 243}
_PT_LOAD, _PT_DYNAMIC, _PT_GNU_STACK = 1, 2, 0x6474E551
_EXECUTABLE, _SHARED = 2, 3  # e_type
_NEEDED, _STRSZ, _SONAME, _RPATH, _RUNPATH, _FLAGS_1, _FILTER = 1, 10, 14, 15, 29, 0x6FFFFFFB, 0x7FFFFFFF
_NOOPEN, _PIE = 0x40, 0x8000000  # of DT_FLAGS_1
_VERDEF, _VERDEFNUM, _VERNEED, _VERNEEDNUM = 0x6FFFFFFC, 0x6FFFFFFD, 0x6FFFFFFE, 0x6FFFFFFF
_OS_ABIS = (0, 3)  # System V and GNU, in the header
_WEAK = 2  # VER_FLG_WEAK: the loader does without such a version
_END = 32 << 20  # the names in libtorch_cpu.so take 6 MB, those at the beginning of Intel's extension 41 MB
# Upper limits for a table's length and for an offset in a file: a damaged header may contain any number.
_MOST, _FAR = 1 << 27, 1 << 40
Unpack = Callable[[str, int], tuple[int, ...]]
_GLIBC = re.compile(r"GLIBC_([0-9]+)\.([0-9]+)(?:\.[0-9]+)?")


@dataclass(frozen=True, eq=False)
class Elf:
    """A 64-bit ELF file.

    `dynamic` is whether it has a dynamic section. `runpath` is DT_RUNPATH, else DT_RPATH, which `inherited` tells.
    `needs` are the symbol versions that the loader requires from other libraries, as (library, version); `defines` are
    its own symbol versions. `given` maps its defined symbols to their versions, "" for none; `wanted` are the symbols
    that other libraries must define, as (name, version or ""). Both are empty if the symbols were not read; `versioned`
    is whether its symbols have a table of versions (DT_VERSYM).

    `fault` is why the loader refuses the file, "" for none, and `dlopen_fault` why dlopen alone does. `exec_stack` is
    whether it asks for an executable stack.
    """

    machine: int
    dynamic: bool = False
    runpath: str = ""
    inherited: bool = False
    needed: Sequence[str] = ()
    soname: str = ""
    needs: Sequence[Sequence[str]] = ()
    defines: Sequence[str] = ()
    given: Mapping[str, Sequence[str]] = field(default_factory=dict, repr=False)
    wanted: Sequence[Sequence[str]] = field(default=(), repr=False)
    versioned: bool = True
    fault: str = ""
    dlopen_fault: str = ""
    exec_stack: bool = False

    @property
    def glibc(self) -> tuple[int, int]:
        """Newest glibc version that its symbols need, (0, 0) for none."""
        return newest_glibc(version for _, version in self.needs)

    def has(self, name: str, version: str) -> bool:
        """Return whether the loader finds the symbol here: in this `version` if both sides have versions."""
        return any(not version or not own or own == version for own in self.given.get(name, ()))


def newest_glibc(versions: Iterable[str]) -> tuple[int, int]:
    """Return the newest glibc version among versions of symbols, (0, 0) for none."""
    matches = map(_GLIBC.fullmatch, versions)
    return max(((int(m[1]), int(m[2])) for m in matches if m), default=(0, 0))


def machine_name(machine: int) -> str:
    """Return the name of the processor with the e_machine `machine`."""
    return next((n for n, number in MACHINES.items() if number == machine), f"machine {machine}")


def file_head(path: str) -> bytes:
    """Return the first HEAD bytes of a file, b"" for an unreadable one."""
    try:
        # This runs for tens of thousands of files; a file object takes three times as long.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a named pipe would block
        try:
            return os.read(file, HEAD)
        finally:
            os.close(file)
    except OSError:
        return b""


def elf_machine(head: bytes) -> int | None:
    """Return the e_machine of the ELF file that begins with `head`, None for any other file."""
    if len(head) < HEAD or head[:4] != b"\x7fELF":
        return None
    return int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")


def is_elf(path: Path) -> bool:
    """Return whether `path` is a regular file that starts with the ELF magic number."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"\x7fELF"


def read_elf(path: Path, *, symbols: bool = False) -> Elf | None:
    """Return the 64-bit ELF file at `path`, None for any other or damaged file. Raises OSError."""
    with path.open("rb") as stream:
        return parse_elf(partial(_at, stream), symbols=symbols)


def parse_elf(read: ReadAt, *, symbols: bool = False) -> Elf | None:
    """Parse the ELF file whose bytes `read` returns, with its symbol table if `symbols` is set. None as `read_elf`."""
    try:
        return _read(read, symbols)
    except (struct.error, ValueError, EOFError, IndexError):
        return None


def refused_file(head: bytes) -> Elf | None:
    """Return the file that begins with `head`, and that `read_elf` does not read, as the loader sees it.

    None for a missing file, and for one of 32 bits, in place of which the loader takes another.
    """
    if not head or head[:5] == b"\x7fELF\1":
        return None
    return Elf(0, fault="the file is damaged" if head[:4] == b"\x7fELF" else "invalid ELF header")


def _read(read: ReadAt, symbols: bool) -> Elf | None:
    head = read(0, 64)
    if head[:4] != b"\x7fELF" or head[4] != 2 or head[5] not in (1, 2):
        return None
    order = "<" if head[5] == 1 else ">"

    def unpack(layout: str, offset: int) -> tuple[int, ...]:
        return struct.unpack(order + layout, read(offset, struct.calcsize(order + layout)))

    (kind, machine), headers = unpack("HH", 16), _headers(unpack)
    fault = "" if kind in (_EXECUTABLE, _SHARED) else "only ET_DYN and ET_EXEC can be loaded"
    if head[7] not in _OS_ABIS:
        fault = "ELF file OS ABI invalid"
    loads = [(address, offset, length) for kind, _, offset, address, length in headers if kind == _PT_LOAD]
    dynamic = [(offset, length) for kind, _, offset, _, length in headers if kind == _PT_DYNAMIC]
    if not dynamic:
        return Elf(machine, fault=fault)
    entries: dict[int, list[int]] = {}
    begin, length = dynamic[-1]
    for tag, value in struct.iter_unpack(order + "qQ", read(begin, length)[: length // 16 * 16]):
        if tag == 0:
            break
        entries.setdefault(tag, []).append(value)

    def place(tag: int) -> int:
        address = entries[tag][0]
        for begin, offset, length in loads:
            if begin <= address < begin + length:
                return offset + address - begin
        raise ValueError("an address outside the file")

    strings = b""
    if {STRTAB, _STRSZ} <= entries.keys():
        strings = read(place(STRTAB), entries[_STRSZ][0])

    def text(offset: int) -> str:
        return strings[offset : strings.index(b"\0", offset)].decode(errors="replace")

    needs: list[tuple[str, str]] = []
    defines: list[str] = []
    names: dict[int, str] = {}  # of versions, by their numbers in DT_VERSYM
    if {_VERNEED, _VERNEEDNUM} <= entries.keys():
        for library, name, number, flags in _needs(unpack, place(_VERNEED), entries[_VERNEEDNUM][0]):
            names[number] = text(name)
            if not flags & _WEAK:
                needs.append((text(library), names[number]))
    if {_VERDEF, _VERDEFNUM} <= entries.keys():
        for number, name in _definitions(unpack, place(_VERDEF), entries[_VERDEFNUM][0]):
            names[number] = text(name)
            defines.append(names[number])
    own = {tag: place(tag) for tag in TABLES if symbols and tag in entries}
    given, wanted = _symbols(read, order, own, strings, names) if SYMTAB in own else ({}, [])
    paths = entries.get(_RUNPATH) or entries.get(_RPATH) or []
    flags = entries.get(_FLAGS_1, [0])[0]
    dlopen_fault = "shared object cannot be dlopen()ed" if flags & _NOOPEN else ""
    if flags & _PIE or kind == _EXECUTABLE:
        dlopen_fault = "cannot dynamically load an executable"
    stack = [flags for kind, flags, *_ in headers if kind == _PT_GNU_STACK]
    return Elf(
        machine,
        dynamic=True,
        runpath=text(paths[0]) if paths else "",
        inherited=bool(paths) and _RUNPATH not in entries,
        needed=tuple(text(offset) for tag in (_FILTER, _NEEDED) for offset in entries.get(tag, ())),
        soname=text(entries[_SONAME][0]) if _SONAME in entries else "",
        needs=tuple(dict.fromkeys(needs)),
        defines=tuple(sorted(defines)),
        given=given,
        wanted=wanted,
        versioned=_VERSYM in entries,
        fault=fault,
        dlopen_fault=dlopen_fault,
        # Without the header, glibc takes x86_64's for executable, and not aarch64's (stackinfo.h).
        exec_stack=bool(stack[-1] & 1) if stack else machine == MACHINES["x86_64"],
    )


def _headers(unpack: Unpack) -> list[tuple[int, int, int, int, int]]:
    """Return (type, flags, offset, address, size in the file) of each program header."""
    (table,), (size, count) = unpack("Q", 32), unpack("HH", 54)
    rows = [unpack("IIQQQQ", table + number * size) for number in range(count)] if size >= 56 else []
    return [(kind, flags, offset, address, length) for kind, flags, offset, address, _, length in rows]


def _needs(unpack: Unpack, begin: int, count: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (library, version, number, flags) of the Vernaux entries of Verneed; names are string table offsets."""
    for _ in range(min(count, 4096)):
        _, needs, library, first, following = unpack("HHIII", begin)
        place = begin + first
        for _ in range(needs):
            _, flags, number, name, step = unpack("IHHII", place)
            yield library, name, number & 0x7FFF, flags
            if not step:
                break
            place += step
        if not following:
            return
        begin += following


def _definitions(unpack: Unpack, begin: int, count: int) -> Iterator[tuple[int, int]]:
    """Yield (number, version) of the entries of Verdef."""
    for _ in range(min(count, 4096)):
        _, _, number, _, _, first, following = unpack("HHHHIII", begin)
        yield number & 0x7FFF, unpack("I", begin + first)[0]
        if not following:
            return
        begin += following


class ElfParts:
    """Parts of an ELF file of `size` bytes that contain its tables, kept while the file is read once.

    Linkers put symbols at the beginning and patchelf at the end; the dynamic section may be anywhere.
    """

    def __init__(self, size: int) -> None:
        self._wanted = [(0, 2 * _END), (size - _END, size)]
        self._offsets, self._pieces, self._at = list[int](), list[bytes](), 0

    def add(self, piece: bytes) -> None:
        """Keep the next piece of the file if it contains tables. The first piece must contain all program headers."""
        if not self._at:
            with suppress(struct.error):
                order = ">" if piece[5:6] == b"\2" else "<"
                headers = _headers(lambda layout, offset: struct.unpack_from(order + layout, piece, offset))
                dynamic = [(begin, min(size, _END)) for kind, _, begin, _, size in headers if kind == _PT_DYNAMIC]
                self._wanted += [(begin, begin + size) for begin, size in dynamic[-1:]]
        if any(begin < self._at + len(piece) and self._at < end for begin, end in self._wanted):
            self._offsets.append(self._at)
            self._pieces.append(piece)
        self._at += len(piece)

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the file. Raises EOFError for bytes that were not kept."""
        number, pieces = max(bisect_right(self._offsets, offset) - 1, 0), list[bytes]()
        while length > 0:
            start = offset - self._offsets[number] if number < len(self._pieces) else -1
            if start < 0 or not (piece := self._pieces[number][start : start + length]):
                raise EOFError
            pieces.append(piece)
            number, offset, length = number + 1, offset + len(piece), length - len(piece)
        return b"".join(pieces)


def _at(stream: BinaryIO, offset: int, length: int) -> bytes:
    if offset < 0 or not 0 <= length <= _MOST or offset > _FAR:
        raise ValueError("not within a file")
    stream.seek(offset)
    data = stream.read(length)
    if len(data) < length:
        raise EOFError
    return data


# Tags of the dynamic section for the tables that symbols need.
_HASH, STRTAB, SYMTAB, _GNU_HASH, _VERSYM = 4, 5, 6, 0x6FFFFEF5, 0x6FFFFFF0
TABLES = (_HASH, STRTAB, SYMTAB, _GNU_HASH, _VERSYM)
_BOUND = (1, 10)  # STB_GLOBAL and STB_GNU_UNIQUE; a weak symbol may stay undefined
_SYMBOL = 24  # bytes of an entry of the symbol table
_CHAIN = 1 << 16  # more symbols of one hash are in no file
# Returns `length` bytes at an offset. Raises ValueError and EOFError for what is not in the file.
ReadAt = Callable[[int, int], bytes]


def _symbols(
    read: ReadAt, order: str, places: dict[int, int], strings: bytes, versions: dict[int, str]
) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, str]]]:
    """Return `given` and `wanted` of an Elf, from the tables at `places` (by tag); `versions` are by number.

    Raises as `read`, and struct.error.
    """

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
    rows = struct.iter_unpack(order + "IBxH16x", read(places[SYMTAB], count * _SYMBOL))
    marks = numbers(places[_VERSYM], count, "H") if _VERSYM in places else (0,) * count
    given: dict[str, tuple[str, ...]] = {}
    wanted: list[tuple[str, str]] = []
    for (offset, info, section), mark in zip(rows, marks):  # noqa: B905 - Python 3.9 has no strict
        name = strings[offset : strings.find(b"\0", offset)].decode(errors="replace")
        # Numbers 0 and 1 are symbols without a version; the highest bit hides one from the linker, not from the loader.
        version = versions.get(mark & 0x7FFF, "") if mark & 0x7FFF > 1 else ""
        if section:
            given[name] = (*given.get(name, ()), version)
        elif name and info >> 4 in _BOUND:
            wanted.append((name, version))
    return given, wanted
