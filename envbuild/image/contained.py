"""The files of an image, read from its blobs without unpacking."""

from __future__ import annotations

import posixpath
from functools import partial
from typing import BinaryIO

from envbuild.image.blobs import Blobs
from envbuild.image.compression import decompressed
from envbuild.image.entry import FILE, HARDLINK, SYMLINK
from envbuild.image.merge import LayerSource, Merged, merge
from envbuild.image.model import Descriptor
from envbuild.image.pulled import Pulled

_MOST_LINKS = 40


def open_image(pulled: Pulled) -> Merged:
    """Return the final tree of an image. Raises BuildError when its layers cannot be merged."""
    return merge([layer_source(blob, pulled.blobs) for blob in pulled.manifest.layers])


def layer_source(blob: Descriptor, blobs: Blobs) -> LayerSource:
    """Return a layer's name for messages and a function that opens its tar."""
    return blob.digest, partial(_open, blobs, blob.digest)


def has_file(tree: Merged, path: str) -> bool:
    """Return whether `path` leads to a regular file; symbolic links are resolved within the image."""
    for _ in range(_MOST_LINKS):
        found = _resolve_parents(tree, path)
        entry = tree.entries.get(found)
        if entry is None:
            return False
        if entry.entry.kind != SYMLINK:
            return entry.entry.kind in (FILE, HARDLINK)
        path = _target(found, entry.entry.target)
    return False


def _resolve_parents(tree: Merged, path: str) -> str:
    """Return `path` with symbolic links among its parent folders resolved."""
    done = ""
    for _ in range(_MOST_LINKS):
        parts = path.split("/")
        done = ""
        for number, part in enumerate(parts[:-1]):
            here = f"{done}/{part}".strip("/")
            entry = tree.entries.get(here)
            if entry is not None and entry.entry.kind == SYMLINK:
                rest = "/".join(parts[number + 1 :])
                path = posixpath.normpath(f"{_target(here, entry.entry.target)}/{rest}").lstrip("/")
                break
            done = here
        else:
            return path
    return path


def _target(link: str, text: str) -> str:
    """Return the target of a link at `link`, as a path from the image's root; it cannot lead above the root."""
    start = "/" if text.startswith("/") else f"/{posixpath.dirname(link)}"
    return posixpath.normpath(posixpath.join("/", start, text)).lstrip("/")


def _open(blobs: Blobs, digest: str) -> BinaryIO:
    return decompressed(blobs.path(digest).open("rb"), digest)
