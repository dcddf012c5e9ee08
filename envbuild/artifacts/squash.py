"""A root file system for enroot, Apptainer and Charliecloud: one squashfs, from layers as segments.

The same squashfs is the .sqsh and the partition of the .sif: files for one runtime do not disturb the others.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from envbuild.artifacts.apptainer import apptainer_files, inspect_metadata, mount_points, oci_config
from envbuild.artifacts.enroot import enroot_files, normalised
from envbuild.disk_space import reserve
from envbuild.image.entry import FILE, HARDLINK
from envbuild.image.merge import MergedEntry, Merging
from envbuild.image.sif import finish_sif, write_sif_front
from envbuild.image.squashfs.segment import Segment, of_entry, write_segment
from envbuild.image.squashfs.write import estimate, write_image
from envbuild.layers.segments import CachedSegment, SegmentCache
from envbuild.progress import OnProgress

_COPY = 8 << 20


@dataclass(frozen=True, slots=True)
class SquashTree:
    """The tree to write, over its segments, which `maker` made.

    `config` is the image's OCI configuration (its JSON object), `definition` the text in place of a definition file,
    `arch` x86_64 or aarch64, `mtime` the time of the file system in seconds since 1970, `size` the maximum size of the
    squashfs in bytes.
    """

    entries: Sequence[MergedEntry]
    segments: Sequence[Segment]
    maker: SegmentCache
    config: Mapping[str, Any]
    definition: str
    arch: str
    mtime: int
    size: int


@contextlib.contextmanager
def composed(
    layers: Sequence[CachedSegment], maker: SegmentCache, config: Mapping[str, Any], *,
    provenance: str, definition: str, arch: str, mtime: int,
) -> Iterator[SquashTree]:  # fmt: skip
    """Yield the tree of `layers` of `maker`, lowest first, with the files that runtimes need.

    The added files are in a temporary file in the store meanwhile. Raises BuildError for invalid layers or an invalid
    configuration.
    """
    merging = Merging()
    for layer in layers:
        merging.add(layer.title, layer.segment.members)
    added = enroot_files(config, provenance, mtime) + apptainer_files(config, definition, mtime)
    # A file replaces an existing one; a folder or link is added only if nothing has its path.
    added = [item for item in added if item[0].kind == FILE or not merging.has(item[0].path)]
    paths = {entry.path for entry, _ in added}
    added += mount_points(lambda path: path in paths or merging.has(path), mtime)
    handle, name = tempfile.mkstemp(dir=maker.store.folder("segments"), prefix=".new-")
    os.close(handle)
    try:
        items = ((of_entry(e), None if data is None else io.BytesIO(data)) for e, data in added)
        segment = write_segment(items, Path(name), maker.codec, 1)
        merging.add("what runtimes need", segment.members)
        entries = list(_normalised(merging.entries()))
        segments = [*(layer.segment for layer in layers), segment]
        yield SquashTree(entries, segments, maker, config, definition, arch, mtime, estimate(entries, segments))
    finally:
        Path(name).unlink(missing_ok=True)


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


def write_sqsh(root: SquashTree, out: BinaryIO, on_progress: OnProgress) -> None:
    """Write the squashfs to `out`, a new file. Raises BuildError (too little disk space) and OSError."""
    reserve(out, root.size)
    out.truncate(_write(root, out, 0, on_progress))


def write_sif(root: SquashTree, out: BinaryIO, on_progress: OnProgress, squashfs: Path | None = None) -> None:
    """Write the SIF to `out`, a new file, with `squashfs` if it was written already. Raises BuildError and OSError."""
    definition = root.definition.encode()
    jsons = [
        ("inspect-metadata.json", inspect_metadata(root.config, root.definition)),
        ("oci-config.json", oci_config(root.config)),
    ]
    start = write_sif_front(out, definition, jsons, root.arch)
    reserve(out, start + (squashfs.stat().st_size if squashfs else root.size))
    if squashfs:
        out.seek(start)
        with squashfs.open("rb") as stream:
            shutil.copyfileobj(stream, out, _COPY)
            size = stream.tell()
    else:
        size = _write(root, out, start, on_progress)
    out.truncate(start + size)
    finish_sif(out, definition, jsons, root.arch, partition_offset=start, partition_size=size, mtime=root.mtime)


def _write(root: SquashTree, out: BinaryIO, base: int, on_progress: OnProgress) -> int:
    maker = root.maker
    return write_image(root.entries, root.segments, out, base, maker.codec, root.mtime, maker.workers, on_progress)
