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

from envbuild.errors import BuildError
from envbuild.files import write_atomically
from envbuild.image.blobs import Blobs
from envbuild.image.entry import Tree
from envbuild.image.layer import Layer, write_layer
from envbuild.image.model import Descriptor
from envbuild.layers.compose import Part
from envbuild.names import normalise
from envbuild.record import record_digest
from envbuild.store.store import Store

_RECORD = re.compile(r"/site-packages/([^/]+)\.dist-info/RECORD$")


@dataclass(frozen=True, slots=True)
class Made:
    """A layer in the store, its title, and [name, version, digest of the RECORD] of what it installs."""

    layer: Layer
    title: str
    distributions: tuple[tuple[str, str, str], ...] = ()


def blobs_of(store: Store) -> Blobs:
    """The store's image blobs."""
    return Blobs(store.folder("blobs"))


def make_part(part: Part, store: Store, say: Callable[[str], None]) -> Made:
    """The layer of `part`, from the store or made now. Raises BuildError when it cannot be made."""
    blobs, note = blobs_of(store), store.folder("layers") / f"{part.key}.json"
    made = _known(note, part, blobs)
    if made is not None:
        return made
    with _alone(note.with_suffix(".lock")):
        made = _known(note, part, blobs)  # another process may just have made it
        if made is not None:
            return made
        say(f"  layer: {part.title if len(part.title) < 90 else part.title[:88] + ' …'}")
        found: list[tuple[str, str, str]] = []
        try:
            layer = write_layer(_recorded(part.tree(), found), blobs)
            made = Made(layer, part.title, tuple(sorted(found)))
            write_atomically(note, _render(made))
        except OSError as error:
            raise store.unwritable(error) from error
    return made


def _recorded(tree: Tree, found: list[tuple[str, str, str]]) -> Tree:
    """`tree` as it is; each distribution whose RECORD passes by goes to `found`."""
    for entry, content in tree:
        match = _RECORD.search(entry.path)
        if match and content is not None:
            data = content.read(entry.size)
            name, _, version = match[1].partition("-")
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
    try:
        data = json.loads(note.read_text(encoding="utf-8"))
        blob = Descriptor(data["media_type"], data["digest"], data["size"])
        layer = Layer(blob, data["diff_id"], data["unpacked"])
        found = tuple((str(n), str(v), str(r)) for n, v, r in data["distributions"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):  # damaged: it is only a cache
        return None
    return Made(layer, part.title, found) if blobs.has(blob) else None


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Make a layer alone (flock); where there is no flock, two processes may both make it."""
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from error
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
        path.unlink(missing_ok=True)
