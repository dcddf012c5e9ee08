"""Reader of ELF files. Needs only Python 3.9.

Sources: System V ABI, chapters 4 and 5 (header, program header, dynamic section); the Linux Standard Base's symbol
versioning (DT_VERNEED). Like the dynamic linker, it uses program headers: section headers may be stripped.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

# Values of e_machine.
MACHINES = {"i386": 3, "ppc64": 21, "s390x": 22, "arm": 40, "x86_64": 62, "aarch64": 183, "riscv64": 243}
_PT_LOAD, _PT_DYNAMIC, _PT_INTERP = 1, 2, 3
_NEEDED, _STRTAB, _STRSZ, _SONAME, _RPATH, _RUNPATH = 1, 5, 10, 14, 15, 29
_VERNEED, _VERNEEDNUM = 0x6FFFFFFE, 0x6FFFFFFF
# Upper limits for a table's length and for an offset in a file: a damaged header may contain any number.
_MOST, _FAR = 1 << 24, 1 << 40
_GLIBC = re.compile(r"GLIBC_([0-9]+)\.([0-9]+)(?:\.[0-9]+)?")


@dataclass(frozen=True)
class Elf:
    """A 64-bit ELF file.

    `dynamic` says whether it has a dynamic section. `runpath` is DT_RUNPATH, or DT_RPATH if there is none; `versions`
    are the symbol versions that it needs, such as GLIBC_2.34.
    """

    machine: int
    dynamic: bool = False
    soname: str = ""
    runpath: str = ""
    needed: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()

    @property
    def glibc(self) -> tuple[int, int]:
        """The newest glibc version that its symbols need, (0, 0) for none."""
        found = [_GLIBC.fullmatch(version) for version in self.versions]
        return max(((int(m[1]), int(m[2])) for m in found if m), default=(0, 0))


def machine_name(machine: int) -> str:
    """Return the name of the processor with the e_machine `machine`."""
    return next((n for n, number in MACHINES.items() if number == machine), f"machine {machine}")


def elf_machine(path: str) -> int | None:
    """Return the e_machine of the ELF file at `path`, None for any other or unreadable file."""
    try:
        # This runs for tens of thousands of files; a file object takes three times as long.
        file = os.open(path, os.O_RDONLY)
        try:
            head = os.read(file, 20)
        finally:
            os.close(file)
    except OSError:
        return None
    if len(head) < 20 or head[:4] != b"\x7fELF":
        return None
    return int.from_bytes(head[18:20], "little" if head[5] == 1 else "big")


def is_elf(path: Path) -> bool:
    """Return whether `path` is a regular file that starts with the ELF magic number."""
    if path.is_symlink() or not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(4) == b"\x7fELF"


def read_elf(path: Path) -> Elf | None:
    """Return the 64-bit ELF file at `path`, None for any other or damaged file. Raises OSError."""
    with path.open("rb") as stream:
        try:
            return _read(stream)
        except (struct.error, ValueError, EOFError):
            return None


def _read(stream: BinaryIO) -> Elf | None:
    head = stream.read(64)
    if len(head) < 64 or head[:4] != b"\x7fELF" or head[4] != 2 or head[5] not in (1, 2):
        return None
    order = "<" if head[5] == 1 else ">"
    (machine,) = struct.unpack_from(order + "H", head, 18)
    (table,) = struct.unpack_from(order + "Q", head, 32)
    size, count = struct.unpack_from(order + "HH", head, 54)
    if size < 56:
        return Elf(machine)
    loads, dynamic = [], None
    for number in range(count):
        kind, _, offset, address, _, length, _, _ = struct.unpack(
            order + "IIQQQQQQ", _at(stream, table + number * size, 56)
        )
        if kind == _PT_LOAD:
            loads.append((address, offset, length))
        elif kind == _PT_DYNAMIC:
            dynamic = (offset, length)
    if dynamic is None:
        return Elf(machine)
    entries: dict[int, list[int]] = {}
    for tag, value in struct.iter_unpack(order + "qQ", _at(stream, *dynamic)[: dynamic[1] // 16 * 16]):
        if tag == 0:
            break
        entries.setdefault(tag, []).append(value)

    def place(address: int) -> int:
        for begin, offset, length in loads:
            if begin <= address < begin + length:
                return int(offset + address - begin)
        raise ValueError("an address outside the file")

    strings = (
        _at(stream, place(entries[_STRTAB][0]), entries[_STRSZ][0]) if {_STRTAB, _STRSZ} <= entries.keys() else b""
    )

    def text(offset: int) -> str:
        end = strings.index(b"\0", offset) if offset <= len(strings) else -1
        return strings[offset:end].decode(errors="replace")

    versions: list[str] = []
    if _VERNEED in entries and _VERNEEDNUM in entries:
        names = _versions(stream, order, place(entries[_VERNEED][0]), entries[_VERNEEDNUM][0])
        versions = [text(offset) for offset in names]
    paths = entries.get(_RUNPATH) or entries.get(_RPATH) or []
    return Elf(
        machine,
        True,
        text(entries[_SONAME][0]) if _SONAME in entries else "",
        text(paths[0]) if paths else "",
        tuple(text(offset) for offset in entries.get(_NEEDED, ())),
        tuple(dict.fromkeys(versions)),
    )


def _versions(stream: BinaryIO, order: str, begin: int, count: int) -> Iterator[int]:
    """Yield the string table offsets of the names in the Vernaux entries of Verneed."""
    for _ in range(min(count, 4096)):
        _, needs, _, first, following = struct.unpack(order + "HHIII", _at(stream, begin, 16))
        place = begin + first
        for _ in range(needs):
            _, _, _, name, step = struct.unpack(order + "IHHII", _at(stream, place, 16))
            yield name
            if not step:
                break
            place += step
        if not following:
            return
        begin += following


def _at(stream: BinaryIO, offset: int, length: int) -> bytes:
    if offset < 0 or length > _MOST or offset > _FAR:
        raise ValueError("not within a file")
    stream.seek(offset)
    found = stream.read(length)
    if len(found) < length:
        raise EOFError
    return found
