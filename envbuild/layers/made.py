"""Layers that were made, kept in the store by their inputs, so that each is made once."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from envbuild.files import write_atomically
from envbuild.image.blobs import Blobs
from envbuild.image.entry import Tree
from envbuild.image.layer import Layer, write_layer
from envbuild.image.model import COMPRESSION, Descriptor, is_digest
from envbuild.layers.compose import Part
from envbuild.names import normalise
from envbuild.record import record_digest
from envbuild.store.store import Store

# In a site-packages folder itself, not in one that a package carries inside.
_RECORD = re.compile(r"(?:(?!site-packages/)[^/]+/)+site-packages/([^/]+)\.dist-info/RECORD")


@dataclass(frozen=True, slots=True)
class Made:
    """A layer in the store, its title, and [name, version, digest of the RECORD] of what it installs."""

    layer: Layer
    title: str
    distributions: tuple[tuple[str, str, str], ...] = ()


def make_part(part: Part, store: Store, say: Callable[[str], None]) -> Made:
    """The layer of `part`, from the store or made now. Raises BuildError when it cannot be made."""
    blobs, note = store.blobs, store.folder("layers") / f"{part.key}.json"
    made = _known(note, part, blobs)
    if made is not None:
        return made
    try:
        with _alone(note.with_suffix(".lock")):
            made = _known(note, part, blobs)  # another process may just have made it
            if made is not None:
                return made
            say(f"  layer: {part.title if len(part.title) < 90 else part.title[:88] + ' …'}")
            found: list[tuple[str, str, str]] = []
            layer = write_layer(_recorded(part.tree(), found), blobs)
            made = Made(layer, part.title, tuple(sorted(found)))
            write_atomically(note, _render(made))
    except OSError as error:
        raise store.unwritable(error) from error
    return made


def _recorded(tree: Tree, found: list[tuple[str, str, str]]) -> Tree:
    """`tree` as it is; each distribution whose RECORD passes by goes to `found`."""
    for entry, content in tree:
        match = _RECORD.fullmatch(entry.path)
        if match and content is not None:
            data = content.read(entry.size)
            name, _, version = match[1].rpartition("-")
            found.append((normalise(name), version, record_digest(data)))
            content = io.BytesIO(data)
        yield entry, content


def _render(made: Made) -> str:
    layer = made.layer
    return json.dumps(
        {
            "media_type": layer.blob.media_type,
            "digest": layer.blob.digest,
            "size": layer.blob.size,
            "diff_id": layer.diff_id,
            "unpacked": layer.unpacked,
            "distributions": made.distributions,
        }
    )


def _known(note: Path, part: Part, blobs: Blobs) -> Made | None:
    """What `note` tells, None unless it is whole and its blob is here: it is only a cache."""
    try:
        data = json.loads(note.read_text(encoding="utf-8"))
        digest, diff_id, size = str(data["digest"]), str(data["diff_id"]), data["size"]
        blob = Descriptor(str(data["media_type"]), digest, size)
        layer = Layer(blob, diff_id, int(data["unpacked"]))
        found = tuple((str(n), str(v), str(r)) for n, v, r in data["distributions"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if blob.media_type not in COMPRESSION or not is_digest(digest) or not is_digest(diff_id):
        return None
    return Made(layer, part.title, found) if blobs.has(blob) else None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Make a layer alone (flock); where there is no flock, two processes may both make it.

    Raises OSError when the lock cannot be opened.
    """
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_EX)
            if not _still(path, lock):
                continue  # whoever held it removed it: others may hold a new one
            try:
                yield
            finally:
                path.unlink(missing_ok=True)  # while it is held
            return
        finally:
            os.close(lock)


def _still(path: Path, lock: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(lock))
    except FileNotFoundError:
        return False
