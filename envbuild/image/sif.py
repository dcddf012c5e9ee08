"""Reader and writer of SIF, the file format of Apptainer and Singularity, around a squashfs; and its signatures.

Source: the Singularity Image Format, header version 01 (github.com/apptainer/sif, pkg/sif). Numbers are little-endian
and packed. The layout is a header of 128 bytes, 48 descriptors of 585 bytes from offset 4096, and the described objects
from offset 32176; a partition begins at a multiple of 4096.

Attestations inside of a SIF, and the signatures that `apptainer verify --key` and SingularityCE accept, lie behind the
other objects: the digest of the content is that of the SIF without them, so that neither envbuild's nor `apptainer
sign` makes another artifact of it. Attestations are JSON objects in a group of their own; each group has a
signature. Source: pkg/integrity (metadata.go, dsse.go) and pkg/sif (GetIntegrityReader) there.
"""

from __future__ import annotations

import hashlib
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from envbuild.base.atomic import replacing_beside
from envbuild.base.errors import BuildError
from envbuild.base.files import copy_span, parse_json
from envbuild.image.model import canonical

HEADER = struct.Struct("<32s10s3s3s16s8q")
DESCRIPTOR = struct.Struct("<iBIIIqqqqqqq128s384s")
_PARTITION = struct.Struct("<ii3s")
_LAUNCH = b"#!/usr/bin/env run-singularity\n"
_MAGIC, _MAGIC_AT = b"SIF_MAGIC\0", 32
_VERSION = b"01\0"
_PAGE = 4096
_SLOTS = 48
_DATA = _PAGE + _SLOTS * DESCRIPTOR.size
GROUP = 0xF0000001
_SQUASHFS, _PRIMARY = 1, 2
DEFINITION, PARTITION, JSON = "definition", "partition", "json"
_KINDS = {
    0x4001: DEFINITION,
    0x4002: "environment",
    0x4003: "labels",
    0x4004: PARTITION,
    0x4005: "signature",
    0x4006: JSON,
    0x4007: "generic",
    0x4008: "cryptographic message",
    0x4009: "sbom",
    0x400A: "OCI index",
    0x400B: "OCI blob",
}
NUMBERS = {kind: number for number, kind in _KINDS.items()}
_FILE_SYSTEMS = {_SQUASHFS: "squashfs", 2: "ext3", 3: "archive", 4: "raw", 5: "encrypted squashfs"}
_ARCHITECTURES = {
    "01": "i386",
    "02": "x86_64",
    "03": "arm",
    "04": "aarch64",
    "05": "ppc64",
    "06": "ppc64le",
    "07": "mips",
    "08": "mipsle",
    "09": "mips64",
    "10": "mips64le",
    "11": "s390x",
    "12": "riscv64",
}
_CODES = {name: code.encode() + b"\0" for code, name in _ARCHITECTURES.items()}
# Bounds for reading a damaged file: no real SIF has as many descriptors, or larger definitions or JSON objects.
_MAX_SLOTS, MAX_OBJECT = 4096, 16 << 20
# The namespace of image identifiers (RFC 9562, version 5).
_SPACE = uuid.uuid5(uuid.NAMESPACE_DNS, "sif.org.envbuild")


@dataclass(frozen=True, slots=True)
class Object:
    """An object of a SIF: `offset` and `size` are in bytes of the file.

    For a partition `fs` is its file system, `primary` whether it is the image's root, and `arch` its architecture; else
    they are empty.
    """

    kind: str
    name: str
    offset: int
    size: int
    fs: str = ""
    arch: str = ""
    primary: bool = False


@dataclass(frozen=True, slots=True)
class Sif:
    """The objects of a SIF in file order.

    `partition` is the squashfs that is the image's root; `arch` is its architecture (x86_64, aarch64, or another name;
    "" if not given). `mtime` is in seconds since 1970.
    """

    arch: str
    objects: tuple[Object, ...]
    partition: Object
    mtime: int


def is_sif(head: bytes) -> bool:
    """Return whether a file that begins with `head`, at least 42 bytes, is a SIF."""
    return head[_MAGIC_AT : _MAGIC_AT + len(_MAGIC)] == _MAGIC


def write_sif_front(out: BinaryIO, definition: bytes, jsons: Sequence[tuple[str, bytes]], arch: str) -> int:
    """Write the objects before the partition into the empty file `out`.

    These are the definition and each of `jsons`, (name, content). `finish_sif` writes the header and the descriptors.
    Returns the offset for the squashfs of `arch` (x86_64, aarch64); `out` is at that position.
    """
    if arch not in _CODES:
        raise BuildError(f"SIF has no code for the architecture {arch!r}")
    _, start = _front(definition, jsons)
    front = bytes(_DATA) + definition + b"".join(content for _, content in jsons)
    out.seek(0)
    out.write(front.ljust(start, b"\0"))
    return start


def finish_sif(
    out: BinaryIO, definition: bytes, jsons: Sequence[tuple[str, bytes]], arch: str, *, partition_size: int, mtime: int
) -> None:
    """Write the header and the descriptors after the squashfs. `out` is left at its end.

    The first arguments are those of `write_sif_front`. The bytes depend on the arguments alone: the image's identifier
    is derived from them, and every timestamp is `mtime`.
    """
    front, start = _front(definition, jsons)
    end = start + partition_size
    root = Object(PARTITION, "", start, partition_size, "squashfs", arch, True)
    descriptors = bytearray()
    last = _DATA
    for number, item in enumerate([*front, root], 1):
        extra = _PARTITION.pack(_SQUASHFS, _PRIMARY, _CODES[arch]) if item.primary else b""
        padded = item.offset + item.size - last
        descriptors += DESCRIPTOR.pack(
            NUMBERS[item.kind],
            1,
            number,
            GROUP,
            0,
            item.offset,
            item.size,
            padded,
            mtime,
            mtime,
            0,
            0,
            item.name.encode(),
            extra,
        )
        last = item.offset + item.size
    free = _SLOTS - len(front) - 1
    header = HEADER.pack(
        _LAUNCH,
        _MAGIC,
        _VERSION,
        _CODES[arch],
        _identifier(definition, jsons, arch, partition_size).bytes,
        mtime,
        mtime,
        free,
        _SLOTS,
        _PAGE,
        _SLOTS * DESCRIPTOR.size,
        _DATA,
        end - _DATA,
    )
    out.seek(0)
    out.write(header.ljust(_PAGE, b"\0") + descriptors)
    out.seek(end)


def write_sif(
    squashfs: Path,
    path: Path,
    *,
    arch: str,
    definition: str = "",
    objects: Sequence[tuple[str, bytes]] = (),
    mtime: int = 0,
) -> None:
    """Write a SIF around the file `squashfs` to `path`, atomically.

    `arch` is x86_64 or aarch64, `definition` the text of the definition file, `objects` JSON objects by their names.
    The bytes depend on the arguments and the squashfs alone. Raises BuildError and OSError.
    """
    size, text = squashfs.stat().st_size, definition.encode()
    with replacing_beside(path, 0o755) as image, squashfs.open("rb") as source, image.open("r+b") as out:
        start = write_sif_front(out, text, objects, arch)
        out.flush()
        copy_span(source.fileno(), out.fileno(), 0, start, size, lambda _: None)
        finish_sif(out, text, objects, arch, partition_size=size, mtime=mtime)


def read_sif(stream: BinaryIO, where: str) -> Sif:
    """Return the objects of the SIF in the seekable `stream`.

    Raises BuildError, naming `where`, when it is damaged, or its root is not a plain squashfs.
    """
    size = stream.seek(0, 2)
    head = _read(stream, 0, HEADER.size, size, where)
    _, magic, version, code, _, _, mtime, free, total, at, _, _, _ = HEADER.unpack(head)
    if magic != _MAGIC:
        raise BuildError(f"{where}: not a SIF")
    if version != _VERSION:
        raise BuildError(f"{where}: a SIF of unknown version {_text(version)!r}")
    if not 0 < total <= _MAX_SLOTS or not 0 <= free < total:
        raise BuildError(f"{where}: damaged: {total} descriptors, {free} of them free")
    raw = _read(stream, at, total * DESCRIPTOR.size, size, where)
    objects = [_object(row, size, where) for row in DESCRIPTOR.iter_unpack(raw) if row[1]]
    if len(objects) != total - free:
        raise BuildError(f"{where}: damaged: {len(objects)} objects, but {total - free} are announced")
    roots = [item for item in objects if item.primary]
    if len(roots) != 1:
        raise BuildError(f"{where}: a SIF with {len(roots)} primary partitions instead of one")
    if roots[0].fs != "squashfs":
        hint = "an encrypted image can only be read by Apptainer" if "encrypted" in roots[0].fs else None
        raise BuildError(f"{where}: its root is {roots[0].fs}, not squashfs", hint)
    arch = _ARCHITECTURES.get(_text(code), "")
    if arch and roots[0].arch and arch != roots[0].arch:
        raise BuildError(f"{where}: damaged: made for {arch}, with a partition for {roots[0].arch}")
    return Sif(roots[0].arch or arch, tuple(objects), roots[0], max(mtime, 0))


def read_object(stream: BinaryIO, item: Object, where: str) -> bytes:
    """Return the content of a definition or JSON object. Raises BuildError when it is larger than 16 MiB."""
    if item.size > MAX_OBJECT:
        raise BuildError(f"{where}: {item.size} bytes are too many for a {item.kind} object")
    return _read(stream, item.offset, item.size, item.offset + item.size, where)


def _front(definition: bytes, jsons: Sequence[tuple[str, bytes]]) -> tuple[list[Object], int]:
    """Return the objects before the partition, and its offset."""
    if len(jsons) > _SLOTS - 2:
        raise BuildError(f"a SIF holds {_SLOTS} objects at most")
    at = _DATA
    objects = []
    for kind, name, content in [(DEFINITION, "", definition), *((JSON, *pair) for pair in jsons)]:
        if len(name.encode()) > 127:
            raise BuildError(f"{name!r} is too long for the name of an object in a SIF")
        objects.append(Object(kind, name, at, len(content)))
        at += len(content)
    return objects, -(-at // _PAGE) * _PAGE


def _identifier(definition: bytes, jsons: Sequence[tuple[str, bytes]], arch: str, size: int) -> uuid.UUID:
    parts = [b"definition", definition, arch.encode(), str(size).encode()]
    parts += [part for name, content in jsons for part in (name.encode(), content)]
    seen = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts))
    return uuid.uuid5(_SPACE, seen.hexdigest())


def _object(row: tuple[Any, ...], end: int, where: str) -> Object:
    number, _, identifier, _, _, offset, size, _, _, _, _, _, name, extra = row
    if offset < 0 or size < 0 or offset + size > end:
        raise BuildError(f"{where}: damaged: object {identifier!r} lies outside of the file")
    kind = _KINDS.get(number, f"type {number:#x}")
    if kind != PARTITION:
        return Object(kind, _text(name), offset, size)
    system, role, code = _PARTITION.unpack_from(extra)
    fs = _FILE_SYSTEMS.get(system, f"file system number {system}")
    arch = _ARCHITECTURES.get(_text(code), "")
    return Object(kind, _text(name), offset, size, fs, arch, role == _PRIMARY)


def _read(stream: BinaryIO, at: int, size: int, end: int, where: str) -> bytes:
    """Read `size` bytes at `at` from a file of `end` bytes."""
    data = b""
    if at >= 0 and at + size <= end:
        stream.seek(at)
        data = stream.read(size)
    if len(data) != size:
        raise BuildError(f"{where}: cut short: {size} bytes at {at} are not there")
    return data


def _text(data: bytes) -> str:
    return data.split(b"\0")[0].decode("utf-8", "replace")


METADATA = "application/vnd.sylabs.sif-metadata+json"
_SIGNATURE, _JSON = NUMBERS["signature"], NUMBERS[JSON]
_NO_GROUP, _ATTESTED = GROUP - 1, GROUP + 1
_ENDING = b".sigstore.json"
_SHA256 = struct.pack("<i256s", 1, b"")  # of a signature: its hash, and no fingerprint of a PGP key
_CHUNK = 1 << 20
# The parts of a descriptor that a signature covers; the number of its object counts from the first one of its group.
_COVERED = struct.Struct("<iBIIqqqq128s384s")


@dataclass(frozen=True, slots=True)
class _Parts:
    """A SIF without what was added: its header and descriptors, where it ends, and the descriptors of the additions.

    `padding` is between header and descriptors.
    """

    header: tuple[Any, ...]
    padding: bytes
    descriptors: list[tuple[Any, ...]]
    end: int
    added: list[tuple[Any, ...]]

    def front(self) -> bytes:
        """Return the first bytes of the file."""
        rows = b"".join(DESCRIPTOR.pack(*row) for row in self.descriptors)
        return HEADER.pack(*self.header) + self.padding + rows


def content_digest(path: Path) -> str:
    """Return the digest of the content of an image file: of all its bytes, or those of a SIF without its signatures.

    Raises OSError, and BuildError for a damaged SIF.
    """
    with path.open("rb") as stream:
        digest = hashlib.sha256()
        if is_sif(stream.read(64)) and (parts := _parts(stream, path)).added:
            digest.update(front := parts.front())
            _hash(stream, len(front), parts.end - len(front), digest)
            return f"sha256:{digest.hexdigest()}"
        stream.seek(0)
        return f"sha256:{hashlib.file_digest(stream, 'sha256').hexdigest()}"


def embedded(path: Path) -> dict[str, bytes]:
    """Return the attestations in an image file by the names of their objects. Raises OSError and BuildError."""
    with path.open("rb") as stream:
        if not is_sif(stream.read(64)):
            return {}
        rows = [row for row in _parts(stream, path).added if row[0] == _JSON]
        return {_name(row).decode("utf-8", "replace"): _content(stream, row) for row in rows}


def embed(path: Path, out: BinaryIO, attestations: Mapping[str, bytes], sign: Callable[[bytes], bytes] | None) -> bool:
    """Write the SIF at `path` to `out`, a new file, with these attestations, by name, in place of those that it has.

    `sign` returns a DSSE envelope of a payload of the type METADATA; None leaves the signatures out. Returns False,
    without writing, if the file has a signature of another kind (PGP): Apptainer accepts no file with both. Raises
    OSError, BuildError, and what `sign` raises.
    """
    with path.open("rb") as source:
        parts = _parts(source, path)
        if any(row[0] == _SIGNATURE and not _is_ours(_content(source, row)) for row in parts.added):
            return False
        copy_span(source.fileno(), out.fileno(), 0, 0, parts.end, lambda _: None)
    rows, at, time = list(parts.descriptors), parts.end, parts.header[5]

    def add(kind: int, group: int, link: int, name: str, extra: bytes, data: bytes) -> None:
        nonlocal at
        slot = next((number for number, row in enumerate(rows) if not row[1]), None)
        if slot is None or len(data) > MAX_OBJECT:
            raise BuildError(f"{path}: no room for {len(data)} bytes of an attestation")
        out.seek(at)
        out.write(data)
        place = (at, len(data), len(data), time, time, 0, 0)
        rows[slot] = (kind, 1, slot + 1, group, link, *place, name.encode().ljust(128, b"\0"), extra.ljust(384, b"\0"))
        at += len(data)

    for name, data in attestations.items():
        assert name.encode().endswith(_ENDING)
        add(_JSON, _ATTESTED, 0, name, b"", data)
    out.flush()
    for group in (GROUP, _ATTESTED) if sign else ():
        assert sign is not None
        add(_SIGNATURE, _NO_GROUP, group, "", _SHA256, sign(_metadata(out, parts.header, rows, group)))
    header = list(parts.header)
    header[7], header[12] = sum(not row[1] for row in rows), at - header[11]
    out.seek(0)
    out.write(_Parts(tuple(header), parts.padding, rows, at, []).front())
    return True


def _parts(stream: BinaryIO, path: Path) -> _Parts:
    read_sif(stream, str(path))  # raises for a damaged one
    stream.seek(0)
    header = list(HEADER.unpack(stream.read(HEADER.size)))
    total, start = header[8], header[9]
    if not HEADER.size <= start <= _CHUNK:
        raise BuildError(f"{path}: damaged: its descriptors begin at {start}")
    padding = stream.read(start - HEADER.size)
    rows = list(DESCRIPTOR.iter_unpack(stream.read(total * DESCRIPTOR.size)))
    used = [row for row in rows if row[1]]
    end = max(row[5] + row[6] for row in used if not _may_be_added(row))
    added = [row for row in used if _may_be_added(row) and row[5] >= end]
    if added:
        rows = [(0,) * 12 + (bytes(128), bytes(384)) if row in added else row for row in rows]
        header[6], header[7], header[12] = header[5], header[7] + len(added), end - header[11]
    return _Parts(tuple(header), padding, rows, end, added)


def _may_be_added(row: tuple[Any, ...]) -> bool:
    return row[0] == _SIGNATURE or (row[0] == _JSON and row[3] == _ATTESTED and _name(row).endswith(_ENDING))


def _is_ours(signature: bytes) -> bool:
    try:
        return bool(parse_json(signature)["payloadType"] == METADATA)
    except (ValueError, KeyError, TypeError, RecursionError):
        return False


def _metadata(stream: BinaryIO, header: tuple[Any, ...], rows: list[tuple[Any, ...]], group: int) -> bytes:
    """Return what is signed of the objects in `group`: the digests of the header, of their descriptors and contents."""
    members = [row for row in rows if row[1] and row[3] == group]
    first, objects = min(row[2] for row in members), []
    for row in members:
        kind, used, number, _, link, at, size, _, made, _, uid, gid, name, extra = row
        covered = _COVERED.pack(kind, used, number - first, link, size, made, uid, gid, name, extra)
        digest = hashlib.sha256()
        _hash(stream, at, size, digest)
        objects.append(
            {
                "relativeId": number - first,
                "descriptorDigest": f"sha256:{hashlib.sha256(covered).hexdigest()}",
                "objectDigest": f"sha256:{digest.hexdigest()}",
            }
        )
    launch, magic, version, _, identifier = header[:5]
    front = hashlib.sha256(launch + magic + version + identifier).hexdigest()
    return canonical({"version": 1, "header": {"digest": f"sha256:{front}"}, "objects": objects})


def _hash(stream: BinaryIO, at: int, size: int, digest: Any) -> None:
    stream.seek(at)
    while size and (block := stream.read(min(size, _CHUNK))):
        digest.update(block)
        size -= len(block)


def _name(row: tuple[Any, ...]) -> bytes:
    return bytes(row[12]).split(b"\0")[0]


def _content(stream: BinaryIO, row: tuple[Any, ...]) -> bytes:
    stream.seek(row[5])
    return stream.read(min(row[6], MAX_OBJECT))
