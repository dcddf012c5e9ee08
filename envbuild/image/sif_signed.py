"""Attestations inside of a SIF, and the signatures that `apptainer verify --key` and SingularityCE accept.

They lie behind the other objects: the digest of the content is that of the SIF without them, so that neither envbuild's
nor `apptainer sign` makes another artifact of it. Attestations are JSON objects in a group of their own; each group has
a signature. Source: github.com/apptainer/sif, pkg/integrity (metadata.go, dsse.go) and pkg/sif (GetIntegrityReader).
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from envbuild.base.errors import BuildError
from envbuild.base.files import copy_span, parse_json
from envbuild.image.model import canonical
from envbuild.image.sif import DESCRIPTOR, GROUP, HEADER, JSON, MAX_OBJECT, NUMBERS, is_sif, read_sif

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
