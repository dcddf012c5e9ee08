"""The listing of one layer's content, read in one pass and cached by the digest of the layer's tar."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from envbuild.atomic import replacing
from envbuild.errors import BuildError
from envbuild.image.compression import Hashed
from envbuild.image.entry import FILE
from envbuild.image.tar_stream import Member, PositionedStream
from envbuild.image.untar import Slice, Unpacked, members
from envbuild.inspect.metadata import MAX_SIZE, Note, interest
from envbuild.store.store import Store

# Increase it when the cached data changes its form or meaning.
FORMAT = 2
_CHUNK = 1 << 20


@dataclass(frozen=True, slots=True)
class LayerListing:
    """The members of a layer in their order.

    By member number: the sha256 of each file's content, the files that begin with `#!`, and the notes of
    `interest`.
    """

    members: tuple[Member, ...]
    sha256: dict[int, str] = field(default_factory=dict)
    scripts: frozenset[int] = frozenset()
    notes: dict[int, Note] = field(default_factory=dict)


def remembered(diff_id: str, store: Store) -> LayerListing | None:
    """Return the cached listing of the layer whose tar has the digest `diff_id`, None if it was never read."""
    return _known(_place(store, diff_id))


def listing(diff_id: str, name: str, start: Callable[[], BinaryIO], store: Store) -> LayerListing:
    """Read the layer that `start` opens, and cache its listing under `diff_id`, the digest of its tar.

    `name` is for messages. Raises BuildError for a layer that is damaged or is not `diff_id`.
    """
    try:
        with start() as stream:
            made = read_listing(stream, name, diff_id)
    except OSError as error:
        raise BuildError(f"{name}: cannot be read: {error.strerror}") from error
    # If the store is not writable, the layer is read again next time.
    with contextlib.suppress(OSError, BuildError):
        store.folder("listings")
        _write(_place(store, diff_id), made)
    return made


def read_listing(stream: BinaryIO, name: str, diff_id: str) -> LayerListing:
    """Read a layer's tar from start to end. Raises BuildError when its digest is not `diff_id`."""
    with contextlib.closing(Hashed(stream)) as hashed:
        source = PositionedStream(cast(BinaryIO, hashed), name)
        listed: list[Member] = []
        made = LayerListing((), {}, frozenset(), {})
        scripts = set()
        for number, member in enumerate(members(source)):
            listed.append(member)
            if member.kind != FILE:
                continue
            reader = interest(member.name.removeprefix("./").lstrip("/"))
            kept: list[bytes] | None = [] if reader and member.size <= MAX_SIZE else None
            part = Slice(source, member.stored)
            content = part if member.pieces is None else Unpacked(part, member.size, member.pieces)
            digest, head = hashlib.sha256(), b""
            while data := content.read(_CHUNK):
                digest.update(data)
                head = head or data[:2]
                if kept is not None:
                    kept.append(data)
            made.sha256[number] = digest.hexdigest()
            if head == b"#!":
                scripts.add(number)
            if reader and kept is not None:
                made.notes[number] = reader(b"".join(kept))
        source.finish()
        if hashed.finish() != diff_id:
            raise BuildError(f"{name}: damaged, or not the layer that the image's configuration names ({diff_id})")
    return LayerListing(tuple(listed), made.sha256, frozenset(scripts), made.notes)


def _place(store: Store, diff_id: str) -> Path:
    return store.root / "listings" / f"{diff_id.rpartition(':')[2]}.json.gz"


def _write(path: Path, made: LayerListing) -> None:
    rows = [
        [m.name, m.kind, m.mode, m.uid, m.gid, m.size, m.link, m.device,
         [[name, value.hex()] for name, value in m.xattrs], made.sha256.get(n, ""), n in made.scripts]
        for n, m in enumerate(made.members)
    ]  # fmt: skip
    data = {"format": FORMAT, "members": rows, "notes": list(made.notes.items())}
    with replacing(path) as temporary:
        temporary.write_bytes(gzip.compress(json.dumps(data).encode(), 1, mtime=0))


def _known(path: Path) -> LayerListing | None:
    try:
        data = json.loads(gzip.decompress(path.read_bytes()))
        if data["format"] != FORMAT:
            return None
        rows: list[Any] = data["members"]
        notes = {int(number): note for number, note in data["notes"]}
        return LayerListing(
            tuple(_member(row) for row in rows),
            {n: row[9] for n, row in enumerate(rows) if row[9]},
            frozenset(n for n, row in enumerate(rows) if row[10]),
            notes,
        )
    except (OSError, ValueError, KeyError, TypeError, IndexError, EOFError):
        return None  # missing or damaged: it is only a cache


def _member(row: list[Any]) -> Member:
    name, kind, mode, uid, gid, size, link, device, xattrs = row[:9]
    return Member(
        name, kind, mode, uid, gid, 0, size, link, (device[0], device[1]),
        xattrs=tuple((key, bytes.fromhex(value)) for key, value in xattrs),
    )  # fmt: skip
