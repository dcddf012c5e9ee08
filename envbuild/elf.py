"""Reader of ELF files.

Sources: System V ABI, chapters 4 and 5 (header, program header, dynamic section); the Linux Standard Base's symbol
versioning (DT_VERNEED). Like the dynamic linker, it uses program headers: section headers may be stripped.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

HEAD = 20  # bytes of a file that name its processor
# Values of e_machine.
MACHINES = {"i386": 3, "ppc64": 21, "s390x": 22, "arm": 40, "x86_64": 62, "aarch64": 183, "riscv64": 243}
_PT_LOAD, _PT_DYNAMIC = 1, 2
_NEEDED, _STRTAB, _STRSZ, _RPATH, _RUNPATH = 1, 5, 10, 15, 29
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

    def unpack(layout: str, offset: int) -> tuple[int, ...]:
        return struct.unpack(order + layout, _at(stream, offset, struct.calcsize(order + layout)))

    (machine,), (table,), (size, count) = unpack("H", 18), unpack("Q", 32), unpack("HH", 54)
    if size < 56:
        return Elf(machine)
    headers = [unpack("IIQQQQQQ", table + number * size) for number in range(count)]
    loads = [(address, offset, length) for kind, _, offset, address, _, length, _, _ in headers if kind == _PT_LOAD]
    dynamic = [(offset, length) for kind, _, offset, _, _, length, _, _ in headers if kind == _PT_DYNAMIC]
    if not dynamic:
        return Elf(machine)
    entries: dict[int, list[int]] = {}
    begin, length = dynamic[-1]
    for tag, value in struct.iter_unpack(order + "qQ", _at(stream, begin, length)[: length // 16 * 16]):
        if tag == 0:
            break
        entries.setdefault(tag, []).append(value)

    def place(address: int) -> int:
        for begin, offset, length in loads:
            if begin <= address < begin + length:
                return offset + address - begin
        raise ValueError("an address outside the file")

    strings = b""
    if {_STRTAB, _STRSZ} <= entries.keys():
        strings = _at(stream, place(entries[_STRTAB][0]), entries[_STRSZ][0])

    def text(offset: int) -> str:
        end = strings.index(b"\0", offset) if offset <= len(strings) else -1
        return strings[offset:end].decode(errors="replace")

    versions: list[str] = []
    if {_VERNEED, _VERNEEDNUM} <= entries.keys():
        names = _versions(unpack, place(entries[_VERNEED][0]), entries[_VERNEEDNUM][0])
        versions = [text(offset) for offset in names]
    paths = entries.get(_RUNPATH) or entries.get(_RPATH) or []
    return Elf(
        machine,
        dynamic=True,
        runpath=text(paths[0]) if paths else "",
        needed=tuple(text(offset) for offset in entries.get(_NEEDED, ())),
        versions=tuple(dict.fromkeys(versions)),
    )


def _versions(unpack: Callable[[str, int], tuple[int, ...]], begin: int, count: int) -> Iterator[int]:
    """Yield the string table offsets of the names in the Vernaux entries of Verneed."""
    for _ in range(min(count, 4096)):
        _, needs, _, first, following = unpack("HHIII", begin)
        place = begin + first
        for _ in range(needs):
            _, _, _, name, step = unpack("IHHII", place)
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
