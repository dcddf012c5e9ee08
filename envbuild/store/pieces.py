"""Image files in registries, in the pieces that their images share: the segments of their layers, and the rest.

The manifest is an artifact manifest (OCI image specification 1.1). Its configuration says which bytes of which blob the
file consists of, in order; its layers are the segments, the rest (headers, repacked blocks and tables), the receipt and
its attestation. A node that has the segments of another version fetches only the missing segments and the rest, and
writes the same bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from envbuild.base.errors import BuildError
from envbuild.base.files import copy_span, parse_json
from envbuild.base.packages import is_digest
from envbuild.base.progress import OnProgress
from envbuild.cache.hashed import read_note, write_note
from envbuild.image.model import Descriptor, artifact_manifest
from envbuild.image.squashfs.segment import stored_digest
from envbuild.store.store import Store

ARTIFACT = "application/vnd.envbuild.artifact.v1"
CONFIG = "application/vnd.envbuild.artifact.config.v1+json"
PIECE, RECEIPT = "application/vnd.envbuild.piece.v1", "application/vnd.envbuild.receipt.v1"
INPUT = "application/vnd.envbuild.input.v1"  # a file that the build of an environment reads
# Bytes of a file from a segment: their offset in the file, the segment's name in the store, offset there, and size.
Span = tuple[int, str, int, int]


@dataclass(frozen=True, slots=True)
class FilePieces:
    """An image file: the name of its kind, file name, target, digest and size, and its pieces in order.

    A piece is the digest of a blob, an offset in it, and a number of bytes.
    """

    kind: str
    name: str
    target: str
    digest: str
    size: int
    pieces: tuple[tuple[str, int, int], ...]


def note_spans(store: Store, digest: str, spans: Sequence[Span]) -> None:
    """Record which parts of the file with this digest come from segments."""
    with suppress(OSError, BuildError):  # a push without it sends the whole file
        store.folder("maps")
        write_note(_map(store, digest), {"spans": spans})


def known_spans(store: Store, digest: str) -> tuple[list[Span], dict[str, str]]:
    """Return the parts of a file that come from segments in `store`, and name → sha256:… of these segments."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        path = _map(store, digest)
        spans = [(int(at), str(name), int(start), int(size)) for at, name, start, size in read_note(path)["spans"]]
        store.note_use(path, path)
        known = {name: stored(store, name) for name in {span[1] for span in spans}}
        digests = {name: f"sha256:{digest}" for name, digest in known.items() if segment_file(store, name, digest)}
        return [span for span in spans if span[1] in digests], digests
    return [], {}


def _map(store: Store, digest: str) -> Path:
    return store.root / "maps" / f"{digest.partition(':')[2]}.json"


def stored(store: Store, name: str) -> str:
    """Return the sha256 (hexadecimal) of the data of the segment `name`, "" if the store does not have it."""
    return stored_digest(store.root / "segments" / f"{name}.index")


def segment_file(store: Store, name: str, sha256: str) -> Path | None:
    """Return the file of the segment `name` if it has this sha256 (hexadecimal), which is not ""."""
    path = store.root / "segments" / f"{name}.data"
    return path if sha256 and path.is_file() and store.digests.keep(path, sha256) else None


def split(
    file: Path, spans: Sequence[Span], digests: Mapping[str, str], rest: Path, size: int
) -> list[tuple[str | None, int, int]]:
    """Write the bytes of `file` that no span has to `rest`; return all pieces, None for the digest of the rest.

    `digests` maps segment names to digests. Raises OSError, and EOFError for a file that is cut short.
    """
    pieces: list[tuple[str | None, int, int]] = []
    with file.open("rb") as source, rest.open("wb") as out:

        def keep(start: int, end: int) -> None:
            if end > start:
                pieces.append((None, out.tell(), end - start))
                copy_span(source.fileno(), out.fileno(), start, out.tell(), end - start, lambda _: None)
                out.seek(0, 2)

        position = 0
        for at, name, start, count in spans:
            keep(position, at)
            pieces.append((digests[name], start, count))
            position = at + count
        keep(position, size)
    return pieces


def render(config: Descriptor, blobs: Sequence[Descriptor]) -> bytes:
    """Return the manifest of an artifact."""
    return artifact_manifest(ARTIFACT, [blob.as_json() for blob in blobs], config)


def is_pushed(raw: bytes) -> bool:
    """Return whether a manifest is an artifact's, and not an image's."""
    try:
        return bool(parse_json(raw).get("artifactType") == ARTIFACT)
    except (ValueError, AttributeError):
        return False


def read_manifest(raw: bytes, where: str) -> tuple[Descriptor, list[Descriptor]]:
    """Return the configuration and the blobs of an artifact's manifest. Raises BuildError for another manifest."""
    try:
        manifest = parse_json(raw)
        if manifest.get("artifactType") != ARTIFACT:
            raise BuildError(
                f"{where}: no artifact that `envbuild push` wrote",
                f"to use a container image, convert it: envbuild enroot --from docker://{where}",
            )
        config, *blobs = [
            Descriptor(str(row["mediaType"]), row["digest"], row["size"])
            for row in (manifest["config"], *manifest["layers"])
        ]
        if not all(
            is_digest(descriptor.digest) and type(descriptor.size) is int and descriptor.size >= 0
            for descriptor in (config, *blobs)
        ):
            raise ValueError("a digest or a size")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BuildError(f"{where}: invalid manifest: {error!r:.80}") from error
    return config, blobs


def read_pieces(data: bytes, blobs: Sequence[Descriptor], where: str) -> FilePieces:
    """Return the file that a configuration describes, whose pieces lie in `blobs`. Raises BuildError otherwise."""
    sizes = {blob.digest: blob.size for blob in blobs}
    try:
        document = parse_json(data)
        pieces = tuple((str(digest), start, count) for digest, start, count in document["pieces"])
        names = {name: document[name] for name in ("kind", "name", "target", "digest")}
        if not all(isinstance(value, str) for value in names.values()) or not is_digest(document["digest"]):
            raise ValueError("a name or the digest")
        for digest, start, count in pieces:
            if type(start) is not int or type(count) is not int or not 0 <= start <= start + count <= sizes[digest]:
                raise ValueError("a piece beyond its blob")
        taken: Counter[str] = Counter()
        for digest, _, count in pieces:
            taken[digest] += count
        if any(count > sizes[digest] for digest, count in taken.items()):
            raise ValueError("it lists a piece of a blob twice")
        if taken.total() != document["size"]:
            raise ValueError("the sizes of the pieces do not add up to the size of the file")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BuildError(f"{where}: invalid configuration: {error!r:.80}") from error
    return FilePieces(**names, size=document["size"], pieces=pieces)


def compose(file: FilePieces, places: Mapping[str, Path], out: BinaryIO, on_progress: OnProgress) -> None:
    """Write the file to `out` from the blobs at `places`. Raises OSError, and BuildError for one that is cut short."""
    position = 0
    streams: dict[str, BinaryIO] = {}
    try:
        for digest, start, count in file.pieces:
            if digest not in streams:
                streams[digest] = places[digest].open("rb")
            try:
                copy_span(streams[digest].fileno(), out.fileno(), start, position, count, on_progress)
            except EOFError:
                raise BuildError(f"{places[digest]}: cut short", "run the command again to fetch it again") from None
            position += count
    finally:
        for stream in streams.values():
            stream.close()
