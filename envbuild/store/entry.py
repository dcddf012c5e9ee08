"""Entries of a remote cache: the files of one result in the store, as a manifest in a registry.

It is an image manifest with an artifact type and an empty configuration (OCI image specification 1.1, "Guidelines for
Artifact Usage"); its tag is the kind of the result and the digest of its inputs, its layers are the files. An entry is
signed by an in-toto statement on the sha256 of its files whose predicate is kind and key. Without signers, everybody
who may write to the registry is trusted; the files' own seals, which contain their names, then tell entries that were
mixed up.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from envbuild.base.files import parse_json
from envbuild.base.packages import digest_of, is_digest
from envbuild.image.model import artifact_manifest

if TYPE_CHECKING:
    from securesystemslib.signer import Key, Signer

T = TypeVar("T")
# The files of an entry in the store, by its kind; `{}` is its key. The last one marks a complete result.
KINDS = {
    "layer": ("layers/{}.members", "layers/{}.json"),
    "segment": ("segments/{}.data", "segments/{}.json", "segments/{}.index"),
    "builder": ("builders/{}.sqsh", "builders/{}.json"),
    "built": ("partial/built-{}.tar.gz",),
    "wheel": ("facts/{}.json",),
    "conda": ("conda/images/{}.json",),
    "recipe": ("partial/recipe-{}.json",),
}
# Further files of an entry, by its kind; HEX is the file's sha256. A lock's are its inputs, and its recipes. A Python's
# is its archive.
_FURTHER = {
    "layer": "blobs/sha256/HEX",
    "python": "sources/HEX/[^/]+",
    "lock": r"blobs/sha256/HEX|(wheels|conda/archives|sources)/HEX/[^/]+|recipes/[0-9a-f]{64}/.+",
}
FILE_TYPE = "application/vnd.envbuild.file.v1"
_PREDICATE = "urn:envbuild:cache-entry:1"
_TITLE, _SIGNATURE, _SECONDS = "org.opencontainers.image.title", "org.envbuild.signature", "org.envbuild.seconds"
# Increase it when the bytes of layers change although their inputs do not.
_KEY_FORMAT = 1


def key_of(kind: str, inputs: object) -> str:
    """Return the digest of a layer's inputs (hexadecimal)."""
    return hashlib.sha256(json.dumps([_KEY_FORMAT, kind, inputs]).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """A result in the store: its `kind` in KINDS, "lock" or "python", and the digest of its inputs, or its name."""

    kind: str
    key: str

    @property
    def tag(self) -> str:
        """The tag of the entry in the registry."""
        return f"{self.kind}-{self.key}"

    @property
    def artifact_type(self) -> str:
        """The type of the manifest."""
        return f"application/vnd.envbuild.{self.kind}.v1"

    @property
    def files(self) -> tuple[str, ...]:
        """The files' paths in the store."""
        return tuple(name.format(self.key) for name in KINDS.get(self.kind, ()))


@dataclass(frozen=True, slots=True)
class EntryFile:
    """A file of an entry: its path in the store, sha256 (sha256:…), size in bytes, and its content if known."""

    name: str
    digest: str
    size: int
    content: bytes | None = None


class ResultCache(Protocol):
    """A remote cache with results of other hosts."""

    def expect(self, entries: Sequence[CacheEntry]) -> None:
        """Begin to fetch `entries`, for which `bring` will be called."""
        ...

    def bring(self, entry: CacheEntry, *, whole: bool = True) -> bool:
        """Fetch `entry` into the store, and return whether the cache had it; the caller checks its content.

        Without `whole`, return a segment before its data have come: a second call with `whole` waits for them.
        """
        ...

    def bring_part(self, entry: CacheEntry, place: Path, end: int) -> bool:
        """Wait until the file `place` has the first `end` bytes of the last file of `entry` that is fetched.

        Returns False if the caller must wait for `bring`, which later reports whether these bytes were correct.
        """
        ...

    def refuse(self, entry: CacheEntry) -> None:
        """Count the fetched `entry` as refused: its content is wrong, and this host makes it again."""
        ...

    def offer(self, entry: CacheEntry, seconds: float, blobs: Sequence[str] = ()) -> None:
        """Begin to upload `entry`, which was made in `seconds`, with `blobs` of the store (digests)."""
        ...


def fetched(entry: CacheEntry, remote: ResultCache | None, known: Callable[[], T | None]) -> T | None:
    """Return what `known` finds after `remote` fetched `entry`; None if the cache has no valid one (logged)."""
    if remote is None:
        return None
    brought = remote.bring(entry)
    value = known()  # another process may have fetched it too
    if value is None and brought:
        remote.refuse(entry)
    return value


def shared(
    entry: CacheEntry,
    remote: ResultCache | None,
    known: Callable[[], T | None],
    make: Callable[[], T],
    blobs: Callable[[T], Sequence[str]] = lambda _: (),
) -> T:
    """Return what `known` finds in the store, fetched from the cache `remote` if that has it; else `make` it.

    A new result is offered to the cache, with its `blobs`.
    """
    if (value := known()) is not None or (value := fetched(entry, remote, known)) is not None:
        return value
    begun = time.monotonic()
    made = make()
    if remote is not None:
        remote.offer(entry, time.monotonic() - begun, blobs(made))
    return made


def render_entry(entry: CacheEntry, files: Sequence[EntryFile], seconds: float, signer: Signer | None) -> bytes:
    """Return the manifest of `entry`, signed if there is a signer."""
    annotations = {_SECONDS: f"{seconds:.3f}"}
    if signer is not None:
        from envbuild.trust.bundle import sign

        annotations[_SIGNATURE] = sign(_statement(entry, files), signer).decode()
    layers = []
    for file in files:
        row: dict[str, Any] = {"mediaType": FILE_TYPE, "digest": file.digest, "size": file.size}
        if file.content is not None:
            row["data"] = base64.b64encode(file.content).decode()
        layers.append({**row, "annotations": {_TITLE: file.name}})
    return artifact_manifest(entry.artifact_type, layers, annotations=annotations)


def _statement(entry: CacheEntry, files: Sequence[EntryFile]) -> bytes:
    from envbuild.trust.bundle import statement

    return statement({file.name: file.digest for file in files}, _PREDICATE, {"kind": entry.kind, "key": entry.key})


def read_entry(raw: bytes, entry: CacheEntry, signers: Sequence[Key] = ()) -> tuple[list[EntryFile], float]:
    """Return the files of `entry` in the order in which they are put in place, and the seconds that it took to make.

    Raises ValueError for a manifest of another entry, and for one without a signature of `signers`, if there are any.
    """
    try:
        manifest = parse_json(raw)
        if manifest["artifactType"] != entry.artifact_type:
            raise ValueError(f"it is {manifest['artifactType']!r:.80}")
        files = {file.name: file for file in map(_read_file, manifest["layers"])}
        annotations = manifest["annotations"]
        seconds = float(annotations[_SECONDS])
        bundle = annotations.get(_SIGNATURE)
    except (KeyError, TypeError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"its manifest is invalid: {error!r:.80}") from error
    further = [file for file in files.values() if is_further(file, entry)]
    if files.keys() != {*entry.files, *(file.name for file in further)} or len(files) != len(manifest["layers"]):
        raise ValueError("it has other files")
    if signers:
        _check_signature(bundle, entry, list(files.values()), signers)
    ordered = [*further, *(files[name] for name in entry.files)]
    return ordered, seconds if 0 <= seconds < 1e6 else 0.0


def is_further(file: EntryFile, entry: CacheEntry) -> bool:
    form = _FURTHER.get(entry.kind, "").replace("HEX", file.digest.partition(":")[2])
    return re.fullmatch(form, file.name) is not None and ".." not in file.name.split("/")


def _read_file(row: Mapping[str, Any]) -> EntryFile:
    digest, size, data = row["digest"], row["size"], row.get("data")
    if not is_digest(digest) or type(size) is not int or size < 0:
        raise ValueError("a file without digest or size")
    content = None if data is None else base64.b64decode(data, validate=True)
    if content is not None and (len(content), digest_of(content)) != (size, digest):
        raise ValueError("a file whose digest does not match")
    return EntryFile(str(row["annotations"][_TITLE]), digest, size, content)


def _check_signature(bundle: Any, entry: CacheEntry, files: Sequence[EntryFile], signers: Sequence[Key]) -> None:
    from envbuild.trust.bundle import opened

    if not isinstance(bundle, str):
        raise ValueError("it is not signed")
    signed_statement, by = opened(bundle.encode(), signers)
    if by is None:
        raise ValueError("no signer of the cache has signed it")
    expected = json.loads(_statement(entry, files))
    if any(signed_statement.get(key) != expected[key] for key in ("subject", "predicateType", "predicate")):
        raise ValueError("its signature belongs to another entry")
