"""A root file system as one squashfs, from layers as segments: for enroot, Apptainer and Charliecloud.

The .sqsh and the partition of the .sif are the same squashfs: a runtime ignores the files for the others.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from envbuild.base.atomic import new_file
from envbuild.base.files import sha256_of
from envbuild.base.host import reserve
from envbuild.base.packages import digest_of
from envbuild.base.progress import OnProgress
from envbuild.base.workers import Behind
from envbuild.build.runtime_files import (
    Addition,
    apptainer_files,
    enroot_files,
    inspect_metadata,
    mount_points,
    normalised,
    oci_config,
)
from envbuild.contract.image_manifest import FILE_NAME, SQUASHFS, PathRow, render, row_of
from envbuild.image.entry import FILE, HARDLINK, Entry
from envbuild.image.limits import Quota
from envbuild.image.sif import finish_sif, write_sif_front
from envbuild.image.squashfs.segment import Segment, of_entry, write_segment
from envbuild.image.squashfs.tables import data_start
from envbuild.image.squashfs.write import Choice, choose, estimate, write_image
from envbuild.image.tree import MergedEntry, MergedTree
from envbuild.layers.layer_cache import CachedSegment
from envbuild.layers.segment_cache import SegmentCache
from envbuild.store.pieces import Span

_COPY, _CHUNK = 8 << 20, 1 << 18
_BEHIND = 64  # spans whose bytes are not hashed yet


@dataclass(frozen=True, slots=True)
class SquashTree:
    """The tree to write, with its segments, made by `cache`, and the `choice` of their blocks.

    `config` is the image's OCI configuration (its JSON object), `definition` the text in place of a definition file,
    `arch` x86_64 or aarch64, `mtime` the time of the file system in seconds since 1970, `size` the maximum size of the
    squashfs in bytes, `file_manifest` the digest of the manifest of its files, "" for a tree that envbuild did not
    build.
    """

    entries: Sequence[MergedEntry]
    segments: Sequence[Segment]
    choice: Choice
    cache: SegmentCache
    config: Mapping[str, Any]
    definition: str
    arch: str
    mtime: int
    size: int
    file_manifest: str


@contextlib.contextmanager
def composed(
    layers: Sequence[CachedSegment],
    cache: SegmentCache,
    config: Mapping[str, Any],
    *,
    provenance: str,
    definition: str,
    arch: str,
    mtime: int,
) -> Iterator[SquashTree]:
    """Yield the tree of `layers` of `cache`, lowest first, with the files that runtimes need. Raises BuildError."""
    merging = MergedTree(Quota(cache.limits))
    for layer in layers:
        merging.add(layer.title, layer.segment.members)
    added = enroot_files(config, provenance, mtime) + apptainer_files(config, definition, mtime)
    # A file replaces an existing one; a folder or link is added only if nothing has its path.
    added = [item for item in added if item[0].kind == FILE or not merging.has(item[0].path)]
    paths = {entry.path for entry, _ in added}
    added += mount_points(lambda path: path in paths or merging.has(path), mtime)
    segments = [layer.segment for layer in layers]
    with ExitStack() as stack:

        def add(title: str, items: Sequence[Addition]) -> None:
            readable = ((of_entry(e), None if data is None else io.BytesIO(data)) for e, data in items)
            _, path = stack.enter_context(new_file(cache.store.folder("segments"), ".new-"))
            segment = write_segment(readable, path, cache.codec, 1)
            merging.add(title, segment.members)
            segments.append(segment)

        add("what runtimes need", added)
        entries, digest = list(_normalised(merging.entries())), ""
        if merging.has(FILE_NAME):
            # The one in the last layer is of the layers, and not of this tree.
            text = render(SQUASHFS, _rows_of(entries, segments))
            digest, made = digest_of(text), Entry(FILE_NAME, FILE, 0o644, len(text), mtime=mtime)
            add("the manifest", [(made, text)])
            # All other entries stay as they are, so the tree is not walked again.
            entries = [
                MergedEntry(normalised(made) or made, len(segments) - 1, 0) if entry.entry.path == FILE_NAME else entry
                for entry in entries
            ]
        choice = choose(entries, segments)
        size = estimate(entries, choice)
        yield SquashTree(entries, segments, choice, cache, config, definition, arch, mtime, size, digest)


def _rows_of(entries: Sequence[MergedEntry], segments: Sequence[Segment]) -> dict[str, PathRow]:
    """Return the rows of a tree, in which hard links follow their files and every file has its sha256."""
    rows: dict[str, PathRow] = {}
    for merged in entries:
        entry = merged.entry
        if entry.kind == HARDLINK and (first := rows.get(entry.target)):
            rows[entry.path] = first
        elif entry.path:
            sha256 = segments[merged.layer].members[merged.member].sha256 if entry.kind == FILE else ""
            rows[entry.path] = row_of(entry, sha256, entry.target)
    return rows


def _normalised(entries: Mapping[str, MergedEntry]) -> Iterator[MergedEntry]:
    """Yield the entries for unprivileged users; if a file's first name is left out, its next name becomes the file."""
    moved: dict[str, str] = {}
    for path, merged in entries.items():
        entry = merged.entry
        if entry.kind == HARDLINK:
            first = entry.target
            origin = entries[first].entry
            if normalised(origin) is None:
                own = replace(origin, path=path)
                if normalised(own) is None:
                    continue
                entry = replace(entry, target=moved[first]) if first in moved else own
                moved.setdefault(first, path)
        kept = normalised(entry)
        if kept is not None:
            yield MergedEntry(kept, merged.layer, merged.member)


def write_sqsh(
    root: SquashTree, out: BinaryIO, on_progress: OnProgress, squashfs: Path | None = None
) -> tuple[int, str]:
    """Write the squashfs to `out`, a new file; returns as `write_sif`. Raises BuildError (too little disk space)."""
    reserve(out, root.size)
    return 0, _write(root, out, 0, on_progress, out.truncate)


def spans_of(root: SquashTree, base: int) -> list[Span]:
    """Return the parts of a file, with its squashfs at `base`, that were copied from segments in the store."""
    at, spans = base + data_start(root.cache.codec), []
    for layer, start, size in root.choice.spans:
        path = root.segments[layer].path
        if path.suffix == ".data":  # those of the image's own files are temporary
            spans.append((at, path.stem, start, size))
        at += size
    return spans


def write_sif(
    root: SquashTree, out: BinaryIO, on_progress: OnProgress, squashfs: Path | None = None
) -> tuple[int, str]:
    """Write the SIF to `out`, a new file, with `squashfs` if it was written already. Raises BuildError and OSError.

    Returns the offset of the squashfs, and the file's digest.
    """
    definition = root.definition.encode()
    jsons = [
        ("inspect-metadata.json", inspect_metadata(root.config, root.definition)),
        ("oci-config.json", oci_config(root.config)),
    ]
    start = write_sif_front(out, definition, jsons, root.arch)
    reserve(out, start + (squashfs.stat().st_size if squashfs else root.size))

    def finish(end: int) -> None:
        out.truncate(end)
        finish_sif(out, definition, jsons, root.arch, partition_size=end - start, mtime=root.mtime)

    if not squashfs:
        return start, _write(root, out, start, on_progress, finish)
    out.seek(start)
    with squashfs.open("rb") as stream:
        shutil.copyfileobj(stream, out, _COPY)
    finish(out.tell())
    out.flush()
    return start, f"sha256:{sha256_of(out.name)}"


# The writer of each format of image files.
WRITERS = {"squashfs": write_sqsh, "sif": write_sif}


def _write(root: SquashTree, out: BinaryIO, base: int, on_progress: OnProgress, finish: Callable[[int], object]) -> str:
    """Write the squashfs at `base`, and return the digest of `out`, which a thread computes during the writing.

    `finish` is called with the end of `out` when everything except the copied data is written.
    """
    cache, sha256, at, chunk = root.cache, hashlib.sha256(), 0, memoryview(bytearray(_CHUNK))
    with contextlib.closing(Behind(_BEHIND)) as hashing:

        def hash_until(end: int) -> None:
            nonlocal at
            while count := os.preadv(out.fileno(), [chunk[: min(_CHUNK, end - at)]], at):
                sha256.update(chunk[:count])
                at += count

        def framed(size: int) -> Callable[[int], None]:
            finish(base + size)
            return lambda end: hashing.submit(hash_until, end)

        size = write_image(
            root.entries,
            root.segments,
            out,
            base,
            cache.codec,
            root.mtime,
            cache.workers,
            on_progress,
            root.choice,
            arrived=cache.arrived,
            framed=framed,
        )
        for segment in root.segments:
            cache.wait(segment)
        hashing.submit(hash_until, base + size)
        hashing.finish()
    return f"sha256:{sha256.hexdigest()}"
